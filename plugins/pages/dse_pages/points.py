"""Points of a table for charts: numbers as they are, texts as codes, names and units as a person reads them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.plots.labels import looks, words
from dse.results.report import SERIAL

if TYPE_CHECKING:
    import pyarrow as pa

MOST_LOOKS = 24
"""Values of a column that has a colour and a marker for each."""
MOST_CATEGORIES = 500
"""Values of a column of texts that can be chosen one by one."""
_ABOUT = ("key", "status", "reason", "engine", "baseline", "on_front", "explored", "promoted")
# a dash for an empty text or a null, as a category of its own that can be filtered
_MISSING = "–"
_MARKER_SHAPES = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "<": "triangle-left",
    ">": "triangle-right",
    "P": "cross",
    "X": "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z",
    "h": "M0,-1L.87,-.5L.87,.5L0,1L-.87,.5L-.87,-.5Z",
    "p": "M0,-1L.95,-.31L.59,.81L-.59,.81L-.95,-.31Z",
    "*": "M0,-1L.22,-.31L.95,-.31L.36,.12L.59,.81L0,.38L-.59,.81L-.36,.12L-.95,-.31L-.22,-.31Z",
    "8": "M-.41,-1L.41,-1L1,-.41L1,.41L.41,1L-.41,1L-1,.41L-1,-.41Z",
}
"""Marker of matplotlib -> shape of Vega: a name, or a path in a square from -1 to 1."""


@dataclass(frozen=True)
class Column:
    """A column of a table. id: its name in charts and addresses. name: as in the table. title: for people.

    categories: values of a text column in the order of their codes, empty for numbers. low, high: of the numbers.
    role: scenario, knob (searched), setting (recorded beside knobs), objective, relation (a metric that the study
    shows), metric. gaps: whether rows have no number.
    """

    id: str
    name: str
    title: str
    role: str
    unit: str = ""
    goal: str = ""
    categories: tuple[str, ...] = ()
    low: float = math.nan
    high: float = math.nan
    gaps: bool = False

    @property
    def is_text(self) -> bool:
        """True if the column holds texts, as codes."""
        return bool(self.categories)

    @property
    def varies(self) -> bool:
        """True if the column has more than one value."""
        return len(self.categories) > 1 or self.low < self.high

    @property
    def is_logarithmic(self) -> bool:
        """True if the values span so many decades that a linear axis hides the small ones."""
        # beyond a factor of 50 a linear axis squeezes the small values into its first fiftieth
        return self.low > 0 and self.high > 50 * self.low

    def json(self) -> dict[str, Any]:
        """The column as a page reads it."""
        known = ("id", "name", "title", "role", "unit", "goal")
        column: dict[str, Any] = {name: getattr(self, name) for name in known}
        if not self.is_text:
            return {**column, "low": plain(self.low), "high": plain(self.high), "log": self.is_logarithmic}
        column["categories"] = list(self.categories)
        if len(self.categories) <= MOST_LOOKS:
            shown = looks(self.categories).values()
            column["labels"] = [look.label for look in shown]
            column["colours"] = [look.colour for look in shown]
            column["shapes"] = [_MARKER_SHAPES.get(look.marker, "circle") for look in shown]
        return column


@dataclass(frozen=True)
class PagePoints:
    """Rows that have a result. values: id -> numbers [N], or codes [N] of texts. front [N].

    keys: arrow texts of all rows of the table. rows [N]: their places in it.
    """

    columns: tuple[Column, ...]
    values: Mapping[str, NDArray[Any]]
    front: NDArray[np.bool_]
    keys: Any
    rows: NDArray[Any]
    study: str = ""

    @cached_property
    def by_id(self) -> dict[str, Column]:
        """Id -> column."""
        return {column.id: column for column in self.columns}

    def __len__(self) -> int:
        return len(self.front)

    @property
    def scenario(self) -> Column | None:
        """The column of scenarios."""
        return next((column for column in self.columns if column.role == "scenario"), None)

    def of_role(self, *roles: str) -> list[Column]:
        """Columns of some roles."""
        return [column for column in self.columns if column.role in roles]

    def take(self, rows: NDArray[Any], columns: Sequence[Column]) -> dict[str, Any]:
        """Some rows of some columns, ready for JSON: `front`, `keys` (their first letters), and values by id."""
        taken: dict[str, Any] = {column.id: _plain_list(self.values[column.id][rows]) for column in columns}
        # `rows` counts rows with a result, `self.rows` maps them to the table; eight letters suffice to find a point
        keys = [str(key)[:8] for key in self.keys.take(self.rows[rows]).to_pylist()]
        return {"front": self.front[rows].astype(int).tolist(), "keys": keys, "values": taken}


def read_points(table: pa.Table, summary: Mapping[str, Any]) -> PagePoints:
    """The rows of a table that have a result, with its scenarios, knobs and metrics.

    summary: of the run, or nothing where a table stands alone.
    """
    names = [name for name in table.column_names if name not in _ABOUT]
    titles, rows = _titles(names), _with_result(table)
    columns, values = [], {}
    for number, name in enumerate(names):
        kind = {"id": f"c{number}", "name": name, "title": titles[name], "role": _role(name, table, summary)}
        unit, goal = summary.get("units", {}).get(name, ""), summary.get("goals", {}).get(name, "")
        # where the study declares a knob `serial`, an empty value in a row stands for that choice
        missing = SERIAL if summary.get("declared", {}).get(name) == SERIAL else _MISSING
        column, data = _column(table.column(name), rows, {**kind, "unit": unit, "goal": goal}, missing=missing)
        if _is_of_use(column):
            columns.append(column)
            values[column.id] = data
    return PagePoints(tuple(columns), values, _front(table)[rows], _keys(table), rows, str(summary.get("study", "")))


def _with_result(table: pa.Table) -> NDArray[Any]:
    """Numbers of the rows that have a result."""
    import pyarrow.compute as pc

    if "status" not in table.column_names:
        return np.arange(len(table))
    return np.flatnonzero(pc.equal(table.column("status"), "ok").to_numpy())


def _front(table: pa.Table) -> NDArray[np.bool_]:
    there = "on_front" in table.column_names
    return np.asarray(table.column("on_front").to_numpy(), bool) if there else np.zeros(len(table), bool)


def _keys(table: pa.Table) -> Any:
    import pyarrow as pa

    return table.column("key") if "key" in table.column_names else pa.array([""] * len(table))


def _is_of_use(column: Column) -> bool:
    if column.role in ("scenario", "objective"):
        return True
    # a column that never varies would only take room in every menu
    return column.varies and len(column.categories) <= MOST_CATEGORIES


def plain(value: float) -> float | None:
    """A number of six digits; None for what JSON does not know."""
    # six digits are finer than a pixel; all seventeen of a double would swell the page
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _plain_list(values: NDArray[Any]) -> list[Any]:
    if values.dtype.kind != "f":
        return list(values.tolist())
    return [plain(value) for value in values.tolist()]


def _role(name: str, table: pa.Table, summary: Mapping[str, Any]) -> str:
    import pyarrow.types as kinds

    if name == "scenario":
        return name
    if name in summary.get("goals", {}):
        return "objective"
    if name in summary.get("knobs", ()):
        return "knob"
    # a path of the configuration has dots and names a setting; a metric is a plain name with floats
    if "." in name or not kinds.is_floating(table.schema.field(name).type):
        return "setting" if "knobs" in summary else "knob"
    return "relation" if name in summary.get("shown", ()) else "metric"


def _column(
    values: Any, rows: NDArray[Any], named: dict[str, Any], *, missing: str = _MISSING
) -> tuple[Column, NDArray[Any]]:
    """Read a column with its values: truths and texts as codes, integers and floats as numbers."""
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if kinds.is_boolean(values.type):
        values = pc.if_else(values, "yes", "no")
    if not (kinds.is_string(values.type) or kinds.is_large_string(values.type) or kinds.is_dictionary(values.type)):
        return _number_column(values, rows, named)
    coded = values.combine_chunks()
    # dictionary-encoded once by arrow, which takes a fraction of the time of a loop over a million texts
    coded = coded if kinds.is_dictionary(values.type) else coded.dictionary_encode()
    categories = [str(value) or missing for value in coded.dictionary.to_pylist()]
    # nulls take the code after the last text
    codes = np.asarray(coded.indices.fill_null(len(categories)).to_numpy(zero_copy_only=False), np.int32)
    if coded.null_count:
        categories.append(missing)
    return Column(**named, categories=tuple(categories)), _choose(codes, rows)


def _choose(values: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """Some rows; all of them are not copied."""
    return values if len(rows) == len(values) else values[rows]


def _number_column(values: Any, rows: NDArray[Any], named: dict[str, Any]) -> tuple[Column, NDArray[Any]]:
    import pyarrow as pa

    numbers = _choose(np.asarray(values.cast(pa.float64()).to_numpy(), float), rows)
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    return Column(**named, low=low, high=high, gaps=len(finite) < len(numbers)), numbers


def _titles(names: Sequence[str]) -> dict[str, str]:
    """Names for people: the last part of a path without its unit; all of the path where two would be the same."""
    short = {name: words(name) or name for name in names}
    counts = Counter(short.values())
    return {name: title if counts[title] == 1 else name for name, title in short.items()}
