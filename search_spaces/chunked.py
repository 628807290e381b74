"""FiCCO's finer-grain overlap: each shard is split again and every step moves one piece of every peer's shard.

A product of knobs (FiCCO, arXiv:2512.10236; the schedule names are this project's vocabulary):

shape   1d: pieces are rows (M split); 2d: pieces are K slices, and each GEMM accumulates into C
start   uniform: equal steps, nothing runs before the first pieces land; hetero: the local shard runs first
compute fused: the pieces of all peers of a step form one GEMM; unfused: one GEMM per arriving piece
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np

from dse.values import Integer, knob
from search_spaces.pipeline import MoverKnobs, Pipeline, piece
from simulators.design import Rule
from simulators.graph import TaskGraph
from simulators.node import least_shard
from simulators.system import System
from simulators.workload import Workload


class Chunked(MoverKnobs):
    """granularity: pieces per shard, so that one transfer is 1 / (num_gpus * granularity) of the tensor."""

    family: Literal["chunked"]
    shape: Annotated[Literal["1d", "2d"], knob(structural=True)]
    start: Annotated[Literal["uniform", "hetero"], knob(structural=True)]
    compute: Annotated[Literal["fused", "unfused"], knob(structural=True)]
    granularity: Annotated[Integer, knob(structural=True, ge=1, le=1024)]

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """A piece needs at least one row, or one column of A."""
        found = list(super().rules(system, workload))
        if not any(rule.broken is True for rule in found):
            moved, _ = workload.collective_then_gemm()
            by_rows = self.shape == "1d"
            most = np.asarray(least_shard(system, moved.rows) if by_rows else moved.cols)
            rule = f"splits {{0}} {'rows of a shard' if by_rows else 'columns of A'} into more pieces"
            broken = (most > 0) & (self.granularity > most)
            way = "use at most {0}"
            found.append(Rule("schedule.granularity", broken, rule, self.granularity, (most[()],), way))
        return found

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """`granularity` steps over all links, each followed by the GEMM chunks of what arrived."""
        line = Pipeline(system, workload, knobs=self, comm_cus=self.comm_cus)
        if self.start == "hetero":
            line.gemm("gemm local", (line.shard_rows(0), line.op.k))
        for index in range(self.granularity):
            sizes = [(route, self._size(line, route.peer, index)) for route in line.routes]
            amounts = [(route, line.payload(rows, depth)) for route, (rows, depth) in sizes]
            arrived = line.step(f"piece {index}", amounts)
            self._compute(line, index, [size for _, size in sizes], arrived)
        return line.graph.build()

    def _size(self, line: Pipeline, gpu: int, index: int) -> tuple[Any, Any]:
        """(rows, depth) of piece `index` of a GPU's shard."""
        rows = line.shard_rows(gpu)
        if self.shape == "1d":
            return piece(rows, self.granularity, index), np.asarray(line.op.k)
        return rows, piece(line.op.k, self.granularity, index)

    def _compute(self, line: Pipeline, index: int, sizes: list[tuple[Any, Any]], arrived: list[int]) -> None:
        how: dict[str, Any] = {
            "overlapped": index < self.granularity - 1,
            "accumulate": self.shape == "2d" and index > 0,
        }
        own = [self._size(line, 0, index)] if self.start == "uniform" else []
        if self.compute == "fused":
            rows = sum(rows for rows, _ in [*own, *sizes])
            line.gemm(f"gemm {index}", (rows, sizes[0][1]), after=arrived, **how)
            return
        for rows, depth in own:
            line.gemm(f"gemm {index} local", (rows, depth), after=arrived, **how)
        for number, ((rows, depth), transfer) in enumerate(zip(sizes, arrived, strict=True), 1):
            line.gemm(f"gemm {index}.{number}", (rows, depth), after=[transfer], **how)


SCHEDULE = Chunked
