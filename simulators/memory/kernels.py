"""Kernels of an application by what they do: shapes of each class, and the tensors they touch.

How a class touches memory is written in `simulators.memory.traces`. Names of tensors are those of the application.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from dse.values import Frozen, Integer, Number

Size = Annotated[Integer, Field(ge=1, le=2**40)]
Small = Annotated[Integer, Field(ge=1, le=4096)]
Names = Annotated[tuple[str, ...], Field(max_length=8)]


class Elementwise(Frozen):
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


class Passes(Frozen):
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

    depth: of k in a step. held: workgroups on a CU, by registers and LDS.
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


class Convolution(Frozen):
    """Images x [n, c, h, w] and filters w [c, r, s, k] to y [n, k, oh, ow] by implicit GEMM, forward.

    tile: filters x pixels of a workgroup.
    """

    kind: Literal["convolution"]
    x: str
    w: str
    y: str
    r: Small
    s: Small
    stride: Small = 1
    pad: Annotated[Integer, Field(ge=0, le=64)] = 0
    tile: tuple[Small, Small] = (64, 64)
    held: Small = 4


class Strided(Frozen):
    """A matrix [rows, cols], or several [batch, rows, cols], written transposed: reads along rows, stores across."""

    kind: Literal["strided"]
    reads: Names
    writes: Names
    tile: Small = 1


class Scattered(Frozen):
    """`count` runs of `run` bytes from places of `reads` that a hash draws, written one after another."""

    kind: Literal["scattered"]
    reads: Names
    writes: Names
    count: Size
    run: Annotated[Integer, Field(ge=4, le=4096)]


Kernel = Annotated[
    Elementwise | Window | Channels | Passes | MatrixProduct | Convolution | Strided | Scattered,
    Field(discriminator="kind"),
]


class Group(Frozen):
    """Kernels that are launched one after another, `repeat` times over."""

    kernels: tuple[Kernel, ...] = Field(min_length=1)
    repeat: Annotated[Integer, Field(ge=1, le=100_000)] = 1


class Application(Frozen):
    """Tensors by name, and the kernels that touch them. precision: of all. note: where the sizes are from."""

    name: str
    description: str = ""
    note: str = ""
    precision: Literal["fp32", "fp64", "fp16"]
    tensors: Mapping[str, tuple[Size, ...]] = Field(min_length=1)
    groups: tuple[Group, ...] = Field(min_length=1)

    @field_validator("groups")
    @classmethod
    def _knows_its_tensors(cls, groups: tuple[Group, ...], info: object) -> tuple[Group, ...]:
        known = getattr(info, "data", {}).get("tensors", {})
        absent = {name for group in groups for kernel in group.kernels for name in touched(kernel)} - set(known)
        if known and absent:
            raise ValueError(f"touch {', '.join(sorted(absent))}, which tensors does not list")
        return groups


def touched(kernel: Kernel) -> Iterator[str]:
    """Names of the tensors that a kernel touches."""
    if isinstance(kernel, MatrixProduct):
        yield from (kernel.a, kernel.b, kernel.c)
    elif isinstance(kernel, Convolution):
        yield from (kernel.x, kernel.w, kernel.y)
    else:
        yield from (*kernel.reads, *kernel.writes)
