"""Folders of finished runs whose truth is known: tables computed from a formula, as a study would have written them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

Row = Mapping[str, Any]
GOALS = {"time_s": "minimize", "held_bytes": "minimize"}


def grid(
    scenarios: Mapping[str, Row], knobs: Mapping[str, Sequence[Any]], formula: Callable[[Row], Row | None]
) -> pd.DataFrame:
    """Every combination of knobs in every scenario. formula: metrics, and knobs it changes (None: absent), of a point;
    None where it is infeasible."""
    rows = []
    for name, about in scenarios.items():
        for values in itertools.product(*knobs.values()):
            point = {**about, **dict(zip(knobs, values, strict=True))}
            metrics = formula(point)
            key = hashlib.sha256(repr((name, values)).encode()).hexdigest()[:32]
            state = {"scenario": name, "key": key, "status": "infeasible" if metrics is None else "ok"}
            rows.append(
                {**state, "reason": "", "engine": "test", "baseline": "", "on_front": False, **point, **(metrics or {})}
            )
    table = pd.DataFrame(rows)
    for path in table.columns.map(str):
        if (
            table[path].dtype == float
            and table[path].dropna().mod(1).eq(0).all()
            and not path.endswith(("_s", "_bytes"))
        ):
            table[path] = table[path].astype("Int64")
    return table


def written(root: Path, table: pd.DataFrame, knobs: Sequence[str], **changed: Any) -> Path:
    """The folder of a finished run `toy/<time>` below `root`. changed: goals, recorded, hardware, time, config, made,
    methods, baseline."""
    folder: Path = root / "toy" / changed.get("time", "2026-11-21_07-40-12")
    folder.mkdir(parents=True)
    goals = changed.get("goals", GOALS)
    table = table.reindex(columns=list(dict.fromkeys([*table, *goals])))
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), folder / "results.parquet", row_group_size=200)
    method = {"num_points": len(table), "method": changed.get("method", "exhaustive"), "duplicates": 0}
    summary = {"study": "toy", "goals": goals, "shown": list(knobs), "knobs": list(knobs), "departures": []}
    summary |= {"units": {}, "limits": {}, "searched": dict.fromkeys(map(str, table["scenario"].unique()), method)}
    provenance = {
        "seed": 3,
        "backend": "toy 1",
        "git": {"commit": "a" * 40},
        "python": "3.11.7",
        "versions": {"numpy": "2"},
    }
    study = {"name": "toy", "question": "which?", "module": "plain", "objectives": list(goals)}
    study |= {"recorded": changed.get("recorded", []), "hardware": changed.get("hardware", [])}
    study |= {"baseline": changed.get("baseline", {})}
    config = {"study": study, "search": {"name": "exhaustive"}, "space": {}, **changed.get("config", {})}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps({**provenance, **changed.get("made", {})}), encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder.parent / "latest").unlink(missing_ok=True)
    (folder.parent / "latest").symlink_to(folder.name)
    return folder
