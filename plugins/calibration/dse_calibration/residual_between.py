"""Components of errors between names of a trait: how far rows of another GPU, model, release or count may be off.

Each name is left out in turn. With m the median of the medians of the other names it is compared with, the deviations
r - m of its rows are pooled, each name counting alike; so are those from the median of the name itself. Of their 5 and
95 % quantiles, L and l on one side, the component is what the first have more,

    c = sqrt(max(0, L^2 - l^2)) t / 1.645 sqrt(1 + 1 / G)

where t is the 95 % quantile of Student's t with G - 1 degrees of freedom, at least 4: G names show little of how names
vary, but other kinds of work show that they do not vary without bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from simulators.hardware.residuals import LEVEL

Floats = NDArray[np.float64]
_TAIL = (1 - LEVEL) / 2
_Z = NormalDist().inv_cdf(1 - _TAIL)
_LEAST_FREE = 4  # degrees of freedom, as if five names had been seen


@dataclass(frozen=True)
class Spread:
    """Distances (below, above) that 90 % of rows are within: from the median of their name, and between names."""

    within: tuple[float, float]
    between: tuple[float, float]

    @classmethod
    def of(cls, alike: Sequence[Mapping[str, Sequence[float] | Floats]]) -> Spread | None:
        """Of residuals by name, in sets of which those of one set are compared; None where no set has two names."""
        others, own, names = list[Floats](), list[Floats](), set[str]()
        for by_name in alike:
            medians = {name: float(np.median(residuals)) for name, residuals in by_name.items()}
            for name, residuals in by_name.items() if len(by_name) > 1 else ():
                left = [median for other, median in medians.items() if other != name]
                others.append(np.array(residuals) - np.median(left))
                own.append(np.array(residuals) - medians[name])
                names.add(name)
        if not names:
            return None
        within, left_out = _ends(own), _ends(others)
        low, high = (
            _few(len(names)) * math.sqrt(max(0.0, all_of_it**2 - kept**2))
            for all_of_it, kept in zip(left_out, within, strict=True)
        )
        return cls(within, (low, high))


def _ends(parts: Sequence[Floats]) -> tuple[float, float]:
    """Sizes of the 5 and the 95 % quantile of deviations, each part counting alike; 0 where it is on the other side."""
    pooled = np.concatenate(parts)
    weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in parts])
    order = np.argsort(pooled)
    reached = np.cumsum(weights[order]) / weights.sum()
    places = np.minimum(np.searchsorted(reached, (_TAIL, 1 - _TAIL)), len(order) - 1)
    low, high = pooled[order][places]
    return max(0.0, -float(low)), max(0.0, float(high))


def _few(names: int) -> float:
    """Factor on a component that few names show."""
    from scipy.stats import t

    return float(t.ppf(1 - _TAIL, max(names - 1, _LEAST_FREE))) / _Z * math.sqrt(1 + 1 / names)
