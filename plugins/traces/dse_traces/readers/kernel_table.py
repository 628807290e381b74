"""Tables of kernels: CSV with a row for each, plain or gzip.

Columns: start_us, dur_us, stream, and name or kind; perhaps launch_us, grid (`4x106x1`, or grid_x, grid_y, grid_z),
collective, in_elements, out_elements, dtype, group_size. Lines that begin with # are comments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem
from dse_traces.profile.kernels import KernelRows, Profile, profile_of
from dse_traces.profile.payloads import pattern_of, payload_bytes
from dse_traces.readers.csv_rows import Row, csv_rows
from dse_traces.readers.nsys_stats import refuse_summary

_US = 1e-6
_NEEDED = ("start_us", "dur_us", "stream")
_SIDES = ("grid_x", "grid_y", "grid_z")


def read_kernel_table(path: Path) -> Sequence[Profile]:
    """The profile that a CSV of kernels holds. Raises ConfigError for a file that cannot be read, or lacks columns."""
    kernels, dropped = KernelRows(), Counter[str]()
    with csv_rows(path, dropped) as (columns, rows):
        refuse_summary(columns, path)
        _check_columns(columns, path)
        for row in rows:
            try:
                kernels.append(_kernel(row))
            except (ValueError, OverflowError):
                dropped["kernels with fields that cannot be read"] += 1
    return [profile_of(kernels, path.name, dropped=dropped)]


def _check_columns(columns: Sequence[str], path: Path) -> None:
    missing = [name for name in _NEEDED if name not in columns]
    missing += [] if {"name", "kind"} & set(columns) else ["name"]
    if missing:
        rule = f"lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise ConfigError([Problem("profile", rule, str(path), "name a CSV of kernels, or the JSON of a profiler")])


def _kernel(row: Row) -> Mapping[str, Any]:
    """The row of a profile. Raises ValueError or OverflowError."""
    name, collective = row.get("name") or row.get("kind") or "kernel without a name", row.get("collective") or None
    elements, ranks = (_number(row, "in_elements"), _number(row, "out_elements")), _number(row, "group_size")
    return {
        "name": name,
        "stream": row["stream"] or None,
        "start_s": _scaled(row, "start_us"),
        "seconds": _scaled(row, "dur_us"),
        "launch_s": _scaled(row, "launch_us"),
        "ctas": _ctas(row),
        "collective": collective,
        "payload_bytes": payload_bytes(pattern_of(collective, name), elements, row.get("dtype"), ranks),
        "group_size": ranks,
    }


def _number(row: Row, name: str) -> float | None:
    text = row.get(name)
    # an empty cell is unknown, and not 0
    return float(text) if text else None


def _scaled(row: Row, name: str) -> float | None:
    value = _number(row, name)
    return None if value is None else value * _US


def _ctas(row: Row) -> float | None:
    """Thread blocks of a kernel, where the grid is known."""
    sides = row["grid"].split("x") if row.get("grid") else [row.get(name, "") for name in _SIDES]
    # a side that is missing makes the count unknown, not one
    return prod(map(float, sides)) if all(sides) else None
