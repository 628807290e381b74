"""A portfolio of methods: all learn from every point, and each is asked for as many as its proposals have earned.

A method earns the hypervolume that its points added to the front, per point; what was earned longer ago counts less
(adaptive pursuit, Thierens 2005). The first points are a Latin hypercube. Dear
methods are asked while few points are known, as a proposal of theirs costs the more, the more points there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import moocore
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.errors import Problems
from dse.search.methods import screened, tpe
from dse.search.question import Method, Outcome, Question
from dse.space import Assignment
from dse.units import Fraction, Integer
from dse.values import Frozen

_BEYOND = 0.1  # of the front's range, by which the reference point lies beyond it


class Options(Frozen):
    """initial: points spread evenly before any other. least: share of the points that a method proposes at least.

    forget: share of what was earned that no longer counts a batch later. dear: known points up to which methods are
    asked whose proposals get dearer with them.
    """

    initial: Annotated[Integer, Field(ge=1, le=100_000)] = 12
    least: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    forget: Fraction = 0.1
    dear: Annotated[Integer, Field(ge=0, le=100_000)] = 300


class Portfolio:
    """The method. question: what is searched. methods: `num_cheap` cheap ones, then dear ones; the first of them is
    asked for the first points.
    """

    def __init__(self, question: Question, options: Options, methods: Sequence[Method], *, num_cheap: int) -> None:
        self._options, self._methods, self._cheap = options, methods, num_cheap
        self._earned = np.zeros(len(self._methods))
        self._asked = np.zeros(len(self._methods))
        self._due = np.zeros(len(self._methods))
        self._proposed: dict[int, tuple[Assignment, int]] = {}
        self._front = _Front(question)

    def ask(self, count: int) -> Sequence[Assignment]:
        """As many proposals, those of each method by its share."""
        if self._front.num_known < self._options.initial:
            return self._methods[0].ask(count)
        self._due += count * self._shares()
        counts = np.zeros(len(self._methods), int)
        for _ in range(count):
            counts[int(np.argmax(self._due - counts))] += 1
        self._due -= counts
        return [point for place, asked in enumerate(counts.tolist()) if asked for point in self._of(place, asked)]

    def _of(self, place: int, count: int) -> Sequence[Assignment]:
        points = self._methods[place].ask(count)
        self._proposed |= {id(point): (point, place) for point in points}  # holds the point: its id stays its own
        return points

    def _shares(self) -> NDArray[np.float64]:
        """Of each method, of the next points: all but the least shares of the others go to the one that earns most."""
        num = len(self._methods) if self._front.num_known <= self._options.dear else self._cheap
        rates = self._earned[:num] / np.maximum(self._asked[:num], 1.0)
        shares = np.zeros(len(self._methods))
        shares[:num] = min(self._options.least, 1.0 / num)
        shares[int(np.argmax(rates))] += 1.0 - shares.sum()
        return shares

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Every method learns of every point; who proposed it earns what it adds."""
        for method in self._methods:
            method.tell(points, outcomes)
        kept = 1.0 - self._options.forget if any(outcome is not None for outcome in outcomes) else 1.0
        self._earned *= kept
        self._asked *= kept
        for point, outcome in zip(points, outcomes, strict=True):
            gain = self._front.add(outcome)
            _, by = self._proposed.pop(id(point), (None, None))
            if by is not None:
                self._earned[by] += gain
                self._asked[by] += 1.0


class _Front:
    """The front of what is known and within the limits. num_known: points that have an outcome."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._values = np.empty((0, len(question.goals)))
        self.num_known = 0

    def add(self, outcome: Outcome) -> float:
        """Take an outcome in: the hypervolume that it adds, over that of the box from the front's best to its worst and
        a little beyond, as that is with it."""
        if outcome is None:
            return 0.0
        self.num_known += 1
        if self._question.violation(outcome) > 0.0:
            return 0.0
        values = np.vstack([self._values, self._question.values([outcome])])
        kept = moocore.is_nondominated(values)
        if not kept[-1]:
            return 0.0
        before, self._values = self._values, values[kept]
        low, high = values.min(axis=0), values.max(axis=0)
        scale = np.where(high > low, high - low, 1.0)
        beyond = np.full(len(low), 1.0 + _BEYOND)
        held = [
            float(moocore.hypervolume((part - low) / scale, ref=beyond)) for part in (before, self._values) if len(part)
        ]
        return (held[-1] - (held[0] if len(before) else 0.0)) / float(beyond.prod())


def make(question: Question, options: Mapping[str, Any]) -> Portfolio:
    """The method, of `screened` and the dear `tpe`, by its options. Raises ConfigError."""
    check = Problems()
    found = check.model(Options, options, path="search.options")
    check.done()
    assert found is not None
    methods = [
        screened.make(question, {"initial": found.initial}),
        tpe.METHOD(question, {"n_startup_trials": found.initial}),
    ]
    return Portfolio(question, found, methods, num_cheap=1)


METHOD = make
