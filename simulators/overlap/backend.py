"""The overlap backend: lower a schedule to a task graph, run an engine, read off the metrics; bounds of schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import STATUSES, Backend, Batch, Columns, Replay, Results, Tree
from dse.errors import Problem
from dse.space.blocks import Grid, Rule, grids, problems, reasons, results_by_batch, split
from dse.values import Memo, has_axis, put
from dse.values.grids import pieces
from simulators.hardware.network import link_rules
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.design import (
    Bound,
    DesignReader,
    OverlapDesign,
    ScheduleKnobs,
    fact_test,
    model_names,
    model_rules,
)
from simulators.overlap.metrics import BOUNDS, LAWS, METRICS, RELATIONS, Floats, relate
from simulators.overlap.simulation import OverlapSimulation, attributed, draw_schedules, replace_results
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.timeline import ForeignEngine, Timeline

_VERSION = "21"  # of the physics and the metrics; raise it with every change that alters a result


class OverlapBackend(Backend):
    """Backend for system x workload x schedule, run by one engine.

    engine: name of the first engine. fallback: engine for the designs that the first refuses, or None to report them
    as `unsupported`. gpus: simulate `one` representative GPU, or `all` of the node with shards as uneven as `imbalance`
    (see `simulators.hardware.schedule_system.WholeNode`); metrics are then those of the worst GPU.
    """

    metrics = METRICS
    machines: type[ScheduleSystem] = ScheduleSystem
    relations = RELATIONS
    bounds = BOUNDS
    laws = LAWS

    def __init__(self, engine: str, fallback: str | None = None, *, gpus: str = "one", imbalance: float = 0.0) -> None:
        self._simulation = OverlapSimulation(
            [name for name in (engine, fallback) if name], gpus=gpus, imbalance=imbalance
        )
        self._reader = DesignReader(self.machines)
        self._bounds = ScheduleBounds(self._simulation.lower)
        self.batch = self._simulation.engines[0][1].batch  # of the first engine, which runs most designs
        self.version = "+".join([_VERSION, *self._simulation.versions])

    def absence(self) -> str:
        """Why the first engine cannot run on this machine, or ""."""
        engine = self._simulation.engines[0][1]
        return engine.absence() if isinstance(engine, ForeignEngine) else ""

    def sections(self, tree: Tree) -> None:
        """Check that `system`, `workload` and `schedule` are mappings and that the schedule's family exists."""
        self._reader.check_sections(tree)

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Return one scenario per shape, or per written-out workload, of the list."""
        return self._reader.scenarios(tree)

    def design(self, tree: Tree) -> OverlapDesign:
        """Validate all three parts; ConfigError carries the problems of all of them."""
        return self._reader.design(tree)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Check the rules between schedule, system and workload."""
        assert isinstance(design, OverlapDesign)
        return problems(self._rules(design))

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Condition of `path`, as a schedule's knobs declare it."""
        return self._reader.condition(path, tree)

    def is_axis(self, path: str, design: BaseModel) -> bool:
        """Return True for numbers that do not change the structure."""
        return has_axis(design, path)

    def takes_long(self, design: BaseModel) -> bool:
        """True if the schedule is searched for."""
        assert isinstance(design, OverlapDesign)
        return isinstance(design.schedule, ScheduleKnobs) and design.schedule.searches

    def num_tasks(self, design: BaseModel) -> int:
        """Tasks and contention laws of a design, those of one GPU for each; none where it breaks a rule."""
        assert isinstance(design, OverlapDesign)
        return 0 if self.problems(design) else self._simulation.num_tasks(self.settle(design))

    def neutral(self, design: BaseModel) -> Mapping[str, Any]:
        """Neutral values of the schedule's knobs that may change nothing, without knobs that are inactive here."""
        assert isinstance(design, OverlapDesign)
        if not isinstance(design.schedule, ScheduleKnobs):
            return {}
        neutral = design.schedule.neutral()
        return {  # inactive knobs have no value
            f"schedule.{name}": value for name, value in neutral.items() if getattr(design.schedule, name) is not None
        }

    def idle(self, batches: Sequence[Batch], path: str, value: Any) -> list[NDArray[np.bool_]]:
        """Masks of designs with the same task graph, with priorities of no effect, or with the same broken rule."""
        masks: dict[int, NDArray[np.bool_]] = {}
        for indices, grid in grids(batches, OverlapDesign):
            same = self._idle_designs(grid, path, value).reshape(len(indices), -1)
            masks |= dict(zip(indices, same, strict=True))
        return [masks[index] for index in range(len(batches))]

    def _idle_designs(self, grid: Grid[OverlapDesign], path: str, value: Any) -> NDArray[np.bool_]:
        """Mask [B] of the designs of a grid in which `path` may have the value."""
        other = replace(grid, design=put(grid.design, path, value))  # the same designs with the other value
        mine, theirs = self._screen_grid(grid), self._screen_grid(other)
        same: NDArray[np.bool_] = np.array(mine.texts)[mine.reason] == np.array(theirs.texts)[theirs.reason]
        legal = same & mine.ok  # legal both ways, as texts of reasons are equal
        if legal.any():  # only legal designs can be lowered
            legal_grid, other_grid = (grid, other) if legal.all() else (grid.take(legal), other.take(legal))
            ranked = path.partition(".")[2] in getattr(legal_grid.design.schedule, "ranks", ())
            same[legal] = self._simulation.same_timeline(legal_grid, other_grid, ranked=ranked)
        return same

    def screen(self, batches: Sequence[Batch]) -> list[Results]:
        """Check the rules of all designs of one structure at once."""
        return results_by_batch(batches, OverlapDesign, self._screen_grid)

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Lower, run and measure all designs of one structure at once, with the schedules that they settle for."""
        settled = [
            self._decided_batches(batch) for batch in batches
        ]  # schedules that are searched for differ by design
        by_batch: dict[int, Results] = {}
        for indices, grid in grids([part for parts in settled for part in parts], OverlapDesign):
            results = self._screen_grid(grid)
            legal = results.ok
            if legal.any():  # designs that break a rule cannot be lowered
                allowed = grid if legal.all() else grid.take(legal)
                graph = self._simulation.neutral_graph(allowed.design) or self._simulation.lower(allowed.design)
                measured = self._simulation.results(graph, allowed)
                results = measured if allowed is grid else replace_results(results, legal, measured)
            by_batch |= split(results, indices)
        order = iter(range(len(by_batch)))
        return [Results.join([by_batch[next(order)] for _ in parts]) for parts in settled]

    def _decided_batches(self, batch: Batch) -> list[Batch]:
        """The batch, or one for each of its designs where the schedule is decided by system and workload."""
        assert isinstance(batch.design, OverlapDesign)
        if not self.takes_long(batch.design):
            return [batch]
        return [Batch(self.settle(design)) for design in batch.designs()]

    def settle(self, design: BaseModel) -> OverlapDesign:
        """The design with the schedule that it settles for, unless it breaks a rule."""
        assert isinstance(design, OverlapDesign)
        if not self.takes_long(design) or self.problems(design):
            return design
        assert isinstance(design.schedule, ScheduleKnobs)
        return design.model_copy(update={"schedule": design.schedule.settle(design.system, design.workload)})

    def _screen_grid(self, grid: Grid[OverlapDesign]) -> Results:
        """Check the rules of a grid's designs, without metrics."""
        reason, texts = reasons(self._rules(grid.design), grid.shape)
        status = np.where(reason > 0, STATUSES.index("infeasible"), STATUSES.index("ok")).astype(np.uint8)
        return Results(status, {}, reason, np.zeros_like(reason), texts)

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Compute speed-ups, and the shares of two ideals that they reach."""
        return relate(point, baseline)

    def bound(self, batch: Batch, metrics: Columns) -> Columns:
        """Bound of the schedules of each design of a batch, or of the orders of its tasks, and the gap to it."""
        makespan = metrics["makespan_s"]
        # designs that all break a rule may have no task graph
        seconds = self._bounds.seconds(batch) if np.isfinite(makespan).any() else np.full(makespan.shape, np.nan)
        return {"bound_s": seconds, "gap": makespan / seconds - 1}

    def binding(self, design: BaseModel) -> tuple[float, str] | None:
        """The bound of all schedules with the means of a design, and what binds it; None where there is only one of
        its tasks.
        """
        assert isinstance(design, OverlapDesign)
        return binding(design)

    def draw(
        self, designs: Sequence[BaseModel], *, samples: int, seed: int, exact: Sequence[str] = ()
    ) -> tuple[NDArray[np.float64], Mapping[str, str]]:
        """Makespans [designs, samples] with drawn errors, and what each kind of error rests on."""
        settled = [self.settle(design) for design in designs]
        return draw_schedules(settled, self._simulation, samples=samples, seed=seed, exact=exact)

    def replay(self, design: BaseModel) -> Replay:
        """Intervals and limits of one design."""
        return _last_gpu(self.timeline(design))

    def timeline(self, design: BaseModel) -> Timeline:
        """Full timeline of one design, by the first engine that runs it."""
        return self._simulation.timeline(self.settle(design))

    def elasticities(self, design: BaseModel, sides: Sequence[tuple[str, int]]) -> Sequence[float] | None:
        """Change of the makespan [%] for 1 % more, on sides of numbers; None where an engine is not exact."""
        assert isinstance(design, OverlapDesign)
        if not all(engine.exact for _, engine in self._simulation.engines):  # slopes are those of the exact semantics
            return None
        from simulators.overlap.elasticities import elasticities  # which few commands need

        return elasticities(self.settle(design), sides, self._simulation.lower)

    def _rules(self, design: OverlapDesign) -> list[Rule]:
        """Rules on links and on the models of costs; then those of the schedule."""
        system = self._simulation.system(design.system)
        of_models = list(model_rules(system, design.workload, design.schedule))  # broken: no costs for the schedule
        of_links = list(link_rules(design.system.node, design.system.gpu.num_links))
        if of_models:
            return [*of_links, *of_models]
        with attributed(design.schedule, "rules"):
            return [*of_links, *design.schedule.rules(system, design.workload)]

    def models(self, design: BaseModel) -> Mapping[str, str]:
        """Models of the costs of GEMMs and collectives."""
        assert isinstance(design, OverlapDesign)
        return model_names(design)

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the system with their sources, as far as the models of costs and the workload read them."""
        assert isinstance(design, OverlapDesign)
        reads = fact_test(design)
        return [fact for fact in design.system.facts() if reads(fact[0])]


def _last_gpu(timeline: Timeline) -> Replay:
    """Timeline of the GPU that ends last, and the limits of the node."""
    graph = timeline.graph
    # the GPU that decides the makespan
    tasks = np.flatnonzero(graph.gpu == graph.gpu[int(np.argmax(timeline.finished[0]))])
    last = Timeline(graph.part(tasks), timeline.issued[:, tasks], timeline.finished[:, tasks])
    return Replay(tuple(last.intervals(0)), timeline.limits(0))


_MOST_BOUNDS = 512  # designs whose bounds are computed at once: each by dozens of prices and CUs
_MOST_SYSTEMS = 4096  # systems with a workload whose bounds are kept


class ScheduleBounds:
    """Bounds of designs; where only system and workload decide one, it is computed once for all their schedules."""

    def __init__(self, lower: Callable[[OverlapDesign], TaskGraph]) -> None:
        self._lower = lower
        self._of_systems = Memo[Floats | None](_MOST_SYSTEMS)

    def seconds(self, batch: Batch) -> Floats:
        """Bound [s] of each design [B] of a batch."""
        return np.concatenate([self._seconds(Batch(batch.design, axes)) for axes in pieces(batch.axes, _MOST_BOUNDS)])

    def _seconds(self, batch: Batch) -> Floats:
        design = batch.design
        assert isinstance(design, OverlapDesign)
        shared = {path: values for path, values in batch.axes.items() if not path.startswith("schedule.")}
        key = type(design.schedule), *((path, values.tobytes()) for path, values in shared.items())
        proven = self._of_systems.get(
            lambda: _schedule_bound(Batch(design, shared)), design.system, design.workload, key=key
        )
        if proven is None:
            from simulators.taskgraph.bounds import bound
            from simulators.taskgraph.symmetry import reduce_graph

            ((_, grid),) = grids([batch], OverlapDesign)
            graph = reduce_graph(self._lower(grid.design)).graph
            return np.broadcast_to(bound(graph).seconds.reshape(graph.shape), grid.shape).reshape(-1)
        aligned = proven.reshape([len(shared[path]) if path in shared else 1 for path in batch.axes])
        return np.broadcast_to(aligned, batch.shape).reshape(-1)


def binding(design: OverlapDesign) -> tuple[float, str] | None:
    """The bound of all schedules with the means of a design, and what binds it; None where there is none."""
    if (proven := _proven(design)) is None:
        return None
    return float(np.ravel(proven.seconds)[0]), proven.names[int(np.ravel(proven.binds)[0])]


def _schedule_bound(batch: Batch) -> Floats | None:
    ((_, grid),) = grids([batch], OverlapDesign)
    proven = _proven(grid.design)
    return None if proven is None else np.broadcast_to(proven.seconds, grid.shape).reshape(batch.shape)


def _proven(design: OverlapDesign) -> Bound | None:
    """The bound of all schedules with the means of a design's; None where there is none."""
    if not isinstance(design.schedule, ScheduleKnobs):
        return None
    return design.schedule.bound(design.system, design.workload)
