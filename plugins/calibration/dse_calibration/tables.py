"""All measured rows below a folder, in any layout that is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dse.errors import ConfigError, Problem
from dse.files import csv_columns
from dse_calibration.calibrate import plain_name, read_table
from dse_calibration.collectives import holds_collectives
from dse_calibration.foreign import is_foreign
from dse_calibration.layouts import layout_of
from dse_calibration.measurements import MeasuredRows

_OPERATIONS = {"device", "precision", "op"}  # of tables in the layout of DeepBench


def read_folder(folder: Path) -> list[MeasuredRows]:
    """Read the rows of all tables below a folder, those of one device, precision, kind and library together.

    A CSV of another layout is skipped. Raises ConfigError.
    """
    if not folder.is_dir():
        raise ConfigError([Problem("study.data_dir", "is no folder", str(folder), "name one that holds CSV tables")])
    files = [file for file in sorted(folder.rglob("*.csv")) if file.is_file() and _is_known(file)]
    if not files:
        rule = "holds no CSV table of measured operators (columns device, precision, op, or as in docs/how-to/gpu.md)"
        raise ConfigError([Problem("study.data_dir", rule, str(folder))])
    groups = defaultdict[tuple[str, ...], list[MeasuredRows]](list)
    for file in files:
        for rows in read_table(file):
            groups[plain_name(rows.device), rows.precision, rows.kind, rows.library].append(rows)
    return [_concatenate(parts) for parts in groups.values()]


def is_of(rows: MeasuredRows, measured_as: str) -> bool:
    """Return whether rows are of a GPU, by its name in tables (H100 and h100_sxm are one)."""
    return bool(measured_as) and plain_name(rows.device) == plain_name(measured_as)


def _is_known(file: Path) -> bool:
    columns = csv_columns(file, "study.data_dir")
    is_of_layout = holds_collectives(columns) or layout_of(columns) is not None or is_foreign(columns)
    return set(columns) >= _OPERATIONS or is_of_layout


def _concatenate(parts: Sequence[MeasuredRows]) -> MeasuredRows:
    """Concatenate rows of one device, precision and kind from several files.

    A number that a file does not give (CTAs of a collective) is without a limit.
    """
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.shape)
    return replace(
        parts[0],
        shape={
            name: np.concatenate([part.shape.get(name, np.full(part.size, np.inf)) for part in parts]) for name in names
        },
        seconds=np.concatenate([part.seconds for part in parts]),
        names=tuple(name for part in parts for name in part.names),
        lines=tuple(line for part in parts for line in part.lines),
        algorithms=tuple(name for part in parts for name in part.algorithms),
    )
