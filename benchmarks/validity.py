"""Predictions held against measured tables of operators of today's GPUs, on rows that no constant was fitted on.

`python -m benchmarks.validity [--data DIR ...] [--json]` reads every CSV below a folder that has one of the layouts
of `dse_calibration.layouts`, and predicts it with the constants of conf/system as they are: nothing is fitted. Of
several folders, such as tables that were seen while models were made and others, medians stand side by side at last.
A row is printed for each file, device and precision; errors are relative, with the median's sign beside it. Prefills
of whole models are predicted as iterations, overlaps of a GEMM and its collective by schedules
(`validation.overlaps`). GEMMs beside collectives (`overlap_...`) are those of the folder; without a folder the
shipped ones alone are judged. What is left out is printed on stderr with the reason: rows that constants were fitted
on, devices without constants, tables of other layouts, and figures that no table of the folder gives.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dse.config.options import list_options
from dse.errors import ConfigError, Problem
from dse.errors.terminal import bar
from dse.files import csv_columns
from dse_calibration.calibrate import plain_name, read_table
from dse_calibration.collectives import COLLECTIVE_ROWS, LARGE_BYTES, holds_collectives
from dse_calibration.contention import COLUMNS, TABLE, is_sweep
from dse_calibration.layouts import layout_of
from dse_calibration.measurements import STREAM_KINDS, MeasuredRows
from dse_calibration.overlap_measured.prefills import holds_prefills
from dse_calibration.predictions import Errors, PredictedRows, predicted_by
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.workloads.model_zoo import option_tree
from validation.left_out import FITTED, files_below, given_folder, report_left_out
from validation.overlaps import (
    KINDS,
    holds_clocks,
    holds_speedups,
    judged_clocks,
    judged_contention,
    judged_overlaps,
    judged_prefills,
    overlap_summary,
)

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


def judged(rows: MeasuredRows, device: Device, predicted: PredictedRows) -> dict[str, Any]:
    """Errors on the rows not fitted on: median, p90, signed median, medians of large and of small ones."""
    unseen = ~predicted.fitted
    ours, measured = predicted.seconds[unseen, 0], rows.seconds[unseen, 0]
    large = np.zeros(len(ours), bool)
    if rows.kind == "gemm":
        large = rows.shape["n"][unseen] >= LARGE_TOKENS
    elif rows.kind in COLLECTIVE_ROWS:
        large = rows.shape["bytes"][unseen] >= LARGE_BYTES
    every, big = Errors.of(ours, measured), Errors.of(ours[large], measured[large])
    small = Errors.of(ours[~large], measured[~large])
    assert every is not None
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


def judged_operators(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the errors of a table of operators, by device and precision."""
    for rows in read_table(file):
        what = f"{rows.kind} of {rows.device} at {rows.precision} in {file.name}"
        device = device_named(rows.device, rows.library)
        predicted = None if device is None else predicted_by("fitted", device, rows)
        if device is None or predicted is None:
            reason = "no such machine in conf/system" if device is None else "the machine has no constants for it"
            report_left_out(what, reason, rows=len(rows.seconds))
            continue
        if predicted.fitted.any():
            report_left_out(what, FITTED, rows=int(predicted.fitted.sum()))
        if not predicted.fitted.all():
            yield judged(rows, device, predicted)


def _holds_operators(columns: tuple[str, ...]) -> bool:
    return layout_of(columns) is not None or holds_collectives(columns)


def _holds_contention(columns: tuple[str, ...]) -> bool:
    return is_sweep(columns) or set(COLUMNS) <= set(columns)


JUDGES: Mapping[Callable[[Path], Iterator[dict[str, Any]]], Callable[[tuple[str, ...]], bool]] = {
    judged_prefills: holds_prefills,
    judged_overlaps: holds_speedups,
    judged_contention: _holds_contention,
    judged_clocks: holds_clocks,
    judged_operators: _holds_operators,
}
"""What yields the errors of a table -> whether a table with these columns is of its layout."""


def tables(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the errors of each table below a folder, by device and precision. Raises ConfigError if there is none."""
    empty = True
    for file in files_below(folder, "*.csv"):
        columns, name = csv_columns(file, "--data"), str(file.relative_to(folder))
        judges = [judge for judge, holds in JUDGES.items() if holds(columns)]
        if not judges:
            report_left_out(name, "not of a layout that this command reads")
        for row in (row for judge in judges for row in judge(file)):
            empty = False
            yield {"file": name, **row}
    if empty:
        rule = "holds no rows that this command can judge"
        raise ConfigError([Problem("--data", rule, str(folder), "name the folder of the measured tables")])


WORST: Mapping[str, tuple[tuple[str, ...], str]] = {
    "gemm_median_worst": (("gemm",), "median"),
    "gemm_p90_worst": (("gemm",), "p90"),
    "gemm_large_median_worst": (("gemm",), "large_median"),
    "elementwise_median_worst": (tuple(STREAM_KINDS), "median"),
    "collective_large_median_worst": (tuple(COLLECTIVE_ROWS), "large_median"),
    "collective_small_median_worst": (tuple(COLLECTIVE_ROWS), "small_median"),
}
"""Figure -> kinds of rows, and the statistic of which it is the worst."""


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The worst errors over files, devices and precisions; medians of overlaps."""
    worst = {
        figure: [row[name] for row in rows if row["kind"] in kinds and row[name] is not None]
        for figure, (kinds, name) in WORST.items()
    }
    return {figure: max(values) for figure, values in worst.items() if values} | overlap_summary(rows)


def judged_until_interrupt(rows: Iterator[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Errors by table, with progress; those of the tables before an interrupt, which is told."""
    judged_rows = list[dict[str, Any]]()
    with bar(name, None, "tables") as advance:
        try:
            for row in rows:
                judged_rows.append(row)
                advance(1, row["file"])
        except KeyboardInterrupt:
            print(f"stopped: the figures are of the {len(judged_rows)} tables until then", file=sys.stderr)
    return judged_rows


def side_by_side(folders: Sequence[tuple[str, list[dict[str, Any]]]]) -> Iterator[str]:
    """Yield lines of the median errors in each folder, one for each device, precision and kind of rows of either."""
    by_place: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for folder, rows in folders:
        for row in rows:
            place = (f"{row['device']} {row.get('library', '')}".strip(), row["precision"], row["kind"])
            by_place.setdefault(place, {}).setdefault(folder, []).append(row["median"])
    yield f"{'median error, of several tables the worst':<50}" + "".join(f"{folder[-24:]:>26}" for folder, _ in folders)
    for (device, precision, kind), medians in sorted(by_place.items()):
        cells = (f"{100 * max(medians[folder]):.1f} %" if folder in medians else "no rows" for folder, _ in folders)
        yield f"{device:<16}{precision:<6}{kind:<28}" + "".join(f"{cell:>26}" for cell in cells)


def _lines(rows: Sequence[dict[str, Any]], figures: Mapping[str, float]) -> Iterator[str]:
    for row in rows:
        cells = f"{100 * row['median']:5.1f} % {100 * row['p90']:5.1f} % {100 * row['signed_median']:+5.1f} %"
        device = f"{row['device']} {row.get('library', '')}"
        yield f"{row['file']:<36}{device:<16}{row['precision']:<6}{row['kind']:<28}{row['rows']:>6} rows  {cells}"
    yield from (f"{name:<32}{value:.4f}" for name, value in figures.items())


def main(words: list[str] | None = None) -> int:
    """Print a row for each table, then the worst of them; of several folders their medians side by side at last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validity", description=__doc__.splitlines()[0])
    help_text = "folders of measured tables of operators, such as tables that were seen and others"
    parser.add_argument("--data", type=given_folder, nargs="+", default=[], metavar="DIR", help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    typed = parser.parse_args(words)
    try:
        folders = [(str(folder), judged_until_interrupt(tables(folder), folder.name)) for folder in typed.data]
        shipped = ({"file": TABLE.name, **row} for row in judged_contention(TABLE))
        folders = folders or [("", judged_until_interrupt(shipped, TABLE.name))]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    figures = {folder: summary(rows) for folder, rows in folders}
    for folder in figures if typed.data else ():
        for name in sorted({*WORST, *KINDS} - figures[folder].keys()):
            report_left_out(name, f"no table of the folder {'' if len(folders) == 1 else folder + ' '}gives it")
    if typed.json:
        parts = {folder: {**figures[folder], "tables": rows} for folder, rows in folders}
        print(json.dumps(parts if len(parts) > 1 else next(iter(parts.values())), indent=2))
        return 0
    for folder, rows in folders:
        print(*([folder] if len(folders) > 1 else []), *_lines(rows, figures[folder]), sep="\n")
    print(*(side_by_side(folders) if len(folders) > 1 else ()), sep="\n", end="\n" if len(folders) > 1 else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
