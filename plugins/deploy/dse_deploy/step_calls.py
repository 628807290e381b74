"""Collectives of a step as a library is called for them: what each moves, among how many GPUs, and how it may do so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from simulators.costs.algorithms import Pattern
from simulators.costs.collective import Group
from simulators.costs.transfer import in_switch_seconds, library_cus, protocol_seconds
from simulators.hardware.network import Pattern as LinkPattern
from simulators.hardware.network import Protocols
from simulators.steps.operators.work import AGAIN, Axis, Exchange, Product
from simulators.steps.overlap.sites import SITES
from simulators.steps.run.iteration import Iteration

NEVER_S = 1e6
"""Latency [s] by which a protocol is never the fastest."""
_HALVES = ("all_gather", "reduce_scatter")
CTAS: Mapping[Axis, str] = {
    "tp": "parallel.tp_ctas",
    **dict.fromkeys(("dp", "edp", "shard", "repeat"), "parallel.dp_ctas"),
}
"""Axis of a collective -> the knob that has the CTAs of the library's collectives over it."""


@dataclass(frozen=True)
class Shape:
    """Sizes (m, n, k) of the GEMM beside a collective, and bytes of an element of what is exchanged."""

    m: int
    n: int
    k: int
    element_bytes: int


@dataclass(frozen=True)
class Call:
    """A collective of a step. site: whose it is, "" of none; axis: of its group; times: in a step.

    payload_bytes: of the whole tensor, the larger of what a GPU sends and receives. library_channels: that the library
    takes by itself; switch_channels: CTAs that order all that the switch adds. beside: the GEMM that may run with it.
    """

    name: str
    site: str
    pattern: Pattern
    axis: Axis
    payload_bytes: int
    ranks: int
    nodes: int
    times: float
    library_channels: int
    beside: Shape | None = None
    group: Group = field(compare=False, repr=False, default_factory=lambda: Group(1, 1.0, 0.0))

    @property
    def is_measured(self) -> bool:
        """Tell whether the node, or the network, has constants of its protocols."""
        return self._constants() is not None

    def by_protocol(self, size: float) -> Mapping[str, float]:
        """Protocol -> time [s] of such a collective of `size` bytes by it alone; empty where none was measured."""
        constants = self._constants()
        if constants is None:
            return {}
        ways = {
            "ll": {"ll128_step_s": NEVER_S, "simple_s": NEVER_S},
            "ll128": {"ll_step_s": NEVER_S, "simple_s": NEVER_S},
            "simple": {"ll_step_s": NEVER_S, "ll128_step_s": NEVER_S},
        }
        return {name: self._seconds(constants.model_copy(update=way), size) for name, way in ways.items()}

    def in_switch_s(self, size: float) -> float | None:
        """Time [s] in the switch; None where it does not compute the collective."""
        rate = self.group.switched(self.pattern) if self.nodes == 1 else None
        return None if rate is None else float(in_switch_seconds(rate, self.pattern, self.ranks, size))

    def _constants(self) -> Protocols | None:
        """Fitted constants; for a half of an all-reduce that was not measured, those of the all-reduce.

        A library scatters and gathers by the same protocols, steps and kernels (`simulators.costs.transfer`). The
        choice by the library itself is left out, so that the fastest counts.
        """
        measured = (self.group.network if self.nodes > 1 else self.group.protocols) or {}
        constants = measured.get(self.pattern) or (measured.get("all_reduce") if self.pattern in _HALVES else None)
        return None if constants is None else constants.model_copy(update={"tuned": None, "ll_sizes": None})

    def _seconds(self, constants: Protocols, size: float) -> float:
        if self.pattern == "broadcast":  # no constants are fitted for it
            return 0.0
        return float(protocol_seconds(constants, self.pattern, self.ranks, size, num_nodes=self.nodes))


def calls_of(step: Iteration, machine: Any) -> tuple[Call, ...]:
    """Collectives of a step among several GPUs, in the order of its operators, and those of its gradients.

    machine: the step's.
    """
    calls = (*_of_operators(step, machine), *_of_gradients(step, machine))
    return tuple(call for call in calls if call.ranks > 1 and call.payload_bytes > 0)


def _of_operators(step: Iteration, machine: Any) -> Iterator[Call]:
    sites = {name: site for site, entry in SITES.items() for name in entry.collectives}
    products = {part.op.name: part.op.work for part in step.passes.parts if isinstance(part.op.work, Product)}
    for part in step.passes.parts:
        work = part.op.work
        if not isinstance(work, Exchange):
            continue
        site = sites.get(part.op.name.removesuffix(AGAIN), "")
        gemm = products.get(SITES[site].beside) if site else None
        shape = None if gemm is None else _shape(gemm, int(step.passes.run.element_bytes))
        call = _call(step, machine, work)
        yield replace(call, name=part.op.name, site=site, times=float(np.asarray(part.times)), beside=shape)


def _shape(gemm: Product, element_bytes: int) -> Shape:
    m, n, k = (int(np.asarray(size)) for size in (gemm.m, gemm.n, gemm.k))
    return Shape(m, n, k, element_bytes)


def _of_gradients(step: Iteration, machine: Any) -> Iterator[Call]:
    """Yield reductions of gradients over dp and gathers of split weights, one for each block."""
    gradients, knobs = step.gradients, step.passes.parallel
    if not step.passes.is_training or knobs.shard_gpus is not None:
        return
    kinds: dict[Pattern, float] = {"all_reduce" if knobs.zero == 0 else "reduce_scatter": gradients.gradient_bytes}
    kinds |= {"all_gather": step.passes.run.element_bytes} if knobs.zero else {}
    for block in step.passes.blocks:
        shared = np.asarray(block.trained_params, float) - np.asarray(block.trained_experts, float)
        for pattern, size in kinds.items():
            call = _call(step, machine, Exchange(pattern, size * knobs.held_stages * shared, "dp"))
            times = float(np.asarray(step.passes.counts[block.name]))
            yield replace(call, name=f"{pattern.replace('_', '-')} of {block.name}", times=times)


def _call(step: Iteration, machine: Any, work: Exchange) -> Call:
    group = step.passes.platform.groups[work.over]
    return Call(
        name="",
        site="",
        pattern=work.pattern,
        axis=work.over,
        payload_bytes=round(float(np.asarray(work.payload_bytes))),
        ranks=int(np.asarray(group.num_gpus)),
        nodes=int(np.asarray(group.num_nodes)),
        times=1.0,
        library_channels=_channels(machine, work.pattern),
        group=group,
    )


def _channels(machine: Any, pattern: Pattern) -> int:
    copy = getattr(machine.gpu, "cu_copy", None)
    kinds: Mapping[str, LinkPattern] = {name: name for name in get_args(LinkPattern)}
    return 0 if copy is None or pattern not in kinds else int(np.asarray(library_cus(machine, kinds[pattern])))
