"""Price of machines: area, power, clock under a cap and cost, in one call over arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dse_codesign.technology.area import PackageArea, package_area
from dse_codesign.technology.cost import MANUFACTURE, DieCost, die_costs, machine_cost
from dse_codesign.technology.knobs import MachineActivity, MachineKnobs, design_activity
from dse_codesign.technology.power import ModulePower, module_power, sustained_clock
from dse_codesign.technology.settings import Array, Coefficients


@dataclass(frozen=True)
class Price:
    """Costs of machines; arrays [B], or [S, B] over drawn technologies.

    area: of the package, by block and die. dies: of each kind, with yield and cost. power: of a module by part at the
    activity and `clock`. clock: over the nominal one. cost_usd: by part, for one GPU with its share of the node and the
    network.
    """

    area: PackageArea
    dies: tuple[DieCost, ...]
    power: ModulePower
    clock: Array
    cost_usd: Mapping[str, Array]

    @property
    def area_mm2(self) -> Array:
        """Area of all dies of a package [mm2]."""
        return self.area.total_mm2

    @property
    def power_w(self) -> Array:
        """Power of a module [W]."""
        return self.power.total_w

    @property
    def module_usd(self) -> Array:
        """Cost of making a module: dies, HBM, package and assembly [USD]."""
        return np.asarray(sum((self.cost_usd[name] for name in MANUFACTURE), np.zeros(())))

    @property
    def total_usd(self) -> Array:
        """Cost of a GPU with its share of the node, of the network and of energy over its life [USD]."""
        return np.asarray(sum(self.cost_usd.values(), np.zeros(())))


def price(
    machine: MachineKnobs,
    technology: Coefficients,
    *,
    activity: MachineActivity | None = None,
    cap_w: ArrayLike | None = None,
) -> Price:
    """Price machines [B] in a technology, or in drawn technologies [S].

    activity: `design_activity` by default. cap_w: power that a module may draw [W], to which its clock falls; None for
    no cap.
    """
    activity = design_activity(machine) if activity is None else activity
    area = package_area(machine, technology)
    clock = np.ones(()) if cap_w is None else sustained_clock(machine, technology, activity, cap_w=cap_w)
    # the cost of energy is that of the power under the cap
    power = module_power(machine, technology, activity, clock=clock, area=area)
    dies = die_costs(machine, technology, area)
    return Price(area, dies, power, clock, machine_cost(machine, technology, area, dies, power.total_w))
