"""Machines as rules of area, power and cost see them: arrays of knobs, and what they do.

A knob is a number, or an array [B] over machines; all broadcast. Counts are of a whole package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class MachineKnobs:
    """Arrays [B] over machines. Of a package: process, base_process, hbm (indices of `Coefficients`), num_dies,
    num_base_dies (0 if the compute dies hold everything), cus_on_die (spare ones included), num_cus (that work).

    Of a CU: lanes_per_cu (vector instructions a cycle), fp32_fma_per_cu, fp64_fma_per_cu, matrix_fma_per_cu (fp16, a
    cycle), register_bytes_per_cu, l1_bytes_per_cu. Memory: l2_bytes, llc_bytes (in base dies), hbm_sites (PHYs),
    hbm_stacks, hbm_bytes, hbm_bytes_per_s. Links: link_lanes and lane_gbit_per_s in one direction,
    die_to_die_bytes_per_s. copy_engines, tracker_bytes, pim_units (in all stacks).

    Around it: gpus_per_node (of a host), switched (1: links go to a switch), switch_adds (1: which adds up),
    link_cables (for each lane of a link), nic_gbit_per_s (of all NICs, for each GPU), nic_lanes (PHYs for NICs on the
    GPU), pcie_switches (1: between a GPU and its NICs), switch_ports (of the network, for each port of a NIC), cables
    (for each port of a NIC). assumed: names of knobs that nobody published.
    """

    process: ArrayLike
    num_dies: ArrayLike
    cus_on_die: ArrayLike
    num_cus: ArrayLike
    clock_hz: ArrayLike
    lanes_per_cu: ArrayLike
    fp32_fma_per_cu: ArrayLike
    fp64_fma_per_cu: ArrayLike
    matrix_fma_per_cu: ArrayLike
    register_bytes_per_cu: ArrayLike
    l1_bytes_per_cu: ArrayLike
    l2_bytes: ArrayLike
    hbm: ArrayLike
    hbm_sites: ArrayLike
    hbm_stacks: ArrayLike
    hbm_bytes: ArrayLike
    hbm_bytes_per_s: ArrayLike
    link_lanes: ArrayLike
    lane_gbit_per_s: ArrayLike
    base_process: ArrayLike = 0
    num_base_dies: ArrayLike = 0
    llc_bytes: ArrayLike = 0.0
    die_to_die_bytes_per_s: ArrayLike = 0.0
    copy_engines: ArrayLike = 0
    tracker_bytes: ArrayLike = 0.0
    pim_units: ArrayLike = 0
    gpus_per_node: ArrayLike = 8
    switched: ArrayLike = 0
    switch_adds: ArrayLike = 1
    link_cables: ArrayLike = 0.0
    nic_lanes: ArrayLike = 0.0
    pcie_switches: ArrayLike = 1
    nic_gbit_per_s: ArrayLike = 0.0
    switch_ports: ArrayLike = 0.0
    cables: ArrayLike = 0.0
    assumed: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that all knobs broadcast to."""
        return np.broadcast_shapes(*(np.shape(getattr(self, name)) for name in KNOBS))

    @property
    def link_bytes_per_s(self) -> Any:
        """Rate of all links in one direction [bytes/s]."""
        return np.asarray(self.link_lanes) * self.lane_gbit_per_s * 1e9 / 8

    def with_knobs(self, changed: Mapping[str, ArrayLike]) -> MachineKnobs:
        """Return a copy with other values of some knobs. Raises ValueError for a name that is none."""
        unknown = sorted(set(changed) - set(KNOBS))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no knob of a machine")
        return replace(self, **dict(changed))  # type: ignore[arg-type]

    def at(self, index: int) -> MachineKnobs:
        """Return one machine of the arrays."""
        shape = self.shape
        knobs = {name: np.broadcast_to(getattr(self, name), shape)[index] for name in KNOBS}
        return replace(self, **knobs)


KNOBS = tuple(each.name for each in fields(MachineKnobs) if each.name != "assumed")
"""Names of the knobs of a machine."""


def stack_machines(machines: list[MachineKnobs]) -> MachineKnobs:
    """Several machines as arrays [B]."""
    assumed = tuple(sorted({name for machine in machines for name in machine.assumed}))
    knobs = {name: np.array([getattr(machine, name) for machine in machines]) for name in KNOBS}
    return MachineKnobs(**knobs, assumed=assumed)


@dataclass(frozen=True)
class MachineActivity:
    """Shares of what a machine can do that are in use; numbers or arrays [B].

    matrix: of the peak of matrix units, by `matrix_format`, whose rate is `format_rate` times that of fp16. vector: of
    the issue rate of vector units. hbm, link, die_to_die, pim: of their peaks. l1_bytes_per_s beyond what matrix
    instructions read; l2 and the last-level cache move what the HBM does, over 1 - `cache_hits`.
    """

    matrix: ArrayLike = 0.0
    vector: ArrayLike = 0.0
    hbm: ArrayLike = 0.0
    link: ArrayLike = 0.0
    die_to_die: ArrayLike = 0.0
    pim: ArrayLike = 0.0
    l1_bytes_per_s: ArrayLike = 0.0
    cache_hits: ArrayLike = 0.0
    matrix_format: str = "fp16"
    format_rate: ArrayLike = 1.0


def design_activity(machine: MachineKnobs) -> MachineActivity:
    """Activity for which boards are designed: matrix units, or vector units where there are none, HBM and links at
    their peaks.
    """
    # P100 has no matrix units
    has_matrix = np.asarray(machine.matrix_fma_per_cu) > 0
    return MachineActivity(
        matrix=np.where(has_matrix, 1.0, 0.0), vector=np.where(has_matrix, 0.0, 1.0), hbm=1.0, link=1.0, die_to_die=1.0
    )
