"""Measured collectives inside a node: tables of other projects, and the fit of a library's protocols.

Tables are told by their columns; what leaves a node, and rows without a time, are skipped and counted.

- profiles of ai-dynamo/aiconfigurator: device, op_name, nccl_dtype, num_gpus, message_size (elements of nccl_dtype in
  the larger buffer, as nccl-tests counts them), latency [ms]
- profiles of microsoft/vidur: device, collective, gpus, devices_per_node, bytes, median_ms

Rows to fit on are chosen by shape: of each number of GPUs the sizes that are evenly spaced in their logarithm.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from dse.errors import Problems
from dse.files import CsvTable, read_csv
from simulators.calibration.measurements import Rows
from simulators.costs.chip import Cost
from simulators.costs.collective import Group, collective_cost
from simulators.costs.protocols import protocol_seconds
from simulators.hardware.network import CollectiveKind, Protocols

Floats = NDArray[np.float64]

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
"""Kinds of rows of collectives; their shape is `gpus` and `bytes`."""
MOST_COLLECTIVES = 24
"""Largest number of rows of a collective that its constants are fitted on."""
LARGE_BYTES = 256 * 1024
"""Size from which a collective counts as large."""
ANY_PRECISION = "any"
"""Precision of rows that only move bytes."""
_SIZES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1, "float": 4, "float32": 4}
_NAMES: Mapping[str, CollectiveKind] = {**{kind: kind for kind in COLLECTIVE_KINDS}, "alltoall": "all_to_all"}
_OF_CONFIGURATOR = {"device", "op_name", "nccl_dtype", "num_gpus", "message_size", "latency"}
_OF_VIDUR = {"device", "collective", "gpus", "devices_per_node", "bytes", "median_ms"}


def holds_collectives(columns: tuple[str, ...]) -> bool:
    """Return whether a table with these columns holds collectives."""
    return set(columns) >= _OF_CONFIGURATOR or set(columns) >= _OF_VIDUR


def read_collectives(path: Path) -> list[Rows]:
    """Rows of the collectives of a table, by device and kind; [] for a table without any. Raises ConfigError."""
    table, check = read_csv(path, way_out="name a CSV of measured collectives"), Problems()
    if not holds_collectives(table.columns):
        return []
    groups = defaultdict[tuple[str, str], list[tuple[int, float, float, float]]](list)
    skipped = 0
    for line, device, kind, cells in _cells(table, check, path.name):
        gpus, size, seconds, per_node = cells
        if math.isnan(seconds) or per_node < gpus:
            skipped += 1
        else:
            groups[device, kind].append((line, gpus, size, seconds))
    check.done(path.name)
    if skipped:
        print(f"{path.name}: {skipped} rows across nodes or without a time are skipped", file=sys.stderr)
    return [_rows(device, kind, rows) for (device, kind), rows in groups.items()]


def _cells(
    table: CsvTable, check: Problems, name: str
) -> Iterator[tuple[int, str, CollectiveKind, tuple[float, float, float, float]]]:
    """Yield line, device, kind, and (GPUs, bytes, seconds, GPUs of a node) of each legal row."""
    ours = set(table.columns) >= _OF_CONFIGURATOR
    columns = ("collective", "gpus", "bytes", "median_ms")
    if ours:
        columns = ("op_name", "num_gpus", "message_size", "latency")
    for line, cells in table.rows:
        kind, element = _NAMES.get(cells[columns[0]]), _SIZES.get(cells["nccl_dtype"]) if ours else 1
        if kind is None or element is None:
            column = columns[0] if kind is None else "nccl_dtype"
            check.add(f"{name}, line {line}, {column}", "is unknown", value=cells[column])
            continue
        gpus, size = (_number(cells[column]) for column in columns[1:3])
        seconds = _number(cells[columns[3]]) * 1e-3 if cells[columns[3]] else math.nan
        for column, value, least in ((columns[1], gpus, 2), (columns[2], size, 1)):
            if not (value.is_integer() and value >= least):
                check.add(f"{name}, line {line}, {column}", f"must be a whole number from {least}", value=cells[column])
        if cells[columns[3]] and not (math.isfinite(seconds) and seconds > 0):
            check.add(f"{name}, line {line}, {columns[3]}", "must be a positive time", value=cells[columns[3]])
        per_node = math.inf if ours else _number(cells["devices_per_node"])
        yield line, cells["device"], kind, (gpus, size * element, seconds, per_node)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rows(device: str, kind: str, cells: list[tuple[int, float, float, float]]) -> Rows:
    lines, gpus, size, seconds = np.array(cells, float).T
    names = tuple(f"{bytes_:.0f} x {count:.0f}" for _, count, bytes_, _ in cells)
    shape = {"gpus": gpus, "bytes": size}
    places = tuple(lines.astype(int).tolist())
    return Rows(device, ANY_PRECISION, kind, shape, seconds[:, None], names, places, ("",) * len(names))


def evenly_spaced(rows: Rows) -> NDArray[np.int64]:
    """Rows to fit on: of each number of GPUs the same number, evenly spaced in the order of their sizes."""
    numbers = np.unique(rows.shape["gpus"])
    count, places = MOST_COLLECTIVES // len(numbers), set[int]()
    for number in numbers:
        same = np.flatnonzero(rows.shape["gpus"] == number)
        sizes, first = np.unique(rows.shape["bytes"][same], return_index=True)
        chosen = np.unique(np.round(np.linspace(0, len(sizes) - 1, min(count, len(sizes)))).astype(int))
        places |= set(same[first[chosen]].tolist())
    return np.array(sorted(places))


def cost_of_rows(constants: Protocols, rows: Rows) -> Cost:
    """Costs [R, 1] of rows of one collective; bytes are those that a GPU sends."""
    kind, gpus, payload = _NAMES[rows.kind], rows.shape["gpus"], rows.shape["bytes"]
    seconds = protocol_seconds(constants, kind, gpus, payload)
    moved = payload
    if kind != "send_recv":
        moved = collective_cost(kind, "ring", payload, Group(gpus, 1.0, 0.0)).wire_bytes
    cost = Cost.of(np.zeros(rows.size), moved, seconds)
    return Cost.of(cost.flop[:, None], cost.bytes[:, None], cost.seconds[:, None])
