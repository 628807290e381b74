"""Phases of a run: stretches of time in which what CUs ask for, what they compute and what DRAM moves stay alike.

Optimal partitioning (Jackson et al., IEEE Signal Processing Letters 12, 2005): of all ways to cut F series of B bins
into stretches, the one with the least sum of squared deviations from the means of stretches, with a penalty for each,

    sum over stretches of  sum_f sum_b ((x_fb - mean_f) / s_f)^2 + 2 F log(B)

The series are shares of what the machine could do: lines that a CU asks for in a cycle, of CUs' time computing, of the
bandwidth of DRAM. s_f is the noise of a series, told by neighbours: the root of half the mean square of their
differences, but at least `_LEAST_NOISE`. A stretch takes a `_LEAST_SHARE` of the time at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse_memory.simulation import Activity
from simulators.hardware.memory_system import MemorySystem

Floats = NDArray[np.float64]

_LEAST_NOISE = 0.02  # of what the machine could do, below which no difference is looked at
_LEAST_SHARE = 1 / 32  # of the time: shorter stretches are not phases


@dataclass(frozen=True)
class Phase:
    """A stretch [begin_s, end_s) of a run, and means in it: requests of a CU in a cycle, how much of their time CUs
    compute, and how much of DRAM's bandwidth is used.
    """

    begin_s: float
    end_s: float
    requests: float
    computing: float
    bandwidth: float


def lanes(activity: Activity, system: MemorySystem) -> tuple[Floats, Floats, Floats]:
    """Utilisation of each lane: requests of each CU in a cycle [bins, CUs], its time computing
    [bins, CUs], each channel's bandwidth [bins, channels].
    """
    scale = system.gpu.cycle_s / activity.seconds  # cycles of a bin
    # lines that a channel moves in a bin at its peak
    most = activity.seconds * system.gpu.dram.bytes_per_s / (system.gpu.dram.channels * system.gpu.line_bytes)
    return np.asarray(activity.requests * scale), activity.computing, np.asarray(activity.channels / most)


def shares(activity: Activity, system: MemorySystem) -> Floats:
    """Means over lanes [bins, 3], as of `Phase`."""
    return np.stack([lane.mean(axis=1) for lane in lanes(activity, system)], axis=1)


def phases(activity: Activity, system: MemorySystem) -> list[Phase]:
    """Phases of a run, in the order of time."""
    series, width = shares(activity, system), activity.seconds
    ends = cuts(series)
    places = zip([0, *ends[:-1]], ends, strict=True)
    return [Phase(first * width, end * width, *map(float, series[first:end].mean(axis=0))) for first, end in places]


def cuts(series: Floats) -> list[int]:
    """Ends of the stretches of series [B, F], B last."""
    bins, count = series.shape
    # differences of independent neighbours have twice the variance
    noise = np.sqrt((np.diff(series, axis=0) ** 2).mean(axis=0) / 2) if bins > 1 else np.zeros(count)
    scaled = series / np.maximum(noise, _LEAST_NOISE)
    # Bayesian information: each stretch adds a mean and an end for F series
    penalty, least = 2 * count * math.log(max(bins, 2)), max(1, math.floor(bins * _LEAST_SHARE))
    # prefix sums, so that the deviation of any stretch takes constant time
    sums = np.vstack([np.zeros(count), np.cumsum(scaled, axis=0)])
    squares = np.concatenate([[0.0], np.cumsum((scaled**2).sum(axis=1))])
    best, last = np.full(bins + 1, np.inf), np.zeros(bins + 1, np.int64)
    best[0] = 0.0
    for end in range(least, bins + 1):
        first = np.arange(end - least + 1)
        # sum of squares less the squared sum over the length
        inside = squares[end] - squares[first] - ((sums[end] - sums[first]) ** 2).sum(axis=1) / (end - first)
        cost = best[: len(first)] + inside + penalty
        last[end] = int(np.argmin(cost))  # ties go to the earlier cut
        best[end] = cost[last[end]]
    ends, end = list[int](), bins
    while end > 0:  # backwards from the end, as the recursion found them
        ends.append(end)
        end = int(last[end])
    return ends[::-1]
