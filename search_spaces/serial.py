"""Serial: one after the other. Nothing competes, so a collective takes all CUs that the library gives its kernel."""

from __future__ import annotations

from typing import ClassVar, Literal

from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.pipeline import Pipeline
from simulators.costs.transfer import library_cus
from simulators.hardware.machine import System
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Workload


class Serial(CommEngineKnobs):
    """The baseline: all communication exposed, no decomposition."""

    orders: ClassVar[tuple[str, ...]] = ("before", "after", "beside")
    sums: ClassVar[tuple[str, ...]] = ("reduce_scatter", "all_reduce")
    family: Literal["serial"]
    comm_cus: None = None

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to one transfer per peer over all links at once, then one GEMM on all CUs; a reduction in reverse."""
        line = Pipeline(
            system, workload, knobs=self, comm_cus=library_cus(system, workload.overlap().collective.pattern)
        )
        size = (line.op.m, line.op.local_n, line.op.local_k)
        amounts = [(route, line.payload(line.shard_rows[route.peer], line.collective.cols)) for route in line.routes]
        if line.order == "after":
            produced = line.compute.gemm("gemm", size, overlapped=False)
            arrived = line.comm.step(line.collective.pattern, amounts, after=[produced])
            if line.comm.adds:
                line.compute.reduce("reduce", arrived)
        else:
            line.compute.gemm("gemm", size, after=line.comm.step(line.collective.pattern, amounts), overlapped=False)
        return line.build()


SCHEDULE = Serial
