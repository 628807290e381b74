"""Choosing points of a space too large to enumerate: Optuna's samplers behind a batch-synchronous ask and tell.

Batches have a fixed size, are evaluated in any order by any number of jobs, and are told in the order asked: the
table depends on the seed alone. A point is evaluated once; a sampler that keeps proposing known points is helped
out by the points not seen yet, in seeded random order.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from dse.problems import ConfigError, Problem, did_you_mean
from dse.space import Assignment, Knob, Space
from dse.values import Frozen, Integer

Goal = Literal["minimize", "maximize"]
Outcome = Mapping[str, float] | None
"""Metrics of a point, or None where it has none (infeasible, failed)."""
Evaluate = Callable[[Sequence[Assignment]], Sequence[Outcome]]
Identify = Callable[[Assignment], str]

_MOST_TO_LIST = 1_000_000  # points of a space that are listed to find those not seen yet
_ASKS_PER_POINT = 20  # known points a sampler may propose for each new one before it is helped out


class Search(Frozen):
    """The `search` group. options: keyword arguments of Optuna's sampler."""

    name: str
    description: str = ""
    batch: Annotated[Integer, Field(ge=1, le=10_000)] = 32
    options: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Chosen:
    """What a search did: how many points it evaluated, by which method, how many proposals were already known."""

    num_points: int
    method: str
    duplicates: int = 0


@dataclass(frozen=True)
class Question:
    """What is searched: a space, the goals by metric, a seed, and how a point is evaluated and told apart."""

    space: Space
    goals: Mapping[str, Goal]
    seed: int
    evaluate: Evaluate
    identify: Identify


def explore(question: Question, search: Search, *, trials: int) -> Chosen:
    """Evaluate up to `trials` distinct points of a space that is too large to enumerate.

    Raises ConfigError for an unknown method or option.
    """
    sampler = _Sampler(question, search)
    known: dict[str, Outcome] = {}
    duplicates = 0
    while len(known) < trials:
        wanted = min(search.batch if known else 1, trials - len(known))
        asked, repeated = _fresh(sampler, wanted, known, question.identify)
        duplicates += repeated
        names = {*known, *(question.identify(point) for _, point in asked)}
        asked += [(None, point) for point in _unseen(question, names, wanted - len(asked))]
        if not asked:
            break
        outcomes = question.evaluate([point for _, point in asked])
        for (trial, point), outcome in zip(asked, outcomes, strict=True):
            known[question.identify(point)] = outcome
            sampler.tell(trial, point, outcome)
    return Chosen(len(known), search.name, duplicates)


def _fresh(
    sampler: _Sampler, wanted: int, known: Mapping[str, Outcome], identify: Identify
) -> tuple[list[tuple[Any, Assignment]], int]:
    """Up to `wanted` proposals that are new, and how many were not."""
    found: dict[str, tuple[Any, Assignment]] = {}
    repeated = 0
    while len(found) < wanted and repeated < _ASKS_PER_POINT * wanted:
        trial, point = sampler.ask()
        name = identify(point)
        if name in known or name in found:
            repeated += 1
            sampler.tell(trial, point, known.get(name))
        else:
            found[name] = (trial, point)
    return list(found.values()), repeated


def _unseen(question: Question, seen: set[str], wanted: int) -> list[Assignment]:
    """Points of a finite space not seen yet, in seeded random order."""
    if wanted <= 0 or question.space.size(_MOST_TO_LIST) is None:
        return []
    left = [point for point in question.space.points() if question.identify(point) not in seen]
    return random.Random(question.seed).sample(left, min(wanted, len(left)))


class _Sampler:
    """Optuna's study, in memory; knobs become its distributions (ordered values by their index)."""

    def __init__(self, question: Question, search: Search) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self._optuna, self._space, self._goals = optuna, question.space, question.goals
        directions = list(question.goals.values())
        self._study = optuna.create_study(directions=directions, sampler=make_sampler(search, question.seed))
        flat = {knob.path: self._distribution(knob) for knob in self._space.knobs}
        self._flat = flat if search.name == "qmc" else None

    def ask(self) -> tuple[Any, Assignment]:
        trial = self._study.ask(self._flat)
        return trial, self._space.walk(lambda knob: self._choose(trial, knob))

    def tell(self, trial: Any, point: Assignment, outcome: Outcome) -> None:
        """A trial the sampler asked for, or (None) a point it did not."""
        if trial is None:
            if outcome is not None:
                params = {path: self._encode(path, value) for path, value in point.items()}
                distributions = {path: self._distribution(self._knob(path)) for path in point}
                values = [outcome[name] for name in self._goals]
                made = self._optuna.create_trial(params=params, distributions=distributions, values=values)
                self._study.add_trial(made)
        elif outcome is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, [outcome[name] for name in self._goals])

    def _knob(self, path: str) -> Knob:
        return next(knob for knob in self._space.knobs if knob.path == path)

    def _distribution(self, knob: Knob) -> Any:
        make = self._optuna.distributions
        if not knob.values:
            return make.FloatDistribution(knob.low, knob.high, log=knob.log)
        if knob.ordered:
            return make.IntDistribution(0, len(knob.values) - 1)
        return make.CategoricalDistribution(knob.values)

    def _encode(self, path: str, value: Any) -> Any:
        knob = self._knob(path)
        return knob.values.index(value) if knob.values and knob.ordered else value

    def _choose(self, trial: Any, knob: Knob) -> Any:
        if not knob.values:
            return trial.suggest_float(knob.path, knob.low, knob.high, log=knob.log)
        if knob.ordered:
            return knob.values[trial.suggest_int(knob.path, 0, len(knob.values) - 1)]
        return trial.suggest_categorical(knob.path, knob.values)


def make_sampler(search: Search, seed: int) -> Any:
    """Optuna's sampler of that name. Raises ConfigError for an unknown name or option."""
    from optuna import samplers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known: dict[str, Callable[..., Any]] = {
            "random": samplers.RandomSampler,
            "tpe": lambda **given: samplers.TPESampler(
                **{"multivariate": True, "group": True, "constant_liar": True, **given}
            ),
            "nsga2": samplers.NSGAIISampler,
            "qmc": lambda **given: samplers.QMCSampler(
                **{"scramble": True, "warn_independent_sampling": False, **given}
            ),
        }
        if search.name not in known:
            way = did_you_mean(search.name, [*known, "exhaustive"])
            raise ConfigError([Problem("search.name", "is no search method", search.name, way)])
        try:
            return known[search.name](seed=seed, **search.options)
        except (TypeError, ValueError) as error:
            raise ConfigError([Problem("search.options", str(error), search.options)]) from error
