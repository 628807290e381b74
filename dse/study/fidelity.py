"""Ladder of models: points found at one level are evaluated again at coarser and finer ones.

The study itself is searched at its own simulator. Points near its front, a random sample, and points that may be near
the finer front, given the disagreement seen for points like them, are promoted to the next finer level; coarser levels
are evaluated on the same points. `dse.results.agreement` tells how far levels agree. Whether a level is computed is
decided by its tasks, so a run is the same on every machine, whatever else that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.backend import STATUSES, Result, Results
from dse.errors import Broken
from dse.errors.terminal import bar
from dse.evaluation.evaluators import MakeEvaluator, Services
from dse.results.agreement import compare
from dse.results.output_files import plain
from dse.results.pareto import first_best, minimized
from dse.results.run_folder import Outputs
from dse.results.selection import MOST_ROWS, SELECTED, select
from dse.space import Assignment, Points
from dse.store.contract import Context, Session
from dse.study.levels import Level, plain_design, same_designs
from dse.study.plan import Plan
from dse.values import Memo

if TYPE_CHECKING:
    import pandas as pd

_PROBED = 8  # points of a level whose tasks are counted before it is evaluated
_KEPT = 4  # one part in so many of the points that may be promoted is kept for where levels disagree

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Climb:
    """Services for climbing. opened: opens a session of the store for a level. evaluator: makes what evaluates it."""

    opened: Callable[[Context], AbstractContextManager[Session]]
    stopping: Callable[[], bool]
    evaluator: MakeEvaluator


@dataclass(frozen=True)
class Absent:
    """Levels without results, by name, and why: those that failed every time, and those with too many tasks."""

    broken: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


class _TooManyTasksError(Exception):
    """A level would take more tasks than it may."""


def write_levels(plan: Plan, outputs: Outputs, climbing: Climb) -> None:
    """Climb the ladder of a finished search, and write `fidelity.parquet` and `fidelity.json`."""
    rows, absent = climb(plan, select(outputs.results, plan.goals, MOST_ROWS, selected=SELECTED).table, climbing)
    outputs.write_table("fidelity", rows)
    names = [level.name for level in plan.levels]
    own_level = next(level.name for level in plan.levels if level.own)
    agreement = compare(rows, names, plan.goals)
    summary = {"levels": names, "study": own_level, "texts": texts_of(plan), **vars(absent), "pairs": agreement}
    outputs.write_json("fidelity", {**summary, "settings": plan.settings.fidelity.model_dump(mode="json")})


def climb(plan: Plan, table: pd.DataFrame, climbing: Climb) -> tuple[pd.DataFrame, Absent]:
    """Promote points of the study's table up the ladder; return (a row for every point and level, levels without any).

    The table, in the order of the study, needs the searched paths, objectives, `scenario`, `key` and `status`.
    """
    ladder = _Ladder(plan, table[table["status"] == "ok"].reset_index(drop=True))
    # levels ascend: coarser ones come before it
    own_place = next(place for place, level in enumerate(plan.levels) if level.own)
    absent = Absent()
    for below, level in pairwise(plan.levels[own_place:]):  # each level starts from the points that the one below has
        with climbing.opened(level.spec.context) as session:
            evaluate = _row_evaluator(plan, level, session, climbing)
            # round 0 promotes by rank, later ones where levels may disagree
            for number in range(1 + plan.settings.fidelity.rounds):
                chosen = ladder.chosen(below, level, number)
                if chosen.size and not ladder.take(level, chosen, evaluate, absent):
                    break  # a level that failed has nothing to learn from
    if len(plan.levels) == own_place + 1:
        ladder.choose_only(plan.levels[own_place])
    for level in plan.levels[:own_place]:  # coarser levels last, when all promoted points are known
        with climbing.opened(level.spec.context) as session:
            ladder.take(level, ladder.promoted_points, _row_evaluator(plan, level, session, climbing), absent)
    return ladder.rows(), absent


_Evaluate = Callable[["pd.DataFrame", NDArray[np.intp]], Results]


def _row_evaluator(plan: Plan, level: Level, session: Session, climbing: Climb) -> _Evaluate:
    """Return the function that evaluates rows of the study's table at a level.

    It raises _TooManyTasksError for the first rows of a level that has too many tasks for them.
    """
    checked = False

    def evaluate(table: pd.DataFrame, places: NDArray[np.intp]) -> Results:
        nonlocal checked
        points = [_point(plan, level, table.iloc[place]) for place in places]
        designs = [point for point in points if point.design is not None]
        if not checked:
            _check_tasks(level, designs, plan.settings.fidelity.most_tasks)
            checked = True
        with bar(f"{plan.settings.study.name}: {level.name}", len(points)) as advance:
            services = Services(session, climbing.stopping, climbing.evaluator, advance)
            evaluator = services.evaluator_of(level.spec, plan.settings.executor)
            results = iter(list(evaluator.results(designs)))
        return Results.join([_refusal(point) if point.design is None else next(results) for point in points])

    return evaluate


def _check_tasks(level: Level, points: Sequence[Points], most: int | None) -> None:
    """Count the tasks of some points of a level, evenly spread, and tell those of all. Raises _TooManyTasksError."""
    if most is None or not points:  # no limit, or nothing to count
        return
    backend = level.spec.make()
    probe = [point.design for point in points[:: math.ceil(len(points) / _PROBED)]]  # at most _PROBED
    tasks = sum(backend.num_tasks(design) for design in probe if design is not None) / len(probe) * len(points)
    if tasks > most:
        rule = f"has about {tasks:,.0f} tasks in {len(points)} points, more than fidelity.most_tasks = {most:,}"
        raise _TooManyTasksError(f"{rule}: raise that, or leave the level out of fidelity.levels")


def _refusal(point: Points) -> Results:
    return Results.of([Result("infeasible", reason=point.reason)])


def _point(plan: Plan, level: Level, row: pd.Series[Any]) -> Points:
    """Return a row of the study's table as a design of a level."""
    scenario, values = str(row["scenario"]), row.dropna()  # knobs that do not count have no value
    chosen = {path: plain(values[path]) for path in plan.knobs if path in values}
    block = point_at_level(plan, level, scenario, chosen)
    return block.identified(scenario, level.spec.context.words)


def point_at_level(plan: Plan, level: Level, scenario: str, point: Assignment) -> Points:
    """Return a point of a scenario of the study as a design of a level."""
    backend, space = level.spec.make(), plan.spaces[scenario]
    if same_designs(level.spec, plan.spec):
        # what the space knows is of the study's backend
        (block,) = replace(space, backend=backend, known=Memo()).resolve(point)
        return block
    return Points(point, {}, backend.design(plain_design(plan.backend, space.tree(point), backend)))


class _Ladder:
    """Points of the study [N], and the objectives at each level [N, objectives] of those promoted to it."""

    def __init__(self, plan: Plan, table: pd.DataFrame) -> None:
        self._plan, self._table, self._goals = plan, table, dict(plan.goals)
        self._asked = plan.settings.fidelity
        count = len(table)
        # [N] for each level; empty: not promoted to it
        self._why: dict[str, NDArray[Any]] = {level.name: np.full(count, "", object) for level in plan.levels}
        # not evaluated
        self._values = {level.name: np.full((count, len(self._goals)), np.nan) for level in plan.levels}
        self._results: dict[str, list[tuple[NDArray[np.intp], Results]]] = {level.name: [] for level in plan.levels}
        own_level = next(level for level in plan.levels if level.own)
        self._values[own_level.name] = minimized(table, self._goals)  # so that less is better in each
        # scenarios are never compared with each other
        self._places = [np.flatnonzero(table["scenario"] == name) for name in plan.spaces]
        self._alike = _alike(plan, table)

    @property
    def promoted_points(self) -> NDArray[np.intp]:
        """Points that were promoted to any level but the study's own."""
        return np.flatnonzero(np.any([why != "" for why in self._why.values()], axis=0))

    def choose_only(self, level: Level) -> None:
        """Choose points where there is no finer level, for coarser levels to be compared on."""
        self.chosen(level, level, 0)

    def chosen(self, below: Level, level: Level, number: int) -> NDArray[np.intp]:
        """Choose the points to promote from one level to the next in a round, and note why."""
        picks = [part for scenario in range(len(self._places)) for part in self._of(below, level, number, scenario)]
        for why, places in picks:
            self._why[level.name][places] = why
        # in the order of the study, whatever chose them
        return np.sort(np.concatenate([places for _, places in picks])) if picks else np.empty(0, np.intp)

    def _of(self, below: Level, level: Level, number: int, scenario: int) -> Iterator[tuple[str, NDArray[np.intp]]]:
        values, reasons = self._values[below.name], self._why[level.name]
        places = self._places[scenario]
        places = places[np.isfinite(values[places]).all(axis=1)]
        if not places.size:
            return
        if number == 0:
            # keeps a share for later rounds, if there are any
            most = self._asked.most - self._asked.most // _KEPT * (self._asked.rounds > 0)
            near = _nearest(values[places], values[places], self._asked.near)[:most]
            yield "near the front", places[near]
            yield "sample", self._draw_sample(np.delete(places, near), scenario)
            return
        left, seen = places[reasons[places] == ""], places[reasons[places] != ""]
        # samples do not count for `most`
        room = self._asked.most - int(np.isin(reasons[places], ["near the front", "disagreement"]).sum())
        finer = self._values[level.name][seen]
        fine = np.isfinite(finer).all(axis=1)  # points may have failed at the finer level
        if fine.any() and left.size:
            ratio = _ratios(values[seen][fine], finer[fine], self._alike[seen][fine])
            expected = values[left] * ratio(self._alike[left])  # as if they disagreed as much as points like them
            yield "disagreement", left[_nearest(expected, finer[fine], self._asked.near)[:room]]

    def _draw_sample(self, places: NDArray[np.intp], scenario: int) -> NDArray[np.intp]:
        """Draw a random sample that depends on seed and keys alone."""
        keys = self._table["key"].to_numpy().astype(str)[places]
        # 1: a stream apart from that of the sampler
        random = np.random.default_rng(np.random.SeedSequence([self._plan.settings.seed, scenario, 1]))
        ordered = places[np.argsort(keys)]
        return random.permutation(ordered)[: self._asked.sample]

    def take(self, level: Level, places: NDArray[np.intp], evaluate: _Evaluate, absent: Absent) -> bool:
        """Evaluate points at a level; return whether it succeeded, and note why not."""
        if not places.size:
            return True  # nothing to evaluate is no failure
        try:
            results = evaluate(self._table, places)
        except Broken as error:  # every point failed: the level, not the points
            absent.broken[level.name] = str(error)
            return False
        except _TooManyTasksError as error:
            absent.left_out[level.name] = str(error)
            return False
        self._results[level.name].append((places, results))
        columns = {name: results.column(name) for name in self._goals}
        self._values[level.name][places] = np.where(results.ok[:, None], minimized(columns, self._goals), np.nan)
        return True

    def rows(self) -> pd.DataFrame:
        """Return the rows of `fidelity.parquet`: every promoted point at every level, coarser levels first."""
        import pandas as pd

        # a point may be promoted for different reasons at different levels
        why = np.max([_ranks(why) for why in self._why.values()], axis=0)
        parts = []
        for level in self._plan.levels:
            level_results = [(self.promoted_points, self._own_results())] if level.own else self._results[level.name]
            for places, results in level_results:
                about = self._table.loc[places, ["scenario", "key", *self._plan.knobs]].reset_index(drop=True)
                columns = {name: np.where(results.ok, results.column(name), np.nan) for name in self._goals}
                texts = {"status": [STATUSES[code] for code in results.status]}
                texts["reason"] = [results.texts[code] for code in results.reason]
                chosen = [_REASONS[rank] for rank in why[places]]
                parts.append(about.assign(level=level.name, promoted=chosen, **texts, **columns))
        return pd.concat(parts, ignore_index=True)

    def _own_results(self) -> Results:
        """Return the study's own results of the promoted points."""
        metrics = [{name: float(row[name]) for name in self._goals} for _, row in self._promoted_rows()]
        return Results.of([Result("ok", row_metrics) for row_metrics in metrics])

    def _promoted_rows(self) -> Iterator[tuple[Any, pd.Series[Any]]]:
        return self._table.loc[self.promoted_points, list(self._goals)].iterrows()


_REASONS = ("", "sample", "disagreement", "near the front")  # ascending in strength


def _ranks(why: NDArray[Any]) -> NDArray[np.intp]:
    """Return reasons as numbers, the strongest the largest."""
    return np.array([_REASONS.index(text) for text in why.tolist()], np.intp)


def _alike(plan: Plan, table: pd.DataFrame) -> NDArray[np.intp]:
    """Number the combinations of text knobs that the points have."""
    texts = [path for path in texts_of(plan) if path in table]
    if not texts:
        return np.zeros(len(table), np.intp)  # no text knobs: all points are alike
    return table[texts].astype(str).groupby(texts, sort=False, dropna=False).ngroup().to_numpy().astype(np.intp)


def texts_of(plan: Plan) -> list[str]:
    """Return the searched paths whose values are texts."""
    return [
        knob.path for knob in plan.request.knobs if knob.values and all(isinstance(value, str) for value in knob.values)
    ]


def excess(values: Floats, front: Floats) -> Floats:
    """Return the relative excess of each row [B, objectives] over a front in its worst objective, [B]: 0 for members.

    Smaller is better; where a member has 0 in an objective, only rows with no more there are comparable with it.
    """
    smallest = np.full(len(values), np.inf)  # an empty front: nothing is near
    for member in front:
        with np.errstate(divide="ignore", invalid="ignore"):
            # worse than 0 is infinitely worse
            over = np.where(values <= member, 0.0, (values - member) / np.abs(member))
        smallest = np.minimum(smallest, over.max(axis=1))
    return smallest


def _nearest(values: Floats, seen: Floats, near: float) -> NDArray[np.intp]:
    """Return the places of the rows near the front of those `seen`: the winner first, then by their excess."""
    import moocore

    # equal points once
    front = np.unique(seen[moocore.is_nondominated(np.ascontiguousarray(seen), keep_weakly=False)], axis=0)
    over = excess(values, front)
    order = np.lexsort((values[:, 0], over))  # last key first: by excess, ties by the first objective
    order = order[over[order] <= near]
    best = first_best(values)
    return np.concatenate([[best], order[order != best]]).astype(np.intp) if over[best] <= near else order


def _ratios(coarse: Floats, fine: Floats, alike: NDArray[np.intp]) -> Callable[[NDArray[np.intp]], Floats]:
    """Return a function from groups of points to factors that take their coarse objectives to the expected fine ones.

    A factor is the median of alike points; of all points where none of a group is known, and 1 where nothing is.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(coarse != 0, fine / coarse, np.nan)  # a factor cannot make something of 0

    def median(rows: Floats) -> Floats:
        valid = np.isfinite(rows)
        return np.array(
            [np.median(column[there]) if there.any() else np.nan for column, there in zip(rows.T, valid.T, strict=True)]
        )

    overall = np.nan_to_num(median(ratio), nan=1.0)  # nothing known: levels are taken to agree
    groups = {group: median(ratio[alike == group]) for group in np.unique(alike).tolist()}

    def of(labels: NDArray[np.intp]) -> Floats:
        factors = np.stack([groups.get(group, overall) for group in labels.tolist()])
        return np.where(np.isfinite(factors), factors, overall)  # single objectives of a group may be unknown

    return of
