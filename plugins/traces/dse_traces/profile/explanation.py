"""Where the difference of two runs comes from: their critical paths by cause, which add up, and so do the differences.

Stretches have the causes of `dse_traces.profile.path_causes`. What is left to say is which work the machine could have
hidden: computation and communication can run side by side, so the side that has more work on the two paths together
*bounds* them, and work of the other side on a path is `dependency`: it stands there because something waited for it.
Where computation bounds both, that is exposed communication. The bound is one for both runs, so that causes compare.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dse_traces.profile.path_causes import (
    CAUSES,
    COMMUNICATION,
    COMPUTE,
    DEPENDENCY,
    NEITHER,
    WORK,
    Stretch,
)

POINT, PROFILE = "point", "profile"
Pair = tuple[float, float]
_ROUNDING = 1e-9  # within which both sides have the same work, whichever run comes first
# "layer 3: all-reduce" and "layer 4: all-reduce" align
_NUMBER = re.compile(r"(\s+from)?\s*\b\d+\b")


@dataclass(frozen=True)
class Limit:
    """A proven time [s] that no run of a sort gets below. of: the sort. binds: what it comes from -> share."""

    of: str
    seconds: float
    binds: Mapping[str, float]


@dataclass(frozen=True)
class Explained:
    """The critical path of a point or a profile. form: which of the two. choices: knob -> value, of a point.

    notes: what its causes rest on, and what they leave out. limits: what is proven of other runs, of a point.
    """

    name: str
    form: str
    path: tuple[Stretch, ...]
    choices: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    limits: Sequence[Limit] = ()

    @property
    def seconds(self) -> float:
        """From the start to the end of the run."""
        return self.path[-1].finish_s - self.path[0].start_s


@dataclass(frozen=True)
class Difference:
    """Two runs, with work that the side that bounds both could hide as dependency."""

    first: Explained
    second: Explained
    bound: str

    @property
    def runs(self) -> tuple[Explained, Explained]:
        """Both."""
        return self.first, self.second

    def by_cause(self) -> dict[str, Pair]:
        """Seconds in the first and in the second run, by cause; they add up to the lengths of the runs."""
        times = self._sums(lambda stretch: stretch.causes.items())
        return {cause: times.get(cause, (0.0, 0.0)) for cause in CAUSES}

    def by_kind(self) -> dict[tuple[str, str], Pair]:
        """Likewise by kind of stretch (of a point and a profile: by side) and cause."""
        return self._sums(
            lambda stretch: (((self._kind(stretch), cause), spent) for cause, spent in stretch.causes.items())
        )

    def aligned(self) -> dict[tuple[str, str], Pair]:
        """Seconds by (name, kind) of stretches, those that are alike together, what differs most first."""
        times = self._sums(lambda stretch: [(self.alike(stretch), stretch.seconds)])
        return dict(sorted(times.items(), key=lambda pair: -abs(pair[1][1] - pair[1][0])))

    def counts(self) -> dict[tuple[str, str], Pair]:
        """Number of stretches of each (name, kind) in the runs."""
        return self._sums(lambda stretch: [(self.alike(stretch), 1.0)])

    def alike(self, stretch: Stretch) -> tuple[str, str]:
        """What aligns the stretches of two runs: name without numbers, and kind; of a point and a profile, the side."""
        kind = self._kind(stretch)
        # names of kernels and of tasks have nothing in common
        return (kind if self._mixed else _NUMBER.sub("", stretch.name)), kind

    @property
    def _mixed(self) -> bool:
        return self.first.form != self.second.form

    def _kind(self, stretch: Stretch) -> str:
        return (stretch.side or "neither") if self._mixed else stretch.kind

    def _sums(self, items: Callable[[Stretch], Iterable[tuple[Any, float]]]) -> dict[Any, Pair]:
        """Sums of what stretches yield, in the first and in the second run."""
        sums: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for place, run in enumerate(self.runs):
            for stretch in run.path:
                for name, amount in items(stretch):
                    sums[name][place] += amount
        return {name: (first, second) for name, (first, second) in sums.items()}


def compare(first: Explained, second: Explained) -> Difference:
    """Tell the work that bounds two runs from the work that waits in them."""
    work = dict.fromkeys((COMPUTE, COMMUNICATION), 0.0)
    for stretch in (*first.path, *second.path):
        if stretch.side != NEITHER:
            work[stretch.side] += stretch.causes.get(WORK, 0.0)
    # a tie, within rounding, is computation, whichever run comes first
    bound = COMMUNICATION if work[COMMUNICATION] > work[COMPUTE] * (1 + _ROUNDING) else COMPUTE
    return Difference(_with_dependencies(first, bound), _with_dependencies(second, bound), bound)


def _with_dependencies(run: Explained, bound: str) -> Explained:
    return replace(run, path=tuple(_dependent(stretch, bound) for stretch in run.path))


def _dependent(stretch: Stretch, bound: str) -> Stretch:
    # work of the side that bounds is needed anyway; waits and launches have no side
    if stretch.side in (bound, NEITHER):
        return stretch
    # contention and launches of the other side stay: they are no work that could be hidden
    causes = {DEPENDENCY if cause == WORK else cause: seconds for cause, seconds in stretch.causes.items()}
    return replace(stretch, causes=causes)
