"""Search methods from samplers of Optuna, on a study in memory.

A point without an outcome is a trial that violates a constraint: of failed trials Optuna's samplers learn nothing, so
the values that lead to them would look as promising as any unknown ones (optuna/optuna issues 2727 and 5664).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dse.errors import ConfigError, Problem, Problems, not_installed
from dse.search import MakeMethod, Outcome, SearchMethod, SearchQuestion, constraints
from dse.space import Assignment, Knob
from dse.values import Memo


def sampler(name: str, *, needs: str = "", all_knobs: bool = False, **defaults: Any) -> MakeMethod:
    """Make a search method from a sampler of Optuna.

    defaults: options, unless the user sets them. needs: a module that the sampler requires. all_knobs: declare all
    knobs beforehand, active or not.
    """

    def method(question: SearchQuestion, options: Mapping[str, Any]) -> SearchMethod:
        _check_plain(options)
        library = make_sampler(lambda: _optuna(needs), options)
        kind = getattr(library.samplers, name)
        instance = make_sampler(lambda: kind(seed=question.seed, **{**defaults, **options}), options)
        return StudySampler(library, question, instance, all_knobs=all_knobs)

    return method


def _check_plain(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that are no numbers or truth values: samplers take parts of themselves there."""
    check = Problems()
    for name, value in options.items():
        if value is not None and not isinstance(value, bool | int | float):
            check.add(f"search.options.{name}", "must be a number, true, false or null", value=value)
    check.done()


def _optuna(needs: str) -> Any:
    import optuna

    if needs and importlib.util.find_spec(needs) is None:  # Optuna would import it only when it samples
        raise ImportError(f"No module named {needs!r}", name=needs)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a line for each trial otherwise
    # constraints and multivariate sampling are marked so
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def make_sampler(make: Callable[[], Any], options: Mapping[str, Any]) -> Any:
    """Call `make`, which uses a user's options. Raises ConfigError if they are invalid or the library is absent."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("search.options", str(error), dict(options))]) from error
    except ImportError as error:
        raise not_installed("search", str(error.name), "gp") from error


class StudySampler:
    """A sampler with its study; ordered values are passed to it as integers, their places."""

    def __init__(self, library: Any, question: SearchQuestion, sampler: Any, *, all_knobs: bool) -> None:
        self._library, self._question = library, question
        self._study = library.create_study(directions=list(question.goals.values()), sampler=sampler)
        self._knobs = {knob.path: knob for knob in question.space.knobs}
        # a sampler that fills a cube evenly has to know its dimensions
        self._flat = {path: self._distribution(knob) for path, knob in self._knobs.items()} if all_knobs else None
        self._open = Memo[Any]()  # proposal -> its trial, by identity
        self._worst: list[float] = []  # objectives of all outcomes so far

    def ask(self, count: int) -> Sequence[Assignment]:
        """Propose `count` points."""
        return [self._one() for _ in range(count)]

    def _one(self) -> Assignment:
        trial = self._study.ask(self._flat) if self._flat else self._study.ask()
        point = self._question.space.walk(lambda knob: self._choose(trial, knob))
        self._open.keep(trial, point)
        return point

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Finish the trials of proposals, and add finished trials for other points."""
        for point, outcome in zip(points, outcomes, strict=True):
            trial = self._open.pop(point)
            beyond, values = constraints(self._question.limits, outcome), self._objectives(outcome)
            if trial is None:  # a point of another method or of a warm start
                self._study.add_trial(self._finished_trial(point, beyond, values))
                continue
            for name, value in beyond.items():
                trial.set_constraint(name, value)
            self._study.tell(trial.number, values)

    def _objectives(self, outcome: Outcome) -> list[float]:
        """Objectives of a point; the worst known ones where it has none.

        No sampler takes a point without an outcome for a good one by these, as its constraints are violated; but each
        wants finite values, and one models them.
        """
        if outcome is None:
            return self._worst or [0.0] * len(self._question.goals)  # no outcome yet: any finite value
        values = [outcome[name] for name in self._question.goals]
        pairs = zip(self._question.goals.values(), values, self._worst or values, strict=True)
        self._worst = [max(pair) if goal == "minimize" else min(pair) for goal, *pair in pairs]
        return values

    def _finished_trial(self, point: Assignment, beyond: Mapping[str, float], values: Sequence[float]) -> Any:
        return self._library.create_trial(
            params={path: _encode(self._knobs[path], value) for path, value in point.items()},
            distributions={path: self._distribution(self._knobs[path]) for path in point},
            values=values,
            constraints=beyond,
        )

    def _distribution(self, knob: Knob) -> Any:
        make = self._library.distributions
        if not knob.values:
            return make.FloatDistribution(knob.low, knob.high, log=knob.log)
        if knob.is_ordered:  # neighbouring places are similar values
            return make.IntDistribution(0, len(knob.values) - 1)
        return make.CategoricalDistribution(knob.values)

    def _choose(self, trial: Any, knob: Knob) -> Any:
        if not knob.values:
            return trial.suggest_float(knob.path, knob.low, knob.high, log=knob.log)
        if knob.is_ordered:
            return knob.values[trial.suggest_int(knob.path, 0, len(knob.values) - 1)]
        return trial.suggest_categorical(knob.path, knob.values)


def _encode(knob: Knob, value: Any) -> Any:
    return knob.values.index(value) if knob.values and knob.is_ordered else value


TPE = sampler("TPESampler", multivariate=True, group=True, constant_liar=True)
"""Tree-structured Parzen estimator (Bergstra et al. 2011), multivariate and grouped: better on several objectives."""
GP = sampler("GPSampler", needs="torch")
"""Gaussian process (needs torch): slow, for simulators that take far longer."""
NSGA2 = sampler("NSGAIISampler")
"""NSGA-II (Deb et al. 2002)."""
NSGA3 = sampler("NSGAIIISampler")
"""NSGA-III (Deb and Jain 2014), for three and more objectives."""
QMC = sampler("QMCSampler", all_knobs=True, scramble=True, warn_independent_sampling=False)
"""Quasi-Monte Carlo: Sobol points, evenly spread."""
RANDOM = sampler("RandomSampler")
"""Independent even draws."""
