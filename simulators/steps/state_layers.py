"""Layers that keep a state: two products, a convolution over the tokens before, and the scan of the state.

T tokens, state S = heads x key x value numbers of 4 bytes (or 2) for each sequence, t = tp, b bytes of an element. A
token of decoding reads and writes the state (2 S numbers) and takes 6 S FLOP: decay, the update k v', the read q S. A
prompt is scanned in chunks of Q tokens (arXiv:2405.21060, section 6; arXiv:2406.06484): within a chunk products as
attention's, between chunks one state each,

    FLOP = T (4 S + Q heads (key + value)) / t     bytes = b T (projected + outputs) / t + 8 S T / (Q t)

which run no faster than attention in one kernel does (derived; no scan was measured). The convolution reads and writes
its channels. Training of such layers is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from simulators.steps.operators import Op, Stream
from simulators.steps.sizes import Sizes, gather_tokens, product, reduce_partial_sums, stream
from simulators.workloads.state_layers import StateLayers


def _widths(sizes: Sizes) -> StateLayers:
    assert sizes.model.state is not None
    return sizes.model.state


def _numbers(layers: StateLayers) -> Any:
    """Numbers of the state of a sequence."""
    return np.asarray(layers.heads, float) * np.asarray(layers.key, float) * np.asarray(layers.value, float)


def state_layer(sizes: Sizes) -> Iterator[Op]:
    """Operators of one layer with a state with the norm before it, forward."""
    layers, tokens, tp = _widths(sizes), sizes.tokens, sizes.tp
    projected, outputs = (np.asarray(width, float) / tp for width in (layers.projected, layers.outputs))
    yield stream(sizes, "norm", "norm", sizes.kernels.norm)
    yield from gather_tokens(sizes, "state")
    yield Op("state in", "linear", "forward", product(projected, tokens, sizes.hidden))
    if np.any(np.asarray(layers.channels) > 0):
        moved = 2 * sizes.element * tokens * np.asarray(layers.channels, float) / tp
        # moves bytes and hardly computes
        yield Op("state convolution", "activation", "forward", Stream(moved, like="add", like_bytes=moved))
    yield Op("state scan", "attention", "forward", _scan(sizes, layers, projected + outputs))
    yield Op("state out", "linear", "forward", product(sizes.hidden, tokens, outputs))
    yield from reduce_partial_sums(sizes, "state")


def _scan(sizes: Sizes, layers: StateLayers, columns: Any) -> Stream:
    """The scan of all tokens, or the step of one token of each sequence."""
    tokens, numbers = sizes.tokens, _numbers(layers) / sizes.tp
    moved = sizes.element * tokens * columns
    if sizes.run.mode == "decode":
        # decay, update and read: two FLOP each
        return Stream(moved + 2 * np.asarray(layers.number_bytes) * numbers * tokens, 6 * numbers * tokens)
    chunk = np.minimum(np.asarray(layers.chunk, float), sizes.queries)  # a prompt shorter than a chunk is one
    inside = chunk * np.asarray(layers.heads, float) * (np.asarray(layers.key) + np.asarray(layers.value)) / sizes.tp
    between = 2 * np.asarray(layers.number_bytes) * numbers * tokens / chunk
    share = sizes.kernels.flash_share_of_peak
    # not known: at the peak rate
    return Stream(moved + between, tokens * (4 * numbers + inside), share_of_peak=1.0 if share is None else share)


def state_weights(sizes: Sizes) -> tuple[Any, Any]:
    """Weights of one GPU of the two products, and of all else of a layer."""
    layers = _widths(sizes)
    both = sizes.hidden * (np.asarray(layers.projected, float) + np.asarray(layers.outputs, float)) / sizes.tp
    beside = np.asarray(layers.channels, float) * np.asarray(layers.kernel, float) + np.asarray(layers.more, float)
    return both, beside / sizes.tp


def state_bytes(sizes: Sizes) -> Any:
    """Bytes that a layer keeps of its sequences: states, and the tokens that the convolution looks back to."""
    layers = _widths(sizes)
    # the kernel looks at as many tokens before
    back = np.asarray(layers.channels, float) * (np.asarray(layers.kernel, float) - 1)
    return sizes.sequences * (np.asarray(layers.number_bytes) * _numbers(layers) + sizes.element * back) / sizes.tp
