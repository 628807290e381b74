"""Compute and the collective beside it in one persistent kernel, or bulk-synchronous (arXiv:2305.06942), on any DAG.

kernel      bulk: each operator is a kernel, each collective a library's, launched when what it waits for is done; a
            tensor that an all-to-all moves is packed before and unpacked after (`copies`). fused: a producer and its
            collective (or a collective and its consumer) are one kernel that stays on the GPU and sends what it has
            done chunk by chunk. Operators that no fused kernel is known of (an MLP) are as in bulk.
pairs       which are fused: producers of what is sent only, or consumers of what arrives as well.
num_chunks  in how many chunks outputs (or inputs) are sent; each holds a message for every peer.
issue_order remote_first: what others wait for is computed, or sent, first; local_first: last.
zero_copy   inside a node, results are stored where the peer wants them; else they are read again to be put.
occupancy_loss   of the fused kernel (simulators/costs/memory_bound.py).
collective  direct or hierarchical (simulators/costs/fabric.py).
near_memory what is reduced is added by units in memory as it comes (`gpu.pim`).
elementwise who runs elementwise operators: a kernel of the gpu, or units in memory, beside whatever the GPU does; they
            and the GPU take equal turns with the HBM while both want it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from search_spaces.persistent import FusedKnobs, Lowering, issue_order, partners, remote_chunks
from search_spaces.pipeline import memory_rules
from simulators.costs.fabric import num_gpus
from simulators.hardware.system import System
from simulators.rules import Rule
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Collective, Elementwise, Gemm, Workload

_PATH = "workload.operators"


class Fused(FusedKnobs):
    """One persistent kernel for compute and collective, or both in bulk."""

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """The DAG must be one that can be run, on a system of which enough is known, with rows for every GPU."""
        found = [*_system_rules(system), *_dag_rules(workload), *self._memory_rules(system, workload)]
        if any(rule.broken is True for rule in found):
            return found
        return [*found, *_row_rules(system, workload), *self._chunk_rules(system, workload)]

    def _memory_rules(self, system: System, workload: Workload) -> Iterator[Rule]:
        """Units in memory must be there where they are to add, or to run operators."""
        operators = workload.operators.values()
        adds = self.near_memory and any(isinstance(op, Collective) and op.reduces for op in operators)
        runs = self.elementwise == "pim" and any(isinstance(op, Elementwise) for op in operators)
        yield from memory_rules(system, "schedule.near_memory", used=adds)
        yield from memory_rules(system, "schedule.elementwise=pim", used=runs)

    def _chunk_rules(self, system: System, workload: Workload) -> Iterator[Rule]:
        if self.num_chunks is None or num_gpus(system) == 1:
            return  # who is alone sends nothing
        for name in partners(workload, str(self.pairs)):
            op = workload.operators[name]
            if isinstance(op, Collective):
                sent = np.asarray(op.rows) - -(-np.asarray(op.rows) // num_gpus(system))
                rule = "are more chunks than {0} has rows for its peers ({1})"
                few = sent < remote_chunks(self.num_chunks, num_gpus(system))
                yield Rule("schedule.num_chunks", few, rule, self.num_chunks, (name, sent[()]), "use fewer")

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """One GPU, that stands for all of its node, of one node or of each."""
        return Lowering(system, workload, self).build()


def _system_rules(system: System) -> Iterator[Rule]:
    if system.persistent is None:
        rule, way = "is absent, and says what kernels need that communicate by themselves", "use system=mi210_4"
        yield Rule("system.persistent", True, rule, way_out=way)
    if system.fabric is None:
        return
    fabric, own, nics = system.fabric, system.node.num_gpus, system.fabric.nic.num_nics
    if fabric.nic.placement == "gpu" and nics % own and fabric.network.topology != "torus":
        rule = f"are on the dies of {own} GPUs, which have the same number each"
        yield Rule("system.fabric.nic.num_nics", True, rule, nics, way_out="use a multiple, or another placement")
    if fabric.simulated == "one":
        rule, way = "needs every node simulated", "set system.fabric.simulated=all"
        yield Rule("system.fabric.imbalance", np.greater(fabric.imbalance, 0), rule, fabric.imbalance, way_out=way)


def _dag_rules(workload: Workload) -> Iterator[Rule]:
    """Each operator waits for others, and none for itself; a collective has one producer and one consumer at most."""
    users = [before for op in workload.operators.values() for before in op.after]
    never = sorted(set(workload.operators) - set(issue_order(workload)))
    if never:
        rule = "wait for what is no operator here, or for one another"
        yield Rule(_PATH, True, rule, ", ".join(never), way_out="name operators that come before in `after`")
    for name, op in sorted(workload.operators.items()):
        if isinstance(op, Collective) and (len(op.after) > 1 or users.count(name) > 1):
            rule = "has more than one producer or consumer"
            yield Rule(_PATH, True, rule, name, way_out="give each its own collective")


def _row_rules(system: System, workload: Workload) -> Iterator[Rule]:
    gpus = num_gpus(system)
    for name, op in workload.operators.items():
        if isinstance(op, Collective):
            rule, way = "gives some of the GPUs no row ({0} GPUs)", "use more rows or fewer GPUs"
            yield Rule(f"{_PATH}.{name}.rows", np.less(op.rows, gpus), rule, op.rows, (gpus,), way)
        elif isinstance(op, Gemm):
            rule, way = f"splits {op.split} over more GPUs than there are ({{0}})", "leave it out for all of them"
            yield Rule(f"{_PATH}.{name}.shards", np.greater(op.shards, gpus), rule, op.shards, (gpus,), way)


SCHEDULE = Fused
