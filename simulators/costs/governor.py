"""The clock that a board's limit of power allows: designs are run at lower and lower clocks until they keep it.

Each design is evaluated at the clock that is asked for (`system.gpu.clock`). Where its power is above the limit
(`system.gpu.power.cap_w`, the board's by default), it is evaluated at lower clocks, too, each `STEP` times the one
before. A governor that goes to and fro between two clocks draws any power between theirs: with w of the iterations at
the higher clock a, and the others at the lower one b,

    w E_a + (1 - w) E_b = P_cap (w T_a + (1 - w) T_b)

and each metric is the mean over these iterations. The power E / T that counts is the one that the governor sees through
its window (`simulators.costs.power.seen_w`), which is the mean where an iteration's kernels alternate within it.

Power falls with the clock, so that a search between two clocks, one above the limit and one that keeps it, finds a and
b. Few designs, of a backend that runs them as arrays, are evaluated at all of the higher clocks at once, which takes
hardly longer than at one.
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
_CLOCKS = 1 + int(np.floor(np.log(LOWEST) / np.log(STEP)))
"""Number of evaluated clocks."""
_SLOPE = -2.2 * float(np.log(STEP))
"""Logarithm of power for a step of the clock, where nothing is known: measured powers of the clock are 1.3 to 3.3."""
_FEW_GUESSES, _GUESSES = 3, 3
_SECTIONS = 6
"""Clocks between two that are evaluated together."""
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

    gpu: whose numbers may be arrays over the batch. watts: of results at clocks that were asked for, (mean power [W],
    the highest that the governor sees, the relative clock that they ran at).
    """

    gpu: Gpu
    time: str
    watts: Callable[[Results, Floats], tuple[Floats, Floats, Floats]]


def governed(
    batches: Sequence[Batch],
    evaluate: Callable[[Sequence[Batch]], Sequence[Results]],
    draw_of: Callable[[Batch], BoardDraw],
    *,
    together: int = 1,
) -> list[Results]:
    """Results of batches at the clocks that power allows, with `POWER_METRICS`.

    together: number of designs that `evaluate` runs in hardly more time than one, as arrays; 1 where it runs them
    singly.
    """
    states = [_Governed(batch, draw_of, together) for batch in batches]
    while waiting := [(state, clocks) for state in states if len(clocks := state.next_clocks())]:
        at_clocks = [at_shares(state.batch, np.asarray(STEP**clocks, float)) for state, clocks in waiting]
        for (state, clocks), slower, results in zip(waiting, at_clocks, evaluate(at_clocks), strict=True):
            state.add(clocks, slower, results)
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


def at_shares(batch: Batch, shares: Floats) -> Batch:
    """The same designs at shares of their clocks: all of them at the first share, then at the next."""
    design: Any = batch.design
    asked = design.system.gpu.clock
    clocks = batch.axes.get(CLOCK, np.array([1.0 if asked is None else float(asked)]))
    # the clock comes first, so that all designs of one share follow one another
    others = {path: values for path, values in batch.axes.items() if path != CLOCK}
    slower: BaseModel = put(design, CLOCK, float(shares[0] * clocks[0]))
    # a design with an axis of its own, as that of the lengths of an epoch, takes no other
    if batch.size * len(shares) == 1:
        return Batch(slower)
    return Batch(slower, {CLOCK: np.multiply.outer(shares, clocks).reshape(-1), **others})


def _places(batch: Batch) -> NDArray[np.intp]:
    """Place of each design of a batch among those with the clock as the first axis."""
    order = np.arange(batch.size).reshape(batch.shape)
    if CLOCK in batch.axes:
        order = np.moveaxis(order, list(batch.axes).index(CLOCK), 0)
    return np.argsort(order.reshape(-1))


class _Governed:
    """Results [B] of a batch at the clocks [K] that are asked for, until each design has two around its limit, or one
    that keeps it. Clocks are numbers of steps below the one that is asked for.
    """

    def __init__(self, batch: Batch, draw_of: Callable[[Batch], BoardDraw], together: int) -> None:
        self.batch, self._draw_of, self._together = batch, draw_of, together
        self._places = _places(batch)
        self._found: dict[int, tuple[Results, NDArray[np.intp]]] = {}  # results with power, and the places of a clock's
        self._over_j: dict[int, Floats] = {}  # energy above what the limit allows in the time of an iteration
        self._log_power: dict[int, Floats] = {}  # of the power that the governor sees, over the limit
        self._above = np.full(batch.size, -1)  # the lowest clock that is known to be above the limit
        self._fits = np.full(batch.size, _CLOCKS)  # the highest one that keeps it
        self._last = np.full(batch.size, _CLOCKS - 1)  # the lowest one that may be asked
        self._time, self._dip, self._rounds = "", np.zeros(batch.size), 0

    def next_clocks(self) -> NDArray[np.int64]:
        """Clocks to evaluate next; none where each design is done."""
        if not self._found:
            return np.arange(min(max(self._together // self.batch.size, 1), _CLOCKS))
        open_ends = (self._fits > self._above + 1) & (self._above < self._last)
        if not open_ends.any():
            return np.zeros(0, np.int64)
        above, fits = self._above[open_ends], np.minimum(self._fits, self._last + 1)[open_ends]
        low, high = int(above.min()) + 1, int(fits.max()) - 1
        few = min(self._together // self.batch.size, _SECTIONS)
        inner = np.arange(low, high + 1) if high - low < few else np.linspace(low, high, max(few, 1) + 2)[1:-1]
        # what was evaluated for other designs of the batch is known
        sections = np.setdiff1d(np.round(inner).astype(np.int64), list(self._found))
        if few > 1 and len(sections):
            return sections
        guessed, middle = self._guessed(open_ends), np.unique((above + fits) // 2)
        # designs that differ much have guesses all over, each of which all of them are evaluated at
        return guessed if len(guessed) <= _FEW_GUESSES and self._rounds <= _GUESSES else middle

    def _guessed(self, open_ends: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Clocks around the limit of each design: the logarithm of power is taken as linear in the number of steps."""
        guesses = set[int]()
        above, fits = self._above[open_ends], self._fits[open_ends]
        ends = np.minimum(self._fits, self._last + 1)[open_ends]
        for low, high, end in {*zip(above.tolist(), fits.tolist(), ends.tolist(), strict=True)}:
            rows = np.flatnonzero(open_ends)[(above == low) & (fits == high) & (ends == end)]
            excess = self._log_power[low][rows]
            # the slope between both ends, or from a clock that is further above
            other = (
                high if high in self._log_power else max((clock for clock in self._found if clock < low), default=-1)
            )
            known = self._log_power.get(other)
            slope = _SLOPE if known is None else (excess - known[rows]) / (other - low)
            reached = np.clip(np.ceil(low + excess / slope), low + 1, end - 1).astype(np.int64)
            guesses |= {*reached.tolist()}
            # the clock before closes the search where the guess is right
            guesses |= {int(clock) - 1 for clock in reached if clock - 1 > low}
        return np.array(sorted(guesses), np.int64)

    def add(self, clocks: NDArray[np.int64], slower: Batch, every: Results) -> None:
        """Take results at clocks: those of the first one, then of the next."""
        self._rounds += 1
        draw = self._draw_of(slower)
        is_ok, size = every.ok, self.batch.size
        if draw.gpu.power is not None and is_ok.any():
            every, over_j, excess = _powered(every, draw)
            dip = draw.gpu.power.dip
            dips = np.broadcast_to(np.asarray(0.0 if dip is None else dip, float), every.size)
            self._time, self._dip = draw.time, dips[self._places]
        else:
            over_j = excess = np.full(every.size, np.nan)
        for number, clock in enumerate(clocks.tolist()):
            places = number * size + self._places
            self._found[clock], over = (every, places), over_j[places]
            self._log_power[clock] = excess[places]
            self._over_j[clock], valid = over, is_ok[places] & np.isfinite(over)
            # a design that is refused at a lower clock stays above its limit
            self._last = np.where(valid, self._last, np.minimum(self._last, clock - 1))
            self._fits = np.where(valid & (over <= 0), np.minimum(self._fits, clock), self._fits)
            self._above = np.where(valid & (over > 0), np.maximum(self._above, clock), self._above)
        # a lower clock than one that keeps the limit is of no interest
        self._above = np.minimum(self._above, self._fits - 1)

    def results(self) -> Results:
        """The results; designs that are above their limit at the lowest clock break a rule."""
        first = self._at(0)
        if "mean_w" not in first.metrics:
            return first
        status, reason = first.status.copy(), first.reason.copy()
        never = first.ok & (self._fits > self._last)
        status[never], reason[never] = STATUSES.index("infeasible"), len(first.texts)
        fine = status == STATUSES.index("ok")
        metrics = {name: np.where(fine, column, np.nan) for name, column in self._held(first, fine).items()}
        return replace(first, status=status, reason=reason, metrics=metrics, texts=(*first.texts, _NEVER))

    def _at(self, clock: int, rows: slice | NDArray[np.intp] = slice(None)) -> Results:
        """Results of some designs at a clock, with power."""
        results, places = self._found[clock]
        return results.take(places[rows])

    def _held(self, first: Results, fine: NDArray[np.bool_]) -> dict[str, Floats]:
        """Metrics at the clock that is asked for, or means over the two clocks around the limit."""
        metrics = {name: column.copy() for name, column in first.metrics.items()}
        metrics["lowest_clock"] = metrics["held_clock"].copy()
        time, dip = self._time, self._dip
        for fits in np.unique(self._fits[fine & (self._fits > 0)]).tolist():
            rows = np.flatnonzero(fine & (self._fits == fits))
            before, here = (self._at(clock, rows).metrics for clock in (fits - 1, fits))
            mixed = _mixed(before, here, over=(self._over_j[fits - 1][rows], self._over_j[fits][rows]), time=time)
            # below the mean clock, as the governor swings while the limit binds
            swing = np.where(mixed["held_clock"] < first.column("held_clock")[rows], 1 - dip[rows], 1.0)
            mixed["lowest_clock"] = mixed["held_clock"] * swing
            for name, column in mixed.items():
                metrics[name][rows] = column
        return metrics


def _powered(results: Results, draw: BoardDraw) -> tuple[Results, Floats, Floats]:
    """Results with power and energy, the energy above what the limit allows in their time, and the logarithm of the
    power that the governor sees over the limit.
    """
    assert draw.gpu.power is not None
    seconds = results.column(draw.time)
    asked = np.asarray(1.0 if draw.gpu.clock is None else draw.gpu.clock, float)
    watts, seen, held = draw.watts(results, np.broadcast_to(asked, seconds.shape))
    metrics = {**results.metrics, "mean_w": watts, "energy_j": watts * seconds, "held_clock": np.asarray(held, float)}
    cap = np.asarray(draw.gpu.power.cap_w, float)
    return replace(results, metrics=metrics), (seen - cap) * seconds, np.log(seen / cap)


def _mixed(
    before: Mapping[str, Floats], here: Mapping[str, Floats], *, over: tuple[Floats, Floats], time: str
) -> dict[str, Floats]:
    """Means over iterations at the clock before and at this one, in shares that together draw the limit.

    over: energy of each above the limit.
    """
    part = np.where(over[1] < 0, over[1] / np.where(over[1] < 0, over[1] - over[0], 1.0), 0.0)
    mixed = {name: part * before[name] + (1 - part) * here[name] for name in here}
    held_s = part * before["held_clock"] * before[time] + (1 - part) * here["held_clock"] * here[time]
    mixed["held_clock"] = held_s / mixed[time]
    mixed["mean_w"] = mixed["energy_j"] / mixed[time]
    return mixed
