"""A store of a million results: what each command takes with it, `python -m benchmarks.million [--json]`.

The study of `benchmarks.store` is run on so many machines that it has 1,013,376 points. Then its command is typed
again, and `store status`, `store check`, `results report` and `store sync` to MLflow and to Optuna, each in a process
of its own; printed are its seconds and the largest memory of one of its processes. It takes some five minutes and 2 GB
of disk. The exit code is 1 where a command fails or takes more than 2 GiB, or where a table has another number of rows
or the resumed one other bytes. How fast every point becomes a run of MLflow (`points=all`) says `benchmarks.store`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.recorded import ROOT

_MOST_MIB = 2048
_POINTS = 1_013_376
_NAMED = "study=ficco_sweep"
_SWEEP = (
    *(_NAMED, "fidelity=none", "budget.trials=4000000", "tracking=none"),
    "workload.shapes=[{name: own, m: 16384, n: 16384, k: 8192}]",
    "space.system.gpu.num_cus=range(200,304,1)",
    "space.system.gpu.hbm_bytes_per_s=range(4e12,6e12,1.8e10)",
)
_COMMANDS = {
    "run": _SWEEP,
    "resume": _SWEEP,
    "status": ("store", "status"),
    "check": ("store", "check"),
    "report": ("results", "report", _NAMED),
    "sync": ("store", "sync", _NAMED, "uri=sqlite:///mlflow.db"),
    "sync_optuna": ("store", "sync", _NAMED, "optuna=trials.log"),
}


@dataclass(frozen=True)
class Cost:
    """What a command took. mib: the largest memory of one of its processes."""

    code: int
    seconds: float
    mib: float


def cost(words: Sequence[str], folder: Path) -> Cost:
    """Type a command in a folder."""
    environment, began = {**os.environ, "PYTHONPATH": str(ROOT)}, time.monotonic()
    with (folder / "printed.txt").open("ab") as printed:
        command = [sys.executable, "-m", "dse", *words]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=printed, stderr=printed)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(process.returncode, round(time.monotonic() - began, 1), round(used.ru_maxrss / 1024))


def problems(costs: dict[str, Cost], folder: Path) -> list[str]:
    """What is wrong, a sentence each."""
    wrong = [f"{name} ended with {cost.code}" for name, cost in costs.items() if cost.code]
    wrong += [f"{name} took {cost.mib:,} MiB" for name, cost in costs.items() if cost.mib > _MOST_MIB]
    tables = sorted((folder / "outputs" / "ficco_sweep").glob("2*/results.parquet"))
    rows = [pq.read_metadata(table).num_rows for table in tables]
    wrong += [f"a table has {count:,} rows, not {_POINTS:,}" for count in rows if count != _POINTS]
    if len(tables) != 2 or tables[0].read_bytes() != tables[1].read_bytes():
        wrong.append("the table of the resumed study is another one")
    return wrong


def main() -> int:
    """Make the store, type each command, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--keep", type=Path, help="an empty folder where the store is left")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dse-million-") as name:
        folder = asked.keep.resolve() if asked.keep else Path(name)
        costs = dict[str, Cost]()
        for called, words in _COMMANDS.items():
            costs[called] = cost(words, folder)
            print(f"{called}: {costs[called].seconds:,.1f} s, {costs[called].mib:,.0f} MiB", file=sys.stderr)
        wrong = problems(costs, folder)
        size = (folder / "outputs" / "results.db").stat().st_size
    figures = {"results": _POINTS, "store_mb": round(size / 1e6)}
    figures |= {f"{name}_s": cost.seconds for name, cost in costs.items()}
    figures |= {f"{name}_mib": cost.mib for name, cost in costs.items()}
    lines = ["| command | seconds | MiB |", "|---|--:|--:|"]
    lines += [f"| {name} | {cost.seconds:,.1f} | {cost.mib:,.0f} |" for name, cost in costs.items()]
    print(json.dumps({**figures, "wrong": wrong}, indent=2) if asked.json else "\n".join([*lines, *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
