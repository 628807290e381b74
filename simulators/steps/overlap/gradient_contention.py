"""Slowdowns of a pass and of the exchanges over dp beside it: reductions of gradients, gathers of split weights.

While kernels of a library reduce or gather, they hold CUs, and move bytes over links and through the HBM:

    GEMMs, attention, streams      as `simulators.costs.sharing` has it
    collectives T / max(1 - r, 1 / 2)                    r: rate of the reduction over that of the collective: links of
                                                         a node are shared fairly, and nobody asks for more than alone

(collectives: derived). A CU of the reduction takes `cu_copy_beside_gemm` times as long for a byte while
something is computed. A machine without constants of contention (`gpu.contention`) has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse import plugins
from simulators.costs.collective import CollectiveCost
from simulators.costs.sharing import Sharing
from simulators.costs.transfer import link_utilisation
from simulators.hardware.parts import Contention, CuCopy
from simulators.steps.operators.work import (
    Exchange,
    ModelBlock,
    Op,
    OperatorCost,
    Platform,
    Product,
    StageOperator,
    Stream,
    beside_moved_data,
    quotient,
)
from simulators.taskgraph.graph import GraphBuilder, TaskGraph

Floats = NDArray[np.float64]
ENGINE = "fluid"  # exact, with contention laws
GRADIENTS = "gradients"
"""Group of the reductions of gradients."""


@dataclass(frozen=True)
class Bucket:
    """The reduction of the gradients of one of `count` equal blocks, in the order of the backward pass.

    seconds: of one. ready: how long the backward pass takes for one block.
    """

    block: ModelBlock
    count: Floats
    seconds: Floats
    ready: Floats

    @property
    def numbers(self) -> tuple[Floats, ...]:
        """Its numbers, which broadcast."""
        return self.count, self.seconds, self.ready


@dataclass(frozen=True)
class Slowdowns:
    """Factors in (0, 1] on rates: of the backward pass of blocks, by name, while gradients are reduced, and of the
    reductions meanwhile. Empty where nothing contends.
    """

    backward: Mapping[str, Floats] = field(default_factory=dict)
    reductions: ArrayLike = 1.0

    def laws(self) -> Iterator[tuple[tuple[str, str], Floats]]:
        """Yield ((slowed group, group whose activity slows it), factor) for the task graph."""
        for name, factor in self.backward.items():
            for pair, value in (((group(name), GRADIENTS), factor), ((GRADIENTS, group(name)), self.reductions)):
                if np.any(np.asarray(value) < 1):  # a factor of 1 is no law
                    yield pair, np.asarray(value, float)

    def __bool__(self) -> bool:
        return any(True for _ in self.laws())


def group(block: str) -> str:
    """Group of the backward tasks of a block."""
    return f"backward of {block}"


@dataclass(frozen=True)
class GradientReduction:
    """Reduction of gradients, or another exchange over dp, alone: bytes that a GPU sends and moves through its HBM, and
    time [s].
    """

    wire_bytes: Floats
    hbm_bytes: Floats
    seconds: Floats

    @classmethod
    def of(cls, cost: CollectiveCost) -> GradientReduction:
        """The reduction of a cost."""
        return cls(cost.wire_bytes, cost.hbm_bytes, cost.seconds)

    def rate(self, moved: Floats) -> Floats:
        """Bytes a second while it runs; 0 where there is none."""
        return quotient(moved, self.seconds)


@dataclass(frozen=True)
class SideBySide:
    """Shares in (0, 1] of their rates alone that compute of a pass and an exchange beside it have meanwhile."""

    compute: ArrayLike = 1.0
    exchange: ArrayLike = 1.0

    def longer_s(self, compute_s: Floats, exchange_s: Floats) -> Floats:
        """Time [s] from when compute would end alone until both have ended, which begin at once."""
        compute, exchange = np.asarray(self.compute, float), np.asarray(self.exchange, float)
        together = np.minimum(compute_s / compute, exchange_s / exchange)
        left_s = np.maximum(compute_s - compute * together, 0.0) + np.maximum(exchange_s - exchange * together, 0.0)
        return np.asarray(together + left_s - compute_s)


@dataclass(frozen=True)
class ContendedPlatform:
    """The GPU of an iteration as contention sees it. copy: kernels of collectives; None where they are not known."""

    platform: Platform
    contention: Contention
    copy: CuCopy | None

    @property
    def taken(self) -> ArrayLike:
        """CUs that kernels of a reduction hold."""
        # the backward pass keeps a CU at least
        return 0 if self.copy is None else np.minimum(self.copy.num_cus, np.asarray(self.platform.chip.cus) - 1)

    def beside(self, ops: Sequence[Op], costs: Sequence[OperatorCost], reduction: GradientReduction) -> list[Floats]:
        """Times [s] of operators beside a reduction."""
        slowed = beside_moved_data(ops, costs, self.platform, self.taken)
        return [
            seconds if isinstance(op.work, Product) else self._slowed(op, cost, reduction)
            for op, cost, seconds in zip(ops, costs, slowed, strict=True)
        ]

    def share(self, parts: Sequence[StageOperator], exchange: GradientReduction) -> Floats:
        """Share of its rate alone that a pass of some operators of a stage has beside an exchange."""
        beside = self.beside([part.op for part in parts], [part.spent for part in parts], exchange)
        late: Any = sum((part.times * seconds for part, seconds in zip(parts, beside, strict=True)), np.zeros(()))
        free: Any = sum((part.seconds for part in parts), np.zeros(()))
        # a pass that this stage does not have
        shares = np.divide(free, late, out=np.ones(np.broadcast(free, late).shape), where=np.asarray(free) > 0)
        return np.asarray(shares, float)

    def side_by_side(self, parts: Sequence[StageOperator], cost: CollectiveCost) -> SideBySide:
        """What a pass of some operators of a stage and an exchange of a cost do to one another."""
        exchange = GradientReduction.of(cost)
        return SideBySide(self.share(parts, exchange), self.reductions(exchange))

    def _slowed(self, op: Op, cost: OperatorCost, reduction: GradientReduction) -> Floats:
        """Time [s] of an operator that is no product."""
        chip, seconds = self.platform.chip, cost.seconds
        if isinstance(op.work, Exchange):
            wanted = quotient(reduction.rate(reduction.wire_bytes), quotient(cost.wire_bytes, seconds))
            # links are shared fairly between two: no less than half
            return np.asarray(seconds / np.maximum(1 - np.minimum(wanted, 1.0), 0.5))
        if isinstance(op.work, Stream) and op.kind == "attention":
            return Sharing.attention(seconds, chip.cus, self.taken)
        drawn, moved = (
            rate / chip.drawable_bytes_per_s
            for rate in (quotient(cost.bytes, seconds), reduction.rate(reduction.hbm_bytes))
        )
        return Sharing.stream(seconds, drawn, moved)

    def reductions(self, reduction: GradientReduction) -> Floats:
        """Factor on the rate of a reduction while something is computed."""
        if self.copy is None:
            return np.ones(())
        rate = np.maximum(reduction.rate(reduction.wire_bytes), 1.0)  # a byte a second where nothing is reduced
        demand = np.asarray(self.copy.num_cus) * self.copy.bytes_per_s_per_cu / rate
        slowed: Any = link_utilisation(demand / self.contention.cu_copy_beside_gemm) / link_utilisation(demand)
        return np.asarray(np.minimum(slowed, 1.0))  # rounding


def exposed_s(buckets: Sequence[Bucket], slowdowns: Slowdowns) -> Floats:
    """Time [s] by which the buckets end after the backward pass would end alone, as an engine runs both.

    buckets: in the order of the backward pass, of designs whose numbers broadcast; NaN where one has none.
    """
    of_buckets = (value for bucket in buckets for value in (*bucket.numbers, bucket.count))
    shape = np.broadcast_shapes(*map(np.shape, of_buckets), *(factor.shape for _, factor in slowdowns.laws()))
    # blocks are whole tasks
    counts = np.stack([np.broadcast_to(np.rint(bucket.count), shape).reshape(-1) for bucket in buckets], axis=1)
    numbers = [np.broadcast_to(value, shape).reshape(-1) for bucket in buckets for value in bucket.numbers]
    known = np.isfinite(np.stack(numbers)).all(axis=0)  # designs that break a rule have NaN
    ended = np.full(len(counts), np.nan)
    for row in np.unique(counts[known], axis=0):  # a graph for each structure, run for all of its designs
        places = np.flatnonzero(known & (counts == row).all(axis=1))
        graph = _backward(buckets, slowdowns, row.astype(int).tolist(), _GridPart(shape, places))
        ended[places] = plugins.load("engine", ENGINE).totals(graph).makespan_s
    alone = sum(np.asarray(bucket.count) * bucket.ready for bucket in buckets)
    return np.asarray(np.maximum(ended.reshape(shape) - alone, 0.0))


@dataclass(frozen=True)
class _GridPart:
    """Some designs of a grid, by their places in it."""

    shape: tuple[int, ...]
    places: NDArray[np.intp]

    def of(self, value: ArrayLike) -> Floats:
        """Values [N] of these designs."""
        return np.broadcast_to(np.asarray(value, float), self.shape).reshape(-1)[self.places]


def _backward(buckets: Sequence[Bucket], slowdowns: Slowdowns, counts: Sequence[int], taken: _GridPart) -> TaskGraph:
    """Task graph of a backward pass, a task for each block and for each reduction of its gradients."""
    graph, computed, reduced = GraphBuilder(), list[int](), list[int]()
    for bucket, count in zip(buckets, counts, strict=True):
        ready, seconds = taken.of(bucket.ready), taken.of(bucket.seconds)
        for index in range(count):
            name = f"{bucket.block.name} {index}"
            computed = [graph.task(name, "gemm", after=computed, group=group(bucket.block.name), cap=1.0, work=ready)]
            reduced = [
                graph.task(
                    f"{name}: gradients",
                    "transfer",
                    after=[*computed, *reduced],
                    group=GRADIENTS,
                    cap=1.0,
                    work=seconds,
                )
            ]
    for (slowed, active), factor in slowdowns.laws():
        graph.slows(slowed, while_active=active, factor=taken.of(factor))
    return graph.build()
