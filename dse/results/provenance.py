"""Provenance of a result: command, code, versions, machine. What is named a secret is not written down."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dse.errors import redact
from dse.plugins import PACKAGES, distributions, places, roots

_LIBRARIES = (
    "hydra-core",
    "joblib",
    "matplotlib",
    "mlflow",
    "moocore",
    "numba",
    "numpy",
    "optuna",
    "pandas",
    "psycopg",
    "pyarrow",
    "pydantic",
    "pyyaml",
    "rich",
    "scikit-learn",
    "scipy",
    "seaborn",
    "simpy",
    "sqlalchemy",
    "threadpoolctl",
)
_MACHINE = Path("/proc/cpuinfo")


def record(overrides: Sequence[str], folder: Path | None, *, backend: str, seed: int) -> dict[str, Any]:
    """Provenance of one study run, ready for JSON. folder: of the user's own configuration."""
    flags = [] if folder is None else [f"--config-dir={folder}"]
    typed = [str(redact(text)) for text in overrides]  # commands may hold passwords
    return {
        "command": ["python", "-m", "dse", *flags, *typed],
        "overrides": typed,
        "config_dir": None if folder is None else str(folder),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": backend,
        "seed": seed,
        "git": _git(Path(__file__).resolve().parents[2]),
        "versions": versions(),
        "code": code_hashes(),
        "python": platform.python_version(),
        "machine": _machine(),
        "executable": Path(sys.executable).name,
    }


@functools.cache
def code_hashes() -> Mapping[str, str]:
    """Package -> hash of its Python files; equal where the same code runs, wherever it lies."""
    return {package: _hash(package) for package in roots()}


def _hash(package: str) -> str:
    total = hashlib.sha256()
    for folder in places(package)[:1]:
        for path in sorted(folder.rglob("*.py")):
            total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def code_version(record: Mapping[str, Any] | None = None) -> Mapping[str, str]:
    """Versions of all that makes results: Python, libraries, and each package of ours.

    record: of a run; None: of this process.
    """
    if record is None:
        record = {"python": platform.python_version(), "versions": versions(), "code": code_hashes()}
    packages = {f"the code of {name}": text for name, text in record.get("code", {}).items()}
    return {"Python": str(record.get("python", "")), **record.get("versions", {}), **packages}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Differences between two versions of the code, in words; empty if there are none."""
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    return ", ".join(f"{name} is {here.get(name, 'absent')}, not {there.get(name, 'absent')}" for name in names)


def describe(record: Mapping[str, Any]) -> str:
    """One line for a person: the code, and what differs in the runs whose results were taken."""
    git, machine = record["git"], record["machine"]
    code = f"git {_commit(git)}" if git["commit"] else f"commit unknown ({git['reason']})"
    where = f"Python {record['python']} on {machine.get('cpu') or machine.get('system')}"
    other_runs = [f"of {run['time']}: {', '.join(run['changed'])}" for run in record.get("mixed", [])]
    return f"made with {code}, {where}" + (f"; some results are {'; '.join(other_runs)}" if other_runs else "")


def command_line(record: Mapping[str, Any]) -> str:
    """The command, as a shell takes it."""
    return shlex.join(record["command"])


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In what two runs differ that may matter: code, Python, libraries, machine."""
    before, now = _facts(old), _facts(new)
    names = dict.fromkeys([*before, *now])
    return [
        f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    git, machine = record.get("git", {}), record.get("machine", {})
    facts = {"git": _commit(git), "Python": str(record.get("python", ""))}
    facts |= {name: str(value) for name, value in record.get("versions", {}).items()}
    return facts | {name: str(machine[name]) for name in ("cpu", "system") if name in machine}


def _commit(git: Mapping[str, Any]) -> str:
    if not git.get("commit"):
        return "none"
    dirty = f" + uncommitted changes {git.get('diff', '')}".rstrip() if git.get("dirty") else ""
    return f"{git['commit'][:12]}{dirty}"


def versions() -> dict[str, str]:
    """Versions of dse, the libraries it depends on, SQLite, and the distributions that offer plug-ins."""
    names = dict.fromkeys([*_LIBRARIES, *sorted(distributions())])
    return {
        "dse": _version("overlap-dse"),
        **{name: _version(name) for name in names},
        "SQLite": sqlite3.sqlite_version,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _machine() -> dict[str, Any]:
    cpus = re.findall(r"^model name\s*:\s*(.+)$", _MACHINE.read_text() if _MACHINE.is_file() else "", re.MULTILINE)
    # a scheduler may allow fewer
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cpu": cpus[0].strip() if cpus else platform.processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _git(root: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the code, new files among them, or why they are not known."""
    # other folders hold no code that results rest on
    places = [f":/{folder}" for folder in (*PACKAGES, "conf", "plugins")]
    try:
        _ask(
            root, "ls-files", "--error-unmatch", "dse/results/provenance.py"
        )  # dse may be installed inside another checkout
        changed = _ask(root, "status", "--porcelain", "--", *places)
        state = {"commit": _ask(root, "rev-parse", "HEAD"), "dirty": bool(changed)}
        if changed:
            diff = changed + _ask(root, "diff", "HEAD", "--", *places)
            # tells two states with changes apart, without keeping the code
            state["diff"] = hashlib.sha256(diff.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return state
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "reason": "the code does not run from a git checkout"}


def _ask(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, check=True, timeout=20)  # a network file system may hang
    return done.stdout.decode("utf-8", "surrogateescape").strip()
