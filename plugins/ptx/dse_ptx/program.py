"""Programs in PTX as values: kernels, their variables, and instructions with typed operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

TYPE_BYTES: Mapping[str, int] = {
    **{f"{letter}{bits}": bits // 8 for letter in "bus" for bits in (8, 16, 32, 64)},
    # types with x2 pack two halves into a word; a predicate has no place in memory, its byte is nominal
    **{"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "tf32": 4, "f32": 4, "f64": 8, "pred": 1},
}
"""Fundamental types, and the bytes of a value in memory."""
# four bits and one bit are types of `mma` and `wmma` alone, and no register has them
PACKED_BITS: Mapping[str, int] = {"s4": 4, "u4": 4, "b1": 1}
"""Types of elements that matrices pack into words, and their bits."""


@dataclass(frozen=True)
class Register:
    """A virtual register by its name, which is unique in a kernel once calls are inlined."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant as it is written: an integer, or the bits of a floating-point number of `float_bits`."""

    # The parser does not know the type of the operand, so bits and their width are kept until an instruction gives it.
    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable, label, function or special register by name."""

    name: str


@dataclass(frozen=True)
class Address:
    """Memory at a register, variable or nothing, plus an offset in bytes: `[%rd1+4]`.

    coordinates: in the tensor of a map that lies there, `[%rd1, {%r1, %r2}]`.
    """

    base: Register | Symbol | None
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class OperandGroup:
    """Operands in braces, as vectors and call sequences have them, or `p|q` of setp and shfl (`is_pair`)."""

    members: tuple[Operand, ...]
    is_pair: bool = False


Operand: TypeAlias = Register | Immediate | Symbol | Address | OperandGroup


@dataclass(frozen=True)
class Guard:
    """The predicate of an instruction: `@%p1` or, negated, `@!%p1`."""

    register: str
    negated: bool = False


@dataclass(frozen=True)
class Instruction:
    """One instruction: `ld.global.v2.f32` has the name `ld` and the modifiers `global`, `v2`, `f32`.

    `line` counts from 1 in the text that was parsed; an inlined instruction keeps the line of its function.
    """

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    line: int
    guard: Guard | None = None

    @property
    def opcode(self) -> str:
        """Name with all modifiers, as it is written."""
        # `::` is written as `_` here: the parser has replaced it
        return ".".join((self.name, *self.modifiers))

    @property
    def types(self) -> tuple[str, ...]:
        """Modifiers that are types, the result's first."""
        # `cvt.f32.s32` writes f32 and reads s32; `mul.wide.s32` has one type, and writes a number of twice its bits
        return tuple(word for word in self.modifiers if word in TYPE_BYTES or word in PACKED_BITS)


@dataclass(frozen=True)
class Variable:
    """A variable of a state space. size: bytes, 0 for an array whose size the launch gives. content: initial bytes."""

    name: str
    space: str
    size: int
    align: int
    content: bytes = b""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel or function: its bytes and, in a kernel, where they begin."""

    name: str
    type_name: str
    size: int
    align: int
    # in the parameter space [bytes], to which the arguments of a launch are copied
    offset: int = 0


@dataclass(frozen=True)
class Function:
    """A kernel (`is_entry`) or device function. labels: name -> number of the instruction that follows.

    registers: name -> type. block: threads for which the kernel was compiled (`.reqntid`), or empty.
    most_threads: of a block (`.maxntid`), or 0. cluster: its blocks (`.reqnctapercluster`), or empty.
    """

    name: str
    is_entry: bool
    parameters: tuple[Parameter, ...]
    returns: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    registers: Mapping[str, str]
    variables: tuple[Variable, ...]
    # (): any block that the hardware takes
    block: tuple[int, ...] = ()
    most_threads: int = 0
    cluster: tuple[int, ...] = ()


@dataclass(frozen=True)
class PtxProgram:
    """All of a text of PTX."""

    version: str
    target: str
    functions: Mapping[str, Function]
    variables: tuple[Variable, ...] = field(default=())

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of the text."""
        # a dict keeps the order in which it was filled
        return tuple(name for name, function in self.functions.items() if function.is_entry)
