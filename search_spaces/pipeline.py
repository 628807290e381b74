"""Common parts of overlap schedules: transfers in steps, GEMM chunks in one in-order stream on each GPU.

A schedule is written from the view of one GPU; the system decides the GPUs that are simulated
(`simulators/overlap/node.py`). Rows, columns and bytes may be arrays over designs, and over GPUs.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from search_spaces.chunk_costs import ChunkCosts, LawGroups
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.communication import WAIT_S, WAITING, Communication, Means
from search_spaces.computation import Computation
from simulators.costs.transfer import TransferMode, routes
from simulators.hardware.machine import System
from simulators.overlap.node import NodeGraph, piece
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Workload

__all__ = ["Pipeline", "piece"]


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
        self._element_bytes = self.collective.element_bytes
        self.routes = routes(system.node, self.collective.pattern)
        self._node = NodeGraph(system, self.collective.pattern, (system, workload, knobs))
        cus: ArrayLike = 0 if comm_cus is None or knobs.mover != "cu" else comm_cus
        self._movers: list[Means] = []
        self.also(TransferMode(knobs.mover, cus, self.collective.pattern))
        self.comm = Communication(self._node, system, overlap=overlap, knobs=knobs, movers=self._movers)
        self.compute = Computation(self._node, system, overlap, communication=self.comm, masked=masked)

    def shard_rows(self, gpu: int) -> Any:
        """Rows of the tensor in the shard of the GPU `gpu` places before (0 is this one)."""
        return self._node.machine.shard_rows(self.collective.rows, gpu)

    def payload(self, rows: ArrayLike, depth: ArrayLike) -> Any:
        """Bytes of a block of the tensor; of an all-reduce both ways."""
        blocks: Any = rows
        return (
            (2.0 if self.collective.pattern == "all_reduce" else 1.0) * self.collective.element_bytes * blocks * depth
        )

    def also(self, mode: TransferMode) -> int:
        """Add a mover that steps may name by the place that is returned, before any of them; its kernels take CUs only
        while they are there.
        """
        name = f"communication by means {len(self._movers)}" if self._movers else "communication"
        knobs = self._knobs
        costs = ChunkCosts(self.system, self.op, mode.engine, knobs.kernel, knobs.tile, knobs.lost)
        self._movers.append(Means(self.system, mode, self.routes, costs, LawGroups(name)))
        return len(self._movers) - 1

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
