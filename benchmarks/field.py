r"""Files from strangers, each a case with its right answer, and whether `python -m dse` gives it.

A case is a folder with its input, a README.md with a line `Right:` that says the right value, and a `check.yaml`:

    command: [profile import, profile=trace.json]   # words after `python -m dse`, typed in a copy of the folder
    exit: 0                                       # exit code; 0 where it is left out
    says: [2 collectives]                         # regular expressions that what is printed matches
    never: [no kernel of it communicates]         # ... and does not match
    values:                                       # numbers that are printed: group 1 of an expression
      - {of: '([\d.,]+) µs of communication', is: 200, within: 0.01}   # relative; 0 where it is left out

or a list of these, for several commands, each in a fresh copy. All white space of what is printed counts as one blank.
A folder without `check.yaml` is judged by the one of the same name in this repository, if there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dse import plugins
from tests.campaigns.forked import CommandEnd, Commands, import_all, show_progress

ROOT = Path(__file__).parents[1]
FIELDS = (ROOT / "tests" / "field", *sorted(ROOT.glob("plugins/*/tests/field")))
"""Folders of our cases: those of the core, and those of each plug-in."""
CHECK = "check.yaml"
_LIMIT_S = 180.0  # the first command of each kind compiles kernels


class Value(BaseModel):
    """A number that is printed. of: expression whose first group it is. within: relative tolerance."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    of: str
    right: float = Field(alias="is")
    within: float = 0.0

    def problem(self, printed: str) -> str:
        """What is wrong with the number in what was printed; nothing where it is right."""
        match = re.search(self.of, printed)
        if match is None:
            return f"nothing matches {self.of!r}"
        value = float(match[1].replace(",", ""))
        right = math.isclose(value, self.right, rel_tol=self.within, abs_tol=0.0)
        return "" if right else f"{match[0]!r} has {value:g}, right is {self.right:g} within {self.within:.1%}"


class Check(BaseModel):
    """One command and what it must print, see the module."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    command: tuple[str, ...]
    exit: int = 0
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()

    def problems(self, ended: CommandEnd[Any]) -> Iterator[str]:
        """What is wrong with how the command ended, one sentence each."""
        if ended.traceback or ended.hang:
            last = (ended.errors.strip().splitlines() or [""])[-1][:160]
            yield (
                f"does not end in {_LIMIT_S:.0f} s"
                if ended.hang
                else f"ends with {ended.code} and a traceback or a signal: {last}"
            )
            return
        if ended.code != self.exit:
            yield f"ends with exit code {ended.code}, right is {self.exit}"
        printed = " ".join(f"{ended.output}\n{ended.errors}".split())
        yield from (f"nothing matches {text!r}" for text in self.says if not re.search(text, printed))
        yield from (f"{text!r} matches what is printed" for text in self.never if re.search(text, printed))
        yield from filter(None, (value.problem(printed) for value in self.values))


_CHECKS = TypeAdapter(list[Check])


@dataclass(frozen=True)
class Trial:
    """One command of a case."""

    folder: Path
    check: Check


def trials(folder: Path) -> list[Trial]:
    """The commands of a case; none where no check is written for it."""
    paths = (folder / CHECK, *(field / folder.name / CHECK for field in FIELDS))
    path = next(filter(Path.exists, paths), None)
    if path is None:
        return []
    tree = yaml.safe_load(path.read_text("utf-8"))
    return [Trial(folder, check) for check in _CHECKS.validate_python(tree if isinstance(tree, list) else [tree])]


def run(cases: Sequence[Trial], jobs: int) -> Iterator[CommandEnd[Trial]]:
    """Run commands, some at a time; each as it ends."""
    import_all()
    commands, waiting = Commands[Trial](_LIMIT_S), list(enumerate(cases))[::-1]
    with tempfile.TemporaryDirectory(prefix="dse-field-") as place:
        while waiting or commands.running:
            while waiting and len(commands.running) < jobs:
                number, trial = waiting.pop()
                copy = Path(place, str(number))
                shutil.copytree(trial.folder, copy)
                for folder, _, _ in os.walk(copy):  # also of a folder that may only be read
                    Path(folder).chmod(0o700)
                commands.start(trial, trial.check.command, copy)
            for ended in commands.ended():
                yield ended
                shutil.rmtree(ended.folder, ignore_errors=True)


def judge(folders: Sequence[Path], jobs: int) -> tuple[dict[str, int], list[str]]:
    """Counts of cases, and a line for each thing that is wrong."""
    cases = {folder: trials(folder) for folder in folders}
    number, began = sum(map(len, cases.values())), time.monotonic()
    wrong, tracebacks = defaultdict[Path, list[str]](list), 0
    for done, ended in enumerate(run([trial for case in cases.values() for trial in case], jobs), start=1):
        line = shlex.join(["python", "-m", "dse", *ended.case.check.command])
        folder = ended.case.folder
        wrong[folder] += [f"{folder.name}: {text}\n  {line}" for text in ended.case.check.problems(ended)]
        tracebacks += ended.traceback or ended.hang
        show_progress(done, number, began)
    right = sum(not wrong[folder] for folder, case in cases.items() if case)
    judged = sum(map(bool, cases.values()))
    counts = {"cases": judged, "right": right, "wrong": judged - right, "tracebacks": tracebacks}
    unjudged = [f"{folder.name}: has no {CHECK}, and is not counted" for folder, case in cases.items() if not case]
    return counts, [*unjudged, *(line for lines in wrong.values() for line in lines)]


def cases() -> list[Path]:
    """Folders of our cases, those of a plug-in where it is installed."""
    return [path for field in FIELDS if _is_installed(field) for path in _folders(field)]


def _is_installed(field: Path) -> bool:
    """Tell whether the package whose cases a folder has is here; the core is."""
    return any(package.name in plugins.roots() for package in field.parents[1].glob("dse*"))


def _folders(data: Path) -> list[Path]:
    return [path.parent for path in sorted(data.glob("*/README.md"))]


def _print(counts: Mapping[str, int], lines: Sequence[str], *, as_json: bool) -> None:
    for line in lines:
        print(line, file=sys.stderr)
    text = "\n".join(f"{name:<11}{value:>6,}" for name, value in counts.items())
    print(json.dumps(counts, indent=2) if as_json else text)


def main(words: Sequence[str] | None = None) -> int:
    """Run every case of a folder and print how many are right; 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of cases, or all")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--data", type=Path, help="a folder of cases (ours)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args(words)
    folders = _folders(asked.data.resolve()) if asked.data else cases()
    counts, lines = judge([path for path in folders if not asked.only or path.name in asked.only], asked.jobs)
    _print(counts, lines, as_json=asked.json)
    return 1 if counts["wrong"] or not counts["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
