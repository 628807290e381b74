"""Local search around the Pareto front whose children are screened by a Gaussian process.

Of many children and some uniform draws, the method proposes those whose sample from the posterior of the process
(Thompson 1933) is furthest beyond the front, by the maximin improvement (Svenson and Santner 2016), which needs no
reference point. Objectives of one sign are modelled in logarithms, and compared with the front as they are. The
process learns from the best points and from a uniform sample of all, so the cost of a proposal does not grow with the
number of known points. A second process learns where points have no result (it models -1 or 1), as what the first one
knows nothing of would look best: children whose sample from it is above 0 come last. The first points are a Latin
hypercube.
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

from dse.errors import validate_as
from dse.search import SearchQuestion
from dse.search.genes import Rows
from dse.search.methods import archive
from dse.search.surrogate import Surrogate
from dse.values.units import Fraction, Integer

_FEWEST = 8  # least number of points for the process to learn from
_GROWN = 1.1  # growth of the number of known points after which the process's rates are tuned again
_CELLS = 1 << 20  # points times members of the front to compare at a time


class ScreenedOptions(archive.ArchiveOptions):
    """Options of `archive`, and: pool: children to screen for each batch. even: share of them that are uniform draws.

    learned: points that the process learns from, half of them the best, half a uniform sample.
    """

    initial: Annotated[Integer, Field(ge=1, le=100_000)] = 12
    pool: Annotated[Integer, Field(ge=1, le=100_000)] = 512
    even: Fraction = 0.25
    learned: Annotated[Integer, Field(ge=16, le=2000)] = 160


class ScreenedSearch(archive.Archive):
    """The search method."""

    def __init__(self, question: SearchQuestion, options: ScreenedOptions) -> None:
        super().__init__(question, options)
        self._most, self._surrogate = options, Surrogate(self._genes)
        spread = qmc.LatinHypercube(len(self._genes.knobs), rng=np.random.default_rng(question.seed))
        self._first = spread.random(options.initial)  # positions in 0...1
        self._learned = _TrainingPoints.none(len(self._genes.knobs), len(question.goals))
        self._front = np.empty((0, len(question.goals)))  # objectives of the best points within the limits
        self._num_learned = self._tuned = 0  # number of points when rates were tuned
        self._failures, self._validity = _Failures(options.learned // 2), Surrogate(self._genes)

    def _learn(self, rows: Rows, outcomes: Sequence[Mapping[str, float]]) -> None:
        """Add points with an outcome."""
        super()._learn(rows, outcomes)
        # -1: without limits every point is within them
        margins = [max(self._question.excess(outcome).values(), default=-1.0) for outcome in outcomes]
        fresh = _TrainingPoints(
            rows, self._question.values(outcomes), np.array(margins), self._random.random(len(rows))
        )
        front = np.concatenate([self._front, fresh.values[fresh.margins <= 0.0]])  # only points within the limits
        self._front = front[moocore.is_nondominated(front)] if len(front) else front
        # bounded, so that fitting takes the same time throughout
        self._learned = self._learned.join(fresh).some(self._most.learned // 2)
        self._num_learned += len(rows)

    def _learn_failures(self, rows: Rows) -> None:
        """Add points without an outcome."""
        self._failures.add(rows, self._random)

    def _draw(self, count: int) -> Rows:
        """Draw points, the first ones from the Latin hypercube."""
        first, self._first = self._first[:count], self._first[count:]
        sizes = self._genes.sizes
        # a stratum of the hypercube -> a value of the knob
        spread = self._genes.settle(np.where(sizes > 0, np.floor(first * sizes), first), self._random)
        return np.concatenate([spread, super()._draw(count - len(spread))])

    def _children(self, count: int) -> Rows:
        """Return the most promising of many unseen children."""
        if len(self._learned.rows) < _FEWEST:
            return super()._children(count)
        num_candidates = max(self._most.pool, 2 * count)  # at least so many that there is a choice
        num_drawn = round(self._most.even * num_candidates)
        candidates = np.concatenate([super()._children(num_candidates - num_drawn), super()._draw(num_drawn)])
        # each child once, and none that was proposed before
        fresh = {name: row for row in candidates if (name := row.tobytes()) not in self._seen}
        pool = np.array(list(fresh.values())).reshape(-1, candidates.shape[1])
        return pool[self._choose_promising(pool, count)] if len(pool) else pool

    def _choose_promising(self, pool: Rows, count: int) -> list[int]:
        """Places of the `count` points of the pool whose samples are furthest beyond the front and earlier picks."""
        # rarely, as tuning takes most of the time
        learned, tune = self._learned, self._num_learned >= _GROWN * self._tuned
        values, signs = _scale(learned.values)
        self._tuned = self._num_learned if tune else self._tuned
        # excess over limits is modelled like an objective
        self._surrogate.fit(learned.rows, np.column_stack([values, learned.margins]), tune=tune)
        mean, deviation = self._surrogate.predict(pool)
        # one sample of each point: exploration follows from the deviation
        draws = mean + deviation * self._random.standard_normal(mean.shape)
        # back from logarithms
        draws[:, :-1] = np.where(signs != 0, signs * np.exp(signs * draws[:, :-1]), draws[:, :-1])
        within = learned.values[learned.margins <= 0.0] if len(self._front) else learned.values
        # none within the limits: the front of all
        front = self._front if len(self._front) else learned.values[moocore.is_nondominated(learned.values)]
        # where the front has no extent, that of the points
        spread = np.where(np.ptp(front, axis=0) > 0, np.ptp(front, axis=0), np.ptp(within, axis=0))
        draws[:, :-1] /= np.where(spread > 0, spread, 1.0)
        front = front / np.where(spread > 0, spread, 1.0)
        gains = _improvements(draws[:, :-1], front)
        beyond, fails, chosen = np.maximum(0.0, draws[:, -1]), self._draw_failures(pool, tune=tune), list[int]()
        for _ in range(min(count, len(pool))):
            # last key first: valid, within limits, furthest beyond the front
            chosen.append(int(np.lexsort((-gains, beyond, fails))[0]))
            # a point near one that was chosen gains little
            gains = np.minimum(gains, (draws[chosen[-1], :-1] - draws[:, :-1]).max(axis=1))
            gains[chosen[-1]], beyond[chosen[-1]], fails[chosen[-1]] = -np.inf, np.inf, np.inf  # not again
        return chosen

    def _draw_failures(self, pool: Rows, *, tune: bool) -> NDArray[np.float64]:
        """Draw how likely points of the pool have no result, [B]: 0 for those that are taken for valid."""
        failures = self._failures.rows
        if not len(failures):
            return np.zeros(len(pool))
        rows = np.concatenate([self._learned.rows, failures])
        labels = np.repeat([-1.0, 1.0], [len(self._learned.rows), len(failures)])
        self._validity.fit(rows, labels[:, None], tune=tune)
        mean, deviation = self._validity.predict(pool)
        # taken for valid: 0, so that other keys decide between such points
        return np.maximum(0.0, mean + deviation * self._random.standard_normal(mean.shape))[:, 0]


@dataclass(frozen=True)
class _TrainingPoints:
    """Training points: rows [B, genes], objectives [B, M], excess over the worst limit [B], and a random number [B] for
    each; the points with the smallest numbers are a uniform sample."""

    rows: Rows
    values: NDArray[np.float64]
    margins: NDArray[np.float64]
    lots: NDArray[np.float64]

    @classmethod
    def none(cls, genes: int, objectives: int) -> _TrainingPoints:
        return cls(np.empty((0, genes)), np.empty((0, objectives)), np.empty(0), np.empty(0))

    def join(self, other: _TrainingPoints) -> _TrainingPoints:
        """Concatenate with other points."""
        return _TrainingPoints(
            *(np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def some(self, half: int) -> _TrainingPoints:
        """Select the best `half`, and a uniform sample of `half` of the others."""
        rank = moocore.pareto_rank(self.values)
        # last key first: least excess, then front by front, ties at random
        best = np.lexsort((self.lots, rank, np.maximum(0.0, self.margins)))
        # the same numbers stay, so that the sample changes slowly
        order = np.concatenate([best[:half], best[half:][np.argsort(self.lots[best[half:]], kind="stable")][:half]])
        return _TrainingPoints(*(part[order] for part in vars(self).values()))


class _Failures:
    """A uniform sample of the points that have no result, each once. rows [B, genes]: at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._most, self._names = most, set[bytes]()
        self._lots, self.rows = np.empty(0), np.empty((0, 0))

    def add(self, rows: Rows, random: np.random.Generator) -> None:
        """Add points, unless they are known."""
        fresh = np.array([row for row in rows if row.tobytes() not in self._names]).reshape(-1, rows.shape[1])
        self._names.update(map(np.ndarray.tobytes, fresh))
        joined = np.concatenate([self.rows.reshape(-1, rows.shape[1]), fresh])
        lots = np.concatenate([self._lots, random.random(len(fresh))])
        # the smallest lots of all so far are a uniform sample of them
        smallest = np.argsort(lots, kind="stable")[: self._most]
        self._lots, self.rows = lots[smallest], joined[smallest]


def _improvements(values: NDArray[np.float64], front: NDArray[np.float64]) -> NDArray[np.float64]:
    """Maximin improvements [B] of objectives [B, M] over a front [F, M].

    The improvement is the least over the members of the largest improvement in any objective.
    """
    least = np.full(len(values), np.inf)
    # in parts, as a large front times the pool may not fit in memory
    for members in np.array_split(front, -(-front.shape[0] * len(values) // _CELLS)):
        over = members[:, :1] - values[:, 0]  # [F, B]: improvement in the first objective
        for objective in range(1, values.shape[1]):
            np.maximum(over, members[:, objective : objective + 1] - values[:, objective], out=over)
        least = np.minimum(least, over.min(axis=0))
    return least


def _scale(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scale objectives [B, M] to logarithms if all have one sign. Returns them with these signs [M], or 0."""
    signs = np.where((values > 0).all(axis=0), 1.0, np.where((values < 0).all(axis=0), -1.0, 0.0))
    # ratios matter for times and prices
    return np.where(signs != 0, signs * np.log(np.where(signs != 0, np.abs(values), 1.0)), values), signs


def make(question: SearchQuestion, options: Mapping[str, Any]) -> ScreenedSearch:
    """Make the method from its options. Raises ConfigError."""
    settings = validate_as(ScreenedOptions, options, path="search.options")
    return ScreenedSearch(question, settings)


METHOD = make
