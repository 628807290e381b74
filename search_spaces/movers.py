"""What moves data in a schedule: DMA engines, kernels on some CUs, or stores; their rates and contention laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from search_spaces.chunk_costs import ChunkCosts, LawGroups
from simulators.costs.transfer import Route, TransferMode, library_cus, library_s, rate, setup, slowed_beside_gemm
from simulators.hardware.system import System


@dataclass
class Means:
    """A mover of a collective over `routes`, and the transfers of the last step that it was given.

    priority: class of its transfers. costs: of GEMM chunks beside it. laws: groups of its transfers.
    """

    system: System
    mode: TransferMode
    routes: Sequence[Route]
    priority: int
    costs: ChunkCosts
    laws: LawGroups
    last_step: list[int] = field(default_factory=list)
    _copies: dict[tuple[int, ...], Mapping[str, Any]] = field(default_factory=dict)

    @property
    def by_kernels(self) -> bool:
        """Flag: kernels on CUs move the data."""
        return self.mode.engine == "cu"

    @property
    def setup_s(self) -> Any:
        """Set-up time of a kernel, or of a copy [s]."""
        return setup(self.system, by=self.mode)

    def copy(self, route: Route, active: Sequence[Route]) -> Mapping[str, Any]:
        """Common parameters of transfers over a route while the routes `active` run at once."""
        key = (route.peer, *(other.peer for other in active))
        if key in self._copies:
            return self._copies[key]
        pace = rate(self.system, route, active, by=self.mode)
        exclusive_link = len(route.loads) == 1 and "port" not in route.loads
        beside = slowed_beside_gemm(self.system, active, by=self.mode)
        self._copies[key] = {
            "delay": self.setup_s if self.mode.engine == "dma" else 0.0,
            "cap": pace.bytes_per_s,
            "weight": 0.5,  # consumption-fair at HBM: equal HBM bytes/s at the bottleneck
            "priority": self.priority,
            "lane": next(iter(route.loads)) if exclusive_link else f"peer.{route.peer}",
            "limiter": pace.limiter,
            "cus": np.asarray(self.mode.cus if self.by_kernels else 0) / len(active),
            "group": self.laws.group(beside),
            "free": rate(self.system, route, active, by=self._free).bytes_per_s,
        }
        return self._copies[key]

    def library_factor(self, concurrent: Sequence[tuple[Route, ArrayLike]]) -> Any:
        """Factor on the rate of kernels that move a collective at once, where the library was measured by size."""
        moved = sum(np.asarray(amount) for _, amount in concurrent)
        seconds = library_s(self.system, moved, by=self.mode) if len(concurrent) == len(self.routes) else None
        if seconds is None:
            return 1.0
        active = [route for route, _ in concurrent]
        longest = np.maximum.reduce(
            [np.asarray(amount) / self.copy(route, active)["cap"] for route, amount in concurrent]
        )
        return np.where(seconds > 0, longest / np.where(seconds > 0, seconds, 1.0), 1.0)

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
