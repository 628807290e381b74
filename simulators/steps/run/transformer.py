"""The operators of a transformer's iteration, with the collectives of tensor and sequence parallelism in their places.

T = batch x tokens, H hidden, A heads of width d, F feed-forward width, t = tp, b bytes of an element, S queries and C
keys of a sequence (S = C = sequence_length; decode: S = 1). A layer forward, as GEMMs (m, n, k), column-major:

    QKV ((A + 2 A_kv) d / t, T, H)   scores (C, S, d) x A B / t   context (d, S, C) x A B / t   output (H, T, A d / t)
    FC 1 (F / t, T, H), twice as wide where gated                 FC 2 (H, T, F / t)

and backward two more of each, of its input (dX) and of its weights (dW). All-reduces of b T H bytes (t > 1): after the
output and FC 2 forward, after dX of FC 1 and of QKV backward (Megatron-LM, arXiv:1909.08053). Kept for the backward
pass, by layer (arXiv:2205.05198, section 4; there for b = 2, A_kv = A, F = 4 H: T H (10 + 24 / t + 5 A C / (H t))):

    2 (2 b + 1) T H + b T (2 A + 2 A_kv) d / t + b T F (2, gated: 3) / t + (2 b + 1) A B S C / t

of which sequence parallelism splits the first term by t, too, and recomputing attention (or a kernel that never writes
scores) leaves out the last; recomputing everything leaves b T H. Such a kernel computes S C - S (S - 1) / 2 of the
S C pairs where attention is causal; kernels that write scores compute all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.steps.operators.compressed_attention import (
    cached_in_layer,
    compressed_attention,
    compressed_weights,
    residual_streams,
    stream_weights,
)
from simulators.steps.operators.context_parallel import (
    exchange_heads,
    heads_of_part,
    parts_of_ring,
    ring_pass,
    sum_parts,
)
from simulators.steps.operators.experts import (
    expert_feed_forward,
    expert_params,
    inputs_of_experts,
    kept_bytes_of_experts,
    parts_of_experts,
    weights_of_experts,
)
from simulators.steps.operators.fused_sums import HALVES
from simulators.steps.operators.latent_attention import kept_numbers, latent_attention, latent_weights
from simulators.steps.operators.sizes import Sizes, gather_tokens, mask_bytes, product, reduce_partial_sums, stream
from simulators.steps.operators.state_layers import kept_of_scan, state_bytes, state_layer, state_weights
from simulators.steps.operators.stored_formats import in_formats
from simulators.steps.operators.work import Exchange, Kind, ModelBlock, Op, Phase, Product, Stream
from simulators.steps.run.layer_passes import (
    TRANSPOSES,
    adapter,
    adapter_weights,
    add_gradients,
    all_passes,
    recomputed_share,
    sink_gradients,
)
from simulators.steps.run.offload import offloaded
from simulators.workloads.model import Kernels, Parallel, Passes, Run, Transformer
from simulators.workloads.state_layers import LayerKind
from simulators.workloads.stored import Part, weight_format

Floats = NDArray[np.float64]

_FP32 = 4  # bytes
_FROZEN: dict[str, Any] = {"trained": 0.0, "trained_tensors": 0.0}


def transformer_blocks(model: Transformer, run: Run, parallel: Parallel, kernels: Kernels) -> tuple[ModelBlock, ...]:
    """Embedding, layers, layers of a decoder beside an encoder, and output, in the order of the forward pass."""
    sizes = Sizes(model, run, parallel, kernels)
    blocks = list(_layers(sizes))
    if model.decoder_layers:
        ops = all_passes(sizes, (*_attention(sizes), *_attention(sizes, "cross "), *_feed_forward(sizes)))
        weights, kept_bytes = _weights(sizes, attentions=2), _kept_bytes(sizes, attentions=2)
        block = ModelBlock("decoder layer", ops, model.decoder_layers, *weights, kept_bytes, **_trained(sizes, 2))
        blocks.append(in_formats(block, _parts(sizes, _EQUAL, attentions=2), model, run))
    return offloaded((_embedding(sizes), *blocks, _output(sizes)) if model.vocab else blocks, sizes)


def _layers(sizes: Sizes) -> Iterator[ModelBlock]:
    """Equal layers; with experts, those that have them, after the dense ones that come first.

    In a pipeline the busiest stage has layers with experts alone: all layers are counted as such (derived).
    """
    model = sizes.model
    if model.pattern is not None:
        yield from _of_several_kinds(sizes, model.pattern)
        return
    layer_ops = tuple(_halves(sizes)) if sizes.parallel.split_ctas else (*_attention(sizes), *_feed_forward(sizes))
    if model.moe is None:
        yield _layer("layer", sizes, layer_ops, model.layers)
        return
    alone, layers = np.asarray(sizes.parallel.pp) == 1, np.asarray(model.layers, float)
    # a pipeline's busiest stage has none
    dense = np.where(alone, np.minimum(np.asarray(model.moe.dense_layers, float), layers), 0.0)
    plain = Sizes(model.model_copy(update={"moe": None}), sizes.run, sizes.parallel, sizes.kernels)
    if np.any(dense > 0):
        yield _layer("dense layer", plain, (*_attention(plain), *_feed_forward(plain)), dense)
    ops = (*_attention(sizes), *expert_feed_forward(sizes))
    yield replace(_layer("layer", sizes, ops, layers - dense), expert_params=expert_params(sizes))


def _layer(name: str, sizes: Sizes, forward: tuple[Op, ...], count: Any) -> ModelBlock:
    """`count` equal layers of these operators."""
    params, tensors = _weights(sizes)
    forward = (*forward, *residual_streams(sizes))
    every = (*all_passes(sizes, forward), *sink_gradients(sizes), *add_gradients(sizes, params, tensors))
    block = ModelBlock(name, every, count, params, tensors, _kept_bytes(sizes), **_trained(sizes))
    return in_formats(block, _parts(sizes, _EQUAL), sizes.model, sizes.run)


_EQUAL = LayerKind(count=1, mixer="attention", feed="experts")
"""A layer of a model of equal layers: with attention, and experts where there are any."""


def _of_several_kinds(sizes: Sizes, pattern: Sequence[LayerKind]) -> Iterator[ModelBlock]:
    """Blocks of a model whose layers differ; those with attention of which there are most are called layers."""
    plain = replace(sizes, model=sizes.model.model_copy(update={"moe": None}))
    # attention first, then the commonest
    place = max(range(len(pattern)), key=lambda at: (pattern[at].mixer == "attention", int(pattern[at].count)))
    for number, kind in enumerate(pattern):
        of_kind = sizes if kind.feed == "experts" else plain
        name = "layer" if number == place else f"{kind.mixer} {kind.feed} layer {number}"
        yield _layer_of_kind(name, of_kind, kind)


def _layer_of_kind(name: str, sizes: Sizes, kind: LayerKind) -> ModelBlock:
    """Equal layers of one kind."""
    mixers = {"attention": _attention, "state": state_layer, "merge": _merge, "none": _no_part}
    ops = mixers[kind.mixer](sizes)
    feeds = {"dense": _feed_forward, "experts": expert_feed_forward, "none": _no_part}
    forward = tuple(
        replace(op, unnarrowed=op.unnarrowed or op.name.startswith(kind.unnarrowed))
        for op in (*ops, *feeds[kind.feed](sizes))
    )
    params, tensors = _weights_of_kind(sizes, kind)
    every = (*all_passes(sizes, forward), *add_gradients(sizes, params, tensors))
    block = ModelBlock(name, every, kind.count, params, tensors, _kept_by_kind(sizes, kind))
    if kind.feed == "experts":
        block = replace(block, expert_params=expert_params(sizes))
    return in_formats(block, _parts(sizes, kind), sizes.model, sizes.run)


def _no_part(_: Sizes) -> Iterator[Op]:
    return iter(())


def _merge(sizes: Sizes) -> Iterator[Op]:
    """The embedding of the next token, norms of it and of the activations, and a product of both side by side."""
    moved = 2 * sizes.activations
    yield Op("merge lookup", "activation", "forward", Stream(moved, like="add", like_bytes=moved))
    for name in ("merge norm", "merge norm of embedding"):
        yield stream(sizes, name, "norm", sizes.kernels.norm)
    yield from gather_tokens(sizes, "merge")
    yield Op("merge", "linear", "forward", product(sizes.hidden / sizes.tp, sizes.tokens, 2 * sizes.hidden))


def _halves(sizes: Sizes) -> Iterator[Op]:
    """Operators of a layer, forward, of two halves of the tokens in turns; sums in the switch compute the norms."""
    apart = sizes.parallel.collectives != "in_switch"  # the library's kernel adds alone
    for part in (_attention, _feed_forward):
        for half in HALVES:
            for op in part(replace(sizes, half=half)):
                if apart or op.kind != "norm":
                    yield replace(op, name=f"{op.name} {half}", half=half)


def _attention(sizes: Sizes, prefix: str = "") -> Iterator[Op]:
    """One attention with the norm before it, forward."""
    own, heads, kv = sizes, sizes.heads, sizes.kv_heads
    yield stream(sizes, f"{prefix}norm", "norm", sizes.kernels.norm)
    yield from gather_tokens(sizes, f"{prefix}attention")
    if sizes.model.latent is not None:
        yield from latent_attention(sizes, sizes.model.latent)
        yield from reduce_partial_sums(sizes, "attention")
        return
    if sizes.model.compressed is not None:
        yield from compressed_attention(sizes, sizes.model.compressed)
        yield from reduce_partial_sums(sizes, "attention")
        return
    queries = 2 * heads if sizes.model.out_gate else heads  # a gate as wide as the queries
    projected = product((queries + 2 * kv) * own.head, own.tokens, own.hidden)
    yield Op(f"{prefix}qkv", "linear", "forward", projected)
    yield from adapter(sizes, f"{prefix}qkv", projected)
    yield from _positions_and_cache(sizes, prefix)
    if sizes.kernels.transposes is not None:
        yield _transpose(sizes, prefix, sizes.kernels.transposes)
    yield from _core(sizes, prefix)
    projected = product(own.hidden, own.tokens, heads * own.head)
    yield Op(f"{prefix}projection", "linear", "forward", projected)
    yield from adapter(sizes, f"{prefix}projection", projected)
    yield from reduce_partial_sums(sizes, f"{prefix}attention")


def _positions_and_cache(sizes: Sizes, prefix: str) -> Iterator[Op]:
    """Rotary embedding of queries and keys, and of inference the write of keys and values into their cache."""
    queries, keys = (sizes.element * sizes.tokens * heads * sizes.head for heads in (sizes.heads, sizes.kv_heads))
    if sizes.model.rotary:
        moved = 2 * (queries + keys)
        rotated = Stream(moved, like="rotary", like_bytes=moved)
        yield Op(f"{prefix}rotary", "activation", "forward", rotated)
    if sizes.run.mode != "training":
        moved = 2 * keys + 2 * keys * (sizes.cached_element / sizes.element)  # keys and values, read and written
        yield Op(f"{prefix}cache", "activation", "forward", Stream(moved, like="add", like_bytes=moved))


def _transpose(sizes: Sizes, prefix: str, passes: Passes) -> Op:
    """Copies of queries, keys, values and context into the order in which the next product reads them."""
    tensor = sizes.element * sizes.tokens * sizes.heads * sizes.head
    work = Stream(passes.forward * tensor, kernels=passes.forward_kernels)
    return Op(f"{prefix}{TRANSPOSES}", "activation", "forward", work)


def _core(sizes: Sizes, prefix: str) -> Iterator[Op]:
    """Scores, softmax and context, or one kernel for them."""
    heads, kv_heads, s = heads_of_part(sizes)
    batch, c, d = sizes.sequences * heads, sizes.keys, sizes.head
    share = sizes.kernels.flash_share_of_peak
    yield from ring_pass(sizes, 2 * sizes.kv_heads * d, name=prefix)
    yield from exchange_heads(sizes, name=prefix, after=False)
    if share is not None:
        seen = sizes.seen  # of all pairs of a query and a key
        narrower = sizes.cached_element / sizes.element if sizes.is_cached else 1.0
        # heads of a part that is exchanged have all of its keys
        read = sizes.read_keys if sizes.is_cached else c
        keys = sizes.element * sizes.sequences * d * 2 * kv_heads * (narrower * read)
        parts = parts_of_ring(sizes)
        moved = sizes.element * sizes.sequences * d * 2 * heads * s * parts + keys
        by_each = sizes.kernels.keys_read == "per_head" and sizes.run.mode == "decode"
        again = (heads / kv_heads - 1) * keys if by_each else 0.0
        work = Stream(moved, 4 * batch * s * c * d * seen, kernels=parts, share_of_peak=share, again=again)
        yield Op(f"{prefix}flash", "attention", "forward", work)
    else:
        yield Op(f"{prefix}scores", "attention", "forward", Product(c, s, d, batch, transposed=True))
        yield stream(sizes, f"{prefix}softmax", "softmax", sizes.kernels.softmax)
        yield Op(f"{prefix}context", "attention", "forward", Product(d, s, c, batch))
    yield from sum_parts(sizes, heads * d, 2 * kv_heads * d, name=prefix)
    yield from exchange_heads(sizes, name=prefix, after=True)


def _feed_forward(sizes: Sizes) -> Iterator[Op]:
    """FC 1, activation and FC 2 with the norm before them, forward."""
    yield stream(sizes, "norm ffn", "norm", sizes.kernels.norm)
    yield from gather_tokens(sizes, "ffn")
    wide = sizes.ffn * (2 if sizes.model.gated else 1)
    yield Op("fc1", "fc", "forward", product(wide, sizes.tokens, sizes.hidden))
    yield stream(sizes, "activation", "activation", sizes.kernels.activation)
    yield Op("fc2", "fc", "forward", product(sizes.hidden, sizes.tokens, sizes.ffn))
    yield from reduce_partial_sums(sizes, "ffn")


# Weights and what is kept


def _trained(sizes: Sizes, attentions: int = 1) -> dict[str, Any]:
    """Weights of one GPU of a layer that are trained, where some are frozen: those of adapters, of four tensors."""
    inside, heads = sizes.hidden, sizes.heads + 2 * sizes.kv_heads
    weights = adapter_weights(sizes, (inside, heads * sizes.head), (sizes.heads * sizes.head, inside))
    return {} if weights is None else {"trained": attentions * weights, "trained_tensors": 4 * attentions}


def _weights(sizes: Sizes, attentions: int = 1) -> tuple[Any, Any]:
    """(weights of one GPU, tensors) of a layer; ungated layers have biases, and norms two vectors for one."""
    gated, model = sizes.model.gated, sizes.model
    wide, tensors = sizes.ffn * (3 if gated else 2) * sizes.hidden, 3 if gated else 2
    both: Any = _attention_weights(sizes)
    vectors, tensors = (1 + attentions) * sizes.hidden, 4 * attentions + tensors  # queries, keys, values, output
    if model.moe is not None:
        wide, of_experts = weights_of_experts(sizes)
        tensors = 4 * attentions + of_experts
    if model.latent is not None:
        tensors = tensors + 2
    tensors += 1 + attentions
    if model.vectors is not None:
        beside = model.vectors if attentions == 1 else model.decoder_vectors
        vectors = np.asarray(0.0 if beside is None else beside, float)
    elif not gated and model.moe is None:
        vectors = 2 * vectors + sizes.ffn + sizes.hidden  # norms with bias; biases of both layers
        vectors = vectors + attentions * ((sizes.heads + 2 * sizes.kv_heads) * sizes.head + sizes.hidden)
        tensors = 2 * tensors
    return wide + attentions * both + vectors + stream_weights(sizes), tensors


def _projections(sizes: Sizes) -> Any:
    """Weights of one GPU of the projections of queries, keys, values and output."""
    queries = 3 if sizes.model.out_gate else 2
    return (queries * sizes.heads + 2 * sizes.kv_heads) * sizes.head * sizes.hidden  # keys and values


def _attention_weights(sizes: Sizes) -> Any:
    """Weights of one GPU that products of attention read."""
    model = sizes.model
    if model.compressed is not None:
        return compressed_weights(sizes, model.compressed)
    return _projections(sizes) if model.latent is None else latent_weights(sizes, model.latent)


def _parts(sizes: Sizes, kind: LayerKind, attentions: int = 1) -> dict[Part, Any]:
    """Weights of one GPU of a layer by part, of those that products read."""
    model, parts = sizes.model, dict[Part, Any]()
    if kind.mixer == "attention":
        parts["attention"] = attentions * _attention_weights(sizes)
    elif kind.mixer == "state":
        parts["state"] = state_weights(sizes)[0]
    if kind.feed == "experts" and model.moe is not None:
        return parts | parts_of_experts(sizes)
    if kind.feed != "none":
        parts["dense"] = sizes.ffn * (3 if model.gated else 2) * sizes.hidden
    return parts


def _weights_of_kind(sizes: Sizes, kind: LayerKind) -> tuple[Any, Any]:
    """(weights of one GPU, tensors) of a layer of a kind."""
    parts = _parts(sizes, kind)
    beside = np.asarray(kind.vectors, float)
    if kind.mixer in ("state", "merge"):
        beside = beside + (state_weights(sizes)[1] if kind.mixer == "state" else 2 * sizes.hidden**2 / sizes.tp)
    return sum(parts.values(), beside), 2 * len(parts) + 3


def _kept_by_kind(sizes: Sizes, kind: LayerKind) -> Any:
    """Bytes that a layer of a kind keeps for its backward pass; of inference its keys and values, or its states."""
    if sizes.run.mode != "training":
        bytes_of = {"state": state_bytes, "attention": _kept_bytes}.get(kind.mixer)
        return np.zeros(()) if bytes_of is None else bytes_of(sizes)
    if kind.mixer == "attention" and kind.feed != "none":
        return _kept_bytes(sizes)
    if sizes.run.recompute == "all":
        share = recomputed_share(sizes)
        stored = replace(sizes, run=sizes.run.model_copy(update={"recompute": "none"}))
        return share * sizes.element * sizes.own + (1 - share) * _kept_by_kind(stored, kind)
    if kind.mixer == "merge":  # both inputs of its product, and their norms
        return 4 * sizes.element * sizes.own
    dense = replace(sizes, model=sizes.model.model_copy(update={"moe": None}))
    feed = np.zeros(()) if kind.feed == "none" else _kept_bytes(sizes, attentions=0)
    if kind.mixer == "none":
        return feed
    alone = kept_of_scan(sizes) if kind.mixer == "state" else _kept_bytes(dense) - _kept_bytes(dense, attentions=0)
    return feed + alone


def _kept_bytes(sizes: Sizes, attentions: int = 1) -> Any:
    """Bytes that a layer keeps for its backward pass, on average over layers; of inference its keys and values."""
    if sizes.run.mode != "training":
        return _kept_by_layer(sizes, attentions)
    share = recomputed_share(sizes)
    if not np.any(np.asarray(share) < 1):
        return _kept_by_layer(sizes, attentions)
    again, stored = (
        _kept_by_layer(replace(sizes, run=sizes.run.model_copy(update={"recompute": what})), attentions)
        for what in (sizes.run.recompute, "none")
    )
    return share * again + (1 - share) * stored


def _kept_by_layer(sizes: Sizes, attentions: int) -> Any:
    """The same of a layer that computes activations again as the run says."""
    b, tokens = sizes.element, sizes.tokens
    model = sizes.model
    if sizes.run.mode != "training":
        return attentions * sizes.cached_element * sizes.sequences * cached_in_layer(sizes)
    if sizes.run.recompute == "all":
        return b * sizes.own  # the input alone
    if sizes.run.recompute == "half":
        return b * (3 * sizes.own + tokens * (sizes.heads * sizes.head + sizes.ffn))
    again = sizes.run.recompute == "up_projections"
    if again and model.latent is not None:
        return _kept_without_ups(sizes)
    unsplit = (attentions + 1) * (2 * b + mask_bytes(sizes)) * sizes.own
    split = attentions * (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head
    if model.latent is not None:
        split = kept_numbers(sizes, model.latent)
    # norms and activations that are computed again are not kept; experts keep theirs
    wide = 0.0 if model.moe is not None else sizes.ffn * ((3 if model.gated else 2) - again)
    split = b * tokens * (split + wide)
    if model.moe is not None:
        split = split + kept_bytes_of_experts(sizes, activations=not again)
    kept = unsplit - again * (attentions + 1) * b * sizes.own + split - _narrowed(sizes, attentions)
    if sizes.run.adapters is not None and not again:  # nothing reads inputs of frozen feed-forward layers again
        kept = kept - b * (sizes.own + (0.0 if model.moe is not None else tokens * sizes.ffn))
    if sizes.run.recompute == "attention" or sizes.kernels.flash_share_of_peak is not None:
        return kept
    return kept + attentions * (2 * b + 1) * sizes.scores


def kept_format(sizes: Sizes) -> str | None:
    """Format in which inputs of linear layers are kept; None for that of activations.

    Software that casts by tiles keeps what it has cast, which gradients of weights multiply (Transformer Engine;
    arXiv:2412.19437, section 3.3.3); adapters read inputs as they are.
    """
    run = sizes.run
    if run.activations is not None or sizes.kernels.tile_casts is None or run.adapters is not None:
        return run.activations
    return run.products


def _narrowed(sizes: Sizes, attentions: int) -> Any:
    """Bytes that inputs of linear layers of a layer are narrower by, in the format in which they are kept.

    Outputs of norms and activations that are computed again are not among them.
    """
    name, model, again = kept_format(sizes), sizes.model, sizes.run.recompute == "up_projections"
    if name is None:
        return 0.0
    outputs = sizes.heads * (sizes.head if model.latent is None else np.asarray(model.latent.value_dim, float))
    inputs = attentions * sizes.tokens * outputs + (0.0 if again else (attentions + 1) * sizes.own)
    if model.moe is not None:
        inputs = inputs + inputs_of_experts(sizes, activations=not again)
    elif not again:
        inputs = inputs + sizes.tokens * sizes.ffn
    return (sizes.element - weight_format(name).bytes_of(sizes.hidden)) * inputs


def _kept_without_ups(sizes: Sizes) -> Any:
    """The same of a layer with latent attention that computes norms, up-projections and activations again."""
    latent, model = sizes.model.latent, sizes.model
    assert latent is not None
    numbers, heads = kept_numbers(sizes, latent), sizes.heads * (2 * latent.key + np.asarray(latent.value_dim, float))
    wide = sizes.ffn * (2 if model.gated else 1) if model.moe is None else 0.0
    experts = 0.0 if model.moe is None else kept_bytes_of_experts(sizes, activations=False)
    norms = 2 * (sizes.element + mask_bytes(sizes)) * sizes.own
    return norms + sizes.element * sizes.tokens * (numbers - heads + wide) + experts - _narrowed(sizes, 1)


# The ends


def _embedding(sizes: Sizes) -> ModelBlock:
    """Rows of the embedding, with positions, norm and dropout; a GPU of tp holds a part of the vocabulary."""
    moved, rows = 2 * sizes.activations, sizes.kernels.norm
    dense = sizes.element * sizes.vocab * sizes.hidden
    ops = [
        Op("lookup", "embedding", "forward", Stream(moved)),
        *_both(sizes, "all-reduce embedding", "embedding"),
        replace(stream(sizes, "embedding norm", "norm", rows), kind="embedding"),
    ]
    frozen = sizes.run.adapters is not None
    if sizes.run.mode == "training" and not frozen:
        norm = Stream(rows.backward * sizes.element * sizes.own, kernels=rows.backward_kernels)
        ops.append(Op("embedding norm backward", "embedding", "backward", norm))
        # gradients read, rows read and added to, and the dense gradient set to zero
        scattered = Stream(3 * sizes.activations + dense, kernels=2.0)
        ops.append(Op("scatter", "embedding", "backward", scattered, weight=True))
    beside = 2 * sizes.hidden if sizes.model.ends is None else np.asarray(sizes.model.ends[0], float)
    params = (sizes.vocab + np.asarray(sizes.model.positions)) * sizes.hidden + beside
    kept_bytes = (2 * sizes.element + mask_bytes(sizes)) * sizes.own if sizes.run.mode == "training" else 0.0
    block = ModelBlock("embedding", tuple(ops), 1.0, params, 4, kept_bytes, **(_FROZEN if frozen else {}))
    return in_formats(block, {}, sizes.model, sizes.run)


def _output(sizes: Sizes) -> ModelBlock:
    """Logits of the tokens whose output is wanted, their softmax and loss."""
    training, kernels = sizes.run.mode == "training", sizes.kernels.loss or sizes.kernels.softmax
    # tokens with a loss; of inference the last one
    wanted = sizes.tokens * np.asarray(sizes.model.predicted) if training else sizes.sequences * sizes.run.checked
    logits, moved = product(sizes.vocab, wanted, sizes.hidden), sizes.element * sizes.vocab * wanted
    ops = [replace(stream(sizes, "final norm", "norm", sizes.kernels.norm), kind="output")]
    ops.append(Op("logits", "output", "forward", logits))
    ops.append(Op("loss", "output", "forward", Stream(kernels.forward * moved, kernels=kernels.forward_kernels)))
    if training:  # largest logit, that of the label and sum of exponentials of each token, in fp32
        sums = Exchange("all_reduce", _FP32 * wanted)
        ops.append(Op("all-reduce loss", "output", "forward", sums, count=3.0))
    if training:
        back = Stream(kernels.backward * moved, kernels=kernels.backward_kernels)
        ops.append(Op("loss backward", "output", "backward", back))
        ops.append(Op("logits dX", "output", "backward", Product(logits.k, logits.n, logits.m)))
        ops += _both(sizes, "all-reduce logits dX", "output", "backward")
        if sizes.run.adapters is None:
            ops.append(Op("logits dW", "output", "backward", Product(logits.k, logits.m, logits.n), weight=True))
        ops += add_gradients(sizes, sizes.vocab * sizes.hidden, 1.0)
        norm = Stream(sizes.kernels.norm.backward * sizes.element * sizes.own)
        ops.append(Op("final norm backward", "output", "backward", norm))
    copied = np.asarray(sizes.parallel.pp) > 1  # the last stage does not hold the first one's embedding
    embedding = np.where(copied, 1.0, 0.0 if sizes.model.tied else 1.0) * sizes.vocab * sizes.hidden
    # a loss in one kernel writes gradients in place of the logits; others keep probabilities in fp32 beside these
    of_logits = sizes.element + (_FP32 if sizes.kernels.loss is None else 0)
    kept_bytes = of_logits * sizes.vocab * wanted + 2 * sizes.activations if training else 0.0
    beside = 2 * sizes.hidden if sizes.model.ends is None else np.asarray(sizes.model.ends[1], float)
    sizes_of = 1.0, embedding + beside, np.where(embedding > 0, 3.0, 2.0), kept_bytes
    block = ModelBlock("output", tuple(ops), *sizes_of, **({} if sizes.run.adapters is None else _FROZEN))
    return in_formats(block, {"output": embedding}, sizes.model, sizes.run)


def _both(sizes: Sizes, name: str, kind: Kind, phase: Phase = "forward") -> list[Op]:
    """The sum over the parts of a vocabulary, which every GPU needs whole."""
    return [Op(name, kind, phase, Exchange("all_reduce", sizes.activations))]
