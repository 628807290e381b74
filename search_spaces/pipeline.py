"""Common parts of overlap schedules: transfers in steps, GEMM chunks in one in-order stream on each GPU.

A schedule is written from the view of one GPU; the system decides the GPUs that are simulated
(`simulators/overlap/node.py`). Rows, columns and bytes may be arrays over designs, and over GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dse.values import Memo
from search_spaces.chunk_costs import ChunkCosts, LawGroups, later_law
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.movers import Means
from simulators.costs.gemm import GemmCost
from simulators.costs.transfer import (
    Route,
    TransferMode,
    accumulate_hbm_bytes,
    routes,
    store_share,
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
        self.system, self.comm_engine, self._near, self._knobs = system, knobs.mover, knobs.near_memory, knobs
        self._adding = accumulate_hbm_bytes(system, near_memory=knobs.near_memory)
        self.comm_cus: ArrayLike = 0 if comm_cus is None or knobs.mover != "cu" else comm_cus
        overlap = workload.overlap()
        self.collective, self.op, self.order = overlap.collective, overlap.gemm, overlap.order
        pattern = self.collective.pattern
        self.routes = routes(system.node, pattern)
        self.element_bytes = self.collective.element_bytes
        self.graph = GraphBuilder()
        self._masked, self._withheld = masked, np.asarray(0)
        self._machine = machine(self.graph, system, pattern, (system, workload, knobs))
        classes = {"equal": (0, 0), "communication": (0, 1), "compute": (1, 0)}
        self._comm_class, self._compute_class = classes[knobs.priority]
        self._means: list[Means] = []
        self.also(TransferMode(knobs.mover, self.comm_cus, pattern))
        self._chunk_costs: ChunkCosts = self._means[0].costs
        self._chunks: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        self._copies = Memo[tuple[Mapping[str, Any], Any, Mapping[int, ArrayLike]]]()
        self._gemms = LawGroups("gemm")
        self._tasks_by_gpu: dict[int, Mapping[int, int]] = {}
        self._moved: dict[int, Any] = {}
        self._kernel_of: dict[int, list[int]] = {}  # transfer -> all that its kernel moves
        self.copy_s: dict[int, Any] = {}  # transfer -> its time alone [s], with its set-up
        self._queued: dict[tuple[int, int | str], int] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        self._last_gemm: list[int] = []
        self._submitted: Any = 0.0
        self._synced = False

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
        """Build the graph, with the contention laws between GEMM chunks and transfers of a GPU, and the host's work."""
        if np.any(np.asarray(self._knobs.host_s) > 0):
            how: dict[str, Any] = {"delay": self._submitted * np.asarray(self._knobs.host_s), "lane": "host"}
            self._on_each(
                lambda gpu: self.graph.task(self._machine.task_name("host submits", gpu), "host", gpu=gpu, **how)
            )
        gemms = self._gemms.items()
        kernels = next((place for place, means in enumerate(self._means) if means.by_kernels), 0)
        for gpu in self._machine.gpus:
            for place, means in enumerate(self._means):
                for (gemm, law), (moved, share) in product(gemms, means.laws.items()):
                    self._slow(gpu, gemm, moved, law[place])
                    self._slow(gpu, moved, gemm, share)
            for gemm, law in gemms if self._waits else ():
                self._slow(gpu, gemm, _WAIT, law[kernels])
                self._slow(gpu, _WAIT, gemm, 1 / np.maximum(law[-1] / _NO_WAIT_S, 1.0))
        return self.graph.build()

    def _slow(self, gpu: int, group: str, cause: str, factor: Any) -> None:
        """Add a contention law between groups of tasks of a GPU, unless its factor is 1."""
        gpu_factor = self._machine.for_gpu(factor, gpu)
        if np.any(np.asarray(gpu_factor) < 1):
            slowed, active = (self._machine.task_name(name, gpu) for name in (group, cause))
            self.graph.slows(slowed, while_active=active, factor=gpu_factor)

    def also(self, mode: TransferMode) -> int:
        """Add a mover that steps may name by the place that is returned, before any of them; its kernels take CUs only
        while they are there.
        """
        name = f"communication by means {len(self._means)}" if self._means else "communication"
        costs = ChunkCosts(self.system, self.op, mode.engine, self._knobs.kernel)
        self._means.append(Means(self.system, mode, self.routes, self._comm_class, costs, LawGroups(name)))
        return len(self._means) - 1

    @property
    def _waits(self) -> bool:
        """Flag: kernels that move data wait for CUs while a GEMM runs."""
        late = bool(np.any(np.asarray(self.system.gpu.contention.late_start) > 0))
        return late and any(means.by_kernels for means in self._means)

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

    def step(
        self, label: str, amounts: Sequence[tuple[Route, ArrayLike]], *, after: Sequence[int] = (), by: int = 0
    ) -> list[int]:
        """Move bytes over each route once the tasks `after` are done; return the transfers, in the order of `amounts`.

        Routes with equal `Route.step` run at once, the steps (distances on a ring) one after another. by: 0 for the
        mover of the knobs, else a place among `also`, counted from 1.
        """
        means = self._means[by]
        before = self._kernel(label, after, means) if means.by_kernels else list(after)
        before = self._sync(label, before)
        transfers: dict[int, int] = {}
        for _, group in groupby(sorted(amounts, key=lambda item: item[0].step), key=lambda item: item[0].step):
            concurrent = list(group)
            tasks = self._add_transfers(label, concurrent, before, means)
            transfers |= dict(zip((route.peer for route, _ in concurrent), tasks, strict=True))
            before = tasks if any(route.step for route, _ in amounts) else before
        means.last_step = list(transfers.values())
        self._kernel_of |= dict.fromkeys(means.last_step, means.last_step if means.by_kernels else [])
        return [transfers[route.peer] for route, _ in amounts]

    def _kernel(self, label: str, after: Sequence[int], means: Means) -> list[int]:
        """Add the launch of a communication kernel, after the one before it on the same stream."""
        how: dict[str, Any] = {
            "delay": means.setup_s,
            "lane": "communication",
            "limiter": "launch",
        }

        def add(gpu: int) -> int:
            name, before = self._machine.task_name(f"launch {label}", gpu), self._on(gpu, [*means.last_step, *after])
            return self.graph.task(name, "launch", after=before, gpu=gpu, **how)

        self._submitted = self._submitted + np.asarray(self._knobs.collective_calls)
        launched = [self._on_each(add)]
        return [self._wait(label, launched, means)] if self._waits else launched

    def _sync(self, label: str, before: list[int]) -> list[int]:
        """Add a barrier among the GPUs where one is needed."""
        if self._synced or not np.any(np.asarray(self._knobs.sync_s) > 0):
            return before
        self._synced, self._submitted = self.order == "before", self._submitted + 2
        return [self.wait(f"barrier {label}", self._knobs.sync_s, before)]

    def _wait(self, label: str, launched: Sequence[int], means: Means) -> int:
        """Add the wait of a kernel that holds its CUs and moves nothing yet: no time, but while a GEMM runs."""

        def add(gpu: int) -> int:
            name, group = (self._machine.task_name(text, gpu) for text in (f"wait {label}", _WAIT))
            how: dict[str, Any] = {
                "work": 1.0,
                "cap": 1 / _NO_WAIT_S,
                "cus": means.mode.cus,
                "lane": "communication",
                "group": group,
            }
            return self.graph.task(name, "launch", after=self._on(gpu, launched), gpu=gpu, **how)

        return self._on_each(add)

    def _add_transfers(
        self, label: str, concurrent: list[tuple[Route, ArrayLike]], before: list[int], means: Means
    ) -> list[int]:
        engines = self.system.gpu.dma.num_engines if means.mode.engine == "dma" else len(concurrent)
        at_once, factor = min(len(concurrent), engines), means.library_factor(concurrent)
        signalled = self._knobs.kernel is not None
        active = [route for route, _ in concurrent[:at_once]]
        share = means.collective_s(sum(np.asarray(amount) for _, amount in concurrent)) / -(-len(concurrent) // at_once)
        tasks = []
        for position, item in enumerate(concurrent):
            queue = means, means.engines_of(item[0], position % at_once, signalled=signalled), share, factor
            tasks.append(self._transfer(label, item, active=active, before=before, queue=queue))
        for (route, _), task in zip(concurrent, tasks, strict=True):
            self._arrived |= {(gpu, route.peer): gpu_task for gpu, gpu_task in self._tasks_by_gpu[task].items()}
        return tasks

    def _transfer(
        self,
        label: str,
        item: tuple[Route, ArrayLike],
        *,
        active: list[Route],
        before: list[int],
        queue: tuple[Means, tuple[int | str, ...], Any, Any],
    ) -> int:
        """Add a transfer over one route. queue: its mover, with the DMA engines (none: a kernel) whose last copies it
        waits for, its time [s] if all links were busy, and the factor of a measured library on its rate.
        """
        (route, payload), (means, engines, share, factor) = item, queue
        self._submitted = self._submitted + (means.mode.engine == "dma")
        copy = means.copy(route, active)

        def add(gpu: int) -> int:
            how, free, uses = self._copy_on(gpu, route, copy, means, factor)
            queued = [self._queued[gpu, engine] for engine in engines if (gpu, engine) in self._queued]
            forwarded = [
                self._arrived[source] for source in self._machine.sources(route, gpu) if source in self._arrived
            ]
            amount = self._machine.for_gpu(payload, gpu)
            transfer = self.graph.task(
                self._machine.task_name(f"{label} from {route.peer}", gpu),
                "transfer",
                after=[*self._on(gpu, before), *queued, *forwarded],
                uses=uses,
                work=amount,
                staged_bytes=amount if self._stages else 0.0,
                moved_bytes=amount,
                alone_s=amount / free,
                wide_s=self._machine.for_gpu(share, gpu),
                ideal_s=means.collective_s(amount),
                **how,
            )
            self._moved[transfer] = amount
            self.copy_s[transfer] = how["delay"] + amount / how["cap"]
            return transfer

        task = self._on_each(add)
        self._queued |= {
            (gpu, engine): gpu_task for engine in engines for gpu, gpu_task in self._tasks_by_gpu[task].items()
        }
        return task

    def _copy_on(
        self, gpu: int, route: Route, copy: Mapping[str, Any], means: Means, factor: Any
    ) -> tuple[Mapping[str, Any], Any, Mapping[int, ArrayLike]]:
        """Parameters of a transfer on a GPU, its rate with nothing beside it, and its uses; made once for all alike."""

        def build() -> tuple[Mapping[str, Any], Any, Mapping[int, ArrayLike]]:
            rates = {name: copy[name] * self._machine.for_gpu(factor, gpu) for name in ("cap", "free")}
            how = {**copy, **rates, "gpu": gpu, "group": self._machine.task_name(copy["group"], gpu)}
            free = how.pop("free")
            return how, free, self._uses(route, how, gpu, means)

        return self._copies.get(build, copy, factor, key=(gpu, route.peer))

    def _uses(self, route: Route, copy: Mapping[str, Any], gpu: int, means: Means) -> dict[int, ArrayLike]:
        """Use of resources per byte over a route to a GPU, with the local operand of a reduction."""
        uses = self._machine.uses(route, gpu)
        if means.mode.engine == "store":  # concurrent stores share what all of them reach
            share, hbm = store_share(self.system), set(self._machine.hbm)
            uses = {name: load if name in hbm else np.divide(load, share) for name, load in uses.items()}
        if means.by_kernels:
            uses[self._machine.cu[gpu]] = copy["cus"] / copy["cap"]
        if self.collective.reduces and not (self.adds and not means.by_kernels):
            uses[self._machine.hbm[gpu]] = np.add(uses[self._machine.hbm[gpu]], self._adding)
        return uses

    @property
    def adds(self) -> bool:
        """Flag: a separate kernel adds the operands of a reduction, as DMA engines cannot."""
        return self.comm_engine != "cu" and not self._near

    @property
    def _stages(self) -> bool:
        """Flag: incoming data is staged until it is used, not added on arrival or stored at its destination."""
        return self.order == "before" or (self.order == "after" and self.adds)

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
        moved = [transfer for transfer in after if transfer in self._kernel_of]
        kernel_end = [other for transfer in moved for other in self._kernel_of[transfer] if self.order == "before"]
        before, staged = [*after, *kernel_end], moved
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
            {**part, "delay": 0.0, "law": later_law(chunk, first)}  # launched with its first part
            for chunk, part in zip(chunks, self._part(chunks, 1 - first), strict=True)
        ]
        self._gemm("gemm", remaining, [])

    def part(self, label: str, peer: int, *, after: Sequence[int] = (), launched: bool = False) -> int:
        """Add the part of one kernel for the whole GEMM that belongs to the shard of a peer, next in the stream."""
        share = self.shard_rows(peer) / np.asarray(self.op.m, float)
        chunks = self._chunk((self.op.m, self.op.local_n, self.op.local_k), overlapped=True, accumulate=False)
        parts = [
            {**self._part([chunk], self._machine.for_gpu(share, gpu))[0], **({} if launched else {"delay": 0.0})}
            for gpu, chunk in zip(self._machine.gpus, chunks, strict=True)
        ]
        return self._gemm(label, parts, after, frees=[transfer for transfer in after if transfer in self._moved])

    def wait(self, label: str, seconds: Any, after: Sequence[int]) -> int:
        """Add a time that passes after tasks while nothing else waits."""

        def add(gpu: int) -> int:
            how: dict[str, Any] = {"gpu": gpu, "lane": "communication", "limiter": "launch"}
            name, delay = self._machine.task_name(label, gpu), self._machine.for_gpu(seconds, gpu)
            return self.graph.task(name, "launch", after=self._on(gpu, after), delay=delay, **how)

        return self._on_each(add)

    @property
    def waves(self) -> tuple[Any, Any]:
        """Number of waves of the undivided GEMM, not rounded up, and the time of a wave [s]."""
        return self._chunk_costs.waves

    def _part(self, chunks: Sequence[Mapping[str, Any]], share: Any) -> list[Mapping[str, Any]]:
        """Scale GEMM chunks to a share of their work."""
        scaled = ("flop", "alone_s", "wide_s", "ideal_s")
        return [{**chunk, "work": share, **{name: share * chunk[name] for name in scaled}} for chunk in chunks]

    def _gemm(
        self, label: str, chunks: Sequence[Mapping[str, Any]], before: Sequence[int], *, frees: Sequence[int] = ()
    ) -> int:
        waits = [*before, *self._last_gemm]
        self._submitted = self._submitted + bool(np.any(np.asarray(chunks[self._machine.gpus[0]]["delay"]) > 0))

        def add(gpu: int) -> int:
            name, gpu_waits = self._machine.task_name(label, gpu), self._on(gpu, waits)
            options = {"work": 1.0, **{key: value for key, value in chunks[gpu].items() if key not in {"waves", "law"}}}
            group = self._machine.task_name(self._gemms.group(*chunks[gpu]["law"]), gpu)
            task = self.graph.task(name, "gemm", after=gpu_waits, lane="compute", gpu=gpu, group=group, **options)
            self.graph.frees(task, self._on(gpu, frees))
            return task

        self._last_gemm = [self._on_each(add)]
        return self._last_gemm[0]

    def reduce(self, label: str, arrived: Sequence[int], *, at_once: bool = False) -> int:
        """Add a kernel that accumulates data moved by DMA engines into the local part of C, next in the stream.

        at_once: all of it in one pass, else operand by operand.
        """
        passes = (len(arrived) + 2) / len(arrived) if at_once else 3.0  # read the operands, write the sum
        hbm_rate, launch_s = self.system.gpu.hbm_bytes_per_s, self.system.gpu.kernel_launch_s
        self._submitted = self._submitted + 1

        def add(gpu: int) -> int:
            tasks, hbm = self._on(gpu, [*arrived, *self._last_gemm]), self._machine.hbm[gpu]
            amount = sum(self._moved[task] for task in self._on(gpu, arrived))
            seconds = passes * amount / hbm_rate
            task = self.graph.task(
                self._machine.task_name(label, gpu),
                "reduce",
                after=tasks,
                uses={hbm: passes},
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

    def _costs(
        self, size: tuple[ArrayLike, ArrayLike, ArrayLike], *, overlapped: bool, accumulate: bool
    ) -> list[Mapping[str, Any]]:
        if overlapped:
            reserved = self._withheld if self.comm_engine == "dma" else np.asarray(self.comm_cus)
            masked = self._masked or self.comm_engine == "dma"
            cost, cus, common = self._chunk_costs.beside(size, reserved, masked=masked, accumulate=accumulate)
            more = [
                means.costs.beside(size, means.mode.cus, masked=False, accumulate=accumulate)[2]["law"]
                for means in self._means[1:]
            ]
            factors, late_s = zip(common["law"], *more, strict=True)
            law: tuple[Any, ...] = (*factors, functools.reduce(np.maximum, late_s))
        else:
            cost, cus, common = self._chunk_costs.alone(size, accumulate=accumulate)
            law = (*(np.ones(()) for _ in self._means), np.zeros(()))
        return [self._task_of(cost, cus, {**common, "law": law}, gpu) for gpu in self._machine.gpus]

    def _task_of(self, cost: GemmCost, cus: ArrayLike, common: Mapping[str, Any], gpu: int) -> Mapping[str, Any]:
        seconds, traffic, flop = (
            self._machine.for_gpu(part, gpu) for part in (cost.seconds, cost.kernel.hbm_bytes, cost.flop)
        )
        memory_bound = bool(np.all(traffic / self.system.gpu.hbm_bytes_per_s > 0.5 * seconds))
        return {
            "uses": {self._machine.hbm[gpu]: traffic, self._machine.cu[gpu]: cus * seconds},
            "delay": self._chunk_costs.gpu.launch_s,
            "cap": 1 / seconds,
            "weight": 1 / traffic,
            "priority": self._compute_class,
            "limiter": "HBM" if memory_bound else "compute",
            "flop": flop,
            "law": common["law"],
            **{name: self._machine.for_gpu(value, gpu) for name, value in common.items() if name != "law"},
        }
