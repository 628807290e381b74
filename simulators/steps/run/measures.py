"""Metrics of an iteration: times, shares by kind of operator, communication against compute, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.backend import Law, Metric
from simulators.steps.operators.quantised_weights import copy_bytes, flying_bytes
from simulators.steps.operators.work import (
    KINDS,
    Exchange,
    ModelBlock,
    Op,
    Product,
    StageOperator,
    is_linear,
    num_kernels,
    quotient,
)
from simulators.steps.run.iteration import Iteration
from simulators.steps.run.passes import ENDS
from simulators.steps.run.traffic import wire_bytes
from simulators.steps.spread.pipelines import in_flight
from simulators.steps.spread.sharded_states import gathered_weights, largest_block, state_splits

Floats = NDArray[np.float64]

_SERIALIZED = ("tp", "ep", "cp", "etp")  # messages of pp are counted apart, gradients of dp overlap the backward pass
_CORE = ("attention", "softmax")  # of products, too, where one kernel computes attention
_GEMMS = ("linear", "fc", "attention")  # kinds of operators with products
SHARES = (*KINDS, "communication", "bubble", "quantisation", "host", "drafts")
_MEANT = {
    "linear": "projections of attention",
    "fc": "feed-forward layers",
    "activation": "activation functions, rotary embeddings, copies and sums",
}
METRICS: Mapping[str, Metric] = {
    "iteration_s": Metric("s", "one iteration: all micro-batches, and the optimizer's update"),
    "tokens_per_s": Metric("1/s", "tokens (or frames) of all replicas over the iteration", "maximize"),
    "tokens_per_s_per_gpu": Metric("1/s", "tokens_per_s over all GPUs", "maximize"),
    "flop_utilisation": Metric(
        "fraction", "model FLOP of a GPU, none computed again, over iteration_s and the data sheet's rate", "maximize"
    ),
    "sustained_share": Metric(
        "fraction", "FLOP/s of a GPU over the highest rate that its GEMMs are known to sustain", "maximize", high=1.0
    ),
    "forward_s": Metric("s", "operators of all forward passes, without communication"),
    "backward_s": Metric("s", "the same of backward passes, and of what they compute again"),
    "optimizer_s": Metric("s", "the optimizer's update"),
    "serialized_s": Metric("s", "communication that compute waits for: of tp, ep and cp, messages of pp"),
    "dp_s": Metric("s", "reductions of gradients over dp during the backward pass"),
    "comm_cu_s": Metric("CU s", "CU-seconds that kernels of collectives hold, where the machine's are known"),
    "exposed_dp_s": Metric("s", "what of these ends after it, and weights gathered after the update"),
    "bubble_s": Metric("s", "waiting for other stages"),
    "host_s": Metric("s", "waiting for the framework's host, and for activations that wait in its memory"),
    "draft_s": Metric("s", "drafts of tokens that a decode step checks"),
    "quantisation_s": Metric("s", "making low-precision copies of weights: the GPU's kernels, or units in its memory"),
    "quantisation_waited_s": Metric("s", "what the GPU spends on them itself, or waits for"),
    "quantisation_slowed_s": Metric("s", "what its operators lose to bursts of units in its memory"),
    "serialized_share": Metric("fraction", "serialized_s / (compute + serialized_s)", high=1.0),
    "comm_share": Metric("fraction", "(serialized_s + exposed_dp_s) / iteration_s", high=1.0),
    "dp_over_backward": Metric("fraction", "dp_s / operators of the backward pass that may hide it"),
    "edge": Metric("FLOP/B", "FLOP of a layer's GEMMs / bytes of its serialized collectives", "maximize"),
    "slack": Metric("FLOP/B", "FLOP of a layer's weight gradients / bytes of these gradients", "maximize"),
    "memory_bound_share": Metric("fraction", "of compute time in operators below the balance of the GPU", high=1.0),
    "flop": Metric("FLOP", "of one GPU in an iteration"),
    "model_flop": Metric("FLOP", "the same, without what is computed again and the optimizer's update"),
    "loaded_clock": Metric("fraction", "clock under load over gpu.clock, where gpu.loaded gives one", high=1.0 + 1e-9),
    "linear_flop": Metric("FLOP", "of products that run at run.products"),
    "hbm_bytes": Metric("B", "traffic with HBM of one GPU's operators"),
    "stream_bytes": Metric("B", "the part of it that element-wise kernels and updates stream"),
    "wire_bytes": Metric("B", "that one GPU sends in collectives"),
    "num_kernels": Metric("", "operators of one GPU in an iteration, each kernel of a stream counted"),
    "memory_bytes": Metric("B", "weights, gradients, optimizer's state and activations on one GPU"),
    "state_bytes": Metric("B", "weights, their copies, gradients and the optimizer's state"),
    "copy_bytes": Metric("B", "low-precision copies of weights: stored, or of the layers in flight"),
    "bytes_per_parameter": Metric("B", "state_bytes / weights on the GPU"),
    "activation_bytes": Metric("B", "kept for backward passes (of inference: keys and values)"),
    "memory_share": Metric("fraction", "memory_bytes / capacity of the GPU"),
    **{
        f"share_{kind}": Metric("fraction", f"of the iteration in {_MEANT.get(kind, kind)}", high=1.0)
        for kind in SHARES
    },
}


LAWS: Sequence[Law] = (
    Law(
        "forward_s + backward_s + optimizer_s <= iteration_s",
        lambda c: c["forward_s"] + c["backward_s"] + c["optimizer_s"],
        lambda c: c["iteration_s"],
    ),
    Law("serialized_s <= iteration_s", lambda c: c["serialized_s"], lambda c: c["iteration_s"]),
    Law("state_bytes <= memory_bytes", lambda c: c["state_bytes"], lambda c: c["memory_bytes"]),
)
"""What the metrics of every iteration obey."""


def measure(iteration: Iteration, hbm_bytes: ArrayLike) -> dict[str, Any]:
    """Every metric of `METRICS`; arrays that broadcast over designs."""
    passes, gradients = iteration.passes, iteration.gradients
    compute = [part for part in passes.parts if part.over is None]
    tp = passes.sum(part for part in passes.parts if part.over in _SERIALIZED)
    tp = tp - passes.hidden_s - passes.saved_s  # what overlaps compute is not waited for
    m = passes.micro_batches
    forward = m * passes.sum(part for part in compute if part.forward)
    backward = passes.sum(part for part in compute if not part.forward)
    serialized = m * (tp + iteration.messages_s)
    exposed = gradients.exposed_s + gradients.tied_s + gradients.gathered_s + m * gradients.split_s
    total, copies = iteration.seconds, passes.copies
    host = np.asarray(iteration.host_s, float) + m * (iteration.launch_wait_s + iteration.offload_wait_s)
    busy = forward + m * backward + iteration.update.seconds
    return {
        "iteration_s": total,
        "tokens_per_s": _tokens(iteration) / total,
        "forward_s": forward,
        "backward_s": m * backward,
        "optimizer_s": iteration.update.seconds,
        "serialized_s": serialized,
        "dp_s": gradients.dp_s,
        "comm_cu_s": iteration.comm_cu_s,
        "exposed_dp_s": exposed,
        "bubble_s": iteration.bubble_s,
        "host_s": host,
        "draft_s": iteration.draft_s,
        "quantisation_s": m * copies.busy_s + copies.update_s,
        "quantisation_waited_s": m * copies.waited_s + copies.update_s,
        "quantisation_slowed_s": m * copies.slowed_s,
        "serialized_share": serialized / (busy + serialized),
        "comm_share": (serialized + exposed) / total,
        "dp_over_backward": np.divide(gradients.dp_s, backward) if passes.is_training else np.zeros(()),
        **_intensities(iteration),
        **_work(iteration, compute, busy),
        **memory(iteration, hbm_bytes),
        **{f"share_{kind}": m * passes.sum(_of(compute, kind)) / total for kind in KINDS if kind != "optimizer"},
        "share_optimizer": iteration.update.seconds / total,
        "share_communication": (serialized + exposed) / total,
        "share_bubble": iteration.bubble_s / total,
        "share_host": host / total,
        "share_drafts": iteration.draft_s / total,
        "share_quantisation": (m * copies.slot_s + copies.update_s) / total,
    }


def utilisation(metrics: Mapping[str, Any], *, gpus: ArrayLike, peak: ArrayLike, ceiling: ArrayLike) -> dict[str, Any]:
    """Rates of one GPU: tokens, model FLOP over the peak of the data sheet, FLOP over the sustained ceiling."""
    seconds = metrics["iteration_s"]
    return {
        "tokens_per_s_per_gpu": metrics["tokens_per_s"] / np.asarray(gpus, float),
        "flop_utilisation": metrics["model_flop"] / (seconds * np.asarray(peak, float)),
        "sustained_share": metrics["flop"] / (seconds * np.asarray(ceiling, float)),
    }


def _of(parts: Iterable[StageOperator], kind: str) -> list[StageOperator]:
    return [part for part in parts if part.op.kind == kind]


def _tokens(iteration: Iteration) -> Floats:
    passes = iteration.passes
    # a token of each sequence, and accepted drafts
    length = passes.run.generated if passes.run.mode == "decode" else passes.run.pass_tokens
    return np.asarray(
        passes.micro_batches * passes.run.batch * np.asarray(length) * np.asarray(passes.parallel.dp),
        float,
    )


def _intensities(iteration: Iteration) -> dict[str, Any]:
    """FLOP over bytes of what can hide communication, of the layers between the ends; nothing that is recomputed."""
    inner = [part for part in iteration.passes.parts if part.block.name not in ENDS and part.op.phase != "recompute"]
    gemms = [part for part in inner if part.over is None and part.op.kind in _GEMMS]
    weights = [part for part in gemms if isinstance(part.op.work, Product) and part.op.weight]
    moved = _sum(part.times * _payload(part.op) for part in inner)
    gradients = _sum(part.times * _gradient(part.op) for part in weights) * iteration.passes.run.element_bytes
    return {"edge": quotient(_flop(gemms), moved), "slack": quotient(_flop(weights), gradients)}


def _flop(parts: Iterable[StageOperator]) -> Any:
    return _sum(part.times * part.spent.flop for part in parts)


def _gradient(op: Op) -> Any:
    """Elements of the gradient of the weights that a product makes."""
    assert isinstance(op.work, Product)
    return np.asarray(op.work.m, float) * np.asarray(op.work.n, float)


def _payload(op: Op) -> Any:
    """Bytes of an all-reduce, of which an all-gather and a reduce-scatter are the halves."""
    if not isinstance(op.work, Exchange):
        return 0.0
    # halves of an all-reduce
    return np.asarray(op.work.payload_bytes, float) * (1.0 if op.work.pattern == "all_reduce" else 0.5)


def _sum(values: Iterable[Any]) -> Any:
    return sum(values, np.zeros(()))


def _work(iteration: Iteration, compute: list[StageOperator], busy: Any) -> dict[str, Any]:
    """FLOP, traffic and kernels of an iteration, and the share of its time that memory bounds."""
    passes = iteration.passes
    chip, m, update = passes.platform.chip, passes.micro_batches, iteration.update
    # FLOP for a byte at which arithmetic and HBM take equally long
    balance = chip.rate * np.asarray(chip.cus) / chip.drawable_bytes_per_s
    low = _sum(part.seconds * (part.spent.flop < balance * part.spent.bytes) for part in compute)
    kernels = _sum(part.times * num_kernels(part.op, passes.parallel.tp) for part in passes.parts)
    launched = passes.of_blocks("updated_tensors") * passes.optimizer.kernels_per_tensor if passes.is_training else 0.0
    copies = passes.copies
    moved = m * _sum(part.times * part.spent.bytes for part in compute) + update.bytes
    multiply = (part for part in compute if isinstance(part.op.work, Product) or part.op.kind in _CORE)
    streamed = moved - m * _sum(part.times * part.spent.bytes for part in multiply)
    linear = (part for part in compute if is_linear(part.op)) if passes.platform.linear is not None else ()
    return {
        "flop": m * _flop(compute) + update.flop,
        "model_flop": m * _flop(part for part in compute if part.op.phase != "recompute"),
        "linear_flop": m * _flop(linear),
        "stream_bytes": streamed,
        "wire_bytes": wire_bytes(iteration),
        "loaded_clock": iteration.clock,
        "hbm_bytes": moved + m * copies.hbm_bytes[0] + copies.hbm_bytes[1],
        "num_kernels": m * (kernels + copies.kernels[0]) + launched + copies.kernels[1],
        "memory_bound_share": np.minimum(1.0, (m * low + update.seconds) / busy),  # rounding
    }


def _stage_sum(iteration: Iteration, amount: Callable[[ModelBlock], Any], shares: Mapping[str, Any]) -> Any:
    """Sum of a number of the blocks, of each the share that a stage has."""
    amounts = ((block, np.asarray(amount(block), float)) for block in iteration.passes.blocks)
    return _sum(value * np.asarray(block.count, float) * shares[block.name] for block, value in amounts)


def _bytes_of_weights(iteration: Iteration, bytes_per_weight: Any, shares: Mapping[str, Any]) -> Any:
    """Bytes of the weights of a stage with all that belongs to them: so many for each, or as they are stored."""
    if all(block.weight_bytes is None for block in iteration.passes.blocks):  # no formats: one product serves all
        return bytes_per_weight * _stage_sum(iteration, lambda block: block.params, shares)
    return _stage_sum(iteration, lambda block: block.weight_bytes, shares)


def _frozen(block: ModelBlock) -> Any:
    """Weights of a block that have no gradients."""
    return 0.0 if block.trained is None else np.asarray(block.params, float) - block.trained


def _whole_bytes(iteration: Iteration) -> Any:
    """Weights that were gathered, and gradients of an update in the backward pass, of the blocks that have them."""
    passes = iteration.passes
    if not passes.is_training:
        return np.zeros(())
    gathered = gathered_weights(passes.parallel, passes.blocks, passes.counts)
    # gradients live only until their layer is updated
    gradients = iteration.gradients.gradient_bytes * largest_block(passes.blocks) * passes.optimizer.in_backward
    return passes.run.element_bytes * gathered + gradients


def _activation_bytes(iteration: Iteration, counts: Mapping[str, Any], alive: ArrayLike) -> Any:
    """Activations of a stage: of its layers for all micro-batches in flight, of its logits for the one whose backward
    pass follows at once (for all of GPipe, whose backward passes come last).
    """
    waits = iteration.passes.is_training and iteration.passes.parallel.pipeline != "gpipe"
    of_layers = _stage_sum(iteration, lambda block: 0.0 if block.name == ENDS[1] else block.kept, counts)
    of_logits = _stage_sum(iteration, lambda block: block.kept if block.name == ENDS[1] else 0.0, counts)
    return alive * of_layers + (np.minimum(alive, 1.0) if waits else alive) * of_logits


def memory(iteration: Iteration, hbm_bytes: ArrayLike) -> dict[str, Any]:
    """Bytes on the GPU that holds most: of the first stage, or of the last one, with the micro-batches that are in
    flight there. Inference keeps keys and values of all micro-batches.
    """
    passes = iteration.passes
    b, pp = passes.run.element_bytes, np.asarray(passes.parallel.pp, float)
    bytes_per_weight: Any = b
    unlearnt: Any = 0.0  # what a frozen weight does without
    per_expert: Any = 0.0  # what a weight of experts takes beyond it, whose state is split over other GPUs
    # inference keeps the caches of all micro-batches
    flight = ends = np.asarray(passes.run.micro_batches, float)
    if passes.is_training:
        of_weights, of_gradients, of_state = state_splits(passes.parallel, passes.parallel.state_gpus)
        by_weight = passes.optimizer.bytes_of(passes.run)
        assert by_weight is not None
        # gradients do not outlive their layer
        of_gradient = 0 if passes.optimizer.in_backward else iteration.gradients.gradient_bytes
        held, knobs = passes.parallel.held_stages, passes.parallel
        of_state = of_state / (1 if knobs.zero else held)  # what zero splits, the GPUs of both copies share
        unlearnt = held * of_gradient / of_gradients + by_weight[1] / of_state
        bytes_per_weight = held * b / of_weights + unlearnt
        experts = state_splits(knobs, knobs.expert_state_gpus)
        expert_splits = experts[0] / held, experts[1] / held, experts[2] / (1 if knobs.zero else held)
        sizes = b, of_gradient, by_weight[1]
        per_expert = sum(size / split for size, split in zip(sizes, expert_splits, strict=True)) - bytes_per_weight
        flight, ends = in_flight(passes.parallel, pp, passes.micro_batches)
    # two copies, as the ends differ
    first, last = ({block.name: passes.share_at_end(end, block.count) for block in passes.blocks} for end in ENDS)
    for name, shares, absent in zip(ENDS, (first, last), (last, first), strict=True):
        if name in shares:
            # of a pipeline, the other end has none
            shares[name], absent[name] = np.ones(()), np.where(pp > 1, 0.0, 1.0)
    flying, whole = flying_bytes(iteration.passes), _whole_bytes(iteration)
    stages = [
        (
            _bytes_of_weights(iteration, bytes_per_weight, counts)
            + per_expert * _stage_sum(iteration, lambda block: block.trained_experts, counts)
            - unlearnt * _stage_sum(iteration, _frozen, counts)
            + whole,
            _stage_sum(iteration, lambda block: copy_bytes(iteration.passes, block), counts) + flying,
            _activation_bytes(iteration, counts, alive),
        )
        for counts, alive in ((first, flight), (last, ends))
    ]
    later = sum(stages[1]) > sum(stages[0])
    weights, copies, activations = (
        np.where(later, of_last, of_first) for of_first, of_last in zip(*stages, strict=True)
    )
    state = weights + copies
    params = np.where(later, *(_stage_sum(iteration, lambda block: block.params, counts) for counts in (last, first)))
    return {
        "memory_bytes": state + activations,
        "state_bytes": state,
        "copy_bytes": copies,
        "bytes_per_parameter": state / params,
        "activation_bytes": activations,
        "memory_share": (state + activations) / np.asarray(hbm_bytes, float),
    }
