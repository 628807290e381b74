"""Names and widths of public models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dse import plugins
from dse.config.options import conf_dir, load_yaml


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
