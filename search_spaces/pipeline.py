"""What the overlap schedules share: transfers in steps, GEMM chunks in one in-order stream on each GPU.

Which GPUs are simulated is the system's to say (`simulators/node.py`): a schedule is written as one GPU sees it. Rows,
columns and bytes may be arrays over designs, and over GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from dse.problems import ConfigError
from dse.values import Integer, knob
from simulators.design import Rule, ScheduleKnobs
from simulators.gemm import GemmCost, gemm_cost
from simulators.graph import GraphBuilder
from simulators.node import least_shard, machine, piece
from simulators.system import System
from simulators.transfer import Movement, Mover, Route, rate, routes
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
    bare = np.less(least_shard(system, rows), 1)
    few = "gives some of the GPUs no row (system.node.num_gpus = {0})"
    many = "splits n over more GPUs than there are (system.node.num_gpus = {0})"
    path = "workload.operators"
    return [
        Rule(f"{path}.gather.rows", bare, few, rows, (gpus,), "use more rows or fewer GPUs"),
        Rule(f"{path}.gemm.shards", np.greater(shards, gpus), many, shards, (gpus,), "leave it out for all of them"),
    ]


__all__ = ["MoverKnobs", "Pipeline", "piece"]


class Pipeline:
    """Builds the graph of one collective overlapped with the GEMM that consumes it.

    comm_cus: CUs of the communication kernels (ignored for DMA). GEMM chunks run in order, one at a time; transfers
    run in order on each engine, or kernel after kernel when CUs move them. A task that is handed out stands for that
    of every GPU.
    """

    def __init__(self, system: System, workload: Workload, *, knobs: MoverKnobs, comm_cus: ArrayLike | None) -> None:
        self.system, self.mover = system, knobs.mover
        self.comm_cus: ArrayLike = 0 if comm_cus is None or knobs.mover == "dma" else comm_cus
        self.collective, self.op = workload.collective_then_gemm()
        self.movement = Movement(knobs.mover, self.comm_cus, self.collective.pattern)
        self.routes = routes(system.node, self.collective.pattern)
        self.element_bytes = self.op.element_bytes
        self.graph = GraphBuilder()
        self._machine = machine(self.graph, system, self.collective.pattern, (system, workload, knobs))
        first, second = {"equal": (0, 0), "communication": (0, 1), "compute": (1, 0)}[knobs.priority]
        self._comm_class, self._compute_class = first, second
        self._copies: dict[tuple[int, ...], Mapping[str, Any]] = {}
        self._chunks: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        self._each: dict[int, Mapping[int, int]] = {}
        self._engines: dict[tuple[int, int], int] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        self._last_step: list[int] = []
        self._last_gemm: list[int] = []

    @property
    def num_gpus(self) -> int:
        """GPUs of the node."""
        return self.system.node.num_gpus

    def shard_rows(self, gpu: int) -> Any:
        """Rows of A that the GPU `gpu` places before holds at the start (0 is this one)."""
        return self._machine.shard_rows(self.collective.rows, gpu)

    def payload(self, rows: ArrayLike, depth: ArrayLike) -> Any:
        """Bytes of a block of A."""
        blocks: Any = rows
        return 1.0 * self.element_bytes * blocks * depth

    def _on_each(self, add: Callable[[int], int]) -> int:
        """Add a task of each GPU; the first one stands for all."""
        tasks = {gpu: add(gpu) for gpu in self._machine.gpus}
        first = tasks[self._machine.gpus[0]]
        self._each[first] = tasks
        return first

    def _on(self, gpu: int, tasks: Sequence[int]) -> list[int]:
        """A GPU's own among the tasks that these stand for."""
        return [self._each[task][gpu] for task in tasks]

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
        setup: dict[str, Any] = {
            "delay": self.system.gpu.cu_copy.setup_s,
            "lane": "communication",
            "limiter": "launch",
        }

        def add(gpu: int) -> int:
            name, after = self._machine.named(f"launch {label}", gpu), self._on(gpu, self._last_step)
            return self.graph.task(name, "launch", after=after, gpu=gpu, **setup)

        return [self._on_each(add)]

    def _turn(self, label: str, turn: list[tuple[Route, ArrayLike]], before: list[int]) -> list[int]:
        at_once = len(turn) if self.mover == "cu" else min(len(turn), self.system.gpu.dma.num_engines)
        active = [route for route, _ in turn[:at_once]]
        tasks = []
        for position, item in enumerate(turn):
            engine = -1 if self.mover == "cu" else position % at_once
            tasks.append(self._transfer(label, item, active=active, before=before, engine=engine))
        for (route, _), task in zip(turn, tasks, strict=True):
            self._arrived |= {(gpu, route.peer): own for gpu, own in self._each[task].items()}
        return tasks

    def _transfer(
        self, label: str, item: tuple[Route, ArrayLike], *, active: list[Route], before: list[int], engine: int
    ) -> int:
        """A transfer over one route; on a DMA engine (-1: by a kernel) after the one before it there."""
        route, payload = item

        def add(gpu: int) -> int:
            queued = [self._engines[gpu, engine]] if (gpu, engine) in self._engines else []
            forwarded = [self._arrived[one] for one in self._machine.sources(route, gpu) if one in self._arrived]
            amount = self._machine.own(payload, gpu)
            return self.graph.task(
                self._machine.named(f"{label} from {route.peer}", gpu),
                "transfer",
                after=[*self._on(gpu, before), *queued, *forwarded],
                uses=self._uses(route, active, gpu),
                work=amount,
                staged_bytes=amount,
                moved_bytes=amount,
                gpu=gpu,
                **self._copy(route, active),
            )

        task = self._on_each(add)
        if engine >= 0:
            self._engines |= {(gpu, engine): own for gpu, own in self._each[task].items()}
        return task

    def _uses(self, route: Route, active: list[Route], gpu: int) -> dict[int, ArrayLike]:
        """What a byte over a route to a GPU needs."""
        found = self._machine.uses(route, gpu)
        if self.mover == "cu":
            copy = self._copy(route, active)
            found[self._machine.cu[gpu]] = copy["cus"] / copy["cap"]
        return found

    def _copy(self, route: Route, active: list[Route]) -> Mapping[str, Any]:
        """What transfers over a route have in common while the routes `active` run at once."""
        key = (route.peer, *(other.peer for other in active))
        if key in self._copies:
            return self._copies[key]
        pace = rate(self.system, route, active, by=self.movement)
        own = len(route.loads) == 1 and "port" not in route.loads
        self._copies[key] = {
            "delay": 0.0 if self.mover == "cu" else self.system.gpu.dma.setup_s,
            "cap": pace.bytes_per_s,
            "weight": 0.5,  # consumption-fair at HBM: equal HBM bytes/s at the bottleneck
            "priority": self._comm_class,
            "lane": next(iter(route.loads)) if own else f"peer.{route.peer}",
            "limiter": pace.limiter,
            "cus": np.asarray(self.comm_cus) / len(active),
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
        chunks = self._chunk(size, overlapped=overlapped, accumulate=accumulate)

        def add(gpu: int) -> int:
            name, own = self._machine.named(label, gpu), self._on(gpu, before)
            task = self.graph.task(name, "gemm", after=own, work=1.0, lane="compute", gpu=gpu, **chunks[gpu])
            self.graph.frees(task, self._on(gpu, after))
            return task

        self._last_gemm = [self._on_each(add)]
        return self._last_gemm[0]

    def _chunk(
        self, size: tuple[ArrayLike, ArrayLike], *, overlapped: bool, accumulate: bool
    ) -> list[Mapping[str, Any]]:
        """What GEMM chunks of one size have in common, for each GPU."""
        key = (overlapped, accumulate, *(np.asarray(value).tobytes() for value in size))
        if key not in self._chunks:
            gpu = self.system.gpu
            cus = gpu.num_cus - np.asarray(self.comm_cus) * overlapped
            shape = (size[0], self.op.local_n, size[1])
            cost = gemm_cost(gpu, shape, cus=cus, element_bytes=self.element_bytes, accumulate=accumulate)
            self._chunks[key] = [self._cost(cost, cus, one) for one in self._machine.gpus]
        return self._chunks[key]

    def _cost(self, cost: GemmCost, cus: ArrayLike, gpu: int) -> Mapping[str, Any]:
        seconds, traffic, flop = (self._machine.own(part, gpu) for part in (cost.seconds, cost.hbm_bytes, cost.flop))
        memory_bound = bool(np.all(traffic / self.system.gpu.hbm_bytes_per_s > 0.5 * seconds))
        return {
            "uses": {self._machine.hbm[gpu]: traffic, self._machine.cu[gpu]: cus * seconds},
            "delay": self.system.gpu.kernel_launch_s,
            "cap": 1 / seconds,
            "weight": 1 / traffic,
            "priority": self._compute_class,
            "limiter": "HBM" if memory_bound else "compute",
            "flop": flop,
        }
