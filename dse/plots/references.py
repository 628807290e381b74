"""Values of others in a figure, published or measured by the user: lines, bands and marks on its axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from dse.plots.canvas import Draw, FigureSheet, ValueAxis, mark_handle
from dse.plots.labels import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOUR = "#c2003f"  # no name of the palette has it
_DASHES = ("--", ":", "-.", (0, (1, 1)), (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))
_MARKS = ("D", "*", "P", "X", "v")
_ROOM = 0.05  # of the axis, beyond a value that lies outside it


@dataclass(frozen=True)
class Reference:
    """A value that a figure shows beside its own.

    label: for the legend. low, high: ends of a range, equal for a single value; as the axis shows them where `shown`
    (percent, times), else in the unit of the table. of: column of the axis; "" for the first of the figure. panel, row:
    names that it belongs to; "" for all. at: place on the other axis, in the unit of the table; None everywhere. unit:
    text after a number. in_words: in the note, as the figure has no axis for it.
    """

    label: str
    low: float
    high: float
    of: str = ""
    panel: str = ""
    row: str = ""
    at: float | None = None
    unit: str = ""
    shown: bool = True
    in_words: bool = False

    @property
    def text(self) -> str:
        """Label and value."""
        ends = dict.fromkeys(map(number, (self.low, self.high)))
        return f"{self.label}: {' to '.join(ends)}{self.unit}" if self.shown else self.label

    @property
    def is_mark(self) -> bool:
        """True if it has a place on the other axis, too."""
        return bool(self.row) or self.at is not None

    def numbers(self, measure: ValueAxis) -> tuple[float, float]:
        """Ends on the axis."""
        factor = 1.0 if self.shown else measure.scale.factor
        return self.low * factor, self.high * factor


def with_references(make: Draw, references: Iterable[Reference], *, note: str = "") -> Draw:
    """Return what draws a figure with values of others, and with a note on where they are from."""
    values = tuple(references)
    return partial(_draw, make, values, note) if values or note else make


def _draw(make: Draw, references: Sequence[Reference], note: str) -> FigureSheet:
    sheet = make()
    words = dict.fromkeys(reference.text for reference in references if reference.in_words)
    sheet.note = "; ".join(filter(None, (sheet.note, *words, note)))
    places = [(reference, place) for reference in references for place in _places(sheet, reference)]
    labels = dict.fromkeys(reference.label for reference, _ in places)
    looks = dict(zip(labels, zip(cycle(_DASHES), cycle(_MARKS), strict=False), strict=False))
    handles: dict[str, Any] = {}
    for reference, (panel, measure) in places:
        dashes, mark = looks[reference.label]
        style = {"ls": "", "marker": mark, "mfc": "none", "ms": 5.0} if reference.is_mark else {"ls": dashes, "lw": 1.1}
        style |= {"color": _COLOUR}
        _draw_value(panel, reference, measure, style)
        if reference.low != reference.high and not reference.is_mark:
            style = {"color": _COLOUR, "alpha": 0.25, "marker": "s", "ms": 6.0}
        handles.setdefault(reference.label, mark_handle(reference.text, **style))
    sheet.legend(list(handles.values()))
    return sheet


def _places(sheet: FigureSheet, reference: Reference) -> Iterable[tuple[Axes, ValueAxis]]:
    """Yield the panels that a reference belongs to, each with its axis."""
    measure = sheet.axes.get(reference.of or next(iter(sheet.axes), ""))
    if measure is None or reference.in_words or (reference.row and reference.row not in measure.rows):
        return
    names = {place: text.get_text().replace("\n", " ") for place, text in sheet.names.items()}
    for place, panel in enumerate(sheet.panels):
        if not reference.panel or names.get(place) == reference.panel:
            yield panel, measure


def _draw_value(panel: Axes, reference: Reference, measure: ValueAxis, style: dict[str, Any]) -> None:
    """Draw a line, a band or a mark, and make the axis hold it."""
    low, high = reference.numbers(measure)
    along_x = measure.side == "x"
    if reference.is_mark:
        other = measure.rows.index(reference.row) if reference.row else (reference.at or 0.0) * measure.other
        ends = ([low, high], [other, other]) if along_x else ([other, other], [low, high])
        panel.plot(*ends, **{**style, "ls": "-", "mew": 1.0, "zorder": 5})
    elif low == high:
        (panel.axvline if along_x else panel.axhline)(low, zorder=4, **style)
    else:
        (panel.axvspan if along_x else panel.axhspan)(low, high, color=_COLOUR, alpha=0.12, lw=0, zorder=0)
    start, end = panel.get_xlim() if along_x else panel.get_ylim()
    if start < end and panel.get_xscale() == panel.get_yscale() == "linear":
        room = _ROOM * (max(end, high) - min(start, low))
        wider = min(start, low - room) if low < start else start, max(end, high + room) if high > end else end
        (panel.set_xlim if along_x else panel.set_ylim)(*wider)
