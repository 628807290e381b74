"""Knobs of schedules whose transfers are moved by a choice of engines, and the rules that several schedules share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from dse.errors import ConfigError
from dse.space.blocks import Rule
from dse.values import knob
from dse.values.units import Integer, Number, Seconds
from simulators.costs.transfer import CommEngine, Mover, library_cus
from simulators.hardware.machine import System
from simulators.hardware.parts import ShortTime
from simulators.overlap.design import Bound, ScheduleKnobs
from simulators.overlap.node import least_shard
from simulators.workloads.operators import Overlap, Workload

Priority = Literal["equal", "communication", "compute"]
_ORDERS = {
    "before": "a collective and then the GEMM that consumes it",
    "after": "a GEMM and then the collective that reduces it",
    "beside": "a collective during a GEMM that has nothing to do with it",
}


class CommEngineKnobs(ScheduleKnobs):
    """Knobs of the engine that moves the data. sums: collectives after a GEMM that the schedule overlaps.

    comm_engine: `dma` engines, or kernels on `comm_cus` reserved `cu`s.
    priority: owner of the memory requests that go first; it matters if the HBM can be over-subscribed.
    near_memory: units in memory (`gpu.pim`) add incoming data to local data: kernels do not read the local operand, and
    no kernel adds after DMA engines. No effect without a reduction.
    host_s: time of the host to submit a kernel, a copy or a signal; it works ahead, so it bounds the makespan from
    below. 0: everything was submitted before (a graph). collective_calls: submissions that one call of a library's
    collective counts as. sync_s: time of a barrier among the GPUs, before the first transfer of a tensor that is
    gathered, and before each transfer of what a GEMM has made, with two submissions each.
    """

    orders: ClassVar[tuple[str, ...]] = ("before", "after")
    sums: ClassVar[tuple[str, ...]] = ("reduce_scatter",)
    ranks: ClassVar[tuple[str, ...]] = ("priority",)
    comm_engine: Annotated[CommEngine, knob(structural=True)]
    comm_cus: Annotated[Integer | None, knob(when={"comm_engine": "cu"}, ge=1, le=4096)]
    priority: Annotated[Priority, knob(structural=True, neutral="equal")] = "equal"
    near_memory: Annotated[bool, knob(structural=True)] = False
    host_s: ShortTime = 0.0
    collective_calls: Annotated[Number, Field(gt=0, le=100)] = 1.0
    sync_s: Annotated[Seconds, Field(le=1)] = 0.0

    @property
    def mover(self) -> Mover:
        """Engine that moves data."""
        return self.comm_engine

    @property
    def mover_bytes_per_s(self) -> ArrayLike | None:
        """Rate of a GPU's links [bytes/s] that the mover reaches; None for that of the machine."""
        return None

    @property
    def signal(self) -> ArrayLike:
        """Time [s] of the signal that follows each copy by a DMA engine on its stream."""
        return 0.0

    @property
    def kernel(self) -> ArrayLike | None:
        """Rate of one kernel for all GEMM chunks over the library's; None for a kernel of the library for each."""
        return None

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of C that a workgroup of one kernel for all GEMM chunks computes; None for the best."""
        return None

    @property
    def lost(self) -> ArrayLike:
        """Rows whose time a GEMM chunk loses."""
        return 0.0

    def bound(self, system: System, workload: Workload) -> Bound | None:
        """The bound of all schedules by pieces; None where one kernel computes all pieces."""
        from search_spaces.chunk_costs import piece_bound  # with costs, which no check of a value needs

        return None if self.kernel is not None else piece_bound(system, workload)

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Require an overlap with rows for every GPU, and CUs that communication uses and leaves for compute."""
        if beyond := list(node_rules(system)):
            return beyond
        try:
            overlap = workload.overlap()
        except ConfigError as error:
            return [Rule.of(problem) for problem in error.problems]
        rules = [*_order_rules(self, overlap), *_shape_rules(system, overlap)]
        used = self.near_memory and overlap.collective.reduces
        rules += memory_rules(system, "schedule.near_memory", used=used)
        if self.comm_cus is not None:
            rules += _cu_rules(system, self.comm_cus, library_cus(system, overlap.collective.pattern))
        return rules


def _cu_rules(system: System, reserved: ArrayLike, library: ArrayLike) -> Iterator[Rule]:
    """Require CUs for compute, and no more CUs for communication than its kernel has workgroups for."""
    path, cus = "schedule.comm_cus", system.gpu.num_cus
    none_left = np.asarray(reserved) >= np.asarray(cus)
    rule = "leaves no CU for compute (system.gpu.num_cus = {0})"
    yield Rule(path, none_left, rule, reserved, (cus,), "reserve fewer")
    idle = (
        "is more than the workgroups of the collective's kernel ({0}, by system.gpu.cu_copy.num_cus): some would idle"
    )
    broken = (np.asarray(reserved) > library) & ~none_left
    yield Rule(path, broken, idle, reserved, (np.asarray(library)[()],), "use at most {0}")


def node_rules(system: System) -> Iterator[Rule]:
    """Require a single node of several GPUs."""
    if system.node.num_gpus < 2:
        yield Rule("system.node.num_gpus", True, "is a GPU that has no peers", 1, way_out="use two at least")
    if system.fabric is not None and system.fabric.num_nodes > 1:
        rule, way = "is more than one node, and this schedule knows only one", "use a schedule of the family fused"
        yield Rule("system.fabric.num_nodes", True, rule, system.fabric.num_nodes, way_out=way)


def memory_rules(system: System, knob: str, *, used: bool) -> Iterator[Rule]:
    """Require units in memory if a knob uses them."""
    if used and system.gpu.pim is None:
        yield Rule("system.gpu.pim", True, f"is needed by {knob}", None, way_out="choose one: pim=hbm3_strawman")


def _order_rules(knobs: CommEngineKnobs, overlap: Overlap) -> Iterator[Rule]:
    moved, order = overlap.collective, overlap.order
    if order not in knobs.orders:
        supported = " or ".join(_ORDERS[name] for name in knobs.orders)
        rule = f"is {_ORDERS[order]}; this schedule overlaps {supported}"
        yield Rule("workload.operators", True, rule, overlap.collective.pattern)
    elif (order == "before" and moved.reduces) or (order == "after" and moved.pattern not in knobs.sums):
        rule = f"cannot come {order} the GEMM it belongs to in this schedule"
        way = f"all_gather and all_to_all come before, {' and '.join(knobs.sums)} after, the others only concurrently"
        yield Rule("workload.operators.gather.pattern", True, rule, moved.pattern, way_out=way)
    elif knobs.comm_engine == "dma" and moved.reduces and order == "beside" and not knobs.near_memory:
        way = "schedule.comm_engine=cu, or schedule.near_memory=true"
        yield Rule("schedule.comm_engine", True, f"cannot add, as {moved.pattern} must", "dma", way_out=way)


def _shape_rules(system: System, overlap: Overlap) -> Iterator[Rule]:
    gpus, rows, shards = system.node.num_gpus, overlap.collective.rows, overlap.gemm.shards
    bare = np.less(least_shard(system, rows), 1)
    no_rows = "gives some of the GPUs no row (system.node.num_gpus = {0})"
    excess = f"splits {overlap.gemm.split} over more GPUs than there are (system.node.num_gpus = {{0}})"
    path = "workload.operators"
    yield Rule(f"{path}.gather.rows", bare, no_rows, rows, (gpus,), "use more rows or fewer GPUs")
    yield Rule(f"{path}.gemm.shards", np.greater(shards, gpus), excess, shards, (gpus,), "leave it out for all of them")
