"""A small tree that picks an option, learned from contexts by what its picks lose.

A split is as good as the loss of the best pick on either side of it, which no impurity of labels says: many options are
nearly as good as the best, and few mistakes are dear. The tree is grown best first to a multiple of the leaves that are
asked for, cut back to those that lose least (error-complexity pruning by dynamic programming: Bohanec and Bratko,
Machine Learning 1994), and then each split is chosen anew, with all others held, until nothing gains (alternating
optimisation of a tree's nodes: Carreira-Perpinan and Tavallali, NeurIPS 2018).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dse.analysis.contexts import Cases, Floats
from dse.analysis.decision_tree import Feature, Leaf, Node, Split, Tree, between

Rows = NDArray[np.intp]
_MOST_PAIRED = 8  # inputs of which products and ratios are made; of more, only within one section
_GROWTH = 4  # times the leaves that are asked for: so far a tree is grown before it is cut back
_SWEEPS = 8  # over all splits, at most; two or three are the rule
_SHARE = 1e-3  # of the contexts: a leaf holds as many, or it says nothing of others
_GAIN = 1e-9  # of loss: less is rounding


class Size(NamedTuple):
    """What tree is wanted: splits one below another, and leaves (None: as many as these make)."""

    depth: int
    leaves: int | None = None


def features(inputs: Mapping[str, NDArray[Any]], quantities: Sequence[Feature] = ()) -> list[Feature]:
    """What a tree may look at, the simplest first: inputs, then products and ratios of pairs, then of whole sections,
    then the quantities, as far as their inputs are there (one that is not is the same everywhere).

    Ratios are of positive inputs only. A text is asked for each of its values.
    """
    numbers = [path for path, column in inputs.items() if column.dtype != object]
    found = [Feature((path,)) for path in numbers]
    for path, column in inputs.items():
        if column.dtype == object:
            values = sorted(set(map(str, column)))
            found += [Feature((path,), text=value) for value in values[: 1 if len(values) == 2 else None]]
    positive = [path for path in numbers if (inputs[path] > 0).all()]
    for one, other in itertools.combinations(positive, 2):
        if len(positive) <= _MOST_PAIRED or _section(one) == _section(other):
            found += [Feature((other,), (one,)), Feature((one, other))]
    for section in dict.fromkeys(map(_section, positive)):
        together = tuple(path for path in positive if _section(path) == section)
        found += [Feature(together)] if len(together) > 2 else []
    for asked in quantities:
        above, below = (tuple(path for path in some if path in positive) for some in (asked.paths, asked.per))
        found += [Feature(above, below)] if above else []
    return list(dict.fromkeys(found))


def _section(path: str) -> str:
    return path.rpartition(".")[0]


def learn(found: Cases, size: Size, rows: Rows | None = None) -> Tree:
    """A tree of at most a size whose picks have little mean regret, from some contexts (all)."""
    rows = np.arange(len(found.values)) if rows is None else rows
    asked = features(found.inputs, found.quantities)
    matrix = np.stack([np.asarray(feature.of(found.inputs), float)[rows] for feature in asked])
    grower = _Grower(matrix, found.regrets[rows], size, max(1, int(_SHARE * len(rows))))
    root = grower.refine(grower.prune(grower.grown()))
    return Tree(found.choose, _Teller(found, asked, rows, matrix).node(root, np.arange(len(rows))))


class _Cut(NamedTuple):
    """A split: the rows with at most `low` of a feature on one side, those with at least `high` on the other."""

    loss: float
    feature: int
    low: float


@dataclass
class _Branch:
    """A part of the contexts while a tree is made; without a cut it is a leaf."""

    rows: Rows
    depth: int
    cut: _Cut | None = None
    sides: list[_Branch] = field(default_factory=list)

    @property
    def inner(self) -> Iterator[_Branch]:
        """All that are split, itself first."""
        if self.cut:
            yield self
            for side in self.sides:
                yield from side.inner


@dataclass(frozen=True)
class _Grower:
    """matrix [F, C]: features of contexts; losses [C, O]: regrets of options; least: contexts of a leaf."""

    matrix: Floats
    losses: Floats
    size: Size
    least: int

    def grown(self) -> _Branch:
        """Best first: what gains most is split next."""
        root = _Branch(np.arange(len(self.losses)), 0)
        most = 2**self.size.depth if self.size.leaves is None else _GROWTH * self.size.leaves
        order = itertools.count()  # of equals the first
        waiting: list[tuple[float, int, _Branch, _Cut]] = []

        def consider(branch: _Branch) -> None:
            own = self.losses[branch.rows]
            cut = self._best(branch.rows, own, own) if branch.depth < self.size.depth else None
            gain = _least(own) - cut.loss if cut else 0.0
            if cut and gain > _GAIN:
                heapq.heappush(waiting, (-gain, next(order), branch, cut))

        consider(root)
        for _ in range(most - 1):
            if not waiting:
                break
            _, _, branch, cut = heapq.heappop(waiting)
            branch.cut = cut
            branch.sides = [_Branch(branch.rows[side], branch.depth + 1) for side in self._sides(cut, branch.rows)]
            for side in branch.sides:
                consider(side)
        return root

    def _best(self, rows: Rows, below: Floats, above: Floats) -> _Cut | None:
        """The cut of some rows that loses least. below, above [rows, O]: losses of the options on either side."""
        best: _Cut | None = None
        for place, column in enumerate(self.matrix[:, rows]):
            order = np.argsort(column, kind="stable")
            ranked = column[order]
            first, rest = np.cumsum(below[order], axis=0), np.cumsum(above[order][::-1], axis=0)[::-1]
            ends = np.flatnonzero(ranked[:-1] < ranked[1:])
            ends = ends[(ends >= self.least - 1) & (ends < len(rows) - self.least)]
            if len(ends):
                lost = first[ends].min(axis=1) + rest[ends + 1].min(axis=1)
                end = int(lost.argmin())
                if best is None or lost[end] < best.loss - _GAIN:
                    best = _Cut(float(lost[end]), place, float(ranked[ends[end]]))
        return best

    def _sides(self, cut: _Cut, rows: Rows) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        below = self.matrix[cut.feature, rows] <= cut.low
        return below, ~below

    def prune(self, root: _Branch) -> _Branch:
        """With the leaves, at most as many as asked for, that lose least; of equals the fewer."""
        most = self.size.leaves or 2**self.size.depth
        tables: dict[int, dict[int, tuple[float, tuple[int, int] | None]]] = {}

        def table(branch: _Branch) -> dict[int, tuple[float, tuple[int, int] | None]]:
            """Number of leaves -> the loss of the best such part of a branch, and how many each side has of them."""
            found: dict[int, tuple[float, tuple[int, int] | None]] = {1: (_least(self.losses[branch.rows]), None)}
            for one, other in itertools.product(*map(table, branch.sides)) if branch.cut else ():
                lost = sum(tables[id(side)][count][0] for side, count in zip(branch.sides, (one, other), strict=True))
                if one + other <= most and lost < found.get(one + other, (np.inf, None))[0]:
                    found[one + other] = lost, (one, other)
            tables[id(branch)] = found
            return found

        def keep(branch: _Branch, count: int) -> None:
            split = tables[id(branch)][count][1]
            if split is None:
                branch.cut, branch.sides = None, []
            for side, own in zip(branch.sides, split or (), strict=True):
                keep(side, own)

        found = table(root)
        keep(root, min(found, key=lambda count: (round(found[count][0] / _GAIN), count)))
        return root

    def refine(self, root: _Branch) -> _Branch:
        """With each cut the best there is while the cuts above and below it stay, until none is better."""
        for _ in range(_SWEEPS):
            changed = False
            for branch in list(root.inner):
                assert branch.cut is not None
                below, above = (self._lost(side, branch.rows)[:, None] for side in branch.sides)
                now = float(np.where(self._sides(branch.cut, branch.rows)[0], below[:, 0], above[:, 0]).sum())
                better = self._best(branch.rows, below, above)
                if better and better.loss < now - _GAIN:
                    branch.cut, changed = better, True
                    self._hold(branch, branch.rows)
            if not changed:
                break
        return root

    def _hold(self, branch: _Branch, rows: Rows) -> None:
        """Let a branch and those below it hold the rows that come to them."""
        branch.rows = rows
        if branch.cut:
            for side, part in zip(branch.sides, self._sides(branch.cut, rows), strict=True):
                self._hold(side, rows[part])

    def _lost(self, branch: _Branch, rows: Rows) -> Floats:
        """What each of some rows would lose in a branch, whose leaves pick as they do now, [rows]."""
        if branch.cut is None:
            return np.asarray(self.losses[rows, int(self.losses[branch.rows].sum(axis=0).argmin())])
        lost = np.empty(len(rows))
        for side, part in zip(branch.sides, self._sides(branch.cut, rows), strict=True):
            lost[part] = self._lost(side, rows[part])
        return lost


def _least(losses: Floats) -> float:
    """What the best single pick loses, of [C, O]."""
    return float(losses.sum(axis=0).min())


@dataclass(frozen=True)
class _Teller:
    """A tree of ours from branches: the same partition, told as simply as it can be."""

    cases: Cases
    features: Sequence[Feature]
    rows: Rows
    matrix: Floats

    def node(self, branch: _Branch, held: Rows) -> Node:
        """The node for a branch that some of the rows reach."""
        if branch.cut is None:
            return self._leaf(held)
        below = self.matrix[branch.cut.feature, held] <= branch.cut.low
        if below.all() or not below.any():
            return self.node(branch.sides[0 if below.all() else 1], held)
        first, second = (self.node(side, held[part]) for side, part in zip(branch.sides, (below, ~below), strict=True))
        if isinstance(first, Leaf) and isinstance(second, Leaf) and first.option == second.option:
            return self._leaf(held)
        return self._split(held, below, (first, second))

    def _split(self, held: Rows, below: NDArray[np.bool_], children: tuple[Node, Node]) -> Split:
        """By the simplest feature that parts the rows in the same way."""
        for feature, column in zip(self.features, self.matrix[:, held], strict=True):
            for part, (first, second) in ((below, children), (~below, children[::-1])):
                low, high = float(column[part].max()), float(column[~part].min())
                if low < high:
                    return Split(feature, between(low, high), first, second)
        raise AssertionError("the feature of the cut parts them")

    def _leaf(self, held: Rows) -> Leaf:
        """The option with the least mean regret; of equal ones the one that is legal and best most often."""
        rows = self.rows[held]
        regrets, legal, best = self.cases.regrets[rows], self.cases.legal[rows], self.cases.best[rows]
        order = np.lexsort((-best.sum(axis=0), -legal.sum(axis=0), np.round(regrets.mean(axis=0), 12)))
        own = regrets[:, order[0]]
        return Leaf(self.cases.options[order[0]], len(rows), float(own.mean()), float(own.max()))
