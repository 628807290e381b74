"""What a file is of which no setting is read, in words: so that a refusal names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dse.errors import ConfigError
from dse.errors.parsing import parse_yaml
from dse_deploy.deepspeed import is_deepspeed
from dse_deploy.manifests import manifest_kind
from dse_deploy.torchtitan import is_torchtitan

# `trainer.devices=8`, as Hydra takes it
_OVERRIDE = re.compile(r"(?:^|\s)[+~]{0,2}(\w+(?:\.\w+)+)=\S")
# keys that `accelerate config` writes
_ACCELERATE = {"distributed_type", "fsdp_config", "deepspeed_config", "megatron_lm_config", "num_processes"}
_NEMO = {"trainer", "exp_manager"}
_MOST_NAMED = 4


def kind_of(text: str, suffix: str) -> str:
    """What a file of this ending is, as a noun with its article; "" where nothing tells."""
    if suffix == ".toml":
        return "a configuration of torchtitan (TOML)" if is_torchtitan(text) else "a file of TOML"
    if suffix in (".yaml", ".yml", ".json"):
        return manifest_kind(text) or _of_tree(_tree(text))
    overrides = list(dict.fromkeys(_OVERRIDE.findall(text)))[:_MOST_NAMED]
    return f"a script that sets values of a launcher of its own ({', '.join(overrides)})" if overrides else ""


def _tree(text: str) -> Any:
    try:
        return parse_yaml(text, "settings")
    except ConfigError:
        return None


def _of_tree(tree: Any) -> str:
    if not isinstance(tree, Mapping):
        return ""
    keys = {str(key) for key in tree}
    if is_deepspeed(tree):
        return "a configuration of DeepSpeed (from=deepspeed)"
    # a single one of these keys is used by other files as well
    if len(keys & _ACCELERATE) > 1:
        return "a configuration of Accelerate, whose settings no tool here has"
    if keys >= _NEMO:
        return "a configuration of NeMo, whose settings no tool here has"
    named = ", ".join(sorted(keys)[:_MOST_NAMED])
    return f"a file with keys {named}" if named else ""
