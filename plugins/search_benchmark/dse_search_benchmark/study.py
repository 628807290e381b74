"""Search methods held against known fronts: how near they get with how many points, and what choosing them costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from dse.plots import Axis, Draw, FigureSheet, Frame, searches
from dse.plots.labels import label
from studies.plain import Plain, capitalised, extremes, most_frequent

if TYPE_CHECKING:
    import pandas as pd

_AT = re.compile(r"hypervolume_at_(\w+)_pct")


class SearchBenchmark(Plain):
    """Figures alone: there is nothing published to compare with."""

    columns = (
        "run.method",
        "run.seed",
    )

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """(name, what draws): hypervolume and IGD+ over points and over time, and the points that 95 % take."""
        ok = table[table["status"] == "ok"]
        points = Axis("share", "points evaluated, of the distinct outcomes", "%")
        time = Axis("overhead_s", "time of the search method itself", "s")
        missed = Axis("missed", "hypervolume missed, of the true front's", "%")
        yield "points_to_95", partial(_points_to_95, ok)
        yield "hypervolume", partial(_progress_figure, ok, points, missed)
        yield "hypervolume_time", partial(_progress_figure, ok, time, missed)
        yield "igd_plus", partial(_progress_figure, ok, points, Axis("igd_plus", "IGD+ [ranges of the true front]"))


def _band(ok: pd.DataFrame) -> str:
    return f"median and 95 % bootstrap interval of {ok['run.seed'].nunique()} seeds"


def _progress_figure(ok: pd.DataFrame, x: Axis, y: Axis) -> FigureSheet:
    """Plot the regret of a search, over points or time."""
    rows = _progress(ok)
    last = rows[rows["share"] == rows["share"].max()]
    means = last.groupby("run.method", sort=False)[y.column].mean()
    text = f"{100 * means.min():.2g} %" if y.unit == "%" else f"{means.min():.2g}"
    what = y.label.partition(",")[0].partition(" [")[0]
    title = f"{capitalised(label(extremes(means)[0]))} ends nearest to the true fronts: {text} of {what} in the mean"
    frame = Frame(title, _band(ok))
    return searches.progress(rows, x, y=y, by="run.method", frame=frame)


def _points_to_95(ok: pd.DataFrame) -> FigureSheet:
    """Points that 95 % of the hypervolume take."""
    medians = ok.groupby(["scenario", "run.method"], sort=False)["points_to_95"].median().unstack()
    name, times = most_frequent(medians.idxmin(axis=1))
    title = (
        f"{capitalised(name)} needs the fewest points to 95 % of the hypervolume in {times} of {len(medians)} spaces"
    )
    needed = Axis("points_to_95", "points to 95 % of the hypervolume")
    rows = ok.assign(unreached=ok["missed_hypervolume"] > 0.05)
    return searches.medians(rows, needed, by="run.method", least="unreached", frame=Frame(title, _band(ok)))


def _progress(ok: pd.DataFrame) -> pd.DataFrame:
    """Progress of searches: a row for each search and each share of the points at which it was recorded."""
    import pandas as pd

    parts = []
    for name in ok.columns:
        if at := _AT.fullmatch(name):
            columns = {metric: ok[f"{metric}_at_{at[1]}_pct"] for metric in ("hypervolume", "igd_plus", "overhead_s")}
            # names of columns have `p` for the decimal point
            part = ok[["scenario", "run.method", "run.seed"]].assign(
                **columns, share=float(at[1].replace("p", ".")) / 100
            )
            parts.append(part.assign(missed=1.0 - part["hypervolume"]).dropna())
    return pd.concat(parts, ignore_index=True)


STUDY = SearchBenchmark()
