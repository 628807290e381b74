"""Symmetric graphs reduced: tasks that must behave alike become one task, resources likewise.

Colour refinement (Weisfeiler and Leman, 1968) finds the coarsest partition of tasks and resources in which all tasks
of a colour have the same numbers and equally many predecessors, successors and uses of each colour. Max-min rates
and the order of events depend on nothing else, so all tasks of a colour are issued and finish together, and a graph
with one task and one resource of each colour has the same times: eight GPUs that do the same become one, seven links
that carry the same become one. A task's uses are then those of all its members on one resource. Tasks in pools keep
to themselves, as slots are granted by index. Groups of contention laws are coloured likewise; those of one GPU stay
apart, as their factors multiply.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.taskgraph.graph import Floats, Ints, TaskGraph
from simulators.taskgraph.timeline import Timeline

Hashes = NDArray[np.uint64]
_MOST_COMPARED = 1 << 22  # numbers that are compared at once
_ACCOUNTS = ("cus", "staged_bytes", "moved_bytes", "flop", "ideal_s")
_OWN = ("work", "delay", "cap", "weight", "alone_s", "wide_s")


@dataclass(frozen=True)
class Quotient:
    """A reduced graph, and the task in it that stands for each task [T] of the whole one."""

    graph: TaskGraph
    of: Ints

    def whole(self, timeline: Timeline, graph: TaskGraph) -> Timeline:
        """A run of the reduced graph as one of the graph it was reduced from."""
        return replace(
            timeline, graph=graph, issued=timeline.issued[:, self.of], finished=timeline.finished[:, self.of]
        )


def patterns(graph: TaskGraph) -> Iterator[tuple[NDArray[np.intp] | None, TaskGraph]]:
    """(places in the grid, or None for all; the graph there): equal numbers are one column in every design.

    Columns that are equal in some designs only part the batch, so that what is computed for a design does not depend,
    to the bit, on the others it is computed with.
    """
    merged, partly = _equal_columns(graph)
    whole = _renamed(graph, merged)
    if not partly:
        yield None, whole
        return
    marks = np.stack([graph.flat(equal) for _, equal in partly], axis=1)
    cases, which = np.unique(marks, axis=0, return_inverse=True)
    for index, case in enumerate(cases):
        same = {pair for (pair, _), mark in zip(partly, case, strict=True) if mark}
        places = np.flatnonzero(which.reshape(-1) == index)
        yield places, _renamed(graph, merged | same).take(places)


_Pair = tuple[int, int]


def _equal_columns(graph: TaskGraph) -> tuple[set[_Pair], list[tuple[_Pair, NDArray[np.bool_]]]]:
    """Pairs of columns (first, later) of one role equal in all designs, and those equal in some, with where."""
    if all(value.size == 1 for value in graph.values):
        return set(), []  # one design, whose equal numbers are one column already
    low, high = (np.array([pick(value) for value in graph.values]) for pick in (np.min, np.max))
    meet = (low[:, None] <= high) & (low <= high[:, None])
    varied = np.array([value.size > 1 for value in graph.values])
    always: set[_Pair] = set()
    sometimes: list[tuple[_Pair, NDArray[np.bool_]]] = []
    alike = meet & (varied[:, None] | varied) & _same_role(graph)
    for pair, equal in _compared(graph, *np.nonzero(np.triu(alike, 1))):
        if equal.all():
            always.add(pair)
        elif equal.any():
            sometimes.append((pair, equal))
    return always, sometimes


def _same_role(graph: TaskGraph) -> NDArray[np.bool_]:
    """[K, K]: which columns hold the same number of different items, so that these may be alike."""
    holds = np.zeros((len(graph.values), len(graph.at)), np.bool_)
    for role, columns in enumerate(graph.at.values()):
        holds[columns, role] = True
    return np.asarray((holds.astype(np.int32) @ holds.T.astype(np.int32)) > 0)


def _compared(
    graph: TaskGraph, ones: NDArray[np.intp], others: NDArray[np.intp]
) -> Iterator[tuple[_Pair, NDArray[np.bool_]]]:
    """Pairs of columns, and where they are equal; of few designs, those that are so nowhere are left out together."""
    pairs = zip(ones.tolist(), others.tolist(), strict=True)
    if len(ones) * graph.num_designs <= _MOST_COMPARED:
        table = graph.table().T
        where = np.flatnonzero((table[ones] == table[others]).any(axis=1))
        pairs = zip(ones[where].tolist(), others[where].tolist(), strict=True)
    for one, other in pairs:
        yield (one, other), graph.values[one] == graph.values[other]


def _renamed(graph: TaskGraph, same: set[_Pair]) -> TaskGraph:
    """The graph with the later column of each pair replaced by the first one that is equal to it."""
    if not same:
        return graph
    name = np.arange(len(graph.values), dtype=np.int32)
    for first, later in sorted(same):
        low, high = sorted((name[first], name[later]))
        name[name == high] = low
    return replace(graph, at={key: name[columns] for key, columns in graph.at.items()})


def reduce_graph(graph: TaskGraph) -> Quotient:
    """The smallest graph with the same times; the graph itself where nothing is symmetric."""
    task_hash, resource_hash, group_hash = _refined(graph)
    tasks, of = _numbered(task_hash)
    if len(tasks) == graph.num_tasks:
        return Quotient(graph, of)
    resources, _ = _numbered(resource_hash)
    count, sums = np.bincount(of).astype(np.int32), _Sums(list(graph.values))
    structure, used = _uses(graph, of, resources=resources.tolist(), sums=sums)
    at = {name: graph.at[name][tasks] for name in _OWN}
    for name in _ACCOUNTS:
        pairs = zip(graph.at[name][tasks].tolist(), count.tolist(), strict=True)
        at[name] = np.array([sums.index({column: many}) for column, many in pairs], np.int32)
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
    """Columns, and new ones that are sums of count * column; equal sums are one column."""

    values: list[Floats]
    _known: dict[frozenset[tuple[int, int]], int] = field(default_factory=dict)

    def index(self, counts: dict[int, int]) -> int:
        """The column of the sum."""
        key = frozenset(counts.items())
        if key not in self._known:
            alone = list(counts.values()) == [1]
            self._known[key] = next(iter(counts)) if alone else len(self.values)
            if not alone:
                self.values.append(np.asarray(sum(many * self.values[column] for column, many in counts.items())))
        return self._known[key]


def _tasks(graph: TaskGraph, tasks: NDArray[np.intp], of: Ints) -> dict[str, Any]:
    """The tasks that stand for a colour, and what they wait for."""
    before = [sorted(set(of[graph.predecessors(task)].tolist())) for task in tasks]
    consumer = graph.consumer[tasks]
    texts = {name: getattr(graph, name) for name in ("tasks", "kinds", "lanes", "limiters")}
    found: dict[str, Any] = {name: tuple(all_[task] for task in tasks) for name, all_ in texts.items()}
    return found | {
        "pred_ptr": np.cumsum([0, *map(len, before)], dtype=np.int32),
        "pred": np.array([task for found in before for task in found], np.int32),
        "pool": graph.pool[tasks],
        "priority": graph.priority[tasks],
        "gpu": graph.gpu[tasks],
        "consumer": np.where(consumer >= 0, of[consumer], -1).astype(np.int32),
    }


def _numbered(hashes: Hashes) -> tuple[NDArray[np.intp], Ints]:
    """(first item of each colour, colour of each item), colours numbered as they first appear."""
    _, first, of = np.unique(hashes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[of].astype(np.int32)


def _mix(value: Any, salt: int) -> Hashes:
    """A hash of each number (the finaliser of SplitMix64)."""
    found = np.asarray(value).astype(np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(found ^ (found >> np.uint64(31)))


def _laws(graph: TaskGraph, colour: Hashes, tasks: NDArray[np.intp]) -> tuple[NDArray[np.intp], dict[str, Any]]:
    """(contention laws that are kept; groups, those of the tasks and of the laws) with one group of each colour."""
    if not len(graph.slowed):
        return np.arange(0), {"group": graph.group[tasks]}
    kept, of = _numbered(colour)
    pairs = of[graph.slowed]
    laws = np.sort(np.unique(pairs, axis=0, return_index=True)[1])
    own = graph.group[tasks]
    return laws, {
        "groups": tuple(graph.groups[one] for one in kept),
        "slowed": pairs[laws],
        "group": np.where(own >= 0, of[own], -1).astype(np.int32),
    }


def _refined(graph: TaskGraph) -> tuple[Hashes, Hashes, Hashes]:
    """Colours of tasks [T], resources [R] and groups, as hashes: refined by their neighbours until none splits."""
    task, resource, group = _labels(graph), _mix(graph.at["capacity"], 1), _mix(_ranks(graph), 14)
    user, used, kind = graph.use_task, graph.use_resource, _mix(graph.at["use"], 2)
    after, before = np.repeat(np.arange(graph.num_tasks), np.diff(graph.pred_ptr)), graph.pred
    freed, grouped = np.flatnonzero(graph.consumer >= 0), np.flatnonzero(graph.group >= 0)
    (slow, cause), law = graph.slowed.T, _mix(graph.at["factor"], 15)
    colours = 0
    while (found := sum(len(np.unique(part)) for part in (task, resource, group))) > colours:
        colours = found
        seen, met, together = _mix(task, 3), _mix(resource, 4), _mix(group, 16)
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
    """The place of each group among those of its GPU, that of its first task; of all, where a law goes across GPUs."""
    firsts = [np.flatnonzero(graph.group == one)[:1] for one in range(len(graph.groups))]
    gpus = [int(graph.gpu[tasks[0]]) if tasks.size else -1 for tasks in firsts]
    across = any(gpus[slow] != gpus[cause] for slow, cause in graph.slowed.tolist())
    return np.array([place if across else gpus[:place].count(gpu) for place, gpu in enumerate(gpus)], np.intp)


def _labels(graph: TaskGraph) -> Hashes:
    """What a task is by itself, and how far it is from the start (an invariant that saves rounds)."""
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(graph.kinds))}
    alone = np.where(graph.pool >= 0, np.arange(graph.num_tasks), -1)
    columns = [graph.at[name] for name in (*_OWN, *_ACCOUNTS)]
    labels = [[kinds[kind] for kind in graph.kinds], alone, graph.priority, graph.members, *columns]
    found = _mix(_depths(graph), 11)
    for label in labels:
        found = _mix(found + _mix(np.asarray(label, np.int64), 12), 13)
    return found


def _depths(graph: TaskGraph) -> list[int]:
    """Tasks on the longest way from the start."""
    ptr, pred = graph.pred_ptr.tolist(), graph.pred.tolist()
    depth: list[int] = []
    for begin, end in itertools.pairwise(ptr):
        depth.append(1 + max((depth[task] for task in pred[begin:end]), default=0))
    return depth


def _uses(graph: TaskGraph, of: Ints, *, resources: list[int], sums: _Sums) -> tuple[dict[str, Any], Ints]:
    """Uses of one resource of each colour, added up by colour of task: (their structure, the column of each)."""
    number = {resource: index for index, resource in enumerate(resources)}
    counts: dict[tuple[int, int], dict[int, int]] = {}
    uses = zip(of[graph.use_task].tolist(), graph.use_resource.tolist(), graph.at["use"].tolist(), strict=True)
    for task, resource, column in uses:
        if resource in number:
            one = counts.setdefault((task, number[resource]), {})
            one[column] = one.get(column, 0) + 1
    pairs = sorted(counts)
    structure = {
        "use_task": np.array([task for task, _ in pairs], np.int32),
        "use_resource": np.array([resource for _, resource in pairs], np.int32),
    }
    return structure, np.array([sums.index(counts[pair]) for pair in pairs], np.int32)
