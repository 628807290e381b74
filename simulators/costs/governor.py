"""The clock that a board's limit of power allows: designs are run at lower and lower clocks until they keep it.

Each design is evaluated at the clock that is asked for (`system.gpu.clock`). Where its power is above the limit
(`system.gpu.power.cap_w`, the board's by default), it is evaluated at lower clocks, too, each `STEP` times the one
before. A governor that goes to and fro between two clocks draws any power between theirs: with w of the iterations at
the higher clock a, and the others at the lower one b,

    w E_a + (1 - w) E_b = P_cap (w T_a + (1 - w) T_b)

and each metric is the mean over these iterations. The power E / T that counts is the one that the governor sees through
its window (`simulators.costs.power.seen_w`), which is the mean where an iteration's kernels alternate within it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse.backend import STATUSES, Batch, Metric, Results
from dse.space.blocks import Rule
from dse.values import put
from simulators.hardware.machine import Gpu, peak_format
from simulators.hardware.parts import Power

Floats = NDArray[np.float64]
STEP = 0.96
"""Of the clock, from one evaluated clock to the next."""
LOWEST = 0.2
"""Share of the clock that is asked for, below which no limit is met."""
POWER_METRICS: Mapping[str, Metric] = {
    "energy_j": Metric("J", "energy of one GPU from the start to the last finish"),
    "mean_w": Metric("W", "mean power of one GPU"),
    "held_clock": Metric("fraction", "mean clock over gpu.power.clock_hz: below gpu.clock where power limits it"),
    "lowest_clock": Metric("fraction", "the lowest clock to which the governor swings, over gpu.power.clock_hz"),
}
CLOCK = "system.gpu.clock"
_NEVER = f"system.gpu.power.cap_w: is below what the board draws at {LOWEST:g} of the clock that is asked for"


@dataclass(frozen=True)
class BoardDraw:
    """What a GPU draws in a batch. time: name of the metric that is an iteration's time.

    watts: of results at clocks that were asked for, (mean power [W], the highest that the governor sees, the relative
    clock that they ran at).
    """

    gpu: Gpu
    time: str
    watts: Callable[[Results, Floats], tuple[Floats, Floats, Floats]]


def governed(
    batches: Sequence[Batch],
    evaluate: Callable[[Sequence[Batch]], Sequence[Results]],
    draw_of: Callable[[Batch], BoardDraw],
) -> list[Results]:
    """Results of batches at the clocks that power allows, with `POWER_METRICS`."""
    states = [_Governed(batch, draw_of(batch)) for batch in batches]
    share = 1.0
    while share > LOWEST and (above := [state for state in states if state.is_above.any()]):
        at_clock = evaluate([_slower(state.batch, share) for state in above])
        for state, results in zip(above, at_clock, strict=True):
            state.add(results, share)
        share *= STEP
    return [state.results() for state in states]


def power_rules(power: Power | None, precisions: Sequence[str]) -> Iterator[Rule]:
    """Yield what a GPU's power model lacks for operations of formats, and a limit that no clock can meet."""
    path = "system.gpu.power"
    if power is None:
        way = "use system=a100_8 or h100_8, or give gpu.power with its source"
        yield Rule(path, True, "is needed to tell power, and is not known of this GPU", None, way_out=way)
        return
    for precision in (name for name in precisions if peak_format(name) not in power.flop_j):
        rule = f"has no energy of an operation at {precision}"
        yield Rule(f"{path}.flop_j", True, rule, ", ".join(power.flop_j), way_out="add it, with its source")
    cap, idle, board = (np.asarray(watts, float) for watts in (power.cap_w, power.idle_w, power.board_w))
    rule = "is no more than the {0} W that the board draws when nothing runs"
    yield Rule(f"{path}.cap_w", cap <= idle, rule, cap, (idle,), way_out="set a higher limit")
    rule = "is above the board's own limit of {0} W"
    yield Rule(f"{path}.cap_w", cap > board, rule, cap, (board,), way_out="leave it out for the board's")


def _slower(batch: Batch, share: float) -> Batch:
    """The same designs at a share of their clocks."""
    if share == 1.0:
        return batch
    design: Any = batch.design
    asked = design.system.gpu.clock
    slower: BaseModel = put(design, CLOCK, share * (1.0 if asked is None else asked))
    axes = {path: values * share if path == CLOCK else values for path, values in batch.axes.items()}
    return Batch(slower, axes)


class _Governed:
    """Results [B] of a batch at lower and lower clocks, until each design draws no more than its limit."""

    def __init__(self, batch: Batch, draw: BoardDraw) -> None:
        self.batch, self._draw, self._gpu = batch, draw, draw.gpu
        self.is_above = np.ones(batch.size, bool)
        self._first: Results | None = None
        self._metrics: dict[str, Floats] = {}
        self._over_j = np.zeros(batch.size)
        self._unlimited = np.zeros(batch.size)

    @property
    def _asked(self) -> Floats:
        return np.asarray(1.0 if self._gpu.clock is None else self._gpu.clock, float)

    def add(self, results: Results, share: float) -> None:
        """Take results at a share of the clocks: designs that are at or below their limit there are done."""
        if self._first is None:
            self._first = results
        self.is_above = self.is_above & results.ok  # a design that is refused at a lower clock stays above its limit
        if self._gpu.power is None or not self.is_above.any():
            return
        here, seen = self._powered(results, share * self._asked)
        # above what the limit allows in this time
        if not self._metrics:
            self._unlimited = here["held_clock"]
        over_j = (seen - np.asarray(self._gpu.power.cap_w, float)) * here[self._draw.time]
        taken = self._mixed(here, over_j) if self._metrics else here
        old = self._metrics or here
        self._metrics = {name: np.where(self.is_above, taken[name], old[name]) for name in here}
        self._over_j = np.where(self.is_above, over_j, self._over_j)
        self.is_above = self.is_above & (over_j > 0)

    def _mixed(self, here: Mapping[str, Floats], over_j: Floats) -> dict[str, Floats]:
        """Means over iterations at the clock before and at this one, in shares that together draw the limit."""
        before, time = self._metrics, self._draw.time
        part = np.where(over_j < 0, over_j / np.where(over_j < 0, over_j - self._over_j, 1.0), 0.0)
        mixed = {name: part * before[name] + (1 - part) * here[name] for name in here}
        held_s = (each["held_clock"] * each[time] for each in (before, here))
        mixed["held_clock"] = (part * next(held_s) + (1 - part) * next(held_s)) / mixed[time]
        mixed["mean_w"] = mixed["energy_j"] / mixed[time]
        return mixed

    def _powered(self, results: Results, clock: Floats) -> tuple[dict[str, Floats], Floats]:
        """Metrics of results at a clock, with power and energy, and the power that the governor sees."""
        seconds = results.column(self._draw.time)
        watts, seen, held = self._draw.watts(results, np.broadcast_to(clock, seconds.shape))
        return {**results.metrics, "mean_w": watts, "energy_j": watts * seconds, "held_clock": held}, seen

    def results(self) -> Results:
        """The results; designs that are above their limit at the lowest clock break a rule."""
        assert self._first is not None
        if not self._metrics:
            return self._first
        status, reason = self._first.status.copy(), self._first.reason.copy()
        done = np.isfinite(self._metrics["mean_w"]) & (self._over_j <= 0)
        never = self._first.ok & ~done
        status[never], reason[never] = STATUSES.index("infeasible"), len(self._first.texts)
        fine = status == STATUSES.index("ok")
        metrics = {name: np.where(fine, column, np.nan) for name, column in self._swung().items()}
        return replace(self._first, status=status, reason=reason, metrics=metrics, texts=(*self._first.texts, _NEVER))

    def _swung(self) -> dict[str, Floats]:
        """Metrics with the lowest clock: below the mean one where the limit binds."""
        assert self._gpu.power is not None
        held, dip = self._metrics["held_clock"], self._gpu.power.dip
        swing = np.where(held < self._unlimited, 1 - np.asarray(0.0 if dip is None else dip, float), 1.0)
        return {**self._metrics, "lowest_clock": held * swing}
