"""Operators that memory bounds: element-wise, reduction, embedding lookup. Work, traffic and time.

    T = max(bytes / (f W), FLOP / P) + launch

W: HBM bandwidth, f: share that streams of a few tensors reach, P: peak rate of the granted CUs. A
lookup reads whole sectors: a row of d elements costs ceil(b d / 32) 32 bytes (numbers: conf/data/operators.yaml). Where
constants of an operator were fitted (`streamed`),

    T = sqrt(launch^2 + (bytes / (f W))^2)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip, Cost
from simulators.hardware.parts import StreamingRates
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

_FED_FLOP = 16  # of peak, for which `feed` says the bytes


def elementwise(chip: Chip, elements: ArrayLike, *, reads: ArrayLike = 2, writes: ArrayLike = 1) -> Cost:
    """An operation on every element of `reads` tensors that gives `writes` tensors; a FLOP for each tensor read."""
    elements = np.asarray(elements, float)
    traffic = (np.asarray(reads) + np.asarray(writes)) * np.asarray(chip.element_bytes) * elements
    return _cost(chip, elements * np.asarray(reads), traffic)


def reduction(chip: Chip, rows: ArrayLike, cols: ArrayLike) -> Cost:
    """The sum (or maximum, ...) of each row of a matrix [rows, cols]: read once, a number written for each row."""
    rows, cols = np.asarray(rows, float), np.asarray(cols, float)
    return _cost(chip, rows * (cols - 1), np.asarray(chip.element_bytes) * rows * (cols + 1))  # additions of a row


def embedding(chip: Chip, bags: ArrayLike, dim: ArrayLike, *, pooled: ArrayLike = 1) -> Cost:
    """`bags` sums of `pooled` rows of `dim` elements each, gathered from a table by indices of 8 bytes."""
    bags, dim, pooled = (np.asarray(value, float) for value in (bags, dim, pooled))
    shared = shared_constants()
    # whole sectors, however short the row
    row = np.ceil(np.asarray(chip.element_bytes) * dim / shared.sector_bytes) * shared.sector_bytes
    # each row with its index, and one sum written
    traffic = bags * (pooled * (row + shared.index_bytes) + np.asarray(chip.element_bytes) * dim)
    return _cost(chip, bags * dim * (pooled - 1), traffic)


def streamed(constants: StreamingRates, hbm_bytes_per_s: ArrayLike, traffic: ArrayLike) -> Cost:
    """An operator whose constants were fitted, that moves `traffic` bytes: its least time and that of its bytes, added
    in quadrature.
    """
    moved = np.asarray(traffic, float)
    # a soft maximum of both
    seconds = np.hypot(constants.launch_s, moved / (constants.hbm_share * np.asarray(hbm_bytes_per_s, float)))
    return Cost.of(0.0, moved, seconds)


def streaming_cost(
    chip: Chip, traffic: ArrayLike, *, flop: ArrayLike = 0.0, kernels: ArrayLike = 1, again: ArrayLike = 0.0
) -> Cost:
    """Passes over tensors that move `traffic` bytes in all, by `kernels` kernels one after another.

    again: bytes that are read again from the last-level cache, whose rate is `feed` for 16 FLOP of the peak.
    """
    moved, work = np.asarray(traffic, float), np.asarray(flop, float)
    # few streams reach more than the library's GEMMs
    reached = np.asarray(chip.streams) * chip.drawable_bytes_per_s
    peak = chip.rate * np.asarray(chip.cus)
    seconds = np.maximum(moved / reached, work / peak)
    if np.any(np.asarray(again) > 0):
        cached = (moved + np.asarray(again, float)) / (np.asarray(chip.feed) * peak / _FED_FLOP)
        seconds = np.maximum(seconds, cached)
    return Cost.of(work, moved, seconds + np.asarray(kernels) * np.asarray(chip.launch_s))


def _cost(chip: Chip, flop: Floats, traffic: Floats) -> Cost:
    return streaming_cost(chip, traffic, flop=flop)
