"""The command `codesign`: the study of that name under a budget of area, power and cost.

Prices need no simulation, so all machines of a finite space are priced before anything is searched: a budget that none
of them meets is refused, with what binds and by how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dse.config.compose import Request, request
from dse.config.flags import overrides, own_folder
from dse.config.yaml_checks import parse_yaml
from dse.errors import Problems
from dse.run_study import run
from dse.space import Knob
from dse.units import Number
from dse.values import Frozen
from simulators.codesign.backend import Codesign, CodesignBackend
from simulators.codesign.machine import Base
from simulators.hardware.technology import price

Floats = NDArray[np.float64]
_METRICS = {"area_mm2": "area_mm2", "power_w": "power_w", "cost": "cost_usd"}
"""Word of a budget -> the metric that it limits."""
_MOST = 1 << 20  # machines that are priced beforehand


class MachineBudget(Frozen):
    """The most that a machine may take: area of all dies [mm2], power of a module [W], cost with its share [USD]."""

    area_mm2: Number | None = None
    power_w: Number | None = None
    cost: Number | None = None


def codesign(words: Sequence[str]) -> int:
    """`codesign [budget.area_mm2=] [budget.power_w=] [budget.cost=] [...]`: the study within a budget.

    Raises ConfigError for a budget that no machine of the space meets.
    """
    pairs = dict(word.split("=", 1) for word in words if word.partition("=")[0].removeprefix("budget.") in _METRICS)
    check = Problems()
    values = {name.removeprefix("budget."): parse_yaml(value, name) for name, value in pairs.items()}
    budget = check.model(MachineBudget, values, path="budget")
    check.done()
    assert budget is not None
    limits = {name: value for name, value in budget if value is not None}
    typed_words = [word for word in overrides(words) if word.partition("=")[0] not in pairs]
    typed = [f"+study.limits.{_METRICS[name]}.high={value!r}" for name, value in limits.items()]
    composed = request(["study=codesign", *typed, *typed_words], own_folder(words))
    if limits and not composed.problems:
        refuse_unmet(composed, limits)
    return run(composed)


def refuse_unmet(composed: Request, limits: Mapping[str, float]) -> None:
    """Raise ConfigError where no machine of a finite space meets all limits, with what binds and by how much."""
    prices = space_prices(composed)
    if prices is None:
        return
    check = Problems()
    met = {name: prices[name] <= limit for name, limit in limits.items()}
    for name, limit in limits.items():
        fits_others = np.logical_and.reduce(
            [met[other] for other in met if other != name] or [np.ones(len(met[name]), bool)]
        )
        alone, within = (
            float(prices[name].min()),
            float(prices[name][fits_others].min()) if fits_others.any() else np.nan,
        )
        if alone > limit:
            rule = (
                f"is met by no machine of the space: the least is {alone:,.0f}, {100 * (alone / limit - 1):.0f} % more"
            )
            check.add(f"budget.{name}", rule, value=limit, way_out="raise it, or widen space.machine")
        elif within > limit:
            rule = "is met by no machine within the other limits"
            rule = f"{rule}: the least of these is {within:,.0f}, {100 * (within / limit - 1):.0f} % more"
            check.add(f"budget.{name}", rule, value=limit, way_out="raise it, or another one")
    if not np.logical_and.reduce(list(met.values())).any() and not check.found:
        check.add("budget", "is met by no machine: limits bind together", way_out="raise one of them")
    check.done()


def space_prices(composed: Request) -> dict[str, Floats] | None:
    """Area, power and cost of all machines of a space [B]; None where it is infinite or too large."""
    knobs = [knob for knob in composed.knobs if knob.path.startswith("machine.")]
    sizes = [len(knob.values) for knob in knobs]
    if not all(sizes) or np.prod(sizes, dtype=float) > _MOST:
        return None
    design = CodesignBackend().design({name: composed.tree[name] for name in Codesign.model_fields})
    base = Base(design.system, design.technology)
    apart = [knob for knob in knobs if knob.path in ("machine.hbm", "machine.in_switch")]
    numbers = [knob for knob in knobs if knob not in apart]
    try:
        grids = np.meshgrid(*(np.array(knob.values, float) for knob in numbers), indexing="ij")
    except (TypeError, ValueError):  # a value with a unit, or null
        return None
    arrays = {_name(knob): grid.reshape(-1) for knob, grid in zip(numbers, grids, strict=True)}
    columns: list[tuple[Floats, ...]] = []
    for values in itertools.product(*(knob.values for knob in apart)):
        named = {_name(knob): value for knob, value in zip(apart, values, strict=True)}
        machine = design.machine.model_copy(update={**arrays, **named})
        cap = np.asarray(machine.cap_w, float)
        priced = price(base.knobs_of(machine), design.technology.nominal, cap_w=np.where(cap > 0, cap, np.inf))
        shape = (len(next(iter(arrays.values()), (0,))),)
        columns.append(
            tuple(np.broadcast_to(column, shape) for column in (priced.area_mm2, priced.power_w, priced.total_usd))
        )
    area, power, cost = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return {"area_mm2": area, "power_w": power, "cost": cost}


def _name(knob: Knob) -> str:
    return knob.path.removeprefix("machine.")
