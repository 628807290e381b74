"""Drawn errors of a study's winners, their baselines and the points that come next, and what they decide.

A backend that can draw the errors of its predictions (`Drawing`) is asked for the times of a winner, of what it is
compared with, and of the best points of other options, all with the same errors: what is off in all of them alike
cancels in their ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse import plugins
from dse.results.decisions import Decision, wrong_if_known
from dse.results.pareto import Contest
from dse.results.words import choice_in_words
from dse.space import Space
from dse.study.plan import Plan

if TYPE_CHECKING:
    import pandas as pd

_MOST_RIVALS = 4  # of a winner: points that are farther off are never the fastest
_MOST_WINNERS = 40  # of a study, whose errors are drawn: the answer must not wait for more
_TIMES = ("makespan_s", "iteration_s")


@runtime_checkable
class Drawing(Protocol):
    """A backend that can draw the errors of its predictions."""

    def draw(
        self, designs: Sequence[BaseModel], *, samples: int, seed: int, known: Sequence[str] = ()
    ) -> tuple[NDArray[np.float64], Mapping[str, str]]:
        """Times [designs, samples] with drawn errors, the same in all designs, and what each kind rests on.

        known: kinds of errors that are taken as measured.
        """


def decisions(planned: Plan, table: pd.DataFrame) -> dict[str, Any]:
    """Decision on each winner of a table, by its key; none where the backend draws no errors of the objective.

    A study may decide by itself: `decisions(table, planned)`.
    """
    if not planned.settings.decide.samples:
        return {}
    study = plugins.load("study", planned.settings.study.module)
    if hasattr(study, "decisions"):
        own: dict[str, Any] = study.decisions(table, planned)
        return own
    objective, answer = next(iter(planned.goals)), planned.settings.study.answer
    if (
        not isinstance(planned.backend, Drawing)
        or objective not in _TIMES
        or answer.over
        or answer.across
        or not (table["status"] == "ok").any()
    ):
        return {}
    winners = Contest(answer, planned.knobs).winners(table, planned.goals, apart=True)
    if len(winners) > _MOST_WINNERS:
        return {}
    found = {}
    for _, row in winners.iterrows():
        decision = _decide(planned, row, _rivals(planned, table, row))
        if decision is not None:
            found[str(row["key"])] = decision.json()
    return found


def most_helpful(draw: Callable[[Sequence[str]], tuple[NDArray[np.float64], Mapping[str, str]]]) -> dict[str, Any]:
    """The kind of error whose knowledge lowers the probability of a wrong choice most; empty where none does.

    draw: times [options, samples] where kinds are known, and the basis of all kinds.
    """
    times, basis = draw(())
    now = 1 - float(np.bincount(np.argmin(times, axis=0)).max()) / times.shape[1]
    wrong = {kind: wrong_if_known(times, draw([other for other in basis if other != kind])[0]) for kind in basis}
    kind = min(wrong, key=lambda name: wrong[name], default="")
    if not kind or wrong[kind] >= now - _LEAST_HELP:
        return {}
    return {"kind": kind, "wrong": now, "wrong_if_known": wrong[kind]}


_LEAST_HELP = 0.01  # of the probability, below which draws tell nothing


def _rivals(planned: Plan, table: pd.DataFrame, winner: pd.Series[Any]) -> pd.DataFrame:
    """The best points of other options of the winner's scenario: other names where these are searched."""
    answer, objective = planned.settings.study.answer, next(iter(planned.goals))
    rows = Contest(answer, planned.knobs).contenders(table)
    rows = rows[(rows["scenario"] == winner["scenario"]) & (rows["key"] != winner["key"])]
    for path in (path for path in answer.by if path in rows):
        rows = rows[rows[path].astype(str) == str(winner[path])]
    names = [path for path in planned.knobs if path.endswith(".name") and path in rows]
    if names:
        same = np.logical_and.reduce([rows[path].astype(str) == str(winner[path]) for path in names])
        rows = rows[~same]
    rows = rows.sort_values(objective, kind="stable")
    distinct: pd.DataFrame = rows.drop_duplicates(names or [objective])
    return distinct.head(_MOST_RIVALS)


def _decide(planned: Plan, winner: pd.Series[Any], rivals: pd.DataFrame) -> Decision | None:
    space, baseline = planned.spaces[str(winner["scenario"])], planned.settings.study.baseline
    rows = [winner, *(row for _, row in rivals.iterrows())]
    designs = [_design(space, _chosen(row, planned.knobs)) for row in rows]
    before = _design(space, space.active({**_chosen(winner, planned.knobs), **baseline})) if baseline else None
    if any(design is None for design in designs):
        return None
    assert isinstance(planned.backend, Drawing)
    chosen = [design for design in (*designs, before) if design is not None]
    settings = planned.settings.decide
    times, basis = planned.backend.draw(chosen, samples=settings.samples, seed=planned.settings.seed)
    named = [choice_in_words(row, planned.knobs) for row in rows[1:]]
    last = None if before is None else times[-1]
    made = Decision.of(times[: len(rows)], last, least=settings.least, rivals=named, basis=basis)
    if made.is_decided:
        return made
    draw = partial(planned.backend.draw, chosen, samples=settings.samples, seed=planned.settings.seed)
    return replace(made, measure=most_helpful(lambda known: draw(known=known)))


def _chosen(row: pd.Series[Any], knobs: Sequence[str]) -> dict[str, Any]:
    present = row.dropna()
    values = {path: present[path] for path in knobs if path in present}
    return {path: value.item() if hasattr(value, "item") else value for path, value in values.items()}


def _design(space: Space, chosen: dict[str, Any]) -> BaseModel | None:
    """The design of a point; None where it has none."""
    blocks = list(space.resolve(chosen))
    return blocks[0].design if len(blocks) == 1 else None
