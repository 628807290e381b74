"""Requests of one GPU at the sampled channels of its HBM: reads of a GEMM by step, stores by wave, chunks by line.

A line of an operand is read with the step of k of its first byte; of a panel that the cache holds in part, a hash of
the line and the wave says which lines miss. Workgroups of a wave store their tiles row by row, all at once. Lines of an
output belong to the chunk, the tile and the wavefront of their first byte; a wavefront has a band of rows of its tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse_near_memory.address_map import LINE_BYTES, AddressMap
from dse_near_memory.controller import Controller
from dse_near_memory.tiles import Tiling, Uses
from simulators.compiled import compile_lazily

Ints = NDArray[np.int64]
_ALIGN = 2**21
"""Tensors begin at pages of 2 MiB."""


@dataclass(frozen=True)
class Reads:
    """Reads of a GEMM at the sampled channels. first [uses * steps + 1]: into channel, place. total: of all."""

    first: Ints
    channel: Ints
    place: Ints
    total: int


@dataclass(frozen=True)
class Output:
    """Lines of an output at the sampled channels, by address.

    line, channel, place, chunk, region [L]. chunk_first [N + 1], stores_first [waves * CUs + 1]: into the lines, and
    into `stores`, lines in the order in which a CU stores them. region_set: entry of the tracker of a region's
    workgroup. chunk_regions: regions of each chunk.
    """

    line: Ints
    channel: Ints
    place: Ints
    chunk: Ints
    region: Ints
    chunk_first: Ints
    stores_first: Ints
    stores: Ints
    region_set: Ints
    chunk_regions: Ints


def channels_of(chunks: Ints, controller: Controller) -> Ints:
    """Find the channel of each chunk of `interleave_bytes`."""
    high, channel = chunks // controller.dram.channels, chunks % controller.dram.channels
    folds = controller.folds()
    return np.asarray(channel ^ folds[high & 255] ^ folds[256 + (high >> 8 & 255)] ^ folds[512 + (high >> 16 & 255)])


def lines_of_sample(first: int, count: int, controller: Controller) -> tuple[Ints, Ints]:
    """Lines of `count` from `first` that lie at sampled channels, from 0, and the place of their channel among them."""
    chunk_lines = controller.mapping.interleave_bytes // LINE_BYTES
    chunks = np.arange(first // chunk_lines, (first + count - 1) // chunk_lines + 1)
    place = controller.sampled[channels_of(chunks, controller)]
    kept = place >= 0
    lines = (chunks[kept, None] * chunk_lines + np.arange(chunk_lines)).reshape(-1) - first
    inside = (lines >= 0) & (lines < count)
    return lines[inside], np.repeat(place[kept], chunk_lines)[inside]


def place_of(lines: Ints, controller: Controller) -> Ints:
    """Find the place (row * banks + bank) of lines in their channel."""
    chunk_lines = controller.mapping.interleave_bytes // LINE_BYTES
    local = lines // chunk_lines // controller.dram.channels * chunk_lines + lines % chunk_lines
    return place_in_channel(local, controller)


def place_in_channel(local: Ints, controller: Controller) -> Ints:
    """Find the place of a channel's lines: bits of the address count banks, those above a row's columns count rows."""
    bank, rest = np.zeros_like(local), local
    for place, bit in enumerate(controller.bank_bits):
        low = bit - place - LINE_BYTES.bit_length() + 1  # bits of banks below it are gone
        bank = bank | (rest >> low & 1) << place
        rest = rest >> low + 1 << low | rest & (1 << low) - 1
    row = rest * LINE_BYTES // controller.dram.row_bytes
    if controller.mapping.bank_xor:
        bank = bank ^ row % (controller.dram.banks // controller.bank_groups) * controller.bank_groups
    return np.asarray(row * controller.dram.banks + bank)


@compile_lazily
def _gather(uses: Ints, limits: Ints, sampled: Ints, folds: Ints, out: Ints) -> tuple[int, int]:
    """Write block, line and channel of the lines that miss at sampled channels; count these, and all that miss.

    uses [U, 6]: wave, first and last byte of a panel, share that misses in 1/2^32, first byte and bytes of a row of the
    operand. limits: bytes of a step, steps, lines of a chunk, channels.
    """
    count, total, line_bytes = 0, 0, 64
    for use in range(len(uses)):
        wave, first, last, miss, base, row = uses[use]
        for line in range((first + line_bytes - 1) // line_bytes, (last + line_bytes - 1) // line_bytes):
            mixed = (line * 0x9E3779B1 + wave * 0x85EBCA77) & 0xFFFFFFFF
            mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
            mixed = mixed ^ (mixed >> 13)
            if mixed >= miss:
                continue
            total += 1
            chunk = line // limits[2]
            high = chunk // limits[3]
            turn = folds[high & 255] ^ folds[256 + (high >> 8 & 255)] ^ folds[512 + (high >> 16 & 255)]
            channel = sampled[chunk % limits[3] ^ turn]
            if channel < 0:
                continue
            step = min((line * line_bytes - base) % row // limits[0], limits[1] - 1)
            out[0, count], out[1, count], out[2, count] = use * limits[1] + step, line, channel
            count += 1
    return count, total


def gemm_reads(uses: Uses, controller: Controller) -> Reads:
    """Reads of a GEMM, use by use and step by step."""
    tiling, sampled = uses.tiling, controller.sampled
    limits = np.array(
        [
            tiling.depth * tiling.element_bytes,
            tiling.steps,
            controller.mapping.interleave_bytes // LINE_BYTES,
            controller.dram.channels,
        ]
    )
    table = _panels(uses)
    expected = float(((table[:, 2] - table[:, 1]) * (table[:, 3] / 2**32)).sum()) / LINE_BYTES
    share = controller.sampled_channels / controller.dram.channels
    room = int(expected * min(1.0, 1.5 * share)) + 64 * len(table) + 1024
    out = np.empty((3, room), np.int64)
    count, total = _gather(table, limits, sampled, controller.folds(), out)
    block, line, channel = out[:, :count]
    order = np.argsort(block, kind="stable")
    first = np.searchsorted(block[order], np.arange(len(table) * tiling.steps + 1))
    return Reads(first, channel[order], place_of(line[order], controller), total)


@dataclass(frozen=True)
class Shares:
    """Needs of CUs in a GEMM: uses of panels by CU and wave, CUs by use, and times of their steps (see `Work`)."""

    use_wave: Ints
    user_first: Ints
    user_cu: Ints
    need_first: Ints
    need_use: Ints
    step_ns: NDArray[np.float64]


def share_out(uses: Uses) -> Shares:
    """Deal out panels with the tiles of CUs. A CU works at all its tiles of a wave at once, and they share its rate."""
    tiling = uses.tiling
    tile = np.arange(tiling.grid[0] * tiling.grid[1])
    at, wave = tiling.cu_of(tile), tile // tiling.wave
    most = max(tiling.grid)
    wanted = np.concatenate([2 * wave * most + tile // tiling.grid[1], (2 * wave + 1) * most + tile % tiling.grid[1]])
    keys = (2 * uses.wave + uses.side) * most + uses.panel
    order = np.argsort(keys)
    use = order[np.searchsorted(keys[order], wanted)]
    need_at, need_use = np.unique(np.stack([np.tile(at, 2), use]), axis=1)
    by_use = np.argsort(need_use, kind="stable")
    need_first = np.searchsorted(need_at, np.arange(tiling.waves * tiling.concurrent + 1))
    user_first = np.searchsorted(need_use[by_use], np.arange(len(keys) + 1))
    tiles = np.bincount(at, minlength=tiling.waves * tiling.concurrent)
    columns = (uses.wave, user_first, need_at[by_use] % tiling.concurrent, need_first, need_use)
    wave, users_first, users, needs_first, needs = (np.ascontiguousarray(column, np.int64) for column in columns)
    return Shares(wave, users_first, users, needs_first, needs, tiles * np.float64(tiling.tile_s / tiling.steps * 1e9))


def _panels(uses: Uses) -> Ints:
    """Tabulate addresses of panels that are used: rows of `_gather`. Operands follow one another, each at a page."""
    tiling = uses.tiling
    row = tiling.element_bytes * tiling.k
    bases = (0, -(-tiling.major * row // _ALIGN) * _ALIGN)
    base, tile = np.where(uses.side == 0, [[bases[0]], [tiling.rows]], [[bases[1]], [tiling.cols]])
    starts = base + uses.panel * tile * row
    pairs = zip(uses.side.tolist(), uses.panel.tolist(), strict=True)
    sizes = np.array([tiling.panel_bytes(side, panel) for side, panel in pairs], np.int64)
    miss = np.round(uses.miss * 2**32).astype(np.int64)
    columns = (uses.wave, starts, starts + sizes, miss, base, np.full_like(starts, row))
    return np.stack(columns, axis=1).astype(np.int64)


def output_lines(tiling: Tiling, addresses: AddressMap, controller: Controller, sets: int) -> Output:
    """Lines of the output at sampled channels, and the order in which waves store them. sets: of the tracker."""
    row = tiling.element_bytes * tiling.k
    operands = sum(-(-side * row // _ALIGN) * _ALIGN for side in (tiling.major, tiling.minor))
    begin = operands // LINE_BYTES
    lines, channel = lines_of_sample(begin, addresses.lines, controller)
    place = place_of(lines + begin, controller)
    element = np.minimum(lines * LINE_BYTES // tiling.element_bytes, tiling.major * tiling.minor - 1)
    major, minor = element // tiling.minor, element % tiling.minor
    tile = major // tiling.rows * tiling.grid[1] + minor // tiling.cols
    chunk = np.searchsorted(addresses.edges, lines, side="right") - 1
    place_of_cu = tiling.cu_of(tile)
    order = np.lexsort((minor, tile, major % tiling.rows, place_of_cu))
    stores_first = np.searchsorted(place_of_cu[order], np.arange(tiling.waves * tiling.concurrent + 1))
    band = major % tiling.rows * controller.wavefronts // tiling.rows
    keys = (tile * controller.wavefronts + band) * len(addresses.ranges) + chunk
    regions, region = np.unique(keys, return_inverse=True)
    region_chunk = regions % len(addresses.ranges)
    region_tile = regions // len(addresses.ranges) // controller.wavefronts
    chunk_first = np.searchsorted(chunk, np.arange(len(addresses.ranges) + 1))
    counts = np.bincount(region_chunk, minlength=len(addresses.ranges))
    parts = (chunk, region.reshape(-1), chunk_first, stores_first, order, region_tile % sets, counts)
    return Output(lines, channel, place, *(np.ascontiguousarray(part, np.int64) for part in parts))
