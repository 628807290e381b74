"""The plan of a step: what was chosen, what each choice gains alone and together, and the next best of each.

A choice is the schedule of a site (`simulators.steps.overlap.sites`), or knobs of the step that are chosen together:
whether tokens are split, when gradients are reduced, which schedule a pipeline has. `simulators.steps.plan.choices`
lists them, with the values at which nothing is done; sites that the framework switches together are one choice. A plan
shows those that were searched and count in its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse import plugins
from dse.backend import Batch
from dse.space import get_path, set_path
from simulators.steps.backend import StepBackend
from simulators.steps.design import StepDesign
from simulators.steps.operators.experts import TokenExchange
from simulators.steps.overlap.implementations import implementation
from simulators.steps.overlap.sites import SERIAL, SITES
from simulators.steps.plan.choices import DECIDING, OFF, choices_with
from simulators.steps.plan.layouts import PATHS, Layout, path_of
from simulators.steps.plan.scenarios import APART
from simulators.steps.run.build import iteration
from simulators.steps.run.iteration import Iteration
from simulators.workloads.model_zoo import model_tree
from studies.plan.stacks import defaults_of

if TYPE_CHECKING:
    import pandas as pd

SITE_PATHS = tuple(f"sites.{name}" for name in SITES)
TIME, MEMORY = "iteration_s", "memory_share"
_RATE, _UTILISATION = "tokens_per_s_per_gpu", "flop_utilisation"


def has_software(plan: StepPlan) -> bool:
    """Tell whether schedules of sites that were searched are those of software."""
    texts = {str(text) for path in SITE_PATHS if path in plan.table for text in plan.table[path].dropna()}
    return any(implementation(text.partition(" ")[0]) for text in texts)


def rates_of_a_gpu(point: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """Tokens a second of a GPU, and the share of its peak rate that the model's FLOP are (MFU), as a clause; of decode
    steps, which read weights and caches, the share of the HBM's bandwidth.
    """
    if _RATE not in point or _UTILISATION not in point:
        return ""
    rate = f", {point[_RATE]:,.0f} tokens/s/GPU"
    if get_path(tree, "run.mode") != "decode":
        return f"{rate}, {100 * point[_UTILISATION]:.0f} % MFU"
    peak = StepBackend().design(tree).system.gpu.peak_hbm_bytes_per_s
    if peak is None or "hbm_bytes" not in point:
        return rate
    return f"{rate}, {100 * point['hbm_bytes'] / (point[TIME] * float(peak)):.0f} % of the HBM bandwidth"


_SECTIONS = (
    *("system", "model", "run", "parallel", "optimizer", "kernels", "lengths", "iterations"),
    *("quantised", "format", "instructions", "stack"),
)


@dataclass(frozen=True)
class Choice:
    """Knobs that are chosen together. off: knob -> its value where nothing is done.

    exposed: time of a step [s] that the choice is to hide; None where it has none of its own. limiter: what holds up
    the rest of it. decides: whether sites, or others that decide of sites, need it.
    """

    name: str
    off: Mapping[str, Any]
    exposed: Callable[[Iteration], float] | None = None
    limiter: str = ""
    decides: bool = False

    @property
    def sites(self) -> list[str]:
        """Sites whose schedules are chosen; none where it is of other knobs."""
        return [path.removeprefix("sites.") for path in self.off if path in SITE_PATHS]


def _at_sites(sites: Sequence[str], step: Iteration) -> float:
    """Exposed time of the collectives of sites in a step [s]."""
    names = {collective for site in sites for collective in SITES[site].collectives}
    parts = [part for part in step.passes.parts if part.op.name.removesuffix(" again") in names]
    return float(sum(step.passes.micro_batches * part.seconds for part in parts))


def _experts_s(step: Iteration) -> float:
    """Dispatch and combine that nothing hides [s]."""
    parts = (part for part in step.passes.parts if isinstance(part.op.work, TokenExchange))
    # what is saved by overlap may be that of other work, too
    return max(0.0, float(step.passes.micro_batches * (step.passes.sum(parts) - step.passes.saved_s)))


def _split_s(step: Iteration) -> float:
    return float(step.passes.micro_batches * step.gradients.split_s)


_EXPOSED: Mapping[str, tuple[Callable[[Iteration], float], str]] = {
    "gradient reduction": (lambda step: float(step.gradients.exposed_s), "links"),
    "weight prefetch": (_split_s, "links"),
    "resharding": (_split_s, "links"),
    "optimizer step": (lambda step: float(step.update.seconds), "HBM"),
    "pipeline schedule": (lambda step: float(step.bubble_s), "other stages"),
    "expert all-to-all": (_experts_s, "links"),
    "pipeline messages": (lambda step: float(step.passes.micro_batches * step.messages_s), "links"),
}
"""Choice -> the time that it is to hide, and what holds up the rest."""


def _choice(name: str, off: Mapping[str, Any]) -> Choice:
    sites = [path.removeprefix("sites.") for path in off if path in SITE_PATHS]
    exposed, limiter = _EXPOSED.get(name, (None, ""))
    if sites:
        exposed, limiter = partial(_at_sites, sites), "links"
    return Choice(name, off, exposed, limiter, decides=name in DECIDING)


def most_memory(config: Mapping[str, Any]) -> float:
    """Share of a GPU's memory up to which the answer of a run is a time: 1 and the error of the memory model."""
    return float(get_path(config, "study.limits.memory_share.high") or 1.0)


@dataclass(frozen=True)
class StepPlan:
    """The plan of one scenario. table: its points with a result. config: of the run.

    rivals: points of the same step in other layouts, where layouts were chosen. preferred: key of the point that is
    planned, where that is not the fastest. decision: what drawn errors say of it (`studies.plan.certainty`).
    """

    scenario: str
    table: pd.DataFrame
    config: Mapping[str, Any]
    rivals: pd.DataFrame | None = None
    preferred: str = ""
    decision: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The scenario without its layout."""
        return self.scenario.partition(APART)[0]

    @cached_property
    def best(self) -> Any:
        """The point with the least time, or the one that is preferred."""
        chosen = self.table[self.table["key"].astype(str) == self.preferred] if self.preferred else self.table[:0]
        return least(chosen if len(chosen) else self.table)

    @property
    def fits(self) -> bool:
        """Tell whether the best point is within the memory: no point is where it is not."""
        return MEMORY not in self.best or float(self.best[MEMORY]) <= most_memory(self.config)

    @property
    def leanest(self) -> Any:
        """The point that takes least memory."""
        return self.table.sort_values(MEMORY, kind="stable").iloc[0]

    @cached_property
    def before(self) -> Any:
        """The step as its software comes (`studies.plan.stacks`); with nothing overlapped where that breaks a rule."""
        # one value in all points was typed, or is the only one that breaks no rule: it stays
        chosen = {path for path in self.table if self.table[path].map(str).nunique() > 1}
        values = {path: value for path, value in defaults_of(self.config).items() if path in chosen}
        differs = any(str(plain(self.serial[path])) != str(value) for path, value in values.items())
        if not differs:
            return self.serial
        row = evaluated(self, self.serial, values)
        return self.serial if row is None else row

    @cached_property
    def serial(self) -> Any:
        """The step with every site serial and nothing else done: in the best layout for that, where there are several.

        Where such a step breaks a rule or does not fit, the one that does least.
        """
        tables = [self.table] if self.rivals is None else [self.table, self.rivals]
        for decided in ((), self._deciding_paths):  # first with nothing done at all, then with what others need
            rows = [_same_as(table, _off(table), but=decided) for table in tables]
            firsts = [least(part) for part in rows if len(part)]
            if firsts:
                return min(firsts, key=lambda row: float(row[TIME]))
        return self.table.iloc[0]

    @property
    def _deciding_paths(self) -> list[str]:
        return [path for choice in self._all_choices if choice.decides for path in choice.off]

    @cached_property
    def choices(self) -> list[Choice]:
        """Choices that were searched and count in the best point."""
        decided = {path: plain(self.best[path]) for path in self._deciding_paths if path in self.table}
        rows = _same_as(self.table, decided)
        return [
            choice for choice in self._all_choices if any(_was_chosen(self.table, rows, path) for path in choice.off)
        ]

    @cached_property
    def _all_choices(self) -> Sequence[Choice]:
        """Everything that the plan may choose, in the order of its rows."""
        schedules = {str(text) for path in SITE_PATHS if path in self.table for text in self.table[path].dropna()}
        knobs = choices_with(self.config.get("stack"), schedules)
        return [_choice(name, off) for name, off in knobs.items()]

    def chosen(self, choice: Choice) -> dict[str, Any]:
        """Knob -> the value that the plan has, of a choice."""
        there = (path for path in choice.off if path in self.table)
        # empty: the knob does not count in this point
        return {path: _value(self.best, path) for path in there if path in SITE_PATHS or _is_there(self.best[path])}

    def is_off(self, choice: Choice) -> bool:
        """Tell whether nothing is done."""
        return all(str(value) == str(choice.off[path]) for path, value in self.chosen(choice).items())

    @property
    def sites(self) -> dict[str, str]:
        """Schedule of each site of the best point, of those that were searched."""
        paths = {site: f"sites.{site}" for choice in self.choices for site in choice.sites}
        there = {site: path for site, path in paths.items() if path in self.table and _is_there(self.best[path])}
        return {site: str(self.best[path]) for site, path in there.items()}

    def text(self, choice: Choice, row: Any = None) -> str:
        """What a point has, the best one by itself: the schedules of sites, or values of knobs."""
        point = self.best if row is None else row
        values = {path: _value(point, path) for path in choice.off if path in self.table}
        if choice.sites:  # those that the step has have one schedule
            there = (str(value) for path, value in values.items() if _is_there(point[path]))
            return " and ".join(dict.fromkeys(there)) or SERIAL
        return " ".join(f"{path.rpartition('.')[2]}={_as_typed(value)}" for path, value in values.items())

    @property
    def gain(self) -> float:
        """Time before over time of the plan."""
        return float(self.before[TIME] / self.best[TIME])

    def alone(self, choice: Choice) -> float | None:
        """Time with nothing done over that with one choice of the plan; None if either was not evaluated.

        Choices that decide of others are as in the plan where one needs them, else nothing is done there either.
        """
        pair = self.alone_rows_of(choice)
        return None if pair is None else float(pair[0][TIME] / pair[1][TIME])

    def alone_rows_of(self, choice: Choice) -> tuple[Any, Any] | None:
        """The points with nothing done, and with one choice of the plan; None if either was not evaluated."""
        others = [path for path in self._deciding_paths if path not in choice.off]
        off = _off(self.table)
        rows = _same_as(self.table, {**off, **self.chosen(choice)}, but=others)
        as_planned = {path: self.best[path] for path in others if path in rows}
        for _, row in _first(_first(rows, as_planned), {path: off[path] for path in others if path in off}).iterrows():
            decided = {path: plain(row[path]) for path in others if path in rows}
            same = _same_as(self.table, {**off, **decided})
            if len(same):
                return same.iloc[0], row
        return None

    def without(self, choice: Choice) -> Any:
        """The best point without a choice, with all others as planned; None without any."""
        rows = self._others(choice)
        off = {path: value for path, value in choice.off.items() if path in rows}
        rows = _same_as(rows, off)
        return None if rows.empty else least(rows)

    def runner_up(self, choice: Choice) -> Any:
        """The next best point with another value of a choice beside the plan's others; None without any.

        Where the choice decides of others, these have what is best then.
        """
        planned, rows = self.text(choice), self._others(choice)
        rows = rows[[self.text(choice, row) != planned for _, row in rows.iterrows()]]
        if rows.empty and self.preferred:  # the search went around the fastest point
            return other_value(self, choice)
        return None if rows.empty else least(rows)

    def _others(self, choice: Choice) -> pd.DataFrame:
        """Points that differ from the best one in a choice alone, and in those that it decides of."""
        paths = [*choice.off, *((*self._deciding_paths, *SITE_PATHS) if choice.decides else ())]
        return _same_as(self.table, {path: _value(self.best, path) for path in _off(self.table)}, but=paths)

    def step(self, row: Any) -> Iteration:
        """The iteration of a point."""
        return iteration(self.as_run(row))

    def as_run(self, row: Any) -> StepDesign:
        """The design of a point at the clock that it holds."""
        return self.backend.as_run(self.design(row))

    def base_tree(self) -> dict[str, Any]:
        """The design tree of the run, before anything is chosen."""
        tree = {name: value for name, value in self.config.items() if name in _SECTIONS}
        if self.config.get("models"):
            tree["model"] = model_tree(self.scenario.partition(" ")[0])
        # copies: a point sets values in them
        return {**tree, **{name: dict(tree[name]) for name in ("parallel", "run", "optimizer")}}

    def design(self, row: Any) -> StepDesign:
        """The design of a point."""
        return self.backend.design(self.point_tree(row))

    @property
    def backend(self) -> StepBackend:
        """The simulator of the run."""
        return backend_of(self.config)

    def point_tree(self, row: Any) -> dict[str, Any]:
        """The design tree of a point, of which the table has every value that differs."""
        tree = {**self.base_tree(), "sites": {}}
        for path, cell in row.items():
            # columns of the table that are parts of a design
            if str(path).partition(".")[0] in ("parallel", "run", "optimizer", "sites") and _is_there(cell):
                set_path(tree, path, plain(cell))
        return tree

    def layout(self, row: Any) -> Layout:
        """The layout of a point."""
        names = {path_of(name): name for name in Layout.__dataclass_fields__}
        return Layout(**{name: plain(row[path]) for path, name in names.items()})

    @property
    def chooses_layouts(self) -> bool:
        """Tell whether layouts were chosen."""
        return bool(get_path(self.config, "layouts.auto"))

    def tree(self, *, serial: bool = False) -> dict[str, Any]:
        """The plan as overrides of a step: its sites, the knobs beside them, and its layout where that was chosen.

        serial: with sites that were searched and have no schedule.
        """
        schedules = {name: text for name, text in self.sites.items() if serial or text != SERIAL}
        plan: dict[str, Any] = {"sites": schedules}
        values = {path: plain(self.best[path]) for path in PATHS} if self.chooses_layouts else {}
        for choice in self._all_choices:
            values |= {} if choice.sites else self._knobs_of(choice)
        for path, value in values.items():
            section, _, name = path.partition(".")
            plan.setdefault(section, {})[name] = value
        return plan

    def _knobs_of(self, choice: Choice) -> dict[str, Any]:
        """Knobs of a choice that was searched, or whose value is not that of the configuration."""
        if choice in self.choices:
            return self.chosen(choice)
        return {path: value for path, value in self.chosen(choice).items() if get_path(self.config, path) != value}


def backend_of(config: Mapping[str, Any]) -> StepBackend:
    """The simulator of a run."""
    backend = plugins.load("backend", str(get_path(config, "simulator.backend") or "step"))()
    assert isinstance(backend, StepBackend)
    return backend


def alone_rows(plan: StepPlan) -> Iterator[tuple[str, float]]:
    """Yield the name and the gain alone of each choice with which something is done."""
    for choice in plan.choices:
        gain = None if plan.is_off(choice) else plan.alone(choice)
        if gain is not None:
            yield choice.name.replace("_", " "), gain


def evaluated(plan: StepPlan, point: Any, values: Mapping[str, Any]) -> Any:
    """A point with other values of its knobs and the metrics that it then has; None where that breaks a rule."""
    row = point.copy()
    for path, value in values.items():
        if path in SITE_PATHS or _is_there(row[path]):  # a knob that counts in this step
            row[path] = value
    # draws of times are kept by key, and this is another point
    row["key"] = f"{point['key']} with {dict(values)}"
    backend, design = plan.backend, plan.design(row)
    if backend.problems(design):
        return None
    (results,) = backend.evaluate([Batch(design)])
    if not results.ok[0]:
        return None
    for name, column in results.metrics.items():
        if name in row:
            row[name] = float(column[0])
    return row


def other_value(plan: StepPlan, choice: Choice) -> Any:
    """The best of the values that were searched of a choice but the plan's, all others as planned; None without any."""
    paths = [path for path in choice.off if path in plan.table]
    rows = [
        evaluated(plan, plan.best, {path: plain(_value(row, path)) for path in paths})
        for _, row in plan.table.drop_duplicates(paths).iterrows()
        if plan.text(choice, row) != plan.text(choice)
    ]
    possible = [
        row for row in rows if row is not None and (MEMORY not in row or float(row[MEMORY]) <= most_memory(plan.config))
    ]
    return min(possible, key=lambda row: float(row[TIME]), default=None)


def plans(table: pd.DataFrame, config: Mapping[str, Any]) -> list[StepPlan]:
    """The plan of each scenario, in its best layout: of points that fit, or of all with a result if none does."""
    of_scenarios = list[StepPlan]()
    if table.empty or TIME not in table:
        return of_scenarios
    names = table["scenario"].astype(str).str.partition(APART)[0]
    for _, rows in table.groupby(names, sort=False):
        finished = rows[rows["status"] == "ok"]
        # none fits: those that broke the limit of memory have times, too
        finished = rows[rows[TIME].notna()] if finished.empty else finished
        if finished.empty:
            continue
        roomy = finished[finished[MEMORY] <= 1] if MEMORY in finished else finished
        finished = roomy if len(roomy) else finished  # what fits surely, where there is any
        scenario = str(least(finished)["scenario"])
        is_its = finished["scenario"].astype(str) == scenario
        of_scenarios.append(StepPlan(scenario, finished[is_its], config, None if is_its.all() else finished[~is_its]))
    return of_scenarios


def least(rows: pd.DataFrame) -> Any:
    """The row with the least time."""
    return rows.sort_values(TIME, kind="stable").iloc[0]


def _off(rows: pd.DataFrame) -> dict[str, Any]:
    """Every knob that differs between some rows -> its value where nothing is done."""
    return {path: value for path, value in OFF.items() if path in rows and rows[path].nunique(dropna=False) > 1}


def _same_as(rows: pd.DataFrame, values: Mapping[str, Any], *, but: Sequence[str] = ()) -> pd.DataFrame:
    """Rows with values at paths, but for some. A site without a schedule is serial."""
    same = np.ones(len(rows), bool)
    for path, value in values.items():
        if path in rows and path not in but:
            absent = SERIAL if path in SITE_PATHS else ""
            names, places = _texts(rows[path], absent)  # each distinct text is compared once
            same &= np.isin(places, [place for place, name in enumerate(names) if name == str(value)])
    return rows[same]


def _texts(cells: pd.Series[Any], absent: str) -> tuple[list[str], Any]:
    """Distinct texts of some cells, and the place of that of each cell."""
    places, values = cells.factorize(use_na_sentinel=False)  # empty cells are a value of their own
    return [str(value) if _is_there(value) else absent for value in values], places


def _was_chosen(table: pd.DataFrame, rows: pd.DataFrame, path: str) -> bool:
    """Tell whether a knob was searched, and has a value in some rows."""
    return path in table and table[path].nunique(dropna=False) > 1 and bool(rows[path].notna().any())


def _value(row: Any, path: str) -> Any:
    """The value of a knob in a point."""
    return SERIAL if path in SITE_PATHS and not _is_there(row[path]) else plain(row[path])


def _as_typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first(rows: pd.DataFrame, values: Mapping[str, Any]) -> pd.DataFrame:
    """The same rows, those with some values first."""
    # number of values that differ
    unlike = sum((rows[path].astype(str) != str(value)).astype(int) for path, value in values.items())
    return rows if isinstance(unlike, int) else rows.iloc[np.argsort(unlike.to_numpy(), kind="stable")]


def _is_there(cell: Any) -> bool:
    """Tell whether a knob counts in a point: its cell is not empty."""
    import pandas as pd

    return not pd.isna(cell)


def plain(value: Any) -> Any:
    """A cell of a table as a value of a configuration."""
    if str(value) in ("True", "False"):  # a column with empty cells holds texts
        return str(value) == "True"
    number = value.item() if hasattr(value, "item") else value
    # a column with empty cells holds floats
    return int(number) if isinstance(number, float) and number.is_integer() else number
