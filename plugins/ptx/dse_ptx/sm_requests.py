"""Requests of SMs to the memory below them, as parts of the compiled model of SMs (`dse_ptx.sm_kernel`)."""

from __future__ import annotations

import numpy as np

from dse_memory import engine
from dse_ptx.sm_state import ATOMIC, BINS, LINE_SECTORS, LOAD, NEVER, STORE, TICKS, WINDOW, Sizes, SmDevice, State
from simulators.compiled import inline_always, inline_never
from simulators.device import lru, rings, servers


@inline_never
def ask(sector: int, pc: int, store: int, now: int, gpu: SmDevice) -> int:
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
def take_l1_line(sm: int, line: int, state: State, sizes: Sizes) -> int:
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
def shift_of(access: int, place: int, gpu: SmDevice) -> int:
    """Sectors by which an access of the block at a place lies behind that of the first block."""
    shift, block = 0, gpu.state.places[place].block
    for axis in range(3):
        shift += gpu.launch.shift[access, axis] * gpu.launch.coordinates[block, axis]
    return shift


@inline_always
def send(sm: int, sector: int, pc: int, cycle: int, gpu: SmDevice) -> int:
    """Make the requests of a sector, with a place in flight; return the cycle in which the last came."""
    sizes, state, kind = gpu.sizes, gpu.state, gpu.launch.code[pc].kind
    servers.serve(state.ports, sm, cycle * TICKS, sizes.port_ticks)
    leaves = state.ports[sm] // TICKS + (sizes.l1_latency if kind == LOAD else 0)
    came = 0
    for store in range(kind == STORE, 1 + (kind != LOAD)):  # what an atomic read is written back
        came = max(came, ask(sector, pc, store, leaves, gpu))
    state.counts.sectors += 1
    state.flights[sm * sizes.in_flight + state.heads[sm]] = came
    state.heads[sm] = rings.next_place(state.heads[sm], sizes.in_flight)
    return came


@inline_never
def touch(sm: int, warp: int, now: int, gpu: SmDevice) -> int:
    """Make the requests of an access from where it stopped; return the cycle from which the SM takes the next.

    `partial` is where it goes on, -1 once all are made, `arrives` the cycle of the last that came.
    """
    sizes, launch, state = gpu.sizes, gpu.launch, gpu.state
    warps, counts = state.warps, state.counts
    pc, access = launch.pcs[warps[warp].at], launch.accesses[warps[warp].at]
    kind, shift = launch.code[pc].kind, shift_of(access, warps[warp].place, gpu)
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
            place = take_l1_line(sm, line, state, sizes) if keeps else 0
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
        came = send(sm, sector, pc, cycle, gpu)
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
