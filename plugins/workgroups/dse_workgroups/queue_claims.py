"""The claims of GOLDYLOC (arXiv:2409.02227) by the slots of CUs: queues that are complete at the start.

Queues are those of `study=goldyloc`, which judges the same claims by tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from dse.errors import Problems
from dse.results.claims import ClaimResult
from dse_workgroups.arrivals import Arrivals
from dse_workgroups.concurrency import Logic, serve
from dse_workgroups.kernel_library import DEGREES, kernel_of, together_s
from simulators.costs.gemm.sharing import Choice
from simulators.hardware.machine import Gpu
from simulators.workloads.model_zoo import option_tree
from simulators.workloads.operators import Gemm, workloads_of
from studies.plain import geometric_mean

Floats = NDArray[np.float64]
_ENOUGH = 0.7  # of the gain of the best of all tiles
_SAME = 1.05  # of the sequential time, which is not materially slower
_FASTER = 1.001


@dataclass(frozen=True)
class QueueTimes:
    """Times [Q] of queues one at a time, all at once, and by the run-time logic [s]; the first GEMM of each [Q, 3]."""

    sequential: Floats
    default: Floats
    dynamic: Floats
    shapes: Floats
    precision: str


def run_queues(gpu: Gpu, workload: str = "goldyloc", decision_s: float = 0.5e-6) -> QueueTimes:
    """Run the queues of a workload by all three."""
    times, shapes, precision = [], [], "fp16"
    for tree in workloads_of(Problems(), option_tree("workload", workload)).values():
        gemms = [Gemm.model_validate(op) for op in tree["operators"].values()]
        rows, precision = np.array([(op.m, op.n, op.k) for op in gemms], float), str(gemms[0].precision)
        # all of it is there at time zero, and nothing waits for anything
        queue = Arrivals(rows, np.zeros(len(rows)), ((),) * len(rows), precision, True)
        logics = (
            Logic(name="sequential", policy="sequential"),
            Logic(name="default", policy="default"),
            Logic(name="dynamic", policy="dynamic", decision_s=decision_s),
        )
        times.append([serve(gpu, queue, logic).makespan_s for logic in logics])
        # one GEMM of each queue is enough to compare kernels
        shapes.append(rows[0])
    sequential, default, dynamic = np.array(times).T
    return QueueTimes(sequential, default, dynamic, np.array(shapes), precision)


def findings(gpu: Gpu, times: QueueTimes) -> Mapping[str, ClaimResult]:
    """Findings of every claim."""
    over, beside = times.sequential / times.dynamic, times.default / times.dynamic
    default = times.sequential / times.default
    worst, losing = float((1 / over).max()), int((default < 1).sum())
    helps = geometric_mean(default) > 1
    values = {
        "vs_sequential": 100 * (geometric_mean(over) - 1),
        "vs_sequential_max": float(over.max()),
        "vs_default": 100 * (geometric_mean(beside) - 1),
        "vs_default_max": float(beside.max()),
        "default_vs_sequential": 100 * (geometric_mean(default) - 1),
        # losing on some queues counts only if running all at once helps on the whole
        "default_can_lose": bool(losing and helps),
        "never_worse": worst <= _SAME,
        "isolated_not_concurrent": _differs(gpu, times),
        "half_quarter_suffice": min(_recovered(gpu, times)) >= _ENOUGH,
    }
    return {f"goldyloc.{name}": ClaimResult(value) for name, value in values.items()}


def _differs(gpu: Gpu, times: QueueTimes) -> bool:
    """Tell whether a tile that is best alone is not the best at the largest degree for some GEMM."""
    most = max(DEGREES)
    return any(
        _seconds(gpu, times, row, most, "isolated") > _FASTER * _seconds(gpu, times, row, most, "best")
        for row in times.shapes
    )


def _recovered(gpu: Gpu, times: QueueTimes) -> list[float]:
    """Share of the gain of the best of all tiles that tuned kernels have, by degree from two on."""
    shares = []
    for degree in DEGREES[1:]:
        isolated, shared, best = (
            np.array([_seconds(gpu, times, row, degree, kind) for row in times.shapes]) for kind in get_args(Choice)
        )
        # shares of a ratio are shares of its logarithm
        gain = np.log(geometric_mean(isolated / best))
        shares.append(float(np.log(geometric_mean(isolated / shared)) / gain) if gain > 0 else 1.0)
    return shares


def _seconds(gpu: Gpu, times: QueueTimes, row: Floats, degree: int, kind: Choice) -> float:
    """Time [s] of copies of a GEMM at once by kernels of a kind."""
    return together_s(gpu, kernel_of(gpu, tuple(row), times.precision, degree, kind), degree)
