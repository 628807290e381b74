"""A schedule for every collective of tensor parallelism in a step: what each gains, alone and together, and how to get
it today.

Points are steps whose sites (`simulators.steps.sites`) have schedules. The plan of a scenario is its best point;
`before` is the step as it was typed, with every site serial. `plan.yaml` holds the plan as overrides of later runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.config.options import conf_dir
from dse.config.yaml_checks import load_yaml, unreadable
from dse.errors import ConfigError, Problem
from dse.plots import Axis, Draw, Frame, Sheet, tables, timelines
from dse.results.finished_run import Finished
from dse.results.run_folder import Outputs
from dse.results.words import AS_FAST, cell, gain_in_words
from dse.space import get_path, set_path
from dse.values import put
from simulators.steps.backend import StepBackend, iteration, metrics_of
from simulators.steps.design import Design
from simulators.steps.iteration import Iteration
from simulators.steps.sites import SERIAL, SITES, read_schedule
from simulators.steps.task_graph import intervals
from simulators.workloads.model_zoo import model_tree
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_SITES = "sites."
_WORDS = {
    "parallel.sequence_parallel": "tokens split",
    "parallel.collectives": "sums in the switch",
    "parallel.split_ctas": "halves of prompts",
    "parallel.exchanges": "exchanges of experts beside other work",
}
_OFF: Mapping[str, Any] = {
    "parallel.sequence_parallel": False,
    "parallel.collectives": "library",
    "parallel.split_ctas": 0,
    "parallel.exchanges": "waited",
}
"""Knob of the step beside its sites -> its value where nothing is done."""
_TIME, _MEMORY = "iteration_s", "memory_share"
_TO_FIT: Sequence[Mapping[str, Any]] = (
    {"run.recompute": "all"},
    *({"parallel.pp": stages} for stages in (2, 4, 8, 16)),
    *({"parallel.pp": stages, "run.recompute": "all"} for stages in (2, 4, 8, 16)),
    {"run.batch": 1},
)
"""What is tried to make a step fit, the least first."""
_TIE = 0.02  # of the step: what is closer than this is within what the constants are known to
_AROUND = 1  # layer whose tasks are drawn


@dataclass(frozen=True)
class Plan:
    """The plan of one scenario. table: its points with a result. config: of the run."""

    scenario: str
    table: pd.DataFrame
    config: Mapping[str, Any]

    @cached_property
    def best(self) -> Any:
        """The point with the least time."""
        return _least(self.table)

    @cached_property
    def before(self) -> Any:
        """The step with every site serial and nothing else done."""
        rows = self._with(self.table, _OFF)
        return _least(rows) if len(rows) else self.table.iloc[0]

    @property
    def knobs(self) -> list[str]:
        """Knobs beside the sites that were searched."""
        return [path for path in _OFF if path in self.table and self.table[path].nunique() > 1]

    @property
    def beside_sites(self) -> str:
        """What the plan does beside the schedules of sites, in words."""
        return ", ".join(_WORDS[path] for path in self.knobs if not _same_value(self.best[path], _OFF[path]))

    @cached_property
    def sites(self) -> dict[str, str]:
        """Schedule of each site of the best point, of those that were searched."""
        rows = self.table
        for path in self.knobs:
            rows = rows[_same(rows[path], self.best[path])]
        columns = {name: f"{_SITES}{name}" for name in SITES if f"{_SITES}{name}" in rows}
        pairs = {name: self.best[path] for name, path in columns.items() if rows[path].notna().any()}
        return {name: str(text) if isinstance(text, str) else SERIAL for name, text in pairs.items()}

    @property
    def gain(self) -> float:
        """Time before over time of the plan."""
        return float(self.before[_TIME] / self.best[_TIME])

    def alone(self, name: str) -> float | None:
        """Time with all sites serial over that with the plan's schedule at one site; None if it was not evaluated."""
        one, serial = (self._with(self.table, sites) for sites in ({f"{_SITES}{name}": self.sites[name]}, {}))
        for _, row in one.iterrows():
            same = self._with(serial, {path: row[path] for path in self.knobs})
            if len(same):
                return float(same[_TIME].iloc[0] / row[_TIME])
        return None

    def runner_up(self, name: str) -> tuple[str, float] | None:
        """The next best schedule of one site beside the plan's others, and the time that it costs as a share."""
        column = self.table[f"{_SITES}{name}"].fillna(SERIAL)
        rows = self.table[column != self.sites[name]]
        others = {f"{_SITES}{site}": text for site, text in self.sites.items() if site != name}
        rows = self._with(rows, {**{path: self.best[path] for path in self.knobs}, **others}, but=name)
        if rows.empty:
            return None
        row = _least(rows)
        text = row[f"{_SITES}{name}"]
        return text if isinstance(text, str) else SERIAL, float(row[_TIME] / self.best[_TIME] - 1)

    def _around(self, sites: Mapping[str, str]) -> pd.DataFrame:
        """Points with the plan's knobs and with schedules at some sites, the others serial."""
        paths = {f"{_SITES}{name}": sites.get(name, SERIAL) for name in self.sites}
        return self._with(self.table, {**{path: self.best[path] for path in self.knobs}, **paths})

    @staticmethod
    def _with(rows: pd.DataFrame, values: Mapping[str, Any], *, but: str = "") -> pd.DataFrame:
        """Rows with values at paths; sites that have none there are serial, but for one."""
        for name in SITES:
            path = f"{_SITES}{name}"
            if path in rows and name != but:
                rows = rows[_same(rows[path].fillna(SERIAL), values.get(path, SERIAL))]
        for path, value in values.items():
            if path in rows and not path.startswith(_SITES):
                rows = rows[_same(rows[path], value)]
        return rows

    def step(self, row: Any) -> Iteration:
        """The iteration of a point."""
        return iteration(self.design(row))

    def design(self, row: Any) -> Design:
        """The design of a point."""
        tree = {name: value for name, value in self.config.items() if name in _SECTIONS}
        if self.config.get("models"):
            tree["model"] = model_tree(self.scenario.partition(" ")[0])
        tree = {**tree, "parallel": dict(tree["parallel"]), "sites": {}}
        for path in self.knobs:
            set_path(tree, path, _plain(row[path]))
        for name in SITES:
            if isinstance(text := row.get(f"{_SITES}{name}"), str):
                set_path(tree, f"{_SITES}{name}", text)
        return StepBackend().design(tree)

    def tree(self) -> dict[str, Any]:
        """The plan as overrides of a step: its sites, and the knobs beside them."""
        plan: dict[str, Any] = {"sites": {name: text for name, text in self.sites.items() if text != SERIAL}}
        for path in self.knobs:
            section, _, name = path.partition(".")
            plan.setdefault(section, {})[name] = _plain(self.best[path])
        return plan


_SECTIONS = (
    *("system", "model", "run", "parallel", "optimizer", "kernels", "lengths", "iterations"),
    *("quantised", "format", "instructions"),
)


def _least(rows: pd.DataFrame) -> Any:
    """The row with the least time."""
    return rows.sort_values(_TIME, kind="stable").iloc[0]


def _same(column: Any, value: Any) -> Any:
    return column.astype(str) == str(value)


def _same_value(cell_value: Any, value: Any) -> bool:
    return str(_plain(cell_value)) == str(value)


def _plain(value: Any) -> Any:
    """A cell of a table as a value of a configuration."""
    if str(value) in ("True", "False"):
        return str(value) == "True"
    number = value.item() if hasattr(value, "item") else value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def plans(table: pd.DataFrame, config: Mapping[str, Any]) -> list[Plan]:
    """The plan of each scenario that has a point with a result."""
    ok = table[table["status"] == "ok"]
    return [Plan(str(name), rows, config) for name, rows in ok.groupby("scenario", sort=False) if len(rows)]


class PlanStudy(Plain):
    """The answer, `plan.yaml`, what to set today, and figures."""

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield, for each scenario, the step before and after, and a row for each site."""
        for plan in plans(table, outputs.read_config()):
            yield _before_and_after(plan)
            if float(plan.best[_MEMORY]) > 1:
                yield _what_fits(plan)
            if plan.sites:
                yield _sites_table(plan)
            yield from ways_today(plan)

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """The gain of each site, alone and together."""
        rows = _gains(table)
        if len(rows):
            yield "gains", partial(_gains_figure, rows)

    def extras(self, run: Finished) -> Iterator[tuple[str, Any]]:
        """`plan.yaml`, and one layer before and after."""
        found = plans(run.outputs.read_table("results"), run.config)
        trees = {plan.scenario: plan.tree() for plan in found}
        if trees:
            yield "plan.yaml", next(iter(trees.values())) if len(trees) == 1 else trees
        for plan in found[:1]:
            if plan.best.get("parallel.exchanges") != "two_micro_batches":  # whose layers are of two
                yield "layer", partial(_layer_figure, plan)


def _before_and_after(plan: Plan) -> str:
    before, best = plan.before, plan.best
    memory = f", {100 * best['memory_share']:.0f} % of the memory" if "memory_share" in best else ""
    rate = f" ({before['tokens_per_s']:,.0f} to {best['tokens_per_s']:,.0f} tokens/s)" if "tokens_per_s" in best else ""
    knobs = ", ".join(f"{path}={_plain(best[path])}" for path in plan.knobs)
    how = f"; with {knobs}" if knobs else ""
    times = f"{cell(before[_TIME], 's')} to {cell(best[_TIME], 's')} a step"
    return f"{plan.scenario}: {times}, {gain_in_words(plan.gain)}{rate}{memory}{how}"


def _what_fits(plan: Plan) -> str:
    """That a step does not fit, and the first change that makes it fit: its memory alone, whatever it takes."""
    design, training = plan.design(plan.best), get_path(plan.config, "run.mode") == "training"
    text = f"does not fit: it takes {float(plan.best[_MEMORY]):.2f} times the memory of a GPU"
    for changes in _TO_FIT:
        if training or "run.recompute" not in changes:
            changed = design
            for path, value in changes.items():
                changed = put(changed, path, value)
            if float(metrics_of(changed)[_MEMORY]) <= 1:
                return f"{text}; {' '.join(f'{path}={value}' for path, value in changes.items())} would fit"
    return f"{text}; a smaller model, or more GPUs, would"


def _sites_table(plan: Plan) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name, justify in _COLUMNS:
        shown.add_column(name, justify=justify)  # type: ignore[arg-type]
    exposed = _exposed(plan.step(plan.best)), _exposed(plan.step(plan.before))
    for name, text in plan.sites.items():
        alone, second = plan.alone(name), plan.runner_up(name)
        after, before = exposed[0].get(name, 0.0), exposed[1].get(name)
        next_best = "" if second is None else f"{second[0]}, {_later(second[1])}"
        limit = "links" if after > 0.1 * (before or 0.0) and after > 0 else "compute"
        times = cell(after, "s") if before is None else f"{cell(before, 's')} → {cell(after, 's')}"
        gains = "–" if alone is None else gain_in_words(alone)
        shown.add_row(name, text, gains, times, limit, next_best)
    return shown


_COLUMNS = (
    ("site", "left"),
    ("schedule", "left"),
    ("alone", "right"),
    ("exposed in a step", "right"),
    ("limited by", "left"),
    ("next best", "left"),
)


def _later(share: float) -> str:
    return f"a tie ({100 * share:.1f} %)" if share < _TIE else f"{100 * share:.1f} % slower"


def _exposed(step: Iteration) -> dict[str, float]:
    """Exposed time of the collective of each site in a step [s]."""
    exposed: dict[str, float] = {}
    for part in step.parts:
        plain = part.op.name.removesuffix(" again")
        for name, site in SITES.items():
            if plain in site.collectives:
                seconds = float(step.micro_batches * part.seconds)
                exposed[name] = exposed.get(name, 0.0) + seconds
    return exposed


def ways_today(plan: Plan) -> list[str]:
    """Lines on what comes nearest to a plan today, and on what needs a kernel or hardware that does not exist."""
    families = {read_schedule(text).family for text in plan.sites.values() if text != SERIAL}
    knobs = {path for path in plan.knobs if not _same_value(plan.best[path], _OFF[path])}
    knobs |= {"gradients"} if int(get_path(plan.config, "parallel.dp") or 1) > 1 else set()
    lines = []
    for entry in load_yaml(conf_dir() / "data" / "frameworks.yaml")["frameworks"]:
        if entry.get("knob") not in knobs and not families.intersection(entry.get("families", ())):
            continue
        if not _is_of(entry, plan):
            continue
        if "hardware" in entry:
            lines.append(f"today: {', '.join(entry['families'])} needs {entry['hardware']}")
        for way in entry.get("ways", ()):
            unverified = " (from memory, unverified)" if way["provenance"] == "memory" else ""
            lines.append(f"today: {way['in']}: {way['say']}{unverified}")
    return lines


def _is_of(entry: Mapping[str, Any], plan: Plan) -> bool:
    """Tell whether an entry is of the value that a plan chose, and of its mode, where it names them."""
    mode = get_path(plan.config, "run.mode")
    chosen = None if "value" not in entry else plan.best[entry["knob"]]
    return entry.get("value") == chosen and mode in entry.get("modes", [mode])


def _gains(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each choice of a plan alone, and for all of them: the time before over the time with it."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for plan in plans(table, {}):
        gains = {name.replace("_", " "): plan.alone(name) for name, text in plan.sites.items() if text != SERIAL}
        serial = plan._around({})
        if len(serial) and serial[_TIME].iloc[0] != plan.before[_TIME]:
            gains = {plan.beside_sites: float(plan.before[_TIME] / serial[_TIME].iloc[0]), **gains}
        gains["all together"] = plan.gain
        rows += [{"scenario": plan.scenario, "choice": name, "gain": gain} for name, gain in gains.items() if gain]
    return pd.DataFrame(rows)


def _gains_figure(rows: pd.DataFrame) -> Sheet:
    together = rows[rows["choice"] == "all together"]
    most = together.sort_values("gain").iloc[-1]
    gain = gain_in_words(most["gain"])
    title = f"With the plan a step of {most['scenario']} is {gain}" + (" as before" if gain == AS_FAST else "")
    axis = Axis("gain", "time before / time [x]", centre=1.0)
    return tables.dots(
        rows, axis, row="choice", by="scenario", frame=Frame(title, "each choice alone, and all together")
    )


def _layer_figure(plan: Plan) -> Sheet:
    """One layer of the forward pass, serial and as planned."""
    import pandas as pd

    both = {"serial": plan.before, "planned": plan.best}
    frames = [_layer(plan.step(row)).assign(panel=name) for name, row in both.items()]
    spans = [frame["finish_s"].max() for frame in frames]
    title = (
        f"A layer of {plan.scenario} takes {cell(spans[0], 's')} with serial sites, {cell(spans[1], 's')} as planned"
    )
    return timelines.timeline(pd.concat(frames), title, panel="panel")


def _layer(step: Iteration) -> pd.DataFrame:
    """Tasks of one layer, from its start on, with one lane for all links."""
    import pandas as pd

    rows = [vars(task) for task in intervals(step) if task.name.startswith(f"layer {_AROUND}: ")]
    forward = pd.DataFrame([row for row in rows if not _is_backward(row["name"])])
    start = forward["start_s"].min()
    lanes = forward["lane"].where(forward["lane"] == "compute", "links")
    return forward.assign(lane=lanes, start_s=forward["start_s"] - start, finish_s=forward["finish_s"] - start)


def _is_backward(name: str) -> bool:
    return any(mark in name for mark in (" dX", " dW", " dA", " dB", " backward", " again", "gradients"))


def command(words: Sequence[str]) -> int:
    """`plan [plan=<file>] [overrides of study=plan]`: search, and print the plan."""
    from dse.config.compose import request
    from dse.config.flags import overrides, own_folder
    from dse.run_study import run

    typed = [text for word in words for text in (_kept(word) if word.startswith("plan=") else [word])]
    return run(request(overrides(["study=plan", *typed]), own_folder(typed)))


def _kept(word: str) -> list[str]:
    """Overrides that keep the choices of a `plan.yaml`. Raises ConfigError."""
    file = Path(word.partition("=")[2])
    problems = unreadable(file)
    tree = None if problems else load_yaml(file)
    if not isinstance(tree, Mapping):
        way = "name the plan.yaml of an earlier run, or leave it out"
        raise ConfigError(problems or [Problem("plan", "holds no plan", str(file), way)])
    return [f"{path}='{value}'" if isinstance(value, str) else f"{path}={value}" for path, value in _leaves(tree)]


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


STUDY = PlanStudy()
