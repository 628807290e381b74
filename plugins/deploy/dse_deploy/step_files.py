"""Files whose settings are of single collectives or communicators: written for a step and its plan, and read for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dse.errors import ConfigError, Problem
from dse_deploy import communicators, iris_table, tuner_plan
from dse_deploy.facts import ModelFacts
from dse_deploy.settings import Row, SettingsFile, Written
from dse_deploy.tuner_file import library_files, read_tuner, tuner_format, tuner_text
from dse_deploy.tuner_plan import COLLECTIVES, Unplanned
from studies.plan.plan_file import Plan, leaves_of

NAME_THE_STEP = "name the step: model=<name> system=<name> run.mode=<mode> parallel.tp=<GPUs>"


@dataclass(frozen=True)
class StepFormat:
    """A format. rows: of a plan in a step; text: of rows, with lines of comment above.

    read: text, name of the file, facts of the step and the plan to put what it says into -> what no plan has.
    of_calls: whether it is of collectives by their sizes, which only a step has. left_out: collectives of a step that
    it has no setting for, in words.
    """

    rows: Callable[[Plan, ModelFacts], list[Row]]
    text: Callable[[Sequence[Row], str], str]
    read: Callable[[str, str, ModelFacts, dict[str, Any]], Unplanned]
    of_calls: bool = True
    left_out: Callable[[ModelFacts], Iterable[str]] = lambda facts: ()


def write_step_file(file: SettingsFile, plan: Plan, head: str, facts: ModelFacts) -> Written:
    """A file for a plan in a step. head: lines of comment above. Raises ConfigError where it takes a step."""
    form = STEP_FORMATS[file.format]
    if form.of_calls and not facts.calls:
        rule = "sets collectives by their sizes, and no collective of a step is known"
        raise ConfigError([Problem("to", rule, file.name, NAME_THE_STEP)])
    rows = form.rows(plan, facts)
    covered = {path for row in rows for path in row.paths}
    return Written(form.text(rows, head), rows, frozenset(path for path, _ in leaves_of(plan)) - covered)


def read_step_file(file: SettingsFile, text: str, facts: ModelFacts, plan: dict[str, Any]) -> Unplanned:
    """Put what a file says into a plan. Raises ConfigError with the file, its line and the rule."""
    form = STEP_FORMATS[file.format]
    read = form.read(text, file.name, facts, plan)
    if form.of_calls and not facts.calls:
        rule = "has settings of collectives by their sizes, and no step is named that has them"
        raise ConfigError([Problem("settings", rule, file.name, NAME_THE_STEP)])
    return read


# Tuner


def _tuner(library: str) -> StepFormat:
    unset = tuner_format().libraries[library].unset_channels
    left = f"run on {unset} channel each, as pluginGetCollInfo sets it first" if unset else "are left to the library"

    def rows(plan: Plan, facts: ModelFacts) -> list[Row]:
        if (own := tuner_format().library_of(facts.gpu)) != library:
            rule = f"is of another vendor's GPUs than the step's, {facts.gpu}"
            raise ConfigError([Problem("to", rule, f"{library}_tuner", f"write to={own}_tuner")])
        chosen = tuner_plan.choices(facts.calls, plan, tuner_format().libraries[library].most_channels)
        return [_tuner_row(row, choice, plan) for row, choice in chosen]

    def text(rows: Sequence[Row], head: str) -> str:
        notes = [
            *head.splitlines(),
            "NCCL_TUNER_PLUGIN=<example tuner plug-in> NCCL_TUNER_CONFIG_FILE=<this file>",
            f"collectives without a row here {left}",
            tuner_format().source,
            *(f"{row.name}: {row.meaning}" for row in rows if row.meaning),
        ]
        return tuner_text([row.value for row in rows], notes)

    def read(text: str, name: str, facts: ModelFacts, plan: dict[str, Any]) -> Unplanned:
        return tuner_plan.read_rows(read_tuner(text, name, library), facts, plan, unset_channels=unset)

    def left_out(facts: ModelFacts) -> Iterator[str]:
        yield from tuner_plan.without_row(facts.calls)
        if unset:
            yield f"collectives without a row {left}: write *nChannels = 0 there to leave them to the library"

    return StepFormat(rows, text, read, left_out=left_out)


def _tuner_row(row: Any, choice: tuner_plan.Choice, plan: Plan) -> Row:
    collectives = [COLLECTIVES] if choice.calls and COLLECTIVES in dict(leaves_of(plan)) else []
    paths = [*collectives, *choice.limited]
    name = f"{row.collective} {row.low}-{row.high} of {row.ranks}"
    return Row(name, row, paths, tuner_plan.times_in_words(choice), tuner_format().source)


# Communicators


def _communicators(*, megatron: bool) -> StepFormat:
    source = library_files()["communicators"]["source"]

    def rows(plan: Plan, facts: ModelFacts) -> list[Row]:
        groups, paths = communicators.groups_of(plan)
        by_name = communicators.fields()
        return [
            Row(f"{group}.{option}", value, paths[group, option], by_name[option].meaning(value), source)
            for group, options in groups.items()
            for option, value in options.items()
        ]

    def text(rows: Sequence[Row], head: str) -> str:
        groups: dict[str, dict[str, Any]] = {}
        for row in rows:
            group, _, option = row.name.partition(".")
            groups.setdefault(group, {})[option] = row.value
        notes = [*head.splitlines(), *(f"{row.name}: {row.note}" for row in rows)]
        body = communicators.yaml_text(groups) if megatron else communicators.python_text(groups)
        return "".join(f"# {note}\n" for note in notes) + body

    def read(text: str, name: str, facts: ModelFacts, plan: dict[str, Any]) -> Unplanned:
        groups = communicators.read_yaml(text, name) if megatron else communicators.read_python(text, name)
        return communicators.read_groups(groups, plan, facts, megatron=megatron)

    return StepFormat(rows, text, read, of_calls=False)


# Iris


def _iris_rows(plan: Plan, facts: ModelFacts) -> list[Row]:
    arch = iris_table.arch_of(facts.gpu)
    if arch is None:
        rule = f"is of AMD's GPUs whose name of the architecture is known, and the step is on {facts.gpu or 'none'}"
        raise ConfigError([Problem("to", rule, "iris", "name a system of MI300X or later")])
    source = library_files()["iris"]["source"]
    configs = iris_table.configs(facts.calls, plan, arch, facts.num_cus)
    meaning = "workgroups of the GEMM, of which the collective takes the rest, and its tile"
    return [Row(key, config, [f"sites.{site}"], meaning, source) for key, (site, config) in configs.items()]


def _iris_text(rows: Sequence[Row], head: str) -> str:
    return iris_table.table_text({row.name: row.value for row in rows})  # JSON has no comments


def _iris_read(text: str, name: str, facts: ModelFacts, plan: dict[str, Any]) -> Unplanned:
    return Unplanned(unread=iris_table.read_entries(iris_table.read_table(text, name), facts.calls, plan))


STEP_FORMATS: Mapping[str, StepFormat] = {
    "nccl_tuner": _tuner("nccl"),
    "rccl_tuner": _tuner("rccl"),
    "megatron_communicators": _communicators(megatron=True),
    "process_groups": _communicators(megatron=False),
    "iris": StepFormat(_iris_rows, _iris_text, _iris_read),
}
"""Formats of files that are of single collectives or communicators."""
