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

Lines = NDArray[np.int32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

END, LOAD, STORE, COMPUTE, WAIT, FENCE, LOOP, LISTED = range(8)
"""Operations of a program. COMPUTE: the CU is busy. WAIT: until all loads are there. FENCE: until those before the last
fence are. LOOP: back to `TARGET`, `TIMES` times. LISTED: the next entry of a workgroup's list."""
LIST_ADDRESS, LIST_BYTES, LIST_PC, LIST_KIND, LIST_NS = range(5)
"""Columns of a list: what is asked for, by which instruction, one of LISTED_LOAD ..., and the ns before which not."""
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

    Times are in ns. one_*, two_*: tags, order of use, arrivals and marks (dirty, reused, whose) of L1 and L2. Sizes are
    powers of two but for channels and ways; `channel_shift` is -1 where channels are not.
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


class MemoryState(NamedTuple):
    """State of the memory system in three flat arrays, in which parts begin where `machine` says.

    lines: 32 bits; tags, order of use and times of lines, and their marks. counts: integers. times: in ns.
    """

    lines: Lines
    counts: Ints
    times: Floats
    machine: Machine


@inline_always
def _fold(high: int, memory: MemoryState) -> int:
    """Turn of the channel for the part of an address above it: linear over its bits."""
    counts, machine = memory.counts, memory.machine
    # tables for each byte: as the function is linear, their results add up (exclusive or)
    turn = counts[machine.fold + (high & 255)] ^ counts[machine.fold + 256 + (high >> 8 & 255)]
    return turn ^ counts[machine.fold + 512 + (high >> 16 & 255)] ^ counts[machine.fold + 768 + (high >> 24 & 255)]


@inline_always
def place_line(line: int, memory: MemoryState) -> tuple[int, int]:
    """The channel of a line, and its number there."""
    machine = memory.machine
    chunk = line >> machine.chunk_shift
    if machine.channel_shift >= 0:  # a division takes long, and most machines have a power of two
        high, low = chunk >> machine.channel_shift, chunk & (machine.channels - 1)
    else:
        high = chunk // machine.channels
        low = chunk - high * machine.channels
    if machine.hashed:
        # exclusive or permutes a power of two of channels; for other counts, a rotation does
        turn = _fold(high, memory)
        low = low ^ turn if machine.channel_shift >= 0 else (low + turn) % machine.channels
    return low, (high << machine.chunk_shift) | (line & ((1 << machine.chunk_shift) - 1))


@inline_always
def _set_of(local: int, machine: Machine) -> int:
    """The set of L2 in a channel's slice."""
    # three slices of the number: strides of the set count must not fall into one set
    turned = local ^ (local >> machine.l2_shift) ^ (local >> (2 * machine.l2_shift)) if machine.l2_xor else local
    return turned & ((1 << machine.l2_shift) - 1)


@inline_always
def _local_of(tag: int, which: int, machine: Machine) -> int:
    """The line of a channel with that tag and set."""
    # undoes the turn of `_set_of`: an exclusive or is its own inverse
    low = which ^ (tag & ((1 << machine.l2_shift) - 1)) ^ (tag >> machine.l2_shift) if machine.l2_xor else which
    return (tag << machine.l2_shift) | (low & ((1 << machine.l2_shift) - 1))


@inline_always
def _tick(when: float, memory: MemoryState) -> int:
    times, machine = memory.times, memory.machine
    # rounds down; whoever stores the time of a line adds one, so that nothing arrives too early
    return int((when - times[machine.start]) * _TICKS)


@inline_always
def _until(tick: int, memory: MemoryState) -> float:
    times, machine = memory.times, memory.machine
    return times[machine.start] + tick / _TICKS


@inline_never
def _widen_bins(memory: MemoryState) -> None:
    """Make bins of time twice as wide, for a run that does not fit into them."""
    counts, times, machine = memory.counts, memory.times, memory.machine
    times[machine.width] *= 2.0
    for channel in range(machine.channels):
        times[machine.bin_from + channel] = -1e300  # to be found again
    histograms.join_bins(counts, machine.bins_dram, machine.channels, BINS)
    histograms.join_bins(counts, machine.bins_cu, machine.cus, BINS)
    histograms.join_bins(times, machine.busy, machine.cus, BINS)


@inline_always
def _bin(when: float, memory: MemoryState) -> int:
    times, machine = memory.times, memory.machine
    while when >= BINS * times[machine.width]:  # a long gap may need several doublings
        _widen_bins(memory)
    return int(when / times[machine.width])


@inline_always
def _count_move(channel: int, when: float, memory: MemoryState) -> None:
    """Count a line that DRAM moves, in its bin of time."""
    counts, times, machine = memory.counts, memory.times, memory.machine
    # the bin of the last line serves most lines: no division
    if not times[machine.bin_from + channel] <= when < times[machine.bin_from + channel] + times[machine.width]:
        place = _bin(when, memory)
        times[machine.bin_from + channel] = place * times[machine.width]
        counts[machine.bin_of + channel] = machine.bins_dram + place * machine.channels + channel
    counts[counts[machine.bin_of + channel]] += 1


@inline_always
def _activation(channel: int, local: int, now: float, memory: MemoryState) -> int:
    """The activation that serves a request which is there from `now`: one that is made, or a new one."""
    lines, counts, times, machine = memory
    block = local >> machine.row_shift
    row = block >> machine.bank_shift
    bank = block & ((1 << machine.bank_shift) - 1)
    if machine.bank_xor:
        bank ^= row & ((1 << machine.bank_shift) - 1)  # rows that follow one another in one bank spread over all
    flat_bank = (channel << machine.bank_shift) + bank
    if machine.per_set:
        counts[machine.by_bank + 2 * flat_bank] += 1
    # ring of activations of a bank, this the last
    first, newest = flat_bank * HELD_ROWS, counts[machine.bank_newest + flat_bank]
    if lines[machine.bank_row + first + newest] == row:
        counts[machine.total + ROW_HITS] += 1
        counts[machine.by_channel + channel * 4 + 2] += 1
        return first + newest
    after = newest
    for _ in range(HELD_ROWS - 1):  # one before it, if it is open until after now
        if times[machine.bank_act + first + after] - machine.trp <= now:
            break
        earlier = rings.place_of(after - 1, HELD_ROWS)  # backwards in the ring
        if lines[machine.bank_row + first + earlier] == row:
            counts[machine.total + ROW_HITS] += 1
            counts[machine.by_channel + channel * 4 + 2] += 1
            return first + earlier
        after = earlier  # each activation ends the one before it, tRP ahead of its own begin
    # the old row is closed after its last use, and two activations are tRC apart
    precharged = times[machine.bank_last + flat_bank] + machine.trp
    cycled = times[machine.bank_act + first + newest] + machine.trc
    begin = dram.activation_at(now, precharged, cycled, times[machine.gate + channel])
    servers.serve(times, machine.gate + channel, now, machine.trrd)  # between activations of any two banks of a channel
    newest = rings.place_of(newest + 1, HELD_ROWS)
    counts[machine.bank_newest + flat_bank] = newest
    lines[machine.bank_row + first + newest] = row
    times[machine.bank_act + first + newest] = begin
    times[machine.bank_last + flat_bank] = begin + machine.tras  # a row stays open for tRAS, used or not
    counts[machine.total + ACTIVATIONS] += 1
    counts[machine.by_channel + channel * 4 + 3] += 1
    if machine.per_set:
        counts[machine.by_bank + 2 * flat_bank + 1] += 1
    return first + newest


@inline_always
def _free_bus(channel: int, now: float, memory: MemoryState) -> float:
    """Time from which the channel's bus is free, after refreshes that are due."""
    lines, times, machine = memory.lines, memory.times, memory.machine
    bus = max(times[machine.bus + channel], now)
    if bus >= times[machine.refresh + channel]:
        # those missed while the channel was idle have passed, and delay nobody
        due = dram.refreshes_before(bus - times[machine.refresh + channel], machine.trefi) + 1
        times[machine.refresh + channel] += due * machine.trefi
        bus += machine.trfc
        first = (channel << machine.bank_shift) * HELD_ROWS
        for held_row in range(first, first + (HELD_ROWS << machine.bank_shift)):
            lines[machine.bank_row + held_row] = -1  # refresh closes every row of the channel
    return bus


@inline_always
def _read(channel: int, local: int, now: float, memory: MemoryState) -> float:
    """Time at which a line of DRAM arrives."""
    counts, times, machine = memory.counts, memory.times, memory.machine
    # ring of the window: the entry that was taken `queue` requests ago
    place = channel * machine.queue + rings.place_of(counts[machine.entered + channel], machine.queue)
    counts[machine.entered + channel] += 1
    enters = max(now, times[machine.entry + place])
    bus = _free_bus(channel, enters, memory)  # refreshes due come first
    which = _activation(channel, local, enters, memory)
    # the row is open and the request there, then the latency of a column; or the bus is busy until then
    begin = max(bus, dram.column_at(times[machine.bank_act + which], machine.trcd, enters) + machine.tcl)
    # bursts follow without gaps: what waits for its bank is overtaken on the bus
    times[machine.bus + channel] = bus + machine.burst
    times[machine.entry + place] = begin  # it leaves the window when its burst begins
    bank = which // HELD_ROWS
    # a row may close once the last column has been read, before its data are on the bus
    times[machine.bank_last + bank] = max(times[machine.bank_last + bank], begin - machine.tcl + machine.burst)
    counts[machine.total + READS] += 1
    counts[machine.by_channel + channel * 4] += 1
    _count_move(channel, begin, memory)
    return begin + machine.burst


@inline_never
def _drain_buffer(channel: int, now: float, memory: MemoryState) -> None:
    """Write the lines in the channel's buffer."""
    counts, times, machine = memory.counts, memory.times, memory.machine
    # the bus turns from reads to writes
    bus = _free_bus(channel, max(now, times[machine.written + channel]), memory) + machine.to_write
    # the buffer takes lines again once the bus has turned
    times[machine.accepts + channel] = times[machine.written + channel] = bus
    for slot in range(counts[machine.stored_count + channel]):
        which = _activation(channel, counts[machine.stored + channel * machine.buffer + slot], bus, memory)
        begin = max(bus, times[machine.bank_act + which] + machine.trcd)
        bank = which // HELD_ROWS
        # write recovery, before the row may close
        times[machine.bank_last + bank] = max(times[machine.bank_last + bank], begin + machine.burst + machine.twr)
        times[machine.written + channel] = max(times[machine.written + channel], begin + machine.burst)
        _count_move(channel, begin, memory)
        bus += machine.burst
    counts[machine.total + TURNS] += 1
    times[machine.bus + channel] = bus + machine.to_read  # and back
    counts[machine.stored_count + channel] = 0


@inline_always
def _write(channel: int, local: int, now: float, memory: MemoryState) -> float:
    """Time at which the buffer of a channel takes a line."""
    counts, times, machine = memory.counts, memory.times, memory.machine
    taken = max(now, times[machine.accepts + channel])
    counts[machine.stored + channel * machine.buffer + counts[machine.stored_count + channel]] = local
    counts[machine.stored_count + channel] += 1
    counts[machine.total + WRITES] += 1
    counts[machine.by_channel + channel * 4 + 1] += 1
    # full: the only time at which it is drained, but for a kernel's end
    if counts[machine.stored_count + channel] == machine.buffer:
        _drain_buffer(channel, taken, memory)
    return taken


@inline_never
def _rinse_row(entry: int, now: float, memory: MemoryState) -> None:
    """Write back every dirty line of a row of DRAM."""
    lines, counts, machine = memory.lines, memory.counts, memory.machine
    key, dirty = counts[machine.row_key + entry], counts[machine.row_dirty + entry]
    channel, block = key % machine.channels, key // machine.channels  # undoes the key of `_mark_dirty`
    for column in range(1 << machine.row_shift):  # a bit for each line of a row: `row_bytes` is at most 62 lines
        if dirty >> column & 1:
            local = (block << machine.row_shift) | column
            which = _set_of(local, machine)
            first = ((channel << machine.l2_shift) + which) * machine.l2_ways
            way = lru.find_way(lines, machine.two_tag + first, machine.l2_ways, local >> machine.l2_shift)
            if way >= 0 and lines[machine.two_mark + first + way] & DIRTY:  # evicted or cleaned meanwhile
                lines[machine.two_mark + first + way] ^= DIRTY
                counts[machine.total + RINSED] += 1
                _write(channel, local, now, memory)
    counts[machine.row_dirty + entry] = 0


@inline_always
def _mark_dirty(channel: int, local: int, now: float, memory: MemoryState) -> None:
    """Note a dirty line in the index of rows; a row whose entry is taken from it is rinsed."""
    counts, machine = memory.counts, memory.machine
    key = (local >> machine.row_shift) * machine.channels + channel
    entry = key & (machine.rows - 1)  # direct-mapped: rows of one entry displace one another, as in a dirty-block index
    if counts[machine.row_key + entry] != key:
        if counts[machine.row_dirty + entry] != 0:
            _rinse_row(entry, now, memory)
        counts[machine.row_key + entry] = key
    counts[machine.row_dirty + entry] |= 1 << (local & ((1 << machine.row_shift) - 1))


@inline_always
def _clean_line(way: int, channel: int, which: int, now: float, memory: MemoryState) -> None:
    """Write back a dirty line; with rinsing, all of its row."""
    lines, machine = memory.lines, memory.machine
    local = _local_of(lines[machine.two_tag + way], which, machine)
    if machine.rinse:
        # this line is in the index too, so that it is written with the others
        _rinse_row(((local >> machine.row_shift) * machine.channels + channel) & (machine.rows - 1), now, memory)
    else:
        lines[machine.two_mark + way] ^= DIRTY
        _write(channel, local, now, memory)


@inline_always
def _evict_line(way: int, channel: int, which: int, now: float, memory: MemoryState) -> None:
    """Make room: teach the predictor about a line that nobody used, and write it back."""
    lines, counts, machine = memory.lines, memory.counts, memory.machine
    if lines[machine.two_tag + way] >= 0:
        mark = lines[machine.two_mark + way]
        if not mark & REUSED:  # brought, and never asked for again
            counts[machine.total + USELESS] += 1
            # a stored line was counted when it came
            if machine.predict and not mark & STORED and which & (machine.sampled - 1) == 0:
                counts[machine.weight + (mark >> 3)] = max(counts[machine.weight + (mark >> 3)] - 1, 0)
        if mark & DIRTY:
            counts[machine.total + EVICTED] += 1
            _clean_line(way, channel, which, now, memory)


@inline_always
def _late(line: int, memory: MemoryState) -> int:
    """The entry of a line among those under way that L2 does not keep: its own, or that which is there first."""
    lines, machine = memory.lines, memory.machine
    # multiplicative hashing: 2 ** 16 over the golden ratio
    turned = (line ^ (line >> LATE_SHIFT) * 0x9E37) & ((1 << LATE_SHIFT) - 1)
    first = machine.late + 2 * LATE_WAYS * turned
    entry = first
    for way in range(1, LATE_WAYS):  # the one that arrives first is the one to overwrite
        if lines[first + way + LATE_WAYS] < lines[entry + LATE_WAYS]:
            entry = first + way
    for way in range(LATE_WAYS):
        if lines[first + way] == line >> LATE_SHIFT:
            entry = first + way
    return entry


@inline_always
def serve_line(line: int, pc: int, store: int, arrives: float, memory: MemoryState) -> float:
    """Time at which L2, or DRAM behind it, has a line, or has taken it."""
    lines, counts, times, machine = memory
    channel, local = place_line(line, memory)
    # tag look-ups of a slice come one by one
    at = servers.serve(times, machine.port + channel, arrives, machine.lookup)
    keeps = machine.writes if store else machine.reads
    which = _set_of(local, machine)
    first = ((channel << machine.l2_shift) + which) * machine.l2_ways
    way = -1
    if machine.reads:  # something may be there
        way = lru.find_way(lines, machine.two_tag + first, machine.l2_ways, local >> machine.l2_shift)
        counts[machine.total + STAMP] += 1
        if machine.per_set:
            counts[machine.by_set + 3 * ((channel << machine.l2_shift) + which)] += 1
    if way >= 0:
        way += first
        lines[machine.two_used + way] = lru.order_of_use(counts[machine.total + STAMP], way - first)
        # the line is under way: a load waits for it, a store goes on
        if lines[machine.two_pend + way] > _tick(at, memory):
            counts[machine.total + L2_MERGED] += 1
            if not store:
                return _until(lines[machine.two_pend + way], memory)
        else:
            counts[machine.total + L2_HITS] += 1
            mark = lines[machine.two_mark + way]
            if not mark & REUSED:  # the first use alone teaches, once a line
                lines[machine.two_mark + way] = mark | REUSED  # used: its end will not lower the counter
                if machine.predict and which & (machine.sampled - 1) == 0:
                    counts[machine.weight + (mark >> 3)] = min(
                        counts[machine.weight + (mark >> 3)] + machine.reward, machine.most
                    )
        if not store:
            return at + machine.l2_hit
        if not keeps:
            # a policy without stores writes through, and updates the line on its way
            return _write(channel, local, at + machine.far, memory)
        if not lines[machine.two_mark + way] & DIRTY:
            lines[machine.two_mark + way] |= DIRTY
            if machine.rinse:
                _mark_dirty(channel, local, at, memory)
        return at
    if machine.reads and machine.per_set:
        counts[machine.by_set + 3 * ((channel << machine.l2_shift) + which) + 1] += 1
    # sampled sets keep all, so that the counter can recover
    if keeps and machine.predict and which & (machine.sampled - 1) != 0 and counts[machine.weight + pc] == 0:
        counts[machine.total + PREDICTED] += 1
        keeps = 0
    if keeps:
        way = lru.oldest_arrived_way(
            lines, machine.two_used + first, machine.two_pend + first, machine.l2_ways, _tick(at, memory)
        )
        if way < 0 and machine.bypass:
            counts[machine.total + L2_BYPASSED] += 1
            keeps = 0
        elif way < 0:  # every way is under way: the slice stands still until one has arrived
            soon = lru.soonest_arrival(lines, machine.two_pend + first, machine.l2_ways)
            counts[machine.total + L2_STALLS] += 1
            if machine.per_set:
                counts[machine.by_set + 3 * ((channel << machine.l2_shift) + which) + 2] += 1
            times[machine.spent + L2_STALLED] += _until(soon, memory) - at
            at = _until(soon, memory)
            times[machine.port + channel] = at + machine.lookup
            way = lru.oldest_arrived_way(
                lines, machine.two_used + first, machine.two_pend + first, machine.l2_ways, soon
            )
    if store and not keeps:
        return _write(channel, local, at + machine.far, memory)  # a store that is not kept goes on to DRAM
    late = 0
    if not keeps:  # in-flight coalescing alone
        late = _late(line, memory)
        # under way already: one request to DRAM serves both
        if lines[late] == line >> LATE_SHIFT and lines[late + LATE_WAYS] > _tick(at, memory):
            counts[machine.total + L2_MERGED] += 1
            return _until(lines[late + LATE_WAYS], memory)
    else:
        way += first
        _evict_line(way, channel, which, at, memory)
        times[machine.port + channel] += machine.fill  # the slice is busy while it takes the line
    done = at  # a store fills its line without reading it
    if not store:
        done = _read(channel, local, at + machine.far, memory) + machine.far
        counts[machine.total + L2_MISSES] += 1
    if keeps:
        lines[machine.two_tag + way] = local >> machine.l2_shift
        lines[machine.two_used + way] = lru.order_of_use(counts[machine.total + STAMP], way - first)
        lines[machine.two_pend + way] = 0 if store else _tick(done, memory) + 1  # nothing to wait for
        lines[machine.two_mark + way] = (pc << 3) | (STORED | DIRTY if store else 0)
        # at once, not at its end: a later use raises the counter again
        if store and machine.predict and which & (machine.sampled - 1) == 0:
            counts[machine.weight + pc] = max(counts[machine.weight + pc] - 1, 0)
        if store and machine.rinse:
            _mark_dirty(channel, local, at, memory)
    else:
        # to merge with, until it has arrived
        lines[late], lines[late + LATE_WAYS] = line >> LATE_SHIFT, _tick(done, memory) + 1
    return done


@inline_always
def _ready_first(cu: int, memory: MemoryState) -> int:
    """The workgroup of a CU that has been ready longest, or will be first; ties go to the lower place."""
    times, machine = memory.times, memory.machine
    first = machine.ready + cu * machine.held
    return events.earliest(times, first, first + machine.held) - machine.ready


@inline_always
def _next_of(cu: int, memory: MemoryState) -> None:
    """Put the CU at the root of the heap to the time of its next operation."""
    counts, times, machine = memory.counts, memory.times, memory.machine
    ready = _ready_first(cu, memory)
    # what waits for the CU itself comes next: one request a cycle for all its workgroups
    times[machine.key] = max(times[machine.ready + ready], times[machine.issue + cu])
    events.sink_root(times, machine.key, counts, machine.order, machine.cus)


@inline_always
def _assign_workgroup(slot: int, group: int, extent: Ints, memory: MemoryState) -> None:
    """Give a workgroup to a place on a CU: its coordinates, the last of which runs fastest."""
    counts, machine = memory.counts, memory.machine
    quotient = group
    for axis in range(3, -1, -1):  # the last coordinate runs fastest
        counts[machine.grid + 4 * slot + axis] = quotient % extent[axis]
        quotient //= extent[axis]
    counts[machine.place + slot] = 0
    counts[machine.row_at + slot], counts[machine.line_at + slot] = 0, -1  # no row begun


@inline_never
def _begin_kernel(start: float, groups: int, extent: Ints, memory: MemoryState) -> int:
    """Empty L1s, settle everything in flight, and fill every slot with a workgroup; return the number of workgroups."""
    lines, counts, times, machine = memory
    times[machine.start] = start
    # L1s are write-through, so that nothing is lost
    for index in range((machine.cus << machine.l1_shift) * machine.l1_ways):
        lines[machine.one_tag + index], lines[machine.one_pend + index] = -1, 0
    for index in range((machine.channels << machine.l2_shift) * machine.l2_ways):
        lines[machine.two_pend + index] = 0
    for index in range(2 * PENDING):  # and nothing is under way from one kernel to the next
        lines[machine.late + index] = -1
    for index in range(machine.cus * machine.in_flight):
        lines[machine.ring + index] = 0
    next_group = 0
    for place in range(machine.held):  # CUs in turn, so that few workgroups spread over all
        for cu in range(machine.cus):
            index = cu * machine.held + place
            times[machine.ready + index] = np.inf
            if next_group < groups:
                _assign_workgroup(index, next_group, extent, memory)
                times[machine.ready + index] = times[machine.done + index] = times[machine.fence + index] = start
                next_group += 1
    for cu in range(machine.cus):
        times[machine.issue + cu] = times[machine.alu + cu] = start
        times[machine.key + cu], counts[machine.order + cu] = times[machine.ready + cu * machine.held], cu
    return next_group


@inline_never
def _end_kernel(end: float, memory: MemoryState) -> float:
    """Write back what is dirty, and empty the buffers."""
    lines, counts, times, machine = memory
    if machine.writes:  # else nothing was ever left dirty
        for channel in range(machine.channels):
            for which in range(1 << machine.l2_shift):
                first = ((channel << machine.l2_shift) + which) * machine.l2_ways
                for way in range(first, first + machine.l2_ways):
                    if lines[machine.two_mark + way] & DIRTY:
                        _clean_line(way, channel, which, end, memory)
    for channel in range(machine.channels):
        if counts[machine.stored_count + channel] > 0:
            _drain_buffer(channel, end, memory)
    for channel in range(machine.channels):  # the kernel ends with the last write
        end = max(end, times[machine.bus + channel], times[machine.written + channel])
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
    memory: MemoryState,
) -> float:
    """Run a kernel from `start` [ns]; when it has ended.

    code [P, FIELDS], work [P]: the program, and the time of COMPUTE, or of a unit of LISTED_COMPUTE [ns]. extent [4]:
    of the grid, of which the first marks[-1] workgroups run. listed [R, 5]: columns LIST_ADDRESS to LIST_NS, the
    latter from `start`; begins [workgroups + 1]: whose they are, by the last coordinate,
    for LISTED. seen [marks, TOTALS + 1]: totals and time once so many workgroups had been given out.
    """
    lines, counts, times, machine = memory
    groups, passed, end = marks[-1], 0, start
    next_group = _begin_kernel(start, groups, extent, memory)
    while times[machine.key] < np.inf:  # root of the heap: the CU that acts next
        while passed < len(marks) and next_group >= marks[passed]:  # several marks may be met by one step
            seen[passed, TOTALS] = times[machine.key]
            for resident in range(TOTALS):
                seen[passed, resident] = counts[machine.total + resident]
            passed += 1
        cu = counts[machine.order]
        resident = _ready_first(cu, memory)
        now, at = times[machine.key], counts[machine.place + resident]
        op = code[at, OP]
        if op == LISTED:  # not before its time, nor before what others ask for until then
            owner = counts[machine.grid + 4 * resident + 3]
            mine = begins[owner] + counts[machine.counter + 4 * resident + 3]
            # its recorded time has not come: the CU goes back into the heap until then
            if mine < begins[owner + 1] and start + listed[mine, LIST_NS] > now:
                times[machine.ready + resident] = times[machine.key] = start + listed[mine, LIST_NS]
                events.sink_root(times, machine.key, counts, machine.order, machine.cus)
                continue
        if op == LOAD or op == STORE or op == LISTED:
            base, pc, size, rows, store = code[at, BASE], code[at, PC], code[at, BYTES], code[at, ROWS], op == STORE
            low, high, scatter = code[at, LOW], code[at, HIGH], code[at, SCATTER]
            if op == LISTED:
                # the fourth counter of the loop is the place in the list
                owner = counts[machine.grid + 4 * resident + 3]
                mine, listed_kind = begins[owner] + counts[machine.counter + 4 * resident + 3], LISTED_WAIT
                if mine < begins[owner + 1]:
                    base, size = listed[mine, LIST_ADDRESS], listed[mine, LIST_BYTES]
                    pc, listed_kind = listed[mine, LIST_PC], listed[mine, LIST_KIND]
                store = listed_kind == LISTED_STORE
                if listed_kind >= LISTED_WAIT:
                    rows = 0  # no request, or the list is at its end
            else:
                for axis in range(4):
                    base += counts[machine.grid + 4 * resident + axis] * code[at, GRID + axis]
                    # addresses are affine in coordinates and counters
                    base += counts[machine.counter + 4 * resident + axis] * code[at, LOOPS + axis]
            requested, done, before = now, times[machine.done + resident], counts[machine.total + REQUESTS]
            # CUs may run ahead of one another by so little, or they would see caches out of order
            # may not see what is made after this
            horizon = min(times[machine.key + 1], times[machine.key + 2]) + SLACK * machine.cycle
            row, line, paused = counts[machine.row_at + resident], counts[machine.line_at + resident], False
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
                line = max(line, max(begin, low) >> machine.line_shift)
                while line <= (stop - 1) >> machine.line_shift:
                    if now > horizon:
                        paused = True
                        break
                    way, first = -1, 0
                    if machine.reads and not store:  # L1 does not look for stores, nor keeps them
                        which = (cu << machine.l1_shift) + (line & ((1 << machine.l1_shift) - 1))
                        first = which * machine.l1_ways
                        way = lru.find_way(lines, machine.one_tag + first, machine.l1_ways, line >> machine.l1_shift)
                        counts[machine.total + STAMP] += 1
                        if way >= 0:
                            now += machine.cycle  # a hit takes a cycle to issue, and no place in flight
                            counts[machine.total + REQUESTS] += 1
                            lines[machine.one_used + first + way] = lru.order_of_use(counts[machine.total + STAMP], way)
                            arrived = _until(lines[machine.one_pend + first + way], memory)
                            # under way: it came with an earlier miss
                            counts[machine.total + (L1_MERGED if arrived > now + machine.l1_hit else L1_HITS)] += 1
                            done = max(done, arrived, now + machine.l1_hit)
                            line += 1
                            continue
                    # ring of places in flight, in the order of issue: the oldest is asked first
                    slot = machine.ring + cu * machine.in_flight + counts[machine.head + cu]
                    until = _until(lines[slot], memory)
                    if until > now:
                        times[machine.spent + FULL] += until - now
                        now = until
                        continue  # time has passed: look at the horizon again
                    if machine.reads and not store:
                        way = lru.oldest_arrived_way(
                            lines,
                            machine.one_used + first,
                            machine.one_pend + first,
                            machine.l1_ways,
                            _tick(now, memory),
                        )
                        if way < 0 and machine.bypass:
                            counts[machine.total + L1_BYPASSED] += 1
                        elif way < 0:
                            # a tick later, when the line is no longer under way
                            until = _until(
                                lru.soonest_arrival(lines, machine.one_pend + first, machine.l1_ways) + 1, memory
                            )
                            counts[machine.total + L1_STALLS] += 1
                            times[machine.spent + L1_STALLED] += until - now
                            now = until
                            continue  # time has passed: another CU may go first, and the line is looked up anew
                    now += machine.cycle
                    counts[machine.total + REQUESTS] += 1
                    counts[machine.head + cu] = rings.next_place(counts[machine.head + cu], machine.in_flight)
                    came = serve_line(line, pc, store, now + machine.hop, memory)
                    if store:
                        end = max(end, came)  # stores are not waited for, but the kernel ends after them
                    else:
                        came += machine.hop
                        done = max(done, came)
                        if way >= 0:  # passed by: the line goes to the registers alone
                            lines[machine.one_tag + first + way] = line >> machine.l1_shift
                            lines[machine.one_used + first + way] = lru.order_of_use(counts[machine.total + STAMP], way)
                            lines[machine.one_pend + first + way] = _tick(came, memory) + 1
                    lines[slot] = _tick(came, memory) + 1  # the place is free again when the line is there
                    line += 1
                if not paused:
                    row, line = row + 1, -1  # the next run begins at its own first line
            made = counts[machine.total + REQUESTS] - before
            counts[machine.bins_cu + _bin(requested, memory) * machine.cus + cu] += made
            # requests of one workgroup hold up the others of its CU
            times[machine.issue + cu] = times[machine.ready + resident] = now
            times[machine.done + resident] = done
            counts[machine.row_at + resident], counts[machine.line_at + resident] = (row, line) if paused else (0, -1)
            if paused:
                _next_of(cu, memory)  # other CUs first; this operation goes on where it stopped
                continue
            if op == LISTED and listed_kind == LISTED_WAIT:
                times[machine.ready + resident] = max(now, done)
            elif op == LISTED and listed_kind == LISTED_COMPUTE:
                servers.serve(times, machine.alu + cu, now, base * work[at])
                times[machine.ready + resident] = times[machine.alu + cu]
                times[machine.busy + _bin(now, memory) * machine.cus + cu] += base * work[at]
        elif op == COMPUTE:
            # arithmetic of a CU comes one after another, requests go on meanwhile
            servers.serve(times, machine.alu + cu, now, work[at])
            times[machine.ready + resident] = times[machine.alu + cu]
            times[machine.busy + _bin(now, memory) * machine.cus + cu] += work[at]
        at += 1
        while True:  # what takes no time
            op = code[at, OP]
            if op == LOOP:
                level = machine.counter + 4 * resident + code[at, LEVEL]
                # a loop without a count runs over the list of its workgroup
                owner = counts[machine.grid + 4 * resident + 3] if code[at, TIMES] == 0 else 0
                turns = code[at, TIMES] if code[at, TIMES] > 0 else begins[owner + 1] - begins[owner]
                counts[level] += 1
                at = code[at, TARGET] if counts[level] < turns else at + 1
                if counts[level] >= turns:  # for the next time that the loop is entered
                    counts[level] = 0
            elif op == WAIT or op == FENCE:
                times[machine.ready + resident] = max(
                    times[machine.ready + resident],
                    times[machine.done + resident] if op == WAIT else times[machine.fence + resident],
                )
                # what was loaded until here is what the next fence waits for
                times[machine.fence + resident] = times[machine.done + resident]
                at += 1
            elif op == END:
                end = max(end, times[machine.ready + resident], times[machine.done + resident])
                if next_group < groups:  # the place is free: the next workgroup starts there at once
                    _assign_workgroup(resident, next_group, extent, memory)
                    next_group += 1
                    at = 0
                    times[machine.done + resident] = times[machine.fence + resident] = times[machine.ready + resident]
                else:
                    times[machine.ready + resident] = np.inf
                break
            else:
                break
        counts[machine.place + resident] = at
        _next_of(cu, memory)
    end = _end_kernel(end, memory)
    for last in range(passed, len(marks)):  # marks that no step met
        seen[last, TOTALS] = end
        for resident in range(TOTALS):
            seen[last, resident] = counts[machine.total + resident]
    return end
