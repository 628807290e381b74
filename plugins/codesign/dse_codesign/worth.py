"""Worth of machines: features at their break-even, contributions between two machines, odds of a front.

A feature that makes a machine g times as fast is worth what leaves throughput for a dollar (a watt) as it was: (g - 1)
times what the machine costs (draws). Contributions of the knobs between two machines are Shapley values of the
logarithm of throughput over orders of changing them, so that their product is the whole. Odds that a feature pays are
over technologies drawn from all intervals and, at the same time, errors of the models of speed drawn from residuals
(`simulators.hardware.residuals`): what a machine with the feature and one without it have in common is off alike, and
cancels in the gain. Odds of a front are over technologies alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.results.decisions import interval
from dse_codesign.backend import Judge, Judged, largest_die_mm2, metrics_of
from dse_codesign.machine import Machine
from dse_codesign.technology import Coefficients, price

Floats = NDArray[np.float64]
Limits = Mapping[str, Mapping[str, float | None]]
STEP = 1.1
"""Factor by which features scale numbers, and slopes change whole ones."""
_SAMPLES = 256
_MOST_ORDERED = 6  # knobs whose orders are enumerated: 64 machines in 720 orders
_ORDERS = 16  # that are drawn, beside the same backwards
_WIDER = 4
_MOST_SCALE_UP = 64  # GPUs behind one stage of switches
_ENTRIES = 512  # of a tracker: one for each workgroup in flight
_UNITS = "hbm3_strawman"  # in memory
_SCALED = {
    "10 % more CUs": "num_cus",
    "10 % more clock": "clock",
    "10 % wider matrix units": "matrix_rate",
    "10 % more HBM": "hbm_stacks",
    "10 % more links": "links",
    "10 % more of NICs": "nic_gbit_per_s",
}
"""Feature -> number of a machine that it scales."""


@dataclass(frozen=True)
class Worth:
    """A feature of a machine. gains: speed with it over that without, by workload; gain: of all by weight.

    low, high: 90 % interval of the gain, by drawn errors of the models that predict it. area_mm2, power_w, usd: that it
    takes. usd_worth, power_worth_w: at which throughput per dollar (per watt) is as without it; usd_ends: of usd_worth
    at low and high. odds: share of drawn technologies and errors in which it costs less than it is worth. beyond:
    metrics of the machine with it that are beyond a limit.
    """

    name: str
    gain: float
    low: float
    high: float
    gains: Mapping[str, float]
    area_mm2: float
    power_w: float
    usd: float
    usd_worth: float
    power_worth_w: float
    usd_ends: tuple[float, float]
    odds: float
    beyond: tuple[str, ...] = ()

    @property
    def pays(self) -> bool:
        """True if it costs less than it is worth, and the machine with it is within the limits."""
        return self.usd < self.usd_worth and not self.beyond

    @property
    def area_worth_mm2(self) -> float:
        """Area from which on it does not pay, at the price of its own; infinite where it takes none, or pays anyhow."""
        return math.inf if self.area_mm2 <= 0 or self.usd <= 0 else self.area_mm2 * self.usd_worth / self.usd


def features(judge: Judge, machine: Machine) -> Iterator[tuple[str, Machine, Machine]]:
    """Yield (feature, machine without it, machine with it)."""
    start = with_numbers(judge, machine)
    for name, knob in _SCALED.items():
        # numbers may become fractions: worth is that of a tenth, not of a machine to be built
        yield name, start, start.model_copy(update={knob: getattr(start, knob) * STEP})
    changed = partial(_changed, start)
    yield "a copy engine more", start, changed(copy_engines=(start.copy_engines or 1) + 1)
    if judge.base.system.node.in_switch is not None and start.topology == "switch":
        yield "sums in the switch", changed(in_switch=False), changed(in_switch=True)
    # placements in turn: each feature is the step from the one before it
    yield "NICs off the host", changed(nic_placement="cpu"), changed(nic_placement="pcie_switch")
    yield "NICs at the GPU", changed(nic_placement="pcie_switch"), changed(nic_placement="gpu")
    scale_up = start.scale_up or 1
    if start.topology == "switch" and _WIDER * scale_up <= _MOST_SCALE_UP:
        yield f"scale-up of {_WIDER * scale_up}", start, changed(scale_up=_WIDER * scale_up)
    # T3 without and with units in memory, both against a machine without a tracker
    untracked = changed(tracker_entries=0, memory_units="none")
    # at least one entry for each CU
    entries = max(_ENTRIES, int(np.max(np.asarray(start.num_cus))))
    yield "T3's tracker", untracked, changed(tracker_entries=entries, memory_units="none")
    yield "T3 with units in memory", untracked, changed(tracker_entries=entries, memory_units=_UNITS)


def _changed(machine: Machine, **changes: Any) -> Machine:
    return machine.model_copy(update=changes)


def with_numbers(judge: Judge, machine: Machine) -> Machine:
    """A machine with numbers in place of what is the base's."""
    base, dma = judge.base.knobs, judge.base.system.gpu.dma
    numbers = {
        "num_cus": base.num_cus,
        "dies": base.num_dies,
        # generations by their index, as knobs hold them
        "hbm": tuple(judge.base.technology.memory.generations)[int(np.asarray(base.hbm))],
        "hbm_stacks": base.hbm_stacks,
        "hbm_stack_bytes": np.asarray(base.hbm_bytes) / np.asarray(base.hbm_stacks),
        "copy_engines": dma.num_engines,
        "nic_gbit_per_s": base.nic_gbit_per_s,
        "topology": judge.base.topology_of(machine),
        "scale_up": judge.base.scale_up_of(machine),
        "nic_placement": "pcie_switch",
    }
    return machine.model_copy(update={name: value for name, value in numbers.items() if getattr(machine, name) is None})


def worths(judge: Judge, machine: Machine, limits: Limits = MappingProxyType({})) -> list[Worth]:
    """Worth of each feature on a machine. limits: by metric, as of a study, with `low` or `high`."""
    shares = list(features(judge, machine))
    # machines without and with each feature in turn: places 2 i and 2 i + 1
    judged = judge.judge_all([(machine, 1) for _, *pair in shares for machine in pair])
    # the same technologies for all features, and for a machine with it and one without
    technologies = judge.base.technology.sample(_SAMPLES, seed=0)
    return [
        replace(
            _worth(judge, feature, (judged[2 * place], judged[2 * place + 1]), technologies),
            beyond=beyond_limits(judge, feature[2], judged[2 * place + 1], limits),
        )
        for place, feature in enumerate(shares)
    ]


def beyond_limits(judge: Judge, machine: Machine, judged: Judged, limits: Limits) -> tuple[str, ...]:
    """Metrics of a machine, the last of those judged, that are beyond a limit; a die that cannot be made is."""
    columns = {name: float(column[-1]) for name, column in metrics_of(judge, machine, judged).items()}
    bounds = {name: (limit.get("low"), limit.get("high")) for name, limit in limits.items() if name in columns}
    # no budget makes a die larger than the reticle
    bounds.setdefault("die_mm2", (None, largest_die_mm2(judge.base)))
    return tuple(
        name
        for name, (low, high) in bounds.items()
        if (low is not None and columns[name] < low) or (high is not None and columns[name] > high)
    )


def _worth(
    judge: Judge, feature: tuple[str, Machine, Machine], judged: tuple[Judged, Judged], technologies: Coefficients
) -> Worth:
    name, *machines = feature
    before, after = judged
    gain = float(after.throughput[0] / before.throughput[0])
    gains = {key: float(after.speeds[key][0] / before.speeds[key][0]) for key in before.speeds}
    prices = [_prices(judge, part, judge.base.technology.nominal) for part in machines]
    (area, power, usd), (more_area, more_power, more_usd) = ([float(value) for value in part] for part in prices)
    samples = [_prices(judge, part, technologies)[2] for part in machines]
    drawn = _drawn_gain(judge, machines, judged)
    # dearer by less, in relation, than it is faster
    pays = samples[1] - samples[0] < (drawn - 1) * samples[0]
    low, high = interval(drawn, gain)
    return Worth(
        name,
        gain,
        low,
        high,
        gains,
        area_mm2=more_area - area,
        power_w=more_power - power,
        usd=more_usd - usd,
        # throughput over dollars stays: gain / (usd + worth) = 1 / usd
        usd_worth=(gain - 1) * usd,
        power_worth_w=(gain - 1) * power,
        usd_ends=((low - 1) * usd, (high - 1) * usd),
        odds=float(np.mean(pays)),
    )


def _drawn_gain(judge: Judge, machines: Sequence[Machine], judged: Sequence[Judged]) -> Floats:
    """Gain of all workloads by weight [_SAMPLES], with drawn errors."""
    before, after = (judge.drawn(*part, _SAMPLES) for part in zip(machines, judged, strict=True))
    total = sum(step.weight for step in judge.steps.values())
    # times: the gain is that before over that after
    logs = (step.weight / total * np.log(before[name] / after[name]) for name, step in judge.steps.items())
    return np.asarray(np.exp(sum(logs)))


def _prices(judge: Judge, machine: Machine, technology: Coefficients) -> tuple[Floats, Floats, Floats]:
    """Area [mm2], power [W] and cost [USD] of a machine in a technology, or in drawn ones."""
    # 0 stands for no cap
    cap = np.asarray(machine.cap_w, float)
    priced = price(judge.base.knobs_of(machine), technology, cap_w=None if not np.any(cap) else cap)
    return priced.area_mm2, priced.power_w, np.squeeze(priced.total_usd)


def differences(judge: Judge, first: Machine, second: Machine) -> list[str]:
    """Names of the knobs in which two machines differ."""
    start, other = with_numbers(judge, first), with_numbers(judge, second)
    # None stays where even the base has no such number
    return [name for name, value in start if value != getattr(other, name) and getattr(other, name) is not None]


def contributions(judge: Judge, first: Machine, second: Machine) -> dict[str, tuple[float, float]]:
    """Factor on throughput, and dollars, of each knob between two machines: Shapley values.

    Over all orders of changing knobs, or over drawn ones and the same backwards where they are too many; the product of
    factors, and the sum of dollars, is exact in any case.
    """
    start, other = with_numbers(judge, first), with_numbers(judge, second)
    names = differences(judge, first, second)
    orders = _orders(names)
    # a machine is known by the set of changed knobs: each subset is judged once
    subsets = sorted({frozenset(order[:size]) for order in orders for size in range(len(names) + 1)}, key=sorted)
    machines = [start.model_copy(update={name: getattr(other, name) for name in subset}) for subset in subsets]
    judged = judge.judge_all([(machine, 1) for machine in machines])
    values = {
        subset: np.array([math.log(float(part.throughput[0])), float(np.squeeze(part.price.total_usd))])
        for subset, part in zip(subsets, judged, strict=True)
    }
    shares = {name: np.zeros(2) for name in names}
    for order in orders:
        for place, name in enumerate(order):
            before, after = frozenset(order[:place]), frozenset(order[: place + 1])
            # logarithms of speed, so that factors multiply to the whole
            shares[name] += (values[after] - values[before]) / len(orders)
    return {name: (math.exp(share[0]), float(share[1])) for name, share in shares.items()}


def _orders(names: Sequence[str]) -> list[tuple[str, ...]]:
    """All orders of some names; where they are too many, drawn ones, each with the same backwards."""
    if len(names) <= _MOST_ORDERED:
        return list(permutations(names))
    drawn = random.Random(0)
    forwards = [tuple(drawn.sample(names, len(names))) for _ in range(_ORDERS)]
    # an order and its reverse: their errors partly cancel (antithetic sampling)
    return [order for pair in zip(forwards, (order[::-1] for order in forwards), strict=True) for order in pair]


def front_odds(judge: Judge, machines: Sequence[Machine], speeds: Sequence[float]) -> Floats:
    """Share of drawn technologies in which each machine is on the front of speed, power and cost among all of them."""
    import moocore

    # speeds do not depend on the technology, but for clocks under a cap, which stay nominal here
    drawn = judge.base.technology.sample(_SAMPLES, seed=1)
    prices = [_prices(judge, machine, drawn)[1:] for machine in machines]
    power, cost = (
        np.stack([np.broadcast_to(np.squeeze(part[place]), _SAMPLES) for part in prices]) for place in range(2)
    )
    on = np.zeros(len(machines))
    for sample in range(_SAMPLES):
        # minimised: the negative of speed, power, cost
        points = np.column_stack([-np.asarray(speeds), power[:, sample], cost[:, sample]])
        on += moocore.is_nondominated(points, keep_weakly=True)
    return on / _SAMPLES


def row_of(worth: Worth) -> dict[str, Any]:
    """A row of a table."""
    odds = {"usd": worth.usd, "usd_worth": worth.usd_worth, "power_w": worth.power_w}
    odds |= {"power_worth_w": worth.power_worth_w, "area_mm2": worth.area_mm2, "area_worth_mm2": worth.area_worth_mm2}
    gains = {f"gain_{name}": gain for name, gain in worth.gains.items()}
    within = {"within_budget": not worth.beyond, "beyond": ", ".join(worth.beyond), "pays": worth.pays}
    gain = {"gain": worth.gain, "gain_low": worth.low, "gain_high": worth.high}
    odds |= {f"usd_worth_{end}": value for end, value in zip(("low", "high"), worth.usd_ends, strict=True)}
    return {"feature": worth.name, **gain, **odds, **within, "odds": worth.odds, **gains}
