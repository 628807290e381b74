"""Layers that keep a state: two products, a convolution over the tokens before, and the scan of the state.

T tokens, state S = heads x key x value numbers of 4 bytes (or 2) for each sequence, t = tp, b bytes of an element. A
token of decoding reads and writes the state (2 S numbers) and takes 6 S FLOP: decay, the update k v', the read q S. A
prompt is scanned in chunks of Q tokens (arXiv:2405.21060, section 6; arXiv:2406.06484): within a chunk products as
attention's, between chunks one state each,

    FLOP = T (4 S + Q heads (key + value)) / t     bytes = b T (2 channels + outputs) / t + 12 S T / (Q t)

by five kernels as in mamba_ssm (from memory): sums of decays, the states of chunks (4 bytes written), their passing
(read, and 2 bytes written), products of keys and queries, and the scan, which reads states, keys, queries and values
again. They run no faster than attention in one kernel does (derived; no scan was measured). The convolution reads and
writes its channels; a norm with a gate reads two tensors of the outputs, and writes one. The backward scan of Mamba-2
computes the states again, and two gradients of each of its products: three times the work of the forward one
(`StateLayers.backward`; derived). Kept for it: inputs of both products, and what the first one computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from simulators.steps.operators import Op, Stream
from simulators.steps.sizes import Sizes, gather_tokens, product, reduce_partial_sums, stream
from simulators.workloads.state_layers import StateLayers

_KERNELS = 5  # of the scan of a prompt
_STATE_BYTES = 12  # for each number of a chunk's state: 4 written and read, 2 written and read
_GATE = 3  # reads two tensors, writes one


@dataclass(frozen=True)
class Scan(Stream):
    """The scan of a state over tokens. times_back: work of its backward pass over its own."""

    times_back: ArrayLike = 1.0

    @property
    def backward(self) -> Scan:
        """The backward scan."""
        more, kernels = np.asarray(self.times_back, float), np.asarray(self.kernels, float)
        work = {"bytes": more * np.asarray(self.bytes), "flop": more * np.asarray(self.flop)}
        return replace(self, **work, kernels=more * kernels)


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
    yield Op("state scan", "attention", "forward", _scan(sizes, layers))
    gated = _GATE * sizes.element * tokens * outputs
    yield Op("state gate", "activation", "forward", Stream(gated, like="add", like_bytes=gated))
    yield Op("state out", "linear", "forward", product(sizes.hidden, tokens, outputs))
    yield from reduce_partial_sums(sizes, "state")


def _scan(sizes: Sizes, layers: StateLayers) -> Stream:
    """The scan of all tokens, or the step of one token of each sequence."""
    tokens, numbers = sizes.tokens, _numbers(layers) / sizes.tp
    columns = [np.asarray(width, float) / sizes.tp for width in (layers.projected, layers.channels, layers.outputs)]
    projected, channels, outputs = columns
    if sizes.run.mode == "decode":
        moved = sizes.element * tokens * (projected + outputs)
        # decay, update and read: two FLOP each
        return Stream(moved + 2 * np.asarray(layers.number_bytes) * numbers * tokens, 6 * numbers * tokens)
    chunk = np.minimum(np.asarray(layers.chunk, float), sizes.queries)  # a prompt shorter than a chunk is one
    inside = chunk * np.asarray(layers.heads, float) * (np.asarray(layers.key) + np.asarray(layers.value)) / sizes.tp
    between = _STATE_BYTES * numbers * tokens / chunk
    # layers without a convolution read what is projected
    read = np.where(channels > 0, 2 * channels, projected)
    moved = sizes.element * tokens * (read + outputs)
    share = sizes.kernels.flash_share_of_peak
    # not known: at the peak rate
    rate = 1.0 if share is None else share
    back = 1.0 if layers.backward is None else layers.backward
    flop = tokens * (4 * numbers + inside)
    return Scan(moved + between, flop, kernels=_KERNELS, share_of_peak=rate, times_back=back)


def state_weights(sizes: Sizes) -> tuple[Any, Any]:
    """Weights of one GPU of the two products, and of all else of a layer."""
    layers = _widths(sizes)
    both = sizes.hidden * (np.asarray(layers.projected, float) + np.asarray(layers.outputs, float)) / sizes.tp
    beside = np.asarray(layers.channels, float) * np.asarray(layers.kernel, float) + np.asarray(layers.more, float)
    return both, beside / sizes.tp


def kept_of_scan(sizes: Sizes) -> Any:
    """Bytes that a layer keeps for its backward pass: its input, the norm of it, and inputs of scan and product."""
    layers, b = _widths(sizes), sizes.element
    columns = np.asarray(layers.projected, float) + np.asarray(layers.outputs, float)
    return (2 * b + 1) * sizes.own + b * sizes.tokens * columns / sizes.tp


def state_bytes(sizes: Sizes) -> Any:
    """Bytes that a layer keeps of its sequences: states, and the tokens that the convolution looks back to."""
    layers = _widths(sizes)
    # the kernel looks at as many tokens before
    back = np.asarray(layers.channels, float) * (np.asarray(layers.kernel, float) - 1)
    return sizes.sequences * (np.asarray(layers.number_bytes) * _numbers(layers) + sizes.element * back) / sizes.tp
