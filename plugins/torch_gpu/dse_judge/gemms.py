"""GEMMs alone, in all the ways that a schedule may cut them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from dse_judge.kernels import copies_of, matrix
from dse_judge.timing import (
    DEVICE,
    LAUNCH_S,
    SAMPLES,
    Call,
    Part,
    Row,
    calls_in,
    in_turn,
    median_of,
    num_sms,
    repeat,
    summary,
    time_parts,
    time_queue,
)

Size = tuple[int, int, int]

GEMMS: list[Size] = [
    *((m, n, k) for m in (1, 8, 16, 32, 64, 128, 256, 512) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))),
    *((m, n, k) for m in (64, 256) for n, k in ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (8192, 8192))),
    *((m, n, k) for m in (1024, 2048, 4096, 8192, 16384) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))),
    *((m, n, k) for m in (1024, 2048, 4096, 8192) for n, k in ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))),
    *((m, n, k) for m in (2048, 4096, 8192) for n, k in ((8192, 8192), (28672, 8192), (8192, 28672), (2048, 7168))),
    *((size, size, size) for size in (512, 1024, 1536, 2048, 3072, 5120, 6144, 10240, 12288, 16384)),
    *((16384, 1024, 8192), (16384, 8192, 1024), (16384, 5120, 1280), (16384, 10240, 2560), (4096, 12288, 1536)),
    *((1000, 3000, 2000), (3000, 5000, 4000), (2049, 4097, 4096), (5000, 7168, 2048), (777, 4096, 11008)),
    *((1536, 4096, 4096), (3072, 4096, 4096), (2560, 8192, 8192), (6144, 8192, 1024), (128, 128256, 4096)),
]
LARGE: list[Size] = [
    (8192, 8192, 8192), (8192, 8192, 1024), (8192, 1280, 8192), (4096, 14336, 4096), (4096, 4096, 14336),
    (4096, 4096, 4096), (2048, 8192, 8192), (16384, 1024, 8192), (2048, 4096, 4096), (1024, 14336, 4096),
]  # fmt: skip
SMALL: list[Size] = [(64, 8192, 8192), (128, 8192, 3584), (256, 8192, 8192), (256, 14336, 4096), (512, 4096, 4096)]
GROUPS = [
    (8, (4096, 4096, 4096)), (8, (4096, 14336, 4096)), (64, (8192, 2048, 2048)), (64, (4096, 1408, 2048)),
    (128, (8192, 1536, 2048)), (32, (4096, 4096, 7168)), (8, (256, 14336, 4096)), (32, (512, 4096, 7168)),
]  # fmt: skip
"""Number of experts, and the size of the GEMM of all their tokens."""


def gemm(size: Size, precision: str = "bf16") -> Call:
    """C[m, n] = A[m, k] B[n, k]^T, operands in turn."""
    m, n, k = size
    # bytes of A, B and C
    sets = copies_of((1 if precision == "fp8" else 2) * (m * k + n * k) + 2 * m * n)
    return in_turn([product(size, precision) for _ in range(sets)])


def product(size: Size, precision: str = "bf16") -> Call:
    """A GEMM of operands of its own."""
    m, n, k = size
    if precision == "fp8":
        # randn has no fp8
        a, b = (matrix(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        scale = torch.ones((), device=DEVICE)
        return partial(torch._scaled_mm, a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    a, b = matrix(m, k, kind), matrix(n, k, kind)
    return partial(torch.matmul, a, b.t(), out=torch.empty(m, n, device=DEVICE, dtype=kind))


def operands(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """A[m, k] and B[n, k] in bf16."""
    m, n, k = size
    return matrix(m, k), matrix(n, k)


def cut(a: torch.Tensor, b: torch.Tensor, axis: str, chunks: int) -> list[Call]:
    """Chunks of a GEMM along m (tokens), n (features out) or k (features in, whose sums are added into one output)."""
    m, n = len(a), len(b)
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    if axis == "m":
        parts = zip(a.chunk(chunks), c.chunk(chunks), strict=True)
        return [partial(torch.matmul, part, b.t(), out=out) for part, out in parts]
    if axis == "n":
        # columns of C are not contiguous: chunks along n have outputs of their own
        outs = [torch.empty(m, n // chunks, device=a.device, dtype=c.dtype) for _ in range(chunks)]
        return [partial(torch.matmul, a, part.t(), out=out) for part, out in zip(b.chunk(chunks), outs, strict=True)]
    pairs = zip(a.chunk(chunks, 1), b.chunk(chunks, 1), strict=True)
    # as a copied chunk would lie
    slices = [(left.contiguous(), right.contiguous()) for left, right in pairs]
    first = partial(torch.matmul, slices[0][0], slices[0][1].t(), out=c)
    return [first, *(partial(torch.addmm, c, left, right.t(), out=c) for left, right in slices[1:])]


def gemm_rows() -> Iterator[Callable[[], Row]]:
    """GEMMs whole, in chunks, two at once, grouped, and in a green context of fewer SMs."""
    yield from (partial(whole_gemm, size=size, precision="bf16") for size in GEMMS)
    # some of all sizes: fp16 and bf16 have the same rate
    yield from (partial(whole_gemm, size=size, precision="fp16") for size in GEMMS[3::5])
    for m, n, k in GEMMS[6::3]:
        # cuBLAS multiplies fp8 only with rows of multiples of 16 bytes
        if n % 16 == 0 and k % 16 == 0:
            yield partial(whole_gemm, size=(m, n, k), precision="fp8")
    cuts = [(axis, chunks) for axis in "mnk" for chunks in (2, 4, 8)]
    for size in [*LARGE, *SMALL[2:]]:
        for axis, chunks in cuts:
            yield from (
                partial(gemm_in_chunks, size=size, cut_as=(axis, chunks), streams=streams) for streams in (1, 2)
            )
    yield from (partial(two_gemms, size=size) for size in [*SMALL, (1024, 8192, 8192), (2048, 4096, 4096)])
    for experts, size in GROUPS:
        yield from (partial(grouped_gemm, experts=experts, size=size, uneven=uneven) for uneven in (False, True))
    for size in [*LARGE, *SMALL[2:]]:
        fewer = (few for few in (128, 120, 112, 104, 96, 80, 64, 32) if few < num_sms())
        yield from (partial(green_gemm, size=size, sms=sms) for sms in [num_sms(), *fewer])


def about(way: str, size: Size, precision: str = "bf16") -> Row:
    """First columns of a row."""
    return {"way": way, **columns(size), "precision": precision}


def columns(size: Size) -> Row:
    """Columns of the size of a GEMM."""
    return dict(zip("mnk", size, strict=True))


def whole_gemm(*, size: Size, precision: str) -> Row:
    """A GEMM alone."""
    seconds, scatter = median_of(gemm(size, precision))
    return {**about("whole", size, precision), "seconds": seconds, "scatter": scatter}


def gemm_in_chunks(*, size: Size, cut_as: tuple[str, int], streams: int) -> Row:
    """The chunks of a GEMM one after the other, or in turn on two streams."""
    axis, chunks = cut_as
    # two sets of operands, so that a chunk is not in the cache when its turn comes again
    calls = [call for _ in range(2) for call in cut(*operands(size), axis, chunks)]
    for call in calls:
        call()
    times = []
    for _ in range(SAMPLES):
        if streams == 1:
            times.append(time_parts([Part(in_turn(calls), len(calls))])[0] / 2)
        else:
            # chunks alternate between the streams
            halves = [in_turn(calls[side::2]) for side in range(2)]
            times.append(max(time_parts([Part(half, len(calls) // 2) for half in halves])) / 2)
    seconds, scatter = summary(times)
    ways = {"axis": axis, "chunks": chunks, "streams": streams}
    return {**about("chunks", size), **ways, "seconds": seconds, "scatter": scatter}


def two_gemms(*, size: Size) -> Row:
    """Two equal GEMMs at once, each on a stream of its own with weights of its own: the time of both."""
    calls = [gemm(size) for _ in range(2)]
    count = calls_in(calls[0])
    calls_in(calls[1])  # warms it up
    times = [max(time_parts([Part(call, count) for call in calls])) / count for _ in range(SAMPLES)]
    seconds, scatter = summary(times)
    return {**about("two at once", size), "streams": 2, "seconds": seconds, "scatter": scatter}


def grouped_gemm(*, experts: int, size: Size, uneven: bool) -> Row:
    """One kernel for the GEMMs of all experts: tokens spread evenly, or as 1, 2, 3, ... parts."""
    m, n, k = size
    weights = torch.randn(experts, n, k, device=DEVICE).to(torch.bfloat16).transpose(1, 2)
    shares = [place + 1 if uneven else 1 for place in range(experts)]
    ends = [round(m * sum(shares[: place + 1]) / sum(shares)) for place in range(experts)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    calls: list[Call] = [partial(torch._grouped_mm, matrix(m, k), weights, offs=offsets) for _ in range(3)]
    seconds, scatter = median_of(in_turn(calls))
    spread = {"experts": experts, "uneven": int(uneven)}
    return {**about("grouped", size), **spread, "seconds": seconds, "scatter": scatter}


def green_gemm(*, size: Size, sms: int) -> Row:
    """A GEMM in a green context of fewer SMs, which the library knows of, too."""
    from torch.cuda.green_contexts import GreenContext

    call = gemm(size)
    count = calls_in(call)
    context = GreenContext.create(num_sms=sms, device_id=0)
    # from here on launches go to the context's SMs
    context.set_context()
    try:
        times = [time_queue(partial(repeat, call, count), count * LAUNCH_S) / count for _ in range(SAMPLES)]
    finally:
        context.pop_context()
    seconds, scatter = summary(times)
    return {**about("green context", size), "sms": sms, "seconds": seconds, "scatter": scatter}
