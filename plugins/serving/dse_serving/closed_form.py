"""Steady closed loops in closed form: what users see with `c` requests of equal lengths under way on an engine.

Requests of I and O tokens are spread evenly over their lives. A step without prompts of the b sequences that generate,
at the mean context I + O / 2, takes d; one that computes a prompt as well p_1, ..., p_k, one for each chunk. While a
request generates, each of the other c - 1 begins once, so that with a the time before the first token

    tpot = d + (c - 1) (p_1 + ... + p_k - k d) / (O - 1)
    ttft = a + p_1 + ... + p_k + (what is left of a step when it comes) s / 2,    s the mean step

(derived; asymptotic analysis of closed systems in steady state. It knows no queue for pages or sequences, and no
requests that arrive together, no pipelines, and no waits for others or for a read.)
"""

from __future__ import annotations

import math

import numpy as np

import dse_serving.columns as at
from dse_serving.deployment import Deployment
from dse_serving.sequences import Request, Rules
from dse_serving.traffic import Traffic


def steady_loop(deployment: Deployment, concurrency: int, prompt: int, output: int) -> tuple[float, float]:
    """Times to the first token and of each later one [s], of engines that do both."""
    pool, scheduler = deployment.pools[0], deployment.pools[0].scheduler
    # engines share the loop evenly
    sequences = max(1, round(concurrency / pool.engines))
    single = np.ones(1, np.int64)
    state = deployment.state(Traffic(np.zeros(1), prompt * single, output * single, 0 * single))
    rules = Rules(state.limits[0], state.rates[0], state, 0)
    # in the middle of their outputs, on average
    generating = [_request(number, prompt, output, prompt + output // 2) for number in range(sequences)]
    without = rules.seconds(generating, {}, [])
    room = int(rules.limits[at.TOKENS])
    # the request whose prompt is computed is one of the loop
    beside = [] if scheduler.policy == "prefill_first" else generating[:-1]
    chunk = min(prompt, room - -(-len(beside) // pool.ranks))
    steps = math.ceil(prompt / chunk)
    longer = 0.0
    for number in range(steps):
        part = _request(sequences, prompt, output, number * chunk)
        longer += rules.seconds(beside, {sequences: min(chunk, prompt - number * chunk)}, [part])
    # steps with a prompt replace steps without, if others generate in them
    spared = steps * without if beside else 0.0
    later = without + (sequences - 1) * (longer - spared) / max(output - 1, 1)
    # a request comes in the middle of a step, on average
    front = float(scheduler.request_s) + float(scheduler.token_s) * prompt
    front += float(scheduler.latency_s) + float(scheduler.reply_s)
    return front + longer + (later / 2 if sequences > 1 else 0.0), later


def _request(number: int, prompt: int, output: int, cached: int) -> Request:
    return Request(number, prompt, output, 0, np.zeros(at.MOMENTS), cached=cached, target=cached)
