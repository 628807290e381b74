"""Block formats of low precision: shared microexponents (MX9, MX6, MX4) and OCP MX, bit by bit.

A block of `block` values along one axis shares a scale 2^X; each sub-block of `sub_block` values is shifted down by its
own t bits, 0 <= t < 2^sub_bits; an element is a number P of few bits. A value is P x 2^(X - t).

OCP MX v1.0 (Open Compute Project, Microscaling Formats specification, 2023): X = floor(log2(largest magnitude)) - emax
with emax the exponent of the element's largest number, stored with a bias of 127, 0xFF for NaN; elements are FP8, FP6,
FP4 or INT8; no sub-blocks. That specification leaves open the rounding of elements and the treatment of infinities and
NaN. Here and in its reference implementation (microsoft/microxcaling) elements saturate, INT8 does not use -128, and
all of a block is NaN if it contains an infinity or a NaN, or if its scale is too large. Rounding is to nearest, ties to
even (an option of the reference implementation).

Shared microexponents (arXiv:2302.08007, ISCA 2023): an 8-bit exponent for 16 values, one bit t for two, sign and
mantissa of m bits, of weights 2^0 to 2^(1-m). t is 1 if both values are below 2^X. The published paper leaves open the
rounding, the saturation and the storage of a block's exponent, and has no NaN: we follow OCP MX. AMD Quark 0.13, which
implements MX6 and MX9, agrees for finite values, except that it flushes subnormal inputs and lets infinities through.

Scales are powers of two, so that all arithmetic here is exact except for the rounding of elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from dse.units import Integer
from dse.values import Frozen
from simulators.hardware.sourced import Sourced

Codes = NDArray[np.uint8]
Reals = NDArray[np.float64]
_BELOW_ALL = -(2**20)  # exponent of zero


class Element(Frozen):
    """A number with sign, exponent and mantissa; without an exponent, an integer.

    mantissa_bits: without the hidden bit of floats; of integers all bits but the sign, of weights 2^0, 2^-1, ... top:
    meaning of the codes with the largest exponent: numbers (`all`), numbers except the last, which is NaN (`nan`), or
    infinity and NaN (`ieee`). negative: a sign bit, or two's complement.
    """

    exponent_bits: Annotated[Integer, Field(ge=0, le=6)]
    mantissa_bits: Annotated[Integer, Field(ge=0, le=7)]
    top: Literal["all", "nan", "ieee"] = "all"
    negative: Literal["sign", "complement"] = "sign"

    @model_validator(mode="after")
    def _is_a_number(self) -> Element:
        integer = not self.exponent_bits
        if not 2 <= self.bits <= 8:
            raise ValueError(f"has {self.bits} bits with its sign; give it 2 to 8")
        if integer and self.top != "all":
            raise ValueError(f"top = {self.top}: an integer (exponent_bits = 0) has no NaN; leave top out")
        if not integer and self.negative == "complement":
            raise ValueError("negative = complement is for integers; leave it out, or use exponent_bits: 0")
        return self

    @property
    def bits(self) -> int:
        """Bits of an element, including the sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_exponent(self) -> int:
        """Smallest exponent of normal numbers, which subnormal ones share; 0 for integers."""
        return 2 - (1 << self.exponent_bits >> 1) if self.exponent_bits else 0

    @property
    def fraction_bits(self) -> int:
        """Bits of weight below 2^exponent."""
        return self.mantissa_bits if self.exponent_bits else self.mantissa_bits - 1

    @property
    def largest_code(self) -> int:
        """Largest code of a finite magnitude."""
        codes = 1 << self.exponent_bits + self.mantissa_bits
        return codes - {"all": 1, "nan": 2, "ieee": 1 + (1 << self.mantissa_bits)}[self.top]

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest finite magnitude (emax)."""
        return (self.largest_code >> self.mantissa_bits) - 1 + self.smallest_exponent if self.exponent_bits else 0

    def encode(self, values: Reals) -> Codes:
        """Encode finite values as the nearest numbers, ties to even; too large values saturate."""
        magnitude = np.abs(values)
        low, high = self.smallest_exponent, self.largest_exponent
        exponent = np.clip(_exponent(magnitude), low, high)
        steps = np.rint(np.ldexp(magnitude, self.fraction_bits - exponent))
        code = np.minimum((exponent - low) * (1 << self.mantissa_bits) + steps, self.largest_code).astype(np.int64)
        if self.negative == "complement":
            return np.asarray(np.where(values < 0, -code, code) & ((1 << self.bits) - 1), np.uint8)
        return np.asarray(code | np.signbit(values).astype(np.int64) << (self.bits - 1), np.uint8)

    def numbers(self) -> Reals:
        """Number of each code [2 ** bits]."""
        if self.negative == "complement":
            codes = np.arange(1 << self.bits)
            signed = (codes - (codes >> (self.bits - 1) << self.bits)).astype(np.float64)
            return np.asarray(np.ldexp(signed, -self.fraction_bits))
        magnitude = self._magnitudes()
        return np.concatenate([magnitude, -magnitude])

    def _magnitudes(self) -> Reals:
        code = np.arange(1 << self.bits - 1)
        if not self.exponent_bits:
            return np.asarray(np.ldexp(code.astype(np.float64), -self.fraction_bits))
        field, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        significand = mantissa + np.where(field > 0, 1 << self.mantissa_bits, 0)
        power = np.maximum(field, 1) - 1 + self.smallest_exponent - self.mantissa_bits
        magnitudes: Reals = np.ldexp(significand.astype(np.float64), power)
        magnitudes[self.largest_code + 1 :] = np.nan
        if self.top == "ieee":
            magnitudes[self.largest_code + 1] = np.inf
        return magnitudes


class Format(Sourced):
    """A block format. scale_bits: bits of a block's shared exponent. sub_bits: bits of the shift of each sub-block."""

    name: str
    description: str = ""
    block: Annotated[Integer, Field(ge=1, le=4096)]
    scale_bits: Annotated[Integer, Field(ge=2, le=8)]
    sub_block: Annotated[Integer, Field(ge=1, le=4096)] = 1
    sub_bits: Annotated[Integer, Field(ge=0, le=4)] = 0
    element: Element

    @model_validator(mode="after")
    def _sub_blocks_fill_blocks(self) -> Format:
        if self.block % self.sub_block:
            raise ValueError(f"block = {self.block} is no multiple of sub_block = {self.sub_block}; change either")
        return self

    @property
    def bits_per_element(self) -> float:
        """Bits of an element with its share of the scale and of the shift: m + 2 for MX9, MX6 and MX4."""
        return self.element.bits + self.scale_bits / self.block + self.sub_bits / self.sub_block

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element with its share of the scale and of the shift."""
        return self.bits_per_element / 8

    @property
    def bias(self) -> int:
        """Bias of a stored scale over its exponent."""
        return (1 << self.scale_bits - 1) - 1

    @property
    def nan_scale(self) -> int:
        """Stored scale of a block that is NaN."""
        return (1 << self.scale_bits) - 1


@dataclass(frozen=True)
class Encoded:
    """Values stored in a block format.

    scales [..., blocks], sub_scales [..., blocks, block / sub_block], elements [..., blocks, block], with the axis of
    blocks moved last. shape: shape of the values. The last block is padded with zeros.
    """

    format: Format
    axis: int
    shape: tuple[int, ...]
    scales: Codes
    sub_scales: Codes
    elements: Codes


def quantise(values: ArrayLike, format: Format, axis: int = -1) -> Encoded:
    """Quantise values [any shape] in blocks along `axis`.

    A matrix product needs blocks along the axis that it sums over: W [k, n] needs axis 0 in Y = X W, and axis 1, which
    is another copy, in dX = dY W^T.

    Raises ValueError if there is no such axis.
    """
    array = np.asarray(values, np.float64)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis = {axis}: values of shape {array.shape} have no such axis; use 0 to {array.ndim - 1}")
    blocks = _blocks(np.moveaxis(array, axis, -1), format.block)
    finite = np.asarray(np.isfinite(blocks).all(-1))
    blocks = np.where(finite[..., None], blocks, 0.0)
    wanted = _exponent(np.abs(blocks).max(-1)) - format.element.largest_exponent
    scale = np.clip(wanted, -format.bias, format.bias)
    shift = _shifts(blocks, scale, format)
    power = scale[..., None] - np.repeat(shift, format.sub_block, -1)
    good = finite & (wanted <= format.bias)
    elements = format.element.encode(np.where(good[..., None], np.ldexp(blocks, -power), 0.0))
    scales = np.where(good, scale + format.bias, format.nan_scale).astype(np.uint8)
    return Encoded(format, axis, array.shape, scales, shift.astype(np.uint8), elements)


def dequantise(encoded: Encoded) -> Reals:
    """Values [shape that was encoded] of the codes."""
    format = encoded.format
    power = encoded.scales.astype(np.int64) - format.bias
    power = power[..., None] - np.repeat(encoded.sub_scales.astype(np.int64), format.sub_block, -1)
    values = np.asarray(np.ldexp(format.element.numbers()[encoded.elements], power))
    values[encoded.scales == format.nan_scale] = np.nan
    last = values.reshape(*values.shape[:-2], -1)[..., : encoded.shape[encoded.axis]]
    return np.ascontiguousarray(np.moveaxis(last, -1, encoded.axis))


def _blocks(values: Reals, block: int) -> Reals:
    """Reshape [..., n] to [..., ceil(n / block), block], padded with zeros."""
    missing = -values.shape[-1] % block
    filled = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return filled.reshape(*values.shape[:-1], -1, block)


def _shifts(blocks: Reals, scale: NDArray[np.int64], format: Format) -> NDArray[np.int64]:
    """Shift of each sub-block [..., blocks, subs] below its block, limited to its bits."""
    parts = blocks.reshape(*blocks.shape[:-1], -1, format.sub_block)
    below = scale[..., None] + format.element.largest_exponent - _exponent(np.abs(parts).max(-1))
    return np.asarray(np.clip(below, 0, (1 << format.sub_bits) - 1), np.int64)


def _exponent(magnitude: Reals) -> NDArray[np.int64]:
    """Exact floor(log2(x)); below every other exponent for 0."""
    return np.asarray(np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, _BELOW_ALL), np.int64)
