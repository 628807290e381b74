"""Simulation of a grid of designs: lower them to a task graph, run an engine, measure the timeline.

Errors of predictions are drawn by the graph of a design with drawn work, all draws at once: tasks of a GEMM have the
error of GEMMs, transfers that of collectives, and a schedule that is not serial that of speed-ups by overlap, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse import plugins
from dse.backend import STATUSES, Result, Results
from dse.errors import Broken, ConfigError, Problem, Problems, did_you_mean, fault_text
from dse.space.blocks import Grid
from dse.values import Memo, leaves
from simulators.hardware.machine import System
from simulators.hardware.residuals import Draws, JointDraws, single, software_of
from simulators.hardware.schedule_system import WholeNode
from simulators.overlap.design import OverlapDesign, Schedule
from simulators.overlap.metrics import METRICS, Floats, cost_proxy, measure, measure_worst
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.symmetry import Quotient, patterns, reduce_graph
from simulators.taskgraph.timeline import Engine, ForeignEngine, Refusals, Timeline, losses
from simulators.workloads.operators import Gemm

_WHOLE_VERSION = "2"  # of the parts that only whole nodes use; raise it with every change that alters a result
_MOST_GRAPHS, _MOST_NUMBERS = 256, 1 << 16  # that are kept until they are evaluated, and numbers of one: 512 KiB
_MOST_CELLS = 1 << 20  # designs times tasks of whole nodes whose timelines are in memory at once: 8 MiB an array
_Measure = Callable[[Engine, TaskGraph], tuple[dict[str, Floats], Refusals | None]]
_ONE_ONLY = "this schedule lowers to one GPU only (simulator.gpus = all needs one that lowers by a Pipeline)"


class OverlapSimulation:
    """Engines, the first of which runs designs and the next what it refuses, on one GPU or a whole node.

    gpus, imbalance: as of `OverlapBackend`. Raises ConfigError where these do not fit.
    """

    def __init__(self, engines: Sequence[str], *, gpus: str, imbalance: float) -> None:
        self._imbalance = _check_imbalance(gpus, imbalance)
        self.engines: list[tuple[str, Engine]] = [(name, plugins.load("engine", name)) for name in engines]
        self._neutral: dict[Hashable, tuple[TaskGraph, NDArray[np.bool_]]] = {}

    @property
    def versions(self) -> list[str]:
        """Versions of what runs a graph, which are part of every result's key."""
        node_version = [] if self._imbalance is None else [f"node.{_WHOLE_VERSION}"]
        return [*(f"{name}.{engine.version}" for name, engine in self.engines), *node_version]

    def system(self, system: System) -> System:
        """Return the system as it is simulated: by one GPU, or with all GPUs."""
        return system if self._imbalance is None else WholeNode.of(system, self._imbalance)

    def lower(self, design: OverlapDesign) -> TaskGraph:
        """Task graph of a design, or of a grid of them."""
        with attributed(design.schedule, "lower"):
            return design.schedule.lower(self.system(design.system), design.workload)

    def num_tasks(self, design: OverlapDesign) -> int:
        """Tasks and contention laws of a design: of a whole node for each GPU, with laws for each GEMM chunk."""
        with attributed(design.schedule, "lower"):
            graph = design.schedule.lower(design.system, design.workload)
        if self._imbalance is None:
            return graph.num_tasks + len(graph.slowed)
        chunks = np.bincount(graph.group[graph.of_kind("gemm")] + 1, minlength=len(graph.groups) + 1)[1:]
        return (graph.num_tasks + int(chunks[graph.slowed].sum())) * design.system.node.num_gpus

    def neutral_graph(self, design: OverlapDesign) -> TaskGraph | None:
        """What `same_timeline` has lowered for these neutral designs, whatever their names; None for others."""
        graph, _ = self._neutral.get(_content(design), (None, None)) if self._neutral else (None, None)
        return graph

    def same_timeline(
        self, grid: Grid[OverlapDesign], neutral: Grid[OverlapDesign], *, ranked: bool
    ) -> NDArray[np.bool_]:
        """Mask [B] of the designs of a grid that certainly have the timeline of those of another one.

        ranked: the first have two priority classes, the others a single one. Which class goes first does not matter
        where both have what they want, so that the other order has the same answer.
        """
        from simulators.overlap.idle_knobs import same_timeline, without_priorities  # points that are given need none

        key = _content(neutral.design) if ranked else None
        if ranked and key in self._neutral:
            return self._neutral[key][1]
        graph = self.lower(grid.design)
        other = without_priorities(graph) if ranked else self.lower(neutral.design)
        same = same_timeline(graph, other, grid.shape)
        if np.any(graph.priority) and ranked and sum(column.size for column in graph.values) <= _MOST_NUMBERS:
            if len(self._neutral) >= _MOST_GRAPHS:
                self._neutral.clear()  # of a block of points that was evaluated long ago
            self._neutral[key] = other, same
        return same

    def results(self, graph: TaskGraph, grid: Grid[OverlapDesign]) -> Results:
        """Results of designs that break no rule, from their graph; designs with equal graphs share a run."""
        measure_graph: _Measure = _measure_one if self._imbalance is None else _measure_all
        if not _has_all_gpus(graph, grid.design.system, all_gpus=self._imbalance is not None):
            return Results.all_alike(Result("unsupported", reason=_ONE_ONLY), grid.size)
        parts = [(places, _run(self.engines, alike, measure_graph)) for places, alike in patterns(graph)]
        results = Results.join([run_results for _, run_results in parts])
        if len(parts) > 1:
            results = results.take(np.argsort(np.concatenate([places for places, _ in parts])))
        if graph.shape != grid.shape:
            places = np.arange(graph.num_designs).reshape(graph.shape)
            results = results.take(np.broadcast_to(places, grid.shape).reshape(-1))
        cost = np.broadcast_to(cost_proxy(grid.design.system), grid.shape).reshape(-1)
        cost = cost if results.ok.all() else np.where(results.ok, cost, np.nan)
        return replace(results, metrics={**results.metrics, "cost_proxy": cost})

    def timeline(self, design: OverlapDesign) -> Timeline:
        """Full timeline of one design, by the first engine that runs it."""
        graph = self.lower(design)
        for _, engine in self.engines:
            quotient = _quotient(engine, graph)
            timeline = engine.run(quotient.graph)
            if not timeline.reason(0):
                return quotient.whole(timeline, graph)
        raise ConfigError([Problem("simulator.engine", timeline.reason(0), way_out="use simulator=fluid")])


def _content(design: OverlapDesign) -> Hashable:
    """What a design, or a grid of them, is lowered from: paths and values."""
    return tuple(
        (path, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else (path, value)
        for path, value, _ in leaves(design)
    )


@contextmanager
def attributed(schedule: Schedule, method: str) -> Iterator[None]:
    """Raise what a schedule's code raises as Broken, with the place; refusals of input pass."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        text = f"schedule {schedule.name} fails in {method}: {fault_text(error, type(schedule).__module__)}"
        raise Broken(f"{text}; its numbers may be arrays over designs (docs/how-to/extend.md)") from error


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


def _measure_one(engine: Engine, graph: TaskGraph) -> tuple[dict[str, Floats], Refusals | None]:
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


def _measure_all(engine: Engine, graph: TaskGraph) -> tuple[dict[str, Floats], Refusals | None]:
    """Metrics of the worst GPU, in blocks of designs whose timelines fit into memory."""
    quotient = _quotient(engine, graph)
    block_size = max(1, _MOST_CELLS // graph.num_tasks)
    metrics, refused = [], []
    for start in range(0, graph.num_designs, block_size):
        places = np.arange(start, min(start + block_size, graph.num_designs))
        block = graph.take(places)
        timeline = quotient.whole(engine.run(quotient.graph.take(places)), block)
        metrics.append(measure_worst(block, timeline, quotient.of))
        refused.append(timeline.refused or Refusals(np.zeros(len(places), np.int32)))
    columns = {name: np.concatenate([block_metrics[name] for block_metrics in metrics]) for name in metrics[0]}
    return columns, _join_refusals(refused)


def _join_refusals(parts: Sequence[Refusals]) -> Refusals:
    """Join the refusals of blocks of designs."""
    texts = list(dict.fromkeys(text for part in parts for text in part.texts))
    codes = [np.array([texts.index(text) for text in part.texts], np.int32)[part.code] for part in parts]
    return Refusals(np.concatenate(codes), tuple(texts))


def _run(engines: Sequence[tuple[str, Engine]], graph: TaskGraph, measure_graph: _Measure) -> Results:
    """Results of a graph's designs by the first engine; designs that it refuses go to the next one."""
    (name, engine), *fallbacks = engines
    metrics, refused = measure_graph(engine, graph)
    refused = refused or Refusals(np.zeros(graph.num_designs, np.int32))
    left, texts = refused.code > 0, (*refused.texts, name)
    status = np.where(left, STATUSES.index("unsupported"), STATUSES.index("ok")).astype(np.uint8)
    by = np.full(graph.num_designs, len(texts) - 1, np.int32)
    results = Results(status, metrics, refused.code, by, texts)
    if not left.any():
        return results
    if fallbacks:
        return replace_results(results, left, _run(fallbacks, graph.take(np.flatnonzero(left)), measure_graph))
    return replace(results, metrics={key: np.where(left, np.nan, column) for key, column in results.metrics.items()})


def replace_results(results: Results, where: NDArray[np.bool_], replacements: Results) -> Results:
    """Replace the results at the mask `where` by others, in order."""
    places = np.arange(results.size)
    places[where] = results.size + np.arange(replacements.size)
    return Results.join([results, replacements]).take(places)


_COMPILED = "fluid"  # compiled: all engines mean the same
_SERIAL = "serial"


_drawn_graphs = Memo[TaskGraph](16)  # of a decision, which draws for each kind of error: a winner and its rivals


def draw_schedules(
    designs: Sequence[BaseModel],
    simulation: OverlapSimulation,
    *,
    samples: int,
    seed: int,
    exact: Sequence[str] = (),
) -> tuple[Floats, Mapping[str, str]]:
    """Makespans [designs, samples] with drawn errors, and what those of each kind rest on. exact: taken as measured."""
    times, draws = np.empty((len(designs), samples)), JointDraws(samples, seed, tuple(exact))
    for place, design in enumerate(designs):
        assert isinstance(design, OverlapDesign)
        graph = _drawn_graphs.find(design, simulation)
        if graph is None:
            graph = _drawn_graphs.keep(simulation.lower(design), design, simulation)
        times[place] = _ScheduleErrors(design, graph, draws.of(design.system.gpu)).makespans()
    return times, draws.basis


@dataclass(frozen=True)
class _ScheduleErrors:
    design: OverlapDesign
    graph: TaskGraph
    draws: Draws

    def makespans(self) -> Floats:
        """Makespans [S]."""
        factors = {"gemm": self._gemm(), "transfer": self._transfer()}
        graph = self.graph.draw({kind: np.append(factor, 1.0) for kind, factor in factors.items()})
        spans = _makespans(graph)  # the last one without errors
        drawn = spans[:-1]
        if getattr(self.design.schedule, "family", "") == _SERIAL:
            return drawn
        alone = sum(single(self.graph.grid_total("alone_s", self.graph.of_kind(kind))) for kind in ("gemm", "transfer"))
        speedup = alone / float(spans[-1])
        gemm = self._first_gemm()
        key = software_of(getattr(self.design.schedule, "name", ""))
        sizes = {"speedup": speedup} | ({} if gemm is None else {"m": single(gemm.m)})
        name = f"{self.design.schedule} {self.design.workload.name}"
        # no schedule takes less than the longer of GEMM and collective alone
        ideal = losses(graph, spans)["ideal_s"][:-1]
        traits = {"software": key, "gpu": self.draws.gpu}
        off = self.draws.factor("overlap", name, key=key, sizes=sizes, traits=traits)
        return np.maximum(drawn / off, np.minimum(ideal, drawn))

    def _first_gemm(self) -> Gemm | None:
        return next((op for op in self.design.workload.operators.values() if isinstance(op, Gemm)), None)

    def _gemm(self) -> Floats:
        """Factors [S] on GEMMs: as tables have them, m of outputs and n of tokens, on one GPU."""
        seconds = single(self.graph.grid_total("ideal_s", self.graph.of_kind("gemm")))
        gemm, sizes = self._first_gemm(), {"seconds": seconds}
        if gemm is None:
            return self.draws.factor("gemm", self.design.workload.name, sizes=sizes)
        shared: dict[str, Any] = {name: single(getattr(gemm, name)) for name in "mnk"}
        shared[gemm.split] /= float(gemm.shards)
        sizes |= {"m": shared["n"], "n": shared["m"], "k": shared["k"]}
        name = " ".join(f"{sizes[size]:g}" for size in "mnk")
        return self.draws.factor("gemm", name, key=gemm.precision, sizes=sizes)

    def _transfer(self) -> Floats:
        tasks = self.graph.of_kind("transfer")
        moved = single(self.graph.grid_total("moved_bytes", tasks))
        gpus = single(self.design.system.node.num_gpus)
        sizes = {"seconds": single(self.graph.grid_total("alone_s", tasks)), "bytes": moved, "gpus": gpus}
        traits = {"gpus": f"{self.draws.gpu} {gpus:g}"}
        return self.draws.factor("collective", f"{moved:.3g}", key="inside", sizes=sizes, traits=traits)


def _makespans(graph: TaskGraph) -> Floats:
    engine, spans = plugins.load("engine", _COMPILED), np.empty(graph.num_designs)
    for places, alike in patterns(graph):
        small = reduce_graph(alike).graph
        spans[slice(None) if places is None else places] = small.flat(engine.totals(small).makespan_s)
    return spans
