"""GEMMs by libraries of today, on matrix units: the fastest of a library's tiles, and K split where workgroups are few.

For C[m, n] = A[m, k] B[k, n], g of them, on c CUs, by a kernel of tile r x s that splits K in z; A, B, C are the bytes
that each moves (of all g), H the HBM bandwidth that is reached, f and u the seconds of a FLOP and of an operand element
on one CU:

    N     = ceil(m/r) ceil(n/s) g                  tiles of the output; q = ceil(N z / c) workgroups on the busiest CU
    t     = ((2 r s f)^3 + ((r + s) u)^3)^(1/3)    an element of K of one tile
    core  = q (ceil(k/z) + min(prologue, k)) t     a short K does not fill the pipeline
    reads = (A + B + [z > 1] z y 4 m n g) / H      the parts of a split K are sums of 32 bits
    T     = (core^3 + reads^3)^(1/3) + C / H + [z > 1] split

Cubes are a soft maximum: multiplication, operands from the caches and from the HBM overlap. A tile is written when it
is complete, which nothing hides. The library splits K in the z of least T among 2, 3, 4, 6, 8, 12 ... 32, in parts of
64 elements or more that fill the CUs at most twice (bounds: conf/data/operators.yaml). Power and clock sustain a share
of the peak rate F for long:

    seconds = launch + (T^8 + (2 m n k g v / (sustained F))^8)^(1/8)
    f = v / (e p),   u = 16 b / (feed p),   v = 1 + camping max(0, log2 d(b k) - 10)

e: `compute`, p: peak rate of one CU, b: element bytes, d(x): the largest power of two that divides x. Operands are read
along K in rows that are b k bytes apart; strides of many powers of two meet few channels.

Where a last-level cache holds what one kernel writes until the next one reads it (`cache_bytes`), as much of B and C as
it has room for moves `cache_speed` times as fast; A, the weights, does not, as a model's step reads all others first.
It does in loops of a benchmark whose sets of weights fit, with B and C, into `weights_cache_bytes` together.

Derived. launch, e, feed, prologue, H, y, split, sustained and camping are fitted for each device and precision; chosen
having seen rows of four GPUs: the powers, the bounds of z, and each library's tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.compiled import compile_lazily
from simulators.costs.chip import Chip, camped_doublings
from simulators.costs.gemm.tiles import KernelTime, TileShape
from simulators.costs.gemm.waves import GemmShape
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

SHARP = 8
"""Power of the soft maximum of a product's time and of that at the sustained rate."""
_SUM_BYTES = 4.0  # partial sums are 32 bits whatever the inputs
_ROUNDING = 1e-9  # of a wave: a full one is not two because 1 / c is no binary fraction


@dataclass(frozen=True)
class LibraryGemms:
    """GEMMs and the rates of their device; numbers or arrays that broadcast.

    flop_s, operand_s: f and u. byte_s: 1 / H. read_bytes: A + B, and what else is read. part_bytes: of a part of a
    split K. write_bytes: C.
    """

    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    batch: ArrayLike
    cus: ArrayLike
    flop_s: ArrayLike
    operand_s: ArrayLike
    byte_s: ArrayLike
    read_bytes: ArrayLike
    part_bytes: ArrayLike
    write_bytes: ArrayLike
    prologue: ArrayLike
    split_s: ArrayLike


def library_gemms(chip: Chip, shape: GemmShape) -> LibraryGemms:
    """GEMMs on a chip; those that accumulate move C twice more, beside the operands."""
    m, n, k, batch = shape.sizes
    element = np.asarray(chip.element_bytes, float) * batch
    outputs, share = element * m * n, _from_hbm(chip, element * n * (m + k))
    weights = element * m * k
    if chip.weights_cache_bytes is not None and np.any(np.isfinite(shape.weight_sets)):
        stays = np.asarray(shape.weight_sets) * weights + element * n * (m + k) <= np.asarray(chip.weights_cache_bytes)
        weights = weights / np.where(stays, chip.cache_speed, 1.0)
    return LibraryGemms(
        m=m,
        n=n,
        k=k,
        batch=batch,
        cus=chip.cus,
        flop_s=_camped(chip, k) / (np.asarray(chip.compute) * chip.rate),
        operand_s=16 * np.asarray(chip.element_bytes) / (np.asarray(chip.feed) * chip.rate),
        byte_s=1 / chip.bandwidth,
        read_bytes=weights + element * share * n * k + (2 * outputs if shape.accumulate else 0.0),
        part_bytes=np.asarray(chip.split_traffic) * _SUM_BYTES * m * n * batch,
        write_bytes=share * outputs,
        prologue=chip.prologue,
        split_s=chip.split_s,
    )


def _from_hbm(chip: Chip, activations: Floats) -> Floats | float:
    """Time of activations [bytes] over that from the HBM: what the cache holds comes from it."""
    if chip.cache_bytes is None:
        return 1.0
    inside = np.minimum(activations, np.asarray(chip.cache_bytes)) / activations
    return np.asarray(1 - inside * (1 - 1 / np.asarray(chip.cache_speed)))


def pick_kernels(gemms: LibraryGemms, tiles: tuple[tuple[int, int], ...]) -> tuple[Floats, TileShape]:
    """Time T [s] of the fastest kernel for each GEMM, and that kernel; the first of several that are as fast."""
    # in the order of the fields, by which `_pick` names them
    columns = [np.asarray(column) for column in vars(gemms).values()]
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    table = np.empty((len(columns), int(np.prod(shape, dtype=int))))
    for row, column in zip(table, columns, strict=True):
        row.reshape(shape)[...] = column
    picks = np.empty((4, table.shape[1]))
    # few sides in many tiles: each is divided by once
    sides, places = np.unique(np.array(tiles, float), return_inverse=True)
    bounds = shared_constants().library
    limits = float(bounds.least_depth), float(bounds.most_splits), float(bounds.most_waves)
    _pick(table, (sides, places.reshape(-1, 2)), limits, picks)
    seconds, rows, cols, splits = (row.reshape(shape) for row in picks)
    return seconds, TileShape(rows, cols, splits)


def kernel_seconds(gemms: LibraryGemms, kernels: TileShape, *, waves: ArrayLike | None = None) -> KernelTime:
    """Time of given kernels for given GEMMs, by the equations above in plain NumPy. waves: q, where it is known."""
    p: Any = LibraryGemms(**{name: np.asarray(value, float) for name, value in vars(gemms).items()})
    rows, cols, splits = kernels.rows, kernels.cols, kernels.splits
    tiles = np.ceil(p.m / rows) * np.ceil(p.n / cols) * p.batch / p.cus
    turns = np.ceil(tiles * splits - _ROUNDING) if waves is None else waves  # whole workgroups on the busiest CU
    element_s = np.cbrt((2 * rows * cols * p.flop_s) ** 3 + ((rows + cols) * p.operand_s) ** 3)
    depth = np.ceil(p.k / splits)
    # a K shorter than the prologue does not fill the pipeline
    core = turns * (depth + np.minimum(p.prologue, p.k)) * element_s
    read = p.read_bytes + np.where(splits > 1, splits * p.part_bytes, 0.0)
    seconds = np.cbrt(core**3 + (read * p.byte_s) ** 3) + p.write_bytes * p.byte_s
    return KernelTime(seconds + np.where(splits > 1, p.split_s, 0.0), core, read + p.write_bytes)


def sustained(chip: Chip, size: tuple[Floats, ...], seconds: Floats) -> Floats:
    """Time [s] of GEMMs `size` = (m, n, k, batch) that take `seconds` on tiles, at what power and clock sustain."""
    m, n, k, batch = size
    rate = np.asarray(chip.sustained) * chip.rate * np.asarray(chip.cus)
    # strides that meet few channels slow the sustained rate, too
    least = _camped(chip, k) * 2 * m * n * k * batch / rate
    return np.asarray((seconds**SHARP + least**SHARP) ** (1 / SHARP))


def _camped(chip: Chip, k: Floats) -> Floats:
    """Slowdown v of the multiplication."""
    return np.asarray(1 + np.asarray(chip.camping) * camped_doublings(chip, k))


@compile_lazily
def _pick(table: Any, menu: Any, limits: Any, picks: Any) -> None:
    """`pick_kernels` over the fields of `LibraryGemms` as rows [13, B]. picks: T, r, s and z [4, B].

    menu: lengths of sides, and places [T, 2] among them of each tile's. limits: of a split K, as in `SharedLibrary`.
    """
    sides, tiles = menu
    least_depth, most_splits, most_waves = limits
    times, rows_of, cols_of, splits_of = picks
    up_m, up_n = np.empty((2, sides.shape[0]))
    for i in range(table.shape[1]):
        m, n, k, batch, cus, flop_s, operand_s, byte_s = table[:8, i]
        read_bytes, part_bytes, write_bytes, prologue, split_s = table[8:, i]
        read_s, part_s = read_bytes * byte_s, part_bytes * byte_s
        fill = min(prologue, k)  # a K shorter than the prologue does not fill the pipeline
        # parts of 64 elements at least, and no more than the bound
        read_cube, deepest = read_s * read_s * read_s, min(k / least_depth, most_splits)
        for side in range(sides.shape[0]):
            up_m[side] = np.ceil(m / sides[side]) * batch / cus
            up_n[side] = np.ceil(n / sides[side])
        whole, parted, tile, split_tile, split = np.inf, np.inf, 0, 0, 1.0
        for t in range(tiles.shape[0]):
            rows, cols, waves = sides[tiles[t, 0]], sides[tiles[t, 1]], up_m[tiles[t, 0]] * up_n[tiles[t, 1]]
            flop, feed = 2.0 * rows * cols * flop_s, (rows + cols) * operand_s
            cube = flop * flop * flop + feed * feed * feed  # without roots: cubes compare as well
            steps = np.ceil(waves - _ROUNDING) * (k + fill)
            total = steps * steps * steps * cube + read_cube
            if total < whole:
                whole, tile = total, t
            if waves > 0.5 * most_waves or deepest < 2.0:  # two parts would fill the CUs more often than the bound
                continue
            z, most = 2.0, min(most_waves / waves + _ROUNDING, deepest)
            while z <= most:
                steps = np.ceil(waves * z - _ROUNDING) * (np.ceil(k / z) + fill)
                moved = read_s + z * part_s
                total = steps * steps * steps * cube + moved * moved * moved
                if total < parted:
                    parted, split_tile, split = total, t, z
                # 2, 3, 4, 6, 8, 12: half as much again, then a third
                z = z * 1.5 if np.log2(z) % 1.0 == 0.0 else z / 0.75
        seconds, parted = whole ** (1.0 / 3.0), parted ** (1.0 / 3.0) + split_s  # once for the best
        if parted < seconds:
            seconds, tile = parted, split_tile
        else:
            split = 1.0
        times[i] = seconds + write_bytes * byte_s  # the output is written after the last step, which nothing hides
        rows_of[i], cols_of[i], splits_of[i] = sides[tiles[tile, 0]], sides[tiles[tile, 1]], split
