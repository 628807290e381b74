"""Which GPUs of a node are simulated: one that stands for all of them, or every one with shards of its own.

A schedule lowers through a `Machine` and does not know which. On the whole node each GPU has its own HBM, CUs and
incoming links, a transfer reads the HBM of the GPU that sends and writes that of the one that receives, and loads the
directed links (or the ports at both ends of a switch) that lie on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, Field

from dse.units import Number
from dse.values import leaves
from simulators.costs.transfer import Route, links
from simulators.hardware.system import System
from simulators.taskgraph.graph import GraphBuilder
from simulators.workloads.operators import Pattern


class WholeNode(System):
    """A system whose GPUs are all simulated.

    imbalance: the largest share of the rows over the mean share, less one. Shares rise linearly from GPU to GPU, from
    1 - imbalance to 1 + imbalance of the mean, and are whole rows.
    """

    imbalance: Annotated[Number, Field(ge=0, lt=1)]

    @classmethod
    def of(cls, system: System, imbalance: float) -> WholeNode:
        """The same system (numbers may be arrays over a grid), seen whole."""
        return cls.model_construct(**dict(system), imbalance=imbalance)


def piece(total: ArrayLike, parts: int, index: int) -> Any:
    """Size of part `index` of `total` items split as evenly as whole numbers allow."""
    whole: Any = total
    return whole // parts + (index < whole % parts)


def shard(system: System, rows: ArrayLike, gpu: int) -> Any:
    """Rows that a GPU holds at the start, of `rows` in all."""
    count = system.node.num_gpus
    even = piece(rows, count, gpu)
    if not isinstance(system, WholeNode) or not system.imbalance:
        return even
    return even + _moved(system, rows, gpu + 1) - _moved(system, rows, gpu)


def _moved(system: WholeNode, rows: ArrayLike, gpu: int) -> NDArray[np.int64]:
    """By how many rows the GPUs before this one hold more than their even shares: the sum of a linear ramp."""
    count = system.node.num_gpus
    shares = gpu * (gpu - count) / (count * (count - 1)) * system.imbalance
    return np.asarray(np.rint(np.asarray(rows) * shares), np.int64)


def least_shard(system: System, rows: ArrayLike) -> Any:
    """Rows of the GPU that holds the fewest."""
    shards = [shard(system, rows, gpu) for gpu in range(system.node.num_gpus)]
    return np.min(np.stack(shards), axis=0)


class Machine(Protocol):
    """The GPUs that are simulated, and their resources."""

    @property
    def gpus(self) -> Sequence[int]:
        """Their numbers."""

    @property
    def hbm(self) -> Sequence[int]:
        """The HBM of each."""

    @property
    def cu(self) -> Sequence[int]:
        """The CUs of each."""

    def shard_rows(self, rows: ArrayLike, peer: int) -> Any:
        """Rows of the GPU `peer` places before; where several GPUs are simulated, along a first axis."""

    def for_gpu(self, value: Any, gpu: int) -> Any:
        """A GPU's own part of a number that may be along a first axis of GPUs."""

    def uses(self, route: Route, gpu: int) -> dict[int, ArrayLike]:
        """Links and HBM that a byte loads on its way to a GPU."""

    def sources(self, route: Route, gpu: int) -> list[tuple[int, int]]:
        """(GPU, peer) of the transfers by which what comes over a route has got to who forwards it."""

    def task_name(self, label: str, gpu: int) -> str:
        """A task's name."""


def machine(build: GraphBuilder, system: System, pattern: Pattern, numbers: Sequence[BaseModel]) -> Machine:
    """The GPUs of a system as it is seen. numbers: models that hold all numbers of the design, some of them arrays."""
    if isinstance(system, WholeNode):
        return _AllGpus(build, system, pattern, rank=max(map(_rank, numbers)))
    return _OneGpu(build, system)


def _rank(model: BaseModel) -> int:
    return max((value.ndim for _, value, _ in leaves(model) if isinstance(value, np.ndarray)), default=0)


class _OneGpu:
    """One GPU of a symmetric node: what it receives it also sends, and both ends' HBM traffic is its own."""

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
        found: dict[int, ArrayLike] = {self._links[link]: load for link, load in route.loads.items()}
        return found | {self.hbm[0]: 2.0}  # read at this end for a peer, written at this end from a peer

    def sources(self, route: Route, gpu: int) -> list[tuple[int, int]]:
        return []

    def task_name(self, label: str, gpu: int) -> str:
        return label


class _AllGpus:
    """All GPUs. rank: axes of the grid of designs; numbers that differ from GPU to GPU have one more, the first.

    The GPU `peer` places before GPU g is g - peer: clockwise is towards larger numbers.
    """

    def __init__(self, build: GraphBuilder, system: WholeNode, pattern: Pattern, *, rank: int) -> None:
        self._system, self._rank = system, rank
        self._build, self._forwards = build, system.node.topology == "ring" and pattern != "all_to_all"
        self._links: dict[str, int] = {}
        self.gpus: Sequence[int] = range(system.node.num_gpus)
        self.hbm = [build.resource(f"hbm.{gpu}", system.gpu.hbm_bytes_per_s) for gpu in self.gpus]
        self.cu = [build.resource(f"cu.{gpu}", system.gpu.num_cus) for gpu in self.gpus]

    def shard_rows(self, rows: ArrayLike, peer: int) -> Any:
        held = np.stack([shard(self._system, rows, (gpu - peer) % len(self.gpus)) for gpu in self.gpus])
        missing = self._rank + 1 - held.ndim
        return held.reshape(len(self.gpus), *(1,) * missing, *held.shape[1:])

    def for_gpu(self, value: Any, gpu: int) -> Any:
        return value[gpu] if np.ndim(value) > self._rank else value

    def uses(self, route: Route, gpu: int) -> dict[int, ArrayLike]:
        found: dict[int, ArrayLike] = {self.hbm[gpu]: 1.0}
        for link, share in self._ways(route).items():
            for name in self._crossed(link, route, gpu):
                found[self._link(name, link)] = share
            reader = self.hbm[self._sender(link, route, gpu)]
            found[reader] = np.add(found.get(reader, 0.0), share)
        return found

    def _ways(self, route: Route) -> dict[str, float]:
        """The share of a route's bytes that goes over each of the links by which it arrives."""
        total = sum(route.loads.values())
        return {link: load / total for link, load in route.loads.items()}

    def _sender(self, link: str, route: Route, gpu: int) -> int:
        """Who reads what a GPU writes: the neighbour that forwards it, or the GPU that had it at the start."""
        step = {"link.cw": -1, "link.ccw": 1}[link] if self._forwards else -route.peer
        return (gpu + step) % len(self.gpus)

    def _crossed(self, link: str, route: Route, gpu: int) -> list[str]:
        """Directed links, by the GPU at whose end they are counted, that a way crosses."""
        count, topology = len(self.gpus), self._system.node.topology
        if topology == "mesh":
            return [f"link.{self._sender(link, route, gpu)}.{gpu}"]
        if topology == "switch":
            return [f"port.in.{gpu}", f"port.out.{self._sender(link, route, gpu)}"]
        distance = route.peer if link == "link.cw" else count - route.peer
        back = -1 if link == "link.cw" else 1
        hops = range(1 if self._forwards else distance)
        return [f"{link}.{(gpu + back * hop) % count}" for hop in hops]

    def _link(self, name: str, kind: str) -> int:
        """The resource of a directed link."""
        if name not in self._links:
            self._links[name] = self._build.resource(name, links(self._system.node)[kind])
        return self._links[name]

    def sources(self, route: Route, gpu: int) -> list[tuple[int, int]]:
        if not self._forwards:
            return []
        count, found = len(self.gpus), []
        for link in route.loads:
            nearer = route.peer - 1 if link == "link.cw" else route.peer + 1
            if nearer % count:
                found.append((self._sender(link, route, gpu), nearer))
        return found

    def task_name(self, label: str, gpu: int) -> str:
        return f"GPU {gpu}: {label}"
