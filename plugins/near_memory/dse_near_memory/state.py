"""Numbers of a run of `dse_near_memory.engine`: rules of the memory system, requests, and the state of all parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Ways = NDArray[np.int32]

READ, STORE, COMM_READ, INCOMING = range(4)
"""Kinds of requests: of the GEMM, and of communication."""
FCFS, FAIR, COMPUTE_FIRST = range(3)
AFTER_CHUNK, AFTER_STEP, AFTER_ALL = range(3)
"""When a step of communication begins: its source is complete, the step before it has ended, or all before it has."""
# fields of a step of communication. FROM_GEMM: lines come from the GEMM's stores, not from reads. SUMS: what comes in
# is added to the GPU's own at once
SOURCE, READS, TARGET, UPDATES, FROM_GEMM, AFTER, PHASE, SUMS, STEP_FIELDS = range(9)
# integers of the state
(DONE, ENDED, NEXT_CU, NEXT_UNIT, COMM, ACTIVE, ISSUED, CREDITED, DELIVERED, PUSHED, ADMITTED, NUM_SENT, STORES_LEFT,
 SPILLS, LIVE, PEAK, STAMP, NUM_LINES, TARGET_LINES, ARRIVED, RULE, THRESHOLD, INTS) = range(23)  # fmt: skip
# times of the state. STORED: all of the GEMM's own stores are in queues. PACE, HOP: of a line over the link. LAST: the
# last request served is there. FOUND: sum of requests in a queue that others find there, OCCUPANCY: its mean
# in the first stage
(NOW, GEMM_AT, LINK_FREE, STARTS, GEMM_END, COMM_END, RS_END, STORED, LAST, PACE, HOP, FOUND, OCCUPANCY,
 TIMES) = range(14)  # fmt: skip
# counts
ROW_HITS, ACTIVATIONS, TURNS, REFRESHES, LOOK_UPS, SERVED = range(6)  # SERVED: by kind and phase, 4 kinds x 3
COUNTS = SERVED + 12
# of a channel: integers and times. LENGTH, WRITES: requests, and writes of them, in its queue. SEEN: admissions
# of the GEMM's since the last of communication's
LENGTH, WRITES, SEEN, LAST_KIND, BORN, CHANNEL_INTS = range(6)
NEXT, BUS, GATE, REFRESH, CHANNEL_TIMES = range(5)
ROW, LAST_USE, OPENED, BANK_FIELDS = range(4)
# of a CU: integers and times. UNIT: its tiles; FETCH: the step whose reads it asked for last; PENDING: blocks of it
# that are not there
CU_UNIT, CU_STEP, CU_FETCH, CU_PENDING, CU_WAITS, CU_INTS = range(6)
CU_AT, CU_COMPUTED, CU_READY, CU_TIMES = range(4)
NEVER = 1e300
SECTOR_BITS = 6
MOST_SECTORS = 1 << SECTOR_BITS
"""Of a line of the cache, which entries leave room for."""


class Rules(NamedTuple):
    """Numbers of a memory system and its controller. Times in ns of one request."""

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
    chunk_first [N + 1]. away: whether a chunk is stored at the neighbour. region_set: set of a region's entry. program
    [S, STEP_FIELDS]; pace [S]: time of a line over the link [ns]. thresholds: that arbitration chooses from.
    store_updates: whether the GEMM's stores are updates.
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
    program: Ints
    thresholds: Ints
    step_ns: Floats
    pace: Floats
    store_updates: int


class State(NamedTuple):
    """State of a run. fifo [3, C, n]: places and tags of what waits; arrived: since when; head, tail [3, C].

    cu [CUs, CU_INTS], cut [CUs, CU_TIMES]. block_left: lines of a block that are under way; block_at: when the last one
    was there. waiting [blocks], next_waiting [CUs * needs]: lists of who waits for a block, of CU * needs + need + 1.
    cache_line, cache_used [sets, ways]; cache_there [sets, ways, sectors]: 0, 1 for what was read, or 2 with the line
    of the output that is to be written back. queue_* [C, Q]: requests that a channel schedules among. left: updates
    that a region, a chunk's regions wait for. entry, used [sets, ways]: of the tracker. spilled: regions whose counts
    are in memory. sent_at: of lines of a step.
    """

    i: Ints
    t: Floats
    counts: Ints
    cu: Ints
    cut: Floats
    block_left: Ints
    block_at: Floats
    waiting: Ints
    next_waiting: Ints
    cache_line: Ways
    cache_used: Ints
    cache_there: Ints
    fifo: Ints
    tag: Ints
    arrived: Floats
    head: Ints
    tail: Ints
    ci: Ints
    ct: Floats
    queue_place: Ints
    queue_kind: Ints
    queue_tag: Ints
    queue_born: Ints
    queue_from: Floats
    bank: Floats
    group: Floats
    region_left: Ints
    chunk_left: Ints
    entry: Ints
    used: Ints
    spilled: Ints
    sent_at: Floats
