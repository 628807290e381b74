"""Tasks of fused kernels and of a library's collectives on the GPUs of `search_spaces/persistent.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from search_spaces.fused_knobs import FusedKnobs, issue_order, partners, remote_chunks
from search_spaces.segment_costs import Move, SegmentCost, SegmentCosts, as_scalar
from simulators.costs.fabric import capacities, num_gpus, phases
from simulators.costs.memory_bound import KernelCost, PeerStores, kernel_cost
from simulators.hardware.machine import System
from simulators.hardware.schedule_system import WholeNode
from simulators.overlap.node import piece
from simulators.taskgraph.graph import GraphBuilder
from simulators.workloads.operators import Collective, Elementwise, Embedding, Gemm, Gemv, Mlp, Workload

GpuTasks = list[list[int]]
"""Tasks by simulated GPU."""


@dataclass
class GpuResources:
    """One GPU that is simulated: its load over the mean, its resources, the tails of its streams."""

    place: int
    load: Any
    hbm: int
    cu: int
    wires: Mapping[str, int]
    stream: list[int] = field(default_factory=list)
    library: list[int] = field(default_factory=list)

    @classmethod
    def add(cls, graph: GraphBuilder, system: System, place: int, load: Any) -> GpuResources:
        """Add the resources of a GPU to a graph."""
        numbered = place or isinstance(system, WholeNode)  # of one GPU, whose resources are numbered, too
        end = f".{place}" if numbered else ""
        hbm = graph.resource(f"hbm{end}", system.gpu.hbm_bytes_per_s)
        cu = graph.resource(f"cu{end}", system.gpu.num_cus)
        wires = {name: graph.resource(f"{name}{end}", rate) for name, rate in capacities(system).items()}
        return cls(place, load, hbm, cu, wires)

    def task_name(self, label: str) -> str:
        """Name of a task, with the node that it runs on unless that is the first."""
        return f"node {self.place}: {label}" if self.place else label

    def kind(self, kind: str) -> str:
        """Kind of a task, separate for all GPUs but the first: metrics are those of the first GPU, the busiest."""
        return f"peer's {kind}" if self.place else kind

    def metric_name(self, amount: Any) -> Any:
        """Amount that metrics count: zero for all GPUs but the first."""
        return 0.0 if self.place else amount


@dataclass(frozen=True)
class Slice:
    """Rows of a move that are sent together. cus: of a library's kernel that moves them, None for a fused one.

    copied: they are read to be sent inside the node. staged: they wait for a consumer.
    """

    label: str
    rows: Any
    cus: Any
    copied: bool
    staged: bool


@dataclass(frozen=True)
class OperatorPart:
    """Part of an operator: share of its time, FLOP, flag for a kernel launch."""

    label: str
    share: Any
    flop: Any
    launched: bool


@dataclass(frozen=True)
class _Kernel:
    """Common parameters of the parts of an operator. scales: its time grows with the load; whole_s: unfused time."""

    scales: bool
    seconds: Any
    whole_s: Any
    hbm_bytes_per_s: Any
    weight: Any
    launch_s: Any
    limiter: str


@dataclass(frozen=True)
class Fusion:
    """A workload on a system, its collectives, and the operators that share a kernel with one.

    busiest_load: load of the GPU that has most, over the mean. moves: collectives by name. partners: operator by
    collective, where both are one kernel. num_slices: that a fused kernel sends.
    """

    system: System
    workload: Workload
    knobs: FusedKnobs
    busiest_load: Any

    @cached_property
    def moves(self) -> Mapping[str, Move]:
        """Transfers of each collective, by its name."""
        return {
            name: Move(name, op, phases(self.system, op.pattern, self.knobs.collective), num_gpus(self.system))
            for name, op in self.workload.operators.items()
            if isinstance(op, Collective)
        }

    @cached_property
    def partners(self) -> Mapping[str, str]:
        """Operator by the collective that shares its kernel."""
        if self.knobs.kernel != "fused":
            return {}
        pairs = partners(self.workload, str(self.knobs.pairs))
        return {name: op for name, op in pairs.items() if self.moves[name].segments}

    @cached_property
    def move_of(self) -> Mapping[str, str]:
        """Collective by the operator that shares its kernel."""
        return {op: name for name, op in self.partners.items()}

    @cached_property
    def num_slices(self) -> int:
        """Chunks of a result that go to other GPUs."""
        assert self.knobs.num_chunks is not None
        return remote_chunks(self.knobs.num_chunks, num_gpus(self.system))

    @cached_property
    def occupancy_loss(self) -> Any:
        """Share of a GPU's CUs that fused kernels lose."""
        return 0.0 if self.knobs.occupancy_loss is None else self.knobs.occupancy_loss

    @cached_property
    def segment_costs(self) -> SegmentCosts:
        """Costs of transfers."""
        return SegmentCosts(
            self.system,
            tuple(self.moves.values()),
            self.busiest_load,
            near_memory=self.knobs.near_memory,
            store_cus=self.system.gpu.num_cus * (1 - np.asarray(self.occupancy_loss)),
        )

    def stores(self, move: str) -> bool:
        """Return True if a fused kernel stores its output into the memory of peers."""
        return bool(self.knobs.zero_copy) and self.partners[move] in self.moves[move].op.after

    @property
    def may_overlap(self) -> bool:
        """Flag: a library's collective and a compute operator are independent."""
        operators, ancestors = self.workload.operators, dict[str, set[str]]()
        for name in issue_order(self.workload):
            op = operators[name]
            ancestors[name] = set(op.after).union(*(ancestors[before] for before in op.after))
        return any(
            other not in ancestors[name] and name not in ancestors[other]
            for name in self.moves.keys() - self.partners.keys()
            for other, op in operators.items()
            if not isinstance(op, Collective)
        )

    def is_consumed(self, name: str) -> bool:
        """Return True if an operator waits for this one."""
        return any(name in op.after for op in self.workload.operators.values())


class KernelTasks:
    """Kernels that compute or copy, each next in its GPU's stream."""

    def __init__(self, fusion: Fusion, graph: GraphBuilder) -> None:
        self._fusion, self._graph = fusion, graph
        self._system, self._operators = fusion.system, fusion.workload.operators
        self._costs: dict[tuple[str, bool], KernelCost] = {}
        self._kernels: dict[str, _Kernel] = {}

    def cost(self, name: str, *, fused: bool = False) -> KernelCost:
        """Cost of an operator, computed once."""
        op = self._operators[name]
        assert not isinstance(op, Collective)
        if (name, fused) not in self._costs:
            self._costs[name, fused] = self._fused_cost(name) if fused else kernel_cost(self._system, op)
        return self._costs[name, fused]

    def _fused_cost(self, name: str) -> KernelCost:
        """Cost of a kernel that sends; with zero copy, what it stores at peers is not stored in its own memory.

        It takes as long: as many bytes come from peers.
        """
        op, move = self._operators[name], self._fusion.moves[self._fusion.move_of[name]]
        assert isinstance(op, (Embedding, Gemm, Gemv))
        costs = self._fusion.segment_costs
        stores, direct = costs.peer_stores(move, self.cost(name).seconds), self._fusion.stores(move.name)
        stores = PeerStores(stores, copied=not direct)
        cost = kernel_cost(self._system, op, occupancy_loss=self._fusion.occupancy_loss, stores=stores)
        elsewhere = np.minimum(costs.inside_bytes(move), op.out_bytes) if direct else 0.0
        return replace(cost, hbm_bytes=cost.hbm_bytes - elsewhere)

    def compute(self, gpu: GpuResources, name: str, part: OperatorPart, *, after: Sequence[int]) -> int:
        """Add a part of an operator, next in the stream."""
        kernel = self._operator_kernel(name)
        load = gpu.load if kernel.scales else 1.0
        work, unfused_s = part.share * load * kernel.seconds, part.share * load * kernel.whole_s
        gpu.stream = [
            self._graph.task(
                gpu.task_name(part.label),
                gpu.kind("gemm"),
                after=[*gpu.stream, *after],
                uses={gpu.hbm: kernel.hbm_bytes_per_s, gpu.cu: self._system.gpu.num_cus},
                work=work,
                cap=1.0,
                weight=kernel.weight,
                delay=kernel.launch_s if part.launched else 0.0,
                lane="compute",
                limiter=kernel.limiter,
                group=gpu.task_name("compute"),
                flop=gpu.metric_name(part.flop * load),
                alone_s=unfused_s if gpu.place else work,  # losses count decomposition on the busiest GPU only
                wide_s=unfused_s,
                ideal_s=gpu.metric_name(unfused_s),
            )
        ]
        return gpu.stream[0]

    def compute_near_memory(self, gpu: GpuResources, name: str, part: OperatorPart, *, after: Sequence[int]) -> int:
        """Add an elementwise operator on units in memory, beside the stream; it shares the HBM with the GPU."""
        op, pim, rate = self._operators[name], self._system.gpu.pim, self._system.gpu.hbm_bytes_per_s
        assert isinstance(op, Elementwise) and pim is not None
        words = pim.per_unit(gpu.load * np.asarray(op.tensor_bytes))
        seconds = pim.map_s(words, reads=op.reads, writes=op.writes, operations=op.flop_per_element)
        return self._graph.task(
            gpu.task_name(name),
            gpu.kind("gemm"),
            after=after,
            uses={gpu.hbm: rate},
            work=seconds,
            cap=1.0,
            weight=1 / np.asarray(rate),
            delay=self._system.gpu.kernel_launch_s,
            lane="memory",
            limiter="units in memory",
            flop=gpu.metric_name(part.flop * gpu.load),
            alone_s=seconds,
            wide_s=seconds,
            ideal_s=gpu.metric_name(seconds),
        )

    def _operator_kernel(self, name: str) -> _Kernel:
        """Common parameters of the parts of an operator."""
        if name not in self._kernels:
            cost, unfused, gpu = self.cost(name, fused=name in self._fusion.move_of), self.cost(name), self._system.gpu
            self._kernels[name] = _Kernel(
                scales=not isinstance(self._operators[name], Mlp),
                seconds=as_scalar(cost.seconds),
                whole_s=as_scalar(unfused.seconds),
                hbm_bytes_per_s=as_scalar(cost.hbm_bytes / cost.seconds),
                weight=as_scalar(cost.seconds / cost.hbm_bytes),
                launch_s=as_scalar(cost.num_kernels * np.asarray(gpu.kernel_launch_s)),
                limiter="HBM" if np.all(cost.hbm_bytes / gpu.hbm_bytes_per_s > 0.5 * cost.seconds) else "compute",
            )
        return self._kernels[name]

    def copy(self, gpu: GpuResources, move: Move, label: str, *, after: Sequence[int]) -> None:
        """Add a kernel that reads and writes the whole tensor of a collective."""
        amount = move.load(gpu.load) * move.op.payload_bytes
        rate = self._system.gpu.stream_share * np.asarray(self._system.gpu.hbm_bytes_per_s) / 2
        gpu.stream = [
            self._graph.task(
                gpu.task_name(f"{label} {move.name}"),
                gpu.kind("copy"),
                after=[*gpu.stream, *after],
                uses={gpu.hbm: 2.0},
                work=amount,
                cap=rate,
                weight=0.5,
                delay=self._system.gpu.kernel_launch_s,
                lane="compute",
                limiter="HBM",
                alone_s=amount / rate,
                wide_s=amount / rate,
            )
        ]


class Transfers:
    """Transfers of collectives from each GPU, each after the one before it on the same wire."""

    def __init__(self, fusion: Fusion, graph: GraphBuilder) -> None:
        self._fusion, self._graph = fusion, graph
        self._wires: dict[tuple[Any, ...], int] = {}
        self._flags: dict[tuple[str, int], Any] = {}

    def send(self, gpu: GpuResources, move: Move, index: int, *, after: Sequence[int]) -> tuple[int, list[int]]:
        """Send a slice from a fused kernel; return (flag that signals its arrival, its last transfers)."""
        assert self._fusion.system.gpu.persistent is not None
        stored, post_s = self._fusion.stores(move.name), self._fusion.system.gpu.persistent.post_s
        label = f"{move.name} {index}"
        rows = piece(move.rows, self._fusion.num_slices, index)
        chunk = Slice(label, rows, None, not stored, self._fusion.is_consumed(move.name))
        flag, sent = -1, list(after)
        if not stored or any(not segment.inside for segments in move.segments for segment in segments):
            sent = [self.launch(gpu, f"post {label}", post_s, after=sent)]
        for phase in range(len(move.segments)):
            moved = self.phase(gpu, move, chunk, phase, after=sent)
            flag = self.launch(gpu, f"flag {label}", self._flag_s(move, phase), after=moved)
            sent = [flag]
        return flag, moved

    def _flag_s(self, move: Move, phase: int) -> Any:
        """Delay from the last byte of a phase until its consumer continues."""
        assert self._fusion.system.gpu.persistent is not None
        if (move.name, phase) not in self._flags:
            poll_s = self._fusion.system.gpu.persistent.poll_s
            latency = np.maximum.reduce(np.broadcast_arrays(*(segment.latency_s for segment in move.segments[phase])))
            self._flags[move.name, phase] = as_scalar(latency + np.asarray(poll_s))
        return self._flags[move.name, phase]

    def phase(self, gpu: GpuResources, move: Move, part: Slice, phase: int, *, after: Sequence[int]) -> list[int]:
        """Add the segments of a phase at once, each after the transfer before it on the same wire."""
        transfers, rows = [], move.load(gpu.load) * part.rows
        segments = self._fusion.segment_costs.of_phase(move, phase, cus=part.cus, copied=part.copied)
        last = phase == len(move.segments) - 1
        for place, segment in enumerate(segments):
            wire, amount = (gpu.place, move.name, phase, place), rows * segment.row_bytes
            options = _transfer_options(gpu, segment, amount)
            options |= {"staged_bytes": gpu.metric_name(amount if part.staged and last else 0.0)}
            options |= {"group": "" if part.cus is None else gpu.task_name("library")}
            before = [*after, *([self._wires[wire]] if wire in self._wires else [])]
            self._wires[wire] = self._graph.task(
                gpu.task_name(part.label), gpu.kind("transfer"), after=before, **options
            )
            transfers.append(self._wires[wire])
        return transfers

    def launch(self, gpu: GpuResources, label: str, delay: Any, *, after: Sequence[int]) -> int:
        """Add a time that passes on a GPU: a launch, a post or a flag."""
        name, kind = gpu.task_name(label), gpu.kind("launch")
        return self._graph.task(name, kind, after=after, delay=delay, lane="communication", limiter="launch")


def _transfer_options(gpu: GpuResources, segment: SegmentCost, amount: Any) -> dict[str, Any]:
    """Options of a transfer's task: resources and isolated time."""
    uses = {gpu.wires[name]: load for name, load in segment.loads.items()}
    uses |= {gpu.hbm: segment.hbm_bytes_per_s} if segment.hbm_bytes_per_s is not None else {}
    uses |= {gpu.cu: segment.cus / segment.cap} if segment.cus is not None else {}
    isolated_s = amount / segment.rate
    return {
        "uses": uses,
        "work": isolated_s,
        "cap": segment.cap,
        "weight": segment.weight,
        "delay": segment.delay,
        "lane": "links" if segment.inside else "network",
        "limiter": "link" if segment.inside else "network",
        "cus": 0.0 if segment.cus is None else gpu.metric_name(segment.cus),
        "moved_bytes": gpu.metric_name(amount),
        "alone_s": isolated_s,
        "wide_s": isolated_s,
        "ideal_s": gpu.metric_name(amount * segment.ideal_s_per_byte),
    }
