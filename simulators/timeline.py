"""What an engine returns: when every task of every design was issued and finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dse.backend import Interval, Replay
from simulators.graph import TaskGraph

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """issued, finished [B, T] in seconds; `refused` [B]: why a design could not be run exactly, or ''."""

    graph: TaskGraph
    issued: Floats
    finished: Floats
    refused: tuple[str, ...]

    @property
    def makespan(self) -> Floats:
        """[B] seconds from the start to the last finish."""
        return np.asarray(self.finished.max(axis=1))

    def intervals(self, design: int) -> Iterator[Interval]:
        """The tasks of one design that take time, in order of issue."""
        graph = self.graph
        for task in np.argsort(self.issued[design], kind="stable"):
            start, finish = float(self.issued[design, task]), float(self.finished[design, task])
            if finish > start:
                moved, flop = float(graph.moved_bytes[design, task]), float(graph.flop[design, task])
                yield Interval(graph.lanes[task], graph.tasks[task], graph.kinds[task], start, finish, moved, flop)

    def critical_path(self, design: int) -> list[int]:
        """Tasks from the first to the last finish, each issued when the one before it (a predecessor) finished."""
        finished = self.finished[design]
        path = [int(np.argmax(finished))]
        while (before := self.graph.predecessors(path[-1])).size:
            path.append(int(before[np.argmax(finished[before])]))
        return path[::-1]

    def limits(self, design: int) -> dict[str, float]:
        """Share of the makespan by what bounds each task of the critical path: its limiter, launch, contention."""
        graph, spent = self.graph, dict[str, float]()
        alone = graph.work[design] / graph.isolated_rate()[design]
        for task in self.critical_path(design):
            span = self.finished[design, task] - self.issued[design, task]
            excess = max(0.0, span - graph.delay[design, task] - alone[task])
            parts = {
                graph.limiters[task]: alone[task],
                "launch": graph.delay[design, task],
                "contention": excess,
            }
            for name, seconds in parts.items():
                spent[name] = spent.get(name, 0.0) + float(seconds)
        makespan = float(self.makespan[design])
        ordered = sorted(spent.items(), key=lambda item: -item[1])
        return {name: seconds / makespan for name, seconds in ordered if seconds > 1e-3 * makespan}

    def replay(self, design: int) -> Replay:
        """One design in full."""
        return Replay(tuple(self.intervals(design)), self.limits(design))


@runtime_checkable
class Engine(Protocol):
    """Runs task graphs. A module of `simulators` (or an entry point of `dse.simulators`) offers one as `ENGINE`."""

    version: str
    batch: int

    def run(self, graph: TaskGraph) -> Timeline:
        """Issue and finish times of every task of every design of the batch; refuses what it cannot run exactly."""
