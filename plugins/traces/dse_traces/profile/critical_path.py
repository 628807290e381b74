"""The critical path of a profile: kernels, and what each waited for, that add up to the span of the run.

From the kernel that ends last, each step goes to what the kernel at hand waited for (`dse_traces.profile.waits`): the
kernel before it on its stream, or the one of another stream that had to end or to give up SMs. Time between the two is
a gap between kernels or streams, or the host where the launch came last (both are `LAUNCH`), or unknown (`WAITING`).
Recorded times are used as they are. By how much a kernel took longer than alone (`alone_s`) is contention, and what a
collective waited for late ranks (`waited_for_ranks_s`) is waiting. Copies within a GPU, or between it and the host, and
whole CUDA graphs are of neither side.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dse_traces.profile.kernel_names import reduce_name
from dse_traces.profile.kernels import Floats, Profile
from dse_traces.profile.path_causes import (
    COMMUNICATION,
    COMPUTE,
    CONTENTION,
    LAUNCH,
    NEITHER,
    WAITING,
    WORK,
    Stretch,
)
from dse_traces.profile.waits import CAUSES, OTHER_STREAM, READY, SMS, UNKNOWN, Waits

HOST, GAP, LATE = "host", "gaps between kernels", "unknown waiting"
_BETWEEN = {READY: GAP, OTHER_STREAM: GAP, SMS: GAP, UNKNOWN: LATE}
_CAUSE = {HOST: LAUNCH, GAP: LAUNCH, LATE: WAITING}


def critical_path(profile: Profile, delays: Waits, alone_s: Floats | None = None) -> list[Stretch]:
    """Stretches without holes from the first start of a profile to its last end, in order.

    alone_s: time of each kernel alone [N]; None: as recorded.
    """
    return list(_backward(profile, delays, _causes(profile, alone_s)))[::-1]


def _causes(profile: Profile, alone_s: Floats | None) -> Floats:
    """Shares [3, N] of the time of each kernel: work, contention, and waiting for late ranks."""
    # kernels may take no time at the clock's resolution
    seconds = np.maximum(profile.seconds, np.finfo(float).tiny)
    waited = np.clip(np.nan_to_num(profile.kernels["waited_for_ranks_s"].to_numpy(float)), 0.0, profile.seconds)
    # waiting for ranks is set apart first: it is not contention, though both lengthen a kernel
    excess = np.zeros(len(profile)) if alone_s is None else np.clip(seconds - alone_s, 0.0, seconds - waited)
    return np.stack([np.maximum(1 - (waited + excess) / seconds, 0.0), excess / seconds, waited / seconds])


def _backward(profile: Profile, delays: Waits, shares: Floats) -> Iterator[Stretch]:
    start, names, kinds, streams = profile.start_s, *(profile.kernels[of].tolist() for of in ("name", "kind", "stream"))
    sides = np.select([profile.is_collective, profile.is_compute], [COMMUNICATION, COMPUTE], NEITHER).tolist()
    # the path is walked from its end, as only ends are known to have been reached
    kernel, until, first = int(np.argmax(profile.end_s)), float(profile.end_s.max()), float(start.min())
    while kernel >= 0:
        begun, lane = float(start[kernel]), f"stream {streams[kernel]}"
        # only the part of the kernel that is on the path, with the causes of the whole in proportion
        of = dict(zip((WORK, CONTENTION, WAITING), (shares[:, kernel] * (until - begun)).tolist(), strict=True))
        if until > begun:  # clocks of streams differ: what one waited for may begin with it
            yield Stretch(_short(names[kernel]), kinds[kernel], lane, sides[kernel], begun, until, of)
        before, ended = _waited_for(profile, delays, kernel)
        # nothing is before the first kernel: the path ends there, and not at a launch in the past
        if begun > (until := max(ended, first)):
            why = _why(delays, kernel, until)
            yield Stretch(why, why, lane, NEITHER, until, begun, {_CAUSE[why]: begun - until})
        # clocks of streams may disagree: the path never goes forward
        kernel, until = before, min(until, begun)


def _short(name: str) -> str:
    """A kernel without its return type, template and arguments."""
    return reduce_name(name).label(60)


def _waited_for(profile: Profile, delays: Waits, kernel: int) -> tuple[int, float]:
    """The kernel that one waited for, or -1, and the time from which it did not any more [s]."""
    if (blocker := int(delays.blocker[kernel])) >= 0:
        # it had to run for `blocker_ran_s`, and not to its end, if it held SMs
        return blocker, float(profile.start_s[blocker] + delays.blocker_ran_s[kernel])
    previous = int(delays.previous[kernel])
    return previous, float(profile.end_s[previous]) if previous >= 0 else -np.inf


def _why(delays: Waits, kernel: int, since: float) -> str:
    """Why nothing ran on the path before a kernel began."""
    cause = CAUSES[int(delays.cause[kernel])]
    launched = delays.launch_s[kernel]
    # the launch came after all that the kernel waited for, so the host was late
    return HOST if cause == READY and launched > since else _BETWEEN[cause]
