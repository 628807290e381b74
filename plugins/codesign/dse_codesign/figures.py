"""Figures of co-design: machines by speed and cost, worth of features, a map of break-evens, and a roofline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dse.plots import Axis, FigureSheet, Frame, fronts, tables

if TYPE_CHECKING:
    import pandas as pd


def front(points: pd.DataFrame, existing: pd.DataFrame) -> FigureSheet:
    """Speed of machines against their cost, with existing machines."""
    import pandas as pd

    shown = existing.assign(status="ok", kind=existing["machine"], odds=np.nan, on_front=True)
    rows = pd.concat([points, shown[points.columns]], ignore_index=True)
    rows["scenario"] = "machines"  # one front for all
    best = points.iloc[points["throughput_x"].argmax()]
    title = f"Machines reach {best['throughput_x']:.2f}x of the base's speed, at {best['cost_usd']:,.0f} USD"
    sure = int((points["odds"] > 0.5).sum())
    note = f"{sure} of them are on the front of speed, power and cost in most drawn technologies"
    note += "; existing ones outlined, too"
    axes = [Axis("cost_usd", "cost of a GPU and its share [USD]"), Axis("throughput_x", "speed over the base's [x]")]
    return fronts.pareto(rows, axes, by="kind", frame=Frame(title, note))


def worth(rows: pd.DataFrame) -> FigureSheet:
    """Dollars that features take, and that they may take until they do not pay."""
    import pandas as pd

    kinds = (("usd", "takes"), ("usd_worth", "is worth"))
    parts = [rows.assign(usd_of=rows[name], kind=label) for name, label in kinds]
    parts[1] = parts[1].assign(range_low=rows["usd_worth_low"], range_high=rows["usd_worth_high"])
    title = f"{int(rows['pays'].sum())} of {len(rows)} features of the robust machine pay within the budget"
    frame = Frame(title, "at equal throughput for a dollar; lines: 90 % intervals")
    axis = Axis("usd_of", "USD of a GPU", centre=0.0)
    return tables.dots(pd.concat(parts), axis, row="feature", by="kind", frame=frame)


def elasticities(rows: pd.DataFrame) -> FigureSheet:
    """What 1 % more of each number of the robust machine does to its speed, cost and power."""
    import pandas as pd

    kinds = (("throughput_x", "speed"), ("cost_usd", "cost"), ("power_w", "power"))
    sides = {name: rows[[f"{name}_below", f"{name}_above"]].mean(axis=1) for name, _ in kinds}
    parts = [rows.assign(change=sides[name], kind=label) for name, label in kinds]
    more = ", ".join(rows["number"][rows["pays"] == "more"]) or "nothing"
    title = f"Throughput for a dollar rises with more of: {more}"
    axis = Axis("change", "change for 1 % more [%]", centre=0.0)
    frame = Frame(title, "the robust machine, with its best plans; mean of both sides")
    return tables.dots(pd.concat(parts), axis, row="number", by="kind", frame=frame)


def break_even(rows: pd.DataFrame) -> FigureSheet:
    """Throughput for a dollar over memory and links; above 1 a machine does more for a dollar than the robust one."""
    best = rows.iloc[rows["value"].argmax()]
    title = f"Most throughput for a dollar: {best['memory']:g}x of the robust machine's HBM and {best['links']}"
    axis = Axis("value", "throughput for a dollar over the robust machine's [x]", centre=1.0)
    memory = Axis("memory", "HBM (rate and capacity) over the robust machine's")
    return tables.heat(rows, axis, x=memory, y="links", frame=Frame(title))


def roofline(rows: pd.DataFrame, roof: tuple[float, float]) -> FigureSheet:
    """Steps of all workloads under the roof of the robust machine."""
    # the roof at an intensity: peak, or bandwidth times FLOP for each byte
    reached: pd.Series[float] = rows["rate"] / np.minimum(roof[0], roof[1] * rows["intensity"])
    highest = rows.iloc[reached.argmax()]
    title = f"At most {100 * reached.max():.0f} % of the robust machine's roof are reached ({highest['step']})"
    note = "whole steps; data-sheet peak, HBM at the rate that streams reach"
    return tables.roofline(rows, roof, by="step", size=Axis("size", ""), frame=Frame(title, note))
