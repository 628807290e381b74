"""A GEMM in waves of workgroups, and the share of each panel of its inputs that a wave reads from the HBM.

Tiles of the output are dealt out along its major side, W to a wave. A panel is the part of an operand that a row or
column of tiles needs, for all of k. Waves stream their panels step by step of k, so that between two uses of a line the
other panels of the waves in between go through the last-level cache, F bytes with it: with x = 1/2 of the way along k

    F = (1 - x) |panels of waves u .. w - 1| + x |panels of waves u + 1 .. w| + (w - u) outputs of a wave

for a panel last used by wave u; outputs count where they are stored through the cache. A line of a set of a ways is
still there if fewer than a others met its set: P(Poisson(a F / L) < a), as in `simulators.costs.gemm.stages`, which
takes F the same for all panels of an operand. Of both sides, the GEMM takes the major one that reads less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as cache_calls
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from simulators.costs.gemm.waves import GemmShape, WaveGemms
from simulators.hardware.machine import Gpu
from simulators.hardware.parts import ELEMENT_BYTES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LastLevelCache:
    """A last-level cache of `size` bytes and `ways`."""

    size: float
    ways: int


@dataclass(frozen=True)
class Tiling:
    """A GEMM of (major, minor, k) elements in tiles of `rows` x `cols`, dealt out along the major side.

    wave: workgroups at once. concurrent: CUs. tile_s: time of a tile on a CU [s]. depth: elements of k in a step.
    """

    major: int
    minor: int
    k: int
    element_bytes: int
    rows: int
    cols: int
    wave: int
    concurrent: int
    tile_s: float
    depth: int

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along both sides."""
        return -(-self.major // self.rows), -(-self.minor // self.cols)

    @property
    def waves(self) -> int:
        """Number of waves."""
        tiles = self.grid[0] * self.grid[1]
        return -(-tiles // self.wave)

    @property
    def steps(self) -> int:
        """Steps of k."""
        return -(-self.k // self.depth)

    def cu_of(self, tile: Ints) -> Ints:
        """Find the place of tiles among CUs of all waves, wave by wave: CUs take those of a wave one by one."""
        return np.asarray(tile // self.wave * self.concurrent + tile % self.wave % self.concurrent)

    @cached_property
    def panels(self) -> list[tuple[range, Sequence[int]]]:
        """Panels of the major and of the minor side that each wave uses."""
        down, along = self.grid
        used = list[tuple[range, Sequence[int]]]()
        for wave in range(self.waves):
            first, last = wave * self.wave, min((wave + 1) * self.wave, down * along) - 1
            columns = [tile % along for tile in range(first, min(last, first + along - 1) + 1)]
            used.append((range(first // along, last // along + 1), sorted(columns)))
        return used

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        return self.element_bytes * self.major * self.minor

    def panel_bytes(self, side: int, panel: int) -> int:
        """Bytes of a panel of the major (0) or the minor (1) side, which the edge of the matrix may cut."""
        size, tile = ((self.major, self.rows), (self.minor, self.cols))[side]
        return self.element_bytes * self.k * (min(size, (panel + 1) * tile) - panel * tile)


@dataclass(frozen=True)
class Uses:
    """Uses of panels by waves. wave, side, panel [U]. miss [U]: share of its lines that is read from the HBM."""

    tiling: Tiling
    wave: Ints
    side: Ints
    panel: Ints
    miss: Floats

    @property
    def read_bytes(self) -> float:
        """Bytes that are read from the HBM."""
        pairs = zip(self.side.tolist(), self.panel.tolist(), strict=True)
        sizes = np.array([self.tiling.panel_bytes(side, panel) for side, panel in pairs], float)
        return float(sizes @ self.miss)


def tile_gemm(gpu: Gpu, shape: tuple[int, int, int], *, precision: str, bypass: bool) -> Uses:
    """The GEMM C[m, n] = A[m, k] B[k, n] in the order that reads less. bypass: whether outputs pass by the cache.

    Raises ValueError for a GPU without `llc`, `gemm.workgroups_per_cu` or `gemm.tile_depth`.
    """
    if gpu.llc is None or gpu.gemm.workgroups_per_cu is None or gpu.gemm.tile_depth is None:
        raise ValueError("stages need gpu.llc, gpu.gemm.workgroups_per_cu and gpu.gemm.tile_depth")
    m, n, k = shape
    kernel = WaveGemms.of(gpu, precision).cost(GemmShape(m, n, k)).kernel
    rows, cols, rounds = int(kernel.rows), int(kernel.cols), float(kernel.waves)
    cache = LastLevelCache(float(gpu.llc.bytes), int(gpu.llc.ways))
    numbers = (int(ELEMENT_BYTES[precision]), int(gpu.num_cus * gpu.gemm.workgroups_per_cu), int(gpu.num_cus))
    tile_s, depth = float(kernel.compute_s) / rounds, int(gpu.gemm.tile_depth)
    element, wave, cus = numbers
    down = Tiling(m, n, k, element, rows, cols, wave, cus, tile_s, depth)
    along = Tiling(n, m, k, element, cols, rows, wave, cus, tile_s, depth)
    return min((use_panels(tiling, cache, bypass) for tiling in (down, along)), key=lambda uses: uses.read_bytes)


@lru_cache(maxsize=64)
def use_panels(tiling: Tiling, cache: LastLevelCache, bypass: bool) -> Uses:
    """Uses of all waves, with what each misses."""
    from scipy.special import gammaincc

    touched = [{(side, panel) for side in (0, 1) for panel in wave[side]} for wave in tiling.panels]
    last: dict[tuple[int, int], int] = {}
    rows, through = list[tuple[int, int, int]](), list[float]()
    outputs = 0.0 if bypass else tiling.output_bytes / tiling.waves
    between = cache_calls(lambda before, wave: _between(tiling, touched, before, wave) + (wave - before) * outputs)
    for wave, panels in enumerate(touched):
        for side, panel in sorted(panels):
            before = last.get((side, panel))
            rows.append((wave, side, panel))
            through.append(np.inf if before is None else between(before, wave))
            last[side, panel] = wave
    load = cache.ways * np.array(through) / cache.size
    miss = np.where(np.isfinite(load), 1 - gammaincc(cache.ways, np.where(np.isfinite(load), load, 0.0)), 1.0)
    columns = np.array(rows, np.int64).T
    return Uses(tiling, columns[0], columns[1], columns[2], miss)


def _between(tiling: Tiling, touched: Sequence[set[tuple[int, int]]], before: int, wave: int) -> float:
    """Bytes of panels that go through the cache between two uses of one, by its waves."""
    parts = touched[before:wave], touched[before + 1 : wave + 1]
    streamed = [sum(tiling.panel_bytes(*panel) for panel in set().union(*part)) for part in parts]
    return sum(streamed) / 2
