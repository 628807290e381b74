"""The search space: knobs over a base tree, walked so that every distinct point comes up once.

A knob is a dotted path and its values. `<section>.name` is special: its values are options of the configuration
group `<section>`, and choosing one replaces the whole section. A knob that the chosen option does not have, or whose
condition does not hold, is left out of a point.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dse.backend import Backend, Tree

Assignment = dict[str, Any]


@dataclass(frozen=True)
class Knob:
    """Either finitely many `values`, or an interval [low, high] (`log`: sampled logarithmically)."""

    path: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether an interval begins and ends at a whole number."""
        return float(self.low).is_integer() and float(self.high).is_integer()

    @property
    def ordered(self) -> bool:
        """Whether the values are numbers in ascending order, so that neighbours are alike."""
        numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values)
        return numeric and list(self.values) == sorted(self.values)


@dataclass(frozen=True)
class Space:
    """Knobs over a base tree. options: section -> option name -> the section's tree for that option."""

    base: Tree
    knobs: tuple[Knob, ...]
    options: Mapping[str, Mapping[str, Tree]]
    backend: Backend

    @functools.cached_property
    def _order(self) -> tuple[Knob, ...]:
        return tuple(sorted(self.knobs, key=self._depth))

    def _depth(self, knob: Knob) -> int:
        """Options first, then free knobs, then those that depend on them, and so on."""
        if self.is_option(knob.path):
            return 0
        trees = [self.tree({f"{section}.name": name}) for section, named in self.options.items() for name in named]
        conditions = [self.backend.condition(knob.path, tree) or {} for tree in (self.base, *trees)]
        needed = {path for condition in conditions for path in condition}
        return 1 + max((self._depth(Knob(path)) for path in needed), default=0)

    def is_option(self, path: str) -> bool:
        """Whether the values of a path are options of a group."""
        section, _, name = path.partition(".")
        return name == "name" and section in self.options and section in self.base

    def tree(self, assignment: Mapping[str, Any]) -> dict[str, Any]:
        """The design tree of a point: options put in, then values set."""
        tree = dict(self.base)
        chosen = {path.partition(".")[0]: value for path, value in assignment.items() if path.endswith(".name")}
        for section, option in chosen.items():
            if section in self.options:
                tree[section] = self.options[section][option]
        values = {path: value for path, value in assignment.items() if not self.is_option(path)}
        for section in {path.partition(".")[0] for path in values}:
            tree[section] = copy.deepcopy(tree[section])
        for path, value in values.items():
            set_path(tree, path, value)
        return tree

    def walk(self, choose: Callable[[Knob], Any]) -> Assignment:
        """One point: `choose` is asked for each knob that counts, in an order in which conditions are known."""
        point: Assignment = {}
        for knob in self._order:
            if self._counts(knob, point):
                point[knob.path] = choose(knob)
        return point

    def points(self) -> Iterator[Assignment]:
        """Every distinct point of a finite space, in the knobs' order."""
        yield from self._expand({}, self._order)

    def size(self, most: int | None = None) -> int | None:
        """Number of distinct points; None where there are more than `most`, or an interval makes them infinite."""
        if not all(knob.values for knob in self.knobs):
            return None
        count = sum(1 for _ in itertools.islice(self.points(), None if most is None else most + 1))
        return count if most is None or count <= most else None

    def active(self, assignment: Mapping[str, Any]) -> Assignment:
        """The part of an assignment that counts (for example after a baseline changed its options)."""
        by_path = {knob.path: knob for knob in self._order}
        extra = {path: value for path, value in assignment.items() if path not in by_path}
        options = {path: value for path, value in assignment.items() if self.is_option(path)}
        point: Assignment = dict(options)
        for path in [*by_path, *extra]:
            if path in assignment and path not in point and self._counts(Knob(path), {**extra, **point}):
                point[path] = assignment[path]
        return point

    def _expand(self, point: Assignment, knobs: Sequence[Knob]) -> Iterator[Assignment]:
        if not knobs:
            yield point
            return
        knob, rest = knobs[0], knobs[1:]
        if not self._counts(knob, point):
            yield from self._expand(point, rest)
            return
        for value in knob.values:
            yield from self._expand({**point, knob.path: value}, rest)

    def _counts(self, knob: Knob, point: Assignment) -> bool:
        if self.is_option(knob.path):
            return True
        tree = self.tree({path: value for path, value in point.items() if self.is_option(path)})
        needed = self.backend.condition(knob.path, tree)
        return needed is not None and all(
            point.get(path, get_path(tree, path)) == value and self._counts(Knob(path), point)
            for path, value in needed.items()
        )


def get_path(tree: Any, path: str) -> Any:
    """The value at a dotted path of a tree or a frozen model; None where there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return tree


def set_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path in place. Raises KeyError where its parent is not a mapping."""
    *parents, last = path.split(".")
    for name in parents:
        tree = tree[name]
        if not isinstance(tree, dict):
            raise KeyError(path)
    tree[last] = value
