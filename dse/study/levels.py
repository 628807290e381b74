"""Levels of a ladder of models: their simulators, checks of these, and a design as each level takes it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from dse.backend import Backend, Tree
from dse.errors import ConfigError, Problem, Problems
from dse.evaluation.calls import BackendSpec, validate
from dse.search import Goal
from dse.space import Space
from dse.study.settings import Fidelity
from dse.values import LABELS

OWN = "study"
"""The study's own level, among names of simulators."""


@dataclass(frozen=True)
class Level:
    """Level of a ladder. own: True for the level that the study was searched at."""

    name: str
    spec: BackendSpec
    own: bool


def same_designs(one: BackendSpec, other: BackendSpec) -> bool:
    """True for backends that take the same designs: by one name, or of which one extends the other."""
    if one.name == other.name:
        return True
    backends = one.make(), other.make()
    return any(isinstance(first, type(second)) for first, second in (backends, backends[::-1]))


def plain_design(backend: Backend, tree: Tree, level: Backend) -> dict[str, Any]:
    """Return the validated values of a study's design as a tree, numbers in SI units, for a level's backend of another
    kind.

    Labels are left out except the names of the sections. A field with dots in its name is a path, as external programs
    have them; so is a key of a mapping, such as `gpu.idle_w` of weights, if the level's backend takes any keys.
    """
    nested = dict[str, Any]()
    for section, part in backend.design(tree):
        values = _plain(part, paths=level.takes_any_keys)
        # names are labels, which values leave out
        if isinstance(values, dict) and (name := getattr(part, "name", None)):
            values["name"] = name
        _put_nested(nested, section, values)
    return nested


def _plain(value: Any, *, paths: bool) -> Any:
    """Return a value with models as mappings, and their labels left out; what lists hold is as it is stored.

    paths: whether keys of mappings are paths.
    """
    if isinstance(value, BaseModel) or (paths and isinstance(value, Mapping)):
        nested = dict[str, Any]()
        for name, item in value if isinstance(value, BaseModel) else value.items():
            if name not in LABELS or not isinstance(value, BaseModel):
                _put_nested(nested, str(name), _plain(item, paths=paths))
        return nested
    if isinstance(value, Mapping):
        return {str(key): _plain(item, paths=paths) for key, item in value.items()}
    if isinstance(value, tuple):
        return [
            item.model_dump(mode="json") if isinstance(item, BaseModel) else _plain(item, paths=paths) for item in value
        ]
    return value


def _put_nested(nested: dict[str, Any], path: str, value: Any) -> None:
    """Put a value into nested mappings at a dotted path, beside what is there."""
    *parents, last = path.split(".")
    for name in parents:
        nested = nested.setdefault(name, {})
    if isinstance(value, dict) and isinstance(nested.get(last), dict):
        nested[last].update(value)
    else:
        nested[last] = value


def levels(
    fidelity: Fidelity, composed: Mapping[str, Mapping[str, Any]], own_level: tuple[str, BackendSpec]
) -> tuple[Level, ...]:
    """Return the checked levels of a ladder; () for none. own_level: name and backend of the study's simulator.

    A level with the study's own backend under another name is left out, and one that cannot run on this machine, which
    is told. Raises ConfigError.
    """
    if not fidelity.levels:
        return ()
    if fidelity.levels.count(OWN) != 1 or len(set(fidelity.levels)) < len(fidelity.levels):
        rule = f"must name each level once, and the study's own as `{OWN}`"
        way = f"write fidelity.levels=[<coarser>,{OWN},<finer>]"
        raise ConfigError([Problem("fidelity.levels", rule, ", ".join(fidelity.levels), way)])
    ladder = []
    for name in fidelity.levels:
        level = Level(*own_level, own=True) if name == OWN else Level(name, _spec(name, composed[name]), own=False)
        # a machine without a program still runs the other levels
        if not level.own and (absence := level.spec.make().absence()):
            print(f"level {name} is left out: {absence}", file=sys.stderr)
        # the study's simulator under its own name would be compared with itself
        elif level.own or level.spec != own_level[1]:
            ladder.append(level)
    return tuple(ladder) if len(ladder) > 1 else ()  # a single level has nothing to be compared with


def _spec(name: str, tree: Mapping[str, Any]) -> BackendSpec:
    try:
        spec = BackendSpec.of(tree)
        spec.make()  # raises where its settings are wrong
    except ConfigError as error:
        raise ConfigError(_problems_of_level(name, error.problems)) from error
    return spec


def _problems_of_level(name: str, problems: Sequence[Problem]) -> list[Problem]:
    """Return problems of a level with its name in their paths."""
    return [replace(problem, path=f"fidelity.levels ({name}): {problem.path}") for problem in problems]


def check_level(
    check: Problems, level: Level, spaces: Mapping[str, Space], *, alike: bool, goals: Mapping[str, Goal]
) -> None:
    """Check that a level gives the objectives, with the study's goals, and takes the base designs.

    alike: whether its backend is of the same kind as the study's; a backend of another kind takes plain values.
    """
    backend, study_backend = level.spec.make(), next(iter(spaces.values())).backend
    for name, goal in goals.items():
        # a finer model must rank by the same measure
        if name not in backend.metrics or backend.metrics[name].goal != goal:
            rule = f"does not {goal} the study's objective {name}"
            check.add(
                f"fidelity.levels ({level.name})",
                rule,
                way_out=f"set fidelity=none, or an objective among its metrics: {', '.join(backend.metrics)}",
            )
    try:
        bases = {
            name: space.base if alike else plain_design(study_backend, space.base, backend)
            for name, space in spaces.items()
        }
        backend.sections(next(iter(bases.values())))  # raises where one is missing
        validate(backend, bases)
    except ConfigError as error:
        check.found.extend(_problems_of_level(level.name, error.problems))
