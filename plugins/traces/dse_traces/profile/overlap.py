"""How much of the time of collectives computation hides, from when kernels ran.

Union is time in which at least one kernel of a class runs. As HolisticTraceAnalysis has it (`get_comm_comp_overlap`):

    hidden = |union of collectives and union of computation| / |union of collectives|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulators.taskgraph.timeline import busy

Floats = NDArray[np.float64]
Marks = NDArray[np.bool_]


@dataclass(frozen=True)
class Overlapped:
    """Seconds: in all, in which kernels compute, communicate, do both, and in which nothing runs."""

    span_s: float
    compute_s: float
    collective_s: float
    both_s: float
    idle_s: float

    @property
    def hidden(self) -> float:
        """Share of the time of collectives beside which something is computed; NaN without collectives."""
        return self.both_s / self.collective_s if self.collective_s else float("nan")

    @property
    def exposed_s(self) -> float:
        """Time of collectives that nothing hides."""
        return max(self.collective_s - self.both_s, 0.0)


def overlapped(start_s: Floats, end_s: Floats, *, computes: Marks, communicates: Marks) -> Overlapped:
    """What runs beside what. start_s, end_s: of N kernels. computes, communicates: which of them do."""
    compute, collective = (_union(start_s, end_s, marks) for marks in (computes, communicates))
    either = _union(start_s, end_s, computes | communicates)
    span = float(end_s.max() - start_s.min())
    anything = _union(start_s, end_s, np.ones(len(start_s), bool))
    # inclusion and exclusion: both = compute + collective - either; rounding may make it negative
    return Overlapped(span, compute, collective, max(compute + collective - either, 0.0), max(span - anything, 0.0))


def _union(start_s: Floats, end_s: Floats, marks: Marks) -> float:
    return float(busy(start_s[None, marks], end_s[None, marks])[0])
