"""Batches of one structure as one design whose differing numbers are arrays over a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import Batch, Results
from dse.values import LABELS, Memo, distinct, leaves, put

D = TypeVar("D", bound=BaseModel)


@dataclass(frozen=True)
class Grid(Generic[D]):
    """A design whose numbers may be arrays that broadcast to `shape`: properties and equations broadcast over them."""

    design: D
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of designs."""
        return int(np.prod(self.shape))

    def take(self, keep: NDArray[np.bool_]) -> Grid[D]:
        """Select designs by a mask [size], as a grid of one axis."""
        mask = keep.reshape(self.shape)
        picked = _map_arrays(self.design, lambda array: np.broadcast_to(array, self.shape)[mask])
        return Grid(picked, (int(keep.sum()),))


def results_by_batch(
    batches: Sequence[Batch], kind: type[D], results: Callable[[Grid[D]], Results], apart: Callable[[D], Any] = type
) -> list[Results]:
    """Results of each batch, from the results of the grids that `grids` makes of all of them."""
    by_batch: dict[int, Results] = {}
    for indices, grid in grids(batches, kind, apart):
        by_batch |= split(results(grid), indices)
    return [by_batch[index] for index in range(len(batches))]


def split(results: Results, indices: Sequence[int]) -> dict[int, Results]:
    """Results of each batch, by its index, from those of the grid of some batches."""
    num_designs = results.size // len(indices)  # batches of a grid are equally large
    return {
        index: results.take(slice(place * num_designs, (place + 1) * num_designs))
        for place, index in enumerate(indices)
    }


def grids(
    batches: Sequence[Batch], kind: type[D], apart: Callable[[D], Any] = type
) -> Iterator[tuple[list[int], Grid[D]]]:
    """Yield (indices of batches, their grid) for batches with equal axes that differ only in non-structural numbers.

    The first axis of the grid is that of the batches, the others are the axes of a batch. kind: of their designs.
    apart: what else must be equal of the designs of a grid; may be hashed.
    """
    structures = Memo[tuple[Any, ...]]()
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, batch in enumerate(batches):
        design = batch.design
        assert isinstance(design, kind)
        # sections are shared by many designs
        parts = tuple(structures.get(partial(_structure, part), part) for _, part in design)
        axes = tuple((path, values.tobytes()) for path, values in batch.axes.items())
        groups.setdefault((apart(design), parts, axes), []).append(index)
    for indices in groups.values():
        first = batches[indices[0]]
        shape = (len(indices), *first.shape)
        aligned = (-1, *(1 for _ in first.shape))  # along the first axis
        merged = _merge([batches[index].design for index in indices], aligned)
        for place, (path, values) in enumerate(first.axes.items(), start=1):
            merged = put(merged, path, values.reshape([-1 if axis == place else 1 for axis in range(len(shape))]))
        yield indices, Grid(merged, shape)


def _structure(part: Any) -> tuple[Any, ...]:
    """Structural leaves of a section."""
    kinds = map(type, part.values() if isinstance(part, Mapping) else [part])
    # structural values must be equal, others need only be there
    walked = ((path, value) if marked else path for path, value, marked in leaves(part, ""))
    return (*kinds, *walked)


def _merge(values: Sequence[Any], aligned: tuple[int, ...]) -> Any:
    """Merge values into one; numbers that differ become an array along the first axis."""
    first = values[0]
    if all(value is first for value in values):  # the usual case: shared sections
        return first
    different, at = distinct(values)
    if len(different) < len(values):  # equal objects are merged once
        return _map_arrays(_merge(different, aligned), lambda array: array[at])
    if isinstance(first, BaseModel):
        columns = {name: [getattr(value, name) for value in values] for name in type(first).model_fields}
        # names may differ; that of the first stands
        parts = {name: column[0] if name in LABELS else _merge(column, aligned) for name, column in columns.items()}
        return type(first).model_construct(**parts)  # arrays are no legal values: not validated again
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
