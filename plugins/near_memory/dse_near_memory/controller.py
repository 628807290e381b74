"""The memory system below T3's tracker: channels, banks and their times, address mapping, and the controller's queues.

Times are those of `gpu.dram` of the memory backend, of one machine; what T3 adds (updates, tracker) is the system's
(`gpu.pim`, `gpu.tracker`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.space.blocks import Rule
from dse.values.units import Bytes, Integer, Seconds
from dse_near_memory.address_map import LINE_BYTES
from dse_near_memory.state import MOST_SECTORS
from simulators.hardware.memory_system import Folds, whole_power
from simulators.hardware.parts import AddressMapping, Dram, Hash, SourcedValue

Ints = NDArray[np.int64]
_MOST_FOLDED = 128  # sets for which there is a polynomial


class Controller(SourcedValue):
    """Channels of the HBM and what schedules their requests.

    bank_groups: of a channel's banks, by their lowest bits; columns of `column_bytes` of a group are `tccdl_s` apart.
    bank_bits: of the address of a byte in its channel, lowest first; the bits between them count the bytes of a row.
    slices: of the last-level cache at a channel, told apart by the lowest bank bits. cache_line_bytes: of a line of it,
    whose sectors are requests of 64 bytes. cache_hash: of the address above a line's set, which turns the set
    (`simulators.hardware.memory_system`; an exclusive or beyond 128 sets). store_buffer: stores
    of the GEMM that its reads may overtake at a channel. window_bytes: that a DMA command has in flight. wavefronts: of
    a workgroup, each with a region of the tracker: the ways of its sets. sampled_channels: of all channels, which are
    alike where addresses are hashed; they are simulated, with their slices of the cache, and stand for the others.
    cache_hit_s: from a CU's request to what the cache holds. threshold: of waiting requests in T3's arbitration, as the
    schedule gives it or chosen from `thresholds` by the GEMM's first stage (`dse_near_memory.arbiter`). As the fluid
    model has it: lockstep, whether CUs wait for one another before they take their next tiles; sums_last, whether a
    kernel sums the last chunk of a reduce-scatter once all of it is there.
    """

    name: str
    description: str = ""
    dram: Dram
    mapping: AddressMapping
    bank_groups: Annotated[Integer, Field(ge=1, le=16)]
    column_bytes: Annotated[Integer, Field(ge=1, le=LINE_BYTES)]
    tccdl_s: Annotated[Seconds, Field(ge=0, le=1e-6)]
    lockstep: bool
    sums_last: bool
    bank_bits: tuple[Annotated[Integer, Field(ge=6, le=24)], ...]
    slices: Annotated[Integer, Field(ge=1, le=16)]
    cache_line_bytes: Annotated[Integer, Field(ge=LINE_BYTES, le=LINE_BYTES * MOST_SECTORS)]
    cache_hash: Hash
    store_buffer: Annotated[Integer, Field(ge=0, le=10**9)]
    cache_hit_s: Annotated[Seconds, Field(ge=0, le=1e-5)]
    threshold: Literal["given", "first_stage"]
    thresholds: tuple[Annotated[Integer, Field(ge=1, le=1024)], ...]
    window_bytes: Annotated[Bytes, Field(ge=4096)]
    wavefronts: Annotated[Integer, Field(ge=1, le=16)]
    sampled_channels: Annotated[Integer, Field(ge=1, le=128)]

    def rules(self) -> Iterator[Rule]:
        """Sizes that are powers of two, or fit into one another."""
        sizes = {
            "dram.channels": self.dram.channels,
            "dram.banks": self.dram.banks,
            "bank_groups": self.bank_groups,
            "dram.row_bytes": self.dram.row_bytes,
            "mapping.interleave_bytes": self.mapping.interleave_bytes,
            "column_bytes": self.column_bytes,
            "slices": self.slices,
            "cache_line_bytes": self.cache_line_bytes,
        }
        for path, size in sizes.items():
            # addresses are cut into bits, so that every size has to be a power of two
            yield Rule(f"controller.{path}", not whole_power(size), "is no power of two", size, way_out="take one")
        many, text = self.bank_groups > self.dram.banks, "are more than the banks of a channel ({0})"
        yield Rule("controller.bank_groups", many, text, self.bank_groups, (self.dram.banks,), "take fewer")
        most, text = self.dram.channels, "are more than there are ({0})"
        broken = self.sampled_channels > most
        yield Rule("controller.sampled_channels", broken, text, self.sampled_channels, (most,), "take fewer")
        bits, text = self.dram.banks.bit_length() - 1, "are no {0} rising bits"
        wrong = len(self.bank_bits) != bits or sorted(set(self.bank_bits)) != list(self.bank_bits)
        way = "name one for each doubling of the banks"
        # one bit of the address for each doubling of banks
        yield Rule("controller.bank_bits", wrong, text, self.bank_bits, (bits,), way)
        yield from self._cache_rules()

    def _cache_rules(self) -> Iterator[Rule]:
        """Slices that bank bits tell apart, and lines that lie in one slice."""
        many, text = self.slices > self.dram.banks, "are more than the banks of a channel ({0})"
        yield Rule("controller.slices", many, text, self.slices, (self.dram.banks,), "take fewer")
        # bytes in a row of one slice: up to the interleaving, or to the lowest bit that selects a slice
        least = min(
            [self.mapping.interleave_bytes, *(1 << bit for bit in self.bank_bits[: self.slices.bit_length() - 1])]
        )
        long, text = self.cache_line_bytes > least, "is more than one slice has in a row ({0})"
        yield Rule("controller.cache_line_bytes", long, text, self.cache_line_bytes, (least,), "take shorter lines")

    def set_folds(self, sets: int) -> Ints:
        """Turns of a cache's sets by the address above them, by its four low bytes: [1024]; zero without a hash."""
        # polynomials are known for up to 128 sets: larger caches take an exclusive or
        hashed = "xor" if sets > _MOST_FOLDED and self.cache_hash != "none" else self.cache_hash
        return Folds.of(hashed, sets).table

    @property
    def cache_sectors(self) -> int:
        """Sectors of a line of the cache: the requests that cover it."""
        return self.cache_line_bytes // LINE_BYTES

    @property
    def burst_s(self) -> float:
        """Time of a request on the bus of its channel [s]."""
        return float(LINE_BYTES * self.dram.channels / self.dram.bytes_per_s)

    @property
    def sampled(self) -> Ints:
        """Place of each channel among the sampled ones, -1 if it is not: evenly spaced, [channels]."""
        places = np.full(self.dram.channels, -1, np.int64)
        chosen = np.arange(self.sampled_channels) * self.dram.channels // self.sampled_channels
        places[chosen] = np.arange(self.sampled_channels)
        return places

    def folds(self) -> Ints:
        """Permutations of channels by the address above them, by its four low bytes: [1024]; zero without a hash."""
        return Folds.of(self.mapping.channel_hash, self.dram.channels).table
