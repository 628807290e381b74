"""Figures of long runs, kept with git's ids of the code they were measured on: those of other code are refused."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TREES = ("dse", "simulators", "search_spaces", "conf")


def path(name: str) -> Path:
    """Where the record of a benchmark is."""
    return Path(__file__).parent / "records" / f"{name}.json"


def trees() -> dict[str, str]:
    """What the code under test is: git's ids of its folders. Raises RuntimeError where they hold what is not there."""
    if _git("status", "--porcelain", "--", *TREES):
        raise RuntimeError(f"{', '.join(TREES)} must be committed: a record is of a commit")
    return {name: _git("rev-parse", f"HEAD:{name}") for name in TREES}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def write(name: str, figures: Mapping[str, Any], *, command: str, of: Mapping[str, str]) -> None:
    """Record figures. of: the trees they were measured on."""
    about = {"command": command, "date": f"{datetime.now(UTC):%Y-%m-%d}", "python": platform.python_version()}
    path(name).parent.mkdir(exist_ok=True)
    path(name).write_text(json.dumps({**figures, **about, "trees": of}, indent=2) + "\n", encoding="utf-8")


def read(name: str, way_out: str) -> dict[str, Any]:
    """The figures of a record; {} where it is not of the code as it is, which is told. way_out: how to make it anew."""
    held: dict[str, Any] = json.loads(path(name).read_text(encoding="utf-8")) if path(name).exists() else {}
    try:
        fits = held.get("trees") == trees()
    except RuntimeError:
        fits = False
    if not fits:
        told = f"{path(name).relative_to(ROOT)} is of other code in {', '.join(TREES)}: commit, then run {way_out}"
        print(told, file=sys.stderr)
    return held if fits else {}
