"""Results of instructions of one thread, by the text of NVIDIA's "PTX ISA" (section 9.7), in exact arithmetic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from dse_ptx.checking import numbers as num
from dse_ptx.program import Instruction

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    **{
        "eq": operator.eq,
        "ne": operator.ne,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
    },
    **{"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge},
}
_MATH: Mapping[str, Callable[[float], float]] = {
    # Python raises OverflowError where IEEE gives infinity; below 2^-1100 even double precision has 0
    "ex2": lambda a: 0.0 if a < -1100 else math.inf if a >= 1024 else 2.0**a,
    "lg2": lambda a: -math.inf if a == 0 else math.log2(a) if a > 0 else num.NAN,
    "sin": lambda a: math.sin(a) if math.isfinite(a) else num.NAN,
    "cos": lambda a: math.cos(a) if math.isfinite(a) else num.NAN,
    "tanh": math.tanh,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else num.NAN,
    "rsqrt": lambda a: float(num.quotient(1.0, math.sqrt(a))) if a >= 0 else num.NAN,
}


def compare(word: str, a: Any, b: Any) -> bool:
    """A comparison; those of unordered numbers are true where one is none."""
    unordered = a != a or b != b
    if word in ("num", "nan"):
        return bool(unordered == (word == "nan"))
    if word[:-1] in _COMPARE and word.endswith("u"):
        return unordered or bool(_COMPARE[word[:-1]](a, b))
    return not unordered and bool(_COMPARE[word](a, b))


def result(instruction: Instruction, words: Sequence[int]) -> int:
    """Bits of the result of an instruction that reads registers alone. words: bits of its operands."""
    name, kind = instruction.name, instruction.types[-1]
    if name == "cvt":
        return convert(instruction, words)
    if name in ("selp", "slct"):
        # `slct` names the type of its third operand last
        chosen = words[2] & 1 if name == "selp" else num.decode(words[2], kind) >= 0
        return words[0 if chosen else 1] & ((1 << num.bits_of(instruction.types[0])) - 1)
    if kind.endswith("x2"):
        half = kind.removesuffix("x2")
        # halves are computed apart, without a carry between them
        low, high = ([(word >> shift) & 0xFFFF for word in words] for shift in (0, 16))
        return float_result(instruction, half, low) | float_result(instruction, half, high) << 16
    if num.is_float(kind):
        return float_result(instruction, kind, words)
    return integer(instruction, kind, words)


def float_result(instruction: Instruction, kind: str, words: Sequence[int]) -> int:
    """Bits of a floating-point result."""
    name, names = instruction.name, instruction.modifiers
    a, b, c = ([float(num.decode(word, kind)) for word in words] + [0.0] * 3)[:3]
    if "ftz" in names:
        # subnormal inputs count as zeros of their sign
        a, b, c = (math.copysign(0.0, entry) if abs(entry) < 2.0**-126 else entry for entry in (a, b, c))
    exact: Any
    if name in ("add", "sub"):
        exact = num.plus(a, b if name == "add" else -b)
    elif name in ("fma", "mad"):
        exact = num.fused_sum(a, b, c)
    elif name in ("mul", "div", "rcp"):
        exact = num.product(a, b) if name == "mul" else num.quotient(*((a, b) if name == "div" else (1.0, a)))
    elif name in ("min", "max"):
        exact = _extreme(a, b, name, "NaN" in names)
    elif name in ("neg", "abs", "copysign"):
        # the sign bit itself, which a decoded NaN has lost
        sign = -1.0 if words[0] >> (num.bits_of(kind) - 1) & 1 else 1.0
        exact = {"neg": -a, "abs": abs(a), "copysign": math.copysign(b, sign)}[name]
    else:
        # approximations of PTX are rounded from double precision in both interpreters
        exact = _MATH[name](a) if a == a else a
    if "sat" in names:
        exact = min(exact, 1.0) if exact > 0 else 0.0
    if "relu" in names:
        exact = exact if exact != exact or exact > 0 else 0.0
    word = num.encode(exact, kind)
    # a result that is subnormal after rounding keeps its sign alone
    if "ftz" in names and abs(float(num.decode(word, kind))) < 2.0**-126:
        word &= 1 << (num.bits_of(kind) - 1)
    return word


def _extreme(a: float, b: float, name: str, propagates: bool) -> float:
    if a != a or b != b:
        return num.NAN if propagates or (a != a and b != b) else b if a != a else a
    # -0 counts as less than +0
    if a == b == 0:
        signs = (math.copysign(1.0, a), math.copysign(1.0, b))
        return 0.0 * (min(signs) if name == "min" else max(signs))
    return min(a, b) if name == "min" else max(a, b)


def integer(instruction: Instruction, kind: str, words: Sequence[int]) -> int:
    """Bits of an integer result."""
    name, bits = instruction.name, num.bits_of(kind)
    mask, raw = (1 << bits) - 1, [*words, 0, 0, 0]
    if name in _FORMS:
        return _FORMS[name](instruction, kind, raw)
    a, b = (int(num.decode(word, kind)) for word in raw[:2])
    results: Mapping[str, Callable[[], int]] = {
        "mov": lambda: a,
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "min": lambda: min(a, b),
        "max": lambda: max(a, b),
        "abs": lambda: abs(a),
        "neg": lambda: -a,
        "not": lambda: -1 - a,
        "and": lambda: int(a & b),
        "or": lambda: a | b,
        "xor": lambda: a ^ b,
        "cnot": lambda: int(a == 0),
        "sad": lambda: abs(a - b) + raw[2],
        "div": lambda: num.divide(a, b, bits)[0],
        "rem": lambda: num.divide(a, b, bits)[1],
        # counts are not decoded: they have no sign
        "shl": lambda: raw[0] << raw[1] if raw[1] < bits else 0,
        "shr": lambda: a >> min(raw[1], bits),
        "popc": (raw[0] & mask).bit_count,
        "clz": lambda: bits - (raw[0] & mask).bit_length(),
        "brev": lambda: int(f"{raw[0] & mask:0{bits}b}"[::-1], 2),
        "bfind": lambda: (~a if a < 0 else a).bit_length() - 1,  # -1: none
    }
    return results[name]() & (0xFFFFFFFF if name in ("popc", "clz", "bfind") else mask)


def _product(instruction: Instruction, kind: str, raw: Sequence[int]) -> int:
    """`mul` and `mad`."""
    names, bits, adds = instruction.modifiers, num.bits_of(kind), instruction.name == "mad"
    a, b, c = (int(num.decode(word, kind)) for word in raw[:3])
    if "wide" in names:
        # the addend is not decoded: its type is twice as wide
        return (a * b + (raw[2] if adds else 0)) & ((1 << 2 * bits) - 1)
    part = (a * b) >> bits if "hi" in names else a * b
    return (part + (c if adds else 0)) & ((1 << bits) - 1)


def _insert(instruction: Instruction, kind: str, raw: Sequence[int]) -> int:
    """`bfi`."""
    first, count = raw[2] & 255, raw[3] & 255
    window = (((1 << count) - 1) << first) & ((1 << num.bits_of(kind)) - 1)
    return (raw[1] & ~window) | ((raw[0] << first) & window)


def _looked_up(instruction: Instruction, kind: str, raw: Sequence[int]) -> int:
    """`lop3`."""
    ones = 0
    for bit in range(32):
        # three input bits spell the place of the answer in the table
        place = 4 * (raw[0] >> bit & 1) + 2 * (raw[1] >> bit & 1) + (raw[2] >> bit & 1)
        ones |= (raw[3] >> place & 1) << bit
    return ones


def _permute(instruction: Instruction, kind: str, raw: Sequence[int]) -> int:
    """`prmt`."""
    pool = raw[0].to_bytes(4, "little") + raw[1].to_bytes(4, "little")
    picks = [(raw[2] >> 4 * k) & 15 for k in range(4)]
    # bit 3 of a pick asks for the sign of the byte instead
    return sum((255 * (pool[p & 7] >> 7) if p & 8 else pool[p]) << 8 * k for k, p in enumerate(picks))


def _funnel(instruction: Instruction, kind: str, raw: Sequence[int]) -> int:
    """`shf`."""
    count = min(raw[2], 32) if "clamp" in instruction.modifiers else raw[2] & 31
    both = raw[1] << 32 | raw[0]
    return (both << count >> 32 if "l" in instruction.modifiers else both >> count) & 0xFFFFFFFF


def _dot(instruction: Instruction, kind: str, raw: Sequence[int]) -> int:
    """`dp4a`."""
    first, second = (entry[0] + "8" for entry in instruction.types)
    terms = [int(num.decode(raw[0] >> 8 * k, first)) * int(num.decode(raw[1] >> 8 * k, second)) for k in range(4)]
    return (raw[2] + sum(terms)) & 0xFFFFFFFF


def _field(instruction: Instruction, kind: str, raw: Sequence[int]) -> int:
    """`bfe`, bit by bit as the manual defines it."""
    bits, first, count = num.bits_of(kind), raw[1] & 255, raw[2] & 255
    top = bits - 1
    # bits beyond the field repeat its highest one, or the operand's if the field reaches beyond
    sign = 0 if kind[0] == "u" or count == 0 else (raw[0] >> min(first + count - 1, top)) & 1
    word = sign * ((1 << bits) - 1)
    for bit in range(min(count, bits)):
        if first + bit <= top:
            word = (word & ~(1 << bit)) | ((raw[0] >> (first + bit)) & 1) << bit
    return word


_FORMS: Mapping[str, Callable[[Instruction, str, Sequence[int]], int]] = {
    **dict.fromkeys(("mul", "mad"), _product),
    "bfe": _field,
    "bfi": _insert,
    "lop3": _looked_up,
    "prmt": _permute,
    "shf": _funnel,
    "dp4a": _dot,
}


def convert(instruction: Instruction, words: Sequence[int]) -> int:
    """Bits of a conversion."""
    names, target, source = instruction.modifiers, instruction.types[0], instruction.types[-1]
    if target.endswith("x2"):
        half = target.removesuffix("x2")
        a, b = (float(num.decode(word, source)) for word in words)
        if "relu" in names:
            a, b = (0.0 if entry <= 0 else entry for entry in (a, b))
        return num.encode(a, half, "rz" in names) << 16 | num.encode(b, half, "rz" in names)
    value: Any = num.decode(words[0], source)
    if target == "tf32":
        return _tf32(words[0], names)
    mode = next((entry for entry in names if entry in ("rni", "rzi", "rmi", "rpi")), "")
    if num.is_float(source) and mode:
        value = num.integral(value, mode)
    if not num.is_float(target):
        # from floating point PTX clamps always, between integers by `.sat` alone
        if num.is_float(source) or "sat" in names:
            value = num.clamp(value, target)
        return int(value)
    # an integer 0 is +0
    if not num.is_float(source) and value == 0:
        value = 0.0
    if "sat" in names:
        value = min(value, 1.0) if value > 0 else 0.0
    if "relu" in names and value <= 0:
        value = 0.0
    return num.encode(value if isinstance(value, float) else Fraction(value), target, "rz" in names)


def _tf32(word: int, names: Sequence[str]) -> int:
    """A number whose last 13 digits are rounded away: ties away from zero by `rna`, to even by `rn`."""
    value = float(num.decode(word, "f32"))
    if not math.isfinite(value):
        return word & 0xFFFFE000
    down, remainder = word & ~0x1FFF, word & 0x1FFF
    is_up = remainder >= 0x1000 if "rna" in names else remainder > 0x1000 or (remainder == 0x1000 and word & 0x2000)
    return (down + (0x2000 if is_up else 0)) & 0xFFFFFFFF
