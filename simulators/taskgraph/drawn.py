"""A task graph with the work of its tasks times drawn factors: as many designs as there are draws, run at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from simulators.taskgraph.graph import Floats, TaskGraph

_TIMES = ("work", "alone_s", "ideal_s", "wide_s")


def drawn_graph(graph: TaskGraph, factors: Mapping[str, Floats]) -> TaskGraph:
    """The graph of one design with factors [S] on the work of all tasks of a kind, as a grid of S designs.

    Set-ups and launches (`delay`) stay as they are. Raises ValueError for a graph of several designs.
    """
    if graph.num_designs != 1:
        raise ValueError(f"draws are of one design, and the graph has {graph.num_designs}")
    values = [value.reshape(1) for value in graph.values]
    at, columns = dict(graph.at), dict[tuple[int, str], int]()
    for name in _TIMES:
        places = at[name].copy()
        for task, kind in enumerate(graph.kinds):
            if kind not in factors or values[places[task]][0] == 0:
                continue
            key = int(places[task]), kind
            if key not in columns:  # tasks that share a column share the drawn one, too
                columns[key] = len(values)
                values.append(values[key[0]] * np.asarray(factors[kind], float))
            places[task] = columns[key]
        at[name] = places
    size = max((len(value) for value in values), default=1)
    return replace(graph, shape=(size,), values=tuple(values), at=at)
