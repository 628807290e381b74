"""The backend of requests: sub-layers of T3's schedules, at the channels of one GPU of a ring."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from dse.backend import Backend, Batch, Columns, Law, Metric, Result, Results, Tree
from dse.config.options import load_yaml, option_file
from dse.errors import ConfigError, Problem, Problems
from dse.space import get_path
from dse.space.blocks import problems
from dse.values import LABELS
from dse_near_memory.controller import Controller
from dse_near_memory.simulation import PARTS, Outcome, SubLayer
from search_spaces.triggered import TriggeredSchedule
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from simulators.overlap.metrics import cost_proxy

_SECTION = "controller"
# each keeps lists of requests by GEMM, which are large
_MOST_CONTROLLERS = 64
_UNREAD = {"schedule.num_chunks", "system.gpu.hbm_bytes_per_s", "system.gpu.gemm.serial_fraction"}
"""Of the fluid model alone: waves, channels and steps of requests stand in their place."""

METRICS: Mapping[str, Metric] = {
    "makespan_s": Metric("s", "time from the start until the last line of the all-gather is stored", low=1e-12),
    "gemm_s": Metric("s", "time until the last product"),
    "exposed_comm_s": Metric("s", "time after the last product"),
    "hbm_bytes": Metric("byte", "HBM traffic of one GPU"),
    **{f"{part.lower().replace(' ', '_')}_bytes": Metric("byte", f"HBM traffic of one GPU: {part}") for part in PARTS},
    "row_hits": Metric("fraction", "requests whose row is open", high=1.0),
    "bus_turns": Metric("fraction", "turns of a channel's bus over requests", high=1.0),
    "bus_busy": Metric("fraction", "share of the time in which buses move data", high=1.0 + 1e-9),
    "tracker_spills": Metric("entry", "entries that the tracker evicted or took back"),
    "queue_found": Metric("request", "requests that one of the GEMM finds in a queue in the first stage, on average"),
    "rule_threshold": Metric("request", "threshold of waiting requests that T3's arbitration takes then"),
    "tracker_entries": Metric("entry", "largest number of the tracker's entries in use"),
    "cost_proxy": Metric("relative", "hardware cost relative to the reference system"),
}


class RequestDesign(OverlapDesign):
    """A design of the overlap backend, and the controller below it."""

    controller: Controller


class RequestBackend(Backend):
    """Designs one by one, each in a fraction of a second; rings and schedules of T3 only."""

    version = "4"
    metrics = METRICS
    relations: Mapping[str, Metric] = {
        "speedup": Metric("x", "makespan of the baseline / makespan", goal="maximize"),
    }
    laws = (
        Law("gemm_s <= makespan_s", lambda c: c["gemm_s"], lambda c: c["makespan_s"]),
        Law(
            "the parts add up to hbm_bytes",
            lambda c: sum(c[f"{part.lower().replace(' ', '_')}_bytes"] for part in PARTS),  # type: ignore[arg-type, return-value]
            lambda c: c["hbm_bytes"],
            equal=True,
        ),
    )

    def __init__(self) -> None:
        self._fluid = OverlapBackend("fluid")  # the same designs, scenarios and rules
        self._controllers: dict[str, Controller] = {}

    def sections(self, tree: Tree) -> None:
        """Check the sections of a schedule's design, and the controller."""
        if not isinstance(tree.get(_SECTION), Mapping):
            rule, way = "is no section of keys", "choose one: controller=t3"
            raise ConfigError([Problem(_SECTION, rule, tree.get(_SECTION), way)])
        self._fluid.sections(_without(tree))
        self._refuse_chunks(tree["schedule"])

    def _refuse_chunks(self, schedule: Any) -> None:
        """Refuse a number of chunks that is not the option's: it would change nothing here. Raises ConfigError."""
        file = option_file("schedule", str(schedule.get("name")))
        shipped = load_yaml(file).get("num_chunks") if file is not None else schedule.get("num_chunks")
        if schedule.get("num_chunks") != shipped:
            rule, way = "is read by the fluid model alone: waves stand in its place", "leave it out"
            raise ConfigError([Problem("schedule.num_chunks", rule, schedule.get("num_chunks"), way)])

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """One scenario for each shape of the workload."""
        scenarios = self._fluid.scenarios(_without(tree))
        return {name: {**part, _SECTION: tree[_SECTION]} for name, part in scenarios.items()}

    def design(self, tree: Tree) -> RequestDesign:
        """A validated design. Raises ConfigError with every problem."""
        overlap = self._fluid.design(_without(tree))
        # both parts were validated by their own checks
        return RequestDesign.model_construct(**dict(overlap), controller=self._controller(tree[_SECTION]))

    def _controller(self, section: Any) -> Controller:
        """Designs share controllers, and with them their lists of requests."""
        # equal sections give one object, by which `Memo` keeps lists of requests
        text = json.dumps(section, sort_keys=True, default=str)
        if text not in self._controllers:
            check = Problems()
            controller = check.model(Controller, section, path=_SECTION)
            check.done()
            assert controller is not None
            if len(self._controllers) >= _MOST_CONTROLLERS:
                self._controllers.clear()
            self._controllers[text] = controller
        return self._controllers[text]

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Rules of the schedule, and of the controller's sizes."""
        assert isinstance(design, RequestDesign)
        # the rules of the fluid backend take its own kind of design
        overlap = OverlapDesign.model_construct(
            system=design.system, workload=design.workload, schedule=design.schedule
        )
        return [*self._fluid.problems(overlap), *problems(list(design.controller.rules()))]

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Knobs of the schedule and the system that requests read, and every value of the controller."""
        if path in _UNREAD or path.rpartition(".")[2] in LABELS:
            return None
        # a threshold counts only if the controller takes it from the schedule
        if path == "schedule.occupancy_threshold" and get_path(tree, "controller.threshold") != "given":
            return None
        if path.partition(".")[0] == _SECTION:
            return {} if get_path(tree, path) is not None else None
        return self._fluid.condition(path, _without(tree))

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Simulate each design that breaks no rule."""
        return [Results.of([self._one(design) for design in batch.designs()]) for batch in batches]

    def _one(self, design: BaseModel) -> Result:
        assert isinstance(design, RequestDesign)
        if refused := self.refusal(design):
            return refused
        if reason := _unsupported(design):
            return Result("unsupported", reason=reason)
        assert isinstance(design.schedule, TriggeredSchedule)
        outcome = SubLayer(design.system, design.workload, design.schedule, design.controller).simulate()
        return Result("ok", {**measure(outcome), "cost_proxy": float(cost_proxy(design.system))}, engine="requests")

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Speed-up over the baseline."""
        return {"speedup": baseline["makespan_s"] / point["makespan_s"]}

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the system and of the controller with their sources."""
        assert isinstance(design, RequestDesign)
        return [*design.system.facts_below("system"), *design.controller.facts_below(_SECTION)]


def measure(outcome: Outcome) -> dict[str, float]:
    """Metrics of an outcome, without the cost."""
    parts = {f"{part.lower().replace(' ', '_')}_bytes": size for part, size in outcome.traffic.items()}
    return {
        "makespan_s": outcome.seconds,
        "gemm_s": outcome.gemm_s,
        "exposed_comm_s": outcome.seconds - outcome.gemm_s,
        "hbm_bytes": sum(parts.values()),
        **parts,
        "row_hits": outcome.row_hits,
        "bus_turns": outcome.turns,
        "bus_busy": outcome.busy,
        "tracker_spills": float(outcome.spills),
        "queue_found": outcome.occupancy,
        "rule_threshold": float(outcome.rule),
        "tracker_entries": float(outcome.peak_entries),
    }


def _unsupported(design: RequestDesign) -> str:
    """Why a design that breaks no rule has no requests here, or ""."""
    schedule, gemm = design.schedule, design.system.gpu.gemm
    if not isinstance(schedule, TriggeredSchedule):
        return "only schedules of the family triggered have requests"
    # a tracker counts updates of memory; without near memory kernels would add by atomics
    atomics = schedule.reduction == "tracked" and not schedule.near_memory
    reasons = {
        "only rings have requests": design.system.node.topology != "ring",
        "only whole all-reduces have requests": design.workload.overlap().collective.pattern != "all_reduce",
        "waves of requests need system.gpu.gemm.assignment = static": gemm.assignment != "static",
        "steps of a GEMM need system.gpu.gemm.tile_depth": gemm.tile_depth is None,
        "updates are made near memory here: schedule.near_memory = true": atomics,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _without(tree: Tree) -> Tree:
    """Sections of the overlap backend."""
    return {name: part for name, part in tree.items() if name != _SECTION}
