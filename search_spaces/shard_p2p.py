"""Shard-level point-to-point overlap: transfer whole shards, one peer at a time, while GEMMs use earlier ones.

The granularity at which tensors are already sharded; on a full mesh each step uses one of the direct links and the
others idle (FiCCO, arXiv:2512.10236, baseline).
"""

from __future__ import annotations

from typing import Annotated, Literal

from numpy.typing import ArrayLike
from pydantic import Field

from dse.values.units import Number
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.pipeline import Pipeline
from simulators.hardware.machine import System
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Workload


class ShardP2P(CommEngineKnobs):
    """Local shard first, then peer after peer; for a reduction peer after peer, then the local shard.

    lost_rows: rows in whose time the GEMM of a shard gets nothing done, beside that of another shard on a stream;
    of fewer rows it takes twice the time.
    """

    family: Literal["shard_p2p"]
    lost_rows: Annotated[Number, Field(ge=0, le=4096)] = 0.0

    @property
    def lost(self) -> ArrayLike:
        """Rows whose time a GEMM chunk loses."""
        return self.lost_rows

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to num_gpus - 1 steps, each with one transfer and one GEMM on its rows."""
        line = Pipeline(system, workload, knobs=self, comm_cus=self.comm_cus)
        reduces = line.order == "after"
        if not reduces:
            self._gemm(line, "gemm local", 0)
        waiting: list[list[int]] = []
        for index, route in enumerate(line.routes, 1):
            moved = [(route, line.payload(line.shard_rows[route.peer], line.collective.cols))]
            if reduces:
                produced = self._gemm(line, f"gemm {index}", route.peer, overlapped=index > 1)
                line.add(waiting, keep=1)
                waiting.append(line.comm.step(f"shard {index}", moved, after=[produced]))
            else:
                last = index == len(line.routes)
                arrived = line.comm.step(f"shard {index}", moved)
                self._gemm(line, f"gemm {index}", route.peer, after=arrived, overlapped=not last)
        if reduces:
            self._gemm(line, "gemm local", 0)
            line.add(waiting, keep=0)
        return line.build()

    def _gemm(
        self, line: Pipeline, label: str, peer: int, *, after: list[int] | None = None, overlapped: bool = True
    ) -> int:
        size = (line.shard_rows[peer], line.op.local_n, line.op.local_k)
        return line.compute.gemm(label, size, after=after or [], overlapped=overlapped)


SCHEDULE = ShardP2P
