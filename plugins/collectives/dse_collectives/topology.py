"""GPUs and the links between them as collectives alone see them: mesh, ring, switch, PCIe, and nodes with NICs.

A link leads from one GPU to another. It loads ports, which have rates; links that share a switch port, a NIC or a spine
share its rate. Inside a node: a port for each link of a mesh or ring, one out and one in of a GPU at a switch or PCIe.
Between nodes, with the loads of `simulators/costs/fabric.py`: the NICs of both ends, the PCIe links of GPU and NIC, the
host's memory, and the spine where the network has one between the two.

Latency: inside a node `node.hop_latency_s`, or that of a step of the node's library; between nodes that of the NIC and
of all switches and bridges on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from simulators.costs.fabric import crossings
from simulators.hardware.machine import System
from simulators.hardware.network import Fabric, Node
from simulators.hardware.network import links as rates_inside

MOST_GPUS = 64
"""GPUs of the largest topology whose schedules are made."""


@dataclass(frozen=True)
class DirectedLink:
    """A way from one GPU to another. latency_s: from its last byte on the link to its arrival.

    loads: port -> bytes on it for a byte sent. message_s: time that a message takes the link beside its bytes.
    """

    source: int
    target: int
    latency_s: float
    loads: Mapping[str, float]
    message_s: float = 0.0


@dataclass(frozen=True)
class LinkTopology:
    """GPUs, their links and the rates of ports [bytes/s]. gpus_per_node: GPUs [i g, (i + 1) g) are node i."""

    name: str
    num_gpus: int
    gpus_per_node: int
    links: tuple[DirectedLink, ...]
    ports: Mapping[str, float]

    @cached_property
    def by_ends(self) -> Mapping[tuple[int, int], DirectedLink]:
        """Links by (source, target)."""
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def load_matrix(self) -> NDArray[np.float64]:
        """Seconds of each port for a byte on each link, [ports, links]."""
        places = {port: row for row, port in enumerate(self.ports)}
        seconds = np.zeros((len(self.ports), len(self.links)))
        for column, link in enumerate(self.links):
            for port, load in link.loads.items():
                seconds[places[port], column] = load / self.ports[port]
        return seconds

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.num_gpus // self.gpus_per_node

    def turn_links(self) -> LinkTopology:
        """The topology with every link the other way round: what a reduction sees backwards in time."""
        return replace(self, links=tuple(replace(link, source=link.target, target=link.source) for link in self.links))


def topology_of(machine: System) -> LinkTopology:
    """Links of a machine with all its nodes. Raises ConfigError where something is missing for it."""
    node, fabric = machine.node, machine.fabric
    if node is None or node.topology is None or node.link_bytes_per_s is None:
        raise ConfigError([Problem("system.node.topology", "is missing: links of the GPUs", way_out="try mi300x_8")])
    nodes = 1 if fabric is None else fabric.num_nodes
    count = node.num_gpus * nodes
    if not 2 <= count <= MOST_GPUS:
        rule, way = f"gives {count} GPUs in all, where collectives need 2 to {MOST_GPUS}", "set another number"
        raise ConfigError([Problem("system.node.num_gpus", rule, node.num_gpus, way)])
    ports: dict[str, float] = {}
    links = [link for place in range(nodes) for link in _links_inside(node, place * node.num_gpus, ports)]
    if fabric is not None and nodes > 1:
        links += _links_between(fabric, node.num_gpus, ports)
    return LinkTopology(machine.name, count, node.num_gpus, tuple(links), ports)


def _links_inside(node: Node, first: int, ports: dict[str, float]) -> list[DirectedLink]:
    """Links of one node, whose GPUs are numbered from `first`; adds their ports."""
    count, rate = node.num_gpus, float(node.link_bytes_per_s or 0)
    if count < 2:
        return []
    latency = _latency_inside(node)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if node.topology == "ring":
        # neighbours on both sides
        pairs = [(a, b) for a, b in pairs if (b - a) % count in (1, count - 1)]
    links = []
    for a, b in ((first + a, first + b) for a, b in pairs):
        if node.topology in ("mesh", "ring"):
            # each pair has a link of its own
            loads, port_rate = {f"link {a}-{b}": 1.0}, rate
        else:
            loads = {f"port {a} out": 1.0, f"port {b} in": 1.0}
            # a port carries what a GPU's links do together
            port_rate = float(np.squeeze(rates_inside(node)["port"]))
        ports.update(dict.fromkeys(loads, port_rate))
        links.append(DirectedLink(a, b, latency, loads))
    return links


def _latency_inside(node: Node) -> float:
    """Latency [s] of a message inside a node. Raises ConfigError where it is not known."""
    if node.hop_latency_s is not None:
        return float(node.hop_latency_s)
    if node.library is not None:
        # a step of a collective, as a library was measured with it
        return float(node.library.latency_s)
    way = "set system.node.hop_latency_s=1us"
    raise ConfigError([Problem("system.node.hop_latency_s", "is missing: latency of a message", way_out=way)])


def _links_between(fabric: Fabric, gpus: int, ports: dict[str, float]) -> list[DirectedLink]:
    """Links between GPUs of different nodes; adds their ports. Raises ConfigError for a torus."""
    if fabric.network.topology == "torus":
        rule = "= torus has no link from every GPU to every other one"
        raise ConfigError([Problem("system.fabric.network.topology", rule, way_out="set rail or fat_tree")])
    count = gpus * fabric.num_nodes
    ends = [(a, b) for a in range(count) for b in range(count) if a // gpus != b // gpus]
    return [_link_between(fabric, gpus, (a, b), ports) for a, b in ends]


def _link_between(fabric: Fabric, gpus: int, ends: tuple[int, int], ports: dict[str, float]) -> DirectedLink:
    nic, network = fabric.nic, fabric.network
    loads: dict[str, float] = {}
    # GPUs of a node are spread evenly over its NICs
    rails = [end % gpus * nic.num_nics // gpus for end in ends]
    names = [f"nic {end // gpus}.{rail}" for end, rail in zip(ends, rails, strict=True)]
    # NICs of one GPU carry its messages together
    together = max(nic.num_nics // gpus, 1)
    if network.topology == "rail":
        # a rail connects the same NICs of all nodes: only other rails need the spine
        spine = rails[0] != rails[1]
    else:
        # nodes at one leaf switch do not need the spine
        spine = len({end // gpus // network.leaf_nodes for end in ends}) > 1
    for end, name, way in zip(ends, names, ("out", "in"), strict=True):
        _load(loads, ports, f"{name} {way}", nic.bytes_per_s * together)
        if nic.placement != "gpu":
            _load(loads, ports, f"pcie {end} {way}", nic.pcie_bytes_per_s)
            _load(loads, ports, f"pcie of {name} {way}", nic.pcie_bytes_per_s * together)
        if nic.placement == "cpu":
            # written to the memory of the host and read again
            _load(loads, ports, f"host {end // gpus}", nic.host_bytes_per_s, 2.0)
        if spine:
            _load(loads, ports, f"spine of {name} {way}", nic.bytes_per_s * together / network.oversubscription)
    # leaf, spine and leaf, or one leaf
    late = nic.latency_s + crossings(nic.placement) * nic.hop_s + (3 if spine else 1) * network.hop_s
    return DirectedLink(*ends, float(late), loads, float(nic.message_s))


def _load(loads: dict[str, float], ports: dict[str, float], port: str, rate: float, load: float = 1.0) -> None:
    loads[port], ports[port] = load, float(rate)
