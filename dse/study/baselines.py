"""Baselines that points are compared with: the same points with the study's `baseline` put in.

The baselines of a block of points are a smaller grid: axes that do not count there, or that the baseline fixes, are
dropped. The grid is evaluated once, and every point finds its baseline by index.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.space import Block, KeyedBlock, Knob, Space

_REMEMBERED = 1_000_000  # designs of baselines that are kept, at about 100 bytes each
_WEIGHT = 100  # designs that a grid counts for by itself: it takes some kilobytes, however small


class Baselines:
    """Baselines of the blocks of one scenario.

    change: values that turn a point into its baseline. identify: computes the keys of a block.
    """

    def __init__(self, space: Space, change: Mapping[str, Any], identify: Callable[[Block], KeyedBlock]) -> None:
        self._space, self._change, self._identify = space, change, identify
        self._known: OrderedDict[str, KeyedBlock] = OrderedDict()  # name of a grid -> its keys, the least used first
        self._held = 0

    def of(self, block: Block) -> Iterator[tuple[Block, KeyedBlock]]:
        """Yield the block, or parts of it, each with the grid of its baselines.

        A block is split where the baselines of its points do not form one grid.
        """
        # any point of the block: which knobs count is the same in all of it
        point = {**block.assignment, **{path: values[0] for path, values in block.axes.items()}, **self._change}
        active = self._space.active(point)
        axes = {path: values for path, values in block.axes.items() if path in active and path not in self._change}
        fixed = {path: value for path, value in active.items() if path not in axes}
        # values, not identities: blocks of other parts of the space may share a grid
        name = repr((fixed, [(path, values.tolist()) for path, values in axes.items()]))
        if name not in self._known:
            free = [Knob(path, tuple(values.tolist())) for path, values in axes.items()]
            grids = list(self._space.resolve(fixed, free))
            if len(grids) > 1:  # a rule of the space may depend on an axis: take it apart
                yield from self._of_parts(block, next(path for path, values in axes.items() if len(values) > 1))
                return
            self._remember(name, grids[0])
        self._known.move_to_end(name)
        yield block, self._known[name]

    def _of_parts(self, block: Block, path: str) -> Iterator[tuple[Block, KeyedBlock]]:
        for place in range(len(block.axes[path])):
            yield from self.of(block.part({**block.axes, path: block.axes[path][place : place + 1]}))

    def _remember(self, name: str, grid: Block) -> None:
        self._known[name] = self._identify(grid)
        self._held += grid.size + _WEIGHT
        while self._held > _REMEMBERED and len(self._known) > 1:  # the newest grid stays, however large
            _, dropped = self._known.popitem(last=False)
            self._held -= dropped.block.size + _WEIGHT


def places(block: Block, baseline: Block) -> NDArray[np.intp]:
    """Return the index of each point's baseline in the grid of baselines of its block, [block.size]."""
    shape = tuple(len(values) for values in block.axes.values())
    if baseline.size == block.size:  # no axis was dropped: one to one
        return np.arange(block.size)
    # dropped axes have length 1
    extents = tuple(len(values) if path in baseline.axes else 1 for path, values in block.axes.items())
    assert math.prod(extents) == baseline.size
    # all points along a dropped axis share a baseline
    return np.broadcast_to(np.arange(baseline.size).reshape(extents), shape).reshape(-1)
