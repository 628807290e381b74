"""The interactive part of a page: which charts it begins with, and all that its scripts need to draw others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_pages import charts
from dse_pages.points import Column, PagePoints, plain

# axes that fit the width of a page with readable titles
_MOST_AXES = 9
# texts along an axis of 300 pixels
_MOST_ON_AXIS = 40
_MOST_TABLE_KNOBS, _MOST_TABLE_METRICS = 6, 5


@dataclass(frozen=True)
class Start:
    """What the charts show first. scenario: the only one that is drawn, or "" for all of them."""

    x: Column
    y: Column
    colour: Column | None
    option: Column | None
    scenario: str = ""


def begin(points: PagePoints, scenario: str = "") -> Start | None:
    """Choose what is drawn first; None where there are no two numbers to draw."""
    numbers = [
        column for column in points.of_role("objective", "relation", "metric", "knob", "setting") if not column.is_text
    ]
    ordered = sorted(numbers, key=lambda column: (_order(column), not column.varies))
    if len(ordered) < 2:
        return None
    # `<group>.name` is the chosen option of a group: preferred for colours over any other knob
    named = [column for column in charts.choices(points.of_role("knob")) if column.name.endswith(".name")]
    few = [*named, *charts.choices(points.of_role("knob")), *charts.choices(points.of_role("scenario"))]
    option = few[0] if few and few[0].role == "knob" else None
    is_known = points.scenario is not None and scenario in points.scenario.categories
    return Start(ordered[0], ordered[1], few[0] if few else None, option, scenario if is_known else "")


def _order(column: Column) -> int:
    return ("objective", "relation", "metric", "knob", "setting").index(column.role)


def content(points: PagePoints, start: Start, *, diagonal: bool = False) -> dict[str, Any]:
    """All that the scripts need but the rows: columns, specifications of charts, what is drawn first."""
    numbers = [column for column in points.columns if not column.is_text]
    colours = charts.choices(points.of_role("knob", "setting", "scenario"))
    axes = parallel_axes(points)
    columns = table_columns(points)
    return {
        "study": points.study,
        "columns": [column.json() for column in points.columns],
        "axes": {column.id: charts.axis(column, logarithmic=column.is_logarithmic) for column in numbers},
        "colours": {column.id: charts.colouring(column) for column in colours},
        "scatter": charts.scatter(start.x, start.y, start.colour, tooltip_columns(points)),
        "parallel": charts.parallel(axes, start.colour),
        "parallelIds": [column.id for column in axes],
        "histogram": charts.histogram(start.x),
        "tableIds": [column.id for column in columns],
        "diagonal": diagonal,
        "start": _start(points, start),
    }


def _start(points: PagePoints, start: Start) -> dict[str, Any]:
    place = points.scenario
    scenario = {"id": place.id, "value": start.scenario} if place is not None and len(place.categories) > 1 else None
    if scenario is not None and not start.scenario:
        scenario["value"] = ""
    return {
        "x": start.x.id,
        "y": start.y.id,
        "metric": start.x.id,
        "colour": start.colour.id if start.colour else "",
        "option": start.option.id if start.option else "",
        "scenario": scenario,
        "sort": {"id": start.x.id, "down": start.x.goal == "maximize"},
    }


def parallel_axes(points: PagePoints) -> list[Column]:
    """Columns with an axis in the parallel coordinates: what was searched, then what came out."""
    knobs = [column for column in points.of_role("knob") if column.varies and len(column.categories) <= _MOST_ON_AXIS]
    results = [column for column in [*points.of_role("objective"), *_relations(points)] if column.varies]
    return [*knobs[: _MOST_AXES - min(len(results), 4)], *results[:4]]


def tooltip_columns(points: PagePoints) -> list[Column]:
    """Columns that a tooltip tells: the scenario, the knobs, the objectives and what is relative to a baseline."""
    return [*points.of_role("scenario", "knob", "setting"), *points.of_role("objective"), *_relations(points)]


def table_columns(points: PagePoints) -> list[Column]:
    """Columns of the table of points."""
    scenario = [column for column in points.of_role("scenario") if column.varies]
    metrics = [*points.of_role("objective"), *_relations(points)]
    return [*scenario, *points.of_role("knob")[:_MOST_TABLE_KNOBS], *metrics[:_MOST_TABLE_METRICS]]


def _relations(points: PagePoints) -> list[Column]:
    """Metrics that the study shows, such as speed-ups; where it names none, those without a dimension."""
    # speed-ups and shares are comparable across scenarios; absolute times are not
    shown = points.of_role("relation")
    return shown or [column for column in points.of_role("metric") if column.unit in ("x", "fraction")]


def embedded(
    points: PagePoints, start: Start, rows: NDArray[Any] | None = None, *, diagonal: bool = False
) -> dict[str, Any]:
    """`content` with rows of the table, all of them or some, for a page that holds them."""
    wanted = np.arange(len(points)) if rows is None else rows
    return {**content(points, start, diagonal=diagonal), "rows": points.take(wanted, list(points.columns))}


def summary_of(columns: Sequence[Column]) -> list[Mapping[str, Any]]:
    """Ranges of columns, for people."""
    return [
        {"name": column.name, "title": column.title, "low": plain(column.low), "high": plain(column.high)}
        for column in columns
    ]
