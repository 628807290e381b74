"""Costs of the transfers of fused kernels: by collective, phase and segment of its algorithm."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulators.costs.fabric import PhaseSegment, capacities, fewest_cus, messages_s, pace
from simulators.costs.transfer import accumulate_hbm_bytes
from simulators.hardware.machine import System
from simulators.workloads.operators import Collective


@dataclass(frozen=True)
class Move:
    """Collective of a workload with its segments of each phase and the number of GPUs of all nodes."""

    name: str
    op: Collective
    segments: Sequence[Sequence[PhaseSegment]]
    gpus: int

    @property
    def rows(self) -> Any:
        """Rows that go to other GPUs."""
        return self.op.rows - -(-self.op.rows // self.gpus)

    def load(self, gpu_load: Any) -> Any:
        """What a GPU sends over the mean: uneven tables or experts send unevenly, reductions send evenly."""
        return gpu_load if self.op.pattern == "all_to_all" else 1.0


@dataclass(frozen=True)
class SegmentCost:
    """Common parameters of the transfers of a segment. row_bytes: of a row that is sent; rate [bytes/s]: isolated.

    ideal_s_per_byte: on the wire that all collectives together keep busy longest; 0 for a segment that avoids it.
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


class SegmentCosts:
    """Costs of the segments of a workload's collectives on one system; each is computed once.

    busiest_load: what the GPU that sends most sends, over the mean. near_memory: whether reductions add at the memory.
    store_cus: CUs whose requests a fused kernel has in flight.
    """

    def __init__(
        self, system: System, moves: Sequence[Move], busiest_load: Any, *, near_memory: Any, store_cus: Any
    ) -> None:
        self._system, self._moves, self._busiest_load, self._near_memory = system, moves, busiest_load, near_memory
        self._store_cus = store_cus
        self._cache: dict[tuple[Any, ...], list[SegmentCost]] = {}

    @functools.cached_property
    def _busiest(self) -> Mapping[str, Any]:
        """Map each wire or switch to 1 if all collectives together keep it busy longest, else to 0."""
        rates, totals = capacities(self._system), dict[str, Any]()
        for move in self._moves:
            sent = move.load(self._busiest_load) * np.asarray(move.rows) * move.op.element_bytes * move.op.cols
            for segment in (segment for segments in move.segments for segment in segments):
                for name, load in segment.loads.items():
                    totals[name] = totals.get(name, 0.0) + sent * segment.share * np.asarray(load) / rates[name]
        most = np.argmax(np.stack(np.broadcast_arrays(*totals.values())), axis=0)
        return {name: (most == place).astype(float) for place, name in enumerate(totals)}

    def inside_bytes(self, move: Move) -> Any:
        """Bytes that a fused kernel stores into the memory of the GPUs of its node, before any is forwarded."""
        shares = sum(np.asarray(part.share) for part in move.segments[0] if part.inside)
        return move.rows * move.op.element_bytes * move.op.cols * shares

    def peer_stores(self, move: Move, seconds: Any) -> Any:
        """Rate [bytes/s] of stores inside a node by a kernel of `seconds`: as it makes them, or as links go."""
        inside = [segment for segment in move.segments[0] if segment.inside]
        paces = [pace(self._system, part, cus=self._store_cus, pattern=move.op.pattern) for part in inside]
        return np.minimum(sum(paces), self.inside_bytes(move) / seconds)

    def of_phase(self, move: Move, phase: int, *, cus: Any, copied: bool) -> list[SegmentCost]:
        """Common parameters of the transfers of each segment of a phase.

        cus: of the library's kernel that moves them, None for a fused one. copied: they are read to be sent inside.
        """
        key = (move.name, phase, cus is None)
        if key not in self._cache:
            halves = 2 if move.op.pattern == "all_reduce" else 1  # of which the first adds
            adds = move.op.reduces and phase < len(move.segments) // halves
            added = accumulate_hbm_bytes(self._system, near_memory=self._near_memory) if adds else 0.0
            is_result = phase == 0 or (move.op.reduces and 2 * phase == len(move.segments))  # results, and sums
            # stored at the peer, and read here if it is not stored at once: copied, forwarded, or sent by a NIC
            read = [1.0 if is_result and segment.inside and not copied else 2.0 for segment in move.segments[phase]]
            self._cache[key] = [
                self._segment_cost(move, phase, segment, cus, hbm=hbm + added)
                for segment, hbm in zip(move.segments[phase], read, strict=True)
            ]
        return self._cache[key]

    def _segment_cost(self, move: Move, phase: int, segment: PhaseSegment, kernel_cus: Any, *, hbm: Any) -> SegmentCost:
        system, op, rates = self._system, move.op, capacities(self._system)
        rate = pace(system, segment, cus=system.gpu.num_cus, pattern=op.pattern)
        cus, delay = None, messages_s(system, segment)
        if kernel_cus is None:
            cap = pace(system, segment, cus=self._store_cus, pattern=op.pattern) / rate
        else:
            used_cus = fewest_cus(system, segment, cus=kernel_cus, pattern=op.pattern)
            cap = pace(system, segment, cus=used_cus, pattern=op.pattern) / rate
            cus, delay = as_scalar(used_cus / len(move.segments[phase])), delay + segment.latency_s
        return SegmentCost(
            row_bytes=as_scalar(np.asarray(op.element_bytes * op.cols) * segment.share),
            rate=as_scalar(rate),
            loads={name: as_scalar(np.asarray(load) * rate) for name, load in segment.loads.items()},
            hbm_bytes_per_s=as_scalar(np.maximum(hbm, 1e-9) * rate) if np.any(hbm > 0) else None,
            cap=as_scalar(cap),
            weight=as_scalar(1 / (np.maximum(hbm, 1.0) * rate)),
            cus=cus,
            delay=as_scalar(delay),
            inside=segment.inside,
            ideal_s_per_byte=as_scalar(
                sum(self._busiest[name] * np.asarray(load) / rates[name] for name, load in segment.loads.items())
            ),
        )


def as_scalar(value: Any) -> Any:
    """Convert a scalar to float: fast to compute with, and comparable."""
    return value if np.ndim(value) else float(value)
