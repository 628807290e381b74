"""The answer of a plan on the terminal: what it takes, what to turn on, how sure that is, and a row for each choice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dse.config.overrides import override
from dse.results.answer import fastest_in_words
from dse.results.decisions import Decision, gain_text
from dse.results.words import AS_FAST, cell, gain_in_words
from dse.space import get_path
from simulators.steps.judge.ideal import ideal_seconds
from simulators.steps.overlap.sites import SERIAL, read_schedule
from simulators.steps.plan.layouts import LayoutQuestion, LayoutSection, usual
from studies.plan.fitting import may_not_fit
from studies.plan.flips import Uncertain
from studies.plan.libraries import library_line
from studies.plan.plan_file import all_leaves, over_step, step_of_run
from studies.plan.power import power_line
from studies.plan.stacks import defaults_of, measured_line, named, software_line, tool_facts, ways
from studies.plan.step_plan import MEMORY, TIME, StepPlan, evaluated, has_software, rates_of_a_gpu
from studies.plan.stored_weights import stored_line
from studies.plan.texts import next_best, next_best_text, runner_up_layout, seconds_text, work_text

if TYPE_CHECKING:
    from rich.table import Table

_TIE = 0.02  # of the step: what is closer than this is within what the constants are known to


def plan_lines(plan: StepPlan, *, again: str = "") -> Iterator[Table | str]:
    """Yield the answer. again: the command that gives this plan once more."""
    yield headline(plan)
    yield _turned_on(plan)
    yield from _how_sure(plan)
    yield f"step: {work_text(plan)}{_in_layouts(plan)}"
    yield from may_not_fit(plan)
    if plan.before is not plan.serial:
        yield from _nothing_overlapped(plan)
    yield from filter(None, [software_line(plan.config), measured_line(plan.point_tree(plan.best))])
    yield from filter(None, [power_line(plan), library_line(plan)])
    yield stored_line(plan.design(plan.best), plan.best)
    if plan.choices:
        yield _choices_table(plan)
        yield "alone: against a step with nothing overlapped but what the choice needs"
    if has_software(plan):
        yield _ideal_line(plan)
    yield from _other_layouts(plan)
    yield from ways_today(plan)
    yield from filter(None, [again])


def headline(plan: StepPlan) -> str:
    """What the step takes on which machine, against the software as it comes."""
    best, before = plan.best, plan.before
    gain = gain_text(plan.gain, plan.decision.get("low"), plan.decision.get("high"))
    as_it_comes = "with nothing overlapped" if before is plan.serial else f"{_software(plan)} as it comes"
    other = f"{as_it_comes}: {cell(before[TIME], 's')}"
    against = f"{gain} as {as_it_comes}" if gain.startswith(AS_FAST) else f"{other}, so this is {gain}"
    rate = f" ({best['tokens_per_s']:,.0f} tokens/s)" if "tokens_per_s" in best else ""
    memory = f", {100 * best[MEMORY]:.0f} % of the memory" if MEMORY in best else ""
    taken = f"{cell(best[TIME], 's')} a step{rate}{rates_of_a_gpu(best, plan.point_tree(best))}{memory}"
    return f"{_where(plan)}: {taken}; {against}"


def _where(plan: StepPlan) -> str:
    """The model and the GPUs: `llama3_70b on 64 x h100`."""
    tree = plan.point_tree(plan.best)
    gpus = math.prod(int(tree["parallel"].get(name, 1)) for name in ("tp", "pp", "dp", "cp"))
    machine = get_path(tree, "system.gpu.name") or get_path(tree, "system.name")
    return f"{plan.name} on {gpus:,} x {machine}"


def _software(plan: StepPlan) -> str:
    """The framework of a plan by its name."""
    tool = get_path(plan.config, "stack.tool")
    return named(plan.config) if tool is None else tool_facts()[tool].name


def _turned_on(plan: StepPlan) -> str:
    """What the plan has that the software as it comes has not, with what it gains alone."""
    if not plan.choices:
        return "turn on: nothing beyond what was typed; software and machine leave no other choice"
    texts = list[str]()
    for choice in plan.choices:
        if plan.is_off(choice) or plan.text(choice) == plan.text(choice, plan.before):
            continue
        alone = plan.alone(choice)
        gain = f" ({gain_in_words(alone)})" if alone is not None and alone > 1 else ""
        texts.append(f"{choice.name} {plan.text(choice)}{gain}")
    if not texts:
        return f"turn on: nothing; {_software(plan)} as it comes is as fast"
    return f"turn on: {'; '.join(texts)}"


def _how_sure(plan: StepPlan) -> Iterator[str]:
    """Yield how sure it is that a plan is the fastest, and what was left off as within the error."""
    if not plan.decision or not plan.choices:
        return
    decision = Decision.read(plan.decision)
    guesses = [kind for kind, basis in decision.basis.items() if basis == "a guess"]
    guessed = f"; errors of {' and '.join(guesses)} are a guess" if guesses else ""
    left = plan.decision.get("left_off")
    taken = seconds_text(plan.decision)
    yield f"sure: {fastest_in_words(decision)} that no other setting is faster{taken}{guessed}"
    if decision.advice:
        changed = decision.spans_one and plan.gain != 1
        software = "nothing overlapped" if plan.before is plan.serial else f"{_software(plan)} as it comes"
        over = f"no certain gain over {software}"
        yield decision.advice.replace("no certain gain", over) if changed else decision.advice
        system = plan.config["system"]
        if measure := decision.measurement(str(system["name"]), int(system["node"]["num_gpus"])):
            yield measure
    if left:
        texts = "; ".join(f"{choice} {text}" for choice, text in left.items())
        yield f"left off, as the gain is within the error: {texts}"


def _nothing_overlapped(plan: StepPlan) -> Iterator[str]:
    """Yield what the step takes with nothing overlapped, and why that is faster than the software as it comes."""
    seconds, before = float(plan.serial[TIME]), float(plan.before[TIME])
    gain = gain_text(seconds / float(plan.best[TIME]), *plan.decision.get("over_serial", (None, None)))
    yield f"with nothing overlapped {cell(seconds, 's')}: the plan is {gain}"
    if before <= seconds:
        return
    costly = list[str]()
    for path, value in defaults_of(plan.config).items():
        row = None if path not in plan.serial else evaluated(plan, plan.serial, {path: value})
        if row is not None and float(row[TIME]) > seconds:
            costly.append(f"{path}={value} ({cell(float(row[TIME]) - seconds, 's')} more)")
    reasons = f", by {', '.join(costly)}" if costly else ""
    yield f"{_software(plan)} as it comes is slower than nothing overlapped{reasons}"


def _in_layouts(plan: StepPlan) -> str:
    """The layouts before and after, where they were chosen."""
    if not plan.chooses_layouts:
        return ""
    before, after = plan.layout(plan.serial), plan.layout(plan.best)
    work = f"{after.gpus} GPUs, {after.sequences} sequence{'s' * (after.sequences != 1)} a step"
    was = "the same" if before == after else before.name
    return f"; {work}: {after.name} (with nothing overlapped: {was})"


def again_line(plan: StepPlan, provenance: Mapping[str, Any]) -> str:
    """The command that gives exactly this plan again: its step, and every choice typed."""
    tree = plan.tree(serial=True)
    words = [
        *over_step(step_of_run(provenance), [], tree),
        *(override(path, value) for path, value in all_leaves(tree)),
    ]
    return f"this plan again: python -m dse plan {' '.join(map(_shell_word, words))}"


def _shell_word(word: str) -> str:
    """A word of a command as a shell takes it."""
    import shlex

    return shlex.quote(word)


def _ideal_line(plan: StepPlan) -> str:
    """A line on the time of the step with ideal schedules."""
    seconds, now = ideal_seconds(plan.point_tree(plan.best)), float(plan.best[TIME])
    if seconds >= now:
        return "with ideal schedules, limited by the hardware alone, the step is no faster"
    gain = gain_in_words(now / seconds)
    return f"with ideal schedules, limited by the hardware alone: {cell(seconds, 's')}, {gain} (candidates=ideal)"


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
    if (second := runner_up_layout(plan)) is not None:
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
        self._plan, self._uncertain = plan, Uncertain(plan.as_run(plan.best), stated)
        self.is_stated = bool(self._uncertain.nominal)

    def row(self, text: str, rival: Any) -> list[str]:
        """The next best in words, and the nearest flip."""
        ratio = float(self._plan.best[TIME] / rival[TIME])
        shown = f"{text}, {gain_in_words(ratio)}"
        if not self.is_stated:
            return [f"{text}, a tie" if 1 - _TIE < ratio <= 1 else shown]
        if ratio > 1:  # a simpler setting is preferred
            return [shown, "within the error"]
        flips = self._uncertain.flips(self._plan.as_run(rival))
        more = f" (+{len(flips) - 1})" if len(flips) > 1 else ""
        return [shown, f"{flips[0]}{more}" if flips else "no"]


def _other_layouts(plan: StepPlan) -> Iterator[str]:
    """Yield what the usual layout would take."""
    if not plan.chooses_layouts:
        return
    tree = plan.base_tree()
    spreading = LayoutQuestion.of(tree, LayoutSection.model_validate(plan.config["layouts"]), plan.backend.steps)
    layout = usual(spreading)
    if layout is not None:
        design = plan.backend.as_run(spreading.steps.make(layout.tree(spreading.tree)))
        seconds = float(spreading.steps.step(design)[0].seconds)
        longer = seconds / float(plan.best[TIME])
        text = f"{layout.name}, {cell(seconds, 's')} a step, {longer:.2f} times the plan"
        yield f"usual (Takeaways 1 and 2 of arXiv:2104.04473) with serial sites: {text}"


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
            if not _is_in(way["in"], plan):
                continue
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


def _is_in(tool: str, plan: StepPlan) -> bool:
    """Tell whether a way is one of the plan's framework, or of a library below it."""
    own = get_path(plan.config, "stack.tool")
    frameworks = {facts.name for facts in tool_facts().values() if facts.framework}
    return own is None or tool == tool_facts()[own].name or tool not in frameworks | _OTHER_FRAMEWORKS


_OTHER_FRAMEWORKS = {"DeepSpeed", "DeepSeek", "flux"}
"""Frameworks of `frameworks.yaml` that no stack of a plan has as its tool."""
