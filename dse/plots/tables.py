"""Figures of tables: stacked parts, heat maps, curves, rooflines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from dse.plots import MARKERS, Axis, legend, palette, panels_of

_DECADES = 300.0  # ratio of the largest to the least value from which on a heat map is logarithmic

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def stacks(rows: pd.DataFrame, parts: Sequence[Axis], *, panel: str, bar: str, label: str) -> Figure:
    """Plot stacked bars, negative parts below zero: a panel for each `panel`, a bar for each `bar`.

    rows: one for each bar; parts: the columns to stack. label: name of their sum, with its unit.
    """
    panels, bars = list(rows[panel].unique()), list(rows[bar].unique())
    colours = palette([part.label for part in parts])
    figure, axes_list = panels_of(len(panels), width=3.6, height=0.9 + 0.3 * len(bars))
    places = np.arange(len(bars))
    for number, (axes, name) in enumerate(zip(axes_list, panels, strict=False)):
        panel_rows = rows[rows[panel] == name].set_index(bar).reindex(bars)
        above, below = np.zeros(len(bars)), np.zeros(len(bars))
        for part in parts:
            value = panel_rows[part.column].fillna(0.0).to_numpy(float) * part.factor
            start = np.where(value >= 0, above, below)
            axes.barh(places, value, left=start, height=0.74, color=colours[part.label])
            above, below = above + np.maximum(value, 0.0), below + np.minimum(value, 0.0)
        axes.set_yticks(
            places, [str(bar_name) for bar_name in bars] if number % 4 == 0 else [""] * len(bars), fontsize=8
        )
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.axvline(0.0, color="black", lw=0.6)
        axes.grid(axis="y", visible=False)
        axes.set_title(str(name), fontsize=9.5, fontweight="bold")
    figure.supxlabel(label, fontsize=10)
    legend(figure, colours, title="")
    return figure


def bars(rows: pd.DataFrame, value: Axis, *, x: str, by: str, panel: str) -> Figure:
    """Plot a bar for each `by` in each `x`, a panel for each `panel`; the column `ideal` as a dash, 1 as a line."""
    panels, xs = list(rows[panel].unique()), list(rows[x].unique())
    colours = palette([str(name) for name in rows[by].unique()])
    figure, axes_list = panels_of(len(panels), width=1.0 + 0.62 * len(xs), height=2.7)
    width = 0.84 / len(colours)
    for axes, name in zip(axes_list, panels, strict=False):
        panel_rows = rows[rows[panel] == name]
        for index, (group, colour) in enumerate(colours.items()):
            group_rows = panel_rows[panel_rows[by].astype(str) == group]
            values = group_rows.groupby(x)[value.column].max().reindex(xs) * value.factor
            axes.bar(np.arange(len(xs)) + (index - (len(colours) - 1) / 2) * width, values, width, color=colour)
        top = panel_rows.groupby(x)["ideal"].max().reindex(xs)
        axes.hlines(top, np.arange(len(xs)) - 0.44, np.arange(len(xs)) + 0.44, color="black", lw=1.5)
        axes.axhline(1.0, color="black", lw=0.8, ls=":")
        axes.set_xticks(range(len(xs)), [str(label) for label in xs], fontsize=7.5, rotation=30, ha="right")
        axes.grid(axis="x", visible=False)
        axes.set_title(str(name), fontsize=9.5, fontweight="bold")
    figure.supylabel(value.label, fontsize=10)
    legend(figure, colours, title="dash: ideal; dotted: baseline")
    return figure


def heat(rows: pd.DataFrame, value: Axis, *, x: str, y: str, panel: str) -> Figure:
    """Plot an annotated heat map over two columns, a panel for each `panel`. Only numbers in `x` are sorted."""
    panels, xs, ys = (list(rows[name].unique()) for name in (panel, x, y))
    xs = xs if rows[x].dtype == object else sorted(xs)
    span = rows[value.column] * value.factor
    low, high = float(span.min()), float(np.nanquantile(span, 0.98))
    wide = low > 0 and high > _DECADES * low  # shades by the logarithm
    scale = np.log if wide else np.asarray
    figure, axes_list = panels_of(len(panels), width=1.6 + 0.62 * len(xs), height=0.9 + 0.26 * len(ys))
    for number, (axes, name) in enumerate(zip(axes_list, panels, strict=False)):
        cells = rows[rows[panel] == name].pivot_table(index=y, columns=x, values=value.column, sort=False)
        cells = cells.reindex(index=ys, columns=xs).dropna(axis=1, how="all") * value.factor
        ends = float(scale(low)), float(scale(high))
        axes.imshow(scale(cells.to_numpy(float)), aspect="auto", cmap="viridis", vmin=ends[0], vmax=ends[1])
        for (row, column), cell in np.ndenumerate(cells.to_numpy(float)):
            light = scale(cell) < ends[0] + 0.6 * (ends[1] - ends[0])
            if not np.isnan(cell):
                axes.text(
                    column, row, f"{cell:.2f}", ha="center", va="center", fontsize=6.5, color="w" if light else "k"
                )
        axes.set_xticks(
            range(cells.shape[1]), [f"{label:g}" if isinstance(label, float) else str(label) for label in cells.columns]
        )
        axes.set_yticks(range(len(ys)), [str(label) for label in ys] if number % 4 == 0 else [""] * len(ys), fontsize=8)
        axes.grid(visible=False)
        axes.set_title(str(name), fontsize=9.5, fontweight="bold")
    figure.supxlabel(f"{x}; in the fields: {value.label}", fontsize=10)
    return figure


def raster(
    panels: Mapping[str, NDArray[np.float64]],
    seconds: Mapping[str, float],
    *,
    lane: str,
    label: str,
    marks: Mapping[str, Sequence[float]],
) -> Figure:
    """Plot shares over time (to the right) and lanes (downwards) as shades from 0 to 1: a panel per [bins, lanes].

    seconds: length of a bin, by panel. lane, label: names of lanes and shades. marks: times [s] of lines, by panel.
    """
    figure, axes_list = panels_of(len(panels), width=4.4, height=2.5)
    for axes, (name, shares) in zip(axes_list, panels.items(), strict=False):
        bins, lanes = shares.shape
        unit, factor = next(entry for entry in _TIMES if bins * seconds[name] * entry[1] >= 1 or entry is _TIMES[-1])
        extent = (0.0, bins * seconds[name] * factor, lanes - 0.5, -0.5)
        looks: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis"}
        image = axes.imshow(shares.T, vmin=0.0, vmax=1.0, extent=extent, **looks)
        for mark in marks.get(name, ()):
            axes.axvline(mark * factor, color="white", lw=0.9, ls=":")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(visible=False)
        axes.set_title(name, fontsize=9.5, fontweight="bold")
        axes.set_xlabel(f"time [{unit}]", fontsize=8.5)
    figure.colorbar(image, ax=list(axes_list), label=label, shrink=0.9, pad=0.01)
    figure.supylabel(lane, fontsize=10)
    return figure


_TIMES = (("s", 1.0), ("ms", 1e3), ("us", 1e6))


def roofline(rows: pd.DataFrame, roof: tuple[float, float], *, by: str, size: Axis, title: str) -> Figure:
    """Plot the intensity and rate of operators under the roofline of a device.

    rows: `intensity` [FLOP/B], `rate` [FLOP/s], the column `by` for colour and marker, and `size`, as area. roof: peak
    rate [FLOP/s] and bandwidth [bytes/s].
    """
    peak, bandwidth = roof
    colours = palette([str(name) for name in rows[by].unique()])
    figure, (axes, *_) = panels_of(1, width=7.5, height=4.2)
    low, high = 0.5 * float(rows["intensity"].min()), 2 * max(float(rows["intensity"].max()), peak / bandwidth)
    line = np.geomspace(low, high, 200)
    axes.plot(line, np.minimum(peak, bandwidth * line) / 1e12, color="black", lw=1.2)
    largest = float(rows[size.column].max())
    for index, (name, colour) in enumerate(colours.items()):
        group = rows[rows[by].astype(str) == name]
        looks: dict[str, Any] = {"color": colour, "marker": MARKERS[index % len(MARKERS)], "alpha": 0.7, "lw": 0.5}
        areas = 14 + 300 * group[size.column] / largest
        axes.scatter(group["intensity"], group["rate"] / 1e12, s=areas, edgecolors="black", **looks)
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_title(title, fontsize=9.5, fontweight="bold")
    figure.supxlabel("arithmetic intensity [FLOP/B]", fontsize=10)
    figure.supylabel("rate [TFLOP/s]", fontsize=10)
    legend(figure, colours, title=f"line: the roofline; area: {size.label}")
    return figure


def marked_lines(rows: pd.DataFrame, x: Axis, *, y: Axis, weight: Axis, panel: str) -> Figure:
    """Plot a line over x in each `panel`, with a mark of area `weight` at the rows that have one."""
    panels = list(rows[panel].unique())
    colours = palette(["all", "marked"])
    figure, axes_list = panels_of(len(panels), width=4.0, height=3.2)
    for axes, name in zip(axes_list, panels, strict=False):
        panel_rows = rows[rows[panel] == name].sort_values(x.column)
        axes.plot(panel_rows[x.column] * x.factor, panel_rows[y.column] * y.factor, lw=1.3, color=colours["all"])
        marked = panel_rows.dropna(subset=[weight.column])
        areas = 20 + 200 * marked[weight.column] / float(marked[weight.column].max())
        looks: dict[str, Any] = {
            "color": colours["marked"],
            "alpha": 0.7,
            "edgecolors": "black",
            "lw": 0.5,
            "zorder": 3,
        }
        axes.scatter(marked[x.column] * x.factor, marked[y.column] * y.factor, s=areas, **looks)
        axes.set_title(str(name), fontsize=9.5, fontweight="bold")
    figure.supxlabel(f"{x.label}; area of a mark: {weight.label}", fontsize=10)
    figure.supylabel(y.label, fontsize=10)
    return figure


def curves(rows: pd.DataFrame, x: Axis, *, y: Axis, by: str, panel: str) -> Figure:
    """Plot a line over x for each `by`, a panel for each `panel`; a column `measured` is drawn as marks."""
    panels, marks = list(rows[panel].unique()), "measured" in rows
    colours = palette([str(name) for name in rows[by].unique()])
    figure, axes_list = panels_of(len(panels), width=4.0, height=3.2)
    for axes, name in zip(axes_list, panels, strict=False):
        for index, (group, colour) in enumerate(colours.items()):
            line = rows[(rows[panel] == name) & (rows[by].astype(str) == group)].sort_values(x.column)
            looks: dict[str, Any] = {"color": colour, "marker": MARKERS[index % len(MARKERS)], "ms": 4.5}
            xs = line[x.column] * x.factor
            axes.plot(xs, line[y.column] * y.factor, lw=1.3, **({"color": colour} if marks else looks))
            if marks:
                axes.plot(xs, line["measured"] * y.factor, ls="", **looks)
        positive = rows[x.column][rows[x.column] > 0]
        if len(positive) == len(rows) and positive.max() > 15 * positive.min():
            axes.set_xscale("log", base=2)
        elif (rows[x.column] % 1 == 0).all():
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(str(name), fontsize=9.5, fontweight="bold")
    figure.supxlabel(x.label, fontsize=10)
    figure.supylabel(y.label, fontsize=10)
    legend(figure, colours, title=f"{by.rpartition('.')[2]}" + ("; marks: measured, lines: predicted" if marks else ""))
    return figure
