"""Importance of knobs, by Optuna's evaluators, from the table of a finished run; nothing is evaluated again.

Each scenario and objective is judged by itself, as absolute values differ by scenario; reported are the mean and the
range over scenarios. The two methods answer different questions and disagree, so each output names its method:

- `ped_anova` (arXiv:2304.10255; conditional knobs as in arXiv:2601.20800): how far the values that a knob has among the
  best tenth of the points differ from those it has among all, as a share of the knobs' sum. A knob that is absent from
  some points counts by the points that have it, weighted by how many of the best tenth do. Its noise is the share that
  it gets where the objective is shuffled: a share that is not above that is noise. Interactions are not seen.
- `fanova` (Hutter et al., ICML 2014): the share of the variance that a knob explains by itself; the remainder up to
  one is interactions. A knob that is absent from some points is judged among the points that have it.

Numbers are ordered (by rank), text and yes or no are categories.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem, did_you_mean, pairs
from dse.errors.terminal import bar
from dse.results import output_files
from dse.results.pareto import minimized
from dse.results.run_folder import CommandAnswer, FinishedRun, read
from dse.results.words import cell

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

FEWEST = 50
"""Rows with a result that a scenario needs: a tenth of them is five, the fewest that Optuna's documentation advises."""
_SHUFFLES = 9  # a knob that does not matter is above all of them one time in ten
_TREES = 32  # half of Optuna's default
_NOTHING = 0.1  # of the sum of all knobs for a shuffled objective: less cannot be told from nothing


@dataclass(frozen=True)
class ImportanceMethod:
    """A measure of importance. most: rows of a scenario that are looked at. told: what a share is a share of."""

    name: str
    title: str
    most: int
    told: str


METHODS = {
    method.name: method
    for method in (
        ImportanceMethod("ped_anova", "PED-ANOVA", 2000, "share of what sets the best tenth of the points apart"),
        ImportanceMethod("fanova", "fANOVA", 1000, "share of the variance that the knob explains by itself"),
    )
}


@dataclass(frozen=True)
class Importance:
    """Importance of one knob for one objective. shares: by scenario, in [0, 1].

    noise: share for the shuffled objective, on the same scale (PED-ANOVA only). active: share of the rows, in
    [0, 1], where the knob counts. levels: number of values it took; ordered: whether they are numbers.
    """

    objective: str
    knob: str
    shares: Mapping[str, float]
    noise: Mapping[str, float]
    active: float
    levels: int
    ordered: bool

    @property
    def mean(self) -> float:
        """Mean share over scenarios."""
        return float(np.mean(list(self.shares.values())))

    @property
    def low(self) -> float:
        """Smallest share of any scenario."""
        return min(self.shares.values())

    @property
    def high(self) -> float:
        """Largest share of any scenario."""
        return max(self.shares.values())

    @property
    def above_noise(self) -> int | None:
        """Number of scenarios with a share above noise; None without noise."""
        return sum(self.shares[name] > noise for name, noise in self.noise.items()) if self.noise else None

    def row(self) -> dict[str, Any]:
        """Row of the table that is written."""
        noise = float(np.mean(list(self.noise.values()))) if self.noise else None
        row = {"objective": self.objective, "knob": self.knob, "mean": self.mean, "low": self.low, "high": self.high}
        row |= {"num_scenarios": len(self.shares), "noise": noise, "above_noise": self.above_noise}
        return row | {"active": self.active, "levels": self.levels, "ordered": self.ordered}


@dataclass(frozen=True)
class Assessment:
    """Importance of all knobs. looked_at: rows that were used, of `num_ok` with a result.

    left_out: what was not judged, with the reason. interactions: objective -> mean share of the variance that no knob
    explains by itself (fANOVA only; it includes knobs that are absent from some points).
    """

    method: ImportanceMethod
    found: tuple[Importance, ...]
    looked_at: int
    num_ok: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    interactions: Mapping[str, float] = field(default_factory=dict)

    @property
    def objectives(self) -> tuple[str, ...]:
        """Objectives that could be judged."""
        return tuple(dict.fromkeys(importance.objective for importance in self.found))

    @property
    def knobs(self) -> tuple[str, ...]:
        """Knobs, the most important for the first objective first."""
        first = [importance for importance in self.found if importance.objective == self.objectives[0]]
        ranked = sorted(first, key=lambda importance: -importance.mean)
        return tuple(
            dict.fromkeys([importance.knob for importance in ranked] + [importance.knob for importance in self.found])
        )

    def of(self, objective: str, knob: str) -> Importance | None:
        """Importance of one knob for one objective; None where it was not judged."""
        return next(
            (importance for importance in self.found if (importance.objective, importance.knob) == (objective, knob)),
            None,
        )


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class _ScenarioImportance:
    """Measure of one scenario and objective: knob -> share, knob -> noise, and the share of interactions."""

    shares: Mapping[str, float]
    noise: Mapping[str, float] = field(default_factory=dict)
    interactions: float | None = None


@dataclass(frozen=True)
class _Trials:
    """Rows of one scenario as Optuna's trials. A trial's values: each objective, then shuffled copies of it.

    present: knob that varies here -> mask of the rows [N] where it exists.
    """

    study: Any
    present: Mapping[str, NDArray[np.bool_]]
    seed: int

    def importances(self, evaluator: Any, place: int, knobs: Sequence[str]) -> dict[str, float]:
        """Compute knob -> Optuna's unnormalised importance for one of the values of the trials."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that low values are taken for good ones, which these are
            return dict(evaluator.evaluate(self.study, list(knobs), target=lambda trial: trial.values[place]))


def _ped_anova(trials: _Trials, place: int) -> _ScenarioImportance:
    """Measure shares and noise. Raises ValueError where the best tenth is like the rest."""
    from optuna.importance import PedAnovaImportanceEvaluator

    evaluator = PedAnovaImportanceEvaluator()
    raw, *shuffled = [
        trials.importances(evaluator, copy, list(trials.present)) for copy in range(place, place + 1 + _SHUFFLES)
    ]
    total = sum(raw.values())
    if total <= _NOTHING * max(sum(shares.values()) for shares in shuffled):
        raise ValueError("has a best tenth of points like the rest, knob by knob; method=fanova shows interactions")
    # the largest of the shufflings: what chance reaches
    noise = {knob: max(shares[knob] for shares in shuffled) / total for knob in raw}
    return _ScenarioImportance({knob: share / total for knob, share in raw.items()}, noise)


def _fanova(trials: _Trials, place: int) -> _ScenarioImportance:
    from optuna.importance import FanovaImportanceEvaluator

    shares: dict[str, float] = {}
    for knob, mask in trials.present.items():
        if knob in shares:  # measured together with another knob
            continue
        # knobs that exist wherever this one does: no missing values
        beside = sorted(other for other, theirs in trials.present.items() if theirs[mask].all())
        evaluator = FanovaImportanceEvaluator(n_trees=_TREES, seed=trials.seed)
        try:
            importances = trials.importances(evaluator, place, beside)
        except RuntimeError:  # Optuna's word for an objective that has one value among these points
            importances = dict.fromkeys(beside, 0.0)
        alike = [other for other in beside if np.array_equal(trials.present[other], mask)]
        shares |= {other: float(importances[other]) for other in alike}
    # shares of knobs on all points add up, others do not
    always = [shares[knob] for knob, mask in trials.present.items() if mask.all()]
    # estimates of a forest may exceed the whole
    return _ScenarioImportance(shares, interactions=max(0.0, 1.0 - sum(always)) if always else None)


_MEASURES: Mapping[str, Callable[[_Trials, int], _ScenarioImportance]] = {"ped_anova": _ped_anova, "fanova": _fanova}


@dataclass(frozen=True)
class _Knobs:
    """Knobs as Optuna sees them: a column of levels each (numbers by rank, or text), None where a knob is absent."""

    columns: Mapping[str, Sequence[int | str | None]]
    distributions: Mapping[str, Any]

    @classmethod
    def of(cls, rows: pd.DataFrame, knobs: Sequence[str]) -> _Knobs:
        """Encode some columns of a table."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        columns, distributions = dict[str, Any](), dict[str, Any]()
        for path in map(str, knobs):
            column, levels = rows[path].astype(object), sorted(rows[path].dropna().unique())
            ordered = _is_number(rows[path])
            # ranks: distances between values carry no meaning here
            codes = {level: place if ordered else str(level) for place, level in enumerate(levels)}
            columns[path] = [
                codes[value] if there else None for value, there in zip(column, column.notna(), strict=True)
            ]
            distributions[path] = (
                IntDistribution(0, len(codes) - 1) if ordered else CategoricalDistribution(list(codes.values()))
            )
        return cls(columns, distributions)

    def trials(self, rows: NDArray[np.intp], values: NDArray[np.float64], seed: int) -> _Trials:
        """Build trials of some rows [N] with their objectives [N, objectives], smaller is better."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        random = np.random.default_rng(seed)
        copies = [  # the objective and its shufflings in one study, which is built once
            copy for column in values.T for copy in (column, *(random.permutation(column) for _ in range(_SHUFFLES)))
        ]
        study = optuna.create_study(directions=["minimize"] * len(copies))
        study.add_trials(
            [self._trial(row, list(objectives)) for row, *objectives in zip(rows.tolist(), *copies, strict=True)]
        )
        columns = {path: [column[row] for row in rows] for path, column in self.columns.items()}
        vary = {path: column for path, column in columns.items() if len(set(column) - {None}) > 1}
        return _Trials(
            study, {path: np.array([level is not None for level in column]) for path, column in vary.items()}, seed
        )

    def _trial(self, row: int, values: list[float]) -> Any:
        from optuna.trial import create_trial

        params = {path: column[row] for path, column in self.columns.items() if column[row] is not None}
        return create_trial(
            params=params, distributions={path: self.distributions[path] for path in params}, values=values
        )


def _is_number(column: pd.Series[Any]) -> bool:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    return bool(is_numeric_dtype(column) and not is_bool_dtype(column))


# ---------------------------------------------------------------- assessing a table


def assess(
    table: pd.DataFrame, goals: Mapping[str, str], knobs: Sequence[str], method: ImportanceMethod, *, seed: int = 0
) -> Assessment:
    """Assess the importance of knobs in a table with `scenario`, `status`, `key`, knobs and objectives.

    A scenario with more than `method.most` rows is judged by the rows with the smallest keys: a key is a hash, so they
    are a random sample, and the same one every time. Raises ConfigError where nothing can be judged.
    """
    ok = table[table["status"] == "ok"].reset_index(drop=True)
    varied = [path for path in knobs if ok[path].nunique() > 1]
    parts, left_out = _parts(ok, method.most)
    _check(varied, parts, len(ok))
    left_out |= {path: "has one value in this table" for path in knobs if path not in varied}
    encoded = _Knobs.of(ok, varied)
    measures: dict[tuple[str, str], _ScenarioImportance] = {}
    with bar(method.title, sum(map(len, parts.values()))) as advance:
        for name, rows in parts.items():
            trials = encoded.trials(rows, minimized(ok.iloc[rows], goals), seed)
            for place, goal in enumerate(goals):
                try:
                    measures[goal, name] = _measure(trials, place * (1 + _SHUFFLES), method)
                except ValueError as error:
                    left_out[f"{goal} of scenario {name}"] = str(error)
            advance(len(rows))
    if not measures:
        reasons = "; ".join(f"{name} {reason}" for name, reason in list(left_out.items())[:3])
        raise ConfigError(
            [Problem("study", f"has no information about its objectives: {reasons}", way_out="search other knobs")]
        )
    return Assessment(
        method,
        _importances(measures, ok[varied]),
        sum(map(len, parts.values())),
        len(ok),
        left_out,
        _interactions(measures),
    )


def _parts(ok: pd.DataFrame, most: int) -> tuple[dict[str, NDArray[np.intp]], dict[str, str]]:
    """Select the rows of each scenario that are looked at, and the scenarios with too few."""
    places = {str(name): rows for name, rows in ok.groupby("scenario", sort=False).indices.items()}
    keys = ok["key"].to_numpy().astype(str)
    parts = {
        name: np.sort(rows[np.argsort(keys[rows], kind="stable")[:most]])
        for name, rows in places.items()
        if len(rows) >= FEWEST
    }
    few = {name: rows for name, rows in places.items() if name not in parts}
    rule = "rows with a result, fewer than"
    return parts, {f"scenario {name}": f"has {len(rows)} {rule} {FEWEST}" for name, rows in few.items()}


def _check(varied: Sequence[str], parts: Mapping[str, Any], num_ok: int) -> None:
    """Check that there is something to judge. Raises ConfigError."""
    if not parts:
        rule = f"no scenario has {FEWEST} rows with a result, there are {num_ok} altogether"
        raise ConfigError([Problem("study", rule, way_out="run it with a larger budget.trials or a larger space")])
    if not varied:
        way = "search at least one: +space.<path>='choice(a,b)'"
        raise ConfigError([Problem("space", "has no knob with two values among the rows with a result", way_out=way)])


def _measure(trials: _Trials, place: int, method: ImportanceMethod) -> _ScenarioImportance:
    """Measure importance. Raises ValueError with the reason where a scenario says nothing about an objective."""
    values = {trial.values[place] for trial in trials.study.get_trials(deepcopy=False)}
    if len(values) == 1:
        raise ValueError("has one value, so nothing matters for it")
    if not trials.present:
        raise ValueError("has no knob that varies")
    return _MEASURES[method.name](trials, place)


def _importances(
    measures: Mapping[tuple[str, str], _ScenarioImportance], knobs: pd.DataFrame
) -> tuple[Importance, ...]:
    """Importances over scenarios, by objective, the most important first."""
    importances = []
    for goal in dict.fromkeys(goal for goal, _ in measures):
        by_scenario = {name: measure for (objective, name), measure in measures.items() if objective == goal}
        for path in map(str, knobs):
            shares = {name: measure.shares[path] for name, measure in by_scenario.items() if path in measure.shares}
            noise = {name: measure.noise[path] for name, measure in by_scenario.items() if path in measure.noise}
            column = knobs[path]
            about = (float(column.notna().mean()), int(column.nunique()), _is_number(column))
            importances += [Importance(goal, path, shares, noise, *about)] if shares else []
    goals = list(dict.fromkeys(importance.objective for importance in importances))
    return tuple(sorted(importances, key=lambda importance: (goals.index(importance.objective), -importance.mean)))


def _interactions(measures: Mapping[tuple[str, str], _ScenarioImportance]) -> dict[str, float]:
    """Compute objective -> mean share of interactions, where the method measures it."""
    interactions: dict[str, list[float]] = {}
    for (goal, _), measure in measures.items():
        if measure.interactions is not None:
            interactions.setdefault(goal, []).append(measure.interactions)
    return {goal: float(np.mean(shares)) for goal, shares in interactions.items()}


# ---------------------------------------------------------------- the command


@output_files.working_on_folders
def command(words: Sequence[str]) -> CommandAnswer:
    """`results importance study=<name> [method=ped_anova|fanova] [output_dir=outputs]`. Raises ConfigError."""
    options = pairs(words, {"study": "", "method": "ped_anova", "output_dir": "outputs"})
    if options["method"] not in METHODS:
        way = did_you_mean(options["method"], METHODS)
        raise ConfigError([Problem("method", "is no way of measuring importance", options["method"], way)])
    run, method = FinishedRun.find(Path(options["output_dir"]), options["study"]), METHODS[options["method"]]
    table = read(run, ["scenario", "status", "key", *run.knobs, *run.goals])
    inside = table[table["explored"]]
    assessment = assess(inside, run.goals, run.knobs, method, seed=int(run.provenance.get("seed", 0)))
    notes = [*_notes(assessment, dict(inside["status"].value_counts())), *_outside(len(table) - len(inside))]
    _write(run, assessment, notes)
    files = f"importance.json, importance.csv, figures/importance_{method.name}.png and .svg"
    parts: tuple[Table | str, ...] = (_table(assessment, run.name), *notes, f"written to {run.folder}/ ({files})")
    return CommandAnswer(run.folder, parts, "importance")


def _outside(count: int) -> list[str]:
    return [f"{count} baselines outside the space were not counted"] if count else []


def _notes(assessment: Assessment, statuses: Mapping[Any, int]) -> list[str]:
    """Notes on how to read the numbers."""
    method, other = assessment.method, next(name for name in METHODS if name != assessment.method.name)
    notes = [f"{method.title}: {method.told}; mean over scenarios (smallest to largest). method={other} asks otherwise"]
    if method.name == "fanova":
        left = ", ".join(f"{goal} {100 * share:.0f} %" for goal, share in assessment.interactions.items())
        notes += [f"left to interactions of knobs, and to those absent from some points: {left}"] if left else []
        notes += ["a knob that is absent from some points is judged among those that have it: shares do not add up"]
    else:
        notes += [f"(noise): no more than for {_SHUFFLES} shufflings of the objective, in most scenarios"]
    if assessment.looked_at < assessment.num_ok:
        rows = f"{assessment.looked_at:,} of {assessment.num_ok:,} rows with a result"
        notes.append(f"{rows} were looked at: those with the smallest keys, {method.most:,} of a scenario at most")
    without = {name: count for name, count in statuses.items() if name != "ok"}
    if without:
        notes.append("without result, not counted: " + ", ".join(f"{count} {name}" for name, count in without.items()))
    return [*notes, *_left_out(assessment.left_out)]


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    """Lines on what was left out, one for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"left out: {', '.join(group[:6])}{', …' * (len(group) > 6)} ({why})" for why, group in names.items()]


def _table(assessment: Assessment, name: str) -> Table:
    from rich.table import Table

    shown = Table(title=f"{name}: importance of knobs by {assessment.method.title}")
    shown.add_column("knob")
    shown.add_column("values", justify="right")
    shown.add_column("in points", justify="right")
    for objective in assessment.objectives:
        shown.add_column(objective, justify="right")
    for knob in assessment.knobs:
        importances = [assessment.of(objective, knob) for objective in assessment.objectives]
        importance = next(importance for importance in importances if importance is not None)
        cells = [
            f"{importance.levels} {'ordered' if importance.ordered else 'categories'}",
            cell(importance.active, "fraction"),
        ]
        shown.add_row(knob, *cells, *map(_share_cell, importances))
    return shown


def _share_cell(importance: Importance | None) -> str:
    if importance is None:
        return "–"
    # in most scenarios
    noise = importance.above_noise is not None and 2 * importance.above_noise <= len(importance.shares)
    text = f"{100 * importance.mean:.0f} % ({100 * importance.low:.0f}–{100 * importance.high:.0f})"
    return f"{text} (noise)" if noise else text


def _write(run: FinishedRun, assessment: Assessment, notes: Sequence[str]) -> None:
    """Write the figure, JSON and CSV, which keep the results of the other method."""
    import pandas as pd

    from dse import plots
    from dse.plots import comparisons

    records = run.outputs.read_json("importance") if run.outputs.has("importance") else {}
    rows = [{**importance.row(), "shares": dict(importance.shares)} for importance in assessment.found]
    record = {
        "study": run.name,
        "notes": list(notes),
        "rows_looked_at": assessment.looked_at,
        "rows_with_result": assessment.num_ok,
    }
    record |= {"left_out": dict(assessment.left_out), "interactions": dict(assessment.interactions), "importance": rows}
    records = {name: entry for name, entry in {**records, assessment.method.name: record}.items() if name in METHODS}
    run.outputs.write_json("importance", records)
    flat = [{"method": name, **row} for name, entry in records.items() for row in entry["importance"]]
    run.outputs.write_text("importance.csv", pd.DataFrame(flat).drop(columns="shares").to_csv(index=False))
    bars = pd.DataFrame(
        [
            {**importance.row(), "scenario": name, "share": share}
            for importance in assessment.found
            for name, share in importance.shares.items()
        ]
    )
    note = f"{run.name}, by {assessment.method.title}: {assessment.method.told}"
    make = partial(comparisons.importance, bars, assessment.knobs, note=note)
    plots.save(make, run.outputs.figures, f"importance_{assessment.method.name}")
