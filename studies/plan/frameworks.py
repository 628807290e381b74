"""Frameworks and libraries that run steps: what they do by themselves, and what of a schedule they have today."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args

from dse.config.options import conf_dir, load_yaml
from dse.errors import Problems
from dse.values import Frozen

Mode = Literal["training", "prefill", "decode"]


class Default(Frozen):
    """What a tool does where nothing is set: a knob of a step and its value."""

    path: str
    value: str | int | bool
    provenance: Literal["vendor", "secondary", "memory"]
    source: str


class ToolFacts(Frozen):
    """A framework or library. framework: whether it runs models by itself. modes: of a run that it is for.

    defaults: what it does where nothing is set.
    """

    title: str
    framework: bool = False
    modes: tuple[Mode, ...] = get_args(Mode)
    defaults: tuple[Default, ...] = ()

    @property
    def name(self) -> str:
        """The title without what is added to it."""
        return self.title.partition(" (")[0].partition(",")[0]

    @property
    def values(self) -> dict[str, str | int | bool]:
        """Knobs -> their values where nothing is set."""
        return {default.path: default.value for default in self.defaults}


@cache
def tool_facts() -> dict[str, ToolFacts]:
    """Frameworks and libraries by name. Raises ConfigError."""
    check = Problems()
    read = {name: check.model(ToolFacts, entry, path=f"tools.{name}") for name, entry in _table()["tools"].items()}
    check.done()
    return {name: tool for name, tool in read.items() if tool is not None}


def ways() -> list[Mapping[str, Any]]:
    """Entries of schedules and knobs, each with the settings that come nearest today."""
    entries: list[Mapping[str, Any]] = _table()["frameworks"]
    return entries


def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = load_yaml(conf_dir() / "data" / "frameworks.yaml")
    return table
