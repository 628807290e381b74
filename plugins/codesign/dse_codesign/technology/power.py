"""Power of a module by part at an activity [W], and the clock that a cap allows.

Rules of a technology give the constants of a board's power, and the law of all boards the watts
(`simulators.costs.power`): with voltage v(f) over that at the reference clock, linear above a floor, and s the energy
of the process over 45 nm,

    P eta = A l v^2 + M (i + (1 - i) (f/f0) (v/v0)^2) + s v^2 (matrix + vector + caches) + HBM + links + units in memory

where eta is the efficiency of regulators, A l the leakage, M the power of a busy module beside its arithmetic, i the
share of it that stays when idle, f0 and v0 those at the nominal clock. Arithmetic costs Horowitz's and Dally's energies
times an overhead of operands, clock and wires. HBM and links keep their clocks. Leakage by the square of the voltage is
an approximation. Last-level caches in base dies, links between dies and units in memory are no part of that law.
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
from simulators.costs.power import Activity, board_parts
from simulators.hardware.parts import Power

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
    board = board_power(machine, technology, activity, area=area)
    return _at_clock(machine, technology, activity, board=board, clock=clock)


def _at_clock(
    machine: MachineKnobs, technology: Coefficients, activity: MachineActivity, *, board: Power, clock: ArrayLike
) -> ModulePower:
    """Power of modules at a clock over the nominal one, by the law for boards and what modules have beside it."""
    law = board_parts(board, clock, _board_activity(machine, technology, activity, clock), activity.matrix_format)
    moved = _moved_by_l2(machine, activity)
    llc = np.where(np.asarray(machine.llc_bytes) > 0, moved * technology["power.llc_pj_per_byte"], 0.0)
    llc = technology.of_process("energy_scale", machine.base_process) * _PJ * llc
    efficiency = technology["power.regulator_efficiency"]
    beside = _beside_the_law(machine, technology, activity)
    parts = {
        "idle": law["idle"] + law["leakage"],
        "module": law["tree"],
        "matrix": law["operations"],
        "vector": law["cus"],
        "caches": law["streams"] + llc / efficiency,
        "hbm": law["hbm"],
        "links": law["links"],
        **{name: part / efficiency for name, part in beside.items()},
    }
    return ModulePower({name: np.asarray(part) for name, part in parts.items()})


def board_power(
    machine: MachineKnobs, technology: Coefficients, activity: MachineActivity, *, area: PackageArea
) -> Power:
    """Constants of the power of boards of machines by the rules of a technology; arrays [B], or [S, B].

    Energies of operations are of the format of the activity. CUs that issue vector instructions draw `cu_w` each.
    """
    efficiency, nominal = technology["power.regulator_efficiency"], np.asarray(machine.clock_hz, float)
    floor, slope = technology["power.voltage_floor"], technology["power.voltage_slope"]
    at_nominal = relative_voltage(nominal, technology)
    # the clock above which the voltage rises; all of them have the least voltage where it is above the nominal clock
    knee = np.minimum(technology["power.reference_clock_hz"] * (1 - (1 - floor) / slope) / nominal, 1.0)
    still = technology["power.idle_module_share"]
    # energy at the least voltage
    scale = technology.of_process("energy_scale", machine.process) * floor**2 * _PJ / efficiency
    busy_w = technology["power.module_w"] * (1 - still) * (floor / at_nominal) ** 2
    constants: dict[str, Any] = {
        "clock_hz": nominal,
        "board_w": np.inf,
        "cap_w": np.inf,
        "idle_w": technology["power.module_w"] * still / efficiency,
        "leak_w": _leakage_w(machine, technology, area) * floor**2 / efficiency,
        "tree_w": busy_w / efficiency,
        "cu_w": scale * _vector_pj(machine, technology) * nominal,
        "flop_j": {activity.matrix_format: scale * _matrix_pj(technology, activity.matrix_format)},
        "stream_j_per_byte": scale * technology["power.l2_pj_per_byte"],
        "hbm_j_per_byte": 8 * technology.of_hbm("pj_per_bit", machine.hbm) * _PJ / efficiency,
        "link_j_per_byte": 8 * technology["power.link_pj_per_bit"] * _PJ / efficiency,
        "knee": np.maximum(knee, 0.0),
        "voltage": at_nominal / floor,
    }
    return Power.model_construct(**constants)


def _board_activity(
    machine: MachineKnobs, technology: Coefficients, activity: MachineActivity, clock: ArrayLike
) -> Activity:
    """What modules do each second; rates of arithmetic follow the clock, those of caches, HBM and links do not."""
    # two operations of a multiply-add
    peak = 2 * np.asarray(machine.matrix_fma_per_cu) * np.asarray(machine.num_cus) * np.asarray(machine.clock_hz)
    flop = peak * np.asarray(activity.matrix) * np.asarray(activity.format_rate) * np.asarray(clock)
    # bytes of L1 as so many of L2 that take as much energy
    of_l1 = technology["power.l1_pj_per_byte"] / technology["power.l2_pj_per_byte"]
    streamed = _moved_by_l2(machine, activity) + np.asarray(activity.l1_bytes_per_s) * of_l1
    return Activity(
        flop_per_s=flop,
        hbm_bytes_per_s=np.asarray(machine.hbm_bytes_per_s) * np.asarray(activity.hbm),
        # both ends of a link are paid for: this GPU sends and receives
        link_bytes_per_s=2 * np.asarray(machine.link_bytes_per_s) * np.asarray(activity.link),
        copy_cus=np.asarray(machine.num_cus) * np.asarray(activity.vector),
        stream_bytes_per_s=streamed,
        busy=_is_busy(activity),
    )


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


def _matrix_pj(technology: Coefficients, matrix_format: str) -> Any:
    """Energy of an operation of matrix units in 45 nm [pJ]."""
    energy = technology["power.matrix_fp16_pj_per_flop"] * technology["power.movement_overhead"]
    return energy * technology[f"power.relative_energy_of_format.{matrix_format}"]


def _vector_pj(machine: MachineKnobs, technology: Coefficients) -> Any:
    """Energy of a cycle in which all lanes of a CU issue an instruction, in 45 nm [pJ]."""
    # fetch, decode and operands cost more than the arithmetic itself
    issued = np.asarray(machine.lanes_per_cu) * technology["power.vector_instruction_pj"]
    fma = 2 * np.asarray(machine.fp32_fma_per_cu) * technology["power.vector_fp32_pj_per_flop"]
    return issued + fma * technology["power.movement_overhead"]


def _moved_by_l2(machine: MachineKnobs, activity: MachineActivity) -> Any:
    """Bytes/s that L2, and a last-level cache in base dies, pass on: those of the HBM over the share that misses."""
    return np.asarray(machine.hbm_bytes_per_s) * np.asarray(activity.hbm) / (1 - np.asarray(activity.cache_hits))


def _beside_the_law(machine: MachineKnobs, technology: Coefficients, activity: MachineActivity) -> dict[str, Any]:
    """Power of links between dies and of units in memory [W]."""
    between = np.asarray(machine.die_to_die_bytes_per_s) * np.asarray(activity.die_to_die) * 8
    pim = np.asarray(machine.pim_units) * np.asarray(activity.pim) * technology["power.pim_unit_mw"]
    return {"die_to_die": between * technology["power.die_to_die_pj_per_bit"] * _PJ, "pim": pim * 1e-3}


def design_power_w(machine: MachineKnobs, technology: Coefficients) -> Array:
    """Power of modules at `design_activity` and the nominal clock [W]: what their boards would be made for."""
    return module_power(machine, technology, design_activity(machine)).total_w


def sustained_clock(
    machine: MachineKnobs, technology: Coefficients, activity: MachineActivity, *, cap_w: ArrayLike
) -> Array:
    """Largest clock over the nominal one, at most 1, at which the power of an activity stays under a cap [W].

    Rates of arithmetic are to be multiplied by it. 0 where even a stopped clock draws more.
    """
    board = board_power(machine, technology, activity, area=package_area(machine, technology))
    cap = np.asarray(cap_w, float)

    def is_below(clock: Array) -> NDArray[np.bool_]:
        return np.asarray(_at_clock(machine, technology, activity, board=board, clock=clock).total_w <= cap)

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
