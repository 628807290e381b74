"""Samplers of Optuna, and of libraries with its interface, as search methods: a study in memory, asked and told."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dse.errors import ConfigError, Problem
from dse.search.question import MakeMethod, Method, Outcome, Question
from dse.space import Assignment, Knob


def sampler(name: str, *, library: str = "optuna", needs: str = "", whole: bool = False, **defaults: Any) -> MakeMethod:
    """A search method from a sampler of Optuna, or of a library with its interface.

    defaults: options it is given unless the user says otherwise. needs: a module that it cannot do without. whole:
    whether it must be told all knobs beforehand.
    """

    def method(question: Question, options: Mapping[str, Any]) -> Method:
        found = make_sampler(lambda: _library(library, needs), options)
        kind = getattr(found.samplers, name)
        made = make_sampler(lambda: kind(seed=question.seed, **{**defaults, **options}), options)
        return Sampled(found, question, made, whole=whole)

    return method


def _library(name: str, needs: str) -> Any:
    found = importlib.import_module(name)
    if needs and importlib.util.find_spec(needs) is None:
        raise ImportError(f"No module named {needs!r}", name=needs)
    if name == "optuna":
        found.logging.set_verbosity(found.logging.WARNING)
        warnings.filterwarnings("ignore", category=found.exceptions.ExperimentalWarning)
    return found


def make_sampler(make: Callable[[], Any], options: Mapping[str, Any]) -> Any:
    """What `make` makes with a user's options. Raises ConfigError where they do not fit, or the library is absent."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("search.options", str(error), dict(options))]) from error
    except ImportError as error:
        rule = f"needs what is not installed: {error}"
        raise ConfigError([Problem("search", rule, way_out=f"pip install {error.name}")]) from error


class Sampled:
    """A sampler and its study; ordered values are integers to it, by their place."""

    def __init__(self, library: Any, question: Question, sampler: Any, *, whole: bool) -> None:
        self._library, self._question = library, question
        self._study = library.create_study(directions=list(question.goals.values()), sampler=sampler)
        self._knobs = {knob.path: knob for knob in question.space.knobs}
        self._flat = {path: self._distribution(knob) for path, knob in self._knobs.items()} if whole else None
        self._open: dict[int, tuple[Assignment, Any]] = {}

    def ask(self, count: int) -> Sequence[Assignment]:
        """As many proposals."""
        return [self._one() for _ in range(count)]

    def _one(self) -> Assignment:
        trial = self._study.ask(self._flat) if self._flat else self._study.ask()
        point = self._question.space.walk(lambda knob: self._choose(trial, knob))
        self._open[id(point)] = (point, trial)  # holds the point: its id stays its own
        return point

    def tell(self, points: Sequence[Assignment], outcomes: Sequence[Outcome]) -> None:
        """Trials, or finished ones of points it did not ask for."""
        for point, outcome in zip(points, outcomes, strict=True):
            _, trial = self._open.pop(id(point), (None, None))
            if trial is not None:
                self._told(trial, outcome)
            elif outcome is not None:
                self._study.add_trial(self._finished(point, outcome))

    def _told(self, trial: Any, outcome: Outcome) -> None:
        if outcome is None:
            self._study.tell(trial.number, state=self._library.trial.TrialState.FAIL)
            return
        for name, beyond in self._question.constraints(outcome).items():
            trial.set_constraint(name, beyond)
        self._study.tell(trial.number, [outcome[name] for name in self._question.goals])

    def _finished(self, point: Assignment, outcome: Mapping[str, float]) -> Any:
        beyond = self._question.constraints(outcome)
        return self._library.create_trial(
            params={path: _encoded(self._knobs[path], value) for path, value in point.items()},
            distributions={path: self._distribution(self._knobs[path]) for path in point},
            values=[outcome[name] for name in self._question.goals],
            system_attrs={f"constraints:{name}": value for name, value in beyond.items()},  # as set_constraint does
        )

    def _distribution(self, knob: Knob) -> Any:
        make = self._library.distributions
        if not knob.values:
            return make.FloatDistribution(knob.low, knob.high, log=knob.log)
        if knob.is_ordered:
            return make.IntDistribution(0, len(knob.values) - 1)
        return make.CategoricalDistribution(knob.values)

    def _choose(self, trial: Any, knob: Knob) -> Any:
        if not knob.values:
            return trial.suggest_float(knob.path, knob.low, knob.high, log=knob.log)
        if knob.is_ordered:
            return knob.values[trial.suggest_int(knob.path, 0, len(knob.values) - 1)]
        return trial.suggest_categorical(knob.path, knob.values)


def _encoded(knob: Knob, value: Any) -> Any:
    return knob.values.index(value) if knob.values and knob.is_ordered else value
