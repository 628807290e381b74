"""The model `fitted` of a GEMM on one GPU, alone and beside other kernels, by the kernel that the library picks.

Times alone are those of `simulators.costs.gemm`. Other kernels that hold t of c CUs do not change the kernel, as the
library does not know of them: it takes the time that `simulators.costs.gemm_tiles` gives it (of libraries of today,
`simulators.costs.gemm_library`) with its workgroups in the waves that `simulators.costs.gemm_waves.count_waves` counts
on what is left of each shader engine; power and clock sustain the arithmetic of the CUs that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip
from simulators.costs.gemm import MENU, MENU_FOR_FEW, products_of
from simulators.costs.gemm_library import kernel_seconds, library_gemms, pick_kernels, sustained
from simulators.costs.gemm_tiles import KernelTime, Tiling, picked_kernel, tile_seconds
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
    pick = _pick_library if chip.tiles is not None else _pick_tiles
    kernel, time_of = pick(chip, (m, n, k, batch), transposed_a=transposed_a, accumulate=accumulate)
    left = np.asarray(chip.cus, float) - np.asarray(taken, float)
    groups = np.asarray(np.ceil(m / kernel.rows) * np.ceil(n / kernel.cols) * batch * kernel.splits)
    waves = count_waves(groups, chip.cus, taken, assignment=chip.assignment, engines=chip.engines)
    parts = time_of(left, waves)
    seconds = parts.seconds
    if chip.tiles is not None:
        seconds = sustained(replace(chip, cus=left), (m, n, k, batch), seconds)
    traffic = np.minimum(parts.hbm_bytes, seconds * chip.bandwidth)
    columns = (seconds, traffic, waves, groups, parts.compute_s, kernel.rows, kernel.cols)
    return WaveCost(*(np.asarray(column, float) for column in np.broadcast_arrays(*columns)))


_Picked = tuple[Tiling, Callable[[Floats, Floats], KernelTime]]
"""A kernel, and its time on so many CUs with its workgroups in so many waves."""


def _pick_library(chip: Chip, size: tuple[Floats, ...], *, transposed_a: ArrayLike, accumulate: bool) -> _Picked:
    gemms = library_gemms(chip, size, accumulate=accumulate)
    assert chip.tiles is not None
    kernel = pick_kernels(gemms, chip.tiles)[1]
    return kernel, lambda cus, waves: kernel_seconds(replace(gemms, cus=cus), kernel, waves=waves)


def _pick_tiles(chip: Chip, size: tuple[Floats, ...], *, transposed_a: ArrayLike, accumulate: bool) -> _Picked:
    m, n, k, batch = size
    products = products_of(chip, (m, n, k), transposed_a=transposed_a, batch=batch)
    if accumulate:
        products = replace(products, extra_bytes=products.extra_bytes + 2 * np.asarray(products.c_bytes))
    kernel = picked_kernel(products, MENU, MENU_FOR_FEW)
    return kernel, lambda cus, waves: tile_seconds(replace(products, cus=cus), kernel, waves=waves)
