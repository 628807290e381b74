"""The critical path of a profile: kernels, and what each waited for, that add up to the span of the run.

From the kernel that ends last, each step goes to what the kernel at hand waited for (`simulators.profiles.waits`): the
kernel before it on its stream, or the one of another stream that had to end or to give up SMs. Time between the two is
a gap between kernels or streams, the host where the launch came last, or unknown. Recorded times are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simulators.profiles.profile import Profile
from simulators.profiles.waits import CAUSES, OTHER_STREAM, READY, SMS, UNKNOWN, Waits

HOST, GAP, LATE = "host", "gaps between kernels", "unknown waiting"
_BETWEEN = {READY: GAP, OTHER_STREAM: GAP, SMS: GAP, UNKNOWN: LATE}


@dataclass(frozen=True)
class Stretch:
    """A part of the critical path: kind of a kernel, or why none runs; kernel: its place, or -1; times in seconds."""

    kind: str
    kernel: int
    start_s: float
    finish_s: float


def critical_path(profile: Profile, delays: Waits) -> list[Stretch]:
    """Stretches without holes from the first start of a profile to its last end, in order."""
    return list(_backward(profile, delays))[::-1]


def _backward(profile: Profile, delays: Waits) -> Iterator[Stretch]:
    start, kinds = profile.start_s, profile.kernels["kind"].tolist()
    kernel, until, first = int(np.argmax(profile.end_s)), float(profile.end_s.max()), float(start.min())
    while kernel >= 0:
        begun = float(start[kernel])
        yield Stretch(kinds[kernel], kernel, begun, until)
        before, ended = _waited_for(profile, delays, kernel)
        if begun > (until := max(ended, first)):
            yield Stretch(_why(delays, kernel, until), -1, until, begun)
        kernel, until = before, min(until, begun)


def _waited_for(profile: Profile, delays: Waits, kernel: int) -> tuple[int, float]:
    """The kernel that one waited for, or -1, and the time from which it did not any more [s]."""
    if (other := int(delays.other[kernel])) >= 0:
        return other, float(profile.start_s[other] + delays.ran_s[kernel])
    previous = int(delays.previous[kernel])
    return previous, float(profile.end_s[previous]) if previous >= 0 else -np.inf


def _why(delays: Waits, kernel: int, since: float) -> str:
    """Why nothing ran on the path before a kernel began."""
    cause = CAUSES[int(delays.cause[kernel])]
    launched = delays.launch_s[kernel]
    return HOST if cause == READY and launched > since else _BETWEEN[cause]
