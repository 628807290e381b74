"""Settings of a launch that follow from several knobs of a plan, or from its model: what `derived` reads, written.

A fact has a name (`fact` in `conf/data/framework_settings.yaml`) and a value for a plan; None where it says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dse.space import get_path
from dse_deploy.all_reduces import quick_reduce, symmetric_sums, without_custom_sums
from dse_deploy.step_calls import Call
from studies.plan.plan_file import Plan, put_in


@dataclass(frozen=True)
class ModelFacts:
    """What settings need of a model: layers, and whether it has experts and latent attention; None where unknown.

    calls: collectives of its step, none where no step is known. gpu: name of the GPU; num_cus: of it. most_ctas: knob
    of CTAs of an axis -> the largest number that the step may have there, 0 for none; empty where no step is known.
    precision: of its activations.
    """

    layers: int | None = None
    experts: bool = False
    latent: bool = False
    calls: tuple[Call, ...] = ()
    gpu: str = ""
    num_cus: int = 0
    most_ctas: Mapping[str, int] = field(default_factory=dict)
    precision: str = ""

    @classmethod
    def of(cls, tree: Mapping[str, Any] | None) -> ModelFacts:
        """Build from the tree of a step; nothing is known without one."""
        model = {} if tree is None else tree.get("model", {})
        layers = model.get("layers")
        return cls(None if layers is None else int(layers), bool(model.get("moe")), bool(model.get("latent")))


UNKNOWN = ModelFacts()
"""Of no model."""


def put_ctas(plan: dict[str, Any], path: str, ctas: int, facts: ModelFacts) -> str:
    """Put the CTAs of an axis into a plan that has none there; the reason, in words, where the step cannot have them.

    path: of the knob. A limit above what the library takes limits nothing.
    """
    most = facts.most_ctas.get(path)
    if most is not None and ctas > most:
        if most:
            return f"the library takes {most} at most"
        return "the step has no collective there among several GPUs whose rate by CTAs is known"
    if get_path(plan, path) is None:
        put_in(plan, path, ctas)
    return ""


def _degree(plan: Plan, name: str) -> int:
    value = get_path(plan, f"parallel.{name}")
    return value if isinstance(value, int) and value >= 1 else 1


def _is_mixture(plan: Plan, model: ModelFacts) -> bool:
    return model.experts or _degree(plan, "ep") > 1


def _experts_everywhere(plan: Plan, model: ModelFacts) -> bool | None:
    # None and not False: nothing is written for the default
    return True if _degree(plan, "ep") > 1 else None


def _attention_dp(plan: Plan, model: ModelFacts) -> bool | None:
    return True if _is_mixture(plan, model) and _degree(plan, "dp") > 1 else None


def _expert_tp(plan: Plan, model: ModelFacts) -> int | None:
    return _degree(plan, "etp") if _degree(plan, "ep") > 1 else None


def _gpus_of_tp(plan: Plan, model: ModelFacts) -> int | None:
    """GPUs of tp, among which replicas of attention are counted."""
    if get_path(plan, "parallel.tp") is None:
        return None
    # SGLang and TensorRT-LLM count replicas of attention among the GPUs of --tp
    return _degree(plan, "tp") * (_degree(plan, "dp") if _attention_dp(plan, model) else 1)


def _layers(plan: Plan, model: ModelFacts) -> int | None:
    # the number of layers matters in a pipeline alone
    return model.layers if _degree(plan, "pp") > 1 else None


def _virtual(plan: Plan) -> int:
    interleaved = get_path(plan, "parallel.pipeline") == "interleaved"
    # the knob has a value in every plan, and a meaning in an interleaved pipeline only
    return _degree(plan, "virtual_stages") if interleaved else 1


def _counted_ends(plan: Plan) -> int:
    """Ends that count as layers where these are split."""
    return 2 if get_path(plan, "parallel.ends") == "layers" and _degree(plan, "pp") > 1 else 0


def _is_uneven(plan: Plan, model: ModelFacts) -> bool:
    stages = _degree(plan, "pp") * _virtual(plan)
    return model.layers is not None and (model.layers + _counted_ends(plan)) % stages != 0


def _ends_count(plan: Plan, model: ModelFacts) -> bool | None:
    # uneven stages are written as a layout, which places both ends itself
    return True if _counted_ends(plan) and not _is_uneven(plan, model) else None


def _even_virtual_stages(plan: Plan, model: ModelFacts) -> int | None:
    return _virtual(plan) if _virtual(plan) > 1 and not _is_uneven(plan, model) else None


def pipeline_layout(layers: int, stages: int, *, ends: int = 0) -> str:
    """Layers of each (virtual) stage in the words of Megatron-LM: E and L embedding and loss, t a layer, | between.

    Stages differ by a layer at most, the larger ones first. ends: 2 where both count as layers.
    """
    each, more = divmod(layers + ends, stages)
    sizes = [each + (place < more) for place in range(stages)]
    # the embedding and the loss take a layer's place at both ends
    if ends:
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
    parts = ["t" if size == 1 else f"t*{size}" if size else "" for size in sizes]
    parts[0] = f"E{parts[0]}"
    parts[-1] = f"{parts[-1]}L"
    return "|".join(parts)


def _layout(plan: Plan, model: ModelFacts) -> str | None:
    if not _is_uneven(plan, model) or model.layers is None:
        return None
    return pipeline_layout(model.layers, _degree(plan, "pp") * _virtual(plan), ends=_counted_ends(plan))


def _waits_for_messages(plan: Plan, model: ModelFacts) -> bool | None:
    return True if _virtual(plan) > 1 and get_path(plan, "parallel.messages") == "waited" else None


def _recomputed_modules(plan: Plan, model: ModelFacts) -> str | None:
    if get_path(plan, "run.recompute") != "up_projections" or not (model.latent or model.experts):
        return None
    return " ".join([*(["mla_up_proj"] if model.latent else []), "layernorm", *(["moe_act"] if model.experts else [])])


def _exchanged_by(plan: Plan, model: ModelFacts) -> str | None:
    """Kernels of DeepEP, which exchanges beside compute need in vLLM."""
    if get_path(plan, "parallel.exchanges") != "two_micro_batches":
        return None
    # DeepEP has kernels for long messages, and for few tokens
    return "deepep_high_throughput" if get_path(plan, "run.mode") == "prefill" else "deepep_low_latency"


def _overlap_comm(plan: Plan, model: ModelFacts) -> bool | None:
    """Whether DeepSpeed reduces gradients beside the backward pass; nothing without ZeRO."""
    zero, reductions = get_path(plan, "parallel.zero") or 0, get_path(plan, "parallel.reductions")
    # in the model, split gradients are always reduced during the backward pass
    if zero > 1:
        return True
    return None if zero == 0 or reductions is None else reductions == "beside"


def _without_custom_sums(plan: Plan, model: ModelFacts) -> bool | None:
    return without_custom_sums(model.calls, model.precision)


def _symmetric_sums(plan: Plan, model: ModelFacts) -> int | None:
    return 1 if symmetric_sums(model.calls, model.precision) else None


def _quick_reduce_format(plan: Plan, model: ModelFacts) -> str | None:
    quick = quick_reduce(model.calls, model.precision)
    return None if quick is None else quick[0]


def _quick_reduce_mib(plan: Plan, model: ModelFacts) -> int | None:
    quick = quick_reduce(model.calls, model.precision)
    return None if quick is None else quick[1]


OF_CALLS: Mapping[str, Callable[[Plan, ModelFacts], Any]] = {
    "without_custom_sums": _without_custom_sums,
    "symmetric_sums": _symmetric_sums,
    "quick_reduce_format": _quick_reduce_format,
    "quick_reduce_mib": _quick_reduce_mib,
}
"""Facts of the collectives of a step."""
FACTS: Mapping[str, Callable[[Plan, ModelFacts], Any]] = {
    "experts_everywhere": _experts_everywhere,
    "attention_dp": _attention_dp,
    "attention_dp_of_tp": _attention_dp,
    "gpus_of_tp": _gpus_of_tp,
    "expert_tp": _expert_tp,
    "layers": _layers,
    "embedding_counts": _ends_count,
    "loss_counts": _ends_count,
    "even_virtual_stages": _even_virtual_stages,
    "pipeline_layout": _layout,
    "waits_for_messages": _waits_for_messages,
    "recomputed_modules": _recomputed_modules,
    "exchanged_by": _exchanged_by,
    "overlap_comm": _overlap_comm,
    **OF_CALLS,
}
"""Fact -> its value for a plan of a model."""
COVERED: Mapping[str, tuple[str, ...]] = {
    "experts_everywhere": ("parallel.ep",),
    "attention_dp": ("parallel.dp",),
    "attention_dp_of_tp": ("parallel.dp",),
    "gpus_of_tp": ("parallel.tp",),
    "expert_tp": ("parallel.etp",),
    "embedding_counts": ("parallel.ends",),
    "even_virtual_stages": ("parallel.virtual_stages", "parallel.pipeline"),
    "pipeline_layout": ("parallel.virtual_stages", "parallel.pipeline", "parallel.ends"),
    "waits_for_messages": ("parallel.messages",),
    "recomputed_modules": ("run.recompute",),
    "overlap_comm": ("parallel.reductions",),
}
"""Fact -> knobs of a plan that it says."""
