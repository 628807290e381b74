"""Knobs of a step that follow from several settings of a launch: replicas from GPUs, virtual stages from layers.

Facts are settings that say no knob by themselves (`fact` in `conf/data/framework_settings.yaml`), by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dse.errors import ConfigError, Problem
from dse.space import get_path
from dse_deploy.deepspeed import batches, overlap
from dse_deploy.shell import is_open
from studies.plan.plan_file import put_in

Facts = Mapping[str, tuple[str, Any]]
"""Fact -> the name of the setting that says it, and its value."""


def derive(facts: Facts, plan: dict[str, Any], possible: Collection[str]) -> list[str]:
    """Put what follows from facts into a plan; settings that change a step, and of which nothing follows.

    A knob that the plan has already stays.

    possible: facts that the tool has settings for. Raises ConfigError where numbers of GPUs or layers do not fit.
    """
    # Megatron-LM cuts experts as it cuts attention unless another degree is given
    if "expert_tp" in possible and "expert_tp" not in facts:
        facts = {**facts, "expert_tp": ("--expert-tensor-parallel-size (as tp, by default)", _degree(plan, "tp"))}
    if problems := open_facts(facts, plan):
        raise ConfigError(problems)
    rules = [*_RULES, *(rule for fact, rule in _RULES_WITH.items() if fact in possible)]
    return [text for rule in rules if (text := rule(facts, plan))]


LAUNCHED = ("gpus", "gpus_per_node", "nodes")
"""Facts that say how many GPUs are launched, and nothing of how a model is split over them."""
_FOLLOWS: Mapping[str, str] = {
    **dict.fromkeys(LAUNCHED, "parallel.dp"),
    "global_batch": "run.micro_batches",
    "layers_per_part": "parallel.virtual_stages",
}


def open_facts(facts: Facts, plan: Mapping[str, Any]) -> list[Problem]:
    """Problems of facts that only a run would know, and of which a knob follows that the plan does not have."""
    missing = {fact: knob for fact, knob in _FOLLOWS.items() if fact in facts and get_path(plan, knob) is None}
    # a total makes GPUs per node irrelevant, even if they are unknown
    counted = LAUNCHED[1:] if "gpus" in facts else ()  # GPUs of the launch, whatever its nodes have
    is_open_there = {fact: fact not in counted and is_open(str(facts[fact][1])) for fact in missing}
    return [
        Problem(f"settings.{facts[fact][0]}", _UNKNOWN, facts[fact][1], f"write {knob}=<value>")
        for fact, knob in missing.items()
        if is_open_there[fact]
    ]


_UNKNOWN = "names what the file does not set"


def _number(facts: Facts, fact: str, knob: str) -> int:
    """A fact that is a number, of which a knob follows. Raises ConfigError."""
    name, value = facts[fact]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        rule = _UNKNOWN if is_open(str(value)) else "is no whole number from 1"
        raise ConfigError([Problem(f"settings.{name}", rule, value, f"write {knob}=<value>")])
    return value


def _is_on(facts: Facts, fact: str) -> bool:
    return facts.get(fact, ("", False))[1] is True


def _degree(plan: Mapping[str, Any], name: str) -> int:
    value = get_path(plan, f"parallel.{name}")
    return value if isinstance(value, int) and value >= 1 else 1


def _whole(path: str, quotient: tuple[int, int], of: str) -> int:
    """The quotient of two numbers. Raises ConfigError where it is not whole."""
    if quotient[1] < 1 or quotient[0] % quotient[1] or quotient[0] < 1:
        rule = f"would be {quotient[0]} / {quotient[1]}, which is not whole: {of}"
        raise ConfigError([Problem(path, rule, way_out=f"write {path}=<value>, or the numbers of your launch")])
    return quotient[0] // quotient[1]


def _attention_replicas(facts: Facts, plan: dict[str, Any]) -> str:
    """Attention of replicas inside the GPUs of tp, as SGLang (dp) and TensorRT-LLM (one a GPU) have it."""
    if _is_on(facts, "attention_dp_of_tp"):
        put_in(plan, "parallel.dp", _degree(plan, "tp"))
    elif not _is_on(facts, "attention_dp"):
        return ""
    # in these tools --tp counts all GPUs of an engine; a plan counts those that share one replica of attention
    gpus, replicas = _degree(plan, "tp"), _degree(plan, "dp")
    put_in(plan, "parallel.tp", _whole("parallel.tp", (gpus, replicas), "GPUs of tp over replicas of attention"))
    if get_path(plan, "parallel.ep") is None and replicas > 1:
        rule = "is missing: each expert would be cut over GPUs of several replicas of attention, as no plan can"
        way = f"write parallel.ep={gpus}, or parallel.ep=1 for a model without experts"
        raise ConfigError([Problem("parallel.ep", rule, way_out=way)])
    return ""


def _experts_of_replicas(facts: Facts, plan: dict[str, Any]) -> str:
    """Experts that vLLM cuts over the GPUs of all replicas where it does not spread them."""
    replicas = _degree(plan, "dp")
    # without expert parallelism vLLM uses tensor parallelism over dp x tp for experts, which no knob has
    if "experts_everywhere" not in facts and replicas > 1 and get_path(plan, "parallel.ep") is None:
        return (
            f"data-parallel-size {replicas} without enable-expert-parallel (each expert of a mixture is cut over all)"
        )
    return ""


def _experts_cut(facts: Facts, plan: dict[str, Any]) -> str:
    """Experts that GPUs of tp cut as well, where fewer of them share the experts of a layer."""
    experts, gpus = _degree(plan, "ep"), _degree(plan, "tp") * _degree(plan, "dp") * _degree(plan, "cp")
    # GPUs over which the tool would cut each expert if it spread none
    inside = gpus if _is_on(facts, "attention_dp") or _is_on(facts, "attention_dp_of_tp") else _degree(plan, "tp")
    if 1 < experts < inside:
        return f"parallel.ep = {experts}: each expert is cut over {inside // experts} GPUs as well"
    return ""


def _experts_of_tp(facts: Facts, plan: dict[str, Any]) -> str:
    """Experts over the GPUs of tp, as SGLang's exchanges between all of them have it."""
    if facts.get("experts_of_tp", ("", "none"))[1] != "none":
        put_in(plan, "parallel.ep", _degree(plan, "tp"))
    return ""


def _experts_everywhere(facts: Facts, plan: dict[str, Any]) -> str:
    """Experts over all GPUs of tp and dp, as vLLM has it."""
    if _is_on(facts, "experts_everywhere"):
        # vLLM derives the degree itself: there is no option for it
        put_in(plan, "parallel.ep", _degree(plan, "tp") * _degree(plan, "cp") * _degree(plan, "dp"))
    return ""


def _replicas(facts: Facts, plan: dict[str, Any]) -> str:
    """Replicas that fill the GPUs of a launch: those of all nodes over tp, cp and pp."""
    knob = "parallel.dp"
    # a degree that was written counts over one that follows
    if get_path(plan, knob) is None and ("gpus" in facts or "gpus_per_node" in facts):
        gpus = _number(facts, "gpus" if "gpus" in facts else "gpus_per_node", knob)
        if "nodes" in facts and "gpus" not in facts:
            gpus *= _number(facts, "nodes", knob)
        # expert parallelism reuses GPUs of dp, so it is no factor
        replica = _degree(plan, "tp") * _degree(plan, "cp") * _degree(plan, "pp")
        put_in(plan, knob, _whole(knob, (gpus, replica), "GPUs of the launch over tp x cp x pp"))
    return ""


def _virtual_stages(facts: Facts, plan: dict[str, Any]) -> str:
    """Parts of the model on each GPU, from its layers and those of a part; one part is no interleaved pipeline."""
    knob = "parallel.virtual_stages"
    if "layers_per_part" in facts and get_path(plan, knob) is None:
        if "layers" not in facts:
            name, way = facts["layers_per_part"][0], "add --num-layers"
            raise ConfigError([Problem(f"settings.{name}", "needs the number of layers", way_out=way)])
        # ends that count as a layer take a place in a part
        layers = _number(facts, "layers", knob) + _is_on(facts, "embedding_counts") + _is_on(facts, "loss_counts")
        parts = _degree(plan, "pp") * _number(facts, "layers_per_part", knob)
        put_in(plan, "parallel.pipeline", "interleaved")
        put_in(plan, knob, _whole(knob, (layers, parts), "layers over pp x layers of a part"))
    # one part on each GPU is the plain pipeline
    if get_path(plan, knob) == 1 and get_path(plan, "parallel.pipeline") == "interleaved":
        del plan["parallel"]["pipeline"], plan["parallel"]["virtual_stages"]
    return ""


def _from_layout(facts: Facts, plan: dict[str, Any]) -> str:
    """Virtual stages, and whether both ends count as layers, from the layers of each stage by name."""
    if "pipeline_layout" not in facts:
        return ""
    name, text = facts["pipeline_layout"]
    sizes = stage_sizes(str(text))
    if sizes is None:
        return f"{name} {text} (stages that differ by more than a layer)"
    stages = _whole("parallel.virtual_stages", (len(sizes), _degree(plan, "pp")), "stages of the layout over pp")
    if stages > 1:
        put_in(plan, "parallel.pipeline", "interleaved")
        put_in(plan, "parallel.virtual_stages", stages)
    if max(sizes) - min(sizes) > 1:  # even once embedding and loss are counted
        put_in(plan, "parallel.ends", "layers")
    return ""


_UNEVEN = 2  # layers, with ends: DeepSeek-V3's published layouts leave its last stage some for heads that predict more


def stage_sizes(text: str) -> list[int] | None:
    """Layers of each stage of Megatron-LM's --pipeline-model-parallel-layout; None where a plan has no such stages."""
    # groups in brackets first, then single letters
    for pattern in (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})"):  # as PipelineParallelLayerLayout unrolls them
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text.replace(",", ""))
    stages = text.split("|")
    sizes = [stage.count("t") for stage in stages]
    # t: layer; E: embedding; L: loss; m: prediction of further tokens
    counted = [sum(stage.count(mark) for mark in "tELm") for stage in stages]
    known = set(text) <= set("tELm|")
    even = max(sizes) - min(sizes) <= 1 or max(counted) - min(counted) <= _UNEVEN
    return sizes if known and even else None


def _ends(facts: Facts, plan: dict[str, Any]) -> str:
    """Both ends that count as layers; a plan has none of them, or both."""
    counts = [_is_on(facts, fact) for fact in ("embedding_counts", "loss_counts")]
    if all(counts):
        put_in(plan, "parallel.ends", "layers")
    return "" if all(counts) or not any(counts) else "one end counts as a layer, and the other does not"


def _messages(facts: Facts, plan: dict[str, Any]) -> str:
    """Messages beside compute, as Megatron-LM has them between virtual stages unless they are switched off."""
    if get_path(plan, "parallel.pipeline") == "interleaved" and get_path(plan, "parallel.messages") is None:
        put_in(plan, "parallel.messages", "waited" if _is_on(facts, "waits_for_messages") else "beside")
    return ""


def _micro_batches(facts: Facts, plan: dict[str, Any]) -> str:
    """Micro-batches of a replica, from the sequences of all."""
    knob = "run.micro_batches"
    if "global_batch" not in facts or get_path(plan, knob) is not None:
        return ""
    replicas, batch = get_path(plan, "parallel.dp"), get_path(plan, "run.batch")
    if replicas is None or batch is None:
        return f"{facts['global_batch'][0]} {facts['global_batch'][1]} (needs parallel.dp and run.batch)"
    sequences = _number(facts, "global_batch", knob), replicas * batch
    put_in(plan, knob, _whole(knob, sequences, "sequences over dp x sequences at once"))
    return ""


def _experts_by_tp(facts: Facts, plan: dict[str, Any]) -> str:
    """Experts that tp cuts as well, as Megatron does where nothing is said."""
    experts = _degree(plan, "ep")
    if experts < 2:
        return ""
    name, cut = facts.get("expert_tp", ("", 1))
    # Megatron-LM spreads experts over all GPUs of a stage
    gpus = _degree(plan, "tp") * _degree(plan, "cp") * _degree(plan, "dp")
    if get_path(plan, "parallel.dp") is not None and gpus % experts:
        return f"parallel.ep = {experts}: does not divide the {gpus} GPUs of a stage, tp x cp x dp (write parallel.dp=)"
    # the cut has to divide what is left of the stage
    if isinstance(cut, int) and cut > 1 and gpus % (experts * cut) == 0:
        put_in(plan, "parallel.etp", cut)
        return ""
    return "" if cut == 1 else f"{name} {cut}"


def _exchanged_by(facts: Facts, plan: dict[str, Any]) -> str:
    """Kernels that exchange tokens: those of DeepEP go with exchanges beside compute, others change a step."""
    name, value = facts.get("exchanged_by", ("", ""))
    is_needed = get_path(plan, "parallel.exchanges") == "two_micro_batches" and str(value).startswith("deepep_")
    return "" if not name or is_needed else f"{name} {value}"


def _split_states(facts: Facts, plan: dict[str, Any]) -> str:
    """What the replicas of Megatron FSDP, or of PyTorch's, split: weights too, where nothing else is said."""
    if not _is_on(facts, "fsdp"):
        return ""
    name, strategy = facts.get("sharding", ("", "optim_grads_params"))
    if strategy not in _SPLIT:
        return f"{name} {strategy}"
    # the place in the list is the stage of ZeRO
    put_in(plan, "parallel.zero", _SPLIT.index(strategy))
    return ""


_SPLIT = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What replicas split, by `zero`."""


def _recompute(facts: Facts, plan: dict[str, Any]) -> str:
    """What a selective recomputation computes again: the core of attention, or modules that are named."""
    if get_path(plan, "run.recompute") != "attention" or "recomputed_modules" not in facts:
        return ""
    name, text = facts["recomputed_modules"]
    modules = set(str(text).split())
    # the default of --recompute-granularity selective
    if modules == {"core_attn"}:
        return ""
    if modules in _AS_UP_PROJECTIONS:
        plan["run"]["recompute"] = "up_projections"
        return ""
    if "core_attn" not in modules:
        del plan["run"]["recompute"]
    return f"{name} {text}"


_AS_UP_PROJECTIONS = (
    *({"mla_up_proj", "layernorm"}, {"mla_up_proj", "layernorm", "moe_act"}),
    {"layernorm", "moe_act"},
)
"""Modules of Megatron-LM's that `recompute=up_projections` computes again, of latent attention, experts, or both."""


def _gathers_beside(facts: Facts, plan: dict[str, Any]) -> str:
    """Gathers of weights beside compute, which a step has where weights are split."""
    if _is_on(facts, "gathers_beside"):
        if get_path(plan, "parallel.zero") == 3:
            put_in(plan, "parallel.prefetch", True)
        else:
            return f"{facts['gathers_beside'][0]} (a step has it where weights are split: parallel.zero=3)"
    return ""


# later rules read knobs that earlier ones put into the plan
_RULES: tuple[Callable[[Facts, dict[str, Any]], str], ...] = (
    _split_states,
    _recompute,
    _experts_of_tp,
    _attention_replicas,
    _experts_everywhere,
    _replicas,
    _from_layout,
    _virtual_stages,
    _micro_batches,
    _experts_by_tp,
    _gathers_beside,
    _exchanged_by,
)

_RULES_WITH: Mapping[str, Callable[[Facts, dict[str, Any]], str]] = {
    "embedding_counts": _ends,
    "waits_for_messages": _messages,
    "experts_everywhere": _experts_of_replicas,
    "attention_dp": _experts_cut,
    "attention_dp_of_tp": _experts_cut,
    "overlap_comm": overlap,
    "step_batch": batches,
}
"""Rules of tools that have a setting for a fact, whether it is set or not."""
