"""`wmma` as what machines execute for it: loads, `mma.sync`, and stores (PTX ISA, section 9.7.15).

The place of an element in a `wmma` fragment is left to the machine; here the fragments of `mma.sync` stand one after
another: of A those of 16 rows (in m8n8 of 8), of B, C and D those of 8 columns. m8n32 is the transposed product: A and
B change places, and each lies the other way. Registers that a fragment has beyond (halves on Volta are there twice)
are 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from dse_ptx.mma import ENTRIES
from dse_ptx.parser import refusal
from dse_ptx.program import (
    PACKED_BITS,
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
from dse_ptx.rows import members

# m x n x k, as they are written
_TALL = ("m16n16k16", "m32n8k16", "m8n32k16")
_SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), _TALL), "tf32": ("m16n16k8",), "f64": ("m8n8k4",),
    **dict.fromkeys(PACKED_BITS, ("m8n8k32",)), "b1": ("m8n8k128",),
}  # fmt: skip
"""Types of A and B -> shapes."""
_RESULTS = {"f16": 2, "f32": 1, "s32": 1, "f64": 1}
_SPACES = ("global", "shared", "shared_cta")


def expand(function: Function, path: str) -> Function:
    """Return a kernel without `wmma`. Raises ConfigError for shapes and types that are not executed."""
    if all(entry.name != "wmma" for entry in function.instructions):
        return function
    registers, instructions, first = dict(function.registers), list[Instruction](), list[int]()
    # one instruction becomes many: labels count those before them anew
    for place, entry in enumerate(function.instructions):
        first.append(len(instructions))
        if entry.name != "wmma":
            instructions.append(entry)
            continue
        try:
            writer = _Writer(entry, f"@wmma{place}", registers)
            instructions += writer.product() if entry.modifiers[0] == "mma" else writer.access()
        # a shape, type or operand that does not fit raises one of these
        except (ValueError, StopIteration, IndexError, KeyError, AttributeError):
            shapes = "; ".join(f"{kind} {' '.join(words)}" for kind, words in _SHAPES.items())
            rule = f"is not executed: shapes are {shapes}"
            raise refusal(path, entry.line, entry.opcode, rule, "take mma.sync, or another shape") from None
    first.append(len(instructions))
    labels = {name: first[at] for name, at in function.labels.items()}
    return replace(function, instructions=tuple(instructions), labels=labels, registers=registers)


@dataclass(frozen=True)
class _Shape:
    """Rows, columns and depth of what is executed, and whether it is the transposed product."""

    rows: int
    columns: int
    depth: int
    is_turned: bool

    @property
    def height(self) -> int:
        """Rows of a part."""
        return min(self.rows, 16)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Parts of the result, by their number down and across."""
        return [(i, j) for i in range(self.rows // self.height) for j in range(self.columns // 8)]

    def stride(self, matrix: str, by_rows: bool) -> int:
        """Elements from line to line, as it is written, where none is given."""
        m, n = (self.columns, self.rows) if self.is_turned else (self.rows, self.columns)
        rows, columns = {"a": (m, self.depth), "b": (self.depth, n)}.get(matrix, (m, n))
        return columns if by_rows else rows

    def elements(self, matrix: str, packed: int) -> Iterator[tuple[int, int, bool]]:
        """Row and column of the first element of each register, and whether the others lie below it."""
        halves, wide = self.height // 8, 4 * packed
        # a fragment of A: its registers go down halves first, then along k
        if matrix == "a":
            for tile in range(self.rows // self.height):
                for r in range(halves * self.depth // wide):
                    yield 8 * (r % halves) + self.height * tile, wide * (r // halves), False
        elif matrix == "b":
            for tile in range(self.columns // 8):
                yield from ((wide * r, 8 * tile, True) for r in range(self.depth // wide))
        else:
            # f16: two results share a register, so that registers hold neighbours; others have a register for each
            registers = 3 - packed  # registers of two neighbours
            for down, across in self.parts:
                yield from (
                    (8 * (r // registers) + self.height * down, r % registers + 8 * across, False)
                    for r in range(halves * registers)
                )


@dataclass
class _Writer:
    """Writes what stands for one instruction; `registers` takes those that it needs."""

    of: Instruction
    suffix: str
    registers: dict[str, str]
    written: list[Instruction] = field(default_factory=list)

    @cached_property
    def shape(self) -> _Shape:
        """What is executed."""
        # the types of an accumulator leave its shape open: any name of a shape will do
        kinds = [kind for kind in self.of.types if kind in _SHAPES and self.of.modifiers[1] not in ("c", "d")]
        words = _SHAPES[kinds[0]] if kinds else {word for shapes in _SHAPES.values() for word in shapes}
        name = next(word for word in self.of.modifiers if word in words)
        m, n, k = (int(word) for word in re.findall(r"\d+", name))
        # m8n32 is executed as m32n8, transposed: rows become columns
        return _Shape(n, m, k, True) if m < n else _Shape(m, n, k, False)

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
        """`mma.sync` for each part of the result."""
        shape, words, types = self.shape, self.of.modifiers, self.of.types
        d, a, b, c = (members(entry) for entry in self.of.operands)
        # f16 products name two types, D's and C's, others all four
        result, kind, other, start = types if len(types) == 4 else (types[0], "f16", "f16", types[1])
        if shape.is_turned:
            # the transpose of A B is that of B times that of A
            a, b, kind, other = b, a, other, kind
        # packed elements and bits are read along k alone: A by rows, B by columns
        if kind in ("s4", "u4", "b1") and words.index("row") > words.index("col"):
            raise ValueError("layouts")
        # registers of a part: its elements over 32 lanes and over the numbers of a register
        of_a, of_b = (lines * shape.depth // (32 * ENTRIES[kind]) for lines in (shape.height, 8))
        of_c = shape.height // 4 // _RESULTS[result]
        more = "".join(f".{word}" for word in words if word in ("xor", "and", "popc", "satfinite"))
        opcode = f"mma.sync.aligned.m{shape.height}n8k{shape.depth}.row.col.{result}.{kind}.{other}.{start}{more}"
        for part, (down, across) in enumerate(shape.parts):
            picked = [of[part * of_c : (part + 1) * of_c] for of in (d, c)]
            left, top = a[down * of_a : (down + 1) * of_a], b[across * of_b : (across + 1) * of_b]
            self.add(opcode, *(OperandGroup(tuple(group)) for group in (picked[0], left, top, picked[1])))
        return self.written

    def access(self) -> list[Instruction]:
        """Loads or stores of all registers of a fragment."""
        words, matrix, operands = self.of.modifiers, self.of.modifiers[1], self.of.operands
        is_load, kind = words[0] == "load", self.of.types[0]
        address, fragment = (operands[1], operands[0]) if is_load else (operands[0], operands[1])
        # without a stride a matrix lies without gaps
        default = Immediate(self.shape.stride(matrix, "row" in words))
        if self.shape.is_turned:
            matrix = {"a": "b", "b": "a"}.get(matrix, matrix)
        by_rows = ("row" in words) != self.shape.is_turned
        packed, values = (ENTRIES if matrix in "ab" else _RESULTS)[kind], members(fragment)
        lines = _Lines(self, address, operands[2] if len(operands) > 2 else default, by_rows)
        # members of a quad step over the elements of a register; of an accumulator over two columns
        lines.count("cols" if matrix == "b" else "rows", 2 if matrix in "cd" else packed)
        space = next((f".{word}" for word in words if word in _SPACES), "")
        pieces = list(self.shape.elements(matrix, packed))
        if len(pieces) > len(values) or (kind in PACKED_BITS and by_rows == (matrix == "b")):
            raise ValueError(fragment)
        for value, (i, j, is_down) in zip(values, pieces, strict=False):
            steps = range(1 if kind in PACKED_BITS else packed)  # of those that are packed, a word is read at once
            places = [lines.place(i + (step if is_down else 0), j + (0 if is_down else step)) for step in steps]
            self._move(is_load, kind, space, value, places)
        # registers beyond the fragment, such as second copies of halves on Volta
        for value in values[len(pieces) :] if is_load else ():
            self.add("mov.b32", value, Immediate(0))
        return self.written

    def _move(self, is_load: bool, kind: str, space: str, value: Operand, places: list[Address]) -> None:
        """Load or store the elements of a register: together where they lie side by side, else one by one."""
        size, first = TYPE_BYTES.get(kind, 4), places[0]
        # offsets from the same register, so that the difference is known without running
        together = all(
            place.base == first.base and place.offset == first.offset + size * n for n, place in enumerate(places)
        )
        # words are 32 bits at least, the size of a register
        if together:
            word = f"{space}.b{max(32, 8 * size)}"
            self.add(f"ld{word}", value, first) if is_load else self.add(f"st{word}", first, value)
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
        self.writer, self.by_rows, self.stride = writer, by_rows, stride
        kind = writer.of.types[0]
        self.bits = PACKED_BITS.get(kind) or 8 * TYPE_BYTES[kind]
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
        return Address(self.pointers[key], self.offset + self.bits * (j if self.by_rows else i) // 8)

    def _pointer(self, element: Register) -> Register:
        base, size = self.base, self.bits // 8
        # less than a byte: the address is in bytes, elements of a byte share it
        if not size:
            element = self.writer.compute("shr.u32", element, Immediate((8 // self.bits).bit_length() - 1))
            size = 1
        # pointers of 32 bits, as of shared memory
        if isinstance(base, Register) and self.writer.registers[base.name][1:] == "32":
            return self.writer.compute("mad.lo.u32", element, Immediate(size), base)
        wide = self.writer.compute("mul.wide.u32", element, Immediate(size))
        return self.writer.compute("add.u64", wide, base) if isinstance(base, Register) else wide
