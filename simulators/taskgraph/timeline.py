"""Results of an engine: issue and finish times of every task, or only the totals that metrics need; and the losses of
a schedule against the ideal in seconds, by counterfactual replays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dse.backend import Interval, Replay
from simulators.compiled import compile_lazily
from simulators.taskgraph.graph import Floats, TaskGraph

_SAME_INSTANT = 1e-12  # relative, as in the engines


@dataclass(frozen=True)
class Refusals:
    """Reasons why designs cannot be run exactly: code [B] is an index into `texts`, 0 for a design that can be run."""

    code: NDArray[np.int32]
    texts: tuple[str, ...] = ("",)

    def __getitem__(self, design: int) -> str:
        return str(self.texts[self.code[design]])


@dataclass(frozen=True)
class Totals:
    """Quantities that the metrics need of the runs of B designs, in seconds and bytes, by kind of task.

    Each is [B], or an array that broadcasts over the graph's grid of designs: closed forms depend on few of its axes.

    busy_s: time during which a task of the kind runs (the length of the union of its intervals). spent_s: sum over
    the tasks of the kind. cu_s: CU-seconds occupied. refused: None if every design was run.
    """

    makespan_s: Floats
    peak_staged_bytes: Floats
    cu_s: Floats
    busy_s: Mapping[str, Floats]
    spent_s: Mapping[str, Floats]
    refused: Refusals | None = None

    def flat(self, graph: TaskGraph) -> Totals:
        """The same with every quantity as [B]."""
        makespan_s, peak, cu_s = map(graph.flat, (self.makespan_s, self.peak_staged_bytes, self.cu_s))
        busy_s, spent_s = (
            {kind: graph.flat(column) for kind, column in by_kind.items()} for by_kind in (self.busy_s, self.spent_s)
        )
        return Totals(makespan_s, peak, cu_s, busy_s, spent_s, self.refused)


@dataclass(frozen=True)
class Timeline:
    """Issue and finish times [B, T] of every task in seconds; refused: None if every design was run."""

    graph: TaskGraph
    issued: Floats
    finished: Floats
    refused: Refusals | None = None

    def reason(self, design: int) -> str:
        """Reason why a design was refused, or ''."""
        return self.refused[design] if self.refused else ""

    @property
    def makespan(self) -> Floats:
        """Seconds [B] from the start to the last finish."""
        return np.asarray(self.finished.max(axis=1))

    def totals(self) -> Totals:
        """Compute the totals from the intervals."""
        graph, spans = self.graph, self.finished - self.issued
        places = {kind: graph.of_kind(kind) for kind in dict.fromkeys(graph.kinds)}
        return Totals(
            makespan_s=self.makespan,
            peak_staged_bytes=self._peak_staging(),
            cu_s=row_sum(graph["cus"] * spans),
            busy_s={kind: busy(self.issued[:, at], self.finished[:, at]) for kind, at in places.items()},
            spent_s={kind: row_sum(spans[:, at] * graph.members[at]) for kind, at in places.items()},
            refused=self.refused,
        )

    def _peak_staging(self) -> Floats:
        """Peak of the staged bytes [B].

        A buffer fills when its task is issued and is free once its consumer has finished; in one instant, buffers are
        freed first.
        """
        consumer = self.graph.consumer
        # a buffer whose consumer ends in this instant is free before others fill
        freed = np.where(consumer >= 0, self.finished[:, consumer] * (1 - _SAME_INSTANT), np.inf)
        size = self.graph["staged_bytes"]
        times = np.concatenate([freed, self.issued], axis=1)
        steps = np.concatenate([-size, size], axis=1)
        order = np.argsort(times, axis=1, kind="stable")  # of equal times, frees come first, as they are listed first
        return np.asarray(np.cumsum(np.take_along_axis(steps, order, axis=1), axis=1).max(axis=1))

    def intervals(self, design: int) -> Iterator[Interval]:
        """Yield the tasks of one design that take time, in order of issue."""
        graph = self.graph
        moved, flop, delay = (graph[name][design] for name in ("moved_bytes", "flop", "delay"))
        for task in np.argsort(self.issued[design], kind="stable"):
            start, finish = float(self.issued[design, task]), float(self.finished[design, task])
            if finish > start:  # tasks without time have no interval to show
                named = (graph.lanes[task], graph.tasks[task], graph.kinds[task])
                yield Interval(*named, start, finish, float(moved[task]), float(flop[task]), float(delay[task]))

    def critical_path(self, design: int) -> list[int]:
        """Tasks from the first to the last finish, each issued when the one before it finished: a predecessor, or the
        task that had its slot.
        """
        finished = self.finished[design]
        path = [int(np.argmax(finished))]  # ties go to the lower index
        while (before := self._let_go(design, path[-1])).size:
            path.append(int(before[np.argmax(finished[before])]))
        return path[::-1]

    def _let_go(self, design: int, task: int) -> NDArray[np.integer[Any]]:
        """Tasks that had to finish before another one was issued: its predecessors, and those of its pool."""
        before, pool = self.graph.predecessors(task), self.graph.pool
        if pool[task] < 0:
            return before
        issued, finished = self.issued[design], self.finished[design]
        # of the pool, tasks that were issued earlier and ended by then
        done = (finished <= issued[task] * (1 + _SAME_INSTANT)) & (issued < issued[task])
        return np.concatenate([before, np.flatnonzero((pool == pool[task]) & done & (finished > issued))])

    def limits(self, design: int) -> dict[str, float]:
        """Share of the makespan by the bounds of the tasks on the critical path: limiter, launch, contention."""
        graph, spent = self.graph, dict[str, float]()
        alone, delay = graph["work"][design] / graph.isolated_rate()[design], graph["delay"][design]
        for task in self.critical_path(design):
            span = self.finished[design, task] - self.issued[design, task]
            excess = max(0.0, span - delay[task] - alone[task])  # rounding of a task that ran alone
            parts = {
                graph.limiters[task]: alone[task],
                "launch": delay[task],
                "contention": excess,
            }
            for name, seconds in parts.items():
                spent[name] = spent.get(name, 0.0) + float(seconds)
        makespan = float(self.makespan[design])
        ordered = sorted(spent.items(), key=lambda item: -item[1])
        # what is left is rounding, or of no interest
        return {name: seconds / makespan for name, seconds in ordered if seconds > 1e-3 * makespan}

    def replay(self, design: int) -> Replay:
        """Intervals and limits of one design."""
        return Replay(tuple(self.intervals(design)), self.limits(design))


def busy(start: Floats, finish: Floats) -> Floats:
    """Length [B] of the union of intervals [B, N]."""
    if start.shape[1] == 0:
        return np.zeros(start.shape[0])
    order = np.argsort(start, axis=1, kind="stable")  # by start
    start, finish = np.take_along_axis(start, order, 1), np.take_along_axis(finish, order, 1)
    covered = np.maximum.accumulate(finish, axis=1)  # latest end so far
    before = np.concatenate([np.full((len(start), 1), -np.inf), covered[:, :-1]], axis=1)  # nothing before the first
    # of each interval, what lies after all before it
    return row_sum(np.maximum(finish - np.maximum(start, before), 0.0))


def row_sum(table: NDArray[Any]) -> Floats:
    """Row sums [B], always in one memory order, so that a row sums to the same bits in a batch as alone."""
    return np.asarray(np.ascontiguousarray(table).sum(axis=1), dtype=float)


@runtime_checkable
class Engine(Protocol):
    """Runs task graphs. A module of `simulators` (or an entry point of `dse.simulators`) offers one as `ENGINE`.

    batch: preferred number of designs in a call. exact: whether the engine computes what
    docs/explanation/engines.md defines. Another engine of ours leaves contention out: its makespan is a lower bound,
    and exact where nothing is contended.
    """

    version: str
    batch: int
    exact: bool

    def run(self, graph: TaskGraph) -> Timeline:
        """Issue and finish times of every task of every design; a design that cannot be run exactly is refused."""

    def totals(self, graph: TaskGraph) -> Totals:
        """Totals of the same runs: `self.run(graph).totals()`, unless the engine has a faster way."""


@runtime_checkable
class ForeignEngine(Engine, Protocol):
    """A simulator of others as an engine: what it computes is its own, and the tasks of all GPUs are given to it."""

    def absence(self) -> str:
        """Why it cannot run on this machine, with the way out, or ""."""

    def collective_s(self, kind: str, num_bytes: Floats, gpus: Floats, bytes_per_s: float, device: str = "") -> Floats:
        """Times [s] of N collectives among GPUs at a switch, whose ports have a rate each way.

        num_bytes [N]: of the larger buffer. device: name of the GPU in tables of measured times.
        """


LOSSES = ("contention_s", "decomposition_s", "starvation_s", "launch_s", "dependency_s")
_ROUNDING = 1e-12  # of the makespan: replays that are equal add the same durations in another order
Indices = NDArray[np.uint32]


def losses(graph: TaskGraph, makespan: Floats) -> dict[str, Floats]:
    """Compute `ideal_s` and the losses [s] of `LOSSES`, each [B], which add up to makespan [B] - ideal.

        ideal           max(time of the undivided GEMM, time of the collective over all links), each with the GPU alone
        contention      makespan - T1,  T1: every task has all CUs and links to itself
        decomposition   T1 - T2,        T2: and the chunks of the GEMM take as long together as the undivided GEMM
        starvation      T2 - T3,        T3: and every step of the collective uses all links, engines or CUs
        launch          T3 - T4,        T4: and no launch or set-up takes time
        dependency      T4 - ideal:     filling and draining the pipeline, and waiting for one another

    in this order. Each replay keeps the assumptions of those before it, so that the losses add up. A loss may be
    negative (chunks that fill their last wave better); one within the rounding error is 0. A replay is a longest path,
    because its tasks share no resource. The paper's ratios (FiCCO, arXiv:2512.10236) are: DIL = sum of the chunks'
    times alone / time of the undivided GEMM; CIL = sum of their times as run / sum of their times alone.
    """
    gemm = np.array([kind == "gemm" for kind in graph.kinds])
    at, none = graph.at, np.full(graph.num_tasks, -1, np.int32)
    # T2: chunks of the GEMM take their shares of the undivided one
    undivided = np.where(gemm, at["wide_s"], at["alone_s"])
    # T1, T2, T3, T4: (delay, time) columns; -1: no delay
    taken = [(at["delay"], at["alone_s"]), (at["delay"], undivided), (at["delay"], at["wide_s"]), (none, at["wide_s"])]
    # replays share most durations: a pair as one number, which sorts far faster than rows do
    count = len(graph.values)
    pairs = [(delay + 1).astype(np.int64) * count + seconds for delay, seconds in taken]
    codes, of = np.unique(np.concatenate(pairs), return_inverse=True)
    durations = np.empty((len(codes), *graph.shape))
    for row, code in zip(durations, codes.tolist(), strict=True):
        delay, seconds = divmod(code, count)
        row[:] = graph.values[seconds] + (graph.values[delay - 1] if delay else 0.0)
    # equal replays are run once
    rows = list(of.reshape(len(taken), -1))
    first = {row.tobytes(): row for row in rows}
    replays, replay_of = np.stack(list(first.values())), np.array([list(first).index(row.tobytes()) for row in rows])
    is_last = np.ones(graph.num_tasks, np.bool_)
    is_last[graph.pred] = False  # the makespan is at a task that nothing waits for
    structure = (part.astype(np.uint32) for part in (graph.pred_ptr, graph.pred, replays, replay_of.reshape(-1)))
    result, ideal_s = np.empty((len(LOSSES), graph.num_designs)), ideal(graph)
    ends = np.array(makespan), np.array(ideal_s)  # what cannot be written would be compiled for anew
    _replay(*structure, is_last, durations.reshape(-1), *ends, _ROUNDING, result.reshape(-1))
    return {"ideal_s": ideal_s, **dict(zip(LOSSES, result, strict=True))}


def ideal(graph: TaskGraph) -> Floats:
    """Time [B] of the slower of GEMM and collective [s] on the busiest GPU, each undivided and with the GPU alone."""
    gemm, transfers = graph.of_kind("gemm"), graph.of_kind("transfer")
    result: Floats = np.zeros(())  # none of either: 0
    for gpu in np.unique(graph.gpu):
        for tasks in (gemm, transfers):
            result = np.maximum(result, graph.grid_total("ideal_s", tasks[graph.gpu[tasks] == gpu]))
    return graph.flat(result)


@compile_lazily
def _replay(  # noqa: C901, PLR0912, PLR0913, PLR0917
    pred_ptr: Indices,
    pred: Indices,
    duration_of: Indices,
    replay_of: Indices,
    is_last: NDArray[np.bool_],
    durations: Floats,
    makespan: Floats,
    ideal_s: Floats,
    rounding: float,
    result: Floats,
) -> None:
    """Losses [L, B] between the makespan and the longest paths of R replays, and the ideal; duration_of: [R, T].

    Arrays are flat, and indices unsigned: so the inner loops run in vector lanes.
    """
    one, stride = np.uint64(1), np.uint64(256)  # designs side by side: their times stay in the nearest cache
    replays, tasks = np.uint64(duration_of.shape[0]), np.uint64(duration_of.shape[1])
    designs, begin = np.uint64(makespan.size), np.uint64(0)
    finished, start, longest = np.empty(tasks * stride), np.empty(stride), np.empty(replays * stride)
    before_s, after_s = np.empty(stride), np.empty(stride)
    while begin < designs:
        width = min(stride, designs - begin)
        for replay in range(replays):
            best = replay * stride
            for i in range(width):
                longest[best + i] = 0.0
            for task in range(tasks):
                first, last, ends = np.uint64(pred_ptr[task]), np.uint64(pred_ptr[task + one]), task * stride
                taken = np.uint64(duration_of[replay, task]) * designs + begin
                if first == last:  # no predecessor, one, or several: the first two are most, and need no maximum
                    for i in range(width):
                        finished[ends + i] = durations[taken + i]
                elif first + one == last:
                    before = np.uint64(pred[first]) * stride
                    for i in range(width):
                        finished[ends + i] = finished[before + i] + durations[taken + i]
                else:
                    before = np.uint64(pred[first]) * stride
                    for i in range(width):
                        start[i] = finished[before + i]
                    for j in range(first + one, last):
                        before = np.uint64(pred[j]) * stride
                        for i in range(width):
                            ended, latest = finished[before + i], start[i]
                            start[i] = ended if ended > latest else latest
                    for i in range(width):
                        finished[ends + i] = start[i] + durations[taken + i]
                if is_last[task]:  # else a later task ends later
                    for i in range(width):
                        ended, latest = finished[ends + i], longest[best + i]
                        longest[best + i] = ended if ended > latest else latest
        for i in range(width):
            before_s[i] = makespan[begin + i]
        for loss in range(np.uint64(result.size) // designs):
            lost = loss * designs + begin
            if loss < np.uint64(replay_of.size):  # the last loss is against the ideal, which is no replay
                best = np.uint64(replay_of[loss]) * stride
                for i in range(width):
                    after_s[i] = longest[best + i]
            else:
                for i in range(width):
                    after_s[i] = ideal_s[begin + i]
            for i in range(width):
                seconds = before_s[i] - after_s[i]
                # durations added in another order differ by rounding: no loss
                result[lost + i] = seconds if abs(seconds) > rounding * makespan[begin + i] else 0.0
                before_s[i] = after_s[i]  # each loss is against the replay before it
        begin += stride
