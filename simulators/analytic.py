"""Closed form over whole batches: longest path (max-plus), exact wherever no resource is over-subscribed.

    finish_t = max over predecessors p of finish_p + delay_t + work_t / rate_t,   rate_t = rate of t running alone

A design whose tasks would, so timed, ask more of a resource or pool than it has is refused: there fair sharing
changes the rates and the closed form is not exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulators.graph import TaskGraph
from simulators.timeline import Timeline

Floats = NDArray[np.float64]
_SLACK = 1e-9  # relative: a resource used to exactly its capacity is not over-subscribed


class AnalyticEngine:
    """NumPy over [designs]; one pass over the tasks."""

    version = "1"
    batch = 8192

    def run(self, graph: TaskGraph) -> Timeline:
        """Time every task alone on its longest path, and refuse designs in which that over-subscribes something."""
        rate = graph.isolated_rate()
        with np.errstate(invalid="ignore"):
            working = np.where(graph.work > 0, graph.work / rate, 0.0)
        issued, finished = np.zeros_like(working), np.zeros_like(working)
        for task in range(graph.num_tasks):
            before = graph.predecessors(task)
            if before.size:
                issued[:, task] = finished[:, before].max(axis=1)
            finished[:, task] = issued[:, task] + graph.delay[:, task] + working[:, task]
        return Timeline(graph, issued, finished, _refusals(graph, rate, finished - working, issued, finished))


def _refusals(graph: TaskGraph, rate: Floats, begun: Floats, issued: Floats, finished: Floats) -> tuple[str, ...]:
    reasons = [""] * graph.num_designs
    demand = graph.use * rate[:, graph.use_task]
    for index, name in enumerate(graph.resources):
        uses = np.flatnonzero(graph.use_resource == index)
        tasks = graph.use_task[uses]
        peak = peak_demand(demand[:, uses], begun[:, tasks], finished[:, tasks])
        _note(reasons, peak > graph.capacity[:, index] * (1 + _SLACK), f"{name} is over-subscribed")
    for index, name in enumerate(graph.pools):
        pooled = np.flatnonzero(graph.pool == index)
        start = issued[:, pooled]
        held = np.maximum(finished[:, pooled], start * (1 + 1e-11) + 1e-300)  # no work still needs a slot
        peak = peak_demand(np.ones_like(start), start, held)
        _note(reasons, peak > graph.slots[index], f"tasks wait for a slot of {name}")
    return tuple(reasons)


def _note(reasons: list[str], where: NDArray[np.bool_], reason: str) -> None:
    for design in np.flatnonzero(where):
        reasons[design] = reasons[design] or f"{reason}: fair sharing applies, the closed form is not exact"


def peak_demand(demand: Floats, start: Floats, stop: Floats) -> Floats:
    """Largest sum [B] of demand [B, N] over intervals [start, stop) [B, N] at any time.

    Ends within 1e-12 of a start count as before it: one canonical instant.
    """
    if demand.shape[1] == 0:
        return np.zeros(demand.shape[0])
    busy = stop > start * (1 + 1e-12)
    times = np.concatenate([start, stop * (1 - 1e-12)], axis=1)
    steps = np.concatenate([np.where(busy, demand, 0.0), np.where(busy, -demand, 0.0)], axis=1)
    order = np.argsort(times, axis=1, kind="stable")
    return np.asarray(np.cumsum(np.take_along_axis(steps, order, axis=1), axis=1).max(axis=1))


ENGINE = AnalyticEngine()
