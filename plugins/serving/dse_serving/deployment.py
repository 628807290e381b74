"""A deployment of engines: schedulers, step times, memory, and how requests and keys and values go between engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

import dse_serving.columns as at
from dse.errors import Problems
from dse.values import Frozen
from dse.values.units import Integer, Number, Seconds
from dse_serving.compiled import NOBODY, State
from dse_serving.step_times import StepTimes
from dse_serving.traffic import Traffic

Floats = NDArray[np.float64]
Count = Annotated[Integer, Field(ge=1, le=2**31)]
Share = Annotated[Number, Field(ge=0, le=1)]
Policy = Literal["round_robin", "fewest_requests"]


class Scheduler(Frozen):
    """The way in which an engine composes its steps.

    policy: mixed, prompts beside the sequences that generate; or prefill_first, steps of prompts alone as long as one
    waits. tokens: most of a step (of prompts, where these go first). sequences: most that an engine has. chunked:
    whether prompts may be cut. block: tokens of a page of keys and values. reserved: share of the output for which
    pages are taken when a request enters; where they run short later, the last sequence is preempted and computed
    again. kept_free: share of the pages that stay free when a request enters. memory: share of a GPU's memory for
    weights, and keys and values. context: tokens of the longest request, prompt and output. graphs: sizes of decode
    steps that are replayed as CUDA graphs.

    host_s, host_sequence_s: time of the host for a step, and more for each sequence, hidden behind the GPU where
    `overlapped`. launch_s: of the host for a kernel of a step with prompts, which no graph replays. request_s: of the
    front end for a request, one after the other; latency_s: of its way there, which holds up no other. dispatch_s: of a
    layer of experts, for kernels that sort tokens by expert and quantise them, which the step model does not have;
    None for that of the software's kernels (`conf/data/serving_kernels.yaml`).
    drafts, acceptance: tokens that are drafted for each one, and the chance of each that it is accepted after the one
    before; draft_share: time of a draft over that of a step with one token. attention: of prompts after that of
    sequences that generate, or beside it in one kernel (POD-Attention, arXiv:2410.18038). gathered: most steps in which
    prompts wait until each rank of data-parallel attention has one, while each has a sequence that generates
    (TensorRT-LLM's attention_dp_config, timeout_iters).
    """

    name: str = ""
    policy: Literal["mixed", "prefill_first"] = "mixed"
    tokens: Count = 8192
    sequences: Count = 256
    chunked: bool = True
    block: Count = 16
    reserved: Share = 0.0
    kept_free: Share = 0.01
    memory: Annotated[Number, Field(gt=0, le=1)] = 0.9
    context: Count = 131072
    graphs: tuple[Count, ...] = ()
    host_s: Seconds = 0.0
    host_sequence_s: Seconds = 0.0
    overlapped: bool = False
    launch_s: Seconds = 0.0
    request_s: Seconds = 0.0
    latency_s: Seconds = 0.0
    dispatch_s: Seconds | None = None
    drafts: Annotated[Integer, Field(ge=0, le=64)] = 0
    acceptance: Share = 0.0
    draft_share: Share = 0.05
    attention: Literal["after", "beside"] = "after"
    gathered: Annotated[Integer, Field(ge=0, le=2**20)] = 0


@dataclass(frozen=True)
class Pool:
    """Equal engines: how many, their scheduler, and the times of their steps (of one stage); GPUs of an engine, ranks
    that share its sequences, and stages of its pipeline.
    """

    engines: int
    scheduler: Scheduler
    times: StepTimes
    gpus: int = 1
    ranks: int = 1
    stages: int = 1

    @property
    def batches(self) -> int:
        """Batches of all engines: one for each stage, which share sequences and pages evenly."""
        return self.engines * self.stages

    @property
    def blocks(self) -> int:
        """Pages of keys and values of a batch; 0 where weights do not fit."""
        left = self.scheduler.memory * self.times.room_bytes - self.times.weight_bytes
        if not np.isfinite(left):
            return 2**40
        page = self.times.token_bytes * self.scheduler.block
        return max(0, int(left // page)) * self.ranks // self.stages if page > 0 else 2**40


@dataclass(frozen=True)
class Transfer:
    """Keys and values between engines: rate of a GPU's links [bytes/s], those of the sender and of the receiver alike,
    each of which carries every byte once; latency [s]; beside: layer by layer, while the prompt is computed, so that
    one of `layers` is left when it ends.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    beside: bool = False
    layers: int = 1


@dataclass(frozen=True)
class Deployment:
    """Pools of engines. One pool does both; of two, the first computes prompts, and the second generates."""

    pools: tuple[Pool, ...]
    transfer: Transfer | None = None
    routing: Policy = "fewest_requests"

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return sum(pool.engines * pool.gpus for pool in self.pools)

    def limits(self) -> NDArray[np.int64]:
        """Integers of both pools, [2, columns]."""
        rows = [self._limits(pool, role) for pool, role in zip(self.pools, self._roles(), strict=True)]
        return np.array(rows * (3 - len(rows)), np.int64)

    def _roles(self) -> Sequence[int]:
        return (at.PREFILL, at.DECODE) if len(self.pools) > 1 else (at.BOTH,)

    def _limits(self, pool: Pool, role: int) -> list[int]:
        plan, blocks = pool.scheduler, pool.blocks
        first = plan.policy == "prefill_first" and role != at.DECODE
        drafts = 0 if role == at.PREFILL else plan.drafts
        sequences = max(1, plan.sequences * pool.ranks // pool.stages)
        return [
            *(plan.tokens * (pool.ranks if first else 1), sequences, plan.block, blocks, int(first)),
            *(int(plan.chunked), round(1000 * plan.reserved) if role != at.PREFILL else 0),
            *(int(plan.kept_free * blocks), role, drafts, pool.ranks, int(self.routing == "fewest_requests")),
            *(pool.stages, 0, plan.gathered if role == at.BOTH else 0),
        ]

    def rates(self) -> Floats:
        """Times and shares of both pools, [2, columns]."""
        rows = [self._rates(pool) for pool in self.pools]
        # the loop knows two pools: engines that do both are given twice
        return np.array(rows * (3 - len(rows)), float)

    def _rates(self, pool: Pool) -> list[float]:
        plan, moved = pool.scheduler, self.transfer or Transfer(np.inf)
        token = pool.times.token_bytes / moved.bytes_per_s
        return [
            *(plan.host_s, plan.host_sequence_s, float(plan.overlapped), plan.launch_s * pool.times.kernels),
            *(plan.acceptance, plan.draft_share * pool.times.single_s),
            *(token, moved.latency_s, float(moved.beside), 1.0 / moved.layers, plan.request_s, plan.latency_s),
            *(float(plan.attention == "beside"), *pool.times.shares),
        ]

    def state(self, traffic: Traffic, logged: int = 0) -> State:
        """Arrays of a run before it begins. Raises ConfigError for requests that no engine can serve."""
        limits, engines, blocks = self.limits(), sum(pool.batches for pool in self.pools), traffic.blocks
        self.check(traffic)
        limits[:, at.UNIT] = blocks.tokens
        requests = np.zeros((traffic.size, at.OF_REQUEST), np.int64)
        requests[:, at.INPUT], requests[:, at.OUTPUT] = traffic.inputs, traffic.outputs
        # the last token of a prompt is always computed: the first output comes from it
        requests[:, at.PREFIX] = np.minimum(traffic.prefixes, traffic.inputs - 1)
        requests[:, at.TARGET], requests[:, at.ENGINE], requests[:, at.NEXT] = traffic.inputs, NOBODY, NOBODY
        if len(blocks.counts):
            requests[:, at.BLOCKED], requests[1:, at.CONTENT] = blocks.counts, np.cumsum(blocks.counts)[:-1]
        moments = np.full((traffic.size, at.MOMENTS), -1.0)
        moments[:, at.ARRIVAL] = traffic.arrivals
        pools = np.repeat(np.arange(len(self.pools)), [pool.batches for pool in self.pools])
        engine = np.zeros((engines, at.OF_ENGINE), np.int64)
        engine[:, at.FREE] = engine[:, at.LEAST_FREE] = limits[pools, at.TOTAL]
        engine[:, [at.SENDING, at.OLDEST, at.NEWEST]] = NOBODY
        running = np.zeros((engines, int(limits[:, at.SEQUENCES].max())), np.int64)
        names = ("linear", "experts", "head", "decode", "prompt")
        linear, experts, head, decode, prompt = (self._stack(name) for name in names)
        ends, sending, lanes = np.full(engines, np.inf), np.zeros(engines), np.zeros((engines, 2))
        turns, sums = np.zeros(engines, np.int64), np.zeros((engines, 2))
        log = np.zeros((logged, at.LOGGED))
        return State(
            requests,
            moments,
            engine,
            running,
            blocks.numbers,
            np.full((engines, 1 + int(blocks.numbers.max(initial=0)), at.OF_BLOCK), NOBODY),
            limits,
            self.rates(),
            linear,
            experts,
            head,
            decode,
            prompt,
            ends,
            sending,
            lanes,
            turns,
            sums,
            log,
        )

    def _stack(self, name: str) -> Floats:
        arrays = [getattr(pool.times, name) for pool in self.pools]
        shape = np.max([array.shape for array in arrays], axis=0)
        padded = [
            np.pad(array, [(0, most - size) for most, size in zip(shape, array.shape, strict=True)], mode="edge")
            for array in arrays
        ]
        return np.stack(padded * (3 - len(padded)))

    def check(self, traffic: Traffic) -> None:
        """Raise ConfigError for requests that an engine cannot hold, each rule once."""
        check = Problems()
        largest = int((traffic.inputs + traffic.outputs).max())
        for pool, role in zip(self.pools, self._roles(), strict=True):
            plan, room = pool.scheduler, pool.blocks * pool.scheduler.block
            if pool.blocks == 0:
                needed, room_gb = pool.times.weight_bytes / 1e9, plan.memory * pool.times.room_bytes / 1e9
                rule = f"has weights of {needed:,.1f} GB, which leave no room for keys and values"
                way = "use more GPUs, or a smaller format, such as run.weights=fp8"
                check.add("model", f"{rule} in {room_gb:,.1f} GB of a GPU", way_out=way)
            elif largest > room:
                rule = f"is more than the keys and values that an engine holds ({room:,} tokens)"
                check.add("traffic", f"has a request of {largest:,} tokens, which {rule}", way_out="use more GPUs")
            never_again = plan.reserved == 1 or role == at.PREFILL  # what is preempted is a prompt with its output
            uncut = int((traffic.inputs if never_again else traffic.inputs + traffic.outputs - 1).max())
            if not plan.chunked and uncut > plan.tokens:
                rule = f"is less than the longest prompt or preempted sequence ({uncut:,}), which is not cut"
                check.add(
                    "server.scheduler.tokens", rule, value=plan.tokens, way_out="raise it, or scheduler.chunked=true"
                )
            if traffic.blocks.tokens % plan.block:
                rule = f"does not divide blocks of prompts of {traffic.blocks.tokens} tokens"
                check.add("server.scheduler.block", rule, value=plan.block, way_out="set 1, 16, 32 or 64")
        check.done()
