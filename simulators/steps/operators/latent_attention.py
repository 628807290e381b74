"""Multi-head latent attention in an iteration (DeepSeek-V2, arXiv:2405.04434; V3, arXiv:2412.19437, section 2.1.1).

With q and c the ranks of the latents of queries and of keys and values, r the width of the keys' shared position, n and
v the widths of a head's key (without position) and value, as GEMMs (m, n, k) column-major, A / t heads on a GPU:

    down (q + c + r, T, H)   q up ((n + r) A / t, T, q)   kv up ((n + v) A / t, T, c)   output (H, T, v A / t)

The latents are computed whole on every GPU of tp. Without a latent of queries these are part of `down`. Decoding
absorbs `kv up` into queries and outputs, so that all heads read one cached vector of c + r numbers of each token:

    absorb keys (c, T, n) x A / t    attention: heads as queries of width c + r    absorb values (v, T, c) x A / t

Cached are c + r numbers of a token on every GPU of tp; kept for the backward pass are the latents, and queries, keys,
values and outputs of the heads.

An indexer (DeepSeek-V3.2) picks the tokens that a query reads: its own queries and weights of heads from the latents
and the activations, one key of a token that is cached, too, and scores of all pairs. All GPUs of tp compute it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.steps.operators.context_parallel import parts_of_ring, ring_pass, sum_parts
from simulators.steps.operators.sizes import Sizes, product, stream
from simulators.steps.operators.work import Op, Product, Stream
from simulators.workloads.experts import Indexer, LatentAttention

Floats = NDArray[np.float64]


def _query_rank(latent: LatentAttention) -> Floats:
    return np.asarray(0.0 if latent.q_rank is None else latent.q_rank, float)


def latent_attention(sizes: Sizes, latent: LatentAttention) -> Iterator[Op]:
    """Operators from the latents to the output's partial sums, forward."""
    queries, tokens = sizes.heads * latent.key, sizes.tokens
    latents = _query_rank(latent) + latent.cached
    # queries straight from the activations, in the same product
    down = latents + (queries if latent.q_rank is None else 0.0)
    yield Op("latent down", "linear", "forward", product(down, tokens, sizes.hidden))
    yield stream(sizes, "latent norm", "norm", sizes.kernels.norm, tokens * latents)
    if latent.q_rank is not None:
        yield Op("q up", "linear", "forward", product(queries, tokens, _query_rank(latent)))
    # queries of each head, and one key that they share
    moved = 2 * sizes.element * tokens * (sizes.heads + 1) * np.asarray(latent.rope_dim, float)
    yield Op("rotary", "activation", "forward", Stream(moved, like="rotary", like_bytes=moved))
    if sizes.run.mode != "training":
        # read in one format, written in the cache's
        moved = (sizes.element + sizes.cached_element) * tokens * latent.cached
        yield Op("cache", "activation", "forward", Stream(moved, like="add", like_bytes=moved))
    if latent.index is not None:
        yield from _indexer(sizes, latent, latent.index)
        # attention then reads the tokens that the indexer chose
        sizes = replace(sizes, model=sizes.model.model_copy(update={"window": latent.index.tokens, "windowed": 1.0}))
    yield from _absorbed(sizes, latent) if sizes.run.mode == "decode" else _expanded(sizes, latent)
    outputs = sizes.heads * np.asarray(latent.value_dim, float)
    yield Op("projection", "linear", "forward", product(sizes.hidden, tokens, outputs))


def _indexer(sizes: Sizes, latent: LatentAttention, index: Indexer) -> Iterator[Op]:
    """The choice of the tokens that queries read, of the share of the layers that choose."""
    width, heads, share = (np.asarray(number, float) for number in (index.width, index.heads, index.share))
    # queries of the indexer start where those of the heads do
    source = sizes.hidden if latent.q_rank is None else _query_rank(latent)
    yield Op("index queries", "linear", "forward", product(heads * width, sizes.tokens, source), count=share)
    yield Op("index keys", "linear", "forward", product(width + heads, sizes.tokens, sizes.hidden), count=share)
    pairs = sizes.sequences * sizes.queries * sizes.keys
    # keys of earlier tokens come from the cache
    element = sizes.cached_element if sizes.run.mode == "decode" else sizes.element
    read = element * sizes.sequences * sizes.keys * width + sizes.element * sizes.tokens * heads * width
    flash = sizes.kernels.flash_share_of_peak
    work = Stream(read, 2 * pairs * heads * width * sizes.seen, share_of_peak=1.0 if flash is None else flash)
    yield Op("index scores", "attention", "forward", work, count=share)


def _expanded(sizes: Sizes, latent: LatentAttention) -> Iterator[Op]:
    """Attention with the keys and values of every head."""
    s, c, value = sizes.queries, sizes.keys, np.asarray(latent.value_dim, float)
    batch, expanded = sizes.sequences * sizes.heads, np.asarray(latent.nope_dim, float) + value
    rank = np.asarray(latent.kv_rank, float)
    yield Op("kv up", "linear", "forward", product(sizes.heads * expanded, sizes.tokens, rank))
    # expanded keys and values of all heads go round
    yield from ring_pass(sizes, sizes.heads * (latent.key + value), name="")
    share = sizes.kernels.flash_share_of_peak
    if share is not None:
        parts = parts_of_ring(sizes)
        moved = sizes.element * batch * (s * parts + c) * (latent.key + value)
        flop = 2 * batch * s * c * (latent.key + value) * sizes.seen  # products with keys and with values
        yield Op("flash", "attention", "forward", Stream(moved, flop, kernels=parts, share_of_peak=share))
    else:
        yield Op("scores", "attention", "forward", Product(c, s, latent.key, batch, transposed=True))
        yield stream(sizes, "softmax", "softmax", sizes.kernels.softmax)
        yield Op("context", "attention", "forward", Product(value, s, c, batch))
    yield from sum_parts(sizes, sizes.heads * value, sizes.heads * (latent.key + value), name="")


def _absorbed(sizes: Sizes, latent: LatentAttention) -> Iterator[Op]:
    """Attention of one token of each sequence with the cached latents."""
    rank, c, heads = np.asarray(latent.kv_rank, float), sizes.cached, sizes.heads
    nope, value = np.asarray(latent.nope_dim, float), np.asarray(latent.value_dim, float)
    yield Op("absorb keys", "linear", "forward", Product(rank, sizes.tokens, nope, heads))
    share = sizes.kernels.flash_share_of_peak
    if share is not None:
        read = c * latent.cached * (sizes.cached_element / sizes.element)  # the cache may be in another format
        read = read + heads * sizes.queries * (latent.cached + rank)
        flop = 2 * sizes.sequences * heads * sizes.queries * c * (latent.cached + rank)
        work = Stream(sizes.element * sizes.sequences * read, flop, share_of_peak=share)
        yield Op("flash", "attention", "forward", work)
    else:
        queries = heads * sizes.queries
        scores = Product(c, queries, latent.cached, sizes.sequences, transposed=True)
        yield Op("scores", "attention", "forward", scores)
        yield stream(sizes, "softmax", "softmax", sizes.kernels.softmax)
        yield Op("context", "attention", "forward", Product(rank, queries, c, sizes.sequences))
    # from latents to values, after the sum over tokens
    yield Op("absorb values", "linear", "forward", Product(value, sizes.tokens, rank, heads))


def latent_weights(sizes: Sizes, latent: LatentAttention) -> Any:
    """Weights of one GPU of the projections of a layer, and of the norms of its latents."""
    rank, queries = np.asarray(latent.kv_rank, float), sizes.heads * latent.key
    value = np.asarray(latent.value_dim, float)
    of_queries = sizes.hidden * queries
    if latent.q_rank is not None:
        of_queries = _query_rank(latent) * (sizes.hidden + queries + 1)  # with the norm of the latent
    of_keys = sizes.hidden * latent.cached + rank * (sizes.heads * (np.asarray(latent.nope_dim, float) + value) + 1)
    weights = of_queries + of_keys + sizes.heads * value * sizes.hidden
    return weights if latent.index is None else weights + _index_weights(sizes, latent, latent.index)


def _index_weights(sizes: Sizes, latent: LatentAttention, index: Indexer) -> Any:
    """Weights of the indexer, on average over layers: queries, key with its norm, weights of heads."""
    width, heads = np.asarray(index.width, float), np.asarray(index.heads, float)
    source = sizes.hidden if latent.q_rank is None else _query_rank(latent)
    # a norm with weight and bias
    return np.asarray(index.share) * (source * heads * width + sizes.hidden * (width + heads) + 2 * width)


def kept_numbers(sizes: Sizes, latent: LatentAttention) -> Any:
    """Numbers that a token keeps for the backward pass: latents, and queries, keys, values and outputs of heads."""
    return _query_rank(latent) + latent.cached + 2 * sizes.heads * (latent.key + np.asarray(latent.value_dim, float))


def cached_numbers(latent: LatentAttention) -> Any:
    """Numbers of a token in the cache of a layer."""
    index = latent.index
    return latent.cached if index is None else latent.cached + np.asarray(index.share) * np.asarray(index.width, float)
