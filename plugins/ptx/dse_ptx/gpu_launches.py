"""Launches of `kernels/on_gpu.csv`, which a GPU measures (`dse_ptx.on_gpu`) and SMs predict (`ptx compare`).

An argument is a number with its type (`f32:1.5`), or an array of so many (`f16*1024`) that holds the same numbers here
and there. NumPy is enough to read them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse_ptx.kernels import FOLDER, kernel_text

_TYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}
# a hash and no generator: the same numbers with any version of NumPy
_FACTOR, _RANGE = 2654435761, 1 << 32  # of Knuth's multiplicative hash
Value: TypeAlias = "np.generic | NDArray[Any]"


@dataclass(frozen=True)
class GpuLaunch:
    """A launch. file: of `kernels`. shared: bytes of dynamic shared memory. arguments: as they are written."""

    file: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: tuple[str, ...]

    @property
    def text(self) -> str:
        """The PTX."""
        return kernel_text(self.file)

    def values(self) -> list[Value]:
        """Arguments: numbers of NumPy, and arrays."""
        return [_value(word) for word in self.arguments]


def launches() -> list[GpuLaunch]:
    """All launches."""
    with (FOLDER / "on_gpu.csv").open(encoding="utf-8", newline="") as file:
        return [
            GpuLaunch(
                row["file"], row["kernel"], _sizes(row["grid"]), _sizes(row["block"]), int(row["shared"]),
                tuple(row["arguments"].split()),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def _sizes(text: str) -> tuple[int, int, int]:
    x, y, z = (*map(int, text.split("x")), 1, 1)[:3]
    return x, y, z


def _value(word: str) -> Value:
    name, _, number = word.partition(":")
    if number:
        return np.array(float(number) if name[0] == "f" else int(number), _TYPES[name])[()]
    name, _, count = word.partition("*")
    places = np.arange(int(count), dtype=np.uint64) * np.uint64(_FACTOR) % np.uint64(_RANGE)
    return (places / _RANGE - 0.5).astype(_TYPES[name])


def magnitude(arrays: Iterable[NDArray[Any]]) -> float:
    """The sum of all numbers' magnitudes, by which results of a GPU are compared."""
    return float(sum(np.abs(values.astype(np.float64)).sum() for values in arrays))


def is_close(one: float, other: float, kinds: Sequence[str]) -> bool:
    """Return whether magnitudes differ by no more than rounding in another order."""
    # 2^-2 with halves, 2^-10 else: sums over many terms lose digits
    digits = 10 if any(kind.startswith("f16") for kind in kinds) else 18
    return abs(one - other) <= 2.0 ** (8 - digits) * max(abs(one), abs(other))
