"""Deployments of no machine, and drawn ones, for tests of serving."""

from __future__ import annotations

from typing import Any

import numpy as np

from dse_serving.deployment import Deployment, Pool, Scheduler, Transfer
from dse_serving.step_times import StepTimes
from dse_serving.traffic import PromptBlocks, Traffic


def step_times(draw: np.random.Generator | None = None, room: float = 1e9, **constant: float) -> StepTimes:
    """Step times of no machine: rising with tokens, sequences and context; or constant ones."""
    size, knots = 300, 72
    slopes = {"linear": 1e-5, "base": 1e-3, "head": 1e-6, "decode": 1e-8, "prompt": 1e-9, **constant}
    if draw is not None:
        slopes = {name: float(value * draw.uniform(0.3, 3)) for name, value in slopes.items()}
    tokens, sequences = np.arange(size + 1.0), np.arange(101.0)
    linear = slopes["base"] + slopes["linear"] * tokens
    contexts, lengths = 2.0 ** np.arange(18), np.arange(knots) + 1.0
    decode = slopes["decode"] * sequences[:, None] * contexts
    return StepTimes(
        np.stack([1.2 * linear, linear]),
        slopes["head"] * sequences,
        np.stack([decode, 0.9 * decode]),
        np.asarray(slopes["prompt"] * lengths, np.float64),
        10,
        1.0,
        1e5,
        room,
        (0.3, 0.1),
        experts=np.stack([0.2 * linear, 0.1 * linear]) if draw is not None else np.zeros((2, 1)),
    )


def random_case(seed: int) -> tuple[Deployment, Traffic]:
    """A deployment and traffic drawn by a seed: every policy, both roles, short memory, drafts, prefix hits."""
    draw = np.random.default_rng(seed)
    count, longest = int(draw.integers(5, 40)), int(draw.integers(20, 200))
    inputs, outputs = draw.integers(2, longest, count), draw.integers(1, 30, count)
    block = int(draw.choice([1, 4, 16]))
    least = 1 + int((inputs + outputs).max()) // block
    apart = bool(draw.integers(2))

    def pool() -> Pool:
        stages = int(draw.choice([1, 1, 3]))
        room = 1.0 + 1e5 * block * stages * (least + int(draw.integers(0, least)))
        times = step_times(draw, room)
        scheduler = Scheduler(
            policy=draw.choice(["mixed", "prefill_first"]),
            tokens=int(draw.integers(longest + 30, 3 * longest + 30)),
            sequences=int(draw.integers(1, 20)),
            chunked=bool(draw.integers(2)),
            block=block,
            reserved=float(draw.choice([0, 0.3, 1])),
            kept_free=float(draw.choice([0, 0.05])),
            memory=1.0,
            host_s=float(draw.uniform(0, 1e-3)),
            overlapped=bool(draw.integers(2)),
            launch_s=float(draw.uniform(0, 1e-3)),
            request_s=float(draw.choice([0, 1e-4])),
            token_s=float(draw.choice([0, 1e-6])),
            latency_s=float(draw.choice([0, 3e-4])),
            drafts=int(draw.choice([0, 3])),
            acceptance=0.6,
            gathered=int(draw.choice([0, 3])),
            wait_steps=int(draw.choice([0, 4])),
            wait_share=float(draw.uniform(0, 1)),
            read_steps=int(draw.choice([1, 7])),
            prompt_graphs=int(draw.choice([0, longest])),
            attention=draw.choice(["after", "beside"]),
        )
        return Pool(int(draw.integers(1, 4)), scheduler, times, stages, int(draw.choice([1, 2, 4])), stages)

    transfer = Transfer(float(draw.uniform(1e8, 1e10)), 1e-4, bool(draw.integers(2)), 4)
    routing: Any = draw.choice(["round_robin", "fewest_requests"])
    deployment = Deployment((pool(), pool()) if apart else (pool(),), transfer, routing)
    closed = int(draw.choice([0, 1, 7]))
    arrivals = np.zeros(count) if closed else np.sort(draw.choice(np.arange(count) * 1e-3, count))
    if draw.integers(2):
        return deployment, Traffic(arrivals, inputs, outputs, draw.integers(0, inputs), closed)
    counts = draw.integers(0, inputs // 16 + 1)
    numbers = np.concatenate([np.arange(n) + 20 * g for n, g in zip(counts, draw.integers(0, 4, count), strict=True)])
    return deployment, Traffic(arrivals, inputs, outputs, 0 * inputs, closed, PromptBlocks(16, numbers, counts))


def one_pool(times: StepTimes, engines: int = 1, **changes: object) -> Deployment:
    return Deployment((Pool(engines, Scheduler.model_validate({"memory": 1.0, **changes}), times),))
