"""One cost of a GEMM, wherever it is asked: by the model that the machine names (`costs.gemm`).

    waves     simulators/costs/gemm_waves.py     the library's tiles, sustained rates; derived
    fitted    simulators/costs/gemm.py           the library's tiles, constants fitted to measured GEMMs of the device

Both count workgroups on the tile that the library picks for all CUs of the GPU, which other kernels beside it do not
change. Occupancy and shares of a cache (`gemm_sharing`) and stages (`gemm_stages`) refine `waves`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip, Cost
from simulators.costs.gemm import gemm
from simulators.costs.gemm_fitted import fitted_cost
from simulators.costs.gemm_waves import WaveGpu, wave_cost
from simulators.hardware.machine import GemmModel, Hardware
from simulators.hardware.system import ScheduleGpu

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GemmShape:
    """`batch` products C[m, n] = op(A)[m, k] B[k, n] at once, column-major; numbers or arrays that broadcast.

    transposed_a: A is read across its stride (`fitted` alone tells layouts apart). accumulate: C is added to, so read
    and written.
    """

    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    batch: ArrayLike = 1.0
    transposed_a: ArrayLike = False
    accumulate: bool = False

    @classmethod
    def row_major(cls, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, accumulate: bool = False) -> GemmShape:
        """C[m, n] = A[m, k] B[k, n] as frameworks store tensors, with B transposed as weights are: m tokens, n outputs.

        In the column-major terms of BLAS these are n rows, m columns, and a transposed first operand.
        """
        return cls(n, m, k, transposed_a=True, accumulate=accumulate)

    @property
    def flop(self) -> Floats:
        """FLOP: 2 m n k of each."""
        m, n, k, batch = (np.asarray(size, float) for size in (self.m, self.n, self.k, self.batch))
        return np.asarray(2 * m * n * k * batch)


@dataclass(frozen=True)
class GemmCost:
    """Isolated time [s] without launch, launch [s], HBM traffic [bytes], FLOP, waves; arrays of one shape.

    workgroups: of its launch; one a tile, and not more than CUs where they persist. compute_s: time of all waves
    without the HBM. rows, cols: of the tile that was picked.
    """

    seconds: Floats
    launch_s: Floats
    hbm_bytes: Floats
    flop: Floats
    waves: Floats
    workgroups: Floats
    compute_s: Floats
    rows: Floats
    cols: Floats


def gemm_gpu(machine: Hardware, precision: str, *, model: GemmModel | None) -> WaveGpu | Chip:
    """The GPU of a machine as a model of GEMMs reads it. Raises ValueError where it lacks what the model needs."""
    return Chip.of(machine, precision) if model == "fitted" else WaveGpu.of(machine.gpu, precision)


def gemm_cost(gpu: WaveGpu | Chip, shape: GemmShape, *, taken: ArrayLike = 0) -> GemmCost:
    """Cost of GEMMs while other kernels hold `taken` of the CUs that the GPU grants."""
    size = shape.m, shape.n, shape.k, shape.batch
    if isinstance(gpu, WaveGpu):
        cost = wave_cost(gpu, size, taken=taken, accumulate=shape.accumulate)
    else:
        cost = fitted_cost(gpu, size, taken=taken, transposed_a=shape.transposed_a, accumulate=shape.accumulate)
    columns = np.broadcast_arrays(cost.seconds, gpu.launch_s, shape.flop)
    seconds, launch_s, flop = (np.asarray(column, float) for column in columns)
    return GemmCost(
        seconds, launch_s, cost.hbm_bytes, flop, cost.waves, cost.workgroups, cost.compute_s, cost.rows, cost.cols
    )


def operator_cost(gpu: WaveGpu | Chip, shape: GemmShape) -> Cost:
    """Cost of GEMMs alone as operators: FLOP, least traffic, and the time of `gemm_cost` with the launch."""
    if isinstance(gpu, Chip):
        return gemm(gpu, (shape.m, shape.n, shape.k), transposed_a=shape.transposed_a, batch=shape.batch)
    m, n, k, batch = (np.asarray(size, float) for size in (shape.m, shape.n, shape.k, shape.batch))
    seconds = wave_cost(gpu, (m, n, k, batch)).seconds + np.asarray(gpu.launch_s)
    return Cost.of(shape.flop, gpu.element_bytes * batch * (m * k + n * k + m * n), seconds)


def beside_cu_copies(gpu: ScheduleGpu, granted: Floats, full: Floats) -> Floats:
    """Time [s] of a GEMM while kernels move data.

    granted, full: its time alone on the CUs that these leave, and on all CUs [s], with the same tile. Static tiles: the
    waves that are added hide what is lost within them, so of lost CUs and interference the larger counts,
    max(T_granted, f T_full). Others lose both, f T_granted. How that was found: docs/explanation/contention.md.
    """
    interference = np.asarray(gpu.contention.gemm_beside_cus)
    if gpu.gemm.assignment != "static":
        return np.asarray(interference * granted)
    return np.asarray(np.maximum(granted, interference * full))
