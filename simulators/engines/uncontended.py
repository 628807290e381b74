"""The machine without contention: every task runs as if it had all resources to itself.

The coarsest level of a ladder of models (docs/explanation/engines.md): the longest path of the graph, at isolated
rates. Waiting for slots and contention laws are left out, because they can only lengthen a run. The makespan is
therefore a lower bound of that of the exact engines, and equals it where no resource is used beyond its capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from simulators.taskgraph.graph import Floats, TaskGraph
from simulators.taskgraph.maxplus import IsolatedGraph
from simulators.taskgraph.timeline import Timeline, Totals

_MOST_CELLS = 1 << 22  # designs times tasks with timelines in memory at once: 32 MiB per array


class UncontendedEngine:
    """Runs every task graph without contention, and refuses none."""

    version = "1"
    batch = 262144  # a few arrays over the grid, so that large batches pay
    exact = False  # a lower bound of the makespan; searches use it for a first look

    def run(self, graph: TaskGraph) -> Timeline:
        """Time every task alone on its longest path."""
        return replace(IsolatedGraph.of(_free(graph)).timeline(), graph=graph)

    def totals(self, graph: TaskGraph) -> Totals:
        """Totals by closed forms, or by timelines where a structure has no small closed form."""
        alone = IsolatedGraph.of(_free(graph))
        return _by_timelines(self, graph) if alone.form.refusal else alone.totals()


def _free(graph: TaskGraph) -> TaskGraph:
    """Copy of the graph without pools of slots and contention laws."""
    return replace(graph, pool=np.full_like(graph.pool, -1), slowed=graph.slowed[:0])  # -1: no pool


def _by_timelines(engine: UncontendedEngine, graph: TaskGraph) -> Totals:
    """Totals of all designs, in batches whose timelines fit into memory."""
    most = max(1, _MOST_CELLS // graph.num_tasks)  # at least one design, however many tasks
    places = np.arange(graph.num_designs)
    parts = [engine.run(graph.take(places[start : start + most])).totals() for start in range(0, len(places), most)]

    def concatenate(pick: Callable[[Totals], Floats]) -> Floats:
        return np.concatenate([pick(part) for part in parts])

    return Totals(
        makespan_s=concatenate(lambda part: part.makespan_s),
        peak_staged_bytes=concatenate(lambda part: part.peak_staged_bytes),
        cu_s=concatenate(lambda part: part.cu_s),
        busy_s=_by_kind([part.busy_s for part in parts]),
        spent_s=_by_kind([part.spent_s for part in parts]),
    )


def _by_kind(parts: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    return {kind: np.concatenate([part[kind] for part in parts]) for kind in parts[0]}


ENGINE = UncontendedEngine()
