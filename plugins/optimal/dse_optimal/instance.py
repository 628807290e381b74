"""Instances of a scheduling problem: jobs of a fixed length, which have what serves them to themselves.

The class of schedules for which an exact model is exact. A job is done in one of its ways, a choice of engine, route or
CUs. It is issued once its predecessors are done, waits its delay, and then works without a pause at its rate alone, as
soon as all that it takes is free; a server that is taken `from_issue` (a stream, an engine, a slot) is taken during the
delay as well. No server gives more units than it has. Order, start and ways are free.

The fluid model allows more: rates below those alone, and so pauses. A schedule of an instance is therefore a run of the
fluid engine, in which nothing shares; the reverse holds for graphs without contention whose runs share nothing.
Lower bounds of the fluid model hold here too: docs/explanation/bounds.md.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter

import numpy as np

from simulators.taskgraph.graph import GraphBuilder, TaskGraph

SHARES = 10**6
"""Units of a resource of a task graph, of which a task takes its share, rounded down."""
_ROUNDING = 1e-3  # of a unit: what is that little below a whole number is that number
Node = tuple[int, str]  # (job, its wait or its work), as tasks of the schedule's graph
_WAIT, _WORK = "wait", "work"


@dataclass(frozen=True)
class JobServer:
    """What serves jobs: units, of which a job takes some from its issue to its end, or only while it works."""

    name: str
    units: int = 1
    from_issue: bool = False


@dataclass(frozen=True)
class Way:
    """One way to do a job: a delay, the work at the rate alone [s], and the units that it takes by server (index)."""

    work_s: float
    takes: Mapping[int, int] = field(default_factory=dict)
    delay_s: float = 0.0
    name: str = ""

    @property
    def seconds(self) -> float:
        """From issue to end, if nothing has to be waited for."""
        return self.delay_s + self.work_s


@dataclass(frozen=True)
class Job:
    """A job, its ways, and the jobs before it that must be done when it is issued, by index."""

    name: str
    kind: str
    ways: tuple[Way, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Instance:
    """Jobs in topological order, and their servers. Raises ValueError naming the job for what is no instance."""

    jobs: tuple[Job, ...]
    servers: tuple[JobServer, ...] = ()

    def __post_init__(self) -> None:
        """Check every job."""
        for index, job in enumerate(self.jobs):
            if problem := self._problem(index, job):
                raise ValueError(f"job {job.name!r} {problem}")

    def _problem(self, index: int, job: Job) -> str:
        if not job.ways:
            return "cannot be done: it has no way"
        if any(not 0 <= before < index for before in job.after):
            return f"waits for {list(job.after)}, which must be jobs before it ({index})"
        for way in job.ways:
            if not (np.isfinite(way.seconds) and min(way.work_s, way.delay_s) >= 0):
                return "takes a time that is negative or no number"
            for server, units in way.takes.items():
                if not 0 <= server < len(self.servers):
                    return f"takes server {server}, which is not declared"
                if not 0 < units <= self.servers[server].units:
                    return f"takes {units} of the {self.servers[server].units} units of {self.servers[server].name}"
        return ""

    def issue_only(self, way: Way) -> bool:
        """True if a way takes nothing that is free while it waits its delay."""
        return all(self.servers[server].from_issue for server in way.takes)

    def serial(self) -> JobSchedule:
        """The jobs one after the other, each in its fastest way; its graph starts them as early as the order allows."""
        clock, starts, ways = 0.0, [], []
        for job in self.jobs:
            choice = min(range(len(job.ways)), key=lambda place: job.ways[place].seconds)
            way = job.ways[choice]
            starts.append((clock, clock + way.delay_s, clock + way.seconds))
            ways.append(choice)
            clock += way.seconds
        return JobSchedule(self, tuple(ways), tuple(starts))


@dataclass(frozen=True)
class JobSchedule:
    """The way of each job, and its times of issue, of the start of its work and of its end [s].

    Only the order in which servers are taken matters for `graph`, so that times may be rounded.
    """

    instance: Instance
    ways: tuple[int, ...]
    times: tuple[tuple[float, float, float], ...]

    def way(self, job: int) -> Way:
        """The way in which a job is done."""
        return self.instance.jobs[job].ways[self.ways[job]]

    def rows(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield (job, its way, issue, end) in order of issue."""
        for job in sorted(range(len(self.ways)), key=lambda job: self.times[job]):
            yield self.instance.jobs[job].name, self.way(job).name, self.times[job][0], self.times[job][2]

    def graph(self) -> TaskGraph:
        """The task graph of the schedule: each job in its way, after those that leave it what it takes.

        Engines start every task as soon as that order allows. Servers are resources of their units, so that a schedule
        which takes more than there is would run longer than it says.
        """
        build, place = GraphBuilder(), dict[Node, int]()
        servers = [build.resource(server.name, float(server.units)) for server in self.instance.servers]
        before = self._edges()
        for node in TopologicalSorter(before).static_order():
            (job, part), way = node, self.way(node[0])
            # a job that is one task has its delay there
            numbers: dict[str, float] = {"delay": way.delay_s if part == _WAIT or self._is_one(job) else 0.0}
            uses: dict[int, float] = {}
            if part == _WORK and way.work_s > 0:
                numbers |= {"work": way.work_s, "cap": 1.0}  # work in seconds, at a rate of 1
                uses = {servers[server]: float(units) for server, units in way.takes.items()}
            about = self.instance.jobs[job]
            after = sorted(place[earlier] for earlier in before[node])
            place[node] = build.task(about.name, about.kind, after=after, uses=uses, **numbers)
        return build.build()

    def _is_one(self, job: int) -> bool:
        """Tell whether delay and work of a job are one task: nothing has to be free in between."""
        way = self.way(job)
        return way.delay_s == 0 or self.instance.issue_only(way)

    def _first(self, job: int) -> Node:
        return (job, _WORK if self._is_one(job) else _WAIT)

    def _edges(self) -> dict[Node, set[Node]]:
        """What each task waits for: predecessors, and those whose units it takes over."""
        before: dict[Node, set[Node]] = {}
        for index, job in enumerate(self.instance.jobs):
            before[self._first(index)] = {(earlier, _WORK) for earlier in job.after}
            if not self._is_one(index):
                before[index, _WORK] = {self._first(index)}
        for server in range(len(self.instance.servers)):
            for later, earlier in self._handed_over(server):
                node = self._first(later) if self.instance.servers[server].from_issue else (later, _WORK)
                before[node].add((earlier, _WORK))
        return before

    def _handed_over(self, server: int) -> Iterator[tuple[int, int]]:
        """Yield (job, one that leaves it units of a server). Units that were free first are taken first."""
        place = 0 if self.instance.servers[server].from_issue else 1
        users = [job for job in range(len(self.ways)) if server in self.way(job).takes]
        users.sort(key=lambda job: (self.times[job][place], self.times[job][2], job))
        # before the run, all units are free, and of no job
        free: list[tuple[float, int, int]] = [(-np.inf, -1, self.instance.servers[server].units)]
        for job in users:
            needs = self.way(job).takes[server]
            while needs:
                end, earlier, units = free.pop(0)
                if earlier >= 0:
                    yield job, earlier
                if units > needs:
                    free.insert(0, (end, earlier, units - needs))
                needs -= min(units, needs)  # units of several jobs, the earliest freed first
            free.append((self.times[job][2], job, self.way(job).takes[server]))
            free.sort()


def instance_of(graph: TaskGraph, design: int = 0) -> Instance:
    """The instance of a lowered design: its tasks at their rates alone, in a free order.

    A lane whose tasks wait for one another in turn is a stream: it serves one task at a time, from its issue to its
    end, and what its tasks of one kind wait for among themselves is an order that may be changed. Resources are taken
    by shares, and left out where the streams use less than there is. Raises ValueError for contention laws below 1,
    which make lengths depend on what runs beside, and for graphs that symmetry has reduced.
    """
    return _InstanceReader(graph.take(np.array([design]))).instance()


@dataclass(frozen=True)
class _InstanceReader:
    graph: TaskGraph

    def instance(self) -> Instance:
        graph = self.graph
        if (graph["factor"] < 1).any():  # a factor of 1 changes nothing
            raise ValueError("the graph has contention laws: lengths of its tasks are not fixed")
        if (graph.members > 1).any():
            raise ValueError("the graph is reduced by symmetry: give the one it was reduced from")
        takes, servers = self._takes()
        rate, work = graph.isolated_rate()[0], graph["work"][0]
        jobs = []
        for task, name in enumerate(graph.tasks):
            seconds = float(work[task] / rate[task]) if work[task] > 0 else 0.0  # 0 / inf or 0 / 0 otherwise
            way = Way(seconds, takes[task], float(graph["delay"][0][task]))
            after = [before for before in graph.predecessors(task).tolist() if not self._is_order(before, task)]
            jobs.append(Job(name, graph.kinds[task], (way,), tuple(after)))
        return Instance(tuple(jobs), servers)

    @cached_property
    def _streams(self) -> dict[str, int]:
        """Lanes in which each task waits for the one before it, and their number."""
        lanes: dict[str, list[int]] = defaultdict(list)
        for task, lane in enumerate(self.graph.lanes):
            lanes[lane].append(task)
        chains = [
            lane
            for lane, tasks in lanes.items()
            # a lane of one task needs no order
            if len(tasks) > 1 and all(a in self.graph.predecessors(b) for a, b in itertools.pairwise(tasks))
        ]
        return {lane: number for number, lane in enumerate(chains)}

    def _is_order(self, before: int, task: int) -> bool:
        """Tell whether a task waits for another one only because of the order of their stream."""
        lanes, kinds = self.graph.lanes, self.graph.kinds
        # a wait of another kind is a true dependency
        return lanes[before] == lanes[task] in self._streams and kinds[before] == kinds[task]

    def _takes(self) -> tuple[list[dict[int, int]], tuple[JobServer, ...]]:
        """Units that tasks take, by server, and the servers: streams, pools, then resources that may be short."""
        graph, takes = self.graph, [dict[int, int]() for _ in range(self.graph.num_tasks)]
        servers = [JobServer(lane, from_issue=True) for lane in self._streams]
        for task, lane in enumerate(graph.lanes):
            if lane in self._streams:
                takes[task][self._streams[lane]] = 1
        for task in np.flatnonzero(graph.pool >= 0).tolist():
            takes[task][len(servers) + int(graph.pool[task])] = 1
        servers += [
            JobServer(name, int(slots), from_issue=True)
            for name, slots in zip(graph.pools, graph.slots.tolist(), strict=True)
        ]
        for resource, shares in enumerate(self._shares()):
            if self._may_be_short(shares):
                for task, units in shares.items():
                    takes[task][len(servers)] = units
                servers.append(JobServer(graph.resources[resource], SHARES))
        return takes, tuple(servers)

    def _shares(self) -> list[dict[int, int]]:
        """Units that each task with work takes of each resource while it runs alone."""
        graph = self.graph
        rate, work = graph.isolated_rate()[0], graph["work"][0]
        use, capacity = graph["use"][0], graph["capacity"][0]
        shares: list[dict[int, int]] = [{} for _ in graph.resources]
        places = zip(graph.use_task.tolist(), graph.use_resource.tolist(), strict=True)
        for place, (task, resource) in enumerate(places):
            # rounded down, so that tasks which fit together still do
            units = int(use[place] * rate[task] / capacity[resource] * SHARES + _ROUNDING) if work[task] > 0 else 0
            if units:  # less than a millionth is left out
                shares[resource][task] = min(units, SHARES)  # rounding up by `_ROUNDING` must not exceed the whole
        return shares

    def _may_be_short(self, shares: Mapping[int, int]) -> bool:
        """Tell whether tasks that may run at once take more than there is; a stream runs one of its tasks."""
        largest: dict[object, int] = defaultdict(int)
        for task, units in shares.items():
            lane = self.graph.lanes[task]
            group: object = lane if lane in self._streams else task  # tasks of no stream may all run at once
            largest[group] = max(largest[group], units)
        return sum(largest.values()) > SHARES
