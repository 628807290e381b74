"""Resuming: the same command goes on where it was, another one is told from it, and what fails is data."""

from __future__ import annotations

import importlib
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sqlalchemy import select

from dse import plugins
from dse.cli import main
from dse.errors import Broken
from dse.evaluation.evaluators import Services
from dse.evaluation.workers import SignalInterrupt
from dse.space import Knob
from dse.store.result_store import Store, leases, owners, studies
from dse.study.plan import Plan
from dse.study.resume import Begun, begin, question
from dse.study.run import run
from tests import toy
from tests.support import SERIAL

KNOBS = (Knob("thing.mode", ("flat", "bent")), Knob("thing.bend", ("firm", "loose")), Knob("thing.x", tuple(range(8))))


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with toy.installed(tmp_path / "toybox"):
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'results.db'}")


def planned(
    knobs: Sequence[Knob] = KNOBS, overrides: Sequence[str] = (), search: str = "exhaustive", **more: Any
) -> Plan:
    """A study of the toy. overrides: its command. more: sections of its settings, and `faults`."""
    faults = more.pop("faults", ())
    tree = toy.settings(search, more.pop("trials", 10_000)) | more
    toy_plan = toy.planned(knobs, tree, faults)
    return replace(toy_plan, request=replace(toy_plan.request, overrides=tuple(overrides)))


def study(plan: Plan, store: Store, folder: Path, stopping: Callable[[], bool] = lambda: False) -> Begun:
    """A study as a command runs it; its table is `results.parquet` of the folder."""
    folder.mkdir(exist_ok=True)
    begun = begin(store, plan, {"command": list(plan.request.overrides)})
    try:
        run(plan, folder / "results.parquet", Services(begun.session, stopping))
    finally:
        begun.session.leave()
    begun.finish()
    return begun


def evaluated(plan: Plan) -> int:
    """How many designs the plan's backend, in this process, was asked for so far."""
    return len(plan.backend.evaluated)  # type: ignore[attr-defined]


def table(folder: Path) -> bytes:
    return (folder / "results.parquet").read_bytes()


# The same command


@pytest.mark.one_in(4, 1)
@pytest.mark.slow
@pytest.mark.parametrize(("search", "trials"), [("exhaustive", 10_000), ("random", 20), ("nsga2", 20), ("tpe", 20)])
@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_a_study_that_is_interrupted_goes_on_and_ends_as_if_it_had_not_been(
    store: Store, tmp_path: Path, search: str, trials: int, cut: int
) -> None:
    knobs = KNOBS if search == "exhaustive" else (*KNOBS, Knob("thing.y", low=0.0, high=1.0))
    marks = ((1, f"{search} {cut}"),)  # a backend of its own, to count its calls
    plan = planned(knobs, search=search, trials=trials, faults=marks)
    full = planned(knobs, search=search, trials=trials, faults=((1, f"{search} {cut} whole"),))
    study(full, Store(f"sqlite:///{tmp_path / 'whole.db'}"), tmp_path / "whole")
    looks = itertools.count()
    with pytest.raises(SignalInterrupt):
        study(plan, store, tmp_path / "cut", lambda: next(looks) >= cut)
    before = evaluated(plan)
    assert not (tmp_path / "cut" / "results.parquet").exists()
    begun = study(plan, store, tmp_path / "again")
    assert begun.resumed
    assert begun.done == before
    assert evaluated(plan) == evaluated(full)
    resumed, other = (
        pd.read_parquet(tmp_path / "again" / "results.parquet"),
        pd.read_parquet(tmp_path / "whole" / "results.parquet"),
    )
    pd.testing.assert_frame_equal(resumed.drop(columns=["key", "baseline"]), other.drop(columns=["key", "baseline"]))


def test_a_study_that_is_repeated_evaluates_nothing_and_gives_the_same_bytes(store: Store, tmp_path: Path) -> None:
    plan = planned(faults=((3, "raises"), (4, "nan"), (5, "unsupported"), (6, "repeated")))
    first = study(plan, store, tmp_path / "first")
    count = evaluated(plan)
    second = study(plan, store, tmp_path / "second")
    assert (first.study, first.resumed, second.study, second.resumed) == (1, False, 1, True)
    assert (second.done, evaluated(plan)) == (2 * 3 * 8, count)
    assert table(tmp_path / "first") == table(tmp_path / "second")
    rows = store.database.read(lambda connection: connection.execute(select(studies.c.state)).scalars().all())
    assert rows == ["finished"]
    assert not store.database.read(lambda connection: connection.execute(select(leases)).all())
    assert not store.database.read(lambda connection: connection.execute(select(owners)).all())


def test_points_that_another_study_had_evaluated_are_hits_and_recorded_as_such(store: Store, tmp_path: Path) -> None:
    small = planned((Knob("thing.x", (1, 2, 3)),), ["small"], faults=((9, "hits"),))
    large = planned((Knob("thing.x", (1.0, 2.0, 3.0, 4.0)),), ["large"], faults=((9, "hits"),))
    study(small, store, tmp_path / "small")
    begun = study(large, store, tmp_path / "large")
    assert begun.study == 2
    assert evaluated(large) == 2 * (4 + 1)  # both scenarios, and their baseline
    recalled = store.database.read(lambda connection: connection.execute(select(studies.c.recalled)).scalars().all())
    assert [json.loads(text) for text in recalled] == [{}, {"1": 8}]


def test_recorded_failures_are_kept_or_on_demand_tried_again(store: Store, tmp_path: Path) -> None:
    plan = planned(faults=((3, "raises"), (2, "kept")))
    study(plan, store, tmp_path / "first")
    count = evaluated(plan)
    again = planned(faults=((3, "raises"), (2, "kept")), store={"name": "sqlite", "retry": ["failed"]})
    begun = study(again, store, tmp_path / "again")
    assert begun.done == 2 * 3 * 7
    assert 2 * 3 <= evaluated(plan) - count < count


# Another command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"knobs": (*KNOBS[:2], Knob("thing.x", tuple(range(9))))}, "space.thing.x was 0, 1, "),
        ({"faults": ((1, "another"),)}, "simulator.faults was "),
        (
            {"study": {"name": "toy", "module": "ficco", "objectives": ["gain"], "baseline": {"thing.x": 0}}},
            "study.objectives",
        ),
        (
            {"study": {"name": "toy", "module": "ficco", "objectives": ["time_s", "gain"], "baseline": {"thing.x": 1}}},
            "baseline",
        ),
    ],
    ids=["space", "parameters", "objectives", "baseline"],
)
def test_a_study_that_is_asked_otherwise_is_a_new_one_and_one_line_says_so(
    store: Store, tmp_path: Path, change: Mapping[str, Any], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study(planned(), store, tmp_path / "first")
    capsys.readouterr()
    begun = begin(store, planned(**change), {})
    assert (begun.study, begun.resumed) == (2, False)
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line
    assert "resume=accept" in line
    begun.session.leave()


def test_a_fork_is_a_study_of_its_own_and_goes_on_by_itself(store: Store, tmp_path: Path) -> None:
    study(planned(), store, tmp_path / "first")
    other = (*KNOBS[:2], Knob("thing.x", (1, 2)))
    assert study(planned(other), store, tmp_path / "fork").study == 2
    assert study(planned(other), store, tmp_path / "again").study == 2
    assert study(planned(), store, tmp_path / "first").study == 1


def test_results_of_an_older_version_count_where_they_are_accepted_and_only_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(faults=((2, "versions"),))
    study(plan, store, tmp_path / "old")
    count = evaluated(plan)
    monkeypatch.setattr(toy.Fixed, "version", "2")
    accepted = study(planned(faults=((2, "versions"),), resume="accept"), store, tmp_path / "accepted")
    assert (accepted.study, evaluated(plan)) == (1, count)
    assert study(plan, store, tmp_path / "again").study == 1
    assert evaluated(plan) == count
    other = planned((Knob("thing.x", (1, 2)),), ["another command"], faults=((2, "versions"),))
    study(other, store, tmp_path / "other")
    assert evaluated(plan) == count + 2 * (2 + 1)


@pytest.mark.slow
def test_results_of_other_code_are_evaluated_again_unless_they_are_accepted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend of a user whose name, version and parameters stay as they are."""
    toy.distribution(tmp_path, "ownbox", simulators="own = own_backend")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "from tests.toy import Fixed\n\nclass BACKEND(Fixed):\n    scale = 1.0\n"

    def evaluations(text: str, place: str, resume: str = "auto") -> tuple[int, int]:
        """Number of the study, and how many designs were evaluated."""
        (tmp_path / "own_backend.py").write_text(text)
        sys.modules.pop("own_backend", None)
        importlib.invalidate_caches()
        plugins.refresh()
        plan = planned(simulator={"name": "own", "backend": "own"}, resume=resume)
        return study(plan, store, tmp_path / place).study, evaluated(plan)

    first, count = evaluations(code, "first")
    assert evaluations(code.replace("1.0", "1.0  # a comment"), "comment") == (first, 0)
    capsys.readouterr()
    accepted = evaluations(code.replace("1.0", "2.0"), "accepted", "accept")
    assert accepted == (first, 0)
    assert evaluations(code.replace("1.0", "3.0"), "again") == (first + 1, count)
    assert "the code or the data of its simulator has changed" in capsys.readouterr().err
    assert evaluations(code, "back")[1] == 0


def test_no_study_stands_in_the_way_of_another_command_and_an_unfinished_one_is_named_to_its_repeats(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = planned((Knob("thing.x", (1, 2)),), ["another"])
    study(planned(), store, tmp_path / "first")
    assert not study(other, store, tmp_path / "other").resumed
    third = planned((Knob("thing.x", (1, 2, 3)),), ["a third"])
    with pytest.raises(SignalInterrupt):
        study(third, store, tmp_path / "third", lambda: True)
    fourth = planned((Knob("thing.x", (4, 5)),), ["a fourth"])
    begun = begin(store, fourth, {})
    assert (begun.study, begun.resumed) == (4, False)
    assert "did not finish" not in capsys.readouterr().err
    begun.session.leave()
    repeated = begin(store, planned((Knob("thing.x", (1, 2, 5)),), ["a third"]), {})
    assert "new study: toy 3 did not finish (space.thing.x was" in capsys.readouterr().err
    repeated.session.leave()
    assert begin(store, third, {}).study == 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_units_numbers_labels_and_jobs_take_no_part_in_what_is_asked(jobs: int) -> None:
    plain = question(planned((Knob("thing.y", (1, 2)),)))
    tree: dict[str, Any] = {
        "executor": {"name": "other", "jobs": jobs},
        "tracking": {"name": "none", "uri": None, "description": "x"},
    }
    assert question(planned((Knob("thing.y", (1, 2)),), ["x"], **tree)) == plain
    assert question(planned((Knob("thing.y", (1, 3)),))) != plain


# Failures


def test_a_backend_that_fails_alike_every_time_stops_the_study_and_leaves_no_trace_of_it(
    store: Store, tmp_path: Path
) -> None:
    executor = {"name": "local", "jobs": 1, "broken_after": 4}
    plan = planned(executor=executor, faults=tuple((x, "raises") for x in range(2, 8)))
    with pytest.raises(Broken, match=r"4 points in a row failed alike .ZeroDivisionError: asked to fail"):
        study(plan, store, tmp_path / "broken")
    statuses = [result.status for result in _found(store)]
    assert statuses
    assert set(statuses) == {0}


def _found(store: Store) -> list[Any]:
    from dse.store.result_store import results

    return store.database.read(lambda connection: list(connection.execute(select(results))))


@pytest.mark.more
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("segv", "CRASH SIGSEGV: Fatal Python error: Segmentation fault"),
        ("kill", "CRASH SIGKILL (killed, or out of memory)"),
        ("exit", "EXIT 3: gone"),
        ("hang", "TIMEOUT after 1 s"),
        ("hog", "OUT OF MEMORY"),
    ],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_design_that_ends_its_worker_is_one_failure_with_its_reason_and_no_other_is_lost(
    fault: str, message: str, batch: int
) -> None:
    values = [1, 2, 3, 4, 5, 6]
    limits: dict[str, Any] = {
        "jobs": 2,
        "timeout_s": 1 if fault == "hang" else 30,
        "memory_bytes": 4e9,
        "max_retries": 1,
    }
    spec = toy.spec((3, fault), batch=batch)
    batches = [toy.grid(values[:4]), toy.grid(values[4:])]
    outcomes = [chunk[place] for chunk in toy.evaluate(spec, batches, **limits) for place in range(chunk.size)]
    alone = [chunk[0] for chunk in toy.evaluate(toy.spec(), [toy.grid([x]) for x in values])]
    assert outcomes[2].status == "failed"
    assert outcomes[2].reason.startswith(message)
    assert [*outcomes[:2], *outcomes[3:]] == [*alone[:2], *alone[3:]]


# Processes

SLOW = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from tests import toy
from pathlib import Path
from dse import cli, plugins
sys.path.insert(0, sys.argv[1])
plugins.refresh()
make = toy.Fixed._one
def slow(self, point):
    time.sleep(0.02)
    return make(self, point)
toy.Fixed._one = slow
"""

CONFIG = {
    "study/toys.yaml": """
# @package _global_
defaults:
  - override /system: null
  - override /workload: null
  - override /schedule: null
study: {name: toys, module: plain, objectives: [time_s, gain], baseline: {thing.x: 0}}
thing: {name: plain, x: 1, y: 0.0, mode: flat, bend: loose, grip: 0}
tool: {size: 1, weight: 0.5}
space: {thing: {x: "range(0,60)"}}
""",
    "simulator/toy.yaml": "name: toy\nbackend: toy\nfaults: []\nbatch: 1\n",
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A study of the toy as a command, at 20 ms a point."""
    for name, text in CONFIG.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text, encoding="utf-8")
    words = [
        "--config-dir",
        "conf",
        "study=toys",
        "simulator=toy",
        "tracking=none",
        "executor.jobs=1",
        "timeline=false",
    ]
    code = SLOW + f"sys.exit(cli.main({words!r} + sys.argv[2:]))"
    return [sys.executable, "-c", code, str(tmp_path / "toybox")]


def begun(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """A command that has recorded its first results."""
    done = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    file, deadline = folder / "outputs" / "results.db", time.monotonic() + 60
    while time.monotonic() < deadline and not (file.exists() and _count(file) >= 10):
        time.sleep(0.02)
    return done


def _count(file: Path) -> int:
    import sqlite3

    try:
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
            count: int = connection.execute("SELECT count(*) FROM results").fetchone()[0]
            return count
    except sqlite3.Error:
        return 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_study_told_to_stop_keeps_what_it_has_and_the_same_command_goes_on(
    tmp_path: Path, command: list[str], number: int, code: int
) -> None:
    done = begun(command, tmp_path)
    done.send_signal(number)
    _, message = done.communicate(timeout=60)
    assert done.returncode == code, message
    assert "what was evaluated is kept: type the same command to go on" in message
    count = _count(tmp_path / "outputs" / "results.db")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert f"resuming: {count} done, {120 - count} left" in again.stderr


@pytest.mark.more
def test_a_killed_study_goes_on_and_two_processes_share_one(tmp_path: Path, command: list[str]) -> None:
    done = begun(command, tmp_path)
    done.kill()
    done.communicate()
    first, other = (
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "ab"
    )
    messages = [process.communicate(timeout=120)[1] for process in (first, other)]
    assert (first.returncode, other.returncode) == (0, 0), messages
    assert any(
        "resuming: " in text for text in messages
    )  # and what was in flight, if it was not killed between two points
    tables = [path.read_bytes() for path in (tmp_path / "outputs" / "toys").glob("2*/results.parquet")]
    assert len(tables) == 2
    assert tables[0] == tables[1]
    assert _count(tmp_path / "outputs" / "results.db") == 120


@pytest.mark.slow
def test_a_store_elsewhere_needs_no_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SERIAL, "output_dir=a/new/one", f"store.url=sqlite:///{tmp_path}/else.db"]) == 0


@pytest.mark.slow
def test_a_full_disk_is_told_before_anything_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert main(["study=ficco_sweep", "schedule=serial", "workload.only=[g4]", "tracking=none", "figures=none"]) == 4
    assert "has room for 0 MiB" in capsys.readouterr().err
