"""What `search_spaces/fused.py` lowers to: kernels in one stream on each GPU, collectives by a library or from kernels.

One GPU is simulated of one node, or of each where loads differ. Times of a fused kernel of n slices (arXiv:2305.06942):

    t += T_c(p) / n ;   remote: wire = max(wire, t + o_post) + V_slice / B ;   T = max(t, wire + latency + poll)

which is what the tasks below amount to where nothing else competes: a chunk of compute, a post, a transfer that waits
for the one before it on the same wire, a flag. Work is counted in seconds alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from dse.units import Fraction, Integer
from dse.values import Former, knob
from simulators.costs.fabric import (
    Algorithm,
    PhaseSegment,
    capacities,
    fewest_cus,
    loads_of_nodes,
    messages_s,
    num_gpus,
    pace,
    phases,
)
from simulators.costs.memory_bound import KernelCost, kernel_cost
from simulators.costs.transfer import TransferMode, accumulate_hbm_bytes, library_cus, setup
from simulators.hardware.system import System
from simulators.overlap.design import ScheduleKnobs
from simulators.overlap.node import WholeNode, piece
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.workloads.operators import Collective, Elementwise, Embedding, Gemm, Gemv, Mlp, Operator, Workload

_FUSABLE = (Embedding, Gemm, Gemv)
_FUSED = {"kernel": "fused"}


class FusedKnobs(ScheduleKnobs):
    """Knobs of `search_spaces/fused.py`; those of fused kernels mean nothing in bulk."""

    orders: ClassVar[tuple[str, ...]] = ("before", "after", "beside")
    family: Literal["fused"]
    kernel: Annotated[Literal["bulk", "fused"], knob(structural=True)]
    collective: Annotated[Algorithm, knob(structural=True)]
    copies: Annotated[bool, knob(structural=True)]
    pairs: Annotated[Literal["producer", "all"] | None, knob(structural=True, when=_FUSED)]
    num_chunks: Annotated[Integer | None, knob(structural=True, when=_FUSED, ge=1, le=1024), Former("slices")]
    issue_order: Annotated[
        Literal["remote_first", "local_first"] | None, knob(structural=True, when=_FUSED), Former("order")
    ]
    zero_copy: Annotated[bool | None, knob(structural=True, when=_FUSED)]
    occupancy_loss: Annotated[Annotated[Fraction, Field(lt=1)] | None, knob(when=_FUSED)]
    near_memory: Annotated[bool, knob(structural=True)] = False
    elementwise: Annotated[Literal["gpu", "pim"], knob(structural=True)] = "gpu"


def remote_chunks(num_chunks: int, gpus: int) -> int:
    """Number of chunks that go to other GPUs, as one in `gpus` stays."""
    return max(1, -(-num_chunks * (gpus - 1) // gpus))


def issue_order(workload: Workload) -> list[str]:
    """Operators in the order in which they are issued, whatever the order they are written in.

    Of those that wait for nothing any more, collectives come first, then what a collective waits for, then the rest,
    each by name. What waits for itself, or for what is not there, is left out.
    """
    operators, found = workload.operators, list[str]()
    sent = {before for op in operators.values() if isinstance(op, Collective) for before in op.after}
    ranks = {
        name: (0 if isinstance(op, Collective) else 1 if name in sent else 2, name) for name, op in operators.items()
    }
    while ready := [name for name, op in operators.items() if name not in found and set(op.after) <= set(found)]:
        found.append(min(ready, key=lambda name: ranks[name]))
    return found


def partners(workload: Workload, pairs: str) -> dict[str, str]:
    """Collective -> the operator that it shares a kernel with: its producer, or (pairs = all) its consumer.

    An operator shares with one collective only: with the first that it produces for, else the first that it consumes.
    """
    operators, found = workload.operators, dict[str, str]()
    moves = [name for name in issue_order(workload) if isinstance(operators[name], Collective)]
    producers = {name: operators[name].after for name in moves}
    consumers = {name: [key for key, op in operators.items() if name in op.after] for name in moves}
    for known in (producers, consumers) if pairs == "all" else (producers,):
        for name in moves:
            own = [key for key in known[name] if isinstance(operators[key], _FUSABLE) and key not in found.values()]
            if name not in found and own:
                found[name] = own[0]
    return found


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
        """Metrics are those of the busiest GPU, the first: tasks of others are of kinds of their own."""
        return f"peer's {kind}" if self.place else kind

    def metric_name(self, amount: Any) -> Any:
        """What metrics add up, likewise."""
        return 0.0 if self.place else amount


@dataclass(frozen=True)
class _Move:
    """A collective of a workload as it is moved here. legs: of each phase; gpus: of all nodes."""

    name: str
    op: Collective
    legs: Sequence[Sequence[PhaseSegment]]
    gpus: int

    @property
    def rows(self) -> Any:
        """Rows that go to others."""
        return self.op.rows - -(-self.op.rows // self.gpus)

    def load(self, gpu: _Gpu) -> Any:
        """Uneven tables or experts send unevenly; what is reduced is the same everywhere."""
        return gpu.load if self.op.pattern == "all_to_all" else 1.0


@dataclass(frozen=True)
class _Slice:
    """Rows of a move that go together. cus: of a library's kernel that moves them, None for a fused one.

    copied: whether they are read to be sent inside the node. staged: whether they wait for a consumer.
    """

    label: str
    rows: Any
    cus: Any
    copied: bool
    staged: bool


@dataclass(frozen=True)
class _Part:
    """A part of an operator: share of its time, FLOP, whether a kernel is launched for it."""

    label: str
    share: Any
    flop: Any
    launched: bool


@dataclass(frozen=True)
class _Kernel:
    """What the parts of an operator have in common. scales: whether it is more where more load is; whole_s: unfused."""

    scales: bool
    seconds: Any
    whole_s: Any
    hbm_bytes_per_s: Any
    weight: Any
    launch_s: Any
    limiter: str


@dataclass(frozen=True)
class _Way:
    """What the transfers of a leg have in common. row_bytes: of a row that goes to others; rate [bytes/s]: alone.

    ideal_s_per_byte: on the wire that all collectives together keep busy longest, 0 where it does not go over that.
    """

    row_bytes: Any
    rate: Any
    loads: Mapping[str, Any]
    hbm_bytes_per_s: Any
    cap: Any
    weight: Any
    cus: Any
    delay: Any
    inside: bool
    ideal_s_per_byte: Any


_Tasks = list[list[int]]  # by GPU that is simulated


class Lowering:
    """Builds the graph of one design."""

    def __init__(self, system: System, workload: Workload, knobs: FusedKnobs) -> None:
        assert system.persistent is not None
        self._system, self._workload, self._knobs, self._persistent = system, workload, knobs, system.persistent
        self._graph = GraphBuilder()
        self._gpus = [self._gpu(place, load) for place, load in enumerate(loads_of_nodes(system))]
        self._arrived: dict[str, _Tasks] = {}  # after which an operator is done
        self._staged: dict[str, _Tasks] = {}  # transfers whose bytes wait for a consumer
        self._wires: dict[tuple[Any, ...], int] = {}
        self._costs: dict[tuple[str, bool], KernelCost] = {}
        self._kernels: dict[str, _Kernel] = {}
        self._known_ways: dict[tuple[Any, ...], list[_Way]] = {}
        self._flags: dict[tuple[str, int], Any] = {}
        self._moves = {
            name: _Move(name, op, phases(system, op.pattern, knobs.collective), num_gpus(system))
            for name, op in workload.operators.items()
            if isinstance(op, Collective)
        }
        fused = partners(workload, str(knobs.pairs)) if knobs.kernel == "fused" else {}
        self._partner = {name: op for name, op in fused.items() if self._moves[name].legs}
        self._move_of = {op: name for name, op in self._partner.items()}

    def _gpu(self, place: int, load: Any) -> _Gpu:
        whole = place or isinstance(self._system, WholeNode)  # of one GPU, whose resources are numbered, too
        end, rates = f".{place}" if whole else "", capacities(self._system)
        hbm = self._graph.resource(f"hbm{end}", self._system.gpu.hbm_bytes_per_s)
        cu = self._graph.resource(f"cu{end}", self._system.gpu.num_cus)
        wires = {name: self._graph.resource(f"{name}{end}", rate) for name, rate in rates.items()}
        return _Gpu(place, load, hbm, cu, wires)

    def build(self) -> TaskGraph:
        """Operators, one after another."""
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

    def _collective(self, move: _Move) -> None:
        """A library's; that of a fused pair is its kernel's."""
        if not move.legs:  # a GPU alone
            self._arrived[move.name] = self._before(move.op)
        elif move.name not in self._partner:
            self._library(move)

    def _kernel(self, name: str) -> None:
        """An operator by itself, once what arrived for it is unpacked."""
        op = self._workload.operators[name]
        self._unpack(op)
        part = _Part(name, 1.0, self._cost(name).flop, True)
        waits, staged = self._before(op), self._waiting(op)
        near = isinstance(op, Elementwise) and self._knobs.elementwise == "pim"
        run = self._near if near else self._compute
        self._arrived[name] = [
            [run(gpu, name, part, after=[*before, *held])]
            for gpu, before, held in zip(self._gpus, waits, staged, strict=True)
        ]
        self._freed(name, staged)

    def _producer(self, name: str, move: _Move) -> None:
        """Slices of what others wait for, each sent when it is done, and what stays."""
        op = self._workload.operators[name]
        self._unpack(op)
        parts, local = self._parts(name, move)
        remote_first = self._knobs.issue_order == "remote_first"
        waits, staged = self._before(op), self._waiting(op)
        flags: list[_Tasks] = [[] for _ in parts]
        moved: list[_Tasks] = [[] for _ in parts]
        for gpu, before, held in zip(self._gpus, waits, staged, strict=True):
            after = [*before, *held]
            if not remote_first:
                self._compute(gpu, name, replace(local, launched=True), after=after)
            for index, part in enumerate(parts):
                one = replace(part, launched=remote_first and index == 0)
                made = self._compute(gpu, name, one, after=after)
                flag, sent = self._send(gpu, move, index, after=[made])
                flags[index].append([flag])
                moved[index].append(sent)
            if remote_first:
                self._compute(gpu, name, local, after=[])
        self._arrived[name] = [list(gpu.stream) for gpu in self._gpus]
        self._freed(name, staged)
        self._arrived[move.name] = self._met(move.name, _joined(flags))
        self._staged[move.name] = _joined(moved)

    def _consumer(self, name: str, move: _Move) -> None:
        """What is here already, and slices of what comes, each when it is here; they are sent before or after it."""
        others = _without(self._workload.operators[name], move.name)
        self._unpack(others)
        parts, local = self._parts(name, move)
        waits, came, sent = self._before(others), self._before(move.op), None
        if self._knobs.issue_order == "remote_first":
            for gpu, own in zip(self._gpus, came, strict=True):
                launch_s = self._system.gpu.kernel_launch_s
                gpu.stream = [self._launch(gpu, name, launch_s, after=[*gpu.stream, *own])]
            sent = self._send_all(move, [list(gpu.stream) for gpu in self._gpus])
        for gpu, before, own in zip(self._gpus, waits, came, strict=True):
            self._compute(gpu, name, replace(local, launched=sent is None), after=[*before, *own])
        if sent is None:
            sent = self._send_all(move, [list(gpu.stream) for gpu in self._gpus])
        for part, (flags, moved) in zip(parts, sent, strict=True):
            for gpu, flag, held in zip(self._gpus, self._met(part.label, flags), moved, strict=True):
                task = self._compute(gpu, name, part, after=[*flag, *held])
                self._graph.frees(task, held)
        self._arrived[name] = [list(gpu.stream) for gpu in self._gpus]
        self._arrived[move.name] = self._arrived[name]

    def _parts(self, name: str, move: _Move) -> tuple[list[_Part], _Part]:
        """(slices that go to others or come from them, what is this GPU's own)."""
        count, cost = self._num_slices, self._cost(name, fused=True)
        rows: Any = move.op.rows
        flop = np.floor(cost.flop * move.rows / rows)
        sizes = [piece(move.rows, count, index) for index in range(count)]
        found = [
            _Part(f"{name} {index}", size / rows, piece(flop, count, index), False) for index, size in enumerate(sizes)
        ]
        return found, _Part(f"{name} local", (rows - move.rows) / rows, cost.flop - flop, False)

    @property
    def _num_slices(self) -> int:
        assert self._knobs.num_chunks is not None
        return remote_chunks(self._knobs.num_chunks, num_gpus(self._system))

    def _cost(self, name: str, *, fused: bool = False) -> KernelCost:
        op = self._workload.operators[name]
        assert not isinstance(op, Collective)
        if (name, fused) not in self._costs:
            loss = self._knobs.occupancy_loss if fused and self._knobs.occupancy_loss is not None else 0.0
            self._costs[name, fused] = kernel_cost(self._system, op, occupancy_loss=loss)
        return self._costs[name, fused]

    def _compute(self, gpu: _Gpu, name: str, part: _Part, *, after: Sequence[int]) -> int:
        """A part of an operator, next in the stream."""
        told = self._told(name)
        load = gpu.load if told.scales else 1.0
        work, whole = part.share * load * told.seconds, part.share * load * told.whole_s
        gpu.stream = [
            self._graph.task(
                gpu.task_name(part.label),
                gpu.kind("gemm"),
                after=[*gpu.stream, *after],
                uses={gpu.hbm: told.hbm_bytes_per_s, gpu.cu: self._system.gpu.num_cus},
                work=work,
                cap=1.0,
                weight=told.weight,
                delay=told.launch_s if part.launched else 0.0,
                lane="compute",
                limiter=told.limiter,
                group=gpu.task_name("compute"),
                flop=gpu.metric_name(part.flop * load),
                alone_s=whole if gpu.place else work,  # of a peer: losses tell only of the busiest what it decomposed
                wide_s=whole,
                ideal_s=gpu.metric_name(whole),
            )
        ]
        return gpu.stream[0]

    def _near(self, gpu: _Gpu, name: str, part: _Part, *, after: Sequence[int]) -> int:
        """An elementwise operator by units in memory, beside the stream; what they take turns for is the HBM."""
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

    def _told(self, name: str) -> _Kernel:
        """What the parts of an operator have in common."""
        if name not in self._kernels:
            cost, whole, gpu = self._cost(name, fused=name in self._move_of), self._cost(name), self._system.gpu
            self._kernels[name] = _Kernel(
                scales=not isinstance(self._workload.operators[name], Mlp),
                seconds=_plain(cost.seconds),
                whole_s=_plain(whole.seconds),
                hbm_bytes_per_s=_plain(cost.hbm_bytes / cost.seconds),
                weight=_plain(cost.seconds / cost.hbm_bytes),
                launch_s=_plain(cost.num_kernels * np.asarray(gpu.kernel_launch_s)),
                limiter="HBM" if np.all(cost.hbm_bytes / gpu.hbm_bytes_per_s > 0.5 * cost.seconds) else "compute",
            )
        return self._kernels[name]

    # ---------------------------------------------------------------- communication

    def _library(self, move: _Move) -> None:
        """Packed, launched, moved phase by phase, in order with the library's other collectives."""
        packed = self._copied(move, "pack", self._before(move.op))
        own = library_cus(self._system, move.op.pattern)
        cus = np.minimum(own, self._system.gpu.num_cus)
        whole = _Slice(move.name, move.rows, cus, True, self._is_consumed(move.name))
        how = TransferMode("cu", cus, move.op.pattern)
        ends, moved = [], []
        for gpu, before in zip(self._gpus, packed, strict=True):
            after = [*before, *gpu.library]
            ready = [self._launch(gpu, move.name, setup(self._system, by=how), after=after)]
            for phase in range(len(move.legs)):
                ready = self._phase(gpu, move, whole, phase, after=ready)
            gpu.library = ready
            ends.append(ready)
            moved.append(ready)
        self._arrived[move.name] = self._met(move.name, ends)
        self._staged[move.name] = moved
        if not self._is_consumed(move.name):  # else who consumes it unpacks it
            self._arrived[move.name] = self._copied(move, "unpack", self._arrived[move.name])

    def _send_all(self, move: _Move, begun: _Tasks) -> list[tuple[_Tasks, _Tasks]]:
        """All slices from all GPUs: (flags, transfers) of each slice."""
        found = []
        for index in range(self._num_slices):
            each = [self._send(gpu, move, index, after=after) for gpu, after in zip(self._gpus, begun, strict=True)]
            found.append(([[flag] for flag, _ in each], [sent for _, sent in each]))
        return found

    def _send(self, gpu: _Gpu, move: _Move, index: int, *, after: Sequence[int]) -> tuple[int, list[int]]:
        """A slice from a fused kernel: (the flag after which it is there, its last transfers)."""
        stored = bool(self._knobs.zero_copy) and self._partner[move.name] in move.op.after
        label = f"{move.name} {index}"
        rows = piece(move.rows, self._num_slices, index)
        one = _Slice(label, rows, None, not stored, self._is_consumed(move.name))
        flag, sent = -1, list(after)
        if not stored or any(not leg.inside for legs in move.legs for leg in legs):
            sent = [self._launch(gpu, f"post {label}", self._persistent.post_s, after=sent)]
        for phase in range(len(move.legs)):
            moved = self._phase(gpu, move, one, phase, after=sent)
            flag = self._launch(gpu, f"flag {label}", self._flag_s(move, phase), after=moved)
            sent = [flag]
        return flag, moved

    def _flag_s(self, move: _Move, phase: int) -> Any:
        """From the last byte of a phase until who waits for it goes on."""
        if (move.name, phase) not in self._flags:
            latency = np.maximum.reduce(np.broadcast_arrays(*(leg.latency_s for leg in move.legs[phase])))
            self._flags[move.name, phase] = _plain(latency + np.asarray(self._persistent.poll_s))
        return self._flags[move.name, phase]

    def _phase(self, gpu: _Gpu, move: _Move, part: _Slice, phase: int, *, after: Sequence[int]) -> list[int]:
        """The legs of a phase at once, each after what went the same way before."""
        found, rows = [], move.load(gpu) * part.rows
        ways = self._ways(move, part, phase)
        last = phase == len(move.legs) - 1
        for place, way in enumerate(ways):
            wire, amount = (gpu.place, move.name, phase, place), rows * way.row_bytes
            told = self._way(gpu, way, amount)
            told |= {"staged_bytes": gpu.metric_name(amount if part.staged and last else 0.0)}
            told |= {"group": "" if part.cus is None else gpu.task_name("library")}
            before = [*after, *([self._wires[wire]] if wire in self._wires else [])]
            self._wires[wire] = self._graph.task(gpu.task_name(part.label), gpu.kind("transfer"), after=before, **told)
            found.append(self._wires[wire])
        return found

    def _way(self, gpu: _Gpu, way: _Way, amount: Any) -> dict[str, Any]:
        """A transfer: what its bytes use, and the time it would take alone."""
        uses = {gpu.wires[name]: load for name, load in way.loads.items()}
        uses |= {gpu.hbm: way.hbm_bytes_per_s} if way.hbm_bytes_per_s is not None else {}
        uses |= {gpu.cu: way.cus / way.cap} if way.cus is not None else {}
        alone = amount / way.rate
        return {
            "uses": uses,
            "work": alone,
            "cap": way.cap,
            "weight": way.weight,
            "delay": way.delay,
            "lane": "links" if way.inside else "network",
            "limiter": "link" if way.inside else "network",
            "cus": 0.0 if way.cus is None else gpu.metric_name(way.cus),
            "moved_bytes": gpu.metric_name(amount),
            "alone_s": alone,
            "wide_s": alone,
            "ideal_s": gpu.metric_name(amount * way.ideal_s_per_byte),
        }

    @functools.cached_property
    def _busiest(self) -> Mapping[str, Any]:
        """Wire or switch -> whether it is the one that all collectives together keep busy longest: 1, or else 0."""
        rates, totals = capacities(self._system), dict[str, Any]()
        for move in self._moves.values():
            sent = move.load(self._gpus[0]) * np.asarray(move.rows) * move.op.element_bytes * move.op.cols
            for leg in (leg for legs in move.legs for leg in legs):
                for name, load in leg.loads.items():
                    totals[name] = totals.get(name, 0.0) + sent * leg.share * np.asarray(load) / rates[name]
        most = np.argmax(np.stack(np.broadcast_arrays(*totals.values())), axis=0)
        return {name: (most == place).astype(float) for place, name in enumerate(totals)}

    def _ways(self, move: _Move, part: _Slice, phase: int) -> list[_Way]:
        """What the transfers of a phase have in common."""
        key = (move.name, phase, part.cus is None)
        if key not in self._known_ways:
            halves = 2 if move.op.pattern == "all_reduce" else 1  # of which the first adds
            adds = move.op.reduces and phase < len(move.legs) // halves
            self._known_ways[key] = [
                self._known_way(move, part, move.legs[phase], leg, adds) for leg in move.legs[phase]
            ]
        return self._known_ways[key]

    def _known_way(
        self, move: _Move, part: _Slice, legs: Sequence[PhaseSegment], leg: PhaseSegment, adds: bool
    ) -> _Way:
        system, op, rates = self._system, move.op, capacities(self._system)
        rate = pace(system, leg, cus=system.gpu.num_cus, pattern=op.pattern)
        hbm = 2.0 if part.copied or not leg.inside else 0.0  # a NIC reads what it sends
        hbm = hbm + (accumulate_hbm_bytes(system, near_memory=self._knobs.near_memory) if adds else 0.0)
        cap, cus, delay = np.asarray(1.0), None, messages_s(system, leg)
        if part.cus is not None:
            held = fewest_cus(system, leg, cus=part.cus, pattern=op.pattern)
            cap = pace(system, leg, cus=held, pattern=op.pattern) / rate
            cus, delay = _plain(held / len(legs)), delay + leg.latency_s
        return _Way(
            row_bytes=_plain(np.asarray(op.element_bytes * op.cols) * leg.share),
            rate=_plain(rate),
            loads={name: _plain(np.asarray(load) * rate) for name, load in leg.loads.items()},
            hbm_bytes_per_s=_plain(np.maximum(hbm, 1e-9) * rate) if np.any(hbm > 0) else None,
            cap=_plain(cap),
            weight=_plain(1 / (np.maximum(hbm, 1.0) * rate)),
            cus=cus,
            delay=_plain(delay),
            inside=leg.inside,
            ideal_s_per_byte=_plain(
                sum(self._busiest[name] * np.asarray(load) / rates[name] for name, load in leg.loads.items())
            ),
        )

    def _launch(self, gpu: _Gpu, label: str, delay: Any, *, after: Sequence[int]) -> int:
        how: dict[str, Any] = {"delay": delay, "lane": "communication", "limiter": "launch"}
        return self._graph.task(gpu.task_name(label), gpu.kind("launch"), after=after, **how)

    def _copied(self, move: _Move, label: str, waits: _Tasks) -> _Tasks:
        """A kernel that reads and writes the whole tensor, next in the stream, if one is modelled."""
        if not self._knobs.copies or move.op.pattern != "all_to_all" or not move.legs:
            return waits
        hbm = np.asarray(self._system.gpu.hbm_bytes_per_s)
        for gpu, before in zip(self._gpus, waits, strict=True):
            amount = move.load(gpu) * move.op.payload_bytes
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
        """What a library's collectives brought for an operator."""
        for name in op.after:
            if name in self._moves and name not in self._partner:
                self._copied(self._moves[name], "unpack", self._arrived[name])

    # ---------------------------------------------------------------- waiting

    def _before(self, op: Any) -> _Tasks:
        """The tasks that an operator waits for, by GPU."""
        return [[task for name in op.after for task in self._arrived[name][index]] for index in range(len(self._gpus))]

    def _waiting(self, op: Any) -> _Tasks:
        """Transfers whose bytes an operator consumes, by GPU."""
        held = [self._staged[name] for name in op.after if name in self._staged]
        return [[task for one in held for task in one[index]] for index in range(len(self._gpus))]

    def _freed(self, name: str, staged: _Tasks) -> None:
        for own, held in zip(self._arrived[name], staged, strict=True):
            self._graph.frees(own[-1], held)

    def _is_consumed(self, name: str) -> bool:
        return any(name in op.after for op in self._workload.operators.values())

    def _met(self, name: str, flags: _Tasks) -> _Tasks:
        """What came is there when all GPUs have sent it: one task that waits for them, where there are several."""
        if len(self._gpus) == 1:
            return flags
        after = [task for own in flags for task in own]
        met = self._graph.task(f"all have sent {name}", "meeting", after=after, lane="communication", limiter="launch")
        return [[met] for _ in self._gpus]

    def _laws(self) -> None:
        """Kernels of a library slow compute that runs beside them, and it them, as on the GPU that was measured."""
        gpu = self._system.gpu
        contention = gpu.contention
        dynamic = gpu.gemm.assignment == "dynamic"
        compute = contention.dynamic_gemm_beside_cus if dynamic else contention.static_gemm_beside_cus
        factors = {"compute": compute, "library": contention.cu_copy_beside_gemm}
        if not self._beside():
            return
        for one in self._gpus:
            for (name, factor), cause in zip(factors.items(), ("library", "compute"), strict=True):
                if np.any(np.asarray(factor) > 1):
                    own = 1 / np.asarray(factor, float)
                    self._graph.slows(one.task_name(name), while_active=one.task_name(cause), factor=own)

    def _beside(self) -> bool:
        """Whether a library's collective may run while an operator computes: neither waits for the other."""
        operators, known = self._workload.operators, dict[str, set[str]]()
        for name in issue_order(self._workload):
            op = operators[name]
            known[name] = set(op.after).union(*(known[before] for before in op.after))
        alone = [name for name in self._moves if name not in self._partner]
        return any(
            other not in known[name] and name not in known[other]
            for name in alone
            for other, op in operators.items()
            if not isinstance(op, Collective)
        )


def _without(op: Operator, name: str) -> Operator:
    """An operator that waits for one less."""
    return op.model_copy(update={"after": tuple(before for before in op.after if before != name)})


def _plain(value: Any) -> Any:
    """A number that is one for all designs as a plain one: quick to compute with, and known again."""
    return value if np.ndim(value) else float(value)


def _joined(slices: Sequence[_Tasks]) -> _Tasks:
    """Tasks of all slices, by GPU."""
    return [[task for one in own for task in one] for own in zip(*slices, strict=True)]
