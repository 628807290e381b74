"""Kernels of an application by what they do: shapes of each class, and the tensors they touch.

How a class touches memory is written in `dse_memory.traces`. Names of tensors are those of the application.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dse.values import Frozen
from dse.values.units import Integer, Number

Algorithm = Literal["gemm", "implicit_gemm", "fft", "fft_tiling", "winograd", "winograd_nonfused"]
ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "fp64": 8, "fp16": 2}
Size = Annotated[Integer, Field(ge=1, le=2**40)]  # bytes that tags can address: nothing is larger
Small = Annotated[Integer, Field(ge=1, le=4096)]
Factor = Annotated[Number, Field(gt=0, le=1e4)]
Sides = tuple[Small, Small]
Pads = tuple[Annotated[Integer, Field(ge=0, le=4096)], Annotated[Integer, Field(ge=0, le=4096)]]
Names = Annotated[tuple[str, ...], Field(max_length=8)]
# sides of images, and of filters
_MOST_SIDE, _MOST_TAPS = 4096, 64  # of a layer
Side = Annotated[Integer, Field(ge=1, le=_MOST_SIDE)]
Tap = Annotated[Integer, Field(ge=1, le=_MOST_TAPS)]
Pad = Annotated[Integer, Field(ge=0, le=_MOST_TAPS)]


class ElementwiseKernel(Frozen):
    """Every element of `writes` from those at the same place of `reads`; flop: for each."""

    kind: Literal["elementwise"]
    reads: Names
    writes: Names
    flop: Annotated[Number, Field(ge=0, le=1e4)] = 1.0


class Window(Frozen):
    """A window of rows x cols over the images [n, c, h, w] of `reads`, `stride` apart, for every element of `writes`.

    backward: `writes` is the larger, and each of its elements looks for the windows that hold it.
    """

    kind: Literal["window"]
    reads: Names
    writes: Names
    rows: Small
    cols: Small
    stride: Small = 1
    backward: bool = False


class Channels(Frozen):
    """Along the channels of [n, c, h, w]: a workgroup keeps pixels, and goes from channel to channel."""

    kind: Literal["channels"]
    reads: Names
    writes: Names
    flop: Annotated[Number, Field(ge=0, le=1e4)] = 1.0


class ReductionPasses(Frozen):
    """Several passes over a matrix [rows, cols], by its rows or columns: sums first, and the result last.

    passes: how often `reads` are read in all. along: what a workgroup keeps, and what it goes along.
    """

    kind: Literal["passes"]
    reads: Names
    writes: Names
    passes: Small
    along: Literal["rows", "cols"]
    flop: Annotated[Number, Field(ge=0, le=1e4)] = 2.0


class MatrixProduct(Frozen):
    """C[m, n] = A[m, k] B[k, n], tile by tile, and `batch` of them; transposed, A is stored [k, m] and B [n, k].

    depth: of k in a step. held: workgroups on a CU, by registers and LDS. work: time of arithmetic over that of its
    FLOP at the machine's rate. complex: elements are pairs, and a multiplication with an addition is 8 FLOP. runs: of a
    tile that an instruction loads.
    """

    kind: Literal["gemm"]
    a: str
    b: str
    c: str
    m: Size
    n: Size
    k: Size
    batch: Size = 1
    transposed_a: bool = False
    transposed_b: bool = False
    tile: tuple[Small, Small] = (64, 64)
    depth: Small = 16
    held: Small = 4
    work: Factor = 1.0
    complex: bool = False
    runs: Small = 4096


class Convolution(Frozen):
    """A whole layer: x [n, c, h, w] with filters w [k, c, r, s] to y [n, k, oh, ow], forward.

    It is no kernel yet: `dse_memory.convolutions` writes those of the application's algorithm for it.
    """

    kind: Literal["convolution"]
    x: str
    w: str
    y: str
    stride: tuple[Tap, Tap] = (1, 1)
    pad: tuple[Pad, Pad] = (0, 0)


class ImplicitGemm(Frozen):
    """Convolution of x [n, c, h, w] with filters w [c, r, s, k] to y [n, k, oh, ow] by implicit GEMM; k is not split.

    taps: r, s. tile: filters x pixels of a workgroup; pixels go on from row to row and image to image. backward: a data
    gradient with a stride, where x is the smaller, and every pixel of y looks at all taps. multiplies: multiplications
    for each filter, pixel and channel (r s; of Winograd less). work: as of a product. rows: least of a tile of pixels.
    """

    kind: Literal["implicit_gemm"]
    x: str
    w: str
    y: str
    taps: Sides
    stride: Sides = (1, 1)
    pad: Pads = (0, 0)
    tile: Sides = (64, 64)
    held: Small = 4
    multiplies: Factor
    work: Factor = 1.0
    rows: Small = 1
    backward: bool = False


class FilterGradient(Frozen):
    """Filters' gradient from x [n, c, h, w] and y [n, k, oh, ow] to w [parts, k, c, r, s] by implicit GEMM over pixels.

    tile: filters x columns (c r s) of a workgroup. parts: of the images, and of an image's pixels, that are summed
    apart. The rest as of `ImplicitGemm`.
    """

    kind: Literal["filter_gradient"]
    x: str
    y: str
    w: str
    taps: Sides
    stride: Sides = (1, 1)
    pad: Pads = (0, 0)
    tile: Sides = (64, 64)
    parts: Sides = (1, 1)
    held: Small = 4
    multiplies: Factor
    work: Factor = 1.0


class Columns(Frozen):
    """Images [n, c, h, w] unrolled to columns [n, c r s, oh, ow] (im2col), or `backward`, columns summed to images."""

    kind: Literal["columns"]
    reads: Names
    writes: Names
    taps: Sides
    stride: Sides = (1, 1)
    pad: Pads = (0, 0)
    backward: bool = False


class Transform(Frozen):
    """Tiles of images [n, c, h, w] to points [g, c, n tiles] of a Winograd or Fourier transform, or `backward`.

    tiles: rows, cols of tiles of an image; tile: pixels from one to the next; reach: pixels of one. together: tiles of
    a workgroup, which lie beside one another in every plane. flop: of a tile. complex: points are pairs.
    """

    kind: Literal["transform"]
    reads: Names
    writes: Names
    tiles: Sides
    tile: Sides
    reach: Sides
    together: Small = 64
    flop: Annotated[Number, Field(ge=0, le=1e9)]
    complex: bool = False
    backward: bool = False


class Reduction(Frozen):
    """Sums of what lies in `parts` [parts, ...] of `reads`, one after another in memory, to `writes`."""

    kind: Literal["reduction"]
    reads: Names
    writes: Names
    parts: Small


class Transposition(Frozen):
    """A matrix [rows, cols], or several [batch, rows, cols], written transposed: reads along rows, stores across."""

    kind: Literal["strided"]
    reads: Names
    writes: Names
    tile: Small = 1


class ScatteredRuns(Frozen):
    """`count` runs of `run` bytes from places of `reads` that a hash draws, written one after another."""

    kind: Literal["scattered"]
    reads: Names
    writes: Names
    count: Size
    run: Annotated[Integer, Field(ge=4, le=4096)]


Kernel = Annotated[
    ElementwiseKernel
    | Window
    | Channels
    | ReductionPasses
    | MatrixProduct
    | Convolution
    | ImplicitGemm
    | FilterGradient
    | Columns
    | Transform
    | Reduction
    | Transposition
    | ScatteredRuns,
    Field(discriminator="kind"),
]


class KernelGroup(Frozen):
    """Kernels that are launched one after another, `repeat` times over."""

    kernels: tuple[Kernel, ...] = Field(min_length=1)
    repeat: Annotated[Integer, Field(ge=1, le=100_000)] = 1


class Application(Frozen):
    """Tensors by name, and the kernels that touch them. precision: of all. note: where the sizes are from.

    algorithm: of its convolutions.
    """

    name: str
    description: str = ""
    note: str = ""
    precision: Literal["fp32", "fp64", "fp16"]
    algorithm: Algorithm | None = None
    tensors: Mapping[str, tuple[Size, ...]] = Field(min_length=1)
    groups: tuple[KernelGroup, ...] = Field(min_length=1)

    @field_validator("groups")
    @classmethod
    def _knows_its_tensors(cls, groups: tuple[KernelGroup, ...], info: object) -> tuple[KernelGroup, ...]:
        listed = getattr(info, "data", {}).get("tensors", {})
        absent = {name for group in groups for kernel in group.kernels for name in touched_tensors(kernel)} - set(
            listed
        )
        if listed and absent:
            raise ValueError(f"touch {', '.join(sorted(absent))}, which tensors does not list")
        return groups

    @model_validator(mode="after")
    def _says_how_its_convolutions_run(self) -> Self:
        convolutions = [kernel for group in self.groups for kernel in group.kernels if isinstance(kernel, Convolution)]
        # one without the other would be ignored, or could not be written out
        if bool(convolutions) != (self.algorithm is not None):
            raise ValueError("algorithm belongs to kernels of kind convolution, and they need it")
        for kernel in convolutions:
            _fits(kernel, *(self.tensors[name] for name in (kernel.x, kernel.w, kernel.y)))
        return self


def _fits(layer: Convolution, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...]) -> None:
    """Raise ValueError where the sizes of a layer's tensors are not those of a convolution."""
    if {len(x), len(w), len(y)} != {4}:  # the lengths are compared first: unpacking needs them
        raise ValueError(f"convolution of {layer.x}: x [n, c, h, w], w [k, c, r, s], y [n, k, oh, ow] have four sizes")
    if max(*x, *w[:2]) > _MOST_SIDE or max(w[2:]) > _MOST_TAPS:
        raise ValueError(f"convolution of {layer.x}: sizes go up to {_MOST_SIDE}, filters to {_MOST_TAPS} a side")
    if w[1] != x[1]:
        raise ValueError(f"convolution of {layer.x}: {layer.w} has {w[1]} channels, {layer.x} has {x[1]}")
    sides = zip(x[2:], w[2:], layer.pad, layer.stride, strict=True)
    # as the pass defines it: floor of the last window that fits
    sizes = (x[0], w[0], *((side + 2 * pad - tap) // stride + 1 for side, tap, pad, stride in sides))
    if sizes != tuple(y):
        raise ValueError(f"convolution of {layer.x} makes {list(sizes)}, and {layer.y} is {list(y)}")


def touched_tensors(kernel: Kernel) -> Iterator[str]:
    """Names of the tensors that a kernel touches."""
    if isinstance(kernel, MatrixProduct):
        yield from (kernel.a, kernel.b, kernel.c)
    elif isinstance(kernel, Convolution | ImplicitGemm | FilterGradient):
        yield from (kernel.x, kernel.w, kernel.y)
    else:
        yield from (*kernel.reads, *kernel.writes)
