"""The study of a finished run, planned again as its recorded command was."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dse.config.compose import request
from dse.errors import ConfigError, Problem
from dse.results.finished_run import Finished
from dse.results.output_files import refused
from dse.study.plan import Plan, plan


@dataclass(frozen=True)
class Present:
    """What the present command line says of a study that is planned again.

    folder: of the user's own configuration, if it is not where it was. command: the program that may be started.
    """

    folder: Path | None = None
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Present:
        """Of `config_dir=` and `command=`. Raises ConfigError."""
        try:
            words = tuple(shlex.split(given.get("command", "")))
        except ValueError as error:
            way = "quote it as a shell takes it"
            raise ConfigError([Problem("command", f"cannot be split: {error}", given["command"], way)]) from None
        return cls(Path(given["config_dir"]) if "config_dir" in given else None, words)


def plan_again(run: Finished, present: Present) -> Plan:
    """The study of a finished run, planned as its command was.

    What was recorded may be somebody else's, so it starts no program that the present command line does not name.
    Raises ConfigError.
    """
    recorded = run.made["config_dir"]
    overrides = run.made.get("overrides", run.made["command"][3:])
    if not isinstance(overrides, list) or not all(isinstance(word, str) for word in overrides):
        raise refused(run.folder / "provenance.json", "holds overrides that are no list of words")
    planned = plan(request(overrides, present.folder or (Path(recorded) if recorded else None)))
    for spec in (planned.spec, *(level.spec for level in planned.levels)):
        program = tuple(getattr(spec.make(), "program", ()))
        if program and program != present.command:
            told = shlex.join(program)
            rule = f"was recorded with a program that this command line does not name: {told}"
            way = f"look at it, and if it is yours add command={shlex.quote(told)}"
            raise ConfigError([Problem(spec.name, rule, way_out=way)])
    return planned
