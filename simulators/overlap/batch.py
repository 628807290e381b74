"""Batches of one structure as one design whose differing numbers are arrays over a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import Batch
from dse.values import LABELS, leaves, put
from simulators.overlap.design import Design


@dataclass(frozen=True)
class Grid:
    """A design whose numbers may be arrays that broadcast to `shape`: properties and equations broadcast over them."""

    design: Design
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of designs."""
        return int(np.prod(self.shape))

    def take(self, keep: NDArray[np.bool_]) -> Grid:
        """Select designs by a mask [size], as a grid of one axis."""
        mask = keep.reshape(self.shape)
        picked = _map_arrays(self.design, lambda array: np.broadcast_to(array, self.shape)[mask])
        return Grid(picked, (int(keep.sum()),))


def grids(batches: Sequence[Batch]) -> Iterator[tuple[list[int], Grid]]:
    """Yield (indices of batches, their grid) for batches with equal axes that differ only in non-structural numbers.

    The first axis of the grid is that of the batches, the others are the axes of a batch.
    """
    structures: dict[int, tuple[Any, ...]] = {}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, batch in enumerate(batches):
        design = batch.design
        assert isinstance(design, Design)
        parts = tuple(_structure(part, structures) for part in (design.system, design.workload, design.schedule))
        axes = tuple((path, values.tobytes()) for path, values in batch.axes.items())
        groups.setdefault((parts, axes), []).append(index)
    for indices in groups.values():
        first = batches[indices[0]]
        shape = (len(indices), *first.shape)
        aligned = (-1, *(1 for _ in first.shape))
        design = _merge([batches[index].design for index in indices], aligned)
        for place, (path, values) in enumerate(first.axes.items(), start=1):
            design = put(design, path, values.reshape([-1 if axis == place else 1 for axis in range(len(shape))]))
        yield indices, Grid(design, shape)


def _structure(part: Any, structures: dict[int, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Structural leaves of a part; parts shared by many designs are walked once."""
    if id(part) not in structures:
        structures[id(part)] = tuple((path, value if marked else None) for path, value, marked in leaves(part))
    return structures[id(part)]


def _merge(values: Sequence[Any], aligned: tuple[int, ...]) -> Any:
    """Merge values into one; numbers that differ become an array along the first axis."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if isinstance(first, BaseModel):
        columns = {name: [getattr(value, name) for value in values] for name in type(first).model_fields}
        parts = {name: column[0] if name in LABELS else _merge(column, aligned) for name, column in columns.items()}
        return type(first).model_construct(**parts)
    if isinstance(first, Mapping):
        return {name: _merge([value[name] for value in values], aligned) for name in first}
    if isinstance(first, (int, float)) and any(value != first for value in values):
        return np.array(values).reshape(aligned)
    return first


def _map_arrays(value: Any, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Any:
    """Apply `change` to all arrays of a value."""
    if isinstance(value, BaseModel):
        parts = {name: _map_arrays(getattr(value, name), change) for name in type(value).model_fields}
        return type(value).model_construct(**parts)
    if isinstance(value, Mapping):
        return {name: _map_arrays(item, change) for name, item in value.items()}
    return change(value) if isinstance(value, np.ndarray) else value
