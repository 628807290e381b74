"""Tasks that are alike: classes, which progress at the same rate, and reduction of symmetric graphs.

Tasks with the same uses, cap, weight, priority and group are of one class (`classes_of`). Reduction makes one task of
those that must behave alike, and likewise of resources.

Colour refinement (Weisfeiler and Leman, 1968) finds the coarsest partition of tasks and resources in which all tasks
of a colour have the same numbers and equally many predecessors, successors and uses of each colour. Max-min rates
and the order of events depend on nothing else, so all tasks of a colour are issued and finish together, and a graph
with one task and one resource of each colour has the same times: eight GPUs that do the same become one, seven links
that carry the same become one. A task's uses are then those of all its members on one resource. Tasks in pools are
never merged, because slots are granted by index. Groups of contention laws are coloured likewise; groups of one GPU
are not merged, because their factors multiply.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.taskgraph.graph import Floats, Ints, TaskGraph
from simulators.taskgraph.timeline import Timeline

Places = NDArray[np.intp]
Hashes = NDArray[np.uint64]
_MOST_COMPARED = 1 << 22  # numbers that are compared at once
_FEW_PAIRS = 64  # so many are compared one by one, over the few axes that each pair depends on
_ACCOUNTS = ("cus", "staged_bytes", "moved_bytes", "flop", "ideal_s")
_OWN = ("work", "delay", "cap", "weight", "alone_s", "wide_s")


@dataclass(frozen=True)
class Classes:
    """Classes of tasks. of [T]: class of each task; first [C]: its first task; ptr, uses: its incidence rows (CSR)."""

    of: Places
    first: Places
    ptr: Places
    uses: Places

    @property
    def use_class(self) -> Places:
        """Class of each incidence row."""
        return np.repeat(np.arange(self.first.size), np.diff(self.ptr))


def classes_of(graph: TaskGraph) -> Classes:
    """Group the tasks with the same priority, group, resources, and columns of uses, cap and weight."""
    # stable: uses of a task keep their order, which is part of its class
    order = np.argsort(graph.use_task, kind="stable")
    ptr = np.searchsorted(graph.use_task[order], np.arange(graph.num_tasks + 1))
    pairs = list(zip(graph.use_resource[order].tolist(), graph.at["use"][order].tolist(), strict=True))
    # columns, not values: tasks of one column are equal in every design
    numbers = (graph.priority, graph.group, graph.at["cap"], graph.at["weight"], ptr[:-1], ptr[1:])
    index: dict[tuple[Any, ...], int] = {}
    of = [
        index.setdefault((*key, *pairs[begin:end]), len(index))
        for *key, begin, end in zip(*(column.tolist() for column in numbers), strict=True)
    ]
    # `of` numbers classes by first appearance, so the result is sorted
    _, first = np.unique(np.array(of, np.intp), return_index=True)
    counts = ptr[first + 1] - ptr[first]
    # runs of different lengths, end to end: begin of each run, plus the place within it
    uses = order[
        np.repeat(ptr[first], counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ]
    return Classes(np.array(of, np.intp), first, offsets(counts), uses)


def offsets(counts: NDArray[Any]) -> Places:
    """Begin of each of some runs of so many items, and the end of the last."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)


@dataclass(frozen=True)
class Quotient:
    """A reduced graph, and the task in it that stands for each task [T] of the full graph."""

    graph: TaskGraph
    of: Ints

    def whole(self, timeline: Timeline, graph: TaskGraph) -> Timeline:
        """Expand a timeline of the reduced graph to the full graph."""
        return replace(
            timeline, graph=graph, issued=timeline.issued[:, self.of], finished=timeline.finished[:, self.of]
        )


def patterns(graph: TaskGraph) -> Iterator[tuple[NDArray[np.intp] | None, TaskGraph]]:
    """Yield (places in the grid, or None for all; the graph there), where numbers equal in every design share a column.

    Columns that are equal in some designs only split the batch, so that the result of a design does not depend, to the
    bit, on the designs it is batched with.
    """
    merged, partly = _equal_columns(graph)  # `partly` splits the batch
    reduced = _merge_columns(graph, merged)
    if not partly:
        yield None, reduced
        return
    # a row for each design: which pairs are equal there
    marks = np.stack([graph.flat(equal) for _, equal in partly], axis=1)
    cases, which = np.unique(marks, axis=0, return_inverse=True)
    for index, case in enumerate(cases):
        same = {pair for (pair, _), mark in zip(partly, case, strict=True) if mark}
        places = np.flatnonzero(which.reshape(-1) == index)
        yield places, _merge_columns(graph, merged | same).take(places)


_Pair = tuple[int, int]


def _equal_columns(graph: TaskGraph) -> tuple[set[_Pair], list[tuple[_Pair, NDArray[np.bool_]]]]:
    """Pairs of columns (first, later) of one role equal in all designs, and pairs equal in some, with flags [grid]."""
    if all(value.size == 1 for value in graph.values):
        return set(), []  # one design, whose equal numbers are one column already
    low, high = (np.array([pick(value) for value in graph.values]) for pick in (np.min, np.max))
    meet = (low[:, None] <= high) & (low <= high[:, None])  # ranges that do not overlap are equal nowhere
    # two constants of different columns differ everywhere
    varied = np.array([value.size > 1 for value in graph.values])
    always: set[_Pair] = set()
    sometimes: list[tuple[_Pair, NDArray[np.bool_]]] = []
    alike = meet & (varied[:, None] | varied) & _same_role(graph)
    for pair, equal in _compare_pairs(graph, *np.nonzero(np.triu(alike, 1))):  # each pair once
        if equal.all():
            always.add(pair)
        elif equal.any():
            sometimes.append((pair, equal))
    return always, sometimes


def _same_role(graph: TaskGraph) -> NDArray[np.bool_]:
    """Flags [K, K] of the columns that hold the same quantity of different items, so that these may be alike."""
    holds = np.zeros((len(graph.values), len(graph.at)), np.bool_)
    for role, columns in enumerate(graph.at.values()):
        holds[columns, role] = True
    return np.asarray((holds.astype(np.int32) @ holds.T.astype(np.int32)) > 0)


def _compare_pairs(
    graph: TaskGraph, left: NDArray[np.intp], right: NDArray[np.intp]
) -> Iterator[tuple[_Pair, NDArray[np.bool_]]]:
    """Pairs of columns and flags of the designs where they are equal.

    Of many pairs and few designs, the pairs that are equal nowhere are sorted out in one comparison.
    """
    pairs = zip(left.tolist(), right.tolist(), strict=True)
    # in one comparison, where it fits into memory
    if len(left) > _FEW_PAIRS and len(left) * graph.num_designs <= _MOST_COMPARED:
        table = graph.table().T
        where = np.flatnonzero((table[left] == table[right]).any(axis=1))
        pairs = zip(left[where].tolist(), right[where].tolist(), strict=True)
    for first, second in pairs:
        yield (first, second), graph.values[first] == graph.values[second]


def _merge_columns(graph: TaskGraph, same: set[_Pair]) -> TaskGraph:
    """Replace the later column of each pair by the first column that is equal to it."""
    if not same:
        return graph
    name = np.arange(len(graph.values), dtype=np.int32)
    for first, later in sorted(same):  # in order, so that chains of pairs end at the first column
        low, high = sorted((name[first], name[later]))
        name[name == high] = low
    return replace(graph, at={key: name[columns] for key, columns in graph.at.items()})


def reduce_graph(graph: TaskGraph) -> Quotient:
    """The smallest graph with the same times; the graph itself where nothing is symmetric."""
    task_hash, resource_hash, group_hash = _refine_colours(graph)
    tasks, of = _number_colours(task_hash)
    if len(tasks) == graph.num_tasks:  # nothing is symmetric: the graph itself, not a copy
        return Quotient(graph, of)
    resources, _ = _number_colours(resource_hash)
    count, sums = np.bincount(of).astype(np.int32), _Sums(list(graph.values))  # members of each colour
    structure, used = _uses(graph, of, resources=resources.tolist(), sums=sums)
    at = {name: graph.at[name][tasks] for name in _OWN}
    for name in _ACCOUNTS:
        pairs = zip(graph.at[name][tasks].tolist(), count.tolist(), strict=True)
        # accounts of all members together
        at[name] = np.array([sums.index({column: times}) for column, times in pairs], np.int32)
    laws, grouped = _laws(graph, group_hash, tasks)
    at |= {"use": used, "capacity": graph.at["capacity"][resources], "factor": graph.at["factor"][laws]}
    structure |= (
        _tasks(graph, tasks, of)
        | grouped
        | {
            "resources": tuple(graph.resources[resource] for resource in resources),
            "members": graph.members[tasks] * count,
        }
    )
    return Quotient(replace(graph, **structure, values=tuple(sums.values), at=at), of)


@dataclass
class _Sums:
    """Columns, and new columns that are sums of count * column; equal sums share a column."""

    values: list[Floats]
    _known: dict[frozenset[tuple[int, int]], int] = field(default_factory=dict)

    def index(self, counts: dict[int, int]) -> int:
        """Index of the column that holds the sum."""
        key = frozenset(counts.items())
        if key not in self._known:
            alone = list(counts.values()) == [1]  # once a column: the column itself
            self._known[key] = next(iter(counts)) if alone else len(self.values)
            if not alone:
                self.values.append(np.asarray(sum(count * self.values[column] for column, count in counts.items())))
        return self._known[key]


def _tasks(graph: TaskGraph, tasks: NDArray[np.intp], of: Ints) -> dict[str, Any]:
    """Structure of the tasks that stand for a colour, and of their dependencies."""
    # predecessors of one colour are one task
    before = [sorted(set(of[graph.predecessors(task)].tolist())) for task in tasks]
    consumer = graph.consumer[tasks]
    texts = {name: getattr(graph, name) for name in ("tasks", "kinds", "lanes", "limiters")}
    structure: dict[str, Any] = {name: tuple(all_[task] for task in tasks) for name, all_ in texts.items()}
    return structure | {
        "pred_ptr": np.cumsum([0, *map(len, before)], dtype=np.int32),
        "pred": np.array([task for predecessors in before for task in predecessors], np.int32),
        "pool": graph.pool[tasks],
        "priority": graph.priority[tasks],
        "gpu": graph.gpu[tasks],
        "consumer": np.where(consumer >= 0, of[consumer], -1).astype(np.int32),
    }


def _number_colours(hashes: Hashes) -> tuple[NDArray[np.intp], Ints]:
    """First item of each colour and colour of each item; colours are numbered as they first appear."""
    _, first, of = np.unique(hashes, return_index=True, return_inverse=True)
    order = np.argsort(first)  # by first appearance, which keeps topological order
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[of].astype(np.int32)


def _mix(value: Any, salt: int) -> Hashes:
    """Hash of each number (the finaliser of SplitMix64)."""
    # another function for each relation, or exchanged relations would look alike
    hashes = np.asarray(value).astype(np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(hashes ^ (hashes >> np.uint64(31)))


def _laws(graph: TaskGraph, colour: Hashes, tasks: NDArray[np.intp]) -> tuple[NDArray[np.intp], dict[str, Any]]:
    """Contention laws that remain, and the fields of the groups of tasks and laws, with one group of each colour."""
    if not len(graph.slowed):
        return np.arange(0), {"group": graph.group[tasks]}
    groups, of = _number_colours(colour)
    pairs = of[graph.slowed]
    laws = np.sort(np.unique(pairs, axis=0, return_index=True)[1])  # the first law of each kind, in their order
    group_of = graph.group[tasks]
    return laws, {
        "groups": tuple(graph.groups[group] for group in groups),
        "slowed": pairs[laws],
        "group": np.where(group_of >= 0, of[group_of], -1).astype(np.int32),
    }


def _refine_colours(graph: TaskGraph) -> tuple[Hashes, Hashes, Hashes]:
    """Colours of tasks [T], resources [R] and groups as hashes, refined by their neighbours until no colour splits."""
    task, resource, group = _labels(graph), _mix(graph.at["capacity"], 1), _mix(_ranks(graph), 14)
    user, used, kind = graph.use_task, graph.use_resource, _mix(graph.at["use"], 2)
    after, before = np.repeat(np.arange(graph.num_tasks), np.diff(graph.pred_ptr)), graph.pred
    freed, grouped = np.flatnonzero(graph.consumer >= 0), np.flatnonzero(graph.group >= 0)
    (slow, cause), law = graph.slowed.T, _mix(graph.at["factor"], 15)
    colours = 0
    # refined until no colour splits
    while (count := sum(len(np.unique(part)) for part in (task, resource, group))) > colours:
        colours = count
        seen, met, together = _mix(task, 3), _mix(resource, 4), _mix(group, 16)
        # sums of hashes: neighbours count as a multiset, in whatever order
        np.add.at(met, used, _mix(task[user] + kind, 5))
        np.add.at(seen, user, _mix(resource[used] + kind, 6))
        np.add.at(seen, after, _mix(task[before], 7))
        np.add.at(seen, before, _mix(task[after], 8))
        np.add.at(seen, freed, _mix(task[graph.consumer[freed]], 9))
        np.add.at(seen, graph.consumer[freed], _mix(task[freed], 10))
        np.add.at(seen, grouped, _mix(group[graph.group[grouped]], 17))
        np.add.at(together, graph.group[grouped], _mix(task[grouped], 18))
        np.add.at(together, slow, _mix(group[cause] + law, 19))
        np.add.at(together, cause, _mix(group[slow] + law, 20))
        task, resource, group = seen, met, together
    return task, resource, group


def _ranks(graph: TaskGraph) -> NDArray[np.intp]:
    """Place of each group among those on the GPU of its first task; among all groups if a law crosses GPUs."""
    gpus, grouped = np.full(len(graph.groups), -1), np.flatnonzero(graph.group >= 0)[::-1]
    gpus[graph.group[grouped]] = graph.gpu[grouped]  # from the last to the first, which stays
    if np.any(gpus[graph.slowed[:, 0]] != gpus[graph.slowed[:, 1]]):
        return np.arange(len(gpus))
    # the same place on each GPU, so that groups of different GPUs may merge
    places: dict[int, Iterator[int]] = defaultdict(itertools.count)
    return np.array([next(places[gpu]) for gpu in gpus.tolist()], np.intp)


def _labels(graph: TaskGraph) -> Hashes:
    """Initial colour of each task: its numbers and its distance from the start (an invariant that saves rounds)."""
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(graph.kinds))}
    # tasks in pools get a colour of their own: slots are granted by index
    alone = np.where(graph.pool >= 0, np.arange(graph.num_tasks), -1)
    columns = [graph.at[name] for name in (*_OWN, *_ACCOUNTS)]
    labels = [[kinds[kind] for kind in graph.kinds], alone, graph.priority, graph.members, *columns]
    hashes = _mix(_depths(graph), 11)
    for label in labels:
        hashes = _mix(hashes + _mix(np.asarray(label, np.int64), 12), 13)
    return hashes


def _depths(graph: TaskGraph) -> list[int]:
    """Number of tasks on the longest path from the start to each task."""
    ptr, pred = graph.pred_ptr.tolist(), graph.pred.tolist()
    depth: list[int] = []
    for begin, end in itertools.pairwise(ptr):
        depth.append(1 + max(map(depth.__getitem__, pred[begin:end]), default=0))
    return depth


def _uses(graph: TaskGraph, of: Ints, *, resources: list[int], sums: _Sums) -> tuple[dict[str, Any], Ints]:
    """Structure and columns of the uses of one resource of each colour, summed by colour of task."""
    number = {resource: index for index, resource in enumerate(resources)}
    counts: dict[tuple[int, int], dict[int, int]] = {}
    uses = zip(of[graph.use_task].tolist(), graph.use_resource.tolist(), graph.at["use"].tolist(), strict=True)
    for task, resource, column in uses:
        if resource in number:
            per_column = counts.setdefault((task, number[resource]), {})
            per_column[column] = per_column.get(column, 0) + 1
    pairs = sorted(counts)
    structure = {
        "use_task": np.array([task for task, _ in pairs], np.int32),
        "use_resource": np.array([resource for _, resource in pairs], np.int32),
    }
    return structure, np.array([sums.index(counts[pair]) for pair in pairs], np.int32)
