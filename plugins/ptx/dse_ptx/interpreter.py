"""The compiled interpreter: a launch's blocks one after another, warps of a block in turns, 32 lanes at once.

Registers hold 64 bits a lane, filled up with zeros; predicates are registers of 0 or 1, constants registers that all
warps share. An instruction reads its operands into arrays of 32 lanes, computes all lanes, and stores those that are
active. Divergence is a stack of (instruction, where the lanes meet again, lanes) for each warp: the top runs.

Where PTX leaves results open: approximations are rounded from double precision, `mma` sums products in double precision
and rounds once, lanes of an atomic operation follow one another, `cp.async` copies at once, and a warp runs until a
barrier, its end, or for `_QUANTUM` instructions before the next one does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dse_ptx.fused import fma
from simulators.compiled import flat, inline_never

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]

LANES, ALL = 32, 0xFFFFFFFF
GLOBAL_BASE, SHARED_WINDOW, LOCAL_WINDOW = 1 << 32, 1 << 24, 1 << 25
"""Where global memory begins, and where shared and local memory are seen by generic addresses."""
_QUANTUM = 1 << 14
TILE = 16 * 256
"""Elements of the largest matrix of `mma`."""

# Fields of an instruction. X, Y, Z: bits from which an operand's sign is extended, 0 for none. FIRST: of its operands,
# those written before those read.
# fmt: off
(KIND, OP, BITS, X, Y, Z, FORMAT, SOURCE, MODE, FLAGS, GUARD, NEGATED, FIRST, WRITES, READS, TARGET, MEETS, OFFSET,
 BYTES, COUNT, SPACE) = range(21)
FIELDS = 21
(INTEGER, FLOAT, CONVERT, LOAD, STORE, ATOMIC, COPY, SPECIAL, SHUFFLE, VOTE, MMA, MATRIX, UNPACK, BRANCH, BARRIER, EXIT,
 NOTHING, TRAP) = range(18)
(MOV, ADD, SUB, MUL, MAD, MUL_HI, MAD_HI, DIV, REM, MIN, MAX, ABS, NEG, AND, OR, XOR, NOT, CNOT, SHL, SHR, SETP, SELP,
 SLCT, BFE, BFI, BREV, POPC, CLZ, BFIND, LOP3, PRMT, SHF_L, SHF_R, SAD, DP4A, PACK) = range(36)
(FADD, FSUB, FMUL, FFMA, FDIV, FMIN, FMAX, FABS, FNEG, FRCP, FSQRT, FRSQRT, FEX2, FLG2, FSIN, FCOS, FTANH, FCOPYSIGN,
 FSETP, FTESTP) = range(20)
F16, BF16, F32, F64, TF32, INT = range(6)
EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN = range(14)
RN, RZ, RM, RP, RNA = range(5)
GENERIC, GLOBAL, SHARED, LOCAL, PARAM = range(5)
(A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC) = range(10)
UP, DOWN, BFLY, IDX = range(4)
V_ALL, V_ANY, V_UNI, V_BALLOT, V_ACTIVE, V_MATCH, V_REDUX, V_ELECT = range(8)
FTZ, SAT, RELU, PROPAGATE, PACKED, NOT_Z, AND_Z, OR_Z, XOR_Z, INTEGRAL = (1 << bit for bit in range(10))
DONE, OUT_OF_BOUNDS, MISALIGNED, DEADLOCK, ENDLESS, FULL, DIVERGENT, TRAPPED, DEEP, WATCHED = range(10)
TOP, ENDED, WAITS, EXPECTED, GONE = range(5)
WARP_FIELDS = 5
# fmt: on


_SCALARS = (
    # of the launch; `watch_skip`: visits of the watched place that do not stop it
    "num_threads num_warps num_constants num_registers param_at param_size shared_at shared_size local_at local_size "
    "limit depth watch_pc watch_block watch_thread watch_skip num_blocks local_trace "
    # where execution is; `has_moved`: a warp of the block ran since all were asked
    "block is_started warp pc fault_thread fault_address status executed rows accesses next_sample in_sample has_moved "
    "last_allocation"
)
_WORDS = ("x", "y", "z", "out", "at")


def _state() -> np.dtype[np.void]:
    """Type of the numbers of a launch, of where execution is, and of operands and results of 32 lanes.

    x, y, z: operands, as sx, sy, sz with their signs, fx to fz in single and dx to dz in double precision; out: the
    result (fo, do); at: the second result, or the addresses of an access.
    """
    fields: list[tuple[str, Any, int]] = []
    end = 0
    for name in _SCALARS.split():
        fields.append((name, np.int64, end))
        end += 8
    for name in ("ntid", "nctaid"):
        fields.append((name, (np.int64, 3), end))
        end += 24
    end = -(-end // 64) * 64
    for name in _WORDS:
        fields.append((name, (np.uint64, LANES), end))
        if name in "xyz":
            fields.append(("s" + name, (np.int64, LANES), end))
        end += 8 * LANES
    for letter, kind in (("f", np.float32), ("d", np.float64)):
        for name in "xyzo":
            fields.append((letter + name, (kind, LANES), end))
            end += np.dtype(kind).itemsize * LANES
    names, formats, offsets = zip(*fields, strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})


STATE = _state()


class EncodedProgram(NamedTuple):
    """code (instructions, FIELDS), operands; file: constants, then registers of each warp, 32 lanes each."""

    code: Ints
    operands: Ints
    file: Words


class Memory(NamedTuple):
    """Bytes of all state spaces by the size of an access, and (first, end) addresses of allocations, ascending."""

    m8: NDArray[np.uint8]
    m16: NDArray[np.uint16]
    m32: NDArray[np.uint32]
    m64: Words
    allocations: Ints


class Queue(NamedTuple):
    """Warps of a block: stack (warps, depth, 3), warps (warps, WARP_FIELDS), arrivals at each barrier.

    issued, lanes: warp and thread instructions by instruction, of all blocks.
    """

    stack: Ints
    warps: Ints
    arrivals: Ints
    issued: Ints
    lanes: Ints


class Trace(NamedTuple):
    """Blocks that are recorded, ascending; a row for each of their warp instructions, and for each access."""

    sample: Ints
    pcs: NDArray[np.int32]
    active: NDArray[np.uint32]
    access: Ints
    owner: NDArray[np.int32]
    addresses: Words
    sizes: NDArray[np.int16]


@inline_never
def _single(bits: Any) -> Any:
    """A number in single precision by its bits."""
    word = np.uint32(bits)
    return word.view(np.float32)


@inline_never
def _single_bits(number: Any) -> Any:
    """Bits of a number in single precision."""
    value = np.float32(number)
    return value.view(np.uint32)


@inline_never
def _double(bits: Any) -> Any:
    """A number in double precision by its bits."""
    word = np.uint64(bits)
    return word.view(np.float64)


@inline_never
def _double_bits(number: Any) -> Any:
    """Bits of a number in double precision."""
    value = np.float64(number)
    return value.view(np.uint64)


@inline_never
def _mask_of(bits: int) -> Any:
    """The lowest bits of a word."""
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)


@inline_never
def _read(file: Words, base: int, bits: int, x: Words, sx: Ints, lanes: int) -> None:
    """Read an operand of all lanes; with `bits`, the sign of so many is extended, or zeros if they are negative."""
    if bits == 0 or bits == 64:
        for i in range(lanes):
            x[i] = file[base + i]
    elif bits < 0:
        mask = _mask_of(-bits)
        for i in range(lanes):
            x[i] = file[base + i] & mask
    else:
        up = 64 - bits
        for i in range(lanes):
            sx[i] = (np.int64(file[base + i]) << up) >> up


@inline_never
def _popcount(value: Any) -> Any:
    """Bits that are set in a word."""
    v = np.uint64(value)
    v = v - ((v >> np.uint64(1)) & np.uint64(0x5555555555555555))
    v = (v & np.uint64(0x3333333333333333)) + ((v >> np.uint64(2)) & np.uint64(0x3333333333333333))
    v = (v + (v >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (v * np.uint64(0x0101010101010101)) >> np.uint64(56)


@inline_never
def _leading_zeros(value: Any, bits: int) -> int:
    """Zeros before the highest bit that is set."""
    count = 0
    while count < bits and not (value >> np.uint64(bits - 1 - count)) & np.uint64(1):
        count += 1
    return count


@inline_never
def _high(a: Any, b: Any) -> Any:
    """Upper 64 bits of an unsigned product."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    p = (a & low) * (b & low)
    q = (a >> half) * (b & low) + (p >> half)
    r = (a & low) * (b >> half) + (q & low)
    return (a >> half) * (b >> half) + (q >> half) + (r >> half)


@inline_never
def _compares(mode: int, a: Any, b: Any) -> bool:
    """Compare two numbers; those from EQU on are true where one is not a number."""
    if mode >= EQU:
        unordered = a != a or b != b
        if mode >= NUM:
            return unordered == (mode == NAN)
        return unordered or _compares_ordered(mode - EQU, a, b)
    return a == a and b == b and _compares_ordered(mode, a, b)


@inline_never
def _compares_ordered(mode: int, a: Any, b: Any) -> bool:
    if mode == EQ:
        return a == b
    if mode == NE:
        return a != b
    if mode == LT:
        return a < b
    if mode == LE:
        return a <= b
    if mode == GT:
        return a > b
    return a >= b


@inline_never
def _arithmetic(s: Any, op: int, bits: int, is_signed: bool, lanes: int) -> None:
    """Integer operations that are one machine instruction or few."""
    x, y, z, out, sx, sy = s.x, s.y, s.z, s.out, s.sx, s.sy
    if op == MOV:
        for i in range(lanes):
            out[i] = x[i]
    elif op == ADD:
        for i in range(lanes):
            out[i] = x[i] + y[i]
    elif op == SUB:
        for i in range(lanes):
            out[i] = x[i] - y[i]
    elif op == MUL:
        for i in range(lanes):
            out[i] = x[i] * y[i]
    elif op == MAD:
        for i in range(lanes):
            out[i] = x[i] * y[i] + z[i]
    elif op == AND:
        for i in range(lanes):
            out[i] = x[i] & y[i]
    elif op == OR:
        for i in range(lanes):
            out[i] = x[i] | y[i]
    elif op == XOR:
        for i in range(lanes):
            out[i] = x[i] ^ y[i]
    elif op == NOT:
        for i in range(lanes):
            out[i] = ~x[i]
    elif op == SELP:
        for i in range(lanes):
            out[i] = x[i] if z[i] else y[i]
    elif op == SHL:
        for i in range(lanes):
            out[i] = x[i] << y[i] if y[i] < np.uint64(bits) else np.uint64(0)
    elif op == SHR and is_signed:
        for i in range(lanes):
            out[i] = np.uint64(sx[i] >> min(sy[i] & 0xFFFFFFFF, 63))
    elif op == SHR:
        for i in range(lanes):
            out[i] = x[i] >> y[i] if y[i] < np.uint64(bits) else np.uint64(0)
    elif op == MIN and is_signed:
        for i in range(lanes):
            out[i] = np.uint64(min(sx[i], sy[i]))
    elif op == MAX and is_signed:
        for i in range(lanes):
            out[i] = np.uint64(max(sx[i], sy[i]))
    elif op == MIN:
        for i in range(lanes):
            out[i] = min(x[i], y[i])
    elif op == MAX:
        for i in range(lanes):
            out[i] = max(x[i], y[i])
    elif op == ABS:
        for i in range(lanes):
            out[i] = np.uint64(abs(sx[i]))
    elif op == NEG:
        for i in range(lanes):
            out[i] = np.uint64(0) - x[i]
    elif op == PACK:
        for i in range(lanes):
            out[i] = x[i] | (y[i] << np.uint64(bits // 2))
    else:
        _rare(s, op, bits, is_signed, lanes)


@inline_never
def _rare(s: Any, op: int, bits: int, is_signed: bool, lanes: int) -> None:
    """Integer operations lane by lane."""
    x, y, z, out, sx, sy, sz = s.x, s.y, s.z, s.out, s.sx, s.sy, s.sz
    for i in range(lanes):
        a, b, c = x[i], y[i], z[i]
        r = np.uint64(0)
        if op == MUL_HI or op == MAD_HI:
            if bits == 64:
                r = _high(a, b)
                if is_signed:
                    r -= (b if sx[i] < 0 else np.uint64(0)) + (a if sy[i] < 0 else np.uint64(0))
            else:
                r = np.uint64((sx[i] * sy[i]) >> bits) if is_signed else (a * b) >> np.uint64(bits)
            r += c if op == MAD_HI else np.uint64(0)
        elif op == DIV or op == REM:
            r = _divide(a, b, sx[i], sy[i], is_signed, op == REM)
        elif op == CNOT:
            r = np.uint64(a == np.uint64(0))
        elif op == SAD:
            is_less = sx[i] < sy[i] if is_signed else a < b
            r = c + (b - a if is_less else a - b)
        elif op == SLCT:
            r = a if sz[i] >= 0 else b
        elif op == BFE:
            r = _extract(a, sx[i], np.int64(b & np.uint64(255)), np.int64(c & np.uint64(255)), bits, is_signed)
        elif op == POPC:
            r = _popcount(a)
        elif op == CLZ:
            r = np.uint64(_leading_zeros(a, bits))
        elif op == BREV:
            for bit in range(bits):
                r |= ((a >> np.uint64(bit)) & np.uint64(1)) << np.uint64(bits - 1 - bit)
        elif op == BFIND:
            r = ~a & _mask_of(bits) if is_signed and sx[i] < 0 else a & _mask_of(bits)
            r = np.uint64(bits - 1 - _leading_zeros(r, bits)) if r else np.uint64(0xFFFFFFFF)
        out[i] = r


@inline_never
def _divide(a: Any, b: Any, sa: int, sb: int, is_signed: bool, wants_rest: bool) -> Any:
    """Quotient towards zero, or its rest; all ones where the divisor is zero."""
    if b == np.uint64(0):
        return a if wants_rest else np.uint64(0xFFFFFFFFFFFFFFFF)
    if not is_signed:
        return a % b if wants_rest else a // b
    magnitude, divisor = np.uint64(-sa if sa < 0 else sa), np.uint64(-sb if sb < 0 else sb)
    result, is_negative = magnitude // divisor, (sa < 0) != (sb < 0)
    if wants_rest:
        result, is_negative = magnitude % divisor, sa < 0
    return np.uint64(0) - result if is_negative else result


@inline_never
def _extract(a: Any, sa: int, first: int, count: int, bits: int, is_signed: bool) -> Any:
    """The field of `bfe`: `count` bits from `first`, beyond the highest filled with the sign."""
    if count == 0:
        return np.uint64(0)
    if not is_signed:
        return (a >> np.uint64(first) if first < 64 else np.uint64(0)) & _mask_of(min(count, 64))
    field = sa >> min(first, 63)
    up = 64 - min(count, bits - first if first < bits else 1)
    return np.uint64(field if first >= bits else (field << up) >> up)


@inline_never
def _three(s: Any, p: EncodedProgram, op: int, bits: int, mode: int, base: int, lanes: int) -> None:
    """Operations on bits of three operands; base: of a fourth one in the file."""
    x, y, z, out = s.x, s.y, s.z, s.out
    for i in range(lanes):
        a, b, c, r = x[i], y[i], z[i], np.uint64(0)
        if op == LOP3:
            for k in range(8):
                if (mode >> k) & 1:
                    r |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        elif op == PRMT:
            both = a | (b << np.uint64(32))
            for k in range(4):
                pick = (c >> np.uint64(4 * k)) & np.uint64(15)
                byte = (both >> (np.uint64(8) * (pick & np.uint64(7)))) & np.uint64(255)
                if pick & np.uint64(8):
                    byte = np.uint64(255) if byte & np.uint64(128) else np.uint64(0)
                r |= byte << np.uint64(8 * k)
        elif op == BFI:
            low, count = np.int64(c & np.uint64(255)), np.int64(p.file[base + i] & np.uint64(255))
            r = b
            if count and low < bits:
                window = _mask_of(min(count, bits - low)) << np.uint64(low)
                r = (b & ~window) | ((a << np.uint64(low)) & window)
        elif op == DP4A:
            r = c
            for k in range(4):
                first = (a >> np.uint64(8 * k)) & np.uint64(255)
                second = (b >> np.uint64(8 * k)) & np.uint64(255)
                r += _byte(first, mode & 1) * _byte(second, mode & 2)
        else:
            n = min(c & np.uint64(0xFFFFFFFF), np.uint64(32)) if mode else c & np.uint64(31)
            both = a | (b << np.uint64(32))
            r = (both << n) >> np.uint64(32) if op == SHF_L else both >> n
            if op == SHF_L and n == np.uint64(32):
                r = a
        out[i] = r


@inline_never
def _byte(value: Any, is_signed: int) -> Any:
    """A byte as a number of 64 bits."""
    return value - np.uint64(256) if is_signed and value & np.uint64(128) else value


@inline_never
def _integer(s: Any, p: EncodedProgram, row: int, base: int, lanes: int) -> None:
    """One integer instruction for all lanes; base: of its fourth operand."""
    code, out = p.code, s.out
    op, bits, is_signed = code[row, OP], code[row, BITS], code[row, X] > 0
    if op == SETP:
        mode = code[row, MODE]
        for i in range(lanes):
            out[i] = _compares(mode, s.sx[i], s.sy[i]) if is_signed else _compares(mode, s.x[i], s.y[i])
        _combine(s, code[row, FLAGS], np.uint64(code[row, OFFSET]), lanes)
    elif op in (LOP3, PRMT, BFI, SHF_L, SHF_R, DP4A):
        _three(s, p, op, bits, code[row, MODE], base, lanes)
    else:
        width = code[row, BYTES]  # of the operands, in bits
        _arithmetic(s, op, width, is_signed, lanes)
    mask = _mask_of(bits)
    for i in range(lanes):
        out[i] &= mask


@inline_never
def _combine(s: Any, flags: int, true: Any, lanes: int) -> None:
    """Combine comparisons with a third operand; `at` keeps the inverse for the second result of `setp`."""
    for i in range(lanes):
        p, c = s.out[i], (s.z[i] ^ np.uint64((flags & NOT_Z) != 0))
        q = p ^ np.uint64(1)
        if flags & AND_Z:
            p, q = p & c, q & c
        elif flags & OR_Z:
            p, q = p | c, q | c
        elif flags & XOR_Z:
            p, q = p ^ c, q ^ c
        s.out[i], s.at[i] = true if p else np.uint64(0), q


@inline_never
def _from_half(h: Any) -> Any:
    """A number of 16 bits (binary16) in single precision."""
    sign, exponent, fraction = (h & 0x8000) << 16, (h >> 10) & 31, h & 0x3FF
    if exponent == 0:
        value = np.float32(fraction) * np.float32(2.0**-24)
        return -value if sign else value
    bits = sign | (((exponent + 112) if exponent < 31 else 255) << 23) | (fraction << 13)
    return _single(bits)


@inline_never
def _to_half(f: Any) -> Any:
    """Round to the nearest number of 16 bits (binary16), ties to even."""
    bits = np.int64(_single_bits(f))
    sign, a = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if a > 0x7F800000:
        return np.uint64(0x7FFF)
    if a >= 0x477FF000:
        return np.uint64(sign | 0x7C00)
    if a < 0x38800000:
        return np.uint64(sign | np.int64(np.rint(abs(np.float64(f)) * 2.0**24)))
    return np.uint64(sign | ((a + 0xFFF + ((a >> 13) & 1) - 0x38000000) >> 13))


@inline_never
def _to_brain(f: Any) -> Any:
    """Round to the nearest number of 16 bits (bfloat16), ties to even."""
    bits = np.int64(_single_bits(f))
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return np.uint64(0x7FFF)
    return np.uint64((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@inline_never
def _round_to(value: float, digits: int, smallest: int, towards_zero: bool) -> float:
    """Round to so many binary digits after the first; smallest: exponent of a normal number."""
    if value == 0.0 or not math.isfinite(value):
        return value
    _, exponent = math.frexp(value)
    unit = digits - max(exponent - 1, smallest)
    scaled = math.ldexp(value, unit)
    return math.ldexp(np.trunc(scaled) if towards_zero else np.rint(scaled), -unit)


@inline_never
def _odd_fma(a: float, b: float, c: float) -> float:
    """Product and sum in double precision, rounded to odd: rounded once more to 16 bits, it is rounded right.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE ToC 57(4), 2008.
    """
    p = a * b  # exact: both have 24 bits or fewer
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = np.int64(_double_bits(s))
    if math.isfinite(s) and error != 0.0 and not bits & 1:
        bits += 1 if (error > 0.0) == (s > 0.0) else -1
        return _double(bits)
    return s


@inline_never
def _to_float(x: Words, shift: int, kind: int, f: NDArray[np.float32], flags: int, lanes: int) -> None:
    """Read numbers of 16 or 32 bits as single precision."""
    down = np.uint64(shift)
    if kind == F32 or kind == TF32:
        for i in range(lanes):
            f[i] = _single(x[i])
    elif kind == BF16:
        for i in range(lanes):
            f[i] = _single(((x[i] >> down) & np.uint64(0xFFFF)) << np.uint64(16))
    else:
        for i in range(lanes):
            f[i] = _from_half(np.int64((x[i] >> down) & np.uint64(0xFFFF)))
    if flags & FTZ and kind == F32:
        _flush(f, lanes)


@inline_never
def _flush(f: NDArray[np.float32], lanes: int) -> None:
    """Subnormal numbers become zeros of their sign."""
    for i in range(lanes):
        if abs(f[i]) < np.float32(2.0**-126):
            f[i] = math.copysign(np.float32(0.0), f[i])


@inline_never
def _from_float(f: NDArray[np.float32], kind: int, flags: int, i: int) -> Any:
    """Bits of a result in its format."""
    value = f[i]
    if flags & SAT:
        value = min(value, np.float32(1.0)) if value > np.float32(0.0) else np.float32(0.0)
    if flags & RELU and value <= np.float32(0.0):
        value = np.float32(0.0)
    if kind == F16:
        return _to_half(value)
    if value != value:
        return np.uint64(0x7FFFFFFF if kind == F32 else 0x7FFF)  # the number that PTX has for none
    return _to_brain(value) if kind == BF16 else np.uint64(_single_bits(value))


@inline_never
def _from_double(value: float) -> Any:
    """Bits of a result in double precision; one that is no number has the same bits always."""
    return np.uint64(0x7FFFFFFFFFFFFFFF) if value != value else _double_bits(value)


@inline_never
def _least(a: Any, b: Any, sign: Any, propagate: bool) -> Any:
    """The smaller of two numbers (of both, times `sign`); one that is none counts only with `propagate`."""
    if a != a or b != b:
        if propagate:
            return a + b
        return b if a != a else a
    if a == b:
        return a if (math.copysign(1.0, a) < 0) == (sign > 0) else b
    return a if (a < b) == (sign > 0) else b


@inline_never
def _compute(op: int, flags: int, x: Any, y: Any, z: Any, out: Any, lanes: int) -> None:
    """Floating-point operations in the precision of the arrays."""
    if op == FADD:
        for i in range(lanes):
            out[i] = x[i] + y[i]
    elif op == FSUB:
        for i in range(lanes):
            out[i] = x[i] - y[i]
    elif op == FMUL:
        for i in range(lanes):
            out[i] = x[i] * y[i]
    elif op == FFMA:
        for i in range(lanes):
            out[i] = fma(x[i], y[i], z[i])
    elif op == FDIV:
        for i in range(lanes):
            out[i] = x[i] / y[i]
    elif op == FMIN or op == FMAX:
        for i in range(lanes):
            out[i] = _least(x[i], y[i], 1.0 if op == FMIN else -1.0, (flags & PROPAGATE) != 0)
    elif op == FABS:
        for i in range(lanes):
            out[i] = abs(x[i])
    elif op == FNEG:
        for i in range(lanes):
            out[i] = -x[i]
    elif op == FCOPYSIGN:  # PTX: the sign of the first, the magnitude of the second
        for i in range(lanes):
            out[i] = math.copysign(y[i], x[i])
    else:
        for i in range(lanes):
            out[i] = _function(op, np.float64(x[i]))


@inline_never
def _function(op: int, a: float) -> float:
    """Functions of one number, in double precision."""
    if op == FRCP:
        return 1.0 / a
    if op == FSQRT:
        return math.sqrt(a) if a >= 0.0 else a * np.nan
    if op == FRSQRT:
        return 1.0 / math.sqrt(a) if a >= 0.0 else np.nan
    if op == FEX2:
        return 2.0**a if a == a else a
    if op == FLG2:
        return np.log2(a) if a > 0.0 else -np.inf if a == 0.0 else np.nan
    if op == FSIN:
        return math.sin(a) if math.isfinite(a) else np.nan
    if op == FCOS:
        return math.cos(a) if math.isfinite(a) else np.nan
    return math.tanh(a)


@inline_never
def _float(s: Any, p: EncodedProgram, row: int, lanes: int) -> None:
    """One floating-point instruction for all lanes."""
    code, out = p.code, s.out
    op, kind, flags = code[row, OP], code[row, FORMAT], code[row, FLAGS]
    if op == FSETP or op == FTESTP:
        _float_compare(s, p, row, lanes)
        return
    if kind == F64:
        for i in range(lanes):
            s.dx[i], s.dy[i], s.dz[i] = _double(s.x[i]), _double(s.y[i]), _double(s.z[i])
        _compute(op, flags, s.dx, s.dy, s.dz, s.do, lanes)
        for i in range(lanes):
            out[i] = _from_double(s.do[i])
        return
    for shift in range(0, 32 if flags & PACKED else 16, 16):
        _to_float(s.x, shift, kind, s.fx, flags, lanes)
        _to_float(s.y, shift, kind, s.fy, flags, lanes)
        _to_float(s.z, shift, kind, s.fz, flags, lanes)
        if op == FFMA and kind != F32:
            digits, smallest = (10, -14) if kind == F16 else (7, -126)
            for i in range(lanes):
                exact = _odd_fma(np.float64(s.fx[i]), np.float64(s.fy[i]), np.float64(s.fz[i]))
                s.fo[i] = _round_to(exact, digits, smallest, False)
        else:
            _compute(op, flags, s.fx, s.fy, s.fz, s.fo, lanes)
        if flags & FTZ and kind == F32:
            _flush(s.fo, lanes)
        for i in range(lanes):
            bits = _from_float(s.fo, kind, flags, i) << np.uint64(shift)
            out[i] = out[i] | bits if shift else bits


@inline_never
def _float_compare(s: Any, p: EncodedProgram, row: int, lanes: int) -> None:
    """`setp` and `testp` of floating-point numbers."""
    code, mode, kind, flags = p.code, p.code[row, MODE], p.code[row, FORMAT], p.code[row, FLAGS]
    if kind == F64:
        for i in range(lanes):
            s.dx[i], s.dy[i] = _double(s.x[i]), _double(s.y[i])
    else:
        _to_float(s.x, 0, kind, s.fx, flags, lanes)
        _to_float(s.y, 0, kind, s.fy, flags, lanes)
        for i in range(lanes):
            s.dx[i], s.dy[i] = np.float64(s.fx[i]), np.float64(s.fy[i])
    if code[row, OP] == FSETP:
        for i in range(lanes):
            s.out[i] = np.uint64(_compares(mode, s.dx[i], s.dy[i]))
        _combine(s, flags, np.uint64(code[row, OFFSET]), lanes)
        return
    tiny = 2.0**-1022 if kind == F64 else 2.0**-126
    for i in range(lanes):
        a = s.dx[i]
        finite, normal = math.isfinite(a), math.isfinite(a) and abs(a) >= tiny
        answers = (finite, not finite and a == a, a == a, a != a, normal, finite and not normal and a != 0.0)
        s.out[i] = np.uint64(answers[mode])


@inline_never
def _integral(value: float, mode: int) -> float:
    """Round to an integer."""
    if mode == RZ:
        return np.trunc(value)
    if mode == RM:
        return np.floor(value)
    return np.ceil(value) if mode == RP else np.rint(value)


@inline_never
def _to_integer(value: float, bits: int, is_signed: bool) -> Any:
    """An integer of so many bits; what lies beyond becomes the nearest, what is no number 0."""
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if is_signed else (0.0, 2.0**bits)
    if value != value:
        return np.uint64(0)
    if value >= high:
        return _mask_of(bits - 1) if is_signed else _mask_of(bits)
    if value <= low:
        return np.uint64(1) << np.uint64(bits - 1) if is_signed else np.uint64(0)
    return np.uint64(np.int64(value)) if value < 2.0**63 else np.uint64(value)


@inline_never
def _convert(s: Any, p: EncodedProgram, row: int, lanes: int) -> None:
    """`cvt`: MODE rounds; BITS and X are those of the result and the source where they are integers."""
    code, x, out = p.code, s.x, s.out
    source, target, mode, flags = code[row, SOURCE], code[row, FORMAT], code[row, MODE], code[row, FLAGS]
    bits, is_signed = code[row, BITS], code[row, Y] > 0
    if source == INT and target == INT:
        low, high = code[row, OFFSET], code[row, BYTES]
        for i in range(lanes):
            out[i] = np.uint64(min(max(s.sx[i], low), high)) if flags & SAT else x[i]
            out[i] &= _mask_of(bits)
        return
    if source == F64:
        for i in range(lanes):
            s.dx[i] = _double(x[i])
    elif source != INT:
        _to_float(x, 0, source, s.fx, flags, lanes)
        for i in range(lanes):
            s.dx[i] = np.float64(s.fx[i])
    for i in range(lanes):
        if source == INT:
            s.dx[i] = np.float64(s.sx[i]) if code[row, X] > 0 else np.float64(x[i])
            s.fo[i] = np.float32(s.sx[i]) if code[row, X] > 0 else np.float32(x[i])
        elif flags & INTEGRAL:
            s.dx[i] = _integral(s.dx[i], mode)
            s.fo[i] = np.float32(s.dx[i])
        else:
            s.fo[i] = np.float32(s.dx[i])
        if target == INT:
            out[i] = _to_integer(_integral(s.dx[i], mode), bits, is_signed) & _mask_of(bits)
        elif target == F64:
            out[i] = _from_double(s.dx[i])
        elif target == TF32:
            raw = np.uint64(_single_bits(s.fo[i]))
            up = np.uint64(0x1000) if mode == RNA else np.uint64(0xFFF) + ((raw >> np.uint64(13)) & np.uint64(1))
            out[i] = (raw + up if math.isfinite(s.fo[i]) else raw) & np.uint64(0xFFFFE000)
        else:
            if target != F32:
                digits, smallest = (10, -14) if target == F16 else (7, -126)
                rounded = _round_to(s.dx[i], digits, smallest, mode == RZ)
                if mode == RZ and target == F16 and math.isfinite(rounded):
                    rounded = min(max(rounded, -65504.0), 65504.0)
                s.fo[i] = np.float32(rounded)
            out[i] = _from_float(s.fo, target, flags, i)


@inline_never
def _convert_pair(s: Any, p: EncodedProgram, row: int, lanes: int) -> None:
    """`cvt` of two numbers to a packed pair, the first in the upper half."""
    _convert(s, p, row, lanes)
    for i in range(lanes):
        s.at[i], s.x[i] = s.out[i], s.y[i]
    _convert(s, p, row, lanes)
    for i in range(lanes):
        s.out[i] |= s.at[i] << np.uint64(16)


@inline_never
def _locate(s: Any, m: Memory, space: int, address: int, size: int, thread: int) -> int:
    """Place of an access in memory; -1 where it is out of bounds, -2 where it is not aligned."""
    if address & (size - 1):
        return -2
    if space == GENERIC:
        space = GLOBAL
        if address < GLOBAL_BASE:
            space = LOCAL if address >= LOCAL_WINDOW else SHARED
            address -= LOCAL_WINDOW if address >= LOCAL_WINDOW else SHARED_WINDOW
    if space == GLOBAL:
        last = s.last_allocation
        if address < m.allocations[last, 0] or address + size > m.allocations[last, 1]:
            last = _allocation(m.allocations, address)
            if last < 0 or address + size > m.allocations[last, 1]:
                return -1
            s.last_allocation = last
        return address - GLOBAL_BASE
    if space == SHARED:
        return s.shared_at + address if address >= 0 and address + size <= s.shared_size else -1
    if space == LOCAL:
        is_inside = address >= 0 and address + size <= s.local_size
        return s.local_at + thread * s.local_size + address if is_inside else -1
    return s.param_at + address if address >= 0 and address + size <= s.param_size else -1


@inline_never
def _allocation(allocations: Ints, address: int) -> int:
    """The last allocation that begins at or before an address, or -1."""
    low, high = 0, len(allocations)
    while low < high:
        middle = (low + high) // 2
        if allocations[middle, 0] <= address:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inline_never
def _get(m: Memory, at: int, size: int) -> Any:
    """Bytes of memory as a word."""
    if size == 4:
        return np.uint64(m.m32[at >> 2])
    if size == 8:
        return m.m64[at >> 3]
    return np.uint64(m.m16[at >> 1]) if size == 2 else np.uint64(m.m8[at])


@inline_never
def _put(m: Memory, at: int, size: int, value: Any) -> None:
    """Store a word's lowest bytes."""
    if size == 4:
        m.m32[at >> 2] = np.uint32(value)
    elif size == 8:
        m.m64[at >> 3] = value
    elif size == 2:
        m.m16[at >> 1] = np.uint16(value)
    else:
        m.m8[at] = np.uint8(value)


@inline_never
def _fault(s: Any, place: int, address: int, thread: int) -> bool:
    """Note an access that failed."""
    s.status = OUT_OF_BOUNDS if place == -1 else MISALIGNED
    s.fault_thread, s.fault_address = thread, address
    return False


@inline_never
def _base(s: Any, p: EncodedProgram, place: int, shift: int) -> int:
    """Find where an operand's lanes begin in the file; shift: registers of the warps before."""
    index = p.operands[place]
    return LANES * (index + shift if index >= s.num_constants else index)


@inline_never
def _trace_address(s: Any, space: int, address: int, thread: int) -> int:
    """Address for a trace: local memory lies interleaved by thread in global memory, four bytes each."""
    if space == GENERIC and address < GLOBAL_BASE:
        space = LOCAL if address >= LOCAL_WINDOW else SHARED
        address -= LOCAL_WINDOW if address >= LOCAL_WINDOW else SHARED_WINDOW
    if space == LOCAL:
        block = s.block * s.local_size
        return s.local_trace + (block + (address & ~3)) * s.num_threads + 4 * thread + (address & 3)
    return address


@inline_never
def _memory(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """Loads and stores of up to eight elements, lane by lane. False where an access fails."""
    code, kind, size, count = p.code, p.code[row, KIND], p.code[row, BYTES], p.code[row, COUNT]
    first, space, sign = code[row, FIRST], code[row, SPACE], code[row, X]
    values = first if kind == LOAD else first + 1  # the address is the first that is read
    source = _base(s, p, first + code[row, WRITES], shift)
    mask = _mask_of(code[row, BITS])
    for lane in range(LANES):
        if not (active >> lane) & 1:
            s.at[lane] = np.uint64(0)
            continue
        thread, address = warp * LANES + lane, np.int64(p.file[source + lane]) + code[row, OFFSET]
        place = _locate(s, m, space, address, size * count, thread)
        s.at[lane] = np.uint64(_trace_address(s, space, address, thread))
        if place < 0:
            return _fault(s, place, address, thread)
        for k in range(count):
            value = _base(s, p, values + k, shift) + lane
            if kind == LOAD:
                word = _get(m, place + k * size, size)
                if sign:
                    word = np.uint64((np.int64(word) << (64 - sign)) >> (64 - sign)) & mask
                p.file[value] = word
            else:
                _put(m, place + k * size, size, p.file[value])
    return True


@inline_never
def _copy(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """`cp.async`: copy bytes from global to shared memory; what lies beyond the source's size becomes 0."""
    code, size, first = p.code, p.code[row, BYTES], p.code[row, FIRST]
    to, source = _base(s, p, first, shift), _base(s, p, first + 1, shift)
    lengths = _base(s, p, first + 2, shift)
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
        if not (active >> lane) & 1:
            continue
        thread = warp * LANES + lane
        length = min(np.int64(p.file[lengths + lane]), size)
        target, address = np.int64(p.file[to + lane]) + code[row, OFFSET], np.int64(p.file[source + lane])
        address += code[row, TARGET]
        place = _locate(s, m, SHARED, target, size, thread)
        if place < 0:
            return _fault(s, place, target, thread)
        origin = 0
        if length > 0:
            origin = (
                _locate(s, m, GLOBAL, address, size, thread)
                if length == size
                else _locate(s, m, GLOBAL, address, 1, thread)
            )
            if origin < 0:
                return _fault(s, origin, address, thread)
            s.at[lane] = np.uint64(address)
        for byte in range(size):
            m.m8[place + byte] = m.m8[origin + byte] if byte < length else 0
    return True


@inline_never
def _update(op: int, kind: int, old: Any, b: Any, c: Any, bits: int) -> Any:
    """The value that an atomic operation stores. bits: negative where the numbers have signs."""
    if kind == F32:
        return np.uint64(_single_bits(_single(old) + _single(b)))
    if kind == F64:
        return _double_bits(_double(old) + _double(b))
    if kind == F16:
        return _to_half(_from_half(np.int64(old)) + _from_half(np.int64(b)))
    if op == A_ADD:
        return old + b
    if op == A_MIN or op == A_MAX:
        up = 64 + bits if bits < 0 else 0
        is_less = np.int64(old << np.uint64(up)) < np.int64(b << np.uint64(up)) if bits < 0 else old < b
        return old if is_less == (op == A_MIN) else b
    if op == A_AND:
        return old & b
    if op == A_OR:
        return old | b
    if op == A_XOR:
        return old ^ b
    if op == A_EXCH:
        return b
    if op == A_CAS:
        return c if old == b else old
    if op == A_INC:
        return np.uint64(0) if old >= b else old + np.uint64(1)
    return b if old == np.uint64(0) or old > b else old - np.uint64(1)


@inline_never
def _atomic(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """`atom` and `red`, lane after lane."""
    code, size, first, writes = p.code, p.code[row, BYTES], p.code[row, FIRST], p.code[row, WRITES]
    source, operand = _base(s, p, first + writes, shift), _base(s, p, first + writes + 1, shift)
    third = _base(s, p, first + writes + 2, shift) if code[row, READS] > 2 else operand
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
        if not (active >> lane) & 1:
            continue
        thread, address = warp * LANES + lane, np.int64(p.file[source + lane]) + code[row, OFFSET]
        s.at[lane] = np.uint64(_trace_address(s, code[row, SPACE], address, thread))
        place = _locate(s, m, code[row, SPACE], address, size, thread)
        if place < 0:
            return _fault(s, place, address, thread)
        old = _get(m, place, size)
        new = _update(code[row, OP], code[row, FORMAT], old, p.file[operand + lane], p.file[third + lane], code[row, X])
        _put(m, place, size, new)
        if writes:
            p.file[_base(s, p, first, shift) + lane] = old
    return True


@inline_never
def _matrix(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """`ldmatrix`: 8x8 matrices of 16-bit elements; lane 8 j + i gives the address of row i of matrix j."""
    code, first, count = p.code, p.code[row, FIRST], p.code[row, COUNT]
    source = _base(s, p, first + count, shift)
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
    for j in range(count):
        to = _base(s, p, first + j, shift)
        for lane in range(LANES):
            s.z[lane] = np.uint64(0)
        for i in range(8):
            lane = 8 * j + i
            address = np.int64(p.file[source + lane]) + code[row, OFFSET]
            place = _locate(s, m, code[row, SPACE], address, 16, warp * LANES + lane)
            s.at[lane] = np.uint64(_trace_address(s, code[row, SPACE], address, 0))
            if place < 0:
                return _fault(s, place, address, warp * LANES + lane)
            for k in range(8):
                element = np.uint64(m.m16[(place >> 1) + k])
                if code[row, MODE]:
                    s.z[4 * k + i // 2] |= element << np.uint64(16 * (i % 2))
                else:
                    s.z[4 * i + k // 2] |= element << np.uint64(16 * (k % 2))
        for lane in range(LANES):
            p.file[to + lane] = s.z[lane]
    for lane in range(8 * count, LANES):  # gives no address, and adds none to the trace
        s.at[lane] = s.at[lane & 7]
    return True


@inline_never
def _element(word: Any, kind: int, place: int, bits: int, is_signed: int) -> float:
    """One of the numbers that a register of a matrix holds. kind: F16, BF16, TF32, F64, or INT of so many bits."""
    if kind == F64:
        return _double(word)
    if kind == F16:
        return np.float64(_from_half(np.int64((word >> np.uint64(16 * place)) & np.uint64(0xFFFF))))
    if kind == BF16:
        return np.float64(_single(((word >> np.uint64(16 * place)) & np.uint64(0xFFFF)) << np.uint64(16)))
    if kind == TF32:
        return np.float64(_single(word & np.uint64(0xFFFFE000)))
    part = np.int64((word >> np.uint64(bits * place)) & _mask_of(bits))
    return np.float64(part - (1 << bits) if is_signed and part >> (bits - 1) else part)


@inline_never
def _mma(s: Any, p: EncodedProgram, row: int, shift: int, a: Any, b: Any) -> None:
    """`mma.sync` m16n8 and m8n8: D = A B + C, fragments as in PTX ISA, section 9.7.14.5; COUNT: registers of A.

    An accumulator of FORMAT is rounded once, after a sum in double precision; one of double precision after each term.
    MODE: numbers in a register. BYTES: rows over 8. X, Y: whether A and B have signs. OP: 1 counts bits that differ.
    """
    code, kind, first, rows = p.code, p.code[row, SOURCE], p.code[row, FIRST], p.code[row, COUNT]
    target, count, halves = p.code[row, FORMAT], p.code[row, MODE], p.code[row, BYTES]
    results, bits, across = code[row, WRITES], 32 // count, rows // halves
    depth = 4 * count * across
    for lane in range(LANES):
        group, member = lane >> 2, lane & 3
        for r in range(rows):
            word = p.file[_base(s, p, first + results + r, shift) + lane]
            for i in range(count):
                at = (group + 8 * (r % halves)) * depth + count * member + i + 4 * count * (r // halves)
                a[at] = _element(word, kind, i, bits, code[row, X])
        for r in range(across):
            word = p.file[_base(s, p, first + results + rows + r, shift) + lane]
            for i in range(count):
                b[group * depth + count * member + i + 4 * count * r] = _element(word, kind, i, bits, code[row, Y])
    for lane in range(LANES):
        group, member = lane >> 2, lane & 3
        for half in range(halves):
            packed = np.uint64(0)
            for i in range(2):
                index = half if target == F16 else 2 * half + i
                word = p.file[_base(s, p, first + results + rows + across + index, shift) + lane]
                total = _double(word) if target == F64 else 0.0
                for k in range(depth):
                    x, y = a[(group + 8 * half) * depth + k], b[(2 * member + i) * depth + k]
                    if target == F64:
                        total = fma(x, y, total)
                    else:
                        total += x + y - 2 * x * y if code[row, OP] else x * y
                if target == F64:
                    packed = _double_bits(total)
                elif target == F16:
                    total += np.float64(_from_half(np.int64((word >> np.uint64(16 * i)) & np.uint64(0xFFFF))))
                    packed |= _to_half(np.float32(_round_to(total, 10, -14, False))) << np.uint64(16 * i)
                elif target == F32:
                    total += np.float64(_single(word))
                    packed = np.uint64(_single_bits(total))
                else:
                    packed = np.uint64(_accumulated(np.int64(total), word, code[row, FLAGS])) & np.uint64(0xFFFFFFFF)
                a[TILE + 4 * lane + index] = _double(packed)
    for lane in range(LANES):
        for r in range(results):
            p.file[_base(s, p, first + r, shift) + lane] = _double_bits(a[TILE + 4 * lane + r])


@inline_never
def _accumulated(total: int, word: Any, flags: int) -> int:
    """A sum and an accumulator of 32 bits, within them by `.satfinite`."""
    both = total + ((np.int64(word) << 32) >> 32)
    if flags & SAT:
        both = min(max(both, np.int64(-(1 << 31))), np.int64((1 << 31) - 1))
    return int(both)


@inline_never
def _shuffle(s: Any, mode: int, active: int) -> None:
    """`shfl.sync`: another lane's value, and whether it is in range (PTX ISA, section 9.7.9.6)."""
    for lane in range(LANES):
        b, c = np.int64(s.y[lane] & np.uint64(31)), np.int64(s.z[lane])
        segment, clamp = (c >> 8) & 31, c & 31
        low = lane & segment
        most = low | (clamp & ~segment)
        other = lane - b if mode == UP else lane + b if mode == DOWN else lane ^ b
        if mode == IDX:
            other = low | (b & ~segment)
        inside = other >= most if mode == UP else other <= most
        s.out[lane] = s.x[other if inside else lane]
        s.at[lane] = np.uint64(inside)


@inline_never
def _vote(s: Any, p: EncodedProgram, row: int, active: int) -> None:
    """`vote`, `match.any`, `redux`, `activemask` and `elect` over the active lanes."""
    op, mode = p.code[row, OP], p.code[row, MODE]
    ballot, total, is_first = 0, np.uint64(0), True
    sign = -64 if p.code[row, X] > 0 else 0  # their signs are extended already
    for lane in range(LANES):
        if (active >> lane) & 1:
            ballot |= (1 << lane) if s.x[lane] ^ np.uint64((p.code[row, FLAGS] & NOT_Z) != 0) else 0
            word = s.x[lane]
            total = word if is_first else _update(mode, INT, total, word, word, sign)
            is_first = False
    for lane in range(LANES):
        if op == V_ALL:
            s.out[lane] = np.uint64(ballot == active)
        elif op == V_ANY:
            s.out[lane] = np.uint64(ballot != 0)
        elif op == V_UNI:
            s.out[lane] = np.uint64(ballot == active or ballot == 0)
        elif op == V_BALLOT:
            s.out[lane] = np.uint64(ballot)
        elif op == V_ACTIVE:
            s.out[lane] = np.uint64(active)
        elif op == V_REDUX:
            s.out[lane] = total & np.uint64(0xFFFFFFFF)
        elif op == V_ELECT:
            s.out[lane], s.at[lane] = np.uint64(_lowest(active)), np.uint64(lane == _lowest(active))
        else:
            same = 0
            for other in range(LANES):
                same |= (1 << other) if (active >> other) & 1 and s.x[other] == s.x[lane] else 0
            s.out[lane] = np.uint64(same)


@inline_never
def _lowest(active: int) -> int:
    lane = 0
    while not (active >> lane) & 1:
        lane += 1
    return lane


@inline_never
def _special(s: Any, mode: int, warp: int, lanes: int) -> None:
    """Special registers, numbered as in `decoder.SPECIAL_REGISTERS`."""
    for lane in range(lanes):
        thread, value = warp * LANES + lane, 0
        if mode < 3:
            below = 1 if mode == 0 else s.ntid[0] if mode == 1 else s.ntid[0] * s.ntid[1]
            value = (thread // below) % s.ntid[mode]
        elif mode < 6:
            value = s.ntid[mode - 3]
        elif mode < 9:
            below = 1 if mode == 6 else s.nctaid[0] if mode == 7 else s.nctaid[0] * s.nctaid[1]
            value = (s.block // below) % s.nctaid[mode - 6]
        elif mode < 12:
            value = s.nctaid[mode - 9]
        elif mode == 12:
            value = lane
        elif mode == 13:
            value = warp
        elif mode == 14:
            value = s.num_warps
        elif mode < 20:
            masks = (1 << lane, (1 << lane) - 1, (2 << lane) - 1, ALL & ~((2 << lane) - 1), ALL & ~((1 << lane) - 1))
            value = masks[mode - 15]
        elif mode == 20:
            value = s.executed
        elif mode == 21:
            value = s.shared_size
        s.out[lane] = np.uint64(value)


@inline_never
def _begin(s: Any, p: EncodedProgram, m: Memory, q: Queue, t: Trace) -> None:
    """Reset the warps of a block, their registers and their memory."""
    count = s.num_warps
    p.file[LANES * s.num_constants :] = 0
    m.m8[s.shared_at : s.shared_at + s.shared_size] = 0
    m.m8[s.local_at : s.local_at + s.local_size * s.num_warps * LANES] = 0
    q.arrivals[:] = 0
    for warp in range(count):
        present = min(s.num_threads - warp * LANES, LANES)
        q.stack[warp, 0, 0], q.stack[warp, 0, 1], q.stack[warp, 0, 2] = 0, -1, (1 << present) - 1
        q.warps[warp, TOP], q.warps[warp, ENDED], q.warps[warp, WAITS] = 0, 0, -1
        q.warps[warp, EXPECTED], q.warps[warp, GONE] = 0, 0
    s.is_started, s.warp, s.has_moved = 1, 0, 0
    s.in_sample = s.next_sample < len(t.sample) and t.sample[s.next_sample] == s.block


@inline_never
def _release(s: Any, q: Queue) -> bool:
    """Open the barriers for which all have come. False where warps wait and none opens."""
    live, is_open = 0, True
    for warp in range(s.num_warps):
        live += q.warps[warp, GONE] == 0
    for warp in range(s.num_warps):
        name = q.warps[warp, WAITS]
        if name < 0:
            continue
        is_open = False
        expected = (q.warps[warp, EXPECTED] + LANES - 1) // LANES or live
        if q.arrivals[name] >= expected:
            for other in range(s.num_warps):
                if q.warps[other, WAITS] == name:
                    q.warps[other, WAITS] = -1
            q.arrivals[name] = 0
            return True
        s.pc, s.fault_thread = q.stack[warp, q.warps[warp, TOP], 0] - 1, warp * LANES
    return is_open


@inline_never
def _diverge(s: Any, p: EncodedProgram, q: Queue, warp: int, row: int, taken: int, active: int) -> bool:
    """Split the lanes of a warp at a branch. False where the stack overflows."""
    top, stack, meets = q.warps[warp, TOP], q.stack, p.code[row, MEETS]
    target, remaining = p.code[row, TARGET], active & ~taken
    if taken == active or taken == 0:
        stack[warp, top, 0] = target if taken else row + 1
        return True
    if stack[warp, top, 1] == meets:
        top -= 1  # lanes that are there already are in the entry below
    else:
        stack[warp, top, 0] = meets
    for side in range(2):
        place, lanes = (row + 1, remaining) if side == 0 else (target, taken)
        if place != meets:
            top += 1
            if top >= s.depth:
                return False
            stack[warp, top, 0], stack[warp, top, 1], stack[warp, top, 2] = place, meets, lanes
    q.warps[warp, TOP] = top
    return True


@inline_never
def _write(s: Any, p: EncodedProgram, row: int, active: int, shift: int) -> None:
    """Store the result of the active lanes."""
    to = _base(s, p, p.code[row, FIRST], shift)
    if active == ALL:
        for i in range(LANES):
            p.file[to + i] = s.out[i]
    else:
        for i in range(LANES):
            if (active >> i) & 1:
                p.file[to + i] = s.out[i]
    if p.code[row, WRITES] > 1:
        to = _base(s, p, p.code[row, FIRST] + 1, shift)
        for i in range(LANES):
            if (active >> i) & 1:
                p.file[to + i] = s.at[i]


@inline_never
def _record(s: Any, p: EncodedProgram, t: Trace, row: int, active: int, warp: int, has_access: bool) -> None:
    """Append a row to the recording; the caller has seen to room."""
    place, access = s.rows, s.accesses
    t.pcs[place], t.active[place], t.access[place] = row, active, -1
    t.owner[place] = s.next_sample * s.num_warps + warp
    if has_access:
        t.access[place] = access
        for lane in range(LANES):
            t.addresses[access * LANES + lane] = s.at[lane]
        t.sizes[access] = p.code[row, BYTES] * (1 if p.code[row, KIND] == MATRIX else max(p.code[row, COUNT], 1))
        s.accesses = access + 1
    s.rows = place + 1


@inline_never
def _compute_row(
    s: Any, p: EncodedProgram, row: int, kind: int, active: int, warp: int, shift: int, lanes: int
) -> None:
    """Instructions that read registers and write one or two."""
    code, first = p.code, p.code[row, FIRST] + p.code[row, WRITES]
    reads = code[row, READS]
    if reads > 0:
        _read(p.file, _base(s, p, first, shift), code[row, X], s.x, s.sx, lanes)
    if reads > 1:
        _read(p.file, _base(s, p, first + 1, shift), 0 if kind == CONVERT else code[row, Y], s.y, s.sy, lanes)
    if reads > 2:
        _read(p.file, _base(s, p, first + 2, shift), code[row, Z], s.z, s.sz, lanes)
    if kind == INTEGER:
        _integer(s, p, row, _base(s, p, first + 3, shift) if reads > 3 else 0, lanes)
    elif kind == FLOAT:
        _float(s, p, row, lanes)
    elif kind == CONVERT:
        if reads > 1:
            _convert_pair(s, p, row, lanes)
        else:
            _convert(s, p, row, lanes)
    elif kind == SPECIAL:
        _special(s, code[row, MODE], warp, lanes)
    elif kind == SHUFFLE:
        _shuffle(s, code[row, MODE], active)
    elif kind == VOTE:
        _vote(s, p, row, active)
    else:  # UNPACK: the upper half is the second result
        width = np.uint64(code[row, BITS])
        for i in range(lanes):
            s.out[i], s.at[i] = s.x[i] & _mask_of(code[row, BITS]), s.x[i] >> width
    _write(s, p, row, active, shift)


@inline_never
def _guard_mask(s: Any, p: EncodedProgram, row: int, active: int, shift: int) -> Any:
    """Lanes for which the predicate of an instruction holds."""
    base, negated, mask = _base(s, p, p.code[row, GUARD], shift), p.code[row, NEGATED], np.int64(0)
    for lane in range(LANES):
        mask |= np.int64((p.file[base + lane] & np.uint64(1)) ^ np.uint64(negated)) << lane
    return active & mask


@inline_never
def _leave(q: Queue, warp: int, row: int, active: int) -> None:
    """End lanes of a warp; those that a predicate spares go on."""
    q.warps[warp, ENDED] |= active
    top = q.warps[warp, TOP]
    q.stack[warp, top, 0] = row + 1
    while top >= 0 and not q.stack[warp, top, 2] & ~q.warps[warp, ENDED]:
        top -= 1
    q.warps[warp, TOP] = top
    if top < 0:
        q.warps[warp, GONE] = 1


@inline_never
def _arrive(s: Any, p: EncodedProgram, q: Queue, warp: int, row: int, active: int, shift: int) -> int:
    """A warp comes to a barrier. Returns the status."""
    code, first, top = p.code, p.code[row, FIRST], q.warps[warp, TOP]
    present = (1 << min(s.num_threads - warp * LANES, LANES)) - 1
    if active != present & ~q.warps[warp, ENDED]:
        s.fault_thread = warp * LANES + _lowest(present & ~q.warps[warp, ENDED] & ~active)
        return DIVERGENT
    name = np.int64(p.file[_base(s, p, first, shift)]) & 15
    q.arrivals[name] += 1
    q.stack[warp, top, 0] = row + 1
    if not code[row, MODE]:
        q.warps[warp, WAITS] = name
        q.warps[warp, EXPECTED] = np.int64(p.file[_base(s, p, first + 1, shift)]) if code[row, READS] > 1 else 0
    return DONE


@inline_never
def _run_warp(s: Any, p: EncodedProgram, m: Memory, q: Queue, t: Trace, warp: int, lanes: int, a: Any, b: Any) -> int:
    """Run a warp until it waits, ends, or has had its turn. Returns the status."""
    code, stack, warps = p.code, q.stack, q.warps
    shift, turns = warp * s.num_registers, _QUANTUM
    while turns > 0:
        top = warps[warp, TOP]
        row, active = stack[warp, top, 0], stack[warp, top, 2] & ~warps[warp, ENDED]
        if row == stack[warp, top, 1] or active == 0:
            warps[warp, TOP] = top - 1
            if top == 0:
                warps[warp, GONE] = 1
                return DONE
            continue
        turns -= 1
        s.pc, kind = row, code[row, KIND]
        if row == s.watch_pc and s.block == s.watch_block and warp == s.watch_thread // LANES:
            if (active >> (s.watch_thread % LANES)) & 1:
                s.watch_skip -= 1
                if s.watch_skip < 0:
                    return WATCHED
        if s.in_sample and (s.rows >= len(t.pcs) or s.accesses >= len(t.sizes)):
            return FULL
        if s.executed >= s.limit:
            return ENDLESS
        chosen = _guard_mask(s, p, row, active, shift) if code[row, GUARD] >= 0 else active
        s.executed += 1
        q.issued[row] += 1
        q.lanes[row] += np.int64(_popcount(chosen))
        has_access, moves = False, True
        if kind == BRANCH:
            moves = False
            if not _diverge(s, p, q, warp, row, chosen, active):
                return DEEP
        elif chosen == 0:
            pass
        elif kind == LOAD or kind == STORE:
            has_access = True
            if not _memory(s, p, m, row, chosen, warp, shift):
                return s.status
        elif kind == ATOMIC:
            has_access = True
            if not _atomic(s, p, m, row, chosen, warp, shift):
                return s.status
        elif kind == COPY:
            has_access = True
            if not _copy(s, p, m, row, chosen, warp, shift):
                return s.status
        elif kind == MATRIX:
            has_access = True
            if not _matrix(s, p, m, row, chosen, warp, shift):
                return s.status
        elif kind == MMA:
            _mma(s, p, row, shift, a, b)
        elif kind == EXIT:
            moves = False
            _leave(q, warp, row, chosen)
        elif kind == BARRIER:
            moves = False
            status = _arrive(s, p, q, warp, row, chosen, shift)
            if status != DONE:
                return status
        elif kind == TRAP:
            s.fault_thread = warp * LANES + _lowest(chosen)
            return TRAPPED
        elif kind != NOTHING:
            _compute_row(s, p, row, kind, chosen, warp, shift, lanes)
        if moves:
            stack[warp, top, 0] = row + 1
        if s.in_sample:
            _record(s, p, t, row, chosen, warp, has_access)
        if warps[warp, GONE] or warps[warp, WAITS] >= 0:
            return DONE
    return DONE


@flat
def run(state: Any, p: EncodedProgram, m: Memory, q: Queue, t: Trace, lanes: int, a: Any, b: Any) -> int:
    """Run blocks from `state` on, an array of one STATE. Returns DONE, or why it stopped; after FULL it may go on.

    lanes: 32, not known when this is compiled, so that loops over lanes become vector instructions.
    """
    s = state[0]
    while s.block < s.num_blocks:
        if not s.is_started:
            _begin(s, p, m, q, t)
        while True:
            while s.warp < s.num_warps:
                warp = s.warp
                if not q.warps[warp, GONE] and q.warps[warp, WAITS] < 0:
                    status = _run_warp(s, p, m, q, t, warp, lanes, a, b)
                    if status != DONE:
                        return status
                    s.has_moved = 1
                s.warp += 1
            s.warp = 0
            if s.has_moved:
                s.has_moved = 0
                continue
            if not _release(s, q):
                return DEADLOCK
            is_over = True
            for warp in range(s.num_warps):
                is_over = is_over and q.warps[warp, GONE] == 1
            if is_over:
                break
        s.next_sample += s.in_sample
        s.block, s.is_started = s.block + 1, 0
    return DONE
