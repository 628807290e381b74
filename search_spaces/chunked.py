"""FiCCO's finer-grain overlap: each shard is split again and every step moves one piece of every peer's shard.

A product of knobs (FiCCO, arXiv:2512.10236; the schedule names are this project's vocabulary):

chunk_dim          m: chunks are rows (M split); k: chunks are K slices, and each GEMM accumulates into C
local_shard_first  false: equal steps, nothing runs before the first chunks land (the paper's uniform); true: the local
                   shard runs first (heterogeneous)
compute            fused: the chunks of all peers of a step form one GEMM; unfused: one GEMM per arriving chunk

A reduction of the output runs in reverse: a chunk of each peer's rows (k: of their columns) is computed, then sent; the
local shard, which is not sent, is computed last instead of first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from dse.space.blocks import Rule
from dse.values import knob
from dse.values.units import Integer
from search_spaces.comm_knobs import CommEngineKnobs
from simulators.hardware.machine import System
from simulators.hardware.network import Route
from simulators.overlap.node import least_shard, piece
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Workload

if TYPE_CHECKING:
    from search_spaces.pipeline import Pipeline


class ChunkedSchedule(CommEngineKnobs):
    """Knobs of the family. num_chunks: chunks per shard; one transfer is 1 / (num_gpus * num_chunks) of the tensor."""

    family: Literal["chunked"]
    chunk_dim: Annotated[Literal["m", "k"], knob(structural=True, neutral="m")]
    local_shard_first: Annotated[bool, knob(structural=True)]
    compute: Annotated[Literal["fused", "unfused"], knob(structural=True)]
    num_chunks: Annotated[Integer, knob(structural=True, ge=1, le=1024)]

    def neutral(self) -> Mapping[str, Any]:
        """Neutral values; `chunk_dim` changes nothing for a single chunk."""
        shaped = {"chunk_dim"} if self.num_chunks > 1 else set()
        return {name: value for name, value in super().neutral().items() if name not in shaped}

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Require at least one row, or one column of the tensor, in each piece."""
        rules = list(super().rules(system, workload))
        if not any(rule.broken is True for rule in rules):
            moved = workload.overlap().collective
            by_rows = self.chunk_dim == "m"
            most = np.asarray(least_shard(system, moved.rows) if by_rows else moved.cols)
            rule = f"splits {{0}} {'rows of a shard' if by_rows else 'columns'} into more pieces"
            broken = (most > 0) & (self.num_chunks > most)
            way = "use at most {0}"
            rules.append(Rule("schedule.num_chunks", broken, rule, self.num_chunks, (most[()],), way))
        return rules

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to `num_chunks` steps over all links, each before the GEMM chunks that use its data, or after the GEMM
        chunks that produce it.
        """
        from search_spaces.pipeline import Pipeline  # with costs, which no check of a value needs

        line = Pipeline(system, workload, knobs=self, comm_cus=self.comm_cus)
        if line.order == "after":
            self._lower_reduction(line)
        else:
            self._lower_gather(line)
        return line.build()

    def _lower_gather(self, line: Pipeline) -> None:
        if self.local_shard_first:
            line.compute.gemm("gemm local", (line.shard_rows[0], line.op.local_n, line.op.local_k))
        for index in range(self.num_chunks):
            arrived = line.comm.step(f"piece {index}", self._amounts(line, index))
            beside, accumulate = index < self.num_chunks - 1, self.chunk_dim == "k" and index > 0
            local, label = [] if self.local_shard_first else [0], f"gemm {index}"
            if self.compute == "fused":
                size = self._size(line, [*local, *(route.peer for route in line.routes)], index)
                line.compute.gemm(label, size, after=arrived, overlapped=beside, accumulate=accumulate)
                continue
            for peer in local:
                size = self._size(line, [peer], index)
                line.compute.gemm(f"{label} local", size, after=arrived, overlapped=beside, accumulate=accumulate)
            for route, transfer in zip(line.routes, arrived, strict=True):
                size, overlapped = self._size(line, [route.peer], index), beside or self._still_copies(line, route)
                line.compute.gemm(
                    f"{label}.{route.peer}", size, after=[transfer], overlapped=overlapped, accumulate=accumulate
                )

    def _still_copies(self, line: Pipeline, route: Route) -> bool:
        """Whether engines copy on when data of a route has arrived; data that kernels move counts when they end."""
        return self.comm_engine == "dma" and route.step < max(other.step for other in line.routes)

    def _lower_reduction(self, line: Pipeline) -> None:
        """Lower a reduction: chunks to be sent are computed first, the local shard with each piece or at the end."""
        waiting: list[list[int]] = []
        for index in range(self.num_chunks):
            local = [] if self.local_shard_first else [0]
            peers = [route.peer for route in line.routes]
            parts = {f".{peer}": [peer] for peer in [*peers, *local]}
            gemms = [
                line.compute.gemm(f"gemm {index}{name}", self._size(line, part, index), overlapped=index > 0)
                for name, part in ({"": [*peers, *local]} if self.compute == "fused" else parts).items()
            ]
            line.add(waiting, keep=1)
            waiting.append(line.comm.step(f"piece {index}", self._amounts(line, index), after=gemms[: len(peers)]))
        if self.local_shard_first:
            line.compute.gemm("gemm local", (line.shard_rows[0], line.op.local_n, line.op.local_k))
        line.add(waiting, keep=0)

    def _amounts(self, line: Pipeline, index: int) -> list[tuple[Route, Any]]:
        """Bytes of piece `index` of each peer's shard."""
        cols = line.collective.cols
        if self.chunk_dim == "k":
            return [
                (route, line.payload(line.shard_rows[route.peer], piece(cols, self.num_chunks, index)))
                for route in line.routes
            ]
        rows = [piece(line.shard_rows[route.peer], self.num_chunks, index) for route in line.routes]
        return [(route, line.payload(chunk_rows, cols)) for route, chunk_rows in zip(line.routes, rows, strict=True)]

    def _size(self, line: Pipeline, peers: list[int], index: int) -> tuple[Any, Any, Any]:
        """Size of the GEMM on piece `index` of the peers' shards: rows of all columns; or, k, all rows of a slice of
        the depth (of the columns for a reduction).
        """
        rows, cols, depth = [line.shard_rows[peer] for peer in peers], line.op.local_n, line.op.local_k
        if self.chunk_dim == "m":
            rows = [piece(shard_rows, self.num_chunks, index) for shard_rows in rows]
        elif line.order == "after":
            cols = piece(cols, self.num_chunks, index)
        else:
            depth = piece(depth, self.num_chunks, index)
        return sum(rows), cols, depth


SCHEDULE = ChunkedSchedule
