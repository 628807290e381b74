"""Charts of points, as Vega-Lite and Vega specifications whose data the page, or `draw`, puts in.

Rows have the columns `c0`, `c1`, ... of `dse_pages.points`, with texts spelled out, and `front` (0 or 1). Texts of a
table are only ever values of the data or titles, never parts of an expression, but for quoted constants.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dse_pages import vega
from dse_pages.points import MOST_LOOKS, Column, PagePoints

Spec = dict[str, Any]
HEIGHT = 380
# pixels before the scale of `vega.png`; "container", as in a page, has no width without a browser
_PRINTED_WIDTH = 640
_ZOOM = "wheel![event.ctrlKey || event.metaKey]"  # the wheel alone scrolls the page
_BELOW = 18  # pixels below an axis: where lines without a value go
_CONFIG: Spec = {
    "font": "system-ui, sans-serif",
    "axis": {"labelFontSize": 12, "titleFontSize": 13, "gridColor": "#e3e3e3", "labelColor": "#333", "tickCount": 6},
    "legend": {"labelFontSize": 12, "titleFontSize": 12, "labelLimit": 320, "symbolSize": 80},
    "view": {"stroke": "#bbb"},
}
# units that take a prefix of the SI in front of their symbol; a ratio, a fraction and a count take none
_SI = {"s": "s", "byte": "B", "B": "B", "flop": "FLOP", "J": "J", "W": "W", "Hz": "Hz"}


def number_label(unit: str, value: str = "datum.value") -> str:
    """Expression of Vega that writes a number with its unit: `16 ms`, `1.5×`, `64 %`.

    >>> number_label("x")
    "format(datum.value, '.3~g') + '×'"
    """
    if unit == "fraction":
        return f"format(100 * {value}, '.3~g') + ' %'"
    if unit == "x":
        return f"format({value}, '.3~g') + '×'"
    # d3 writes the prefix right behind the digits ("16m"): a space is put before it, the minus sign of d3 is U+2212
    if unit in _SI:
        return f"replace(format({value}, '.3~s'), /([^-−.0-9]?)$/, ' $1') + '{_SI[unit]}'"
    return f"abs({value}) < 1e4 ? format({value}, '.4~g') : format({value}, ',.0f')"


def axis_title(column: Column) -> str:
    """The title of an axis: its quantity, the unit where the labels do not have it, and which way is better."""
    unit = f" [{column.unit}]" if column.unit and column.unit not in (*_SI, "x", "fraction", "1/s") else ""
    better = {"minimize": " (less is better)", "maximize": " (more is better)"}.get(column.goal, "")
    return f"{column.title}{unit}{better}"


def axis(column: Column, *, logarithmic: bool) -> Spec:
    """Encoding of a position by a column."""
    if column.is_text:
        return {"field": column.id, "type": "nominal", "title": column.title, "axis": {"labelLimit": 140}}
    scale = {"type": "log", "padding": 8} if logarithmic else {"zero": False, "padding": 8}
    labels = {"labelExpr": number_label(column.unit)}
    return {"field": column.id, "type": "quantitative", "title": axis_title(column), "scale": scale, "axis": labels}


def colouring(column: Column | None, *, legend: bool = True) -> Spec:
    """Encoding of colour and shape by a column of few texts, the same in every figure and page."""
    if column is None:
        return {"color": {"value": "#0f7dc2"}}
    entry = column.json()
    if "colours" not in entry:
        # more values than colours and markers can separate: one colour for all
        return {"color": {"value": "#0f7dc2"}}
    labels = _look_up(entry)
    shown = {"orient": "bottom", "columns": 3, "labelExpr": labels} if legend else None
    common = {"field": column.id, "type": "nominal", "title": column.title, "legend": shown}
    # domain and range are fixed, so that a filter which removes a text does not shift the colours of the others
    scales = {name: {"domain": entry["categories"], "range": entry[f"{name}s"]} for name in ("colour", "shape")}
    return {"color": {**common, "scale": scales["colour"]}, "shape": {**common, "scale": scales["shape"]}}


def _look_up(entry: Mapping[str, Any]) -> str:
    """Expression of the label of a text."""
    return f"{json.dumps(entry['labels'])}[indexof({json.dumps(entry['categories'])}, datum.value)]"


def scatter(x: Column, y: Column, colour: Column | None, tooltip: Sequence[Column]) -> Spec:
    """Two metrics of every point; those on the front stand out. Ctrl and the wheel zoom, dragging moves."""
    highlighted = {"condition": {"test": "datum.front == 1", "value": 110}, "value": 36}
    points = {
        "data": {"name": "points"},
        "params": [{"name": "zoom", "select": {"type": "interval", "zoom": _ZOOM}, "bind": "scales"}],
        "mark": {"type": "point", "filled": True, "clip": True},
        "encoding": {
            "x": axis(x, logarithmic=x.is_logarithmic),
            "y": axis(y, logarithmic=y.is_logarithmic),
            **colouring(colour),
            "size": highlighted,
            "opacity": {"condition": {"test": "datum.front == 1", "value": 1}, "value": 0.35},
            "stroke": {"condition": {"test": "datum.front == 1", "value": "#111"}, "value": None},
            # drawn last, so that other points do not cover the front
            "order": {"field": "front", "type": "quantitative"},
            "tooltip": [_tip(column) for column in tooltip],
        },
    }
    return {**_frame(), "height": HEIGHT, "layer": [_density(), points]}


def _density() -> Spec:
    """Number of rows in each cell of the plane, under the points, where these are only a sample."""
    encoding: Spec = {name: {"field": name, "type": "quantitative"} for name in ("x", "y")}
    encoding |= {name: {"field": name} for name in ("x2", "y2")}
    encoding["fill"] = {
        "field": "count",
        "type": "quantitative",
        "scale": {"type": "log", "range": ["#eceff3", "#8c97a8"]},
        "legend": None,
    }
    return {"data": {"name": "grid"}, "mark": {"type": "rect", "clip": True, "stroke": None}, "encoding": encoding}


def _tip(column: Column) -> Spec:
    # the page writes `<id>_text` with the unit; the raw number would have all its digits
    return {"field": column.id if column.is_text else f"{column.id}_text", "type": "nominal", "title": column.title}


def histogram(column: Column) -> Spec:
    """Number of points by value of a metric: all of them in grey, those that match in blue."""
    bars: Spec = {"x": axis(column, logarithmic=column.is_logarithmic)}
    # counted before (`low`, `high` of each bin): the page does not hold the rows from which they come
    bars["x"] |= {"field": "low", "bin": "binned"}
    bars["x2"] = {"field": "high"}
    tooltip = [{"field": "text", "type": "nominal", "title": column.title}]
    tooltip += [{"field": name, "type": "quantitative", "title": name} for name in ("matching", "all")]
    layers = [
        {
            "mark": {"type": "bar", "fill": fill, "stroke": "white"},
            "encoding": {
                **bars,
                "y": {"field": name, "type": "quantitative", "title": "points", "stack": None},
                "tooltip": tooltip,
            },
        }
        for name, fill in (("all", "#c9ced6"), ("matching", "#0f7dc2"))
    ]
    return {**_frame(), "height": 180, "data": {"name": "bins"}, "layer": layers}


def _frame() -> Spec:
    return {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": "container", "config": _CONFIG}


# ---------------------------------------------------------------- parallel coordinates


def parallel(axes: Sequence[Column], colour: Column | None) -> Spec:
    """Parallel coordinates: a line for each point; dragging along an axis keeps the lines through that range.

    The signals `brush_<id>` hold the range in pixels, or null; a line outside any of them is faded.
    """
    scales: list[Spec] = [
        {"name": "place", "type": "point", "range": "width", "padding": 0.35, "domain": [column.id for column in axes]}
    ]
    scales += [_value_scale(column) for column in axes]
    shown = colouring(colour)["color"]
    # a specification of Vega, not of Vega-Lite (which has no brush per axis here): scales are named by hand
    if "scale" in shown:
        scale = shown["scale"]
        scales.append({"name": "colour", "type": "ordinal", "domain": scale["domain"], "range": scale["range"]})
    stroke = {"scale": "colour", "field": shown["field"]} if "scale" in shown else {"value": shown["value"]}
    return {
        "$schema": "https://vega.github.io/schema/vega/v6.json",
        "height": 300,
        "width": 600,
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": {"left": 12, "right": 12, "top": 8, "bottom": 8},
        "config": _CONFIG,
        "data": [{"name": "lines", "values": []}],
        "scales": scales,
        "signals": [signal for column in axes for signal in _brush(column)],
        "axes": [_value_axis(column) for column in axes],
        "marks": [_lines(axes, stroke), *(mark for column in axes for mark in _handles(column))],
    }


def _value_scale(column: Column) -> Spec:
    name = f"y_{column.id}"
    if column.is_text:
        return {"name": name, "type": "point", "range": "height", "padding": 0.3, "domain": list(column.categories)}
    kind = "log" if column.is_logarithmic else "linear"
    return {"name": name, "type": kind, "range": "height", "domain": [column.low, column.high], "zero": False}


_TITLE_WIDTH = 15  # characters, with which twelve axes fit a page


def _value_axis(column: Column) -> Spec:
    shown: Spec = {"scale": f"y_{column.id}", "orient": "left", "labelLimit": 110, "labelOverlap": True, "tickCount": 5}
    # an axis stands at an edge: its offset, outwards from there, moves it to the place of its column
    shown |= {"offset": {"scale": "place", "value": column.id, "mult": -1}, "titleAnchor": "end"}
    lines = textwrap.wrap(column.title, _TITLE_WIDTH)
    shown |= {
        "title": lines,
        "titleY": -14 * len(lines),
        "titleAngle": 0,
        "titleAlign": "center",
        "titleBaseline": "bottom",
        "titleX": 0,
    }
    entry = column.json()
    text = _look_up(entry) if "labels" in entry else number_label(column.unit)
    # a text of a long list has no short label and keeps Vega's own
    if "labels" in entry or not column.is_text:
        shown["encode"] = {"labels": {"update": {"text": {"signal": text}}}}
    return shown


def _height(column: Column) -> str:
    """Expression of the height of a row on the axis of a column."""
    height = f"scale('y_{column.id}', datum.{column.id})"
    return f"(isValid(datum.{column.id}) ? {height} : height + {_BELOW})" if column.gaps else height


def _lines(axes: Sequence[Column], stroke: Spec) -> Spec:
    # an SVG path through all axes: M to the first one, L to each next one
    steps = [f"(scale('place', '{column.id}')) + ',' + {_height(column)}" for column in axes]
    path = "'M' + " + " + 'L' + ".join(steps)
    # no brush on an axis: every line fits there
    fits = [f"(!brush_{column.id} || inrange({_height(column)}, brush_{column.id}))" for column in axes]
    inside = " && ".join(fits)
    update = {
        # in `update`, as a change of the size or of a brush moves lines that exist
        "path": {"signal": path},
        "strokeOpacity": {"signal": f"{inside} ? (datum.front ? 0.95 : 0.35) : 0.04"},
        "strokeWidth": {"signal": "datum.front ? 1.8 : 1"},
    }
    return {"type": "path", "from": {"data": "lines"}, "encode": {"enter": {"stroke": stroke}, "update": update}}


def _brush(column: Column) -> list[Spec]:
    """The signal of the range that is kept on an axis: begun, drawn and undone by the pointer."""
    name, area = f"brush_{column.id}", f"@area_{column.id}"
    inner = "clamp(y(), 0, height)"
    drag = f"[{area}:pointerdown, window:pointerup] > window:pointermove!"
    return [
        {"name": f"from_{column.id}", "value": 0, "on": [{"events": f"{area}:pointerdown", "update": inner}]},
        {
            "name": name,
            "value": None,
            "on": [
                {"events": f"{area}:pointerdown", "update": "null"},
                {"events": drag, "update": f"extent([from_{column.id}, {inner}])"},
            ],
        },
    ]


def _handles(column: Column) -> list[Spec]:
    """The area of an axis that takes the pointer, and the range that is kept."""
    place = {"scale": "place", "value": column.id, "offset": -14}
    width, name = {"value": 28}, f"brush_{column.id}"
    area = {"x": place, "width": width, "y": {"value": 0}, "height": {"signal": "height"}, "fill": {"value": "#0000"}}
    chosen = {
        "x": place,
        "width": width,
        "y": {"signal": f"{name} ? {name}[0] : 0"},
        "y2": {"signal": f"{name} ? {name}[1] : 0"},
        "fill": {"value": "#0f7dc2"},
        "fillOpacity": {"signal": f"{name} ? 0.25 : 0"},
        "stroke": {"value": "#0f7dc2"},
        "strokeOpacity": {"signal": f"{name} ? 1 : 0"},
    }
    # the place below the axis where lines without a value end
    none: Spec = {"x": {"scale": "place", "value": column.id}, "y": {"signal": f"height + {_BELOW}"}}
    fixed = {"text": "none", "align": "right", "dx": -4, "baseline": "middle", "fill": "#333"}
    none |= {name: {"value": value} for name, value in fixed.items()}
    labels = [{"type": "text", "interactive": False, "encode": {"update": none}}] if column.gaps else []
    return [
        *labels,
        {"type": "rect", "interactive": False, "encode": {"update": chosen}},
        {
            "type": "rect",
            "name": f"area_{column.id}",
            "encode": {"update": {**area, "cursor": {"value": "ns-resize"}, "tooltip": {"value": None}}},
        },
    ]


# ---------------------------------------------------------------- without a browser


def rows_of(points: PagePoints, taken: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `PagePoints.take` as charts read them: texts spelled out."""
    names = {column.id: column.categories for column in points.columns if column.id in taken["values"]}
    rows = []
    for place, front in enumerate(taken["front"]):
        row: dict[str, Any] = {"front": front}
        for name, categories in names.items():
            value = taken["values"][name][place]
            row[name] = categories[value] if categories else value
        rows.append(row)
    return rows


def draw(spec: Spec, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A chart of rows as PNG, for paper and for browsers without scripts; b"" where the engine cannot run."""
    # without a page no counts of cells exist, so the density is left out; a picture has no zoom and no tooltip either
    layers = [layer for layer in spec["layer"] if layer["data"]["name"] == "points"]
    layers = [{**layer, "data": {"values": list(rows)}, "params": []} for layer in layers]
    for layer in layers:
        layer["encoding"].pop("tooltip", None)
    fixed = {**spec, "width": _PRINTED_WIDTH, "layer": layers, "background": "white"}
    return vega.png(json.dumps(fixed))


def choices(columns: Sequence[Column]) -> list[Column]:
    """Columns of few texts, which colours can tell apart."""
    # a single value would colour every point alike
    return [column for column in columns if 1 < len(column.categories) <= MOST_LOOKS]
