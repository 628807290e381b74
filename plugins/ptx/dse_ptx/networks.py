"""Runs of LeNet and its convolutions by our kernels, launch by launch, each timed on the SMs of a GPU.

Every launch is executed whole, on the results of those before it, and timed with caches that hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dse.errors import ConfigError, Problem
from dse_ptx.lenet import ALGORITHMS, SHAPES, Layers, LeNet, SquareConvolution
from dse_ptx.sms import sm_array
from dse_ptx.timing import LaunchTime, time_launch

CONVOLUTIONS = {"conv1": (1, 28, 20), "conv2": (20, 12, 50)}
"""Channels, rows of an image and filters of LeNet's convolutions."""
WORKS = ("lenet", *CONVOLUTIONS, "transposed")
"""What runs: the network forward, one of its convolutions, or a product with a matrix whose columns lie 16 KB apart."""
_PITCH, _ROWS, _DEPTH = 4096, 64, 256  # 4096 numbers are 16 KB


@dataclass(frozen=True)
class TimedLaunch:
    """A launch: the kernel's name, and its time."""

    kernel: str
    time: LaunchTime


@lru_cache(maxsize=64)
def timed_launches(work: str, algorithm: str, images: int, gpu: str, hashed: str) -> tuple[TimedLaunch, ...]:
    """Execute a work, and time its launches on a GPU by a hash of channels, or none.

    Raises ConfigError where a block does not fit on an SM, and for a product by an algorithm of convolutions.
    """
    machine = sm_array(gpu, {"memory": {"mapping": {"channel_hash": hashed}}})
    # all blocks are recorded: these launches are short
    layers = Layers(sample=range)
    _execute(work, algorithm, images, layers)
    return tuple(_timed(layers, machine))


def _timed(layers: Layers, machine: object) -> Iterator[TimedLaunch]:
    for kernel, run in layers.runs:
        assert run.trace is not None
        yield TimedLaunch(kernel, time_launch(run.trace, machine))  # type: ignore[arg-type]


def _execute(work: str, algorithm: str, images: int, layers: Layers) -> None:
    rng = np.random.default_rng(0)
    if work == "lenet":
        # small weights keep activations finite; values change neither addresses nor times
        weights = {name: rng.standard_normal(shape, np.float32) * np.float32(0.05) for name, shape in SHAPES.items()}
        LeNet(weights, algorithm, layers).probabilities(rng.random((images, 1, 28, 28), np.float32))
    elif work == "transposed":
        if algorithm != "implicit_gemm" or images != 1:
            rule = "is one product, which neither algorithms of convolutions nor images change"
            way = "work.algorithm=implicit_gemm work.images=1"
            raise ConfigError([Problem("work.kernels", rule, f"transposed by {algorithm}, {images} images", way)])
        device, out = layers.device, layers.zeros(_ROWS, _ROWS)
        a, b = device.allocate(4 * _PITCH * _DEPTH), device.allocate(4 * _ROWS * _DEPTH)
        # A is read by columns: its stride is 1 along m, the pitch along k
        sizes = _ROWS, _ROWS, _DEPTH
        layers.launch("gemm", (4, 4), (16, 16), a, b, 0, out, *sizes, 1, _PITCH, _ROWS, 1, 0, 0)
    else:
        channels, rows, filters = CONVOLUTIONS[work]
        size = SquareConvolution(images, channels, rows, filters)
        shapes = (images, channels, rows, rows), (filters, channels, size.r, size.r)
        x, w = (layers.device.allocate(rng.standard_normal(shape, np.float32)) for shape in shapes)
        ALGORITHMS[algorithm](layers, x, w, 0, size)
