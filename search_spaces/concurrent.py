"""A GEMM and a collective on two streams, neither waiting for the other (ConCCL, arXiv:2412.14335).

launch_order  the kernel that is launched first. A GEMM launched first holds the CUs until its first workgroups retire;
              a collective launched first has its CUs from the start (the paper's schedule priority).
stream_priority  of a collective launched second: its workgroups take the next CUs that are freed (`communication`), or
              those that the GEMM's waiting workgroups leave (`equal`). Workgroups that are placed stay, so neither
              matters beside a GEMM whose workgroups persist, or of a collective that was launched first.
partition     the collective's CUs are reserved by a mask: it has them from the start, and the GEMM never gets them (the
              paper's resource partitioning); with the collective launched first the GEMM is not masked, and gets them
              when the collective ends (both).
withheld      CUs withheld from a GEMM beside DMA engines (the paper takes 8 from memory-bound GEMMs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from dse.space.blocks import Rule
from dse.values import knob
from dse.values.units import Integer
from search_spaces.comm_knobs import CommEngineKnobs
from search_spaces.pipeline import Pipeline
from simulators.costs.transfer import fork_s, launched_first, library_cus
from simulators.hardware.machine import System
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Workload

_SECOND = {"comm_engine": "cu", "launch_order": "gemm_first"}  # a kernel that waits for CUs
StreamPriority = Literal["equal", "communication"]


class Concurrent(CommEngineKnobs):
    """Knobs of the family. comm_cus: CUs of the collective's kernel; 0: as the library (`gpu.cu_copy.num_cus`)."""

    orders: ClassVar[tuple[str, ...]] = ("beside",)
    family: Literal["concurrent"]
    comm_cus: Annotated[Integer | None, knob(when={"comm_engine": "cu"}, ge=0, le=4096)]
    launch_order: Annotated[Literal["gemm_first", "comm_first"], knob(structural=True)]
    stream_priority: Annotated[StreamPriority | None, knob(when=_SECOND, structural=True)] = "equal"
    partition: Annotated[bool | None, knob(when={"comm_engine": "cu"}, structural=True)] = False
    withheld_cus: Annotated[Integer | None, knob(when={"comm_engine": "dma"}, ge=0, le=4096)] = 0

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Require that the collective leaves CUs for the GEMM."""
        rules = list(super().rules(system, workload))
        if any(rule.broken is True for rule in rules):
            return rules
        rule, cus = "leaves no CU for compute (system.gpu.num_cus = {0})", system.gpu.num_cus
        if self.withheld_cus is not None:
            broken = np.asarray(self.withheld_cus) >= np.asarray(cus)
            rules.append(Rule("schedule.withheld_cus", broken, rule, self.withheld_cus, (cus,), "use fewer"))
        if self.comm_cus is not None:  # the library's number; a number given by the user is checked above
            library = self._cus(system, workload)
            broken = (np.asarray(self.comm_cus) == 0) & (np.asarray(library) >= np.asarray(cus))
            rules.append(Rule("schedule.comm_cus", broken, rule, library, (cus,), "use fewer"))
        return rules

    def _cus(self, system: System, workload: Workload) -> Any:
        """CUs of the collective's kernel."""
        if self.comm_cus is None:
            return None
        library = library_cus(system, workload.overlap().collective.pattern)
        return np.where(np.asarray(self.comm_cus) > 0, self.comm_cus, library)[()]

    def _is_served_soonest(self, system: System) -> bool:
        """Tell whether the collective, launched second, gets the CUs of the GEMM's first workgroups that retire."""
        if self.comm_engine != "cu" or self.launch_order != "gemm_first" or self.partition:
            return False
        return self.stream_priority == "communication" and system.gpu.gemm.retires

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to a collective over all links and a GEMM, in two parts if the collective waits for its first wave."""
        masked = bool(self.partition) and self.launch_order == "gemm_first"
        if self.launch_order == "comm_first" or self._is_served_soonest(system):
            system = launched_first(system)
        line = Pipeline(system, workload, knobs=self, comm_cus=self._cus(system, workload), masked=masked)
        size = (line.op.m, line.op.local_n, line.op.local_k)
        amounts = [(route, line.payload(line.shard_rows[route.peer], line.collective.cols)) for route in line.routes]
        pattern = line.collective.pattern
        if self.comm_engine == "dma":
            line.compute.withhold(0 if self.withheld_cus is None else self.withheld_cus)
        if self.comm_engine == "dma" or self.partition or self.launch_order == "comm_first":
            parted_s = fork_s(system.gpu) if self.comm_engine == "cu" else 0.0
            after = [line.comm.wait("streams part", parted_s, [])] if np.any(parted_s > 0) else []
            line.compute.gemm_beside("gemm", size, line.comm.step(pattern, amounts, after=after))
        else:
            soonest = self._is_served_soonest(system)
            line.compute.gemm_in_parts(
                size, lambda first: line.comm.step(pattern, amounts, after=[first]), soonest=soonest
            )
        return line.build()


SCHEDULE = Concurrent
