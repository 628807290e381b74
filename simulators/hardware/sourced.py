"""Hardware descriptions in which every constant names its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Field, model_validator

from dse.values import Frozen, Source, leaves

WHAT_IF = frozenset({"active_cus", "clock", "flop_vs_bw"})
"""Names of what a design is asked to be: no constants of a machine, so they need no source, and may have one."""


class WithSources(Frozen):
    """A part with `sources`: dotted path -> source of the constants at and below it; the whole may name others."""

    sources: Mapping[str, Source] = Field(default_factory=dict)

    def source(self, path: str) -> Source | None:
        """Source of the constant at `path`: the entry of the path or of the nearest enclosing path.

        A part with sources of its own answers for paths without an entry.
        """
        name, _, subpath = path.partition(".")
        part = getattr(self, name, None)
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path.rpartition(".")[0]
        return part.source(subpath) if isinstance(part, WithSources) else None

    def facts_below(self, name: str) -> Iterator[tuple[str, Any, str, str]]:
        """Yield (`<name>.<dotted path>`, value, provenance, source) of every constant."""
        for path, value, _ in leaves(self):
            source = self.source(path)
            if source and is_fact(value):
                yield f"{name}.{path}", _plain(value), source.provenance, source.source


class SourcedValue(WithSources):
    """A value in which every constant has a source, its own or that of a part."""

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> SourcedValue:
        bare = [path for path, value, _ in leaves(self) if _is_constant(path, value) and not self.source(path)]
        if bare:
            raise ValueError(f"no entry in `sources` for {', '.join(bare)}; every constant names its source")
        return self


def _is_constant(path: str, value: object) -> bool:
    return is_fact(value) and path.rpartition(".")[2] not in WHAT_IF


def is_fact(value: object) -> bool:
    """Return whether a leaf is a constant: a number, or a list of numbers or of values that hold numbers."""
    numbers = isinstance(value, tuple) and not all(isinstance(item, str) for item in value)
    return numbers or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
    return value
