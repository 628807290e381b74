"""Common parts of overlap schedules: transfers in steps, GEMM chunks in one in-order stream on each GPU.

A schedule is written from the view of one GPU; the system decides the GPUs that are simulated
(`simulators/overlap/node.py`). Rows, columns and bytes may be arrays over designs, and over GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from search_spaces.comm_knobs import CommEngineKnobs
from simulators.costs.chip import Chip
from simulators.costs.gemm_cost import GemmCost, GemmShape, beside_cu_copies, gemm_cost, gemm_gpu
from simulators.costs.gemm_waves import WaveGpu
from simulators.costs.transfer import (
    Route,
    TransferMode,
    accumulate_hbm_bytes,
    late_start_s,
    library_cus,
    rate,
    routes,
    setup,
    slowed_beside_gemm,
)
from simulators.hardware.system import System
from simulators.overlap.node import machine, piece
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.workloads.operators import Workload

__all__ = ["Pipeline", "piece"]
_WAIT = "waiting"
_NO_WAIT_S = 1e-12  # length of a kernel's wait while no GEMM runs: as good as nothing, and work that engines can run


class Pipeline:
    """Builder of the graph of one collective overlapped with one GEMM.

    comm_cus: CUs of the communication kernels (ignored for DMA). masked: these CUs are taken from compute while an
    `overlapped` chunk runs, whether or not data moves; otherwise only while data moves. GEMM chunks run in order, one
    at a time; transfers run in order on each engine, or kernel after kernel if CUs move them. A returned task stands
    for that of every GPU.
    """

    def __init__(
        self,
        system: System,
        workload: Workload,
        *,
        knobs: CommEngineKnobs,
        comm_cus: ArrayLike | None,
        masked: bool = True,
    ) -> None:
        self.system, self.comm_engine, self._near = system, knobs.comm_engine, knobs.near_memory
        self._adding = accumulate_hbm_bytes(system, near_memory=knobs.near_memory)
        self.comm_cus: ArrayLike = 0 if comm_cus is None or knobs.comm_engine == "dma" else comm_cus
        overlap = workload.overlap()
        self.collective, self.op, self.order = overlap.collective, overlap.gemm, overlap.order
        pattern = self.collective.pattern
        self.movement = TransferMode(knobs.comm_engine, self.comm_cus, pattern)
        self.routes = routes(system.node, pattern)
        self.element_bytes = self.collective.element_bytes
        self.graph = GraphBuilder()
        self._masked, self._withheld = masked, np.asarray(0)
        self._machine = machine(self.graph, system, pattern, (system, workload, knobs))
        first, second = {"equal": (0, 0), "communication": (0, 1), "compute": (1, 0)}[knobs.priority]
        self._comm_class, self._compute_class = first, second
        self._copies: dict[tuple[int, ...], Mapping[str, Any]] = {}
        self._chunks: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        self._gemms, self._transfers = _Groups("gemm"), _Groups("communication")
        self._waits = self.comm_engine == "cu" and bool(np.any(np.asarray(system.gpu.contention.late_start) > 0))
        self._tasks_by_gpu: dict[int, Mapping[int, int]] = {}
        self._moved: dict[int, Any] = {}
        self._queued: dict[tuple[int, int | str], int] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        self._last_step: list[int] = []
        self._last_gemm: list[int] = []

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the node."""
        return self.system.node.num_gpus

    def shard_rows(self, gpu: int) -> Any:
        """Rows of the tensor in the shard of the GPU `gpu` places before (0 is this one)."""
        return self._machine.shard_rows(self.collective.rows, gpu)

    def payload(self, rows: ArrayLike, depth: ArrayLike) -> Any:
        """Bytes of a block of the tensor; of an all-reduce both ways."""
        blocks: Any = rows
        return (2.0 if self.collective.pattern == "all_reduce" else 1.0) * self.element_bytes * blocks * depth

    def build(self) -> TaskGraph:
        """Build the graph, with the contention laws between GEMM chunks and transfers of a GPU."""
        gemms, transfers = self._gemms.items(), self._transfers.items()
        for gpu in self._machine.gpus:
            for (gemm, (factor, _)), (moved, share) in product(gemms, transfers):
                self._slow(gpu, gemm, moved, factor)
                self._slow(gpu, moved, gemm, share)
            for gemm, (factor, late_s) in gemms if self._waits else ():
                self._slow(gpu, gemm, _WAIT, factor)
                self._slow(gpu, _WAIT, gemm, 1 / np.maximum(late_s / _NO_WAIT_S, 1.0))
        return self.graph.build()

    def _slow(self, gpu: int, group: str, cause: str, factor: Any) -> None:
        """Add a contention law between groups of tasks of a GPU, unless its factor is 1."""
        gpu_factor = self._machine.for_gpu(factor, gpu)
        if np.any(np.asarray(gpu_factor) < 1):
            slowed, active = (self._machine.task_name(name, gpu) for name in (group, cause))
            self.graph.slows(slowed, while_active=active, factor=gpu_factor)

    def _on_each(self, add: Callable[[int], int]) -> int:
        """Add a task on each GPU; the first one stands for all."""
        tasks = {gpu: add(gpu) for gpu in self._machine.gpus}
        first = tasks[self._machine.gpus[0]]
        self._tasks_by_gpu[first] = tasks
        return first

    def _on(self, gpu: int, tasks: Sequence[int]) -> list[int]:
        """Tasks of a GPU among those that the given tasks stand for."""
        return [self._tasks_by_gpu[task][gpu] for task in tasks]

    def withhold(self, cus: ArrayLike) -> None:
        """Withhold CUs from all GEMMs, whether or not communication uses them."""
        self._withheld = np.asarray(cus)

    # ---------------------------------------------------------------- communication

    def step(self, label: str, amounts: Sequence[tuple[Route, ArrayLike]], *, after: Sequence[int] = ()) -> list[int]:
        """Move bytes over each route once the tasks `after` are done; return the transfers, in the order of `amounts`.

        Routes with equal `Route.step` run at once, the steps (distances on a ring) one after another.
        """
        before = self._kernel(label, after) if self.comm_engine == "cu" else list(after)
        transfers: dict[int, int] = {}
        for _, group in groupby(sorted(amounts, key=lambda item: item[0].step), key=lambda item: item[0].step):
            concurrent = list(group)
            tasks = self._add_transfers(label, concurrent, before)
            transfers |= dict(zip((route.peer for route, _ in concurrent), tasks, strict=True))
            before = tasks if any(route.step for route, _ in amounts) else before
        self._last_step = list(transfers.values())
        return [transfers[route.peer] for route, _ in amounts]

    def _kernel(self, label: str, after: Sequence[int]) -> list[int]:
        """Add the launch of a communication kernel, after the one before it on the same stream."""
        how: dict[str, Any] = {
            "delay": setup(self.system, by=self.movement),
            "lane": "communication",
            "limiter": "launch",
        }

        def add(gpu: int) -> int:
            name, before = self._machine.task_name(f"launch {label}", gpu), self._on(gpu, [*self._last_step, *after])
            return self.graph.task(name, "launch", after=before, gpu=gpu, **how)

        launched = [self._on_each(add)]
        return [self._wait(label, launched)] if self._waits else launched

    def _wait(self, label: str, launched: Sequence[int]) -> int:
        """Add the wait of a kernel that holds its CUs and moves nothing yet: no time, but while a GEMM runs."""

        def add(gpu: int) -> int:
            name, group = (self._machine.task_name(text, gpu) for text in (f"wait {label}", _WAIT))
            how: dict[str, Any] = {
                "work": 1.0,
                "cap": 1 / _NO_WAIT_S,
                "cus": self.comm_cus,
                "lane": "communication",
                "group": group,
            }
            return self.graph.task(name, "launch", after=self._on(gpu, launched), gpu=gpu, **how)

        return self._on_each(add)

    def _add_transfers(self, label: str, concurrent: list[tuple[Route, ArrayLike]], before: list[int]) -> list[int]:
        at_once = len(concurrent) if self.comm_engine == "cu" else min(len(concurrent), self.system.gpu.dma.num_engines)
        active = [route for route, _ in concurrent[:at_once]]
        share = self._collective_s(sum(np.asarray(amount) for _, amount in concurrent)) / -(-len(concurrent) // at_once)
        tasks = []
        for position, item in enumerate(concurrent):
            engines = self._engines_of(item[0], position % at_once)
            tasks.append(self._transfer(label, item, active=active, before=before, queue=(engines, share)))
        for (route, _), task in zip(concurrent, tasks, strict=True):
            self._arrived |= {(gpu, route.peer): gpu_task for gpu, gpu_task in self._tasks_by_gpu[task].items()}
        return tasks

    def _engines_of(self, route: Route, position: int) -> tuple[int | str, ...]:
        """DMA engines that a copy waits for. On a ring they are those of its links: a copy over both links has both, so
        that no later copy takes its link.
        """
        if self.comm_engine == "cu":
            return ()
        return tuple(route.loads) if route.step and self.system.gpu.dma.num_engines > 1 else (position,)

    def _transfer(
        self,
        label: str,
        item: tuple[Route, ArrayLike],
        *,
        active: list[Route],
        before: list[int],
        queue: tuple[tuple[int | str, ...], Any],
    ) -> int:
        """Add a transfer over one route. queue: its DMA engines (none: a kernel), whose earlier copies it waits for,
        and its time [s] if all links were busy.
        """
        (route, payload), (engines, share) = item, queue
        common = self._copy(route, active)

        def add(gpu: int) -> int:
            queued = [self._queued[gpu, engine] for engine in engines if (gpu, engine) in self._queued]
            forwarded = [
                self._arrived[source] for source in self._machine.sources(route, gpu) if source in self._arrived
            ]
            amount = self._machine.for_gpu(payload, gpu)
            transfer = self.graph.task(
                self._machine.task_name(f"{label} from {route.peer}", gpu),
                "transfer",
                after=[*self._on(gpu, before), *queued, *forwarded],
                uses=self._uses(route, active, gpu),
                work=amount,
                staged_bytes=amount if self._stages else 0.0,
                moved_bytes=amount,
                alone_s=amount / common["free"],
                wide_s=self._machine.for_gpu(share, gpu),
                ideal_s=self._collective_s(amount),
                gpu=gpu,
                group=self._machine.task_name(common["group"], gpu),
                **{name: value for name, value in common.items() if name not in {"free", "group"}},
            )
            self._moved[transfer] = amount
            return transfer

        task = self._on_each(add)
        self._queued |= {
            (gpu, engine): gpu_task for engine in engines for gpu, gpu_task in self._tasks_by_gpu[task].items()
        }
        return task

    def _uses(self, route: Route, active: list[Route], gpu: int) -> dict[int, ArrayLike]:
        """Use of resources per byte over a route to a GPU, with the local operand of a reduction."""
        uses = self._machine.uses(route, gpu)
        if self.comm_engine == "cu":
            copy = self._copy(route, active)
            uses[self._machine.cu[gpu]] = copy["cus"] / copy["cap"]
        if self.collective.reduces and not self.adds:
            uses[self._machine.hbm[gpu]] = np.add(uses[self._machine.hbm[gpu]], self._adding)
        return uses

    @property
    def adds(self) -> bool:
        """Flag: a separate kernel adds the operands of a reduction, as DMA engines cannot."""
        return self.comm_engine == "dma" and not self._near

    @property
    def _stages(self) -> bool:
        """Flag: incoming data is staged until it is used, not added on arrival or stored at its destination."""
        return self.order == "before" or (self.order == "after" and self.adds)

    @property
    def _free(self) -> TransferMode:
        """Transfer mode of the engine with all CUs that the library gives a kernel."""
        pattern = self.collective.pattern
        return TransferMode(self.comm_engine, library_cus(self.system, pattern), pattern)

    def _collective_s(self, amount: Any) -> Any:
        """Time [s] of `amount` bytes at the rate of a collective over all routes with all engines or CUs."""
        return amount * self._per_byte

    @cached_property
    def _per_byte(self) -> Any:
        parts: Any = 0.0
        for _, group in groupby(self.routes, key=lambda route: route.step):
            concurrent = list(group)
            paces = [
                rate(self.system, route, concurrent, by=self._free, split="even").bytes_per_s for route in concurrent
            ]
            parts = parts + np.maximum.reduce([1 / pace for pace in paces])
        return parts / len(self.routes)  # each route brings the same number of bytes

    def _copy(self, route: Route, active: list[Route]) -> Mapping[str, Any]:
        """Common parameters of transfers over a route while the routes `active` run at once."""
        key = (route.peer, *(other.peer for other in active))
        if key in self._copies:
            return self._copies[key]
        pace = rate(self.system, route, active, by=self.movement)
        exclusive_link = len(route.loads) == 1 and "port" not in route.loads
        beside = slowed_beside_gemm(self.system, active, by=self.movement)
        self._copies[key] = {
            "delay": 0.0 if self.comm_engine == "cu" else setup(self.system, by=self.movement),
            "cap": pace.bytes_per_s,
            "weight": 0.5,  # consumption-fair at HBM: equal HBM bytes/s at the bottleneck
            "priority": self._comm_class,
            "lane": next(iter(route.loads)) if exclusive_link else f"peer.{route.peer}",
            "limiter": pace.limiter,
            "cus": np.asarray(self.comm_cus) / len(active),
            "group": self._transfers.group(beside),
            "free": rate(self.system, route, active, by=self._free).bytes_per_s,
        }
        return self._copies[key]

    # ---------------------------------------------------------------- compute

    def gemm(
        self,
        label: str,
        size: tuple[ArrayLike, ArrayLike, ArrayLike],
        *,
        after: Sequence[int] = (),
        overlapped: bool = True,
        accumulate: bool = False,
    ) -> int:
        """Add a GEMM chunk of size (rows, columns, depth) that consumes the transfers `after`, next in the stream.

        Data moved by a kernel counts as arrived when the kernel ends; each DMA copy signals its own arrival.
        overlapped: communication kernels are resident while it runs, so masked CUs are not granted to it.
        """
        kernel_end = self._last_step if self.comm_engine == "cu" and after and self.order == "before" else []
        before = [*after, *kernel_end]
        staged = [transfer for transfer in after if transfer in self._last_step]
        return self._gemm(label, self._chunk(size, overlapped=overlapped, accumulate=accumulate), before, frees=staged)

    def gemm_in_parts(self, size: tuple[ArrayLike, ArrayLike, ArrayLike], between: Callable[[int], Any]) -> None:
        """Add a GEMM beside a collective that `between` adds, given the task that retires the first workgroups.

        This task is the first wave, or the entire GEMM if workgroups persist. A late start counts from the start of the
        GEMM, so that the first wave is a part of it.
        """
        chunks = self._chunk(size, overlapped=True, accumulate=False)
        waves = chunks[self._machine.gpus[0]]["waves"]
        first = 1 / waves if self.system.gpu.gemm.assignment == "static" else np.ones_like(waves)
        between(self._gemm("gemm, first wave", self._part(chunks, first), []))
        remaining = [
            {**part, "delay": 0.0, "law": _later(chunk, first)}  # launched with its first part
            for chunk, part in zip(chunks, self._part(chunks, 1 - first), strict=True)
        ]
        self._gemm("gemm", remaining, [])

    def _part(self, chunks: Sequence[Mapping[str, Any]], share: Any) -> list[Mapping[str, Any]]:
        """Scale GEMM chunks to a share of their work."""
        scaled = ("flop", "alone_s", "wide_s", "ideal_s")
        return [{**chunk, "work": share, **{name: share * chunk[name] for name in scaled}} for chunk in chunks]

    def _gemm(
        self, label: str, chunks: Sequence[Mapping[str, Any]], before: Sequence[int], *, frees: Sequence[int] = ()
    ) -> int:
        waits = [*before, *self._last_gemm]

        def add(gpu: int) -> int:
            name, gpu_waits = self._machine.task_name(label, gpu), self._on(gpu, waits)
            options = {"work": 1.0, **{key: value for key, value in chunks[gpu].items() if key not in {"waves", "law"}}}
            group = self._machine.task_name(self._gemms.group(*chunks[gpu]["law"]), gpu)
            task = self.graph.task(name, "gemm", after=gpu_waits, lane="compute", gpu=gpu, group=group, **options)
            self.graph.frees(task, self._on(gpu, frees))
            return task

        self._last_gemm = [self._on_each(add)]
        return self._last_gemm[0]

    def reduce(self, label: str, arrived: Sequence[int]) -> int:
        """Add a kernel that accumulates data moved by DMA engines into the local part of C, next in the stream."""
        hbm_rate, launch_s = self.system.gpu.hbm_bytes_per_s, self.system.gpu.kernel_launch_s

        def add(gpu: int) -> int:
            tasks, hbm = self._on(gpu, [*arrived, *self._last_gemm]), self._machine.hbm[gpu]
            amount = sum(self._moved[task] for task in self._on(gpu, arrived))
            seconds = 3 * amount / hbm_rate
            task = self.graph.task(
                self._machine.task_name(label, gpu),
                "reduce",
                after=tasks,
                uses={hbm: 3.0},  # read both operands, write the sum
                work=amount,
                delay=launch_s,
                lane="compute",
                limiter="HBM",
                alone_s=seconds,
                wide_s=seconds,
                gpu=gpu,
            )
            self.graph.frees(task, self._on(gpu, arrived))
            return task

        self._last_gemm = [self._on_each(add)]
        return self._last_gemm[0]

    def _chunk(
        self, size: tuple[ArrayLike, ArrayLike, ArrayLike], *, overlapped: bool, accumulate: bool
    ) -> list[Mapping[str, Any]]:
        """Parameters of GEMM chunks of one size, for each GPU."""
        key = (overlapped, accumulate, *(np.asarray(value).tobytes() for value in size))
        if key not in self._chunks:
            self._chunks[key] = self._costs(size, overlapped=overlapped, accumulate=accumulate)
        return self._chunks[key]

    def _cost(self, shape: tuple[ArrayLike, ...], taken: ArrayLike, *, accumulate: bool = False) -> GemmCost:
        """Cost of a GEMM chunk while so many CUs are taken: held by kernels, or withheld beside DMA engines.

        Beside DMA engines no other kernel is dispatched, so that the GEMM's workgroups go to any free CU.
        """
        m, n, k = shape
        return gemm_cost(self._gemm_gpu, GemmShape.row_major(m, n, k, accumulate=accumulate), taken=taken)

    @cached_property
    def _gemm_gpu(self) -> WaveGpu | Chip:
        """The GPU as the model of GEMMs reads it."""
        gpu = gemm_gpu(self.system, self.op.precision, model=self.system.costs.gemm)
        return gpu if self.comm_engine == "cu" else replace(gpu, engines=None)

    def _costs(
        self, size: tuple[ArrayLike, ArrayLike, ArrayLike], *, overlapped: bool, accumulate: bool
    ) -> list[Mapping[str, Any]]:
        gpu = self.system.gpu
        reserved = self._withheld if self.comm_engine == "dma" else np.asarray(self.comm_cus)
        full = granted = self._cost(size, 0, accumulate=accumulate)
        if overlapped and reserved.any():
            granted = self._cost(size, reserved, accumulate=accumulate)
        masked = overlapped and (self._masked or self.comm_engine == "dma")
        cus, cost = (gpu.num_cus - reserved, granted) if masked else (gpu.num_cus, full)
        factor = np.ones(())  # nothing moves beside it
        if overlapped and self.comm_engine == "dma":
            factor = np.asarray(1 / np.asarray(gpu.contention.dma_beside_gemm, float))
        elif overlapped:
            factor = np.minimum(cost.seconds / beside_cu_copies(gpu, granted.seconds, full.seconds), 1.0)
        share = cost.flop / self._whole.flop * self._whole.seconds
        common: dict[str, Any] = {"alone_s": full.seconds, "wide_s": share, "ideal_s": share, "waves": cost.waves}
        late_s = late_start_s(gpu, full.seconds, by=self.comm_engine) if overlapped else np.zeros(())
        common |= {"law": (factor, late_s)}
        return [self._task_of(cost, cus, common, gpu_index) for gpu_index in self._machine.gpus]

    @cached_property
    def _whole(self) -> GemmCost:
        """Cost of the undivided GEMM on all CUs."""
        return self._cost((self.op.m, self.op.local_n, self.op.local_k), 0)

    def _task_of(self, cost: GemmCost, cus: ArrayLike, common: Mapping[str, Any], gpu: int) -> Mapping[str, Any]:
        seconds, traffic, flop = (
            self._machine.for_gpu(part, gpu) for part in (cost.seconds, cost.hbm_bytes, cost.flop)
        )
        memory_bound = bool(np.all(traffic / self.system.gpu.hbm_bytes_per_s > 0.5 * seconds))
        return {
            "uses": {self._machine.hbm[gpu]: traffic, self._machine.cu[gpu]: cus * seconds},
            "delay": self._gemm_gpu.launch_s,
            "cap": 1 / seconds,
            "weight": 1 / traffic,
            "priority": self._compute_class,
            "limiter": "HBM" if memory_bound else "compute",
            "flop": flop,
            "law": common["law"],
            **{name: self._machine.for_gpu(value, gpu) for name, value in common.items() if name != "law"},
        }


def _later(chunk: Mapping[str, Any], first: Any) -> tuple[Any, Any]:
    """Law of what is left of a GEMM chunk after a share `first`, which kernels beside it have waited for already."""
    factor, late_s = chunk["law"]
    return factor, np.maximum(late_s - first * chunk["alone_s"], 0.0)


class _Groups:
    """Groups of tasks with the same numbers of a contention law."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._groups: dict[tuple[Any, ...], tuple[str, Any]] = {}

    def group(self, *numbers: Any) -> str:
        """Group of the numbers of a law."""
        key = tuple((np.shape(number), np.asarray(number, float).tobytes()) for number in numbers)
        law = numbers if len(numbers) > 1 else numbers[0]
        return self._groups.setdefault(key, (f"{self._name} {len(self._groups)}", law))[0]

    def items(self) -> list[tuple[str, Any]]:
        """Pairs (group, its number or numbers) of all groups."""
        return list(self._groups.values())
