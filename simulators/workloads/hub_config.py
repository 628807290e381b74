"""Models as model hubs describe them: `config.json` of a folder of weights, read as data.

No code of a hub is run. `model_type` says which keys count; keys that other types of a family call otherwise are looked
up under all of their names. What cannot be expressed is refused with file, key and way out: a model of another type,
experts in every other layer. Which keys were read is recorded: others that may change a cost are listed in the tree.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dse.config.options import conf_dir
from dse.config.yaml_checks import load_yaml
from dse.errors import ConfigError, Problem, did_you_mean
from dse.files import read_text

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", *_LATENT)
_UNGATED = ("gpt2", "gpt_neox")
TYPES = (*_DENSE, *_WITH_EXPERTS, *_UNGATED)
"""Values of `model_type` that are read."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocab": ("vocab_size",),
    "positions": ("n_positions",),
}
_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "groups": ("n_group",),
    "groups_per_token": ("topk_group",),
}
_RANKS: Mapping[str, tuple[str, ...]] = {
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "value_dim": ("v_head_dim",),
}
_OPTIONAL = ("kv_heads", "shared_experts", "dense_layers", "groups", "groups_per_token", "q_rank")
_NEEDED_BY: Mapping[str, tuple[str, ...]] = {"gpt2": (), "gpt_neox": ("ffn",)}  # keys without a default there
_TIED = ("gpt2",)  # types whose embeddings are tied unless the file says otherwise


@functools.cache
def _keys_without_effect() -> frozenset[str]:
    """Keys that change no cost."""
    return frozenset(load_yaml(conf_dir() / "data" / "hub_keys.yaml")["without_effect"])


class _Recording(dict[str, Any]):
    """Keys of a file, and which of them were looked up."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        super().__init__(keys)
        self.looked_up = set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or a default."""
        self.looked_up.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.looked_up.add(key)
        return super().__getitem__(key)

    @property
    def unread(self) -> list[str]:
        """Keys with a value that nothing looked up, and that may change a cost."""
        return [
            key
            for key, value in self.items()
            if key not in self.looked_up | _keys_without_effect()
            and value not in (None, False, [], {}, "")
            and not key.startswith("_")
        ]


@dataclass
class _Config:
    """A parsed file, and what is wrong with it so far."""

    path: Path
    keys: _Recording
    problems: list[Problem] = field(default_factory=list)

    def note(self, key: str, rule: str, value: object, way_out: str) -> None:
        self.problems.append(Problem(f"{self.path}: {key}", rule, value, way_out))

    def whole(self, names: Sequence[str], *, needed: bool) -> int | None:
        """The whole number under one of some names; None if the file has none of them."""
        name = next((name for name in names if self.keys.get(name) is not None), None)
        if name is None:
            if needed:
                self.note(names[0], "is missing", None, "add it, or describe the model in a YAML file of one's own")
            return None
        value = self.keys[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.note(name, "is no whole number", value, "write a number such as 4096")
            return None
        return value


def hub_tree(path: Path) -> dict[str, Any]:
    """Tree of a model from its `config.json`. Raises ConfigError with file, key and way out of every problem."""
    config = _Config(path, _Recording(_parsed(path)))
    kind = config.keys.get("model_type")
    if kind not in TYPES:
        way = did_you_mean(str(kind), TYPES) if kind else f"add one of {', '.join(TYPES)}"
        config.note("model_type", "is no type of model that is read", kind, way)
        raise ConfigError(config.problems)
    tree = _tree(config, str(kind))
    if config.problems:
        raise ConfigError(config.problems)
    unread = [f"{path}: {key}" for key in config.keys.unread]
    return tree | ({"unread": unread} if unread else {})


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        keys = json.loads(read_text(path, str(path)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError([Problem(str(path), f"is no JSON: {error}", way_out="download it again")]) from None
    if not isinstance(keys, dict):
        raise ConfigError([Problem(str(path), "holds no keys", way_out="give the config.json of a model")])
    inner = keys.get("text_config")  # of a model that also sees
    return {**keys, **inner} if isinstance(inner, dict) and "model_type" in inner else keys


def _tree(config: _Config, kind: str) -> dict[str, Any]:
    """Sections of a transformer; what is missing or wrong is noted."""
    gated = kind not in _UNGATED
    widths = {name: config.whole(names, needed=_is_needed(name, kind)) for name, names in _NAMES.items()}
    tree: dict[str, Any] = {name: value for name, value in widths.items() if value is not None}
    tied = config.keys.get("tie_word_embeddings", kind in _TIED)
    tree |= {"kind": "transformer", "name": _name(config), "gated": gated, "causal": True, "rotary": kind != "gpt2"}
    tree |= {"tied": bool(tied), "note": f"{kind}, read from {config.path.name}"}
    if kind in _LATENT:
        tree["latent"] = _part(config, _RANKS)
        tree.pop("kv_heads", None)
    elif (head := config.whole(("head_dim",), needed=False)) is not None:
        tree["head_dim"] = head
    if kind in _WITH_EXPERTS:
        tree["moe"] = _experts(config, kind)
        if kind not in _LATENT:
            tree.pop("ffn", None)
    return tree | _windows(config, widths["layers"])


def _is_needed(name: str, kind: str) -> bool:
    """Tell whether a type has no default for a width."""
    if name in ("ffn", "positions"):
        return name in _NEEDED_BY.get(kind, ("ffn",)) and kind not in ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss")
    return name not in _OPTIONAL


def _part(config: _Config, names: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Numbers of a part of the model that the file has."""
    values = {name: config.whole(keys, needed=name not in _OPTIONAL) for name, keys in names.items()}
    return {name: value for name, value in values.items() if value is not None}


def _experts(config: _Config, kind: str) -> dict[str, int]:
    """Experts; those of Qwen2 have a shared one of a width of its own."""
    moe = _part(config, _EXPERTS)
    if shared := config.whole(("shared_expert_intermediate_size",), needed=kind == "qwen2_moe"):
        moe |= {"shared_experts": 1, "shared_ffn": shared}
    for key in ("decoder_sparse_step", "moe_layer_freq", "mlp_only_layers"):
        if config.keys.get(key) not in (None, 1, []):
            rule, way = "has experts in some layers alone, which is not modelled", "describe its layers in a YAML file"
            config.note(key, rule, config.keys[key], way)
    return moe


def _windows(config: _Config, layers: int | None) -> dict[str, Any]:
    """The window of attention and the share of layers that have it; nothing where none has."""
    if config.keys.get("use_sliding_window", True) is not True or not layers:
        return {}
    window = config.whole(("sliding_window",), needed=False)
    if not window:
        return {}
    kinds = config.keys.get("layer_types")
    if isinstance(kinds, list):
        return {"window": window, "windowed": kinds.count("sliding_attention") / max(len(kinds), 1)}
    if config.keys.get("model_type") == "gpt_oss":
        return {"window": window, "windowed": 0.5}  # every other layer
    whole = config.whole(("max_window_layers",), needed=False) or 0  # of Qwen: first layers without a window
    return {"window": window, "windowed": max(0.0, 1 - whole / layers)}


def _name(config: _Config) -> str:
    """What the file calls the model, else the folder that it lies in."""
    name = config.keys.get("_name_or_path") or config.keys.get("name_or_path")
    if isinstance(name, str) and name.strip("./"):
        return name.rstrip("/").rpartition("/")[2]
    return config.path.resolve().parent.name if config.path.name == "config.json" else config.path.stem
