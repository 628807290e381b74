"""Iterations under a board's power limit: the clock that it allows (`simulators.costs.governor`), and joules.

Power is the mean over an iteration, whose kernels follow one another faster than the governor's window. Operations have
the energy of their format, bytes that collectives send that of the links; messages between stages count as nothing.
What kernels read from the HBM goes through caches and CUs, weights of products as well: where few tokens multiply with
them this is most of what a product draws (H200, products of up to 8 rows: 4 % off with it, 29 % below without).
Each design is one GPU of the busiest stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel

from dse.backend import Batch, Metric, Replay, Results
from dse.values import put
from simulators.costs.governor import CLOCK, POWER_METRICS, BoardDraw, governed
from simulators.costs.power import Activity, board_w
from simulators.hardware.device import Device, PoweredDevice, PoweredScheduledDevice, ScheduledDevice
from simulators.hardware.parts import Power
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import StepDesign, product_format
from simulators.taskgraph.timeline import Timeline

Floats = NDArray[np.float64]
_VERSION = "power 2"  # of the law and of the governor; raise it with every change that alters a result


class PoweredStepBackend(StepBackend):
    """The step backend under a limit of power: its metrics at the clock that the limit allows, energy and power."""

    version = f"{StepBackend.version}+{_VERSION}"
    machines: ClassVar[tuple[type[Device], type[ScheduledDevice]]] = (PoweredDevice, PoweredScheduledDevice)
    metrics: Mapping[str, Metric] = {
        **StepBackend.metrics,
        **POWER_METRICS,
        "flop_utilisation": replace(
            StepBackend.metrics["flop_utilisation"],
            meaning="model FLOP of a GPU over iteration_s and the data sheet's rate, whatever clock is held",
        ),
        "tokens_per_j": Metric("1/J", "tokens of all replicas over the energy of all GPUs", "maximize"),
    }

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Metrics at the clocks that power allows."""
        # lengths of an epoch are an axis of their own, so that it is computed at one clock after the other
        of_epoch = any(getattr(batch.design, "lengths", None) is not None for batch in batches)
        together = 1 if of_epoch else self.batch
        return [_with_tokens(results) for results in governed(batches, super().evaluate, _draw_of, together=together)]

    def draw(
        self, designs: Sequence[BaseModel], *, samples: int, seed: int, exact: Sequence[str] = ()
    ) -> tuple[Floats, Mapping[str, str]]:
        """Times [designs, samples] of iterations with drawn errors, at the clocks that designs hold."""
        steps = [self.as_run(design) for design in designs if isinstance(design, StepDesign)]
        return super().draw(steps, samples=samples, seed=seed, exact=exact)

    def replay(self, design: BaseModel) -> Replay:
        """Every operator of an iteration at the clock that it holds."""
        assert isinstance(design, StepDesign)
        return super().replay(self.as_run(design))

    def timeline(self, design: BaseModel) -> Timeline:
        """Every operator of an iteration at the clock that it holds."""
        assert isinstance(design, StepDesign)
        return super().timeline(self.as_run(design))

    def as_run(self, design: StepDesign) -> StepDesign:
        """The design at the clock that it holds."""
        (results,) = self.evaluate([Batch(design)])
        if not results.ok[0]:
            return design
        asked = results.column("held_clock")[0] / results.column("loaded_clock")[0]
        at_held: StepDesign = put(design, CLOCK, float(asked))
        return at_held


def _with_tokens(results: Results) -> Results:
    if "mean_w" not in results.metrics:
        return results
    per_joule = results.column("tokens_per_s_per_gpu") / results.column("mean_w")
    # shares of the rate at gpu.clock = 1, whatever clock is held
    slower = results.column("held_clock") / results.column("loaded_clock")
    shares = {name: results.column(name) * slower for name in ("flop_utilisation", "sustained_share")}
    return replace(results, metrics={**results.metrics, **shares, "tokens_per_j": per_joule})


def _draw_of(batch: Batch) -> BoardDraw:
    design = batch.arrays
    assert isinstance(design, StepDesign)
    return BoardDraw(design.system.gpu, "iteration_s", _StepPower(batch).watts)


class _StepPower:
    """Power of a GPU over iterations of a design, whose numbers may be arrays.

    `gpu.loaded` is fitted to measured steps, whose boards keep their limit: where the law draws more at that clock
    (with `gpu.clock` 1), what it says beyond idling is scaled to the limit, at all clocks.
    """

    def __init__(self, batch: Batch) -> None:
        design = batch.arrays
        assert isinstance(design, StepDesign)
        self._batch, self._design = batch, design

    def _scale(self, results: Results) -> Floats:
        """Power over that of the law, beyond idling."""
        gpu = self._design.system.gpu
        if gpu.loaded is None:
            return np.ones(())
        assert gpu.power is not None
        columns = self._at_full_clock(results)
        loaded, idle = columns["loaded_clock"], np.asarray(gpu.power.idle_w, float)
        limited = (np.asarray(gpu.power.board_w, float) - idle) / (self._law(columns, loaded) - idle)
        return np.where(loaded < 1, np.minimum(limited, 1.0), 1.0)

    def _at_full_clock(self, results: Results) -> dict[str, Floats]:
        """Metrics of each design at the clock of the GPU's rates: those that are known, or computed."""
        size, clocks = self._batch.size, self._batch.axes.get(CLOCK, np.zeros(1))
        first = size // len(clocks)  # designs at one clock: where it is the first axis, they follow one another
        if next(iter(self._batch.axes), "") == CLOCK and clocks[0] == 1.0:
            return {name: np.tile(results.column(name)[:first], len(clocks)) for name in _SCALED_BY}
        metrics = metrics_of(put(self._design, CLOCK, 1.0))
        return {name: np.broadcast_to(metrics[name], (size,)) for name in _SCALED_BY}

    def watts(self, results: Results, clock: Floats) -> tuple[Floats, Floats, Floats]:
        """Mean power [W] over iterations at a clock, which is what the governor sees, and the clock under load."""
        power = self._design.system.gpu.power
        assert power is not None
        loaded = results.column("loaded_clock")
        law, idle = self._law(results.metrics, clock * loaded), np.asarray(power.idle_w, float)
        watts = idle + self._scale(results) * (law - idle)
        return watts, watts, clock * loaded

    def _law(self, columns: Mapping[str, Floats], clock: Floats) -> Floats:
        """Power [W] by the law alone."""
        assert self._design.system.gpu.power is not None
        rates = {name: columns[name] / columns["iteration_s"] for name in DRAWS}
        return drawn_w(self._design.system.gpu.power, self._design, rates, clock)


DRAWS = ("flop", "linear_flop", "hbm_bytes", "wire_bytes", "comm_cu_s")
"""Metrics of an iteration that draw power."""
_SCALED_BY = (*DRAWS, "iteration_s", "loaded_clock")


def drawn_w(
    power: Power, design: StepDesign, rates: Mapping[str, Floats], clock: ArrayLike, *, busy: ArrayLike = 1.0
) -> Floats:
    """Power [W] of a GPU that does so much of each of `DRAWS` a second, in steps of a design, at a relative clock.

    busy: share of the time in which it runs steps. Raises ValueError for operations of a format of which `power.flop_j`
    has no energy.
    """
    flop, linear, hbm, wire, copy_cus = (rates[name] for name in DRAWS)
    nothing = np.zeros_like(flop)
    # operations of linear layers may be of a format of their own
    still = board_w(power, clock, Activity(nothing, nothing, nothing, nothing), "fp32")
    narrow = board_w(power, clock, Activity(linear, *(nothing,) * 3), product_format(design)) - still
    every = Activity(flop - linear, hbm, wire, copy_cus, stream_bytes_per_s=hbm, busy=busy)
    return np.asarray(board_w(power, clock, every, design.run.precision) + narrow)
