"""Requests of one GPU at the sampled channels of its HBM: reads of a GEMM by step, stores by CU, chunks by line.

A line of an operand is read with the step of k of its first byte. Workgroups of a CU store their tiles row by row, all
at once. Lines of an output belong to the chunk, the tile and the wavefront of their first byte; a wavefront has a band
of rows of its tile. The cache has slices at each channel, told apart by the lowest bits of the bank; in a slice the
bits of a line's number above its set turn the set by a hash, as they turn channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dse_near_memory.address_map import LINE_BYTES, AddressMap
from dse_near_memory.controller import Controller
from dse_near_memory.state import MOST_SECTORS
from dse_near_memory.tiles import Tiling

Ints = NDArray[np.int64]
_ALIGN = 2**21
"""Tensors begin at pages of 2 MiB."""


@dataclass(frozen=True)
class Reads:
    """Lines of a GEMM's operands at the sampled channels, panel by panel and step by step.

    first [panels * steps + 1]: into channel, place, and where and entry of the cache. panels of the major side come
    first. every_line: of all channels over those that are sampled.
    """

    first: Ints
    channel: Ints
    place: Ints
    where: Ints
    entry: Ints
    every_line: float


@dataclass(frozen=True)
class Output:
    """Lines of an output at the sampled channels, by address.

    line, channel, place, where and entry of the cache, chunk, region [L]. chunk_first [N + 1],
    stores_first [units + 1]: into the lines, and into `stores`, lines in the order in which a unit stores them.
    region_set: entry of the tracker of a region's workgroup. chunk_regions: regions of each chunk.
    """

    line: Ints
    channel: Ints
    place: Ints
    where: Ints
    entry: Ints
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
    # an exclusive or with a fixed number permutes the channels, so addresses stay unique
    return np.asarray(channel ^ _folded(high, controller.folds()))


def _folded(number: Ints, table: Ints) -> Ints:
    """Exclusive or of the entries [768] of a table for the three low bytes of numbers."""
    # a table for each of three bytes: 24 bits of address above the channel
    return np.asarray(table[number & 255] ^ table[256 + (number >> 8 & 255)] ^ table[512 + (number >> 16 & 255)])


def lines_of_sample(first: int, count: int, controller: Controller) -> tuple[Ints, Ints]:
    """Lines of `count` from `first` that lie at sampled channels, from 0, and the place of their channel among them."""
    chunk_lines = controller.mapping.interleave_bytes // LINE_BYTES
    # channels are found for whole chunks of the interleaving, not line by line
    chunks = np.arange(first // chunk_lines, (first + count - 1) // chunk_lines + 1)
    place = controller.sampled[channels_of(chunks, controller)]
    is_sampled = place >= 0
    lines = (chunks[is_sampled, None] * chunk_lines + np.arange(chunk_lines)).reshape(-1) - first
    # the first and the last chunk may reach beyond the tensor
    inside = (lines >= 0) & (lines < count)
    return lines[inside], np.repeat(place[is_sampled], chunk_lines)[inside]


def local_of(lines: Ints, controller: Controller) -> Ints:
    """Find the number of lines in their channel."""
    chunk_lines = controller.mapping.interleave_bytes // LINE_BYTES
    return np.asarray(lines // chunk_lines // controller.dram.channels * chunk_lines + lines % chunk_lines)


def place_of(lines: Ints, controller: Controller) -> Ints:
    """Find the place (row * banks + bank) of lines in their channel."""
    return place_in_channel(local_of(lines, controller), controller)


def place_in_channel(local: Ints, controller: Controller) -> Ints:
    """Find the place of a channel's lines: bits of the address count banks, those above a row's columns count rows."""
    bank, offset = _take_out(local, controller.bank_bits)
    row = offset * LINE_BYTES // controller.dram.row_bytes
    # permutation-based interleaving: the row turns the bank, so that strides spread over banks
    if controller.mapping.bank_xor:
        bank = bank ^ row % (controller.dram.banks // controller.bank_groups) * controller.bank_groups
    return np.asarray(row * controller.dram.banks + bank)


def place_in_cache(lines: Ints, channel: Ints, controller: Controller, sets: int) -> tuple[Ints, Ints]:
    """Find the set of lines at sampled channels among those of all slices, and their entry in it.

    sets: of a slice. An entry is a cache line's number in its slice times `MOST_SECTORS`, and the sector.
    """
    bits = controller.bank_bits[: controller.slices.bit_length() - 1]
    piece, in_slice = _take_out(local_of(lines, controller), bits)
    number, sector = np.divmod(in_slice, controller.cache_sectors)
    high, low = np.divmod(number, sets)
    turn = _folded(high, controller.set_folds(sets))
    turned = (low + turn if sets & sets - 1 else low ^ turn) % sets  # both permute the sets
    return np.asarray((channel * controller.slices + piece) * sets + turned), number * MOST_SECTORS + sector


def _take_out(local: Ints, bits: Sequence[int]) -> tuple[Ints, Ints]:
    """Number that rising bits of a channel's byte addresses form, and the lines' numbers without those bits."""
    number, left = np.zeros_like(local), local
    for place, bit in enumerate(bits):
        # bits are counted in lines, and those taken out before have moved the others down
        low = bit - place - LINE_BYTES.bit_length() + 1  # bits below it are gone
        number = number | (left >> low & 1) << place
        left = left >> low + 1 << low | left & (1 << low) - 1
    return number, left


def gemm_reads(tiling: Tiling, controller: Controller, sets: int) -> Reads:
    """Lines of both operands, which follow one another, each at a page. sets: of a slice of the cache."""
    row, parts, every, base = tiling.element_bytes * tiling.k, [], 0, 0
    # operands lie one after the other, each from a page on
    for side, (size, tile) in enumerate(((tiling.major, tiling.rows), (tiling.minor, tiling.cols))):
        count = -(-size * row // LINE_BYTES)
        lines, channel = lines_of_sample(base // LINE_BYTES, count, controller)
        # numbers of panels: the major side first, then the minor side
        panel = lines * LINE_BYTES // row // tile + side * tiling.grid[0]
        # the last step has what is left of k
        step = np.minimum(lines * LINE_BYTES % row // (tiling.depth * tiling.element_bytes), tiling.steps - 1)
        parts.append((panel * tiling.steps + step, lines + base // LINE_BYTES, channel))
        every, base = every + count, base + -(-size * row // _ALIGN) * _ALIGN
    block, line, channel = (np.concatenate(part) for part in zip(*parts, strict=True))
    # sorted by block, so that a block is a slice; stable, so that lines keep their addresses' order
    order = np.argsort(block, kind="stable")
    first = np.searchsorted(block[order], np.arange(sum(tiling.grid) * tiling.steps + 1))
    line, channel = line[order], channel[order]
    where, entry = place_in_cache(line, channel, controller, sets)
    # sampled channels stand for all: traffic is scaled by this ratio
    return Reads(first, channel, place_of(line, controller), where, entry, every / max(1, len(line)))


@dataclass(frozen=True)
class Shares:
    """Panels that units of tiles need, and times of their steps (see `Work`)."""

    need_first: Ints
    need_panel: Ints
    step_ns: NDArray[np.float64]


def share_out(tiling: Tiling) -> Shares:
    """Deal out panels with the tiles of CUs. A CU works at all its tiles of a wave at once, and they share its rate."""
    down, along = tiling.grid
    tile, units = np.arange(down * along), tiling.units
    at = tiling.unit_of(tile)
    # unique: tiles of a unit that share a panel read it once
    needs = np.unique(np.stack([np.tile(at, 2), np.concatenate([tile // along, down + tile % along])]), axis=1)
    tiles = np.bincount(at, minlength=units)
    first, panels = np.searchsorted(needs[0], np.arange(units + 1)), np.ascontiguousarray(needs[1])
    # a CU with several tiles takes as many times as long for a step
    return Shares(first, panels, tiles * np.float64(tiling.tile_s / tiling.steps * 1e9))


def output_lines(tiling: Tiling, addresses: AddressMap, controller: Controller, entries: int, sets: int) -> Output:
    """Lines of the output at sampled channels, and the order in which CUs store them.

    entries: of the tracker. sets: of a slice of the cache.
    """
    row = tiling.element_bytes * tiling.k
    # the output comes after both operands, each padded to pages
    operands = sum(-(-side * row // _ALIGN) * _ALIGN for side in (tiling.major, tiling.minor))
    begin = operands // LINE_BYTES
    lines, channel = lines_of_sample(begin, addresses.lines, controller)
    place = place_of(lines + begin, controller)
    where, entry = place_in_cache(lines + begin, channel, controller, sets)
    # the last line may be partly filled
    element = np.minimum(lines * LINE_BYTES // tiling.element_bytes, tiling.major * tiling.minor - 1)
    major, minor = element // tiling.minor, element % tiling.minor
    tile = major // tiling.rows * tiling.grid[1] + minor // tiling.cols
    chunk = np.searchsorted(addresses.edges, lines, side="right") - 1
    unit = tiling.unit_of(tile)
    # row by row of all tiles of a unit: wavefronts of a CU store at the same time
    order = np.lexsort((minor, tile, major % tiling.rows, unit))
    stores_first = np.searchsorted(unit[order], np.arange(tiling.units + 1))
    # wavefronts of a workgroup have bands of rows of equal height
    band = major % tiling.rows * controller.wavefronts // tiling.rows
    keys = (tile * controller.wavefronts + band) * len(addresses.ranges) + chunk
    # a region is what one wavefront makes of one chunk
    regions, region = np.unique(keys, return_inverse=True)
    region_chunk = regions % len(addresses.ranges)
    region_tile = regions // len(addresses.ranges) // controller.wavefronts
    chunk_first = np.searchsorted(chunk, np.arange(len(addresses.ranges) + 1))
    counts = np.bincount(region_chunk, minlength=len(addresses.ranges))
    parts = (chunk, region.reshape(-1), chunk_first, stores_first, order, region_tile % entries, counts)
    return Output(lines, channel, place, where, entry, *(np.ascontiguousarray(part, np.int64) for part in parts))
