"""Numbers of CTAs for each site against one number for a process: part of `python -m benchmarks.libraries`.

Steps of two models with split weights (FSDP) on four nodes of four GPUs, of one sequence and of four a GPU: the number
of CTAs over tp, whose collectives wait for nothing else, and the number over dp, whose gathers run beside GEMMs. A
step pays by site where its best pair of numbers beats the best single number for both.

The same is asked of SimGrid where an interpreter can import it: a few layers as tasks that need SMs and a wire, of the
times alone that our costs give, with its sharing of SMs in place of our laws (`simulators.costs.sharing`). Collectives
over tp hold no SM there, as nothing runs beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dse import plugins
from dse.errors.terminal import bar
from simulators.hardware.machine import System, tree_of
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import StepDesign
from simulators.steps.run.build import iteration
from simulators.steps.run.iteration import Iteration
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.workloads.model_zoo import model_tree, option_tree

COUNTS = (0, 4, 8, 16)
"""CTAs that are tried; 0: as many as the library takes."""
_SYSTEMS = ("a100_8_hdr", "h100_8_ndr", "h200_8_ndr", "b200_8_ndr")
_MODELS = (("llama3_8b", 2), ("llama3_70b", 8))  # and GPUs of a layer
_BATCHES = (1, 4)
_GPUS, _LEAST_DP = 32, 8
_WORTH = 1e-4  # share of a step that counts as faster
_FOREIGN, _LAYERS = "simgrid", 6  # layers of a graph: each further one takes as long
_BACKEND = StepBackend()


@dataclass(frozen=True)
class SiteStep:
    """A step whose CTAs are chosen: system, model, GPUs of a layer, sequences of a GPU."""

    system: str
    model: str
    tp: int
    batch: int

    def design(self, over_tp: int, over_dp: int) -> StepDesign:
        """The step with numbers of CTAs over tp and over dp."""
        options = {group: option_tree(group, name) for group, name in (("optimizer", "adam"), ("kernels", "flash"))}
        run = {"mode": "training", "batch": self.batch, "sequence_length": 4096, "precision": "bf16"}
        split = {"tp": self.tp, "pp": 1, "dp": max(_GPUS // self.tp, _LEAST_DP), "zero": 3}
        parallel = {**split, "tp_ctas": over_tp, "dp_ctas": over_dp}
        tree = {"system": tree_of(self.system), "model": model_tree(self.model), "run": run, **options}
        return _BACKEND.design({**tree, "parallel": parallel})


def steps() -> Iterator[SiteStep]:
    """Yield the steps."""
    for system, (model, tp), batch in itertools.product(_SYSTEMS, _MODELS, _BATCHES):
        yield SiteStep(system, model, tp, batch)


def gain_of(times: Mapping[tuple[int, int], float]) -> float:
    """What the best pair of numbers gains over the best single number, as a share of the time with the pair."""
    at_once = min(seconds for (over_tp, over_dp), seconds in times.items() if over_tp == over_dp)
    return at_once / min(times.values()) - 1


def step_gain(step: SiteStep, seconds: Callable[[StepDesign], float]) -> float:
    """The gain of one step by a way to price it."""
    pairs = [(over_tp, over_dp) for over_tp in COUNTS for over_dp in COUNTS]
    return gain_of({pair: seconds(step.design(*pair)) for pair in pairs})


def per_site() -> dict[str, Any]:
    """Share of the steps that numbers for each site make faster, and the largest gain; also by a foreign engine."""
    gains = _gains("CTAs by site", lambda step: step_gain(step, lambda of: float(metrics_of(of)["iteration_s"])))
    figures = {"per_site_steps": len(gains), **_figures(gains, "")}
    engine = plugins.load("engine", _FOREIGN) if _FOREIGN in plugins.names("engine") else None
    if engine is None or engine.absence():
        return {**figures, "per_site_faster_in_simgrid": None}
    return figures | _figures(_gains("in SimGrid", lambda step: foreign_gain(step, engine)), "_in_simgrid")


def _gains(label: str, gain: Callable[[SiteStep], float]) -> list[float]:
    """The gain of each step, with progress under a label."""
    gains, every = list[float](), list(steps())
    with bar(label, len(every), "steps") as advance:
        for step in every:
            gains.append(gain(step))
            advance(1)
    return gains


def _figures(gains: list[float], by: str) -> dict[str, float]:
    faster = float(np.mean(np.array(gains) > _WORTH))
    return {f"per_site_faster{by}": faster, f"largest_gain_per_site{by}": max(gains)}


def foreign_gain(step: SiteStep, engine: Any) -> float:
    """The gain of one step where an engine shares SMs and the wire among the tasks of a few layers."""
    return step_gain(step, lambda design: float(engine.totals(layers_graph(iteration(design), design)).makespan_s[0]))


def layers_graph(step: Iteration, design: StepDesign, count: int = _LAYERS) -> TaskGraph:
    """A few layers of a step with split weights: compute on all SMs, collectives of tp, gathers and reductions.

    A collective needs the SMs of its CTAs and, over dp, the wire. The gather of a layer is prefetched by one layer.
    """
    return _LayersGraph(step, design.system, count).build()


class _LayersGraph:
    """The graph under construction. SM-seconds are the work of compute, seconds that of collectives."""

    def __init__(self, step: Iteration, system: System, count: int) -> None:
        self._graph, self._count = GraphBuilder(), count
        layers, self._sms = step.gradients.sharded, float(system.gpu.num_cus)
        counts = [float(np.asarray(of.count)) for of in layers]
        place = int(np.argmax(counts))  # the block that comes most often
        self._layer, block = layers[place], step.passes.blocks[place]
        self._waited_s = {
            forward: float(
                sum(
                    float(part.seconds)
                    for part in step.passes.parts
                    if part.block is block and part.forward == forward and part.over == "tp"
                )
                / counts[place]
            )
            for forward in (True, False)
        }
        self._ctas = float(step.gradients.copy_cus)
        self._on_sms = self._graph.resource("SMs", self._sms)
        self._wire = self._graph.resource("wire", 1.0)
        self._last_compute, self._last_exchange = list[int](), list[int]()

    def build(self) -> TaskGraph:
        """Build it: the forward pass, and the backward pass in reverse order."""
        for forward in (True, False):
            before_last = list[int]()
            for index in range(self._count):
                began = self._last_compute
                gathered = self._exchange(f"gather {forward} {index}", self._layer.gather_s, [*before_last])
                before_last = began
                self._compute(f"layer {forward} {index}", forward, gathered)
                if not forward:
                    self._exchange(f"reduce {index}", self._layer.reduce_s, self._last_compute)
        return self._graph.build()

    def _compute(self, name: str, forward: bool, gathered: list[int]) -> None:
        seconds = float(np.asarray(self._layer.forward_s if forward else self._layer.backward_s))
        waited_s = self._waited_s[forward]
        computed = self._graph.task(
            name,
            "gemm",
            after=[*self._last_compute, *gathered],
            uses={self._on_sms: self._sms},
            work=seconds - waited_s,
            cap=1.0,
        )
        summed = self._graph.task(f"{name}, sums", "transfer", after=[computed], work=max(waited_s, 0.0), cap=1.0)
        self._last_compute = [summed]

    def _exchange(self, name: str, seconds: Any, after: list[int]) -> list[int]:
        uses = {self._on_sms: self._ctas, self._wire: 1.0}
        before = [*after, *self._last_exchange]
        self._last_exchange = [
            self._graph.task(name, "transfer", after=before, uses=uses, work=float(seconds), cap=1.0)
        ]
        return self._last_exchange
