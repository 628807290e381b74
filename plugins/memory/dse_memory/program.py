"""Kernels as address traces: a grid of workgroups that run one short program of loads, stores and arithmetic.

A program is written once for all workgroups: addresses are affine in a workgroup's coordinates and in the counters of
its loops, so a trace of any length takes no memory (the operations are those of `dse_memory.engine`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dse_memory import engine as ops


@dataclass(frozen=True)
class Region:
    """A tensor in memory: where it begins, its sizes, and bytes of an element."""

    base: int
    sizes: tuple[int, ...]
    element: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.base + self.elements * self.element


@dataclass(frozen=True)
class Touch:
    """Bytes of a region that a load or store touches: `rows` runs of `bytes`, `step` bytes apart.

    pitch: of rows that no run crosses (0: none). offset: of the first, from the region's begin. grid, loops: bytes for
    each step of a coordinate or a counter, as many as there are. scatter: each run is drawn from the whole region by a
    hash.
    """

    region: Region
    bytes: int
    rows: int = 1
    step: int = 0
    pitch: int = 0
    offset: int = 0
    grid: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()
    scatter: bool = False


@dataclass(frozen=True)
class Program:
    """Operations [P, FIELDS], FLOP of each [P], the grid's extent [4], and how many workgroups a CU may hold."""

    name: str
    code: NDArray[np.int64]
    flop: NDArray[np.float64]
    extent: tuple[int, int, int, int]
    waves: int
    held: int

    @property
    def workgroups(self) -> int:
        """Number of workgroups of the whole grid."""
        return math.prod(self.extent)


@dataclass
class Writer:
    """Writes a program, operation by operation. pc: the number of its first load or store."""

    pc: int
    rows: list[list[int]] = field(default_factory=list)
    flop: list[float] = field(default_factory=list)
    open: list[tuple[int, int]] = field(default_factory=list)

    def load(self, *touched: Touch) -> Writer:
        """Loads, one instruction each."""
        for touch in touched:
            self._touch(ops.LOAD, touch)
        return self

    def store(self, *touched: Touch) -> Writer:
        """Stores, one instruction each."""
        for touch in touched:
            self._touch(ops.STORE, touch)
        return self

    def compute(self, flop: float) -> Writer:
        """Arithmetic of a workgroup."""
        return self._add([ops.COMPUTE], flop)

    def wait(self) -> Writer:
        """Until all that was loaded is there."""
        return self._add([ops.WAIT])

    def fence(self) -> Writer:
        """Until all that was loaded before the last fence is there: a tile ahead is fetched meanwhile."""
        return self._add([ops.FENCE])

    def repeat(self, times: int) -> Writer:
        """Open a loop; the first that is open has counter 0."""
        self.open.append((len(self.rows), max(1, times)))
        return self

    def close(self) -> Writer:
        """Close the innermost loop."""
        target, times = self.open.pop()
        row = [0] * ops.FIELDS
        row[ops.OP], row[ops.LEVEL], row[ops.TIMES], row[ops.TARGET] = ops.LOOP, len(self.open), times, target
        return self._add(row)

    def program(self, name: str, extent: Sequence[int], *, waves: int = 4, held: int = 64) -> Program:
        """The program on a grid."""
        assert not self.open, "a loop is open"
        self._add([ops.END])
        sizes = (*(1 for _ in range(4 - len(extent))), *(max(1, size) for size in extent))
        a, b, c, d = sizes
        return Program(name, np.array(self.rows, np.int64), np.array(self.flop), (a, b, c, d), waves, held)

    def _touch(self, op: int, touch: Touch) -> None:
        region, row = touch.region, [0] * ops.FIELDS
        row[ops.OP], row[ops.PC], row[ops.BASE] = op, self.pc, region.base + touch.offset
        row[ops.ROWS], row[ops.STEP], row[ops.BYTES] = touch.rows, touch.step, touch.bytes
        row[ops.LOW], row[ops.HIGH] = region.base, region.end
        row[ops.PITCH] = touch.pitch
        row[ops.SCATTER] = region.elements * region.element // touch.bytes if touch.scatter else 0
        first = ops.GRID + 4 - len(touch.grid)
        row[first : ops.GRID + 4] = touch.grid
        row[ops.LOOPS : ops.LOOPS + len(touch.loops)] = touch.loops
        self.pc += 1
        self._add(row)

    def _add(self, row: list[int], flop: float = 0.0) -> Writer:
        self.rows.append(row + [0] * (ops.FIELDS - len(row)))
        self.flop.append(flop)
        return self
