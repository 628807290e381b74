"""A GEMM whose output is reduced chunk by chunk while it runs, triggered by hardware (T3, arXiv:2401.16677).

On a ring of the N GPUs that share the GEMM its output has N chunks, produced in ring order. The first is stored
straight into the neighbour's memory as updates; a DMA command forwards the partial sum of each following chunk as soon
as a tracker has counted the local and the incoming updates; the last stays. On a mesh or at a switch tiles of all
chunks are produced in turn and stored straight into the memory of the GPU that keeps them. A kernel then runs the
all-gather of an all-reduce, serially.

reduction    serial: the GEMM, then a reduce-scatter by a kernel on all CUs. ideal: both at once, without slowing each
             other. tracked: as above.
near_memory  PIM adds partial sums as they are stored, past the cache (`gpu.pim`); without it an update reads, adds and
             writes (tracked: atomics; else: in the kernel).
arbitration  policy of the memory controller for requests of both. fcfs: one queue, first come, first served, so a
             burst of reads that misses the cache waits behind the updates that the stage before it has left in this
             GPU's memory, but for the step for which the buffers of the multiplication last (`StagedGemm.queue_share`;
             links pace the updates of other GPUs, which share the HBM). fair: each has its share.
             compute_first: the GEMM's reads go first, as a multiplication waits for them. Communication issues in their
             gaps, only while fewer than `occupancy_threshold` requests wait, and has no less than `guaranteed_share`
             of the HBM (T3's limit on starvation, as a share). Updates of the GEMM's own output go last: nothing but
             the forwarding of their chunk waits for them. How many may wait has no bound here.

The ideal with `near_memory` orders a GEMM's own requests likewise, so that no policy beats it. The ideal without it
may be beaten by a policy with it, whose updates read nothing back.

A threshold of n requests lets communication use the share n / (1 + n) of the HBM that the GEMM leaves: in a queue whose
server is busy for a share r of the time, r / (1 - r) requests are waiting or served on average (M/M/1; derived). `fair`
has no limit. Stages: `simulators/costs/gemm/stages.py`. HBM time and HBM traffic are two resources: an update near
memory is one write, and takes the HBM for longer than a write does (`simulators/hardware/pim.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from dse.errors import ConfigError
from dse.space.blocks import Rule
from dse.values import knob
from dse.values.units import Integer, Number
from search_spaces.comm_knobs import node_rules
from simulators.costs.gemm.stages import StagedGemm, stage_gemm
from simulators.costs.transfer import TransferMode, rate, routes, setup
from simulators.hardware.machine import System
from simulators.hardware.network import Pattern, Route, links
from simulators.overlap.design import ScheduleKnobs
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.workloads.operators import Overlap, Workload

Reduction = Literal["serial", "ideal", "tracked"]
_ACCOUNT = 1e30  # capacity of a resource on which bytes are only counted


class TriggeredSchedule(ScheduleKnobs):
    """Knobs of the family. num_chunks: least number of parts of the output (at most one for each wave of the GEMM)."""

    orders: ClassVar[tuple[str, ...]] = ("after",)
    gemm_refinement: ClassVar[str] = "stages before a cache"
    family: Literal["triggered"]
    reduction: Annotated[Reduction, knob(structural=True)]
    near_memory: Annotated[bool, knob(structural=True)]
    arbitration: Annotated[
        Literal["fcfs", "fair", "compute_first"] | None, knob(structural=True, when={"reduction": "tracked"})
    ] = None
    occupancy_threshold: Annotated[Integer | None, knob(when={"arbitration": "compute_first"}, ge=1, le=10**6)] = None
    guaranteed_share: Annotated[Number | None, knob(when={"arbitration": "compute_first"}, gt=0, le=0.5)] = None
    num_chunks: Annotated[Integer, knob(structural=True, ge=1, le=1024)] = 32

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Require a GEMM and its reduction over all GPUs, and the hardware that the knobs use."""
        if beyond := list(node_rules(system)):
            return beyond
        try:
            overlap = workload.overlap()
        except ConfigError as error:
            return [Rule.of(problem) for problem in error.problems]
        return [*_workload_rules(system, overlap), *self._hardware_rules(system)]

    def _hardware_rules(self, system: System) -> Iterator[Rule]:
        gpu = system.gpu
        needed: dict[str, Any] = {"gpu.llc": gpu.llc, "gpu.gemm.workgroups_per_cu": gpu.gemm.workgroups_per_cu}
        needed |= {"node.hop_latency_s": system.node.hop_latency_s}
        needed |= {"gpu.pim": gpu.pim} if self.near_memory else {}
        needed |= {"gpu.tracker": gpu.tracker} if self.reduction == "tracked" else {}
        needed |= {"gpu.gemm.tile_depth": gpu.gemm.tile_depth} if self.arbitration == "fcfs" else {}
        for path, value in needed.items():
            if value is None:
                way = "use a system that has it, such as system=t3_ring"
                yield Rule(f"system.{path}", True, "is needed by this schedule", None, way_out=way)
        if needed.get("gpu.tracker") and gpu.tracker is not None and gpu.gemm.workgroups_per_cu is not None:
            entries, flying = gpu.tracker.num_entries, np.multiply(gpu.num_cus, gpu.gemm.workgroups_per_cu)
            rule = "has fewer entries than workgroups are in flight ({0})"
            broken = np.asarray(entries) < flying
            yield Rule("system.gpu.tracker.num_entries", broken, rule, entries, (flying,), "use more entries")

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to stages of the GEMM, its stores, and the reduction of its chunks according to `reduction`."""
        overlap = workload.overlap()
        producer = _Producer(self, system, overlap)
        reduction = _Reduction(producer, overlap.collective.pattern)
        before = reduction.add()
        if overlap.collective.pattern == "all_reduce":
            reduction.gather(before)
        return producer.graph.build()


def _workload_rules(system: System, overlap: Overlap) -> Iterator[Rule]:
    path, pattern = "workload.operators", overlap.collective.pattern
    if overlap.order != "after" or pattern not in {"reduce_scatter", "all_reduce"}:
        rule = "is not what this schedule overlaps: a GEMM and then the collective that reduces it"
        yield Rule(f"{path}.gather.pattern", True, rule, pattern, way_out="use all_reduce or reduce_scatter")
    gpus, shards = system.node.num_gpus, overlap.gemm.shards
    if not 2 <= shards <= gpus:
        rule = "must be 2 to the GPUs of the node (system.node.num_gpus = {0}): they reduce what each has summed"
        yield Rule(f"{path}.gemm.shards", True, rule, shards, (gpus,), "leave it out for all of them")


class _Memory:
    """HBM of one representative GPU: its bytes, its time, and the queue of a controller that serves reads first.

    busy, comm_busy: time that computation, and communication, take. update: HBM cost of an update per byte as (traffic,
    time as bytes). weight: of a flow of communication by HBM time, of which `flows` run at once; a GEMM's reads have 1.
    store_priority: of the GEMM's stores; 1 if all else goes first.
    """

    def __init__(self, knobs: TriggeredSchedule, system: System, graph: GraphBuilder, *, flows: int) -> None:
        rate, pim = system.gpu.hbm_bytes_per_s, system.gpu.pim
        self.hbm, self.busy = graph.resource("hbm", _ACCOUNT), graph.resource("hbm time", rate)
        self.comm_busy = graph.resource("hbm time, communication", rate) if knobs.reduction == "ideal" else self.busy
        self.update: tuple[float, Any] = (2.0, 2.0) if not knobs.near_memory or pim is None else (1.0, pim.update(rate))
        self.links = {name: graph.resource(name, value) for name, value in links(system.node).items()}
        self._queue: int | None = None
        self._gate: Any = 1.0  # largest share of the HBM for communication
        self.weight: Any = 1.0
        undisturbed = knobs.reduction == "ideal" and knobs.near_memory
        self.store_priority = int(undisturbed or knobs.arbitration == "compute_first")
        if knobs.arbitration == "compute_first":
            most, share = np.asarray(knobs.occupancy_threshold, float), np.asarray(knobs.guaranteed_share, float)
            self._gate, self.weight = most / (1 + most), share / (1 - share) / flows
            self._queue = graph.resource("hbm queue", rate * self._gate)

    def reads(self) -> dict[int, Any]:
        """Use per byte of the GEMM's reads."""
        uses: dict[int, Any] = {self.hbm: 1.0, self.busy: 1.0}
        return uses | ({self._queue: self._gate} if self._queue is not None else {})

    def stores(self, traffic: Any, busy: Any) -> dict[int, Any]:
        """Use per byte of the GEMM's stores. They are not in the queue that communication waits for."""
        return {self.hbm: traffic, self.busy: busy}

    def updates(self, reads: float) -> dict[int, Any]:
        """Use per byte of a peer's updates, with `reads` bytes read."""
        traffic, busy = self.update
        uses: dict[int, Any] = {self.hbm: reads + traffic, self.busy: reads + busy}
        return uses | ({self._queue: reads + busy} if self._queue is not None else {})

    def moves(self, reads: float, *, updates: bool) -> dict[int, Any]:
        """Use per byte that a kernel sends, with `reads` bytes read and, by symmetry, the incoming byte stored."""
        traffic, busy = self.update if updates else (1.0, 1.0)
        return {self.hbm: reads + traffic, self.comm_busy: reads + busy}


class _Producer:
    """GEMM of one representative GPU, whose output is made piece by piece.

    chunk: bytes of the output that each GPU keeps, made in `pieces`.
    """

    def __init__(self, knobs: TriggeredSchedule, system: System, overlap: Overlap) -> None:
        self.knobs, self.system, self.graph = knobs, system, GraphBuilder()
        gemm = overlap.gemm
        self.gpus = gemm.shards
        self.ring = system.node.topology == "ring"
        shape, self._k = (gemm.m, gemm.local_n, gemm.local_k), gemm.local_k
        bypass = knobs.near_memory and knobs.reduction != "serial"  # updates; plain stores go through the cache
        self._staged: StagedGemm = stage_gemm(system.gpu, shape, precision=gemm.precision, bypass=bypass)
        self.chunk: Any = self._staged.write_bytes / self.gpus
        self.pieces = -(-knobs.num_chunks // self.gpus)
        self.memory = _Memory(knobs, system, self.graph, flows=1 if self.ring else self.gpus - 1)
        self._stored: list[int] = []

    def produce(self, leave: Callable[[int, int, int], int]) -> dict[int, list[int]]:
        """Add the GEMM, piece after piece; return the tasks that move the pieces of each chunk.

        leave: adds such a task, given chunk, piece and the task that completes the piece. Chunk follows chunk around a
        ring; on a mesh, where each has a link of its own, they alternate. First come, first served, the GEMM waits in
        the queue that the stores of a piece leave.
        """
        parts = self.gpus * self.pieces
        departures: dict[int, list[int]] = {chunk: [] for chunk in range(self.gpus)}
        last: list[int] = []
        before: Any = 0.0
        for index in range(parts):
            until = self._staged.elapsed((index + 1) / parts)
            gemm = self._piece(index, np.maximum(until - before, 0.0), last)
            chunk = index // self.pieces if self.ring else index % self.gpus
            before, departure = until, leave(chunk, len(departures[chunk]), gemm)
            queued = self.knobs.arbitration == "fcfs" and departure in self._stored[-1:]
            last = [self._wait(index, gemm) if queued else gemm]
            departures[chunk].append(departure)
        return departures

    def _wait(self, index: int, gemm: int) -> int:
        """Add the wait of the next reads behind the updates of a piece."""
        options: dict[str, Any] = {"lane": "compute", "group": "gemm", "limiter": "HBM queue"}
        return self.graph.task(f"queue {index}", "gemm", after=[gemm], work=self._queue_s, cap=1.0, **options)

    @cached_property
    def _queue_s(self) -> Any:
        """Time [s] that reads wait on average behind the updates of a piece."""
        seconds = self.memory.update[1] / np.asarray(self.system.gpu.hbm_bytes_per_s)
        share = self._staged.queue_share(self._staged.wave_bytes * seconds, self._steps)
        return share * self.chunk / self.pieces * seconds

    @cached_property
    def _steps(self) -> Any:
        """Steps in which a workgroup multiplies."""
        return np.ceil(np.asarray(self._k, float) / self.system.gpu.gemm.tile_depth)

    def _piece(self, index: int, share: Any, after: list[int]) -> int:
        """Add the serial reads of a piece, then its multiplication with the concurrent reads."""
        gpu, stage = self.system.gpu, self._staged
        first = np.asarray(gpu.gemm.serial_fraction) * share * stage.read_bytes
        beside = (1 - np.asarray(gpu.gemm.serial_fraction)) * stage.read_bytes
        hbm = gpu.hbm_bytes_per_s
        delay = gpu.kernel_launch_s if index == 0 else 0.0
        common: dict[str, Any] = {"lane": "compute", "group": "gemm"}
        seconds = first / hbm
        reads = self.memory.reads()
        fetched = self.graph.task(
            f"fetch {index}", "gemm", after=after, work=first, cap=hbm, uses=reads, delay=delay, limiter="HBM",
            alone_s=seconds, wide_s=seconds, ideal_s=seconds, **common,
        )  # fmt: skip
        # no reads beside the multiplication if the library hides none
        uses = {resource: beside * use for resource, use in reads.items()} if np.any(beside > 0) else {}
        seconds = share * np.maximum(stage.compute_s, beside / hbm)
        return self.graph.task(
            f"gemm {index}", "gemm", after=[fetched], work=share, cap=1 / stage.compute_s, uses=uses,
            weight=1 / np.maximum(beside, 1.0), limiter="compute", flop=share * stage.flop,
            alone_s=seconds, wide_s=seconds, ideal_s=seconds, **common,
        )  # fmt: skip

    def store(self, label: str, gemm: int, *, update: bool) -> int:
        """Store the output of a piece in the GPU's own memory, after that of the piece before it."""
        (traffic, busy), amount = self.memory.update if update else (1.0, 1.0), self.chunk / self.pieces
        seconds = amount * busy / self.system.gpu.hbm_bytes_per_s
        task = self.graph.task(
            label,
            "store",
            after=[gemm, *self._stored[-1:]],
            work=amount,
            uses=self.memory.stores(traffic, busy),
            alone_s=seconds,
            wide_s=seconds,
            lane="stores",
            limiter="HBM",
            weight=1 / np.asarray(busy),
            priority=self.memory.store_priority,
        )
        self._stored.append(task)
        return task


@dataclass(frozen=True)
class _Flow:
    """Movement of bytes. gpu_uses: of the GPU's resources, for a byte. pace [bytes/s]. command_s: set-up [s] of the
    DMA command that moves them; None for stores and kernels.
    """

    gpu_uses: Mapping[int, Any]
    pace: Any
    lane: str = "reduce_scatter"
    command_s: Any = None


class _Reduction:
    """Reduction of the chunks that a GEMM makes, over the GPUs that share it, and the all-gather of an all-reduce."""

    def __init__(self, producer: _Producer, pattern: Pattern) -> None:
        self._producer, self._knobs, self._system = producer, producer.knobs, producer.system
        self._gpus, self._ring, self._chunk = producer.gpus, producer.ring, producer.chunk
        self._memory, self._graph, self._pattern = producer.memory, producer.graph, pattern
        if self._knobs.reduction == "tracked" and self._ring:
            self._slow()

    def _slow(self) -> None:
        """Add the slowdowns between the GEMM and transfers by DMA commands (`gpu.contention`)."""
        factor = 1 / np.asarray(self._system.gpu.contention.dma_beside_gemm, float)
        self._graph.slows("gemm", while_active="communication", factor=factor)
        self._graph.slows("communication", while_active="gemm", factor=factor)

    def add(self) -> list[int]:
        """Add the GEMM and its reduction; return the tasks before an all-gather."""
        return self._reduce_tracked() if self._knobs.reduction == "tracked" else self._reduce_separately()

    def _reduce_tracked(self) -> list[int]:
        """Add a tracked reduction, whose chunks leave as they are made."""
        stored_chunks = range(1, self._gpus) if self._ring else (self._gpus - 1,)

        def leave(chunk: int, piece: int, gemm: int) -> int:
            label = f"store {chunk}.{piece}"
            if chunk in stored_chunks:
                return self._producer.store(label, gemm, update=True)
            route = self._hop if self._ring else self._peers[chunk]
            return self._send(label, route, self._chunk / self._producer.pieces, after=[gemm])

        departures = self._producer.produce(leave)
        if not self._ring:
            return [task for tasks in departures.values() for task in tasks]
        sent = departures[0]
        for place in range(1, self._gpus - 1):
            sent = [self._forward(f"forward {place}", after=[*departures[place], *sent])]
        return [*departures[self._gpus - 1], *sent]

    def _send(self, label: str, route: Route, amount: Any, *, after: Sequence[int]) -> int:
        """Add a GEMM's stores into a peer's memory, and by symmetry updates of this GPU's memory."""
        return self._transfer(label, route, amount, _Flow(self._memory.updates(0.0), self._pace(route)), after=after)

    def _forward(self, label: str, *, after: Sequence[int]) -> int:
        """Add a DMA command that reads a chunk and updates the neighbour's, by symmetry this GPU's."""
        dma = self._system.gpu.dma
        pace = np.minimum(self._pace(self._hop), dma.bytes_per_s)
        flow = _Flow(self._memory.updates(1.0), pace, command_s=dma.setup_s)
        return self._transfer(label, self._hop, self._chunk, flow, after=after)

    def _reduce_separately(self) -> list[int]:
        """Add the reduce-scatter after the GEMM, or beside it at no cost."""
        near, ideal = self._knobs.near_memory, self._knobs.reduction == "ideal"
        streamed = range(1 if self._ring else self._gpus - 1) if self._updates_in_place else range(0)

        def leave(chunk: int, piece: int, gemm: int) -> int:
            if chunk in streamed:
                return gemm
            return self._producer.store(f"store {chunk}.{piece}", gemm, update=self._updates_in_place)

        stored = [task for tasks in self._producer.produce(leave).values() for task in tasks]
        begun = [] if ideal else [self._launch("reduce_scatter", stored)]
        moved = self._ring_steps(begun) if self._ring else self._direct_steps(begun)
        return [*stored, *(moved if near else [self._final(moved)])]

    @property
    def _updates_in_place(self) -> bool:
        """Flag: outputs are added at their destination at once, and a chunk to be sent leaves as it is made."""
        return self._knobs.near_memory and self._knobs.reduction == "ideal"

    def _ring_steps(self, after: list[int]) -> list[int]:
        """Add N - 1 hops; from the second on the kernel or the memory adds incoming data to the local data."""
        for hop in range(1, self._gpus):
            reads = (
                2.0 if hop > 1 and not self._knobs.near_memory else 0.0 if hop == 1 and self._updates_in_place else 1.0
            )
            flow = _Flow(self._memory.moves(reads, updates=self._knobs.near_memory), self._pace(self._hop))
            after = [self._transfer(f"reduce {hop}", self._hop, self._chunk, flow, after=after)]
        return after

    def _direct_steps(self, after: list[int]) -> list[int]:
        peers = self._peers
        uses = self._memory.moves(0.0 if self._updates_in_place else 1.0, updates=self._knobs.near_memory)
        flow = _Flow(uses, self._pace(peers[0], peers))
        return [self._transfer(f"reduce {route.peer}", route, self._chunk, flow, after=after) for route in peers]

    def _final(self, after: list[int]) -> int:
        """Add the kernel that sums the chunks of the neighbour or of all peers with the local chunk."""
        parts = 3.0 if self._ring else self._gpus + 1.0
        seconds = parts * self._chunk / self._system.gpu.hbm_bytes_per_s
        uses = {self._memory.hbm: parts, self._memory.comm_busy: parts}
        return self._graph.task(
            "final sum", "reduce", after=after, lane="reduce_scatter", limiter="HBM", work=self._chunk, uses=uses,
            alone_s=seconds, wide_s=seconds,
        )  # fmt: skip

    def gather(self, after: list[int]) -> None:
        """Add the all-gather: N - 1 hops, or from all peers at once; each chunk is read and written once."""
        after, uses = [self._launch("all_gather", after)], {self._memory.hbm: 2.0, self._memory.busy: 2.0}
        if self._ring:
            flow = _Flow(uses, self._by_kernel([self._hop]), "all_gather")
            for hop in range(1, self._gpus):
                after = [self._transfer(f"gather {hop}", self._hop, self._chunk, flow, after=after)]
            return
        peers = self._peers
        flow = _Flow(uses, self._by_kernel(peers), "all_gather")
        for route in peers:
            self._transfer(f"gather {route.peer}", route, self._chunk, flow, after=after)

    def _launch(self, label: str, after: list[int]) -> int:
        delay = setup(self._system, by=self._kernel)
        return self._graph.task(f"launch {label}", "launch", after=after, lane="launch", limiter="launch", delay=delay)

    @property
    def _kernel(self) -> TransferMode:
        return TransferMode("cu", self._system.gpu.num_cus, self._pattern)

    @property
    def _hop(self) -> Route:
        """Route to the next GPU of the ring."""
        return Route(1, {"link.cw": 1.0}, 1)

    @property
    def _peers(self) -> list[Route]:
        """Routes to the other GPUs of a mesh or at a switch that share the GEMM."""
        return routes(self._system.node, self._pattern)[: self._gpus - 1]

    def _by_kernel(self, active: Sequence[Route]) -> Any:
        return rate(self._system, active[0], active, by=self._kernel).bytes_per_s

    def _pace(self, route: Route, active: Sequence[Route] = ()) -> Any:
        """Rate [bytes/s] of a reduction over a route: of the links for stores by hardware, else of a kernel."""
        if self._knobs.reduction == "tracked" or (self._knobs.reduction == "ideal" and self._knobs.near_memory):
            return np.asarray(np.min([np.asarray(links(self._system.node)[name]) for name in route.loads], axis=0))
        return self._by_kernel(active or [route])

    def _transfer(self, label: str, route: Route, amount: Any, flow: _Flow, *, after: Sequence[int]) -> int:
        uses = {**{self._memory.links[name]: load for name, load in route.loads.items()}, **flow.gpu_uses}
        busy = next(
            (use for place, use in flow.gpu_uses.items() if place in (self._memory.busy, self._memory.comm_busy)), 1.0
        )
        seconds, tracked = amount / flow.pace, self._knobs.reduction == "tracked" and flow.lane == "reduce_scatter"
        return self._graph.task(
            label,
            "transfer",
            after=after,
            work=amount,
            cap=flow.pace,
            uses=uses,
            alone_s=seconds,
            wide_s=seconds,
            lane=flow.lane,
            limiter="link",
            moved_bytes=amount,
            delay=self._system.node.hop_latency_s + np.asarray(0.0 if flow.command_s is None else flow.command_s),
            group="" if flow.command_s is None else "communication",
            weight=self._memory.weight / np.asarray(busy),
            cus=0.0 if tracked else self._system.gpu.num_cus,
            ideal_s=amount / self._links_rate,
        )

    @cached_property
    def _links_rate(self) -> Any:
        """Rate [bytes/s] of all links of a GPU that its chunks may use at once."""
        capacity = links(self._system.node)
        if self._ring or "port" in capacity:
            return np.asarray(capacity["link.cw" if self._ring else "port"])
        return (self._gpus - 1) * np.asarray(self._system.node.link_bytes_per_s)


def traffic(graph: TaskGraph) -> dict[str, float]:
    """HBM traffic [bytes] of a graph of this family, of one design, by component: reads and writes of the GEMM, of the
    reduce-scatter and of the all-gather. Bytes of a store or a transfer that are not written are read.
    """
    components = dict.fromkeys(("GEMM reads", "GEMM writes", "RS reads", "RS writes", "AG reads", "AG writes"), 0.0)
    work, use, hbm = graph["work"][0], graph["use"][0], graph.resources.index("hbm")
    for task, resource, amount in zip(graph.use_task.tolist(), graph.use_resource.tolist(), use.tolist(), strict=True):
        if resource != hbm:
            continue
        moved, kind = float(work[task]), graph.kinds[task]
        if kind == "gemm":
            components["GEMM reads"] += amount * moved
        elif kind == "store":
            components["GEMM writes"] += moved
            components["GEMM reads"] += (amount - 1) * moved
        else:
            name = "AG" if graph.lanes[task] == "all_gather" else "RS"
            components[f"{name} writes"] += moved
            components[f"{name} reads"] += (amount - 1) * moved
    return components


SCHEDULE = TriggeredSchedule
