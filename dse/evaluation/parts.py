"""Parts of points: what is looked up, leased and evaluated together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import Batch, Results
from dse.space import Block, KeyedBlock
from dse.store.contract import Session
from dse.store.result_rows import key_bytes
from dse.values import Keys

_MOST_COMPARED = 4096  # designs in a call up to which equal ones are looked for


@dataclass(frozen=True)
class Piece:
    """Designs of a part that are evaluated together: places start...stop of it."""

    part: Part
    start: int
    stop: int
    block: Block

    @property
    def batch(self) -> Batch:
        """Its designs."""
        assert self.block.batch is not None
        return self.block.batch

    @property
    def keys(self) -> Keys:
        """Their keys."""
        return self.part.keys[self.start : self.stop]


class Part:
    """A part of a point that is leased and given up as a whole, in the same place whoever evaluates it.

    found: place of the first design -> results. left: number of designs without any.
    """

    def __init__(self, block: Block, keys: Keys, scenario: str) -> None:
        self.block, self.keys, self.scenario = block, keys, scenario
        self.found: dict[int, Results] = {}
        self.left = block.size

    def take(self, start: int, results: Results) -> None:
        """Add the results of its designs from `start` on."""
        self.found[start] = results
        self.left -= results.size

    def know(self, is_known: NDArray[np.bool_], results: Results) -> NDArray[np.bool_]:
        """Take in what is recorded; which of it was not known here."""
        gaps = is_known.copy()
        for start, have in self.found.items():
            gaps[start : start + have.size] = False  # known results stay
        for start, stop in _runs(gaps):
            self.take(start, results.take(slice(start, stop)))
        return gaps

    def pieces(self) -> Iterator[Piece]:
        """Designs without results yet, as grids."""
        gaps = np.ones(self.block.size, bool)
        for start, have in self.found.items():
            gaps[start : start + have.size] = False
        for start, block in _grids(self.block, gaps):
            yield Piece(self, start, start + block.size, block)

    @property
    def results(self) -> Results:
        """All its results, in the order of its designs."""
        return Results.join([self.found[start] for start in sorted(self.found)])


def _runs(marks: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Runs of marks without a gap, as start...stop."""
    # +1 where a run begins, -1 where it ends
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _grids(block: Block, wanted: NDArray[np.bool_], start: int = 0) -> Iterator[tuple[int, Block]]:
    """The wanted points of a block as smaller ones, with their places."""
    if wanted.all():
        yield start, block
    elif wanted.any():
        for half in block.split((block.size + 1) // 2):  # halves of a grid are grids: a gap costs a few calls
            yield from _grids(half, wanted[: half.size], start)
            wanted, start = wanted[half.size :], start + half.size


def batched_parts(parts: Iterable[Part], enough: Callable[[], int]) -> Iterator[list[Part]]:
    """Parts in order, so many together that they have `enough` designs."""
    together: list[Part] = []
    count = 0
    for part in parts:
        together.append(part)
        count += part.block.size
        if count >= enough():  # asked each time, as it grows
            yield together
            together, count = [], 0
    if together:
        yield together


def look_up(parts: Sequence[Part], session: Session, advance: Callable[[int], None]) -> None:
    """Give parts their results that are recorded; advance(n) is told how many."""
    # None: none of these can be known
    lookup = session.find(np.concatenate([part.keys for part in parts])) if parts else None
    if lookup is None:
        return
    ends = np.cumsum([len(part.keys) for part in parts])
    for part, stop in zip(parts, ends.tolist(), strict=True):
        places, before = slice(stop - len(part.keys), stop), part.left
        fresh = part.know(lookup.known[places], lookup.results.take(places))
        session.recall(lookup.study[places][fresh])  # counted once, though a point is looked up again and again
        advance(before - part.left)


def first_and_repeated(parts: list[Part], most: int) -> tuple[list[Part], list[Part]]:
    """Parts in two goes: those with designs that are in an earlier part are looked up once that has results.

    Where many designs go into a call, looking for these would cost more than evaluating them again.
    """
    if most > _MOST_COMPARED or len(parts) < 2:
        return parts, []
    met: set[bytes] = set()
    first: list[Part] = []
    later: list[Part] = []
    for part in parts:
        names = key_bytes(part.keys)
        (first if met.isdisjoint(names) else later).append(part)
        met.update(names)
    return first, later


def parts_of(point: KeyedBlock, most: int) -> Iterator[Part]:
    """The designs of a point in parts of at most `most`."""
    start = 0
    for block in point.block.split(most):  # the same parts in every process, whose leases must match
        yield Part(block, point.keys[start : start + block.size], point.scenario)
        start += block.size


def call_groups(pieces: Iterable[Piece], most: int, takes_long: Callable[[BaseModel], bool]) -> Iterator[list[Piece]]:
    """All pieces in order, so that no call has more than `most` designs, or than one that takes long."""
    group: list[Piece] = []
    count = 0
    for piece in pieces:
        # the last one, and this: a slow one is a call by itself
        slow = any(takes_long(other.batch.design) for other in (*group[-1:], piece))
        if group and (slow or count + piece.block.size > most):
            yield group
            group, count = [], 0
        group.append(piece)
        count += piece.block.size
    if group:
        yield group
