"""Applications of the cache studies as launches of our kernels (`kernels/layers.cu`, `kernels/sgemm.cu`).

Shapes are those of an application's tensors (`conf/application`). Of many blocks the first are launched, on tensors as
large as these need, which are then set as far apart as the whole ones demand. Products and normalisations along many
channels are executed over few steps of the loop and over twice as many, and their cost is continued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse_ptx.arguments import Argument, Pointer
from dse_ptx.execution import LaunchOptions, Module, PtxDevice
from dse_ptx.kernels import kernel_text
from dse_ptx.products import TILINGS, Tiling, apart
from dse_ptx.warp_trace import WarpTrace

_THREADS = 256
_SHORT = 16  # elements of k that products are executed over, and twice as many
_CHANNELS = 4  # of a normalisation across channels, and twice as many
_WHOLE = 1 << 16  # steps of k of all blocks up to which a product is executed whole
_LRN, _EPSILON = (1e-4, 0.75), 1e-5  # arguments that change values alone, no address and no time


Value: TypeAlias = "str | int | float | Callable[[Mapping[str, Pointer], PtxDevice], NDArray[np.int32]]"


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel. arguments: names of tensors, numbers, and what is made of the tensors' pointers; `steps`
    stands for steps of its loop.

    grid: blocks that are executed, of `blocks`. short, whole: steps of the loop that are executed, and twice as many,
    and those of the whole kernel; 0 where all are executed. registers: of a thread, where launch bounds tell.
    """

    file: str
    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Value, ...]
    blocks: int
    threads: int = _THREADS
    short: int = 0
    whole: int = 0
    registers: int = 0


@dataclass(frozen=True)
class LaunchList:
    """An application: bytes of its tensors that are executed on, and in all; launches by group of the application."""

    sizes: Mapping[str, int]
    whole: Mapping[str, int]
    groups: tuple[tuple[Launch, ...], ...]

    def trace(self, launch: Launch, steps: int) -> WarpTrace:
        """Execute a launch over so many steps (0: those of its arguments), all blocks recorded."""
        device = PtxDevice()
        pointers = {name: device.allocate(size) for name, size in self.sizes.items()}
        module = Module(kernel_text(launch.file), device, f"{launch.file}.ptx")
        arguments = [_argument(value, steps, pointers, device) for value in launch.arguments]
        # every block that is executed is recorded
        options = LaunchOptions(sample=tuple(range(math.prod(launch.grid))))
        run = module.launch(launch.kernel, launch.grid, (launch.threads,), arguments, options)
        assert run.trace is not None
        # launch bounds make an assembler spill rather than exceed them
        registers = min(run.trace.registers_per_thread, launch.registers or run.trace.registers_per_thread)
        trace = replace(run.trace, registers_per_thread=registers)
        # the last tensor needs no end: nothing lies behind it
        return apart(trace, list(pointers.values()), [self.whole[name] for name in pointers][:-1])


def _argument(value: Value, steps: int, pointers: Mapping[str, Pointer], device: PtxDevice) -> Argument:
    if isinstance(value, str):
        return steps if value == "steps" else pointers[value]
    # a table that is made of pointers is allocated after the tensors
    return value(pointers, device) if callable(value) else value


Shapes = Mapping[str, tuple[int, ...]]
Maker = Callable[[Shapes, int], LaunchList]
"""From shapes of tensors, and requests to be made at least, to launches."""


def _few(blocks: int, lines: int, requests: int) -> int:
    """Blocks of so many lines each that make enough requests."""
    return min(blocks, -(-requests // lines))


def _bytes(shapes: Shapes, element: int = 4) -> dict[str, int]:
    return {name: element * math.prod(shape) for name, shape in shapes.items()}


def _one(sizes: Mapping[str, int], shapes: Shapes, *launches: Launch) -> LaunchList:
    """Launches of one group, on tensors of so many bytes; those that shapes do not list are as large as they are."""
    return LaunchList(sizes, {name: _bytes(shapes).get(name, size) for name, size in sizes.items()}, (launches,))


def _relu(kernel: str, names: Sequence[str]) -> Maker:
    def make(shapes: Shapes, requests: int) -> LaunchList:
        # four elements to a thread, 16 bytes
        fours = math.prod(shapes["x"]) // 4
        blocks = -(-fours // _THREADS)
        # 256 threads of 16 bytes take 64 lines of 64 bytes in each tensor
        few = _few(blocks, 64 * len(names), requests)
        count = min(fours, few * _THREADS)
        launch = Launch("layers", kernel, (few,), (*names, count), blocks)
        return _one(dict.fromkeys(names, 16 * count), shapes, launch)

    return make


def _pool(shapes: Shapes, requests: int) -> LaunchList:
    *images, high, _ = shapes["x"]
    planes, out = math.prod(images), shapes["y"][-1]
    blocks = -(-planes * out**2 // _THREADS)
    # few counts planes: whole images of a channel, so that pooling windows stay within them
    few = min(planes, -(-_few(blocks, 350, requests) * _THREADS // out**2))
    grid = (-(-few * out**2 // _THREADS),)
    sizes = {"x": 4 * few * high**2, "y": 4 * few * out**2, "mask": 4 * few * out**2}
    return _one(sizes, shapes, Launch("layers", "max_pool", grid, ("x", "y", "mask", few, high, out), blocks))


def _pool_backward(shapes: Shapes, requests: int) -> LaunchList:
    *images, high, _ = shapes["dx"]
    planes, out = math.prod(images), shapes["dy"][-1]
    blocks = -(-planes * high**2 // _THREADS)
    few = min(planes, -(-_few(blocks, 100, requests) * _THREADS // high**2))
    grid = (-(-few * high**2 // _THREADS),)
    sizes = {"dy": 4 * few * out**2, "mask": 4 * few * out**2, "dx": 4 * few * high**2}
    return _one(
        sizes, shapes, Launch("layers", "max_pool_backward", grid, ("dy", "mask", "dx", few, high, out), blocks)
    )


def _softmax(kernel: str, names: Sequence[str]) -> Maker:
    def make(shapes: Shapes, requests: int) -> LaunchList:
        rows, cols = shapes["y"]
        return _one(_bytes(shapes), shapes, Launch("layers", kernel, (rows,), (*names, cols), rows))

    return make


def _batch_norm(shapes: Shapes, requests: int) -> LaunchList:
    rows, cols = shapes["x"]
    of_columns = dict.fromkeys(("scale", "shift", "means", "inverses"), 4 * cols)
    arguments = "x", "scale", "shift", "y", "means", "inverses", rows, cols, _EPSILON
    blocks = -(-cols // _THREADS)
    return _one(_bytes(shapes) | of_columns, shapes, Launch("layers", "batch_norm", (blocks,), arguments, blocks))


def _batch_norm_backward(shapes: Shapes, requests: int) -> LaunchList:
    rows, cols = shapes["x"]
    of_columns = dict.fromkeys(("scale", "means", "inverses", "dscale", "dshift"), 4 * cols)
    arguments = "x", "dy", "scale", "means", "inverses", "dx", "dscale", "dshift", rows, cols
    blocks = -(-cols // _THREADS)
    launch = Launch("layers", "batch_norm_backward", (blocks,), arguments, blocks)
    return _one(_bytes(shapes) | of_columns, shapes, launch)


def _lrn(shapes: Shapes, requests: int) -> LaunchList:
    images, channels, high, wide = shapes["x"]
    plane = high * wide
    tiles, image = -(-plane // _THREADS), channels * plane
    # a tile takes 16 lines of 64 bytes in each of three tensors, over the channels of the longer run
    few = max(1, _few(images * tiles, 3 * 16 * 2 * _CHANNELS, requests) // tiles)
    arguments = "x", "y", "scale", "steps", plane, image, *_LRN
    # beyond twice as many channels the rest is continued from the difference of the two
    cut = {"short": _CHANNELS, "whole": channels} if channels > 2 * _CHANNELS else {"short": channels}
    launch = Launch("layers", "lrn", (tiles, few), arguments, images * tiles, **cut)
    return _one(dict.fromkeys(("x", "y", "scale"), 4 * few * image), shapes, launch)


def _product(
    tiling: Tiling, names: tuple[str, str, str], sizes: tuple[int, int, int], strides: tuple[int, ...], few: int = 0
) -> Launch:
    """C [n, m] by rows of A and B: m along a row. strides: of i and k of A, of j and k of B. few: tiles along n."""
    m, n, k = sizes
    across, down = -(-m // tiling.rows), -(-n // tiling.cols)
    # a small product is executed over all of k, and nothing is continued
    cut = {"short": _SHORT, "whole": k} if across * down * k > _WHOLE else {"short": k}
    arguments: tuple[Value, ...] = (*names, m, n, k, *strides, m, "steps")
    grid, name = (across, min(few or down, down)), f"sgemm_{tiling.rows}x{tiling.cols}"
    return Launch("sgemm", name, grid, arguments, across * down, tiling.threads, registers=tiling.registers, **cut)


_LARGE, _SQUARE, _SMALL, _NARROW = (TILINGS[place] for place in (0, 2, 4, 5))


def _fully_connected(shapes: Shapes, requests: int) -> LaunchList:
    (outputs, inputs), images = shapes["w"], shapes["x"][0]
    launch = _product(_SQUARE, ("w", "x", "y"), (outputs, images, inputs), (inputs, 1, inputs, 1))
    return _one(_bytes(shapes), shapes, launch)


def _sgemm(shapes: Shapes, requests: int) -> LaunchList:
    k, rows = shapes["a"]
    cols, few = shapes["b"][1], 8
    launch = _product(_LARGE, ("b", "a", "c"), (cols, rows, k), (1, cols, 1, rows), few)
    # twice _SHORT rows of k, of 4 bytes, are all that the longer run reads
    sizes = {"b": 8 * _SHORT * cols, "a": 8 * _SHORT * rows, "c": 4 * cols * few * _LARGE.cols}
    return _one(sizes, shapes, launch)


def _dgemm(shapes: Shapes, requests: int) -> LaunchList:
    k, rows = shapes["a"]
    cols, few, tile = shapes["b"][1], 8, 64
    across, down = -(-cols // tile), -(-rows // tile)
    arguments = "b", "a", "c", cols, rows, "steps", 1, cols, 1, rows, cols
    launch = Launch("layers", "dgemm", (across, few), arguments, across * down, short=_SHORT, whole=k)
    # of 8 bytes: double precision
    sizes = {"b": 16 * _SHORT * cols, "a": 16 * _SHORT * rows, "c": 8 * cols * few * tile}
    return LaunchList(sizes, _bytes(shapes, 8), ((launch,),))


def _recurrent(cell: str, gates: int, state: Sequence[str]) -> Maker:
    """A product of the state with all gates' weights, and a cell, step by step."""

    def make(shapes: Shapes, requests: int) -> LaunchList:
        images, units = shapes["h"]
        tiling, wide = (_NARROW if images <= _NARROW.cols else _SMALL), gates * units
        # q = u h: pre-activations of all gates
        product = _product(tiling, ("u", "h", "q"), (wide, images, units), (1, wide, units, 1))
        blocks = -(-images * units // _THREADS)
        step = Launch("layers", cell, (blocks,), ("q", "pre", *state, images, units), blocks)
        sizes = _bytes(shapes) | dict.fromkeys(state, 4 * images * units)
        # the group is repeated for each step of time
        return LaunchList(sizes, sizes, ((product, step),))

    return make


def _recurrent_backward(cell: str, gates: int, state: Sequence[str], gradient: str) -> Maker:
    """A cell and a product with the transposed weights, step by step; the weights' gradient at the end."""

    def make(shapes: Shapes, requests: int) -> LaunchList:
        (images, units), steps = shapes["h"], shapes["all"][0]
        tiling, wide = (_NARROW if images <= _NARROW.cols else _SMALL), gates * units
        blocks = -(-images * units // _THREADS)
        step = Launch("layers", cell, (blocks,), ("q", "pre", *state, "dq", images, units), blocks)
        product = _product(tiling, ("u", "dq", gradient), (units, images, wide), (wide, 1, wide, 1))
        # the sum over steps of time is the k of the weights' gradient
        last = _product(_SQUARE, ("dall", "all", "du"), (wide, units, steps), (1, wide, 1, units), 4)
        sizes = _bytes(shapes) | dict.fromkeys((*state, gradient), 4 * images * units)
        return LaunchList(sizes, sizes, ((step, product), (last,)))

    return make


def _composed(shapes: Shapes, requests: int) -> LaunchList:
    """A convolution, a pooling and a fully connected layer."""
    (images, channels, high, wide), (filters, _, taps, _) = shapes["x"], shapes["w"]
    out, k = shapes["p"][-1], channels * taps**2
    c, r, s = (axis.reshape(-1) for axis in np.indices((channels, taps, taps)))
    table = np.stack([(c * high + r) * wide + s, r << 16 | s], axis=1).astype(np.int32)
    # as many rows as before: padding by half of the taps
    pad = (taps - 1) // 2

    def window(pointers: Mapping[str, Pointer], device: PtxDevice) -> NDArray[np.int32]:
        entries = device.allocate(table)
        # pointers of 64 bits in two words each, as the kernel's table of integers holds them
        places = np.array([pointers["x"].address, entries.address]).view(np.int32)
        return np.array([*places, images, channels, high, wide, high, wide, 1, 1, pad, pad], np.int32)

    pixels = images * high * wide
    grid = -(-filters // 32), -(-pixels // 128)
    arguments: tuple[Value, ...] = "w", window, "y", filters, pixels, k, k
    convolution = Launch("sgemm", "convolution_32x128", grid, arguments, math.prod(grid), 128, registers=128)
    blocks = -(-images * filters * out**2 // _THREADS)
    pool = Launch("layers", "max_pool", (blocks,), ("y", "p", "mask", images * filters, high, out), blocks)
    inputs, outputs = shapes["f"][1], shapes["f"][0]
    product = _product(_SMALL, ("f", "p", "z"), (outputs, images, inputs), (inputs, 1, inputs, 1))
    return _one(_bytes(shapes), shapes, convolution, pool, product)


APPLICATIONS: Mapping[str, Maker] = {
    "cm": _composed,
    "fw_act": _relu("relu", ("x", "y")),
    "bw_act": _relu("relu_backward", ("x", "dy", "dx")),
    "fw_bn": _batch_norm,
    "bw_bn": _batch_norm_backward,
    "fw_fc": _fully_connected,
    "fw_lrn": _lrn,
    "fw_pool": _pool,
    "bw_pool": _pool_backward,
    "fw_soft": _softmax("softmax", ("x", "y")),
    "bw_soft": _softmax("softmax_backward", ("y", "dy", "dx")),
    "sgemm": _sgemm,
    "dgemm": _dgemm,
    "fw_lstm": _recurrent("lstm", 4, ("c", "h")),
    "bw_lstm": _recurrent_backward("lstm_backward", 4, ("c", "dh", "dc"), "dh"),
    "fw_gru": _recurrent("gru", 3, ("h",)),
    "bw_gru": _recurrent_backward("gru_backward", 3, ("h", "dh"), "dh"),
}
"""Launches of each application of `study=cache_policies`, by its name."""
