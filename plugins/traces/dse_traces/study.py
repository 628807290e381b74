"""Recorded runs with changes: which plan makes a run shortest, with the interval of its gain, and what it holds.

The answer names the best plan in software of each profile, what each change gains alone, and how sure that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import Axis, Draw, FigureSheet, Frame, comparisons, fronts
from dse.results.words import cell, choice_in_words
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

# in the order in which an answer lists changes
KNOBS = ("plan.order", "plan.mover", "plan.sms", "plan.fused", "plan.micro_batches", "plan.link", "plan.gpu")
_OF_GROUPS = "plan.groups."
_TIME, _HELD = "makespan_s", "comm_sm_s"
_SHOWN = 14  # rows of the figure of gains
_ALONE, _BEST = "one change", "several changes"
# a tenth of what is worth advising, so that near misses are still drawn
_WORTH = 1e-4  # share of the run that a row of the figure gains or loses


class Trace(Plain):
    """A table of gains with intervals, and figures of gains and fronts."""

    columns = KNOBS

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Gains of single changes and of the best plans; time of the run against SMs that collectives hold."""
        rows = gains(table)
        if rows.empty:
            return
        yield "gains", partial(_gains_figure, rows)
        points = table[table["status"] == "ok"]
        if points[_HELD].nunique() > 1:
            yield "front", partial(_front_figure, points, rows)

    def extras(self, run: Any) -> Iterator[tuple[str, Any]]:
        """The table of gains."""
        rows = gains(run.outputs.read_table("results"))
        if len(rows):
            yield "gains", rows


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each scenario and change: what changes, the run before and with it [s], the gain and its interval.

    The best plan of all is the first of each scenario; then the best plans that change one knob, by what they gain.
    """
    import pandas as pd

    rows = list[dict[str, Any]]()
    for scenario, legal in table[table["status"] == "ok"].groupby("scenario", sort=False):
        # the baseline is the run as recorded; without it no change can be counted
        recorded = legal[legal["baseline"] == legal["key"]]
        if recorded.empty:
            continue
        usual = {knob: recorded[knob].iloc[0] for knob in KNOBS if knob in legal}
        # knobs of groups are null if they are not set, and 0 (SMs as recorded) is no change either
        usual |= {str(name): 0 for name in legal if str(name).startswith(_OF_GROUPS)}
        knobs = list(usual)
        changes = np.sum([_differs(legal[knob], value) for knob, value in usual.items()], axis=0)
        # stable: of plans with equal times the first one stays the best
        points = legal.assign(changes=changes).sort_values(_TIME, kind="stable")
        rows.append(_row(str(scenario), points.iloc[0], usual))
        single = points[points["changes"] == 1]
        # rows are in the order of their times, so the first of each single change is its best
        ways = single[knobs].apply(lambda row: "|".join(map(str, row)), axis=1)
        rows += [_row(str(scenario), point, usual) for _, point in single[~ways.duplicated()].iterrows()]
    return pd.DataFrame(rows)


def _differs(values: pd.Series[Any], recorded: Any) -> list[bool]:
    """Which values of a knob count and are not the recorded one."""
    # null is no choice: a knob that does not apply is as recorded
    texts = values.astype(object).where(values.notna(), recorded).map(str)
    return [text != str(recorded) for text in texts]


def _row(scenario: str, point: Any, usual: Mapping[str, Any]) -> dict[str, Any]:
    import pandas as pd

    changed = [knob for knob, value in usual.items() if _differs(pd.Series([point[knob]]), value)[0]]
    words = choice_in_words(point, changed) or "as recorded"
    times = {"before_s": float(point[_TIME] + point["gain_s"]), "with_s": float(point[_TIME])}
    interval = {name: float(point[f"gain{name}_s"]) for name in ("_low", "", "_high")}
    named = dict(zip(("low", "gain", "high"), interval.values(), strict=True))
    return {"scenario": scenario, "change": words, "changes": int(point["changes"]), **times, **named}


def _gains_figure(rows: pd.DataFrame) -> FigureSheet:
    """Dots with intervals: the best plan and single changes of each scenario."""
    several = rows["scenario"].nunique() > 1
    # the best plan stays, even when it gains next to nothing
    worth = rows[(rows["gain"].abs() > _WORTH * rows["before_s"]) | (rows["changes"] > 1)]
    shown = worth.drop_duplicates(["scenario", "change"]).sort_values("gain", ascending=False).head(_SHOWN)
    best = rows.sort_values("gain", ascending=False).iloc[0]
    # a change that loses more than the best one gains would stretch the axis
    near = shown[shown["gain"] >= -best["gain"]]
    drawn = [
        {
            "name": _name(row, several=several),
            "kind": _ALONE if row["changes"] <= 1 else _BEST,
            **{name: row[name] for name in ("low", "gain", "high")},
        }
        for row in (near if len(near) else rows.head(1)).to_dict("records")
    ]
    return comparisons.gains(drawn, conclusion(best), note="dot: as expected; line: in the cases of the laws")


def _name(row: Any, *, several: bool) -> str:
    """Name of a plan in the figure; the title says what the best one is."""
    # the change of the best plan is in the title, and too long for a label
    name = str(row["change"]) if row["changes"] <= 1 else "best plan"
    return f"{row['scenario']}: {name}" if several else name


def conclusion(best: Any) -> str:
    """Gain of the best plan, in one sentence.

    >>> conclusion({"scenario": "run", "change": "2 SMs", "gain": 1e-3, "low": 0.0, "high": 2e-3, "before_s": 1e-2})
    'run: 2 SMs gains 1.000 ms (0 s to 2.000 ms) of 10.000 ms'
    """
    if best["change"] == "as recorded":
        return f"{best['scenario']}: no change gains anything"
    gain, low, high, before = (cell(best[name], "s") for name in ("gain", "low", "high", "before_s"))
    return f"{best['scenario']}: {best['change']} gains {gain} ({low} to {high}) of {before}"


def _front_figure(points: pd.DataFrame, rows: pd.DataFrame) -> FigureSheet:
    """Time of the run against the time of SMs that collectives hold."""
    best = rows.sort_values("gain", ascending=False).iloc[0]
    title = f"From {cell(best['before_s'], 's')} to {cell(best['with_s'], 's')}: {best['change']}"
    axes = [Axis(_TIME, "time of the run", "s"), Axis(_HELD, "SM time of communication", "s")]
    orders = points.assign(order=points["plan.order"].astype(str).str.replace("_", " "))
    return fronts.pareto(orders, axes, by="order", frame=Frame(title))


STUDY = Trace()
