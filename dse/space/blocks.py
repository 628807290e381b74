"""Blocks of points: what the walk of a space yields, and points whose idle knobs are settled.

A knob that changes nothing in a design (`Canonical`) takes one value there, whatever was asked for: such points are
one, and have one key. At the end: values at dotted paths of trees and frozen models, and rules between the parts of a
design, checked over a grid of designs, with the reasons why designs are infeasible.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel

from dse.backend import Backend, Batch, Canonical, Results, Tree
from dse.errors import Problem
from dse.values import LABELS, Keys, Memo, content_keys, distinct, grid_content_keys, leaves, put
from dse.values.grids import along, pieces

Assignment = dict[str, Any]

_MOST_SETTLED = 65_536  # designs whose knobs are asked for at once


@dataclass(frozen=True)
class Points:
    """Points that differ in some numbers only.

    assignment: the knobs that are fixed, in knob order. axes: path -> values [n] of the others, in knob order; the
    points are their Cartesian product, the last varying fastest. design: that of the first point; None where the
    model refuses all of them, for the `reason` given (axes then hold what was asked for, and `tree` says the rest).
    unsettled: what was typed or drawn, where a knob changes nothing and has the value that stands for all instead.
    scenario, keys [n, 2]: who asks for them, and content hashes of their designs, once they are `identified`.
    """

    assignment: Assignment
    axes: Mapping[str, NDArray[Any]]
    design: BaseModel | None
    reason: str = ""
    tree: Tree = field(default_factory=dict, repr=False)
    unsettled: Points | None = field(default=None, repr=False)
    scenario: str = ""
    keys: Keys = field(default_factory=lambda: np.empty((0, 2), np.uint64), repr=False)

    @cached_property
    def size(self) -> int:
        """Number of points."""
        return math.prod(map(len, self.axes.values()))

    @property
    def batch(self) -> Batch | None:
        """Its designs; None where there are none."""
        return None if self.design is None else Batch(self.design, self.axes)

    def values_at(self, path: str) -> Any:
        """The values of its points at a path: a column [size], or one value for all."""
        if path in self.axes:
            return along(self.axes, path)
        return get_path(self.tree if self.design is None else self.design, path)

    def split(self, most: int) -> Iterator[Points]:
        """The same points in the same order, in blocks of at most `most`."""
        start = 0
        for axes in pieces(self.axes, most):
            if axes is self.axes:
                yield self
                return
            part = self.part(axes)
            yield replace(part, keys=self.keys[start : start + part.size])
            start += part.size

    def part(self, axes: Mapping[str, NDArray[Any]]) -> Points:
        """The points that take only some of the values of each axis, not identified yet."""
        design = None if self.design is None else Batch(self.design, axes).at(0)
        # what was asked for has the same axes, and others
        unsettled = None if self.unsettled is None else self.unsettled.part({**self.unsettled.axes, **axes})
        return replace(self, axes=axes, design=design, unsettled=unsettled, keys=self.keys[:0])

    def fix(self, path: str, value: Any) -> Points:
        """Its points with one value at a path; where that was an axis, they are fewer."""
        axes = {name: values for name, values in self.axes.items() if name != path}
        searched = path in self.assignment or path in self.axes
        assignment = {**self.assignment, path: value} if searched else self.assignment
        assert self.design is not None
        design = put(self.design, path, value)
        # the first question, if several knobs were fixed
        return replace(
            self, assignment=assignment, axes=axes, design=design, unsettled=self.unsettled or self, keys=self.keys[:0]
        )

    def runs(self, marks: NDArray[np.bool_]) -> Iterator[tuple[Points, bool]]:
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

    def assignments(self) -> Iterator[Assignment]:
        """Its points, one by one, with the numbers that their designs hold."""
        for values in itertools.product(*(values.tolist() for values in self.axes.values())):
            yield {**self.assignment, **dict(zip(self.axes, values, strict=True))}

    @property
    def texts(self) -> list[str]:
        """Names of the points in the store: scenario and searched values, as JSON."""
        # without the closing brace, as axes follow
        head = json.dumps({"scenario": self.scenario, **self.assignment}, default=str)[:-1]
        parts = []
        for path, values in self.axes.items():
            name = f", {json.dumps(path)}: "
            parts.append([name + text for text in _json_texts(values)])
        return ["".join((head, *values, "}")) for values in itertools.product(*parts)]

    def identified(self, scenario: str, context: Sequence[str]) -> Points:
        """The same points with their keys. context: words that enter these."""
        return replace(self, scenario=scenario, keys=self.content_keys(*context))

    def content_keys(self, *context: str) -> Keys:
        """Content hashes [size, 2] of its designs; where there is no design, of what was asked for."""
        if self.design is not None:
            return content_keys(self.design, self.axes, context)
        unlabelled = {section: _without_labels(tree) for section, tree in self.tree.items()}
        # no design has such a path: keys cannot meet
        return grid_content_keys(
            [f"refused = {json.dumps(unlabelled, sort_keys=True, default=str)}"], self.axes, context
        )


def _json_texts(values: NDArray[Any]) -> list[str]:
    """Each value as JSON."""
    # as json.dumps writes finite numbers, in a tenth of its calls
    if values.dtype.kind in "iu" or (values.dtype.kind == "f" and np.isfinite(values).all()):
        return list(map(repr, values.tolist()))
    return [json.dumps(value, default=str) for value in values.tolist()]


def _without_labels(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {name: _without_labels(value) for name, value in tree.items() if name not in LABELS}


def settle(blocks: Sequence[Points], backend: Backend) -> list[list[Points]]:
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


def _is_settled(block: Points, path: str, value: Any) -> bool:
    return path not in block.axes and get_path(block.design, path) == value


def _idle(blocks: Sequence[Points], path: str, value: Any, *, by: Canonical) -> Iterator[NDArray[np.bool_]]:
    """For each block, at which of its designs `path` may have the value; asked for in calls of limited size."""
    batches = [block.batch for block in blocks if block.batch is not None]
    ends = np.cumsum([batch.size for batch in batches])
    # neighbours until so many designs are together
    for _, call in itertools.groupby(range(len(batches)), key=lambda place: int(ends[place]) // _MOST_SETTLED):
        yield from by.idle([batches[place] for place in call], path, value)


def _fix_idle(block: Points, path: str, value: Any, marks: NDArray[np.bool_]) -> Iterator[Points]:
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
    walked = [(path, value) if marked else path for path, value, marked in leaves(part, "")]
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


@dataclass(frozen=True)
class Rule:
    """A rule between the parts of a design, checked for a grid of designs at once.

    broken: flags over the grid (True: everywhere). rule, way_out: texts in which `{0}`, `{1}` ... stand for the
    numbers `given`. value: the value at `path`.
    """

    path: str
    broken: ArrayLike
    rule: str
    value: Any = None
    given: tuple[Any, ...] = ()
    way_out: str = ""

    @classmethod
    def of(cls, problem: Problem) -> Rule:
        """Turn a problem of all designs into a rule."""
        # texts of others are no templates
        escaped = (text.replace("{", "{{").replace("}", "}}") for text in (problem.rule, problem.way_out))
        rule, way_out = escaped
        return cls(problem.path, True, rule, problem.value, way_out=way_out)

    def problem(self, value: Any, numbers: Sequence[Any]) -> Problem:
        """Return the rule as a problem of a design with these numbers."""
        plain = [_plain(number) for number in numbers]
        return Problem(self.path, self.rule.format(*plain), _plain(value), self.way_out.format(*plain))


def problems(rules: Sequence[Rule]) -> list[Problem]:
    """Problems of a single design."""
    return [rule.problem(rule.value, rule.given) for rule in rules if rule.broken]


def reasons(rules: Sequence[Rule], shape: tuple[int, ...]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Reasons why designs are infeasible: code [B] over a grid of this shape, and texts; code 0, "", if feasible."""
    code, texts = np.zeros(shape, np.int32), {"": 0}
    for rule in rules:
        broken = np.broadcast_to(np.asarray(rule.broken, np.bool_), shape)
        if not broken.any():
            continue  # most rules hold everywhere
        numbers = [rule.value, *rule.given]
        varied = [np.broadcast_to(number, shape)[broken] for number in numbers if np.ndim(number)]
        # a text for each combination of numbers that occurs
        cases, which = np.unique(np.stack([code[broken], *varied]), axis=1, return_inverse=True)
        codes = []
        for before, *values in cases.T.tolist():
            varied_values = iter(values)
            value, *arguments = (next(varied_values) if np.ndim(number) else number for number in numbers)
            text = str(rule.problem(value, arguments))
            earlier = list(texts)[int(before)]  # a design may break several rules
            codes.append(texts.setdefault(f"{earlier}; {text}" if earlier else text, len(texts)))
        code[broken] = np.array(codes, np.int32)[which.reshape(-1)]
    return code.reshape(-1), tuple(texts)


def _plain(value: Any) -> Any:
    """Convert a number that is integral to int, one of NumPy to one of Python; other values are as they are."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value
