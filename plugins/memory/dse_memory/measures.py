"""Metrics of an application's kernels, once they have run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.backend import Law, Metric
from dse_memory import engine as e
from dse_memory.design import MemoryDesign, build_kernels
from dse_memory.kernels import ELEMENT_BYTES, touched_tensors
from dse_memory.phases import phases
from dse_memory.program import Program, Region
from dse_memory.simulation import SimulatedCost, Simulation
from dse_memory.traces import program

Floats = NDArray[np.float64]

# with fewer, an even spread looks uneven by chance
_ENOUGH = 16  # lines a channel, in which camping is looked for


@dataclass(frozen=True)
class SimulatedApplication:
    """The machine as an application left it, and the cost of each kernel with how many launches it stands for."""

    machine: Simulation
    costs: tuple[tuple[SimulatedCost, int], ...]

    def total(self, name: str) -> Floats:
        """One array of the costs, over all launches."""
        return np.asarray(np.sum([getattr(cost, name) * times for cost, times in self.costs], axis=0))

    def sum_cost(self, name: str) -> float:
        """One number of the costs, over all launches."""
        # exact, whatever the order of kernels
        return math.fsum(getattr(cost, name) * times for cost, times in self.costs)


def programs(design: MemoryDesign) -> list[list[Program]]:
    """The program of every kernel, by group; tensors lie one after another, from page to page."""
    application, page = build_kernels(design), design.system.gpu.page_bytes
    regions, end = dict[str, Region](), 0
    for name, sizes in application.tensors.items():
        regions[name] = Region(end, sizes, ELEMENT_BYTES[application.precision])
        end = -(-regions[name].end // page) * page  # tensors begin with a page, as allocators place them
    pc, programs_by_group = 0, list[list[Program]]()
    for group in application.groups:
        programs_by_group.append([])
        for kernel in group.kernels:
            programs_by_group[-1].append(program(kernel, regions, pc))
            pc += len(list(touched_tensors(kernel)))  # numbers of instructions go on, so that each has its own counter
    return programs_by_group


def simulate(design: MemoryDesign, *, per_set: bool = False) -> SimulatedApplication:
    """Run a design that breaks no rule. Raises OverflowError where a kernel runs longer than the clock can tell."""
    group_programs, gpu, run = programs(design), design.system.gpu, design.run
    # no more than a CU has waves, and no more than any kernel uses
    places = min(gpu.waves, max(kernel.held for group in group_programs for kernel in group))
    machine, costs = (
        Simulation(design.system, design.policy, held=places, per_set=per_set),
        list[tuple[SimulatedCost, int]](),
    )
    rate = dict(gpu.flop_per_s)[design.application.precision]
    for group, kernels in zip(build_kernels(design).groups, group_programs, strict=True):
        turns = min(group.repeat, run.repeats)
        for turn in range(turns):
            # the last repetition stands for those that are not simulated
            alike = 1 + (group.repeat - turns if turn == turns - 1 else 0)
            costs += [(machine.launch(kernel, rate, run.requests, run.most), alike) for kernel in kernels]
    return SimulatedApplication(machine, tuple(costs))


LAWS: Sequence[Law] = (
    Law(
        "dram_read_bytes + dram_write_bytes = dram_bytes",
        lambda c: c["dram_read_bytes"] + c["dram_write_bytes"],
        lambda c: c["dram_bytes"],
        equal=True,
    ),
)
"""What the metrics of every simulation obey."""

METRICS: Mapping[str, Metric] = {
    "time_s": Metric("s", "of all kernels, launches among them"),
    "dram_bytes": Metric("B", "that DRAM reads and writes"),
    "dram_read_bytes": Metric("B", "that DRAM reads"),
    "dram_write_bytes": Metric("B", "that DRAM writes"),
    "row_hit_rate": Metric("fraction", "DRAM accesses that need no activation", "maximize", high=1.0),
    "bandwidth_share": Metric("fraction", "dram_bytes over time at the peak rate", "maximize", high=1.0),
    "l1_hit_rate": Metric("fraction", "requests that L1 serves, lines under way among them", "maximize", high=1.0),
    "l2_hit_rate": Metric(
        "fraction", "requests at L2 that it serves, lines under way among them", "maximize", high=1.0
    ),
    "requests": Metric("", "lines that CUs ask for"),
    "stalls": Metric("", "requests that wait for a set full of lines under way"),
    "stall_share": Metric("fraction", "of the time of a CU, or of a slice of L2, in which such a request blocks it"),
    "bypassed": Metric("", "requests that pass such a set by"),
    "predicted": Metric("", "requests that pass L2 by, as their instruction's lines are not used again"),
    "useless": Metric("", "lines evicted from L2 that nobody used again"),
    "rinsed": Metric("", "dirty lines written back for their row"),
    "camping": Metric(
        "x", "the busiest channel's lines over the mean's, in the mean of stretches of time by their lines", low=1.0
    ),
    "phases": Metric("", "stretches of what was simulated that differ in requests, arithmetic or bandwidth", low=1.0),
    "compute_share": Metric("fraction", "of the time in which CUs compute", "maximize"),
    "launch_share": Metric("fraction", "of the time in launches", high=1.0),
    "kernels": Metric("", "launched"),
    "simulated": Metric("fraction", "of the workgroups of all launches", "maximize", high=1.0),
}


def measure(design: MemoryDesign, simulated: SimulatedApplication) -> dict[str, float]:
    """Every metric of a design that was simulated."""
    system, total, stalled = design.system, simulated.total("totals"), simulated.total("stalled")
    launches, kernels_s = sum(times for _, times in simulated.costs), simulated.sum_cost("seconds")
    # the clock stands still between kernels, so launches are added here
    launch_s, cus = launches * system.gpu.launch_s, system.gpu.num_cus
    # a merged request needs no further access
    at_l1, at_l2 = total[e.L1_HITS] + total[e.L1_MERGED], total[e.L2_HITS] + total[e.L2_MERGED]
    moved = (total[e.READS] + total[e.WRITES]) * system.gpu.line_bytes
    activity = simulated.machine.activity()
    # mean over CUs, and over slices
    blocked = stalled[e.L1_STALLED] / cus + stalled[e.L2_STALLED] / system.gpu.dram.channels
    return {
        "time_s": kernels_s + launch_s,
        "dram_bytes": moved,
        "dram_read_bytes": total[e.READS] * system.gpu.line_bytes,
        "dram_write_bytes": total[e.WRITES] * system.gpu.line_bytes,
        # no access to DRAM at all
        "row_hit_rate": total[e.ROW_HITS] / max(total[e.ROW_HITS] + total[e.ACTIVATIONS], 1.0),
        "bandwidth_share": moved / (kernels_s * system.gpu.dram.bytes_per_s),
        "l1_hit_rate": at_l1 / total[e.REQUESTS],
        "l2_hit_rate": at_l2 / max(total[e.REQUESTS] - at_l1, 1.0),
        "requests": total[e.REQUESTS],
        "stalls": total[e.L1_STALLS] + total[e.L2_STALLS],
        "stall_share": blocked / kernels_s,
        "bypassed": total[e.L1_BYPASSED] + total[e.L2_BYPASSED],
        "predicted": total[e.PREDICTED],
        "useless": total[e.USELESS],
        "rinsed": total[e.RINSED],
        "camping": partition_camping(activity.channels),
        "phases": float(len(phases(activity, system))),
        "compute_share": simulated.sum_cost("busy_s") / (cus * kernels_s),
        "launch_share": launch_s / (kernels_s + launch_s),
        "kernels": float(launches),
        # mean over launches, each weighed alike
        "simulated": simulated.sum_cost("share") / launches,
    }


def partition_camping(lines: NDArray[np.int64]) -> float:
    """The busiest channel's lines over the mean channel's [bins, channels], bins weighed by their lines.

    Neighbouring bins are joined until they hold `_ENOUGH` lines a channel, or chance would count as camping.
    """
    total, channels = float(lines.sum()), lines.shape[1]
    if not total:
        return 1.0  # nothing moved: even by definition
    before = np.concatenate([[0], np.cumsum(lines.sum(axis=1))[:-1]])  # lines moved before each bin
    num_parts = max(1, int(total // (_ENOUGH * channels)))
    part = np.minimum(before * num_parts // total, num_parts - 1)  # equal shares of the lines, in the order of time
    # bins where the part changes begin one; parts without a bin vanish
    joined = np.add.reduceat(lines, np.flatnonzero(np.diff(part, prepend=-1)), axis=0)
    return float(joined.max(axis=1).sum() * channels / total)
