"""Samples of an epoch over variable sequence lengths: SeqPoint, and simpler choices of iterations.

SeqPoint (arXiv:2007.10459) takes one epoch's sequence lengths and iteration times t on one configuration. Its abstract
does not list the steps; these are recollection, as are their parameters (`conf/iterations/seqpoint.yaml`):

    few unique lengths      each of them stands for itself
    else                    the range of lengths is split into k bins of equal width, k = k0 at first; of each, the
                            length whose time is nearest to the mean over the bin's iterations represents the bin,
                            weighted by the number w of its iterations; k grows by one while |sum w t - T| > e T

and projects the epoch's time on another configuration, of iteration times t', as sum w t'. A bin without iterations has
no representative. Where k reaches the number of unique lengths each of these represents itself, which is exact as far
as iterations of one length take equally long.

The command `profile seqpoint` of the plug-in of papers reads logs of one's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dse.errors import ConfigError, Problem
from dse.values import Frozen, knob
from dse.values.units import Integer, Number

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Count = Annotated[Integer, Field(ge=1, le=2**31)]


class Iterations(Frozen):
    """Choice of the iterations of an epoch that are run, and how many each stands for.

    method: all; seqpoint; frequent (one of the most frequent length), median (of the median length), worst (of the
    length that projects worst); prior: `window` consecutive iterations after `warm_up`. Of seqpoint: k0 bins at first,
    the error that is allowed as a share of the epoch's time, and `few`, unique lengths of which all are taken.
    """

    name: str
    description: str = ""
    method: Annotated[Literal["all", "seqpoint", "frequent", "median", "worst", "prior"], knob(structural=True)]
    k0: Count = 5
    error: Annotated[Number, Field(gt=0, le=1)] = 0.01
    few: Annotated[Integer, Field(ge=0, le=2**31)] = 10
    warm_up: Annotated[Integer, Field(ge=0, le=2**31)] = 0
    window: Count = 50
    note: Any = None


@dataclass(frozen=True)
class Sample:
    """Iterations that stand for an epoch. places [k]: which; weights [k]: how many each stands for.

    bins: k of SeqPoint, of which some may be empty; elsewhere the number of iterations in the sample. error: of the
    projection on the configuration that they were chosen on, as a share of the epoch's time, signed.
    """

    places: Integers
    weights: Floats
    bins: int
    error: float


def choose(iterations: Iterations, lengths: ArrayLike, seconds: ArrayLike) -> Sample:
    """Iterations that stand for an epoch of sequence lengths [N] (whole numbers) and times [N], in its order.

    Deterministic: among equals the shortest length is taken, of the most frequent ones that nearest to the median; of a
    length the iteration nearest to its mean time, the first of these. Raises ConfigError where `prior` asks for more
    iterations than there are.
    """
    epoch = _Epoch.of(np.asarray(lengths, np.int64), np.asarray(seconds, float))
    size = len(epoch.seconds)
    if iterations.method == "all":
        return epoch.sample(np.arange(size), np.ones(size))
    if iterations.method == "prior":
        return _prior(iterations, epoch)
    if iterations.method == "seqpoint":
        return _seqpoint(iterations, epoch)
    if iterations.method == "frequent":
        index = _mode(epoch.counts)
    elif iterations.method == "median":
        index = np.searchsorted(np.cumsum(epoch.counts), (size + 1) // 2)  # the lower median
    else:
        # worst: the length whose time projects the epoch worst
        index = np.argmax(np.abs(epoch.seconds[epoch.places] * size - epoch.seconds.sum()))
    return epoch.sample(epoch.places[[index]], np.array([float(size)]))


def _mode(counts: Integers) -> np.intp:
    """Place of the most frequent length; among equals the one nearest to the median of all iterations."""
    middle = np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2)
    equals = np.flatnonzero(counts == counts.max())
    return np.intp(equals[np.argmin(np.abs(equals - middle))])  # ties go to the shorter length


def project_epoch(sample: Sample, seconds: ArrayLike) -> Floats:
    """Time [...] of the epoch by its sample, of iteration times [..., N]: sum w t."""
    return np.asarray(np.asarray(seconds, float)[..., sample.places] @ sample.weights)


def cut_sequential(sample: Sample, seconds: ArrayLike) -> Floats:
    """Time of the epoch over that of its sample, one iteration after another; [...] of [..., N]."""
    times = np.asarray(seconds, float)
    return np.asarray(times.sum(-1) / times[..., sample.places].sum(-1))


def cut_parallel(sample: Sample, seconds: ArrayLike) -> Floats:
    """Time of the epoch over that of the longest iteration of its sample; [...] of [..., N]."""
    times = np.asarray(seconds, float)
    return np.asarray(times.sum(-1) / times[..., sample.places].max(-1))


def iterations_cut(sample: Sample) -> float:
    """Iterations of the epoch over those of its sample."""
    return float(sample.weights.sum() / len(sample.places))


@dataclass(frozen=True)
class _Epoch:
    """An epoch by its unique lengths [U], ascending: iterations, mean time [s] and representative of each."""

    seconds: Floats
    lengths: Integers
    counts: Integers
    means: Floats
    places: Integers

    @classmethod
    def of(cls, lengths: Integers, seconds: Floats) -> _Epoch:
        """Raises ValueError where there are no iterations, or no time for each."""
        if lengths.shape != seconds.shape or lengths.ndim != 1 or not len(lengths):
            raise ValueError(f"lengths {lengths.shape} and seconds {seconds.shape} must be of one epoch, [N]")
        unique, inverse, counts = np.unique(lengths, return_inverse=True, return_counts=True)
        means = np.bincount(inverse, seconds) / counts
        # by length, then by distance from its mean time
        nearest = np.lexsort((np.abs(seconds - means[inverse]), inverse))
        # first of each length in that order
        return cls(seconds, unique, counts, means, nearest[np.cumsum(counts) - counts])

    def sample(self, places: Integers, weights: Floats, bins: int | None = None) -> Sample:
        """Some iterations, with the error that they make on this epoch."""
        total = self.seconds.sum()
        error = (self.seconds[places] @ weights - total) / total
        return Sample(places, weights, len(places) if bins is None else bins, float(error))

    def bin_representatives(self, bins: int) -> Sample:
        """A representative of each of so many bins of equal width that holds iterations."""
        low, high = self.lengths[0], self.lengths[-1]
        # the longest length belongs to the last bin
        bin_ = np.minimum((self.lengths - low) * bins // max(1, high - low), bins - 1)
        weights = np.bincount(bin_, self.counts, bins)
        with np.errstate(invalid="ignore"):  # a bin without iterations has no mean
            means = np.bincount(bin_, self.counts * self.means, bins) / weights
        nearest = np.lexsort((np.abs(self.means - means[bin_]), bin_))
        used_bins, first = np.unique(bin_[nearest], return_index=True)
        return self.sample(self.places[nearest[first]], weights[used_bins], bins)


def _seqpoint(iterations: Iterations, epoch: _Epoch) -> Sample:
    every = len(epoch.lengths)
    if every > iterations.few:  # otherwise each length stands for itself
        for bins in range(iterations.k0, every):  # from k0 up to where each length has a bin of its own
            sample = epoch.bin_representatives(bins)
            if abs(sample.error) <= iterations.error:
                return sample
    return epoch.sample(epoch.places, epoch.counts.astype(float))


def _prior(iterations: Iterations, epoch: _Epoch) -> Sample:
    size, end = len(epoch.seconds), iterations.warm_up + iterations.window
    if end > size:
        rule = f"ends after {end} iterations (warm_up + window) of an epoch of {size}"
        raise ConfigError([Problem("iterations.window", rule, iterations.window, "choose fewer")])
    weights = np.full(iterations.window, size / iterations.window)
    return epoch.sample(np.arange(iterations.warm_up, end), weights)
