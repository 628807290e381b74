"""A deployment of engines: schedulers, step times, memory, and how requests and keys and values go between engines."""

from __future__ import annotations

import math
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
from dse_serving.compiled import State
from dse_serving.step_times import StepTimes
from dse_serving.traffic import Traffic

Floats = NDArray[np.float64]
Count = Annotated[Integer, Field(ge=1, le=2**31)]
Share = Annotated[Number, Field(ge=0, le=1)]
Policy = Literal["round_robin", "fewest_requests"]


class Scheduler(Frozen):
    """The way in which an engine composes its steps. tokens, sequences: of each rank of data-parallel attention.

    policy: mixed, prompts and sequences that generate in one step; prefill_first, steps of prompts alone go first.
    tokens: most of a step; of prompts, where these go first (max_num_batched_tokens, max_num_tokens).
    sequences: most that run at a time (max_num_seqs, max_batch_size, max_running_requests).
    chunked: whether prompts may be cut (enable_chunked_prefill).
    block: tokens of a page of keys and values (block_size, tokens_per_block, page_size).
    reserved: share of the output whose pages are taken at admission; where short later, the last sequence is preempted.
    kept_free: share of the pages that stay free at admission (watermark).
    memory: share of a GPU's memory for weights, and keys and values (gpu_memory_utilization, mem_fraction_static).
    context: most tokens of a request, prompt and output (max_model_len, max_seq_len, context_length).
    graphs: sizes of decode steps that are replayed as CUDA graphs (cudagraph_capture_sizes, cuda_graph_bs).
    host_s: time of the host for a step [s].
    host_sequence_s: more of it for each sequence [s].
    overlapped: whether the GPU hides it (overlap schedule, asynchronous scheduling).
    launch_s: time of the host for a kernel of a step with prompts, which no graph replays [s].
    request_s: time of the front end for a request, one after the other [s].
    token_s: more of it for each token of the prompt, which it splits into tokens and hands on [s].
    latency_s: of a request's way there, which holds up no other [s].
    reply_s: of the way of tokens back to the client [s]; it holds up no step, and of a closed loop no next request.
    dispatch_s: of a layer of experts, for kernels that sort tokens by expert and quantise them, which the step model
        does not have [s]; None for that of the software's kernels (`conf/data/serving_kernels.yaml`).
    drafts: tokens that are drafted for each one (num_speculative_tokens, num_nextn_predict_layers).
    acceptance: chance of each draft that it is accepted after the one before.
    draft_share: time of a draft over that of a step with one token.
    attention: of prompts after that of sequences that generate, or beside it in one kernel (POD-Attention,
        arXiv:2410.18038).
    gathered: most steps in which prompts wait until each rank has one, while each has a sequence that generates
        (TensorRT-LLM's attention_dp_config, timeout_iters).
    wait_steps: most steps in which prompts wait for others while sequences generate (batch_wait_timeout_iters), until
        their tokens and those of the sequences are `wait_share` of `tokens` (batch_wait_max_tokens_ratio); not with
        data-parallel attention.
    read_steps: steps without prompts after which an engine reads the requests that came (scheduler_recv_interval); it
        also reads after a step with prompts, and when it is idle.
    prompt_graphs: most tokens of a step with prompts that is replayed as CUDA graphs, piece by piece between the
        kernels of attention (vLLM's PIECEWISE mode, TensorRT-LLM's enable_piecewise_cuda_graph); 0: none.
    """

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
    token_s: Seconds = 0.0
    latency_s: Seconds = 0.0
    reply_s: Seconds = 0.0
    dispatch_s: Seconds | None = None
    drafts: Annotated[Integer, Field(ge=0, le=64)] = 0
    acceptance: Share = 0.0
    draft_share: Share = 0.05
    attention: Literal["after", "beside"] = "after"
    gathered: Annotated[Integer, Field(ge=0, le=2**20)] = 0
    wait_steps: Annotated[Integer, Field(ge=0, le=2**20)] = 0
    wait_share: Share = 0.0
    read_steps: Annotated[Integer, Field(ge=1, le=2**20)] = 1
    prompt_graphs: Annotated[Integer, Field(ge=0, le=2**31)] = 0


@dataclass(frozen=True)
class Pool:
    """Equal engines: how many, their scheduler, and the times of their steps (of one stage); GPUs of an engine, ranks
    that share its sequences, stages of its pipeline, and those of its GPUs that have experts alone.
    """

    engines: int
    scheduler: Scheduler
    times: StepTimes
    gpus: int = 1
    ranks: int = 1
    stages: int = 1
    expert_gpus: int = 0

    @property
    def rank_gpus(self) -> int:
        """GPUs that hold the keys and values of a sequence: those of a rank that attend."""
        return (self.gpus - self.expert_gpus) // self.ranks

    @property
    def batches(self) -> int:
        """Batches of all engines: one for each stage, which share sequences and pages evenly."""
        return self.engines * self.stages

    @property
    def kv_pages(self) -> int:
        """Pages of keys and values of a batch; 0 where weights do not fit."""
        left = self.scheduler.memory * self.times.room_bytes - self.times.weight_bytes
        if not np.isfinite(left):
            return 2**40  # memory without a bound
        # each rank holds other sequences; batches of a pipeline share the pages evenly
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

    @property
    def kv_pages(self) -> NDArray[np.int64]:
        """Pages of keys and values of each batch of all engines, in the order of the rows of a state."""
        pages, batches = zip(*((pool.kv_pages, pool.batches) for pool in self.pools), strict=True)
        return np.repeat(pages, batches)

    def limits(self) -> NDArray[np.int64]:
        """Integers of both pools, [2, columns]."""
        rows = [self._limits(pool, role) for pool, role in zip(self.pools, self._roles(), strict=True)]
        # the loop knows two pools: one that does both is given twice
        return np.array(rows * (3 - len(rows)), np.int64)

    def _roles(self) -> Sequence[int]:
        return (at.PREFILL, at.DECODE) if len(self.pools) > 1 else (at.BOTH,)

    def _limits(self, pool: Pool, role: int) -> list[int]:
        scheduler, kv_pages = pool.scheduler, pool.kv_pages
        # engines that generate alone have no prompts to put first
        first = scheduler.policy == "prefill_first" and role != at.DECODE
        # an engine of prompts generates one token of each
        drafts = 0 if role == at.PREFILL else scheduler.drafts
        # tokens stay those of a rank; sequences are of all ranks, which take them evenly
        sequences = max(1, scheduler.sequences * pool.ranks // pool.stages)
        return [
            *(scheduler.tokens, sequences, scheduler.block, kv_pages, int(first)),
            *(int(scheduler.chunked), round(1000 * scheduler.reserved) if role != at.PREFILL else 0),
            *(int(scheduler.kept_free * kv_pages), role, drafts, pool.ranks),
            *(at.FEWEST_REQUESTS if self.routing == "fewest_requests" else at.ROUND_ROBIN, pool.stages, 0),
            *(scheduler.gathered if role == at.BOTH else 0, scheduler.read_steps if role == at.BOTH else 1),
            *(scheduler.wait_steps if role == at.BOTH and pool.ranks == 1 else 0,),
            *(math.ceil(scheduler.wait_share * scheduler.tokens), scheduler.prompt_graphs),
        ]

    def rates(self) -> Floats:
        """Times and shares of both pools, [2, columns]."""
        rows = [self._rates(pool) for pool in self.pools]
        # the loop knows two pools: engines that do both are given twice
        return np.array(rows * (3 - len(rows)), float)

    def _rates(self, pool: Pool) -> list[float]:
        scheduler, moved = pool.scheduler, self.transfer or Transfer(np.inf)
        # seconds of a token's keys and values over the links of one GPU
        token = pool.times.token_bytes / moved.bytes_per_s
        return [
            *(scheduler.host_s, scheduler.host_sequence_s, float(scheduler.overlapped)),
            *(scheduler.launch_s * pool.times.kernels, scheduler.acceptance),
            *(scheduler.draft_share * pool.times.single_s, token, moved.latency_s),
            *(float(moved.beside), 1.0 / moved.layers, scheduler.request_s, scheduler.latency_s),
            *(float(scheduler.attention == "beside"), *pool.times.shares, scheduler.token_s),
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
        requests[:, at.TARGET], requests[:, at.ENGINE], requests[:, at.NEXT] = traffic.inputs, at.NOBODY, at.NOBODY
        if len(blocks.counts):
            requests[:, at.BLOCKED], requests[1:, at.CONTENT] = blocks.counts, np.cumsum(blocks.counts)[:-1]
        moments = np.full((traffic.size, at.MOMENTS), -1.0)  # -1: not yet
        moments[:, at.ARRIVAL] = traffic.arrivals
        pools = np.repeat(np.arange(len(self.pools)), [pool.batches for pool in self.pools])
        engine = np.zeros((engines, at.OF_ENGINE), np.int64)
        engine[:, at.FREE] = engine[:, at.LEAST_FREE] = limits[pools, at.TOTAL]
        # lists are empty
        engine[:, [at.SENDING, at.OLDEST, at.NEWEST]] = at.NOBODY
        running = np.zeros((engines, int(limits[:, at.SEQUENCES].max())), np.int64)
        names = ("linear", "experts", "head", "decode", "prompt")
        linear, experts, head, decode, prompt = (self._stack(name) for name in names)
        # inf: idle
        ends, sending, lanes = np.full(engines, np.inf), np.zeros(engines), np.zeros((engines, 2))
        turns, sums = np.zeros(engines, np.int64), np.zeros((engines, 2))
        log = np.zeros((logged, at.LOGGED))
        return State(
            requests,
            moments,
            engine,
            running,
            blocks.numbers,
            np.full((engines, 1 + int(blocks.numbers.max(initial=0)), at.OF_BLOCK), at.NOBODY),
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
            # the shorter table of two pools goes on with its last value
            np.pad(array, [(0, most - size) for most, size in zip(shape, array.shape, strict=True)], mode="edge")
            for array in arrays
        ]
        return np.stack(padded * (3 - len(padded)))

    def check(self, traffic: Traffic) -> None:
        """Raise ConfigError for requests that an engine cannot hold, each rule once."""
        check = Problems()
        # a request that fits alone is served in the end, whatever waits
        largest = int((traffic.inputs + traffic.outputs).max())
        for pool, role in zip(self.pools, self._roles(), strict=True):
            scheduler, room = pool.scheduler, pool.kv_pages * pool.scheduler.block
            if pool.kv_pages == 0:
                needed, room_gb = pool.times.weight_bytes / 1e9, scheduler.memory * pool.times.room_bytes / 1e9
                rule = f"has weights of {needed:,.1f} GB, which leave no room for keys and values"
                way = "use more GPUs, or a smaller format, such as run.weights=fp8 or mxfp4"
                check.add("model", f"{rule} in {room_gb:,.1f} GB of a GPU", way_out=way)
            elif largest > room:
                rule = f"is more than the keys and values that an engine holds ({room:,} tokens)"
                check.add("traffic", f"has a request of {largest:,} tokens, which {rule}", way_out="use more GPUs")
            if largest > scheduler.context:
                rule = f"is less than the longest request, {largest:,} tokens with its output"
                way = "raise it, or shorten requests"
                check.add("server.scheduler.context", rule, value=scheduler.context, way_out=way)
            never_again = scheduler.reserved == 1 or role == at.PREFILL  # what is preempted is a prompt with its output
            uncut = int((traffic.inputs if never_again else traffic.inputs + traffic.outputs - 1).max())
            if not scheduler.chunked and uncut > scheduler.tokens:
                rule = f"is less than the longest prompt or preempted sequence ({uncut:,}), which is not cut"
                check.add(
                    "server.scheduler.tokens",
                    rule,
                    value=scheduler.tokens,
                    way_out="raise it, or scheduler.chunked=true",
                )
            if traffic.blocks.tokens % scheduler.block:
                rule = f"does not divide blocks of prompts of {traffic.blocks.tokens} tokens"
                check.add("server.scheduler.block", rule, value=scheduler.block, way_out="set 1, 16, 32 or 64")
        check.done()
