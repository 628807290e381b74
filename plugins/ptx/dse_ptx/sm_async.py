"""What goes on while warps do, as parts of the compiled model of SMs (`dse_ptx.sm_kernel`), in cycles.

    wgmma       a product takes its scheduler's tensor cores after those before it; a wait for groups lasts until the
                last product of the newest group that must be done
    bulk copies wait in a queue of their SM. From `bulk` cycles after its issue on, a copy makes requests of lines one
                after another, at the pace of the ports of all SMs that take them; a line for several goes to L2 once
    mbarriers   count arrivals and bytes; a phase ends when the last has come, `hop` cycles later from another SM, and
                warps that wait go on `wake` cycles later. A copy's bytes come with the last of its lines
    clusters    run on neighbouring SMs; their barrier opens `hop` cycles after the last warp has come

A warp that must wait for what is not known yet sleeps (`NEVER`), and is woken when its cycle is known.
"""

from __future__ import annotations

from dse_ptx import sm_requests
from dse_ptx.sm_state import (
    AT_CLUSTER,
    AT_COPIES,
    AT_MBARRIER,
    AT_NAMED,
    BARRIER,
    BULK,
    BULK_COMMIT,
    BULK_WAIT,
    CLUSTER_ARRIVE,
    CLUSTER_WAIT,
    GROUP_COMMIT,
    GROUP_WAIT,
    IN_CLUSTER,
    M_ARRIVE,
    M_INIT,
    M_WAIT,
    NAMED,
    NEVER,
    NO_WAIT,
    OUT_STORE,
    PIPELINE,
    QUEUE,
    READ,
    RING,
    SECTOR_BYTES,
    SYNC,
    TENSOR,
    TICKS,
    WARPGROUP,
    SmDevice,
)
from simulators.compiled import inline_never
from simulators.device import servers


@inline_never
def begin_block(place: int, gpu: SmDevice) -> None:
    """Clear what a block before has left at a place."""
    sizes, state = gpu.sizes, gpu.state
    for name in range(NAMED):
        state.named[place * NAMED + name] = 0
    for number in range(sizes.barriers):
        _begin_object(place * sizes.barriers + number, 0, gpu)


@inline_never
def begin_warp(warp: int, gpu: SmDevice) -> None:
    """Clear what a warp before has left."""
    entry = gpu.state.asyncs[warp]
    entry.waits, entry.needs, entry.product, entry.groups = NO_WAIT, 0, 0, 0
    entry.copies, entry.marks, entry.done, entry.read, entry.came, entry.phase = 0, 0, 0, 0, 0, 0


@inline_never
def _begin_object(number: int, count: int, gpu: SmDevice) -> None:
    entry = gpu.state.barriers[number]
    entry.pending, entry.expected, entry.bytes = count, count, 0
    entry.phases, entry.latest, entry.opened = 0, 0, 0


@inline_never
def _sleep(warp: int, waits: int, needs: int, gpu: SmDevice) -> None:
    """Let a warp sleep until it is woken."""
    warps, entry = gpu.state.warps, gpu.state.asyncs[warp]
    warps[warp].depends, warps[warp].ready, warps[warp].why = warps[warp].ready, NEVER, BARRIER
    entry.waits, entry.needs = waits, needs


@inline_never
def _delay(warp: int, until: int, why: int, gpu: SmDevice) -> None:
    """Let a warp's next instruction wait for a cycle."""
    warps = gpu.state.warps
    if until > warps[warp].ready:
        warps[warp].ready, warps[warp].why = until, why


@inline_never
def _wake_block(place: int, waits: int, needs: int, at: int, gpu: SmDevice) -> None:
    """Wake the warps of a block that sleep for something, whose cycle is known now."""
    sizes, state = gpu.sizes, gpu.state
    sm = place // sizes.places
    first = (place - sm * sizes.places) * sizes.block_warps
    for number in range(first, first + sizes.block_warps):
        scheduler = sm * sizes.schedulers + number % sizes.schedulers
        warp = scheduler * sizes.warp_slots + number // sizes.schedulers
        if state.warps[warp].ready == NEVER and state.asyncs[warp].waits == waits and state.asyncs[warp].needs == needs:
            _wake(warp, at, gpu)


@inline_never
def _wake(warp: int, at: int, gpu: SmDevice) -> None:
    """Wake a warp; an SM that is ahead by less than a window sees it where it is."""
    state, scheduler = gpu.state, warp // gpu.sizes.warp_slots
    entry = state.schedulers[scheduler]
    state.warps[warp].ready, state.asyncs[warp].waits = max(state.warps[warp].depends, at), NO_WAIT
    entry.next = min(entry.next, max(state.warps[warp].ready, entry.idle))


@inline_never
def _count(place: int, number: int, arrivals: int, moved: int, at: int, gpu: SmDevice) -> None:
    """Count arrivals and bytes at a block's mbarrier, which come in a cycle; wake what waits for the end of a phase."""
    entry = gpu.state.barriers[place * gpu.sizes.barriers + number]
    entry.pending -= arrivals
    entry.bytes += moved
    entry.latest = max(entry.latest, at)
    if entry.pending == 0 and entry.bytes == 0:
        entry.pending = entry.expected
        entry.phases += 1
        entry.opened = entry.latest
        _wake_block(place, AT_MBARRIER, number, entry.opened + gpu.sizes.wake, gpu)


@inline_never
def _place_of(place: int, rank: int, gpu: SmDevice) -> int:
    """Place of another block of the cluster."""
    sizes = gpu.sizes
    return place + (rank - place // sizes.places % sizes.cluster) * sizes.places


@inline_never
def act(warp: int, sm: int, pc: int, access: int, now: int, gpu: SmDevice) -> None:
    """Do what an instruction starts, or let its warp wait; the warp's next instruction is known."""
    launch, state = gpu.launch, gpu.state
    code, entry, place = launch.code[pc], state.asyncs[warp], state.warps[warp].place
    kind = code.kind
    if kind == WARPGROUP:
        pipe = warp // gpu.sizes.warp_slots * gpu.sizes.pipes + TENSOR
        begin = max(state.free[pipe], now)
        state.free[pipe] = begin + code.interval
        entry.product = begin + code.interval + code.latency
    elif kind == GROUP_COMMIT:
        state.products[warp, entry.groups % RING] = entry.product
        entry.groups += 1
    elif kind == GROUP_WAIT:
        group = entry.groups - 1 - code.argument
        if group >= 0:
            _delay(warp, state.products[warp, group % RING], PIPELINE, gpu)
    elif kind == BULK:
        if access >= 0:
            _ask_copy(warp, sm, pc, access, now, gpu)
    elif kind == BULK_COMMIT:
        state.marks[warp, entry.marks % RING] = entry.copies
        entry.marks += 1
    elif kind == BULK_WAIT:
        _wait_copies(warp, code.argument, gpu)
    elif kind == CLUSTER_ARRIVE or kind == CLUSTER_WAIT:
        _meet_cluster(warp, sm, kind == CLUSTER_ARRIVE, now, gpu)
    elif access >= 0:
        for task in range(launch.task_begins[access], launch.task_begins[access + 1]):
            if kind == SYNC:
                _meet_named(warp, place, launch.tasks[task], code.argument, now, gpu)
            else:
                _use_object(warp, place, launch.tasks[task], code, now, gpu)


@inline_never
def _use_object(warp, place, task, code, now, gpu):  # type: ignore[no-untyped-def]
    """Initialise an mbarrier, arrive there, or wait for the phase of a parity."""
    target, kind = _place_of(place, task.rank, gpu), code.kind
    if kind == M_INIT:
        _begin_object(target * gpu.sizes.barriers + task.barrier, task.value, gpu)
    elif kind == M_ARRIVE:
        at = now + (gpu.sizes.hop if target != place else 0)
        if code.argument:  # phases to come do without it
            gpu.state.barriers[target * gpu.sizes.barriers + task.barrier].expected -= task.value
        _count(target, task.barrier, task.value, task.bytes, at, gpu)
    elif kind == M_WAIT:
        entry = gpu.state.barriers[place * gpu.sizes.barriers + task.barrier]
        if entry.phases & 1 != task.value:
            _delay(warp, entry.opened + gpu.sizes.wake, BARRIER, gpu)
        else:
            _sleep(warp, AT_MBARRIER, task.barrier, gpu)


@inline_never
def _meet_named(warp, place, task, arrives, now, gpu):  # type: ignore[no-untyped-def]
    """Come to a barrier of a number of threads; arrives: without a wait."""
    named, at = gpu.state.named, place * NAMED + task.barrier
    named[at] += 1
    if not arrives:
        _sleep(warp, AT_NAMED, task.barrier, gpu)
    if named[at] * 32 >= task.value:
        named[at] = 0
        _wake_block(place, AT_NAMED, task.barrier, now + gpu.sizes.barrier, gpu)


@inline_never
def _meet_cluster(warp: int, sm: int, arrives: bool, now: int, gpu: SmDevice) -> None:
    """Come to the barrier of a cluster, or wait there."""
    sizes, state = gpu.sizes, gpu.state
    rank = sm % sizes.cluster
    leader = state.warps[warp].place - rank * sizes.places
    slot, entry = state.slots_of[leader], state.asyncs[warp]
    if arrives:
        slot.came += 1
        entry.phase = slot.phases
        _open_cluster(leader, now, gpu)
    elif entry.phase < slot.phases:
        _delay(warp, slot.opened, BARRIER, gpu)
    else:
        _sleep(warp, AT_CLUSTER, 0, gpu)


@inline_never
def _open_cluster(leader: int, now: int, gpu: SmDevice) -> None:
    """Open the barrier of a cluster if all of its warps that live have come."""
    sizes, slot = gpu.sizes, gpu.state.slots_of[leader]
    if slot.came == 0 or slot.came < slot.live:
        return
    slot.came = 0
    slot.phases += 1
    slot.opened = now + (sizes.hop if sizes.cluster > 1 else sizes.barrier)
    for rank in range(sizes.cluster):
        _wake_block(leader + rank * sizes.places, AT_CLUSTER, 0, slot.opened, gpu)


@inline_never
def leave_cluster(leader: int, sm: int, now: int, gpu: SmDevice) -> None:
    """Count a warp out of its cluster."""
    gpu.state.slots_of[leader].live -= 1
    _open_cluster(leader, now, gpu)


@inline_never
def is_full(sm: int, gpu: SmDevice) -> bool:
    """Tell whether no copy fits into the queue of an SM."""
    return gpu.state.engines[sm].tail - gpu.state.engines[sm].head >= QUEUE


@inline_never
def _ask_copy(warp: int, sm: int, pc: int, access: int, now: int, gpu: SmDevice) -> None:
    """Put a copy into the queue of its SM."""
    state = gpu.state
    engine, entry = state.engines[sm], state.asyncs[warp]
    copy = state.copies[sm * QUEUE + engine.tail % QUEUE]
    copy.task, copy.pc, copy.warp, copy.age = gpu.launch.task_begins[access], pc, warp, state.warps[warp].age
    copy.place, copy.ready = state.warps[warp].place, now + gpu.sizes.bulk
    copy.shift = SECTOR_BYTES * sm_requests.shift_of(access, copy.place, gpu)
    if engine.head == engine.tail:
        engine.next = copy.ready
    engine.tail += 1
    entry.copies += 1


@inline_never
def _wait_copies(warp: int, argument: int, gpu: SmDevice) -> None:
    """Wait until all but so many groups of copies are done, or have been read."""
    state, entry = gpu.state, gpu.state.asyncs[warp]
    group = entry.marks - 1 - argument % READ
    if group < 0:
        return
    if entry.done >= state.marks[warp, group % RING]:
        _delay(warp, entry.read if argument >= READ else entry.came, BARRIER, gpu)
    else:
        _sleep(warp, AT_COPIES, 2 * state.marks[warp, group % RING] + (argument >= READ), gpu)


@inline_never
def advance(sm: int, until: int, gpu: SmDevice) -> None:
    """Let an SM's copies make their requests until a cycle."""
    state, launch = gpu.state, gpu.launch
    engine = state.engines[sm]
    while engine.next < until:
        copy = state.copies[sm * QUEUE + engine.head % QUEUE]
        task = launch.tasks[copy.task]
        sort, step = launch.code[copy.pc].argument, gpu.sizes.line_sectors * SECTOR_BYTES
        now = engine.next
        if sort == IN_CLUSTER:
            # from shared memory to that of another block: the port's time, and the way
            ticks = gpu.sizes.port_ticks * (task.bytes // SECTOR_BYTES)
            begin = servers.serve(state.ports, sm, now * TICKS, ticks)
            engine.came = (begin + ticks) // TICKS + gpu.sizes.hop
            _finish_copy(sm, engine, copy, task, sort, (begin + ticks) // TICKS, gpu)
            continue
        if engine.row >= task.rows or task.row == 0 or engine.plane >= task.planes:
            _finish_copy(sm, engine, copy, task, sort, now, gpu)  # a box beside its tensor
            continue
        first = task.address + copy.shift + engine.plane * task.plane + engine.row * task.stride
        line = (first + engine.at) // step
        engine.next = max(now + 1, _move_line(sm, line, copy, task, sort, now, gpu))
        engine.at = (line + 1) * step - first
        if engine.at >= task.row:
            engine.at = 0
            engine.row += 1
            if engine.row == task.rows:
                engine.row = 0
                engine.plane += 1
                if engine.plane == task.planes:
                    _finish_copy(sm, engine, copy, task, sort, engine.next, gpu)


@inline_never
def _move_line(sm, line, copy, task, sort, now, gpu):  # type: ignore[no-untyped-def]
    """Make the request of a line for all blocks that take it; return the cycle in which it leaves."""
    sizes, state = gpu.sizes, gpu.state
    leaves = now * TICKS
    if sort == OUT_STORE:
        leaves = servers.serve(state.ports, sm, leaves, sizes.port_ticks * sizes.line_sectors)
    else:
        first = sm - sm % sizes.cluster
        for rank in range(sizes.cluster):
            if (task.mask >> rank) & 1:
                begin = servers.serve(state.ports, first + rank, now * TICKS, sizes.port_ticks * sizes.line_sectors)
                leaves = max(leaves, begin)
    cycle = leaves // TICKS
    came = sm_requests.ask(line * sizes.line_sectors, copy.pc, sort == OUT_STORE, cycle, gpu)
    state.counts.sectors += sizes.line_sectors
    state.engines[sm].came = max(state.engines[sm].came, came)
    return cycle


@inline_never
def _finish_copy(sm, engine, copy, task, sort, now, gpu):  # type: ignore[no-untyped-def]
    """Count a copy's bytes where it ends, or its end for its warp, and go on with the next one."""
    state, sizes = gpu.state, gpu.sizes
    came = max(engine.came, now)
    if sort == OUT_STORE:
        if state.warps[copy.warp].age == copy.age:  # else its warp has ended, and another one is there
            entry = state.asyncs[copy.warp]
            entry.done += 1
            entry.read, entry.came = max(entry.read, now), max(entry.came, came)
            if entry.waits == AT_COPIES and entry.done >= entry.needs // 2:
                _wake(copy.warp, entry.read if entry.needs & 1 else entry.came, gpu)
    else:
        for rank in range(sizes.cluster):
            if (task.mask >> rank) & 1:
                _count(_place_of(copy.place, rank, gpu), task.barrier, 0, -task.bytes, came, gpu)
    engine.head += 1
    engine.plane, engine.row, engine.at, engine.came = 0, 0, 0, 0
    if engine.head == engine.tail:
        engine.next = NEVER
    else:
        engine.next = max(now, state.copies[sm * QUEUE + engine.head % QUEUE].ready)
