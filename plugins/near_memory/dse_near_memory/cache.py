"""The last-level cache: slices at each channel, sets of ways, lines of sectors, least recently used first.

A request that is not there takes the line used longest ago, whose requests that were stored go to DRAM then
(write-back, allocate on a miss). A store takes its line without a read, and other sectors of a line, a request each,
are read when they are asked for, as those of public configurations of GPGPU-Sim are. At the end of a kernel what is
left is written back, as other GPUs read it.
"""

from __future__ import annotations

import numpy as np

from dse_near_memory import arbiter
from dse_near_memory.state import LOOK_UPS, MOST_SECTORS, SECTOR_BITS, Rules, State, Ways, Work
from simulators.compiled import inline_always, inline_never


@inline_always
def take_line(where: int, line: int, w: Work, s: State, r: Rules) -> int:
    """Way of a set that holds a line, which is the newest of the set from now on."""
    way: int = _way_of(where, line, r.cache_ways, s.cache_line)
    if way < 0:
        way = _make_room(where, w, s, r)
        s.cache_line[where, way] = line
    s.counts[LOOK_UPS] += 1
    s.cache_used[where, way] = s.counts[LOOK_UPS]
    return way


@inline_never
def _way_of(where: int, line: int, ways: int, lines: Ways) -> int:
    """Way of a set that holds a line, or -1."""
    match, row = 0, np.uint64(where)  # unsigned, as it does not count from the end
    for place in range(ways):  # without a way out, so that it is done by vectors
        match |= place + 1 if lines[row, np.uint64(place)] == line else 0
    return match - 1


@inline_always
def _make_room(where: int, w: Work, s: State, r: Rules) -> int:
    """Way of a set whose line was used longest ago, and is no longer there."""
    way = 0
    for place in range(1, r.cache_ways):
        if s.cache_used[where, place] < s.cache_used[where, way]:
            way = place
    for sector in range(s.cache_there.shape[2]):
        # above 1: dirty, with the line of the output (less 2) to write back
        if s.cache_there[where, way, sector] > 1:
            write_back(where, way, sector, w, s)
        s.cache_there[where, way, sector] = 0
    return way


@inline_never
def write_back(where: int, way: int, sector: int, w: Work, s: State) -> int:
    """Store a request of a line in DRAM if it is dirty; the line of the output, or -1."""
    output = int(s.cache_there[where, way, sector]) - 2
    if output >= 0:
        arbiter.push(1, w.channel[output], w.place[output], output, s)
        s.cache_there[where, way, sector] = 1
    return output


@inline_always
def read(where: int, entry: int, w: Work, s: State, r: Rules) -> int:
    """Whether a request is there; it will be from now on."""
    way = take_line(where, entry >> SECTOR_BITS, w, s, r)
    sector = entry & MOST_SECTORS - 1
    there = s.cache_there[where, way, sector]
    # a read leaves a dirty sector dirty
    s.cache_there[where, way, sector] = max(there, 1)
    return 1 if there else 0


@inline_never
def store(output: int, w: Work, s: State, r: Rules) -> None:
    """Keep a line of the output until it is the one used longest ago."""
    where, entry = w.store_set[output], w.store_entry[output]
    way = take_line(where, entry >> SECTOR_BITS, w, s, r)
    s.cache_there[where, way, entry & MOST_SECTORS - 1] = output + 2


@inline_never
def flush(w: Work, s: State, r: Rules) -> None:
    """Write back all that is dirty, after all that comes later."""
    for where in range(len(s.cache_line)):
        for way in range(r.cache_ways):
            for sector in range(s.cache_there.shape[2]):
                output = write_back(where, way, sector, w, s)
                if output >= 0:
                    arbiter.let_wait(1, w.channel[output], s)
