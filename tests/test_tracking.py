"""Tracking shows a study in MLflow: complete, the same by every way, and never in the way."""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import pandas as pd
import pytest

from dse.tracking import StudyRecord, TrackingError, prepare, resolve, serve, track

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised database; building one takes seconds, copying it does not."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    prepare(f"sqlite:///{file}")
    return file


@pytest.fixture
def uri(empty_database: Path, tmp_path: Path) -> str:
    folder = tmp_path / "a store"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture
def record(tmp_path: Path) -> StudyRecord:
    folder = tmp_path / "out"
    (folder / "figures").mkdir(parents=True)
    (folder / "figures" / "front.png").write_bytes(b"png")
    (folder / "config.yaml").write_text("study: x\n")
    (folder / "latest").symlink_to(folder)
    (folder / "latest.yaml").symlink_to(folder / "config.yaml")
    table = pd.DataFrame(
        {
            "scenario": ["g1", "g1", "g1", "g2", "g2", "g2"],
            "key": [f"{i}f3a2c99" for i in range(6)],
            "status": ["ok", "ok", "ok", "ok", "infeasible", "failed"],
            "reason": ["", "", "", None, "needs 2 GiB more", "line 1\nline \0 2 µs" + "x" * 9000],
            "on_front": [True, False, False, True, False, False],
            "engine": ["event"] * 5 + ["analytic"],
            "schedule.name": ["serial", "ring", "ring", "", "serial", "x" * 7000],
            "mover": ["cu", None, "dma", "cu", None, "cu"],
            "chunks": pd.array([1, 2, None, 4, 8, 16], dtype="Int64"),
            "share[0]": [0.1, math.nan, 1 / 3, 1e-9, 1.0, 2.5],
            "fused": [True, False, True, False, True, False],
            "makespan_s": [3e-3, 2e-3, 1e-3, 0.1 + 0.2, math.nan, math.inf],
            "exposed_s": [1, 2, 3, 4, 5, 6],
            "energy_J": [None, -math.inf, 1.5, 2.5, None, None],
        }
    )
    return StudyRecord(
        study="sweep",
        name="sweep 2026-11-21 07:40:12",
        table=table,
        knobs=("schedule.name", "mover", "chunks", "share[0]", "fused"),
        metrics=("makespan_s", "exposed_s", "energy_J"),
        folder=folder,
        parent_metrics={"num_points": 6, "hypervolume": math.nan},
        parent_tags={"dse.git": "abc", "dse.folder": "r\ud800sults"},
        note="# What came out",
    )


def make_slow(uri: str) -> None:
    """Give a table a column that the bulk writer does not know, as another MLflow might."""
    with sqlite3.connect(database(uri)) as connection:
        connection.execute("ALTER TABLE runs ADD COLUMN surprise TEXT")
    connection.close()


def add_trigger(uri: str, trigger: str) -> None:
    with sqlite3.connect(database(uri)) as connection:
        connection.execute(f"CREATE TRIGGER fault {trigger}")
    connection.close()


def database(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///"))


def mlflow_client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(uri)


def runs(uri: str, experiment: str, **search: Any) -> list[Any]:
    client = mlflow_client(uri)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id], **search))


def points_of(uri: str, study_run: str) -> list[Any]:
    chosen = runs(uri, "dse/sweep/points", filter_string=f"tags.`dse.study_run` = '{study_run}'")
    return sorted(chosen, key=lambda run: run.data.tags["dse.key"])


def shown(run: Any) -> dict[str, Any]:
    """Everything of a point run but ids and times."""
    passing = {"dse.study_run", "mlflow.parentRunId"}
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "stage": run.info.lifecycle_stage,
        "user": run.info.user_id,
        "params": run.data.params,
        "metrics": run.data.metrics,
        "tags": {key: value for key, value in run.data.tags.items() if key not in passing},
    }


def test_both_ways_give_the_same_runs(uri: str, record: StudyRecord) -> None:
    fast = track(record, uri=uri)
    make_slow(uri)
    with pytest.warns(RuntimeWarning, match="runs differs in surprise") as warned:
        slow = track(record, uri=uri)
    assert [fast.how, slow.how, len(warned)] == ["bulk", "client", 1]
    by_bulk, by_client = points_of(uri, fast.run_id), points_of(uri, slow.run_id)
    assert [shown(run) for run in by_bulk] == [shown(run) for run in by_client]
    assert len(by_bulk) == fast.num_points == slow.num_points == 6
    client = mlflow_client(uri)
    for one, other in zip(by_bulk, by_client, strict=True):
        assert one.info.artifact_uri.replace(one.info.run_id, "") == other.info.artifact_uri.replace(
            other.info.run_id, ""
        )
        assert one.info.start_time <= one.info.end_time
        for metric in one.data.metrics:
            histories = [client.get_metric_history(run.info.run_id, metric) for run in (one, other)]
            assert [[(m.value, m.step) for m in history] for history in histories] == [
                [(one.data.metrics[metric], 0)]
            ] * 2


def test_a_point_run_shows_its_row(uri: str, record: StudyRecord) -> None:
    tracked = track(record, uri=uri)
    first, _, third, _, infeasible, failed = points_of(uri, tracked.run_id)
    assert first.info.status == "FINISHED"
    assert first.info.run_name == "g1 0f3a2c schedule.name=serial mover=cu chunks=1 share_0_=0.1 fused=True"
    assert third.info.run_name.endswith("share_0_=0.3333 fused=True")
    assert third.data.params["share_0_"] == repr(1 / 3)
    tags = first.data.tags
    assert {key.removeprefix("dse."): value for key, value in tags.items() if key.startswith("dse.")} == {
        **{"study": "sweep", "study_run": tracked.run_id, "scenario": "g1", "key": "0f3a2c99"},
        **{"status": "ok", "on_front": "true", "engine": "event"},
    }
    assert infeasible.info.status == failed.info.status == "FAILED"
    assert infeasible.data.tags["dse.reason"] == "needs 2 GiB more"
    assert infeasible.data.tags["dse.on_front"] == "false"


def test_inactive_knobs_are_no_params_and_infinite_or_missing_metrics_are_not_logged(
    uri: str, record: StudyRecord
) -> None:
    points = points_of(uri, track(record, uri=uri).run_id)
    assert points[1].data.params == {"schedule.name": "ring", "chunks": "2", "fused": "False"}
    assert points[2].data.params.keys() == {"schedule.name", "mover", "share_0_", "fused"}
    assert points[0].data.metrics == {"makespan_s": 3e-3, "exposed_s": 1.0}
    assert points[1].data.metrics == {"makespan_s": 2e-3, "exposed_s": 2.0}
    assert points[5].data.metrics == {"exposed_s": 6.0}


def test_long_texts_are_cut_where_one_can_see_it(uri: str, record: StudyRecord) -> None:
    run_id = track(replace(record, note="n" * 9000), uri=uri).run_id
    last = points_of(uri, run_id)[-1]
    note = mlflow_client(uri).get_run(run_id).data.tags["mlflow.note.content"]
    assert last.data.params["schedule.name"] == "x" * 5999 + "…"
    assert [len(last.data.tags["dse.reason"]), len(note)] == [8000, 8000]
    assert last.data.tags["dse.reason"].startswith("line 1\nline \ufffd 2 µs")
    assert last.data.tags["dse.reason"].endswith("x…") and note.endswith("n…")


def test_points_can_be_filtered_and_sorted_by_metric(uri: str, record: StudyRecord) -> None:
    track(record, uri=uri)
    chosen = runs(
        uri,
        "dse/sweep/points",
        filter_string="metrics.makespan_s < 0.01 and params.`schedule.name` = 'ring'",
        order_by=["metrics.makespan_s ASC"],
    )
    assert [run.data.metrics["makespan_s"] for run in chosen] == [1e-3, 2e-3]


def test_the_study_run_holds_note_tags_numbers_and_files_but_no_links(uri: str, record: StudyRecord) -> None:
    tracked = track(record, uri=uri)
    client = mlflow_client(uri)
    run = client.get_run(tracked.run_id)
    assert [run.info.status, run.info.run_name] == ["FINISHED", record.name]
    assert run.data.metrics == {"num_points": 6.0}
    assert run.data.tags.items() >= {
        ("dse.study", "sweep"),
        ("dse.points_logged", "all"),
        ("dse.git", "abc"),
        ("dse.folder", "r?sults"),
        ("mlflow.note.content", "# What came out"),
    }
    assert [file.path for file in client.list_artifacts(tracked.run_id)] == ["config.yaml", "figures"]
    artifacts = Path(url2pathname(urlparse(run.info.artifact_uri).path))
    assert artifacts.is_relative_to(database(uri).parent / "mlartifacts")
    assert (artifacts / "figures" / "front.png").read_bytes() == b"png"
    assert client.get_parent_run(points_of(uri, tracked.run_id)[0].info.run_id).info.run_id == tracked.run_id


def test_the_artifacts_never_hold_themselves(uri: str, record: StudyRecord) -> None:
    with_database = replace(record, folder=database(uri).parent)
    (with_database.folder / "claims.json").write_text("{}")
    track(with_database, uri=uri)
    tracked = track(with_database, uri=uri)
    files = mlflow_client(uri).list_artifacts(tracked.run_id)
    assert [file.path for file in files] == ["claims.json"]


def test_a_second_time_adds_a_study_run_and_leaves_the_first_alone(uri: str, record: StudyRecord) -> None:
    first = track(record, uri=uri)
    before = [run.to_dictionary() for run in points_of(uri, first.run_id)]
    second = track(replace(record, table=record.table.head(2)), uri=uri)
    assert first.experiment_id == second.experiment_id
    assert {run.info.run_id for run in runs(uri, "dse/sweep")} == {first.run_id, second.run_id}
    assert [run.to_dictionary() for run in points_of(uri, first.run_id)] == before
    assert len(points_of(uri, second.run_id)) == 2


def test_a_study_without_points_is_tracked_too(uri: str, record: StudyRecord) -> None:
    tracked = track(replace(record, table=record.table.head(0)), uri=uri)
    assert [tracked.num_points, tracked.how] == [0, "bulk"]
    assert mlflow_client(uri).get_run(tracked.run_id).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("trigger", "because"),
    [
        (
            "BEFORE INSERT ON runs WHEN NEW.status != 'RUNNING' BEGIN SELECT RAISE(ABORT, 'no'); END",
            "refused",
        ),
        (
            "AFTER INSERT ON runs WHEN NEW.status != 'RUNNING'"
            " BEGIN UPDATE runs SET name = 'other' WHERE run_uuid = NEW.run_uuid; END",
            "did not read back",
        ),
    ],
    ids=["refused", "altered"],
)
def test_a_first_point_that_bulk_gets_wrong_is_written_again_by_the_client(
    uri: str, record: StudyRecord, trigger: str, because: str
) -> None:
    add_trigger(uri, trigger)
    with pytest.warns(RuntimeWarning, match=because):
        tracked = track(record, uri=uri)
    assert tracked.how == "client"
    assert len(runs(uri, "dse/sweep/points")) == 6


def test_a_failure_half_way_ends_the_study_run_failed(uri: str, record: StudyRecord) -> None:
    add_trigger(uri, "BEFORE INSERT ON params WHEN NEW.value = '16' BEGIN SELECT RAISE(ABORT, 'disk on fire'); END")
    with pytest.raises(TrackingError, match="disk on fire") as caught:
        track(record, uri=uri)
    assert "\n" not in str(caught.value)
    (study_run,) = runs(uri, "dse/sweep")
    assert study_run.info.status == "FAILED"
    assert "dse.points_logged" not in study_run.data.tags


def test_ctrl_c_ends_the_study_run_killed(uri: str, record: StudyRecord) -> None:
    class Interrupting(dict[str, str]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        track(replace(record, parent_tags=Interrupting()), uri=uri)
    (study_run,) = runs(uri, "dse/sweep")
    assert study_run.info.status == "KILLED"


def test_what_cannot_be_shown_is_refused_before_anything_is_written(uri: str, record: StudyRecord) -> None:
    with pytest.raises(TrackingError, match="lacks the columns reason, engine"):
        track(replace(record, table=record.table.drop(columns=["reason", "engine"])), uri=uri)
    with pytest.raises(TrackingError, match="folder of the study does not exist"):
        track(replace(record, folder=record.folder / "none"), uri=uri)
    with pytest.raises(TrackingError, match="two knobs have the same name"):
        track(replace(record, knobs=("share[0]", "share{0}")), uri=uri)
    assert mlflow_client(uri).get_experiment_by_name("dse/sweep") is None


def test_a_text_among_the_metrics_is_named(uri: str, record: StudyRecord) -> None:
    with pytest.raises(TrackingError, match="metric mover holds something that is no number"):
        track(replace(record, metrics=("mover",)), uri=uri)


def test_a_deleted_experiment_is_not_brought_back(uri: str, record: StudyRecord) -> None:
    client = mlflow_client(uri)
    client.delete_experiment(track(record, uri=uri).experiment_id)
    with pytest.raises(TrackingError, match="dse/sweep was deleted"):
        track(record, uri=uri)


def test_a_file_that_is_no_database_fails_at_once_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    file.write_bytes(b"no database " * 100)
    start = time.monotonic()
    with pytest.raises(TrackingError, match="file is not a database"):
        prepare(f"sqlite:///{file}")
    assert time.monotonic() - start < 5
    assert file.read_bytes() == b"no database " * 100


def test_errors_do_not_show_passwords() -> None:
    with pytest.raises(TrackingError, match=r"could not open nothing://me:\*\*\*@host/x"):
        prepare("nothing://me:secret@host/x")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{here}/mlflow.db"),
        ("sqlite:///../x.db?timeout=3", "sqlite:///{above}/x.db?timeout=3"),
        ("sqlite+pysqlite:///x.db", "sqlite+pysqlite:///{here}/x.db"),
        ("sqlite:////data/x.db", "sqlite:////data/x.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("postgresql://host/x", "postgresql://host/x"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
    ],
)
def test_resolve_makes_the_path_of_a_database_absolute(
    given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "work"
    here.mkdir()
    monkeypatch.chdir(here)
    assert resolve(given) == expected.format(here=here.resolve(), above=tmp_path.resolve())


def test_importing_the_module_does_not_import_mlflow() -> None:
    code = "import sys, dse.tracking; print({'mlflow', 'pandas', 'sqlalchemy'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_three_processes_may_build_a_store_at_once_and_do_it_in_silence(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db.new").write_bytes(b"a build that was cut short")
    code = "import dse.tracking as t; t.prepare('sqlite:///mlflow.db')"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert outputs == ["", "", ""]
    assert [process.returncode for process in started] == [0, 0, 0]
    names = [found.name for found in mlflow_client(f"sqlite:///{tmp_path}/mlflow.db").search_experiments()]
    assert names == ["Default"]


def test_serving_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(f"sqlite:///{tmp_path}/none.db") == 2
    assert "There is no tracking database at" in capsys.readouterr().err


def test_serving_on_a_taken_port_says_so(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(uri, port=port) == 2
    assert f"Port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err


@pytest.fixture
def server(uri: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"import sys, dse.tracking as t; sys.exit(t.serve({uri!r}, port={port}))"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/health")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def wait_until_up(url: str) -> None:
    deadline = time.monotonic() + 45
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.1)


def descendants(parent: int) -> set[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {int(child) for child in children}.union(*(descendants(int(child)) for child in children))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists processes the Linux way")
def test_a_served_store_takes_the_same_runs_and_ctrl_c_leaves_no_process_behind(
    server: tuple[subprocess.Popen[str], str], uri: str, record: StudyRecord
) -> None:
    process, url = server
    direct, over_http = track(record, uri=uri), track(record, uri=url)
    assert [direct.how, over_http.how] == ["bulk", "client"]
    assert [shown(run) for run in points_of(uri, direct.run_id)] == [
        shown(run) for run in points_of(url, over_http.run_id)
    ]
    files = mlflow_client(url).list_artifacts(over_http.run_id)
    assert [file.path for file in files] == ["config.yaml", "figures"]
    started = descendants(process.pid)
    assert len(started) == 2
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert url in output and "Ctrl-C" in output
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
