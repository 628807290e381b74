"""GEMMs that arrive (arXiv:2409.02227): the run-time logic against one at a time, all at once, fixed degrees, oracle.

The oracle knows the future, and is the shortest of all that were tried on a stream: also of fixed degrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.results.run_folder import FinishedRun
from studies.plain import Plain, geometric_mean

if TYPE_CHECKING:
    import pandas as pd

_POLICY, _DEGREE = "logic.policy", "logic.degree"


class GoldylocArrivals(Plain):
    """Speed-ups by policy, the gap to the oracle, and what deciding gains over fixed degrees."""

    columns = (_POLICY, _DEGREE)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """The gap to the oracle and the gains, over all streams."""
        seconds = seconds_by_policy(run.outputs.read_table("results"))
        # a gap needs the oracle, and gains need what they are over
        if {"dynamic", "oracle", "sequential", "default"} <= set(seconds):
            yield "gains", gains(seconds)

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Speed-up over one at a time of every stream."""
        seconds = seconds_by_policy(table)
        if {"dynamic", "oracle", "sequential", "default"} <= set(seconds):
            yield "policies", partial(_policies, seconds)


def seconds_by_policy(table: pd.DataFrame) -> pd.DataFrame:
    """Makespans [s] by stream (rows) and policy (columns), fixed degrees apart."""
    ok = table[table["status"] == "ok"]
    if not {_POLICY, _DEGREE} <= set(ok):
        return ok.iloc[:0, :0]
    names = [
        # a fixed degree is a policy of its own, for each degree
        f"static {degree:.0f}" if policy == "static" else str(policy)
        for policy, degree in zip(ok[_POLICY].astype(str), ok[_DEGREE].astype(float), strict=True)
    ]
    seconds = ok.assign(way=names).pivot_table(index="scenario", columns="way", values="makespan_s", sort=False)
    return seconds.rename(columns=str)


def gains(seconds: pd.DataFrame) -> Mapping[str, float]:
    """Gap of the logic to the oracle, its geometric mean gain over each policy, and over the fixed degree that is best
    in hindsight for each stream, and for all streams together.
    """
    dynamic, static = seconds["dynamic"], seconds[[name for name in map(str, seconds) if name.startswith("static")]]
    # over the shortest of all columns: a fixed degree may beat the oracle, which tries one decision at a time
    gap = dynamic / seconds.min(axis=1) - 1
    means = {str(name): geometric_mean(static[name] / dynamic) for name in static}
    return {
        "goldyloc_oracle_gap": float(np.median(gap)),
        "largest_oracle_gap": float(gap.max()),
        "over_sequential": geometric_mean(seconds["sequential"] / dynamic),
        "over_default": geometric_mean(seconds["default"] / dynamic),
        "over_best_static_of_each": geometric_mean(static.min(axis=1) / dynamic),
        # the best single degree is the one over which the logic gains least
        "over_best_static_of_all": min(means.values()),
        **{f"over_{name.replace(' ', '_')}": value for name, value in means.items()},
    }


def _policies(seconds: pd.DataFrame) -> FigureSheet:
    """Speed-up over sequential execution of every stream by policy."""
    shown = [name for name in ("default", "dynamic", "oracle") if name in seconds]
    ratios = seconds[shown].rdiv(seconds["sequential"], axis=0).reset_index()
    rows = ratios.melt(id_vars="scenario", var_name="way", value_name="speedup")
    means = gains(seconds)
    title = f"The run-time logic is {100 * means['goldyloc_oracle_gap']:.1f} % from the oracle in the median, "
    title += f"{means['over_sequential']:.2f}x as fast as one at a time"
    over = Axis("speedup", "speed-up over one at a time [x]", centre=1.0)
    return tables.dots(rows, over, row="scenario", by="way", frame=Frame(title))


STUDY = GoldylocArrivals()
