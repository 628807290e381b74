"""Which knobs matter, by Optuna's evaluators, from the table of a finished run; nothing is evaluated again.

Each scenario and objective is judged by itself, as absolute values differ by scenario, and told as mean and range over
scenarios. The two methods answer different questions and disagree, so whatever is written names its method:

- `ped_anova` (arXiv:2304.10255; conditional knobs as in arXiv:2601.20800): how far the values that a knob has among the
  best tenth of the points differ from those it has among all, as a share of the knobs' sum. A knob that is absent from
  some points counts by those that have it, weighted by how many of the best tenth do. Beside it stands what the knob
  gets where the objective is shuffled: what is not above that is noise. What knobs do only together is not seen.
- `fanova` (Hutter et al., ICML 2014): the share of the variance that a knob explains by itself; what is left to one is
  interactions. A knob that is absent from some points is judged among those that have it.

Numbers are ordered (by rank), text and yes or no are categories.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem, did_you_mean, pairs
from dse.files import atomic_replacement
from dse.progress import bar
from dse.results import report
from dse.results.finished_run import Finished, read
from dse.results.pareto import minimized

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

FEWEST = 50
"""Rows with a result that a scenario needs: a tenth of them is five, the fewest that Optuna's documentation advises."""
_SHUFFLES = 9  # a knob that does not matter is above all of them one time in ten
_TREES = 32
_NOTHING = 0.1  # of what shuffled objectives give all knobs together: less cannot be told from nothing


@dataclass(frozen=True)
class Method:
    """How importance is measured. most: rows of a scenario that are looked at. told: what a share is a share of."""

    name: str
    title: str
    most: int
    told: str


METHODS = {
    one.name: one
    for one in (
        Method("ped_anova", "PED-ANOVA", 2000, "share of what sets the best tenth of the points apart"),
        Method("fanova", "fANOVA", 1000, "share of the variance that the knob explains by itself"),
    )
}


@dataclass(frozen=True)
class Importance:
    """Of one knob for one objective. shares: by scenario, in [0, 1].

    noise: what the shuffled objective gives it, on the same scale (PED-ANOVA only). active: share of the rows, in
    [0, 1], where the knob counts. levels: how many values it took; ordered: whether they are numbers.
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
        """Over scenarios."""
        return float(np.mean(list(self.shares.values())))

    @property
    def low(self) -> float:
        """Smallest of any scenario."""
        return min(self.shares.values())

    @property
    def high(self) -> float:
        """Largest of any scenario."""
        return max(self.shares.values())

    @property
    def above_noise(self) -> int | None:
        """Scenarios where it is more than for a shuffled objective; None where that was not asked."""
        return sum(self.shares[name] > noise for name, noise in self.noise.items()) if self.noise else None

    def row(self) -> dict[str, Any]:
        """As written: one line of the table."""
        noise = float(np.mean(list(self.noise.values()))) if self.noise else None
        told = {"objective": self.objective, "knob": self.knob, "mean": self.mean, "low": self.low, "high": self.high}
        told |= {"num_scenarios": len(self.shares), "noise": noise, "above_noise": self.above_noise}
        return told | {"active": self.active, "levels": self.levels, "ordered": self.ordered}


@dataclass(frozen=True)
class Assessment:
    """Importance of all knobs. looked_at: rows that were used, of `num_ok` with a result.

    left_out: what was not judged, with the reason. interactions: objective -> mean share of the variance that no knob
    explains by itself (fANOVA only; knobs that are absent from some points count as part of it).
    """

    method: Method
    found: tuple[Importance, ...]
    looked_at: int
    num_ok: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    interactions: Mapping[str, float] = field(default_factory=dict)

    @property
    def objectives(self) -> tuple[str, ...]:
        """Those that could be judged."""
        return tuple(dict.fromkeys(one.objective for one in self.found))

    @property
    def knobs(self) -> tuple[str, ...]:
        """The most important for the first objective first."""
        first = [one for one in self.found if one.objective == self.objectives[0]]
        ranked = sorted(first, key=lambda one: -one.mean)
        return tuple(dict.fromkeys([one.knob for one in ranked] + [one.knob for one in self.found]))

    def of(self, objective: str, knob: str) -> Importance | None:
        """Of one knob for one objective; None where it was not judged."""
        return next((one for one in self.found if (one.objective, one.knob) == (objective, knob)), None)


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class _Measured:
    """Of one scenario and objective: knob -> share, knob -> noise, and what is left to interactions."""

    shares: Mapping[str, float]
    noise: Mapping[str, float] = field(default_factory=dict)
    interactions: float | None = None


@dataclass(frozen=True)
class _Trials:
    """Rows of one scenario as Optuna's trials. A trial's values: each objective, then shuffled copies of it.

    present: of the knobs that vary here, in which rows [N] they exist.
    """

    study: Any
    present: Mapping[str, NDArray[np.bool_]]
    seed: int

    def importances(self, evaluator: Any, place: int, knobs: Sequence[str]) -> dict[str, float]:
        """Knob -> Optuna's unnormalised importance for one of the values of the trials."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that low values are taken for good ones, which these are
            return dict(evaluator.evaluate(self.study, list(knobs), target=lambda trial: trial.values[place]))


def _ped_anova(trials: _Trials, place: int) -> _Measured:
    """Raises ValueError where the best tenth is like the rest."""
    from optuna.importance import PedAnovaImportanceEvaluator

    evaluator = PedAnovaImportanceEvaluator()
    raw, *shuffled = [
        trials.importances(evaluator, copy, list(trials.present)) for copy in range(place, place + 1 + _SHUFFLES)
    ]
    total = sum(raw.values())
    if total <= _NOTHING * max(sum(one.values()) for one in shuffled):
        raise ValueError("has a best tenth of points like the rest, knob by knob; method=fanova tells of interactions")
    noise = {knob: max(one[knob] for one in shuffled) / total for knob in raw}
    return _Measured({knob: share / total for knob, share in raw.items()}, noise)


def _fanova(trials: _Trials, place: int) -> _Measured:
    from optuna.importance import FanovaImportanceEvaluator

    shares: dict[str, float] = {}
    for knob, mask in trials.present.items():
        if knob in shares:
            continue
        beside = sorted(other for other, theirs in trials.present.items() if theirs[mask].all())
        try:
            evaluator = FanovaImportanceEvaluator(n_trees=_TREES, seed=trials.seed)
            found = trials.importances(evaluator, place, beside)
        except RuntimeError:  # Optuna's word for an objective that has one value among these points
            found = dict.fromkeys(beside, 0.0)
        alike = [other for other in beside if np.array_equal(trials.present[other], mask)]
        shares |= {other: float(found[other]) for other in alike}
    always = [shares[knob] for knob, mask in trials.present.items() if mask.all()]
    return _Measured(shares, interactions=max(0.0, 1.0 - sum(always)) if always else None)


_MEASURES: Mapping[str, Callable[[_Trials, int], _Measured]] = {"ped_anova": _ped_anova, "fanova": _fanova}


@dataclass(frozen=True)
class _Knobs:
    """Knobs as Optuna sees them: a column of levels each (numbers by rank, or text), None where a knob is absent."""

    columns: Mapping[str, Sequence[int | str | None]]
    distributions: Mapping[str, Any]

    @classmethod
    def of(cls, rows: pd.DataFrame, knobs: Sequence[str]) -> _Knobs:
        """Of some columns of a table."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        columns, distributions = dict[str, Any](), dict[str, Any]()
        for path in map(str, knobs):
            column, levels = rows[path].astype(object), sorted(rows[path].dropna().unique())
            ordered = _is_number(rows[path])
            known = {level: place if ordered else str(level) for place, level in enumerate(levels)}
            columns[path] = [
                known[value] if there else None for value, there in zip(column, column.notna(), strict=True)
            ]
            distributions[path] = (
                IntDistribution(0, len(known) - 1) if ordered else CategoricalDistribution(list(known.values()))
            )
        return cls(columns, distributions)

    def trials(self, rows: NDArray[np.intp], values: NDArray[np.float64], seed: int) -> _Trials:
        """Some rows [N] with their objectives [N, objectives], smaller being better."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        random = np.random.default_rng(seed)
        copies = [
            own for column in values.T for own in (column, *(random.permutation(column) for _ in range(_SHUFFLES)))
        ]
        study = optuna.create_study(directions=["minimize"] * len(copies))
        study.add_trials([self._trial(row, list(own)) for row, *own in zip(rows.tolist(), *copies, strict=True)])
        held = {path: [column[row] for row in rows] for path, column in self.columns.items()}
        vary = {path: column for path, column in held.items() if len(set(column) - {None}) > 1}
        return _Trials(
            study, {path: np.array([one is not None for one in column]) for path, column in vary.items()}, seed
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


# ---------------------------------------------------------------- of a table


def assess(
    table: pd.DataFrame, goals: Mapping[str, str], knobs: Sequence[str], method: Method, *, seed: int = 0
) -> Assessment:
    """Importance of knobs in a table with `scenario`, `status`, `key`, knobs and objectives.

    Of a scenario with more than `method.most` rows, those with the smallest keys are looked at: a key is a hash, so
    they are a random sample, and the same one every time. Raises ConfigError where nothing can be judged.
    """
    ok = table[table["status"] == "ok"].reset_index(drop=True)
    varied = [path for path in knobs if ok[path].nunique() > 1]
    parts, left_out = _parts(ok, method.most)
    _check(varied, parts, len(ok))
    left_out |= {path: "has one value in this table" for path in knobs if path not in varied}
    encoded = _Knobs.of(ok, varied)
    found: dict[tuple[str, str], _Measured] = {}
    with bar(method.title, sum(map(len, parts.values()))) as advance:
        for name, rows in parts.items():
            trials = encoded.trials(rows, minimized(ok.iloc[rows], goals), seed)
            for place, goal in enumerate(goals):
                try:
                    found[goal, name] = _measured(trials, place * (1 + _SHUFFLES), method)
                except ValueError as error:
                    left_out[f"{goal} of scenario {name}"] = str(error)
            advance(len(rows))
    if not found:
        told = "; ".join(f"{name} {reason}" for name, reason in list(left_out.items())[:3])
        raise ConfigError(
            [Problem("study", f"says nothing about its objectives: {told}", way_out="search other knobs")]
        )
    return Assessment(
        method, _gathered(found, ok[varied]), sum(map(len, parts.values())), len(ok), left_out, _left(found)
    )


def _parts(ok: pd.DataFrame, most: int) -> tuple[dict[str, NDArray[np.intp]], dict[str, str]]:
    """The rows of each scenario that are looked at, and the scenarios with too few."""
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
    """Raises ConfigError where there is nothing to judge."""
    if not parts:
        rule = f"no scenario has {FEWEST} rows with a result, there are {num_ok} altogether"
        raise ConfigError([Problem("study", rule, way_out="run it with a larger budget.trials or a larger space")])
    if not varied:
        way = "search at least one: +space.<path>='choice(a,b)'"
        raise ConfigError([Problem("space", "has no knob with two values among the rows with a result", way_out=way)])


def _measured(trials: _Trials, place: int, method: Method) -> _Measured:
    """Raises ValueError with the reason where a scenario says nothing about an objective."""
    values = {trial.values[place] for trial in trials.study.get_trials(deepcopy=False)}
    if len(values) == 1:
        raise ValueError("has one value, so nothing matters for it")
    if not trials.present:
        raise ValueError("has no knob that varies")
    return _MEASURES[method.name](trials, place)


def _gathered(found: Mapping[tuple[str, str], _Measured], knobs: pd.DataFrame) -> tuple[Importance, ...]:
    """Over scenarios, by objective, the most important first."""
    told = []
    for goal in dict.fromkeys(goal for goal, _ in found):
        by_scenario = {name: one for (own, name), one in found.items() if own == goal}
        for path in map(str, knobs):
            shares = {name: one.shares[path] for name, one in by_scenario.items() if path in one.shares}
            noise = {name: one.noise[path] for name, one in by_scenario.items() if path in one.noise}
            column = knobs[path]
            about = (float(column.notna().mean()), int(column.nunique()), _is_number(column))
            told += [Importance(goal, path, shares, noise, *about)] if shares else []
    goals = list(dict.fromkeys(one.objective for one in told))
    return tuple(sorted(told, key=lambda one: (goals.index(one.objective), -one.mean)))


def _left(found: Mapping[tuple[str, str], _Measured]) -> dict[str, float]:
    """Objective -> mean share that is left to interactions, where the method can tell."""
    left: dict[str, list[float]] = {}
    for (goal, _), one in found.items():
        if one.interactions is not None:
            left.setdefault(goal, []).append(one.interactions)
    return {goal: float(np.mean(shares)) for goal, shares in left.items()}


# ---------------------------------------------------------------- the command


def command(words: Sequence[str]) -> int:
    """`importance study=<name> [method=ped_anova|fanova] [output_dir=outputs]`. Raises ConfigError."""
    given = pairs(words, {"study": "", "method": "ped_anova", "output_dir": "outputs"})
    if given["method"] not in METHODS:
        way = did_you_mean(given["method"], METHODS)
        raise ConfigError([Problem("method", "is no way of measuring importance", given["method"], way)])
    run, method = Finished.find(Path(given["output_dir"]), given["study"]), METHODS[given["method"]]
    table = read(run, ["scenario", "status", "key", *run.knobs, *run.goals])
    inside = table[table["explored"]]
    found = assess(inside, run.goals, run.knobs, method, seed=int(run.made.get("seed", 0)))
    notes = [*_notes(found, dict(inside["status"].value_counts())), *_outside(len(table) - len(inside))]
    _write(run, found, notes)
    console = report.console()
    console.print(_table(found, run.name))
    for note in notes:
        console.print(note, soft_wrap=True)
    told = f"importance.json, importance.csv, figures/importance_{method.name}.png and .svg"
    console.print(f"written to {run.folder}/ ({told})", soft_wrap=True)
    return 0


def _outside(count: int) -> list[str]:
    return [f"{count} baselines outside the space were not counted"] if count else []


def _notes(found: Assessment, statuses: Mapping[Any, int]) -> list[str]:
    """What must be known to read the numbers."""
    method, other = found.method, next(name for name in METHODS if name != found.method.name)
    told = [f"{method.title}: {method.told}; mean over scenarios (smallest to largest). method={other} asks otherwise"]
    if method.name == "fanova":
        left = ", ".join(f"{goal} {100 * share:.0f} %" for goal, share in found.interactions.items())
        told += [f"left to interactions of knobs, and to those absent from some points: {left}"] if left else []
        told += ["a knob that is absent from some points is judged among those that have it: shares do not add up"]
    else:
        told += [f"(noise): no more than for {_SHUFFLES} shufflings of the objective, in most scenarios"]
    if found.looked_at < found.num_ok:
        rows = f"{found.looked_at:,} of {found.num_ok:,} rows with a result"
        told.append(f"{rows} were looked at: those with the smallest keys, {method.most:,} of a scenario at most")
    without = {name: count for name, count in statuses.items() if name != "ok"}
    if without:
        told.append("without result, not counted: " + ", ".join(f"{count} {name}" for name, count in without.items()))
    return [*told, *_left_out(found.left_out)]


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    """One line for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"left out: {', '.join(some[:6])}{', …' * (len(some) > 6)} ({why})" for why, some in names.items()]


def _table(found: Assessment, name: str) -> Table:
    from rich.table import Table

    shown = Table(title=f"{name}: importance of knobs by {found.method.title}")
    shown.add_column("knob")
    shown.add_column("values", justify="right")
    shown.add_column("in points", justify="right")
    for objective in found.objectives:
        shown.add_column(objective, justify="right")
    for knob in found.knobs:
        held = [found.of(objective, knob) for objective in found.objectives]
        one = next(one for one in held if one is not None)
        cells = [f"{one.levels} {'ordered' if one.ordered else 'categories'}", report.cell(one.active, "fraction")]
        shown.add_row(knob, *cells, *map(_said, held))
    return shown


def _said(one: Importance | None) -> str:
    if one is None:
        return "–"
    noise = one.above_noise is not None and 2 * one.above_noise <= len(one.shares)
    told = f"{100 * one.mean:.0f} % ({100 * one.low:.0f}–{100 * one.high:.0f})"
    return f"{told} (noise)" if noise else told


def _write(run: Finished, found: Assessment, notes: Sequence[str]) -> None:
    """Figure, and JSON and CSV, which keep what the other method had found."""
    import pandas as pd

    from dse import plots

    path = run.folder / "importance.json"
    known = run.outputs.read_json("importance") if run.outputs.has("importance") else {}
    rows = [{**one.row(), "shares": dict(one.shares)} for one in found.found]
    told = {
        "study": run.name,
        "notes": list(notes),
        "rows_looked_at": found.looked_at,
        "rows_with_result": found.num_ok,
    }
    told |= {"left_out": dict(found.left_out), "interactions": dict(found.interactions), "importance": rows}
    known = {name: one for name, one in {**known, found.method.name: told}.items() if name in METHODS}
    run.outputs.write_json("importance", known)
    flat = [{"method": name, **row} for name, one in known.items() for row in one["importance"]]
    with atomic_replacement(path.with_suffix(".csv")) as fresh:
        pd.DataFrame(flat).drop(columns="shares").to_csv(fresh, index=False)
    bars = pd.DataFrame(
        [{**one.row(), "scenario": name, "share": share} for one in found.found for name, share in one.shares.items()]
    )
    title = f"{run.name}: importance by {found.method.title}"
    figure = plots.importance(bars, found.knobs, label=found.method.told, title=title)
    plots.save(figure, run.outputs.figures, f"importance_{found.method.name}")
