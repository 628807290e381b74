"""The judgement of a plan that was given: its own time first, then what it is compared with, and what loses most.

Points are scenarios of `simulators.steps.plan.given_plan`: the step as given, with nothing overlapped, with what tools
do by themselves, and without each choice. A choice loses what the step without it is faster by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, FigureSheet, Frame, tables
from dse.results.answer import fastest_in_words
from dse.results.decisions import Decision, Drawing, gain_text, interval
from dse.results.words import AS_FAST, cell, gain_in_words
from dse.space import get_path
from simulators.steps.overlap.sites import SERIAL, SITES
from simulators.steps.plan.drawn_errors import StepInterval
from simulators.steps.plan.given_plan import AS_GIVEN, AS_SERIAL, BY_DEFAULT, WITHOUT, GivenPlan, choices_at
from simulators.steps.plan.scenarios import APART
from simulators.steps.plan.scenarios import GIVEN as SECTION
from simulators.steps.run.build import iteration
from simulators.steps.run.iteration import Iteration
from studies.plan.plan_file import put_in
from studies.plan.stacks import software_line, tool_facts
from studies.plan.step_plan import MEMORY, TIME, backend_of, rates_of_a_gpu
from studies.plan.texts import seconds_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse.study.plan import Plan


_SITES = "sites."


@dataclass(frozen=True)
class PlanJudgement:
    """A given plan of one scenario. rows: variant -> its point. config: of the run. decision: by drawn errors."""

    name: str
    rows: Mapping[str, Any]
    config: Mapping[str, Any]
    decision: Mapping[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> Any:
        """The point with the plan as it is."""
        return self.rows[AS_GIVEN]

    @property
    def fits(self) -> bool:
        """Tell whether the plan as it is is within the memory."""
        most = float(get_path(self.config, "study.limits.memory_share.high") or 1.0)
        return MEMORY not in self.point or float(self.point[MEMORY]) <= most

    @property
    def serial(self) -> Any:
        """The point with nothing overlapped; None where rules forbid it."""
        return self.rows.get(AS_SERIAL)

    @cached_property
    def losses(self) -> dict[str, float]:
        """Choice of the plan -> time that the step loses by it [s], negative where it gains; what loses most first."""
        seconds = float(self.point[TIME])
        less = {name.removeprefix(WITHOUT): row for name, row in self.rows.items() if name.startswith(WITHOUT)}
        losses = {name: seconds - float(row[TIME]) for name, row in less.items()}
        return dict(sorted(losses.items(), key=lambda item: -item[1]))

    @cached_property
    def trees(self) -> Mapping[str, Mapping[str, Any]]:
        """Variant -> the tree of its design."""
        trees = backend_of(self.config).scenarios(composed_design(self.config))
        return {
            variant: tree
            # names of models may hold the mark, too
            for name, _, variant, tree in ((*name.rpartition(APART), tree) for name, tree in trees.items())
            if name == self.name
        }

    def gain(self, variant: str) -> str:
        """How much faster or slower the plan is than a variant, in words, with its interval."""
        low, high = self.decision.get("ranges", {}).get(variant, (None, None))
        return gain_text(float(self.rows[variant][TIME] / self.point[TIME]), low, high)

    def step(self, variant: str) -> Iteration:
        """The iteration of a variant."""
        backend = backend_of(self.config)
        return iteration(backend.as_run(backend.design(self.trees[variant])))

    def choice(self, name: str) -> str:
        """Values that the plan has of a choice."""
        values = {path: get_path(self.trees[AS_GIVEN], path) for path in self._knobs(name)}
        if self.sites(name):  # their schedules, most often one for all
            return " and ".join(dict.fromkeys(str(value) for value in values.values() if value is not None))
        return " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in values.items())

    def sites(self, name: str) -> list[str]:
        """Sites of a choice; none where it is of other knobs."""
        return [path.removeprefix(_SITES) for path in self._knobs(name) if path.startswith(_SITES)]

    def _knobs(self, name: str) -> Mapping[str, Any]:
        return choices_at(self.trees[AS_GIVEN])[name]


def is_judged(table: pd.DataFrame) -> bool:
    """Tell whether the points of a table judge a plan that was given."""
    return bool(table["scenario"].astype(str).str.endswith(f"{APART}{AS_GIVEN}").any())


def judgements(
    table: pd.DataFrame, config: Mapping[str, Any], decisions: Mapping[str, Any] | None = None
) -> list[PlanJudgement]:
    """The judgement of each scenario whose plan has a result, whether it fits or not. decisions: of `summary.json`."""
    by_name: dict[str, dict[str, Any]] = {}
    for _, row in table[table[TIME].notna()].iterrows():
        name, _, variant = str(row["scenario"]).rpartition(APART)
        by_name.setdefault(name, {}).setdefault(variant, row)
    known = decisions or {}
    return [
        PlanJudgement(name, rows, config, known.get(str(rows[AS_GIVEN]["key"]), {}))
        for name, rows in by_name.items()
        if AS_GIVEN in rows
    ]


def decide_given(judged: Sequence[PlanJudgement], planned: Plan) -> dict[str, Any]:
    """Decisions of `summary.json` on given plans by their keys: against serial execution, tools, and less of the plan.

    ranges: 90 % intervals of the time of each variant over that of the plan, all with the same errors.
    """
    settings, decided = planned.settings, dict[str, Any]()
    assert isinstance(planned.backend, Drawing)
    for plan in (plan for plan in judged if plan.fits):
        designs = {variant: backend_of(plan.config).design(plan.trees[variant]) for variant in plan.rows}
        drawn, basis = planned.backend.draw(list(designs.values()), samples=settings.decide.samples, seed=settings.seed)
        times = dict(zip(designs, drawn, strict=True))
        others = [variant for variant in times if variant not in (AS_GIVEN, AS_SERIAL)]
        decision = Decision.of(
            np.stack([times[AS_GIVEN], *(times[variant] for variant in others)]),
            times.get(AS_SERIAL),
            least=settings.decide.least,
            rivals=[_title(variant) for variant in others],
            basis=basis,
        )
        own = float(plan.point[TIME])
        if plan.serial is not None:
            decision = decision.holding(float(plan.serial[TIME]) / own)
        ends = {
            variant: list(interval(drawn / times[AS_GIVEN], float(plan.rows[variant][TIME]) / own))
            for variant, drawn in times.items()
        }
        taken = StepInterval.of(designs[AS_GIVEN], own, times[AS_GIVEN])
        entry = {"ranges": ends, "seconds": [taken.low, taken.high], "seconds_by": taken.basis}
        decided[str(plan.point["key"])] = {**decision.json(), **entry}
    return decided


def answer(plan: PlanJudgement) -> Iterator[Table | str]:
    """Yield the time of the plan as it is, what it is compared with, a row for each choice, and what loses most."""
    yield from _left_out(plan)
    yield headline(plan)
    yield from filter(None, [software_line(plan.config)])
    yield _comparison(plan)
    if plan.losses:
        yield _choices(plan)
        yield loses_most(plan)
    if plan.decision:
        decision = Decision.read(plan.decision)
        taken = seconds_text(plan.decision)
        yield f"probability that nothing of these is faster: {fastest_in_words(decision)}{taken}"
        if decision.advice:
            yield decision.advice


def _left_out(plan: PlanJudgement) -> Iterator[str]:
    """Yield which sites of the file this step does not have."""
    section = GivenPlan.model_validate(plan.config[SECTION])
    schedules = ((path, text) for path, text in section.plan.items() if path.startswith("sites.") and text != SERIAL)
    absent = [f"{path} = {text}" for path, text in schedules if get_path(plan.trees[AS_GIVEN], path) == SERIAL]
    if absent:
        yield f"left out, as this step has no such site: {', '.join(absent)}"


def headline(plan: PlanJudgement) -> str:
    """What the step takes with the plan as it is, against serial execution."""
    point, file = plan.point, plan.config[SECTION].get("file", "")
    memory = f", {100 * point[MEMORY]:.0f} % of the memory" if MEMORY in point else ""
    rate = f" ({point['tokens_per_s']:,.0f} tokens/s)" if "tokens_per_s" in point else ""
    against = f", {_against(plan, AS_SERIAL)}" if plan.serial is not None else ""
    rates = f"{memory}{rates_of_a_gpu(point, plan.trees[AS_GIVEN])}"
    return f"{plan.name}, as {file} has it: {cell(point[TIME], 's')} a step{rate}{against}{rates}"


def _against(plan: PlanJudgement, variant: str) -> str:
    """Say how much faster or slower the plan is than a variant."""
    gain, name = gain_in_words(float(plan.rows[variant][TIME] / plan.point[TIME])), _title(variant)
    return f"{gain} {'as' if gain == AS_FAST else 'than'} {name}"


def _title(variant: str) -> str:
    """A variant in words: a tool by its title."""
    if variant == AS_SERIAL:
        return "serial execution"
    name = variant.removeprefix(BY_DEFAULT)
    return (
        f"{BY_DEFAULT}{tool_facts()[name].name}" if variant.startswith(BY_DEFAULT) and name in tool_facts() else variant
    )


def _comparison(plan: PlanJudgement) -> Table:
    """A row for the plan, and for each step that it is compared with; tools that take as long share one."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name in ("step", "takes", "the plan is"):
        shown.add_column(name, justify="left" if name == "step" else "right")
    alike: dict[float, list[str]] = {}
    for variant, row in plan.rows.items():
        if variant.startswith(BY_DEFAULT):
            alike.setdefault(float(row[TIME]), []).append(variant)
        elif not variant.startswith(WITHOUT):
            shown.add_row(_title(variant), cell(row[TIME], "s"), "" if variant == AS_GIVEN else plan.gain(variant))
    for seconds, variants in alike.items():
        names = ", ".join(_title(variant).removeprefix(BY_DEFAULT) for variant in variants)
        shown.add_row(f"{BY_DEFAULT}{names}", cell(seconds, "s"), plan.gain(variants[0]))
    return shown


def _choices(plan: PlanJudgement) -> Table:
    """A row for each choice of the plan, those that lose most first; of a site, its GEMM and collective in a step."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    headings = ("choice", "given", "site takes", "serial", "without it a step takes", "it makes the step")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for name in plan.losses:
        less, sites = f"{WITHOUT}{name}", plan.sites(name)
        # the step is the same but for the choice, so that both times are of one site
        steps = [plan.step(variant) for variant in (AS_GIVEN, less)] if sites else []
        times = [cell(sum(site_seconds(step, site) for site in sites), "s") for step in steps] or ["", ""]
        shown.add_row(name, plan.choice(name), *times, cell(plan.rows[less][TIME], "s"), plan.gain(less))
    return shown


def loses_most(plan: PlanJudgement) -> str:
    """Say which site of a plan loses most, and which other choice loses more than it."""
    losing = [name for name, lost in plan.losses.items() if lost > 0]
    if not losing:
        return "nothing of it loses: without any choice the step takes as long, or longer"
    site = next((name for name in losing if plan.sites(name)), None)
    texts = [f"loses most: {_loss(plan, losing[0])}"] if losing[0] != site else []
    texts += [] if site is None else [f"site that loses most: {_loss(plan, site)}"]
    return "; ".join(texts)


def _loss(plan: PlanJudgement, name: str) -> str:
    without, lost = cell(plan.rows[f"{WITHOUT}{name}"][TIME], "s"), cell(plan.losses[name], "s")
    return f"{name} ({plan.choice(name)}), without which a step takes {without}, {lost} less"


def given_plan(config: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of a run that judged one, as it was given."""
    section = GivenPlan.model_validate(config[SECTION])
    tree: dict[str, Any] = {"tool": section.tool} if section.tool else {}
    for path, value in section.plan.items():
        put_in(tree, path, value)
    return tree


def times(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each variant: its time over that of the plan as given, with its range."""
    import pandas as pd

    rows = list[dict[str, Any]]()
    for plan in judgements(table, {}, table.attrs.get("decisions")):
        ranges = plan.decision.get("ranges", {})
        for variant, row in plan.rows.items():
            low, high = ranges.get(variant, (np.nan, np.nan))
            entry = {"scenario": plan.name, "step": _title(variant), "share": float(row[TIME] / plan.point[TIME])}
            rows.append({**entry, "range_low": low, "range_high": high})
    return pd.DataFrame(rows)


def times_figure(table: pd.DataFrame) -> FigureSheet:
    """Times of all variants over that of the plan as given."""
    plans, rows = judgements(table, {}, table.attrs.get("decisions")), times(table)
    # the plan that loses most, as a share of its step
    first = max(plans, key=lambda plan: next(iter(plan.losses.values()), 0.0) / float(plan.point[TIME]))
    against = f"The given plan of {first.name}" + (
        f" is {_against(first, AS_SERIAL)}" if first.serial is not None else ""
    )
    worst = next((name for name, lost in first.losses.items() if lost > 0), "")
    title = f"{against}; {worst} loses most" if worst else against
    axis = Axis("share", "time / time of the plan as given [x]", centre=1.0)
    frame = Frame(title, "what the plan is compared with; lines: 90 % intervals")
    return tables.dots(rows, axis, row="step", by="scenario", frame=frame)


def composed_design(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a composed configuration that a step is made of."""
    from dse.study.settings import SECTIONS

    return {name: section for name, section in tree.items() if name not in SECTIONS}


def site_seconds(step: Iteration, name: str) -> float:
    """Time of the GEMM of a site with its collective, and of the GEMM beside it, in a step [s]."""
    site = SITES[name]
    names = {site.gemm, *site.collectives, *([site.beside] if site.beside else [])}
    parts = [part for part in step.passes.parts if part.op.name.removesuffix(" again") in names]  # recomputed, too
    return float(sum(step.passes.micro_batches * part.seconds for part in parts))
