"""Search problem (space, goals, limits, evaluation of points), and the interface of a search method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from dse.space import Assignment, Space
from dse.values import Frozen
from dse.values.units import Number

Goal = Literal["minimize", "maximize"]
Outcome = Mapping[str, float] | None
"""Metrics of a point, or None if it can have none: it failed, is infeasible or invalid, or breaks a rule."""
Evaluate = Callable[[Sequence[Assignment]], Sequence[Outcome]]
Identify = Callable[[Assignment], str]
Legal = Callable[[Sequence[Assignment]], Sequence[bool]]
_TINY = 1e-30  # a bound below this counts as 0, and nothing is a share of it
_NO_RESULT = 1e9  # excess of a point without a result: more than that over any limit, so that it ranks last


class Limit(Frozen):
    """Range of a metric within which a point is feasible, in its unit: low...high, null for no bound."""

    low: Number | None = None
    high: Number | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("bounds nothing: write low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"is empty: low = {self.low:g} is above high = {self.high:g}")
        return self

    def beyond(self, values: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Excess of values [B] over each bound, as a share of the bound; at most 0 for values within it.

        It is in the unit of the bound if that is about 0.
        """
        excess = {}
        for name, sign in (("low", -1.0), ("high", 1.0)):
            if (bound := getattr(self, name)) is not None:
                excess[name] = sign * (values - bound) / (abs(bound) if abs(bound) > _TINY else 1.0)
        return excess


def _all_legal(points: Sequence[Assignment]) -> list[bool]:
    return [True] * len(points)


@dataclass(frozen=True)
class SearchQuestion:
    """A search problem: a space, the goals by metric, a seed, and functions that evaluate and identify points.

    trials: budget of distinct points. legal: mask of the points that break no rule, as far as that is known
    beforehand; others are never evaluated. limits: by metric, beyond which a point is infeasible.
    """

    space: Space
    goals: Mapping[str, Goal]
    seed: int
    trials: int
    evaluate: Evaluate
    identify: Identify
    legal: Legal = _all_legal
    limits: Mapping[str, Limit] = field(default_factory=dict)

    def values(self, outcomes: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
        """Objectives [B, objectives] of outcomes, signed such that smaller is better."""
        signs = [1.0 if goal == "minimize" else -1.0 for goal in self.goals.values()]
        rows = [[outcome[name] for name in self.goals] for outcome in outcomes]
        return np.array(rows, float).reshape(len(rows), len(signs)) * signs  # [0, objectives] without outcomes

    def excess(self, outcome: Mapping[str, float]) -> dict[str, float]:
        """Excess of an outcome over each bound of the limits, by name; at most 0 within the bound."""
        return excess(self.limits, outcome)

    def violation(self, outcome: Mapping[str, float]) -> float:
        """Total excess of an outcome over the limits; 0 if it is feasible."""
        # reserves at one limit do not make up for excess at another
        return sum(max(0.0, value) for value in self.excess(outcome).values())


def excess(limits: Mapping[str, Limit], outcome: Mapping[str, float]) -> dict[str, float]:
    """Excess of an outcome over each bound of some limits, by name; at most 0 within the bound."""
    beyond = {name: limit.beyond(np.array([outcome[name]])) for name, limit in limits.items()}
    return {f"{name}.{bound}": float(values[0]) for name, sides in beyond.items() for bound, values in sides.items()}


def constraints(limits: Mapping[str, Limit], outcome: Outcome) -> dict[str, float]:
    """Constraints of a point as Optuna knows them, met where at most 0: `result`, and every bound of the limits.

    `result` is violated by more than any limit where there is no outcome; the limits are then neither met nor violated.
    All points have the same constraints, in the same order.
    """
    if outcome is not None:
        return {"result": -_NO_RESULT, **excess(limits, outcome)}  # well met
    # any value: only the names of the bounds matter
    bounds = [f"{name}.{bound}" for name, limit in limits.items() for bound in limit.beyond(np.zeros(1))]
    return {"result": _NO_RESULT, **dict.fromkeys(bounds, 0.0)}


class SearchMethod(Protocol):
    """A search method: it proposes points and learns outcomes, a batch at a time. It depends on its seed alone.

    One whose attribute `finishes` is true ends the search when it proposes nothing more.
    """

    def ask(self, count: int) -> Sequence[Assignment]:
        """Propose up to `count` points, which may be known already; none if it has no more proposals."""

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Learn the outcomes of points: of its proposals, as the same objects, and of others.

        A point without an outcome is worse than every other: a method that ignores it takes it for unknown, and so for
        promising.
        """


MakeMethod = Callable[[SearchQuestion, Mapping[str, Any]], SearchMethod]
"""Factory of a method from its options. Raises ConfigError for an invalid option."""
