"""Attention over compressed tokens: widths, ratios, and the entries that a query reads.

A layer keeps the last `window` tokens as they are, and one entry for each `ratio` tokens before. A query reads the
window, and of the compressed entries all, or the `tokens` that an indexer picks. With r tokens an entry, of which at
most k are read, a query after t tokens reads min(t, window) + min(t / r, k) entries, and on average over a prompt of S

    1/S int_0^S min(t / r, k) dt = S / (2 r) up to S = k r, else k (1 - k r / (2 S))      (derived)
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dse.values import knob
from dse.values.units import Integer, Number
from simulators.hardware.parts import Grown
from simulators.workloads.experts import Indexer, Width

Floats = NDArray[np.float64]


class CompressedLayers(Grown):
    """Layers with one ratio. share: of all layers. overlap: entries that each token is a part of.

    index: what picks the entries that are read, whose `tokens` are entries; None: all are.
    """

    share: Annotated[Number, Field(gt=0, le=1)]
    ratio: Width
    overlap: Annotated[Integer, knob(structural=True, ge=1, le=16)] = 1
    index: Indexer | None = None

    def entries(self, tokens: ArrayLike) -> Floats:
        """Compressed entries that a query reads after so many tokens."""
        written = np.asarray(tokens, float) / np.asarray(self.ratio, float)
        return np.asarray(written if self.index is None else np.minimum(written, np.asarray(self.index.tokens, float)))

    def mean_entries(self, tokens: ArrayLike) -> Floats:
        """The same, on average over the queries of a prompt of so many tokens."""
        length, ratio = np.asarray(tokens, float), np.asarray(self.ratio, float)
        mean = length / (2 * ratio)
        if self.index is None:
            return np.asarray(mean)
        most = np.asarray(self.index.tokens, float)
        return np.asarray(np.where(length <= most * ratio, mean, most * (1 - most * ratio / (2 * length))))


class CompressedAttention(Grown):
    """Attention of all heads over one compressed key, which is the value, too (DeepSeek-V4).

    Heads, and the width of a head, are those of the model. q_rank: width of the queries' latent. rope_dim: numbers of a
    head that positions turn. window: last tokens that are not compressed. out_groups, out_rank: groups of heads whose
    outputs are projected to so many numbers each, from which the output follows. layers: by ratio; the rest of the
    layers have the window alone.
    """

    q_rank: Width
    rope_dim: Width
    window: Width
    out_groups: Width
    out_rank: Width
    layers: tuple[CompressedLayers, ...]

    def entries(self, tokens: ArrayLike) -> Floats:
        """Entries that a query reads after so many tokens, on average over layers."""
        windowed = np.minimum(np.asarray(tokens, float), np.asarray(self.window, float))
        return np.asarray(windowed + self._over_layers(lambda layers: layers.entries(tokens)))

    def mean_entries(self, tokens: ArrayLike) -> Floats:
        """The same, on average over the queries of a prompt of so many tokens, too."""
        length, window = np.asarray(tokens, float), np.asarray(self.window, float)
        windowed = np.where(length <= window, length / 2, window * (1 - window / (2 * length)))
        return np.asarray(windowed + self._over_layers(lambda layers: layers.mean_entries(tokens)))

    def cached_numbers(self, tokens: ArrayLike, width: ArrayLike) -> Floats:
        """Numbers that a sequence of so many tokens keeps in a layer, on average over layers. width: of an entry."""
        length, entry = np.asarray(tokens, float), np.asarray(width, float)
        windowed = np.minimum(length, np.asarray(self.window, float)) * entry
        compressed = self._over_layers(
            lambda layers: length / np.asarray(layers.ratio, float) * (entry + _index_width(layers))
        )
        return np.asarray(windowed + compressed)

    def _over_layers(self, number: Any) -> Floats:
        return np.asarray(sum(np.asarray(layers.share, float) * number(layers) for layers in self.layers))


def _index_width(layers: CompressedLayers) -> Floats:
    return np.asarray(0.0 if layers.index is None else layers.index.width, float)
