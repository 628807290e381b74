"""Configurations of torchtitan (TOML), by the names that settings of PyTorch have.

Sections, keys and values by default are those of torchtitan/config/job_config.py and torchtitan/distributed
(pytorch/torchtitan, 2025): its tensor parallelism splits tokens between layers, its looped pipelines have two stages on
each rank, and a pipeline cuts the local batch into micro-batches. Files of 2024 have other names, those of
torchtitan/config_manager.py at 0011fb9: there a pipeline has as many micro-batches as ranks unless their number is
given, so that each of them holds several sequences.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from dse.errors import ConfigError, Problem
from dse_deploy.arguments import Values
from studies.plan.plan_file import flattened

_SECTIONS = ("parallelism", "training", "activation_checkpoint", "optimizer", "model", "job")
_PLAIN: Mapping[str, str] = {
    "parallelism.tensor_parallel_degree": "TENSOR_PARALLEL_DEGREE",
    "parallelism.enable_async_tensor_parallel": "MICRO_PIPELINE_TP",
    "compile.enable_async_tensor_parallel": "MICRO_PIPELINE_TP",
    "parallelism.enable_fsdp_symm_mem": "FSDP_SYMM_MEM",
    "parallelism.pipeline_parallel_degree": "PIPELINE_PARALLEL_DEGREE",
    "parallelism.context_parallel_degree": "CONTEXT_PARALLEL_DEGREE",
    "parallelism.expert_parallel_degree": "EXPERT_PARALLEL_DEGREE",
    "training.seq_len": "SEQUENCE_LENGTH",
    "training.mixed_precision_param": "MIXED_PRECISION_PARAM",
    "optimizer.early_step_in_backward": "OPTIMIZER_IN_BACKWARD",
}
_REPLICATE, _SHARD = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
_RESHARD, _SCHEDULE = "parallelism.fsdp_reshard_after_forward", "parallelism.pipeline_parallel_schedule"
_AT_ONCE, _LOCAL, _GLOBAL = (
    "parallelism.pipeline_parallel_microbatch_size",
    "training.local_batch_size",
    "training.global_batch_size",
)
_MODE, _OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
_CONVERTERS, _CUTS = "model.converters", "experimental.pipeline_parallel_split_points"
_READ = (
    *_PLAIN,
    *(_REPLICATE, _SHARD, _RESHARD, _SCHEDULE, _AT_ONCE, _LOCAL, _GLOBAL, _MODE, _OPTION, _CONVERTERS, _CUTS),
)
_LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_RESHARDS: Mapping[str, bool] = {"always": True, "never": False}
_EVERY_OTHER = "2"  # `selective_ac_option`: of two layers one is computed again
_FORMATS: Mapping[str, str] = {"float8": "float8", "mx": "mx", "mxfp8": "mx"}
_NO_TOML = "is no TOML"
_FLOAT8_OF_2024, _MICRO_BATCHES = "float8.enable_float8_linear", "experimental.pipeline_parallel_microbatches"
_NAMES_OF_2024: Mapping[str, str] = {
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_degree": _SHARD,
    "training.data_parallel_replicate_degree": _REPLICATE,
    "training.data_parallel_shard_degree": _SHARD,
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": _SCHEDULE,
    "training.batch_size": _LOCAL,
}
_SCHEDULES_OF_2024: Mapping[str, str] = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"}


def is_torchtitan(text: str) -> bool:
    """Tell whether a file of TOML has sections of torchtitan."""
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    of_2024 = {"training", "experimental"} <= tree.keys()
    # `training` and `model` are common names: one of them proves nothing
    return "parallelism" in tree or of_2024 or sum(name in tree for name in _SECTIONS) > 2


def torchtitan_values(text: str) -> Values:
    """Yield what a configuration says, by the names of settings of PyTorch; others by their own.

    Raises ConfigError for a file that is none.
    """
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError([Problem("settings", f"{_NO_TOML}: {error}")]) from None
    if not is_torchtitan(text):
        rule = "is TOML without the sections of torchtitan ([parallelism], [training])"
        raise ConfigError([Problem("settings", rule, ", ".join(tree)[:80])])
    values = _renamed({path: value for name, entries in tree.items() for path, value in flattened(name, entries)})
    yield from ((_PLAIN[path], value) for path, value in values.items() if path in _PLAIN)
    yield from _data_parallel(values)
    yield from _pipeline(values)
    yield from _batches(values)
    yield from _rest(values)


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file of 2024 by the names of 2025; those of 2025 as they are.

    Raises ConfigError for a local batch that the micro-batches of a file of 2024 do not divide.
    """
    named = {_NAMES_OF_2024.get(path, path): value for path, value in values.items()}
    # no old name: a file of 2025
    if named.keys() == values.keys():
        return named
    schedule = str(named.get(_SCHEDULE, ""))
    if schedule in _SCHEDULES_OF_2024:
        named[_SCHEDULE] = _SCHEDULES_OF_2024[schedule]
    # a flag then, a converter of the model now
    if named.pop(_FLOAT8_OF_2024, False):
        named[_CONVERTERS] = ["float8"]
    # 8 was the default of training.batch_size
    stages, local = _stages(named), _number(named, _LOCAL, 8)
    if stages > 1:
        # as many micro-batches as ranks by default
        count = _number(named, _MICRO_BATCHES, stages)
        named.pop(_MICRO_BATCHES, None)
        if count < 1 or local % count:
            rule = f"does not divide training.batch_size ({local}), as torchtitan needs it"
            raise ConfigError([Problem(f"settings.{_MICRO_BATCHES}", rule, count)])
        named |= {_LOCAL: local, _AT_ONCE: local // count}
    return named


def _number(values: Mapping[str, Any], path: str, usual: int) -> int:
    """A whole number at a path. Raises ConfigError for another value."""
    value = values.get(path, usual)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError([Problem(f"settings.{path}", "is no whole number", value)])
    return value


def _stages(values: Mapping[str, Any]) -> int:
    return _number(values, "parallelism.pipeline_parallel_degree", 1)


def _data_parallel(values: Mapping[str, Any]) -> Values:
    """Yield what replicas share, and how many there are where the file says it: -1 are all GPUs that are left."""
    replicas, shards = _number(values, _REPLICATE, 1), _number(values, _SHARD, -1)
    if shards == 1:
        yield "DATA_PARALLEL", "DistributedDataParallel"
    else:
        yield "DATA_PARALLEL", "fully_shard"
        # by default weights stay gathered in a pipeline, which runs each stage many times
        yield "RESHARD_AFTER_FORWARD", _RESHARDS.get(str(values.get(_RESHARD, "default")), _stages(values) == 1)
    if shards >= 1:
        yield "DATA_PARALLEL_DEGREE", replicas * shards
    # HSDP: split inside of groups, replicated between them
    if replicas > 1 and shards > 1:
        yield "SHARD_DEGREE", shards
    # torchtitan splits tokens between layers whenever it splits layers
    if _number(values, "parallelism.tensor_parallel_degree", 1) > 1:
        yield "SEQUENCE_PARALLEL", True


def _pipeline(values: Mapping[str, Any]) -> Values:
    """Yield the schedule of a pipeline, if there is one."""
    if _stages(values) > 1:
        schedule = str(values.get(_SCHEDULE, "1F1B"))
        yield "PIPELINE_SCHEDULE", schedule
        if schedule in _LOOPED[:2]:
            cuts = values.get(_CUTS, ())
            # c cuts make c + 1 stages
            yield "VIRTUAL_STAGES", max((len(cuts) + 1) // _stages(values), 1) if cuts else 2


def _batches(values: Mapping[str, Any]) -> Values:
    """Yield the sequences of a micro-batch, and how many there are of these, or of a step."""
    local, whole = _number(values, _LOCAL, 0), _number(values, _GLOBAL, -1)
    # without a pipeline the local batch is one micro-batch
    at_once = _number(values, _AT_ONCE, 1) if _stages(values) > 1 else local
    if local > 0 and at_once > 0:
        yield "LOCAL_BATCH_SIZE", at_once
        # a global batch decides how many are accumulated
        if whole < 1 and local % at_once == 0:
            yield "MICRO_BATCHES", local // at_once
    if whole >= 1:
        yield "GLOBAL_BATCH_SIZE", whole


def _rest(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield recomputation, formats of products, and what no setting is."""
    if _MODE in values:
        mode, option = str(values[_MODE]), str(values.get(_OPTION, _EVERY_OTHER))
        is_other = mode == "selective" and option != _EVERY_OTHER
        yield "ACTIVATION_CHECKPOINT", f"{mode} by {option}" if is_other else mode
    for converter in values.get(_CONVERTERS, ()):
        yield "QUANTIZED_LINEAR", _FORMATS.get(str(converter).rpartition(".")[2], converter)
    yield from ((path, value) for path, value in values.items() if path not in _READ)
