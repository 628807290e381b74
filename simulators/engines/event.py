"""The reference engine: one SimPy process per task, rates re-solved once per instant.

Written for readability. Two rules make its runs deterministic to the bit: everything that ends within 1e-12 of the
clock ends in the same *canonical instant*; and an instant consists of rounds, each of which first processes all
completions and newly ready tasks and then grants free slots in (instant became ready, task index) order.

`fair_rates`, weighted max-min fair rates under strict priority, are the basis of every engine's semantics.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority

from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.timeline import Timeline, Totals

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def fair_rates(use: Floats, *, capacity: Floats, cap: Floats, weight: Floats, priority: NDArray[np.int32]) -> Floats:
    """Rates [A] of active tasks by progressive filling.

    use [A, R]: units of resource per unit of work; capacity [R]; cap, weight, priority [A]. In each priority class,
    lowest number first, all rates rise as weight * level until a task meets its cap or a resource it uses is
    exhausted; that task stops, and the others go on. (Bertsekas and Gallager, Data Networks, §6.5.2, with weights.)
    """
    rate = np.zeros(len(cap))  # all rates start at 0 and rise together
    left = capacity.astype(float).copy()
    for level in np.unique(priority):  # sorted: a lower number is served first, others get what it leaves
        rising = priority == level
        while rising.any():
            # tasks that do not rise have weight 0, and ask for nothing
            rise, stopped, tight = _next_stop(use, left, np.where(rising, weight, 0.0), cap - rate)
            gained = np.where(rising, weight * rise, 0.0)
            rate = np.minimum(rate + gained, cap)  # rounding must not exceed a cap
            # exactly 0 where exhausted, so that later priorities get nothing
            left = np.where(tight, 0.0, np.maximum(left - gained @ use, 0.0))
            rising &= ~stopped
    return rate


def _next_stop(use: Floats, left: Floats, weight: Floats, room: Floats) -> tuple[float, Flags, Flags]:
    """Rise of the level, flags of the tasks that stop there (cap met or resource exhausted), of exhausted resources."""
    demand = weight @ use
    rising = weight > 0
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 and inf - inf, which `where` discards
        by_resource = np.where(demand > 0, left / demand, np.inf)
        by_cap = np.where(rising, room / weight, np.inf)
    # no resource or no task: nothing stops the rise
    rise = max(0.0, float(min(by_resource.min(initial=np.inf), by_cap.min(initial=np.inf))))
    tight = by_resource <= rise * (1 + 1e-12)  # ties within rounding stop together
    # a task on an exhausted resource can rise no further
    stopped = (by_cap <= rise * (1 + 1e-12)) | (use[:, tight] > 0).any(axis=1)
    return rise, stopped & rising, tight


_SAME_INSTANT = 1e-12  # relative: ends that differ by rounding are one instant, or ties would be broken by it
_LAST = EventPriority(9)  # SimPy runs simultaneous events by priority; this one is the last


class EventEngine:
    """Discrete-event engine, exact for every task graph."""

    version = "1"
    batch = 16  # each design runs in Python: larger batches save nothing
    exact = True

    def run(self, graph: TaskGraph) -> Timeline:
        """Simulate each design of the batch."""
        numbers = {name: graph[name] for name in graph.at}
        machines = [
            _Machine(graph, {name: table[design] for name, table in numbers.items()})
            for design in range(graph.num_designs)
        ]
        for machine in machines:
            machine.run()
        issued = np.array([machine.issued for machine in machines])
        finished = np.array([machine.finished for machine in machines])
        return Timeline(graph, issued, finished)

    def totals(self, graph: TaskGraph) -> Totals:
        """Compute the totals from the timeline."""
        return self.run(graph).totals()


class _Machine:
    """The resources, pools and tasks of one design."""

    def __init__(self, graph: TaskGraph, numbers: Mapping[str, Floats]) -> None:
        """Set up a machine from numbers [T], [U], [R] or [S], by their names in the graph."""
        self.env = simpy.Environment()
        self.graph = graph
        tasks = graph.num_tasks
        self.work, self.delay = numbers["work"], numbers["delay"]
        self.cap, self.weight = numbers["cap"], numbers["weight"]
        self.capacity, self.factor = numbers["capacity"], numbers["factor"]
        # dense, for clarity; the compiled engines keep incidence rows
        self.use = np.zeros((tasks, len(graph.resources)))
        # adds up where a task names a resource twice
        np.add.at(self.use, (graph.use_task, graph.use_resource), numbers["use"])
        self.free = [int(slots) for slots in graph.slots]
        self.issued, self.finished = np.zeros(tasks), np.zeros(tasks)
        self.done = [self.env.event() for _ in range(tasks)]
        self.instant = 0  # counted, because two instants may share one clock value
        self.waiting: dict[int, tuple[float, simpy.Event]] = {}  # ready tasks without a slot: instant, grant
        self.delays: dict[int, tuple[float, simpy.Event]] = {}  # end of the delay
        self.active: dict[int, tuple[float, simpy.Event]] = {}  # remaining work

    def run(self) -> None:
        for task in range(self.graph.num_tasks):
            self.env.process(self.task(task))
        clock = self.env.process(self.clock())
        self.env.run(until=clock)

    def task(self, task: int) -> Generator[simpy.Event, Any, None]:
        """Process of a task: wait for the predecessors, a slot, the delay and the work."""
        yield self.env.all_of([self.done[before] for before in self.graph.predecessors(task)])
        # every task asks, even without a pool: the clock issues all of them in one order
        yield self.expect(self.waiting, task, self.instant)
        self.issued[task] = self.env.now
        if self.delay[task] > 0:  # no event for nothing: it would cost a round
            yield self.expect(self.delays, task, self.env.now + self.delay[task])
        if self.work[task] > 0:
            yield self.expect(self.active, task, self.work[task])
        self.finished[task] = self.env.now
        if self.graph.pool[task] >= 0:
            self.free[self.graph.pool[task]] += 1
        self.done[task].succeed()  # after the slot is free, so that a follower may take it in the same instant

    def expect(self, where: dict[int, tuple[float, simpy.Event]], task: int, value: float) -> simpy.Event:
        """Event that the clock triggers."""
        event = self.env.event()
        where[task] = (value, event)
        return event

    def clock(self) -> Generator[simpy.Event, Any, None]:
        """Process of the clock: settle rounds until no slot is granted, solve the rates once, go to the next end."""
        yield self.settle()
        while True:
            while self.grant():  # granted tasks may end at once, which frees slots and readies others
                yield self.settle()
            rates = self.rates()
            if not self.delays and not self.active:  # all have ended
                return
            ends = self.ends(rates)
            now = min(ends.values())
            yield self.env.timeout(max(0.0, now - self.env.now))  # rounding of an end before now
            self.instant += 1
            self.finish([t for t, end in ends.items() if end <= now + _SAME_INSTANT * now], rates, now)
            yield self.settle()

    def settle(self) -> simpy.Event:
        """Event that occurs now, after all events already triggered."""
        event = simpy.Event(self.env)
        event._ok, event._value = True, None  # triggered without `succeed`, which would schedule it at normal priority
        self.env.schedule(event, priority=_LAST)
        return event

    def grant(self) -> bool:
        """Grant free slots to waiting tasks in (instant became ready, index) order; return whether any was granted."""
        granted = []
        # the first of a pool blocks only those of that pool
        for task in sorted(self.waiting, key=lambda t: (self.waiting[t][0], t)):
            pool = self.graph.pool[task]
            if pool >= 0 and self.free[pool] == 0:
                continue  # no slot; tasks without a pool need none
            if pool >= 0:
                self.free[pool] -= 1
            granted.append(task)
        self.trigger(self.waiting, granted)
        return bool(granted)

    def rates(self) -> dict[int, float]:
        """Fair rates of the active tasks."""
        tasks = sorted(self.active)
        if not tasks:
            return {}
        solution = fair_rates(
            self.use[tasks],
            capacity=self.capacity,
            cap=self.cap[tasks] * self.slowdown(tasks),  # a law acts on the cap, not on the resource
            weight=self.weight[tasks],
            priority=self.graph.priority[tasks],
        )
        return dict(zip(tasks, solution.tolist(), strict=True))

    def slowdown(self, tasks: list[int]) -> Floats:
        """Factor on the cap of each active task: the product over the other groups with an active task."""
        groups = self.graph.group[tasks]
        factors = np.ones(len(tasks))
        for (group, other), factor in zip(self.graph.slowed, self.factor, strict=True):
            if (groups == other).any():
                factors[groups == group] *= factor
        return factors

    def ends(self, rates: dict[int, float]) -> dict[int, float]:
        """End times of delays and active tasks at the present rates (inf where a higher priority takes everything)."""
        working = {
            t: self.env.now + left / rates[t] if rates[t] > 0 else np.inf for t, (left, _) in self.active.items()
        }
        return working | {task: end for task, (end, _) in self.delays.items()}

    def finish(self, ended: list[int], rates: dict[int, float], now: float) -> None:
        """Progress all active tasks to `now`, then end those that are due."""
        step = now - self.last
        for task, (left, event) in self.active.items():  # values are replaced while iterating, keys are not
            self.active[task] = (left - rates[task] * step, event)
        self.last = now
        self.trigger(self.delays, [task for task in ended if task in self.delays])
        self.trigger(self.active, [task for task in ended if task in self.active])

    last = 0.0

    @staticmethod
    def trigger(where: dict[int, tuple[float, simpy.Event]], tasks: Iterable[int]) -> None:
        for task in sorted(tasks):  # a fixed order, whatever that of the dictionary
            where.pop(task)[1].succeed()


ENGINE = EventEngine()
