"""Critical paths of two runs one above the other, and the way from the first to the second, cause by cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dse.plots.canvas import FigureSheet, Frame, boxes, handles_of, name_rows, plain_ticks, row_inches, sheet
from dse.plots.labels import INK, Axis, Scale, SeriesStyle, looks, scale

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_FIRST = ("waiting", "launch")  # causes with which a stretch begins
_EDGED = 300  # bars of a row that have edges
_PALE = "#b0b0b0"
_ZOOM = 0.5  # share of the longest bar, from which on the axis of the steps need not begin at 0


def critical_paths(
    stretches: pd.DataFrame, causes: Mapping[str, tuple[float, float]], title: str, *, note: str = ""
) -> FigureSheet:
    """Plot two critical paths over time, by cause and by what runs, and a bar for the difference that each cause makes.

    stretches: `run`, `side`, `start_s`, `finish_s` and a column of seconds for each cause. causes: seconds in the first
    and in the second run.
    """
    runs, chosen = list(stretches["run"].unique()), looks(causes)
    drawn = sheet(2, Frame(title, note), height=row_inches(1.3) * (len(causes) + 2), columns=1)
    unit = scale(Axis("finish_s", "time", "s"), stretches["finish_s"])
    sides = looks(side for side in stretches["side"].unique() if side)
    above, below = drawn.panels
    for place, run in enumerate(runs):
        path = stretches[stretches["run"] == run]
        _bars(above, 2 * place, _by_cause(path, causes), unit=unit, colours=chosen)
        _bars(above, 2 * place + 1, _by_side(path), unit=unit, colours=sides)
    name_rows(above, [f"{run}: {text}" for run in runs for text in ("causes", "what runs")], labelled=True)
    above.set_xlim(0, stretches["finish_s"].max() * unit.factor * 1.005)
    plain_ticks(above.xaxis, unit)
    drawn.name(0, "critical paths")
    zoomed = _steps(below, causes, runs, unit=unit, colours=chosen)
    drawn.name(1, f"from {runs[0]} to {runs[-1]}{', on an axis that does not begin at 0' if zoomed else ''}")
    drawn.xlabel = unit.title
    drawn.legend(handles_of(chosen, style="patch"))
    drawn.legend(handles_of(sides, style="patch"))
    return drawn


Spans = list[tuple[str, float, float]]
"""Name, begin and end [s] of bars of one row."""


def _by_cause(path: pd.DataFrame, causes: Mapping[str, object]) -> Spans:
    """Bars of the causes of each stretch, one after another; where one is negative the others are as much shorter."""
    order = [*(cause for cause in _FIRST if cause in causes), *(cause for cause in causes if cause not in _FIRST)]
    lengths = np.maximum(path[order].to_numpy(float), 0.0)
    begins, spans = path["start_s"].to_numpy(float), (path["finish_s"] - path["start_s"]).to_numpy(float)
    total = lengths.sum(axis=1)
    lengths *= np.where(total > 0, spans / np.where(total > 0, total, 1.0), 0.0)[:, None]
    ends = begins[:, None] + np.cumsum(lengths, axis=1)
    rows = zip(begins.tolist(), lengths.tolist(), ends.tolist(), strict=True)
    return _joined(
        (cause, end - length, end)
        for _, row, until in rows
        for cause, length, end in zip(order, row, until, strict=True)
        if length > 0
    )


def _by_side(path: pd.DataFrame) -> Spans:
    columns = (path[name].tolist() for name in ("side", "start_s", "finish_s"))
    return _joined((side, start, finish) for side, start, finish in zip(*columns, strict=True) if side)


def _joined(spans: Iterable[tuple[str, float, float]]) -> Spans:
    """Bars of one name that touch as one."""
    joined: Spans = []
    for name, start, finish in spans:
        if joined and joined[-1][0] == name and start - joined[-1][2] <= 1e-9 * finish:
            joined[-1] = name, joined[-1][1], finish
        else:
            joined.append((name, start, finish))
    return joined


def _bars(panel: Axes, row: int, spans: Spans, *, unit: Scale, colours: Mapping[str, SeriesStyle]) -> None:
    by_name: dict[str, list[tuple[float, float, float]]] = {}
    for name, start, finish in spans:
        by_name.setdefault(name, []).append((row, start * unit.factor, finish * unit.factor))
    for name, bars in by_name.items():
        boxes(panel, bars, 0.8, colour=colours[name].colour, edged=len(spans) <= _EDGED)


def _steps(
    panel: Axes,
    causes: Mapping[str, tuple[float, float]],
    runs: Sequence[str],
    *,
    unit: Scale,
    colours: Mapping[str, SeriesStyle],
) -> bool:
    """Draw the waterfall: the first run, what each cause adds or takes away, and the second run. Returns whether the
    axis does not begin at 0.
    """
    first, second = (unit.factor * sum(times[place] for times in causes.values()) for place in (0, 1))
    names, at, reached = [runs[0]], first, [0.0, first]
    panel.barh(0, first, 0.72, color=INK, alpha=0.75)
    bars = [(0.0, first, unit.tick(first))]
    for row, (cause, times) in enumerate(causes.items(), 1):
        change = unit.factor * (times[1] - times[0])
        panel.vlines(at, row - 1.36, row + 0.36, color=_PALE, lw=0.8, zorder=0)
        panel.barh(row, change, 0.72, left=at, color=colours[cause].colour)
        bars.append((min(at, at + change), max(at, at + change), _with_sign(change, unit, first)))
        at += change
        names.append(cause)
        reached.append(at)
    panel.vlines(at, len(causes) - 0.36, len(causes) + 1.36, color=_PALE, lw=0.8, zorder=0)
    panel.barh(len(causes) + 1, second, 0.72, color=INK, alpha=0.75)
    bars.append((0.0, second, unit.tick(second)))
    low, high = min(reached[1:]), max(reached)
    begin = low - (high - low) if low - (high - low) > _ZOOM * high else 0.0
    panel.set_xlim(begin, high + 0.12 * (high - begin))
    for row, (_, right, text) in enumerate(bars):
        panel.text(right + 0.008 * (high - begin), row, text, va="center", ha="left", size="small", color=INK)
    name_rows(panel, [*names, runs[-1]], labelled=True)
    plain_ticks(panel.xaxis, unit)
    return begin > 0


def _with_sign(change: float, unit: Scale, whole: float) -> str:
    if abs(change) < 1e-9 * whole:
        return "0"
    return f"{'+' if change > 0 else '−'}{unit.tick(float(f'{abs(change):.3g}'))}"
