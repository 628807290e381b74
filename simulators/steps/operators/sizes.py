"""Numbers of a transformer's layers on one GPU, and operators in terms of them.

Equations are in `simulators.steps.run.transformer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.costs.algorithms import Pattern
from simulators.steps.operators.fused_sums import HALVES
from simulators.steps.operators.stored_formats import cache_format
from simulators.steps.operators.work import Exchange, Kind, Op, Product, Stream
from simulators.workloads.model import Kernels, Parallel, Passes, Run, Transformer

Floats = NDArray[np.float64]

COPIED = "tokens in order"
"""What the names of copies begin with that put tokens in order."""
_GATED = 1.5  # reads two tensors where an activation reads one, and writes one


@dataclass(frozen=True)
class Sizes:
    """Numbers of a layer, of one GPU where they are split; arrays that broadcast.

    half: of the tokens of each sequence, the first (A) or the second (B), which sees the keys of both.
    """

    model: Transformer
    run: Run
    parallel: Parallel
    kernels: Kernels
    half: str = ""

    @property
    def sequences(self) -> Floats:
        """Sequences of a micro-batch."""
        return np.asarray(self.run.batch, float)

    @property
    def queries(self) -> Floats:
        """Queries of a sequence that this GPU has."""
        length: Floats = self.run.pass_tokens
        # one new token of each sequence, and drafts
        return length if self.run.mode == "decode" else length / (2 if self.half else 1) / self.parallel.cp

    @property
    def keys(self) -> Floats:
        """Keys of a sequence."""
        # the first half sees its own keys, the second all
        return np.asarray(self.run.sequence_length, float) / (2 if self.half == HALVES[0] else 1)

    @property
    def tokens(self) -> Floats:
        """Tokens that this GPU has between what cp splits."""
        return self.sequences * self.queries

    @property
    def hidden(self) -> Floats:
        """Width of the activations."""
        return np.asarray(self.model.hidden, float)

    @property
    def tp(self) -> Floats:
        """Degree of tensor parallelism."""
        return np.asarray(self.parallel.tp, float)

    @property
    def heads(self) -> Floats:
        """Heads of this GPU."""
        return np.asarray(self.model.num_heads, float) / self.tp

    @property
    def kv_heads(self) -> Floats:
        """Heads of keys and values of this GPU."""
        return np.maximum(1.0, np.asarray(self.model.num_kv_heads, float) / self.tp)  # copied where they are too few

    @property
    def head(self) -> Floats:
        """Width of a head."""
        return np.asarray(self.model.width_of_head, float)

    @property
    def ffn(self) -> Floats:
        """Width inside its part of a feed-forward layer."""
        return np.asarray(self.model.width_of_ffn, float) / self.tp

    @property
    def vocab(self) -> Floats:
        """Its part of the vocabulary."""
        return np.asarray(self.model.vocab, float) / self.tp

    @property
    def element(self) -> float:
        """Bytes of an element."""
        return self.run.element_bytes

    @property
    def cached_element(self) -> Any:
        """Bytes of a number of the cache."""
        format = cache_format(self.model, self.run)
        # with its scales, by the width of a row
        return self.element if format is None else format.bytes_of(self.model.hidden)

    @property
    def scores(self) -> Floats:
        """Elements of all scores."""
        return self.sequences * self.heads * self.queries * self.keys

    @property
    def seen(self) -> Any:
        """Share of all pairs of a query and a key that attention in one kernel computes.

        Of a causal sequence split over cp each GPU has an early and a late part, so that all have as many pairs
        (arXiv:2310.01889 has one part; frameworks deal out two).
        """
        # all parts of a sequence together
        queries = self.queries * self.parallel.cp if self.run.mode != "decode" else self.queries
        if self.run.chunk is not None:  # and all chunks of it
            queries = self.keys
        # a query sees those before it: half of all, with the diagonal
        every = 1 - (queries - 1) / (2 * self.keys) if self.model.causal else np.ones(())
        if self.model.window is None:
            return every
        window = np.minimum(np.asarray(self.model.window, float), self.keys)
        first = np.where(queries >= self.keys, (window - 1) / (2 * queries), 0.0)  # queries with fewer tokens before
        share = np.asarray(self.model.windowed, float)
        return (1 - share) * every + share * np.minimum(every, window / self.keys * (1 - first))

    @property
    def cached(self) -> Floats:
        """Keys of a sequence that a layer keeps for tokens to come, on average over layers."""
        if self.model.window is None:
            return self.keys
        share = np.asarray(self.model.windowed, float)
        return np.asarray((1 - share) * self.keys + share * np.minimum(self.keys, np.asarray(self.model.window, float)))

    @property
    def is_cached(self) -> bool:
        """True if keys and values of tokens before come from the cache: to decode, and of a chunk of a prompt."""
        return self.run.mode == "decode" or self.run.chunk is not None

    @property
    def read_keys(self) -> Any:
        """Keys of a sequence that attention reads in a pass, on average over passes and layers."""
        if self.run.chunk is not None:
            return (self.keys + self.queries) / 2
        return self.cached if self.run.mode == "decode" else self.keys

    @property
    def activations(self) -> Floats:
        """Bytes of T H."""
        return self.element * self.tokens * self.hidden

    @property
    def own(self) -> Floats:
        """Elements of T H that a GPU works on between the parts that tp splits."""
        shared = self.tp if self.parallel.sequence_parallel else 1.0  # tokens between split layers are split as well
        return np.asarray(self.tokens * self.hidden / shared)

    @property
    def gate(self) -> float:
        """Passes of the activation of a feed-forward layer over those without a gate."""
        return _GATED if self.model.gated else 1.0


def mask_bytes(sizes: Sizes) -> Any:
    """Bytes of a number of the masks that dropout keeps: models with learnt positions (GPT, BERT) drop out after each
    half of a layer (arXiv:2205.05198, section 4); those with rotary ones are trained without (PaLM, Llama onwards).
    """
    return np.where(np.asarray(sizes.model.positions) > 0, 1.0, 0.0)


def elements(sizes: Sizes, kind: Kind) -> Floats:
    """Elements of the tensor that kernels of a kind read and write."""
    if kind == "softmax":
        return sizes.scores
    return sizes.own if kind == "norm" else np.asarray(sizes.gate * sizes.ffn * sizes.tokens)


def stream(sizes: Sizes, name: str, kind: Kind, passes: Passes, size: Floats | None = None) -> Op:
    """Kernels over a tensor of `size` elements; None for that of their kind."""
    tensor = sizes.element * (elements(sizes, kind) if size is None else size)
    known = kind in ("norm", "activation")
    like: Any = {"like": kind, "like_bytes": 2 * tensor} if known else {}  # read once, written once
    return Op(name, kind, "forward", Stream(passes.forward * tensor, kernels=passes.forward_kernels, **like))


def product(m: Floats, n: Floats, k: Floats) -> Product:
    """A linear layer, whose weights are stored as (output, input) and so read transposed."""
    return Product(m, n, k, transposed=True)


def gather_tokens(sizes: Sizes, name: str) -> Iterator[Op]:
    """All-gather of the tokens that sequence parallelism keeps apart."""
    if sizes.parallel.sequence_parallel:
        yield Op(f"all-gather {name}", "linear", "forward", Exchange("all_gather", sizes.activations))
        yield from _order_tokens(sizes, f"after {name}")


def _order_tokens(sizes: Sizes, where: str) -> Iterator[Op]:
    """The copy that puts tokens in order that a collective gathers, or will scatter, by rank."""
    passes = sizes.kernels.token_copies
    if sizes.parallel.sequence_parallel and passes is not None:  # frameworks that gather in order copy nothing
        moved = np.where(sizes.tp > 1, np.asarray(passes, float) * sizes.activations, 0.0)
        work = Stream(moved, kernels=np.where(sizes.tp > 1, 1.0, 0.0))
        yield Op(f"{COPIED} {where}", "activation", "forward", work)


def reduce_partial_sums(sizes: Sizes, name: str) -> Iterator[Op]:
    """The sum over GPUs that each hold a part of the inner dimension."""
    pattern: Pattern = "reduce_scatter" if sizes.parallel.sequence_parallel else "all_reduce"
    kind: Kind = "fc" if name == "ffn" else "linear"
    norm: dict[str, Any] = {}
    if sizes.half and sizes.parallel.collectives == "in_switch":  # the library's kernel computes no norm
        norm = {"ctas": sizes.parallel.split_ctas, "norm_bytes": 2 * sizes.activations / sizes.tp}
    yield from _order_tokens(sizes, f"before {name}")
    yield Op(f"{pattern.replace('_', '-')} {name}", kind, "forward", Exchange(pattern, sizes.activations, **norm))
