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
from dse.backend import STATUSES, Backend, Batch, Columns, Replay, Result, Results, Tree, pieces
from dse.errors import ConfigError, Problem, Problems, did_you_mean
from dse.space import get_path
from dse.space.grids import Grid, grids, results_by_batch
from dse.values import LABELS, Memo, condition, leaves, put
from simulators.hardware.machine import reads
from simulators.hardware.network import link_rules
from simulators.hardware.system import System, WholeNode
from simulators.overlap.cost_models import model_names, model_rules, reads_fact
from simulators.overlap.design import Bound, Design, Schedule, ScheduleKnobs
from simulators.overlap.idle_knobs import same_timeline, without_priorities
from simulators.overlap.metrics import (
    BOUNDS,
    LAWS,
    METRICS,
    RELATIONS,
    Floats,
    cost_proxy,
    measure,
    measure_worst,
    relate,
)
from simulators.rules import Rule, problems, reasons
from simulators.taskgraph.bounds import bound
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.symmetry import Quotient, patterns, reduce_graph
from simulators.taskgraph.timeline import Engine, ForeignEngine, Refused, Timeline
from simulators.workloads.operators import Workload, workloads_of

_VERSION = "10"  # of the physics and the metrics; raise it with every change that alters a result
_WHOLE_VERSION = "1"  # likewise, of the parts that only whole nodes use
_MOST_BOUNDS = 4096  # designs whose bounds are computed at once
_MOST_SEEN = 4096  # trees that are cached by identity
_MOST_PARTS = 512  # parts that are cached: a system takes 25 kB
_MOST_CELLS = 1 << 20  # designs times tasks of whole nodes whose timelines are in memory at once: 8 MiB an array


class OverlapBackend(Backend):
    """Backend for system x workload x schedule, run by one engine.

    engine: name of the first engine. fallback: engine for the designs that the first refuses, or None to report them
    as `unsupported`. gpus: simulate `one` representative GPU, or `all` of the node with shards as uneven as `imbalance`
    (see `simulators.hardware.system.WholeNode`); metrics are then those of the worst GPU.
    """

    metrics = METRICS
    relations = RELATIONS
    bounds = BOUNDS
    laws = LAWS

    def __init__(self, engine: str, fallback: str | None = None, *, gpus: str = "one", imbalance: float = 0.0) -> None:
        self._imbalance = _check_imbalance(gpus, imbalance)
        self._engines: list[tuple[str, Engine]] = [
            (name, plugins.load("engine", name)) for name in (engine, fallback) if name
        ]
        self._parts: dict[tuple[str, str], BaseModel] = {}
        self._parts_of_trees = Memo[BaseModel](_MOST_PARTS)
        self._sharded_workloads = Memo[Any](_MOST_SEEN)
        self._bounds = Memo[Floats | None](_MOST_SEEN)
        self._conditions = Memo[Mapping[str, Any] | None](_MOST_SEEN)
        self.batch = self._engines[0][1].batch
        node_version = [] if self._imbalance is None else [f"node.{_WHOLE_VERSION}"]
        self.version = "+".join(
            [_VERSION, *(f"{name}.{loaded.version}" for name, loaded in self._engines), *node_version]
        )

    def absence(self) -> str:
        """Why the first engine cannot run on this machine, or ""."""
        engine = self._engines[0][1]
        return engine.absence() if isinstance(engine, ForeignEngine) else ""

    def sections(self, tree: Tree) -> None:
        """Check that `system`, `workload` and `schedule` are mappings and that the schedule's family exists.

        `data_dir`, of tables that a study shows beside its points, is no part of them.
        """
        check = Problems()
        for name in set(tree) - {*Design.model_fields, "data_dir"}:
            check.add(name, "is not a known section", way_out=did_you_mean(name, Design.model_fields))
        for name in Design.model_fields:
            if not isinstance(tree.get(name), Mapping):
                check.add(name, "is no section of keys", value=tree.get(name), way_out=f"choose one: {name}=<option>")
        check.done()
        _schedule_type(tree)

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Return one scenario per shape, or per written-out workload, of the list."""
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
        tree = {**tree, "workload": self._with_shards(tree)}
        kinds: dict[str, type[BaseModel]] = {"system": System, "workload": Workload, "schedule": _schedule_type(tree)}
        parts: dict[str, Any] = {name: self._part(check, kind, tree, name) for name, kind in kinds.items()}
        check.done()
        return Design.model_construct(**parts)

    def _part(self, check: Problems, kind: type[BaseModel], tree: Tree, section: str) -> BaseModel | None:
        """Validate a part; designs share parts, and a valid part is not validated again."""
        if (cached := self._parts_of_trees.find(tree[section], key=section)) is not None:
            return cached
        text = json.dumps(tree[section], sort_keys=True, default=str)
        if (section, text) not in self._parts:
            part = check.model(kind, tree[section], path=section)
            if part is None:
                return None
            if len(self._parts) > _MOST_PARTS:
                self._parts.clear()
            self._parts[section, text] = part
        return self._parts_of_trees.keep(self._parts[section, text], tree[section], key=section)

    def _with_shards(self, tree: Tree) -> Any:
        """Return the workload with its shards filled in, the same object for the same workload and number of GPUs."""
        workload, count = tree["workload"], get_path(tree, "system.node.num_gpus")
        return self._sharded_workloads.get(lambda: _fill_shards(tree), workload, key=repr(count))

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Check the rules between schedule, system and workload."""
        assert isinstance(design, Design)
        return problems(self._rules(design))

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Condition of `path`, as a schedule's knobs declare it; remembered for the section that it is in."""
        section = tree.get(path.partition(".")[0])
        return self._conditions.get(lambda: self._condition(path, tree), section, key=path)

    def _condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        section, _, name = path.partition(".")
        if path.rpartition(".")[2] in LABELS:
            return None
        if section != "schedule":
            unread = section == "system" and not reads(System, name, tree["system"])
            return None if unread or get_path(tree, path) is None else {}
        kind = _schedule_type(tree)
        if name not in kind.model_fields or _is_pinned(kind, name):
            return None
        return {f"schedule.{key}": value for key, value in condition(kind, name).items()}

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """Return True for numbers that do not change the structure."""
        return any(leaf_path == path and not structural for leaf_path, _, structural in leaves(design))

    def takes_long(self, design: BaseModel) -> bool:
        """Whether the schedule is searched for."""
        assert isinstance(design, Design)
        return isinstance(design.schedule, ScheduleKnobs) and design.schedule.searches

    def num_tasks(self, design: BaseModel) -> int:
        """Tasks of the graph that a design lowers to; none where it breaks a rule."""
        assert isinstance(design, Design)
        return 0 if self.problems(design) else self._lower(self.settle(design)).num_tasks

    def neutral(self, design: BaseModel) -> Mapping[str, Any]:
        """Neutral values of the schedule's knobs that may change nothing, without knobs that are inactive here."""
        assert isinstance(design, Design)
        if not isinstance(design.schedule, ScheduleKnobs):
            return {}
        neutral = design.schedule.neutral()
        return {
            f"schedule.{name}": value for name, value in neutral.items() if getattr(design.schedule, name) is not None
        }

    def idle(self, batches: Sequence[Batch], path: str, value: Any) -> list[NDArray[np.bool_]]:
        """Masks of designs with the same task graph, with priorities of no effect, or with the same broken rule."""
        masks: dict[int, NDArray[np.bool_]] = {}
        for indices, grid in grids(batches, Design):
            same = self._idle_designs(grid, path, value).reshape(len(indices), -1)
            masks |= dict(zip(indices, same, strict=True))
        return [masks[index] for index in range(len(batches))]

    def _idle_designs(self, grid: Grid[Design], path: str, value: Any) -> NDArray[np.bool_]:
        """Mask [B] of the designs of a grid in which `path` may have the value."""
        other = replace(grid, design=put(grid.design, path, value))
        mine, theirs = self._screen_grid(grid), self._screen_grid(other)
        same: NDArray[np.bool_] = np.array(mine.texts)[mine.reason] == np.array(theirs.texts)[theirs.reason]
        legal = same & mine.ok
        if legal.any():
            legal_grid, other_grid = (grid, other) if legal.all() else (grid.take(legal), other.take(legal))
            graph = self._lower(legal_grid.design)
            ranked = path.partition(".")[2] in getattr(legal_grid.design.schedule, "ranks", ())
            neutral = without_priorities(graph) if ranked else self._lower(other_grid.design)
            same[legal] = same_timeline(graph, neutral, legal_grid.shape)
        return same

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Check the rules of all designs of one structure at once."""
        return results_by_batch(batches, Design, self._screen_grid)

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Lower, run and measure all designs of one structure at once, with the schedules that they settle for."""
        settled = [self._settled(batch) for batch in batches]
        results = iter(results_by_batch([part for parts in settled for part in parts], Design, self._evaluate_grid))
        return [Results.join([next(results) for _ in parts]) if len(parts) > 1 else next(results) for parts in settled]

    def _settled(self, batch: Batch) -> list[Batch]:
        """The batch, or one for each of its designs where the schedule is decided by system and workload."""
        assert isinstance(batch.design, Design)
        if not self.takes_long(batch.design):
            return [batch]
        return [Batch(self.settle(design)) for design in batch.designs()]

    def settle(self, design: BaseModel) -> Design:
        """The design with the schedule that it settles for, unless it breaks a rule."""
        assert isinstance(design, Design)
        if not self.takes_long(design) or self.problems(design):
            return design
        assert isinstance(design.schedule, ScheduleKnobs)
        return design.model_copy(update={"schedule": design.schedule.settle(design.system, design.workload)})

    def _screen_grid(self, grid: Grid[Design]) -> Results:
        """Check the rules of a grid's designs, without metrics."""
        reason, texts = reasons(self._rules(grid.design), grid.shape)
        status = np.where(reason > 0, STATUSES.index("infeasible"), STATUSES.index("ok")).astype(np.uint8)
        return Results(status, {}, reason, np.zeros_like(reason), texts)

    def _evaluate_grid(self, grid: Grid[Design]) -> Results:
        """Results of a grid; designs that break a rule are infeasible."""
        screened = self._screen_grid(grid)
        if screened.ok.all():
            return self._feasible(grid)
        if not screened.ok.any():
            return screened
        return _replace_results(screened, screened.ok, self._feasible(grid.take(screened.ok)))

    def _feasible(self, grid: Grid[Design]) -> Results:
        """Results of designs that break no rule; designs with equal graphs share a run."""
        graph = self._lower(grid.design)
        measure_graph: _Measure = _measure_one if self._imbalance is None else _measure_all
        if not _has_all_gpus(graph, grid.design.system, all_gpus=self._imbalance is not None):
            return Results.all_alike(Result("unsupported", reason=_ONE_ONLY), grid.size)
        parts = [(places, _run(self._engines, alike, measure_graph)) for places, alike in patterns(graph)]
        results = Results.join([run_results for _, run_results in parts])
        if len(parts) > 1:
            results = results.take(np.argsort(np.concatenate([places for places, _ in parts])))
        if graph.shape != grid.shape:
            places = np.arange(graph.num_designs).reshape(graph.shape)
            results = results.take(np.broadcast_to(places, grid.shape).reshape(-1))
        cost = np.broadcast_to(cost_proxy(grid.design.system), grid.shape).reshape(-1)
        cost = cost if results.ok.all() else np.where(results.ok, cost, np.nan)
        return replace(results, metrics={**results.metrics, "cost_proxy": cost})

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Compute speed-ups, and the shares of two ideals that they reach."""
        return relate(point, baseline)

    def bound(self, batch: Batch, metrics: Columns) -> Columns:
        """Bound of the schedules of each design of a batch, or of the orders of its tasks, and the gap to it."""
        seconds = np.concatenate([self._bound(Batch(batch.design, axes)) for axes in pieces(batch.axes, _MOST_BOUNDS)])
        return {"bound_s": seconds, "gap": metrics["makespan_s"] / seconds - 1}

    def _bound(self, batch: Batch) -> Floats:
        """Bound [s] of each design [B]; where only system and workload decide it, once for all their schedules."""
        design = batch.design
        assert isinstance(design, Design)
        shared = {path: values for path, values in batch.axes.items() if not path.startswith("schedule.")}
        key = type(design.schedule), *((path, values.tobytes()) for path, values in shared.items())
        proven = self._bounds.get(
            lambda: self._schedule_bound(Batch(design, shared)), design.system, design.workload, key=key
        )
        if proven is None:
            ((_, grid),) = grids([batch], Design)
            graph = reduce_graph(self._lower(grid.design)).graph
            return np.broadcast_to(bound(graph).seconds.reshape(graph.shape), grid.shape).reshape(-1)
        aligned = proven.reshape([len(shared[path]) if path in shared else 1 for path in batch.axes])
        return np.broadcast_to(aligned, batch.shape).reshape(-1)

    def _schedule_bound(self, batch: Batch) -> Floats | None:
        ((_, grid),) = grids([batch], Design)
        proven = _proven(grid.design)
        return None if proven is None else np.broadcast_to(proven.seconds, grid.shape).reshape(batch.shape)

    def binding(self, design: BaseModel) -> tuple[float, str] | None:
        """The bound of all schedules with the means of a design, and what binds it; None where there is only one of
        its tasks.
        """
        assert isinstance(design, Design)
        if (proven := _proven(design)) is None:
            return None
        return float(np.ravel(proven.seconds)[0]), proven.names[int(np.ravel(proven.binds)[0])]

    def replay(self, design: BaseModel) -> Replay:
        """Intervals and limits of one design."""
        return _last_gpu(self.timeline(design))

    def timeline(self, design: BaseModel) -> Timeline:
        """Full timeline of one design, by the first engine that runs it."""
        assert isinstance(design, Design)
        graph = self._lower(self.settle(design))
        for _, engine in self._engines:
            quotient = _quotient(engine, graph)
            timeline = engine.run(quotient.graph)
            if not timeline.reason(0):
                return quotient.whole(timeline, graph)
        raise ConfigError([Problem("simulator.engine", timeline.reason(0), way_out="use simulator=fluid")])

    def elasticities(self, design: BaseModel, sides: Sequence[tuple[str, int]]) -> Sequence[float] | None:
        """Change of the makespan [%] for 1 % more, on sides of numbers; None where an engine is not exact."""
        assert isinstance(design, Design)
        if not all(engine.exact for _, engine in self._engines):
            return None
        from simulators.overlap.elasticities import elasticities  # which few commands need

        return elasticities(self.settle(design), sides, self._lower)

    def _simulated_system(self, system: System) -> System:
        """Return the system as it is simulated: by one GPU, or with all GPUs."""
        return system if self._imbalance is None else WholeNode.of(system, self._imbalance)

    def _rules(self, design: Design) -> list[Rule]:
        """Rules on links and on the models of costs; then those of the schedule."""
        system = self._simulated_system(design.system)
        of_models = list(model_rules(system, design.workload, design.schedule))
        of_links = list(link_rules(design.system.node, design.system.gpu.num_links))
        return [*of_links, *of_models, *(() if of_models else design.schedule.rules(system, design.workload))]

    def _lower(self, design: Design) -> TaskGraph:
        return design.schedule.lower(self._simulated_system(design.system), design.workload)

    def models(self, design: BaseModel) -> Mapping[str, str]:
        """Models of the costs of GEMMs and collectives."""
        assert isinstance(design, Design)
        return model_names(design)

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the system with their sources, as far as the models of costs and the workload read them."""
        assert isinstance(design, Design)
        return [fact for fact in design.system.facts() if reads_fact(design, fact[0])]


def _proven(design: Design) -> Bound | None:
    """The bound of all schedules with the means of a design's; None where there is none."""
    if not isinstance(design.schedule, ScheduleKnobs):
        return None
    return design.schedule.bound(design.system, design.workload)


def _fill_shards(tree: Tree) -> Any:
    """Return the workload with n split over all GPUs of the node for GEMMs without `shards`."""
    operators = get_path(tree, "workload.operators")
    if not isinstance(operators, Mapping):
        return tree["workload"]
    num_gpus = get_path(tree, "system.node.num_gpus")
    filled = {
        name: {**op, "shards": num_gpus} if isinstance(op, Mapping) and op.get("shards", 0) is None else op
        for name, op in operators.items()
    }
    return {**tree["workload"], "operators": filled}


_Measure = Callable[[Engine, TaskGraph], tuple[dict[str, Floats], Refused | None]]
_ONE_ONLY = "this schedule lowers to one GPU only (simulator.gpus = all needs one that lowers by a Pipeline)"


def _check_imbalance(gpus: str, imbalance: object) -> float | None:
    """Check and return the imbalance of a whole node; None for one representative GPU. Raises ConfigError."""
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


def _has_all_gpus(graph: TaskGraph, system: System, *, all_gpus: bool) -> bool:
    """Return True if all GPUs to be simulated have tasks."""
    return not all_gpus or len(np.unique(graph.gpu)) == system.node.num_gpus


def _measure_one(engine: Engine, graph: TaskGraph) -> tuple[dict[str, Floats], Refused | None]:
    """Metrics of one representative GPU."""
    small = reduce_graph(graph).graph
    totals = engine.totals(small)
    if totals.refused is not None and totals.refused.code.all():
        return dict.fromkeys(METRICS.keys() - {"cost_proxy"}, np.full(graph.num_designs, np.nan)), totals.refused
    return measure(small, totals), totals.refused


def _quotient(engine: Engine, graph: TaskGraph) -> Quotient:
    """The graph in which tasks that are alike are one; with all tasks for a simulator of others."""
    if isinstance(engine, ForeignEngine):
        return Quotient(graph, np.arange(graph.num_tasks, dtype=np.int32))
    return reduce_graph(graph)


def _measure_all(engine: Engine, graph: TaskGraph) -> tuple[dict[str, Floats], Refused | None]:
    """Metrics of the worst GPU, in blocks of designs whose timelines fit into memory."""
    quotient = _quotient(engine, graph)
    block_size = max(1, _MOST_CELLS // graph.num_tasks)
    metrics, refused = [], []
    for start in range(0, graph.num_designs, block_size):
        places = np.arange(start, min(start + block_size, graph.num_designs))
        block = graph.take(places)
        timeline = quotient.whole(engine.run(quotient.graph.take(places)), block)
        metrics.append(measure_worst(block, timeline))
        refused.append(timeline.refused or Refused(np.zeros(len(places), np.int32)))
    columns = {name: np.concatenate([block_metrics[name] for block_metrics in metrics]) for name in metrics[0]}
    return columns, _join_refusals(refused)


def _join_refusals(parts: Sequence[Refused]) -> Refused:
    """Join the refusals of blocks of designs."""
    texts = list(dict.fromkeys(text for part in parts for text in part.texts))
    codes = [np.array([texts.index(text) for text in part.texts], np.int32)[part.code] for part in parts]
    return Refused(np.concatenate(codes), tuple(texts))


def _last_gpu(timeline: Timeline) -> Replay:
    """Timeline of the GPU that ends last, and the limits of the node."""
    graph = timeline.graph
    tasks = np.flatnonzero(graph.gpu == graph.gpu[int(np.argmax(timeline.finished[0]))])
    last = Timeline(graph.part(tasks), timeline.issued[:, tasks], timeline.finished[:, tasks])
    return Replay(tuple(last.intervals(0)), timeline.limits(0))


def _run(engines: Sequence[tuple[str, Engine]], graph: TaskGraph, measure_graph: _Measure) -> Results:
    """Results of a graph's designs by the first engine; designs that it refuses go to the next one."""
    (name, engine), *fallbacks = engines
    metrics, refused = measure_graph(engine, graph)
    refused = refused or Refused(np.zeros(graph.num_designs, np.int32))
    left, texts = refused.code > 0, (*refused.texts, name)
    status = np.where(left, STATUSES.index("unsupported"), STATUSES.index("ok")).astype(np.uint8)
    by = np.full(graph.num_designs, len(texts) - 1, np.int32)
    results = Results(status, metrics, refused.code, by, texts)
    if not left.any():
        return results
    if fallbacks:
        return _replace_results(results, left, _run(fallbacks, graph.take(np.flatnonzero(left)), measure_graph))
    return replace(results, metrics={key: np.where(left, np.nan, column) for key, column in results.metrics.items()})


def _replace_results(results: Results, where: NDArray[np.bool_], replacements: Results) -> Results:
    """Replace the results at the mask `where` by others, in order."""
    places = np.arange(results.size)
    places[where] = results.size + np.arange(replacements.size)
    return Results.join([results, replacements]).take(places)


def _schedule_type(tree: Tree) -> type[Any]:
    family = tree["schedule"].get("family")
    schedule: type[Schedule] = plugins.load("schedule", str(family))
    return schedule


def _is_pinned(kind: type[BaseModel], name: str) -> bool:
    """Return True if a family fixes a shared knob to None, so that it is not a choice."""
    return kind.model_fields[name].annotation is type(None)
