"""Elasticities of the makespan: its change in percent for one percent more of a number of the design.

d log makespan / d log number, on either side of the design: the slopes of the graph's columns along the number, by
differences of a lowering whose numbers lie close together, then the slope of the makespan along these, which is exact
(`simulators.taskgraph.slopes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dse.backend import Batch
from dse.space import get_path
from dse.space.blocks import grids
from dse.values import put
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.graph import Floats, TaskGraph
from simulators.taskgraph.slopes import slopes
from simulators.taskgraph.symmetry import reduce_graph

Flags = NDArray[np.bool_]
_STEP = 1e-4  # relative; differences of second order
_BENT = 1e-2  # share by which the difference of two steps may be off twice that of one
_JUMP = 1e-7  # relative change of a column that is no jump


def elasticities(
    design: OverlapDesign, sides: Sequence[tuple[str, int]], lower: Callable[[OverlapDesign], TaskGraph]
) -> Sequence[float]:
    """Elasticity of the makespan on each side of a number; NaN where the makespan or a cost jumps.

    sides: paths of numbers other than 0 that are axes, each with -1 (below) or 1. lower: the lowering of designs whose
    numbers are arrays.
    """
    # two steps give a derivative of second order, and show bends
    steps = [(path, sign * _STEP * times) for path, sign in sides for times in (1, 2)]
    designs = [put(design, path, get_path(design, path) * (1 + step)) for path, step in steps]
    ((_, grid),) = grids([Batch(point) for point in (design, *designs)], OverlapDesign)
    graph = reduce_graph(lower(grid.design)).graph
    # columns that depend on no number have one entry
    columns = np.broadcast_to(graph.columns(), (len(graph.values), len(designs) + 1))
    directions, jumps = _directions(columns)
    # direction 0: the makespan itself
    beside = slopes(graph.take(np.array([0])), np.column_stack([np.zeros(len(columns)), directions]))
    makespan = beside.makespan_s[0]
    jumps |= np.abs(beside.makespan_s[1:] - makespan) > _JUMP * makespan  # a kink has two slopes, a jump none
    signs = np.array([sign for _, sign in sides])
    return list(np.where(jumps, math.nan, signs * beside.slope[1:] / makespan).tolist())


def _directions(columns: Floats) -> tuple[Floats, Flags]:
    """Slope [K, D] of each column by relative change, and whether one jumps [D], from a table [K, 1 + 2 D]."""
    with np.errstate(invalid="ignore"):  # inf - inf of absent caps
        near, far = (np.nan_to_num(columns[:, first::2] - columns[:, :1]) for first in (1, 2))
    scale = np.where(np.isfinite(columns[:, :1]), np.abs(columns[:, :1]), 0.0)
    # a cost with a step, such as waves, has no derivative there
    bent = np.abs(far - 2 * near) > _BENT * np.abs(far) + _JUMP * scale
    return (4 * near - far) / (2 * _STEP), np.asarray(bent.any(axis=0))  # Richardson: the term of second order cancels
