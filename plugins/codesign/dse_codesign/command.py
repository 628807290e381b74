"""The command `codesign`: the study of that name under a budget of area, power and cost.

Prices need no simulation, so the cheapest machines of a finite space are priced before anything is searched: a budget
that none of them meets is refused, with what binds and by how much.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.config.compose import Request, request
from dse.config.options import overrides, own_folder
from dse.errors import Problems, did_you_mean
from dse.results.run_folder import CommandAnswer
from dse.run_study import run
from dse.space import Knob
from dse.study.plan import plan
from dse.values import Frozen
from dse.values.units import Number
from dse_codesign.backend import Codesign, CodesignBackend
from dse_codesign.machine import Base, Machine
from dse_codesign.technology import price

Floats = NDArray[np.float64]
_METRICS = {"area_mm2": "area_mm2", "power_w": "power_w", "cost": "cost_usd"}
"""Word of a budget -> the metric that it limits."""
_MOST = 1 << 14  # machines that are priced beforehand
_DRAWN = 16  # machines on which values of a knob are compared


Limit = Annotated[Number, Field(gt=0)]


class MachineBudget(Frozen):
    """The most that a machine may take: area of all dies [mm2], power of a module [W], cost with its share [USD]."""

    area_mm2: Limit | None = None
    power_w: Limit | None = None
    cost: Limit | None = None


def codesign(words: Sequence[str]) -> CommandAnswer:
    """`codesign [budget.area_mm2=] [budget.power_w=] [budget.cost=] [...]`: the study within a budget.

    Raises ConfigError for a budget that no machine of the space meets.
    """
    pairs = dict(word.split("=", 1) for word in words if word.partition("=")[0].removeprefix("budget.") in _METRICS)
    check = Problems()
    for word in words:
        path, _, value = word.partition("=")
        if path.startswith("budget.") and path not in pairs and path != "budget.trials":
            way = did_you_mean(path, [f"budget.{name}" for name in _METRICS])
            check.add(path, "is no budget", value=value, way_out=way)
    values = {name.removeprefix("budget."): _number(value) for name, value in pairs.items()}
    budget = check.model(MachineBudget, values, path="budget")
    check.done()
    assert budget is not None
    limits = {name: value for name, value in budget if value is not None}
    typed_words = [word for word in overrides(words) if word.partition("=")[0] not in pairs]
    # a budget is a limit of the study
    typed = [f"+study.limits.{_METRICS[name]}.high={value!r}" for name, value in limits.items()]
    composed = request(["study=codesign", *typed, *typed_words], own_folder(words))
    if limits and not composed.problems:
        refuse_unmet(composed, limits)
    folder, code = run(plan(composed))
    return CommandAnswer(folder, code=code)


def _number(text: str) -> float | str:
    """A number, or a text that is none."""
    try:
        return float(text)
    except ValueError:
        return text


def refuse_unmet(composed: Request, limits: Mapping[str, float]) -> None:
    """Raise ConfigError where no machine of a finite space meets all limits, with what binds and by how much."""
    prices = space_prices(composed)
    if prices is None:
        return
    check = Problems()
    met = {name: prices[name] <= limit for name, limit in limits.items()}
    for name, limit in limits.items():
        # machines that meet all limits but this one: what is left binds
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
    """Area, power and cost of machines of a space [B], the cheapest in all three among them; None where it is infinite
    or too large.

    A knob one of whose values is no dearer in anything on every drawn machine has that value alone.
    """
    knobs = [knob for knob in composed.knobs if knob.path.startswith("machine.")]
    # a range has no list of values to price
    if not all(knob.values for knob in knobs):
        return None
    design = CodesignBackend().design({name: composed.tree[name] for name in Codesign.model_fields})
    base = Base(design.system, design.technology)
    tree = composed.tree["machine"]
    values = {
        name: tuple(getattr(Machine.model_validate({**tree, name: value}), name) for value in knob.values)
        for name, knob in ((_name(knob), knob) for knob in knobs)
    }
    cheap = {name: _cheapest(base, design.machine, values, name) for name in values}
    if math.prod(map(len, cheap.values())) > _MOST:
        return None
    machines = (dict(zip(cheap, values, strict=True)) for values in itertools.product(*cheap.values()))
    rows = [_prices(base, design.machine, changes, 1) for changes in machines]
    return dict(zip(_METRICS, np.concatenate(rows, axis=1), strict=True))


def _prices(base: Base, machine: Machine, changes: Mapping[str, Any], size: int) -> Floats:
    """Area, power and cost [3, size] of machines; changes may be arrays."""
    changed = machine.model_copy(update=dict(changes))
    cap = np.asarray(changed.cap_w, float)
    priced = price(base.knobs_of(changed), base.technology.nominal, cap_w=np.where(cap > 0, cap, np.inf))
    columns = (priced.area_mm2, priced.power_w, priced.total_usd)
    return np.stack([np.broadcast_to(np.squeeze(column), size) for column in columns])


def _cheapest(base: Base, machine: Machine, values: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """The value of a knob that is no dearer in anything on drawn machines, or all values where there is none."""
    # prices depend on other knobs as well: a value must win on several machines
    drawn = random.Random(0)
    best = np.ones(len(values[name]), bool)
    for _ in range(_DRAWN):
        changes = {knob: drawn.choice(choices) for knob, choices in values.items()}
        prices = _of_values(base, machine.model_copy(update=changes), name, values[name])
        best &= (prices <= prices.min(axis=1, keepdims=True) * (1 + 1e-12)).all(axis=0)
    return (values[name][int(np.argmax(best))],) if best.any() else values[name]


def _of_values(base: Base, machine: Machine, name: str, values: Sequence[Any]) -> Floats:
    """Area, power and cost [3, values] of a machine with each value of a knob."""
    # numbers are priced as one array, names one by one
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return _prices(base, machine, {name: np.array(values, float)}, len(values))
    return np.concatenate([_prices(base, machine, {name: value}, 1) for value in values], axis=1)


def _name(knob: Knob) -> str:
    return knob.path.removeprefix("machine.")
