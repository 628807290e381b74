"""Small launches of the kernels of `tiles`, each with what NumPy says of its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_ptx.arguments import Argument
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.tensor_map import matrix_map
from dse_ptx.tiles import copies, vectors
from dse_ptx.tiles.launches import error_in_steps, expected, multiply
from dse_ptx.tiles.shape import ProductKernel

_SHARED = 1 << 16
Sizes = tuple[Sequence[int], Sequence[int]]


def launch(text: str, sizes: Sizes, arguments: Sequence[Argument], device: PtxDevice) -> None:
    """Launch the only kernel of a text; sizes: of grid and block."""
    module = Module(text, device)
    module.launch(module.program.kernels[0], *sizes, arguments, LaunchOptions(_SHARED))


def _words(count: int, seed: int = 0, most: int = 2**32) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, most, count, np.uint32)


def _exact(found: NDArray[Any], right: NDArray[Any]) -> float:
    return 0.0 if np.array_equal(found, right) else math.inf


def copy_case(size: int) -> float:
    """Copy of so many bytes."""
    device, values = PtxDevice(), _words(size // 4)
    source, target = device.allocate(values), device.allocate(values.nbytes)
    launch(copies.copy_text(), ((3,), (32,)), [source, target, size], device)
    return _exact(device.read(target, np.uint32, len(values)), values)


def transpose_case(rows: int, columns: int) -> float:
    """Transpose of a matrix, whose sides are multiples of 4, as a map's strides are of 16 bytes."""
    device, values = PtxDevice(), _words(rows * columns).reshape(rows, columns)
    source, target = device.allocate(values), device.allocate(values.nbytes)
    maps = [matrix_map(source, values, (32, 32), 128), matrix_map(target, values.T, (32, 32), 128)]
    grid = -(-columns // copies.TILE), -(-rows // copies.TILE)
    launch(copies.transpose_text(), (grid, (256,)), [entry.encode() for entry in maps], device)
    return _exact(device.read(target, np.uint32, (columns, rows)), values.T)


def broadcast_case(blocks: int) -> float:
    """A piece for all blocks of each of two clusters."""
    device, values = PtxDevice(), _words(2 * copies.PIECE // 4).reshape(2, -1)
    source, target = device.allocate(values), device.allocate(values.nbytes * blocks)
    launch(copies.broadcast_text(blocks), ((2 * blocks,), (32,)), [source, target], device)
    found = device.read(target, np.uint32, (2 * blocks, copies.PIECE // 4))
    return _exact(found, np.repeat(values, blocks, axis=0))


def ring_case(blocks: int) -> float:
    """Pieces that go on by a block."""
    device, values = PtxDevice(), _words(blocks * copies.PIECE // 4).reshape(blocks, -1)
    source, target = device.allocate(values), device.allocate(values.nbytes)
    launch(copies.ring_text(blocks), ((blocks,), (32,)), [source, target], device)
    return _exact(device.read(target, np.uint32, values.shape), np.roll(values, 1, axis=0))


def softmax_case(rows: int, columns: int) -> float:
    """Error over the largest share."""
    device, values = PtxDevice(), np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)
    source, target = device.allocate(values), device.allocate(values.nbytes)
    launch(vectors.softmax_text(columns), ((rows,), (vectors.THREADS,)), [source, target], device)
    powers = np.exp(values.astype(np.float64))
    right = powers / powers.sum(axis=1, keepdims=True)
    return error_in_steps(device.read(target, np.float32, values.shape).astype(np.float64), right, "f32")


def gemv_case(rows: int, columns: int) -> float:
    """Error of y = A x."""
    device, rng = PtxDevice(), np.random.default_rng(2)
    a, x = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, columns), (columns,)))
    y = device.allocate(4 * rows)
    arguments = [device.allocate(a), device.allocate(x), y]
    launch(vectors.gemv_text(columns), ((rows,), (vectors.THREADS,)), arguments, device)
    right = a.astype(np.float64) @ x.astype(np.float64)
    return error_in_steps(device.read(y, np.float32, rows).astype(np.float64), right, "f32")


def cluster_sum_case(blocks: int) -> float:
    """Error of the sums of three clusters."""
    device, values = PtxDevice(), np.random.default_rng(3).normal(size=(3, blocks * vectors.THREADS))
    source, target = device.allocate(values.astype(np.float32)), device.allocate(12)
    launch(vectors.cluster_sum_text(blocks), ((3 * blocks,), (vectors.THREADS,)), [source, target], device)
    right = values.astype(np.float32).astype(np.float64).sum(axis=1)
    return error_in_steps(device.read(target, np.float32, 3).astype(np.float64), right, "f32")


def histogram_case(blocks: int, bins: int) -> float:
    """Counts of two clusters."""
    device, values = PtxDevice(), _words(2 * blocks * vectors.THREADS, 4, bins)
    source, target = device.allocate(values), device.allocate(4 * bins)
    launch(vectors.histogram_text(blocks, bins), ((2 * blocks,), (vectors.THREADS,)), [source, target], device)
    return _exact(device.read(target, np.uint32, bins), np.bincount(values, minlength=bins).astype(np.uint32))


def relay_case(turns: int) -> float:
    """Numbers twice as large."""
    device, values = PtxDevice(), _words(32 * turns, 5, 1 << 30)
    source, target = device.allocate(values), device.allocate(values.nbytes)
    launch(vectors.relay_text(), ((1,), (64,)), [source, target, turns], device)
    return _exact(device.read(target, np.uint32, len(values)), 2 * values)


def product_case(of: ProductKernel, m: int, n: int, k: int = 256) -> float:
    """Error of a product, in steps of fp16."""
    rng = np.random.default_rng(6)
    left, right = rng.normal(size=(m, k)), rng.normal(size=(k, n))
    bias = rng.normal(size=n).astype(np.float32) if of.after else None
    found, _ = multiply(of, left, right, bias)
    return error_in_steps(found, expected(of, left, right, bias), of.result or of.kind)


PRODUCTS: Mapping[str, ProductKernel] = {
    "fp16": ProductKernel(),
    "bf16": ProductKernel("bf16"),
    "fp32 result": ProductKernel(result="f32", columns=256),
    "128 x 256": ProductKernel(columns=256),
    "64 x 64": ProductKernel(consumers=1, columns=64),
    "swizzle of 64 bytes": ProductKernel(swizzle=64),
    "swizzle of 32 bytes": ProductKernel(swizzle=32),
    "no swizzle": ProductKernel(swizzle=0),
    "B by rows": ProductKernel(turned=True),
    "A from registers": ProductKernel(from_registers=True),
    "cluster of 2 x 1": ProductKernel(cluster=(2, 1)),
    "cluster of 1 x 2": ProductKernel("bf16", cluster=(1, 2)),
    "cluster of 2 x 2, B by rows": ProductKernel(cluster=(2, 2), turned=True),
    "bias and relu": ProductKernel(after="relu"),
    "bias and gelu": ProductKernel("bf16", after="gelu"),
    "split k, added in a cluster": ProductKernel(parts=4),
    "persistent": ProductKernel(persistent=True),
}
"""Kernels of products."""
CASES: Mapping[str, Callable[[], float]] = {
    **{f"product, {name}": partial(product_case, of, 512, 512) for name, of in PRODUCTS.items()},
    "copy in pieces": partial(copy_case, 50_000),
    "transpose by boxes": partial(transpose_case, 100, 76),
    "broadcast in a cluster": partial(broadcast_case, 4),
    "ring of a cluster": partial(ring_case, 8),
    "softmax of rows": partial(softmax_case, 5, 512),
    "matrix by vector": partial(gemv_case, 7, 384),
    "sum over a cluster": partial(cluster_sum_case, 8),
    "histogram over a cluster": partial(histogram_case, 4, 256),
    "relay between warps": partial(relay_case, 10),
}
"""What is computed -> its error: 0 where integers are equal, infinite where they are not, else in steps of fp16."""
