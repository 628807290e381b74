"""Plan of a finished run, made again from its recorded command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.config.compose import request
from dse.config.options import problems_of_files
from dse.errors import ConfigError, Problem
from dse.errors.parsing import parse_json
from dse.evaluation.evaluators import ExecutorSettings
from dse.results.output_files import file_error
from dse.results.run_folder import FinishedRun
from dse.space import get_path
from dse.study.plan import Plan, plan

if TYPE_CHECKING:
    from sqlalchemy import Row

_WAY = "look at it, and if it is yours run the study again and type it"


@dataclass(frozen=True)
class Present:
    """Parts of the present command line that concern a study planned again.

    folder: of the user's own configuration, if it has moved. command: the program that may be started.
    """

    folder: Path | None = None
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Present:
        """Build from `config_dir=` and `command=`. Raises ConfigError."""
        try:
            words = tuple(shlex.split(options.get("command", "")))
        except ValueError as error:
            way = "quote it as a shell takes it"
            raise ConfigError([Problem("command", f"cannot be split: {error}", options["command"], way)]) from None
        return cls(Path(options["config_dir"]) if "config_dir" in options else None, words)


def _on_this_machine(planned: Plan) -> Plan:
    """A plan whose points are evaluated here: the cluster of a record may be anybody's, and what it answers is run."""
    # settings of an evaluator of its own are left out
    common = planned.settings.executor.model_dump(include=set(ExecutorSettings.model_fields))
    executor = ExecutorSettings.model_validate({**common, "evaluator": "local"})
    return replace(planned, settings=planned.settings.model_copy(update={"executor": executor}))


def plan_words(words: Sequence[str]) -> Plan:
    """Plan the study of a command line. Raises ConfigError."""
    return plan(request(words))


def present_value(words: Sequence[str], folder: Path | None, path: str) -> Any:
    """The value at a dotted path of the configuration that a command line means now; None where there is none."""
    return get_path(request(words, folder).tree, path)


def plan_again(run: FinishedRun, present: Present) -> Plan:
    """Plan the study of a finished run as its command did (`plan_recorded`). Raises ConfigError."""
    # older runs recorded the whole command: python -m dse and the overrides
    overrides = run.provenance.get("overrides", run.provenance["command"][3:])
    if not isinstance(overrides, list) or not all(isinstance(word, str) for word in overrides):
        raise file_error(run.folder / "provenance.json", "holds overrides that are no list of words")
    return plan_recorded(overrides, run.provenance["config_dir"], present)


def plan_recorded(overrides: Sequence[str], folder: str | None, present: Present) -> Plan:
    """Plan the study of a recorded command line. folder: of the configuration of its user.

    The record may be somebody else's, so no program is started that the present command line does not name.
    Raises ConfigError.
    """
    recorded = request(overrides, present.folder or (Path(folder) if folder else None))
    problems = problems_of_files(recorded.tree)
    # files that another user names must not be read
    if settings := [problem for problem in problems if problem.path.startswith("executor.settings.")]:
        raise ConfigError(replace(problem, rule=f"was recorded: {problem.rule}", way_out=_WAY) for problem in settings)
    planned = _on_this_machine(plan(recorded))
    for spec in (planned.spec, *(level.spec for level in planned.levels)):
        program = tuple(getattr(spec.make(), "program", ()))  # of backends that start one
        if program and program != present.command:
            command_line = shlex.join(program)
            rule = f"was recorded with a program that this command line does not name: {command_line}"
            way = f"look at it, and if it is yours add command={shlex.quote(command_line)}"
            raise ConfigError([Problem(spec.name, rule, way_out=way)])
    return planned


_OF_A_CLIENT = ("store", "executor", "tracking", "output_dir", "figures", "resume", "timeline", "verbose", "beside")
"""Sections that say how a client runs, which others that plan its study leave out."""


def plan_stored(row: Row[Any], present: Present) -> Plan:
    """Plan a study of the store from its record. Raises ConfigError."""
    words = parse_json(row.command, "command")
    # `group.key=value` and `group=option`
    overrides = [word for word in words if re.split(r"[.=]", word.lstrip("+~"), maxsplit=1)[0] not in _OF_A_CLIENT]
    return plan_recorded(overrides, parse_json(row.provenance, "provenance").get("config_dir"), present)
