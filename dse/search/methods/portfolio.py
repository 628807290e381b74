"""A portfolio of methods: all learn from every point, and each proposes points in proportion to its past gains.

The gain of a method is the hypervolume that its points added to the front, per point; older gains count less (adaptive
pursuit, Thierens 2005). The first points are a Latin hypercube. Expensive methods propose only while few points are
known, because the cost of their proposals grows with the number of points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import moocore
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.errors import validate_as
from dse.search import Outcome, SearchMethod, SearchQuestion
from dse.search.methods import samplers, screened
from dse.space import Assignment
from dse.values import Frozen, Memo
from dse.values.units import Fraction, Integer

_BEYOND = 0.1  # distance of the reference point beyond the front, as a share of its range


class PortfolioOptions(Frozen):
    """initial: points of the Latin hypercube. least: least share of the points that a method proposes.

    forget: share of the gains that is forgotten per batch. dear: number of known points up to which expensive methods
    propose.
    """

    initial: Annotated[Integer, Field(ge=1, le=100_000)] = 12
    least: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    forget: Fraction = 0.1
    dear: Annotated[Integer, Field(ge=0, le=100_000)] = 300


class Portfolio:
    """The search method. methods: `num_cheap` cheap ones, then expensive ones; the first draws the initial points."""

    def __init__(
        self, question: SearchQuestion, options: PortfolioOptions, methods: Sequence[SearchMethod], *, num_cheap: int
    ) -> None:
        self._options, self._methods, self._cheap = options, methods, num_cheap
        self._earned = np.zeros(len(self._methods))  # decayed sums of gains
        self._asked = np.zeros(len(self._methods))
        self._due = np.zeros(len(self._methods))  # points that a method is owed, in fractions
        self._proposed = Memo[int]()
        self._front = _Front(question)

    def ask(self, count: int) -> Sequence[Assignment]:
        """Propose `count` points, those of each method by its share."""
        if self._front.num_known < self._options.initial:
            return self._methods[0].ask(count)  # which draws the Latin hypercube
        self._due += count * self._shares()
        counts = np.zeros(len(self._methods), int)
        for _ in range(count):
            counts[int(np.argmax(self._due - counts))] += 1  # largest remainder first
        self._due -= counts  # what is left over counts in the next batch
        return [point for place, num in enumerate(counts.tolist()) if num for point in self._of(place, num)]

    def _of(self, place: int, count: int) -> Sequence[Assignment]:
        points = self._methods[place].ask(count)
        for point in points:
            self._proposed.keep(place, point)
        return points

    def _shares(self) -> NDArray[np.float64]:
        """Share of each method in the next points: the best earner gets all but the least shares of the others."""
        num = len(self._methods) if self._front.num_known <= self._options.dear else self._cheap
        # a method that was not asked yet has no rate to divide
        rates = self._earned[:num] / np.maximum(self._asked[:num], 1.0)
        shares = np.zeros(len(self._methods))
        shares[:num] = min(self._options.least, 1.0 / num)
        shares[int(np.argmax(rates))] += 1.0 - shares.sum()
        return shares

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Tell every method every outcome, and credit the gain of a point to the method that proposed it."""
        for method in self._methods:
            method.tell(points, outcomes)  # also of others' points: all learn from all
        # a batch without outcomes says nothing
        decay = 1.0 - self._options.forget if any(outcome is not None for outcome in outcomes) else 1.0
        self._earned *= decay
        self._asked *= decay
        for point, outcome in zip(points, outcomes, strict=True):
            gain = self._front.add(outcome)
            by = self._proposed.pop(point)
            if by is not None:
                self._earned[by] += gain
                self._asked[by] += 1.0


class _Front:
    """Front of the feasible points. num_known: points that were evaluated or refused."""

    def __init__(self, question: SearchQuestion) -> None:
        self._question = question
        self._values = np.empty((0, len(question.goals)))
        self.num_known = 0

    def add(self, outcome: Outcome) -> float:
        """Add an outcome. Returns the hypervolume that it adds, as a share of the box from the best of the new front to
        its worst and a little beyond."""
        self.num_known += 1
        if outcome is None or self._question.violation(outcome) > 0.0:
            return 0.0
        values = np.vstack([self._values, self._question.values([outcome])])
        on_front = moocore.is_nondominated(values)
        if not on_front[-1]:  # a dominated point adds nothing
            return 0.0
        before, self._values = self._values, values[on_front]
        low, high = values.min(axis=0), values.max(axis=0)  # of old and new front, so that both are measured in one box
        scale = np.where(high > low, high - low, 1.0)
        beyond = np.full(len(low), 1.0 + _BEYOND)  # the ends of a front would add nothing with the reference at them
        volumes = [
            float(moocore.hypervolume((part - low) / scale, ref=beyond)) for part in (before, self._values) if len(part)
        ]
        return (volumes[-1] - (volumes[0] if len(before) else 0.0)) / float(beyond.prod())


def make(question: SearchQuestion, options: Mapping[str, Any]) -> Portfolio:
    """Make the method from its options: `screened`, and the expensive `tpe`. Raises ConfigError."""
    settings = validate_as(PortfolioOptions, options, path="search.options")
    methods = [
        screened.make(question, {"initial": settings.initial}),
        samplers.TPE(question, {"n_startup_trials": settings.initial}),
    ]
    return Portfolio(question, settings, methods, num_cheap=1)  # proposals of TPE cost more with each known point


METHOD = make
