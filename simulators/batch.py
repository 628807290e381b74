"""Batches of designs: those that share a structure become one design whose differing numbers are arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from dse.values import LABELS, leaves
from simulators.design import Design


def batches(designs: Sequence[Design]) -> Iterator[tuple[list[int], Design]]:
    """(indices, one design of columns) for each group of designs that differ only in non-structural numbers.

    Numbers that differ inside a group become arrays [group]; properties and equations broadcast over them.
    """
    known: dict[int, tuple[Any, ...]] = {}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, design in enumerate(designs):
        structure = tuple(_structure(part, known) for part in (design.system, design.workload, design.schedule))
        groups.setdefault(structure, []).append(index)
    for indices in groups.values():
        yield indices, _columns([designs[index] for index in indices])


def _structure(part: Any, known: dict[int, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Structural leaves of a part; parts shared by many designs are walked once."""
    if id(part) not in known:
        known[id(part)] = tuple((path, value if marked else None) for path, value, marked in leaves(part))
    return known[id(part)]


def _columns(values: Sequence[Any]) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    if isinstance(first, BaseModel):
        fields = type(first).model_fields
        parts = {name: _field(name, [getattr(value, name) for value in values]) for name in fields}
        return type(first).model_construct(**parts)
    if isinstance(first, Mapping):
        return {name: _columns([value[name] for value in values]) for name in first}
    if isinstance(first, (int, float)) and any(value != first for value in values):
        return np.array(values)
    return first


def _field(name: str, values: Sequence[Any]) -> Any:
    return values[0] if name in LABELS else _columns(values)
