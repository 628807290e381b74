"""Costs of the GEMM chunks of `search_spaces/pipeline.py`, alone and beside transfers, and their contention laws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from simulators.costs.gemm import GemmCost, Gemms, GemmShape, beside_cu_copies, gemm_cost, gemms_of
from simulators.costs.transfer import Mover, late_start_s
from simulators.hardware.system import System
from simulators.workloads.operators import Gemm

_Size = tuple[ArrayLike, ArrayLike, ArrayLike]


@dataclass(frozen=True)
class ChunkCosts:
    """Costs of the chunks of a GEMM whose data `mover` moves.

    kernel_rate: of one kernel for all chunks, whose tiles signal, over the library's; None for a kernel of the library
    for each chunk. That one keeps the tile of the undivided GEMM and never splits k, so its time is that of its waves.
    """

    system: System
    op: Gemm
    mover: Mover
    kernel_rate: ArrayLike | None

    @cached_property
    def gpu(self) -> Gemms:
        """The GPU as the model of GEMMs reads it.

        Beside DMA engines no other kernel is dispatched, so that the GEMM's workgroups go to any free CU.
        """
        model = self.system.costs.gemm if self.kernel_rate is None else "waves"
        gpu = gemms_of(self.system, self.op.precision, model=model)
        loaded = self.system.gpu.loaded  # schedules run in models, and are measured in loops
        gpu = gpu.at_clock(loaded.gemm_clock) if loaded else gpu
        return gpu if self.mover == "cu" else replace(gpu, engines=None)

    def cost(self, shape: _Size, taken: ArrayLike, *, accumulate: bool = False) -> GemmCost:
        """Cost of a chunk while so many CUs are taken: held by kernels, or withheld beside DMA engines."""
        cost = gemm_cost(self.gpu, GemmShape.row_major(*shape, accumulate=accumulate), taken=taken)
        return cost if self.kernel_rate is None else replace(cost, seconds=cost.seconds / np.asarray(self.kernel_rate))

    @cached_property
    def whole(self) -> GemmCost:
        """Cost of the undivided GEMM on all CUs."""
        return self.cost((self.op.m, self.op.local_n, self.op.local_k), 0)

    @property
    def waves(self) -> tuple[Any, Any]:
        """Number of waves of the undivided GEMM, not rounded up, and the time of a wave [s]."""
        waves = self.whole.kernel.workgroups / np.asarray(self.system.gpu.num_cus, float)
        return waves, self.whole.seconds / np.maximum(np.ceil(waves), 1.0)

    def beside(
        self, size: _Size, reserved: Any, *, masked: bool, accumulate: bool
    ) -> tuple[GemmCost, Any, Mapping[str, Any]]:
        """Cost of a chunk beside transfers on `reserved` CUs (DMA engines: that are withheld), the CUs that it has, and
        numbers of its task. masked: these CUs are taken whether or not data moves.
        """
        gpu = self.system.gpu
        full = granted = self.cost(size, 0, accumulate=accumulate)
        if np.any(reserved):
            granted = self.cost(size, reserved, accumulate=accumulate)
        cus, cost = (gpu.num_cus - reserved, granted) if masked else (gpu.num_cus, full)
        factor = np.ones(())  # stores of its own workgroups are a part of it
        if self.mover == "dma":
            factor = np.asarray(1 / np.asarray(gpu.contention.dma_beside_gemm, float))
        elif self.mover == "cu":
            factor = np.minimum(cost.seconds / beside_cu_copies(gpu, granted.seconds, full.seconds), 1.0)
        late_s = late_start_s(gpu, full.seconds, by=self.mover)
        if self.kernel_rate is not None:  # kernels beside it are there from the start, and wait for signals
            late_s = np.zeros(())
        return cost, cus, self._numbers(full, cost, (factor, late_s))

    def alone(self, size: _Size, *, accumulate: bool) -> tuple[GemmCost, Any, Mapping[str, Any]]:
        """Cost of a chunk beside which nothing moves, the CUs that it has, and numbers of its task."""
        full = self.cost(size, 0, accumulate=accumulate)
        return full, self.system.gpu.num_cus, self._numbers(full, full, (np.ones(()), np.zeros(())))

    def _numbers(self, full: GemmCost, cost: GemmCost, law: tuple[Any, Any]) -> Mapping[str, Any]:
        share = cost.flop / self.whole.flop * self.whole.seconds
        return {"alone_s": full.seconds, "wide_s": share, "ideal_s": share, "waves": cost.kernel.waves, "law": law}


def later_law(chunk: Mapping[str, Any], first: Any) -> tuple[Any, ...]:
    """Law of what is left of a GEMM chunk after a share `first`, which kernels beside it have waited for already."""
    *factors, late_s = chunk["law"]
    return *factors, np.maximum(late_s - first * chunk["alone_s"], 0.0)


class LawGroups:
    """Groups of tasks with the same numbers of a contention law."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._groups: dict[tuple[Any, ...], tuple[str, Any]] = {}

    def group(self, *numbers: Any) -> str:
        """Group of the numbers of a law."""
        key = tuple((np.shape(number), np.asarray(number, float).tobytes()) for number in numbers)
        law = numbers if len(numbers) > 1 else numbers[0]
        return self._groups.setdefault(key, (f"{self._name} {len(self._groups)}", law))[0]

    def items(self) -> list[tuple[str, Any]]:
        """Pairs (group, its number or numbers) of all groups."""
        return list(self._groups.values())
