"""Any program as a simulator: a design in as JSON or CSV, metrics out as JSON, one process per point.

The program is started from a list of words, never by a shell, in an empty scratch folder of its own, with few of the
environment's variables and within limits. Every failure of it is a result with a reason, and the search goes on.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dse.backend import Batch, Result, Results, Tree
from dse.errors import Problems, did_you_mean, validate_as
from simulators.external.outcome import complaint, judge_run, kills_for_memory, read_output
from simulators.external.process import check_room, run, scratch
from simulators.external.program import PLACE, ExternalProgram, ProgramCommand, hash_of_environment
from simulators.external.sections import SectionsBackend, leaves, relations

_VERSION = "1"  # of the interface: the input of a program and the parsing of its answer

_ALWAYS_PASSED = ("PATH", "HOME", "LANG")


class ExternalBackend(SectionsBackend):
    """A program as a backend; parameters: those of `ExternalProgram`. Raises ConfigError with all problems at once."""

    batch = 1  # a process each

    def __init__(self, **parameters: Any) -> None:
        program = validate_as(ExternalProgram, parameters, path="simulator")
        self._program, self._limits = program, program.limits()
        self._command = ProgramCommand.find(program, Path.cwd())
        self.metrics = {name: measure.metric() for name, measure in program.metrics.items()}
        self.relations = dict(relations(self.metrics))
        # all that an answer depends on, apart from the design
        parts = [_VERSION, program.version, self._command.content(), hash_of_environment(program.env)]
        self.version = "+".join(filter(None, parts))

    @property
    def program(self) -> tuple[str, ...]:
        """Words of the command, as configured."""
        return self._program.command

    def sections(self, tree: Tree) -> None:
        """Check that sections hold keys, and that the values named in the command exist; `scenarios` is optional."""
        super().sections(tree)
        check, values = Problems(), dict(leaves({name: part for name, part in tree.items() if name != "scenarios"}))
        for name in self._command.places:
            if name not in ("input", "output", *values):  # places of files, not values
                way = did_you_mean(name, ["input", "output", "here", *values])
                check.add("simulator.command", f"{{{name}}} is no value of the design", way_out=way)
        check.done()

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Run the program once per design."""
        return [Results.of([self._evaluate_design(design) for design in batch.designs()]) for batch in batches]

    def _evaluate_design(self, design: BaseModel) -> Result:
        # kills of this control group since then are likely this program's
        tree, limits, before = dict(design), self._limits, kills_for_memory()
        with scratch() as place:
            folder = place.folder
            check_room(folder)
            design_file, output = folder / f"input.{self._program.input}", folder / "output.json"
            design_file.write_text(_as_json(tree) if self._program.input == "json" else _as_csv(tree), encoding="utf-8")
            values = {"input": str(design_file), "output": str(output), **dict(leaves(tree))}
            used = set(self._command.places)
            command = [PLACE.sub(lambda match: _word_of(values, match), word) for word in self._command.words]
            stdin = Path(os.devnull) if "input" in used else design_file
            # few: results must not depend on what a shell happens to export
            ended = run(command, limits, place=place, stdin=stdin, variables=(*_ALWAYS_PASSED, *self._program.env))
            # a byte beyond the limit shows that there is more
            answer = read_output(output, limits.output_bytes + 1) if "output" in used else ended.stdout
            starved = kills_for_memory() > before
            result = judge_run(ended, limits, answer, metrics=self.metrics, starved=starved)
            if result.status == "failed":
                check_room(folder)  # a full disk is no failure of the program
        if result.status == "failed":
            # variables that were passed on may hold tokens
            secrets = {key: os.environ[key] for key in self._program.env if key in os.environ}
            stderr_tail = complaint(ended, self._program.error_chars, folder=folder, secrets=secrets)
            result = replace(result, reason="\n".join(filter(None, [result.reason, stderr_tail])))
        return replace(result, engine=self._command.name)


def _word_of(values: Mapping[str, Any], place: re.Match[str]) -> str:
    """Value of a placeholder as a word of a command line."""
    value = values[place[1]]
    return value if isinstance(value, str) else json.dumps(value)


def _as_json(tree: Tree) -> str:
    return json.dumps(tree, indent=1) + "\n"


def _as_csv(tree: Tree) -> str:
    """Format a tree as CSV with a row for every value: its dotted path and the value; lists as JSON."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "value"])
    rows.writerows([path, value if isinstance(value, str) else json.dumps(value)] for path, value in leaves(tree))
    return text.getvalue()
