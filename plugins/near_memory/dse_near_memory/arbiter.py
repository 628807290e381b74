"""Streams of requests that wait for a channel's queue, and which of them goes next: a policy of T3's controller.

Streams are reads and stores of the GEMM, and communication. Where the GEMM goes first, communication issues while fewer
requests than a threshold are in the queue, and after `turn` requests of the GEMM in any case (T3's limit on
starvation). Hardware finds the threshold, as T3 has it, from how memory-intensive the GEMM is in its first stage, when
it is alone. The rule is ours (derived): the highest of `thresholds`, which are recalled, that leaves a queue as many
places as requests of the GEMM have found taken, on average. A schedule may give one instead.
"""

from __future__ import annotations

from dse_near_memory.state import COMM, COMPUTE_FIRST, FCFS, NEVER, READS, STORES, Rules, State, Work
from simulators.compiled import inline_always, inline_never
from simulators.device import rings


@inline_never
def push(stream: int, channel: int, place: int, tag: int, state: State) -> None:
    """Put a request behind the others of its stream, in a ring."""
    # the ring has a power of two of places, and head and tail only grow
    end = rings.place_of(state.streams[stream, channel].tail, state.waiting.shape[2])
    request = state.waiting[stream, channel, end]
    request.place, request.tag, request.since = place, tag, state.clock.now
    state.streams[stream, channel].tail += 1
    # an idle channel wakes up; a busy one looks by itself when its bus is free
    if state.channels[channel].next == NEVER:
        state.channels[channel].next = max(state.clock.now, state.channels[channel].bus)


@inline_never
def let_wait(stream: int, channel: int, state: State) -> None:
    """Let the last request of a stream go after those of others, whenever they come."""
    last = rings.place_of(state.streams[stream, channel].tail - 1, state.waiting.shape[2])
    state.waiting[stream, channel, last].since = NEVER


@inline_always
def first_place(stream: int, channel: int, state: State) -> int:
    """Place in its ring of the request of a stream that has waited longest."""
    return int(rings.place_of(state.streams[stream, channel].head, state.waiting.shape[2]))


@inline_never
def end_first_stage(work: Work, state: State, rules: Rules) -> None:
    """Note how many requests those of the GEMM have found in a queue, and what threshold follows."""
    arbiter = state.arbiter
    # in all channels together: the mean over all requests of the GEMM that entered a queue
    arbiter.occupancy = arbiter.found / max(1, arbiter.arrived)
    # the lowest one is taken even if no threshold fits
    arbiter.rule = work.thresholds[0]
    for limit in work.thresholds:  # in rising order
        if limit + arbiter.occupancy <= rules.queue:
            arbiter.rule = limit
    arbiter.threshold = rules.threshold if rules.threshold > 0 else arbiter.rule


@inline_always
def _since(stream: int, channel: int, state: State) -> float:
    """Time since when the first request of a stream has waited."""
    return float(state.waiting[stream, channel, first_place(stream, channel, state)].since)


@inline_always
def _length(stream: int, channel: int, state: State) -> int:
    """Requests of a stream that wait."""
    return int(state.streams[stream, channel].tail - state.streams[stream, channel].head)


@inline_always
def _gemm_stream(channel: int, state: State, rules: Rules) -> int:
    """Stream of the GEMM that goes next, or -1: in order, but stores may be overtaken by reads."""
    reads, stores = _length(READS, channel, state), _length(STORES, channel, state)
    stream = READS if reads else -1
    if stores:
        first = not reads or _since(STORES, channel, state) <= _since(READS, channel, state)
        # an older store goes before reads only if no read waits, or if too many stores have been overtaken
        stream = STORES if first and (not reads or stores > rules.store_buffer) else READS
    # a store that goes next waits for one of the places of writes
    return -1 if stream == STORES and state.channels[channel].writes >= rules.drain else stream


@inline_always
def choose_stream(channel: int, state: State, rules: Rules) -> int:
    """Stream of the next request that enters a channel's queue, or -1. Writes have `drain` places of it."""
    gemm = _gemm_stream(channel, state, rules)
    waits = _length(COMM, channel, state) > 0
    if waits:
        # tags of lines that come in are negative: they are written
        writes = state.waiting[COMM, channel, first_place(COMM, channel, state)].tag < 0
        waits = not (writes and state.channels[channel].writes >= rules.drain)
    if not waits or gemm < 0:
        # communication may fill the queue up to the threshold only, so that the GEMM finds places
        full = state.channels[channel].length >= state.arbiter.threshold
        blocked = rules.policy == COMPUTE_FIRST and full
        return gemm if gemm >= 0 or not waits or blocked else COMM
    if rules.policy == FCFS:
        return gemm if _since(gemm, channel, state) <= _since(COMM, channel, state) else COMM
    # a turn after each of the GEMM's, or after some
    return gemm if state.channels[channel].since_comm < rules.turn else COMM
