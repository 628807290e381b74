"""The search space: knobs over a base tree, walked so that every distinct point comes up once.

A knob is a dotted path and its values. `<section>.name` is special: its values are options of the configuration
group `<section>`, and choosing one replaces the whole section. A knob that the chosen option does not have, or whose
condition does not hold, is left out of a point.

The space is walked in blocks: knobs that change what a design is made of are fixed over a block, the numbers that the
backend takes as arrays are its axes. A space of a million points may be a dozen blocks.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import numpy as np

from dse.backend import Backend, Tree
from dse.errors import ConfigError
from dse.space.blocks import Assignment as Assignment
from dse.space.blocks import Points as Points
from dse.space.blocks import get_path as get_path
from dse.space.blocks import has_path as has_path
from dse.space.blocks import set_path as set_path
from dse.space.blocks import settle
from dse.values import Memo
from dse.values.units import amount

_MOST_SECTIONS = 10_000  # sections whose validated numbers are remembered


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
        """True if an interval begins and ends at a whole number."""
        return float(self.low).is_integer() and float(self.high).is_integer()

    @functools.cached_property
    def is_ordered(self) -> bool:
        """True if the values are numbers, or quantities in one unit, that ascend: neighbours are then alike."""
        return self.numbers is not None and list(self.numbers) == sorted(self.numbers)

    @functools.cached_property
    def numbers(self) -> tuple[float, ...] | None:
        """The number that each value is, of a quantity such as `2 MB` in its unit; None unless all are numbers."""
        amounts = [amount(value) if isinstance(value, str) else (value, None) for value in self.values]
        # True is an int, and no quantity
        if any(pair is None or isinstance(pair[0], (bool, NoneType)) for pair in amounts):
            return None
        # numbers without a unit may stand among quantities
        units = {pair[1] for pair in amounts if pair is not None} - {None}
        return tuple(pair[0] for pair in amounts if pair is not None) if len(units) <= 1 else None


@dataclass(frozen=True)
class Case:
    """A design that a study needs beside its space, with a grid around it.

    tree: sections of the design. values: dotted path -> its values on the grid; {} for the design alone.
    """

    tree: Tree
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """The values as knobs."""
        return tuple(Knob(path, tuple(values)) for path, values in self.values.items())


@dataclass(frozen=True)
class Space:
    """Knobs over a base tree. options: section -> option name -> the section's tree for that option.

    known: numbers of the knobs' values by the section they were validated in; scenarios of one study share it.
    """

    base: Tree
    knobs: tuple[Knob, ...]
    options: Mapping[str, Mapping[str, Tree]]
    backend: Backend
    known: Memo[dict[str, Any]] = field(default_factory=lambda: Memo(_MOST_SECTIONS), compare=False, repr=False)

    @functools.cached_property
    def order(self) -> tuple[Knob, ...]:
        """The knobs, so that a condition looks at earlier ones only."""
        return tuple(sorted(self.knobs, key=self._depth))  # stable: knobs of one depth keep their order

    def _depth(self, knob: Knob) -> int:
        """Options first, then free knobs, then those that depend on them, and so on."""
        if self.is_option(knob.path):
            return 0
        return 1 + max((self._depth(Knob(path)) for path in self.needs(knob)), default=0)

    def needs(self, knob: Knob) -> set[str]:
        """Paths that the condition of a knob looks at, whatever the options."""
        trees = map(self.tree, self.each_option)
        return {path for tree in trees for path in self.backend.condition(knob.path, tree) or ()}

    @functools.cached_property
    def each_option(self) -> tuple[dict[str, Any], ...]:
        """Assignments of each option by itself, after none: most knobs count in the composed design."""
        return ({}, *({f"{section}.name": name} for section, named in self.options.items() for name in named))

    def first_counting(self, path: str) -> dict[str, Any] | None:
        """The first option, and what it needs besides, under which a knob counts; None where it never does."""
        needs = ((option, self.backend.condition(path, self.tree(option))) for option in self.each_option)
        return next(({**option, **needed} for option, needed in needs if needed is not None), None)

    @functools.cached_property
    def deciding_knobs(self) -> tuple[Knob, ...]:
        """Knobs that decide which others count: options, and what conditions look at."""
        needed = set().union(*(self.needs(knob) for knob in self.knobs if not self.is_option(knob.path)))
        return tuple(knob for knob in self.order if self.is_option(knob.path) or knob.path in needed)

    def is_option(self, path: str) -> bool:
        """True if the values of a path are options of a group."""
        section, _, name = path.partition(".")
        return name == "name" and section in self.options and section in self.base

    def tree(self, assignment: Mapping[str, Any]) -> dict[str, Any]:
        """The design tree of a point: options put in, then values set."""
        tree = dict(self.base)
        chosen = {path.partition(".")[0]: value for path, value in assignment.items() if path.endswith(".name")}
        for section, option in chosen.items():
            if section in self.options:  # a name that is not searched is a label
                tree[section] = self.options[section][option]
        values = {path: value for path, value in assignment.items() if not self.is_option(path)}
        for section in dict.fromkeys(path.partition(".")[0] for path in values):
            section_values = {path: value for path, value in values.items() if path.partition(".")[0] == section}
            tree[section] = self._section(tree[section], section_values)
        return tree

    def _section(self, section: Any, values: Mapping[str, Any]) -> Any:
        """A section with values set; the same object for the same values, as many points share one."""
        # values may be lists, which have no hash
        return self._sections.get(lambda: _with_values(section, values), section, key=repr(values))

    @functools.cached_property
    def _sections(self) -> Memo[Any]:
        return Memo(_MOST_SECTIONS)

    def walk(self, choose: Callable[[Knob], Any]) -> Assignment:
        """One point: `choose` is asked for each knob that counts, in an order in which conditions are known."""
        point: Assignment = {}
        for knob in self.order:
            if self._counts_now(knob, point):
                point[knob.path] = choose(knob)
        return point

    def _counts_now(self, knob: Knob, point: Assignment) -> bool:
        """True if a knob counts; remembered by what decides it."""
        name = (knob.path, *(point.get(other.path) for other in self.deciding_knobs))
        if name not in self._counts_by_deciding_values:
            self._counts_by_deciding_values[name] = self._counts(knob, point)
        return self._counts_by_deciding_values[name]

    @functools.cached_property
    def _counts_by_deciding_values(self) -> dict[tuple[Any, ...], bool]:
        return {}

    def active_paths(self, deciding: Mapping[str, Any]) -> set[str]:
        """Paths of the knobs that count, given a value for every deciding knob, whether it counts itself or not."""
        point: Assignment = {}
        for knob in self.order:
            if self._counts(knob, point):
                point[knob.path] = deciding.get(knob.path)
        return set(point)

    def points(self) -> Iterator[Assignment]:
        """Every distinct point of a finite space, without a look at its design."""
        for point, free in self._structures({}, self.deciding_knobs):
            for values in itertools.product(*(knob.values for knob in free)):
                values_by_path = {**point, **{knob.path: value for knob, value in zip(free, values, strict=True)}}
                yield {knob.path: values_by_path[knob.path] for knob in self.order if knob.path in values_by_path}

    def size(self, most: int | None = None) -> int | None:
        """Number of distinct points; None where there are more than `most`, or an interval makes them infinite."""
        if most not in self._sizes:
            # an interval has no number of points
            self._sizes[most] = self._count(most) if all(knob.values for knob in self.knobs) else None
        return self._sizes[most]

    def num_designs(self) -> int:
        """Number of combinations of the values that are no numbers: each is a design of its own; others are axes."""
        words = [knob for knob in self.knobs if not all(isinstance(value, int | float) for value in knob.values)]
        structures = self._structures({}, self.deciding_knobs)
        return sum(math.prod(len(knob.values) for knob in free if knob in words) for _, free in structures)

    def _count(self, most: int | None) -> int | None:
        count = 0
        for _, free in self._structures({}, self.deciding_knobs):
            count += math.prod(len(knob.values) for knob in free)
            if most is not None and count > most:  # large spaces need not be counted to their end
                return None
        return count

    @functools.cached_property
    def _sizes(self) -> dict[int | None, int | None]:
        return {}

    def blocks(self, most: int) -> Iterator[Points]:
        """Every distinct point of a finite space, in blocks of at most `most` points."""
        return (block for (block,) in blocks_together([self], most) if block is not None)  # one space: tuples of one

    def unsettled_blocks(self) -> Iterator[Points]:
        """Every distinct point of a finite space, whether or not some knobs change nothing in it."""
        for point, free in self._structures({}, self.deciding_knobs):
            yield from _Resolver(self).blocks(point, free)

    def resolve(self, point: Assignment, free: Sequence[Knob] = ()) -> Iterator[Points]:
        """The points of an assignment and all values of the knobs `free`, on which no condition depends.

        A free knob becomes an axis where the backend takes it as one and its values are legal; its other values are
        fixed, one block each.
        """
        for block in _Resolver(self).blocks(point, free):
            yield from settle([block], self.backend)[0]

    def in_knob_order(self, point: Assignment) -> Assignment:
        """An assignment in knob order; what is no knob comes last."""
        paths = [knob.path for knob in self.order if knob.path in point]
        return {path: point[path] for path in (*paths, *(path for path in point if path not in paths))}

    def meant(self, knob: Knob, design_value: Any, point: Assignment) -> Any:
        """Return the value of a knob whose designs hold `design_value`, None if it has no such value.

        point: values of the knobs before it. A written value may differ from that of a design: `2 TB/s` becomes 2e12.
        """
        if not knob.values:
            return design_value if knob.low <= design_value <= knob.high else None
        if self.is_option(knob.path):
            return design_value if design_value in knob.values else None
        # any legal value: numbers are looked up for all
        pairs = zip(knob.values, _Resolver(self).numbers(knob, {**point, knob.path: knob.values[0]}), strict=True)
        return next((value for value, number in pairs if number == design_value), None)

    def _structures(self, point: Assignment, knobs: Sequence[Knob]) -> Iterator[tuple[Assignment, list[Knob]]]:
        """Every combination of the deciding knobs, with the other knobs that count then."""
        if not knobs:
            yield point, [knob for knob in self.order if knob not in self.deciding_knobs and self._counts(knob, point)]
            return
        knob, later = knobs[0], knobs[1:]
        if not self._counts(knob, point):  # its value changes nothing: no branch for each
            yield from self._structures(point, later)
            return
        for value in knob.values:
            yield from self._structures({**point, knob.path: value}, later)

    def active(self, assignment: Mapping[str, Any]) -> Assignment:
        """The part of an assignment that counts (for example after a baseline changed its options)."""
        by_path = {knob.path: knob for knob in self.order}
        # a baseline may set paths that are no knobs
        extra = {path: value for path, value in assignment.items() if path not in by_path}
        options = {path: value for path, value in assignment.items() if self.is_option(path)}
        point: Assignment = dict(options)  # options first: they decide which paths there are
        for path in [*by_path, *extra]:
            if path in assignment and path not in point and self._counts(Knob(path), {**extra, **point}):
                point[path] = assignment[path]
        return point

    def _counts(self, knob: Knob, point: Assignment) -> bool:
        if self.is_option(knob.path):
            return True
        tree = self.tree({path: value for path, value in point.items() if self.is_option(path)})
        needed = self.backend.condition(knob.path, tree)
        return needed is not None and all(  # None: the option does not have it
            # a condition on what is no knob is decided by the tree
            point.get(path, get_path(tree, path)) == value and self._counts(Knob(path), point)
            for path, value in needed.items()
        )


@dataclass(frozen=True)
class _Resolver:
    """Blocks of a space's points: which values make a design, and which of them are axes of it."""

    space: Space

    def blocks(self, point: Assignment, free: Sequence[Knob]) -> Iterator[Points]:
        """Blocks of an assignment and all values of the knobs `free`, with legal and illegal values apart."""
        first = {**point, **{knob.path: knob.values[0] for knob in free}}
        tree = self.space.tree(first)
        try:
            design = self.space.backend.design(tree)
        except ConfigError as error:
            yield from self._refused_blocks(point, free, tree=tree, error=error)
            return
        # numbers that change what a design is made of
        fixed = [knob for knob in free if not self.space.backend.is_axis(knob.path, design)]
        if fixed:
            yield from self._product(point, fixed, [knob for knob in free if knob not in fixed])
            return
        numbers = {knob.path: self.numbers(knob, first, alone=True) for knob in free}
        odd = next((knob for knob in free if None in numbers[knob.path]), None)  # an axis with illegal values
        if odd is None:
            axes = {path: np.array(values) for path, values in numbers.items()}
            yield Points(self.space.in_knob_order(point), axes, design)
            return
        pairs = list(zip(odd.values, numbers[odd.path], strict=True))
        legal, illegal = (tuple(value for value, number in pairs if (number is None) == bad) for bad in (False, True))
        if legal:
            yield from self.blocks(point, [Knob(odd.path, legal) if knob is odd else knob for knob in free])
        yield from self._product(point, [Knob(odd.path, illegal)], [knob for knob in free if knob is not odd])

    def _product(self, point: Assignment, fixed: Sequence[Knob], free: Sequence[Knob]) -> Iterator[Points]:
        """Blocks for every combination of values of some knobs."""
        for values in itertools.product(*(knob.values for knob in fixed)):
            chosen = {knob.path: value for knob, value in zip(fixed, values, strict=True)}
            yield from self.blocks({**point, **chosen}, free)

    def _refused_blocks(
        self, point: Assignment, free: Sequence[Knob], *, tree: Tree, error: ConfigError
    ) -> Iterator[Points]:
        """Blocks where the first values of the free knobs make no design.

        If that may be the fault of these values, those of one knob are split off until one is legal.
        """
        # faults that no value of a free knob can mend
        fixed = [problem for problem in error.problems if not any(_overlap(knob.path, problem.path) for knob in free)]
        if free and not fixed:
            paths = {problem.path for problem in error.problems}
            odd = next(knob for knob in free if any(_overlap(knob.path, path) for path in paths))
            others_free = [knob for knob in free if knob is not odd]
            first = {**point, **{knob.path: knob.values[0] for knob in others_free}}
            blamed = list(
                # as walks ask in order, the first legal value ends the search
                itertools.takewhile(lambda value: self._blames(odd.path, {**first, odd.path: value}), odd.values)
            )
            yield from self._product(point, [Knob(odd.path, tuple(blamed))], others_free)
            if left := odd.values[len(blamed) :]:
                yield from self.blocks(point, [Knob(odd.path, left) if knob is odd else knob for knob in free])
            return
        axes = {knob.path: np.fromiter(knob.values, object, len(knob.values)) for knob in free}  # as they were given
        reason = "; ".join(map(str, fixed or error.problems))
        yield Points(self.space.in_knob_order(point), axes, None, reason, _without(tree, axes))

    def _blames(self, path: str, point: Assignment) -> bool:
        """True if the model refuses a point, maybe for its value at `path`."""
        try:
            self.space.backend.design(self.space.tree(point))
        except ConfigError as error:
            return any(_overlap(path, problem.path) for problem in error.problems)
        return False

    def numbers(self, knob: Knob, first: Assignment, *, alone: bool = False) -> list[Any]:
        """The number that each value of a knob is in a validated design, None where it is refused.

        first: a point that is legal. A section is validated by itself, so its own knobs are all that matters, and of
        an axis (`alone`) its options.
        """
        section = knob.path.partition(".")[0]
        fixed = {
            path: value
            for path, value in first.items()
            if path.partition(".")[0] == section and path != knob.path and (not alone or self.space.is_option(path))
        }
        tree = self.space.tree({path: value for path, value in fixed.items() if self.space.is_option(path)}).get(
            section
        )
        number_of = self.space.known.get(dict, tree, key=(knob.path, repr(fixed)))
        for value in knob.values:
            if repr(value) not in number_of:
                number_of[repr(value)] = self._number({**first, knob.path: value}, knob.path)
        numbers = [number_of[repr(value)] for value in knob.values]
        kinds = {type(number) for number in numbers if number is not None}
        # an axis is one array: mixed types would be converted
        return numbers if len(kinds) <= 1 else [None] * len(numbers)

    def _number(self, point: Assignment, path: str) -> Any:
        try:
            return get_path(self.space.backend.design(self.space.tree(point)), path)
        except ConfigError:
            return None


def blocks_together(spaces: Sequence[Space], most: int) -> Iterator[tuple[Points | None, ...]]:
    """Yield the next block of each finite space, of at most `most` points; None where a space has no more.

    The spaces are walked in step, so that a backend is asked about alike designs of all of them at once.
    """
    walks = {place: space.unsettled_blocks() for place, space in enumerate(spaces)}
    ready = [deque[Points]() for _ in spaces]
    while True:
        while any(not ready[place] for place in walks):
            fresh = _next_blocks(walks)
            for (place, _), parts in zip(fresh, settle([block for _, block in fresh], spaces[0].backend), strict=True):
                ready[place].extend(block for part in parts for block in part.split(most))
        if not any(ready):
            return
        yield tuple(blocks.popleft() if blocks else None for blocks in ready)


def _next_blocks(walks: dict[int, Iterator[Points]]) -> list[tuple[int, Points]]:
    """The next block of each walk, with its place; a walk that has ended is taken out."""
    blocks = [(place, next(walk, None)) for place, walk in walks.items()]
    for place in [place for place, block in blocks if block is None]:
        del walks[place]
    return [(place, block) for place, block in blocks if block is not None]


def _overlap(path: str, other: str) -> bool:
    """True if one dotted path is the other or lies below it."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _without(tree: Tree, paths: Mapping[str, Any]) -> Tree:
    """A tree with the values at some paths left out."""
    tree_without = copy.deepcopy(dict(tree))
    for path in paths:
        set_path(tree_without, path, None)
    return tree_without


def _with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a section with values at dotted paths, which begin with its name."""
    changed = copy.deepcopy(section)
    for path, value in values.items():
        set_path({path.partition(".")[0]: changed}, path, value)
    return changed
