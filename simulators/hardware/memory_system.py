"""The memory system of a GPU: CUs, an L1 each, an L2 in slices at the channels, DRAM, and where addresses go.

Numbers live in `conf/system/*.yaml`, each with its source. A line's chunk (`interleave_bytes`) goes to a channel by its
number modulo the channels. Above it, a channel's own address is row | bank | column. Hashes turn the channel by the
address above it, so that strides do not meet one channel only: `xor` folds it by exclusive or, `polynomial` takes it
modulo an irreducible polynomial over GF(2) (Rau, ISCA 1991); `bank_xor` turns banks by the low bits of the row.
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
"""Irreducible over GF(2), by degree."""


class Cus(Frozen):
    """What asks. cycle_s: of a CU, which issues a line in each. flop_per_s: of all CUs, as kernels reach it.

    waves: that a CU holds. in_flight: lines of a CU that are under way. launch_s: from one kernel to the next.
    """

    num_cus: Annotated[Integer, Field(ge=1, le=1024)]
    cycle_s: Annotated[Short, Field(gt=0)]
    waves: Annotated[Integer, Field(ge=1, le=64)]
    in_flight: Count
    flop_per_s: Mapping[Precision, Annotated[FlopPerSecond, Field(ge=1e9)]] = Field(min_length=1)
    launch_s: Short


class L1(Frozen):
    """The cache of a CU. hit_s: its latency."""

    bytes: Annotated[Bytes, Field(ge=64)]
    ways: Annotated[Integer, Field(ge=1, le=32)]
    hit_s: Short


class L2(Frozen):
    """The shared cache, as much of it at every channel.

    hop_s: from a CU to a slice. hit_s: from there until the line leaves. lookup_s, fill_s: what a request, and a line
    that comes in, take of a slice's time. set_index: `xor` turns a set by the address above it.
    """

    bytes: Annotated[Bytes, Field(ge=4096)]
    ways: Annotated[Integer, Field(ge=1, le=32)]
    hop_s: Short
    hit_s: Short
    lookup_s: Short
    fill_s: Short
    set_index: Literal["linear", "xor"] = "linear"


class Dram(Frozen):
    """Channels of DRAM, their banks, and the controllers'.

    hop_s: from L2 to a controller. queue: requests that a controller chooses from. write_buffer: lines that it writes
    in one go. to_write_s, to_read_s: what turning the bus round costs.
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
    """Where a line is: see the module's head."""

    interleave_bytes: Annotated[Integer, Field(ge=64, le=65536)]
    channel_hash: Hash
    bank_xor: bool


class MemorySystem(Sourced):
    """A GPU as its requests to memory meet it. page_bytes: at multiples of which tensors begin.

    device: the file of `conf/system` that holds the same GPU for models of whole kernels, where there is one.
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
        """Sets of an L1; a whole power of two where no rule is broken."""
        return self.l1.bytes / (self.l1.ways * self.line_bytes)

    @property
    def l2_sets(self) -> float:
        """Sets of a slice of L2."""
        return self.l2.bytes / (self.l2.ways * self.line_bytes * self.dram.channels)


def whole_power(number: float) -> bool:
    """Whether it is 1, 2, 4, ..."""
    return number >= 1 and float(number).is_integer() and not int(number) & (int(number) - 1)


@dataclass(frozen=True)
class Folds:
    """What the address above a channel's bits turns it by, for each value of each of its four low bytes, [1024]."""

    table: NDArray[np.int64]

    @classmethod
    def of(cls, hashed: Hash, channels: int) -> Folds:
        """All zero without a hash."""
        bits = max(1, math.ceil(math.log2(channels)))
        table = [_turn(hashed, value << 8 * byte, bits) for byte in range(4) for value in range(256)]
        return cls(np.array(table, np.int64))


def _turn(hashed: Hash, high: int, bits: int) -> int:
    """`xor`: all groups of `bits` bits together. `polynomial`: high x^bits modulo a polynomial of that degree."""
    if hashed == "none":
        return 0
    if hashed == "xor":
        found = 0
        while high:
            found, high = found ^ (high & ((1 << bits) - 1)), high >> bits
        return found
    rest, divisor = high << bits, _POLYNOMIALS[bits]
    for place in range(rest.bit_length() - 1, bits - 1, -1):
        if rest >> place & 1:
            rest ^= divisor << (place - bits)
    return rest
