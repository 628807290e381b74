"""What the order of a graph's tasks says by itself, whatever its numbers: who can run beside whom."""

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
class Order:
    """The partial order of T tasks. ahead [T, T]: whether the second task is done before the first is issued."""

    ahead: Flags

    @classmethod
    def of(cls, graph: TaskGraph) -> Order:
        """The transitive closure of the dependencies."""
        ahead = np.zeros((graph.num_tasks, graph.num_tasks), np.bool_)
        for task in range(graph.num_tasks):
            before = graph.predecessors(task)
            ahead[task, before] = True
            ahead[task] |= ahead[before].any(axis=0)
        return cls(ahead)

    def comparable(self, one: Places, other: Places) -> Flags:
        """[len(one), len(other)]: whether one of the two runs before the other."""
        return np.asarray(self.ahead[np.ix_(one, other)] | self.ahead[np.ix_(other, one)].T)

    def is_chain(self, tasks: Places) -> bool:
        """Whether no two of the tasks can ever run at once."""
        return bool((self.comparable(tasks, tasks) | np.eye(len(tasks), dtype=np.bool_)).all())

    def crowds(self, tasks: Places, demands: Sequence[int]) -> set[tuple[frozenset[int], ...]]:
        """What can be demanded at once of a resource: an upper bound, as sums of maxima of demands.

        demands: which demand each of the tasks, its users, makes. At any time the users at work include one, and of
        every chain of the others at most one that is not ordered with it: each element of the result is such a
        user's own demand and, chain by chain, the demands of which the largest may join it.
        """
        chains = self._chains(tasks)
        beside = ~self.comparable(tasks, tasks) & ~np.eye(len(tasks), dtype=np.bool_)
        numbers = np.asarray(demands)
        found = set()
        for index in range(len(tasks)):
            joined = (frozenset(numbers[chain[beside[index, chain]]].tolist()) for chain in chains)
            found.add((frozenset([demands[index]]), *(one for one in joined if one)))
        return found

    def _chains(self, tasks: Places) -> list[NDArray[np.intp]]:
        """A partition of the tasks (by their places) into chains, greedily."""
        chains: list[list[int]] = []
        for place, task in enumerate(tasks):
            fitting = (chain for chain in chains if self.ahead[task, tasks[chain[-1]]])
            chain = next(fitting, None)
            if chain is None:
                chains.append([place])
            else:
                chain.append(place)
        return [np.array(chain) for chain in chains]
