"""Figures of serving: throughput against interactivity, what limits leave, steps and memory of engines over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import dse_serving.columns as at
from dse.plots import Axis, FigureSheet, Frame, fronts, tables, timelines
from dse.values.units import with_prefix
from dse_serving.choice import best_of, named, within
from dse_serving.results import MISSES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from dse_serving.design import Slo
    from dse_serving.results import ServingRun

_LIMITS = 12  # limits of a heat map
_BINS = 16  # of time
_SPLITS = 8  # rows of a heat map


def interactivity(points: pd.DataFrame) -> FigureSheet:
    """Tokens/s a GPU against tokens/s a user, by split."""
    inside = within(points)
    best = best_of(inside if len(inside) else points)
    limits = "within the limits" if len(inside) else "though no deployment is within the limits"
    title = f"{named(best)}: {best['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU, {limits}"
    axes = [Axis("tokens_per_s_per_user", "tokens/s a user"), Axis("tokens_per_s_per_gpu", "tokens/s a GPU")]
    note = "each point is a deployment under one traffic, in steady state; means over requests"
    missed = points["verdict"] == MISSES
    note += "; what exceeds a limit is on no front" if missed.any() else ""
    points = points.assign(inside=~missed)
    return fronts.pareto(points, axes, by="split", frame=Frame(title, note))


def within_limits(points: pd.DataFrame) -> FigureSheet:
    """The most tokens/s a GPU of splits within limits of a later token: of those that serve most at some, first."""
    import pandas as pd

    low, high = points["tpot_s"].min(), points["tpot_s"].max()
    # two digits for the axis; 2 % wider, so that rounding keeps most points inside
    limits = [float(f"{limit:.2g}") for limit in np.geomspace(low, high, _LIMITS) * 1.02]
    # the largest of no rates is NaN
    rows = [
        {"limit_s": limit, "split": split, "rate": group["tokens_per_s_per_gpu"][group["tpot_s"] <= limit].max()}
        for limit in dict.fromkeys(limits)
        for split, group in points.groupby("split", sort=True)
    ]
    table = pd.DataFrame(rows)
    served = table.dropna(subset="rate")  # no split may be within a limit that rounding made too tight
    winners = table.loc[served.groupby("limit_s")["rate"].idxmax(), "split"]
    best = table.groupby("split")["rate"].max().sort_values(ascending=False).index
    table = table[table["split"].isin(list(dict.fromkeys([*winners, *best]))[:_SPLITS])]
    tight, loose = winners.iloc[0], winners.iloc[-1]
    title = f"{tight} serves most within the tightest limit of a later token, {loose} within the loosest"
    if tight == loose:
        title = f"{tight} serves most within the tightest and the loosest limit of a later token"
    share = points["slo.percentile"].iloc[0] if "slo.percentile" in points else None  # older tables have none
    held = "slo.percentile of" if share is None else f"{100 * share:g} % of"
    value, x = Axis("rate", "tokens/s a GPU"), Axis("limit_s", f"limit of a later token, for {held} the requests", "s")
    return tables.heat(
        table, value, x=x, y="split", frame=Frame(title, "in the cells: tokens/s a GPU; empty: none within")
    )


def goodput(runs: Mapping[str, ServingRun], name: str, slo: Slo) -> FigureSheet:
    """Requests a second and GPU within limits, over one limit of every request. name: `ttft_s` or `tpot_s`; the other
    limit is that of slo.
    """
    import pandas as pd

    swept, fixed = ("ttft_s", "tpot_s") if name == "ttft_s" else ("tpot_s", "ttft_s")
    times = np.concatenate([getattr(run, swept) for run in runs.values()])
    low, high = np.maximum(np.quantile(times, [0.01, 1.0]), 1e-6)
    limits = np.geomspace(float(low), float(high), _LIMITS)
    rows = [
        {"split": split, "limit_s": limit, "rate": run.goodput(**{swept: limit, fixed: getattr(slo, fixed)})}
        for split, run in runs.items()
        for limit in limits
    ]
    table, words = pd.DataFrame(rows), "to the first token" if swept == "ttft_s" else "of a later token"
    half = table[table["limit_s"] <= np.median(limits)]
    best = half.iloc[int(half["rate"].argmax())]
    title = f"{best['split']} serves most within a time {words} of {with_prefix(best['limit_s'], 'second')}"
    axes = Axis("limit_s", f"limit of the time {words}", "s"), Axis("rate", "requests a GPU within the limits", "1/s")
    return tables.curves(table, axes[0], y=axes[1], by="split", frame=Frame(title, "a limit holds for each request"))


def engine_steps(log: Any, name: str) -> FigureSheet:
    """Steps of each engine: prompts alone, sequences that generate, or both. log: rows of a run's log."""
    import pandas as pd

    alone = np.where(log[:, at.LOG_GENERATING] == 0, "prompts", "both")
    kinds = np.where(log[:, at.LOG_PROMPT_TOKENS] == 0, "generating", alone)
    lanes = [f"engine {engine:.0f}" for engine in log[:, at.LOG_ENGINE]]
    times = {"start_s": log[:, at.LOG_START], "finish_s": log[:, at.LOG_FINISH]}
    rows = pd.DataFrame({"lane": lanes, "kind": kinds, **times})
    shares = rows.assign(time=rows["finish_s"] - rows["start_s"]).groupby("kind")["time"].sum()
    title = (
        f"{name}: steps with prompts take {100 * (1 - shares.get('generating', 0.0) / shares.sum()):.0f} % of the time"
    )
    return timelines.timeline(rows, title)


def occupancy(log: Any, pages: Any, name: str) -> FigureSheet:
    """Share of the memory for keys and values of each engine over time. pages: of each engine."""
    import pandas as pd

    end = float(log[:, at.LOG_FINISH].max())
    # by the begin of a step
    bins = np.minimum((log[:, at.LOG_START] / end * _BINS).astype(int), _BINS - 1)
    rows = pd.DataFrame(
        {
            "engine": [f"engine {engine:.0f}" for engine in log[:, at.LOG_ENGINE]],
            "time_s": [float(f"{middle:.3g}") for middle in (bins + 0.5) * end / _BINS],
        }
    )
    rows["share"] = log[:, at.LOG_PAGES] / np.asarray(pages)[log[:, at.LOG_ENGINE].astype(int)]
    means = rows.groupby(["engine", "time_s"], sort=True)["share"].mean().reset_index()
    title = f"{name}: at most {100 * rows['share'].max():.0f} % of the KV memory are in use"
    return tables.heat(
        means, Axis("share", "KV memory in use", "%"), x=Axis("time_s", "time", "s"), y="engine", frame=Frame(title)
    )
