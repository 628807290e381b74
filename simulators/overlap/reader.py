"""Designs of the overlap backend as their trees of values describe them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dse import plugins
from dse.backend import Tree
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.space import get_path
from dse.values import LABELS, Memo, condition
from simulators.hardware.machine import reads
from simulators.hardware.system import ScheduleSystem
from simulators.overlap.design import OverlapDesign, Schedule
from simulators.workloads.operators import Workload, workloads_of

_MOST_SEEN = 4096  # trees that are cached by identity
_MOST_PARTS = 512  # parts that are cached: a system takes 25 kB


class DesignReader:
    """Reader of trees: what describes the same part gives the same object, validated once."""

    def __init__(self) -> None:
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
        self._part(check, ScheduleSystem, tree, "system")
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
            "system": ScheduleSystem,
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
            unread = section == "system" and not reads(ScheduleSystem, name, tree["system"])
            return None if unread or get_path(tree, path) is None else {}
        kind = schedule_type(tree)
        if name not in kind.model_fields or _is_pinned(kind, name):  # fixed by the family
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


def _is_pinned(kind: type[BaseModel], name: str) -> bool:
    """Return True if a family fixes a shared knob to None, so that it is not a choice."""
    return kind.model_fields[name].annotation is type(None)
