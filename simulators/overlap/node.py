"""Simulated GPUs of a node: one that stands for all of them, or every GPU with its own shards.

A schedule lowers through a `SimulatedNode`, independent of this choice. On the whole node each GPU has its own HBM, CUs
and incoming links, a transfer reads the HBM of the sender and writes that of the receiver, and loads the directed links
(or the ports at both ends of a switch) on its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel

from dse.values import leaves
from simulators.hardware.machine import System
from simulators.hardware.network import Pattern, Route, links
from simulators.hardware.schedule_system import WholeNode
from simulators.taskgraph.graph import GraphBuilder


def piece(total: ArrayLike, parts: int, index: Any) -> Any:
    """Size of part `index`, or of several, of `total` items split as evenly as whole numbers allow."""
    items: Any = total
    return items // parts + (index < items % parts)  # the first parts take the remainder


def shard(system: System, rows: ArrayLike, gpu: Any) -> Any:
    """Rows of a GPU, or of several, at the start, of `rows` in all."""
    count = system.node.num_gpus
    even = piece(rows, count, gpu)
    if not isinstance(system, WholeNode) or not system.imbalance:
        return even
    return even + _shard_offset(system, rows, gpu + 1) - _shard_offset(system, rows, gpu)


def _shard_offset(system: WholeNode, rows: ArrayLike, gpu: Any) -> NDArray[np.int64]:
    """Rows of the GPUs before one, or several, beyond their even shares: the sum of a linear ramp."""
    count = system.node.num_gpus
    shares = gpu * (gpu - count) / (count * (count - 1)) * system.imbalance
    # whole rows; offsets are rounded, so that shards add up
    return np.asarray(np.rint(np.asarray(rows) * shares), np.int64)


def least_shard(system: System, rows: ArrayLike) -> Any:
    """Rows of the GPU with the smallest shard."""
    gpus = np.arange(system.node.num_gpus).reshape(-1, *(1,) * np.ndim(rows))
    return np.min(shard(system, rows, gpus), axis=0)


class SimulatedNode(Protocol):
    """Simulated GPUs and their resources."""

    @property
    def gpus(self) -> Sequence[int]:
        """Indices of the GPUs."""

    @property
    def hbm(self) -> Sequence[int]:
        """Resource of each GPU's HBM."""

    @property
    def cu(self) -> Sequence[int]:
        """Resource of each GPU's CUs."""

    def shard_rows(self, rows: ArrayLike, peer: int) -> Any:
        """Rows of the GPU `peer` places before; along a first axis if several GPUs are simulated."""

    def for_gpu(self, value: Any, gpu: int) -> Any:
        """Select a GPU's part of a number that may have a first axis of GPUs."""

    def uses(self, route: Route, gpu: int) -> dict[int, ArrayLike]:
        """Loads of links and HBM per byte on its path to a GPU."""

    def sources(self, route: Route, gpu: int) -> list[tuple[int, int]]:
        """Transfers (GPU, peer) that bring a route's data to the neighbour that forwards it."""

    def task_name(self, label: str, gpu: int) -> str:
        """Name of a task."""


class NodeGraph:
    """Graph of a node under construction: a task is added on each simulated GPU at once, and the first stands for all.

    submissions: what the host has submitted for these tasks.
    """

    def __init__(self, system: System, pattern: Pattern, numbers: Sequence[BaseModel]) -> None:
        self.builder = GraphBuilder()
        self.machine = _machine(self.builder, system, pattern, numbers)
        self.submissions: Any = 0.0
        self._copies: dict[int, Mapping[int, int]] = {}

    def on_each(self, add: Callable[[int], int]) -> int:
        """Add a task on each GPU; return the first one."""
        tasks = {gpu: add(gpu) for gpu in self.machine.gpus}
        first = tasks[self.machine.gpus[0]]
        self._copies[first] = tasks
        return first

    def on(self, gpu: int, tasks: Sequence[int]) -> list[int]:
        """Tasks of a GPU among those that the given tasks stand for."""
        return [self._copies[task][gpu] for task in tasks]

    def by_gpu(self, task: int) -> Mapping[int, int]:
        """Tasks that a task stands for, by GPU."""
        return self._copies[task]


def _machine(build: GraphBuilder, system: System, pattern: Pattern, numbers: Sequence[BaseModel]) -> SimulatedNode:
    """Build the machine of a system. numbers: models with all numbers of the design, some of them arrays."""
    if isinstance(system, WholeNode):
        return _NodeOfAll(build, system, pattern, rank=max(map(_rank, numbers)))
    return _SymmetricNode(build, system)


def _rank(model: BaseModel) -> int:
    return max((value.ndim for _, value, _ in leaves(model) if isinstance(value, np.ndarray)), default=0)


class _SymmetricNode:
    """One GPU of a symmetric node: it sends as much as it receives, so its HBM carries the traffic of both ends."""

    gpus: Sequence[int] = (0,)

    def __init__(self, build: GraphBuilder, system: System) -> None:
        self._system = system
        self.hbm = [build.resource("hbm", system.gpu.hbm_bytes_per_s)]
        self.cu = [build.resource("cu", system.gpu.num_cus)]
        self._links = {name: build.resource(name, value) for name, value in links(system.node).items()}

    def shard_rows(self, rows: ArrayLike, peer: int) -> Any:
        return shard(self._system, rows, peer)

    def for_gpu(self, value: Any, gpu: int) -> Any:
        return value

    def uses(self, route: Route, gpu: int) -> dict[int, ArrayLike]:
        loads: dict[int, ArrayLike] = {self._links[link]: load for link, load in route.loads.items()}
        return loads | {self.hbm[0]: 2.0}  # read at this end for a peer, written at this end from a peer

    def sources(self, route: Route, gpu: int) -> list[tuple[int, int]]:
        return []

    def task_name(self, label: str, gpu: int) -> str:
        return label


class _NodeOfAll:
    """All GPUs. rank: axes of the grid of designs; numbers that differ between GPUs have one more axis, the first.

    The GPU `peer` places before GPU g is g - peer: clockwise is towards larger numbers.
    """

    def __init__(self, build: GraphBuilder, system: WholeNode, pattern: Pattern, *, rank: int) -> None:
        self._system, self._rank = system, rank
        # on a ring, shards go from neighbour to neighbour
        self._build, self._forwards = build, system.node.topology == "ring" and pattern != "all_to_all"
        self._links: dict[str, int] = {}
        self.gpus: Sequence[int] = range(system.node.num_gpus)
        self.hbm = [build.resource(f"hbm.{gpu}", system.gpu.hbm_bytes_per_s) for gpu in self.gpus]
        self.cu = [build.resource(f"cu.{gpu}", system.gpu.num_cus) for gpu in self.gpus]

    def shard_rows(self, rows: ArrayLike, peer: int) -> Any:
        owners = (np.array(self.gpus) - peer) % len(self.gpus)
        # one axis of GPUs before those of designs
        return shard(self._system, rows, owners.reshape(-1, *(1,) * max(self._rank, np.ndim(rows))))

    def for_gpu(self, value: Any, gpu: int) -> Any:
        return value[gpu] if np.ndim(value) > self._rank else value

    def uses(self, route: Route, gpu: int) -> dict[int, ArrayLike]:
        loads: dict[int, ArrayLike] = {self.hbm[gpu]: 1.0}
        for link, share in self._link_shares(route).items():
            for name in self._crossed_links(link, route, gpu):
                loads[self._link(name, link)] = share
            reader = self.hbm[self._sender(link, route, gpu)]
            loads[reader] = np.add(loads.get(reader, 0.0), share)  # a GPU may read for several links
        return loads

    def _link_shares(self, route: Route) -> dict[str, float]:
        """Share of a route's bytes on each of its incoming links."""
        total = sum(route.loads.values())
        return {link: load / total for link, load in route.loads.items()}

    def _sender(self, link: str, route: Route, gpu: int) -> int:
        """GPU that reads the data that a GPU writes: the neighbour that forwards it, or its first owner."""
        # clockwise data comes from the GPU before
        step = {"link.cw": -1, "link.ccw": 1}[link] if self._forwards else -route.peer
        return (gpu + step) % len(self.gpus)

    def _crossed_links(self, link: str, route: Route, gpu: int) -> list[str]:
        """Directed links on a path, named by the GPU at their receiving end."""
        count, topology = len(self.gpus), self._system.node.topology
        if topology == "mesh":
            return [f"link.{self._sender(link, route, gpu)}.{gpu}"]
        if topology in ("switch", "pcie"):
            return [f"port.in.{gpu}", f"port.out.{self._sender(link, route, gpu)}"]
        distance = route.peer if link == "link.cw" else count - route.peer
        back = -1 if link == "link.cw" else 1
        hops = range(1 if self._forwards else distance)  # a forwarded shard crosses one link at a time
        return [f"{link}.{(gpu + back * hop) % count}" for hop in hops]

    def _link(self, name: str, kind: str) -> int:
        """Resource of a directed link."""
        if name not in self._links:
            self._links[name] = self._build.resource(name, links(self._system.node)[kind])
        return self._links[name]

    def sources(self, route: Route, gpu: int) -> list[tuple[int, int]]:
        if not self._forwards:
            return []
        count, transfers = len(self.gpus), []
        for link in route.loads:
            nearer = route.peer - 1 if link == "link.cw" else route.peer + 1  # the same shard, one neighbour earlier
            if nearer % count:  # the owner itself needs no transfer
                transfers.append((self._sender(link, route, gpu), nearer))
        return transfers

    def task_name(self, label: str, gpu: int) -> str:
        return f"GPU {gpu}: {label}"
