"""Results of an engine: issue and finish times of every task, or only the totals that metrics need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dse.backend import Interval, Replay
from simulators.taskgraph.graph import TaskGraph

Floats = NDArray[np.float64]
_SAME_INSTANT = 1e-12  # relative, as in the engines


@dataclass(frozen=True)
class Refusals:
    """Reasons why designs cannot be run exactly: code [B] is an index into `texts`, 0 for a design that can be run."""

    code: NDArray[np.int32]
    texts: tuple[str, ...] = ("",)

    def __getitem__(self, design: int) -> str:
        return str(self.texts[self.code[design]])


@dataclass(frozen=True)
class Totals:
    """Quantities that the metrics need of the runs of B designs, in seconds and bytes, by kind of task.

    Each is [B], or an array that broadcasts over the graph's grid of designs: closed forms depend on few of its axes.

    busy_s: time during which a task of the kind runs (the length of the union of its intervals). spent_s: sum over
    the tasks of the kind. cu_s: CU-seconds occupied. refused: None if every design was run.
    """

    makespan_s: Floats
    peak_staged_bytes: Floats
    cu_s: Floats
    busy_s: Mapping[str, Floats]
    spent_s: Mapping[str, Floats]
    refused: Refusals | None = None

    def flat(self, graph: TaskGraph) -> Totals:
        """The same with every quantity as [B]."""
        makespan_s, peak, cu_s = map(graph.flat, (self.makespan_s, self.peak_staged_bytes, self.cu_s))
        busy_s, spent_s = (
            {kind: graph.flat(column) for kind, column in by_kind.items()} for by_kind in (self.busy_s, self.spent_s)
        )
        return Totals(makespan_s, peak, cu_s, busy_s, spent_s, self.refused)


@dataclass(frozen=True)
class Timeline:
    """Issue and finish times [B, T] of every task in seconds; refused: None if every design was run."""

    graph: TaskGraph
    issued: Floats
    finished: Floats
    refused: Refusals | None = None

    def reason(self, design: int) -> str:
        """Reason why a design was refused, or ''."""
        return self.refused[design] if self.refused else ""

    @property
    def makespan(self) -> Floats:
        """Seconds [B] from the start to the last finish."""
        return np.asarray(self.finished.max(axis=1))

    def totals(self) -> Totals:
        """Compute the totals from the intervals."""
        graph, spans = self.graph, self.finished - self.issued
        places = {kind: graph.of_kind(kind) for kind in dict.fromkeys(graph.kinds)}
        return Totals(
            makespan_s=self.makespan,
            peak_staged_bytes=self._peak_staging(),
            cu_s=row_sum(graph["cus"] * spans),
            busy_s={kind: busy(self.issued[:, at], self.finished[:, at]) for kind, at in places.items()},
            spent_s={kind: row_sum(spans[:, at] * graph.members[at]) for kind, at in places.items()},
            refused=self.refused,
        )

    def _peak_staging(self) -> Floats:
        """Peak of the staged bytes [B].

        A buffer fills when its task is issued and is free once its consumer has finished; in one instant, buffers are
        freed first.
        """
        consumer = self.graph.consumer
        # a buffer whose consumer ends in this instant is free before others fill
        freed = np.where(consumer >= 0, self.finished[:, consumer] * (1 - _SAME_INSTANT), np.inf)
        size = self.graph["staged_bytes"]
        times = np.concatenate([freed, self.issued], axis=1)
        steps = np.concatenate([-size, size], axis=1)
        order = np.argsort(times, axis=1, kind="stable")  # of equal times, frees come first, as they are listed first
        return np.asarray(np.cumsum(np.take_along_axis(steps, order, axis=1), axis=1).max(axis=1))

    def intervals(self, design: int) -> Iterator[Interval]:
        """Yield the tasks of one design that take time, in order of issue."""
        graph = self.graph
        moved, flop, delay = (graph[name][design] for name in ("moved_bytes", "flop", "delay"))
        for task in np.argsort(self.issued[design], kind="stable"):
            start, finish = float(self.issued[design, task]), float(self.finished[design, task])
            if finish > start:  # tasks without time have no interval to show
                named = (graph.lanes[task], graph.tasks[task], graph.kinds[task])
                yield Interval(*named, start, finish, float(moved[task]), float(flop[task]), float(delay[task]))

    def critical_path(self, design: int) -> list[int]:
        """Tasks from the first to the last finish, each issued when the one before it finished: a predecessor, or the
        task that had its slot.
        """
        finished = self.finished[design]
        path = [int(np.argmax(finished))]  # ties go to the lower index
        while (before := self._let_go(design, path[-1])).size:
            path.append(int(before[np.argmax(finished[before])]))
        return path[::-1]

    def _let_go(self, design: int, task: int) -> NDArray[np.integer[Any]]:
        """Tasks that had to finish before another one was issued: its predecessors, and those of its pool."""
        before, pool = self.graph.predecessors(task), self.graph.pool
        if pool[task] < 0:
            return before
        issued, finished = self.issued[design], self.finished[design]
        # of the pool, tasks that were issued earlier and ended by then
        done = (finished <= issued[task] * (1 + _SAME_INSTANT)) & (issued < issued[task])
        return np.concatenate([before, np.flatnonzero((pool == pool[task]) & done & (finished > issued))])

    def limits(self, design: int) -> dict[str, float]:
        """Share of the makespan by the bounds of the tasks on the critical path: limiter, launch, contention."""
        graph, spent = self.graph, dict[str, float]()
        alone, delay = graph["work"][design] / graph.isolated_rate()[design], graph["delay"][design]
        for task in self.critical_path(design):
            span = self.finished[design, task] - self.issued[design, task]
            excess = max(0.0, span - delay[task] - alone[task])  # rounding of a task that ran alone
            parts = {
                graph.limiters[task]: alone[task],
                "launch": delay[task],
                "contention": excess,
            }
            for name, seconds in parts.items():
                spent[name] = spent.get(name, 0.0) + float(seconds)
        makespan = float(self.makespan[design])
        ordered = sorted(spent.items(), key=lambda item: -item[1])
        # what is left is rounding, or of no interest
        return {name: seconds / makespan for name, seconds in ordered if seconds > 1e-3 * makespan}

    def replay(self, design: int) -> Replay:
        """Intervals and limits of one design."""
        return Replay(tuple(self.intervals(design)), self.limits(design))


def busy(start: Floats, finish: Floats) -> Floats:
    """Length [B] of the union of intervals [B, N]."""
    if start.shape[1] == 0:
        return np.zeros(start.shape[0])
    order = np.argsort(start, axis=1, kind="stable")  # by start
    start, finish = np.take_along_axis(start, order, 1), np.take_along_axis(finish, order, 1)
    covered = np.maximum.accumulate(finish, axis=1)  # latest end so far
    before = np.concatenate([np.full((len(start), 1), -np.inf), covered[:, :-1]], axis=1)  # nothing before the first
    # of each interval, what lies after all before it
    return row_sum(np.maximum(finish - np.maximum(start, before), 0.0))


def row_sum(table: NDArray[Any]) -> Floats:
    """Row sums [B], always in one memory order, so that a row sums to the same bits in a batch as alone."""
    return np.asarray(np.ascontiguousarray(table).sum(axis=1), dtype=float)


@runtime_checkable
class Engine(Protocol):
    """Runs task graphs. A module of `simulators` (or an entry point of `dse.simulators`) offers one as `ENGINE`.

    batch: preferred number of designs in a call. exact: whether the engine computes what
    docs/explanation/engines.md defines. Another engine of ours leaves contention out: its makespan is a lower bound,
    and exact where nothing is contended.
    """

    version: str
    batch: int
    exact: bool

    def run(self, graph: TaskGraph) -> Timeline:
        """Issue and finish times of every task of every design; a design that cannot be run exactly is refused."""

    def totals(self, graph: TaskGraph) -> Totals:
        """Totals of the same runs: `self.run(graph).totals()`, unless the engine has a faster way."""


@runtime_checkable
class ForeignEngine(Engine, Protocol):
    """A simulator of others as an engine: what it computes is its own, and the tasks of all GPUs are given to it."""

    def absence(self) -> str:
        """Why it cannot run on this machine, with the way out, or ""."""

    def collective_s(self, kind: str, num_bytes: Floats, gpus: Floats, bytes_per_s: float, device: str = "") -> Floats:
        """Times [s] of N collectives among GPUs at a switch, whose ports have a rate each way.

        num_bytes [N]: of the larger buffer. device: name of the GPU in tables of measured times.
        """
