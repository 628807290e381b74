"""Drawn errors of a schedule: its task graph with drawn work, all draws at once, and the error of its speed-up.

Tasks of a GEMM have the error of GEMMs, transfers that of collectives. A schedule that is not serial has the error of
speed-ups by overlap as well, that of measured software.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dse import plugins
from simulators.calibration.residuals import Draws, draws_of
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.drawn import drawn_graph
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.losses import losses
from simulators.taskgraph.symmetry import patterns, reduce_graph
from simulators.workloads.operators import ELEMENT_BYTES, Gemm

Floats = NDArray[np.float64]
_ENGINE = "fluid"  # compiled: all engines mean the same
_SERIAL = "serial"


def draw_schedules(
    designs: Sequence[BaseModel],
    lower: Callable[[OverlapDesign], TaskGraph],
    *,
    samples: int,
    seed: int,
    known: Sequence[str] = (),
) -> tuple[Floats, Mapping[str, str]]:
    """Makespans [designs, samples] with drawn errors, and what those of each kind rest on. known: taken as measured."""
    times, draws = np.empty((len(designs), samples)), None
    for place, design in enumerate(designs):
        assert isinstance(design, OverlapDesign)
        draws = draws or draws_of(design.system.gpu, samples=samples, seed=seed, known=known)
        times[place] = _ScheduleErrors(design, lower(design), draws).makespans()
    return times, {} if draws is None else draws.basis


@dataclass(frozen=True)
class _ScheduleErrors:
    design: OverlapDesign
    graph: TaskGraph
    draws: Draws

    def makespans(self) -> Floats:
        """Makespans [S]."""
        graph = drawn_graph(self.graph, {"gemm": self._gemm(), "transfer": self._transfer()})
        drawn = _makespans(graph)
        if getattr(self.design.schedule, "family", "") == _SERIAL:
            return drawn
        alone = sum(
            _single(self.graph.grid_total("alone_s", self.graph.of_kind(kind))) for kind in ("gemm", "transfer")
        )
        speedup = alone / float(_makespans(self.graph)[0])
        gemm = self._first_gemm()
        key = "full" if gemm is not None and ELEMENT_BYTES[gemm.precision] > 2 else "half"
        sizes = {"speedup": speedup} | ({} if gemm is None else {"m": _single(gemm.m)})
        name = f"{self.design.schedule} {self.design.workload.name}"
        # no schedule takes less than the longer of GEMM and collective alone
        ideal = losses(graph, drawn)["ideal_s"]
        return np.maximum(drawn / self.draws.factor("overlap", name, key=key, sizes=sizes), np.minimum(ideal, drawn))

    def _first_gemm(self) -> Gemm | None:
        return next((op for op in self.design.workload.operators.values() if isinstance(op, Gemm)), None)

    def _gemm(self) -> Floats:
        """Factors [S] on GEMMs: as tables have them, m of outputs and n of tokens, on one GPU."""
        seconds = _single(self.graph.grid_total("ideal_s", self.graph.of_kind("gemm")))
        gemm, sizes = self._first_gemm(), {"seconds": seconds}
        if gemm is None:
            return self.draws.factor("gemm", self.design.workload.name, sizes=sizes)
        shared: dict[str, Any] = {name: _single(getattr(gemm, name)) for name in "mnk"}
        shared[gemm.split] /= float(gemm.shards)
        sizes |= {"m": shared["n"], "n": shared["m"], "k": shared["k"]}
        name = " ".join(f"{sizes[size]:g}" for size in "mnk")
        return self.draws.factor("gemm", name, key=gemm.precision, sizes=sizes)

    def _transfer(self) -> Floats:
        tasks = self.graph.of_kind("transfer")
        moved = _single(self.graph.grid_total("moved_bytes", tasks))
        gpus = _single(self.design.system.node.num_gpus)
        sizes = {"seconds": _single(self.graph.grid_total("alone_s", tasks)), "bytes": moved, "gpus": gpus}
        return self.draws.factor("collective", f"{moved:.3g}", key="inside", sizes=sizes)


def _single(value: Any) -> float:
    return float(np.asarray(value, float).reshape(-1)[0])


def _makespans(graph: TaskGraph) -> Floats:
    engine, spans = plugins.load("engine", _ENGINE), np.empty(graph.num_designs)
    for places, alike in patterns(graph):
        small = reduce_graph(alike).graph
        spans[slice(None) if places is None else places] = small.flat(engine.totals(small).makespan_s)
    return spans
