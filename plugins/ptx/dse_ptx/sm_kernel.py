"""SMs of a GPU, warp instruction by warp instruction, in cycles; caches and DRAM below L1 are the memory engine's.

When an instruction is issued, all that it waits for is known: each register has the cycle in which its value is there,
and memory answers a request with the time of its arrival. So a warp's next instruction has a cycle before which it
cannot be issued, and a scheduler sleeps until the first of its warps can go on.

    dispatch    a block takes the first place of an SM whose warps have all ended; warps go to the schedulers in turn
    issue       a warp instruction a cycle (two of one warp with `width` 2: independent, to different pipelines), of the
                warp issued last and else of the oldest (`gto`), or of the next in turn (`lrr`)
    pipelines   one of a scheduler or of the SM takes an instruction every `interval` cycles; values are there after
                `latency`. Shared memory is busy for as many cycles as the busiest bank has words
    memory      a line of 128 bytes a cycle looks into L1; sectors of 32 bytes that miss take a place in flight and a
                turn at the SM's port, then L2 and DRAM of `dse_memory.engine`. A full SM replays the rest later

SMs run for `WINDOW` cycles one after another, so that requests of different SMs may be out of order by so much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dse_memory import engine
from dse_memory.engine import Machine
from simulators.compiled import flat_over, inline_always, inline_never

Shorts = NDArray[np.int32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BINS, WINDOW, SECTOR_BYTES, LINE_SECTORS = 512, 16, 32, 4
NEVER = 2**61  # after every cycle, even times four
LRR, GTO = range(2)
ISSUED, MEMORY, SHARED, ALU, PIPELINE, BARRIER, UNSELECTED, IDLE = range(8)
"""States of a warp, and what a scheduler's slots go to (of which none is UNSELECTED)."""
STATES, UNITS, TICKS = 8, 16, 16
# kinds of what is done when an instruction is issued, by pc
PLAIN, LOAD, STORE, ATOMIC, SHARED_ACCESS, BRANCHING, SYNC, END, FOLDED = range(9)
(INSTRUCTIONS, L1_LOOKUPS, L1_HITS, REPLAYS, PASSES, SECTORS, BLOCKS, CYCLES) = range(8)
COUNTS = 8


# fields of a pc: what is done, pipe (of the SM from `own_pipes` on), cycles, unit, whether L1 keeps what it loads, then
# registers read and written
KIND, PIPE, INTERVAL, LATENCY, UNIT, KEPT, READS = range(7)


class Shape(NamedTuple):
    """Sizes of the SMs, times of their parts in cycles, and where its parts begin in two flat arrays.

    `k`: fields of each pc, `starts` of warps' streams, `begins` of an access's sectors, `passes` of an access (cycles
    in shared memory; of atomics its most lanes of one address), `shift` [accesses, 3] of its sectors for a step of a
    block's `place` [3], `first` stream of a block. `v`: state of warps (`at` to `registers`), schedulers (`next` to
    `free`), blocks (`live` to `ends`), L1, and bins of time.
    """

    sms: int
    schedulers: int
    warp_slots: int  # of a scheduler
    places: int  # of blocks on an SM
    block_warps: int
    blocks: int
    width: int
    policy: int
    pipes: int
    own_pipes: int
    fields: int
    num_reads: int
    num_writes: int
    num_registers: int
    barrier: int
    l1_sets: int
    l1_ways: int
    l1_latency: int
    l1_sectors: int  # a cycle
    in_flight: int
    line_sectors: int  # of L2 and DRAM
    port_ticks: int  # of a cycle, for a sector
    cycle_ns: float
    code: int  # [pcs, fields]
    starts: int
    begins: int
    passes: int
    shift: int
    first: int
    place: int
    at: int
    end: int
    ready: int
    depends: int
    why: int
    queue: int
    since: int
    age: int
    resident: int
    partial: int
    arrives: int
    registers: int
    next: int
    last: int
    idle: int
    idle_why: int
    free: int
    live: int
    waiting: int
    block: int
    ends: int
    tags: int
    used: int
    filled: int
    ring: int
    head: int
    port: int
    clock: int  # shift of a bin, next block, its age, stamp of L1
    counts: int
    issued: int  # [BINS, SMs]
    states: int  # [BINS, STATES]
    slots: int  # [BINS, STATES]
    units: int  # [BINS, UNITS]
    slices: int  # [BINS, channels, 2]


SHIFT, NEXT_BLOCK, AGE, STAMP = range(4)


@inline_never
def _halve(v: Ints, s: Shape, o: Machine) -> None:
    """Make bins of time twice as wide."""
    v[s.clock + SHIFT] += 1
    widths = ((s.issued, s.sms), (s.states, STATES), (s.slots, STATES), (s.units, UNITS), (s.slices, 2 * o.channels))
    for table, width in widths:
        for place in range(BINS):
            for lane in range(width):
                two = table + 2 * place * width + lane
                v[table + place * width + lane] = v[two] + v[two + width] if place < BINS // 2 else 0


@inline_always
def _spread(table: int, what: int, begin: int, end: int, v: Ints, s: Shape) -> None:
    """Add the cycles from begin to end to a row's bins."""
    shift = v[s.clock + SHIFT]
    while begin < end:
        stop = min(end, ((begin >> shift) + 1) << shift)
        v[table + (begin >> shift) * STATES + what] += stop - begin
        begin = stop


@inline_never
def _ask(
    sector: int, pc: int, store: int, now: int, v: Ints, s: Shape, w: Shorts, m: Ints, t: Floats, o: Machine
) -> int:
    """The cycle in which L2, or DRAM behind it, has answered a request that leaves the SM now."""
    # the engine counts hits in all: the difference tells of this request
    before = m[o.total + engine.L2_HITS] + m[o.total + engine.L2_MERGED]
    line = sector // s.line_sectors
    came = engine.serve_line(line, pc, store, now * s.cycle_ns + o.hop, w, m, t, o) + (0.0 if store else o.hop)
    channel, _ = engine.place_line(line, m, o)
    place = (min(now >> v[s.clock + SHIFT], BINS - 1) * o.channels + channel) * 2
    v[s.slices + place] += 1
    v[s.slices + place + 1] += m[o.total + engine.L2_HITS] + m[o.total + engine.L2_MERGED] - before
    return int(np.ceil(came / s.cycle_ns))


@inline_always
def _search_l1(sm: int, line: int, v: Ints, s: Shape) -> int:
    """Place of a line in an SM's L1; with a victim's place taken where it is not there."""
    first = (sm * s.l1_sets + line % s.l1_sets) * s.l1_ways
    best = first
    v[s.clock + STAMP] += 1
    for way in range(first, first + s.l1_ways):
        if v[s.tags + way] == line:
            v[s.used + way] = v[s.clock + STAMP]
            return way
        if v[s.used + way] < v[s.used + best]:
            best = way
    v[s.tags + best], v[s.used + best] = line, v[s.clock + STAMP]
    for sector in range(LINE_SECTORS):
        v[s.filled + best * LINE_SECTORS + sector] = NEVER
    return best


@inline_never
def _touch(
    sm: int, warp: int, access: int, pc: int, now: int, sectors: Ints, k: Ints, v: Ints, s: Shape,
    w: Shorts, m: Ints, t: Floats, o: Machine,
) -> int:  # fmt: skip
    """Make the requests of an access from where it stopped; the cycle from which the SM takes the next.

    `partial` is where it goes on, -1 once all are made, `arrives` the cycle of the last that came.
    """
    kind, shift, place = k[s.code + pc * s.fields + KIND], 0, 3 * v[s.block + v[s.resident + warp]]
    for axis in range(3):
        shift += k[s.shift + 3 * access + axis] * k[s.place + place + axis]
    begin, end = k[s.begins + access], k[s.begins + access + 1]
    if v[s.partial + warp] < 0:
        v[s.partial + warp], v[s.arrives + warp] = begin, now + s.l1_latency
    cur, line, way, index = now, -1, 0, v[s.partial + warp]
    keeps = kind == LOAD and k[s.code + pc * s.fields + KEPT] == 1
    while index < end:
        sector = sectors[index] + shift
        if sector // LINE_SECTORS != line:
            cur += line >= 0  # a line a cycle
            line = sector // LINE_SECTORS
            way = _search_l1(sm, line, v, s) if keeps else 0
        filled = way * LINE_SECTORS + sector % LINE_SECTORS
        v[s.counts + L1_LOOKUPS] += keeps
        if keeps and v[s.filled + filled] < NEVER:
            v[s.counts + L1_HITS] += 1
            v[s.arrives + warp] = max(v[s.arrives + warp], v[s.filled + filled], cur + s.l1_latency)
            index += 1
            continue
        slot = sm * s.in_flight + v[s.head + sm]
        cur = max(cur, v[s.ring + slot])
        # no place in flight is free within the window
        if cur > now + WINDOW:
            v[s.counts + L1_LOOKUPS] -= keeps
            break  # others may go first, the rest is replayed
        v[s.port + sm] = max(v[s.port + sm], cur * TICKS) + s.port_ticks
        leaves = v[s.port + sm] // TICKS + (s.l1_latency if kind == LOAD else 0)
        came = 0
        for store in range(kind == STORE, 1 + (kind != LOAD)):  # what an atomic read is written back
            came = max(came, _ask(sector, pc, store, leaves, v, s, w, m, t, o))
        v[s.counts + SECTORS] += 1
        v[s.ring + slot] = came
        v[s.head + sm] = v[s.head + sm] + 1 if v[s.head + sm] + 1 < s.in_flight else 0
        v[s.arrives + warp] = max(v[s.arrives + warp], came)
        if keeps:
            v[s.filled + filled] = came
        index += 1
    if index < end:
        v[s.counts + REPLAYS] += 1
        v[s.partial + warp] = index
        return cur
    if kind == ATOMIC:  # lanes of one address come one after another
        v[s.arrives + warp] += (k[s.passes + access] - 1) * 2
    v[s.partial + warp] = -1
    return int(max(cur + 1, now + (end - begin + s.l1_sectors - 1) // s.l1_sectors))


@inline_always
def _prepare(warp: int, sm: int, now: int, pcs: Shorts, k: Ints, v: Ints, s: Shape) -> None:
    """Find when a warp's next instruction may be issued, and why not before; folded ones cost nothing."""
    row = warp * s.num_registers
    while True:
        if v[s.at + warp] >= v[s.end + warp]:
            v[s.ready + warp] = -1
            return
        pc = pcs[v[s.at + warp]]
        field, latest = s.code + pc * s.fields, 0
        written = field + READS + s.num_reads
        for index in range(field + READS, written):
            if k[index] < 0:
                break
            latest = max(latest, v[s.registers + row + k[index]])
        # the assembler folds it into its user: its value is there when its inputs are
        if k[field + KIND] == FOLDED:
            for index in range(written, written + s.num_writes):
                if k[index] < 0:
                    break
                v[s.registers + row + k[index]] = latest
            v[s.at + warp] += 1
            continue
        for index in range(written, written + s.num_writes):
            if k[index] < 0:
                break
            latest = max(latest, v[s.registers + row + k[index]])
        # the two low bits of a register's cycle say what made it wait
        v[s.depends + warp], v[s.why + warp] = latest >> 2, MEMORY + (latest & 3)
        v[s.ready + warp] = max(latest >> 2, now)
        pipe, scheduler = k[field + PIPE], warp // s.warp_slots
        v[s.queue + warp] = (scheduler if pipe < s.own_pipes else sm * s.schedulers) * s.pipes + pipe
        return


@inline_never
def _release(sm: int, place: int, now: int, v: Ints, s: Shape) -> None:
    """Let the warps that wait at a block's barrier go on: all that live have come."""
    v[s.waiting + place] = 0
    first = (place - sm * s.places) * s.block_warps
    for index in range(first, first + s.block_warps):
        scheduler = sm * s.schedulers + index % s.schedulers
        warp = scheduler * s.warp_slots + index // s.schedulers
        if v[s.ready + warp] == NEVER:
            v[s.ready + warp] = max(v[s.depends + warp], now + s.barrier)
            v[s.next + scheduler] = min(v[s.next + scheduler], v[s.ready + warp])


@inline_never
def _dispatch(sm: int, place: int, now: int, pcs: Shorts, k: Ints, v: Ints, s: Shape) -> None:
    """Give the next block to a place of an SM, if one is left."""
    block = v[s.clock + NEXT_BLOCK]
    if block >= s.blocks:
        v[s.block + place] = -1
        return
    v[s.clock + NEXT_BLOCK] += 1
    v[s.block + place], v[s.live + place], v[s.waiting + place] = block, s.block_warps, 0
    first = (place - sm * s.places) * s.block_warps
    for number in range(s.block_warps):
        scheduler = sm * s.schedulers + (first + number) % s.schedulers
        warp = scheduler * s.warp_slots + (first + number) // s.schedulers
        stream = k[s.first + block] + number
        v[s.at + warp], v[s.end + warp] = k[s.starts + stream], k[s.starts + stream + 1]
        v[s.since + warp], v[s.resident + warp], v[s.partial + warp], v[s.age + warp] = now, place, -1, v[s.clock + AGE]
        v[s.clock + AGE] += 1
        # values of the block before are gone: no instruction waits for them
        for register in range(warp * s.num_registers, (warp + 1) * s.num_registers):
            v[s.registers + register] = 0
        _prepare(warp, sm, now, pcs, k, v, s)
        if v[s.ready + warp] < 0:  # a warp without instructions
            v[s.live + place] -= 1
        else:
            v[s.next + scheduler] = min(v[s.next + scheduler], v[s.ready + warp])
    if v[s.live + place] == 0:
        v[s.ends + block] = now
        v[s.block + place] = -1


@inline_never
def _finish_warp(warp: int, sm: int, now: int, pcs: Shorts, k: Ints, v: Ints, s: Shape) -> None:
    place = v[s.resident + warp]
    v[s.live + place] -= 1
    if v[s.live + place]:
        # a warp that has ended counts as one that has come to the barrier
        if v[s.waiting + place] == v[s.live + place]:
            _release(sm, place, now, v, s)
        return
    v[s.ends + v[s.block + place]] = now
    v[s.counts + BLOCKS] += 1
    _dispatch(sm, place, now, pcs, k, v, s)


@inline_always
def _issue(
    warp: int,
    sm: int,
    now: int,
    pcs: Shorts,
    accesses: Ints,
    sectors: Ints,
    k: Ints,
    v: Ints,
    s: Shape,
    w: Shorts,
    m: Ints,
    t: Floats,
    o: Machine,
) -> bool:
    """Issue a warp's next instruction, or what is left of it; whether it has been taken whole."""
    pc, access, pipe = pcs[v[s.at + warp]], accesses[v[s.at + warp]], v[s.queue + warp]
    field = s.code + pc * s.fields
    kind, busy, done, source = k[field + KIND], k[field + INTERVAL], now + k[field + LATENCY], ALU - MEMORY
    place, begin = now >> v[s.clock + SHIFT], v[s.since + warp]
    freed = min(max(v[s.free + pipe], v[s.ready + warp]), now)
    for part in range(3):  # why it has waited since it was last issued: what it depends on, its pipeline, others
        stop = v[s.ready + warp] if part == 0 else freed if part == 1 else now
        _spread(s.states, v[s.why + warp] if part == 0 else PIPELINE if part == 1 else UNSELECTED, begin, stop, v, s)
        begin = max(begin, stop)
    v[s.states + place * STATES + ISSUED] += 1
    if v[s.partial + warp] < 0:
        v[s.counts + INSTRUCTIONS] += 1
        v[s.issued + place * s.sms + sm] += 1
        v[s.units + place * UNITS + k[field + UNIT]] += 1
    v[s.since + warp] = now + 1
    if kind == SHARED_ACCESS:
        source = SHARED - MEMORY
        if access >= 0:
            busy = max(busy, k[s.passes + access])
            v[s.counts + PASSES] += k[s.passes + access]
            done += busy - 1
    elif (kind == LOAD or kind == STORE or kind == ATOMIC) and access >= 0:
        source = MEMORY - MEMORY
        v[s.free + pipe] = _touch(sm, warp, access, pc, now, sectors, k, v, s, w, m, t, o)
        if v[s.partial + warp] >= 0:
            v[s.ready + warp], v[s.why + warp] = v[s.free + pipe], PIPELINE
            return False
        done, busy = v[s.arrives + warp], v[s.free + pipe] - now
    v[s.free + pipe] = now + max(busy, 1)
    row, written = warp * s.num_registers, field + READS + s.num_reads
    for index in range(written, written + s.num_writes):
        if k[index] < 0:
            break
        v[s.registers + row + k[index]] = done * 4 + source
    v[s.at + warp] = v[s.at + warp] + 1 if kind != END else v[s.end + warp]
    later = now + (k[field + LATENCY] if kind == BRANCHING else 0)
    _prepare(warp, sm, later, pcs, k, v, s)
    if v[s.ready + warp] < 0:
        _finish_warp(warp, sm, v[s.free + pipe], pcs, k, v, s)  # once its pipeline has taken the last
    elif kind == SYNC:
        v[s.depends + warp], v[s.ready + warp], v[s.why + warp] = v[s.ready + warp], NEVER, BARRIER
        v[s.waiting + v[s.resident + warp]] += 1
        if v[s.waiting + v[s.resident + warp]] == v[s.live + v[s.resident + warp]]:
            _release(sm, v[s.resident + warp], now, v, s)
    return True


@inline_always
def _step(
    scheduler: int,
    sm: int,
    now: int,
    pcs: Shorts,
    accesses: Ints,
    sectors: Ints,
    k: Ints,
    v: Ints,
    s: Shape,
    w: Shorts,
    m: Ints,
    t: Floats,
    o: Machine,
) -> None:
    """Let a scheduler issue, or find when it can."""
    _spread(s.slots, v[s.idle_why + scheduler], v[s.idle + scheduler], now, v, s)
    first, chosen, soon, why = scheduler * s.warp_slots, -1, NEVER, IDLE
    begin = v[s.last + scheduler] + (s.policy == LRR)
    for turn in range(s.warp_slots):
        slot = begin + turn
        warp = first + (slot if slot < s.warp_slots else slot - s.warp_slots)
        if v[s.ready + warp] < 0:
            continue
        can, cause = v[s.ready + warp], v[s.why + warp]
        if v[s.free + v[s.queue + warp]] > can and can < NEVER:
            can, cause = v[s.free + v[s.queue + warp]], PIPELINE
        if can > now:
            if can < soon or (why == IDLE and can == NEVER):
                soon, why = can, cause
            continue
        if chosen < 0 or v[s.age + warp] < v[s.age + chosen]:
            chosen = warp
        if s.policy == LRR or turn == 0:
            break
    v[s.idle + scheduler], v[s.idle_why + scheduler], v[s.next + scheduler] = now, why, soon
    if chosen < 0:
        return
    v[s.idle + scheduler], v[s.next + scheduler], v[s.last + scheduler] = now + 1, now + 1, chosen - first
    v[s.slots + (now >> v[s.clock + SHIFT]) * STATES + ISSUED] += 1
    pipe, taken = -1, True
    for _ in range(s.width):  # the second is an independent instruction of the same warp to another pipeline
        if not taken or v[s.ready + chosen] < 0 or v[s.ready + chosen] > now or v[s.queue + chosen] == pipe:
            break
        pipe = v[s.queue + chosen]
        if v[s.free + pipe] > now:
            break
        taken = _issue(chosen, sm, now, pcs, accesses, sectors, k, v, s, w, m, t, o)
    if 0 <= v[s.ready + chosen] <= now:
        v[s.ready + chosen] = now + 1


@flat_over(engine)
def run(
    pcs: Shorts,
    accesses: Ints,
    sectors: Ints,
    k: Ints,
    v: Ints,
    s: Shape,
    w: Shorts,
    m: Ints,
    t: Floats,
    o: Machine,
) -> int:
    """Run all blocks; the cycle in which the last has ended."""
    for place in range(s.places):
        for sm in range(s.sms):  # SMs in turn, so that few blocks spread over all
            _dispatch(sm, sm * s.places + place, 0, pcs, k, v, s)
    while True:
        begin = NEVER
        for scheduler in range(s.sms * s.schedulers):
            begin = min(begin, v[s.next + scheduler])
        if begin == NEVER:
            break
        while begin + WINDOW >> v[s.clock + SHIFT] >= BINS:
            _halve(v, s, o)
        for sm in range(s.sms):
            first = sm * s.schedulers
            while True:
                now = v[s.next + first]
                for scheduler in range(first + 1, first + s.schedulers):
                    now = min(now, v[s.next + scheduler])
                if now >= begin + WINDOW:
                    break
                for scheduler in range(first, first + s.schedulers):
                    if v[s.next + scheduler] <= now:
                        _step(scheduler, sm, now, pcs, accesses, sectors, k, v, s, w, m, t, o)
    end = 0
    for block in range(s.blocks):
        end = max(end, v[s.ends + block])
    while end >> v[s.clock + SHIFT] >= BINS:
        _halve(v, s, o)
    for scheduler in range(s.sms * s.schedulers):
        _spread(s.slots, v[s.idle_why + scheduler], v[s.idle + scheduler], end, v, s)
    v[s.counts + CYCLES] = end
    return end
