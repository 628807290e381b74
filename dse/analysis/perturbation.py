"""Points of a finished run, evaluated again with other constants by the run's own backend.

A constant is a number of the design that was not searched; designs that have none of that name stay as they are. Its
values become axes of batches, or numbers that differ between batches, so that a vectorised backend evaluates thousands
of them in a call.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.analysis.contexts import Option
from dse.backend import Batch, Results, check_results
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.evaluation.calls import call
from dse.results.output_files import plain
from dse.results.pareto import minimized
from dse.results.run_folder import FinishedRun, read
from dse.space import get_path, set_path
from dse.study.plan import Plan
from dse.values import Memo, content_key, distinct, leaves, put_all

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Advance = Callable[[int], object]


@dataclass(frozen=True)
class Constant:
    """A number of the design with its uncertainty, a relative half-width. whole: takes whole numbers only."""

    path: str
    half_width: float
    whole: bool

    def values(self, nominal: float, factors: Floats) -> NDArray[Any]:
        """Scale the nominal value by some factors, rounded where the constant is whole, but never to 0."""
        values = nominal * factors
        # a number of chunks or CUs of 0 would be another design
        return (np.sign(values) * np.maximum(1, np.rint(np.abs(values)))).astype(int) if self.whole else values


@dataclass(frozen=True)
class RunPoints:
    """Points [R] of a run. designs: frozen. option: place in `options`; scenario: place in `scenarios`.

    chosen: the size of the selection, in words.
    """

    plan: Plan
    scenarios: tuple[str, ...]
    options: tuple[Option, ...]
    designs: tuple[BaseModel, ...]
    scenario: NDArray[np.intp]
    option: NDArray[np.intp]
    table: pd.DataFrame
    chosen: str

    def rows(self, scenario: int) -> NDArray[np.intp]:
        """Select the points of one scenario, as places."""
        return np.flatnonzero(self.scenario == scenario)

    def holders(self, path: str) -> NDArray[np.intp]:
        """Select the points whose designs have a number at a path, as places."""
        return np.flatnonzero([get_path(design, path) is not None for design in self.designs])

    def first_holder(self, path: str) -> int:
        """Place of the first of them. Raises StopIteration where there is none."""
        return next(row for row, design in enumerate(self.designs) if get_path(design, path) is not None)

    def nominal(self, path: str) -> Floats:
        """Collect the value that the designs of each scenario have at the path of a constant, [scenarios].

        That of the other scenarios where no design of one has it.
        """
        holders = self.holders(path)
        values = [float(get_path(self.designs[row], path)) for row in holders]
        places, first = np.unique(self.scenario[holders], return_index=True)
        first_of = dict(zip(places.tolist(), first.tolist(), strict=True))
        return np.array([values[first_of.get(index, 0)] for index in range(len(self.scenarios))])

    def tree(self, row: int) -> dict[str, Any]:
        """Build the design tree of a point."""
        space = self.plan.spaces[self.scenarios[self.scenario[row]]]
        return space.tree(_chosen(self.table.iloc[row], self.plan.knobs))


# ---------------------------------------------------------------- from a run


def points(run: FinishedRun, planned: Plan, choose: Sequence[str], most: int) -> RunPoints:
    """Read the points of a run that may have a result, or the best and the front where there are more than `most`.

    Raises ConfigError where code or configuration have changed since the run was made.
    """
    columns = dict.fromkeys(["scenario", "key", "status", "on_front", *planned.knobs, *choose, *run.goals])
    table = read(run, list(columns))
    # baselines outside the space are not part of the answer
    table = table[table["explored"] & table["status"].isin(["ok", "infeasible"])].drop_duplicates(["scenario", "key"])
    if not (table["status"] == "ok").any():
        raise ConfigError([Problem("study", "has no row with a result in its space", run.name, "look at `reason`")])
    total, table = len(table), _select(table, choose, run.goals, most)
    # designs that share sections come one after the other
    table = table.sort_values(list(planned.knobs), kind="stable", key=lambda column: column.astype(str))
    designs = [_design(planned, row) for _, row in table.iterrows()]
    table = table[[design is not None for design in designs]].reset_index(drop=True)
    part = f"{len(table):,} of {total:,} points: the best and the front"
    selection = f"all {total:,} points" if len(table) == total else part
    scenarios = [name for name in planned.spaces if (table["scenario"] == name).any()]
    options: dict[Option, int] = {}
    # None as a key: NaN is not equal to itself
    picks = table[list(choose)].astype(object).where(table[list(choose)].notna(), None)
    option = [options.setdefault(tuple(map(plain, row)), len(options)) for row in picks.itertuples(index=False)]
    places = np.array([scenarios.index(str(name)) for name in table["scenario"]], np.intp)
    legal_designs = tuple(design for design in designs if design is not None)
    return RunPoints(
        planned, tuple(scenarios), tuple(options), legal_designs, places, np.array(option, np.intp), table, selection
    )


def _select(table: pd.DataFrame, choose: Sequence[str], goals: Mapping[str, str], most: int) -> pd.DataFrame:
    """Select all rows, or the fronts and as many of the best of every option in every scenario as there is room for."""
    if len(table) <= most:
        return table
    objective, goal = next(iter(goals.items()))
    ordered = table[table["status"] == "ok"].sort_values(objective, ascending=goal == "minimize", kind="stable")
    groups = ordered.groupby(["scenario", *choose], dropna=False, observed=True, sort=False)
    # as many of each option as there is room for
    return table.loc[np.union1d(groups.head(max(1, most // groups.ngroups)).index, table.index[table["on_front"]])]


def _design(planned: Plan, row: pd.Series[Any]) -> BaseModel | None:
    """Build the design of a row, None where the model refuses it. Raises ConfigError where its key has changed."""
    space = planned.spaces.get(str(row["scenario"]))
    blocks = [] if space is None else list(space.resolve(_chosen(row, planned.knobs)))
    # refused by the model then, and now
    if len(blocks) == 1 and blocks[0].design is None and row["status"] == "infeasible":
        return None
    design = blocks[0].design if len(blocks) == 1 else None
    # the same design, or results could not be compared
    if design is not None and content_key(design, *planned.context.words) == row["key"]:
        return design
    rule = "was made by other code or another configuration, and cannot be evaluated again as it was"
    raise ConfigError([Problem("study", rule, row["key"], "run the study again, or give its config_dir=")])


def _chosen(row: pd.Series[Any], knobs: Sequence[str]) -> dict[str, Any]:
    present = row.dropna()
    return {path: plain(present[path]) for path in knobs if path in present}


# ---------------------------------------------------------------- constants


def constants(run_points: RunPoints, declared: Mapping[str, float]) -> list[Constant]:
    """Check the declared constants. Raises ConfigError with all that cannot vary, and why."""
    check = Problems()
    for path, half in declared.items():
        if why := _why_not(run_points, path):
            check.add(f"study.uncertainty.{path}", *why[:1], way_out=why[1])
            continue
        if not 0 < half < 1:
            check.add(f"study.uncertainty.{path}", "must be a share above 0 and below 1", value=half)
            continue
        for factor in (1 - half, 1 + half):
            _check_legal(check, run_points, Constant(path, half, _is_whole(run_points, path)), factor)
    check.done()
    return [Constant(path, half, _is_whole(run_points, path)) for path, half in declared.items()]


def _is_whole(run_points: RunPoints, path: str) -> bool:
    return isinstance(get_path(run_points.designs[run_points.first_holder(path)], path), int)


def _why_not(run_points: RunPoints, path: str) -> tuple[str, str] | None:
    """Explain why the number at a path is no constant that can vary, with the way out; None where it can vary."""
    backend, designs = run_points.plan.backend, run_points.designs
    if path in run_points.plan.knobs:
        return "was searched: it is no constant of this run", "importance and rules show its effect"
    paths = {leaf for leaf, _, _ in leaves(designs[0])}
    axes = [leaf for leaf in paths if backend.is_axis(leaf, designs[0]) and leaf not in run_points.plan.knobs]
    if not axes:
        return "cannot vary: this simulator takes no number as an axis", "search it instead: +space.<path>=..."
    holders = [designs[row] for row in run_points.holders(path)]
    if not holders:
        return "is no number of the designs", did_you_mean(path, axes)
    if not all(backend.is_axis(path, design) for design in _holders_of_sections(holders, path)):
        rule = "is no axis: it is no number, or changes what is simulated"
        return rule, "search it instead: +space.<path>=..."
    if not run_points.nominal(path).all():
        return "is 0, so a share of it means nothing", "leave it out"
    return None


def _holders_of_sections(designs: Sequence[BaseModel], path: str) -> list[BaseModel]:
    """Select a design for each distinct section that holds a path: all other designs are alike there."""
    _, places = distinct(getattr(design, path.partition(".")[0]) for design in designs)
    return list(dict(zip(places, designs, strict=True)).values())  # the last design of each section stands for it


def _check_legal(check: Problems, run_points: RunPoints, constant: Constant, factor: float) -> None:
    for problem in _refusal(run_points, constant, factor):
        rule = f"is too much: {problem.path} = {problem.value!r} {problem.rule}"
        check.add(f"study.uncertainty.{constant.path}", rule, value=constant.half_width, way_out="give a smaller share")


def _refusal(run_points: RunPoints, constant: Constant, factor: float) -> Sequence[Problem]:
    """Problems that the model finds with a constant times a factor."""
    row = run_points.first_holder(constant.path)
    tree = copy.deepcopy(run_points.tree(row))
    nominal = float(get_path(run_points.designs[row], constant.path))
    set_path(tree, constant.path, constant.values(nominal, np.array([factor]))[0].item())
    try:
        run_points.plan.backend.design(tree)
    except ConfigError as error:
        return error.problems
    return ()


def legal(run_points: RunPoints, constant: Constant, factors: Floats) -> Floats:
    """Select the factors that the model accepts."""
    return np.array([factor for factor in factors.tolist() if not _refusal(run_points, constant, factor)])


# ---------------------------------------------------------------- evaluating


def evaluate_batches(
    run_points: RunPoints, batches: Iterable[Batch], goals: Mapping[str, str], advance: Advance
) -> Floats:
    """Evaluate all designs of some batches: [designs, objectives], smaller is better, inf without a result."""
    parts = []
    for group in _groups(batches, run_points.plan.backend.batch):
        results = _results(run_points.plan, group)
        values = minimized({name: results.column(name) for name in goals}, goals)
        parts.append(np.where(results.ok[:, None], values, math.inf))  # never the best
        advance(sum(batch.size for batch in group))
    return np.concatenate(parts) if parts else np.empty((0, len(goals)))


def _results(planned: Plan, group: Sequence[Batch]) -> Results:
    """Evaluate a group in one call and check its results; if that fails, find out which parts fail."""
    try:
        return check_results(Results.join(planned.backend.evaluate(group)), planned.backend.metrics)
    except Exception:
        return Results.join(call(planned.spec, group))


def _groups(batches: Iterable[Batch], most: int) -> Iterator[list[Batch]]:
    group: list[Batch] = []
    count = 0
    for batch in itertools.chain.from_iterable(batch.split(most) for batch in batches):
        if group and count + batch.size > most:
            yield group
            group, count = [], 0
        group.append(batch)
        count += batch.size
    if group:
        yield group


def together(run_points: RunPoints, changing: Sequence[Constant], factors: Floats) -> Iterator[Batch]:
    """Yield every point with all constants changed at once, sample after sample: factors [S, constants]."""
    nominal = [run_points.nominal(constant.path) for constant in changing]
    changed = Memo[BaseModel]()  # designs of a sample share their sections, as before
    for row, design in enumerate(run_points.designs):
        for sample in range(len(factors)):
            now = {}
            for place, constant in enumerate(changing):
                value = constant.values(nominal[place][run_points.scenario[row]], factors[sample, place : place + 1])[0]
                now[constant.path] = value.item()
            yield Batch(_with(design, now, sample, changed))


def _with(design: BaseModel, now: Mapping[str, Any], sample: int, changed: Memo[BaseModel]) -> BaseModel:
    """Change some numbers of a design; sections that designs share are shared afterwards, too."""
    sections: dict[str, Any] = {}
    now = {path: value for path, value in now.items() if get_path(design, path) is not None}
    for section in dict.fromkeys(path.partition(".")[0] for path in now):
        part = getattr(design, section)
        own = {path.partition(".")[2]: value for path, value in now.items() if path.startswith(f"{section}.")}
        sections[section] = changed.get(partial(put_all, part, own), part, key=sample)
    return design.model_copy(update=sections)


def one_by_one(run_points: RunPoints, constant: Constant, factors: Floats) -> Iterator[Batch]:
    """Yield every point with one constant at each of some factors [G], as an axis."""
    nominal, holders = run_points.nominal(constant.path), set(run_points.holders(constant.path).tolist())
    for row, design in enumerate(run_points.designs):
        if row not in holders:
            # as often as there are factors, so that rows line up
            yield from itertools.repeat(Batch(design), len(factors))
            continue
        axes = {constant.path: constant.values(float(nominal[run_points.scenario[row]]), factors)}
        yield Batch(Batch(design, axes).at(0), axes)


def at(run_points: RunPoints, constant: Constant, rows: NDArray[np.intp], values: Floats) -> Iterator[Batch]:
    """Yield some points [N], each with a constant at a value of its own [N]."""
    changed = Memo[BaseModel]()
    # the key of a memo: one for each distinct value
    places = {value: place for place, value in enumerate(dict.fromkeys(values.tolist()))}
    for row, value in zip(rows.tolist(), values.tolist(), strict=True):
        now = {constant.path: round(value) if constant.whole else value}
        yield Batch(_with(run_points.designs[row], now, places[value], changed))
