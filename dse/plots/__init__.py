"""Figures: only this package draws. Every function takes a table and returns a matplotlib figure.

All figures use the same colour-blind safe colours in the same order, with a marker for each, and label axes with units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse import plugins
from dse.files import atomic_replacement, path_inside

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure  # studies name it, and import no matplotlib

_MOST_DRAWN = 5_000  # vector points in an SVG; more are rasterized
_SMALLEST_ERROR = 1e-3  # that an axis of errors scales to
MARKERS = "osD^vPX*<>h8"


@dataclass(frozen=True)
class Axis:
    """A column of the table, with the label and the factor from SI of its axis."""

    column: str
    label: str
    factor: float = 1.0


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `<name>.png` and `<name>.svg`, reproducible to the byte. Returns their paths."""
    import matplotlib.pyplot as plt

    paths = [path_inside(folder, f"{name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with atomic_replacement(path) as fresh:
            figure.savefig(fresh, dpi=140, metadata=metadata, format=path.suffix[1:])
        figure.set_layout_engine("none")  # the layout is solved once for both
    plt.close(figure)
    return paths


def discard(figure: Figure) -> list[Path]:
    """Close a figure that is not written; no paths."""
    import matplotlib.pyplot as plt

    plt.close(figure)
    return []


def pareto(table: pd.DataFrame, x: Axis, *, y: Axis, size: Axis | None, by: str) -> Figure:
    """Plot the points of every scenario, one panel each, with the front highlighted.

    by: column for colour and marker; size: a third objective as area.
    """
    scenarios = list(table["scenario"].unique())
    colours = palette([str(name) for name in table[by].unique()])
    areas = table[size.column] / (float(table[size.column].abs().max()) or 1.0) if size else 0.2
    table = table.assign(area=areas)
    figure, panels = panels_of(len(scenarios), width=3.5, height=3.1)
    for panel, scenario in zip(panels, scenarios, strict=False):
        points = table[(table["scenario"] == scenario) & (table["status"] == "ok")]
        _scatter(panel, points, (x, y, "area"), by=by, colours=colours)
        _scale(panel, points[y.column] * y.factor)
        panel.set_title(scenario, fontsize=10, fontweight="bold")
    figure.supxlabel(x.label)
    figure.supylabel(y.label)
    area = f"; area: {size.label}" if size else ""
    legend(figure, colours, title=f"{by.removesuffix('.name')}; outlined: on the Pareto front{area}")
    return figure


def _scale(panel: Axes, values: pd.Series[Any]) -> None:
    """Set a logarithmic y axis if values span a decade and none is negative."""
    positive = values[values > 0]
    if (values < 0).any() or positive.empty or positive.max() < 10 * positive.min():
        return
    if (values == 0).any():
        zero_and_decades(panel, float(positive.min()))
    else:
        panel.set_yscale("log")


def zero_and_decades(panel: Axes, smallest: float) -> None:
    """Set a logarithmic y axis that includes zero, a little above its lower end."""
    if smallest > 0:
        panel.set_yscale("symlog", linthresh=smallest / 2, linscale=0.8)
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
                marker=MARKERS[index % len(MARKERS)],
                alpha=0.95 if on_front else 0.25,
                edgecolors="black" if on_front else "none",
                linewidths=0.9,
                zorder=3 if on_front else 2,
                rasterized=len(group) > _MOST_DRAWN,
            )


def bars(table: pd.DataFrame, value: Axis, *, by: str, ideal: str, baseline: str) -> Figure:
    """Plot the best value of each group of `by` in each scenario, the ideal as a dash, the baseline as a line at 1."""
    best = table[table["status"] == "ok"].groupby(["scenario", by], sort=False)[value.column].max().unstack(sort=False)
    best = best.loc[list(table["scenario"].unique())]
    colours = palette([str(name) for name in best.columns])
    figure, panel = single_panel(max(8.0, 0.95 * len(best) + 2.5), 4.6)
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


def agreement(both: pd.DataFrame, axes: Sequence[Axis], *, by: str, names: tuple[str, str]) -> Figure:
    """Plot two levels of fidelity for each objective: finer against coarser, and below the error of the coarser one.

    both: a row for each point; columns of the finer level end in `.fine`, errors (shares) in `.error`. names: of the
    coarser and the finer level.
    """
    import matplotlib.pyplot as plt

    set_theme()
    groups = [str(name) for name in both[by].unique()]
    colours = palette(groups)
    size = (max(5.0, 4.3 * len(axes)), 4.4 + 2.2 + 0.24 * len(groups))
    figure, grid = plt.subplots(2, len(axes), figsize=size, squeeze=False, height_ratios=(4, 1.4 + 0.24 * len(groups)))
    for above, below, axis in zip(*grid, axes, strict=True):
        _one_against_other(above, both, axis, by=by, colours=colours)
        above.set_xlabel(f"{names[0]}: {axis.label}", fontsize=9)
        above.set_ylabel(f"{names[1]}: {axis.label}", fontsize=9)
        _error_strips(below, both, axis, by=by, colours=colours)
        below.set_xlabel(f"{axis.column}: error of {names[0]} [%]", fontsize=9)
        if below is not grid[1][0]:
            below.set_yticklabels([])
    title = f"{by.removesuffix('.name')}; filled: promoted, hollow: random sample; bar: median of both"
    title += f"; error: over {names[1]}, less one"
    legend(figure, colours, title=title)
    return figure


def _one_against_other(panel: Axes, both: pd.DataFrame, axis: Axis, *, by: str, colours: Mapping[str, Any]) -> None:
    """Plot the points of both levels around the diagonal, on logarithmic axes without values of zero or below."""
    fine = f"{axis.column}.fine"
    shown = both[(both[axis.column] > 0) & (both[fine] > 0)]
    num_left_out = len(both) - len(shown)
    for index, (name, colour) in enumerate(colours.items()):
        group = shown[shown[by].astype(str) == name]
        drawn = group["promoted"] == "sample"
        for part, filled in ((group[drawn], False), (group[~drawn], True)):
            panel.scatter(
                part[axis.column] * axis.factor,
                part[fine] * axis.factor,
                s=20,
                marker=MARKERS[index % len(MARKERS)],
                facecolors=[colour] if filled else "none",
                edgecolors=[colour],
                alpha=0.7,
                linewidths=0.8,
            )
    if len(shown):
        ends = [
            shown[[axis.column, fine]].min().min() * axis.factor,
            shown[[axis.column, fine]].max().max() * axis.factor,
        ]
        panel.plot(ends, ends, color="black", linewidth=0.8, zorder=0)
        panel.set_xscale("log")
        panel.set_yscale("log")
    if num_left_out:
        panel.set_title(f"{num_left_out} of {len(both)} points have a zero and are left out", fontsize=8, loc="left")


def _error_strips(panel: Axes, both: pd.DataFrame, axis: Axis, *, by: str, colours: Mapping[str, Any]) -> None:
    """Plot the signed errors of each group, side by side, and their median."""
    random = np.random.default_rng(0)
    for place, (name, colour) in enumerate(colours.items()):
        group = both[both[by].astype(str) == name]
        error = 100 * group[f"{axis.column}.error"]
        heights = place + random.uniform(-0.28, 0.28, len(group))
        drawn = (group["promoted"] == "sample").to_numpy()
        for chosen, face in ((drawn, "none"), (~drawn, [colour])):
            panel.scatter(error[chosen], heights[chosen], s=12, facecolors=face, edgecolors=[colour], linewidths=0.7)
        if error.notna().any():
            panel.vlines(error.median(), place - 0.42, place + 0.42, color="black", linewidth=2.0, zorder=4)
    panel.axvline(0.0, color="black", linewidth=0.8, zorder=0)
    if (both[f"{axis.column}.error"].abs().fillna(0.0) < _SMALLEST_ERROR).all():
        panel.set_xlim(-100 * _SMALLEST_ERROR, 100 * _SMALLEST_ERROR)
    panel.set_yticks(range(len(colours)), list(colours), fontsize=8)
    panel.set_ylim(len(colours) - 0.4, -0.6)
    panel.grid(axis="y", visible=False)


def timeline(intervals: pd.DataFrame, title: str) -> Figure:
    """Gantt chart: one row per lane, a bar per task, colour by kind of task."""
    lanes = sorted(intervals["lane"].unique(), key=_lane_order)
    figure, panel = single_panel(9.5, 1.5 + 0.3 * len(lanes))
    unit, label = (1e3, "ms") if intervals["finish_s"].max() >= 1e-3 else (1e6, "µs")
    kinds = plugins.declarations("TASK_KINDS")
    for kind, group in intervals.groupby("kind", sort=False):
        name, colour = kinds.get(str(kind), (str(kind), "#029e73"))
        rows = [lanes.index(lane) for lane in group["lane"]]
        panel.barh(
            rows,
            (group["finish_s"] - group["start_s"]) * unit,
            left=group["start_s"] * unit,
            height=0.72,
            color=colour,
            edgecolor="white",
            linewidth=0.6,
            label=name,
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


def palette(names: Sequence[str]) -> dict[str, Any]:
    """Assign a colour to each name, in the order common to all figures."""
    import seaborn as sns

    return dict(zip(names, sns.color_palette("colorblind", max(len(names), 1)), strict=True))


def set_theme() -> None:
    """Set the style of all figures."""
    import matplotlib as mpl
    import seaborn as sns

    mpl.use("Agg")
    sns.set_theme(style="whitegrid", context="paper", rc={"svg.hashsalt": "dse", "figure.constrained_layout.use": True})


def single_panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure [inches] of one panel."""
    import matplotlib.pyplot as plt

    set_theme()
    figure, panel = plt.subplots(figsize=(width, height))
    return figure, panel


def panels_of(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure of `count` panels, at most four in a row; width and height of one panel [inch]."""
    import matplotlib.pyplot as plt

    set_theme()
    columns = min(4, count)
    rows = -(-count // columns)
    size = (max(5.0, width * columns), height * rows + 0.8)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def legend(figure: Figure, colours: Mapping[str, Any], *, title: str) -> None:
    """Add the legend of colours and markers above a figure."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=MARKERS[index % len(MARKERS)], linestyle="", label=name)
        for index, (name, colour) in enumerate(colours.items())
    ]
    columns = max(1, min(len(handles), int(figure.get_figwidth() / 1.7)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, title=title, fontsize=9)
