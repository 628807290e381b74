"""Times of PTX kernels against DeepBench's: products, and convolutions that ran as implicit products, in fp32.

Every N-th row is predicted by our own kernels on the SMs of the GPU; nothing is fitted on any row.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dse_ptx.convolutions import Convolution, time_convolution
from dse_ptx.products import STEPS, TILINGS, Product, time_product, trace_product
from dse_ptx.sms import SmArray, names, sm_array
from dse_ptx.timing import time_launch

DEVICES: Mapping[str, str] = {"gtx_1080_ti": "NV_1080Ti", "p100": "NV_P100", "m40": "NV_M40"}
_FAR = 0.3  # from here a row is listed as a miss


@dataclass(frozen=True)
class RowPrediction:
    """A row that was predicted, in seconds."""

    device: str
    sort: str
    name: str
    tiling: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def rows(folder: Path, name: str, every: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Every so many-th row of each sort that is predicted, with its sort."""
    with (folder / f"{DEVICES[name]}.csv").open(encoding="utf-8", newline="") as file:
        table = [row for row in csv.DictReader(file) if row["precision"] == "fp32"]
    products = [row for row in table if row["op"] == "gemm"]
    implicit = [row for row in table if row["op"] == "conv" and row["algo"].startswith("IMPLICIT") and row["r"]]
    yield from (("gemm", row) for row in products[::every])
    yield from (("conv", row) for row in implicit[::every])


def predict(sort: str, row: Mapping[str, str], machine: SmArray) -> RowPrediction:
    """Predict a row."""
    measured = float(row["fwd_ms"]) * 1e-3
    if sort == "gemm":
        m, n, k = (int(row[name]) for name in "mnk")
        done = time_product(Product(m, n, k, row["ta"] == "T", row["tb"] == "T"), machine)
        name, tiling, seconds = f"{m}x{n}x{k} {row['ta']}{row['tb']}", done.tiling, done.seconds
    else:
        n, c, h, w, k, r, s = (int(row[name]) for name in "nchwkrs")
        pad, stride = (int(row["pad_h"]), int(row["pad_w"])), (int(row["stride_v"]), int(row["stride_h"]))
        layer = Convolution(n, c, h, w, k, (r, s), pad, stride)
        seconds, tiling = time_convolution(layer, machine)
        name = f"{w}x{h}x{c} n{n} k{k} {r}x{s}"
    return RowPrediction(row["device"], sort, name, f"{tiling.rows}x{tiling.cols}/{tiling.parts}", seconds, measured)


def instructions_per_s() -> float:
    """Warp instructions of a product that are timed in a second of CPU time, the best of three."""
    machine = sm_array("gtx_1080_ti")
    trace, grid = trace_product(Product(1760, 512, 1760), TILINGS[2], 4 * STEPS)
    time_launch(trace, machine, grid=grid)  # compiles
    best = 0.0
    for _ in range(3):
        began = time.process_time()
        done = time_launch(trace, machine, grid=grid)
        best = max(best, done.instructions / (time.process_time() - began))
    return best


def summary(timed: list[RowPrediction]) -> dict[str, Any]:
    """Medians of the error, over all, and by GPU and sort; misses."""
    groups: dict[str, list[float]] = {}
    for each in timed:
        groups.setdefault(f"{each.device} {each.sort}", []).append(abs(each.error))
    far = [each for each in timed if abs(each.error) > _FAR]
    return {
        "deepbench_median": statistics.median(abs(each.error) for each in timed) if timed else None,
        "deepbench_rows": len(timed),
        "deepbench_bias": statistics.median(each.error for each in timed) if timed else None,
        "medians": {name: [statistics.median(errors), len(errors)] for name, errors in groups.items()},
        "misses": [
            f"{each.device} {each.sort} {each.name}: {each.tiling}, {each.predicted * 1e3:.4g} ms against "
            f"{each.measured * 1e3:.4g} ms ({each.error:+.0%})"
            for each in sorted(far, key=lambda each: -abs(each.error))
        ],
    }  # fmt: skip


def present(folder: Path) -> list[str]:
    """Devices that the folder has a table of."""
    return [name for name, stem in DEVICES.items() if (folder / f"{stem}.csv").is_file()]


def absent(folder: Path) -> str:
    """Which GPUs with SMs are not compared, and why."""
    return f"no table of {', '.join(name for name in names() if name not in present(folder))}"


def predictions(folder: Path, every: int) -> list[RowPrediction]:
    """Predicted rows of all devices that the folder has a table of."""
    return [predict(sort, row, sm_array(name)) for name in present(folder) for sort, row in rows(folder, name, every)]
