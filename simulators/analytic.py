"""The closed form of pipelines: a makespan is the longest of few sums, exact where nothing is over-subscribed.

Where no resource can be over-subscribed and nobody waits for a slot, every task runs at the rate it has alone, and

    finish_t = max over predecessors p of finish_p + delay_t + work_t / rate_t

is a max-plus polynomial in the D distinct durations of the graph: the largest of P sums, each counting how often a
duration lies on one path (Baccelli et al., Synchronization and Linearity, 1992, §3). Paths that are never the longest,
whatever the durations, are left out; a regular pipeline of any number of steps keeps two or three. The polynomials
depend on the structure alone; a design then costs P * D multiplications.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.compiled import compiled
from simulators.graph import Floats, TaskGraph
from simulators.order import Order
from simulators.timeline import Refused, Timeline, Totals

_SLACK = 1e-9  # relative: a resource used to exactly its capacity is not over-subscribed
_MOST_TASKS, _MOST_PATHS = 1024, 64  # beyond, a closed form is none
Paths = NDArray[np.int64]


class AnalyticEngine:
    """Refuses what might share a resource beyond its capacity, wait for a slot, or has no small closed form."""

    version = "2"
    batch = 262144

    def run(self, graph: TaskGraph) -> Timeline:
        """Time every task alone on its longest path."""
        seconds = _Durations.among(graph)
        alone = graph.dense([seconds.columns[index] for index in seconds.of])
        issued, finished = np.zeros_like(alone), np.zeros_like(alone)
        for task in range(graph.num_tasks):
            before = graph.predecessors(task)
            if before.size:
                issued[:, task] = finished[:, before].max(axis=1)
            finished[:, task] = issued[:, task] + alone[:, task]
        return Timeline(graph, issued, finished, _refused(graph, _remembered(graph, seconds)))

    def totals(self, graph: TaskGraph) -> Totals:
        """By closed forms, design by design."""
        seconds = _Durations.among(graph)
        form = _remembered(graph, seconds)
        durations = np.ascontiguousarray(graph.dense(seconds.columns).T)
        spent = {kind: _spent(graph, seconds, kind) for kind in dict.fromkeys(graph.kinds)}
        return Totals(
            makespan_s=longest(form.makespan, durations),
            peak_staged_bytes=_peak_staging(graph, seconds, durations),
            cu_s=_occupied(graph, seconds),
            busy_s={kind: longest(form.busy.get(kind, form.makespan), durations) for kind in spent},
            spent_s=spent,
            refused=_refused(graph, form),
        )


@dataclass(frozen=True)
class _Durations:
    """Distinct times that tasks take alone: columns over the grid [s], and which one each task takes."""

    columns: list[Floats]
    of: list[int]

    @classmethod
    def among(cls, graph: TaskGraph) -> _Durations:
        """Delay, then work at the rate a task has alone; equal ones are one."""
        known: dict[tuple[int, int, int], int] = {}
        columns: list[Floats] = []
        of = []
        alone, at = graph.alone(), graph.at
        for delay, work, (number, rate) in zip(at["delay"].tolist(), at["work"].tolist(), alone, strict=True):
            if (delay, work, number) not in known:
                known[delay, work, number] = len(columns)
                amount = graph.values[work]
                with np.errstate(invalid="ignore"):
                    columns.append(graph.values[delay] + np.where(amount > 0, amount / rate, 0.0))
            of.append(known[delay, work, number])
        return cls(columns, of)


@dataclass(frozen=True)
class Form:
    """What the structure of a graph says whatever its numbers. refusal: why it has no closed form, or "".

    makespan, busy by kind: paths [P, D]; the longest is the time. crowds by resource: the uses (by index) that may be
    at work at once, as sums of maxima.
    """

    refusal: str
    makespan: Paths
    busy: Mapping[str, Paths]
    crowds: Mapping[int, set[tuple[frozenset[int], ...]]]


_forms: dict[Any, Form] = {}
_MOST_FORMS = 512


def _remembered(graph: TaskGraph, seconds: _Durations) -> Form:
    """The form of a structure; the batches of a sweep share it."""
    arrays = (graph.pred_ptr, graph.pred, graph.pool, graph.slots, graph.use_task, graph.use_resource, graph.slowed)
    columns = (graph.at["use"], graph.at["cap"], graph.at["capacity"], np.array(seconds.of))
    key = (tuple(array.tobytes() for array in (*arrays, *columns)), graph.kinds)
    if key not in _forms:
        if len(_forms) >= _MOST_FORMS:
            _forms.pop(next(iter(_forms)))
        _forms[key] = closed_form(graph, seconds.of)
    return _forms[key]


def closed_form(graph: TaskGraph, duration: Sequence[int]) -> Form:
    """The form of a graph whose task t takes the time number `duration[t]` alone."""
    nothing = np.zeros((1, max(duration) + 1), np.int64)
    if len(graph.slowed):
        return Form("a contention law changes rates", nothing, {}, {})
    if graph.num_tasks > _MOST_TASKS:
        return Form(f"it has more than {_MOST_TASKS} tasks", nothing, {}, {})
    order = Order.of(graph)
    for pool, name in enumerate(graph.pools):
        pooled = np.flatnonzero(graph.pool == pool)
        if max(map(len, order.crowds(pooled, [0] * pooled.size)), default=0) > graph.slots[pool]:
            return Form(f"tasks may wait for a slot of {name}", nothing, {}, {})
    paths = _paths(graph, duration)
    if paths is None:
        return Form(f"more than {_MOST_PATHS} paths may be the longest", nothing, {}, {})
    busy = {
        kind: _busy(graph, kind, duration=duration, order=order, paths=paths) for kind in dict.fromkeys(graph.kinds)
    }
    if unknown := [kind for kind, found in busy.items() if found is None]:
        return Form(f"tasks of kind {unknown[0]} overlap irregularly", nothing, {}, {})
    crowds = {resource: _crowds(graph, resource, order) for resource in range(len(graph.resources))}
    makespan = _pruned(np.concatenate(paths))
    return Form("", makespan, {kind: found for kind, found in busy.items() if found is not None}, crowds)


def _paths(graph: TaskGraph, duration: Sequence[int]) -> list[Paths] | None:
    """For each task the paths [P, D] that may be the longest to its finish; None where they are too many."""
    found: list[Paths] = []
    steps = np.eye(max(duration) + 1, dtype=np.int64)
    for task, took in enumerate(duration):
        before = graph.predecessors(task)
        start = np.concatenate([found[index] for index in before]) if before.size else 0 * steps[:1]
        found.append((_pruned(start) if before.size > 1 else start) + steps[took])
        if len(found[-1]) > _MOST_PATHS:
            return None
    return found


def _pruned(paths: Paths) -> Paths:
    """Without those that are never the longest: not above another one, or a mean of two others, in every count."""
    paths = np.unique(paths, axis=0)
    below = (paths[:, None] <= paths[None]).all(axis=2) & ~np.eye(len(paths), dtype=np.bool_)
    paths = paths[~below.any(axis=1)]
    if len(paths) < 3:
        return paths
    one, other = np.triu_indices(len(paths), 1)
    apart, short = paths[one] - paths[other], paths[:, None] - paths[other]  # p is under l one + (1 - l) other
    with np.errstate(divide="ignore", invalid="ignore"):
        share = short / apart
    least = np.where(apart > 0, share, 0.0).max(axis=2, initial=0.0)
    most = np.where(apart < 0, share, 1.0).min(axis=2, initial=1.0)
    fits = (least <= most + 1e-12) & ((apart != 0) | (short <= 0)).all(axis=2)
    index = np.arange(len(paths))[:, None]
    return np.asarray(paths[~(fits & (index != one) & (index != other)).any(axis=1)])


def _busy(
    graph: TaskGraph, kind: str, *, duration: Sequence[int], order: Order, paths: Sequence[Paths]
) -> Paths | None:
    """Paths whose longest is the time during which a task of the kind runs; None where no such are known.

    A chain is busy for the sum of its tasks. Tasks that wait for nobody else are busy from the start to their last
    finish; if they wait for others that run one at a time and beside none of them, less what those take.
    """
    tasks = graph.of_kind(kind)
    if order.is_chain(tasks):
        return _total(duration, tasks)
    others = np.setdiff1d(np.flatnonzero(order.ahead[tasks].any(axis=0)), tasks)
    if order.is_chain(others) and order.comparable(others, tasks).all():
        return _pruned(np.concatenate([paths[task] for task in tasks])) - _total(duration, others)
    return None


def _total(duration: Sequence[int], tasks: NDArray[np.intp]) -> Paths:
    """[1, D]: how often each duration occurs among the tasks."""
    return np.bincount(np.asarray(duration)[tasks], minlength=max(duration) + 1)[None]


def _crowds(graph: TaskGraph, resource: int, order: Order) -> set[tuple[frozenset[int], ...]]:
    """Uses of a resource that may be at work at once; uses that are alike are the first of them."""
    works = [bool((graph.values[column] > 0).any()) for column in graph.at["work"]]
    uses = [int(use) for use in np.flatnonzero(graph.use_resource == resource) if works[graph.use_task[use]]]
    numbers = [number for number, _ in graph.alone()]
    first: dict[tuple[int, int], int] = {}
    demands = [first.setdefault((int(graph.at["use"][use]), numbers[graph.use_task[use]]), use) for use in uses]
    return order.crowds(graph.use_task[uses], demands)


def _refused(graph: TaskGraph, form: Form) -> Refused | None:
    """Designs in which a resource might be over-subscribed, or all where there is no closed form."""
    if form.refusal:
        why = f"{form.refusal}: the closed form is not exact"
        return Refused(np.ones(graph.num_designs, np.int32), ("", why))
    rates, code, texts = [rate for _, rate in graph.alone()], np.zeros(graph.shape, np.int32), [""]
    for resource, crowds in form.crowds.items():
        demand = {
            use: graph.values[graph.at["use"][use]] * rates[graph.use_task[use]]
            for crowd in crowds
            for one in crowd
            for use in one
        }
        capacity = graph.values[graph.at["capacity"][resource]] * (1 + _SLACK)
        over = np.zeros((1,) * len(graph.shape), np.bool_)
        for crowd in crowds:
            over = over | (sum(np.maximum.reduce([demand[use] for use in one]) for one in crowd) > capacity)
        if over.any():
            code = np.where((code == 0) & over, np.int32(len(texts)), code)
            texts.append(f"{graph.resources[resource]} may be over-subscribed: the closed form is not exact")
    return Refused(code.reshape(-1), tuple(texts)) if len(texts) > 1 else None


def _flat(graph: TaskGraph, column: ArrayLike) -> Floats:
    """A column [B] of what broadcasts over the grid."""
    return np.array(np.broadcast_to(column, graph.shape), dtype=float).reshape(-1)


def _spent(graph: TaskGraph, seconds: _Durations, kind: str) -> Floats:
    tasks = graph.of_kind(kind)
    many = np.bincount(np.asarray(seconds.of)[tasks], weights=graph.members[tasks], minlength=len(seconds.columns))
    return _flat(graph, sum(count * column for count, column in zip(many, seconds.columns, strict=True) if count))


def _occupied(graph: TaskGraph, seconds: _Durations) -> Floats:
    """CU-seconds [B]."""
    many = Counter(zip(graph.at["cus"].tolist(), seconds.of, strict=True))
    parts = [count * graph.values[cus] * seconds.columns[took] for (cus, took), count in many.items()]
    return _flat(graph, sum(parts))


def _peak_staging(graph: TaskGraph, seconds: _Durations, durations: Floats) -> Floats:
    """Largest amount of staged bytes [B]."""
    sizes = graph.at["staged_bytes"]
    staged = np.flatnonzero([bool((graph.values[column] > 0).any()) for column in sizes])
    if not staged.size:
        return np.zeros(graph.num_designs)
    used, size_of = np.unique(sizes[staged], return_inverse=True)
    freeing, freed = np.unique(graph.consumer[staged], return_inverse=True)
    freeing, freed = (freeing[1:], freed - 1) if freeing[0] < 0 else (freeing, freed)
    structure = (graph.pred_ptr, graph.pred, np.asarray(seconds.of), staged, size_of, freeing, freed)
    table = np.ascontiguousarray(graph.dense([graph.values[column] for column in used]).T)
    peaks = np.empty(graph.num_designs)
    _staging(*(np.asarray(part, np.int64) for part in structure), durations, table, peaks)
    return peaks


def longest(paths: Paths, durations: Floats) -> Floats:
    """The largest [B] of the sums counts [P, D] @ durations [D, B]."""
    found = np.empty(durations.shape[1])
    _longest(paths.astype(float), durations, found)
    return found


@compiled
def _longest(paths: Floats, durations: Floats, found: Floats) -> None:
    stride = 512  # designs at a time, so that partial sums stay in the nearest cache
    best, total = np.empty(stride), np.empty(stride)
    for begin in range(0, found.size, stride):
        many = min(stride, found.size - begin)
        for path in range(paths.shape[0]):
            fresh = True
            for number in range(paths.shape[1]):
                count = paths[path, number]
                if count != 0.0:
                    for i in range(many):
                        part = count * durations[number, begin + i]
                        total[i] = part if fresh else total[i] + part
                    fresh = False
            if fresh:
                total[:many] = 0.0
            for i in range(many):
                best[i] = total[i] if path == 0 or total[i] > best[i] else best[i]
        for i in range(many):
            found[begin + i] = best[i]


@compiled
def _staging(  # noqa: C901, PLR0913, PLR0917
    pred_ptr: Paths,
    pred: Paths,
    took: Paths,
    staged: Paths,
    size_of: Paths,
    freeing: Paths,
    freed: Paths,
    durations: Floats,
    sizes: Floats,
    peaks: Floats,
) -> None:
    tasks = took.size
    issued, finished = np.empty(tasks), np.empty(tasks)
    filled, emptied = np.arange(staged.size), np.arange(freeing.size)  # in order of time; the last design's is close
    held = np.empty(freeing.size)
    for design in range(peaks.size):
        for task in range(tasks):
            start = 0.0
            for j in range(pred_ptr[task], pred_ptr[task + 1]):
                start = max(start, finished[pred[j]])
            issued[task] = start
            finished[task] = start + durations[took[task], design]
        for i in range(1, filled.size):
            moved = filled[i]
            key, j = issued[staged[moved]], i
            while j > 0 and issued[staged[filled[j - 1]]] > key:
                filled[j] = filled[j - 1]
                j -= 1
            filled[j] = moved
        for i in range(1, emptied.size):
            moved = emptied[i]
            key, j = finished[freeing[moved]], i
            while j > 0 and finished[freeing[emptied[j - 1]]] > key:
                emptied[j] = emptied[j - 1]
                j -= 1
            emptied[j] = moved
        held[:] = 0.0
        for i in range(staged.size):
            if freed[i] >= 0:
                held[freed[i]] += sizes[size_of[i], design]
        level = peak = 0.0
        gone = 0
        for i in range(filled.size):
            latest = issued[staged[filled[i]]] * (1.0 + 1e-12)  # what ends in this instant is freed before
            while gone < emptied.size and finished[freeing[emptied[gone]]] <= latest:
                level -= held[emptied[gone]]
                gone += 1
            level += sizes[size_of[filled[i]], design]
            peak = max(peak, level)
        peaks[design] = peak


ENGINE = AnalyticEngine()
