"""Operators that memory bounds: passes over tensors. Work, traffic and time.

    T = max(bytes / (f W), FLOP / P) + launch

W: HBM bandwidth, f: share that streams of a few tensors reach, P: peak rate of the granted CUs (numbers:
conf/data/operators.yaml). Where constants of an operator were fitted (`streamed`),

    T = sqrt(launch^2 + (bytes / (f W))^2)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip, Cost
from simulators.hardware.parts import StreamingRates

Floats = NDArray[np.float64]

_FED_FLOP = 16  # of peak, for which `feed` says the bytes


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
