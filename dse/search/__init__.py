"""Search of a space too large to enumerate: a method behind a batch-synchronous ask-and-tell interface.

The batch size follows from the budget. The points of a batch are evaluated in any order by any number of jobs, and
told in the order of the proposals, so the table depends on the seed alone. A point is evaluated once, and a point known
to break a rule never. If a method keeps proposing such points, fresh ones in seeded random order fill the batch, unless
the method ends by itself.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from dse import plugins
from dse.errors import ConfigError, Problem, did_you_mean
from dse.space import Assignment, Space
from dse.values import Frozen
from dse.values.units import Integer, Number

_MOST_TO_LIST = 1_000_000  # largest space that is listed to draw fresh points from
_ASKS_PER_POINT = 20  # known or illegal proposals per fresh point before random points fill the batch
GROUPS = {"search": "Searches"}
LOOKS = {
    "random": ("random", "grey", "8"),
    "qmc": ("quasi-random", "lime", "*"),
    "auto": ("auto", "vermillion", "<"),
    "screened": ("screened", "blue", "<"),
    "archive": ("archive", "navy", "P"),
    "tpe": ("TPE", "wine", "P"),
    "nsga2": ("NSGA-II", "violet", "D"),
    "nsga3": ("NSGA-III", "amber", "o"),
    "gp": ("Gaussian process", "green", "<"),
    "exhaustive": ("exhaustive", "sky", "<"),
    "coordinate": ("coordinate", "blue", ">"),
}
"""Search method -> its label, colour and marker in figures (`dse.plots.labels`)."""
METHODS = {
    "auto": "dse.search.methods.portfolio:METHOD",
    **{name: f"dse.search.methods.{name}:METHOD" for name in ("archive", "coordinate", "screened")},
    **{
        name: f"dse.search.methods.samplers:{name.upper()}" for name in ("gp", "nsga2", "nsga3", "qmc", "random", "tpe")
    },
}

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
    legal: Legal = lambda points: [True] * len(points)
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


def _one_run(name: str) -> str:
    if "/" not in name:  # a name alone means its newest run
        raise ValueError("must name one run, <study>/<time> or a folder: the newest is another one tomorrow")
    return name


class Search(Frozen):
    """The `search` group. batch: most points that are evaluated together. rounds: least number of batches of a budget,
    so that a method learns from a small budget, too. options: of the method.

    warm_start: finished runs, as `<study>/<time>` or folders; a search begins with the points of their fronts.
    """

    name: str
    description: str = ""
    batch: Annotated[Integer, Field(ge=1, le=10_000)] = 32
    rounds: Annotated[Integer, Field(ge=1, le=10_000)] = 16
    options: dict[str, Any] = Field(default_factory=dict)
    warm_start: tuple[Annotated[str, AfterValidator(_one_run)], ...] = ()


@dataclass(frozen=True)
class Chosen:
    """Outcome of a search: number of points evaluated, and the method.

    duplicates: proposals that were known already. illegal: proposed points that break a rule.
    """

    num_points: int
    method: str
    duplicates: int = 0
    illegal: int = 0


def method(question: SearchQuestion, search: Search) -> SearchMethod:
    """Make the search method of a search. Raises ConfigError for an unknown name or option."""
    names = plugins.names("method")
    if search.name not in names:
        way = did_you_mean(search.name, [*names, "exhaustive"])  # no method, and yet a name that `search=` takes
        raise ConfigError([Problem("search.name", "is no search method", search.name, way)])
    instance: SearchMethod = plugins.load("method", search.name)(question, search.options)
    return instance


def ends_by_itself(question: SearchQuestion, search: Search) -> bool:
    """Tell whether a search ends when its method proposes nothing more. Raises ConfigError as `method`."""
    return bool(getattr(method(question, search), "finishes", False))


def explore(question: SearchQuestion, search: Search, *, first: Iterable[Assignment] = ()) -> Chosen:
    """Evaluate up to `question.trials` distinct points of a space that is too large to enumerate.

    first: points to begin with. A point that is known to break a rule is not evaluated; the method is told that it has
    no outcome. Raises ConfigError for an unknown method or option.
    """
    asker, sieve = method(question, search), _Sieve(question)
    first_points, random_points = iter(first), _shuffled_points(question)
    # a small budget in as many rounds, a large one in full batches
    most = min(search.batch, math.ceil(question.trials / search.rounds))
    while (left := question.trials - len(sieve.known)) > 0:
        fresh, wanted = dict[str, Assignment](), min(most, left)
        _take(sieve, first_points, fresh, wanted)
        waiting = _ask(sieve, asker, fresh, wanted)
        if not getattr(asker, "finishes", False):  # one that ends by itself has nothing to gain from random points
            _take(sieve, random_points, fresh, wanted)
        if not fresh:  # the space is exhausted
            break
        points = list(fresh.values())
        sieve.known.update(zip(fresh, question.evaluate(points), strict=True))
        points += waiting  # repeats within a batch: the method waits for each of its proposals
        # in the order of the proposals, whatever order they were evaluated in
        asker.tell(points, [sieve.outcome(point) for point in points])
    return Chosen(len(sieve.known), search.name, sieve.duplicates, len(sieve.illegal))


class _Sieve:
    """Filter of proposals: fresh, known or illegal. known: outcomes by name. illegal: names of illegal points.

    duplicates: proposals that were neither fresh nor illegal.
    """

    def __init__(self, question: SearchQuestion) -> None:
        self._question = question
        self.known: dict[str, Outcome] = {}
        self.illegal: set[str] = set()
        self.duplicates = 0

    def sort(
        self, points: Sequence[Assignment], fresh: dict[str, Assignment]
    ) -> tuple[list[Assignment], list[Assignment]]:
        """Add points to evaluate to `fresh`, by name; return the duplicates and the illegal points."""
        duplicates: list[Assignment] = []
        unmet: dict[str, Assignment] = {}  # by name, so that rules are checked of each design once
        for point in points:
            name = self._question.identify(point)
            if any(name in names for names in (self.known, self.illegal, fresh, unmet)):
                duplicates.append(point)
            else:
                unmet[name] = point
        legal = self._question.legal(list(unmet.values()))
        fresh |= {name: point for (name, point), fine in zip(unmet.items(), legal, strict=True) if fine}
        illegal = {name: point for (name, point), fine in zip(unmet.items(), legal, strict=True) if not fine}
        self.illegal.update(illegal)
        return duplicates, list(illegal.values())

    def is_decided(self, point: Assignment) -> bool:
        """Tell whether a point was evaluated, or is illegal."""
        name = self._question.identify(point)
        return name in self.known or name in self.illegal

    def outcome(self, point: Assignment) -> Outcome:
        """Return the outcome of a point that is decided, None if it has none."""
        return self.known.get(self._question.identify(point))


def _ask(sieve: _Sieve, asker: SearchMethod, fresh: dict[str, Assignment], wanted: int) -> list[Assignment]:
    """Add proposals until there are `wanted` fresh points, or too many that are not.

    Returns the proposals that repeat a fresh point: their outcomes are known once it is evaluated.
    """
    stale, waiting = 0, list[Assignment]()
    while len(fresh) < wanted and stale < _ASKS_PER_POINT * wanted:
        points = asker.ask(wanted - len(fresh))
        duplicates, illegal = sieve.sort(points, fresh)
        decided = [point for point in (*duplicates, *illegal) if sieve.is_decided(point)]
        waiting += [point for point in duplicates if not sieve.is_decided(point)]
        if decided:  # at once, so that the method does not propose them again
            asker.tell(decided, [sieve.outcome(point) for point in decided])
        sieve.duplicates += len(duplicates)
        stale += len(duplicates) + len(illegal)
        if not points:  # the method has no more proposals
            break
    return waiting


def _take(sieve: _Sieve, source: Iterator[Assignment], fresh: dict[str, Assignment], wanted: int) -> None:
    """Add points of a source until there are `wanted` fresh ones."""
    # an exhausted source ends the loop
    while len(fresh) < wanted and (points := list(itertools.islice(source, wanted - len(fresh)))):
        sieve.sort(points, fresh)


def _shuffled_points(question: SearchQuestion) -> Iterator[Assignment]:
    """Yield every point of a space in seeded random order; none if it has too many."""
    if question.space.size(_MOST_TO_LIST) is not None:  # listed only where it fits in memory
        points = list(question.space.points())
        random.Random(question.seed).shuffle(points)
        yield from points
