"""Convolutions in fp32 as implicit products (`kernels/sgemm.cu`), timed on the SMs of a GPU.

A block in the middle of an image is executed over a few steps of k, and stands for all: blocks of other filters, pixels
and images access the same bytes of theirs. Padding at the edges of images, which saves loads, is neglected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dse_ptx.execution import LaunchOptions
from dse_ptx.products import STEP, STEPS, Tiling, apart, bound_registers, extrapolate, kernels
from dse_ptx.sm_arrays import Grid
from dse_ptx.sm_state import SECTOR_BYTES
from dse_ptx.sms import SmArray
from dse_ptx.warp_trace import WarpTrace

TILINGS = (Tiling(128, 128, 256, 2, 0.9), Tiling(64, 128, 128, 4, 0.85), Tiling(32, 128, 128, 4, 0.7))
_PARTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Convolution:
    """A convolution forward of `images` x [channels, height, width] by filters of taps (r, s)."""

    images: int
    channels: int
    height: int
    width: int
    filters: int
    taps: tuple[int, int]
    pad: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)

    @property
    def plane(self) -> tuple[int, int]:
        """Rows and columns of an output image."""
        high = (self.height + 2 * self.pad[0] - self.taps[0]) // self.stride[0] + 1
        return high, (self.width + 2 * self.pad[1] - self.taps[1]) // self.stride[1] + 1

    @property
    def k(self) -> int:
        """Elements of a window."""
        return self.channels * self.taps[0] * self.taps[1]

    @property
    def table(self) -> np.ndarray:
        """For each element of a window (c r s), its offset and r << 16 | s: [k, 2]."""
        c, r, s = (axis.reshape(-1) for axis in np.indices((self.channels, *self.taps)))
        return np.stack([(c * self.height + r) * self.width + s, r << 16 | s], axis=1).astype(np.int32)


def time_convolution(layer: Convolution, machine: SmArray) -> tuple[float, Tiling]:
    """Seconds of a convolution with its launch, and the tiling that is fastest."""
    times = {}
    for tiling in TILINGS:
        # the smallest tiling always stays
        if tiling.rows >= 2 * layer.filters and tiling is not TILINGS[-1]:
            continue  # more than half of the tile would be empty
        launches = [trace_convolution(layer, tiling, steps) for steps in (STEPS, 2 * STEPS)]
        blocks = len(launches[0][1].places)
        for parts in _PARTS:
            if parts == 1 or (
                layer.k >= parts * 8 * STEP and blocks * parts <= 4 * machine.num_sms * tiling.least_blocks
            ):
                times[replace(tiling, parts=parts)] = _seconds(layer, launches, parts, machine)
    best = min(times, key=times.__getitem__)
    return times[best], best


def _seconds(layer: Convolution, launches: list[tuple[WarpTrace, Grid]], parts: int, machine: SmArray) -> float:
    """Seconds with so many parts of k: as many more blocks, of other filters and channels."""
    # in steps
    depth = -(-layer.k // (parts * STEP))
    apart_by = np.array([0, 0, layer.images * 16], np.int64)  # images that do not exist: parts share no bytes
    both = [
        (trace, Grid(np.concatenate([grid.places + part * apart_by for part in range(parts)]), grid.shift))
        for trace, grid in launches
    ]
    return extrapolate(both, depth, machine) + machine.sm.launch * machine.cycle_s * (parts > 1)


def trace_convolution(layer: Convolution, tiling: Tiling, steps: int) -> tuple[WarpTrace, Grid]:
    """Streams of a block over so many steps of k, and all blocks of the convolution."""
    module, depth, (high, wide) = kernels(), steps * STEP, layer.plane
    device, mark, plane = module.device, len(module.device), high * wide
    # a tile in the middle of an image: its windows do not reach into padding
    middle = plane // 2 // tiling.cols
    images = min(-(-(middle + 1) * tiling.cols // plane), layer.images)
    image_bytes = 4 * layer.channels * layer.height * layer.width
    # repeated where the steps executed go beyond a window
    table = np.resize(layer.table, (max(depth, layer.k), 2))
    w, y = (
        device.allocate(4 * size) for size in (layer.filters * max(layer.k, depth), 2 * tiling.rows * plane * images)
    )
    x, entries = device.allocate(images * image_bytes), device.allocate(table)
    window = np.array(
        [0] * 4 + [images, layer.channels, layer.height, layer.width, high, wide, *layer.stride, *layer.pad], np.int32
    )
    # two pointers of 64 bits in the first four words
    window[:4] = np.array([x.address, entries.address]).view(np.int32)
    # the launch ends with the sampled tile: blocks behind it would add nothing
    sizes = layer.filters, min(images * plane, (middle + 1) * tiling.cols), layer.k, depth
    options = LaunchOptions(sample=(middle,))
    run = module.launch(
        f"convolution_{tiling.rows}x{tiling.cols}", (1, middle + 1), (tiling.threads,), (w, window, y, *sizes), options
    )
    device.release(mark)
    assert run.trace is not None
    trace = apart(
        run.trace,
        (w, y, x, entries),
        (4 * layer.filters * layer.k, 4 * layer.images * layer.filters * plane, layer.images * image_bytes),
    )
    return bound_registers(trace, tiling), _grid(
        layer, tiling, run.trace, (w.address, y.address, x.address, entries.address), middle
    )


def _grid(layer: Convolution, tiling: Tiling, trace: WarpTrace, bases: tuple[int, ...], middle: int) -> Grid:
    """Blocks by filters, pixels of an image and images, and how far apart they access each tensor."""
    plane, down = layer.plane[0] * layer.plane[1], layer.stride[0] * layer.stride[1]
    image = layer.channels * layer.height * layer.width
    # tensor of each access, in the order of their allocation: filters, results, images, table
    place = np.searchsorted(bases, trace.addresses.max(axis=1), side="right") - 1
    of_w, of_y, of_x = (4 * np.array(sizes) for sizes in (
        (tiling.rows * layer.k, 0, 0), (tiling.rows * plane, tiling.cols, layer.filters * plane),
        (0, tiling.cols * down, image),
    ))  # fmt: skip
    shift = np.zeros((len(place), 3), np.int64)
    for number, steps in enumerate((of_w, of_y, of_x)):
        # whole sectors; the table, the fourth tensor, is the same for all blocks
        shift[place == number] = steps // SECTOR_BYTES * SECTOR_BYTES
    tiles = np.arange(-(-layer.images * plane // tiling.cols))
    # the image of a tile's first pixel
    images = tiles * tiling.cols // plane
    within = tiles - -(-images * plane // tiling.cols) - min(middle, plane // tiling.cols)
    groups = -(-layer.filters // tiling.rows)
    places = np.stack(
        [np.tile(np.arange(groups), len(tiles)), np.repeat(within, groups), np.repeat(images, groups)], axis=1
    )
    return Grid(places, shift)
