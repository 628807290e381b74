"""Convolutions as sequences of kernels: six algorithms of libraries, three passes, for the traces of this folder.

n images of c channels, h x w, filters r x s with strides sv, sh and pads ph, pw give k channels of oh x ow; p = n oh ow
pixels; FLOP of a pass as it is defined: 2 p k c r s. What an algorithm launches, in fp32 or another precision:

    gemm               forward   im2col; W col        data   Wt Y; col2im        filter   im2col; Y colt [; sums]
                       no columns where r = s = 1, nothing is skipped and nothing padded
    implicit_gemm      one kernel; filter: pixels in parts where few workgroups would be, and their sums; data with a
                       stride: pixels of x look at all taps, so sv sh times the FLOP
    winograd           F(2x2, 3x3) in one kernel, 4 multiplications for 9; no filter pass
    winograd_nonfused  F(4x4, 3x3): x, W -> 36 planes of points; 36 products; the third back
    fft                images padded to the next power of two, S x S: S (S/2 + 1) complex planes, as many products
    fft_tiling         the same in tiles of 32 x 32 that overlap by r - 1, s - 1: 544 planes

Arithmetic is exact (Lavin and Gray, arXiv:1509.09308; Mathieu, Henaff, LeCun, arXiv:1312.5851; Vasilache et al.,
arXiv:1412.7580). A tile a x b of 256 threads holds a/16 x b/16 sums a thread, for which it reads a/16 + b/16 operands
from LDS; with `_FEED` of these a multiplication's time, its time over that of the widest is

    e(a, b) = (1 + FEED (16/a + 16/b)) / (1 + FEED / 4),        of complex numbers e(2a, 2b)

and `_PROLOGUE` steps of k come before the first. The tile is that of least ceil(groups / CUs) a b e(a, b): the busiest
CU's arithmetic, of equals the first. Filter gradients are split until each CU has `_FILL` workgroups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from dse.values import Frozen
from dse_memory.kernels import (
    Algorithm,
    Application,
    Columns,
    Convolution,
    FilterGradient,
    ImplicitGemm,
    Kernel,
    KernelGroup,
    MatrixProduct,
    Pad,
    Reduction,
    Side,
    Tap,
    Transform,
)
from dse_memory.traces import CHUNK, column_tile, pixel_tile

Direction = Literal["forward", "backward_data", "backward_filter"]
ALGORITHMS: tuple[Algorithm, ...] = ("gemm", "implicit_gemm", "fft", "fft_tiling", "winograd", "winograd_nonfused")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward_data", "backward_filter")

_FEED = 1.0  # of a multiplication's time, reading an operand from LDS (assumed)
_PROLOGUE = 24.0  # steps of k in which a tile fills and drains its pipeline (as in simulators.costs.convolution)
_FUSED = 1.5  # transforms inside a Winograd kernel, over its multiplications (chosen on the same tables)
_GRADIENT = 1.15  # of the filter pass: index arithmetic on both operands (as in simulators.costs.convolution)
_FFT_WORK = 4.0  # of butterflies, over that of multiplications with additions (as in simulators.costs.convolution)
_FILL = 4  # workgroups of a CU up to which a filter gradient is split
# of sums of a workgroup, from the widest reuse to the least
_TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32), (8, 128))
_FUSED_TILES = ((64, 64), (32, 128), (32, 32))  # a fused Winograd kernel needs registers for its transforms, too
_COMPLEX_TILES = ((64, 64), (64, 32), (32, 64), (32, 32), (64, 16))  # a complex sum takes two registers
_REGISTERS = 256  # of a thread, where a CU holds one workgroup
_OTHER_REGISTERS = 40  # of a thread, beside its sums
_FFT_SIDES = (16, 32, 64, 128, 256)  # of whole images; larger ones are tiled
_LDS_POINTS = 4096  # of an FFT's tiles in a workgroup

Tensors = dict[str, tuple[int, ...]]
Made = tuple[Tensors, list[Kernel]]


class ConvolutionPass(Frozen):
    """One pass of a convolution by one algorithm. Images [n, c, h, w], filters [k, c, r, s]."""

    name: str
    description: str = ""
    note: str = ""
    precision: Literal["fp32", "fp64", "fp16"] = "fp32"
    n: Side
    c: Side
    h: Side
    w: Side
    k: Side
    r: Tap
    s: Tap
    pad_h: Pad = 0
    pad_w: Pad = 0
    stride_v: Tap = 1
    stride_h: Tap = 1
    direction: Direction = "forward"
    algorithm: Algorithm = "implicit_gemm"

    @property
    def oh(self) -> int:
        """Rows of the output."""
        return (self.h + 2 * self.pad_h - self.r) // self.stride_v + 1

    @property
    def ow(self) -> int:
        """Columns of the output."""
        return (self.w + 2 * self.pad_w - self.s) // self.stride_h + 1

    @property
    def taps(self) -> tuple[int, int]:
        """r, s."""
        return self.r, self.s

    @property
    def is_strided(self) -> bool:
        """True if the filter skips pixels."""
        return self.stride_v * self.stride_h > 1

    @property
    def pointwise(self) -> bool:
        """True if columns are the images themselves."""
        return self.r * self.s == 1 and not self.is_strided and not self.pad_h + self.pad_w

    @property
    def flop(self) -> float:
        """2 p k c r s, as the convolution is defined."""
        return 2.0 * self.n * self.oh * self.ow * self.k * self.c * self.r * self.s


def unsupported_reason(layer: ConvolutionPass) -> str:
    """Why an algorithm does not serve a shape; '' where it does."""
    name = layer.algorithm
    if min(layer.h + 2 * layer.pad_h - layer.r, layer.w + 2 * layer.pad_w - layer.s) < 0:  # no output pixel at all
        return f"the filter of {layer.r} x {layer.s} is larger than the padded image"
    if name in ("gemm", "implicit_gemm"):
        return ""
    if layer.is_strided:
        return f"{name} skips no pixels: stride {layer.stride_v} x {layer.stride_h}"
    return _no_winograd(layer) if name.startswith("winograd") else _no_fft(layer)


def _no_winograd(layer: ConvolutionPass) -> str:
    if layer.taps != (3, 3):  # F(2x2, 3x3) and F(4x4, 3x3) are what libraries have
        return f"{layer.algorithm} is for filters of 3 x 3, not {layer.r} x {layer.s}"
    fused = layer.algorithm == "winograd" and layer.direction == "backward_filter"
    return "winograd has no filter pass" if fused else ""


def _no_fft(layer: ConvolutionPass) -> str:
    if max(layer.taps) < 3:  # transforms would cost more than they save
        return f"{layer.algorithm} is for filters of 3 and more on a side"
    if layer.algorithm == "fft_tiling":
        # less than half a tile would be output
        return "filters are larger than half a tile of 32" if max(layer.taps) > 16 else ""
    # zeros around, so that the cyclic convolution equals the linear one
    side, most = max(layer.h + 2 * layer.pad_h, layer.w + 2 * layer.pad_w), _FFT_SIDES[-1]
    return f"padded images have {side} pixels on a side, and the largest transform {most}" if side > most else ""


def kernels(layer: ConvolutionPass, cus: int) -> Application:
    """The kernels of a layer, with tiles for a device of so many CUs. Raises ValueError where it is unsupported."""
    reason = unsupported_reason(layer)
    if reason:
        raise ValueError(reason)
    tensors, layer_kernels = _WRITERS[layer.algorithm](layer, cus)
    return Application(
        name=layer.name,
        description=layer.description,
        note=layer.note,
        precision=layer.precision,
        tensors=tensors,
        groups=(KernelGroup(kernels=tuple(layer_kernels)),),
    )


def layers(application: Application) -> Iterator[ConvolutionPass]:
    """The convolutions of an application, by its algorithm."""
    for kernel in (
        kernel for group in application.groups for kernel in group.kernels if isinstance(kernel, Convolution)
    ):
        yield _layer(kernel, application)


def _layer(kernel: Convolution, application: Application) -> ConvolutionPass:
    assert application.algorithm is not None
    (n, c, h, w), (k, _, r, s) = application.tensors[kernel.x], application.tensors[kernel.w]
    sizes = {"n": n, "c": c, "h": h, "w": w, "k": k, "r": r, "s": s, "pad_h": kernel.pad[0], "pad_w": kernel.pad[1]}
    strides = {"stride_v": kernel.stride[0], "stride_h": kernel.stride[1]}
    # layers are recognised by the name of their output
    return ConvolutionPass(name=kernel.y, algorithm=application.algorithm, **sizes, **strides)


def written_out(application: Application, cus: int) -> Application:
    """An application with the kernels of its convolutions. Raises ValueError where one is unsupported."""
    tensors, groups, count = dict(application.tensors), list[KernelGroup](), 0
    for group in application.groups:
        group_kernels = list[Kernel]()
        for kernel in group.kernels:
            if isinstance(kernel, Convolution):
                layer = kernels(_layer(kernel, application), cus)
                count += 1
                names = {"x": kernel.x, "w": kernel.w, "y": kernel.y}
                # scratch tensors of several layers must not share a name
                names |= {name: f"{name} of convolution {count}" for name in layer.tensors if name not in names}
                tensors |= {names[name]: sizes for name, sizes in layer.tensors.items()}
                group_kernels += [_rename_tensors(part, names) for part in layer.groups[0].kernels]
            else:
                group_kernels.append(kernel)
        groups.append(group.model_copy(update={"kernels": tuple(group_kernels)}))
    return application.model_copy(update={"algorithm": None, "tensors": tensors, "groups": tuple(groups)})


def _rename_tensors(kernel: Kernel, names: Mapping[str, str]) -> Kernel:
    """The same on tensors of other names."""
    single = {name: names[getattr(kernel, name)] for name in ("x", "w", "y", "a", "b", "c") if hasattr(kernel, name)}
    lists = {name: getattr(kernel, name) for name in ("reads", "writes") if hasattr(kernel, name)}
    several = {name: tuple(names[tensor] for tensor in every) for name, every in lists.items()}
    return kernel.model_copy(update={**single, **several})


def feed(rows: float, cols: float) -> float:
    """e(a, b): the time of a tile's arithmetic over that of the widest tile."""
    return (1 + _FEED * (16 / rows + 16 / cols)) / (1 + _FEED / 4)  # 1 for a tile of 128 x 128, the widest


def _chosen(groups: Callable[[int, int], int], cus: int, tiles: Iterable[tuple[int, int]], wide: int = 1) -> Any:
    """The tile of least arithmetic of the busiest CU. wide: 2 of complex numbers."""

    def busiest(tile: tuple[int, int]) -> float:
        return math.ceil(groups(*tile) / cus) * tile[0] * tile[1] * feed(wide * tile[0], wide * tile[1])

    return min(tiles, key=busiest)  # ties go to the wider tile, which is listed first


def _loop(tile: tuple[int, int], depth: float, wide: int = 1) -> dict[str, Any]:
    """Fields of a tile's inner loop over `depth` steps: its work, and the workgroups that a CU holds."""
    sums = tile[0] * tile[1] * wide / 256  # threads of a workgroup
    # registers, not waves, limit how many workgroups a CU holds
    workgroups = max(1, int(_REGISTERS / (sums + _OTHER_REGISTERS)))
    work = feed(wide * tile[0], wide * tile[1]) * (1 + _PROLOGUE / depth)  # weighs most where the loop is short
    return {"tile": tile, "held": workgroups, "work": work}


def _images(layer: ConvolutionPass) -> Tensors:
    return {
        "x": (layer.n, layer.c, layer.h, layer.w),
        "w": (layer.k, layer.c, layer.r, layer.s),
        "y": (layer.n, layer.k, layer.oh, layer.ow),
    }


def _pass(layer: ConvolutionPass, cus: int) -> Made:
    """Implicit GEMM in any direction."""
    if layer.direction == "backward_filter":
        shape = (layer.n, layer.k, layer.oh, layer.ow)
        return _gradient(layer, shape, _images(layer), ("x", layer.c), cus)
    geometry: dict[str, Any] = {"stride": (layer.stride_v, layer.stride_h), "pad": (layer.pad_h, layer.pad_w)}
    if layer.direction == "forward":
        fields = _implicit(("x", "w", "y"), (layer.k, layer.n * layer.oh * layer.ow, layer.c), layer.taps, cus)
    else:
        # data: the roles of x and y change, and filters and channels
        fields = _implicit(("y", "w", "x"), (layer.c, layer.n * layer.h * layer.w, layer.k), layer.taps, cus)
        pads = (max(layer.r - 1 - layer.pad_h, 0), max(layer.s - 1 - layer.pad_w, 0))  # of the transposed convolution
        geometry = {**geometry, "pad": pads, "backward": layer.is_strided}
    return _images(layer), [ImplicitGemm(**fields, **geometry)]


def _implicit(names: tuple[str, str, str], sizes: tuple[int, int, int], taps: tuple[int, int], cus: int) -> Any:
    """Fields of a product with images. names: images, filters, result. sizes: filters, pixels, channels."""
    filters, pixels, channels = sizes
    tile = _chosen(lambda a, b: math.ceil(filters / a) * math.ceil(pixels / b), cus, _TILES)
    x, w, y = names
    area = taps[0] * taps[1]
    loop = _loop(tile, channels * area)
    return {"kind": "implicit_gemm", "x": x, "w": w, "y": y, "taps": taps, "multiplies": float(area), **loop}


def _gradient(
    layer: ConvolutionPass, shape: tuple[int, int, int, int], tensors: Tensors, images: tuple[str, int], cus: int
) -> Made:
    """The filters' gradient from y and x, or from y and columns. shape: of y; images: the other's name and channels."""
    name, channels = images
    direct = name == "x"  # by windows of the images; else by columns that lie in memory
    geometry: dict[str, Any] = {"taps": (1, 1)}
    if direct:
        strides, pads = (layer.stride_v, layer.stride_h), (layer.pad_h, layer.pad_w)
        geometry = {"taps": layer.taps, "stride": strides, "pad": pads}
    area, pixels = math.prod(geometry["taps"]), shape[0] * shape[2] * shape[3]

    def busiest(tile: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        groups = math.ceil(shape[1] / tile[0]) * column_tile(channels, area, tile[1])[1]
        chunks, parts = _parts(groups, shape, cus)
        return chunks * tile[0] * tile[1] * feed(*tile), parts

    # a tile of columns holds all taps of a channel at least
    fit = [tile for tile in _TILES if tile[1] >= area] or [_TILES[0]]
    tile = min(fit, key=busiest)
    parts = busiest(tile)[1]  # again for the best tile: `busiest` chose them with it
    several = math.prod(parts)
    loop = _loop(tile, max(1.0, pixels / several))
    loop["work"] *= _GRADIENT if direct else 1.0
    fields: dict[str, Any] = {**geometry, **loop, "parts": parts, "multiplies": float(area)}
    into = "parts" if several > 1 else "w"  # sums of parts need a tensor of their own, and a kernel that adds them
    gradient_kernels: list[Kernel] = [FilterGradient(kind="filter_gradient", x=name, y="y", w=into, **fields)]
    if several > 1:
        tensors = {**tensors, "parts": (several, *tensors["w"])}
        gradient_kernels.append(Reduction(kind="reduction", reads=("parts",), writes=("w",), parts=several))
    return tensors, gradient_kernels


def _parts(groups: int, shape: tuple[int, int, int, int], cus: int) -> tuple[int, tuple[int, int]]:
    """Parts of n images, and of an image's chunks of pixels, for so many tiles of the result, and chunks of the busiest
    CU: the least, with the fewest parts, that leave a CU no more than `_FILL` workgroups.
    """
    n, _, high, wide = shape
    chunks = math.ceil(high / pixel_tile((1, high, wide), CHUNK)[1])
    # no split where the tiles alone fill the CUs
    most, choices = max(1, _FILL * cus // groups), list[tuple[int, int, tuple[int, int]]]()
    # each number of parts that changes how many turns the largest takes
    for images in {math.ceil(n / turns) for turns in range(1, n + 1)}:
        for rows in {math.ceil(chunks / turns) for turns in range(1, chunks + 1)}:
            if images * rows <= most:
                turns = math.ceil(n / images) * math.ceil(chunks / rows)
                # the busiest CU's chunks, then the fewest parts
                choices.append((math.ceil(groups * images * rows / cus) * turns, images * rows, (images, rows)))
    least, _, parts = min(choices)
    return least, parts


def _explicit(layer: ConvolutionPass, cus: int) -> Made:
    """Columns in memory: products are convolutions of 1 x 1 on them."""
    if layer.pointwise:  # nothing to unroll
        return _pass(layer, cus)
    tensors, depth, pixels = _images(layer), layer.c * layer.r * layer.s, layer.n * layer.oh * layer.ow
    tensors["columns"] = (layer.n, depth, layer.oh, layer.ow)
    geometry: dict[str, Any] = {
        "taps": layer.taps, "stride": (layer.stride_v, layer.stride_h), "pad": (layer.pad_h, layer.pad_w)
    }  # fmt: skip
    unroll = Columns(kind="columns", reads=("x",), writes=("columns",), **geometry)
    if layer.direction == "forward":
        product = ImplicitGemm(**_implicit(("columns", "w", "y"), (layer.k, pixels, depth), (1, 1), cus))
        return tensors, [unroll, product]
    if layer.direction == "backward_data":
        product = ImplicitGemm(**_implicit(("y", "w", "columns"), (depth, pixels, layer.k), (1, 1), cus))
        return tensors, [product, Columns(kind="columns", reads=("columns",), writes=("x",), backward=True, **geometry)]
    shape = (layer.n, layer.k, layer.oh, layer.ow)
    tensors, gradient_kernels = _gradient(layer, shape, tensors, ("columns", depth), cus)
    return tensors, [unroll, *gradient_kernels]


def _winograd_fused(layer: ConvolutionPass, cus: int) -> Made:
    """F(2x2, 3x3) in one kernel: 16 multiplications for the 36 of four pixels; ragged tiles are computed whole."""
    tensors, pass_kernels = _pass(layer, cus)
    (kernel,) = pass_kernels
    assert isinstance(kernel, ImplicitGemm)  # `winograd` has no filter pass
    n, filters, high, wide = tensors[kernel.y]
    channels = tensors[kernel.x][1]
    tiles = math.ceil(high / 2) * math.ceil(wide / 2)
    tile = _chosen(lambda a, b: math.ceil(filters / a) * math.ceil(4 * n * tiles / b), cus, _FUSED_TILES)
    work = _FUSED * (1 + _PROLOGUE / (9 * channels))
    multiplies = 16.0 * tiles / (high * wide)  # 16 for a tile of four pixels, whole tiles also at ragged ends
    # a tile of pixels covers pairs of rows
    changed = {"tile": tile, "held": 2, "work": work, "multiplies": multiplies, "rows": 2}
    return tensors, [kernel.model_copy(update=changed)]


class _Points(Frozen):
    """A transform: points, tiles of an image, pixels from tile to tile, and of a tile; FLOP of one; tiles together."""

    points: int
    tiles: tuple[int, int]
    tile: tuple[int, int]
    reach: tuple[int, int]
    flop: float
    together: int
    complex: bool


def _planes(layer: ConvolutionPass, by: _Points, cus: int) -> Made:
    """Two operands transformed, products of planes of points, and the third transformed back."""
    t = layer.n * by.tiles[0] * by.tiles[1]  # tiles of all images
    c, k, pair = layer.c, layer.k, (2,) if by.complex else ()
    planes: Tensors = {"px": (c, t), "pw": (c, k), "py": (k, t)}
    tensors = {**_images(layer), **{name: (by.points, *two, *pair) for name, two in planes.items()}}
    a, b, into, sizes, transposed = _PRODUCTS[layer.direction]
    m, n, depth = ({"c": c, "k": k, "t": t}[size] for size in sizes)
    wide = 2 if by.complex else 1
    menu = _COMPLEX_TILES if by.complex else _TILES
    tile = _chosen(lambda high, low: by.points * math.ceil(m / high) * math.ceil(n / low), cus, menu, wide)
    full = math.ceil(m / tile[0]) * tile[0] * math.ceil(n / tile[1]) * tile[1]
    loop = _loop(tile, depth, wide)
    loop["work"] *= full / _clipped_elements(m, n, tile)  # a tile that is cut short computes as long as a whole one
    product = MatrixProduct(
        kind="gemm", a=a, b=b, c=into, m=m, n=n, k=depth, batch=by.points, complex=by.complex, runs=8,
        **transposed, **loop,
    )  # fmt: skip
    return tensors, [_transform(by, a), _transform(by, b), product, _transform(by, into, backward=True)]


def _clipped_elements(m: int, n: int, tile: tuple[int, int]) -> int:
    """Elements that the trace of a product computes, whose tiles are no larger than the product."""
    high, wide = min(tile[0], m), min(tile[1], n)
    return math.ceil(m / high) * high * math.ceil(n / wide) * wide


_PRODUCTS: Mapping[str, tuple[str, str, str, tuple[str, str, str], Mapping[str, bool]]] = {
    "forward": ("pw", "px", "py", ("k", "t", "c"), {"transposed_a": True}),
    "backward_data": ("pw", "py", "px", ("c", "t", "k"), {}),
    "backward_filter": ("px", "py", "pw", ("c", "k", "t"), {"transposed_b": True}),
}
"""a, b, c; m, n, k; and which operand is stored transposed: planes of x [c, t], of w [c, k], of y [k, t]."""


def _transform(by: _Points, planes: str, *, backward: bool = False) -> Transform:
    image = planes[1]
    names = ((planes,), (image,)) if backward else ((image,), (planes,))
    fields: dict[str, Any] = {"tiles": by.tiles, "tile": by.tile, "reach": by.reach}
    if image == "w":  # a filter is one tile
        fields = {"tiles": (1, 1), "tile": (1, 1), "reach": (1, 1)}
    return Transform(
        kind="transform", reads=names[0], writes=names[1], together=by.together, flop=by.flop, complex=by.complex,
        backward=backward, **fields,
    )  # fmt: skip


def _winograd_nonfused(layer: ConvolutionPass, cus: int) -> Made:
    tiles = math.ceil(layer.oh / 4), math.ceil(layer.ow / 4)
    # additions of the transforms, about four for each of 36 points
    by = _Points(points=36, tiles=tiles, tile=(4, 4), reach=(6, 6), flop=4.0 * 36, together=64, complex=False)
    return _planes(layer, by, cus)


def _fft(layer: ConvolutionPass, cus: int) -> Made:
    """The whole image in one tile (`fft`), or tiles of 32 x 32."""
    height, width = layer.h + 2 * layer.pad_h, layer.w + 2 * layer.pad_w
    side, tiles, tile = 32, (1, 1), (height, width)  # the whole image, unless tiled
    if layer.algorithm == "fft":
        side = next(length for length in _FFT_SIDES if length >= max(height, width))
    else:
        tile = 33 - layer.r, 33 - layer.s  # outputs of a tile of 32 with filters of r x s: overlap-save
        tiles = math.ceil(layer.oh / tile[0]), math.ceil(layer.ow / tile[1])
    flop = _FFT_WORK * 2.5 * side**2 * math.log2(side**2)  # FLOP of a real transform of N points: 2.5 N log2 N
    reach = min(side, height), min(side, width)
    together = max(1, _LDS_POINTS // side**2)
    # half the plane: the transform of real numbers is symmetric
    by = _Points(
        points=side * (side // 2 + 1), tiles=tiles, tile=tile, reach=reach, flop=flop, together=together, complex=True
    )
    return _planes(layer, by, cus)


_WRITERS: Mapping[str, Callable[[ConvolutionPass, int], Made]] = {
    "gemm": _explicit,
    "implicit_gemm": _pass,
    "fft": _fft,
    "fft_tiling": _fft,
    "winograd": _winograd_fused,
    "winograd_nonfused": _winograd_nonfused,
}
