"""How far levels of a ladder agree on the points that both evaluated: ranks, signed errors, fronts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.results.pareto import first_best, signed

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


def compare(rows: pd.DataFrame, levels: Sequence[str], goals: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every pair of neighbouring levels, the coarser first: by scenario, and overall.

    rows: `scenario`, `key`, `level`, `status`, `promoted` and the objectives.
    """
    found = []
    for coarse, fine in pairwise(levels):
        both = matched(rows, coarse, fine)
        scenarios = {str(name): _scenario(own, goals) for name, own in both.groupby("scenario", sort=False)}
        found.append(
            {"coarse": coarse, "fine": fine, "scenarios": scenarios, "overall": _overall(both, scenarios, goals)}
        )
    return found


def matched(rows: pd.DataFrame, coarse: str, fine: str) -> pd.DataFrame:
    """The points that have a result at both levels; columns of the finer one end in `.fine`."""
    ok = rows[rows["status"] == "ok"]
    one, other = (ok[ok["level"] == name] for name in (coarse, fine))
    return one.merge(other, on=["scenario", "key"], suffixes=("", ".fine"), validate="one_to_one")


def _scenario(both: pd.DataFrame, goals: Mapping[str, str]) -> dict[str, Any]:
    coarse, fine = _values(both, goals), _values(both, goals, ".fine")
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
    return signed({name: both[f"{name}{ending}"] for name in goals}, goals)


def tau(coarse: Floats, fine: Floats) -> float | None:
    """Kendall's rank correlation (tau-b, ties allowed for); None where it is not defined.

    M. G. Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945).
    """
    from scipy.stats import kendalltau

    if len(np.unique(coarse)) < 2 or len(np.unique(fine)) < 2:
        return None
    found = float(kendalltau(coarse, fine).statistic)
    return found if math.isfinite(found) else None


def errors(both: pd.DataFrame, name: str) -> Floats:
    """What the coarser level says over what the finer says, less one: below zero it is too low. NaN where fine is 0."""
    coarse, fine = both[name].to_numpy(float), both[f"{name}.fine"].to_numpy(float)
    found: Floats = np.divide(coarse - fine, np.abs(fine), out=np.full(len(fine), np.nan), where=fine != 0)
    return found


def _spread(values: Floats) -> dict[str, float] | None:
    """Median, tenth and ninetieth percentile; None where nothing is known."""
    known = values[np.isfinite(values)]
    if not known.size:
        return None
    low, middle, high = np.percentile(known, [10, 50, 90])
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
            "tau": _mean(one["objectives"][name]["tau"] for one in scenarios.values()),
            "tau_of_sample": _mean(one["objectives"][name]["tau_of_sample"] for one in scenarios.values()),
            "error": _spread(errors(both, name)),
        }
        for name in goals
    }
    fronts = [one["front"] for one in scenarios.values()]
    front = {name: sum(one[name] for one in fronts) for name in ("before", "after", "entered", "left")}
    changed = sum(one["winner_changed"] for one in fronts)
    return {"objectives": objectives, "front": {**front, "winners_changed": changed, "scenarios": len(fronts)}}


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
