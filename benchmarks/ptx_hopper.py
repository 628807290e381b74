"""Kernels of Hopper against NumPy, and times of products on H100 against measured ones; nothing is fitted on any row.

Rows have m, n and k of `LEAST` at least; every N-th of them is predicted. Published rows are those of a library that
chooses its kernels, ours the fastest of a few (`dse_ptx.tiles.times`), at the clock of the data sheet.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dse_ptx.checking.hopper_cases import CASES
from dse_ptx.sms import sm_array
from dse_ptx.tiles.launches import ProductSize
from dse_ptx.tiles.times import time_tiles

LEAST, EVERY = 2048, 15
"""Least m, n and k of a row, and of so many such rows one is predicted."""
_TABLE, _MOST = "h100_sxm_bf16.csv", 1e-2
_FAR = 0.25  # from here a row is listed as a miss


@dataclass(frozen=True)
class TimedProduct:
    """A row that was predicted, in seconds."""

    name: str
    kernel: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def computed() -> dict[str, float]:
    """Kernels whose results are those of NumPy, and the largest error of a product in steps of fp16."""
    errors = {name: case() for name, case in CASES.items()}
    products = [error for name, error in errors.items() if name.startswith("product")]
    return {"hopper_kernels": sum(error <= _MOST for error in errors.values()), "hopper_gemm_error": max(products)}


def table_near(folder: Path) -> Path | None:
    """The table of products in a folder, in one that is called `gemm` there, or beside it."""
    places = [folder / _TABLE, folder / "gemm" / _TABLE, folder.resolve().parent / "gemm" / _TABLE]
    return next((path for path in places if path.is_file()), None)


def chosen_rows(path: Path, every: int) -> Sequence[Mapping[str, str]]:
    """Every so many-th row whose sides are long."""
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [row for row in table if min(int(row[name]) for name in "mnk") >= LEAST][::every]


def predicted_rows(rows: Sequence[Mapping[str, str]]) -> list[TimedProduct]:
    """Times of rows."""
    machine, timed = sm_array("h100"), list[TimedProduct]()
    for row in rows:
        m, n, k = (int(row[name]) for name in "mnk")
        done = time_tiles(ProductSize(m, n, k), machine)
        kernel = f"{done.kernel.rows}x{done.kernel.columns}"
        timed.append(TimedProduct(f"{m}x{n}x{k}", kernel, done.seconds, float(row["latency"]) * 1e-3))
    return timed


def summary(timed: Sequence[TimedProduct]) -> dict[str, Any]:
    """Median and bias of the error, and misses."""
    far = sorted((each for each in timed if abs(each.error) > _FAR), key=lambda each: -abs(each.error))
    return {
        "hopper_gemm_timing_median": statistics.median(abs(each.error) for each in timed) if timed else None,
        "hopper_gemm_timing_bias": statistics.median(each.error for each in timed) if timed else None,
        "hopper_gemm_rows": len(timed),
        "hopper_gemm_misses": [
            f"{each.name}: {each.kernel}, {each.predicted * 1e6:.4g} us against {each.measured * 1e6:.4g} us "
            f"({each.error:+.0%})"
            for each in far
        ],
    }


def hopper(folder: Path, every: int = EVERY) -> dict[str, Any]:
    """All figures; those of time only where there is a table."""
    path = table_near(folder)
    return {**computed(), **summary(predicted_rows(chosen_rows(path, every)) if path else [])}
