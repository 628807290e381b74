"""Figures of searches: how near they come to a known front with how many points, and two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.plots.canvas import (
    FigureSheet,
    Frame,
    handles_of,
    mark_handle,
    name_rows,
    plain_ticks,
    row_inches,
    sheet,
)
from dse.plots.fronts import zero_and_decades
from dse.plots.labels import DIVERGING, Axis, Scale, SeriesStyle, diverging, looks, marker_of, scale

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_BOOTSTRAPS = 1000
_DECADES = 5  # of a logarithmic axis of misses; smaller values are rounding
_SIDES = (DIVERGING[0], DIVERGING[-1])
Curve = tuple[Any, Any]


def _median_with_interval(chosen: Mapping[str, SeriesStyle]) -> dict[str, Any]:
    """Settings with which seaborn draws medians with their 95 % bootstrap intervals, in the looks of names."""
    looks = {"palette": {name: look.colour for name, look in chosen.items()}, "legend": False}
    return {**looks, "estimator": "median", "errorbar": ("ci", 95), "n_boot": _BOOTSTRAPS, "seed": 0}


def progress(table: pd.DataFrame, x: Axis, *, y: Axis, by: str, frame: Frame) -> FigureSheet:
    """Plot medians of y over the rows of each `share`, a line for each group of `by`, a panel for each scenario; the
    band is the 95 % bootstrap interval of the median. Where x differs from row to row, it is the median of each share.
    """
    import seaborn as sns

    groups, note = Frame(frame.title, frame.note, "scenario").panels(table, y.column)
    chosen = looks(table[by].unique())
    units = scale(x, table[x.column], logarithmic=True), scale(y, table[y.column])
    columns = 4 if len(groups) > 6 else min(3, len(groups))
    drawn = sheet(len(groups), Frame(frame.title, note), height=1.35, columns=columns)
    for place, (panel, (name, group)) in enumerate(zip(drawn.panels, groups.items(), strict=True)):
        typical = group.groupby([by, "share"], sort=False)[x.column].transform("median") * units[0].factor
        rows = group.assign(x=typical, y=group[y.column] * units[1].factor, **{by: group[by].astype(str)})
        marks = {"markers": {name: look.marker for name, look in chosen.items()}, "dashes": False, "ms": 2.8, "mew": 0}
        lines = {"x": "x", "y": "y", "hue": by, "style": by, "lw": 1.0, **_median_with_interval(chosen)}
        sns.lineplot(rows, **lines, **marks, ax=panel)
        panel.set(xlabel="", ylabel="")
        panel.set_xscale("log")
        values = group[y.column] * units[1].factor
        smallest, largest = values[values > 0].min(), values.max()
        zero_and_decades(panel, max(float(smallest), 10.0**-_DECADES * float(largest)))
        plain_ticks(panel.xaxis, units[0], values=group[x.column] * units[0].factor)
        _decade_ticks(panel, units[1])
        drawn.name(place, name)
    drawn.xlabel, drawn.ylabel = units[0].title, units[1].title
    drawn.legend(handles_of(chosen, style="line"))
    return drawn


def _decade_ticks(panel: Axes, unit: Scale) -> None:
    """Set ticks at zero and at most four powers of ten, from the largest down."""
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = panel.get_ylim()
    smallest = -8 * low if panel.get_yscale() == "symlog" else 0.0  # what the axis is linear below, doubled
    decades = [10.0**power for power in range(9, -10, -1) if 2 * smallest <= 10.0**power <= high]
    places = [0.0, *decades[:: -(-len(decades) // 4) or 1]]
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(FixedLocator(sorted(places)))
    panel.yaxis.set_major_formatter(lambda place, _: unit.tick(place))


def medians(table: pd.DataFrame, value: Axis, *, by: str, least: str, frame: Frame) -> FigureSheet:
    """Plot the median of a value for each group of `by`, a panel for each scenario, with its 95 % bootstrap interval.

    least: column of flags, true if the value of a row is only a lower bound; a median that is a lower bound is an
    arrow to the right.
    """
    import seaborn as sns

    groups, note = Frame(frame.title, frame.note, "scenario").panels(table, value.column)
    chosen = looks(table[by].unique())
    columns = 4 if len(groups) > 6 else min(3, len(groups))
    height = row_inches(1.1) * len(chosen)
    drawn = sheet(len(groups), Frame(frame.title, note), height=height, columns=columns)
    unit = scale(value, table[value.column])
    for place, ((first, _, panel), (name, group)) in enumerate(zip(drawn.rows(), groups.items(), strict=True)):
        rows = group.assign(value=group[value.column] * unit.factor, **{by: group[by].astype(str)})
        bounds = rows.groupby(by)[least].mean() >= 0.5
        marks = [">" if bounds.get(name, False) else look.marker for name, look in chosen.items()]
        order = {"order": list(chosen), "hue_order": list(chosen), "markers": marks, "ms": 4, "mew": 0, "lw": 1.2}
        sns.pointplot(rows, x="value", y=by, hue=by, ls="", **order, **_median_with_interval(chosen), ax=panel)
        panel.set(xlabel="", ylabel="")
        name_rows(panel, [look.label for look in chosen.values()], labelled=first)
        panel.set_xscale("log")
        plain_ticks(panel.xaxis, unit)
        drawn.name(place, name)
    drawn.xlabel = unit.title
    drawn.legend([mark_handle("not reached: at least", marker=">")])
    return drawn


def hypervolumes(
    curves: Mapping[str, tuple[Curve, Curve]], names: tuple[str, str], methods: Sequence[str]
) -> FigureSheet:
    """Plot the hypervolume of two runs, A and B: over evaluated points, and at the end for each scenario.

    curves: scenario -> of each run (points evaluated [steps], hypervolume [steps]), a share of the box in [0, 1]. The
    thick line is the mean over scenarios, and ends with the shortest of them.
    """
    ends = {name: (float(first[1][-1]), float(second[1][-1])) for name, (first, second) in curves.items()}
    ahead = (
        sum(first > second for first, second in ends.values()),
        sum(first < second for first, second in ends.values()),
    )
    title = f"A ends with the larger hypervolume in {ahead[0]}, B in {ahead[1]} of {len(ends)} scenarios"
    note = "left: over points evaluated, thin a scenario, thick the mean; right: at the end"
    drawn = sheet(2, Frame(title, note), height=max(1.9, row_inches(1.15) * len(curves)), columns=2)
    left, right = drawn.panels
    for side in (0, 1):
        run_curves = [both[side] for both in curves.values()]
        for steps, reached in run_curves:
            left.step(steps, reached, where="post", color=_SIDES[side], lw=0.6, alpha=0.3)
        left.step(*_mean_curve(run_curves), where="post", color=_SIDES[side], lw=2.0, ls=("-", "--")[side])
        marks: dict[str, Any] = {"color": _SIDES[side], "marker": "os"[side], "ms": (5.5, 3.5)[side], "mew": 0}
        right.plot([pair[side] for pair in ends.values()], range(len(ends)), ls="", zorder=3 + side, **marks)
    right.hlines(range(len(ends)), *zip(*map(sorted, ends.values()), strict=True), color="#8c8c8c", lw=0.8)
    name_rows(right, list(ends), labelled=True)
    left.set_xscale("log")
    plain_ticks(left.xaxis, Scale(1.0, "", "points"))
    plain_ticks(left.yaxis, Scale(1.0, "", "hypervolume"))
    plain_ticks(right.xaxis, Scale(1.0, "", "hypervolume"))
    left.set_xlabel("points evaluated")
    left.set_ylabel("hypervolume [share of the box]")
    right.set_xlabel("hypervolume [share of the box]")
    drawn.legend(
        [
            mark_handle(
                f"{'AB'[side]}: {names[side]} ({methods[side]})",
                color=_SIDES[side],
                marker="os"[side],
                ls=("-", "--")[side],
            )
            for side in (0, 1)
        ]
    )
    return drawn


def _mean_curve(run_curves: Sequence[Curve]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Mean of step curves, up to the end of the shortest."""
    steps = np.unique(np.concatenate([at for at, _ in run_curves]))
    steps = steps[steps <= min(at[-1] for at, _ in run_curves)]
    return steps, np.mean([reached[np.searchsorted(at, steps, side="right") - 1] for at, reached in run_curves], axis=0)


def attainment(rectangles: Any, names: tuple[str, str], objectives: Sequence[str]) -> FigureSheet:
    """Plot the difference of the empirical attainment functions of two runs, over two scaled objectives.

    rectangles [R, 5]: x and y from, x and y to, in scaled objectives (0: best, 1: worst of both fronts), and the share
    of scenarios in which only one run attains the rectangle, positive for A.
    """
    from matplotlib.patches import Rectangle

    areas = [(min(right, 1.1) - x) * (min(top, 1.1) - y) * share for x, y, right, top, share in rectangles]
    gains = sum(area for area in areas if area > 0), -sum(area for area in areas if area < 0)
    title = (
        f"A alone attains {100 * gains[0] / 1.21:.1f} %, B alone {100 * gains[1] / 1.21:.1f} % of the objectives' plane"
    )
    drawn = sheet(1, Frame(title, f"A: {names[0]}; B: {names[1]}; shades: share of scenarios"), height=3.4)
    (panel,) = drawn.panels
    for x, y, right, top, share in rectangles:
        size = min(right, 1.1) - x, min(top, 1.1) - y
        panel.add_patch(Rectangle((x, y), *size, facecolor=diverging(-share), lw=0))
    panel.set(xlim=(-0.02, 1.1), ylim=(-0.02, 1.1))
    for axis in (panel.xaxis, panel.yaxis):
        plain_ticks(axis, Scale(1.0, "", ""))
    drawn.xlabel, drawn.ylabel = (f"{name} [0: best, 1: worst of both fronts]" for name in objectives[:2])
    shares = {
        "A alone, all": 1.0,
        "A alone, half": 0.5,
        "both or none": 0.0,
        "B alone, half": -0.5,
        "B alone, all": -1.0,
    }
    shades = {name: SeriesStyle(name, diverging(-share), marker_of(0)) for name, share in shares.items()}
    drawn.legend(handles_of(shades, style="patch"))
    return drawn
