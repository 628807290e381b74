"""How good the search is: `python -m benchmarks.search [--json] [--record]`.

`--record` runs `study=search_benchmark` (three known spaces, every method, twenty seeds) and measures what proposing
costs, beside bare Optuna and rustuna, in one run; half an hour. Without it the figures of the last record are printed;
one of other code is refused, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import recorded
from dse import compose
from dse.plan import plan
from dse.search import Outcome, Question, Search, explore
from dse.search.genes import Genes
from dse.space import Assignment, Space
from simulators.landscape import column

_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02)
_AT = 0.02
_TRIALS = (1_000, 10_000, 50_000)
_OWN = ("auto", "rustuna_nsga2")
_BARE = {"optuna": (1_000, 10_000), "rustuna": _TRIALS}  # Optuna's NSGA-II takes a minute for the second
_LARGE = [
    "study=ficco_sweep",
    "workload.only=[g4]",
    "study.objectives=[makespan_s]",
    "+space.system.gpu.num_cus=range(64,304,2)",
    "+space.system.gpu.hbm_bytes_per_s=interval(2e12,8e12)",
    "+space.system.node.link_bytes_per_s=range(25e9,100e9,1e9)",
    "+space.system.gpu.dma.num_engines=range(1,16)",
]
_GOALS = ("first", "second")


def quality(table: pd.DataFrame) -> dict[str, Any]:
    """Figures of the study: what `auto` attains, and how far it is below the best other method."""
    ok = table[table["status"] == "ok"]
    medians = {
        share: ok.groupby(["scenario", "run.method"])[column("hypervolume", share)].median().unstack()
        for share in _SHARES
    }
    gaps = {share: _gap(found) for share, found in medians.items()}
    until = ok.groupby(["scenario", "run.method"])["points_to_95"].median().unstack()
    return {
        "auto_hypervolume_at_2pct": float(medians[_AT]["auto"].min()),
        "worst_gap_to_best_sampler": gaps[_AT],
        "worst_gap_at_share": {f"{share:g}": gap for share, gap in gaps.items()},
        "duplicate_evaluations": int(ok["repeats"].sum()),
        "seeds": int(ok["run.seed"].nunique()),
        "hypervolume_at_2pct": medians[_AT].to_dict("index"),
        "hypervolume_at_0p2pct": medians[0.002].to_dict("index"),
        "points_to_95": until.to_dict("index"),
    }


def _gap(medians: pd.DataFrame) -> float:
    """By how much the best other method is above `auto`, on the space where that is most; below 0 if on none."""
    return float((medians.drop(columns="auto").max(axis=1) - medians["auto"]).max())


def studied(folder: Path, words: Sequence[str]) -> pd.DataFrame:
    """The table of the study, run through the command line."""
    command = [sys.executable, "-m", "dse", "study=search_benchmark", "tracking=none", f"output_dir={folder}", *words]
    subprocess.run(command, cwd=recorded.ROOT, check=True, stdout=subprocess.DEVNULL)
    return pd.read_parquet(folder / "search_benchmark" / "latest" / "results.parquet")


def overhead() -> dict[str, dict[str, float]]:
    """Milliseconds per trial that methods take to propose so many points, evaluation apart; ours and bare ones'."""
    space = _space()
    own = {name: {str(trials): _proposing_ms(space, name, trials) for trials in _TRIALS} for name in _OWN}
    bare = {
        f"bare_{name}_nsga2": {str(trials): _bare_ms(name, space, trials) for trials in counts}
        for name, counts in _BARE.items()
    }
    return own | bare


def _space() -> Space:
    (space,) = plan(compose.request(["store=none", "tracking=none", "fidelity=none", *_LARGE])).spaces.values()
    return space


def _proposing_ms(space: Space, method: str, trials: int) -> float:
    """Of a whole search: what it chooses, tells apart and learns from."""
    genes, away = Genes(space), 0.0

    def evaluate(points: Sequence[Assignment]) -> list[Outcome]:
        nonlocal away
        came = time.perf_counter()
        found = [dict(zip(_GOALS, row, strict=True)) for row in _landscape(genes, points).tolist()]
        away += time.perf_counter() - came
        return found

    question = Question(space, dict.fromkeys(_GOALS, "minimize"), 0, trials, evaluate, repr)
    began = time.perf_counter()
    explore(question, Search(name=method))
    return 1e3 * (time.perf_counter() - began - away) / trials


def _landscape(genes: Genes, points: Sequence[Assignment]) -> np.ndarray:
    """Two goals that pull the genes of a point to different places."""
    places = genes.rows(points) / np.maximum(1, genes.sizes - 1)
    return np.stack([1 + ((places - where) ** 2).sum(axis=1) for where in (0.3, 0.7)], axis=1)


def _bare_ms(library: str, space: Space, trials: int) -> float:
    """Of the library's own NSGA-II with as many knobs of the same sizes, asked and told one by one."""
    import importlib

    made = importlib.import_module(library)
    if library == "optuna":
        made.logging.set_verbosity(made.logging.WARNING)
    study = made.create_study(directions=["minimize", "minimize"], sampler=made.samplers.NSGAIISampler(seed=0))
    sizes = [len(knob.values) or 1000 for knob in space.order]
    began = time.perf_counter()
    for _ in range(trials):
        trial = study.ask()
        places = [trial.suggest_int(str(index), 0, size - 1) / size for index, size in enumerate(sizes)]
        study.tell(trial.number, [sum((place - where) ** 2 for place in places) for where in (0.3, 0.7)])
    return 1e3 * (time.perf_counter() - began) / trials


def measure(words: Sequence[str]) -> dict[str, Any]:
    """All figures, anew."""
    costs = overhead()
    with tempfile.TemporaryDirectory() as name:
        found = quality(studied(Path(name), words))
    return {**found, "overhead_ms_per_trial": max(max(costs[name].values()) for name in _OWN), "proposing_ms": costs}


def _lines(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    rows = [f"| {name} | {value:.4g} |" for name, value in found.items() if isinstance(value, (int, float))]
    tables = [
        f"\n{name}:\n{pd.DataFrame(value).T.to_string(float_format=lambda cell: f'{cell:.4g}', na_rep='-')}"
        for name, value in found.items()
        if isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())
    ]
    return ["| figure | value |", "|---|--:|", *rows, *tables]


def main() -> int:
    """Print the figures of the record, or make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--record", action="store_true", help="measure, and write benchmarks/records/search.json")
    parser.add_argument("words", nargs="*", help="overrides of the study, for a look at less than all of it")
    given = parser.parse_args()
    if given.record or given.words:
        of = recorded.trees() if given.record else {}
        found = measure(given.words)
        if given.record:
            recorded.write("search", found, command="python -m benchmarks.search --record", of=of)
    else:
        found = recorded.read("search", "make search")
    print(json.dumps(found, indent=2) if given.json else "\n".join(_lines(found)))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
