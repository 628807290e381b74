"""The last-level cache: slices at each channel, sets of ways, lines of sectors, least recently used first.

A request that is not there takes the line used longest ago, whose requests that were stored go to DRAM then
(write-back, allocate on a miss). A store takes its line without a read, and other sectors of a line, a request each,
are read when they are asked for, as those of public configurations of GPGPU-Sim are. At the end of a kernel what is
left is written back, as other GPUs read it. Which way holds a line, and which leaves, is `simulators.device.lru`.
"""

from __future__ import annotations

from dse_near_memory import arbiter
from dse_near_memory.state import MOST_SECTORS, SECTOR_BITS, STORES, Rules, State, Work
from simulators.compiled import inline_always, inline_never
from simulators.device import lru


@inline_always
def take_line(which: int, line: int, work: Work, state: State, rules: Rules) -> int:
    """Place of a line of a set among all lines of the cache; it is the newest of the set from now on."""
    first = which * rules.cache_ways
    way = lru.find_way(state.cache_line, first, rules.cache_ways, line)
    if way < 0:
        way = lru.oldest_way(state.cache_used, first, rules.cache_ways)
        _clear(first + way, work, state)
        state.cache_line[first + way] = line
    # the number of look-ups is the order of use
    state.counts.look_ups += 1
    state.cache_used[first + way] = state.counts.look_ups
    return first + way


@inline_never
def _clear(place: int, work: Work, state: State) -> None:
    """Empty the sectors of a line, and store in DRAM what is dirty of it."""
    for sector in range(state.cache_there.shape[1]):
        # 0: absent; 1: read; from 2 on: stored, with the line of the output
        if state.cache_there[place, sector] > 1:
            write_back(place, sector, work, state)
        state.cache_there[place, sector] = 0


@inline_never
def write_back(place: int, sector: int, work: Work, state: State) -> int:
    """Store a request of a line in DRAM if it is dirty; the line of the output, or -1."""
    # above 1: dirty, with the line of the output (less 2) to write back
    output = int(state.cache_there[place, sector]) - 2
    if output >= 0:
        arbiter.push(STORES, work.channel[output], work.place[output], output, state)
        state.cache_there[place, sector] = 1
    return output


@inline_always
def read(which: int, entry: int, work: Work, state: State, rules: Rules) -> bool:
    """Return whether a request is there; it will be from now on."""
    place = take_line(which, entry >> SECTOR_BITS, work, state, rules)
    sector = entry & MOST_SECTORS - 1
    there = state.cache_there[place, sector]
    # a read leaves a dirty sector dirty
    state.cache_there[place, sector] = max(there, 1)
    return there > 0


@inline_never
def store(output: int, work: Work, state: State, rules: Rules) -> None:
    """Keep a line of the output until it is the one used longest ago."""
    entry = work.store_entry[output]
    place = take_line(work.store_set[output], entry >> SECTOR_BITS, work, state, rules)
    # no read for ownership: a request covers its sector as a whole
    state.cache_there[place, entry & MOST_SECTORS - 1] = output + 2


@inline_never
def flush(work: Work, state: State) -> None:
    """Write back all that is dirty, after all that comes later."""
    for place in range(state.cache_there.shape[0]):
        for sector in range(state.cache_there.shape[1]):
            output = write_back(place, sector, work, state)
            if output >= 0:
                arbiter.let_wait(STORES, work.channel[output], state)
