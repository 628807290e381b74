"""Common parts of overlap schedules: transfers in steps; GEMM chunks and sums of what DMA engines moved, in one stream.

A schedule is written from the view of one GPU; the system decides the GPUs that are simulated
(`simulators/overlap/node.py`). Rows, columns and bytes may be arrays over designs, and over GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from search_spaces.chunk_costs import ChunkCost, ChunkCosts, ContentionLaw, LawGroups
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.communication import WAIT_S, WAITING, Communication, Means
from simulators.costs.sharing import Sharing
from simulators.costs.transfer import TransferMode, fork_s, routes
from simulators.hardware.machine import System
from simulators.overlap.node import NodeGraph, piece
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Overlap, Workload

__all__ = ["Pipeline", "piece"]
_Size = tuple[ArrayLike, ArrayLike, ArrayLike]  # rows, columns, depth


class Pipeline:
    """Graph of one collective overlapped with one GEMM, under construction.

    comm_cus: CUs of the communication kernels (ignored for DMA). masked: these CUs are taken from compute while an
    `overlapped` chunk runs, whether or not data moves; otherwise only while data moves. GEMM chunks run in order, one
    at a time (`compute`); transfers run in order on each engine, or kernel after kernel if CUs move them
    (`comm`). A task that either returns stands for that of every GPU.
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
        self.system, self._knobs = system, knobs
        overlap = workload.overlap()
        self.collective, self.op, self.order = overlap.collective, overlap.gemm, overlap.order
        self.routes = routes(system.node, self.collective.pattern)
        self._node = NodeGraph(system, self.collective.pattern, (system, workload, knobs))
        passes = 2.0 if self.collective.pattern == "all_reduce" else 1.0
        self._bytes_an_element = passes * self.collective.element_bytes
        # rows of the shard of the GPU so many places before; 0 is this one
        self.shard_rows = [
            self._node.machine.shard_rows(self.collective.rows, peer) for peer in range(system.node.num_gpus)
        ]
        cus: ArrayLike = 0 if comm_cus is None or knobs.mover != "cu" else comm_cus
        self._movers: list[Means] = []
        self.also(TransferMode(knobs.mover, cus, self.collective.pattern, knobs.mover_bytes_per_s))
        self.comm = Communication(self._node, system, overlap=overlap, knobs=knobs, movers=self._movers)
        self.compute = Computation(self._node, system, overlap, communication=self.comm, masked=masked)

    def payload(self, rows: ArrayLike, depth: ArrayLike) -> Any:
        """Bytes of a block of the tensor; of an all-reduce both ways."""
        blocks: Any = rows
        return self._bytes_an_element * blocks * depth

    def also(self, mode: TransferMode) -> int:
        """Add a mover that steps may name by the place that is returned, before any of them; its kernels take CUs only
        while they are there.
        """
        name = f"communication by means {len(self._movers)}" if self._movers else "communication"
        knobs = self._knobs
        # one kernel, whose cost is of all rows, loses them in every shard
        lost = np.asarray(knobs.lost) * (1 if knobs.kernel is None else self.system.node.num_gpus)
        costs = ChunkCosts(self.system, self.op, mode.engine, knobs.kernel, knobs.tile, lost)
        self._movers.append(Means(self.system, mode, self.routes, costs, LawGroups(name), signal_s=knobs.signal))
        return len(self._movers) - 1

    def add(self, waiting: list[list[int]], *, keep: int) -> None:
        """Add what DMA engines moved, except for the last `keep` steps, which are still in flight."""
        while self.comm.adds and len(waiting) > keep:
            self.compute.reduce("reduce", waiting.pop(0))

    def build(self) -> TaskGraph:
        """Build the graph, with the contention laws between GEMM chunks and transfers of a GPU, and the host's work."""
        if np.any(np.asarray(self._knobs.host_s) > 0):
            self._submit()
        for gpu in self._node.machine.gpus:
            self._slow_both_ways(gpu)
        return self._node.builder.build()

    def _submit(self) -> None:
        """Add the host's work, which nothing waits for: it bounds the makespan from below."""
        seconds, node = self._node.submissions * np.asarray(self._knobs.host_s), self._node
        node.on_each(
            lambda gpu: node.builder.task(
                node.machine.task_name("host submits", gpu), "host", gpu=gpu, delay=seconds, lane="host"
            )
        )

    def _slow_both_ways(self, gpu: int) -> None:
        """Add the contention laws between the GEMM chunks and the transfers of a GPU."""
        gemms = self.compute.laws.items()
        for place, means in enumerate(self._movers):
            for (gemm, law), (transfers, beside_gemm) in product(gemms, means.laws.items()):
                self._slow(gpu, gemm, transfers, law.factors[place])
                self._slow(gpu, transfers, gemm, beside_gemm.factors[0])
        if not self.comm.waits:
            return
        kernels = next(place for place, means in enumerate(self._movers) if means.by_kernels)
        for gemm, law in gemms:
            self._slow(gpu, gemm, WAITING, law.factors[kernels])
            self._slow(gpu, WAITING, gemm, 1 / np.maximum(law.late_s / WAIT_S, 1.0))

    def _slow(self, gpu: int, group: str, cause: str, factor: Any) -> None:
        """Add a contention law between groups of tasks of a GPU, unless its factor is 1."""
        machine = self._node.machine
        gpu_factor = machine.for_gpu(factor, gpu)
        if np.any(np.asarray(gpu_factor) < 1):
            slowed, active = (machine.task_name(name, gpu) for name in (group, cause))
            self._node.builder.slows(slowed, while_active=active, factor=gpu_factor)


@dataclass(frozen=True)
class GemmChunk:
    """A GEMM chunk, or a share `work` of one, on one GPU.

    uses: of resources, by the whole chunk. rate: chunks per second. alone_s: time [s] on all CUs. share_s: its share of
    the time of the undivided GEMM [s]. launch_s: 0 where it goes on without a launch.
    """

    uses: Mapping[int, Any]
    launch_s: Any
    rate: Any
    weight: Any
    limiter: str
    flop: Any
    alone_s: Any
    share_s: Any
    waves: Any
    law: ContentionLaw
    work: Any = 1.0

    def part(self, share: Any) -> GemmChunk:
        """A share of the chunk's work, under the law and launch of the whole."""
        return replace(
            self, work=share, flop=share * self.flop, alone_s=share * self.alone_s, share_s=share * self.share_s
        )


class Computation:
    """Stream of kernels that compute, on each GPU.

    masked: CUs of communication kernels are taken from a chunk whether or not data moves. laws: groups of GEMM chunks.
    """

    def __init__(
        self, node: NodeGraph, system: System, overlap: Overlap, *, communication: Communication, masked: bool
    ) -> None:
        self._node, self._system, self._communication = node, system, communication
        self._machine, self._graph, self._overlap = node.machine, node.builder, overlap
        self._movers, self._masked, self._withheld = communication.movers, masked, np.asarray(0)
        self._priority = int(communication.knobs.priority == "communication")
        self.laws = LawGroups("gemm")
        self._chunks: dict[tuple[Any, ...], list[GemmChunk]] = {}
        self._last_kernel: list[int] = []

    def withhold(self, cus: ArrayLike) -> None:
        """Withhold CUs from all GEMMs beside DMA engines, whether or not communication uses them."""
        self._withheld = np.asarray(cus)
        for means in self._movers:
            means.withheld = self._withheld

    @property
    def waves(self) -> tuple[Any, Any]:
        """Number of waves of the undivided GEMM, not rounded up, and the time of a wave [s]."""
        return self._movers[0].costs.waves

    def gemm(
        self, label: str, size: _Size, *, after: Sequence[int] = (), overlapped: bool = True, accumulate: bool = False
    ) -> int:
        """Add a GEMM chunk of size (rows, columns, depth) that consumes the transfers `after`, next in the stream.

        Data moved by a kernel counts as arrived when the kernel ends; each DMA copy signals its own arrival.
        overlapped: communication kernels are resident while it runs, so masked CUs are not granted to it.
        """
        consumed = self._communication.transfers(after)
        before = list(after)
        if self._overlap.order == "before":
            before += self._communication.kernel_ends(consumed)
        return self._add(label, self._chunk(size, overlapped=overlapped, accumulate=accumulate), before, frees=consumed)

    def gemm_beside(self, label: str, size: _Size, transfers: Sequence[int]) -> int:
        """Add a GEMM beside the one collective of `transfers`, whose kernel was launched before it.

        Where that ends first, waves of the GEMM end whole, as on the CUs that it has from then on.
        """
        chunks, first = self._chunk(size, overlapped=True, accumulate=False), self._movers[0]
        if not first.by_kernels or self._masked:
            return self._add(label, chunks, [])
        parted_s = fork_s(self._system.gpu)
        beside = self._whole_waves(size, chunks, transfers, parted_s=parted_s)
        return self._add(label, [replace(chunk, launch_s=chunk.launch_s + 2 * parted_s) for chunk in beside], [])

    def _whole_waves(
        self,
        size: _Size,
        chunks: Sequence[GemmChunk],
        transfers: Sequence[int],
        *,
        parted_s: Any = 0.0,
        left: Any = 1.0,
    ) -> list[GemmChunk]:
        """Chunks of which a share is left, whose waves end whole if the kernels of `transfers` end before them.

        parted_s: by which the chunks begin after these.
        """
        first, beside = self._movers[0], list[GemmChunk]()
        for gpu, chunk in zip(self._machine.gpus, chunks, strict=True):
            moved_s = self._moved_s(self._node.on(gpu, transfers))
            # kernels that are there before the GEMM wait for no CU, and are not slowed until it begins
            late_s, early_s = np.where(parted_s > 0, 0.0, chunk.law.late_s), np.minimum(moved_s, parted_s)
            held_s = late_s + early_s + (moved_s - early_s) / first.slowed(first.routes) - parted_s
            until = first.costs.share_until(size, first.mode.cus, np.maximum(held_s, 0.0), left=left)
            share = np.minimum(self._machine.for_gpu(until, gpu), chunk.law.factors[0])
            beside.append(replace(chunk, law=replace(chunk.law, factors=(share, *chunk.law.factors[1:]))))
        return beside

    def _moved_s(self, transfers: Sequence[int]) -> Any:
        """Time alone [s] of the transfers of a collective, whose steps follow one another."""
        steps: dict[int, Any] = {}
        for route, task in zip(self._movers[0].routes, transfers, strict=True):
            steps[route.step] = np.maximum(steps.get(route.step, 0.0), self._communication.copy_s[task])
        return sum(steps.values(), np.zeros(()))

    def gemm_in_parts(self, size: _Size, between: Callable[[int], Sequence[int]], *, soonest: bool = False) -> None:
        """Add a GEMM beside a collective that `between` adds, given the task after which CUs are left for it.

        The workgroups of the kernel that was launched first are dispatched first, so this task is all waves but the
        last, or the entire GEMM if workgroups persist (as cuBLAS's do: the second kernel ends its own time after a GEMM
        that was launched first in 90 of 90 rows of conf/data/measured/h100_2026-11-26/starts.csv). A late start counts
        from the start of the GEMM, so that these waves are a part of it.
        soonest: the collective's workgroups go before those of the GEMM that wait: the task is the first wave, after
        which the collective holds its CUs.
        """
        chunks = self._chunk(size, overlapped=True, accumulate=False)
        gpus = self._machine.gpus
        waves = chunks[gpus[0]].waves
        dealt, _ = self.waves
        early = np.where(dealt > 1, (dealt - 1) / np.maximum(dealt, 1), 1.0)
        first = early if self._system.gpu.gemm.retires else np.ones_like(waves)
        if soonest:
            first = np.minimum(first, 1 / np.maximum(dealt, 1))
        transfers = between(self._add("gemm, early waves", [chunk.part(first) for chunk in chunks], []))
        if soonest:
            later = [self._later(chunk, first) for chunk in chunks]
            remaining = self._whole_waves(size, later, transfers, left=1 - first)
        else:
            remaining = [self._dealt_out(chunk, gpu, first) for gpu, chunk in zip(gpus, chunks, strict=True)]
        self._add("gemm", remaining, [])

    @staticmethod
    def _later(chunk: GemmChunk, passed: Any) -> GemmChunk:
        """What is left of a chunk when a share of it has passed."""
        return replace(chunk.part(1 - passed), launch_s=0.0, law=chunk.law.later(passed * chunk.alone_s))

    def _dealt_out(self, chunk: GemmChunk, gpu: int, passed: Any) -> GemmChunk:
        """What is left of a chunk when a share of it has passed and all its workgroups have their CUs.

        The collective gets those that they leave, so that it takes none from them: the caches and HBM slow them alone.
        """
        left, sharing, mover = self._later(chunk, passed), Sharing.of(self._system.gpu), self._movers[0].mode
        law = replace(left.law, factors=(1 / sharing.gemm(1.0, 1.0), *left.law.factors[1:]))
        cu, kept = self._machine.cu[gpu], 1 - np.asarray(mover.cus) / self._system.gpu.num_cus
        return replace(left, law=law, uses={**left.uses, cu: left.uses[cu] * kept})

    def part(self, label: str, rows: Any, *, after: Sequence[int] = (), launched: bool = False) -> int:
        """Add the part of one kernel for the whole GEMM that computes some rows, next in the stream."""
        gemm = self._overlap.gemm
        share = rows / np.asarray(gemm.m, float)
        chunks = self._chunk((gemm.m, gemm.local_n, gemm.local_k), overlapped=True, accumulate=False)
        parts = [
            chunk.part(self._machine.for_gpu(share, gpu)) for gpu, chunk in zip(self._machine.gpus, chunks, strict=True)
        ]
        if not launched:
            parts = [replace(part, launch_s=0.0) for part in parts]
        return self._add(label, parts, after, frees=self._communication.transfers(after))

    def reduce(self, label: str, arrived: Sequence[int], *, at_once: bool = False, staged: bool = False) -> int:
        """Add a kernel that accumulates data moved by DMA engines into the local part of C, next in the stream.

        at_once: all of it in one pass, else operand by operand. staged: in a pass before it the local part is copied to
        the others, and in one after it the sum to where it belongs, each with a barrier.
        """
        # read the operands, write the sum; two copies read and write a shard each
        passes = (len(arrived) + (6 if staged else 2)) / len(arrived) if at_once else 3.0
        # a kernel that streams does not reach all of the HBM's rate
        reached = self._system.gpu.stream_share * np.asarray(self._system.gpu.hbm_bytes_per_s)
        gpu_launch_s, knobs = self._system.gpu.kernel_launch_s, self._communication.knobs
        launch_s = gpu_launch_s
        if staged:
            launch_s = 2 * gpu_launch_s + np.asarray(self._system.gpu.dma.setup_s) + 2 * np.asarray(knobs.sync_s)
        self._node.submissions = self._node.submissions + (7 if staged else 1)  # a barrier counts as two

        def add(gpu: int) -> int:
            operands = self._node.on(gpu, arrived)
            amount = sum(self._communication.moved_bytes[task] for task in operands)
            seconds = passes * amount / reached
            task = self._graph.task(
                self._machine.task_name(label, gpu),
                "reduce",
                after=[*operands, *self._node.on(gpu, self._last_kernel)],
                uses={self._machine.hbm[gpu]: passes},
                work=amount,
                delay=launch_s,
                cap=reached / passes,
                lane="compute",
                limiter="HBM",
                alone_s=seconds,
                wide_s=seconds,
                gpu=gpu,
            )
            self._graph.frees(task, operands)
            return task

        self._last_kernel = [self._node.on_each(add)]
        return self._last_kernel[0]

    def _add(self, label: str, chunks: Sequence[GemmChunk], before: Sequence[int], *, frees: Sequence[int] = ()) -> int:
        waits = [*before, *self._last_kernel]
        launched = bool(np.any(np.asarray(chunks[self._machine.gpus[0]].launch_s) > 0))
        self._node.submissions = self._node.submissions + launched

        def add(gpu: int) -> int:
            chunk = chunks[gpu]
            task = self._graph.task(
                self._machine.task_name(label, gpu),
                "gemm",
                after=self._node.on(gpu, waits),
                uses=chunk.uses,
                work=chunk.work,
                delay=chunk.launch_s,
                cap=chunk.rate,
                weight=chunk.weight,
                priority=self._priority,
                lane="compute",
                limiter=chunk.limiter,
                group=self._machine.task_name(self.laws.group(chunk.law), gpu),
                gpu=gpu,
                flop=chunk.flop,
                alone_s=chunk.alone_s,
                wide_s=chunk.share_s,
                ideal_s=chunk.share_s,
            )
            self._graph.frees(task, self._node.on(gpu, frees))
            return task

        self._last_kernel = [self._node.on_each(add)]
        return self._last_kernel[0]

    def _chunk(self, size: _Size, *, overlapped: bool, accumulate: bool) -> list[GemmChunk]:
        """GEMM chunks of one size, for each GPU."""
        key = (overlapped, accumulate, *(np.asarray(value).tobytes() for value in size))
        if key not in self._chunks:
            if any(np.any(np.less_equal(value, 0)) for value in size):
                raise ValueError("a GEMM chunk has no rows, columns or depth")
            first, *others = self._movers
            whole = first.costs.whole
            if overlapped:
                by_engines = first.mode.engine == "dma"
                reserved = self._withheld if by_engines else np.asarray(first.mode.cus)
                cost = first.costs.beside(size, reserved, masked=self._masked or by_engines, accumulate=accumulate)
                # the chunk has one cost, and a law beside each mover
                laws = [cost.law] + [
                    means.costs.beside(size, means.mode.cus, masked=False, accumulate=accumulate).law
                    for means in others
                ]
            else:
                cost = first.costs.alone(size, accumulate=accumulate)
                laws = [cost.law] * len(self._movers)
            factors = tuple(factor for law in laws for factor in law.factors)
            law = ContentionLaw(factors, functools.reduce(np.maximum, [law.late_s for law in laws]))
            share_s = cost.cost.flop / whole.flop * whole.seconds
            self._chunks[key] = [self._on_gpu(cost, gpu, law=law, share_s=share_s) for gpu in self._machine.gpus]
        return self._chunks[key]

    def _on_gpu(self, chunk: ChunkCost, gpu: int, *, law: ContentionLaw, share_s: Any) -> GemmChunk:
        """A chunk as one GPU runs it. law: beside all movers. share_s: of the time of the undivided GEMM [s]."""
        cost, of = chunk.cost, self._machine.for_gpu
        seconds, traffic = of(cost.seconds, gpu), of(cost.kernel.hbm_bytes, gpu)
        memory_bound = bool(np.all(traffic / self._system.gpu.hbm_bytes_per_s > 0.5 * seconds))
        return GemmChunk(
            uses={self._machine.hbm[gpu]: traffic, self._machine.cu[gpu]: chunk.cus * seconds},
            launch_s=self._movers[0].costs.gpu.launch_s,
            rate=1 / seconds,
            weight=1 / traffic,
            limiter="HBM" if memory_bound else "compute",
            flop=of(cost.flop, gpu),
            alone_s=of(chunk.alone_s, gpu),
            share_s=of(share_s, gpu),
            waves=of(cost.kernel.waves, gpu),
            law=law,
        )
