"""Numbers of PTX's types by exact arithmetic: integers of Python, and fractions that are rounded once."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

from dse_ptx.program import TYPE_BYTES

_FORMATS = {"f16": (10, -14, 15), "bf16": (7, -126, 127), "f32": (23, -126, 127), "f64": (52, -1022, 1023)}
"""Digits after the first, smallest and largest exponent."""
NAN = float("nan")


def bits_of(kind: str) -> int:
    """Bits of a type; 1 of a predicate."""
    return 1 if kind == "pred" else 8 * TYPE_BYTES[kind]


def is_float(kind: str) -> bool:
    """Return whether numbers of a type are floating-point numbers."""
    return kind in _FORMATS


def decode(word: int, kind: str) -> int | float:
    """The number that bits stand for."""
    bits = bits_of(kind)
    word &= (1 << bits) - 1
    if kind == "f64":
        return float(struct.unpack("<d", struct.pack("<Q", word))[0])
    if is_float(kind):
        digits, smallest, _ = _FORMATS[kind]
        sign, exponent = -1.0 if word >> (bits - 1) else 1.0, (word >> digits) & ((1 << (bits - 1 - digits)) - 1)
        fraction = word & ((1 << digits) - 1)
        if exponent == (1 << (bits - 1 - digits)) - 1:
            return NAN if fraction else sign * math.inf
        # a normal number has a hidden leading digit; a subnormal one the smallest exponent without it
        units = fraction + ((1 << digits) if exponent else 0)
        return sign * math.ldexp(units, max(exponent, 1) - 1 + smallest - digits)
    return word - (1 << bits) if kind[0] == "s" and word >> (bits - 1) else word


def encode(number: float | Fraction, kind: str, towards_zero: bool = False) -> int:
    """Bits of a number: integers modulo their size, others rounded to the nearest even (or towards zero)."""
    bits = bits_of(kind)
    if not is_float(kind):
        return int(number) % (1 << bits)
    digits, smallest, largest = _FORMATS[kind]
    infinity = ((1 << (bits - 1 - digits)) - 1) << digits
    if isinstance(number, float) and not math.isfinite(number):
        return infinity | ((1 << digits) - 1) if number != number else infinity | (1 << (bits - 1) if number < 0 else 0)
    is_negative = math.copysign(1.0, number) < 0 if isinstance(number, float) else number < 0
    magnitude = abs(Fraction(number))
    exponent = smallest
    if magnitude:
        exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, smallest)
        # lengths of numerator and denominator give the exponent or one less
        exponent += magnitude >= Fraction(2) ** (exponent + 1)
    scaled = magnitude / Fraction(2) ** (exponent - digits)
    # Python rounds a Fraction to the nearest even
    units = math.floor(scaled) if towards_zero else round(scaled)
    word = units + ((exponent - smallest) << digits)  # a carry, and the hidden digit, become the exponent's
    if exponent > largest or word >= infinity:
        # truncation ends at the largest finite number
        word = infinity - towards_zero
    return word | (1 << (bits - 1) if is_negative else 0)


def fused_sum(a: float, b: float, c: float) -> float | Fraction:
    """a * b + c before it is rounded."""
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact:
            return exact
        product = -0.0 if math.copysign(1.0, a) * math.copysign(1.0, b) < 0 else 0.0
        # zeros keep the sign of their sum; an exact cancellation is +0
        return product + c if not (a and b) and not c else 0.0
    # with finite a and b an infinite c decides, even if their product overflows
    return times(a, b) + c if math.isfinite(c) or not (math.isfinite(a) and math.isfinite(b)) else c


def times(a: float, b: float) -> float:
    """A product whose overflow is no error."""
    return NAN if (math.isinf(a) and b == 0) or (math.isinf(b) and a == 0) else a * b


def plus(a: float, b: float) -> float | Fraction:
    """a + b before it is rounded."""
    if math.isfinite(a) and math.isfinite(b) and (a or b):
        exact = Fraction(a) + Fraction(b)
        return exact if exact else 0.0
    return a + b


def product(a: float, b: float) -> float | Fraction:
    """a * b before it is rounded."""
    return Fraction(a) * Fraction(b) if math.isfinite(a) and math.isfinite(b) and a and b else times(a, b)


def quotient(a: float, b: float) -> float | Fraction:
    """a / b before it is rounded."""
    if math.isfinite(a) and math.isfinite(b) and a and b:
        return Fraction(a) / Fraction(b)
    if b == 0:
        sign = math.copysign(1.0, a) * math.copysign(1.0, b)
        return NAN if a == 0 or a != a else sign * math.inf
    return a / b


def divide(a: int, b: int, bits: int) -> tuple[int, int]:
    """Quotient towards zero and rest; of a division by zero all ones and the dividend."""
    if b == 0:
        return (1 << bits) - 1, a
    units = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return units, a - units * b


def integral(number: float, mode: str) -> float:
    """A number rounded to an integer by `rni`, `rzi`, `rmi` or `rpi`."""
    if not math.isfinite(number):
        return number
    units = math.floor(number)
    rounded = {"rni": round(number), "rzi": int(number), "rmi": units, "rpi": -math.floor(-number)}[mode]
    # -0.3 becomes -0
    return math.copysign(float(rounded), number)


def clamp(number: float, kind: str) -> int:
    """The nearest integer of a type; 0 for what is no number."""
    bits = bits_of(kind)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    if number != number:
        return 0
    if math.isinf(number):
        return high if number > 0 else low
    return min(max(int(number), low), high)
