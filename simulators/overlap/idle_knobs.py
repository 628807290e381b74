"""Idle knobs: the designs of a grid at which another value of a knob gives the same timeline.

Two task graphs have the same timeline if they are equal, or if they differ in priorities alone and no resource that
tasks of several priority classes share can be over-subscribed: then every task runs at its own cap, or at the share
within its class, independent of priorities.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    # other structures may have equal timelines, which is not decided here
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
    # columns that meet for some item
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
    if len(np.unique(graph.priority)) < 2:  # one class: nobody gives way
        return oversubscribed
    if graph.num_tasks > _MOST_TASKS:
        return ~oversubscribed  # the analysis would take longer than the runs
    before = _ancestors(graph)
    for resource in range(len(graph.resources)):
        uses = np.flatnonzero(graph.use_resource == resource)
        if len(np.unique(graph.priority[graph.use_task[uses]])) > 1:  # only classes that meet on a resource compete
            capacity = graph.values[graph.at["capacity"][resource]]
            exceeds = _Demand.of(graph, uses, before).most() > capacity * (1 + _ROUNDING)
            oversubscribed |= graph.flat(exceeds) > 0
    return oversubscribed


@dataclass(frozen=True)
class _Variant:
    """Tasks of one demand for a resource: of an isolated task, and by its cap alone, over the grid; and their group."""

    alone: Floats
    capped: Floats
    group: int


@dataclass(frozen=True)
class _Demand:
    """Demand of N tasks of a few variants for one resource.

    variant [N]: index of the variant. beside [N, N]: pairs that may run at once. chain [N]: index of the chain of a
    task, of which one runs at a time. factors: (group slowed, group active) -> on the cap, over the grid.
    """

    variants: Sequence[_Variant]
    variant: NDArray[np.intp]
    beside: Bools
    chain: NDArray[np.intp]
    priority: NDArray[np.int32]
    factors: Mapping[tuple[int, int], Floats]

    @classmethod
    def of(cls, graph: TaskGraph, uses: NDArray[np.intp], before: Bools) -> _Demand:
        """Build from the tasks of `uses` of a resource."""
        tasks, rates, values = graph.use_task[uses], graph.alone(), graph.values
        numbers = np.array([rates[task][0] for task in tasks.tolist()])
        # equal rate, cap, use and group: equal demand
        keys = np.stack([numbers, graph.at["cap"][tasks], graph.at["use"][uses], graph.group[tasks]], axis=1)
        _, first, variant = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        variants = [
            _Variant(rates[tasks[place]][1] * values[use], values[cap] * values[use], group)
            for place, (_, cap, use, group) in zip(first.tolist(), keys[first].tolist(), strict=True)
        ]
        factors = [values[column] for column in graph.at["factor"].tolist()]
        pairs = [(int(slowed), int(active)) for slowed, active in graph.slowed]
        beside, chain = _beside(tasks, before), _chains(tasks, before)
        return cls(
            variants, variant.reshape(-1), beside, chain, graph.priority[tasks], dict(zip(pairs, factors, strict=True))
        )

    def most(self) -> Floats:
        """Largest demand, over the grid, while tasks of several classes run."""
        classes, counts = np.unique(self.priority, return_counts=True)
        fewer = np.flatnonzero(self.priority != classes[np.argmax(counts)])  # one of them runs whenever classes compete
        most: Floats = np.zeros(())
        for variant, others, rivals in {self._situation(task) for task in fewer}:
            wanted = [self._slowed_by(self.variants[variant].group, other) for other in self.variants]
            demand = self._beside_rivals(self.variants[variant], rivals)
            for which, count in others:
                demand = demand + count * functools.reduce(np.maximum, [wanted[other] for other in which])
            most = np.maximum(most, demand)
        return most

    def _situation(self, task: np.intp) -> tuple[int, frozenset[tuple[tuple[int, ...], int]], frozenset[int]]:
        """Variant of a task; variants in chains beside it, and the number of such chains; groups of rivals there.

        Rivals are of another priority class. Tasks in the same situation have the same demand.
        """
        beside = np.flatnonzero(self.beside[task])
        present = np.zeros((int(self.chain.max()) + 1, len(self.variants)), np.bool_)
        present[self.chain[beside], self.variant[beside]] = True
        counts = Counter(chain.tobytes() for chain in present[present.any(axis=1)])
        chains = {tuple(np.flatnonzero(np.frombuffer(key, np.bool_)).tolist()): counts[key] for key in counts}
        rivals = self.variant[beside[self.priority[beside] != self.priority[task]]]
        groups = frozenset(self.variants[rival].group for rival in np.unique(rivals).tolist())
        return int(self.variant[task]), frozenset(chains.items()), groups

    def _slowed_by(self, group: int, other: _Variant) -> Floats:
        """Demand of a task of a variant while a task of a group runs."""
        factor = self.factors.get((other.group, group))
        return other.alone if factor is None else np.minimum(other.alone, other.capped * factor)

    def _beside_rivals(self, variant: _Variant, rivals: Iterable[int]) -> Floats:
        """Demand of a task beside the task of another class that slows it least; 0 if none can run beside it."""
        factors = [self.factors.get((variant.group, group), np.ones(())) for group in rivals]
        if not factors:
            return np.zeros(())
        return np.minimum(variant.alone, variant.capped * functools.reduce(np.maximum, factors))


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
