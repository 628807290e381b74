"""Figures of tables: dots from a baseline, stacked parts, heat maps, curves, shares over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.plots.canvas import (
    FigureSheet,
    Frame,
    ValueAxis,
    boxes,
    handles_of,
    inches_of_text,
    mark_handle,
    name_rows,
    page_inches,
    plain_ticks,
    row_inches,
    sheet,
    signed_decades,
)
from dse.plots.labels import INK, Axis, Scale, SeriesStyle, blend, diverging, looks, scale

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_MOST_CELLS = 20  # rows of a heat map; more are a ranked dot plot
_MOST_ROWS = 40  # of a dot plot
_LIMITS: dict[str, tuple[str, dict[str, Any]]] = {
    "ideal": ("ideal", {"marker": "|", "ms": 7, "mew": 1.6}),
    "bound": ("no schedule passes (proven)", {"marker": "$]$", "ms": 6.5, "mew": 0.4}),
}
_FAR_FROM = 50.0  # largest over median value from which on the axis of dots is logarithmic far from zero
_RANGE = ("range_low", "range_high")
_LIGHT_TO_DARK = ("#f4f8fc", "#a9cbe6", "#4a92c6", "#0b5a99", "#08325c")
_DECADE = 10.0


def dots(rows: pd.DataFrame, value: Axis, *, row: str, by: str, frame: Frame) -> FigureSheet:
    """Plot a dot for each `by` in each `row`, with a line from the baseline (`value.centre`), the best row first.

    rows: one for each dot; a column `ideal` is drawn as a black bar, and `bound` as a bracket, which no ideal or line
    passes; `range_low` and `range_high` as a line through the dot, where they hold numbers. Of more than 40 rows of
    names, the first and the last 20 are drawn. All panels have the same axis.
    """
    if set(_LIMITS) <= set(rows):
        rows = rows.assign(ideal=rows["ideal"].mask(rows["ideal"] > rows["bound"])).dropna(axis="columns", how="all")
    groups, note = frame.panels(rows, value.column)
    order, note = _rank_rows(rows, value, row=row, note=note)
    chosen = looks(rows[by].unique())
    height = row_inches(max(1.1, 0.34 * len(chosen))) * len(order)
    drawn = sheet(len(groups), Frame(frame.title, note), height=height, columns=_columns(order, 1.5))
    unit, limits = scale(value, rows[value.column]), [limit for limit in _LIMITS if limit in rows]
    for (first, _, panel), (name, group) in zip(drawn.rows(), groups.items(), strict=True):
        ends = {f"at_{end}": group[end].clip(upper=group.get("bound")) * unit.factor for end in _RANGE if end in group}
        placed = group.assign(at=group[value.column] * unit.factor, **ends)
        _dot_rows(panel, placed, order, row=row, looks_by=(by, chosen))
        _baseline(panel, group, value, order=order, row=row)
        for limit in limits:
            top = group.groupby(group[row].astype(str))[limit].max().reindex(order) * unit.factor
            panel.plot(top, range(len(order)), color=INK, ls="", **_LIMITS[limit][1])
        name_rows(panel, order, labelled=first)
        plain_ticks(panel.xaxis, unit)
        drawn.name(drawn.panels.index(panel), name)
    _same_axes(drawn.panels, rows[value.column] * unit.factor, unit)
    drawn.xlabel, drawn.axes = unit.title, {value.column: ValueAxis("x", unit, rows=tuple(order))}
    drawn.table = rows
    bars = [mark_handle(text, **style) for text, style in (_LIMITS[limit] for limit in limits)]
    drawn.legend([*(handles_of(chosen) if len(chosen) > 1 else []), *bars])
    return drawn


def _rank_rows(rows: pd.DataFrame, value: Axis, *, row: str, note: str) -> tuple[list[str], str]:
    """Names of rows, the largest value (of times: the smallest) first, and the note; at most 40."""
    groups = rows.groupby(rows[row].astype(str), sort=False)[value.column]
    best = groups.min() if value.unit == "s" else -groups.max()
    order = [str(name) for name in best.sort_values(kind="stable").index]
    if len(order) <= _MOST_ROWS:
        return order, note
    half = _MOST_ROWS // 2
    text = f"the first and the last {half} of {len(order)} rows"
    return [*order[:half], *order[-half:]], "; ".join(filter(None, (note, text)))


def _dot_rows(
    panel: Axes, group: pd.DataFrame, order: Sequence[str], *, row: str, looks_by: tuple[str, Mapping[str, SeriesStyle]]
) -> None:
    by, chosen = looks_by
    spread = 0.6 if len(chosen) > 1 else 0.0
    for index, (name, look) in enumerate(chosen.items()):
        points = group[group[by].astype(str) == name]
        by_row = points.groupby(points[row].astype(str))
        values = by_row["at"].max().reindex(list(order))
        heights = np.arange(len(order)) + spread * ((index + 0.5) / len(chosen) - 0.5)
        if f"at_{_RANGE[0]}" in points:
            low, high = (by_row[f"at_{end}"].max().reindex(list(order)) for end in _RANGE)
            panel.hlines(heights, low, high, color=look.colour, lw=1.6, alpha=0.55, zorder=2)
        panel.plot(values, heights, color=look.colour, marker=look.marker, ms=4.2, mew=0, ls="", zorder=3)


def _baseline(panel: Axes, group: pd.DataFrame, value: Axis, *, order: Sequence[str], row: str) -> None:
    """Draw the value that gains are counted from, and a line from it to the farthest dots of each row."""
    panel.margins(x=0.06)
    if value.centre is None:
        return
    factor = scale(value, group[value.column]).factor
    ends = group.groupby(group[row].astype(str))[value.column].agg(["min", "max"]).reindex(list(order)) * factor
    low, high = ends["min"].clip(upper=value.centre * factor), ends["max"].clip(lower=value.centre * factor)
    panel.hlines(range(len(order)), low, high, color="#cfcfcf", lw=0.8, zorder=1)
    panel.axvline(value.centre * factor, color=INK, lw=0.8, zorder=2)


def _same_axes(panels: Sequence[Axes], values: pd.Series[Any], unit: Scale) -> None:
    """Give all panels the same x axis; one that is linear around zero and then logarithmic where values spread far."""
    sizes = values.abs()[values != 0]
    typical = float(sizes.median()) if len(sizes) else 1.0
    ends = [panel.get_xlim() for panel in panels]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    for panel in panels:
        panel.set_xlim(low, high)
        if len(sizes) and float(sizes.max()) > _FAR_FROM * typical:
            signed_decades(panel, unit, linear=10.0 ** np.floor(np.log10(typical)))


def _columns(names: Sequence[str], panel_inches: float) -> int:
    """Panels of at least a width [inch] that fit in a row of a page beside names."""
    page = 7.0
    return max(1, min(4, int((page - inches_of_text(names)) / panel_inches)))


def stacks(rows: pd.DataFrame, parts: Sequence[Axis], *, bar: str, label: str, frame: Frame) -> FigureSheet:
    """Plot stacked bars, negative parts below zero: a panel for each `frame.panel`, a bar for each `bar`.

    rows: one for each bar; parts: the columns to stack. label: name of their sum. A bar whose `won` is true has a
    triangle.
    """
    total = rows[[part.column for part in parts]].sum(axis=1).rename("total")
    groups, note = frame.panels(rows.assign(total=total), "total")
    bars = [str(name) for name in rows[bar].unique()]
    chosen = looks(part.label for part in parts)
    wide = row_inches(1.15) * len(bars)
    drawn = sheet(len(groups), Frame(frame.title, note), height=wide, columns=_columns(bars, 1.35))
    unit = scale(Axis("", label, parts[0].unit), total)
    for place, ((first, _, panel), (name, group)) in enumerate(zip(drawn.rows(), groups.items(), strict=True)):
        cells = group.set_index(group[bar].astype(str)).reindex(bars)
        above, below = np.zeros(len(bars)), np.zeros(len(bars))
        for part in parts:
            value = cells[part.column].fillna(0.0).to_numpy(float) * unit.factor
            start = np.where(value >= 0, above, below)
            spans = list(zip(range(len(bars)), start, start + value, strict=True))
            boxes(panel, spans, 0.74, colour=chosen[part.label].colour)
            above, below = above + np.maximum(value, 0.0), below + np.minimum(value, 0.0)
        name_rows(panel, bars, labelled=first)
        room = 0.03 * float(above.max() - below.min() or 1.0)
        marked = np.flatnonzero(cells["won"].eq(other=True)) if "won" in cells else ()
        room *= 3 if len(marked) else 1
        for index in marked:
            panel.plot(above[index] + room / 2, index, marker="<", color=INK, ms=4)
        panel.set_xlim(below.min() - room * bool(below.any()), above.max() + room)
        panel.axvline(0.0, color=INK, lw=0.6)
        plain_ticks(panel.xaxis, unit)
        drawn.name(place, name)
    drawn.xlabel, drawn.axes = unit.title, {label: ValueAxis("x", unit, rows=tuple(bars))}
    drawn.table = rows
    drawn.legend(handles_of(chosen, style="patch"))
    return drawn


def heat(rows: pd.DataFrame, value: Axis, *, x: Axis, y: str, frame: Frame) -> FigureSheet:
    """Plot an annotated heat map over two columns, a panel for each `frame.panel`. Only numbers in `x` are sorted.

    Values with a centre (0 of signed ones, 1 of ratios) have diverging colours. More than 20 rows become a ranked dot
    plot.
    """
    names = [str(name) for name in rows[y].unique()]
    if len(names) > _MOST_CELLS:
        return dots(rows, value, row=y, by=x.column, frame=frame)
    groups, note = frame.panels(rows, value.column)
    unit, columns = scale(value, rows[value.column]), _heads(rows, x)
    shades = _Shades(rows[value.column] * unit.factor, value)
    drawn = sheet(
        len(groups),
        Frame(frame.title, note or f"in the cells: {unit.title}"),
        height=row_inches(1.25) * len(names),
        columns=_columns(names, 0.1 + 0.34 * len(columns)),
    )
    for place, ((first, _, panel), (name, group)) in enumerate(zip(drawn.rows(), groups.items(), strict=True)):
        cells = group.pivot_table(index=y, columns=x.column, values=value.column, sort=False, observed=True)
        cells.index = cells.index.map(str)
        cells = cells.reindex(index=names, columns=list(columns))
        _cells(panel, cells.to_numpy(float) * unit.factor, shades=shades)
        name_rows(panel, names, labelled=first)
        panel.tick_params(axis="x", length=0)
        panel.grid(visible=False)
        panel.spines[:].set_visible(False)
        drawn.name(place, name)
        _fit_heads(panel, list(columns.values()), (page_inches() - inches_of_text(names)) / drawn.columns)
    drawn.xlabel = scale(x, list(columns), logarithmic=True).title if any(map(_is_number, columns)) else x.label
    drawn.table = rows
    return drawn


def _fit_heads(panel: Axes, heads: Sequence[str], inches: float) -> None:
    """Name the columns of a panel of a width: in lines where words fit the columns, else upright."""
    room = inches / len(heads)
    upright = inches_of_text([word for head in heads for word in head.split()]) > room
    letters = max(1, int(room / inches_of_text(["x"])))
    panel.set_xticks(range(len(heads)), heads if upright else ["\n".join(wrap(head, letters)) for head in heads])
    panel.xaxis.holds_names = True  # type: ignore[attr-defined]
    if upright:
        panel.tick_params(axis="x", labelrotation=90)


def _heads(rows: pd.DataFrame, x: Axis) -> dict[Any, str]:
    """Values of the columns of a heat map with their texts; numbers in order, with the unit that fits each."""
    values = list(rows[x.column].unique())
    if rows[x.column].dtype == object or not all(map(_is_number, values)):
        return {value: str(value) for value in values}
    unit = scale(x, values, logarithmic=True)
    return {value: unit.tick(float(value) * unit.factor) for value in sorted(values)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number))


class _Shades:
    """Colours of values: diverging around a centre, else from light to dark."""

    def __init__(self, values: Any, value: Axis) -> None:
        self.centre = value.centre
        finite = self._place(np.asarray(values, float))
        finite = finite[np.isfinite(finite)]
        self.low = float(finite.min()) if finite.size else 0.0
        self.high = float(np.quantile(finite, 0.98)) if finite.size else 1.0
        self.most = float(np.quantile(np.abs(finite), 0.98)) if finite.size else 1.0

    def _place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(np.maximum(values, 1e-12)) if self.centre == 1 else values - (self.centre or 0.0)

    def of(self, value: float) -> tuple[str, str]:
        """Colours of a cell and of the text on it."""
        place = float(self._place(np.array(value)))
        if self.centre is not None:
            share = place / (self.most or 1.0)
            return diverging(share), "white" if abs(share) > 0.7 else INK
        share = (place - self.low) / ((self.high - self.low) or 1.0)
        return blend(_LIGHT_TO_DARK, share), "white" if share > 0.5 else INK


def _cells(panel: Axes, cells: NDArray[np.float64], *, shades: _Shades) -> None:
    """Draw cells with their numbers."""
    from matplotlib.colors import to_rgb

    image = np.ones((*cells.shape, 3))
    for (row, column), cell in np.ndenumerate(cells):
        if np.isfinite(cell):
            colour, ink = shades.of(float(cell))
            image[row, column] = to_rgb(colour)
            digits = 0 if abs(cell) >= 30 else 1 if abs(cell) >= 10 else 2
            text = f"{cell:.{digits}f}".replace("-", "\N{MINUS SIGN}")
            panel.text(column, row, text, ha="center", va="center", fontsize="x-small", color=ink)
    panel.imshow(image, aspect="auto", interpolation="nearest")


def raster(
    panels: Mapping[str, NDArray[np.float64]],
    seconds: Mapping[str, float],
    *,
    lane: str | Mapping[str, Sequence[str]],
    frame: Frame,
    marks: Mapping[str, Sequence[float]],
) -> FigureSheet:
    """Plot shares over time (to the right) and lanes (downwards) as shades from 0 to 1: a panel per [bins, lanes].

    seconds: length of a bin, by panel. lane: name of the lanes, which are numbered, or names of each, by panel.
    marks: times [s] of lines, by panel.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    columns = 2 if len(panels) > 1 else 1
    drawn = sheet(len(panels), frame, height=1.35, columns=columns)
    colours = ListedColormap([blend(_LIGHT_TO_DARK, share) for share in np.linspace(0, 1, 64)])
    for place, (panel, (name, shares)) in enumerate(zip(drawn.panels, panels.items(), strict=True)):
        bins, lanes = shares.shape
        unit = scale(Axis("", "time", "s"), [bins * seconds[name]])
        extent = (0.0, bins * seconds[name] * unit.factor, lanes - 0.5, -0.5)
        looks_of: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": colours}
        panel.imshow(shares.T, vmin=0.0, vmax=1.0, extent=extent, **looks_of)
        for mark in marks.get(name, ()):
            panel.axvline(mark * unit.factor, color="#cf5a00", lw=0.8, ls=":")
        if not isinstance(lane, str):
            panel.set_yticks(range(lanes), lane[name])
        else:
            panel.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        plain_ticks(panel.xaxis, unit)
        panel.grid(visible=False)
        panel.set_xlabel(unit.title)
        drawn.name(place, name)
    drawn.ylabel = lane if isinstance(lane, str) else ""
    shades = {f"{share:.0%}".replace("%", " %"): blend(_LIGHT_TO_DARK, share) for share in (0, 0.25, 0.5, 0.75, 1)}
    drawn.legend(handles_of({name: SeriesStyle(name, colour, "s") for name, colour in shades.items()}, style="patch"))
    return drawn


def roofline(rows: pd.DataFrame, roof: tuple[float, float], *, by: str, size: Axis, frame: Frame) -> FigureSheet:
    """Plot the intensity and rate of operators under the roofline of a device.

    rows: `intensity` [FLOP/B], `rate` [FLOP/s], the column `by` for colour and marker, and `size`, as area. roof: peak
    rate [FLOP/s] and bandwidth [bytes/s].
    """
    peak, bandwidth = roof
    chosen = looks(rows[by].unique())
    drawn = sheet(1, frame, height=2.6)
    (panel,) = drawn.panels
    low, high = 0.5 * float(rows["intensity"].min()), 2 * max(float(rows["intensity"].max()), peak / bandwidth)
    line = np.geomspace(low, high, 200)
    unit = scale(Axis("rate", "rate", "FLOP/s"), [peak])
    panel.plot(line, np.minimum(peak, bandwidth * line) * unit.factor, color=INK, lw=1.2)
    largest = float(rows[size.column].max())
    for name, look in chosen.items():
        group = rows[rows[by].astype(str) == name]
        areas = 12 + 160 * group[size.column] / largest
        marks: dict[str, Any] = {"color": look.colour, "marker": look.marker, "alpha": 0.75, "lw": 0.4}
        panel.scatter(group["intensity"], group["rate"] * unit.factor, s=areas, edgecolors=INK, **marks)
    panel.set(xscale="log", yscale="log", xlim=(low, high))
    plain_ticks(panel.xaxis, Scale(1.0, "FLOP/B", ""))
    plain_ticks(panel.yaxis, unit)
    drawn.xlabel, drawn.ylabel = "arithmetic intensity [FLOP/B]", unit.title
    drawn.legend([*handles_of(chosen), mark_handle("roofline", ls="-", lw=1.2)])
    return drawn


def curves(rows: pd.DataFrame, x: Axis, *, y: Axis, by: str, frame: Frame) -> FigureSheet:
    """Plot a line over x for each `by`, a panel for each `frame.panel`; a column `measured` is drawn as marks.

    Columns `range_low` and `range_high` are drawn as a band around the line, where they hold numbers.
    """
    groups, note = frame.panels(rows, y.column)
    marks, chosen, logarithmic = "measured" in rows, looks(rows[by].unique()), _spans(rows[x.column])
    columns = 4 if len(groups) > 6 else min(3, len(groups))
    drawn = sheet(len(groups), Frame(frame.title, note), height=1.25 if len(groups) > 4 else 1.6, columns=columns)
    units = scale(x, rows[x.column], logarithmic=logarithmic), scale(y, rows[y.column])
    for place, (panel, (name, group)) in enumerate(zip(drawn.panels, groups.items(), strict=True)):
        for line_name, look in chosen.items():
            line = group[group[by].astype(str) == line_name].sort_values(x.column)
            places, colour = line[x.column] * units[0].factor, {"color": look.colour}
            mark: dict[str, Any] = {**colour, "marker": look.marker, "ms": 3.2, "mew": 0.0}
            panel.plot(places, line[y.column] * units[1].factor, lw=1.1, **(colour if marks else mark))
            if marks:
                panel.plot(places, line["measured"] * units[1].factor, ls="", **mark)
            if "range_low" in line:
                low, high = line["range_low"] * units[1].factor, line["range_high"] * units[1].factor
                panel.fill_between(places, low, high, color=look.colour, alpha=0.18, lw=0, zorder=1)
        if y.centre is not None:
            panel.axhline(y.centre * units[1].factor, color=INK, lw=0.6, zorder=1)
        if logarithmic:
            panel.set_xscale("log")
        if y.centre is None and _spans(rows[y.column], 3 * _DECADE):
            panel.set_yscale("log")
        plain_ticks(panel.xaxis, units[0], values=group[x.column] * units[0].factor)
        linear = panel.get_yscale() == "linear"
        plain_ticks(panel.yaxis, units[1], values=group[y.column] * units[1].factor if linear else None)
        drawn.name(place, name)
    drawn.xlabel, drawn.ylabel = units[0].title, units[1].title
    drawn.axes = {y.column: ValueAxis("y", units[1], units[0].factor), x.column: ValueAxis("x", units[0])}
    drawn.table = rows
    extra = [mark_handle("marks: measured", marker="o", color="#8c8c8c"), mark_handle("lines: predicted", ls="-")]
    drawn.legend([*handles_of(chosen, style="line" if not marks else "marker"), *(extra if marks else [])])
    return drawn


def _spans(values: pd.Series[Any], ratio: float = 1.2 * _DECADE) -> bool:
    """Whether values are positive and span so much that a linear axis crowds the smaller ones."""
    return bool((values > 0).all()) and float(values.max()) > ratio * float(values.min())
