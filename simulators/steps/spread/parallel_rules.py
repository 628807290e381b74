"""Rules of layouts: degrees that do not divide, and what is not modelled of experts, latents, sequences, pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dse.space.blocks import Rule
from simulators.hardware.device import Device
from simulators.workloads.compressed import CompressedAttention
from simulators.workloads.experts import MixtureOfExperts
from simulators.workloads.model import Parallel, Run, Transformer

_ROUNDING = 1e-6  # of a sum of shares


def parallel_rules(model: Any, run: Run, parallel: Parallel, **others: bool) -> Iterator[Rule]:
    """Rules between a model and ep and cp. others: whether a design has `quantised` copies, and `lengths`."""
    moe = model.moe if isinstance(model, Transformer) else None
    if moe is not None:
        yield from _moe_rules(model, moe, parallel)
        if parallel.etp > 1:
            yield from _etp_rules(moe, parallel)
    elif parallel.etp > 1:
        rule = "splits experts, and the model has none"
        yield Rule("parallel.etp", True, rule, parallel.etp, way_out="set 1")
    if parallel.ep > 1:
        yield from _ep_rules(moe, run, parallel)
    yield from _exchange_rules(moe, run, parallel)
    if parallel.pipeline == "dualpipe":
        yield from _dualpipe_rules(run, parallel)
    yield from _shard_rules(run, parallel)
    if parallel.ends != "beside":
        how = "count as layers" if parallel.ends == "layers" else "are balanced against layers"
        rule = f"{how} where a model has both: this one has none"
        none = not isinstance(model, Transformer) or not model.vocab or bool(model.decoder_layers)
        yield Rule("parallel.ends", none, rule, parallel.ends, way_out="leave it out")
    if parallel.context != "ring":
        yield from _heads_rules(model, parallel)
    if parallel.cp > 1:
        yield from _cp_rules(model, run, parallel, lengths=others.get("lengths", False))
    if isinstance(model, Transformer):
        yield from _unmodelled(model, parallel, quantised=others.get("quantised", False))
        yield from _compressed_rules(model, run, parallel)
        yield from _pattern_rules(model, run, parallel)


def pass_rules(model: Any, run: Run, parallel: Parallel, *, lengths: bool) -> Iterator[Rule]:
    """Chunks are of prompts, drafts of decode steps, and formats of what is trained, or multiplied, of training."""
    if run.chunk is not None:
        yield from _chunk_rules(model, run, parallel, lengths=lengths)
    drafting = {"run.drafts": run.drafts, "run.acceptance": run.acceptance, "run.draft_share": run.draft_share}
    for path, value in drafting.items():
        if value is not None and run.mode != "decode":
            yield Rule(path, True, "is of decoding", value, way_out=f"set run.mode=decode, or {path}=null")
        elif (value is None) != (run.drafts is None):
            rule = "belongs to speculative decoding, which has all of run.drafts, run.acceptance and run.draft_share"
            yield Rule(path, True, rule, value, way_out=_DRAFTED if run.drafts is not None else "set run.drafts=3")
    if run.activations is not None:
        yield from _activation_rules(model, run)
    if run.scales is not None and run.products not in _SCALED:
        rule = f"are of products in {' or '.join(_SCALED)}"
        yield Rule("run.scales", True, rule, run.scales, way_out="set run.products=fp8, or leave them out")


_DRAFTED = "set run.acceptance=0.7 run.draft_share=0.05, or run.drafts=null"
_SCALED = ("fp8",)


def _chunk_rules(model: Any, run: Run, parallel: Parallel, *, lengths: bool) -> Iterator[Rule]:
    """Chunks divide a prompt, whose keys are those of attention in a cache."""
    reasons = {
        "is of prefill": run.mode != "prefill",
        "is of transformers": not isinstance(model, Transformer),
        "is not modelled of latents, which each chunk would expand again": getattr(model, "latent", None) is not None,
        "is not modelled of attention over compressed tokens": getattr(model, "compressed", None) is not None,
        "is not modelled with parallel.cp > 1": parallel.cp > 1,
        "is not modelled with parallel.split_ctas": bool(parallel.split_ctas),
        "is of prompts of one length": lengths,
    }
    for rule, broken in reasons.items():
        yield Rule("run.chunk", broken, rule, run.chunk, way_out="set run.chunk=null")
    uneven = np.asarray(run.sequence_length) % np.asarray(run.chunk) != 0
    rule = "does not divide a prompt (run.sequence_length = {0})"
    yield Rule("run.chunk", uneven, rule, run.chunk, (run.sequence_length,), "take a divisor")


def _activation_rules(model: Any, run: Run) -> Iterator[Rule]:
    """Inputs of linear layers are kept where a backward pass reads them."""
    reasons = {
        "is of training: inference keeps no activations": run.mode != "training",
        "is of transformers": not isinstance(model, Transformer),
        "is not modelled with run.recompute = half, up_projections or all, which keep other inputs": run.recompute
        not in ("none", "attention"),
    }
    for rule, broken in reasons.items():
        yield Rule("run.activations", broken, rule, run.activations, way_out="set run.activations=null")


def _moe_rules(model: Transformer, moe: MixtureOfExperts, parallel: Parallel) -> Iterator[Rule]:
    """Tokens go to experts that there are, in layers that there are, and tp splits these where ep does not."""
    experts, layers, tp = (np.asarray(n) for n in (moe.experts, model.layers, parallel.tp))
    many = "is more than the experts (model.moe.experts = {0})"
    picked = moe.experts_per_token
    yield Rule("model.moe.experts_per_token", np.asarray(picked) > experts, many, picked, (experts,), "pick fewer")
    groups, chosen = moe.picked_groups
    rule, way = "does not divide the experts (model.moe.experts = {0})", "take a divisor, or 1"
    yield Rule("model.moe.groups", experts % groups != 0, rule, groups, (experts,), way)
    within = experts * chosen // groups
    rule = "leaves {0} experts, but each token picks {1} (model.moe.experts_per_token)"
    few = (chosen > groups) | ((within < np.asarray(picked)) & (chosen < groups))
    yield Rule("model.moe.groups_per_token", few, rule, chosen, (within, picked), "take more groups, at most all")
    dense = moe.dense_layers
    rule = "leaves no layer with experts (model.layers = {0})"
    way = "take fewer, or model.moe=null"
    yield Rule("model.moe.dense_layers", np.asarray(dense) >= layers, rule, dense, (layers,), way)
    if parallel.ep == 1:
        width = np.asarray(moe.expert_ffn)
        rule = "does not divide the experts' width (model.moe.expert_ffn = {0}), which tp splits as ep is 1"
        yield Rule("parallel.tp", width % tp != 0, rule, parallel.tp, (width,), "take a divisor, or set parallel.ep")
    shared = moe.width_of_shared
    rule = "does not divide the width of the shared experts ({0})"
    yield Rule("parallel.tp", shared % tp != 0, rule, parallel.tp, (shared,), "take a divisor")


def _ep_rules(moe: MixtureOfExperts | None, run: Run, parallel: Parallel) -> Iterator[Rule]:
    """ep splits experts, among GPUs of a stage; with tp the tokens of a GPU are its own."""
    ep = parallel.ep
    if moe is None:
        way = "set parallel.ep=1, or take a model with experts: model=mixtral_8x7b"
        yield Rule("parallel.ep", True, "splits experts, and the model has none", ep, way_out=way)
        return
    experts = np.asarray(moe.experts)
    rule = "does not divide the experts (model has {0})"
    yield Rule("parallel.ep", experts % ep != 0, rule, ep, (experts,), "take a divisor")
    gpus = parallel.stage_gpus
    rule, way = "does not divide tp x cp x dp ({0} GPUs), among which it splits experts", "take a divisor, or more dp"
    yield Rule("parallel.ep", gpus % ep != 0, rule, ep, (gpus,), way)
    if run.mode == "training" and not parallel.sequence_parallel:
        rule = "with parallel.ep > 1 and parallel.tp > 1 would route each token on every GPU of tp"
        several = np.asarray(parallel.tp) > 1
        yield Rule("parallel.sequence_parallel", several, rule, False, way_out="set true, or parallel.tp=1")


def _etp_rules(moe: MixtureOfExperts, parallel: Parallel) -> Iterator[Rule]:
    """etp splits experts that ep spreads, of which all wait for the exchanges."""
    etp, width = parallel.etp, np.asarray(moe.expert_ffn)
    rule = "splits experts that parallel.ep spreads: with parallel.ep = 1 parallel.tp splits them"
    yield Rule("parallel.etp", parallel.ep == 1, rule, etp, way_out="set 1, or parallel.ep > 1")
    rule = "does not divide the experts' width (model.moe.expert_ffn = {0})"
    yield Rule("parallel.etp", width % etp != 0, rule, etp, (width,), "take a divisor")
    gpus = parallel.stage_gpus
    rule = "times parallel.ep = {0} does not divide tp x cp x dp ({1} GPUs), among which experts are split"
    uneven = gpus % (etp * parallel.ep) != 0
    yield Rule("parallel.etp", uneven, rule, etp, (parallel.ep, gpus), "take a divisor, or more dp")
    rule = "is not modelled with overlapped exchanges"
    yield Rule("parallel.etp", parallel.exchanges != "waited", rule, etp, way_out="set 1, or parallel.exchanges=waited")


def _shard_rules(run: Run, parallel: Parallel) -> Iterator[Rule]:
    """Fewer GPUs than all of dp split states that are split, of a model whose experts are not spread."""
    size, gpus = parallel.shard_gpus, parallel.replicas
    if size is None:
        return
    rule, way = "splits what parallel.zero splits, which is nothing", "set null, or parallel.zero=3"
    yield Rule("parallel.shard_gpus", parallel.zero == 0 or run.mode != "training", rule, size, way_out=way)
    rule = "does not divide cp x dp ({0} GPUs)"
    yield Rule("parallel.shard_gpus", gpus % size != 0, rule, size, (gpus,), "take a divisor")
    rule = "with parallel.ep > 1 is not modelled"
    yield Rule("parallel.shard_gpus", parallel.ep > 1, rule, size, way_out="set null, or parallel.ep=1")


def _heads_rules(model: Any, parallel: Parallel) -> Iterator[Rule]:
    """An all-to-all gives each GPU of cp whole heads, of keys and values that are not latents."""
    path, cp = "parallel.context", parallel.cp
    latent = isinstance(model, Transformer) and model.latent is not None
    rule = "of latent attention is not modelled: it would send keys and values of all heads"
    yield Rule(path, latent, rule, parallel.context, way_out="set ring")
    if isinstance(model, Transformer) and not latent:
        heads, tp = np.asarray(model.num_heads), np.asarray(parallel.tp)
        rule = (
            "splits the heads of a GPU ({0} over parallel.tp = {1}) over parallel.cp = {2}, which does not divide them"
        )
        uneven = (heads % (tp * cp)) != 0
        yield Rule(path, uneven, rule, parallel.context, (heads, tp, cp), "set ring, or take a divisor as parallel.cp")


def _exchange_rules(moe: MixtureOfExperts | None, run: Run, parallel: Parallel) -> Iterator[Rule]:
    """Exchanges of experts run beside what there is: a shared expert, or another micro-batch."""
    how, path = parallel.exchanges, "parallel.exchanges"
    if how == "waited":
        return
    if moe is None or parallel.ep == 1:
        rule = "hides dispatch and combine of experts, and there are none (parallel.ep = 1)"
        yield Rule(path, True, rule, how, way_out="set waited, or parallel.ep > 1 with a model that has experts")
        return
    if parallel.zero > 1:
        rule = "with weights and gradients that are split is not modelled"
        yield Rule(path, True, rule, how, way_out="set waited, or parallel.zero=1")
    if how == "shared_expert":
        none = np.asarray(moe.shared_experts) == 0
        rule = "hides exchanges behind a shared expert, and the model has none"
        yield Rule(path, none, rule, how, way_out="set two_micro_batches, or waited")
        return
    if how == "one_kernel":  # micro-batches are waited for; which software runs is a rule of the design
        return
    m = np.asarray(run.micro_batches)
    alone = "leaves a micro-batch without another one for parallel.exchanges = two_micro_batches"
    if run.mode == "training":
        yield Rule("run.micro_batches", m < 2, alone, m, way_out="take 2 or more, or parallel.exchanges=waited")
        rule = "runs all forward passes first, and parallel.exchanges = two_micro_batches pairs them with backward ones"
        way = "set 1f1b, or parallel.exchanges=waited"
        yield Rule("parallel.pipeline", parallel.pipeline == "gpipe", rule, parallel.pipeline, way_out=way)
    else:
        way = "take an even number, or parallel.exchanges=waited"
        yield Rule("run.micro_batches", m % 2 != 0, alone, m, way_out=way)


def _dualpipe_rules(run: Run, parallel: Parallel) -> Iterator[Rule]:
    """Micro-batches come from both ends, as many from each, into pipelines of pairs of stages."""
    pp, m = np.asarray(parallel.pp), np.asarray(run.micro_batches)
    rule = "is odd, and DualPipe (parallel.pipeline = dualpipe) pairs the stages of both directions"
    yield Rule("parallel.pp", pp % 2 != 0, rule, pp, way_out="take an even number, or parallel.pipeline=1f1b")
    rule = "is odd or fewer than the {0} that DualPipe needs (2 parallel.pp)"
    way = "take an even number of at least {0}, or parallel.pipeline=1f1b"
    yield Rule("run.micro_batches", (m % 2 != 0) | (m < 2 * pp), rule, m, (2 * pp,), way)
    if parallel.zero > 1:
        rule = "splits weights or gradients while DualPipe holds two copies of them: that is not modelled"
        yield Rule("parallel.zero", True, rule, parallel.zero, way_out="set 0 or 1")


def _cp_rules(model: Any, run: Run, parallel: Parallel, *, lengths: bool) -> Iterator[Rule]:
    """cp splits the sequences of transformers that are trained or prompted, all of one length."""
    cp, length = parallel.cp, np.asarray(run.sequence_length)
    broken = {
        "and only sequences of transformers are": not isinstance(model, Transformer),
        "and decoding has one token of each": run.mode == "decode",
        "and of an encoder and a decoder that is not modelled": bool(getattr(model, "decoder_layers", 0)),
        "and of an epoch of all lengths that is not modelled": lengths,
        "as parallel.split_ctas does": bool(parallel.split_ctas),
    }
    for why, excluded in broken.items():
        yield Rule("parallel.cp", excluded, f"splits sequences, {why}", cp, way_out="set parallel.cp=1")
    rule = "does not divide a sequence (run.sequence_length = {0})"
    uneven = (length % cp != 0) & (not lengths)
    yield Rule("parallel.cp", uneven, rule, cp, (length,), "take a divisor")


def _pattern_rules(model: Transformer, run: Run, parallel: Parallel) -> Iterator[Rule]:
    """Kinds of layers make up all of them, and have what they are made of; states are trained by a known scan."""
    path, pattern = "model.pattern", model.pattern or ()
    if not pattern:
        return
    counted = sum(np.asarray(kind.count) for kind in pattern)
    rule = "has {0} layers in all (model.layers has another number)"
    yield Rule(path, counted != np.asarray(model.layers), rule, None, (counted,), "count its kinds again")
    parts = {
        "state": any(kind.mixer == "state" for kind in pattern),
        "moe": any(kind.feed == "experts" for kind in pattern),
    }
    for name, needed in parts.items():
        missing = needed and getattr(model, name) is None
        yield Rule(path, missing, f"needs model.{name}", None, way_out=f"give model.{name}, or other kinds")
    if not parts["state"] or model.state is None:
        return
    rule = "of layers with a state is not modelled"
    untrained = run.mode == "training" and model.state.groups is None
    yield Rule("run.mode", untrained, f"{rule}: its backward scan", run.mode, way_out="set prefill or decode")
    if run.mode == "training" and run.recompute == "half":
        way = "set run.recompute=all, or none"
        yield Rule("run.recompute", True, "is not modelled of layers with a state", run.recompute, way_out=way)
    yield Rule(
        "parallel.cp", parallel.cp > 1, f"{rule}: cp would cut the scan", parallel.cp, way_out="set parallel.cp=1"
    )
    heads, tp = np.asarray(model.state.heads), np.asarray(parallel.tp)
    uneven = "does not divide the heads of states (model has {0})"
    yield Rule("parallel.tp", (heads > 0) & (heads % tp != 0), uneven, parallel.tp, (heads,), "take a divisor")


def _unmodelled(model: Transformer, parallel: Parallel, *, quantised: bool) -> Iterator[Rule]:
    """What experts and latents are not combined with."""
    names = ("moe", "latent", "compressed", "pattern")
    parts: dict[str, Any] = {f"model.{name}": getattr(model, name) for name in names}
    for path, part in parts.items():
        if part is None:
            continue
        ways = {
            "model.decoder_layers=0": bool(model.decoder_layers),
            "parallel.split_ctas=0": bool(parallel.split_ctas),
            "quantised=none": quantised,
        }
        for way, excluded in ways.items():
            rule = f"is modelled with {way} alone"
            name = "kinds of layers" if path == "model.pattern" else type(part).__name__
            yield Rule(path, excluded, rule, name, way_out=f"set {way}, or {path}=null")


def _compressed_rules(model: Transformer, run: Run, parallel: Parallel) -> Iterator[Rule]:
    """Attention over compressed tokens, and streams of residuals, are of inference without cp and pp."""
    for path, part in (("model.compressed", model.compressed), ("model.streams", model.streams)):
        if part is None:
            continue
        rule = f"of a model with {path} is not modelled"
        yield Rule("run.mode", run.mode == "training", f"training {rule}", run.mode, way_out="set prefill or decode")
        for name, degree in (("cp", parallel.cp), ("pp", parallel.pp)):
            path_there = f"parallel.{name}"
            yield Rule(path_there, np.asarray(degree) > 1, f"{name} {rule}", degree, way_out=f"set {path_there}=1")
    rule = "is not modelled of kinds of layers"
    mixed = model.streams is not None and model.pattern is not None
    yield Rule("model.streams", mixed, rule, model.streams, way_out="set model.streams=null")
    if model.compressed is not None:
        yield from _own_attention_rules(model, model.compressed, parallel)


def _own_attention_rules(model: Transformer, compressed: CompressedAttention, parallel: Parallel) -> Iterator[Rule]:
    """What other attention has is refused beside that over compressed tokens, whose sizes fit one another."""
    path = "model.compressed"
    others = {name: getattr(model, name) for name in ("latent", "window", "pattern", "sinks", "out_gate")}
    for name, part in others.items():
        rule = f"is an attention of its own: model.{name} is not combined with it"
        yield Rule(path, part not in (None, False), rule, "", way_out=f"leave model.{name} out")
    rule = "is not 1: all heads share one key of attention over compressed tokens"
    yield Rule(
        "model.kv_heads", np.asarray(model.num_kv_heads) != 1, rule, model.num_kv_heads, way_out="set model.kv_heads=1"
    )
    shares: Any = sum((np.asarray(layers.share, float) for layers in compressed.layers), np.zeros(()))
    rule = "has shares of layers that add up to {0}, more than all"
    yield Rule(f"{path}.layers", shares > 1 + _ROUNDING, rule, None, (shares,), "lower the shares")
    partly = any(
        layers.index is not None and np.any(np.asarray(layers.index.share) != 1) for layers in compressed.layers
    )
    rule = "has an index of a share of its layers, which is not modelled"
    yield Rule(f"{path}.layers", partly, rule, None, way_out="leave index.share out, or make layers of their own")
    head = np.asarray(model.width_of_head)
    wider = np.asarray(compressed.rope_dim) > head
    rule = "is wider than a head (model.head_dim = {0})"
    way = "take a width within a head"
    yield Rule(f"{path}.rope_dim", wider, rule, compressed.rope_dim, (head,), way)
    groups, tp, heads = (np.asarray(of) for of in (compressed.out_groups, parallel.tp, model.num_heads))
    rule = "does not divide the heads (model has {0})"
    yield Rule(f"{path}.out_groups", heads % groups != 0, rule, compressed.out_groups, (heads,), "take a divisor")
    rule = "does not divide the groups of heads of the output (model has {0})"
    yield Rule("parallel.tp", groups % tp != 0, rule, parallel.tp, (groups,), "take a divisor")


def offload_rules(model: Any, run: Run, parallel: Parallel, system: Device) -> Iterator[Rule]:
    """Layers of transformers that are trained have activations to copy, over a link whose rate is known."""
    if run.offloaded_layers is None:
        return
    reasons: dict[str, Any] = {
        "is of training: inference keeps no activations": run.mode != "training",
        "is of transformers": not isinstance(model, Transformer),
        "with activations that are computed again is not modelled (run.recompute)": run.recompute != "none",
        "is not modelled with parallel.pp > 1": np.asarray(parallel.pp) > 1,
    }
    path = "run.offloaded_layers"
    for rule, broken in reasons.items():
        yield Rule(path, broken, rule, run.offloaded_layers, way_out=f"set {path}=null")
    if system.node.host_link_bytes_per_s is None:
        rule = "is needed by run.offloaded_layers: the rate of a GPU's link to its host in one direction"
        yield Rule("system.node.host_link_bytes_per_s", True, rule, None, way_out="give it with its source")
