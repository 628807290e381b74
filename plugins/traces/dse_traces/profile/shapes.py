"""Shapes of operators as profilers record them (record_shapes), and what they say of a kernel.

A shape is a text, `addmm 8192 4096x8192 8192x1024 bf16`: the operator, the sizes of its tensors, their type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from dse_traces.profile.element_types import PRECISION_BYTES, precision_of

MOST_SHAPE = 160
"""Characters of a shape."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_scaled_mm")
_SUMMED = ("addmm", "baddbmm")
"""Operators whose first tensor is what the product is added to: a bias, or matrices."""
_TRANSPOSED = ("linear",)
"""Operators whose second matrix is stored with a row for each output."""


@dataclass(frozen=True)
class Product:
    """Sizes of C[m, n] = A[m, k] B[k, n], `batch` at once."""

    m: int
    n: int
    k: int
    batch: int


@dataclass(frozen=True)
class OperatorShape:
    """An operator, the sizes of its tensors, and the type of their elements."""

    operator: str
    tensors: tuple[tuple[int, ...], ...]
    precision: str

    @property
    def product(self) -> Product | None:
        """The product of matrices that it is, or None."""
        # a bias is a vector: addmm has it first, linear last
        matrices = [tensor for tensor in self.tensors if len(tensor) >= 2]
        if self.operator not in _PRODUCTS or len(matrices) < 2:
            return None
        # the summand may be a matrix as well, so the last two are the factors
        a, b = matrices[-2:] if self.operator in _SUMMED else matrices[:2]
        inner, n = (b[-1], b[-2]) if self.operator in _TRANSPOSED else (b[-2], b[-1])
        # sizes that do not match: a transposed view, whose strides are not recorded
        if a[-1] != inner:
            return None
        batch = prod(b[:-2])
        # leading sizes of A are rows of one product, unless B has a batch as well
        return Product(prod(a[:-1]) // max(batch, 1), n, inner, batch)

    @property
    def traffic_bytes(self) -> int:
        """Bytes of all inputs, and of a result as large as the largest of them."""
        sizes = [prod(tensor) for tensor in self.tensors]
        # each input is read once, and a result is written
        return PRECISION_BYTES[self.precision] * (sum(sizes) + max(sizes, default=0))


def shape_text(name: Any, sizes: Any, types: Any) -> str | None:
    """The shape of an operator by its name, `Input Dims` and `Input type`; None for what is no such thing.

    >>> shape_text("aten::mm", [[4096, 1024], [1024, 512]], ["c10::BFloat16", "c10::BFloat16"])
    'mm 4096x1024 1024x512 bf16'
    """
    if not isinstance(name, str) or not isinstance(sizes, list) or not isinstance(types, list):
        return None
    kind = next((precision for precision in map(precision_of, types) if precision), None)
    try:
        tensors = ["x".join(map(_size, tensor)) for tensor in sizes if isinstance(tensor, list) and tensor]
    except (TypeError, ValueError):
        return None
    text = " ".join([name.rpartition("::")[2].replace(" ", "_"), *tensors, str(kind)])
    return text if kind and tensors and len(text) <= MOST_SHAPE else None


def _size(value: Any) -> str:
    """A whole number from 1 on as a text. Raises TypeError or ValueError."""
    # True is an int for Python
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
        raise ValueError
    return str(value)


@lru_cache(maxsize=1 << 16)
def parse_shape(text: str) -> OperatorShape | None:
    """The shape that a text is, or None.

    >>> parse_shape("mm 4096x1024 1024x512 bf16").product
    Product(m=4096, n=512, k=1024, batch=1)
    """
    operator, *tensors, precision = text.split(" ")
    try:
        sizes = [tuple(map(int, tensor.split("x"))) for tensor in tensors]
    except ValueError:
        return None
    return OperatorShape(operator, tuple(sizes), precision) if precision in PRECISION_BYTES and _plain(sizes) else None


def _plain(sizes: Sequence[tuple[int, ...]]) -> bool:
    # sizes come from text: none of them may overflow a product
    return bool(sizes) and all(0 < size < 1 << 40 for tensor in sizes for size in tensor)
