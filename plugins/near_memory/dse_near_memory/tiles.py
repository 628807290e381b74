"""A GEMM in waves of workgroups: which panels of its inputs a wave uses, and in which order tiles are dealt out.

Tiles of the output are dealt out along its major side, W to a wave. A panel is the part of an operand that a row or
column of tiles needs, for all of k; waves stream their panels step by step of k. Of both sides, the GEMM takes the
major one with which its waves ask for less: the order is the library's, which does not know what a cache keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulators.costs.gemm.waves import GemmShape, WaveGemms
from simulators.hardware.machine import Gpu
from simulators.hardware.parts import ELEMENT_BYTES

Ints = NDArray[np.int64]


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

    @property
    def units(self) -> int:
        """Groups of tiles that a CU takes at once."""
        tiles = self.grid[0] * self.grid[1]
        # full waves keep all CUs busy; in the last one fewer tiles than CUs may be left
        return (self.waves - 1) * self.concurrent + min(self.concurrent, tiles - (self.waves - 1) * self.wave)

    def unit_of(self, tile: Ints) -> Ints:
        """Find the unit of tiles, in the order of launch: CUs take those of a wave one by one, and again."""
        # tiles of a wave go to CUs in turn, so a CU has tiles that are `concurrent` apart
        return np.asarray(tile // self.wave * self.concurrent + tile % self.wave % self.concurrent)

    @cached_property
    def panels(self) -> list[tuple[range, Sequence[int]]]:
        """Panels of the major and of the minor side that each wave uses."""
        down, along = self.grid
        used = list[tuple[range, Sequence[int]]]()
        for wave in range(self.waves):
            first, last = wave * self.wave, min((wave + 1) * self.wave, down * along) - 1
            # at most one row of tiles: a wave of several rows uses every column
            columns = [tile % along for tile in range(first, min(last, first + along - 1) + 1)]
            used.append((range(first // along, last // along + 1), sorted(columns)))
        return used

    @property
    def asked_bytes(self) -> int:
        """Bytes of inputs that waves ask for, each wave once."""
        return sum(self.panel_bytes(side, panel) for wave in self.panels for side in (0, 1) for panel in wave[side])

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        return self.element_bytes * self.major * self.minor

    def panel_bytes(self, side: int, panel: int) -> int:
        """Bytes of a panel of the major (0) or the minor (1) side, which the edge of the matrix may cut."""
        size, tile = ((self.major, self.rows), (self.minor, self.cols))[side]
        # the last panel may be cut by the edge
        return self.element_bytes * self.k * (min(size, (panel + 1) * tile) - panel * tile)


def tile_gemm(gpu: Gpu, shape: tuple[int, int, int], *, precision: str) -> Tiling:
    """The GEMM C[m, n] = A[m, k] B[k, n] in the order in which waves ask for less.

    Raises ValueError for a GPU without `gemm.workgroups_per_cu` or `gemm.tile_depth`.
    """
    if gpu.gemm.workgroups_per_cu is None or gpu.gemm.tile_depth is None:
        raise ValueError("waves of requests need gpu.gemm.workgroups_per_cu and gpu.gemm.tile_depth")
    m, n, k = shape
    kernel = WaveGemms.of(gpu, precision).cost(GemmShape(m, n, k)).kernel
    rows, cols, rounds = int(kernel.rows), int(kernel.cols), float(kernel.waves)
    numbers = (int(ELEMENT_BYTES[precision]), int(gpu.num_cus * gpu.gemm.workgroups_per_cu), int(gpu.num_cus))
    element, wave, cus = numbers
    # a kernel's time is that of its rounds, each a tile on every CU
    tile_s, depth = float(kernel.compute_s) / rounds, int(gpu.gemm.tile_depth)
    down = Tiling(m, n, k, element, rows, cols, wave, cus, tile_s, depth)
    # the transposed problem: the other side is dealt out first
    along = Tiling(n, m, k, element, cols, rows, wave, cus, tile_s, depth)
    # libraries pick the order by size alone, and do not know the cache
    return min((down, along), key=lambda tiling: tiling.asked_bytes)
