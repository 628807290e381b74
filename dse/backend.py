"""The one seam between orchestration and simulation.

`dse` sees a backend as something that turns configuration trees into frozen designs and batches of designs into
results. It knows neither GPUs nor schedules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.problems import Problem
from dse.values import put

Status = Literal["ok", "infeasible", "unsupported", "failed", "invalid"]
STATUSES: tuple[Status, ...] = get_args(Status)
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
        place = list(self.axes).index(path)
        along = [1] * len(self.axes)
        along[place] = -1
        return np.broadcast_to(self.axes[path].reshape(along), self.shape).reshape(-1)

    def designs(self) -> Iterator[BaseModel]:
        """One frozen design after the other, for a backend that takes them singly."""
        columns = {path: self.column(path).tolist() for path in self.axes}
        for index in range(self.size):
            design = self.design
            for path, values in columns.items():
                design = put(design, path, values[index])
            yield design

    def split(self, most: int) -> Iterator[Batch]:
        """The same designs in the same order, in batches of at most `most`."""
        if self.size <= most:
            yield self
            return
        path = next(path for path, values in self.axes.items() if len(values) > 1)
        values = self.axes[path]
        step = max(1, most // (self.size // len(values)))
        for first in range(0, len(values), step):
            part = values[first : first + step]
            piece = Batch(put(self.design, path, part[0].item()), {**self.axes, path: part})
            yield from piece.split(most)


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
        found = {name: float(column[index]) for name, column in self.metrics.items()} if status == "ok" else {}
        return Result(status, found, self.texts[self.reason[index]], self.texts[self.engine[index]])

    @classmethod
    def of(cls, rows: Sequence[Result]) -> Self:
        """Columns of results that were obtained one by one."""
        texts = {"": 0}
        reason = [texts.setdefault(row.reason, len(texts)) for row in rows]
        engine = [texts.setdefault(row.engine, len(texts)) for row in rows]
        names = dict.fromkeys(name for row in rows for name in row.metrics)
        metrics = {name: np.array([row.metrics.get(name, math.nan) for row in rows], float) for name in names}
        status = np.array([STATUSES.index(row.status) for row in rows], np.uint8)
        return cls(status, metrics, np.array(reason, np.int32), np.array(engine, np.int32), tuple(texts))


@dataclass(frozen=True)
class Interval:
    """One task of a replayed design: the lane it is drawn on, its kind, when it ran [s] and what it moved."""

    lane: str
    name: str
    kind: str
    start_s: float
    finish_s: float
    moved_bytes: float = 0.0
    flop: float = 0.0


@dataclass(frozen=True)
class Replay:
    """One design in full: its intervals, and the share of the makespan each limiter has on the critical path."""

    intervals: tuple[Interval, ...]
    limits: Mapping[str, float]


@runtime_checkable
class Backend(Protocol):
    """What a simulator offers. Batches are the normal case; one design is a batch of one.

    batch: how many designs it likes to be given in one call.
    """

    version: str
    metrics: Mapping[str, Metric]
    relations: Mapping[str, Metric]
    batch: int

    def sections(self, tree: Tree) -> None:
        """Check that a configuration holds the sections of a design and no others. Raises ConfigError."""

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """The base design trees of a configuration, by scenario. Raises ConfigError."""

    def design(self, tree: Tree) -> BaseModel:
        """The validated design of one tree. Raises ConfigError with every problem."""

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Rules between parts that this design breaks: it is infeasible."""

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Dotted paths and the values they need for knob `path` to count in `tree`; None: no such knob there."""

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """Whether the leaf at `path` of such a design is a number that may be an axis of a batch."""

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Results of each batch, in order; a design that breaks a rule is `infeasible` and is not simulated."""

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Metrics of points [B] relative to their baselines [B] (`relations` describes them)."""

    def replay(self, design: BaseModel) -> Replay:
        """Run one design again in full."""

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """(path, value, provenance, source) of every constant that this design rests on."""


def checked(results: Results, metrics: Mapping[str, Metric]) -> Results:
    """The results, those `invalid` (with the reason) whose metric is missing, unknown, not finite or out of range."""
