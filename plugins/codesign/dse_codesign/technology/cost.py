"""Cost of a machine by part [USD for one GPU]: dies, package, HBM, module, node, network, energy over its life.

Dies on a wafer of diameter D, with edge and scribe lanes (as chiplet-actuary, Feng and Ma, DAC 2022),

    N = pi (D/2 - e)^2 / S - pi (D - 2 e) / sqrt(2 S),      S = (sqrt(A) + scribe)^2

Defects are negative-binomial with clustering alpha (Stapper 1983). A die is good if nothing but spare CUs is hit; with
means u and c of defects outside and inside CUs, and r spares, each defect in a CU of its own (a bound from below),

    Y = (1 + u/alpha)^-alpha I_p(alpha, r + 1),      p = (alpha + u) / (alpha + u + c)

where I is the regularised incomplete beta function (derived; r = 0 gives the negative binomial of the whole die).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dse_codesign.technology.area import PackageArea
from dse_codesign.technology.knobs import MachineKnobs
from dse_codesign.technology.settings import Array, Coefficients

_HOURS = 24 * 365.25


@dataclass(frozen=True)
class DieCost:
    """Dies of one kind; arrays [B], or [S, B]. count: in a package. yield_share: that is good. usd: of a good die."""

    name: str
    count: Array
    area_mm2: Array
    process: Array
    yield_share: Array
    usd: Array


def die_yield(
    area_mm2: ArrayLike,
    defects_per_cm2: ArrayLike,
    clustering: ArrayLike,
    *,
    repairable_mm2: ArrayLike = 0.0,
    spares: ArrayLike = 0,
) -> Array:
    """Share of good dies, in (0, 1]; arrays broadcast. repairable_mm2: area that spares stand in for."""
    from scipy.special import betainc

    # means of defects of a die: mm2 over 100 are cm2
    total = np.asarray(defects_per_cm2) * np.asarray(area_mm2) / 100
    inside = np.asarray(defects_per_cm2) * np.minimum(repairable_mm2, area_mm2) / 100
    alpha, outside = np.asarray(clustering, float), total - inside
    share = (alpha + outside) / (alpha + total)
    unhit = (1 + outside / alpha) ** -alpha
    # no defect outside CUs, and at most r inside them
    return np.asarray(unhit * betainc(alpha, np.asarray(spares) + 1.0, share))


def dies_per_wafer(area_mm2: ArrayLike, technology: Coefficients) -> Array:
    """Whole dies on a wafer, not rounded; at least a hundredth, so that a die larger than a wafer costs a hundred."""
    side = np.sqrt(np.asarray(area_mm2)) + technology["cost.scribe_mm"]
    diameter, edge = technology["cost.wafer_mm"], technology["cost.edge_mm"]
    inner = diameter / 2 - edge
    # area of the wafer over that of a die, less those cut by its edge
    return np.asarray(np.maximum(0.01, np.pi * inner**2 / side**2 - np.pi * 2 * inner / (np.sqrt(2) * side)))


def die_costs(machine: MachineKnobs, technology: Coefficients, area: PackageArea) -> tuple[DieCost, ...]:
    """Compute dies and base dies of the packages of machines [B]. Base dies of a count of 0 cost nothing."""
    dies = np.asarray(machine.num_dies, float)
    # a die may only use its own spare CUs; the sum guards whole numbers from rounding
    spares = np.floor((np.asarray(machine.cus_on_die) - np.asarray(machine.num_cus)) / dies + 1e-9)
    compute = _die(technology, machine.process, area.compute_mm2 / dies, repairable=(area.cus_mm2 / dies, spares))
    base_dies = np.asarray(machine.num_base_dies, float)
    base_mm2 = area.base_mm2 / np.maximum(base_dies, 1)
    base = _die(technology, machine.base_process, base_mm2, repairable=(0.0, 0))
    none = base_dies == 0
    return (
        DieCost("compute", dies, area.compute_mm2 / dies, np.asarray(machine.process), *compute),
        DieCost("base", base_dies, base_mm2, np.asarray(machine.base_process), base[0], np.where(none, 0.0, base[1])),
    )


def _die(
    technology: Coefficients, process: ArrayLike, area: Array, *, repairable: tuple[ArrayLike, ArrayLike]
) -> tuple[Array, Array]:
    """Yield of a die, and the cost of a good one [USD]."""
    good = die_yield(
        area,
        technology.of_process("defects_per_cm2", process),
        technology["cost.defect_clustering"],
        repairable_mm2=repairable[0],
        spares=repairable[1],
    )
    wafer = technology.of_process("wafer_usd", process)
    # a bad die costs as much: good ones pay for all
    return good, (wafer / dies_per_wafer(area, technology) + technology["cost.die_test_usd"]) / good


def machine_cost(
    machine: MachineKnobs, technology: Coefficients, area: PackageArea, dies: tuple[DieCost, ...], power_w: ArrayLike
) -> Mapping[str, Array]:
    """Cost of a machine by part [USD for one GPU]. power_w: of a module, as it runs."""
    stacks = np.asarray(machine.hbm_stacks)
    # all DRAM dies of all stacks; a machine without stacks must not divide by 0
    dram_mm2 = np.maximum(1, stacks) * technology["memory.stack_mm2"] * technology["memory.stack_dies"]
    with_units = 1 + area.pim_mm2 / dram_mm2  # bytes keep their area
    memory = technology.of_hbm("usd_per_gb", machine.hbm) * np.asarray(machine.hbm_bytes) * 1e-9 * with_units
    silicon = sum((die.count * die.usd for die in dies), np.zeros(()))
    stacked = np.asarray(machine.num_base_dies) > 0
    # stacked dies take no area of the interposer
    footprint = np.where(stacked, area.base_mm2, area.compute_mm2) + stacks * technology["memory.stack_mm2"]
    package = technology["cost.package_usd_per_mm2"] * technology["cost.package_spacing"] * footprint
    package = package + np.where(stacked, technology["cost.stacking_usd_per_mm2"] * area.compute_mm2, 0.0)
    # a bond that fails loses the package with all that is on it
    bonded = sum((die.count for die in dies), np.zeros(())) + stacks
    lost = (silicon + memory + package) * (technology["cost.bond_yield"] ** -bonded - 1)
    parts: dict[str, Any] = {
        "compute_dies": dies[0].count * dies[0].usd,
        "base_dies": dies[1].count * dies[1].usd,
        "hbm": memory,
        "package": package,
        "assembly_loss": lost,
        "module": technology["cost.module_usd"],
        **_network_usd(machine, technology),
        "energy": _energy_usd(machine, technology, power_w),
    }
    return {name: np.asarray(part, float) for name, part in parts.items()}


def _network_usd(machine: MachineKnobs, technology: Coefficients) -> dict[str, Any]:
    """Cost of the node around a GPU and of the network [USD for one GPU]."""
    rate, links = np.asarray(machine.nic_gbit_per_s), machine.link_bytes_per_s * 8e-9
    # a switch that adds up has units for it, which one without is cheaper by
    without_sums = 1 - technology["cost.switch_sums_share"] * (1 - np.asarray(machine.switch_adds))
    # the price of a node holds PCIe switches, which a machine without them does not pay
    without_pcie = (1 - np.asarray(machine.pcie_switches)) * technology["cost.pcie_switch_usd"]
    return {
        "node": technology["cost.node_usd"] / np.asarray(machine.gpus_per_node) - without_pcie,
        "node_switches": machine.switched * links * technology["cost.node_switch_usd_per_gbit_s"] * without_sums,
        "node_cables": machine.link_cables * links * technology["cost.link_cable_usd_per_gbit_s"],
        "nics": rate * technology["cost.nic_usd_per_gbit_s"],
        "switches": rate * machine.switch_ports * technology["cost.switch_usd_per_gbit_s"],
        "cables": rate * machine.cables * technology["cost.cable_usd_per_gbit_s"],
    }


def _energy_usd(machine: MachineKnobs, technology: Coefficients, power_w: ArrayLike) -> Any:
    """Cost of electricity over the life of a machine, its share of node and network with it [USD for one GPU]."""
    rate = np.asarray(machine.nic_gbit_per_s)
    network = technology["cost.nic_w_per_gbit_s"] + machine.switch_ports * technology["cost.switch_w_per_gbit_s"]
    watts = np.asarray(power_w) + rate * network + technology["cost.node_w"] / np.asarray(machine.gpus_per_node)
    kwh = watts * technology["cost.load_share"] * technology["cost.life_years"] * _HOURS / 1000
    return kwh * technology["cost.facility_overhead"] * technology["cost.electricity_usd_per_kwh"]


MANUFACTURE = ("compute_dies", "base_dies", "hbm", "package", "assembly_loss", "module")
"""Parts of the cost of a module."""
