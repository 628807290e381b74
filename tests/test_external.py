"""External simulators: whatever a program does, its point has a result or a reason, and nothing of it is left."""

from __future__ import annotations

import json
import math
import multiprocessing.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import dse
from dse import plugins
from dse.backend import Backend, Batch, Result, Results, check_results
from dse.cli import main
from dse.errors import ConfigError
from dse.evaluation.calls import BackendSpec, Patience, call, serve
from dse.evaluation.workers import Pool
from simulators.external import process
from simulators.external.backend import ExternalBackend
from simulators.external.outcome import judge_run
from simulators.external.process import Limits, ProcessEnd
from tests.support import CONF, REPOSITORY, until
from tests.toy import refused

NAME = f"{Path(sys.executable).name} menu.py"
MENU = Path(__file__).with_name("menu.py")
PYTHON = [sys.executable, "-I", "-S"]
TIMEOUT_S = 0.6
MOST_S = TIMEOUT_S + 5


def parameters(**changes: Any) -> dict[str, Any]:
    """Those of the shipped file, for the menu."""
    shipped = yaml.safe_load((CONF / "simulator" / "external.yaml").read_text("utf-8"))
    fields = {key: value for key, value in shipped.items() if key not in ("name", "description", "backend")}
    metrics = {"time_s": {"unit": "s", "meaning": "time", "high": 1e6}}
    return {**fields, "command": [*PYTHON, str(MENU)], "metrics": metrics, "timeout_s": 20, **changes}


def tree(**case: Any) -> dict[str, Any]:
    return {"case": {"fault": "none", "x": 2.5, **case}}


def answered(case: Mapping[str, Any], **changes: Any) -> Result:
    """One point as a study evaluates it."""
    spec = BackendSpec("external", tuple(sorted(parameters(**changes).items())))
    (results,) = call(spec, [Batch(spec.make().design(tree(**case)))])
    return results[0]


def first(result: Result) -> str:
    """The line of a reason that is the same for the same failure."""
    return result.reason.splitlines()[0]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where scratch folders are made; after each test no folder is left, and no process that knows of one."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    multiprocessing.util.get_temp_dir()  # of sockets, for as long as this process lasts: not there
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    until(lambda: not survivors(folder), seconds=2)  # who was killed last may be about to go
    assert survivors(folder) == []
    assert list(folder.iterdir()) == []


def survivors(folder: Path) -> list[str]:
    """Command lines of processes that know of a folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (path / "cmdline").read_text(), (path / "environ").read_text(errors="replace")
        except OSError:
            continue
        if str(folder) in command + environment and path.name != str(os.getpid()):
            commands.append(command)
    return commands


# What goes wrong


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("SIGSEGV", "failed", "CRASH SIGSEGV"),
        ("SIGABRT", "failed", "CRASH SIGABRT"),
        ("SIGKILL", "failed", "CRASH SIGKILL"),
        ("SIGRTMIN", "failed", "CRASH SIGRTMIN"),
        ("exit 3", "failed", "EXIT 3"),
        ("exit 137", "failed", "EXIT 137"),
        ("silent", "failed", "NO OUTPUT"),
        ("blank", "failed", "NO OUTPUT"),
        ("words", "failed", "OUTPUT is no JSON"),
        ("log line first", "failed", "OUTPUT is no JSON"),
        ("twice", "failed", "OUTPUT is no JSON"),
        ("deep", "failed", "OUTPUT is no JSON"),
        ("bytes", "failed", "OUTPUT is no JSON"),
        ("array", "failed", "OUTPUT is no JSON object"),
        ("status", "failed", "OUTPUT has an unknown status"),
        ("not a number", "invalid", "time_s = nan: is not a finite number"),
        ("inf", "invalid", "time_s = inf: is not a finite number"),
        ("huge", "invalid", "time_s = inf: is not a finite number"),
        ("negative", "invalid", "time_s = -1.0: is outside 0...1e+06"),
        ("above", "invalid", "time_s = 10000000.0: is outside 0...1e+06"),
        ("text", "invalid", "time_s = '1.0': is not a finite number"),
        ("true", "invalid", "time_s = True: is not a finite number"),
        ("list", "invalid", "time_s = 'a list': is not a finite number"),
        ("null", "invalid", "time_s = None: is missing"),
        ("missing", "invalid", "time_s = None: is missing"),
        ("extra", "invalid", "speed = 2.0: is not a metric of this backend"),
        ("infeasible", "infeasible", "the tile does not fit"),
        ("infeasible, silently", "infeasible", "no reason given"),
        ("unsupported", "unsupported", "no such collective"),
    ],
)
def test_a_failure_is_a_result_of_its_class(fault: str, status: str, reason: str) -> None:
    result = answered({"fault": fault})
    assert (result.status, first(result)) == (status, reason)
    assert not result.metrics
    assert result.engine == NAME
    if fault.startswith("exit"):
        assert result.reason.endswith("stderr:\nno licence")


@pytest.mark.parametrize("fault", ["long text", "long name", "surrogate"])
def test_what_a_program_writes_is_shown_in_short_and_can_be_stored(fault: str) -> None:
    result = answered({"fault": fault})
    assert result.status == "invalid"
    assert len(result.reason) < 200
    assert result.reason.encode().decode().isprintable()


@pytest.mark.parametrize("fault", ["none", "status ok"])
def test_a_program_that_works_gives_its_metrics(fault: str) -> None:
    result = answered({"fault": fault, "x": 4})
    assert result == Result("ok", {"time_s": 4.0}, engine=NAME)


@pytest.mark.more
@pytest.mark.slow
def test_programs_that_hang_are_ended_in_time() -> None:
    faults = ["sleep", "busy", "stubborn", "stopped"]
    began = time.monotonic()
    with ThreadPoolExecutor(len(faults)) as threads:
        outcomes = list(threads.map(lambda fault: answered({"fault": fault}, timeout_s=TIMEOUT_S), faults))
    assert time.monotonic() - began < MOST_S
    assert {(result.status, first(result)) for result in outcomes} == {("failed", f"TIMEOUT after {TIMEOUT_S} s")}


@pytest.mark.parametrize("fault", ["child", "daemon"])
def test_what_a_program_leaves_running_neither_delays_its_answer_nor_survives(fault: str) -> None:
    began = time.monotonic()
    assert answered({"fault": fault}).metrics == {"time_s": 3.0}
    assert time.monotonic() - began < 5


def test_a_program_whose_supervisor_is_killed_dies_with_it() -> None:
    result = answered({"fault": "supervisor"})
    assert (result.status, first(result)) == ("failed", "LOST: what watches over the program was killed")


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["here", "in a worker"])
def test_a_point_whose_supervisor_was_killed_is_evaluated_again(apart: bool, tmp_path: Path) -> None:
    """Once for each point, while it may be tried again."""
    case = {"fault": "unguarded", "folder": str(tmp_path)}
    spec = BackendSpec("external", tuple(sorted(parameters().items())))
    batches = [Batch(spec.make().design(tree(**case, x=x))) for x in (1.5, 2.5)]
    for retries, statuses in [(0, ["failed"]), (1, ["ok"] * 2)]:
        for left in tmp_path.glob("met-*"):
            left.unlink()
        batch_call = (spec, batches[: len(statuses)], Patience(retries))
        if apart:
            pool = Pool(serve, (spec, (), Patience()), size=1)
            outcomes = pool.call(batch_call)
            pool.close()
        else:
            outcomes = serve(batch_call)
        assert [results[0].status for results in outcomes] == statuses


HANGING = """
import sys
from dse.backend import Batch
from simulators.external.backend import ExternalBackend

print("starts", flush=True)
backend = ExternalBackend(**{parameters!r})
backend.evaluate([Batch(backend.design({tree!r}))])
"""


@contextmanager
def hanging(fault: str, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own, whose program sleeps by now."""
    text = HANGING.format(parameters=parameters(), tree=tree(fault=fault))
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-c", text], env=environment, stderr=subprocess.DEVNULL) as worker:
        assert until(lambda: any(scratch.glob("*/sleeps")), seconds=20)
        try:
            yield worker
        finally:
            worker.kill()


def test_points_go_on_when_what_forks_their_supervisors_is_killed(scratch: Path) -> None:
    """The one that runs ends as if nothing had been, and the next one has another."""
    with ThreadPoolExecutor(1) as thread:
        assert answered({"fault": "none"}).status == "ok"
        forks = process._fork_server(os.getpid())._process.pid
        running = thread.submit(answered, {"fault": "child"})
        assert until(lambda: any(scratch.glob("*/input.json")), seconds=5)
        assert until(lambda: bool(Path(f"/proc/{forks}/task/{forks}/children").read_text()), seconds=5)
        os.kill(forks, signal.SIGKILL)
        assert running.result().status == "ok"
    assert answered({"fault": "none"}).status == "ok"
    assert process._fork_server(os.getpid())._process.pid != forks


@pytest.mark.more
@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_worker_that_is_killed(number: int, scratch: Path) -> None:
    with hanging("stubborn", scratch) as worker:
        worker.send_signal(number)
        worker.wait()
    assert until(lambda: not survivors(scratch) and not any(scratch.iterdir()), seconds=5)


def child(pid: int) -> int:
    """The only child of a process."""
    (child_pid,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child_pid)


@pytest.mark.slow
def test_a_program_dies_with_its_supervisor_even_if_the_worker_cannot_help(scratch: Path) -> None:
    with hanging("sleep", scratch) as worker:
        (folder,) = scratch.iterdir()
        worker.send_signal(signal.SIGSTOP)
        os.kill(child(child(worker.pid)), signal.SIGKILL)
        assert until(lambda: survivors(folder) == [], seconds=5)
        process._sweep.cache_clear()
        assert answered({"fault": "none"}).status == "ok"
        assert list(scratch.iterdir()) == [folder]  # whose worker may come back
    assert folder.is_dir()
    process._sweep.cache_clear()
    assert answered({"fault": "none"}).status == "ok"
    assert not folder.exists()


# Limits


def test_memory_that_is_not_there_is_told_from_other_failures() -> None:
    result = answered({"fault": "memory"}, memory_bytes="400 MB")
    assert (result.status, first(result)) == ("failed", "OUT OF MEMORY")
    assert "MemoryError" in result.reason


def ended(code: int, stderr: bytes = b"") -> ProcessEnd:
    return ProcessEnd(code, "", "", stdout=b"", stderr=stderr, error_size=len(stderr))


@pytest.mark.parametrize(
    ("end", "starved", "reason"),
    [
        (ended(-9), True, "OUT OF MEMORY"),
        (ended(-9), False, "CRASH SIGKILL"),
        (ended(137), True, "OUT OF MEMORY"),
        (ended(137), False, "EXIT 137"),
        (ended(-11), True, "CRASH SIGSEGV"),
        (ended(-6, b"terminate called ... 'std::bad_alloc'\n  what():  std::bad_alloc\n"), False, "OUT OF MEMORY"),
        (ended(1, b"numpy._ArrayMemoryError: Unable to allocate 1 TiB\n"), False, "OUT OF MEMORY"),
        (ended(1, b"MemoryError handled\n1\n2\n3\nValueError\n"), False, "EXIT 1"),
    ],
)
def test_out_of_memory_is_said_where_program_or_kernel_say_so(end: ProcessEnd, starved: bool, reason: str) -> None:
    assert judge_run(end, Limits(1.0, 1000), b"", metrics={}, starved=starved).reason == reason


@pytest.mark.slow
def test_cpu_time_and_file_size_are_limited() -> None:
    assert first(answered({"fault": "busy"}, cpu_s=1)) == "CPU TIME over 1 s"
    assert first(answered({"fault": "file"}, file_bytes="1 MB")) == "FILE SIZE over 1000000 B"


def test_ten_megabytes_of_complaints_are_cut_to_their_end() -> None:
    result = answered({"fault": "talk"})
    assert first(result) == "EXIT 7"
    assert "\nthe end of 10485768 B of stderr:\n" in result.reason
    assert result.reason.endswith("x\nthe end")
    assert 2000 < len(result.reason) < 2100


@pytest.mark.parametrize("error_chars", [0, 3])
def test_how_much_of_the_complaints_is_kept_is_for_the_user_to_say(error_chars: int) -> None:
    expected = {0: "EXIT 3", 3: "EXIT 3\nthe end of 11 B of stderr:\nnce"}
    assert answered({"fault": "exit 3"}, error_chars=error_chars).reason == expected[error_chars]


def test_a_flood_on_standard_output_ends_the_run() -> None:
    began = time.monotonic()
    assert first(answered({"fault": "flood"}, output_bytes="10 kB")) == "OUTPUT over 10000 B"
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_flood_on_standard_output_is_passed_over_where_the_answer_is_a_file() -> None:
    result = answered({"fault": "flood"}, command=[*PYTHON, str(MENU), "{input}", "{output}"], timeout_s=TIMEOUT_S)
    assert first(result) == f"TIMEOUT after {TIMEOUT_S} s"


@pytest.mark.parametrize("fault", ["none", "fifo"])
def test_an_answer_may_be_a_plain_file(fault: str) -> None:
    result = answered({"fault": fault}, command=[*PYTHON, str(MENU), "{input}", "{output}"])
    assert result.metrics == {"time_s": 2.5} if fault == "none" else first(result) == "NO OUTPUT"


# What a program gets


def started_with(**changes: Any) -> Any:
    """What a program was started with, as it tells."""
    result = answered({"fault": "told"}, error_chars=20_000, **changes)
    return json.loads(result.reason.splitlines()[-1])


def test_a_program_sees_an_empty_folder_few_variables_and_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    monkeypatch.setenv("LICENCE", "a licence")
    report = started_with(env=["LICENCE", "NOT_SET"], cpu_s=9, memory_bytes="4 GB", file_bytes="2 MB")
    assert set(report["env"]) - {"LC_CTYPE"} == {"PATH", "HOME", "LANG", "TMPDIR", "LICENCE"} & {*os.environ, "TMPDIR"}
    assert report["env"]["LICENCE"] == "<LICENCE>"
    assert report["env"]["TMPDIR"] == "<scratch>"
    assert report["here"] == ["input.json"]
    assert report["limits"] == {"AS": 4 * 10**9, "CPU": 9, "FSIZE": 2 * 10**6, "CORE": 0}
    assert report["alone"]
    assert report["ppid"] != os.getpid()


def test_complaints_hold_no_secrets_no_scratch_folder_and_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LICENCE", "0xdeadbeef")
    result = answered({"fault": "leak"}, env=["LICENCE"])
    assert result.reason == "EXIT 1\nstderr:\nlicence <LICENCE>, api_key = <hidden> in <scratch> \ufffd[31mred"


def test_placeholders_are_the_files_and_the_values_of_the_design(tmp_path: Path) -> None:
    words = ["{output}", "--x={case.x}", "{case.name}", "{case.on}", "{case.sizes}", '{"a": 1}', "; rm -rf / $HOME"]
    case = {"name": "two words", "on": True, "sizes": [1, 2.5]}
    script = "import json, sys; json.dump({'time_s': len(sys.argv)}, open(sys.argv[1], 'w')); sys.exit(str(sys.argv))"
    result = answered(case, command=[*PYTHON, "-c", script, *words])
    assert first(result) == "EXIT 1"
    assert result.reason.splitlines()[-1] == str(
        ["-c", "<scratch>/output.json", "--x=2.5", "two words", "true", "[1, 2.5]", '{"a": 1}', "; rm -rf / $HOME"]
    )


@pytest.mark.parametrize("place", ["stdin", "file"])
def test_a_design_is_given_as_nested_json_or_as_csv_of_paths(place: str) -> None:
    script = "import sys; sys.exit((open(sys.argv[1]) if len(sys.argv) > 1 else sys.stdin).read())"
    command = [*PYTHON, "-c", script, *(["{input}"] if place == "file" else [])]
    case = {"fault": 'a "quoted", text', "deep": {"on": True, "none": None, "sizes": [1, [2.5]]}, "note": "for people"}
    heard = {"fault": 'a "quoted", text', "x": 2.5, "deep": {"on": True, "none": None, "sizes": [1, [2.5]]}}
    assert json.loads(answered(case, command=command).reason.split("stderr:")[1]) == {"case": heard}
    assert answered(case, command=command, input="csv").reason.splitlines()[2:] == [
        "path,value",
        "case.deep.none,null",
        "case.deep.on,true",
        'case.deep.sizes,"[1, [2.5]]"',
        'case.fault,"a ""quoted"", text"',
        "case.x,2.5",
    ]


# Whatever it answers


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ANSWERS = st.dictionaries(st.sampled_from(["time_s", "share", "status", "reason", "x"]), JSON, max_size=4) | JSON
METRICS: dict[str, dict[str, Any]] = {
    "time_s": {"unit": "s", "meaning": "time"},
    "share": {"unit": "1", "meaning": "share", "high": 1},
}
BOTH = ExternalBackend(**parameters(metrics=METRICS)).metrics


def assert_sound(result: Result) -> None:
    """Numbers in their ranges, or a reason that can be stored."""
    if result.status == "ok":
        assert set(result.metrics) == set(METRICS)
        assert all(math.isfinite(value) for value in result.metrics.values())
        assert result.metrics["time_s"] >= 0 and 0 <= result.metrics["share"] <= 1
    else:
        assert result.status in ("failed", "invalid", "infeasible", "unsupported")
        assert not result.metrics
        assert result.reason.strip()
        assert len(result.reason.encode()) < 5000


@pytest.mark.slow
@settings(max_examples=300)
@given(ANSWERS.map(json.dumps).map(str.encode) | st.binary(max_size=40))
def test_any_answer_becomes_numbers_in_their_ranges_or_a_reason(answer: bytes) -> None:
    raw = judge_run(ended(0), Limits(1.0, 10**6), answer, metrics=BOTH, starved=False)
    assert_sound(check_results(Results.of([raw]), BOTH)[0])


@pytest.mark.slow
@settings(max_examples=25)
@given(
    ANSWERS.map(json.dumps) | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
)
def test_any_text_a_program_prints_becomes_a_result(text: str) -> None:
    assert_sound(answered({"text": text}, command=["printf", "%s", "{case.text}"], metrics=METRICS))


# Configuration


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"command": None}, ["simulator.command"]),
        ({"command": []}, ["simulator.command"]),
        ({"command": "python3 sim.py"}, ["simulator.command", "list of words"]),
        ({"command": ["nosuchprogram"]}, ["simulator.command", "not found on PATH"]),
        ({"command": ["./nosuchprogram"]}, ["simulator.command", "program not found"]),
        ({"command": [str(CONF / "config.yaml")]}, ["not executable", "chmod +x"]),
        ({"command": ["{case.x}"]}, ["simulator.command", "{here}"]),
        ({"command": ["a\0b"]}, ["NUL"]),
        ({"command": ["own.py"]}, ["write ./own.py"]),
        ({"command": ["env", "own.py"]}, ["write {here}/own.py"]),
        ({"files": ["nosuchfile"]}, ["simulator.files.0", "is not there"]),
        ({"input": "xml"}, ["simulator.input = 'xml'"]),
        ({"metrics": {}}, ["simulator.metrics"]),
        ({"metrics": {"status": METRICS["share"]}}, ["simulator.metrics", "column of the table"]),
        ({"metrics": {"1": METRICS["share"]}}, ["simulator.metrics", "beginning with a letter"]),
        ({"metrics": {"a": {"unit": "s"}}}, ["simulator.metrics.a.meaning", "is missing"]),
        ({"metrics": {"a": {**METRICS["share"], "low": 2}}}, ["simulator.metrics.a", "above high"]),
        ({"metrics": {"a": {**METRICS["share"], "gaol": "maximize"}}}, ["did you mean `simulator.metrics.a.goal`"]),
        ({"timeout_s": 0}, ["simulator.timeout_s = 0"]),
        ({"timeout_s": "1 GB"}, ["simulator.timeout_s", "dimension"]),
        ({"memory_bytes": 1}, ["simulator.memory_bytes"]),
        ({"env": ["A=B"]}, ["simulator.env.0"]),
        ({"timeout": 3}, ["simulator.timeout", "did you mean `simulator.timeout_s`"]),
        (
            {"input": "xml", "timeout_s": -1, "env": ["-"]},
            ["simulator.input", "simulator.timeout_s", "simulator.env.0"],
        ),
    ],
)
def test_wrong_settings_are_refused_by_path(
    changes: dict[str, Any], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").touch()
    with pytest.raises(ConfigError) as error:
        ExternalBackend(**parameters(**changes))
    assert [part for part in parts if part not in refused(error.value)] == []


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"x": math.nan}, "case.x = nan: must be finite"),
        ({"deep": {"x": [1, -math.inf]}}, "case.deep.x.1 = -inf: must be finite"),
        ({"x": 2**63}, "does not fit into 64 bits"),
        ({"a.b": 1}, "must have a name without dots"),
        ({"link_bytes_per_s": "64 GHz"}, "case.link_bytes_per_s = '64 GHz': `GHz` has the wrong dimension"),
        ({"text": "a\0"}, "case.text: must hold no NUL"),
        ({"x": object()}, "must be a number"),
    ],
)
def test_a_design_holds_what_json_can_say(section: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        ExternalBackend(**parameters()).design({"case": section})
    assert part in refused(error.value)


def test_a_text_under_a_name_that_ends_in_a_unit_is_a_quantity() -> None:
    design = ExternalBackend(**parameters()).design(
        {"case": {"link_bytes_per_s": "64 GB/s", "bytes_per_s": "1 GB/s", "alpha_s": "2 us", "a": "2 us"}}
    )
    assert dict(design) == {"case": {"link_bytes_per_s": 64e9, "bytes_per_s": 1e9, "alpha_s": 2e-6, "a": "2 us"}}


def test_a_program_that_was_edited_has_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sim.py", "model/a.txt", "other.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")

    def version(**changes: Any) -> str:
        fields = parameters(command=["python3", "{here}/sim.py"], files=["model"], **changes)
        return ExternalBackend(**fields).version

    first_version = version()
    seen = {first_version, version(version="2")}
    for name in ("sim.py", "model/a.txt", "other.txt"):
        (tmp_path / name).write_text("2")
        seen.add(version())
    assert len(seen) == 4  # the other file is none of its files
    shutil.copytree(tmp_path, tmp_path / "moved", ignore=shutil.ignore_patterns("moved"))
    now = version()
    monkeypatch.chdir(tmp_path / "moved")
    assert version() == now


def test_it_is_a_backend_whose_relations_say_how_much_better_a_point_is() -> None:
    metrics = {"time_s": METRICS["time_s"], "rate": {**METRICS["time_s"], "goal": "maximize"}}
    backend: Backend = ExternalBackend(**parameters(metrics={**metrics, "change": {**METRICS["share"], "low": -1}}))
    assert isinstance(backend, Backend)
    columns = {name: np.array([2.0, 0.0]) for name in backend.metrics}
    ratios = backend.relate(columns, {name: np.array([4.0, 1.0]) for name in backend.metrics})
    assert set(ratios) == set(backend.relations) == {"time_s_improvement", "rate_improvement"}
    np.testing.assert_array_equal(ratios["time_s_improvement"], [2.0, math.nan])
    np.testing.assert_array_equal(ratios["rate_improvement"], [0.5, 0.0])


# Studies


STUDY = """\
# @package _global_
defaults:
  - override /system: null
  - override /workload: null
  - override /schedule: null
  - override /simulator: mine

study:
  name: mine
  question: which of my cases is best?
  module: plain
  objectives: [time_s]
  baseline: {}

case: {fault: none, x: 1}

space:
  case:
    fault: choice(none)
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a study over the menu, and a shell in the folder above it."""
    monkeypatch.chdir(tmp_path)
    for group, text in (
        ("study", STUDY),
        ("simulator", "defaults: [external, _self_]\nname: mine\ndescription: mine\n"),
    ):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text, encoding="utf-8")
    words = ", ".join(map(json.dumps, [*PYTHON, str(MENU)]))
    with (tmp_path / "conf" / "simulator" / "mine.yaml").open("a", encoding="utf-8") as file:
        file.write(f"command: [{words}]\nmetrics: {{time_s: {{unit: s, meaning: time}}}}\n")
    return tmp_path / "conf"


RUN = ["study=mine", "tracking=none", "figures=none", "--config-dir=conf"]


@pytest.mark.slow
def test_a_study_goes_on_over_every_failure(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {"none": "", "SIGSEGV": "CRASH SIGSEGV", "sleep": "TIMEOUT after 1 s"}
    faults |= {"not a number": "time_s = nan: is not a finite number", "infeasible": "the tile does not fit"}
    space = f"space.case.fault=choice({','.join(faults)})"
    assert main([*RUN, space, "+space.case.x=choice(1,0.5)", "simulator.timeout_s=1", "executor.jobs=2"]) == 3
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert "exit code 3: 6 of 10 points failed" in message
    assert "the first with: CRASH SIGSEGV" in message
    table = dse.load("mine")
    assert [table["case.fault"].tolist(), table["case.x"].tolist()] == [
        [f for f in faults for _ in range(2)],
        [1, 0.5] * 5,
    ]
    assert table["reason"].str.partition("\n")[0].tolist() == [reason for reason in faults.values() for _ in range(2)]
    assert table["status"].tolist()[::2] == ["ok", "failed", "failed", "invalid", "infeasible"]
    assert table.loc[table["on_front"], "case.x"].tolist() == [0.5]


def typed(words: list[str]) -> int:
    """As a process of its own would run it: nothing is remembered of the program."""
    plugins.refresh()
    return main(words)


@pytest.mark.more
@pytest.mark.slow
def test_results_of_an_edited_program_or_another_design_are_never_taken_for_those_of_this_one(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = conf.parent / "mine.py"
    program.write_text("print('{\"time_s\": 1}')\n", encoding="utf-8")
    run = [*RUN, f"simulator.command=[{sys.executable},'{{here}}/mine.py']"]
    assert typed(run) == 0
    program.write_text("print('{\"time_s\": 2}')\n", encoding="utf-8")
    assert typed(run) == 0
    assert "simulator.version was " in capsys.readouterr().err
    assert dse.load("mine")["time_s"].tolist() == [2.0]
    assert typed([*run, "resume=accept", "case.x=3"]) == 0  # another command: nothing to accept
    (conf / "study" / "mine.yaml").write_text(STUDY.replace("x: 1", "x: 5"), encoding="utf-8")
    assert typed([*run, "resume=accept"]) == 0
    assert "resuming: 0 done and what fits of 1 from before the study was changed" in capsys.readouterr().err


@pytest.mark.nightly
def test_failures_of_a_program_that_was_mended_are_tried_again_on_demand(conf: Path) -> None:
    program = conf.parent / "mine.py"
    program.write_text("raise SystemExit(4)\n", encoding="utf-8")
    run = [*RUN, f"simulator.command=[{sys.executable},'{{here}}/mine.py']"]
    assert typed(run) == 3
    program.write_text("print('{\"time_s\": 2}')\n", encoding="utf-8")
    assert typed([*run, "resume=accept"]) == 3
    assert typed([*run, "store.retry=[failed]"]) == 0
    assert dse.load("mine")["time_s"].tolist() == [2.0]


@pytest.mark.slow
def test_ones_own_sections_may_be_groups_and_a_study_may_have_scenarios(conf: Path) -> None:
    (conf / "case").mkdir()
    for name, x in (("small", 1), ("large", 3)):
        (conf / "case" / f"{name}.yaml").write_text(f"name: {name}\nfault: none\nx: {x}\n", encoding="utf-8")
    text = STUDY.replace("defaults:\n", "defaults:\n  - /case: small\n").replace(
        "case: {fault: none, x: 1}\n", SCENARIOS
    )
    text = text.replace("fault: choice(none)", "name: choice(small,large)").replace(
        "baseline: {}", "baseline: {case.name: small}"
    )
    (conf / "study" / "mine.yaml").write_text(text, encoding="utf-8")
    assert main(RUN) == 0
    table = dse.load("mine").set_index(["scenario", "case.name"])
    assert table["time_s"].to_dict() == {(s, c): x for s in ("dull", "bright") for c, x in (("small", 1), ("large", 3))}
    assert table["time_s_improvement"].to_dict()["bright", "large"] == pytest.approx(1 / 3)


SCENARIOS = "light: {lit: false}\nscenarios:\n  dull: {light: {lit: false}}\n  bright: {light.lit: true}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["space.case.fualt=choice(none)"], ["space.case.fualt", "did you mean `space.case.fault`"]),
        (["simulator.command=[env, '{case.y}']"], ["{case.y} is no value of the design", "`case.x`"]),
        (["+scenarios={a: {case: {y: 1}}}"], ["scenarios.a.case.y", "did you mean `case.x`"]),
        (["+scenarios={a b: {case: {x: 1}}}"], ["scenarios.a b"]),
        (["+scenarios=3"], ["scenarios"]),
        (["+copy={a: 1}"], ["copy", "cannot be the name of a section"]),
        (["+other=3"], ["other = 3", "is no section of keys"]),
        (["system=h100_8"], ["system.cost_weights.gpu.num_cus: must have", "override /system: null"]),
        (["study.objectives=[tmie_s]"], ["did you mean `time_s`"]),
        (["simulator=external"], ["simulator.command", "simulator.metrics"]),
    ],
)
def test_a_wrong_study_is_refused_before_anything_runs(
    words: list[str], parts: list[str], conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *words]) == 2
    message = capsys.readouterr().err
    assert [part for part in parts if part not in message] == []
    assert not Path("outputs").exists()


@pytest.mark.slow
def test_a_recorded_program_is_started_only_where_it_is_named_and_tells_no_times(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(RUN) == 0
    key = dse.load("mine")["key"].iloc[0]
    words = ["results", "timeline", "study=mine", f"key={key}", "config_dir=conf"]
    for command in (
        words,
        [*words, "command=true"],
        ["results", "robustness", "study=mine", "vary=case.x=0.1", "config_dir=conf"],
    ):
        assert main(command) == 2
        assert "with a program that this command line does not name" in capsys.readouterr().err
    assert main(words) == 2
    (way,) = re.findall(r"add (command=.*)\)$", capsys.readouterr().err, re.MULTILINE)
    assert main([*words, *shlex.split(way)]) == 2
    assert "has metrics only" in capsys.readouterr().err
    assert main(["results", "report", "study=mine"]) == 0


@pytest.mark.more
def test_the_shipped_example_works_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "how-to" / "simulator.md").read_text("utf-8")
    (line,) = re.findall(r"^python -m dse (study=allreduce .*)$", page, re.MULTILINE)
    shutil.copytree(REPOSITORY / "docs" / "examples" / "allreduce", tmp_path / "allreduce")
    monkeypatch.chdir(tmp_path / "allreduce")
    assert main([*line.split(), "tracking=none", "executor.jobs=1", "space.collective.chunks=choice(1,16)"]) == 0
    table = dse.load("allreduce").set_index(["scenario", "collective.algorithm", "collective.chunks"])
    assert table.index.is_unique
    time_s = dict(zip(table.index, table["time_s"].to_numpy(float), strict=True))
    improvement = dict(zip(table.index, table["time_s_improvement"].to_numpy(float), strict=True))
    assert time_s["64MiB", "ring", 1] == pytest.approx(14 * (5e-6 + 2**23 / 46.6e9) + 7 * 2**23 / 1.4e12)
    assert time_s["64MiB", "tree", 16] < time_s["64MiB", "tree", 1]
    assert improvement["16KiB", "recursive_doubling", 1] > 4
    assert set(table[table["status"] == "infeasible"].index.get_level_values(1)) == {"recursive_doubling"}
    assert (tmp_path / "allreduce" / "outputs" / "allreduce" / "latest" / "figures" / "pareto.png").stat().st_size > 0
