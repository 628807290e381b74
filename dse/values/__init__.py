"""Frozen values: validated models, knobs that may be searched, sources of facts, and content keys.

A content key is a hash that identifies a design by what it says, so that equal designs are evaluated once.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

Keys = NDArray[np.uint64]
"""Content keys of designs: hashes of 128 bits as two unsigned numbers each, [B, 2]."""


class Frozen(BaseModel):
    """A validated, immutable value: unknown keys, NaN and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)


def knob(*, structural: bool = False, when: Mapping[str, str] | None = None, neutral: Any = None, **limits: Any) -> Any:
    """A field that may be searched.

    structural: a change of it changes the task graph's structure, not only its weights.
    when: sibling field -> value it must have for this field to mean anything (otherwise it becomes None).
    neutral: the value that stands for all others in a design where the field changes nothing; None if it always does.
    limits: pydantic's own (`ge`, `le`, `gt`, `default`, `description`, ...).
    """
    extra = {"structural": structural, "when": dict(when or {}), "neutral": neutral}
    return Field(**limits, json_schema_extra=extra)


class AtLeast(int):
    """A number in a condition (`Backend.condition`) that every number equals which is not below it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float) and other >= int(self)

    def __hash__(self) -> int:
        return super().__hash__()


class AtMost(int):
    """A number in a condition that every number equals which is not above it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float) and other <= int(self)

    def __hash__(self) -> int:
        return super().__hash__()


@functools.cache
def neutral_values(kind: type[BaseModel]) -> Mapping[str, Any]:
    """The fields of `kind` that declare a `neutral` value, with that value."""
    extras = {name: info.json_schema_extra for name, info in kind.model_fields.items()}
    declared = {name: extra.get("neutral") for name, extra in extras.items() if isinstance(extra, dict)}
    return {name: value for name, value in declared.items() if value is not None}


def condition(kind: type[BaseModel], name: str) -> Mapping[str, str]:
    """The `when` of field `name` of `kind`: sibling -> needed value; empty if it always counts."""
    extra = kind.model_fields[name].json_schema_extra
    needed = extra.get("when", {}) if isinstance(extra, dict) else {}
    return {str(key): str(value) for key, value in needed.items()} if isinstance(needed, dict) else {}


Provenance = Literal[
    "measured", "vendor", "abstract", "secondary", "memory", "derived", "calibrated", "assumed", "user"
]


class CalibrationSource(Frozen):
    """What numbers were fitted to, so that anybody can fit them again (`python -m benchmarks.refit`).

    target: the value that a quantity is to have, or the table of the rows, a path below a folder of measured tables.
    tolerance: how far that quantity may be off its target, or a number off its fit to the rows, as a share.
    recomputed_by: name of the function that computes them anew.
    """

    target: float | Annotated[str, Field(min_length=3)]
    tolerance: float = Field(gt=0, lt=1)
    recomputed_by: str = Field(min_length=3)


class Source(Frozen):
    """The origin of a number. `memory` is unverified recollection and never shown as published; `assumed` is taken over
    from other hardware, or chosen; `user` was typed with the question. spread: how far off it may be, as a share either
    way, where the source says. calibration: of calibrated numbers, what they were fitted to. copy_of: the option of
    `conf` whose numbers these are, at the same path (`gpu/h100`) or another one (`gpu/h100:efficiency.bf16`).
    """

    provenance: Provenance
    source: str = Field(min_length=3)
    spread: float | None = Field(default=None, gt=0, lt=1)
    calibration: CalibrationSource | None = None
    copy_of: str | None = Field(default=None, pattern=r"^\w+/\w+(:[\w.]+)?$")

    @model_validator(mode="after")
    def _only_what_is_calibrated_has_a_target(self) -> Self:
        if self.calibration is not None and self.provenance != "calibrated":
            raise ValueError(f"is {self.provenance} and names a calibration; only what is calibrated was fitted")
        return self


LABELS = frozenset({"name", "description", "note", "sources", "calibration", "copy_of", "unread"})
"""Fields that say what a value is called or where it is from; two values that differ only there are equal.

unread: keys of a foreign file that may change the answer and that no model reads; they are reported before the answer.
"""


def leaves(value: Any, path: str = "", structural: bool = False) -> list[tuple[str, Any, bool]]:
    """(dotted path, value, structural) of every leaf of a frozen model, or of what a field holds; labels left out.

    path, structural: of the field. What is no number is structural anyhow.
    """
    walked, stack = list[tuple[str, Any, bool]](), [(path, value, structural)]  # every key of a point is made of them
    while stack:
        path, value, structural = stack.pop()
        if isinstance(value, BaseModel):
            marked, before = _structural_fields(type(value)), f"{path}." if path else ""
            # those that a model allows beyond its own, too
            inner = [(before + name, item, name in marked) for name, item in value if name not in LABELS]
            stack += inner[::-1]
        elif isinstance(value, Mapping):
            stack += [(f"{path}.{key}", item, structural) for key, item in value.items()][::-1]
        else:
            numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
            walked.append((path, value, structural or not numeric))
    return walked


def has_axis(model: BaseModel, path: str) -> bool:
    """True if a model has a leaf at a dotted path that `leaves` would call a number, and not structural."""
    value: Any = model
    structural = False
    while path:
        if isinstance(value, BaseModel):
            name, _, path = path.partition(".")
            if name in LABELS or name not in {*type(value).model_fields, *(value.model_extra or ())}:
                return False
            structural, value = name in _structural_fields(type(value)), getattr(value, name)
        elif isinstance(value, Mapping):
            # a key may have dots itself
            keys = [key for key in value if path == key or path.startswith(f"{key}.")]
            if not keys:
                return False
            path, value = path[len(keys[0]) + 1 :], value[keys[0]]
        else:
            return False
    return not structural and isinstance(value, (int, float)) and not isinstance(value, bool)


@functools.cache
def _structural_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Names of the fields of a model that are marked as structural."""
    extras = [(name, field.json_schema_extra) for name, field in kind.model_fields.items()]
    return frozenset([name for name, extra in extras if isinstance(extra, dict) and extra.get("structural")])


_Model = TypeVar("_Model", bound=BaseModel)


def put(model: BaseModel, path: str, value: Any) -> Any:
    """A frozen model with the leaf at a dotted path replaced; the value is taken as it is, and may be an array."""
    name, _, below = path.partition(".")
    inner = getattr(model, name)
    if below and isinstance(inner, Mapping):
        key, _, deeper = below.partition(".")
        changed: Any = {**inner, key: put(inner[key], deeper, value) if deeper else value}
    else:
        changed = put(inner, below, value) if below else value
    return model.model_copy(update={name: changed})  # not validated: it may be an array


def put_all(model: _Model, values: Mapping[str, Any]) -> _Model:
    """A frozen model with several leaves replaced, by dotted path; see `put`."""
    for path, value in values.items():
        model = put(model, path, value)
    return model


_Value = TypeVar("_Value")


class Memo(Generic[_Value]):
    """Values by the objects that they belong to, for objects without a hash: trees, models over a grid, arrays.

    The same object is the same key, whatever another one says; the memo holds it, so that no other gets its identity.
    key: what a value depends on beside the objects. most: entries after which it starts anew.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._entries: dict[tuple[Hashable, ...], tuple[Any, _Value]] = {}

    def get(self, compute: Callable[[], _Value], *objects: Any, key: Hashable = None) -> _Value:
        """The value of some objects, computed where there is none."""
        # the objects are held, so that no identity is given out twice
        entry = self._entries.get((key, *map(id, objects)))
        return self.keep(compute(), *objects, key=key) if entry is None else entry[1]

    def keep(self, value: _Value, *objects: Any, key: Hashable = None) -> _Value:
        """Set the value of some objects, and return it."""
        if len(self._entries) >= self._most:
            self._entries.clear()  # simpler than dropping the oldest, and seldom
        self._entries[self._place(objects, key)] = objects, value
        return value

    def find(self, *objects: Any, key: Hashable = None) -> _Value | None:
        """The value of some objects; None where there is none."""
        return self._entries.get(self._place(objects, key), (None, None))[1]

    def pop(self, item: Any) -> _Value | None:
        """Remove the value of an object, and return it; None where there is none."""
        return self._entries.pop(self._place((item,), None), (None, None))[1]

    @staticmethod
    def _place(objects: tuple[Any, ...], key: Hashable) -> tuple[Hashable, ...]:
        return (key, *map(id, objects))


def distinct(items: Iterable[_Value]) -> tuple[list[_Value], list[int]]:
    """The different objects among some, in order, and the place of each of all among them."""
    items = list(items)
    identities = [id(item) for item in items]
    different = dict(zip(identities, items, strict=True))
    places = {identity: place for place, identity in enumerate(different)}
    return list(different.values()), [places[identity] for identity in identities]


# ---------------------------------------------------------------- content keys

# two digits of each byte as one 16-bit number
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)


def content_keys(model: BaseModel, axes: Mapping[str, NDArray[Any]] | None = None, context: Sequence[str] = ()) -> Keys:
    """Content hashes [B, 2] of the grid of frozen models that differ in the leaves at `axes` (path -> values [n]).

    The hash of a design is the sum (modulo 2^64, lane by lane) of the hashes of its leaves, each a dotted path with
    its value, and of its context (backend name, version, parameters). So a grid costs one hash per value and one
    addition per design, and a leaf counts the same as an axis or fixed. A sum is sound here: the paths of a design
    are distinct, so no leaf can stand in for another, and nobody builds designs to collide; what is left is chance,
    2^-128 for a pair.
    """
    axes = axes or {}
    sums = [_part_lane(part, f"{name}.", axes) for name, part in model if name not in LABELS]
    sums += map(_lane, _context(context))
    return _spread(sums, axes)


def grid_content_keys(fixed: Iterable[str], axes: Mapping[str, NDArray[Any]], context: Sequence[str] = ()) -> Keys:
    """As `content_keys`, of what the texts `fixed` say instead of a model."""
    return _spread([*map(_lane, fixed), *map(_lane, _context(context))], axes)


def _context(context: Sequence[str]) -> list[str]:
    return [f"context {place} = {text!r}" for place, text in enumerate(context)]


def _part_lane(part: Any, path: str, axes: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    """Sum of the hashes of what a field holds, its axes left out; parts are shared by designs and hashed once."""
    if any(axis.startswith(path) for axis in axes) or not isinstance(part, BaseModel):
        return _sum(part, path, axes)
    lane = _parts.find(part, key=path)
    return _parts.keep(_sum(part, path, {}), part, key=path) if lane is None else lane


_parts = Memo[tuple[int, int]](4096)


def _sum(part: Any, path: str, axes: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    lanes = list[tuple[int, int]]()
    for name, value, _ in leaves(part, path[:-1]):
        if name not in axes:
            lanes.append(_lane(f"{name} = {_canonical(value)!r}"))
    return _add(lanes)


def _add(hashes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    first = second = 0
    for high, low in hashes:
        first, second = first + high, second + low
    return first & _WORD, second & _WORD  # Python's integers do not wrap around


def _spread(hashes: Iterable[tuple[int, int]], axes: Mapping[str, NDArray[Any]]) -> Keys:
    """The sum of some hashes and of those of each point's values, [points, 2]."""
    total = np.array([_add(hashes)], np.uint64)
    for path, values in axes.items():
        named = [_lane(f"{path} = {_canonical(value)!r}") for value in values.tolist()]
        # each value of an axis joins all points so far: the last axis varies fastest
        total = (total[:, None, :] + np.array(named, np.uint64)).reshape(-1, 2)
    return total


_WORD = 2**64 - 1


@functools.lru_cache(maxsize=1 << 16)  # values of axes come again in every block
def _lane(text: str) -> tuple[int, int]:
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")
    return digest >> 64, digest & _WORD


def keys_to_hex(hashes: Keys) -> NDArray[np.bytes_]:
    """Content hashes [B, 2] as texts [B] of 32 hexadecimal digits."""
    # most significant digits first
    digits: NDArray[np.bytes_] = _HEX[hashes.astype(">u8").view(np.uint8)].view("S32").reshape(-1)
    return digits


def content_key(model: BaseModel, *context: str) -> str:
    """Content hash (hex) of one frozen model in its context: its identity."""
    return str(keys_to_hex(content_keys(model, context=context))[0].decode())


def _canonical(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, BaseModel):
        # the order of fields in a file does not matter
        return sorted([(path, _canonical(item)) for path, item, _ in leaves(value)])
    return value + 0.0 if isinstance(value, float) else value  # -0.0 is 0.0
