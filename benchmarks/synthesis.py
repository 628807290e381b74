"""Synthesised schedules against every preset and the proven bound: FiCCO's GEMMs on a mesh and at a switch.

    python -m benchmarks.synthesis [--json] [--only g5,g8]

ficco_within_5pct, ficco_worst_gap: share of the cases whose best known schedule is within 5 % of the bound, and the
largest gap. synthesised_better_share: cases in which the synthesised schedule is 3 % faster than the best preset;
synthesised_worse: number of cases in which it is slower. confirmed_share: of the better ones, those that are 3 %
faster with all GPUs of the node simulated, too. search_s: wall time of the study per search, with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

import dse
from studies.synthesis import MUCH, beside

_CASES = ("scenario", "topology")
_SAME = 1 + 1e-9


def figures(only: str = "") -> dict[str, float]:
    """Run the study on one GPU for all, then on all GPUs of the node, in a folder of its own; count."""
    shapes = only.split(",") if only else [f"g{number}" for number in range(1, 17)]
    with tempfile.TemporaryDirectory() as folder, _empty_cache(Path(folder)):
        begun = time.perf_counter()
        one = _cases(folder, shapes)
        search_s = (time.perf_counter() - begun) / len(one)
        node = _cases(folder, shapes, "simulator=node", "simulator.imbalance=0")
    best = np.minimum(one["preset_s"], one["synthesised_s"])
    gap, better = best / one["bound_s"] - 1, one["gain"] >= MUCH
    return {
        "ficco_within_5pct": float((gap <= 0.05).mean()),
        "ficco_worst_gap": float(gap.max()),
        "synthesised_better_share": float(better.mean()),
        "synthesised_worse": float((one["gain"] * _SAME < 1).sum()),
        "confirmed_share": float((node["gain"][better] >= MUCH).mean()) if better.any() else float("nan"),
        "search_s": search_s,
    }


def _cases(folder: str, shapes: list[str], *words: str) -> pd.DataFrame:
    """The best preset and the synthesised schedule of each GEMM on each topology."""
    result = dse.run(
        "synthesis",
        overrides=["space.system.node.topology=choice(mesh,switch)", "tracking=none", "fidelity=none", *words],
        workload__only=shapes,
        output_dir=folder,
    )
    table = result.table
    return beside(table[table["status"] == "ok"]).set_index(list(_CASES)).sort_index()


@contextmanager
def _empty_cache(folder: Path) -> Iterator[None]:
    """A cache of schedules with nothing in it."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def main() -> None:
    """Print the figures, one a line, or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthesis", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="", help="GEMMs, separated by commas")
    options = parser.parse_args()
    printed = figures(options.only)
    print(json.dumps(printed) if options.json else "\n".join(f"{name} {value:.4g}" for name, value in printed.items()))


if __name__ == "__main__":
    main()
