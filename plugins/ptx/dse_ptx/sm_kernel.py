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

Products of warpgroups, bulk copies and mbarriers, which go on while their warps do, are in `dse_ptx.sm_async`.

SMs run for `WINDOW` cycles one after another, so that requests of different SMs may be out of order by so much. State
is records by name (`dse_ptx.sm_state`); L1 and rings, ports and bins of time are of `simulators.device`.
"""

from __future__ import annotations

from dse_memory import engine
from dse_ptx import sm_async, sm_requests, sm_state
from dse_ptx.sm_state import (
    ALU,
    ATOMIC,
    BARRIER,
    BINS,
    BRANCHING,
    BULK,
    CONTROL,
    END,
    FOLDED,
    IDLE,
    ISSUED,
    LOAD,
    LRR,
    MEMORY,
    NEVER,
    NO_WAIT,
    PIPELINE,
    SHARED,
    SHARED_ACCESS,
    STATES,
    SYNC,
    UNITS,
    UNSELECTED,
    WARPGROUP,
    WINDOW,
    Ints,
    Sizes,
    SmDevice,
    State,
)
from simulators.compiled import flat_over, inline_always, inline_never
from simulators.device import PARTS, histograms


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
        # a product of a warpgroup waits for its pipeline without its warp
        pipe = launch.code[pc].pipe if launch.code[pc].kind != WARPGROUP else CONTROL
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
        if warps[warp].ready == NEVER and gpu.state.asyncs[warp].waits == NO_WAIT:
            warps[warp].ready = max(warps[warp].depends, now + sizes.barrier)
            schedulers[scheduler].next = min(schedulers[scheduler].next, warps[warp].ready)


@inline_never
def _dispatch(sm: int, place: int, now: int, gpu: SmDevice) -> None:
    """Give the next cluster of blocks to the places of its SMs, if one is left; sm, place: of its first block."""
    sizes, clock, slots = gpu.sizes, gpu.state.clock, gpu.state.slots_of
    if clock.next_block + sizes.cluster > sizes.blocks:
        for rank in range(sizes.cluster):
            gpu.state.places[place + rank * sizes.places].block = -1
        return
    clock.next_block += sizes.cluster
    slots[place].live, slots[place].blocks = sizes.cluster * sizes.block_warps, sizes.cluster
    slots[place].came, slots[place].phases = 0, 0
    for rank in range(sizes.cluster):
        block = clock.next_block - sizes.cluster + rank
        _begin_block(sm + rank, place + rank * sizes.places, block, now, gpu)


@inline_never
def _begin_block(sm: int, place: int, block: int, now: int, gpu: SmDevice) -> None:
    """Let the warps of a block begin."""
    sizes, launch, state = gpu.sizes, gpu.launch, gpu.state
    warps, schedulers, places = state.warps, state.schedulers, state.places
    places[place].block, places[place].live, places[place].waiting = block, sizes.block_warps, 0
    first = (place - sm * sizes.places) * sizes.block_warps
    sm_async.begin_block(place, gpu)
    for number in range(sizes.block_warps):
        scheduler = _scheduler_of(sm, first + number, sizes)
        warp = scheduler * sizes.warp_slots + (first + number) // sizes.schedulers
        stream = launch.first[block] + number
        warps[warp].at, warps[warp].end = launch.starts[stream], launch.starts[stream + 1]
        warps[warp].since, warps[warp].place, warps[warp].partial = now, place, -1
        warps[warp].age = state.clock.age
        state.clock.age += 1
        sm_async.begin_warp(warp, gpu)
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
    """End a warp: the last one of a cluster makes room for the next one."""
    places, place, sizes = gpu.state.places, gpu.state.warps[warp].place, gpu.sizes
    rank = sm % sizes.cluster
    leader = place - rank * sizes.places
    places[place].live -= 1
    sm_async.leave_cluster(leader, sm - rank, now, gpu)
    if places[place].live:
        # a warp that has ended counts as one that has come to the barrier
        if places[place].waiting == places[place].live:
            _release(sm, place, now, gpu)
        return
    gpu.state.ends[places[place].block] = now
    gpu.state.counts.blocks += 1
    gpu.state.slots_of[leader].blocks -= 1
    if gpu.state.slots_of[leader].blocks == 0:
        _dispatch(sm - rank, leader, now, gpu)


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
    if kind == BULK and sm_async.is_full(sm, gpu):
        warps[warp].ready, warps[warp].why = now + WINDOW, PIPELINE
        return False
    _count_issue(warp, sm, now, gpu)
    if kind == SHARED_ACCESS:
        source = SHARED - MEMORY
        if access >= 0:
            busy = max(busy, launch.passes[access])
            state.counts.passes += launch.passes[access]
            done += busy - 1
    elif LOAD <= kind <= ATOMIC and access >= 0:
        source = 0  # of MEMORY
        state.free[pipe] = sm_requests.touch(sm, warp, now, gpu)
        if warps[warp].partial >= 0:
            warps[warp].ready, warps[warp].why = state.free[pipe], PIPELINE
            return False
        done, busy = warps[warp].arrives, state.free[pipe] - now
    state.free[pipe] = now + (max(busy, 1) if kind != WARPGROUP else 1)
    _write(launch.writes[pc], warp, done * 4 + source, state)
    warps[warp].at = warps[warp].at + 1 if kind != END else warps[warp].end
    _prepare(warp, sm, now + (latency if kind == BRANCHING else 0), gpu)
    if warps[warp].ready < 0:
        _finish_warp(warp, sm, state.free[pipe], gpu)  # once its pipeline has taken the last
    elif kind >= WARPGROUP or (kind == SYNC and access >= 0):
        sm_async.act(warp, sm, pc, access, now, gpu)
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
    """Let the copies and schedulers of an SM act until a cycle."""
    schedulers, first = gpu.state.schedulers, sm * gpu.sizes.schedulers
    sm_async.advance(sm, until, gpu)
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


@flat_over(engine, sm_state, sm_requests, sm_async, *PARTS)
def run(gpu: SmDevice) -> int:
    """Run all blocks; return the cycle in which the last has ended."""
    sizes, state = gpu.sizes, gpu.state
    for place in range(sizes.places):
        # SMs in turn, so that few blocks spread over all; SMs that make no whole cluster stay idle
        for group in range(sizes.sms // sizes.cluster):
            sm = group * sizes.cluster
            _dispatch(sm, sm * sizes.places + place, 0, gpu)
    while True:
        begin = NEVER
        for scheduler in range(sizes.sms * sizes.schedulers):
            begin = min(begin, state.schedulers[scheduler].next)
        for sm in range(sizes.sms):
            begin = min(begin, state.engines[sm].next)
        if begin == NEVER:
            break
        while begin + WINDOW >> state.clock.shift >= BINS:
            _widen_bins(state, sizes)
        for sm in range(sizes.sms):
            _run_sm(sm, begin + WINDOW, gpu)
    return _close_tables(gpu)
