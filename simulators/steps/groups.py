"""Groups of GPUs that exchange with one another, of tp, cp, dp, ep and pp, on nodes and the network.

GPUs are numbered so that a tp group is of neighbours, cp groups of GPUs tp apart, dp groups (with cp, over which
gradients are reduced) likewise, and stages of a pipeline tp x cp x dp apart (Megatron-LM's order). An ep group is of
neighbours within a stage, GPUs with the same experts (`edp`) are ep apart. A ring within a node has its links, or the
switch computes for it; one that leaves the node is as slow as the network, and a pipeline as slow as the slowest
message between its stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from simulators.costs.collective import Group, node_ring
from simulators.costs.expert_exchange import link_share
from simulators.hardware.device import Device
from simulators.hardware.network import Node
from simulators.steps.operators import Axis
from simulators.workloads.model import Parallel

_NOBODY = Group(1, 1.0, 0.0)  # never exchanges: its rate and latency do not count


def groups(machine: Device, parallel: Parallel) -> Mapping[Axis, Group]:
    """The group that a GPU exchanges with along each axis; without a library of collectives, a GPU that is alone."""
    node, links = machine.node, machine if machine.costs.collective == "links" else None
    if node is None or node.library is None:
        return dict.fromkeys(get_args(Axis), _NOBODY)
    tp, dp, pp = (np.asarray(degree, float) for degree in (parallel.tp, parallel.replicas, parallel.pp))
    together = np.maximum(1.0, node.num_gpus // tp)  # GPUs of a dp group in one node
    stages = np.where(leaves_node(node, parallel), 1.0, 2.0)  # of neighbours in a pipeline, one in each node
    switch = node.in_switch if parallel.collectives == "in_switch" else None
    return {
        "tp": replace(node_ring(node, tp), in_switch=switch, links=links),
        "dp": replace(node_ring(node, dp, together), in_switch=switch, links=links),
        "pp": node_ring(node, np.minimum(pp, 2.0), stages),  # a message between two neighbours
        **_of_experts(node, parallel),
        "cp": node_ring(node, float(parallel.cp), together),  # GPUs of one cp group are tp apart, as those of dp
    }


def _of_experts(node: Node, parallel: Parallel) -> Mapping[Axis, Group]:
    """GPUs that share the experts of a layer, and those that have the same ones."""
    ep, inside = float(parallel.ep), np.minimum(float(parallel.ep), node.num_gpus)
    shared = replace(node_ring(node, ep, inside), experts=node.experts, link_share=link_share(node, inside))
    same = np.maximum(1.0, np.asarray(parallel.expert_replicas, float))
    # without ep, replicas of experts are replicas of all
    apart = ep if parallel.ep > 1 else np.asarray(parallel.tp, float)
    return {"ep": shared, "edp": node_ring(node, same, np.maximum(1.0, node.num_gpus // apart))}


def leaves_node(node: Node, parallel: Parallel) -> Any:
    """Tell whether some group spans nodes."""
    return parallel.gpus > node.num_gpus
