"""Figures of predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import MARKERS, legend, palette, panels_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAR = 1.5  # factor of the dotted lines beside the diagonal


def scatter(rows: pd.DataFrame, *, by: str, title: str) -> Figure:
    """Plot predicted against measured time, a panel for each `kind`, with the diagonal.

    rows: `kind`, `measured_s`, `predicted_s`, `fitted` (hollow marks: constants were fitted on the row) and the column
    `by` for colour. Errors in the titles are over rows that no constant was fitted on.
    """
    kinds = list(rows["kind"].unique())
    colours = palette([str(name) for name in rows[by].unique()])
    figure, panels = panels_of(len(kinds), width=4.2, height=4.0)
    for panel, kind in zip(panels, kinds, strict=False):
        kind_rows = rows[rows["kind"] == kind]
        for index, (name, colour) in enumerate(colours.items()):
            group = kind_rows[kind_rows[by].astype(str) == name]
            looks: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)], "s": 13}
            unseen, seen = group[~group["fitted"]], group[group["fitted"]]
            panel.scatter(
                unseen["measured_s"] * 1e3, unseen["predicted_s"] * 1e3, color=colour, alpha=0.5, lw=0, **looks
            )
            panel.scatter(
                seen["measured_s"] * 1e3,
                seen["predicted_s"] * 1e3,
                facecolors="none",
                edgecolors=[colour],
                lw=0.8,
                **looks,
            )
        _diagonal(panel, kind_rows)
        panel.set_title(f"{kind}: {_error_text(kind_rows)}", fontsize=9.5, fontweight="bold")
    figure.supxlabel("measured [ms]", fontsize=10)
    figure.supylabel("predicted [ms]", fontsize=10)
    hollow = "; hollow: fitted on" if rows["fitted"].any() else ""
    legend(figure, colours, title=f"{title}{hollow}; dotted: a factor {_FAR:g}")
    return figure


def _diagonal(panel: Axes, rows: pd.DataFrame) -> None:
    ends = np.array([rows[["measured_s", "predicted_s"]].min().min(), rows[["measured_s", "predicted_s"]].max().max()])
    ends = ends * 1e3 * [0.8, 1.25]
    panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    panel.plot(ends, ends, color="black", lw=0.8, zorder=0)
    for factor in (_FAR, 1 / _FAR):
        panel.plot(ends, ends * factor, color="black", lw=0.7, ls=":", zorder=0)


def _error_text(rows: pd.DataFrame) -> str:
    unseen = rows[~rows["fitted"]]
    if unseen.empty:
        return "all fitted on"
    error = (unseen["predicted_s"] / unseen["measured_s"] - 1).abs()
    return f"median error {100 * error.median():.1f} %, {len(unseen)} times"


def ratios(rows: pd.DataFrame, *, by: str, title: str) -> Figure:
    """Plot predicted against measured ratios, a panel for each `predictor`, with the diagonal and the lines at 1.

    rows: `predictor`, `measured`, `predicted`, `fitted` (hollow marks: constants were fitted on the row) and the column
    `by` for colour. Errors in the titles are over rows that no constant was fitted on.
    """
    names, colours = list(rows["predictor"].unique()), palette([str(name) for name in rows[by].unique()])
    figure, panels = panels_of(len(names), width=5.2, height=4.4)
    both = rows[["measured", "predicted"]]
    ends = np.array([both.min().min() * 0.8, both.max().max() * 1.25])
    for panel, name in zip(panels, names, strict=False):
        panel_rows = rows[rows["predictor"] == name]
        for index, (group, colour) in enumerate(colours.items()):
            points = panel_rows[panel_rows[by].astype(str) == group]
            looks: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)], "s": 20, "edgecolors": [colour]}
            for fitted, face in ((False, colour), (True, "none")):
                part = points[points["fitted"] == fitted]
                panel.scatter(part["measured"], part["predicted"], facecolors=face, lw=0.8, **looks)
        panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        panel.plot(ends, ends, color="black", lw=0.8, zorder=0)
        panel.axhline(1, color="black", lw=0.6, ls=":", zorder=0)
        panel.axvline(1, color="black", lw=0.6, ls=":", zorder=0)
        unseen = panel_rows[~panel_rows["fitted"]]
        error = (unseen["predicted"] / unseen["measured"] - 1).abs().median()
        panel.set_title(f"{name}: median error {100 * error:.1f} %", fontsize=9.5, fontweight="bold")
    figure.supxlabel(f"measured {title}", fontsize=10)
    figure.supylabel(f"predicted {title}", fontsize=10)
    legend(figure, colours, title=f"{by}; hollow: fitted on")
    return figure


def errors(rows: pd.DataFrame, models: Sequence[str]) -> Figure:
    """Plot the median error of each model for each device (bar, with the median's sign) and its 90th percentile (tick).

    A panel per `kind`. rows: `kind`, `device`, `model`, `median`, `signed`, `p90` (shares).
    """
    kinds, devices = list(rows["kind"].unique()), list(rows["device"].unique())
    colours = palette(list(models))
    figure, panels = panels_of(len(kinds), width=4.2, height=1.0 + 0.5 * len(devices))
    for place, (panel, kind) in enumerate(zip(panels, kinds, strict=False)):
        kind_rows = rows[rows["kind"] == kind]
        for index, (model, colour) in enumerate(colours.items()):
            group = kind_rows[kind_rows["model"] == model].set_index("device").reindex(devices)
            heights = np.arange(len(devices)) + (index - (len(colours) - 1) / 2) * 0.26
            panel.barh(heights, 100 * group["median"], height=0.24, color=colour)
            panel.plot(100 * group["p90"], heights, ls="", marker="|", color="black", ms=7)
            for height, (median, signed) in zip(heights, group[["median", "signed"]].to_numpy(), strict=True):
                if median > 0:
                    panel.text(0.55, height, f"{100 * signed:+.0f}", va="center", fontsize=5.5, color="white")
        panel.set_yticks(range(len(devices)), devices if place % 4 == 0 else [""] * len(devices), fontsize=8)
        panel.set(xscale="log", xlim=(0.5, 1000.0))
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set_title(kind, fontsize=10, fontweight="bold")
    text = "error on rows not fitted on [%]: bar median, tick 90th percentile, white: median with its sign"
    figure.supxlabel(text, fontsize=9)
    legend(figure, colours, title="predicted by")
    return figure


def bandwidths(rows: pd.DataFrame) -> Figure:
    """Plot the bus bandwidth of all-reduces over payload, measured (marks) and predicted (lines); a panel per `device`.

    rows: `device`, `gpus`, `payload_bytes`, `measured_bytes_per_s`, `predicted_bytes_per_s`, `fitted`.
    """
    devices = list(rows["device"].unique())
    colours = palette([f"{number:.0f} GPUs" for number in sorted(rows["gpus"].unique())])
    figure, panels = panels_of(len(devices), width=3.6, height=3.2)
    for panel, device in zip(panels, devices, strict=False):
        for index, (name, colour) in enumerate(colours.items()):
            group = rows[(rows["device"] == device) & (rows["gpus"] == float(name.split()[0]))].sort_values(
                "payload_bytes"
            )
            looks: dict[str, Any] = {"color": colour, "marker": MARKERS[index % len(MARKERS)], "ls": "", "ms": 5}
            for fitted, fill in ((False, "full"), (True, "none")):
                part = group[group["fitted"] == fitted]
                panel.plot(part["payload_bytes"] / 1e6, part["measured_bytes_per_s"] / 1e9, fillstyle=fill, **looks)
            panel.plot(group["payload_bytes"] / 1e6, group["predicted_bytes_per_s"] / 1e9, color=colour, lw=1.2)
        panel.set(xscale="log", ylim=(0, None))
        panel.set_title(device, fontsize=10, fontweight="bold")
    figure.supxlabel("payload [MB]", fontsize=10)
    figure.supylabel("bus bandwidth [GB/s]", fontsize=10)
    legend(figure, colours, title="marks: measured (hollow: fitted on), lines: predicted")
    return figure
