"""Coordinate search: every value of one knob at a time, the best of each together, and again around what won.

The first sweep changes one knob of the first point at a time, for every combination of the values of those knobs that
decide which others count; a knob that decides of a few others alone is changed together with these, as one. Knobs of
an entry of `together`, which rules may tie to each other, take each value at once as well. What each knob gains alone
is then put together, and knobs are changed one at a time around the better of this point and the best so far, by the
values that did best in the first sweep, until nothing is better. Where the objective is a sum of terms of one knob
each, the first combination is the optimum; else the result is one that no change of a single knob among these values
improves, nor one of an entry. Points are ranked by the first objective, those beyond a limit behind all others. The
search ends by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.errors import ConfigError, Problem, validate_as
from dse.search import Outcome, SearchQuestion
from dse.search.genes import Genes, Rows
from dse.space import Assignment, Space
from dse.values import Frozen
from dse.values.units import Integer

_NONE = (np.inf, np.inf)  # (violation, objective) of a point without an outcome: behind all others
_MOST_TOGETHER = 32  # combinations of a knob and those that it decides of, which are changed as one
Places = tuple[int, ...]
Values = tuple[int, ...]


class CoordinateOptions(Frozen):
    """most: values of each knob that are tried again around a new best point, those that did best before.

    together: paths of knobs that also take each of their values at once; those that are not searched are left out, and
    those that no design has are refused beside others that are searched.
    """

    most: Annotated[Integer, Field(ge=1, le=1000)] = 6
    together: tuple[tuple[str, ...], ...] = ()


class Coordinate:
    """The search method. Raises ConfigError for a knob that is an interval."""

    finishes = True

    def __init__(self, question: SearchQuestion, options: CoordinateOptions) -> None:
        self._question, self._options, self._genes = question, options, Genes(question.space)
        for knob in self._genes.knobs:
            if not knob.values:
                way = "list values: choice(a,b), range(a,b,step)"
                raise ConfigError(
                    [Problem(f"space.{knob.path}", "is an interval, which has no values to try", None, way)]
                )
        self._random = np.random.default_rng(question.seed)
        paths = [knob.path for knob in self._genes.knobs]
        self._deciding, self._free = _groups(question.space, paths, self._genes.sizes)
        self._values = [self._combinations(places) for places in self._free]
        self._at_once = list(self._all_at_once(paths))
        self._ranks: dict[bytes, tuple[float, float]] = {}  # row as bytes -> rank
        self._sweeps = self._all_sweeps()
        self._waiting: Iterator[Rows] = iter(())
        self._asked = set[bytes]()  # rows whose outcomes are not known yet
        self._best: Rows = np.zeros(len(self._genes.knobs))

    def ask(self, count: int) -> Sequence[Assignment]:
        """Propose points of the sweep at hand; those of the next one once the outcomes of all are known."""
        batch = list(itertools.islice(self._waiting, count))
        # a sweep begins when all of the one before is known
        while not batch and not self._asked and (rows := next(self._sweeps, None)) is not None:
            # known points are not asked for again
            self._waiting = (row for row in rows if row.tobytes() not in self._ranks)
            batch = list(itertools.islice(self._waiting, count))
        self._asked.update(row.tobytes() for row in batch)
        return self._genes.points(np.array(batch)) if batch else []

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Learn how points rank."""
        if not points:
            return
        for row, outcome in zip(self._genes.rows(points), outcomes, strict=True):
            rank = _NONE
            if outcome is not None:
                rank = self._question.violation(outcome), float(self._question.values([outcome])[0, 0])
            self._ranks[row.tobytes()] = min(rank, self._ranks.get(row.tobytes(), _NONE))
            self._asked.discard(row.tobytes())

    def _all_sweeps(self) -> Iterator[Iterable[Rows]]:
        """Yield the rows of each sweep; the next one begins where the outcomes of the one before lead."""
        starts = self._starts()
        yield (
            row
            for start in starts
            for row in itertools.chain([start], self._neighbours(start, self._values), self._alike(start))
        )
        self._best = min(starts, key=self._rank)
        # by what each value did alone around its start
        ranked = {
            start.tobytes(): [self._ranked_values(start, group) for group in range(len(self._free))] for start in starts
        }
        yield [self._together(start, ranked[start.tobytes()]) for start in starts]
        while self._improve():
            # that with the same deciding values: its ranking applies
            start = next(start for start in starts if (start[self._deciding] == self._best[self._deciding]).all())
            most, best = self._options.most, ranked[start.tobytes()]
            neighbours = [self._with(self._best, (knob,), (value,)) for knob, value in self._others()]
            few = self._neighbours(self._best, [values[:most] for values in best])
            yield [*neighbours, *few, *self._alike(self._best)]

    def _others(self) -> Iterator[tuple[int, int]]:
        """Deciding knobs that count at the best point, and their values."""
        for knob in self._deciding:
            if self._best[knob] >= 0:
                yield from ((knob, value) for value in range(min(self._options.most, int(self._genes.sizes[knob]))))

    def _starts(self) -> list[Rows]:
        """Rows with the first value of every knob, for each combination of those of the deciding knobs."""
        starts: dict[bytes, Rows] = {}
        for chosen in itertools.product(*(range(int(self._genes.sizes[knob])) for knob in self._deciding)):
            row = np.zeros(len(self._genes.knobs))  # the first value of each knob
            row[self._deciding] = chosen
            settled = self._settle(row)
            starts[settled.tobytes()] = settled  # combinations that differ only in knobs that do not count are one
        return list(starts.values())

    def _combinations(self, places: Places) -> list[Values]:
        """Distinct values of knobs that are changed as one; -1 for a knob that does not count with the others."""
        if len(places) == 1:
            return [(value,) for value in range(int(self._genes.sizes[places[0]]))]
        combinations: dict[Values, None] = {}
        for values in itertools.product(*(range(int(self._genes.sizes[place])) for place in places)):
            settled = self._with(np.zeros(len(self._genes.knobs)), places, values)
            combinations[tuple(settled[list(places)].astype(int).tolist())] = None
        return list(combinations)

    def _together(self, start: Rows, ranked: Sequence[Sequence[Values]]) -> Rows:
        """The best value of each knob, put together."""
        together = start.copy()
        for places, (best, *_) in zip(self._free, ranked, strict=True):
            together[list(places)] = best if start[places[0]] >= 0 else -1
        return self._settle(together)

    def _improve(self) -> bool:
        """Go to the best point that is known; whether that is another one."""
        best = min(self._ranks, key=lambda name: self._ranks[name])
        better = self._rank(np.frombuffer(best)) < self._rank(self._best)
        self._best = np.frombuffer(best) if better else self._best
        return better

    def _rank(self, row: Rows) -> tuple[float, float]:
        return self._ranks.get(row.tobytes(), _NONE)

    def _ranked_values(self, around: Rows, group: int) -> list[Values]:
        """Values of a group of knobs, the best around a point first, its own before others as good."""
        places, values = self._free[group], self._values[group]
        ranks = {value: self._rank(self._with(around, places, value)) for value in values}
        point = tuple(around[list(places)].tolist())
        return sorted(values, key=lambda value: (ranks[value], value != point))

    def _neighbours(self, around: Rows, values: Sequence[Sequence[Values]]) -> Iterator[Rows]:
        """Rows that differ from one in one group of knobs that counts there, made when they are asked for."""
        rows = (
            self._with(around, places, value)
            for places, several in zip(self._free, values, strict=True)
            if around[places[0]] >= 0  # a knob that does not count cannot be varied
            for value in several
        )
        return (row for row in rows if (row != around).any())  # the point itself is known

    def _all_at_once(self, paths: Sequence[str]) -> Iterator[tuple[Places, Values]]:
        """Yield the places of knobs that take a value at once, and the place of that value in each of them."""
        space = self._question.space
        for entry in self._options.together:
            if any(path in paths for path in entry):
                _check_known(space, entry)
            texts = {paths.index(path): self._texts(paths.index(path)) for path in entry if path in paths}
            for text in dict.fromkeys(itertools.chain.from_iterable(texts.values())):
                values = {place: texts_there.index(text) for place, texts_there in texts.items() if text in texts_there}
                if len(values) > 1:
                    yield tuple(values), tuple(values.values())

    def _texts(self, place: int) -> list[str]:
        return [str(value) for value in self._genes.knobs[place].values]

    def _alike(self, around: Rows) -> Iterator[Rows]:
        """Rows in which the knobs of an entry have the same value, as far as they count."""
        rows = (self._with(around, places, values) for places, values in self._at_once)
        return (row for row in rows if (row != around).any())

    def _with(self, row: Rows, places: Places, values: Values) -> Rows:
        changed = row.copy()
        changed[list(places)] = values
        return self._settle(changed)

    def _settle(self, row: Rows) -> Rows:
        """A valid point: knobs that come to count have their first value."""
        settled: Rows = self._genes.settle(np.where(row < 0, 0, row)[None], self._random)[0]
        return settled


def _groups(space: Space, paths: Sequence[str], sizes: NDArray[np.intp]) -> tuple[list[int], list[Places]]:
    """Places of knobs whose values are combined with those of all others, and groups of knobs that are changed as one.

    A group is a knob, and where it decides of others, these, if nothing else decides of them and they are few.
    """
    needs = {knob.path: space.needs(knob) & set(paths) for knob in space.knobs}
    deciding = {knob.path for knob in space.deciding_knobs}
    place, together = {path: number for number, path in enumerate(paths)}, list[Places]()
    # options of a group change too much to be combined with a knob
    for path in (path for path in paths if path in deciding and not needs[path] and not space.is_option(path)):
        below = [other for other in paths if path in needs[other]]
        places = (place[path], *(place[other] for other in below))
        apart = not deciding.intersection(below) and all(needs[other] == {path} for other in below)
        # else one sweep would try too many combinations
        together += [places] if apart and np.prod(sizes[list(places)]) <= _MOST_TOGETHER else []
    grouped = {number for places in together for number in places}
    left = [number for number in range(len(paths)) if number not in grouped]
    alone: list[Places] = [(number,) for number in left if paths[number] not in deciding]
    # in the order of the knobs
    return [number for number in left if paths[number] in deciding], sorted([*together, *alone])


def _check_known(space: Space, entry: Sequence[str]) -> None:
    """Refuse paths of an entry that are no knobs of the backend. Raises ConfigError."""
    unknown = [path for path in entry if space.backend.condition(path, space.tree({})) is None]
    if unknown:
        rule = f"names {unknown[0]}, which is no knob here"
        raise ConfigError([Problem("search.options.together", rule, list(entry), "write knobs of the space")])


def make(question: SearchQuestion, options: Mapping[str, object]) -> Coordinate:
    """Make the method from its options. Raises ConfigError."""
    settings = validate_as(CoordinateOptions, options, path="search.options")
    return Coordinate(question, settings)


METHOD = make
