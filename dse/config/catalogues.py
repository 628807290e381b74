"""Options of a group that have no file in `conf`: a package lists them, or reads a file that a path names.

A package declares `CATALOGUES = {group: "module:attribute"}`, the attribute being a `Catalogue`. It is loaded only when
a group that has one is asked for an option that no file of the group describes.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from dse import plugins
from dse.errors import ConfigError, Problem

_SUFFIXES = (".yaml", ".yml", ".json")


class Catalogue(Protocol):
    """Options of one group."""

    def names(self) -> Mapping[str, str]:
        """Names with their descriptions."""
        ...

    def tree(self, name: str) -> dict[str, Any]:
        """The tree of an option, or of a file. Raises ConfigError for one that is unknown or cannot be read."""
        ...


def catalogue(group: str) -> Catalogue | None:
    """The catalogue of a group; None if it has none."""
    place = plugins.declaration("CATALOGUES", group)
    if place is None:
        return None
    module, _, attribute = str(place).partition(":")
    options: Catalogue = getattr(importlib.import_module(module), attribute)
    return options


def listed(group: str) -> Mapping[str, str]:
    """Options of the catalogue of a group with their descriptions; {} if it has none."""
    options = catalogue(group)
    return {} if options is None else options.names()


def catalogued(group: str, value: object) -> bool:
    """Tell whether the catalogue of a group has an option, or reads the file that it names."""
    if not isinstance(value, str) or catalogue(group) is None:
        return False
    return value.endswith(_SUFFIXES) or value in listed(group)


def catalogued_tree(group: str, value: str) -> dict[str, Any]:
    """The tree of an option of a catalogue. Raises ConfigError."""
    options = catalogue(group)
    assert options is not None
    return options.tree(value)


def put_catalogued(tree: dict[str, Any], chosen: Mapping[str, str]) -> list[Problem]:
    """Put options of catalogues, by group, in place of whole sections, and return what is wrong with them.

    What a study says of values of its own option does not hold for another one.
    """
    problems = list[Problem]()
    for group, value in chosen.items():
        try:
            if group not in tree:
                way = "leave it out, or take a study that has it"
                raise ConfigError([Problem(group, "is no section of this study", value, way)])
            tree[group] = catalogued_tree(group, value)
        except ConfigError as error:
            problems.extend(error.problems)
    return problems


def catalogued_paths(tree: Mapping[str, Any], groups: Collection[str]) -> set[str]:
    """Dotted paths in the `space` of a configuration that lie in sections put in by `put_catalogued`."""
    paths, stack = set[str](), [("", tree.get("space") or {})]
    while stack:
        path, value = stack.pop()
        if isinstance(value, Mapping):
            stack += [(f"{path}.{name}".lstrip("."), inner) for name, inner in value.items()]
        elif path.partition(".")[0] in groups:
            paths.add(path)
    return paths
