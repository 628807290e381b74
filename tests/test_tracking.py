"""MLflow shows a finished study: complete, the same by every way, as often as asked, and never in the way."""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest

from dse.results.selection import SelectionRule, shown_rows
from dse.store.owner import me
from dse.tracking.database import DamagedTrackingError, TrackingError, TrackingStore, open_store, repair, resolve
from dse.tracking.server import serve
from dse.tracking.sync import reap, sync
from tests.folders import finished, key, odd_table, wide_table

pytestmark = pytest.mark.slow  # MLflow takes seconds to import

REPOSITORY = Path(__file__).parents[1]
ALL = SelectionRule("all")


@pytest.fixture
def uri(empty_database: Path, tmp_path: Path) -> str:
    folder = tmp_path / "a store"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture
def store(uri: str) -> TrackingStore:
    return open_store(uri)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return finished(tmp_path / "outputs", odd_table())


def database(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///"))


def make_slow(uri: str) -> None:
    """Give a table a column that the bulk writer does not know, as another MLflow might."""
    with sqlite3.connect(database(uri)) as connection:
        connection.execute("ALTER TABLE runs ADD COLUMN surprise TEXT")
    connection.close()


def add_trigger(uri: str, trigger: str) -> None:
    with sqlite3.connect(database(uri)) as connection:
        connection.execute(f"CREATE TRIGGER fault {trigger}")
    connection.close()


def runs(store: TrackingStore, experiment: str, **search: Any) -> list[Any]:
    found_experiment = store.client.get_experiment_by_name(experiment)
    return list(store.client.search_runs([found_experiment.experiment_id], **search)) if found_experiment else []


def points_of(store: TrackingStore, study_run: str) -> list[Any]:
    chosen = runs(store, "dse/sweep/points", filter_string=f"tags.`mlflow.parentRunId` = '{study_run}'")
    return sorted(chosen, key=lambda run: run.data.tags["dse.point_key"])


def everything(store: TrackingStore) -> dict[str, list[dict[str, Any]]]:
    """All rows of the tables that hold runs, with run ids replaced by what the run is about."""
    tables = ("runs", "params", "metrics", "latest_metrics", "tags")
    with sqlite3.connect(database(store.uri)) as connection:
        connection.row_factory = sqlite3.Row
        contents = {table: [dict(row) for row in connection.execute(f"SELECT * FROM {table}")] for table in tables}
    connection.close()
    about = {row["run_uuid"]: row["value"] for row in contents["tags"] if row["key"] in ("dse.point_key", "dse.run")}
    passing = {"dse.owner"}

    def plain(row: dict[str, Any]) -> dict[str, Any]:
        texts = {name: value for name, value in row.items() if name != "run_uuid"}
        for run, name in about.items():
            texts = {key: value.replace(run, name) if isinstance(value, str) else value for key, value in texts.items()}
        root = str(database(store.uri).parent.as_uri())
        return {"run": about[row["run_uuid"]]} | {
            key: value.replace(root, "root") if isinstance(value, str) else value for key, value in texts.items()
        }

    of_points = {
        table: [plain(row) for row in rows if row.get("key") not in passing and row["run_uuid"] in about]
        for table, rows in contents.items()
    }
    return {table: sorted(rows, key=repr) for table, rows in of_points.items()}


def snapshot(store: TrackingStore) -> dict[str, Any]:
    """Everything, ids included."""
    with sqlite3.connect(database(store.uri)) as connection:
        tables = ("runs", "params", "metrics", "latest_metrics", "tags")
        contents = {
            table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in tables
        }
    connection.close()
    return contents


# Parity


@pytest.mark.more
def test_parity_a_run_written_in_bulk_equals_one_written_by_the_client(
    store: TrackingStore, folder: Path, empty_database: Path, tmp_path: Path
) -> None:
    import mlflow

    shutil.copytree(empty_database.parent, tmp_path / "other")
    other = open_store(f"sqlite:///{tmp_path / 'other'}/mlflow.db")
    fast, slow = sync(folder, store, ALL), sync(folder, replace(other, engine=None), ALL)
    assert [fast.how, slow.how] == ["bulk", "client"]
    assert fast.num_points == slow.num_points == 6
    assert everything(store) == everything(other)
    frames = []
    for place, done in ((store, fast), (other, slow)):
        mlflow.set_tracking_uri(place.uri)
        frame = mlflow.search_runs(experiment_names=["dse/sweep/points"])
        points = frame.drop(columns=["run_id", "artifact_uri", "tags.mlflow.parentRunId"])
        frames.append(points.sort_values("tags.dse.point_key").sort_index(axis=1).reset_index(drop=True))
        for run in points_of(place, done.run_id):
            assert all(len(place.client.get_metric_history(run.info.run_id, name)) == 1 for name in run.data.metrics)
    assert frames[0].equals(frames[1])
    assert len(frames[0]) == 6


def test_what_the_bulk_writer_does_not_know_is_written_by_the_client(store: TrackingStore, folder: Path) -> None:
    make_slow(store.uri)
    done = sync(folder, store, ALL)
    assert [done.how, done.reason] == ["client", "table runs differs in surprise"]
    assert len(points_of(store, done.run_id)) == 6


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
    store: TrackingStore, folder: Path, trigger: str, because: str
) -> None:
    add_trigger(store.uri, trigger)
    done = sync(folder, store, ALL)
    assert done.how == "client" and because in done.reason
    assert len(runs(store, "dse/sweep/points")) == 6


# What is shown


def test_a_point_run_shows_its_row(store: TrackingStore, folder: Path) -> None:
    done = sync(folder, store, ALL)
    first, second, third, _, infeasible, failed = points_of(store, done.run_id)
    assert first.info.status == "FINISHED"
    assert first.info.run_name == "000000 g1 serial cu 1 0.1 True"
    assert third.info.run_name.endswith("0.3333 True")
    names = [run.info.run_name[:20] for run in points_of(store, done.run_id)]
    assert len(set(names)) == len(names)
    assert third.data.params["share_0_"] == repr(1 / 3)
    tags = first.data.tags
    assert {name.removeprefix("dse."): value for name, value in tags.items() if name.startswith("dse.")} == {
        "may_win": "true",
        **{"scenario": "g1", "point_key": key(0), "status": "ok"},
        **{"on_front": "true", "baseline": "true", "engine": "event"},
    }
    assert "dse.baseline" not in second.data.tags
    assert infeasible.info.status == failed.info.status == "FAILED"
    assert infeasible.data.tags["dse.reason"] == "needs 2 GiB more"
    assert infeasible.data.tags["dse.on_front"] == "false"
    assert store.client.get_parent_run(first.info.run_id).info.run_id == done.run_id


def test_inactive_knobs_are_no_params_and_infinite_or_missing_metrics_are_not_logged(
    store: TrackingStore, folder: Path
) -> None:
    points = points_of(store, sync(folder, store, ALL).run_id)
    assert points[1].data.params == {"schedule.name": "ring", "chunks": "2", "fused": "False"}
    assert points[2].data.params.keys() == {"schedule.name", "mover", "share_0_", "fused"}
    assert points[0].data.metrics == {"makespan_s": 3e-3, "exposed_s": 1.0, "energy_J": 1.0}
    assert points[5].data.metrics == {"exposed_s": 6.0}


def test_long_texts_are_cut_where_one_can_see_it(store: TrackingStore, folder: Path) -> None:
    last = points_of(store, sync(folder, store, ALL).run_id)[-1]
    assert last.data.params["schedule.name"] == "x" * 5999 + "…"
    assert len(last.data.tags["dse.reason"]) == 8000
    assert last.data.tags["dse.reason"].startswith("line 1\nline \ufffd 2 µs")
    assert last.data.tags["dse.reason"].endswith("x…")


def test_points_can_be_filtered_and_sorted_by_metric(store: TrackingStore, folder: Path) -> None:
    sync(folder, store, ALL)
    chosen = runs(
        store,
        "dse/sweep/points",
        filter_string="metrics.makespan_s < 0.01 and params.`schedule.name` = 'ring'",
        order_by=["metrics.makespan_s ASC"],
    )
    assert [run.data.metrics["makespan_s"] for run in chosen] == [1e-3, 2e-3]


def test_the_study_run_tells_what_was_run_and_holds_its_files_but_no_links(store: TrackingStore, folder: Path) -> None:
    (folder / "latest.yaml").symlink_to(folder / "config.yaml")
    done = sync(folder, store, ALL)
    run = store.client.get_run(done.run_id)
    assert [run.info.status, run.info.run_name] == ["FINISHED", "sweep 2026-11-21_07-40-12"]
    assert run.info.start_time < run.info.end_time
    assert run.data.metrics.items() >= {("num_points", 6), ("front_size", 3), ("num_ok", 4), ("failed_points", 1)}
    assert run.data.params.items() >= {("search", "exhaustive"), ("seed", "3"), ("version.numpy", "2.4.6")}
    assert run.data.tags.items() >= {
        *{("dse.study", "sweep"), ("dse.points", "all"), ("dse.git", "abc"), ("dse.dirty", "true"), ("dse.seed", "3")},
        *{("dse.backend", "toy 1"), ("dse.command", "python -m dse study=sweep"), ("mlflow.source.git.commit", "abc")},
    }
    assert "| g1 | ring, mover DMA engines, share[0] 0.333" in run.data.tags["mlflow.note.content"]
    files = [file.path for file in store.client.list_artifacts(done.run_id)]
    assert files == ["claims.json", "config.yaml", "figures", "provenance.json", "results.parquet", "summary.json"]
    artifacts = Path(url2pathname(urlparse(run.info.artifact_uri).path))
    assert artifacts.is_relative_to(database(store.uri).parent / "mlartifacts")
    assert (artifacts / "figures" / "front.png").read_bytes() == b"png"


def test_the_study_run_shows_how_the_search_went(store: TrackingStore, tmp_path: Path) -> None:
    table = wide_table(500, failures=30)
    table["makespan_s"] = [math.nan if status == "failed" else 1000.0 - n for n, status in enumerate(table["status"])]
    done = sync(finished(tmp_path, table), store, SelectionRule("none"))
    best = store.client.get_metric_history(done.run_id, "best_makespan_s/g1")
    failed = store.client.get_metric_history(done.run_id, "failed_points")
    assert len(best) <= 100 and len(failed) <= 100
    assert [(point.step, point.value) for point in sorted(best, key=lambda metric: metric.step)][-1] == (500, 501.0)
    assert all(point.value == table["makespan_s"].head(point.step).min() for point in best)
    assert all(point.value == (table["status"].head(point.step) == "failed").sum() for point in failed)


def test_the_artifacts_never_hold_themselves(folder: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, folder / "mlflow.db")
    store = open_store(f"sqlite:///{folder}/mlflow.db")
    for rule in (SelectionRule("none"), ALL):
        done = sync(folder, store, rule)
    assert "mlflow.db" not in (names := [file.path for file in store.client.list_artifacts(done.run_id)])
    assert "mlartifacts" not in names and "results.parquet" in names


# Which points


def test_a_long_table_shows_fronts_baselines_and_a_sample_of_failures(tmp_path: Path) -> None:
    folder = finished(tmp_path, wide_table(2000, fronts=5, failures=400))
    keys = [
        name
        for part in shown_rows(folder / "results.parquet", SelectionRule("auto", 1999))
        for name in part["key"].to_pylist()
    ]
    table = wide_table(2000, fronts=5, failures=400)
    chosen = table[table["key"].isin(keys)]
    assert keys[:5] == sorted(table["key"][:5])
    assert set(keys) >= set(table["baseline"])
    assert (chosen["status"] == "failed").sum() in range(100, 105)  # a hundred, and baselines that failed
    assert len(keys) == len(set(keys)) == len(chosen)
    fewer = [
        name
        for part in shown_rows(folder / "results.parquet", SelectionRule("auto", 7))
        for name in part["key"].to_pylist()
    ]
    assert fewer == keys[:7]


def test_promoted_points_are_shown_and_marked(store: TrackingStore, tmp_path: Path) -> None:
    table = wide_table(300)
    table["promoted"] = [number == 250 for number in range(300)]
    done = sync(finished(tmp_path, table), store, SelectionRule("auto", 100))
    promoted = [run for run in points_of(store, done.run_id) if run.data.tags.get("dse.promoted") == "true"]
    assert [run.data.tags["dse.point_key"] for run in promoted] == [table["key"][250]]


@pytest.mark.parametrize(
    ("rule", "count"), [(SelectionRule(), 300), (SelectionRule("auto", 299), 5), (SelectionRule("none"), 0)], ids=str
)
def test_the_rule_bounds_the_runs_and_the_whole_table_is_always_an_artifact(
    store: TrackingStore, tmp_path: Path, rule: SelectionRule, count: int
) -> None:
    folder = finished(tmp_path / "outputs", wide_table(300))
    done = sync(folder, store, rule)
    assert done.num_points == len(points_of(store, done.run_id)) == count
    artifact = store.client.download_artifacts(done.run_id, "results.parquet", str(tmp_path))
    assert Path(artifact).read_bytes() == (folder / "results.parquet").read_bytes()


# As often as asked


@pytest.mark.parametrize("how", ["bulk", "client"])
def test_a_second_time_changes_nothing(store: TrackingStore, folder: Path, how: str) -> None:
    used = store if how == "bulk" else replace(store, engine=None)
    first = sync(folder, used, ALL)
    before = snapshot(store)
    again = sync(folder, used, ALL)
    assert [first.how, again.how, again.run_id] == [how, "", first.run_id]
    assert snapshot(store) == before


def test_a_deleted_database_is_restored(store: TrackingStore, folder: Path, empty_database: Path) -> None:
    sync(folder, store, ALL)
    before = everything(store)
    shutil.rmtree(database(store.uri).parent / "mlartifacts")
    store.engine.dispose() if store.engine else None
    for file in database(store.uri).parent.glob("mlflow.db*"):
        file.unlink()
    shutil.copy(empty_database, database(store.uri))
    sync(folder, open_store(store.uri), ALL)
    assert everything(store) == before


def test_more_points_are_added_when_asked_for_and_never_taken_away(store: TrackingStore, tmp_path: Path) -> None:
    folder = finished(tmp_path, wide_table(300))
    counts = []
    for rule in (SelectionRule("none"), SelectionRule("auto", 299), SelectionRule("all"), SelectionRule("none")):
        done = sync(folder, store, rule)
        counts.append((done.num_points, len(points_of(store, done.run_id))))
    assert counts == [(0, 0), (5, 5), (295, 300), (0, 300)]
    assert len(runs(store, "dse/sweep")) == 1


@pytest.mark.parametrize("how", ["bulk", "client"])
def test_what_was_cut_short_is_completed(store: TrackingStore, folder: Path, how: str) -> None:
    used = store if how == "bulk" else replace(store, engine=None)
    add_trigger(store.uri, "BEFORE INSERT ON params WHEN NEW.value = '16' BEGIN SELECT RAISE(ABORT, 'on fire'); END")
    with pytest.raises(TrackingError, match="on fire") as caught:
        sync(folder, used, ALL)
    assert "\n" not in str(caught.value)
    (study_run,) = runs(store, "dse/sweep")
    assert study_run.info.status == "FAILED" and "dse.points" not in study_run.data.tags
    with sqlite3.connect(database(store.uri)) as connection:
        connection.execute("DROP TRIGGER fault")
    connection.close()
    done = sync(folder, used, ALL)
    assert [run.info.status for run in runs(store, "dse/sweep")] == ["FINISHED"]
    assert [run.data.tags["dse.point_key"] for run in points_of(store, done.run_id)] == [key(n) for n in range(6)]
    assert "RUNNING" not in {run.info.status for run in points_of(store, done.run_id)}


def test_two_at_the_same_time_write_once(store: TrackingStore, tmp_path: Path) -> None:
    folder = finished(tmp_path, wide_table(300))
    done: list[Any] = []
    both = [threading.Thread(target=lambda: done.append(sync(folder, store, ALL))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(report.num_points for report in done) == [0, 300]
    assert len(runs(store, "dse/sweep")) == 1
    assert len(points_of(store, done[0].run_id)) == 300


def test_two_runs_of_a_study_lie_beside_each_other(store: TrackingStore, tmp_path: Path) -> None:
    done = [sync(finished(tmp_path, odd_table(), f"2026-11-21_07-40-1{n}"), store, ALL) for n in range(2)]
    assert {run.info.run_id for run in runs(store, "dse/sweep")} == {report.run_id for report in done}
    assert [len(points_of(store, report.run_id)) for report in done] == [6, 6]


def test_a_study_without_points_is_shown_too(store: TrackingStore, tmp_path: Path) -> None:
    done = sync(finished(tmp_path, odd_table().head(0)), store, ALL)
    assert [done.num_points, done.how] == [0, "bulk"]
    assert store.client.get_run(done.run_id).info.status == "FINISHED"


def test_what_somebody_deleted_in_mlflow_stays_deleted(store: TrackingStore, folder: Path) -> None:
    done = sync(folder, store, SelectionRule("none"))
    store.client.delete_run(done.run_id)
    assert sync(folder, store, ALL).how == ""
    store.client.delete_experiment(store.client.get_experiment_by_name("dse/sweep").experiment_id)
    with pytest.raises(TrackingError, match="dse/sweep was deleted"):
        sync(folder, store, ALL)


# Dead processes


def test_study_runs_of_dead_processes_are_marked_and_no_others(store: TrackingStore, folder: Path) -> None:
    finished_one = sync(folder, store, SelectionRule("none"))
    experiment = store.client.get_experiment_by_name("dse/sweep").experiment_id
    code = "from dse.store.owner import me; print(me().text)"
    command = [sys.executable, "-c", code]
    dead = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
    foreign = dead.replace(socket.gethostname(), "elsewhere")
    owners = {"dead": dead, "alive": me().text, "foreign": foreign, "nobody": "", "strange": "{x"}
    run_ids = {
        name: store.client.create_run(experiment, tags={"dse.owner": text} if text else {}).info.run_id
        for name, text in owners.items()
    }
    assert reap(store) == 1
    status = {name: store.client.get_run(run).info.status for name, run in run_ids.items()}
    assert status == {"dead": "KILLED", **dict.fromkeys(("alive", "foreign", "nobody", "strange"), "RUNNING")}
    assert "died" in store.client.get_run(run_ids["dead"]).data.tags["dse.killed"]
    assert store.client.get_run(finished_one.run_id).info.status == "FINISHED"


@pytest.mark.more
def test_a_sync_that_was_killed_is_completed_by_the_next(store: TrackingStore, tmp_path: Path) -> None:
    folder = finished(tmp_path, wide_table(9000))
    code = "from dse.tracking.database import open_store; from dse.tracking.sync import sync\n"
    code += "from dse.results.selection import SelectionRule; from pathlib import Path\n"
    code += f"store, rule = open_store({store.uri!r}), SelectionRule('all')\n"
    code += f"sync(Path({str(folder)!r}), store, rule, seen=lambda n: print(n, flush=True))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    (left,) = runs(store, "dse/sweep")
    assert left.info.status == "RUNNING"
    assert reap(store) == 1
    done = sync(folder, store, ALL)
    (run,) = runs(store, "dse/sweep")
    assert [run.info.run_id, run.info.status] == [left.info.run_id, "FINISHED"]
    assert "dse.killed" not in run.data.tags
    with sqlite3.connect(database(store.uri)) as connection:
        query = "SELECT count(*), count(DISTINCT value) FROM tags WHERE key = 'dse.point_key'"
        assert connection.execute(query).fetchone() == (9000, 9000)
    connection.close()
    assert 0 < done.num_points < 9000


def test_ctrl_c_ends_the_study_run_killed(store: TrackingStore, folder: Path) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync(folder, store, ALL, seen=interrupt)
    assert [run.info.status for run in runs(store, "dse/sweep")] == ["KILLED"]


# Damage


@pytest.mark.one_in(3)
@pytest.mark.parametrize("damage", ["garbage", "cut", "half built"])
def test_a_damaged_database_is_told_at_once_and_can_be_moved_aside(
    empty_database: Path, tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "mlflow.db"
    shutil.copy(empty_database, file)
    if damage == "garbage":
        file.write_bytes(b"no database " * 100)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    else:
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE _alembic_tmp_runs (x)")
        connection.close()
    before = file.read_bytes()
    start = time.monotonic()
    with pytest.raises(DamagedTrackingError):
        sync(finished(tmp_path, odd_table()), open_store(f"sqlite:///{file}"), ALL)
    assert time.monotonic() - start < 10
    aside = repair(f"sqlite:///{file}")
    assert aside is not None and aside.name.startswith("mlflow.db.damaged-")
    if damage != "cut":
        assert aside.read_bytes() == before
    assert repair(f"sqlite:///{file}") is None
    assert sync(tmp_path / "sweep" / "latest", open_store(f"sqlite:///{file}"), ALL).num_points == 6


def test_a_sound_database_is_not_moved(store: TrackingStore) -> None:
    assert repair(store.uri) is None
    with pytest.raises(TrackingError, match="no SQLite file"):
        repair("http://127.0.0.1:9")


def test_errors_do_not_show_passwords() -> None:
    with pytest.raises(TrackingError, match=r"could not open nothing://me:\*\*\*@host/x"):
        open_store("nothing://me:secret@host/x")


@pytest.mark.parametrize(
    ("address", "expected"),
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
    address: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "work"
    here.mkdir()
    monkeypatch.chdir(here)
    assert resolve(address) == expected.format(here=here.resolve(), above=tmp_path.resolve())


def test_importing_the_package_does_not_import_mlflow() -> None:
    code = "import sys, dse.tracking.process; print({'mlflow', 'pandas', 'optuna'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.nightly
def test_three_processes_may_build_a_store_at_once_and_do_it_in_silence(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db.new").write_bytes(b"a build that was cut short")
    code = "from dse.tracking.database import open_store; open_store('sqlite:///mlflow.db')"
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
    store = open_store(f"sqlite:///{tmp_path}/mlflow.db")
    assert [experiment.name for experiment in store.client.search_experiments()] == ["Default"]


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
    code = f"import sys; from dse.tracking.server import serve; sys.exit(serve({uri!r}, port={port}))"
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


@pytest.mark.more
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists processes the Linux way")
def test_a_served_store_takes_the_same_runs_and_ctrl_c_leaves_no_process_behind(
    server: tuple[subprocess.Popen[str], str], store: TrackingStore, folder: Path
) -> None:
    process, url = server
    served = open_store(url)
    over_http = sync(folder, served, ALL)
    assert [over_http.how, over_http.num_points] == ["client", 6]
    assert len(points_of(store, over_http.run_id)) == 6
    assert sync(folder, served, ALL).how == ""
    files = served.client.list_artifacts(over_http.run_id)
    assert "results.parquet" in [file.path for file in files]
    started = descendants(process.pid)
    assert len(started) == 2
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert url in output and "Ctrl-C" in output
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
