"""Rows of `benchmarks.validity` on measured overlaps: a GEMM and its collective, and prefills of whole models.

Tables of the layouts of `gemm_collective` and `prefills` of `dse_calibration.overlap_measured`, and of a GEMM beside a
collective that does not wait for it (`dse_calibration.contention`), also at locked clocks. Rows that cannot be
predicted, or that constants were fitted on, are left out, with the reason on stderr.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dse.files import csv_columns
from dse_calibration.contention import WALLS, Overlaps, errors
from dse_calibration.overlap_measured.gemm_collective import MeasuredOverlap, holds_overlaps, predict_overlaps
from dse_calibration.overlap_measured.paired_tables import holds_pairs, predict_pairs
from dse_calibration.overlap_measured.prefills import BASELINE, NO_SUMS, Prefill, read_prefills, settings
from simulators.hardware.machine import tree_of
from simulators.hardware.network import Pattern
from simulators.hardware.schedule_system import ScheduleSystem
from validation.left_out import FITTED, report_left_out

FUSED = "speed-up of an overlap"
GAIN = "gain of an overlapped prefill"
BESIDE_ON = "mi300x_8"
AT_CLOCKS = "GEMM and collective at a locked clock"
_CLOCKS_ON = "a100_8"
_AT_CLOCKS = ("clock_asked_mhz", "ctas", "m", "n", "k", "gemm_alone_ms", "comm_alone_ms", "concurrent_ms")
_THROTTLED = "concurrent_throttled"
BESIDE = {"gemm": "GEMM beside a collective", "comm": "collective beside a GEMM", "wall": "GEMM and collective"}
"""Time of a GEMM and a collective that do not wait for one another -> kind of row."""

KINDS: Mapping[str, str] = {
    "prefill_median": BASELINE,
    "prefill_gain_points": GAIN,
    "fused_median": FUSED,
    **{f"overlap_{time}_median": kind for time, kind in BESIDE.items()},
    "overlap_by_clock_median": AT_CLOCKS,
}
"""Figure of `overlap_summary` -> kind of rows of which it is the median."""


def judged_overlaps(file: Path) -> Iterator[dict[str, Any]]:
    """Yield errors of the speed-up by GPU, on the rows of a table that nothing was fitted on; `sign`: share of rows
    whose gain or loss is right.
    """
    overlaps, skipped = (predict_pairs if holds_pairs(csv_columns(file, "--data")) else predict_overlaps)(file)
    for reason, count in skipped.items():
        report_left_out(file.name, reason, rows=count)
    unseen = sorted((row for row in overlaps if not row.fitted), key=_gpu)
    if len(unseen) < len(overlaps):
        report_left_out(file.name, FITTED, rows=len(overlaps) - len(unseen))
    for gpu, group in groupby(unseen, key=_gpu):
        rows = list(group)
        sign = float(np.mean([row.right_sign for row in rows]))
        yield _row(gpu, "any", FUSED, [row.error for row in rows]) | {"sign": sign}


def holds_speedups(columns: tuple[str, ...]) -> bool:
    """Return whether a table with these columns holds overlaps of a GEMM and its collective, in either layout."""
    return holds_overlaps(columns) or holds_pairs(columns)


def _gpu(row: MeasuredOverlap) -> str:
    return row.row["gpu"]


def judged_prefills(file: Path) -> Iterator[dict[str, Any]]:
    """Yield errors of times by kind, and of the gain by overlap in points, on the rows whose models are known."""
    rows, skipped = read_prefills(file)
    if skipped:
        report_left_out(f"{file.name} of {', '.join(skipped)}", "no such model, or no times")
    device, precision = settings()["system"], settings()["precision"]
    for kind in settings()["times"] if rows else ():
        signed = [error for row in rows if (error := _error(row, kind)) is not None]
        if signed:
            yield _row(device, precision, kind, signed)
    gains = [row.gain_error for row in rows if row.gain_error is not None]
    if gains:
        yield _row(device, precision, GAIN, gains)


def judged_contention(file: Path) -> Iterator[dict[str, Any]]:
    """Yield errors of the times of a GEMM beside a collective, on the rows that nothing was fitted on."""
    rows = Overlaps.read(file)
    unseen = rows.where(~rows.fitted)
    if len(unseen) < len(rows):
        report_left_out(file.name, FITTED, rows=len(rows) - len(unseen))
    if len(unseen):
        for name, error in errors(ScheduleSystem.of(tree_of(BESIDE_ON)), unseen).items():
            yield _row(BESIDE_ON.rpartition("_")[0], "bf16", BESIDE[name], error.tolist())


def holds_clocks(columns: tuple[str, ...]) -> bool:
    """Return whether a table with these columns holds GEMMs beside a collective at locked clocks."""
    return {*_AT_CLOCKS, _THROTTLED} <= set(columns)


def judged_clocks(file: Path) -> Iterator[dict[str, Any]]:
    """Yield errors of the walls of a GEMM and an all-reduce at locked clocks, on the rows that nothing was fitted on.

    The laws are those of the nominal clock, as the times alone are measured at the same one.
    """
    table = pd.read_csv(file, comment="#")
    throttled = table[_THROTTLED] != 0
    if throttled.any():
        report_left_out(file.name, "at a lower clock together than alone", rows=int(throttled.sum()))
    table = table[~throttled].reset_index(drop=True)
    alone, shipped = table[["gemm_alone_ms", "comm_alone_ms"]] / 1e3, Overlaps.read(WALLS)
    fitted = alone["gemm_alone_ms"].isin(shipped.gemm_alone) & table["ctas"].isin(shipped.channels)
    fitted &= (table["concurrent_ms"] / 1e3).isin(shipped.wall)
    if fitted.any():
        report_left_out(file.name, FITTED, rows=int(fitted.sum()))
    count, missing = len(table), np.full(len(table), np.nan)
    pattern: Pattern = "all_reduce"
    rows = Overlaps(
        shape=table[["m", "n", "k"]].to_numpy(np.int64),
        channels=table["ctas"].to_numpy(np.int64),
        payload_bytes=missing,
        assignment=("static",) * count,
        pattern=(pattern,) * count,
        gemm_alone=alone["gemm_alone_ms"].to_numpy(float),
        comm_alone=alone["comm_alone_ms"].to_numpy(float),
        gemm=missing,
        comm=missing,
        wall=table["concurrent_ms"].to_numpy(float) / 1e3,
        fitted=fitted.to_numpy(bool),
    )
    unseen = rows.where(~rows.fitted)
    if len(unseen):
        (error,) = errors(ScheduleSystem.of(tree_of(_CLOCKS_ON)), unseen).values()
        yield _row(_CLOCKS_ON.rpartition("_")[0], "bf16", AT_CLOCKS, error.tolist())


def _error(row: Prefill, kind: str) -> float | None:
    """Relative error; None where it was not measured, or fitted."""
    if kind not in row.measured or (row.fitted and kind == NO_SUMS):
        return None
    return row.predicted[kind] / row.measured[kind] - 1


def _row(device: str, precision: str, kind: str, signed: Sequence[float]) -> dict[str, Any]:
    size = np.abs(signed)
    return {
        "device": device,
        "library": "",
        "precision": precision,
        "kind": kind,
        "rows": len(signed),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "signed_median": float(np.median(signed)),
        "large_median": None,
        "small_median": None,
        "errors": [float(error) for error in signed],
    }


def overlap_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over all rows of all tables, as fractions: times and gains of prefills, speed-ups and their sign, times
    of a GEMM and a collective beside one another.
    """
    fused = [row for row in rows if row["kind"] == FUSED]
    counts = [row["rows"] for row in fused]
    summary = {}
    for name, kind in KINDS.items():
        signed = [error for row in rows if row["kind"] == kind for error in row["errors"]]
        if signed:
            summary[name] = float(np.median(np.abs(signed)))
    if fused:
        summary["fused_sign"] = float(np.average([row["sign"] for row in fused], weights=counts))
    return summary
