"""Files from strangers: each case, the plug-ins' among them, gives its right answer (`benchmarks.field`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from benchmarks.field import cases, trials
from tests.campaigns.forked import CommandEnd
from tests.support import REPOSITORY


def field(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.field", "--json", *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.more
@pytest.mark.one_in(9)
@pytest.mark.parametrize("part", range(9))
def test_every_case_of_the_field_is_right(part: int, tmp_path: Path) -> None:
    sample = cases()[part::9]
    for case in sample:
        (tmp_path / case.name).symlink_to(case)
    done = field("--data", str(tmp_path))
    counts = json.loads(done.stdout)
    assert (counts["wrong"], counts["tracebacks"]) == (0, 0), done.stderr
    assert counts["cases"] == len(sample) > 3, done.stderr


def test_each_case_says_what_is_right_and_holds_it() -> None:
    for case in cases():
        assert "\nRight: " in (case / "README.md").read_text("utf-8"), case
        assert trials(case), f"{case}: has no check.yaml"


def test_what_is_wrong_with_a_case_is_told(tmp_path: Path) -> None:
    case = tmp_path / "wrong"
    case.mkdir()
    (case / "README.md").write_text("Right: 7", "utf-8")
    number = {"of": r"(\d+)\.\d+", "is": 7_000_000}
    check = {"command": ["--version"], "says": ["no such words"], "never": ["dse"], "values": [number], "exit": 3}
    (case / "check.yaml").write_text(yaml.safe_dump(check), "utf-8")
    (trial,) = trials(case)
    problems = "\n".join(trial.check.problems(CommandEnd(trial, case, 0, 1.0, 1.0, "dse 0.4.0", "")))
    for words in ("exit code 0, right is 3", "nothing matches 'no such words'", "'dse' matches", "right is 7e+06"):
        assert words in problems
    (case / "check.yaml").write_text("command: [--version]\nsay: [dse]\n", "utf-8")
    with pytest.raises(ValidationError, match="say"):
        trials(case)
