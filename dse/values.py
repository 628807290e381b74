"""Frozen values: models, quantities with units, sources of facts.

Inside the project every quantity is a plain SI float whose field name ends in its unit (`_s`, `_bytes`,
`_bytes_per_s`, `_flop_per_s`). At the edge (YAML, command line) a text such as `64 GB/s` or `1.9 us` is read
with pint; a wrong dimension is refused. A bare number is taken to be in the unit of the field's name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_TEXT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµμ]+(?:\s*/\s*[A-Za-zµμ]+)?)\s*")


# Only what this field needs, and with information as a dimension: in pint's own list a byte is a pure number, and
# 64 GHz would pass for a bandwidth.
_UNITS = """
nano- = 1e-9 = n-; micro- = 1e-6 = µ- = μ- = u-; milli- = 1e-3 = m-; kilo- = 1e3 = k-; mega- = 1e6 = M-;
giga- = 1e9 = G-; tera- = 1e12 = T-; peta- = 1e15 = P-; exa- = 1e18 = E-; kibi- = 1024 = Ki-; mebi- = 1048576 = Mi-;
gibi- = 1073741824 = Gi-; tebi- = 1099511627776 = Ti-; second = [time] = s; minute = 60 * second = min;
hertz = 1 / second = Hz; bit = [information]; byte = 8 * bit = B; flop = [operation] = FLOP
"""


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
    found = extra.get("when", {}) if isinstance(extra, dict) else {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


@functools.cache
def _units() -> Any:
    import pint

    registry: Any = pint.UnitRegistry(None, cache_folder=None)
    for line in _UNITS.split(";"):
        registry.define(line.strip())
    return registry


@functools.lru_cache(maxsize=4096)
def _parse(text: str, unit: str) -> float:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot be read as a quantity in {unit}; write a number and a unit, such as `1.5 {unit}`")
    number, symbol = match.groups()
    registry = _units()
    try:
        factor = registry.Quantity(1.0, registry.parse_units(symbol.replace(" ", ""))).to(unit).magnitude
        return float(Decimal(number) * Decimal(repr(factor)))  # the float nearest to what is written
    except Exception as error:
        reason = "is an unknown unit" if "not defined" in str(error) else "has the wrong dimension"
        raise ValueError(f"`{symbol}` {reason}; this quantity is in {unit}") from error


def amount(text: str) -> tuple[float, str] | None:
    """The number that a text such as `1.5 TB/s` stands for, in the unit given; None of a text that is no quantity."""
    for unit in ("byte", "second", "byte/second", "flop/second", "flop"):
        with contextlib.suppress(ValueError):
            return _parse(text, unit), unit
    return None


def _number(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("must be a number without quotes or unit" if isinstance(value, str) else "must be a number")
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("must be a whole number (a leading zero, `on` or `4:1` is not one)")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("must be a whole number")
    return int(value) if isinstance(value, float) else value


def _quantity(unit: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        return _parse(value, unit) if isinstance(value, str) else _number(value)

    return BeforeValidator(read)  # type: ignore[return-value]


Integer = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Seconds = Annotated[float, _quantity("second"), Field(ge=0, le=1e4)]
WallSeconds = Annotated[float, _quantity("second"), Field(gt=0, le=1e7)]
"""Time that a person or a machine waits, not time that is modelled."""
Bytes = Annotated[float, _quantity("byte"), Field(ge=0, le=1e18)]
BytesPerSecond = Annotated[float, _quantity("byte/second"), Field(gt=0, le=1e16)]
FlopPerSecond = Annotated[float, _quantity("flop/second"), Field(gt=0, le=1e20)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]

Provenance = Literal["measured", "vendor", "abstract", "secondary", "memory", "derived", "calibrated"]


class Source(Frozen):
    """Where a number comes from. `memory` is unverified recollection and never shown as published."""

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
        yield from _leaf(value, f"{path}{name}", marked)


def put(model: BaseModel, path: str, value: Any) -> Any:
    """A frozen model with the leaf at a dotted path replaced; the value is taken as it is, and may be an array."""
    name, _, rest = path.partition(".")
    inner = getattr(model, name)
    if rest and isinstance(inner, Mapping):
        key, _, deeper = rest.partition(".")
        found: Any = {**inner, key: put(inner[key], deeper, value) if deeper else value}
    else:
        found = put(inner, rest, value) if rest else value
    return model.model_copy(update={name: found})


Lanes = NDArray[np.uint64]
"""Content hashes of 128 bits as two unsigned numbers each, [B, 2]."""

_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)


def lanes(model: BaseModel, axes: Mapping[str, NDArray[Any]] | None = None, context: Sequence[str] = ()) -> Lanes:
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


def grid_lanes(fixed: Iterable[str], axes: Mapping[str, NDArray[Any]], context: Sequence[str] = ()) -> Lanes:
    """As `lanes`, of what the texts `fixed` say instead of a model."""
    return _spread([*map(_lane, fixed), *map(_lane, _context(context))], axes)


def _context(context: Sequence[str]) -> list[str]:
    return [f"context {place} = {text!r}" for place, text in enumerate(context)]


def _part_lane(part: Any, path: str, axes: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    """Sum of the hashes of what a field holds, its axes left out; parts are shared by designs and hashed once."""
    if any(axis.startswith(path) for axis in axes) or not isinstance(part, BaseModel):
        return _sum(part, path, axes)
    if (id(part), path) not in _parts:
        if len(_parts) >= _MOST_PARTS:
            _parts.clear()
        _parts[id(part), path] = (part, _sum(part, path, {}))  # holds the part: its id stays its own
    return _parts[id(part), path][1]


_MOST_PARTS = 4096
_parts: dict[tuple[int, str], tuple[BaseModel, tuple[int, int]]] = {}


def _sum(part: Any, path: str, axes: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    found = _leaf(part, path[:-1], False)
    return _added(_lane(f"{name} = {_canonical(value)!r}") for name, value, _ in found if name not in axes)


def _added(hashes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    first = second = 0
    for one, other in hashes:
        first, second = first + one, second + other
    return first & _WORD, second & _WORD


def _spread(hashes: Iterable[tuple[int, int]], axes: Mapping[str, NDArray[Any]]) -> Lanes:
    """The sum of some hashes and of those of each point's values, [points, 2]."""
    total = np.array([_added(hashes)], np.uint64)
    for path, values in axes.items():
        named = [_lane(f"{path} = {_canonical(value)!r}") for value in values.tolist()]
        total = (total[:, None, :] + np.array(named, np.uint64)).reshape(-1, 2)
    return total


_WORD = 2**64 - 1


@functools.lru_cache(maxsize=1 << 16)
def _lane(text: str) -> tuple[int, int]:
    found = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")
    return found >> 64, found & _WORD


def hexes(hashes: Lanes) -> NDArray[np.bytes_]:
    """Content hashes [B, 2] as texts [B] of 32 hexadecimal digits."""
    digits: NDArray[np.bytes_] = _HEX[hashes.astype(">u8").view(np.uint8)].view("S32").reshape(-1)
    return digits


def key(model: BaseModel, *context: str) -> str:
    """Content hash (hex) of one frozen model in its context: its identity."""
    return str(hexes(lanes(model, context=context))[0].decode())


def _canonical(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, BaseModel):
        return sorted((path, _canonical(item)) for path, item, _ in leaves(value))
    return value + 0.0 if isinstance(value, float) else value  # -0.0 is 0.0


def _leaf(value: Any, path: str, marked: bool) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(value, BaseModel):
        yield from leaves(value, f"{path}.")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaf(item, f"{path}.{key}", marked)
    else:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        yield path, value, marked or not numeric
