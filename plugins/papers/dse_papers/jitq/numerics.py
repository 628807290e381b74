"""Tensors that are really quantised: blocks of shared exponents along one axis, errors of weights and products, a loss.

A block's exponent is X = floor(log2 max|v|) less the largest exponent of an element (OCP MX v1.0, section 6.3); a
sub-block is shifted down by t = min(floor(log2) of the block's less of its own largest value, 2^sub_bits - 1)
(arXiv:2302.08007). Elements are rounded to the nearest, ties to even, and saturate. Blocks lie along the axis that a
product sums over: Y = X W needs W in blocks along its rows, dX = dY W^T along its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.hardware.pim import Element, Format

Floats = NDArray[np.float64]
_LEAST = 2.0**-126
"""Below the smallest of bf16's normal numbers a value counts as nothing when exponents are taken."""


def quantise(values: Floats, format: Format, axis: int) -> Floats:
    """Values as a format holds them, in blocks along an axis, of which the last may be shorter; the same shape.

    Raises ValueError for values that are not finite, which have no exponent.
    """
    if not np.isfinite(values).all():
        raise ValueError("values must be finite to share an exponent")
    # the axis of blocks last: a reshape then splits it into blocks and sub-blocks
    moved = np.moveaxis(values, axis, -1)
    length = moved.shape[-1]
    # zeros at the end change neither the largest value of a block nor its other elements
    padded = np.zeros((*moved.shape[:-1], -(-length // format.block) * format.block))
    padded[..., :length] = moved
    blocks = padded.reshape(*moved.shape[:-1], -1, format.block // format.sub_block, format.sub_block)
    # [..., blocks, 1, 1], from the largest value of the block
    shared = _exponent(np.abs(blocks).max(axis=(-2, -1), keepdims=True))
    # a sub-block of small values is shifted down, as far as its bits can hold
    shift = np.minimum(shared - _exponent(np.abs(blocks).max(axis=-1, keepdims=True)), 2**format.sub_bits - 1)
    # the range of a biased exponent of `scale_bits` bits
    bound = 2 ** (format.scale_bits - 1) - 1
    scale = 2.0 ** (np.clip(shared - _largest_exponent(format.element), -bound, bound) - shift)
    rounded = _round(blocks / scale, format.element) * scale
    return np.moveaxis(rounded.reshape(padded.shape)[..., :length], -1, axis)


def _exponent(values: Floats) -> Floats:
    """Floor of the binary logarithm of values from 0 on."""
    # frexp has mantissas from 1/2 to 1: its exponent is one above the floor of the logarithm
    return np.frexp(np.maximum(values, _LEAST))[1] - 1.0


def _largest_exponent(element: Element) -> int:
    """Exponent of the largest number of an element; 0 of integers, whose first bit weighs 2^0."""
    if not element.exponent_bits:
        return 0
    # of codes up to 2^e - 1 with a bias of 2^(e - 1) - 1
    return (1 << (element.exponent_bits - 1)) - (element.top == "ieee")


def _round(values: Floats, element: Element) -> Floats:
    """Nearest numbers of an element, ties to even; beyond its largest, that one."""
    largest, fraction = _largest_exponent(element), element.mantissa_bits
    if not element.exponent_bits:
        unit = 2.0 ** (1 - fraction)
        most = 2.0 - unit
        # two's complement has one more number below zero
        return np.clip(np.rint(values / unit) * unit, -2.0 if element.negative == "complement" else -most, most)
    least = 2 - 2 ** (element.exponent_bits - 1)  # below it numbers are as far apart
    steps = 2.0 ** (np.clip(_exponent(np.abs(values)), least, largest) - fraction)
    # the topmost code of an element with top = nan is no number: the largest is one step lower
    most = 2.0**largest * (2 - 2.0**-fraction * (2 if element.top == "nan" else 1))
    return np.clip(np.rint(values / steps) * steps, -most, most)


def error_db(exact: Floats, inexact: Floats) -> float:
    """Signal over quantisation noise [dB]: 10 log10 of the sum of squares over that of the errors."""
    noise = float(((exact - inexact) ** 2).sum())
    return float("inf") if noise == 0 else 10 * float(np.log10((exact**2).sum() / noise))


def weights(seed: int = 0, rows: int = 256, cols: int = 128) -> Mapping[str, Floats]:
    """Weights [rows, cols] by distribution: normal, and heavy in the tails (Student's t, 4 degrees of freedom)."""
    of = np.random.default_rng(seed)
    shape, scale = (rows, cols), rows**-0.5
    return {"normal": scale * of.standard_normal(shape), "heavy tails": scale * of.standard_t(4, shape)}


def errors(formats: Mapping[str, Format], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield, by format and distribution of weights, the errors of weights and of both products that read them [dB].

    forward: Y = X W; backward: dX = dY W^T; other_axis: Y with blocks along the columns, as if one copy did for both.
    """
    # inputs are drawn apart from weights, so that both stay the same when one changes
    of = np.random.default_rng(seed + 1)
    for kind, exact in weights(seed).items():
        x, dy = of.standard_normal((64, exact.shape[0])), of.standard_normal((64, exact.shape[1]))
        for name, format in formats.items():
            by_rows, by_cols = quantise(exact, format, 0), quantise(exact, format, 1)
            yield {
                "format": name,
                "bytes_per_element": format.bytes_per_element,
                "weights": kind,
                "weights_db": error_db(exact, by_rows),
                "forward_db": error_db(x @ exact, x @ by_rows),
                "backward_db": error_db(dy @ exact.T, dy @ by_cols.T),
                "other_axis_db": error_db(x @ exact, x @ by_cols),
            }


_Copy = Callable[[Floats], Floats]
_WIDTHS, _SAMPLES, _STEPS, _RATE = (16, 32, 32, 4), 256, 150, 0.1


def losses(formats: Mapping[str, tuple[Format | None, Format | None]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the loss of a small network after training, by the formats of its copies forward and backward.

    The network (16, 32, 32, 4 wide, ReLU) learns what another such network computes, by gradient descent with momentum
    on weights in full precision; each product reads a copy that is made just before it. None: no copy.
    """
    of = np.random.default_rng(seed)
    teacher = _layers(of)
    start = _layers(of)
    x = of.standard_normal((_SAMPLES, _WIDTHS[0]))
    target = _forward(x, teacher)[-1]
    for name, (forward, backward) in formats.items():
        trained = _train([layer.copy() for layer in start], x, target, _copy(forward, 0), _copy(backward, 1))
        yield {"copies": name, "loss": _loss(_forward(x, [_copy(forward, 0)(w) for w in trained])[-1], target)}


def _layers(of: np.random.Generator) -> list[Floats]:
    pairs = pairwise(_WIDTHS)
    # He's initialisation, for ReLU
    return [of.standard_normal(shape) * (2 / shape[0]) ** 0.5 for shape in pairs]


def _copy(format: Format | None, axis: int) -> _Copy:
    """What makes the copy that a product reads."""
    return (lambda values: values) if format is None else (lambda values: quantise(values, format, axis))


def _forward(x: Floats, layers: list[Floats]) -> list[Floats]:
    """Inputs of each layer, and the output."""
    values = [x]
    for place, layer in enumerate(layers, 1):
        out = values[-1] @ layer
        # no ReLU after the last layer
        values.append(out if place == len(layers) else np.maximum(out, 0))
    return values


def _loss(output: Floats, target: Floats) -> float:
    """Mean squared error over the mean square of the target."""
    return float(((output - target) ** 2).mean() / (target**2).mean())


def _train(layers: list[Floats], x: Floats, target: Floats, forward: _Copy, backward: _Copy) -> list[Floats]:
    """Layers after gradient descent with momentum."""
    momenta = [np.zeros_like(layer) for layer in layers]
    for _ in range(_STEPS):
        values = _forward(x, [forward(layer) for layer in layers])
        slope = 2 * (values[-1] - target) / target.size
        for place in reversed(range(len(layers))):
            gradient = values[place].T @ slope
            # straight through: quantisation is not differentiated, as its slope is 0 almost everywhere
            slope = (slope @ backward(layers[place]).T) * (values[place] > 0)
            momenta[place] = 0.9 * momenta[place] + gradient
            layers[place] = layers[place] - _RATE * momenta[place]
    return layers
