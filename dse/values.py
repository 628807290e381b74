"""Frozen values: validated models, knobs that may be searched, sources of facts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """A validated, immutable value: unknown keys, NaN and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


def knob(*, structural: bool = False, when: Mapping[str, str] | None = None, neutral: Any = None, **limits: Any) -> Any:
    """A field that may be searched.

    structural: a change of it changes the task graph's structure, not only its weights.
    when: sibling field -> value it must have for this field to mean anything (otherwise it becomes None).
    neutral: the value that stands for all others in a design where the field changes nothing; None if it always does.
    limits: pydantic's own (`ge`, `le`, `gt`, `default`, `description`, ...).
    """
    extra = {"structural": structural, "when": dict(when or {}), "neutral": neutral}
    return Field(**limits, json_schema_extra=extra)


@functools.cache
def neutral_values(kind: type[BaseModel]) -> Mapping[str, Any]:
    """The fields of `kind` that declare a `neutral` value, with that value."""
    extras = {name: field.json_schema_extra for name, field in kind.model_fields.items()}
    declared = {name: extra.get("neutral") for name, extra in extras.items() if isinstance(extra, dict)}
    return {name: value for name, value in declared.items() if value is not None}


def condition(kind: type[BaseModel], name: str) -> Mapping[str, str]:
    """The `when` of field `name` of `kind`: sibling -> needed value; empty if it always counts."""
    extra = kind.model_fields[name].json_schema_extra
    needed = extra.get("when", {}) if isinstance(extra, dict) else {}
    return {str(key): str(value) for key, value in needed.items()} if isinstance(needed, dict) else {}


Provenance = Literal["measured", "vendor", "abstract", "secondary", "memory", "derived", "calibrated"]


class Source(Frozen):
    """The origin of a number. `memory` is unverified recollection and never shown as published."""

    provenance: Provenance
    source: str = Field(min_length=3)


LABELS = frozenset({"name", "description", "note", "sources"})
"""Fields that say what a value is called or where it is from; two values that differ only there are equal."""


def leaves(model: BaseModel, path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """(dotted path, value, structural) of every leaf of a frozen model, labels left out."""
    fields = type(model).model_fields
    for name, value in model:  # those that a model allows beyond its own, too
        if name in LABELS:
            continue
        extra = fields[name].json_schema_extra if name in fields else None
        marked = bool(extra.get("structural")) if isinstance(extra, dict) else False
        yield from iter_leaves(value, f"{path}{name}", marked)


def put(model: BaseModel, path: str, value: Any) -> Any:
    """A frozen model with the leaf at a dotted path replaced; the value is taken as it is, and may be an array."""
    name, _, below = path.partition(".")
    inner = getattr(model, name)
    if below and isinstance(inner, Mapping):
        key, _, deeper = below.partition(".")
        changed: Any = {**inner, key: put(inner[key], deeper, value) if deeper else value}
    else:
        changed = put(inner, below, value) if below else value
    return model.model_copy(update={name: changed})


def iter_leaves(value: Any, path: str, structural: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """(dotted path, value, structural) of every leaf of what a field holds, `path` being the field's own."""
    if isinstance(value, BaseModel):
        yield from leaves(value, f"{path}.")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from iter_leaves(item, f"{path}.{key}", structural)
    else:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        yield path, value, structural or not numeric
