"""A profile as a task graph, and its replay: kernels take as long as they did, and wait for what they waited for.

What waited for an unknown reason does not wait in the replay, so its span says how much of a run is understood.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse import plugins
from dse_traces.profile.kernels import Profile
from dse_traces.profile.overlap import Overlapped, overlapped
from dse_traces.profile.waits import Waits, waits
from simulators.taskgraph.graph import GraphBuilder, TaskGraph

Floats = NDArray[np.float64]
ENGINE = "fluid"
EMPTY_S = 1e-12
"""That a part of a kernel takes at the least, so that no task is without work."""
_LAUNCH = "launch"


@dataclass(frozen=True)
class Replayed:
    """A profile, what its kernels waited for, and when they ran in the replay: start_s, end_s [N]."""

    profile: Profile
    waits: Waits
    start_s: Floats
    end_s: Floats

    @cached_property
    def recorded(self) -> Overlapped:
        """Overlap of kernels in the profile."""
        return self._overlapped(self.profile.start_s, self.profile.end_s)

    @cached_property
    def replayed(self) -> Overlapped:
        """Overlap of kernels in the replay."""
        return self._overlapped(self.start_s, self.end_s)

    @property
    def span_error(self) -> float:
        """Span of the replay over the recorded one, less 1."""
        return self.replayed.span_s / self.recorded.span_s - 1

    def _overlapped(self, start_s: Floats, end_s: Floats) -> Overlapped:
        profile = self.profile
        return overlapped(start_s, end_s, computes=profile.is_compute, communicates=profile.has_communication)


def replay(profile: Profile) -> Replayed:
    """Replay a profile with its own durations."""
    delays = waits(profile)
    return Replayed(profile, delays, *run_kernels(profile, delays))


def run_kernels(profile: Profile, delays: Waits) -> tuple[Floats, Floats]:
    """When each kernel begins and ends [N], with the durations of a profile and what its kernels wait for."""
    graph, first, last = lower_kernels(profile, delays)
    timeline = plugins.load("engine", ENGINE).run(graph)
    return timeline.issued[0, first] + graph["delay"][0, first], timeline.finished[0, last]


def lower(profile: Profile) -> TaskGraph:
    """The task graph of a profile: a task for each kernel, or for each of its parts that others wait for."""
    return lower_kernels(profile, waits(profile))[0]


def lower_kernels(profile: Profile, delays: Waits) -> tuple[TaskGraph, NDArray[np.intp], NDArray[np.intp]]:
    """The task graph, and the first and the last task of each kernel."""
    graph, ends = GraphBuilder(), dict[tuple[int, float], int]()
    parts = _parts(profile, delays)
    first, last = np.zeros(len(profile), int), np.zeros(len(profile), int)
    names, kinds = profile.kernels["name"].tolist(), profile.kernels["kind"].tolist()
    # the delay of a task holds a gap already, so that it is taken off a launch
    streams, delay = profile.kernels["stream"].tolist(), delays.launch_delay_s - delays.gap_s
    for kernel, name in enumerate(names):
        lane: dict[str, Any] = {"lane": f"stream {streams[kernel]}", "cap": 1.0}
        after = [last[delays.previous[kernel]]] if delays.previous[kernel] >= 0 else []
        # a launch is a task with a fixed delay from the begin of the run, and no work
        if np.isfinite(delays.launch_s[kernel]) and (launched := delays.launch_s[kernel] + delay) > 0:
            after.append(graph.task(f"{name}, launched", _LAUNCH, delay=launched, **lane))
        # it begins as long after the begin of the other as it was recorded
        if (blocker := delays.blocker[kernel]) >= 0:
            after.append(ends[int(blocker), float(delays.blocker_ran_s[kernel])])
        gap, begun = delays.gap_s, 0.0
        for ran in parts[kernel]:
            # no task is empty, so that each has a place in time
            work: dict[str, Any] = {"work": max(ran - begun, EMPTY_S), "delay": gap}
            after = [graph.task(name, kinds[kernel], after=after, **work, **lane)]
            ends[kernel, ran] = after[0]
            first[kernel] = first[kernel] if begun else after[0]
            gap, begun = 0.0, ran
        last[kernel] = after[0]
    return graph.build(), first, last


def _parts(profile: Profile, delays: Waits) -> dict[int, list[float]]:
    """Times [s] after its begin at which each kernel lets others begin, and its whole duration."""
    parts = defaultdict[int, set[float]](set)
    for kernel in np.flatnonzero(delays.blocker >= 0):
        parts[int(delays.blocker[kernel])].add(float(delays.blocker_ran_s[kernel]))
    seconds = profile.seconds.tolist()
    return {kernel: sorted({*parts.get(kernel, ()), whole}) for kernel, whole in enumerate(seconds)}
