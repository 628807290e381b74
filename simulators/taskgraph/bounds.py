"""Lower bounds on the makespan of a task graph, whatever the order, the priorities and the shares of its tasks.

With a_t = delay + work / rate alone, h_t: the longest path of such times to a task's issue, q_t: the longest one from
its finish, and for a resource r the tasks t in r that use it

    path         max over t of h_t + a_t + q_t
    resource     min over t in r of (h_t + delay_t) + sum of use x work / capacity + min over t in r of q_t
    slots        min h_t + sum of a_t / slots + min q_t, over the tasks of a pool

`bound` is the largest of them. `linear_bound` is a linear program that has all of them at once, with contention laws:
time is cut into intervals between the ends of some tasks of the critical path, and what must come before or after such
an end runs in the intervals before or after it; nothing else of the order of time is kept. Ideas of
the proofs: docs/explanation/bounds.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compile_lazily
from simulators.taskgraph.graph import Floats, TaskGraph
from simulators.taskgraph.maxplus import Durations

Indices = NDArray[np.intp]
PATH = "critical path"
"""Name of the bound by the longest path."""


@dataclass(frozen=True)
class GraphBound:
    """A time that no run of a graph gets below [B], and what it comes from: places in `names` [B]."""

    seconds: Floats
    binds: Indices
    names: tuple[str, ...]


def bound(graph: TaskGraph) -> GraphBound:
    """The largest of the bounds by path, resource and slots, of every design."""
    durations = Durations.among(graph)
    alone = graph.rows(durations.columns)
    delay, delay_of = _distinct(graph, graph.at["delay"])
    loads, tasks, ptr, delayed = _loads(graph, durations, alone)
    seconds = np.empty((1 + len(loads), graph.num_designs))
    _bound(
        graph.pred_ptr.astype(np.intp),
        graph.pred.astype(np.intp),
        np.array(durations.of, np.intp),
        alone,
        delay_of,
        delay,
        ptr,
        tasks,
        delayed,
        loads,
        seconds,
    )
    binds = seconds.argmax(axis=0)  # ties go to the path, which comes first
    return GraphBound(seconds.max(axis=0), binds, (PATH, *graph.resources, *graph.pools))


def _distinct(graph: TaskGraph, columns: NDArray[np.int32]) -> tuple[Floats, Indices]:
    """Distinct columns as rows, and the row of each item."""
    used, places = np.unique(columns, return_inverse=True)  # many tasks share a column: it is broadcast once
    return graph.rows([graph.values[column] for column in used]), places.reshape(-1).astype(np.intp)


def _loads(graph: TaskGraph, durations: Durations, alone: Floats) -> tuple[Floats, Indices, Indices, NDArray[np.bool_]]:
    """Time that each resource, then each pool, is busy [R + P, B], its tasks (CSR), and whether a delay comes first."""
    values, works = graph.values, graph.at["work"]
    loads = np.zeros((len(graph.resources) + len(graph.pools), graph.num_designs))
    members: list[Indices] = []
    for resource, capacity in enumerate(graph.at["capacity"].tolist()):
        counts: dict[tuple[int, int], int] = defaultdict(int)
        uses = np.flatnonzero(graph.use_resource == resource)
        for use in uses:
            # uses of equal columns are one product
            counts[int(graph.at["use"][use]), int(works[graph.use_task[use]])] += 1
        for (used, work), count in counts.items():
            loads[resource] += count * graph.flat(values[used] * values[work] / values[capacity])
        # a task without work takes nothing of a resource, so that it must not lower first and last times
        worked = [task for task in graph.use_task[uses] if (values[works[task]] > 0).any()]
        members.append(np.array(worked, np.intp))
    for pool, slots in enumerate(graph.slots.tolist()):
        pooled = np.flatnonzero(graph.pool == pool)
        # a task that symmetry has reduced takes a slot for each of its members
        counts_of = np.bincount(np.array(durations.of)[pooled], graph.members[pooled], len(alone))
        loads[len(graph.resources) + pool] = counts_of @ alone / slots
        members.append(pooled)
    ptr = np.concatenate([[0], np.cumsum([len(part) for part in members])]).astype(np.intp)
    tasks = np.concatenate([np.empty(0, np.intp), *members]).astype(np.intp)
    # pools are taken from issue, delay included; resources after the delay
    return loads, tasks, ptr, np.arange(len(loads)) < len(graph.resources)


@compile_lazily
def _bound(  # noqa: PLR0913, PLR0917, C901, PLR0912 (compiled as one)
    pred_ptr: Indices,
    pred: Indices,
    duration_of: Indices,
    durations: Floats,
    delay_of: Indices,
    delays: Floats,
    ptr: Indices,
    tasks: Indices,
    delayed: NDArray[np.bool_],
    loads: Floats,
    seconds: Floats,
) -> None:
    # both times of a few hundred tasks stay in the cache
    stride = 32  # designs side by side, in the lanes of the machine
    num_tasks = duration_of.size
    head, tail = np.empty((num_tasks, stride)), np.empty((num_tasks, stride))
    first, last = np.empty(stride), np.empty(stride)
    for begin in range(0, seconds.shape[1], stride):
        width = min(stride, seconds.shape[1] - begin)
        for i in range(width):
            seconds[0, begin + i] = 0.0
        for task in range(num_tasks):
            for i in range(width):
                head[task, i] = 0.0
                tail[task, i] = 0.0
            for j in range(pred_ptr[task], pred_ptr[task + 1]):
                before, kind = pred[j], duration_of[pred[j]]  # predecessors come first: tasks are in topological order
                for i in range(width):
                    ended = head[before, i] + durations[kind, begin + i]
                    head[task, i] = ended if ended > head[task, i] else head[task, i]  # a select, which vectorises
            kind = duration_of[task]
            for i in range(width):
                ended = head[task, i] + durations[kind, begin + i]
                seconds[0, begin + i] = ended if ended > seconds[0, begin + i] else seconds[0, begin + i]
        for back in range(num_tasks):
            task = num_tasks - 1 - back
            kind = duration_of[task]
            for j in range(pred_ptr[task], pred_ptr[task + 1]):
                before = pred[j]
                for i in range(width):
                    left = tail[task, i] + durations[kind, begin + i]
                    tail[before, i] = left if left > tail[before, i] else tail[before, i]
        for row in range(loads.shape[0]):
            for i in range(width):
                first[i] = np.inf if ptr[row + 1] > ptr[row] else 0.0  # a row without tasks bounds nothing
                last[i] = first[i]
            for place in range(ptr[row], ptr[row + 1]):
                task = tasks[place]
                for i in range(width):
                    # a resource is used after the delay alone
                    start = head[task, i] + (delays[delay_of[task], begin + i] if delayed[row] else 0.0)
                    first[i] = start if start < first[i] else first[i]
                    last[i] = tail[task, i] if tail[task, i] < last[i] else last[i]
            for i in range(width):
                seconds[row + 1, begin + i] = first[i] + loads[row, begin + i] + last[i]


# ---------------------------------------------------------------- the linear program


@dataclass(frozen=True)
class LinearBound:
    """The bound of one design by a linear program [s], and the share of it that each sort of limit holds.

    binds: name of a resource, a pool, a contention law or `PATH` -> share of the bound, by the dual values.
    """

    seconds: float
    binds: Mapping[str, float]


def linear_bound(graph: TaskGraph, *, intervals: int = 8) -> LinearBound:
    """The bound of the first design, with time cut into at most so many intervals; more are tighter, and slower.

    The variables are the lengths of the intervals, the share of each task's work in each interval in which it may run,
    and the time for which each group of a contention law is active. Raises RuntimeError where the solver fails.
    """
    return _Program(_TimedGraph(graph.take(np.array([0])), intervals)).solve()


@dataclass
class LinearRows:
    """Rows of `sum of coefficient * variable <= limit`, by what they stand for."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, name: str, terms: Sequence[tuple[int, float]], limit: float = 0.0) -> None:
        """Add a row."""
        for column, value in terms:
            self.row.append(len(self.limits))
            self.column.append(column)
            self.value.append(value)
        self.limits.append(limit)
        self.names.append(name)

    def matrix(self, columns: int) -> Any:
        """The coefficients as a sparse matrix of so many columns."""
        from scipy.sparse import coo_array

        return coo_array((self.value, (self.row, self.column)), shape=(len(self.limits), columns)).tocsr()


@dataclass(frozen=True)
class _TimedGraph:
    """The graph of one design with times alone, and the windows of time in which its tasks may run."""

    one: TaskGraph
    intervals: int

    @cached_property
    def work_s(self) -> Floats:
        """Time of each task's work alone [T]."""
        graph = self.one
        with np.errstate(invalid="ignore", divide="ignore"):
            seconds = graph["work"][0] / graph.isolated_rate()[0]
        return np.where(graph["work"][0] > 0, seconds, 0.0)  # 0 / 0 or 0 / inf: no work, no time

    @cached_property
    def alone_s(self) -> Floats:
        return np.asarray(self.work_s + self.one["delay"][0])

    @cached_property
    def heads(self) -> Floats:
        head = np.zeros(self.one.num_tasks)
        for task in range(len(head)):
            before = self.one.predecessors(task)
            if before.size:
                head[task] = (head[before] + self.alone_s[before]).max()
        return head

    @cached_property
    def ends(self) -> list[int]:
        """Tasks of the critical path whose ends cut time, in order; the last is the last task of the path."""
        path = [int(np.argmax(self.heads + self.alone_s))]  # backwards from the task that ends last
        while (before := self.one.predecessors(path[-1])).size:
            path.append(int(before[np.argmax(self.heads[before] + self.alone_s[before])]))
        path = path[::-1]
        finish = (self.heads + self.alone_s)[path]
        wanted = np.linspace(0, finish[-1], self.intervals + 1)[1:]  # equal parts of the critical path
        # rounding: a wanted time that equals an end cuts there, not a task later
        places = np.unique(np.minimum(np.searchsorted(finish, wanted - 1e-15 * finish[-1]), len(path) - 1))
        return [path[place] for place in places]

    @cached_property
    def windows(self) -> tuple[Indices, Indices]:
        """First and last interval in which each task may run [T]; interval j ends with `ends[j]`, or with the run."""
        graph, ends = self.one, {task: place for place, task in enumerate(self.ends)}
        first = np.zeros(graph.num_tasks, np.intp)
        last = np.full(graph.num_tasks, len(ends), np.intp)
        for task in range(graph.num_tasks):
            for before in graph.predecessors(task).tolist():
                # after a predecessor that ends an interval, in the next one at the earliest
                first[task] = max(first[task], first[before], ends.get(before, -1) + 1)
        for task in reversed(range(graph.num_tasks)):
            # a task that ends an interval runs no later, nor does what it waits for
            last[task] = min(last[task], ends.get(task, len(ends)))
            for before in graph.predecessors(task).tolist():
                last[before] = min(last[before], last[task])
        return first, last

    @cached_property
    def scale(self) -> float:
        """Length of the critical path [s], of which the program's times are shares."""
        return float((self.heads + self.alone_s).max())

    def busy(self) -> Iterator[tuple[str, str, int, float]]:
        """Yield (name, sort, task, seconds) of all that serves a task for a time, and one task at a time."""
        graph, work_s = self.one, self.work_s
        use, work, capacity = graph["use"][0], graph["work"][0], graph["capacity"][0]
        for place, (task, resource) in enumerate(
            zip(graph.use_task.tolist(), graph.use_resource.tolist(), strict=True)
        ):
            if work[task] > 0:
                yield graph.resources[resource], "resource", task, use[place] * work[task] / capacity[resource]
        for task in np.flatnonzero((graph.pool >= 0) & (work_s > 0)).tolist():
            pool = graph.pool[task]
            # of a reduced task, each member takes a slot
            yield graph.pools[pool], "pool", task, work_s[task] * graph.members[task] / graph.slots[pool]
        for number, chain in enumerate(self.chains()):
            for task in chain:
                yield graph.lanes[task], f"chain {number}", task, work_s[task]

    def chains(self) -> list[list[int]]:
        """Tasks with work in chains, each task of which waits for the one before it."""
        graph, chains = self.one, list[list[int]]()
        ends: dict[int, list[int]] = {}
        for task in range(graph.num_tasks):
            chain = next(
                (
                    ends.pop(before)
                    # the latest predecessor of the lane is most likely the end of a chain
                    for before in graph.predecessors(task).tolist()[::-1]
                    # a chain goes on from its last task only, or it would be a tree
                    if before in ends and graph.lanes[before] == graph.lanes[task]
                ),
                None,
            )
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(task)
            ends[task] = chain
        # tasks without work carry nothing
        return [[task for task in chain if self.work_s[task] > 0] for chain in chains]

    def chains_of_groups(self) -> dict[int, list[tuple[int, list[int]]]]:
        """Numbers of the chains that have tasks of each group, with these tasks."""
        result: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for number, chain in enumerate(self.chains()):
            parts: dict[int, list[int]] = defaultdict(list)
            for task in chain:
                parts[int(self.one.group[task])].append(task)
            for group, tasks in parts.items():
                result[group].append((number, tasks))
        result.pop(-1, None)  # tasks of no group
        return result

    def lost(self, tasks: Sequence[int], factor: float) -> float:
        """Least share of the rates alone of tasks that is lost while their caps are scaled by a factor."""
        working = [task for task in tasks if self.work_s[task] > 0]
        # above 1 where a resource, not the cap, limits the rate: then the law takes less
        ratio = self.one["cap"][0][working] / self.one.isolated_rate()[0][working]
        return float(1 - np.minimum(1.0, factor * ratio).max(initial=factor))  # no task with work: the whole law


@dataclass(frozen=True)
class _Program:
    """The linear program of a graph. Its times are shares of the critical path."""

    graph: _TimedGraph

    def solve(self) -> LinearBound:
        """Build and solve it."""
        from scipy.optimize import linprog

        if self.graph.scale == 0:
            return LinearBound(0.0, {})
        lengths = len(self.graph.ends) + 1  # one more than ends: what runs after the last of them
        first, last = self.graph.windows
        # each task has a variable for every interval of its window
        offset = lengths + np.concatenate([[0], np.cumsum(last - first + 1)])
        rows, equal = LinearRows(), LinearRows()
        self._capacities(rows, offset)
        self._paths(rows)
        groups = self._laws(rows, offset, int(offset[-1]))
        for task in range(self.graph.one.num_tasks):
            if self.graph.work_s[task] > 0:
                # all of its work is done
                equal.add(PATH, [(int(place), 1.0) for place in range(offset[task], offset[task + 1])], 1.0)
        count = int(offset[-1]) + groups
        parts: dict[str, Any] = {}
        for name, part in (("ub", rows), ("eq", equal)):
            parts[f"A_{name}"] = part.matrix(count)
            parts[f"b_{name}"] = part.limits
        cost = np.zeros(count)
        cost[:lengths] = 1.0  # the makespan: the sum of the lengths of intervals
        solved = linprog(cost, **parts, bounds=(0, None), method="highs")
        if solved.status != 0:
            raise RuntimeError(f"the linear program of the bound was not solved: {solved.message}")
        return LinearBound(float(solved.fun) * self.graph.scale, self._shares_of_bound(solved, rows))

    def _shares_of_bound(self, solved: Any, rows: LinearRows) -> dict[str, float]:
        """Shares of the bound by the dual values of the rows, the largest first."""
        lengths = len(self.graph.ends) + 1
        shares: dict[str, float] = defaultdict(float)
        weights = -np.asarray(solved.ineqlin.marginals)  # marginals of a minimum are negative for limits that bind
        of_length = np.zeros(len(rows.limits))
        for row, column, value in zip(rows.row, rows.column, rows.value, strict=True):
            if column < lengths:
                of_length[row] += -value * float(solved.x[column])  # what the row asks of lengths at the solution
        for name, weight, length in zip(rows.names, weights, of_length, strict=True):
            shares[name] += float(weight * length)  # of the dual objective, by the name of the limit
        total = sum(shares.values()) or 1.0
        # what is left is rounding, or of no interest
        large = {name: share / total for name, share in shares.items() if share > 1e-3 * total}
        return dict(sorted(large.items(), key=lambda item: -item[1]))

    def _shares(self, task: int, offset: Indices) -> Iterator[tuple[int, int]]:
        """Yield (interval, variable of the share of a task's work in it)."""
        first = int(self.graph.windows[0][task])
        for place in range(int(offset[task]), int(offset[task + 1])):
            yield first + place - int(offset[task]), place

    def _capacities(self, rows: LinearRows, offset: Indices) -> None:
        """Add what a resource, a pool or a chain of tasks carries in each interval."""
        loads: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        for name, kind, task, seconds in self.graph.busy():
            for interval, share in self._shares(task, offset):
                loads[f"{kind}#{name}", interval].append((share, seconds / self.graph.scale))
        for (name, interval), terms in loads.items():
            rows.add(name.partition("#")[2], [*terms, (interval, -1.0)])  # busy for no longer than the interval lasts

    def _paths(self, rows: LinearRows) -> None:
        """Add that the intervals in which a task must run, and those between two ends, are as long as paths are."""
        first, last = self.graph.windows
        longest: dict[tuple[int, int], float] = defaultdict(float)
        for task in range(self.graph.one.num_tasks):
            window = int(first[task]), int(last[task])
            longest[window] = max(longest[window], float(self.graph.alone_s[task]))
        finish, before = (self.graph.heads + self.graph.alone_s)[self.graph.ends], 0.0
        for interval, end in enumerate(finish.tolist()):
            # two ends of the critical path are at least as far apart as the path between them
            longest[interval, interval] = max(longest[interval, interval], end - before)
            before = end
        for (begin, end), seconds in longest.items():
            rows.add(PATH, [(interval, -1.0) for interval in range(begin, end + 1)], -seconds / self.graph.scale)

    def _laws(self, rows: LinearRows, offset: Indices, begin: int) -> int:
        """Add contention laws; return the number of their variables, which begin at `begin`.

        In an interval of length L groups of one chain, of which no two are active at once, are active for A_g, another
        group for A, and both meet for o_g: sum of A_g + A - L <= sum of o_g. A chain of the group does its work in A
        less the sum of (1 - f_g) o_g: f_g is 1 for tasks that a resource keeps as far below their cap.
        """
        graph, lengths = self.graph.one, len(self.graph.ends) + 1
        chains = self.graph.chains_of_groups()
        laws = {
            (slowed, cause): factor
            for (slowed, cause), factor in zip(graph.slowed.tolist(), graph["factor"][0].tolist(), strict=True)
            if slowed in chains and cause in chains  # a group without work is never active
        }
        pairs = sorted({(min(pair), max(pair)) for pair in laws})
        groups = sorted({group for pair in pairs for group in pair})
        active = {group: begin + lengths * place for place, group in enumerate(groups)}
        met = {pair: begin + lengths * (len(groups) + place) for place, pair in enumerate(pairs)}
        met |= {(cause, slowed): at for (slowed, cause), at in met.items()}
        for group in groups:
            for interval in range(lengths):
                # a group is active for no longer than the interval lasts
                rows.add(PATH, [(active[group] + interval, 1.0), (interval, -1.0)])
                for _, tasks in chains[group]:
                    # and each of its chains for no longer than the group
                    rows.add(PATH, [*self._done(tasks, interval, offset), (active[group] + interval, -1.0)])
            for others in self._together([other for other in groups if (group, other) in met], chains):
                name = f"{graph.groups[group]} beside {graph.groups[others[0]]}"
                factors = [(other, laws[group, other]) for other in others if (group, other) in laws]
                for interval in range(lengths):
                    both = [(met[group, other] + interval, -1.0) for other in others]
                    times = [(active[other] + interval, 1.0) for other in (group, *others)]
                    rows.add(name, [*times, *both, (interval, -1.0)])
                    for _, tasks in chains[group]:
                        done = self._done(tasks, interval, offset)
                        lost = [
                            (met[group, other] + interval, self.graph.lost(tasks, factor)) for other, factor in factors
                        ]
                        rows.add(name, [*done, (active[group] + interval, -1.0), *lost])
        return lengths * (len(groups) + len(pairs))

    def _together(
        self, groups: Sequence[int], chains: Mapping[int, list[tuple[int, list[int]]]]
    ) -> Iterator[list[int]]:
        """Yield groups in sets of which no two are ever active at once: those in one chain, and any other alone."""
        serial: dict[int, list[int]] = defaultdict(list)
        for group in groups:
            if len(chains[group]) == 1:  # all its tasks in one chain: serial with the other groups of that chain
                serial[chains[group][0][0]].append(group)
            else:
                yield [group]
        yield from serial.values()

    def _done(self, tasks: Sequence[int], interval: int, offset: Indices) -> list[tuple[int, float]]:
        """Terms of the time alone of what tasks do in an interval, as a share of the scale."""
        first, last = self.graph.windows
        return [
            (int(offset[task]) + interval - int(first[task]), float(self.graph.work_s[task] / self.graph.scale))
            for task in tasks
            if first[task] <= interval <= last[task]
        ]
