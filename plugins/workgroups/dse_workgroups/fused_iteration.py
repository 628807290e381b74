"""A workload of operators and collectives on one stream: fused pairs workgroup by workgroup, all else kernel by kernel.

Operators run in the order of `search_spaces.fused_knobs.issue_order`, one after another, each launched. A collective of
a library is packed, launched and moved when its inputs are done and those before it are through, and unpacked by who
consumes it (costs: `simulators.costs.fabric`). Collectives share the wires first come, first served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse_workgroups.fused_kernels import Fusable, FusedKernel, simulated_gpus
from dse_workgroups.persistent import KernelRun, run
from search_spaces.fused_knobs import FusedKnobs, issue_order, partners
from simulators.costs.fabric import fewest_cus, messages_s, num_gpus, pace, phases
from simulators.costs.memory_bound import kernel_cost
from simulators.costs.transfer import TransferMode, library_cus, setup
from simulators.hardware.machine import System
from simulators.overlap.design import OverlapDesign
from simulators.workloads.operators import Collective, Elementwise, Embedding, Gemm, Gemv, Mlp, Operator, Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Iteration:
    """Times [s] of one iteration: of all, of operators, and of bytes on the busiest wire; transfers [n, 4] of each wire
    (wire, start, end, bytes).
    """

    makespan_s: float
    compute_s: float
    comm_s: float
    transfers: Floats


def iterate(design: OverlapDesign, skew_s: float = 0.0) -> Iteration:
    """Run a workload. skew_s: by which the last GPU starts its fused kernels after the first, others evenly between.

    Raises ValueError where a fused pair has no workgroups here.
    """
    return _Stream(design, skew_s).run()


class _Stream:
    """Operators and collectives of a design, as they are issued."""

    def __init__(self, design: OverlapDesign, skew_s: float) -> None:
        assert isinstance(design.schedule, FusedKnobs)
        self._system: System = design.system
        self._workload: Workload = design.workload
        self._knobs: FusedKnobs = design.schedule
        self._skew_s: float = skew_s
        # without peers there is nothing to fuse
        fused = self._knobs.kernel == "fused" and num_gpus(self._system) > 1
        self._partners: dict[str, str] = partners(self._workload, str(self._knobs.pairs)) if fused else {}
        self._move_of: dict[str, str] = {op: name for name, op in self._partners.items()}
        # when the stream, the library and the wires are free [s]
        self._stream: float = 0.0
        self._library: float = 0.0
        self._wire: float = 0.0
        self._compute_s: float = 0.0
        self._done: dict[str, float] = {}
        self._transfers: list[Floats] = [np.zeros((0, 4))]

    def run(self) -> Iteration:
        """Issue all operators."""
        for name in issue_order(self._workload):
            op = self._workload.operators[name]
            if isinstance(op, Collective):
                if name not in self._partners:
                    self._collective(name, op)
            elif name in self._move_of:
                self._fused(name, op)
            else:
                self._kernel(name, op)
        sent = np.concatenate(self._transfers)
        # transfers of one wire do not overlap, so that lengths may be summed
        busy = [float((rows := sent[sent[:, 0] == wire])[:, 2].sum() - rows[:, 1].sum()) for wire in set(sent[:, 0])]
        # collectives may end after the last operator
        end = max([self._stream, *self._done.values()])
        return Iteration(end, self._compute_s, max(busy, default=0.0), sent)

    def _kernel(self, name: str, op: Any) -> None:
        """An operator that communicates nothing."""
        self._unpack(op)
        begin, system = self._ready(op), self._system
        if isinstance(op, Mlp | Elementwise):
            cost = kernel_cost(system, op)
            launches = float(cost.num_kernels * system.gpu.kernel_launch_s)
            seconds = launches + float(cost.seconds)
        else:
            # the same workgroups without a collective, so that bulk and fused kernels have one cost model
            seconds = float(run(FusedKernel(system, op, None, self._knobs).plan()).over_s.max())
        self._ends(name, begin, seconds)

    def _ends(self, name: str, begin: float, seconds: float) -> None:
        self._stream = self._done[name] = begin + seconds
        self._compute_s += seconds

    def _fused(self, name: str, op: Operator) -> None:
        """An operator and its collective in one kernel."""
        move_name = self._move_of[name]
        move = self._workload.operators[move_name]
        assert isinstance(move, Collective) and isinstance(op, Embedding | Gemm | Gemv)
        consumes = move_name in op.after
        # the kernel itself waits for its collective: it is launched before that has ended
        remaining = op.model_copy(update={"after": tuple(item for item in op.after if item != move_name)})
        self._unpack(remaining)
        # a kernel that consumes waits slice by slice, but not before the collective's inputs are there
        begin = max(self._ready(remaining), self._ready(move) if consumes else 0.0)
        done = self._run(op, move, consumes=consumes)
        # what is on the wires already goes first
        busy = done.transfers[:, 2] - done.transfers[:, 1]
        wires = max([float(busy[done.transfers[:, 0] == wire].sum()) for wire in set(done.transfers[:, 0])])
        # the kernel ran on idle wires: what was on them before delays its last bytes
        late = max(0.0, self._wire + wires - begin - float(done.over_s.max()))
        computed, over = float(done.computed_s.max()), float(done.over_s.max()) + late
        # a consumer computes after the last slice; a producer ends before its bytes do
        self._ends(name, begin, computed + (late if consumes else 0.0))
        self._done[move_name] = begin + over
        self._sent(done.transfers + np.array([0.0, begin, begin, 0.0]))

    def _run(self, op: Fusable, move: Collective, *, consumes: bool) -> KernelRun:
        plan = FusedKernel(self._system, op, move, self._knobs, consumes).plan()
        size = simulated_gpus(self._system)
        # evenly spaced starts; the first GPU is on time
        late = np.linspace(0.0, self._skew_s, size) if size > 1 else np.zeros(1)
        return run(plan.starting(plan.gpus.start + late))

    def _collective(self, name: str, op: Collective) -> None:
        """A collective of the library, alone on its wires."""
        system, every = self._system, num_gpus(self._system)
        if every == 1:
            self._done[name] = self._ready(op, stream=False)
            return
        self._copy(op, self._ready(op, stream=False))
        # packing is a kernel of the stream, so a packed tensor waits for the stream
        at = max(self._library, self._ready(op, stream=op.pattern == "all_to_all" and self._knobs.copies))
        cus = np.minimum(library_cus(system, op.pattern), system.gpu.num_cus)
        at += float(np.asarray(setup(system, by=TransferMode("cu", cus, op.pattern))))
        # what a GPU keeps for itself does not go over the wire
        sent = float(op.rows - -(-op.rows // every)) * op.cols * op.element_bytes
        # phases follow one another; segments of a phase share its bytes, each on wires of its own
        for segments in phases(system, op.pattern, self._knobs.collective):
            ends = []
            for place, segment in enumerate(segments):
                used = fewest_cus(system, segment, cus=cus, pattern=op.pattern)
                rate = float(pace(system, segment, cus=used, pattern=op.pattern))
                start = max(at, self._wire) + float(messages_s(system, segment)) + float(np.asarray(segment.latency_s))
                ends.append(start + sent * segment.share / rate)
                self._sent(np.array([[place, start, ends[-1], sent * segment.share]]))
            at = max(ends)
        self._library = self._done[name] = at
        # nobody consumes it: unpacked at once, as no operator would do it
        if not any(name in item.after for item in self._workload.operators.values()):
            self._copy(op, at)
            self._done[name] = max(at, self._stream) if self._copies(op) else at

    def _sent(self, transfers: Floats) -> None:
        self._transfers.append(transfers)
        self._wire = max([self._wire, *transfers[:, 2]])

    def _copies(self, op: Collective) -> bool:
        return bool(self._knobs.copies) and op.pattern == "all_to_all" and num_gpus(self._system) > 1

    def _copy(self, op: Collective, ready: float) -> None:
        """Pack or unpack a tensor, next in the stream."""
        if self._copies(op):
            gpu, num_bytes = self._system.gpu, float(op.payload_bytes)
            # each byte is read and written
            rate = float(gpu.stream_share * gpu.hbm_bytes_per_s) / 2
            # copies are kernels of the stream
            self._stream = max(self._stream, ready) + float(gpu.kernel_launch_s) + num_bytes / rate

    def _unpack(self, op: Any) -> None:
        # only library collectives are unpacked: fused kernels read slices in place
        for name in op.after:
            move = self._workload.operators[name]
            if isinstance(move, Collective) and name not in self._partners:
                self._copy(move, self._done[name])

    def _ready(self, op: Any, *, stream: bool = True) -> float:
        """When an operator's inputs are done, and the stream has come to it."""
        return max([self._stream if stream else 0.0, *(self._done[name] for name in op.after)])


def peak_demand(transfers: Floats) -> float:
    """Largest demand [bytes/s] on a wire over a window in which it could carry an eighth of what it carries in all.

    transfers [n, 4]: wire, start, end, bytes. The window is as long for all schedules of the same bytes.
    """
    peaks = [0.0]
    for wire in set(transfers[:, 0]):
        # flags carry no bytes
        rows = transfers[(transfers[:, 0] == wire) & (transfers[:, 3] > 0) & (transfers[:, 2] > transfers[:, 1])]
        if len(rows):
            _, start, end, sent = rows[np.argsort(rows[:, 1])].T
            fastest = float((sent / (end - start)).max())
            # an eighth of the wire's traffic at its fastest rate: equal for schedules with the same bytes
            window = sent.sum() / fastest / 8
            # a wire carries one transfer at a time: bytes until then are linear between these instants
            times, carried = np.stack([start, end], 1).ravel(), np.cumsum(np.stack([0.0 * sent, sent], 1).ravel())
            # four times as many windows as fit: a peak is missed by a quarter of a window at most
            begins = np.arange(times[0], times[-1], window / 4)
            moved = np.interp(begins + window, times, carried) - np.interp(begins, times, carried)
            peaks.append(float(moved.max()) / window)
    return max(peaks)
