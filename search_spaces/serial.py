"""Serial: the whole collective, then the whole GEMM. Nothing competes, so a CU kernel may use every CU."""

from __future__ import annotations

from typing import Literal

from search_spaces.pipeline import MoverKnobs, Pipeline
from simulators.graph import TaskGraph
from simulators.system import System
from simulators.workload import Workload


class Serial(MoverKnobs):
    """The baseline: all communication exposed, no decomposition."""

    family: Literal["serial"]
    comm_cus: None = None

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """One transfer per peer over all links at once, then one GEMM on all CUs."""
        line = Pipeline(system, workload, knobs=self, comm_cus=system.gpu.num_cus)
        cols = line.collective.cols
        amounts = [(route, line.payload(line.shard_rows(route.peer), cols)) for route in line.routes]
        arrived = line.step("gather", amounts)
        line.gemm("gemm", (line.op.m, line.op.k), after=arrived, overlapped=False)
        return line.graph.build()


SCHEDULE = Serial
