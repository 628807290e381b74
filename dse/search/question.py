"""What a search is about: the space, what is wanted, and how a point is evaluated; and what a search method is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from dse.space import Assignment, Space
from dse.units import Number
from dse.values import Frozen

Goal = Literal["minimize", "maximize"]
Outcome = Mapping[str, float] | None
"""Metrics of a point, or None where it has none (failed, or not to be evaluated)."""
Evaluate = Callable[[Sequence[Assignment]], Sequence[Outcome]]
Identify = Callable[[Assignment], str]
Legal = Callable[[Sequence[Assignment]], Sequence[bool]]
_TINY = 1e-30


class Limit(Frozen):
    """What a metric may be for a point to count as feasible, in its unit: low...high, null for no bound."""

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
        """How far values [B] are beyond each bound, as a share of the bound (in its unit where that is about 0); not
        above 0 where they are within."""
        found = {}
        for name, sign in (("low", -1.0), ("high", 1.0)):
            if (bound := getattr(self, name)) is not None:
                found[name] = sign * (values - bound) / (abs(bound) if abs(bound) > _TINY else 1.0)
        return found


def _all_legal(points: Sequence[Assignment]) -> list[bool]:
    return [True] * len(points)


@dataclass(frozen=True)
class Question:
    """What is searched: a space, the goals by metric, a seed, and how a point is evaluated and told apart.

    trials: distinct points that may be evaluated. legal: which points break no rule, as far as that is known
    beforehand; others are never evaluated. limits: by metric, beyond which a point does not count.
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
        """The objectives [B, objectives], such that smaller is better."""
        signs = [1.0 if goal == "minimize" else -1.0 for goal in self.goals.values()]
        rows = [[outcome[name] for name in self.goals] for outcome in outcomes]
        return np.array(rows, float).reshape(len(rows), len(signs)) * signs

    def constraints(self, outcome: Mapping[str, float]) -> dict[str, float]:
        """How far an outcome is beyond each bound of the limits, by name; not above 0 where it is within."""
        found: dict[str, float] = {}
        for name, limit in self.limits.items():
            beyond = limit.beyond(np.array([outcome[name]]))
            found |= {f"{name}.{bound}": float(values[0]) for bound, values in beyond.items()}
        return found

    def violation(self, outcome: Mapping[str, float]) -> float:
        """How far an outcome is beyond the limits in all; 0 where it is feasible."""
        return sum(max(0.0, value) for value in self.constraints(outcome).values())


class Method(Protocol):
    """A search method: it is asked for points and told of outcomes, a batch at a time. It depends on its seed alone."""

    def ask(self, count: int) -> Sequence[Assignment]:
        """Up to `count` proposals, which may be known already; none where it knows no more."""

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Outcomes of points: of those it was asked for, as the same objects, and of others."""


MakeMethod = Callable[[Question, Mapping[str, Any]], Method]
"""Makes a method from its options. Raises ConfigError for an option that does not fit."""
