"""Coordinate search: every value of one knob at a time, the best of each together, and again around what won.

The first sweep changes one knob of the first point at a time. What each knob gains alone is then put together, and
knobs are changed one at a time around the better of this point and the best so far, by the values that did best in the
first sweep, until nothing is better. Where the objective is a sum of terms of one knob each, the first combination is
the optimum; else the result is one that no change of a single knob among these values improves. Points are ranked by
the first objective, those beyond a limit behind all others. The search ends by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from dse.errors import ConfigError, Problem, Problems
from dse.search.genes import Genes, Rows
from dse.search.question import Outcome, Question
from dse.space import Assignment
from dse.units import Integer
from dse.values import Frozen

_NONE = (np.inf, np.inf)


class Options(Frozen):
    """most: values of each knob that are tried again around a new best point, those that did best before."""

    most: Annotated[Integer, Field(ge=1, le=1000)] = 6


class Coordinate:
    """The search method. Raises ConfigError for a knob that is an interval."""

    finishes = True

    def __init__(self, question: Question, options: Options) -> None:
        self._question, self._options, self._genes = question, options, Genes(question.space)
        for knob in self._genes.knobs:
            if not knob.values:
                way = "list values: choice(a,b), range(a,b,step)"
                raise ConfigError(
                    [Problem(f"space.{knob.path}", "is an interval, which has no values to try", None, way)]
                )
        self._random = np.random.default_rng(question.seed)
        self._ranks: dict[bytes, tuple[float, float]] = {}
        first = np.zeros((1, len(self._genes.knobs)))
        self._best: Rows = self._genes.settle(first, self._random)[0]
        self._sweeps = self._all_sweeps()
        self._waiting: list[Rows] = []

    def ask(self, count: int) -> Sequence[Assignment]:
        """Propose points of the sweep at hand; those of the next one once the outcomes of all are known."""
        while not self._waiting and (rows := next(self._sweeps, None)) is not None:
            self._waiting = [row for row in rows if row.tobytes() not in self._ranks]
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        return self._genes.points(np.array(asked)) if asked else []

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Learn how points rank."""
        if not points:
            return
        for row, outcome in zip(self._genes.rows(points), outcomes, strict=True):
            rank = _NONE
            if outcome is not None:
                rank = self._question.violation(outcome), float(self._question.values([outcome])[0, 0])
            self._ranks[row.tobytes()] = min(rank, self._ranks.get(row.tobytes(), _NONE))

    def _all_sweeps(self) -> Iterator[list[Rows]]:
        """Yield the rows of each sweep; the next one begins where the outcomes of the one before lead."""
        first, values = self._best, [range(int(size)) for size in self._genes.sizes]
        yield [first, *self._neighbours(first, values)]
        by_knob = [self._ranked(first, knob, values[knob]) for knob in range(len(values))]
        together = first.copy()
        for knob, (best, *_) in enumerate(by_knob):
            together[knob] = best
        yield [*self._genes.settle(together[None], self._random)]
        few = [ranked[: self._options.most] for ranked in by_knob]
        while self._improve():
            yield self._neighbours(self._best, few)

    def _improve(self) -> bool:
        """Go to the best point that is known; whether that is another one."""
        best = min(self._ranks, key=lambda name: self._ranks[name])
        better = self._rank(np.frombuffer(best)) < self._rank(self._best)
        self._best = np.frombuffer(best) if better else self._best
        return better

    def _rank(self, row: Rows) -> tuple[float, float]:
        return self._ranks.get(row.tobytes(), _NONE)

    def _ranked(self, around: Rows, knob: int, values: Sequence[int]) -> list[int]:
        """Values of a knob, the best around a point first, its own before others as good."""
        ranks = {value: self._rank(self._changed(around, knob, value)) for value in values}
        return sorted(values, key=lambda value: (ranks[value], value != around[knob]))

    def _neighbours(self, around: Rows, values: Sequence[Sequence[int]]) -> list[Rows]:
        """Rows that differ from one in one knob that counts there."""
        active = [knob for knob in range(len(values)) if around[knob] >= 0]
        return [
            self._changed(around, knob, value) for knob in active for value in values[knob] if value != around[knob]
        ]

    def _changed(self, around: Rows, knob: int, value: int) -> Rows:
        row = around.copy()
        row[knob] = value
        settled: Rows = self._genes.settle(row[None], self._random)[0]
        return settled


def make(question: Question, options: Mapping[str, object]) -> Coordinate:
    """Make the method from its options. Raises ConfigError."""
    check = Problems()
    settings = check.model(Options, options, path="search.options")
    check.done()
    assert settings is not None
    return Coordinate(question, settings)


METHOD = make
