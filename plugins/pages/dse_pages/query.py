"""Questions of a browser about many points: which match, a sample of them to draw, counts of all of them.

An answer has a few thousand marks at most, however many points there are: those on a front first, then a sample that
stays the same, and under it the number of points in each cell of the plane.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from dse.errors import ConfigError, Problem
from dse_pages.points import Column, PagePoints
from dse_pages.views import parallel_axes, table_columns, tooltip_columns

MOST_DRAWN = 2500
# lines of the parallel coordinates; more of them only fill the area
_MOST_CONTEXT = 600
# cells along x and y: about 8 pixels high at the height of a chart (380)
_CELLS = (72, 48)
_BINS = 40
_Id = Annotated[str, Field(pattern=r"^c[0-9]{1,5}$")]
_Range = tuple[FiniteFloat, FiniteFloat]


class ColumnFilter(BaseModel):
    """What a column may hold: some codes of texts, or numbers from low to high."""

    model_config = ConfigDict(extra="forbid", strict=False)
    values: Annotated[list[int], Field(max_length=10_000)] | None = None
    low: FiniteFloat = -math.inf
    high: FiniteFloat = math.inf


class ViewWindow(BaseModel):
    """The part of the plane that is seen, None where all of an axis is."""

    model_config = ConfigDict(extra="forbid")
    x: _Range | None = None
    y: _Range | None = None


class Sort(BaseModel):
    """Order of the table of points."""

    model_config = ConfigDict(extra="forbid")
    id: _Id
    down: bool = False


class PageQuery(BaseModel):
    """What a page asks. filters and brushes both choose rows; context are rows that the filters alone choose."""

    model_config = ConfigDict(extra="forbid")
    x: _Id
    y: _Id
    metric: _Id
    sort: Sort
    filters: Annotated[dict[_Id, ColumnFilter], Field(max_length=200)] = {}
    brushes: Annotated[dict[_Id, ColumnFilter], Field(max_length=200)] = {}
    window: ViewWindow | None = None
    length: Annotated[int, Field(ge=1, le=200)] = 25


class Explorer:
    """Points to ask about. Its arrays are read only, so that several threads may ask at once."""

    # filled when first asked for; two threads at once count the same bins twice and store equal arrays
    def __init__(self, points: PagePoints) -> None:
        self.points = points
        self._all_bins: dict[str, NDArray[np.intp]] = {}

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """Rows in the order in which they are drawn: fronts first, then by chance, the same every time."""
        shuffled = np.random.default_rng(0).permutation(len(self.points))
        # stable: ~front sorts False (on a front) first and leaves the random order within either group
        return shuffled[np.argsort(~self.points.front[shuffled], kind="stable")]

    def column(self, name: str, *, numeric: bool = False) -> Column:
        """A column by its id. Raises ConfigError."""
        column = self.points.by_id.get(name)
        if column is None or (numeric and column.is_text):
            raise ConfigError([Problem("q", "asks for a column that there is not", name)])
        return column

    def answer(self, question: PageQuery) -> dict[str, Any]:
        """Answer a question, ready for JSON. Raises ConfigError for columns that there are not."""
        x, y = (self.column(name, numeric=True) for name in (question.x, question.y))
        # filters alone: the faded lines of the parallel coordinates need rows that a brush excludes
        context = self._mask(question.filters)
        matching = context & self._mask(question.brushes)
        seen = matching & self._inside(question, x, y)
        drawn = self._sample(seen, MOST_DRAWN)
        # every matching point is drawn: counts of cells under them would repeat the same
        complete = len(drawn) == int(np.count_nonzero(seen))
        shown = self._shown_columns(x, y)
        take = self.points.take
        metric = self.column(question.metric, numeric=True)
        edges, all_counts, counts = self._histogram(metric, matching)
        return {
            "total": len(self.points),
            "matching": int(np.count_nonzero(seen)),
            "rows": take(drawn, shown),
            "grid": [] if complete else self._grid(question, seen, (x, y)),
            "context": take(self._sample(context, _MOST_CONTEXT), shown),
            "best": take(self._best(question, seen), shown),
            "edges": edges.tolist(),
            "all": all_counts.tolist(),
            "bins": counts.tolist(),
        }

    def _shown_columns(self, x: Column, y: Column) -> list[Column]:
        points = self.points
        wanted = (*tooltip_columns(points), *parallel_axes(points), *table_columns(points), x, y)
        return list({column.id: column for column in wanted}.values())

    def _mask(self, filters: Mapping[str, ColumnFilter]) -> NDArray[np.bool_]:
        """Marks of the rows that fit filters."""
        mask = np.ones(len(self.points), bool)
        for name, chosen in filters.items():
            column, values = self.column(name), self.points.values[name]
            if column.is_text:
                allowed = np.zeros(len(column.categories), bool)
                # codes of a question are not trusted: a negative one would count from the end
                allowed[[code for code in chosen.values or () if 0 <= code < len(allowed)]] = True
                mask &= allowed[values]
            else:
                # a comparison with NaN is False: a row without a value fits no range
                mask &= (values >= chosen.low) & (values <= chosen.high)
        return mask

    def _inside(self, question: PageQuery, x: Column, y: Column) -> NDArray[np.bool_]:
        """Marks of the rows in the part of the plane that is seen; a row without a finite value is nowhere."""
        window = question.window or ViewWindow()
        mask = np.ones(len(self.points), bool)
        for column, ends in ((x, window.x), (y, window.y)):
            values = self.points.values[column.id]
            # the ends of a range may come in either order
            low, high = sorted(ends) if ends else (-math.inf, math.inf)
            mask &= np.isfinite(values) & (values >= low) & (values <= high)
        return mask

    def _sample(self, mask: NDArray[np.bool_], most: int) -> NDArray[np.intp]:
        """At most `most` of the marked rows, in the order in which they are drawn."""
        # pieces double: few reads when most rows match, few rounds when hardly any does
        chosen, start, step = list[NDArray[np.intp]](), 0, 8 * most
        count = 0
        while count < most and start < len(self._order):  # by pieces: mostly the first ones are enough
            piece = self._order[start : start + step]
            hits = piece[mask[piece]]
            chosen.append(hits)
            count, start, step = count + len(hits), start + step, 2 * step
        return np.concatenate(chosen)[:most] if chosen else self._order[:0]

    def _best(self, question: PageQuery, mask: NDArray[np.bool_]) -> NDArray[np.intp]:
        """The first rows of the table of points."""
        rows = np.flatnonzero(mask)
        keys = self.points.values[self.column(question.sort.id).id][rows].astype(float)
        # rows without a value come last in either direction
        keys = np.where(np.isnan(keys), math.inf, -keys if question.sort.down else keys)
        few = min(question.length, len(rows))
        # partition is linear in the rows; only the few that are shown are sorted
        if few < len(rows):
            first = np.argpartition(keys, few)[:few]
            rows, keys = rows[first], keys[first]
        # lexsort takes the primary key last; equal keys keep the order of the table
        return rows[np.lexsort((rows, keys))]

    def _histogram(self, column: Column, mask: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Edges [41] of equal bins (of the logarithm where the axis has one), counts [40] of all and of marked rows."""
        edges = _edges((column.low, column.high), _BINS, logarithmic=column.is_logarithmic)
        values = self.points.values[column.id]
        if column.id not in self._all_bins:
            self._all_bins[column.id] = _count(values, column)
        return edges, self._all_bins[column.id], _count(values[mask], column)

    def _grid(
        self, question: PageQuery, mask: NDArray[np.bool_], axes: tuple[Column, Column]
    ) -> list[dict[str, float]]:
        """Number of marked rows in each cell of the part of the plane that they take."""
        places, edges = [], []
        for column, number in zip(axes, _CELLS, strict=True):
            values = self.points.values[column.id][mask]
            low, high = float(values.min()), float(values.max())
            places.append(_places(values, (low, high), number, logarithmic=column.is_logarithmic))
            edges.append(_edges((low, high), number, logarithmic=column.is_logarithmic))
        # cells are numbered by rows of x: place = i * cells along y + j
        counts = np.bincount(places[0] * _CELLS[1] + places[1], minlength=_CELLS[0] * _CELLS[1])
        cells = np.flatnonzero(counts)
        (x, y), (i, j) = edges, np.divmod(cells, _CELLS[1])
        columns = {"x": x[i], "x2": x[i + 1], "y": y[j], "y2": y[j + 1], "count": counts[cells]}
        return [
            dict(zip(columns, row, strict=True))
            for row in zip(*(values.tolist() for values in columns.values()), strict=True)
        ]


def _edges(ends: tuple[float, float], number: int, *, logarithmic: bool) -> NDArray[np.float64]:
    """Ends of equal bins [number + 1], of the logarithm where the axis has one."""
    low, high = ends
    if logarithmic and low < high:
        return np.geomspace(low, high, number + 1)
    # a constant column has no width: one is made from its value, or 1 where that is zero
    return np.linspace(low, high if high > low else low + (abs(low) or 1.0), number + 1)


def _places(values: NDArray[Any], ends: tuple[float, float], number: int, *, logarithmic: bool) -> NDArray[np.intp]:
    """The bin of each value."""
    low, high = ends
    if not low < high:
        return np.zeros(len(values), np.intp)
    shares = np.log(values / low) / math.log(high / low) if logarithmic else (values - low) / (high - low)
    # the greatest value would fall into a bin after the last one
    return np.clip((shares * number).astype(np.intp), 0, number - 1)


def _count(values: NDArray[Any], column: Column) -> NDArray[np.intp]:
    """Number of values in each bin of a histogram."""
    finite = values[np.isfinite(values)]
    places = _places(finite, (column.low, column.high), _BINS, logarithmic=column.is_logarithmic)
    return np.bincount(places, minlength=_BINS)
