"""A kernel whose tiles arrive, are multiplied and leave one after another, each stage beside the others.

A GPU gets the rows of K tiles in D seconds, multiplies them in C, and sends them in B; rows of a tile are multiplied
once they are there and leave once they are multiplied. Arriving and leaving rows share the links, so that in the steady
part a tile takes the longer of its products and both its ways. With the first tile arriving alone (fill), and the last
one leaving alone (drain), of K >= 2

    T = D / K + max(C, D) / K + (K - 2) max(C, D + B) / K + max(C, B) / K + B / K

and T = D + C + B of one tile. It is no less than max(C, D + B), nor more than D + C + B. Without a way back (an
all-gather before grouped products), or without a way there (a reduce-scatter after them), B or D is 0: then T is that
of a flow shop of two machines, with the longer of both in all tiles but one. Derived; kernels so made are COMET
(arXiv:2502.19811), FlashDMoE (arXiv:2506.04667) and DeepGEMM's for whole layers of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class TilePart(NamedTuple):
    """A part of the pipeline: its name, and shares of all products, of all that arrives, and of all that leaves."""

    name: str
    computed: Floats
    arriving: Floats
    leaving: Floats


def tile_parts(tiles: ArrayLike) -> tuple[TilePart, ...]:
    """Parts of a pipeline of so many tiles, in order; the shares of each column sum to 1. Arrays broadcast."""
    count = np.maximum(np.asarray(tiles, float), 1.0)
    share, none, several = 1 / count, np.zeros(count.shape), count > 1
    within = np.where(several, 1 - 2 * share, 0.0)
    return (
        TilePart("fill", none, share, none),
        TilePart("first tile", share, np.where(several, share, 0.0), none),
        TilePart("tiles", within, within, within),
        TilePart("last tile", np.where(several, share, 0.0), none, np.where(several, share, 0.0)),
        TilePart("drain", none, none, share),
    )


def tile_pipeline_s(arrive_s: ArrayLike, compute_s: ArrayLike, leave_s: ArrayLike, *, tiles: ArrayLike) -> Floats:
    """Time [s] of the kernel: T of the module, from D, C and B. Arrays broadcast."""
    arriving, computing, leaving = (np.asarray(seconds, float) for seconds in (arrive_s, compute_s, leave_s))
    parts = [
        np.maximum(part.computed * computing, part.arriving * arriving + part.leaving * leaving)
        for part in tile_parts(tiles)
    ]
    return np.asarray(sum(parts, np.zeros(())))
