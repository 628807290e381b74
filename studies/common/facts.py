"""Facts that studies read from `conf/data`, each with its source beside it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from dse.config.options import conf_dir
from dse.config.yaml_checks import load_yaml
from dse.files import read_csv


@cache
def facts(name: str) -> Mapping[str, Any]:
    """Return the content of `conf/data/<name>.yaml`."""
    content: Mapping[str, Any] = load_yaml(conf_dir() / "data" / f"{name}.yaml")
    return content


@cache
def read_rows(name: str) -> tuple[Mapping[str, str], ...]:
    """Rows of `conf/data/<name>.csv`, below its comments."""
    return tuple(cells for _, cells in read_csv(conf_dir() / "data" / f"{name}.csv").rows)
