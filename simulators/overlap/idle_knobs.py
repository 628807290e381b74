"""Knobs that change nothing: at which designs of a grid another value of a knob gives the same timeline.

Two task graphs have the same timeline if they are equal, or if they differ in priorities alone and no resource that
tasks of several priority classes share can be over-subscribed: then every task runs at its own cap, or at what its
class shares, whoever goes first.
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
_MOST_TASKS = 4096  # of a graph that is looked at closely
_ROUNDING = 1e-12  # of a capacity: CUs that are dealt out to the last one are not over-subscribed


def same_timeline(one: TaskGraph, other: TaskGraph, shape: tuple[int, ...]) -> Bools:
    """At which designs [B] of a grid two graphs certainly have the same timeline; names of tasks do not count."""
    if any(not np.array_equal(getattr(one, name), getattr(other, name)) for name in _STRUCTURE):
        return np.zeros(int(np.prod(shape)), bool)
    same = np.broadcast_to(_same_numbers(one, other), shape).reshape(-1)
    if np.array_equal(one.priority, other.priority):
        return same
    for graph in (one, other):
        same = same & ~np.broadcast_to(is_oversubscribed(graph).reshape(graph.shape), shape).reshape(-1)
    return same


def without_priorities(graph: TaskGraph) -> TaskGraph:
    """The same graph with all tasks in one priority class."""
    return replace(graph, priority=np.zeros_like(graph.priority))


def _same_numbers(one: TaskGraph, other: TaskGraph) -> Any:
    """Where over the grid all numbers are equal, as an array that broadcasts."""
    pairs = {pair for name in one.at for pair in zip(one.at[name].tolist(), other.at[name].tolist(), strict=True)}
    same: Any = np.ones((1,) * len(one.shape), bool)
    for mine, theirs in pairs:
        same = same & (one.values[mine] == other.values[theirs])
    return same


def is_oversubscribed(graph: TaskGraph) -> Bools:
    """At which designs [B] tasks of several priority classes may together ask for more of a resource than there is.

    An upper bound: what a task can use at most is added to the most that the tasks beside it can, one of each chain
    of tasks that wait for one another; what slows two tasks that run at once is counted.
    """
    found = np.zeros(graph.num_designs, bool)
    if len(np.unique(graph.priority)) < 2:
        return found
    if graph.num_tasks > _MOST_TASKS:
        return ~found  # to find out would take longer than to run them
    before, capacity = _ancestors(graph), graph["capacity"]
    for resource in range(len(graph.resources)):
        uses = np.flatnonzero(graph.use_resource == resource)
        if len(np.unique(graph.priority[graph.use_task[uses]])) > 1:
            found |= _Demand.of(graph, uses, before).most() > capacity[:, resource] * (1 + _ROUNDING)
    return found


@dataclass(frozen=True)
class _Demand:
    """What N tasks can want of one resource in B designs.

    alone, capped [B, N]: a task by itself, and by its cap alone. beside [N, N]: which may run at once. chain [N]: of
    which only one runs at a time. factors: (group slowed, group active) -> on the cap [B].
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
        """Of the tasks of some uses of a resource."""
        tasks, use = graph.use_task[uses], graph["use"][:, uses]
        factor = graph["factor"]
        return cls(
            graph.isolated_rate()[:, tasks] * use,
            graph["cap"][:, tasks] * use,
            _beside(tasks, before),
            _chains(tasks, before),
            graph.priority[tasks],
            graph.group[tasks],
            {(int(own), int(other)): factor[:, place] for place, (own, other) in enumerate(graph.slowed)},
        )

    def most(self) -> Floats:
        """The most [B] that is wanted while tasks of several classes run."""
        classes, counts = np.unique(self.priority, return_counts=True)
        fewer = np.flatnonzero(self.priority != classes[np.argmax(counts)])  # one of them runs whenever classes compete
        order = np.argsort(self.chain, kind="stable")
        starts = np.flatnonzero(np.diff(self.chain[order], prepend=-1))
        most = np.zeros(len(self.alone))
        for task in fewer:
            others = np.where(self.beside[task], self._slowed_by(int(self.group[task])), 0.0)[:, order]
            own = self._beside_others(task)
            most = np.maximum(most, own + np.maximum.reduceat(others, starts, axis=1).sum(axis=1))
        return most

    def _slowed_by(self, group: int) -> Floats:
        """What each task [B, N] wants while one of a group runs."""
        wanted = self.alone.copy()
        for (slowed, active), factor in self.factors.items():
            if active == group:
                where = self.group == slowed
                wanted[:, where] = np.minimum(wanted[:, where], self.capped[:, where] * factor[:, None])
        return wanted

    def _beside_others(self, task: np.intp) -> Any:
        """What a task wants [B] while one of another class runs, whichever slows it least; 0 where none can."""
        others = self.beside[task] & (self.priority != self.priority[task])
        own = int(self.group[task])
        factors = [self.factors.get((own, other), 1.0) for other in np.unique(self.group[others]).tolist()]
        if not factors:
            return 0.0
        slowest = np.maximum.reduce(np.broadcast_arrays(*factors, self.alone[:, task])[:-1])
        return np.minimum(self.alone[:, task], self.capped[:, task] * slowest)


def _ancestors(graph: TaskGraph) -> Bools:
    """Which tasks each task [T, T] waits for, directly or not."""
    found = np.zeros((graph.num_tasks, graph.num_tasks), bool)
    for task in range(graph.num_tasks):
        before = graph.predecessors(task)
        np.logical_or.reduce(found[before], axis=0, out=found[task])
        found[task, before] = True
    return found


def _beside(tasks: NDArray[np.integer[Any]], before: Bools) -> Bools:
    """Which of some tasks [N, N] do not wait for one another."""
    waits = before[np.ix_(tasks, tasks)]
    return np.asarray(~(waits | waits.T | np.eye(len(tasks), dtype=bool)))


def _chains(tasks: NDArray[np.integer[Any]], before: Bools) -> NDArray[np.intp]:
    """A chain for each of some tasks [N], such that those of one chain wait for one another (first fit)."""
    chain = np.zeros(len(tasks), np.intp)
    last: list[int] = []
    for place, task in enumerate(tasks.tolist()):
        fits: Any = np.flatnonzero(before[task, last]) if last else []
        own = int(fits[0]) if len(fits) else len(last)
        last[own : own + 1] = [task]
        chain[place] = own
    return chain
