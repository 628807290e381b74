"""Operators and their collectives as persistent kernels: logical workgroups, slices, wires (arXiv:2305.06942).

Parameters have the words of the emitted kernels (`dse_fused.operators.Slices`): num_chunks, remote_first; `workgroups`
follow from the occupancy. A slice is what one GPU sends to one peer of a chunk. GPUs of one node, or one GPU of each of
two nodes, are simulated all; of more nodes one, whose peers send it what it sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.config.options import load_yaml
from dse.values.units import Bytes, Integer
from dse_workgroups import CONF
from dse_workgroups.persistent import NONE, Gpus, KernelPlan, LogicalWorkgroups, Slices, Wires
from search_spaces.fused_knobs import FusedKnobs
from simulators.costs.fabric import latency_s, messages_s, num_gpus, num_nodes, pace, phases
from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.hardware.machine import Gpu, System
from simulators.hardware.parts import ELEMENT_BYTES, SourcedValue
from simulators.workloads.operators import Collective, Embedding, Gemm, Gemv

Floats = NDArray[np.float64]
Fusable = Embedding | Gemm | Gemv


class WorkgroupFacts(SourcedValue):
    """Constants of `conf/data/workgroups.yaml`. most: logical workgroups of a GPU; logical_bytes: output of one."""

    name: str
    description: str
    per_cu: Annotated[Integer, Field(ge=1, le=64)]
    most: Annotated[Integer, Field(ge=1024)]
    line_bytes: Annotated[Bytes, Field(gt=0)]
    outstanding_bytes_per_cu: Annotated[Bytes, Field(gt=0)]
    logical_bytes: Annotated[Bytes, Field(gt=0)]
    rows_per_gemv: Annotated[Integer, Field(ge=1)]
    least_memory_share: Annotated[float, Field(gt=0, le=1)]


@cache
def facts() -> WorkgroupFacts:
    """The shipped constants."""
    return WorkgroupFacts.model_validate(load_yaml(CONF / "data" / "workgroups.yaml"))


def simulated_gpus(system: System) -> int:
    """GPUs that are simulated. Raises ValueError for several nodes of several GPUs."""
    if num_nodes(system) == 1:
        return int(system.node.num_gpus)
    if system.node.num_gpus > 1:
        raise ValueError("system.node.num_gpus: several GPUs in each of several nodes have no workgroups here; use one")
    return 2 if num_nodes(system) == 2 else 1


def line_share(row_bytes: float) -> float:
    """Share of the lines of a write over a link that rows of so many bytes fill."""
    line = float(facts().line_bytes)
    return float(row_bytes / (np.ceil(row_bytes / line) * line))


@dataclass(frozen=True)
class FusedKernel:
    """An operator of a workload, and the collective that shares its kernel (None: it communicates nothing).

    consumes: the collective brings its input. imbalance of starts: `KernelPlan.starting`.
    """

    system: System
    op: Fusable
    move: Collective | None
    knobs: FusedKnobs
    consumes: bool = False

    @property
    def stores(self) -> bool:
        """True if workgroups store into the memory of peers: in a node, without copies, what they make."""
        return bool(self.knobs.zero_copy) and num_nodes(self.system) == 1 and not self.consumes

    @property
    def occupancy(self) -> int:
        """Workgroups on a CU: those that put lose `schedule.occupancy_loss` to the registers of the library's calls."""
        # kernels bound by arithmetic run one tile on a CU
        residents = 1 if isinstance(self.op, Gemm) else facts().per_cu
        puts = self.move is not None and not self.stores
        lost = float(self.knobs.occupancy_loss or 0.0) if puts else 0.0
        # rounding: 8 (1 - 1/8) must be 7, and never 6
        return max(1, int(residents * (1 - lost) + 1e-9))

    def plan(self) -> KernelPlan:
        """The kernel on all GPUs that are simulated, each of which starts when it is launched."""
        assert self.system.gpu.persistent is not None
        # without a collective all GPUs do the same, so one is enough
        size = simulated_gpus(self.system) if self.move is not None else 1
        wires, book = self._wires(size), _Book()
        orders = [self._items(g, wires, book) for g in range(size)]
        first = np.cumsum([0, *(sum(item.count for item in items) for items in orders)])
        rows = [item for items in orders for item in items]
        counts = [item.count for item in rows]
        # a row for each logical workgroup: items are runs of equal ones
        work, sent = (np.repeat(np.array([getattr(item, name) for item in rows], float), counts) for name in _AMOUNTS)
        ends, waits = (
            np.repeat(np.array([getattr(item, name) for item in rows], np.int64), counts) for name in _PLACES
        )
        items = LogicalWorkgroups(first.astype(np.int64), work, sent, ends, waits)
        persistent = self.system.gpu.persistent
        return KernelPlan(
            items, book.slices(), wires, self._gpus(size), float(persistent.post_s), float(persistent.poll_s)
        )

    # ---------------------------------------------------------------- machine

    def _gpus(self, size: int) -> Gpus:
        gpu = self.system.gpu
        assert gpu.persistent is not None
        # W_0: the occupancy of a kernel that does not communicate
        workgroups, full = self.occupancy * gpu.num_cus, facts().per_cu * gpu.num_cus
        top = 0.0
        if not isinstance(self.op, Gemm):
            # a gather of rows reaches less of the HBM than a stream
            share = gpu.persistent.gather_efficiency if isinstance(self.op, Embedding) else gpu.stream_share
            top = min(float(gpu.hbm_bytes_per_s * share), gpu.num_cus * _flight(gpu))  # few CUs ask for less
        # of one workgroup, at the full occupancy
        flight = _flight(gpu) / facts().per_cu
        rates_of = (top, flight, float(gpu.hbm_bytes_per_s), full, float(facts().least_memory_share))
        columns = (float(gpu.kernel_launch_s), workgroups, *rates_of)
        start, residents, *rates = (np.full(size, column) for column in columns)
        return Gpus(start.astype(float), residents.astype(np.int64), *(rate.astype(float) for rate in rates))

    def _wires(self, size: int) -> Wires:
        """Links between all pairs of a node, or the NIC of each GPU of a node of its own."""
        system, gpu = self.system, self.system.gpu
        if self.move is None:
            pairs: list[tuple[int, int]] = []
        elif num_nodes(system) == 1:
            pairs = [(source, (source + step) % size) for source in range(size) for step in range(1, size)]
        else:
            pairs = [(source, (source + 1) % size) for source in range(size)]
        source, target = np.array(pairs, np.int64).reshape(-1, 2).T
        inside, peers, unit = num_nodes(system) == 1, max(1, size - 1), np.ones(len(pairs))
        # values of a wire that nobody uses
        rate, latency, message = self._wire() if pairs else (1.0, 0.0, 0.0)
        assert gpu.persistent is not None
        # a workgroup of the kernel copies what it puts in a node; a NIC reads by itself
        copy = 1 / _flight(gpu) if inside and not self.stores else 0.0
        # stores to all peers share what a CU may have outstanding
        depth = float(facts().outstanding_bytes_per_cu) * gpu.num_cus / peers / rate if inside else 0.0
        # stores come from registers: only puts read what was stored before
        read = np.full(len(pairs), NONE) if self.stores else source
        return Wires(
            *(source, target, rate * unit, latency * unit, message * unit, depth * unit, copy * unit, target, read)
        )

    def _wire(self) -> tuple[float, float, float]:
        """Rate [bytes/s], latency and time of a message [s] of a wire."""
        system, move = self.system, self.move
        assert move is not None and system.gpu.persistent is not None
        if num_nodes(system) == 1:
            link = float(system.node.link_bytes_per_s) * float(system.gpu.cu_copy.link_efficiency)
            share = line_share(self._row_bytes) if self.stores else 1.0
            # a flag is one line
            return link * share, float(system.gpu.persistent.memory_latency_s), float(facts().line_bytes) / link
        # one phase of one segment, as each node has a single GPU
        ((segment,), *_) = phases(system, move.pattern, self.knobs.collective)
        rate = float(pace(system, segment, cus=system.gpu.num_cus, pattern=move.pattern))
        return rate, float(latency_s(system, move.pattern, self.knobs.collective)), float(messages_s(system, segment))

    @property
    def _row_bytes(self) -> float:
        """Bytes of a row that a logical workgroup stores in one place."""
        size = float(ELEMENT_BYTES[self.op.precision])
        if isinstance(self.op, Embedding):
            return size * self.op.dim
        return size * (self._tiles[0] if isinstance(self.op, Gemm) else facts().rows_per_gemv)

    # ---------------------------------------------------------------- work

    @cached_property
    def _tiles(self) -> tuple[float, int, float]:
        """Columns of a tile of the library's GEMM, tiles, and time of one [s]."""
        assert isinstance(self.op, Gemm)
        shape = GemmShape(self.op.m, self.op.local_n, self.op.local_k)
        cost = gemm_cost(gemms_of(self.system, self.op.precision), shape)
        rows, cols = float(cost.kernel.rows), float(cost.kernel.cols)
        tiles = int(np.ceil(self.op.m / rows) * np.ceil(self.op.local_n / cols))
        return cols, tiles, float(cost.seconds) / -(-tiles // self.system.gpu.num_cus)

    @property
    def _size(self) -> tuple[int, float, float]:
        """Number of logical workgroups, work of each (bytes or seconds), bytes of output of each."""
        op, out = self.op, float(ELEMENT_BYTES[self.op.precision])
        if isinstance(op, Gemm):
            _, count, seconds = self._tiles
            return count, seconds, out * op.m * op.local_n / count
        total = float(op.out_bytes) if isinstance(op, Embedding) else out * op.n * op.m
        unit = float(facts().logical_bytes) if isinstance(op, Embedding) else out * facts().rows_per_gemv * op.m
        count = int(min(facts().most, max(1, round(total / unit))))
        return count, float(op.bytes) / count, total / count

    def _items(self, g: int, wires: Wires, book: _Book) -> list[Item]:
        """Logical workgroups of a GPU in issue order."""
        count, work, out = self._size
        if self.move is None:
            return [Item(count, work)]
        every = num_gpus(self.system)
        # no chunk may be smaller than a workgroup for each GPU
        chunks = min(int(self.knobs.num_chunks or 1), max(1, count // every))
        shares = [_piece(count, every, peer) for peer in range(every)]  # of whole workgroups, which sum to all
        local, several = Item(shares[g], work), num_nodes(self.system) > 1  # whose one wire is that of all peers
        parts = [
            Part(c, int(wire), peer, _piece(count - shares[g] if several else shares[peer], chunks, c))
            for c in range(chunks)
            for wire in np.flatnonzero(wires.source == g)
            for peer in (int(wires.target[wire]),)
        ]
        if self.consumes:
            return self._consumer(g, (parts, local, out), wires, book)
        # sums of an all-reduce begin when a chunk has come from all peers
        ends = [("chunk", part.target, part.chunk) if self.move.reduces else ("all", part.target) for part in parts]
        remote = [
            Item(part.count, work, out, book.slice(part.wire, self._staged_bytes(part.count, out), end, part.count))
            for part, end in zip(parts, ends, strict=True)
        ]
        if self.stores and not isinstance(self.op, Gemm):  # into a peer's memory, which its wire counts, not into this
            remote = [replace(item, work=work - out) for item in remote]
        # remote parts first: their bytes travel while the local part is computed
        first = self.knobs.issue_order == "remote_first"
        items = [*remote, local] if first else [local, *remote]
        return items + (self._sums(g, (parts, shares[g], out), book) if self.move.reduces else [])

    def _sums(self, g: int, output: tuple[Sequence[Part], int, float], book: _Book) -> list[Item]:
        """Second phase of an all-reduce: add what came from all peers, chunk by chunk, and send the sum to each."""
        parts, share, out = output
        chunks, items = 1 + max(part.chunk for part in parts), list[Item]()
        for part in parts:
            num_bytes = out * _piece(share, chunks, part.chunk)
            place = book.slice(part.wire, self._staged_bytes(1, num_bytes), ("all", part.target), 1)
            items.append(
                # a sum reads the chunk of every GPU
                Item(1, num_gpus(self.system) * num_bytes, num_bytes, place, book.group(("chunk", g, part.chunk)))
            )
        return items

    def _consumer(self, g: int, output: tuple[Sequence[Part], Item, float], wires: Wires, book: _Book) -> list[Item]:
        """Puts of what is there at the start, then the GPU's own part, then each slice that arrives."""
        parts, local, out = output
        # the wire that comes from a GPU is the one whose source it is
        back = {int(wires.source[wire]): int(wire) for wire in np.flatnonzero(wires.target == g)}
        puts = [
            Item(1, 0.0, 0.0, book.slice(part.wire, part.count * out, ("on", part.wire, part.chunk), 1))
            for part in parts
        ]
        arrived = [
            Item(part.count, local.work, waits=book.group(("on", back[part.target], part.chunk))) for part in parts
        ]
        return [*puts, local, *arrived] if self.knobs.issue_order == "remote_first" else [local, *puts, *arrived]

    def _staged_bytes(self, count: int, out: float) -> float:
        """Bytes that are put together; 0 where workgroups store."""
        return 0.0 if self.stores else count * out


@dataclass(frozen=True)
class Part:
    """A chunk that goes over a wire to a GPU, of so many logical workgroups."""

    chunk: int
    wire: int
    target: int
    count: int


@dataclass(frozen=True)
class Item:
    """Equal logical workgroups that follow one another; columns as of `LogicalWorkgroups`."""

    count: int
    work: float
    sent: float = 0.0
    completes: int = NONE
    waits: int = NONE


_AMOUNTS, _PLACES = ("work", "sent"), ("completes", "waits")


class _Book:
    """Slices and groups of a plan, numbered as they are named."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float, int, int]] = []
        self._groups: dict[tuple[object, ...], int] = {}

    def group(self, name: tuple[object, ...]) -> int:
        """Number of a group of slices."""
        return self._groups.setdefault(name, len(self._groups))

    def slice(self, wire: int, sent: float, group: tuple[object, ...], left: int) -> int:
        """Number of a new slice."""
        self._rows.append((left, sent, wire, self.group(group)))
        return len(self._rows) - 1

    def slices(self) -> Slices:
        """All slices."""
        left, sent, wire, group = (
            (np.array(column) for column in zip(*self._rows, strict=True)) if self._rows else (np.zeros(0),) * 4
        )
        return Slices(left.astype(np.int64), sent.astype(float), wire.astype(np.int64), group.astype(np.int64))


def _flight(gpu: Gpu) -> float:
    """Rate [bytes/s] of a CU with all of its requests in flight, by Little's law."""
    assert gpu.persistent is not None
    return float(gpu.persistent.in_flight_bytes_per_cu / gpu.persistent.memory_latency_s)


def _piece(total: int, parts: int, index: int) -> int:
    """Whole workgroups of a part, at least one; those of all parts sum to the total where it has as many."""
    # differences of rounded bounds, so that no workgroup is lost
    return max(1, round(total * (index + 1) / parts) - round(total * index / parts))
