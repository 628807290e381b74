"""Blocks of points: what the walk of a space yields, and points whose idle knobs are settled.

A knob that changes nothing in a design (`Canonical`) takes one value there, whatever was asked for: such points are
one, and have one key. At the end: values at dotted paths of trees and frozen models.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import Backend, Batch, Canonical, Results, Tree, along, pieces
from dse.values import LABELS, Keys, content_keys, grid_content_keys, put

Assignment = dict[str, Any]

_MOST_SETTLED = 65_536  # designs whose knobs are asked for at once


@dataclass(frozen=True)
class Block:
    """Points that differ in some numbers only.

    assignment: the knobs that are fixed, in knob order. axes: path -> values [n] of the others, in knob order; the
    points are their Cartesian product, the last varying fastest. design: that of the first point; None where the
    model refuses all of them, for the `reason` given (axes then hold what was asked for, and `tree` says the rest).
    unsettled: what was typed or drawn, where a knob changes nothing and has the value that stands for all instead.
    """

    assignment: Assignment
    axes: Mapping[str, NDArray[Any]]
    design: BaseModel | None
    reason: str = ""
    tree: Tree = field(default_factory=dict, repr=False)
    unsettled: Block | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of points."""
        return math.prod(len(values) for values in self.axes.values())

    @property
    def batch(self) -> Batch | None:
        """Its designs; None where there are none."""
        return None if self.design is None else Batch(self.design, self.axes)

    def values_at(self, path: str) -> Any:
        """The values of its points at a path: a column [size], or one value for all."""
        if path in self.axes:
            return along(self.axes, path)
        return get_path(self.tree if self.design is None else self.design, path)

    def split(self, most: int) -> Iterator[Block]:
        """The same points in the same order, in blocks of at most `most`."""
        for axes in pieces(self.axes, most):
            yield self if axes is self.axes else self.part(axes)

    def part(self, axes: Mapping[str, NDArray[Any]]) -> Block:
        """The points that take only some of the values of each axis."""
        design = None if self.design is None else Batch(self.design, axes).at(0)
        # what was asked for has the same axes, and others
        unsettled = None if self.unsettled is None else self.unsettled.part({**self.unsettled.axes, **axes})
        return replace(self, axes=axes, design=design, unsettled=unsettled)

    def fix(self, path: str, value: Any) -> Block:
        """Its points with one value at a path; where that was an axis, they are fewer."""
        axes = {name: values for name, values in self.axes.items() if name != path}
        searched = path in self.assignment or path in self.axes
        assignment = {**self.assignment, path: value} if searched else self.assignment
        assert self.design is not None
        design = put(self.design, path, value)
        # the first question, if several knobs were fixed
        return replace(self, assignment=assignment, axes=axes, design=design, unsettled=self.unsettled or self)

    def runs(self, marks: NDArray[np.bool_]) -> Iterator[tuple[Block, bool]]:
        """The same points in blocks over which `marks` [size] has one value, with that value."""
        if marks.all() or not marks.any():
            yield self, bool(marks.any())
            return
        grid = marks.reshape([len(values) for values in self.axes.values()])
        steps = [np.diff(grid.astype(np.int8), axis=place) for place in range(grid.ndim)]
        # an axis along which the marks change: cut it there
        place = next(place for place, step in enumerate(steps) if step.any())
        path, values = list(self.axes.items())[place]
        other_axes = tuple(axis for axis in range(grid.ndim) if axis != place)
        for start, stop in itertools.pairwise(
            [0, *(1 + np.flatnonzero(steps[place].any(axis=other_axes))), len(values)]
        ):
            part = self.part({**self.axes, path: values[start:stop]})
            # parts may change along other axes
            yield from part.runs(np.take(grid, range(start, stop), axis=place).reshape(-1))

    def points(self) -> Iterator[Assignment]:
        """Its points, one by one, with the numbers that their designs hold."""
        for values in itertools.product(*(values.tolist() for values in self.axes.values())):
            yield {**self.assignment, **dict(zip(self.axes, values, strict=True))}

    def texts(self, scenario: str) -> list[str]:
        """Names of the points in the store: scenario and searched values, as JSON."""
        # without the closing brace, as axes follow
        head = json.dumps({"scenario": scenario, **self.assignment}, default=str)[:-1]
        parts = [
            [f", {json.dumps(path)}: {json.dumps(value, default=str)}" for value in values.tolist()]
            for path, values in self.axes.items()
        ]
        return ["".join((head, *values, "}")) for values in itertools.product(*parts)]

    def keys(self, *context: str) -> Keys:
        """Content hashes [size, 2] of its designs; where there is no design, of what was asked for."""
        if self.design is not None:
            return content_keys(self.design, self.axes, context)
        unlabelled = {section: _without_labels(tree) for section, tree in self.tree.items()}
        # no design has such a path: keys cannot meet
        return grid_content_keys(
            [f"refused = {json.dumps(unlabelled, sort_keys=True, default=str)}"], self.axes, context
        )


@dataclass
class KeyedBlock:
    """A block of designs of a scenario, their keys [B, 2], whether they were submitted, and their results, if any."""

    block: Block
    keys: Keys
    scenario: str
    results: Results | None = None
    submitted: bool = False

    @property
    def require_results(self) -> Results:
        """The results, which must be there."""
        assert self.results is not None
        return self.results


def _without_labels(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {name: _without_labels(value) for name, value in tree.items() if name not in LABELS}


def settle(blocks: Sequence[Block], backend: Backend) -> list[list[Block]]:
    """For each block the same points, each with one value for a knob that changes nothing in it.

    Designs of all blocks are asked about together: a backend takes those of one structure at once.
    """
    parts = [[block] for block in blocks]
    if not isinstance(backend, Canonical):
        return parts
    neutral = [backend.neutral(block.design) if block.design is not None else {} for block in blocks]
    # one question for each path and value, over all blocks
    for path, value in dict.fromkeys(item for values in neutral for item in values.items()):
        places = [place for place, values in enumerate(neutral) if values.get(path) == value]
        unsettled = [part for place in places for part in parts[place] if not _is_settled(part, path, value)]
        marks = iter(_idle(unsettled, path, value, by=backend))
        for place in places:
            parts[place] = [
                block
                for part in parts[place]
                for block in ([part] if _is_settled(part, path, value) else _fix_idle(part, path, value, next(marks)))
            ]
    return parts


def _is_settled(block: Block, path: str, value: Any) -> bool:
    return path not in block.axes and get_path(block.design, path) == value


def _idle(blocks: Sequence[Block], path: str, value: Any, *, by: Canonical) -> Iterator[NDArray[np.bool_]]:
    """For each block, at which of its designs `path` may have the value; asked for in calls of limited size."""
    batches = [block.batch for block in blocks if block.batch is not None]
    ends = np.cumsum([batch.size for batch in batches])
    # neighbours until so many designs are together
    for _, call in itertools.groupby(range(len(batches)), key=lambda place: int(ends[place]) // _MOST_SETTLED):
        yield from by.idle([batches[place] for place in call], path, value)


def _fix_idle(block: Block, path: str, value: Any, marks: NDArray[np.bool_]) -> Iterator[Block]:
    """The same points, those that are marked with the value at the path."""
    for part, idle in block.runs(marks):
        yield part.fix(path, value) if idle else part


def get_path(tree: Any, path: str) -> Any:
    """The value at a dotted path of a tree or a frozen model; None where there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return tree


def has_path(tree: Any, path: str) -> bool:
    """Tell whether a tree has a value at a dotted path, be it None."""
    for name in path.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


def set_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path in place. Raises KeyError where its parent is not a mapping."""
    *parents, last = path.split(".")
    for name in parents:
        tree = tree[name]
        if not isinstance(tree, dict):
            raise KeyError(path)
    tree[last] = value
