"""Watts and joules of deployments."""

from __future__ import annotations

from typing import Any

import pytest

from dse.config.compose import request
from dse_serving.backend import ServingBackend
from dse_serving.design import Serving
from dse_serving.energy import ServedTraffic, power_line, served_power
from dse_serving.study import SECTIONS
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import Power

POWER = Power.model_validate(tree_of("h100_8")["gpu"]["power"])


def config(*words: str) -> dict[str, Any]:
    tree = request(["study=serving", "model=llama3_8b", "system=h100_8", *words]).tree
    return {name: tree[name] for name in SECTIONS}


def deployment(*words: str) -> Serving:
    return ServingBackend().design(config("parallel.tp=1", "engines.replicas=1", *words))


def test_a_deployment_draws_more_for_more_tokens_and_no_more_than_its_limit() -> None:
    design = deployment()
    drawn = [served_power(design, POWER, ServedTraffic(rate, 32.0, 1024.0, 256.0)) for rate in (1.0, 500.0, 1e5)]
    pair = served_power(deployment("engines.replicas=2"), POWER, ServedTraffic(1000.0, 64.0, 1024.0, 256.0))
    watts = [served.gpu_w for served in drawn if served is not None]
    assert POWER.idle_w < watts[0] < watts[1] < watts[2] == POWER.cap_w
    # two GPUs with twice the traffic: each draws as much, and a token takes as much
    assert drawn[1] is not None and pair is not None
    assert (pair.gpu_w, pair.token_j) == pytest.approx((watts[1], 2 * watts[1] / 1000))


def test_engines_apart_draw_for_their_own_part() -> None:
    """Two GPUs of one kind each, or two that do both: the same work, and the same idling."""
    traffic = ServedTraffic(400.0, 16.0, 1024.0, 256.0)
    together = served_power(deployment("engines.replicas=2"), POWER, traffic)
    apart = served_power(deployment("engines.apart=true", "engines.prefill_replicas=1"), POWER, traffic)
    assert together is not None and apart is not None
    # engines that generate have twice the batch each, and read the weights half as often
    assert POWER.idle_w < apart.gpu_w < together.gpu_w


def test_a_line_tells_power_where_the_gpu_has_a_model_of_it() -> None:
    point = {"tokens_per_s": 500.0, "in_system": 16.0, "prefix_hits": 0.0}
    tree = config("parallel.tp=1", "engines.replicas=1")
    (line,) = power_line(tree, ServingBackend().design(tree), point)
    assert line.startswith("power: at least ") and "J a generated token" in line
    unknown = {**tree, "system": {**tree["system"], "gpu": {**tree["system"]["gpu"], "power": None}}}
    assert list(power_line(unknown, ServingBackend().design(unknown), point)) == []
