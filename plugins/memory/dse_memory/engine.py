"""The memory system of a GPU, request by request: what CUs ask for, L1 of each, shared L2, and channels of DRAM.

A kernel is a grid of workgroups that all run one short program (`dse_memory.program`). CUs hold some of them at
once, and run the one that has been ready longest; requests are whole lines. In the order of time, each takes its way:

    CU       a line a cycle; the others go first when it is 16 cycles ahead of them, as when it waits. A load that
             misses L1, and a store, take one of `in_flight` places, in the order of issue
    L1       write-through, no allocation by stores; a line that is under way serves all who ask for it
    L2       a slice at each channel, one tag look-up and one fill at a time; lines under way cannot be evicted: a set
             full of them stops its slice (an L1: its CU) until the first has arrived, or is passed by (`bypass`)
    DRAM     a request enters the channel's window of `queue` when the one so many before it has left. Banks hold rows
             open; a request whose row is open, or will be before it can be, needs no activation (first ready, first
             come, first served, as far as the window reaches); else tRC, tRP after the last use (tWR after a write),
             tRRD after the channel's last. The bus takes bursts, and what waits for a bank does not hold it up
    stores   wait in a buffer of the channel, and are written in one go once it is full, between two turns of the bus
             and after what was written before

LRU is exact; sets of caches, rings, servers, times of banks and the heap of CUs are of `simulators.device`. Bits do not
depend on the machine; time is in ns, that of lines under way is rounded up to 1/16 ns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import flat_over, inline_always, inline_never
from simulators.device import PARTS, dram, events, histograms, lru, rings, servers

Ways = NDArray[np.int32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

END, LOAD, STORE, COMPUTE, WAIT, FENCE, LOOP, LISTED = range(8)
"""Operations of a program. COMPUTE: the CU is busy. WAIT: until all loads are there. FENCE: until those before the last
fence are. LOOP: back to `TARGET`, `TIMES` times. LISTED: the next entry of a workgroup's list."""
LISTED_LOAD, LISTED_STORE, LISTED_WAIT, LISTED_COMPUTE = range(4)
"""Entries of a list. LISTED_WAIT: as WAIT. LISTED_COMPUTE: as COMPUTE, of so much work as the address tells."""
OP, PC, BASE, ROWS, STEP, BYTES, LOW, HIGH, PITCH, SCATTER, LEVEL, TIMES, TARGET, GRID = range(14)
# four coordinates of the grid, four counters of nested loops
LOOPS = GRID + 4
FIELDS = LOOPS + 4
"""Of an operation. A load or store touches `ROWS` runs of `BYTES`, `STEP` apart, from `BASE` plus the workgroup's
coordinates times `GRID` plus the loops' counters times `LOOPS`, as far as they lie in [`LOW`, `HIGH`), and, with
`PITCH`, in the row of so many bytes in which they begin. With `SCATTER` each run begins at one of so many places from
`LOW`, drawn by a hash."""
# fmt: off
(REQUESTS, L1_HITS, L1_MERGED, L1_STALLS, L1_BYPASSED, L2_HITS, L2_MERGED, L2_MISSES, L2_STALLS, L2_BYPASSED, PREDICTED,
 USELESS, EVICTED, RINSED, READS, WRITES, ROW_HITS, ACTIVATIONS, TURNS, STAMP) = range(20)
L1_STALLED, L2_STALLED, FULL = range(3)
# fmt: on
# HELD_ROWS: activations that a bank remembers, a power of two. SLACK: cycles that a CU may run ahead of others
TOTALS, STALLED, BINS, HELD_ROWS, SLACK = 20, 3, 256, 32, 16.0
# instructions with a counter each; lines under way that L2 does not keep: 4 ways of 2 ** 13 sets
PCS, PENDING, LATE_WAYS, LATE_SHIFT = 256, 1 << 15, 4, 13
DIRTY, REUSED, STORED = 1, 2, 4  # marks of a line, below the number of the instruction that brought it
_TICKS = 16.0  # of a ns: 31 bits then hold 0.13 s, the longest kernel


class Machine(NamedTuple):
    """Numbers of a machine, and where its parts begin in three flat arrays.

    Times are in ns. w (32 bits): tags, order of use and times of lines, and marks (dirty, reused, whose). m: integers;
    t: times. Sizes are powers of two but for channels and ways; `channel_shift` is -1 where channels are not.
    """

    cycle: float
    l1_hit: float
    hop: float
    far: float
    l2_hit: float
    lookup: float
    fill: float
    burst: float
    trcd: float
    trp: float
    tras: float
    trc: float
    tcl: float
    trrd: float
    twr: float
    to_write: float
    to_read: float
    trefi: float
    trfc: float
    cus: int
    held: int
    in_flight: int
    line_shift: int
    l1_ways: int
    l1_shift: int
    l2_ways: int
    l2_shift: int
    l2_xor: int
    channels: int
    channel_shift: int
    chunk_shift: int
    row_shift: int
    bank_shift: int
    bank_xor: int
    hashed: int
    queue: int
    buffer: int
    rows: int
    reads: int
    writes: int
    bypass: int
    rinse: int
    predict: int
    per_set: int
    sampled: int
    reward: int
    most: int
    one_tag: int
    one_used: int
    one_pend: int
    two_tag: int
    two_used: int
    two_pend: int
    two_mark: int
    late: int
    row_key: int
    row_dirty: int
    weight: int
    bank_row: int
    bank_newest: int
    entered: int
    stored: int
    stored_count: int
    fold: int
    total: int
    by_channel: int
    by_set: int
    by_bank: int
    bin_of: int
    bins_dram: int
    bins_cu: int
    place: int
    row_at: int
    line_at: int
    counter: int
    grid: int
    order: int
    head: int
    bank_act: int
    bank_last: int
    bus: int
    gate: int
    entry: int
    accepts: int
    written: int
    refresh: int
    port: int
    spent: int
    bin_from: int
    width: int
    start: int
    busy: int
    ready: int
    done: int
    fence: int
    ring: int
    issue: int
    alu: int
    key: int


@inline_always
def _fold(high: int, m: Ints, o: Machine) -> int:
    """Turn of the channel for the part of an address above it: linear over its bits."""
    # tables for each byte: as the function is linear, their results add up (exclusive or)
    turn = m[o.fold + (high & 255)] ^ m[o.fold + 256 + (high >> 8 & 255)]
    return turn ^ m[o.fold + 512 + (high >> 16 & 255)] ^ m[o.fold + 768 + (high >> 24 & 255)]


@inline_always
def place_line(line: int, m: Ints, o: Machine) -> tuple[int, int]:
    """The channel of a line, and its number there."""
    chunk = line >> o.chunk_shift
    if o.channel_shift >= 0:  # a division takes long, and most machines have a power of two
        high, low = chunk >> o.channel_shift, chunk & (o.channels - 1)
    else:
        high = chunk // o.channels
        low = chunk - high * o.channels
    if o.hashed:
        # exclusive or permutes a power of two of channels; for other counts, a rotation does
        low = low ^ _fold(high, m, o) if o.channel_shift >= 0 else (low + _fold(high, m, o)) % o.channels
    return low, (high << o.chunk_shift) | (line & ((1 << o.chunk_shift) - 1))


@inline_always
def _set_of(local: int, o: Machine) -> int:
    """The set of L2 in a channel's slice."""
    # three slices of the number: strides of the set count must not fall into one set
    turned = local ^ (local >> o.l2_shift) ^ (local >> (2 * o.l2_shift)) if o.l2_xor else local
    return turned & ((1 << o.l2_shift) - 1)


@inline_always
def _local_of(tag: int, which: int, o: Machine) -> int:
    """The line of a channel with that tag and set."""
    # undoes the turn of `_set_of`: an exclusive or is its own inverse
    low = which ^ (tag & ((1 << o.l2_shift) - 1)) ^ (tag >> o.l2_shift) if o.l2_xor else which
    return (tag << o.l2_shift) | (low & ((1 << o.l2_shift) - 1))


@inline_always
def _tick(when: float, t: Floats, o: Machine) -> int:
    # rounds down; whoever stores the time of a line adds one, so that nothing arrives too early
    return int((when - t[o.start]) * _TICKS)


@inline_always
def _until(tick: int, t: Floats, o: Machine) -> float:
    return t[o.start] + tick / _TICKS


@inline_never
def _widen_bins(m: Ints, t: Floats, o: Machine) -> None:
    """Make bins of time twice as wide, for a run that does not fit into them."""
    t[o.width] *= 2.0
    for channel in range(o.channels):
        t[o.bin_from + channel] = -1e300  # to be found again
    histograms.join_bins(m, o.bins_dram, o.channels, BINS)
    histograms.join_bins(m, o.bins_cu, o.cus, BINS)
    histograms.join_bins(t, o.busy, o.cus, BINS)


@inline_always
def _bin(when: float, m: Ints, t: Floats, o: Machine) -> int:
    while when >= BINS * t[o.width]:  # a long gap may need several doublings
        _widen_bins(m, t, o)
    return int(when / t[o.width])


@inline_always
def _count_move(channel: int, when: float, m: Ints, t: Floats, o: Machine) -> None:
    """Count a line that DRAM moves, in its bin of time."""
    # the bin of the last line serves most lines: no division
    if not t[o.bin_from + channel] <= when < t[o.bin_from + channel] + t[o.width]:
        place = _bin(when, m, t, o)
        t[o.bin_from + channel], m[o.bin_of + channel] = place * t[o.width], o.bins_dram + place * o.channels + channel
    m[m[o.bin_of + channel]] += 1


@inline_always
def _activation(channel: int, local: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> int:
    """The activation that serves a request which is there from `now`: one that is made, or a new one."""
    block = local >> o.row_shift
    row = block >> o.bank_shift
    bank = block & ((1 << o.bank_shift) - 1)
    if o.bank_xor:
        bank ^= row & ((1 << o.bank_shift) - 1)  # rows that follow one another in one bank spread over all
    flat_bank = (channel << o.bank_shift) + bank
    if o.per_set:
        m[o.by_bank + 2 * flat_bank] += 1
    first, newest = flat_bank * HELD_ROWS, m[o.bank_newest + flat_bank]  # ring of activations of a bank, this the last
    if w[o.bank_row + first + newest] == row:
        m[o.total + ROW_HITS] += 1
        m[o.by_channel + channel * 4 + 2] += 1
        return first + newest
    after = newest
    for _ in range(HELD_ROWS - 1):  # one before it, if it is open until after now
        if t[o.bank_act + first + after] - o.trp <= now:
            break
        earlier = rings.place_of(after - 1, HELD_ROWS)  # backwards in the ring
        if w[o.bank_row + first + earlier] == row:
            m[o.total + ROW_HITS] += 1
            m[o.by_channel + channel * 4 + 2] += 1
            return first + earlier
        after = earlier  # each activation ends the one before it, tRP ahead of its own begin
    # the old row is closed after its last use, and two activations are tRC apart
    precharged, cycled = t[o.bank_last + flat_bank] + o.trp, t[o.bank_act + first + newest] + o.trc
    begin = dram.activation_at(now, precharged, cycled, t[o.gate + channel])
    servers.serve(t, o.gate + channel, now, o.trrd)  # between activations of any two banks of a channel
    newest = rings.place_of(newest + 1, HELD_ROWS)
    m[o.bank_newest + flat_bank] = newest
    w[o.bank_row + first + newest] = row
    t[o.bank_act + first + newest] = begin
    t[o.bank_last + flat_bank] = begin + o.tras  # a row stays open for tRAS, used or not
    m[o.total + ACTIVATIONS] += 1
    m[o.by_channel + channel * 4 + 3] += 1
    if o.per_set:
        m[o.by_bank + 2 * flat_bank + 1] += 1
    return first + newest


@inline_always
def _free_bus(channel: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> float:
    """Time from which the channel's bus is free, after refreshes that are due."""
    bus = max(t[o.bus + channel], now)
    if bus >= t[o.refresh + channel]:
        # those missed while the channel was idle have passed, and delay nobody
        due = dram.refreshes_before(bus - t[o.refresh + channel], o.trefi) + 1
        t[o.refresh + channel] += due * o.trefi
        bus += o.trfc
        first = (channel << o.bank_shift) * HELD_ROWS
        for held_row in range(first, first + (HELD_ROWS << o.bank_shift)):
            w[o.bank_row + held_row] = -1  # refresh closes every row of the channel
    return bus


@inline_always
def _read(channel: int, local: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> float:
    """Time at which a line of DRAM arrives."""
    # ring of the window: the entry that was taken `queue` requests ago
    place = channel * o.queue + rings.place_of(m[o.entered + channel], o.queue)
    m[o.entered + channel] += 1
    enters = max(now, t[o.entry + place])
    bus = _free_bus(channel, enters, w, m, t, o)  # refreshes due come first
    which = _activation(channel, local, enters, w, m, t, o)
    # the row is open and the request there, then the latency of a column; or the bus is busy until then
    begin = max(bus, dram.column_at(t[o.bank_act + which], o.trcd, enters) + o.tcl)
    t[o.bus + channel] = bus + o.burst  # bursts follow without gaps: what waits for its bank is overtaken on the bus
    t[o.entry + place] = begin  # it leaves the window when its burst begins
    bank = which // HELD_ROWS
    # a row may close once the last column has been read, before its data are on the bus
    t[o.bank_last + bank] = max(t[o.bank_last + bank], begin - o.tcl + o.burst)
    m[o.total + READS] += 1
    m[o.by_channel + channel * 4] += 1
    _count_move(channel, begin, m, t, o)
    return begin + o.burst


@inline_never
def _drain_buffer(channel: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> None:
    """Write the lines in the channel's buffer."""
    # the bus turns from reads to writes
    bus = _free_bus(channel, max(now, t[o.written + channel]), w, m, t, o) + o.to_write
    t[o.accepts + channel] = t[o.written + channel] = bus  # the buffer takes lines again once the bus has turned
    for slot in range(m[o.stored_count + channel]):
        which = _activation(channel, m[o.stored + channel * o.buffer + slot], bus, w, m, t, o)
        begin = max(bus, t[o.bank_act + which] + o.trcd)
        bank = which // HELD_ROWS
        # write recovery, before the row may close
        t[o.bank_last + bank] = max(t[o.bank_last + bank], begin + o.burst + o.twr)
        t[o.written + channel] = max(t[o.written + channel], begin + o.burst)
        _count_move(channel, begin, m, t, o)
        bus += o.burst
    m[o.total + TURNS] += 1
    t[o.bus + channel] = bus + o.to_read  # and back
    m[o.stored_count + channel] = 0


@inline_always
def _write(channel: int, local: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> float:
    """Time at which the buffer of a channel takes a line."""
    taken = max(now, t[o.accepts + channel])
    m[o.stored + channel * o.buffer + m[o.stored_count + channel]] = local
    m[o.stored_count + channel] += 1
    m[o.total + WRITES] += 1
    m[o.by_channel + channel * 4 + 1] += 1
    if m[o.stored_count + channel] == o.buffer:  # full: the only time at which it is drained, but for a kernel's end
        _drain_buffer(channel, taken, w, m, t, o)
    return taken


@inline_never
def _rinse_row(entry: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> None:
    """Write back every dirty line of a row of DRAM."""
    key, dirty = m[o.row_key + entry], m[o.row_dirty + entry]
    channel, block = key % o.channels, key // o.channels  # undoes the key of `_mark_dirty`
    for column in range(1 << o.row_shift):  # a bit for each line of a row: `row_bytes` is at most 62 lines
        if dirty >> column & 1:
            local = (block << o.row_shift) | column
            which = _set_of(local, o)
            first = ((channel << o.l2_shift) + which) * o.l2_ways
            way = lru.find_way(w, o.two_tag + first, o.l2_ways, local >> o.l2_shift)
            if way >= 0 and w[o.two_mark + first + way] & DIRTY:  # evicted or cleaned meanwhile
                w[o.two_mark + first + way] ^= DIRTY
                m[o.total + RINSED] += 1
                _write(channel, local, now, w, m, t, o)
    m[o.row_dirty + entry] = 0


@inline_always
def _mark_dirty(channel: int, local: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> None:
    """Note a dirty line in the index of rows; a row whose entry is taken from it is rinsed."""
    key = (local >> o.row_shift) * o.channels + channel
    entry = key & (o.rows - 1)  # direct-mapped: rows of one entry displace one another, as in a dirty-block index
    if m[o.row_key + entry] != key:
        if m[o.row_dirty + entry] != 0:
            _rinse_row(entry, now, w, m, t, o)
        m[o.row_key + entry] = key
    m[o.row_dirty + entry] |= 1 << (local & ((1 << o.row_shift) - 1))


@inline_always
def _clean_line(way: int, channel: int, which: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> None:
    """Write back a dirty line; with rinsing, all of its row."""
    local = _local_of(w[o.two_tag + way], which, o)
    if o.rinse:
        # this line is in the index too, so that it is written with the others
        _rinse_row(((local >> o.row_shift) * o.channels + channel) & (o.rows - 1), now, w, m, t, o)
    else:
        w[o.two_mark + way] ^= DIRTY
        _write(channel, local, now, w, m, t, o)


@inline_always
def _evict_line(way: int, channel: int, which: int, now: float, w: Ways, m: Ints, t: Floats, o: Machine) -> None:
    """Make room: teach the predictor about a line that nobody used, and write it back."""
    if w[o.two_tag + way] >= 0:
        mark = w[o.two_mark + way]
        if not mark & REUSED:  # brought, and never asked for again
            m[o.total + USELESS] += 1
            # a stored line was counted when it came
            if o.predict and not mark & STORED and which & (o.sampled - 1) == 0:
                m[o.weight + (mark >> 3)] = max(m[o.weight + (mark >> 3)] - 1, 0)
        if mark & DIRTY:
            m[o.total + EVICTED] += 1
            _clean_line(way, channel, which, now, w, m, t, o)


@inline_always
def _late(line: int, w: Ways, o: Machine) -> int:
    """The entry of a line among those under way that L2 does not keep: its own, or that which is there first."""
    # multiplicative hashing: 2 ** 16 over the golden ratio
    turned = (line ^ (line >> LATE_SHIFT) * 0x9E37) & ((1 << LATE_SHIFT) - 1)
    first = o.late + 2 * LATE_WAYS * turned
    entry = first
    for way in range(1, LATE_WAYS):  # the one that arrives first is the one to overwrite
        if w[first + way + LATE_WAYS] < w[entry + LATE_WAYS]:
            entry = first + way
    for way in range(LATE_WAYS):
        if w[first + way] == line >> LATE_SHIFT:
            entry = first + way
    return entry


@inline_always
def serve_line(line: int, pc: int, store: int, arrives: float, w: Ways, m: Ints, t: Floats, o: Machine) -> float:
    """Time at which L2, or DRAM behind it, has a line, or has taken it."""
    channel, local = place_line(line, m, o)
    at = servers.serve(t, o.port + channel, arrives, o.lookup)  # tag look-ups of a slice come one by one
    keeps = o.writes if store else o.reads
    which = _set_of(local, o)
    first = ((channel << o.l2_shift) + which) * o.l2_ways
    way = -1
    if o.reads:  # something may be there
        way = lru.find_way(w, o.two_tag + first, o.l2_ways, local >> o.l2_shift)
        m[o.total + STAMP] += 1
        if o.per_set:
            m[o.by_set + 3 * ((channel << o.l2_shift) + which)] += 1
    if way >= 0:
        way += first
        w[o.two_used + way] = lru.order_of_use(m[o.total + STAMP], way - first)
        if w[o.two_pend + way] > _tick(at, t, o):  # the line is under way: a load waits for it, a store goes on
            m[o.total + L2_MERGED] += 1
            if not store:
                return _until(w[o.two_pend + way], t, o)
        else:
            m[o.total + L2_HITS] += 1
            mark = w[o.two_mark + way]
            if not mark & REUSED:  # the first use alone teaches, once a line
                w[o.two_mark + way] = mark | REUSED  # used: its end will not lower the counter
                if o.predict and which & (o.sampled - 1) == 0:
                    m[o.weight + (mark >> 3)] = min(m[o.weight + (mark >> 3)] + o.reward, o.most)
        if not store:
            return at + o.l2_hit
        if not keeps:
            # a policy without stores writes through, and updates the line on its way
            return _write(channel, local, at + o.far, w, m, t, o)
        if not w[o.two_mark + way] & DIRTY:
            w[o.two_mark + way] |= DIRTY
            if o.rinse:
                _mark_dirty(channel, local, at, w, m, t, o)
        return at
    if o.reads and o.per_set:
        m[o.by_set + 3 * ((channel << o.l2_shift) + which) + 1] += 1
    # sampled sets keep all, so that the counter can recover
    if keeps and o.predict and which & (o.sampled - 1) != 0 and m[o.weight + pc] == 0:
        m[o.total + PREDICTED] += 1
        keeps = 0
    if keeps:
        way = lru.oldest_arrived_way(w, o.two_used + first, o.two_pend + first, o.l2_ways, _tick(at, t, o))
        if way < 0 and o.bypass:
            m[o.total + L2_BYPASSED] += 1
            keeps = 0
        elif way < 0:  # every way is under way: the slice stands still until one has arrived
            soon = lru.soonest_arrival(w, o.two_pend + first, o.l2_ways)
            m[o.total + L2_STALLS] += 1
            if o.per_set:
                m[o.by_set + 3 * ((channel << o.l2_shift) + which) + 2] += 1
            t[o.spent + L2_STALLED] += _until(soon, t, o) - at
            at = _until(soon, t, o)
            t[o.port + channel] = at + o.lookup
            way = lru.oldest_arrived_way(w, o.two_used + first, o.two_pend + first, o.l2_ways, soon)
    if store and not keeps:
        return _write(channel, local, at + o.far, w, m, t, o)  # a store that is not kept goes on to DRAM
    late = 0
    if not keeps:  # in-flight coalescing alone
        late = _late(line, w, o)
        # under way already: one request to DRAM serves both
        if w[late] == line >> LATE_SHIFT and w[late + LATE_WAYS] > _tick(at, t, o):
            m[o.total + L2_MERGED] += 1
            return _until(w[late + LATE_WAYS], t, o)
    else:
        way += first
        _evict_line(way, channel, which, at, w, m, t, o)
        t[o.port + channel] += o.fill  # the slice is busy while it takes the line
    done = at  # a store fills its line without reading it
    if not store:
        done = _read(channel, local, at + o.far, w, m, t, o) + o.far
        m[o.total + L2_MISSES] += 1
    if keeps:
        w[o.two_tag + way] = local >> o.l2_shift
        w[o.two_used + way] = lru.order_of_use(m[o.total + STAMP], way - first)
        w[o.two_pend + way] = 0 if store else _tick(done, t, o) + 1  # nothing to wait for
        w[o.two_mark + way] = (pc << 3) | (STORED | DIRTY if store else 0)
        # at once, not at its end: a later use raises the counter again
        if store and o.predict and which & (o.sampled - 1) == 0:
            m[o.weight + pc] = max(m[o.weight + pc] - 1, 0)
        if store and o.rinse:
            _mark_dirty(channel, local, at, w, m, t, o)
    else:
        w[late], w[late + LATE_WAYS] = line >> LATE_SHIFT, _tick(done, t, o) + 1  # to merge with, until it has arrived
    return done


@inline_always
def _ready_first(cu: int, t: Floats, o: Machine) -> int:
    """The workgroup of a CU that has been ready longest, or will be first; ties go to the lower place."""
    first = o.ready + cu * o.held
    return events.earliest(t, first, first + o.held) - o.ready


@inline_always
def _next_of(cu: int, m: Ints, t: Floats, o: Machine) -> None:
    """Put the CU at the root of the heap to the time of its next operation."""
    ready = _ready_first(cu, t, o)
    # what waits for the CU itself comes next: one request a cycle for all its workgroups
    t[o.key] = max(t[o.ready + ready], t[o.issue + cu])
    events.sink_root(t, o.key, m, o.order, o.cus)


@inline_always
def _assign_workgroup(slot: int, group: int, extent: Ints, m: Ints, o: Machine) -> None:
    """Give a workgroup to a place on a CU: its coordinates, the last of which runs fastest."""
    quotient = group
    for axis in range(3, -1, -1):  # the last coordinate runs fastest
        m[o.grid + 4 * slot + axis] = quotient % extent[axis]
        quotient //= extent[axis]
    m[o.place + slot] = 0
    m[o.row_at + slot], m[o.line_at + slot] = 0, -1  # no row begun


@inline_never
def _begin_kernel(start: float, groups: int, extent: Ints, w: Ways, m: Ints, t: Floats, o: Machine) -> int:
    """Empty L1s, settle everything in flight, and fill every slot with a workgroup; return the number of workgroups."""
    t[o.start] = start
    for index in range((o.cus << o.l1_shift) * o.l1_ways):  # L1s are write-through, so that nothing is lost
        w[o.one_tag + index], w[o.one_pend + index] = -1, 0
    for index in range((o.channels << o.l2_shift) * o.l2_ways):
        w[o.two_pend + index] = 0
    for index in range(2 * PENDING):  # and nothing is under way from one kernel to the next
        w[o.late + index] = -1
    for index in range(o.cus * o.in_flight):
        w[o.ring + index] = 0
    next_group = 0
    for place in range(o.held):  # CUs in turn, so that few workgroups spread over all
        for cu in range(o.cus):
            index = cu * o.held + place
            t[o.ready + index] = np.inf
            if next_group < groups:
                _assign_workgroup(index, next_group, extent, m, o)
                t[o.ready + index] = t[o.done + index] = t[o.fence + index] = start
                next_group += 1
    for cu in range(o.cus):
        t[o.issue + cu] = t[o.alu + cu] = start
        t[o.key + cu], m[o.order + cu] = t[o.ready + cu * o.held], cu
    return next_group


@inline_never
def _end_kernel(end: float, w: Ways, m: Ints, t: Floats, o: Machine) -> float:
    """Write back what is dirty, and empty the buffers."""
    if o.writes:  # else nothing was ever left dirty
        for channel in range(o.channels):
            for which in range(1 << o.l2_shift):
                first = ((channel << o.l2_shift) + which) * o.l2_ways
                for way in range(first, first + o.l2_ways):
                    if w[o.two_mark + way] & DIRTY:
                        _clean_line(way, channel, which, end, w, m, t, o)
    for channel in range(o.channels):
        if m[o.stored_count + channel] > 0:
            _drain_buffer(channel, end, w, m, t, o)
    for channel in range(o.channels):  # the kernel ends with the last write
        end = max(end, t[o.bus + channel], t[o.written + channel])
    return end


@flat_over(*PARTS)
def run(
    code: Ints,
    work: Floats,
    extent: Ints,
    listed: Ints,
    begins: Ints,
    marks: Ints,
    seen: Floats,
    start: float,
    w: Ways,
    m: Ints,
    t: Floats,
    o: Machine,
) -> float:
    """Run a kernel from `start` [ns]; when it has ended.

    code [P, FIELDS], work [P]: the program, and the time of COMPUTE, or of a unit of LISTED_COMPUTE [ns]. extent [4]:
    of the grid, of which the first marks[-1] workgroups run. listed [R, 5]: address, bytes, pc, LISTED_LOAD ..., and
    the ns from `start` before which it is not made; begins [workgroups + 1]: whose they are, by the last coordinate,
    for LISTED. seen [marks, TOTALS + 1]: totals and time once so many workgroups had been given out.
    """
    groups, passed, end = marks[-1], 0, start
    next_group = _begin_kernel(start, groups, extent, w, m, t, o)
    while t[o.key] < np.inf:  # root of the heap: the CU that acts next
        while passed < len(marks) and next_group >= marks[passed]:  # several marks may be met by one step
            seen[passed, TOTALS] = t[o.key]
            for resident in range(TOTALS):
                seen[passed, resident] = m[o.total + resident]
            passed += 1
        cu = m[o.order]
        resident = _ready_first(cu, t, o)
        now, at = t[o.key], m[o.place + resident]
        op = code[at, OP]
        if op == LISTED:  # not before its time, nor before what others ask for until then
            owner = m[o.grid + 4 * resident + 3]
            mine = begins[owner] + m[o.counter + 4 * resident + 3]
            # its recorded time has not come: the CU goes back into the heap until then
            if mine < begins[owner + 1] and start + listed[mine, 4] > now:
                t[o.ready + resident] = t[o.key] = start + listed[mine, 4]
                events.sink_root(t, o.key, m, o.order, o.cus)
                continue
        if op == LOAD or op == STORE or op == LISTED:
            base, pc, size, rows, store = code[at, BASE], code[at, PC], code[at, BYTES], code[at, ROWS], op == STORE
            low, high, scatter = code[at, LOW], code[at, HIGH], code[at, SCATTER]
            if op == LISTED:
                # the fourth counter of the loop is the place in the list
                owner = m[o.grid + 4 * resident + 3]
                mine, listed_kind = begins[owner] + m[o.counter + 4 * resident + 3], LISTED_WAIT
                if mine < begins[owner + 1]:
                    base, size, pc, listed_kind = listed[mine, 0], listed[mine, 1], listed[mine, 2], listed[mine, 3]
                store = listed_kind == LISTED_STORE
                if listed_kind >= LISTED_WAIT:
                    rows = 0  # no request, or the list is at its end
            else:
                for axis in range(4):
                    base += m[o.grid + 4 * resident + axis] * code[at, GRID + axis]
                    # addresses are affine in coordinates and counters
                    base += m[o.counter + 4 * resident + axis] * code[at, LOOPS + axis]
            requested, done, before = now, t[o.done + resident], m[o.total + REQUESTS]
            # CUs may run ahead of one another by so little, or they would see caches out of order
            horizon = min(t[o.key + 1], t[o.key + 2]) + SLACK * o.cycle  # may not see what is made after this
            row, line, paused = m[o.row_at + resident], m[o.line_at + resident], False
            while row < rows and not paused:
                begin = base + row * code[at, STEP]  # a run of bytes
                if scatter > 0:
                    # multiplicative hashing: the same draw in every run and on every machine
                    drawn = np.uint64(begin) * np.uint64(0x9E3779B97F4A7C15)
                    # the upper bits, which are mixed best
                    begin = low + np.int64(drawn >> np.uint64(24)) % scatter * size
                if begin + size <= low or begin >= high:  # padding beyond the tensor: no request
                    row += 1
                    continue
                stop = min(begin + size, high)
                if code[at, PITCH] > 0:
                    # a run does not go on in the next row of the tensor
                    stop = min(stop, begin + code[at, PITCH] - (begin - low) % code[at, PITCH])
                # lines of this run that were asked for before a pause are not asked for again
                line = max(line, max(begin, low) >> o.line_shift)
                while line <= (stop - 1) >> o.line_shift:
                    if now > horizon:
                        paused = True
                        break
                    way, first = -1, 0
                    if o.reads and not store:  # L1 does not look for stores, nor keeps them
                        which = (cu << o.l1_shift) + (line & ((1 << o.l1_shift) - 1))
                        first = which * o.l1_ways
                        way = lru.find_way(w, o.one_tag + first, o.l1_ways, line >> o.l1_shift)
                        m[o.total + STAMP] += 1
                        if way >= 0:
                            now += o.cycle  # a hit takes a cycle to issue, and no place in flight
                            m[o.total + REQUESTS] += 1
                            w[o.one_used + first + way] = lru.order_of_use(m[o.total + STAMP], way)
                            arrived = _until(w[o.one_pend + first + way], t, o)
                            # under way: it came with an earlier miss
                            m[o.total + (L1_MERGED if arrived > now + o.l1_hit else L1_HITS)] += 1
                            done = max(done, arrived, now + o.l1_hit)
                            line += 1
                            continue
                    # ring of places in flight, in the order of issue: the oldest is asked first
                    slot = o.ring + cu * o.in_flight + m[o.head + cu]
                    until = _until(w[slot], t, o)
                    if until > now:
                        t[o.spent + FULL] += until - now
                        now = until
                        continue  # time has passed: look at the horizon again
                    if o.reads and not store:
                        way = lru.oldest_arrived_way(
                            w, o.one_used + first, o.one_pend + first, o.l1_ways, _tick(now, t, o)
                        )
                        if way < 0 and o.bypass:
                            m[o.total + L1_BYPASSED] += 1
                        elif way < 0:
                            # a tick later, when the line is no longer under way
                            until = _until(lru.soonest_arrival(w, o.one_pend + first, o.l1_ways) + 1, t, o)
                            m[o.total + L1_STALLS] += 1
                            t[o.spent + L1_STALLED] += until - now
                            now = until
                            continue  # time has passed: another CU may go first, and the line is looked up anew
                    now += o.cycle
                    m[o.total + REQUESTS] += 1
                    m[o.head + cu] = rings.next_place(m[o.head + cu], o.in_flight)
                    came = serve_line(line, pc, store, now + o.hop, w, m, t, o)
                    if store:
                        end = max(end, came)  # stores are not waited for, but the kernel ends after them
                    else:
                        came += o.hop
                        done = max(done, came)
                        if way >= 0:  # passed by: the line goes to the registers alone
                            w[o.one_tag + first + way] = line >> o.l1_shift
                            w[o.one_used + first + way] = lru.order_of_use(m[o.total + STAMP], way)
                            w[o.one_pend + first + way] = _tick(came, t, o) + 1
                    w[slot] = _tick(came, t, o) + 1  # the place is free again when the line is there
                    line += 1
                if not paused:
                    row, line = row + 1, -1  # the next run begins at its own first line
            m[o.bins_cu + _bin(requested, m, t, o) * o.cus + cu] += m[o.total + REQUESTS] - before
            t[o.issue + cu] = t[o.ready + resident] = now  # requests of one workgroup hold up the others of its CU
            t[o.done + resident] = done
            m[o.row_at + resident], m[o.line_at + resident] = (row, line) if paused else (0, -1)
            if paused:
                _next_of(cu, m, t, o)  # other CUs first; this operation goes on where it stopped
                continue
            if op == LISTED and listed_kind == LISTED_WAIT:
                t[o.ready + resident] = max(now, done)
            elif op == LISTED and listed_kind == LISTED_COMPUTE:
                servers.serve(t, o.alu + cu, now, base * work[at])
                t[o.ready + resident] = t[o.alu + cu]
                t[o.busy + _bin(now, m, t, o) * o.cus + cu] += base * work[at]
        elif op == COMPUTE:
            # arithmetic of a CU comes one after another, requests go on meanwhile
            servers.serve(t, o.alu + cu, now, work[at])
            t[o.ready + resident] = t[o.alu + cu]
            t[o.busy + _bin(now, m, t, o) * o.cus + cu] += work[at]
        at += 1
        while True:  # what takes no time
            op = code[at, OP]
            if op == LOOP:
                level = o.counter + 4 * resident + code[at, LEVEL]
                # a loop without a count runs over the list of its workgroup
                owner = m[o.grid + 4 * resident + 3] if code[at, TIMES] == 0 else 0
                times = code[at, TIMES] if code[at, TIMES] > 0 else begins[owner + 1] - begins[owner]
                m[level] += 1
                at = code[at, TARGET] if m[level] < times else at + 1
                if m[level] >= times:  # for the next time that the loop is entered
                    m[level] = 0
            elif op == WAIT or op == FENCE:
                t[o.ready + resident] = max(
                    t[o.ready + resident], t[o.done + resident] if op == WAIT else t[o.fence + resident]
                )
                # what was loaded until here is what the next fence waits for
                t[o.fence + resident] = t[o.done + resident]
                at += 1
            elif op == END:
                end = max(end, t[o.ready + resident], t[o.done + resident])
                if next_group < groups:  # the place is free: the next workgroup starts there at once
                    _assign_workgroup(resident, next_group, extent, m, o)
                    next_group += 1
                    at = 0
                    t[o.done + resident] = t[o.fence + resident] = t[o.ready + resident]
                else:
                    t[o.ready + resident] = np.inf
                break
            else:
                break
        m[o.place + resident] = at
        _next_of(cu, m, t, o)
    end = _end_kernel(end, w, m, t, o)
    for last in range(passed, len(marks)):  # marks that no step met
        seen[last, TOTALS] = end
        for resident in range(TOTALS):
            seen[last, resident] = m[o.total + resident]
    return end
