"""What a search is about: the space, what is wanted, and how a point is evaluated; and what a search method is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dse.space import Assignment, Space

Goal = Literal["minimize", "maximize"]
Outcome = Mapping[str, float] | None
"""Metrics of a point, or None where it has none (infeasible, failed)."""
Evaluate = Callable[[Sequence[Assignment]], Sequence[Outcome]]
Identify = Callable[[Assignment], str]


@dataclass(frozen=True)
class Question:
    """What is searched: a space, the goals by metric, a seed, and how a point is evaluated and told apart."""

    space: Space
    goals: Mapping[str, Goal]
    seed: int
    evaluate: Evaluate
    identify: Identify

    def values(self, outcomes: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
        """The objectives [B, objectives], such that smaller is better."""
        signs = [1.0 if goal == "minimize" else -1.0 for goal in self.goals.values()]
        rows = [[outcome[name] for name in self.goals] for outcome in outcomes]
        return np.array(rows, float).reshape(len(rows), len(signs)) * signs


class Method(Protocol):
    """A search method: it is asked for points and told of outcomes, a batch at a time. It depends on its seed alone."""

    def ask(self, count: int) -> Sequence[Assignment]:
        """Up to `count` proposals, which may be known already; none where it knows no more."""

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Outcomes of points: of those it was asked for, as the same objects, and of others."""


MakeMethod = Callable[[Question, Mapping[str, Any]], Method]
"""Makes a method from its options. Raises ConfigError for an option that does not fit."""
