"""Tables of kernels: CSV with a row for each, plain or gzip.

Columns: start_us, dur_us, stream, and name or kind; perhaps launch_us, grid (`4x106x1`, or grid_x, grid_y, grid_z),
collective, in_elements, dtype, group_size. Lines that begin with # are comments. Tables of rocprof and of `nsys stats`,
which their columns tell, are read by `dse_traces.readers.rocprof` and `dse_traces.readers.nsys_stats`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem
from dse_traces.profile.kernels import DTYPE_BYTES, KernelRows, Profile, profile_of
from dse_traces.readers.csv_rows import Row, csv_rows
from dse_traces.readers.nsys_stats import is_nsys_stats, read_nsys_stats, refuse_summary
from dse_traces.readers.rocprof import is_rocprof, read_rocprof

_US = 1e-6
_NEEDED = ("start_us", "dur_us", "stream")
_SIDES = ("grid_x", "grid_y", "grid_z")


def read_tables(path: Path) -> Sequence[Profile]:
    """The profiles that a CSV holds, of kernels or of rocprof: one for each GPU. Raises ConfigError."""
    with csv_rows(path, Counter()) as (columns, _):
        names = list(columns)
    if is_rocprof(names):
        return read_rocprof(path)
    if is_nsys_stats(names):
        return read_nsys_stats(path)
    refuse_summary(names, path)
    return [read_table(path)]


def read_table(path: Path) -> Profile:
    """The profile that a CSV of kernels holds. Raises ConfigError for a file that cannot be read, or lacks columns."""
    kernels, dropped = KernelRows(), Counter[str]()
    with csv_rows(path, dropped) as (columns, rows):
        _check_columns(columns, path)
        for row in rows:
            try:
                kernels.append(_kernel(row))
            except (ValueError, OverflowError):
                dropped["kernels with fields that cannot be read"] += 1
    return profile_of(kernels, path.name, dropped=dropped)


def _check_columns(columns: Sequence[str], path: Path) -> None:
    missing = [name for name in _NEEDED if name not in columns]
    missing += [] if {"name", "kind"} & set(columns) else ["name"]
    if missing:
        rule = f"lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise ConfigError([Problem("profile", rule, str(path), "name a CSV of kernels, or the JSON of a profiler")])


def _kernel(row: Row) -> Mapping[str, Any]:
    """The row of a profile. Raises ValueError or OverflowError."""
    elements, size = _number(row, "in_elements"), DTYPE_BYTES.get(row.get("dtype", ""))
    return {
        "name": row.get("name") or row.get("kind") or "kernel without a name",
        "stream": row["stream"] or None,
        "start_s": _scaled(row, "start_us"),
        "seconds": _scaled(row, "dur_us"),
        "launch_s": _scaled(row, "launch_us"),
        "ctas": _ctas(row),
        "collective": row.get("collective") or None,
        "payload_bytes": None if elements is None or size is None else elements * size,
        "group_size": _number(row, "group_size"),
    }


def _number(row: Row, name: str) -> float | None:
    text = row.get(name)
    return float(text) if text else None


def _scaled(row: Row, name: str) -> float | None:
    value = _number(row, name)
    return None if value is None else value * _US


def _ctas(row: Row) -> float | None:
    """Thread blocks of a kernel, where the grid is known."""
    sides = row["grid"].split("x") if row.get("grid") else [row.get(name, "") for name in _SIDES]
    # a side that is missing makes the count unknown, not one
    return prod(map(float, sides)) if all(sides) else None
