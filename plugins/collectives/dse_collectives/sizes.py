"""Figures over sizes: what something reaches for messages of more and more bytes, beside the most that is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dse.plots.canvas import FigureSheet, Frame, handles_of, mark_handle, plain_ticks, sheet
from dse.plots.labels import INK, Axis, looks, scale

if TYPE_CHECKING:
    import pandas as pd


def over_sizes(rows: pd.DataFrame, y: Axis, *, bound: str, frame: Frame) -> FigureSheet:
    """Plot y over `num_bytes`, both logarithmic, a line for each `name` and a dashed one for the rows named `bound`.

    rows: `name`, `num_bytes` and the column of y, positive. The first name has the widest line.
    """
    drawn = sheet(1, frame, height=2.6)
    (panel,) = drawn.panels
    lines = rows[rows["name"] != bound]
    chosen = looks(lines["name"].unique())
    units = (
        scale(Axis("num_bytes", "size", "B"), rows["num_bytes"], logarithmic=True),
        scale(y, rows[y.column], logarithmic=True),
    )
    for place, (name, look) in enumerate(chosen.items()):
        line = lines[lines["name"] == name].sort_values("num_bytes")
        first = name == lines["name"].iloc[0]
        panel.plot(
            line["num_bytes"] * units[0].factor,
            line[y.column] * units[1].factor,
            color=look.colour,
            marker=look.marker,
            ms=4.2 if first else 3.0,
            mew=0,
            lw=1.8 if first else 0.9,
            zorder=3 if first else 2 - 0.01 * place,
        )
    most = rows[rows["name"] == bound].sort_values("num_bytes")
    panel.plot(most["num_bytes"] * units[0].factor, most[y.column] * units[1].factor, color=INK, ls="--", lw=0.9)
    panel.set(xscale="log", yscale="log")
    plain_ticks(panel.xaxis, units[0], values=rows["num_bytes"] * units[0].factor)
    plain_ticks(panel.yaxis, units[1])
    drawn.xlabel, drawn.ylabel = units[0].title, units[1].title
    drawn.legend([*handles_of(chosen, style="line"), mark_handle(bound, ls="--")])
    return drawn
