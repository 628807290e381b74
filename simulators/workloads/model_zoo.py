"""Models by name: options of the configuration group `model`, YAML files of users, and the widths of public models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dse import plugins
from dse.config.options import list_options, option_file
from dse.config.variants import load_option
from dse.errors import ConfigError, Problem, did_you_mean
from simulators.hardware.machine import tree_of
from simulators.workloads.experts import MixtureOfExperts
from simulators.workloads.model import Transformer
from simulators.workloads.public_models import aliases, public

_HUB = "config.json"  # of a folder of weights: a format that a plug-in reads
_NOTE_KEYS = ("provenance", "source")


def model_tree(name: str, section: str = "models") -> dict[str, Any]:
    """Tree of a model: `conf/model/<name>.yaml`, a model of `conf/data/models.yaml`, a YAML file, or a `config.json`,
    also by the folder that it lies in.

    section: that names the model. Raises ConfigError, also for a model that cannot be expressed as a transformer.
    """
    path = _path("model", str(Path(name, _HUB)) if Path(name, _HUB).is_file() else name)
    if path is not None and path.suffix == ".json":
        return _read_hub(path, section)
    if path is not None:
        return {"kind": "transformer", **_read(path, section)}
    if Path(name).is_dir():
        raise ConfigError(
            [Problem(section, f"is a folder without {_HUB}", name, "name the folder of a model's weights")]
        )
    models, formal = public(), aliases().get(name, name)
    if formal not in models:
        way = did_you_mean(name, list_options("model"))
        raise ConfigError([Problem(section, "is neither a model known by name nor a file", name, way)])
    return _transformer_tree(name, models[formal])


def _read_hub(path: Path, section: str) -> dict[str, Any]:
    """Tree of a model from a file of a model hub. Raises ConfigError, also where no plug-in reads such files."""
    if not plugins.target("format", _HUB):
        way = "pip install overlap-dse-hub, or describe the model in a YAML file"
        raise ConfigError([Problem(section, "is a file of a model hub, whose reader is not installed", str(path), way)])
    tree: dict[str, Any] = plugins.load("format", _HUB)(path)
    return tree


def option_tree(group: str, name: str) -> dict[str, Any]:
    """Tree of a shipped option of a group, or of a YAML file; systems composed of their parts. Raises ConfigError."""
    if group == "system":
        return tree_of(name)
    path = _path(group, name)
    if path is None:
        way = did_you_mean(name, list_options(group))
        raise ConfigError([Problem(group, "is neither a shipped option nor a YAML file", name, way)])
    return _read(path, group)


def _path(group: str, name: str) -> Path | None:
    path = option_file(group, name) or Path(name)
    return path if path.is_file() else None


def _read(path: Path, group: str) -> dict[str, Any]:
    tree = load_option(path)
    if not isinstance(tree, dict):
        raise ConfigError([Problem(group, "is a file that holds no keys", str(path))])
    return tree


def _transformer_tree(name: str, widths: Mapping[str, Any]) -> dict[str, Any]:
    """Tree of a public model as a transformer. Raises ConfigError for one whose source says too little."""
    if "head_dim" not in widths and "latent" not in widths:
        way = "take another one, or describe it in a YAML file"
        raise ConfigError([Problem("models", "has no width of heads in its source", name, way)])
    fields = {key: value for key, value in widths.items() if key in Transformer.model_fields}
    if "experts" in widths:
        experts = {key: value for key, value in widths.items() if key in MixtureOfExperts.model_fields}
        fields["moe"] = {**experts, "imbalance": 0.0}  # a value that can be set on the command line
    note = ", ".join(str(widths[key]) for key in _NOTE_KEYS if key in widths)
    causal, gated = "decoder_layers" not in widths, bool(widths.get("gated"))
    known = {"causal": causal, "rotary": causal and gated}  # gated layers and rotary positions came together (Llama)
    return {"name": name, "kind": "transformer", **known, **fields, "note": note}
