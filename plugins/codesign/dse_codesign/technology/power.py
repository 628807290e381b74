"""Power of a module by part at an activity [W], and the clock that a cap allows.

With voltage v(f) over that at the reference clock, linear above a floor, and s the energy of the process over 45 nm,

    P eta = A l v^2 + M (i + (1 - i) (f/f0) (v/v0)^2) + s v^2 (matrix + vector + caches) + HBM + links + units in memory

where eta is the efficiency of regulators, A l the leakage, M the power of a busy module beside its arithmetic, i the
share of it that stays when idle, f0 and v0 those at the nominal clock. Arithmetic costs Horowitz's and Dally's energies
times an overhead of operands, clock and wires. HBM and links keep their clocks. Leakage by the square of the voltage is
an approximation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dse_codesign.technology.area import PackageArea, package_area
from dse_codesign.technology.knobs import MachineActivity, MachineKnobs, design_activity
from dse_codesign.technology.settings import Array, Coefficients

_PJ = 1e-12
_STEPS = 48  # halvings of an interval of clocks: to a relative 4e-15


@dataclass(frozen=True)
class ModulePower:
    """Power of modules by part [W] at the input of their regulators; arrays [B], or [S, B]."""

    parts: Mapping[str, Array]

    @property
    def total_w(self) -> Array:
        """Power of the module [W]."""
        return np.asarray(sum(self.parts.values(), np.zeros(())))


def relative_voltage(clock_hz: ArrayLike, technology: Coefficients) -> Array:
    """Voltage over that at the reference clock, linear in the clock above its floor."""
    above = np.asarray(clock_hz) / technology["power.reference_clock_hz"] - 1
    return np.asarray(np.maximum(technology["power.voltage_floor"], 1 + technology["power.voltage_slope"] * above))


def module_power(
    machine: MachineKnobs,
    technology: Coefficients,
    activity: MachineActivity,
    *,
    clock: ArrayLike = 1.0,
    area: PackageArea | None = None,
) -> ModulePower:
    """Power of the modules of machines [B] at an activity.

    clock: of the CUs over the nominal one; rates of arithmetic follow it. area: of the packages, if it is known.
    """
    area = package_area(machine, technology) if area is None else area
    nominal = np.asarray(machine.clock_hz, float)
    voltage = relative_voltage(nominal * clock, technology)
    # fans, controllers and regulators draw power without any work
    still, switched = technology["power.idle_module_share"], np.asarray(clock)
    # dynamic power: f V^2
    relative = switched * (voltage / relative_voltage(nominal, technology)) ** 2
    leakage = _leakage_w(machine, technology, area) * voltage**2
    scale = technology.of_process("energy_scale", machine.process) * voltage**2 * _PJ
    parts: dict[str, Any] = {
        "idle": leakage + technology["power.module_w"] * still,
        "module": technology["power.module_w"] * (1 - still) * relative * _is_busy(activity),
        "matrix": scale * _matrix_pj_per_s(machine, technology, activity) * switched,
        "vector": scale * _vector_pj_per_s(machine, technology, activity) * switched,
        "caches": _cache_w(machine, technology, activity, scale),
        **_transfer_w(machine, technology, activity),
    }
    efficiency = technology["power.regulator_efficiency"]
    return ModulePower({name: np.asarray(part / efficiency) for name, part in parts.items()})


def _is_busy(activity: MachineActivity) -> Array:
    """Share of the module's own power that an activity calls for: that of its busiest part."""
    shares = (activity.matrix, activity.vector, activity.hbm, activity.link)
    return np.asarray(
        np.minimum(1.0, np.maximum.reduce([np.asarray(share, float) for share in np.broadcast_arrays(*shares)]))
    )


def _leakage_w(machine: MachineKnobs, technology: Coefficients, area: PackageArea) -> Any:
    """Leakage at the reference voltage [W]; what only carries other dies has no transistors that leak."""
    compute = area.compute_mm2 * technology.of_process("leakage_w_per_mm2", machine.process)
    active = area.base_mm2 - area.blocks["base_filler"]
    return compute + active * technology.of_process("leakage_w_per_mm2", machine.base_process)


def _matrix_pj_per_s(machine: MachineKnobs, technology: Coefficients, activity: MachineActivity) -> Any:
    # two operations of a multiply-add
    flop = 2 * np.asarray(machine.matrix_fma_per_cu) * np.asarray(machine.num_cus) * np.asarray(machine.clock_hz)
    energy = technology["power.matrix_fp16_pj_per_flop"] * technology["power.movement_overhead"]
    format_energy = technology[f"power.relative_energy_of_format.{activity.matrix_format}"]
    return flop * np.asarray(activity.matrix) * np.asarray(activity.format_rate) * energy * format_energy


def _vector_pj_per_s(machine: MachineKnobs, technology: Coefficients, activity: MachineActivity) -> Any:
    # fetch, decode and operands cost more than the arithmetic itself
    issued = np.asarray(machine.lanes_per_cu) * technology["power.vector_instruction_pj"]
    fma = 2 * np.asarray(machine.fp32_fma_per_cu) * technology["power.vector_fp32_pj_per_flop"]
    energy = issued + fma * technology["power.movement_overhead"]
    return energy * np.asarray(machine.num_cus) * np.asarray(machine.clock_hz) * np.asarray(activity.vector)


def _cache_w(machine: MachineKnobs, technology: Coefficients, activity: MachineActivity, scale: Any) -> Any:
    """Power of the caches [W]: L1 as asked for; L2, and the last-level cache in base dies, pass on what the HBM moves.

    scale: of the energy of compute dies over 45 nm [J/pJ]. Base dies run at the reference voltage.
    """
    # what L2 serves is what reaches the HBM over the share that misses
    moved = np.asarray(machine.hbm_bytes_per_s) * activity.hbm / (1 - np.asarray(activity.cache_hits))
    near = np.asarray(activity.l1_bytes_per_s) * technology["power.l1_pj_per_byte"]
    near = near + moved * technology["power.l2_pj_per_byte"]
    llc = np.where(np.asarray(machine.llc_bytes) > 0, moved * technology["power.llc_pj_per_byte"], 0.0)
    return scale * near + technology.of_process("energy_scale", machine.base_process) * _PJ * llc


def _transfer_w(machine: MachineKnobs, technology: Coefficients, activity: MachineActivity) -> dict[str, Any]:
    """Power of HBM, links (both directions) and units in memory [W]."""
    hbm = np.asarray(machine.hbm_bytes_per_s) * activity.hbm * 8 * technology.of_hbm("pj_per_bit", machine.hbm)
    # both ends of a link are paid for: this GPU sends and receives
    links = 2 * machine.link_bytes_per_s * activity.link * 8 * technology["power.link_pj_per_bit"]
    between = np.asarray(machine.die_to_die_bytes_per_s) * activity.die_to_die * 8
    pim = np.asarray(machine.pim_units) * activity.pim * technology["power.pim_unit_mw"]
    return {
        "hbm": hbm * _PJ,
        "links": links * _PJ,
        "die_to_die": between * technology["power.die_to_die_pj_per_bit"] * _PJ,
        "pim": pim * 1e-3,
    }


def design_power_w(machine: MachineKnobs, technology: Coefficients) -> Array:
    """Power of modules at `design_activity` and the nominal clock [W]: what their boards would be made for."""
    return module_power(machine, technology, design_activity(machine)).total_w


def sustained_clock(
    machine: MachineKnobs, technology: Coefficients, activity: MachineActivity, *, cap_w: ArrayLike
) -> Array:
    """Largest clock over the nominal one, at most 1, at which the power of an activity stays under a cap [W].

    Rates of arithmetic are to be multiplied by it. 0 where even a stopped clock draws more.
    """
    area, cap = package_area(machine, technology), np.asarray(cap_w, float)

    def is_below(clock: Array) -> NDArray[np.bool_]:
        return np.asarray(module_power(machine, technology, activity, clock=clock, area=area).total_w <= cap)

    # machines, and drawn technologies if there are some
    shape = np.shape(is_below(np.ones(())))
    low, high = np.zeros(shape), np.ones(shape)
    # exactly 1 without a cap that binds, which bisection would only approach
    fits = is_below(high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    # leakage and HBM alone may exceed the cap
    return np.asarray(np.where(fits, 1.0, np.where(is_below(low), low, 0.0)))
