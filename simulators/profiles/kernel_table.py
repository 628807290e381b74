"""Tables of kernels: CSV with a row for each, plain or gzip.

Columns: start_us, dur_us, stream, and name or kind; perhaps launch_us, grid (`4x106x1`, or grid_x, grid_y, grid_z),
collective, in_elements, dtype, group_size. Rocprof's kernel traces are read as well (Kernel_Name, Start_Timestamp and
End_Timestamp in nanoseconds, Queue_Id or Stream_Id). Lines that begin with # are comments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dse.errors import ConfigError, Problem
from simulators.profiles.packed import DAMAGED, opened
from simulators.profiles.profile import DTYPE_BYTES, Profile, profile_of

_ROCPROF = {"Kernel_Name": "name", "Queue_Id": "stream", "Stream_Id": "stream"}
_NEEDED = ("start_us", "dur_us", "stream")


def read_table(path: Path) -> Profile:
    """The profile that a CSV of kernels holds. Raises ConfigError for a file that cannot be read, or lacks columns."""
    with opened(path) as (unpacked, _):
        try:
            table = pd.read_csv(unpacked, comment="#", low_memory=False)
        except (ValueError, *DAMAGED) as error:
            raise ConfigError([Problem("profile", f"is no CSV of kernels: {error}", str(path))]) from None
    table = _with_our_names(table)
    missing = [name for name in _NEEDED if name not in table] + ([] if {"name", "kind"} & set(table) else ["name"])
    if missing:
        rule = f"lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise ConfigError([Problem("profile", rule, str(path), "name a CSV of kernels, or the JSON of a profiler")])
    return profile_of(_rows(table), path.name)


def _with_our_names(table: pd.DataFrame) -> pd.DataFrame:
    """The same with the columns of rocprof under our names."""
    if not {"Kernel_Name", "Start_Timestamp", "End_Timestamp"} <= set(table):
        return table
    start, end = (pd.to_numeric(table[f"{name}_Timestamp"], errors="coerce") for name in ("Start", "End"))
    streams = [name for name in ("Stream_Id", "Queue_Id") if name in table][:1]
    named = table.rename(columns={name: _ROCPROF[name] for name in ("Kernel_Name", *streams)})
    return named.assign(start_us=start / 1e3, dur_us=(end - start) / 1e3)


def _rows(table: pd.DataFrame) -> Iterator[Mapping[str, Any]]:
    numbers = {name: pd.to_numeric(table[name], errors="coerce") for name in _NUMBERS if name in table}
    absent = pd.Series(np.nan, index=table.index)
    columns = {
        "name": table["name"] if "name" in table else table["kind"],
        "stream": table["stream"],
        "start_s": 1e-6 * numbers["start_us"],
        "seconds": 1e-6 * numbers["dur_us"],
        "launch_s": 1e-6 * numbers.get("launch_us", absent),
        "ctas": _ctas(table, numbers),
        "collective": table.get("collective", absent),
        "payload_bytes": numbers.get("in_elements", absent) * table.get("dtype", absent).map(DTYPE_BYTES),
        "group_size": numbers.get("group_size", absent),
    }
    for values in zip(*(column.astype(object).where(column.notna(), None) for column in columns.values()), strict=True):
        row = dict(zip(columns, values, strict=True))
        yield row | {name: str(row[name]) for name in ("name", "stream", "collective") if row[name] is not None}


_NUMBERS = ("start_us", "dur_us", "launch_us", "in_elements", "group_size", "grid_x", "grid_y", "grid_z")


def _ctas(table: pd.DataFrame, numbers: Mapping[str, pd.Series]) -> pd.Series:
    """Thread blocks of each kernel, where the grid is known."""
    if "grid" in table:
        sides = table["grid"].astype("string").str.split("x", expand=True).apply(pd.to_numeric, errors="coerce")
        return pd.Series(sides.prod(axis=1, skipna=False))
    if {"grid_x", "grid_y", "grid_z"} <= set(numbers):
        return numbers["grid_x"] * numbers["grid_y"] * numbers["grid_z"]
    return pd.Series(np.nan, index=table.index)
