"""Types that are read by name since their layers are known, those refused by name, and `params.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError
from dse_hub.model_file import hub_tree
from dse_hub.types import readable_types, refused_types
from simulators.steps.run.blocks import model_weights
from simulators.workloads.model import Kernels, Run, Transformer
from simulators.workloads.model_zoo import option_tree
from tests.support import drawn

PROMPT = Run(mode="prefill", batch=1, sequence_length=1024, precision="bf16")
ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024}
WIDTHS = {"hidden_size": 2048, "num_hidden_layers": 8, "intermediate_size": 6144, "vocab_size": 1000}


def tree_of(folder: Path, keys: Mapping[str, Any], name: str = "config.json") -> dict[str, Any]:
    (folder / name).write_text(json.dumps(keys))
    return hub_tree(folder / name)


def parameters(tree: Mapping[str, Any]) -> int:
    kernels = Kernels.model_validate(option_tree("kernels", "flash"))
    plain = {name: value for name, value in tree.items() if name != "unread"}
    return int(model_weights(Transformer.model_validate(plain), PROMPT, kernels).number)


def counted(*, dense: int, norms: int, attention: int, experts: int = 0) -> int:
    """Parameters of eight layers by hand. norms: of a layer; attention: beside four products; experts: beside them."""
    hidden, q, kv = 2048, 32 * 128, 4 * 128
    of_layer = norms * hidden + 2 * hidden * q + 2 * hidden * kv + attention
    routed = 129 * 3 * hidden * 1024 + hidden * 128 + experts
    return 8 * of_layer + dense * 3 * hidden * 6144 + (8 - dense) * routed + 2 * 1000 * hidden + hidden


@pytest.mark.parametrize(
    ("keys", "right"),
    [
        (
            {"model_type": "bailing_moe_v2", "first_k_dense_replace": 1, "use_qk_norm": True, "use_bias": False},
            counted(dense=1, norms=2, attention=2 * 128),
        ),
        (
            {"model_type": "exaone_moe", "first_k_dense_replace": 1, "sliding_window": 128},
            counted(dense=1, norms=2, attention=2 * 128),
        ),
        (
            {"model_type": "afmoe", "num_dense_layers": 2, "sliding_window": 2048},
            counted(dense=2, norms=4, attention=2 * 128 + 2048 * 4096, experts=128),
        ),
        (
            {"model_type": "solar_open", "n_routed_experts": 128, "n_shared_experts": 1, "use_qk_norm": False},
            counted(dense=0, norms=2, attention=0),
        ),
    ],
)
def test_types_whose_layers_are_known_have_the_parameters_of_their_layers(
    tmp_path: Path, keys: dict[str, Any], right: int
) -> None:
    assert parameters(tree_of(tmp_path, {**WIDTHS, **ATTENTION, **EXPERTS, **keys})) == right


def test_the_text_of_a_thinker_is_read(tmp_path: Path) -> None:
    text = {**WIDTHS, **ATTENTION, **EXPERTS, "model_type": "qwen3_omni_moe_text"}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "audio_config": {"layers": 2}, "text_config": text}
    omni = {"model_type": "qwen3_omni_moe", "thinker_config": thinker, "talker_config": {"layers": 3}}
    tree = tree_of(tmp_path, omni)
    plain = tree_of(tmp_path, {**text, "model_type": "qwen3_moe"})
    assert parameters(tree) == parameters(plain)
    left_out = [line.partition(": ")[2] for line in tree["unread"] if "is left out" in line]
    assert left_out == [f"{name} (a part that is no text is left out)" for name in ("talker_config", "audio_config")]


@pytest.mark.parametrize("kind", sorted(refused_types()))
def test_types_that_cannot_be_expressed_are_refused_with_what_they_are(tmp_path: Path, kind: str) -> None:
    assert kind not in readable_types()
    keys = {**WIDTHS, **ATTENTION, "model_type": kind}
    for tree in (keys, {"model_type": kind, "text_config": {**keys, "model_type": f"{kind}_text"}}):
        with pytest.raises(ConfigError, match=f"is of {refused_types()[kind][:20]}.*which is not read"):
            tree_of(tmp_path, tree)


@drawn(40)
@given(
    heads=st.sampled_from([8, 32]),
    kv_heads=st.sampled_from([None, 4, 8]),
    experts=st.booleans(),
    window=st.sampled_from([None, 512]),
)
def test_parameters_of_mistral_are_the_configuration_of_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, heads: int, kv_heads: int | None, experts: bool, window: int | None
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    params: dict[str, Any] = {"dim": 1024, "n_layers": 3, "head_dim": 64, "hidden_dim": 3000, "n_heads": heads}
    params |= {"norm_eps": 1e-5, "vocab_size": 32000, "sliding_window": window}
    hub: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 3, "head_dim": 64, "intermediate_size": 3000}
    hub |= {"num_attention_heads": heads, "vocab_size": 32000, "sliding_window": window, "tie_word_embeddings": False}
    hub |= {"num_key_value_heads": kv_heads or heads, "model_type": "mixtral" if experts else "mistral"}
    if kv_heads:
        params["n_kv_heads"] = kv_heads
    if experts:
        params["moe"] = {"num_experts": 8, "num_experts_per_tok": 2}
        hub |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    trees = [tree_of(folder, params, "params.json"), tree_of(folder, hub)]
    costs = [{name: value for name, value in tree.items() if name not in ("note", "name")} for tree in trees]
    assert {**costs[0], "kv_heads": kv_heads or heads} == costs[1]


@pytest.mark.parametrize(
    ("keys", "total"),
    [
        ({"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256}, 8030261248),
        ({"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "vocab_size": 128256}, 70553706496),
    ],
)
def test_parameters_of_meta_have_the_published_number_of_weights(
    tmp_path: Path, keys: dict[str, Any], total: int
) -> None:
    more = {"multiple_of": 1024, "ffn_dim_multiplier": 1.3} if keys["dim"] == 4096 else {"multiple_of": 4096}
    more |= {"ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0}
    assert parameters(tree_of(tmp_path, {**keys, **more}, "params.json")) == total


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"vocab_size": -1, "multiple_of": 256}, "vocab_size.*the tokenizer has it"),
        ({"vocab_size": 100}, "multiple_of.*hidden_dim is missing"),
        ({"vocab_size": 100, "hidden_dim": 64, "q_lora_rank": 4}, "latent attention"),
        (
            {"vocab_size": 100, "hidden_dim": 64, "moe": {"num_experts": 8, "expert_hidden_dim": 4}},
            "of a width of their own",
        ),
    ],
)
def test_parameters_that_do_not_tell_the_layers_are_refused(tmp_path: Path, more: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        tree_of(tmp_path, {"dim": 64, "n_layers": 2, "n_heads": 4, **more}, "params.json")
