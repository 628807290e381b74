"""Partial order of a graph's tasks by its structure: the tasks that can run at once, whatever the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.taskgraph.graph import TaskGraph

Flags = NDArray[np.bool_]
Places = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class TaskOrder:
    """The partial order of T tasks. ahead [T, T]: whether the second task is done before the first is issued."""

    ahead: Flags

    @classmethod
    def of(cls, graph: TaskGraph) -> TaskOrder:
        """The transitive closure of the dependencies."""
        ahead = np.zeros((graph.num_tasks, graph.num_tasks), np.bool_)
        for task in range(graph.num_tasks):
            before = graph.predecessors(task)
            ahead[task, before] = True
            ahead[task] |= ahead[before].any(axis=0)  # predecessors are complete: tasks are in topological order
        return cls(ahead)

    def comparable(self, first: Places, second: Places) -> Flags:
        """Flags [len(first), len(second)] of the pairs in which one task runs before the other."""
        return np.asarray(self.ahead[np.ix_(first, second)] | self.ahead[np.ix_(second, first)].T)

    def is_chain(self, tasks: Places) -> bool:
        """Return whether no two of the tasks can ever run at once."""
        # a task is not ordered with itself
        return bool((self.comparable(tasks, tasks) | np.eye(len(tasks), dtype=np.bool_)).all())

    def crowds(self, tasks: Places, demands: Sequence[int]) -> set[tuple[frozenset[int], ...]]:
        """Upper bound of the simultaneous demand on a resource, as sums of maxima of demands.

        demands: index of the demand of each task that uses the resource. The tasks active at any time are some task
        and, of each chain of the others, at most one task that is not ordered with it. Each element of the result is
        the demand of such a task and, chain by chain, the demands of which the largest may add to it.
        """
        chains = self._chains(tasks)
        beside = ~self.comparable(tasks, tasks) & ~np.eye(len(tasks), dtype=np.bool_)  # pairs that may run at once
        numbers = np.asarray(demands)
        crowds = set()
        for index in range(len(tasks)):
            # of a chain, at most one task runs at a time: the largest demand counts
            companions = (frozenset(numbers[chain[beside[index, chain]]].tolist()) for chain in chains)
            crowds.add((frozenset([demands[index]]), *(group for group in companions if group)))
        return crowds

    def _chains(self, tasks: Places) -> list[NDArray[np.intp]]:
        """Partition of the tasks (by their places) into chains, greedily."""
        chains: list[list[int]] = []
        for place, task in enumerate(tasks):
            # behind the last of a chain, so behind all of it
            fitting = (chain for chain in chains if self.ahead[task, tasks[chain[-1]]])
            chain = next(fitting, None)
            if chain is None:
                chains.append([place])
            else:
                chain.append(place)
        return [np.array(chain) for chain in chains]
