"""Lowering of `search_spaces/fused.py`: kernels in one stream on each GPU, collectives by a library or from kernels.

One GPU is simulated of one node, or of each if loads differ. Times of a fused kernel of n slices (arXiv:2305.06942):

    t += T_c(p) / n ;   remote: wire = max(wire, t + o_post) + V_slice / B ;   T = max(t, wire + latency + poll)

The tasks below give these times without contention: a chunk of compute, a post, a transfer that waits for the one
before it on the same wire, a flag. The unit of work is the second of isolated time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from search_spaces.fused_knobs import FusedKnobs, issue_order, partners, remote_chunks
from search_spaces.segment_costs import Move, SegmentCost, SegmentCosts, as_scalar
from simulators.costs.fabric import capacities, loads_of_nodes, num_gpus, phases
from simulators.costs.memory_bound import KernelCost, kernel_cost
from simulators.costs.transfer import TransferMode, library_cus, setup
from simulators.hardware.system import System, WholeNode
from simulators.overlap.node import piece
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.workloads.operators import Collective, Elementwise, Mlp, Operator, Workload


@dataclass
class _Gpu:
    """One GPU that is simulated: its load over the mean, its resources, the tails of its streams."""

    place: int
    load: Any
    hbm: int
    cu: int
    wires: Mapping[str, int]
    stream: list[int] = field(default_factory=list)
    library: list[int] = field(default_factory=list)

    def task_name(self, label: str) -> str:
        return f"node {self.place}: {label}" if self.place else label

    def kind(self, kind: str) -> str:
        """Kind of a task, separate for all GPUs but the first: metrics are those of the first GPU, the busiest."""
        return f"peer's {kind}" if self.place else kind

    def metric_name(self, amount: Any) -> Any:
        """Amount that metrics count: zero for all GPUs but the first."""
        return 0.0 if self.place else amount


@dataclass(frozen=True)
class _Slice:
    """Rows of a move that are sent together. cus: of a library's kernel that moves them, None for a fused one.

    copied: they are read to be sent inside the node. staged: they wait for a consumer.
    """

    label: str
    rows: Any
    cus: Any
    copied: bool
    staged: bool


@dataclass(frozen=True)
class _Part:
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


_Tasks = list[list[int]]  # by simulated GPU


class Lowering:
    """Builder of the graph of one design."""

    def __init__(self, system: System, workload: Workload, knobs: FusedKnobs) -> None:
        assert system.gpu.persistent is not None
        self._system, self._workload, self._knobs, self._persistent = system, workload, knobs, system.gpu.persistent
        self._graph = GraphBuilder()
        self._gpus = [self._gpu(place, load) for place, load in enumerate(loads_of_nodes(system))]
        self._arrived: dict[str, _Tasks] = {}  # after which an operator is done
        self._staged: dict[str, _Tasks] = {}  # transfers whose bytes wait for a consumer
        self._wires: dict[tuple[Any, ...], int] = {}
        self._costs: dict[tuple[str, bool], KernelCost] = {}
        self._kernels: dict[str, _Kernel] = {}
        self._flags: dict[tuple[str, int], Any] = {}
        self._moves = {
            name: Move(name, op, phases(system, op.pattern, knobs.collective), num_gpus(system))
            for name, op in workload.operators.items()
            if isinstance(op, Collective)
        }
        self._loss = 0.0 if knobs.occupancy_loss is None else knobs.occupancy_loss
        cus, moves = system.gpu.num_cus * (1 - np.asarray(self._loss)), tuple(self._moves.values())
        how: dict[str, Any] = {"near_memory": knobs.near_memory, "store_cus": cus}
        self._segment_costs = SegmentCosts(system, moves, self._gpus[0].load, **how)
        fused = partners(workload, str(knobs.pairs)) if knobs.kernel == "fused" else {}
        self._partner = {name: op for name, op in fused.items() if self._moves[name].segments}
        self._move_of = {op: name for name, op in self._partner.items()}

    def _gpu(self, place: int, load: Any) -> _Gpu:
        numbered = place or isinstance(self._system, WholeNode)  # of one GPU, whose resources are numbered, too
        end, rates = f".{place}" if numbered else "", capacities(self._system)
        hbm = self._graph.resource(f"hbm{end}", self._system.gpu.hbm_bytes_per_s)
        cu = self._graph.resource(f"cu{end}", self._system.gpu.num_cus)
        wires = {name: self._graph.resource(f"{name}{end}", rate) for name, rate in rates.items()}
        return _Gpu(place, load, hbm, cu, wires)

    def build(self) -> TaskGraph:
        """Add the operators in issue order, and build the graph."""
        for name in issue_order(self._workload):
            op = self._workload.operators[name]
            if isinstance(op, Collective):
                self._collective(self._moves[name])
            elif (move := self._move_of.get(name)) is None:
                self._kernel(name)
            elif name in self._moves[move].op.after:
                self._producer(name, self._moves[move])
            else:
                self._consumer(name, self._moves[move])
        self._laws()
        return self._graph.build()

    # ---------------------------------------------------------------- operators

    def _collective(self, move: Move) -> None:
        """Add a collective of a library; that of a fused pair belongs to its kernel."""
        if not move.segments:  # a single GPU
            self._arrived[move.name] = self._before(move.op)
        elif move.name not in self._partner:
            self._library(move)

    def _kernel(self, name: str) -> None:
        """Add an unfused operator, once its inputs are unpacked."""
        op = self._workload.operators[name]
        self._unpack(op)
        part = _Part(name, 1.0, self._cost(name).flop, True)
        waits, staged = self._before(op), self._staged_transfers(op)
        near = isinstance(op, Elementwise) and self._knobs.elementwise == "pim"
        run = self._compute_near_memory if near else self._compute
        self._arrived[name] = [
            [run(gpu, name, part, after=[*before, *transfers])]
            for gpu, before, transfers in zip(self._gpus, waits, staged, strict=True)
        ]
        self._free_staged(name, staged)

    def _producer(self, name: str, move: Move) -> None:
        """Add the slices for other GPUs, each sent when it is done, and the local part."""
        op = self._workload.operators[name]
        self._unpack(op)
        parts, local = self._parts(name, move)
        remote_first = self._knobs.issue_order == "remote_first"
        waits, staged = self._before(op), self._staged_transfers(op)
        flags: list[_Tasks] = [[] for _ in parts]
        moved: list[_Tasks] = [[] for _ in parts]
        for gpu, before, transfers in zip(self._gpus, waits, staged, strict=True):
            after = [*before, *transfers]
            if not remote_first:
                self._compute(gpu, name, replace(local, launched=True), after=after)
            for index, part in enumerate(parts):
                launched = replace(part, launched=remote_first and index == 0)
                task = self._compute(gpu, name, launched, after=after)
                flag, sent = self._send(gpu, move, index, after=[task])
                flags[index].append([flag])
                moved[index].append(sent)
            if remote_first:
                self._compute(gpu, name, local, after=[])
        self._arrived[name] = [list(gpu.stream) for gpu in self._gpus]
        self._free_staged(name, staged)
        self._arrived[move.name] = self._meet(move.name, _join_slices(flags))
        self._staged[move.name] = _join_slices(moved)

    def _consumer(self, name: str, move: Move) -> None:
        """Add the local part, and the slices of incoming data, each on its arrival; sends come before or after it."""
        other_inputs = _without(self._workload.operators[name], move.name)
        self._unpack(other_inputs)
        parts, local = self._parts(name, move)
        waits, inputs, sent = self._before(other_inputs), self._before(move.op), None
        if self._knobs.issue_order == "remote_first":
            for gpu, arrived in zip(self._gpus, inputs, strict=True):
                launch_s = self._system.gpu.kernel_launch_s
                gpu.stream = [self._launch(gpu, name, launch_s, after=[*gpu.stream, *arrived])]
            sent = self._send_all(move, [list(gpu.stream) for gpu in self._gpus])
        for gpu, before, arrived in zip(self._gpus, waits, inputs, strict=True):
            self._compute(gpu, name, replace(local, launched=sent is None), after=[*before, *arrived])
        if sent is None:
            sent = self._send_all(move, [list(gpu.stream) for gpu in self._gpus])
        for part, (flags, moved) in zip(parts, sent, strict=True):
            for gpu, flag, transfers in zip(self._gpus, self._meet(part.label, flags), moved, strict=True):
                task = self._compute(gpu, name, part, after=[*flag, *transfers])
                self._graph.frees(task, transfers)
        self._arrived[name] = [list(gpu.stream) for gpu in self._gpus]
        self._arrived[move.name] = self._arrived[name]

    def _parts(self, name: str, move: Move) -> tuple[list[_Part], _Part]:
        """Parts of an operator: (slices to or from other GPUs, local part)."""
        count, cost = self._num_slices, self._cost(name, fused=True)
        rows: Any = move.op.rows
        flop = np.floor(cost.flop * move.rows / rows)
        sizes = [piece(move.rows, count, index) for index in range(count)]
        slices = [
            _Part(f"{name} {index}", size / rows, piece(flop, count, index), False) for index, size in enumerate(sizes)
        ]
        return slices, _Part(f"{name} local", (rows - move.rows) / rows, cost.flop - flop, False)

    @property
    def _num_slices(self) -> int:
        assert self._knobs.num_chunks is not None
        return remote_chunks(self._knobs.num_chunks, num_gpus(self._system))

    def _cost(self, name: str, *, fused: bool = False) -> KernelCost:
        op = self._workload.operators[name]
        assert not isinstance(op, Collective)
        if (name, fused) not in self._costs:
            loss, stored = (self._loss, self._stored_bytes_per_s(name)) if fused else (0.0, 0.0)
            self._costs[name, fused] = kernel_cost(self._system, op, occupancy_loss=loss, stored_bytes_per_s=stored)
        return self._costs[name, fused]

    def _stored_bytes_per_s(self, name: str) -> Any:
        """Rate at which a fused operator stores into peers' memory."""
        move = self._moves[self._move_of[name]]
        stores = self._knobs.zero_copy and name in move.op.after
        return self._segment_costs.stored_bytes_per_s(move, self._cost(name).seconds) if stores else 0.0

    def _compute(self, gpu: _Gpu, name: str, part: _Part, *, after: Sequence[int]) -> int:
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

    def _compute_near_memory(self, gpu: _Gpu, name: str, part: _Part, *, after: Sequence[int]) -> int:
        """Add an elementwise operator on units in memory, beside the stream; it shares the HBM with the GPU."""
        op, pim, rate = self._workload.operators[name], self._system.gpu.pim, self._system.gpu.hbm_bytes_per_s
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
            cost, unfused, gpu = self._cost(name, fused=name in self._move_of), self._cost(name), self._system.gpu
            self._kernels[name] = _Kernel(
                scales=not isinstance(self._workload.operators[name], Mlp),
                seconds=as_scalar(cost.seconds),
                whole_s=as_scalar(unfused.seconds),
                hbm_bytes_per_s=as_scalar(cost.hbm_bytes / cost.seconds),
                weight=as_scalar(cost.seconds / cost.hbm_bytes),
                launch_s=as_scalar(cost.num_kernels * np.asarray(gpu.kernel_launch_s)),
                limiter="HBM" if np.all(cost.hbm_bytes / gpu.hbm_bytes_per_s > 0.5 * cost.seconds) else "compute",
            )
        return self._kernels[name]

    # ---------------------------------------------------------------- communication

    def _library(self, move: Move) -> None:
        """Pack, launch and move a collective phase by phase, in order with the library's other collectives."""
        packed = self._add_copy(move, "pack", self._before(move.op))
        library = library_cus(self._system, move.op.pattern)
        cus = np.minimum(library, self._system.gpu.num_cus)
        tensor = _Slice(move.name, move.rows, cus, True, self._is_consumed(move.name))
        how = TransferMode("cu", cus, move.op.pattern)
        ends, moved = [], []
        for gpu, before in zip(self._gpus, packed, strict=True):
            after = [*before, *gpu.library]
            ready = [self._launch(gpu, move.name, setup(self._system, by=how), after=after)]
            for phase in range(len(move.segments)):
                ready = self._phase(gpu, move, tensor, phase, after=ready)
            gpu.library = ready
            ends.append(ready)
            moved.append(ready)
        self._arrived[move.name] = self._meet(move.name, ends)
        self._staged[move.name] = moved
        if not self._is_consumed(move.name):  # else who consumes it unpacks it
            self._arrived[move.name] = self._add_copy(move, "unpack", self._arrived[move.name])

    def _send_all(self, move: Move, begun: _Tasks) -> list[tuple[_Tasks, _Tasks]]:
        """Send all slices from all GPUs; return (flags, transfers) of each slice."""
        slices = []
        for index in range(self._num_slices):
            sends = [self._send(gpu, move, index, after=after) for gpu, after in zip(self._gpus, begun, strict=True)]
            slices.append(([[flag] for flag, _ in sends], [sent for _, sent in sends]))
        return slices

    def _send(self, gpu: _Gpu, move: Move, index: int, *, after: Sequence[int]) -> tuple[int, list[int]]:
        """Send a slice from a fused kernel; return (flag that signals its arrival, its last transfers)."""
        stored = bool(self._knobs.zero_copy) and self._partner[move.name] in move.op.after
        label = f"{move.name} {index}"
        rows = piece(move.rows, self._num_slices, index)
        chunk = _Slice(label, rows, None, not stored, self._is_consumed(move.name))
        flag, sent = -1, list(after)
        if not stored or any(not segment.inside for segments in move.segments for segment in segments):
            sent = [self._launch(gpu, f"post {label}", self._persistent.post_s, after=sent)]
        for phase in range(len(move.segments)):
            moved = self._phase(gpu, move, chunk, phase, after=sent)
            flag = self._launch(gpu, f"flag {label}", self._flag_s(move, phase), after=moved)
            sent = [flag]
        return flag, moved

    def _flag_s(self, move: Move, phase: int) -> Any:
        """Delay from the last byte of a phase until its consumer continues."""
        if (move.name, phase) not in self._flags:
            latency = np.maximum.reduce(np.broadcast_arrays(*(segment.latency_s for segment in move.segments[phase])))
            self._flags[move.name, phase] = as_scalar(latency + np.asarray(self._persistent.poll_s))
        return self._flags[move.name, phase]

    def _phase(self, gpu: _Gpu, move: Move, part: _Slice, phase: int, *, after: Sequence[int]) -> list[int]:
        """Add the segments of a phase at once, each after the transfer before it on the same wire."""
        transfers, rows = [], move.load(gpu.load) * part.rows
        segments = self._segment_costs.of_phase(move, phase, cus=part.cus, copied=part.copied)
        last = phase == len(move.segments) - 1
        for place, segment in enumerate(segments):
            wire, amount = (gpu.place, move.name, phase, place), rows * segment.row_bytes
            options = self._transfer_options(gpu, segment, amount)
            options |= {"staged_bytes": gpu.metric_name(amount if part.staged and last else 0.0)}
            options |= {"group": "" if part.cus is None else gpu.task_name("library")}
            before = [*after, *([self._wires[wire]] if wire in self._wires else [])]
            self._wires[wire] = self._graph.task(
                gpu.task_name(part.label), gpu.kind("transfer"), after=before, **options
            )
            transfers.append(self._wires[wire])
        return transfers

    def _transfer_options(self, gpu: _Gpu, segment: SegmentCost, amount: Any) -> dict[str, Any]:
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

    def _launch(self, gpu: _Gpu, label: str, delay: Any, *, after: Sequence[int]) -> int:
        how: dict[str, Any] = {"delay": delay, "lane": "communication", "limiter": "launch"}
        return self._graph.task(gpu.task_name(label), gpu.kind("launch"), after=after, **how)

    def _add_copy(self, move: Move, label: str, waits: _Tasks) -> _Tasks:
        """Add a kernel that reads and writes the whole tensor, next in the stream, if `copies` are modelled."""
        if not self._knobs.copies or move.op.pattern != "all_to_all" or not move.segments:
            return waits
        hbm = np.asarray(self._system.gpu.hbm_bytes_per_s)
        for gpu, before in zip(self._gpus, waits, strict=True):
            amount = move.load(gpu.load) * move.op.payload_bytes
            rate = self._persistent.stream_efficiency * hbm / 2
            gpu.stream = [
                self._graph.task(
                    gpu.task_name(f"{label} {move.name}"),
                    gpu.kind("copy"),
                    after=[*gpu.stream, *before],
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
        return [list(gpu.stream) for gpu in self._gpus]

    def _unpack(self, op: Any) -> None:
        """Unpack an operator's inputs that a library's collectives have moved."""
        for name in op.after:
            if name in self._moves and name not in self._partner:
                self._add_copy(self._moves[name], "unpack", self._arrived[name])

    # ---------------------------------------------------------------- waiting

    def _before(self, op: Any) -> _Tasks:
        """Tasks that an operator waits for, by GPU."""
        return [[task for name in op.after for task in self._arrived[name][index]] for index in range(len(self._gpus))]

    def _staged_transfers(self, op: Any) -> _Tasks:
        """Transfers whose bytes an operator consumes, by GPU."""
        staged = [self._staged[name] for name in op.after if name in self._staged]
        return [[task for tasks in staged for task in tasks[index]] for index in range(len(self._gpus))]

    def _free_staged(self, name: str, staged: _Tasks) -> None:
        for tasks, transfers in zip(self._arrived[name], staged, strict=True):
            self._graph.frees(tasks[-1], transfers)

    def _is_consumed(self, name: str) -> bool:
        return any(name in op.after for op in self._workload.operators.values())

    def _meet(self, name: str, flags: _Tasks) -> _Tasks:
        """Join the flags of all GPUs in one task, as data is complete when all GPUs have sent it."""
        if len(self._gpus) == 1:
            return flags
        after = [task for gpu_flags in flags for task in gpu_flags]
        meeting = self._graph.task(
            f"all have sent {name}", "meeting", after=after, lane="communication", limiter="launch"
        )
        return [[meeting] for _ in self._gpus]

    def _laws(self) -> None:
        """Add the slowdowns between a library's kernels and concurrent compute, as measured on the GPU."""
        gpu = self._system.gpu
        contention = gpu.contention
        factors = {"compute": contention.gemm_beside_cus, "library": contention.cu_copy_beside_gemm}
        if not self._may_overlap():
            return
        for simulated in self._gpus:
            for (name, factor), cause in zip(factors.items(), ("library", "compute"), strict=True):
                if np.any(np.asarray(factor) > 1):
                    rate = 1 / np.asarray(factor, float)
                    self._graph.slows(simulated.task_name(name), while_active=simulated.task_name(cause), factor=rate)

    def _may_overlap(self) -> bool:
        """Return True if a library's collective and a compute operator are independent."""
        operators, ancestors = self._workload.operators, dict[str, set[str]]()
        for name in issue_order(self._workload):
            op = operators[name]
            ancestors[name] = set(op.after).union(*(ancestors[before] for before in op.after))
        alone = [name for name in self._moves if name not in self._partner]
        return any(
            other not in ancestors[name] and name not in ancestors[other]
            for name in alone
            for other, op in operators.items()
            if not isinstance(op, Collective)
        )


def _without(op: Operator, name: str) -> Operator:
    """Copy of an operator without the input `name`."""
    return op.model_copy(update={"after": tuple(before for before in op.after if before != name)})


def _join_slices(slices: Sequence[_Tasks]) -> _Tasks:
    """Join the tasks of all slices, by GPU."""
    return [[task for tasks in of_gpu for task in tasks] for of_gpu in zip(*slices, strict=True)]
