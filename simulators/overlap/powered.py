"""Schedules under a board's power limit: the clock that it allows (`simulators.costs.governor`), and joules.

The governor sees an iteration as if it computed in one go (`simulators.costs.power.seen_w`): more than the mean power
where an iteration is as long as its window, and computes for a part of it. Timelines are those at the mean clock that
is held; bounds are those at the clock that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from pydantic import BaseModel

from dse.backend import Batch, Metric, Results
from dse.space.blocks import Rule
from dse.values import put
from simulators.costs.governor import CLOCK, POWER_METRICS, BoardDraw, governed, power_rules
from simulators.costs.power import Activity, board_w, seen_w
from simulators.hardware.machine import Gpu
from simulators.hardware.schedule_system import PoweredSystem
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign, gemm_precisions
from simulators.overlap.metrics import METRICS, Floats
from simulators.taskgraph.timeline import Timeline

_VERSION = "power 2"  # of the law and of the governor; raise it with every change that alters a result

_ARRAYS = 1024
"""Batches of engines that run designs as arrays are larger."""
_TOGETHER = 384
"""Designs whose graphs such an engine runs in about a tenth of the time in which one graph is made."""


class PoweredBackend(OverlapBackend):
    """The overlap backend under a limit of power: its metrics at the clock that the limit allows, energy and power."""

    metrics: Mapping[str, Metric] = {**METRICS, **POWER_METRICS}
    machines = PoweredSystem

    def __init__(self, engine: str, fallback: str | None = None, *, gpus: str = "one", imbalance: float = 0.0) -> None:
        super().__init__(engine, fallback, gpus=gpus, imbalance=imbalance)
        self.version = f"{self.version}+{_VERSION}"

    def _rules(self, design: OverlapDesign) -> list[Rule]:
        """Rules of schedules, and those of a power model."""
        return [*super()._rules(design), *_rules_of_power(design)]

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Metrics at the clocks that power allows."""
        # schedules that are searched for are settled for each design
        singly = self.batch < _ARRAYS or any(self.takes_long(batch.design) for batch in batches)
        return governed(batches, super().evaluate, draw_of, together=1 if singly else _TOGETHER)

    def elasticities(self, design: BaseModel, sides: Sequence[tuple[str, int]]) -> None:
        """None: slopes of the task graph are those at one clock, and the clock that is held has its own."""

    def timeline(self, design: BaseModel) -> Timeline:
        """Full timeline of one design at the mean clock that it holds."""
        (results,) = self.evaluate([Batch(design)])
        held = results.column("held_clock")[0]
        return super().timeline(put(design, CLOCK, float(held)) if results.ok[0] else design)

    def draw(
        self, designs: Sequence[BaseModel], *, samples: int, seed: int, exact: Sequence[str] = ()
    ) -> tuple[Floats, Mapping[str, str]]:
        """Makespans [designs, samples] with drawn errors, as much longer as each design is at the clock it holds."""
        seconds, kinds = super().draw(designs, samples=samples, seed=seed, exact=exact)
        batches = [Batch(design) for design in designs]
        asked, held = (
            np.concatenate([results.column("makespan_s") for results in evaluate(batches)])
            for evaluate in (super().evaluate, self.evaluate)
        )
        return seconds * (held / asked)[:, None], kinds


def _rules_of_power(design: OverlapDesign) -> Iterator[Rule]:
    """Yield rules of the power model, and operations of different energy."""
    precisions = gemm_precisions(design.workload)
    yield from power_rules(design.system.gpu.power, precisions)
    if design.system.gpu.power is not None and len(precisions) > 1:
        rule = "differs between GEMMs, whose operations take different energy; power is of one format"
        yield Rule("workload.operators", True, rule, ", ".join(precisions), way_out="use one precision")


def draw_of(batch: Batch) -> BoardDraw:
    """What a GPU draws in the iterations of a batch."""
    design = batch.arrays
    assert isinstance(design, OverlapDesign)
    gpu, precision = design.system.gpu, next(iter(gemm_precisions(design.workload)), None)
    return BoardDraw(gpu, "makespan_s", lambda results, clock: _watts(gpu, precision, results, clock))


def _watts(gpu: Gpu, precision: str | None, results: Results, clock: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean power [W] of results at a clock, the highest that the governor sees, and the clock.

    precision: None without a GEMM.
    """
    assert gpu.power is not None
    seconds = results.column("makespan_s")
    flop, *moved = (results.column(name) / seconds for name in ("flop", "hbm_bytes", "moved_bytes", "comm_cu_s"))
    flop = flop if precision else np.zeros_like(flop)  # without a GEMM nothing is multiplied
    mean = board_w(gpu.power, clock, Activity(flop, *moved), precision or "fp32")
    comm_s, gemm_s = results.column("comm_s"), results.column("gemm_s")
    received, cus = (results.column(name) / np.where(comm_s > 0, comm_s, 1.0) for name in ("moved_bytes", "comm_cu_s"))
    # read at one end, written at the other
    rest = board_w(gpu.power, clock, Activity(0.0, 2 * received, received, cus), "fp32")
    return mean, seen_w(gpu.power, mean, np.minimum(rest, mean), busy_s=gemm_s, period_s=seconds), clock
