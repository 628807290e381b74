"""Memory accesses of each class of kernels: workgroups of 256 threads in waves of 64, and tiles where products are.

elementwise   16 bytes of a thread of each tensor, one load after another, then the stores
window        four rows of 64 outputs: each row of the window in turn; backward: the rows that hold the tile, once
channels      256 pixels, from channel to channel, so in steps of an image
passes        a row, or 256 columns, `passes` times over; the last pass writes
gemm          a step of a tile of A and of B while the one before is multiplied; C at the end
strided       a tile's rows in, its columns out, each run of a column apart from the next by a whole row
implicit_gemm the same, the tile of B being pixels, rows or images together; some channels and a row of taps in a step
filter_gradient  pixels of each filter's plane, and the window around them of each channel; a sum of a part at the end
columns       256 pixels of a channel, and a run of them for each tap, a plane apart
transform     tiles in, a run of each of the planes of points out, at strides of a plane; backward: the other way
reduction     16 bytes of a thread of each part in turn
scattered     a run of a row for each lane of a wave, anywhere; written in order
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from dse_memory.kernels import (
    Channels,
    Columns,
    ElementwiseKernel,
    FilterGradient,
    ImplicitGemm,
    Kernel,
    MatrixProduct,
    Reduction,
    ReductionPasses,
    ScatteredRuns,
    Transform,
    Transposition,
    Window,
)
from dse_memory.program import Program, Region, Touch, Writer

_THREADS, _WAVE, _VECTOR_BYTES = 256, 64, 16  # of a workgroup and of a wave; bytes that a thread loads at once
_WINDOW_ROWS = 4  # a wave each
_PIXELS = 256  # a thread each
_DEPTH = 16  # channels x taps of a row in a step of an implicit GEMM
CHUNK = 32  # pixels in a step of a filter gradient
_FEW, _FEW_POINTS = 8, 4  # runs of an instruction: the engine makes all requests of one before those of another CU

Regions = Mapping[str, Region]


@functools.singledispatch
def program(kernel: Kernel, regions: Regions, pc: int) -> Program:
    """The program of a kernel. pc: the number of its first instruction."""
    raise TypeError(f"no trace of {type(kernel).__name__}")


def _over(size: int, part: int) -> int:
    return -(-size // part)  # ceiling


@program.register
def _elementwise(kernel: ElementwiseKernel, regions: Regions, pc: int) -> Program:
    size = _THREADS * _VECTOR_BYTES
    reads, writes = ([Touch(regions[name], size, grid=(size,)) for name in of] for of in (kernel.reads, kernel.writes))
    first = regions[(kernel.reads + kernel.writes)[0]]  # sizes of all tensors are alike
    writer = Writer(pc).load(*reads).wait().compute(kernel.flop * size / first.element).store(*writes)
    return writer.program("elementwise", (_over(first.end - first.base, size),))


@program.register
def _window(kernel: Window, regions: Regions, pc: int) -> Program:
    """Grid: images and channels, tiles of rows, tiles of columns, of the output."""
    out = regions[kernel.writes[0]]
    n, c, height, width = out.sizes
    element, lanes = out.element, min(_WAVE, width)  # a narrow image fills part of a wave
    writer = Writer(pc)
    (_load_covering_rows if kernel.backward else _load_windows)(
        writer, kernel, [regions[name] for name in kernel.reads], lanes
    )
    writer.wait().compute(float(kernel.rows * kernel.cols * lanes * _WINDOW_ROWS))
    row = width * element
    steps = (height * row, _WINDOW_ROWS * row, lanes * element)
    run = lanes * element
    writer.store(
        *(Touch(regions[name], run, _WINDOW_ROWS, row, _pitch(row, run), grid=steps) for name in kernel.writes)
    )
    return writer.program("window", (n * c, _over(height, _WINDOW_ROWS), _over(width, lanes)))


def _load_windows(writer: Writer, kernel: Window, sources: list[Region], lanes: int) -> None:
    """Loads of a window: of each of a tile's rows, the window's rows in turn."""
    writer.repeat(kernel.rows)
    for region in sources:
        rows, cols = region.sizes[2:]
        # columns that the windows of all lanes cover
        row, wide = cols * region.element, ((lanes - 1) * kernel.stride + kernel.cols) * region.element
        down = kernel.stride * row
        steps = (rows * row, _WINDOW_ROWS * down, lanes * kernel.stride * region.element)
        writer.load(Touch(region, wide, _WINDOW_ROWS, down, grid=steps, loops=(row,)))
    writer.close()


def _load_covering_rows(writer: Writer, kernel: Window, sources: list[Region], lanes: int) -> None:
    """Loads of a window's backward pass: the rows whose windows hold a tile, once."""
    # windows that hold a row of the tile, and rows of windows
    high = _over(_WINDOW_ROWS, kernel.stride) + _over(kernel.rows, kernel.stride) - 1
    for region in sources:
        rows, cols = region.sizes[2:]
        row, wide = cols * region.element, _over(lanes + kernel.cols, kernel.stride) * region.element
        steps = (rows * row, _over(_WINDOW_ROWS, kernel.stride) * row, lanes // kernel.stride * region.element)
        writer.load(Touch(region, wide, high, row, grid=steps))


@program.register
def _channels(kernel: Channels, regions: Regions, pc: int) -> Program:
    first = regions[kernel.reads[0]]
    n, channels, height, width = first.sizes
    plane, size = height * width * first.element, _PIXELS * first.element
    touched = {
        # from image to image, and along a plane
        name: Touch(regions[name], size, grid=(channels * plane, size), loops=(plane,))
        for name in (*kernel.reads, *kernel.writes)
    }
    writer = Writer(pc).repeat(channels).load(*(touched[name] for name in kernel.reads)).wait()
    writer.compute(kernel.flop * _PIXELS).store(*(touched[name] for name in kernel.writes)).close()
    return writer.program("channels", (n, _over(height * width, _PIXELS)))


@program.register
def _passes(kernel: ReductionPasses, regions: Regions, pc: int) -> Program:
    first = regions[kernel.reads[0]]
    # trailing sizes are one row
    rows, cols = first.sizes[0], first.elements // first.sizes[0]
    element, row = first.element, cols * first.element
    parts = _over(row, _THREADS * element)
    size = _over(cols, parts) * element  # equal parts of a row, at most a load of 256 threads each
    if kernel.along == "rows":  # what a workgroup keeps is the grid, what it goes along the loop
        extent, steps, grid, loops = (rows,), parts, (row,), (0, size)
    else:
        extent, steps, grid, loops = (parts,), rows, (size,), (0, row)

    def touches(names: tuple[str, ...], *, last: bool) -> list[Touch]:
        # the last pass is outside of the loop over passes
        return [Touch(regions[name], size, grid=grid, loops=loops[1:] if last else loops) for name in names]

    writer, flop = Writer(pc), kernel.flop * size / element
    if kernel.passes > 1:  # passes before the last load and sum, and write nothing
        writer.repeat(kernel.passes - 1).repeat(steps).load(*touches(kernel.reads, last=False)).compute(flop).close()
        writer.wait().close()
    # stores depend on loads of this step, the next loads go on
    writer.repeat(steps).load(*touches(kernel.reads, last=True)).fence().compute(flop)
    writer.store(*touches(kernel.writes, last=True)).close()
    return writer.program("passes", extent)


@program.register
def _gemm(kernel: MatrixProduct, regions: Regions, pc: int) -> Program:
    """Grid: products, tiles of n, tiles of m, the last runs fastest."""
    a, b, c = regions[kernel.a], regions[kernel.b], regions[kernel.c]
    m, n, k, depth = kernel.m, kernel.n, kernel.k, min(kernel.depth, kernel.k)
    # a complex product with an addition is 8 FLOP
    element, flop = a.element * (2 if kernel.complex else 1), (8.0 if kernel.complex else 2.0) * kernel.work
    high, wide = min(kernel.tile[0], m), min(kernel.tile[1], n)  # tiles are cut to the product
    left = _operand(a, (m, k, element), (high, depth), across=kernel.transposed_a)
    top = _operand(b, (n, k, element), (wide, depth), across=not kernel.transposed_b)  # B [k, n] has n along its rows
    sizes, row = (m * k * element, n * k * element, m * n * element), n * element
    writer = Writer(pc).repeat(_over(k, depth))
    for operand in (replace(left, grid=(sizes[0], 0, *left.grid)), replace(top, grid=(sizes[1], *top.grid, 0))):
        few = _even(operand.rows, kernel.runs)  # few runs an instruction, so that CUs interleave as they would
        part = replace(operand, rows=few, loops=(*operand.loops, few * operand.step))
        writer.repeat(_over(operand.rows, few)).load(part).close() if few < operand.rows else writer.load(operand)
    writer.fence().compute(flop * high * wide * depth).close()
    writer.store(
        Touch(c, wide * element, high, row, _pitch(row, wide * element), grid=(sizes[2], wide * element, high * row))
    )
    return writer.program("gemm", (kernel.batch, _over(n, wide), _over(m, high)), held=kernel.held)


def _operand(region: Region, sizes: tuple[int, int, int], tile: tuple[int, int], *, across: bool) -> Touch:
    """A tile of an operand [m, k], or [k, m] where it lies `across`, from tile to tile and from step to step of k.

    sizes: m, k and bytes of an element.
    """
    element = sizes[2]
    if across:
        # stored [k, m]: runs of m, k apart
        row = sizes[0] * element
        runs = tile[0] * element
        return Touch(region, runs, tile[1], row, _pitch(row, runs), grid=(runs,), loops=(tile[1] * row,))
    # stored [m, k]: runs of k, m apart
    row = sizes[1] * element
    runs = tile[1] * element
    return Touch(region, runs, tile[0], row, _pitch(row, runs), grid=(tile[0] * row,), loops=(runs,))


def _pitch(row: int, run: int) -> int:
    """The row that a run of a tile must not cross, where rows are no whole number of tiles."""
    return row if row % run else 0  # else a ragged tile would go on in the next row


def pixel_tile(sizes: tuple[int, int, int], pixels: int, least: int = 1) -> tuple[int, int, int]:
    """Images, rows and cols of n x oh x ow that about so many pixels take, as evenly as may be. least: rows."""
    images, high, wide = sizes
    cols = _even(wide, pixels // least)  # whole rows first, then rows of an image, then images
    rows = _even(high, pixels // cols) if cols == wide else min(high, least)
    return (_even(images, pixels // (high * wide)) if rows == high and cols == wide else 1), rows, cols


def _even(size: int, most: int) -> int:
    return _over(size, _over(size, max(1, most)))  # parts as equal as may be, none larger than `most`


@program.register
def _implicit(kernel: ImplicitGemm, regions: Regions, pc: int) -> Program:
    """Grid: groups of images, tiles of rows, tiles of columns, tiles of filters. Loops: channels, rows of taps."""
    x, w, y = regions[kernel.x], regions[kernel.w], regions[kernel.y]
    n, filters, high, wide = y.sizes
    channels, element, (r, s) = x.sizes[1], x.element, kernel.taps
    tile = images, rows, cols = pixel_tile((n, high, wide), kernel.tile[1], kernel.rows)
    # channels in a step, so that with a row of taps it is about 16 deep
    tile_filters, depth = _even(filters, kernel.tile[0]), _even(channels, max(1, _DEPTH // s))
    blocks = _over(channels, depth)
    tap_row = s * filters * element
    into = Touch(
        w, tile_filters * element, s, filters * element, _pitch(filters * element, tile_filters * element),
        grid=(tile_filters * element,),
        loops=(depth * r * tap_row, tap_row, r * tap_row),
    )  # fmt: skip
    writer = Writer(pc).repeat(blocks).repeat(r).repeat(depth)
    writer.load(into, _pixels(kernel, x, tile, depth)).close()
    # a ragged tile of filters computes as long as a whole one
    flop = 2.0 * kernel.tile[0] * images * rows * cols * channels * kernel.multiplies * kernel.work
    writer.fence().compute(flop / (blocks * r)).close().close()
    plane, line = high * wide * element, wide * element
    spread = (images * filters * plane, rows * line, cols * element, tile_filters * plane)
    # whole rows are one run of a plane
    size, runs, step = (rows * line, images, filters * plane) if cols == wide else (cols * element, rows, line)
    pitch = plane if cols == wide else _pitch(line, size)
    out = Touch(y, size, runs, step, pitch, grid=spread, loops=(plane,))
    writer.repeat(tile_filters).store(out).close()  # one filter's plane after another
    extent = (_over(n, images), _over(high, rows), _over(wide, cols), _over(filters, tile_filters))
    return writer.program("implicit_gemm", extent, held=kernel.held)


def _pixels(kernel: ImplicitGemm, x: Region, tile: tuple[int, int, int], depth: int) -> Touch:
    """Bytes of a channel that a tile of output pixels reads for a row of taps: a run of an image, or of each row."""
    images, rows, cols = tile
    channels, height, width = x.sizes[1:]
    element, (sv, sh) = x.element, kernel.stride
    row, plane = width * element, height * width * element
    if kernel.backward:
        # a pixel of x looks at every sv-th row and sh-th column of the smaller image
        down, reach, ahead = _over(row, sv), (_over(cols, sh) + _over(kernel.taps[1], sh)) * element, 0
        across, tap = _over(cols * element, sh), _over(row, sv)
    else:
        down, reach = sv * row, ((cols - 1) * sh + kernel.taps[1]) * element
        ahead, across, tap = kernel.pad[0] * row + kernel.pad[1] * element, cols * sh * element, row
    # dense rows: one run over all of them loads hardly more than runs of each
    if images > 1 or rows == 1 or (down <= row and reach + sh * element >= row):
        size, runs, step = (rows - 1) * down + reach, images, channels * plane
    else:
        size, runs, step = reach, rows, down
    spread = (images * channels * plane, rows * down, across, 0)
    # the first window begins in the padding; what lies before the tensor is not asked for
    return Touch(x, size, runs, step, offset=-ahead, grid=spread, loops=(depth * plane, tap, plane))


def column_tile(channels: int, taps: int, columns: int) -> tuple[int, int]:
    """(channels of a tile of so many columns (c r s), number of tiles)."""
    tile_channels = _even(channels, columns // taps)  # all taps of a channel in one tile
    return tile_channels, _over(channels, tile_channels)


@program.register
def _filters(kernel: FilterGradient, regions: Regions, pc: int) -> Program:
    """Grid: parts of the images, parts of an image, tiles of columns, tiles of filters. Loops: images, rows, cols."""
    x, y, w = regions[kernel.x], regions[kernel.y], regions[kernel.w]
    n, filters, high, wide = y.sizes
    channels, element, taps = x.sizes[1], x.element, kernel.taps[0] * kernel.taps[1]
    _, rows, cols = pixel_tile((1, high, wide), CHUNK)
    tile_filters, (tile_channels, tiles) = _even(filters, kernel.tile[0]), column_tile(channels, taps, kernel.tile[1])
    turns = (_over(n, kernel.parts[0]), _over(_over(high, rows), kernel.parts[1]), _over(wide, cols))
    plane, line = high * wide * element, wide * element
    chunk, images = rows * line, turns[0] * filters * plane
    few = _even(tile_filters, _FEW)
    of_y = Touch(
        y, rows * cols * element, few, plane, grid=(images, turns[1] * chunk, 0, tile_filters * plane),
        loops=(filters * plane, chunk, cols * element, few * plane),
    )  # fmt: skip
    writer = (
        Writer(pc)
        .repeat(turns[0])
        .repeat(turns[1])
        .repeat(turns[2])
        .repeat(_over(tile_filters, few))
        .load(of_y)
        .close()
    )
    writer.repeat(tile_channels).load(_around(kernel, x, (rows, cols), (turns[0], turns[1], tile_channels))).close()
    # columns that the tiles compute, ragged ones whole
    charged = _over(channels * taps, kernel.tile[1]) * kernel.tile[1] / tiles
    flop = 2.0 * kernel.tile[0] * charged * rows * cols * kernel.multiplies / taps * kernel.work
    writer.fence().compute(flop).close().close().close()
    of_filter, of_all = channels * taps * element, filters * channels * taps * element
    spread = (kernel.parts[1] * of_all, of_all, tile_channels * taps * element, tile_filters * of_filter)
    size = tile_channels * taps * element
    writer.store(Touch(w, size, tile_filters, of_filter, _pitch(of_filter, size), grid=spread))
    return writer.program("filter_gradient", (*kernel.parts, tiles, _over(filters, tile_filters)), held=kernel.held)


def _around(kernel: FilterGradient, x: Region, chunk: tuple[int, int], turns: tuple[int, int, int]) -> Touch:
    """Bytes of a channel's windows around a chunk of pixels. turns: images, chunks of rows, channels of a part."""
    rows, cols = chunk
    channels, height, width = x.sizes[1:]
    element, (sv, sh), (r, s) = x.element, kernel.stride, kernel.taps
    row, plane = width * element, height * width * element
    reach, high = ((cols - 1) * sh + s) * element, (rows - 1) * sv + r
    # gaps between rows are smaller than a step: one run instead of many
    dense = reach + sh * element >= row or high == 1
    runs, size = (1, (high - 1) * row + reach) if dense else (high, reach)
    ahead, down = kernel.pad[0] * row + kernel.pad[1] * element, rows * sv * row  # padding before the first window
    return Touch(
        x, size, runs, row, offset=-ahead, grid=(turns[0] * channels * plane, turns[1] * down, turns[2] * plane, 0),
        loops=(channels * plane, down, cols * sh * element, plane),
    )  # fmt: skip


@program.register
def _columns(kernel: Columns, regions: Regions, pc: int) -> Program:
    """Grid: images and channels, tiles of output rows (backward: of input rows), tiles of columns."""
    image, column = (regions[name] for name in (kernel.reads[0], kernel.writes[0])[:: -1 if kernel.backward else 1])
    n, channels, height, width = image.sizes
    high, wide = column.sizes[-2:]
    element, (r, s), (sv, sh) = image.element, kernel.taps, kernel.stride
    _, rows, cols = pixel_tile((1, high, wide), _PIXELS)
    line, row = wide * element, width * element
    size, runs = (rows * line, 1) if cols == wide else (cols * element, rows)
    of_tap = Touch(
        column, size, runs, line, high * line, grid=(r * s * high * line, rows * line, cols * element),
        loops=(high * line,),
    )  # fmt: skip
    # backward: input rows are the tile, without padding
    ahead = 0 if kernel.backward else kernel.pad[0] * row + kernel.pad[1] * element
    more = (0, 0) if kernel.backward else (max(r - sv, 0), max(s - sh, 0))  # windows of neighbouring tiles overlap
    window = Touch(
        image, (cols * sh + more[1]) * element, rows * sv + more[0], row, offset=-ahead,
        grid=(height * row, rows * sv * row, cols * sh * element),
    )  # fmt: skip
    writer = Writer(pc)
    if kernel.backward:
        writer.repeat(r * s).load(of_tap).close().wait().compute(float(r * s * rows * cols)).store(window)
    else:
        writer.load(window).wait().repeat(r * s).store(of_tap).close()
    return writer.program("columns", (n * channels, _over(high, rows), _over(wide, cols)))


@program.register
def _transform(kernel: Transform, regions: Regions, pc: int) -> Program:
    """Grid: channels, groups of images, groups of rows of tiles. A workgroup takes some tiles of a channel."""
    image, planes = (regions[name] for name in (kernel.reads[0], kernel.writes[0])[:: -1 if kernel.backward else 1])
    n, channels, height, width = image.sizes
    high, wide = kernel.tiles
    points, element = planes.sizes[0], image.element  # the first size is the point
    images, rows, cols = pixel_tile((n, high, wide), kernel.together)
    row, plane = width * element, height * width * element
    of_point = planes.element * (2 if kernel.complex else 1)
    across, reach_rows = n * high * wide * of_point, (rows - 1) * kernel.tile[0] + kernel.reach[0]
    # whole rows of tiles cover whole rows of the image
    size, down = (min(reach_rows, height) * row, plane) if cols == wide else (cols * kernel.tile[1] * element, row)
    runs = images if cols == wide else reach_rows
    grid = (plane, images * channels * plane, rows * kernel.tile[0] * row, cols * kernel.tile[1] * element)
    of_image = Touch(image, size, runs, channels * plane if cols == wide else down, grid=grid)
    tiles = (across, images * high * wide * of_point, rows * wide * of_point, cols * of_point)
    of_planes = Touch(
        planes, images * rows * cols * of_point, _FEW_POINTS, channels * across, grid=tiles,
        loops=(_FEW_POINTS * channels * across,),
    )  # fmt: skip
    writer, flop, turns = Writer(pc), kernel.flop * images * rows * cols, _over(points, _FEW_POINTS)
    if kernel.backward:
        writer.repeat(turns).load(of_planes).close().wait().compute(flop).store(of_image)
    else:
        writer.load(of_image).wait().compute(flop).repeat(turns).store(of_planes).close()
    return writer.program("transform", (channels, _over(n, images), _over(high, rows), _over(wide, cols)))


@program.register
def _reduction(kernel: Reduction, regions: Regions, pc: int) -> Program:
    source, target = regions[kernel.reads[0]], regions[kernel.writes[0]]
    size, total_bytes = _THREADS * _VECTOR_BYTES, target.end - target.base
    into = Touch(source, size, grid=(size,), loops=(total_bytes,))
    writer = Writer(pc).repeat(kernel.parts).load(into).close().wait().compute(kernel.parts * size / target.element)
    return writer.store(Touch(target, size, grid=(size,))).program("reduction", (_over(total_bytes, size),))


@program.register
def _transpose(kernel: Transposition, regions: Regions, pc: int) -> Program:
    source, target = regions[kernel.reads[0]], regions[kernel.writes[0]]
    *batch, rows, cols = source.sizes
    num_matrices, element, tile = (batch[0] if batch else 1), source.element, kernel.tile  # a matrix, or several
    lanes = min(_WAVE, rows)  # each lane reads along a row, and stores across
    plane = rows * cols * element
    into = Touch(source, tile * element, lanes, cols * element, grid=(plane, lanes * cols * element, tile * element))
    out = Touch(target, lanes * element, tile, rows * element, grid=(plane, lanes * element, tile * rows * element))
    writer = Writer(pc).load(into).wait().store(out)
    return writer.program("strided", (num_matrices, _over(rows, lanes), _over(cols, tile)), waves=1)


@program.register
def _random_rows(kernel: ScatteredRuns, regions: Regions, pc: int) -> Program:
    source, target = regions[kernel.reads[0]], regions[kernel.writes[0]]
    # each lane's run lies anywhere in the tensor
    into = Touch(source, kernel.run, _WAVE, kernel.run, grid=(_WAVE * kernel.run,), scatter=True)
    out = Touch(target, _WAVE * kernel.run, grid=(_WAVE * kernel.run,))
    writer = Writer(pc).load(into).wait().store(out)
    return writer.program("scattered", (_over(kernel.count, _WAVE),), waves=1)
