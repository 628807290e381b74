"""GEMM time on one GPU, alone and beside other kernels: tiles, waves, granted CUs, HBM traffic.

For each macro-tile (tm x tn) of the library, with c granted CUs, element size b and the chunk (m, n, k):

    tiles  = ceil(m / tm) ceil(n / tn)              waves = ceil(tiles / c)            (wave quantisation;
                                                    dynamic assignment: max(1, tiles / c))
    t_tile = 2 tm tn k / (rate_per_cu * eff) + prologue         T_cmp = waves * t_tile
    span   = sqrt(c) tiles a side (the output super-tile of one wave, not beyond the matrix)
    bytes  = max(b (m k + k n) , b k m n (1/span_cols + 1/span_rows) * cache_miss) + b m n * (1, or 3 accumulating)
    T      = max(T_cmp, T_mem) + serial_fraction * min(T_cmp, T_mem),    T_mem = bytes / HBM rate

and the library picks the tile with the least T. Standard wave-quantised roofline (derived; `docs/models.md`);
known miss: skinny and small batched shapes.

Other kernels that hold t CUs do not change the tile, as the library does not know of them. Workgroups are dispatched
evenly over the E shader engines (GPCs), so the engine with the fewest free CUs sets the pace:

    waves  = max(ceil(tiles / (c - t)), ceil(ceil(tiles / E) / free CUs of that engine))     (static assignment)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.hardware.parts import ShaderEngines
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
    return _cost(gpu, shape, (cus, 0), element_bytes=element_bytes, accumulate=accumulate)


def gemm_cost_beside(
    gpu: ScheduleGpu,
    shape: tuple[ArrayLike, ArrayLike, ArrayLike],
    *,
    taken: ArrayLike,
    element_bytes: int,
    accumulate: bool = False,
) -> GemmCost:
    """Cost likewise on a GPU of which other kernels hold `taken` CUs, for the tile picked for all CUs."""
    return _cost(gpu, shape, (gpu.num_cus, taken), element_bytes=element_bytes, accumulate=accumulate)


def _cost(
    gpu: ScheduleGpu,
    shape: tuple[ArrayLike, ...],
    cus: tuple[ArrayLike, ArrayLike],
    *,
    element_bytes: int,
    accumulate: bool,
) -> GemmCost:
    """Cost of a GEMM with the tile for all of its CUs. cus: all, and those of them that others hold."""
    size = tuple(map(_column, shape))
    all_cus, taken = map(_column, cus)
    tiles = np.array([(tile.rows, tile.cols, tile.efficiency) for tile in gpu.gemm.tiles]).T
    moved_bytes = element_bytes, element_bytes * (3 if accumulate else 1)
    times = _times(gpu, size, tiles, (all_cus, np.zeros(1)), moved_bytes)
    best = np.argmin(times[0], axis=-1)[..., None]
    if taken.any():
        times = _times(gpu, size, tiles, (all_cus, taken), moved_bytes)
    *parts, best = np.broadcast_arrays(*times, tiles[0], tiles[1], best)
    seconds, hbm_bytes, num_tiles, waves, compute, rows, cols = (
        np.take_along_axis(value, best[..., :1], axis=-1)[..., 0] for value in parts
    )
    workgroups = num_tiles if gpu.gemm.assignment == "static" else np.minimum(num_tiles, (all_cus - taken)[..., 0])
    flop = (2 * size[0] * size[1] * size[2])[..., 0] + 0 * seconds
    return GemmCost(seconds, hbm_bytes, flop, waves, workgroups, compute, rows, cols)


def _times(
    gpu: ScheduleGpu,
    size: tuple[Floats, ...],
    tiles: Floats,
    cus: tuple[Floats, Floats],
    moved_bytes: tuple[int, int],
) -> tuple[Floats, ...]:
    """Time T [s], traffic [bytes], tiles, waves and T_cmp [s] for each macro-tile, on the last axis.

    tiles: rows, columns and efficiency of each macro-tile. cus: all, and those of them that others hold. moved_bytes:
    of an element of an operand, and of one of the output.
    """
    (m, n, k), (rows, cols, efficiency), library = size, tiles, gpu.gemm
    left = cus[0] - cus[1]
    num_tiles = np.ceil(m / rows) * np.ceil(n / cols)
    waves = _waves(gpu, num_tiles, *cus)
    tile_s = 2 * rows * cols * k / (_column(gpu.matrix_flop_per_s_per_cu) * efficiency) + _column(library.prologue_s)
    compute = waves * tile_s
    span_rows, span_cols = np.minimum(np.sqrt(left) * rows, m), np.minimum(np.sqrt(left) * cols, n)
    reread = k * m * n * (1 / span_cols + 1 / span_rows) * _column(library.cache_miss)
    traffic = moved_bytes[0] * np.maximum(reread, k * (m + n)) + moved_bytes[1] * m * n  # A and B, at least once each
    memory = traffic / _column(gpu.hbm_bytes_per_s)
    total = np.maximum(compute, memory) + _column(library.serial_fraction) * np.minimum(compute, memory)
    return total, traffic, num_tiles, waves, compute


def _waves(gpu: ScheduleGpu, tiles: Floats, cus: Floats, taken: Floats) -> Floats:
    left = cus - taken
    if gpu.gemm.assignment == "dynamic":  # whoever becomes free takes the next tile, on any engine
        return np.asarray(np.maximum(tiles / left, 1.0))
    whole = np.ceil(tiles / left)
    if gpu.shader_engines is None:
        return whole
    engines = gpu.shader_engines
    engine_tiles = np.ceil(tiles / (engines.num_dies * engines.engines_per_die))
    paced = np.ceil(engine_tiles / np.maximum(fewest_free_cus(engines, cus, taken), 1.0))
    return np.where(taken > 0, np.maximum(whole, paced), whole)


def fewest_free_cus(engines: ShaderEngines, cus: ArrayLike, taken: ArrayLike) -> Floats:
    """Free CUs of the shader engine that has the fewest, while other kernels hold `taken` of `cus` CUs.

    CUs are spread as evenly over the engines as whole numbers allow, larger engines in turn with smaller ones. Kernels
    of one workgroup on each CU are dispatched in turn over the dies, and on each die over its engines.
    """
    on_die = engines.engines_per_die
    per_engine = np.asarray(cus, float) / (engines.num_dies * on_die)
    taken_of_die = np.ceil(np.asarray(taken, float) / engines.num_dies)
    free = [
        np.ceil((place + 1) * per_engine)
        - np.ceil(place * per_engine)
        - np.maximum(np.ceil((taken_of_die - place) / on_die), 0)
        for place in range(on_die)
    ]
    return np.asarray(np.minimum.reduce(np.broadcast_arrays(*free)))


def beside_cu_copies(gpu: ScheduleGpu, granted: Floats, full: Floats) -> Floats:
    """Time [s] of a GEMM while kernels move data.

    granted, full: its time alone on the CUs that these leave, and on all CUs [s], with the same tile. Static tiles: the
    waves that are added hide what is lost within them, so of lost CUs and interference the larger counts,
    max(T_granted, f T_full). Dynamic tiles lose both, f T_granted. How that was found: docs/models.md.
    """
    interference = np.asarray(gpu.contention.gemm_beside_cus)
    if gpu.gemm.assignment == "dynamic":
        return np.asarray(interference * granted)
    return np.asarray(np.maximum(granted, interference * full))


def _column(value: ArrayLike) -> Floats:
    """A system number as a column, so that an array over designs meets an axis of tiles."""
    return np.asarray(value, dtype=float)[..., None]
