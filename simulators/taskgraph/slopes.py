"""Slopes of the makespan: exact one-sided derivatives along directions in which a graph's numbers change.

The makespan is smooth in the numbers between the values at which the order of events changes. So the events are run on
dual numbers a + b e, with an infinitesimal e > 0: they are ordered by a, then by b. What ends in one instant ends one
after the other where the slopes of the ends differ, with new rates between, so that a derivative is that of its own
side of a kink. Where the order of equal instants decides who gets a slot, the makespan may jump; its limit is returned.

Directions to which the same happens are run together; the others are run again, in as many groups as there are orders.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.taskgraph.graph import Floats, TaskGraph
from simulators.taskgraph.symmetry import Classes, classes_of

Flags = NDArray[np.bool_]
# ends that close are one instant, whose order slopes decide
_SAME = 1e-12  # relative distance of values that are equal, as in the engines
_STILL = float(np.finfo(float).tiny)  # rate at which work never ends
_LIKE = 1e-9  # of slopes, relative to the largest one


@dataclass(frozen=True)
class Slopes:
    """Makespan [s] just beside a design in each direction [D], and its change [s] by unit of the direction [D]."""

    makespan_s: Floats
    slope: Floats


@dataclass(frozen=True)
class _Dual:
    """Numbers [...] and their slopes [..., D]."""

    value: Floats
    slope: Floats

    def __add__(self, other: _Dual) -> _Dual:
        return _Dual(self.value + other.value, self.slope + other.slope)

    def __sub__(self, other: _Dual) -> _Dual:
        return _Dual(self.value - other.value, self.slope - other.slope)

    def __mul__(self, other: _Dual) -> _Dual:
        slope = self.value[..., None] * other.slope + other.value[..., None] * self.slope
        return _Dual(self.value * other.value, slope)

    def __truediv__(self, other: _Dual) -> _Dual:
        value = self.value / other.value
        return _Dual(value, (self.slope - value[..., None] * other.slope) / other.value[..., None])

    def __getitem__(self, places: Any) -> _Dual:
        return _Dual(self.value[places], self.slope[places])

    def __setitem__(self, places: Any, numbers: _Dual) -> None:
        self.value[places], self.slope[places] = numbers.value, numbers.slope

    @classmethod
    def zeros(cls, size: int, directions: int) -> _Dual:
        """So many zeros."""
        return cls(np.zeros(size), np.zeros((size, directions)))

    @classmethod
    def concatenate(cls, first: _Dual, second: _Dual) -> _Dual:
        """Numbers after one another."""
        return cls(np.concatenate([first.value, second.value]), np.concatenate([first.slope, second.slope]))


def slopes(graph: TaskGraph, directions: Floats) -> Slopes:
    """One-sided derivatives of the makespan of a graph of one design.

    directions [K, D]: slope of each column of numbers in each direction. Raises ValueError for a graph of several
    designs, and RuntimeError if tasks wait for ever.
    """
    if graph.num_designs != 1:
        raise ValueError(f"slopes are of one design, not of {graph.num_designs}")
    columns, classes = graph.columns()[:, 0], classes_of(graph)
    sides = Slopes(*np.full((2, directions.shape[1]), math.nan))  # of no direction yet
    left = np.arange(directions.shape[1])
    while left.size:
        events = _Events(graph, classes, _Dual(columns, directions[:, left]))
        end = events.run()
        alike = events.alike  # at least the first direction is like itself
        sides.makespan_s[left[alike]] = end.value
        sides.slope[left[alike]] = end.slope[alike]
        left = left[~alike]  # those in which events came in another order
    return sides


@dataclass
class _FairRates:
    """Rates of classes on the resources, remembered by the counts of active tasks. alike: that of `_Events`."""

    graph: TaskGraph
    classes: Classes
    columns: _Dual
    alike: Flags
    solved: dict[bytes, _Dual] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at, first, uses = self.graph.at, self.classes.first, self.classes.uses
        self.cap, self.weight = self.columns[at["cap"][first]], self.columns[at["weight"][first]]
        self.use, self.capacity = self.columns[at["use"][uses]], self.columns[at["capacity"]]
        self.factor = self.columns[at["factor"]]
        self.use_class, self.use_resource = self.classes.use_class, self.graph.use_resource[uses]
        self.group, self.priority = self.graph.group[first], self.graph.priority[first]

    def first(self, numbers: _Dual) -> NDArray[np.intp]:
        """Places of the numbers that are least once e > 0, in the first direction; others that differ are marked."""
        near = np.flatnonzero(numbers.value <= numbers.value.min() * (1 + _SAME))  # candidates: equal to rounding
        if near.size == 1:
            return near
        steep = numbers.slope[near]
        is_first = steep <= steep.min(axis=0) + _LIKE * np.abs(numbers.slope).max(axis=0)
        # directions in which others would be first are run again
        self.alike &= (is_first == is_first[:, :1]).all(axis=0)
        return np.asarray(near[is_first[:, 0]])

    def rates(self, count: NDArray[np.intp]) -> _Dual:
        """Rate [C] of each class with so many active tasks; 0 for one with none."""
        key = count.tobytes()  # rates depend on nothing else
        if key not in self.solved:
            self.solved[key] = self._fair(count)
        return self.solved[key]

    def _fair(self, count: NDArray[np.intp]) -> _Dual:
        """Weighted max-min fair rates, priority after priority (see `simulators.engines.event`)."""
        rate = _Dual.zeros(count.size, self.alike.size)
        cap, exhausted = self._caps(count), np.zeros(len(self.graph.resources), np.bool_)
        # counts do not change along a direction
        members = _Dual(count[self.use_class].astype(float), np.zeros((self.use_class.size, self.alike.size)))
        total = members * self.use
        for level in np.unique(self.priority[count > 0]):
            rising = (count > 0) & (self.priority == level)
            while rising.any():
                # anew from the rates so far: slopes of what others take are in it
                left = self.capacity - self._sums(total * rate[self.use_class], slice(None))
                left.value[left.value < _SAME * self.capacity.value] = 0.0  # exhausted, but for rounding
                left[exhausted] = _Dual.zeros(int(exhausted.sum()), self.alike.size)  # exactly 0, value and slope
                demand = self._sums(total * self.weight[self.use_class], rising[self.use_class])
                wanted, capped = np.flatnonzero(demand.value > 0), np.flatnonzero(rising & np.isfinite(cap.value))
                levels = _Dual.concatenate(left[wanted] / demand[wanted], cap[capped] / self.weight[capped])
                chosen = self.first(levels)
                # resources come first in `levels`, caps after them
                tight, met = wanted[chosen[chosen < wanted.size]], capped[chosen[chosen >= wanted.size] - wanted.size]
                exhausted[tight] = True
                stopped = np.zeros_like(rising)
                stopped[self.use_class[np.isin(self.use_resource, tight)]] = True
                stopped[met] = True
                stopped &= rising
                # the level of the first of equal ones, with its slope
                rate[stopped] = self.weight[stopped] * levels[chosen[:1]]
                rate[met] = cap[met]  # a cap is reached to the last bit
                rising &= ~stopped
        return rate

    def _caps(self, count: NDArray[np.intp]) -> _Dual:
        """Caps [C] under the contention laws of groups that are active."""
        cap = _Dual(self.cap.value.copy(), self.cap.slope.copy())
        active = set(self.group[count > 0].tolist())
        for law, (group, other) in enumerate(self.graph.slowed.tolist()):
            if other in active:
                # infinity times a slope of 0 is no number
                which = np.flatnonzero((self.group == group) & np.isfinite(cap.value))
                cap[which] = cap[which] * self.factor[[law]]
        return cap

    def _sums(self, uses: _Dual, which: Flags | slice) -> _Dual:
        """Sum [R] over some rows of uses [U]."""
        sums = _Dual.zeros(len(self.graph.resources), self.alike.size)
        np.add.at(sums.value, self.use_resource[which], uses.value[which])
        np.add.at(sums.slope, self.use_resource[which], uses.slope[which])
        return sums


class _Events:
    """One run of the events, in the order of the first direction.

    alike [D]: directions to which the same happened; the numbers of all others mean nothing. due [T]: end of a task's
    delay, or the virtual time of its class at which its work is done.
    """

    def __init__(self, graph: TaskGraph, classes: Classes, columns: _Dual) -> None:
        directions = columns.slope.shape[1]
        self.alike = np.ones(directions, np.bool_)
        self._of = classes.of
        self._rates = _FairRates(graph, classes, columns, self.alike)
        self._work, self._delay = columns[graph.at["work"]], columns[graph.at["delay"]]
        self._now = _Dual(np.zeros(()), np.zeros(directions))
        self._virtual = _Dual.zeros(classes.first.size, directions)
        self._count = np.zeros(classes.first.size, np.intp)
        self._due = _Dual.zeros(graph.num_tasks, directions)
        self._delayed: list[int] = []
        self._working: list[int] = []
        self._pending = np.diff(graph.pred_ptr).tolist()
        self._followers: list[list[int]] = [[] for _ in graph.tasks]
        for task in range(graph.num_tasks):
            for before in graph.predecessors(task).tolist():
                self._followers[before].append(task)
        self._pool, self._free = graph.pool.tolist(), graph.slots.tolist()
        self._queues: list[list[tuple[int, int]]] = [[] for _ in graph.pools]
        self._instant = 0

    def run(self) -> _Dual:
        """Return the makespan. Raises RuntimeError if tasks wait for ever."""
        ready, done = [task for task, pending in enumerate(self._pending) if not pending], list[int]()
        while True:
            while ready or done:
                # tasks with neither delay nor work end at once, which takes another round
                ready, done = [], self._issue(self._grants(ready + self._followers_of(done)))
            if not self._delayed and not self._working:
                return self._now
            rate = self._rates.rates(self._count)
            # starved, or so nearly that an end would be infinite
            going = [task for task in self._working if rate.value[self._of[task]] > _STILL]
            if not going and not self._delayed:
                raise RuntimeError("tasks wait for ever: a higher priority never leaves them any of a resource")
            done = self._advance(rate, going)

    def _followers_of(self, done: list[int]) -> list[int]:
        """Tasks that wait for nothing any more once some are done."""
        ready = []
        for task in done:
            if self._pool[task] >= 0:
                self._free[self._pool[task]] += 1
            for follower in self._followers[task]:
                self._pending[follower] -= 1
                if not self._pending[follower]:
                    ready.append(follower)
        return ready

    def _grants(self, ready: list[int]) -> list[int]:
        """Tasks that are issued now: slots are granted by the instant in which tasks became ready, then by index."""
        issued = [task for task in ready if self._pool[task] < 0]
        for task in ready:
            if self._pool[task] >= 0:
                # earlier instants first, then lower indices, as in the engines
                heapq.heappush(self._queues[self._pool[task]], (self._instant, task))
        for pool, queue in enumerate(self._queues):
            while self._free[pool] and queue:
                issued.append(heapq.heappop(queue)[1])
                self._free[pool] -= 1
        return issued

    def _issue(self, tasks: list[int]) -> list[int]:
        """Begin the delay or the work of tasks, and return those that have neither."""
        done = []
        for task in tasks:
            if self._lasts(self._delay[task]):
                self._due[task] = self._now + self._delay[task]
                self._delayed.append(task)
            elif not self._begin(task):
                done.append(task)
        return done

    def _begin(self, task: int) -> bool:
        """Begin the work of a task; False if it has none."""
        if not self._lasts(self._work[task]):
            return False
        of = self._of[task]
        self._due[task] = self._virtual[of] + self._work[task]
        self._count[of] += 1
        self._working.append(task)
        return True

    def _lasts(self, number: _Dual) -> bool:
        """Return True for a number above 0 once e > 0, in the first direction; others that differ are marked."""
        if number.value > 0:
            return True
        above = number.slope > 0
        self.alike &= above == above[0]
        return bool(above[0])

    def _advance(self, rate: _Dual, going: list[int]) -> list[int]:
        """Go to the next end, and return the tasks that are done."""
        tasks = np.array(self._delayed + going)
        of = self._of[going]
        left = (self._due[going] - self._virtual[of]) / rate[of]
        ends = _Dual.concatenate(self._due[self._delayed], self._now[None] + left)
        ends.value[:] = np.maximum(ends.value, self._now.value)
        chosen = self._rates.first(ends)
        upcoming = ends[chosen[0]]
        self._virtual = self._virtual + rate * (upcoming - self._now)[None]
        self._now = upcoming
        self._instant += 1
        late = np.flatnonzero(ends.value <= upcoming.value * (1 + _SAME))
        for task in tasks[late].tolist():  # those of the same instant, as far as values go
            self._due.value[task] = upcoming.value if task in self._delayed else self._virtual.value[self._of[task]]
        return self._finish(set(tasks[chosen].tolist()))

    def _finish(self, ended: set[int]) -> list[int]:
        """Take tasks whose delay or work is over off the clock, and return those that are done."""
        begun = [task for task in self._delayed if task in ended]
        done = [task for task in self._working if task in ended]
        self._delayed = [task for task in self._delayed if task not in ended]
        self._working = [task for task in self._working if task not in ended]
        for task in done:
            self._count[self._of[task]] -= 1
        return sorted(done + [task for task in begun if not self._begin(task)])
