"""Instructions and state of the compiled model of SMs (`dse_ptx.sm_kernel`), by name.

Warps are numbered scheduler after scheduler, `warp_slots` each, and schedulers SM after SM. Times are in cycles of an
SM. A register holds four times the cycle in which its value is there, and in the two low bits what it waits for
(`MEMORY`, `SHARED` or `ALU`, from `MEMORY` on).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dse_memory.engine import MemoryState
from simulators.device.records import layout

Shorts = NDArray[np.int32]
Ints = NDArray[np.int64]

SECTOR_BYTES, LINE_SECTORS = 32, 4
"""Of a request to L1, and of a line of it."""
BINS, WINDOW, TICKS = 512, 16, 16
"""Bins of time of a table; cycles for which an SM runs before the next does; parts of a cycle at an SM's port."""
FIRST_BIN_BITS = 4
"""Bins of 16 cycles to begin with."""
NEVER = 2**61  # after every cycle, even times four
LRR, GTO = range(2)
ISSUED, MEMORY, SHARED, ALU, PIPELINE, BARRIER, UNSELECTED, IDLE, STATES = range(9)
"""States of a warp, and what a scheduler's slots go to (of which none is UNSELECTED)."""
UNITS = 16
PLAIN, LOAD, STORE, ATOMIC, SHARED_ACCESS, BRANCHING, SYNC, END, FOLDED = range(9)
"""What is done when an instruction is issued, by pc."""

CODE = layout(int64="kind pipe interval latency unit kept")
"""Of a pc: what is done, its pipeline (the SM's from `scheduler_pipes` on), cycles until the pipeline takes the next
one and until the value is there, its `Unit`, and whether L1 keeps what it loads."""
WARP = layout(int64="at end ready depends why queue since age place partial arrives")
"""Row of its next instruction, and of its end; the cycle from which that may be issued (below 0: it has ended), from
which its inputs are there, and what it waits for until then; its pipeline; the cycle after which it was issued last;
its number in the order of dispatch; the place of its block; the request with which an access goes on (below 0: none),
and the cycle in which the last of its requests came."""
SCHEDULER = layout(int64="next last idle idle_why")
"""Cycle in which it looks again, the slot that was issued last, and since when and why nothing has been issued."""
PLACE = layout(int64="live waiting block")
"""Of a block on an SM: warps that have not ended, those that wait at a barrier, and the block (below 0: none)."""
CLOCK = layout(int64="shift next_block age stamp")
"""Cycles of a bin, as a power of two; the next block and its first warp's age; the order of use of L1's lines."""
COUNTS = layout(int64="instructions l1_lookups l1_hits replays passes sectors blocks cycles")
"""Warp instructions; sectors that looked into an L1, and that hit; accesses that went on later; cycles of shared
memory; sectors that left an SM; blocks that ended; the cycle in which the last did."""


class Sizes(NamedTuple):
    """Sizes of the SMs and times of their parts, in cycles."""

    sms: int
    schedulers: int
    warp_slots: int  # of a scheduler
    places: int  # of blocks on an SM
    block_warps: int
    blocks: int
    width: int
    policy: int
    pipes: int
    scheduler_pipes: int
    barrier: int
    atomic: int  # from a lane of an address to its next one
    l1_sets: int
    l1_ways: int
    l1_latency: int
    l1_sectors: int  # a cycle
    in_flight: int
    line_sectors: int  # of L2 and DRAM
    port_ticks: int  # of a cycle, for a sector
    cycle_ns: float
    channels: int


class WarpStreams(NamedTuple):
    """Instructions of a launch.

    pcs, accesses [rows]: of the streams of warps; an access is -1 where there is none. starts [streams + 1]: into them.
    code [P]: records of CODE; reads, writes [P, most]: registers, padded with -1. sectors [S] of each access from
    begins [accesses + 1] on; passes [accesses]: cycles in shared memory, or of atomics the most lanes of one address.
    shift [accesses, 3]: of its sectors for a step of a block's coordinates [blocks, 3]. first [blocks]: stream of it.
    """

    pcs: Shorts
    accesses: Ints
    starts: Ints
    code: Any
    reads: Ints
    writes: Ints
    sectors: Ints
    begins: Ints
    passes: Ints
    shift: Ints
    first: Ints
    coordinates: Ints


class State(NamedTuple):
    """State of all SMs: records of the layouts of their names, and arrays.

    registers [warps, registers]. free [schedulers * pipes]: cycle in which a pipeline is; those of an SM are of its
    first scheduler. ends [blocks]. L1 [SMs * sets * ways]: tags and used; filled [lines * LINE_SECTORS]: cycle in which
    a sector is there. flights [SMs * in_flight]: cycle in which a request comes back; heads, ports [SMs]: the place of
    the oldest, and the tick from which the port is free. Tables, bin after bin: issued [BINS * SMs] instructions;
    states, slots [BINS * STATES] cycles; units [BINS * UNITS] instructions; slices [BINS * channels * 2] requests at L2
    and those that hit.
    """

    clock: Any
    counts: Any
    warps: Any
    registers: Ints
    schedulers: Any
    free: Ints
    places: Any
    ends: Ints
    tags: Ints
    used: Ints
    filled: Ints
    flights: Ints
    heads: Ints
    ports: Ints
    issued: Ints
    states: Ints
    slots: Ints
    units: Ints
    slices: Ints


class SmDevice(NamedTuple):
    """SMs with a launch, and the memory below them (L2 and DRAM of `dse_memory.engine`)."""

    sizes: Sizes
    launch: WarpStreams
    state: State
    below: MemoryState
