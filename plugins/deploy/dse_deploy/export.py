"""The command `settings export`: a plan as the settings of a tool, and what its step takes with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import plugins
from dse.config.options import OWN_FLAGS, without_own_folder
from dse.errors import Problems, pairs
from dse.results.run_folder import CommandAnswer, writable
from dse.results.words import cell
from dse.space import get_path
from dse_deploy.all_reduces import sum_lines
from dse_deploy.command import is_of_plan, keep, nearest, tool_named, with_words, write_all
from dse_deploy.facts import UNKNOWN, ModelFacts
from dse_deploy.planned_step import (
    BESIDE_A_PLAN,
    DEGREES,
    LeftOut,
    PlannedStep,
    ToolPlan,
    check_target,
)
from dse_deploy.serving_plan import ServingFiles, serving_tree
from dse_deploy.settings import Tool, Written, tools, usual
from dse_deploy.step_files import STEP_FORMATS, read_step_file
from simulators.steps.overlap.sites import SERIAL, SITES
from simulators.steps.plan.choices import OFF
from studies.plan.judged import site_seconds
from studies.plan.plan_file import Plan, check_plan, leaves_of, read_plan

if TYPE_CHECKING:
    from rich.table import Table

    from simulators.steps.run.iteration import Iteration


_PLAN = "plan.yaml"


def export(words: Sequence[str]) -> CommandAnswer:
    """`settings export plan=<plan.yaml> to=<tool> [out=<folder>] [parallel.tp=8 ...]`: write the settings of a tool."""
    options = pairs([word for word in words if _is_option(word)], {"plan": "", "to": ""}, optional=["out"])
    beside = [re.sub("^config_dir=", f"{OWN_FLAGS[0]}=", word) for word in words if not _is_option(word)]
    file = _plan_file(Path(options["plan"]))
    name, tool = tool_named("to", options["to"])
    folder = writable(options.get("out", f"outputs/export/{name}")).folder
    if tool.files[0].format == "msccl":
        path = folder / tool.files[0].name
        keep(path, plugins.load("format", "msccl").settings(file))
        return CommandAnswer(folder, (f"written to {path}",))
    served = serving_tree(file)
    if served is not None:
        return _export_serving(ServingFiles.of(name, served, without_own_folder(beside), file.name), folder)
    exported = _export_plan(name, file, beside)
    for file_name, part in exported.written.items():
        keep(folder / file_name, part.text)
    return CommandAnswer(folder, (*answer(exported), f"written to {folder}/: {', '.join(exported.written)}"))


def _plan_file(path: Path) -> Path:
    """The plan of a run whose folder is named; a file as it is."""
    inside = path / _PLAN
    return inside if path.is_dir() and inside.is_file() else path


def _export_serving(files: ServingFiles, folder: Path) -> CommandAnswer:
    """Write the files of a plan of serving."""
    for path, part in files.written.items():
        writable(str((folder / path).parent))
        keep(folder / path, part.text)
    written = f"written to {folder}/: {', '.join(files.written)}"
    return CommandAnswer(folder, (_settings_table(files.written), *files.lines(), written))


def _export_plan(name: str, file: Path, words: Sequence[str]) -> ToolFiles:
    """A plan as a tool says it. words: values beside the plan, and of the step that it is of. Raises ConfigError."""
    step = PlannedStep.of(file, words)
    read = read_plan(file)
    plan = with_words(read.plan, [word for word in words if is_of_plan(word)])
    check_plan(plan)
    # without a step nothing can be timed: every setting is written
    if step is None:
        _check_beside(words)
        check_target(name, plan, None)
        return ToolFiles(name, plan, plan, write_all(tools()[name], plan, file.name))
    # the file rests on what the step has anyway, so that is written as well
    plan = step.with_context(plan)
    check_target(name, plan, step)
    planned = step.plan_tree(plan, read.tool)
    by_tool = ToolPlan(name, step, planned)
    # settings that make the step slower on this tool are left out, and reported
    written_plan, left_out = by_tool.without_losses(plan)
    by_tool.check_memory(written_plan)
    written = write_all(tools()[name], written_plan, file.name, by_tool.facts)
    return ToolFiles(name, plan, written_plan, written, step, planned, left_out, by_tool.facts)


def _check_beside(words: Sequence[str]) -> None:
    """Refuse words that no plan has, where no step is known that they could be of."""
    check, way = Problems(), "name the step, too: model=<name> system=<name> run.mode=<mode>"
    for word in without_own_folder(words):
        if not is_of_plan(word):
            check.add(word.partition("=")[0], "is no value of a plan", way_out=way)
    check.done()


@dataclass(frozen=True)
class ToolFiles:
    """A plan in the files of a tool. reduced: what of it is written. step: that the plan is of, where that is known;
    planned: its tree with the plan. left_out: settings without which the step is faster. facts: of the step.
    """

    tool: str
    plan: Plan
    reduced: Plan
    written: Mapping[str, Written]
    step: PlannedStep | None = None
    planned: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()
    facts: ModelFacts = UNKNOWN


def answer(exported: ToolFiles) -> Iterator[Table | str]:
    """Yield the settings, what each says, what the step takes with them, and what the tool cannot say."""
    tool, plan = tools()[exported.tool], exported.plan
    yield _settings_table(exported.written)
    reached_plan = nearest(tool, exported.reduced, exported.written, exported.facts)
    by_itself = dict[str, Any](tool.values)
    if exported.step is not None:
        yield from _times(exported, reached_plan)
        tree = exported.step.by(exported.tool, reached_plan, exported.planned)
        by_itself = {path: get_path(tree, path) for path in by_itself}  # as far as the machine can
    else:
        yield "times: the plan's step is not known here; name it with model=<name> system=<name> run.mode=<mode>"
    yield from _of_collectives(tool, exported)
    # a choice is without a word only if no file of the tool has one
    unsaid = frozenset.intersection(*(part.unsaid for part in exported.written.values()))
    yield from _differences(tool, plan, reached_plan, unsaid, by_itself)


def _of_collectives(tool: Tool, exported: ToolFiles) -> Iterator[str]:
    """Yield collectives that files of single ones have no setting for, and what they change beside the plan.

    Numbers of CTAs that differ by axis are told where the tool has one for all.
    """
    ctas = {path: get_path(exported.plan, path) for path in tool.limits if get_path(exported.plan, path)}
    written = {path for part in exported.written.values() for row in part.rows for path in row.paths}
    if ctas and not written.intersection(ctas):
        numbers = ", ".join(f"{path} = {get_path(exported.plan, path) or 0}" for path in tool.limits)
        yield f"one number for a process, and the plan has {numbers}: to=communicators sets each"
    yield from sum_lines(exported.facts.calls, exported.facts.precision, tool.without_switch)
    for file in tool.files:
        if file.format in STEP_FORMATS:
            yield from STEP_FORMATS[file.format].left_out(exported.facts)
            read = read_step_file(file, exported.written[file.name].text, exported.facts, {})
            yield from (f"changes a step, and is not modelled: {text}" for text in read.unmodelled)


def _settings_table(written: Mapping[str, Written]) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name in ("setting", "value", "plan entry", "meaning"):
        shown.add_column(name)
    for part in written.values():
        for row in part.rows:
            tree = getattr(row.value, "tree", row.value)
            value = tree if isinstance(tree, str | int | float) else _compact(tree)
            # a flag for all sites would fill the column
            paths = " ".join(row.paths) if len(row.paths) < 3 else f"{len(row.paths)} sites"
            shown.add_row(row.name, str(value), paths, row.meaning)
    return shown


def _times(exported: ToolFiles, by_tool: Plan) -> Iterator[Table | str]:
    """Yield what the step takes as planned, as the tool runs it, and serial, in all and by site."""
    step, name = exported.step, tools()[exported.tool].name
    assert step is not None
    planned = exported.planned
    steps = {"planned": step.step(planned), f"by {name}": step.step(step.by(exported.tool, by_tool, planned))}
    serial = step.serial(planned)
    steps |= {} if serial is None else {"serial": serial}
    times = ", ".join(f"{column} {cell(float(step.seconds), 's')}" for column, step in steps.items())
    yield f"a step of {get_path(step.tree, 'model.name')}: {times} (predictions)"
    yield from _sites_table(exported.plan, by_tool, steps)
    # the tool may do more by itself than a file can switch off
    if serial is not None and float(steps[f"by {name}"].seconds) > float(serial.seconds):
        yield f"what is written is slower than serial, by {', '.join(_not_serial(exported, by_tool))}"
    for left in exported.left_out:
        without = cell(left.without_s, "s")
        slower = cell(left.with_s, "s") if isfinite(left.with_s) else "no step, as it breaks a rule there"
        against = "" if serial is None else f" (serial {cell(float(serial.seconds), 's')})"
        names = ", ".join(left.names)
        yield f"not written, as the step is slower with it: {names}: {slower}, without {without}{against}"


def _not_serial(exported: ToolFiles, by_tool: Plan) -> Iterator[str]:
    """Yield choices that a tool makes in its files, or by itself, and the serial step does not."""
    step, defaults = exported.step, tools()[exported.tool].values
    assert step is not None
    tree, serial = step.by(exported.tool, by_tool, exported.planned), step.serial_tree(exported.planned)
    for path in OFF:
        value = get_path(tree, path)
        if serial is not None and not _same(value, get_path(serial, path)):
            yield f"{path} = {value}{' (by itself)' if _same(value, defaults.get(path)) else ''}"


def _sites_table(plan: Plan, by_tool: Plan, steps: Mapping[str, Iteration]) -> Iterator[Table]:
    """Yield a row for each site with a schedule in the plan or by the tool: GEMM and collective in a step."""
    from rich.table import Table

    schedules = [entries.get("sites", {}) for entries in (plan, by_tool)]
    chosen = [site for site in SITES if any(part.get(site, SERIAL) != SERIAL for part in schedules)]
    if not chosen:
        return
    shown = Table(box=None, pad_edge=False)
    for column in ("site", *(text for name in steps for text in (name, "takes"))):
        shown.add_column(column, justify="right" if column == "takes" else "left")
    for site in chosen:
        # the third column is serial everywhere
        texts = [*(part.get(site, SERIAL) for part in schedules), SERIAL]
        cells = zip(texts, (cell(site_seconds(step, site), "s") for step in steps.values()), strict=False)
        shown.add_row(site, *(text for pair in cells for text in pair))
    yield shown


def _differences(
    tool: Tool, plan: Plan, by_tool: Plan, unsaid: frozenset[str], defaults: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what the tool cannot say, and what it says in place of what the plan has.

    defaults: knobs -> values where nothing is set.
    """
    wanted, reached = dict(leaves_of(plan)), dict(leaves_of(by_tool))
    by_itself = list[str]()
    for path in [*wanted, *(path for path in reached if path not in wanted)]:
        value = wanted.get(path)
        if path in BESIDE_A_PLAN or (path in DEGREES and not tool.framework):  # of a step, and of a framework
            continue
        if path.startswith("sites.") and str(value) in tool.by_itself:
            by_itself.append(f"{path} = {value}")
        elif path in unsaid and path in tool.follows:
            by_itself.append(f"{path} = {value} (follows from {tool.follows[path]})")
        elif path in unsaid and _same(value, defaults.get(path, usual(path))):
            by_itself.append(f"{path} = {value}")
        elif path in unsaid:
            yield f"{tool.name} has no setting for {path} = {value}{_instead(path, defaults)}"
        # a value equal to the default is not written, so reading does not bring it back
        elif path in wanted and path not in reached and _same(value, defaults.get(path, usual(path))):
            by_itself.append(f"{path} = {value}")
        else:
            now, then = reached.get(path, defaults.get(path, usual(path))), wanted.get(path, usual(path))
            if not _same(now, then):
                yield f"nearest: {path} = {now}, not {then}"
    if by_itself:
        yield f"{tool.name} needs no setting for {', '.join(by_itself)}"


def _instead(path: str, defaults: Mapping[str, Any]) -> str:
    """What a tool does by itself where it has no setting, and the library that has one."""
    if path not in defaults:
        return ""
    libraries = (
        name
        for name, tool in tools().items()
        if not tool.framework and any(setting.path == path for file in tool.files for setting in file.settings)
    )
    return f" (by itself: {'; '.join([str(defaults[path]), *(f'to={name} sets it' for name in libraries)])})"


def _same(left: Any, right: Any) -> bool:
    # YAML, command lines and Python write true, True and "true"
    return str(left).lower() == str(right).lower()


def _compact(tree: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in tree.items())


def _is_option(word: str) -> bool:
    return word.partition("=")[0] in ("plan", "to", "out")
