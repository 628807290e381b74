"""Runs of a deployment by the compiled loop."""

from __future__ import annotations

from dse.errors import ConfigError, Problem
from dse_serving.compiled import serve
from dse_serving.deployment import Deployment
from dse_serving.results import ServingRun
from dse_serving.traffic import Traffic


def run(
    deployment: Deployment, traffic: Traffic, *, seed: int = 0, logged: int = 0, skipped: float = 0.0
) -> ServingRun:
    """Serve all requests. logged: steps that are noted; skipped: share of the requests that statistics leave out.

    Raises ConfigError for requests that no engine can serve.
    """
    state = deployment.state(traffic, logged)
    steps = serve(state, traffic.num_timed, deployment.pools[0].batches, seed)
    if steps < 0:
        rule = "has requests that are never served: no engine has room for what waits"
        raise ConfigError([Problem("traffic", rule, way_out="use more GPUs, or shorter requests")])
    # at least the last request counts
    counted = slice(min(int(skipped * traffic.size), traffic.size - 1), traffic.size)
    return ServingRun(deployment, traffic, state, int(steps), counted)
