"""What a point is compared with: the same point with the study's `baseline` put in.

The baselines of a block of points are a smaller grid: axes that do not count there, or that the baseline fixes, are
dropped. It is evaluated once, and every point finds its own by index.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.space import Block, Evaluated, Knob, Space

_REMEMBERED = 1_000_000  # designs of baselines that are kept: about 100 bytes each,
_WEIGHT = 100  # and a grid by itself some kilobytes, however few they are


class Baselines:
    """Baselines of the blocks of one scenario.

    change: what turns a point into its baseline. identify: gives a block its keys.
    """

    def __init__(self, space: Space, change: Mapping[str, Any], identify: Callable[[Block], Evaluated]) -> None:
        self._space, self._change, self._identify = space, change, identify
        self._known: OrderedDict[str, Evaluated] = OrderedDict()
        self._held = 0

    def of(self, block: Block) -> Iterator[tuple[Block, Evaluated]]:
        """The block, or parts of it, each with the grid of its baselines.

        A block is cut up where its points have baselines that are no one grid.
        """
        point = {**block.assignment, **{path: values[0] for path, values in block.axes.items()}, **self._change}
        own = self._space.active(point)
        kept = {path: values for path, values in block.axes.items() if path in own and path not in self._change}
        fixed = {path: value for path, value in own.items() if path not in kept}
        name = repr((fixed, [(path, values.tolist()) for path, values in kept.items()]))
        if name not in self._known:
            free = [Knob(path, tuple(values.tolist())) for path, values in kept.items()]
            grids = list(self._space.resolve(fixed, free))
            if len(grids) > 1:
                yield from self._of_parts(block, next(path for path, values in kept.items() if len(values) > 1))
                return
            self._remember(name, grids[0])
        self._known.move_to_end(name)
        yield block, self._known[name]

    def _of_parts(self, block: Block, path: str) -> Iterator[tuple[Block, Evaluated]]:
        for place in range(len(block.axes[path])):
            yield from self.of(block.part({**block.axes, path: block.axes[path][place : place + 1]}))

    def _remember(self, name: str, grid: Block) -> None:
        self._known[name] = self._identify(grid)
        self._held += grid.size + _WEIGHT
        while self._held > _REMEMBERED and len(self._known) > 1:
            _, dropped = self._known.popitem(last=False)
            self._held -= dropped.block.size + _WEIGHT


def places(block: Block, baseline: Block) -> NDArray[np.intp]:
    """Where in the grid of its baselines each point of a block finds its own, [block.size]."""
    shape = tuple(len(values) for values in block.axes.values())
    if baseline.size == block.size:
        return np.arange(block.size)
    kept = tuple(len(values) if path in baseline.axes else 1 for path, values in block.axes.items())
    assert math.prod(kept) == baseline.size
    return np.broadcast_to(np.arange(baseline.size).reshape(kept), shape).reshape(-1)
