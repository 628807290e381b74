"""Processing in memory: units at the banks of a memory, their additions, the times of their passes, formats of copies.

Units, each shared by some banks, compute on words of these banks. Commands look like loads and stores: the controller
issues them in order, and all units of a channel execute a command at once, on the row that is open in their banks. A
pass over w words takes (derived, from a published model of matrix times vector, AMDGeniePIM)

    n = w / units                            t = n commands tCCDL / command_rate + rows(n) (tRP + tRCD)

where a row is open for tRAS at least, however few its commands. A pass that only reads opens a row for every row of
words. A pass that writes a copy fills its registers, turns the bus round, writes, and turns it back. If units have a
second bank, the copy lies in it, and each row of both is opened once; otherwise the row of the copy is opened after
each filling of the registers, and then the row of the source again (derived).

Op and store: the interface brings a word, and a unit adds it to the stored word. This occupies the column
`update_columns` times as long as a write (T3, arXiv:2401.16677, has 2 by recollection), or longer if units are slower.

Channels are busy meanwhile; `simulators/costs/pim_bursts.py` models the loss of the GPU.

Block formats of low precision: shared microexponents (MX9, MX6, MX4) and OCP MX, as numbers of bits.

A block of `block` values along one axis shares a scale 2^X; each sub-block of `sub_block` values is shifted down by its
own t bits, 0 <= t < 2^sub_bits; an element is a number P of few bits. A value is P x 2^(X - t).

OCP MX v1.0 (Open Compute Project, Microscaling Formats specification, 2023): elements are FP8, FP6, FP4 or INT8, no
sub-blocks. Shared microexponents (arXiv:2302.08007, ISCA 2023): an 8-bit exponent for 16 values, one bit t for two,
sign and mantissa of m bits.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, field_validator, model_validator

from dse.values import Frozen
from dse.values.units import BytesPerSecond, Integer, Number, Seconds
from simulators.hardware.parts import SourcedValue


class Element(Frozen):
    """A number with sign, exponent and mantissa; without an exponent, an integer.

    mantissa_bits: without the hidden bit of floats; of integers all bits but the sign, of weights 2^0, 2^-1, ... top:
    meaning of the codes with the largest exponent: numbers (`all`), numbers except the last, which is NaN (`nan`), or
    infinity and NaN (`ieee`). negative: a sign bit, or two's complement.
    """

    exponent_bits: Annotated[Integer, Field(ge=0, le=6)]
    mantissa_bits: Annotated[Integer, Field(ge=0, le=7)]
    top: Literal["all", "nan", "ieee"] = "all"
    negative: Literal["sign", "complement"] = "sign"

    @model_validator(mode="after")
    def _is_a_number(self) -> Element:
        integer = not self.exponent_bits
        if not 2 <= self.bits <= 8:
            raise ValueError(f"has {self.bits} bits with its sign; give it 2 to 8")
        if integer and self.top != "all":
            raise ValueError(f"top = {self.top}: an integer (exponent_bits = 0) has no NaN; leave top out")
        if not integer and self.negative == "complement":
            raise ValueError("negative = complement is for integers; leave it out, or use exponent_bits: 0")
        return self

    @property
    def bits(self) -> int:
        """Bits of an element, including the sign."""
        return 1 + self.exponent_bits + self.mantissa_bits


class Format(SourcedValue):
    """A block format. scale_bits: bits of a block's shared exponent. sub_bits: bits of the shift of each sub-block."""

    name: str
    description: str = ""
    block: Annotated[Integer, Field(ge=1, le=4096)]
    scale_bits: Annotated[Integer, Field(ge=2, le=8)]
    sub_block: Annotated[Integer, Field(ge=1, le=4096)] = 1
    sub_bits: Annotated[Integer, Field(ge=0, le=4)] = 0
    element: Element

    @model_validator(mode="after")
    def _sub_blocks_fill_blocks(self) -> Format:
        if self.block % self.sub_block:
            raise ValueError(f"block = {self.block} is no multiple of sub_block = {self.sub_block}; change either")
        return self

    @property
    def bits_per_element(self) -> float:
        """Bits of an element with its share of the scale and of the shift: m + 2 for MX9, MX6 and MX4."""
        return self.element.bits + self.scale_bits / self.block + self.sub_bits / self.sub_block

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element with its share of the scale and of the shift."""
        return self.bits_per_element / 8


Direction = Literal["lanes", "word"]
"""Layout of a block's elements: in the same lane of successive words, or side by side in a word."""

Commands = Annotated[Number, Field(ge=0, le=1024)]
Short = Annotated[Seconds, Field(le=1e-6)]


class Pim(Frozen):
    """A memory with processing units at its banks: `gpu.pim` of a system.

    channels_per_stack: channels with commands of their own (pseudo-channels of HBM). units_per_bank: 0.5 if two banks
    share a unit. word_bits: width of a unit. registers_per_unit: registers of a word. tccdl_s: between columns of a
    bank group. command_rate: commands to units in tccdl_s. read_to_write_s, write_to_read_s: turnaround times of a
    channel. host_bytes_per_s_per_stack: rate of the interface to the processor. update_columns: column accesses of an
    op and store.
    """

    stacks: Annotated[Integer, Field(ge=1, le=64)]
    channels_per_stack: Annotated[Integer, Field(ge=1, le=1024)]
    banks_per_channel: Annotated[Integer, Field(ge=1, le=1024)]
    units_per_bank: Annotated[Number, Field(gt=0, le=1)]
    word_bits: Annotated[Integer, Field(ge=32, le=4096)]
    row_bytes: Annotated[Integer, Field(ge=64, le=2**20)]
    registers_per_unit: Annotated[Integer, Field(ge=1, le=4096)]
    command_rate: Annotated[Number, Field(gt=0, le=4)]
    tccdl_s: Annotated[Short, Field(gt=0)]
    trp_s: Short
    trcd_s: Short
    tras_s: Short
    read_to_write_s: Short
    write_to_read_s: Short
    host_bytes_per_s_per_stack: Annotated[BytesPerSecond, Field(ge=1e6)]
    update_columns: Annotated[Number, Field(ge=1, le=64)]

    @field_validator("units_per_bank")
    @classmethod
    def _units_are_alike(cls, units: float, info: Any) -> float:
        of_channel = info.data.get("banks_per_channel")
        if of_channel is not None and (not (1 / units).is_integer() or of_channel % (1 / units)):
            raise ValueError(f"leaves units of unlike banks (banks_per_channel = {of_channel}); use 1, 0.5 or 0.25")
        return units

    @property
    def units(self) -> Any:
        """Processing units of all stacks."""
        channels = np.asarray(self.stacks) * self.channels_per_stack
        return channels * self.banks_per_channel * self.units_per_bank

    @property
    def word_bytes(self) -> Any:
        """Width of a unit [bytes]."""
        return np.asarray(self.word_bits) / 8

    @property
    def words_per_row(self) -> Any:
        """Words of a row of one bank."""
        return self.row_bytes / self.word_bytes

    @property
    def command_s(self) -> Any:
        """Time from one command to the next [s]."""
        return np.asarray(self.tccdl_s) / self.command_rate

    @property
    def bytes_per_s(self) -> Any:
        """Rate of all units with open rows and one command for each word [bytes/s]."""
        return self.units * self.word_bytes / self.command_s

    @property
    def gain(self) -> Any:
        """Bandwidth of all units over that of the interface to the processor."""
        return self.bytes_per_s / (np.asarray(self.stacks) * self.host_bytes_per_s_per_stack)

    def per_unit(self, amount_bytes: Any) -> Any:
        """Words of each unit for an amount of bytes spread over all units."""
        return np.asarray(amount_bytes, float) / self.word_bytes / self.units

    def update(self, hbm_bytes_per_s: ArrayLike) -> Any:
        """Time of an op and store relative to a write at this rate of the interface."""
        return np.asarray(self.update_columns) * np.maximum(1.0, np.asarray(hbm_bytes_per_s) / self.bytes_per_s)

    def stream_s(self, words: Any, commands: Any) -> Any:
        """Seconds of a read-only pass over `words` words of each unit."""
        rows = np.ceil(np.asarray(words, float) / self.words_per_row)
        return rows * self.open_s(np.divide(words, np.maximum(rows, 1.0)) * commands * self.command_s)

    def copy_s(self, words: Any, commands: Any, *, written: Any) -> Any:
        """Seconds of a pass over `words` words of each unit that writes a copy of `written` words for each word."""
        words = np.asarray(words, float)
        fills = np.ceil(words / np.minimum(self.registers_per_unit, self.words_per_row))
        busy = words * commands * self.command_s + fills * np.add(self.read_to_write_s, self.write_to_read_s)
        rows = np.ceil(words / self.words_per_row) + np.ceil(words * written / self.words_per_row)
        opened = np.where(np.asarray(self.units_per_bank) < 1, rows, 2 * fills)
        return opened * self.open_s(busy / np.maximum(opened, 1.0))

    def map_s(self, words: Any, *, reads: Any, writes: Any, operations: Any) -> Any:
        """Seconds of an element-wise pass over `words` words of each tensor in each unit.

        A command is issued for each word read or written, and for each operation. The tensors share the registers:
        each filling opens a row of every tensor in turn.
        """
        tensors = np.add(reads, writes)
        words = np.asarray(words, float)
        words_per_fill = np.minimum(np.floor(np.divide(self.registers_per_unit, tensors)), self.words_per_row)
        fills = np.ceil(words / np.maximum(1.0, words_per_fill))
        busy = words * (tensors + operations) * self.command_s
        busy = busy + fills * np.add(self.read_to_write_s, self.write_to_read_s)
        return fills * tensors * self.open_s(busy / np.maximum(fills * tensors, 1.0))

    @property
    def switch_s(self) -> Any:
        """Time to reopen the rows of the processor after a burst of the units [s]."""
        return np.add(self.trp_s, self.trcd_s)

    def open_s(self, busy: Any) -> Any:
        """Time from opening a row, on which units are busy for `busy` [s], to opening the next one [s]."""
        return np.maximum(self.tras_s, self.trcd_s + np.asarray(busy)) + self.trp_s


class InstructionSet(SourcedValue):
    """Commands of a unit for quantising one word.

    read: reading the word. maximum, microexponent: finding the block's exponent, and the shift of sub-blocks (if the
    format has them). convert: shift and round. write: for each word written. lane_step: for each halving of lanes, if
    a block's elements lie side by side (shift, maximum).
    """

    name: str
    description: str = ""
    read: Commands
    maximum: Commands
    microexponent: Commands
    convert: Commands
    write: Commands
    lane_step: Commands


def commands_per_word(
    instructions: InstructionSet, pim: Pim, format: Format, direction: Direction, source_bytes: float
) -> Any:
    """Commands for one word of source elements of `source_bytes` each, copied into `format`.

    A word gives bits_per_element / (8 source_bytes) words of the copy, scales included. If min(block, lanes) elements
    of a block lie side by side in a word, their maximum takes log2 of that number steps.
    """
    costs = instructions
    commands: Any = costs.read + costs.maximum + costs.convert + costs.write * format.bytes_per_element / source_bytes
    commands = commands + np.where(np.asarray(format.sub_bits) > 0, costs.microexponent, 0.0)
    if direction == "word":
        commands = commands + costs.lane_step * np.log2(np.minimum(format.block, pim.word_bytes / source_bytes))
    return commands
