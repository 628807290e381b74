"""A plan of a step: a schedule for every collective, and perhaps degrees of parallelism: what each choice gains, alone
and together, where it flips, and how to get it today. A plan that is given is judged as it is (`studies.plan.judged`).

Points are steps whose sites (`simulators.steps.overlap.sites`) have schedules. The plan of a scenario is its best point
that fits the memory; `before` is the step with every site serial and nothing else done. With `parallel=auto` the best
layouts (`simulators.steps.plan.layouts`) are scenarios, of which the plan is the best. `plan.yaml` holds the plan. A
step that fits in no point is no plan: the answer is by how much, and what fits (`studies.plan.fitting`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import ConfigError, Problem, Problems
from dse.plots import Axis, Draw, FigureSheet, Frame, tables, timelines
from dse.results.decisions import gain_text
from dse.results.run_folder import CommandAnswer, FinishedRun, Outputs
from dse.results.words import AS_FAST, cell
from simulators.steps.plan.choices import OFF
from simulators.steps.plan.given_plan import AS_GIVEN
from simulators.steps.run.iteration import Iteration
from simulators.steps.run.task_graph import intervals
from studies.plain import Plain
from studies.plan.answer import again_line, headline, plan_lines
from studies.plan.certainty import as_decided, decide
from studies.plan.fitting import does_not_fit
from studies.plan.judged import answer as judgement
from studies.plan.judged import decide_given, given_plan, is_judged, judgements, times_figure
from studies.plan.judged import headline as judged_headline
from studies.plan.plan_file import all_leaves, check_plan, over_step, read_plan, step_of_run
from studies.plan.stacks import format_words, stack_words, tool_facts
from studies.plan.step_plan import alone_rows, plans

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from dse.study.plan import Plan

_AROUND = 1  # layer whose tasks are drawn
_MOST_STEPS = 3  # that a sentence is on


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
        for _, lines in _answers(outputs, table):
            yield from lines

    def headline(self, outputs: Outputs, table: pd.DataFrame) -> str:
        """What each step takes, or by how much it does not fit and what does."""
        sentences = [sentence for sentence, _ in _answers(outputs, table)]
        more = f"; and {len(sentences) - _MOST_STEPS} more" if len(sentences) > _MOST_STEPS else ""
        return "; ".join(sentences[:_MOST_STEPS]) + more

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


def _answers(outputs: Outputs, table: pd.DataFrame) -> Iterator[tuple[str, Iterable[Table | str]]]:
    """Yield a sentence, and the lines, on each scenario."""
    config, summary = outputs.read_config(), outputs.read_json("summary")
    decisions = summary.get("decisions")
    if is_judged(table):
        for judged in judgements(table, config, decisions):
            if judged.fits:
                yield judged_headline(judged), judgement(judged)
            else:
                yield _unfit(judged.name, judged.trees[AS_GIVEN])
        return
    for plan in as_decided(plans(table, config), decisions):
        if plan.fits:
            yield headline(plan), plan_lines(plan, again=again_line(plan, summary["typed"]))
        else:
            yield _unfit(plan.name, plan.point_tree(plan.leanest))


def _unfit(name: str, tree: Mapping[str, Any]) -> tuple[str, Sequence[str]]:
    """A sentence, by how much a step does not fit and what does, and the lines."""
    lines = tuple(does_not_fit(name, tree))
    return "; ".join(lines), lines


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
    tool = ""
    if files:
        read = read_plan(Path(files[-1]))
        typed, tool = over_step(read.step, typed, read.plan), read.tool
    typed = [*typed, *stack_words(typed, tool), *(() if files else format_words(typed))]
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
    # where the sequences of a step are given, a typed batch is a degree like others
    degrees = (*_DEGREES, "run.batch") if any(word.startswith("layouts.sequences=") for word in words) else _DEGREES
    for word in words:
        path, _, value = word.partition("=")
        name = path.rpartition(".")[2]
        if path == "parallel.gpus":
            gpus = [f"layouts.gpus={value}"]
        elif path in degrees:
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
