"""Models by name on the command line, and from the `config.json` of a model hub. Files here are our own writing."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.config.compose import request
from dse.errors import ConfigError
from dse.study.influence import check_typed
from dse.study.plan import plan
from dse_hub.model_file import hub_tree
from dse_hub.quantised import Unread, matcher_of
from dse_hub.types import readable_types
from simulators.workloads.model_zoo import model_tree
from tests.iterations import made
from tests.support import REPOSITORY

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN = {
    **LLAMA,
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN_MOE = {
    **QWEN,
    "model_type": "qwen3_moe",
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_hidden_layers": 94,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "decoder_sparse_step": 1,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
KIMI = {
    **DEEPSEEK,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 151936}
SIZES["intermediate_size"] = 22016
GPT2 = {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257}
NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "vocab_size": 50432,
    "tie_word_embeddings": False,
}
SAME: dict[str, dict[str, Any]] = {
    "llama3_8b": LLAMA,
    "qwen3_8b": QWEN,
    "deepseek_v3": DEEPSEEK,
    "qwen3_235b_a22b": QWEN_MOE,
    "mixtral_8x7b": MIXTRAL,
    "gpt_oss_120b": OSS,
    "kimi_k2": KIMI,
}
PARAMETERS = {"gpt2": (GPT2, 1.558e9), "gpt_neox": (NEOX, 20.6e9)}


def written(folder: Path, config: Any, name: str = "config.json") -> Path:
    """A file of a hub."""
    path = folder / name
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", SAME)
def test_a_hubs_file_is_the_public_model(tmp_path: Path, name: str) -> None:
    ours, theirs = model_tree(name), hub_tree(written(tmp_path, SAME[name]))
    runs = [made({"run.mode": mode}, model=tree) for tree in (ours, theirs) for mode in ("training", "decode")]
    numbers = [(float(run.seconds), *(float(np.sum(block.params)) for block in run.passes.blocks)) for run in runs]
    for of_ours, of_theirs in zip(numbers[:2], numbers[2:], strict=True):  # norms and biases are those of the type
        assert of_ours == pytest.approx(of_theirs, rel=1e-3)


@pytest.mark.parametrize("kind", PARAMETERS)
def test_an_older_type_has_the_parameters_that_are_published(tmp_path: Path, kind: str) -> None:
    config, published = PARAMETERS[kind]
    run = made(model=model_tree(str(written(tmp_path, config))))
    assert float(sum(np.sum(block.count * np.asarray(block.params)) for block in run.passes.blocks)) == pytest.approx(
        published, rel=0.01
    )


def test_a_file_of_a_model_that_also_sees_holds_its_text_part_below(tmp_path: Path) -> None:
    inner = hub_tree(written(tmp_path, {"model_type": "llava", "text_config": LLAMA}))
    assert inner["hidden"] == 4096


_MOSTLY = (["sliding_attention"] * 3 + ["full_attention"]) * 8


@pytest.mark.parametrize(
    ("keys", "window", "share"),
    [
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "qwen2", "sliding_window": 4096}, None, None),  # not used unless it says so
        ({"model_type": "mistral"}, 4096, 1.0),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 24}, 4096, 0.25),
        ({"model_type": "gemma2", "sliding_window": 512}, 512, 0.5),
        ({"model_type": "gemma3_text", "sliding_window": 512}, 512, 27 / 32),
        ({"model_type": "olmo3", "sliding_window": 512, "layer_types": _MOSTLY}, 512, 0.75),
    ],
)
def test_a_window_of_attention_is_read_with_the_share_of_layers_that_have_it(
    tmp_path: Path, keys: dict[str, Any], window: int | None, share: float | None
) -> None:
    tree = hub_tree(written(tmp_path, {**LLAMA, **keys}))
    assert (tree.get("window"), tree.get("windowed")) == (window, share)


def test_a_model_is_called_what_its_file_or_folder_is_called(tmp_path: Path) -> None:
    assert hub_tree(written(tmp_path, {**LLAMA, "_name_or_path": "meta/llama-own"}))["name"] == "llama-own"
    folder = tmp_path / "own"
    folder.mkdir()
    assert hub_tree(written(folder, LLAMA))["name"] == "own"
    assert hub_tree(written(folder, LLAMA, "tiny.json"))["name"] == "tiny"


@pytest.mark.parametrize(
    ("kind", "guess"),
    [("lama", "llama"), ("Qwen3-MoE", "qwen3_moe"), ("mistrall", "mistral"), ("gemma9", ""), ("qwen4", ""),
     ("whisper", ""), ("resnet", ""), ("clip", ""), ("grok-1", ""), ("llama" * 100, ""), (7, ""), (None, "")],
)  # fmt: skip
def test_a_type_is_guessed_where_it_is_misspelt_alone_and_the_way_out_is_named(
    tmp_path: Path, kind: object, guess: str
) -> None:
    with pytest.raises(ConfigError) as error:
        hub_tree(written(tmp_path, {**LLAMA, "model_type": kind}))
    way = error.value.problems[0].way_out
    assert way.startswith(f"did you mean `{guess}`? else" if guess else "the types of text models")
    assert "hub_types.yaml" in way and "docs/how-to/model.md" in way
    assert (REPOSITORY / "docs/how-to/model.md").is_file()


@pytest.mark.parametrize(
    ("config", "unread"),
    [
        ({"model_type": "mpt", "no_bias": True}, []),
        ({"model_type": "qwen", **SIZES, "kv_channels": 128, "no_bias": True}, []),
        ({"model_type": "hunyuan_v1_dense", "head_dim": 128, "attention_head_dim": 128}, []),
        ({"model_type": "hunyuan_v1_moe", "attention_head_dim": 128}, []),
        ({"model_type": "llama", "no_bias": True}, ["no_bias"]),
    ],
)
def test_keys_that_the_class_of_a_type_reads_or_ignores_are_not_told_as_unread(
    tmp_path: Path, config: dict[str, Any], unread: list[str]
) -> None:
    path = written(tmp_path, config)
    assert hub_tree(path).get("unread", []) == [f"{path}: {key}" for key in unread]


def test_a_key_of_biases_and_one_of_heads_say_what_they_say_in_the_class(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen", **SIZES, "kv_channels": 128}
    plain, biased = (hub_tree(written(tmp_path, {**qwen, "no_bias": value})) for value in (True, False))
    layer = 2 * 11008 + 4096 + 4096  # w1 and w2; c_proj of the feed-forward layer, and of attention
    assert biased["vectors"] - plain["vectors"] == layer
    mpt = [hub_tree(written(tmp_path, {"model_type": "mpt", "no_bias": value})) for value in (True, False)]
    assert mpt[0] == mpt[1]
    hunyuan = {"model_type": "hunyuan_v1_dense", "hidden_size": 5120, "num_attention_heads": 32}
    heads = [hub_tree(written(tmp_path, {**hunyuan, **key})) for key in ({"attention_head_dim": 128}, {})]
    assert [tree.get("head_dim", 160) for tree in heads] == [128, 160]


WRONG: dict[str, tuple[Any, str]] = {
    "no type": ({"hidden_size": 64}, "model_type"),
    "another type": ({**LLAMA, "model_type": "lama"}, "model_type"),
    "no layers": ({"model_type": "internlm2", "hidden_size": 64}, "num_hidden_layers"),
    "a width in quotes": ({**LLAMA, "hidden_size": "4096"}, "hidden_size"),
    "a width that is true": ({**LLAMA, "hidden_size": True}, "hidden_size"),
    "experts of no width": ({**QWEN_MOE, "moe_intermediate_size": -1}, "moe_intermediate_size"),
    "a list of layers that is too short": ({**OSS, "layer_types": ["full_attention"]}, "model_type"),
    "a window in quotes": ({**MIXTRAL, "sliding_window": "4096"}, "sliding_window"),
    "no rank": ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_told_with_file_key_and_way_out(tmp_path: Path, case: str) -> None:
    config, key = WRONG[case]
    path = written(tmp_path, config)
    with pytest.raises(ConfigError) as error:
        hub_tree(path)
    assert [problem.path for problem in error.value.problems] == [f"{path}: {key}"]
    assert error.value.problems[0].way_out


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "3", "[" * 100_000], ids=lambda text: text[:3] or "empty")
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        hub_tree(path)


@given(
    st.dictionaries(
        st.sampled_from(sorted({*LLAMA, *DEEPSEEK, *OSS})),
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.floats(),
    ),
    st.sampled_from(readable_types()),
)
def test_any_file_is_read_or_refused_and_never_breaks(tmp_path_factory: Any, keys: dict[str, Any], kind: str) -> None:
    path = written(tmp_path_factory.mktemp("hub"), {**keys, "model_type": kind})
    try:
        assert hub_tree(path)["kind"] == "transformer"
    except ConfigError as error:
        assert all(problem.path.startswith(str(path)) for problem in error.problems)


# On the command line


def test_a_file_of_a_hub_and_one_of_ones_own_are_chosen_by_their_paths(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nlayers: 4\nhidden: 512\nheads: 8\n")
    for path in (written(tmp_path, LLAMA), mine):
        plan_request = request(["study=comp_vs_comm", f"model={path}"])
        assert not plan_request.problems
        assert plan_request.tree["model"] == model_tree(str(path))


def test_a_model_is_named_by_the_folder_of_its_weights_too(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-8B"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"is a folder without config\.json"):
        model_tree(str(folder))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert model_tree(str(folder)) == model_tree(str(folder / "config.json"))
    assert request(["study=comp_vs_comm", f"model={folder}"]).knobs


@pytest.mark.slow
def test_keys_of_a_model_file_that_no_model_reads_are_reported(tmp_path: Path) -> None:
    keys = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 99,
    }
    keys |= {"intermediate_size": 2048, "rope_theta": 1e4, "bos_token_id": 1, "layers_run_twice": 2}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    words = ["study=plan", f"model={tmp_path / 'config.json'}", "system=h100_8", "parallel.tp=8", "run.mode=decode"]
    (note,) = check_typed(plan(request(words)))
    assert "layers_run_twice is not modelled" in note


ILL_TYPED: tuple[Any, ...] = ({"a": 1}, [], "x", -1, 1.5, True, 10**400, [{"a": [[]]}])


@pytest.mark.parametrize("name", ["llama3_8b", "deepseek_v3", "qwen3_235b_a22b"])
@given(data=st.data())
def test_a_key_of_a_wrong_type_is_refused_or_read(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    formats = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = {**SAME[name], "quantization_config": formats}
    key, value = data.draw(st.sampled_from(sorted(config))), data.draw(st.sampled_from(ILL_TYPED))
    path = written(tmp_path_factory.mktemp("hub"), {**config, key: value})
    try:
        tree = hub_tree(path)
    except ConfigError as error:
        assert str(path) in str(error)
        return
    assert tree["kind"] == "transformer"


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert"])
@pytest.mark.parametrize(
    "pattern", ["re:([a-z_.0-9]+)+!", "re:(.*)*(.*)*!", "re:(a|a|[a-z.])*$!", "*a*.*a*.*a*.*a*.*a*b"]
)
def test_a_pattern_that_would_go_back_and_forth_is_matched_soon_in_any_thread(
    pattern: str, key: str, in_thread: bool, tmp_path: Path
) -> None:
    formats = {"quant_method": "fp8", "fmt": "e4m3", key: [pattern]}
    path = written(tmp_path, {**DEEPSEEK, "quantization_config": formats})
    plain = hub_tree(written(tmp_path, {**DEEPSEEK, "quantization_config": {**formats, key: []}}, "plain.json"))
    began = time.thread_time()
    if in_thread:
        with ThreadPoolExecutor(1) as threads:
            tree = threads.submit(hub_tree, path).result(timeout=60)
    else:
        tree = hub_tree(path)
    assert time.thread_time() - began < 20
    assert tree["stored"] == plain["stored"]  # which no module matches


@pytest.mark.parametrize(
    ("formats", "rule"),
    [
        ({"ignore": ["re:(?!lm_head).*"]}, "without going back"),
        ({"ignore": ["re:(a)\\1"]}, "without going back"),
        ({"ignore": ["re:(a{1000}){1000}"]}, "without going back"),
        ({"ignore": ["re:("]}, "no regular expression"),
        ({"ignore": [f"name{place}" for place in range(1001)]}, "more than 1000 names"),
    ],
)
def test_a_pattern_that_cannot_be_matched_soon_is_refused(formats: dict[str, Any], rule: str, tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "fmt": "e4m3", **formats}
    path = written(tmp_path, {**DEEPSEEK, "quantization_config": section})
    with pytest.raises(ConfigError, match=rule):
        hub_tree(path)


@given(
    name=st.text(st.sampled_from("ab._1"), max_size=12), pattern=st.text(st.sampled_from("ab.*+?()|[]1_$"), max_size=8)
)
def test_expressions_match_as_python_has_them(name: str, pattern: str) -> None:
    try:
        matches = matcher_of(pattern)
        read = re.compile(pattern)
    except (Unread, re.error):
        return
    assert matches(name) == bool(read.match(name))
