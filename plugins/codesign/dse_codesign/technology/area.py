"""Area of a package by block, and of its dies [mm2].

Circuits are counted and take what their process needs. Of a CU, with density d [transistors/mm2] of its process,

    A_cu = (control + overhead (n32 a32 + n64 a64 + n16 a16)) / d + bits bit_um2 / array_share

where a is the area of a fused multiply-add in 45 nm times the density there (Horowitz, ISSCC 2014). SRAM shrinks with
its bit cell, PHYs with a small power of density. A monolithic die adds the uncore as a share of CUs and L2, and all
PHYs. With base dies, compute dies keep a part of the uncore; a base die is as large as the dies that it carries,
or as what it holds if that is more, and has the PHYs beside (derived).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dse_codesign.technology.knobs import MachineKnobs
from dse_codesign.technology.settings import Array, Coefficients

_UM2 = 1e-6  # mm2


@dataclass(frozen=True)
class PackageArea:
    """Area of a package [mm2]; arrays [B], or [S, B] over drawn technologies.

    blocks: by name, of all dies. compute_mm2, base_mm2: of all compute dies, and of all base dies. cus_mm2: of all CUs,
    in whose spare ones a defect does no harm. pim_mm2: of units in the DRAM of the stacks, on no die of the package.
    """

    blocks: Mapping[str, Array]
    compute_mm2: Array
    base_mm2: Array
    cus_mm2: Array
    pim_mm2: Array

    @property
    def total_mm2(self) -> Array:
        """Area of all compute and base dies [mm2]."""
        return self.compute_mm2 + self.base_mm2


def package_area(machine: MachineKnobs, technology: Coefficients) -> PackageArea:
    """Area of the packages of machines [B] in a technology."""
    cus = cu_blocks(machine, technology)
    count = np.asarray(machine.cus_on_die, float)
    logic = {name: count * area for name, area in cus.items()}
    cus_mm2 = sum(logic.values(), np.zeros(()))
    logic["l2"] = _cache_mm2(machine.l2_bytes, machine.process, technology)
    core = sum(logic.values(), np.zeros(()))
    stacked = np.asarray(machine.num_base_dies) > 0
    # memory controllers and fabric move into the base die
    kept = np.where(stacked, technology["area.stacked_uncore_share"], 1.0)
    logic["uncore"] = technology["area.uncore_share"] * kept * core
    beside = _io_blocks(machine, technology)
    io_mm2 = sum((beside[name] for name in ("hbm_phy", "link_phy", "die_to_die")), np.zeros(()))
    rest_mm2 = sum((beside[name] for name in ("llc", "copy_engines", "tracker")), np.zeros(()))
    compute = core + logic["uncore"]
    # dies do not cover a base die to its edge, and it is never smaller than what it holds
    carried = np.maximum(compute / technology["area.stacking_fill"], rest_mm2)
    beside["base_filler"] = np.where(stacked, carried - rest_mm2, 0.0)
    return PackageArea(
        blocks={**logic, **beside},
        compute_mm2=np.asarray(compute + np.where(stacked, 0.0, io_mm2 + rest_mm2)),
        base_mm2=np.asarray(np.where(stacked, carried + io_mm2, 0.0)),
        cus_mm2=np.asarray(cus_mm2),
        pim_mm2=np.asarray(np.asarray(machine.pim_units) * technology["area.pim_unit_mm2"]),
    )


def cu_blocks(machine: MachineKnobs, technology: Coefficients) -> dict[str, Any]:
    """Area of the blocks of one CU [mm2]."""
    density = technology.of_process("mtr_per_mm2", machine.process)
    # areas of units are of 45 nm, in um2
    scale = technology["area.reference_mtr_per_mm2"] / density * technology["area.datapath_overhead"] * _UM2
    bits = 8 * technology.of_process("bit_um2", machine.process) * _UM2
    vector = (
        np.asarray(machine.fp32_fma_per_cu) * technology["area.fp32_fma_um2"]
        + np.asarray(machine.fp64_fma_per_cu) * technology["area.fp64_fma_um2"]
    )
    return {
        # counted in transistors, unlike units
        "cu_control": technology["area.cu_control_mtr"] / density,
        "vector_and_fp64": vector * scale,
        "matrix": np.asarray(machine.matrix_fma_per_cu) * technology["area.fp16_fma_um2"] * scale,
        "registers": np.asarray(machine.register_bytes_per_cu) * bits / technology["area.register_array_share"],
        "l1": np.asarray(machine.l1_bytes_per_cu) * bits / technology["area.cache_array_share"],
    }


def _cache_mm2(size: Any, process: Any, technology: Coefficients) -> Any:
    bits = 8 * technology.of_process("bit_um2", process) * _UM2
    return np.asarray(size) * bits / technology["area.cache_array_share"]


def _io_blocks(machine: MachineKnobs, technology: Coefficients) -> dict[str, Any]:
    """Area of what stands at the memory and the links [mm2], in base dies where there are any."""
    # PHYs and last-level caches are on base dies, in their process, if a package has some
    process = np.where(np.asarray(machine.num_base_dies) > 0, machine.base_process, machine.process)
    density = technology.of_process("mtr_per_mm2", process)
    # an exponent near 0: analogue circuits hardly shrink
    shrunk = (technology["area.phy_reference_mtr_per_mm2"] / density) ** technology["area.phy_scaling"]
    rate = np.asarray(machine.lane_gbit_per_s)
    # quicker SerDes are larger
    lane = technology["area.lane_mm2"] + technology["area.lane_mm2_per_gbit_s"] * rate
    kib = np.asarray(machine.tracker_bytes) / 1024
    logic_mtr = kib * technology["area.tracker_mtr_per_kib"]
    between = np.asarray(machine.die_to_die_bytes_per_s) * 1e-12 * technology["area.die_to_die_mm2_per_tb_s"]
    return {
        "llc": _cache_mm2(machine.llc_bytes, process, technology),
        "copy_engines": np.asarray(machine.copy_engines) * technology["area.copy_engine_mtr"] / density,
        "tracker": _cache_mm2(machine.tracker_bytes, process, technology) + logic_mtr / density,
        "hbm_phy": np.asarray(machine.hbm_sites) * technology["area.hbm_phy_mm2"] * shrunk,
        "link_phy": (np.asarray(machine.link_lanes) + machine.nic_lanes) * lane * shrunk,
        "die_to_die": between * shrunk,
    }
