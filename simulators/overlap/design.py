"""A design (one point = system x workload x schedule), what a schedule is, and the models that cost its operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dse import plugins
from dse.backend import Tree
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.space import get_path
from dse.space.blocks import Rule
from dse.values import LABELS, Frozen, Memo, condition, neutral_values
from simulators.hardware.machine import System, peak_format, reads
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Gemm, Mlp, Workload, workloads_of


@dataclass(frozen=True)
class Bound:
    """A time that no schedule gets below, over the grid of the numbers.

    seconds: the bound [s]. binds: what it comes from, as places in `names`; both arrays of one shape.
    """

    seconds: NDArray[np.float64]
    binds: NDArray[np.intp]
    names: tuple[str, ...]


Title = Annotated[str, Field(pattern=r'^[A-Za-z0-9_.,:"=+%/\[\]{} -]*$')]
"""A name that stands in tables, in comments of code and in commands: one line of plain characters."""


class ScheduleKnobs(Frozen):
    """Base of a schedule's typed knobs. `name` is the configuration's name, `family` the module that lowers it.

    A knob whose `when` does not hold is inactive and becomes None, so that equivalent designs are equal.
    ranks: knobs that only choose which of two classes of tasks goes first; their neutral value has one class for all.
    gemm_refinement: what a family adds to the model `waves` of a GEMM; it cannot use another model.
    """

    ranks: ClassVar[tuple[str, ...]] = ()
    gemm_refinement: ClassVar[str] = ""
    name: Title
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
    """Operator -> name of the model of its cost, with what the schedule's family refines; `gemm` where there is one."""
    refinement = getattr(design.schedule, "gemm_refinement", "")
    models = sorted({design.system.gemm_model(precision) for precision in gemm_precisions(design.workload)})
    gemm = ", ".join(models) + (f" with {refinement}" if refinement else "")
    return ({"gemm": gemm} if models else {}) | {"collective": design.system.costs.collective}


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


_MOST_SEEN = 4096  # trees that are cached by identity
_MOST_PARTS = 512  # parts that are cached: a system takes 25 kB


class DesignReader:
    """Reader of trees: what describes the same part gives the same object, validated once.

    system: what is read of a machine.
    """

    def __init__(self, system: type[ScheduleSystem] = ScheduleSystem) -> None:
        self._system = system
        self._parts: dict[tuple[str, str], BaseModel] = {}
        self._parts_of_trees = Memo[BaseModel](_MOST_PARTS)
        self._sharded_workloads = Memo[Any](_MOST_SEEN)
        self._conditions = Memo[Mapping[str, Any] | None](_MOST_SEEN)

    def check_sections(self, tree: Tree) -> None:
        """Check that `system`, `workload` and `schedule` are mappings and that the schedule's family exists.

        `data_dir`, of tables that a study shows beside its points, is no part of them.
        """
        check = Problems()
        for name in set(tree) - {*OverlapDesign.model_fields, "data_dir"}:
            check.add(name, "is not a known section", way_out=did_you_mean(name, OverlapDesign.model_fields))
        for name in OverlapDesign.model_fields:
            if not isinstance(tree.get(name), Mapping):
                check.add(name, "is no section of keys", value=tree.get(name), way_out=f"choose one: {name}=<option>")
        check.done()
        schedule_type(tree)

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Return one scenario per shape, or per written-out workload, of the list."""
        check = Problems()
        self._part(check, self._system, tree, "system")
        self._part(check, schedule_type(tree), tree, "schedule")
        workloads = workloads_of(check, tree["workload"])
        check.done()
        base = {"system": tree["system"], "schedule": tree["schedule"]}
        return {name: {**base, "workload": workload} for name, workload in workloads.items()}

    def design(self, tree: Tree) -> OverlapDesign:
        """Validate all three parts; ConfigError carries the problems of all of them."""
        check = Problems()
        tree = {**tree, "workload": self._with_shards(tree)}
        kinds: dict[str, type[BaseModel]] = {
            "system": self._system,
            "workload": Workload,
            "schedule": schedule_type(tree),
        }
        parts: dict[str, Any] = {name: self._part(check, kind, tree, name) for name, kind in kinds.items()}
        check.done()
        return OverlapDesign.model_construct(**parts)

    def _part(self, check: Problems, kind: type[BaseModel], tree: Tree, section: str) -> BaseModel | None:
        """Validate a part; designs share parts, and a valid part is not validated again."""
        # by identity first: most trees of a sweep share their sections
        if (cached := self._parts_of_trees.find(tree[section], key=section)) is not None:
            return cached
        text = json.dumps(tree[section], sort_keys=True, default=str)  # equal sections with other objects
        if (section, text) not in self._parts:
            part = check.model(kind, tree[section], path=section)
            if part is None:
                return None
            if len(self._parts) > _MOST_PARTS:
                self._parts.clear()  # simple, and rare: sweeps have few parts
            self._parts[section, text] = part
        return self._parts_of_trees.keep(self._parts[section, text], tree[section], key=section)

    def _with_shards(self, tree: Tree) -> Any:
        """Return the workload with its shards filled in, the same object for the same workload and number of GPUs."""
        workload, count = tree["workload"], get_path(tree, "system.node.num_gpus")
        return self._sharded_workloads.get(lambda: _fill_shards(tree), workload, key=repr(count))

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Condition of `path`, as a schedule's knobs declare it; remembered for the section that it is in."""
        section = tree.get(path.partition(".")[0])
        return self._conditions.get(lambda: self._condition(path, tree), section, key=path)

    def _condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        section, _, name = path.partition(".")
        if path.rpartition(".")[2] in LABELS:
            return None
        if section != "schedule":  # values that are there are knobs, if the backend reads them
            unread = section == "system" and not reads(self._system, name, tree["system"])
            return None if unread or get_path(tree, path) is None else {}
        kind = schedule_type(tree)
        if name not in kind.model_fields or kind.model_fields[name].annotation is type(None):  # a family fixes it
            return None
        return {f"schedule.{key}": value for key, value in condition(kind, name).items()}


def _fill_shards(tree: Tree) -> Any:
    """Return the workload with n split over all GPUs of the node for GEMMs without `shards`."""
    operators = get_path(tree, "workload.operators")
    if not isinstance(operators, Mapping):
        return tree["workload"]
    num_gpus = get_path(tree, "system.node.num_gpus")
    filled = {
        # `shards: null` asks for all GPUs of the node
        name: {**op, "shards": num_gpus} if isinstance(op, Mapping) and op.get("shards", 0) is None else op
        for name, op in operators.items()
    }
    return {**tree["workload"], "operators": filled}


def schedule_type(tree: Tree) -> type[Any]:
    """Class of a schedule's family. Raises ConfigError where there is none."""
    family = tree["schedule"].get("family")
    if family is None:
        way = did_you_mean("", plugins.usable_names("schedule"))
        raise ConfigError([Problem("schedule.family", "is missing", way_out=way)])
    schedule: type[Schedule] = plugins.load("schedule", str(family))
    return schedule
