"""Rows of `mma.sync` (PTX ISA, section 9.7.14.5): products of 16 or 8 rows by 8 columns.

Elements are halves, TF32, double precision, bytes, halves of bytes, and bits.
"""

from __future__ import annotations

import re

from dse_ptx import vm
from dse_ptx.program import PACKED_BITS, Function, Instruction
from dse_ptx.rows import Row, UnreadError, check_modifiers, members
from dse_ptx.warp_trace import Unit

ENTRIES = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4, "u8": 4, "s4": 8, "u4": 8, "b1": 32, "f64": 1}
"""Types of A and B -> numbers in a register."""
_LOW = {"s8": 16, "u8": 16, "s4": 32, "u4": 32, "b1": 128, "f64": 4}
"""Depth of products of 8 rows, by type."""
# what is absent here is an integer: vm.INT
_FORMATS = {"f16": vm.F16, "bf16": vm.BF16, "tf32": vm.TF32, "f64": vm.F64}
_ACCUMULATORS = {"f32": vm.F32, "f16": vm.F16, "s32": vm.INT, "f64": vm.F64}


def mma(function: Function, instruction: Instruction) -> Row:
    """The row of a product. Raises UnreadError for shapes and types that there are not."""
    names, groups = instruction.modifiers, [members(entry) for entry in instruction.operands]
    shape = next(entry for entry in names if re.match("m[0-9]", entry))
    words = ("sync", "aligned", "row", "col", "rn", "satfinite", "xor", "and", "popc", shape, *PACKED_BITS)
    check_modifiers(instruction, *words)
    result, kind, other, start = instruction.types
    m, depth = shape.partition("n8k")[::2]
    # A holds 16 rows in two halves of eight; registers of a half go along k
    entry, rows, halves = ENTRIES[kind], len(groups[1]), int(m[1:]) // 8
    # two accumulators of f16 share a register
    across, results = rows // halves, halves * (1 if result == "f16" else 2)
    # a register holds `entry` numbers, and four lanes share a row: k is 4 x entry x registers of a half
    if tuple(map(len, groups)) != (results, rows, across, results) or str(4 * entry * across) != depth:
        raise UnreadError("the shape of its fragments")
    is_shape = halves == 2 or (halves == 1 and depth == str(_LOW.get(kind)))
    if not is_shape or ENTRIES[other] != entry or (kind == "b1") != ("popc" in names):
        # products of bits count what `xor` or `and` leaves, and have no other form
        raise UnreadError("its shape or types")
    # C and D must have one type
    if result != start or result not in _results(kind):
        raise UnreadError(f"result .{result} of .{kind}")
    fields = {vm.KIND: vm.MMA, vm.COUNT: rows, vm.MODE: entry, vm.FORMAT: _ACCUMULATORS[result], vm.BYTES: halves}
    fields |= {vm.SOURCE: _FORMATS.get(kind, vm.INT), vm.X: int(kind[0] == "s"), vm.Y: int(other[0] == "s")}
    fields |= {vm.OP: int("xor" in names), vm.FLAGS: vm.SAT if "satfinite" in names else 0}
    reads = [member for group in groups[1:] for member in group]
    # operations of a lane: two for each multiply-add of m x 8 x k, over 32 lanes
    return Row(fields, list(groups[0]), reads, Unit.TENSOR, 2 * 8 * halves * 8 * int(depth) / 32, "u64")


def _results(kind: str) -> tuple[str, ...]:
    """Types of accumulators."""
    if kind in ("f64", "f16"):
        return ("f64",) if kind == "f64" else ("f32", "f16")
    return ("s32",) if kind not in _FORMATS else ("f32",)
