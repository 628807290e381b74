"""An all-gather that the switch of the node copies (NVLink SHARP, multimem), and a GEMM of the library after it.

Each GPU stores its share of the tensor once (`multimem.st`), and the switch copies it to all of them; the GEMM begins
once all shares are there. With B bytes of the tensor, r the rate of a GPU's links by the switch and l its latency
(`simulators.costs.transfer.in_switch_seconds`), and T_g the time of the GEMM on all CUs:

    T = l + o + B / r + T_g

o is `overhead_s`, what the kernel of the all-gather takes beyond that. Derived.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from dse.space.blocks import Rule
from dse.values.units import Seconds
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.in_switch import switch_rules, switched_shares
from search_spaces.pipeline import Pipeline
from simulators.costs.transfer import Mover, switched
from simulators.hardware.machine import System
from simulators.hardware.parts import Bandwidth
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Workload


class GatheredInSwitch(CommEngineKnobs):
    """Knobs of the family.

    switch_bytes_per_s: rate of a GPU's links that its stores reach; None for that of the node's switch. overhead_s:
    time of the all-gather beyond the switch's.
    """

    orders: ClassVar[tuple[str, ...]] = ("before",)
    family: Literal["gathered_in_switch"]
    comm_engine: Literal["cu"] = "cu"
    comm_cus: None = None
    switch_bytes_per_s: Bandwidth | None = None
    overhead_s: Annotated[Seconds, Field(le=1)] = 0.0

    @property
    def mover(self) -> Mover:
        """Engine that moves data."""
        return "switch"

    @property
    def mover_bytes_per_s(self) -> ArrayLike | None:
        """Rate of a GPU's links [bytes/s] that the kernel's stores reach."""
        return self.switch_bytes_per_s

    def rules(self, system: System, workload: Workload) -> list[Rule]:
        """Require a switch that copies, among GPUs that hold equal parts."""
        return [*super().rules(system, workload), *switch_rules(system, workload)]

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to one transfer through the switch and one GEMM after it."""
        line = Pipeline(system, workload, knobs=self, comm_cus=None)
        arrived = line.comm.step("all-gather", switched_shares(line, 1.0))
        fixed_s = np.asarray(switched(system.node, line.collective.pattern).latency_s) + self.overhead_s
        ready = line.comm.wait("latency", fixed_s, arrived)
        size = (line.op.m, line.op.local_n, line.op.local_k)
        line.compute.gemm("gemm", size, after=[ready, *arrived], overlapped=False)
        return line.build()


SCHEDULE = GatheredInSwitch
