"""Questions whose answers must not depend on how many requests are simulated: `answers_moved(QUESTIONS)`.

A question is what a person types after `serve-plan`, with limits, and a few deployments of which one is recommended.
It is asked with at least 1,000, 4,000 and 16,000 requests; an answer moves where two of the three differ, and neither
names the other's deployment as too close to call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dse.backend import Result
from dse.config.compose import request
from dse_serving.backend import ServingBackend
from dse_serving.choice import best_of, close_rivals, named, with_splits, within
from dse_serving.study import SECTIONS, replaced

if TYPE_CHECKING:
    import pandas as pd

SIZES = (1000, 4000, 16_000)
"""Requests that count at least."""


@dataclass(frozen=True)
class Question:
    """Words after `study=serving`, and values of knobs, of which every combination is a deployment."""

    words: tuple[str, ...]
    knobs: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recommendation:
    """A recommended deployment and those that are too close to call, by their names; "" where there is none."""

    name: str
    close: frozenset[str] = frozenset()

    def agrees(self, other: Recommendation) -> bool:
        """Tell whether both recommend the same, or one calls the other's deployment too close."""
        return self.name == other.name or self.name in other.close or other.name in self.close


def recommendation(question: Question, requests: int) -> Recommendation:
    """The answer to a question with at least so many requests."""
    points = with_splits(_table(question, requests))
    inside = within(points)
    if not len(inside):
        return Recommendation("")
    best = best_of(inside)
    unsure = {""} if (inside["verdict"] < 1).all() else set()  # it may be that none holds the limits
    return Recommendation(named(best), frozenset(unsure | {named(rival) for rival, _ in close_rivals(points, best)}))


def answers_moved(questions: Sequence[Question], sizes: Sequence[int] = SIZES) -> int:
    """Of some questions, how many have answers that depend on the number of requests."""
    moved = 0
    for question in questions:
        answers = [recommendation(question, size) for size in sizes]
        # each answer against each other: agreement is not transitive
        moved += not all(one.agrees(other) for one, other in itertools.combinations(answers, 2))
    return moved


def _table(question: Question, requests: int) -> pd.DataFrame:
    """Results of all deployments of a question, as a run's table has them."""
    import pandas as pd

    return pd.DataFrame(list(_rows(question, requests)))


def _rows(question: Question, requests: int) -> Iterator[dict[str, Any]]:
    tree: Mapping[str, Any] = request(["study=serving", f"traffic.requests={requests}", *question.words]).tree
    tree, backend = {name: tree[name] for name in SECTIONS}, ServingBackend()
    for place, values in enumerate(itertools.product(*question.knobs.values())):
        knobs = dict(zip(question.knobs, values, strict=True))
        point = tree
        for path, value in knobs.items():
            point = replaced(point, path.split("."), value)
        result: Result = backend.result(backend.design(point))
        recorded = {"traffic.arrivals": tree["traffic"]["arrivals"], "engines.apart": tree["engines"]["apart"]}
        yield {**recorded, **knobs, "key": str(place), "status": result.status, **result.metrics}


_CLOSED = {"parallel.tp": (1, 2, 4), "traffic.concurrency": (16, 64, 128)}
_OPEN = {"parallel.tp": (1, 2, 4), "engines.replicas": (1, 2, 3, 4)}
_SHORT = ("model=llama3_8b", "system=h100_8", "traffic.output.tokens=128")
_RATE = "traffic.rate_per_s"
_POISSON = "traffic.arrivals=poisson"
QUESTIONS = (
    *(Question((*_SHORT, f"slo.ttft_s={ttft}", "slo.tpot_s=0.1"), _CLOSED) for ttft in (0.1, 0.2, 2.0)),
    *(Question((*_SHORT, "slo.ttft_s=3", f"slo.tpot_s={tpot}"), _CLOSED) for tpot in (0.008, 0.015)),
    *(
        Question((*_SHORT, _POISSON, f"{_RATE}={rate}", "slo.ttft_s=30", "slo.tpot_s=0.1"), _OPEN)
        for rate in (40, 75, 120)
    ),
    Question((*_SHORT, _POISSON, f"{_RATE}=60", "slo.ttft_s=0.2", "slo.tpot_s=0.02"), _OPEN),
    Question((*_SHORT, "traffic.arrivals=gamma", f"{_RATE}=60", "slo.ttft_s=1", "slo.tpot_s=0.05"), _OPEN),
    Question((*_SHORT, "traffic.arrivals=bursts", f"{_RATE}=60", "slo.ttft_s=1", "slo.tpot_s=0.05"), _OPEN),
    Question((*_SHORT, "server=sglang", _POISSON, f"{_RATE}=75", "slo.ttft_s=2", "slo.tpot_s=0.05"), _OPEN),
)
"""A dozen questions, of closed loops and of open traffic near and far from what few engines keep up with."""
