"""Groups of GPUs that exchange with one another, of tp, dp and pp, on nodes and the network.

GPUs are numbered so that a tp group is of neighbours, dp groups of GPUs tp apart, and stages of a pipeline tp x dp
apart (Megatron-LM's order). A ring within a node has its links, or the switch computes for it; one that leaves the node
is as slow as the network, and a pipeline as slow as the slowest message between its stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from simulators.costs.collective import Group, node_ring
from simulators.hardware.device import Device, LibraryNode
from simulators.steps.operators import Axis
from simulators.workloads.model import Parallel

_NOBODY = Group(1, 1.0, 0.0)


def groups(machine: Device, parallel: Parallel) -> Mapping[Axis, Group]:
    """The group that a GPU exchanges with along each axis; without a library of collectives, a GPU that is alone."""
    node, links = machine.node, machine if machine.costs.collective == "links" else None
    if node is None or node.library is None:
        return {"tp": _NOBODY, "pp": _NOBODY, "dp": _NOBODY}
    tp, dp, pp = (np.asarray(degree, float) for degree in (parallel.tp, parallel.dp, parallel.pp))
    together = np.maximum(1.0, node.num_gpus // tp)  # GPUs of a dp group in one node
    stages = np.where(leaves_node(node, parallel), 1.0, 2.0)  # of neighbours in a pipeline, one in each node
    switch = node.in_switch if parallel.collectives == "in_switch" else None
    return {
        "tp": replace(node_ring(node, tp), in_switch=switch, links=links),
        "dp": replace(node_ring(node, dp, together), in_switch=switch, links=links),
        "pp": node_ring(node, np.minimum(pp, 2.0), stages),
    }


def leaves_node(node: LibraryNode, parallel: Parallel) -> Any:
    """Tell whether some group spans nodes."""
    return np.asarray(parallel.tp) * np.asarray(parallel.dp) * np.asarray(parallel.pp) > node.num_gpus
