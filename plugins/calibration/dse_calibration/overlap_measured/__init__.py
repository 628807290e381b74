"""Costs of a GEMM and a collective to one another: the coefficients of contention, fitted to measured overlaps.

Shows the fit with its residuals, what it says of rows it was not fitted to, and predictions for other numbers of
channels, GEMM sizes and collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.config.options import conf_dir
from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.results.claims import ClaimResult
from dse.results.run_folder import FinishedRun
from dse.space import get_path
from dse_calibration.contention import TIMES, Overlaps, fit_contention, table
from dse_calibration.overlap_measured.overlap_tables import overlap_extras
from simulators.costs.transfer import TransferMode, alone, library_cus
from simulators.hardware.machine import System
from simulators.hardware.parts import ELEMENT_BYTES
from simulators.hardware.schedule_system import ScheduleSystem
from studies.plain import Plain, geometric_mean, reach

if TYPE_CHECKING:
    import pandas as pd

_LIBRARY = {"static": "hipBLASLt (static tiles)", "dynamic": "work stealing (dynamic tiles)"}
_WHAT = {"gemm": "GEMM during the collective", "comm": "collective during the GEMM", "wall": "until both have ended"}
_PATTERN = "workload.operators.gather.pattern"
_CUS = "schedule.comm_cus"
_EXACT = 1e-6  # rounding
_FITTED = "fitted, no prediction"
_UNLIKE = "rows of several sizes are fitted at once: with 56 channels no single share of late start fits all sizes"
_ONE_SIZE = (
    "late start and rate are separated by rows whose GEMM outlasts the collective, which are of 56 channels only"
)
_STEAL = "on 48 channels and more a work-stealing GEMM loses more than its share of CUs and a constant interference"
_SMALL = "GEMMs of 2048 and 4096 end before the collective has started on all GPUs, by more than a share of their time"


class OverlapMeasured(Plain):
    """Claims, residuals and figures, from the measured table and a run's points."""

    allows = ("study.data_dir",)
    columns = (
        "schedule.name",
        "schedule.comm_cus",
        "system.gpu.gemm.assignment",
        "workload.operators.gemm.m",
        "workload.operators.gather.rows",
        "workload.operators.gather.cols",
        "workload.operators.gather.pattern",
    )

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings on errors of the coefficients of the run's system."""
        system = ScheduleSystem.of(run.config["system"])
        rows = _residuals(system)
        fit, swept = rows["basis"] == "fitted", _swept(rows)
        findings = {"overlap.bounds": _bounds(system, run.outputs.read_table("results"))}
        for what in TIMES:
            error, left = 100 * rows[f"{what}_error"].abs(), 100 * rows[f"{what}_error_left_out"].abs()
            # other sizes of GEMM or payload, at any number of channels
            unseen, sizes = error[~fit], error[~fit & ~swept]
            signed = 100 * rows[f"{what}_error"]
            unseen_rows = f"{len(unseen)} rows, farthest {_farthest(signed[~fit]):+.0f} %"
            findings |= {
                f"overlap.{what}_unseen": ClaimResult(float(unseen.median()), unseen_rows, cause=_SMALL),
                f"overlap.{what}_fitted": ClaimResult(
                    float(error[fit].max()),
                    f"{_FITTED}; farthest {_farthest(signed[fit]):+.1f} %",
                    cause=_UNLIKE,
                    basis="fitted",
                ),
                f"overlap.{what}_left_out": ClaimResult(
                    float(left[fit].max()),
                    "each predicted by a fit to the others, farthest "
                    f"{100 * _farthest(rows.loc[fit, f'{what}_error_left_out']):+.1f} %",
                    cause=_ONE_SIZE,
                ),
                f"overlap.{what}_other_channels": ClaimResult(
                    float(error[~fit & swept].max()), _worst(rows[~fit & swept], what), cause=_STEAL
                ),
                f"overlap.{what}_other_sizes": ClaimResult(
                    float(sizes.median()),
                    f"{len(sizes)} rows, farthest {_farthest(signed[~fit & ~swept]):+.0f} %",
                    cause=_SMALL,
                ),
            }
        return findings

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """`residuals` and `coefficients`, and figures of both and of the predictions; overlaps of other projects."""
        system = ScheduleSystem.of(run.config["system"])
        rows = _residuals(system)
        yield "residuals", rows
        fresh = fit_contention(system, _rows().where(_rows().fitted))
        contention = system.gpu.contention
        yield (
            "coefficients",
            {
                name: {"in_the_system": getattr(contention, name), "fitted_again": fresh.get(name)}
                for name in type(contention).model_fields
            },
        )
        yield "fit", partial(_fit_figure, rows)
        yield "predicted_rows", partial(_errors_figure, rows[rows["basis"] == "predicted"])

        folder = get_path(run.config, "study.data_dir")
        yield from overlap_extras(Path(folder) if folder else conf_dir() / "data" / "overlap")

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Predicted speed-up and slow-down of the GEMM over channels, for each scenario."""
        ok = table[(table["status"] == "ok") & (table["schedule.name"] != "serial")]
        if ok.empty:
            return
        panel = ok["scenario"].str.replace("-", ", ").str.replace("_", "-")
        ok = ok.assign(library=ok["system.gpu.gemm.assignment"].map(_LIBRARY) + _orders(ok), panel=panel)
        yield "speedup", partial(_speedups, ok)
        yield "gemm_slowdown", partial(_slowdowns, ok)


def _orders(ok: pd.DataFrame) -> pd.Series[str]:
    """Which kernel is launched first, and whether by priority, in words, where a run tries several."""
    names = ["schedule.launch_order", "schedule.stream_priority"]
    if not set(names) <= set(ok.columns) or len(ok[names].drop_duplicates()) == 1:
        return ok["schedule.name"].map(lambda name: "")
    urgent = ok[names[1]].map({"communication": ", high priority"}).fillna("")
    return ok[names[0]].map(lambda order: ", GEMM first" if order == "gemm_first" else "") + urgent


_CHANNELS = Axis(_CUS, "CUs of the collective")


def _speedups(ok: pd.DataFrame) -> FigureSheet:
    """Speed-up over the CUs of the collective."""
    best = ok.groupby("scenario", sort=False)["speedup"].max()
    title = f"Overlap gains in {int((best > 1).sum())} of {len(best)} scenarios, "
    title += f"{geometric_mean(best):.2f}x in the geometric mean"
    speedup = Axis("speedup", "speed-up over serial [x]", centre=1.0)
    return tables.curves(ok, _CHANNELS, y=speedup, by="library", frame=Frame(title, panel="panel"))


def _slowdowns(ok: pd.DataFrame) -> FigureSheet:
    """Slow-down of the GEMM over the CUs of the collective."""
    most = ok.groupby("library")["cil"].median()
    text = ", ".join(f"{value:.2f}x its time by {name}" for name, value in most.items())
    title = f"During a collective a GEMM takes {text}"
    slower = Axis("cil", "GEMM during the collective / alone [x]", centre=1.0)
    return tables.curves(ok, _CHANNELS, y=slower, by="library", frame=Frame(title, "in the median", "panel"))


def _fit_figure(rows: pd.DataFrame) -> FigureSheet:
    """Measured and predicted times over channels."""
    drawn = _long(rows[_sweep(rows)])
    fitted = ", ".join(map(str, sorted(drawn.loc[drawn["basis"] == "fitted", "channels"].unique())))
    error = (
        drawn.loc[drawn["basis"] != "fitted", "predicted_s"] / drawn.loc[drawn["basis"] != "fitted", "measured"] - 1
    ).abs()
    title = (
        f"Fitted to {fitted} channels, times of the others are predicted to {100 * error.median():.1f} % in the median"
    )
    channels, time = Axis("channels", "RCCL channels"), Axis("predicted_s", "time", "s")
    return tables.curves(drawn, channels, y=time, by="library", frame=Frame(title, panel="what"))


def _errors_figure(predicted: pd.DataFrame) -> FigureSheet:
    """Signed errors of the rows that nothing was fitted on, ranked."""
    import pandas as pd

    named = predicted.assign(
        row=[f"{row.size}, {row.payload_mib:g} MiB, {row.channels} channels" for row in predicted.itertuples()],
    )
    named = named.assign(library=named["assignment"].map(_LIBRARY))
    rows = pd.concat([named.assign(what=_WHAT[what], error=named[f"{what}_error"]) for what in TIMES])
    title = f"Times of overlaps that nothing was fitted on are {reach(100 * rows['error'], ' %')} off"
    title += f", {100 * rows['error'].abs().median():.0f} % in the median"
    error = Axis("error", "error of the prediction", "%", centre=0.0)
    return tables.dots(rows, error, row="row", by="what", frame=Frame(title, panel="library"))


@cache
def _rows() -> Overlaps:
    return Overlaps.read()


def _residuals(system: System) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(table(system, _rows()))


def _swept(rows: pd.DataFrame) -> Any:
    """Mask of the rows of the GEMMs and the payloads that coefficients are fitted to, over all channels."""
    import pandas as pd

    cases = pd.MultiIndex.from_frame(rows[["size", "payload_mib"]])
    return cases.isin(cases[rows["basis"] == "fitted"])


def _sweep(rows: pd.DataFrame) -> Any:
    """Mask of the rows of the GEMM and the payload that were measured on most numbers of channels."""
    import pandas as pd

    cases = pd.MultiIndex.from_frame(rows[["size", "payload_mib"]])
    return cases == rows.groupby(["size", "payload_mib"])["channels"].nunique().idxmax()


def _bounds(system: System, points: pd.DataFrame) -> ClaimResult:
    """Bounds of all overlaps with collectives by kernels: not faster than the longer of the two alone, and not slower
    than both in sequence with the launch of the GEMM.
    """
    ok = points[(points["status"] == "ok") & (points["schedule.name"] != "serial") & points[_CUS].notna()]
    if ok.empty:
        return ClaimResult(None, "needs overlaps with collectives by kernels: schedule=c3_sp")
    size = ok["workload.operators.gather.rows"] * ok["workload.operators.gather.cols"] * ELEMENT_BYTES["bf16"]
    kernels = zip(ok[_CUS], ok[_PATTERN], strict=True)
    # 0: as many as the library takes
    by = [TransferMode("cu", cus or library_cus(system, pattern), pattern) for cus, pattern in kernels]
    moved = np.array([float(alone(system, payload, by=mode)) for payload, mode in zip(size, by, strict=True)])
    multiplied = (ok["gemm_s"] / ok["cil"]).to_numpy()  # time of the GEMM alone, on the same kernels
    makespans = ok["makespan_s"].to_numpy()
    low = float((makespans / np.maximum(moved, multiplied)).min())
    high = float((makespans / (moved + multiplied + system.gpu.kernel_launch_s)).max())
    text = f"{len(ok)} points: at least {low:.3f} times the longer, at most {high:.3f} times both"
    return ClaimResult(bool(low >= 1 - _EXACT and high <= 1 + _EXACT), text)


def _worst(rows: pd.DataFrame, what: str) -> str:
    row = rows.iloc[int(rows[f"{what}_error"].abs().argmax())]
    error = 100 * row[f"{what}_error"]
    return f"{error:+.1f} % at {row['channels']} channels, {_LIBRARY[row['assignment']]}"


def _farthest(errors: pd.Series[Any]) -> float:
    """The error of the largest amount, with its sign."""
    return float(errors.iloc[int(errors.abs().argmax())])


def _long(rows: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    parts = []
    for what, label in _WHAT.items():
        names = {f"{what}_s": "predicted_s", f"{what}_measured_s": "measured"}
        parts.append(rows.rename(columns=names).assign(what=label, library=rows["assignment"].map(_LIBRARY)))
    return pd.concat(parts, ignore_index=True)


STUDY = OverlapMeasured()
