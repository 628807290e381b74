"""Processing in memory that makes low-precision copies of weights: parts, instruction sets, and how long a pass takes.

Units at the banks of a memory, each shared by some banks, compute on words of these banks. Commands look like loads
and stores: the controller issues them in order, and one is obeyed by all units of a channel at once, on the row that is
open in their banks. A pass over n parameters of b bytes takes (derived, from a published model of matrix times vector,
AMDGeniePIM):

    words = n b / word bytes                    per_unit = words / units
    t = per_unit commands tCCDL / command_rate + ceil(per_unit / words of a row) (tRP + tRCD [+ turn-arounds])

Channels are busy meanwhile: what the GPU loses by that is no part of this.

On the GPU a pass reads n b bytes and writes the copy, at a share of the HBM's bandwidth.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from dse.problems import ConfigError, Problem
from dse.values import BytesPerSecond, Frozen, Integer, Number, Seconds
from simulators.mx import Format
from simulators.sourced import Sourced

Direction = Literal["lanes", "word"]
"""Where the elements of a block lie: in the same lane of one word after another, or side by side in a word."""

Commands = Annotated[Number, Field(ge=0, le=1024)]


class TurnArounds(Frozen):
    """Time that a channel loses when it turns from reading to writing, and back."""

    read_to_write_s: Seconds
    write_to_read_s: Seconds


class PimPart(Sourced):
    """A memory with processing units at its banks.

    channels_per_stack: of their own commands (pseudo-channels of HBM). word_bits: what a unit computes on at once.
    registers_per_unit: of a word. tccdl_s: between columns of a bank group. command_rate: commands to units in tccdl_s.
    host_bytes_per_s_per_stack: of the interface to the processor. turn_arounds: None where they are not known.
    """

    name: str
    description: str = ""
    stacks: Annotated[Integer, Field(ge=1, le=64)]
    channels_per_stack: Annotated[Integer, Field(ge=1, le=1024)]
    banks_per_channel: Annotated[Integer, Field(ge=1, le=1024)]
    banks_per_unit: Annotated[Integer, Field(ge=1, le=64)]
    word_bits: Annotated[Integer, Field(ge=32, le=4096)]
    row_bytes: Annotated[Integer, Field(ge=64, le=2**20)]
    registers_per_unit: Annotated[Integer, Field(ge=1, le=4096)]
    command_rate: Annotated[Number, Field(gt=0, le=4)]
    tccdl_s: Annotated[Seconds, Field(gt=0, le=1e-6)]
    trp_s: Annotated[Seconds, Field(le=1e-6)]
    trcd_s: Annotated[Seconds, Field(le=1e-6)]
    tras_s: Annotated[Seconds, Field(le=1e-6)]
    turn_arounds: TurnArounds | None = None
    host_bytes_per_s_per_stack: Annotated[BytesPerSecond, Field(ge=1e6)]

    @field_validator("banks_per_unit")
    @classmethod
    def _units_share_whole_channels(cls, banks: int, info: Any) -> int:
        of_channel = info.data.get("banks_per_channel")
        if of_channel is not None and of_channel % banks:
            raise ValueError(f"does not divide banks_per_channel = {of_channel}: units are alike; use 1, 2 or 4")
        return banks

    @property
    def units(self) -> Any:
        """Processing units of all stacks."""
        return self.stacks * self.channels_per_stack * self.banks_per_channel / np.asarray(self.banks_per_unit)

    @property
    def word_bytes(self) -> Any:
        """What a unit computes on at once."""
        return self.word_bits / 8

    @property
    def command_s(self) -> Any:
        """From one command to the next."""
        return self.tccdl_s / self.command_rate


class InstructionSet(Sourced):
    """Commands that a unit needs for one word of what it quantises; their sum is `commands_per_word`.

    read: of the word. maximum, microexponent: of the block's exponent and of the shift of sub-blocks (where a format
    has them). convert: shift and round. write: for each word that is written. lane_step: for each halving of lanes,
    where a block's elements lie side by side (shift, maximum).
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
    instructions: InstructionSet, part: PimPart, format: Format, direction: Direction, source_bytes: float
) -> Any:
    """Commands for one word of source elements of `source_bytes` each, copied into `format`.

    A word gives bits_per_element / (8 source_bytes) words of the copy, scales included. Side by side in a word lie
    min(block, lanes) elements of a block, whose maximum takes as many steps as that can be halved.
    """
    one = instructions
    found: Any = one.read + one.maximum + one.convert + one.write * format.bytes_per_element / source_bytes
    found = found + np.where(np.asarray(format.sub_bits) > 0, one.microexponent, 0.0)
    if direction == "word":
        found = found + one.lane_step * np.log2(np.minimum(format.block, part.word_bytes / source_bytes))
    return found


def quantise_s(part: PimPart, parameters: Any, commands: Any, *, source_bytes: float, turn_around: bool = False) -> Any:
    """Seconds of a pass over `parameters` of `source_bytes` with so many commands for each word; arrays broadcast.

    All channels take part. turn_around: rows are read and written, so a channel turns round once for each.
    Raises ConfigError where that is asked for and not known of the part.
    """
    words = np.asarray(parameters, float) * source_bytes / part.word_bytes / part.units
    rows = np.ceil(words / (part.row_bytes / part.word_bytes))
    return words * commands * part.command_s + rows * (part.trp_s + part.trcd_s + _turn_around_s(part, turn_around))


def _turn_around_s(part: PimPart, wanted: bool) -> Any:
    if not wanted:
        return 0.0
    if part.turn_arounds is None:
        rule, way = f"is not known of {part.name}", "leave turn-arounds out, or give their times with a source"
        raise ConfigError([Problem("pim.turn_arounds", rule, way_out=way)])
    return part.turn_arounds.read_to_write_s + part.turn_arounds.write_to_read_s


def gain(part: PimPart) -> Any:
    """Bandwidth of all units over that of the interface to the processor, rows being open."""
    of_units = part.units * part.word_bytes / part.command_s
    return of_units / (np.asarray(part.stacks) * part.host_bytes_per_s_per_stack)


def gpu_quantise_s(
    parameters: Any, format: Format, hbm_bytes_per_s: Any, *, efficiency: Any, source_bytes: float
) -> Any:
    """Seconds of a pass on the GPU: the source is read and the copy written at a share of the HBM's bandwidth."""
    moved = np.asarray(parameters, float) * (source_bytes + format.bytes_per_element)
    return moved / (np.asarray(efficiency) * hbm_bytes_per_s)
