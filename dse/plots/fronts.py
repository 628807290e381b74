"""Figures of objectives: Pareto fronts, and how far two levels of the model agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots.canvas import (
    FigureSheet,
    Frame,
    ValueAxis,
    handles_of,
    mark_handle,
    name_rows,
    plain_ticks,
    row_inches,
    sheet,
)
from dse.plots.labels import INK, Axis, Scale, SeriesStyle, looks, scale

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_MOST_VECTORS = 2_000  # points of a group in an SVG or PDF; more are rasterized
_SMALLEST_ERROR = 1e-3  # that an axis of errors scales to
_DECADE = 10.0


def pareto(table: pd.DataFrame, axes: Sequence[Axis], *, by: str, frame: Frame) -> FigureSheet:
    """Plot the points of every scenario, one panel each, with the front highlighted.

    axes: x, y and, if there is a third, area. by: column for colour and marker.
    """
    points = _with_names(table[table["status"] == "ok"], by)
    x, y = axes[:2]
    groups, note = Frame(frame.title, frame.note, frame.panel or "scenario").panels(points, x.column)
    chosen = looks(points[by].unique())
    few = {1: (1, 2.4), 2: (2, 1.9), 3: (3, 1.6)}.get(len(groups), (4, 1.15))
    drawn = sheet(len(groups), Frame(frame.title, note), height=few[1], columns=few[0])
    decades = _decades(points[y.column])
    units = scale(x, points[x.column]), scale(y, points[y.column], logarithmic=decades)
    area = points[axes[2].column].abs() if len(axes) > 2 else points[x.column] * 0.0
    largest = float(area.max()) or 1.0
    for place, (panel, (name, group)) in enumerate(zip(drawn.panels, groups.items(), strict=True)):
        sizes = 4 + 30 * area.reindex(group.index) / largest if len(axes) > 2 else 10.0
        _clouds(panel, group.assign(area=sizes), (x, y), units=units, by=(by, chosen))
        _decade_axis(panel, group[y.column] * units[1].factor)
        plain_ticks(panel.xaxis, units[0])
        plain_ticks(panel.yaxis, units[1])
        drawn.name(place, name)
    drawn.xlabel, drawn.ylabel = units[0].title, units[1].title
    drawn.axes = {x.column: ValueAxis("x", units[0]), y.column: ValueAxis("y", units[1])}
    drawn.table = points
    drawn.legend(handles_of(chosen))
    third = f" of both and {axes[2].label}" if len(axes) > 2 else ""
    keys = [mark_handle(f"on the Pareto front{third}", marker="o", color="white", mec=INK, mew=0.8)]
    keys += [mark_handle("not on it", marker="o", color="#cfcfcf")]
    keys += (
        [mark_handle(f"area on the front: {axes[2].label}", marker="o", color="#cfcfcf", ms=6)] if len(axes) > 2 else []
    )
    drawn.legend(keys)
    return drawn


def _with_names(points: pd.DataFrame, by: str) -> pd.DataFrame:
    """Points whose groups all have a name."""
    return points.assign(**{by: points[by].astype(object).where(points[by].notna(), "not set")})


def _decades(values: pd.Series[Any]) -> bool:
    """Whether values span a decade and none is negative."""
    positive = values[values > 0]
    return not ((values < 0).any() or positive.empty or positive.max() < _DECADE * positive.min())


def _decade_axis(panel: Axes, values: pd.Series[Any]) -> None:
    """Set a logarithmic y axis where values span a decade; one that includes zero where some are zero."""
    if not _decades(values):
        return
    if (values == 0).any():
        zero_and_decades(panel, float(values[values > 0].min()))
    else:
        panel.set_yscale("log")


def zero_and_decades(panel: Axes, smallest: float) -> None:
    """Set a logarithmic y axis that includes zero, a little above its lower end."""
    if smallest > 0:
        panel.set_yscale("symlog", linthresh=smallest / 2, linscale=0.8)
        panel.set_ylim(bottom=-smallest / 8)


def _clouds(
    panel: Axes,
    points: pd.DataFrame,
    axes: tuple[Axis, Axis],
    *,
    units: tuple[Scale, Scale],
    by: tuple[str, Mapping[str, SeriesStyle]],
) -> None:
    column, chosen = by
    for name, look in chosen.items():
        group = points[points[column].astype(str) == name]
        front = group["on_front"].astype(bool)
        places = group[axes[0].column] * units[0].factor, group[axes[1].column] * units[1].factor
        rasterized = len(group) > _MOST_VECTORS
        behind: dict[str, Any] = {"marker": look.marker, "ms": 3.0, "mew": 0, "alpha": 0.25, "rasterized": rasterized}
        panel.plot(places[0][~front], places[1][~front], ls="", color=look.colour, zorder=2, **behind)
        if front.any():
            edges: dict[str, Any] = {"edgecolors": INK, "linewidths": 0.7, "marker": look.marker, "zorder": 3}
            panel.scatter(places[0][front], places[1][front], s=group["area"][front], color=look.colour, **edges)


def agreement(both: pd.DataFrame, axes: Sequence[Axis], *, by: str, names: tuple[str, str]) -> FigureSheet:
    """Plot two levels of fidelity for each objective: finer against coarser, and below the error of the coarser one.

    both: a row for each point; columns of the finer level end in `.fine`, errors (shares) in `.error`. names: of the
    coarser and the finer level.
    """
    both = _with_names(both, by)
    chosen = looks(both[by].unique())
    note = f"above: the levels against each other; below: error of {names[0]} over {names[1]}, a bar at the median"
    frame = Frame(_agreement_title(both, axes, names), note)
    drawn = sheet(2 * len(axes), frame, height=max(1.6, row_inches(1.1) * len(chosen)), columns=len(axes))
    for place, axis in enumerate(axes):
        above, below = drawn.panels[place], drawn.panels[place + len(axes)]
        left_out = _one_against_other(above, both, axis, by=by, chosen=chosen)
        unit = scale(axis, both[axis.column], logarithmic=True)
        above.set_xlabel(f"{names[0]}{_bracketed(unit)}")
        above.set_ylabel(f"{names[1]}{_bracketed(unit)}")
        drawn.name(place, axis.label + (f" ({left_out} with a zero left out)" if left_out else ""))
        _error_strips(below, both, axis, by=by, chosen=chosen)
        name_rows(below, [look.label for look in chosen.values()], labelled=place == 0)
        below.set_xlabel("error [%]")
    drawn.columns = min(drawn.columns, len(axes))
    drawn.legend(handles_of(chosen))
    drawn.legend(
        [
            mark_handle("promoted from near the front", marker="o", color="#8c8c8c"),
            mark_handle("random sample", marker="o", color="#8c8c8c", fillstyle="none"),
        ]
    )
    return drawn


def _bracketed(unit: Scale) -> str:
    return f" [{unit.text}]" if unit.text and not unit.unit else ""


def _agreement_title(both: pd.DataFrame, axes: Sequence[Axis], names: tuple[str, str]) -> str:
    """Median error of the coarser level, for each objective."""
    errors = [f"{axis.label} {100 * both[f'{axis.column}.error'].median():+.1f} %" for axis in axes]
    return f"{names[0].capitalize()} against {names[1]}, median error: {', '.join(errors)}"


def _one_against_other(
    panel: Axes, both: pd.DataFrame, axis: Axis, *, by: str, chosen: Mapping[str, SeriesStyle]
) -> int:
    """Plot the points of both levels around the diagonal, without those that have a zero; their number."""
    fine = f"{axis.column}.fine"
    shown = both[(both[axis.column] > 0) & (both[fine] > 0)]
    unit = scale(axis, both[axis.column], logarithmic=True)
    for look, part, filled in _parts(shown, by, chosen):
        face: Any = [look.colour] if filled else "none"
        panel.scatter(
            part[axis.column] * unit.factor,
            part[fine] * unit.factor,
            s=9,
            marker=look.marker,
            facecolors=face,
            edgecolors=[look.colour],
            alpha=0.7,
            linewidths=0.6,
        )
    if len(shown):
        columns = shown[[axis.column, fine]]
        ends = [columns.min().min() * unit.factor, columns.max().max() * unit.factor]
        panel.plot(ends, ends, color=INK, linewidth=0.8, zorder=0)
        panel.set(xscale="log", yscale="log")
        plain_ticks(panel.xaxis, unit)
        plain_ticks(panel.yaxis, unit)
    return len(both) - len(shown)


def _parts(
    rows: pd.DataFrame, by: str, chosen: Mapping[str, SeriesStyle]
) -> Iterator[tuple[SeriesStyle, pd.DataFrame, bool]]:
    """Yield of each name its rows of the random sample (hollow) and the promoted ones (filled)."""
    for name, look in chosen.items():
        group = rows[rows[by].astype(str) == name]
        is_sample = group["promoted"] == "sample"
        yield look, group[is_sample], False
        yield look, group[~is_sample], True


def _error_strips(panel: Axes, both: pd.DataFrame, axis: Axis, *, by: str, chosen: Mapping[str, SeriesStyle]) -> None:
    """Plot the signed errors of each group, side by side, and their median."""
    random = np.random.default_rng(0)
    places = {look: place for place, look in enumerate(chosen.values())}
    for look, part, filled in _parts(both, by, chosen):
        error = 100 * part[f"{axis.column}.error"]
        heights = places[look] + random.uniform(-0.28, 0.28, len(part))
        face: Any = [look.colour] if filled else "none"
        panel.scatter(error, heights, s=6, facecolors=face, edgecolors=[look.colour], linewidths=0.5)
    for name, look in chosen.items():
        error = 100 * both.loc[both[by].astype(str) == name, f"{axis.column}.error"]
        if error.notna().any():
            panel.vlines(error.median(), places[look] - 0.42, places[look] + 0.42, color=INK, linewidth=1.6, zorder=4)
    panel.axvline(0.0, color=INK, linewidth=0.6, zorder=0)
    if (both[f"{axis.column}.error"].abs().fillna(0.0) < _SMALLEST_ERROR).all():
        panel.set_xlim(-100 * _SMALLEST_ERROR, 100 * _SMALLEST_ERROR)
    plain_ticks(panel.xaxis, Scale(1.0, "%", "error"))
