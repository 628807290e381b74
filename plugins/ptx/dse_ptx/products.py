"""Products of matrices in fp32 by our kernels (`kernels/sgemm.cu`), timed on the SMs of a GPU.

A tile's kernel is executed on 2 x 2 x 2 blocks of the product, over a few steps of k. Addresses are affine in a block's
coordinates, which the eighth block proves, so that these streams stand for all blocks. The time over all of k is that
of few steps and of twice as many, continued; waves of blocks follow one another, each with caches that hold nothing of
its k. The library's choice of a tile, and of parts of k, is unknown: ours are those that take the least time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dse_ptx.arguments import Pointer
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.kernels import kernel_text
from dse_ptx.sm_arrays import Grid
from dse_ptx.sms import SmArray
from dse_ptx.timing import occupancy, time_launch
from dse_ptx.warp_trace import WarpTrace

STEP, STEPS = 8, 4
"""Elements of k in a step of a tile, and steps that are simulated, and twice as many."""
_PAGE, _FEW = 1 << 21, 2  # a page of 2 MiB


@dataclass(frozen=True)
class Product:
    """C [m, n] = A [m, k] B [k, n] by columns, as BLAS has it; a transposed matrix lies by rows."""

    m: int
    n: int
    k: int
    transposed_a: bool = False
    transposed_b: bool = False

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements from row to row and along k of A, from column to column and along k of B."""
        return (
            *((self.k, 1) if self.transposed_a else (1, self.m)),
            *((1, self.n) if self.transposed_b else (self.k, 1)),
        )


@dataclass(frozen=True)
class Tiling:
    """A kernel's tile of C, and the parts of k. efficiency: of its arithmetic, to choose what is simulated."""

    rows: int
    cols: int
    threads: int
    least_blocks: int
    efficiency: float
    parts: int = 1

    @property
    def registers(self) -> int:
        """Registers of a thread that the launch bounds leave."""
        # an SM has 65,536 registers; 255 is the most that an instruction can name
        return min(65536 // (self.threads * self.least_blocks), 255)

    def grid(self, product: Product) -> tuple[int, int, int]:
        """Blocks along m, n and k."""
        return -(-product.m // self.rows), -(-product.n // self.cols), self.parts

    def depth(self, product: Product) -> int:
        """Elements of k of a block."""
        # parts are whole steps; the last one may be shorter in the product, which is neglected
        return -(-product.k // (self.parts * STEP)) * STEP


TILINGS = (
    Tiling(128, 128, 256, 2, 0.9),
    Tiling(128, 64, 128, 4, 0.85),
    Tiling(64, 64, 128, 4, 0.75),
    Tiling(128, 32, 128, 4, 0.7),
    Tiling(32, 32, 64, 8, 0.5),
    Tiling(64, 16, 64, 8, 0.45),
)
"""Kernels of `sgemm.cu`; registers are those that its launch bounds leave."""
_PARTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ProductTime:
    """Time of a product with its launches, by the tiling that is fastest."""

    seconds: float
    tiling: Tiling
    flop: float


@functools.cache
def kernels() -> Module:
    """The kernels of `sgemm.cu` on a device of their own."""
    return Module(kernel_text("sgemm"), PtxDevice(), "sgemm.ptx")


def trace_product(product: Product, tiling: Tiling, steps: int) -> tuple[WarpTrace, Grid]:
    """Streams of a block over so many steps of k, and all blocks of the product.

    Raises RuntimeError where addresses are not affine in a block's coordinates.
    """
    module, (ai, ak, bj, bk), depth = kernels(), product.strides, steps * STEP
    device, parts = module.device, 2 if tiling.parts > 1 else 1
    # two blocks in each direction show what changes from one to the next
    mark, (rows, cols) = len(device), (2 * tiling.rows, 2 * tiling.cols)
    # a matrix reaches from its first to its last element: strides times the last index of each axis
    reach = ((rows - 1) * ai + (parts * depth - 1) * ak + 1, (cols - 1) * bj + (parts * depth - 1) * bk + 1)
    a, b, c = (device.allocate(4 * size) for size in (*reach, (cols - 1) * product.m + rows))
    sizes = rows, cols, parts * depth, ai, ak, bj, bk, product.m, depth
    # every block of the small product: the last one proves that addresses are affine
    options = LaunchOptions(sample=tuple(range(4 * parts)))
    run = module.launch(
        f"sgemm_{tiling.rows}x{tiling.cols}", (2, 2, parts), (tiling.threads,), (a, b, c, *sizes), options
    )
    device.release(mark)
    assert run.trace is not None
    first, shift = _first_block(run.trace, parts)
    shift[:, 2] *= tiling.depth(product) / depth  # of the whole k, whose parts lie further apart
    first = apart(first, (a, b, c), (4 * product.m * product.k, 4 * product.k * product.n))
    # m runs fastest, then n, then parts of k: the order in which a GPU starts blocks
    places = np.stack(np.meshgrid(*map(np.arange, tiling.grid(product)), indexing="ij"), -1).transpose(2, 1, 0, 3)
    return bound_registers(first, tiling), Grid(places.reshape(-1, 3), shift.astype(np.int64))


def apart(trace: WarpTrace, pointers: Sequence[Pointer], sizes: Sequence[int]) -> WarpTrace:
    """The trace with its tensors as far apart as their whole sizes [bytes] demand, of which a part was executed on."""
    bases, ends = np.array([pointer.address for pointer in pointers]), np.cumsum([0, *sizes])
    begins = (-(-ends // _PAGE) + 1 + np.arange(len(ends))) * _PAGE  # a page lies between two
    # -1: below the first tensor, an address of shared memory
    place = np.searchsorted(bases, trace.addresses.max(axis=1), side="right") - 1
    moved = np.where(place < 0, 0, (begins - bases)[np.maximum(place, 0)])  # shared memory stays
    addresses = np.where(trace.addresses > 0, trace.addresses + moved[:, None].astype(np.uint64), 0)
    return replace(trace, addresses=addresses.astype(np.uint64))


def bound_registers(trace: WarpTrace, tiling: Tiling) -> WarpTrace:
    """The trace with the registers to which launch bounds hold an assembler."""
    return replace(trace, registers_per_thread=min(trace.registers_per_thread, tiling.registers))


def _first_block(trace: WarpTrace, parts: int) -> tuple[WarpTrace, np.ndarray]:
    """The first block's streams, and the shift [accesses, 3] of their addresses to its neighbours."""
    blocks = np.searchsorted(trace.blocks, np.arange(4 * parts + 1))
    rows = trace.starts[blocks]
    alike = [slice(rows[block], rows[block + 1]) for block in range(4 * parts)]
    of_first = trace.access[alike[0]]
    has = of_first >= 0
    count = int(has.sum())
    firsts = []
    for place in alike:
        access = trace.access[place]
        if not np.array_equal(trace.pcs[place], trace.pcs[alike[0]]):
            raise RuntimeError("blocks take different ways")
        # the highest lane's address stands for the access; all lanes shift alike
        firsts.append(trace.addresses[access[access >= 0]].max(axis=1).astype(np.int64))
    # places of neighbours along x, y and z in a grid of 2 x 2 x parts
    shift = np.stack([firsts[1] - firsts[0], firsts[2] - firsts[0], firsts[4 * (parts - 1)] - firsts[0]], axis=1)
    # a block shifted along all axes at once lies where the sum of the three shifts puts it
    if not np.array_equal(firsts[0] + shift.sum(axis=1), firsts[-1]):
        raise RuntimeError("addresses are not affine in a block's coordinates")
    access = np.where(has, np.cumsum(has) - 1, -1)
    chosen = of_first[has]
    first = replace(
        trace, blocks=trace.blocks[: blocks[1]], starts=trace.starts[: blocks[1] + 1], pcs=trace.pcs[alike[0]],
        active=trace.active[alike[0]], access=access, addresses=trace.addresses[chosen],
        bytes_per_lane=trace.bytes_per_lane[chosen],
    )  # fmt: skip
    assert count == len(chosen)
    return first, shift.astype(np.float64)


def time_product(product: Product, machine: SmArray) -> ProductTime:
    """Time a product by its best tiling: of all, the few that arithmetic and traffic alone let expect most of."""
    likely = sorted(_tilings(product, machine), key=lambda each: _estimate(product, each, machine))[:_FEW]
    times = {tiling: _simulate(product, tiling, machine) for tiling in likely}
    best = min(times, key=times.__getitem__)
    return ProductTime(times[best], best, 2.0 * product.m * product.n * product.k)


def _tilings(product: Product, machine: SmArray) -> Iterator[Tiling]:
    """Tilings whose parts of k are some steps deep, and no more than fill the GPU a few times."""
    for tiling in TILINGS:
        for parts in _PARTS:
            blocks = math.prod(tiling.grid(product)) * parts
            # eight steps at least: a part begins with a fetch that nothing hides, and ends with atomic sums
            if parts == 1 or (product.k >= parts * 8 * STEP and blocks <= 8 * tiling.least_blocks * machine.num_sms):
                yield replace(tiling, parts=parts)


def _estimate(product: Product, tiling: Tiling, machine: SmArray) -> float:
    """Seconds by arithmetic of whole waves, or by traffic of DRAM with the sums of parts, whichever is longer."""
    blocks, of_sm = math.prod(tiling.grid(product)), machine.peak_flop_per_s / machine.num_sms
    flop = 2.0 * tiling.rows * tiling.cols * tiling.depth(product)
    # an SM whose places are not all taken hides less
    # half of the places are taken to suffice
    busy = min(1.0, blocks / (machine.num_sms * tiling.least_blocks / 2))
    waves = max(math.ceil(blocks / machine.num_sms), 1)
    rate = machine.memory.gpu.dram.bytes_per_s
    # every part beyond the first reads and writes C once more: 2 parts - 1 passes
    moved = 4.0 * (product.m * product.k + product.k * product.n + product.m * product.n * (2 * tiling.parts - 1))
    return max(waves * flop / (of_sm * tiling.efficiency * max(busy, 0.5)), moved / rate)


def _simulate(product: Product, tiling: Tiling, machine: SmArray) -> float:
    """Seconds of all waves, with the launch, and another one that zeroes C where parts of k are added."""
    launches = [trace_product(product, tiling, steps) for steps in (STEPS, 2 * STEPS)]
    zeroed_s = machine.sm.launch * machine.cycle_s * (tiling.parts > 1)
    return extrapolate(launches, tiling.depth(product) / STEP, machine) + zeroed_s


def extrapolate(launches: Sequence[tuple[WarpTrace, Grid]], steps: float, machine: SmArray) -> float:
    """Seconds over so many steps of k of a launch that was traced over STEPS, and over twice as many."""
    wave, blocks = occupancy(launches[0][0], machine) * machine.num_sms, len(launches[0][1].places)
    seconds = machine.sm.launch * machine.cycle_s
    for times, count in ((blocks // wave, wave), (1, blocks % wave)):
        if times and count:
            short, long = (_seconds(trace, grid, count, machine) for trace, grid in launches)
            # cost of a step beyond the first ones: what the longer run takes more
            seconds += times * (short + max(long - short, 0.0) * (steps - STEPS) / STEPS)
    return seconds


def _seconds(trace: WarpTrace, grid: Grid, blocks: int, machine: SmArray) -> float:
    """Seconds of the first blocks without their launch."""
    done = time_launch(trace, machine, grid=replace(grid, places=grid.places[:blocks]))
    return done.seconds - done.launch_s
