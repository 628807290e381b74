"""Libraries of extras: what needs one that is not installed is refused in a sentence that names the extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_BLOCKED = """
import sys
sys.modules[sys.argv[1]] = None  # as where it is not installed
from dse.cli import main
sys.exit(main(sys.argv[2:]))
"""
_SERVER = "postgresql://me@127.0.0.1:9/results"
_STUDY = ("study=ficco_sweep", "workload.only=[g4]", "schedule=serial", "fidelity=none", "figures=none")


def without(library: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command line in a process in which a library cannot be imported."""
    line = [sys.executable, "-c", _BLOCKED, library, *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.one_in(3, 1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (*_STUDY, "tracking=none", f"store.url={_SERVER}"),
        ("store", "worker", f"store={_SERVER}"),
        ("store", "status", f"store={_SERVER}"),
    ],
    ids=["study", "worker", "status"],
)
def test_a_store_on_a_server_needs_a_driver(words: tuple[str, ...], tmp_path: Path) -> None:
    done = without("psycopg", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "needs psycopg, which is not installed (pip install 'overlap-dse[postgresql]')" in done.stderr
    assert "Traceback" not in done.stderr
