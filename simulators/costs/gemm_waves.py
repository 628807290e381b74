"""GEMM time on one GPU: tiles, waves, granted CUs, HBM traffic.

For each macro-tile (tm x tn) of the library, with c granted CUs, element size b and the chunk (m, n, k):

    tiles  = ceil(m / tm) ceil(n / tn)              waves = ceil(tiles / c)            (wave quantisation;
                                                    dynamic assignment: max(1, tiles / c))
    t_tile = 2 tm tn k / (rate_per_cu * eff) + prologue         T_cmp = waves * t_tile
    span   = sqrt(c) tiles a side (the output super-tile of one wave, not beyond the matrix)
    bytes  = max(b (m k + k n) , b k m n (1/span_cols + 1/span_rows) * cache_miss) + b m n * (1, or 3 accumulating)
    T      = max(T_cmp, T_mem) + serial_fraction * min(T_cmp, T_mem),    T_mem = bytes / HBM rate

and the library picks the tile with the least T. Standard wave-quantised roofline (derived; `docs/models.md`);
known miss: skinny and small batched shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.hardware.parts import GemmLibrary
from simulators.hardware.system import ScheduleGpu

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GemmCost:
    """Isolated time [s] without launch, HBM traffic [bytes], FLOP, waves; arrays of the arguments' broadcast shape.

    workgroups: of its launch; one a tile, and not more than CUs where they persist. compute_s: T_cmp of the tile that
    was picked, whose size is `rows` x `cols`.
    """

    seconds: Floats
    hbm_bytes: Floats
    flop: Floats
    waves: Floats
    workgroups: Floats
    compute_s: Floats
    rows: Floats
    cols: Floats


def gemm_cost(
    gpu: ScheduleGpu,
    shape: tuple[ArrayLike, ArrayLike, ArrayLike],
    *,
    cus: ArrayLike,
    element_bytes: int,
    accumulate: bool = False,
) -> GemmCost:
    """Cost of C[m, n] (+)= A[m, k] B[k, n] on `cus` CUs, for the tile a library would pick.

    shape: (m, n, k), scalars or arrays. accumulate: C is read and written again (a K split).
    """
    m, n, k, c = (np.asarray(value, dtype=float)[..., None] for value in (*shape, cus))
    library = gpu.gemm
    rows, cols, eff = np.array([(tile.rows, tile.cols, tile.efficiency) for tile in library.tiles]).T
    tiles = np.ceil(m / rows) * np.ceil(n / cols)
    compute = _waves(library, tiles, c) * (
        2 * rows * cols * k / (_column(gpu.matrix_flop_per_s_per_cu) * eff) + _column(library.prologue_s)
    )
    span_rows, span_cols = np.minimum(np.sqrt(c) * rows, m), np.minimum(np.sqrt(c) * cols, n)
    reread = k * m * n * (1 / span_cols + 1 / span_rows) * _column(library.cache_miss)
    traffic = np.maximum(reread, k * (m + n))  # A and B, at least once each
    traffic = element_bytes * (traffic + m * n * (3 if accumulate else 1))
    memory = traffic / _column(gpu.hbm_bytes_per_s)
    total = np.maximum(compute, memory) + _column(library.serial_fraction) * np.minimum(compute, memory)
    parts = np.broadcast_arrays(total, traffic, tiles, compute, rows, cols)
    best = np.argmin(parts[0], axis=-1)[..., None]
    seconds, hbm_bytes, tiles, compute, rows, cols = (
        np.take_along_axis(value, best, axis=-1)[..., 0] for value in parts
    )
    workgroups = tiles if library.assignment == "static" else np.minimum(tiles, c[..., 0])
    flop = (2 * m * n * k)[..., 0] + 0 * seconds
    return GemmCost(seconds, hbm_bytes, flop, _waves(library, tiles, c[..., 0]), workgroups, compute, rows, cols)


def _waves(library: GemmLibrary, tiles: Floats, cus: Floats) -> Floats:
    waves = tiles / cus
    return np.ceil(waves) if library.assignment == "static" else np.maximum(waves, 1.0)


def beside_cu_copies(gpu: ScheduleGpu, granted: Floats, full: Floats) -> Floats:
    """Time [s] of a GEMM while kernels move data.

    granted, full: its time alone on the CUs that these leave, and on all CUs [s]. Static tiles: the last wave hides
    what is lost within it, so of lost CUs and interference the larger counts, max(T_granted, f T_full). Dynamic tiles
    lose both, f T_granted. How that was found: docs/models.md.
    """
    contention = gpu.contention
    if gpu.gemm.assignment == "dynamic":
        return np.asarray(contention.dynamic_gemm_beside_cus * granted)
    return np.asarray(np.maximum(granted, contention.static_gemm_beside_cus * full))


def _column(value: ArrayLike) -> Floats:
    """A system number as a column, so that an array over designs meets an axis of tiles."""
    return np.asarray(value, dtype=float)[..., None]
