"""Software of a step: stacks by name, steps that train adapters alone, what is computed again, and formats of reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.config.compose import request
from dse.config.options import conf_dir, list_options
from dse.config.yaml_checks import load_yaml
from simulators.costs.expert_exchange import RoutedTokens, kernel_seconds
from simulators.steps.backend import iteration
from simulators.workloads.model_zoo import model_tree, option_tree
from studies.plan.frameworks import tool_facts
from studies.plan.stacks import defaults_of, measured_line, software_line, stack_words
from tests.iterations import metrics, step
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
