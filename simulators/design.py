"""A design: one point = system x workload x schedule, and what a schedule has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from pydantic import ConfigDict, model_validator

from dse.problems import Problem
from dse.values import Frozen, condition
from simulators.graph import TaskGraph
from simulators.system import System
from simulators.workload import Workload


class ScheduleKnobs(Frozen):
    """Base of a schedule's typed knobs. `name` is the configuration's name, `family` the module that lowers it.

    A knob whose `when` does not hold means nothing there and becomes None, so that equal designs are equal.
    """

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


@runtime_checkable
class Schedule(Protocol):
    """A way to run a workload on a system: typed knobs, rules, and the lowering to a task graph.

    Numbers of `system`, `workload` and the schedule itself may be arrays [designs] where they are not structural:
    one call lowers a whole batch to one structure with weight arrays.
    """

    name: str
    family: str

    def problems(self, system: System, workload: Workload) -> Sequence[Problem]:
        """Rules between schedule, system and workload that are broken (scalars only)."""

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """The task graph of one representative GPU."""


class Design(Frozen):
    """One frozen point of the design space."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    system: System
    workload: Workload
    schedule: Schedule
