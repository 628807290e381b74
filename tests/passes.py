"""What a pass of CI runs: what the one before it skipped, with no skip left, and each nightly test on one day a week.

A pass of `--skipped-to FILE` writes the tests that it skipped, one a line, as `pytest @FILE` reads them; in a pass of
`--no-skips` each skip is a failure, but for what cannot be installed.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

DAYS = 7
DAY_VARIABLE = "DSE_DAY"
"""Names the day of the week whose nightly tests `make more` runs, 1 (Monday) to 7, if not today."""
LAWFUL = {
    r"^measures where there is a GPU$": "the machine, which has a GPU, measures instead",
    r"^(this machine has one core|a single core compiles nothing ahead)$": "two cores",
    r"^ASTRA-sim's program is not on the path$": "a program that no package holds",
    r"^the record is of another version of ": "the versions of the last record, with which alone counts compare",
    r"^(another clang|another Triton) is installed than the first line names$": "the compiler that wrote the texts",
    r"^NVIDIA's ptxas is not on the path$": "a program of NVIDIA's toolkit",
    r"is absent: the published values live beside the repository$": "tables that no package holds",
    r"is absent: the tables that numbers are fitted to are not shipped$": "these tables",
    r"^measured collectives are not in this checkout$": "these tables",
    r"^takes long: make faults runs it$": "another target",
}
"""Reasons (as patterns) of skips that nothing that can be installed here would end -> what they wait for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of passes."""
    group = parser.getgroup("passes of CI")
    group.addoption("--skipped-to", metavar="FILE", help="write the tests that are skipped, one a line")
    group.addoption(
        "--no-skips", action="store_true", help="a skipped test fails, unless it waits for what cannot be installed"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Note what is skipped where that is asked for."""
    if (file := config.getoption("skipped_to")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(file)))


def day_of(nodeid: str) -> int:
    """The day of the ISO week, 1 (Monday) to 7, on which a nightly test is run; the same on all machines."""
    return hashlib.sha256(nodeid.encode("utf-8")).digest()[0] % DAYS + 1


def today() -> int:
    """The day of the ISO week, or the one that is asked for."""
    return int(os.environ.get(DAY_VARIABLE) or datetime.date.today().isocalendar().weekday)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the nightly tests of this day, and as `more` those of plug-ins whose models are under study."""
    day, shelves = today(), research_folders()
    for item in items:
        if any(folder in item.path.parents for folder in shelves):
            item.add_marker("more")
        if item.get_closest_marker("nightly") is not None and day_of(item.nodeid) == day:
            item.add_marker("tonight")


def research_folders() -> list[Path]:
    """Folders of plug-ins that declare themselves as research (`dse.plugins`)."""
    packages = Path(__file__).parents[1].glob("plugins/*/dse_*/__init__.py")
    return [path.parents[1] for path in packages if re.search("^RESEARCH = ", path.read_text("utf-8"), re.MULTILINE)]


def is_lawful(reason: str) -> bool:
    """Whether a skip waits for what cannot be installed."""
    return any(re.search(pattern, reason) for pattern in LAWFUL)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")


def _refuse(report: Any) -> None:
    """Let what is skipped fail."""
    if report.skipped and not hasattr(report, "wasxfail") and not is_lawful(_reason(report)):
        report.longrepr = f"was skipped, and nothing may be: {_reason(report)}"
        report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Turn a skip into a failure where that is asked for."""
    report = yield
    if item.config.getoption("no_skips"):
        _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Turn the skip of a whole module into a failure where that is asked for."""
    report = yield
    if collector.config.getoption("no_skips"):
        _refuse(report)
    return report


class Recorder:
    """Notes what is skipped, in the process that reports."""

    def __init__(self, file: Path) -> None:
        self._file, self._skipped = file, dict[str, None]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that is skipped as a whole."""
        if report.skipped:
            self._skipped[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        """Write them."""
        self._file.write_text("".join(f"{nodeid}\n" for nodeid in self._skipped), encoding="utf-8")


def _library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: make extras")


@pytest.fixture(scope="session")
def dask() -> Any:
    """The library of Dask's clusters; tests of it are skipped where it is not installed."""
    return _library("distributed")


@pytest.fixture(scope="session")
def ortools() -> Any:
    """The solver that proves optima; tests of it are skipped where it is not installed."""
    return _library("ortools")


@pytest.fixture(scope="session")
def charts() -> Any:
    """The engine of interactive charts; tests of it are skipped where it is not installed."""
    return _library("vl_convert")
