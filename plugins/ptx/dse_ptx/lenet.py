"""LeNet for digits, forward and a step of training, by the kernels of `kernels/lenet.cu`.

As in cuDNN's sample (arXiv 1811.08933 runs it): convolutions 1 -> 20 and 20 -> 50 of 5 x 5, each followed by the
largest of 2 x 2, fully connected 800 -> 500, rectifier, local response normalisation, 500 -> 10, softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dse_ptx.arguments import Argument, Pointer
from dse_ptx.execution import LaunchOptions, LaunchRun, Module, PtxDevice
from dse_ptx.kernels import kernel_text

Array = NDArray[np.float32]

SHAPES: Mapping[str, tuple[int, ...]] = {
    "conv1.weight": (20, 1, 5, 5),
    "conv1.bias": (20,),
    "conv2.weight": (50, 20, 5, 5),
    "conv2.bias": (50,),
    "fc1.weight": (500, 800),
    "fc1.bias": (500,),
    "fc2.weight": (10, 500),
    "fc2.bias": (10,),
}
"""Names and shapes of the weights, as PyTorch has them."""
LRN = (5, 1e-4, 0.75)
"""Channels, alpha and beta of the normalisation; what is added to the squares is 1."""
# 0 as a pointer: no bias, or no result wanted
_NULL, _THREADS, _TILE, _WARP = 0, 128, 16, 32


@dataclass(frozen=True)
class SquareConvolution:
    """Sizes of a convolution: images, channels, rows of an image, filters, rows of a filter."""

    n: int
    c: int
    h: int
    k: int
    r: int = 5

    @property
    def p(self) -> int:
        """Rows of a result."""
        return self.h - self.r + 1

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """In the order of the kernels' arguments."""
        return self.n, self.c, self.h, self.k, self.r


@dataclass
class Layers:
    """Kernels on one device; what they did is kept in `runs`, a pair of name and run for each launch.

    sample: blocks of each launch that are recorded, given their number.
    """

    device: PtxDevice = field(default_factory=lambda: PtxDevice(1 << 24))  # it grows
    sample: Callable[[int], Sequence[int]] = lambda blocks: ()
    runs: list[tuple[str, LaunchRun]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module = Module(kernel_text("lenet"), self.device, "lenet.ptx")

    def zeros(self, *shape: int) -> Pointer:
        """Room for numbers in single precision."""
        return self.device.allocate(4 * int(np.prod(shape)))

    def launch(self, name: str, grid: Sequence[int], block: Sequence[int], *arguments: Argument) -> None:
        """Run a kernel."""
        options = LaunchOptions(sample=tuple(self.sample(int(np.prod(grid)))))
        self.runs.append((name, self.module.launch(name, grid, block, arguments, options)))

    def each(self, name: str, count: int, *arguments: Argument) -> None:
        """Run a kernel that has a thread for each of `count` results."""
        self.launch(name, (-(-count // _THREADS),), (_THREADS,), *arguments)

    def gemm(
        self, a: Pointer, b: Pointer, bias: Pointer | int, mnk: tuple[int, int, int], strides: tuple[int, int, int, int]
    ) -> Pointer:
        """A product; strides: of rows and columns of a, then of b."""
        out = self.zeros(*mnk[:2])
        grid = (-(-mnk[1] // _TILE), -(-mnk[0] // _TILE))
        self.launch("gemm", grid, (_TILE, _TILE), a, b, bias, out, *mnk, *strides, 0, 0)
        return out

    def direct(self, x: Pointer, w: Pointer, b: Pointer | int, size: SquareConvolution) -> Pointer:
        """A convolution, a thread for each result."""
        y = self.zeros(size.n, size.k, size.p, size.p)
        self.each("conv_direct", size.n * size.k * size.p**2, x, w, b, y, *size.sizes)
        return y

    def implicit_gemm(self, x: Pointer, w: Pointer, b: Pointer | int, size: SquareConvolution) -> Pointer:
        """A convolution as a product of matrices, one of which is found in the images."""
        y = self.zeros(size.n, size.k, size.p, size.p)
        grid = (-(-size.n * size.p**2 // _TILE), -(-size.k // _TILE))
        self.launch("conv_implicit_gemm", grid, (_TILE, _TILE), x, w, b, y, *size.sizes)
        return y

    def fft(self, x: Pointer, w: Pointer, b: Pointer | int, size: SquareConvolution) -> Pointer:
        """A convolution as a product of Fourier transforms of images and filters."""
        # images are padded to a power of two
        bits = (size.h - 1).bit_length()
        count, width = 1 << 2 * bits, 1 << bits
        # half of the roots of unity suffice for stages of radix 2
        angles = 2 * np.pi * np.arange(width // 2) / width
        roots = self.device.allocate(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32))
        spectra = []
        for source, images, rows in ((x, size.n * size.c, size.h), (w, size.k * size.c, size.r)):
            # two floats for each complex number
            out = self.zeros(2 * images * count)
            self.launch("fft_forward", (images,), (_THREADS,), source, out, roots, rows, bits)
            spectra.append(out)
        product, y = self.zeros(2 * size.n * size.k * count), self.zeros(size.n, size.k, size.p, size.p)
        grid = (-(-count // _THREADS), size.k, size.n)
        self.launch("fft_product", grid, (_THREADS,), *spectra, product, size.c, size.k, count)
        self.launch("fft_inverse", (size.n * size.k,), (_THREADS,), product, y, roots, b, size.k, size.p, bits)
        return y

    def winograd(self, x: Pointer, w: Pointer, b: Pointer | int, size: SquareConvolution) -> Pointer:
        """A convolution of 5 x 5 by Winograd's minimal filtering, 36 products for 4 results."""
        # F(2 x 2, 5 x 5) works on tiles of 6 x 6, which overlap
        tiles = size.n * (size.p // 2) ** 2
        u, v = self.zeros(36, size.k, size.c), self.zeros(36, size.c, tiles)
        m, y = self.zeros(36, size.k, tiles), self.zeros(size.n, size.k, size.p, size.p)
        self.each("winograd_filter", size.k * size.c, w, u, size.k, size.c)
        self.each("winograd_input", size.c * tiles, x, v, size.n, size.c, size.h)
        # 36 products, one for each place in a tile: the third axis of the grid
        grid, mnk = (-(-tiles // _TILE), -(-size.k // _TILE), 36), (size.k, tiles, size.c)
        strides = (size.c, 1, tiles, 1, size.k * size.c, size.c * tiles)
        self.launch("gemm", grid, (_TILE, _TILE), u, v, _NULL, m, *mnk, *strides)
        self.each("winograd_output", size.k * tiles, m, y, b, size.n, size.k, size.p)
        return y

    def pool(self, x: Pointer, count: int, rows: int) -> Pointer:
        """The largest of 2 x 2; rows: of the result."""
        y = self.zeros(count, rows, rows)
        self.each("max_pool", count * rows**2, x, y, count, rows)
        return y

    def linear(self, x: Pointer, w: Pointer, b: Pointer, mnk: tuple[int, int, int]) -> Pointer:
        """x w^T + b: images, results and inputs of each. One image is a vector: a tile would compute 16 rows for it."""
        images, results, inputs = mnk
        if images == 1:
            y = self.zeros(images, results)
            self.each("gemv", _WARP * results, w, x, b, y, results, inputs)
            return y
        # w is [results, inputs]: its transpose is read by strides
        return self.gemm(x, w, b, mnk, (inputs, 1, 1, inputs))


ALGORITHMS: Mapping[str, Callable[[Layers, Pointer, Pointer, Pointer | int, SquareConvolution], Pointer]] = {
    "direct": Layers.direct,
    "implicit_gemm": Layers.implicit_gemm,
    "fft": Layers.fft,
    "winograd": Layers.winograd,
}
"""Algorithms of convolutions by name."""


class LeNet:
    """The network on a device. Weights by the names of SHAPES; `algorithm` is that of both convolutions."""

    def __init__(self, weights: Mapping[str, Array], algorithm: str = "direct", layers: Layers | None = None) -> None:
        self.layers, self.algorithm = layers or Layers(), ALGORITHMS[algorithm]
        self.weights = {name: self.layers.device.allocate(weights[name].astype(np.float32)) for name in SHAPES}
        # weights stay: results of each pass are released down to them
        self._kept = len(self.layers.device)

    def _forward(self, images: Array) -> dict[str, Pointer]:
        """Results of all layers by name."""
        layers, w, n = self.layers, self.weights, len(images)
        layers.device.release(self._kept)
        at = {"x": layers.device.allocate(images.astype(np.float32))}
        first, second = SquareConvolution(n, 1, 28, 20), SquareConvolution(n, 20, 12, 50)
        at["conv1"] = self.algorithm(layers, at["x"], w["conv1.weight"], w["conv1.bias"], first)
        at["pool1"] = layers.pool(at["conv1"], n * 20, 12)
        at["conv2"] = self.algorithm(layers, at["pool1"], w["conv2.weight"], w["conv2.bias"], second)
        at["pool2"] = layers.pool(at["conv2"], n * 50, 4)
        at["fc1"] = layers.linear(at["pool2"], w["fc1.weight"], w["fc1.bias"], (n, 500, 800))
        at["relu"], at["lrn"], at["scales"] = (layers.zeros(n, 500) for _ in range(3))
        layers.each("relu", n * 500, at["fc1"], at["relu"], n * 500)
        layers.each("lrn", n * 500, at["relu"], at["lrn"], at["scales"], n, 500, *LRN)
        at["logits"] = layers.linear(at["lrn"], w["fc2.weight"], w["fc2.bias"], (n, 10, 500))
        return at

    def logits(self, images: Array) -> Array:
        """Logits (images, 10) of images (images, 1, 28, 28)."""
        at = self._forward(images)
        return self.layers.device.read(at["logits"], np.float32, (len(images), 10))

    def probabilities(self, images: Array) -> Array:
        """Softmax of the logits."""
        n, at = len(images), self._forward(images)
        out = self.layers.zeros(n, 10)
        self._softmax(n, at["logits"], out, _NULL, _NULL, _NULL)
        return self.layers.device.read(out, np.float32, (n, 10))

    def _softmax(self, n: int, *arguments: Argument) -> None:
        self.layers.each("softmax", _WARP * n, *arguments, n, 10)

    def train(self, images: Array, labels: NDArray[np.int32], rate: float) -> float:
        """One step of gradient descent on the mean cross entropy. Returns the loss before it."""
        n, layers, at = len(images), self.layers, self._forward(images)
        on_device, losses = layers.device.allocate(labels.astype(np.int32)), layers.zeros(n)
        d_logits = layers.zeros(n, 10)
        # the loss of each image, and the gradient of its logits, in one launch
        self._softmax(n, at["logits"], layers.zeros(n, 10), d_logits, on_device, losses)
        gradients = self._backward(at, d_logits, n)
        for name, gradient in gradients.items():
            count = int(np.prod(SHAPES[name]))
            layers.each("sgd", count, self.weights[name], gradient, rate, count)
        return float(layers.device.read(losses, np.float32, n).mean())

    def _backward(self, at: Mapping[str, Pointer], d_logits: Pointer, n: int) -> dict[str, Pointer]:
        """Gradients of all weights."""
        layers, gradients = self.layers, dict[str, Pointer]()
        # backwards from the last layer; each step reads what its forward pass kept
        d_lrn = self._linear_backward("fc2", at["lrn"], d_logits, n, gradients)
        d_relu, d_fc1 = layers.zeros(n, 500), layers.zeros(n, 500)
        layers.each("lrn_backward", n * 500, at["relu"], at["scales"], d_lrn, d_relu, n, 500, *LRN)
        layers.each("relu_backward", n * 500, at["fc1"], d_relu, d_fc1, n * 500)
        d_pool2 = self._linear_backward("fc1", at["pool2"], d_fc1, n, gradients)
        d_conv2, d_conv1 = layers.zeros(n, 50, 8, 8), layers.zeros(n, 20, 24, 24)
        layers.each("max_pool_backward", n * 50 * 16, at["conv2"], d_pool2, d_conv2, n * 50, 4)
        second, d_pool1 = SquareConvolution(n, 20, 12, 50), layers.zeros(n, 20, 12, 12)
        self._filter_backward("conv2", at["pool1"], d_conv2, second, gradients)
        weight = self.weights["conv2.weight"]
        layers.each("conv_backward_data", n * 20 * 144, d_conv2, weight, d_pool1, *second.sizes)
        layers.each("max_pool_backward", n * 20 * 144, at["conv1"], d_pool1, d_conv1, n * 20, 12)
        self._filter_backward("conv1", at["x"], d_conv1, SquareConvolution(n, 1, 28, 20), gradients)
        return gradients

    def _linear_backward(self, name: str, x: Pointer, dy: Pointer, n: int, gradients: dict[str, Pointer]) -> Pointer:
        """Gradients of a fully connected layer, of its inputs the result."""
        outputs, inputs = SHAPES[f"{name}.weight"]
        # dw = dy^T x, by strides
        gradients[f"{name}.weight"] = self.layers.gemm(dy, x, _NULL, (outputs, inputs, n), (1, outputs, inputs, 1))
        gradients[f"{name}.bias"] = self.layers.zeros(outputs)
        self.layers.each("column_sums", outputs, dy, gradients[f"{name}.bias"], n, outputs)
        weight = self.weights[f"{name}.weight"]
        return self.layers.gemm(dy, weight, _NULL, (n, inputs, outputs), (outputs, 1, inputs, 1))

    def _filter_backward(
        self, name: str, x: Pointer, dy: Pointer, size: SquareConvolution, gradients: dict[str, Pointer]
    ) -> None:
        dw, db = (self.layers.zeros(*SHAPES[f"{name}.{part}"]) for part in ("weight", "bias"))
        # a warp for each weight: its lanes sum over images and pixels
        count = _WARP * int(np.prod(SHAPES[f"{name}.weight"]))
        self.layers.each("conv_backward_filter", count, x, dy, dw, db, *size.sizes)
        gradients |= {f"{name}.weight": dw, f"{name}.bias": db}

    def weight(self, name: str) -> Array:
        """Copy of a weight."""
        return self.layers.device.read(self.weights[name], np.float32, SHAPES[name])
