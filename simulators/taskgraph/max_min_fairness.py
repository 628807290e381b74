"""Weighted max-min fair rates under strict priority, the basis of every engine's semantics."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def fair_rates(use: Floats, *, capacity: Floats, cap: Floats, weight: Floats, priority: NDArray[np.int32]) -> Floats:
    """Rates [A] of active tasks by progressive filling.

    use [A, R]: units of resource per unit of work; capacity [R]; cap, weight, priority [A]. In each priority class,
    lowest number first, all rates rise as weight * level until a task meets its cap or a resource it uses is
    exhausted; that task stops, and the others go on. (Bertsekas and Gallager, Data Networks, §6.5.2, with weights.)
    """
    rate = np.zeros(len(cap))  # all rates start at 0 and rise together
    left = capacity.astype(float).copy()
    for level in np.unique(priority):  # sorted: a lower number is served first, others get what it leaves
        rising = priority == level
        while rising.any():
            # tasks that do not rise have weight 0, and ask for nothing
            rise, stopped, tight = _next_stop(use, left, np.where(rising, weight, 0.0), cap - rate)
            gained = np.where(rising, weight * rise, 0.0)
            rate = np.minimum(rate + gained, cap)  # rounding must not exceed a cap
            # exactly 0 where exhausted, so that later priorities get nothing
            left = np.where(tight, 0.0, np.maximum(left - gained @ use, 0.0))
            rising &= ~stopped
    return rate


def _next_stop(use: Floats, left: Floats, weight: Floats, room: Floats) -> tuple[float, Flags, Flags]:
    """Rise of the level, flags of the tasks that stop there (cap met or resource exhausted), of exhausted resources."""
    demand = weight @ use
    rising = weight > 0
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 and inf - inf, which `where` discards
        by_resource = np.where(demand > 0, left / demand, np.inf)
        by_cap = np.where(rising, room / weight, np.inf)
    # no resource or no task: nothing stops the rise
    rise = max(0.0, float(min(by_resource.min(initial=np.inf), by_cap.min(initial=np.inf))))
    tight = by_resource <= rise * (1 + 1e-12)  # ties within rounding stop together
    # a task on an exhausted resource can rise no further
    stopped = (by_cap <= rise * (1 + 1e-12)) | (use[:, tight] > 0).any(axis=1)
    return rise, stopped & rising, tight
