"""Whole iterations of models: what arithmetic says of their operators, and how these follow one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dse.values.units import FlopPerSecond
from simulators.hardware.machine import tree_of
from simulators.steps.judge.projection import LAWS, Profile, Size, by_kind, project_layer, serialized_share
from simulators.steps.run.iteration import Iteration
from simulators.steps.run.task_graph import intervals, lower
from simulators.workloads.model_zoo import model_tree
from tests.iterations import (
    BACKEND,
    KERNELS,
    NETWORK,
    OPTIMIZERS,
    block,
    gridded,
    laid,
    made,
    metrics,
    runs,
    shapes,
    single,
    step,
)
from tests.support import number, shipped

LAYERS = st.sampled_from(["none", "attention", "all"])


def wires(iteration: Iteration) -> float:
    """Bytes that a GPU sends in the collectives of tp of a layer."""
    parts = [part for part in iteration.passes.parts if part.block.name == "layer" and part.over == "tp"]
    return float(sum(part.spent.wire_bytes for part in parts))


# Work


@pytest.mark.slow
@given(shapes())
def test_the_flop_of_a_standard_layer_are_the_closed_form(drawn: dict[str, Any]) -> None:
    iteration = made(drawn)
    h, s, b, t = (drawn[name] for name in ("model.hidden", "run.sequence_length", "run.batch", "parallel.tp"))
    forward = 2 * s * b * 12 * h * h / t + 4 * h * s * s * b / t
    assert laid(iteration, "layer", forward=True) == pytest.approx(forward, rel=1e-12)
    assert laid(iteration, "layer") == pytest.approx(3 * forward, rel=1e-12)
    assert laid(made({**drawn, "run.mode": "prefill"}), "layer") == pytest.approx(forward, rel=1e-12)


@pytest.mark.slow
@given(shapes(), st.sampled_from([None, "attention", "all"]), KERNELS)
def test_what_is_computed_again_is_work_of_the_forward_pass(drawn: dict[str, Any], what: str | None, how: str) -> None:
    """Attention in one kernel computes its scores again whether asked or not: half of its forward products."""
    iteration, plain = made({**drawn, "run.recompute": what or "none"}, kernels=how), made(drawn, kernels="fused")
    h, s, b, t = (drawn[name] for name in ("model.hidden", "run.sequence_length", "run.batch", "parallel.tp"))
    attention, forward = 4 * h * s * s * b / t, laid(plain, "layer", forward=True)
    again = {None: 0.0, "attention": attention, "all": forward}[what]
    if shipped("kernels")[how].get("flash_share_of_peak") is not None:
        again = {None: 0.0, "attention": 0.0, "all": forward}[what] + attention / 2
    assert laid(iteration, "layer") == pytest.approx(3 * forward + again, rel=1e-12)


@pytest.mark.slow
@given(shapes())
def test_one_kernel_computes_half_of_causal_attention_and_others_all(drawn: dict[str, Any]) -> None:
    h, s, b, t = (drawn[name] for name in ("model.hidden", "run.sequence_length", "run.batch", "parallel.tp"))
    flash, causal = (
        laid(made({**drawn, "model.causal": is_causal}, kernels="flash"), "layer", forward=True)
        for is_causal in (False, True)
    )
    assert flash - causal == pytest.approx(4 * h * s * b / t * (s - 1) / 2, rel=1e-9, abs=1e-6 * flash)
    fused, same = (
        laid(made({**drawn, "model.causal": is_causal}, kernels="fused"), "layer") for is_causal in (False, True)
    )
    assert fused == same


@pytest.mark.slow
@given(shapes(), st.data())
def test_the_flop_of_any_layer_are_twice_its_weights_a_token_and_the_scores(
    drawn: dict[str, Any], data: st.DataObject
) -> None:
    tp, gated = drawn["parallel.tp"], data.draw(st.booleans())
    kv = data.draw(
        st.sampled_from([n for n in range(tp, drawn["model.heads"] + 1, tp) if drawn["model.heads"] % n == 0])
    )
    ffn, d = tp * data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 300))
    overrides = {"model.kv_heads": kv, "model.ffn": ffn, "model.gated": gated, "model.head_dim": d}
    h, s, b, a = (drawn[name] for name in ("model.hidden", "run.sequence_length", "run.batch", "model.heads"))
    weights = (2 * a + 2 * kv) * d * h + ffn * h * (3 if gated else 2)
    forward = (2 * b * s * weights + 4 * b * s * s * a * d) / tp
    assert laid(made({**drawn, **overrides}), "layer") == pytest.approx(3 * forward, rel=1e-12)


@pytest.mark.slow
@given(shapes())
def test_one_token_after_others_works_as_its_weights_and_the_kept_keys_say(drawn: dict[str, Any]) -> None:
    iteration = made({**drawn, "run.mode": "decode"})
    h, c, b, t = (drawn[name] for name in ("model.hidden", "run.sequence_length", "run.batch", "parallel.tp"))
    assert laid(iteration, "layer") == pytest.approx((24 * b * h * h + 4 * b * c * h) / t, rel=1e-12)
    assert number(block(iteration).kept) == pytest.approx(2 * 2 * b * c * h / t, rel=1e-12)


@pytest.mark.slow
@given(shapes(), st.booleans())
def test_a_layer_sends_four_all_reduces_of_its_activations(drawn: dict[str, Any], split: bool) -> None:
    h, s, b, t = (drawn[name] for name in ("model.hidden", "run.sequence_length", "run.batch", "parallel.tp"))
    sent = wires(made({**drawn, "parallel.sequence_parallel": split}))
    assert sent == pytest.approx(4 * 2 * (t - 1) / t * 2 * b * h * s, rel=1e-12)


@given(shapes(), LAYERS, st.booleans())
def test_activations_take_the_bytes_of_the_published_formulas(drawn: dict[str, Any], again: str, split: bool) -> None:
    """arXiv:2205.05198, equations 1 to 6."""
    iteration = made({**drawn, "run.recompute": again, "parallel.sequence_parallel": split})
    h, s, b, t = (drawn[name] for name in ("model.hidden", "run.sequence_length", "run.batch", "parallel.tp"))
    scores = 0 if again == "attention" else 5 * drawn["model.heads"] * s / (h * t)
    factor = 34 / t + scores if split else 10 + 24 / t + scores
    if again == "all":
        factor = 2 / t if split else 2
    assert number(block(iteration).kept) == pytest.approx(s * b * h * factor, rel=1e-12)


# Published values

PARAMETERS = {  # of those whose source says no number: what their makers call them, or count on Hugging Face
    "llama3_8b": 8.03e9,
    "llama3_70b": 70.6e9,
    "llama3.1_405b": 406e9,
    "llama2_7b": 6.74e9,
    "llama2_13b": 13.02e9,
    "llama2_70b": 68.98e9,
    "mistral_7b": 7.24e9,
    "qwen2.5_7b": 7.62e9,
    "qwen2.5_72b": 72.7e9,
    "qwen3_8b": 8.19e9,
    "qwen3_32b": 32.8e9,
    "gpt3_175b": 174.6e9,
    "bloom_176b": 176.2e9,
    "gemma2_9b": 9.24e9,
    "gemma2_27b": 27.2e9,
    "mt_nlg_530b": 530e9,
    "bert_large": 334e6,
    "palm_540b": 540.35e9,
    "megatron_8.3b": 8.3e9,
    "gpt2_1.5b": 1.558e9,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_public_model_has_the_parameters_that_are_published(name: str) -> None:
    iteration = made(model=model_tree(name))
    params = float(sum(np.asarray(part.count) * np.asarray(part.params) for part in iteration.passes.blocks))
    assert params == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.slow
@given(shapes(), st.sampled_from([1, 3]))
def test_each_gpu_of_tp_holds_its_part_of_the_weights(drawn: dict[str, Any], layers: int) -> None:
    """Norms, and biases after a sum, are whole on each."""
    full = made({**drawn, "parallel.tp": 1, "model.vocab": 240, "model.positions": 0, "model.layers": layers})
    part = made({**drawn, "model.vocab": 240, "model.positions": 0, "model.layers": layers})
    h, t = drawn["model.hidden"], drawn["parallel.tp"]
    shared = layers * (4 + 2) * h + 4 * h
    split = float(full.passes.of_blocks("params")) - shared
    assert float(part.passes.of_blocks("params")) == pytest.approx(split / t + shared, rel=1e-12)


# The order of operators


def finish(iteration: Iteration) -> float:
    return max(task.finish_s for task in intervals(iteration))


@pytest.mark.slow
@given(runs(), KERNELS, OPTIMIZERS, st.sampled_from(["training", "prefill", "decode"]))
def test_a_schedule_of_its_tasks_ends_when_the_iteration_does(
    drawn: dict[str, Any], kernels: str, optimizer: str, mode: str
) -> None:
    drawn |= {"run.mode": mode, "parallel.zero": drawn["parallel.zero"] if mode == "training" else 0}
    iteration = made(drawn, kernels=kernels, optimizer=optimizer)
    assert finish(iteration) == pytest.approx(float(iteration.seconds), rel=1e-9)
    graph, waiting = lower(iteration), iteration.passes.micro_batches > 1
    assert graph.tasks[0].startswith("earlier micro-batches, ") == waiting
    assert len(set(graph.tasks)) == graph.num_tasks
    assert (graph["work"] >= 0).all()


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """A schedule of a pipeline, of messages, sums and reductions, and what dp splits."""
    pp = draw(st.sampled_from([1, 2, 4]))
    return {
        "parallel.pp": pp,
        "run.micro_batches": 2 * pp,
        "parallel.pipeline": draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2"])),
        "parallel.messages": draw(st.sampled_from(["waited", "beside"])),
        "parallel.scatter_gather": draw(st.booleans()),
        "parallel.backward_sums": draw(st.sampled_from(["waited", "beside_weights"])),
        "parallel.reductions": draw(st.sampled_from(["beside", "after"])),
        "parallel.zero": draw(st.integers(0, 3)),
        "parallel.prefetch": draw(st.booleans()),
    }


@pytest.mark.slow
@given(runs(), schedules(), KERNELS)
def test_a_grid_of_schedules_is_its_designs_one_by_one(
    drawn: dict[str, Any], how: dict[str, Any], kernels: str
) -> None:
    axes = {
        "parallel.pp": [1, 2],
        "parallel.dp": [1, 8],
        "run.micro_batches": [2, 4],
        "parallel.virtual_stages": [1, 2],
    }
    design = step({**drawn, **how}, kernels=kernels)
    grid = gridded(design, axes)
    for place, alone in enumerate(single(design, axes)):
        for name, value in alone.items():
            assert grid.metrics[name][place] == pytest.approx(value, rel=1e-12), (name, place)


@pytest.mark.slow
@given(runs(), st.sampled_from([1, 2, 4]))
def test_what_is_exposed_is_what_a_queue_of_reductions_leaves(drawn: dict[str, Any], pp: int) -> None:
    """One reduction after the other, each once the backward pass of its block is done, where nothing contends."""
    iteration = made({**drawn, "parallel.pp": pp, "system.gpu.contention": None})
    clock = free = 0.0
    for bucket in iteration.gradients.buckets:
        for _ in range(round(float(bucket.count))):
            clock += float(bucket.ready)
            free = max(free, clock) + float(bucket.seconds)
    exposed = max(free - clock, 0.0)
    assert float(iteration.gradients.exposed_s) == pytest.approx(
        exposed, rel=1e-9, abs=1e-12 * float(iteration.seconds)
    )


@pytest.mark.slow
@given(runs())
def test_reductions_hide_behind_a_backward_pass_only_while_it_lasts(drawn: dict[str, Any]) -> None:
    drawn |= {"parallel.dp": 8, "parallel.tp": 1, "system.gpu.contention": None}
    iteration = made({**drawn, "system.gpu.flop_vs_bw": 1e3, "system.node.library.bytes_per_s": 1e6})
    assert float(iteration.gradients.exposed_s) == pytest.approx(float(iteration.gradients.dp_s), rel=1e-2)
    fast = made({**drawn, "system.node.library.bytes_per_s": 1e15, "system.node.library.latency_s": 1e-12})
    last = float(fast.gradients.buckets[-1].seconds)
    assert float(fast.gradients.exposed_s) == pytest.approx(last, rel=1e-9)


def test_replay_shows_an_operator_and_its_communication_side_by_side() -> None:
    replay = BACKEND.replay(step({**NETWORK, "parallel.dp": 8, "parallel.tp": 2, "run.batch": 32}))
    lanes = {task.lane for task in replay.intervals}
    assert lanes == {"compute", "tensor-parallel links", "data-parallel links"}
    assert sum(replay.limits.values()) == pytest.approx(1.0)
    alone = BACKEND.replay(step())
    assert {task.lane for task in alone.intervals} == {"compute"}
    hidden = [task for task in replay.intervals if task.lane == "data-parallel links"]
    computed = [task for task in replay.intervals if task.lane == "compute"]
    assert any(a.start_s < b.finish_s and b.start_s < a.finish_s for a in hidden for b in computed)


# Projection from one profile

SIZE = {"run.sequence_length": 1024, "run.batch": 8, "model.hidden": 4096, "parallel.tp": 2}


def profile(overrides: dict[str, Any]) -> tuple[Size, dict[str, Any]]:
    """Seconds of one layer by kind, with heads of one width; and of what size."""
    values = {**SIZE, **overrides}
    plain = {
        "model.heads": None,
        "model.head_dim": 64,
        "model.kv_heads": None,
        "model.ffn": None,
        "model.vocab": 0,
        "model.positions": 0,
    }
    iteration = made({**NETWORK, **plain, **values})
    names = ("model.hidden", "run.sequence_length", "run.batch", "parallel.tp")
    return Size(*(values[name] for name in names)), by_kind(iteration)


@pytest.mark.slow
@given(runs(), KERNELS, OPTIMIZERS)
def test_the_kinds_of_a_layer_are_all_its_time(drawn: dict[str, Any], kernels: str, optimizer: str) -> None:
    iteration = made({**drawn, "model.vocab": 0}, kernels=kernels, optimizer=optimizer)
    layer_s = float(iteration.passes.forward_s + iteration.passes.backward_s + iteration.update.seconds)
    layers = drawn["model.layers"] + drawn["model.decoder_layers"]
    assert float(sum(by_kind(iteration).values())) * layers == pytest.approx(layer_s, rel=1e-12)
    assert set(by_kind(iteration)) == set(LAWS)


@pytest.mark.slow
@given(runs(), st.floats(0.1, 100))
def test_a_projection_to_hardware_that_computes_faster_is_exact(drawn: dict[str, Any], faster: float) -> None:
    drawn |= {"model.vocab": 0, "parallel.tp": 2}
    size = Size(drawn["model.hidden"], drawn["run.sequence_length"], drawn["run.batch"], 2)
    ours = project_layer(Profile(size, by_kind(made(drawn)), int(number(size.tp))), size, faster)
    theirs = by_kind(made({**drawn, "system.gpu.flop_vs_bw": faster}))
    assert {kind: float(value) for kind, value in ours.items()} == pytest.approx(theirs, rel=1e-12)
    assert float(serialized_share(ours)) == pytest.approx(float(serialized_share(theirs)), rel=1e-12)


GROWN = {"run.batch": 16, "run.sequence_length": 2048, "model.hidden": 8192, "parallel.tp": 4}


@pytest.mark.slow
@pytest.mark.parametrize("path", GROWN)
@pytest.mark.parametrize("kind", LAWS)
def test_large_operators_grow_as_their_laws_say(path: str, kind: str) -> None:
    """Within a few per cent: launches and tiles do not scale. Batched products reach one share beyond some length."""
    long = {"run.sequence_length": 2048} if kind == "attention" else {}
    size, seconds = profile(long)
    to, theirs = profile({**long, path: GROWN[path] * (2 if path in long else 1)})
    ours = project_layer(Profile(size, seconds, int(number(size.tp))), to)
    slack = 0.08 if kind == "attention" else 0.03
    assert float(ours[kind]) == pytest.approx(float(theirs[kind]), rel=slack)


@pytest.mark.slow
@given(runs())
def test_reductions_beside_a_backward_pass_only_lengthen_it_and_by_no_more_than_both_take_alone(
    drawn: dict[str, Any],
) -> None:
    drawn |= {"parallel.dp": 8, "parallel.tp": 1, "parallel.zero": 0}
    alone, beside = made({**drawn, "system.gpu.contention": None}), made(drawn)
    assert float(beside.gradients.exposed_s) >= float(alone.gradients.exposed_s) * (1 - 1e-9)
    slowest = min(float(factor) for factor in beside.gradients.slowdowns.backward.values())
    assert 0 < slowest <= 1
    longest = float(beside.passes.backward_s) / slowest + float(beside.gradients.dp_s) / float(
        np.min(beside.gradients.slowdowns.reductions)
    )
    assert float(beside.passes.backward_s + beside.gradients.exposed_s) <= longest * (1 + 1e-9)


# Rates


MACHINES = sorted(shipped("system"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_no_fitted_rate_is_above_one_that_was_measured(name: str) -> None:
    """Sustained rates of the two models of GEMMs are rates of one GPU."""
    gpu = tree_of(name)["gpu"]
    source = gpu.get("sources", {}).get("matrix_flop_per_s_per_cu", {})
    if source.get("provenance") != "measured":
        return
    rate = _number(gpu["matrix_flop_per_s_per_cu"]) * gpu["num_cus"]
    for precision in {"fp16", "bf16"} & set(gpu.get("efficiency", {})):
        share = gpu["efficiency"][precision].get("sustained")
        assert share is None or share * _number(gpu["peak_flop_per_s"][precision]) <= 1.001 * rate


def _number(quantity: str) -> float:
    return float(TypeAdapter(FlopPerSecond).validate_python(quantity))


@pytest.mark.slow
@pytest.mark.parametrize("system", ["mi300x_8", "mi355x_8", "h100_8", "h200_8", "b200_8", "a100_8"])
@pytest.mark.parametrize("model", ["llama3_70b", "llama3_8b"])
def test_no_step_is_faster_than_its_gpus_sustain(system: str, model: str) -> None:
    for mode, batch in (("training", 2), ("prefill", 8), ("decode", 64)):
        run = {"run.mode": mode, "run.batch": batch, "run.sequence_length": 4096, "run.precision": "bf16"}
        columns = metrics({**run, "parallel.tp": 8}, system=system, kernels="flash", model=model_tree(model))
        assert 0 < columns["sustained_share"] <= 1
        assert 0 < columns["flop_utilisation"] <= columns["flop"] / columns["model_flop"]
        assert mode == "training" or columns["flop"] == columns["model_flop"]  # nothing is updated or computed again
        assert columns["tokens_per_s_per_gpu"] == pytest.approx(columns["tokens_per_s"] / 8)
        if (system, mode) == ("mi300x_8", "training"):
            assert columns["flop"] / columns["iteration_s"] < 708e12
