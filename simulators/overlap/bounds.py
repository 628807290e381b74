"""Bounds of the makespans of designs: of all their schedules, or of the orders of their tasks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dse.backend import Batch, pieces
from dse.space.grids import grids
from dse.values import Memo
from simulators.overlap.design import Bound, OverlapDesign, ScheduleKnobs
from simulators.overlap.metrics import Floats
from simulators.taskgraph.graph import TaskGraph

_MOST_BOUNDS = 512  # designs whose bounds are computed at once: each by dozens of prices and CUs
_MOST_SYSTEMS = 4096  # systems with a workload whose bounds are kept


class ScheduleBounds:
    """Bounds of designs; where only system and workload decide one, it is computed once for all their schedules."""

    def __init__(self, lower: Callable[[OverlapDesign], TaskGraph]) -> None:
        self._lower = lower
        self._of_systems = Memo[Floats | None](_MOST_SYSTEMS)

    def seconds(self, batch: Batch) -> Floats:
        """Bound [s] of each design [B] of a batch."""
        return np.concatenate([self._seconds(Batch(batch.design, axes)) for axes in pieces(batch.axes, _MOST_BOUNDS)])

    def _seconds(self, batch: Batch) -> Floats:
        design = batch.design
        assert isinstance(design, OverlapDesign)
        shared = {path: values for path, values in batch.axes.items() if not path.startswith("schedule.")}
        key = type(design.schedule), *((path, values.tobytes()) for path, values in shared.items())
        proven = self._of_systems.get(
            lambda: _schedule_bound(Batch(design, shared)), design.system, design.workload, key=key
        )
        if proven is None:
            from simulators.taskgraph.bounds import bound
            from simulators.taskgraph.symmetry import reduce_graph

            ((_, grid),) = grids([batch], OverlapDesign)
            graph = reduce_graph(self._lower(grid.design)).graph
            return np.broadcast_to(bound(graph).seconds.reshape(graph.shape), grid.shape).reshape(-1)
        aligned = proven.reshape([len(shared[path]) if path in shared else 1 for path in batch.axes])
        return np.broadcast_to(aligned, batch.shape).reshape(-1)


def binding(design: OverlapDesign) -> tuple[float, str] | None:
    """The bound of all schedules with the means of a design, and what binds it; None where there is none."""
    if (proven := _proven(design)) is None:
        return None
    return float(np.ravel(proven.seconds)[0]), proven.names[int(np.ravel(proven.binds)[0])]


def _schedule_bound(batch: Batch) -> Floats | None:
    ((_, grid),) = grids([batch], OverlapDesign)
    proven = _proven(grid.design)
    return None if proven is None else np.broadcast_to(proven.seconds, grid.shape).reshape(batch.shape)


def _proven(design: OverlapDesign) -> Bound | None:
    """The bound of all schedules with the means of a design's; None where there is none."""
    if not isinstance(design.schedule, ScheduleKnobs):
        return None
    return design.schedule.bound(design.system, design.workload)
