"""GEMMs alone: C[m, n] = op(A)[m, k] op(B)[k, n], column-major BLAS, any layout, large, skinny and batched.

The fastest kernel of `simulators.costs.gemm_tiles` over macro-tiles of 128, 64, 32 and 16 a side with at least 1,024
elements, and K split in 1, 2, 4 or 8, as the library's heuristics would choose. p: peak rate of one CU, b: element
bytes:

    f = 1 / (e p),   u = 16 b / (feed p)
    w = [A transposed] t (0.3 + max(0, log2 d(b k) - 10)),        d(x): the largest power of two that divides x
    seconds = launch + T, for min(m, n) <= 16: only by kernels of 16 columns (or rows), at v T

A library of today (a device's `tiles`) is that of `simulators.costs.gemm_library`, of which both layouts cost the same.

Fitted for each device and precision: launch, e (`compute`), feed, t (`transposed`), v (`narrow`); all else is the same
for all. w: a transposed A is read across its stride of b k bytes, and one of many powers of two meets few memory
channels (camping). v: libraries have few kernels for so few columns. Derived, and chosen on public measurements of four
GPUs; `docs/explanation/operators.md` says how, and what is known to be wrong. B's layout makes no difference.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip, Cost, camped_doublings
from simulators.costs.gemm_library import library_gemms, pick_kernels, sustained
from simulators.costs.gemm_tiles import Menu, Products, fastest
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

_NARROW = 16
LARGEST_TILE = 128
_TILES = [(r, s) for r, s in product((LARGEST_TILE, 64, 32, 16), repeat=2) if r * s >= 1024]
_SPLITS = (1, 2, 4, 8)
MENU = Menu.of([tile for tile in _TILES if min(tile) > _NARROW], _SPLITS)
MENU_FOR_FEW = Menu.of([tile for tile in _TILES if min(tile) <= _NARROW], _SPLITS)


def gemm(
    chip: Chip, sizes: tuple[ArrayLike, ArrayLike, ArrayLike], *, transposed_a: ArrayLike = False, batch: ArrayLike = 1
) -> Cost:
    """Cost of `batch` GEMMs of sizes (m, n, k), 1 or more, at once; numbers or arrays that broadcast."""
    m, n, k = (np.asarray(value, float) for value in sizes)
    size = m, n, k, np.asarray(batch, float)
    traffic = np.asarray(chip.element_bytes) * size[3] * (m * k + n * k + m * n)
    if chip.tiles is None:
        seconds = quickest(products_of(chip, (m, n, k), transposed_a=transposed_a, batch=batch))
    else:
        seconds = sustained(chip, size, pick_kernels(library_gemms(chip, size), chip.tiles)[0])
    return Cost.of(2 * m * n * k * size[3], traffic, seconds + np.asarray(chip.launch_s))


def products_of(
    chip: Chip, sizes: tuple[Floats, Floats, Floats], *, transposed_a: ArrayLike = False, batch: ArrayLike = 1
) -> Products:
    """GEMMs as products on tiles; those for few columns `repeat` v times."""
    m, n, k = sizes
    element, few = np.asarray(chip.element_bytes, float) * np.asarray(batch), np.minimum(m, n) <= _NARROW
    return Products(
        m=m,
        n=n,
        k=k,
        a_bytes=element * m * k,
        b_bytes=element * n * k,
        c_bytes=element * m * n,
        cus=chip.cus,
        flop_s=1 / (np.asarray(chip.compute) * chip.rate),
        operand_s=16 * np.asarray(chip.element_bytes) / (np.asarray(chip.feed) * chip.rate),
        byte_s=1 / chip.bandwidth,
        batch=batch,
        across=across(chip, k, transposed_a),
        prologue=chip.prologue,
        repeats=np.where(few, chip.narrow, 1.0),
        split_s=chip.split_s,
        few=few,
    )


def quickest(products: Products) -> Floats:
    """Seconds without launch, by the kernels for few columns where there are few, else by the others."""
    return fastest(products, MENU, MENU_FOR_FEW)


def across(chip: Chip, k: ArrayLike, transposed_a: ArrayLike) -> Floats:
    """w: extra cost of reading A across its stride of b k bytes; 0 where A is not transposed."""
    doublings = shared_constants().gemm.stride_base + camped_doublings(chip, k)
    overhead: Floats = np.asarray(transposed_a) * np.asarray(chip.transposed) * doublings
    return overhead
