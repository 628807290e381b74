"""Compute and the collective beside it in one persistent kernel, or bulk-synchronous (arXiv:2305.06942), on any DAG.

kernel      bulk: each operator is a kernel, each collective a library's, launched when its inputs are done; the tensor
            of an all-to-all is packed before and unpacked after (`copies`). fused: a producer and its collective (or a
            collective and its consumer) are one persistent kernel that sends its results chunk by chunk. Operators
            without a fused kernel (an MLP) run as in bulk.
pairs       fused pairs: producers and their collectives only, or collectives and their consumers as well.
num_chunks  number of chunks in which outputs (or inputs) are sent; each holds a message for every peer.
issue_order remote_first: results for other GPUs are computed, or sent, first; local_first: last.
zero_copy   inside a node, results are stored directly at the peer; else they are stored here, and workgroups read them
            again to put them. Between nodes NICs read what was stored, so it changes nothing there.
occupancy_loss   of the fused kernel (simulators/costs/memory_bound.py).
collective  direct or hierarchical (simulators/costs/fabric.py).
near_memory units in memory add the operands of a reduction as they arrive (`gpu.pim`).
elementwise unit that runs elementwise operators: a kernel of the gpu, or units in memory, concurrent with the GPU; both
            share the HBM equally while both need it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from dse.config.options import list_options, option_file
from dse.config.variants import load_option
from dse.space.blocks import Rule
from search_spaces.comm_knobs import memory_rules
from search_spaces.fused_knobs import FusedKnobs, issue_order, partners, remote_chunks
from search_spaces.persistent import FusedLowering
from simulators.costs.fabric import num_gpus
from simulators.hardware.machine import System
from simulators.taskgraph.graph import TaskGraph
from simulators.workloads.operators import Collective, Elementwise, Gemm, Workload

_PATH = "workload.operators"


class FusedSchedule(FusedKnobs):
    """One persistent kernel for compute and collective, or both in bulk."""

    def rules(self, system: System, workload: Workload) -> Sequence[Rule]:
        """Require a DAG that can run, a system with all keys that it needs, and rows for every GPU."""
        rules = [*self._kernel_rules(system), *_system_rules(system), *_dag_rules(workload)]
        rules += self._memory_rules(system, workload)
        if any(rule.broken is True for rule in rules):
            return rules
        return [*rules, *_row_rules(system, workload), *self._chunk_rules(system, workload)]

    def _kernel_rules(self, system: System) -> Iterator[Rule]:
        """Require constants of persistent kernels where one is; kernels in bulk need none."""
        if self.kernel == "fused" and system.gpu.persistent is None:
            rule = f"has no data for persistent kernels; only {' and '.join(_with_persistent_kernels())} have"
            yield Rule("system", True, rule, system.name, way_out="use schedule.name=bulk_sync, or one of these")

    def _memory_rules(self, system: System, workload: Workload) -> Iterator[Rule]:
        """Require units in memory if they add, or run operators."""
        operators = workload.operators.values()
        adds = self.near_memory and any(isinstance(op, Collective) and op.reduces for op in operators)
        runs = self.elementwise == "pim" and any(isinstance(op, Elementwise) for op in operators)
        yield from memory_rules(system, "schedule.near_memory", used=adds)
        yield from memory_rules(system, "schedule.elementwise=pim", used=runs)

    def _chunk_rules(self, system: System, workload: Workload) -> Iterator[Rule]:
        if self.num_chunks is None or num_gpus(system) == 1:
            return  # a single GPU sends nothing
        for name in partners(workload, str(self.pairs)):
            op = workload.operators[name]
            if isinstance(op, Collective):
                sent = np.asarray(op.rows) - -(-np.asarray(op.rows) // num_gpus(system))
                rule = "are more chunks than {0} has rows for its peers ({1})"
                few = sent < remote_chunks(self.num_chunks, num_gpus(system))
                yield Rule("schedule.num_chunks", few, rule, self.num_chunks, (name, sent[()]), "use fewer")

    def lower(self, system: System, workload: Workload) -> TaskGraph:
        """Lower to one representative GPU, of one node or of each node."""
        return FusedLowering(system, workload, self).build()


@functools.cache
def _with_persistent_kernels() -> tuple[str, ...]:
    """Names that systems with such constants begin with, for a message: `mi210_*`."""
    files = ((name, option_file("gpu", name)) for name in list_options("gpu"))
    return tuple(f"{name}_*" for name, path in files if path is not None and "persistent" in load_option(path))


def _system_rules(system: System) -> Iterator[Rule]:
    if system.fabric is None:
        return
    fabric, gpus, nics = system.fabric, system.node.num_gpus, system.fabric.nic.num_nics
    if fabric.nic.placement == "gpu" and nics % gpus and fabric.network.topology != "torus":
        rule = f"are on the dies of {gpus} GPUs, which have the same number each"
        yield Rule("system.fabric.nic.num_nics", True, rule, nics, way_out="use a multiple, or another placement")
    if fabric.simulated == "one":
        rule, way = "needs every node simulated", "set system.fabric.simulated=all"
        yield Rule("system.fabric.imbalance", np.greater(fabric.imbalance, 0), rule, fabric.imbalance, way_out=way)


def _dag_rules(workload: Workload) -> Iterator[Rule]:
    """Require an acyclic graph of known operators; a collective has one producer and one consumer at most."""
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


SCHEDULE = FusedSchedule
