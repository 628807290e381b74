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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.costs.collective import Pattern
from simulators.steps.operators import Block, Exchange, Kind, Op, Phase, Product, Stream
from simulators.steps.token_splits import HALVES
from simulators.workloads.model import Kernels, Parallel, Passes, Run, Transformer

Floats = NDArray[np.float64]

_TRANSPOSES = "transposes"
_COPIED = "tokens in order"
_SUMS = ("all-reduce", "reduce-scatter")
_GATED = 1.5  # reads two tensors where an activation reads one, and writes one
_FLASH_BACKWARD = 2.5  # five products for the forward pass's two: scores are computed again


@dataclass(frozen=True)
class _Sizes:
    """Numbers of the docstring, of one GPU where they are split; arrays that broadcast.

    half: of the tokens of each sequence, the first (A) or the second (B), which sees the keys of both.
    """

    model: Transformer
    run: Run
    parallel: Parallel
    kernels: Kernels
    half: str = ""

    @property
    def sequences(self) -> Floats:
        return np.asarray(self.run.batch, float)

    @property
    def queries(self) -> Floats:
        length = np.asarray(self.run.sequence_length, float) / (2 if self.half else 1)
        return np.ones_like(length) if self.run.mode == "decode" else length

    @property
    def keys(self) -> Floats:
        return np.asarray(self.run.sequence_length, float) / (2 if self.half == HALVES[0] else 1)

    @property
    def tokens(self) -> Floats:
        return self.sequences * self.queries

    @property
    def hidden(self) -> Floats:
        return np.asarray(self.model.hidden, float)

    @property
    def tp(self) -> Floats:
        return np.asarray(self.parallel.tp, float)

    @property
    def heads(self) -> Floats:
        return np.asarray(self.model.num_heads, float) / self.tp

    @property
    def kv_heads(self) -> Floats:
        return np.maximum(1.0, np.asarray(self.model.num_kv_heads, float) / self.tp)  # copied where they are too few

    @property
    def head(self) -> Floats:
        return np.asarray(self.model.width_of_head, float)

    @property
    def ffn(self) -> Floats:
        return np.asarray(self.model.width_of_ffn, float) / self.tp

    @property
    def vocab(self) -> Floats:
        return np.asarray(self.model.vocab, float) / self.tp

    @property
    def element(self) -> float:
        return self.run.element_bytes

    @property
    def scores(self) -> Floats:
        """Elements of all scores."""
        return self.sequences * self.heads * self.queries * self.keys

    @property
    def activations(self) -> Floats:
        """Bytes of T H."""
        return self.element * self.tokens * self.hidden

    @property
    def own(self) -> Floats:
        """Elements of T H that a GPU works on between the parts that tp splits."""
        shared = self.tp if self.parallel.sequence_parallel else 1.0
        return np.asarray(self.tokens * self.hidden / shared)


def transformer_blocks(model: Transformer, run: Run, parallel: Parallel, kernels: Kernels) -> tuple[Block, ...]:
    """Embedding, layers, layers of a decoder beside an encoder, and output, in the order of the forward pass."""
    sizes = _Sizes(model, run, parallel, kernels)
    layer_ops = tuple(_halves(sizes)) if parallel.split_ctas else (*_attention(sizes), *_feed_forward(sizes))
    params, tensors = _weights(sizes)
    every = (*_passes(sizes, layer_ops), *_add_gradients(sizes, params, tensors))
    layers = Block("layer", every, model.layers, params, tensors, _kept_bytes(sizes))
    blocks = [layers]
    if model.decoder_layers:
        ops = _passes(sizes, (*_attention(sizes), *_attention(sizes, "cross "), *_feed_forward(sizes)))
        params, tensors = _weights(sizes, attentions=2)
        kept_bytes = _kept_bytes(sizes, attentions=2)
        blocks.append(Block("decoder layer", ops, model.decoder_layers, params, tensors, kept_bytes))
    return (_embedding(sizes), *blocks, _output(sizes)) if model.vocab else tuple(blocks)


def _halves(sizes: _Sizes) -> Iterator[Op]:
    """Operators of a layer, forward, of two halves of the tokens in turns; norms are computed by the sums."""
    for part in (_attention, _feed_forward):
        for half in HALVES:
            for op in part(replace(sizes, half=half)):
                if op.kind != "norm":
                    yield replace(op, name=f"{op.name} {half}", half=half)


def _attention(sizes: _Sizes, prefix: str = "") -> Iterator[Op]:
    """One attention with the norm before it, forward."""
    own, heads, kv = sizes, sizes.heads, sizes.kv_heads
    yield _stream(sizes, f"{prefix}norm", "norm", sizes.kernels.norm)
    yield from _gather_tokens(sizes, f"{prefix}attention")
    yield Op(f"{prefix}qkv", "linear", "forward", _product((heads + 2 * kv) * own.head, own.tokens, own.hidden))
    yield from _positions_and_cache(sizes, prefix)
    if sizes.kernels.transposes is not None:
        yield _transpose(sizes, prefix, sizes.kernels.transposes)
    yield from _core(sizes, prefix)
    yield Op(f"{prefix}projection", "linear", "forward", _product(own.hidden, own.tokens, heads * own.head))
    yield from _reduce_partial_sums(sizes, f"{prefix}attention")


def _positions_and_cache(sizes: _Sizes, prefix: str) -> Iterator[Op]:
    """Rotary embedding of queries and keys, and of inference the write of keys and values into their cache."""
    queries, keys = (sizes.element * sizes.tokens * heads * sizes.head for heads in (sizes.heads, sizes.kv_heads))
    if sizes.model.rotary:
        moved = 2 * (queries + keys)
        rotated = Stream(moved, like="rotary", like_bytes=moved)
        yield Op(f"{prefix}rotary", "activation", "forward", rotated)
    if sizes.run.mode != "training":
        moved = 4 * keys  # keys and values, read and written
        yield Op(f"{prefix}cache", "activation", "forward", Stream(moved, like="add", like_bytes=moved))


def _transpose(sizes: _Sizes, prefix: str, passes: Passes) -> Op:
    """Copies of queries, keys, values and context into the order in which the next product reads them."""
    tensor = sizes.element * sizes.tokens * sizes.heads * sizes.head
    work = Stream(passes.forward * tensor, kernels=passes.forward_kernels)
    return Op(f"{prefix}{_TRANSPOSES}", "activation", "forward", work)


def _core(sizes: _Sizes, prefix: str) -> Iterator[Op]:
    """Scores, softmax and context, or one kernel for them."""
    batch, s, c, d = sizes.sequences * sizes.heads, sizes.queries, sizes.keys, sizes.head
    share = sizes.kernels.flash_share_of_peak
    if share is not None:
        seen = 1 - (s - 1) / (2 * c) if sizes.model.causal else 1.0  # of all pairs of a query and a key
        moved = sizes.element * sizes.sequences * d * (2 * sizes.heads * s + 2 * sizes.kv_heads * c)
        yield Op(
            f"{prefix}flash", "attention", "forward", Stream(moved, 4 * batch * s * c * d * seen, share_of_peak=share)
        )
        return
    yield Op(f"{prefix}scores", "attention", "forward", Product(c, s, d, batch, transposed=True))
    yield _stream(sizes, f"{prefix}softmax", "softmax", sizes.kernels.softmax)
    yield Op(f"{prefix}context", "attention", "forward", Product(d, s, c, batch))


def _feed_forward(sizes: _Sizes) -> Iterator[Op]:
    """FC 1, activation and FC 2 with the norm before them, forward."""
    yield _stream(sizes, "norm ffn", "norm", sizes.kernels.norm)
    yield from _gather_tokens(sizes, "ffn")
    wide = sizes.ffn * (2 if sizes.model.gated else 1)
    yield Op("fc1", "fc", "forward", _product(wide, sizes.tokens, sizes.hidden))
    yield _stream(sizes, "activation", "activation", sizes.kernels.activation)
    yield Op("fc2", "fc", "forward", _product(sizes.hidden, sizes.tokens, sizes.ffn))
    yield from _reduce_partial_sums(sizes, "ffn")


def _elements(sizes: _Sizes, kind: Kind) -> Floats:
    if kind == "softmax":
        return sizes.scores
    gate = _GATED if sizes.model.gated else 1.0
    return sizes.own if kind == "norm" else np.asarray(gate * sizes.ffn * sizes.tokens)


def _stream(sizes: _Sizes, name: str, kind: Kind, passes: Passes) -> Op:
    tensor = sizes.element * _elements(sizes, kind)
    known = kind in ("norm", "activation")
    like: Any = {"like": kind, "like_bytes": 2 * tensor} if known else {}  # read once, written once
    return Op(name, kind, "forward", Stream(passes.forward * tensor, kernels=passes.forward_kernels, **like))


def _product(m: Floats, n: Floats, k: Floats) -> Product:
    """A linear layer, whose weights are stored as (output, input) and so read transposed."""
    return Product(m, n, k, transposed=True)


def _gather_tokens(sizes: _Sizes, name: str) -> Iterator[Op]:
    """All-gather of the tokens that sequence parallelism keeps apart."""
    if sizes.parallel.sequence_parallel:
        yield Op(f"all-gather {name}", "linear", "forward", Exchange("all_gather", sizes.activations))
        yield from _order_tokens(sizes, f"after {name}")


def _order_tokens(sizes: _Sizes, where: str) -> Iterator[Op]:
    """The copy that puts tokens in order that a collective gathers, or will scatter, by rank."""
    passes = sizes.kernels.token_copies
    if sizes.parallel.sequence_parallel and passes is not None:
        moved = np.where(sizes.tp > 1, np.asarray(passes, float) * sizes.activations, 0.0)
        work = Stream(moved, kernels=np.where(sizes.tp > 1, 1.0, 0.0))
        yield Op(f"{_COPIED} {where}", "activation", "forward", work)


def _reduce_partial_sums(sizes: _Sizes, name: str) -> Iterator[Op]:
    """The sum over GPUs that each hold a part of the inner dimension."""
    pattern: Pattern = "reduce_scatter" if sizes.parallel.sequence_parallel else "all_reduce"
    kind: Kind = "fc" if name == "ffn" else "linear"
    norm: dict[str, Any] = {}
    if sizes.half:
        norm = {"ctas": sizes.parallel.split_ctas, "norm_bytes": 2 * sizes.activations / sizes.tp}
    yield from _order_tokens(sizes, f"before {name}")
    yield Op(f"{pattern.replace('_', '-')} {name}", kind, "forward", Exchange(pattern, sizes.activations, **norm))


# Passes


def _passes(sizes: _Sizes, forward: tuple[Op, ...]) -> tuple[Op, ...]:
    """Forward operators, then those that recompute, then those of the backward pass."""
    plain, forward = forward, tuple(part for op in forward for part in (*_casts(sizes, op, backward=False), op))
    if sizes.run.mode != "training":
        return forward
    again = _computed_again(sizes, forward)
    recomputed = tuple(replace(op, phase="recompute", name=f"{op.name} again") for op in again)
    backward = (gradient for op in reversed(plain) for gradient in _backward(sizes, op))
    return (*forward, *recomputed, *backward)


def _casts(sizes: _Sizes, op: Op, *, backward: bool) -> Iterator[Op]:
    """Casts of what a linear layer multiplies: inputs and weights forward, gradients of its output backward."""
    passes, work = sizes.kernels.casts, op.work
    if passes is None or sizes.run.products is None or not _is_linear(op):
        return
    assert isinstance(work, Product)
    m, n, k = (np.asarray(size, float) for size in (work.m, work.n, work.k))
    tensor = sizes.element * (m * n if backward else (m + n) * k)
    times, kernels = (
        (passes.backward, passes.backward_kernels) if backward else (passes.forward, passes.forward_kernels)
    )
    cast = Stream(times * tensor, kernels=kernels)
    yield Op(f"{op.name} cast", op.kind, "backward" if backward else "forward", cast, op.count)


def _computed_again(sizes: _Sizes, forward: tuple[Op, ...]) -> list[Op]:
    """Forward operators that the backward pass computes again."""
    what, flash = sizes.run.recompute, sizes.kernels.flash_share_of_peak is not None
    if what == "half":
        stored = [op for op in forward if (op.kind == "attention" and flash) or op.name.startswith(_SUMS)]
        left = [op for op in forward if op not in stored]
        return [replace(op, count=0.5 * np.asarray(op.count)) if _is_linear(op) else op for op in left]
    core = ("attention", "softmax")
    again = [op for op in forward if what == "all" or (what == "attention" and op.kind in core)]
    return [] if flash and what == "attention" else again


def _is_linear(op: Op) -> bool:
    return isinstance(op.work, Product) and op.kind in ("linear", "fc")


def _backward(sizes: _Sizes, op: Op) -> Iterator[Op]:
    """Operators of the backward pass for one forward operator."""
    gradient = replace(op, phase="backward")
    work = op.work
    if isinstance(work, Product) and op.kind == "attention":
        m, n, k = work.m, work.n, work.k
        yield replace(gradient, name=f"{op.name} dA", work=Product(k, m, n, work.batch))
        yield replace(gradient, name=f"{op.name} dB", work=Product(k, n, m, work.batch))
    elif isinstance(work, Product):
        yield from _casts(sizes, op, backward=True)
        yield replace(gradient, name=f"{op.name} dX", work=Product(work.k, work.n, work.m))
        if op.name in ("qkv", "cross qkv", "fc1"):
            yield from _conjugate(sizes, op)
        yield replace(gradient, name=f"{op.name} dW", work=Product(work.k, work.m, work.n), weight=True)
    elif isinstance(work, Stream):
        yield replace(gradient, name=f"{op.name} backward", work=_streamed_back(sizes, op))
    elif isinstance(work, Exchange) and work.pattern == "reduce_scatter":
        yield replace(gradient, name=f"{op.name} backward", work=Exchange("all_gather", work.payload_bytes))


def _conjugate(sizes: _Sizes, op: Op) -> Iterator[Op]:
    """The sum of the gradients of what every GPU has read: of the whole input, or of its own tokens."""
    pattern: Pattern = "reduce_scatter" if sizes.parallel.sequence_parallel else "all_reduce"
    name = f"{pattern.replace('_', '-')} {op.name} dX"
    yield Op(name, op.kind, "backward", Exchange(pattern, sizes.activations))


def _streamed_back(sizes: _Sizes, op: Op) -> Stream:
    """The backward pass of what memory bounds."""
    assert isinstance(op.work, Stream)
    if op.kind == "attention":
        moved = np.asarray(op.work.bytes) * 2
        return replace(op.work, bytes=moved, flop=np.asarray(op.work.flop) * _FLASH_BACKWARD)
    if op.work.like == "rotary" or op.name.startswith(_COPIED):
        return op.work
    kernels = sizes.kernels
    if op.name.endswith(_TRANSPOSES) and kernels.transposes is not None:
        back = kernels.transposes
        tensor = sizes.element * sizes.tokens * sizes.heads * sizes.head
        return Stream(back.backward * tensor, kernels=back.backward_kernels)
    passes = {"norm": kernels.norm, "softmax": kernels.softmax, "activation": kernels.activation}[op.kind]
    return Stream(passes.backward * sizes.element * _elements(sizes, op.kind), kernels=passes.backward_kernels)


# Weights and what is kept


def _add_gradients(sizes: _Sizes, params: Any, tensors: Any) -> Iterator[Op]:
    """The sum of gradients of micro-batches, by a kernel for each tensor."""
    passes = sizes.kernels.gradient_passes
    if sizes.run.mode == "training" and passes is not None:
        moved = np.asarray(passes) * sizes.element * params
        yield Op("add gradients", "linear", "backward", Stream(moved, kernels=tensors), weight=True)


def _weights(sizes: _Sizes, attentions: int = 1) -> tuple[Any, Any]:
    """(weights of one GPU, tensors) of a layer; ungated layers have biases, and norms two vectors for one."""
    wide = sizes.ffn * (3 if sizes.model.gated else 2) * sizes.hidden
    both = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head * sizes.hidden
    vectors, tensors = (1 + attentions) * sizes.hidden, 4 * attentions + (3 if sizes.model.gated else 2)
    tensors += 1 + attentions
    if not sizes.model.gated:
        vectors = 2 * vectors + sizes.ffn + sizes.hidden
        vectors = vectors + attentions * ((sizes.heads + 2 * sizes.kv_heads) * sizes.head + sizes.hidden)
        tensors = 2 * tensors
    return wide + attentions * both + vectors, tensors


def _kept_bytes(sizes: _Sizes, attentions: int = 1) -> Any:
    """Bytes that a layer keeps for its backward pass; of inference its keys and values."""
    b, tokens = sizes.element, sizes.tokens
    if sizes.run.mode != "training":
        return attentions * 2 * b * sizes.sequences * sizes.keys * sizes.kv_heads * sizes.head
    if sizes.run.recompute == "all":
        return b * sizes.own
    if sizes.run.recompute == "half":
        return b * (3 * sizes.own + tokens * (sizes.heads * sizes.head + sizes.ffn))
    unsplit = (attentions + 1) * (2 * b + 1) * sizes.own
    split = attentions * (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head
    split = b * tokens * (split + sizes.ffn * (3 if sizes.model.gated else 2))
    if sizes.run.recompute == "attention" or sizes.kernels.flash_share_of_peak is not None:
        return unsplit + split
    return unsplit + split + attentions * (2 * b + 1) * sizes.scores


# The ends


def _embedding(sizes: _Sizes) -> Block:
    """Rows of the embedding, with positions, norm and dropout; a GPU of tp holds a part of the vocabulary."""
    moved, rows = 2 * sizes.activations, sizes.kernels.norm
    dense = sizes.element * sizes.vocab * sizes.hidden
    ops = [
        Op("lookup", "embedding", "forward", Stream(moved)),
        *_both(sizes, "all-reduce embedding", "embedding"),
        replace(_stream(sizes, "embedding norm", "norm", rows), kind="embedding"),
    ]
    if sizes.run.mode == "training":
        norm = Stream(rows.backward * sizes.element * sizes.own, kernels=rows.backward_kernels)
        ops.append(Op("embedding norm backward", "embedding", "backward", norm))
        scattered = Stream(3 * sizes.activations + dense, kernels=2.0)
        ops.append(Op("scatter", "embedding", "backward", scattered, weight=True))
    params = (sizes.vocab + np.asarray(sizes.model.positions)) * sizes.hidden + 2 * sizes.hidden
    kept_bytes = (2 * sizes.element + 1) * sizes.own if sizes.run.mode == "training" else 0.0
    return Block("embedding", tuple(ops), 1.0, params, 4, kept_bytes)


def _output(sizes: _Sizes) -> Block:
    """Logits of the tokens whose output is wanted, their softmax and loss."""
    training, kernels = sizes.run.mode == "training", sizes.kernels.loss or sizes.kernels.softmax
    wanted = sizes.tokens * np.asarray(sizes.model.predicted) if training else sizes.sequences
    logits, moved = _product(sizes.vocab, wanted, sizes.hidden), sizes.element * sizes.vocab * wanted
    ops = [replace(_stream(sizes, "final norm", "norm", sizes.kernels.norm), kind="output")]
    ops.append(Op("logits", "output", "forward", logits))
    ops.append(Op("loss", "output", "forward", Stream(kernels.forward * moved, kernels=kernels.forward_kernels)))
    if training:
        back = Stream(kernels.backward * moved, kernels=kernels.backward_kernels)
        ops.append(Op("loss backward", "output", "backward", back))
        ops.append(Op("logits dX", "output", "backward", Product(logits.k, logits.n, logits.m)))
        ops += _both(sizes, "all-reduce logits dX", "output", "backward")
        ops.append(Op("logits dW", "output", "backward", Product(logits.k, logits.m, logits.n), weight=True))
        ops += _add_gradients(sizes, sizes.vocab * sizes.hidden, 1.0)
        norm = Stream(sizes.kernels.norm.backward * sizes.element * sizes.own)
        ops.append(Op("final norm backward", "output", "backward", norm))
    copied = np.asarray(sizes.parallel.pp) > 1  # the last stage does not hold the first one's embedding
    embedding = np.where(copied, 1.0, 0.0 if sizes.model.tied else 1.0) * sizes.vocab * sizes.hidden
    kept_bytes = (4 + sizes.element) * sizes.vocab * wanted + 2 * sizes.activations if training else 0.0
    return Block("output", tuple(ops), 1.0, embedding + 2 * sizes.hidden, np.where(embedding > 0, 3.0, 2.0), kept_bytes)


def _both(sizes: _Sizes, name: str, kind: Kind, phase: Phase = "forward") -> list[Op]:
    """The sum over the parts of a vocabulary, which every GPU needs whole."""
    return [Op(name, kind, phase, Exchange("all_reduce", sizes.activations))]
