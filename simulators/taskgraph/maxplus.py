"""Closed forms of pipelines: a makespan is the longest of a few sums.

Where every task runs at its rate alone, and no task waits for a slot,

    finish_t = max over predecessors p of finish_p + delay_t + work_t / rate_t

is a max-plus polynomial in the D distinct durations of the graph: the largest of P sums, each counting how often a
duration lies on one path (Baccelli et al., Synchronization and Linearity, 1992, §3). Paths that are never the longest,
whatever the durations, are left out; a regular pipeline of any number of steps keeps two or three. The polynomials
depend only on the structure; a design then costs P * D multiplications.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compile_lazily
from simulators.taskgraph.graph import Floats, TaskGraph
from simulators.taskgraph.timeline import Timeline, Totals

Flags = NDArray[np.bool_]
Places = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class TaskOrder:
    """The partial order of T tasks. ahead [T, T]: whether the second task is done before the first is issued."""

    ahead: Flags

    @classmethod
    def of(cls, graph: TaskGraph) -> TaskOrder:
        """The transitive closure of the dependencies."""
        ahead = np.zeros((graph.num_tasks, graph.num_tasks), np.bool_)
        for task in range(graph.num_tasks):
            before = graph.predecessors(task)
            ahead[task, before] = True
            ahead[task] |= ahead[before].any(axis=0)  # predecessors are complete: tasks are in topological order
        return cls(ahead)

    def comparable(self, first: Places, second: Places) -> Flags:
        """Flags [len(first), len(second)] of the pairs in which one task runs before the other."""
        return np.asarray(self.ahead[np.ix_(first, second)] | self.ahead[np.ix_(second, first)].T)

    def is_chain(self, tasks: Places) -> bool:
        """Return whether no two of the tasks can ever run at once."""
        # a task is not ordered with itself
        return bool((self.comparable(tasks, tasks) | np.eye(len(tasks), dtype=np.bool_)).all())

    def crowds(self, tasks: Places, demands: Sequence[int]) -> set[tuple[frozenset[int], ...]]:
        """Upper bound of the simultaneous demand on a resource, as sums of maxima of demands.

        demands: index of the demand of each task that uses the resource. The tasks active at any time are some task
        and, of each chain of the others, at most one task that is not ordered with it. Each element of the result is
        the demand of such a task and, chain by chain, the demands of which the largest may add to it.
        """
        chains = self._chains(tasks)
        beside = ~self.comparable(tasks, tasks) & ~np.eye(len(tasks), dtype=np.bool_)  # pairs that may run at once
        numbers = np.asarray(demands)
        crowds = set()
        for index in range(len(tasks)):
            # of a chain, at most one task runs at a time: the largest demand counts
            companions = (frozenset(numbers[chain[beside[index, chain]]].tolist()) for chain in chains)
            crowds.add((frozenset([demands[index]]), *(group for group in companions if group)))
        return crowds

    def _chains(self, tasks: Places) -> list[NDArray[np.intp]]:
        """Partition of the tasks (by their places) into chains, greedily."""
        chains: list[list[int]] = []
        for place, task in enumerate(tasks):
            # behind the last of a chain, so behind all of it
            fitting = (chain for chain in chains if self.ahead[task, tasks[chain[-1]]])
            chain = next(fitting, None)
            if chain is None:
                chains.append([place])
            else:
                chain.append(place)
        return [np.array(chain) for chain in chains]


_MOST_TASKS, _MOST_DURATIONS, _MOST_PATHS = 1024, 64, 64  # no closed form beyond
Paths = NDArray[np.int64]


@dataclass(frozen=True)
class Durations:
    """Distinct times that tasks take alone: columns over the grid [s], and the column of each task."""

    columns: list[Floats]
    of: list[int]

    @classmethod
    def among(cls, graph: TaskGraph) -> Durations:
        """Delay plus the time of the work at the rate alone, of each task; equal durations share a column."""
        index: dict[tuple[int, int, int], int] = {}
        columns: list[Floats] = []
        of = []
        alone, at = graph.alone(), graph.at
        for delay, work, (number, rate) in zip(at["delay"].tolist(), at["work"].tolist(), alone, strict=True):
            if (delay, work, number) not in index:  # equal columns give equal durations, whatever the design
                index[delay, work, number] = len(columns)
                amount = graph.values[work]
                with np.errstate(invalid="ignore"):
                    # 0 / inf or 0 / 0: no work, no time
                    columns.append(graph.values[delay] + np.where(amount > 0, amount / rate, 0.0))
            of.append(index[delay, work, number])
        return cls(columns, of)


@dataclass(frozen=True)
class Form:
    """Closed form of a graph by its structure, for any numbers. refusal: why it has no closed form, or "".

    makespan, busy by kind: paths [P, D]; the longest is the time. crowds by resource: the uses (by index) that may be
    active at once, as sums of maxima.
    """

    refusal: str
    makespan: Paths
    busy: Mapping[str, Paths]
    crowds: Mapping[int, set[tuple[frozenset[int], ...]]]
    staging: _StagingTasks | None = None


@dataclass(frozen=True)
class IsolatedGraph:
    """A graph whose tasks run at their rates alone, with its durations and its closed form."""

    graph: TaskGraph
    seconds: Durations
    form: Form

    @classmethod
    def of(cls, graph: TaskGraph) -> IsolatedGraph:
        """Analyse any graph; `form.refusal` gives the reason where it has no closed form."""
        seconds = Durations.among(graph)
        return cls(graph, seconds, _cached_form(graph, seconds))

    def timeline(self) -> Timeline:
        """Timeline with every task at the end of its longest path."""
        graph, seconds = self.graph, self.seconds
        alone = graph.dense([seconds.columns[index] for index in seconds.of])
        issued, finished = np.zeros_like(alone), np.zeros_like(alone)
        for task in range(graph.num_tasks):
            before = graph.predecessors(task)
            if before.size:
                issued[:, task] = finished[:, before].max(axis=1)
            finished[:, task] = issued[:, task] + alone[:, task]
        return Timeline(graph, issued, finished)

    def totals(self) -> Totals:
        """Totals by closed forms, over the axes that each depends on; meaningless where there is no form."""
        graph, form, seconds = self.graph, self.form, self.seconds
        durations = graph.rows(seconds.columns)
        peak = _peak_staging(graph, form, seconds=seconds, durations=durations)
        spent = {kind: _task_seconds(graph, seconds, kind) for kind in dict.fromkeys(graph.kinds)}
        return Totals(
            makespan_s=_longest_path(form.makespan, seconds.columns, durations),
            # some task takes no time: then only times give the order
            peak_staged_bytes=self.timeline().totals().peak_staged_bytes if peak is None else peak,
            cu_s=_cu_seconds(graph, seconds),
            busy_s={
                kind: _longest_path(form.busy.get(kind, form.makespan), seconds.columns, durations) for kind in spent
            },
            spent_s=spent,
        )


_forms: dict[Any, Form] = {}
_MOST_FORMS = 512  # of structures: a sweep meets few, and a form is small


def _cached_form(graph: TaskGraph, seconds: Durations) -> Form:
    """Closed form of a structure, from a cache that the batches of a sweep share."""
    arrays = (graph.pred_ptr, graph.pred, graph.pool, graph.slots, graph.use_task, graph.use_resource, graph.slowed)
    names = ("use", "cap", "capacity", "work", "staged_bytes")
    columns = (*(graph.at[name] for name in names), graph.consumer, _staging_tasks(graph), np.array(seconds.of))
    key = (tuple(np.asarray(array).tobytes() for array in (*arrays, *columns)), graph.kinds)
    if key not in _forms:
        if len(_forms) >= _MOST_FORMS:
            _forms.pop(next(iter(_forms)))  # the oldest: dictionaries keep the order of insertion
        _forms[key] = closed_form(graph, seconds.of)
    return _forms[key]


def closed_form(graph: TaskGraph, duration: Sequence[int]) -> Form:
    """Closed form of a graph whose task t takes the time of index `duration[t]` alone."""
    nothing = np.zeros((1, max(duration) + 1), np.int64)
    # the order of tasks is a matrix [T, T], paths are rows of D
    if graph.num_tasks > _MOST_TASKS or nothing.shape[1] > _MOST_DURATIONS:
        size = f"more than {_MOST_TASKS} tasks or {_MOST_DURATIONS} different durations"
        return Form(f"the graph has {size}", nothing, {}, {})
    order = TaskOrder.of(graph)
    for pool, name in enumerate(graph.pools):
        pooled = np.flatnonzero(graph.pool == pool)
        # more tasks at once than slots: one would wait
        if max(map(len, order.crowds(pooled, [0] * pooled.size)), default=0) > graph.slots[pool]:
            return Form(f"tasks may wait for a slot of {name}", nothing, {}, {})
    paths = _paths(graph, duration)
    makespan = None if paths is None else _paths_to_last(order, np.arange(graph.num_tasks), paths)
    if paths is None or makespan is None:
        return Form(f"more than {_MOST_PATHS} paths may be the longest", nothing, {}, {})
    busy = {
        kind: _busy(graph, kind, duration=duration, order=order, paths=paths) for kind in dict.fromkeys(graph.kinds)
    }
    if unknown := [kind for kind, sums in busy.items() if sums is None]:
        return Form(f"tasks of kind {unknown[0]} overlap irregularly", nothing, {}, {})
    crowds = {resource: _crowds(graph, resource, order) for resource in range(len(graph.resources))}
    busy_paths = {kind: sums for kind, sums in busy.items() if sums is not None}
    return Form("", makespan, busy_paths, crowds, _StagingTasks.of(graph, order))


def _paths(graph: TaskGraph, duration: Sequence[int]) -> list[Paths] | None:
    """Paths [P, D] that may be the longest to the finish of each task; None if they are too many."""
    paths: list[Paths] = []
    steps = np.eye(max(duration) + 1, dtype=np.int64)  # a path counts a duration once more
    for task, column in enumerate(duration):
        before = graph.predecessors(task)
        start = np.concatenate([paths[index] for index in before]) if before.size else 0 * steps[:1]  # the empty path
        pruned = _prune_paths(start)
        if pruned is None:
            return None
        paths.append(pruned + steps[column])
    return paths


def _paths_to_last(order: TaskOrder, tasks: NDArray[np.intp], paths: Sequence[Paths]) -> Paths | None:
    """Paths to the last of some tasks; None if they are too many."""
    # tasks that none of the others waits for: a later one ends later
    last = tasks[~order.ahead[np.ix_(tasks, tasks)].any(axis=0)]
    return _prune_paths(np.concatenate([paths[task] for task in last]))


def _prune_paths(paths: Paths) -> Paths | None:
    """Drop the paths that are never the longest: those nowhere above another path, or above a mean of two others.

    Returns None if more than `_MOST_PATHS` are left before the means are considered.
    """
    paths = np.unique(paths, axis=0)  # many tasks join the same paths
    if len(paths) == 1:
        return paths
    if len(paths) > 16 * _MOST_PATHS:  # comparing all pairs takes their square
        return None
    # nowhere above another path: never longer, as durations are not negative
    below = (paths[:, None] <= paths[None]).all(axis=2) & ~np.eye(len(paths), dtype=np.bool_)
    paths = paths[~below.any(axis=1)]
    if len(paths) < 3 or len(paths) > _MOST_PATHS:  # a mean needs two others
        return paths if len(paths) < 3 else None
    first, second = np.triu_indices(len(paths), 1)
    apart, short = paths[first] - paths[second], paths[:, None] - paths[second]  # p is below l first + (1 - l) second
    with np.errstate(divide="ignore", invalid="ignore"):
        share = short / apart  # least and largest weight of the mean, in each duration
    least = np.where(apart > 0, share, 0.0).max(axis=2, initial=0.0)
    most = np.where(apart < 0, share, 1.0).min(axis=2, initial=1.0)
    # rounding of the quotients; where both are equal, p must not be above
    fits = (least <= most + 1e-12) & ((apart != 0) | (short <= 0)).all(axis=2)
    index = np.arange(len(paths))[:, None]
    # a path is no mean with itself
    return np.asarray(paths[~(fits & (index != first) & (index != second)).any(axis=1)])


def _busy(
    graph: TaskGraph, kind: str, *, duration: Sequence[int], order: TaskOrder, paths: Sequence[Paths]
) -> Paths | None:
    """Paths whose longest is the time during which a task of the kind runs; None if there is no such closed form.

    A chain is busy for the sum of its tasks. Tasks that wait only for tasks of their kind are busy from the start to
    their last finish. If they also wait for a chain of other tasks that never runs beside them, the time of that chain
    is subtracted.
    """
    tasks = graph.of_kind(kind)
    if order.is_chain(tasks):
        return _total(duration, tasks)
    # other kinds that the kind waits for, directly or not
    awaited = np.setdiff1d(np.flatnonzero(order.ahead[tasks].any(axis=0)), tasks)
    if order.is_chain(awaited) and order.comparable(awaited, tasks).all():
        finish = _paths_to_last(order, tasks, paths)
        # they run in turn, so that their time is not of the kind
        return None if finish is None else finish - _total(duration, awaited)
    return None


def _total(duration: Sequence[int], tasks: NDArray[np.intp]) -> Paths:
    """Number of tasks with each duration [1, D]."""
    return np.bincount(np.asarray(duration)[tasks], minlength=max(duration) + 1)[None]


def _crowds(graph: TaskGraph, resource: int, order: TaskOrder) -> set[tuple[frozenset[int], ...]]:
    """Uses of a resource that may be active at once; equal uses are represented by the first of them."""
    # tasks without work never use the resource
    works = [bool((graph.values[column] > 0).any()) for column in graph.at["work"]]
    uses = [int(use) for use in np.flatnonzero(graph.use_resource == resource) if works[graph.use_task[use]]]
    numbers = [number for number, _ in graph.alone()]
    first: dict[tuple[int, int], int] = {}
    # equal use and rate: equal demand
    demands = [first.setdefault((int(graph.at["use"][use]), numbers[graph.use_task[use]]), use) for use in uses]
    return order.crowds(graph.use_task[uses], demands)


def _task_seconds(graph: TaskGraph, seconds: Durations, kind: str) -> Floats:
    tasks = graph.of_kind(kind)
    # a reduced task runs once for each member
    counts = np.bincount(np.asarray(seconds.of)[tasks], weights=graph.members[tasks], minlength=len(seconds.columns))
    return _weighted(counts, seconds.columns)


def _cu_seconds(graph: TaskGraph, seconds: Durations) -> Floats:
    """CU-seconds, broadcasting over the grid."""
    counts = Counter(zip(graph.at["cus"].tolist(), seconds.of, strict=True))
    parts = [count * graph.values[cus] * seconds.columns[duration] for (cus, duration), count in counts.items()]
    return np.asarray(sum(parts), float)


@dataclass(frozen=True)
class _StagingTasks:
    """Tasks that may hold staged bytes at once; the total peaks when one of the S staging tasks is issued.

    By then the staging tasks ahead of it have been issued and the consumers ahead of it have finished: `surely` [S, Z]
    counts the buffers then held of each of Z sizes. Tasks and consumers that are not ordered with it, `issued` and
    `freed` (CSR; places among the staging tasks and the H consumers), count by their times. held [H, Z]: number of
    buffers of each size that a consumer frees.
    """

    tasks: NDArray[np.intp]
    consumers: NDArray[np.intp]
    size: NDArray[np.intp]
    surely: Floats
    held: Floats
    issued_ptr: NDArray[np.intp]
    issued: NDArray[np.intp]
    freed_ptr: NDArray[np.intp]
    freed: NDArray[np.intp]

    @classmethod
    def of(cls, graph: TaskGraph, order: TaskOrder) -> _StagingTasks:
        """Derive the counts from the order of the tasks."""
        tasks = _staging_tasks(graph)
        sizes, size = np.unique(graph.at["staged_bytes"][tasks], return_inverse=True)
        consumers = np.unique(graph.consumer[tasks][graph.consumer[tasks] >= 0]).astype(np.intp)
        one_hot = np.eye(sizes.size)[size]
        freed = np.array([one_hot[graph.consumer[tasks] == consumer].sum(axis=0) for consumer in consumers])
        freed = freed.reshape(consumers.size, sizes.size)
        before, done = order.ahead[np.ix_(tasks, tasks)], order.ahead[np.ix_(tasks, consumers)]
        # buffers of tasks ahead and its own, less those that consumers ahead have freed
        surely = (before + np.eye(tasks.size)) @ one_hot - done @ freed
        other = ~order.comparable(tasks, tasks) & ~np.eye(tasks.size, dtype=np.bool_)
        running = ~order.comparable(tasks, consumers)
        return cls(tasks, consumers, size.reshape(-1), surely, freed, *_csr(other), *_csr(running))


def _staging_tasks(graph: TaskGraph) -> NDArray[np.intp]:
    holds = np.array([bool((column > 0).any()) for column in graph.values])
    return np.flatnonzero(holds[graph.at["staged_bytes"]])


def _csr(matrix: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    columns = np.ascontiguousarray(np.nonzero(matrix)[1])  # a view of another layout would be compiled for anew
    return np.concatenate([[0], np.cumsum(matrix.sum(axis=1))]).astype(np.intp), columns


def _peak_staging(graph: TaskGraph, form: Form, *, seconds: Durations, durations: Floats) -> Floats | None:
    """Peak of the staged bytes [B]; None if some task takes no time, so that its place among the others is open."""
    staging = form.staging
    if staging is None or not staging.tasks.size:
        return np.zeros(graph.num_designs)
    if not (durations > 0).all():  # instants of tasks without time are not ordered by the sums
        return None
    sizes = np.unique(graph.at["staged_bytes"][staging.tasks])
    peaks, live = np.empty(graph.num_designs), graph.rows([graph.values[column] for column in sizes])
    structure = (graph.pred_ptr.astype(np.intp), graph.pred.astype(np.intp), np.array(seconds.of, np.intp))
    parts = (staging.tasks, staging.consumers, staging.size, staging.surely, staging.held)
    pairs = (staging.issued_ptr, staging.issued, staging.freed_ptr, staging.freed)
    _stage(*structure, *parts, *pairs, durations.reshape(-1), live.reshape(-1), peaks)
    return peaks


def _longest_path(paths: Paths, columns: Sequence[Floats], durations: Floats) -> Floats:
    """Length of the longest path [B]; of a single one over the grid, where most columns are short."""
    return longest(paths, durations) if len(paths) > 1 else _weighted(paths[0], columns)


def _weighted(counts: Sequence[float] | Paths | Floats, columns: Sequence[Floats]) -> Floats:
    """Sum of counts times columns, broadcasting over the grid."""
    return np.asarray(sum(count * column for count, column in zip(counts, columns, strict=True) if count), float)


def longest(paths: Paths, durations: Floats) -> Floats:
    """Maximum [B] over the paths of counts [P, D] @ durations [D, B]."""
    result = np.zeros(durations.shape[1])
    # an empty path is 0, which the result holds already
    number = [np.flatnonzero(path) for path in paths if path.any()]
    count = [path[which] for path, which in zip(paths[paths.any(axis=1)], number, strict=True)]
    ptr = np.concatenate([[0], np.cumsum([which.size for which in number])]).astype(np.intp)
    if number:
        _longest(ptr, np.concatenate(number).astype(np.intp), np.concatenate(count).astype(float), durations, result)
    return result


@compile_lazily
def _longest(ptr: Paths, number: Paths, count: Floats, durations: Floats, result: Floats) -> None:
    stride = 512  # designs at a time, so that partial sums stay in the nearest cache
    total = np.empty(stride)
    for begin in range(0, result.size, stride):
        width = min(stride, result.size - begin)
        best, wide = result[begin : begin + width], durations[:, begin : begin + width]
        for path in range(ptr.size - 1):
            for i in range(width):  # row by row, in vector lanes
                total[i] = 0.0
            final = ptr[path + 1] - 1
            for j in range(ptr[path], final):
                times, row = count[j], number[j]
                for i in range(width):
                    total[i] += times * wide[row, i]
            times, row = count[final], number[final]  # the last row and the maximum in one loop: one pass less
            for i in range(width):
                length = total[i] + times * wide[row, i]
                best[i] = length if length > best[i] else best[i]


@compile_lazily
def _stage(  # noqa: C901, PLR0912, PLR0913, PLR0917
    pred_ptr: Paths,
    pred: Paths,
    duration_of: Paths,
    tasks: Paths,
    consumers: Paths,
    size: Paths,
    surely: Floats,
    freed_counts: Floats,
    issued_ptr: Paths,
    issued_also: Paths,
    freed_ptr: Paths,
    freed_also: Paths,
    durations: Floats,
    sizes: Floats,
    peaks: Floats,
) -> None:
    """Peaks [B] from durations [D, B] and sizes [Z, B], both flat; indices are unsigned, for vector lanes."""
    unit, stride = np.uint64(1), np.uint64(128)  # designs side by side: their times stay in the nearest cache
    num_tasks, designs, begin = np.uint64(duration_of.size), np.uint64(peaks.size), np.uint64(0)
    num_sizes, num_consumers = np.uint64(surely.shape[1]), np.uint64(consumers.size)
    issued, finished = np.empty(num_tasks * stride), np.empty(num_tasks * stride)
    frees, latest, level = np.empty(num_consumers * stride), np.empty(stride), np.empty(stride)
    while begin < designs:
        width = min(stride, designs - begin)
        for task in range(num_tasks):
            mine, taken = task * stride, np.uint64(duration_of[task]) * designs + begin
            for i in range(width):
                issued[mine + i] = 0.0
            for j in range(np.uint64(pred_ptr[task]), np.uint64(pred_ptr[task + unit])):
                before = np.uint64(pred[j]) * stride
                for i in range(width):
                    ended, start = finished[before + i], issued[mine + i]
                    issued[mine + i] = ended if ended > start else start
            for i in range(width):
                finished[mine + i] = issued[mine + i] + durations[taken + i]
        for c in range(num_consumers):
            mine = c * stride
            for i in range(width):
                frees[mine + i] = 0.0
            for z in range(num_sizes):
                times, row = freed_counts[c, z], z * designs + begin
                for i in range(width):
                    frees[mine + i] += times * sizes[row + i]
        for i in range(width):
            peaks[begin + i] = 0.0
        for s in range(np.uint64(tasks.size)):
            mine = np.uint64(tasks[s]) * stride
            for i in range(width):
                latest[i] = issued[mine + i] * (1.0 + 1e-12)  # a buffer whose consumer ends in this instant is free
                level[i] = 0.0
            for z in range(num_sizes):
                times, row = surely[s, z], z * designs + begin
                for i in range(width):
                    level[i] += times * sizes[row + i]
            for j in range(np.uint64(issued_ptr[s]), np.uint64(issued_ptr[s + unit])):
                other = np.uint64(issued_also[j])
                mine, row = np.uint64(tasks[other]) * stride, np.uint64(size[other]) * designs + begin
                for i in range(width):
                    more = sizes[row + i]
                    level[i] += more if issued[mine + i] <= latest[i] else 0.0
            for j in range(np.uint64(freed_ptr[s]), np.uint64(freed_ptr[s + unit])):
                other = np.uint64(freed_also[j])
                mine, row = np.uint64(consumers[other]) * stride, other * stride
                for i in range(width):
                    less = frees[row + i]
                    level[i] -= less if finished[mine + i] <= latest[i] else 0.0
            for i in range(width):
                most, now = peaks[begin + i], level[i]
                peaks[begin + i] = now if now > most else most
        begin += stride
