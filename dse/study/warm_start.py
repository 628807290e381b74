"""Warm start: a search begins with the points that were on the front of earlier runs, evaluated anew where it is asked.

The front of an earlier run is a guess of where good points lie, not a result: its hardware, workload or backend may
differ. So only the points are taken over, not their results.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.results.run_folder import FinishedRun, read
from dse.space import Assignment, Knob, Space, get_path
from dse.study.plan import Plan

if TYPE_CHECKING:
    import pandas as pd


def points(plan: Plan, scenario: str) -> list[Assignment]:
    """Return the points of a scenario's space that were on its front in earlier runs, in their order.

    A run without such a scenario gives the fronts of all its scenarios. Knobs that are not searched now are left out; a
    knob that was not searched then has the value of that run. Points outside the space are left out. Raises ConfigError
    for a run that is not finished.
    """
    return [
        point
        for run in plan.settings.search.warm_start
        for point in _of(FinishedRun.find(Path(plan.settings.output_dir), run, "search.warm_start"), plan, scenario)
    ]


def _of(run: FinishedRun, plan: Plan, scenario: str) -> Iterator[Assignment]:
    space = plan.spaces[scenario]
    paths = [knob.path for knob in space.order if knob.path in run.columns]  # a knob may depend on those before it
    rows = read(run, ["scenario", "on_front", *paths])
    rows = rows[rows["on_front"]]
    scenario_rows = rows[rows["scenario"] == scenario]
    for _, row in (scenario_rows if len(scenario_rows) else rows).iterrows():
        point = _point(space, run, row)
        if point is not None:
            yield point


def _point(space: Space, run: FinishedRun, row: pd.Series) -> Assignment | None:
    """Return the point of a space that has the values of a row of a run; None where there is none."""
    import pandas as pd

    point: Assignment = {}

    def choose(knob: Knob) -> Any:
        value = row[knob.path] if knob.path in row.index else get_path(run.config, knob.path)  # searched then, or fixed
        point[knob.path] = None if pd.isna(value) else space.meant(knob, value, point)  # did not count in that row
        return point[knob.path]

    chosen = space.walk(choose)
    return None if None in chosen.values() else chosen  # a knob that counts now has no value there
