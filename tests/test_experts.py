"""Experts, latent attention, and experts and sequences split over GPUs, in whole iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.steps.run.iteration import Iteration
from simulators.steps.run.task_graph import intervals
from simulators.workloads.experts import MixtureOfExperts, distinct_places, largest_normal
from simulators.workloads.model_zoo import model_tree
from tests.iterations import BACKEND, KERNELS, NETWORK, block, laid, made, metrics, step
from tests.support import shipped

SMALL: dict[str, Any] = {
    "kind": "transformer",
    "name": "small",
    "layers": 4,
    "hidden": 512,
    "heads": 8,
    "ffn": 1024,
    "gated": True,
    "vocab": 1000,
}
EXPERTS = {"experts": 16, "experts_per_token": 4, "expert_ffn": 256}
LATENT = {"q_rank": 96, "kv_rank": 64, "rope_dim": 16, "nope_dim": 32, "value_dim": 32}
MODES = st.sampled_from(["training", "prefill", "decode"])


def small(moe: dict[str, Any] | None = None, **per_gpu: Any) -> dict[str, Any]:
    """A gated model of four layers, with experts if `moe` is given."""
    return {**SMALL, **({"moe": moe} if moe else {}), **per_gpu}


def total(iteration: Iteration) -> float:
    """Weights of one GPU."""
    return float(sum(np.sum(np.asarray(part.count) * np.asarray(part.params)) for part in iteration.passes.blocks))


def flop_of_experts(iteration: Iteration) -> float:
    """FLOP of the grouped products of a layer, of both passes."""
    parts = [
        part for part in iteration.passes.parts if part.block.name == "layer" and part.op.name.startswith("expert ")
    ]
    return float(sum(part.spent.flop * np.asarray(part.op.count) for part in parts))


def flop(iteration: Iteration, *without: str) -> float:
    """FLOP of the products of a layer, without some operators and their gradients."""
    parts = [part for part in iteration.passes.parts if part.block.name == "layer" and part.over is None]
    return float(sum(part.spent.flop for part in parts if part.op.name.split()[0] not in without))


# Published values

PARAMETERS = {  # as their makers count, or Hugging Face does
    "deepseek_v3": 671e9,
    "deepseek_v2": 236e9,
    "deepseek_v2_lite": 15.7e9,
    "kimi_k2": 1.026e12,
    "mixtral_8x7b": 46.7e9,
    "mixtral_8x22b": 141e9,
    "qwen3_235b_a22b": 235e9,
    "qwen3_30b_a3b": 30.5e9,
    "gpt_oss_120b": 116.8e9,
    "gpt_oss_20b": 20.9e9,
}
ACTIVE = {"deepseek_v3": 37e9, "kimi_k2": 32e9, "mixtral_8x7b": 12.9e9, "mixtral_8x22b": 39e9, "qwen3_235b_a22b": 22e9}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_public_model_with_experts_has_the_parameters_that_are_published(name: str) -> None:
    assert total(made(model=model_tree(name))) == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_of_a_model_with_experts_costs_two_flop_for_each_weight_that_it_meets(name: str) -> None:
    """Published numbers of active weights count the embedding, which multiplies nothing, or do not."""
    tree = model_tree(name)
    run = {"run.mode": "prefill", "run.batch": 1, "run.sequence_length": 512, "model.causal": True}
    parts = [part for part in made(run, model=tree, kernels="flash").passes.parts if part.over is None]
    products = sum(float(part.times * part.spent.flop) for part in parts if part.op.kind in ("linear", "fc"))
    embeddings = 2 * tree["hidden"] * tree["vocab"]
    assert products / (2 * 512) + embeddings == pytest.approx(ACTIVE[name], rel=0.04)


def test_deepseek_caches_what_it_publishes() -> None:
    """512 + 64 numbers of a token in each of 61 layers, instead of 2 x 128 x 128 in each (arXiv:2412.19437)."""
    run = {"run.mode": "decode", "run.batch": 1, "run.sequence_length": 1000, "run.precision": "bf16"}
    cached = metrics(run, model=model_tree("deepseek_v3"), system="h100_8", kernels="flash")
    assert cached["activation_bytes"] == pytest.approx(61 * (512 + 64) * 1000 * 2)


# Work


@pytest.mark.slow
@given(MODES, KERNELS, st.sampled_from([1, 2, 4]))
def test_one_expert_is_a_dense_layer(mode: str, kernels: str, tp: int) -> None:
    """All but the router and the order of tokens: time, work, weights and collectives."""
    run = {"run.mode": mode, "parallel.tp": tp}
    dense = made(run, model=small(), kernels=kernels)
    single = made(run, model=small({"experts": 1, "experts_per_token": 1, "expert_ffn": 1024}), kernels=kernels)
    assert flop(single, "router", "permute", "unpermute") == pytest.approx(flop(dense), rel=1e-12)
    assert total(single) - 4 * SMALL["hidden"] == pytest.approx(total(dense))
    wires = [[part.op.work for part in iteration.passes.parts if part.over == "tp"] for iteration in (dense, single)]
    assert len(wires[0]) == len(wires[1])
    assert float(single.passes.exchanged_s) == pytest.approx(float(dense.passes.exchanged_s))


@pytest.mark.slow
@given(MODES, st.sampled_from([1, 2, 4, 8, 16]))
def test_experts_split_over_gpus_are_as_much_work_in_all(mode: str, ep: int) -> None:
    """Each of ep data-parallel GPUs has the tokens that its own batch makes, and the busiest a larger share of those
    that experts compute.
    """
    run = {**NETWORK, "run.mode": mode, "run.sequence_length": 1024, "run.batch": 64, "parallel.dp": ep}
    alone = made({**run, "parallel.dp": 1}, model=small(EXPERTS))
    split = made({**run, "parallel.ep": ep}, model=small(EXPERTS))
    tokens = ep * 64 * (1 if mode == "decode" else 1024)
    load = float(MixtureOfExperts(**EXPERTS).busiest_load(ep, tokens))
    assert load >= 1
    assert flop_of_experts(split) == pytest.approx(load * flop_of_experts(alone), rel=1e-6)
    around = [laid(iteration, "layer") - flop_of_experts(iteration) for iteration in (split, alone)]
    assert around[0] == pytest.approx(around[1], rel=1e-6)
    of_experts = float(np.asarray(block(alone).expert_params))
    assert float(np.asarray(block(split).expert_params)) == pytest.approx(of_experts / ep)
    assert total(alone) - total(split) == pytest.approx(4 * of_experts * (1 - 1 / ep))


@given(MODES)
def test_without_expert_parallelism_no_token_leaves_its_gpu(mode: str) -> None:
    exchanged = made({**NETWORK, "run.mode": mode, "parallel.dp": 8}, model=small(EXPERTS))
    assert not [part for part in exchanged.passes.parts if part.over == "ep"]
    split = made({**NETWORK, "run.mode": mode, "parallel.dp": 8, "parallel.ep": 8}, model=small(EXPERTS))
    names = [part.op.name for part in split.passes.parts if part.over == "ep"]
    passes = ["dispatch", "combine", "combine backward", "dispatch backward"]
    assert names == (passes if mode == "training" else passes[:2])
    assert all(float(part.seconds) > 0 for part in split.passes.parts if part.over == "ep")


@pytest.mark.slow
@given(st.floats(0, 3), st.floats(0, 3), st.sampled_from([2, 4, 8, 16]))
def test_a_router_that_balances_worse_takes_longer(better: float, worse: float, ep: int) -> None:
    better, worse = sorted((better, worse))
    run = {**NETWORK, "run.sequence_length": 4096, "parallel.dp": ep, "parallel.ep": ep}
    seconds = [
        float(made(run, model=small({**EXPERTS, "imbalance": imbalance})).seconds) for imbalance in (0.0, better, worse)
    ]
    assert seconds[0] <= seconds[1] * (1 + 1e-9)
    assert seconds[1] <= seconds[2] * (1 + 1e-9)


def test_the_busiest_gpu_is_that_of_loads_drawn_at_random() -> None:
    """Experts' popularities of a gamma distribution, dealt out to 8 GPUs: the equation is within a few percent."""
    random = np.random.default_rng(1)
    loads = random.gamma(1 / 0.5**2, size=(4000, 64))
    busiest = (loads.reshape(-1, 8, 8).mean(axis=2) / loads.mean(axis=1, keepdims=True)).max(axis=1).mean()
    moe = MixtureOfExperts(experts=64, experts_per_token=4, expert_ffn=8, imbalance=0.5)
    assert float(moe.busiest_load(8)) == pytest.approx(busiest, rel=0.03)
    assert [float(largest_normal(n)) for n in (1, 2, 8, 64)] == pytest.approx([0, 0.564, 1.424, 2.381], rel=0.05)


@pytest.mark.parametrize("tokens", [4, 16, 64, 256])
def test_few_tokens_fall_unevenly_on_gpus_without_any_preference(tokens: int) -> None:
    """As draws of 6 experts of 64 for each token do: rows of the busiest of 8 GPUs, and experts that it reads."""
    random = np.random.default_rng(tokens)
    picks = np.argsort(random.random((800, tokens, 64)), axis=2)[:, :, :6].reshape(800, -1)
    counts = np.stack([np.bincount(pick, minlength=64) for pick in picks]).reshape(800, 8, 8)
    busiest = (counts.sum(axis=2) / (tokens * 6 / 8)).max(axis=1).mean()
    active = (counts > 0).mean(axis=2).max(axis=1).mean()
    moe = MixtureOfExperts(experts=64, experts_per_token=6, expert_ffn=8)
    assert float(moe.busiest_load(8, tokens)) == pytest.approx(busiest, rel=0.07)
    assert float(moe.active_experts(tokens, 8)) == pytest.approx(active, rel=0.05)


@pytest.mark.slow
@given(st.sampled_from([(1, 1), (8, 8), (8, 4), (8, 1), (4, 2)]), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_groups_of_experts_bound_the_places_that_a_token_goes_to(groups: tuple[int, int], places: int) -> None:
    """As draws of groups, and of experts in these, do."""
    total_groups, chosen = groups
    expected = float(distinct_places(places, 64, 6, groups=groups))
    random = np.random.default_rng(places)
    counts = []
    for _ in range(3000):
        picked = random.permutation(total_groups)[:chosen]
        experts = np.concatenate([np.arange(64 // total_groups) + group * 64 // total_groups for group in picked])
        counts.append(len(set((random.permutation(experts)[:6] * places // 64).tolist())))
    assert expected == pytest.approx(np.mean(counts), abs=0.08)
    if chosen == total_groups:
        assert expected == pytest.approx(float(distinct_places(places, 64, 6)))


def test_decoding_reads_the_experts_that_some_token_goes_to() -> None:
    run = {"run.mode": "decode", "run.sequence_length": 128}
    read = {}
    for batch in (1, 4, 4096):
        iteration = made({**run, "run.batch": batch}, model=small(EXPERTS))
        (fc1,) = (part for part in iteration.passes.parts if part.op.name == "expert fc1")
        read[batch] = float(np.asarray(fc1.op.work.batch))  # type: ignore[union-attr]
    assert read[1] == pytest.approx(4)
    assert 4 < read[4] < 16
    assert read[4096] == pytest.approx(16)


# Latent attention


@given(MODES, KERNELS, st.sampled_from([1, 2, 4]))
def test_a_gpu_of_tp_holds_its_heads_and_all_latents(mode: str, kernels: str, tp: int) -> None:
    run = {"run.mode": mode, "parallel.tp": tp, "run.sequence_length": 256}
    latent = small(latent=LATENT, vocab=0)
    undivided, part = (made({**run, "parallel.tp": degree}, model=latent, kernels=kernels) for degree in (1, tp))
    hidden, shared = 512, (96 + 64 + 16)
    copied = 4 * (hidden * shared + 96 + 64 + 2 * hidden)
    assert total(part) - copied == pytest.approx((total(undivided) - copied) / tp)
    assert float(part.seconds) > 0


@pytest.mark.slow
@given(st.sampled_from(["training", "prefill", "decode"]), st.integers(1, 2000), st.floats(0, 1), st.booleans())
def test_a_window_computes_and_caches_no_more_than_all_tokens(
    mode: str, window: int, share: float, causal: bool
) -> None:
    """And as much as all where it is as long as the sequence."""
    run = {"run.mode": mode, "run.sequence_length": 1000}
    options: list[dict[str, Any]] = [{}, {"window": window, "windowed": share}, {"window": 1000, "windowed": share}]
    every, windowed, wide = (metrics(run, model=small(causal=causal, **widths), kernels="flash") for widths in options)
    for name in ("flop", "activation_bytes", "iteration_s"):
        assert windowed[name] <= every[name] * (1 + 1e-9)
        assert causal is False or wide[name] == pytest.approx(every[name])
    if mode == "decode":
        cached = 1 - share + share * min(window, 1000) / 1000
        assert windowed["activation_bytes"] == pytest.approx(every["activation_bytes"] * cached)


# Splits


@pytest.mark.slow
@given(KERNELS, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.booleans())
def test_a_schedule_of_a_split_model_ends_when_the_iteration_does(kernels: str, cp: int, ep: int, zero: bool) -> None:
    run = {**NETWORK, "parallel.cp": cp, "parallel.ep": ep, "parallel.dp": 4, "parallel.zero": int(zero)}
    moe = {**EXPERTS, "dense_layers": 1, "shared_experts": 1, "imbalance": 0.3}
    iteration = made(run, model=small(moe, latent=LATENT), kernels=kernels)
    assert [part.name for part in iteration.passes.blocks] == ["embedding", "dense layer", "layer", "output"]
    end = max(task.finish_s for task in intervals(iteration))
    assert end == pytest.approx(float(iteration.seconds), rel=1e-9)


@pytest.mark.slow
@given(KERNELS, st.sampled_from([2, 4, 8]), st.booleans())
def test_a_sequence_split_over_gpus_is_as_much_work_in_all(kernels: str, cp: int, causal: bool) -> None:
    run = {"run.sequence_length": 1024, "run.batch": 4}
    alone = made(run, model=small(causal=causal), kernels=kernels)
    split = made({**run, "parallel.cp": cp}, model=small(causal=causal), kernels=kernels)
    assert laid(split, "layer") == pytest.approx(laid(alone, "layer") / cp, rel=1e-9)
    assert total(split) == total(alone)
    assert float(split.gradients.dp_s) > 0  # gradients of the same weights
    rings = [part for part in split.passes.parts if part.over == "cp"]
    assert [part.op.name for part in rings] == ["ring", "ring backward"]
    hidden = made({**run, "parallel.cp": cp, "system.node.library.bytes_per_s": 1e15}, model=small(causal=causal))
    assert sum(float(part.seconds) for part in hidden.passes.parts if part.over == "cp") <= sum(
        float(part.seconds)
        for part in made({**run, "parallel.cp": cp}, model=small(causal=causal)).passes.parts
        if part.over == "cp"
    )


def test_gradients_of_experts_are_reduced_over_the_gpus_that_hold_them() -> None:
    """With every expert on one GPU alone only the other weights' gradients are exchanged."""
    run = {"parallel.dp": 8, "run.batch": 8}
    undivided, split = (made({**run, "parallel.ep": ep}, model=small(EXPERTS, vocab=0)) for ep in (1, 8))
    dense = made(run, model=small(ffn=1, vocab=0))
    assert float(dense.gradients.dp_s) < float(split.gradients.dp_s) * 1.2
    assert float(split.gradients.dp_s) < float(undivided.gradients.dp_s) / 2


# Bad inputs

BROKEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a dense model's experts": ("parallel.ep", {"parallel.ep": 2, "parallel.dp": 2}, small()),
    "experts that do not divide": ("parallel.ep", {"parallel.ep": 3, "parallel.dp": 3}, small(EXPERTS)),
    "more experts' GPUs than GPUs": ("parallel.ep", {"parallel.ep": 4, "parallel.dp": 2}, small(EXPERTS)),
    "tokens on every GPU": ("parallel.sequence_parallel", {"parallel.ep": 2, "parallel.tp": 2}, small(EXPERTS)),
    "more experts than there are": ("model.moe.experts_per_token", {}, small({**EXPERTS, "experts_per_token": 17})),
    "groups that do not divide": ("model.moe.groups", {}, small({**EXPERTS, "groups": 3})),
    "groups of too few experts": (
        "model.moe.groups_per_token",
        {},
        small({**EXPERTS, "groups": 8, "groups_per_token": 1}),
    ),
    "dense layers alone": ("model.moe.dense_layers", {}, small({**EXPERTS, "dense_layers": 4})),
    "narrow experts": ("parallel.tp", {"parallel.tp": 8}, small({**EXPERTS, "expert_ffn": 12})),
    "a token split": ("parallel.cp", {"parallel.cp": 2, "run.mode": "decode"}, small()),
    "a sequence that does not divide": ("parallel.cp", {"parallel.cp": 3}, small()),
    "an encoder with experts": ("model.moe", {"model.decoder_layers": 4}, small(EXPERTS)),
    "an encoder with latents": ("model.latent", {"model.decoder_layers": 4}, small(latent=LATENT)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_split_that_cannot_be_is_infeasible_with_rule_and_way_out(case: str) -> None:
    path, overrides, model = BROKEN[case]
    problems = BACKEND.problems(step(overrides, model=model))
    assert [problem.path for problem in problems] == [path]
    assert problems[0].rule
    assert problems[0].way_out


# What a framework launches


LAUNCHED = {"parallel.ep": 4, "parallel.dp": 4, "run.precision": "bf16", "kernels.host_launch_s": 1e-3}
MADE_UP = {"provenance": "derived", "source": "made up"}
SOURCES = {**shipped("kernels")["flash"]["sources"], "experts": MADE_UP, "host_launch_s": MADE_UP}
ONE_BY_ONE = {"router": 20, "moved": 10, "products": 1, "waits": True}


def of_framework(overrides: Mapping[str, Any]) -> Iteration:
    """An iteration of experts on four GPUs with values of kernels set by dotted path."""
    return made(
        {**LAUNCHED, "kernels.sources": SOURCES, **overrides}, system="h100_8", kernels="flash", model=small(EXPERTS)
    )


def test_a_host_that_launches_every_kernel_bounds_a_layer_and_graphs_free_it() -> None:
    experts = {"kernels.experts": ONE_BY_ONE}
    bound, free = (of_framework({**experts, "kernels.graphs": graphs}) for graphs in ([], ["training"]))
    assert float(bound.launch_wait_s) > 0 == float(free.launch_wait_s)
    twice = of_framework({**experts, "kernels.host_launch_s": 2e-3})
    assert float(twice.slot_s) == pytest.approx(2 * float(bound.slot_s), rel=0.05)
    fast = of_framework({**experts, "kernels.host_launch_s": 1e-12})
    assert float(fast.seconds) == pytest.approx(float(free.seconds), rel=1e-6)


def test_what_the_host_waits_for_and_launches_for_each_expert_costs_time_and_a_graph_of_attention_saves_some() -> None:
    seconds = [
        float(of_framework({"kernels.experts": {**ONE_BY_ONE, **change}}).seconds)
        for change in (
            {"waits": False, "products": 0},
            {"products": 0},
            {},
            {"graphed": ["attention"]},
            {"graphed": ["router"]},
        )
    ]
    ahead, waiting, one_by_one, graphed, routed = seconds
    assert ahead <= waiting < one_by_one
    assert graphed < routed < one_by_one


def test_more_passes_over_the_rows_of_experts_take_longer_around_an_all_to_all_on_both_sides() -> None:
    def ordered(exchange: str, orders: float) -> float:
        change = {"kernels.experts": {"exchange": exchange, "orders": orders}, "kernels.host_launch_s": None}
        parts = of_framework(change).passes.parts
        return float(sum(part.spent.seconds for part in parts if "permute" in part.op.name))

    assert ordered("library", 2) < ordered("library", 8) <= ordered("all_to_all", 4)


def test_biases_and_clamps_of_experts_pass_over_their_rows_where_a_model_and_a_framework_have_them() -> None:
    passes = {"forward": 6, "backward": 8, "forward_kernels": 2, "backward_kernels": 4}
    kernels = {"kernels.experts": {"exchange": "all_to_all", "biases": {"all_to_all": passes}, "clamps": passes}}

    def moved(model: Mapping[str, Any], changes: Mapping[str, Any] = kernels) -> dict[tuple[str, str], float]:
        values = {
            **LAUNCHED,
            "run.mode": "training",
            "kernels.sources": SOURCES,
            "kernels.host_launch_s": None,
            **changes,
        }
        built = made(values, system="h100_8", kernels="flash", model=small({**EXPERTS, **model}))
        parts = [part for part in built.passes.parts if part.op.name.startswith(("expert bias", "expert clamp"))]
        return {(part.op.name, part.op.phase): float(part.spent.bytes) for part in parts}

    both = moved({"biased": True, "clamped": True})
    forward = both["expert bias", "forward"]
    assert len(both) == 4
    assert both["expert bias backward", "backward"] == pytest.approx(8 / 6 * forward)
    # gate and up of 256 numbers against 512 of the hidden state
    assert both["expert clamp activation", "forward"] == pytest.approx(forward)
    assert not moved({}) and not moved({"biased": True, "clamped": True}, {"kernels.experts": {"exchange": "hybrid"}})
