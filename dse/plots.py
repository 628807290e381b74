"""Figures: the only module that draws. Every function takes a table and returns a matplotlib figure.

Colours follow one order everywhere (colour-blind safe), markers repeat what colours say, and every axis has a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.outputs import whole

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KIND_COLOURS = {"gemm": "#0173b2", "transfer": "#de8f05", "launch": "#949494"}
_MOST_DRAWN = 5_000  # points that are drawn one by one in an SVG; more become an image in it
_MARKERS = "osD^vPX*<>h8"


@dataclass(frozen=True)
class Axis:
    """A column of the table and how it is shown: label and the factor from SI."""

    column: str
    label: str
    factor: float = 1.0


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `<name>.png` and `<name>.svg`, the same bytes for the same figure; their paths."""
    import matplotlib.pyplot as plt

    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with whole(path) as fresh:
            figure.savefig(fresh, dpi=140, metadata=metadata, format=path.suffix[1:])
    plt.close(figure)
    return paths


def pareto(table: pd.DataFrame, x: Axis, *, y: Axis, size: Axis | None, by: str) -> Figure:
    """Every point of every scenario, one panel each; members of the front stand out.

    by: the column that colours and marks points; size: a third objective as area.
    """
    scenarios = list(table["scenario"].unique())
    colours = _palette([str(name) for name in table[by].unique()])
    areas = table[size.column] / (float(table[size.column].abs().max()) or 1.0) if size else 0.2
    table = table.assign(area=areas)
    figure, panels = _panels(len(scenarios), width=3.5, height=3.1)
    for panel, scenario in zip(panels, scenarios, strict=False):
        points = table[(table["scenario"] == scenario) & (table["status"] == "ok")]
        _scatter(panel, points, (x, y, "area"), by=by, colours=colours)
        _scale(panel, points[y.column] * y.factor)
        panel.set_title(scenario, fontsize=10, fontweight="bold")
    figure.supxlabel(x.label)
    figure.supylabel(y.label)
    area = f"; area: {size.label}" if size else ""
    _legend(figure, colours, title=f"{by.removesuffix('.name')}; outlined: on the Pareto front{area}")
    return figure


def _scale(panel: Axes, values: pd.Series[Any]) -> None:
    """A logarithmic y axis where values span a decade and none is negative."""
    positive = values[values > 0]
    if (values < 0).any() or positive.empty or positive.max() < 10 * positive.min():
        return
    if (values == 0).any():
        _zero_and_decades(panel, float(positive.min()))
    else:
        panel.set_yscale("log")


def _zero_and_decades(panel: Axes, smallest: float) -> None:
    """A logarithmic axis that shows zero as well, a little above its lower end."""
    if smallest > 0:
        panel.set_yscale("symlog", linthresh=smallest / 2, linscale=0.4)
        panel.set_ylim(bottom=-smallest / 8)


def _scatter(
    panel: Axes,
    points: pd.DataFrame,
    axes: tuple[Axis, Axis, str],
    *,
    by: str,
    colours: Mapping[str, Any],
) -> None:
    x, y, area = axes
    for index, (name, colour) in enumerate(colours.items()):
        chosen = points[points[by].astype(str) == name]
        for on_front, group in chosen.groupby("on_front"):
            panel.scatter(
                group[x.column] * x.factor,
                group[y.column] * y.factor,
                s=14 + 90 * group[area],
                color=colour,
                marker=_MARKERS[index % len(_MARKERS)],
                alpha=0.95 if on_front else 0.25,
                edgecolors="black" if on_front else "none",
                linewidths=0.9,
                zorder=3 if on_front else 2,
                rasterized=len(group) > _MOST_DRAWN,
            )


def bars(table: pd.DataFrame, value: Axis, *, by: str, ideal: str, baseline: str) -> Figure:
    """The best value of each group of `by` in each scenario, the ideal as a dash, the baseline as a line at 1."""
    best = table[table["status"] == "ok"].groupby(["scenario", by], sort=False)[value.column].max().unstack(sort=False)
    best = best.loc[list(table["scenario"].unique())]
    colours = _palette([str(name) for name in best.columns])
    figure, panel = _figure(max(8.0, 0.95 * len(best) + 2.5), 4.6)
    width = 0.82 / len(best.columns)
    places = np.arange(len(best))
    for index, name in enumerate(best.columns):
        offset = (index - (len(best.columns) - 1) / 2) * width
        panel.bar(places + offset, best[name] * value.factor, width, color=colours[str(name)], label=str(name))
    top = table.groupby("scenario", sort=False)[ideal].max().loc[list(best.index)]
    panel.hlines(top, places - 0.44, places + 0.44, color="black", linewidth=1.6, label="ideal")
    panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label=f"baseline: {baseline}")
    panel.set_xticks(places, list(best.index))
    panel.set_ylabel(value.label)
    panel.margins(x=0.01)
    panel.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.09), frameon=False)
    return figure


def timeline(intervals: pd.DataFrame, title: str) -> Figure:
    """When each lane was busy with what: one row per lane, colour by kind of task."""
    lanes = sorted(intervals["lane"].unique(), key=_lane_order)
    figure, panel = _figure(9.5, 1.5 + 0.3 * len(lanes))
    unit, label = (1e3, "ms") if intervals["finish_s"].max() >= 1e-3 else (1e6, "µs")
    for kind, group in intervals.groupby("kind", sort=False):
        rows = [lanes.index(lane) for lane in group["lane"]]
        panel.barh(
            rows,
            (group["finish_s"] - group["start_s"]) * unit,
            left=group["start_s"] * unit,
            height=0.72,
            color=_KIND_COLOURS.get(str(kind), "#029e73"),
            edgecolor="white",
            linewidth=0.6,
            label={"gemm": "GEMM", "transfer": "data arrives"}.get(str(kind), str(kind)),
        )
    panel.set_yticks(range(len(lanes)), lanes, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel(f"time [{label}]")
    panel.set_xlim(0, intervals["finish_s"].max() * unit * 1.005)
    panel.set_title(title, fontsize=10, loc="left")
    panel.grid(axis="y", visible=False)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _lane_order(lane: str) -> tuple[int, int, str]:
    number = lane.rpartition(".")[2]
    return (0 if lane == "compute" else 1, int(number) if number.isdigit() else 0, lane)


def _palette(names: Sequence[str]) -> dict[str, Any]:
    import seaborn as sns

    return dict(zip(names, sns.color_palette("colorblind", max(len(names), 1)), strict=True))


def _theme() -> None:
    import matplotlib as mpl
    import seaborn as sns

    mpl.use("Agg")
    sns.set_theme(style="whitegrid", context="paper", rc={"svg.hashsalt": "dse", "figure.constrained_layout.use": True})


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    import matplotlib.pyplot as plt

    _theme()
    figure, panel = plt.subplots(figsize=(width, height))
    return figure, panel


def _panels(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    import matplotlib.pyplot as plt

    _theme()
    columns = min(4, count)
    rows = -(-count // columns)
    size = (max(5.0, width * columns), height * rows + 0.8)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def _legend(figure: Figure, colours: Mapping[str, Any], *, title: str) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=_MARKERS[index % len(_MARKERS)], linestyle="", label=name)
        for index, (name, colour) in enumerate(colours.items())
    ]
    columns = max(1, min(len(handles), int(figure.get_figwidth() / 1.7)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, title=title, fontsize=9)
