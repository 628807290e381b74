"""Watts and joules of deployments."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dse.config.compose import request
from dse_serving.backend import ServingBackend
from dse_serving.design import Serving
from dse_serving.energy import ServedTraffic, power_line, served_power
from dse_serving.study import SECTIONS
from simulators.costs.power import unlimited_clock, voltage
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
    # engines that generate have twice the batch each, and read the weights half as often; those of prompts rest between
    assert POWER.idle_w < apart.gpu_w < together.gpu_w


def test_a_board_below_its_limit_runs_at_its_highest_clock() -> None:
    """Products then take more energy, as the voltage is higher: H100 at 1,980 MHz in place of 1,742."""
    traffic = ServedTraffic(500.0, 32.0, 1024.0, 256.0)
    usual = POWER.model_copy(update={"boost_hz": None})
    boosted, plain = (served_power(deployment(), power, traffic) for power in (POWER, usual))
    assert boosted is not None and plain is not None
    assert plain.gpu_w < boosted.gpu_w < POWER.cap_w
    faster = unlimited_clock(POWER)
    assert faster == pytest.approx(1980 / 1742, rel=1e-3)
    most = faster * (voltage(POWER, faster) / voltage(POWER, 1.0)) ** 2
    assert boosted.gpu_w - POWER.idle_w < most * (plain.gpu_w - POWER.idle_w)


def test_a_clock_that_is_asked_for_is_over_that_of_the_rates() -> None:
    """As `gpu.clock` is everywhere: half of 1,742 MHz, not of the highest clock."""
    traffic = ServedTraffic(500.0, 32.0, 1024.0, 256.0)
    slow, usual = (
        served_power(deployment("system.gpu.clock=0.5"), power, traffic)
        for power in (POWER, POWER.model_copy(update={"boost_hz": None}))
    )
    assert slow is not None and usual is not None
    assert slow.gpu_w == pytest.approx(usual.gpu_w)
    highest, typed = (served_power(deployment(*words), POWER, traffic) for words in ((), ("system.gpu.clock=1",)))
    assert highest is not None and typed is not None
    assert slow.gpu_w < highest.gpu_w == typed.gpu_w


def test_engines_of_prompts_draw_no_more_than_idling_between_them() -> None:
    few, some = (
        served_power(
            deployment("engines.apart=true", "engines.prefill_replicas=1"),
            POWER,
            ServedTraffic(rate, 1.0, 1024.0, 256.0),
        )
        for rate in (0.001, 1.0)
    )
    assert few is not None and some is not None
    tree_w = POWER.tree_w * unlimited_clock(POWER) * float(voltage(POWER, unlimited_clock(POWER))) ** 2
    # of two GPUs, the one that generates waits in a step all the time
    assert few.gpu_w == pytest.approx(POWER.idle_w + tree_w / 2, rel=0.01)
    assert few.gpu_w < some.gpu_w


def test_a_line_tells_power_where_the_gpu_has_a_model_of_it() -> None:
    point = {"tokens_per_s": 500.0, "tokens_per_s_per_gpu": 500.0, "in_system": 16.0, "prefix_hits": 0.0}
    tree = config("parallel.tp=1", "engines.replicas=1")
    (line,) = power_line(tree, ServingBackend().design(tree), point)
    number = r"[\d.,]+"
    watts = rf"power: ({number}) W a GPU of 700 W \(({number}) to ({number})\), "
    joules = rf"({number}) m?J \(({number}) m?J to ({number}) m?J\) a generated token with its share of the prompt"
    match = re.match(watts + joules, line)
    assert match is not None, line
    drawn, low, high, joule, least, most = (float(text.replace(",", "")) for text in match.groups())
    assert low < drawn < high <= 700
    assert least < joule < most
    (wider,) = power_line(tree, ServingBackend().design(tree), point, (250.0, 600.0))
    assert wider.partition("), ")[0] == line.partition("), ")[0]
    assert wider != line
    unknown = {**tree, "system": {**tree["system"], "gpu": {**tree["system"]["gpu"], "power": None}}}
    assert list(power_line(unknown, ServingBackend().design(unknown), point)) == []
