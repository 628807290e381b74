"""Compile the kernels of the common studies, in parallel: `make setup` runs it, so that a first run compiles nothing.

`python -m benchmarks.kernels` runs small studies, which call kernels with the arguments that all studies have; numba
keeps the machine code beside the modules. A study that fails is told, and is no reason to fail.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

_QUIET = ("store=none", "tracking=none", "figures=none", "timeline=false", "executor.jobs=1", "budget.trials=4")
_ONE = ("study=ficco_sweep", "workload.only=[g4]", "search=random")
STUDIES = (
    (*_ONE, "schedule=serial", "simulator=analytic", "fidelity=none"),
    (*_ONE, "simulator=fluid", "fidelity=none"),
    (*_ONE, "simulator=node", "fidelity=none"),
    (*_ONE, "simulator=uncontended", "fidelity=none"),
)
"""Words of studies, each of which needs kernels of its own first."""


def run(words: tuple[str, ...], folder: str) -> str:
    """Run a study in a folder; what it says where it fails, else ""."""
    command = [sys.executable, "-m", "dse", *words, *_QUIET]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return f"{' '.join(words)}: {done.stderr.strip()[-200:]}" if done.returncode else ""


def main() -> int:
    """Run all at once, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="dse-kernels-") as folder, ThreadPoolExecutor(len(STUDIES)) as pool:
        for problem in filter(None, pool.map(partial(run, folder=folder), STUDIES)):
            print(f"kernels stay to be compiled by the first run: {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
