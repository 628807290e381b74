"""A step of a schedule that is given step by step (`dse_synthesis.schedule`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from dse.values import Frozen

Range = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]]
LOCAL = 0
"""The peer that is this GPU."""


class Step(Frozen):
    """A move, or a GEMM. kernel: which one moves it; None: DMA engines. peers: whose shards, by distance; None: all.

    after: a pause of a move: the number of a step before it that it waits for besides what it needs.
    """

    move: Range | None = None
    kernel: Annotated[int, Field(ge=0, le=64)] | None = None
    compute: Range | None = None
    local: Range | None = None
    peers: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    after: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.move is None) == (self.compute is None and self.local is None):
            raise ValueError("a step has either `move`, or `compute` or `local`")
        if self.move is None and self.kernel is not None:
            raise ValueError("only a move has a kernel")
        if self.move is None and self.after is not None:
            raise ValueError("only a move pauses: GEMMs follow one another")
        if any(part is not None and part[0] >= part[1] for part in (self.move, self.compute, self.local)):
            raise ValueError("a range [a, b] has a < b")
        return self

    def cells(self, num_peers: int) -> Iterator[tuple[int, int]]:
        """Yield (peer, interval between two cuts) of all that it moves or computes."""
        for ranged, peers in (
            (self.move or self.compute, self.peers or range(1, num_peers + 1)),
            (self.local, (LOCAL,)),
        ):
            if ranged is not None:
                yield from ((peer, part) for peer in peers for part in range(*ranged))
