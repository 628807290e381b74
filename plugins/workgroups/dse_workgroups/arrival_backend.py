"""The backend of GEMMs that arrive: a GPU, what arrives, and the logic that chooses what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from dse.backend import Backend, Batch, Columns, Metric, Result, Results, Tree
from dse.errors import Problem, Problems, did_you_mean
from dse.values import Frozen
from dse_workgroups.arrivals import ArrivalSpec, arrivals_of
from dse_workgroups.concurrency import Logic, serve
from simulators.costs.gemm.sharing import lacks
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.metrics import cost_proxy

_SECTIONS = ("system", "arrivals", "logic")
_METRICS: Mapping[str, Metric] = {
    "makespan_s": Metric("s", "time from the first arrival to the last end"),
    "turnaround_s": Metric("s", "mean time from when a GEMM may run to its end"),
    "mean_degree": Metric("GEMMs", "mean number of GEMMs that are launched and not done"),
    "decisions": Metric("decisions", "decisions of the logic"),
    "cost_proxy": Metric("relative", "hardware cost relative to the reference system"),
}


class ArrivalDesign(Frozen):
    """One GPU, one stream of GEMMs, one logic."""

    system: ScheduleSystem
    arrivals: ArrivalSpec
    logic: Logic


class ArrivalBackend(Backend):
    """GEMMs in the slots of one GPU."""

    version = "1"
    metrics = _METRICS
    relations: Mapping[str, Metric] = {"speedup": Metric("x", "makespan of the baseline / makespan", goal="maximize")}

    def sections(self, tree: Tree) -> None:
        """Check that a configuration has the three sections and no others."""
        check = Problems()
        for name in set(tree) - set(_SECTIONS):
            check.add(name, "is not a known section", way_out=did_you_mean(name, _SECTIONS))
        for name in _SECTIONS:
            if not isinstance(tree.get(name), Mapping):
                check.add(name, "is no section of keys", value=tree.get(name))
        check.done()

    def scenarios(self, tree: Tree) -> Mapping[str, Tree]:
        """One scenario per stream. Raises ConfigError for names of `only` that no stream has."""
        streams = {str(stream["name"]): stream for stream in tree["arrivals"].get("streams", [])}
        # an empty list means all streams
        only, check = tree["arrivals"].get("only") or list(streams), Problems()
        if not streams:
            check.add("arrivals.streams", "is empty", way_out="use arrivals=streams")
        for name in set(only) - set(streams):
            check.add("arrivals.only", "names no stream", value=name, way_out=did_you_mean(name, tuple(streams)))
        check.done()
        return {name: {**tree, "arrivals": streams[name]} for name in streams if name in only}

    def condition(self, path: str, tree: Tree) -> Mapping[str, Any] | None:
        """A degree counts where it is fixed, the time of decisions where there are any."""
        if path == "logic.degree":
            return {"logic.policy": "static"}
        return super().condition(path, tree)

    def design(self, tree: Tree) -> ArrivalDesign:
        """Validate all three parts; ConfigError carries the problems of all of them."""
        check = Problems()
        system = check.model(ScheduleSystem, tree["system"], path="system")
        arrivals = check.model(ArrivalSpec, tree["arrivals"], path="arrivals")
        logic = check.model(Logic, tree["logic"], path="logic")
        check.done()
        assert system is not None and arrivals is not None and logic is not None
        return ArrivalDesign.model_construct(system=system, arrivals=arrivals, logic=logic)

    def problems(self, design: BaseModel) -> Sequence[Problem]:
        """Require what sharing a GPU needs, and one GPU."""
        assert isinstance(design, ArrivalDesign)
        rule = "is needed where kernels share a GPU"
        broken = [Problem(f"system.{path}", rule, None, "use system=mi100") for path in lacks(design.system.gpu)]
        if design.system.node.num_gpus > 1:
            broken.append(Problem("system.node.num_gpus", "is more than one", design.system.node.num_gpus, "use one"))
        return broken

    def takes_long(self, design: BaseModel) -> bool:
        """True if the future is tried at every decision."""
        assert isinstance(design, ArrivalDesign)
        return design.logic.policy == "oracle"

    def evaluate(self, batches: Sequence[Batch]) -> list[Results]:
        """Serve one stream after the other."""
        return [Results.of([self._result(design) for design in batch.designs()]) for batch in batches]

    def _result(self, design: BaseModel) -> Result:
        assert isinstance(design, ArrivalDesign)
        refused = self.refusal(design)
        if refused is not None:
            return refused
        done = serve(design.system.gpu, arrivals_of(design.arrivals), design.logic)
        # by Little's law: seconds of all GEMMs over the makespan are the mean number of them at once
        busy = float((done.done_s - done.begun_s).sum()) / done.makespan_s
        metrics = {"makespan_s": done.makespan_s, "turnaround_s": done.turnaround_s, "mean_degree": busy}
        metrics |= {"decisions": float(len(done.degrees)), "cost_proxy": float(cost_proxy(design.system))}
        return Result("ok", metrics, engine="slots")

    def relate(self, point: Columns, baseline: Columns) -> Columns:
        """Speed-ups over the baseline."""
        return {"speedup": baseline["makespan_s"] / point["makespan_s"]}

    def facts(self, design: BaseModel) -> Sequence[tuple[str, Any, str, str]]:
        """Constants of the system, with sources."""
        assert isinstance(design, ArrivalDesign)
        return list(design.system.facts())

    def models(self, design: BaseModel) -> Mapping[str, str]:
        """Model of the costs of GEMMs."""
        return {"gemm": "waves with occupancy and shares of the cache, workgroup by workgroup"}
