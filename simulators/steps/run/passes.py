"""Passes of one micro-batch through the busiest stage of a model: its operators, what each takes, and how often.

The busiest stage has layers / pp, rounded up, and embedding or output, whichever is longer. Where both ends count as
layers (`parallel.ends`), a stage has n = (layers + 2) / pp of all these, rounded up: the busiest one has n layers, or
one less and an end, whichever is longest (with two stages, both have an end). Where stages are balanced, it is the
longest of `simulators.steps.run.stages`. Compute and the collectives of tp are one chain: what follows an all-reduce
needs its sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.steps.operators.context_parallel import expose_rings
from simulators.steps.operators.quantised_weights import CopyCosts, WeightQuantiser, copy_costs
from simulators.steps.operators.work import (
    Exchange,
    ModelBlock,
    Op,
    OperatorCost,
    Platform,
    StageOperator,
    operator_costs,
    quotient,
)
from simulators.steps.overlap.expert_exchanges import LayersBeside, OverlappedExchanges
from simulators.steps.overlap.sites import SitePlace, SiteSchedules, places
from simulators.steps.overlap.token_splits import LibrarySums, beside_sums, hidden_s
from simulators.steps.run.stages import BalancedStages, balanced_stages, stage_share
from simulators.steps.spread.pipelines import overlaps
from simulators.workloads.model import Optimizer, Parallel, Run

Floats = NDArray[np.float64]

ENDS = ("embedding", "output")
"""Blocks of which a stage of a pipeline holds one at most."""


@dataclass(frozen=True)
class MicroBatch:
    """Passes of one micro-batch of a model, on the GPU of its busiest stage. Times [s] are arrays over designs.

    weight_copies: None where products read the weights themselves. scheduled: the schedules of its sites; None where
    all are serial. beside: exchanges of experts beside other work; None where all waits for them. library_sums: of
    halves of tokens; None where the switch adds, or prompts are whole.
    """

    blocks: tuple[ModelBlock, ...]
    platform: Platform
    run: Run
    parallel: Parallel
    optimizer: Optimizer
    weight_copies: WeightQuantiser | None = None
    scheduled: SiteSchedules | None = None
    beside: OverlappedExchanges | None = None
    library_sums: LibrarySums | None = None

    @property
    def is_training(self) -> bool:
        """True if weights are updated."""
        return self.run.mode == "training"

    @property
    def micro_batches(self) -> Floats:
        """m; of a prompt in chunks, passes of all of them."""
        return np.asarray(self.run.passes, float)

    @cached_property
    def parts(self) -> tuple[StageOperator, ...]:
        """Operators of the busiest stage, in order."""
        shares = self._shares(self._block_seconds)
        return tuple(
            StageOperator(
                op, block, cost, np.asarray(op.count, float) * np.asarray(block.count, float) * shares[block.name]
            )
            for op, block, cost in self._costed
        )

    @cached_property
    def _costed(self) -> tuple[tuple[Op, ModelBlock, OperatorCost], ...]:
        """Operators of all blocks with their block and cost."""
        ops = [(op, block) for block in self.blocks for op in block.ops]
        costs = self._costs([op for op, _ in ops])
        return tuple((op, block, cost) for (op, block), cost in zip(ops, costs, strict=True))

    @cached_property
    def _block_seconds(self) -> dict[str, Any]:
        """Time of one of each block, to find the longest stage."""
        seconds: dict[str, Any] = {}
        for op, block, cost in self._costed:
            seconds[block.name] = seconds.get(block.name, 0.0) + cost.seconds * np.asarray(op.count)
        return seconds

    def _costs(self, ops: Sequence[Op]) -> list[OperatorCost]:
        """Cost of each operator once; of halves of tokens beside the sums of the other half."""
        platform = self.platform if self.beside is None else self.beside.of_gemms
        interference = self.platform.sharing.interference
        costs = expose_rings(ops, operator_costs(ops, platform), interference)  # schedules touch no rings
        halves = [place for place, op in enumerate(ops) if op.half]
        if self.parallel.backward_sums == "beside_weights":
            costs = beside_weights(ops, costs, interference)
        if self.scheduled is not None:
            for at in self.site_places():
                for place, cost in self.scheduled.costs(ops, costs, self.platform, at).items():
                    costs[place] = cost  # schedules replace the GEMM and the collective of a site
        return self._of_halves(ops, costs, halves) if halves else costs

    def _of_halves(self, ops: Sequence[Op], costs: list[OperatorCost], halves: Sequence[int]) -> list[OperatorCost]:
        """Costs of operators of which those at the places `halves` run beside the sums of the other half."""
        for place in (place for place in halves if isinstance(ops[place].work, Exchange)):
            costs[place] = costs[place] if self.library_sums is None else self.library_sums.cost(costs[place])
        # kernels that overlap a sum run on the CUs that its CTAs leave
        few = operator_costs(ops, self.platform.with_held(self.parallel.split_ctas))
        computing = [place for place in halves if not isinstance(ops[place].work, Exchange)]
        sums = [costs[place].seconds for place in halves if place not in computing]
        alone, granted = ([cost[at].seconds for at in computing] for cost in (costs, few))
        slowed = beside_sums(alone, granted, sums, sharing=self.platform.sharing)
        for place, seconds in zip(computing, slowed, strict=True):
            costs[place] = replace(costs[place], seconds=seconds)
        return costs

    def site_places(self) -> Iterator[SitePlace]:
        """Places of sites among the operators of all blocks."""
        offset = 0
        for block in self.blocks:
            yield from (place.at(offset) for place in places(block.ops))
            offset += len(block.ops)

    @cached_property
    def exchanged_s(self) -> Floats:
        """Collectives of one micro-batch's passes."""
        return self.sum(part for part in self.parts if part.over is not None)

    @cached_property
    def computed_s(self) -> Floats:
        """Everything else of one micro-batch's passes."""
        return self.sum(part for part in self.parts if part.over is None)

    @cached_property
    def hidden_s(self) -> Floats:
        """Time of one micro-batch's sums during which the other half of the tokens computes."""
        parts = [part for part in self.parts if part.op.half]
        if not parts:
            return np.zeros(())
        turns = [(part.op.half, part.over is not None, part.spent.seconds) for part in parts]
        return hidden_s(turns, self.counts[parts[0].block.name])

    @cached_property
    def layers_beside(self) -> tuple[LayersBeside, ...]:
        """Blocks whose exchanges of experts run beside other work."""
        return () if self.beside is None else self.beside.layers(self.parts, training=self.is_training)

    @cached_property
    def pair_saved_s(self) -> Floats:
        """Time that one pair of micro-batches, or one micro-batch, saves as exchanges run beside other work."""
        return np.asarray(sum((layers.saved_s for layers in self.layers_beside), np.zeros(())))

    @cached_property
    def saved_s(self) -> Floats:
        """The same for each micro-batch, on average."""
        knobs, m = self.parallel, self.micro_batches
        return np.asarray(self.pair_saved_s * overlaps(knobs, knobs.pp, m, training=self.is_training))

    def _shares(self, seconds: Mapping[str, Floats]) -> dict[str, Floats]:
        """Share of each block's `count` that the busiest stage has."""
        pp = np.asarray(self.parallel.pp, float)
        first, last = (seconds.get(name, np.zeros(())) for name in ENDS)
        if self.parallel.ends == "layers":
            return self._shares_with_ends(seconds, first, last)
        if self.parallel.ends == "balanced":
            return self._shares_of_balanced()
        shares = {block.name: stage_share(block.count, pp) for block in self.blocks}
        # the stage with the longer of both ends is the busiest
        longer = {"embedding": first > last, "output": first <= last}
        # a single stage has both
        return shares | {name: np.where(pp > 1, longer[name], 1.0) for name in ENDS if name in shares}

    def _shares_with_ends(self, seconds: Mapping[str, Floats], first: Floats, last: Floats) -> dict[str, Floats]:
        """The same where both ends count as layers."""
        pp = np.asarray(self.parallel.pp, float)
        inner = [block for block in self.blocks if block.name not in ENDS]
        block_s = sum((np.asarray(block.count, float) * seconds[block.name] for block in inner), np.zeros(()))
        within, at_end = np.where(pp > 1, self._shares_of_layers, 1.0)
        longest = np.maximum(first, last)
        # of two stages, none is without an end
        middle = (pp > 2) & ((within - at_end) * block_s > longest)
        ends = {"embedding": first > last, "output": first <= last}
        shares = {block.name: np.where(middle, within, at_end) for block in inner}
        return shares | {name: np.where(pp > 1, ~middle & ends[name], 1.0) for name in ENDS}

    def _shares_of_balanced(self) -> dict[str, Floats]:
        """The same where stages are balanced."""
        several, stages = np.asarray(self.parallel.pp, float) > 1, self._balanced
        within = np.where(several, stages.longest / self._layers, 1.0)
        shares = {block.name: within for block in self.blocks if block.name not in ENDS}
        longest = dict(zip(ENDS, (stages.first_is_longest, stages.last_is_longest), strict=True))
        return shares | {name: np.where(several, longest[name], 1.0) for name in ENDS}

    @cached_property
    def _balanced(self) -> BalancedStages:
        """Layers of balanced stages, from the times of one layer on average and of both ends."""
        seconds = self._block_seconds
        inner = [block for block in self.blocks if block.name not in ENDS]
        layers_s = sum((np.asarray(block.count, float) * seconds[block.name] for block in inner), np.zeros(()))
        first, last = (seconds[name] * self._layers / layers_s for name in ENDS)
        return balanced_stages(self._layers, first, last, self.parallel.pp)

    @property
    def _layers(self) -> Floats:
        """All layers between both ends."""
        return sum((np.asarray(block.count, float) for block in self.blocks if block.name not in ENDS), np.zeros(()))

    @property
    def _shares_of_layers(self) -> Floats:
        """Shares [2] of all layers of a stage without an end, and of one with an end that counts as a layer."""
        layers = self._layers
        most = np.ceil(np.round((layers + len(ENDS)) / np.asarray(self.parallel.pp, float), 9))
        return np.asarray(np.stack([np.minimum(most, layers), np.clip(most - 1, 0, layers)]) / layers)

    def share_at_end(self, end: str, count: ArrayLike) -> Floats:
        """Share of equal blocks between both ends that the stage of one of `ENDS` has."""
        pp = np.asarray(self.parallel.pp, float)
        if self.parallel.ends == "beside":
            return stage_share(count, pp)
        if self.parallel.ends == "layers":
            return np.where(pp > 1, self._shares_of_layers[1], 1.0)
        stages = dict(zip(ENDS, (self._balanced.first, self._balanced.last), strict=True))
        return np.where(pp > 1, stages[end] / self._layers, 1.0)

    @cached_property
    def counts(self) -> dict[str, Floats]:
        """Number of times that each block comes in the busiest stage."""
        return {part.block.name: part.times / np.asarray(part.op.count) for part in self.parts}

    def of_blocks(self, attribute: str) -> Floats:
        """Sum of a number of the blocks over those of the stage."""
        terms = (np.asarray(getattr(block, attribute)) * self.counts[block.name] for block in self.blocks)
        return np.asarray(sum(terms), float)

    def sum(self, parts: Iterable[StageOperator]) -> Floats:
        """Time of some parts in a pass over one micro-batch."""
        return np.asarray(sum(part.seconds for part in parts), float)

    @cached_property
    def forward_s(self) -> Floats:
        """The forward pass of one micro-batch, with its collectives."""
        return np.asarray(self.sum(part for part in self.parts if part.forward) - self.hidden_s)

    @cached_property
    def backward_s(self) -> Floats:
        """The backward pass of one micro-batch, with its collectives and what is recomputed."""
        return self.sum(part for part in self.parts if not part.forward)

    def once(self, block: ModelBlock, *, forward: bool) -> Floats:
        """Time of a pass of one block; 0 where the stage has none."""
        count = self.counts[block.name]
        seconds = self.sum(part for part in self.parts if part.block is block and part.forward == forward)
        # a stream for each pass of one micro-batch: pairs are counted elsewhere
        shared = [layers for layers in self.layers_beside if layers.block == block.name and len(layers.streams) > 1]
        # forward is stream 0
        hidden = sum((layers.streams[not forward].saved_s(count) for layers in shared), np.zeros(()))
        return quotient(seconds - hidden, count)  # a block that the stage does not have takes no time

    def weight_bytes(self, block: ModelBlock) -> Floats:
        """Bytes of the weights of one block."""
        return np.asarray(self.run.element_bytes * np.asarray(block.params, float))

    @cached_property
    def copies(self) -> CopyCosts:
        """Costs that low-precision copies of weights add."""
        return copy_costs(self)


def beside_weights(ops: Sequence[Op], costs: Sequence[OperatorCost], interference: ArrayLike) -> list[OperatorCost]:
    """Costs of operators of which each backward sum runs beside the gradient of weights that follows it at once.

    The sum of an input's gradients over tp (all-reduce, or reduce-scatter of sequence parallelism) is launched before
    the gradient of the same layer's weights, which does not need it. With c the sum's time, w the product's alone, and
    f the slowdown of kernels while others move data (`gpu.contention.gemm_beside_cus`), both end after

        T = max(c, w + (f - 1) min(c, w))

    of which w counts as the product's and the rest as the sum's (derived; Megatron-LM's asynchronous all-reduce,
    `megatron/mpu/layers.py` of NVIDIA/Megatron-LM at 189e72a).
    """
    result = list(costs)
    for place, (op, following) in enumerate(itertools.pairwise(ops)):
        if isinstance(op.work, Exchange) and op.work.over == "tp" and op.phase == "backward" and following.weight:
            summed, product = costs[place].seconds, costs[place + 1].seconds
            slowed = product + (np.asarray(interference) - 1) * np.minimum(summed, product)
            result[place] = replace(costs[place], seconds=np.maximum(summed, slowed) - product)
    return result
