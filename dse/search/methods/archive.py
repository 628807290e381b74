"""Local search around the Pareto front found so far: a steady-state genetic algorithm without repeated proposals.

Parents are members of the front; a child takes genes of two of them and changes a few (a step to a neighbouring value
or any value). Only the front is kept, so the cost of a proposal does not grow with the number of known points.
Infeasible points are kept only while there are too few feasible ones, the least infeasible first (Deb 2000).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import moocore
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.errors import validate_as
from dse.search import Outcome, SearchQuestion
from dse.search.genes import Genes, Rows
from dse.space import Assignment
from dse.values import Frozen
from dse.values.units import Fraction, Integer

# a space that is nearly exhausted yields few fresh points
_ROUNDS = 8  # of children, before uniform draws; and of uniform draws


class ArchiveOptions(Frozen):
    """initial: uniform draws before the first child. crossover: share of children with two parents.

    changes: mean number of genes that a child changes. steps: share of changes of an ordered knob that are steps.
    fewest: least number of points to keep, of the next fronts if the first is smaller.
    """

    initial: Annotated[Integer, Field(ge=1, le=100_000)] = 64
    crossover: Fraction = 0.5
    changes: Annotated[float, Field(ge=1, le=100)] = 1.6
    steps: Fraction = 0.5
    fewest: Annotated[Integer, Field(ge=1, le=10_000)] = 8


class Archive:
    """The search method."""

    def __init__(self, question: SearchQuestion, options: ArchiveOptions) -> None:
        self._question, self._options = question, options
        self._genes = Genes(question.space)
        self._random = np.random.default_rng(question.seed)
        self._seen: set[bytes] = set()  # rows as bytes, proposed or told
        self._rows: Rows = np.empty((0, len(self._genes.knobs)))
        self._values = np.empty((0, len(question.goals)))
        self._beyond = np.empty(0)  # [B]: total excess over the limits

    def ask(self, count: int) -> Sequence[Assignment]:
        """Propose points that are neither known nor proposed before."""
        first = min(count, max(0, self._options.initial - len(self._seen)))  # of the initial draws those that are left
        fresh = [self._fresh(self._draw, first)] if first else []
        if first < count and len(self._rows):
            fresh.append(self._fresh(self._children, count - first))
        missing = count - sum(map(len, fresh))  # few unseen children around the front
        if missing:
            fresh.append(self._fresh(self._draw, missing))
        return self._genes.points(np.concatenate(fresh))

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Learn outcomes: keep the points of the front."""
        rows = self._genes.rows(points)
        self._seen.update(map(np.ndarray.tobytes, rows))
        ok = np.array([outcome is not None for outcome in outcomes], bool)
        if ok.any():
            self._learn(rows[ok], [outcome for outcome in outcomes if outcome is not None])
        if not ok.all():
            self._learn_failures(rows[~ok])

    def _learn(self, rows: Rows, outcomes: Sequence[Mapping[str, float]]) -> None:
        """Add points with an outcome."""
        self._rows = np.concatenate([self._rows, rows])
        self._values = np.concatenate([self._values, self._question.values(outcomes)])
        self._beyond = np.concatenate([self._beyond, [self._question.violation(outcome) for outcome in outcomes]])
        places = self._select_rows()
        self._rows, self._values, self._beyond = self._rows[places], self._values[places], self._beyond[places]

    def _learn_failures(self, rows: Rows) -> None:
        """Add points without an outcome: they are never parents, so nothing is to be learnt."""

    def _select_rows(self) -> NDArray[np.intp]:
        """Places of the front and of the next fronts until there are `fewest`; then of the least infeasible points."""
        left = np.flatnonzero(self._beyond == 0.0)
        selected = left[:0]
        # a single parent would have children in one place only
        while len(left) and len(selected) < self._options.fewest:
            front = moocore.is_nondominated(self._values[left])
            selected, left = np.concatenate([selected, left[front]]), left[~front]
        missing = max(0, self._options.fewest - len(selected))
        outside = np.flatnonzero(self._beyond > 0.0)
        nearest = outside[np.argsort(self._beyond[outside], kind="stable")][:missing]
        return np.concatenate([selected, nearest])

    def _fresh(self, propose: Any, count: int) -> Rows:
        """Return up to `count` rows not seen before, from proposals of `propose(n)`."""
        rows: list[NDArray[np.float64]] = []
        for _ in range(_ROUNDS):
            for row in propose(2 * (count - len(rows))):  # half of them may have been seen
                name = row.tobytes()
                if name not in self._seen and len(rows) < count:
                    self._seen.add(name)
                    rows.append(row)
            if len(rows) == count:
                break
        return np.array(rows).reshape(-1, len(self._genes.knobs))

    def _draw(self, count: int) -> Rows:
        return self._genes.draw(count, self._random)

    def _children(self, count: int) -> Rows:
        random, options = self._random, self._options
        mother, father = (self._rows[random.integers(len(self._rows), size=count)] for _ in range(2))
        from_father = (random.random(mother.shape) < 0.5) & (random.random((count, 1)) < options.crossover)
        # only where the knob counts in both parents
        child = np.where(from_father & (mother >= 0) & (father >= 0), father, mother)
        # a changed gene may decide which others count
        return self._genes.settle(np.where(self._choose_genes(child), self._move_genes(child), child), random)

    def _choose_genes(self, child: Rows) -> NDArray[np.bool_]:
        """Mask of the genes to change: at least one per child, of the active genes that have another value."""
        free = (child >= 0) & (self._genes.sizes != 1)
        # genes that cannot change come last
        # twice: the random rank of each gene
        order = np.where(free, self._random.random(child.shape), 2.0).argsort(axis=1).argsort(axis=1)
        # at least 1, on average `changes`
        wanted = self._random.geometric(1 / self._options.changes, size=(len(child), 1))
        return np.asarray(free & (order < wanted))

    def _move_genes(self, child: Rows) -> Rows:
        """Change every gene: by a step, or by a new draw."""
        random, sizes = self._random, self._genes.sizes
        # small steps are the likeliest
        size = random.geometric(0.5, size=child.shape) * np.where(random.random(child.shape) < 0.5, 1, -1)
        stepped = np.clip(child + size, 0, sizes - 1)
        # positions in an interval: a tenth of it, at one standard deviation
        near = np.clip(child + 0.1 * random.standard_normal(child.shape), 0.0, 1.0)
        step = self._genes.ordered & (random.random(child.shape) < self._options.steps)
        columns = np.broadcast_to(np.arange(child.shape[1]), child.shape)
        return np.where(step, np.where(sizes > 0, stepped, near), self._genes.values(columns, random))


def make(question: SearchQuestion, options: Mapping[str, Any]) -> Archive:
    """Make the method from its options. Raises ConfigError."""
    settings = validate_as(ArchiveOptions, options, path="search.options")
    return Archive(question, settings)


METHOD = make
