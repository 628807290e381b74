"""How good the search is: `python -m benchmarks.search [--json] [--record]`.

`--record` runs `study=search_benchmark` (known spaces, every method that needs no more than is installed, eight seeds),
measures what proposing costs, beside bare Optuna and rustuna, in one run, and puts two pictures into `docs/images`;
under an hour. Without it
the figures of the last record are printed (`--costs` measures that part of them again, on a quiet machine); one of
other code is refused, and the exit code is 1.
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
from dse import plots
from dse.config import compose
from dse.search import Outcome, Search, SearchQuestion, explore
from dse.search.genes import Genes
from dse.space import Assignment, Space
from dse.study.plan import plan
from dse_search_benchmark.backend import column
from dse_search_benchmark.study import STUDY

_SHARES = (0.005, 0.01, 0.02)
_AT = 0.02
_TRIALS = (1_000, 10_000, 50_000)
_OWN = ("auto",)
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
_UNLIKELY = 0.05  # probability below which a difference is not taken for noise
_PICTURES = ("hypervolume", "points_to_95")


def quality(table: pd.DataFrame) -> dict[str, Any]:
    """Figures of the study: what `auto` attains, and how far it is below the best other method."""
    ok = table[table["status"] == "ok"]
    ok = ok.assign(until=ok["points_to_95"].where(ok["missed_hypervolume"] <= 0.05, np.inf))
    medians = {share: _medians(ok, column("hypervolume", share)) for share in _SHARES}
    gaps = {share: _gap(found) for share, found in medians.items()}
    return {
        "spaces": int(ok["scenario"].nunique()),
        "auto_worst_hypervolume_at_2pct": float(medians[_AT]["auto"].min()),
        "auto_worst_gap_to_best": max(gaps.values()),
        "auto_behind": _behind(ok),
        "worst_gap_at_share": {f"{share:g}": gap for share, gap in gaps.items()},
        "duplicates": int(ok["repeats"].sum()),
        "seeds": int(ok["run.seed"].nunique()),
        **{f"hypervolume_at_{share:g}": _plain(found) for share, found in medians.items()},
        "points_to_95": _plain(_medians(ok, "until")),
    }


def _medians(ok: pd.DataFrame, name: str) -> pd.DataFrame:
    """Of a metric, over the seeds of each space (row) and method (column); methods that do not have it are left out."""
    return ok.groupby(["scenario", "run.method"])[name].median().unstack().dropna(axis="columns", how="all")


def _behind(ok: pd.DataFrame) -> list[dict[str, Any]]:
    """Where another method is ahead of `auto` by more than noise: by the one-sided test of Mann and Whitney."""
    from scipy.stats import mannwhitneyu

    found = []
    for (space, method), other in ok[ok["run.method"] != "auto"].groupby(["scenario", "run.method"]):
        own = ok[(ok["scenario"] == space) & (ok["run.method"] == "auto")]
        for name in (column("hypervolume", share) for share in _SHARES):
            unlikely = float(mannwhitneyu(other[name], own[name], alternative="greater").pvalue)
            if unlikely < _UNLIKELY:
                gap = float(other[name].median() - own[name].median())
                found.append({"space": space, "method": method, "at": name, "gap": gap, "p": unlikely})
    return found


def _plain(found: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """A table for JSON; None for what is not finite."""
    return {
        str(name): {str(key): value if np.isfinite(value) else None for key, value in row.items()}
        for name, row in found.iterrows()
    }


def _gap(medians: pd.DataFrame) -> float:
    """By how much the best other method is above `auto`, on the space where that is most; below 0 if on none."""
    return float((medians.drop(columns="auto").max(axis=1) - medians["auto"]).max())


def studied(folder: Path, words: Sequence[str]) -> pd.DataFrame:
    """The table of the study, run through the command line."""
    command = [sys.executable, "-m", "dse", "study=search_benchmark", "tracking=none", f"output_dir={folder}"]
    subprocess.run([*command, *words], cwd=recorded.ROOT, check=True, stdout=subprocess.DEVNULL)
    return pd.read_parquet(folder / "search_benchmark" / "latest" / "results.parquet")


def draw(table: pd.DataFrame, folder: Path) -> None:
    """Some of the study's pictures, of all methods together."""
    for name, make in STUDY.figures(table, pd.DataFrame()):
        if name in _PICTURES:
            plots.save(make, folder, f"search_{name}", formats=["png"])


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
        found: list[Outcome] = [dict(zip(_GOALS, row, strict=True)) for row in _landscape(genes, points).tolist()]
        away += time.perf_counter() - came
        return found

    question = SearchQuestion(space, dict.fromkeys(_GOALS, "minimize"), 0, trials, evaluate, repr)
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


def measure(words: Sequence[str], images: Path | None = None) -> dict[str, Any]:
    """All figures, anew. images: where pictures are put."""
    proposing = costs()
    with tempfile.TemporaryDirectory() as name:
        table = studied(Path(name), words)
    if images is not None:
        draw(table, images)
    found = quality(table)
    return {**found, **proposing}


def costs() -> dict[str, Any]:
    """What proposing takes, anew: of our two methods the most of any number of trials, and all of it."""
    found = overhead()
    return {"overhead_ms_per_trial": max(max(found[name].values()) for name in _OWN), "proposing_ms": found}


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
    parser.add_argument("--costs", action="store_true", help="measure what proposing costs alone, into the record")
    parser.add_argument("words", nargs="*", help="overrides of the study, for a look at less than all of it")
    given = parser.parse_args()
    if given.record or given.words:
        of = recorded.trees() if given.record else {}
        found = measure(given.words, recorded.ROOT / "docs" / "images" if given.record else None)
        if given.record:
            recorded.write("search", found, command="python -m benchmarks.search --record", of=of)
    else:
        found = recorded.read("search", "make search")
        if found and given.costs:
            found |= costs()
            recorded.write("search", found, command="python -m benchmarks.search --record, --costs", of=found["trees"])
    print(json.dumps(found, indent=2) if given.json else "\n".join(_lines(found)))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
