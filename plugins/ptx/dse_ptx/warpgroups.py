"""`wgmma.mma_async` as parts of the compiled interpreter: D = A B + D of 64 x N x 16 (PTX ISA, section 9.7.15).

Each of a warpgroup's four warps multiplies its 16 rows. Tiles in shared memory are read through descriptors (section
9.7.15.5.1.2.2) of an address, two strides and a swizzle, which exchanges units of 16 bytes by bits of their address:

    bits             0-13 address / 16, 16-29 leading stride / 16, 32-45 other stride / 16, 49-51 base, 62-63 swizzle
    unit             of 8 elements; a swizzle of 128, 64 or 32 bytes exchanges u of a row with u xor row mod 8, 4, 2
    along k          row r and unit c lie at (r mod 8) width + (r / 8) stride + 16 c (c leading without a swizzle)
    across k         unit u of row k lies at 16 (u mod w) + (u / w) leading + (k mod 8) width + (k / 8) stride, of a
                     width 16 w; without a swizzle the two strides change places

Products are summed in double precision and rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dse_ptx import vm
from dse_ptx.vm import (
    COUNT,
    FIRST,
    FLAGS,
    LANES,
    MODE,
    NEGATE_A,
    NEGATE_B,
    SOURCE,
    TILE,
    TURN_A,
    TURN_B,
    WRITES,
    EncodedProgram,
    Memory,
)
from simulators.compiled import inline_never

DEPTH, ROWS, GROUP = 16, 16, 4
"""k of a product of 16-bit numbers, rows of a warp, and warps of a group."""
_FIELD = (1 << 14) - 1


@inline_never
def swizzle(address: int, units: int) -> int:
    """Address of a byte whose units of 16 bytes are exchanged within a row of so many (1: none)."""
    return address ^ (((address >> 7) & (units - 1)) << 4)


@inline_never
def units_of(mode: int) -> int:
    """Units of a swizzled row by the mode of a descriptor: 0 none, 1, 2 and 3 of 128, 64 and 32 bytes."""
    return 1 if mode == 0 else 16 >> mode


@inline_never
def _unit_place(descriptor: Any, row: int, unit: int, turned: bool) -> int:
    """Address of a unit: of a row, along k (0 or 1); turned, of a row along k, and across."""
    word = np.int64(descriptor)
    start, leading, other = (word & _FIELD) << 4, ((word >> 16) & _FIELD) << 4, ((word >> 32) & _FIELD) << 4
    units = units_of((word >> 62) & 3)
    if turned:
        if units == 1:
            leading, other = other, leading
        place = start + unit % units * 16 + unit // units * leading + row % 8 * units * 16 + row // 8 * other
    else:
        place = start + row // 8 * other + row % 8 * units * 16 + unit * (leading if units == 1 else 16)
    return swizzle(place, units)


@inline_never
def _load(
    s: Any, m: Memory, out: Any, descriptor: Any, kind: int, turned: bool, first: int, count: int, strides: Any
) -> bool:
    """Read `count` rows (or columns) of a tile from `first` on, 16 of k each. out: by the strides of a row and of k.

    False where the descriptor leads out of shared memory.
    """
    along, across = strides
    for line in range(DEPTH if turned else count):
        for unit in range(count // 8 if turned else DEPTH // 8):
            at = _unit_place(descriptor, line if turned else first + line, unit + (first // 8 if turned else 0), turned)
            if at + 16 > s.shared_size:
                return vm.refuse(s, vm.BAD_DESCRIPTOR, at, s.fault_thread)
            for k in range(8):
                value = vm.element(np.uint64(m.m16[((s.shared_at + at) >> 1) + k]), kind, 0, 16, 0)
                if turned:
                    out[(8 * unit + k) * along + line * across] = value
                else:
                    out[line * along + (8 * unit + k) * across] = value
    return True


@inline_never
def _load_registers(s: Any, p: EncodedProgram, out: Any, place: int, shift: int, kind: int) -> None:
    """Read the fragment of A: four registers of two numbers (PTX ISA, section 9.7.15.5.1.1.1)."""
    for register in range(4):
        base = vm.base(s, p, place + register, shift)
        for lane in range(LANES):
            row, k = lane // 4 + 8 * (register % 2), 2 * (lane % 4) + 8 * (register // 2)
            for half in range(2):
                out[row * DEPTH + k + half] = vm.element(p.file[base + lane], kind, half, 16, 0)


@inline_never
def multiply(s: Any, p: EncodedProgram, m: Memory, row: int, warp: int, shift: int, a: Any, b: Any) -> bool:
    """Multiply a warp's rows; a: A, and from TILE on sums of a row; b: B. False where a descriptor is refused."""
    code, flags, kind, columns = p.code, p.code[row, FLAGS], p.code[row, SOURCE], p.code[row, COUNT]
    results, first = code[row, WRITES], code[row, FIRST]
    s.fault_thread = warp * LANES
    if s.block_warps % GROUP:
        return vm.refuse(s, vm.NO_GROUP, 0, s.fault_thread)
    place = first + 2 * results  # D is written and read
    if code[row, MODE]:
        _load_registers(s, p, a, place, shift, kind)
        place += 4
    else:
        left = p.file[vm.base(s, p, place, shift)]
        if (np.int64(left) >> 49) & 7:
            return vm.refuse(s, vm.BASE_OFFSET, 0, s.fault_thread)
        if not _load(s, m, a, left, kind, (flags & TURN_A) != 0, ROWS * (warp % GROUP), ROWS, (DEPTH, 1)):
            return False
        place += 1
    right = p.file[vm.base(s, p, place, shift)]
    if (np.int64(right) >> 49) & 7:
        return vm.refuse(s, vm.BASE_OFFSET, 0, s.fault_thread)
    if not _load(s, m, b, right, kind, (flags & TURN_B) != 0, 0, columns, (1, columns)):
        return False
    adds = p.file[vm.base(s, p, place + 1, shift)] & np.uint64(1)
    _accumulate(s, p, first, shift, columns, adds != np.uint64(0), flags, a, b)
    return True


@inline_never
def _accumulate(
    s: Any, p: EncodedProgram, first: int, shift: int, columns: int, adds: bool, flags: int, a: Any, b: Any
) -> None:
    """Add the product of 16 rows to registers of D: lane 4 (r mod 8) + (n mod 8) / 2 holds element (r, n)."""
    sign = 1.0 if ((flags & NEGATE_A) != 0) == ((flags & NEGATE_B) != 0) else -1.0
    for r in range(ROWS):
        for n in range(columns):
            a[TILE + n] = 0.0
        for k in range(DEPTH):
            x = sign * a[r * DEPTH + k]
            for n in range(columns):
                a[TILE + n] += x * b[k * columns + n]
        for n in range(columns):
            register = 4 * (n // 8) + 2 * (r // 8) + n % 2
            at = vm.base(s, p, first + register, shift) + 4 * (r % 8) + n % 8 // 2
            total = a[TILE + n] + (np.float64(vm.single(p.file[at])) if adds else 0.0)
            p.file[at] = np.uint64(vm.single_bits(total))
