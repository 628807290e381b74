"""A GEMM's shape and cost, whichever model computes it, and the model `waves`: alone and beside other kernels.

For each macro-tile (tm x tn) of the library, with c granted CUs, element size b and the chunk (m, n, k):

    tiles  = ceil(m / tm) ceil(n / tn)              waves = ceil(tiles / c)            (wave quantisation;
                                                    dynamic assignment: max(1, tiles / c); stream-K: tiles / c)
    t_tile = 2 tm tn k / (rate_per_cu * eff) + prologue         T_cmp = waves * t_tile
    span   = sqrt(c) tiles a side (the output super-tile of one wave, not beyond the matrix)
    bytes  = max(b (m k + k n) , b k m n (1/span_cols + 1/span_rows) * cache_miss) + b m n * (1, or 3 accumulating)
             + 8 tm tn min(c, tiles) where stream-K cuts tiles: partial sums of 4 bytes, written and read
    T      = max(T_cmp, T_mem) + serial_fraction * min(T_cmp, T_mem),    T_mem = bytes / HBM rate

and the library picks the tile with the least T. Wave-quantised roofline (derived; `docs/explanation/costs.md`);
known miss: skinny and small batched shapes. rate_per_cu is that of 16-bit inputs, times the ratio of the peaks of the
data sheet for other formats. Stream-K (Osama et al., arXiv:2301.03598) deals out parts of K, so that all CUs end at
once.

Other kernels that hold t CUs do not change the tile, as the library does not know of them. Workgroups are dispatched
evenly over the E shader engines (GPCs), so the engine with the fewest free CUs sets the pace:

    waves  = max(ceil(tiles / (c - t)), ceil(ceil(tiles / E) / free CUs of that engine))     (static assignment)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.hardware.machine import Gpu
from simulators.hardware.parts import ELEMENT_BYTES, Assignment, GemmLibrary, ShaderEngines

Floats = NDArray[np.float64]
_SUM_BYTES = 8  # of a partial sum in fp32: written by a workgroup, read by the one that ends the tile


@dataclass(frozen=True)
class GemmShape:
    """`batch` products C[m, n] = op(A)[m, k] B[k, n] at once, column-major; numbers or arrays that broadcast.

    transposed_a: A is read across its stride (`fitted` alone tells layouts apart). accumulate: C is added to, so read
    and written. weight_sets: operands A that the caller takes in turn; no end of them in a model's step.
    """

    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    batch: ArrayLike = 1.0
    transposed_a: ArrayLike = False
    accumulate: bool = False
    weight_sets: ArrayLike = np.inf

    @classmethod
    def row_major(cls, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, accumulate: bool = False) -> GemmShape:
        """C[m, n] = A[m, k] B[k, n] as frameworks store tensors, with B transposed as weights are: m tokens, n outputs.

        In the column-major terms of BLAS these are n rows, m columns, and a transposed first operand.
        """
        return cls(n, m, k, transposed_a=True, accumulate=accumulate)  # the transpose of the product: C^T = B^T A^T

    @property
    def sizes(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Sizes (m, n, k, batch) as arrays."""
        m, n, k, batch = (np.asarray(size, float) for size in (self.m, self.n, self.k, self.batch))
        return m, n, k, batch

    @property
    def flop(self) -> Floats:
        """FLOP: 2 m n k of each."""
        m, n, k, batch = self.sizes
        return np.asarray(2 * m * n * k * batch)

    def least_bytes(self, element_bytes: ArrayLike) -> Floats:
        """Least HBM traffic [bytes]: A and B read once, C written once."""
        m, n, k, batch = self.sizes
        return np.asarray(np.asarray(element_bytes) * batch * (m * k + n * k + m * n))


@dataclass(frozen=True)
class GemmKernel:
    """The kernel that a library picks, as it runs; arrays of one shape.

    hbm_bytes: traffic. workgroups: of its launch; one a tile, and not more than CUs where they persist. compute_s: time
    of all waves without the HBM [s]. rows, cols: of its tile.
    """

    hbm_bytes: Floats
    waves: Floats
    workgroups: Floats
    compute_s: Floats
    rows: Floats
    cols: Floats

    def tile_flop(self, shape: GemmShape) -> Floats:
        """FLOP of whole tiles, of which some may lie outside of C; of one row or column (GEMV) those of the shape."""
        m, n, k, batch = shape.sizes
        padded = np.ceil(m / self.rows) * self.rows * np.ceil(n / self.cols) * self.cols
        return np.asarray(2 * batch * k * np.where(np.minimum(m, n) > 1, padded, m * n))


@dataclass(frozen=True)
class GemmCost:
    """Isolated time [s] without launch, launch [s] and FLOP of GEMMs; arrays of one shape.

    describe: gives the kernel, which few ask for.
    """

    seconds: Floats
    launch_s: Floats
    flop: Floats
    describe: Callable[[], GemmKernel] = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, shape: GemmShape, seconds: ArrayLike, *, launch_s: ArrayLike, describe: Callable[[], GemmKernel]
    ) -> GemmCost:
        """Build from a shape and times that broadcast."""
        # times of several kernels, FLOP of one shape: all in one
        columns = np.broadcast_arrays(seconds, launch_s, shape.flop)
        seconds, launch_s, flop = (np.asarray(column, float) for column in columns)
        return cls(seconds, launch_s, flop, describe)

    @cached_property
    def kernel(self) -> GemmKernel:
        """The kernel whose time this is."""
        return self.describe()


@dataclass(frozen=True)
class WaveGemms:
    """A GPU as the model reads it; numbers, or arrays over designs that broadcast.

    cus: all of the GPU that the GEMM may use. flop_per_s_per_cu: sustained, at the precision. engines: None if
    workgroups go to any CU.
    """

    cus: ArrayLike
    flop_per_s_per_cu: ArrayLike
    hbm_bytes_per_s: ArrayLike
    launch_s: ArrayLike
    element_bytes: float
    library: GemmLibrary
    engines: ShaderEngines | None = None

    @classmethod
    def of(cls, gpu: Gpu, precision: str) -> WaveGemms:
        """Build from a GPU and a precision. Raises ValueError for a GPU without tiles, sustained rates or the peak."""
        ratio = gpu.peak_ratio(precision)
        if gpu.gemm is None or gpu.matrix_flop_per_s_per_cu is None or gpu.hbm_bytes_per_s is None or ratio is None:
            raise ValueError(f"waves at {precision} need gpu.gemm, its sustained rates and gpu.peak_flop_per_s")
        return cls(
            cus=gpu.working_cus,
            # clock of the CUs over that of the data sheet
            flop_per_s_per_cu=gpu.matrix_flop_per_s_per_cu * ratio * gpu.cu_speed,
            hbm_bytes_per_s=gpu.hbm_bytes_per_s * gpu.overall_speed,
            launch_s=0.0 if gpu.kernel_launch_s is None else gpu.kernel_launch_s / gpu.overall_speed,
            element_bytes=ELEMENT_BYTES[precision],
            library=gpu.gemm,
            engines=gpu.shader_engines,
        )

    def slower(self, factor: ArrayLike) -> WaveGemms:
        """The same GPU on which every GEMM takes `factor` times as long."""
        prologue_s = np.asarray(self.library.prologue_s) * factor
        return replace(
            self,
            flop_per_s_per_cu=np.asarray(self.flop_per_s_per_cu) / factor,
            hbm_bytes_per_s=np.asarray(self.hbm_bytes_per_s) / factor,
            library=self.library.model_copy(update={"prologue_s": prologue_s}),
        )

    def cost(self, shape: GemmShape, *, taken: ArrayLike = 0) -> GemmCost:
        """Cost of GEMMs while other kernels hold `taken` CUs, for the tile picked for all CUs."""
        all_cus, taken_cus = _column(self.cus), _column(taken)
        tiles = np.array([(tile.rows, tile.cols, tile.efficiency) for tile in self.library.tiles]).T
        times = _times(self, shape, tiles, (all_cus, np.zeros(1)))  # picked for all CUs
        best = np.argmin(times[0], axis=-1)[..., None]
        if taken_cus.any():  # the same tile on what is left
            times = _times(self, shape, tiles, (all_cus, taken_cus))
        *parts, best = np.broadcast_arrays(*times, tiles[0], tiles[1], best)
        seconds, hbm_bytes, num_tiles, waves, compute_s, rows, cols = (
            np.take_along_axis(value, best[..., :1], axis=-1)[..., 0] for value in parts
        )
        static = self.library.assignment == "static"
        # persistent workgroups are no more than CUs
        workgroups = num_tiles if static else np.minimum(num_tiles, (all_cus - taken_cus)[..., 0])
        kernel = GemmKernel(hbm_bytes, waves, workgroups, compute_s, rows, cols)
        return GemmCost.of(shape, seconds, launch_s=self.launch_s, describe=lambda: kernel)


def _times(gpu: WaveGemms, shape: GemmShape, tiles: Floats, cus: tuple[Floats, Floats]) -> tuple[Floats, ...]:
    """Time T [s], traffic [bytes], tiles, waves and T_cmp [s] for each macro-tile, on the last axis.

    tiles: rows, columns and efficiency of each macro-tile. cus: all, and those of them that others hold.
    """
    (m, n, k, batch), (rows, cols, efficiency) = map(_column, shape.sizes), tiles
    library, passes = gpu.library, 3 if shape.accumulate else 1  # of the output: a sum is read before it is written
    left = cus[0] - cus[1]
    num_tiles = batch * np.ceil(m / rows) * np.ceil(n / cols)
    waves = count_waves(num_tiles, *cus, assignment=library.assignment, engines=gpu.engines)
    tile_s = 2 * rows * cols * k / (_column(gpu.flop_per_s_per_cu) * efficiency) + _column(library.prologue_s)
    compute = waves * tile_s
    # a super-tile does not go beyond the matrix
    span_rows, span_cols = np.minimum(np.sqrt(left) * rows, m), np.minimum(np.sqrt(left) * cols, n)
    reread = k * m * n * (1 / span_cols + 1 / span_rows) * _column(library.cache_miss)
    operands = batch * np.maximum(reread, k * (m + n))  # A and B, at least once each
    traffic = gpu.element_bytes * operands + gpu.element_bytes * passes * batch * m * n
    if library.assignment == "stream_k":
        traffic = traffic + _SUM_BYTES * rows * cols * np.minimum(left, num_tiles)  # each CU cuts one tile at most
    memory = traffic / _column(gpu.hbm_bytes_per_s)
    # a share of the shorter part does not overlap
    total = np.maximum(compute, memory) + _column(library.serial_fraction) * np.minimum(compute, memory)
    return total, traffic, num_tiles, waves, compute


def count_waves(
    workgroups: ArrayLike,
    cus: ArrayLike,
    taken: ArrayLike,
    *,
    assignment: Assignment = "static",
    engines: ShaderEngines | None = None,
) -> Floats:
    """Waves of workgroups on `cus` CUs of which other kernels hold `taken`; arrays that broadcast."""
    groups, left = np.asarray(workgroups, float), np.asarray(cus, float) - np.asarray(taken, float)
    if assignment == "stream_k":
        return np.asarray(groups / left)
    if assignment == "dynamic":  # whoever becomes free takes the next tile, on any engine
        return np.asarray(np.maximum(groups / left, 1.0))  # a tile takes its time, however many CUs are free
    even: Floats = np.ceil(groups / left)
    if engines is None:  # dispatch is not known: to any CU
        return even
    # dealt out evenly, so that the engine with the fewest CUs is last
    engine_groups = np.ceil(groups / (engines.num_dies * engines.engines_per_die))
    paced = np.ceil(engine_groups / np.maximum(fewest_free_cus(engines, cus, taken), 1.0))
    # alone, engines are filled by what they have
    return np.asarray(np.where(np.asarray(taken) > 0, np.maximum(even, paced), even))


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


def _column(value: ArrayLike) -> Floats:
    """A system number as a column, so that an array over designs meets an axis of tiles."""
    return np.asarray(value, dtype=float)[..., None]
