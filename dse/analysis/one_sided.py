"""One-sided elasticities of any function by differences: its values at a number and a little beside it, on one side.

With a step h of the logarithm of the number, and y the logarithm of the function, the slope is
(4 y(h) - y(2h) - 3 y(0)) / 2h, whose error is of the order of h squared; a power of the number has its exponent to
rounding. Where the values beside the number do not point at that of the number, the function jumps there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEP = 1e-5  # of the logarithm of a number
KINK = 1e-3
"""Difference of two sides from which on a number is at a kink: models of events are rough at the scale of a step."""
_BENT = 1e-2  # share by which the change over two steps may be off twice that over one
_CURVED = 1e-8  # change that a jump has at least: a smooth function is off by its curvature times the step squared


def beside(value: float, side: int) -> Floats:
    """The number, and it one and two steps to a side (-1 below, 1 above) [3]."""
    return np.asarray(value * np.exp(side * STEP * np.arange(3)))


def elasticity(values: Floats, side: int) -> Floats:
    """d log value / d log number on a side, from values [3, ...] at the numbers of `beside`.

    NaN where the function jumps, and where it has no values of one sign.
    """
    with np.errstate(all="ignore"):
        near, far = np.log(values[1] / values[0]), np.log(values[2] / values[0])
        # over twice the step twice the change, but for curvature
        smooth = np.abs(far - 2 * near) <= _BENT * np.abs(far) + _CURVED
        return np.where(smooth, side * (4 * near - far) / (2 * STEP), np.nan)  # the second-order one-sided difference
