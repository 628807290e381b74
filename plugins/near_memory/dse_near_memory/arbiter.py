"""Streams of requests that wait for a channel's queue, and which of them goes next: a policy of T3's controller.

Streams are reads (0) and stores (1) of the GEMM, and communication (2). Where the GEMM goes first, communication
issues while fewer requests than a threshold are in the queue, and after `turn` requests of the GEMM in any case (T3's
limit on starvation). Hardware finds the threshold, as T3 has it, from how memory-intensive the GEMM is in its first
stage, when it is alone: the highest of `thresholds` that leaves a queue as many places as requests of the GEMM have
found taken, on average. A schedule may give one instead.
"""

from __future__ import annotations

from dse_near_memory.state import (
    ARRIVED,
    BUS,
    COMPUTE_FIRST,
    FCFS,
    FOUND,
    LENGTH,
    NEVER,
    NEXT,
    NOW,
    OCCUPANCY,
    RULE,
    SEEN,
    THRESHOLD,
    WRITES,
    Rules,
    State,
    Work,
)
from simulators.compiled import inline_always, inline_never


@inline_never
def push(stream: int, channel: int, place: int, tag: int, s: State) -> None:
    """Put a request behind the others of its stream, in a ring."""
    end = s.tail[stream, channel] & s.fifo.shape[2] - 1
    s.fifo[stream, channel, end] = place
    s.tag[stream, channel, end] = tag
    s.arrived[stream, channel, end] = s.t[NOW]
    s.tail[stream, channel] += 1
    # an idle channel wakes up; a busy one looks by itself when its bus is free
    if s.ct[channel, NEXT] == NEVER:
        s.ct[channel, NEXT] = max(s.t[NOW], s.ct[channel, BUS])


@inline_never
def let_wait(stream: int, channel: int, s: State) -> None:
    """Let the last request of a stream go after those of others, whenever they come."""
    s.arrived[stream, channel, s.tail[stream, channel] - 1 & s.fifo.shape[2] - 1] = NEVER


@inline_always
def first_of(stream: int, channel: int, s: State) -> int:
    """Place in its ring of the request of a stream that has waited longest."""
    return int(s.head[stream, channel] & s.fifo.shape[2] - 1)


@inline_never
def end_first_stage(w: Work, s: State, r: Rules) -> None:
    """Note how many requests those of the GEMM have found in a queue, and what threshold follows (`THRESHOLD`)."""
    s.t[OCCUPANCY] = s.t[FOUND] / max(1, s.i[ARRIVED])
    s.i[RULE] = w.thresholds[0]
    for limit in w.thresholds:  # in rising order
        if limit + s.t[OCCUPANCY] <= r.queue:
            s.i[RULE] = limit
    s.i[THRESHOLD] = r.threshold if r.threshold > 0 else s.i[RULE]


@inline_always
def _since(stream: int, channel: int, s: State) -> float:
    """Time since when the first request of a stream has waited."""
    return float(s.arrived[stream, channel, first_of(stream, channel, s)])


@inline_always
def _gemm_stream(channel: int, s: State, r: Rules) -> int:
    """Reads (0) or stores (1) of the GEMM, whichever goes next, or -1: in order, but stores may be overtaken."""
    reads, stores = s.tail[0, channel] - s.head[0, channel], s.tail[1, channel] - s.head[1, channel]
    stream = 0 if reads else -1
    if stores:
        first = not reads or _since(1, channel, s) <= _since(0, channel, s)
        stream = 1 if first and (not reads or stores > r.store_buffer) else 0
    return -1 if stream == 1 and s.ci[channel, WRITES] >= r.drain else stream


@inline_always
def choose_stream(channel: int, s: State, r: Rules) -> int:
    """Stream of the next request that enters a channel's queue, or -1. Writes have `drain` places of it."""
    gemm = _gemm_stream(channel, s, r)
    waits = s.tail[2, channel] > s.head[2, channel]
    if waits:
        writes = s.tag[2, channel, first_of(2, channel, s)] < 0
        waits = not (writes and s.ci[channel, WRITES] >= r.drain)
    if not waits or gemm < 0:
        blocked = r.policy == COMPUTE_FIRST and s.ci[channel, LENGTH] >= s.i[THRESHOLD]
        return gemm if gemm >= 0 or not waits or blocked else 2
    if r.policy == FCFS:
        return gemm if _since(gemm, channel, s) <= _since(2, channel, s) else 2
    return gemm if s.ci[channel, SEEN] < r.turn else 2  # a turn after each of the GEMM's, or after some
