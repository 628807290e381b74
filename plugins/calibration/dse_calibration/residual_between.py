"""Spread of errors between names of a trait: how far rows of another GPU, model, release or count may be off.

A model of random effects: rows of a name share an effect u of variance tau^2, and each row has an error e of its own,

    log(measured / predicted) = centre + u of its name + e.

Where groups are divided by other traits (`dse_calibration.residual_groups.Trait.within`), names are compared in sets.
The variance of the medians of names around the mean of their set, over all sets together, is tau^2, with d = names less
sets degrees of freedom. Predictions by the constants of another name are off by what two names differ, 2 tau^2 around
0. A row of a new name is within

    t sqrt(sigma^2 + c tau^2),      c = 1 + 1 / G of the centre of G names in effect, c = 2 of one other name

as in the prediction intervals of meta-analyses (Higgins, Thompson and Spiegelhalter 2009). Sigma is the 5 or the 95 %
quantile of e over 1.645; t has the degrees of freedom of such a sum by Satterthwaite (1946).

Few names show little of tau. As in moderated variances (Smyth 2004), tau^2 / sigma^2 of every trait and kind is drawn
from a scaled inverse chi-squared distribution, whose scale s0^2 and degrees of freedom d0 all of them give
(`SpreadPrior`); tau^2 is the mean of both, weighed by degrees of freedom, and has d0 + d. No constant is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from simulators.hardware.residuals import LEVEL

Floats = NDArray[np.float64]
ByName = Mapping[str, Sequence[float] | Floats]
_TAIL = (1 - LEVEL) / 2
_Z = NormalDist().inv_cdf(1 - _TAIL)
_ENOUGH = round(1 / _TAIL) - 1  # rows from which the 5 and the 95 % quantile exist: 19
_MANY = 1e4  # degrees of freedom from which t is normal to four digits
_LEAST_SIGMA = 1e-4  # of logarithms: tables have four digits


@dataclass(frozen=True)
class SpreadPrior:
    """What other traits and kinds tell of tau^2 / sigma^2: its scale s0^2, and degrees of freedom d0; 0: nothing."""

    ratio: float = 0.0
    free: float = 0.0

    @classmethod
    def of(cls, spreads: Iterable[Spread]) -> SpreadPrior:
        """By the moments of log(tau^2 / sigma^2), as Smyth (2004, section 6.2) estimates them."""
        from scipy.special import digamma, polygamma

        pairs = [(spread.between / spread.sigma, spread.free) for spread in spreads if spread.between > 0]
        if len(pairs) < 3:  # two do not show how much ratios vary
            return cls()
        ratios, free = (np.array(column, float) for column in zip(*pairs, strict=True))
        logs = 2 * np.log(ratios) - digamma(free / 2) + np.log(free / 2)
        excess = float(np.var(logs, ddof=1) - np.mean(polygamma(1, free / 2)))
        d0 = 2 * _inverse_trigamma(excess) if excess > 0 else _MANY
        d0 = min(d0, _MANY)
        return cls(math.exp(float(np.mean(logs)) + float(digamma(d0 / 2)) - math.log(d0 / 2)), d0)


NOTHING = SpreadPrior()
"""The prior where no other trait is known: few names alone tell how far names differ."""


@dataclass(frozen=True)
class Spread:
    """Spread of errors in and between names. within: (below, above) that 90 % of rows are from their name's median.

    between: tau, of logarithms. free: degrees of freedom of tau. effects: variance of what a new name is off from the
    centre, in tau^2: that of its own effect, and of the centre.
    """

    within: tuple[float, float]
    between: float
    free: int
    effects: float

    @classmethod
    def of(cls, alike: Sequence[ByName], *, names: int | None = None) -> Spread | None:
        """Of residuals by name, in sets of which those of one set are compared; None where no set has two names.

        names: how many are independent, where those of several sets are the same ones.
        """
        compared = [by_name for by_name in alike if len(by_name) > 1]
        if not compared:
            return None
        medians = [np.array([float(np.median(part)) for part in by_name.values()]) for by_name in compared]
        squares = sum(float(np.sum((part - part.mean()) ** 2)) for part in medians)
        free = sum(len(part) - 1 for part in medians)
        independent = free if names is None else min(free, names - 1)
        return cls(_within(compared), math.sqrt(squares / free), independent, 1 + 1 / _effective(compared))

    @classmethod
    def of_pairs(cls, carried: ByName, *, names: int) -> Spread:
        """Of residuals by pair of what was predicted and what gave the constants: what two of `names` names differ."""
        medians = np.array([float(np.median(part)) for part in carried.values()])
        return cls(_within([carried]), math.sqrt(float(np.mean(medians**2)) / 2), names - 1, 2.0)

    @classmethod
    def of_one(cls, alike: Sequence[ByName]) -> Spread:
        """Of a single name, which shows nothing of how names differ: the prior alone tells."""
        return cls(_within(alike), 0.0, 0, 2.0)

    def around(self, rows: Floats) -> Spread:
        """The spread of names around rows of a single one, where these are enough to show their own."""
        return replace(self, within=_within([{"": rows}])) if len(rows) >= _ENOUGH else self

    @property
    def sigma(self) -> float:
        """Standard deviation of rows around the median of their name, as a normal distribution would have it."""
        return max(sum(self.within) / 2 / _Z, _LEAST_SIGMA)

    def ends(self, prior: SpreadPrior = NOTHING) -> tuple[float, float]:
        """Distances (below, above) from the centre that 90 % of the rows of a new name are within."""
        from scipy.stats import t

        free = prior.free + self.free
        variance = (prior.free * prior.ratio * self.sigma**2 + self.free * self.between**2) / free
        variance *= self.effects
        total = self.sigma**2 + variance
        satterthwaite = min(total**2 * free / max(variance, 1e-12) ** 2, _MANY)
        factor = float(t.ppf(1 - _TAIL, satterthwaite))
        below, above = (factor * math.hypot(side / _Z, math.sqrt(variance)) for side in self.within)
        return below, above


def _effective(alike: Sequence[ByName]) -> float:
    """Names in effect of the median of all rows, to which each name gives its share p of them: 1 / sum p^2 (Kish 1965).

    >>> _effective([{"a": [0.0] * 9, "b": [0.0] * 9}]), round(_effective([{"a": [0.0] * 90, "b": [0.0] * 10}]), 2)
    (2.0, 1.22)
    """
    rows: dict[str, int] = {}
    for by_name in alike:
        for name, part in by_name.items():
            rows[name] = rows.get(name, 0) + len(part)
    return sum(rows.values()) ** 2 / sum(count**2 for count in rows.values())


def _within(alike: Sequence[ByName]) -> tuple[float, float]:
    """Sizes of the 5 and the 95 % quantile of what rows are off from the median of their name.

    Names count alike, but those whose rows are too few for such quantiles, which count by their rows.
    """
    parts = [np.array(part) - np.median(part) for by_name in alike for part in by_name.values()]
    pooled = np.concatenate(parts)
    weights = np.concatenate([np.full(len(part), min(len(part), _ENOUGH) / len(part)) for part in parts])
    order = np.argsort(pooled)
    reached = np.cumsum(weights[order]) / weights.sum()
    places = np.minimum(np.searchsorted(reached, (_TAIL, 1 - _TAIL)), len(order) - 1)
    low, high = pooled[order][places]
    return max(0.0, -float(low)), max(0.0, float(high))


def _inverse_trigamma(value: float) -> float:
    """The x of trigamma(x) = value > 0."""
    from scipy.optimize import brentq
    from scipy.special import polygamma

    return math.exp(brentq(lambda log: float(polygamma(1, math.exp(log))) - value, -20.0, 20.0))
