"""The address map of a GEMM's output: which range of it is stored where, and how (T3, arXiv:2401.16677).

Software configures the output of a GEMM once, in N chunks, in the order in which they are made. On a ring the first is
stored straight into the neighbour's memory as updates (`remote_map`); the others are updates of the GPU's own memory,
and a DMA command forwards each but the last once its local and its incoming updates are complete (`dma_map`). Before a
collective by kernels, all of it is stored locally.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
"""A request, the unit in which all parts of the simulation count."""

Place = Literal["local", "remote"]
Operation = Literal["store", "update"]


@dataclass(frozen=True)
class Range:
    """Lines [first, last) of an output.

    incoming: whether the neighbour updates them, too. forwarded: whether a DMA command sends them on.
    """

    first: int
    last: int
    place: Place
    operation: Operation
    incoming: bool
    forwarded: bool

    @property
    def lines(self) -> int:
        """Requests that cover the range once."""
        return self.last - self.first


@dataclass(frozen=True)
class AddressMap:
    """Ranges of an output in the order in which they are made; they cover it once, without gaps."""

    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        """Raise ValueError where ranges leave gaps, overlap or are empty."""
        # each range has to begin at the end of the one before it, the first one at line 0
        edges = [0, *(part.last for part in self.ranges)]
        if [part.first for part in self.ranges] != edges[:-1] or any(part.lines < 1 for part in self.ranges):
            raise ValueError("ranges of an address map follow one another, and none is empty")

    @classmethod
    def tracked_ring(cls, output_bytes: float, gpus: int) -> AddressMap:
        """T3's map on a ring. Raises ValueError for an output with fewer lines than GPUs."""
        # N chunks: the first goes to the neighbour, and the last stays here as the reduced one
        edges, last = _edges(output_bytes, gpus), gpus - 1
        first = Range(edges[0], edges[1], "remote", "update", incoming=False, forwarded=False)
        later = [
            Range(edges[chunk], edges[chunk + 1], "local", "update", incoming=True, forwarded=chunk < last)
            for chunk in range(1, gpus)
        ]
        return cls((first, *later))

    @classmethod
    def by_kernels(cls, output_bytes: float, gpus: int, *, updates: bool) -> AddressMap:
        """The map of a collective by kernels: all of an output is stored in the GPU's own memory.

        updates: near memory, where the first chunk is the neighbour's as soon as it is made.
        """
        edges, operation = _edges(output_bytes, gpus), "update" if updates else "store"
        # in program order: with near memory the first chunk crosses the link as it is made
        places = ["remote" if updates and chunk == 0 else "local" for chunk in range(gpus)]
        pairs = zip(places, edges, edges[1:], strict=False)
        return cls(tuple(Range(first, last, place, operation, False, False) for place, first, last in pairs))  # type: ignore[arg-type]

    @property
    def lines(self) -> int:
        """Requests of the whole output."""
        return self.ranges[-1].last

    @property
    def edges(self) -> NDArray[np.int64]:
        """First line of each range, and the end of the last one: [N + 1]."""
        return np.array([0, *(part.last for part in self.ranges)], np.int64)

    def updates(self) -> tuple[int, int]:
        """Lines that are stored in this GPU's memory by its GEMM, and by its neighbour."""
        local = sum(part.lines for part in self.ranges if part.place == "local")
        return local, sum(part.lines for part in self.ranges if part.incoming)


def _edges(output_bytes: float, gpus: int) -> list[int]:
    """First lines of N chunks as equal as lines allow, and the end."""
    # rounded up: the last line may be filled in part
    lines = -(-int(output_bytes) // LINE_BYTES)
    # integer arithmetic: chunks differ by a line at most, and none is lost
    return [lines * chunk // gpus for chunk in range(gpus + 1)]
