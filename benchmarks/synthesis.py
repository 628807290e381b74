"""Synthesised schedules against every preset and the proven bound: FiCCO's GEMMs on a mesh and at a switch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

import dse
from dse_synthesis.study import MUCH, beside

FICCO = tuple(f"g{number}" for number in range(1, 17))
_CASES = ("scenario", "topology")
_SAME = 1 + 1e-9


def figures(shapes: Sequence[str] = FICCO) -> dict[str, float]:
    """Run the study on one GPU for all, then on all GPUs of the node, in a folder of its own; count."""
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


def _cases(folder: str, shapes: Sequence[str], *words: str) -> pd.DataFrame:
    """The best preset and the synthesised schedule of each GEMM on each topology."""
    result = dse.run(
        "synthesis",
        overrides=["space.system.node.topology=choice(mesh,switch)", "tracking=none", "fidelity=none", *words],
        workload__only=list(shapes),
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
