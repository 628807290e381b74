"""Lowering of `search_spaces/fused.py`: kernels in one stream on each GPU, collectives by a library or from kernels.

One GPU is simulated of one node, or of each if loads differ. Times of a fused kernel of n slices (arXiv:2305.06942):

    t += T_c(p) / n ;   remote: wire = max(wire, t + o_post) + V_slice / B ;   T = max(t, wire + latency + poll)

The tasks below give these times without contention: a chunk of compute, a post, a transfer that waits for the one
before it on the same wire, a flag. The unit of work is the second of isolated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from search_spaces.fused_knobs import FusedKnobs, issue_order
from search_spaces.fused_tasks import Fusion, GpuResources, GpuTasks, KernelTasks, OperatorPart, Slice, Transfers
from search_spaces.segment_costs import Move
from simulators.costs.fabric import loads_of_nodes
from simulators.costs.sharing import Sharing
from simulators.costs.transfer import TransferMode, library_cus, setup
from simulators.hardware.machine import System
from simulators.overlap.node import piece
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.workloads.operators import Collective, Elementwise, Operator, Workload


class FusedLowering:
    """Graph of one design, under construction: operators in issue order, and what they wait for."""

    def __init__(self, system: System, workload: Workload, knobs: FusedKnobs) -> None:
        self._system, self._workload, self._knobs = system, workload, knobs
        self._graph = GraphBuilder()
        self._gpus = [
            GpuResources.add(self._graph, system, place, load) for place, load in enumerate(loads_of_nodes(system))
        ]
        self._fusion = Fusion(system, workload, knobs, self._gpus[0].load)
        self._kernels, self._transfers = KernelTasks(self._fusion, self._graph), Transfers(self._fusion, self._graph)
        self._arrived: dict[str, GpuTasks] = {}  # after which an operator is done
        self._staged: dict[str, GpuTasks] = {}  # transfers whose bytes wait for a consumer

    def build(self) -> TaskGraph:
        """Add the operators in issue order, and build the graph."""
        for name in issue_order(self._workload):
            op = self._workload.operators[name]
            if isinstance(op, Collective):
                self._collective(self._fusion.moves[name])
            elif (move := self._fusion.move_of.get(name)) is None:
                self._kernel(name)
            elif name in self._fusion.moves[move].op.after:
                self._producer(name, self._fusion.moves[move])
            else:
                self._consumer(name, self._fusion.moves[move])
        self._laws()
        return self._graph.build()

    # ---------------------------------------------------------------- operators

    def _collective(self, move: Move) -> None:
        """Add a collective of a library; that of a fused pair belongs to its kernel."""
        if not move.segments:  # a single GPU
            self._arrived[move.name] = self._before(move.op)
        elif move.name not in self._fusion.partners:
            self._library(move)

    def _kernel(self, name: str) -> None:
        """Add an unfused operator, once its inputs are unpacked."""
        op = self._workload.operators[name]
        self._unpack(op)
        part = OperatorPart(name, 1.0, self._kernels.cost(name).flop, True)
        waits, staged = self._before(op), self._staged_transfers(op)
        near = isinstance(op, Elementwise) and self._knobs.elementwise == "pim"
        run = self._kernels.compute_near_memory if near else self._kernels.compute
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
        flags: list[GpuTasks] = [[] for _ in parts]
        moved: list[GpuTasks] = [[] for _ in parts]
        for gpu, before, transfers in zip(self._gpus, waits, staged, strict=True):
            after = [*before, *transfers]
            if not remote_first:
                self._kernels.compute(gpu, name, replace(local, launched=True), after=after)
            for index, part in enumerate(parts):
                launched = replace(part, launched=remote_first and index == 0)
                task = self._kernels.compute(gpu, name, launched, after=after)
                flag, sent = self._transfers.send(gpu, move, index, after=[task])
                flags[index].append([flag])
                moved[index].append(sent)
            if remote_first:
                self._kernels.compute(gpu, name, local, after=[])
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
                gpu.stream = [self._transfers.launch(gpu, name, launch_s, after=[*gpu.stream, *arrived])]
            sent = self._send_all(move, [list(gpu.stream) for gpu in self._gpus])
        for gpu, before, arrived in zip(self._gpus, waits, inputs, strict=True):
            self._kernels.compute(gpu, name, replace(local, launched=sent is None), after=[*before, *arrived])
        if sent is None:
            sent = self._send_all(move, [list(gpu.stream) for gpu in self._gpus])
        for part, (flags, moved) in zip(parts, sent, strict=True):
            for gpu, flag, transfers in zip(self._gpus, self._meet(part.label, flags), moved, strict=True):
                task = self._kernels.compute(gpu, name, part, after=[*flag, *transfers])
                self._graph.frees(task, transfers)
        self._arrived[name] = [list(gpu.stream) for gpu in self._gpus]
        self._arrived[move.name] = self._arrived[name]

    def _parts(self, name: str, move: Move) -> tuple[list[OperatorPart], OperatorPart]:
        """Parts of an operator: (slices to or from other GPUs, local part)."""
        count, cost = self._fusion.num_slices, self._kernels.cost(name, fused=True)
        rows: Any = move.op.rows
        flop = np.floor(cost.flop * move.rows / rows)
        sizes = [piece(move.rows, count, index) for index in range(count)]
        slices = [
            OperatorPart(f"{name} {index}", size / rows, piece(flop, count, index), False)
            for index, size in enumerate(sizes)
        ]
        return slices, OperatorPart(f"{name} local", (rows - move.rows) / rows, cost.flop - flop, False)

    # ---------------------------------------------------------------- communication

    def _library(self, move: Move) -> None:
        """Pack, launch and move a collective phase by phase, in order with the library's other collectives."""
        packed = self._add_copy(move, "pack", self._before(move.op))
        library = library_cus(self._system, move.op.pattern)
        cus = np.minimum(library, self._system.gpu.num_cus)
        tensor = Slice(move.name, move.rows, cus, True, self._fusion.is_consumed(move.name))
        how = TransferMode("cu", cus, move.op.pattern)
        ends, moved = [], []
        for gpu, before in zip(self._gpus, packed, strict=True):
            after = [*before, *gpu.library]
            ready = [self._transfers.launch(gpu, move.name, setup(self._system, by=how), after=after)]
            for phase in range(len(move.segments)):
                ready = self._transfers.phase(gpu, move, tensor, phase, after=ready)
            gpu.library = ready
            ends.append(ready)
            moved.append(ready)
        self._arrived[move.name] = self._meet(move.name, ends)
        self._staged[move.name] = moved
        if not self._fusion.is_consumed(move.name):  # else who consumes it unpacks it
            self._arrived[move.name] = self._add_copy(move, "unpack", self._arrived[move.name])

    def _send_all(self, move: Move, begun: GpuTasks) -> list[tuple[GpuTasks, GpuTasks]]:
        """Send all slices from all GPUs; return (flags, transfers) of each slice."""
        slices = []
        for index in range(self._fusion.num_slices):
            sends = [
                self._transfers.send(gpu, move, index, after=after)
                for gpu, after in zip(self._gpus, begun, strict=True)
            ]
            slices.append(([[flag] for flag, _ in sends], [sent for _, sent in sends]))
        return slices

    def _add_copy(self, move: Move, label: str, waits: GpuTasks) -> GpuTasks:
        """Add a kernel that reads and writes the whole tensor, next in the stream, if `copies` are modelled."""
        if not self._knobs.copies or move.op.pattern != "all_to_all" or not move.segments:
            return waits
        for gpu, before in zip(self._gpus, waits, strict=True):
            self._kernels.copy(gpu, move, label, after=before)
        return [list(gpu.stream) for gpu in self._gpus]

    def _unpack(self, op: Any) -> None:
        """Unpack an operator's inputs that a library's collectives have moved."""
        for name in op.after:
            if name in self._fusion.moves and name not in self._fusion.partners:
                self._add_copy(self._fusion.moves[name], "unpack", self._arrived[name])

    # ---------------------------------------------------------------- waiting

    def _before(self, op: Any) -> GpuTasks:
        """Tasks that an operator waits for, by GPU."""
        return [[task for name in op.after for task in self._arrived[name][index]] for index in range(len(self._gpus))]

    def _staged_transfers(self, op: Any) -> GpuTasks:
        """Transfers whose bytes an operator consumes, by GPU."""
        staged = [self._staged[name] for name in op.after if name in self._staged]
        return [[task for tasks in staged for task in tasks[index]] for index in range(len(self._gpus))]

    def _free_staged(self, name: str, staged: GpuTasks) -> None:
        for tasks, transfers in zip(self._arrived[name], staged, strict=True):
            self._graph.frees(tasks[-1], transfers)

    def _meet(self, name: str, flags: GpuTasks) -> GpuTasks:
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
        factors = {"compute": Sharing.of(gpu).gemm(1.0, 1.0), "library": contention.cu_copy_beside_gemm}
        if not self._fusion.may_overlap:
            return
        for simulated in self._gpus:
            for (name, factor), cause in zip(factors.items(), ("library", "compute"), strict=True):
                if np.any(np.asarray(factor) > 1):
                    rate = 1 / np.asarray(factor, float)
                    self._graph.slows(simulated.task_name(name), while_active=simulated.task_name(cause), factor=rate)


def _without(op: Operator, name: str) -> Operator:
    """Copy of an operator without the input `name`."""
    return op.model_copy(update={"after": tuple(before for before in op.after if before != name)})


def _join_slices(slices: Sequence[GpuTasks]) -> GpuTasks:
    """Join the tasks of all slices, by GPU."""
    return [[task for tasks in of_gpu for task in tasks] for of_gpu in zip(*slices, strict=True)]
