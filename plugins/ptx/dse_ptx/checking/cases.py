"""Small launches of every kernel of this package, for both interpreters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dse_ptx.checking.comparison import both, same
from dse_ptx.kernels import kernel_text

_TRITON_THREADS, _TRITON_SHARED = 128, 1 << 15


@dataclass(frozen=True)
class Case:
    """A launch: file and kernel, grid and block, arguments, dynamic shared memory."""

    file: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: Sequence[Any]
    shared: int = 0

    def is_equal(self) -> bool:
        """Return whether both interpreters leave the same memory."""
        return same(*both(kernel_text(self.file), self.kernel, (self.grid, self.block), self.arguments, self.shared))


def _floats(*shape: int, seed: int = 0, kind: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(kind)


def _integers(*shape: int, most: int = 1000, kind: Any = np.int32) -> Any:
    return np.random.default_rng(1).integers(1, most, shape).astype(kind)


def _zeros(*shape: int, kind: Any = np.float32) -> Any:
    return np.zeros(shape, kind)


def cases() -> list[Case]:
    """All launches."""
    return [*_basics(), *_layers(), *_triton()]


def _basics() -> list[Case]:
    # rows of a sparse matrix have one to eight entries
    starts = np.concatenate([[0], np.cumsum(_integers(50, most=9))]).astype(np.int32)
    count, line = int(starts[-1]), (64,)
    rows: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], Sequence[Any]]] = {
        "saxpy": ((2,), line, [1.5, _floats(100), _floats(100, seed=1), 100]),
        "transpose": ((2, 2), (16, 16), [_floats(20, 20), _zeros(20, 20), 20]),
        "reduce": ((2,), (96,), [_floats(500), _zeros(2), 500]),
        "histogram": ((3,), (96,), [_integers(250, kind=np.uint32), _zeros(64, kind=np.uint32), 250]),
        "scan": ((2,), (128,), [_integers(256), _zeros(256, kind=np.int32)]),
        "bitonic_sort": ((2,), (128,), [_integers(256)]),
        "stencil": ((4,), (100,), [_floats(20, 20), _zeros(20, 20), 20]),
        "sparse_product": (
            (1,), line, [starts, _integers(count, most=40), _floats(count), _floats(40), _zeros(50), 50],
        ),
        "collatz": ((2,), line, [_integers(100, kind=np.uint32), _zeros(100, kind=np.uint32), 100]),
        "mandelbrot": ((2,), line, [_zeros(128, kind=np.int32), 16, 0.17]),
        "calls": (
            (2,), (32,), [_integers(64, kind=np.uint32), _integers(64, most=90, kind=np.uint32),
                          _zeros(64, kind=np.uint32), _floats(5, kind=np.float64), _floats(64, kind=np.float64),
                          _zeros(64, kind=np.float64)],
        ),
        "local_sort": ((1,), line, [_integers(512), _zeros(512, kind=np.int32)]),
        "batch_norm": ((1,), line, [_floats(9, 50), _zeros(9, 50), _floats(50), _floats(50, seed=1), 9, 50]),
        "lstm_cell": ((2,), line, [_floats(4, 100), _floats(100, seed=1), _zeros(100), _zeros(100), 100]),
        "checksum": (
            (2,), (32,), [_integers(64, 10, most=255, kind=np.uint8), _zeros(64, kind=np.uint16),
                          _zeros(64, kind=np.uint64), 10],
        ),
        "bodies": ((1,), line, [_floats(64, 3), _zeros(64, 3), 20]),
        "product_double": (
            (2, 2), (8, 8), [_floats(16, 16, kind=np.float64), _floats(16, 16, kind=np.float64),
                             _zeros(16, 16, kind=np.float64), 16],
        ),
        "switches": ((2,), line, [_integers(128), _zeros(128, kind=np.int32)]),
    }  # fmt: skip
    return [Case("basics", name, *row) for name, row in rows.items()]


def _roots(size: int) -> Any:
    angles = 2 * np.pi * np.arange(size // 2) / size
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _layers() -> list[Case]:
    x, w, b, y = _floats(2, 2, 10, 10), _floats(3, 2, 5, 5, seed=1), _floats(3, seed=2), _zeros(2, 3, 6, 6)
    line, tile, shape = (64,), (16, 16), [2, 2, 10, 3, 5]
    labels = _integers(3, most=9)
    rows: list[tuple[str, tuple[int, ...], tuple[int, ...], Sequence[Any]]] = [
        ("conv_direct", (4,), line, [x, w, b, y, *shape]),
        ("conv_direct", (4,), line, [x, w, 0, y, *shape]),
        ("conv_implicit_gemm", (5, 1), tile, [x, w, b, y, *shape]),
        (
            "gemm",
            (1, 2),
            tile,
            [_floats(20, 18), _floats(18, 9), _floats(9), _zeros(20, 9), 20, 9, 18, 18, 1, 9, 1, 0, 0],
        ),
        (
            "gemm",
            (1, 1, 2),
            tile,
            [_floats(2, 9, 7), _floats(2, 9, 5), 0, _zeros(2, 7, 5), 7, 5, 9, 1, 7, 5, 1, 63, 45],
        ),
        ("gemv", (10,), line, [_floats(20, 70), _floats(70, seed=1), _floats(20, seed=2), _zeros(20), 20, 70]),
        ("gemv", (2,), line, [_floats(3, 18), _floats(18, seed=1), 0, _zeros(3), 3, 18]),
        ("fft_forward", (4,), line, [x, _zeros(4, 256, 2), _roots(16), 10, 4]),
        (
            "fft_product",
            (4, 3, 2),
            line,
            [_floats(2, 2, 256, 2), _floats(3, 2, 256, 2), _zeros(2, 3, 256, 2), 2, 3, 256],
        ),
        ("fft_inverse", (6,), line, [_floats(6, 256, 2), y, _roots(16), b, 3, 6, 4]),
        ("winograd_filter", (1,), line, [w, _zeros(36, 3, 2), 3, 2]),
        ("winograd_input", (1,), line, [x, _zeros(36, 2, 18), 2, 2, 10]),
        ("winograd_output", (1,), line, [_floats(36, 3, 18), y, b, 2, 3, 6]),
        ("max_pool", (1,), line, [_floats(6, 6, 6), _zeros(6, 3, 3), 6, 3]),
        ("max_pool_backward", (1,), line, [_floats(6, 6, 6), _floats(6, 3, 3), _zeros(6, 6, 6), 6, 3]),
        ("relu", (2,), line, [_floats(100), _zeros(100), 100]),
        ("relu_backward", (2,), line, [_floats(100), _floats(100, seed=1), _zeros(100), 100]),
        ("lrn", (1,), line, [_floats(2, 20), _zeros(2, 20), _zeros(2, 20), 2, 20, 5, 0.5, 0.75]),
        (
            "lrn_backward",
            (1,),
            line,
            [_floats(2, 20), 1 + abs(_floats(2, 20)), _floats(2, 20), _zeros(2, 20), 2, 20, 5, 0.5, 0.75],
        ),
        ("softmax", (2,), line, [_floats(3, 10), _zeros(3, 10), _zeros(3, 10), labels, _zeros(3), 3, 10]),
        ("softmax", (2,), line, [_floats(3, 10), _zeros(3, 10), 0, 0, 0, 3, 10]),
        ("conv_backward_filter", (75,), line, [x, _floats(2, 3, 6, 6), _zeros(3, 2, 5, 5), _zeros(3), *shape]),
        ("conv_backward_data", (7,), line, [_floats(2, 3, 6, 6), w, _zeros(2, 2, 10, 10), *shape]),
        ("column_sums", (1,), line, [_floats(9, 20), _zeros(20), 9, 20]),
        ("sgd", (1,), line, [_floats(50), _floats(50, seed=1), 0.1, 50]),
    ]
    return [Case("lenet", *row) for row in rows]


def _bfloat(values: Any) -> Any:
    # the upper half of single precision, truncated
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _triton() -> list[Case]:
    half: Any = np.float16
    a, b, mnk = _floats(40, 50), _floats(50, 36, seed=1), [40, 36, 50]
    line = [_floats(100), _floats(100, seed=1)]
    rows: list[tuple[str, str, tuple[int, ...], Sequence[Any]]] = [
        ("vector_add", "vector_add", (2,), [_floats(300), _floats(300, seed=1), _zeros(300), 300]),
        ("softmax", "softmax", (2,), [_floats(2, 100), _zeros(2, 100), 100]),
        ("matmul_fp16", "matmul", (2, 2), [a.astype(half), b.astype(half), _zeros(40, 36, kind=half), *mnk]),
        ("matmul_bf16", "matmul", (2, 2), [_bfloat(a), _bfloat(b), _zeros(40, 36, kind=np.uint16), *mnk]),
        ("matmul_tf32", "matmul", (2, 2), [a, b, _zeros(40, 36), *mnk]),
        ("matmul_fp32", "matmul", (1, 2), [a, b, _zeros(40, 36), *mnk]),
        ("dropout", "dropout", (2,), [_floats(300), _zeros(300), 300, 0.5, 7]),
        ("layer_norm", "layer_norm", (2,), [_floats(2, 100), _zeros(2, 100), *line, 100, 1e-5]),
        ("layer_norm_fp16", "layer_norm", (2,), [
            _floats(2, 100, kind=half), _zeros(2, 100, kind=half), *(entry.astype(half) for entry in line), 100, 1e-5]),
        ("attention", "attention", (1,), [
            *(_floats(64, 32, seed=k, kind=half) for k in range(3)), _zeros(64, 32, kind=half), 64, 0.25]),
        ("histogram", "histogram", (2,), [_integers(300, most=50), _zeros(64, kind=np.int32), 300]),
        ("running_sums", "running_sums", (1,), [_floats(256), _zeros(256)]),
        ("sort", "sort", (1,), [_integers(128), _zeros(128, kind=np.int32)]),
        ("gelu", "gelu", (2,), [_bfloat(_floats(300)), _zeros(300, kind=np.uint16), 300]),
    ]  # fmt: skip
    hidden = [0, 0]  # Triton's own scratch memory
    return [
        Case(f"triton_{file}", kernel, grid, (_TRITON_THREADS,), [*arguments, *hidden], _TRITON_SHARED)
        for file, kernel, grid, arguments in rows
    ]
