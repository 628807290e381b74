"""Agreement of levels of a ladder on the points that both evaluated: ranks, signed errors, fronts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.results.pareto import first_best, minimized

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


def compare(rows: pd.DataFrame, levels: Sequence[str], goals: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every pair of neighbouring levels, the coarser first: by scenario, and overall.

    A level without results has no neighbours: of a pair that has no points in common, nothing can be told.
    rows: `scenario`, `key`, `level`, `status`, `promoted` and the objectives.
    """
    comparisons = []
    present = set(rows.loc[rows["status"] == "ok", "level"])
    for coarse, fine in pairwise(level for level in levels if level in present):
        both = match_levels(rows, coarse, fine)
        if both.empty:
            continue
        scenarios = {
            str(name): _scenario(scenario_rows, goals) for name, scenario_rows in both.groupby("scenario", sort=False)
        }
        comparisons.append(
            {"coarse": coarse, "fine": fine, "scenarios": scenarios, "overall": _overall(both, scenarios, goals)}
        )
    return comparisons


def match_levels(rows: pd.DataFrame, coarse: str, fine: str) -> pd.DataFrame:
    """The points that have a result at both levels; columns of the finer one end in `.fine`."""
    ok = rows[rows["status"] == "ok"]
    coarse_rows, fine_rows = (ok[ok["level"] == name] for name in (coarse, fine))
    return coarse_rows.merge(fine_rows, on=["scenario", "key"], suffixes=("", ".fine"), validate="one_to_one")


def _scenario(both: pd.DataFrame, goals: Mapping[str, str]) -> dict[str, Any]:
    coarse, fine = _values(both, goals), _values(both, goals, ".fine")
    # promoted points are no random sample: their ranks agree less by choice
    drawn = (both["promoted"] == "sample").to_numpy()
    objectives = {
        name: {
            "points": len(both),
            "tau": tau(coarse[:, place], fine[:, place]),
            "tau_of_sample": tau(coarse[drawn, place], fine[drawn, place]),
            "error": _spread(errors(both, name)),
        }
        for place, name in enumerate(goals)
    }
    return {"objectives": objectives, "front": _fronts(coarse, fine)}


def _values(both: pd.DataFrame, goals: Mapping[str, str], ending: str = "") -> Floats:
    """Objectives [points, objectives], smaller being better."""
    return minimized({name: both[f"{name}{ending}"] for name in goals}, goals)


def tau(coarse: Floats, fine: Floats) -> float | None:
    """Kendall's rank correlation (tau-b, ties allowed for); None where it is not defined.

    M. G. Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945).
    """
    # scipy.stats has it, and takes 0.6 s to import; levels share few points
    orders = [np.sign([coarse - first, fine - second]) for first, second in zip(coarse, fine, strict=True)]
    untied = math.prod(sum(int(np.abs(order[level]).sum()) for order in orders) for level in (0, 1))
    return sum(float(np.prod(order, axis=0).sum()) for order in orders) / math.sqrt(untied) if untied else None


def errors(both: pd.DataFrame, name: str) -> Floats:
    """Relative errors of the coarser level: below zero it is too low. NaN where the finer one is 0."""
    coarse, fine = both[name].to_numpy(float), both[f"{name}.fine"].to_numpy(float)
    relative: Floats = np.divide(coarse - fine, np.abs(fine), out=np.full(len(fine), np.nan), where=fine != 0)
    return relative


def _spread(values: Floats) -> dict[str, float] | None:
    """Median, tenth and ninetieth percentile; None where nothing is known."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low, middle, high = np.percentile(finite, [10, 50, 90])
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def _fronts(coarse: Floats, fine: Floats) -> dict[str, Any]:
    """Members of the front of these points by each level; how many promotion brought in and took off."""
    before, after = _on_front(coarse), _on_front(fine)
    best = fine[first_best(fine)]
    return {
        "before": int(before.sum()),
        "after": int(after.sum()),
        "entered": int((after & ~before).sum()),
        "left": int((before & ~after).sum()),
        # judged at the finer level, whatever each level calls best
        "winner_changed": bool((fine[first_best(coarse)] != best).any()),
    }


def _on_front(values: Floats) -> NDArray[np.bool_]:
    import moocore

    return np.asarray(moocore.is_nondominated(np.ascontiguousarray(values), keep_weakly=True))


def _overall(both: pd.DataFrame, scenarios: Mapping[str, Any], goals: Mapping[str, str]) -> dict[str, Any]:
    """All scenarios: errors of all their points, the mean of their rank correlations, sums of changes."""
    objectives = {
        name: {
            "points": len(both),
            "tau": _mean(scenario["objectives"][name]["tau"] for scenario in scenarios.values()),
            "tau_of_sample": _mean(scenario["objectives"][name]["tau_of_sample"] for scenario in scenarios.values()),
            "error": _spread(errors(both, name)),
        }
        for name in goals
    }
    fronts = [scenario["front"] for scenario in scenarios.values()]
    front = {name: sum(scenario[name] for scenario in fronts) for name in ("before", "after", "entered", "left")}
    changed = sum(scenario["winner_changed"] for scenario in fronts)
    return {"objectives": objectives, "front": {**front, "winners_changed": changed, "scenarios": len(fronts)}}


def _mean(values: Iterator[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
