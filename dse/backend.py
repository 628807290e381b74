"""The one seam between orchestration and simulation.

`dse` sees a backend as something that turns configuration trees into frozen designs and batches of designs into
results. It knows neither GPUs nor schedules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel

from dse.problems import Problem

Status = Literal["ok", "infeasible", "unsupported", "failed", "invalid"]
Tree = Mapping[str, Any]


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
    """What a simulator offers. Batches are the normal case; one design is a batch of one."""

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
        """Rules between parts that this design breaks: it is infeasible, and is never evaluated."""

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Dotted paths and the values they need for knob `path` to count in `tree`; None: no such knob there."""

    def evaluate(self, designs: Sequence[BaseModel]) -> list[Result]:
        """One result per design, in order."""

    def relate(self, point: Mapping[str, float], baseline: Mapping[str, float]) -> Mapping[str, float]:
        """Metrics of a point relative to its baseline (`relations` describes them)."""

    def replay(self, design: BaseModel) -> Replay:
        """Run one design again in full."""

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """(path, value, provenance, source) of every constant that this design rests on."""


def checked(result: Result, metrics: Mapping[str, Metric]) -> Result:
    """The result itself, or `invalid` with the metric that is missing, unknown, not finite or out of range."""
    if result.status != "ok":
        return result
    for name in {**metrics, **result.metrics}:
        fault = _fault(result.metrics.get(name), metrics.get(name))
        if fault:
            return Result("invalid", reason=f"{name} = {result.metrics.get(name)!r}: {fault}", engine=result.engine)
    return result


def _fault(value: object, metric: Metric | None) -> str:
    if metric is None:
        return "is not a metric of this backend"
    if value is None:
        return "is missing"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "is not a finite number"
    return "" if metric.low <= value <= metric.high else f"is outside {metric.low:g}...{metric.high:g}"
