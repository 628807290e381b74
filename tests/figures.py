"""Which texts of a figure touch each other, or leave the canvas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from dse.plots import FigureSheet

_SLACK = 1.0  # pixels that boxes may share: they are larger than their letters


def overlaps(sheet: FigureSheet) -> list[str]:
    """Pairs of visible texts whose boxes intersect, and texts that leave the canvas."""
    figure = sheet.figure
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in _texts(figure)]
    canvas = figure.bbox
    faults = [
        f"{text!r} leaves the canvas"
        for text, box in boxes
        if box.x0 < canvas.x0 - _SLACK
        or box.y0 < canvas.y0 - _SLACK
        or box.x1 > canvas.x1 + _SLACK
        or box.y1 > canvas.y1 + _SLACK
    ]
    for (first, box), (second, other) in itertools.combinations(boxes, 2):
        wide = min(box.x1, other.x1) - max(box.x0, other.x0)
        high = min(box.y1, other.y1) - max(box.y0, other.y0)
        if wide > _SLACK and high > _SLACK:
            faults.append(f"{first!r} and {second!r} overlap")
    return faults


def _texts(figure: Any) -> Iterator[Any]:
    """Visible texts: of the figure, its legends and its panels; of ticks those inside the axis."""
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for panel in figure.axes:
        texts += [panel.title, panel.xaxis.label, panel.yaxis.label, *panel.texts]
        texts += [child for child in panel.get_children() if child.__class__.__name__ == "Text" and child not in texts]
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-9 * (high - low)
            texts += [tick.label1 for tick in axis.get_major_ticks() if low - slack <= tick.get_loc() <= high + slack]
    return (text for text in texts if text.get_visible() and text.get_text().strip())
