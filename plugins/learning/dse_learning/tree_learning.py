"""Learning of a small tree that picks an option, from contexts, by the loss of its picks.

The quality of a split is the loss of the best pick on either side of it. An impurity of labels would not show that,
because many options are nearly as good as the best and few mistakes are costly. The tree is grown best first to a
multiple of the requested leaves, pruned to the leaves that lose least (error-complexity pruning by dynamic programming:
Bohanec and Bratko, Machine Learning 1994), and then each split is chosen anew, with all others fixed, until nothing
gains (alternating optimisation of a tree's nodes: Carreira-Perpinan and Tavallali, NeurIPS 2018).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dse.analysis.contexts import Cases, Floats, Quantity
from dse_learning.decision_tree import Feature, Leaf, Node, Split, Tree, between

Rows = NDArray[np.intp]
# pairs grow with the square, and by chance some pair fits anything
_MOST_PAIRED = 8  # inputs to pair in products and ratios; with more, only inputs of one section are paired
_GROWTH = 4  # times the requested leaves: size of the tree before pruning
_SWEEPS = 8  # over all splits, at most; two or three usually suffice
_SHARE = 1e-3  # of the contexts, the least in a leaf; smaller leaves do not generalise
_GAIN = 1e-9  # of loss; smaller gains are rounding


class TreeLimits(NamedTuple):
    """Limits of a tree: depth in splits, and number of leaves (None: as many as the depth allows)."""

    depth: int
    leaves: int | None = None


def features(inputs: Mapping[str, NDArray[Any]], quantities: Sequence[Quantity] = ()) -> list[Feature]:
    """Features that a tree may split by, the simplest first: inputs, products and ratios of pairs, products of
    sections, then the quantities, as far as their inputs are present (an absent input is the same in all contexts).

    Ratios are of positive inputs only. A text input gives one feature per value.
    """
    numbers = [path for path, column in inputs.items() if column.dtype != object]
    candidates = [Feature((path,)) for path in numbers]
    for path, column in inputs.items():
        if column.dtype == object:
            values = sorted(set(map(str, column)))
            # of two values, one tells the other
            candidates += [Feature((path,), text=value) for value in values[: 1 if len(values) == 2 else None]]
    # ratios need divisors, and products signs that mean something
    positive = [path for path in numbers if (inputs[path] > 0).all()]
    for first, second in itertools.combinations(positive, 2):
        if len(positive) <= _MOST_PAIRED or _section(first) == _section(second):
            candidates += [Feature((second,), (first,)), Feature((first, second))]
    for section in dict.fromkeys(map(_section, positive)):
        together = tuple(path for path in positive if _section(path) == section)
        candidates += [Feature(together)] if len(together) > 2 else []  # pairs are there already
    for quantity in (Feature(*parts) for parts in quantities):
        above, below = (tuple(path for path in paths if path in positive) for paths in (quantity.paths, quantity.per))
        candidates += [Feature(above, below)] if above else []
    return list(dict.fromkeys(candidates))


def _section(path: str) -> str:
    return path.rpartition(".")[0]


def learn(contexts: Cases, size: TreeLimits, rows: Rows | None = None) -> Tree:
    """Learn a tree of limited size whose picks have little mean regret, from some rows of the contexts (None: all)."""
    rows = np.arange(len(contexts.values)) if rows is None else rows
    candidates = features(contexts.inputs, contexts.quantities)
    matrix = np.stack([np.asarray(feature.of(contexts.inputs), float)[rows] for feature in candidates])
    grower = _Grower(matrix, contexts.regrets[rows], size, max(1, int(_SHARE * len(rows))))
    root = grower.refine(grower.prune(grower.grow()))
    return Tree(contexts.choose, _TreeBuilder(contexts, candidates, rows, matrix).node(root, np.arange(len(rows))))


class _Split(NamedTuple):
    """A split: the rows with at most `low` of a feature on one side, those with at least `high` on the other."""

    loss: float
    feature: int
    low: float


@dataclass
class _Branch:
    """A node during learning, with its part of the contexts; without a cut it is a leaf.

    pruned: number of leaves -> the least loss of the branch pruned to it, and the number on each side.
    """

    rows: Rows
    depth: int
    cut: _Split | None = None
    sides: list[_Branch] = field(default_factory=list)
    pruned: dict[int, tuple[float, tuple[int, int] | None]] = field(default_factory=dict)

    @property
    def inner(self) -> Iterator[_Branch]:
        """All branches with a cut, this one first."""
        if self.cut:
            yield self
            for side in self.sides:
                yield from side.inner


@dataclass(frozen=True)
class _Grower:
    """Grows, prunes and refines a tree.

    matrix [F, C]: features of contexts; losses [C, O]: regrets of options; least: contexts in a leaf.
    """

    matrix: Floats
    losses: Floats
    size: TreeLimits
    least: int

    def grow(self) -> _Branch:
        """Grow a tree best first: the split that gains most comes next."""
        root = _Branch(np.arange(len(self.losses)), 0)
        # pruning needs splits that pay only together with later ones
        most = 2**self.size.depth if self.size.leaves is None else _GROWTH * self.size.leaves
        # heaps compare on: branches have no order
        order = itertools.count()  # breaks ties
        waiting: list[tuple[float, int, _Branch, _Split]] = []

        def consider(branch: _Branch) -> None:
            losses = self.losses[branch.rows]
            cut = self._best(branch.rows, losses, losses) if branch.depth < self.size.depth else None
            gain = _least(losses) - cut.loss if cut else 0.0
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

    def _best(self, rows: Rows, below: Floats, above: Floats) -> _Split | None:
        """Find the cut of some rows with the least loss. below, above [rows, O]: losses of options on either side."""
        best: _Split | None = None
        for place, column in enumerate(self.matrix[:, rows]):
            order = np.argsort(column, kind="stable")
            ranked = column[order]
            # sums from the end, for the other side
            below_sums, above_sums = np.cumsum(below[order], axis=0), np.cumsum(above[order][::-1], axis=0)[::-1]
            ends = np.flatnonzero(ranked[:-1] < ranked[1:])  # a cut lies between different values
            ends = ends[(ends >= self.least - 1) & (ends < len(rows) - self.least)]  # enough contexts on both sides
            if len(ends):
                lost = below_sums[ends].min(axis=1) + above_sums[ends + 1].min(axis=1)  # the best pick of each side
                end = int(lost.argmin())
                if best is None or lost[end] < best.loss - _GAIN:  # earlier, simpler features win ties
                    best = _Split(float(lost[end]), place, float(ranked[ends[end]]))
        return best

    def _sides(self, cut: _Split, rows: Rows) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        below = self.matrix[cut.feature, rows] <= cut.low
        return below, ~below

    def prune(self, root: _Branch) -> _Branch:
        """Prune to the subtree with the least loss within the requested number of leaves; ties go to fewer leaves."""
        most = self.size.leaves or 2**self.size.depth

        def table(branch: _Branch) -> dict[int, tuple[float, tuple[int, int] | None]]:
            branch.pruned = {1: (_least(self.losses[branch.rows]), None)}
            best_by_count = branch.pruned
            # every number of leaves on one side with every one on the other
            for first, second in itertools.product(*map(table, branch.sides)) if branch.cut else ():
                lost = sum(side.pruned[count][0] for side, count in zip(branch.sides, (first, second), strict=True))
                if first + second <= most and lost < best_by_count.get(first + second, (np.inf, None))[0]:
                    best_by_count[first + second] = lost, (first, second)
            return best_by_count

        def keep(branch: _Branch, count: int) -> None:
            split = branch.pruned[count][1]
            if split is None:
                branch.cut, branch.sides = None, []
            for side, side_count in zip(branch.sides, split or (), strict=True):
                keep(side, side_count)

        best_by_count = table(root)
        # equal losses but for rounding: fewer leaves
        keep(root, min(best_by_count, key=lambda count: (round(best_by_count[count][0] / _GAIN), count)))
        return root

    def refine(self, root: _Branch) -> _Branch:
        """Replace each cut by the best one while the cuts above and below it stay, until no cut improves."""
        for _ in range(_SWEEPS):
            changed = False
            for branch in list(root.inner):
                assert branch.cut is not None
                # the branches below stay, so that each row has one loss on either side
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
        """Assign the rows that reach it to a branch and to the branches below."""
        branch.rows = rows
        if branch.cut:
            for side, part in zip(branch.sides, self._sides(branch.cut, rows), strict=True):
                self._hold(side, rows[part])

    def _lost(self, branch: _Branch, rows: Rows) -> Floats:
        """Loss of some rows in a branch with the present picks of its leaves, [rows]."""
        if branch.cut is None:
            return np.asarray(self.losses[rows, int(self.losses[branch.rows].sum(axis=0).argmin())])
        lost = np.empty(len(rows))
        for side, part in zip(branch.sides, self._sides(branch.cut, rows), strict=True):
            lost[part] = self._lost(side, rows[part])
        return lost


def _least(losses: Floats) -> float:
    """Loss of the best single pick. losses: [C, O]."""
    return float(losses.sum(axis=0).min())


@dataclass(frozen=True)
class _TreeBuilder:
    """Converts branches to a `Tree`: the same partition, with the simplest features that give it."""

    cases: Cases
    features: Sequence[Feature]
    rows: Rows
    matrix: Floats

    def node(self, branch: _Branch, reached: Rows) -> Node:
        """Build the node of a branch for the rows that reach it."""
        if branch.cut is None:
            return self._leaf(reached)
        below = self.matrix[branch.cut.feature, reached] <= branch.cut.low
        if below.all() or not below.any():  # the cut separates nothing of what reaches it
            return self.node(branch.sides[0 if below.all() else 1], reached)
        first, second = (
            self.node(side, reached[part]) for side, part in zip(branch.sides, (below, ~below), strict=True)
        )
        # both sides pick the same
        if isinstance(first, Leaf) and isinstance(second, Leaf) and first.option == second.option:
            return self._leaf(reached)
        return self._split(reached, below, (first, second))

    def _split(self, reached: Rows, below: NDArray[np.bool_], children: tuple[Node, Node]) -> Split:
        """Build the split with the simplest feature that parts the rows in the same way."""
        for feature, column in zip(self.features, self.matrix[:, reached], strict=True):
            # a feature may part them the other way round
            for part, (first, second) in ((below, children), (~below, children[::-1])):
                low, high = float(column[part].max()), float(column[~part].min())
                if low < high:
                    return Split(feature, between(low, high), first, second)
        raise AssertionError("the feature of the cut parts them")

    def _leaf(self, reached: Rows) -> Leaf:
        """Build the leaf with the least mean regret; ties go to the option that is most often legal, then best."""
        rows = self.rows[reached]
        regrets, legal, best = self.cases.regrets[rows], self.cases.legal[rows], self.cases.best[rows]
        order = np.lexsort((-best.sum(axis=0), -legal.sum(axis=0), np.round(regrets.mean(axis=0), 12)))
        pick_regrets = regrets[:, order[0]]
        return Leaf(self.cases.options[order[0]], len(rows), float(pick_regrets.mean()), float(pick_regrets.max()))
