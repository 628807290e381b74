"""Search for a schedule that nobody wrote: structures by large-neighbourhood search, their numbers in batches.

A sketch is a structure: which intervals between cuts each move and each GEMM has, and who moves them. Its numbers are
the places of the cuts and the CUs of the kernels. Seeds are the presets (`chunked`, `shard_p2p` and their knobs), and
their chunks shared between DMA engines and a kernel; numbers are changed a few at a time, a batch of changes in one run
of the compiled engine. Then structures are changed: intervals cut in two, ranges split and merged, movers exchanged,
moves paused, GEMMs put elsewhere in the stream, the local shard divided; each with its numbers tuned, and accepted
where it is no longer than what was accepted some changes before (late acceptance). What binds the bound
(`search_spaces.chunk_costs`) says whether moves or GEMMs are changed more often; the search ends at the bound. The same
seed finds the same schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse import plugins
from dse_synthesis.sketches import Changes, Presets, Sketch, SketchSizes, TimedSketch
from dse_synthesis.steps import Step
from search_spaces.chunk_costs import piece_bound
from search_spaces.comm_knobs import CommEngineKnobs
from simulators.costs.transfer import library_cus
from simulators.hardware.machine import System
from simulators.taskgraph.symmetry import reduce_graph
from simulators.workloads.operators import Workload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
VERSION = "2"
"""Of the search; raise it with every change that finds other schedules."""
_ENGINE = "fluid"
_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # of a chunk that a kernel shares with engines
_EIGHTHS = (1, 2, 3, 4, 6, 8)  # of the CUs that the library takes
_FINEST = 1024  # parts of a shard, of which cuts are multiples
_SEEDS = 5  # structures that are improved
_BATCH = 64  # numbers of one structure that are run at once
_MEMORY = 8  # changes before which a structure is compared
_ENOUGH = 1.0005  # times the bound: nothing is left to gain


class Timing:
    """Makespans of sketches with numbers. runs: how many were computed."""

    def __init__(self, knobs: CommEngineKnobs, system: System, workload: Workload) -> None:
        self._knobs: Any = knobs
        self._system, self._workload = system, workload
        overlap = workload.overlap()
        # cuts are multiples of a row or a column: no finer than the smallest shard
        least = min(int(overlap.collective.rows) // system.node.num_gpus, int(overlap.collective.cols))
        # a power of two, as chunk counts of presets are
        parts = 1 << min(_FINEST, max(least, 1)).bit_length() - 1
        most_cus = int(np.min(library_cus(system, overlap.collective.pattern)))
        self.sizes = SketchSizes(overlap.order == "before", system.node.num_gpus - 1, parts, most_cus)
        self._engine = plugins.load("engine", _ENGINE)
        self.runs = 0

    def knobs(self, plan: TimedSketch) -> Any:
        """The knobs of a schedule with the steps of a plan."""
        return self._knobs.model_copy(update=self._values(plan.sketch, plan.cuts, plan.cus))

    def _values(self, sketch: Sketch, cuts: Sequence[Any], cus: Sequence[Any]) -> dict[str, Any]:
        return {
            "steps": tuple(self._steps(sketch)),
            "cut_dim": sketch.dim,
            "parts": self.sizes.parts,
            "cuts": (0, *cuts, self.sizes.parts),
            "kernels": tuple(cus[: sketch.kernels]),
            "masked": sketch.masked,
        }

    def _steps(self, sketch: Sketch) -> list[Step]:
        """Moves and GEMMs in an order in which none waits for a later one. A pause for what comes later is none."""
        left = [
            _step(move=(move.first, move.last), kernel=move.kernel, peers=move.peers or None, after=move.after)
            for move in sketch.moves
        ]
        steps, computed, ends = list[Step](), set[tuple[int, int]](), dict[int, int]()
        # queues of movers alone set the order: all moves can be submitted first
        if self.sizes.gathers and all(move.after is None for move in left):
            steps, left = left, []
        for product in sketch.products:
            step = _step(compute=product.compute, local=product.local, peers=product.peers or None)
            cells = set(step.cells(self.sizes.peers))
            if self.sizes.gathers:
                # a paused move has to follow the GEMM it waits for, so moves come just before they are needed
                _submit(self._due(left, cells), left, steps, ends)
            # the first GEMM on an interval stays (| takes values of the right side)
            ends = dict.fromkeys((part for _, part in cells), len(steps)) | ends
            steps.append(step)
            if not self.sizes.gathers:
                computed |= cells
                ready = [move for move in left if move.after is None or move.after in ends]
                _submit([move for move in ready if set(move.cells(self.sizes.peers)) <= computed], left, steps, ends)
        return steps

    def _due(self, left: Sequence[Step], cells: set[tuple[int, int]]) -> list[Step]:
        """Moves that bring something of a GEMM, and those that their movers have before them."""
        last = {
            move.kernel: place for place, move in enumerate(left) if not cells.isdisjoint(move.cells(self.sizes.peers))
        }
        # a queue is served in order: all before a needed move come along
        return [move for place, move in enumerate(left) if place <= last.get(move.kernel, -1)]

    def seconds(self, sketch: Sketch, cuts: Ints, cus: Ints) -> Floats:
        """Makespans [B] of a structure with inner cuts [B, I - 1] and CUs [B, K]."""
        self.runs += len(cuts)
        # one design is lowered with plain numbers, a batch with arrays [B]
        numbers = [[column if len(cuts) > 1 else int(column[0]) for column in table.T] for table in (cuts, cus)]
        plan = self._knobs.model_copy(update=self._values(sketch, *numbers))
        # symmetric peers are simulated once
        graph = reduce_graph(plan.lower(self._system, self._workload)).graph
        # a makespan that no number changes has no batch axis
        return np.broadcast_to(self._engine.totals(graph).makespan_s, len(cuts))

    def best(self, sketch: Sketch, cuts: Ints, cus: Ints) -> TimedSketch:
        """The best plan of a structure with some numbers."""
        seconds = self.seconds(sketch, cuts, cus)
        at = int(np.argmin(seconds))
        return TimedSketch(sketch, tuple(cuts[at].tolist()), tuple(cus[at].tolist()), float(seconds[at]))

    def even(self, sketch: Sketch, cus: Sequence[int] = ()) -> tuple[Ints, Ints]:
        """Cuts as even as they can be, and numbers of CUs that are tried."""
        cuts = np.arange(1, sketch.intervals) * self.sizes.parts // sketch.intervals
        tried = cus or sorted({max(1, self.sizes.most_cus * part // 8) for part in _EIGHTHS})
        # one row: engines have no CUs to try
        if not sketch.kernels:
            return cuts[None], np.empty((1, 0), np.int64)
        return np.repeat(cuts[None], len(tried), axis=0), np.repeat(np.array(tried)[:, None], sketch.kernels, axis=1)


class ScheduleSearch:
    """The search for one workload on one system. knobs: of a schedule with steps, that are replaced."""

    def __init__(self, knobs: CommEngineKnobs, system: System, workload: Workload, *, seed: int) -> None:
        self._timing, self._random = Timing(knobs, system, workload), np.random.default_rng(seed)
        self._sizes = self._timing.sizes
        bound = piece_bound(system, workload)
        self._bound_s, binds = float(bound.seconds), bound.names[int(bound.binds)]
        self._changes = Changes(self._sizes, self._random, of_moves=binds.startswith("links"))

    def knobs(self, evaluations: int) -> Any:
        """The knobs with the steps of the best plan; evaluations: structures that are run to improve seeds."""
        return self._timing.knobs(self._best(evaluations))

    def _best(self, evaluations: int) -> TimedSketch:
        """The best plan."""
        presets = Presets(self._sizes)
        seeds = [self._timing.best(sketch, *self._timing.even(sketch)) for sketch in presets.all()]
        ranked = sorted(seeds, key=lambda plan: plan.seconds)
        if self._sizes.gathers:
            ranked += [self._tuned_share(sketch) for sketch in presets.shared(ranked[0].sketch.dim)]
        tuned = sorted((self._tune(plan, 4) for plan in _different(ranked)), key=lambda plan: plan.seconds)
        best = tuned[0]
        for place, seed in enumerate(tuned[:2]):
            limit = evaluations * (2 if place == 0 else 3) // 3
            best = min(best, self._improved(seed, limit), key=lambda plan: plan.seconds)
        return best

    def _tuned_share(self, sketch: Sketch) -> TimedSketch:
        """The best plan of chunks that are shared, over the share and the CUs of the kernel."""
        count, cuts, cus = sketch.intervals // 2, list[Ints](), list[int]()
        for share in _SHARES:
            ends = np.arange(1, count + 1) * self._sizes.parts / count
            both = np.stack([ends - share * self._sizes.parts / count, ends], axis=1).reshape(-1)[:-1]
            for part in _EIGHTHS:
                cuts.append(np.rint(both).astype(np.int64))
                cus.append(max(1, self._sizes.most_cus * part // 8))
        table = _rising(np.stack(cuts), self._sizes.parts)
        return self._timing.best(sketch, table, np.array(cus)[:, None])

    def _tune(self, plan: TimedSketch, rounds: int) -> TimedSketch:
        """A plan with better numbers: in each round a batch of changes of a few of them."""
        # steps begin at an eighth of the shard and shrink where a round finds nothing better
        size = max(1, self._sizes.parts // 8)
        for _ in range(rounds):
            if not plan.cuts and not plan.cus:
                return plan
            cuts = np.repeat(np.array([plan.cuts], np.int64).reshape(1, -1), _BATCH, axis=0)
            cus = np.repeat(np.array([plan.cus], np.int64).reshape(1, -1), _BATCH, axis=0)
            if plan.cuts:
                self._shift(cuts, size)
            if plan.cus:
                # about half of the kernels change, by up to four CUs
                steps = self._random.integers(-4, 5, cus.shape) * (self._random.random(cus.shape) < 0.5)
                cus = np.clip(cus + steps, 1, self._sizes.most_cus)
            changed = self._timing.best(plan.sketch, _rising(cuts, self._sizes.parts), cus)
            # rounding is no gain
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
                # a power of the share: above 1 early chunks shrink, below 1 they grow; the ends stay
                row[:] = np.rint(self._sizes.parts * (row / self._sizes.parts) ** np.exp(self._random.normal(0, 0.3)))

    def _improved(self, plan: TimedSketch, limit: int) -> TimedSketch:
        """Late-acceptance hill climbing (Burke and Bykov, 2017) over structures, until so many were run."""
        accepted, best, memory, turn = plan, plan, [plan.seconds] * _MEMORY, 0
        begun = self._timing.runs
        while (
            # runs bound the effort: a change that is tuned costs a batch of them
            self._timing.runs - begun < limit * _BATCH // 4 and best.seconds > _ENOUGH * self._bound_s and turn < limit
        ):
            turn += 1
            changed = self._changed(accepted)
            if changed is None:
                continue
            # numbers are tuned only for structures that come near the best
            tuned = self._tune(changed, 1 if changed.seconds < 1.02 * best.seconds else 0)
            if tuned.seconds <= max(accepted.seconds, memory[turn % _MEMORY]):
                accepted = tuned
            memory[turn % _MEMORY] = accepted.seconds
            best = min(best, accepted, key=lambda one: one.seconds)
        # numbers were tuned a little on the way, and once more at the end
        return self._tune(best, 12)

    def _changed(self, plan: TimedSketch) -> TimedSketch | None:
        """A plan with one change of its structure, and its makespan; None where the change does not fit."""
        changed = self._changes.change(plan)
        if changed is None:
            return None
        cuts, cus = (np.array([numbers], np.int64).reshape(1, -1) for numbers in (changed.cuts, changed.cus))
        return self._timing.best(changed.sketch, cuts, cus)


_NOTHING: dict[str, Any] = dict.fromkeys(Step.model_fields)


def _step(**parts: Any) -> Step:
    """A step, not checked."""
    return Step.model_construct(**{**_NOTHING, **parts})


def _submit(moves: Sequence[Step], left: list[Step], steps: list[Step], ends: Mapping[int, int]) -> None:
    """Put moves among the steps; `after` becomes the number of the step that first computes the interval."""
    for move in moves:
        left.remove(move)
        steps.append(move if move.after is None else _step(**{**dict(move), "after": ends.get(move.after)}))


def _different(plans: Sequence[TimedSketch]) -> list[TimedSketch]:
    """The best plans, of structures that differ."""
    ranked = sorted(plans, key=lambda plan: plan.seconds)
    # the last entry of a key stays: reversed, it is the fastest of each structure
    return list({plan.sketch: plan for plan in reversed(ranked)}.values())[::-1][:_SEEDS]


def _rising(cuts: Ints, parts: int) -> Ints:
    """Cuts [B, I - 1] that rise strictly between 0 and `parts`."""
    places = np.arange(cuts.shape[1])
    # without their places, cuts need only not fall: a running maximum; then places are added back
    low = np.maximum.accumulate(np.maximum(cuts, 1) - places, axis=1) + places
    high = parts - cuts.shape[1] + places
    return np.asarray(np.minimum(low, high))
