"""Plug-ins by name: the modules of our own packages, and entry points of other installed distributions.

A plug-in is a module that carries its kind's attribute: `ENGINE`, `BACKEND` (in `simulators`), `SCHEDULE` (in
`search_spaces`), `STUDY` (in `studies`), `METHOD` (in `dse.search.methods`), `COMMANDS` (anywhere). Another
distribution joins by an entry point that names such a module, in the group `dse.<package>` (`dse.search.methods` as it
is); nothing else has to be edited, and configuration never names a class or a path.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

from dse.errors import ConfigError, Problem, did_you_mean

Key = TypeVar("Key")
Found = TypeVar("Found")

PACKAGES = ("dse", "simulators", "search_spaces", "studies")


def remembered(function: Callable[[Key], Found]) -> Callable[[Key], Found]:
    """Remember what a function found for each argument until `refresh()`."""
    found = functools.cache(function)
    _REMEMBERED.append(found.cache_clear)
    return found


_REMEMBERED: list[Callable[[], None]] = []


def refresh() -> None:
    """Look again: forget which plug-ins were found (after a distribution was installed into this process)."""
    for forget in _REMEMBERED:
        forget()


@remembered
def names(package: str) -> tuple[str, ...]:
    """Names of all modules that may be plug-ins of `package`, found by looking (once); nothing is imported."""
    own = {found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__)}
    return tuple(sorted(own | set(_entries(package))))


def module(package: str, name: str) -> ModuleType:
    """The module `name` of `package`, own or registered by another distribution.

    Raises ConfigError where it is absent, ambiguous or fails to import.
    """
    entries = _entries(package).get(name, [])
    own = any(found.name == name for found in pkgutil.iter_modules(importlib.import_module(package).__path__))
    if len(entries) + own > 1:
        places = [f"the package {package}"] * own + [_distribution(entry) for entry in entries]
        raise ConfigError([Problem(f"{package}.{name}", f"is offered by {' and '.join(places)}", way_out="keep one")])
    entry = entries[0] if entries else None
    target = entry.value if entry else f"{package}.{name}"
    try:
        return importlib.import_module(target)
    except Exception as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        way = f"it is registered by {_distribution(entry)}" if entry else "mend that module"
        raise ConfigError([Problem(target, rule, way_out=way)]) from error


def load(package: str, name: str, attribute: str) -> Any:
    """The plug-in object `attribute` of module `name`. Raises ConfigError with the names that exist."""
    return _load((package, name, attribute))


@remembered
def _load(asked: tuple[str, str, str]) -> Any:
    package, name, attribute = asked
    if name in names(package):
        found = getattr(module(package, name), attribute, None)
        if found is not None:
            return found
    known = plugins(package, attribute)
    raise ConfigError(
        [Problem(f"{package}.{name}", f"is no plug-in with {attribute}", way_out=did_you_mean(name, known))]
    )


def plugins(package: str, attribute: str) -> dict[str, Any]:
    """All plug-ins of a kind, by name."""
    modules = {name: module(package, name) for name in names(package) if not name.startswith("_")}
    return {name: getattr(found, attribute) for name, found in modules.items() if hasattr(found, attribute)}


@remembered
def _entries(package: str) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=package if package.startswith("dse.") else f"dse.{package}"):
        found.setdefault(entry.name, []).append(entry)
    return found


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown distribution"
