"""Exchanges of experts beside other work: the shared expert, the other of two micro-batches, or tiles in one kernel.

What two streams (`simulators.steps.overlap.two_streams`) do side by side in a layer, by `parallel.exchanges`. F, B, W:
forward, backward of inputs, gradients of weights; a, e, h: attention with router and norms, routed experts, shared
experts.

    two_micro_batches, training         compute                exchange
      (a pair: F of one micro-batch,    W_a of before, F_a     combine, backward
       B of another; arXiv:2412.19437,  B_h, B_e               dispatch, forward
       figure 4)                        W_e, W_h, F_h, F_e     dispatch, backward
                                        B_a                    combine, forward
    two_micro_batches, inference        a of 1                 combine of 2, of the layer before
      (docs.vllm.ai, design/dbo)        a of 2                 dispatch of 1
                                        h, e of 1              dispatch of 2
                                        h, e of 2              combine of 1
    shared_expert                       first GEMM of h        dispatch
      (Megatron-LM)                     second GEMM of h       combine
    one_kernel, inference               tiles of e             tiles of dispatch, and of combine
      (`simulators.costs.tile_pipeline`)

Kernels that exchange hold CUs. Beside the other micro-batch GEMMs keep to the CUs that are left all the time, as DeepEP
and DeepGEMM are set; they wait for nothing else. What is computed beside an exchange takes, with c CUs of which c_x are
held, f the interference of moved data, and u, u_x the shares of the HBM's rate that both draw alone,

    GEMMs, attention     as `simulators.costs.sharing` has it
    streams     T max(1, u + u_x, min(c / (c - c_x), 1 / u))     one that leaves the HBM idle is bound by its CUs

(streams: derived). An SM of the exchange takes `gpu.contention.cu_copy_beside_gemm` times as long for a byte. Sums of
tp are part of compute and slow nothing down; what is computed again is part of B_a, B_e and B_h, exchanges of B_e. In
one kernel rows go where their expert reads them, so that nothing orders them; its tiles are the rows of each expert in
`tile_rows` (`implementation`), and SMs that communicate are given back once it has ended (assumed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.sharing import Sharing
from simulators.costs.tile_pipeline import tile_parts
from simulators.hardware.network import ExpertLibrary
from simulators.hardware.parts import Contention
from simulators.steps.operators.experts import TokenExchange
from simulators.steps.operators.work import (
    AGAIN,
    Op,
    Platform,
    Product,
    StageOperator,
    Stream,
    operator_costs,
    quotient,
)
from simulators.steps.overlap.two_streams import Slot, TwoStreams
from simulators.workloads.spreading import Exchanges

Floats = NDArray[np.float64]
_REGIONS = {True: ("attention", "experts", "shared"), False: ("shared", "experts", "attention")}
"""Forward or backward -> what operators of a layer are of: before its first exchange, up to the second, and after."""
# names of operators from the second GEMM of shared experts on
_SECOND = ("shared fc2", "all-reduce ffn shared", "reduce-scatter ffn shared")
FIRST_OF_EXPERTS = "expert fc1"
_AFTER_COMBINE = "all-gather experts"  # gathered after the combine, before the next attention


@dataclass(frozen=True)
class OverlappedExchanges:
    """Exchanges of experts beside other work on a GPU.

    num_cus: that kernels of exchanges hold. contention: None where nothing is known of it. tile_rows: of one kernel.
    """

    how: Exchanges
    platform: Platform
    contention: Contention | None
    num_cus: ArrayLike
    tile_rows: int = 1

    @property
    def taken(self) -> Any:
        """CUs that these kernels hold, at most all but one."""
        return np.minimum(self.num_cus, np.asarray(self.platform.chip.cus) - 1)  # GEMMs keep a CU at least

    @property
    def of_gemms(self) -> Platform:
        """The platform as GEMMs see it, whether an exchange runs or not."""
        # DeepEP and DeepGEMM set the CUs of either for the whole run
        return self.platform.with_held(self.taken) if self.how == "two_micro_batches" else self.platform

    def layers(self, parts: Sequence[StageOperator], *, training: bool) -> tuple[LayersBeside, ...]:
        """Blocks whose exchanges run beside other work."""
        blocks = {part.block.name: part.block for part in parts if isinstance(part.op.work, TokenExchange)}
        inside = {name: [part for part in parts if part.block.name == name] for name in blocks}
        # layers of the stage
        counts = {name: quotient(inner[0].times, inner[0].op.count) for name, inner in inside.items()}
        return tuple(
            LayersBeside(name, counts[name], self._streams(inside[name], training=training)) for name in blocks
        )

    def _streams(self, parts: Sequence[StageOperator], *, training: bool) -> tuple[TwoStreams, ...]:
        layer = _LayerTimes.of(self, parts)
        if self.how == "one_kernel":
            return (layer.in_one_kernel(self._tiles(parts)),)
        if self.how == "shared_expert":
            passes = (True, False) if training else (True,)  # forward alone in inference
            return tuple(layer.beside_shared(forward=forward) for forward in passes)
        return (layer.opposite_phases() if training else layer.two_batches(),)

    def _tiles(self, parts: Sequence[StageOperator]) -> Floats:
        """Tiles of rows of the experts of a GPU: those of each active expert, rounded up."""
        products = (part.op.work for part in parts if part.op.phase == "forward" and part.op.name == FIRST_OF_EXPERTS)
        (work,) = (work for work in products if isinstance(work, Product))
        return np.asarray(np.asarray(work.batch) * np.ceil(np.asarray(work.n, float) / self.tile_rows))

    def rates_of(self, parts: Sequence[StageOperator]) -> list[Floats]:
        """Share of its own rate at which each operator runs beside an exchange, or each exchange beside compute."""
        drawn, others = self._drawn(parts), iter(self._other_costs(parts))
        rates = []
        for part in parts:
            alone_s, work = part.spent.seconds, part.op.work
            if isinstance(work, Product):
                other = next(others)
                left, full = (alone_s, other) if self.how == "two_micro_batches" else (other, alone_s)
                slowed = self.platform.sharing.gemm(left, full)
                rates.append(quotient(alone_s, np.maximum(alone_s, slowed)))  # no faster than alone
            elif isinstance(work, TokenExchange):
                # a GPU that exchanges with nobody
                rates.append(np.where(alone_s > 0, quotient(alone_s, np.maximum(next(others), alone_s)), 1.0))
            else:
                # collectives of tp keep their rate
                rates.append(1 / self._slowdown(part, drawn) if isinstance(work, Stream) else np.ones(()))
        return rates

    def _other_costs(self, parts: Sequence[StageOperator]) -> Iterator[Floats]:
        """Yield the time of each GEMM on all CUs, or on those that are left, whichever its own is not, and of each
        exchange beside compute.
        """
        # the platform that GEMMs are not costed on already
        here = self.platform if self.how == "two_micro_batches" else self.platform.with_held(self.taken)
        groups = self._with_slow_exchanges.groups
        ops = [part.op for part in parts if isinstance(part.op.work, Product | TokenExchange)]
        yield from (cost.seconds for cost in operator_costs(ops, replace(here, groups=groups)))

    def _drawn(self, parts: Sequence[StageOperator]) -> Floats:
        """Share of the HBM's rate that exchanges draw."""
        moves = [part.spent for part in parts if isinstance(part.op.work, TokenExchange)]
        moved, seconds = (sum((getattr(cost, name) for cost in moves), np.zeros(())) for name in ("bytes", "seconds"))
        return np.asarray(quotient(moved, seconds) / self.platform.chip.drawable_bytes_per_s)

    def _slowdown(self, part: StageOperator, drawn: Floats) -> Floats:
        """Slowdown of kernels that memory bounds, and of attention in one kernel."""
        chip = self.platform.chip
        lost = Sharing.attention(1.0, chip.cus, self.taken)
        if part.op.kind == "attention":
            return np.asarray(lost)
        # a stream that moves nothing
        drawn_alone = np.maximum(quotient(part.spent.bytes, part.spent.seconds) / chip.drawable_bytes_per_s, 1e-9)
        return np.asarray(
            # bound by its CUs only as far as it leaves the HBM idle
            np.maximum.reduce(np.broadcast_arrays(1.0, drawn_alone + drawn, np.minimum(lost, 1 / drawn_alone)))
        )

    @cached_property
    def _with_slow_exchanges(self) -> Platform:
        """The platform whose exchanges are slowed by compute beside them."""
        group = self.platform.groups["ep"]
        # an all-to-all by the library of collectives: not slowed here
        if self.contention is None or group.experts is None:
            return self.platform
        library = _slowed(group.experts, self.contention.cu_copy_beside_gemm)
        return replace(self.platform, groups={**self.platform.groups, "ep": replace(group, experts=library)})


@dataclass(frozen=True)
class LayersBeside:
    """What runs side by side in `count` layers of a block: of a pair of micro-batches, or of each pass of one."""

    block: str
    count: Floats
    streams: tuple[TwoStreams, ...]

    @property
    def saved_s(self) -> Floats:
        """Time [s] by which these end before all would one after the other."""
        return np.asarray(sum((both.saved_s(self.count) for both in self.streams), np.zeros(())))

    @property
    def waited_s(self) -> Floats:
        """Time [s] of all one after the other."""
        return np.asarray(sum((both.sum("waited_s", self.count) for both in self.streams), np.zeros(())))


def _slowed(library: ExpertLibrary, factor: Any) -> ExpertLibrary:
    """A library whose SMs take `factor` times as long for a byte."""
    kernels = {
        kind: pair.model_copy(
            update={
                name: (kernel := getattr(pair, name)).model_copy(
                    update={"bytes_per_s_per_sm": kernel.bytes_per_s_per_sm / factor}
                )
                for name in ("dispatch", "combine")
            }
        )
        for kind, pair in library.kernels.items()
    }
    return library.model_copy(update={"kernels": kernels})


@dataclass(frozen=True)
class _LayerTimes:
    """Times of a layer: of its regions alone and beside an exchange, and (time, rate) of its exchanges in order."""

    alone: Mapping[str, Floats]
    late: Mapping[str, Floats]
    exchanges: Mapping[str, tuple[Floats, Floats]]

    @classmethod
    def of(cls, beside: OverlappedExchanges, parts: Sequence[StageOperator]) -> _LayerTimes:
        """Gather the operators of a layer by region."""
        alone, late = dict[str, Floats](), dict[str, Floats]()
        exchanges = dict[str, tuple[Floats, Floats]]()
        for part, region, rate in zip(parts, regions([part.op for part in parts]), beside.rates_of(parts), strict=True):
            seconds = np.asarray(part.op.count, float) * part.spent.seconds
            # exchanges of a recomputed forward pass overlap no other work
            waited = isinstance(part.op.work, TokenExchange)
            if waited and part.op.phase != "recompute":
                exchanges[part.op.name] = seconds, rate
                continue
            alone[region] = alone.get(region, 0.0) + seconds
            late[region] = late.get(region, 0.0) + (seconds if waited else seconds / rate)
        return cls(alone, late, exchanges)

    def slot(self, name: str, unbound: str = "", bound: str = "", exchange: str = "") -> Slot:
        """A slot of regions, whose names commas part."""
        first, then = (tuple(part.strip() for part in names.split(",") if part) for names in (unbound, bound))
        before, after = (
            sum((self.alone.get(region, np.zeros(())) for region in each), np.zeros(())) for each in (first, then)
        )
        late = sum((self.late.get(region, np.zeros(())) for region in (*first, *then)), np.zeros(()))
        moved, rate = self.exchanges.get(exchange, (np.zeros(()), np.ones(())))
        share = np.where(late > 0, quotient(before + after, late), 1.0)  # an empty slot
        return Slot(name, before, after, moved, share, rate)

    def opposite_phases(self) -> TwoStreams:
        """Slots of the forward pass of one micro-batch and the backward pass of another."""
        begin = self.slot("attention", bound="attention", exchange="combine backward")
        further = (
            self.slot("attention and its weights", "attention W", "attention", "combine backward"),
            self.slot("experts backward", "shared in B, shared out B", "experts B", "dispatch"),
            self.slot(
                "experts and their weights",
                "experts W, shared in W, shared out W, shared in, shared out",
                "experts",
                "dispatch backward",
            ),
            self.slot("attention backward", bound="attention B", exchange="combine"),
        )
        # the first slot of the first layer has no weights of a layer before
        return TwoStreams((begin, *further[1:]), further, (self.slot("last weights", "attention W"),))

    def two_batches(self) -> TwoStreams:
        """Slots of the forward passes of two micro-batches in turns."""
        begin, first = self.slot("attention of 1 first", bound="attention"), "shared in, shared out"
        further = (
            self.slot("attention of 1", bound="attention", exchange="combine"),
            self.slot("attention of 2", bound="attention", exchange="dispatch"),
            self.slot("experts of 1", first, "experts", "dispatch"),
            self.slot("experts of 2", first, "experts", "combine"),
        )
        return TwoStreams((begin, *further[1:]), further, (self.slot("last combine", exchange="combine"),))

    def in_one_kernel(self, tiles: Floats) -> TwoStreams:
        """Slots of a forward pass whose experts are one kernel: its fill, tiles and drain."""
        late, alone = self.late.get("experts", np.zeros(())), self.alone.get("experts", np.zeros(()))
        rate = np.where(late > 0, quotient(alone, late), 1.0)
        moves = [self.exchanges.get(name, (np.zeros(()), np.ones(()))) for name in ("dispatch", "combine")]
        slots = [self.slot("attention", bound="attention")]
        for part in tile_parts(tiles):
            shares = (part.arriving, part.leaving)
            moved = [share * seconds for share, (seconds, _) in zip(shares, moves, strict=True)]
            beside = sum((time / pace for time, (_, pace) in zip(moved, moves, strict=True)), np.zeros(()))
            total = np.asarray(moved[0] + moved[1])
            pace = np.where(beside > 0, quotient(total, beside), 1.0)
            slots.append(Slot(f"experts, {part.name}", 0.0, part.computed * alone, total, rate, pace))
        slots.append(self.slot("shared", bound="shared in, shared out"))
        return TwoStreams(tuple(slots), tuple(slots))

    def beside_shared(self, *, forward: bool) -> TwoStreams:
        """Slots of a pass of one micro-batch: each GEMM of shared experts beside an exchange."""
        if forward:
            slots = (
                self.slot("attention", bound="attention"),
                self.slot("shared in", "shared in", exchange="dispatch"),
                self.slot("experts", bound="experts"),
                self.slot("shared out", "shared out", exchange="combine"),
            )
        else:
            slots = (
                self.slot("shared out backward", "shared out B, shared out W", exchange="combine backward"),
                self.slot("experts backward", bound="experts B, experts W"),
                self.slot("shared in backward", "shared in B, shared in W", exchange="dispatch backward"),
                self.slot("attention backward", bound="attention B, attention W"),
            )
        return TwoStreams(slots, slots)


def regions(ops: Sequence[Op]) -> Iterator[str]:
    """Yield the region of each operator of a layer with experts; of an exchange its own name.

    Backward ones end in B, or in W where they make gradients of weights.
    """
    passed, named = {True: 0, False: 0}, dict[str, str]()
    for op in ops:
        forward = op.phase == "forward"
        if op.phase == "recompute":
            # as its forward twin; what has none belongs to the experts
            yield f"{named.get(op.name.removesuffix(AGAIN), 'experts')} B"
        elif isinstance(op.work, TokenExchange):
            passed[forward] += 1
            yield op.name
        else:
            # after as many exchanges
            region = "attention" if op.name == _AFTER_COMBINE else _REGIONS[forward][passed[forward]]
            if region == "shared":
                region = "shared out" if op.name.startswith(_SECOND) else "shared in"
            named |= {op.name: region} if forward else {}  # forward operators come first
            yield region if forward else f"{region} {'W' if op.weight else 'B'}"
