"""What a result was made with: command, code, versions, machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

_LIBRARIES = ("dse", "hydra-core", "joblib", "mlflow", "numpy", "optuna", "pandas", "pydantic", "simpy")


def record(overrides: Sequence[str], backend: str, seed: int) -> dict[str, Any]:
    """Provenance of one study run, ready for JSON."""
    return {
        "command": ["python", "-m", "dse", *overrides],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": backend,
        "seed": seed,
        "git": _git(),
        "versions": {name: version(name) for name in _LIBRARIES},
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "executable": Path(sys.executable).name,
    }


def _git() -> dict[str, Any]:
    """Commit and dirtiness of the code, or why they are not known."""
    folder = Path(__file__).resolve().parent
    try:
        commit = _ask(folder, "rev-parse", "HEAD")
        return {
            "commit": commit,
            "dirty": bool(_ask(folder, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "reason": "the code does not run from a git checkout"}


def _ask(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()
