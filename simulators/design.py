"""A design: one point = system x workload x schedule, and what a schedule has to offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, model_validator

from dse.errors import Problem
from dse.values import Frozen, condition, neutral_values
from simulators.graph import TaskGraph
from simulators.system import System
from simulators.workload import Workload


class ScheduleKnobs(Frozen):
    """Base of a schedule's typed knobs. `name` is the configuration's name, `family` the module that lowers it.

    A knob whose `when` does not hold means nothing there and becomes None, so that equal designs are equal.
    ranks: knobs that choose the priority classes of tasks and nothing else; their neutral value has one class for all.
    """

    ranks: ClassVar[tuple[str, ...]] = ()
    name: str
    family: str
    description: str = ""

    @model_validator(mode="after")
    def _drop_inactive(self) -> Self:
        kind = type(self)
        needs = {name: condition(kind, name) for name in kind.model_fields}
        idle = [
            name
            for name, needed in needs.items()
            if any(getattr(self, sibling) != value for sibling, value in needed.items())
        ]
        for name, needed in needs.items():
            if needed and name not in idle and getattr(self, name) is None:
                raise ValueError(f"{name} is needed while {' and '.join(f'{k} = {v}' for k, v in needed.items())}")
        for name in idle:
            object.__setattr__(self, name, None)  # still being built
        return self

    def neutral(self) -> Mapping[str, Any]:
        """Knobs that may change nothing -> the value that then stands for all (see `simulators/idle.py`)."""
        return neutral_values(type(self))


@dataclass(frozen=True)
class Rule:
    """A rule between the parts of a design, looked at for a grid of designs at once.

    broken: where over the grid (True: everywhere). rule, way_out: texts in which `{0}`, `{1}` ... stand for the
    numbers `given`. value: what `path` holds.
    """

    path: str
    broken: ArrayLike
    rule: str
    value: Any = None
    given: tuple[Any, ...] = ()
    way_out: str = ""

    @classmethod
    def of(cls, problem: Problem) -> Rule:
        """A problem that all designs have."""
        plain = (text.replace("{", "{{").replace("}", "}}") for text in (problem.rule, problem.way_out))
        rule, way_out = plain
        return cls(problem.path, True, rule, problem.value, way_out=way_out)

    def problem(self, value: Any, given: Sequence[Any]) -> Problem:
        """The rule as a problem of a design that holds these numbers."""
        return Problem(self.path, self.rule.format(*given), value, self.way_out.format(*given))


def problems(rules: Sequence[Rule]) -> list[Problem]:
    """What is wrong with a single design."""
    return [rule.problem(rule.value, rule.given) for rule in rules if rule.broken]


def reasons(rules: Sequence[Rule], shape: tuple[int, ...]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """(code [B] over a grid of this shape, texts): why each design is infeasible; code 0, "", if it is not."""
    code, texts = np.zeros(shape, np.int32), {"": 0}
    for rule in rules:
        broken = np.broadcast_to(np.asarray(rule.broken, np.bool_), shape)
        if not broken.any():
            continue
        numbers = [rule.value, *rule.given]
        varied = [np.broadcast_to(number, shape)[broken] for number in numbers if np.ndim(number)]
        cases, which = np.unique(np.stack([code[broken], *varied]), axis=1, return_inverse=True)
        found = []
        for before, *values in cases.T.tolist():
            told = iter(values)
            value, *given = (_plain(next(told)) if np.ndim(number) else number for number in numbers)
            text = str(rule.problem(value, given))
            earlier = list(texts)[int(before)]
            found.append(texts.setdefault(f"{earlier}; {text}" if earlier else text, len(texts)))
        code[broken] = np.array(found, np.int32)[which.reshape(-1)]
    return code.reshape(-1), tuple(texts)


def _plain(number: float) -> float | int:
    """A number of a table as it is written."""
    return int(number) if float(number).is_integer() else float(number)


@runtime_checkable
class Schedule(Protocol):
    """A way to run a workload on a system: typed knobs, rules, and the lowering to a task graph.

    Numbers of `system`, `workload` and the schedule itself may be arrays over a grid of designs where they are not
    structural: write equations that broadcast, and one call serves the whole grid.
    """

    name: str
    family: str

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Rules between schedule, system and workload, and where over the grid they are broken."""

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """The task graph of one representative GPU."""


class Design(Frozen):
    """One frozen point of the design space."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    system: System
    workload: Workload
    schedule: Schedule
