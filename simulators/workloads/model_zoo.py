"""Models by name: options of the configuration group `model`, files of one's own, and the widths of public models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dse import plugins
from dse.config.compose import conf_dir, list_options
from dse.config.yaml_checks import load_yaml, unreadable
from dse.errors import ConfigError, Problem, did_you_mean
from simulators.workloads.model import Transformer

_TOLD = ("provenance", "source")


def model_tree(said: str) -> dict[str, Any]:
    """The tree of a model: `conf/model/<name>.yaml`, a YAML file, or a model of `conf/data/models.yaml`.

    Raises ConfigError, also for a model that this project cannot lay out.
    """
    path = _path("model", said)
    if path is not None:
        return {"kind": "transformer", **_read(path)}
    known = public()
    if said not in known:
        way = did_you_mean(said, [*known, *list_options("model")])
        raise ConfigError([Problem("models", "is neither a model known by name nor a YAML file", said, way)])
    return _laid_out(said, known[said])


def option_tree(group: str, said: str) -> dict[str, Any]:
    """The tree of a shipped option of a group, or of a YAML file. Raises ConfigError."""
    path = _path(group, said)
    if path is None:
        way = did_you_mean(said, list_options(group))
        raise ConfigError([Problem(group, "is neither a shipped option nor a YAML file", said, way)])
    return _read(path, group)


def _path(group: str, said: str) -> Path | None:
    shipped = conf_dir() / group / f"{said}.yaml"
    path = shipped if "/" not in said and shipped.is_file() else Path(said)
    return path if path.is_file() else None


@plugins.cached_until_refresh
def _public(path: Path) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = _read(path)["models"]
    return found


def public() -> Mapping[str, Mapping[str, Any]]:
    """Public models by name: widths, and where they are from."""
    return _public(conf_dir() / "data" / "models.yaml")


def _read(path: Path, said: str = "models") -> dict[str, Any]:
    problems = unreadable(path)
    if problems:
        raise ConfigError(problems)
    found = load_yaml(path)
    if not isinstance(found, dict):
        raise ConfigError([Problem(said, "is a file that holds no keys", str(path))])
    return found


def _laid_out(name: str, widths: Mapping[str, Any]) -> dict[str, Any]:
    """A public model as a transformer."""
    rule = ""
    if "experts" in widths:
        rule = "routes tokens to experts, which is not modelled"
    elif "head_dim" not in widths:
        rule = "has latent attention, which is not modelled"
    if rule:
        raise ConfigError([Problem("models", rule, name, "describe a dense model in a YAML file, or take another one")])
    fields = {key: value for key, value in widths.items() if key in Transformer.model_fields}
    told = ", ".join(str(widths[key]) for key in _TOLD if key in widths)
    return {"name": name, "kind": "transformer", **fields, "note": told}
