"""What the store costs: `python -m benchmarks.store [--json]`.

Figures of the last long run of kills, recorded for the code as it is (`make kills`), and, measured now: how fast
results are recorded (in SQLite, and in PostgreSQL where it is installed), how fast the front of a million is found, how
fast points become MLflow runs, and what store and tracking add to a sweep of 100,000 points. The exit code is 1 where
the record is of other code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import recorded, tracking
from benchmarks.crowd import METRICS, batch
from benchmarks.recorded import ROOT
from dse.store.contract import Context
from dse.store.fronts import front
from dse.store.result_store import Store
from dse.store.session import Hold, StoreSession
from tests.campaigns.postgres import programs, running

_RECORDED = ("kills", "missing", "wrong", "repeated_fraction")
_CALL = 16_384  # designs of one call of the overlap backend

_SWEEP = [
    "study=ficco_sweep",
    "fidelity=none",
    "budget.trials=1000000",
    "workload.shapes=[{name: own, m: 16384, n: 16384, k: 8192}]",
    "space.system.gpu.num_cus=range(200,304,5)",
    "space.system.gpu.hbm_bytes_per_s=range(4e12,6e12,1e11)",
]
_BARE = ["store=none", "tracking=none"]


def store_speed(url: str, rows: int = 1_000_000) -> tuple[float, float]:
    """Results recorded per second, as a study does it, and seconds that the front of all of them takes."""
    random = np.random.default_rng(0)
    session = StoreSession(store := Store(url), Hold(1, Context("bench", "1", "()", METRICS)))
    batches = [batch(random, _CALL) for _ in range(-(-rows // _CALL))]
    began = time.perf_counter()
    for points, results in batches:
        session.lease([points.keys])
        session.record(points, results, [points.keys])
    session.flush()
    spent = time.perf_counter() - began
    session.leave()
    began = time.perf_counter()
    front(store, 1, dict.fromkeys(METRICS[:3], "minimize"))
    front_s = time.perf_counter() - began
    store.database.close()
    return _CALL * len(batches) / spent, front_s


def stores(folder: Path) -> dict[str, float | None]:
    """Speeds of both kinds of store; None for PostgreSQL where it is not installed."""
    lite, lite_front_s = store_speed(f"sqlite:///{folder / 'speed.db'}")
    found: dict[str, float | None] = {"store_results_per_s": lite, "front_query_s_1m": lite_front_s}
    names = ("postgresql_results_per_s", "postgresql_front_query_s_1m")
    if programs() is None:
        return found | dict.fromkeys(names)
    with running(folder / "postgres") as server:
        return found | dict(zip(names, store_speed(server.database("speed")), strict=True))


def tracked(folder: Path, swept: Path, num_points: int = 50_000) -> dict[str, float]:
    """Points of a sweep that become MLflow runs in a minute, and seconds in which so many are sorted."""
    copy = tracking.enlarged(swept, folder / "enlarged", num_points)
    found = tracking.measure(copy, f"sqlite:///{folder / 'enlarged.db'}")
    if found.how != "bulk":
        raise RuntimeError(f"this MLflow is written {found.how}, not in bulk")
    return {"mlflow_runs_per_minute": found.runs_per_minute, "mlflow_sort_s_50k": found.sort_s}


def overhead(folder: Path, repeats: int = 5) -> dict[str, float]:
    """What store and tracking add to a sweep of about 100,000 points, as a part of its time: the best of some runs."""
    best: dict[str, float] = {}
    cases = {"bare": _BARE, "both": []}
    for number in range(repeats):
        for name, words in cases.items():
            best[name] = min(best.get(name, np.inf), _sweep_s(folder / f"{name}{number}", words))
    return {
        "overhead_fraction_100k": best["both"] / best["bare"] - 1,
        "sweep_100k_s": best["bare"],
    }


def _sweep_s(folder: Path, words: Sequence[str]) -> float:
    folder.mkdir()
    command = [sys.executable, "-m", "dse", *_SWEEP, *words]
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    as_json = parser.parse_args().json
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed = recorded.read("kills", "make kills")
        found = {name: killed.get(name) for name in _RECORDED} | stores(folder) | overhead(folder)
        (swept,) = (folder / "both0").glob("outputs/ficco_sweep/2*")
        found |= tracked(folder, swept)
    rows = [f"| {name} | {'–' if value is None else f'{value:,.4g}'} |" for name, value in found.items()]
    print(json.dumps(found, indent=2) if as_json else "\n".join(["| figure | value |", "|---|--:|", *rows]))
    return 1 if found["kills"] is None else 0


if __name__ == "__main__":
    sys.exit(main())
