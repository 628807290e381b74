"""Coordinate search: every value of one knob at a time, the best of each together, and again around what won.

The first sweep changes one knob of the first point at a time, for every combination of the values of those knobs that
decide which others count. What each knob gains alone is then put together, and
knobs are changed one at a time around the better of this point and the best so far, by the values that did best in the
first sweep, until nothing is better. Where the objective is a sum of terms of one knob each, the first combination is
the optimum; else the result is one that no change of a single knob among these values improves. Points are ranked by
the first objective, those beyond a limit behind all others. The search ends by itself.
"""

from __future__ import annotations

import itertools
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
        deciding = {knob.path for knob in question.space.deciding_knobs}
        paths = [knob.path for knob in self._genes.knobs]
        self._deciding = [place for place, path in enumerate(paths) if path in deciding]
        self._free = [place for place, path in enumerate(paths) if path not in deciding]
        self._ranks: dict[bytes, tuple[float, float]] = {}
        self._sweeps = self._all_sweeps()
        self._waiting: list[Rows] = []
        self._asked = set[bytes]()  # rows whose outcomes are not known yet
        self._best: Rows = np.zeros(len(self._genes.knobs))

    def ask(self, count: int) -> Sequence[Assignment]:
        """Propose points of the sweep at hand; those of the next one once the outcomes of all are known."""
        while not self._waiting and not self._asked and (rows := next(self._sweeps, None)) is not None:
            self._waiting = [row for row in rows if row.tobytes() not in self._ranks]
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        self._asked.update(row.tobytes() for row in asked)
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
            self._asked.discard(row.tobytes())

    def _all_sweeps(self) -> Iterator[list[Rows]]:
        """Yield the rows of each sweep; the next one begins where the outcomes of the one before lead."""
        starts, values = self._starts(), [range(int(size)) for size in self._genes.sizes]
        yield [row for start in starts for row in (start, *self._neighbours(start, values))]
        self._best = min(starts, key=self._rank)
        ranked = {start.tobytes(): [self._ranked(start, knob, values[knob]) for knob in self._free] for start in starts}
        yield [self._together(start, ranked[start.tobytes()]) for start in starts]
        while self._improve():
            start = next(start for start in starts if (start[self._deciding] == self._best[self._deciding]).all())
            few = dict(zip(self._free, ranked[start.tobytes()], strict=True))
            most = self._options.most
            yield self._neighbours(self._best, [few.get(knob, values[knob])[:most] for knob in range(len(values))])

    def _starts(self) -> list[Rows]:
        """Rows with the first value of every knob, for each combination of those of the deciding knobs."""
        starts: dict[bytes, Rows] = {}
        for chosen in itertools.product(*(range(int(self._genes.sizes[knob])) for knob in self._deciding)):
            row = np.zeros(len(self._genes.knobs))
            row[self._deciding] = chosen
            settled = self._settle(row)
            starts[settled.tobytes()] = settled
        return list(starts.values())

    def _together(self, start: Rows, ranked: Sequence[Sequence[int]]) -> Rows:
        """The best value of each knob, put together."""
        together = start.copy()
        for knob, (best, *_) in zip(self._free, ranked, strict=True):
            together[knob] = best if start[knob] >= 0 else -1
        return self._settle(together)

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
        return self._settle(row)

    def _settle(self, row: Rows) -> Rows:
        """A valid point: knobs that come to count have their first value."""
        settled: Rows = self._genes.settle(np.where(row < 0, 0, row)[None], self._random)[0]
        return settled


def make(question: Question, options: Mapping[str, object]) -> Coordinate:
    """Make the method from its options. Raises ConfigError."""
    check = Problems()
    settings = check.model(Options, options, path="search.options")
    check.done()
    assert settings is not None
    return Coordinate(question, settings)


METHOD = make
