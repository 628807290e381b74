"""Search for a schedule that nobody wrote: structures by large-neighbourhood search, their numbers in batches.

A sketch is a structure: which intervals between cuts each move and each GEMM has, and who moves them. Its numbers are
the places of the cuts and the CUs of the kernels. Seeds are the presets (`chunked`, `shard_p2p` and their knobs), and
their chunks shared between DMA engines and a kernel; numbers are changed a few at a time, a batch of changes in one run
of the compiled engine. Then structures are changed: intervals cut in two, ranges split and merged, movers exchanged,
moves paused, GEMMs put elsewhere in the stream, the local shard divided; each with its numbers tuned, and accepted
where it is no longer than what was accepted some changes before (late acceptance). What binds the bound
(`search_spaces.bounds`) says whether moves or GEMMs are changed more often; the search ends at the bound. The same
seed finds the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse import plugins
from search_spaces.bounds import piece_bound
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.steps import Step
from simulators.costs.transfer import library_cus
from simulators.hardware.system import System
from simulators.taskgraph.symmetry import reduce_graph
from simulators.workloads.operators import Workload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
VERSION = "2"
"""Of the search; raise it with every change that finds other schedules."""
_ENGINE = "fluid"
_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # of chunks of the presets
_UNFUSED = 8  # chunks of presets with a GEMM for each peer, at most
_SHARED = (4, 8, 16, 32)  # chunks that engines and a kernel share
_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # of such a chunk, that the kernel moves
_EIGHTHS = (1, 2, 3, 4, 6, 8)  # of the CUs that the library takes
_FINEST = 1024  # parts of a shard, of which cuts are multiples
_SEEDS = 5  # structures that are improved
_BATCH = 64  # numbers of one structure that are run at once
_MEMORY = 8  # changes before which a structure is compared
_MOST_INTERVALS = 72
_ENOUGH = 1.0005  # times the bound: nothing is left to gain


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
class Plan:
    """A sketch with its numbers, inner cuts [I - 1] and CUs [K], and its makespan [s]."""

    sketch: Sketch
    cuts: tuple[int, ...]
    cus: tuple[int, ...]
    seconds: float


class Search:
    """The search for one workload on one system. knobs: of a schedule with steps, that are replaced."""

    def __init__(self, knobs: CommEngineKnobs, system: System, workload: Workload, *, seed: int) -> None:
        self._knobs: Any = knobs
        self._system, self._workload = system, workload
        overlap = workload.overlap()
        self._gathers, self._peers = overlap.order == "before", system.node.num_gpus - 1
        least = min(int(overlap.collective.rows) // system.node.num_gpus, int(overlap.collective.cols))
        self.parts = 1 << min(_FINEST, max(least, 1)).bit_length() - 1
        self._most_cus = int(np.min(library_cus(system, overlap.collective.pattern)))
        self._engine = plugins.load("engine", _ENGINE)
        self._random = np.random.default_rng(seed)
        self.runs = 0
        bound = piece_bound(system, workload)
        self.bound_s, self.binds = float(bound.seconds), bound.names[int(bound.binds)]

    def found(self, evaluations: int) -> Any:
        """The knobs with the steps of the best plan."""
        plan = self.best(evaluations)
        return self._knobs.model_copy(update=self._parts_of(plan.sketch, plan.cuts, plan.cus))

    def best(self, evaluations: int) -> Plan:
        """The best plan; evaluations: structures that are run to improve seeds."""
        seeds = [self._run(sketch, *self._even(sketch)) for sketch in self.presets()]
        ranked = sorted(seeds, key=lambda plan: plan.seconds)
        if self._gathers:
            ranked += [self._tuned_share(sketch) for sketch in self._shared(ranked[0].sketch.dim)]
        tuned = sorted((self._tuned(plan, 4) for plan in _different(ranked)), key=lambda plan: plan.seconds)
        best = tuned[0]
        for place, seed in enumerate(tuned[:2]):
            limit = evaluations * (2 if place == 0 else 3) // 3
            best = min(best, self._improved(seed, limit), key=lambda plan: plan.seconds)
        return best

    # ---------------------------------------------------------------- runs

    def _parts_of(self, sketch: Sketch, cuts: Sequence[Any], cus: Sequence[Any]) -> dict[str, Any]:
        return {
            "steps": tuple(self._steps(sketch)),
            "cut_dim": sketch.dim,
            "parts": self.parts,
            "cuts": (0, *cuts, self.parts),
            "kernels": tuple(cus[: sketch.kernels]),
            "masked": sketch.masked,
        }

    def _steps(self, sketch: Sketch) -> list[Step]:
        """Moves and GEMMs in an order in which none waits for a later one. A pause for what comes later is none."""
        left = [
            _step(move=(move.first, move.last), kernel=move.kernel, peers=move.peers or None, after=move.after)
            for move in sketch.moves
        ]
        steps, made, ends = list[Step](), set[tuple[int, int]](), dict[int, int]()
        if self._gathers and all(move.after is None for move in left):
            steps, left = left, []
        for product in sketch.products:
            step = _step(compute=product.compute, local=product.local, peers=product.peers or None)
            cells = set(step.cells(self._peers))
            if self._gathers:
                _submit(self._due(left, cells), left, steps, ends)
            ends = dict.fromkeys((part for _, part in cells), len(steps)) | ends
            steps.append(step)
            if not self._gathers:
                made |= cells
                ready = [move for move in left if move.after is None or move.after in ends]
                _submit([move for move in ready if set(move.cells(self._peers)) <= made], left, steps, ends)
        return steps

    def _due(self, left: Sequence[Step], cells: set[tuple[int, int]]) -> list[Step]:
        """Moves that bring something of a GEMM, and those that their movers have before them."""
        last = {move.kernel: place for place, move in enumerate(left) if not cells.isdisjoint(move.cells(self._peers))}
        return [move for place, move in enumerate(left) if place <= last.get(move.kernel, -1)]

    def seconds(self, sketch: Sketch, cuts: Ints, cus: Ints) -> Floats:
        """Makespans [B] of a structure with inner cuts [B, I - 1] and CUs [B, K]."""
        self.runs += len(cuts)
        numbers = [[column if len(cuts) > 1 else int(column[0]) for column in table.T] for table in (cuts, cus)]
        plan = self._knobs.model_copy(update=self._parts_of(sketch, *numbers))
        graph = reduce_graph(plan.lower(self._system, self._workload)).graph
        return np.broadcast_to(self._engine.totals(graph).makespan_s, len(cuts))

    def _run(self, sketch: Sketch, cuts: Ints, cus: Ints) -> Plan:
        """The best plan of a structure with some numbers."""
        seconds = self.seconds(sketch, cuts, cus)
        at = int(np.argmin(seconds))
        return Plan(sketch, tuple(cuts[at].tolist()), tuple(cus[at].tolist()), float(seconds[at]))

    def _even(self, sketch: Sketch, cus: Sequence[int] = ()) -> tuple[Ints, Ints]:
        """Cuts as even as they can be, and numbers of CUs that are tried."""
        cuts = np.arange(1, sketch.intervals) * self.parts // sketch.intervals
        tried = cus or sorted({max(1, self._most_cus * part // 8) for part in _EIGHTHS})
        if not sketch.kernels:
            return cuts[None], np.empty((1, 0), np.int64)
        return np.repeat(cuts[None], len(tried), axis=0), np.repeat(np.array(tried)[:, None], sketch.kernels, axis=1)

    # ---------------------------------------------------------------- seeds

    def presets(self) -> Iterator[Sketch]:
        """Yield the structures of the presets."""
        everything, peers = (0, 1), range(1, self._peers + 1)
        for kernel in (None, 0):
            moves = tuple(Transfer(0, 1, kernel, (peer,)) for peer in peers)
            singly = tuple(PieceGemm(everything, None, (peer,)) for peer in peers)
            yield Sketch("m", 1, moves, self._with_local(singly), kernel is not None)
            for count in _COUNTS:
                if count <= self.parts:
                    for dim in ("m", "k"):
                        yield from self._chunked(dim, count, kernel)

    def _with_local(self, products: tuple[PieceGemm, ...]) -> tuple[PieceGemm, ...]:
        """GEMMs with one on the local shard, first or (of a GEMM before a collective) last."""
        intervals = max(product.ranged[1] for product in products)
        local = PieceGemm(None, (0, intervals))
        return (local, *products) if self._gathers else (*products, local)

    def _chunked(self, dim: str, count: int, kernel: int | None) -> Iterator[Sketch]:
        ranges = [(place, place + 1) for place in range(count)]
        moves, masked = tuple(Transfer(*part, kernel) for part in ranges), kernel is not None
        yield Sketch(dim, count, moves, tuple(PieceGemm(part, part) for part in ranges), masked)
        yield Sketch(dim, count, moves, self._with_local(tuple(PieceGemm(part) for part in ranges)), masked)
        if count <= _UNFUSED:
            peers = range(1, self._peers + 1)
            unfused = tuple(PieceGemm(part, None, (peer,)) for part in ranges for peer in peers)
            yield Sketch(dim, count, moves, self._with_local(unfused), masked)

    def _shared(self, dim: str) -> Iterator[Sketch]:
        """Yield chunks of which DMA engines move the first interval and a kernel the second one."""
        for count in _SHARED:
            if 2 * count <= self.parts:
                halves = [(2 * place, 2 * place + 1, 2 * place + 2) for place in range(count)]
                moves = tuple(move for a, b, c in halves for move in (Transfer(a, b), Transfer(b, c, 0)))
                fused = tuple(PieceGemm((a, c)) for a, _, c in halves)
                yield Sketch(dim, 2 * count, moves, self._with_local(fused))
                yield Sketch(dim, 2 * count, moves, tuple(PieceGemm((a, c), (a, c)) for a, _, c in halves))

    def _tuned_share(self, sketch: Sketch) -> Plan:
        """The best plan of chunks that are shared, over the share and the CUs of the kernel."""
        count, cuts, cus = sketch.intervals // 2, list[Ints](), list[int]()
        for share in _SHARES:
            ends = np.arange(1, count + 1) * self.parts / count
            both = np.stack([ends - share * self.parts / count, ends], axis=1).reshape(-1)[:-1]
            for part in _EIGHTHS:
                cuts.append(np.rint(both).astype(np.int64))
                cus.append(max(1, self._most_cus * part // 8))
        table = _rising(np.stack(cuts), self.parts)
        return self._run(sketch, table, np.array(cus)[:, None])

    # ---------------------------------------------------------------- numbers

    def _tuned(self, plan: Plan, rounds: int) -> Plan:
        """A plan with better numbers: in each round a batch of changes of a few of them."""
        size = max(1, self.parts // 8)
        for _ in range(rounds):
            if not plan.cuts and not plan.cus:
                return plan
            cuts = np.repeat(np.array([plan.cuts], np.int64).reshape(1, -1), _BATCH, axis=0)
            cus = np.repeat(np.array([plan.cus], np.int64).reshape(1, -1), _BATCH, axis=0)
            if plan.cuts:
                self._shift(cuts, size)
            if plan.cus:
                steps = self._random.integers(-4, 5, cus.shape) * (self._random.random(cus.shape) < 0.5)
                cus = np.clip(cus + steps, 1, self._most_cus)
            changed = self._run(plan.sketch, _rising(cuts, self.parts), cus)
            if changed.seconds < plan.seconds * (1 - 1e-9):
                plan = changed
            else:
                size = max(1, size // 4)
        return plan

    def _shift(self, cuts: Ints, size: int) -> None:
        """Shift a cut or some that follow one another by up to `size` parts, or all in proportion; in place."""
        count = cuts.shape[1]
        for row in cuts:
            steps = int(self._random.integers(1, size + 1)) * (1 if self._random.random() < 0.5 else -1)
            which, first = self._random.integers(0, 3), int(self._random.integers(0, count))
            if which == 0:
                row[first] += steps
            elif which == 1:
                last = int(self._random.integers(first, count)) + 1
                row[first:last] += steps
            else:  # growing or shrinking in proportion
                row[:] = np.rint(self.parts * (row / self.parts) ** np.exp(self._random.normal(0, 0.3)))

    # ---------------------------------------------------------------- structures

    def _improved(self, plan: Plan, limit: int) -> Plan:
        """Late-acceptance hill climbing (Burke and Bykov, 2017) over structures, until so many were run."""
        accepted, best, memory, turn = plan, plan, [plan.seconds] * _MEMORY, 0
        begun = self.runs
        while self.runs - begun < limit * _BATCH // 4 and best.seconds > _ENOUGH * self.bound_s and turn < limit:
            turn += 1
            changed = self._changed(accepted)
            if changed is None:
                continue
            tuned = self._tuned(changed, 1 if changed.seconds < 1.02 * best.seconds else 0)
            if tuned.seconds <= max(accepted.seconds, memory[turn % _MEMORY]):
                accepted = tuned
            memory[turn % _MEMORY] = accepted.seconds
            best = min(best, accepted, key=lambda one: one.seconds)
        return self._tuned(best, 12)

    def _changed(self, plan: Plan) -> Plan | None:
        """A plan with one change of its structure; None where the change that was drawn does not fit."""
        of_moves: list[Callable[[Plan], Plan | None]] = [self._split_move, self._merge_moves, self._another_mover]
        of_moves.append(self._pause)
        of_products = [self._split_product, self._merge_products, self._put_elsewhere, self._apart]
        weight = 3 if self.binds.startswith("links") else 1
        changes = [self._cut, self._cut, *of_moves * weight, *of_products * (4 - weight)]
        changed = changes[int(self._random.integers(len(changes)))](plan)
        if changed is None or not self._legal(changed.sketch):
            return None
        cuts, cus = (np.array([numbers], np.int64).reshape(1, -1) for numbers in (changed.cuts, changed.cus))
        return self._run(changed.sketch, cuts, cus)

    def _pick(self, items: Sequence[Any]) -> int:
        return int(self._random.integers(len(items)))

    def _cut(self, plan: Plan) -> Plan | None:
        """An interval cut in two; ranges that hold it hold both."""
        sketch, ends = plan.sketch, (0, *plan.cuts, self.parts)
        place = int(self._random.integers(sketch.intervals))
        if ends[place + 1] - ends[place] < 2 or sketch.intervals >= _MOST_INTERVALS:
            return None
        at = int(self._random.integers(ends[place] + 1, ends[place + 1]))

        def grown(ranged: tuple[int, int] | None) -> tuple[int, int] | None:
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
        both = self._split_move(replace(plan, sketch=changed, cuts=cuts)) or replace(plan, sketch=changed, cuts=cuts)
        return self._split_product(both) or both

    def _split_move(self, plan: Plan) -> Plan | None:
        moves = plan.sketch.moves
        longer = [place for place, move in enumerate(moves) if move.last - move.first > 1]
        if not longer:
            return None
        place = longer[self._pick(longer)]
        move = moves[place]
        at = int(self._random.integers(move.first + 1, move.last))
        return _with(plan, moves=(*moves[:place], replace(move, last=at), replace(move, first=at), *moves[place + 1 :]))

    def _merge_moves(self, plan: Plan) -> Plan | None:
        moves = plan.sketch.moves
        pairs = [
            (one, two)
            for one in moves
            for two in moves
            if (one.last, one.peers, one.kernel, one.after) == (two.first, two.peers, two.kernel, two.after)
        ]
        if not pairs:
            return None
        one, two = pairs[self._pick(pairs)]
        merged = [replace(one, last=two.last) if move == one else move for move in moves if move != two]
        return _with(plan, moves=tuple(merged))

    def _another_mover(self, plan: Plan) -> Plan | None:
        moves = list(plan.sketch.moves)
        place = self._pick(moves)
        kernels = [None, *range(min(plan.sketch.kernels + 1, 3))]
        kernel = kernels[self._pick(kernels)]
        moves[place] = replace(moves[place], kernel=kernel)
        if kernel is not None and self._random.random() < 0.3:  # a kernel that is there before a GEMM does not wait
            moves.insert(0, moves.pop(place))
        used = sorted({move.kernel for move in moves if move.kernel is not None})
        moves = [move if move.kernel is None else replace(move, kernel=used.index(move.kernel)) for move in moves]
        drawn = [*plan.cus, int(self._random.integers(1, self._most_cus + 1))]
        return replace(_with(plan, moves=tuple(moves), masked=False), cus=tuple(drawn[kernel] for kernel in used))

    def _pause(self, plan: Plan) -> Plan | None:
        """A move that waits for the first GEMM on some interval, or for none."""
        moves = list(plan.sketch.moves)
        place, after = self._pick(moves), int(self._random.integers(-1, plan.sketch.intervals))
        moves[place] = replace(moves[place], after=None if after < 0 else after)
        return _with(plan, moves=tuple(moves))

    def _split_product(self, plan: Plan) -> Plan | None:
        products = plan.sketch.products
        longer = [place for place, product in enumerate(products) if product.ranged[1] - product.ranged[0] > 1]
        if not longer:
            return None
        place = longer[self._pick(longer)]
        begin, end = products[place].ranged
        halves = _halves(products[place], int(self._random.integers(begin + 1, end)))
        return _with(plan, products=(*products[:place], *halves, *products[place + 1 :]))

    def _apart(self, plan: Plan) -> Plan | None:
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

    def _merge_products(self, plan: Plan) -> Plan | None:
        products = plan.sketch.products
        pairs = [
            (place, merged)
            for place in range(len(products) - 1)
            if (merged := _merged(products[place], products[place + 1])) is not None
        ]
        if not pairs:
            return None
        place, merged = pairs[self._pick(pairs)]
        return _with(plan, products=(*products[:place], merged, *products[place + 2 :]))

    def _put_elsewhere(self, plan: Plan) -> Plan | None:
        products = list(plan.sketch.products)
        product = products.pop(self._pick(products))
        products.insert(int(self._random.integers(len(products) + 1)), product)
        return _with(plan, products=tuple(products))

    def _legal(self, sketch: Sketch) -> bool:
        """Whether everything is computed once, and slices that one GEMM multiplies have one depth."""
        cells: list[tuple[int, int]] = []
        for product in sketch.products:
            if sketch.dim == "k" and product.compute and product.local and product.compute != product.local:
                return False
            peers = product.peers or range(1, self._peers + 1)
            cells += [(peer, part) for peer in peers for part in range(*(product.compute or (0, 0)))]
            cells += [(0, part) for part in range(*(product.local or (0, 0)))]
        return len(cells) == len(set(cells)) == (self._peers + 1) * sketch.intervals


_NOTHING: dict[str, Any] = dict.fromkeys(Step.model_fields)


def _step(**parts: Any) -> Step:
    """A step, not checked."""
    return Step.model_construct(**{**_NOTHING, **parts})


def _submit(moves: Sequence[Step], left: list[Step], steps: list[Step], ends: Mapping[int, int]) -> None:
    """Put moves among the steps; `after` becomes the number of the step that first computes the interval."""
    for move in moves:
        left.remove(move)
        steps.append(move if move.after is None else _step(**{**dict(move), "after": ends.get(move.after)}))


def _with(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, sketch=replace(plan.sketch, **changes))


def _different(plans: Sequence[Plan]) -> list[Plan]:
    """The best plans, of structures that differ."""
    ranked = sorted(plans, key=lambda plan: plan.seconds)
    return list({plan.sketch: plan for plan in reversed(ranked)}.values())[::-1][:_SEEDS]


def _rising(cuts: Ints, parts: int) -> Ints:
    """Cuts [B, I - 1] that rise strictly between 0 and `parts`."""
    places = np.arange(cuts.shape[1])
    low = np.maximum.accumulate(np.maximum(cuts, 1) - places, axis=1) + places
    high = parts - cuts.shape[1] + places
    return np.asarray(np.minimum(low, high))


def _halves(product: PieceGemm, at: int) -> Iterator[PieceGemm]:
    """Yield a GEMM in two, cut at an interval; a local range that differs stays with the first."""
    begin, end = product.ranged
    for side in ((begin, at), (at, end)):
        local = side if product.local == product.ranged else product.local if side[0] == begin else None
        yield PieceGemm(side if product.compute else None, local, product.peers)


def _merged(one: PieceGemm, two: PieceGemm) -> PieceGemm | None:
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
