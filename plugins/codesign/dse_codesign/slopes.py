"""Slopes on a machine: what 1 % more of each of its numbers does to speed, price and power.

Each is an elasticity, d log metric / d log number, on either side of the machine, by differences of its best plans
(`dse.analysis.one_sided`); of CUs, which are whole and make whole waves, the change to a tenth fewer and a tenth
more, as the worth of 10 % more CUs is (`dse_codesign.worth`); HBM is taken to come in any size. Where the plans
change, or a cap begins to bind, the sides differ: a kink. Throughput for a dollar rises with a number whose
elasticity of speed is above that of cost, and that of power says what a watt buys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse.analysis.one_sided import KINK, beside, elasticity
from dse_codesign.backend import Judge, Judged, largest_die_mm2, metrics_of
from dse_codesign.machine import Machine
from dse_codesign.worth import STEP, Limits, beyond_limits, with_numbers

Floats = NDArray[np.float64]
PRICES = ("cost_usd", "power_w", "area_mm2")
METRICS = ("throughput_x", "value_x", *PRICES)
"""Metrics whose slopes are told, beside the speed on each workload."""
# numbers that may change by a small fraction; the others are whole, or names
_SMOOTH = (
    *("clock", "matrix_rate", "cache", "hbm_stacks", "hbm_stack_bytes", "links", "lane_rate", "nic_gbit_per_s"),
    "cap_w",
)
_WHOLE = ("num_cus",)
_NONE = 1e-4  # elasticity that is none
_SIDES = (-1, 1)


@dataclass(frozen=True)
class Slope:
    """Elasticities by a number of a machine, below and above its value, by metric and by workload.

    NaN on a side to which a metric jumps, or to which a die would be too large. fits: whether a little less, and a
    little more, of the number is within the limits.
    """

    number: str
    value: float
    below: Mapping[str, float]
    above: Mapping[str, float]
    fits: tuple[bool, bool] = (True, True)

    def mean(self, name: str) -> float:
        """Mean of the sides that have an elasticity; NaN where none has."""
        slopes = [side[name] for side in (self.below, self.above) if not math.isnan(side[name])]
        return sum(slopes) / len(slopes) if slopes else math.nan

    def has_kink(self, name: str) -> bool:
        """True if the sides differ."""
        return abs(self.above[name] - self.below[name]) > KINK

    @property
    def pays(self) -> str:
        """The direction within the limits in which throughput for a dollar rises: `more`, `less`, or neither."""
        # less of a number gains where its elasticity below is negative
        gains = {"less": (-self.below["value_x"], self.fits[0]), "more": (self.above["value_x"], self.fits[1])}
        paying = {name: gain for name, (gain, fits) in gains.items() if fits and gain > _NONE}
        return max(paying, key=lambda name: paying[name], default="")


def slopes(judge: Judge, machine: Machine, limits: Limits = MappingProxyType({})) -> list[Slope]:
    """Slopes by each number of a machine, those of an absent cap left out. limits: as of `worth.worths`."""
    start = with_numbers(judge, machine)
    values = {name: float(np.squeeze(getattr(start, name))) for name in (*_WHOLE, *_SMOOTH)}
    numbers = {
        (name, side): np.array([value, _whole_beside(value, side)]) if name in _WHOLE else beside(value, side)
        for name, value in values.items()
        for side in _SIDES
        # a number that is absent (no cap, no NIC) has no slope
        if value > 0 and (name not in _WHOLE or _whole_beside(value, side) > 0)
    }
    machines = [(start.model_copy(update={name: array}), array.size) for (name, _), array in numbers.items()]
    judged = judge.judge_all(machines)
    by_side = {
        (name, side): _elasticities(judge, moved, part, (numbers[name, side], side, name in _WHOLE))
        for (name, side), (moved, _), part in zip(numbers, machines, judged, strict=True)
    }
    fitting = {
        place: not beyond_limits(judge, moved, part, limits)
        for place, (moved, _), part in zip(numbers, machines, judged, strict=True)
    }
    nowhere = dict.fromkeys((*judge.steps, *METRICS), math.nan)
    return [
        Slope(
            name,
            value,
            by_side.get((name, -1), nowhere),
            by_side.get((name, 1), nowhere),
            (fitting.get((name, -1), False), fitting.get((name, 1), False)),
        )
        for name, value in values.items()
        if value > 0
    ]


def _whole_beside(value: float, side: int) -> float:
    """A whole number a tenth below or above another one, and at least one."""
    # as the worth of 10 % more, so that both answers agree
    return value + side * max(1.0, round(value * (STEP - 1)))


def _elasticities(
    judge: Judge, machine: Machine, judged: Judged, where: tuple[Floats, int, bool]
) -> Mapping[str, float]:
    """Elasticities by numbers on a side, whole or not; none of a die that is too large."""
    numbers, side, is_whole = where
    columns = metrics_of(judge, machine, judged)
    fits = columns["die_mm2"] <= largest_die_mm2(judge.base)
    rows = {**judged.speeds, **{name: columns[name] for name in METRICS}}
    # [neighbours of the number, metrics]
    table = np.where(fits[:, None], np.column_stack(list(rows.values())), np.nan)
    slope = _of_neighbours(table, numbers) if is_whole else elasticity(table, side)
    return dict(zip(rows, slope.tolist(), strict=True))


def _of_neighbours(values: Floats, numbers: ArrayLike) -> Floats:
    """Change of log value over that of log number, from values [2, ...] at two numbers [2]: for whole numbers."""
    with np.errstate(all="ignore"):
        change = np.log(values[1] / values[0])
    first, second = np.asarray(numbers, float)
    return np.where(np.isfinite(change), change / np.log(second / first), np.nan)


def row_of(slope: Slope) -> dict[str, Any]:
    """A row of a table: each elasticity below and above, and what pays."""
    sides = {
        f"{name}_{side}": values[name]
        for name in slope.below
        for side, values in (("below", slope.below), ("above", slope.above))
    }
    return {"number": slope.number, "value": slope.value, "pays": slope.pays, **sides}


@dataclass(frozen=True)
class Trade:
    """Two numbers of a machine, one raised and one lowered at the same price [%], and the gain of speed [%]."""

    price: str
    raised: str
    lowered: str
    more: float
    less: float
    gain: float


def best_trade(numbers: Sequence[Slope], price: str) -> Trade | None:
    """The exchange that gains most speed at the same price, of no number more than 1 %; None where none gains."""
    trades = [
        trade
        for raised, lowered in itertools.permutations(numbers, 2)
        if (trade := _trade(raised, lowered, price)) is not None
    ]
    return max(trades, key=lambda trade: trade.gain, default=None)


def _trade(raised: Slope, lowered: Slope, price: str) -> Trade | None:
    takes, gives = raised.above[price], lowered.below[price]
    # an exchange needs one number that takes of the price, and another that gives some back
    if not (takes > _NONE and gives > _NONE):
        return None
    # the price that the lowered number gives pays for the raised one; neither moves by more than 1 %
    more, less = min(1.0, gives / takes), min(1.0, takes / gives)
    gain = more * raised.above["throughput_x"] - less * lowered.below["throughput_x"]
    return Trade(price, raised.number, lowered.number, more, less, gain) if gain > _NONE else None
