"""Accesses of warps as the memory pipelines of an SM take them: sectors of global memory, passes of shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compile_lazily

GLOBAL, SHARED, ATOMIC, SHARED_ATOMIC = range(4)
_BANKS, _WORD, _SECTOR, _LANES = 32, 4, 32, 32


@dataclass(frozen=True)
class Coalesced:
    """Sectors of 32 bytes of each access, each once in the order of lanes: those of access `a` stand from `begins[a]`.

    passes [accesses]: cycles in shared memory; of atomics, the most lanes of one address.
    """

    begins: NDArray[np.int64]
    sectors: NDArray[np.int64]
    passes: NDArray[np.int32]


def coalesce(
    addresses: NDArray[np.uint64], active: NDArray[np.uint32], size: NDArray[np.int16], kinds: NDArray[np.int8]
) -> Coalesced:
    """Sectors and passes of accesses: addresses [A, 32] and bytes [A] of a lane, active lanes [A], GLOBAL ... [A].

    Shared memory has 32 banks of four bytes: lanes of one word are served together, words of one bank one after
    another, whatever a lane's width: 512 different bytes take four passes, and lanes that share words fewer.
    """
    # counted first and filled second: how many sectors there are is not known before
    begins = np.zeros(len(size) + 1, np.int64)
    _count(addresses, active, size, kinds, begins)
    np.cumsum(begins, out=begins)
    sectors, passes = np.zeros(begins[-1], np.int64), np.ones(len(size), np.int32)
    _fill(addresses, active, size, kinds, begins, sectors, passes)
    return Coalesced(begins, sectors, passes)


@compile_lazily
def _count(addresses, active, size, kinds, begins):  # type: ignore[no-untyped-def]
    # an access of 512 bytes that is not aligned touches 17 sectors
    seen = np.zeros(_LANES * 17, np.int64)
    for access in range(len(size)):
        if kinds[access] == GLOBAL or kinds[access] == ATOMIC:
            count = 0
            for lane in range(_LANES):
                if active[access] >> np.uint32(lane) & np.uint32(1):
                    first = np.int64(addresses[access, lane])
                    for sector in range(first // _SECTOR, (first + size[access] - 1) // _SECTOR + 1):
                        repeated = False
                        for place in range(count - 1, -1, -1):  # neighbours share sectors: the last is seen first
                            if seen[place] == sector:
                                repeated = True
                                break
                        if not repeated:
                            seen[count] = sector
                            count += 1
            begins[access + 1] = count


@compile_lazily
def _fill(addresses, active, size, kinds, begins, sectors, passes):  # type: ignore[no-untyped-def]
    words = np.zeros(_LANES, np.int64)
    for access in range(len(size)):
        if kinds[access] == GLOBAL or kinds[access] == ATOMIC:
            count = begins[access]
            for lane in range(_LANES):
                if active[access] >> np.uint32(lane) & np.uint32(1):
                    first = np.int64(addresses[access, lane])
                    for sector in range(first // _SECTOR, (first + size[access] - 1) // _SECTOR + 1):
                        repeated = False
                        for place in range(count - 1, begins[access] - 1, -1):
                            if sectors[place] == sector:
                                repeated = True
                                break
                        if not repeated:
                            sectors[count] = sector
                            count += 1
        if kinds[access] == ATOMIC or kinds[access] == SHARED_ATOMIC:
            most = 1
            for lane in range(_LANES):
                alike = 0
                for other in range(_LANES):
                    both = active[access] >> np.uint32(lane) & active[access] >> np.uint32(other) & np.uint32(1)
                    alike += both and addresses[access, lane] == addresses[access, other]
                most = max(most, alike)
            passes[access] = most
        elif kinds[access] == SHARED:
            worst = 1
            for bank in range(_BANKS):
                count = 0  # distinct words of this bank
                for lane in range(_LANES):
                    if active[access] >> np.uint32(lane) & np.uint32(1):
                        first = np.int64(addresses[access, lane]) // _WORD
                        word = first + (bank - first) % _BANKS  # the word of this bank at or after the first
                        if word <= (np.int64(addresses[access, lane]) + size[access] - 1) // _WORD:
                            repeated = False
                            for place in range(count):
                                if words[place] == word:
                                    repeated = True
                                    break
                            if not repeated:
                                words[count] = word
                                count += 1
                worst = max(worst, count)
            passes[access] = worst
