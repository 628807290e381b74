"""`wmma` as what machines execute for it: loads, `mma.sync` of m16n8, and stores (PTX ISA, section 9.7.15).

The place of an element in a `wmma` fragment is left to the machine; here the fragments of `mma.sync` stand one after
another: of A those of 16 rows, of B, C and D those of 8 columns. m8n32 is the transposed product: A and B change
places, and each lies the other way. Registers that a fragment has beyond (halves on Volta are there twice) are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dse_ptx.parser import refusal
from dse_ptx.program import (
    TYPE_BYTES,
    Address,
    Function,
    Immediate,
    Instruction,
    Operand,
    OperandGroup,
    Register,
    Symbol,
)

_SHAPES = ("m16n16k16", "m16n16k8", "m32n8k16", "m8n32k16")
_INPUTS = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4}
"""Types of A and B -> elements of a register."""
_RESULTS = {"f16": 2, "f32": 1, "s32": 1}
_SPACES = ("global", "shared", "shared_cta")


def expand(function: Function, path: str) -> Function:
    """Return a kernel without `wmma`. Raises ConfigError for shapes and types that are not executed."""
    if all(entry.name != "wmma" for entry in function.instructions):
        return function
    registers, instructions, first = dict(function.registers), list[Instruction](), list[int]()
    for place, entry in enumerate(function.instructions):
        first.append(len(instructions))
        if entry.name != "wmma":
            instructions.append(entry)
            continue
        try:
            writer = _Writer(entry, f"@wmma{place}", registers)
            instructions += writer.product() if entry.modifiers[0] == "mma" else writer.access()
        except (ValueError, StopIteration, IndexError, KeyError, AttributeError):
            rule = f"is not executed: shapes are {', '.join(_SHAPES)}, of f16, bf16, tf32 and s8"
            raise refusal(path, entry.line, entry.opcode, rule, "take mma.sync, or another shape") from None
    first.append(len(instructions))
    labels = {name: first[at] for name, at in function.labels.items()}
    return replace(function, instructions=tuple(instructions), labels=labels, registers=registers)


@dataclass
class _Writer:
    """Writes what stands for one instruction; `registers` takes those that it needs."""

    of: Instruction
    suffix: str
    registers: dict[str, str]
    written: list[Instruction] = field(default_factory=list)

    @property
    def shape(self) -> str:
        """Rows, columns and depth."""
        return next(word for word in self.of.modifiers if word in _SHAPES)

    @property
    def is_turned(self) -> bool:
        """Whether the transposed product is executed."""
        return self.shape == "m8n32k16"

    def add(self, opcode: str, *operands: Operand) -> None:
        """Write an instruction with the guard and line of `wmma`."""
        name, *modifiers = opcode.split(".")
        self.written.append(Instruction(name, tuple(modifiers), operands, self.of.line, self.of.guard))

    def new(self, kind: str) -> Register:
        """A fresh register."""
        name = f"%{len(self.registers)}{self.suffix}"
        self.registers[name] = kind
        return Register(name)

    def compute(self, opcode: str, *operands: Operand) -> Register:
        """Write an operation; its result."""
        result = self.new({"wide": "b64"}.get(opcode.split(".")[1], f"b{8 * TYPE_BYTES[opcode.rpartition('.')[2]]}"))
        self.add(opcode, result, *operands)
        return result

    def product(self) -> list[Instruction]:
        """`mma.sync` for each part of 16 x 8 of the result."""
        d, a, b, c = (_members(entry) for entry in self.of.operands)
        if self.is_turned:
            a, b = b, a
        types = self.of.types
        result, kind, _, start = types if len(types) == 4 else (types[0], "f16", "f16", types[1])
        if kind not in _INPUTS or {result, start} not in ({"f32"}, {"f16"}, {"s32"}):
            raise ValueError(kind)
        depth = int(self.shape.partition("k")[2])
        of_a, of_b, of_c = depth // (2 * _INPUTS[kind]), depth // (4 * _INPUTS[kind]), 4 // _RESULTS[result]
        high = 2 if self.shape in ("m32n8k16", "m8n32k16") else 1  # parts along the rows; else two along the columns
        opcode = f"mma.sync.aligned.m16n8k{depth}.row.col.{result}.{kind}.{kind}.{start}"
        for part in range(2):
            down, across = (part, 0) if high == 2 else (0, part)
            picked = [of[part * of_c : (part + 1) * of_c] for of in (d, c)]
            left, top = a[down * of_a : (down + 1) * of_a], b[across * of_b : (across + 1) * of_b]
            self.add(opcode, *(OperandGroup(tuple(group)) for group in (picked[0], left, top, picked[1])))
        return self.written

    def access(self) -> list[Instruction]:
        """Loads or stores of all registers of a fragment."""
        words, matrix = self.of.modifiers, self.of.modifiers[1]
        is_load, kind = words[0] == "load", self.of.types[0]
        operands = self.of.operands
        address, fragment = (operands[1], operands[0]) if is_load else (operands[0], operands[1])
        by_rows = "row" in words
        if self.is_turned:
            matrix, by_rows = {"a": "b", "b": "a"}.get(matrix, matrix), not by_rows
        packed = (_INPUTS if matrix in "ab" else _RESULTS)[kind]
        values = _members(fragment)
        stride = operands[2] if len(operands) > 2 else Immediate(_default_stride(self.shape, words[1], "row" in words))
        lines = _Lines(self, address, stride, by_rows)
        lines.count("cols" if matrix == "b" else "rows", 2 if matrix in "cd" else packed)
        space = next((f".{word}" for word in words if word in _SPACES), "")
        pieces = list(_elements(matrix, packed, self.shape))
        if len(pieces) > len(values):
            raise ValueError(fragment)
        for value, (i, j, down) in zip(values, pieces, strict=False):
            places = [lines.place(i + (part if down else 0), j + (0 if down else part)) for part in range(packed)]
            self._move(is_load, kind, space, value, places)
        for value in values[len(pieces) :] if is_load else ():
            self.add("mov.b32", value, Immediate(0))
        return self.written

    def _move(self, is_load: bool, kind: str, space: str, value: Operand, places: list[Address]) -> None:
        """Load or store the elements of a register: together where they lie side by side, else one by one."""
        size = TYPE_BYTES[kind]
        first = places[0]
        together = all(
            place.base == first.base and place.offset == first.offset + size * n for n, place in enumerate(places)
        )
        if together:
            self.add(f"ld{space}.b32", value, first) if is_load else self.add(f"st{space}.b32", first, value)
            return
        if size == 1:
            self._gather_bytes(space, value, places)
            return
        halves = [self.new("b16") for _ in places]
        if not is_load:
            self.add("mov.b32", OperandGroup(tuple(halves)), value)
        for half, place in zip(halves, places, strict=True):
            self.add(f"ld{space}.b16", half, place) if is_load else self.add(f"st{space}.b16", place, half)
        if is_load:
            self.add("mov.b32", value, OperandGroup(tuple(halves)))

    def _gather_bytes(self, space: str, value: Operand, places: list[Address]) -> None:
        total: Operand = Immediate(0)
        for number, place in enumerate(places):
            byte = self.new("b32")
            self.add(f"ld{space}.u8", byte, place)
            total = self.compute("or.b32", total, self.compute("shl.b32", byte, Immediate(8 * number)))
        self.add("mov.b32", value, total)


class _Lines:
    """Addresses of a matrix's elements for each lane, a pointer for each row (or column) that is touched.

    Element (i, j) counts from (group, member), the lane's over 4 and its rest, times the numbers of a register.
    """

    def __init__(self, writer: _Writer, address: Operand, stride: Operand, by_rows: bool) -> None:
        if not isinstance(address, Address):
            raise ValueError(address)
        self.writer, self.size, self.by_rows, self.stride = writer, TYPE_BYTES[writer.of.types[0]], by_rows, stride
        self.offset, self.base = address.offset, address.base
        if isinstance(self.base, Symbol):
            symbol, self.base = self.base, writer.new("b64")
            writer.add("mov.u64", self.base, symbol)
        lane = writer.new("b32")
        writer.add("mov.u32", lane, Symbol("%laneid"))
        self.group = writer.compute("shr.u32", lane, Immediate(2))
        self.member = writer.compute("and.b32", lane, Immediate(3))
        self.pointers = dict[tuple[str, int], Register]()

    def count(self, group: str, times: int) -> None:
        """Let the group count rows or cols, and each member have so many of the others."""
        scaled = self.writer.compute("mul.lo.u32", self.member, Immediate(times))
        self.row, self.column = (self.group, scaled) if group == "rows" else (scaled, self.group)

    def place(self, i: int, j: int) -> Address:
        """Address of the element i rows and j columns from the lane's own."""
        outer, inner, steps = (self.row, self.column, i) if self.by_rows else (self.column, self.row, j)
        key = (outer.name, steps)
        if key not in self.pointers:
            line = self.writer.compute("add.u32", outer, Immediate(steps))
            element = self.writer.compute("mad.lo.u32", line, self.stride, inner)
            self.pointers[key] = self._pointer(element)
        return Address(self.pointers[key], self.offset + self.size * (j if self.by_rows else i))

    def _pointer(self, element: Register) -> Register:
        base = self.base
        if isinstance(base, Register) and self.writer.registers[base.name][1:] == "32":
            return self.writer.compute("mad.lo.u32", element, Immediate(self.size), base)
        wide = self.writer.compute("mul.wide.u32", element, Immediate(self.size))
        return self.writer.compute("add.u64", wide, base) if isinstance(base, Register) else wide


def _elements(matrix: str, packed: int, shape: str) -> Iterator[tuple[int, int, bool]]:
    """Row and column of the first element of each register, and whether the others lie below it."""
    depth, is_high = int(shape.partition("k")[2]), shape in ("m32n8k16", "m8n32k16")
    for tile in range(1 if (matrix == "a") != is_high and matrix in "ab" else 2):
        if matrix == "a":
            yield from ((8 * (r & 1) + 16 * tile, 4 * packed * (r >> 1), False) for r in range(depth // (2 * packed)))
        elif matrix == "b":
            yield from ((4 * packed * r, 8 * tile, True) for r in range(depth // (4 * packed)))
        else:
            down, across = (16 * tile, 0) if is_high else (0, 8 * tile)
            each = 3 - packed  # registers of two neighbours
            yield from ((8 * (r // each) + down, r % each + across, False) for r in range(2 * each))


def _members(operand: Operand) -> tuple[Operand, ...]:
    return operand.members if isinstance(operand, OperandGroup) else (operand,)


def _default_stride(shape: str, matrix: str, by_rows: bool) -> int:
    """Elements from line to line where none is given."""
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    rows, columns = {"a": (m, k), "b": (k, n)}.get(matrix, (m, n))
    return int(columns if by_rows else rows)
