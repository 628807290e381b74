"""A plan of a step: a schedule for every collective, and perhaps degrees of parallelism: what each choice gains, alone
and together, where it flips, and how to get it today. A plan that is given is judged as it is (`studies.plan.judged`).

Points are steps whose sites (`simulators.steps.sites`) have schedules. The plan of a scenario is its best point that
fits the memory; `before` is the step with every site serial and nothing else done. With `parallel=auto` the best
layouts (`simulators.steps.layouts`) are scenarios, of which the plan is the best. `plan.yaml` holds the plan.
A step that fits in no point is no plan: the answer is by how much, and what fits (`studies.plan.fitting`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import ConfigError, Problem, Problems
from dse.plots import Axis, Draw, FigureSheet, Frame, tables, timelines
from dse.results.answer import fastest_in_words
from dse.results.decisions import Decision, gain_text
from dse.results.run_folder import CommandAnswer, FinishedRun, Outputs
from dse.results.words import AS_FAST, cell, gain_in_words
from dse.space import get_path
from simulators.steps.backend import StepBackend
from simulators.steps.choices import OFF
from simulators.steps.given import AS_GIVEN
from simulators.steps.ideal import ideal_seconds
from simulators.steps.implementations import implementation
from simulators.steps.iteration import Iteration
from simulators.steps.layouts import Layout, LayoutQuestion, LayoutSection, usual
from simulators.steps.sites import SERIAL, place_of, read_schedule
from simulators.steps.task_graph import intervals
from studies.plain import Plain
from studies.plan.certainty import as_decided, decide
from studies.plan.fitting import does_not_fit
from studies.plan.flips import Uncertain
from studies.plan.judged import answer as judgement
from studies.plan.judged import decide_given, given_plan, is_judged, judgements, times_figure
from studies.plan.plan_file import all_leaves, check_plan, over_step, read_plan, step_of_run
from studies.plan.stacks import measured_line, named, software_line, stack_words, tool_facts, ways
from studies.plan.step_plan import MEMORY, SITE_PATHS, TIME, StepPlan, alone_rows, plans, rates_of_a_gpu
from studies.plan.stored_weights import stored_line
from studies.plan.texts import next_best, next_best_text, work_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse.study.plan import Plan

_TIE = 0.02  # of the step: what is closer than this is within what the constants are known to
_AROUND = 1  # layer whose tasks are drawn


class PlanStudy(Plain):
    """The answer, `plan.yaml`, what to set today, and figures."""

    def decisions(self, table: pd.DataFrame, planned: Plan) -> dict[str, Any]:
        """Decide on each plan by drawn errors, also on one that is given."""
        tree = planned.request.tree
        if is_judged(table):
            return decide_given(judgements(table, tree), planned)
        return decide(plans(table, tree), planned)

    def answer(self, outputs: Outputs, table: pd.DataFrame) -> Iterator[Table | str]:
        """Yield, for each scenario, the step before and after, and a row for each choice."""
        config, decisions = outputs.read_config(), outputs.read_json("summary").get("decisions")
        if is_judged(table):
            for judged in judgements(table, config, decisions):
                yield from judgement(judged) if judged.fits else does_not_fit(judged.name, judged.trees[AS_GIVEN])
            return
        for plan in as_decided(plans(table, config), decisions):
            if not plan.fits:
                yield from does_not_fit(plan.name, plan.point_tree(plan.leanest))
                continue
            yield _before_and_after(plan)
            if plan.before is not plan.serial:
                yield _nothing_overlapped(plan)
            yield from filter(None, [software_line(plan.config)])
            if published := measured_line(plan.point_tree(plan.best)):
                yield published
            yield from _how_sure(plan)
            yield stored_line(plan.design(plan.best), plan.best)
            if plan.choices:
                yield _choices_table(plan)
                yield "alone: against a step with nothing overlapped but what the choice needs"
            if _is_of_software(plan):
                yield from _costs_of_software(plan)
                yield _ideal_line(plan)
            yield from _other_layouts(plan)
            yield from ways_today(plan)

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """The gain of each site, alone and together; of a given plan, its time beside what it is compared with."""
        if is_judged(table):
            if judgements(table, {}):
                yield "judged", partial(times_figure, table)
            return
        rows = _gains(table)
        if len(rows):
            yield "gains", partial(_gains_figure, rows)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """`plan.yaml`, and one layer before and after."""
        table, step = run.outputs.read_table("results"), {"step": step_of_run(run.provenance)}
        if is_judged(table):
            yield "plan.yaml", {**given_plan(run.config), **step}
            return
        decided = as_decided(plans(table, run.config), run.outputs.read_json("summary").get("decisions"))
        of_scenarios = [plan for plan in decided if plan.fits]
        trees = {plan.name: plan.tree() for plan in of_scenarios}
        if trees:
            yield "plan.yaml", {**next(iter(trees.values())), **step} if len(trees) == 1 else trees
        for plan in of_scenarios[:1]:
            if plan.best.get("parallel.exchanges") != "two_micro_batches":  # whose layers are of two
                before, after = (_layer(plan.step(row)) for row in (plan.serial, plan.best))
                if not before.equals(after):  # else there is nothing to see
                    yield "layer", partial(_layer_figure, plan.name, (before, after))


def _is_of_software(plan: StepPlan) -> bool:
    """Tell whether schedules of sites that were searched are those of software."""
    texts = {str(text) for path in SITE_PATHS if path in plan.table for text in plan.table[path].dropna()}
    return any(implementation(text.partition(" ")[0]) for text in texts)


def _costs_of_software(plan: StepPlan) -> Iterator[str]:
    """Yield what each chosen software adds to what the hardware takes, and where these numbers are from."""
    yield from filter(None, dict.fromkeys(_costs_at(site, text) for site, text in plan.sites.items()))


def _costs_at(site: str, text: str) -> str:
    software = implementation(text.partition(" ")[0])
    if software is None:
        return ""
    costs = [f"{knob} {value} ({kind})" for knob, value, kind in software.constants(place_of(software, site))]
    return f"{software.name} costs: {', '.join(costs) or 'nothing more'} (conf/implementation)"


def _ideal_line(plan: StepPlan) -> str:
    """A line on the time of the step with ideal schedules."""
    seconds, now = ideal_seconds(plan.point_tree(plan.best)), float(plan.best[TIME])
    if seconds >= now:
        return "with ideal schedules, limited by the hardware alone, the step is no faster"
    gain = gain_in_words(now / seconds)
    return f"with ideal schedules, limited by the hardware alone: {cell(seconds, 's')}, {gain} (candidates=ideal)"


def _before_and_after(plan: StepPlan) -> str:
    before, best = plan.before, plan.best
    memory = f", {100 * best[MEMORY]:.0f} % of the memory" if MEMORY in best else ""
    rates = [f"{row['tokens_per_s']:,.0f}" for row in (before, best) if "tokens_per_s" in best]
    rate = f" ({_change(*rates)} tokens/s)" if rates else ""
    times = f"{_change(*(cell(row[TIME], 's') for row in (before, best)))} a step"
    gain = gain_text(plan.gain, plan.decision.get("low"), plan.decision.get("high"))
    gain += " as before" if gain == AS_FAST else ""
    return f"{plan.name}: {work_text(plan)}, {times}, {gain}{rate}{memory}{rates_of_a_gpu(best)}{_in_layouts(plan)}"


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} to {after}"


def _how_sure(plan: StepPlan) -> Iterator[str]:
    """Yield how probable it is that a plan is the fastest, and what was left off as within the noise."""
    if not plan.decision:
        return
    decision = Decision.read(plan.decision)
    guesses = [kind for kind, basis in decision.basis.items() if basis == "a guess"]
    guessed = f" (errors of {' and '.join(guesses)} are a guess)" if guesses else ""
    left = plan.decision.get("left_off")
    other = "setting but those left off" if left else "other setting"
    yield f"probability that no {other} is faster: {fastest_in_words(decision)}{guessed}"
    if decision.advice:
        changed = decision.spans_one and plan.gain != 1
        software = "nothing overlapped" if plan.before is plan.serial else f"{named(plan.config)} as it comes"
        yield f"the gain over {software} is {decision.advice}" if changed else decision.advice
        system = plan.config["system"]
        if measure := decision.measurement(str(system["name"]), int(system["node"]["num_gpus"])):
            yield measure
    if left:
        texts = "; ".join(f"{choice} {text}" for choice, text in left.items())
        yield f"left off, within the noise: {texts}"


def _nothing_overlapped(plan: StepPlan) -> str:
    """A line on what the step would take with nothing overlapped."""
    seconds = float(plan.serial[TIME])
    gain = gain_text(seconds / float(plan.best[TIME]), *plan.decision.get("over_serial", (None, None)))
    return f"before: {named(plan.config)} as it comes; with nothing overlapped {cell(seconds, 's')}, {gain}"


def _in_layouts(plan: StepPlan) -> str:
    """The layouts before and after, where they were chosen."""
    if not plan.chooses_layouts:
        return ""
    before, after = plan.layout(plan.serial), plan.layout(plan.best)
    work = f"{after.gpus} GPUs, {after.sequences} sequence{'s' * (after.sequences != 1)} a step"
    was = "the same" if before == after else before.name
    return f"; {work}: {after.name} (before, with nothing overlapped: {was})"


def _choices_table(plan: StepPlan) -> Table:
    """A row for each choice, and one for the layout."""
    from rich.table import Table

    flipping = _ChoiceFlips(plan)
    shown = Table(box=None, pad_edge=False)
    for name, justify in _COLUMNS if flipping.is_stated else _COLUMNS[:-1]:
        shown.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    steps = plan.step(plan.before), plan.step(plan.best)
    for choice in plan.choices:
        alone, second = plan.alone(choice), next_best(plan, choice)
        # another value takes as long
        if plan.is_off(choice) and second is not None and second[TIME] == plan.best[TIME]:
            continue  # it changes nothing here
        low, high = plan.decision.get("alone", {}).get(choice.name, (None, None))
        gains = "–" if alone is None or plan.is_off(choice) else gain_text(alone, low, high)
        hidden = ["", ""] if choice.exposed is None else _hidden(choice.limiter, *map(choice.exposed, steps))
        rival = [] if second is None else flipping.row(next_best_text(plan, choice, second), second)
        shown.add_row(choice.name, plan.text(choice), gains, *hidden, *rival)
    if (second := plan.runner_up_layout()) is not None:
        rival = flipping.row(plan.layout(second).name, second)
        shown.add_row("layout", plan.layout(plan.best).name, "", "", "", *rival)
    return shown


_COLUMNS = (
    ("choice", "left"),
    ("planned", "left"),
    ("alone", "right"),
    ("exposed in a step", "right"),
    ("limited by", "left"),
    ("next best", "left"),
    ("flips", "left"),
)


def _hidden(limiter: str, before: float, after: float) -> list[str]:
    """Exposed times before and after, and what holds up the rest."""
    # nothing exposed before, or no change: one time
    times = cell(after, "s") if before in (0.0, after) else f"{cell(before, 's')} → {cell(after, 's')}"
    # hidden but for a tenth: what holds it up no longer matters
    return [times, limiter if after > 0.1 * before and after > 0 else "compute"]


class _ChoiceFlips:
    """Where the plan's choices flip within the intervals that the study states (`studies.plan.flips`)."""

    def __init__(self, plan: StepPlan) -> None:
        stated = get_path(plan.config, "study.uncertainty") or {}
        self._plan, self._uncertain = plan, Uncertain(plan.design(plan.best), stated)
        self.is_stated = bool(self._uncertain.nominal)

    def row(self, text: str, rival: Any) -> list[str]:
        """The next best in words, and the nearest flip."""
        ratio = float(self._plan.best[TIME] / rival[TIME])
        shown = f"{text}, {gain_in_words(ratio)}"
        if not self.is_stated:
            return [f"{text}, a tie" if 1 - _TIE < ratio <= 1 else shown]
        if ratio > 1:  # a simpler setting is preferred
            return [shown, "within the noise"]
        flips = self._uncertain.flips(self._plan.design(rival))
        more = f" (+{len(flips) - 1})" if len(flips) > 1 else ""
        return [shown, f"{flips[0]}{more}" if flips else "no"]


def _other_layouts(plan: StepPlan) -> Iterator[str]:
    """Yield what the usual layout would take."""
    if not plan.chooses_layouts:
        return
    tree = plan.base_tree()
    spreading = LayoutQuestion.of(tree, LayoutSection.model_validate(plan.config["layouts"]), StepBackend().steps)
    layout = usual(spreading)
    if layout is not None:
        seconds = _seconds(spreading, layout)
        longer = seconds / float(plan.best[TIME])
        text = f"{layout.name}, {cell(seconds, 's')} a step, {longer:.2f} times the plan"
        yield f"usual (Takeaways 1 and 2 of arXiv:2104.04473) with serial sites: {text}"


def _seconds(spreading: LayoutQuestion, layout: Layout) -> float:
    step, _ = spreading.steps.step(spreading.steps.make(layout.tree(spreading.tree)))
    return float(step.seconds)


def ways_today(plan: StepPlan) -> list[str]:
    """Lines on what comes nearest to a plan today, and on what needs a kernel or hardware that does not exist."""
    families = {read_schedule(text, site).family for site, text in plan.sites.items() if text != SERIAL}
    lines = list[str]()
    for entry in ways():
        if not _is_chosen(plan, entry.get("knob")) and not families.intersection(entry.get("families", ())):
            continue
        if not _is_of(entry, plan):
            continue
        if "hardware" in entry:
            lines.append(f"today: {', '.join(entry['families'])} needs {entry['hardware']}")
        for way in entry.get("ways", ()):
            unverified = " (from memory, unverified)" if way["provenance"] == "memory" else ""
            lines.append(f"today: {way['in']}: {way['say']}{unverified}")
    return lines


def _is_chosen(plan: StepPlan, knob: str | None) -> bool:
    """Tell whether a plan has another value of a knob than that where nothing is done."""
    if knob == "parallel.zero":
        return plan.chooses_layouts and plan.layout(plan.best).zero > 0
    return any(knob in choice.off and not plan.is_off(choice) for choice in plan.choices)


def _is_of(entry: Mapping[str, Any], plan: StepPlan) -> bool:
    """Tell whether an entry is of the value that a plan chose, and of its mode, where it names them."""
    mode = get_path(plan.config, "run.mode")
    of_value = "values" not in entry or plan.best[entry["knob"]] in entry["values"]
    return of_value and mode in entry.get("modes", [mode])


def _gains(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each choice of a plan alone, and for all: the time before over the time with it, and its range."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for plan in (plan for plan in as_decided(plans(table, {}), table.attrs.get("decisions")) if plan.fits):
        # over the software as it comes, which the table alone does not name
        gains = {**dict(alone_rows(plan)), "all together": plan.decision.get("gain", plan.gain)}
        ends = {name.replace("_", " "): span for name, span in plan.decision.get("alone", {}).items()}
        ends |= {"all together": [plan.decision.get(end) for end in ("low", "high")]}
        for name, gain in gains.items():
            low, high = ends.get(name, (None, None))
            rows.append({"scenario": plan.name, "choice": name, "gain": gain, "range_low": low, "range_high": high})
    frame = pd.DataFrame(rows)
    return frame.astype(dict.fromkeys(("range_low", "range_high"), float)) if len(frame) else frame


def _gains_figure(rows: pd.DataFrame) -> FigureSheet:
    together = rows[rows["choice"] == "all together"]
    most = together.sort_values("gain").iloc[-1]
    low, high = (None if math.isnan(most[f"range_{end}"]) else float(most[f"range_{end}"]) for end in ("low", "high"))
    gain = gain_text(float(most["gain"]), low, high)
    title = f"With the plan a step of {most['scenario']} is {gain}" + (" as before" if gain == AS_FAST else "")
    axis = Axis("gain", "time before / time [x]", centre=1.0)
    frame = Frame(title, "alone: over nothing overlapped; all together: over the step before; lines: 90 % intervals")
    return tables.dots(rows, axis, row="choice", by="scenario", frame=frame)


def _layer_figure(name: str, layers: Sequence[pd.DataFrame]) -> FigureSheet:
    """One layer of the forward pass, serial and as planned."""
    import pandas as pd

    layers = [layer.assign(panel=panel) for layer, panel in zip(layers, ("serial", "planned"), strict=True)]
    spans = [layer["finish_s"].max() for layer in layers]
    title = f"A layer of {name} takes {cell(spans[0], 's')} with serial sites, {cell(spans[1], 's')} as planned"
    return timelines.timeline(pd.concat(layers), title, panel="panel")


def _layer(step: Iteration) -> pd.DataFrame:
    """Tasks of one layer, from its start on, with one lane for all links."""
    import pandas as pd

    tasks = [vars(task) for task in intervals(step)]
    # layers count from 0: unlike the first, the second follows another layer, if there is one
    second, first = ([row for row in tasks if row["name"].startswith(f"layer {layer}: ")] for layer in (_AROUND, 0))
    forward = pd.DataFrame([row for row in second or first if not any(mark in row["name"] for mark in _BACKWARD)])
    start = forward["start_s"].min()
    lanes = forward["lane"].where(forward["lane"] == "compute", "links")  # links of a layer are busy together
    return forward.assign(lane=lanes, start_s=forward["start_s"] - start, finish_s=forward["finish_s"] - start)


_BACKWARD = (" dX", " dW", " dA", " dB", " backward", " again", "gradients")


def command(words: Sequence[str]) -> CommandAnswer:
    """`plan [plan=<file>] [parallel=auto] [layouts.gpus=<n>] [overrides of study=plan]`: search, and print a plan.

    A plan that is given is judged, and not searched. 3 where a step fits in no point that was searched.
    """
    from dse.config.compose import request
    from dse.config.expansion import each_value
    from dse.config.options import overrides, own_folder
    from dse.run_study import run
    from dse.study.plan import plan

    files = [word.partition("=")[2] for word in words if word.startswith("plan=")]
    typed = each_value(word for word in words if not word.startswith("plan="))
    if files:
        read = read_plan(Path(files[-1]))
        typed = over_step(read.step, typed, read.plan)
    typed = [*typed, *stack_words(typed)]
    typed = _with_layouts(typed) if "parallel=auto" in typed and not files else typed
    _check_gpus(typed)
    if files:
        typed = [*typed, *given_words(Path(files[-1]), typed)]
    folder, code = run(plan(request(overrides(["study=plan", *typed]), own_folder(typed))))
    return CommandAnswer(folder, code=max(code, 0 if _all_fit(folder) else 3))  # the more serious code


def _all_fit(folder: Path) -> bool:
    """Tell whether each scenario of a run fits in some point, and a plan that was given as it is."""
    run = FinishedRun(folder)
    table = run.outputs.read_table("results")
    return all(plan.fits for plan in (judgements(table, {}) if is_judged(table) else plans(table, run.config)))


def _check_gpus(words: Sequence[str]) -> None:
    """Refuse a number of GPUs of a step whose degrees are given."""
    for word in words:
        path, _, value = word.partition("=")
        if path == "parallel.gpus":
            rule = "is the number of GPUs of layouts that are chosen: degrees give that of others"
            way = f"write parallel=auto layouts.gpus={value}"
            raise ConfigError([Problem(path, rule, value, way)])


def _with_layouts(words: Sequence[str]) -> list[str]:
    """Overrides that choose layouts; degrees that were typed are kept, and not chosen."""
    fixed, free, gpus = dict[str, str](), list[str](), list[str]()
    for word in words:
        path, _, value = word.partition("=")
        name = path.rpartition(".")[2]
        if path == "parallel.gpus":
            gpus = [f"layouts.gpus={value}"]
        elif path in _DEGREES:
            fixed[name] = value
        elif word != "parallel=auto":
            free.append(word)
    values = ",".join(f"{name}:{value}" for name, value in fixed.items())
    # Hydra's grammar of a mapping in one word
    return [*free, "layouts.auto=true", *gpus, f"layouts.fixed={{{values}}}"]


_DEGREES = (
    "run.micro_batches",
    "run.recompute",
    *(f"parallel.{name}" for name in ("tp", "pp", "dp", "cp", "ep", "zero")),
)


def given_words(file: Path, typed: Sequence[str]) -> list[str]:
    """Overrides with which a run judges the plan of a file; what was typed counts before it. Raises ConfigError.

    No point has a baseline: what the plan is compared with are points of their own.
    """
    from dse.config.overrides import override

    _check_unsearched(typed)
    paths = {word.lstrip("+").partition("=")[0] for word in typed}
    words = [override(f"+given.{name}", value) for name, value in given_section(file, paths).items()]
    return [*words, *UNSEARCHED]


UNSEARCHED = ("study.baseline={}", "~space.parallel", "~space.optimizer", "~space.sites")
"""Overrides of a run that judges a plan: nothing is searched, and no point has a baseline."""


def given_section(file: Path, typed: Collection[str]) -> dict[str, Any]:
    """The section `given` for the plan of a file, with what the tool whose it is does by itself, or every framework.

    typed: paths of values that count before it. Raises ConfigError.
    """
    read = read_plan(file)
    check_plan(read.plan)
    plan = {path: value for path, value in all_leaves(read.plan) if path not in typed}
    tools = tool_facts()
    compared = [name for name, tool in tools.items() if tool.framework or name == read.tool]
    if read.tool and tools[read.tool].framework:  # a library runs in a framework: all of these are compared
        compared = [read.tool]
    defaults = {
        name: {
            "modes": list(tools[name].modes),
            # what a tool does not say is off
            "values": {path: value for path, value in {**OFF, **tools[name].values}.items() if path not in typed},
        }
        for name in compared
    }
    fixed = sorted(path for path in typed if path in OFF)
    section = {"file": file.name, "tool": read.tool, "plan": plan, "tools": defaults, "typed": fixed}
    return section | ({"unread": list(read.unread)} if read.unread else {})


def _check_unsearched(typed: Sequence[str]) -> None:
    """Refuse words that ask for a search beside a plan that is judged as it is."""
    check = Problems()
    for word in typed:
        path = word.lstrip("+~").partition("=")[0]
        if path.startswith(("space.", "layouts.")) or word == "parallel=auto":
            rule = "is searched, and a plan that is given is judged as it is"
            way = "leave it out; or leave out plan=, and write sites.ffn_in=... for what should stay"
            check.add(path, rule, value=word.partition("=")[2] or None, way_out=way)
    check.done()


STUDY = PlanStudy()
