"""Costs of the GEMM chunks of `search_spaces/pipeline.py`, alone and beside transfers, and their contention laws.

`piece_bound`: the least makespan of a GEMM and a collective, over all schedules that cut them into pieces.

Pieces of the GEMM are kernels of the library, one at a time; data moves by DMA engines, by kernels on CUs, or by both
at once, in pieces of any size. With G: least time of the GEMM (`simulators.costs.gemm.least`), V: bytes over the links,
and for all that may happen at once, a: the time g_a of the whole GEMM beside it and the bytes per second v_a of it, a
schedule spends its time on some of these, so for every price z [s/byte] up to 1 / (what the links carry)

    T >= z V + min over a of g_a (1 - z v_a) + head (1 - s) + tail

    alone    g = G, v = 0                            DMA      g = f G, v: the rate of its engines, slowed (less where
                                                              CUs may be withheld)
    CUs      g: the larger of the GEMM on the CUs that c kernels leave, and slowed beside them; v: as c CUs fill links
    both     g slowed by both; v: the sum, but no more than the links carry

which is Lagrangian duality; the bound is the largest over z. head: set-up of a transfer, in which the GEMM may run;
s: the least of g_a (1 - z v_a) / g over alone and DMA, which no piece exceeds.
tail: launch of the last piece, which waits for the last byte (a GEMM that comes first: launch of the first one). No
schedule gets below V over the links, or the least HBM traffic over the HBM's rate, either. Ideas of the proofs, for the
contention laws of this module, which `search_spaces.pipeline` adds to the graph: docs/explanation/bounds.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.values import leaves
from simulators.costs.gemm import (
    GemmCost,
    Gemms,
    GemmShape,
    WaveGemms,
    gemm_cost,
    gemms_of,
    waves_as_fast,
)
from simulators.costs.gemm.least import LeastTime, least_linear, least_time
from simulators.costs.sharing import HeldCus, Sharing, beside_engines
from simulators.costs.transfer import (
    Mover,
    TransferMode,
    is_measured,
    kernel_share,
    late_start_s,
    library_cus,
    routes,
    setup,
    slowed_beside_gemm,
)
from simulators.hardware.machine import System
from simulators.hardware.network import Route, links
from simulators.hardware.parts import Tile
from simulators.overlap.design import Bound
from simulators.workloads.operators import Gemm, Overlap, Workload

Floats = NDArray[np.float64]
_PRICES = 33  # of a byte, of which the best is taken
_LEAST_SHARE = 1e-3
"""Of a GEMM that counts as done beside kernels that are there for less than a wave."""
_BINDS = ("links", "GEMM", "HBM", "GEMM and links, and their contention")
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
            factor = np.minimum(cost.seconds / Sharing.of(gpu).gemm(granted.seconds, full.seconds), 1.0)
        late_s = late_start_s(gpu, full.seconds, by=self.mover)
        if self.kernel_rate is not None:  # kernels beside it are there from the start, and wait for signals
            late_s = np.zeros(())
        return ChunkCost(cost, cus, full.seconds, ContentionLaw((factor,), late_s))

    def share_until(self, size: _Size, taken: ArrayLike, held_s: ArrayLike, *, left: ArrayLike = 1.0) -> Floats:
        """Share of its rate alone that a GEMM has while kernels hold `taken` CUs for held_s [s] from its start.

        left: share of its workgroups that are left then. With the rate the GEMM, which goes on at its rate alone, ends
        when its whole waves do (`Sharing.gemm_until`).
        """
        full, granted, of = self.cost(size, 0), self.cost(size, taken), np.maximum(left, _LEAST_SHARE)
        full_s = full.seconds * of
        beside = HeldCus(full.kernel.workgroups * of, self.system.gpu.num_cus, taken, held_s)
        seconds = Sharing.of(self.system.gpu).gemm_until(granted.seconds * of, full_s, beside)
        left_s = np.maximum(seconds - np.asarray(held_s, float), 0.0)
        done_s = np.maximum(full_s - left_s, _LEAST_SHARE * full_s)  # of the GEMM alone, beside the kernels
        return np.asarray(np.minimum(done_s / np.maximum(seconds - left_s, done_s), 1.0))

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


def piece_bound(system: System, workload: Workload) -> Bound:
    """The bound of all schedules of the GEMM and the collective of a workload, over the grid of the numbers."""
    overlap = workload.overlap()
    movers: tuple[Mover, Mover] = ("dma", "cu")
    gpus = {mover: ChunkCosts(system, overlap.gemm, mover, None).gpu for mover in movers}
    pieces = _Pieces(system, overlap, gpus)
    parts = [pieces.link_s, pieces.gemm_s, pieces.hbm_s, pieces.beside_s()]
    stacked = np.stack(np.broadcast_arrays(*parts))
    return Bound(stacked.max(axis=0), np.argmax(stacked, axis=0), _BINDS)


@dataclass(frozen=True)
class _ConcurrentWork:
    """What may happen at once: time of the whole GEMM beside it [s], and bytes per second; arrays."""

    gemm_s: Floats
    rate: Floats

    def priced(self, price: Floats) -> Floats:
        """Time of the whole GEMM less the price of all bytes that move beside it."""
        return np.asarray(self.gemm_s * (1 - price * self.rate))


@dataclass(frozen=True)
class _Pieces:
    """Terms of the bound. gpus: the GPU as the model of GEMMs reads it, by what moves the data."""

    system: System
    overlap: Overlap
    gpus: Mapping[Mover, Gemms]

    @cached_property
    def _axes(self) -> int:
        """Number of axes of the grid that arrays broadcast over."""
        moved = self.overlap.collective
        numbers = [*[value for _, value, _ in leaves(self.system)], *self._size, moved.rows, moved.cols]
        return max([number.ndim for number in numbers if isinstance(number, np.ndarray)], default=0)

    @cached_property
    def gemm_s(self) -> Floats:
        """Least time of the GEMM and a launch [s]."""
        return np.asarray(self._least.seconds + self._launch_s)

    @cached_property
    def link_s(self) -> Floats:
        """Least time of the collective, with the head and the tail [s]."""
        return np.asarray(self._crossed / self._capacity + self._head_s + self._tail_s)

    @property
    def hbm_s(self) -> Floats:
        """Time of the least traffic: operands, outputs, and what is sent and received [s]."""
        traffic = GemmShape(*self._size).least_bytes(self.gpus["dma"].element_bytes) + 2 * self._received
        return np.asarray(traffic / np.asarray(self.system.gpu.hbm_bytes_per_s, float))

    def beside_s(self) -> Floats:
        """Least time by prices of a byte [s]."""
        dma, least, kernels = self._dma, self._least, self._kernels
        both = _ConcurrentWork(
            kernels.gemm_s * (dma.gemm_s / least.linear), np.minimum(dma.rate + kernels.rate, self._capacity)
        )
        price = self._prices(np.asarray((1 - least.linear / dma.gemm_s) / dma.rate))
        slower = np.minimum(1.0, dma.priced(price) / least.linear)
        # along the second axis the CUs of kernels
        linear = np.minimum(*(beside.priced(price[:, None]).min(axis=1) for beside in (kernels, both)))
        share, of_share = (np.expand_dims(part, 1) for part in least.shares(self._axes))  # the second axis is of prices
        mixed = (of_share * slower + (1 - share) * linear).min(axis=0, initial=np.inf)  # there may be no shares
        gemm_s = np.minimum(np.minimum(least.seconds * slower, linear), mixed)
        idle = self._head_s * (1 - slower)
        return np.asarray((price * self._crossed + gemm_s + idle + self._tail_s).max(axis=0, initial=0.0))

    def _prices(self, kink: Floats) -> Floats:
        """Prices of a byte along a first axis: evenly up to what the links carry, and where a bound has its kink."""
        most = 1 / self._capacity
        even = np.linspace(0, 1, _PRICES).reshape(-1, *(1,) * self._axes) * most
        last = np.minimum(kink, most)[None]
        shape = np.broadcast_shapes(even.shape[1:], last.shape[1:])
        return np.concatenate([np.broadcast_to(part, (len(part), *shape)) for part in (even, last)])

    # ---------------------------------------------------------------- the GEMM

    @property
    def _size(self) -> tuple[Any, Any, Any]:
        return self.overlap.gemm.m, self.overlap.gemm.local_n, self.overlap.gemm.local_k

    @property
    def _cut_columns(self) -> bool:
        return self.overlap.order == "after"

    @cached_property
    def _least(self) -> LeastTime:
        return least_time(self.gpus["dma"], self._size, cut_columns=self._cut_columns)

    @cached_property
    def _launch_s(self) -> Floats:
        return np.asarray(self.gpus["dma"].launch_s, float)

    @property
    def _tail_s(self) -> Any:
        return 0.0 if self.overlap.order == "beside" else self._launch_s

    # ---------------------------------------------------------------- the collective

    @cached_property
    def _routes(self) -> list[Route]:
        return routes(self.system.node, self.overlap.collective.pattern)

    @cached_property
    def _received(self) -> Any:
        """Bytes that a GPU receives, of an all-reduce both ways; the mean over GPUs with unequal shards."""
        moved, count = self.overlap.collective, self.system.node.num_gpus
        passes = 2.0 if moved.pattern == "all_reduce" else 1.0
        payload = np.asarray(moved.element_bytes * passes * moved.cols, float)
        return payload * (moved.rows - -(-np.asarray(moved.rows) // count))

    @cached_property
    def _crossed(self) -> Floats:
        """V: bytes on all incoming links of a GPU."""
        load = sum(sum(route.loads.values()) for route in self._routes)
        return np.asarray(self._received * load / len(self._routes))

    @cached_property
    def _capacity(self) -> Floats:
        """Rate of all incoming links of a GPU [bytes/s]."""
        return np.asarray(sum(np.asarray(rate, float) for rate in links(self.system.node).values()))

    @cached_property
    def _head_s(self) -> Floats:
        """Set-up of a transfer by the mover that is set up soonest [s]."""
        movers: tuple[Mover, Mover] = ("dma", "cu")
        times = [np.asarray(setup(self.system, by=self._mode(mover, 1)), float) for mover in movers]
        return np.asarray(np.minimum(*times))

    def _mode(self, mover: Mover, cus: Any) -> TransferMode:
        return TransferMode(mover, cus, self.overlap.collective.pattern)

    @cached_property
    def _dma(self) -> _ConcurrentWork:
        """The GEMM beside DMA engines, as linear in the rows."""
        dma, num_links = self.system.gpu.dma, len(links(self.system.node))
        engine = np.asarray(dma.bytes_per_s, float)
        rate = np.minimum(
            self._capacity, engine * min(dma.num_engines, num_links * max(1, dma.num_engines // num_links))
        )
        gpu, least = self.system.gpu, self._least.linear
        if self.overlap.order != "beside":  # whose schedules withhold no CUs
            slow = beside_engines(gpu, withheld=0)
            return _ConcurrentWork(np.asarray(least / slow), np.asarray(rate * slow))
        withheld = np.arange(int(np.min(gpu.num_cus))).reshape(-1, *(1,) * self._axes)
        granted = least_linear(self.gpus["dma"], self._size, taken=withheld, cut_columns=self._cut_columns)
        slowed = granted / beside_engines(gpu, withheld=withheld)
        return _ConcurrentWork(np.minimum(slowed.min(axis=0), granted[-1]), np.asarray(rate))

    @cached_property
    def _kernels(self) -> _ConcurrentWork:
        """The GEMM beside kernels on 1 to as many CUs as the library takes, along a first axis."""
        system, full = self.system, self._least.linear
        library = np.asarray(library_cus(system, self.overlap.collective.pattern))
        num_cus = np.asarray(system.gpu.num_cus)
        most = int(np.min([np.max(library), np.max(num_cus) - 1]))
        cus = np.minimum(np.arange(1, most + 1).reshape(-1, *(1,) * self._axes), np.minimum(library, num_cus - 1))
        granted = least_linear(self.gpus["cu"], self._size, taken=cus, cut_columns=self._cut_columns)
        # of a kernel that was launched first, the last workgroups lose no CUs
        least = full if self.overlap.order == "beside" else granted
        sharing = Sharing.of(system.gpu)
        gemm_s = sharing.gemm(least if sharing.static else granted, full)
        gemm_s = np.broadcast_to(gemm_s, np.broadcast_shapes(np.shape(gemm_s), granted.shape))
        mode, active = self._mode("cu", cus), self._routes
        if is_measured(system, mode.pattern):  # as fast as the links at most
            rate = np.broadcast_to(self._capacity, np.broadcast_shapes(cus.shape, self._capacity.shape))
        else:
            carried = self._capacity * system.gpu.cu_copy.link_efficiency
            rate = carried * kernel_share(system, mode, self._capacity) * slowed_beside_gemm(system, active, by=mode)
        return _ConcurrentWork(np.asarray(gemm_s), np.asarray(rate))
