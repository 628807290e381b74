"""Which kinds of files are equal when they are written, read back as a plan, and written again.

Steps and plans are those of `read_back` in `conf/data/library_files.yaml`, each with the tools that it is for; a file
counts where it comes back from all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dse_deploy.command import nearest, write_all
from dse_deploy.facts import UNKNOWN, ModelFacts
from dse_deploy.planned_step import PlannedStep
from dse_deploy.settings import Tool, tools
from dse_deploy.step_files import STEP_FORMATS
from dse_deploy.tuner_file import library_files
from studies.plan.plan_file import Plan, leaves_of

_PLAN_NAME = "plan.yaml"


def files_read_back() -> dict[str, bool]:
    """Tool and file -> whether what is written comes back.

    A file comes back if its plan, read and written again, gives the same text, and if what is read of the plan is what
    was written. A file with no setting does not come back. Raises ConfigError where a step breaks a rule.
    """
    kinds = dict[str, bool]()
    for name, equal in _kinds():
        kinds[name] = kinds.get(name, True) and equal
    return kinds


def count_read_back() -> int:
    """How many kinds of files are equal when they are read back."""
    return sum(files_read_back().values())


def _kinds() -> Iterator[tuple[str, bool]]:
    for entry in library_files()["read_back"]:
        for name in entry["tools"]:
            tool, plan = tools()[name], entry["plan"]
            facts = _facts(tuple(entry["step"])) if _is_of_step(tool) else UNKNOWN
            yield from ((f"{name}: {file}", equal) for file, equal in _compared(tool, plan, facts).items())


def _is_of_step(tool: Tool) -> bool:
    return tool.is_of_calls or any(file.format in STEP_FORMATS for file in tool.files)


@cache
def _facts(step: tuple[str, ...]) -> ModelFacts:
    planned = PlannedStep.of(Path(), step)
    return UNKNOWN if planned is None else planned.facts(planned.tree)


def _compared(tool: Tool, plan: Plan, facts: ModelFacts) -> Mapping[str, bool]:
    """File of a tool -> whether it comes back."""
    written = write_all(tool, plan, _PLAN_NAME, facts)
    read = nearest(tool, plan, written, facts)
    again = write_all(tool, read, _PLAN_NAME, facts)
    paths = {path for part in written.values() for row in part.rows for path in row.paths}
    same = all(_same(dict(leaves_of(plan)).get(path), dict(leaves_of(read)).get(path)) for path in paths)
    return {name: same and bool(part.rows) and part.text == again[name].text for name, part in written.items()}


def _same(left: Any, right: Any) -> bool:
    return str(left).lower() == str(right).lower()
