"""A design: one point = system x workload x schedule, and what a schedule has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

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

    @model_validator(mode="before")
    @classmethod
    def _drop_inactive(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        idle = [
            name
            for name in cls.model_fields
            if name in tree and any(tree.get(k) != v for k, v in condition(cls, name).items())
        ]
        return {**tree, **dict.fromkeys(idle)}


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
