"""The least time that a GEMM takes on one GPU, into whichever pieces it is divided; for bounds, not for predictions.

Pieces partition the rows m and the depth k of C[m, n] = A[m, k] B[k, n] and have all n columns, or partition rows and
columns and have all of k (`cut_columns`). A piece costs what `simulators.costs.gemm` says, so a division costs at
least (docs/explanation/bounds.md has the ideas of the proofs)

    waves    max(C + s M, M + s C),  s: serial fraction, M: least traffic over the HBM rate
             C = min over whole waves w of w H(m / w),  H: the lower convex hull of the points (R_t, tau_t)
             R_t, tau_t: rows that a wave of tiles t covers on the granted CUs, and its time at depth k
    fitted   ((cbrt(C^3 + R^3) + W)^p + S^p)^(1/p),  C, S: FLOP at the rates of inner loops and at what is sustained,
             R, W: least reads and writes over the HBM bandwidth
             (devices without a library of today: sqrt(C^2 + (R + W)^2))

Along any line of constant depth the pieces that it crosses partition the rows, and the time of a piece is at least
proportional to its depth: so a division costs no less than one of the rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.gemm import Gemms
from simulators.costs.gemm.waves import WaveGemms, fewest_free_cus

Floats = NDArray[np.float64]
_Size = tuple[Floats, Floats, Floats]
_ROUNDING = 1e-9  # of a wave: a full one is not two because of rounding


@dataclass(frozen=True)
class LeastTime:
    """Least time of all pieces [s]; `linear`, of a share of the rows in proportion.

    share, of_share [T, ...]: the largest shares of the rows that whole waves of tile t cover, and their time [s]; none
    where waves do not count. Where pieces of other rows cost in proportion, as `linear` says of other CUs, the least
    time of both is that of no rows here, of all, or of one of these shares.
    """

    seconds: Floats
    linear: Floats
    share: Floats
    of_share: Floats

    def shares(self, axes: int) -> tuple[Floats, Floats]:
        """`share` and `of_share` over a grid of at least so many axes [T, ...], to be computed with other grids."""
        missing = max(0, axes + 1 - self.share.ndim)
        share, of_share = (
            part.reshape(len(part), *(1,) * missing, *part.shape[1:]) for part in (self.share, self.of_share)
        )
        return share, of_share


def least_time(gpu: Gemms, size: tuple[ArrayLike, ...], *, cut_columns: bool = False) -> LeastTime:
    """Least time of `size` = (m, n, k), row-major, on all CUs, without launches; numbers or arrays that broadcast."""
    m, n, k = (np.asarray(length, float) for length in size)
    linear = least_linear(gpu, size, cut_columns=cut_columns)
    # pieces of other columns, or CUs that take tiles as they come, leave no whole waves to count
    if not isinstance(gpu, WaveGemms) or cut_columns or gpu.library.assignment != "static":
        return LeastTime(linear, linear, *np.empty((2, 0, *linear.shape)))
    covered, wave_s = _wave_of_tiles(gpu, (m, n, k), 0, cut_columns=False)  # alone: no CUs are taken
    memory = _memory_s(gpu, (m, n, k), np.asarray(gpu.cus, float))
    waves = np.floor(m / covered + _ROUNDING)
    share = waves * covered / m
    of_share = _overlapped(gpu, waves * wave_s, share * memory)
    return LeastTime(_overlapped(gpu, _whole_waves(m, covered, wave_s), memory), linear, share, of_share)


def least_linear(gpu: Gemms, size: tuple[ArrayLike, ...], *, taken: ArrayLike = 0, cut_columns: bool = False) -> Floats:
    """Least time [s] of `size` = (m, n, k) as if waves need not be whole. taken: CUs that other kernels hold."""
    m, n, k = (np.asarray(length, float) for length in size)
    left = np.asarray(gpu.cus, float) - np.asarray(taken, float)
    if not isinstance(gpu, WaveGemms):
        return gpu.least_s(m, n, k, left)
    covered, wave_s = _wave_of_tiles(gpu, (m, n, k), taken, cut_columns=cut_columns)
    return _overlapped(gpu, np.min(m * wave_s / covered, axis=0), _memory_s(gpu, (m, n, k), left))


def _overlapped(gpu: WaveGemms, compute: Floats, memory: Floats) -> Floats:
    serial = gpu.library.serial_fraction
    # equal to max + serial * min of `waves`
    return np.asarray(np.maximum(compute + serial * memory, memory + serial * compute))


def _wave_of_tiles(gpu: WaveGemms, size: _Size, taken: ArrayLike, *, cut_columns: bool) -> tuple[Floats, Floats]:
    """R_t and tau_t [T, ...]: rows that a wave of each macro-tile covers at most, and its time [s]."""
    _, n, k = size
    granted = _granted(gpu, taken)
    tiles: Any = np.array([(tile.rows, tile.cols, tile.efficiency) for tile in gpu.library.tiles], float).T
    library = gpu.library
    numbers = (*size, granted, gpu.flop_per_s_per_cu, gpu.hbm_bytes_per_s)
    dimensions = max(map(np.ndim, (*numbers, library.prologue_s, library.cache_miss, library.serial_fraction)))
    outputs, rows, efficiency = tiles.reshape(3, -1, *(1,) * dimensions)  # of a tile: along n, and along m
    wave_s = 2 * outputs * rows * k / (np.asarray(gpu.flop_per_s_per_cu, float) * efficiency)
    # a tile at the edge computes as long as a whole one, unless columns are cut
    across = n / outputs if cut_columns else np.ceil(n / outputs)
    covered, wave_s = np.broadcast_arrays(
        rows * granted / across, wave_s + np.asarray(library.prologue_s, float), subok=False
    )
    return covered, wave_s


def _granted(gpu: WaveGemms, taken: ArrayLike) -> Floats:
    """CUs that set the pace while others hold `taken`: those of the engine with the fewest, times the engines."""
    left = np.asarray(gpu.cus, float) - np.asarray(taken, float)
    if gpu.engines is None or gpu.library.assignment != "static":
        return np.asarray(left)
    count = gpu.engines.num_dies * gpu.engines.engines_per_die
    paced = count * np.maximum(fewest_free_cus(gpu.engines, gpu.cus, taken), 1.0)
    # alone, engines with unequal CUs do not count
    return np.asarray(np.where(np.asarray(taken) > 0, np.minimum(left, paced), left))


def _whole_waves(m: Floats, covered: Floats, wave_s: Floats) -> Floats:
    """Minimum over whole numbers of waves w of w H(m / w): convex in w, so beside its minimum over all w."""
    best = np.argmin(wave_s / covered, axis=0)[None]  # the tile of least time for a row
    ratio = m / np.take_along_axis(covered, best, axis=0)[0]
    fewest = np.ceil(m / covered.max(axis=0) - _ROUNDING)  # the widest tile covers most rows in a wave
    # whole numbers at either side of the minimum
    counts = [np.maximum(np.maximum(of, fewest), 1.0) for of in (np.floor(ratio), np.ceil(ratio - _ROUNDING))]
    return np.asarray(np.minimum.reduce([count * _hull(m / count, covered, wave_s) for count in counts]))


def _hull(rows: Floats, covered: Floats, wave_s: Floats) -> Floats:
    """H at `rows`: the least mean time of waves that cover so many rows on average."""
    low, high, cheap, dear = covered[:, None], covered[None], wave_s[:, None], wave_s[None]
    mixes = (low < rows) & (high > rows)  # a mean of a narrower and a wider tile
    share = np.where(mixes, (high - rows) / np.where(mixes, high - low, 1.0), 1.0)
    fits = mixes | (low >= rows * (1 - _ROUNDING))  # or one tile that covers enough
    seconds = np.where(fits, share * cheap + (1 - share) * dear, np.inf)
    return np.asarray(seconds.min(axis=(0, 1)))


def _memory_s(gpu: WaveGemms, size: _Size, left: Floats) -> Floats:
    """M: operands are read at least once, and again by each wave as far as the largest tile leaves it."""
    m, n, k = size
    outputs, rows = (max(getattr(tile, side) for tile in gpu.library.tiles) for side in ("rows", "cols"))
    # a super-tile of a wave: as many tiles a side
    again = 1 / np.minimum(np.sqrt(left) * outputs, n) + 1 / np.minimum(np.sqrt(left) * rows, m)
    operands = np.maximum(k * m * n * again * np.asarray(gpu.library.cache_miss, float), k * (m + n))  # once at least
    return np.asarray(gpu.element_bytes * (operands + m * n) / np.asarray(gpu.hbm_bytes_per_s, float))
