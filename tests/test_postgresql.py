"""The same views on a real PostgreSQL server; skipped where its programs are not installed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dse.results.selection import SelectionRule
from dse.tracking.database import TrackingStore, open_store
from dse.tracking.optuna_storage import StorageError
from dse.tracking.optuna_storage import show as show_in_optuna
from dse.tracking.sync import sync
from tests.campaigns.postgres import Server
from tests.folders import finished, odd_table, wide_table

ALL = SelectionRule("all")


@pytest.fixture
def uri(postgres: Server) -> str:
    """A new database."""
    return postgres.database(f"views{next(_numbers)}")


_numbers = itertools.count()


@pytest.fixture
def store(uri: str) -> Iterator[TrackingStore]:
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


@pytest.mark.more
def test_points_are_written_in_bulk_and_once_and_equal_those_of_sqlite(store: TrackingStore, tmp_path: Path) -> None:
    folder = finished(tmp_path, odd_table())
    other = open_store(f"sqlite:///{tmp_path}/mlflow.db")
    done, local = sync(folder, store, ALL), sync(folder, other, ALL)
    assert [done.how, done.num_points, done.reason] == ["bulk", 6, ""]
    assert "secret" not in done.uri
    assert [shown(run) for run in points_of(store, done.run_id)] == [
        shown(run) for run in points_of(other, local.run_id)
    ]
    assert sync(folder, store, ALL).how == ""


@pytest.mark.slow
def test_two_at_the_same_time_write_once(store: TrackingStore, tmp_path: Path) -> None:
    folder = finished(tmp_path, wide_table(300))
    done: list[Any] = []
    both = [threading.Thread(target=lambda: done.append(sync(folder, store, ALL))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(report.num_points for report in done) == [0, 300]
    assert len(points_of(store, done[0].run_id)) == 300


@pytest.mark.slow
def test_optuna_shows_every_point_once(uri: str, tmp_path: Path) -> None:
    folder = finished(tmp_path, odd_table())
    assert [show_in_optuna(folder, uri, ALL) for _ in range(2)] == [6, 0]


@pytest.mark.slow
def test_optuna_is_kept_out_of_the_database_of_mlflow(store: TrackingStore, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="a database of its own"):
        show_in_optuna(finished(tmp_path, odd_table()), store.uri, ALL)
    assert sync(tmp_path / "sweep" / "latest", store, ALL).num_points == 6
