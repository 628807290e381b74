"""The same views on a real PostgreSQL server; skipped where its programs are not installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import finished, odd_table, wide_table

from dse.search.view import StorageError
from dse.search.view import show as show_in_optuna
from dse.selection import Rule
from dse.tracking import open_store, sync
from dse.tracking.database import Store

ALL = Rule("all")


def programs() -> Path | None:
    """The folder of the newest PostgreSQL's programs."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return Path(found).parent if found else folders[-1] if folders else None


def unprivileged(*words: str | Path) -> None:
    """Run a program as `postgres` where we are root: the server refuses to run as root."""
    become = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    done = subprocess.run([*become, *map(str, words)], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"PostgreSQL cannot be run here: {done.stderr.strip()[:200]}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own on a free port of 127.0.0.1; its URI, without a database's name."""
    bin_folder = programs()
    if bin_folder is None:
        pytest.skip("PostgreSQL's programs (initdb, pg_ctl) are not installed")
    folder = Path("/tmp", f"dse-postgresql-{os.getpid()}")  # not below pytest's folder, which only its owner may enter
    folder.mkdir()
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    data = folder / "data"
    try:
        unprivileged(bin_folder / "initdb", "-D", data, "-U", "me", "-A", "trust", "--no-sync")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        unprivileged(bin_folder / "pg_ctl", "-D", data, "-w", "-o", options, "-l", folder / "log", "start")
        yield f"postgresql://me:secret@127.0.0.1:{port}"
        unprivileged(bin_folder / "pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def uri(server: str, request: pytest.FixtureRequest) -> str:
    """A new database."""
    import psycopg

    name = f"d{abs(hash(request.node.name))}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"{server}/{name}"


@pytest.fixture
def store(uri: str) -> Iterator[Store]:
    opened = open_store(uri)
    yield opened
    assert opened.engine is not None
    opened.engine.dispose()  # MLflow keeps it for ever, with its connections


def points_of(store: Any, study_run: str) -> list[Any]:
    experiment = store.client.get_experiment_by_name("dse/sweep/points").experiment_id
    chosen = store.client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{study_run}'")
    return sorted(chosen, key=lambda run: run.data.tags["dse.point_key"])


def shown(run: Any) -> Any:
    """A point run without ids."""
    tags = {key: value for key, value in run.data.tags.items() if key != "mlflow.parentRunId"}
    return run.info.run_name, run.info.status, run.info.start_time, run.data.params, run.data.metrics, tags


def test_points_are_written_in_bulk_and_once_and_equal_those_of_sqlite(store: Store, tmp_path: Path) -> None:
    folder = finished(tmp_path, odd_table())
    other = open_store(f"sqlite:///{tmp_path}/mlflow.db")
    done, local = sync(folder, store, ALL), sync(folder, other, ALL)
    assert [done.how, done.num_points, done.reason] == ["bulk", 6, ""]
    assert "secret" not in done.uri
    assert [shown(run) for run in points_of(store, done.run_id)] == [
        shown(run) for run in points_of(other, local.run_id)
    ]
    assert sync(folder, store, ALL).how == ""


def test_two_at_the_same_time_write_once(store: Store, tmp_path: Path) -> None:
    folder = finished(tmp_path, wide_table(300))
    done: list[Any] = []
    both = [threading.Thread(target=lambda: done.append(sync(folder, store, ALL))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(one.num_points for one in done) == [0, 300]
    assert len(points_of(store, done[0].run_id)) == 300


def test_optuna_shows_every_point_once(uri: str, tmp_path: Path) -> None:
    folder = finished(tmp_path, odd_table())
    assert [show_in_optuna(folder, uri, ALL) for _ in range(2)] == [6, 0]


def test_optuna_is_kept_out_of_the_database_of_mlflow(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="a database of its own"):
        show_in_optuna(finished(tmp_path, odd_table()), store.uri, ALL)
    assert sync(tmp_path / "sweep" / "latest", store, ALL).num_points == 6
