"""Moving a tensor between the GPUs of a node: routes, and rates by CU kernels or DMA engines.

The node is symmetric, so one representative GPU is simulated: what it receives, it also sends. A route says which
of its incoming links a peer's data loads, and how often (transit on a ring), and in which order data arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.system import Node, System

Mover = Literal["cu", "dma"]
Pattern = Literal["all_gather", "all_to_all"]


@dataclass(frozen=True)
class Route:
    """How data of one peer arrives: link name -> bytes on that link per payload byte; routes of a later `turn` wait."""

    peer: int
    loads: Mapping[str, float]
    turn: int


@dataclass(frozen=True)
class Rates:
    """What a mover achieves for one route: payload rate [bytes/s] and what bounds it."""

    bytes_per_s: NDArray[np.float64]
    limiter: str


def links(node: Node) -> dict[str, ArrayLike]:
    """Incoming links of a GPU and their rates [bytes/s]."""
    rate = node.link_bytes_per_s
    if node.topology == "switch":
        return {"port": (node.num_gpus - 1) * np.asarray(rate)}
    if node.topology == "ring":
        return {"link.cw": rate, "link.ccw": rate}
    return {f"link.{peer}": rate for peer in range(1, node.num_gpus)}


def routes(node: Node, pattern: Pattern) -> list[Route]:
    """One route per peer, in order of arrival.

    Mesh: a link of its own. Switch: all share the GPU's port. Ring: data goes the shorter way round; an all-gather
    forwards each shard from neighbour to neighbour (every link carries it once), an all-to-all message of distance
    d loads d links, and by symmetry the representative GPU's link carries d of them.
    """
    if node.topology == "ring":
        return _ring_routes(node.num_gpus, pattern)
    shared = node.topology == "switch"
    return [Route(peer, {"port" if shared else f"link.{peer}": 1.0}, 0) for peer in range(1, node.num_gpus)]


def _ring_routes(num_gpus: int, pattern: Pattern) -> list[Route]:
    found = []
    for distance in range(1, num_gpus // 2 + 1):
        load = 1.0 if pattern == "all_gather" else float(distance)
        if 2 * distance == num_gpus:
            halves = {"link.cw": load / 2, "link.ccw": load / 2}
            found.append(Route(distance, halves, distance))
        else:
            found.append(Route(distance, {"link.cw": load}, distance))
            found.append(Route(num_gpus - distance, {"link.ccw": load}, distance))
    return found


@dataclass(frozen=True)
class Movement:
    """Who moves: DMA engines or kernels on `cus` CUs, for which collective."""

    mover: Mover
    cus: ArrayLike
    pattern: Pattern


def rate(system: System, route: Route, active: Sequence[Route], *, by: Movement) -> Rates:
    """Payload rate of `route` while the routes `active` (itself included) run at once.

    DMA: min(share of the link, engines), a copy being split over the engines that the other copies leave idle, as
    copy libraries do where one engine cannot fill the path. CU kernels: the links in use, B in all, are filled to
    the fraction 1 - exp(-c rate_per_cu / B) by c CUs (saturating; derived from RCCL's rate against channels).
    """
    capacity = links(system.node)
    shares = [
        np.asarray(capacity[name]) / (load * sum(name in other.loads for other in active) or 1)
        for name, load in route.loads.items()
    ]
    link = np.asarray(np.min(np.broadcast_arrays(*shares), axis=0))
    if by.mover == "dma":
        dma = system.gpu.dma
        engine = np.asarray(dma.bytes_per_s) * max(1, dma.num_engines // len(active))
        bound = "DMA engine" if np.all(engine < link) else "link"
        return Rates(np.minimum(link, engine), bound)
    filled = _cu_fill(system, active, by)
    return Rates(link * system.gpu.cu_copy.link_efficiency * filled, "link" if np.all(filled > 0.95) else "copy CUs")


def _cu_fill(system: System, active: Sequence[Route], by: Movement) -> NDArray[np.float64]:
    copy = system.gpu.cu_copy
    used = {name for other in active for name in other.loads}
    capacity = links(system.node)
    total = sum(np.asarray(capacity[name]) for name in sorted(used)) * copy.link_efficiency
    factor = copy.all_to_all_factor if by.pattern == "all_to_all" else 1.0
    return np.asarray(1 - np.exp(-np.asarray(by.cus) * copy.bytes_per_s_per_cu * factor / total))
