"""Classes of tasks: those with the same uses, cap, weight, priority and group progress at the same rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.taskgraph.graph import TaskGraph

Places = NDArray[np.intp]


@dataclass(frozen=True)
class Classes:
    """Classes of tasks. of [T]: class of each task; first [C]: its first task; ptr, uses: its incidence rows (CSR)."""

    of: Places
    first: Places
    ptr: Places
    uses: Places

    @property
    def use_class(self) -> Places:
        """Class of each incidence row."""
        return np.repeat(np.arange(self.first.size), np.diff(self.ptr))


def classes_of(graph: TaskGraph) -> Classes:
    """Group the tasks with the same priority, group, resources, and columns of uses, cap and weight."""
    # stable: uses of a task keep their order, which is part of its class
    order = np.argsort(graph.use_task, kind="stable")
    ptr = np.searchsorted(graph.use_task[order], np.arange(graph.num_tasks + 1))
    pairs = list(zip(graph.use_resource[order].tolist(), graph.at["use"][order].tolist(), strict=True))
    # columns, not values: tasks of one column are equal in every design
    numbers = (graph.priority, graph.group, graph.at["cap"], graph.at["weight"], ptr[:-1], ptr[1:])
    index: dict[tuple[Any, ...], int] = {}
    of = [
        index.setdefault((*key, *pairs[begin:end]), len(index))
        for *key, begin, end in zip(*(column.tolist() for column in numbers), strict=True)
    ]
    # `of` numbers classes by first appearance, so the result is sorted
    _, first = np.unique(np.array(of, np.intp), return_index=True)
    counts = ptr[first + 1] - ptr[first]
    # runs of different lengths, end to end: begin of each run, plus the place within it
    uses = order[
        np.repeat(ptr[first], counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ]
    return Classes(np.array(of, np.intp), first, offsets(counts), uses)


def offsets(counts: NDArray[Any]) -> Places:
    """Begin of each of some runs of so many items, and the end of the last."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)
