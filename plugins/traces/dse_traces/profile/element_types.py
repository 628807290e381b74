"""Types of elements by PyTorch's names: of those of collectives (`BFloat16`) and of inputs (`c10::BFloat16`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRECISION_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes of an element of each precision in which matrices are multiplied."""
_PRECISIONS: Mapping[str, str] = {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}
_EIGHT_BITS = "float8_"  # e4m3fn, e5m2, and what AMD's GPUs have (e4m3fnuz)
_OTHERS: Mapping[str, int] = {
    **{"double": 8, "long": 8, "long int": 8, "int": 4, "short": 2},
    **{"char": 1, "signed char": 1, "byte": 1, "unsigned char": 1, "bool": 1},
}


def precision_of(name: Any) -> str | None:
    """The precision of `PRECISION_BYTES` that a type is of, or None.

    >>> precision_of("c10::Float8_e4m3fn"), precision_of("BFloat16"), precision_of("float"), precision_of("long int")
    ('fp8', 'bf16', 'fp32', None)
    """
    plain = _plain(name)
    return "fp8" if plain.startswith(_EIGHT_BITS) else _PRECISIONS.get(plain)


def element_bytes(name: Any) -> int | None:
    """Bytes of an element of a type; None for one that is not known.

    >>> element_bytes("Float8_e5m2"), element_bytes("Long"), element_bytes("c10::Half"), element_bytes("")
    (1, 8, 2, None)
    """
    precision = precision_of(name)
    return PRECISION_BYTES[precision] if precision else _OTHERS.get(_plain(name))


def _plain(name: Any) -> str:
    return name.removeprefix("c10::").lower() if isinstance(name, str) else ""
