"""Choosing points of a space too large to enumerate: a method behind a batch-synchronous ask and tell.

Batches have a fixed size, are evaluated in any order by any number of jobs, and are told in the order asked: the
table depends on the seed alone. A point is evaluated once; a method that keeps proposing known points is helped
out by the points not seen yet, in seeded random order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from dse import discovery
from dse.problems import ConfigError, Problem, did_you_mean
from dse.search.question import Goal, Identify, Method, Outcome, Question
from dse.space import Assignment
from dse.values import Frozen, Integer

__all__ = ["Chosen", "Goal", "Outcome", "Question", "Search", "explore", "method"]

_MOST_TO_LIST = 1_000_000  # points of a space that are listed to find those not seen yet
_ASKS_PER_POINT = 20  # known points a method may propose for each new one before it is helped out
_METHODS = "dse.search.methods"


class Search(Frozen):
    """The `search` group. batch: points that are evaluated together. options: of the method."""

    name: str
    description: str = ""
    batch: Annotated[Integer, Field(ge=1, le=10_000)] = 32
    options: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Chosen:
    """What a search did: how many points it evaluated, by which method, how many proposals were already known."""

    num_points: int
    method: str
    duplicates: int = 0


def method(question: Question, search: Search) -> Method:
    """The search method of that name. Raises ConfigError for an unknown name or option."""
    known = [name for name in discovery.names(_METHODS) if not name.startswith("_")]
    if search.name not in known:
        way = did_you_mean(search.name, [*known, "exhaustive"])
        raise ConfigError([Problem("search.name", "is no search method", search.name, way)])
    made: Method = discovery.load(_METHODS, search.name, "METHOD")(question, search.options)
    return made


def explore(question: Question, search: Search, *, trials: int) -> Chosen:
    """Evaluate up to `trials` distinct points of a space that is too large to enumerate.

    Raises ConfigError for an unknown method or option.
    """
    asker = method(question, search)
    known: dict[str, Outcome] = {}
    duplicates = 0
    while len(known) < trials:
        wanted = min(search.batch, trials - len(known))
        points, repeated = _fresh(asker, wanted, known, question.identify)
        duplicates += repeated
        if len(points) < wanted:
            names = {*known, *map(question.identify, points)}
            points += _unseen(question, names, wanted - len(points))
        if not points:
            break
        outcomes = question.evaluate(points)
        known.update(zip(map(question.identify, points), outcomes, strict=True))
        asker.tell(points, outcomes)
    return Chosen(len(known), search.name, duplicates)


def _fresh(
    asker: Method, wanted: int, known: Mapping[str, Outcome], identify: Identify
) -> tuple[list[Assignment], int]:
    """Up to `wanted` proposals that are new, and how many were not."""
    found: dict[str, Assignment] = {}
    repeated = 0
    while len(found) < wanted and repeated < _ASKS_PER_POINT * wanted:
        again: list[tuple[Assignment, Outcome]] = []
        points = asker.ask(wanted - len(found))
        for point in points:
            name = identify(point)
            if name in known or name in found:
                again.append((point, known.get(name)))
            else:
                found[name] = point
        if again:
            asker.tell([point for point, _ in again], [outcome for _, outcome in again])
        repeated += len(again)
        if not points:
            break
    return list(found.values()), repeated


def _unseen(question: Question, seen: set[str], wanted: int) -> list[Assignment]:
    """Points of a finite space not seen yet, in seeded random order."""
    if question.space.size(_MOST_TO_LIST) is None:
        return []
    left = [point for point in question.space.points() if question.identify(point) not in seen]
    return random.Random(question.seed).sample(left, min(wanted, len(left)))
