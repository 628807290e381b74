"""The overlap backend: lower a schedule to a task graph, run an engine, read off the metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse import plugins
from dse.backend import STATUSES, Backend, Batch, Columns, Replay, Result, Results, Tree
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.space import get_path
from dse.values import LABELS, condition, leaves, put
from simulators.hardware.system import System
from simulators.overlap.batch import Grid, grids
from simulators.overlap.design import Design, Schedule, ScheduleKnobs
from simulators.overlap.idle_knobs import same_timeline, without_priorities
from simulators.overlap.metrics import LAWS, METRICS, RELATIONS, Floats, cost_proxy, measure, measure_worst, relate
from simulators.overlap.node import WholeNode
from simulators.rules import problems, reasons
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.symmetry import patterns, reduce_graph
from simulators.taskgraph.timeline import Engine, Refused, Timeline
from simulators.workloads.operators import Workload, workloads_of

_VERSION = "3"  # of the physics and the metrics; raise it with every change that alters a result
_WHOLE_VERSION = "1"  # likewise, of what is peculiar to whole nodes
_MOST_SEEN = 4096  # trees that are known by identity
_MOST_CELLS = 1 << 20  # designs times tasks of whole nodes whose timelines are held at once: 8 MiB an array


class OverlapBackend(Backend):
    """system x workload x schedule, run by one engine.

    engine: name of the engine that is asked first. fallback: engine for the designs that one refuses, or None to
    report them as `unsupported`. gpus: whether `one` GPU is simulated that stands for all, or `all` of the node with
    shards as uneven as `imbalance` says (see `simulators.overlap.node.WholeNode`); metrics are then those of the worst
    GPU.
    """

    metrics = METRICS
    relations = RELATIONS
    laws = LAWS

    def __init__(self, engine: str, fallback: str | None = None, *, gpus: str = "one", imbalance: float = 0.0) -> None:
        self._imbalance = _checked_imbalance(gpus, imbalance)
        self._engines: list[tuple[str, Engine]] = [
            (name, plugins.load("engine", name)) for name in (engine, fallback) if name
        ]
        self._parts: dict[tuple[str, str], BaseModel] = {}
        self._seen_parts: dict[tuple[str, int], tuple[Any, BaseModel]] = {}  # by identity, which what is held keeps
        self._filled: dict[tuple[int, str], tuple[Any, Any]] = {}
        self.batch = self._engines[0][1].batch
        whole = [] if self._imbalance is None else [f"node.{_WHOLE_VERSION}"]
        self.version = "+".join([_VERSION, *(f"{name}.{found.version}" for name, found in self._engines), *whole])

    def sections(self, tree: Tree) -> None:
        """`system`, `workload`, `schedule`, each a mapping; the schedule's family must exist."""
        check = Problems()
        for name in set(tree) - set(Design.model_fields):
            check.add(name, "is not a known section", way_out=did_you_mean(name, Design.model_fields))
        for name in Design.model_fields:
            if not isinstance(tree.get(name), Mapping):
                check.add(name, "is no section of keys", value=tree.get(name), way_out=f"choose one: {name}=<option>")
            elif name == "system" and "measured_as" in tree[name]:
                way = "systems for schedules have copy engines and links, such as system=mi300x_8"
                check.add(name, "is a device for study=operators", value=tree[name].get("name"), way_out=way)
        check.done()
        _schedule_type(tree)

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """One scenario per shape, or per written-out workload, of the list."""
        check = Problems()
        self._part(check, System, tree, "system")
        self._part(check, _schedule_type(tree), tree, "schedule")
        workloads = workloads_of(check, tree["workload"])
        check.done()
        base = {"system": tree["system"], "schedule": tree["schedule"]}
        return {name: {**base, "workload": workload} for name, workload in workloads.items()}

    def design(self, tree: Tree) -> Design:
        """Validate all three parts; ConfigError carries the problems of all of them."""
        check = Problems()
        tree = {**tree, "workload": self._sharded(tree)}
        kinds: dict[str, type[BaseModel]] = {"system": System, "workload": Workload, "schedule": _schedule_type(tree)}
        parts: dict[str, Any] = {name: self._part(check, kind, tree, name) for name, kind in kinds.items()}
        check.done()
        return Design.model_construct(**parts)

    def _part(self, check: Problems, kind: type[BaseModel], tree: Tree, section: str) -> BaseModel | None:
        """One validated part; many designs share parts, and a part that held once is not validated again."""
        if (known := self._seen_parts.get((section, id(tree[section])))) is not None:
            return known[1]
        text = json.dumps(tree[section], sort_keys=True, default=str)
        if (section, text) not in self._parts:
            part = check.model(kind, tree[section], path=section)
            if part is None:
                return None
            self._parts[section, text] = part
        if len(self._seen_parts) > _MOST_SEEN:
            self._seen_parts.clear()
        self._seen_parts[section, id(tree[section])] = tree[section], self._parts[section, text]
        return self._parts[section, text]

    def _sharded(self, tree: Tree) -> Any:
        """The workload with its shards filled in; the same object for the same workload and number of GPUs."""
        given, count = tree["workload"], get_path(tree, "system.node.num_gpus")
        if len(self._filled) > _MOST_SEEN:
            self._filled.clear()
        name = id(given), repr(count)
        if name not in self._filled:
            self._filled[name] = given, _sharded(tree)
        return self._filled[name][1]

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Rules between schedule, system and workload."""
        assert isinstance(design, Design)
        return problems(design.schedule.rules(self._seen(design.system), design.workload))

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """What `path` depends on: a schedule's knobs declare it."""
        section, _, name = path.partition(".")
        if path.rpartition(".")[2] in LABELS:
            return None
        if section != "schedule":
            return {} if get_path(tree, path) is not None else None
        kind = _schedule_type(tree)
        if name not in kind.model_fields or _is_pinned(kind, name):
            return None
        return {f"schedule.{key}": value for key, value in condition(kind, name).items()}

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """Numbers that do not change the structure."""
        return any(found == path and not structural for found, _, structural in leaves(design))

    def neutral(self, design: BaseModel) -> Mapping[str, Any]:
        """Knobs of the schedule that may change nothing; those that have no meaning in this design are left out."""
        assert isinstance(design, Design)
        if not isinstance(design.schedule, ScheduleKnobs):
            return {}
        neutral = design.schedule.neutral()
        return {
            f"schedule.{name}": value for name, value in neutral.items() if getattr(design.schedule, name) is not None
        }

    def idle(self, batch: Batch, path: str, value: Any) -> NDArray[np.bool_]:
        """Where the task graph stays what it is, or its priorities have no effect; or the same rule is broken."""
        ((_, grid),) = grids([batch])
        other = replace(grid, design=put(grid.design, path, value))
        mine, theirs = self._screened(grid), self._screened(other)
        same: NDArray[np.bool_] = np.array(mine.texts)[mine.reason] == np.array(theirs.texts)[theirs.reason]
        legal = same & mine.ok
        if legal.any():
            own, others = (one if legal.all() else one.take(legal) for one in (grid, other))
            graph = self._lowered(own.design)
            ranked = path.partition(".")[2] in getattr(own.design.schedule, "ranks", ())
            neutral = without_priorities(graph) if ranked else self._lowered(others.design)
            same[legal] = same_timeline(graph, neutral, own.shape)
        return same

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Look at the rules of all designs of one structure at once."""
        return _together(batches, self._screened)

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Lower, run and measure all designs of one structure at once."""
        return _together(batches, self._grid)

    def _screened(self, grid: Grid) -> Results:
        """Which designs of a grid break a rule."""
        rules = grid.design.schedule.rules(self._seen(grid.design.system), grid.design.workload)
        reason, texts = reasons(rules, grid.shape)
        status = np.where(reason > 0, STATUSES.index("infeasible"), STATUSES.index("ok")).astype(np.uint8)
        return Results(status, {}, reason, np.zeros_like(reason), texts)

    def _grid(self, grid: Grid) -> Results:
        """Results of a grid; what breaks a rule is infeasible."""
        known = self._screened(grid)
        if known.ok.all():
            return self._feasible(grid)
        return _replaced(known, known.ok, self._feasible(grid.take(known.ok))) if known.ok.any() else known

    def _feasible(self, grid: Grid) -> Results:
        """Results of designs that break no rule; those that do not differ in the graph share a run."""
        graph = self._lowered(grid.design)
        measured: _Measured = _measured_one if self._imbalance is None else _measured_all
        if not _is_seen(graph, grid.design.system, whole=self._imbalance is not None):
            return Results.all_alike(Result("unsupported", reason=_ONE_ONLY), grid.size)
        parts = [(places, _run(self._engines, alike, measured)) for places, alike in patterns(graph)]
        found = Results.join([results for _, results in parts])
        if len(parts) > 1:
            found = found.take(np.argsort(np.concatenate([places for places, _ in parts])))
        if graph.shape != grid.shape:
            places = np.arange(graph.num_designs).reshape(graph.shape)
            found = found.take(np.broadcast_to(places, grid.shape).reshape(-1))
        cost = np.broadcast_to(cost_proxy(grid.design.system), grid.shape).reshape(-1)
        cost = cost if found.ok.all() else np.where(found.ok, cost, np.nan)
        return replace(found, metrics={**found.metrics, "cost_proxy": cost})

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Speed-up, ideal, fraction of ideal."""
        return relate(point, baseline)

    def replay(self, design: BaseModel) -> Replay:
        """The full timeline of one design, by the first engine that runs it."""
        assert isinstance(design, Design)
        graph = self._lowered(design)
        quotient = reduce_graph(graph)
        for _, engine in self._engines:
            timeline = engine.run(quotient.graph)
            if not timeline.reason(0):
                return _last_gpu(quotient.whole(timeline, graph))
        raise ConfigError([Problem("simulator.engine", timeline.reason(0), way_out="use simulator=fluid")])

    def _seen(self, system: System) -> System:
        """The system as it is simulated: by one GPU, or whole."""
        return system if self._imbalance is None else WholeNode.of(system, self._imbalance)

    def _lowered(self, design: Design) -> TaskGraph:
        return design.schedule.lower(self._seen(design.system), design.workload)

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the system with their sources."""
        assert isinstance(design, Design)
        return list(design.system.facts())


def _together(batches: Sequence[Batch], results: Callable[[Grid], Results]) -> list[Results]:
    """Results of each batch, from those of the grids that hold them."""
    found: dict[int, Results] = {}
    for indices, grid in grids(batches):
        own, each = results(grid), grid.size // len(indices)
        for place, index in enumerate(indices):
            found[index] = own.take(slice(place * each, (place + 1) * each))
    return [found[index] for index in range(len(batches))]


def _sharded(tree: Tree) -> Any:
    """The workload, with n split over all GPUs of the node where a GEMM does not say over how many."""
    operators = get_path(tree, "workload.operators")
    if not isinstance(operators, Mapping):
        return tree["workload"]
    num_gpus = get_path(tree, "system.node.num_gpus")
    filled = {
        name: {**op, "shards": num_gpus} if isinstance(op, Mapping) and op.get("shards", 0) is None else op
        for name, op in operators.items()
    }
    return {**tree["workload"], "operators": filled}


_Measured = Callable[[Engine, TaskGraph], tuple[dict[str, Floats], Refused | None]]
_ONE_ONLY = "this schedule lowers to one GPU only (simulator.gpus = all needs one that lowers by a Pipeline)"


def _checked_imbalance(gpus: str, imbalance: object) -> float | None:
    """The imbalance of a whole node; None where one GPU stands for all. Raises ConfigError."""
    check = Problems()
    number = isinstance(imbalance, (int, float)) and not isinstance(imbalance, bool)
    if gpus not in ("one", "all"):
        check.add("simulator.gpus", "is not one or all", value=gpus, way_out=did_you_mean(str(gpus), ("one", "all")))
    if not number or not 0 <= float(str(imbalance)) < 1:
        rule = "is no number from 0 to below 1: the largest share of rows over the mean, less one"
        check.add("simulator.imbalance", rule, value=imbalance)
    elif gpus == "one" and imbalance:
        check.add("simulator.imbalance", "needs a whole node", value=imbalance, way_out="set simulator.gpus=all")
    check.done()
    return float(str(imbalance)) if gpus == "all" else None


def _is_seen(graph: TaskGraph, system: System, *, whole: bool) -> bool:
    """Whether the GPUs that are to be simulated have tasks."""
    return not whole or len(np.unique(graph.gpu)) == system.node.num_gpus


def _measured_one(engine: Engine, graph: TaskGraph) -> tuple[dict[str, Floats], Refused | None]:
    """Metrics of the one GPU that stands for all."""
    small = reduce_graph(graph).graph
    totals = engine.totals(small)
    if totals.refused is not None and totals.refused.code.all():
        return dict.fromkeys(METRICS.keys() - {"cost_proxy"}, np.full(graph.num_designs, np.nan)), totals.refused
    return measure(small, totals), totals.refused


def _measured_all(engine: Engine, graph: TaskGraph) -> tuple[dict[str, Floats], Refused | None]:
    """Metrics of the worst GPU, so many designs at a time that their timelines fit into memory."""
    quotient = reduce_graph(graph)
    most = max(1, _MOST_CELLS // graph.num_tasks)
    metrics, refused = [], []
    for start in range(0, graph.num_designs, most):
        places = np.arange(start, min(start + most, graph.num_designs))
        own = graph.take(places)
        timeline = quotient.whole(engine.run(quotient.graph.take(places)), own)
        metrics.append(measure_worst(own, timeline))
        refused.append(timeline.refused or Refused(np.zeros(len(places), np.int32)))
    return {name: np.concatenate([one[name] for one in metrics]) for name in metrics[0]}, _joined(refused)


def _joined(parts: Sequence[Refused]) -> Refused:
    """What was refused of all designs."""
    texts = list(dict.fromkeys(text for part in parts for text in part.texts))
    codes = [np.array([texts.index(text) for text in part.texts], np.int32)[part.code] for part in parts]
    return Refused(np.concatenate(codes), tuple(texts))


def _last_gpu(timeline: Timeline) -> Replay:
    """What the GPU that ends last does, and what limits the whole."""
    graph = timeline.graph
    tasks = np.flatnonzero(graph.gpu == graph.gpu[int(np.argmax(timeline.finished[0]))])
    own = Timeline(graph.part(tasks), timeline.issued[:, tasks], timeline.finished[:, tasks])
    return Replay(tuple(own.intervals(0)), timeline.limits(0))


def _run(engines: Sequence[tuple[str, Engine]], graph: TaskGraph, measured: _Measured) -> Results:
    """Results of a graph's designs by the first engine; what it refuses goes to the next one."""
    (name, engine), *others = engines
    metrics, refused = measured(engine, graph)
    refused = refused or Refused(np.zeros(graph.num_designs, np.int32))
    left, texts = refused.code > 0, (*refused.texts, name)
    status = np.where(left, STATUSES.index("unsupported"), STATUSES.index("ok")).astype(np.uint8)
    by = np.full(graph.num_designs, len(texts) - 1, np.int32)
    found = Results(status, metrics, refused.code, by, texts)
    if not left.any():
        return found
    if others:
        return _replaced(found, left, _run(others, graph.take(np.flatnonzero(left)), measured))
    return replace(found, metrics={key: np.where(left, np.nan, column) for key, column in found.metrics.items()})


def _replaced(results: Results, where: NDArray[np.bool_], others: Results) -> Results:
    """Results with those at some places replaced by others, in order."""
    places = np.arange(results.size)
    places[where] = results.size + np.arange(others.size)
    return Results.join([results, others]).take(places)


def _schedule_type(tree: Tree) -> type[Any]:
    family = tree["schedule"].get("family")
    found: type[Schedule] = plugins.load("schedule", str(family))
    return found


def _is_pinned(kind: type[BaseModel], name: str) -> bool:
    """A family may fix a shared knob to None: it has no such choice."""
    return kind.model_fields[name].annotation is type(None)
