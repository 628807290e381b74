"""Predictions held against measured tables of operators of today's GPUs, on rows that no constant was fitted on.

`python -m benchmarks.validity [--data DIR] [--json]` reads every CSV below a folder that has one of the layouts of
`simulators.calibration.layouts`, and predicts it with the constants of conf/system as they are: nothing is fitted. A
row is printed for each file, device and precision; errors are relative, with the median's sign beside it. Prefills of
whole models are predicted as iterations, overlaps of a GEMM and its collective by schedules (`validation.overlaps`).
With or without a folder: the errors of GEMM, collective and wall time on the shipped overlaps that nothing is fitted
to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dse.config.options import list_options
from dse.errors import ConfigError, Problem
from dse.files import csv_columns
from simulators.calibration.calibrate import plain_name, read_table
from simulators.calibration.collectives import COLLECTIVE_ROWS, LARGE_BYTES, holds_collectives
from simulators.calibration.contention import Overlaps, median_errors
from simulators.calibration.layouts import layout_of
from simulators.calibration.measurements import STREAM_KINDS, MeasuredRows
from simulators.calibration.predictions import Errors, predicted_by
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.hardware.system import ScheduleSystem
from simulators.workloads.model_zoo import option_tree
from studies.overlap_measured.gemm_collective import holds_overlaps
from studies.overlap_measured.prefills import holds_prefills
from validation.overlaps import judged_overlaps, judged_prefills, overlap_summary

LARGE_TOKENS = 1024


def device_named(name: str, library: str = "") -> Device | None:
    """The shipped node of eight whose GPU a table calls `name` (h100_sxm and H100 are h100); None if there is none.

    library: of collectives, by name; the node with that library, where it has constants of its own.
    """
    system = f"{plain_name(name)}_8"
    if system not in list_options("system"):
        return None
    tree = tree_of(system)
    node = f"{tree['node']['name']}_{library}"
    return Device.of({**tree, "node": option_tree("node", node)} if node in list_options("node") else tree)


def judged(rows: MeasuredRows, device: Device) -> dict[str, Any] | None:
    """Errors on the rows not fitted on: median, p90, signed median, median of large ones; None without constants."""
    predicted = predicted_by("fitted", device, rows)
    if predicted is None:
        return None
    unseen = ~predicted.fitted
    ours, measured = predicted.seconds[unseen, 0], rows.seconds[unseen, 0]
    large = np.zeros(len(ours), bool)
    if rows.kind == "gemm":
        large = rows.shape["n"][unseen] >= LARGE_TOKENS
    elif rows.kind in COLLECTIVE_ROWS:
        large = rows.shape["bytes"][unseen] >= LARGE_BYTES
    every, big = Errors.of(ours, measured), Errors.of(ours[large], measured[large])
    small = Errors.of(ours[~large], measured[~large])
    if every is None:
        return None
    return {
        "device": device.name,
        "library": rows.library,
        "precision": rows.precision,
        "kind": rows.kind,
        "rows": every.count,
        "median": every.median,
        "p90": every.p90,
        "signed_median": float(np.median(ours / measured - 1)),
        "large_median": big.median if big else None,
        "small_median": small.median if small else None,
    }


def tables(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the errors of each table below a folder, by device and precision. Raises ConfigError if there is none."""
    found = False
    for file in sorted(folder.rglob("*.csv")):
        columns = csv_columns(file, "--data")
        judges = {judged_prefills: holds_prefills(columns), judged_overlaps: holds_overlaps(columns)}
        for row in (row for judge, holds in judges.items() if holds for row in judge(file)):
            found = True
            yield {"file": str(file.relative_to(folder)), **row}
        if layout_of(columns) is None and not holds_collectives(columns):
            continue
        for rows in read_table(file):
            device = device_named(rows.device, rows.library)
            errors = None if device is None else judged(rows, device)
            if errors is None:
                told = f"{file.name}: no constants for {rows.kind} of {rows.device} at {rows.precision}"
                print(told, file=sys.stderr)
                continue
            found = True
            yield {"file": str(file.relative_to(folder)), **errors}
    if not found:
        rule = "holds no table of GEMMs of a device that has constants"
        raise ConfigError([Problem("--data", rule, str(folder), "name the folder of the measured tables")])


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The worst errors over files, devices and precisions."""
    gemms = [row for row in rows if row["kind"] == "gemm"]
    streams = [row for row in rows if row["kind"] in STREAM_KINDS]
    collectives = [row for row in rows if row["kind"] in COLLECTIVE_ROWS]
    worst = {
        "gemm_median_worst": [row["median"] for row in gemms],
        "gemm_p90_worst": [row["p90"] for row in gemms],
        "gemm_large_median_worst": [row["large_median"] for row in gemms],
        "elementwise_median_worst": [row["median"] for row in streams],
        "collective_large_median_worst": [row["large_median"] for row in collectives],
        "collective_small_median_worst": [row["small_median"] for row in collectives],
    }
    errors = {name: [value for value in values if value is not None] for name, values in worst.items()}
    return {name: max(values) for name, values in errors.items() if values} | overlap_summary(rows)


def overlaps() -> dict[str, float]:
    """Median errors on the shipped overlaps of a GEMM and a collective that nothing is fitted to."""
    medians = median_errors(ScheduleSystem.of(tree_of("mi300x_8")), Overlaps.read())
    return {f"overlap_{name}_median": error for name, error in medians.items()}


def main(words: list[str] | None = None) -> int:
    """Print a row for each table, then the worst of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validity", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of measured tables of operators")
    parser.add_argument("--json", action="store_true", help="print JSON")
    typed = parser.parse_args(words)
    try:
        rows = list(tables(typed.data)) if typed.data else []
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if typed.json:
        print(json.dumps({**summary(rows), **overlaps(), "tables": rows}, indent=2))
        return 0
    for row in rows:
        cells = f"{100 * row['median']:5.1f} % {100 * row['p90']:5.1f} % {100 * row['signed_median']:+5.1f} %"
        device = f"{row['device']} {row.get('library', '')}"
        print(f"{row['file']:<36}{device:<16}{row['precision']:<6}{row['kind']:<28}{row['rows']:>6} rows  {cells}")
    for name, value in (summary(rows) | overlaps()).items():
        print(f"{name:<28}{value:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
