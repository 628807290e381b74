"""Figures of serving: throughput against interactivity, what limits leave, steps and memory of engines over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, FigureSheet, Frame, fronts, tables, timelines

if TYPE_CHECKING:
    import pandas as pd

_LIMITS = 12  # limits of a heat map
_BINS = 16  # of time
_SPLITS = 8  # rows of a heat map


def interactivity(points: pd.DataFrame) -> FigureSheet:
    """Tokens/s a GPU against tokens/s a user, by split."""
    inside = points[points["inside"]] if points["inside"].any() else points
    best = inside.iloc[inside["tokens_per_s_per_gpu"].argmax()]
    title = f"At most {best['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU within the limits, with {best['split']}"
    axes = [Axis("tokens_per_s_per_user", "tokens/s a user"), Axis("tokens_per_s_per_gpu", "tokens/s a GPU")]
    note = "each point is a deployment under one traffic; means over requests"
    return fronts.pareto(points, axes, by="split", frame=Frame(title, note))


def within_limits(points: pd.DataFrame) -> FigureSheet:
    """The most tokens/s a GPU of splits within limits of a later token: of those that serve most at some, first."""
    import pandas as pd

    low, high = points["tpot_s"].min(), points["tpot_s"].max()
    limits = [float(f"{limit:.2g}") for limit in np.geomspace(low, high, _LIMITS) * 1.02]
    rows = [
        {"limit_s": limit, "split": split, "rate": within["tokens_per_s_per_gpu"].max() if len(within) else np.nan}
        for limit in dict.fromkeys(limits)
        for split, group in points.groupby("split", sort=True)
        if (within := group[group["tpot_s"] <= limit]) is not None
    ]
    table = pd.DataFrame(rows)
    winners = table.loc[table.groupby("limit_s")["rate"].idxmax().dropna(), "split"]
    best = table.groupby("split")["rate"].max().sort_values(ascending=False).index
    table = table[table["split"].isin(list(dict.fromkeys([*winners, *best]))[:_SPLITS])]
    tight, loose = winners.iloc[0], winners.iloc[-1]
    title = f"{tight} serves most within the tightest limit of a later token, {loose} within the loosest"
    if tight == loose:
        title = f"{tight} serves most within the tightest and the loosest limit of a later token"
    value, x = Axis("rate", "tokens/s a GPU"), Axis("limit_s", "limit of a later token at the percentile", "s")
    return tables.heat(
        table, value, x=x, y="split", frame=Frame(title, "in the cells: tokens/s a GPU; empty: none within")
    )


def engine_steps(log: Any, name: str) -> FigureSheet:
    """Steps of each engine: prompts alone, sequences that generate, or both. log: rows of a run's log."""
    import pandas as pd

    kinds = np.where(log[:, 4] == 0, "generating", np.where(log[:, 3] == 0, "prompts", "both"))
    lanes = [f"engine {engine:.0f}" for engine in log[:, 0]]
    rows = pd.DataFrame({"lane": lanes, "kind": kinds, "start_s": log[:, 1], "finish_s": log[:, 2]})
    shares = rows.assign(time=rows["finish_s"] - rows["start_s"]).groupby("kind")["time"].sum()
    title = (
        f"{name}: steps with prompts take {100 * (1 - shares.get('generating', 0.0) / shares.sum()):.0f} % of the time"
    )
    return timelines.timeline(rows, title)


def occupancy(log: Any, pages: Any, name: str) -> FigureSheet:
    """Share of the pages of keys and values of each engine over time. pages: of each engine."""
    import pandas as pd

    end = float(log[:, 2].max())
    bins = np.minimum((log[:, 1] / end * _BINS).astype(int), _BINS - 1)
    rows = pd.DataFrame(
        {
            "engine": [f"engine {engine:.0f}" for engine in log[:, 0]],
            "time_s": [float(f"{middle:.3g}") for middle in (bins + 0.5) * end / _BINS],
        }
    )
    rows["share"] = log[:, 7] / np.asarray(pages)[log[:, 0].astype(int)]
    means = rows.groupby(["engine", "time_s"], sort=True)["share"].mean().reset_index()
    title = f"{name}: at most {100 * rows['share'].max():.0f} % of the pages are in use"
    return tables.heat(
        means, Axis("share", "pages in use", "%"), x=Axis("time_s", "time", "s"), y="engine", frame=Frame(title)
    )
