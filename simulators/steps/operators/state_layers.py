"""Layers that keep a state: two products, a convolution over the tokens before, and the scan of the state.

T tokens, state S = heads x key x value numbers of 4 bytes (or 2) for each sequence, t = tp, b bytes of an element. A
token of decoding reads and writes the state (2 S numbers) and takes 6 S FLOP: decay, the update k v', the read q S. A
prompt is scanned in chunks of Q tokens (arXiv:2405.21060, section 6; arXiv:2406.06484): within a chunk products as
attention's, between chunks one state each. `conf/data/chunked_scan.yaml` lists the kernels of Mamba-2, forward and
backward, with what each reads and writes of a token (v values, k keys of its groups, states S / Q, products of keys and
queries k Q / key); other scans are taken to be alike. Each kernel takes

    T = max(bytes / W, FLOP / (r V)) + launch

with V the rate of the GPU without matrix units: what these short products wait for are exponentials, conversions and
copies of tiles, r is fitted (`vector_share`). FLOP of a token: 2 S of the states, and of reading them; 2 v Q c of pairs
of a chunk, c = (Q + rows of a tile) / 2 Q of which are computed; 2 k Q of keys and queries. The convolution, the norm
that follows, and copies that put the tokens of several sequences in order are kernels of their own. Kept for the
backward pass: inputs of both products, and what the first one computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dse.config.options import conf_dir, load_yaml
from dse.errors import validate_as
from dse.values import Frozen
from dse.values.units import Number
from simulators.hardware.parts import SourcedValue
from simulators.steps.operators.sizes import Sizes, gather_tokens, product, reduce_partial_sums, stream
from simulators.steps.operators.work import Op, Stream
from simulators.workloads.model import Passes
from simulators.workloads.state_layers import StateLayers


class ScanFlop(Frozen):
    """FLOP of a kernel for each number of the state, pair of tokens and value, and pair of tokens and key."""

    states: Number = 0.0
    within: Number = 0.0
    scores: Number = 0.0


class ScanKernel(Frozen):
    """What a kernel of a scan moves for a token: passes over values and keys, and bytes for each of the others.

    gated: further passes over values in training, where it multiplies by the gate.
    """

    name: str
    values: Number = 0.0
    gated: Number = 0.0
    keys: Number = 0.0
    heads: Number = 0.0
    states: Number = 0.0
    scores: Number = 0.0
    flop: ScanFlop = ScanFlop()
    kernels: Number = 1.0


class ChunkedScan(SourcedValue):
    """Kernels of a scan in chunks. vector_share: rate of their FLOP over that of a GPU without matrix units."""

    name: str
    description: str
    vector_share: Number
    tile_rows: Number
    forward: tuple[ScanKernel, ...]
    backward: tuple[ScanKernel, ...]
    convolution: Passes
    norm: Passes
    order: Passes


@cache
def chunked_scan() -> ChunkedScan:
    """The kernels of `conf/data/chunked_scan.yaml`. Raises ConfigError."""
    return validate_as(ChunkedScan, load_yaml(conf_dir() / "data" / "chunked_scan.yaml"), path="chunked_scan")


@dataclass(frozen=True)
class Scan(Stream):
    """Kernels over tokens of a layer that keeps a state, one after another. back: those of its backward pass."""

    back: tuple[Stream, ...] = ()

    @classmethod
    def of(cls, kernels: Sequence[Stream], back: Sequence[Stream] = ()) -> Scan:
        """Kernels that take their own time each."""
        moved, flop, count = (
            sum((np.asarray(getattr(kernel, name), float) for kernel in kernels), np.zeros(()))
            for name in ("bytes", "flop", "kernels")
        )
        return cls(moved, flop, count, parts=tuple(kernels), back=tuple(back))

    @property
    def backward(self) -> Scan:
        """The backward kernels."""
        return Scan.of(self.back)


def _widths(sizes: Sizes) -> StateLayers:
    assert sizes.model.state is not None
    return sizes.model.state


def _numbers(layers: StateLayers) -> Any:
    """Numbers of the state of a sequence."""
    return np.asarray(layers.heads, float) * np.asarray(layers.key, float) * np.asarray(layers.value, float)


def state_layer(sizes: Sizes) -> Iterator[Op]:
    """Operators of one layer with a state with the norm before it, forward."""
    layers, tokens, tp, scan = _widths(sizes), sizes.tokens, sizes.tp, chunked_scan()
    projected, channels, outputs = (
        np.asarray(width, float) / tp for width in (layers.projected, layers.channels, layers.outputs)
    )
    ordered = sizes.run.mode == "training" and np.any(sizes.sequences > 1)
    yield stream(sizes, "norm", "norm", sizes.kernels.norm)
    yield from gather_tokens(sizes, "state")
    yield Op("state in", "linear", "forward", product(projected, tokens, sizes.hidden))
    if ordered:
        yield _pass_over_columns(sizes, "state order", scan.order, np.where(sizes.sequences > 1, projected, 0.0))
    if np.any(channels > 0):
        yield _pass_over_columns(sizes, "state convolution", scan.convolution, channels)
    yield Op("state scan", "attention", "forward", _scan(sizes, layers))
    if ordered:
        yield _pass_over_columns(sizes, "state outputs order", scan.order, np.where(sizes.sequences > 1, outputs, 0.0))
    # in inference the norm reads the gate
    yield _pass_over_columns(sizes, "state norm", scan.norm, outputs, more=0.0 if sizes.run.mode == "training" else 1.0)
    yield Op("state out", "linear", "forward", product(sizes.hidden, tokens, outputs))
    yield from reduce_partial_sums(sizes, "state")


def _pass_over_columns(sizes: Sizes, name: str, passes: Passes, width: Any, more: float = 0.0) -> Op:
    """A kernel that passes over columns of all tokens, `more` times forward."""
    tensor = sizes.element * sizes.tokens * width
    back = Stream(passes.backward * tensor, kernels=passes.backward_kernels)
    return Op(
        name,
        "activation",
        "forward",
        Scan.of([Stream((passes.forward + more) * tensor, kernels=passes.forward_kernels)], [back]),
    )


def _scan(sizes: Sizes, layers: StateLayers) -> Stream:
    """The scan of all tokens, or the step of one token of each sequence."""
    tokens, numbers = sizes.tokens, _numbers(layers) / sizes.tp
    if sizes.run.mode == "decode":
        columns = (np.asarray(layers.projected, float) + np.asarray(layers.outputs, float)) / sizes.tp
        moved = sizes.element * tokens * columns
        # decay, update and read: two FLOP each
        return Stream(moved + 2 * np.asarray(layers.number_bytes) * numbers * tokens, 6 * numbers * tokens)
    scan = chunked_scan()
    return Scan.of(
        *([_kernel(sizes, layers, kernel) for kernel in kernels] for kernels in (scan.forward, scan.backward))
    )


def _kernel(sizes: Sizes, layers: StateLayers, kernel: ScanKernel) -> Stream:
    """One kernel of the scan of all tokens."""
    tokens, heads = sizes.tokens / sizes.tp, np.asarray(layers.heads, float)
    chunk = np.minimum(np.asarray(layers.chunk, float), sizes.queries)  # a prompt shorter than a chunk is one
    key, values = np.asarray(layers.key, float), heads * np.asarray(layers.value, float)
    keys, states = _keys(layers, values), values * key
    pairs, tile = keys * chunk, np.minimum(chunk, chunked_scan().tile_rows)
    gated = kernel.gated if sizes.run.mode == "training" else 0.0
    elements = (kernel.values + gated) * values + kernel.keys * keys
    moved = (
        sizes.element * elements + kernel.heads * heads + kernel.states * states / chunk + kernel.scores * pairs / key
    )
    within = kernel.flop.within * values * (chunk + tile) / 2  # products above the diagonal by whole tiles
    flop = kernel.flop.states * states + within + kernel.flop.scores * pairs
    return Stream(tokens * moved, tokens * flop, kernels=kernel.kernels, vector_share=chunked_scan().vector_share)


def _keys(layers: StateLayers, values: Any) -> Any:
    """Numbers of the keys of a token; queries have as many."""
    if layers.groups is not None:
        return np.asarray(layers.groups, float) * np.asarray(layers.key, float)
    # what the convolution, or the product, computes beside values
    columns = np.where(np.asarray(layers.channels) > 0, layers.channels, layers.projected)
    return np.maximum((columns - values) / 2, 0.0)


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
