"""Folders of finished study runs, made by hand: what MLflow, Optuna and their failures are tested with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

KNOBS = ["schedule.name", "mover", "chunks", "share[0]", "fused"]
UNITS = {"makespan_s": "s", "exposed_s": "s", "energy_J": "J"}
GOALS = {"makespan_s": "minimize", "energy_J": "minimize"}


def key(number: int) -> str:
    """The key of a point."""
    return f"{number:06x}" + "f3a2c99" * 3 + "00000"


def odd_table() -> pd.DataFrame:
    """Six points with everything that is hard to show: missing and infinite numbers, long texts, strange names."""
    return pd.DataFrame(
        {
            "scenario": ["g1", "g1", "g1", "g2", "g2", "g2"],
            "key": [key(number) for number in range(6)],
            "status": ["ok", "ok", "ok", "ok", "infeasible", "failed"],
            "reason": [None, None, None, None, "needs 2 GiB more", "line 1\nline \0 2 µs" + "x" * 9000],
            "engine": ["event"] * 4 + [None, "analytic"],
            "baseline": [key(0)] * 3 + [key(3)] * 3,
            "on_front": [True, False, True, True, False, False],
            "schedule.name": ["serial", "ring", "ring", "", "serial", "x" * 7000],
            "mover": ["cu", None, "dma", "cu", None, "cu"],
            "chunks": pd.array([1, 2, None, 4, 8, 16], dtype="Int64"),
            "share[0]": pd.array([0.1, None, 1 / 3, 1e-9, 1.0, 2.5], dtype="Float64"),
            "fused": [True, False, True, False, True, False],
            "makespan_s": [3e-3, 2e-3, 1e-3, 0.1 + 0.2, math.nan, math.inf],
            "exposed_s": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            "energy_J": [1.0, 2.0, 1.5, 2.5, math.nan, -math.inf],
        }
    )


def wide_table(count: int, *, fronts: int = 3, failures: int = 0) -> pd.DataFrame:
    """Many points of one scenario: the first are on the front, the next failed, every hundredth is a baseline."""
    keys = [key((number * 7919) % 0xFFFFFF) for number in range(count)]
    failed = [fronts <= number < fronts + failures for number in range(count)]
    return pd.DataFrame(
        {
            "scenario": "g1",
            "key": keys,
            "status": ["failed" if bad else "ok" for bad in failed],
            "reason": ["broke" if bad else None for bad in failed],
            "engine": "event",
            "baseline": [keys[number // 100 * 100] for number in range(count)],
            "on_front": [number < fronts for number in range(count)],
            "schedule.name": "serial",
            "makespan_s": [math.nan if bad else 1.0 + number for number, bad in enumerate(failed)],
            "energy_J": [math.nan if bad else 2.0 for bad in failed],
        }
    )


def finished(
    root: Path,
    table: pd.DataFrame,
    time: str = "2026-11-21_07-40-12",
    *,
    study: str = "sweep",
    tracking: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of a finished run of a study below `root`, with `latest` pointing at it."""
    folder = root / study / time
    (folder / "figures").mkdir(parents=True)
    (folder / "figures" / "front.png").write_bytes(b"png")
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), folder / "results.parquet", row_group_size=64)
    summary = {"study": study, "goals": GOALS, "knobs": KNOBS, "units": UNITS}
    provenance = {
        "command": ["python", "-m", "dse", f"study={study}"],
        "time": "2026-11-21T23:59:59+00:00",
        "backend": "toy 1",
        "seed": 3,
        "git": {"commit": "abc", "dirty": True},
        "versions": {"numpy": "2.4.6"},
        "python": "3.11.7",
        "machine": {"system": "Linux", "cores": 2},
    }
    config = {
        "study": {"name": study, "question": "which is best?"},
        "simulator": {"name": "toy"},
        "search": {"name": "exhaustive"},
        "budget": {"trials": 6},
        "tracking": {"name": "none", "uri": None, **(tracking or {})},
    }
    for name, value in (("summary", summary), ("provenance", provenance), ("claims", [])):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder.parent / "latest").unlink(missing_ok=True)
    (folder.parent / "latest").symlink_to(folder.name)
    return folder
