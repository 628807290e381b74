"""Stronger lower bounds: of subsets of the tasks of a resource, and of jobs that can be done in several ways.

`subset_bound` has the semantics of `simulators.taskgraph.bounds.bound` and is never below it. For a subset S of the
tasks that use a resource or a pool,

    makespan >= min over S of (h_t + delay_t) + load of S + min over S of q_t

holds by the same argument; the largest over all S has a first and a last time as thresholds, so that pairs of them are
enough (Carlier, The one-machine sequencing problem, EJOR 11, 1982: Jackson's preemptive schedule). The heads h and the
tails q are of that sort themselves: a task is issued after any subset of its ancestors has been through their resource.

`instance_bound` is the larger of that, for the jobs in their least lengths, and of a linear program that chooses shares
of the ways of all jobs, and the ends of the jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dse_optimal.instance import Instance, Way
from simulators.taskgraph.bounds import LinearRows
from simulators.taskgraph.graph import Floats, GraphBuilder, TaskGraph

# some of the distinct values: fewer thresholds weaken the bound, and keep it valid
_MOST_THRESHOLDS = 64  # of heads and of tails
_FEW_THRESHOLDS = 8  # likewise, in the linear program
# a matrix [T, T], and a bound for each task and resource
_MOST_TASKS = 512  # whose ancestors and descendants are served in heads and tails


def subset_bound(graph: TaskGraph, design: int = 0) -> float:
    """The largest bound by path, resource and slots of one design, over all subsets of the tasks of each [s]."""
    return _Subsets(graph.take(np.array([design]))).seconds()


def instance_bound(instance: Instance) -> float:
    """A makespan that no schedule of an instance gets below [s]. Raises RuntimeError where the linear program fails."""
    subsets = _Subsets(least_graph(instance))
    seconds = subsets.seconds()
    if all(len(job.ways) == 1 for job in instance.jobs):  # without a choice, the linear program adds nothing
        return seconds
    return max(seconds, _Ways(instance, subsets).solve())


def least_graph(instance: Instance) -> TaskGraph:
    """A task graph whose runs need no longer than any schedule of an instance, for bounds of the fluid model.

    Each job has the least delay and work of its ways, and loads what all its ways take by the least that one does. A
    delay during which anything is taken is part of the work.
    """
    build = GraphBuilder()
    servers = [build.resource(server.name, float(server.units)) for server in instance.servers]
    for job in instance.jobs:
        # only what is taken in every way is sure to be taken
        common = set.intersection(*(set(way.takes) for way in job.ways))
        # a server that is taken from the issue is taken during the delay
        taken = any(instance.servers[server].from_issue for server in common)
        work = min(way.seconds if taken else way.work_s for way in job.ways)
        delay = 0.0 if taken else min(way.delay_s for way in job.ways)
        # each minimum alone keeps the bound valid, though no way may have all
        loads = {server: min(_load(instance, way, server) for way in job.ways) for server in common}
        uses = {servers[server]: load / work for server, load in loads.items() if load > 0}
        lane = instance.servers[min(common)].name if common else ""
        numbers = {"work": work, "cap": 1.0} if work > 0 else {}
        build.task(
            job.name, job.kind, after=job.after, uses=uses if work > 0 else {}, lane=lane, delay=delay, **numbers
        )
    return build.build()


def _load(instance: Instance, way: Way, server: int) -> float:
    """Seconds of units that a way takes of a server."""
    return (way.seconds if instance.servers[server].from_issue else way.work_s) * way.takes.get(server, 0)


@dataclass(frozen=True)
class _Users:
    """Tasks that use a resource or a pool: from when after their issue, for which share of its time [s]."""

    tasks: NDArray[np.intp]
    after_s: Floats
    loads: Floats


@dataclass(frozen=True)
class _Subsets:
    """Heads, tails and bounds of a graph of one design."""

    graph: TaskGraph

    @property
    def served(self) -> list[_Users]:
        """The users of resources and pools that heads and tails count: none in large graphs."""
        return self.users if self.graph.num_tasks <= _MOST_TASKS else []

    def seconds(self) -> float:
        """The bound [s]."""
        alone, head, tail = self.alone_s, self.heads, self.tails
        best = float((head + alone + tail).max(initial=0.0))
        for users in self.users:
            start = head[users.tasks] + users.after_s
            best = max(best, _largest(start, users.loads, tail[users.tasks]))
        return best

    @cached_property
    def alone_s(self) -> Floats:
        """Delay and work at the rate alone of each task [T]."""
        return np.asarray(self._work_s + self.graph["delay"][0])

    @cached_property
    def _work_s(self) -> Floats:
        graph = self.graph
        with np.errstate(invalid="ignore", divide="ignore"):
            seconds = graph["work"][0] / graph.isolated_rate()[0]
        return np.where(graph["work"][0] > 0, seconds, 0.0)

    @cached_property
    def users(self) -> list[_Users]:
        """Of each resource, then of each pool."""
        graph, delay = self.graph, self.graph["delay"][0]
        use, work, capacity = graph["use"][0], graph["work"][0], graph["capacity"][0]
        result = []
        for resource in range(len(graph.resources)):
            uses = np.flatnonzero((graph.use_resource == resource) & (work[graph.use_task] > 0))
            tasks = graph.use_task[uses].astype(np.intp)
            # an infinite resource is never short
            loads = np.where(np.isfinite(capacity[resource]), use[uses] * work[tasks] / capacity[resource], 0.0)
            result.append(_Users(tasks, delay[tasks], loads))
        for pool, slots in enumerate(graph.slots.tolist()):
            tasks = np.flatnonzero(graph.pool == pool)
            loads = self.alone_s[tasks] * graph.members[tasks] / slots
            result.append(_Users(tasks, np.zeros(len(tasks)), loads))  # a slot is taken from the issue
        return result

    @cached_property
    def apart(self) -> Floats:
        """Longest path [T, T] from the end of a task to the issue of a later one; -inf where that does not wait."""
        graph, alone = self.graph, self.alone_s
        apart = np.full((graph.num_tasks, graph.num_tasks), -np.inf)
        for task in range(graph.num_tasks):
            for before in graph.predecessors(task).tolist():
                # through the predecessor, from each of its ancestors
                np.maximum(apart[:, task], apart[:, before] + alone[before], out=apart[:, task])
                apart[before, task] = max(apart[before, task], 0.0)  # directly: at once
        return apart

    @cached_property
    def heads(self) -> Floats:
        """Earliest issue of each task [T]: after its longest path, and after its ancestors have been served."""
        graph, alone = self.graph, self.alone_s
        heads = np.zeros(graph.num_tasks)
        for task in range(graph.num_tasks):
            for before in graph.predecessors(task).tolist():
                heads[task] = max(heads[task], heads[before] + alone[before])
            for users in self.served:
                places = self.apart[users.tasks, task] >= 0
                if places.sum() > 1:  # of a single ancestor, the path says the same
                    tasks = users.tasks[places]
                    start, left = heads[tasks] + users.after_s[places], self.apart[tasks, task]
                    heads[task] = max(heads[task], _largest(start, users.loads[places], left))
        return heads

    @cached_property
    def tails(self) -> Floats:
        """Least time from the end of each task to the end of the run [T], likewise by its descendants."""
        graph, alone = self.graph, self.alone_s
        tails = np.zeros(graph.num_tasks)
        for task in reversed(range(graph.num_tasks)):
            for users in self.served:
                places = self.apart[task, users.tasks] >= 0
                if places.sum() > 1:
                    tasks = users.tasks[places]
                    # likewise from its end to the issue of its descendants
                    start = self.apart[task, tasks] + users.after_s[places]
                    tails[task] = max(tails[task], _largest(start, users.loads[places], tails[tasks]))
            for before in graph.predecessors(task).tolist():
                tails[before] = max(tails[before], tails[task] + alone[task])
        return tails


def _largest(starts: Floats, loads: Floats, ends: Floats) -> float:
    """The largest of `min start + load + min end` over subsets of tasks, or 0 for none."""
    if not len(starts):
        return 0.0
    first, last = _several(starts, _MOST_THRESHOLDS)[:, None], _several(ends, _MOST_THRESHOLDS)[:, None]
    # pairs of thresholds: tasks that start no earlier, and have no less after them
    late, long = (starts >= first).astype(float), (ends >= last).astype(float)
    sums = first + (late * loads) @ long.T + last.T
    return float(np.where(late @ long.T > 0, sums, 0.0).max())  # pairs with no task bound nothing


@dataclass(frozen=True)
class _Ways:
    """The linear program: shares of ways, the ends of jobs, and the makespan, under what every schedule keeps."""

    instance: Instance
    subsets: _Subsets

    @cached_property
    def _first_way(self) -> NDArray[np.intp]:
        """Variable of the first way of each job, and the number of ways; ends come after them, the makespan last."""
        return np.concatenate([[0], np.cumsum([len(job.ways) for job in self.instance.jobs])]).astype(np.intp)

    def _terms(self, job: int, lengths: Iterator[float], sign: float = 1.0) -> list[tuple[int, float]]:
        begin = int(self._first_way[job])
        return [(begin + place, sign * length) for place, length in enumerate(lengths) if length]

    def solve(self) -> float:
        """The least makespan of the program [s]."""
        from scipy.optimize import linprog

        jobs, ways = self.instance.jobs, int(self._first_way[-1])
        makespan, rows, equal = ways + len(jobs), LinearRows(), LinearRows()
        for index, job in enumerate(jobs):  # one way for each job, in shares
            equal.add("way", [(place, 1.0) for place in range(self._first_way[index], self._first_way[index + 1])], 1.0)
            # what follows a job follows its end
            rows.add("end", [(ways + index, 1.0), (makespan, -1.0)], -float(self.subsets.tails[index]))
            lengths = self._terms(index, (way.seconds for way in job.ways))
            # its issue is not before its head
            rows.add("start", [*lengths, (ways + index, -1.0)], -float(self.subsets.heads[index]))
            for before in job.after:
                # nor before the end of a job it waits for
                rows.add("path", [*lengths, (ways + before, 1.0), (ways + index, -1.0)])
        for server in range(len(self.instance.servers)):
            self._serve(rows, server)
        cost = np.zeros(makespan + 1)
        cost[-1] = 1.0
        parts = {"A_ub": rows.matrix(len(cost)), "b_ub": rows.limits, "A_eq": equal.matrix(len(cost))}
        solved = linprog(cost, **parts, b_eq=equal.limits, bounds=(0, None), method="highs")
        if solved.status != 0:
            raise RuntimeError(f"the linear program of the bound was not solved: {solved.message}")
        return float(solved.fun)

    def _serve(self, rows: LinearRows, server: int) -> None:
        """Add that subsets of the users of a server are served before the end, and before what waits for them."""
        instance, subsets = self.instance, self.subsets
        ways = int(self._first_way[-1])
        users = [index for index, job in enumerate(instance.jobs) if any(server in way.takes for way in job.ways)]
        if not users:
            return
        # a server that is taken from the issue is taken before the delay is over
        waits = 0.0 if instance.servers[server].from_issue else 1.0
        delays = [waits * min(way.delay_s for way in instance.jobs[user].ways) for user in users]
        starts = subsets.heads[users] + np.array(delays)
        for first, last, among in _thresholds(starts, subsets.tails[users]):
            self._add(
                rows, server, [users[place] for place in among], first + last, [(ways + len(instance.jobs), -1.0)]
            )
        for index, job in enumerate(instance.jobs if subsets.served else ()):
            before = np.flatnonzero(subsets.apart[users, index] >= 0)
            if before.size > 1:
                lengths = self._terms(index, (way.seconds for way in job.ways))
                # served between the heads of these users and the issue of the job
                for first, last, among in _thresholds(starts[before], subsets.apart[np.array(users)[before], index]):
                    group = [users[before[place]] for place in among]
                    self._add(rows, server, group, first + last, [*lengths, (ways + index, -1.0)])

    def _add(
        self, rows: LinearRows, server: int, users: list[int], least: float, ends: list[tuple[int, float]]
    ) -> None:
        """Add a row: `least` and the load of the users is no more than what `ends` stand for, with a minus."""
        instance, units, row = self.instance, self.instance.servers[server].units, dict(ends)
        for user in users:
            loads = (_load(instance, way, server) / units for way in instance.jobs[user].ways)
            for place, load in self._terms(user, loads):
                row[place] = row.get(place, 0.0) + load
        rows.add(instance.servers[server].name, list(row.items()), -least)


def _thresholds(starts: Floats, ends: Floats) -> Iterator[tuple[float, float, NDArray[np.intp]]]:
    """Yield (least start, least end, places of the tasks with no less) for pairs of some of the starts and ends."""
    seen = set[tuple[int, ...]]()
    for start in _several(starts, _FEW_THRESHOLDS):
        for end in _several(ends, _FEW_THRESHOLDS):
            among = np.flatnonzero((starts >= start) & (ends >= end))
            if among.size and tuple(among) not in seen:  # other thresholds often leave the same tasks
                seen.add(tuple(among.tolist()))
                yield float(starts[among].min()), float(ends[among].min()), among


def _several(values: Floats, most: int) -> Floats:
    """At most so many of the distinct values, among them the least and the largest."""
    distinct = np.unique(values)
    # evenly, the least and the largest among them
    places = np.unique(np.linspace(0, len(distinct) - 1, most).round().astype(int))
    return np.asarray(distinct[places])
