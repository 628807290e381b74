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
UNITS = 20
PLAIN, LOAD, STORE, ATOMIC, SHARED_ACCESS, BRANCHING, SYNC, END, FOLDED = range(9)
(WARPGROUP, GROUP_COMMIT, GROUP_WAIT, BULK, BULK_COMMIT, BULK_WAIT, M_INIT, M_ARRIVE, M_WAIT, CLUSTER_ARRIVE,
 CLUSTER_WAIT) = range(9, 20)  # fmt: skip
"""What is done when an instruction is issued, by pc; from WARPGROUP on by `sm_async`."""
CONTROL, TENSOR = 6, 5
"""Places of two pipelines among `sms.PIPES`."""
RING, QUEUE, NAMED, READ = 8, 64, 16, 16
"""Groups of a warp that are remembered, copies that wait at an SM, barriers of a block, and what marks a wait for reads
alone among its groups."""
IN_LOAD, OUT_STORE, IN_CLUSTER = range(3)
"""Sorts of bulk copies."""
NO_WAIT, AT_MBARRIER, AT_NAMED, AT_CLUSTER, AT_COPIES = range(5)
"""What a warp sleeps for, in its `waits`."""

CODE = layout(int64="kind pipe interval latency unit kept argument")
"""Of a pc: what is done, its pipeline (the SM's from `scheduler_pipes` on), cycles until the pipeline takes the next
one and until the value is there, its `Unit`, whether L1 keeps what it loads, and groups that a wait leaves open, the
sort of a copy, or 1 of an arrival that does not wait, or for good."""
TASK = layout(int64="barrier rank value bytes mask address rows row stride planes plane")
"""Of an access of an mbarrier: its number, the block in the cluster, arrivals, threads of a barrier, or a parity, and
bytes that are expected. Of a copy: the mbarrier, bytes that it counts there, blocks that take it; rows of so many bytes
in global memory, from row to row, planes of them, and from plane to plane."""
BARRIER_OBJECT = layout(int64="pending expected bytes phases latest opened")
"""Of an mbarrier: arrivals that lack, and of each phase; bytes that lack; phases that ended; the cycle of the latest
that came, and in which the last phase ended."""
ENGINE = layout(int64="head tail next plane row at came")
"""Copies that left the queue of an SM and that came to it; the cycle in which it goes on; where it is in a copy, and
the cycle of the latest that came."""
COPY = layout(int64="task pc warp age place ready shift")
"""Of a copy that waits: its task and pc, its warp with its age, the place of its block, the cycle from which it may go,
and bytes by which it lies behind that of the first block."""
SLOT = layout(int64="live blocks came phases opened")
"""Of a cluster, at the place of its first block: warps and blocks that have not ended, warps that came to its barrier,
how often that opened, and when it did last."""
ASYNC = layout(int64="waits needs product groups copies marks done read came phase")
"""Of a warp: what it sleeps for, and which; the cycle in which its last product is done, and groups that it committed;
copies that it asked for, groups of them, copies that are done, the cycles in which the last was read and had come; and
the phase of the cluster's barrier to which it came."""
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
    cluster: int  # blocks
    barriers: int  # mbarriers of a block
    bulk: int  # from the issue of a copy to its first request
    hop: int  # to another SM of the cluster
    wake: int  # from the end of a phase to what waits for it


class WarpStreams(NamedTuple):
    """Instructions of a launch.

    pcs, accesses [rows]: of the streams of warps; an access is -1 where there is none. starts [streams + 1]: into them.
    code [P]: records of CODE; reads, writes [P, most]: registers, padded with -1. sectors [S] of each access from
    begins [accesses + 1] on; passes [accesses]: cycles in shared memory, or of atomics the most lanes of one address.
    shift [accesses, 3]: of its sectors for a step of a block's coordinates [blocks, 3]. first [blocks]: stream of it.
    tasks: records of TASK of each access from task_begins [accesses + 1] on.
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
    tasks: Any
    task_begins: Ints


class State(NamedTuple):
    """State of all SMs: records of the layouts of their names, and arrays.

    registers [warps, registers]. free [schedulers * pipes]: cycle in which a pipeline is; those of an SM are of its
    first scheduler. ends [blocks]. L1 [SMs * sets * ways]: tags and used; filled [lines * LINE_SECTORS]: cycle in which
    a sector is there. flights [SMs * in_flight]: cycle in which a request comes back; heads, ports [SMs]: the place of
    the oldest, and the tick from which the port is free. Tables, bin after bin: issued [BINS * SMs] instructions;
    states, slots [BINS * STATES] cycles; units [BINS * UNITS] instructions; slices [BINS * channels * 2] requests at L2
    and those that hit. Of what goes on without warps: barriers [places * barriers], engines [SMs], copies [SMs *
    QUEUE], slots_of [places], asyncs [warps], products and marks [warps, RING]: the cycle in which a group is done, and
    copies up to it; named [places * NAMED]: warps that came.
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
    barriers: Any
    engines: Any
    copies: Any
    slots_of: Any
    asyncs: Any
    products: Ints
    marks: Ints
    named: Ints


class SmDevice(NamedTuple):
    """SMs with a launch, and the memory below them (L2 and DRAM of `dse_memory.engine`)."""

    sizes: Sizes
    launch: WarpStreams
    state: State
    below: MemoryState
