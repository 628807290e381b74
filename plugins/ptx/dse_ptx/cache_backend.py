"""Applications of the memory backend by kernels in PTX: their addresses, waits and arithmetic in place of patterns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from dse.backend import Tree
from dse.errors import ConfigError, Problem, Problems, validate_as
from dse.values import Frozen
from dse.values.units import Bytes, Integer
from dse_memory.backend import MemoryBackend
from dse_memory.design import MemoryDesign
from dse_memory.kernels import Application
from dse_memory.measures import SimulatedApplication
from dse_memory.simulation import ListedKernel, SimulatedCost, Simulation
from dse_ptx.applications import APPLICATIONS, Launch, LaunchList
from dse_ptx.lists import BlockLists, block_lists


class KernelSource(Frozen):
    """Where requests come from, and what places a CU has for blocks of kernels in PTX.

    addresses: `patterns` of the application's kernels, or `ptx`, kernels that are executed. lanes: of a wave.
    registers: of 32 bits, and shared_bytes, of a CU.
    """

    addresses: Literal["patterns", "ptx"]
    lanes: Annotated[Integer, Field(ge=1, le=1024)]
    registers: Annotated[Integer, Field(ge=1024, le=2**24)]
    shared_bytes: Bytes


class PtxMemoryDesign(MemoryDesign):
    """A design of the memory backend, and the source of its requests."""

    kernels: KernelSource


class PtxMemoryBackend(MemoryBackend):
    """The memory backend, whose applications run as patterns or as kernels in PTX."""

    version = "1"

    def sections(self, tree: Tree) -> None:
        """Check that `kernels` is there, and all others as the memory backend does."""
        if not isinstance(tree.get("kernels"), Mapping):
            rule, way = "is no section of keys", "kernels.addresses=ptx"
            raise ConfigError([Problem("kernels", rule, tree.get("kernels"), way)])
        # the memory backend knows no `kernels`, and would refuse the section
        super().sections({name: part for name, part in tree.items() if name != "kernels"})

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Scenarios of the memory backend, each with `kernels`."""
        return {name: {**part, "kernels": tree["kernels"]} for name, part in super().scenarios(tree).items()}

    def design(self, tree: Tree) -> PtxMemoryDesign:
        """A validated design. Raises ConfigError with every problem."""
        return validate_as(PtxMemoryDesign, tree, path="")

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Addresses may be searched, and what the memory backend lets be."""
        return {} if path == "kernels.addresses" else super().condition(path, tree)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Those of the memory backend, and an application that has no kernels in PTX."""
        assert isinstance(design, PtxMemoryDesign)
        check = Problems()
        if design.kernels.addresses == "ptx" and not _has_kernels(design):
            way = f"kernels.addresses=patterns, or one of {', '.join(APPLICATIONS)} as shipped"
            check.add("application.name", "has no kernels in PTX", value=design.application.name, way_out=way)
        return [*check.found, *super().problems(design)]

    def simulate(self, design: MemoryDesign) -> SimulatedApplication:
        """Run a design by its patterns, or by the lists of its kernels in PTX."""
        assert isinstance(design, PtxMemoryDesign)
        if design.kernels.addresses == "patterns":
            return super().simulate(design)
        assert isinstance(design.application, Application)
        gpu, run = design.system.gpu, design.run
        shapes = tuple(design.application.tensors.items())
        groups = _listed_launches(design.application.name, shapes, run.requests, int(gpu.line_bytes))
        resident = [[_resident_blocks(design, launch) for launch in launches] for launches in groups]
        # seconds of an operation of one CU at the peak rate
        work = gpu.num_cus / dict(gpu.flop_per_s)[design.application.precision]

        # a fresh machine has empty caches: the steps beyond are measured apart from the run itself
        def machine() -> Simulation:
            return Simulation(design.system, design.policy, held=max(map(max, resident)))

        first, costs = machine(), list[tuple[SimulatedCost, int]]()
        repeats = [group.repeat for group in design.application.groups]
        for places, launches, repeat in zip(resident, groups, repeats, strict=True):
            # repetitions beyond those that are simulated cost what the last one does
            turns = min(repeat, run.repeats)
            pairs = list(zip(launches, places, strict=True))
            more = [launch.steps_beyond(machine, most, work) for launch, most in pairs]
            for turn in range(turns):
                # the last repetition stands for those that are not simulated
                alike = 1 + (repeat - turns if turn == turns - 1 else 0)
                ran = [launch.run(first, most, work) for launch, most in pairs]
                costs += [(_sum(cost, extra), alike) for cost, extra in zip(ran, more, strict=True)]
        return SimulatedApplication(first, tuple(costs))


def _has_kernels(design: PtxMemoryDesign) -> bool:
    application = design.application
    return isinstance(application, Application) and application.name in APPLICATIONS


@dataclass(frozen=True)
class ListedLaunch:
    """A launch as lists of its first blocks, over few steps of its loop and, where it is cut, over twice as many.

    steps: of the whole loop, in the few of the first. registers and shared_bytes: of a block.
    """

    name: str
    lists: tuple[BlockLists, ...]
    steps: float
    blocks: int
    threads: int
    registers: int
    shared_bytes: int

    def run(self, machine: Simulation, held: int, work: float) -> SimulatedCost:
        """Run it after the last kernel, over as many steps as there are. work: time of an operation [s]."""
        return self._execute(machine, self.lists[-1], held, work)

    def steps_beyond(self, machine: Callable[[], Simulation], held: int, work: float) -> SimulatedCost | None:
        """Cost of the steps that are not run, each as those that the longer run has more; None where all are run.

        Both run on a fresh machine: what one leaves in L2 does not serve the other.
        """
        if len(self.lists) == 1:
            return None
        short, long = (self._execute(machine(), lists, held, work) for lists in self.lists)
        # `short` runs are one unit of steps, `long` ones two: each further unit costs the difference
        scaled = {
            name: (self.steps - 2) * np.maximum(getattr(long, name) - getattr(short, name), 0.0)
            for name in ("seconds", "busy_s", "totals", "stalled")
        }
        # of all steps two units are simulated
        return replace(long, share=2 / self.steps, **scaled)

    def _execute(self, machine: Simulation, lists: BlockLists, held: int, work: float) -> SimulatedCost:
        # a predictor of L2 knows an instruction by its number, which no other launch has
        machine.introduce(lists.stores.items())
        return machine.execute(ListedKernel(self.name, lists.rows, lists.begins, self.blocks, held), work)


def _sum(cost: SimulatedCost, more: SimulatedCost | None) -> SimulatedCost:
    """A cost with that of further steps, whose share tells how much of all of them is simulated."""
    if more is None:
        return cost
    names = ("seconds", "busy_s", "totals", "stalled")
    total = {name: getattr(cost, name) + getattr(more, name) for name in names}
    return replace(cost, share=cost.share * more.share, **total)


@lru_cache(maxsize=2)  # of an application all policies are simulated, one after another
def _listed_launches(
    name: str, shapes: tuple[tuple[str, tuple[int, ...]], ...], requests: int, line_bytes: int
) -> tuple[tuple[ListedLaunch, ...], ...]:
    """Launches of an application with their lists, by group."""
    launches, number, groups = APPLICATIONS[name](dict(shapes), requests), 0, []
    for group in launches.groups:
        listed = []
        for launch in group:
            listed.append(_list_launch(launches, launch, line_bytes, number))
            number += len(listed[-1].lists[0].stores)
        groups.append(tuple(listed))
    return tuple(groups)


def _list_launch(application: LaunchList, launch: Launch, line_bytes: int, number: int) -> ListedLaunch:
    steps = (launch.short, 2 * launch.short) if launch.whole else (launch.short,)
    lists = []
    for count in steps:
        trace = application.trace(launch, count)
        lists.append(block_lists(trace, line_bytes, number))
    times = launch.whole / launch.short if launch.whole else 1.0
    registers = trace.registers_per_thread * launch.threads
    size = launch.blocks, launch.threads, registers, trace.shared_bytes_per_block
    return ListedLaunch(launch.kernel, tuple(lists), times, *size)


def _resident_blocks(design: PtxMemoryDesign, launch: ListedLaunch) -> int:
    """Blocks that a CU holds at once."""
    source = design.kernels
    waves = math.ceil(launch.threads / source.lanes)
    shared = int(source.shared_bytes) // max(launch.shared_bytes, 1)
    # the scarcest of waves, registers and shared memory; a block larger than a CU is run alone
    return max(1, min(design.system.gpu.waves // waves, source.registers // max(launch.registers, 1), shared))
