"""Local search around the Pareto front whose children are screened: a Gaussian process says which are worth it.

Of many children, and some points drawn evenly, those are asked for whose draw from what the process expects of them
(Thompson 1933) is furthest beyond the front: by the maximin improvement (Svenson and Santner 2016), which needs no
reference point. Objectives of one sign are modelled in logarithms, and compared with the front as they are. The
process learns from the best points and from an even sample of all, so a proposal costs the same however many points
are known. The first points are a Latin hypercube.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import moocore
import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.stats import qmc

from dse.errors import Problems
from dse.search.genes import Rows
from dse.search.methods import archive
from dse.search.question import Question
from dse.search.surrogate import Surrogate
from dse.units import Fraction, Integer

_FEWEST = 8  # points that the process learns from at least
_GROWN = 1.1  # more points are known when the process's rates are tuned again
_CELLS = 1 << 20  # points times members of the front that are compared at a time


class Options(archive.Options):
    """As of `archive`, and: pool: children that are screened for each batch. even: share of them drawn evenly.

    learned: points that the process learns from, half of them the best, half an even sample.
    """

    initial: Annotated[Integer, Field(ge=1, le=100_000)] = 12
    pool: Annotated[Integer, Field(ge=1, le=100_000)] = 512
    even: Fraction = 0.25
    learned: Annotated[Integer, Field(ge=16, le=2000)] = 160


class Screened(archive.Archive):
    """The method. question: what is searched."""

    def __init__(self, question: Question, options: Options) -> None:
        super().__init__(question, options)
        self._most, self._surrogate = options, Surrogate(self._genes)
        spread = qmc.LatinHypercube(len(self._genes.knobs), rng=np.random.default_rng(question.seed))
        self._first = spread.random(options.initial)
        self._learned = _Learned.none(len(self._genes.knobs), len(question.goals))
        self._front = np.empty((0, len(question.goals)))  # objectives of the best points within the limits
        self._num_learned = self._tuned = 0

    def _learn(self, rows: Rows, found: Sequence[Mapping[str, float]]) -> None:
        """Take in points that have an outcome."""
        super()._learn(rows, found)
        margins = [max(self._question.constraints(outcome).values(), default=-1.0) for outcome in found]
        fresh = _Learned(rows, self._question.values(found), np.array(margins), self._random.random(len(rows)))
        front = np.concatenate([self._front, fresh.values[fresh.margins <= 0.0]])
        self._front = front[moocore.is_nondominated(front)] if len(front) else front
        self._learned = self._learned.join(fresh).some(self._most.learned // 2)
        self._num_learned += len(rows)

    def _drawn(self, count: int) -> Rows:
        """The first points are spread evenly in every knob by itself."""
        first, self._first = self._first[:count], self._first[count:]
        sizes = self._genes.sizes
        spread = self._genes.settle(np.where(sizes > 0, np.floor(first * sizes), first), self._random)
        return np.concatenate([spread, super()._drawn(count - len(spread))])

    def _children(self, count: int) -> Rows:
        """The most promising of many children that nobody has seen."""
        if len(self._learned.rows) < _FEWEST:
            return super()._children(count)
        many = max(self._most.pool, 2 * count)
        drawn = round(self._most.even * many)
        made = np.concatenate([super()._children(many - drawn), super()._drawn(drawn)])
        fresh = {name: row for row in made if (name := row.tobytes()) not in self._seen}
        pool = np.array(list(fresh.values())).reshape(-1, made.shape[1])
        return pool[self._promising(pool, count)] if len(pool) else pool

    def _promising(self, pool: Rows, count: int) -> list[int]:
        """Places of the `count` points of the pool whose draws are furthest beyond the front and those before them."""
        known, tune = self._learned, self._num_learned >= _GROWN * self._tuned
        values, signs = _scaled(known.values)
        self._tuned = self._num_learned if tune else self._tuned
        self._surrogate.fit(known.rows, np.column_stack([values, known.margins]), tune=tune)
        mean, deviation = self._surrogate.predict(pool)
        drawn = mean + deviation * self._random.standard_normal(mean.shape)
        drawn[:, :-1] = np.where(signs != 0, signs * np.exp(signs * drawn[:, :-1]), drawn[:, :-1])
        within = known.values[known.margins <= 0.0] if len(self._front) else known.values
        front = self._front if len(self._front) else known.values[moocore.is_nondominated(known.values)]
        spread = np.where(np.ptp(front, axis=0) > 0, np.ptp(front, axis=0), np.ptp(within, axis=0))
        drawn[:, :-1] /= np.where(spread > 0, spread, 1.0)
        front = front / np.where(spread > 0, spread, 1.0)
        gains = _improvements(drawn[:, :-1], front)
        beyond, chosen = np.maximum(0.0, drawn[:, -1]), list[int]()
        for _ in range(min(count, len(pool))):
            chosen.append(int(np.lexsort((-gains, beyond))[0]))
            gains = np.minimum(gains, (drawn[chosen[-1], :-1] - drawn[:, :-1]).max(axis=1))
            gains[chosen[-1]], beyond[chosen[-1]] = -np.inf, np.inf
        return chosen


@dataclass(frozen=True)
class _Learned:
    """Points as rows [B, genes], objectives [B, M] of them, how far beyond their worst limit they are [B], and a lot
    [B] drawn for each: those with the smallest lots are an even sample."""

    rows: Rows
    values: NDArray[np.float64]
    margins: NDArray[np.float64]
    lots: NDArray[np.float64]

    @classmethod
    def none(cls, genes: int, objectives: int) -> _Learned:
        return cls(np.empty((0, genes)), np.empty((0, objectives)), np.empty(0), np.empty(0))

    def join(self, other: _Learned) -> _Learned:
        """Both, one after the other."""
        return _Learned(*(np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def some(self, half: int) -> _Learned:
        """The best `half`, and `half` others that are an even sample."""
        rank = moocore.pareto_rank(self.values)
        best = np.lexsort((self.lots, rank, np.maximum(0.0, self.margins)))
        order = np.concatenate([best[:half], best[half:][np.argsort(self.lots[best[half:]], kind="stable")][:half]])
        return _Learned(*(part[order] for part in vars(self).values()))


def _improvements(values: NDArray[np.float64], front: NDArray[np.float64]) -> NDArray[np.float64]:
    """Maximin improvements [B] of objectives [B, M] over a front [F, M]: over each member, where that is largest."""
    least = np.full(len(values), np.inf)
    for some in np.array_split(front, -(-front.shape[0] * len(values) // _CELLS)):
        over = some[:, :1] - values[:, 0]
        for objective in range(1, values.shape[1]):
            np.maximum(over, some[:, objective : objective + 1] - values[:, objective], out=over)
        least = np.minimum(least, over.min(axis=0))
    return least


def _scaled(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Objectives [B, M], in logarithms where all have one sign: times and costs multiply. And these signs [M], or 0."""
    signs = np.where((values > 0).all(axis=0), 1.0, np.where((values < 0).all(axis=0), -1.0, 0.0))
    return np.where(signs != 0, signs * np.log(np.where(signs != 0, np.abs(values), 1.0)), values), signs


def make(question: Question, options: Mapping[str, Any]) -> Screened:
    """The method by its options. Raises ConfigError."""
    check = Problems()
    found = check.model(Options, options, path="search.options")
    check.done()
    assert found is not None
    return Screened(question, found)


METHOD = make
