"""NSGA-II of pymoo (Blank and Deb 2020), with its operators for mixed variables: for comparison with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dse.search.genes import Genes
from dse.search.question import Outcome, Question
from dse.search.sampled import make_sampler
from dse.space import Assignment, Knob

_NOTHING = 1e9  # violation of a point without an outcome: larger than any other


class Generations:
    """Adapter of pymoo, which proposes a generation at a time. Points that differ in inactive genes only are the same.

    A generation ends when all of its outcomes are told; outcomes of points that pymoo did not propose are ignored.
    """

    def __init__(self, question: Question, algorithm: Any) -> None:
        self._question, self._genes, self._algorithm = question, Genes(question.space), algorithm
        self._random = np.random.default_rng(question.seed)
        self._asked: Any = None
        self._left: list[tuple[int, Assignment]] = []
        self._open: dict[int, int] = {}
        self._told: dict[int, Outcome] = {}

    def ask(self, count: int) -> Sequence[Assignment]:
        """Propose the remaining points of this generation, or of the next once this one is told."""
        if not self._left and not self._open:
            self._next()
        batch, self._left = self._left[:count], self._left[count:]
        self._open |= {id(point): place for place, point in batch}
        return [point for _, point in batch]

    def _next(self) -> None:
        self._asked = self._algorithm.ask()
        if self._asked is None or not len(self._asked):  # it has no new child
            return
        rows = np.array([[individual.X[knob.path] for knob in self._genes.knobs] for individual in self._asked], float)
        points = self._genes.points(self._genes.settle(rows, self._random))
        self._left, self._told = list(enumerate(points)), {}

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Tell pymoo its generation once it is complete."""
        for point, outcome in zip(points, outcomes, strict=True):
            place = self._open.pop(id(point), None)
            if place is not None:
                self._told[place] = outcome
        if self._asked is not None and len(self._told) == len(self._asked):
            self._tell([self._told[place] for place in range(len(self._asked))])

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        from pymoo.core.evaluator import Evaluator
        from pymoo.problems.static import StaticProblem

        values = np.zeros((len(outcomes), len(self._question.goals)))
        beyond = np.full((len(outcomes), 1), _NOTHING)
        for place, outcome in enumerate(outcomes):
            if outcome is not None:
                values[place] = self._question.values([outcome])[0]
                beyond[place] = self._question.violation(outcome)
        Evaluator().eval(StaticProblem(self._algorithm.problem, F=values, G=beyond), self._asked)
        self._algorithm.tell(infills=self._asked)
        self._asked = None


def make(question: Question, options: Mapping[str, Any]) -> Generations:
    """Make the method from pymoo's options for `NSGA2`, such as `pop_size`. Raises ConfigError."""
    return Generations(question, make_sampler(lambda: _algorithm(question, dict(options)), options))


def _algorithm(question: Question, options: dict[str, Any]) -> Any:
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.core.mixed import MixedVariableDuplicateElimination, MixedVariableMating, MixedVariableSampling
    from pymoo.core.problem import Problem

    same = MixedVariableDuplicateElimination()
    mating = MixedVariableMating(eliminate_duplicates=same)
    defaults = {"sampling": MixedVariableSampling(), "mating": mating, "eliminate_duplicates": same, "pop_size": 50}
    if unknown := [name for name in options if name != "pop_size"]:
        raise TypeError(f"NSGA2() got an unexpected keyword argument '{unknown[0]}'")
    algorithm = NSGA2(**defaults | options)
    bounds = {knob.path: _variable(knob) for knob in question.space.order}
    problem = Problem(vars=bounds, n_obj=len(question.goals), n_ieq_constr=1)
    algorithm.setup(problem, seed=question.seed, termination=("n_gen", 10**9), verbose=False)
    return algorithm


def _variable(knob: Knob) -> Any:
    from pymoo.core.variable import Choice, Integer, Real

    if not knob.values:
        return Real(bounds=(0.0, 1.0))
    most = len(knob.values) - 1
    return Integer(bounds=(0, most)) if knob.is_ordered and most else Choice(options=list(range(most + 1)))


METHOD = make
