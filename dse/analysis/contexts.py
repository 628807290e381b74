"""Contexts of a finished run with their options: the examples that rules are judged on, and learned from.

A context is a scenario on a system, that is one choice of hardware knobs; an option is a value for each chosen knob,
as good as its best setting of all other knobs. A rule may look only at what is known before anything runs: the sizes of
the workload and the numbers of the system that the table holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse import plugins
from dse.errors import ConfigError, Problem, did_you_mean
from dse.results.output_files import plain
from dse.results.run_folder import FinishedRun, results

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Option = tuple[str | int | float | bool | None, ...]
"""A value for each chosen path; None where the knob does not count."""
Quantity = tuple[tuple[str, ...], tuple[str, ...]]
"""A number with a meaning: paths of its factors, and of those of its divisor."""
ALL_CONTEXTS = "all contexts"
TIE = 1e-9
"""Options whose objectives differ by less than this share are equally good."""
_NEAR = 0.02  # largest regret that counts as near the best: a person would take it for as good
_MOST_EXAMPLES = 2_000_000  # contexts times options of one learning task: some 400 MB


@dataclass(frozen=True)
class Cases:
    """Contexts [C] with their options [O]: the examples to learn from.

    values [C, O]: best objective of an option in a context, smaller is better, NaN where it has no legal point.
    inputs: path -> [C], known before anything runs. workloads, systems [C]: number of the workload and of the
    system that a context belongs to. quantities: meaningful products and ratios of inputs, which rules may use, too.
    """

    choose: tuple[str, ...]
    options: tuple[Option, ...]
    values: Floats
    inputs: Mapping[str, NDArray[Any]]
    workloads: NDArray[np.intp]
    systems: NDArray[np.intp]
    quantities: tuple[Quantity, ...] = ()

    @property
    def distinct(self) -> Cases:
        """Cases without the options that are never better or worse than an earlier option."""
        first_places: dict[bytes, int] = {}
        # equal to the last bits are equal; -1 marks illegal
        for place, column in enumerate(np.where(self.legal, np.round(self.regrets / TIE), -1.0).T):
            first_places.setdefault(column.tobytes(), place)
        places = list(first_places.values())
        return replace(self, options=tuple(self.options[place] for place in places), values=self.values[:, places])

    @property
    def legal(self) -> NDArray[np.bool_]:
        """Mask of the options that have a point in a context, [C, O]."""
        return ~np.isnan(self.values)

    @property
    def regrets(self) -> Floats:
        """Regret of each option, [C, O]; an option without a legal point counts as the worst that has one."""
        best = np.nanmin(self.values, axis=1, keepdims=True)
        filled = np.where(self.legal, self.values, np.nanmax(self.values, axis=1, keepdims=True))
        regrets = (filled / best if (best > 0).all() else best / filled) - 1  # negative where larger is better
        return np.asarray(np.where(regrets <= TIE, 0.0, regrets))

    @property
    def best(self) -> NDArray[np.bool_]:
        """Mask of the best options, ties included, [C, O]."""
        return np.asarray((self.regrets == 0.0) & self.legal)


@dataclass(frozen=True)
class ContextQuestion:
    """Question to a run. choose: paths to pick; system: searched hardware; inputs: paths that a rule may look at."""

    objective: str
    goal: str
    choose: tuple[str, ...]
    system: tuple[str, ...]
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, run: FinishedRun, objective: str = "", choose: str = "") -> ContextQuestion:
        """Build the question from the typed words, else from the study. Raises ConfigError."""
        goals = run.goals
        objective = objective or next(iter(goals))
        if objective not in goals:
            way = did_you_mean(objective, goals)
            raise ConfigError([Problem("objective", "is no objective of it", objective, way)])
        hardware = tuple(run.config["study"].get("hardware") or ())
        software = [path for path in run.knobs if path.partition(".")[0] not in hardware]
        chosen = [word for word in choose.split(",") if word] if choose else _choices(run, software)
        for path in chosen:
            if path not in run.knobs:
                way = did_you_mean(path, run.knobs)
                raise ConfigError([Problem("choose", "is no knob that was searched", path, way)])
        if not chosen:
            raise ConfigError([Problem("choose", "the study searched no choice", way_out="name one: choose=<knob>")])
        system = tuple(path for path in run.knobs if path not in (*software, *chosen))
        inputs = tuple(path for path in run.recorded_paths if path in system or path not in (*run.knobs, *chosen))
        return cls(objective, goals[objective], tuple(chosen), system, inputs)


def _choices(run: FinishedRun, software: Sequence[str]) -> list[str]:
    """Knobs that hold several texts and that the study's summary shows: kinds of things, whose numbers are settings."""
    with results(run.outputs.results, run.goals) as table:
        texts = [path for path in software if "text" in table.kinds[path]]
    values: dict[str, set[str]] = {path: set() for path in texts}
    for part in run.parts(texts):
        for path in texts:
            values[path].update(part.loc[part["explored"], path].dropna())
    texts = [path for path in texts if len(values[path]) > 1]
    shown = [path for path in texts if path in run.summary["shown"]]
    return shown or texts or list(software)


def cases(run: FinishedRun, question: ContextQuestion, *, to_learn: bool = True) -> Cases:
    """Gather the contexts and options of a run's table. Raises ConfigError where there is nothing to learn from.

    to_learn: leave out inputs that have one value throughout, as they tell nothing apart.
    """
    import pandas as pd

    context = ["scenario", *question.system]
    sign = 1.0 if question.goal == "minimize" else -1.0
    columns = dict.fromkeys([*context, *question.choose, *question.inputs, "status", question.objective])
    best, input_rows = [], []
    for part in run.parts(list(columns)):
        ok = part[(part["status"] == "ok") & part["explored"]]
        values = ok.assign(value=sign * ok[question.objective])
        best.append(
            # all other knobs at their best
            values.groupby([*context, *question.choose], dropna=False, sort=False, observed=True)["value"].min()
        )
        input_rows.append(ok[[*dict.fromkeys([*context, *question.inputs])]].drop_duplicates())
    if not sum(map(len, best)):
        raise ConfigError([Problem("study", "has no row with a result in its space", run.name, "look at `reason`")])
    names = [*context, *question.choose]
    # parts of the table may share a context
    values = pd.concat(best).groupby(names, dropna=False, sort=False, observed=True).min().reset_index()
    inputs = pd.concat(input_rows).drop_duplicates()
    return _Gatherer(run, question, values, inputs, to_learn).cases()


@dataclass(frozen=True)
class _Gatherer:
    """Conversion of long tables to arrays. best: context, option, value. known: context and inputs, distinct rows."""

    run: FinishedRun
    question: ContextQuestion
    best: pd.DataFrame
    known: pd.DataFrame
    to_learn: bool

    def cases(self) -> Cases:
        context = ["scenario", *self.question.system]
        contexts = self.best.groupby(context, dropna=False, sort=False, observed=True).ngroup().to_numpy()
        options: dict[Option, int] = {}
        rows = self.best[list(self.question.choose)].astype(object)
        rows = rows.where(rows.notna(), None)  # NaN is not equal to itself: None as a key
        places = [options.setdefault(tuple(map(plain, row)), len(options)) for row in rows.itertuples(index=False)]
        values = np.full((contexts.max() + 1, len(options)), np.nan)
        values[contexts, places] = self.best["value"]
        first = np.unique(contexts, return_index=True)[1]  # the first row of each context
        return self._drop_single_options(
            self._describe(self.best.iloc[first][context].reset_index(drop=True), tuple(options), values)
        )

    def _describe(self, contexts: pd.DataFrame, options: tuple[Option, ...], values: Floats) -> Cases:
        """Build cases with the inputs that have one value in each context and several altogether."""
        context = list(contexts)
        counts = self.known.groupby(context, dropna=False, sort=False, observed=True).nunique(dropna=False)
        # inputs that vary within a context are not known before it runs
        single = [path for path in self.question.inputs if path in context or (counts[path] == 1).all()]
        rows = contexts.merge(
            self.known[[*dict.fromkeys([*context, *single])]].drop_duplicates(), how="left", on=context
        )
        complete = [path for path in single if rows[path].notna().all()]  # a rule must have its inputs in every context
        varied = [path for path in complete if rows[path].nunique() > 1 or not self.to_learn]
        inputs = {path: _array(rows[path]) for path in varied}
        sizes = [path for path in varied if path not in self.question.system and rows[path].nunique() > 1]
        workloads = _group_numbers(rows, sizes or ["scenario"])
        systems, quantities = _group_numbers(rows, self.question.system), _quantities(self.run)
        return Cases(self.question.choose, options, values, inputs, workloads, systems, quantities)

    def _drop_single_options(self, all_cases: Cases) -> Cases:
        """Drop contexts that have one option. Raises ConfigError where nothing can be learned."""
        enough = np.flatnonzero(all_cases.legal.sum(axis=1) > 1)
        examples = f"{len(enough):,} contexts times {len(all_cases.options):,} options"
        recorded = "record the sizes of the workload: study.recorded=[<path>,...]"
        for wrong, rule, way in (
            (len(enough) < 2, "has fewer than two contexts with two options", "choose others, or enumerate the space"),
            (not all_cases.inputs, "has no recorded number or hardware knob that distinguishes contexts", recorded),
            (len(enough) * len(all_cases.options) > _MOST_EXAMPLES, f"has too many: {examples}", "choose fewer knobs"),
            (
                bool(np.nanmin(all_cases.values) <= 0 <= np.nanmax(all_cases.values)),
                f"has {self.question.objective} not above 0",
                "take another objective=",
            ),
        ):
            if wrong:
                raise ConfigError([Problem("study", rule, self.run.name, way)])
        inputs = {path: column[enough] for path, column in all_cases.inputs.items()}
        workloads, systems = all_cases.workloads[enough], all_cases.systems[enough]
        return replace(all_cases, values=all_cases.values[enough], inputs=inputs, workloads=workloads, systems=systems)


def _quantities(run: FinishedRun) -> tuple[Quantity, ...]:
    """Products and ratios that are meaningful according to the run's study."""
    study = plugins.load("study", run.config["study"]["module"])
    return tuple(getattr(study, "quantities", ()))


def _group_numbers(rows: pd.DataFrame, paths: Sequence[str]) -> NDArray[np.intp]:
    """Number the combinations of some columns, by row [N]; all rows are alike without columns."""
    if not paths:
        return np.zeros(len(rows), np.intp)
    return rows.groupby(list(paths), dropna=False, sort=False, observed=True).ngroup().to_numpy().astype(np.intp)


def _array(column: pd.Series[Any]) -> NDArray[Any]:
    from pandas.api.types import is_numeric_dtype

    return column.to_numpy(dtype=float) if is_numeric_dtype(column) else column.to_numpy(dtype=object)


# Scores of rules


@dataclass(frozen=True, eq=False)
class Score:
    """Score of a rule over contexts. regrets [contexts]; illegal: contexts where its pick has no point."""

    name: str
    seen: str
    accuracy: float
    regrets: Floats
    illegal: int

    @property
    def mean(self) -> float:
        """Mean regret, a share of the best objective."""
        return float(self.regrets.mean())

    @property
    def most(self) -> float:
        """Largest regret."""
        return float(self.regrets.max())

    @property
    def near(self) -> float:
        """Share of the contexts in which the pick is within 2 % of the best."""
        return float((self.regrets <= _NEAR).mean())

    @property
    def text(self) -> str:
        """The score in one line."""
        about = f"{self.name}, {self.seen}" if self.seen != ALL_CONTEXTS else self.name
        regret = f"regret {100 * self.mean:.2f} % mean, {100 * self.most:.2f} % most"
        shares = f"accuracy {100 * self.accuracy:.0f} %, within 2 % of the best {100 * self.near:.0f} %"
        return f"{about}: {shares}, {regret}"

    def row(self) -> dict[str, Any]:
        """Return the row of `rules.json`."""
        row = {"rule": self.name, "judged_on": self.seen, "accuracy": self.accuracy, "within_2_percent": self.near}
        return row | {"mean_regret": self.mean, "max_regret": self.most, "contexts_without_it": self.illegal}


def score_picks(contexts: Cases, picks: NDArray[np.intp], name: str, seen: str) -> Score:
    """Score picks [C], given as places of options."""
    every = np.arange(len(picks))
    accuracy = float(contexts.best[every, picks].mean())
    return Score(name, seen, accuracy, contexts.regrets[every, picks], int((~contexts.legal[every, picks]).sum()))


def align_options(contexts: Cases, options: Sequence[Option]) -> Cases:
    """Reorder the contexts' options, these first; an option that they lack is legal in none."""
    order = list(dict.fromkeys([*options, *contexts.options]))
    values = np.full((len(contexts.values), len(order)), np.nan)
    values[:, [order.index(option) for option in contexts.options]] = contexts.values
    return replace(contexts, options=tuple(order), values=values)


Hand = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, Sequence[Any]]]
"""A rule that a person wrote: inputs by path [C] -> the value of each path that it chooses [C]."""


def by_hand(contexts: Cases, hands: Mapping[str, Hand], seen: str) -> Iterator[Score]:
    """Score hand-written rules that need recorded inputs only and pick options that the run evaluated."""
    for name, hand in hands.items():
        try:
            chosen = hand(contexts.inputs)
            picks = list(zip(*(chosen[path] for path in contexts.choose), strict=True))
        except KeyError:  # it needs an input that was not recorded, or chooses other paths
            continue
        # NumPy's scalars and Python's are equal, but one form is kept
        aligned = align_options(contexts, list(dict.fromkeys(tuple(map(plain, pick)) for pick in picks)))
        place = {option: index for index, option in enumerate(aligned.options)}
        pick_places = np.array([place[tuple(map(plain, pick))] for pick in picks])
        if aligned.legal[np.arange(len(picks)), pick_places].any():  # else the run has none of its options
            yield score_picks(aligned, pick_places, name, seen)
