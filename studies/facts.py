"""Facts that studies read from `conf/data`, each with its source beside it."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from dse.config.options import conf_dir


@cache
def facts(name: str) -> Mapping[str, Any]:
    """Return the content of `conf/data/<name>.yaml`."""
    content: Mapping[str, Any] = yaml.safe_load((conf_dir() / "data" / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


@cache
def read_rows(name: str) -> tuple[Mapping[str, str], ...]:
    """Rows of `conf/data/<name>.csv`, below its comments."""
    with (conf_dir() / "data" / f"{name}.csv").open(encoding="utf-8") as text:
        return tuple(csv.DictReader(line for line in text if not line.startswith("#")))
