"""The memory system of a GPU: CUs, an L1 for each, an L2 in slices at the channels, DRAM, and the address mapping.

Numbers live in `conf/system/*.yaml`, each with its source. A line's chunk (`interleave_bytes`) goes to a channel by its
number modulo the number of channels. Within a channel, the address is row | bank | column. Hashes permute the channels
by the address bits above them, so that strides do not hit one channel only: `xor` folds these bits by exclusive or,
`polynomial` takes them modulo an irreducible polynomial over GF(2) (Rau, ISCA 1991); `bank_xor` permutes banks by the
low bits of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from dse.units import Bytes, BytesPerSecond, FlopPerSecond, Integer, Seconds
from dse.values import Frozen
from simulators.hardware.sourced import Sourced

Hash = Literal["none", "xor", "polynomial"]
Short = Annotated[Seconds, Field(le=1e-3)]
Count = Annotated[Integer, Field(ge=1, le=4096)]
Precision = Literal["fp32", "fp64", "fp16"]

_POLYNOMIALS: Mapping[int, int] = {1: 0b11, 2: 0b111, 3: 0b1011, 4: 0b10011, 5: 0b100101, 6: 0b1000011, 7: 0b10000011}
"""Irreducible polynomials over GF(2), by degree."""


class Cus(Frozen):
    """CUs, the sources of requests. cycle_s: cycle of a CU, which issues one line in each.

    flop_per_s: rate of all CUs that kernels reach. waves: capacity of a CU. in_flight: outstanding lines of a CU.
    launch_s: time from one kernel to the next.
    """

    num_cus: Annotated[Integer, Field(ge=1, le=1024)]
    cycle_s: Annotated[Short, Field(gt=0)]
    waves: Annotated[Integer, Field(ge=1, le=64)]
    in_flight: Count
    flop_per_s: Mapping[Precision, Annotated[FlopPerSecond, Field(ge=1e9)]] = Field(min_length=1)
    launch_s: Short


class L1(Frozen):
    """The cache of a CU. hit_s: latency of a hit."""

    bytes: Annotated[Bytes, Field(ge=64)]
    ways: Annotated[Integer, Field(ge=1, le=32)]
    hit_s: Short


class L2(Frozen):
    """The shared cache, in slices of equal size at the channels.

    hop_s: time from a CU to a slice. hit_s: from there until the line leaves. lookup_s, fill_s: time that a request, or
    an arriving line, occupies a slice. set_index: `xor` permutes the sets by the address bits above them.
    """

    bytes: Annotated[Bytes, Field(ge=4096)]
    ways: Annotated[Integer, Field(ge=1, le=32)]
    hop_s: Short
    hit_s: Short
    lookup_s: Short
    fill_s: Short
    set_index: Literal["linear", "xor"] = "linear"


class Dram(Frozen):
    """Channels of DRAM, their banks and their controllers.

    hop_s: time from L2 to a controller. queue: requests that a controller schedules among. write_buffer: lines that it
    writes in one burst. to_write_s, to_read_s: bus turnaround times.
    """

    channels: Annotated[Integer, Field(ge=1, le=128)]
    banks: Annotated[Integer, Field(ge=1, le=64)]
    row_bytes: Annotated[Integer, Field(ge=256, le=4096)]
    bytes_per_s: Annotated[BytesPerSecond, Field(ge=1e9)]
    hop_s: Short
    queue: Annotated[Integer, Field(ge=1, le=1024)]
    write_buffer: Annotated[Integer, Field(ge=1, le=1024)]
    trcd_s: Short
    trp_s: Short
    tras_s: Short
    tcl_s: Short
    trrd_s: Short
    twr_s: Short
    to_write_s: Short
    to_read_s: Short
    trefi_s: Annotated[Short, Field(gt=0)]
    trfc_s: Short


class AddressMapping(Frozen):
    """Mapping from addresses to channels and banks: see the module docstring."""

    interleave_bytes: Annotated[Integer, Field(ge=64, le=65536)]
    channel_hash: Hash
    bank_xor: bool


class MemorySystem(Sourced):
    """Memory system of a GPU. page_bytes: alignment of tensors.

    device: file of `conf/system` with the same GPU for models of whole kernels, if there is one.
    """

    name: str
    description: str = ""
    device: str = ""
    gpu: Cus
    l1: L1
    l2: L2
    dram: Dram
    mapping: AddressMapping
    line_bytes: Annotated[Integer, Field(ge=32, le=256)]
    page_bytes: Annotated[Integer, Field(ge=256, le=2**30)]

    @field_validator("line_bytes", "page_bytes")
    @classmethod
    def _is_a_power_of_two(cls, size: int) -> int:
        if size & (size - 1):
            raise ValueError("must be a power of two")
        return size

    @property
    def l1_sets(self) -> float:
        """Sets of an L1; a power of two unless a rule is broken."""
        return self.l1.bytes / (self.l1.ways * self.line_bytes)

    @property
    def l2_sets(self) -> float:
        """Sets of a slice of L2."""
        return self.l2.bytes / (self.l2.ways * self.line_bytes * self.dram.channels)


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
