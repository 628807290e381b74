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

For an instruction issued in cycle c, with registers R read and W written:

    ready    max(c of its turn, value(r) for r in R and W)          its warp's, and of its pipeline `free`
    value    c + latency                                            arithmetic
             c + latency + max(interval, passes) - 1                shared memory
             max over sectors of their arrival, + (lanes of one address - 1) atomic       global memory
    free     c + max(interval, passes, cycles in which sectors leave the SM)

SMs run for `WINDOW` cycles one after another, so that requests of different SMs may be out of order by so much. State
is records by name (`dse_ptx.sm_state`); L1 and rings, ports and bins of time are of `simulators.device`.
"""

from __future__ import annotations

import numpy as np

from dse_memory import engine
from dse_ptx import sm_state
from dse_ptx.sm_state import (
    ALU,
    ATOMIC,
    BARRIER,
    BINS,
    BRANCHING,
    END,
    FOLDED,
    IDLE,
    ISSUED,
    LINE_SECTORS,
    LOAD,
    LRR,
    MEMORY,
    NEVER,
    PIPELINE,
    SHARED,
    SHARED_ACCESS,
    STATES,
    STORE,
    SYNC,
    TICKS,
    UNITS,
    UNSELECTED,
    WINDOW,
    Ints,
    Sizes,
    SmDevice,
    State,
)
from simulators.compiled import flat_over, inline_always, inline_never
from simulators.device import PARTS, histograms, lru, rings, servers


@inline_never
def _widen_bins(state: State, sizes: Sizes) -> None:
    """Make bins of time twice as wide."""
    state.clock.shift += 1
    histograms.join_bins(state.issued, 0, sizes.sms, BINS)
    histograms.join_bins(state.states, 0, STATES, BINS)
    histograms.join_bins(state.slots, 0, STATES, BINS)
    histograms.join_bins(state.units, 0, UNITS, BINS)
    histograms.join_bins(state.slices, 0, 2 * sizes.channels, BINS)


@inline_always
def _spread(cycles: Ints, what: int, begin: int, end: int, shift: int) -> None:
    """Add the cycles from begin to end to what they went to, bin by bin."""
    while begin < end:
        stop = min(end, ((begin >> shift) + 1) << shift)
        cycles[(begin >> shift) * STATES + what] += stop - begin
        begin = stop


@inline_never
def _ask(sector: int, pc: int, store: int, now: int, gpu: SmDevice) -> int:
    """Return the cycle in which L2, or DRAM behind it, has answered a request that leaves the SM now."""
    sizes, state, counts, machine = gpu.sizes, gpu.state, gpu.below.counts, gpu.below.machine
    # the engine counts hits in all: the difference tells of this request
    before = counts[machine.total + engine.L2_HITS] + counts[machine.total + engine.L2_MERGED]
    line, at = sector // sizes.line_sectors, now * sizes.cycle_ns + machine.hop
    came = engine.serve_line(line, pc, store, at, gpu.below)
    # nobody waits for a store to come back
    came += 0.0 if store else machine.hop
    channel, _ = engine.place_line(line, gpu.below)
    place = (min(now >> state.clock.shift, BINS - 1) * sizes.channels + channel) * 2
    state.slices[place] += 1
    hits = counts[machine.total + engine.L2_HITS] + counts[machine.total + engine.L2_MERGED] - before
    state.slices[place + 1] += hits
    return int(np.ceil(came / sizes.cycle_ns))


@inline_always
def _take_l1_line(sm: int, line: int, state: State, sizes: Sizes) -> int:
    """Place of a line in an SM's L1, the newest of its set from now on; empty where it was not there."""
    first = (sm * sizes.l1_sets + line % sizes.l1_sets) * sizes.l1_ways
    way = lru.find_way(state.tags, first, sizes.l1_ways, line)
    if way < 0:
        way = lru.oldest_way(state.used, first, sizes.l1_ways)
        state.tags[first + way] = line
        for sector in range(LINE_SECTORS):
            state.filled[(first + way) * LINE_SECTORS + sector] = NEVER
    state.clock.stamp += 1
    state.used[first + way] = state.clock.stamp
    return first + way


@inline_always
def _shift_of(access: int, place: int, gpu: SmDevice) -> int:
    """Sectors by which an access of the block at a place lies behind that of the first block."""
    shift, block = 0, gpu.state.places[place].block
    for axis in range(3):
        shift += gpu.launch.shift[access, axis] * gpu.launch.coordinates[block, axis]
    return shift


@inline_always
def _send(sm: int, sector: int, pc: int, cycle: int, gpu: SmDevice) -> int:
    """Make the requests of a sector, with a place in flight; return the cycle in which the last came."""
    sizes, state, kind = gpu.sizes, gpu.state, gpu.launch.code[pc].kind
    servers.serve(state.ports, sm, cycle * TICKS, sizes.port_ticks)
    leaves = state.ports[sm] // TICKS + (sizes.l1_latency if kind == LOAD else 0)
    came = 0
    for store in range(kind == STORE, 1 + (kind != LOAD)):  # what an atomic read is written back
        came = max(came, _ask(sector, pc, store, leaves, gpu))
    state.counts.sectors += 1
    state.flights[sm * sizes.in_flight + state.heads[sm]] = came
    state.heads[sm] = rings.next_place(state.heads[sm], sizes.in_flight)
    return came


@inline_never
def _touch(sm: int, warp: int, now: int, gpu: SmDevice) -> int:
    """Make the requests of an access from where it stopped; return the cycle from which the SM takes the next.

    `partial` is where it goes on, -1 once all are made, `arrives` the cycle of the last that came.
    """
    sizes, launch, state = gpu.sizes, gpu.launch, gpu.state
    warps, counts = state.warps, state.counts
    pc, access = launch.pcs[warps[warp].at], launch.accesses[warps[warp].at]
    kind, shift = launch.code[pc].kind, _shift_of(access, warps[warp].place, gpu)
    begin, end = launch.begins[access], launch.begins[access + 1]
    if warps[warp].partial < 0:
        warps[warp].partial, warps[warp].arrives = begin, now + sizes.l1_latency
    cycle, line, place, index = now, -1, 0, warps[warp].partial
    keeps = kind == LOAD and launch.code[pc].kept == 1
    while index < end:
        sector = launch.sectors[index] + shift
        if sector // LINE_SECTORS != line:
            cycle += line >= 0  # a line a cycle
            line = sector // LINE_SECTORS
            place = _take_l1_line(sm, line, state, sizes) if keeps else 0
        entry = place * LINE_SECTORS + sector % LINE_SECTORS
        counts.l1_lookups += keeps
        if keeps and state.filled[entry] < NEVER:
            counts.l1_hits += 1
            # it may be under way still
            warps[warp].arrives = max(warps[warp].arrives, state.filled[entry], cycle + sizes.l1_latency)
            index += 1
            continue
        cycle = max(cycle, state.flights[sm * sizes.in_flight + state.heads[sm]])
        # no place in flight is free within the window
        if cycle > now + WINDOW:
            counts.l1_lookups -= keeps
            break  # others may go first, the rest is replayed
        came = _send(sm, sector, pc, cycle, gpu)
        warps[warp].arrives = max(warps[warp].arrives, came)
        if keeps:
            state.filled[entry] = came
        index += 1
    if index < end:
        counts.replays += 1
        warps[warp].partial = index
        return cycle
    if kind == ATOMIC:  # lanes of one address come one after another
        warps[warp].arrives += (launch.passes[access] - 1) * sizes.atomic
    warps[warp].partial = -1
    return int(max(cycle + 1, now + (end - begin + sizes.l1_sectors - 1) // sizes.l1_sectors))


@inline_always
def _latest(registers: Ints, warp: int, latest: int, state: State) -> int:
    """The latest value among registers of a warp, padded with -1, and another one; with what it waits for."""
    for index in range(registers.shape[0]):
        if registers[index] < 0:
            break
        latest = max(latest, state.registers[warp, registers[index]])
    return latest


@inline_always
def _write(registers: Ints, warp: int, value: int, state: State) -> None:
    """Note when registers of a warp, padded with -1, have their values, and what they wait for."""
    for index in range(registers.shape[0]):
        if registers[index] < 0:
            break
        state.registers[warp, registers[index]] = value


@inline_always
def _prepare(warp: int, sm: int, now: int, gpu: SmDevice) -> None:
    """Find when a warp's next instruction may be issued, and why not before; folded ones cost nothing."""
    sizes, launch, state = gpu.sizes, gpu.launch, gpu.state
    warps = state.warps
    while True:
        if warps[warp].at >= warps[warp].end:
            warps[warp].ready = -1
            return
        pc = launch.pcs[warps[warp].at]
        latest = _latest(launch.reads[pc], warp, 0, state)
        # the assembler folds it into its user: its value is there when its inputs are
        if launch.code[pc].kind == FOLDED:
            _write(launch.writes[pc], warp, latest, state)
            warps[warp].at += 1
            continue
        latest = _latest(launch.writes[pc], warp, latest, state)
        # the two low bits of a register's cycle say what made it wait
        warps[warp].depends, warps[warp].why = latest >> 2, MEMORY + (latest & 3)
        warps[warp].ready = max(latest >> 2, now)
        pipe = launch.code[pc].pipe
        scheduler = warp // sizes.warp_slots if pipe < sizes.scheduler_pipes else sm * sizes.schedulers
        warps[warp].queue = scheduler * sizes.pipes + pipe
        return


@inline_always
def _scheduler_of(sm: int, number: int, sizes: Sizes) -> int:
    """Scheduler of the warp with a number on its SM: warps go to the schedulers in turn."""
    return sm * sizes.schedulers + number % sizes.schedulers


@inline_never
def _release(sm: int, place: int, now: int, gpu: SmDevice) -> None:
    """Let the warps that wait at a block's barrier go on: all that live have come."""
    sizes, warps, schedulers = gpu.sizes, gpu.state.warps, gpu.state.schedulers
    gpu.state.places[place].waiting = 0
    first = (place - sm * sizes.places) * sizes.block_warps
    for number in range(first, first + sizes.block_warps):
        scheduler = _scheduler_of(sm, number, sizes)
        warp = scheduler * sizes.warp_slots + number // sizes.schedulers
        if warps[warp].ready == NEVER:
            warps[warp].ready = max(warps[warp].depends, now + sizes.barrier)
            schedulers[scheduler].next = min(schedulers[scheduler].next, warps[warp].ready)


@inline_never
def _dispatch(sm: int, place: int, now: int, gpu: SmDevice) -> None:
    """Give the next block to a place of an SM, if one is left."""
    sizes, launch, state = gpu.sizes, gpu.launch, gpu.state
    warps, schedulers, places = state.warps, state.schedulers, state.places
    block = state.clock.next_block
    if block >= sizes.blocks:
        places[place].block = -1
        return
    state.clock.next_block += 1
    places[place].block, places[place].live, places[place].waiting = block, sizes.block_warps, 0
    first = (place - sm * sizes.places) * sizes.block_warps
    for number in range(sizes.block_warps):
        scheduler = _scheduler_of(sm, first + number, sizes)
        warp = scheduler * sizes.warp_slots + (first + number) // sizes.schedulers
        stream = launch.first[block] + number
        warps[warp].at, warps[warp].end = launch.starts[stream], launch.starts[stream + 1]
        warps[warp].since, warps[warp].place, warps[warp].partial = now, place, -1
        warps[warp].age = state.clock.age
        state.clock.age += 1
        # values of the block before are gone: no instruction waits for them
        for register in range(state.registers.shape[1]):
            state.registers[warp, register] = 0
        _prepare(warp, sm, now, gpu)
        if warps[warp].ready < 0:  # a warp without instructions
            places[place].live -= 1
        else:
            schedulers[scheduler].next = min(schedulers[scheduler].next, warps[warp].ready)
    if places[place].live == 0:
        state.ends[block] = now
        places[place].block = -1


@inline_never
def _finish_warp(warp: int, sm: int, now: int, gpu: SmDevice) -> None:
    """End a warp: the last one of a block makes room for the next block."""
    places, place = gpu.state.places, gpu.state.warps[warp].place
    places[place].live -= 1
    if places[place].live:
        # a warp that has ended counts as one that has come to the barrier
        if places[place].waiting == places[place].live:
            _release(sm, place, now, gpu)
        return
    gpu.state.ends[places[place].block] = now
    gpu.state.counts.blocks += 1
    _dispatch(sm, place, now, gpu)


@inline_always
def _count_issue(warp: int, sm: int, now: int, gpu: SmDevice) -> None:
    """Count an instruction that is issued, and what its warp has waited for since the one before it."""
    state, warps, shift = gpu.state, gpu.state.warps, gpu.state.clock.shift
    unit, bin_of = gpu.launch.code[gpu.launch.pcs[warps[warp].at]].unit, now >> shift
    ready, begin = warps[warp].ready, warps[warp].since
    freed = min(max(state.free[warps[warp].queue], ready), now)
    # what it depends on, then its pipeline, then others that went first
    _spread(state.states, warps[warp].why, begin, ready, shift)
    begin = max(begin, ready)
    _spread(state.states, PIPELINE, begin, freed, shift)
    _spread(state.states, UNSELECTED, max(begin, freed), now, shift)
    state.states[bin_of * STATES + ISSUED] += 1
    if warps[warp].partial < 0:  # else it is the rest of one that was counted
        state.counts.instructions += 1
        state.issued[bin_of * gpu.sizes.sms + sm] += 1
        state.units[bin_of * UNITS + unit] += 1
    warps[warp].since = now + 1


@inline_always
def _issue(warp: int, sm: int, now: int, gpu: SmDevice) -> bool:
    """Issue a warp's next instruction, or what is left of it; return whether it has been taken whole."""
    launch, state, warps = gpu.launch, gpu.state, gpu.state.warps
    pc, access, pipe = launch.pcs[warps[warp].at], launch.accesses[warps[warp].at], warps[warp].queue
    kind, busy, latency = launch.code[pc].kind, launch.code[pc].interval, launch.code[pc].latency
    done, source = now + latency, ALU - MEMORY
    _count_issue(warp, sm, now, gpu)
    if kind == SHARED_ACCESS:
        source = SHARED - MEMORY
        if access >= 0:
            busy = max(busy, launch.passes[access])
            state.counts.passes += launch.passes[access]
            done += busy - 1
    elif LOAD <= kind <= ATOMIC and access >= 0:
        source = 0  # of MEMORY
        state.free[pipe] = _touch(sm, warp, now, gpu)
        if warps[warp].partial >= 0:
            warps[warp].ready, warps[warp].why = state.free[pipe], PIPELINE
            return False
        done, busy = warps[warp].arrives, state.free[pipe] - now
    state.free[pipe] = now + max(busy, 1)
    _write(launch.writes[pc], warp, done * 4 + source, state)
    warps[warp].at = warps[warp].at + 1 if kind != END else warps[warp].end
    _prepare(warp, sm, now + (latency if kind == BRANCHING else 0), gpu)
    if warps[warp].ready < 0:
        _finish_warp(warp, sm, state.free[pipe], gpu)  # once its pipeline has taken the last
    elif kind == SYNC:
        place = warps[warp].place
        warps[warp].depends, warps[warp].ready, warps[warp].why = warps[warp].ready, NEVER, BARRIER
        state.places[place].waiting += 1
        if state.places[place].waiting == state.places[place].live:
            _release(sm, place, now, gpu)
    return True


@inline_always
def _choose_warp(scheduler: int, now: int, state: State, sizes: Sizes) -> int:
    """Choose the warp that a scheduler issues, or -1; then `next` says when it looks again, and `idle_why` why."""
    warps, entry = state.warps, state.schedulers[scheduler]
    chosen, soon, why = -1, NEVER, IDLE
    first, begin = scheduler * sizes.warp_slots, entry.last + (sizes.policy == LRR)
    for turn in range(sizes.warp_slots):
        slot = begin + turn
        warp = first + (slot if slot < sizes.warp_slots else slot - sizes.warp_slots)
        if warps[warp].ready < 0:
            continue
        can, cause = warps[warp].ready, warps[warp].why
        if state.free[warps[warp].queue] > can and can < NEVER:
            can, cause = state.free[warps[warp].queue], PIPELINE
        if can > now:
            # the first that can go on says why; a barrier only where nothing else does
            if can < soon or (why == IDLE and can == NEVER):
                soon, why = can, cause
            continue
        if chosen < 0 or warps[warp].age < warps[chosen].age:
            chosen = warp
        if sizes.policy == LRR or turn == 0:
            break
    entry.idle, entry.idle_why, entry.next = now, why, soon
    return chosen


@inline_always
def _step(scheduler: int, sm: int, now: int, gpu: SmDevice) -> None:
    """Let a scheduler issue, or find when it can."""
    sizes, state, warps = gpu.sizes, gpu.state, gpu.state.warps
    entry, shift = state.schedulers[scheduler], state.clock.shift
    _spread(state.slots, entry.idle_why, entry.idle, now, shift)
    chosen = _choose_warp(scheduler, now, state, sizes)
    if chosen < 0:
        return
    entry.idle, entry.next, entry.last = now + 1, now + 1, chosen - scheduler * sizes.warp_slots
    state.slots[(now >> shift) * STATES + ISSUED] += 1
    pipe, taken = -1, True
    for _ in range(sizes.width):  # the second is an independent instruction of the same warp to another pipeline
        if not taken or warps[chosen].ready < 0 or warps[chosen].ready > now or warps[chosen].queue == pipe:
            break
        pipe = warps[chosen].queue
        if state.free[pipe] > now:
            break
        taken = _issue(chosen, sm, now, gpu)
    if 0 <= warps[chosen].ready <= now:
        warps[chosen].ready = now + 1


@inline_always
def _run_sm(sm: int, until: int, gpu: SmDevice) -> None:
    """Let the schedulers of an SM act until a cycle."""
    schedulers, first = gpu.state.schedulers, sm * gpu.sizes.schedulers
    while True:
        now = schedulers[first].next
        for scheduler in range(first + 1, first + gpu.sizes.schedulers):
            now = min(now, schedulers[scheduler].next)
        if now >= until:
            return
        for scheduler in range(first, first + gpu.sizes.schedulers):
            if schedulers[scheduler].next <= now:
                _step(scheduler, sm, now, gpu)


@inline_never
def _close_tables(gpu: SmDevice) -> int:
    """Let all schedulers' slots go to something until the last block has ended; return that cycle."""
    sizes, state = gpu.sizes, gpu.state
    end = 0
    for block in range(sizes.blocks):
        end = max(end, state.ends[block])
    while end >> state.clock.shift >= BINS:
        _widen_bins(state, sizes)
    for scheduler in range(sizes.sms * sizes.schedulers):
        entry = state.schedulers[scheduler]
        _spread(state.slots, entry.idle_why, entry.idle, end, state.clock.shift)
    state.counts.cycles = end
    return end


@flat_over(engine, sm_state, *PARTS)
def run(gpu: SmDevice) -> int:
    """Run all blocks; return the cycle in which the last has ended."""
    sizes, state = gpu.sizes, gpu.state
    for place in range(sizes.places):
        for sm in range(sizes.sms):  # SMs in turn, so that few blocks spread over all
            _dispatch(sm, sm * sizes.places + place, 0, gpu)
    while True:
        begin = NEVER
        for scheduler in range(sizes.sms * sizes.schedulers):
            begin = min(begin, state.schedulers[scheduler].next)
        if begin == NEVER:
            break
        while begin + WINDOW >> state.clock.shift >= BINS:
            _widen_bins(state, sizes)
        for sm in range(sizes.sms):
            _run_sm(sm, begin + WINDOW, gpu)
    return _close_tables(gpu)
