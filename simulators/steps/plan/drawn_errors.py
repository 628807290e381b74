"""Errors of a step: of its parts, which are drawn, and of its time as a whole.

Each operator has an error of its own and a share of that of its kind (`simulators.hardware.residuals`). A site is
run anew by the engine with the work of its tasks drawn, all draws at once, and its speed-up has the error of overlaps.

Drawn parts decide between designs, as what is off in all alike cancels. A time alone has the interval of measured whole
steps (kind `step`), which are off by more than their parts: software, model, GPU and release have components.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simulators.costs.collective import Group
from simulators.hardware.residuals import (
    ENDS,
    UNTOLD,
    Draws,
    JointDraws,
    ResidualGroup,
    name_in_tables,
    shipped_residuals,
    single,
    software_of,
    unmeasured_text,
)
from simulators.steps.design import StepDesign
from simulators.steps.operators.experts import TokenExchange
from simulators.steps.operators.work import Exchange, Op, OperatorCost, Platform, Product, Stream

if TYPE_CHECKING:
    from simulators.hardware.parts import Precision
    from simulators.workloads.operators import Workload

Floats = NDArray[np.float64]
_OF_ATTENTION = ("attention", "softmax")
BY_PARTS = "errors of its parts"
"""Basis of the interval of a step of which no whole one was measured."""


@dataclass(frozen=True)
class StepErrors:
    """Errors of one design. precision, linear: of all products, and of those of linear layers. kernels: their name."""

    draws: Draws
    precision: Precision
    linear: Precision
    kernels: str = ""

    def on(self, platform: Platform) -> Platform:
        """A platform whose operators and groups have these errors."""
        groups = {axis: replace(group, errors=self.of_exchange) for axis, group in platform.groups.items()}
        return replace(platform, errors=self, groups=groups)

    def of_operator(self, op: Op, cost: OperatorCost) -> Floats:
        """Factors [S] on the time of an operator that is no collective."""
        sizes = {"seconds": single(cost.seconds)}
        if op.kind in _OF_ATTENTION:
            return self.draws.factor("attention", op.name, key=self.kernels, sizes=sizes)
        if isinstance(op.work, Product):
            sizes |= {name: single(getattr(op.work, name)) for name in ("m", "n", "k")}
            key = self.linear if op.kind in ("linear", "fc") else self.precision
            return self.draws.factor("gemm", " ".join(f"{sizes[name]:g}" for name in "mnk"), key=key, sizes=sizes)
        if isinstance(op.work, Stream):
            sizes["bytes"] = single(op.work.bytes)
            return self.draws.factor("elementwise", op.name, key=op.work.like or "", sizes=sizes)
        return self.draws.factor("gemm", op.name, key=self.precision, sizes=sizes)  # recurrent layers, convolutions

    def of_exchange(self, work: Exchange, group: Group, seconds: Any) -> Floats:
        """Factors [S] on the time of a collective, or of an exchange of tokens by its library."""
        nodes, sizes = single(group.num_nodes), {"seconds": single(seconds), "gpus": single(group.num_gpus)}
        if isinstance(work, TokenExchange) and group.experts is not None:
            sizes |= {"tokens": single(work.tokens), "nodes": nodes, "sms": float(group.experts.num_sms)}
            traits = {"nodes": f"{self.draws.gpu} {nodes:g}"}
            return self.draws.factor("exchange", work.direction, key=work.direction, sizes=sizes, traits=traits)
        sizes |= {"bytes": single(work.payload_bytes), "nodes": nodes}
        key = "across nodes" if nodes > 1 else "inside" if group.switched(work.pattern) is None else "in switch"
        name, traits = f"{work.pattern} {sizes['bytes']:.3g} {nodes}", {"gpus": f"{self.draws.gpu} {sizes['gpus']:g}"}
        return self.draws.factor("collective", name, key=key, sizes=sizes, traits=traits)

    def of_overlap(self, schedule: Any, workload: Workload, length: Any) -> Floats:
        """Factors [S] on the speed-up of a site by a schedule. length: of the site over that of a serial one."""
        speedup = 1 / max(single(length), 1e-9)
        gemm = workload.operators["gemm"]
        sizes = {"speedup": speedup, "m": single(gemm.m)}  # type: ignore[union-attr]
        key = software_of(schedule.name)
        name = f"{schedule.name} {single(gemm.m):g} {single(gemm.n):g} {single(gemm.k):g}"  # type: ignore[union-attr]
        traits = {"software": key, "gpu": self.draws.gpu}
        return self.draws.factor("overlap", name, key=key, sizes=sizes, traits=traits)

    def of_host(self, times: Mapping[str, Any]) -> dict[str, Any]:
        """Times of the host, drawn."""
        return {name: value * self.draws.factor("host", "host", key="kernel") for name, value in times.items()}


def draw_steps(
    designs: Sequence[StepDesign],
    iterate: Callable[[StepDesign, StepErrors], Any],
    *,
    samples: int,
    seed: int,
    exact: Sequence[str] = (),
) -> tuple[Floats, Mapping[str, str]]:
    """Times [designs, samples] of iterations, and what the errors of each kind rest on.

    The same operators have the same errors in all designs. iterate: an iteration with drawn errors. exact: kinds that
    are taken as measured.
    """
    times, draws = np.empty((len(designs), samples)), JointDraws(samples, seed, tuple(exact))
    for place, design in enumerate(designs):
        own, run = draws.of(design.system.gpu), design.run
        errors = StepErrors(own, run.precision, run.products or run.precision, design.kernels.name)
        times[place] = iterate(design, errors).seconds
    return times, draws.basis


def kind_of_step(mode: str, *, mixture: bool, gpus: float, of_node: float) -> str:
    """Key of the residuals of whole steps: dense training on one node or several, of mixtures, or a prefill."""
    if mode != "training":
        return mode
    if mixture:
        return "mixture"
    return "dense" if gpus > of_node else "dense, one node"


def step_residuals(design: StepDesign, seconds: float) -> ResidualGroup | None:
    """Residuals of the time of a whole step that is predicted as `seconds`; None where no such step was measured.

    The release of the software is no part of a design, so that it counts as one that no row has.
    """
    if design.run.mode not in ("training", "prefill"):  # no table has steps that generate
        return None
    parallel, node = design.parallel, design.system.node
    degrees = {name: single(getattr(parallel, name)) for name in ("tp", "pp", "dp", "cp")}
    gpus, mixture = float(np.prod(list(degrees.values()))), getattr(design.model, "moe", None) is not None
    of_node = 1.0 if node is None else single(node.num_gpus)
    sizes = {"seconds": seconds, "gpus": gpus, "tp": degrees["tp"], "pp": degrees["pp"]}
    sizes["sequences"] = single(design.run.batch)
    gpu = name_in_tables(design.system.gpu)
    traits = {"software": design.kernels.name, "model": str(design.model.name), "gpu": gpu, "release": UNTOLD}
    key = kind_of_step(design.run.mode, mixture=mixture, gpus=gpus, of_node=of_node)
    return shipped_residuals().of("step", gpu, key, sizes, traits)


@dataclass(frozen=True)
class StepInterval:
    """The interval of the time of a step [s], and what it rests on, in words: of 90 % by measured whole steps."""

    low: float
    high: float
    basis: str

    @classmethod
    def of(cls, design: StepDesign, seconds: float, drawn: Floats) -> StepInterval:
        """Of a step that is predicted as `seconds`: by measured whole steps, or else by draws [S] of its parts."""
        group = step_residuals(design, seconds)
        if group is None or group.is_guess:
            low, high = map(float, np.quantile(drawn, ENDS))
            return cls(min(low, seconds), max(high, seconds), BY_PARTS)
        low, high = group.interval(seconds)
        return cls(float(low), float(high), f"{group.rows} measured steps{unmeasured_text(group)}")
