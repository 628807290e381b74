"""Facts that studies read from `conf/data`, each with its source beside it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dse.config.options import conf_dirs, load_yaml
from dse.files import read_csv


def _file(name: str) -> Path:
    """A file of `conf/data`, ours or another distribution's; ours where there is none."""
    files = [folder / "data" / name for folder in conf_dirs()]
    return next((file for file in files if file.is_file()), files[0])


@cache
def facts(name: str) -> Mapping[str, Any]:
    """Return the content of `conf/data/<name>.yaml`."""
    content: Mapping[str, Any] = load_yaml(_file(f"{name}.yaml"))
    return content


@cache
def read_rows(name: str) -> tuple[Mapping[str, str], ...]:
    """Rows of `conf/data/<name>.csv`, below its comments."""
    return tuple(cells for _, cells in read_csv(_file(f"{name}.csv")).rows)
