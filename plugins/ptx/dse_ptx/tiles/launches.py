"""Launches of products on matrices of NumPy, and what they should give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_ptx.arguments import Argument, Pointer
from dse_ptx.execution import LaunchOptions, LaunchRun, Module, PtxDevice
from dse_ptx.tensor_map import TensorMap
from dse_ptx.tiles.products import NAME, product_text
from dse_ptx.tiles.shape import STEP, ProductKernel

Floats = NDArray[np.float64]
_CHUNK = 64
"""Rows and columns of a box of C."""


def to_kind(values: NDArray[Any], kind: str) -> NDArray[Any]:
    """Numbers as they lie in memory: f16, bf16 (bits, rounded to the nearest even), or f32."""
    if kind != "bf16":
        return values.astype(np.float16 if kind == "f16" else np.float32)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_kind(stored: NDArray[Any], kind: str) -> Floats:
    """Numbers of an array as it lies in memory."""
    if kind != "bf16":
        return stored.astype(np.float64)
    return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class ProductSize:
    """A product of [m, k] and [k, n]. group: rows of tiles that are filled together."""

    m: int
    n: int
    k: int
    group: int = 8


def grid_of(of: ProductKernel, size: ProductSize, blocks: int = 0) -> tuple[int, int, int]:
    """Blocks along m, n and k; of a persistent kernel so many (4 by default)."""
    return (blocks or 4, 1, 1) if of.persistent else (size.m // of.rows, size.n // of.columns, of.parts)


def product_arguments(
    of: ProductKernel, size: ProductSize, pointers: tuple[Pointer, Pointer, Pointer], bias: Argument = 0
) -> list[Argument]:
    """Arguments of the kernel. pointers: A, B and C."""
    a, b, c = pointers
    left = TensorMap(a, 2, (size.k, size.m), of.a_box[::-1], of.swizzle)
    shape = (size.n, size.k) if of.turned else (size.k, size.n)
    right = TensorMap(b, 2, shape, of.b_box[::-1], 128 if of.turned else of.swizzle)
    out = TensorMap(c, 2, (size.n, size.m), (_CHUNK, _CHUNK), 128)
    steps = size.k // STEP // of.parts
    tiles = size.m // of.rows, size.n // of.columns
    return [left.encode(), right.encode(), out.encode(), c, bias, size.n, steps, *tiles, size.group]


def multiply(
    of: ProductKernel, left: Floats, right: Floats, bias: NDArray[np.float32] | None = None
) -> tuple[Floats, LaunchRun]:
    """A [m, k] times B [k, n] by the kernel, from numbers that are rounded to its kind. Raises LaunchError."""
    device, (m, k), n = PtxDevice(), left.shape, right.shape[1]
    size, kind = ProductSize(m, n, k), of.result or of.kind
    a = device.allocate(to_kind(left, of.kind))
    b = device.allocate(to_kind(right if of.turned else np.ascontiguousarray(right.T), of.kind))
    stored = to_kind(np.full((m, n), np.nan), kind)
    c = device.allocate(stored)
    extra: Argument = device.allocate(bias) if bias is not None else 0
    run = Module(product_text(of), device, "product.ptx").launch(
        NAME,
        grid_of(of, size),
        (of.threads,),
        product_arguments(of, size, (a, b, c), extra),
        LaunchOptions(of.shared_bytes),
    )
    return from_kind(device.read(c, stored.dtype, (m, n)), kind), run


def expected(of: ProductKernel, left: Floats, right: Floats, bias: NDArray[np.float32] | None = None) -> Floats:
    """What the kernel should give before it rounds, in double precision, from factors that are rounded."""
    a, b = (from_kind(to_kind(factor, of.kind), of.kind) for factor in (left, right))
    total = a @ b
    if bias is not None:
        total = total + bias.astype(np.float64)
    if of.after == "relu":
        total = np.maximum(total, 0.0)
    if of.after == "gelu":
        inner = math.sqrt(2 / math.pi) * (total + 0.044715 * total**3)
        total = total / 2 * (1 + np.tanh(inner))
    return np.asarray(total)


def error_in_steps(found: Floats, exact: Floats, kind: str) -> float:
    """Largest error beyond that of rounding the result to its kind, in steps of fp16 at the largest result."""
    most = float(abs(exact).max())
    step = 2.0 ** (math.floor(math.log2(most)) - 10)
    digits = {"f16": 10, "bf16": 7}.get(kind, 23)
    exponents = np.maximum(np.floor(np.log2(np.maximum(abs(exact), 2.0**-126))), -14 if kind == "f16" else -126)
    rounding = 2.0 ** (exponents - digits) / 2
    return max(float((abs(found - exact) - rounding).max() / step), 0.0) if np.isfinite(found).all() else math.inf
