"""One iteration from its blocks: how operators, collectives, stages and the optimizer follow one another.

Compute and the collectives of tp are one chain: what follows an all-reduce needs its sum. The gradients of a block are
reduced over dp as soon as they are there, while the backward pass goes on with the blocks before it (a bucket for each
block, on wires of their own); what of that ends after the backward pass is exposed. With c_j seconds for the bucket of
one of the n_j blocks j, in the order of the backward pass, and r_jk when the k-th of them is ready,

    exposed = max over j, k of (r_jk + (n_j - k + 1) c_j + sum over i > j of n_i c_i) - end of the backward pass

(the completion of a queue), which among equal blocks is largest at k = 1 or k = n_j. Where both slow each other down
(`simulators.steps.overlap.gradient_contention`), an engine runs them instead. Pipelines (pp > 1) take m turns of the
busiest stage for m micro-batches, and a bubble (`simulators.steps.spread.pipelines`); the busiest stage has layers /
pp, rounded up, and embedding or output, whichever is longer. Only the last micro-batch's backward pass hides the
reduction over dp, unless gradients are split (`simulators.steps.spread.sharded_states`). A framework that launches
kernels one by one takes no less for the passes of a micro-batch than its host for their launches; where it waits for
counts of tokens before it launches experts, no less for each layer, as its host is never ahead
(`simulators.steps.run.host_launches`). Low-precision copies of weights that are made just in time lengthen the turn of
each micro-batch, and those that are stored the update (`simulators.steps.operators.quantised_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.algorithms import Pattern
from simulators.costs.collective import CollectiveCost
from simulators.steps.operators.experts import TokenExchange
from simulators.steps.operators.state_layers import Scan
from simulators.steps.operators.work import (
    Axis,
    Exchange,
    ModelBlock,
    Op,
    OperatorCost,
    Platform,
    StageOperator,
    Stream,
    collective,
    num_kernels,
    operator_costs,
    quotient,
)
from simulators.steps.overlap.gradient_contention import (
    Bucket,
    ContendedPlatform,
    GradientReduction,
    Slowdowns,
    exposed_s,
)
from simulators.steps.run.host_launches import Stretch, drained_s
from simulators.steps.run.offload import waited_s
from simulators.steps.run.passes import MicroBatch
from simulators.steps.spread.pipelines import StageTurns
from simulators.steps.spread.sharded_states import SplitLayers
from simulators.workloads.experts import ExpertKernels

Floats = NDArray[np.float64]
_BY_PASS = ("dualpipe", "v_min")  # schedules whose turns depend on each kind of pass
_FP32 = 4  # bytes
TRAINED = ("trained_params", "trained_experts")
"""Weights of a block that have gradients, and those of experts among them."""


@dataclass(frozen=True)
class Gradients:
    """Exchanges of gradients and of split weights over dp, as far as they lengthen an iteration.

    contended: the GPU as contention between reductions and the backward pass sees it; None for none. tied: weights of a
    GPU that the first and the last stage of a pipeline share. shard_copies: passes over weights after they are
    gathered, and over gradients before they are reduced, of those that dp splits.
    """

    passes: MicroBatch
    contended: ContendedPlatform | None = None
    tied: ArrayLike = 0.0
    shard_copies: tuple[ArrayLike, ArrayLike] = (0.0, 0.0)

    @property
    def copy_cus(self) -> Any:
        """CUs of a kernel that moves gradients."""
        copy = None if self.contended is None else self.contended.copy
        return 0 if copy is None else copy.num_cus  # not known: no CU-seconds to report

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Reductions of gradients over dp."""
        if not self.passes.is_training:
            return ()
        return tuple(self._bucket(block) for block in reversed(self.passes.blocks))  # in the order of the backward pass

    def _bucket(self, block: ModelBlock) -> Bucket:
        count = self.passes.counts[block.name]
        ready = self.passes.once(block, forward=False)
        sizes = block.trained_params, block.trained_experts
        sizes_held = (self.passes.parallel.held_stages * np.asarray(size) for size in sizes)
        # reduced layer by layer, as `SplitLayers` says
        seconds = np.zeros(()) if self.passes.parallel.zero > 1 else self.reduction(*sizes_held).seconds
        return Bucket(block, count, seconds, ready)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of an element of a gradient."""
        return self.passes.run.gradient_bytes(self.passes.parallel)

    @cached_property
    def casts(self) -> OperatorCost:
        """Casts of all gradients into the format that they are reduced in, which nothing hides.

        Products write gradients of 16 or 32 bits themselves; one kernel reads them and writes any other format.
        """
        if not self.passes.is_training or self.gradient_bytes in (self.passes.run.element_bytes, _FP32):
            return OperatorCost(*np.zeros((4,)))
        params = self.passes.parallel.held_stages * self.passes.of_blocks("trained_params")
        times = self.passes.micro_batches if self.passes.parallel.zero > 1 else 1.0  # reduced after each, or the last
        moved = times * params * (self.passes.run.element_bytes + self.gradient_bytes)
        kernels = times * self.passes.of_blocks("updated_tensors")
        (cost,) = operator_costs(
            [Op("cast", "optimizer", "backward", Stream(moved, kernels=kernels))], self.passes.platform
        )
        return cost

    def split_exchange(self, size: float, params: Any, of_experts: Any, pattern: Pattern) -> CollectiveCost:
        """Cost of a collective of weights over dp, and of experts' over the GPUs that have the same.

        size: bytes of an element. Of states that fewer GPUs split, each group sums its own, and groups then add theirs.
        """
        if self.passes.parallel.shard_gpus is not None:
            return self._hybrid_exchange(size * np.asarray(params, float), pattern)
        expert_params = np.asarray(of_experts, float)
        # experts' weights are reduced over fewer GPUs
        groups, shared = self.passes.platform.groups, size * (np.asarray(params, float) - expert_params)
        cost = collective(Exchange(pattern, shared, "dp"), groups["dp"])
        if not np.any(expert_params > 0):  # no experts: one exchange
            return cost
        return cost.then(collective(Exchange(pattern, size * expert_params, "edp"), groups["edp"]))

    def _hybrid_exchange(self, payload: Floats, pattern: Pattern) -> CollectiveCost:
        """Cost of a collective of so many bytes among the GPUs that split them, and of sums among such groups."""
        knobs, groups = self.passes.parallel, self.passes.platform.groups
        cost = collective(Exchange(pattern, payload, "shard"), groups["shard"])
        if pattern == "all_gather":  # a group has all of it
            return cost
        return cost.then(collective(Exchange("all_reduce", payload / knobs.state_gpus, "repeat"), groups["repeat"]))

    @property
    def own_params(self) -> Floats:
        """Weights whose optimizer's state is this GPU's: its share of them where zero splits it."""
        params, of_experts = (self.passes.of_blocks(name) for name in TRAINED)
        if not self.passes.parallel.zero:  # each GPU updates all of its weights
            return self.passes.parallel.held_stages * params
        knobs = self.passes.parallel
        return np.asarray((params - of_experts) / knobs.state_gpus + of_experts / knobs.expert_state_gpus, float)

    def reduction(self, params: ArrayLike, of_experts: ArrayLike) -> CollectiveCost:
        """Cost of a reduction of the gradients of so many weights, of which some are experts'."""
        # with split states, each GPU needs its share of the sums only
        pattern: Pattern = "all_reduce" if self.passes.parallel.zero == 0 else "reduce_scatter"
        return self.split_exchange(self.gradient_bytes, params, of_experts, pattern)

    @cached_property
    def slowdowns(self) -> Slowdowns:
        """Slowdowns of reductions of gradients and of the backward pass by each other."""
        # exchanged layer by layer, or with nobody
        alone = self.passes.parallel.zero > 1 or np.all(np.asarray(self.passes.parallel.replicas) == 1)
        if self.contended is None or not self.passes.is_training or alone:
            return Slowdowns()
        reduction = GradientReduction.of(self.reduction(*(self.passes.of_blocks(name) for name in TRAINED)))
        passes = {
            block.name: self.contended.share(self._parts(block, forward=False), reduction)
            for block in self.passes.blocks
        }
        return Slowdowns(passes, self.contended.reductions(reduction))

    def _parts(self, block: ModelBlock, *, forward: bool) -> list[StageOperator]:
        """Operators of a pass of a block."""
        return [part for part in self.passes.parts if part.block is block and part.forward == forward]

    @cached_property
    def dp_s(self) -> Floats:
        """All exchanges of gradients, and of split weights."""
        split = self.passes.micro_batches * sum(
            (layers.exchanged_s(self.passes.parallel) for layers in self.sharded), np.zeros(())
        )
        return np.asarray(sum((bucket.count * bucket.seconds for bucket in self.buckets), split))

    @cached_property
    def sharded(self) -> tuple[SplitLayers, ...]:
        """Blocks whose weights or gradients are split over dp; none below ZeRO 2."""
        if not self.passes.is_training or self.passes.parallel.zero < 2:
            return ()
        return tuple(self._sharded(block) for block in self.passes.blocks)

    def _sharded(self, block: ModelBlock) -> SplitLayers:
        count = self.passes.counts[block.name]
        forward, backward = (self.passes.once(block, forward=forward) for forward in (True, False))
        params = block.params, block.expert_params
        gather = self.split_exchange(self.passes.run.element_bytes, *params, "all_gather")
        reduced = self.reduction(block.trained_params, block.trained_experts)
        layers = SplitLayers(count, forward, backward, gather.seconds, reduced.seconds)
        out, into = (self._copied_s(block, passes) for passes in self.shard_copies)
        layers = replace(layers, gather_copy_s=out, reduce_copy_s=into)
        if self.contended is None:
            return layers
        gathers = layers.gathers(self.passes.parallel)
        exchanges = gather.then(reduced) if gathers > 1 else reduced
        layers = replace(layers, backward=self.contended.side_by_side(self._parts(block, forward=False), exchanges))
        if not gathers:
            return layers
        return replace(layers, forward=self.contended.side_by_side(self._parts(block, forward=True), gather))

    def _copied_s(self, block: ModelBlock, passes: ArrayLike) -> Floats:
        """Time of passes over the weights of one block, where dp splits them."""
        several = np.asarray(self.passes.parallel.replicas, float) > 1  # a single replica copies nothing
        work = Stream(np.asarray(passes) * self.passes.weight_bytes(block), kernels=np.asarray(passes) > 0)
        (cost,) = operator_costs([Op("copies", "optimizer", "backward", work)], self.passes.platform)
        return np.asarray(several * cost.seconds)

    @cached_property
    def split_s(self) -> Floats:
        """Time by which exchanges of split weights and gradients lengthen the passes of one micro-batch."""
        longer = (seconds for layers in self.sharded for seconds in layers.exposed_s(self.passes.parallel))
        copied = (layers.copied_s(self.passes.parallel) for layers in self.sharded)
        return np.asarray(sum(longer, np.zeros(())) + sum(copied, np.zeros(())))

    @cached_property
    def exposed_s(self) -> Floats:
        """Time by which reductions end after the backward pass would alone, and what they lengthen it by."""
        if self.passes.parallel.zero > 1:
            return np.zeros(())
        if self.passes.parallel.reductions == "after":  # nothing is hidden
            return self.dp_s
        # without contention, the completion of a queue is exact
        longer = exposed_s(self.buckets, self.slowdowns) if self.slowdowns else self._exposed_without_contention
        return np.where(
            np.asarray(self.passes.parallel.replicas) == 1, 0.0, longer
        )  # which has no others to reduce with

    @property
    def _exposed_without_contention(self) -> Floats:
        """Time of reductions that end after the backward pass, as the completion of a queue."""
        ready: Any = np.zeros(())
        left, ends = self.dp_s, [np.zeros(())]  # all reductions are still to come
        for bucket in self.buckets:
            present = bucket.count > 0
            ends.append(np.where(present, ready + bucket.ready + left, 0.0))
            ready = ready + bucket.count * bucket.ready
            left = left - bucket.count * bucket.seconds
            ends.append(np.where(present, ready + left + bucket.seconds, 0.0))
        return np.asarray(np.maximum(np.maximum.reduce(np.broadcast_arrays(*ends)) - ready, 0.0))

    @cached_property
    def gathered_s(self) -> Floats:
        """The weights that each GPU has updated, to all of dp, where the optimizer's state is split."""
        if not self.passes.is_training or self.passes.parallel.zero not in (1, 2):
            return np.zeros(())
        params, of_experts = (self.passes.parallel.held_stages * self.passes.of_blocks(name) for name in TRAINED)
        return self.split_exchange(self.passes.run.element_bytes, params, of_experts, "all_gather").seconds

    @cached_property
    def tied_s(self) -> Floats:
        """The sum of the gradients of an embedding that the first and the last stage both hold."""
        if not self.passes.is_training:
            return np.zeros(())
        return _exchange_s(self.passes.platform, "pp", self.gradient_bytes * np.asarray(self.tied, float), "all_reduce")


@dataclass(frozen=True)
class Iteration:
    """An iteration of a model, on the GPU of its busiest stage. Times [s] are arrays over designs, or numbers.

    width: of the activations that go from stage to stage. host_s: time in which the GPU waits for its host.
    host_launch_s, host_batch_s: time of the host for the launch of one kernel, and for a micro-batch before its passes.
    host_link_bytes_per_s: rate of the link to the host, in one direction. experts: how it launches layers with experts.
    clock: of the GPU under load.
    """

    gradients: Gradients
    width: ArrayLike
    host_s: ArrayLike = 0.0
    host_launch_s: ArrayLike = 0.0
    host_batch_s: ArrayLike = 0.0
    host_link_bytes_per_s: ArrayLike = np.inf
    experts: ExpertKernels = field(default_factory=ExpertKernels)
    clock: ArrayLike = 1.0

    @property
    def passes(self) -> MicroBatch:
        """Passes of one micro-batch."""
        return self.gradients.passes

    @cached_property
    def comm_cu_s(self) -> Floats:
        """CU-seconds that kernels of collectives hold in all micro-batches; 0 where the machine's are not known."""
        passes: Any = np.zeros(())
        for part in (part for part in self.passes.parts if part.over is not None):
            cu_s = part.spent.comm_cu_s
            passes = passes + part.times * (self._kernel_cus(part.op) * part.spent.seconds if cu_s is None else cu_s)
        return np.asarray(
            self.passes.micro_batches * passes
            + self.gradients.copy_cus * (self.gradients.dp_s + self.gradients.gathered_s)
        )

    def _kernel_cus(self, op: Op) -> Any:
        """CUs of the kernel of a collective."""
        assert isinstance(op.work, Exchange)
        rate = self.passes.platform.groups[op.work.over].switched(op.work.pattern)
        return op.work.ctas or (self.gradients.copy_cus if rate is None else rate.num_ctas)

    @cached_property
    def message_s(self) -> Floats:
        """Time of one micro-batch's activations to the next stage."""
        tokens = np.asarray(self.passes.run.batch, float) * self.passes.run.pass_tokens
        row_bytes = self.passes.run.element_bytes * tokens / self.passes.parallel.cp * np.asarray(self.width, float)
        shared = self.passes.parallel.scatter_gather or self.passes.parallel.sequence_parallel
        if not shared:
            return _exchange_s(self.passes.platform, "pp", row_bytes, "send_recv")
        sent = _exchange_s(
            self.passes.platform, "pp", row_bytes / np.asarray(self.passes.parallel.tp, float), "send_recv"
        )
        if self.passes.parallel.sequence_parallel:  # each GPU needs its own tokens alone
            return sent
        several = np.asarray(self.passes.parallel.pp, float) > 1
        return np.asarray(sent + several * _exchange_s(self.passes.platform, "tp", row_bytes, "all_gather"))

    @cached_property
    def update(self) -> OperatorCost:
        """The optimizer's update, of the weights of this GPU or of its share of them, with the casts before it."""
        params, optimizer = self.gradients.own_params, self.passes.optimizer
        by_weight = optimizer.bytes_of(self.passes.run)
        moved = params * by_weight[0] if self.passes.is_training and by_weight else np.zeros(())
        kernels = self.passes.of_blocks("updated_tensors") * optimizer.kernels_per_tensor
        work = Stream(moved / optimizer.near_memory, optimizer.flop * params / optimizer.near_memory, kernels)
        (cost,) = operator_costs([Op("update", "optimizer", "optimizer", work)], self.passes.platform)
        seconds, flop = (cost.seconds, cost.flop) if self.passes.is_training else (np.zeros(()), np.zeros(()))
        casts = self.gradients.casts
        moved = np.asarray(moved, float) + casts.bytes
        return OperatorCost(flop, moved, 0 * params, seconds + casts.seconds)

    @cached_property
    def slot_s(self) -> Floats:
        """One micro-batch's turn in a pipeline, with its messages."""
        return self.turns.turn_s(self.passes.parallel)

    @cached_property
    def messages_s(self) -> Floats:
        """Messages of one micro-batch that its operators wait for."""
        return np.asarray(self.slot_s - np.asarray(self.turns.busy_s))

    @cached_property
    def bubble_s(self) -> Floats:
        """Time that a stage waits for others."""
        return self.turns.bubble_s(self.passes.parallel)

    @cached_property
    def launch_wait_s(self) -> Floats:
        """Time of one micro-batch in which the GPU waits for its host."""
        if not np.any(np.asarray(self.host_launch_s) > 0):
            return np.asarray(self.host_batch_s, float)
        # exchanges beside other work shorten what the GPU has to run of every operator alike
        together = self.passes.forward_s + self.passes.backward_s
        share = quotient(together - self.passes.saved_s, together)
        passes = (self._stretches(self.passes.counts, forward=forward, share=share) for forward in (True, False))
        drained = sum((drained_s(stretches) for stretches in passes), np.zeros(()))
        return np.asarray(self.host_batch_s + np.maximum(drained - self._gpu_s, 0.0))

    @cached_property
    def offload_wait_s(self) -> Floats:
        """Time of one micro-batch in which the GPU waits for activations on their way to its host and back."""
        if self.passes.run.offloaded_layers is None:
            return np.zeros(())
        moved = self.passes.of_blocks("offloaded")
        passes = self.passes.forward_s, self.passes.backward_s
        return np.asarray(waited_s(moved, self.host_link_bytes_per_s, *passes))

    @property
    def _gpu_s(self) -> Floats:
        passes = self.passes
        computed_s = passes.forward_s + passes.backward_s - passes.saved_s
        return np.asarray(computed_s + self.gradients.split_s + passes.copies.slot_s)

    def _stretches(self, counts: Mapping[str, ArrayLike], *, forward: bool, share: ArrayLike = 1.0) -> list[Stretch]:
        """Launches and run of a pass of one micro-batch through so many of each block, block by block.

        share: of the time of its operators that a pass takes.
        """
        stretches = []
        for block in self.passes.blocks if forward else self.passes.blocks[::-1]:
            parts = [part for part in self.passes.parts if part.block is block and part.forward == forward]
            replayed = _replayed(parts, self.experts.graphed)
            layer = [self._stretch(part, share, replayed=part in replayed) for part in parts]
            count = np.asarray(counts[block.name])
            place = self._waits_at(parts) if forward else None
            if place is None:
                launched, run = (
                    (sum(times, np.zeros(())) for times in zip(*layer, strict=True)) if layer else (0.0, 0.0)
                )
            else:  # the host is as late as its GPU where it waits: in the next layer it begins anew
                launched = run = drained_s([*layer[place:], *layer[:place]])
            stretches.append((launched * count, run * count))
        return stretches

    def _stretch(self, part: StageOperator, share: ArrayLike, *, replayed: bool) -> Stretch:
        """Launches and run of one operator of a block; one that a graph replays takes no launch."""
        count = np.asarray(part.op.count, float)
        kernels = num_kernels(part.op, self.passes.parallel.tp) + np.asarray(part.op.launches, float)
        launch_s = 0.0 if replayed else np.asarray(self.host_launch_s, float)
        return launch_s * kernels * count, part.spent.seconds * count * share

    def _waits_at(self, parts: Sequence[StageOperator]) -> int | None:
        """Place of the operator of a layer that the host launches after its GPU has run those before; None: none."""
        if not self.experts.waits:
            return None
        return next((place for place, part in enumerate(parts) if isinstance(part.op.work, TokenExchange)), None)

    @cached_property
    def turns(self) -> StageTurns:
        """Times of one micro-batch on the busiest stage and on the others."""
        pp = np.asarray(self.passes.parallel.pp, float)
        busy = self._gpu_s + self.launch_wait_s + self.offload_wait_s
        alone = (
            self.passes.is_training and self.passes.parallel.exchanges == "two_micro_batches"
        )  # while a pipeline fills
        saved = self.passes.hidden_s + (0.0 if alone else self.passes.saved_s)
        other_stages_s = self._others_s() + (pp - 1) * (self.gradients.split_s + self.passes.copies.slot_s - saved)
        backward = [part for part in self.passes.parts if not part.forward]
        weights, inputs = (self._elsewhere(part for part in backward if part.op.weight == of) for of in (True, False))
        weights = np.minimum(weights, inputs)
        directions = 2 if self.passes.is_training else 1
        turns = StageTurns(busy, other_stages_s, weights, self.message_s, pp, self.passes.micro_batches, directions)
        return replace(turns, chunks=self._chunks()) if self.passes.parallel.pipeline in _BY_PASS else turns

    def _chunks(self) -> tuple[Floats, Floats, Floats]:
        """A pair of a forward and a backward pass, a backward pass, and its gradients of weights."""
        pair = np.asarray(self.passes.forward_s + self.passes.backward_s - self.passes.pair_saved_s)
        return pair, self.passes.backward_s, self.passes.sum(part for part in self.passes.parts if part.op.weight)

    def _others_s(self) -> Floats:
        """Passes of one micro-batch through the other stages, whose hosts prepared it while they waited for it."""
        left = {block.name: np.asarray(block.count) - self.passes.counts[block.name] for block in self.passes.blocks}
        passes = (self._stretches(left, forward=forward) for forward in (True, False))
        return np.asarray(sum((drained_s(stretches) for stretches in passes), np.zeros(())))

    def _elsewhere(self, parts: Iterable[StageOperator]) -> Floats:
        """Time of operators of one micro-batch on the other stages."""
        of_all = ((part, np.asarray(part.op.count, float) * np.asarray(part.block.count, float)) for part in parts)
        return np.asarray(sum((part.spent.seconds * (all_ - part.times) for part, all_ in of_all), np.zeros(())))

    @cached_property
    def seconds(self) -> Floats:
        """The iteration, with the drafts that it checks."""
        return self._checked_s + self.draft_s

    @cached_property
    def draft_s(self) -> Floats:
        """Drafts of tokens before a decode step."""
        return np.asarray(self._checked_s * self.passes.run.drafting)

    @cached_property
    def _checked_s(self) -> Floats:
        turns = self.passes.micro_batches * self.slot_s + self.bubble_s
        ends = (
            self.gradients.exposed_s
            + self.gradients.tied_s
            + self.update.seconds
            + self.gradients.gathered_s
            + self.passes.copies.update_s
        )
        return np.asarray(turns + ends + self.host_s)


_ROUTED = ("router", "routing")
"""Operators that pick experts, forward and back."""


def _replayed(parts: Sequence[StageOperator], graphed: Sequence[str]) -> Sequence[StageOperator]:
    """Operators of a pass of a layer that a graph replays: attention and router, on one side of both exchanges, or the
    router alone. A layer of attention alone, or with a state, is replayed whole.
    """
    moved = [place for place, part in enumerate(parts) if isinstance(part.op.work, TokenExchange)]
    kinds = {part.op.kind for part in parts}
    scanned = any(isinstance(part.op.work, Scan) for part in parts)
    graph = "state" if scanned else "attention" if "attention" in kinds else "router"
    if graph not in graphed:
        routed = [part for part in parts if part.op.name.startswith(_ROUTED)] if graph == "attention" else []
        return routed if "router" in graphed else ()
    if not moved:
        return parts if graph != "router" and "fc" not in kinds else ()
    return parts[: moved[0]] if parts[0].forward else parts[moved[-1] + 1 :]


def _exchange_s(platform: Platform, over: Axis, payload: Any, pattern: Pattern) -> Floats:
    return collective(Exchange(pattern, payload, over), platform.groups[over]).seconds
