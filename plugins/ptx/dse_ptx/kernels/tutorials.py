"""Kernels as Triton's tutorials have them: sums, softmax, products, dropout, normalisation, attention, and others."""

from __future__ import annotations

import triton
import triton.language as tl

WARPS = 4


@triton.jit
def vector_add(x, y, out, n, block: tl.constexpr):
    """Sum of two vectors."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    mask = place < n
    tl.store(out + place, tl.load(x + place, mask=mask) + tl.load(y + place, mask=mask), mask=mask)


@triton.jit
def softmax(x, out, columns, block: tl.constexpr):
    """Softmax of a row."""
    row, place = tl.program_id(0), tl.arange(0, block)
    value = tl.load(x + row * columns + place, mask=place < columns, other=-float("inf"))
    # the largest is subtracted, so that no exponential overflows
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * columns + place, power / tl.sum(power, 0), mask=place < columns)


@triton.jit
def matmul(a, b, c, m, n, k, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
           leaky: tl.constexpr):  # fmt: skip
    """Product of matrices in tiles, with or without a leaky rectifier."""
    at_row = tl.program_id(0) * rows + tl.arange(0, rows)
    at_column = tl.program_id(1) * columns + tl.arange(0, columns)
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, k, depth):
        at = start + tl.arange(0, depth)
        left = tl.load(a + at_row[:, None] * k + at[None, :], mask=(at_row[:, None] < m) & (at[None, :] < k), other=0.0)
        right = tl.load(
            b + at[:, None] * n + at_column[None, :], mask=(at[:, None] < k) & (at_column[None, :] < n), other=0.0
        )
        total = tl.dot(left, right, total, input_precision=precision)
    if leaky:
        total = tl.where(total >= 0, total, 0.01 * total)
    inside = (at_row[:, None] < m) & (at_column[None, :] < n)
    tl.store(c + at_row[:, None] * n + at_column[None, :], total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def dropout(x, out, n, rate, seed, block: tl.constexpr):
    """Dropout by a seed."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    mask = place < n
    keeps = tl.rand(seed, place) > rate
    tl.store(out + place, tl.where(keeps, tl.load(x + place, mask=mask) / (1 - rate), 0.0), mask=mask)


@triton.jit
def layer_norm(x, out, gain, bias, columns, epsilon, block: tl.constexpr):
    """Normalisation of a row."""
    row, place = tl.program_id(0), tl.arange(0, block)
    mask = place < columns
    value = tl.load(x + row * columns + place, mask=mask, other=0.0).to(tl.float32)
    # lanes beyond the row would add the square of the mean
    centred = tl.where(mask, value - tl.sum(value, 0) / columns, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / columns + epsilon)
    scaled = centred * scale * tl.load(gain + place, mask=mask) + tl.load(bias + place, mask=mask)
    tl.store(out + row * columns + place, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def attention(q, k, v, out, length, scale, rows: tl.constexpr, width: tl.constexpr):
    """Attention of a tile of queries, keys in tiles, with a running maximum."""
    at_row, at_width = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, width)
    query = tl.load(q + at_row[:, None] * width + at_width[None, :])
    most, total = tl.full((rows,), -float("inf"), tl.float32), tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, width), tl.float32)
    for start in range(0, length, rows):
        at = start + tl.arange(0, rows)
        keys = tl.load(k + at[None, :] * width + at_width[:, None])
        scores = tl.dot(query, keys) * scale
        higher = tl.maximum(most, tl.max(scores, 1))
        # sums so far are rescaled whenever the maximum grows, as in FlashAttention; powers are of 2
        power, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(most - higher)
        total = total * shrink + tl.sum(power, 1)
        values = tl.load(v + at[:, None] * width + at_width[None, :])
        sums = tl.dot(power.to(values.dtype), values, sums * shrink[:, None])
        most = higher
    tl.store(out + at_row[:, None] * width + at_width[None, :], (sums / total[:, None]).to(out.dtype.element_ty))


@triton.jit
def histogram(x, counts, n, block: tl.constexpr):
    """Counts of values, by atomic additions."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.atomic_add(counts + tl.load(x + place, mask=place < n, other=0), 1, mask=place < n)


@triton.jit
def running_sums(x, out, block: tl.constexpr):
    """Sums of all values so far."""
    place = tl.arange(0, block)
    tl.store(out + place, tl.cumsum(tl.load(x + place), 0))


@triton.jit
def sort(x, out, block: tl.constexpr):
    """Values in ascending order."""
    place = tl.arange(0, block)
    tl.store(out + place, tl.sort(tl.load(x + place)))


@triton.jit
def gelu(x, out, n, block: tl.constexpr):
    """A smooth rectifier."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + place, mask=place < n).to(tl.float32)
    # the root of 2 / pi
    inner = 0.7978845608 * (value + 0.044715 * value * value * value)
    # 1 - 1 / (1 + exp(2 x)) is (1 + tanh x) / 2
    smooth = value * (1 - 1 / (1 + tl.exp(2 * inner)))
    tl.store(out + place, smooth.to(out.dtype.element_ty), mask=place < n)


def _pointers(names, kind="fp32"):
    return dict.fromkeys(names.split(), "*" + kind)


_TILE = {"rows": 32, "columns": 32, "depth": 32, "leaky": False}
_MNK = dict.fromkeys("mnk", "i32")
VARIANTS = {
    "triton_vector_add": (vector_add, _pointers("x y out") | {"n": "i32"}, {"block": 256}),
    "triton_softmax": (softmax, _pointers("x out") | {"columns": "i32"}, {"block": 256}),
    "triton_matmul_fp16": (matmul, _pointers("a b c", "fp16") | _MNK, _TILE | {"precision": "ieee", "leaky": True}),
    "triton_matmul_bf16": (matmul, _pointers("a b c", "bf16") | _MNK, _TILE | {"precision": "ieee"}),
    "triton_matmul_tf32": (matmul, _pointers("a b c") | _MNK, _TILE | {"precision": "tf32"}),
    "triton_matmul_fp32": (matmul, _pointers("a b c") | _MNK, _TILE | {"precision": "ieee"}),
    "triton_dropout": (dropout, _pointers("x out") | {"n": "i32", "rate": "fp32", "seed": "i32"}, {"block": 256}),
    "triton_layer_norm": (
        layer_norm, _pointers("x out gain bias") | {"columns": "i32", "epsilon": "fp32"}, {"block": 256},
    ),
    "triton_layer_norm_fp16": (
        layer_norm, _pointers("x out gain bias", "fp16") | {"columns": "i32", "epsilon": "fp32"}, {"block": 256},
    ),
    "triton_attention": (
        attention, _pointers("q k v out", "fp16") | {"length": "i32", "scale": "fp32"}, {"rows": 32, "width": 32},
    ),
    "triton_histogram": (histogram, _pointers("x counts", "i32") | {"n": "i32"}, {"block": 256}),
    "triton_running_sums": (running_sums, _pointers("x out"), {"block": 256}),
    "triton_sort": (sort, _pointers("x out", "i32"), {"block": 128}),
    "triton_gelu": (gelu, _pointers("x out", "bf16") | {"n": "i32"}, {"block": 256}),
}  # fmt: skip
"""Name of the text -> kernel, types of its arguments, constants."""
