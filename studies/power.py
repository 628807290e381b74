"""Overlap under a limit of the board's power: which schedule wins, and for how many joules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.labels import label
from dse.results.run_folder import FinishedRun
from dse.space import get_path
from simulators.costs.power import Activity, board_w
from simulators.hardware.parts import Power
from studies.plain import Plain, best_rows, geometric_mean

if TYPE_CHECKING:
    import pandas as pd

_CAP = Axis("system.gpu.power.cap_w", "power limit [W]")
_TIME, _WATTS = Axis("time_s", "time", "s"), Axis("watts", "power of one GPU", "W")
_SPEEDUP = Axis("speedup", "speed-up over serial under the same limit [x]", centre=1.0)
_ENERGY = Axis("energy", "energy over the least of its pair [x]", centre=1.0)


class PowerLimits(Plain):
    """Figures of gains and of energy over the limit."""

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """What overlap gains under each limit, and the energy that the fastest takes; none of a single limit."""
        ok = table[(table["status"] == "ok") & (table["key"] != table["baseline"])]
        if _CAP.column not in ok or ok[_CAP.column].nunique() < 2:
            return
        yield "gains", partial(_gains, ok)
        yield "energy", partial(_energy, ok)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Power over the time of the fastest overlap of each pair."""
        table, timelines = run.outputs.read_table("results"), run.outputs.read_table("timelines")
        power, precision = get_path(run.config, "system.gpu.power"), get_path(run.config, "workload.precision")
        if len(timelines) and power:
            watts = _watts_over_time(table, timelines, Power.model_validate(power), str(precision))
            yield "power_over_time", watts
            yield "power_over_time", partial(_over_time, watts)


def _watts_over_time(table: pd.DataFrame, timelines: pd.DataFrame, power: Power, precision: str) -> pd.DataFrame:
    """Power [W] between the starts and ends of tasks, each as even as it is long, and the mean and the limit of each.

    What data that is moved does not account for of the HBM's traffic, GEMMs read and write.
    """
    import pandas as pd

    rows = []
    points: Any = table.set_index(table["key"].astype(str))
    for (pair, key), tasks in timelines.groupby(["scenario", "key"], observed=True, sort=False):
        point: Any = points.loc[str(key)]
        limit = float(point.get(_CAP.column, power.cap_w))
        times = np.unique(np.concatenate([tasks["start_s"], tasks["finish_s"], [0.0]]))
        spans = np.maximum((tasks["finish_s"] - tasks["start_s"]).to_numpy(), 1e-15)
        # data is read at one end, and written at the other
        of_gemms = max(float(point["hbm_bytes"] - 2 * point["moved_bytes"]), 0.0) / max(float(point["flop"]), 1.0)
        for begin, end in pairwise(times):
            active = ((tasks["start_s"] <= begin) & (tasks["finish_s"] >= end)).to_numpy()
            flop, moved = (float((tasks[name].to_numpy() / spans)[active].sum()) for name in ("flop", "moved_bytes"))
            doing = Activity(flop, 2 * moved + of_gemms * flop, moved, 0.0)
            drawn = board_w(power, point["held_clock"], doing, precision)
            rows += [{"pair": str(pair), "curve": "drawn", "time_s": at, "watts": float(drawn)} for at in (begin, end)]
        for curve, watts in (("mean", float(point["mean_w"])), ("limit", limit)):
            rows += [{"pair": str(pair), "curve": curve, "time_s": at, "watts": watts} for at in (0.0, times[-1])]
    return pd.DataFrame(rows)


def _over_time(watts: pd.DataFrame) -> FigureSheet:
    """Power over time of each pair, with its mean and its limit."""
    drawn = watts[watts["curve"] == "drawn"]
    above = drawn.sort_values("watts").iloc[-1]
    limit = float(watts[(watts["curve"] == "limit") & (watts["pair"] == above["pair"])]["watts"].iloc[0])
    title = f"The fastest overlap draws up to {above['watts']:.0f} W under a limit of {limit:.0f} W"
    return tables.curves(watts, _TIME, y=_WATTS, by="curve", frame=Frame(title, panel="pair"))


def _gains(ok: pd.DataFrame) -> FigureSheet:
    """Mean speed-up of each schedule over the limit."""
    rows = ok.groupby(["schedule.name", _CAP.column], observed=True)["speedup"].agg(geometric_mean).reset_index()
    rows = rows.assign(schedule=rows["schedule.name"].astype(str).map(label))
    best = rows.groupby(_CAP.column)["speedup"].max()
    low, high = best.index.min(), best.index.max()
    title = f"Overlap gains {best[high]:.2f}x under {high:.0f} W, {best[low]:.2f}x under {low:.0f} W"
    frame = Frame(title, "geometric means over pairs of a GEMM and a collective")
    return tables.curves(rows, _CAP, y=_SPEEDUP, by="schedule", frame=frame)


def _energy(ok: pd.DataFrame) -> FigureSheet:
    """Energy of the fastest schedule of each pair over the limit."""
    best = best_rows(ok, ["scenario", _CAP.column])
    least = best.groupby("scenario", observed=True)["energy_j"].transform("min")
    rows = best.assign(energy=best["energy_j"] / least, pair=best["scenario"].astype(str))
    mean = rows.groupby(_CAP.column)["energy"].mean()
    title = f"The fastest overlap takes the least energy under a limit of {mean.idxmin():.0f} W"
    return tables.curves(rows, _CAP, y=_ENERGY, by="pair", frame=Frame(title))


STUDY = PowerLimits()
