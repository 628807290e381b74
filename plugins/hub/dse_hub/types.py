"""The table of a model hub's types: rows of `hub_types.yaml`, and defaults of keys by type."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dse.config.options import load_yaml
from dse_hub import DATA

_SECTIONS = ("widths", "weights", "state", "names")


@dataclass(frozen=True)
class HubType:
    """The row of a type. rules: expressions by name; sections: expressions of widths, weights and states.

    defaults: values of keys that a file may lack. without_effect: keys that say nothing new of this type. refuses: keys
    of a kind of layer that is not read, and what it is. readable: whether a file may be of it.
    """

    name: str
    rules: Mapping[str, str]
    sections: Mapping[str, Mapping[str, Any]]
    defaults: Mapping[str, Any]
    without_effect: frozenset[str] = frozenset()
    refuses: Mapping[str, str] = field(default_factory=dict)
    readable: bool = True

    def alternatives(self, width: str) -> tuple[str, ...]:
        """Keys and expressions of a width, in the order in which they count."""
        return tuple(self.sections["widths"].get(width) or ())


@functools.cache
def _table(name: str) -> Mapping[str, Any]:
    tree: Mapping[str, Any] = load_yaml(DATA / f"{name}.yaml")
    return tree


@functools.cache
def hub_type(name: str) -> HubType:
    """The row of a type, with those of the types that it is like below it."""
    row = _table("hub_types")["types"][name]
    base = hub_type(row["like"]) if "like" in row else HubType(name, {}, {}, {})
    sections = {key: {**base.sections.get(key, {}), **row.get(key, {})} for key in _SECTIONS}
    rules = {**base.rules, **{key: value for key, value in row.items() if key in _RULES}}
    # not inherited: each type has the defaults of its own class
    defaults = _table("hub_defaults")["defaults"].get(row.get("defaults", name), {})
    harmless = base.without_effect | set(row.get("without_effect", ()))
    refuses = {**base.refuses, **row.get("refuses", {})}
    return HubType(name, rules, sections, defaults, harmless, refuses, readable=not row.get("abstract", False))


_RULES = ("gated", "rotary", "causal", "tied", "out_gate", "sinks", "mixer", "feed", "windowed", "latent", "indexed")


@functools.cache
def readable_types() -> tuple[str, ...]:
    """Values of `model_type` that are read."""
    return tuple(name for name in _table("hub_types")["types"] if hub_type(name).readable)


@functools.cache
def refused_types() -> Mapping[str, str]:
    """Values of `model_type` that are not read, and what their layers are made of that no row of the table can say."""
    refused: Mapping[str, str] = _table("hub_types")["refused"]
    return refused
