"""One kernel for a GEMM and the sum of its outputs, which the switch of the node computes (NVLink SHARP, multimem).

A workgroup that has stored its tile raises a flag; once all GPUs have raised it, the GPU whose share the tile is orders
the switch to add the GPUs' parts (`multimem.ld_reduce`), and, in an all-reduce, to store the sum at each of them
(`multimem.st`). So the sum of a wave of tiles runs beside the next waves. With W waves of t seconds each (tiles over
CUs, rounded up) and A(x) = B x w / r the time of a share x of the tensor of B bytes at the switch
(`simulators.costs.transfer.in_switch_seconds`), w = 1 + 1 / n of an all-reduce and 1 of a reduce-scatter, whose sums
stay where they were ordered:

    T = max(W t, t + A(1 - x)) + A(x) + l + o       x: share of the tiles in the last wave

l is the latency of the switch's collective, o is `overhead_s`: what the kernel takes beyond them, for its grid, its
flags, and its workspace. Derived, but o, which is measured (conf/implementation).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from dse.space.blocks import Rule
from dse.values.units import Number, Seconds
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.pipeline import Pipeline
from simulators.costs.transfer import Mover, switched
from simulators.hardware.machine import System
from simulators.hardware.network import Route
from simulators.hardware.parts import Bandwidth
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Collective, Workload

_NAMES = {"all_reduce": "an all-reduce", "reduce_scatter": "a reduce-scatter", "all_gather": "an all-gather"}


class InSwitchSchedule(CommEngineKnobs):
    """Knobs of the family.

    kernel_rate: rate of the kernel over the library's best. switch_bytes_per_s: rate of a GPU's links that its orders
    reach; None for that of the node's switch. overhead_s: time of the kernel beyond its GEMM and the collective.
    """

    orders: ClassVar[tuple[str, ...]] = ("after",)
    sums: ClassVar[tuple[str, ...]] = ("all_reduce", "reduce_scatter")
    family: Literal["in_switch"]
    comm_engine: Literal["cu"] = "cu"
    comm_cus: None = None
    kernel_rate: Annotated[Number, Field(gt=0, le=16)] = 1.0
    switch_bytes_per_s: Bandwidth | None = None
    overhead_s: Annotated[Seconds, Field(le=1)] = 0.0

    @property
    def mover(self) -> Mover:
        """Engine that moves data."""
        return "switch"

    @property
    def mover_bytes_per_s(self) -> ArrayLike | None:
        """Rate of a GPU's links [bytes/s] that the kernel's orders reach."""
        return self.switch_bytes_per_s

    @property
    def kernel(self) -> ArrayLike | None:
        """Rate of the kernel over the library's."""
        return self.kernel_rate

    def rules(self, system: System, workload: Workload) -> list[Rule]:
        """Require a switch that computes the collective, among GPUs that hold equal parts."""
        return [*super().rules(system, workload), *switch_rules(system, workload)]

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to the first wave, the waves up to the last, and the last, and what the switch adds beside them."""
        line = Pipeline(system, workload, knobs=self, comm_cus=None, masked=False)
        name = line.collective.pattern.replace("_", "-")
        waves, _ = line.compute.waves
        rounds = np.maximum(np.ceil(np.round(waves, 9)), 1.0)
        last = np.clip((waves - rounds + 1) / waves, 0.0, 1.0)
        rows = np.asarray(line.collective.rows, float)
        alone = np.minimum(1.0, rounds - 1)  # 0: a single wave is the last one
        first = line.compute.part("gemm, first wave", alone * rows / rounds, launched=True)
        line.compute.part("gemm", np.maximum(rounds - 2, 0.0) * rows / rounds)
        early = line.comm.step(name, switched_shares(line, 1 - last), after=[first])
        ended = line.compute.part("gemm, last wave", rows / rounds)
        late = line.comm.step(f"{name}, last wave", switched_shares(line, last), after=[ended, *early])
        latency_s = switched(system.node, line.collective.pattern).latency_s
        line.comm.wait("flags", np.asarray(latency_s) + self.overhead_s, late)
        return line.build()


def switch_rules(system: System, workload: Workload) -> Iterator[Rule]:
    """Require a switch that computes the collective of a workload."""
    patterns = {op.pattern for op in workload.operators.values() if isinstance(op, Collective)}
    for pattern in sorted(patterns):
        try:
            switched(system.node, pattern)
        except ValueError:
            what = _NAMES.get(pattern, pattern.replace("_", "-") + "s")
            rule = f"is no switch that computes {what}, which this schedule needs"
            yield Rule("system.node.in_switch", True, rule, system.node.name, way_out="use system=h100_8")


def switched_shares(line: Pipeline, share: ArrayLike) -> list[tuple[Route, ArrayLike]]:
    """Bytes over the port of a GPU for a share of the tensor, spread over the peers."""
    count, moved = len(line.routes) + 1, line.collective
    passes = 1 + 1 / count if moved.pattern == "all_reduce" else 1.0  # the reduced share goes out once more
    wire = np.asarray(moved.rows, float) * moved.cols * moved.element_bytes * np.asarray(share) * passes
    return [(route, wire / len(line.routes)) for route in line.routes]


SCHEDULE = InSwitchSchedule
