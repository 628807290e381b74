"""Products by kernels of warpgroups (`tiles.products`), timed on the SMs of a GPU.

As in `dse_ptx.products`: a kernel is executed on 2 x 2 clusters of the product, over a few steps of k. What its copies
address is affine in a cluster's coordinates, which the fourth cluster proves, so that the first one stands for all.
The time over all of k is that of few steps and of twice as many, continued; waves of blocks follow one another, each
with caches that hold nothing of its k. Tiles at the edges count as whole ones. The library's choice of a kernel is
unknown: ours is the one of `KERNELS` that takes the least time, of the few of which arithmetic lets expect most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dse_ptx.arguments import Pointer
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.sm_arrays import Grid
from dse_ptx.sms import SmArray
from dse_ptx.tiles.launches import ProductSize, product_arguments
from dse_ptx.tiles.products import NAME, product_text
from dse_ptx.tiles.shape import STEP, ProductKernel
from dse_ptx.timing import occupancy, time_launch
from dse_ptx.warp_trace import Unit, WarpTrace

KERNELS = (
    ProductKernel("bf16", columns=256, cluster=(2, 1)),
    ProductKernel("bf16", columns=192, stages=5, cluster=(2, 1)),
    ProductKernel("bf16", columns=128, stages=6, cluster=(2, 1)),
    ProductKernel("bf16", consumers=1, columns=256, stages=5, cluster=(2, 1)),
)
"""Kernels among which a product has its choice; each has as many stages as shared memory holds."""
STEPS = 8
"""Steps of k that are simulated, and twice as many."""
_PAGE, _FEW = 1 << 21, 3
_FIXED = 4000
"""Cycles of a tile beside its products, to choose what is simulated."""
_SPANS = 2
"""Clusters in each direction that are executed."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TileTime:
    """Time of a product with its launch, by the kernel that is fastest."""

    seconds: float
    kernel: ProductKernel
    flop: float


def time_tiles(size: ProductSize, machine: SmArray, kernels: Sequence[ProductKernel] = KERNELS) -> TileTime:
    """Time a product of 16-bit numbers."""
    likely = sorted(kernels, key=lambda of: _estimate(size, of, machine))[:_FEW]
    times = {of: _simulate(size, of, machine) for of in likely}
    best = min(times, key=times.__getitem__)
    return TileTime(times[best], best, 2.0 * size.m * size.n * size.k)


def clusters_of(size: ProductSize, of: ProductKernel) -> tuple[int, int]:
    """Clusters along m and n."""
    return math.ceil(size.m / (of.rows * of.cluster[0])), math.ceil(size.n / (of.columns * of.cluster[1]))


def _estimate(size: ProductSize, of: ProductKernel, machine: SmArray) -> float:
    """Cycles by the products of whole waves, and what a tile takes beside them."""
    of_cluster, rate = math.prod(of.cluster), machine.sm.pipes["tensor"].lanes * machine.sm.schedulers
    waves = math.ceil(math.prod(clusters_of(size, of)) / (machine.num_sms // of_cluster))
    return waves * (of.rows * of.columns * size.k / rate + _FIXED)


def trace_tiles(size: ProductSize, of: ProductKernel, steps: int) -> tuple[WarpTrace, Grid]:
    """Streams of a cluster over so many steps of k, and all blocks of the product.

    Raises RuntimeError where addresses are not affine in a cluster's coordinates.
    """
    device, (along, across) = PtxDevice(), of.cluster
    small = replace(size, m=_SPANS * along * of.rows, n=_SPANS * across * of.columns, k=steps * STEP, group=_SPANS)
    grid = _SPANS * along, _SPANS * across, 1
    # lines are as long as those of the whole matrices
    pointers = [device.allocate(count) for count in (small.m * size.k * 2, small.n * size.k * 2, small.m * size.n * 2)]
    a, b, c = pointers
    whole = product_arguments(of, replace(small, n=max(size.n, small.n), k=size.k), (a, b, c))
    arguments = [*whole[:6], steps, grid[0], grid[1], small.group]
    options = LaunchOptions(of.shared_bytes, sample=tuple(range(math.prod(grid))))
    run = Module(product_text(of), device, "product.ptx").launch(NAME, grid, (of.threads,), arguments, options)
    assert run.trace is not None
    first, shift = _first_cluster(run.trace)
    first = _apart(first, pointers, (2 * size.m * size.k, 2 * size.n * size.k))
    places = np.repeat(_raster(*clusters_of(size, of), size.group), along * across, axis=0)
    return first, Grid(places, shift)


def _raster(rows: int, columns: int, group: int) -> Ints:
    """Coordinates [clusters, 3] in the order in which clusters begin (`Ring._locate`)."""
    number = np.arange(rows * columns)
    first = number // (group * columns) * group
    height = np.minimum(group, rows - first)
    within = number % (group * columns)
    return np.stack([first + within % height, within // height, np.zeros_like(number)], axis=1).astype(np.int64)


def _first_cluster(trace: WarpTrace) -> tuple[WarpTrace, Ints]:
    """The first cluster's streams, and the shift [accesses, 3] of their addresses to its neighbours."""
    bounds = trace.starts[np.searchsorted(trace.blocks, trace.cluster * np.arange(_SPANS**2 + 1))]
    spans = [slice(begin, end) for begin, end in pairwise(bounds)]
    places = list[Ints]()
    for span in spans:
        if not np.array_equal(trace.pcs[span], trace.pcs[spans[0]]):
            raise RuntimeError("clusters take different ways")
        access = trace.access[span]
        used, units = access[access >= 0], trace.code.units[trace.pcs[span][access >= 0]]
        # a copy by its first address; of others the highest lane's address stands for the access
        words = trace.addresses[used]
        place = np.where(units == Unit.BULK, words[:, 0], words.max(axis=1)).astype(np.int64)
        places.append(np.where(np.isin(units, (Unit.MBARRIER, Unit.BARRIER)), 0, place))
    # clusters along m are next to one another in the order of launch
    shift = np.stack([places[1] - places[0], places[2] - places[0], np.zeros_like(places[0])], axis=1)
    if not np.array_equal(places[0] + shift.sum(axis=1), places[3]):
        raise RuntimeError("addresses are not affine in a cluster's coordinates")
    of_first = trace.access[spans[0]]
    has, warps = of_first >= 0, int(np.searchsorted(trace.blocks, trace.cluster))
    chosen = of_first[has]
    first = replace(
        trace, blocks=trace.blocks[:warps], starts=trace.starts[: warps + 1], pcs=trace.pcs[spans[0]],
        active=trace.active[spans[0]], access=np.where(has, np.cumsum(has) - 1, -1),
        addresses=trace.addresses[chosen], bytes_per_lane=trace.bytes_per_lane[chosen],
    )  # fmt: skip
    return first, shift


def _apart(trace: WarpTrace, pointers: Sequence[Pointer], sizes: Sequence[int]) -> WarpTrace:
    """The trace with its matrices as far apart as their whole sizes [bytes] demand, of which a part was executed on."""
    has = trace.access >= 0
    units = np.zeros(len(trace.addresses), np.int64)
    units[trace.access[has]] = trace.code.units[trace.pcs[has]]
    bases, ends = np.array([pointer.address for pointer in pointers]), np.cumsum([0, *sizes])
    moved = (-(-ends // _PAGE) + 1 + np.arange(len(ends))) * _PAGE - bases
    addresses, copies = trace.addresses.copy(), units == Unit.BULK
    place = np.searchsorted(bases, addresses[copies, 0].astype(np.int64), side="right") - 1
    addresses[copies, 0] = (addresses[copies, 0].astype(np.int64) + moved[place]).astype(np.uint64)
    return replace(trace, addresses=addresses)


def _simulate(size: ProductSize, of: ProductKernel, machine: SmArray) -> float:
    """Seconds of all waves, with the launch."""
    launches = [trace_tiles(size, of, steps) for steps in (STEPS, 2 * STEPS)]
    steps, of_cluster = size.k / STEP, math.prod(of.cluster)
    wave = occupancy(launches[0][0], machine) * (machine.num_sms // of_cluster * of_cluster)
    blocks, seconds = len(launches[0][1].places), machine.sm.launch * machine.cycle_s
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
