"""A signal to all processes of a study, as terminals and schedulers send it: one sentence, and no result of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import dse
from dse.evaluation.evaluators import SIGNALLED
from dse.evaluation.workers import SIGNALS

SIMULATOR = """\
defaults: [external, _self_]
name: mine
description: mine
command: [{python}, "{{here}}/mine.py"]
metrics: {{time_s: {{unit: s, meaning: time, goal: minimize, low: 0, high: null}}}}
"""
STUDY = """\
# @package _global_
defaults:
  - override /system: null
  - override /workload: null
  - override /schedule: null
  - override /simulator: mine
study: {name: mine, question: which?, module: plain, objectives: [time_s], baseline: {}}
case: {x: 1}
space: {case: {x: "range(1,60,1)"}}
"""
PROGRAM = """import time; time.sleep(0.1); print('{"time_s": 1}')"""
WORDS = ["run", "mine", "--config-dir=conf", "executor.jobs=2", "tracking=none", "figures=none", "fidelity=none"]


@pytest.fixture
def study(elsewhere: Path) -> Path:
    """A folder with a study of sixty runs of a program."""
    texts = {"study/mine.yaml": STUDY, "simulator/mine.yaml": SIMULATOR.format(python=sys.executable)}
    for name, text in texts.items():
        (elsewhere / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / "conf" / name).write_text(text, "utf-8")
    (elsewhere / "mine.py").write_text(PROGRAM, "utf-8")
    return elsewhere


def start(*more: str) -> subprocess.Popen[str]:
    """The study as a process group of its own."""
    command = [sys.executable, "-m", "dse", *WORDS, *more]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, and those that these have."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        children = [child for child, above in parents.items() if above == parent]
        yield from children
        waiting += children


def check_end(run: subprocess.Popen[str], number: signal.Signals) -> None:
    """A stopped study says so in a sentence, and its exit code names the signal."""
    _, errors = run.communicate(timeout=120)
    assert "Traceback" not in errors, errors
    assert "KeyError" not in errors, errors
    assert run.returncode in (128 + number, -number), errors  # the second: before it could catch any


@pytest.mark.more
@pytest.mark.one_in(3)
@pytest.mark.parametrize("executor", ["local", "dask"])
@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5, 4.0])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_the_group_while_workers_start_ends_in_a_sentence(
    number: signal.Signals, after_s: float, executor: str, study: Path
) -> None:
    if executor == "dask":
        pytest.importorskip(
            "distributed", reason="distributed is not installed: pip install 'overlap-dse-cluster[dask]'"
        )
    run = start(f"executor={executor}", "executor.jobs=2")
    time.sleep(after_s)
    with suppress(ProcessLookupError):
        os.killpg(run.pid, number)
    check_end(run, number)


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_all_processes_of_a_job_records_no_failure(number: signal.Signals, study: Path) -> None:
    run = start()
    time.sleep(4.0)
    for pid in [*descendants(run.pid), run.pid]:  # programs first: the worst order
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    check_end(run, number)
    done = start()
    _, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors
    assert (dse.load("mine")["status"] == "ok").all()


@pytest.mark.parametrize(
    ("text", "is_signal"),
    [
        ("CRASH SIGINT", True),
        ("EXIT 130\nstderr:\n", True),  # by way of a shell
        ("EXIT 143", True),
        ("EXIT 1\nstderr:\nFatal Python error: init_sys_streams\nTraceback\nKeyboardInterrupt", True),
        ("EXIT 1\nstderr:\nno such mesh", False),
        ("EXIT 13", False),
        ("EXIT 1301", False),
        ("CRASH SIGSEGV", False),
        ("TIMEOUT after 2 s\nstderr:\nKeyboardInterrupt", False),
    ],
)
def test_a_program_that_a_signal_ended_is_known_by_its_reason(text: str, is_signal: bool) -> None:
    assert bool(SIGNALLED.match(text)) == is_signal
