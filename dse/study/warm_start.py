"""Warm start: a search begins with the points that were on the front of earlier runs, evaluated anew where it is asked.

What an earlier run found is a guess of where good points lie, no result: its hardware, workload or backend may be
another one. So only where its points lie is taken over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.results.finished_run import Finished, read
from dse.space import Assignment, Knob, Space, get_path
from dse.study.plan import Plan

if TYPE_CHECKING:
    import pandas as pd


def points(plan: Plan, scenario: str) -> list[Assignment]:
    """Points of the space of a scenario that were on the front of its earlier runs, in their order.

    Of a run without such a scenario it is the fronts of all its scenarios. What is not searched now is left out; a knob
    that was not searched then has the value of that run. Points outside the space are none. Raises ConfigError for
    what is no finished run.
    """
    return [
        point
        for said in plan.settings.search.warm_start
        for point in _of(Finished.find(Path(plan.settings.output_dir), said, "search.warm_start"), plan, scenario)
    ]


def _of(run: Finished, plan: Plan, scenario: str) -> Iterator[Assignment]:
    space = plan.spaces[scenario]
    paths = [knob.path for knob in space.order if knob.path in run.columns]
    rows = read(run, ["scenario", "on_front", *paths])
    rows = rows[rows["on_front"]]
    own = rows[rows["scenario"] == scenario]
    for _, row in (own if len(own) else rows).iterrows():
        point = _point(space, run, row)
        if point is not None:
            yield point


def _point(space: Space, run: Finished, row: pd.Series) -> Assignment | None:
    """The point of a space that holds what a row of a run held; None where there is none."""
    import pandas as pd

    point: Assignment = {}

    def choose(knob: Knob) -> Any:
        held = row[knob.path] if knob.path in row.index else get_path(run.config, knob.path)
        point[knob.path] = None if pd.isna(held) else space.meant(knob, held, point)
        return point[knob.path]

    found = space.walk(choose)
    return None if None in found.values() else found
