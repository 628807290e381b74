"""Numbers of a run of `dse_near_memory.engine`: rules of the memory system, requests, and the state of all parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.device.records import layout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Ways = NDArray[np.int32]

READ, STORE, COMM_READ, INCOMING = range(4)
"""Kinds of requests: of the GEMM, and of communication. Those that write are odd."""
READS, STORES, COMM = range(3)
"""Streams of requests that wait for a channel's queue: of the GEMM, and all of communication."""
FCFS, FAIR, COMPUTE_FIRST = range(3)
AFTER_CHUNK, AFTER_STEP, AFTER_ALL = range(3)
"""When a step of communication begins: its source is complete, the step before it has ended, or all before it has."""
COUNTS_OF_TRACKER, NO_LINE = -1, 0
"""Tags of communication's requests that stand for no line of the output: moved counts, and what is not awaited."""
LAST_READ = 1
"""Tag of the last read of a line: the line leaves with it. Line n that comes in has the tag -2 - n ."""
GEMM_ALONE, REDUCE_SCATTER, ALL_GATHER = range(3)
"""Phases of requests: of the GEMM, and of collectives."""
KINDS, PHASES = 4, 3
# finite and not inf, so that sums with it stay comparable
NEVER = 1e300
# before any time constraint of a run
LONG_AGO = -1e9
SECTOR_BITS = 6
MOST_SECTORS = 1 << SECTOR_BITS
"""Of a line of the cache, which entries leave room for."""

STEP = layout(int64="source reads target updates from_gemm after phase sums", float64="pace")
"""A step of communication: chunks read and written, reads of each line, whether what comes in is an update, whether
lines come from the GEMM's stores (not from reads), when it begins, its phase,
whether what comes in is added to the GPU's own at once, and the time of a line over the link [ns]."""
CLOCK = layout(float64="now last")
"""Time [ns], and when the last request that was served is there."""
GEMM = layout(int64="done ended next_cu next_unit stores_left", float64="next end stored")
"""Units that are done, and that have ended in this round of lockstep; the CU that acts next and when; the unit that is
dealt out next; own stores that are in no queue yet, and when the last one was; when the last unit was done."""
TRANSFER = layout(
    int64="step active issued credited delivered pushed admitted sent lines target_lines",
    float64="starts end reduced pace hop link_free",
)
"""The step of communication, and whether it has begun. Lines of it: issued, that made room in the window, that came in,
pushed to a queue, admitted to it, sent; of its source and of its target. When a command starts, when the last step
ended, and the reduce-scatter did; time of a line on the link, and on its way; when the link is free [ns]."""
TRACKER = layout(int64="spills live peak stamp")
"""Entries moved to or from memory, entries in use and the most of them, and the order of use."""
ARBITER = layout(int64="arrived rule threshold", float64="found occupancy")
"""Requests that entered a queue, those that they found there in all, and on average in the first stage (below 0 before
it has ended); the threshold that the rule takes, and the one that holds."""
COUNTS = layout(int64="row_hits activations turns refreshes look_ups")
CU = layout(int64="unit step fetch pending waits", float64="next computed ready")
"""A CU: its unit and step; the step whose reads it asked for last, blocks of it that are not there, when the others
are; whether it waits for them; when it acts next, and when it has computed."""
BLOCK = layout(int64="left waiting", float64="arrived")
"""Lines that are under way, when the last one was there, and the head of the list of CUs that wait (0: nobody)."""
CHANNEL = layout(int64="length writes since_comm last_kind born", float64="next bus refresh")
"""Requests in the queue, and writes of them; admissions of the GEMM's since the last of communication's; what the bus
did last (1: a write); requests that entered. When it acts next, its bus is free, and it is refreshed [ns]."""
BANK = layout(int64="row", float64="last_use opened")
REQUEST = layout(int64="place kind phase updates tag born", float64="since")
"""A request in a queue: row * banks + bank, kind, phase of its step, whether it is an update, what it is of, its number
in the order of admission, and since when it is there [ns]."""
WAITING = layout(int64="place tag", float64="since")
STREAM = layout(int64="head tail")
"""Requests that left a stream, and that came to it."""


class Rules(NamedTuple):
    """Numbers of a memory system and its controller. Times in ns of one request.

    group, update_group: from one column of a bank group to the next. queue, drain: places of a channel's queue, and
    those that writes may have. turn: requests of the GEMM after which communication issues one. store_buffer: stores
    that reads may overtake. window: lines of a command in flight. needs: panels of a unit at most. sets, ways: of the
    tracker. spill_every: counts that move to memory for each request of the sampled channels. lockstep: CUs wait for
    one another before they take their next tiles.
    """

    burst: float
    group: float
    update_group: float
    trcd: float
    trp: float
    tras: float
    trrd: float
    twr: float
    to_write: float
    to_read: float
    trefi: float
    trfc: float
    latency: float
    cache_hit: float
    hop: float
    setup: float
    channels: int
    banks: int
    groups: int
    queue: int
    drain: int
    policy: int
    threshold: int
    turn: int
    store_buffer: int
    window: int
    cached: int
    cache_ways: int
    needs: int
    tracked: int
    sets: int
    ways: int
    spill_every: int
    steps: int
    units: int
    cus: int
    lockstep: int


class Work(NamedTuple):
    """Requests of the sampled channels. Places are row * banks + bank.

    A block is what a panel has for one step of k. read_first [panels * steps + 1]: into read_channel, read_place, and
    read_set, read_entry: set of the cache, and the line of it times MOST_SECTORS with the sector of the line. A unit is
    the tiles that a CU takes at once. need_first [units + 1]: into need_panel. step_ns [units]. store_first [units +
    1]: into store_line, lines of the output. channel, place, chunk, region, store_set, store_entry of each line of it;
    chunk_first [N + 1]. away [N]: whether a chunk is stored at the neighbour. region_set: set of a region's entry.
    program [S]: records of STEP. thresholds: that arbitration chooses from, rising. store_updates: whether the GEMM's
    stores are updates.
    """

    read_first: Ints
    read_channel: Ints
    read_place: Ints
    read_set: Ints
    read_entry: Ints
    need_first: Ints
    need_panel: Ints
    store_first: Ints
    store_line: Ints
    channel: Ints
    place: Ints
    chunk: Ints
    region: Ints
    store_set: Ints
    store_entry: Ints
    chunk_first: Ints
    away: Ints
    region_set: Ints
    program: Any
    thresholds: Ints
    step_ns: Floats
    store_updates: int


class State(NamedTuple):
    """State of a run with C channels: records, one or an array each, of the layouts of their names.

    served [KINDS, PHASES]: requests of data. cus [CUs]. blocks [panels * steps]. next_waiting [CUs * needs]: lists of
    who waits for a block, of CU * needs + need + 1. cache_line, cache_used [sets * ways]; cache_there [sets * ways,
    sectors]: 0, 1 for what was read, or 2 with the line of the output that is to be written back. waiting [3, C, n]:
    rings of a power of two, streams [3, C]. channels [C], banks [C, banks], groups [C, groups]: when a bank group takes
    a column, gates [C]: when a channel opens a row. queue [C, Q]: requests that a channel schedules among. region_left,
    chunk_left: updates that a region, and regions that a chunk waits for. entry, used [sets * ways]: of the tracker.
    spilled: regions whose counts are in memory. sent_at: when lines of a step have left.
    """

    clock: Any
    gemm: Any
    transfer: Any
    tracker: Any
    arbiter: Any
    counts: Any
    served: Ints
    cus: Any
    blocks: Any
    next_waiting: Ints
    cache_line: Ways
    cache_used: Ints
    cache_there: Ints
    waiting: Any
    streams: Any
    channels: Any
    banks: Any
    groups: Floats
    gates: Floats
    queue: Any
    region_left: Ints
    chunk_left: Ints
    entry: Ints
    used: Ints
    spilled: Ints
    sent_at: Floats
