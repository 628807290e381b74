"""Tables of measured operators, in the layout of DeepBench's results: a CSV with a row for each measured operation.

Columns `device, precision, op` name a row; `op` determines the columns that hold its shape and its times [ms]. All
problems of a table are reported at once, by line and column.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from dse.config.options import conf_dir
from dse.errors import Problem, Problems, did_you_mean
from dse.files import check_columns, read_csv
from dse_calibration.foreign import open_table
from simulators.costs.recurrent import GATES
from simulators.hardware.parts import ELEMENT_BYTES, StreamKind

Floats = NDArray[np.float64]

KINDS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("gemm",),
    "conv": ("conv",),
    "recurrent": ("lstm", "gru", "vanilla"),
    "allreduce": ("allreduce",),
}
"""Kind of operator -> legal values of `op`."""
_FILTER = ("r", "s", "stride_v", "stride_h")
_SHAPES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k", "ta", "tb"),
    "conv": ("w", "h", "c", "n", "k", "pad_h", "pad_w", *_FILTER),
    "recurrent": ("hidden", "n", "t"),
    "allreduce": ("floats", "gpus"),
}
_PASSES = ("fwd_ms", "bwd_data_ms", "bwd_filter_ms")
_TIMES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("fwd_ms",),
    "conv": _PASSES,
    "recurrent": _PASSES,
    "allreduce": ("mean_ms",),
}
STREAM_KINDS: tuple[StreamKind, ...] = get_args(StreamKind)
"""Kinds of rows of operators that memory bounds; their shape is `bytes`, which are moved at least."""
_COLUMNS = {"device", "precision", "op", "algo", "total_ms"} | {  # known columns; others are left alone
    name for names in (*_SHAPES.values(), *_TIMES.values()) for name in names
}
_NAMES: Mapping[str, str] = {
    "gemm": "{m}x{n}x{k} {ta}{tb}",
    "conv": "{w}x{h}x{c} n{n} k{k} {r}x{s} pad {pad_h}x{pad_w} stride {stride_v}x{stride_h}",
    "recurrent": "{op} h{hidden} n{n} t{t}",
    "allreduce": "{floats} x {gpus}",
}
FLOAT_BYTES = 4
"""Bytes of the elements in which the size of an all-reduce is counted."""
_LEAST = {"pad_h": 0, "pad_w": 0, "gpus": 2}  # no padding is a size, a ring needs two
_MOST = 2**40  # beyond any size that could be meant
_NOT_MEASURED = re.compile(r"|N/?A\*?|-", re.IGNORECASE)  # as DeepBench's tables write it


@dataclass(frozen=True)
class MeasuredRows:
    """R measured operations of one kind on one device at one precision.

    shape: column -> its values [R] (of a GEMM `ta`, `tb`: 1 if transposed; of a recurrent layer also `gates`).
    seconds [R, passes]: NaN if not measured. names, lines: name and line number of each row. algorithms: the library's
    name of the algorithm of the forward pass; '' if not given. library: name of the library of collectives, where it is
    another than the one of the node. weight_sets: of GEMMs, operands A that the benchmark took in turn. casts: whether
    times of GEMMs are with the cast of their inputs, operand B.
    """

    device: str
    precision: str
    kind: str
    shape: Mapping[str, Floats]
    seconds: Floats
    names: tuple[str, ...]
    lines: tuple[int, ...]
    algorithms: tuple[str, ...]
    library: str = ""
    weight_sets: float = math.inf
    casts: bool = False

    @property
    def size(self) -> int:
        """Number of rows R."""
        return len(self.names)

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the columns of `seconds`."""
        return tuple(name.removesuffix("_ms") for name in _TIMES.get(self.kind, _PASSES[:1]))

    def take(self, places: NDArray[Any]) -> MeasuredRows:
        """Select some of the rows, by index or mask."""
        chosen = np.arange(self.size)[places].tolist()
        return MeasuredRows(
            self.device,
            self.precision,
            self.kind,
            {name: values[chosen] for name, values in self.shape.items()},
            self.seconds[chosen],
            tuple(self.names[place] for place in chosen),
            tuple(self.lines[place] for place in chosen),
            tuple(self.algorithms[place] for place in chosen),
            self.library,
            self.weight_sets,
            self.casts,
        )


def read(path: Path) -> list[MeasuredRows]:
    """Read the rows of a CSV, by device, precision and kind. Raises ConfigError, naming lines and columns.

    Rows of a precision that is unknown are skipped and counted.
    """
    table, unknown = _Table(path), Counter[str]()
    groups = defaultdict[tuple[str, str, str], list[_Row]](list)
    for line, cells in table.rows:
        if cells["precision"] not in ELEMENT_BYTES:  # other rows of the table are still of use
            unknown[cells["precision"]] += 1
            continue
        row = table.row(line, cells)
        if row is not None:
            groups[row.device, row.precision, row.kind].append(row)
    tell_skipped(path, unknown, known=ELEMENT_BYTES)
    if not groups and not table.problems:
        table.note("", "holds no rows")
    table.done()
    if table.filled:
        print(
            f"{path.name}: {table.filled} convolutions have no filter size or stride; they are of DeepBench's list,"
            " which has them",
            file=sys.stderr,
        )
    return [_rows(*key, rows) for key, rows in groups.items()]


def tell_skipped(path: Path, unknown: Mapping[str, int], *, known: Iterable[str]) -> None:
    """Tell on standard error how many rows of a table are skipped, by the precision that is not known."""
    for precision, count in unknown.items():
        hint = did_you_mean(precision, known)
        print(f"{path.name}: {count} rows are skipped: precision {precision!r} is unknown; {hint}", file=sys.stderr)


@dataclass(frozen=True)
class _Row:
    device: str
    precision: str
    kind: str
    op: str
    line: int
    shape: Mapping[str, float]
    times: tuple[float, ...]
    name: str
    algorithm: str


class _Table:
    """A file being read. filled: number of convolutions whose filter was filled in from DeepBench's list."""

    def __init__(self, path: Path) -> None:
        self._path, self._check, self.filled = path, Problems(), 0
        self._seen, self._held = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        self._csv = open_table(path)
        check_columns(self._check, self._csv.columns, ("precision", "op"), f"{path.name}, line {self._csv.header}")
        self.done()  # rows cannot be read without these columns
        for name in self._csv.columns:
            # a time in another unit, which must not be taken for ms
            if name not in _COLUMNS and re.fullmatch(r"(fwd|bwd_data|bwd_filter|total|mean)_\w+", name):
                self.note(f"line {self._csv.header}", "times are in ms", name, did_you_mean(name, _COLUMNS))
        self.done()
        # how often each shape comes, to match DeepBench's list by order
        self._held.update(_convolution(cells) for _, cells in self.rows if cells["op"] == "conv")

    @property
    def rows(self) -> Sequence[tuple[int, Mapping[str, str]]]:
        """(line, cell by column) of every row."""
        return self._csv.rows

    @property
    def problems(self) -> Sequence[Problem]:
        """Problems so far."""
        problems: list[Problem] = self._check.found
        return problems

    def note(self, where: str, rule: str, value: object = None, way_out: str = "") -> None:
        """Note a problem of this file."""
        place = f"{self._path.name}, {where}" if where else self._path.name
        self._check.add(place, rule, value=value, way_out=way_out)

    def done(self) -> None:
        """Raise ConfigError with the first problems, if there are any."""
        self._check.done(self._path.name)

    def row(self, line: int, cells: Mapping[str, str]) -> _Row | None:
        """Parse one row; None if it has problems, which are noted."""
        before, op, precision = len(self.problems), cells["op"], cells["precision"]
        kind = next((kind for kind, ops in KINDS.items() if op in ops), None)
        if kind is None:
            every = [name for ops in KINDS.values() for name in ops]
            self.note(f"line {line}, op", "is no operator that is known", op, did_you_mean(op, every))
        if kind == "allreduce" and precision != "fp32":
            self.note(f"line {line}, precision", "must be fp32: all-reduces are counted in floats", precision)
        if kind is None or len(self.problems) > before:  # a row with a problem is left out; the others are read
            return None
        shape = self._shape(line, kind, cells)
        times = tuple(self._time(line, name, cells) for name in _TIMES[kind])
        if len(self.problems) > before:
            return None
        if not set(_TIMES[kind]) & set(self._csv.columns):
            odd = [column for column in self._csv.columns if column not in _COLUMNS]
            way = f"unknown are {', '.join(odd)}" if odd else ""
            where, names = f"line {self._csv.header}", " or ".join(_TIMES[kind])
            self.note(where, f"has no column {names}, which {op} rows need", way_out=way)
            return None
        if all(math.isnan(time) for time in times):
            self.note(f"line {line}", f"holds no time ({', '.join(_TIMES[kind])})")
            return None
        texts = {name: _text(name, value) for name, value in shape.items()}
        name = _NAMES[kind].format(op=op, **texts)
        device, algorithm = cells.get("device") or self._path.stem, cells.get("algo", "")
        algorithm = "" if _NOT_MEASURED.fullmatch(algorithm) else algorithm
        return _Row(device, precision, kind, op, line, shape, times, name, algorithm)

    def _shape(self, line: int, kind: str, cells: Mapping[str, str]) -> dict[str, float]:
        # DeepBench's results leave out filters and strides
        blank = kind == "conv" and not all(cells.get(name) for name in _FILTER)
        names = [name for name in _SHAPES[kind] if not (blank and name in _FILTER)]
        shape = {name: self._size(line, name, cells) for name in names}
        shape |= self._filter(line, cells) if blank else {}
        for side, filter_, pad in (("h", "r", "pad_h"), ("w", "s", "pad_w")) if kind == "conv" else ():
            if shape[side] + 2 * shape[pad] < shape.get(filter_, 0.0):
                self.note(f"line {line}, {filter_}", "is larger than the padded image", f"{shape[filter_]:.0f}")
        return shape

    def _size(self, line: int, name: str, cells: Mapping[str, str]) -> float:
        where, text = f"line {line}, {name}", cells.get(name)
        if text is None:
            self.note(f"line {self._csv.header}", f"has no column {name}, which {cells['op']} rows need")
            return math.nan
        if name in ("ta", "tb"):
            if text not in ("N", "T"):  # as BLAS names layouts
                self.note(where, "must be N or T", text)
            return float(text == "T")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        least = _LEAST.get(name, 1)
        if not (value.is_integer() and least <= value <= _MOST):
            self.note(where, f"must be a whole number from {least}", text)
        return value

    def _time(self, line: int, name: str, cells: Mapping[str, str]) -> float:
        """Parse a time [s]; NaN if it was not measured."""
        where, text = f"line {line}, {name}", cells.get(name, "")
        if _NOT_MEASURED.fullmatch(text):
            return math.nan
        try:
            value = float(text)
        except ValueError:
            unit = re.fullmatch(r"[\d.eE+-]+\s*([a-zA-Zµ]+)", text)  # a number with its unit is likely in another one
            rule = f"holds the unit {unit[1]}; this column is in ms" if unit else "is no number"
            self.note(where, rule, text, "write the number of milliseconds")
            return math.nan
        if not (math.isfinite(value) and value > 0):
            self.note(where, "must be a positive time in ms", text)
            return math.nan
        return value * 1e-3

    def _filter(self, line: int, cells: Mapping[str, str]) -> dict[str, float]:
        """Filter and stride of a convolution from DeepBench's list, for tables that leave them out."""
        key = _convolution(cells)
        filters, place = _deepbench().get(key, ()), self._seen[key]
        self._seen[key] += 1
        empty = [name for name in _FILTER if not cells.get(name)]
        # several filters of one shape: only whole repetitions of the list can be matched
        if not filters or (len(set(filters)) > 1 and self._held[key] % len(filters)):
            why = "has several of this shape" if filters else "has no such shape"
            way = f"fill them in: DeepBench's list, which they could be taken from, {why}"
            self.note(f"line {line}, {empty[0]}", f"is empty ({', '.join(empty)})", way_out=way)
            return {}
        self.filled += 1
        values = dict(zip(_FILTER, filters[place % len(filters)], strict=True))  # in the order of DeepBench's list
        for name in set(_FILTER) - set(empty):  # cells that are given must agree with the list
            if self._size(line, name, cells) != values[name]:
                self.note(f"line {line}, {name}", f"is not {values[name]:.0f}, as in DeepBench's list", cells[name])
        return values


def _convolution(cells: Mapping[str, str]) -> tuple[str, ...]:
    """Key of a convolution without its filter: image, channels and batch."""
    return tuple(cells.get(name, "").removesuffix(".0") for name in ("w", "h", "c", "n", "k"))


@cache
def _deepbench() -> Mapping[tuple[str, ...], Sequence[tuple[float, ...]]]:
    """Filters and strides of DeepBench's convolutions in its order, by the key of `_convolution`."""
    filters = defaultdict[tuple[str, ...], list[tuple[float, ...]]](list)
    for _, row in read_csv(conf_dir() / "data" / "deepbench_convolutions.csv").rows:
        filters[_convolution(row)].append(tuple(float(row[name]) for name in _FILTER))
    return filters


def _text(name: str, value: float) -> str:
    return ("N", "T")[int(value)] if name in ("ta", "tb") else f"{value:.0f}"


def _rows(device: str, precision: str, kind: str, rows: Sequence[_Row]) -> MeasuredRows:
    shape = {name: np.array([row.shape[name] for row in rows]) for name in _SHAPES[kind]}
    if kind == "recurrent":
        shape["gates"] = np.array([float(GATES[row.op]) for row in rows])
    seconds = np.array([row.times for row in rows], float)
    names, algorithms = (tuple(getattr(row, name) for row in rows) for name in ("name", "algorithm"))
    return MeasuredRows(device, precision, kind, shape, seconds, names, tuple(row.line for row in rows), algorithms)
