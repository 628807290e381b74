"""Products of matrices by a warp, `mma.sync`, by gathering fragments to matrices (PTX ISA, section 9.7.14.5)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dse_ptx.checking import numbers as num
from dse_ptx.program import Instruction, Operand, OperandGroup

_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}


class Registers(Protocol):
    """Registers of threads, which a launch reads and writes."""

    def value(self, thread: Any, operand: Operand, kind: str) -> int:
        """Bits of an operand."""

    def assign(self, thread: Any, operand: Operand, word: int) -> None:
        """Write a register."""


def run(launch: Registers, lanes: Sequence[Any], instruction: Instruction) -> None:
    """Multiply, add and round; sums are exact but of double precision, which is rounded after each term."""
    d, a, b, c = (
        entry.members if isinstance(entry, OperandGroup) else (entry,) for entry in instruction.operands
    )  # fmt: skip
    result, kind, other, _ = instruction.types
    shape = next(word for word in instruction.modifiers if re.match("m[0-9]", word))
    rows, depth = (int(word) for word in shape[1:].split("n8k"))
    # whole matrices, to which each lane adds what its registers hold
    left = np.zeros((rows, depth))
    right, start = np.zeros((depth, 8)), np.zeros((rows, 8))
    for lane, thread in enumerate(lanes):
        group, member = divmod(lane, 4)
        for half, k, number in _elements(launch, thread, a, kind, rows // 8):
            left[group + 8 * half, k + _numbers_a_register(kind) * member] = number
        for _, k, number in _elements(launch, thread, b, other, 1):
            right[k + _numbers_a_register(other) * member, group] = number
        for place, (row, column) in enumerate(_cells(lane, rows)):
            start[row, column] = _accumulator(launch, thread, c, result, place)
    total = _sums(left, right, start, result, instruction.modifiers)
    for lane, thread in enumerate(lanes):
        words = [num.encode(float(total[cell]), result) for cell in _cells(lane, rows)]
        if result == "f16":
            words = [low | high << 16 for low, high in zip(words[::2], words[1::2], strict=True)]
        for operand, word in zip(d, words, strict=True):
            launch.assign(thread, operand, word)


def _numbers_a_register(kind: str) -> int:
    """Numbers in a register."""
    return max(1, 32 // _BITS[kind])


def _elements(
    launch: Registers, thread: Any, registers: Sequence[Operand], kind: str, halves: int
) -> Iterator[tuple[int, int, float]]:
    """(half of the rows, column from the lane's first, number) of all that a lane holds."""
    for place_of, operand in enumerate(registers):
        word, first = launch.value(thread, operand, "b64"), 4 * _numbers_a_register(kind) * (place_of // halves)
        for place in range(_numbers_a_register(kind)):
            part = word >> _BITS[kind] * place & ((1 << _BITS[kind]) - 1)
            if kind in ("s4", "u4", "b1"):
                number: float = part - 16 if kind == "s4" and part > 7 else part
            else:
                # TF32 ignores the 13 last digits of single precision
                number = num.decode(part & 0xFFFFE000, "f32") if kind == "tf32" else num.decode(part, kind)
            yield place_of % halves, first + place, float(number)


def _cells(lane: int, rows: int) -> list[tuple[int, int]]:
    """Row and column of the numbers that a lane accumulates."""
    return [(lane // 4 + 8 * half, 2 * (lane % 4) + i) for half in range(rows // 8) for i in range(2)]


def _accumulator(launch: Registers, thread: Any, c: Sequence[Operand], result: str, place: int) -> float:
    packed = 2 if result == "f16" else 1
    word = launch.value(thread, c[place // packed], "b64")
    return float(num.decode(word >> 16 * (place % packed) if packed == 2 else word, result))


def _sums(
    a: NDArray[np.float64], b: NDArray[np.float64], c: NDArray[np.float64], result: str, names: Sequence[str]
) -> NDArray[np.float64]:
    """The product and its start, before accumulators are rounded."""
    if result == "f64":
        # double precision: a fused multiply-add for each term, k ascending, as the machine rounds each
        total = c.copy()
        for i, j in np.ndindex(*c.shape):
            for k in range(a.shape[1]):
                exact = num.fused_sum(float(a[i, k]), float(b[k, j]), float(total[i, j]))
                total[i, j] = num.decode(num.encode(exact, "f64"), "f64")
        return total
    if "xor" in names:
        return np.asarray((a[:, :, None] != b[None]).sum(axis=1) + c)
    # exact: products of short numbers and their sums fit into double precision in these tests
    total = a @ b + c
    return np.clip(total, -(2.0**31), 2.0**31 - 1) if "satfinite" in names else total
