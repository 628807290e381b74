"""A GEMM and other work at once: beside a background, two that start together, and pipelines of copies and chunks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dse_judge.gemms import LARGE, SMALL, Size, columns, cut, gemm, operands, product
from dse_judge.grids import grid_of, sm_target
from dse_judge.kernels import BUFFER_BYTES, HELD_US, Background, backgrounds, by_engine, by_sms, holding
from dse_judge.timing import (
    SAMPLES,
    Call,
    Part,
    Row,
    calls_in,
    in_turn,
    median_of,
    num_sms,
    repeat,
    stream_of,
    summary,
    time_parts,
    time_queue,
)

LONGER = 3.0  # times as long as the other, so that a background never ends first
MOVERS = [("copy_by_sms", 4), ("copy_by_sms", 8), ("copy_by_sms", 16), ("copy_by_sms", 32), ("engine_to_gpu", 0)]
ORDERS = [("copy first", 0), ("gemm first", 0), ("gemm first", -1)]
"""Which kernel starts first, and the priority of the copy's stream."""


def beside_rows() -> Iterator[Callable[[], Row]]:
    """Each GEMM beside each background; backgrounds that differ most come first."""
    for background in backgrounds():
        # allocated when it is first measured, and kept for all GEMMs
        made: list[Background] = []
        yield from (partial(beside, background, made, size=size) for size in [*LARGE, *SMALL])


def beside(background: Callable[[], Background], backgrounds: list[Background], *, size: Size) -> Row:
    """A GEMM and a background, each alone and each while the other goes on. made: the background, once there is one."""
    if not backgrounds:
        backgrounds.append(background())
    call, other = gemm(size), backgrounds[0]
    counts = calls_in(call), calls_in(other.call)
    measure = _beside_trains if other.lasting is None else partial(_beside_lasting, other.lasting)
    # alone and beside in turn, so that a drift of the clock meets both
    rows = [measure(call, other, counts) for _ in range(7)]
    middle = [statistics.median(times) for times in zip(*rows, strict=True)]
    names = ("gemm_alone_s", "other_alone_s", "gemm_beside_s", "other_beside_s")
    work = {"other": other.name, "sms": other.sms}
    moved = {"bytes_read": other.bytes_read, "bytes_written": other.bytes_written}
    times = dict(zip(names, middle, strict=True))
    return {**columns(size), **work, **moved, **times, "scatter": summary([row[2] for row in rows])[1]}


def _beside_lasting(
    lasting: Callable[[float], Call], call: Call, other: Background, counts: tuple[int, int]
) -> tuple[float, ...]:
    """Each while the other goes on, the background as one launch that has its SMs before the GEMM begins."""
    gemm_s = time_parts([Part(call, counts[0])])[0] / counts[0]
    other_s = time_parts([Part(other.call, counts[1])])[0] / counts[1]
    # in calls of the background: as long as three times all GEMMs
    longer = lasting(LONGER * counts[0] * gemm_s / other_s + 1.0)
    gemm_beside_s = time_parts([Part(longer), Part(call, counts[0], late=True)], own_start=True)[1] / counts[0]
    number = max(1.0, 2.0 * gemm_s / other_s)
    launch = lasting(number)
    # GEMMs that outlast the background, but not the queue
    gemms = min(1000, math.ceil(LONGER * number * other_s / gemm_s) + 1)
    other_alone_s = time_parts([Part(launch)])[0] / number
    other_beside_s = time_parts([Part(launch), Part(call, gemms, late=True)])[0] / number
    return gemm_s, other_alone_s, gemm_beside_s, other_beside_s


def _beside_trains(call: Call, other: Background, counts: tuple[int, int]) -> tuple[float, ...]:
    """Each while the other goes on, both as one launch after the other."""
    pairs = zip((call, other.call), counts, strict=True)
    alone = [time_parts([Part(work, number)])[0] / number for work, number in pairs]
    # calls of each that last three times as long as the other's
    long = [max(1, math.ceil(LONGER * counts[1 - side] * alone[1 - side] / alone[side])) for side in range(2)]
    gemm_s = time_parts([Part(other.call, min(2000, long[1])), Part(call, counts[0])])[1] / counts[0]
    other_s = time_parts([Part(call, min(2000, long[0])), Part(other.call, counts[1])])[1] / counts[1]
    return (*alone, gemm_s, other_s)


def target_rows() -> Iterator[Callable[[], Row]]:
    """Each GEMM beside SMs that are taken, by a cuBLAS that knows of all SMs, or of those that are left."""
    for size in [*LARGE, *SMALL]:
        for sms in (1, 2, 4, 8, 16, 24, 32, 48):
            for left in (0, sms):
                yield partial(beside_with_target, size=size, sms=sms, left=left)


def beside_with_target(*, size: Size, sms: int, left: int) -> Row:
    """A GEMM alone and beside a kernel that holds SMs. left: SMs that cuBLAS is told to leave to others."""
    call, other = gemm(size), holding(sms)
    with sm_target(num_sms() - left):
        grid = grid_of(call)
        count = calls_in(call)
        alone_s = [time_parts([Part(call, count)])[0] / count for _ in range(7)]
        assert other.lasting is not None
        # calls of the holding kernel, which takes SMs for HELD_US each
        longer = other.lasting(LONGER * count * statistics.median(alone_s) / (1e-6 * HELD_US) + 1.0)
        parts = [Part(longer), Part(call, count, late=True)]
        beside_s = [time_parts(parts, own_start=True)[1] / count for _ in range(7)]
    times = {"gemm_alone_s": statistics.median(alone_s), "gemm_beside_s": statistics.median(beside_s)}
    return {**columns(size), "sms": sms, "left": left, **grid, **times, "scatter": summary(beside_s)[1]}


def start_rows() -> Iterator[Callable[[], list[Row]]]:
    """One GEMM and one copy or sum that alone last as long, in both orders."""
    for size in [*LARGE, *SMALL]:
        for kernel in ("copy_by_sms", "add_by_sms"):
            yield from (partial(starts, size=size, kernel=kernel, sms=sms) for sms in (8, 16, 32))


def starts(*, size: Size, kernel: str, sms: int) -> list[Row]:
    """Ends of a GEMM and a copy: the copy first, the GEMM first, the GEMM first and the copy of high priority."""
    call = gemm(size)
    gemm_s = median_of(call, 5)[0]
    # its rate scales the copy to the length of the GEMM
    trial = by_sms(kernel, sms, 8 << 20)
    num_bytes = int((8 << 20) * gemm_s / median_of(trial.call, 5)[0])
    # whole pages, within the buffers that there are
    num_bytes = max(1 << 20, min(BUFFER_BYTES, num_bytes >> 12 << 12))
    other = by_sms(kernel, sms, num_bytes)
    other_s = median_of(other.call, 5)[0]
    rows = []
    for order, priority in ORDERS:
        ends = [_ends(call, other.call, order, priority) for _ in range(SAMPLES)]
        middle = [statistics.median(times) for times in zip(*ends, strict=True)]
        work = {"other": kernel, "sms": sms, "num_bytes": num_bytes, "order": order, "priority": priority}
        times = {"gemm_alone_s": gemm_s, "other_alone_s": other_s, "gemm_end_s": middle[0], "other_end_s": middle[1]}
        rows.append({**columns(size), **work, **times, "both_s": statistics.median(max(end) for end in ends)})
    return rows


def _ends(gemm_call: Call, copy: Call, order: str, priority: int) -> list[float]:
    """Ends of the GEMM and of the copy [s]; the first to start is also queued first."""
    if order == "copy first":
        # ends in the order GEMM, copy
        return time_parts([Part(copy, priority=priority), Part(gemm_call, late=True)])[::-1]
    return time_parts([Part(gemm_call), Part(copy, late=True, priority=priority)])


def pipeline_rows() -> Iterator[Callable[[], Row]]:
    """Copies of a GEMM's input in chunks, each followed by the GEMM of its chunk, on two streams."""
    for size in [*LARGE, (256, 8192, 8192), (512, 14336, 4096)]:
        for mover in MOVERS:
            for cut_as in (("m", 2), ("m", 4), ("m", 8), ("k", 4), ("k", 8)):
                yield partial(pipeline, size=size, cut_as=cut_as, mover=mover)


def pipeline(*, size: Size, cut_as: tuple[str, int], mover: tuple[str, int]) -> Row:
    """Seconds of the pipeline, of all copies and then one GEMM, and of each alone; the input of A is copied."""
    (axis, chunks), (kernel, sms), (m, _, k) = cut_as, mover, size
    # A in bf16, cut along either axis
    num_bytes = 2 * m * k // chunks
    calls = cut(*operands(size), axis, chunks)
    uncut = product(size)
    copy = by_engine("to_gpu", num_bytes).call if kernel == "engine_to_gpu" else by_sms(kernel, sms, num_bytes).call
    # warm up: the first call of each loads its kernel
    for call in (*calls, uncut, copy):
        call()
    runs = {
        "pipeline_s": partial(_pipeline, copy, calls),
        "serial_s": partial(_one_by_one, copy, chunks, uncut),
        "copy_s": partial(repeat, copy, chunks),
        "gemm_s": partial(repeat, uncut, 1),
        "chunks_s": partial(repeat, in_turn(calls), chunks),
    }
    times = {name: statistics.median(time_queue(run) for _ in range(9)) for name, run in runs.items()}
    ways = {"axis": axis, "chunks": chunks, "mover": kernel, "sms": sms, "bytes_copied": num_bytes * chunks}
    return {**columns(size), **ways, **times}


def _pipeline(copy: Call, calls: Sequence[Call]) -> None:
    """Queue copies on a second stream, and each chunk behind its copy."""
    main, second = torch.cuda.current_stream(), stream_of(1, -1)
    # copies begin with the run, not before it
    second.wait_stream(main)
    for call in calls:
        with torch.cuda.stream(second):
            copy()
            arrival = torch.cuda.Event()
            arrival.record(second)
        main.wait_event(arrival)
        call()


def _one_by_one(copy: Call, copies: int, whole: Call) -> None:
    repeat(copy, copies)
    whole()
