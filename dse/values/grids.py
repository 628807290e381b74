"""Grids of numbers: products of axes, dotted path -> values [n], in C order: the last path varies fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def along(axes: Mapping[str, NDArray[Any]], path: str) -> NDArray[Any]:
    """The values of one axis at every point of a grid, [points]."""
    before = [1] * list(axes).index(path)
    after = [1] * (len(axes) - 1 - len(before))
    shape = [len(values) for values in axes.values()]
    return np.broadcast_to(axes[path].reshape([*before, -1, *after]), shape).reshape(-1)


def pieces(axes: Mapping[str, NDArray[Any]], most: int) -> Iterator[Mapping[str, NDArray[Any]]]:
    """The grid of some axes as smaller grids in the same order, each of at most `most` points."""
    size = math.prod(len(values) for values in axes.values())
    if size <= most:
        yield axes
        return
    path = next(path for path, values in axes.items() if len(values) > 1)
    values = axes[path]
    step = max(1, most // (size // len(values)))  # whole rows of the later axes, so that the order stays
    for first in range(0, len(values), step):
        yield from pieces({**axes, path: values[first : first + step]}, most)
