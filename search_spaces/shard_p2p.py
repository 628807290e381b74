"""Shard-level point-to-point overlap: whole shards, one peer at a time, while earlier shards are computed on.

The granularity at which tensors are already sharded; on a full mesh each step uses one of the direct links and the
others idle (FiCCO, arXiv:2512.10236, baseline).
"""

from __future__ import annotations

from typing import Literal

from search_spaces.pipeline import MoverKnobs, Pipeline
from simulators.graph import TaskGraph
from simulators.system import System
from simulators.workload import Workload


class ShardP2P(MoverKnobs):
    """Local shard first, then peer after peer."""

    family: Literal["shard_p2p"]

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """num_gpus - 1 steps of one transfer and one GEMM on its rows each."""
        line = Pipeline(system, workload, knobs=self, comm_cus=self.comm_cus)
        line.gemm("gemm local", (line.shard_rows(0), line.op.k))
        for index, route in enumerate(line.routes, 1):
            rows = line.shard_rows(route.peer)
            arrived = line.step(f"shard {index}", [(route, line.payload(rows, line.collective.cols))])
            last = index == len(line.routes)
            line.gemm(f"gemm {index}", (rows, line.op.k), after=arrived, overlapped=not last)
        return line.graph.build()


SCHEDULE = ShardP2P
