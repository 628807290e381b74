"""Kernels alone, launches, and clocks under load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from dse_judge.gemms import gemm
from dse_judge.kernels import Background, Kernel, by_driver, by_engine, by_sms, copies_of, matrix, streaming
from dse_judge.timing import (
    DEVICE,
    SAMPLES,
    Call,
    Row,
    calls_in,
    in_turn,
    median_of,
    num_sms,
    repeat,
    stream_of,
    summary,
    time_queue,
    timed_event,
)

ATTENTIONS = [
    (1, 32, 8, 2048, 2048), (1, 32, 8, 8192, 8192), (4, 32, 8, 4096, 4096), (1, 8, 1, 8192, 8192),
    (1, 8, 1, 2048, 2048), (8, 32, 8, 1, 4096), (64, 32, 8, 1, 4096), (64, 8, 1, 1, 8192), (256, 8, 1, 1, 2048),
    (1, 16, 16, 4096, 4096), (16, 16, 16, 1024, 1024),
]  # fmt: skip
"""Batch, heads, groups of them that share keys and values, queries, keys."""


def kernel_rows() -> Iterator[Callable[[], Row]]:
    """Kernels that move data, by size and number of SMs, and attention."""
    for sms in [*(few for few in (1, 2, 4, 8, 16, 32, 48, 64, 96) if few < num_sms()), num_sms()]:
        for name in ("copy_by_sms", "add_by_sms"):
            yield partial(background_alone, partial(by_sms, name, sms, 128 << 20))
    # 16 KiB to 256 MiB
    for power in range(14, 29, 2):
        yield partial(background_alone, partial(by_sms, "copy_by_sms", 16, 1 << power))
    for power in range(12, 29, 2):
        for way in ("to_gpu", "to_host"):
            yield partial(background_alone, partial(by_engine, way, 1 << power))
        yield partial(background_alone, partial(by_driver, 1 << power))
        yield partial(background_alone, partial(streaming, 1 << power))
    for rows, cols in [(64, 8192), (512, 8192), (2048, 4096), (4096, 8192), (16384, 8192)]:
        for name in ("rms_norm", "silu_mul", "add", "softmax", "layer_norm", "gelu"):
            yield partial(elementwise, name=name, rows=rows, cols=cols)
    yield from (partial(attention, sizes=sizes) for sizes in ATTENTIONS)


def background_alone(make: Callable[[], Background]) -> Row:
    """A copy or a sum alone."""
    work = make()
    seconds, scatter = median_of(work.call)
    moved = {"bytes_read": work.bytes_read, "bytes_written": work.bytes_written}
    return {"kernel": work.name, "sms": work.sms, **moved, "seconds": seconds, "scatter": scatter}


def elementwise(*, name: str, rows: int, cols: int) -> Row:
    """An element-wise or row-wise kernel of torch over [rows, cols] in bf16."""
    sets = [[matrix(rows, cols) for _ in range(2)] for _ in range(copies_of(6 * rows * cols))]
    functional = torch.nn.functional
    kinds: dict[str, Callable[[Any, Any], object]] = {
        "rms_norm": lambda x, y: functional.rms_norm(x, (cols,)),
        "layer_norm": lambda x, y: functional.layer_norm(x, (cols,)),
        "silu_mul": lambda x, y: functional.silu(x) * y,
        "add": torch.add,
        "softmax": lambda x, y: torch.softmax(x, -1),
        "gelu": lambda x, y: functional.gelu(x, approximate="tanh"),
    }
    seconds, scatter = median_of(in_turn([partial(kinds[name], x, y) for x, y in sets]))
    return {"kernel": name, "rows": rows, "cols": cols, "seconds": seconds, "scatter": scatter}


def attention(*, sizes: tuple[int, int, int, int, int]) -> Row:
    """Scaled dot-product attention of torch, causal where there are as many queries as keys; head size 128, bf16."""
    batch, heads, groups, queries, keys = sizes
    sets = []
    # keys and values: two tensors of 2 bytes a number
    for _ in range(copies_of(4 * batch * groups * keys * 128)):
        q = torch.randn(batch, heads, queries, 128, device=DEVICE).to(torch.bfloat16)
        k, v = (torch.randn(batch, groups, keys, 128, device=DEVICE).to(torch.bfloat16) for _ in range(2))
        sets.append((q, k, v))
    run = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=queries == keys)
    calls: list[Call] = [partial(run, q, k, v, enable_gqa=heads != groups) for q, k, v in sets]
    seconds, scatter = median_of(in_turn(calls))
    names = ("batch", "heads", "groups", "queries", "keys")
    return {"kernel": "attention", **dict(zip(names, sizes, strict=True)), "seconds": seconds, "scatter": scatter}


@cache
def launches() -> dict[str, Call]:
    """What a schedule submits, by name."""
    scalar = torch.zeros(1, device=DEVICE)
    pinned = torch.zeros(4096, dtype=torch.uint8).pin_memory()
    small = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    a, b = matrix(64, 256), matrix(256, 64)
    out = torch.empty(64, 64, device=DEVICE, dtype=torch.bfloat16)
    event, second = torch.cuda.Event(), stream_of(1, -1)
    return {
        "kernel": partial(scalar.add_, 1.0),
        "gemm": partial(torch.matmul, a, b, out=out),
        "copy engine": partial(small.copy_, pinned, non_blocking=True),
        "event record": event.record,
        "stream wait": partial(second.wait_event, event),
        "stream switch": partial(_switch, second),
        "kernel in CUDA C": partial(Kernel("copy_by_sms").launch, 1, 1, 1, (small, small)),
    }


def _switch(stream: Any) -> None:
    with torch.cuda.stream(stream):
        pass


def launch_rows() -> Iterator[Callable[[], Row]]:
    """Host times of what a schedule queues, and the gaps on the GPU."""
    submissions = ("kernel", "gemm", "copy engine", "event record", "stream wait", "stream switch", "kernel in CUDA C")
    yield from (partial(host_time, name=name) for name in submissions)
    for name in ("kernel", "gemm", "kernel in CUDA C"):
        yield from (partial(gap, name=name, graph=graph) for graph in (False, True))
    yield from (partial(hand_over, graph=graph) for graph in (False, True))
    yield from (partial(graph_launch, nodes=nodes) for nodes in (1, 10, 100))


def host_time(*, name: str) -> Row:
    """Seconds of the host for one submission."""
    call = launches()[name]
    return {"what": "host time", "of": name, "graph": 0, **_host_times(call, 200)}


def _host_times(call: Call, count: int) -> Row:
    times = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(count):
            call()
        # the host's time alone: the GPU may still work
        times.append((time.perf_counter() - start_s) / count)
    return dict(zip(("seconds", "scatter"), summary(times), strict=True))


def _capture(run: Callable[[], None]) -> Any:
    run()
    torch.cuda.synchronize()
    # captured after a first run, which loads modules that a capture may not load
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _kernel_times(run: Callable[[], None], *, graph: bool) -> Row:
    """Time of one of 200 kernels that a run queues."""
    replay = _capture(run).replay if graph else run
    times = [time_queue(replay, 1e-2) / 200 for _ in range(SAMPLES)]
    return dict(zip(("seconds", "scatter"), summary(times), strict=True))


def gap(*, name: str, graph: bool) -> Row:
    """Time of one kernel after another on the GPU: 200 in a row, over their number."""
    times = _kernel_times(partial(repeat, launches()[name], 200), graph=graph)
    return {"what": "kernel after kernel", "of": name, "graph": int(graph), **times}


def hand_over(*, graph: bool) -> Row:
    """Time of a kernel that waits for one of another stream: 100 there and back, over their number."""
    call, second = launches()["kernel"], stream_of(1, -1)

    def run() -> None:
        main = torch.cuda.current_stream()
        for _ in range(100):
            second.wait_stream(main)
            with torch.cuda.stream(second):
                call()
            main.wait_stream(second)
            call()

    times = _kernel_times(run, graph=graph)
    return {"what": "kernel after another stream's", "of": "kernel", "graph": int(graph), **times}


def graph_launch(*, nodes: int) -> Row:
    """Host time of a graph's launch."""
    graph = _capture(partial(repeat, launches()["kernel"], nodes))
    return {"what": "host time", "of": f"graph of {nodes} kernels", "graph": 1, **_host_times(graph.replay, 20)}


def clock_rows() -> Iterator[Callable[[], list[Row]]]:
    """Clock, power and rate while one kind of work goes on."""
    works: dict[str, Callable[[], Call]] = {
        "gemm 8192": partial(gemm, (8192, 8192, 8192)),
        "gemm 4096": partial(gemm, (4096, 4096, 4096)),
        "gemm 8192 fp8": partial(gemm, (8192, 8192, 8192), "fp8"),
        "elementwise": lambda: streaming(256 << 20).call,
        "copy by 16 SMs": lambda: by_sms("copy_by_sms", 16, 256 << 20).call,
    }
    for name, make in works.items():
        yield partial(under_load, name=name, make=make)


def under_load(*, name: str, make: Callable[[], Call], seconds: float = 5.0) -> list[Row]:
    """A row for each tenth of a second."""
    call = make()
    count = calls_in(call, 0.1)
    torch.cuda.synchronize()
    # idle for a second, so that the clock lowered by the last work can rise again
    time.sleep(1.0)
    rows: list[Row] = []
    start_s = time.monotonic()
    while time.monotonic() - start_s < seconds:
        first, last = timed_event(), timed_event()
        first.record()
        for _ in range(count):
            call()
        last.record()
        state: Row = {}
        # clock and power are read while the GPU works: the last reading is kept
        while not last.query():
            time.sleep(0.02)
            state |= {"sm_clock_mhz": torch.cuda.clock_rate(0), "power_w": torch.cuda.power_draw(0) / 1e3}
        at_s, call_s = time.monotonic() - start_s, 1e-3 * first.elapsed_time(last) / count
        rows.append({"work": name, "at_s": at_s, "call_s": call_s, **state})
    return rows
