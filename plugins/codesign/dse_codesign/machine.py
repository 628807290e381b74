"""A machine by what differs from a base: the same change on both sides, of its steps and of its price.

    arithmetic   rates of all CUs by their number and clock; those of matrix units by their width as well
    HBM          rate and capacity by stacks, generation (nominal rate of a stack) and bytes of a stack
    links        rates of links, of collectives measured over them, and of copy engines, by lanes and their rate
    scale-up     GPUs behind one stage of switches: peers share a GPU's links, replicas within it need no network
    topology     a mesh divides the links among peers, and has no switch that adds up
    NICs         rates of collectives between nodes, by the rate of a GPU's NICs, of its PCIe link and of host memory

Caches grow with the CUs; of their size, steps see the last-level cache of T3's schedules alone. A cap of power lowers
the clock to what `dse_codesign.technology.sustained_clock` allows with matrix units, HBM and links at their
peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from dse.config.options import load_yaml
from dse.errors import validate_as
from dse.values import Frozen, knob, put
from dse.values.units import Bytes, Integer, Number
from dse_codesign import DATA
from dse_codesign.technology import MachineKnobs, Technology, design_activity, of_system, sustained_clock
from dse_codesign.technology.settings import Coefficient
from simulators.hardware.device import ScheduledDevice
from simulators.hardware.network import Placement
from simulators.hardware.parts import Tracker
from simulators.hardware.pim import Pim
from simulators.workloads.model_zoo import option_tree

Ratio = Annotated[Number, Field(ge=0.05, le=20)]
Floats = NDArray[np.float64]
_STOPPED = 0.01
"""Clock over the nominal one, as low as rules allow, at which a machine is computed whose cap leaves none."""
_VECTOR = ("fp32", "fp64")
"""Formats of vector units, whose rates do not follow the width of matrix units."""


class Assumptions(Frozen):
    """Numbers of `conf/data/codesign.yaml`: rate of a GPU's NICs in the base, ports and cables for each port of a NIC,
    rate between dies over that of the HBM, size of an entry of a tracker, rates of a GPU's PCIe link and of the memory
    of a host, GPUs of a host. existing: systems that stand beside the machines.
    """

    name: str
    description: str
    nic_gbit_per_s: Coefficient
    switch_ports: Coefficient
    cables: Coefficient
    die_to_die_over_hbm: Coefficient
    tracker_entry_bytes: Coefficient
    pcie_bytes_per_s: Coefficient
    host_bytes_per_s: Coefficient
    host_gpus: Coefficient
    existing: tuple[str, ...]


@cache
def assumptions() -> Assumptions:
    """Read the assumptions of co-design. Raises ConfigError."""
    return validate_as(Assumptions, load_yaml(DATA / "codesign.yaml"), path="codesign")


class Machine(Frozen):
    """A machine by what differs from the base; None is the base's.

    num_cus: that work, spare ones in proportion. clock, matrix_rate (of a CU and cycle), links (lanes), lane_rate: over
    those of the base. cache: bytes over what grows with the CUs. dies: compute dies of a package. hbm: generation, of
    `technology.memory`. topology, scale_up: of the links, and how many GPUs they join. in_switch: whether the switch
    adds up, where the base has one that does. nic_gbit_per_s: of a GPU's NICs; nic_placement: where they are, the
    base's being behind PCIe switches. tracker_entries: of T3's tracker; 0 for none. memory_units: an option of
    the group `pim`, `none` for the base's. cap_w: that a module may draw; 0 for no cap.
    """

    num_cus: Annotated[Integer, Field(ge=1, le=4096)] | None = None
    clock: Ratio = 1.0
    matrix_rate: Ratio = 1.0
    cache: Ratio = 1.0
    dies: Annotated[Integer, Field(ge=1, le=64)] | None = None
    hbm: Annotated[str | None, knob(structural=True)] = None
    hbm_stacks: Annotated[Integer, Field(ge=1, le=32)] | None = None
    hbm_stack_bytes: Bytes | None = None
    links: Ratio = 1.0
    lane_rate: Ratio = 1.0
    topology: Annotated[Literal["switch", "mesh"] | None, knob(structural=True)] = None
    scale_up: Annotated[Integer, Field(ge=2, le=64)] | None = None
    in_switch: Annotated[bool, knob(structural=True)] = True
    copy_engines: Annotated[Integer | None, knob(structural=True, ge=1, le=256)] = None
    nic_gbit_per_s: Annotated[Number, Field(ge=0, le=1e5)] | None = None
    nic_placement: Annotated[Placement | None, knob(structural=True)] = None
    tracker_entries: Annotated[Integer, Field(ge=0, le=2**20)] = 0
    memory_units: Annotated[str, knob(structural=True)] = "none"
    cap_w: Annotated[Number, Field(ge=0, le=1e5)] = 0.0


@dataclass(frozen=True)
class Base:
    """A machine that others differ from."""

    system: ScheduledDevice
    technology: Technology

    @cached_property
    def knobs(self) -> MachineKnobs:
        """The base as rules of area, power and cost see it. Raises ValueError for a GPU whose dies nobody describes."""
        names = ("nic_gbit_per_s", "switch_ports", "cables")
        # assumptions of co-design, whatever fabric the system has
        around: dict[str, ArrayLike] = {name: getattr(assumptions(), name).value for name in names}
        return of_system(self.system, self.technology).with_knobs(around)

    def knobs_of(self, machine: Machine) -> MachineKnobs:
        """Machines [B] as rules of area, power and cost see them. Raises ValueError for an unknown kind of HBM."""
        base = self.knobs
        changed: dict[str, Any] = {
            "clock_hz": np.asarray(base.clock_hz) * machine.clock,
            "matrix_fma_per_cu": np.asarray(base.matrix_fma_per_cu) * machine.matrix_rate,
            "link_lanes": np.asarray(base.link_lanes) * machine.links,
            "lane_gbit_per_s": np.asarray(base.lane_gbit_per_s) * machine.lane_rate,
            "tracker_bytes": np.asarray(machine.tracker_entries) * _bytes_per_entry(self.system),
            **self._of_cus(base, machine),
            **self._of_hbm(base, machine),
            **self._of_node(base, machine),
        }
        if (pim := self.pim_of(machine)) is not None:
            changed["pim_units"] = pim.units
        given = {"copy_engines": machine.copy_engines, "nic_gbit_per_s": machine.nic_gbit_per_s}
        changed |= {name: value for name, value in given.items() if value is not None}
        if machine.dies is not None:
            changed["num_dies"] = machine.dies
            # dies that a base is not built of have to be joined
            several = np.asarray(machine.dies) > np.asarray(base.num_dies)
            crossing = assumptions().die_to_die_over_hbm.value * np.asarray(changed["hbm_bytes_per_s"])
            changed["die_to_die_bytes_per_s"] = np.where(several, crossing, base.die_to_die_bytes_per_s)
        return base.with_knobs(changed)

    def _of_cus(self, base: MachineKnobs, machine: Machine) -> dict[str, Any]:
        num_cus = base.num_cus if machine.num_cus is None else machine.num_cus
        grown = np.asarray(num_cus) / np.asarray(base.num_cus)
        # spare CUs in proportion, whole ones
        spared = {"cus_on_die": np.ceil(np.asarray(base.cus_on_die) * grown), "num_cus": num_cus}
        cached = grown * np.asarray(machine.cache)
        return spared | {name: np.asarray(getattr(base, name)) * cached for name in ("l2_bytes", "llc_bytes")}

    def _of_node(self, base: MachineKnobs, machine: Machine) -> dict[str, Any]:
        """What joins GPUs: a mesh has no switch, links that leave a host have cables, and NICs may have PCIe switches.

        A NIC at the GPU takes PHYs for its rate on the die.
        """
        node, switched = self.system.node, self.topology_of(machine) == "switch"
        # links within a host are traces of its board
        beyond = np.asarray(self.scale_up_of(machine)) > assumptions().host_gpus.value
        nic = base.nic_gbit_per_s if machine.nic_gbit_per_s is None else machine.nic_gbit_per_s
        lane = np.asarray(base.lane_gbit_per_s) * np.asarray(machine.lane_rate)
        return {
            "switched": int(switched),
            "switch_adds": int(switched and node.in_switch is not None and machine.in_switch),
            "link_cables": np.where(beyond, 1.0, 0.0),
            "pcie_switches": int(machine.nic_placement in (None, "pcie_switch")),
            "nic_lanes": np.asarray(nic) / lane if machine.nic_placement == "gpu" else 0.0,
        }

    def topology_of(self, machine: Machine) -> str:
        """Topology of the links of a machine."""
        return str(self.system.node.topology if machine.topology is None else machine.topology)

    def scale_up_of(self, machine: Machine) -> Any:
        """Number of GPUs that the links of a machine join."""
        return self.system.node.num_gpus if machine.scale_up is None else machine.scale_up

    def pim_of(self, machine: Machine) -> Pim | None:
        """Units in the memory of a machine, in every stack; None: the base's. Raises ConfigError for an unknown one."""
        tree = option_tree("pim", machine.memory_units).get("gpu", {}).get("pim")
        stacks = self.knobs.hbm_stacks if machine.hbm_stacks is None else machine.hbm_stacks
        return None if tree is None else Pim.model_validate(tree).model_copy(update={"stacks": stacks})

    def nic_bytes_per_s(self, machine: Machine) -> Any:
        """What of the rate of a GPU's NICs reaches it [bytes/s]: through its PCIe link, or through host memory as well.

        A byte that is sent and one that is received are both written to and read from host memory.
        """
        rate = np.asarray(self.knobs_of(machine).nic_gbit_per_s) * 1e9 / 8
        if machine.nic_placement == "gpu":
            return rate
        numbers = assumptions()
        # NICs behind a PCIe switch reach the GPU over its PCIe link
        rate = np.minimum(rate, numbers.pcie_bytes_per_s.value)
        if machine.nic_placement == "cpu":
            # sent and received bytes are each written and read: four accesses, shared by all GPUs of a host
            rate = np.minimum(rate, numbers.host_bytes_per_s.value / (4 * numbers.host_gpus.value))
        return rate

    def _of_hbm(self, base: MachineKnobs, machine: Machine) -> dict[str, Any]:
        """Rates are those of the base, by stacks and by the nominal rate of a stack; a stack keeps its bytes."""
        stacks = np.asarray(base.hbm_stacks if machine.hbm_stacks is None else machine.hbm_stacks)
        # a site without a stack, as H100 has one
        spare = np.asarray(base.hbm_sites) - np.asarray(base.hbm_stacks)
        stack_bytes = np.asarray(base.hbm_bytes) / np.asarray(base.hbm_stacks)
        faster = stacks / np.asarray(base.hbm_stacks) * self._stack_rate(base, machine)
        return {
            "hbm": self._generation(base, machine),
            "hbm_stacks": stacks,
            "hbm_sites": stacks + spare,
            "hbm_bytes": stacks * (stack_bytes if machine.hbm_stack_bytes is None else machine.hbm_stack_bytes),
            "hbm_bytes_per_s": np.asarray(base.hbm_bytes_per_s) * faster,
        }

    def _generation(self, base: MachineKnobs, machine: Machine) -> Any:
        generations = tuple(self.technology.memory.generations)
        if machine.hbm is None:
            return base.hbm
        if machine.hbm not in generations:
            raise ValueError(f"machine.hbm = {machine.hbm!r}: is none of {', '.join(generations)}")
        return generations.index(machine.hbm)

    def _stack_rate(self, base: MachineKnobs, machine: Machine) -> Any:
        """Nominal rate of a stack over that of the base's generation."""
        if machine.hbm is None:
            return 1.0
        nominal = self.technology.nominal
        rates = [
            nominal.of_hbm("stack_bytes_per_s", index)
            for index in (self._generation(base, machine), int(base.hbm))  # type: ignore[arg-type]
        ]
        return rates[0] / rates[1]

    def clock_of(self, machine: Machine) -> Floats:
        """Clock over the nominal one of the machine that its cap allows [B]."""
        cap = np.asarray(machine.cap_w, float)
        # bisection is needed only under a cap
        if not np.any(cap > 0):
            return np.ones(())
        knobs = self.knobs_of(machine)
        limit = np.where(cap > 0, cap, np.inf)
        # by what a board is made for, not by what a workload draws
        return sustained_clock(knobs, self.technology.nominal, design_activity(knobs), cap_w=limit)

    def system_of(self, machine: Machine) -> ScheduledDevice:
        """Machines as their steps see them: rates of the base, changed in proportion; numbers may be arrays [B]."""
        base, knobs = self.knobs, self.knobs_of(machine)
        # a machine whose cap leaves no clock is refused by a rule, and its times must be numbers before that
        clock = np.maximum(self.clock_of(machine) * np.asarray(machine.clock), _STOPPED)
        cus = np.asarray(knobs.num_cus) / np.asarray(base.num_cus)
        hbm = np.asarray(knobs.hbm_bytes_per_s) / np.asarray(base.hbm_bytes_per_s)
        gpu = self.system.gpu
        peaks = {
            # peaks hold at the nominal clock; vector units do not grow with matrix units
            name: rate * (1.0 if name in _VECTOR else np.asarray(machine.matrix_rate))
            for name, rate in gpu.peak_flop_per_s.items()
        }
        changes: dict[str, Any] = {
            "gpu.num_cus": knobs.num_cus,
            "gpu.clock": np.asarray(gpu.clock) * clock,
            "gpu.peak_flop_per_s": peaks,
            "gpu.matrix_flop_per_s_per_cu": gpu.matrix_flop_per_s_per_cu * clock * np.asarray(machine.matrix_rate),
            "gpu.hbm_bytes_per_s": gpu.hbm_bytes_per_s * hbm,
            "gpu.hbm_bytes": knobs.hbm_bytes,
            "gpu.dma.num_engines": gpu.dma.num_engines if machine.copy_engines is None else machine.copy_engines,
            **self._of_links(machine),
            **self._of_network(machine),
        }
        if (pim := self.pim_of(machine)) is not None:
            changes["gpu.pim"] = pim
        if gpu.llc is not None:
            changes["gpu.llc.bytes"] = np.rint(gpu.llc.bytes * cus * np.asarray(machine.cache))
        if np.all(np.asarray(machine.tracker_entries) > 0):
            tracker = Tracker.model_construct(
                num_entries=machine.tracker_entries, bytes_per_entry=_bytes_per_entry(self.system)
            )
            changes["gpu.tracker"] = tracker
        system = self.system
        for path, value in changes.items():
            system = put(system, path, value)
        return system

    def _of_links(self, machine: Machine) -> dict[str, Any]:
        """Rates of links and of what moves over them; a GPU's links are divided among its peers."""
        node, faster = self.system.node, np.asarray(machine.links) * np.asarray(machine.lane_rate)
        # the rate to one peer: all links over the peers, in the base and here
        to_each = faster * (node.num_gpus - 1) / (np.asarray(self.scale_up_of(machine)) - 1)
        changes: dict[str, Any] = {
            "node.num_gpus": self.scale_up_of(machine),
            "node.topology": self.topology_of(machine),
            "node.link_bytes_per_s": node.link_bytes_per_s * to_each,
            "gpu.dma.bytes_per_s": self.system.gpu.dma.bytes_per_s * to_each,
        }
        if node.library is not None and node.library.link_bytes_per_s is not None:
            # as many links for fewer or more peers
            changes["node.library.link_bytes_per_s"] = node.library.link_bytes_per_s * to_each / faster
        return changes

    def _of_network(self, machine: Machine) -> dict[str, Any]:
        library = self.system.node.library
        if library is None or library.network_bytes_per_s is None:
            return {}
        # the base's rate between nodes was measured with its own NICs
        faster = self.nic_bytes_per_s(machine) / self.nic_bytes_per_s(Machine())
        changes = {"node.library.network_bytes_per_s": library.network_bytes_per_s * faster}
        return changes | _rates("node.library.network", library.network, faster)


def _rates(path: str, by_kind: Mapping[Any, Any] | None, faster: Any) -> dict[str, Any]:
    """Changed rates of collectives, by path."""
    return {f"{path}.{kind}.bytes_per_s": rate.bytes_per_s * faster for kind, rate in (by_kind or {}).items()}


def _bytes_per_entry(system: ScheduledDevice) -> int:
    tracker = system.gpu.tracker
    return int(assumptions().tracker_entry_bytes.value) if tracker is None else tracker.bytes_per_entry
