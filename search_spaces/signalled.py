"""One GEMM kernel whose tiles wait for the shards that they read, or signal the shards that they have made.

The kernel is launched once and keeps the tiles of the undivided GEMM; each shard's tiles go on when a signal says that
the shard has arrived (flux, arXiv:2406.06858; Triton-distributed, arXiv:2504.19442; async TP of PyTorch with
signals). Shards move in turn where peers share a GPU's port, the nearest peer's first, and all at once where each has a
link, beside the kernel: by copy engines, by kernels on CUs of their own, or by stores of the workgroups that compute.

Workgroups are dealt out wave by wave, so signals count by whole waves. With W waves (tiles over CUs, not rounded up),
n shards in turn, and p seconds from one shard's arrival to the next one's:

    all-gather       the tiles of shard j begin with the wave that shard j begins in, and wait for the last shard of
                     this wave, g = min(n, ceil((floor(j W / n) + 1) n / W)) - 1: (g - j) p beyond their own
    reduce-scatter   shard j is done when the wave with its last tile is: ceil(x) - x waves later, x = (j + 1) W / n

Where the kernel's tile is known (`kernel_tile`), none is of two shards: each shard's rows are padded to whole tiles.

Derived; the time of the kernel itself is that of simulators/costs/gemm/waves.py at `kernel_rate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from dse.space.blocks import Rule
from dse.values import knob
from dse.values.units import Integer, Number, Seconds
from search_spaces.chunk_costs import tiles_of
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.pipeline import Pipeline
from simulators.costs.transfer import Mover
from simulators.hardware.machine import System
from simulators.hardware.network import Route
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Workload

Side = Annotated[int, Field(ge=1, le=4096)]


class SignalledSchedule(CommEngineKnobs):
    """Knobs of the family.

    kernel_rate: rate of the kernel over the library's best. kernel_tile: rows and columns of C of its workgroups; None
    for the best of the library's. lost_rows: rows in whose time the tiles of each shard get nothing done, where the
    kernel takes shard after shard and reads its weights for each; of a shard of fewer rows, twice its time.
    signal_s: time that a copy's signal takes after it on the stream of copies, where the next one waits: a fence of the
    whole system and a write (`cuStreamWriteValue32`).
    staged_sums: with comm_engine=dma, a GPU copies its own shard to those that it gets, and the sum out of there, each
    time after a barrier.
    sender: with comm_engine=cu, a `kernel` on CUs of its own, or the workgroups that compute the `tiles`, which load or
    store them at their peers.
    """

    family: Literal["signalled"]
    comm_cus: Annotated[Integer | None, knob(when={"comm_engine": "cu", "sender": "kernel"}, ge=1, le=4096)]
    kernel_rate: Annotated[Number, Field(gt=0, le=16)] = 1.0
    kernel_tile: tuple[Side, Side] | None = None
    lost_rows: Annotated[Number, Field(ge=0, le=4096)] = 0.0
    signal_s: Annotated[Seconds, Field(le=1)] = 0.0
    staged_sums: Annotated[bool | None, knob(when={"comm_engine": "dma"}, structural=True)] = False
    sender: Annotated[Literal["kernel", "tiles"] | None, knob(when={"comm_engine": "cu"}, structural=True)] = "kernel"

    @property
    def mover(self) -> Mover:
        """Engine that moves data."""
        return "store" if self.sender == "tiles" else self.comm_engine

    @property
    def kernel(self) -> ArrayLike | None:
        """Rate of the kernel over the library's."""
        return self.kernel_rate

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of C that a workgroup of the kernel computes."""
        return self.kernel_tile

    @property
    def signal(self) -> ArrayLike:
        """Time of the signal that follows each copy [s]."""
        return self.signal_s

    @property
    def lost(self) -> ArrayLike:
        """Rows whose time the tiles of a shard lose."""
        return self.lost_rows

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Require a tile that the GPU's library describes."""
        rules = list(super().rules(system, workload))
        if self.kernel_tile is not None and not tiles_of(system, self.kernel_tile):
            way = "one of " + ", ".join(f"[{tile.cols}, {tile.rows}]" for tile in system.gpu.gemm.tiles)
            rule = "is no tile whose rate is known (system.gpu.gemm.tiles)"
            rules.append(Rule("schedule.kernel_tile", True, rule, list(self.kernel_tile), way_out=way))
        return rules

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to one transfer and one part of the kernel for each shard."""
        line = Pipeline(system, workload, knobs=self, comm_cus=self.comm_cus, masked=False)
        if line.order == "after":
            self._lower_reduction(line)
        else:
            self._lower_gather(line)
        return line.build()

    def _lower_gather(self, line: Pipeline) -> None:
        waves, _ = line.compute.waves
        line.compute.part("gemm local", line.shard_rows[0], launched=True)
        count, shards = len(line.routes) + 1, [_whole_shard(line, route) for route in line.routes]
        at_once = line.system.node.topology not in ("switch", "pcie")
        moved = line.comm.step("shards", shards) if at_once else []
        for index, route in enumerate(line.routes, 1):
            arrived = moved[index - 1 : index] if at_once else line.comm.step(f"shard {index}", [shards[index - 1]])
            if not at_once:
                begun = np.floor(np.round(index * waves / count, 9)) + 1
                last = np.minimum(count, np.ceil(np.round(begun * count / waves, 9))) - 1
                arrived += [line.comm.wait(f"wave of {index}", (last - index) * line.comm.copy_s[arrived[0]], arrived)]
            line.compute.part(f"gemm {index}", line.shard_rows[route.peer], after=arrived)

    def _lower_reduction(self, line: Pipeline) -> None:
        waves, wave_s = line.compute.waves
        count, sent = len(line.routes) + 1, list[int]()
        for index, route in enumerate(line.routes):
            produced = line.compute.part(f"gemm {index}", line.shard_rows[route.peer], launched=index == 0)
            done = np.round((index + 1) * waves / count, 9)
            late = line.comm.wait(f"wave of {index}", (np.ceil(done) - done) * wave_s, [produced])
            sent += line.comm.step(f"shard {index}", [_whole_shard(line, route)], after=[late])
        line.compute.part("gemm local", line.shard_rows[0])
        if line.comm.adds:
            line.compute.reduce("reduce", sent, at_once=True, staged=bool(self.staged_sums))


def _whole_shard(line: Pipeline, route: Route) -> tuple[Route, Any]:
    return route, line.payload(line.shard_rows[route.peer], line.collective.cols)


SCHEDULE = SignalledSchedule
