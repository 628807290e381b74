"""Public GPUs and what is on their dies; and machines of designs, with what nobody published filled in.

`conf/data/gpu_dies.yaml` describes eight GPUs. Another GPU is taken to have the dies of the one that the file calls
alike, but for what it says to differ. A knob that a design changes changes these in proportion (`of_system`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from dse.config.options import conf_dir, load_yaml
from dse.errors import validate_as
from dse.values import Frozen, Source
from dse.values.units import Number
from dse_codesign import DATA
from dse_codesign.technology.knobs import KNOBS, MachineKnobs
from dse_codesign.technology.settings import Technology
from simulators.hardware.machine import Gpu, System, tree_of_gpu
from simulators.hardware.network import Fabric, Node

_CEILING = 1e-9  # a count that is whole but for rounding stays


class PublishedDie(Frozen):
    """Published figures of a GPU: area of all compute dies, and of all base dies [mm2], power of the board [W], cost of
    making a module [USD].
    """

    compute_mm2: Annotated[Number, Field(gt=0)]
    base_mm2: Annotated[Number, Field(gt=0)] | None
    power_w: Annotated[Number, Field(gt=0)]
    cost_usd: Annotated[Number, Field(gt=0)] | None


class PublicDies(Frozen):
    """A public GPU: its processes, its generation of HBM, other knobs of `MachineKnobs`, and what was published."""

    process: str
    base_process: str | None = None
    hbm: str
    knobs: Mapping[str, Number]
    published: PublishedDie
    sources: Mapping[str, Source]

    def machine(self, technology: Technology) -> MachineKnobs:
        """The GPU alone, in the terms of a technology."""
        processes, generations = tuple(technology.processes), tuple(technology.memory.generations)
        return MachineKnobs(
            process=processes.index(self.process),
            base_process=processes.index(self.base_process or self.process),
            hbm=generations.index(self.hbm),
            **self.knobs,  # type: ignore[arg-type]
        )


class SimilarDies(Frozen):
    """A GPU by what differs from the public one whose dies it is taken to have. published: None where nothing is."""

    gpu: str
    process: str | None = None
    hbm: str | None = None
    knobs: Mapping[str, Number]
    published: PublishedDie | None = None
    sources: Mapping[str, Source]

    def over(self, public: PublicDies) -> PublicDies:
        """Return the public GPU with what differs."""
        changed: dict[str, Any] = {"knobs": {**public.knobs, **self.knobs}, "sources": self.sources}
        changed |= {name: getattr(self, name) for name in ("process", "hbm", "published") if getattr(self, name)}
        if self.process:
            # base dies follow the compute dies to another process
            changed["base_process"] = None
        return public.model_copy(update=changed)


class KnownGpus(Frozen):
    """The file of public GPUs. alike: other GPUs by name."""

    name: str
    description: str
    gpus: Mapping[str, PublicDies]
    alike: Mapping[str, SimilarDies]

    @property
    def held_out(self) -> Mapping[str, PublicDies]:
        """GPUs of which figures were published that nothing was fitted to."""
        return {name: each.over(self.gpus[each.gpu]) for name, each in self.alike.items() if each.published}


@functools.cache
def known_gpus() -> KnownGpus:
    """GPUs of `conf/data/gpu_dies.yaml`. Raises ConfigError."""
    return validate_as(KnownGpus, load_yaml(DATA / "gpu_dies.yaml"), path="gpu_dies")


def of_system(system: System, technology: Technology) -> MachineKnobs:
    """Machines of a system, whose numbers may be arrays [B] over a grid of designs.

    What `conf/gpu` does not say is that of `conf/data/gpu_dies.yaml`. A number of the system that differs from the
    shipped GPU or node of the same name changes its knob in proportion: CUs with their spare ones, rate of matrix
    units, stacks and rate of HBM, links, clock. Raises ValueError for a GPU of whose dies nothing is known.
    """
    gpu = system.gpu
    public, assumed = _public_dies(gpu.name)
    knobs: dict[str, Any] = {**public.machine(technology).__dict__, **_around(system)}
    shipped, shipped_cus = _shipped_gpu(gpu.name), public.knobs["num_cus"]
    # yield and spare CUs in the proportion of the shipped GPU
    knobs["cus_on_die"] = np.asarray(gpu.num_cus) * (public.knobs["cus_on_die"] / shipped_cus)
    knobs["num_cus"] = gpu.num_cus
    knobs["clock_hz"] = knobs["clock_hz"] * _or_one(gpu.clock)
    for knob, fields in _SCALED.items():
        knobs[knob] = knobs[knob] * next((_ratio(gpu, shipped, field) for field in fields if _has(gpu, field)), 1.0)
    rate = technology.nominal.of_hbm("stack_bytes_per_s", knobs["hbm"])
    # a system states the rate of its HBM, not its stacks: as many as reach it
    grown = _ratio(gpu, shipped, "hbm_bytes_per_s") if _has(gpu, "hbm_bytes_per_s") else 1.0
    stacks = np.where(
        np.asarray(grown) == 1, public.knobs["hbm_stacks"], np.ceil(knobs["hbm_bytes_per_s"] / rate - _CEILING)
    )
    knobs["hbm_sites"] = stacks + public.knobs["hbm_sites"] - public.knobs["hbm_stacks"]
    knobs["hbm_stacks"] = stacks
    knobs |= _own(gpu)
    knobs["lane_gbit_per_s"] = knobs["lane_gbit_per_s"] * _link_ratio(system.node)
    unpublished = {*assumed, *(name for name in KNOBS if name not in public.knobs)} - set(_own(gpu))
    return MachineKnobs(**{**knobs, "assumed": tuple(sorted(unpublished))})


_SCALED = {
    "matrix_fma_per_cu": ("matrix_flop_per_s_per_cu",),
    "hbm_bytes_per_s": ("hbm_bytes_per_s", "peak_hbm_bytes_per_s"),
    "link_lanes": ("num_links",),
}
"""Knob -> fields of a GPU of which the first that it has changes the knob in proportion."""


def _public_dies(name: str) -> tuple[PublicDies, tuple[str, ...]]:
    """The die of a GPU, and the knobs that are assumed where it is that of another."""
    public = known_gpus()
    if name in public.gpus:
        return public.gpus[name], ()
    if name not in public.alike:
        raise ValueError(f"system.gpu.name = {name!r}: nothing is known of its dies (conf/data/gpu_dies.yaml)")
    alike = public.alike[name]
    return alike.over(public.gpus[alike.gpu]), tuple(sorted(set(KNOBS) - set(alike.knobs)))


@functools.cache
def _shipped_gpu(name: str) -> Gpu:
    return System.model_validate(tree_of_gpu(name)).gpu


@functools.cache
def _shipped_node(name: str) -> Node | None:
    path = conf_dir() / "node" / f"{name}.yaml"
    return Node.model_validate(load_yaml(path)) if path.is_file() else None


def _has(part: Any, field: str) -> bool:
    return getattr(part, field, None) is not None


def _or_one(value: Any) -> Any:
    return 1.0 if value is None else np.asarray(value)


def _ratio(gpu: Gpu, shipped: Gpu, field: str) -> Any:
    """A number of a GPU over that of the shipped one; 1 where the shipped one has none."""
    return np.asarray(getattr(gpu, field)) / getattr(shipped, field) if getattr(shipped, field, None) else 1.0


def _link_ratio(node: Node | None) -> Any:
    shipped = _shipped_node(node.name) if node else None
    if node is None or shipped is None or not node.link_bytes_per_s or not shipped.link_bytes_per_s:
        return 1.0
    return np.asarray(node.link_bytes_per_s) / shipped.link_bytes_per_s


def _own(gpu: Gpu) -> dict[str, Any]:
    """Knobs that a GPU's own parts give."""
    own: dict[str, Any] = {}
    if _has(gpu, "hbm_bytes"):
        own["hbm_bytes"] = gpu.hbm_bytes
    if gpu.dma is not None:
        own["copy_engines"] = gpu.dma.num_engines
    if gpu.tracker is not None:
        own["tracker_bytes"] = np.asarray(gpu.tracker.num_entries) * gpu.tracker.bytes_per_entry
    if gpu.pim is not None:
        own["pim_units"] = gpu.pim.units
    return own


def _around(system: System) -> dict[str, Any]:
    """Knobs of the node and of the network, for one GPU."""
    node, fabric = system.node, system.fabric
    around: dict[str, Any] = {} if node is None else {"gpus_per_node": node.num_gpus}
    around["switched"] = int(node is not None and node.topology == "switch")
    return around if fabric is None else {**around, **_network(fabric, around.get("gpus_per_node", 1))}


def _network(fabric: Fabric, gpus_per_node: Any) -> dict[str, Any]:
    """NICs of a GPU, and ports and cables of the network for each of them.

    A network of one stage has a port and a cable for each NIC; leaves below a spine add a port up, one of the spine and
    a cable, over the oversubscription. A torus has cables only.
    """
    nic, network = fabric.nic, fabric.network
    is_torus = network.topology == "torus"
    has_spine = not is_torus and bool(np.all(np.asarray(fabric.num_nodes) > network.leaf_nodes))
    # uplinks for each port down
    above = 1 / np.asarray(network.oversubscription) if has_spine else 0.0
    return {
        # NICs are of a node here, 8e-9: bytes/s to Gbit/s
        "nic_gbit_per_s": np.asarray(nic.num_nics) * np.asarray(nic.bytes_per_s) * 8e-9 / np.asarray(gpus_per_node),
        "switch_ports": 0.0 if is_torus else 1 + 2 * above,
        "cables": 1 + above,
    }
