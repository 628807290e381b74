"""Whole models: what the best schedules of a step's collectives gain, by model, machine and mode.

Scenarios are called `<model> <system> <mode>`. The winner of each is the plan of `studies.plan` in a smaller space.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dse.plots import Axis, Draw, FigureSheet, Frame, fronts, tables
from studies.plain import Plain, geometric_mean

if TYPE_CHECKING:
    import pandas as pd

_TIME, _CUS, _MEMORY = "iteration_s", "comm_cu_s", "memory_share"
_FITS = 1.0
_PANELS = 6  # models whose fronts are drawn


class WholeModels(Plain):
    """A table of gains, and figures of gains and fronts."""

    columns = ("run.mode",)

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Gains by model, machine and mode; time of a step against CUs of communication."""
        rows = gains(table)
        if rows.empty:
            return
        yield "gains", partial(_gains_figure, rows)
        points = _points(table)
        if points["comm_cus"].nunique() > 1:
            yield "front", partial(_front_figure, points, rows)

    def extras(self, run: Any) -> Iterator[tuple[str, Any]]:
        """The table of gains."""
        rows = gains(run.outputs.read_table("results"))
        if len(rows):
            yield "gains", rows


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each scenario: model, system, mode, times before and with the best schedules, gain, share of memory."""
    import pandas as pd

    rows = []
    ok = table[table["status"] == "ok"]
    for name, points in ok.groupby("scenario", sort=False):
        model, system, mode = _names(str(name))
        serial = points[points["baseline"] == points["key"]]
        best = points.sort_values(_TIME, kind="stable").iloc[0]
        # rules forbid the serial step: the slowest stands for it
        before = float(serial[_TIME].iloc[0]) if len(serial) else float(points[_TIME].max())
        part = {"model": model, "system": system, "mode": mode, "before_s": before, "best_s": float(best[_TIME])}
        rows.append({**part, "gain": before / float(best[_TIME]), "memory_share": float(best[_MEMORY])})
    return pd.DataFrame(rows)


def _names(scenario: str) -> tuple[str, str, str]:
    model, system, mode = [*scenario.split(" "), "", ""][:3]  # names of scenarios may have fewer parts
    return model, system, mode


def _gains_figure(rows: pd.DataFrame) -> FigureSheet:
    best = rows.sort_values("gain").iloc[-1]
    mean = geometric_mean(rows["gain"])
    title = (
        f"Overlap makes steps {mean:.2f}x as fast in the geometric mean, {best['gain']:.2f}x at most ({best['model']})"
    )
    note = f"eight GPUs; {int((rows['memory_share'] > _FITS).sum())} of {len(rows)} steps would not fit their memory"
    axis = Axis("gain", "time with serial collectives / time [x]", centre=1.0)
    return tables.dots(rows, axis, row="model", by="system", frame=Frame(title, note, "mode"))


def _points(table: pd.DataFrame) -> pd.DataFrame:
    """Points with their model, machine and mode, times over the serial step's, and CUs held in the mean."""
    ok = table[table["status"] == "ok"].copy()
    names = ok["scenario"].map(lambda name: _names(str(name)))
    ok["model"], ok["system"], ok["mode"] = (names.map(lambda parts, place=place: parts[place]) for place in range(3))
    serial = ok[ok["baseline"] == ok["key"]].set_index("scenario")[_TIME]
    ok["relative"] = ok[_TIME] / ok["scenario"].map(serial[~serial.index.duplicated()])
    return ok.assign(comm_cus=ok[_CUS] / ok[_TIME])


def _front_figure(points: pd.DataFrame, rows: pd.DataFrame) -> FigureSheet:
    chosen = list(dict.fromkeys(rows.sort_values("gain", ascending=False)["model"]))[:_PANELS]
    shown = points[points["model"].isin(chosen)]
    best = shown.loc[shown.groupby("scenario")["relative"].idxmin()]
    freed = int((best["comm_cus"] < best["comm_cus"].max() / 10).sum())
    title = f"The fastest schedules leave communication hardly a CU in {freed} of {len(best)} steps"
    axes = [Axis("relative", "time / time with serial collectives [x]"), Axis("comm_cus", "CUs of communication, mean")]
    return fronts.pareto(shown, axes, by="system", frame=Frame(title, "the models that gain most", "model"))


STUDY = WholeModels()
