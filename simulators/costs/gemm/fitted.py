"""The model `fitted` of a GEMM on one GPU: C[m, n] = op(A)[m, k] B[k, n], column-major BLAS, any layout, batched.

The fastest kernel of `simulators.costs.gemm.tiles` over macro-tiles of 128, 64, 32 and 16 a side with at least 1,024
elements, and K split in 1, 2, 4 or 8, as the library's heuristics would choose. p: peak rate of one CU, b: element
bytes:

    f = 1 / (e p),   u = 16 b / (feed p)
    w = [A transposed] t (0.3 + max(0, log2 d(b k) - 10)),        d(x): the largest power of two that divides x
    seconds = T, for min(m, n) <= 16: only by kernels of 16 columns (or rows), at v T

A library of today (a device's `tiles`) is that of `simulators.costs.gemm.library`, of which both layouts cost the same.

Fitted for each device and precision: launch, e (`compute`), feed, t (`transposed`), v (`narrow`); all else is the same
for all. w: a transposed A is read across its stride of b k bytes, and one of many powers of two meets few memory
channels (camping). v: libraries have few kernels for so few columns. Derived, and chosen on public measurements of four
GPUs; `plugins/calibration/README.md` says how, and what is known to be wrong. B's layout makes no difference.

Other kernels that hold t of c CUs do not change the kernel, as the library does not know of them: it takes the same
equations with its workgroups in the waves that `simulators.costs.gemm.waves.count_waves` counts on what is left of each
shader engine; power and clock sustain the arithmetic of the CUs that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip, camped_doublings
from simulators.costs.gemm.library import SHARP, kernel_seconds, library_gemms, pick_kernels, sustained
from simulators.costs.gemm.tiles import KernelTime, Menu, Products, TileShape, fastest, tile_seconds
from simulators.costs.gemm.waves import GemmCost, GemmKernel, GemmShape, count_waves
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

_NARROW = 16  # columns (or rows) up to which libraries have kernels of their own
LARGEST_TILE = 128
# smaller tiles reuse too little for a library to have them
_TILES = [(r, s) for r, s in product((LARGEST_TILE, 64, 32, 16), repeat=2) if r * s >= 1024]
_SPLITS = (1, 2, 4, 8)
MENU = Menu.of([tile for tile in _TILES if min(tile) > _NARROW], _SPLITS)
MENU_FOR_FEW = Menu.of([tile for tile in _TILES if min(tile) <= _NARROW], _SPLITS)


@dataclass(frozen=True)
class FittedGemms(Chip):
    """A GPU as the model reads it."""

    def cost(self, shape: GemmShape, *, taken: ArrayLike = 0) -> GemmCost:
        """Cost of GEMMs while other kernels hold `taken` CUs."""
        held = np.asarray(taken, float)
        launch = _Launch(self, shape, held, *_pick(self, shape))
        return GemmCost.of(shape, launch.seconds, launch_s=self.launch_s, describe=launch.kernel)

    def least_s(self, m: Floats, n: Floats, k: Floats, left: Floats) -> Floats:
        """Least time [s] of C[m, n] = A[m, k] B[k, n] in any pieces, on `left` CUs."""
        compute = 2 * m * n * k / (np.asarray(self.compute) * self.rate * left)
        element_s = np.asarray(self.element_bytes, float) / self.bandwidth
        read, written = element_s * (m * k + n * k), element_s * m * n
        if self.tiles is None:  # the square sum of `simulators.costs.gemm.tiles`
            return np.asarray(np.sqrt(compute**2 + (read + written) ** 2))
        on_tiles = np.cbrt(compute**3 + read**3) + written
        least = 2 * m * n * k / (np.asarray(self.sustained) * self.rate * left)
        return np.asarray((on_tiles**SHARP + least**SHARP) ** (1 / SHARP))


@dataclass(frozen=True)
class _Launch:
    """Kernels that a library has picked. alone_s: their time on all CUs. time_of: that on so many CUs, in waves."""

    chip: Chip
    shape: GemmShape
    taken: Floats
    alone_s: Floats
    tile: TileShape
    time_of: Callable[[Floats, Floats], KernelTime]

    @cached_property
    def seconds(self) -> Floats:
        """Time [s] beside what holds CUs."""
        if not self.taken.any():  # alone: as picked, without a second model
            return self.alone_s
        seconds = self._parts.seconds
        if self.chip.tiles is not None:  # a library of today is limited by power, whose share is that of the CUs left
            seconds = sustained(replace(self.chip, cus=self._free_cus), self.shape.sizes, seconds)
        return np.where(self.taken > 0, seconds, self.alone_s)  # designs of one batch may have both

    def kernel(self) -> GemmKernel:
        """The kernels as they run."""
        # traffic that the time has room for: a model of tiles may count more
        traffic = np.minimum(self._parts.hbm_bytes, self.seconds * self.chip.bandwidth)
        columns = (traffic, self._waves, self._groups, self._parts.compute_s, self.tile.rows, self.tile.cols)
        return GemmKernel(*(np.asarray(column, float) for column in np.broadcast_arrays(*columns)))

    @cached_property
    def _parts(self) -> KernelTime:
        return self.time_of(self._free_cus, self._waves)

    @property
    def _free_cus(self) -> Floats:
        return np.asarray(self.chip.cus, float) - self.taken

    @cached_property
    def _groups(self) -> Floats:
        m, n, _, batch = self.shape.sizes
        return np.asarray(np.ceil(m / self.tile.rows) * np.ceil(n / self.tile.cols) * batch * self.tile.splits)

    @cached_property
    def _waves(self) -> Floats:
        chip = self.chip
        return count_waves(self._groups, chip.cus, self.taken, assignment=chip.assignment, engines=chip.engines)


def _pick(chip: Chip, shape: GemmShape) -> tuple[Floats, TileShape, Callable[[Floats, Floats], KernelTime]]:
    """Time alone [s] of the kernel that the library picks, its tile, and its time on so many CUs, in so many waves."""
    m, n, k, batch = shape.sizes
    if chip.tiles is not None:  # both layouts cost the same there
        gemms = library_gemms(chip, shape)
        seconds, tile = pick_kernels(gemms, chip.tiles)
        alone = sustained(chip, shape.sizes, seconds)
        return alone, tile, lambda cus, waves: kernel_seconds(replace(gemms, cus=cus), tile, waves=waves)
    products = products_of(chip, (m, n, k), transposed_a=shape.transposed_a, batch=batch)
    if shape.accumulate:
        # C is read, and written once more as it is summed
        products = replace(products, extra_bytes=products.extra_bytes + 2 * np.asarray(products.c_bytes))
    seconds, tile = quickest(products)
    return seconds, tile, lambda cus, waves: tile_seconds(replace(products, cus=cus), tile, waves=waves)


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


def quickest(products: Products) -> tuple[Floats, TileShape]:
    """Seconds without launch, and the kernel: one of those for few columns where there are few, else of the others."""
    return fastest(products, MENU, MENU_FOR_FEW)


def across(chip: Chip, k: ArrayLike, transposed_a: ArrayLike) -> Floats:
    """w: extra cost of reading A across its stride of b k bytes; 0 where A is not transposed."""
    doublings = shared_constants().gemm.stride_base + camped_doublings(chip, k)
    overhead: Floats = np.asarray(transposed_a) * np.asarray(chip.transposed) * doublings
    return overhead
