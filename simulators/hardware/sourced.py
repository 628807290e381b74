"""Hardware whose every constant names where it is from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, model_validator

from dse.values import Frozen, Source, leaves


class Sourced(Frozen):
    """A value with `sources`: dotted path -> where the constants at it and below it are from."""

    sources: Mapping[str, Source]

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> Sourced:
        bare = [path for path, value, _ in leaves(self) if is_fact(value) and not self.source(path)]
        if bare:
            raise ValueError(f"no entry in `sources` for {', '.join(bare)}; every constant names where it is from")
        return self

    def source(self, path: str) -> Source | None:
        """The source of the constant at `path`: its own entry, that of the nearest enclosing path, or what a part says
        that has sources of its own.
        """
        name, _, rest = path.partition(".")
        part = getattr(self, name, None)
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path.rpartition(".")[0]
        return part.source(rest) if isinstance(part, Sourced) else None

    def facts_below(self, name: str) -> Iterator[tuple[str, Any, str, str]]:
        """(`<name>.<dotted path>`, value, provenance, source) of every constant."""
        for path, value, _ in leaves(self):
            source = self.source(path)
            if source and is_fact(value):
                yield f"{name}.{path}", _plain(value), source.provenance, source.source


def is_fact(value: object) -> bool:
    """Whether a leaf is a constant: a number, or a list of what holds numbers."""
    numbers = isinstance(value, tuple) and not all(isinstance(item, str) for item in value)
    return numbers or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
    return value
