"""Block formats of low precision: shared microexponents (MX9, MX6, MX4) and OCP MX, as numbers of bits.

A block of `block` values along one axis shares a scale 2^X; each sub-block of `sub_block` values is shifted down by its
own t bits, 0 <= t < 2^sub_bits; an element is a number P of few bits. A value is P x 2^(X - t).

OCP MX v1.0 (Open Compute Project, Microscaling Formats specification, 2023): elements are FP8, FP6, FP4 or INT8, no
sub-blocks. Shared microexponents (arXiv:2302.08007, ISCA 2023): an 8-bit exponent for 16 values, one bit t for two,
sign and mantissa of m bits.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dse.values import Frozen
from dse.values.units import Integer
from simulators.hardware.parts import SourcedValue


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


class Format(SourcedValue):
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
