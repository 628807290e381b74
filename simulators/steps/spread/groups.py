"""Groups of GPUs that exchange with one another, of tp, cp, dp, ep and pp, on nodes and the network.

GPUs are numbered so that a tp group is of neighbours, cp groups of GPUs tp apart, dp groups (with cp, over which
gradients are reduced) likewise, and stages of a pipeline tp x cp x dp apart (Megatron-LM's order). An ep group is of
neighbours within a stage (etp apart, where so many neighbours share each expert), GPUs with the same experts (`edp`)
are ep x etp apart. GPUs that share the states of dp (`shard`) are neighbours in it, those with the same share
(`repeat`) as far apart as there are such neighbours. A ring within a node has its links, or the
switch computes for it; one that leaves the node is as slow as the network, and a pipeline as slow as the slowest
message between its stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from simulators.costs.collective import Group, machine_ring
from simulators.hardware.device import Device
from simulators.hardware.network import Node
from simulators.steps.operators.work import Axis
from simulators.workloads.model import Parallel

_NOBODY = Group(1, 1.0, 0.0)  # never exchanges: its rate and latency do not count


def groups(machine: Device, parallel: Parallel) -> Mapping[Axis, Group]:
    """The group that a GPU exchanges with along each axis; without a library of collectives, a GPU that is alone."""
    node = machine.node
    if node is None or node.library is None:
        return dict.fromkeys(get_args(Axis), _NOBODY)
    tp, dp, pp = (np.asarray(degree, float) for degree in (parallel.tp, parallel.replicas, parallel.pp))
    together = np.maximum(1.0, node.num_gpus // tp)  # GPUs of a dp group in one node
    stages = np.where(leaves_node(node, parallel), 1.0, 2.0)  # of neighbours in a pipeline, one in each node
    switch = node.switch() if parallel.collectives == "in_switch" else None
    return {
        "tp": replace(machine_ring(machine, tp), in_switch=switch, ctas=parallel.tp_ctas or None),
        "dp": replace(machine_ring(machine, dp, together), in_switch=switch, ctas=parallel.dp_ctas or None),
        "pp": machine_ring(machine, np.minimum(pp, 2.0), stages),  # a message between two neighbours
        **_of_experts(machine, parallel),
        **_of_shards(machine, parallel, together),
        "cp": machine_ring(machine, float(parallel.cp), together),  # GPUs of one cp group are tp apart, as those of dp
    }


def _of_experts(machine: Device, parallel: Parallel) -> Mapping[Axis, Group]:
    """GPUs that share the experts of a layer, and those that have the same ones."""
    node, ep = machine.node, float(parallel.ep)
    etp = float(parallel.etp)
    inside = np.minimum(ep, np.maximum(1.0, node.num_gpus // etp))
    shared = replace(machine_ring(machine, ep, inside), experts=node.exchange())
    same = np.maximum(1.0, np.asarray(parallel.expert_replicas, float))
    # without ep, replicas of experts are replicas of all
    apart = ep * etp if parallel.ep > 1 else np.asarray(parallel.tp, float)
    alike = machine_ring(machine, same, np.maximum(1.0, node.num_gpus // apart))
    return {
        "ep": shared,
        "edp": replace(alike, ctas=parallel.dp_ctas or None),
        "etp": machine_ring(machine, etp, np.minimum(etp, node.num_gpus)),
    }


def _of_shards(machine: Device, parallel: Parallel, together: Any) -> Mapping[Axis, Group]:
    """GPUs of a dp group that share its states, and those with the same share. together: of the group in a node."""
    size = np.asarray(parallel.state_gpus, float)
    same = np.maximum(1.0, np.asarray(parallel.replicas, float) / size)
    rings: dict[Axis, Group] = {
        "shard": machine_ring(machine, size, together),
        "repeat": machine_ring(machine, same, np.maximum(1.0, together // size)),
    }
    return {axis: replace(ring, ctas=parallel.dp_ctas or None) for axis, ring in rings.items()}


def leaves_node(node: Node, parallel: Parallel) -> Any:
    """Tell whether some group spans nodes."""
    return parallel.gpus > node.num_gpus
