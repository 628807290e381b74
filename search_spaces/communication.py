"""Communication of overlap schedules: transfers of a collective in steps, by DMA engines, kernels on CUs, or stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from search_spaces.chunk_costs import ChunkCosts, ContentionLaw, LawGroups
from search_spaces.comm_knobs import CommEngineKnobs
from simulators.costs.transfer import (
    TransferMode,
    accumulate_hbm_bytes,
    is_measured,
    library_cus,
    library_s,
    rate,
    setup,
    slowed_beside_gemm,
    tiles_share,
)
from simulators.hardware.machine import System
from simulators.hardware.network import Route
from simulators.overlap.node import NodeGraph
from simulators.workloads.operators import Overlap

_Amounts = Sequence[tuple[Route, ArrayLike]]
WAITING = "waiting"
"""Group of the waits of kernels that hold their CUs and move nothing yet."""
WAIT_S = 1e-12
"""Length [s] of such a wait while no GEMM runs: as good as nothing, and work that engines can run."""


@dataclass(frozen=True)
class RouteCopy:
    """Common numbers of transfers over a route. free_bytes_per_s: rate with all CUs that the library has, unslowed."""

    setup_s: Any
    bytes_per_s: Any
    free_bytes_per_s: Any
    cus: Any
    lane: str
    limiter: str
    group: str


@dataclass
class Means:
    """A mover of a collective over `routes`, and the transfers of the last step that it was given.

    costs: of GEMM chunks beside it. laws: groups of its transfers. withheld: CUs that no GEMM gets beside it. signal_s:
    time of the signal after each copy by a DMA engine.
    """

    system: System
    mode: TransferMode
    routes: Sequence[Route]
    costs: ChunkCosts
    laws: LawGroups
    withheld: ArrayLike = 0
    signal_s: ArrayLike = 0.0
    last_step: list[int] = field(default_factory=list)
    _copies: dict[tuple[int, ...], RouteCopy] = field(default_factory=dict)

    @property
    def by_kernels(self) -> bool:
        """Flag: kernels on CUs move the data."""
        return self.mode.engine == "cu"

    @property
    def setup_s(self) -> Any:
        """Set-up time of a kernel, or of a copy [s]."""
        return setup(self.system, by=self.mode)

    def copy(self, route: Route, active: Sequence[Route]) -> RouteCopy:
        """Common numbers of transfers over a route while the routes `active` run at once."""
        key = (route.peer, *[other.peer for other in active])
        if key not in self._copies:
            pace = rate(self.system, route, active, by=self.mode)
            exclusive_link = len(route.loads) == 1 and "port" not in route.loads
            self._copies[key] = RouteCopy(
                setup_s=np.asarray(self.setup_s) + self.signal_s if self.mode.engine == "dma" else 0.0,
                bytes_per_s=pace.bytes_per_s,
                free_bytes_per_s=rate(self.system, route, active, by=self._free).bytes_per_s,
                cus=np.asarray(self.mode.cus if self.by_kernels else 0) / len(active),
                lane=next(iter(route.loads)) if exclusive_link else f"peer.{route.peer}",
                limiter=pace.limiter,
                group=self.laws.group(ContentionLaw((self.slowed(active),))),
            )
        return self._copies[key]

    def slowed(self, active: Sequence[Route]) -> Any:
        """Factor on the rates of its transfers while a GEMM runs."""
        return slowed_beside_gemm(self.system, active, by=self.mode, withheld=self.withheld)

    def library_factor(self, concurrent: _Amounts) -> Any:
        """Factor on the rate of kernels that move a collective at once, where the library was measured by size."""
        moved = sum(np.asarray(amount) for _, amount in concurrent)
        seconds = library_s(self.system, moved, by=self.mode) if len(concurrent) == len(self.routes) else None
        if seconds is None:
            return 1.0
        active = [route for route, _ in concurrent]
        longest = np.maximum.reduce(
            [np.asarray(amount) / self.copy(route, active).bytes_per_s for route, amount in concurrent]
        )
        factor = np.where(seconds > 0, longest / np.where(seconds > 0, seconds, 1.0), 1.0)
        if is_measured(self.system, self.mode.pattern):
            return factor
        return 1.0 if np.all(factor >= 1.0) else np.minimum(factor, 1.0)  # links carry no more than they do

    def collective_s(self, amount: Any) -> Any:
        """Time [s] of `amount` bytes at the rate of a collective over all routes with all engines or CUs."""
        return amount * self._per_byte

    def engines_of(self, route: Route, position: int, *, signalled: bool) -> tuple[int | str, ...]:
        """DMA engines that a copy waits for. On a ring they are those of its links: a copy over both links has both, so
        that no later copy takes its link. signalled: a signal starts each copy, on its own link.
        """
        if self.mode.engine != "dma":
            return ()
        count = self.system.gpu.dma.num_engines
        if signalled and "port" not in route.loads:
            position = route.peer % count
        return tuple(route.loads) if route.step and count > 1 else (position,)

    @property
    def _free(self) -> TransferMode:
        """Transfer mode of the engine with all CUs that the library gives a kernel."""
        return TransferMode(self.mode.engine, library_cus(self.system, self.mode.pattern), self.mode.pattern)

    @cached_property
    def _per_byte(self) -> Any:
        parts: Any = 0.0
        for _, group in groupby(self.routes, key=lambda route: route.step):
            concurrent = list(group)
            paces = [
                rate(self.system, route, concurrent, by=self._free, split="even").bytes_per_s for route in concurrent
            ]
            parts = parts + np.maximum.reduce([1 / pace for pace in paces])
        return parts / len(self.routes)  # each route brings the same number of bytes


@dataclass(frozen=True)
class _Step:
    """Transfers that run at once, by one mover.

    active: routes that run at once, as far as there are engines. share_s: time [s] of each if all links were busy.
    factor: of a measured library on the rates of its kernels.
    """

    label: str
    means: Means
    active: Sequence[Route]
    share_s: Any
    factor: Any

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What the rates of its transfers depend on, beside their routes."""
        factor = np.asarray(self.factor)
        return self.means.laws.name, tuple(route.peer for route in self.active), factor.shape, factor.tobytes()


@dataclass(frozen=True)
class _GpuCopy:
    """Numbers of a transfer that ends at one GPU. uses: of resources, per byte."""

    common: RouteCopy
    bytes_per_s: Any
    free_bytes_per_s: Any
    group: str
    uses: dict[int, ArrayLike]


class Communication:
    """Transfers of a collective: in order on each engine, or kernel after kernel if CUs move them.

    moved_bytes, copy_s: of each transfer, bytes and time alone [s] with its set-up.
    """

    def __init__(
        self, node: NodeGraph, system: System, *, overlap: Overlap, knobs: CommEngineKnobs, movers: Sequence[Means]
    ) -> None:
        self._node, self._system, self.knobs = node, system, knobs
        self._machine, self._graph, self._overlap = node.machine, node.builder, overlap
        self._added_bytes = accumulate_hbm_bytes(system, near_memory=knobs.near_memory)
        self._priority = int(knobs.priority == "compute")
        self.adds = knobs.mover in ("dma", "store") and not knobs.near_memory
        """Flag: a separate kernel adds the operands of a reduction, as DMA engines cannot."""
        self.movers = movers
        # incoming data is staged until it is used, not added on arrival or stored at its destination
        self._stages = overlap.order == "before" or (overlap.order == "after" and self.adds)
        self.moved_bytes: dict[int, Any] = {}
        self.copy_s: dict[int, Any] = {}
        self._kernel_of: dict[int, list[int]] = {}  # transfer -> all that its kernel moves
        self._gpu_copies: dict[tuple[Any, ...], _GpuCopy] = {}
        self._queued: dict[tuple[int, int | str], int] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        self._synced = False

    @property
    def waits(self) -> bool:
        """Flag: kernels that move data wait for CUs while a GEMM runs."""
        late = bool(np.any(np.asarray(self._system.gpu.contention.late_start) > 0))
        return late and any(means.by_kernels for means in self.movers)

    def transfers(self, tasks: Sequence[int]) -> list[int]:
        """Transfers among tasks."""
        return [task for task in tasks if task in self.moved_bytes]

    def kernel_ends(self, transfers: Sequence[int]) -> list[int]:
        """Transfers of the kernels that move some, whose ends are their arrival; a copy signals its own."""
        return [other for transfer in transfers for other in self._kernel_of[transfer]]

    def step(self, label: str, amounts: _Amounts, *, after: Sequence[int] = (), by: int = 0) -> list[int]:
        """Move bytes over each route once the tasks `after` are done; return the transfers, in the order of `amounts`.

        Routes with equal `Route.step` run at once, the steps (distances on a ring) one after another. by: 0 for the
        mover of the knobs, else a place that `Pipeline.also` returned.
        """
        means = self.movers[by]
        before = self._kernel(label, after, means) if means.by_kernels else list(after)
        before = self._sync(label, before)
        transfers: dict[int, int] = {}
        for step in sorted({route.step for route, _ in amounts}):
            concurrent = [item for item in amounts if item[0].step == step]
            tasks = self._add_transfers(label, concurrent, before, means)
            transfers |= dict(zip([route.peer for route, _ in concurrent], tasks, strict=True))
            before = tasks if {route.step for route, _ in amounts} != {0} else before
        means.last_step = list(transfers.values())
        self._kernel_of |= dict.fromkeys(means.last_step, means.last_step if means.by_kernels else [])
        return [transfers[route.peer] for route, _ in amounts]

    def wait(self, label: str, seconds: Any, after: Sequence[int]) -> int:
        """Add a time that passes after tasks while nothing else waits."""

        def add(gpu: int) -> int:
            name, delay = self._machine.task_name(label, gpu), self._machine.for_gpu(seconds, gpu)
            return self._launch(name, gpu, delay=delay, after=self._node.on(gpu, after))

        return self._node.on_each(add)

    def _launch(self, name: str, gpu: int, *, delay: Any, after: Sequence[int]) -> int:
        return self._graph.task(
            name, "launch", after=after, delay=delay, gpu=gpu, lane="communication", limiter="launch"
        )

    def _kernel(self, label: str, after: Sequence[int], means: Means) -> list[int]:
        """Add the launch of a communication kernel, after the one before it on the same stream."""
        setup_s = means.setup_s

        def add(gpu: int) -> int:
            before = self._node.on(gpu, [*means.last_step, *after])
            return self._launch(self._machine.task_name(f"launch {label}", gpu), gpu, delay=setup_s, after=before)

        self._node.submissions = self._node.submissions + np.asarray(self.knobs.collective_calls)
        launched = [self._node.on_each(add)]
        return [self._wait_for_cus(label, launched, means)] if self.waits else launched

    def _sync(self, label: str, before: list[int]) -> list[int]:
        """Add a barrier among the GPUs where one is needed."""
        if self._synced or not np.any(np.asarray(self.knobs.sync_s) > 0):
            return before
        self._synced, self._node.submissions = self._overlap.order == "before", self._node.submissions + 2
        return [self.wait(f"barrier {label}", self.knobs.sync_s, before)]

    def _wait_for_cus(self, label: str, launched: Sequence[int], means: Means) -> int:
        """Add the wait of a kernel that holds its CUs and moves nothing yet: no time, but while a GEMM runs."""

        def add(gpu: int) -> int:
            return self._graph.task(
                self._machine.task_name(f"wait {label}", gpu),
                "launch",
                after=self._node.on(gpu, launched),
                work=1.0,
                cap=1 / WAIT_S,
                cus=means.mode.cus,
                lane="communication",
                group=self._machine.task_name(WAITING, gpu),
                gpu=gpu,
            )

        return self._node.on_each(add)

    def _add_transfers(self, label: str, concurrent: _Amounts, before: list[int], means: Means) -> list[int]:
        """Add transfers that start at once, as far as there are engines; a later one waits for an engine."""
        engines = self._system.gpu.dma.num_engines if means.mode.engine == "dma" else len(concurrent)
        at_once, factor = min(len(concurrent), engines), means.library_factor(concurrent)
        signalled = self.knobs.kernel is not None
        active = [route for route, _ in concurrent[:at_once]]
        share = means.collective_s(sum(np.asarray(amount) for _, amount in concurrent)) / -(-len(concurrent) // at_once)
        step = _Step(label, means, active, share, factor)
        tasks = []
        for position, item in enumerate(concurrent):
            queue = means.engines_of(item[0], position % at_once, signalled=signalled)
            tasks.append(self._transfer(step, item, queue=queue, before=before))
        for (route, _), task in zip(concurrent, tasks, strict=True):
            self._arrived |= {(gpu, route.peer): gpu_task for gpu, gpu_task in self._node.by_gpu(task).items()}
        return tasks

    def _transfer(
        self, step: _Step, item: tuple[Route, ArrayLike], *, queue: tuple[int | str, ...], before: list[int]
    ) -> int:
        """Add a transfer over one route, after the last copies of the DMA engines `queue` (none: a kernel moves it)."""
        (route, payload), means = item, step.means
        self._node.submissions = self._node.submissions + (means.mode.engine == "dma")

        def add(gpu: int) -> int:
            numbers, amount = self._gpu_copy(gpu, route, step), self._machine.for_gpu(payload, gpu)
            copy = numbers.common
            transfer = self._graph.task(
                self._machine.task_name(f"{step.label} from {route.peer}", gpu),
                "transfer",
                after=[*self._node.on(gpu, before), *self._earlier(gpu, route, queue)],
                uses=numbers.uses,
                work=amount,
                staged_bytes=amount if self._stages else 0.0,
                moved_bytes=amount,
                alone_s=amount / numbers.free_bytes_per_s,
                wide_s=self._machine.for_gpu(step.share_s, gpu),
                ideal_s=means.collective_s(amount),
                delay=copy.setup_s,
                cap=numbers.bytes_per_s,
                weight=0.5,  # consumption-fair at HBM: equal HBM bytes/s at the bottleneck
                priority=self._priority,
                lane=copy.lane,
                limiter=copy.limiter,
                cus=copy.cus,
                group=numbers.group,
                gpu=gpu,
            )
            self.moved_bytes[transfer] = amount
            self.copy_s[transfer] = copy.setup_s + amount / numbers.bytes_per_s
            self._queued |= dict.fromkeys([(gpu, engine) for engine in queue], transfer)
            return transfer

        return self._node.on_each(add)

    def _earlier(self, gpu: int, route: Route, queue: tuple[int | str, ...]) -> list[int]:
        """Transfers before one to a GPU: on its engines, and those that bring what a neighbour forwards."""
        queued = [self._queued[gpu, engine] for engine in queue if (gpu, engine) in self._queued]
        sources = self._machine.sources(route, gpu)
        return queued + [self._arrived[source] for source in sources if source in self._arrived]

    def _gpu_copy(self, gpu: int, route: Route, step: _Step) -> _GpuCopy:
        """Numbers of a transfer to a GPU; made once for all alike."""
        key = gpu, route.peer, step.key
        if key not in self._gpu_copies:
            copy = step.means.copy(route, step.active)
            factor = self._machine.for_gpu(step.factor, gpu)
            capped, free = copy.bytes_per_s * factor, copy.free_bytes_per_s * factor
            group = self._machine.task_name(copy.group, gpu)
            uses = self._uses(route, gpu, step.means, cus_s_per_byte=copy.cus / capped)
            self._gpu_copies[key] = _GpuCopy(copy, capped, free, group, uses)
        return self._gpu_copies[key]

    def _uses(self, route: Route, gpu: int, means: Means, *, cus_s_per_byte: Any) -> dict[int, ArrayLike]:
        """Use of resources per byte over a route to a GPU, with the local operand of a reduction."""
        uses = self._machine.uses(route, gpu)
        if means.mode.engine in ("store", "switch"):  # concurrent ones share what all of them reach
            share, hbm = tiles_share(self._system, means.mode), set(self._machine.hbm)
            uses = {name: load if name in hbm else np.divide(load, share) for name, load in uses.items()}
        if means.by_kernels:
            uses[self._machine.cu[gpu]] = cus_s_per_byte
        if self._overlap.collective.reduces and not (self.adds and not means.by_kernels):
            uses[self._machine.hbm[gpu]] = np.add(uses[self._machine.hbm[gpu]], self._added_bytes)
        return uses
