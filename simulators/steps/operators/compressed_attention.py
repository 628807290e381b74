"""Attention over compressed tokens in an iteration of inference (DeepSeek-V4).

With q the rank of the queries' latent, d the width of a head and of the one key that all share, g groups of heads that
project their outputs to o numbers each, A / t heads on a GPU, as GEMMs (m, n, k) column-major:

    down (q + d, T, H)   q up (d A / t, T, q)   out groups (o, T, d A / g) x g / t   output (H, T, g o / t)

A compressor of a ratio makes an entry from its tokens by two products of their activations, keys and weights:
(2 d x overlap, T, H). Its indexer has a compressor of its own width, queries from the latent, and scores of all queries
and entries. What has no heads is computed whole on every GPU of tp. Queries read the window and the entries of
`simulators.workloads.compressed`; all heads of a query read the same, as key and as value.

Streams of residuals (hyper-connections, arXiv:2409.19606; arXiv:2512.24880): n activations in place of one. Each half
of a layer reads them for the weights of their sums and for its input, and reads and writes them with its output:
(4 n + 2) T H numbers (derived), and a product (n^2 + 2 n, T, n H) that makes the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.steps.operators.latent_attention import cached_numbers
from simulators.steps.operators.sizes import Sizes, product, stream
from simulators.steps.operators.work import Op, Product, Stream
from simulators.workloads.compressed import CompressedAttention, CompressedLayers

Floats = NDArray[np.float64]
_HALVES = 2  # of a layer: attention and feed-forward


def compressed_attention(sizes: Sizes, compressed: CompressedAttention) -> Iterator[Op]:
    """Operators from the latents to the output's partial sums, forward."""
    tokens, rank, head = sizes.tokens, np.asarray(compressed.q_rank, float), sizes.head
    yield Op("latent down", "linear", "forward", product(rank + head, tokens, sizes.hidden))
    yield stream(sizes, "latent norm", "norm", sizes.kernels.norm, tokens * (rank + head))
    yield Op("q up", "linear", "forward", product(sizes.heads * head, tokens, rank))
    moved = 2 * sizes.element * tokens * (sizes.heads + 1) * np.asarray(compressed.rope_dim, float)
    yield Op("rotary", "activation", "forward", Stream(moved, like="rotary", like_bytes=moved))
    moved = (sizes.element + sizes.cached_element) * tokens * head
    yield Op("cache", "activation", "forward", Stream(moved, like="add", like_bytes=moved))
    for layers in compressed.layers:
        yield from _compressors(sizes, compressed, layers)
    yield _core(sizes, compressed)
    groups, width = np.asarray(compressed.out_groups, float), np.asarray(compressed.out_rank, float)
    of_group = np.asarray(sizes.model.num_heads, float) * head / groups
    yield Op("out groups", "linear", "forward", Product(width, tokens, of_group, groups / sizes.tp, transposed=True))
    yield Op("projection", "linear", "forward", product(sizes.hidden, tokens, groups * width / sizes.tp))


def _compressors(sizes: Sizes, compressed: CompressedAttention, layers: CompressedLayers) -> Iterator[Op]:
    """What makes entries of a ratio, and picks those that are read."""
    share, name = np.asarray(layers.share, float), f"{layers.ratio}"
    widths = 2 * layers.overlap * sizes.head
    yield Op(f"compress {name}", "linear", "forward", product(widths, sizes.tokens, sizes.hidden), count=share)
    if (index := layers.index) is None:
        return
    width, heads = np.asarray(index.width, float), np.asarray(index.heads, float)
    rank, ratio = np.asarray(compressed.q_rank, float), np.asarray(layers.ratio, float)
    widths = 2 * layers.overlap * width + heads
    yield Op(f"index keys {name}", "linear", "forward", product(widths, sizes.tokens, sizes.hidden), count=share)
    yield Op(f"index queries {name}", "linear", "forward", product(heads * width, sizes.tokens, rank), count=share)
    entries = sizes.keys / ratio
    read = sizes.cached_element * sizes.sequences * entries * width + sizes.element * sizes.tokens * heads * width
    flop = 2 * sizes.tokens * entries * heads * width * sizes.seen
    yield Op(f"index scores {name}", "attention", "forward", _attention_stream(sizes, read, flop), count=share)


def _core(sizes: Sizes, compressed: CompressedAttention) -> Op:
    """Attention of the queries with the entries that they read."""
    decodes, head = sizes.run.mode == "decode", sizes.head
    entries = compressed.entries(sizes.keys) if decodes else compressed.mean_entries(sizes.keys)
    # of a prompt, entries are read by all queries of a tile at once, and stay in the caches
    cached = sizes.sequences * (entries if decodes else compressed.entries(sizes.keys)) * head
    moved = sizes.cached_element * cached + 2 * sizes.element * sizes.tokens * sizes.heads * head
    flop = 4 * sizes.tokens * entries * sizes.heads * head  # products with keys and with values
    return Op("flash", "attention", "forward", _attention_stream(sizes, moved, flop))


def _attention_stream(sizes: Sizes, moved: Any, flop: Any) -> Stream:
    share = sizes.kernels.flash_share_of_peak
    return Stream(moved, flop, share_of_peak=1.0 if share is None else share)


def compressed_weights(sizes: Sizes, compressed: CompressedAttention) -> Any:
    """Weights of one GPU of the projections, compressors and indexers of a layer, on average over layers."""
    rank, head, hidden = np.asarray(compressed.q_rank, float), sizes.head, sizes.hidden
    groups, width = np.asarray(compressed.out_groups, float), np.asarray(compressed.out_rank, float)
    weights = rank * (hidden + sizes.heads * head + 1) + hidden * head + head  # with norms of both latents
    weights = weights + width * sizes.heads * head + hidden * groups * width / sizes.tp
    for layers in compressed.layers:
        of_layer = 2 * layers.overlap * head * hidden
        if (index := layers.index) is not None:
            of_index = np.asarray(index.width, float), np.asarray(index.heads, float)
            of_layer = (
                of_layer + hidden * (2 * layers.overlap * of_index[0] + of_index[1]) + rank * of_index[0] * of_index[1]
            )
        weights = weights + np.asarray(layers.share, float) * of_layer
    return weights


def cached_in_layer(sizes: Sizes) -> Any:
    """Numbers of a sequence in the cache of a layer of one GPU, on average over layers, of whichever attention."""
    model = sizes.model
    if model.compressed is not None:
        return model.compressed.cached_numbers(sizes.keys, sizes.head)
    of_token = 2 * sizes.kv_heads * sizes.head if model.latent is None else cached_numbers(model.latent)
    return sizes.cached / sizes.parallel.cp * of_token


def residual_streams(sizes: Sizes) -> Iterator[Op]:
    """Sums of the streams of residuals of a layer, where there are several."""
    if sizes.model.streams is None:
        return
    number = np.asarray(sizes.model.streams, float)
    outputs = number**2 + 2 * number
    mixed = product(outputs, sizes.tokens, number * sizes.hidden)
    yield Op("mix weights", "linear", "forward", mixed, count=_HALVES, unnarrowed=True)
    moved = sizes.element * (4 * number + 2) * sizes.own
    work = Stream(moved, kernels=2.0, like="add", like_bytes=moved)
    yield Op("mix streams", "activation", "forward", work, count=_HALVES)


def stream_weights(sizes: Sizes) -> Any:
    """Weights of a layer that make the weights of these sums."""
    if sizes.model.streams is None:
        return 0.0
    number = np.asarray(sizes.model.streams, float)
    return _HALVES * (number**2 + 2 * number) * number * sizes.hidden
