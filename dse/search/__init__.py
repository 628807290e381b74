"""Choosing points of a space too large to enumerate: a method behind a batch-synchronous ask and tell.

The size of batches follows from the budget. They are evaluated in any order by any number of jobs, and told in the
order asked: the table depends on the seed alone. A point is evaluated once, and one that is known to break a rule
never; a method that keeps proposing such points is helped out by others, in seeded random order.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from dse import plugins
from dse.errors import ConfigError, Problem, did_you_mean
from dse.search.question import Goal, Limit, Method, Outcome, Question
from dse.space import Assignment
from dse.units import Integer
from dse.values import Frozen

__all__ = ["Chosen", "Goal", "Limit", "Outcome", "Question", "Search", "explore", "method"]

_MOST_TO_LIST = 1_000_000  # points of a space that are listed to find those not seen yet
_ASKS_PER_POINT = 20  # known or illegal points a method may propose for each new one before it is helped out
GROUPS = {"search": "Searches"}


def _one_run(said: str) -> str:
    if "/" not in said:
        raise ValueError("must name one run, <study>/<time> or a folder: the newest is another one tomorrow")
    return said


class Search(Frozen):
    """The `search` group. batch: points that are evaluated together at most. rounds: batches that a budget is asked for
    in at least, so that a small one is learnt from, too. options: of the method.

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
    """What a search did: how many points it evaluated, by which method.

    duplicates: proposals that were known already. illegal: points that were proposed, but break a rule.
    """

    num_points: int
    method: str
    duplicates: int = 0
    illegal: int = 0


def method(question: Question, search: Search) -> Method:
    """The search method of that name. Raises ConfigError for an unknown name or option."""
    known = plugins.names("method")
    if search.name not in known:
        way = did_you_mean(search.name, [*known, "exhaustive"])
        raise ConfigError([Problem("search.name", "is no search method", search.name, way)])
    made: Method = plugins.load("method", search.name)(question, search.options)
    return made


def explore(question: Question, search: Search, *, first: Iterable[Assignment] = ()) -> Chosen:
    """Evaluate up to `question.trials` distinct points of a space that is too large to enumerate.

    first: points to begin with. A point that is known to break a rule is not evaluated; the method is told that it has
    no outcome. Raises ConfigError for an unknown method or option.
    """
    asker, sieve = method(question, search), _Sieve(question)
    begin, rest = iter(first), _shuffled(question)
    most = min(search.batch, math.ceil(question.trials / search.rounds))
    while (left := question.trials - len(sieve.known)) > 0:
        fresh, wanted = dict[str, Assignment](), min(most, left)
        _take(sieve, begin, fresh, wanted)
        _ask(sieve, asker, fresh, wanted)
        _take(sieve, rest, fresh, wanted)
        if not fresh:
            break
        points = list(fresh.values())
        outcomes = question.evaluate(points)
        sieve.known.update(zip(fresh, outcomes, strict=True))
        asker.tell(points, outcomes)
    return Chosen(len(sieve.known), search.name, sieve.duplicates, len(sieve.illegal))


class _Sieve:
    """Tells points to evaluate from others. known: outcomes by name. illegal: names of points that break a rule.

    duplicates: proposals that were neither fresh nor illegal.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self.known: dict[str, Outcome] = {}
        self.illegal: set[str] = set()
        self.duplicates = 0

    def sort(
        self, points: Sequence[Assignment], fresh: dict[str, Assignment]
    ) -> tuple[list[Assignment], list[Assignment]]:
        """Put points that are to be evaluated, by name, to the fresh ones; those known before, and those illegal."""
        known: list[Assignment] = []
        unmet: dict[str, Assignment] = {}
        for point in points:
            name = self._question.identify(point)
            if any(name in names for names in (self.known, self.illegal, fresh, unmet)):
                known.append(point)
            else:
                unmet[name] = point
        legal = self._question.legal(list(unmet.values()))
        fresh |= {name: point for (name, point), fine in zip(unmet.items(), legal, strict=True) if fine}
        illegal = {name: point for (name, point), fine in zip(unmet.items(), legal, strict=True) if not fine}
        self.illegal.update(illegal)
        return known, list(illegal.values())

    def outcome(self, point: Assignment) -> Outcome:
        """What is known of a point."""
        return self.known.get(self._question.identify(point))


def _ask(sieve: _Sieve, asker: Method, fresh: dict[str, Assignment], wanted: int) -> None:
    """Add proposals until there are `wanted` fresh points, or too many that are not."""
    stale = 0
    while len(fresh) < wanted and stale < _ASKS_PER_POINT * wanted:
        points = asker.ask(wanted - len(fresh))
        known, illegal = sieve.sort(points, fresh)
        if known or illegal:
            asker.tell([*known, *illegal], [*map(sieve.outcome, known), *[None] * len(illegal)])
        sieve.duplicates += len(known)
        stale += len(known) + len(illegal)
        if not points:
            break


def _take(sieve: _Sieve, source: Iterator[Assignment], fresh: dict[str, Assignment], wanted: int) -> None:
    """Add points of a source until there are `wanted` fresh ones."""
    while len(fresh) < wanted and (some := list(itertools.islice(source, wanted - len(fresh)))):
        sieve.sort(some, fresh)


def _shuffled(question: Question) -> Iterator[Assignment]:
    """Every point of a finite space, in seeded random order."""
    if question.space.size(_MOST_TO_LIST) is not None:
        points = list(question.space.points())
        random.Random(question.seed).shuffle(points)
        yield from points
