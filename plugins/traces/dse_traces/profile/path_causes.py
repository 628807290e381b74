"""Causes of the time of a run: its critical path in stretches, each cut into causes that add up to it.

A stretch is a task on the path, from the end of the task before it there to its own end. Its causes are

    waiting        until the task is issued, and all of what only waits (`_WAITS`): its lane, a bubble, late ranks
    launch         its delay, and all of what only launches (`_LAUNCHES`)
    work           its time alone and undivided: its share of the GEMM, or of the collective over all links
    decomposition  its time alone, less that: smaller GEMMs, waves that they do not fill, links that a step leaves idle
    contention     its time as run, less its delay and its time alone: beside others, or with what they leave to it
    dependency     work that the other side of the machine could have hidden (`dse_traces.profile.explanation`)

Times alone and undivided are those that the graph declares (`alone_s`, `wide_s`); of a graph that declares none they
are those at the rates that tasks have alone. Decomposition is negative where parts fill their last wave better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dse_traces.profile.kernel_classes import COMMUNICATES, MOVED
from dse_traces.profile.kernels import GRAPH
from simulators.taskgraph.graph import Floats
from simulators.taskgraph.timeline import Timeline

WORK, DECOMPOSITION, CONTENTION = "work", "decomposition", "contention"
LAUNCH, DEPENDENCY, WAITING = "launch", "dependency", "waiting"
CAUSES = (WORK, DECOMPOSITION, CONTENTION, LAUNCH, DEPENDENCY, WAITING)
COMPUTE, COMMUNICATION, NEITHER = "compute", "communication", ""
_LAUNCHES = ("launch", "host")  # kinds of tasks, as schedules and steps name them
_WAITS = ("waiting", "delay", "meeting")
# points of `study=trace` have the classes of kernels as kinds
_MOVES = ("transfer", *COMMUNICATES)
_NO_SIDE = (*_LAUNCHES, *_WAITS, *MOVED, GRAPH)


@dataclass(frozen=True)
class Stretch:
    """A part of a critical path. side: what runs, `COMPUTE` or `COMMUNICATION`, or `NEITHER`; times in seconds.

    causes: cause -> seconds, which add up to finish_s - start_s.
    """

    name: str
    kind: str
    lane: str
    side: str
    start_s: float
    finish_s: float
    causes: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Length of the stretch."""
        return self.finish_s - self.start_s


def path_stretches(timeline: Timeline, design: int) -> Iterator[Stretch]:
    """Yield the stretches of the critical path of one design, in order and without holes, from 0 to its makespan."""
    graph, until = timeline.graph, 0.0  # where the stretch before ended
    alone, undivided = _times_alone(timeline, design)
    issued, finished, delay = timeline.issued[design], timeline.finished[design], graph["delay"][design]
    for task in timeline.critical_path(design):
        start, until = until, float(finished[task])
        kind = graph.kinds[task].removeprefix("peer's ")  # tasks of another GPU count as what they are
        ran = until - float(issued[task]), float(delay[task])
        causes = _causes(kind, ran, (float(undivided[task]), float(alone[task])))
        # between the end of the task before and the issue, as a slot is waited for
        causes[WAITING] = causes.get(WAITING, 0.0) + float(issued[task]) - start
        yield Stretch(graph.tasks[task], kind, graph.lanes[task], _side(kind), start, until, causes)


def _times_alone(timeline: Timeline, design: int) -> tuple[Floats, Floats]:
    """Times [T] of the tasks of a design, each alone: as parts, and as shares of what is undivided [s]."""
    graph = timeline.graph
    if graph["alone_s"][design].any():  # a graph that declares none has zeros
        return graph["alone_s"][design], graph["wide_s"][design]
    alone = graph["work"][design] / graph.isolated_rate()[design]
    return alone, alone


def _causes(kind: str, ran: tuple[float, float], alone: tuple[float, float]) -> dict[str, float]:
    """Causes of the time of a task. ran: from issue to end, and the delay in it. alone: undivided, as a part [s]."""
    (spent, delay), (undivided, part) = ran, alone
    if kind in _WAITS:
        return {WAITING: spent}
    if kind in _LAUNCHES:  # one that has been launched, and does not run yet, waits for CUs
        launched = min(spent, delay + part)
        return {LAUNCH: launched, WAITING: spent - launched}
    # the terms add up to `spent`: each one is the difference of two that are known
    return {WORK: undivided, DECOMPOSITION: part - undivided, CONTENTION: spent - delay - part, LAUNCH: delay}


def _side(kind: str) -> str:
    if kind in _NO_SIDE:
        return NEITHER
    return COMMUNICATION if kind in _MOVES else COMPUTE
