"""Isolated convolutions: forward, backward-data and backward-filter pass by the fastest of implicit GEMM, Winograd and
FFT.

n images of c channels, h x w, filters r x q with strides sv, sh, giving k channels of oh x ow; p = n oh ow; X, Y, W:
bytes of input, output, filter; X' = X min(1, r / sv), the input rows that are touched. Products run on the tiles of
`simulators.costs.gemm.tiles`, core(m, n, k; A, B, C), with the GEMM's constants of the device and none of their own; H:
the HBM bandwidth reached, L = 1.5e8 FLOP / P: what launching a kernel costs here, a split of k too.

    tiles       128 x 128; smaller ones at `narrow` T, but at T where the product is at most 64 wide: libraries make
                those for narrow layers, not to fill the device
    feed        half of a GEMM's where taps overlap (r q > 1, and fused Winograd): neighbours read the same pixels

    implicit GEMM
      forward   core(k, p, c r q; W, X', Y), k not split; W is read across its stride of c r q, as the GEMM's
                transposed A; with stride X is, instead, by `transposed` (sh - 1)                                  + L
      data      stride 1: core(p, c, k r q; Y, W, X), k not split                                                 + L
                or col2im: core(p, c r q, k; Y, W, col) + 1.5 (col + X + [stride] X) / H                          + 2 L
      filter    core(k, c r q, n 16 ceil(oh ow / 16); 1.6 Y, 1.6 X', W), 1.15 of the FLOP                          + L
    Winograd F(t x t, 3 x 3), stride 1: g = (t + 2)^2 products over n ceil(oh/t) ceil(ow/t) tiles
      t = 2     fused: X, Y, W move once (1.6 times in the filter pass), 1.2 of the FLOP, k split there only        + L
      t = 4     V, M, F (transformed) are written and read, 2.0 of the FLOP                                      + 3 L
                filter pass: 1.9 of the FLOP in either, as transforms of both operands serve once
    FFT, stride 1, filters of 3 and more on a side: a complex product (four real) for each frequency, 2.3 of the FLOP,
                and transforms of 2.5 N log2 N FLOP at a quarter of the rate                                     + 4 L

At `mixed`, matrix units do products whose channels are multiples of 8 (NVIDIA, Tensor Ops Made Easier in cuDNN), and
neither the fused Winograd nor FFT; L is of the peak without them, as everything else that they do not do.

The work of each is exact (Lavin and Gray, arXiv:1509.09308; Mathieu, Henaff, LeCun, arXiv:1312.5851). The factors are
the same for all devices, fitted once and then set by hand on convolutions of four GPUs (conf/data/operators.yaml).
A strided data gradient goes by col2im; convolutions of 1 x 1 are plain products. No library's choice of algorithm is
known: the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip, Cost
from simulators.costs.gemm.fitted import across
from simulators.costs.gemm.tiles import Menu, Products, fastest
from simulators.hardware.shared import SharedConvolution, shared_constants

Floats = NDArray[np.float64]

_SPLITS = (1, 2, 4, 8, 16, 32)  # parts of k, as libraries offer them
_WIDE_MENU = Menu.of([(128, 128)], _SPLITS)
_NARROW_MENU = Menu.of([tile for side in (64, 32, 16, 8) for tile in ((128, side), (side, 128))], _SPLITS)


@dataclass(frozen=True)
class Layer:
    """Shapes [R] of convolutions, and bytes of their tensors."""

    n: Floats
    c: Floats
    h: Floats
    w: Floats
    k: Floats
    r: Floats
    q: Floats
    oh: Floats
    ow: Floats
    pad: tuple[Floats, Floats]
    stride: tuple[Floats, Floats]
    element: Any

    @classmethod
    def of(cls, shape: Mapping[str, ArrayLike], element: ArrayLike) -> Layer:
        """Build from columns n, c, h, w, k, r, s, pad_h, pad_w, stride_v, stride_h. Output sizes are rounded down."""
        names = ("n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_v", "stride_h")
        n, c, h, w, k, r, q, ph, pw, sv, sh = np.broadcast_arrays(*(np.asarray(shape[name], float) for name in names))
        oh, ow = (h + 2 * ph - r) // sv + 1, (w + 2 * pw - q) // sh + 1  # the last window that fits
        return cls(n, c, h, w, k, r, q, oh, ow, (ph, pw), (sv, sh), element)

    @property
    def pixels(self) -> Floats:
        """Number p of output pixels of all images."""
        return self.n * self.oh * self.ow

    @property
    def flop(self) -> Floats:
        """FLOP of one pass, 2 p k c r q, by the definition of a convolution."""
        return 2 * self.pixels * self.k * self.c * self.r * self.q

    @property
    def is_strided(self) -> NDArray[np.bool_]:
        """Mask of the convolutions whose filter skips pixels."""
        return np.asarray(self.stride[0] * self.stride[1] > 1)

    @property
    def input_bytes(self) -> Floats:
        """Size X of the input [bytes]."""
        return np.asarray(self.element * self.n * self.c * self.h * self.w)

    @property
    def output_bytes(self) -> Floats:
        """Size Y of the output [bytes]."""
        return np.asarray(self.element * self.pixels * self.k)

    @property
    def filter_bytes(self) -> Floats:
        """Size W of the filter [bytes]."""
        return np.asarray(self.element * self.c * self.k * self.r * self.q)


def convolution(chip: Chip, shape: Mapping[str, ArrayLike]) -> Cost:
    """Costs [..., 3] of the three passes by the fastest algorithm; FLOP and bytes are a convolution's as defined."""
    seconds = np.min([cost.seconds for cost in algorithms(chip, shape).values()], axis=0)
    layer = Layer.of(shape, np.asarray(chip.element_bytes, float))
    least = layer.input_bytes + layer.output_bytes + layer.filter_bytes
    return Cost.of(layer.flop[..., None], least[..., None], seconds)  # equal for all three passes


def algorithms(chip: Chip, shape: Mapping[str, ArrayLike]) -> dict[str, Cost]:
    """Costs [..., 3] by algorithm, with its own FLOP and traffic; infinite time where one does not serve a shape."""
    layer = Layer.of(shape, np.asarray(chip.element_bytes, float))
    winograd = {f"winograd_{size}x{size}": _winograd(chip, layer, size) for size in (2, 4)}
    return {"implicit_gemm": _implicit(chip, layer), **winograd, "fft": _fft(chip, layer)}


def _implicit(chip: Chip, layer: Layer) -> Cost:
    x, y, w, p = layer.input_bytes, layer.output_bytes, layer.filter_bytes, layer.pixels
    area, launch, element = layer.r * layer.q, _launch(chip), layer.element
    # with a stride above the filter's height, rows are skipped
    touched, col = x * np.minimum(1, layer.r / layer.stride[0]), element * p * layer.c * area
    feed, depth = np.where(area > 1, _shared().overlap_feed, 1.0), layer.c * area
    options: dict[str, Any] = {"element": element, "work": chip.work_of(layer.c, layer.k)}
    skipped = np.asarray(chip.transposed) * (layer.stride[1] - 1)  # a stride of 1 reads neighbours
    strided = _Product((p, layer.k, depth), (touched, w, y), feed=feed, apart=skipped, splits=False, **options)
    stride = across(chip, depth, transposed_a=True)
    dense = _Product((layer.k, p, depth), (w, touched, y), feed=feed, apart=stride, splits=False, **options)
    forward = np.where(layer.is_strided, strided.seconds(chip), dense.seconds(chip)) + launch
    gathered = _Product((p, layer.c, layer.k * area), (y, w, x), feed=feed, splits=False, **options)
    # a strided data gradient is not gathered
    direct = np.where(layer.is_strided, np.inf, gathered.seconds(chip) + launch)
    scattered = col + x + np.where(layer.is_strided, x, 0.0)  # zeros between pixels are written first
    columns = _Product((p, depth, layer.k), (y, w, col), **options).seconds(chip) + 2 * launch
    columns = columns + _shared().col2im * scattered / chip.bandwidth
    # pixels of an image are taken in steps of 16
    padded_pixels = layer.n * np.ceil(layer.oh * layer.ow / _shared().pixels) * _shared().pixels
    packed = (1 + _shared().repack) * y, (1 + _shared().repack) * touched
    options["work"] = _shared().filter_flop * np.asarray(options["work"])
    filters = _Product((layer.k, depth, padded_pixels), (*packed, w), feed=feed, **options)
    moved = (touched + y + w, np.where(columns < direct, y + w + col + scattered, x + y + w), sum(packed) + w)
    return _passes(layer.flop, moved, (forward, np.minimum(direct, columns), filters.seconds(chip) + launch))


def _winograd(chip: Chip, layer: Layer, size: int) -> Cost:
    """Winograd F(size x size, 3 x 3)."""
    x, y, w, g = layer.input_bytes, layer.output_bytes, layer.filter_bytes, float((size + 2) ** 2)
    tiles, fused = layer.n * np.ceil(layer.oh / size) * np.ceil(layer.ow / size), size == 2
    # matrix units serve neither the fused kernel nor FFT
    units = chip.without_matrix_units if fused else chip.work_of(layer.c, layer.k)
    work = _shared().winograd_flop[size] * np.asarray(units)  # transforms as a share of the multiplications
    options: dict[str, Any] = {"batch": g, "element": layer.element, "feed": _shared().overlap_feed if fused else 1.0}
    if fused:
        a, b, f, again, kernels = x, y, w, 1 + _shared().repack, 1  # the filter pass moves its operands 1.6 times
        moved = [x + y + w, x + y + w, again * (x + y) + w]
    else:  # transformed tensors go through memory
        a, b, f = (layer.element * g * part for part in (tiles * layer.c, tiles * layer.k, layer.c * layer.k))
        again, kernels, options["extra"] = 1.0, 3, x + y + w + a + b + f
        moved = [options["extra"] + a + b + f] * 3
    products = (
        _Product((tiles, layer.k, layer.c), (a, f, b), work=work, splits=not fused, **options),
        _Product((tiles, layer.c, layer.k), (b, f, a), work=work, splits=not fused, **options),
        _Product(
            (layer.k, layer.c, tiles), (again * b, again * a, f), work=work * _shared().winograd_filter, **options
        ),
    )
    serves = (layer.r == 3) & (layer.q == 3) & ~layer.is_strided  # F(2x2) and F(4x4) are for 3 x 3 without stride
    launched = [np.where(serves, product.seconds(chip) + kernels * _launch(chip), np.inf) for product in products]
    return _passes(2 * g * tiles * layer.k * layer.c, moved, launched)


def _fft(chip: Chip, layer: Layer) -> Cost:
    height, width = layer.h + 2 * layer.pad[0], layer.w + 2 * layer.pad[1]
    # half of the frequencies: the transform of real numbers is symmetric
    frequencies = height * (np.floor(width / 2) + 1)
    # complex numbers
    x, y, w = (
        2 * layer.element * frequencies * part for part in (layer.n * layer.c, layer.n * layer.k, layer.c * layer.k)
    )
    images = layer.n * layer.c + layer.n * layer.k + layer.c * layer.k
    # a single pixel has no logarithm to take
    transforms = 2.5 * height * width * np.log2(np.maximum(height * width, 2)) * images
    streamed = layer.input_bytes + layer.output_bytes + layer.filter_bytes + x + y + w
    # butterflies reach a quarter of the rate
    fixed = np.maximum(
        streamed / chip.bandwidth, transforms / (_shared().fft_rate * chip.reached_flop_per_s)
    ) + 4 * _launch(chip)  # three transforms and the product
    options: dict[str, Any] = {
        "batch": frequencies,
        "work": _shared().fft_flop * np.asarray(chip.without_matrix_units),
        "element": 2 * layer.element,
    }
    products = (
        _Product((layer.n, layer.k, 4 * layer.c), (x, w, y), **options),  # a complex product is four real ones
        _Product((layer.n, layer.c, 4 * layer.k), (y, w, x), **options),
        _Product((layer.k, layer.c, 4 * layer.n), (y, x, w), **options),
    )
    serves = (np.maximum(layer.r, layer.q) >= 3) & ~layer.is_strided  # libraries offer it for nothing smaller
    launched = [np.where(serves, product.seconds(chip) + fixed, np.inf) for product in products]
    flop = transforms + 8 * frequencies * layer.n * layer.c * layer.k
    return _passes(flop, [streamed + x + y + w] * 3, launched)


@dataclass(frozen=True)
class _Product:
    """`batch` products C[m, n] += A[m, k] B[k, n]. sizes: m, n, k; moved: bytes of A, B, C of all of them.

    work, feed: FLOP and operand reads over those of a GEMM; apart: extra cost of reading A across its stride; extra:
    bytes beside the operands'; element: bytes of one.
    """

    sizes: tuple[Floats, Floats, Floats]
    moved: tuple[Floats, Floats, Floats]
    element: Any
    work: ArrayLike = 1.0
    feed: ArrayLike = 1.0
    apart: ArrayLike = 0.0
    splits: bool = True
    batch: ArrayLike = 1.0
    extra: ArrayLike = 0.0

    def seconds(self, chip: Chip) -> Floats:
        """Time without launch, by the fastest tile."""
        m, n, k = self.sizes
        a, b, c = self.moved
        products = Products(
            m=m,
            n=n,
            k=k,
            a_bytes=a,
            b_bytes=b,
            c_bytes=c,
            cus=chip.cus,
            flop_s=np.asarray(self.work) / (np.asarray(chip.compute) * chip.rate),
            operand_s=np.asarray(self.feed) * 16 * self.element / (np.asarray(chip.feed) * chip.rate),
            byte_s=1 / chip.bandwidth,
            batch=self.batch,
            across=self.apart,
            extra_bytes=self.extra,
            prologue=_shared().prologue,
            split_s=_launch(chip),
            most_splits=np.maximum(k / _shared().least_depth, 1.0) if self.splits else 1.0,
        )
        slow = np.where(np.minimum(m, n) <= _shared().narrow, 1.0, chip.narrow)
        (wide, _), (narrow, _) = fastest(products, _WIDE_MENU), fastest(replace(products, repeats=slow), _NARROW_MENU)
        return np.minimum(wide, narrow)


def _shared() -> SharedConvolution:
    return shared_constants().convolution


def _launch(chip: Chip) -> Floats:
    return np.asarray(_shared().launch_flop * np.asarray(chip.without_matrix_units) / np.asarray(chip.flop_per_s))


def _passes(flop: Floats, moved: Any, seconds: Any) -> Cost:
    return Cost.of(flop[..., None], np.stack(np.broadcast_arrays(*moved), axis=-1), np.stack(seconds, axis=-1))
