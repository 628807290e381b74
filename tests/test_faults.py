"""Faults of disk, database, clock and processes that no other test injects (tests/campaigns/faults.yaml)."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from dse.backend import Metric, Results, check_results
from dse.cli import main
from dse.errors import environment_text
from dse.evaluation.workers import Pool
from dse.store.database import StoreError
from dse.store.result_store import Store
from dse.store.session import Hold, StoreSession
from tests import toy
from tests.campaigns.postgres import Server
from tests.support import REPOSITORY, SERIAL
from tests.test_resume import begun, command  # noqa: F401  (a fixture)
from tests.test_store import CONTEXT, fresh, keys_of, made, recorded, rows

ALL = os.environ.get("DSE_FAULTS") == "all"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with toy.installed(tmp_path / "toybox"):
        yield


def fill(place: Path, *, spare: int) -> Path:
    """Take the free bytes of a file system but some."""
    ballast = place / "ballast"
    with suppress(OSError):  # others write meanwhile
        ballast.write_bytes(bytes(max(0, shutil.disk_usage(place).free - spare)))
    return ballast


# Power


WRITE = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from dse import plugins
from tests.test_store import Store, fresh, recorded
store = Store(sys.argv[1])
for start in range(0, 600, 30):
    recorded(store, fresh(range(start, start + 30)))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.more
def test_a_log_or_a_database_cut_or_zeroed_after_a_kill_serves_nothing_wrong(tmp_path: Path) -> None:
    template = tmp_path / "whole"
    template.mkdir()
    code = [sys.executable, "-c", WRITE, f"sqlite:///{template / 'results.db'}", str(tmp_path / "toybox")]
    assert subprocess.run([*code, str(REPOSITORY / "tests")], check=False).returncode == -signal.SIGKILL
    assert (template / "results.db-wal").stat().st_size > 100_000
    expected, keys, numbers = rows(made(range(600))), keys_of(range(600)), np.random.default_rng(0)
    for _ in range(200 if ALL else 4):
        place = tmp_path / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template, place)
        _damage(place / str(numbers.choice(["results.db-wal", "results.db", "results.db-shm"])), numbers)
        store = Store(f"sqlite:///{place / 'results.db'}")
        lookup = store.find(keys, store.number(CONTEXT))
        positions = np.flatnonzero(lookup.known)
        assert rows(lookup.results.take(positions)) == [expected[at] for at in positions]
        recorded(store, fresh(range(600)))
        assert rows(store.find(keys, store.number(CONTEXT)).results) == expected
        store.database.close()


def _damage(file: Path, numbers: np.random.Generator) -> None:
    """Cut a file short, or zero its end or a part of it: what lazy writes leave after a power cut."""
    data = bytearray(file.read_bytes())
    start, stop = sorted(numbers.integers(0, len(data), 2).tolist())
    kind = numbers.integers(3)
    if kind == 0:
        del data[start:]
    else:
        stop = len(data) if kind == 1 else stop
        data[start:stop] = bytes(stop - start)
    file.write_bytes(data)


@pytest.mark.nightly
@pytest.mark.slow
def test_commands_on_a_store_with_damaged_pages_or_files_end_well(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.campaigns.damaged", "--json", "--places", "40" if ALL else "6"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=3000)
    assert (done.returncode, json.loads(done.stdout)["bad"]) == (0, 0), done.stderr


# Room and rights


def test_a_disk_that_fills_up_loses_nothing_and_goes_on_once_there_is_room(small: Path) -> None:
    store = Store(f"sqlite:///{small / 'results.db'}")
    recorded(store, fresh([0]))
    ballast = fill(small, spare=60_000)
    count = 1
    with pytest.raises(StoreError, match=r"the disk is full; nothing recorded is lost: make room"):
        for start in range(1, 100_000, 50):
            recorded(store, fresh(range(start, start + 50)))
            count += 50
    assert store.find(keys_of(range(count)), store.number(CONTEXT)).known.all()
    ballast.unlink()
    recorded(store, fresh(range(count, count + 50)))
    again = Store(f"sqlite:///{small / 'results.db'}").find(keys_of(range(count + 50)), store.number(CONTEXT))
    assert rows(again.results) == rows(made(range(count + 50)))


@pytest.mark.skipif(not ALL, reason="takes long: make faults runs it")
def test_a_study_on_a_disk_that_fills_up_ends_with_4_and_goes_on_when_there_is_room(
    small: Path,
    command: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    words = [*command, f"output_dir={small}"]
    done = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (small / "results.db-wal").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    ballast = fill(small, spare=8_000)
    _, output = done.communicate(timeout=60)
    assert (done.returncode, "Traceback" in output) == (4, False), output
    assert "the environment failed: " in output
    assert str(small) in output
    ballast.unlink()
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "resuming: " in again.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_an_output_folder_deleted_under_way_is_named_and_the_same_command_starts_again(
    tmp_path: Path,
    command: list[str],  # noqa: F811
) -> None:
    done = begun(command, tmp_path)
    shutil.rmtree(tmp_path / "outputs")
    _, output = done.communicate(timeout=60)
    assert (done.returncode, "Traceback" in output) == (4, False), output
    assert str(tmp_path / "outputs" / "results.db") in output
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=60).returncode == 0


# Results


@pytest.mark.parametrize(("name", "value"), [("setup_fraction", 1.01), ("makespan_s", 0.0), ("comm_s", -1e-9)])
def test_a_result_outside_what_physics_allows_is_invalid(name: str, value: float) -> None:
    from simulators.overlap.metrics import METRICS

    columns = {metric: np.array([0.5]) for metric in METRICS} | {name: np.array([value])}
    ok, none = np.zeros(1, np.uint8), np.zeros(1, np.int32)
    result = check_results(Results(ok, columns, none, none, ("",)), METRICS)[0]
    assert result.status == "invalid"
    assert name in result.reason


def test_what_is_not_valid_is_never_on_a_front() -> None:
    metrics = {"time_s": Metric("s", "time"), "gain": Metric("x", "gain", "maximize", low=-1e9, high=1e9)}
    bad = [("nan", 1.0), ("inf", 2.0), ("-inf", 3.0), ("negative", 4.0), ("too large", 5.0)]
    values = list(range(1, 9))
    faults = [(int(x), fault) for fault, x in bad]
    results = next(toy.evaluate(toy.spec(*faults), [toy.grid(values)]))
    alone = next(toy.evaluate(toy.spec(), [toy.grid([6, 7, 8])]))
    assert [results[at].status for at in range(8)] == ["invalid"] * 5 + ["ok"] * 3
    assert set(results.metrics) == set(metrics)
    assert [results[at] for at in (5, 6, 7)] == [alone[at] for at in range(3)]


# Servers


@pytest.mark.more
@pytest.mark.slow
def test_a_server_that_is_gone_for_good_is_told_and_what_was_taken_in_is_recorded_when_it_is_back(
    postgres: Server,
) -> None:
    store = Store(postgres.database(f"gone{os.getpid()}"))
    session = StoreSession(store, Hold(1, CONTEXT))
    session.record(*fresh(range(30)), [])
    session.flush()
    postgres.stop()
    try:
        store.database._patience = 0.3
        with pytest.raises(StoreError, match=r"does not answer .*nothing recorded is lost") as caught:
            session.record(*fresh(range(30, 60)), [])
            session.flush()
        assert "secret" not in str(caught.value)
    finally:
        postgres._control("start")
        store.database._patience = 60.0
    session.flush()
    session.leave()
    lookup = store.find(keys_of(range(60)), store.number(CONTEXT))
    assert rows(lookup.results) == rows(made(range(60)))


@pytest.mark.slow
def test_a_study_whose_server_is_not_there_ends_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SERIAL, "store.url=postgresql://me:secret@127.0.0.1:1/x", "store.patience_s=0.5 s"]) == 4
    message = capsys.readouterr().err
    assert "type the same command again later" in message
    assert "secret" not in message


# Clocks


def test_leases_and_time_limits_look_at_no_clock_that_can_be_set() -> None:
    """Of the modules that lease, wait and end; a file put aside may be named by time."""
    leasing = [*(REPOSITORY / "dse" / "store").glob("*.py"), *(REPOSITORY / "dse" / "evaluation").glob("*.py")]
    for path in [*leasing, REPOSITORY / "dse" / "study" / "resume.py"]:
        tree = ast.parse(path.read_text("utf-8"))
        called = [
            ast.unparse(node.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        clocks = [call for call in called if call in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")]
        assert clocks == (["datetime.now"] if path.name == "database.py" else []), path


def test_a_clock_that_jumps_by_years_changes_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"sqlite:///{tmp_path / 'results.db'}")
    first = StoreSession(store, Hold(1, CONTEXT))
    assert first.lease([keys_of([1])]) == [True]
    for jump in (3600.0, -3600.0, 3e8, -3e8):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1.7e9 + jump)
        other = StoreSession(store, Hold(1, CONTEXT))
        assert other.lease([keys_of([1])]) == [False]
        other.leave()
    first.leave()


JUMPING = """
import itertools, time
jumps, plain = itertools.cycle([0.0, 3600.0, -3600.0, 3e8, -3e8]), time.time
time.time = lambda: plain() + next(jumps)
time.time_ns = lambda: int(1e9 * time.time())
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_study_whose_clock_jumps_goes_on_after_a_kill_and_ends_alike(
    tmp_path: Path,
    command: list[str],  # noqa: F811
) -> None:
    """At every look at the clock, by an hour or by ten years, forward and back."""
    calm = tmp_path / "calm"
    shutil.copytree(tmp_path / "conf", calm / "conf")
    subprocess.run(command, cwd=calm, capture_output=True, check=True, timeout=120)
    program, flag, code, folder = command
    words = [program, flag, JUMPING + code, folder]
    killed = begun(words, tmp_path)
    killed.kill()
    killed.communicate()
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert (killed.returncode, done.returncode) == (-signal.SIGKILL, 0), done.stderr
    assert "resuming: " in done.stderr
    assert not re.search(r"-\d+:\d\d|-\d+ points/s", done.stderr)
    (table,) = (tmp_path / "outputs" / "toys").glob("2*/results.parquet")
    (expected,) = (calm / "outputs" / "toys").glob("2*/results.parquet")
    assert table.read_bytes() == expected.read_bytes()


# Reports


@pytest.mark.more
def test_a_report_on_a_full_disk_leaves_the_older_one_whole(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = [word for word in SERIAL if word != "figures=none"]
    assert main([*drawn, "store=none", f"output_dir={small}"]) == 0
    latest, report = small / "ficco_sweep" / "latest", ["results", "report", "study=ficco_sweep", f"output_dir={small}"]
    before = {path: path.read_bytes() for path in latest.rglob("*") if path.is_file()}
    ballast = fill(small, spare=4_000)
    capsys.readouterr()
    assert main(report) == 4
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert str(small) in message
    assert {path: path.read_bytes() for path in latest.rglob("*") if path.is_file()} == before
    ballast.unlink()
    assert main(report) == 0
    assert {path for path in latest.rglob("*") if path.is_file()} == before.keys()


KILLED = """
import os, signal, sys
from dse import plots, cli
from matplotlib.figure import Figure
save, left = Figure.savefig, [int(sys.argv[1])]
def killed(self, where, **more):
    save(self, where, **more)
    left[0] -= 1
    if left[0] == 0:
        with open(where, "r+b") as file:
            file.truncate(100)
        os.kill(os.getpid(), signal.SIGKILL)
Figure.savefig = killed
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_report_that_is_killed_half_way_leaves_the_older_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = [word for word in SERIAL if word != "figures=none"]
    assert main(drawn) == 0
    latest = tmp_path / "outputs" / "ficco_sweep" / "latest"
    before, sizes = latest.resolve(), _files(latest)
    for words in (["results", "report", "study=ficco_sweep"], drawn)[: 2 if ALL else 1]:
        done = subprocess.run([sys.executable, "-c", KILLED, "2", *words], check=False, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert latest.resolve() == before
        assert {name: size for name, size in _files(latest).items() if name in sizes} == sizes
    assert main(["results", "report", "study=ficco_sweep"]) == 0
    assert _files(latest) == sizes


def _files(folder: Path) -> dict[str, int]:
    """Sizes of the files of a run."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


# Processes


def test_workers_use_one_thread_each_unless_told_otherwise() -> None:
    workers = Pool(os.getenv, "HOME", size=1)
    try:
        assert workers.call("OPENBLAS_NUM_THREADS") == os.environ.get("OPENBLAS_NUM_THREADS", "1")
        assert workers.call("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS", "1")
    finally:
        workers.close()


@pytest.mark.nightly
def test_a_study_that_is_stopped_for_a_while_keeps_its_points_and_both_end_alike(
    tmp_path: Path,
    command: list[str],  # noqa: F811
) -> None:
    first = begun(command, tmp_path)
    first.send_signal(signal.SIGSTOP)
    other = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(4 if ALL else 2)
    first.send_signal(signal.SIGCONT)
    outputs = [process.communicate(timeout=60)[1] for process in (first, other)]
    assert (first.returncode, other.returncode) == (0, 0), outputs
    tables = [path.read_bytes() for path in (tmp_path / "outputs" / "toys").glob("2*/results.parquet")]
    assert len(tables) == 2
    assert tables[0] == tables[1]


@pytest.mark.nightly
@pytest.mark.slow
def test_odd_names_of_folders_work_in_a_plain_locale(
    tmp_path: Path,
    command: list[str],  # noqa: F811
) -> None:
    place = tmp_path / "größe 1'\"$x 日本"
    shutil.copytree(tmp_path / "conf", place / "conf")
    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [*command, f"output_dir={'o' * 200}", "space.thing.x=range(0,4)"]
    done = subprocess.run(words, cwd=place, capture_output=True, check=False, env={**os.environ, **plain})
    assert done.returncode == 0, done.stderr
    assert list(place.glob("o*/toys/latest/results.parquet"))


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out() -> None:
    text = environment_text(PermissionError(errno.EACCES, "Permission denied", "outputs/results.db.lock"))
    assert text.startswith("outputs/results.db.lock: permission denied; choose another folder (output_dir=, out=)")
    assert environment_text(OSError("gone")) == "gone"
