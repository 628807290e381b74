"""The model `fitted` of a GEMM on one GPU, alone and beside other kernels, by the kernel that the library picks.

Times alone are those of `simulators.costs.gemm`. Other kernels that hold t of c CUs do not change the kernel, as the
library does not know of them: it takes the time that `simulators.costs.gemm_tiles` gives it with its workgroups in
the waves that `simulators.costs.gemm_waves.count_waves` counts on what is left of each shader engine; power and clock
sustain the arithmetic of the CUs that are left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip
from simulators.costs.gemm import menus_of, products_of, with_limits
from simulators.costs.gemm_tiles import Products, Tiling, picked_kernel, tile_seconds
from simulators.costs.gemm_waves import WaveCost, count_waves

Floats = NDArray[np.float64]


def fitted_cost(
    chip: Chip,
    size: tuple[ArrayLike, ...],
    *,
    taken: ArrayLike = 0,
    transposed_a: ArrayLike = False,
    accumulate: bool = False,
) -> WaveCost:
    """Cost of `size` = (m, n, k, batch) while other kernels hold `taken` CUs. accumulate: C is read before."""
    m, n, k, batch = (np.asarray(value, float) for value in size)
    products = products_of(chip, (m, n, k), transposed_a=transposed_a, batch=batch)
    if accumulate:
        products = replace(products, extra_bytes=products.extra_bytes + 2 * np.asarray(products.c_bytes))
    kernel = picked_kernel(products, *menus_of(chip))
    left, groups = np.asarray(chip.cus, float) - np.asarray(taken, float), _workgroups(products, kernel)
    waves = count_waves(groups, chip.cus, taken, assignment=chip.assignment, engines=chip.engines)
    parts = tile_seconds(replace(products, cus=left), kernel, waves=waves)
    seconds = with_limits(replace(chip, cus=left), (m, n, k, batch), parts.seconds)
    traffic = np.minimum(parts.hbm_bytes, seconds / np.asarray(products.byte_s))
    columns = (seconds, traffic, waves, groups, parts.compute_s, kernel.rows, kernel.cols)
    return WaveCost(*(np.asarray(column, float) for column in np.broadcast_arrays(*columns)))


def _workgroups(products: Products, kernel: Tiling) -> Floats:
    tiles = np.ceil(np.asarray(products.m) / kernel.rows) * np.ceil(np.asarray(products.n) / kernel.cols)
    return np.asarray(tiles * np.asarray(products.batch) * kernel.splits)
