"""Parameters, defaults, kinds of layers and formats of weights of model hubs' files, against published numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.config.options import load_yaml
from dse.errors import ConfigError
from dse_hub import DATA
from dse_hub.model_file import hub_tree
from dse_hub.rules import UnfitValue, evaluate
from dse_hub.types import hub_type, readable_types
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.run.blocks import model_weights
from simulators.workloads.model import Kernels, Run, Transformer
from simulators.workloads.model_zoo import option_tree
from simulators.workloads.public_models import public
from tests.iterations import step

_TOTALS = load_yaml(DATA / "hub_totals.yaml")
_PROMPT = Run(mode="prefill", batch=1, sequence_length=1024, precision="bf16")
DEEPSEEK: Mapping[str, Any] = _TOTALS["models"]["deepseek-ai/DeepSeek-V3"]["config"]
MOE: Mapping[str, Any] = _TOTALS["models"]["Qwen/Qwen3-30B-A3B"]["config"]


def _tree(folder: Path, config: Mapping[str, Any], name: str = "config.json") -> dict[str, Any]:
    path = folder / name
    path.write_text(json.dumps(config))
    return hub_tree(path)


def _weights(tree: Mapping[str, Any], run: Run = _PROMPT) -> Any:
    kernels = Kernels.model_validate(option_tree("kernels", "flash"))
    return model_weights(Transformer.model_validate(tree), run, kernels)


def _metrics(tree: Mapping[str, Any], **values: Any) -> dict[str, float]:
    changed = {
        "run.mode": "decode",
        "run.batch": 1,
        "run.sequence_length": 4096,
        "parallel.tp": 8,
        "run.precision": "bf16",
    }
    paths = {**changed, **{path.replace("_of_", "."): value for path, value in values.items()}}
    design = step(paths, model=dict(tree), system="h200_8", kernels="flash")
    return {name: float(value) for name, value in metrics_of(design).items()}


@pytest.mark.slow
def test_a_model_has_the_parameters_that_are_published(tmp_path: Path) -> None:
    for name in _TOTALS["models"]:
        entry = _TOTALS["models"][name]
        assert entry["by"] in _TOTALS["publications"]
        assert _weights(_tree(tmp_path, entry["config"])).number == pytest.approx(entry["total"], rel=1e-3)


def test_at_least_75_totals_are_published_and_not_measured() -> None:
    assert sum(entry["by"] != "measured" for entry in _TOTALS["models"].values()) >= 75


@pytest.mark.slow
def test_a_file_that_names_its_type_alone_has_the_defaults_of_the_type_or_says_what_is_missing(tmp_path: Path) -> None:
    """A default is never that of another type: a type whose class is not known has none."""
    for name in readable_types():
        try:
            tree = _tree(tmp_path, {"model_type": name})
        except ConfigError as error:
            assert all("missing" in problem.rule for problem in error.problems)
            continue
        assert hub_type(name).defaults
        assert "by default of its type" in tree["note"]


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ({"model_type": "gemma"}, "head_dim", 256),
        ({"model_type": "gemma2"}, "tied", True),
        ({"model_type": "llama"}, "tied", False),
        ({"model_type": "qwen3", "hidden_size": 2048, "num_attention_heads": 16}, "head_dim", 128),
        ({"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16}, "kv_heads", 16),
        ({"model_type": "mistral", "num_attention_heads": 16}, "kv_heads", 8),
        ({"model_type": "qwen3", "head_dim": None, "num_attention_heads": 64}, "head_dim", 64),
        ({"model_type": "gpt2"}, "ffn", 3072),
    ],
)
def test_a_missing_key_has_the_default_of_its_type(
    tmp_path: Path, config: dict[str, Any], name: str, value: object
) -> None:
    assert _tree(tmp_path, config)[name] == value


@pytest.mark.parametrize(
    ("keys", "billions"),
    [
        ({}, 30.53),
        ({"mlp_only_layers": [0, 1, 2, 3]}, 28.27),
        ({"decoder_sparse_step": 2}, 16.94),
        ({"mlp_only_layers": list(range(48))}, 3.34),
    ],
)
def test_layers_without_experts_are_counted_as_such(tmp_path: Path, keys: dict[str, Any], billions: float) -> None:
    assert _weights(_tree(tmp_path, {**MOE, **keys})).number / 1e9 == pytest.approx(billions, abs=0.01)


def test_layers_of_several_kinds_are_spread_over_the_stages_of_a_pipeline(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {**MOE, "decoder_sparse_step": 2})
    alone, halves = (_metrics(tree, parallel_of_pp=pp, parallel_of_tp=1) for pp in (1, 2))
    assert halves["state_bytes"] == pytest.approx(alone["state_bytes"] / 2, rel=0.06)  # the ends are on one each


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-35B-A3B", "nvidia/Nemotron-H-56B-Base-8K", "LFM2-1.2B"])
def test_a_hybrid_runs_in_inference_and_in_training_where_its_backward_scan_is_known(tmp_path: Path, name: str) -> None:
    tree = _tree(tmp_path, _TOTALS["models"][name]["config"])
    short, long = (_metrics(tree, run_of_sequence_length=length) for length in (4096, 8 * 4096))
    growth = long["activation_bytes"] / short["activation_bytes"]
    assert 1 < growth < 8  # states do not grow with the tokens before, keys and values do
    problems = StepBackend().problems(step({"run.mode": "training"}, model=tree))
    untrained = [] if name.startswith("nvidia") else ["run.mode"]
    assert [problem.path for problem in problems if problem.value == "training"] == untrained


def test_an_indexer_makes_long_contexts_cheaper_to_read(tmp_path: Path) -> None:
    sparse = _TOTALS["models"]["deepseek-ai/DeepSeek-V3.2"]["config"]
    trees = [_tree(tmp_path, config) for config in (DEEPSEEK, sparse)]
    plain, indexed = (
        [_metrics(tree, run_of_sequence_length=length, run_of_batch=64)["iteration_s"] for length in (1024, 65_536)]
        for tree in trees
    )
    assert indexed[0] > plain[0]
    assert indexed[1] < plain[1]


def test_a_part_that_sees_is_left_out_and_named(tmp_path: Path) -> None:
    text = {"model_type": "qwen3_vl", "text_config": {**MOE, "model_type": "qwen3_vl_moe_text"}}
    tree = _tree(tmp_path, {**text, "vision_config": {"depth": 27}})
    assert _weights(tree).number == _weights(_tree(tmp_path, MOE)).number
    assert any("vision_config" in key for key in tree["unread"])


def test_a_kind_of_layer_that_is_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="routed_expert_hidden_size"):
        _tree(tmp_path, {"model_type": "kimi_linear", "routed_expert_hidden_size": 3584})


# Formats


def _quantised(folder: Path, section: Any, config: Mapping[str, Any] = DEEPSEEK) -> dict[str, Any]:
    return _tree(folder, {**config, "quantization_config": section})


def _bytes_a_weight(tree: Mapping[str, Any]) -> float:
    return _metrics(tree, parallel_of_tp=1)["bytes_per_parameter"]


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "strategy": "group"}
_SPARED = ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*", "lm_head"]
READ: Mapping[str, tuple[Any, float]] = {
    "fp8 in blocks": (FP8, 1.00),
    "fp8 of tensors": ({"quant_method": "fp8"}, 1.00),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, 1.00),
    "int4 experts of compressed-tensors": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": INT4}}, "ignore": _SPARED},
        0.0255 * 2 + 0.9745 * 4.5 / 8,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, (4 + 20 / 128) / 8),
    "auto-round": ({"quant_method": "intel/auto-round", "bits": 8, "group_size": -1, "sym": True}, 1.0),
    "gptq": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.self_attn*"]},
        0.0199 * 2 + 0.9801 * 4.5 / 8,
    ),
    "modelopt without a method": ({"producer": {"name": "modelopt"}, "quant_algo": "FP8", "exclude_modules": []}, 1.0),
    "mxfp4 of experts": ({"quant_method": "mxfp4", "modules_to_not_convert": []}, 0.0255 * 2 + 0.9745 * 4.25 / 8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5 / 8),
    "int8 of bitsandbytes": ({"load_in_8bit": True}, 1.0),
    "quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        4.25 / 8,
    ),
}


@pytest.mark.parametrize("case", READ)
def test_weights_take_the_bytes_of_their_format(tmp_path: Path, case: str) -> None:
    section, expected = READ[case]
    assert _bytes_a_weight(_quantised(tmp_path, section)) == pytest.approx(expected, rel=0.012)


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "hqq"},
        {"quant_method": "modelopt", "quant_algo": "INT2"},
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": "4"}}}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "INT3"},
        {"quant_method": "quark", "global_quant_config": {}},
        ["fp8"],
        {"bits": 4},
    ],
    ids=str,
)
def test_a_section_that_is_not_understood_is_refused_with_a_way_out(tmp_path: Path, section: Any) -> None:
    with pytest.raises(ConfigError) as error:
        _quantised(tmp_path, section)
    assert "quantization_config" in error.value.problems[0].path
    assert "run.weights=" in str(error.value.problems[0].way_out)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["quant_method", "config_groups", "weights", "bits", "ignore", "quant_algo", "g"]),
                inner,
            )
        ),
        max_leaves=8,
    ),
    st.sampled_from(["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "bitsandbytes", "quark", "mxfp4"]),
)
def test_any_section_is_read_or_refused_and_never_breaks(tmp_path_factory: Any, section: Any, method: str) -> None:
    quantisation = {**section, "quant_method": method} if isinstance(section, dict) else section
    try:
        _quantised(tmp_path_factory.mktemp("hub"), quantisation)
    except ConfigError as error:
        assert error.problems


def test_formats_that_stand_beside_the_file_are_read(tmp_path: Path) -> None:
    section = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(section))
    tree = _tree(tmp_path, DEEPSEEK)
    assert tree["kv_format"]["name"] == "fp8"
    assert _bytes_a_weight(tree) == pytest.approx(1.0, rel=0.01)


def test_layers_that_keep_16_bits_count_by_their_weights(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp" for layer in range(24)]
    tree = _quantised(tmp_path, {"quant_method": "fp8", "modules_to_not_convert": names}, MOE)
    assert tree["stored"]["experts"][0]["share"] == pytest.approx(0.5)
    assert tree["stored"]["attention"][0]["share"] == 1


def test_deepseek_in_fp8_takes_60_percent_of_eight_h200(tmp_path: Path) -> None:
    assert 0.55 <= _metrics(_quantised(tmp_path, FP8))["memory_share"] <= 0.65


def test_training_keeps_the_width_of_its_precision_whatever_the_file_says(tmp_path: Path) -> None:
    config = {**MOE, "num_hidden_layers": 4}
    plain, quantised = _tree(tmp_path, config), _quantised(tmp_path, FP8, config)
    runs = [_metrics(tree, run_of_mode="training", parallel_of_tp=1) for tree in (plain, quantised)]
    assert runs[0] == runs[1]


# Expressions


def test_an_expression_reads_keys_as_numbers_choices_and_entries() -> None:
    keys = {"a": 3, "list": [1, 0], "sub": {"b": 5}}
    assert evaluate("2 * a + missing", keys.get) == 6
    assert evaluate("'x' if list_[1] == 0 else 'y'", {"list_": [1, 0]}.get) == "x"
    assert evaluate("sub['b'] // 2", keys.get) == 2
    assert evaluate("a in [1, 3] and not missing", keys.get) is True


@pytest.mark.parametrize(
    ("text", "keys"),
    [("a + 1", {"a": "3"}), ("a[5]", {"a": [1]}), ("a // b", {"a": 1, "b": 0}), ("a * a * a", {"a": 2**40})],
)
def test_a_value_that_an_expression_cannot_use_is_unfit(text: str, keys: Mapping[str, Any]) -> None:
    with pytest.raises(UnfitValue):
        evaluate(text, keys.get)


def test_all_types_that_ship_by_name_are_read() -> None:
    shipped = {"bert", "bloom", "falcon", "gemma2", "gpt2", "gpt_neox", "opt", "t5", "llama", "mistral", "mixtral"}
    assert shipped <= set(readable_types())
    assert len(public()) > 10
    assert all(hub_type(name).alternatives("hidden") for name in readable_types())
