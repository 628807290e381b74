"""How each class of kernels touches memory: workgroups of 256 threads in waves of 64, and tiles where products are.

elementwise   16 bytes of a thread of each tensor, one load after another, then the stores
window        four rows of 64 outputs: each row of the window in turn; backward: the rows that hold the tile, once
channels      256 pixels, from channel to channel, so in steps of an image
passes        a row, or 256 columns, `passes` times over; the last pass writes
gemm          a step of a tile of A and of B while the one before is multiplied; C at the end
convolution   the same, the tile of B being rows of pixels, for each channel and row of the filter
strided       a tile's rows in, its columns out, each run of a column apart from the next by a whole row
scattered     a run of a row for each lane of a wave, anywhere; written in order
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from simulators.memory.kernels import (
    Channels,
    Convolution,
    Elementwise,
    Kernel,
    MatrixProduct,
    Passes,
    Scattered,
    Strided,
    Window,
)
from simulators.memory.program import Program, Region, Touch, Writer

_THREADS, _WAVE, _VECTOR_BYTES = 256, 64, 16
_WINDOW_ROWS = 4
_PIXELS = 256

Regions = Mapping[str, Region]


@functools.singledispatch
def program(kernel: Kernel, regions: Regions, pc: int) -> Program:
    """The program of a kernel. pc: the number of its first instruction."""
    raise TypeError(f"no trace of {type(kernel).__name__}")


def _over(size: int, part: int) -> int:
    return -(-size // part)


@program.register
def _elementwise(kernel: Elementwise, regions: Regions, pc: int) -> Program:
    size = _THREADS * _VECTOR_BYTES
    reads, writes = ([Touch(regions[name], size, grid=(size,)) for name in of] for of in (kernel.reads, kernel.writes))
    first = regions[(kernel.reads + kernel.writes)[0]]
    made = Writer(pc).load(*reads).wait().compute(kernel.flop * size / first.element).store(*writes)
    return made.program("elementwise", (_over(first.end - first.base, size),))


@program.register
def _window(kernel: Window, regions: Regions, pc: int) -> Program:
    """Grid: images and channels, tiles of rows, tiles of columns, of the output."""
    out = regions[kernel.writes[0]]
    n, c, height, width = out.sizes
    element, lanes = out.element, min(_WAVE, width)
    made = Writer(pc)
    (_found if kernel.backward else _gathered)(made, kernel, [regions[name] for name in kernel.reads], lanes)
    made.wait().compute(float(kernel.rows * kernel.cols * lanes * _WINDOW_ROWS))
    row = width * element
    steps = (height * row, _WINDOW_ROWS * row, lanes * element)
    run = lanes * element
    made.store(*(Touch(regions[one], run, _WINDOW_ROWS, row, _pitch(row, run), grid=steps) for one in kernel.writes))
    return made.program("window", (n * c, _over(height, _WINDOW_ROWS), _over(width, lanes)))


def _gathered(made: Writer, kernel: Window, sources: list[Region], lanes: int) -> None:
    """Loads of a window: of each of a tile's rows, the window's rows in turn."""
    made.repeat(kernel.rows)
    for region in sources:
        rows, cols = region.sizes[2:]
        row, wide = cols * region.element, ((lanes - 1) * kernel.stride + kernel.cols) * region.element
        down = kernel.stride * row
        steps = (rows * row, _WINDOW_ROWS * down, lanes * kernel.stride * region.element)
        made.load(Touch(region, wide, _WINDOW_ROWS, down, grid=steps, loops=(row,)))
    made.close()


def _found(made: Writer, kernel: Window, sources: list[Region], lanes: int) -> None:
    """Loads of a window's backward pass: the rows whose windows hold a tile, once."""
    high = _over(_WINDOW_ROWS, kernel.stride) + _over(kernel.rows, kernel.stride) - 1
    for region in sources:
        rows, cols = region.sizes[2:]
        row, wide = cols * region.element, _over(lanes + kernel.cols, kernel.stride) * region.element
        steps = (rows * row, _over(_WINDOW_ROWS, kernel.stride) * row, lanes // kernel.stride * region.element)
        made.load(Touch(region, wide, high, row, grid=steps))


@program.register
def _channels(kernel: Channels, regions: Regions, pc: int) -> Program:
    first = regions[kernel.reads[0]]
    n, channels, height, width = first.sizes
    plane, size = height * width * first.element, _PIXELS * first.element
    touched = {
        name: Touch(regions[name], size, grid=(channels * plane, size), loops=(plane,))
        for name in (*kernel.reads, *kernel.writes)
    }
    made = Writer(pc).repeat(channels).load(*(touched[name] for name in kernel.reads)).wait()
    made.compute(kernel.flop * _PIXELS).store(*(touched[name] for name in kernel.writes)).close()
    return made.program("channels", (n, _over(height * width, _PIXELS)))


@program.register
def _passes(kernel: Passes, regions: Regions, pc: int) -> Program:
    first = regions[kernel.reads[0]]
    rows, cols = first.sizes[0], first.elements // first.sizes[0]
    element, row = first.element, cols * first.element
    parts = _over(row, _THREADS * element)
    size = _over(cols, parts) * element
    if kernel.along == "rows":
        extent, steps, grid, loops = (rows,), parts, (row,), (0, size)
    else:
        extent, steps, grid, loops = (parts,), rows, (size,), (0, row)

    def touched(names: tuple[str, ...], *, last: bool) -> list[Touch]:
        return [Touch(regions[name], size, grid=grid, loops=loops[1:] if last else loops) for name in names]

    made, flop = Writer(pc), kernel.flop * size / element
    if kernel.passes > 1:
        made.repeat(kernel.passes - 1).repeat(steps).load(*touched(kernel.reads, last=False)).compute(flop).close()
        made.wait().close()
    made.repeat(steps).load(*touched(kernel.reads, last=True)).fence().compute(flop)
    made.store(*touched(kernel.writes, last=True)).close()
    return made.program("passes", extent)


@program.register
def _gemm(kernel: MatrixProduct, regions: Regions, pc: int) -> Program:
    """Grid: products, tiles of n, tiles of m, the last runs fastest."""
    a, b, c = regions[kernel.a], regions[kernel.b], regions[kernel.c]
    m, n, k, depth, element = kernel.m, kernel.n, kernel.k, min(kernel.depth, kernel.k), a.element
    high, wide = min(kernel.tile[0], m), min(kernel.tile[1], n)
    left = _operand(a, (m, k), (high, depth), across=kernel.transposed_a)
    top = _operand(b, (n, k), (wide, depth), across=not kernel.transposed_b)
    whole, row = (m * k * element, n * k * element, m * n * element), n * element
    made = Writer(pc).repeat(_over(k, depth))
    made.load(replace(left, grid=(whole[0], 0, *left.grid)), replace(top, grid=(whole[1], *top.grid, 0)))
    made.fence().compute(2.0 * high * wide * depth).close()
    made.store(
        Touch(c, wide * element, high, row, _pitch(row, wide * element), grid=(whole[2], wide * element, high * row))
    )
    return made.program("gemm", (kernel.batch, _over(n, wide), _over(m, high)), held=kernel.held)


def _operand(region: Region, sizes: tuple[int, int], tile: tuple[int, int], *, across: bool) -> Touch:
    """A tile of an operand [m, k], or [k, m] where it lies `across`, from tile to tile and from step to step of k."""
    if across:
        row = sizes[0] * region.element
        runs = tile[0] * region.element
        return Touch(region, runs, tile[1], row, _pitch(row, runs), grid=(runs,), loops=(tile[1] * row,))
    row = sizes[1] * region.element
    runs = tile[1] * region.element
    return Touch(region, runs, tile[0], row, _pitch(row, runs), grid=(tile[0] * row,), loops=(runs,))


def _pitch(row: int, run: int) -> int:
    """The row that a run of a tile must not cross, where rows are no whole number of tiles."""
    return row if row % run else 0


@program.register
def _convolution(kernel: Convolution, regions: Regions, pc: int) -> Program:
    """Grid: tiles of filters, images, tiles of rows, tiles of columns."""
    x, w, y = regions[kernel.x], regions[kernel.w], regions[kernel.y]
    n, channels, height, width = x.sizes
    filters, high, wide = y.sizes[1:]
    element, tile, cols = x.element, min(kernel.tile[0], filters), min(wide, kernel.tile[1])
    rows = min(high, max(1, kernel.tile[1] // cols))
    row, down = width * element, kernel.stride * width * element
    steps = (0, channels * height * row, rows * down, cols * kernel.stride * element)
    reach, start = ((cols - 1) * kernel.stride + kernel.s) * element, -kernel.pad * (row + element)
    pixels = Touch(x, reach, rows, down, offset=start, grid=steps, loops=(height * row, row))
    of_row = kernel.s * filters * element
    into = Touch(w, tile * element, kernel.s, filters * element, grid=(tile * element, 0, 0, 0))
    made = Writer(pc).repeat(channels).repeat(kernel.r)
    made.load(pixels, replace(into, loops=(kernel.r * of_row, of_row))).fence()
    made.compute(2.0 * tile * rows * cols * kernel.s).close().close()
    plane = high * wide * element
    spread = (tile * plane, filters * plane, rows * wide * element, cols * element)
    line = wide * element
    out = Touch(y, cols * element, rows, line, _pitch(line, cols * element), grid=spread, loops=(plane,))
    made.repeat(tile).store(out).close()
    extent = (_over(filters, tile), n, _over(high, rows), _over(wide, cols))
    return made.program("convolution", extent, held=kernel.held)


@program.register
def _strided(kernel: Strided, regions: Regions, pc: int) -> Program:
    source, target = regions[kernel.reads[0]], regions[kernel.writes[0]]
    *batch, rows, cols = source.sizes
    many, element, tile = (batch[0] if batch else 1), source.element, kernel.tile
    lanes = min(_WAVE, rows)
    plane = rows * cols * element
    into = Touch(source, tile * element, lanes, cols * element, grid=(plane, lanes * cols * element, tile * element))
    out = Touch(target, lanes * element, tile, rows * element, grid=(plane, lanes * element, tile * rows * element))
    made = Writer(pc).load(into).wait().store(out)
    return made.program("strided", (many, _over(rows, lanes), _over(cols, tile)), waves=1)


@program.register
def _scattered(kernel: Scattered, regions: Regions, pc: int) -> Program:
    source, target = regions[kernel.reads[0]], regions[kernel.writes[0]]
    into = Touch(source, kernel.run, _WAVE, kernel.run, grid=(_WAVE * kernel.run,), scatter=True)
    out = Touch(target, _WAVE * kernel.run, grid=(_WAVE * kernel.run,))
    made = Writer(pc).load(into).wait().store(out)
    return made.program("scattered", (_over(kernel.count, _WAVE),), waves=1)
