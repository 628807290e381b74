"""Knobs that change nothing: over which axes of a table all rows have one outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dse.results.pareto import outcome_keys

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Axes:
    """Axes of a knob: sets of rows with a result that differ in its value alone, at least two each.

    idle: over how many of the axes no metric changes.
    """

    path: str
    count: int
    idle: int

    @property
    def changes_nothing(self) -> bool:
        """True if the knob has no effect wherever it was varied."""
        return self.idle == self.count

    def __str__(self) -> str:
        where = "" if self.changes_nothing else f" on {self.idle} of {self.count} axes"
        return f"{self.path}{where}"


def idle_axes(table: pd.DataFrame, knobs: Sequence[str], metrics: Sequence[str]) -> list[Axes]:
    """The axes of each knob that changes no metric over some of them; knobs that always matter are left out."""
    import pandas as pd

    rows = table[table["status"] == "ok"]
    scenarios = pd.factorize(rows["scenario"])[0]  # numbers in place of texts: groups are found faster
    outcomes = outcome_keys([rows[name].to_numpy(float) for name in metrics], scenarios)
    # a missing value is a value of its own
    codes = {path: pd.factorize(rows[path], use_na_sentinel=False)[0] for path in knobs}
    axes = []
    for path in knobs:
        other_knobs = pd.DataFrame({"scenario": scenarios, **{name: codes[name] for name in knobs if name != path}})
        # rows that agree in all other knobs lie on one axis
        axis = other_knobs.groupby(list(other_knobs), sort=False).ngroup().to_numpy()
        outcomes_of_axis = pd.DataFrame({"axis": axis, "value": codes[path], "outcome": outcomes[:, 0]})
        sizes = outcomes_of_axis.groupby("axis").nunique()
        varied = sizes["value"].to_numpy() > 1  # an axis with a single value shows nothing
        idle = int(np.sum(varied & (sizes["outcome"].to_numpy() == 1)))
        if idle:
            axes.append(Axes(path, int(varied.sum()), idle))
    return axes
