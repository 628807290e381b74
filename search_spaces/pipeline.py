"""What the overlap schedules share: transfers in steps, GEMM chunks in one in-order stream, on one representative GPU.

The node is symmetric, so every GPU does the same; what this GPU receives it also sends, and both ends' HBM traffic
falls on its own HBM. Rows, columns and bytes may be arrays over designs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from dse.problems import ConfigError
from dse.values import Integer, knob
from simulators.design import Rule, ScheduleKnobs
from simulators.gemm import gemm_cost
from simulators.graph import GraphBuilder
from simulators.system import System
from simulators.transfer import Movement, Mover, Route, links, rate, routes
from simulators.workload import Workload

Priority = Literal["equal", "communication", "compute"]


class MoverKnobs(ScheduleKnobs):
    """Who moves the data.

    mover: `dma` engines, or kernels on `comm_cus` reserved `cu`s. priority: whose memory requests go first.
    """

    mover: Annotated[Mover, knob(structural=True)]
    comm_cus: Annotated[Integer | None, knob(when={"mover": "cu"}, ge=1, le=4096)]
    priority: Annotated[Priority, knob(structural=True)] = "equal"

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """The workload must be an overlap with rows for every GPU, and communication must leave CUs for compute."""
        found = _shape_rules(system, workload)
        if self.comm_cus is not None:
            held, cus = self.comm_cus, system.gpu.num_cus
            rule = "leaves no CU for compute (system.gpu.num_cus = {0})"
            broken = np.asarray(held) >= np.asarray(cus)
            found.append(Rule("schedule.comm_cus", broken, rule, held, (cus,), "reserve fewer"))
        return found


def _shape_rules(system: System, workload: Workload) -> list[Rule]:
    try:
        moved, gemm = workload.collective_then_gemm()
    except ConfigError as error:
        return [Rule.of(problem) for problem in error.problems]
    gpus, rows, shards = system.node.num_gpus, moved.rows, gemm.shards
    few = "gives some of the GPUs no row (system.node.num_gpus = {0})"
    many = "splits n over more GPUs than there are (system.node.num_gpus = {0})"
    path = "workload.operators"
    return [
        Rule(f"{path}.gather.rows", np.less(rows, gpus), few, rows, (gpus,), "use more rows or fewer GPUs"),
        Rule(f"{path}.gemm.shards", np.greater(shards, gpus), many, shards, (gpus,), "leave it out for all of them"),
    ]


def piece(total: ArrayLike, parts: int, index: int) -> Any:
    """Size of part `index` of `total` items split as evenly as whole numbers allow."""
    whole: Any = total
    return whole // parts + (index < whole % parts)


class Pipeline:
    """Builds the graph of one collective overlapped with the GEMM that consumes it.

    comm_cus: CUs of the communication kernels (ignored for DMA). GEMM chunks run in order, one at a time; transfers
    run in order on each engine, or kernel after kernel when CUs move them.
    """

    def __init__(self, system: System, workload: Workload, *, knobs: MoverKnobs, comm_cus: ArrayLike | None) -> None:
        self.system, self.mover = system, knobs.mover
        self.comm_cus: ArrayLike = 0 if comm_cus is None or knobs.mover == "dma" else comm_cus
        self.collective, self.op = workload.collective_then_gemm()
        self.movement = Movement(knobs.mover, self.comm_cus, self.collective.pattern)
        self.routes = routes(system.node, self.collective.pattern)
        self.element_bytes = self.op.element_bytes
        self.graph = GraphBuilder()
        self.hbm = self.graph.resource("hbm", system.gpu.hbm_bytes_per_s)
        self.cu = self.graph.resource("cu", system.gpu.num_cus)
        self.links = {name: self.graph.resource(name, value) for name, value in links(system.node).items()}
        first, second = {"equal": (0, 0), "communication": (0, 1), "compute": (1, 0)}[knobs.priority]
        self._comm_class, self._compute_class = first, second
        self._copies: dict[tuple[int, ...], Mapping[str, Any]] = {}
        self._chunks: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        self._engines: dict[int, int] = {}
        self._last_step: list[int] = []
        self._last_gemm: list[int] = []

    @property
    def num_gpus(self) -> int:
        """GPUs of the node."""
        return self.system.node.num_gpus

    def shard_rows(self, gpu: int) -> Any:
        """Rows of A that GPU `gpu` holds at the start (0 is the representative itself)."""
        return piece(self.collective.rows, self.num_gpus, gpu)

    def payload(self, rows: ArrayLike, depth: ArrayLike) -> Any:
        """Bytes of a block of A."""
        blocks: Any = rows
        return 1.0 * self.element_bytes * blocks * depth

    def step(self, label: str, amounts: Sequence[tuple[Route, ArrayLike]]) -> list[int]:
        """Move `bytes` over each route; the transfers, in the order given.

        Routes of one turn run at once, turns (distances on a ring) one after another.
        """
        before = self._kernel(label) if self.mover == "cu" else []
        found: dict[int, int] = {}
        for _, group in groupby(sorted(amounts, key=lambda item: item[0].turn), key=lambda item: item[0].turn):
            turn = list(group)
            tasks = self._turn(label, turn, before)
            found |= dict(zip((route.peer for route, _ in turn), tasks, strict=True))
            before = tasks if any(route.turn for route, _ in amounts) else before
        self._last_step = list(found.values())
        return [found[route.peer] for route, _ in amounts]

    def _kernel(self, label: str) -> list[int]:
        """The launch of a communication kernel: after the one before it, on the same stream."""
        launch: dict[str, Any] = {
            "delay": self.system.gpu.cu_copy.setup_s,
            "lane": "communication",
            "limiter": "launch",
        }
        return [self.graph.task(f"launch {label}", "launch", after=self._last_step, **launch)]

    def _turn(self, label: str, turn: list[tuple[Route, ArrayLike]], before: list[int]) -> list[int]:
        at_once = len(turn) if self.mover == "cu" else min(len(turn), self.system.gpu.dma.num_engines)
        active = [route for route, _ in turn[:at_once]]
        tasks = []
        for position, (route, payload) in enumerate(turn):
            engine = position % at_once
            after = before if self.mover == "cu" else [*before, *self._queued(engine)]
            tasks.append(self._transfer(f"{label} from {route.peer}", route, payload, active=active, after=after))
            self._engines[engine] = tasks[-1]
        return tasks

    def _queued(self, engine: int) -> list[int]:
        return [self._engines[engine]] if engine in self._engines else []

    def _transfer(
        self, name: str, route: Route, payload: ArrayLike, *, active: list[Route], after: Sequence[int]
    ) -> int:
        return self.graph.task(
            name,
            "transfer",
            after=after,
            work=payload,
            staged_bytes=payload,
            moved_bytes=payload,
            **self._copy(route, active),
        )

    def _copy(self, route: Route, active: list[Route]) -> Mapping[str, Any]:
        """What transfers over a route have in common while the routes `active` run at once."""
        key = (route.peer, *(other.peer for other in active))
        if key in self._copies:
            return self._copies[key]
        pace = rate(self.system, route, active, by=self.movement)
        cus = np.asarray(self.comm_cus) / len(active)
        uses: dict[int, ArrayLike] = {self.links[link]: load for link, load in route.loads.items()}
        uses[self.hbm] = 2.0  # read at this end for a peer, written at this end from a peer
        if self.mover == "cu":
            uses[self.cu] = cus / pace.bytes_per_s
        own = len(route.loads) == 1 and "port" not in route.loads
        self._copies[key] = {
            "uses": uses,
            "delay": 0.0 if self.mover == "cu" else self.system.gpu.dma.setup_s,
            "cap": pace.bytes_per_s,
            "weight": 0.5,  # consumption-fair at HBM: equal HBM bytes/s at the bottleneck
            "priority": self._comm_class,
            "lane": next(iter(route.loads)) if own else f"peer.{route.peer}",
            "limiter": pace.limiter,
            "cus": cus,
        }
        return self._copies[key]

    def gemm(
        self,
        label: str,
        size: tuple[ArrayLike, ArrayLike],
        *,
        after: Sequence[int] = (),
        overlapped: bool = True,
        accumulate: bool = False,
    ) -> int:
        """A GEMM chunk of size (rows, depth) that consumes the transfers `after`, next in the compute stream.

        Data moved by a kernel counts as arrived when the kernel ends; a DMA copy signals for itself.
        overlapped: communication kernels are resident while it runs, so their CUs are not granted to it.
        """
        kernel_end = self._last_step if self.mover == "cu" and after else []
        before = [*after, *kernel_end, *self._last_gemm]
        chunk = self._chunk(size, overlapped=overlapped, accumulate=accumulate)
        task = self.graph.task(label, "gemm", after=before, work=1.0, lane="compute", **chunk)
        self.graph.frees(task, after)
        self._last_gemm = [task]
        return task

    def _chunk(self, size: tuple[ArrayLike, ArrayLike], *, overlapped: bool, accumulate: bool) -> Mapping[str, Any]:
        """What GEMM chunks of one size have in common."""
        key = (overlapped, accumulate, *(np.asarray(value).tobytes() for value in size))
        if key in self._chunks:
            return self._chunks[key]
        gpu = self.system.gpu
        cus = gpu.num_cus - np.asarray(self.comm_cus) * overlapped
        shape = (size[0], self.op.local_n, size[1])
        cost = gemm_cost(gpu, shape, cus=cus, element_bytes=self.element_bytes, accumulate=accumulate)
        memory_bound = bool(np.all(cost.hbm_bytes / gpu.hbm_bytes_per_s > 0.5 * cost.seconds))
        self._chunks[key] = {
            "uses": {self.hbm: cost.hbm_bytes, self.cu: cus * cost.seconds},
            "delay": gpu.kernel_launch_s,
            "cap": 1 / cost.seconds,
            "weight": 1 / cost.hbm_bytes,
            "priority": self._compute_class,
            "limiter": "HBM" if memory_bound else "compute",
            "flop": cost.flop,
        }
        return self._chunks[key]
