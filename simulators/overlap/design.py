"""A design (one point = system x workload x schedule), what a schedule is, and the models that cost its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, model_validator

from dse.errors.rules import Rule
from dse.values import Frozen, condition, neutral_values
from simulators.hardware.machine import System, peak_format
from simulators.hardware.system import ScheduleSystem
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Gemm, Mlp, Workload


@dataclass(frozen=True)
class Bound:
    """A time that no schedule gets below, over the grid of the numbers.

    seconds: the bound [s]. binds: what it comes from, as places in `names`; both arrays of one shape.
    """

    seconds: NDArray[np.float64]
    binds: NDArray[np.intp]
    names: tuple[str, ...]


class ScheduleKnobs(Frozen):
    """Base of a schedule's typed knobs. `name` is the configuration's name, `family` the module that lowers it.

    A knob whose `when` does not hold is inactive and becomes None, so that equivalent designs are equal.
    ranks: knobs that only choose which of two classes of tasks goes first; their neutral value has one class for all.
    gemm_refinement: what a family adds to the model `waves` of a GEMM; it cannot use another model.
    """

    ranks: ClassVar[tuple[str, ...]] = ()
    gemm_refinement: ClassVar[str] = ""
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
            # an active knob without a value would be lowered as nothing
            if needed and name not in idle and getattr(self, name) is None:
                raise ValueError(f"{name} is needed while {' and '.join(f'{k} = {v}' for k, v in needed.items())}")
        for name in idle:
            object.__setattr__(self, name, None)  # still being built
        return self

    def __str__(self) -> str:
        """The name, as tables show it."""
        return self.name

    @property
    def searches(self) -> bool:
        """Whether a part of the schedule is searched for, by `settle`, for each system and workload."""
        return False

    def settle(self, system: System, workload: Workload) -> Self:
        """The schedule with all that it leaves to system and workload; numbers are no arrays."""
        return self

    def bound(self, system: System, workload: Workload) -> Bound | None:
        """A time that no schedule with the same means gets below; None where only those of this design's tasks are
        bounded, in whatever order.
        """
        return None

    def neutral(self) -> Mapping[str, Any]:
        """Map knobs that may change nothing to their representative value (see `simulators/overlap/idle_knobs.py`)."""
        return neutral_values(type(self))


@runtime_checkable
class Schedule(Protocol):
    """Schedule of a workload on a system: typed knobs, rules, and the lowering to a task graph.

    Numbers of `system`, `workload` and the schedule itself may be arrays over a grid of designs where they are not
    structural: write equations that broadcast, and one call serves the whole grid.
    """

    name: str
    family: str

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Rules between schedule, system and workload, with a mask over the grid of the designs that break them."""

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Build the task graph of one representative GPU."""


class OverlapDesign(Frozen):
    """One frozen point of the design space."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    system: ScheduleSystem
    workload: Workload
    schedule: Schedule


def model_names(design: OverlapDesign) -> Mapping[str, str]:
    """Operator -> name of the model of its cost, with what the schedule's family refines."""
    refinement = getattr(design.schedule, "gemm_refinement", "")
    models = sorted({design.system.gemm_model(precision) for precision in gemm_precisions(design.workload)})
    gemm = ", ".join(models) + (f" with {refinement}" if refinement else "")
    return {"gemm": gemm, "collective": design.system.costs.collective}


def model_rules(system: System, workload: Workload, schedule: Schedule) -> Iterator[Rule]:
    """Rules on what the chosen models need: constants or peaks of every precision, a measured library."""
    gpu, models = system.gpu, system.costs
    refinement = getattr(schedule, "gemm_refinement", "")
    fitted = [precision for precision in gemm_precisions(workload) if system.gemm_model(precision) != "waves"]
    if refinement and fitted:
        rule = f"has no {refinement} at {', '.join(fitted)}, which schedule.family = {schedule.family} needs"
        yield Rule("system.costs.gemm", True, rule, models.gemm, way_out="use system.costs.gemm=waves")
    for precision in gemm_precisions(workload):
        if system.gemm_model(precision) == "fitted" or gpu.peak_ratio(precision) is not None:
            continue
        if models.gemm == "fitted":
            way = "take another precision or GPU, or fit them: python -m dse machine calibrate"
            rule = "is missing: a GEMM of the workload has this precision"
            yield Rule(f"system.gpu.efficiency.{precision}", True, rule, way_out=way)
        else:
            rule = "is missing: a GEMM of the workload has this precision"
            way = "take another precision or GPU, or give the peak with its source"
            yield Rule(f"system.gpu.peak_flop_per_s.{peak_format(precision)}", True, rule, way_out=way)
    if models.collective == "library" and system.node.library is None and system.node.num_gpus > 1:
        way = "use system.costs.collective=links, or give what the library reaches"
        yield Rule("system.node.library", True, "is missing: costs.collective = library reads it", way_out=way)


def fact_test(design: OverlapDesign) -> Callable[[str], bool]:
    """Return whether a design reads the constant at a path: fitted ones of its precisions, tiles, or of the switch."""
    uses_switch = getattr(design.schedule, "mover", None) == "switch"
    models = {precision: design.system.gemm_model(precision) for precision in gemm_precisions(design.workload)}

    def reads(path: str) -> bool:
        if path.startswith("system.node.in_switch."):
            return uses_switch
        if path.startswith("system.gpu.gemm."):
            return "waves" in models.values()
        return not path.startswith("system.gpu.efficiency.") or models.get(path.split(".")[3]) == "fitted"

    return reads


def gemm_precisions(workload: Workload) -> list[str]:
    """Precisions of a workload's GEMMs, sorted."""
    return sorted({op.precision for op in workload.operators.values() if isinstance(op, Gemm | Mlp)})
