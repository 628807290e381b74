"""Idle knobs: the designs of a grid at which another value of a knob gives the same timeline.

Two task graphs have the same timeline if they are equal, or if they differ in priorities alone and no resource that
tasks of several priority classes share can be over-subscribed: then every task runs at its own cap, or at the share
within its class, independent of priorities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.taskgraph.graph import Floats, TaskGraph

Bools = NDArray[np.bool_]

_STRUCTURE = (
    *("kinds", "lanes", "limiters", "resources", "pools", "groups", "pred_ptr", "pred", "use_task", "use_resource"),
    *("pool", "slots", "consumer", "members", "group", "slowed", "gpu"),
)
_MOST_TASKS = 4096  # of a graph that is analysed
_ROUNDING = 1e-12  # of a capacity: fully allocated CUs are not over-subscribed


def same_timeline(first: TaskGraph, second: TaskGraph, shape: tuple[int, ...]) -> Bools:
    """Mask [B] of the designs of a grid for which two graphs certainly have the same timeline; ignores task names."""
    if any(not np.array_equal(getattr(first, name), getattr(second, name)) for name in _STRUCTURE):
        return np.zeros(int(np.prod(shape)), bool)
    same = np.broadcast_to(_same_numbers(first, second), shape).reshape(-1)
    if np.array_equal(first.priority, second.priority):
        return same
    for graph in (first, second):
        same = same & ~np.broadcast_to(is_oversubscribed(graph).reshape(graph.shape), shape).reshape(-1)
    return same


def without_priorities(graph: TaskGraph) -> TaskGraph:
    """Return the graph with all tasks in one priority class."""
    return replace(graph, priority=np.zeros_like(graph.priority))


def _same_numbers(first: TaskGraph, second: TaskGraph) -> Any:
    """Mask over the grid, as an array that broadcasts, of the designs with all numbers equal."""
    pairs = {pair for name in first.at for pair in zip(first.at[name].tolist(), second.at[name].tolist(), strict=True)}
    same: Any = np.ones((1,) * len(first.shape), bool)
    for mine, theirs in pairs:
        same = same & (first.values[mine] == second.values[theirs])
    return same


def is_oversubscribed(graph: TaskGraph) -> Bools:
    """Mask [B] of the designs in which tasks of several priority classes may together exceed a resource's capacity.

    An upper bound: the largest use of a task is added to the largest uses of the tasks that may run beside it, one of
    each chain of dependent tasks; slowdowns between concurrent tasks are included.
    """
    oversubscribed = np.zeros(graph.num_designs, bool)
    if len(np.unique(graph.priority)) < 2:
        return oversubscribed
    if graph.num_tasks > _MOST_TASKS:
        return ~oversubscribed  # the analysis would take longer than the runs
    before, capacity = _ancestors(graph), graph["capacity"]
    for resource in range(len(graph.resources)):
        uses = np.flatnonzero(graph.use_resource == resource)
        if len(np.unique(graph.priority[graph.use_task[uses]])) > 1:
            oversubscribed |= _Demand.of(graph, uses, before).most() > capacity[:, resource] * (1 + _ROUNDING)
    return oversubscribed


@dataclass(frozen=True)
class _Demand:
    """Demand of N tasks for one resource in B designs.

    alone, capped [B, N]: of an isolated task, and by its cap alone. beside [N, N]: pairs that may run at once. chain
    [N]: index of its chain, of which one task runs at a time. factors: (group slowed, group active) -> on the cap [B].
    """

    alone: Floats
    capped: Floats
    beside: Bools
    chain: NDArray[np.intp]
    priority: NDArray[np.int32]
    group: NDArray[np.int32]
    factors: Mapping[tuple[int, int], Floats]

    @classmethod
    def of(cls, graph: TaskGraph, uses: NDArray[np.intp], before: Bools) -> _Demand:
        """Build from the tasks of `uses` of a resource."""
        tasks, use = graph.use_task[uses], graph["use"][:, uses]
        factor = graph["factor"]
        return cls(
            graph.isolated_rate()[:, tasks] * use,
            graph["cap"][:, tasks] * use,
            _beside(tasks, before),
            _chains(tasks, before),
            graph.priority[tasks],
            graph.group[tasks],
            {(int(slowed), int(active)): factor[:, place] for place, (slowed, active) in enumerate(graph.slowed)},
        )

    def most(self) -> Floats:
        """Largest demand [B] while tasks of several classes run."""
        classes, counts = np.unique(self.priority, return_counts=True)
        fewer = np.flatnonzero(self.priority != classes[np.argmax(counts)])  # one of them runs whenever classes compete
        order = np.argsort(self.chain, kind="stable")
        starts = np.flatnonzero(np.diff(self.chain[order], prepend=-1))
        most = np.zeros(len(self.alone))
        for task in fewer:
            concurrent = np.where(self.beside[task], self._slowed_by(int(self.group[task])), 0.0)[:, order]
            demand = self._beside_others(task)
            most = np.maximum(most, demand + np.maximum.reduceat(concurrent, starts, axis=1).sum(axis=1))
        return most

    def _slowed_by(self, group: int) -> Floats:
        """Demand of each task [B, N] while a task of a group runs."""
        wanted = self.alone.copy()
        for (slowed, active), factor in self.factors.items():
            if active == group:
                where = self.group == slowed
                wanted[:, where] = np.minimum(wanted[:, where], self.capped[:, where] * factor[:, None])
        return wanted

    def _beside_others(self, task: np.intp) -> Any:
        """Demand of a task [B] beside the task of another class that slows it least; 0 if none can run beside it."""
        competitors = self.beside[task] & (self.priority != self.priority[task])
        group = int(self.group[task])
        factors = [self.factors.get((group, active), 1.0) for active in np.unique(self.group[competitors]).tolist()]
        if not factors:
            return 0.0
        slowest = np.maximum.reduce(np.broadcast_arrays(*factors, self.alone[:, task])[:-1])
        return np.minimum(self.alone[:, task], self.capped[:, task] * slowest)


def _ancestors(graph: TaskGraph) -> Bools:
    """Mask [T, T] of the direct and indirect predecessors of each task."""
    ancestors = np.zeros((graph.num_tasks, graph.num_tasks), bool)
    for task in range(graph.num_tasks):
        before = graph.predecessors(task)
        np.logical_or.reduce(ancestors[before], axis=0, out=ancestors[task])
        ancestors[task, before] = True
    return ancestors


def _beside(tasks: NDArray[np.integer[Any]], before: Bools) -> Bools:
    """Mask [N, N] of the pairs of tasks that are independent."""
    waits = before[np.ix_(tasks, tasks)]
    return np.asarray(~(waits | waits.T | np.eye(len(tasks), dtype=bool)))


def _chains(tasks: NDArray[np.integer[Any]], before: Bools) -> NDArray[np.intp]:
    """Assign each task [N] to a chain of dependent tasks (first fit)."""
    chain = np.zeros(len(tasks), np.intp)
    last: list[int] = []
    for place, task in enumerate(tasks.tolist()):
        fits: Any = np.flatnonzero(before[task, last]) if last else []
        index = int(fits[0]) if len(fits) else len(last)
        last[index : index + 1] = [task]
        chain[place] = index
    return chain
