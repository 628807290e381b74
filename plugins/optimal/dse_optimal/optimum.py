"""The least makespan of an instance, proven by a solver of constraints (OR-tools CP-SAT).

Times are whole multiples of a unit, to which lengths are *rounded down*, so that what the solver proves of the rounded
instance is a lower bound of the instance itself. The order and the ways of the best schedule are then run by the fluid
engine with the lengths as they are. So `bound_s <= optimum <= seconds` holds whatever was rounded, and the two are
within 1e-6 of one another where the solver proves its optimum. Lengths of whole seconds are not rounded at all.

Wait, delay and work of a job are intervals, alternatives of which one is present; servers of one unit are disjunctive
constraints, the others cumulative ones. About 60 jobs are proven in seconds. A larger instance gets what was proven
until the time limit, and the gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dse import plugins
from dse.results.words import cell
from dse_optimal.instance import Instance, Job, JobSchedule, instance_of
from dse_optimal.subset_bounds import instance_bound
from simulators.taskgraph.graph import TaskGraph

PROVEN = 1e-6
"""Gap up to which a schedule is proven optimal: what rounding to units may add."""
_ROUNDING = 1e-9  # of a sum of numbers
_STEPS = 10**9  # units of all jobs one after the other
# beyond, integers of the solver would be larger than with rounded units
_MOST_WHOLE_S = 10**9  # sum of lengths up to which whole seconds are units


@dataclass(frozen=True)
class Optimum:
    """The best schedule of an instance, its makespan as the fluid engine runs it [s], and a proven lower bound [s]."""

    schedule: JobSchedule
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Possible gain of a better schedule: seconds / bound - 1."""
        # no bound: infinite in truth, reported as 100 %, or none if both are 0
        return self.seconds / self.bound_s - 1 if self.bound_s > 0 else float(self.seconds > 0)

    @property
    def proven(self) -> bool:
        """True if no schedule is shorter, but for rounding."""
        return self.gap <= PROVEN

    def __str__(self) -> str:
        """Say what was proven."""
        if self.proven:
            return f"{cell(self.seconds, 's')} is the least makespan of {len(self.schedule.ways)} jobs: proven"
        text = f"the best schedule of {len(self.schedule.ways)} jobs takes {cell(self.seconds, 's')}; not proven: "
        return f"{text}at least {cell(self.bound_s, 's')} are, a gap of {100 * self.gap:.1f} %"


def optimum(problem: Instance | TaskGraph, *, limit_s: float = 60.0, workers: int = 8, bounded: bool = True) -> Optimum:
    """The least makespan of an instance, or of a lowered design in any order, by CP-SAT within a time limit.

    workers: threads of the solver. bounded: the solver starts from `instance_bound`, and is left what that does not
    prove; without it, the solver is a witness of that bound. Raises ValueError for a graph that is no instance
    (`instance_of`).
    """
    instance = instance_of(problem) if isinstance(problem, TaskGraph) else problem
    fallback = instance.serial()  # whatever the solver finds, there is a schedule
    seconds = replay_s(fallback)
    if seconds == 0:
        return Optimum(fallback, 0.0, 0.0)
    least_s = instance_bound(instance) if bounded else 0.0
    schedule, bound_s = _Model(instance, _unit(instance), least_s, seconds).solve(limit_s, workers)
    if schedule is not None and (better := replay_s(schedule)) <= seconds:  # as run, not as the solver rounds it
        fallback, seconds = schedule, better
    bound_s = max(bound_s, least_s)
    if bound_s > seconds * (1 + _ROUNDING):  # a bound above a schedule is a fault in one of them, never a result
        raise RuntimeError(f"a schedule of {seconds} s is shorter than the bound of {bound_s} s: one of them is wrong")
    return Optimum(fallback, seconds, min(bound_s, seconds))  # rounding alone


def replay_s(schedule: JobSchedule) -> float:
    """Makespan of a schedule as the fluid engine runs it [s]."""
    return float(plugins.load("engine", "fluid").totals(schedule.graph()).makespan_s[0])


def _unit(instance: Instance) -> float:
    """Length of a unit of time [s]."""
    lengths = [length for job in instance.jobs for way in job.ways for length in (way.delay_s, way.work_s)]
    total = sum(lengths)
    if total <= _MOST_WHOLE_S and all(length.is_integer() for length in map(float, lengths)):
        return 1.0
    # the fastest ways one after another: no schedule need be longer
    return sum(min(way.seconds for way in job.ways) for job in instance.jobs) / _STEPS


@dataclass(frozen=True)
class _Times:
    """Variables of a job: its issue, the start of its work, and its end."""

    issue: Any
    work: Any
    end: Any


@dataclass(frozen=True)
class _Model:
    """The exact model, in units [s]. least_s, most_s: between which the makespan is known to be."""

    instance: Instance
    unit: float
    least_s: float
    most_s: float

    @cached_property
    def _cp(self) -> Any:
        try:
            from ortools.sat.python import cp_model  # slow to import
        except ImportError:
            way = "pip install 'overlap-dse-optimal[ortools]'"
            raise RuntimeError(f"the optimum needs ortools, which is not installed ({way})") from None
        return cp_model

    @cached_property
    def _model(self) -> Any:
        return self._cp.CpModel()

    @cached_property
    def _horizon(self) -> int:  # no longer than the schedule that is known
        return int(self.most_s / self.unit) + 1

    def _units(self, seconds: float) -> int:
        """A length in units, rounded down."""
        return int(seconds / self.unit * (1 + 1e-12))  # a whole number of units must not lose one to rounding

    def solve(self, limit_s: float, workers: int) -> tuple[JobSchedule | None, float]:
        """The best schedule, if there is one, and what is proven [s]."""
        model, times, choices = self._model, list[_Times](), list[list[Any]]()
        demands: list[list[tuple[Any, Any]]] = [[] for _ in self.instance.servers]
        makespan = model.new_int_var(int(self.least_s / self.unit), self._horizon, "makespan")
        for job in self.instance.jobs:
            choices.append([model.new_bool_var("") for _ in job.ways])
            model.add_exactly_one(choices[-1])
            times.append(self._times(job, choices[-1]))
            for before in job.after:
                model.add(times[-1].issue >= times[before].end)
            model.add(makespan >= times[-1].end)
            for server in dict.fromkeys(server for way in job.ways for server in way.takes):
                demands[server] += self._demands(job, server, choices[-1], times[-1])
        self._serve(demands)
        model.minimize(makespan)
        return self._answer(times, choices, limit_s, workers)

    def _times(self, job: Job, choices: list[Any]) -> _Times:
        """Variables of a job, and what its ways say of them."""
        model = self._model
        issue, work, end = (model.new_int_var(0, self._horizon, f"{name} {job.name}") for name in ("is", "at", "end"))
        length = sum(self._units(way.work_s) * choice for way, choice in zip(job.ways, choices, strict=True))
        model.add(end == work + length)  # of the chosen way
        for way, choice in zip(job.ways, choices, strict=True):
            ready = issue + self._units(way.delay_s)
            # servers that are taken for the work alone may be taken by others after the delay
            waits = way.delay_s > 0 and not self.instance.issue_only(way)
            model.add(work >= ready if waits else work == ready).only_enforce_if(choice)
        return _Times(issue, work, end)

    def _demands(self, job: Job, server: int, choices: list[Any], times: _Times) -> Iterator[tuple[Any, Any]]:
        """Yield (interval, units) in which a job takes a server: one if all its ways do, else one of each that does."""
        model, begin = self._model, times.issue if self.instance.servers[server].from_issue else times.work
        takers = [
            (way.takes[server], choice) for way, choice in zip(job.ways, choices, strict=True) if server in way.takes
        ]
        taken = model.new_int_var(0, self._horizon, "")  # length of the interval, which the choice of a way determines
        if len(takers) == len(job.ways):  # taken whatever the choice
            yield model.new_interval_var(begin, taken, times.end, ""), self._demand(takers)
            return
        for number, choice in takers:
            yield model.new_optional_interval_var(begin, taken, times.end, choice, ""), number

    def _demand(self, takers: list[tuple[int, Any]]) -> Any:
        """Units that a job takes: a number if all its ways take as many, else a variable."""
        numbers = [number for number, _ in takers]
        if min(numbers) == max(numbers):
            return numbers[0]
        demand = self._model.new_int_var(min(numbers), max(numbers), "")
        self._model.add(demand == sum(number * choice for number, choice in takers))
        return demand

    def _serve(self, demands: list[list[tuple[Any, Any]]]) -> None:
        """Add that no server gives more than it has."""
        for server, pairs in zip(self.instance.servers, demands, strict=True):
            intervals, units = [interval for interval, _ in pairs], [unit for _, unit in pairs]
            if all(isinstance(unit, int) and 2 * unit > server.units for unit in units):  # no two fit at once
                self._model.add_no_overlap(intervals)
            else:
                self._model.add_cumulative(intervals, units, server.units)

    def _answer(
        self, times: list[_Times], choices: list[Any], limit_s: float, workers: int
    ) -> tuple[JobSchedule | None, float]:
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = workers
        status = solver.solve(self._model)
        bound_s = max(0.0, solver.best_objective_bound) * self.unit
        if status == self._cp.UNKNOWN:  # no schedule within the limit
            return None, bound_s
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            raise RuntimeError(f"the solver of the exact model reports {solver.status_name(status)}")
        ways = tuple([solver.boolean_value(choice) for choice in of_job].index(True) for of_job in choices)
        starts = tuple(
            (
                solver.value(of_job.issue) * self.unit,
                solver.value(of_job.work) * self.unit,
                solver.value(of_job.end) * self.unit,
            )
            for of_job in times
        )
        return JobSchedule(self.instance, ways, starts), bound_s
