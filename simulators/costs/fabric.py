"""Moving a tensor between the GPUs of many nodes: what one representative GPU sends, and what that loads.

All GPUs send alike, so one stands for all: a resource that several of them share is loaded by a byte of this one as
often as there are GPUs that share it. With g GPUs on each of N nodes, G = g N, and the bytes that a GPU sends to all
others taken as 1 (of a tensor of V bytes: V (G - 1) / G; an all-reduce sends that twice):

    direct         every GPU to every other one: (g - 1) / (G - 1) inside the node, the rest over NICs, at once
    hierarchical   to the GPU of the same place in the node first, then between these:
                   all-to-all       (g - 1) N / (G - 1) inside, (N - 1) g / (G - 1) over NICs
                   reduce-scatter   (g - 1) N / (G - 1) inside, then (N - 1) / (G - 1); all-gather: the other way round

    NIC            shared by ceil(g / n) GPUs where there are fewer than GPUs, else floor(n / g) of them for each
    placement      gpu: nothing else. pcie_switch: the PCIe links of GPU and NIC. cpu: these, and host memory, which is
                   written and read at both ends: 4 bytes of it for each, by all GPUs of the node
    rail           a spine for what changes rails: direct (r - 1) / r of r = min(g, n) rails, hierarchical nothing
    fat tree       a spine for what leaves its leaf of L nodes: (N - L) / (N - 1)
    torus          a x b nodes: a message crosses on average (a^2 // 4) / a links of its ring in one dimension, times
                   N / (N - 1) as none goes to its own node; of the node's ports half belong to each dimension.
                   Reductions, hierarchical, run dimension by dimension, step by step around its rings, half of the
                   data in either order: (a - 1) (b + 1) / (2 (N - 1)) in the dimension of a

Standard counting arguments (derived; docs/models.md). Numbers may be arrays over designs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.transfer import link_utilisation, links, routes
from simulators.hardware.system import Fabric, System
from simulators.workloads.operators import Pattern

Way = Literal["direct", "hierarchical"]
_CROSSINGS = {"gpu": 0, "pcie_switch": 2, "cpu": 4}
"""PCIe switches and bridges between two GPUs and their NICs, both ends, by where the NICs are."""


@dataclass(frozen=True)
class Leg:
    """One part of a collective's way. share: bytes of it, of those that a GPU sends to all others by the direct way.

    loads: resource -> bytes on it for each byte of the leg. peers: to how many GPUs. latency_s: until the first byte is
    there. inside: whether it stays in the node.
    """

    share: float
    loads: Mapping[str, ArrayLike]
    peers: int
    latency_s: ArrayLike
    inside: bool


def num_nodes(system: System) -> int:
    """Nodes of a system; one where nothing is said of more."""
    return 1 if system.fabric is None else system.fabric.num_nodes


def num_gpus(system: System) -> int:
    """GPUs of all nodes."""
    return num_nodes(system) * system.node.num_gpus


def capacities(system: System) -> dict[str, ArrayLike]:
    """Rates [bytes/s] of the links, NICs and switches that a GPU's bytes may load."""
    found = links(system.node) if system.node.num_gpus > 1 else {}
    if system.fabric is not None and system.fabric.num_nodes > 1:
        nic = system.fabric.nic
        found |= dict.fromkeys(("nic", "spine", "torus.0", "torus.1"), nic.bytes_per_s)
        found |= {"pcie": nic.pcie_bytes_per_s, "pcie.nic": nic.pcie_bytes_per_s, "host": nic.host_bytes_per_s}
    return found


def phases(system: System, pattern: Pattern, way: Way) -> list[tuple[Leg, ...]]:
    """The legs of a collective: those of a phase at once, phases one after another. None where a GPU is alone."""
    if pattern == "all_reduce":
        return [*phases(system, "reduce_scatter", way), *phases(system, "all_gather", way)]
    nodes, own = num_nodes(system), system.node.num_gpus
    total = nodes * own
    if way == "direct":
        parts = [
            _inside(system, pattern, (own - 1, total - 1)),
            _between(system, pattern, way, (total - own, total - 1)),
        ]
        return [found] if (found := tuple(leg for leg in parts if leg is not None)) else []
    apart = own if pattern == "all_to_all" else 1
    legs = [
        _inside(system, pattern, ((own - 1) * nodes, total - 1)),
        _between(system, pattern, way, ((nodes - 1) * apart, total - 1)),
    ]
    ordered = legs[::-1] if pattern == "all_gather" else legs
    return [(leg,) for leg in ordered if leg is not None]


def _inside(system: System, pattern: Pattern, share: tuple[int, int]) -> Leg | None:
    """What stays in the node, dealt out over the routes to all peers."""
    if system.node.num_gpus < 2:
        return None
    found, loads = routes(system.node, pattern), dict[str, float]()
    for route in found:
        for name, load in route.loads.items():
            loads[name] = loads.get(name, 0.0) + load / len(found)
    return Leg(share[0] / share[1], loads, len(found), 0.0, True)


def _between(system: System, pattern: Pattern, way: Way, share: tuple[int, int]) -> Leg | None:
    """What goes from node to node."""
    fabric, own = system.fabric, system.node.num_gpus
    if fabric is None or fabric.num_nodes < 2:
        return None
    loads = {"nic": gpus_per_nic(system), **_placed(system), **_switched(system, pattern, way)}
    peers = (fabric.num_nodes - 1) * (own if way == "direct" else 1)
    return Leg(
        share[0] / share[1],
        {name: load for name, load in loads.items() if np.any(load)},
        peers,
        latency_s(system, pattern, way),
        False,
    )


def gpus_per_nic(system: System) -> float:
    """How many GPUs share a NIC, that of the busiest one; below 1 where a GPU has several."""
    assert system.fabric is not None
    own, nics = system.node.num_gpus, system.fabric.nic.num_nics
    if system.fabric.network.topology == "torus":
        return own / nics  # ports of the node, dealt out over directions
    return 1 / (nics // own) if nics >= own else float(-(-own // nics))


def _placed(system: System) -> dict[str, float]:
    """What bytes load on their way between GPU and NIC."""
    assert system.fabric is not None
    where = system.fabric.nic.placement
    if where == "gpu":
        return {}
    found = {"pcie": 1.0, "pcie.nic": gpus_per_nic(system)}
    return found | ({"host": 4.0 * system.node.num_gpus} if where == "cpu" else {})


def _switched(system: System, pattern: Pattern, way: Way) -> dict[str, ArrayLike]:
    """What bytes load between the nodes."""
    assert system.fabric is not None
    network, nodes, own = system.fabric.network, system.fabric.num_nodes, system.node.num_gpus
    if network.topology == "torus":
        return _on_torus(system.fabric, own, hops=way == "direct" or pattern == "all_to_all")
    rails = min(own, system.fabric.nic.num_nics)
    apart = (rails - 1) / rails if way == "direct" else 0.0
    if network.topology == "fat_tree":
        apart = max(nodes - network.leaf_nodes, 0) / (nodes - 1)
    return {"spine": apart * gpus_per_nic(system) * np.asarray(network.oversubscription)}


def _on_torus(fabric: Fabric, own: int, *, hops: bool) -> dict[str, ArrayLike]:
    """Loads on a NIC's port in either dimension: half of the ports belong to each."""
    sides, nodes = dimensions(fabric.num_nodes), fabric.num_nodes
    crossed = {
        f"torus.{axis}": mean_hops(side) * nodes / (nodes - 1) if hops else (side - 1) * (other + 1) / (2 * (nodes - 1))
        for axis, (side, other) in enumerate(zip(sides, sides[::-1], strict=True))
    }
    return {name: 2 * own / fabric.nic.num_nics * links_crossed for name, links_crossed in crossed.items()}


def dimensions(nodes: int) -> tuple[int, int]:
    """The squarest a x b = nodes, a <= b."""
    short = next(side for side in range(math.isqrt(nodes), 0, -1) if nodes % side == 0)
    return short, nodes // short


def mean_hops(side: int) -> float:
    """Links between two nodes of a bidirectional ring, the mean over all pairs, a node with itself included."""
    return (side * side // 4) / side


def latency_s(system: System, pattern: Pattern, way: Way) -> Any:
    """From a NIC's order to the first byte at a GPU of another node [s], the farthest one."""
    assert system.fabric is not None
    nic, network, nodes = system.fabric.nic, system.fabric.network, system.fabric.num_nodes
    if network.topology == "torus":
        around = way == "hierarchical" and pattern != "all_to_all"
        hops = sum(side - 1 if around else side // 2 for side in dimensions(nodes))
    elif network.topology == "rail":
        hops = 3 if way == "direct" and min(system.node.num_gpus, nic.num_nics) > 1 else 1
    else:
        hops = 3 if nodes > network.leaf_nodes else 1
    return nic.latency_s + _CROSSINGS[nic.placement] * np.asarray(nic.hop_s) + hops * np.asarray(network.hop_s)


def pace(system: System, leg: Leg, *, cus: ArrayLike, pattern: Pattern) -> NDArray[np.float64]:
    """Rate [bytes/s] of a leg that has its resources to itself, moved by kernels on `cus` CUs, or by NICs."""
    rates = capacities(system)
    free = np.minimum.reduce(np.broadcast_arrays(*(np.asarray(rates[name]) / load for name, load in leg.loads.items())))
    if not leg.inside:
        return np.asarray(free, float)
    copy, total = system.gpu.cu_copy, sum(np.asarray(rates[name]) for name in leg.loads)
    factor = copy.all_to_all_factor if pattern == "all_to_all" else 1.0
    asked = np.asarray(cus) * copy.bytes_per_s_per_cu * factor / (total * copy.link_efficiency)
    return np.asarray(free * copy.link_efficiency * link_utilisation(asked), float)


def fewest_cus(system: System, leg: Leg, *, cus: ArrayLike, pattern: Pattern) -> NDArray[np.float64]:
    """CUs of a library's kernel: those it takes inside a node; between nodes no more than it takes to feed the NICs."""
    if leg.inside:
        return np.asarray(cus, float)
    copy = system.gpu.cu_copy
    each = np.asarray(copy.bytes_per_s_per_cu) * (copy.all_to_all_factor if pattern == "all_to_all" else 1.0)
    return np.minimum(cus, np.ceil(pace(system, leg, cus=cus, pattern=pattern) / each))


def messages_s(system: System, leg: Leg) -> Any:
    """What the messages to all peers cost a NIC beside their bytes [s], those of all GPUs that share it."""
    if leg.inside or system.fabric is None:
        return 0.0
    return leg.peers * gpus_per_nic(system) * np.asarray(system.fabric.nic.message_s)


def loads_of_nodes(system: System) -> Iterator[float]:
    """Load of each node that is simulated, over the mean; the busiest first."""
    fabric = system.fabric
    if fabric is None or fabric.simulated == "one":
        yield 1.0
        return
    steps = max(fabric.num_nodes - 1, 1)
    for node in range(fabric.num_nodes):
        yield 1 + fabric.imbalance * (1 - 2 * node / steps) if fabric.num_nodes > 1 else 1.0
