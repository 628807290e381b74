"""Arrays of the compiled model of SMs (`dse_ptx.sm_kernel`): a launch's instructions, and a state to begin with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_ptx import sm_state as ss
from dse_ptx.coalescing import ATOMIC, GLOBAL, SHARED, SHARED_ATOMIC, coalesce
from dse_ptx.sm_state import Sizes, State, WarpStreams
from dse_ptx.sm_tasks import UNITS, argument_of, kind_of, tasks_of, without_fragments
from dse_ptx.sms import OWN_PIPES, PIPES, SmArray
from dse_ptx.warp_trace import Code, Unit, WarpTrace
from simulators.device.records import record, table

_ELEMENTS = ("tf32", "bf16", "s8", "u8", "s4", "u4", "b1", "f64")
_FAMILIES = {"dmma": "f64", "bmma": "b1", "imma": "s8", "igmma": "s8", "qgmma": "f8"}
"""SASS that does not name its elements."""
Ints = NDArray[np.int64]
LANES = 32
_PIPE_OF = {
    Unit.INTEGER: "integer", Unit.FP32: "fp32", Unit.FP64: "fp64", Unit.FP16: "fp16", Unit.SPECIAL: "special",
    Unit.TENSOR: "tensor", Unit.GLOBAL_LOAD: "global", Unit.GLOBAL_STORE: "global", Unit.GLOBAL_ATOMIC: "global",
    Unit.SHARED_LOAD: "shared", Unit.SHARED_STORE: "shared", Unit.SHARED_ATOMIC: "shared",
    Unit.WGMMA: "control", Unit.BULK: "control", Unit.MBARRIER: "shared", Unit.CLUSTER: "control",
}  # fmt: skip
_KIND_OF = {
    Unit.GLOBAL_LOAD: ss.LOAD, Unit.GLOBAL_STORE: ss.STORE, Unit.GLOBAL_ATOMIC: ss.ATOMIC,
    Unit.SHARED_LOAD: ss.SHARED_ACCESS, Unit.SHARED_STORE: ss.SHARED_ACCESS, Unit.SHARED_ATOMIC: ss.SHARED_ACCESS,
    Unit.BRANCH: ss.BRANCHING, Unit.BARRIER: ss.SYNC, Unit.EXIT: ss.END,
}  # fmt: skip
_ACCESS_OF = {
    Unit.GLOBAL_LOAD: GLOBAL, Unit.GLOBAL_STORE: GLOBAL, Unit.GLOBAL_ATOMIC: ATOMIC, Unit.SHARED_LOAD: SHARED,
    Unit.SHARED_STORE: SHARED, Unit.SHARED_ATOMIC: SHARED_ATOMIC,
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Blocks of a launch that all execute the streams of a trace's first block, or cluster, their accesses shifted.

    places [blocks, 3]: coordinates of a block. shift [accesses, 3]: bytes for a step of each coordinate, in global
    memory multiples of 32.
    """

    places: Ints
    shift: Ints


def instructions(trace: WarpTrace, machine: SmArray, grid: Grid | None) -> WarpStreams:
    """A trace's blocks, or those of a grid that repeat the first of them. Raises ConfigError of an odd shift."""
    code, has = trace.code, trace.access >= 0
    pcs, active = np.zeros(len(trace.addresses), np.int64), np.zeros(len(trace.addresses), np.uint32)
    pcs[trace.access[has]], active[trace.access[has]] = trace.pcs[has], trace.active[has]
    of_unit = np.array([_ACCESS_OF.get(Unit(unit), -1) for unit in range(len(Unit))], np.int8)
    kinds = of_unit[code.units[pcs]]
    coalesced = coalesce(trace.addresses, active, trace.bytes_per_lane, kinds)
    # the streams of a block follow one another: its first row finds them all
    _, first = np.unique(trace.blocks, return_index=True)
    if machine.sm.asynchronous is None and np.isin(code.units, UNITS).any():
        rule = "is missing, and the kernel has wgmma, mbarriers, bulk copies or clusters"
        raise ConfigError([Problem("system.sm.asynchronous", rule, way_out="take system=h100")])
    tasks, task_begins, _ = tasks_of(trace, pcs, active)
    coordinates, shift = np.zeros((len(first), 3), np.int64), np.zeros((len(kinds), 3), np.int64)
    if grid:
        _require_whole_sectors(grid, kinds)
        # all blocks of a grid execute the streams of the first one, or of the one at their place in the first cluster
        coordinates, shift = grid.places, grid.shift // ss.SECTOR_BYTES
        first = first[np.arange(len(grid.places)) % trace.cluster]
    return WarpStreams(
        pcs=trace.pcs,
        accesses=trace.access,
        starts=trace.starts,
        code=_static(code, machine),
        # a descriptor of each tile and the predicate are read when a product is issued
        reads=without_fragments(_registers(code.reads), code, 3),
        writes=without_fragments(_registers(code.writes), code, 0),
        sectors=coalesced.sectors,
        begins=coalesced.begins,
        passes=coalesced.passes.astype(np.int64),
        shift=np.ascontiguousarray(shift),
        first=first,
        coordinates=np.ascontiguousarray(coordinates),
        tasks=tasks,
        task_begins=task_begins,
    )


def _require_whole_sectors(grid: Grid, kinds: NDArray[np.int8]) -> None:
    odd = np.flatnonzero((grid.shift % ss.SECTOR_BYTES).any(axis=1) & ((kinds == GLOBAL) | (kinds == ATOMIC)))
    if len(odd):
        rule = "shifts an access by parts of a sector of 32 bytes"
        raise ConfigError([Problem(f"grid.shift.{odd[0]}", rule, grid.shift[odd[0]].tolist(), "trace every block")])


def _registers(numbers: NDArray[np.int32]) -> Ints:
    """Registers of each pc [P, most], those that there are first, then -1; a column at least."""
    rows = np.full((len(numbers), max(1, numbers.shape[1])), -1, np.int64)
    for row, registers in zip(rows, numbers, strict=True):
        used = registers[registers >= 0]
        row[: len(used)] = used
    return rows


def _static(code: Code, machine: SmArray) -> Any:
    """Records of `sm_state.CODE` for each pc [P]."""
    rows, sm = table(len(code.opcodes), ss.CODE), machine.sm
    for pc, opcode in enumerate(code.opcodes):
        row, unit = rows[pc], Unit(int(code.units[pc]))
        name = _PIPE_OF.get(unit, "control")
        pipe, kind = sm.pipes[name], kind_of(opcode) if unit in UNITS else _KIND_OF.get(unit, ss.PLAIN)
        if kind == ss.PLAIN and opcode.startswith(("mov.", "cvta")) and (code.reads[pc] >= 0).any():
            kind = ss.FOLDED  # an assembler names the register itself
        # a matrix instruction takes as long as its multiply-adds
        lanes = _matrix_lanes(opcode, code.operations[pc], pipe.rates) if unit == Unit.TENSOR else float(LANES)
        slots = max([size for prefix, size in sm.slots.items() if opcode.startswith(prefix)], default=1)
        row.kind, row.pipe, row.unit = kind, PIPES.index(pipe.as_part_of or name), unit
        # a pipe of fewer lanes than a warp takes it in several cycles
        row.interval = max(1, math.ceil(lanes / pipe.lanes) * slots)
        # an instruction of several slots is a sequence: its value comes with the last one
        row.latency = sm.branch if kind == ss.BRANCHING else pipe.latency + (row.interval - 1) * (slots > 1)
        row.kept = sm.l1_loads or ".nc" in opcode  # the read-only path goes through L1 everywhere
        row.argument = argument_of(opcode, int(code.arguments[pc]) if len(code.arguments) else 0)
        if sm.asynchronous and kind == ss.WARPGROUP:
            row.interval = _product_cycles(opcode, code, pc, machine)
            row.latency = sm.asynchronous.wgmma
        if sm.asynchronous and "shared_cluster" in opcode and kind == ss.SHARED_ACCESS:
            row.latency = sm.asynchronous.hop
    return rows


def _product_cycles(opcode: str, code: Code, pc: int, machine: SmArray) -> int:
    """Cycles of tensor cores in a `wgmma`, of its multiply-adds, or of what it reads of shared memory.

    A [64 x 16] of 16 bits comes from shared memory unless from registers, B [16 x N] always, for all four warps.
    """
    pipe, columns = machine.sm.pipes["tensor"], int(code.arguments[pc])
    lanes = _matrix_lanes(opcode, code.operations[pc], pipe.rates)
    moved = 32 * abs(columns) + (64 * 32 if columns > 0 else 0)
    return max(math.ceil(lanes / pipe.lanes), math.ceil(moved / machine.sm.l1_bytes_per_cycle))


def _matrix_lanes(opcode: str, operations: float, rates: Mapping[str, float]) -> float:
    """Lanes that a matrix instruction takes. Raises ConfigError where its elements are not multiplied."""
    family, *words = opcode.lower().split(".")
    kind = next((word for word in words if word in _ELEMENTS), _FAMILIES.get(family, "f16"))
    if rates and kind not in rates:
        rule = f"has none for {kind}, which {opcode} multiplies"
        raise ConfigError([Problem("system.sm.pipes.tensor.rates", rule, dict(rates), "take another system")])
    # a multiply-add counts two operations
    return LANES * max(operations / 2 / rates.get(kind, 1.0), 1.0)


def sizes_of(launch: WarpStreams, trace: WarpTrace, machine: SmArray, resident: int) -> Sizes:
    """The model's sizes for a launch of which an SM holds `resident` blocks at once."""
    sm, gpu = machine.sm, machine.memory.gpu
    warps, l1 = math.ceil(trace.threads_per_block / LANES), float(gpu.l1.bytes)
    if sm.unified_bytes:  # L1 has what blocks leave of it
        l1 = max(float(sm.unified_bytes) - resident * trace.shared_bytes_per_block, l1)
    return Sizes(
        sms=machine.num_sms,
        schedulers=sm.schedulers,
        warp_slots=math.ceil(resident * warps / sm.schedulers),
        places=resident,
        block_warps=warps,
        blocks=len(launch.first),
        width=sm.issue_width,
        policy=ss.GTO if sm.policy == "gto" else ss.LRR,
        pipes=len(PIPES),
        scheduler_pipes=OWN_PIPES,
        barrier=sm.barrier,
        atomic=sm.atomic,
        l1_sets=max(1, int(l1) // (ss.SECTOR_BYTES * ss.LINE_SECTORS * gpu.l1.ways)),
        l1_ways=gpu.l1.ways,
        # whole cycles; the sum guards exact ones from rounding
        l1_latency=math.ceil(gpu.l1.hit_s / machine.cycle_s - 1e-9),
        l1_sectors=max(1, int(sm.l1_bytes_per_cycle) // ss.SECTOR_BYTES),
        in_flight=sm.in_flight,
        line_sectors=int(machine.memory.gpu.line_bytes) // ss.SECTOR_BYTES,
        port_ticks=round(ss.SECTOR_BYTES / sm.port_bytes_per_cycle * ss.TICKS),
        cycle_ns=machine.cycle_s * 1e9,
        channels=gpu.dram.channels,
        cluster=trace.cluster,
        barriers=int(launch.tasks.barrier.max(initial=0)) + 1,
        bulk=sm.asynchronous.bulk if sm.asynchronous else 0,
        hop=sm.asynchronous.hop if sm.asynchronous else 0,
        wake=sm.asynchronous.wake if sm.asynchronous else 0,
    )


def idle_state(sizes: Sizes, launch: WarpStreams) -> State:
    """State before the first block is dispatched: no warp, empty caches."""
    schedulers, places = sizes.sms * sizes.schedulers, sizes.sms * sizes.places
    warps, lines = schedulers * sizes.warp_slots, sizes.sms * sizes.l1_sets * sizes.l1_ways
    registers = max(int(launch.reads.max()), int(launch.writes.max()), 0) + 1
    return State(
        clock=record(ss.CLOCK, shift=ss.FIRST_BIN_BITS),
        counts=record(ss.COUNTS),
        warps=table(warps, ss.WARP, ready=-1, partial=-1),
        registers=np.zeros((warps, registers), np.int64),
        schedulers=table(schedulers, ss.SCHEDULER, next=ss.NEVER, idle_why=ss.IDLE),
        free=np.zeros(schedulers * sizes.pipes, np.int64),
        places=table(places, ss.PLACE, block=-1),
        ends=np.zeros(sizes.blocks, np.int64),
        tags=np.full(lines, -1, np.int64),
        used=np.zeros(lines, np.int64),
        filled=np.full(lines * ss.LINE_SECTORS, ss.NEVER, np.int64),
        flights=np.zeros(sizes.sms * sizes.in_flight, np.int64),
        heads=np.zeros(sizes.sms, np.int64),
        ports=np.zeros(sizes.sms, np.int64),
        issued=np.zeros(ss.BINS * sizes.sms, np.int64),
        states=np.zeros(ss.BINS * ss.STATES, np.int64),
        slots=np.zeros(ss.BINS * ss.STATES, np.int64),
        units=np.zeros(ss.BINS * ss.UNITS, np.int64),
        slices=np.zeros(ss.BINS * sizes.channels * 2, np.int64),
        barriers=table(places * sizes.barriers, ss.BARRIER_OBJECT),
        engines=table(sizes.sms, ss.ENGINE, next=ss.NEVER),
        copies=table(sizes.sms * ss.QUEUE, ss.COPY),
        slots_of=table(places, ss.SLOT),
        asyncs=table(warps, ss.ASYNC),
        products=np.zeros((warps, ss.RING), np.int64),
        marks=np.zeros((warps, ss.RING), np.int64),
        named=np.zeros(places * ss.NAMED, np.int64),
    )
