"""How fast a table of points becomes runs of MLflow, and how fast MLflow sorts them."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dse.results.selection import SelectionRule
from dse.tracking.database import open_store
from dse.tracking.study import StudyFolder
from dse.tracking.sync import sync


@dataclass(frozen=True)
class TrackingSpeed:
    """Of one study: point runs written per minute, reading the table included, and the seconds it takes to fetch the
    hundred best by the first objective."""

    num_points: int
    how: str
    runs_per_minute: float
    sort_s: float


def enlarged(folder: Path, target: Path, num_points: int) -> Path:
    """A copy of a finished study run, below `target`, whose table has `num_points` rows: the same, with other keys."""
    copy = target / folder.parent.name / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("results.parquet"))
    table = pq.read_table(folder / "results.parquet")
    chosen = table.take(np.arange(num_points) % table.num_rows)
    keys = np.random.default_rng(0).bytes(16 * num_points).hex()
    named = pa.array([keys[start : start + 32] for start in range(0, len(keys), 32)])
    pq.write_table(chosen.set_column(table.column_names.index("key"), "key", named), copy / "results.parquet")
    return copy


def measure(folder: Path, uri: str) -> TrackingSpeed:
    """Write every point of a finished study run, which MLflow must not have yet, and sort them."""
    store = open_store(uri)
    start = time.perf_counter()
    done = sync(folder, store, SelectionRule("all"))
    took_s = time.perf_counter() - start
    study = StudyFolder(folder)
    experiment = store.client.get_experiment_by_name(f"dse/{study.study}/points")
    order = [f"metrics.`{next(iter(study.summary['goals']))}` ASC"]
    took: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        store.client.search_runs([experiment.experiment_id], order_by=order, max_results=100)
        took.append(time.perf_counter() - start)
    return TrackingSpeed(done.num_points, done.how, 60 * done.num_points / took_s, sorted(took)[1])
