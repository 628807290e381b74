"""Checks that frameworks make when they start, written from their code: what a configuration violates, in words.

Each function stands beside the source that it was written from, and takes plain numbers: nothing of it is shared with
the rules that plans keep (`conf/data/framework_rules.yaml`), which are held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """Numbers of a configuration as a framework is started with them, and of its model."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    virtual: int = 1
    layout: str = ""
    ends_count: bool = False
    sequence: int = 1
    batch: int = 1
    micro_batches: int = 1
    sequence_parallel: bool = False
    training: bool = True
    waits_for_messages: bool = False
    schedule: str = "1f1b"
    recompute: str = "none"
    exchanges: str = "waited"
    zero: int = 0
    gathers_beside: bool = False
    reduces_beside: bool = False
    user_buffers: bool = False

    @classmethod
    def of(cls, design: Any, *, layout: str = "") -> Launch:
        """Build from a design of a step."""
        model, run, parallel = design.model, design.run, design.parallel
        interleaved = parallel.pipeline == "interleaved"
        return cls(
            layers=int(model.layers),
            heads=int(model.num_heads),
            kv_heads=int(model.num_kv_heads),
            experts=0 if model.moe is None else int(model.moe.experts),
            **{name: int(getattr(parallel, name)) for name in ("tp", "pp", "dp", "cp", "ep", "etp", "zero")},
            virtual=int(parallel.virtual_stages) if interleaved else 1,
            layout=layout,
            ends_count=parallel.ends == "layers",
            sequence=int(run.sequence_length),
            batch=int(run.batch),
            micro_batches=int(run.micro_batches),
            sequence_parallel=parallel.sequence_parallel,
            training=run.mode == "training",
            waits_for_messages=parallel.messages == "waited",
            schedule=parallel.pipeline,
            recompute=run.recompute,
            exchanges=parallel.exchanges,
            gathers_beside=parallel.prefetch and parallel.zero == 3,
            reduces_beside=parallel.reductions == "beside",
            user_buffers=any(schedule.name.startswith("transformer_engine") for schedule in design.sites.values()),
        )


def _megatron(launch: Launch) -> Iterator[str]:
    """NVIDIA/Megatron-LM d98e8a64: megatron/training/arguments.py, core/transformer/transformer_config.py."""
    world = launch.tp * launch.pp * launch.dp * launch.cp
    if world % (launch.tp * launch.pp * launch.cp):
        yield "world size is not divisible by total_model_size"
    if launch.heads % launch.tp:
        yield "num_attention_heads must be a multiple of tensor_model_parallel_size"
    if launch.kv_heads % launch.tp and launch.tp % launch.kv_heads:
        yield "num_query_groups must be a multiple or divisor of tensor_model_parallel_size"
    global_batch = launch.batch * launch.micro_batches * launch.dp
    if global_batch % (launch.batch * launch.dp):
        yield "global batch size is not divisible by micro batch size times data parallel size"
    if launch.cp > 1 and launch.sequence % (2 * launch.cp):
        yield "seq-length should be a multiple of 2 * context-parallel-size"
    if launch.sequence_parallel and launch.tp > 1 and (launch.sequence // launch.cp) % launch.tp:
        yield "the first dimension of the tensor should be divisible by the tensor parallel size"
    if launch.ep > 1 and (not launch.experts or launch.experts % launch.ep):
        yield "number of experts should be a multiple of expert model parallel_size"
    if (launch.tp * launch.dp * launch.cp) % (launch.ep * launch.etp):
        yield "world size is not divisible by expert_tensor_model_pipeline_parallel size"
    if launch.training and launch.ep > 1 and launch.tp > 1 and not launch.sequence_parallel:
        yield "MoE with tensor parallelism needs sequence parallelism"
    yield from _megatron_buffers(launch)
    yield from _megatron_pipelines(launch)


def _megatron_buffers(launch: Launch) -> Iterator[str]:
    """The same files, of collectives that run beside compute."""
    if launch.user_buffers and not launch.sequence_parallel:
        yield "tensor parallel communication/GEMM overlap can happen only when sequence parallelism is enabled"
    if launch.training and launch.gathers_beside and not launch.reduces_beside:
        yield "must use --overlap-param-gather with --overlap-grad-reduce"


def _megatron_pipelines(launch: Launch) -> Iterator[str]:
    """The same files, of stages: layouts by name, virtual stages, and overlaps between them."""
    stages, layers = launch.pp * launch.virtual, launch.layers + 2 * launch.ends_count
    if launch.layout:
        parts = launch.layout.split("|")
        if len(parts) % launch.pp or len(parts) // launch.pp != launch.virtual:
            yield "the length of pipeline_model_parallel_layout must be divisible by pipeline_model_parallel_size"
        if not (parts[0].startswith("E") and parts[-1].endswith("L")):
            yield "the first layer must be embedding, and the last one loss"
        if sum(_decoders(part) for part in parts) != launch.layers:
            yield "number of decoder layers must match num_layers"
    elif layers % launch.pp or (layers // launch.pp) % launch.virtual:
        yield "number of layers of the model must be divisible by pipeline model parallel and virtual size"
    if stages > layers:
        yield "stages without a layer"
    yield from _megatron_overlaps(launch)


def _megatron_overlaps(launch: Launch) -> Iterator[str]:
    """The same files, of what overlaps between stages and between micro-batches."""
    if launch.virtual > 1 and launch.pp <= (2 if launch.waits_for_messages else 1):
        yield "interleaved schedules need more pipeline stages"
    if launch.virtual > 1 and launch.micro_batches % launch.pp:
        yield "number of microbatches is not divisible by pipeline-model-parallel-size with interleaved schedules"
    if launch.pp > 1 and launch.virtual == 1 and not launch.waits_for_messages:
        yield "overlap of point-to-point communication is of interleaved schedules"
    if launch.exchanges == "two_micro_batches" and launch.pp > 1 and launch.virtual == 1:
        yield "virtual_pipeline_model_parallel_size must be specified when enabling EP A2A overlap"
    if launch.exchanges == "two_micro_batches" and (launch.recompute == "all" or launch.ep < 2):
        yield "disable full recomputation, and use expert parallelism, when enabling overlap_moe_expert_parallel_comm"
    if launch.schedule not in ("1f1b", "interleaved", "zb_h1", "zbv", "v_half", "v_min"):
        yield f"schedule {launch.schedule} does not exist"
    beside = (launch.reduces_beside and launch.dp > 1 and launch.zero < 2) or launch.gathers_beside
    if launch.schedule in ("zb_h1", "zbv", "v_half", "v_min") and beside:  # of Primus, by the README of its zerobubble
        yield "zero-bubble pipelines need overlap_grad_reduce and overlap_param_gather to be false"


def _decoders(part: str) -> int:
    """Decoder layers of a stage: t, or t*n."""
    inner = part.strip("EL")
    return 0 if not inner else int(inner.partition("*")[2] or len(inner))


def _torchtitan(launch: Launch) -> Iterator[str]:
    """torchtitan/trainer.py, distributed/{parallel_dims,pipeline_parallel}.py, models/common/decoder.py at b5bcd76c."""
    divisor = (launch.tp if launch.sequence_parallel else 1) * (2 * launch.cp if launch.cp > 1 else 1)
    if launch.batch * launch.sequence % divisor:
        yield "tokens per pipeline microbatch must be divisible"
    if launch.heads % launch.tp or launch.kv_heads % launch.tp:
        yield "tensor_parallel_degree must divide n_heads and n_kv_heads"
    if launch.experts and launch.experts % launch.ep:
        yield "num_experts must be divisible by expert_parallel_degree"
    if (launch.dp * launch.cp * launch.tp) % launch.ep:
        yield "expert_parallel_degree must divide dp_shard * cp * tp"
    if launch.pp * launch.virtual > launch.layers + 2:
        yield "stages without a layer"
    if launch.schedule == "interleaved" and launch.virtual < 2:
        yield "multi-stage schedule requires at least 2 stages per rank"
    if launch.schedule not in ("gpipe", "1f1b", "interleaved", "zbv", "dualpipe"):
        yield f"schedule {launch.schedule} does not exist"
    if launch.training and launch.zero not in (0, 3):
        yield "states are split by fully_shard (3), or not"
    if launch.recompute not in ("none", "half", "all"):
        yield "activation checkpointing is none, selective or full"


def _vllm(launch: Launch) -> Iterator[str]:
    """vllm-project/vllm: vllm/config/model.py and parallel.py, and its models."""
    if launch.heads % launch.tp:
        yield "total number of attention heads must be divisible by tensor parallel size"
    if launch.kv_heads % launch.tp and launch.tp % launch.kv_heads:
        yield "total_num_kv_heads % tp_size == 0, or tp_size % total_num_kv_heads == 0"
    if launch.ep > 1 and launch.ep * launch.etp != launch.tp * launch.dp:
        yield "EP_SIZE = TP_SIZE x DP_SIZE"
    if launch.ep > 1 and not launch.experts:
        yield "number of experts in the model must be greater than 0 when expert parallelism is enabled"
    if launch.cp > 1:
        yield "no context parallelism of this kind"


def _sglang(launch: Launch) -> Iterator[str]:
    """python/sglang/srt/server_args.py of sgl-project/sglang: GPUs of tp count the replicas of attention."""
    tp_size = launch.tp * (launch.dp if launch.experts and launch.dp > 1 else 1)
    if launch.experts and tp_size % launch.dp:
        yield "self.tp_size % self.dp_size == 0"
    if launch.ep > 1 and launch.experts % launch.ep:
        yield "experts are not divisible by the expert parallel size"
    if launch.experts and launch.dp > 1 and launch.ep * launch.etp != tp_size:
        yield "with attention that is data-parallel the expert parallel size is that of tp"
    yield from _heads(launch)


def _tensorrt_llm(launch: Launch) -> Iterator[str]:
    """tensorrt_llm/mapping.py of NVIDIA/TensorRT-LLM 05ebebb2."""
    tp_size = launch.tp * (launch.dp if launch.experts and launch.dp > 1 else 1)
    if launch.ep > 1 and launch.ep * launch.etp != tp_size:
        yield "tp_size must equal to moe_tp_size * moe_ep_size"
    if launch.pp > launch.layers:
        yield "pp size cannot be larger than num_hidden_layers"
    if launch.ep > 1 and launch.cp > 1:
        yield "CP don't support MoE tp/ep yet"
    yield from _heads(launch)


def _heads(launch: Launch) -> Iterator[str]:
    if launch.heads % launch.tp:
        yield "heads must be divisible by the tensor parallel size"
    if launch.kv_heads % launch.tp and launch.tp % launch.kv_heads:
        yield "heads of keys must be split or copied evenly"


CHECKS: Mapping[str, Callable[[Launch], Iterator[str]]] = {
    "megatron": _megatron,
    "torch": _torchtitan,
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
}
"""Name of a tool -> what its framework would refuse of a launch."""
