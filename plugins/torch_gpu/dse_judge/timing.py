"""Times of calls on a GPU.

A time is the median of samples; a sample is the mean of as many calls as last a millisecond, between two events of the
stream, after the queue was filled behind a kernel that waits. Nothing is set on the card: clocks and power limits stay
as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Call = Callable[[], object]
Row = dict[str, Any]

DEVICE = "cuda"
SAMPLES = 15
SAMPLE_S = 1e-3
LAUNCH_S = 75e-6  # of the host for one call: how long a queue must wait to be filled
LAG_CYCLES = 30_000  # between the starts of two kernels whose order is measured, some 15 us
CYCLES_PER_S = 2e9  # of the kernel that waits: no GPU's clock is higher


@cache
def num_sms() -> int:
    """SMs of the GPU; 1 where there is none, and rows are only listed."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1


@dataclass(frozen=True)
class Part:
    """Calls that are queued on one stream. late: begins `LAG_CYCLES` after the others. priority: -1 is high."""

    call: Call
    count: int = 1
    late: bool = False
    priority: int = 0


def time_parts(parts: Sequence[Part], *, own_start: bool = False) -> list[float]:
    """Seconds until each part ends, each part on a stream of its own: from a common start, or each from its own."""
    torch.cuda.synchronize()
    streams = [stream_of(place, part.priority) for place, part in enumerate(parts)]
    first, later, ends = timed_event(), timed_event(), [timed_event() for _ in parts]
    # the GPU waits until the host has queued all calls: none is late
    torch.cuda._sleep(int(CYCLES_PER_S * (30e-6 + LAUNCH_S * sum(part.count for part in parts))))
    _start(parts, streams, first, late=False)
    if any(part.late for part in parts):
        torch.cuda._sleep(LAG_CYCLES)
        _start(parts, streams, later, late=True)
    _queue(parts, streams)
    for stream, end in zip(streams, ends, strict=True):
        end.record(stream)
    torch.cuda.synchronize()
    starts = [later if own_start and part.late else first for part in parts]
    return [1e-3 * start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def _start(parts: Sequence[Part], streams: Sequence[Any], event: Any, *, late: bool) -> None:
    """Record an event, for which the streams of the parts wait that are late, or that are not."""
    event.record(torch.cuda.current_stream())
    for stream, part in zip(streams, parts, strict=True):
        if part.late == late:
            stream.wait_event(event)


def _queue(parts: Sequence[Part], streams: Sequence[Any]) -> None:
    """Queue the calls of all parts in turns, spread evenly over those of the part that has most."""
    most = max(part.count for part in parts)
    for turn in range(most):
        for stream, part in zip(streams, parts, strict=True):
            # exactly `count` of the turns, spread evenly (Bresenham)
            if turn * part.count // most < (turn + 1) * part.count // most:
                with torch.cuda.stream(stream):
                    part.call()


@cache
def stream_of(place: int, priority: int) -> Any:
    """A stream for the parts of one place, the same ones again and again: cuBLAS gives each stream a workspace."""
    return torch.cuda.Stream(priority=priority)


def timed_event() -> Any:
    """An event that has a time."""
    return torch.cuda.Event(enable_timing=True)


def calls_in(call: Call, seconds: float = SAMPLE_S) -> int:
    """Count the calls that last for some seconds; the call is warmed up by it."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    # the first may still load a module or choose an algorithm
    call_s = min(time_parts([Part(call, 2)])[0] / 2 for _ in range(2))
    # more calls would make the GPU wait long for its queue to be filled
    return max(1, min(400, math.ceil(seconds / max(call_s, 1e-7))))


def median_of(call: Call, samples: int = SAMPLES) -> tuple[float, float]:
    """Median time [s] of a call alone, and its scatter (interquartile range over the median)."""
    count = calls_in(call)
    return summary([time_parts([Part(call, count)])[0] / count for _ in range(samples)])


def summary(times: Sequence[float]) -> tuple[float, float]:
    """Median and scatter of samples."""
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / middle


def in_turn(calls: Sequence[Call]) -> Call:
    """A call that makes these in turn."""
    turn = iter(range(1 << 62))

    def call() -> object:
        return calls[next(turn) % len(calls)]()

    return call


def repeat(call: Call, count: int) -> None:
    """Make a call some times."""
    for _ in range(count):
        call()


def time_queue(run: Callable[[], None], host_s: float = 2e-3) -> float:
    """Seconds of a run whose calls are all queued before it begins, within `host_s`."""
    torch.cuda.synchronize()
    first, last = timed_event(), timed_event()
    # too long a wait costs time, too short a one counts the host's
    torch.cuda._sleep(int(CYCLES_PER_S * host_s))
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return 1e-3 * float(first.elapsed_time(last))
