"""Content keys: hashes that identify a design by what it says, so that equal designs are evaluated once."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.values import LABELS, Keys, Memo, leaves

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
    return _parts.get(lambda: _sum(part, path, {}), part, key=path)


_parts = Memo[tuple[int, int]](4096)


def _sum(part: Any, path: str, axes: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    part_leaves = leaves(part, path[:-1])
    return _add(_lane(f"{name} = {_canonical(value)!r}") for name, value, _ in part_leaves if name not in axes)


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
        return sorted((path, _canonical(item)) for path, item, _ in leaves(value))
    return value + 0.0 if isinstance(value, float) else value  # -0.0 is 0.0
