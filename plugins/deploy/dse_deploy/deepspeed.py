"""Configurations of DeepSpeed (ds_config.json): their values by the names of its settings, and what follows of them.

Keys and values by default are those of deepspeed/runtime/zero/config.py and deepspeed/runtime/config.py
(deepspeedai/DeepSpeed 1b88ac36): nothing is split where no stage is named, and gradients are reduced beside the
backward pass where `overlap_comm` says so, or by default with weights that are split (stage 3). What Hugging Face's
trainer fills in is `auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dse.errors import ConfigError, Problem
from dse.errors.parsing import parse_json
from dse.space import get_path
from dse_deploy.arguments import Values
from studies.plan.plan_file import flattened, put_in

AUTO = "auto"
"""A value that the program which calls DeepSpeed fills in."""
_STAGE, _OVERLAP = "zero_optimization.stage", "zero_optimization.overlap_comm"
_PREFETCH, _BATCH = "zero_optimization.stage3_prefetch_bucket_size", "train_batch_size"
# bf16 was called bfloat16 in older versions
_FORMATS = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
_SECTIONS = (
    "zero_optimization",
    "bf16",
    "fp16",
    "train_micro_batch_size_per_gpu",
    _BATCH,
    "gradient_accumulation_steps",
)
_NO_ZERO = "without ZeRO, gradients are reduced after the backward pass"
_NOT_BESIDE = "the model overlaps reductions of split gradients with the backward pass"
_WEIGHTS, _GRADIENTS = 3, 2


def is_deepspeed(tree: Any) -> bool:
    """Tell whether a tree has keys of DeepSpeed."""
    return isinstance(tree, Mapping) and not {str(name) for name in tree}.isdisjoint(_SECTIONS)


def deepspeed_values(text: str) -> Values:
    """Yield what a configuration says, and what DeepSpeed does by default where it is one.

    Raises ConfigError for a file that is no object of JSON.
    """
    # a repeated key is an error: JSON readers keep the last one silently
    tree = parse_json(text, "settings", distinct=True)
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem("settings", "is no object of JSON", str(tree)[:40], "name a ds_config.json")])
    values = {path: value for name, entries in tree.items() for path, value in flattened(str(name), entries)}
    if is_deepspeed(tree):
        _check_stages(values)
        yield from _split(values)
        yield from _precision(values)
    # these were said above, in terms of the stage
    handled = (_STAGE, _OVERLAP, _PREFETCH, *_FORMATS)
    yield from ((path, value) for path, value in values.items() if path not in handled and not _is_left(path, value))


def _is_left(path: str, value: Any) -> bool:
    """Tell whether a value is the sequences of a step that follow from those of a GPU."""
    return path == _BATCH and value == AUTO


def _check_stages(values: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed refuses of stages of ZeRO. Raises ConfigError."""
    stage = values.get(_STAGE, 0)
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage <= _WEIGHTS:
        raise ConfigError([Problem(f"settings.{_STAGE}", "is no stage of ZeRO", stage, "write 0, 1, 2 or 3")])
    # gradients of a pipeline accumulate over micro-batches, which a split would send each time
    if stage >= _GRADIENTS and _is_several(values.get("pipeline.stages")):
        rule = "splits gradients, which DeepSpeed refuses with a pipeline (pipeline.stages)"
        raise ConfigError([Problem(f"settings.{_STAGE}", rule, stage, "write stage 1, or leave the pipeline out")])


def _is_several(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _split(values: Mapping[str, Any]) -> Values:
    """Yield what replicas split, and how its exchange runs."""
    stage = values.get(_STAGE, 0)
    yield _STAGE, stage
    # the option is accepted and has no effect: reported, and not read
    if stage == 0 and values.get(_OVERLAP):
        yield f"{_OVERLAP} {values[_OVERLAP]} ({_NO_ZERO})", None
    elif _OVERLAP in values:
        yield _OVERLAP, values[_OVERLAP]
    if stage == _WEIGHTS:
        # a bucket of 0 elements switches prefetching off
        yield _PREFETCH, values.get(_PREFETCH) != 0
    elif _PREFETCH in values:
        yield f"{_PREFETCH} {values[_PREFETCH]} (of stage 3 alone)", None


def _precision(values: Mapping[str, Any]) -> Values:
    """Yield the format that is on, or else one that the caller fills in, or that all are off."""
    formats = {path: values[path] for path in _FORMATS if path in values}
    chosen = [path for wanted in (True, AUTO) for path, value in formats.items() if value == wanted]
    if chosen:
        yield chosen[0], formats[chosen[0]]
    elif formats:
        yield _FORMATS[-1], formats.get(_FORMATS[-1], False)


# What follows


def overlap(facts: Mapping[str, tuple[str, Any]], plan: dict[str, Any]) -> str:
    """Put into a plan what runs beside compute, by its stage of ZeRO; what of it changes a step and no plan has."""
    stage = get_path(plan, "parallel.zero")
    if stage is None:
        return ""
    # the default of DeepSpeed: on for stage 3, else off
    name, is_beside = facts.get("overlap_comm", (_OVERLAP, stage == _WEIGHTS))
    # from stage 2 on gradients are split, and the model always reduces them during the backward pass
    if stage < _GRADIENTS:
        put_in(plan, "parallel.reductions", "beside" if is_beside and stage else "after")
    if stage == _WEIGHTS and not is_beside:
        put_in(plan, "parallel.prefetch", False)
    return f"{name} {is_beside} ({_NOT_BESIDE})" if stage >= _GRADIENTS and not is_beside else ""


_KNOBS = ("run.batch", "run.micro_batches", "parallel.dp")
"""Knobs whose product is the sequences of a step: of a GPU at once, accumulated, and replicas."""


def batches(facts: Mapping[str, tuple[str, Any]], plan: dict[str, Any]) -> str:
    """Put into a plan the factor of the sequences of a step that it leaves open; without these, nothing accumulates.

    Raises ConfigError where they do not fit, or two factors are open.
    """
    numbers = {path: value for path in _KNOBS if (value := get_path(plan, path)) is not None}
    if "step_batch" not in facts:
        if _KNOBS[0] in numbers and _KNOBS[1] not in numbers:
            put_in(plan, _KNOBS[1], 1)
        return ""
    name, total = facts["step_batch"]
    if not isinstance(total, int) or isinstance(total, bool) or total < 1:
        raise ConfigError([Problem(f"settings.{name}", "is no whole number from 1", total)])
    if _KNOBS[1] not in numbers and _KNOBS[0] not in numbers and _KNOBS[2] in numbers:
        numbers[_KNOBS[1]] = 1  # as DeepSpeed has it
        put_in(plan, _KNOBS[1], 1)
    # one factor follows from the product; two cannot
    open_knobs = [path for path in _KNOBS if path not in numbers]
    if len(open_knobs) > 1:
        rule = f"is {' x '.join(_KNOBS)}, and {' and '.join(open_knobs)} are open"
        raise ConfigError([Problem(f"settings.{name}", rule, total, f"write {open_knobs[-1]}=<value>")])
    product = 1
    for number in numbers.values():
        product *= number if isinstance(number, int) and number > 0 else 1
    if total % product or (not open_knobs and total != product):
        factors = " x ".join(f"{path} = {number}" for path, number in numbers.items())
        rule = f"is not {factors}, or a multiple that {open_knobs[0]} would be" if open_knobs else f"is not {factors}"
        raise ConfigError([Problem(f"settings.{name}", rule, total, "write the numbers of your launch")])
    for path in open_knobs:
        put_in(plan, path, total // product)
    return ""
