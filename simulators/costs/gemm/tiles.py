"""Matrix products on tiles: the time of the fastest of a library's kernels, compiled, over arrays of them.

For C[m, n] += A[m, k] B[k, n], g of them, on c CUs, by a kernel of tile r x s that splits k in z; A, B, C are the bytes
that each moves at least (of all g), H the HBM bandwidth, f and u the seconds of a FLOP and of an operand element on one
CU:

    q      = ceil(ceil(m/r) ceil(n/s) z g / c)        workgroups on the busiest CU (wave quantisation, edge waste)
    K      = ceil(k/z) + prologue                     depth of one, with filling and draining its pipeline
    T_flop = q 2 r s K f
    T_feed = q K (r (1 + w) + s) u                    w: extra cost of reading A across its stride
    T_mem  = (A (1 + w/2) a + B b + C (1, or 2 z + 1 where split) + extra) / H
             a = max(1, n / 2 min(n, s sqrt(c))),   b = max(1, m / 2 min(m, r sqrt(c)))
    T      = sqrt(j^2 (T_flop^2 + T_feed^2 + T_mem^2) + (y K)^2) + [z > 1] split

j: products one after the other; y: latency of a chain of dependent loads for each element of K. The square sum is a
soft maximum: parts overlap, imperfectly where they are alike. A and B are read again by each super-tile of a wave, and
half of that misses the last-level cache; half of w is HBM's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.compiled import compile_lazily, inline_never
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

_ROUNDING = 1e-9  # of a wave: a full one is not two because 1 / c is no binary fraction
_MOST = 8  # sides, and splits, of a menu
_BLOCK = 256  # products whose intermediate values stay in the first-level cache


@dataclass(frozen=True)
class Menu:
    """Kernels of a library: tiles [T, 2] (r, s) as places in `sides`, each with every split [Z], ascending from 1."""

    sides: Floats
    tiles: NDArray[np.int64]
    splits: Floats

    @classmethod
    def of(cls, tiles: list[tuple[int, int]], splits: tuple[int, ...]) -> Menu:
        """Build from tiles (rows, cols) and splits of k."""
        sides, places = np.unique(np.array(tiles), return_inverse=True)
        assert max(len(sides), len(splits)) <= _MOST
        return cls(sides.astype(float), places.reshape(-1, 2), np.array(splits, float))


@dataclass(frozen=True)
class Products:
    """Products and the device's rates; numbers or arrays that broadcast.

    most_splits: beyond it k is too short. few: whether only the kernels for few columns serve.
    """

    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    a_bytes: ArrayLike
    b_bytes: ArrayLike
    c_bytes: ArrayLike
    cus: ArrayLike
    flop_s: ArrayLike
    operand_s: ArrayLike
    byte_s: ArrayLike
    batch: ArrayLike = 1.0
    across: ArrayLike = 0.0
    extra_bytes: ArrayLike = 0.0
    prologue: ArrayLike = 0.0
    repeats: ArrayLike = 1.0
    chain_s: ArrayLike = 0.0
    split_s: ArrayLike = 0.0
    most_splits: ArrayLike = np.inf
    few: ArrayLike = False


_FEW = [column.name for column in fields(Products)].index("few")
"""Row of `few` among the columns of products."""


@dataclass(frozen=True)
class TileShape:
    """Tile rows and columns, and parts of K, of the kernels of products; arrays that broadcast with the products."""

    rows: Floats
    cols: Floats
    splits: Floats


def fastest(products: Products, menu: Menu, for_few: Menu | None = None) -> tuple[Floats, TileShape]:
    """Time [s] of the fastest kernel of a menu for each product, without launch, and that kernel.

    for_few: menu for few columns. The first of several that are as fast counts, one that does not split k before one
    that does.
    """
    columns = [np.asarray(column) for column in vars(products).values()]
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    table = np.empty((len(columns), int(np.prod(shape, dtype=int))))
    for row, column in zip(table, columns, strict=True):
        row.reshape(shape)[...] = column  # broadcast into the row
    picks = np.empty((4, table.shape[1]))
    # `few` then makes no difference
    menus = tuple((kernels.sides, kernels.tiles, kernels.splits) for kernels in (menu, for_few or menu))
    shared = shared_constants().gemm
    _fastest(table, menus, (float(shared.reread), float(shared.across_hbm)), picks)
    seconds, rows, cols, splits = (row.reshape(shape) for row in picks)
    return seconds, TileShape(rows, cols, splits)


@dataclass(frozen=True)
class KernelTime:
    """Time T [s] of kernels, time of the waves alone [s] and HBM traffic [bytes]; arrays."""

    seconds: Floats
    compute_s: Floats
    hbm_bytes: Floats


def tile_seconds(products: Products, kernels: TileShape, *, waves: ArrayLike | None = None) -> KernelTime:
    """Time of given kernels for given products, by the equations above in plain NumPy. waves: q, where it is known."""
    p: Any = Products(**{name: np.asarray(value, float) for name, value in vars(products).items()})
    rows, cols, splits, shared = kernels.rows, kernels.cols, kernels.splits, shared_constants().gemm
    groups = np.ceil(p.m / rows) * np.ceil(p.n / cols) * p.batch * splits / p.cus
    turns, depth = np.ceil(groups - _ROUNDING) if waves is None else waves, np.ceil(p.k / splits) + p.prologue
    flop_s = 2 * rows * cols * p.flop_s
    feed_s = (rows * (1 + p.across) + cols) * p.operand_s
    compute = turns * depth * np.sqrt(flop_s * flop_s + feed_s * feed_s)
    # a wave covers about sqrt(c) tiles a side
    again_a = np.maximum(1.0, shared.reread * p.n / np.minimum(p.n, cols * np.sqrt(p.cus)))
    again_b = np.maximum(1.0, shared.reread * p.m / np.minimum(p.m, rows * np.sqrt(p.cus)))
    read = p.a_bytes * (1 + shared.across_hbm * p.across) * again_a + p.extra_bytes + p.b_bytes * again_b
    # each part is written and read, and the sum written
    traffic = read + p.c_bytes * np.where(splits > 1, 2 * splits + 1, 1)
    moved = traffic * p.byte_s
    total = p.repeats**2 * (compute * compute + moved * moved) + (p.chain_s * depth) ** 2
    seconds = np.where(
        splits > 1, np.where(splits <= p.most_splits, np.sqrt(total) + p.split_s, np.inf), np.sqrt(total)
    )
    return KernelTime(seconds, compute, traffic)


@inline_never
def _gather(table: Any, start: int, kind: int, part: Any, place: Any) -> int:
    """Copy a block's products of a kind, and their places; how many they are."""
    size = 0
    few = table[_FEW]
    for j in range(start, min(start + _BLOCK, table.shape[1])):  # the block
        place[size] = j
        size += (few[j] > 0) == (kind > 0)  # without a branch: written always, counted where the kind fits
    for row in range(table.shape[0]):
        for i in range(size):
            part[row, i] = table[row, place[i]]
    return size


@inline_never
def _write_picks(picks: Any, place: Any, times: Any, menu: Any) -> None:
    """Write the faster kernel of each product, without a split or with one: T, r, s and z."""
    unsplit, unsplit_tile, split, split_kernel, split_s = times
    sides, tiles, splits = menu
    seconds, rows, cols, parts = picks
    for i in range(place.shape[0]):
        whole, parted = np.sqrt(unsplit[i]), np.sqrt(split[i]) + split_s[i]  # once for the best kernel, not for each
        pick, part_of_k = int(unsplit_tile[i]), 0
        if parted < whole:  # ties go to the kernel without a split
            # kernels with splits are numbered tile after tile
            pick, part_of_k = divmod(int(split_kernel[i]), splits.shape[0])
        seconds[place[i]] = min(whole, parted)
        rows[place[i]], cols[place[i]] = sides[tiles[pick, 0]], sides[tiles[pick, 1]]
        parts[place[i]] = splits[part_of_k]


@compile_lazily
def _fastest(table: Any, menus: Any, shared: Any, picks: Any) -> None:  # noqa: C901, PLR0915 (compiled as one)
    """`fastest` over the fields of `Products` as rows [19, B]: block by block, kernels outside, products inside.

    picks: T, r, s and z [4, B].
    """
    reread, across_hbm = shared
    part, place = np.empty((table.shape[0], _BLOCK)), np.empty(_BLOCK, np.int64)
    depth, up_m, up_n, first, second = np.empty((5, _MOST, _BLOCK))
    groups, weight, read, written, again, chain, unsplit, split = np.empty((8, _BLOCK))
    unsplit_tile, split_kernel = np.empty((2, _BLOCK))  # places of kernels as floats, which fill the same lanes
    m, n, k, read_a, read_b, out, cus, flop_s, operand_s, byte_s = part[:10]
    batch, across, extra, prologue, repeats, chain_s, split_s, most = part[10:18]
    for start in range(0, table.shape[1], _BLOCK):
        for kind in range(2):  # kernels for few columns, or for all others
            size = _gather(table, start, kind, part, place)
            if size == 0:
                continue
            sides, tiles, splits = menus[kind]
            for i in range(size):
                unsplit[i], split[i] = np.inf, np.inf  # nothing found yet
                unsplit_tile[i], split_kernel[i] = 0.0, 0.0
                written[i], again[i], chain[i] = out[i] * byte_s[i], repeats[i] * repeats[i], chain_s[i] * chain_s[i]
            for z in range(splits.shape[0]):
                for i in range(size):
                    depth[z, i] = np.ceil(k[i] / splits[z]) + prologue[i]
            for side in range(sides.shape[0]):
                length = sides[side]
                for i in range(size):
                    span, share = length * np.sqrt(cus[i]), batch[i] / cus[i]
                    # batch over CUs, with the rows, so that the loop over tiles multiplies once
                    up_m[side, i], up_n[side, i] = np.ceil(m[i] / length) * share, np.ceil(n[i] / length)
                    again_a = max(1.0, reread * n[i] / min(n[i], span))
                    again_b = max(1.0, reread * m[i] / min(m[i], span))
                    first[side, i] = (read_a[i] * (1.0 + across_hbm * across[i]) * again_a + extra[i]) * byte_s[i]
                    second[side, i] = read_b[i] * again_b * byte_s[i]
            for tile in range(tiles.shape[0]):
                r, s, place_of_tile = tiles[tile, 0], tiles[tile, 1], float(tile)
                rows, cols = sides[r], sides[s]
                for i in range(size):
                    groups[i] = up_m[r, i] * up_n[s, i]  # per CU
                    flop = 2.0 * rows * cols * flop_s[i]
                    feed = (rows * (1.0 + across[i]) + cols) * operand_s[i]
                    weight[i], read[i] = flop * flop + feed * feed, first[s, i] + second[r, i]
                    steps = np.ceil(groups[i] - _ROUNDING) * depth[0, i]
                    moved = read[i] + written[i]
                    total = (
                        again[i] * (steps * steps * weight[i] + moved * moved) + chain[i] * depth[0, i] * depth[0, i]
                    )
                    # a select, which vectorises; ties keep the earlier tile
                    unsplit_tile[i] = place_of_tile if total < unsplit[i] else unsplit_tile[i]
                    unsplit[i] = total if total < unsplit[i] else unsplit[i]
                for z in range(1, splits.shape[0]):
                    parts, passes, kernel = splits[z], 2.0 * splits[z] + 1.0, float(tile * splits.shape[0] + z)
                    for i in range(size):
                        steps = np.ceil(groups[i] * parts - _ROUNDING) * depth[z, i]
                        moved = read[i] + written[i] * passes
                        waited = chain[i] * depth[z, i] * depth[z, i]
                        total = again[i] * (steps * steps * weight[i] + moved * moved) + waited
                        total = total if parts <= most[i] else np.inf  # a K that is too short for so many parts
                        split_kernel[i] = kernel if total < split[i] else split_kernel[i]
                        split[i] = total if total < split[i] else split[i]
            _write_picks(picks, place[:size], (unsplit, unsplit_tile, split, split_kernel, split_s), menus[kind])
