"""Independent GEMMs on streams of one GPU (GOLDYLOC, arXiv:2409.02227), with kernels tuned for their concurrency.

num_streams  GEMMs that run at once (the paper's concurrency degree); the next one in the queue starts when one ends.
             1 is sequential.
kernels      isolated: the library's choice for a GPU of its own (with several streams: default concurrency). shared:
             globally optimised, chosen for this number of streams from kernels tuned for a part of the GPU. best: the
             best of all tiles for it.

Workgroups of GEMMs that run at once share CUs, and the rates of the LLC and the HBM, by max-min fairness;
`simulators/costs/gemm/sharing.py` gives the cost of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from dse.space.blocks import Rule
from dse.values import knob
from dse.values.units import Integer
from simulators.costs.fabric import num_gpus
from simulators.costs.gemm.sharing import Choice, SharedGemms, chosen, lacks
from simulators.hardware.machine import System
from simulators.overlap.design import ScheduleKnobs
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.workloads.operators import Gemm, Workload

_PATH = "workload.operators"


class Streams(ScheduleKnobs):
    """Knobs of the family."""

    orders: ClassVar[tuple[str, ...]] = ()  # nothing is exchanged
    gemm_refinement: ClassVar[str] = "occupancy and shares of the cache"
    family: Literal["streams"]
    kernels: Annotated[Choice, knob(structural=True)]
    num_streams: Annotated[Integer, knob(structural=True, ge=1, le=64)]

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Require independent GEMMs and one GPU whose description has the keys that sharing needs."""
        rules = [
            Rule(f"system.{path}", True, "is needed where kernels share a GPU", None, way_out="use system=mi100")
            for path in lacks(system.gpu)
        ]
        if num_gpus(system) != 1:
            rule = "is more than the one GPU whose streams these are"
            rules.append(Rule("system.node.num_gpus", True, rule, system.node.num_gpus, way_out="use one"))
        unsupported = [name for name, op in workload.operators.items() if not isinstance(op, Gemm) or op.after]
        if unsupported:
            rule = "are no GEMMs that wait for nobody"
            way = "use a workload with `queues`, such as workload=goldyloc"
            rules.append(Rule(_PATH, True, rule, ", ".join(sorted(unsupported)), way_out=way))
        return rules

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to one task per GEMM, in the order of the queue."""
        gpu, graph = system.gpu, GraphBuilder()
        assert gpu.llc is not None and gpu.llc.bytes_per_s is not None
        shared = {
            graph.resource("cus", gpu.num_cus): "each_s",
            graph.resource("llc", gpu.llc.bytes_per_s): "llc_bytes",
            graph.resource("hbm", gpu.hbm_bytes_per_s): "hbm_bytes",
        }
        streams = graph.pool("streams", self.num_streams)
        at_once = min(self.num_streams, len(workload.operators))
        for name, op in sorted(workload.operators.items()):
            assert isinstance(op, Gemm)
            shape, alone = (op.m, op.n, op.k), chosen(gpu, (op.m, op.n, op.k), precision=op.precision)
            kernel = chosen(gpu, shape, precision=op.precision, degree=at_once, choice=self.kernels)
            amounts = {resource: _use_per_workgroup(kernel, name) for resource, name in shared.items()}
            seconds: Any = alone.seconds(gpu)
            times: dict[str, Any] = dict.fromkeys(("alone_s", "wide_s", "ideal_s"), seconds)
            graph.task(
                name,
                "gemm",
                lane="streams",
                limiter="gemm",
                pool=streams,
                uses=amounts,
                work=kernel.workgroups,
                cap=kernel.workgroups / kernel.alone_s,
                delay=gpu.kernel_launch_s,
                flop=2.0 * np.asarray(op.m, float) * op.n * op.k,
                **times,
            )
        return graph.build()


def _use_per_workgroup(kernel: SharedGemms, name: str) -> Any:
    """Use of a resource by one workgroup."""
    amount = getattr(kernel, name)
    return np.asarray(amount if name == "each_s" else amount / kernel.workgroups)


SCHEDULE = Streams
