"""`params.json` beside the weights of Mistral and of Meta: its keys as those of `config.json`.

Meta's files say no width of the feed-forward layer: it is two thirds of four times the width of the model, times
`ffn_dim_multiplier`, as a multiple of `multiple_of` (meta-llama/llama3, llama/model.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dse.errors import ConfigError, Problem, Problems

_NEEDED = ("dim", "n_layers", "n_heads")
_NAMES: Mapping[str, str] = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
}
_EXPERTS: Mapping[str, str] = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_OF_META = ("multiple_of", "ffn_dim_multiplier")
_OTHERS: Mapping[str, str] = {
    "q_lora_rank": "latent attention",
    "kv_lora_rank": "latent attention",
    "_sliding_window": "windows of several lengths",
    "lora": "adapters",
}
_WAY = "name the config.json of the model, or write it as a YAML file"


def is_parameters(keys: Mapping[str, Any]) -> bool:
    """Tell whether a file is one of Mistral's or Meta's parameters."""
    return "model_type" not in keys and all(name in keys for name in _NEEDED)


def hub_keys(path: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `config.json` that parameters say. Raises ConfigError for layers that they do not tell."""
    check = Problems()
    for name, what in _OTHERS.items():
        if keys.get(name):
            check.add(f"{path}: {name}", f"is of {what}, which is not read from parameters", way_out=_WAY)
    # experts are as wide as the dense layer (Mixtral): a width of their own means another model
    experts = keys.get("moe") or {}
    if not isinstance(experts, Mapping) or any(name not in (*_EXPERTS, "expert_parallel") for name in experts):
        check.add(f"{path}: moe", "is of experts of a width of their own, which are not read here", way_out=_WAY)
    vocab = keys.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        rule = "is missing: the tokenizer has it"
        check.add(f"{path}: vocab_size", rule, value=vocab, way_out="write the number of tokens there")
    check.done()
    named = {name: keys[key] for key, name in _NAMES.items() if keys.get(key) is not None}
    if "intermediate_size" not in named:
        named["intermediate_size"] = _feed_forward(path, keys)
    named |= {name: experts[key] for key, name in _EXPERTS.items() if key in experts}
    # the type decides which defaults apply to keys that are missing
    if window := keys.get("sliding_window"):
        named |= {"model_type": "mixtral" if experts else "mistral", "sliding_window": window}
    else:
        named |= {"model_type": "mixtral", "sliding_window": None} if experts else {"model_type": "llama"}
    known = (*_NAMES, *_OF_META, "moe", "sliding_window")
    return {key: value for key, value in keys.items() if key not in known} | named


def _feed_forward(path: Path, keys: Mapping[str, Any]) -> int:
    """The width of Meta's feed-forward layers. Raises ConfigError where a number is missing."""
    width, step, factor = keys["dim"], keys.get("multiple_of"), keys.get("ffn_dim_multiplier")
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not isinstance(width, int) or not isinstance(step, int) or step < 1 or not (factor is None or is_number):
        raise ConfigError([Problem(f"{path}: multiple_of", "is needed where hidden_dim is missing", step, _WAY)])
    # whole numbers at each step, as in the source: rounded elsewhere, widths would differ
    hidden = 2 * 4 * width // 3
    hidden = hidden if factor is None else int(float(factor) * hidden)
    return step * -(-hidden // step)
