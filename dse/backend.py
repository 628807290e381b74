"""The one seam between orchestration and simulation.

`dse` sees a backend as something that turns configuration trees into frozen designs and batches of designs into
results. It knows neither GPUs nor schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.errors import Problem
from dse.values import LABELS, put
from dse.values.grids import along, pieces

Status = Literal["ok", "infeasible", "unsupported", "failed", "invalid"]
STATUSES: tuple[Status, ...] = get_args(Status)  # stored as indices: append only
Tree = Mapping[str, Any]
Columns = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Metric:
    """A named number read off a result: its unit, its goal and its legal range."""

    unit: str
    meaning: str
    goal: Literal["minimize", "maximize"] = "minimize"
    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True)
class Result:
    """Metrics of one design, or the reason why there are none. `engine` says what computed it."""

    status: Status
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    engine: str = ""


@dataclass(frozen=True)
class Batch:
    """Designs that differ in some numbers only: a grid over a design.

    design: the first of them. axes: dotted path -> the values [n] that leaf takes. The designs are the Cartesian
    product in C order: the last path varies fastest. Without axes it is one design.
    """

    design: BaseModel
    axes: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return tuple(len(values) for values in self.axes.values())

    @property
    def size(self) -> int:
        """Number of designs."""
        return math.prod(self.shape)

    def column(self, path: str) -> NDArray[Any]:
        """The values [size] of one axis, design after design."""
        return along(self.axes, path)

    def designs(self) -> Iterator[BaseModel]:
        """One frozen design after the other, for a backend that takes them singly."""
        columns = {path: self.column(path).tolist() for path in self.axes}
        for index in range(self.size):
            design = self.design
            for path, values in columns.items():
                design = put(design, path, values[index])
            yield design

    def at(self, index: int) -> BaseModel:
        """The design at one place of the grid."""
        design = self.design
        for (path, values), place in zip(self.axes.items(), np.unravel_index(index, self.shape), strict=True):
            design = put(design, path, values[place].item())
        return design

    @property
    def arrays(self) -> BaseModel:
        """All designs as one, with an array [size] for each axis."""
        design = self.design
        for path in self.axes:
            design = put(design, path, self.column(path))
        return design

    def split(self, most: int) -> Iterator[Batch]:
        """The same designs in the same order, in batches of at most `most`."""
        if self.size <= most:
            yield self
            return
        for axes in pieces(self.axes, most):
            yield Batch(Batch(self.design, axes).at(0), axes)


@dataclass(frozen=True)
class Results:
    """Results of the B designs of a batch, as columns.

    status [B]: index into `STATUSES`. metrics: a column [B] each, NaN where a design has none. reason, engine [B]:
    index into `texts`, whose first entry is "".
    """

    status: NDArray[np.uint8]
    metrics: Mapping[str, NDArray[np.float64]]
    reason: NDArray[np.int32]
    engine: NDArray[np.int32]
    texts: tuple[str, ...] = ("",)

    @property
    def size(self) -> int:
        """B."""
        return len(self.status)

    def __getitem__(self, index: int) -> Result:
        status = STATUSES[self.status[index]]
        metrics = {name: float(column[index]) for name, column in self.metrics.items()} if status == "ok" else {}
        return Result(status, metrics, self.texts[self.reason[index]], self.texts[self.engine[index]])

    @classmethod
    def of(cls, rows: Sequence[Result]) -> Self:
        """Columns of results that were obtained one by one; what is no number is kept for `check_results` to name."""
        texts = {"": 0}
        reason = [texts.setdefault(row.reason, len(texts)) for row in rows]
        engine = [texts.setdefault(row.engine, len(texts)) for row in rows]
        names = dict.fromkeys(name for row in rows for name in row.metrics)
        metrics = {name: _column(name, rows) for name in names}
        status = np.array([STATUSES.index(row.status) for row in rows], np.uint8)
        return cls(status, metrics, np.array(reason, np.int32), np.array(engine, np.int32), tuple(texts))

    @classmethod
    def all_alike(cls, result: Result, size: int) -> Results:
        """`size` times a result that holds no metrics."""
        return cls.of([result]).take(np.zeros(size, np.intp))

    @classmethod
    def join(cls, parts: Sequence[Results]) -> Results:
        """The results of all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        texts = {"": 0}
        codes = [np.array([texts.setdefault(text, len(texts)) for text in part.texts], np.int32) for part in parts]
        names = dict.fromkeys(name for part in parts for name in part.metrics)
        return cls(
            np.concatenate([part.status for part in parts]),
            {name: np.concatenate([part.column(name) for part in parts]) for name in names},
            np.concatenate([code[part.reason] for code, part in zip(codes, parts, strict=True)]),
            np.concatenate([code[part.engine] for code, part in zip(codes, parts, strict=True)]),
            tuple(texts),
        )

    def take(self, places: slice | NDArray[np.integer[Any]]) -> Results:
        """Some of the results, in the order of `places`."""
        metrics = {name: column[places] for name, column in self.metrics.items()}
        return replace(
            self, status=self.status[places], metrics=metrics, reason=self.reason[places], engine=self.engine[places]
        )

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Marks [B] of the designs that have metrics."""
        return np.asarray(self.status == STATUSES.index("ok"))

    def column(self, name: str) -> NDArray[np.float64]:
        """One metric [B], NaN throughout where no design has it."""
        return self.metrics[name] if name in self.metrics else np.full(self.size, math.nan)


def _column(name: str, rows: Sequence[Result]) -> NDArray[Any]:
    values = [row.metrics.get(name) if row.status == "ok" else math.nan for row in rows]
    return np.fromiter(values, float if all(map(_is_number, values)) else object, len(values))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Interval:
    """One task of a replayed design: its lane, kind, time [s], bytes moved and FLOP; delay_s: setup at its start."""

    lane: str
    name: str
    kind: str
    start_s: float
    finish_s: float
    moved_bytes: float = 0.0
    flop: float = 0.0
    delay_s: float = 0.0


@dataclass(frozen=True)
class Replay:
    """One design in full: its intervals, and the share of the makespan each limiter has on the critical path."""

    intervals: tuple[Interval, ...]
    limits: Mapping[str, float]


@runtime_checkable
class Simulator(Protocol):
    """The four members that a backend must have. Batches are the normal case; one design is a batch of one."""

    version: str
    metrics: Mapping[str, Metric]

    def design(self, tree: Tree) -> BaseModel:
        """The validated design of one tree. Raises ConfigError with every problem."""

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Results of each batch, in order; a design that breaks a rule is `infeasible` and is not simulated."""


class Backend:
    """A simulator with everything that it may offer beside what it must; the defaults are here, and only here.

    A backend may derive from this class; one that does not is given these defaults where it has no such member
    (`complete`). batch: how many designs it likes to be given in one call. relations: metrics relative to a baseline.
    bounds: metrics that `bound` adds to a finished point. is_isolated: designs are evaluated in worker processes from
    the start, so that one that ends its process does not end this one. takes_any_keys: designs are sections of any
    keys, of which those with dots are paths.
    """

    version: str
    metrics: Mapping[str, Metric]
    relations: Mapping[str, Metric] = MappingProxyType({})
    bounds: Mapping[str, Metric] = MappingProxyType({})
    batch: int = 1
    is_isolated: bool = False
    takes_any_keys: bool = False

    @property
    def described(self) -> Mapping[str, Metric]:
        """All columns of numbers of a finished point: metrics, relations and bounds."""
        return {**self.metrics, **self.relations, **self.bounds}

    def design(self, tree: Tree) -> BaseModel:
        """See `Simulator.design`."""
        raise NotImplementedError

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """See `Simulator.evaluate`."""
        raise NotImplementedError

    def absence(self) -> str:
        """Why nothing can be evaluated on this machine, with the way out; "" where it can, as by default."""
        return ""

    def sections(self, tree: Tree) -> None:
        """Raise ConfigError unless a tree holds the sections of a design and no others; `design` does so by default."""

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """The base design trees of a configuration, by scenario; one, named `base`, by default. Raises ConfigError."""
        return {"base": tree}

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Rules between parts that this design breaks: it is infeasible. None by default."""
        return []

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Dotted paths and the values they need for knob `path` to count in `tree`; None: no such knob there.

        A value may be a bound (`dse.values.AtLeast`, `AtMost`), which must itself be a legal value.
        By default every leaf of the tree that is no label may be a knob, and always counts.
        """
        if path.rpartition(".")[2] in LABELS:
            return None
        node: Any = tree
        for name in path.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return None
            node = node[name]
        return None if isinstance(node, Mapping) else {}

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """True if the leaf at `path` of such a design is a number that may be an axis of a batch; by default it is not.

        Whether a value of it is legal must depend on that value alone; rules between values belong to `problems`.
        """
        return False

    def takes_long(self, design: BaseModel) -> bool:
        """Whether designs like this one take seconds: each is evaluated, and recorded, in a call of its own."""
        return False

    def num_tasks(self, design: BaseModel) -> int:
        """Number of tasks, and laws between them, that one run of a design simulates, on any machine; 1 by default."""
        return 1

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Results of each batch, in order, as far as they are known before anything is simulated; cheap.

        `infeasible`, with the reason that `evaluate` would give, where a rule of `problems` is broken; else `ok`,
        without metrics: `evaluate` may still find that such a design is none. By default each design is asked.
        """
        if type(self).problems is Backend.problems:
            return [Results.all_alike(Result("ok"), batch.size) for batch in batches]
        return [Results.of([self.refusal(design) or Result("ok") for design in batch.designs()]) for batch in batches]

    def refusal(self, design: BaseModel) -> Result | None:
        """The result of a design that breaks rules of `problems`; None where it breaks none."""
        reason = "; ".join(map(str, self.problems(design)))
        return Result("infeasible", reason=reason) if reason else None

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Metrics of points [B] relative to their baselines [B] (`relations` describes them); none by default."""
        return {}

    def bound(self, batch: Batch, metrics: Columns) -> Columns:
        """What is proven of the designs of a batch [B], with their metrics (`bounds` describes it); none by default."""
        return {}

    def binding(self, design: BaseModel) -> tuple[float, str] | None:
        """What `bound` proves of all schedules of one design [s], and what it comes from; None by default."""
        return None

    def replay(self, design: BaseModel) -> Replay:
        """One design, run again in full; without intervals by default."""
        return Replay((), {})

    def timeline(self, design: BaseModel) -> Any:
        """The task graph of a design, and when its engine runs each task; None by default, where there is none."""
        return None

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """(path, value, provenance, source) of every constant that this design rests on; none by default."""
        return []

    def models(self, design: BaseModel) -> Mapping[str, str]:
        """Map kinds of operators to the names of the models by which this design costs them; none by default."""
        return {}


def complete(kind: Callable[..., Any]) -> Callable[..., Backend]:
    """The class of a simulator, with the defaults of `Backend` where it has no such member."""
    if not isinstance(kind, type) or issubclass(kind, Backend):  # a function that makes one returns what it returns
        return kind
    return type(kind.__name__, (kind, Backend), {"__module__": kind.__module__})  # its own members come first


@dataclass(frozen=True)
class Law:
    """A relation between metrics that physics, or their definition, demands of every result.

    text: the relation, as it is told where it is broken. lower, upper: the two sides [B], from metrics [B] that are all
    there; lower must not exceed upper, but for rounding (`equal`: must equal it).
    """

    text: str
    lower: Callable[[Columns], NDArray[np.float64]]
    upper: Callable[[Columns], NDArray[np.float64]]
    equal: bool = False

    def broken(self, columns: Columns) -> NDArray[np.bool_]:
        """Marks [B] of the results that break it; a side that is NaN breaks nothing."""
        lower, upper = self.lower(columns), self.upper(columns)
        excess = np.abs(lower - upper) if self.equal else lower - upper
        if not excess.size or excess.max() <= _ROUNDING * max(0.0, float(upper.min())):  # less than the least slack
            return np.zeros(excess.shape, np.bool_)
        return np.asarray(excess > _ROUNDING * np.maximum(np.abs(lower), np.abs(upper)))


_ROUNDING = 1e-9  # of the larger side
_AT_ONCE = 16_384  # results whose sides are computed together: they stay in the cache
_SIGNED_ZERO = np.iinfo(np.int64).min  # the bits of -0.0


@runtime_checkable
class Lawful(Protocol):
    """A backend with relations that its metrics obey whatever the design."""

    laws: Sequence[Law]


@runtime_checkable
class Canonical(Protocol):
    """A backend with knobs whose value changes nothing in some designs."""

    def neutral(self, design: BaseModel) -> Mapping[str, Any]:
        """Dotted path -> the value that stands for all others where the leaf changes nothing; cheap."""

    def idle(self, batches: Sequence[Batch], path: str, value: Any) -> Sequence[NDArray[np.bool_]]:
        """For each batch, at which of its designs [B] the leaf at `path` may be `value` with the same result, but for
        rounding.
        """


def check_results(results: Results, metrics: Mapping[str, Metric]) -> Results:
    """The results, those `invalid` (with the reason) whose metric is missing, unknown, not finite or out of range.

    A zero has no sign: -0.0 is 0.0, or two equal results would differ.
    """
    ok = results.ok
    legal = {name: _legal(column, metrics.get(name), ok) for name, column in results.metrics.items()}
    kept = {name: column for name, column in legal.items() if column is not None}
    if len(kept) == len(legal) and (kept.keys() == metrics.keys() or not ok.any()):
        return replace(results, metrics=kept)
    columns = {name: results.metrics.get(name) for name in {**metrics, **results.metrics}}
    wrong = {name: _wrong(column, metrics.get(name), ok) for name, column in columns.items()}
    status, reason = results.status.copy(), results.reason.copy()
    codes = {text: code for code, text in enumerate(results.texts)}
    for name, bad in wrong.items():
        for index in np.flatnonzero(bad & (status == STATUSES.index("ok"))):
            text = _fault(name, columns[name], index=int(index), metric=metrics.get(name))
            status[index] = STATUSES.index("invalid")
            reason[index] = codes.setdefault(text, len(codes))
    fine = status == STATUSES.index("ok")
    given = {name: column for name in metrics if (column := columns[name]) is not None}
    numbers = {name: np.where(fine, _numbers(column) + 0.0, math.nan) for name, column in given.items()}
    return Results(status, numbers, reason, results.engine, tuple(codes))


def _legal(column: NDArray[Any], metric: Metric | None, ok: NDArray[np.bool_]) -> NDArray[np.float64] | None:
    """A column whose values are all finite and in range where they count, with zeros without a sign; or None."""
    if metric is None or column.dtype != np.float64:
        return None
    values = (column if column.strides[0] else column[:1]) if ok.all() else column[ok]  # one value stands for all
    low, high = float(values.min(initial=math.inf)), float(values.max(initial=-math.inf))  # NaN where one is
    if values.size and not (metric.low <= low and high <= metric.high and math.isfinite(low) and math.isfinite(high)):
        return None
    return column + 0.0 if low <= 0.0 <= high and values.view(np.int64).min() == _SIGNED_ZERO else column


def check_laws(results: Results, laws: Sequence[Law]) -> Results:
    """The results, those `invalid` (with the law) whose metrics cannot be true together."""
    status, reason, texts = results.status.copy(), results.reason.copy(), list(results.texts)
    marks = np.zeros(results.size, np.bool_)
    for law in laws if results.ok.any() else ():
        for first in range(0, results.size, _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            marks[part] = law.broken({name: column[part] for name, column in results.metrics.items()})
        broken = results.ok & marks
        status[broken], reason[broken] = STATUSES.index("invalid"), len(texts)
        texts.append(f"cannot be true: {law.text} does not hold")
    if np.array_equal(status, results.status):
        return results
    fine = status == STATUSES.index("ok")
    metrics = {name: np.where(fine, column, math.nan) for name, column in results.metrics.items()}
    return replace(results, status=status, metrics=metrics, reason=reason, texts=tuple(texts))


def _wrong(column: NDArray[Any] | None, metric: Metric | None, ok: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Marks [B] of the designs whose value is not to be believed."""
    if metric is None or column is None:
        is_given = np.ones(len(ok), bool) if column is None or column.dtype != object else column != None  # noqa: E711
        return np.asarray(ok & is_given)
    values = _numbers(column)
    return np.asarray(ok & ~(np.isfinite(values) & (metric.low <= values) & (values <= metric.high)))


def _numbers(column: NDArray[Any]) -> NDArray[np.float64]:
    """A column as floats, NaN for what is no number."""
    if column.dtype.kind in "iuf":
        return column.astype(np.float64, copy=False)
    return np.array([value if _is_number(value) else math.nan for value in column.tolist()], float)


def _fault(name: str, column: NDArray[Any] | None, *, index: int, metric: Metric | None) -> str:
    value = None if column is None else column[index]
    value = value.item() if isinstance(value, np.generic) else value  # a NumPy scalar's own text says its type
    if metric is None:
        rule = "is not a metric of this backend"
    elif value is None:
        rule = "is missing"
    elif not _is_number(value) or not math.isfinite(value):
        rule = "is not a finite number"
    else:
        rule = f"is outside {metric.low:g}...{metric.high:g}"
    return f"{name} = {value!r}: {rule}"
