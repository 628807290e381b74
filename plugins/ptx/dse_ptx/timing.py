"""Time of a launch on the SMs of a GPU, by the warp instructions that it executes (`dse_ptx.sm_kernel`).

Of a launch of many blocks some are simulated. With C blocks resident at once on all SMs, whole waves of C blocks are
left out, and each is taken to last as long as C blocks of the steady state; the remainder, which fills a part of the
SMs, is always simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_memory import engine
from dse_memory.policy import Policy
from dse_memory.simulation import Simulation
from dse_ptx import sm_kernel
from dse_ptx import sm_state as ss
from dse_ptx.sm_arrays import LANES, Grid, idle_state, instructions, sizes_of
from dse_ptx.sm_state import Sizes, State, WarpStreams
from dse_ptx.sms import SmArray
from dse_ptx.warp_trace import WarpTrace

Ints = NDArray[np.int64]
SLOT_NAMES = ("issued", "memory", "shared", "alu", "pipeline", "barrier", "not selected", "idle")
"""What a warp, or a scheduler's slot, spends a cycle on, in the order of `sm_state`."""
WRITE_BACK = Policy(name="write_back", loads=True, stores=True, allocation_bypass=False, rinse=False, predictor=None)
"""What L2 keeps; L1 writes through."""


@dataclass(frozen=True)
class LaunchTime:
    """Time of a launch, and what its SMs did. Tables are of what was simulated, in bins of `bin_s`.

    seconds: of the whole launch with `launch_s`. cycles: that were simulated. simulated: share of blocks.
    sampling_error: by how much two halves of the steady state differ, over the time that was left out, as a share of
    the whole; 0 if nothing was. flop, counts (`sm_state.COUNTS`) and l2 (totals of `dse_memory.engine`) are of the
    simulated blocks, and ends [blocks] the cycles in which they ended. issued [bins, SMs]: warp instructions; states,
    slots [bins, 8]: cycles of warps and of schedulers by SLOT_NAMES; units [bins, 16]: warp instructions by `Unit`;
    slices [bins, channels, 2]: requests at L2, and those that hit; dram [bins, channels] of `dram_bin_s`: lines.
    """

    machine: SmArray
    resident: int
    cycles: int
    seconds: float
    launch_s: float
    simulated: float
    sampling_error: float
    flop: float
    counts: Any
    l2: Ints
    ends: Ints
    bin_s: float
    issued: Ints
    states: Ints
    slots: Ints
    units: Ints
    slices: Ints
    dram_bin_s: float
    dram: Ints

    @property
    def instructions(self) -> int:
        """Warp instructions that were issued."""
        return int(self.counts.instructions)

    @property
    def ipc(self) -> float:
        """Warp instructions of an SM in a cycle."""
        return self.instructions / max(self.cycles * self.machine.num_sms, 1)

    @property
    def l1_hit_rate(self) -> float:
        """Sectors that L1 holds, of those that look into it."""
        return float(self.counts.l1_hits / max(self.counts.l1_lookups, 1))

    @property
    def l2_hit_rate(self) -> float:
        """Requests at L2 that it serves, lines under way among them."""
        return float(self.slices[:, :, 1].sum() / max(self.slices[:, :, 0].sum(), 1))

    @property
    def dram_bytes(self) -> float:
        """Bytes that DRAM read and wrote."""
        return float(self.l2[engine.READS] + self.l2[engine.WRITES]) * self.machine.memory.gpu.line_bytes

    @property
    def slot_shares(self) -> dict[str, float]:
        """Share of the schedulers' slots by what they went to."""
        total = self.slots.sum(axis=0)
        return {name: float(total[place] / max(total.sum(), 1)) for place, name in enumerate(SLOT_NAMES)}


def occupancy(trace: WarpTrace, machine: SmArray) -> int:
    """Blocks of a trace that an SM holds at once. Raises ConfigError where not even one fits."""
    return resident_blocks(machine, trace.threads_per_block, trace.registers_per_thread, trace.shared_bytes_per_block)


def resident_blocks(machine: SmArray, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that an SM holds at once, by their threads, registers of each, and bytes of shared memory.

    Raises ConfigError where not even one fits.
    """
    sm, warps = machine.sm, math.ceil(threads / LANES)
    if shared_bytes > sm.shared_of_block:
        rule = f"is less than the {shared_bytes} that a block needs"
        raise ConfigError([Problem("system.sm.shared_of_block", rule, int(sm.shared_of_block), "take smaller blocks")])
    # registers and shared memory are given out in whole units of the hardware
    of_warp = math.ceil(registers * LANES / sm.register_allocation) * sm.register_allocation
    shared = math.ceil(shared_bytes / sm.shared_allocation) * sm.shared_allocation
    needs = {"warps": warps, "blocks": 1, "registers": of_warp * warps, "shared_bytes": shared}
    limits = {name: int(getattr(sm, name)) // need for name, need in needs.items() if need}
    scarce = min(limits, key=limits.__getitem__)
    if limits[scarce] < 1:
        rule = f"holds no block, which needs {needs[scarce]}"
        raise ConfigError([Problem(f"system.sm.{scarce}", rule, getattr(sm, scarce), "take smaller blocks")])
    return limits[scarce]


def simulated_blocks(total: int, most: int, wave: int) -> int:
    """Blocks of a launch that are simulated: all, or about `most`, but two waves at least."""
    # two waves stay: the first fills the GPU, the second is the steady state
    # whole waves only, so that what remains fills the GPU as the last blocks of the launch do
    skipped = max(0, min(-(-(total - most) // wave), (total - 2 * wave) // wave)) if total > most else 0
    return total - skipped * wave


def time_launch(
    trace: WarpTrace, machine: SmArray, *, grid: Grid | None = None, most_blocks: int | None = None
) -> LaunchTime:
    """Time a launch. grid: blocks that repeat the trace's first. most_blocks: to simulate, but two waves at least.

    Raises ConfigError where no block fits on an SM, or a trace holds a sample that is shorter than two waves.
    """
    resident, launch = occupancy(trace, machine), instructions(trace, machine, grid)
    if trace.cluster > machine.num_sms:
        rule = f"is less than the {trace.cluster} blocks of a cluster"
        raise ConfigError([Problem("system.memory.num_cus", rule, machine.num_sms, "take another system")])
    # a grid stands for all blocks; a trace may hold a sample of the first ones
    total = len(launch.first) if grid else trace.num_blocks
    # SMs that make no whole cluster stay idle
    available, wave = len(launch.first), resident * (machine.num_sms // trace.cluster * trace.cluster)
    blocks = simulated_blocks(total, min(available, most_blocks or available), wave)
    if blocks > available:
        rule, way = f"holds {available} of {total} blocks, less than two waves", f"execute the first {blocks} blocks"
        raise ConfigError([Problem("trace", rule, None, way)])
    launch = launch._replace(first=launch.first[:blocks], coordinates=launch.coordinates[:blocks])
    sizes = sizes_of(launch, trace, machine, resident)
    # L1 writes through and keeps nothing dirty: only L2 has a policy
    state, memory = idle_state(sizes, launch), Simulation(machine.memory, WRITE_BACK, held=1)
    memory.now = sm_kernel.run(ss.SmDevice(sizes, launch, state, memory.memory)) * sizes.cycle_ns
    if state.counts.blocks < blocks:
        rule = f"ends with {blocks - state.counts.blocks} blocks whose warps wait for ever"
        raise ConfigError(
            [Problem("trace", rule, None, "record whole clusters, and blocks from their first instruction")]
        )
    # blocks may end in another order than they began
    left, error = _left_out(np.sort(state.ends), wave, (total - blocks) // wave)
    launch_s, cycles = machine.sm.launch * machine.cycle_s, int(state.counts.cycles)
    return LaunchTime(
        machine=machine, resident=resident, cycles=cycles, launch_s=launch_s,
        seconds=launch_s + (cycles + left) * machine.cycle_s, simulated=blocks / total,
        sampling_error=error / max(cycles + left, 1.0), flop=_flop(trace, launch),
        counts=state.counts, l2=memory.part("total").copy(), ends=state.ends,
        **_tables(state, sizes, memory),
    )  # fmt: skip


def _left_out(ends: Ints, wave: int, skipped: int) -> tuple[float, float]:
    """Cycles of the waves that are left out, and by how much these differ by the halves of the steady state.

    ends: of the blocks, in their order. The steady state is a whole wave of blocks, from the middle of the first.
    """
    if not skipped:
        return 0.0, 0.0
    # the first blocks all start in cycle 0, unlike later ones
    first = wave // 2
    middle, last = first + wave // 2, first + wave
    cycles = skipped * float(ends[last] - ends[first])
    halves = float(ends[middle] - ends[first]) / (middle - first), float(ends[last] - ends[middle]) / (last - middle)
    return cycles, abs(halves[0] - halves[1]) * skipped * wave / 2 if wave > 1 else 0.0


def _tables(state: State, sizes: Sizes, memory: Simulation) -> dict[str, Any]:
    """Tables of bins of time, as far as the launch reaches."""
    shift, activity = int(state.clock.shift), memory.activity()
    # bins are 2^shift cycles wide: the kernel doubles them as a launch grows
    bins = max(1, (int(state.counts.cycles) >> shift) + 1)
    of_bins = {name: getattr(state, name).reshape(ss.BINS, -1) for name in ("issued", "states", "slots", "units")}
    every = state.slices.reshape(ss.BINS, sizes.channels, 2)
    return {
        **{name: counts[:bins] for name, counts in of_bins.items()},
        # requests that are answered after the end count in the last bin
        "slices": np.concatenate([every[: bins - 1], every[bins - 1 :].sum(axis=0, keepdims=True)]),
        "bin_s": (1 << shift) * memory.system.gpu.cycle_s,
        "dram_bin_s": activity.seconds,
        "dram": activity.channels,
    }


def _flop(trace: WarpTrace, launch: WarpStreams) -> float:
    """Floating-point operations of the simulated blocks' active lanes."""
    of_rows = trace.code.operations[trace.pcs] * np.bitwise_count(trace.active)
    total, first = np.concatenate([[0.0], np.cumsum(of_rows)]), launch.first
    # warps of a block, the same number in all
    warps = int(np.searchsorted(trace.blocks, trace.blocks[0], side="right"))
    return float((total[trace.starts[first + warps]] - total[trace.starts[first]]).sum())
