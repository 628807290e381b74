"""Moving a tensor between the GPUs of many nodes: traffic of one representative GPU, and the loads that it causes.

All GPUs send alike, so one stands for all: a byte of this GPU loads a shared resource once for each GPU that shares it.
With g GPUs on each of N nodes, G = g N, and the bytes that a GPU sends to all others taken as 1 (of a tensor of V
bytes: V (G - 1) / G; an all-reduce sends that twice):

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

Standard counting arguments (derived; docs/explanation/costs.md). Numbers may be arrays over designs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.transfer import TransferMode, kernel_share, routes
from simulators.hardware.machine import System
from simulators.hardware.network import Fabric, Pattern, links

Algorithm = Literal["direct", "hierarchical"]
_CROSSINGS = {"gpu": 0, "pcie_switch": 2, "cpu": 4}
"""PCIe switches and bridges between two GPUs and their NICs, both ends, by where the NICs are."""


def crossings(placement: str) -> int:
    """Number of PCIe switches and bridges on the way of a message, both ends together, by where the NICs are."""
    return _CROSSINGS[placement]


@dataclass(frozen=True)
class PhaseSegment:
    """Part of a phase of a collective. share: its bytes, over those that a GPU sends to all others directly.

    loads: resource -> bytes on it per byte of the segment. peers: number of receiving GPUs. latency_s: until the first
    byte arrives. inside: whether it stays in the node.
    """

    share: float
    loads: Mapping[str, ArrayLike]
    peers: int
    latency_s: ArrayLike
    inside: bool


def num_nodes(system: System) -> int:
    """Number of nodes of a system; one without a fabric."""
    return 1 if system.fabric is None else system.fabric.num_nodes


def num_gpus(system: System) -> int:
    """Number of GPUs of all nodes."""
    return num_nodes(system) * system.node.num_gpus


def capacities(system: System) -> dict[str, ArrayLike]:
    """Rates [bytes/s] of the links, NICs and switches that a GPU's bytes may load."""
    rates = links(system.node) if system.node.num_gpus > 1 else {}  # a single GPU has no links
    if system.fabric is not None and system.fabric.num_nodes > 1:
        nic = system.fabric.nic
        # loads are counted per NIC, so that all four run at its rate
        rates |= dict.fromkeys(("nic", "spine", "torus.0", "torus.1"), nic.bytes_per_s)
        rates |= {"pcie": nic.pcie_bytes_per_s, "pcie.nic": nic.pcie_bytes_per_s, "host": nic.host_bytes_per_s}
    return rates


def phases(system: System, pattern: Pattern, algorithm: Algorithm) -> list[tuple[PhaseSegment, ...]]:
    """Phases of a collective, one after another; the segments of a phase run at once. Empty for a single GPU."""
    if pattern == "all_reduce":  # scatter, then gather: each has half of the traffic
        return [*phases(system, "reduce_scatter", algorithm), *phases(system, "all_gather", algorithm)]
    nodes, gpus = num_nodes(system), system.node.num_gpus
    total = nodes * gpus
    if algorithm == "direct":
        parts = [
            _inside(system, pattern, (gpus - 1, total - 1)),
            _between(system, pattern, algorithm, (total - gpus, total - 1)),
        ]
        return [phase] if (phase := tuple(segment for segment in parts if segment is not None)) else []
    # an all-to-all has a message for each GPU of another node, the others one for the node
    apart = gpus if pattern == "all_to_all" else 1
    segments = [
        _inside(system, pattern, ((gpus - 1) * nodes, total - 1)),
        _between(system, pattern, algorithm, ((nodes - 1) * apart, total - 1)),
    ]
    # gathered between nodes first, then spread inside; scattered the other way round
    ordered = segments[::-1] if pattern == "all_gather" else segments
    return [(segment,) for segment in ordered if segment is not None]


def _inside(system: System, pattern: Pattern, share: tuple[int, int]) -> PhaseSegment | None:
    """Segment inside the node, spread evenly over the routes to all peers."""
    if system.node.num_gpus < 2:
        return None
    peer_routes, loads = routes(system.node, pattern), dict[str, float]()
    for route in peer_routes:  # each peer's data is an equal share
        for name, load in route.loads.items():
            loads[name] = loads.get(name, 0.0) + load / len(peer_routes)
    return PhaseSegment(share[0] / share[1], loads, len(peer_routes), 0.0, True)


def _between(system: System, pattern: Pattern, algorithm: Algorithm, share: tuple[int, int]) -> PhaseSegment | None:
    """Segment between nodes."""
    fabric, gpus = system.fabric, system.node.num_gpus
    if fabric is None or fabric.num_nodes < 2:  # one node: nothing leaves it
        return None
    loads = {"nic": gpus_per_nic(system), **_host_loads(system), **_network_loads(system, pattern, algorithm)}
    peers = (fabric.num_nodes - 1) * (gpus if algorithm == "direct" else 1)
    return PhaseSegment(
        share[0] / share[1],
        # a resource that nothing loads must not limit the rate
        {name: load for name, load in loads.items() if np.any(load)},
        peers,
        latency_s(system, pattern, algorithm),
        False,
    )


def gpus_per_nic(system: System) -> float:
    """Number of GPUs that share the busiest NIC; below 1 if a GPU has several NICs."""
    assert system.fabric is not None
    gpus, nics = system.node.num_gpus, system.fabric.nic.num_nics
    if system.fabric.network.topology == "torus":
        return gpus / nics  # ports of the node, divided among directions
    # NICs are not split between GPUs; GPUs share one evenly as far as they can
    return 1 / (nics // gpus) if nics >= gpus else float(-(-gpus // nics))


def _host_loads(system: System) -> dict[str, float]:
    """Loads on the path between GPU and NIC."""
    assert system.fabric is not None
    where = system.fabric.nic.placement
    if where == "gpu":
        return {}
    loads = {"pcie": 1.0, "pcie.nic": gpus_per_nic(system)}
    # in and out of host memory, at both ends
    return loads | ({"host": 4.0 * system.node.num_gpus} if where == "cpu" else {})


def _network_loads(system: System, pattern: Pattern, algorithm: Algorithm) -> dict[str, ArrayLike]:
    """Loads on the network between nodes."""
    assert system.fabric is not None
    network, nodes, gpus = system.fabric.network, system.fabric.num_nodes, system.node.num_gpus
    if network.topology == "torus":
        return _torus_loads(system.fabric, gpus, hops=algorithm == "direct" or pattern == "all_to_all")
    rails = min(gpus, system.fabric.nic.num_nics)
    apart = (rails - 1) / rails if algorithm == "direct" else 0.0
    if network.topology == "fat_tree":
        # the share of the other nodes that are under other leaves
        apart = max(nodes - network.leaf_nodes, 0) / (nodes - 1)
    return {"spine": apart * gpus_per_nic(system) * np.asarray(network.oversubscription)}


def _torus_loads(fabric: Fabric, gpus: int, *, hops: bool) -> dict[str, ArrayLike]:
    """Loads on a NIC's port in either dimension: half of the ports belong to each."""
    sides, nodes = dimensions(fabric.num_nodes), fabric.num_nodes
    crossed = {
        f"torus.{axis}": mean_hops(side) * nodes / (nodes - 1) if hops else (side - 1) * (other + 1) / (2 * (nodes - 1))
        for axis, (side, other) in enumerate(zip(sides, sides[::-1], strict=True))
    }
    # half of the ports belong to each dimension
    return {name: 2 * gpus / fabric.nic.num_nics * links_crossed for name, links_crossed in crossed.items()}


def dimensions(nodes: int) -> tuple[int, int]:
    """Sides (a, b) of the squarest torus with a x b = nodes, a <= b."""
    # the largest divisor up to the root
    short = next(side for side in range(math.isqrt(nodes), 0, -1) if nodes % side == 0)
    return short, nodes // short


def mean_hops(side: int) -> float:
    """Mean number of links between two nodes of a bidirectional ring, over all pairs, a node with itself included."""
    return (side * side // 4) / side


def latency_s(system: System, pattern: Pattern, algorithm: Algorithm) -> Any:
    """Latency [s] from a NIC's order to the first byte at the farthest GPU of another node."""
    assert system.fabric is not None
    nic, network, nodes = system.fabric.nic, system.fabric.network, system.fabric.num_nodes
    if network.topology == "torus":
        around = algorithm == "hierarchical" and pattern != "all_to_all"
        # the farthest node of a ring, by the shorter way
        hops = sum(side - 1 if around else side // 2 for side in dimensions(nodes))
    elif network.topology == "rail":
        # leaf, spine, leaf where a message changes rails; one switch else
        hops = 3 if algorithm == "direct" and min(system.node.num_gpus, nic.num_nics) > 1 else 1
    else:
        hops = 3 if nodes > network.leaf_nodes else 1
    return nic.latency_s + crossings(nic.placement) * np.asarray(nic.hop_s) + hops * np.asarray(network.hop_s)


def pace(system: System, segment: PhaseSegment, *, cus: ArrayLike, pattern: Pattern) -> NDArray[np.float64]:
    """Isolated rate [bytes/s] of a segment, moved by kernels on `cus` CUs, or by NICs."""
    rates = capacities(system)
    free = np.minimum.reduce(
        np.broadcast_arrays(*(np.asarray(rates[name]) / load for name, load in segment.loads.items()))
    )
    if not segment.inside:  # NICs move what leaves the node, at whatever number of CUs
        return np.asarray(free, float)
    total = sum(np.asarray(rates[name]) for name in segment.loads)
    share = kernel_share(system, TransferMode("cu", cus, pattern), total)
    return np.asarray(free * system.gpu.cu_copy.link_efficiency * share, float)


def fewest_cus(system: System, segment: PhaseSegment, *, cus: ArrayLike, pattern: Pattern) -> NDArray[np.float64]:
    """CUs of a library's kernel: `cus` inside a node; between nodes no more than needed to feed the NICs."""
    if segment.inside:
        return np.asarray(cus, float)
    copy = system.gpu.cu_copy
    rate = np.asarray(copy.bytes_per_s_per_cu) * (copy.all_to_all_factor if pattern == "all_to_all" else 1.0)
    # whole CUs, no more than inside a node
    return np.minimum(cus, np.ceil(pace(system, segment, cus=cus, pattern=pattern) / rate))


def messages_s(system: System, segment: PhaseSegment) -> Any:
    """Time [s] of a NIC for the messages to all peers, beside their bytes, for all GPUs that share it."""
    if segment.inside or system.fabric is None:
        return 0.0
    return segment.peers * gpus_per_nic(system) * np.asarray(system.fabric.nic.message_s)


def loads_of_nodes(system: System) -> Iterator[float]:
    """Yield the load of each simulated node over the mean, busiest first."""
    fabric = system.fabric
    if fabric is None or fabric.simulated == "one":
        yield 1.0
        return
    steps = max(fabric.num_nodes - 1, 1)
    for node in range(fabric.num_nodes):
        # linear, from 1 + imbalance to 1 - imbalance: the mean is 1
        yield 1 + fabric.imbalance * (1 - 2 * node / steps) if fabric.num_nodes > 1 else 1.0
