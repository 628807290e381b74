"""Sketches of schedules, structures without numbers: those of the presets, and changes that make others of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # of chunks of the presets
_UNFUSED = 8  # chunks of presets with a GEMM for each peer, at most
_SHARED = (4, 8, 16, 32)  # chunks that engines and a kernel share
# a few more than the finest preset has
_MOST_INTERVALS = 72


@dataclass(frozen=True)
class Transfer:
    """Intervals first to last - 1 of the shards of peers (none: all), by a kernel or by DMA engines (None).

    after: interval whose first GEMM it waits for; None: no pause.
    """

    first: int
    last: int
    kernel: int | None = None
    peers: tuple[int, ...] = ()
    after: int | None = None


@dataclass(frozen=True)
class PieceGemm:
    """A GEMM on intervals of the shards of peers (none: all), of the local shard, or of both."""

    compute: tuple[int, int] | None
    local: tuple[int, int] | None = None
    peers: tuple[int, ...] = ()

    @property
    def ranged(self) -> tuple[int, int]:
        """Its intervals of the peers' shards, or else of the local one."""
        intervals = self.compute or self.local
        assert intervals is not None
        return intervals


@dataclass(frozen=True)
class Sketch:
    """A structure: moves in the order of their movers' queues, GEMMs in the order of the stream."""

    dim: str
    intervals: int
    moves: tuple[Transfer, ...]
    products: tuple[PieceGemm, ...]
    masked: bool = False

    @property
    def kernels(self) -> int:
        """Number of kernels."""
        return 1 + max((-1 if move.kernel is None else move.kernel for move in self.moves), default=-1)


@dataclass(frozen=True)
class TimedSketch:
    """A sketch with its numbers, inner cuts [I - 1] and CUs [K], and its makespan [s]."""

    sketch: Sketch
    cuts: tuple[int, ...]
    cus: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class SketchSizes:
    """What sketches are of: a GEMM after (`gathers`) or before a collective over so many peers.

    parts: of a shard, of which cuts are multiples. most_cus: of a kernel.
    """

    gathers: bool
    peers: int
    parts: int
    most_cus: int


@dataclass(frozen=True)
class Presets:
    """Sketches of schedules that people wrote."""

    sizes: SketchSizes

    def all(self) -> Iterator[Sketch]:
        """Yield the structures of the presets."""
        everything, peers = (0, 1), range(1, self.sizes.peers + 1)
        for kernel in (None, 0):
            moves = tuple(Transfer(0, 1, kernel, (peer,)) for peer in peers)
            singly = tuple(PieceGemm(everything, None, (peer,)) for peer in peers)
            yield Sketch("m", 1, moves, self._with_local(singly), kernel is not None)
            for count in _COUNTS:
                if count <= self.sizes.parts:
                    for dim in ("m", "k"):
                        yield from self._chunked(dim, count, kernel)

    def _with_local(self, products: tuple[PieceGemm, ...]) -> tuple[PieceGemm, ...]:
        """GEMMs with one on the local shard, first or (of a GEMM before a collective) last."""
        intervals = max(product.ranged[1] for product in products)
        local = PieceGemm(None, (0, intervals))
        return (local, *products) if self.sizes.gathers else (*products, local)

    def _chunked(self, dim: str, count: int, kernel: int | None) -> Iterator[Sketch]:
        ranges = [(place, place + 1) for place in range(count)]
        moves, masked = tuple(Transfer(*part, kernel) for part in ranges), kernel is not None
        yield Sketch(dim, count, moves, tuple(PieceGemm(part, part) for part in ranges), masked)
        yield Sketch(dim, count, moves, self._with_local(tuple(PieceGemm(part) for part in ranges)), masked)
        if count <= _UNFUSED:
            peers = range(1, self.sizes.peers + 1)
            unfused = tuple(PieceGemm(part, None, (peer,)) for part in ranges for peer in peers)
            yield Sketch(dim, count, moves, self._with_local(unfused), masked)

    def shared(self, dim: str) -> Iterator[Sketch]:
        """Yield chunks of which DMA engines move the first interval and a kernel the second one."""
        for count in _SHARED:
            if 2 * count <= self.sizes.parts:
                halves = [(2 * place, 2 * place + 1, 2 * place + 2) for place in range(count)]
                moves = tuple(move for a, b, c in halves for move in (Transfer(a, b), Transfer(b, c, 0)))
                fused = tuple(PieceGemm((a, c)) for a, _, c in halves)
                yield Sketch(dim, 2 * count, moves, self._with_local(fused))
                yield Sketch(dim, 2 * count, moves, tuple(PieceGemm((a, c), (a, c)) for a, _, c in halves))


class Changes:
    """Changes of sketches, drawn at random.

    of_moves: whether moves are changed more often than GEMMs.
    """

    def __init__(self, sizes: SketchSizes, random: np.random.Generator, *, of_moves: bool) -> None:
        self._sizes, self._random = sizes, random
        moves = [self._split_move, self._merge_moves, self._another_mover, self._pause]
        products = [self._split_product, self._merge_products, self._put_elsewhere, self._apart]
        # three changes in four are of what binds
        weight = 3 if of_moves else 1
        self._changes: list[Callable[[TimedSketch], TimedSketch | None]] = [
            *(self._cut, self._cut),
            *moves * weight,
            *products * (4 - weight),
        ]

    def change(self, plan: TimedSketch) -> TimedSketch | None:
        """A plan with one change of its structure, not yet timed; None where the change that was drawn does not fit."""
        changed = self._changes[self._pick(self._changes)](plan)
        return None if changed is None or not self._is_legal(changed.sketch) else changed

    def _pick(self, items: Sequence[Any]) -> int:
        return int(self._random.integers(len(items)))

    def _cut(self, plan: TimedSketch) -> TimedSketch | None:
        """An interval cut in two; ranges that hold it hold both."""
        sketch, ends = plan.sketch, (0, *plan.cuts, self._sizes.parts)
        place = int(self._random.integers(sketch.intervals))
        if ends[place + 1] - ends[place] < 2 or sketch.intervals >= _MOST_INTERVALS:
            return None
        at = int(self._random.integers(ends[place] + 1, ends[place + 1]))

        def grown(ranged: tuple[int, int] | None) -> tuple[int, int] | None:
            # ends behind the cut interval move up by one
            return None if ranged is None else (ranged[0] + (ranged[0] > place), ranged[1] + (ranged[1] > place))

        moves = tuple(
            replace(
                move,
                first=move.first + (move.first > place),
                last=move.last + (move.last > place),
                after=None if move.after is None else move.after + (move.after > place),
            )
            for move in sketch.moves
        )
        products = tuple(replace(of, compute=grown(of.compute), local=grown(of.local)) for of in sketch.products)
        cuts = (*plan.cuts[:place], at, *plan.cuts[place:])
        changed = replace(sketch, intervals=sketch.intervals + 1, moves=moves, products=products)
        # a new cut changes nothing until a move or a GEMM ends there
        both = self._split_move(replace(plan, sketch=changed, cuts=cuts)) or replace(plan, sketch=changed, cuts=cuts)
        return self._split_product(both) or both

    def _split_move(self, plan: TimedSketch) -> TimedSketch | None:
        moves = plan.sketch.moves
        longer = [place for place, move in enumerate(moves) if move.last - move.first > 1]
        if not longer:
            return None
        place = longer[self._pick(longer)]
        move = moves[place]
        at = int(self._random.integers(move.first + 1, move.last))
        return _with(plan, moves=(*moves[:place], replace(move, last=at), replace(move, first=at), *moves[place + 1 :]))

    def _merge_moves(self, plan: TimedSketch) -> TimedSketch | None:
        moves = plan.sketch.moves
        pairs = [
            (one, two)
            for one in moves
            # merged where one ends as the other begins; the later one in the queue vanishes
            for two in moves
            if (one.last, one.peers, one.kernel, one.after) == (two.first, two.peers, two.kernel, two.after)
        ]
        if not pairs:
            return None
        one, two = pairs[self._pick(pairs)]
        merged = [replace(one, last=two.last) if move == one else move for move in moves if move != two]
        return _with(plan, moves=tuple(merged))

    def _another_mover(self, plan: TimedSketch) -> TimedSketch | None:
        moves = list(plan.sketch.moves)
        place = self._pick(moves)
        # three kernels at most, one of them new
        kernels = [None, *range(min(plan.sketch.kernels + 1, 3))]
        kernel = kernels[self._pick(kernels)]
        moves[place] = replace(moves[place], kernel=kernel)
        if kernel is not None and self._random.random() < 0.3:  # a kernel that is there before a GEMM does not wait
            moves.insert(0, moves.pop(place))
        # kernels without a move vanish; the others keep their CUs under new numbers
        used = sorted({move.kernel for move in moves if move.kernel is not None})
        moves = [move if move.kernel is None else replace(move, kernel=used.index(move.kernel)) for move in moves]
        drawn = [*plan.cus, int(self._random.integers(1, self._sizes.most_cus + 1))]
        return replace(_with(plan, moves=tuple(moves), masked=False), cus=tuple(drawn[kernel] for kernel in used))

    def _pause(self, plan: TimedSketch) -> TimedSketch | None:
        """A move that waits for the first GEMM on some interval, or for none."""
        moves = list(plan.sketch.moves)
        place, after = self._pick(moves), int(self._random.integers(-1, plan.sketch.intervals))
        moves[place] = replace(moves[place], after=None if after < 0 else after)
        return _with(plan, moves=tuple(moves))

    def _split_product(self, plan: TimedSketch) -> TimedSketch | None:
        products = plan.sketch.products
        longer = [place for place, product in enumerate(products) if product.ranged[1] - product.ranged[0] > 1]
        if not longer:
            return None
        place = longer[self._pick(longer)]
        begin, end = products[place].ranged
        halves = _halves(products[place], int(self._random.integers(begin + 1, end)))
        return _with(plan, products=(*products[:place], *halves, *products[place + 1 :]))

    def _apart(self, plan: TimedSketch) -> TimedSketch | None:
        """A GEMM on both the peers' shards and the local one made two."""
        products = plan.sketch.products
        both = [place for place, product in enumerate(products) if product.compute and product.local]
        if not both:
            return None
        place = both[self._pick(both)]
        parts = [replace(products[place], local=None), PieceGemm(None, products[place].local)]
        if self._random.random() < 0.5:
            parts.reverse()
        return _with(plan, products=(*products[:place], *parts, *products[place + 1 :]))

    def _merge_products(self, plan: TimedSketch) -> TimedSketch | None:
        products = plan.sketch.products
        pairs = [
            (place, merged)
            for place in range(len(products) - 1)
            if (merged := _merge(products[place], products[place + 1])) is not None
        ]
        if not pairs:
            return None
        place, merged = pairs[self._pick(pairs)]
        return _with(plan, products=(*products[:place], merged, *products[place + 2 :]))

    def _put_elsewhere(self, plan: TimedSketch) -> TimedSketch | None:
        products = list(plan.sketch.products)
        product = products.pop(self._pick(products))
        products.insert(int(self._random.integers(len(products) + 1)), product)
        return _with(plan, products=tuple(products))

    def _is_legal(self, sketch: Sketch) -> bool:
        """Tell whether everything is computed once, and slices that one GEMM multiplies have one depth."""
        cells: list[tuple[int, int]] = []
        for product in sketch.products:
            if sketch.dim == "k" and product.compute and product.local and product.compute != product.local:
                return False
            peers = product.peers or range(1, self._sizes.peers + 1)
            cells += [(peer, part) for peer in peers for part in range(*(product.compute or (0, 0)))]
            cells += [(0, part) for part in range(*(product.local or (0, 0)))]
        # moves need no check: every change keeps each interval moved once
        return len(cells) == len(set(cells)) == (self._sizes.peers + 1) * sketch.intervals


def _with(plan: TimedSketch, **changes: Any) -> TimedSketch:
    return replace(plan, sketch=replace(plan.sketch, **changes))


def _halves(product: PieceGemm, at: int) -> Iterator[PieceGemm]:
    """Yield a GEMM in two, cut at an interval; a local range that differs stays with the first."""
    begin, end = product.ranged
    for side in ((begin, at), (at, end)):
        local = side if product.local == product.ranged else product.local if side[0] == begin else None
        yield PieceGemm(side if product.compute else None, local, product.peers)


def _merge(one: PieceGemm, two: PieceGemm) -> PieceGemm | None:
    """One GEMM in place of two that follow one another; None where their intervals do not fit."""
    if one.peers != two.peers:
        return None
    joined: list[tuple[int, int] | None] = []
    for first, second in ((one.compute, two.compute), (one.local, two.local)):
        if first and second and first[1] != second[0] and second[1] != first[0]:
            return None
        ends = [ranged for ranged in (first, second) if ranged]
        joined.append((min(ranged[0] for ranged in ends), max(ranged[1] for ranged in ends)) if ends else None)
    return PieceGemm(joined[0], joined[1], one.peers)
