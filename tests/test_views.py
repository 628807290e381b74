"""Views are written beside a study and by `sync`; whatever happens to them, the study does not fail."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dse.cli import main
from dse.results.selection import SelectionRule
from dse.study.settings import TrackingSettings
from dse.tracking.optuna_storage import StorageError
from dse.tracking.optuna_storage import show as show_in_optuna
from dse.tracking.process import background_tracking
from tests.folders import GOALS, finished, key, odd_table, wide_table

REPOSITORY = Path(__file__).parents[1]
ALL = SelectionRule("all")


@pytest.fixture
def here(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with an MLflow database, in which commands are given."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return tmp_path


def count(file: Path, query: str) -> Any:
    with sqlite3.connect(file) as connection:
        (number,) = connection.execute(query).fetchone()
    connection.close()
    return number


POINTS = "SELECT count(*) FROM tags WHERE key = 'dse.point_key'"


def wanted(uri: str | None = "sqlite:///mlflow.db", **more: Any) -> TrackingSettings:
    return TrackingSettings(name="mlflow", uri=uri, **more)


# The command


@pytest.mark.slow
def test_sync_writes_what_is_missing_and_then_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(here / "outputs", odd_table())
    finished(here / "outputs", wide_table(50), study="other")
    assert main(["store", "sync", "study=other"]) == 0
    assert "50 runs of other/2026-11-21_07-40-12 in MLflow" in capsys.readouterr().out
    assert main(["store", "sync"]) == 0
    assert "1 up to date, 1 written" in (output := capsys.readouterr().out)
    assert "python -m dse ui" in output
    assert main(["store", "sync"]) == 0
    assert capsys.readouterr().out == "2 up to date\n"
    assert count(here / "mlflow.db", POINTS) == 56


@pytest.mark.slow
def test_sync_goes_where_the_study_asked_for_unless_told_otherwise(here: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, here / "own.db")
    finished(here / "outputs", wide_table(50), tracking={"uri": "sqlite:///own.db", "points": "none"})
    assert main(["store", "sync"]) == 0
    assert [count(here / "own.db", query) for query in ("SELECT count(*) FROM runs", POINTS)] == [1, 0]
    assert main(["store", "sync", "points=all"]) == 0
    assert count(here / "own.db", POINTS) == 50
    assert count(here / "mlflow.db", POINTS) == 0
    assert main(["store", "sync", "uri=sqlite:///mlflow.db", "points=all"]) == 0
    assert count(here / "mlflow.db", POINTS) == 50


@pytest.mark.slow
def test_unfinished_runs_are_left_out(here: Path) -> None:
    folder = finished(here / "outputs", odd_table())
    (folder / "summary.json").unlink()
    assert main(["store", "sync"]) == 2


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["results.parquet", "summary.json", "provenance.json", "config.yaml"])
def test_a_damaged_folder_is_told_and_the_others_are_shown(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    finished(here / "outputs", odd_table())
    broken = finished(here / "outputs", odd_table(), "2026-11-21_08-00-00")
    (broken / name).write_text("{")
    assert main(["store", "sync"]) == 0
    assert f"{broken} is left out" in capsys.readouterr().err
    assert count(here / "mlflow.db", POINTS) == 6


@pytest.mark.slow
@pytest.mark.parametrize("words", [["study=none"], ["points=some"], ["uri=nonsense"], ["urri=x"]], ids=str)
def test_sync_refuses_what_it_does_not_understand(
    here: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    finished(here / "outputs", odd_table())
    assert main(["store", "sync", *words]) == 2
    assert words[0].partition("=")[0] in capsys.readouterr().err


@pytest.mark.more
def test_a_damaged_database_is_repaired_when_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(here / "outputs", odd_table())
    (here / "mlflow.db").write_bytes(b"garbage " * 1000)
    assert main(["store", "sync"]) == 4
    assert "python -m dse store sync study=sweep repair=true" in capsys.readouterr().err
    assert main(["store", "sync", "repair=true"]) == 0
    assert count(here / "mlflow.db", POINTS) == 6
    assert [file.read_bytes() for file in here.glob("mlflow.db.damaged-*")] == [b"garbage " * 1000]


# Beside a study


@pytest.mark.more
def test_a_study_is_shown_by_a_process_of_its_own(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = finished(here / "outputs", odd_table())
    with background_tracking(wanted(optuna="trials.log")) as shown:
        shown.begin(folder)
        shown.finish()
    output = capfd.readouterr().out
    assert "6 runs of sweep/2026-11-21_07-40-12 in MLflow" in output
    assert "6 trials of sweep/2026-11-21_07-40-12 in Optuna's storage at trials.log" in output
    assert count(here / "mlflow.db", POINTS) == 6
    assert count(here / "mlflow.db", "SELECT count(*) FROM runs WHERE status = 'RUNNING'") == 0


class _Broken(http.server.BaseHTTPRequestHandler):
    """Answers every request with the status in its path."""

    status = 500

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def broken(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (_Broken,), {"status": request.param})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def told_of(here: Path, capfd: pytest.CaptureFixture[str], uri: str) -> str:
    """The one sentence that a study says when its MLflow fails."""
    folder = finished(here / "outputs", odd_table())
    with background_tracking(wanted(uri)) as shown:
        shown.begin(folder)
        shown.finish()
    lines = [line for line in capfd.readouterr().err.splitlines() if "passed over" in line]
    assert len(lines) == 1
    place = "" if uri.startswith("sqlite") else f" uri={uri}"
    assert lines[0].endswith(f"catch up with: python -m dse store sync study=sweep{place}") or "repair=true" in lines[0]
    return lines[0]


@pytest.mark.more
@pytest.mark.one_in(2)
@pytest.mark.parametrize("broken", [401, 500], indirect=True, ids=str)
def test_a_server_that_refuses_is_told_and_passed_over(
    here: Path, capfd: pytest.CaptureFixture[str], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert broken in told_of(here, capfd, broken)


@pytest.mark.nightly
def test_a_server_that_is_not_there_is_told_and_passed_over(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert "Connection refused" in told_of(here, capfd, "http://127.0.0.1:9")


@pytest.mark.nightly
def test_a_damaged_database_is_told_with_the_way_out(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "mlflow.db").write_bytes(b"garbage " * 1000)
    assert told_of(here, capfd, "sqlite:///mlflow.db").endswith("repair=true")


@pytest.mark.more
def test_a_full_disk_is_told_and_passed_over(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(here / "mlflow.db") as connection:
        connection.execute("CREATE TRIGGER full BEFORE INSERT ON params BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    connection.close()
    assert "disk is full" in told_of(here, capfd, "sqlite:///mlflow.db")


def test_a_process_that_is_killed_is_told_and_passed_over(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = finished(here / "outputs", odd_table())
    with background_tracking(wanted()) as shown:
        os.kill(the_child(os.getpid()), signal.SIGKILL)
        shown.begin(folder)
        shown.finish()
    assert "ended with exit code -9; catch up with: python -m dse store sync study=sweep" in capfd.readouterr().err


def children(parent: int) -> list[int]:
    """Children of a process that are the process beside a study."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if b"dse.tracking.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def the_child(parent: int) -> int:
    """The process beside a study, once it has begun."""
    deadline = time.monotonic() + 10
    while not (pids := children(parent)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pids[0]


def ended(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.more
@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists processes the Linux way")
@pytest.mark.parametrize("working", [False, True], ids=["waiting", "writing"])
def test_the_process_beside_a_study_does_not_outlive_it(
    empty_database: Path, tmp_path: Path, working: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes after the study, so on a machine that is busy the seconds it has to end may not do: it may try again."""
    for attempt in range(3):
        place = tmp_path / str(attempt)
        place.mkdir()
        shutil.copy(empty_database, place / "mlflow.db")
        monkeypatch.chdir(place)
        if _ended_well(place, working=working):
            return
    raise AssertionError("its run was left RUNNING three times")


def _ended_well(here: Path, *, working: bool) -> bool:
    """Whether a process whose study is killed leaves no run that seems to run; it must end, and lose nothing."""
    folder = finished(here / "outputs", wide_table(20000))
    code = (
        "import sys, time, threading; from pathlib import Path; from dse.tracking.process import background_tracking\n"
    )
    code += "from dse.study.settings import TrackingSettings\n"
    code += "with background_tracking(TrackingSettings(name='x', uri='sqlite:///mlflow.db', points='all')) as shown:\n"
    code += "    print('ready', flush=True)\n"
    code += f"    shown.begin(Path({str(folder)!r})); shown.finish()\n" if working else "    time.sleep(60)\n"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as study:
        assert study.stdout is not None
        study.stdout.readline()
        child = the_child(study.pid)
        deadline = time.monotonic() + 30
        while working and count(here / "mlflow.db", POINTS) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        study.kill()
        assert ended(child, 15)
    if working:
        if count(here / "mlflow.db", "SELECT count(*) FROM runs WHERE status = 'RUNNING'"):
            return False
        assert 0 < count(here / "mlflow.db", POINTS) < 20000
        assert main(["store", "sync", "uri=sqlite:///mlflow.db", "points=all"]) == 0
        assert count(here / "mlflow.db", POINTS) == 20000
    return True


def test_without_views_there_is_no_process(tmp_path: Path) -> None:
    with background_tracking(wanted(None)) as shown:
        assert children(os.getpid()) == []
        shown.begin(tmp_path)
        shown.finish()


# Optuna


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sub/trials.log", "sqlite:///trials.db"])
def test_optuna_shows_every_point_once(here: Path, storage: str) -> None:
    import optuna

    folder = finished(here / "outputs", odd_table())
    assert [show_in_optuna(folder, storage, ALL) for _ in range(2)] == [6, 0]
    names = ["sweep/2026-11-21_07-40-12/g1", "sweep/2026-11-21_07-40-12/g2"]
    from dse.tracking.optuna_storage import _open

    first, second = (optuna.load_study(study_name=name, storage=_open(storage)) for name in names)
    assert first.metric_names == ["makespan_s", "energy_J"]
    assert [trial.values for trial in first.trials] == [[3e-3, 1.0], [2e-3, 2.0], [1e-3, 1.5]]
    assert first.trials[0].params == {"schedule.name": "serial", "mover": "cu", "chunks": 1, "share[0]": 0.1} | {
        "fused": True
    }
    assert first.trials[1].params == {"schedule.name": "ring", "chunks": 2, "fused": False}
    assert {trial.number for trial in first.best_trials} == {0, 2}
    assert [trial.state.name for trial in second.trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert [[max(trial.constraints.values()) > 0 for trial in study.trials] for study in (first, second)] == [
        [False] * 3,
        [False, True, True],
    ]
    assert second.trials[1].user_attrs["reason"] == "needs 2 GiB more"
    assert second.trials[1].user_attrs["key"] == key(4)


def test_a_sampler_that_goes_on_from_the_view_avoids_what_failed(here: Path) -> None:
    import optuna

    from dse.tracking.optuna_storage import _open

    rows = wide_table(60)
    modes = np.array(["plain", "bad", "worse", "worst"])[np.arange(60) % 4]
    rows["mover"], rows["status"] = modes, np.where(modes == "plain", "ok", "invalid")
    rows["reason"] = np.where(modes == "plain", "", "is no number")
    rows.loc[modes != "plain", list(GOALS)] = float("nan")
    show_in_optuna(finished(here / "outputs", rows), "trials.log", ALL)
    (name,) = optuna.get_all_study_names(storage=_open("trials.log"))
    study = optuna.load_study(study_name=name, storage=_open("trials.log"), sampler=optuna.samplers.TPESampler(seed=0))
    movers = [study.ask().suggest_categorical("mover", sorted(set(modes.tolist()))) for _ in range(20)]
    assert movers.count("plain") >= 15


def test_a_journal_with_a_torn_last_line_is_mended(here: Path) -> None:
    folder = finished(here / "outputs", odd_table())
    show_in_optuna(folder, "trials.log", ALL)
    journal = (here / "trials.log").read_bytes()
    (here / "trials.log").write_bytes(journal[:-20])
    assert show_in_optuna(folder, "trials.log", ALL) >= 1
    assert show_in_optuna(folder, "trials.log", ALL) == 0


def test_a_storage_that_fails_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(here / "outputs", odd_table())
    with pytest.raises(StorageError, match=r"postgresql://me:\*\*\*@127.0.0.1:9"):
        show_in_optuna(folder, "postgresql://me:secret@127.0.0.1:9/x", ALL)
    (here / "trials.db").write_bytes(b"garbage " * 1000)
    assert main(["store", "sync", "optuna=sqlite:///trials.db"]) == 4
    assert "Optuna's storage was passed over" in capsys.readouterr().err
