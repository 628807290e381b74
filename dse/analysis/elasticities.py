"""Elasticities of a run's answer: what one percent more of each number of the machine does to the winners.

A backend that knows how its time changes says so on either side of a design; of any other one, the objective is
evaluated a little beside each number that may be an axis (`dse.analysis.one_sided`). Where the sides differ, the number
is at a kink.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel

from dse.analysis.one_sided import KINK, beside, elasticity
from dse.analysis.perturbation import Constant, RunPoints, evaluate_batches, legal
from dse.analysis.standings import ScenarioStanding
from dse.backend import Batch
from dse.space import get_path
from dse.values import leaves
from dse.values.units import quantity_text

if TYPE_CHECKING:
    from rich.table import Table

MAKESPAN = "makespan_s"  # what a backend that is `Elastic` knows about
_STEP = 1e-3  # relative: a number that may not be moved by so much on a side has no elasticity there
_NONE = 1e-6  # elasticity that is none, or of sides that are alike
_SHOWN = 12  # numbers in a table and in a figure

Side = tuple[str, int]
"""Path of a number, and the side on which it changes: -1 below its value, 1 above."""


@runtime_checkable
class Elastic(Protocol):
    """A backend that knows how its time changes with a number of a design."""

    def elasticities(self, design: BaseModel, sides: Sequence[Side]) -> Sequence[float] | None:
        """d log makespan / d log number on each side; NaN where the makespan jumps. None where it is not known."""


@dataclass(frozen=True)
class Elasticity:
    """Change of a metric of a scenario's winner [%] for 1 % more of a number, `below` and `above` its value.

    NaN on a side on which the metric jumps, or the model does not accept the number. exact: a derivative that the
    backend knows, not a difference.
    """

    scenario: str
    metric: str
    exact: bool
    path: str
    value: float
    below: float
    above: float

    @property
    def known(self) -> bool:
        """True if a side has an elasticity."""
        return not (math.isnan(self.below) and math.isnan(self.above))

    @property
    def size(self) -> float:
        """The larger of both sides, without its sign."""
        return max(abs(side) for side in (self.below, self.above, 0.0) if not math.isnan(side))

    @property
    def mean(self) -> float:
        """Mean of the sides that have one; NaN where none has."""
        return float(np.nanmean([self.below, self.above])) if self.known else math.nan

    @property
    def kink(self) -> bool:
        """True if the sides differ."""
        return abs(self.above - self.below) > (_NONE if self.exact else KINK)

    def row(self) -> dict[str, Any]:
        """Return a row of `elasticities.csv`."""
        return {
            "scenario": self.scenario,
            "metric": self.metric,
            "exact": self.exact,
            "number": self.path,
            "value": self.value,
            "below": self.below,
            "above": self.above,
            "kink": self.kink,
        }

    def json(self) -> dict[str, Any]:
        """Return an entry of `elasticities` in `robustness.json`, null where a side is none."""
        return {name: None if value != value else value for name, value in self.row().items()}


def elasticities(run_points: RunPoints, standings: Sequence[ScenarioStanding], objective: str) -> list[Elasticity]:
    """Elasticities of each scenario's winner, for all numbers of its machine that its metric depends on.

    Of the makespan where the backend knows its derivatives, else of the objective, by differences. Empty where no
    number of the machine may be an axis.
    """
    backend, rows, legal_sides = run_points.plan.backend, list[Elasticity](), dict[Side, bool]()
    for standing in standings:
        design = run_points.designs[standing.point]
        values = dict(_numbers(run_points, design))
        both = [(path, sign) for path in values for sign in (-1, 1)]
        # the same numbers in every scenario: asked once
        legal_sides |= {side: _is_legal(run_points, side) for side in both if side not in legal_sides}
        sides = [side for side in both if legal_sides[side]]
        exact = backend.elasticities(design, sides) if isinstance(backend, Elastic) else None
        metric = objective if exact is None else MAKESPAN
        sloped = _differences(run_points, design, sides, objective) if exact is None else exact
        slopes = dict(zip(sides, sloped, strict=True))
        for path, value in values.items():
            below, above = (slopes.get((path, sign), math.nan) for sign in (-1, 1))
            rows.append(Elasticity(standing.scenario, metric, exact is not None, path, value, below, above))
    moving = {row.path for row in rows if row.size > _NONE}
    return [row for row in rows if row.path in moving]


def _differences(run_points: RunPoints, design: BaseModel, sides: Sequence[Side], objective: str) -> list[float]:
    """Elasticity of the objective on each side of a number, by differences."""
    axes = [{path: beside(get_path(design, path), sign)} for path, sign in sides]
    batches = [Batch(design, axis) for axis in axes]
    column = evaluate_batches(run_points, batches, {objective: "minimize"}, lambda _: None)
    values = column.reshape(len(sides), 3)  # the number itself, one step and two
    return [float(elasticity(row, sign)) for row, (_, sign) in zip(values, sides, strict=True)]


def _numbers(run_points: RunPoints, design: BaseModel) -> Iterator[tuple[str, float]]:
    """Numbers of the machine [path, value] that may vary smoothly."""
    for path, value, _ in leaves(design):
        # of the machine; a number of 0 has no logarithm
        if not path.startswith("system.") or not isinstance(value, float) or not value or not math.isfinite(value):
            continue
        if get_path(design, path) == value and run_points.plan.backend.is_axis(path, design):
            yield path, value


def _is_legal(run_points: RunPoints, side: Side) -> bool:
    """Return whether the model accepts a number a little beside its value."""
    path, sign = side
    return legal(run_points, Constant(path, _STEP, whole=False), np.array([1 + sign * _STEP])).size > 0


def strongest(rows: Sequence[Elasticity]) -> list[tuple[str, list[Elasticity]]]:
    """Elasticities that are known by number, those that matter most in some scenario first, as many as are shown."""
    by_path: dict[str, list[Elasticity]] = {}
    for row in (row for row in rows if row.known):
        by_path.setdefault(row.path, []).append(row)
    return sorted(by_path.items(), key=lambda item: -max(row.size for row in item[1]))[:_SHOWN]


def table(rows: Sequence[Elasticity]) -> Table:
    """Table of the numbers that matter most: least, median and largest elasticity over scenarios, and kinks."""
    from rich.table import Table

    how = "" if all(row.exact for row in rows) else ", by differences"
    shown = Table(title=f"what 1 % more of a number does to {rows[0].metric} of the winners [%{how}]")
    shown.add_column("number", no_wrap=True)
    for name in ("now", "least", "median", "most", "kinks"):
        shown.add_column(name, justify="right")
    for path, group in strongest(rows):
        means = sorted(row.mean for row in group)
        # no -0.000
        cells = [f"{round(value, 3) + 0.0:+.3f}" for value in (means[0], means[len(means) // 2], means[-1])]
        kinks = sum(row.kink for row in group)
        shown.add_row(path, quantity_text(group[0].value, path), *cells, str(kinks) if kinks else "")
    return shown
