"""The compiled interpreter: a launch's clusters one after another, warps of a cluster in turns, 32 lanes at once.

Registers hold 64 bits a lane, filled up with zeros; predicates are registers of 0 or 1, constants registers that all
warps share. An instruction reads its operands into arrays of 32 lanes, computes all lanes, and stores those that are
active. Divergence is a stack of (instruction, where the lanes meet again, lanes) for each warp: the top runs.

Where PTX leaves results open: approximations are rounded from double precision, `mma` and `wgmma` sum products in
double precision and round once, lanes of an atomic operation follow one another, `cp.async`, bulk copies and `wgmma`
are done at once, and a warp runs until a barrier, its end, or for `_QUANTUM` instructions before the next one does. A
wait for an mbarrier lets others run first: it answers that the phase goes on where nobody else can go on, `_PATIENCE`
times in a row, before it is taken for a deadlock.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_ptx import bulk, mbarriers, vm, warpgroups
from dse_ptx.fused import fma
from dse_ptx.vm import (
    A_ADD,
    A_AND,
    A_CAS,
    A_EXCH,
    A_INC,
    A_MAX,
    A_MIN,
    A_OR,
    A_XOR,
    ABS,
    ADD,
    ALL,
    AND,
    AND_Z,
    AT_CLUSTER,
    AT_MBARRIER,
    ATOMIC,
    BARRIER,
    BF16,
    BFE,
    BFI,
    BFIND,
    BITS,
    BRANCH,
    BREV,
    BULK,
    BYTES,
    C_ARRIVE,
    CAME,
    CLUSTER_SYNC,
    CLZ,
    CNOT,
    CONVERT,
    COPY,
    COUNT,
    DEADLOCK,
    DEADLOCK_CLUSTER,
    DEADLOCK_MBARRIER,
    DEEP,
    DIV,
    DIVERGENT,
    DONE,
    DOWN,
    DP4A,
    ENDED,
    ENDLESS,
    EQ,
    EQU,
    EXIT,
    EXPECTED,
    F16,
    F32,
    F64,
    FABS,
    FADD,
    FCOPYSIGN,
    FCOS,
    FDIV,
    FEX2,
    FFMA,
    FIRST,
    FLAGS,
    FLG2,
    FLOAT,
    FMAX,
    FMIN,
    FMUL,
    FNEG,
    FORMAT,
    FRCP,
    FRSQRT,
    FSETP,
    FSIN,
    FSQRT,
    FSUB,
    FTESTP,
    FTZ,
    FULL,
    GLOBAL,
    GONE,
    GT,
    GUARD,
    IDX,
    INT,
    INTEGER,
    INTEGRAL,
    KIND,
    LANES,
    LE,
    LOAD,
    LOP3,
    LT,
    MAD,
    MAD_HI,
    MAP_RANK,
    MATRIX,
    MAX,
    MAY_FAIL,
    MBARRIER,
    MBARRIER_WAIT,
    MEETS,
    MIN,
    MMA,
    MODE,
    MOV,
    MUL,
    MUL_HI,
    NAMED_BARRIERS,
    NAN,
    NE,
    NEG,
    NEGATED,
    NOT,
    NOT_Z,
    NOTHING,
    NUM,
    OFFSET,
    OP,
    OR,
    OR_Z,
    OWES,
    PACK,
    PACKED,
    POPC,
    PRMT,
    PROPAGATE,
    READS,
    RELU,
    REM,
    RM,
    RNA,
    RP,
    RZ,
    SAD,
    SAMPLE,
    SAT,
    SEEN,
    SELP,
    SETP,
    SHARED,
    SHF_L,
    SHF_R,
    SHL,
    SHR,
    SHUFFLE,
    SLCT,
    SOURCE,
    SPACE,
    SPECIAL,
    STORE,
    SUB,
    TARGET,
    TF32,
    TILE,
    TOP,
    TRAP,
    TRAPPED,
    UNMATCHED,
    UP,
    V_ACTIVE,
    V_ALL,
    V_ANY,
    V_BALLOT,
    V_ELECT,
    V_REDUX,
    V_UNI,
    VOTE,
    WAITS,
    WATCHED,
    WGMMA,
    WRITES,
    XOR,
    XOR_Z,
    EncodedProgram,
    Ints,
    Memory,
    Queue,
    Trace,
    Words,
    X,
    Y,
    Z,
)
from simulators.compiled import flat_over, inline_never

# warp instructions of a turn: a warp that spins on memory lets those it waits for run in the end
_QUANTUM = 1 << 14
_PATIENCE = 1000


@inline_never
def _read(file: Words, base: int, bits: int, x: Words, sx: Ints, lanes: int) -> None:
    """Read an operand of all lanes; with `bits`, the sign of so many is extended, or zeros if they are negative."""
    if bits == 0 or bits == 64:
        for i in range(lanes):
            x[i] = file[base + i]
    elif bits < 0:
        mask = vm.mask_of(-bits)
        for i in range(lanes):
            x[i] = file[base + i] & mask
    else:
        # shifted up and down again: the arithmetic shift copies the sign into the upper bits
        up = 64 - bits
        for i in range(lanes):
            sx[i] = (np.int64(file[base + i]) << up) >> up


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
    # schoolbook product of halves of 32 bits; q and r carry what overflows 32 bits
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    p = (a & low) * (b & low)
    q = (a >> half) * (b & low) + (p >> half)
    r = (a & low) * (b >> half) + (q & low)
    return (a >> half) * (b >> half) + (q >> half) + (r >> half)


@inline_never
def _compares(mode: int, a: Any, b: Any) -> bool:
    """Compare two numbers; those from EQU on are true where one is not a number."""
    if mode >= EQU:
        # only what is no number differs from itself
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
            # shifts by the number of bits or more leave zero in PTX, and are undefined on the machine
            out[i] = x[i] << y[i] if y[i] < np.uint64(bits) else np.uint64(0)
    elif op == SHR and is_signed:
        for i in range(lanes):
            # beyond the highest bit the sign fills all
            out[i] = np.uint64(sx[i] >> min(sy[i] & 0xFFFFFFFF, 63))
    elif op == SHR:
        for i in range(lanes):  # see SHL
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
            # the negative modulo 2^64; the caller cuts it to the operation's bits
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
            # operands of 32 bits or fewer fit a product of 64 bits; of 64 bits the halves are multiplied
            if bits == 64:
                r = _high(a, b)
                if is_signed:
                    # the signed product is the unsigned one less 2^64 b where a < 0, and 2^64 a where b < 0
                    r -= (b if sx[i] < 0 else np.uint64(0)) + (a if sy[i] < 0 else np.uint64(0))
            else:
                r = np.uint64((sx[i] * sy[i]) >> bits) if is_signed else (a * b) >> np.uint64(bits)
            r += c if op == MAD_HI else np.uint64(0)
        elif op == DIV or op == REM:
            r = _divide(a, b, sx[i], sy[i], is_signed, op == REM)
        elif op == CNOT:
            r = np.uint64(a == np.uint64(0))  # PTX: 1 for 0, and 0 otherwise
        elif op == SAD:
            is_less = sx[i] < sy[i] if is_signed else a < b
            # the absolute difference, added to c
            r = c + (b - a if is_less else a - b)
        elif op == SLCT:
            r = a if sz[i] >= 0 else b
        elif op == BFE:
            # PTX reads eight bits of the position and of the length
            r = _extract(a, sx[i], np.int64(b & np.uint64(255)), np.int64(c & np.uint64(255)), bits, is_signed)
        elif op == POPC:
            r = vm.popcount(a)
        elif op == CLZ:
            r = np.uint64(_leading_zeros(a, bits))
        elif op == BREV:
            for bit in range(bits):
                r |= ((a >> np.uint64(bit)) & np.uint64(1)) << np.uint64(bits - 1 - bit)
        elif op == BFIND:
            # of a negative number the highest bit that differs from the sign is sought
            r = ~a & vm.mask_of(bits) if is_signed and sx[i] < 0 else a & vm.mask_of(bits)
            r = np.uint64(bits - 1 - _leading_zeros(r, bits)) if r else np.uint64(0xFFFFFFFF)  # none: all ones
        out[i] = r


@inline_never
def _divide(a: Any, b: Any, sa: int, sb: int, is_signed: bool, wants_rest: bool) -> Any:
    """Quotient towards zero, or its rest; all ones where the divisor is zero."""
    # PTX leaves a division by zero to the machine
    if b == np.uint64(0):
        return a if wants_rest else np.uint64(0xFFFFFFFFFFFFFFFF)
    if not is_signed:
        return a % b if wants_rest else a // b
    # magnitudes are divided without signs, so that the lowest number has one too; the rest has the dividend's sign
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
        return (a >> np.uint64(first) if first < 64 else np.uint64(0)) & vm.mask_of(min(count, 64))
    field = sa >> min(first, 63)
    # the field ends at the highest bit: its sign is that of its last bit within the operand
    up = 64 - min(count, bits - first if first < bits else 1)
    return np.uint64(field if first >= bits else (field << up) >> up)


@inline_never
def _three(s: Any, p: EncodedProgram, op: int, bits: int, mode: int, base: int, lanes: int) -> None:
    """Operations on bits of three operands; base: of a fourth one in the file."""
    x, y, z, out = s.x, s.y, s.z, s.out
    for i in range(lanes):
        a, b, c, r = x[i], y[i], z[i], np.uint64(0)
        if op == LOP3:
            # k spells a combination of three input bits, for which bit k of the table is the result
            for k in range(8):
                if (mode >> k) & 1:
                    r |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        elif op == PRMT:
            # eight bytes; a nibble of c picks one of them, its highest bit replicates the byte's sign instead
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
                # the field is cut at the highest bit of the operand
                window = vm.mask_of(min(count, bits - low)) << np.uint64(low)
                r = (b & ~window) | ((a << np.uint64(low)) & window)
        elif op == DP4A:
            r = c
            for k in range(4):
                first = (a >> np.uint64(8 * k)) & np.uint64(255)
                second = (b >> np.uint64(8 * k)) & np.uint64(255)
                r += _byte(first, mode & 1) * _byte(second, mode & 2)
        else:
            # wrap takes the count modulo 32, clamp lets it be 32 at most
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
    mask = vm.mask_of(bits)
    for i in range(lanes):
        out[i] &= mask


@inline_never
def _combine(s: Any, flags: int, true: Any, lanes: int) -> None:
    """Combine comparisons with a third operand; `at` keeps the inverse for the second result of `setp`."""
    for i in range(lanes):
        p, c = s.out[i], (s.z[i] ^ np.uint64((flags & NOT_Z) != 0))
        # the second result combines the inverse of the comparison with the third operand
        q = p ^ np.uint64(1)
        if flags & AND_Z:
            p, q = p & c, q & c
        elif flags & OR_Z:
            p, q = p | c, q | c
        elif flags & XOR_Z:
            p, q = p ^ c, q ^ c
        s.out[i], s.at[i] = true if p else np.uint64(0), q


@inline_never
def _to_half(f: Any) -> Any:
    """Round to the nearest number of 16 bits (binary16), ties to even."""
    bits = np.int64(vm.single_bits(f))
    sign, a = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if a > 0x7F800000:  # no number: the one pattern that PTX writes
        return np.uint64(0x7FFF)
    if a >= 0x477FF000:  # from halfway above 65504 on: infinity
        return np.uint64(sign | 0x7C00)
    if a < 0x38800000:  # below 2^-14: units of 2^-24, rounded by the machine to the nearest even
        return np.uint64(sign | np.int64(np.rint(abs(np.float64(f)) * 2.0**24)))
    # half a unit less one, plus the last bit that stays: ties go to even, and a carry raises the exponent
    return np.uint64(sign | ((a + 0xFFF + ((a >> 13) & 1) - 0x38000000) >> 13))


@inline_never
def _to_brain(f: Any) -> Any:
    """Round to the nearest number of 16 bits (bfloat16), ties to even."""
    bits = np.int64(vm.single_bits(f))
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return np.uint64(0x7FFF)
    # bfloat16 is the upper half of single precision
    return np.uint64((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@inline_never
def _round_to(value: float, digits: int, smallest: int, towards_zero: bool) -> float:
    """Round to so many binary digits after the first; smallest: exponent of a normal number."""
    if value == 0.0 or not math.isfinite(value):
        return value
    _, exponent = math.frexp(value)
    # frexp gives a mantissa below one, so that the exponent of the leading digit is one less
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
    # two-sum of Knuth: the error of s is exact
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = np.int64(vm.double_bits(s))
    if math.isfinite(s) and error != 0.0 and not bits & 1:
        # odd: the last bit is set where the sum is inexact, by one step towards the true value
        bits += 1 if (error > 0.0) == (s > 0.0) else -1
        return vm.double(bits)
    return s


@inline_never
def _to_float(x: Words, shift: int, kind: int, f: NDArray[np.float32], flags: int, lanes: int) -> None:
    """Read numbers of 16 or 32 bits as single precision."""
    down = np.uint64(shift)
    if kind == F32 or kind == TF32:
        for i in range(lanes):
            f[i] = vm.single(x[i])
    elif kind == BF16:
        for i in range(lanes):
            f[i] = vm.single(((x[i] >> down) & np.uint64(0xFFFF)) << np.uint64(16))
    else:
        for i in range(lanes):
            f[i] = vm.from_half(np.int64((x[i] >> down) & np.uint64(0xFFFF)))
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
        # a comparison that fails for what is no number, which becomes 0
        value = min(value, np.float32(1.0)) if value > np.float32(0.0) else np.float32(0.0)
    if flags & RELU and value <= np.float32(0.0):
        value = np.float32(0.0)
    if kind == F16:
        return _to_half(value)
    if value != value:
        return np.uint64(0x7FFFFFFF if kind == F32 else 0x7FFF)  # the number that PTX has for none
    return _to_brain(value) if kind == BF16 else np.uint64(vm.single_bits(value))


@inline_never
def _from_double(value: float) -> Any:
    """Bits of a result in double precision; one that is no number has the same bits always."""
    return np.uint64(0x7FFFFFFFFFFFFFFF) if value != value else vm.double_bits(value)


@inline_never
def _least(a: Any, b: Any, sign: Any, propagate: bool) -> Any:
    """The smaller of two numbers (of both, times `sign`); one that is none counts only with `propagate`."""
    if a != a or b != b:
        if propagate:
            return a + b
        return b if a != a else a
    # equal numbers: of zeros with different signs the negative one is the smaller
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
        return math.sqrt(a) if a >= 0.0 else a * np.nan  # -0.0 passes, as it is not below 0
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
            s.dx[i], s.dy[i], s.dz[i] = vm.double(s.x[i]), vm.double(s.y[i]), vm.double(s.z[i])
        _compute(op, flags, s.dx, s.dy, s.dz, s.do, lanes)
        for i in range(lanes):
            out[i] = _from_double(s.do[i])
        return
    for shift in range(0, 32 if flags & PACKED else 16, 16):
        _to_float(s.x, shift, kind, s.fx, flags, lanes)
        _to_float(s.y, shift, kind, s.fy, flags, lanes)
        _to_float(s.z, shift, kind, s.fz, flags, lanes)
        # rounded once from double precision; by way of single precision a multiply-add would be rounded twice
        if op == FFMA and kind != F32:
            digits, smallest = (10, -14) if kind == F16 else (7, -126)
            for i in range(lanes):
                exact = _odd_fma(np.float64(s.fx[i]), np.float64(s.fy[i]), np.float64(s.fz[i]))
                s.fo[i] = _round_to(exact, digits, smallest, False)
        else:
            _compute(op, flags, s.fx, s.fy, s.fz, s.fo, lanes)
        if flags & FTZ and kind == F32:
            _flush(s.fo, lanes)
        # the upper half is computed second and put above the lower one
        for i in range(lanes):
            bits = _from_float(s.fo, kind, flags, i) << np.uint64(shift)
            out[i] = out[i] | bits if shift else bits


@inline_never
def _float_compare(s: Any, p: EncodedProgram, row: int, lanes: int) -> None:
    """`setp` and `testp` of floating-point numbers."""
    code, mode, kind, flags = p.code, p.code[row, MODE], p.code[row, FORMAT], p.code[row, FLAGS]
    if kind == F64:
        for i in range(lanes):
            s.dx[i], s.dy[i] = vm.double(s.x[i]), vm.double(s.y[i])
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
    # the smallest normal numbers of single and double precision
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
    # limits are powers of two, which double precision holds; 2^64 - 1 it does not
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if is_signed else (0.0, 2.0**bits)
    if value != value:
        return np.uint64(0)
    if value >= high:
        return vm.mask_of(bits - 1) if is_signed else vm.mask_of(bits)
    if value <= low:
        return np.uint64(1) << np.uint64(bits - 1) if is_signed else np.uint64(0)
    # from 2^63 on a conversion with a sign would overflow
    return np.uint64(np.int64(value)) if value < 2.0**63 else np.uint64(value)


@inline_never
def _convert(s: Any, p: EncodedProgram, row: int, lanes: int) -> None:
    """`cvt`: MODE rounds; BITS and X are those of the result and the source where they are integers."""
    code, x, out = p.code, s.x, s.out
    source, target, mode, flags = code[row, SOURCE], code[row, FORMAT], code[row, MODE], code[row, FLAGS]
    bits, is_signed = code[row, BITS], code[row, Y] > 0
    if source == INT and target == INT:
        # OFFSET and BYTES hold the limits of the target for `.sat`
        low, high = code[row, OFFSET], code[row, BYTES]
        for i in range(lanes):
            out[i] = np.uint64(min(max(s.sx[i], low), high)) if flags & SAT else x[i]
            out[i] &= vm.mask_of(bits)
        return
    if source == F64:
        for i in range(lanes):
            s.dx[i] = vm.double(x[i])
    elif source != INT:
        _to_float(x, 0, source, s.fx, flags, lanes)
        for i in range(lanes):
            s.dx[i] = np.float64(s.fx[i])
    for i in range(lanes):
        if source == INT:
            # integers have two ways: f64 from all bits, f32 by one rounding from the integer, not by way of f64
            s.dx[i] = np.float64(s.sx[i]) if code[row, X] > 0 else np.float64(x[i])
            s.fo[i] = np.float32(s.sx[i]) if code[row, X] > 0 else np.float32(x[i])
        elif flags & INTEGRAL:
            s.dx[i] = _integral(s.dx[i], mode)
            s.fo[i] = np.float32(s.dx[i])
        else:
            s.fo[i] = np.float32(s.dx[i])
        if target == INT:
            out[i] = _to_integer(_integral(s.dx[i], mode), bits, is_signed) & vm.mask_of(bits)
        elif target == F64:
            out[i] = _from_double(s.dx[i])
        elif target == TF32:
            # 13 of the 23 digits are cut; `rna` rounds ties away from zero, `rn` to even
            raw = np.uint64(vm.single_bits(s.fo[i]))
            up = np.uint64(0x1000) if mode == RNA else np.uint64(0xFFF) + ((raw >> np.uint64(13)) & np.uint64(1))
            out[i] = (raw + up if math.isfinite(s.fo[i]) else raw) & np.uint64(0xFFFFE000)
        else:
            if target != F32:
                digits, smallest = (10, -14) if target == F16 else (7, -126)
                rounded = _round_to(s.dx[i], digits, smallest, mode == RZ)
                # truncation does not overflow: the largest half stands for all above it
                if mode == RZ and target == F16 and math.isfinite(rounded):
                    rounded = min(max(rounded, -65504.0), 65504.0)
                s.fo[i] = np.float32(rounded)
            out[i] = _from_float(s.fo, target, flags, i)


@inline_never
def _convert_pair(s: Any, p: EncodedProgram, row: int, lanes: int) -> None:
    """`cvt` of two numbers to a packed pair, the first in the upper half."""
    _convert(s, p, row, lanes)
    # `_convert` reads x: the first result is kept in `at`, and the second source moves to x
    for i in range(lanes):
        s.at[i], s.x[i] = s.out[i], s.y[i]
    _convert(s, p, row, lanes)
    for i in range(lanes):
        s.out[i] |= s.at[i] << np.uint64(16)


@inline_never
def _memory(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """Loads and stores of up to eight elements, lane by lane. False where an access fails."""
    code, kind, size, count = p.code, p.code[row, KIND], p.code[row, BYTES], p.code[row, COUNT]
    first, space, sign = code[row, FIRST], code[row, SPACE], code[row, X]
    values = first if kind == LOAD else first + 1  # the address is the first that is read
    source = vm.base(s, p, first + code[row, WRITES], shift)
    mask = vm.mask_of(code[row, BITS])
    for lane in range(LANES):
        if not (active >> lane) & 1:
            # lanes that are not active have the address 0 in a trace
            s.at[lane] = np.uint64(0)
            continue
        thread, address = warp * LANES + lane, np.int64(p.file[source + lane]) + code[row, OFFSET]
        place = vm.locate(s, m, space, address, size * count, thread)
        s.at[lane] = np.uint64(vm.trace_address(s, space, address, thread))
        if place < 0:
            return vm.fault(s, place, address, thread)
        for k in range(count):
            value = vm.base(s, p, values + k, shift) + lane
            if kind == LOAD:
                word = vm.get(m, place + k * size, size)
                if sign:
                    # sign extension, cut to the register's bits
                    word = np.uint64((np.int64(word) << (64 - sign)) >> (64 - sign)) & mask
                p.file[value] = word
            else:
                vm.put(m, place + k * size, size, p.file[value])
    return True


@inline_never
def _copy(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """`cp.async`: copy bytes from global to shared memory; what lies beyond the source's size becomes 0."""
    code, size, first = p.code, p.code[row, BYTES], p.code[row, FIRST]
    to, source = vm.base(s, p, first, shift), vm.base(s, p, first + 1, shift)
    lengths = vm.base(s, p, first + 2, shift)
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
        if not (active >> lane) & 1:
            continue
        thread = warp * LANES + lane
        length = min(np.int64(p.file[lengths + lane]), size)
        target, address = np.int64(p.file[to + lane]) + code[row, OFFSET], np.int64(p.file[source + lane])
        address += code[row, TARGET]
        place = vm.locate(s, m, SHARED, target, size, thread)
        if place < 0:
            return vm.fault(s, place, target, thread)
        origin = 0
        if length > 0:
            origin = (
                vm.locate(s, m, GLOBAL, address, size, thread)
                # a shorter source may be aligned to less than the whole
                if length == size
                else vm.locate(s, m, GLOBAL, address, 1, thread)
            )
            if origin < 0:
                return vm.fault(s, origin, address, thread)
            s.at[lane] = np.uint64(address)  # what reads nothing is not traced
        for byte in range(size):
            m.m8[place + byte] = m.m8[origin + byte] if byte < length else 0
    return True


@inline_never
def _update(op: int, kind: int, old: Any, b: Any, c: Any, bits: int) -> Any:
    """The value that an atomic operation stores. bits: negative where the numbers have signs."""
    if kind == F32:
        return np.uint64(vm.single_bits(vm.single(old) + vm.single(b)))
    if kind == F64:
        return vm.double_bits(vm.double(old) + vm.double(b))
    if kind == F16:
        # 24 digits are 2 x 11 + 2: a sum of halves that is rounded twice is rounded right (Figueroa, 1995)
        return _to_half(vm.from_half(np.int64(old)) + vm.from_half(np.int64(b)))
    if op == A_ADD:
        return old + b
    if op == A_MIN or op == A_MAX:
        # numbers are shifted to the top, where their sign is that of 64 bits
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
        # increments wrap from b to 0, decrements from 0 to b
        return np.uint64(0) if old >= b else old + np.uint64(1)
    return b if old == np.uint64(0) or old > b else old - np.uint64(1)


@inline_never
def _atomic(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """`atom` and `red`, lane after lane."""
    code, size, first, writes = p.code, p.code[row, BYTES], p.code[row, FIRST], p.code[row, WRITES]
    source, operand = vm.base(s, p, first + writes, shift), vm.base(s, p, first + writes + 1, shift)
    third = vm.base(s, p, first + writes + 2, shift) if code[row, READS] > 2 else operand
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
        if not (active >> lane) & 1:
            continue
        thread, address = warp * LANES + lane, np.int64(p.file[source + lane]) + code[row, OFFSET]
        s.at[lane] = np.uint64(vm.trace_address(s, code[row, SPACE], address, thread))
        place = vm.locate(s, m, code[row, SPACE], address, size, thread)
        if place < 0:
            return vm.fault(s, place, address, thread)
        old = vm.get(m, place, size)
        new = _update(code[row, OP], code[row, FORMAT], old, p.file[operand + lane], p.file[third + lane], code[row, X])
        vm.put(m, place, size, new)
        if writes:  # `red` has no result
            p.file[vm.base(s, p, first, shift) + lane] = old
    return True


@inline_never
def _matrix(s: Any, p: EncodedProgram, m: Memory, row: int, active: int, warp: int, shift: int) -> bool:
    """`ldmatrix`: 8x8 matrices of 16-bit elements; lane 8 j + i gives the address of row i of matrix j."""
    code, first, count = p.code, p.code[row, FIRST], p.code[row, COUNT]
    source = vm.base(s, p, first + count, shift)
    for lane in range(LANES):
        s.at[lane] = np.uint64(0)
    for j in range(count):
        to = vm.base(s, p, first + j, shift)
        for lane in range(LANES):
            s.z[lane] = np.uint64(0)
        for i in range(8):
            lane = 8 * j + i
            address = np.int64(p.file[source + lane]) + code[row, OFFSET]
            place = vm.locate(s, m, code[row, SPACE], address, 16, warp * LANES + lane)
            s.at[lane] = np.uint64(vm.trace_address(s, code[row, SPACE], address, 0))
            if place < 0:
                return vm.fault(s, place, address, warp * LANES + lane)
            for k in range(8):
                element = np.uint64(m.m16[(place >> 1) + k])
                # lane 4 i + k / 2 holds elements k and k + 1 of row i; transposed, of column i
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
def _mma(s: Any, p: EncodedProgram, row: int, shift: int, a: Any, b: Any) -> None:
    """`mma.sync` m16n8 and m8n8: D = A B + C, fragments as in PTX ISA, section 9.7.14.5; COUNT: registers of A.

    An accumulator of FORMAT is rounded once, after a sum in double precision; one of double precision after each term.
    MODE: numbers in a register. BYTES: rows over 8. X, Y: whether A and B have signs. OP: 1 counts bits that differ.
    """
    code, kind, first, rows = p.code, p.code[row, SOURCE], p.code[row, FIRST], p.code[row, COUNT]
    target, count, halves = p.code[row, FORMAT], p.code[row, MODE], p.code[row, BYTES]
    results, bits, across = code[row, WRITES], 32 // count, rows // halves
    # k of the product: four lanes of a row hold `count` numbers in each of `across` registers
    depth = 4 * count * across
    for lane in range(LANES):
        # the lane's row of A or column of B, and its place along k
        group, member = lane >> 2, lane & 3
        for r in range(rows):
            word = p.file[vm.base(s, p, first + results + r, shift) + lane]
            for i in range(count):
                at = (group + 8 * (r % halves)) * depth + count * member + i + 4 * count * (r // halves)
                a[at] = vm.element(word, kind, i, bits, code[row, X])
        for r in range(across):
            word = p.file[vm.base(s, p, first + results + rows + r, shift) + lane]
            for i in range(count):
                b[group * depth + count * member + i + 4 * count * r] = vm.element(word, kind, i, bits, code[row, Y])
    # each lane accumulates two neighbouring columns of its row, in one or two halves of eight rows
    for lane in range(LANES):
        group, member = lane >> 2, lane & 3
        for half in range(halves):
            packed = np.uint64(0)
            for i in range(2):
                # two accumulators of f16 share a register
                index = half if target == F16 else 2 * half + i
                word = p.file[vm.base(s, p, first + results + rows + across + index, shift) + lane]
                total = vm.double(word) if target == F64 else 0.0
                for k in range(depth):
                    x, y = a[(group + 8 * half) * depth + k], b[(2 * member + i) * depth + k]
                    if target == F64:
                        total = fma(x, y, total)
                    else:
                        # bits: x xor y = x + y - 2 x y for 0 and 1, x and y = x y
                        total += x + y - 2 * x * y if code[row, OP] else x * y
                if target == F64:
                    packed = vm.double_bits(total)
                elif target == F16:
                    total += np.float64(vm.from_half(np.int64((word >> np.uint64(16 * i)) & np.uint64(0xFFFF))))
                    packed |= _to_half(np.float32(_round_to(total, 10, -14, False))) << np.uint64(16 * i)
                elif target == F32:
                    total += np.float64(vm.single(word))
                    packed = np.uint64(vm.single_bits(total))
                else:
                    packed = np.uint64(_accumulated(np.int64(total), word, code[row, FLAGS])) & np.uint64(0xFFFFFFFF)
                # kept behind A until all sums are there: D may be the registers of C
                a[TILE + 4 * lane + index] = vm.double(packed)
    for lane in range(LANES):
        for r in range(results):
            p.file[vm.base(s, p, first + r, shift) + lane] = vm.double_bits(a[TILE + 4 * lane + r])


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
        # c of `shfl`: bits 8 to 12 mask the segment, bits 0 to 4 bound the lane
        segment, clamp = (c >> 8) & 31, c & 31
        low = lane & segment
        most = low | (clamp & ~segment)
        other = lane - b if mode == UP else lane + b if mode == DOWN else lane ^ b
        if mode == IDX:
            other = low | (b & ~segment)
        # `up` reads lanes below, so its bound is the lowest lane; the others' is the highest
        inside = other >= most if mode == UP else other <= most
        # out of range: a lane keeps its own value
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
            chosen = vm.lowest(active)
            s.out[lane], s.at[lane] = np.uint64(chosen), np.uint64(lane == chosen)
            if mode:  # the lane's number is not wanted
                s.out[lane] = s.at[lane]
        else:
            same = 0
            # all lanes with the same word are named, the lane itself too
            for other in range(LANES):
                same |= (1 << other) if (active >> other) & 1 and s.x[other] == s.x[lane] else 0
            s.out[lane] = np.uint64(same)


@inline_never
def _special(s: Any, mode: int, warp: int, lanes: int) -> None:
    """Special registers, numbered as in `instructions.SPECIAL_REGISTERS`."""
    for lane in range(lanes):
        thread, value = warp * LANES + lane, 0
        if mode < 3:
            # threads count along x first, then y, then z
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
            # eq, lt, le, gt, ge
            masks = (1 << lane, (1 << lane) - 1, (2 << lane) - 1, ALL & ~((2 << lane) - 1), ALL & ~((1 << lane) - 1))
            value = masks[mode - 15]
        elif mode == 20:
            value = s.executed
        elif mode == 21:
            value = s.shared_size
        elif 24 <= mode < 36:
            # of the cluster: its place in the grid, clusters, the block's place in it, blocks of it
            axis, grid, blocks = mode % 3, s.nctaid, s.cluster_dim
            below = 1 if axis == 0 else grid[0] if axis == 1 else grid[0] * grid[1]
            place = (s.block // below) % grid[axis]
            answers = (place // blocks[axis], grid[axis] // blocks[axis], place % blocks[axis], blocks[axis])
            value = answers[(mode - 24) // 3]
        elif mode == 36:
            value = s.rank
        elif mode == 37:
            value = s.cluster_size
        elif mode == 38:
            value = s.cluster_size > 1
        s.out[lane] = np.uint64(value)


@inline_never
def _begin(s: Any, p: EncodedProgram, m: Memory, q: Queue, t: Trace) -> None:
    """Reset the warps of a cluster, their registers and their memory."""
    count = s.num_warps
    # registers of a block begin as zeros here; hardware leaves them undefined
    p.file[LANES * s.num_constants :] = 0
    m.m8[s.shared_first : s.shared_first + s.shared_stride * s.cluster_size] = 0
    m.m8[s.local_first : s.local_first + s.local_stride * s.cluster_size] = 0
    q.arrivals[:] = 0
    for warp in range(count):
        present = min(s.num_threads - warp % s.block_warps * LANES, LANES)
        # the last warp may have fewer than 32 threads; -1: the lowest entry meets nowhere
        q.stack[warp, 0, 0], q.stack[warp, 0, 1], q.stack[warp, 0, 2] = 0, -1, (1 << present) - 1
        for field in range(len(q.warps[warp])):
            q.warps[warp, field] = 0
        q.warps[warp, WAITS] = -1
        q.warps[warp, SAMPLE] = _sampled(t.sample, s.cluster * s.cluster_size + warp // s.block_warps)
    for rank in range(s.cluster_size):
        s.live[rank] = s.block_warps
    s.is_started, s.warp, s.has_moved = 1, 0, 0
    s.idle_turns, s.waiting = 0, 0


@inline_never
def _sampled(sample: Ints, block: int) -> int:
    """Place of a block among those that are recorded, or -1."""
    low, high = 0, len(sample)
    while low < high:
        middle = (low + high) // 2
        if sample[middle] < block:
            low = middle + 1
        else:
            high = middle
    return low if low < len(sample) and sample[low] == block else -1


@inline_never
def _turn_to(s: Any, q: Queue, warp: int) -> None:
    """Let the state be of the block of a warp: its place in the grid and in memory."""
    s.rank = warp // s.block_warps
    s.dispatched = s.cluster * s.cluster_size + s.rank
    s.shared_at = s.shared_first + s.rank * s.shared_stride
    s.local_at = s.local_first + s.rank * s.local_stride
    s.in_sample = q.warps[warp, SAMPLE] >= 0
    s.block, rest, within, below = 0, s.cluster, s.rank, 1
    for axis in range(3):
        # x runs fastest, among the clusters of a grid as among the blocks of a cluster
        blocks, clusters = s.cluster_dim[axis], s.nctaid[axis] // s.cluster_dim[axis]
        s.block += below * (rest % clusters * blocks + within % blocks)
        rest, within, below = rest // clusters, within // blocks, below * s.nctaid[axis]


@inline_never
def _open_cluster(s: Any, q: Queue) -> bool:
    """Open the barrier of a cluster if all of its warps that live have come (PTX ISA, section 9.7.13.3)."""
    has_come = False
    for warp in range(s.num_warps):
        has_come = has_come or q.warps[warp, CAME] == 1
        if not q.warps[warp, GONE] and not q.warps[warp, CAME]:
            return False
    for warp in range(s.num_warps):
        q.warps[warp, CAME] = 0
        if q.warps[warp, WAITS] == AT_CLUSTER:
            q.warps[warp, WAITS] = -1
    return has_come


@inline_never
def _release(s: Any, q: Queue) -> bool:
    """Open the barriers for which all have come. False where warps wait and none opens."""
    is_open = True
    if _open_cluster(s, q):
        return True
    for warp in range(s.num_warps):
        name, rank = q.warps[warp, WAITS], warp // s.block_warps
        if name < 0:
            continue
        is_open = False
        # the last that waits is named in the error; one that waits for an mbarrier has noted what lacks
        if name >= NAMED_BARRIERS:
            continue
        # a count of threads, given in whole warps by PTX; without one all warps that live are awaited
        expected = (q.warps[warp, EXPECTED] + LANES - 1) // LANES or s.live[rank]
        if q.arrivals[rank * NAMED_BARRIERS + name] >= expected:
            for other in range(rank * s.block_warps, (rank + 1) * s.block_warps):
                if q.warps[other, WAITS] == name:
                    q.warps[other, WAITS] = -1
            q.arrivals[rank * NAMED_BARRIERS + name] = 0
            return True
    return is_open


@inline_never
def _blame(s: Any, p: EncodedProgram, m: Memory, q: Queue) -> int:
    """Name a warp that waits for ever; return the status: what it waits at."""
    status = DEADLOCK
    for warp in range(s.num_warps):
        if q.warps[warp, WAITS] >= 0:
            _turn_to(s, q, warp)
            is_waiting, top = q.warps[warp, WAITS] == AT_MBARRIER, q.warps[warp, TOP]
            s.pc = q.stack[warp, top, 0] - (0 if is_waiting else 1)
            s.fault_thread = warp % s.block_warps * LANES
            status = DEADLOCK_CLUSTER if q.warps[warp, WAITS] == AT_CLUSTER else DEADLOCK
            if is_waiting:  # of several reasons that of an mbarrier says most: what lacks is noted
                active = q.stack[warp, top, 2] & ~q.warps[warp, ENDED]
                mbarriers.is_shut(s, p, m, s.pc, active, warp % s.block_warps, warp * s.num_registers)
                return DEADLOCK_MBARRIER
    return status


@inline_never
def _diverge(s: Any, p: EncodedProgram, q: Queue, warp: int, row: int, taken: int, active: int) -> bool:
    """Split the lanes of a warp at a branch. False where the stack overflows."""
    top, stack, meets = q.warps[warp, TOP], q.stack, p.code[row, MEETS]
    target, remaining = p.code[row, TARGET], active & ~taken
    # uniform: no entry is needed
    if taken == active or taken == 0:
        stack[warp, top, 0] = target if taken else row + 1
        return True
    if stack[warp, top, 1] == meets:
        top -= 1  # lanes that are there already are in the entry below
    else:
        stack[warp, top, 0] = meets
    # the lower entry falls through, the upper one branches: it runs first
    for side in range(2):
        place, lanes = (row + 1, remaining) if side == 0 else (target, taken)
        # a side that leads to the meeting place at once has nothing to run
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
    to = vm.base(s, p, p.code[row, FIRST], shift)
    if active == ALL:
        for i in range(LANES):
            p.file[to + i] = s.out[i]
    else:
        for i in range(LANES):
            if (active >> i) & 1:
                p.file[to + i] = s.out[i]
    if p.code[row, WRITES] > 1:
        to = vm.base(s, p, p.code[row, FIRST] + 1, shift)
        for i in range(LANES):
            if (active >> i) & 1:
                p.file[to + i] = s.at[i]


@inline_never
def _record(s: Any, p: EncodedProgram, q: Queue, t: Trace, row: int, active: int, warp: int, has_access: bool) -> None:
    """Append a row to the recording; the caller has seen to room."""
    place, access = s.rows, s.accesses
    t.pcs[place], t.active[place], t.access[place] = row, active, -1
    t.owner[place] = q.warps[warp, SAMPLE] * s.block_warps + warp % s.block_warps
    if has_access:
        t.access[place] = access
        for lane in range(LANES):
            t.addresses[access * LANES + lane] = s.at[lane]
        # LDMATRIX: BYTES is a row of 16 bytes for each lane, whatever the number of matrices
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
        _read(p.file, vm.base(s, p, first, shift), code[row, X], s.x, s.sx, lanes)
    if reads > 1:
        # Y of a conversion is a flag of its result, and no width of the second source
        _read(p.file, vm.base(s, p, first + 1, shift), 0 if kind == CONVERT else code[row, Y], s.y, s.sy, lanes)
    if reads > 2:
        _read(p.file, vm.base(s, p, first + 2, shift), code[row, Z], s.z, s.sz, lanes)
    if kind == INTEGER:
        _integer(s, p, row, vm.base(s, p, first + 3, shift) if reads > 3 else 0, lanes)
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
            s.out[i], s.at[i] = s.x[i] & vm.mask_of(code[row, BITS]), s.x[i] >> width
    _write(s, p, row, active, shift)


@inline_never
def _guard_mask(s: Any, p: EncodedProgram, row: int, active: int, shift: int) -> Any:
    """Lanes for which the predicate of an instruction holds."""
    base, negated, mask = vm.base(s, p, p.code[row, GUARD], shift), p.code[row, NEGATED], np.int64(0)
    for lane in range(LANES):
        mask |= np.int64((p.file[base + lane] & np.uint64(1)) ^ np.uint64(negated)) << lane
    return active & mask


@inline_never
def _leave(s: Any, q: Queue, warp: int, row: int, active: int) -> None:
    """End lanes of a warp; those that a predicate spares go on."""
    q.warps[warp, ENDED] |= active
    top = q.warps[warp, TOP]
    q.stack[warp, top, 0] = row + 1
    # entries whose lanes have all ended are dropped
    while top >= 0 and not q.stack[warp, top, 2] & ~q.warps[warp, ENDED]:
        top -= 1
    q.warps[warp, TOP] = top
    if top < 0:
        _end_warp(s, q, warp)


@inline_never
def _end_warp(s: Any, q: Queue, warp: int) -> None:
    """Count a warp out of its block; a cluster's barrier does not wait for it."""
    q.warps[warp, GONE] = 1
    s.live[warp // s.block_warps] -= 1
    s.idle_turns = 0
    _open_cluster(s, q)


@inline_never
def _is_together(s: Any, q: Queue, warp: int, active: int) -> bool:
    """Tell whether all threads of a warp that live are active, as `.aligned` instructions demand; else note one."""
    thread = warp % s.block_warps * LANES
    present = (1 << min(s.num_threads - thread, LANES)) - 1
    absent = present & ~q.warps[warp, ENDED] & ~active
    if absent:
        s.fault_thread = thread + vm.lowest(absent)
    return absent == 0


@inline_never
def _arrive(s: Any, p: EncodedProgram, q: Queue, warp: int, row: int, active: int, shift: int) -> int:
    """A warp comes to a barrier. Returns the status."""
    code, first, top = p.code, p.code[row, FIRST], q.warps[warp, TOP]
    # `bar.sync` is `.aligned`: all threads of a warp that live must come together
    if not _is_together(s, q, warp, active):
        return DIVERGENT
    # 16 barriers of a block
    name = np.int64(p.file[vm.base(s, p, first, shift)]) & (NAMED_BARRIERS - 1)
    if code[row, READS] > 1:  # recorded with its threads; without these all warps of the block come
        for lane in range(LANES):
            s.at[lane] = p.file[vm.base(s, p, first + 1, shift)] << np.uint64(32) | np.uint64(name)
    q.arrivals[s.rank * NAMED_BARRIERS + name] += 1
    q.stack[warp, top, 0] = row + 1
    if not code[row, MODE]:  # `arrive` does not wait
        q.warps[warp, WAITS] = name
        q.warps[warp, EXPECTED] = np.int64(p.file[vm.base(s, p, first + 1, shift)]) if code[row, READS] > 1 else 0
    return DONE


@inline_never
def _meet_cluster(s: Any, p: EncodedProgram, q: Queue, warp: int, row: int, active: int) -> int:
    """`barrier.cluster.arrive` and `.wait` (PTX ISA, section 9.7.13.3). Returns the status."""
    if not _is_together(s, q, warp, active):
        return vm.NOT_ALIGNED
    is_arrival = p.code[row, OP] == C_ARRIVE
    # each wait follows an arrival of its own, and no arrival another one
    if q.warps[warp, OWES] == is_arrival:
        s.fault_thread = warp % s.block_warps * LANES
        return UNMATCHED
    q.warps[warp, OWES] = is_arrival
    q.stack[warp, q.warps[warp, TOP], 0] = row + 1
    if is_arrival:
        q.warps[warp, CAME] = 1
        _open_cluster(s, q)
    elif q.warps[warp, CAME]:  # others have not come
        q.warps[warp, WAITS] = AT_CLUSTER
    return DONE


@inline_never
def _map_rank(s: Any, p: EncodedProgram, row: int, active: int, warp: int, shift: int) -> bool:
    """`mapa` and `getctarank` (PTX ISA, sections 9.7.9.23 and 24). False where there is no such block."""
    code, first = p.code, p.code[row, FIRST] + p.code[row, WRITES]
    source, rank = vm.base(s, p, first, shift), vm.base(s, p, first + 1, shift)
    for lane in range(LANES):
        address = vm.in_cluster(s, code[row, SPACE], np.int64(p.file[source + lane]) + code[row, OFFSET])
        if code[row, OP] == vm.R_RANK:
            s.out[lane] = np.uint64(vm.rank_of(s, address))
            continue
        chosen = np.int64(p.file[rank + lane] & np.uint64(0xFFFFFFFF))
        if chosen >= s.cluster_size and (active >> lane) & 1:
            return vm.refuse(s, vm.BAD_RANK, chosen, warp * LANES + lane)
        offset = address & ((1 << vm.RANK_BITS) - 1)
        s.out[lane] = np.uint64(vm.CLUSTER_WINDOW + (chosen << vm.RANK_BITS) + offset)
    _write(s, p, row, active, shift)
    return True


@inline_never
def _hopper(
    s: Any, p: EncodedProgram, m: Memory, q: Queue, row: int, active: int, warp: int, shift: int, a: Any, b: Any
) -> int:
    """Instructions of Hopper that move on to the next one. Returns the status."""
    kind, mine = p.code[row, KIND], warp % s.block_warps
    if kind == WGMMA:
        if not _is_together(s, q, warp, active):
            return vm.NOT_ALIGNED
        is_right = warpgroups.multiply(s, p, m, row, mine, shift, a, b)
    elif kind == BULK:
        s.idle_turns = 0
        is_right = bulk.copy(s, p, m, q, row, active, mine, shift)
    elif kind == MBARRIER:
        s.idle_turns = 0
        is_right = mbarriers.change(s, p, m, row, active, mine, shift)
    elif kind == MBARRIER_WAIT:
        is_right = mbarriers.test(s, p, m, row, active, mine, shift)
    else:
        is_right = _map_rank(s, p, row, active, mine, shift)
        return DONE if is_right else s.status
    if is_right and p.code[row, WRITES] and kind != WGMMA:
        _write(s, p, row, active, shift)
    return DONE if is_right else s.status


@inline_never
def _run_warp(s: Any, p: EncodedProgram, m: Memory, q: Queue, t: Trace, warp: int, lanes: int, a: Any, b: Any) -> int:
    """Run a warp until it waits, ends, or has had its turn. Returns the status."""
    code, stack, warps = p.code, q.stack, q.warps
    shift, turns, mine = warp * s.num_registers, _QUANTUM, warp % s.block_warps
    _turn_to(s, q, warp)
    while turns > 0:
        top = warps[warp, TOP]
        # lanes that ended stay in the entries of the stack, and are masked here
        row, active = stack[warp, top, 0], stack[warp, top, 2] & ~warps[warp, ENDED]
        # the lanes of this entry have come to where they meet, or have all ended
        if row == stack[warp, top, 1] or active == 0:
            warps[warp, TOP] = top - 1
            if top == 0:
                _end_warp(s, q, warp)
                return DONE
            continue
        turns -= 1
        s.pc, kind = row, code[row, KIND]
        if row == s.watch_pc and s.block == s.watch_block and mine == s.watch_thread // LANES:
            if (active >> (s.watch_thread % LANES)) & 1:
                s.watch_skip -= 1
                if s.watch_skip < 0:
                    return WATCHED
        # checked before anything changes, so that the run goes on with this instruction after `FULL`
        if s.in_sample and (s.rows >= len(t.pcs) or s.accesses >= len(t.sizes)):
            return FULL
        if s.executed >= s.limit:
            return ENDLESS
        chosen = _guard_mask(s, p, row, active, shift) if code[row, GUARD] >= 0 else active
        if kind == MBARRIER_WAIT and chosen and mbarriers.is_shut(s, p, m, row, chosen, mine, shift):
            if not warps[warp, MAY_FAIL]:
                warps[warp, WAITS], warps[warp, SEEN] = AT_MBARRIER, s.progress
                return DONE
            warps[warp, MAY_FAIL], turns = 0, 0  # this wait answers that the phase goes on; the next one waits again
        s.executed += 1
        # a warp instruction counts although its predicate holds for no lane: it was issued
        q.issued[row] += 1
        q.lanes[row] += np.int64(vm.popcount(chosen))
        has_access, moves = False, True
        if kind == BRANCH:
            moves = False
            if not _diverge(s, p, q, warp, row, chosen, active):
                return DEEP
        elif chosen == 0:  # predicated off
            pass
        elif kind == LOAD or kind == STORE:
            has_access = True
            s.idle_turns *= kind == LOAD
            if not _memory(s, p, m, row, chosen, mine, shift):
                return s.status
        elif kind == ATOMIC:
            has_access = True
            s.idle_turns = 0
            if not _atomic(s, p, m, row, chosen, mine, shift):
                return s.status
        elif kind == COPY:
            has_access = True
            if not _copy(s, p, m, row, chosen, mine, shift):
                return s.status
        elif kind == MATRIX:
            has_access = True
            if not _matrix(s, p, m, row, chosen, mine, shift):
                return s.status
        elif kind == MMA:
            _mma(s, p, row, shift, a, b)
        elif kind == EXIT:
            moves = False
            _leave(s, q, warp, row, chosen)
        elif kind == BARRIER or kind == CLUSTER_SYNC:
            moves, has_access = False, kind == BARRIER and code[row, READS] > 1
            status = (
                _arrive(s, p, q, warp, row, chosen, shift)
                if kind == BARRIER
                else _meet_cluster(s, p, q, warp, row, chosen)
            )
            if status != DONE:
                return status
        elif kind == TRAP:
            s.fault_thread = mine * LANES + vm.lowest(chosen)
            return TRAPPED
        elif kind >= MBARRIER:
            has_access = kind != WGMMA and kind != MAP_RANK
            status = _hopper(s, p, m, q, row, chosen, warp, shift, a, b)
            if status != DONE:
                return status
        elif kind != NOTHING:
            _compute_row(s, p, row, kind, chosen, mine, shift, lanes)
        if moves:
            stack[warp, top, 0] = row + 1
        if s.in_sample:
            _record(s, p, q, t, row, chosen, warp, has_access)
        if warps[warp, GONE] or warps[warp, WAITS] >= 0:
            return DONE
    return DONE


@inline_never
def _can_run(s: Any, q: Queue, warp: int) -> bool:
    """Tell whether a warp has not ended and does not wait; at an mbarrier, whether a phase has ended since it came."""
    waits = q.warps[warp, WAITS]
    if waits == AT_MBARRIER and q.warps[warp, SEEN] != s.progress:
        q.warps[warp, WAITS] = waits = -1
    return q.warps[warp, GONE] == 0 and waits < 0


@inline_never
def _let_waits_answer(s: Any, q: Queue) -> bool:
    """Let waits for mbarriers answer that their phases go on, where nobody else can go on. False: nobody waits so, or
    this did not help for long."""
    is_waiting = False
    s.idle_turns += 1
    if s.idle_turns <= _PATIENCE:
        for warp in range(s.num_warps):
            if q.warps[warp, WAITS] == AT_MBARRIER:
                q.warps[warp, WAITS], q.warps[warp, MAY_FAIL], is_waiting = -1, 1, True
    return is_waiting


@flat_over(vm, mbarriers, bulk, warpgroups)
def run(state: Any, p: EncodedProgram, m: Memory, q: Queue, t: Trace, lanes: int, a: Any, b: Any) -> int:
    """Run clusters from `state` on, an array of one STATE. Returns DONE, or why it stopped; after FULL it may go on.

    lanes: 32, not known when this is compiled, so that loops over lanes become vector instructions.
    """
    s = state[0]
    while s.cluster < s.num_clusters:
        if not s.is_started:
            _begin(s, p, m, q, t)
        while True:
            while s.warp < s.num_warps:
                warp = s.warp
                if _can_run(s, q, warp):
                    before = s.executed
                    status = _run_warp(s, p, m, q, t, warp, lanes, a, b)
                    if status != DONE:
                        return status
                    s.has_moved |= s.executed != before
                s.warp += 1
            s.warp = 0
            # something ran: others may go on, before barriers are looked at
            if s.has_moved:
                s.has_moved = 0
                continue
            if s.waiting:
                if not bulk.flush(s, p, m, q):
                    return s.status
                continue
            if not _release(s, q) and not _let_waits_answer(s, q):
                return _blame(s, p, m, q)
            is_over = True
            for warp in range(s.num_warps):
                is_over = is_over and q.warps[warp, GONE] == 1
            if is_over:
                break
        s.cluster, s.is_started = s.cluster + 1, 0
    return DONE
