"""The memory system of a GPU: CUs, an L1 for each, an L2 in slices at the channels, DRAM, and the address mapping.

Numbers live in `conf/gpu/*.yaml`, each with its source. A line's chunk (`interleave_bytes`) goes to a channel by its
number modulo the number of channels. Within a channel, the address is row | bank | column. Hashes permute the channels
by the address bits above them, so that strides do not hit one channel only: `xor` folds these bits by exclusive or,
`polynomial` takes them modulo an irreducible polynomial over GF(2) (Rau, ISCA 1991); `bank_xor` permutes banks by the
low bits of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from simulators.hardware.machine import View
from simulators.hardware.parts import Hash

_POLYNOMIALS: Mapping[int, int] = {1: 0b11, 2: 0b111, 3: 0b1011, 4: 0b10011, 5: 0b100101, 6: 0b1000011, 7: 0b10000011}
"""Irreducible polynomials over GF(2), by degree."""


class MemorySystem(View):
    """CUs of a GPU as sources of requests, and the memory below them."""

    needs: ClassVar[tuple[str, ...]] = (
        *("gpu.cycle_s", "gpu.waves", "gpu.in_flight", "gpu.flop_per_s", "gpu.launch_s", "gpu.l1", "gpu.l2"),
        *("gpu.dram", "gpu.mapping", "gpu.line_bytes", "gpu.page_bytes"),
    )
    reads: ClassVar[tuple[str, ...]] = ("gpu.num_cus",)

    @property
    def l1_sets(self) -> float:
        """Sets of an L1; a power of two unless a rule is broken."""
        return self.gpu.l1.bytes / (self.gpu.l1.ways * self.gpu.line_bytes)

    @property
    def l2_sets(self) -> float:
        """Sets of a slice of L2."""
        return self.gpu.l2.bytes / (self.gpu.l2.ways * self.gpu.line_bytes * self.gpu.dram.channels)


def whole_power(number: float) -> bool:
    """Return whether a number is a power of two: 1, 2, 4, ..."""
    return number >= 1 and float(number).is_integer() and not int(number) & (int(number) - 1)


@dataclass(frozen=True)
class Folds:
    """Channel permutations by the four low bytes of the address above the channel bits, 256 values of each: [1024]."""

    table: NDArray[np.int64]

    @classmethod
    def of(cls, hashed: Hash, channels: int) -> Folds:
        """Tabulate a hash; all zero without one."""
        bits = max(1, math.ceil(math.log2(channels)))
        table = [_turn(hashed, value << 8 * byte, bits) for byte in range(4) for value in range(256)]
        return cls(np.array(table, np.int64))


def _turn(hashed: Hash, high: int, bits: int) -> int:
    """Hash of `high`: exclusive or of its groups of `bits` bits, or high x^bits modulo a polynomial of that degree."""
    if hashed == "none":
        return 0
    if hashed == "xor":
        folded = 0
        while high:
            folded, high = folded ^ (high & ((1 << bits) - 1)), high >> bits
        return folded
    remainder, divisor = high << bits, _POLYNOMIALS[bits]
    for place in range(remainder.bit_length() - 1, bits - 1, -1):
        if remainder >> place & 1:
            remainder ^= divisor << (place - bits)
    return remainder
