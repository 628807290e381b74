"""Rows of `benchmarks.validity` on measured overlaps: a GEMM and its collective, and prefills of whole models.

Tables of the layouts of `gemm_collective` and `prefills` of `studies.overlap_measured`; rows that cannot be predicted
are skipped, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from studies.overlap_measured.gemm_collective import MeasuredOverlap, predict_overlaps
from studies.overlap_measured.prefills import NO_SUMS, Prefill, read_prefills, settings

FUSED = "speed-up of an overlap"
GAIN = "gain of an overlapped prefill"


def judged_overlaps(file: Path) -> Iterator[dict[str, Any]]:
    """Yield errors of the speed-up by GPU, on the rows of a table that nothing was fitted on; `sign`: share of rows
    whose gain or loss is right.
    """
    overlaps, skipped = predict_overlaps(file)
    for reason, count in skipped.items():
        print(f"{file.name}: {count} rows are skipped: {reason}", file=sys.stderr)
    unseen = sorted((row for row in overlaps if not row.fitted), key=_gpu)
    for gpu, group in groupby(unseen, key=_gpu):
        rows = list(group)
        sign = float(np.mean([row.right_sign for row in rows]))
        yield _row(gpu, "any", FUSED, [row.error for row in rows]) | {"sign": sign}


def _gpu(row: MeasuredOverlap) -> str:
    return row.row["gpu"]


def judged_prefills(file: Path) -> Iterator[dict[str, Any]]:
    """Yield errors of times by kind, and of the gain by overlap in points, on the rows whose models are known."""
    rows, skipped = read_prefills(file)
    if skipped:
        print(f"{file.name}: rows of {', '.join(skipped)} are skipped: no such model, or no times", file=sys.stderr)
    device, precision = settings()["system"], settings()["precision"]
    for kind in settings()["times"] if rows else ():
        errors = [error for row in rows if (error := _error(row, kind)) is not None]
        if errors:
            yield _row(device, precision, kind, errors)
    gains = [row.gain_error for row in rows if row.gain_error is not None]
    if gains:
        yield _row(device, precision, GAIN, gains)


def _error(row: Prefill, kind: str) -> float | None:
    """Relative error; None where it was not measured, or fitted."""
    if kind not in row.measured or (row.fitted and kind == NO_SUMS):
        return None
    return row.predicted[kind] / row.measured[kind] - 1


def _row(device: str, precision: str, kind: str, errors: Sequence[float]) -> dict[str, Any]:
    size = np.abs(errors)
    return {
        "device": device,
        "library": "",
        "precision": precision,
        "kind": kind,
        "rows": len(errors),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "signed_median": float(np.median(errors)),
        "large_median": None,
        "small_median": None,
        "errors": [float(error) for error in errors],
    }


def overlap_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over all rows of all tables, as fractions: times and gains of prefills, speed-ups and their sign."""
    fused = [row for row in rows if row["kind"] == FUSED]
    counts = [row["rows"] for row in fused]
    kinds = {"prefill_median": "prefill", "prefill_gain_points": GAIN, "fused_median": FUSED}
    summary = {}
    for name, kind in kinds.items():
        errors = [error for row in rows if row["kind"] == kind for error in row["errors"]]
        if errors:
            summary[name] = float(np.median(np.abs(errors)))
    if fused:
        summary["fused_sign"] = float(np.average([row["sign"] for row in fused], weights=counts))
    return summary
