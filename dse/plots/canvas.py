"""Sheets: figures of panels in a grid, laid out by measuring their texts, and written to files.

A sheet has a title (the answer to its study's question), a note (how to read it) and a legend on top, then panels, each
of a height that the chart asks for; its own height follows. Nothing is placed twice: panels get what the texts around
them leave, ticks that do not fit are thinned, titles are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dse.files import atomic_replacement, path_inside
from dse.plots.labels import INK, Scale, SeriesStyle, log_ticks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as TickAxis
    from matplotlib.backend_bases import RendererBase
    from matplotlib.text import Text

MOST_PANELS = 16
FORMATS = ("png", "svg")
_DPI = 200
_FEW = 10  # round values on a logarithmic axis that become its ticks
_GAP = 0.06  # inch between texts and panels
_ROW_GAP = 0.11  # inch between rows of panels
_ROUNDS = 2  # of layout: the second measures titles that the first has wrapped


@dataclass(frozen=True)
class Width:
    """Width of a figure in a paper. inches: of the whole; text: size of its letters [pt]; panels: at most in a row.

    most: panels of a figure, so that it is no higher than a page.
    """

    inches: float
    text: float
    panels: int
    most: int


WIDTHS: Mapping[str, Width] = {"column": Width(3.35, 7.0, 2, 8), "page": Width(7.0, 8.0, 4, MOST_PANELS)}
_width: ContextVar[Width] = ContextVar("width", default=WIDTHS["page"])


@dataclass(frozen=True)
class Frame:
    """Texts around the panels of a chart.

    title: the answer that the figure gives, a sentence. note: how to read it. panel: column whose values get a panel
    each; none: a single panel.
    """

    title: str
    note: str = ""
    panel: str | None = None

    def panels(self, rows: pd.DataFrame, value: str) -> tuple[dict[str, pd.DataFrame], str]:
        """Rows by title of a panel, and the note. Of more panels than fit a page, those with the largest and the
        smallest values are drawn.
        """
        if self.panel is None:
            return {"": rows}, self.note
        groups = {str(name): group for name, group in rows.groupby(self.panel, sort=False, observed=True)}
        most = _width.get().most
        if len(groups) <= most:
            return groups, self.note
        order = sorted(groups, key=lambda name: -float(groups[name][value].max()))
        shown = {*order[: most // 2], *order[-(most // 2) :]}
        note = f"{most} of {len(groups)} shown, those with the largest and the smallest values"
        few = {name: group for name, group in groups.items() if name in shown}
        return few, "; ".join(filter(None, (self.note, note)))


@dataclass(frozen=True)
class ValueAxis:
    """An axis with values of a column. side: `x` or `y`; other: factor of the scale of the other axis; rows: names
    along it, from top to bottom.
    """

    side: Literal["x", "y"]
    scale: Scale
    other: float = 1.0
    rows: tuple[str, ...] = ()


@dataclass
class FigureSheet:
    """A figure under construction. height: of a panel [inch]; columns: panels in a row; axes: by column, the
    one that the figure is about first; table: the rows that it draws, to be held against those of a study.
    """

    figure: Any
    panels: list[Axes]
    columns: int
    height: float
    title: str
    note: str
    legends: list[Any] = field(default_factory=list)
    names: dict[int, Text] = field(default_factory=dict)
    axes: dict[str, ValueAxis] = field(default_factory=dict)
    xlabel: str = ""
    ylabel: str = ""
    arranged: bool = False
    table: pd.DataFrame | None = None

    def rows(self) -> Iterator[tuple[bool, bool, Axes]]:
        """Yield of every panel whether it is the first of its row, whether nothing is below it, and the panel."""
        for place, panel in enumerate(self.panels):
            yield place % self.columns == 0, place + self.columns >= len(self.panels), panel

    def name(self, place: int, text: str) -> None:
        """Set the title of a panel."""
        self.names[place] = self.panels[place].set_title(text)

    def legend(self, handles: Sequence[Any]) -> None:
        """Put a legend above the panels."""
        if handles:
            self.legends.append(list(handles))

    def arrange(self) -> None:
        """Lay the sheet out; the second call does nothing."""
        if not self.arranged:
            _Arrangement(self).run()
            self.arranged = True


Draw = Callable[[], FigureSheet]
"""What draws a figure when it is called, and not before."""


class _TitleError(Exception):
    """Stops a chart once its title is known."""


_title_only: ContextVar[bool] = ContextVar("title_only", default=False)


def title(make: Draw) -> str:
    """Title of a figure: the answer that it gives. Nothing is drawn, and matplotlib is not imported."""
    token = _title_only.set(True)
    try:
        return make().title
    except _TitleError as known:
        return str(known)
    finally:
        _title_only.reset(token)


def sheet(count: int, frame: Frame, *, height: float, columns: int | None = None) -> FigureSheet:
    """Begin a sheet of panels; height of a panel [inch]; columns: panels that fit in a row of a page."""
    if _title_only.get():
        raise _TitleError(frame.title)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = _width.get()
    few = width.panels if columns is None else max(1, int(columns * width.inches / WIDTHS["page"].inches))
    in_a_row = max(1, min(count, few))
    in_a_row = -(-count // -(-count // in_a_row))  # rows of equal length, as far as that goes
    figure = Figure(figsize=(width.inches, height), dpi=_DPI)
    FigureCanvasAgg(figure)
    panels = [figure.add_axes((0.1, 0.1, 0.8, 0.8), label=str(place)) for place in range(count)]
    return FigureSheet(figure, panels, in_a_row, height, frame.title, frame.note)


def inches_of_text(texts: Sequence[str], size: float = 0.9) -> float:
    """About how wide the longest of some texts is [inch]; size: times that of the figure's text."""
    return 0.56 * size * _width.get().text / 72 * max(map(len, texts), default=0)


def page_inches() -> float:
    """Width of the figure that is being drawn [inch]."""
    return _width.get().inches


def row_inches(lines: float = 1.0) -> float:
    """Height of a row with so many lines of text [inch]."""
    return lines * 1.45 * _width.get().text / 72


def draw(make: Draw, width: str = "page") -> FigureSheet:
    """Draw a figure at one of the `WIDTHS`, and lay it out."""
    with _style(WIDTHS[width]):
        finished = make()
        finished.arrange()
    return finished


def warm() -> None:
    """Import what drawing needs, which takes most of a second."""
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401


def save(make: Draw, folder: Path, name: str, *, formats: Sequence[str] = FORMATS, width: str = "page") -> list[Path]:
    """Draw a figure and write `<name>.<format>`, each reproducible to the byte. Returns the paths."""
    finished = draw(make, width)
    paths = [path_inside(folder, f"{name}.{kind}") for kind in formats]
    with _style(WIDTHS[width]):
        for path in paths:
            with atomic_replacement(path) as fresh:
                finished.figure.savefig(fresh, metadata=_METADATA[path.suffix[1:]], format=path.suffix[1:], dpi=_DPI)
    return paths


_METADATA: Mapping[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


@contextmanager
def _style(width: Width) -> Iterator[None]:
    import matplotlib as mpl

    token = _width.set(width)
    try:
        settings: Any = _settings(width.text)
        with mpl.rc_context(settings):
            yield
    finally:
        _width.reset(token)


def _settings(text: float) -> dict[str, Any]:
    """Settings of matplotlib for letters of a size [pt]; none depends on the user's own."""
    return {
        **{"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": text, "text.color": INK},
        **{"axes.titlesize": 0.95 * text, "axes.titleweight": "bold", "axes.titlelocation": "left"},
        **{"axes.titlepad": 3.0, "axes.labelsize": text, "axes.labelcolor": INK, "axes.labelpad": 2.5},
        **{"axes.edgecolor": "#9a9a9a", "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False},
        **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6},
        **{"xtick.labelsize": 0.9 * text, "ytick.labelsize": 0.9 * text, "xtick.color": INK, "ytick.color": INK},
        **{"xtick.major.size": 2.0, "ytick.major.size": 2.0, "xtick.major.width": 0.6, "ytick.major.width": 0.6},
        **{"xtick.major.pad": 3.0, "ytick.major.pad": 2.0, "xtick.minor.size": 0.0, "ytick.minor.size": 0.0},
        **{"axes.formatter.useoffset": False, "axes.unicode_minus": True, "hatch.linewidth": 0.6},
        **{"legend.fontsize": 0.9 * text, "legend.frameon": False, "legend.borderaxespad": 0.0},
        **{"legend.borderpad": 0.0, "legend.handletextpad": 0.4, "legend.columnspacing": 1.2},
        **{"legend.labelspacing": 0.35, "lines.markersize": 4.0, "lines.linewidth": 1.2},
        **{"svg.hashsalt": "dse", "pdf.fonttype": 42, "ps.fonttype": 42},
    }


class _Arrangement:
    """Layout of a sheet, in inches from its lower left corner."""

    def __init__(self, sheet: FigureSheet) -> None:
        self.sheet, self.figure = sheet, sheet.figure
        self.renderer: RendererBase = self.figure.canvas.get_renderer()
        self.width = _width.get().inches
        self.texts: list[tuple[Any, float]] = []

    def run(self) -> None:
        """Place everything; the height of the figure follows."""
        head = self._header()
        foot = self._label(self.sheet.xlabel, 0.0) if self.sheet.xlabel else None
        if foot:
            self._wrap(foot, self.sheet.xlabel, self.width - 2 * _GAP)
        side = self._label(self.sheet.ylabel, 90.0) if self.sheet.ylabel else None
        if side:
            self._wrap(side, self.sheet.ylabel, _Grid(self.sheet, self._overflows()).height)
        left = _GAP + (self._size(side)[0] + _GAP if side else 0.0)
        below = self._size(foot)[1] + _GAP if foot else 0.0
        for final in (*[False] * (_ROUNDS - 1), True):
            grid = _Grid(self.sheet, self._overflows())
            height = sum(size for _, size in head) + _GAP * (len(head) + 1) + grid.height + below + _GAP
            self.figure.set_size_inches(self.width, height, forward=False)
            widths = grid.place(left, self.width - _GAP, below + _GAP, height)
            self._fit(widths, final=final)
        middle = (left + self.width - _GAP) / 2
        if foot:
            foot.set_position((middle / self.width, _GAP / height))
        if side:
            side.set_position((_GAP / self.width, (below + _GAP + grid.height / 2) / height))
        self._place_header(head, height)

    def _header(self) -> list[tuple[Any, float]]:
        """Title, note and legends with their heights, from top to bottom."""
        size = _width.get().text
        parts: list[tuple[Any, float]] = []
        title, note = (self.sheet.title, {"weight": "bold", "size": 1.1 * size}), (self.sheet.note, {"size": size})
        for text, looks in (title, note):
            if text:
                artist = self.figure.text(0, 0, "", ha="left", va="top", **looks)
                self._wrap(artist, text, self.width - 2 * _GAP)
                parts.append((artist, self._size(artist)[1]))
        for handles in self.sheet.legends:
            artist = self._legend(handles)
            parts.append((artist, self._size(artist)[1]))
        return parts

    def _legend(self, handles: Sequence[Any]) -> Any:
        """A legend with as many columns as fit the width."""
        for columns in range(len(handles), 0, -1):
            legend = self.figure.legend(handles=handles, loc="upper left", ncols=columns)
            if columns == 1 or self._size(legend)[0] <= self.width - 2 * _GAP:
                return legend
            legend.remove()
        raise AssertionError("a legend has a handle at least")

    def _place_header(self, head: Sequence[tuple[Any, float]], height: float) -> None:
        top = height - _GAP
        for artist, size in head:
            at = (_GAP / self.width, top / height)
            if hasattr(artist, "set_bbox_to_anchor"):
                artist.set_bbox_to_anchor(at, transform=self.figure.transFigure)
            else:
                artist.set_position(at)
            top -= size + _GAP

    def _label(self, text: str, rotation: float) -> Any:
        looks = {"ha": "left", "va": "center"} if rotation else {"ha": "center", "va": "bottom"}
        return self.figure.text(0, 0, text, rotation=rotation, color=INK, **looks)

    def _size(self, artist: Any) -> tuple[float, float]:
        box = artist.get_window_extent(self.renderer)
        return box.width / _DPI, box.height / _DPI

    def _wrap(self, artist: Text, text: str, inches: float) -> None:
        """Set a text, with line breaks between words where it is wider than there is room."""
        lines, line = list[str](), ""
        for word in text.split(" "):
            artist.set_text(f"{line} {word}".strip())
            if line and max(self._size(artist)) > inches:
                lines, line = [*lines, line], word
            else:
                line = f"{line} {word}".strip()
        artist.set_text("\n".join([*lines, line]))

    def _overflows(self) -> list[tuple[float, float, float, float]]:
        """Overhang of the texts of each panel beyond it [inch]: left, right, below, above."""
        beyond = []
        for panel in self.sheet.panels:
            inner = panel.get_window_extent(self.renderer)
            outer = panel.get_tightbbox(self.renderer, bbox_extra_artists=[])
            assert outer is not None
            sides = inner.x0 - outer.x0, outer.x1 - inner.x1, inner.y0 - outer.y0, outer.y1 - inner.y1
            beyond.append(tuple(max(0.0, side) / _DPI for side in sides))
        return beyond

    def _fit(self, widths: Sequence[float], *, final: bool) -> None:
        """Wrap the titles of panels to their widths, and thin ticks."""
        for place, panel in enumerate(self.sheet.panels):
            if not final and place in self.sheet.names:
                title, room = self.sheet.names[place], widths[place % self.sheet.columns]
                self._wrap(title, title.get_text().replace("\n", " "), room)
                # a name without spaces has no line breaks
                title.set_fontsize(
                    float(title.get_fontsize()) * min(1.0, max(0.6, room / max(self._size(title)[0], 0.1)))
                )
            for axis, side in ((panel.xaxis, "width"), (panel.yaxis, "height")):
                _thin(axis, side, self.renderer)
        titles = self.sheet.names.values()
        for title in titles:
            title.set_fontsize(min(float(other.get_fontsize()) for other in titles))


class _Grid:
    """Panels in rows and columns with the room that their texts need around them [inch]."""

    def __init__(self, sheet: FigureSheet, beyond: Sequence[tuple[float, float, float, float]]) -> None:
        self.sheet = sheet
        places = [divmod(place, sheet.columns) for place in range(len(sheet.panels))]
        self.num_rows = places[-1][0] + 1
        sides = list(zip(places, beyond, strict=True))
        columns, rows = range(sheet.columns), range(self.num_rows)
        self.left, self.right = (
            [max(over[side] for (_, at), over in sides if at == column) for column in columns] for side in (0, 1)
        )
        self.below, self.above = (
            [max(over[side] for (at, _), over in sides if at == row) for row in rows] for side in (2, 3)
        )

    @property
    def height(self) -> float:
        """Height of all rows, with the texts around their panels."""
        return self.num_rows * (self.sheet.height + _ROW_GAP) + sum(self.below) + sum(self.above)

    def place(self, left: float, right: float, bottom: float, height: float) -> list[float]:
        """Place the panels; the widths of the columns."""
        gaps = _GAP * (self.sheet.columns - 1)
        inner = (right - left - sum(self.left) - sum(self.right) - gaps) / self.sheet.columns
        inner = max(inner, 0.2)
        figure_width = self.sheet.figure.get_figwidth()
        for place, panel in enumerate(self.sheet.panels):
            row, column = divmod(place, self.sheet.columns)
            x = left + sum(self.left[: column + 1]) + sum(self.right[:column]) + column * (inner + _GAP)
            under = range(row + 1, self.num_rows)
            y = bottom + self.below[row] + len(under) * (self.sheet.height + _ROW_GAP)
            y += sum(self.below[lower] + self.above[lower] for lower in under)
            panel.set_position((x / figure_width, y / height, inner / figure_width, self.sheet.height / height))
        return [inner + side for side in self.right]


def _thin(axis: TickAxis, side: str, renderer: RendererBase) -> None:
    """Keep every second, third … tick of an axis so that labels do not touch; rows and columns of a table keep all."""
    low, high = sorted(axis.get_view_interval())
    ticks = [(where, text) for where, text in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)]
    shown = [(float(where), text) for where, text in ticks if low <= where <= high and text.get_text()]
    if getattr(axis, "holds_names", False) or len(shown) < 2:
        return
    start, end = ("x0", "x1") if side == "width" else ("y0", "y1")
    boxes = [text.get_window_extent(renderer) for _, text in shown]
    spans = [(getattr(box, start), getattr(box, end)) for box in boxes]
    for every in range(1, len(shown) + 1):
        kept = sorted(spans[::every])
        if all(left[1] + 4 <= right[0] for left, right in pairwise(kept)):
            break
    if every > 1:
        axis.set_ticks([where for where, _ in shown[::every]], [text.get_text() for _, text in shown[::every]])


def name_rows(panel: Axes, names: Sequence[str], *, labelled: bool) -> None:
    """Make the y axis a list of names, from top to bottom."""
    panel.set_yticks(range(len(names)), list(names) if labelled else [""] * len(names))
    panel.yaxis.holds_names = True  # type: ignore[attr-defined]
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)


def boxes(
    panel: Axes, spans: Sequence[tuple[float, float, float]], height: float, *, colour: str, edged: bool = True
) -> None:
    """Draw bars as one object, which is many times faster than one for each. spans: row, left, right.

    edged: with white edges, behind which narrow bars vanish.
    """
    from matplotlib.collections import PolyCollection

    half = height / 2
    corners = [
        [(left, row - half), (right, row - half), (right, row + half), (left, row + half)] for row, left, right in spans
    ]
    panel.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=0.4 * edged))


def plain_ticks(axis: TickAxis, scale: Scale, *, values: Any = None) -> None:
    """Set ticks that are plain numbers. values: numbers on the axis that become ticks where they are few."""
    import numpy as np
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    places = None if values is None else np.unique(np.asarray(values, float))
    axis.set_minor_locator(NullLocator())
    if axis.get_scale() == "linear":
        whole = places is not None and bool((places % 1 == 0).all())
        axis.set_major_locator(MaxNLocator(nbins=5, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    elif places is not None and 1 < len(places) <= _FEW and all(place == float(f"{place:.3g}") for place in places):
        axis.set_major_locator(FixedLocator(list(places)))
    low, high = sorted(axis.get_view_interval())
    if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
        binary = places is not None and bool((np.log2(places[places > 0]) % 1 == 0).all())
        axis.set_major_locator(FixedLocator(list(log_ticks(low, high, binary=binary))))
    axis.set_major_formatter(FuncFormatter(lambda place, _: scale.tick(place)))


def signed_decades(panel: Axes, scale: Scale, *, linear: float) -> None:
    """Make the x axis linear up to a size of either sign, and logarithmic beyond; ticks at zero and powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = panel.get_xlim()
    panel.set_xscale("symlog", linthresh=linear)
    panel.set_xlim(low, high)
    places = [0.0, *(sign * linear * 10.0**power for power in range(9) for sign in (-1, 1))]
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_locator(FixedLocator(sorted(place for place in places if low <= place <= high)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda place, _: scale.tick(place)))


def handles_of(looks: Mapping[str, SeriesStyle], *, style: Literal["marker", "line", "patch"] = "marker") -> list[Any]:
    """Entries of a legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if style == "patch":
        return [Patch(facecolor=look.colour, label=look.label) for look in looks.values()]
    kind: Any = "-" if style == "line" else ""
    return [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle=kind, label=look.label)
        for look in looks.values()
    ]


def mark_handle(label: str, **looks: Any) -> Any:
    """Entry of a legend for something that is no name: a reference line, an ideal, a filled mark."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"color": INK, "linestyle": "", "label": label, **looks})
