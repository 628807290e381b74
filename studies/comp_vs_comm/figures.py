"""Figures: shares of communication, public models, errors of projections, generations of hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dse.plots import Axis, FigureSheet, Frame, tables
from simulators.steps.design import StepDesign
from studies.common.facts import read_rows
from studies.comp_vs_comm.cases import TP
from studies.plain import reach

if TYPE_CHECKING:
    import pandas as pd


def serialized(points: pd.DataFrame) -> FigureSheet:
    """Share of communication that nothing hides, over TP."""
    most = points.groupby("panel", sort=False)["serialized_share"].max()
    title = f"Communication that nothing hides takes up to {100 * most.iloc[0]:.0f} % of a step, "
    title += f"{100 * most.iloc[-1]:.0f} % with {most.index[-1]}"
    share = Axis("serialized_share", "serialized communication", "%")
    return tables.curves(points, Axis(TP, "TP"), y=share, by="hidden", frame=Frame(title, panel="panel"))


def overlapped(rows: pd.DataFrame) -> FigureSheet:
    """Reduction of gradients against the backward pass that hides it, over tokens."""
    most = rows.groupby(["panel", "hidden", "tokens"], sort=False)["dp_over_backward"].max().reset_index()
    over = int((most["dp_over_backward"] > 1).sum())
    title = f"The backward pass is too short to hide the reduction of gradients in {over} of {len(most)} cases"
    hidden = Axis("dp_over_backward", "reduction of gradients / backward pass", "%")
    tokens = Axis("tokens", "tokens of a GPU (length x batch)")
    return tables.curves(most, tokens, y=hidden, by="hidden", frame=Frame(title, panel="panel"))


def models_figure(rows: Sequence[Mapping[str, Any]], design: StepDesign) -> FigureSheet:
    """Share of communication in public models, at the TP that memory forces."""
    import pandas as pd

    table = pd.DataFrame(rows)
    short = table["fits"].map({True: "", False: ", too few"})
    table = table.assign(
        model=table["model"] + " (TP " + table["tp"].astype(str) + short + ")",
        flop_vs_bw=table["flop_vs_bw"].map("{:g}x".format),
    )
    least = table.groupby("flop_vs_bw", sort=False)["serialized_share"].max()
    title = f"Public models spend up to {100 * least.iloc[0]:.0f} % of a step on serialized communication today, "
    title += f"{100 * least.iloc[-1]:.0f} % with {least.index[-1]} the FLOP/s"
    share = Axis("serialized_share", "serialized communication", "%")
    frame = Frame(title, f"share of a step [%] at the TP that the memory of {design.system.name} forces")
    return tables.heat(table, share, x=Axis("flop_vs_bw", "FLOP/s over bandwidth"), y="model", frame=frame)


def errors_figure(errors: pd.DataFrame) -> FigureSheet:
    """Error of projections over the width of the profiled baseline."""
    least = errors.groupby("hidden", sort=False)["error"].mean()
    title = f"Projected from one profiled model, times of all points are {reach(least, ' %', digits=1)} off in the mean"
    x, y = Axis("hidden", "H of the profiled baseline"), Axis("error", "mean error of the projection [%]")
    return tables.curves(errors, x, y=y, by="operators", frame=Frame(title))


def generations_figure() -> FigureSheet:
    """FLOP, memory and links of GPUs by year, against the first of their vendor."""
    import pandas as pd

    every = pd.DataFrame(list(read_rows("generations")))
    parts = []
    for vendor, devices in every.sort_values("year").groupby("vendor", sort=False):
        for column, name in (("flop_per_s", "16-bit FLOP/s"), ("link_bytes_per_s", "links"), ("hbm_bytes", "memory")):
            values = devices[column].astype(float)
            grown = pd.DataFrame({"year": devices["year"].astype(int), "grown": values / values.iloc[0]})
            parts.append(grown.assign(what=name, panel=f"{vendor}, against {devices['device'].iloc[0]}"))
    rows = pd.concat(parts)
    last = rows.groupby(["panel", "what"], sort=False)["grown"].max().groupby("what", sort=False).agg(reach)
    title = "FLOP/s of GPUs have grown faster than links: " + ", ".join(
        f"{name} {text}x" for name, text in last.items()
    )
    y = Axis("grown", "times as much", centre=1.0)
    return tables.curves(rows, Axis("year", "year"), y=y, by="what", frame=Frame(title, panel="panel"))
