"""Gantt charts: what each engine of a GPU does when."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dse.plots.canvas import FigureSheet, Frame, boxes, handles_of, name_rows, plain_ticks, row_inches, sheet
from dse.plots.labels import Axis, Scale, SeriesStyle, looks, scale

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def timeline(intervals: pd.DataFrame, title: str, *, panel: str | None = None) -> FigureSheet:
    """Plot one row per lane, a bar per task, colour by kind of task.

    intervals: `lane`, `kind`, `start_s`, `finish_s`; the column `panel` has a panel for each value, below one another
    on the same axis.
    """
    lanes = sorted(intervals["lane"].unique(), key=_lane_order)
    chosen = looks(intervals["kind"].unique())
    groups = {"": intervals} if panel is None else dict(list(intervals.groupby(panel, sort=False)))
    drawn = sheet(len(groups), Frame(title), height=row_inches(1.2) * len(lanes), columns=1)
    unit = scale(Axis("finish_s", "time", "s"), intervals["finish_s"])
    for place, (name, group) in enumerate(groups.items()):
        _bars(drawn.panels[place], group, lanes, unit=unit, chosen=chosen)
        drawn.panels[place].set_xlim(0, intervals["finish_s"].max() * unit.factor * 1.005)
        plain_ticks(drawn.panels[place].xaxis, unit)
        drawn.name(place, str(name))
    drawn.xlabel = unit.title
    drawn.legend(handles_of(chosen, style="patch"))
    return drawn


def _bars(
    panel: Axes, intervals: pd.DataFrame, lanes: list[str], *, unit: Scale, chosen: Mapping[str, SeriesStyle]
) -> None:
    rows = intervals.assign(row=intervals["lane"].map({lane: row for row, lane in enumerate(lanes)}))
    for kind, group in rows.groupby("kind", sort=False):
        columns = group["row"], group["start_s"] * unit.factor, group["finish_s"] * unit.factor
        boxes(panel, list(zip(*columns, strict=True)), 0.72, colour=chosen[str(kind)].colour)
    name_rows(panel, lanes, labelled=True)


def _lane_order(lane: str) -> tuple[int, int, str]:
    number = re.search(r"\.([0-9]{1,18})$", f".{lane}")
    return (0 if lane == "compute" else 1, int(number[1]) if number else 0, lane)
