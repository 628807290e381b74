"""The survival matrix: every fault, what injects it, and whether dse survives it.

`python -m tests.campaigns.faults` runs the tests of all faults and records their outcomes; `--show` prints the matrix
with the recorded outcomes, and runs nothing. The documentation site has it as a page.
"""

from __future__ import annotations

import argparse
import json
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
RECORD = ROOT / "benchmarks" / "records" / "faults.json"
BAD = ("failed", "not run")

_HEAD = """\
# Faults

dse evaluates a point at least once and records its result exactly once: whatever happens to a process, a disk or a
server, a recorded result is neither lost nor altered, and the same command goes on where it was left.

`make faults` injects every fault below. The tests named by a row of `tests/campaigns/faults.yaml` show how; `make test`
runs a quick part of them, and `benchmarks/kills.py` kills studies by the hundred.

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
    rows = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text("utf-8"))
    return [Fault(name, **{**row, "tests": tuple(row["tests"])}) for name, row in rows.items()]


def run(names: Iterable[str]) -> tuple[int, dict[str, list[str]]]:
    """Run tests in full; pytest's exit code, and the outcomes of each, a word for every set of its parameters."""
    ids = [f"tests/{file}.py::{function}" for file, _, function in (name.partition("::") for name in names)]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.xml"
        command = [sys.executable, "-m", "pytest", "--tb=short", "-m", "", f"--junitxml={record}", *ids]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "DSE_FAULTS": "all"}, check=False).returncode
        return code, _outcomes(record) if record.is_file() else {}


def _outcomes(record: Path) -> dict[str, list[str]]:
    words: dict[str, list[str]] = {}
    for case in ElementTree.parse(record).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '').partition('[')[0]}"
        bad = case.find("failure") is not None or case.find("error") is not None
        word = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        words.setdefault(name, []).append(word)
    return words


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


def record(outcomes: Mapping[str, list[str]], took_s: float) -> None:
    """Write the outcome of each fault, and what it was found with."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("sqlalchemy", "mlflow", "optuna", "hydra-core"))
    run = f"on {datetime.now(UTC):%Y-%m-%d}, {took_s / 60:.0f} minutes, Python {platform.python_version()}, {packages}"
    verdicts = {fault.name: verdict(fault, outcomes) for fault in faults()}
    RECORD.write_text(json.dumps({"run": run, "outcomes": verdicts}, indent=1) + "\n", encoding="utf-8")


def page() -> str:
    """The matrix as Markdown, with the recorded outcomes."""
    recorded = json.loads(RECORD.read_text("utf-8"))
    lines = [f"`make faults` {recorded['run']}.", ""]
    lines += ["| | fault | what one sees | injected by | outcome |", "|---|---|---|---|---|"]
    for fault in faults():
        short = f"; not covered: {fault.without}" if fault.without else ""
        cells = (fault.name, fault.fault, fault.seen, fault.by, recorded["outcomes"][fault.name] + short)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return _HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Run every test of the matrix once and record the outcomes; 1 if any failed or did not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print the matrix as it is recorded")
    if parser.parse_args().show:
        print(page())
        return 0
    began = time.monotonic()
    code, outcomes = run(dict.fromkeys(name for fault in faults() for name in fault.tests))
    record(outcomes, time.monotonic() - began)
    bad = [fault.name for fault in faults() if verdict(fault, outcomes).strip("*") in BAD]
    print(f"{len(outcomes)} tests, in {RECORD.relative_to(ROOT)}; failed or not run: {', '.join(bad) or 'none'}")
    return 1 if bad or code else 0


if __name__ == "__main__":
    sys.exit(main())
