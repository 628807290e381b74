"""A row of the interpreter while it is made, and what types and operands of an instruction are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dse_ptx.program import TYPE_BYTES, Function, Immediate, Instruction, Operand, OperandGroup, Register
from dse_ptx.warp_trace import Unit


class UnreadError(Exception):
    """A part of an instruction is not executed."""


@dataclass
class Row:
    """A row that is made: fields by number, the operands written and read, and what a trace tells of them."""

    fields: dict[int, int] = field(default_factory=dict)
    writes: list[Operand] = field(default_factory=list)
    reads: list[Operand] = field(default_factory=list)
    unit: Unit = Unit.INTEGER
    operations: float = 0.0
    immediate: str = "u64"  # type of the constants that are read
    argument: int = 0  # a number that a trace tells of it: `warp_trace.Code`


def immediate_bits(constant: Immediate, kind: str) -> int:
    """Bits of a constant as an operand of a type."""
    bits = 1 if kind == "pred" else 8 * TYPE_BYTES[kind]
    value = constant.value
    # `1.5` is parsed in double precision
    if constant.float_bits == 64 and kind == "f32":
        value = int(np.array(value, np.uint64).view(np.float64).astype(np.float32).view(np.uint32))
    elif constant.float_bits == 32 and kind == "f64":
        value = int(np.array(value, np.uint32).view(np.float32).astype(np.float64).view(np.uint64))
    # an integer's bits would be another number; 0 alone is the same in both
    elif not constant.float_bits and kind in ("f32", "f64") and value:
        raise UnreadError("a floating-point operand is written as an integer")
    return int(value % (1 << bits))


def bits_of(kind: str) -> int:
    """Bits of a type."""
    return 1 if kind == "pred" else 8 * TYPE_BYTES[kind]


def sign_of(kind: str) -> int:
    """Bits from which the sign of an operand is extended."""
    return bits_of(kind) if kind[0] == "s" else 0


def is_float(kind: str) -> bool:
    """Return whether a type's numbers are floating-point numbers."""
    # tf32 counts as bits: its registers are .b32
    return kind.startswith(("f", "bf"))


def check_modifiers(instruction: Instruction, *names: str) -> None:
    """Raise UnreadError for modifiers that are neither types nor known."""
    unknown = [entry for entry in instruction.modifiers if entry not in names and entry not in TYPE_BYTES]
    if unknown:
        raise UnreadError(f"modifier .{unknown[0]}")


def register_bits(function: Function, operand: Operand) -> int:
    """Bits of a register, 64 of what is none."""
    return bits_of(function.registers[operand.name]) if isinstance(operand, Register) else 64


def cut_constant(kind: str, operand: Operand) -> Operand:
    """A constant operand cut to its own type, before the instruction's is applied."""
    return Immediate(immediate_bits(operand, kind)) if isinstance(operand, Immediate) else operand


def members(operand: Operand) -> list[Operand]:
    """Operands of a group, or the operand itself."""
    return list(operand.members) if isinstance(operand, OperandGroup) else [operand]
