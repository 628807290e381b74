"""An epoch over variable sequence lengths, as the mean of the iterations that are simulated of it.

With w iterations that each of the simulated ones stands for (`simulators.steps.epochs.seqpoint`), times, work and
traffic of the mean iteration are sum w x / sum w, shares are weighted by time, and memory is that of the longest
iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse.backend import Metric
from simulators.steps.epochs.seqpoint import Sample, cut_parallel, cut_sequential, iterations_cut, project_epoch

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

METRICS: Mapping[str, Metric] = {
    "epoch_s": Metric("s", "all iterations of an epoch, each simulated"),
    "projected_s": Metric("s", "the epoch by the iterations that stand for it"),
    "projection_error": Metric("fraction", "|projected_s / epoch_s - 1|"),
    "iterations": Metric("", "of an epoch"),
    "profiled": Metric("", "iterations that stand for the epoch"),
    "iterations_cut": Metric("x", "iterations / profiled", "maximize"),
    "cut_sequential": Metric("x", "epoch_s / time of the profiled iterations, one after another", "maximize"),
    "cut_parallel": Metric("x", "epoch_s / time of the longest profiled iteration, as all run at once", "maximize"),
    "longest_over_mean": Metric("x", "the longest iteration of an epoch over the mean one"),
}
_SUMMED = ("s", "FLOP", "B")  # units of what adds up over iterations; shares and rates are weighted by time
# what must fit at any time
_LARGEST = ("memory_bytes", "state_bytes", "copy_bytes", "bytes_per_parameter", "activation_bytes", "memory_share")


@dataclass(frozen=True)
class Epoch:
    """Sequence lengths [N] of an epoch's iterations in their order; `unique` [U] of them, and `place` [N] in these."""

    lengths: Integers
    unique: Integers
    place: Integers

    @classmethod
    def of(cls, lengths: Integers) -> Epoch:
        """From the lengths."""
        unique, place = np.unique(lengths, return_inverse=True)
        return cls(lengths, unique, place)

    def mean(self, metrics: Mapping[str, Floats], units: Mapping[str, Metric], sample: Sample) -> dict[str, Floats]:
        """Metrics of the mean iteration by those of each unique length [U]."""
        # iterations that each unique length stands for
        weights = np.bincount(self.place[sample.places], sample.weights, len(self.unique))
        share = weights / weights.sum()
        every = {name: np.broadcast_to(value, len(self.unique)) for name, value in metrics.items()}
        by_time = share * every["iteration_s"] / (share @ every["iteration_s"])  # shares of time are weighted by time
        means = {}
        for name, values in every.items():
            if name in _LARGEST:
                means[name] = values.max()
            elif units[name].unit in _SUMMED or name == "num_kernels":
                means[name] = share @ values
            else:
                means[name] = by_time @ values
        return {name: np.asarray(value, float) for name, value in means.items()}

    def judge(self, seconds: Floats, sample: Sample) -> dict[str, Floats]:
        """Error of the sample, and what it saves. seconds: of an iteration of each unique length [U]."""
        times = seconds[self.place]
        total, projected = times.sum(), project_epoch(sample, times)
        metrics = {
            "epoch_s": total,
            "projected_s": projected,
            "projection_error": np.abs(projected / total - 1),
            "iterations": len(times),
            "profiled": len(sample.places),
            "iterations_cut": iterations_cut(sample),
            "cut_sequential": cut_sequential(sample, times),
            "cut_parallel": cut_parallel(sample, times),
            "longest_over_mean": times.max() / times.mean(),
        }
        return {name: np.asarray(value, float) for name, value in metrics.items()}


def alone(metrics: Mapping[str, Floats]) -> dict[str, Floats]:
    """The same of a single iteration, which is its own epoch."""
    seconds = metrics["iteration_s"]
    ones = np.ones_like(seconds)
    return {**dict.fromkeys(METRICS, ones), "epoch_s": seconds, "projected_s": seconds, "projection_error": 0 * ones}
