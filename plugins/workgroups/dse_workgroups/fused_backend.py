"""The backend of fused kernels, workgroup by workgroup: designs are those of `simulator=fluid` with fused kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from dse.backend import Backend, Batch, Columns, Metric, Result, Results, Tree
from dse.errors import ConfigError, Problem
from dse_workgroups.fused_iteration import iterate, peak_demand
from dse_workgroups.fused_kernels import facts
from search_spaces.fused_knobs import FusedKnobs, partners
from simulators.costs.fabric import num_nodes
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from simulators.overlap.metrics import cost_proxy
from simulators.workloads.operators import Collective

_METRICS: Mapping[str, Metric] = {
    "makespan_s": Metric("s", "time until the last operator is done, on the GPU that ends last"),
    "gemm_s": Metric("s", "time of operators, with what they wait for in a fused kernel"),
    "comm_s": Metric("s", "time during which the busiest wire carries bytes"),
    "peak_bytes_per_s": Metric(
        "byte/s", "largest demand on a wire over a window, an eighth of its traffic at its rate"
    ),
    "cost_proxy": Metric("relative", "hardware cost relative to the reference system"),
}


class FusedBackend(Backend):
    """Fused kernels by their workgroups. skew_s: by which the last GPU starts its fused kernels after the first [s]."""

    metrics = _METRICS
    relations: Mapping[str, Metric] = {"speedup": Metric("x", "makespan of the baseline / makespan", goal="maximize")}

    def __init__(self, skew_s: float = 0.0) -> None:
        if isinstance(skew_s, bool) or not isinstance(skew_s, int | float) or skew_s < 0:
            raise ConfigError([Problem("simulator.skew_s", "is no number of seconds from 0", skew_s)])
        self._designs, self._skew_s = OverlapBackend("fluid"), float(skew_s)
        # results depend on the rules and scenarios of the fluid backend as well
        self.version = f"2+{self._designs.version}"

    def sections(self, tree: Tree) -> None:
        """Check the sections `system`, `workload` and `schedule`."""
        self._designs.sections(tree)

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """Return one scenario per written-out workload."""
        return self._designs.scenarios(tree)

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """Condition of `path`, as a schedule's knobs declare it."""
        return self._designs.condition(path, tree)

    def design(self, tree: Tree) -> OverlapDesign:
        """Validate all three parts; ConfigError carries the problems of all of them."""
        return self._designs.design(tree)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Rules of the schedule, and of what has workgroups here."""
        assert isinstance(design, OverlapDesign)
        # before all others, as they read knobs of fused kernels
        if not isinstance(design.schedule, FusedKnobs):
            rule = "has no workgroups here, which fused kernels alone have"
            return [Problem("schedule.family", rule, design.schedule.family, "use schedule=fused_kernels")]
        broken, system = list(self._designs.problems(design)), design.system
        if num_nodes(system) > 1 and system.node.num_gpus > 1:
            rule = "are several in each of several nodes, whose workgroups are not simulated"
            broken.append(Problem("system.node.num_gpus", rule, system.node.num_gpus, "use one, or simulator=fluid"))
        # one GPU stands for all nodes, so no two starts can differ
        if self._skew_s > 0 and num_nodes(system) > 2 and _fused_moves(design):
            rule = "staggers GPUs, of which one stands for all of more than two nodes"
            broken.append(Problem("simulator.skew_s", rule, self._skew_s, "leave it out, or use two nodes"))
        reduces = [name for name, op in design.workload.operators.items() if isinstance(op, Collective) and op.reduces]
        fused = set(reduces) & _fused_moves(design)
        if fused and num_nodes(system) > 2:
            rule = "reduce around a network, which no fused kernel does here"
            broken.append(Problem("workload.operators", rule, ", ".join(sorted(fused)), "use two nodes at most"))
        return broken

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Run one design after the other."""
        return [Results.of([self._result(design) for design in batch.designs()]) for batch in batches]

    def _result(self, design: BaseModel) -> Result:
        assert isinstance(design, OverlapDesign)
        refused = self.refusal(design)
        if refused is not None:
            return refused
        done = iterate(design, self._skew_s)
        metrics = {"makespan_s": done.makespan_s, "gemm_s": done.compute_s, "comm_s": done.comm_s}
        metrics |= {"peak_bytes_per_s": peak_demand(done.transfers), "cost_proxy": float(cost_proxy(design.system))}
        return Result("ok", metrics, engine="workgroups")

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Speed-ups over the baseline."""
        return {"speedup": baseline["makespan_s"] / point["makespan_s"]}

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the system and of workgroups, with sources."""
        return [*self._designs.facts(design), *facts().facts_below("workgroups")]

    def models(self, design: BaseModel) -> Mapping[str, str]:
        """Models of the costs of GEMMs and collectives."""
        return self._designs.models(design)


def _fused_moves(design: OverlapDesign) -> set[str]:
    """Collectives that share a kernel with an operator."""
    assert isinstance(design.schedule, FusedKnobs)
    fused = design.schedule.kernel == "fused"
    return set(partners(design.workload, str(design.schedule.pairs))) if fused else set()
