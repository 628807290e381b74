"""Names and widths of public models, and the catalogue of the group `model`: nothing that takes long to import."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dse import plugins
from dse.config.options import conf_dir
from dse.config.yaml_checks import load_yaml


@plugins.cached_until_refresh
def _tables(path: Path) -> Mapping[str, Any]:
    tables: Mapping[str, Any] = load_yaml(path)
    return tables


def public() -> Mapping[str, Mapping[str, Any]]:
    """Public models by name: widths and their sources."""
    models: Mapping[str, Mapping[str, Any]] = _tables(conf_dir() / "data" / "models.yaml")["models"]
    return models


def aliases() -> Mapping[str, str]:
    """Other names of public models."""
    names: Mapping[str, str] = _tables(conf_dir() / "data" / "models.yaml")["aliases"]
    return names


class _Catalogue:
    """Public models, and files of one's own, as options of the group `model` (`dse.config.options`)."""

    def names(self) -> Mapping[str, str]:
        """Public models and what they are."""
        described = {name: _describe(widths) for name, widths in public().items()}
        also = {name: f"the same as {formal}" for name, formal in aliases().items()}
        return dict(sorted({**described, **also}.items()))

    def tree(self, name: str) -> dict[str, Any]:
        """Tree of a model by name, or of a file. Raises ConfigError."""
        zoo = importlib.import_module("simulators.workloads.model_zoo")  # which knows what a model may have
        tree: dict[str, Any] = zoo.model_tree(name, "model")
        return tree


CATALOGUE = _Catalogue()


def _describe(widths: Mapping[str, Any]) -> str:
    """Say what a public model is."""
    text = f"{widths['layers']} layers of {widths['hidden']}, {widths['heads']} heads"
    if "experts" in widths:
        text += f", {widths['experts_per_token']} of {widths['experts']} experts for each token"
    return f"{text}{', latent attention' if 'latent' in widths else ''} ({widths['provenance']})"
