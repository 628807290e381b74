"""What each kernel of a profile waited for.

A kernel begins after the kernel before it on its stream, and after its launch. What a profile tells of that is its
order, and the launches where they are recorded; a launch that is not recorded came no sooner than those before it on
the stream. One that begins later than both allow waited for something else, which is inferred:

    another stream   a kernel there ended since then, and last before this one began           confidence: how soon
    SMs              a kernel that computes began before, still runs, and leaves no SM         0.5
    unknown          neither; the host, a late rank, or work that was not profiled             0

"Later" is by more than `SLACK_S`. Gaps between kernels of a stream, and delays of launches and between streams, are not
told apart one by one: each is what it is in the mean (launches: in the median) where nothing else was waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse_traces.profile.kernels import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

SLACK_S = 3e-6
"""What a kernel may be late by without having waited: profilers tell whole microseconds (assumed)."""
CLOCKS_DIFFER_S = 1.5e-6
"""By which clocks of streams may differ: kernels that follow one another may seem to overlap."""
READY, OTHER_STREAM, SMS, UNKNOWN = "in order", "another stream", "SMs", "unknown"
CAUSES = (READY, OTHER_STREAM, SMS, UNKNOWN)
_SOON_S = 20e-6  # between the end of a kernel and the begin of one that waited for it
_SOON_SHARE = 0.2  # or this share of what it waited
_LOOKED_BACK = 256  # kernels, for one that still runs


@dataclass(frozen=True)
class Waits:
    """What each kernel waited for [N].

    previous: the kernel before it on its stream, or -1. launch_s: when it was launched at the earliest, or NaN.
    cause: index into `CAUSES`. blocker: index of the kernel that it waited for, or -1. blocker_ran_s: how long that
    kernel had run by then. late_s: how much later it began than stream and launch allow. confidence: of the cause, 0 to
    1. Of the profile: gap_s, from kernel to kernel; launch_delay_s, from launch to begin; between_s, between streams.
    """

    previous: Ints
    launch_s: Floats
    cause: NDArray[np.int8]
    blocker: Ints
    blocker_ran_s: Floats
    late_s: Floats
    confidence: Floats
    gap_s: float
    launch_delay_s: float
    between_s: float

    def counts(self) -> Mapping[str, tuple[int, float]]:
        """Number of kernels by cause, and how late they were [s]."""
        return {
            name: (int((self.cause == place).sum()), float(self.late_s[self.cause == place].sum()))
            for place, name in enumerate(CAUSES)
        }


def waits(profile: Profile) -> Waits:
    """Find the causes of the kernels' waits in a profile."""
    previous = _previous(profile.streams)
    start, end = profile.start_s, profile.end_s
    before = np.where(previous >= 0, end[previous], -np.inf)
    streams = pd.Series(profile.streams)
    # a stream is in order: no kernel was launched before those that precede it
    launch = profile.kernels["launch_s"].groupby(streams).cummax().groupby(streams).ffill().to_numpy(float)
    delay, gap = _delays(start, before, launch)
    # fmax() passes over NaN: a kernel without a recorded launch is ready when its stream is
    ready = np.fmax(np.where(previous >= 0, before + gap, start.min()), launch + delay)
    late = np.maximum(start - ready, 0.0)
    cause, blocker = np.zeros(len(profile), np.int8), np.full(len(profile), -1)
    ran_s, confidence, apart = np.zeros(len(profile)), np.ones(len(profile)), list[float]()
    ends = np.argsort(end, kind="stable")
    # sorted once: a search for each late kernel must not grow with their number
    sorted_end = end[ends]
    # all others are in order, which `cause` 0 stands for
    for kernel in np.flatnonzero(late > SLACK_S).tolist():
        place, running = _ended(profile, kernel, ready[kernel], (ends, sorted_end)), -1
        since = start[kernel] - end[place] if place >= 0 else np.inf
        # nothing ended shortly before it: a kernel that held the SMs is more likely
        if since > max(_SOON_S, _SOON_SHARE * late[kernel]):
            running = _running(profile, kernel)
        if running >= 0:
            cause[kernel], blocker[kernel], confidence[kernel] = CAUSES.index(SMS), running, 0.5
            # it began as soon as the blocker had run for so long: the time at which SMs became free
            ran_s[kernel] = start[kernel] - start[running]
        elif place >= 0:
            cause[kernel], blocker[kernel], ran_s[kernel] = CAUSES.index(OTHER_STREAM), place, profile.seconds[place]
            # one half at `_SOON_S` between the end and the begin
            confidence[kernel] = 1 / (1 + max(since, 0.0) / _SOON_S)
            apart.append(max(since, 0.0))
        else:
            cause[kernel], confidence[kernel] = CAUSES.index(UNKNOWN), 0.0
    # the median: chance pairs are far apart, and would lift a mean
    between = float(np.median(apart)) if apart else 0.0
    return Waits(previous, launch, cause, blocker, ran_s, late, confidence, gap, delay, between)


def _previous(streams: Ints) -> Ints:
    """The kernel before each on its stream, or -1."""
    # stable, so that kernels of one stream stay in the order of their begins
    order = np.argsort(streams, kind="stable")
    same = np.concatenate([[False], streams[order][1:] == streams[order][:-1]])
    previous = np.full(len(streams), -1)
    previous[order[1:]] = np.where(same[1:], order[:-1], -1)
    return previous


def _delays(start: Floats, before: Floats, launch: Floats) -> tuple[float, float]:
    """Delay of launches on idle streams, and gap between kernels that were launched in time [s]."""
    known = np.isfinite(launch)
    # on a busy stream the kernel waits for the stream, and tells nothing of its launch
    idle = known & (before < launch)
    delay = float(np.median((start - launch)[idle])) if idle.any() else 0.0
    # a gap after a late launch is the host's, and not the stream's
    gaps = (start - before)[np.isfinite(before) & ~(known & (launch + delay > before))]
    # longer gaps are waits, and no property of the stream
    short = gaps[gaps < _SOON_S]
    return delay, max(float(short.mean()), 0.0) if len(short) else 0.0


def _ended(profile: Profile, kernel: int, since: float, ended: tuple[Ints, Floats]) -> int:
    """The last kernel of another stream that ended between a time and the begin of a kernel; -1 if there is none.

    ended: kernels in the order of their ends, and these ends.
    """
    ends, sorted_end = ended
    start, end, streams = profile.start_s, profile.end_s, profile.streams
    # clocks of streams differ by rounding: an end may seem to be just after the begin
    place = int(np.searchsorted(sorted_end, start[kernel] + CLOCKS_DIFFER_S, side="right")) - 1
    # backward from the last end before the begin; ends before `since` held nothing up
    while place >= 0 and end[ends[place]] > since:
        before = int(ends[place])
        # of kernels that begin together neither can have waited for the other
        if streams[before] != streams[kernel] and start[before] < start[kernel]:
            return before
        place -= 1
    return -1


def _running(profile: Profile, kernel: int) -> int:
    """The last kernel of another stream that computes and still runs when one that computes begins; -1 if none."""
    computes = profile.is_compute
    if not computes[kernel]:
        return -1
    # kernels begin in order, so one that still runs is usually among the last
    places = np.arange(max(0, kernel - _LOOKED_BACK), kernel)
    elsewhere = profile.streams[places] != profile.streams[kernel]
    runs = places[computes[places] & elsewhere & (profile.end_s[places] > profile.start_s[kernel])]
    return int(runs[-1]) if len(runs) else -1
