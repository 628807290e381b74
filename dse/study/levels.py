"""Levels of a ladder of models: which simulators they are, and what a design is at each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field

from dse.backend import Backend, Tree
from dse.errors import ConfigError, Problem
from dse.evaluation.backend_spec import BackendSpec
from dse.units import Integer, Number, WallSeconds
from dse.values import Frozen, leaves

OWN = "study"
"""The study's own level, among names of simulators."""


class Fidelity(Frozen):
    """The `fidelity` group. levels: options of the group `simulator` from the coarsest to the finest, the study's own
    level among them as `study`; none for no ladder.

    near: relative excess over the front, in the worst objective, up to which points are promoted. sample: points of a
    scenario that are drawn at random beside them. most: points of a scenario promoted to a level, the sample not
    counted; a quarter is kept for where levels disagree. rounds: how often these are looked for. most_s: a level whose
    points would take longer is skipped, with the reason; null for as long as the study took, and a minute at least.
    """

    name: str
    description: str = ""
    levels: tuple[str, ...] = ()
    near: Annotated[Number, Field(ge=0, le=10)] = 0.02
    sample: Annotated[Integer, Field(ge=0, le=100_000)] = 8
    most: Annotated[Integer, Field(ge=1, le=100_000)] = 16
    rounds: Annotated[Integer, Field(ge=0, le=100)] = 2
    most_s: WallSeconds | None = None


@dataclass(frozen=True)
class Level:
    """One level of a ladder. own: whether it is the one that the study was searched at."""

    name: str
    spec: BackendSpec
    own: bool


def handed(own: Backend, tree: Tree) -> dict[str, Any]:
    """What a backend of another kind is given of a study's design: its validated values as a tree, numbers in SI units.

    Labels are left out but for the names of the sections, and a key with dots is a path.
    """
    design, found = own.design(tree), dict[str, Any]()
    named = [(f"{section}.name", getattr(part, "name", None)) for section, part in design]
    for path, value in [
        *((path, name) for path, name in named if name),
        *((leaf[0], leaf[1]) for leaf in leaves(design)),
    ]:
        *parents, last = path.split(".")
        node = found
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = _listed(value)
    return found


def _listed(value: Any) -> Any:
    """Models within lists as mappings."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [_listed(one) for one in value] if isinstance(value, tuple) else value


def levels(
    asked: Fidelity, composed: Mapping[str, Mapping[str, Any]], own: tuple[str, BackendSpec]
) -> tuple[Level, ...]:
    """The levels of a ladder, checked to be one; () for none. own: name and backend of the study's simulator.

    A level that is the study's own under its name is left out. Raises ConfigError.
    """
    if not asked.levels:
        return ()
    if asked.levels.count(OWN) != 1 or len(set(asked.levels)) < len(asked.levels):
        rule = f"must name each level once, and the study's own as `{OWN}`"
        way = f"write fidelity.levels=[<coarser>,{OWN},<finer>]"
        raise ConfigError([Problem("fidelity.levels", rule, ", ".join(asked.levels), way)])
    found = []
    for name in asked.levels:
        level = Level(*own, own=True) if name == OWN else Level(name, _spec(name, composed[name]), own=False)
        if level.own or level.spec != own[1]:
            found.append(level)
    return tuple(found) if len(found) > 1 else ()


def _spec(name: str, tree: Mapping[str, Any]) -> BackendSpec:
    try:
        spec = BackendSpec.of(tree)
        spec.make()
    except ConfigError as error:
        raise ConfigError(told(name, error.problems)) from error
    return spec


def told(name: str, problems: Sequence[Problem]) -> list[Problem]:
    """Problems of a level, under its name."""
    return [replace(problem, path=f"fidelity.levels ({name}): {problem.path}") for problem in problems]
