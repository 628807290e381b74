"""Watts of the GPUs of a deployment, and joules of a token: what steps compute and move, at the rates that were served.

An engine that generates r tokens a second for b sequences under way makes r / b steps of them, each after the mean
context of a sequence, and computes a whole prompt for each answer that it finishes:

    P = law(r / b x (step that generates) + r / output x (prompt))

with the law of `simulators.costs.power` for operations, bytes and idling, and no more than the board's limit. Below the
limit a board runs at its highest clock, and voltage. An engine with sequences under way always runs a step, whose
kernels wait for memory, links and one another: the clock tree and CUs that wait draw power all the time. Engines of
prompts alone run for as long as their prompts take by the step model. Engines of prompts and engines that generate,
where apart, each do their part (derived). Drafts, padding and chunks of prompts count as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError
from dse.results.words import cell
from dse.space import get_path
from dse_serving.design import Serving, deployment_of, prompt_engines, step_of
from dse_serving.step_times import step_run
from simulators.costs.governor import power_rules
from simulators.costs.power import PowerInterval, unlimited_clock
from simulators.hardware.parts import Power
from simulators.steps.design import StepDesign, product_format
from simulators.steps.powered import DRAWS, drawn_w
from simulators.steps.run.measures import measure

Floats = NDArray[np.float64]
_AT_LIMIT = 0.005  # share of the limit below which a board is taken to be at it


@dataclass(frozen=True)
class ServedTraffic:
    """What all engines of a deployment serve: tokens generated a second, sequences under way, mean tokens of a prompt
    that are computed, and of an answer.
    """

    tokens_per_s: float
    under_way: float
    prompt: float
    output: float


@dataclass(frozen=True)
class ServedPower:
    """Mean power [W] of a GPU of a deployment, and energy [J] of a generated token with its share of prompts."""

    gpu_w: float
    token_j: float


def served_power(
    design: Serving, power: Power, traffic: ServedTraffic, *, prompts: Serving | None = None
) -> ServedPower | None:
    """Power of the GPUs of a deployment; prompts: engines of prompts alone, where their layout is not that of the
    others. None where the power model lacks a format of its steps, or experts have GPUs
    of their own, whose steps this does not count.
    """
    step = step_of(design)
    rules = power_rules(power, sorted({step.run.precision, product_format(step)}))
    if design.engines.expert_gpus or any(np.any(rule.broken) for rule in rules):
        return None
    try:
        pools = deployment_of(design).pools
    except ConfigError:
        return None
    prompts, total = prompts or prompt_engines(design), 0.0
    for pool in pools:
        both = prompts is None
        computes, generates = both or pool is pools[0], both or pool is not pools[0]
        of_pool = step if generates else step_of(prompts or design)
        ranks = pool.ranks if generates else int(np.max(of_pool.parallel.dp))
        rates, busy = _rates(of_pool, traffic, pool.engines * ranks, computes=computes, generates=generates)
        watts = np.minimum(drawn_w(power, of_pool, rates, _clock(of_pool, power), busy=busy), power.cap_w)
        total += float(np.max(watts)) * pool.engines * pool.gpus
    gpus = sum(pool.engines * pool.gpus for pool in pools)
    return ServedPower(total / gpus, total / traffic.tokens_per_s)


def _clock(step: StepDesign, power: Power) -> float:
    """Clock over `gpu.power.clock_hz`: the highest one of a board, or one below 1 that is asked for."""
    asked = 1.0 if step.system.gpu.clock is None else float(np.max(step.system.gpu.clock))
    return asked if asked < 1 else unlimited_clock(power)


def _rates(
    step: StepDesign, traffic: ServedTraffic, replicas: int, *, computes: bool, generates: bool
) -> tuple[dict[str, Floats], float]:
    """What a GPU does a second, by the names of `DRAWS`, and the share of the time in which it runs steps.

    replicas: of attention, which share all sequences.
    """
    rates, busy = dict.fromkeys(DRAWS, np.zeros(())), 0.0
    of_replica = traffic.tokens_per_s / replicas
    batch = max(round(traffic.under_way / replicas), 1)
    context = traffic.prompt + traffic.output / 2
    parts: list[tuple[Any, float]] = []
    if generates:
        parts.append((step_run(step, "decode", batch, round(context)), of_replica / batch))
        busy = traffic.under_way / replicas
    if computes:
        parts.append((step_run(step, "prefill", 1, max(round(traffic.prompt), 1)), of_replica / traffic.output))
        busy += float(np.max(parts[-1][0].seconds)) * parts[-1][1]
    for iteration, per_s in parts:
        counts = measure(iteration, np.inf)
        rates = {name: rates[name] + np.asarray(counts[name], float) * per_s for name in DRAWS}
    return rates, min(busy, 1.0)


def power_line(
    config: Mapping[str, Any],
    design: Serving,
    point: Mapping[Any, Any],
    rates: tuple[float, float] | None = None,
) -> Iterator[str]:
    """Yield a line on the power of a point of a study; nothing where the GPU has no power model for its steps.

    rates: ends of the interval of the tokens/s of a GPU; None where no errors were drawn.
    """
    tree = get_path(config, "system.gpu.power")
    if not tree:
        return
    power, requests = Power.model_validate(tree), design.traffic.draw()
    prompt = float(requests.inputs.mean()) * (1 - float(point["prefix_hits"]))
    traffic = ServedTraffic(
        float(point["tokens_per_s"]), float(point["in_system"]), prompt, float(requests.outputs.mean())
    )
    served = served_power(design, power, traffic)
    if served is None:
        return
    interval = PowerInterval.of(design.system.gpu, served.gpu_w, "served", cap_w=float(np.max(power.cap_w)))
    rate = float(point["tokens_per_s_per_gpu"])
    ends = interval.with_time((1.0, 1.0) if rates is None else (rate / rates[1], rate / rates[0]))
    watts = f"{served.gpu_w:,.0f} W a GPU of {power.cap_w:,.0f} W ({interval.low:,.0f} to {interval.high:,.0f})"
    joules = f"{cell(served.token_j, 'J')} ({' to '.join(cell(end * served.token_j, 'J') for end in ends)})"
    rests = f"90 %, by {interval.basis}"
    if served.gpu_w > (1 - _AT_LIMIT) * float(np.max(power.cap_w)):
        rests += "; at its limit, which lowers the rate: not counted"
    text = f"power: {watts}, {joules} a generated token with its share of the prompt"
    yield f"{text}, {1e6 / served.token_j:,.0f} tokens/s a MW of GPUs ({rests})"
