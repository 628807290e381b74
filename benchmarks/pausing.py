"""A backend for the kill run: it takes some milliseconds per point, answers from a formula and keeps a log.

`KILLS_LOG` names the log: a line per evaluation, written when it is complete, by one append. `KILLS_PACE` stretches
the time that an evaluation takes. Neither makes a difference to a result.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from dse.backend import Batch, Columns, Interval, Metric, Replay, Result, Results, Tree
from dse.errors import Problem, validate_as
from dse.values import Frozen
from dse.values.units import Integer


class Point(Frozen):
    """What is explored. salt: makes a study's points its own."""

    x: Integer
    y: Integer
    salt: Integer


class Design(Frozen):
    """One point of the space."""

    point: Point


def formula(x: int, y: int, salt: int) -> dict[str, float] | None:
    """Metrics of a point; None where it is infeasible."""
    if (x + 3 * y + salt) % 41 == 0:
        return None
    return {"time_s": 1.0 + math.sqrt(7 * x + 1) / (1 + y) + salt / 3, "cost": math.log1p(x * y) + 0.1 * y}


def pause_s(x: int, y: int) -> float:
    """How long evaluating a point takes at pace 1: from 10 to 30 ms."""
    return 0.01 + 0.02 * ((37 * x + 101 * y) % 97) / 96


class PausingBackend:
    """One design per call."""

    metrics: Mapping[str, Metric] = {"time_s": Metric("s", "smaller is better"), "cost": Metric("x", "smaller, too")}
    relations: Mapping[str, Metric] = {"speedup": Metric("x", "time of the baseline / time", goal="maximize")}
    version = "1"
    batch = 1

    def sections(self, tree: Tree) -> None:
        """Whatever there is."""

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """One."""
        return {"all": tree}

    def design(self, tree: Tree) -> Design:
        """The validated point."""
        point = validate_as(Point, tree.get("point"), path="point")
        return Design(point=point)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Those that are infeasible are found out by evaluating them."""
        return []

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """All count."""
        return {} if path.removeprefix("point.") in Point.model_fields else None

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """All are numbers."""
        return True

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Nothing is known before."""
        return [Results.all_alike(Result("ok"), batch.size) for batch in batches]

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Pause, answer, and put it on the log."""
        return [Results.of([_one(design) for design in batch.designs()]) for batch in batches]

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Time of the baseline over time."""
        return {"speedup": baseline["time_s"] / point["time_s"]}

    def replay(self, design: BaseModel) -> Replay:
        """One interval."""
        return Replay((Interval("lane", "all", "task", 0.0, 1.0),), {"task": 1.0})

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """None."""
        return []


def _one(design: BaseModel) -> Result:
    assert isinstance(design, Design)
    x, y = design.point.x, design.point.y
    time.sleep(float(os.environ["KILLS_PACE"]) * pause_s(x, y))
    metrics = formula(**dict(design.point))
    log = os.open(os.environ["KILLS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{x} {y}\n".encode())
    os.close(log)
    return Result("ok", metrics, engine="formula") if metrics else Result("infeasible", reason="x and y do not fit")


BACKEND = PausingBackend
