"""Costs of the GEMM chunks of `search_spaces/pipeline.py`, alone and beside transfers, and their contention laws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from simulators.costs.gemm import (
    GemmCost,
    Gemms,
    GemmShape,
    WaveGemms,
    beside_cu_copies,
    gemm_cost,
    gemms_of,
    waves_as_fast,
)
from simulators.costs.transfer import Mover, beside_engines, late_start_s
from simulators.hardware.machine import System
from simulators.hardware.parts import Tile
from simulators.workloads.operators import Gemm

_Size = tuple[ArrayLike, ArrayLike, ArrayLike]


@dataclass(frozen=True)
class ContentionLaw:
    """Contention law of a task: factors on its rate, one for each thing that may run beside it.

    late_s: time [s] for which kernels beside a GEMM chunk wait for CUs, from its start.
    """

    factors: tuple[Any, ...]
    late_s: Any = 0.0

    def later(self, passed_s: Any) -> ContentionLaw:
        """Law of what is left of a GEMM chunk when it has run for a time."""
        return replace(self, late_s=np.maximum(self.late_s - passed_s, 0.0))


@dataclass(frozen=True)
class ChunkCost:
    """Cost of a GEMM chunk on the CUs that it has. alone_s: time [s] on all CUs."""

    cost: GemmCost
    cus: Any
    alone_s: Any
    law: ContentionLaw


@dataclass(frozen=True)
class ChunkCosts:
    """Costs of the chunks of a GEMM whose data `mover` moves.

    kernel_rate: of one kernel for all chunks, whose tiles signal, over the library's; None for a kernel of the library
    for each chunk. That one keeps the tile of the undivided GEMM and never splits k: its time is that of its waves, of
    tiles as fast as the library's.
    tile: rows and columns of C of this kernel's tile; None for the best. lost_rows: whose time a chunk loses.
    """

    system: System
    op: Gemm
    mover: Mover
    kernel_rate: ArrayLike | None
    tile: tuple[int, int] | None = None
    lost_rows: ArrayLike = 0.0

    @cached_property
    def gpu(self) -> Gemms:
        """The GPU as the model of GEMMs reads it.

        Beside DMA engines no other kernel is dispatched, so that the GEMM's workgroups go to any free CU.
        """
        gpu: Gemms
        if self.kernel_rate is None:
            gpu = gemms_of(self.system, self.op.precision)
        else:
            gpu = waves_as_fast(self.system, self.op.precision)
        if self.tile is not None and isinstance(gpu, WaveGemms):
            gpu = replace(gpu, library=gpu.library.model_copy(update={"tiles": tiles_of(self.system, self.tile)}))
        return gpu if self.mover == "cu" else replace(gpu, engines=None)

    def cost(self, shape: _Size, taken: ArrayLike, *, accumulate: bool = False) -> GemmCost:
        """Cost of a chunk while so many CUs are taken: held by kernels, or withheld beside DMA engines."""
        rows, *rest = shape
        if self.tile is not None:  # of one kernel for all shards, whose tiles are of one shard each
            whole_tiles = self.system.node.num_gpus * self.tile[0]
            rows = np.ceil(np.asarray(rows) / whole_tiles) * whole_tiles
        cost = gemm_cost(self.gpu, GemmShape.row_major(rows, *rest, accumulate=accumulate), taken=taken)
        if self.tile is not None:  # what is padded is no work
            cost = replace(cost, flop=np.broadcast_to(GemmShape.row_major(*shape).flop, cost.flop.shape))
        if self.kernel_rate is not None:
            cost = replace(cost, seconds=cost.seconds / np.asarray(self.kernel_rate))
        if not np.any(np.asarray(self.lost_rows) > 0):
            return cost
        lost = np.asarray(self.lost_rows, float)  # of few rows no more than they take
        return replace(cost, seconds=cost.seconds * (1 + lost / np.maximum(lost, rows)))

    @cached_property
    def whole(self) -> GemmCost:
        """Cost of the undivided GEMM on all CUs."""
        alone = replace(self, lost_rows=0.0) if np.any(np.asarray(self.lost_rows) > 0) else self
        return alone.cost((self.op.m, self.op.local_n, self.op.local_k), 0)

    @property
    def waves(self) -> tuple[Any, Any]:
        """Number of waves of the undivided GEMM, not rounded up, and the time of a wave [s]."""
        waves = self.whole.kernel.workgroups / np.asarray(self.system.gpu.num_cus, float)
        return waves, self.whole.seconds / np.maximum(np.ceil(waves), 1.0)

    def beside(self, size: _Size, reserved: Any, *, masked: bool, accumulate: bool) -> ChunkCost:
        """Cost of a chunk beside transfers on `reserved` CUs (DMA engines: that are withheld).

        masked: these CUs are taken whether or not data moves.
        """
        gpu = self.system.gpu
        full = granted = self.cost(size, 0, accumulate=accumulate)
        if np.any(reserved):
            granted = self.cost(size, reserved, accumulate=accumulate)
        cus, cost = (gpu.num_cus - reserved, granted) if masked else (gpu.num_cus, full)
        factor = np.ones(())  # stores of its own workgroups are a part of it
        if self.mover == "dma":
            factor = beside_engines(gpu, withheld=reserved)
        elif self.mover == "cu":
            factor = np.minimum(cost.seconds / beside_cu_copies(gpu, granted.seconds, full.seconds), 1.0)
        late_s = late_start_s(gpu, full.seconds, by=self.mover)
        if self.kernel_rate is not None:  # kernels beside it are there from the start, and wait for signals
            late_s = np.zeros(())
        return ChunkCost(cost, cus, full.seconds, ContentionLaw((factor,), late_s))

    def alone(self, size: _Size, *, accumulate: bool) -> ChunkCost:
        """Cost of a chunk beside which nothing moves."""
        full = self.cost(size, 0, accumulate=accumulate)
        law = ContentionLaw((np.ones(()),), np.zeros(()))
        return ChunkCost(full, self.system.gpu.num_cus, full.seconds, law)


def tiles_of(system: System, tile: tuple[int, int]) -> tuple[Tile, ...]:
    """Tiles of the GPU's library with so many rows and columns of C, in its column-major terms; none if it has none."""
    rows, cols = tile
    return tuple(each for each in system.gpu.gemm.tiles if (each.cols, each.rows) == (rows, cols))


class LawGroups:
    """Groups of tasks, one for all tasks with the same contention law."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._groups: dict[tuple[Any, ...], tuple[str, ContentionLaw]] = {}

    def group(self, law: ContentionLaw) -> str:
        """Name of the group of a law."""
        numbers = (*law.factors, law.late_s)
        key = tuple((np.shape(number), np.asarray(number, float).tobytes()) for number in numbers)
        return self._groups.setdefault(key, (f"{self.name} {len(self._groups)}", law))[0]

    def items(self) -> list[tuple[str, ContentionLaw]]:
        """Pairs (group, law) of all groups."""
        return list(self._groups.values())
