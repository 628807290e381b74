"""Groups of GPUs that exchange with one another, of tp, dp and pp, on servers and the network.

GPUs are numbered so that a tp group is of neighbours, dp groups of GPUs tp apart, and stages of a pipeline tp x dp
apart (Megatron-LM's order). A ring within a server has its links; one that leaves it is as slow as the network, and a
pipeline as slow as the slowest message between its stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simulators.costs.collective import Group, server_ring
from simulators.hardware.device import Server
from simulators.steps.operators import Axis
from simulators.workloads.model import Parallel

_NOBODY = Group(1, 1.0, 0.0)


def groups(server: Server | None, parallel: Parallel) -> Mapping[Axis, Group]:
    """The group that a GPU exchanges with along each axis; without a server, a GPU that is alone."""
    if server is None:
        return {"tp": _NOBODY, "pp": _NOBODY, "dp": _NOBODY}
    tp, dp, pp = (np.asarray(degree, float) for degree in (parallel.tp, parallel.dp, parallel.pp))
    together = np.maximum(1.0, server.num_gpus // tp)  # GPUs of a dp group in one server
    stages = np.where(leaves_server(server, parallel), 1.0, 2.0)  # of neighbours in a pipeline, one in each server
    return {
        "tp": server_ring(server, tp),
        "dp": server_ring(server, dp, together),
        "pp": server_ring(server, np.minimum(pp, 2.0), stages),
    }


def leaves_server(server: Server, parallel: Parallel) -> Any:
    """Tell whether some group spans servers."""
    return np.asarray(parallel.tp) * np.asarray(parallel.dp) * np.asarray(parallel.pp) > server.num_gpus
