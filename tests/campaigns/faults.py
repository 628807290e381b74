"""The survival matrix: every fault, what injects it, and whether dse survives it (docs/explanation/faults.md)."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "faults.md"
BAD = ("failed", "not run")

_HEAD = """\
# Faults

dse promises *at-least-once evaluation, exactly-once recorded result*: whatever happens to a process, a disk or a
server, a result that was recorded is neither lost nor altered, and the same command goes on where it was left. At
worst, the points in flight are evaluated again.

`make faults` injects every fault below and writes this page; a quick part of it is in `make test`. The tests named are
where to see what exactly is done. Kills by the hundred: `tests/campaigns/kills.py`.

"""


@dataclass(frozen=True)
class Fault:
    """A row of the matrix. tests: file::function, in `tests/`; without: what is not covered, and why."""

    name: str
    fault: str
    seen: str
    by: str
    tests: tuple[str, ...]
    without: str = ""


def faults() -> list[Fault]:
    """The matrix as written in `faults.yaml`."""
    held = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text("utf-8"))
    return [Fault(name, **{**row, "tests": tuple(row["tests"])}) for name, row in held.items()]


def run(names: Iterable[str]) -> tuple[int, dict[str, list[str]]]:
    """Run tests in full; pytest's exit code, and the outcomes of each, a word for every set of its parameters."""
    ids = [f"tests/{file}.py::{function}" for file, _, function in (name.partition("::") for name in names)]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.xml"
        command = [sys.executable, "-m", "pytest", "--tb=short", f"--junitxml={record}", *ids]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "DSE_FAULTS": "all"}, check=False).returncode
        return code, _outcomes(record) if record.is_file() else {}


def _outcomes(record: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(record).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '').partition('[')[0]}"
        bad = case.find("failure") is not None or case.find("error") is not None
        word = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        found.setdefault(name, []).append(word)
    return found


def verdict(fault: Fault, outcomes: Mapping[str, list[str]]) -> str:
    """What the tests say of a fault; a test that did not run is no pass."""
    words = [word for name in fault.tests for word in outcomes.get(name, ["not run"])]
    for bad in BAD:
        if bad in words:
            return f"**{bad}**"
    if not words or set(words) == {"skipped"}:
        return "not covered"
    skipped = f", {words.count('skipped')} skipped here" if "skipped" in words else ""
    return f"{'partly ' if fault.without else ''}passed ({words.count('passed')}{skipped})"


def page(outcomes: Mapping[str, list[str]], took_s: float) -> str:
    """The matrix as Markdown."""
    made = ", ".join(f"{name} {version(name)}" for name in ("sqlalchemy", "mlflow", "optuna", "hydra-core"))
    where = f"Python {platform.python_version()}, {made}"
    lines = [f"`make faults` on {datetime.now(UTC):%Y-%m-%d}, {took_s / 60:.0f} minutes, {where}.", ""]
    lines += ["| | fault | what one sees | injected by | outcome |", "|---|---|---|---|---|"]
    for one in faults():
        short = f"; not covered: {one.without}" if one.without else ""
        cells = (one.name, one.fault, one.seen, one.by, verdict(one, outcomes) + short)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    tests = [f"{one.name}: {', '.join(f'`{name}`' for name in one.tests)}" for one in faults() if one.tests]
    return _HEAD + "\n".join([*lines, "", "## Tests", "", *(f"- {line}" for line in tests)]) + "\n"


def main() -> int:
    """Run every test of the matrix once and write the page; 1 if any failed or did not run."""
    argparse.ArgumentParser(prog="python -m tests.campaigns.faults", description=__doc__).parse_args()
    began = time.monotonic()
    code, outcomes = run(dict.fromkeys(name for one in faults() for name in one.tests))
    PAGE.write_text(page(outcomes, time.monotonic() - began), encoding="utf-8")
    bad = [one.name for one in faults() if verdict(one, outcomes).strip("*") in BAD]
    print(f"{len(outcomes)} tests, written to {PAGE.relative_to(ROOT)}; failed or not run: {', '.join(bad) or 'none'}")
    return 1 if bad or code else 0


if __name__ == "__main__":
    sys.exit(main())
