"""Software of a step: stacks by name, steps that train adapters alone, what is computed again, and formats of reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.config.compose import request
from dse.config.options import conf_dir, list_options, load_yaml
from simulators.costs.expert_exchange import RoutedTokens, kernel_seconds
from simulators.steps.backend import StepBackend
from simulators.steps.run.blocks import model_weights
from simulators.steps.run.build import iteration
from simulators.workloads.model_zoo import model_tree, option_tree
from studies.plan.stacks import defaults_of, measured_line, software_line, stack_words, tool_facts
from tests.iterations import made, metrics, step
from tests.support import shipped
from validation.plan_matrix import LIMIT_S, answers, questions

LLAMA = model_tree("llama3_8b")


def of_llama(values: dict[str, Any], **parts: Any) -> dict[str, float]:
    parts = {"system": "h100_8", "kernels": "flash", "model": LLAMA, **parts}
    return metrics({"run.precision": "bf16", "run.sequence_length": 2048, **values}, **parts)


@pytest.mark.parametrize("name", list_options("stack"))
def test_software_has_kernels_and_a_tool_that_are_known(name: str) -> None:
    stack = option_tree("stack", name)["stack"]
    assert stack["name"] == name
    assert option_tree("kernels", stack["kernels"])["name"] == stack["kernels"]
    assert stack["tool"] is None or stack["tool"] in tool_facts()
    assert stack["fitted_on"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["system=h100_8"], "vllm"),
        (["system=mi300x_8", "run.mode=decode"], "vllm_rocm"),
        (["run.mode=training"], "megatron_2026"),
        (["system=[mi300x_8,mi355x_8]", "run.mode=training"], "primus"),
        (["kernels=flash"], "ideal"),
    ],
)
def test_a_plan_takes_the_software_of_its_mode_and_machines(words: list[str], name: str) -> None:
    assert stack_words(words) == [f"stack={name}"]
    assert stack_words([*words, "stack=sglang"]) == []
    tree = request(["study=plan", *words, *stack_words(words)]).tree
    assert tree["stack"]["name"] == name
    assert bool(defaults_of(tree)) == (tree["stack"]["tool"] is not None)
    assert tree["stack"]["fitted_on"] in software_line(tree) or words == ["kernels=flash"]
    assert software_line({**tree, "kernels": {"name": "mine"}}) == ""


@pytest.mark.parametrize(
    ("tool", "words", "name"),
    [
        ("torch", ["run.mode=training"], "torchtitan"),
        ("torch", ["run.mode=decode"], "vllm"),
        ("sglang", ["run.mode=decode"], "sglang"),
        ("sglang", ["system=mi300x_8"], "vllm_rocm"),
        ("tensorrt_llm", ["system=h100_8"], "tensorrt_llm"),
        ("megatron", ["run.mode=training"], "megatron_2026"),
        ("torch", ["run.mode=training", "kernels=flash"], "ideal"),
    ],
)
def test_a_plan_that_was_read_is_of_the_software_of_its_settings(tool: str, words: list[str], name: str) -> None:
    assert stack_words(words, tool) == [f"stack={name}"]
    assert stack_words([*words, "stack=primus"], tool) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", list_options("model"))
def test_a_chosen_model_is_the_one_that_is_planned(name: str) -> None:
    composed = request(["study=plan", f"model={name}"])
    assert composed.problems == ()
    assert composed.tree["model"] == model_tree(name)


def test_a_published_measurement_stands_beside_a_step_of_the_same_configuration() -> None:
    published = load_yaml(conf_dir() / "data" / "steps_measured.yaml")["steps"]
    for row in published:
        design = {
            "model": model_tree(row["model"]),
            "system": {"gpu": {"name": row["gpu"]}},
            "run": {"mode": "training", "products": row["products"], "sequence_length": row["sequence_length"]},
            "parallel": {"dp": row["gpus"]},
        }
        assert f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s" in measured_line(design)
        assert measured_line({**design, "parallel": {"dp": 7}}) == ""


@pytest.mark.slow
@given(rank=st.integers(1, 256), more=st.integers(1, 256))
def test_adapters_cost_more_the_wider_and_less_than_training_all(rank: int, more: int) -> None:
    full, narrow, wide = (of_llama({"run.adapters": width}) for width in (None, rank, rank + more))
    assert narrow["iteration_s"] <= wide["iteration_s"] < full["iteration_s"]
    assert narrow["optimizer_s"] < 0.2 * full["optimizer_s"]
    assert narrow["state_bytes"] < wide["state_bytes"] < 0.5 * full["state_bytes"]


def test_frozen_weights_have_no_gradients() -> None:
    design = step({"run.adapters": 16}, system="h100_8", kernels="flash", model=LLAMA)
    parts = iteration(design).passes.parts
    names = [part.op.name for part in parts]
    assert not [name for name in names if name.endswith(" dW")]
    assert "qkv adapter up dB" in names


@pytest.mark.slow
@given(layers=st.integers(0, 40))
def test_layers_that_are_computed_again_lie_between_none_and_all(layers: int) -> None:
    again = of_llama({"run.recompute": "all", "run.recompute_layers": layers})
    none, every = of_llama({}), of_llama({"run.recompute": "all"})
    share = min(layers, 32) / 32
    for name in ("iteration_s", "activation_bytes"):
        assert again[name] == pytest.approx(none[name] + share * (every[name] - none[name]), rel=1e-6)


@given(batch=st.integers(1, 64))
def test_heads_that_read_keys_each_for_itself_take_longer_where_they_share_them(batch: int) -> None:
    values = {"run.mode": "decode", "run.batch": batch}
    shared, apart = (of_llama(values, kernels=name) for name in ("flash", "tensorrt_llm_2023"))
    assert apart["iteration_s"] >= shared["iteration_s"]
    alone = {**LLAMA, "kv_heads": LLAMA["heads"]}
    same = [of_llama(values, kernels=name, model=alone)["iteration_s"] for name in ("flash", "tensorrt_llm_2023")]
    assert same[0] == same[1]


@given(nodes=st.integers(2, 64), more=st.integers(0, 64), tokens=st.integers(1, 16384))
def test_more_nodes_never_take_less_time(nodes: int, more: int, tokens: int) -> None:
    from validation.expert_rows import node_of

    library = node_of("h100_sxm").experts
    assert library is not None
    near, far = (
        kernel_seconds(library.kernels["network"].combine, RoutedTokens(tokens, 14336, 256, 8, 8 * n, n), num_sms=20)
        for n in (nodes, nodes + more)
    )
    assert near <= far * (1 + 1e-12)


def test_a_network_that_is_typed_bounds_what_leaves_a_node() -> None:
    from simulators.hardware.device import Device

    tree = shipped("system")["mi355x_8_roce"]
    tree["node"]["library"]["network_bytes_per_s"] = 1e9
    node = Device.of(tree).node
    exchange = node.exchange()
    assert exchange is not None
    assert exchange.kernels["network"].dispatch.bytes_per_s == node.network()["all_reduce"].bytes_per_s == 1e9


def test_the_matrix_has_all_questions_and_answers_them() -> None:
    assert len(set(questions())) == len(questions()) == 1440
    (answer,) = answers(1)
    assert answer.counts
    assert answer.took_s < LIMIT_S


@pytest.mark.nightly
def test_public_tables_of_amd_and_of_decoding_are_within_the_bounds_that_the_docs_state(
    shared: Callable[[str], Path],
) -> None:
    from validation.amd_tables import amd_figures
    from validation.decode_tables import decode_figures
    from validation.published_tables import read_throughput, throughput_figures

    data = shared("data")
    figures = amd_figures(data) | decode_figures(data) | throughput_figures(read_throughput(data))
    bounds = {"amd_collectives_median": 4, "amd_latency_median": 8, "amd_training_median": 12, "decode_median": 12}
    assert {name for name, bound in bounds.items() if not figures[name] <= bound} == set()


# Layers with states, formats of activations, scales, chunks and drafts

NEMOTRON = model_tree("nemotron3_nano_30b_a3b")


PARTS: dict[str, Any] = {"system": "h100_8", "kernels": "megatron_2026", "model": NEMOTRON}
TRAINED = {"run.precision": "bf16", "run.sequence_length": 4096}


def of_states(values: dict[str, Any], **state: Any) -> dict[str, float]:
    model = {**NEMOTRON, "state": {**NEMOTRON["state"], **state}}
    return of_llama({"run.sequence_length": 4096, **values}, model=model, kernels="megatron_2026")


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_scan_in_chunks_takes_the_flop_of_its_equation(tp: int) -> None:
    """Of each number of the state two products forward and five backward, of which one is computed again."""
    state, tokens = NEMOTRON["state"], 4096
    numbers = state["heads"] * state["key"] * state["value"]
    scans = [
        part for part in made({**TRAINED, "parallel.tp": tp}, **PARTS).passes.parts if "state scan" in part.op.name
    ]
    values, keys = numbers / state["key"], state["groups"] * state["key"]
    inside, scores = values * (state["chunk"] + 64) / 2, keys * state["chunk"]
    flop = {True: 4 * numbers + 2 * inside + 2 * scores, False: 10 * numbers + 6 * inside + 6 * scores}
    for part in scans:
        assert float(part.spent.flop) == pytest.approx(4 * tokens * flop[part.forward] / tp)


@given(groups=st.sampled_from([1, 2, 8, 64]))
def test_more_groups_of_heads_take_longer_in_training(groups: int) -> None:
    values = {"run.batch": 1, "kernels.host_launch_s": 0.0}  # so that no host bounds both
    fewer, more = (of_states(values, groups=number) for number in (groups, 2 * groups))
    assert fewer["iteration_s"] < more["iteration_s"] and fewer["state_bytes"] == more["state_bytes"]


def test_tokens_of_several_sequences_are_put_in_order_before_and_after_a_scan() -> None:
    orders = [
        {
            part.op.name
            for part in made({**TRAINED, "run.batch": batch}, **PARTS).passes.parts
            if "order" in part.op.name
        }
        for batch in (1, 2)
    ]
    assert len(orders[0]) == 0 and len(orders[1]) == 4


def test_products_that_are_not_narrowed_have_no_casts_and_the_rate_of_all_else() -> None:
    kinds = [{**kind, "unnarrowed": [""]} for kind in NEMOTRON["pattern"]]
    narrow, wide = (
        {**TRAINED, "run.products": "fp8", "model.pattern": pattern} for pattern in (NEMOTRON["pattern"], kinds)
    )
    parts = [made(values, **PARTS).passes.parts for values in (narrow, wide, TRAINED)]
    casts, seconds = (
        [[value(part) for part in layers if "output" not in part.block.name] for layers in parts]
        for value in (lambda part: part.op.name.endswith("cast"), lambda part: float(part.seconds))
    )
    assert any(casts[0]) and not any(casts[1])
    assert seconds[1] == seconds[2] and sum(seconds[0]) < sum(seconds[1])
    assert "router cast" not in {part.op.name for part in parts[0]}


SLOW_PRODUCTS = {"run.products": "fp8", "kernels.experts.products": 1}  # so that the host bounds all layers


def test_casts_of_experts_cost_a_host_less_than_products_and_least_where_one_kernel_casts_for_all() -> None:
    apart, together = ({"inputs": 2, "gradients": 2, "transposes": 0, "together": formats} for formats in ([], ["fp8"]))
    waits = [
        of_states({**SLOW_PRODUCTS, "kernels.experts.casts": casts, "kernels.tile_casts": tile})["host_s"]
        for casts, tile in ((1.0, apart), (0.1, apart), (0.1, together), (1.0, together))
    ]
    assert waits[0] > waits[1] > waits[2] == waits[3]


def test_a_merge_adds_its_product_and_norms() -> None:
    merged = [*NEMOTRON["pattern"], {"count": 1, "mixer": "merge", "feed": "none"}]
    plain, more = (
        made({**TRAINED, "model.pattern": kinds, "model.layers": layers}, **PARTS).passes
        for kinds, layers in ((NEMOTRON["pattern"], 52), (merged, 53))
    )
    assert more.of_blocks("params") - plain.of_blocks("params") == 2 * NEMOTRON["hidden"] ** 2
    flop = [
        sum(
            float(part.times * part.spent.flop)
            for part in passes.parts
            if part.op.name.startswith("merge d") or part.op.name == "merge"
        )
        for passes in (plain, more)
    ]
    assert flop == [0, 3 * 2 * 4 * 4096 * 2 * NEMOTRON["hidden"] ** 2]


def test_norms_and_activations_are_computed_again_of_any_transformer() -> None:
    stored, again = (of_states({"run.recompute": what}) for what in ("none", "up_projections"))
    assert stored["activation_bytes"] > again["activation_bytes"] and stored["iteration_s"] < again["iteration_s"]


def test_widths_of_hybrids_make_as_many_weights_as_their_names_say() -> None:
    for name, billions in (("nemotron3_nano_30b_a3b", 31.6), ("nemotron3_super_120b_a12b", 120.7)):
        design = step({"run.mode": "prefill"}, model=model_tree(name))
        counted = model_weights(design.model, design.run, design.kernels)
        assert counted.number / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_graph_of_layers_with_states_saves_launches() -> None:
    spread = {"run.sequence_length": 512, "run.batch": 1, "parallel.dp": 8, "parallel.ep": 8}
    graphs: tuple[list[str], ...] = ([], ["state"], ["state", "attention", "router"])
    waits = [of_states({**spread, "kernels.experts.graphed": graph})["host_s"] for graph in graphs]
    assert waits[0] > waits[1] > waits[2]


@pytest.mark.parametrize("model", ["llama3_8b", "qwen3_30b_a3b", "deepseek_v2_lite"])
def test_kept_inputs_of_eight_bits_save_memory_and_cost_casts_unless_products_have_them(model: str) -> None:
    parts = {"model": model_tree(model), "kernels": "megatron_2026"}
    plain, narrow = (of_llama({"run.activations": name}, **parts) for name in (None, "fp8"))
    assert narrow["activation_bytes"] < plain["activation_bytes"] and narrow["state_bytes"] == plain["state_bytes"]
    assert narrow["iteration_s"] > plain["iteration_s"]
    plain, narrow = (of_llama({"run.activations": name, "run.products": "fp8"}, **parts) for name in (None, "fp8"))
    assert narrow["activation_bytes"] == plain["activation_bytes"] and narrow["iteration_s"] == plain["iteration_s"]


@pytest.mark.parametrize("kernels", ["megatron_2026", "compiled"])
def test_scales_of_blocks_need_fewest_passes_and_those_of_rows_most(kernels: str) -> None:
    seconds = [
        of_llama({"run.products": "fp8", "run.scales": scales}, kernels=kernels)["iteration_s"]
        for scales in ("block", "tensor", "row")
    ]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


@pytest.mark.parametrize("scales", ["block", "tensor", "row", None])
def test_products_of_scaled_blocks_have_constants_of_their_own_where_a_machine_has_some(scales: str | None) -> None:
    run, gpu = {"run.products": "fp8", "run.scales": scales}, shipped("system")["h100_8"]["gpu"]
    constants = gpu["efficiency"]["bf16"]
    slower = {**constants, "compute": constants["compute"] / 2, "sustained": constants["sustained"] / 2}
    assumed = {
        name: {"provenance": "assumed", "source": "this test"} for name in ("efficiency.fp8", "efficiency.fp8_block")
    }
    efficiency = {**gpu["efficiency"], "fp8": constants, "fp8_block": slower}
    values = {"system.gpu.efficiency": efficiency, "system.gpu.sources": {**gpu.get("sources", {}), **assumed}}
    plain, measured = of_llama(run), of_llama({**run, **values})
    if scales == "block":
        assert measured["iteration_s"] > 1.2 * plain["iteration_s"]
    else:
        assert measured["iteration_s"] == pytest.approx(plain["iteration_s"], rel=1e-9)


@pytest.mark.slow
@given(drafts=st.integers(1, 16), acceptance=st.floats(0, 1), share=st.floats(0, 1))
def test_drafts_yield_what_is_accepted_and_cost_their_time(drafts: int, acceptance: float, share: float) -> None:
    decode = {"run.mode": "decode", "run.batch": 4}
    drafting = {"run.drafts": drafts, "run.acceptance": acceptance, "run.draft_share": share}
    plain, drafted = of_llama(decode), of_llama({**decode, **drafting})
    tokens = drafted["tokens_per_s"] * drafted["iteration_s"] / 4
    assert tokens == pytest.approx(sum(acceptance**place for place in range(drafts + 1)))
    assert drafted["iteration_s"] - drafted["draft_s"] >= plain["iteration_s"]
    assert drafted["draft_s"] == pytest.approx(drafts * share * (drafted["iteration_s"] - drafted["draft_s"]))
    assert drafted["activation_bytes"] == plain["activation_bytes"]


@given(power=st.integers(0, 5))
def test_smaller_chunks_of_a_prompt_take_longer_for_the_same_work(power: int) -> None:
    rows = [
        of_llama({"run.mode": "prefill", "run.batch": 1, "run.chunk": chunk}) for chunk in (None, 2048, 2048 >> power)
    ]
    assert rows[0] == rows[1]
    names, less = ("activation_bytes", "state_bytes"), rows[2]
    assert [less[name] for name in names] == [rows[1][name] for name in names]
    assert less["iteration_s"] >= rows[1]["iteration_s"]
    assert less["tokens_per_s"] * less["iteration_s"] == pytest.approx(2048)
    assert less["flop"] == pytest.approx(rows[1]["flop"], rel=0.005)  # logits of each chunk beside


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"run.chunk": 512}, "run.chunk"),
        ({"run.mode": "prefill", "run.chunk": 1000}, "run.chunk"),
        ({"run.mode": "decode", "run.drafts": 2}, "run.acceptance"),
        ({"run.mode": "decode", "run.acceptance": 0.5}, "run.acceptance"),
        ({"run.drafts": 2, "run.acceptance": 0.5, "run.draft_share": 0.1}, "run.drafts"),
        ({"run.mode": "prefill", "run.activations": "fp8"}, "run.activations"),
        ({"run.recompute": "all", "run.activations": "fp8"}, "run.activations"),
        ({"run.scales": "row"}, "run.scales"),
    ],
)
def test_what_a_step_has_no_use_for_is_refused_with_a_way_out(values: dict[str, Any], path: str) -> None:
    problems = StepBackend().problems(step({"run.sequence_length": 2048, **values}, model=LLAMA))
    assert path in [problem.path for problem in problems] and all(problem.way_out for problem in problems)


def test_sinks_and_losses_of_experts_are_kernels_of_training() -> None:
    model = model_tree("gpt_oss_20b")
    for mode, differs in (("training", True), ("prefill", False)):
        values: dict[str, Any] = {"run.mode": mode, "parallel.tp": 1}
        rows = [
            of_llama({**values, **silent}, model={**model, "sinks": sinks}, kernels="megatron_2026")["num_kernels"]
            for sinks, silent in ((True, {}), (None, {}), (True, {"kernels.experts.losses": 0}))
        ]
        assert (rows[0] > rows[1], rows[0] > rows[2]) == (differs, differs)
