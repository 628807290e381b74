"""One iteration from its blocks: how operators, collectives, stages and the optimizer follow one another.

Compute and the collectives of tp are one chain: what follows an all-reduce needs its sum. The gradients of a block are
reduced over dp as soon as they are there, while the backward pass goes on with the blocks before it (a bucket for each
block, on wires of their own); what of that ends after the backward pass is exposed. With c_j seconds for the bucket of
one of the n_j blocks j, in the order of the backward pass, and r_jk when the k-th of them is ready,

    exposed = max over j, k of (r_jk + (n_j - k + 1) c_j + sum over i > j of n_i c_i) - end of the backward pass

(the completion of a queue), which among equal blocks is largest at k = 1 or k = n_j. Where both slow each other down
(`simulators.steps.contention`), an engine runs them instead. Pipelines (pp > 1) take m turns of the busiest stage for m
micro-batches, and a bubble (`simulators.steps.pipelines`); the busiest stage has layers / pp, rounded up, and embedding
or output, whichever is longer. Only the last micro-batch's backward pass hides the reduction over dp, unless gradients
are split (`simulators.steps.sharded_data`). A framework that launches kernels one by one takes no less for the passes
of a micro-batch than its host for their launches. Low-precision copies of weights that are made just in time lengthen
the turn of each micro-batch, and those that are stored the update (`simulators.steps.quantised`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.collective import CollectiveCost, Pattern
from simulators.steps.beside_weights import beside_weights
from simulators.steps.contention import Bucket, Contended, Reduction, Slowdowns, exposed_s
from simulators.steps.context import expose_rings
from simulators.steps.exchanges import Beside, LayersBeside
from simulators.steps.launches import Stretch, drained_s
from simulators.steps.operators import (
    Axis,
    Block,
    Exchange,
    Op,
    Part,
    Platform,
    Spent,
    Stream,
    collective,
    num_kernels,
    operator_costs,
    quotient,
)
from simulators.steps.pipelines import StageTurns, overlaps
from simulators.steps.quantised import Made, Quantising, copy_costs
from simulators.steps.sharded_data import SplitLayers
from simulators.steps.sites import Place, Scheduled, places
from simulators.steps.token_splits import beside_sums, hidden_s
from simulators.workloads.model import Optimizer, Parallel, Run

Floats = NDArray[np.float64]

ENDS = ("embedding", "output")
"""Blocks of which a stage of a pipeline holds one at most."""


def stage_share(count: ArrayLike, pp: ArrayLike) -> Floats:
    """Share of equal blocks that the busiest of pp stages has: whole blocks, one more than others where pp does not
    divide their number.
    """
    blocks = np.asarray(count, float)
    with np.errstate(all="ignore"):
        return np.where(blocks > 0, np.ceil(np.round(blocks / np.asarray(pp, float), 9)) / blocks, 1.0)


@dataclass(frozen=True)
class Iteration:
    """An iteration of a model, on the GPU of its busiest stage. Times [s] are arrays over designs, or numbers.

    width: of the activations that go from stage to stage.
    weight_copies: None where products read the weights themselves. host_s: time in which the GPU waits for its host.
    contended: the GPU as contention between reductions of gradients and the backward pass sees it; None for none.
    scheduled: the schedules of its sites; None where all are serial.
    host_launch_s, host_batch_s: time of the host for the launch of one kernel, and for a micro-batch before its passes.
    tied: weights of a GPU that the first and the last stage of a pipeline share. shard_copies: passes over weights
    after they are gathered, and over gradients before they are reduced, of those that dp splits. beside: exchanges of
    experts beside other work; None where all waits for them.
    """

    blocks: tuple[Block, ...]
    width: ArrayLike
    platform: Platform
    run: Run
    parallel: Parallel
    optimizer: Optimizer
    weight_copies: Quantising | None = None
    host_s: ArrayLike = 0.0
    contended: Contended | None = None
    scheduled: Scheduled | None = None
    host_launch_s: ArrayLike = 0.0
    host_batch_s: ArrayLike = 0.0
    tied: ArrayLike = 0.0
    shard_copies: tuple[ArrayLike, ArrayLike] = (0.0, 0.0)
    beside: Beside | None = None

    @property
    def is_training(self) -> bool:
        """True if weights are updated."""
        return self.run.mode == "training"

    @property
    def micro_batches(self) -> Floats:
        """m."""
        return np.asarray(self.run.micro_batches, float)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Operators of the busiest stage, in order."""
        ops = [(op, block) for block in self.blocks for op in block.ops]
        costs = self._costs([op for op, _ in ops])
        block_seconds: dict[str, Any] = {}
        for (op, block), cost in zip(ops, costs, strict=True):
            block_seconds[block.name] = block_seconds.get(block.name, 0.0) + cost.seconds * np.asarray(op.count)
        shares = self._shares(block_seconds)
        return tuple(
            Part(op, block, cost, np.asarray(op.count, float) * np.asarray(block.count, float) * shares[block.name])
            for (op, block), cost in zip(ops, costs, strict=True)
        )

    def _costs(self, ops: Sequence[Op]) -> list[Spent]:
        """Cost of each operator once; of halves of tokens beside the sums of the other half."""
        platform = self.platform if self.beside is None else self.beside.of_gemms
        costs = expose_rings(ops, operator_costs(ops, platform))
        halves = [place for place, op in enumerate(ops) if op.half]
        if self.parallel.backward_sums == "beside_weights":
            costs = beside_weights(ops, costs, self.platform.interference)
        if self.scheduled is not None:
            for at in self.site_places():
                for place, cost in self.scheduled.costs(ops, costs, self.platform, at).items():
                    costs[place] = cost
        if not halves:
            return costs
        few = operator_costs(ops, replace(self.platform, taken=self.parallel.split_ctas))
        computing = [place for place in halves if not isinstance(ops[place].work, Exchange)]
        sums = [costs[place].seconds for place in halves if place not in computing]
        alone, granted = ([cost[at].seconds for at in computing] for cost in (costs, few))
        slowed = beside_sums(alone, granted, sums, interference=self.platform.interference)
        for place, seconds in zip(computing, slowed, strict=True):
            costs[place] = replace(costs[place], seconds=seconds)
        return costs

    def site_places(self) -> Iterator[Place]:
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
    def comm_cu_s(self) -> Floats:
        """CU-seconds that kernels of collectives hold in all micro-batches; 0 where the machine's are not known."""
        passes: Any = np.zeros(())
        for part in (part for part in self.parts if part.over is not None):
            held = part.spent.comm_cu_s
            passes = passes + part.times * (self._kernel_cus(part.op) * part.spent.seconds if held is None else held)
        return np.asarray(self.micro_batches * passes + self._copy_cus * (self.dp_s + self.gathered_s))

    def _kernel_cus(self, op: Op) -> Any:
        """CUs of the kernel of a collective."""
        assert isinstance(op.work, Exchange)
        rate = self.platform.groups[op.work.over].switched(op.work.pattern)
        return op.work.ctas or (self._copy_cus if rate is None else rate.num_ctas)

    @property
    def _copy_cus(self) -> Any:
        copy = None if self.contended is None else self.contended.copy
        return 0 if copy is None else copy.num_cus

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
        shares = {block.name: stage_share(block.count, pp) for block in self.blocks}
        first, last = (seconds.get(name, np.zeros(())) for name in ENDS)
        longer = {"embedding": first > last, "output": first <= last}
        return shares | {name: np.where(pp > 1, longer[name], 1.0) for name in ENDS if name in shares}

    @cached_property
    def counts(self) -> dict[str, Floats]:
        """Number of times that each block comes in the busiest stage."""
        return {part.block.name: part.times / np.asarray(part.op.count) for part in self.parts}

    def of_blocks(self, attribute: str) -> Floats:
        """Sum of a number of the blocks over those of the stage."""
        terms = (np.asarray(getattr(block, attribute)) * self.counts[block.name] for block in self.blocks)
        return np.asarray(sum(terms), float)

    def sum(self, parts: Iterable[Part]) -> Floats:
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

    @cached_property
    def message_s(self) -> Floats:
        """Time of one micro-batch's activations to the next stage."""
        tokens = np.asarray(self.run.batch, float) * (1 if self.run.mode == "decode" else self.run.sequence_length)
        whole = self.run.element_bytes * tokens / self.parallel.cp * np.asarray(self.width, float)
        shared = self.parallel.scatter_gather or self.parallel.sequence_parallel
        if not shared:
            return self._exchange_s("pp", whole, "send_recv")
        sent = self._exchange_s("pp", whole / np.asarray(self.parallel.tp, float), "send_recv")
        if self.parallel.sequence_parallel:  # each GPU needs its own tokens alone
            return sent
        several = np.asarray(self.parallel.pp, float) > 1
        return np.asarray(sent + several * self._exchange_s("tp", whole, "all_gather"))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Reductions of gradients over dp."""
        if not self.is_training:
            return ()
        return tuple(self._bucket(block) for block in reversed(self.blocks))

    def _bucket(self, block: Block) -> Bucket:
        count = self.counts[block.name]
        ready = self._once(block, forward=False)
        held = (self.parallel.held_stages * np.asarray(size) for size in (block.params, block.expert_params))
        seconds = np.zeros(()) if self.parallel.zero > 1 else self._reduction(*held).seconds
        return Bucket(block, count, seconds, ready)

    def _once(self, block: Block, *, forward: bool) -> Floats:
        """Time of a pass of one block; 0 where the stage has none."""
        count = self.counts[block.name]
        seconds = self.sum(part for part in self.parts if part.block is block and part.forward == forward)
        shared = [layers for layers in self.layers_beside if layers.block == block.name and len(layers.streams) > 1]
        hidden = sum((layers.streams[not forward].saved_s(count) for layers in shared), np.zeros(()))
        return quotient(seconds - hidden, count)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient."""
        return self.parallel.gradient_bytes or self.run.element_bytes

    def _split_exchange(self, size: int, params: Any, of_experts: Any, pattern: Pattern) -> CollectiveCost:
        """Cost of a collective of weights over dp, and of experts' over the GPUs that have the same.

        size: bytes of an element.
        """
        expert_params = np.asarray(of_experts, float)
        groups, shared = self.platform.groups, size * (np.asarray(params, float) - expert_params)
        cost = collective(Exchange(pattern, shared, "dp"), groups["dp"])
        if not np.any(expert_params > 0):
            return cost
        return cost.then(collective(Exchange(pattern, size * expert_params, "edp"), groups["edp"]))

    @property
    def own_params(self) -> Floats:
        """Weights whose optimizer's state is this GPU's: its share of them where zero splits it."""
        params, of_experts = self.of_blocks("params"), self.of_blocks("expert_params")
        if not self.parallel.zero:
            return self.parallel.held_stages * params
        return np.asarray(
            (params - of_experts) / self.parallel.replicas + of_experts / self.parallel.expert_replicas, float
        )

    def weight_bytes(self, block: Block) -> Floats:
        """Bytes of the weights of one block."""
        return np.asarray(self.run.element_bytes * np.asarray(block.params, float))

    def _exchange_s(self, over: Axis, payload: Any, pattern: Pattern) -> Floats:
        return collective(Exchange(pattern, payload, over), self.platform.groups[over]).seconds

    def _reduction(self, params: ArrayLike, of_experts: ArrayLike) -> CollectiveCost:
        """Cost of a reduction of the gradients of so many weights, of which some are experts'."""
        pattern: Pattern = "all_reduce" if self.parallel.zero == 0 else "reduce_scatter"
        return self._split_exchange(self.gradient_bytes, params, of_experts, pattern)

    @cached_property
    def slowdowns(self) -> Slowdowns:
        """What reductions of gradients and the backward pass cost each other."""
        alone = self.parallel.zero > 1 or np.all(np.asarray(self.parallel.replicas) == 1)
        if self.contended is None or not self.is_training or alone:
            return Slowdowns()
        cost = self._reduction(*(self.of_blocks(name) for name in ("params", "expert_params")))
        reduction, passes = Reduction(cost.wire_bytes, cost.hbm_bytes, cost.seconds), dict[str, Floats]()
        for block in self.blocks:
            parts = [part for part in self.parts if part.block is block and not part.forward]
            beside = self.contended.beside([part.op for part in parts], [part.spent for part in parts], reduction)
            late = sum(part.times * seconds for part, seconds in zip(parts, beside, strict=True))
            free = self.sum(parts)
            passes[block.name] = np.divide(free, late, out=np.ones(np.broadcast(free, late).shape), where=free > 0)
        return Slowdowns(passes, self.contended.reductions(reduction))

    @cached_property
    def dp_s(self) -> Floats:
        """All exchanges of gradients, and of split weights."""
        split = self.micro_batches * sum((layers.exchanged_s(self.parallel) for layers in self.sharded), np.zeros(()))
        return np.asarray(sum((bucket.count * bucket.seconds for bucket in self.buckets), split))

    @cached_property
    def sharded(self) -> tuple[SplitLayers, ...]:
        """Blocks whose weights or gradients are split over dp; none below ZeRO 2."""
        if not self.is_training or self.parallel.zero < 2:
            return ()
        return tuple(self._sharded(block) for block in self.blocks)

    def _sharded(self, block: Block) -> SplitLayers:
        count = self.counts[block.name]
        forward, backward = (self._once(block, forward=forward) for forward in (True, False))
        params = block.params, block.expert_params
        gather = self._split_exchange(self.run.element_bytes, *params, "all_gather").seconds
        layers = SplitLayers(count, forward, backward, gather, self._reduction(*params).seconds)
        out, into = (self._copied_s(block, passes) for passes in self.shard_copies)
        return replace(layers, gather_copy_s=out, reduce_copy_s=into, interference=self.platform.interference)

    def _copied_s(self, block: Block, passes: ArrayLike) -> Floats:
        """Time of passes over the weights of one block, where dp splits them."""
        several = np.asarray(self.parallel.replicas, float) > 1
        work = Stream(np.asarray(passes) * self.weight_bytes(block), kernels=np.asarray(passes) > 0)
        (cost,) = operator_costs([Op("copies", "optimizer", "backward", work)], self.platform)
        return np.asarray(several * cost.seconds)

    @cached_property
    def split_s(self) -> Floats:
        """Time by which exchanges of split weights and gradients lengthen the passes of one micro-batch."""
        longer = (seconds for layers in self.sharded for seconds in layers.exposed_s(self.parallel))
        slowed = (layers.slowed_s(self.parallel) for layers in self.sharded)
        return np.asarray(sum(longer, np.zeros(())) + sum(slowed, np.zeros(())))

    @cached_property
    def exposed_s(self) -> Floats:
        """Time by which reductions end after the backward pass would alone, and what they lengthen it by."""
        if self.parallel.zero > 1:
            return np.zeros(())
        if self.parallel.reductions == "after":
            return self.dp_s
        longer = exposed_s(self.buckets, self.slowdowns) if self.slowdowns else self._exposed_without_contention
        return np.where(np.asarray(self.parallel.replicas) == 1, 0.0, longer)  # which has no others to reduce with

    @property
    def _exposed_without_contention(self) -> Floats:
        """Time of reductions that end after the backward pass, as the completion of a queue."""
        ready: Any = np.zeros(())
        left, ends = self.dp_s, [np.zeros(())]
        for bucket in self.buckets:
            present = bucket.count > 0
            ends.append(np.where(present, ready + bucket.ready + left, 0.0))
            ready = ready + bucket.count * bucket.ready
            left = left - bucket.count * bucket.seconds
            ends.append(np.where(present, ready + left + bucket.seconds, 0.0))
        return np.asarray(np.maximum(np.maximum.reduce(np.broadcast_arrays(*ends)) - ready, 0.0))

    @cached_property
    def update(self) -> Spent:
        """The optimizer's update, of the weights of this GPU or of its share of them."""
        params, optimizer = self.own_params, self.optimizer
        by_weight = optimizer.bytes_at(self.run.precision)
        moved = params * by_weight[0] if self.is_training and by_weight else np.zeros(())
        kernels = self.of_blocks("tensors") * optimizer.kernels_per_tensor
        work = Stream(moved / optimizer.near_memory, optimizer.flop * params / optimizer.near_memory, kernels)
        (cost,) = operator_costs([Op("update", "optimizer", "optimizer", work)], self.platform)
        seconds = cost.seconds if self.is_training else np.zeros(())
        return Spent(optimizer.flop * params, np.asarray(moved, float), 0 * params, seconds)

    @cached_property
    def gathered_s(self) -> Floats:
        """The weights that each GPU has updated, to all of dp, where the optimizer's state is split."""
        if not self.is_training or self.parallel.zero not in (1, 2):
            return np.zeros(())
        params, of_experts = (self.parallel.held_stages * self.of_blocks(name) for name in ("params", "expert_params"))
        return self._split_exchange(self.run.element_bytes, params, of_experts, "all_gather").seconds

    @cached_property
    def copies(self) -> Made:
        """Costs that low-precision copies of weights add."""
        return copy_costs(self)

    @cached_property
    def slot_s(self) -> Floats:
        """One micro-batch's turn in a pipeline, with its messages."""
        return self.turns.turn_s(self.parallel)

    @cached_property
    def messages_s(self) -> Floats:
        """Messages of one micro-batch that its operators wait for."""
        return np.asarray(self.slot_s - np.asarray(self.turns.busy_s))

    @cached_property
    def bubble_s(self) -> Floats:
        """Time that a stage waits for others."""
        return self.turns.bubble_s(self.parallel)

    @cached_property
    def launch_wait_s(self) -> Floats:
        """Time of one micro-batch in which the GPU waits for its host."""
        if not np.any(np.asarray(self.host_launch_s) > 0):
            return np.asarray(self.host_batch_s, float)
        forward, backward = (self._stretches(self.counts, forward=forward) for forward in (True, False))
        whole = drained_s(forward) + drained_s(backward)
        return np.asarray(self.host_batch_s + np.maximum(whole - self._gpu_s, 0.0))

    @property
    def _gpu_s(self) -> Floats:
        return np.asarray(self.forward_s + self.backward_s - self.saved_s + self.split_s + self.copies.slot_s)

    def _stretches(self, counts: Mapping[str, ArrayLike], *, forward: bool) -> list[Stretch]:
        """Launches and run of a pass of one micro-batch through so many of each block, block by block."""
        stretches = []
        for block in self.blocks if forward else self.blocks[::-1]:
            parts = [part for part in self.parts if part.block is block and part.forward == forward]
            times = [(part, np.asarray(part.op.count, float) * np.asarray(counts[block.name])) for part in parts]
            kernels = sum((num_kernels(part.op, self.parallel.tp) * count for part, count in times), np.zeros(()))
            run = sum((part.spent.seconds * count for part, count in times), np.zeros(()))
            stretches.append((np.asarray(self.host_launch_s, float) * kernels, run))
        return stretches

    @cached_property
    def turns(self) -> StageTurns:
        """Times of one micro-batch on the busiest stage and on the others."""
        pp = np.asarray(self.parallel.pp, float)
        busy = self._gpu_s + self.launch_wait_s
        alone = self.is_training and self.parallel.exchanges == "two_micro_batches"  # while a pipeline fills
        saved = self.hidden_s + (0.0 if alone else self.saved_s)
        others = self._others_s() + (pp - 1) * (self.split_s + self.copies.slot_s - saved)
        backward = [part for part in self.parts if not part.forward]
        weights, inputs = (self._elsewhere(part for part in backward if part.op.weight == of) for of in (True, False))
        weights = np.minimum(weights, inputs)
        directions = 2 if self.is_training else 1
        turns = StageTurns(busy, others, weights, self.message_s, pp, self.micro_batches, directions)
        return replace(turns, chunks=self._chunks()) if self.parallel.pipeline == "dualpipe" else turns

    def _chunks(self) -> tuple[Floats, Floats, Floats]:
        """A pair of a forward and a backward pass, a backward pass, and its gradients of weights."""
        pair = np.asarray(self.forward_s + self.backward_s - self.pair_saved_s)
        return pair, self.backward_s, self.sum(part for part in self.parts if part.op.weight)

    def _others_s(self) -> Floats:
        """Passes of one micro-batch through the other stages, whose hosts prepared it while they waited for it."""
        left = {block.name: np.asarray(block.count) - self.counts[block.name] for block in self.blocks}
        passes = (self._stretches(left, forward=forward) for forward in (True, False))
        return np.asarray(sum((drained_s(stretches) for stretches in passes), np.zeros(())))

    def _elsewhere(self, parts: Iterable[Part]) -> Floats:
        """Time of operators of one micro-batch on the other stages."""
        whole = ((part, np.asarray(part.op.count, float) * np.asarray(part.block.count, float)) for part in parts)
        return np.asarray(sum((part.spent.seconds * (all_ - part.times) for part, all_ in whole), np.zeros(())))

    @cached_property
    def tied_s(self) -> Floats:
        """The sum of the gradients of an embedding that the first and the last stage both hold."""
        if not self.is_training:
            return np.zeros(())
        return self._exchange_s("pp", self.gradient_bytes * np.asarray(self.tied, float), "all_reduce")

    @cached_property
    def seconds(self) -> Floats:
        """The iteration."""
        turns = self.micro_batches * self.slot_s + self.bubble_s
        ends = self.exposed_s + self.tied_s + self.update.seconds + self.gathered_s + self.copies.update_s
        return np.asarray(turns + ends + self.host_s)
