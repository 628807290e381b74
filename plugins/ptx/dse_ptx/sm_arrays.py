"""Arrays of the compiled model of SMs (`dse_ptx.sm_kernel`): a launch's instructions, and the state of the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_ptx import sm_kernel as sk
from dse_ptx.coalescing import ATOMIC, GLOBAL, SHARED, SHARED_ATOMIC, coalesce
from dse_ptx.sms import OWN_PIPES, PIPES, SmArray
from dse_ptx.warp_trace import Code, Unit, WarpTrace

_ELEMENTS = ("tf32", "bf16", "s8", "u8", "s4", "u4", "b1", "f64")
_FAMILIES = {"dmma": "f64", "bmma": "b1", "imma": "s8", "igmma": "s8", "qgmma": "f8"}
"""SASS that does not name its elements."""
Ints = NDArray[np.int64]
LANES = 32
_PIPE_OF = {
    Unit.INTEGER: "integer", Unit.FP32: "fp32", Unit.FP64: "fp64", Unit.FP16: "fp16", Unit.SPECIAL: "special",
    Unit.TENSOR: "tensor", Unit.GLOBAL_LOAD: "global", Unit.GLOBAL_STORE: "global", Unit.GLOBAL_ATOMIC: "global",
    Unit.SHARED_LOAD: "shared", Unit.SHARED_STORE: "shared", Unit.SHARED_ATOMIC: "shared",
}  # fmt: skip
_KIND_OF = {
    Unit.GLOBAL_LOAD: sk.LOAD, Unit.GLOBAL_STORE: sk.STORE, Unit.GLOBAL_ATOMIC: sk.ATOMIC,
    Unit.SHARED_LOAD: sk.SHARED_ACCESS, Unit.SHARED_STORE: sk.SHARED_ACCESS, Unit.SHARED_ATOMIC: sk.SHARED_ACCESS,
    Unit.BRANCH: sk.BRANCHING, Unit.BARRIER: sk.SYNC, Unit.EXIT: sk.END,
}  # fmt: skip
_ACCESS_OF = {
    Unit.GLOBAL_LOAD: GLOBAL, Unit.GLOBAL_STORE: GLOBAL, Unit.GLOBAL_ATOMIC: ATOMIC, Unit.SHARED_LOAD: SHARED,
    Unit.SHARED_STORE: SHARED, Unit.SHARED_ATOMIC: SHARED_ATOMIC,
}  # fmt: skip
_STATE = ("at", "end", "ready", "depends", "why", "queue", "since", "age", "resident", "partial", "arrives",
          "registers", "next", "last", "idle", "idle_why", "free", "live", "waiting", "block", "ends", "tags", "used",
          "filled", "ring", "head", "port", "clock", "counts", "issued", "states", "slots", "units",
          "slices")  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Blocks of a launch that all execute the streams of a trace's first block, their accesses shifted.

    places [blocks, 3]: coordinates of a block. shift [accesses, 3]: bytes for a step of each coordinate, in global
    memory multiples of 32.
    """

    places: Ints
    shift: Ints


@dataclass(frozen=True)
class Instructions:
    """A launch as the model takes it: rows of the streams, sectors, and the parts of `k` by their names."""

    pcs: NDArray[np.int32]
    accesses: Ints
    sectors: Ints
    parts: dict[str, Ints]
    sizes: dict[str, int]

    @property
    def blocks(self) -> int:
        """Blocks whose streams are there."""
        return len(self.parts["first"])


def instructions(trace: WarpTrace, machine: SmArray, grid: Grid | None) -> Instructions:
    """A trace's blocks, or those of a grid that repeat the first of them. Raises ConfigError of an odd shift."""
    code, has = trace.code, trace.access >= 0
    pcs, active = np.zeros(len(trace.addresses), np.int64), np.zeros(len(trace.addresses), np.uint32)
    pcs[trace.access[has]], active[trace.access[has]] = trace.pcs[has], trace.active[has]
    of_unit = np.array([_ACCESS_OF.get(Unit(unit), -1) for unit in range(len(Unit))], np.int8)
    kinds = of_unit[code.units[pcs]]
    coalesced = coalesce(trace.addresses, active, trace.bytes_per_lane, kinds)
    # the streams of a block follow one another: its first row finds them all
    _, first = np.unique(trace.blocks, return_index=True)
    places, shift = np.zeros((len(first), 3), np.int64), np.zeros((len(kinds), 3), np.int64)
    if grid:
        _require_whole_sectors(grid, kinds)
        # all blocks of a grid execute the streams of the first one
        places, shift, first = grid.places, grid.shift // sk.SECTOR_BYTES, np.zeros(len(grid.places), np.int64)
    rows = _static(code, machine)
    parts = {
        "code": rows, "starts": trace.starts, "begins": coalesced.begins, "passes": coalesced.passes, "shift": shift,
        "first": first, "place": places,
    }  # fmt: skip
    sizes = {"fields": rows.shape[1], "num_reads": _width(code.reads), "num_writes": _width(code.writes)}
    sizes["num_registers"] = max(int(code.reads.max(initial=-1)), int(code.writes.max(initial=-1)), 0) + 1
    flat = {name: np.ascontiguousarray(part, np.int64).reshape(-1) for name, part in parts.items()}
    return Instructions(trace.pcs, trace.access, coalesced.sectors, flat, sizes)


def _require_whole_sectors(grid: Grid, kinds: NDArray[np.int8]) -> None:
    odd = np.flatnonzero((grid.shift % sk.SECTOR_BYTES).any(axis=1) & ((kinds == GLOBAL) | (kinds == ATOMIC)))
    if len(odd):
        rule = "shifts an access by parts of a sector of 32 bytes"
        raise ConfigError([Problem(f"grid.shift.{odd[0]}", rule, grid.shift[odd[0]].tolist(), "trace every block")])


def _width(registers: NDArray[np.int32]) -> int:
    return max(1, int(registers.shape[1]))


def _static(code: Code, machine: SmArray) -> Ints:
    """Fields of each pc [P, fields]: what `sm_kernel` names, and registers read and written."""
    reads, sm = _width(code.reads), machine.sm
    rows = np.full((len(code.opcodes), sk.READS + reads + _width(code.writes)), -1, np.int64)
    for pc, opcode in enumerate(code.opcodes):
        unit = Unit(int(code.units[pc]))
        name = _PIPE_OF.get(unit, "control")
        pipe, kind = sm.pipes[name], _KIND_OF.get(unit, sk.PLAIN)
        if kind == sk.PLAIN and opcode.startswith(("mov.", "cvta")) and (code.reads[pc] >= 0).any():
            kind = sk.FOLDED  # an assembler names the register itself
        # a matrix instruction takes as long as its multiply-adds
        lanes = _matrix_lanes(opcode, code.operations[pc], pipe.rates) if unit == Unit.TENSOR else float(LANES)
        slots = max([size for prefix, size in sm.slots.items() if opcode.startswith(prefix)], default=1)
        # a pipe of fewer lanes than a warp takes it in several cycles
        interval = max(1, math.ceil(lanes / pipe.lanes) * slots)
        # an instruction of several slots is a sequence: its value comes with the last one
        latency = sm.branch if kind == sk.BRANCHING else pipe.latency + (interval - 1) * (slots > 1)
        keeps = sm.l1_loads or ".nc" in opcode  # the read-only path goes through L1 everywhere
        rows[pc, : sk.READS] = kind, PIPES.index(pipe.as_part_of or name), interval, latency, unit, keeps
        for first, registers in ((sk.READS, code.reads[pc]), (sk.READS + reads, code.writes[pc])):
            named = registers[registers >= 0]
            rows[pc, first : first + len(named)] = named
    return rows


def _matrix_lanes(opcode: str, operations: float, rates: Mapping[str, float]) -> float:
    """Lanes that a matrix instruction takes. Raises ConfigError where its elements are not multiplied."""
    family, *words = opcode.lower().split(".")
    kind = next((word for word in words if word in _ELEMENTS), _FAMILIES.get(family, "f16"))
    if rates and kind not in rates:
        rule = f"has none for {kind}, which {opcode} multiplies"
        raise ConfigError([Problem("system.sm.pipes.tensor.rates", rule, dict(rates), "take another system")])
    # a multiply-add counts two operations
    return LANES * max(operations / 2 / rates.get(kind, 1.0), 1.0)


def shape_of(launch: Instructions, trace: WarpTrace, machine: SmArray, resident: int) -> tuple[sk.Shape, Ints, Ints]:
    """The model's sizes for a launch, its array of instructions, and a fresh state."""
    sm, gpu = machine.sm, machine.memory.gpu
    warps, l1 = math.ceil(trace.threads_per_block / LANES), float(gpu.l1.bytes)
    if sm.unified_bytes:  # L1 has what blocks leave of it
        l1 = max(float(sm.unified_bytes) - resident * trace.shared_bytes_per_block, l1)
    sizes: dict[str, Any] = {
        **launch.sizes, "sms": machine.num_sms, "schedulers": sm.schedulers, "places": resident,
        "warp_slots": math.ceil(resident * warps / sm.schedulers), "block_warps": warps, "blocks": launch.blocks,
        "width": sm.issue_width, "policy": sk.GTO if sm.policy == "gto" else sk.LRR, "pipes": len(PIPES),
        "own_pipes": OWN_PIPES, "barrier": sm.barrier, "l1_ways": gpu.l1.ways,
        "l1_sets": max(1, int(l1) // (sk.SECTOR_BYTES * sk.LINE_SECTORS * gpu.l1.ways)),
        # whole cycles; the sum guards exact ones from rounding
        "l1_latency": math.ceil(gpu.l1.hit_s / machine.cycle_s - 1e-9),
        "in_flight": sm.in_flight, "line_sectors": int(machine.memory.gpu.line_bytes) // sk.SECTOR_BYTES,
        "l1_sectors": max(1, int(sm.l1_bytes_per_cycle) // sk.SECTOR_BYTES),
        "port_ticks": round(sk.SECTOR_BYTES / sm.port_bytes_per_cycle * sk.TICKS), "cycle_ns": machine.cycle_s * 1e9,
    }  # fmt: skip
    k, at = np.concatenate(list(launch.parts.values())), 0
    for name, part in launch.parts.items():
        sizes[name], at = at, at + len(part)
    lengths, at = _lengths(sizes, gpu.dram.channels), 0
    for name in _STATE:
        sizes[name], at = at, at + lengths[name]
    shape, state = sk.Shape(**sizes), np.zeros(at, np.int64)
    of_values = (("ready", -1), ("partial", -1), ("tags", -1), ("block", -1), ("next", sk.NEVER))
    for name, value in (*of_values, ("filled", sk.NEVER), ("idle_why", sk.IDLE)):
        state[sizes[name] : sizes[name] + lengths[name]] = value
    state[shape.clock + sk.SHIFT] = 4  # bins of 16 cycles to begin with
    return shape, k, state


def _lengths(s: dict[str, Any], channels: int) -> dict[str, int]:
    """Entries of each part of the state."""
    schedulers, places = s["sms"] * s["schedulers"], s["sms"] * s["places"]
    warps, lines = schedulers * s["warp_slots"], s["sms"] * s["l1_sets"] * s["l1_ways"]
    return {
        **dict.fromkeys(_STATE, warps), "registers": warps * s["num_registers"],
        **dict.fromkeys(("next", "last", "idle", "idle_why"), schedulers), "free": schedulers * s["pipes"],
        **dict.fromkeys(("live", "waiting", "block"), places), "ends": s["blocks"], "tags": lines, "used": lines,
        "filled": lines * sk.LINE_SECTORS, "ring": s["sms"] * s["in_flight"], "head": s["sms"], "port": s["sms"],
        "clock": 4, "counts": sk.COUNTS, "issued": sk.BINS * s["sms"], "states": sk.BINS * sk.STATES,
        "slots": sk.BINS * sk.STATES, "units": sk.BINS * sk.UNITS, "slices": sk.BINS * channels * 2,
    }  # fmt: skip
