"""Figures of the commands that compare runs, search methods and options: progress, importance, regrets, robustness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots import MARKERS, Axis, legend, palette, panels_of, set_theme, single_panel, zero_and_decades

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure


_BOOTSTRAPS = 1000
_MOST_TICKS = 6
_DECADES = 5  # of a logarithmic axis of misses; smaller values are rounding


def progress(table: pd.DataFrame, x: Axis, *, y: Axis, by: str, of: str) -> Figure:
    """Plot medians of y over the rows of each x, a line for each group of `by`, a panel for each scenario; the band is
    the 95 % bootstrap interval of the median. Where x differs from row to row, it is the median of each `share`.

    of: description of the rows of a group, such as `20 seeds`.
    """
    import seaborn as sns

    scenarios = list(table["scenario"].unique())
    colours = palette([str(name) for name in table[by].unique()])
    marks = {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(colours)}
    typical = table.groupby(["scenario", by, "share"])[x.column].transform("median") * x.factor
    shown = table.assign(x=typical, y=table[y.column] * y.factor)
    figure, panels = panels_of(len(scenarios), width=4.2, height=3.4)
    for panel, scenario in zip(panels, scenarios, strict=True):
        mapping = {"data": shown[shown["scenario"] == scenario], "x": "x", "y": "y", "hue": by, "style": by}
        looks = {"palette": colours, "markers": marks, "dashes": False, "legend": False}
        band = {"estimator": "median", "errorbar": ("ci", 95), "n_boot": _BOOTSTRAPS, "seed": 0}
        sns.lineplot(**mapping, **looks, **band, ax=panel)
        panel.set_xscale("log")
        if len(places := np.unique(mapping["data"]["x"])) <= _MOST_TICKS:
            panel.set_xticks(places, [f"{place:g}" for place in places])
            panel.set_xticks([], minor=True)
        y_values = mapping["data"]["y"]
        smallest, largest = y_values[y_values > 0].min(), y_values.max()
        zero_and_decades(panel, max(float(smallest), 10.0**-_DECADES * float(largest)))
        panel.set_title(scenario, fontsize=10, fontweight="bold")
        panel.set(xlabel="", ylabel="")
    figure.supxlabel(x.label)
    figure.supylabel(y.label)
    legend(figure, colours, title=f"{by.rpartition('.')[2]}: median and 95 % bootstrap interval of {of}")
    return figure


def medians(table: pd.DataFrame, value: Axis, *, by: str, of: str, least: str) -> Figure:
    """Plot the median of a value for each group of `by`, a panel for each scenario, with its 95 % bootstrap interval.

    of: description of the rows of a group, such as `20 seeds`. least: column of flags, true if the value of a row is
    only a lower bound; a median that is a lower bound is shown as `>`, with a pale bar.
    """
    import seaborn as sns
    from matplotlib.patches import Rectangle

    scenarios = list(table["scenario"].unique())
    colours = palette([str(name) for name in table[by].unique()])
    figure, panels = panels_of(len(scenarios), width=4.2, height=0.8 + 0.3 * len(colours))
    for index, (panel, scenario) in enumerate(zip(panels, scenarios, strict=True)):
        rows = table[table["scenario"] == scenario].assign(value=table[value.column] * value.factor)
        band = {"estimator": "median", "errorbar": ("ci", 95), "n_boot": _BOOTSTRAPS, "seed": 0}
        looks = {"palette": colours, "hue": by, "legend": False, "order": list(colours)}
        sns.barplot(rows, x="value", y=by, **looks, **band, ax=panel)
        for place, name in enumerate(colours):
            group = rows[rows[by] == name]
            is_bound = group[least].mean() >= 0.5
            label = f"{'> ' * bool(is_bound)}{group['value'].median():,.0f}"
            panel.text(1.01, place, label, transform=panel.get_yaxis_transform(), ha="left", va="center", fontsize=9)
            for bar in panel.patches if is_bound else ():
                if isinstance(bar, Rectangle) and round(bar.get_y() + bar.get_height() / 2) == place:
                    bar.set_alpha(0.25)
        panel.set_title(scenario, fontsize=10, fontweight="bold")
        panel.set(xlabel="", ylabel="")
        if index:
            panel.set_yticklabels([])
    figure.supxlabel(f"{value.label} (median of {of}, 95 % bootstrap interval)", fontsize=9)
    return figure


def importance(rows: pd.DataFrame, knobs: Sequence[str], *, label: str, title: str) -> Figure:
    """Plot the importance of knobs: a panel for each objective, a bar for the mean over scenarios, a dot for each.

    rows: `objective`, `knob`, `scenario`, `share` in [0, 1], `mean`, `noise` (None: not known), `active` (share of the
    points that have the knob; its bar is hatched if some lack it). label: meaning of a share.
    """
    objectives = list(rows["objective"].unique())
    figure, panels = panels_of(len(objectives), width=3.6, height=0.9 + 0.42 * len(knobs))
    for index, (panel, objective) in enumerate(zip(panels, objectives, strict=True)):
        objective_rows = rows[rows["objective"] == objective]
        for place, knob in enumerate(knobs):
            _importance_bar(panel, objective_rows[objective_rows["knob"] == knob], place)
        first = index % 4 == 0
        active = rows.groupby("knob")["active"].first()
        names = [knob if active[knob] == 1 else f"{knob}\n(in {100 * active[knob]:.0f} % of points)" for knob in knobs]
        panel.set_yticks(range(len(knobs)), names if first else [""] * len(knobs), fontsize=8)
        panel.set_ylim(len(knobs) - 0.5, -0.5)
        panel.set_xlim(0, 100)
        panel.set_title(objective, fontsize=10, fontweight="bold")
        panel.grid(axis="y", visible=False)
        panel.set_xlabel("share [%]", fontsize=8)
    figure.suptitle(f"{title}\n{label}", fontsize=10)
    _importance_legend(figure, noise=bool(rows["noise"].notna().any()))
    return figure


def _importance_bar(panel: Axes, rows: pd.DataFrame, place: int) -> None:
    if rows.empty:
        panel.text(1, place, "not judged", fontsize=7, va="center", color="grey")
        return
    partial = rows["active"].iloc[0] < 1
    panel.barh(
        place,
        100 * rows["mean"].iloc[0],
        0.62,
        color="#0173b2",
        alpha=0.75,
        hatch="//" if partial else "",
        edgecolor="white",
    )
    panel.scatter(
        100 * rows["share"], np.full(len(rows), place), s=7, color="black", alpha=0.45, zorder=3, linewidths=0
    )
    if rows["noise"].notna().all():
        noise = 100 * float(rows["noise"].iloc[0])
        panel.vlines(min(noise, 100), place - 0.36, place + 0.36, color="#d55e00", linewidth=1.6, zorder=4)


def _importance_legend(figure: Figure, *, noise: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor="#0173b2", alpha=0.75, label="mean over scenarios"),
        Patch(facecolor="#0173b2", alpha=0.75, hatch="//", edgecolor="white", label="knob that some points lack"),
        Line2D([], [], color="black", alpha=0.45, marker="o", markersize=3, linestyle="", label="a scenario"),
    ]
    if noise:
        handles.append(Line2D([], [], color="#d55e00", label="shuffled objective (noise)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


_SEEN_COLOURS = ("#029e73", "#0173b2", "#de8f05", "#cc78bc", "#ca9161")
_ANYWHERE_COLOUR = "#949494"


def regrets(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plot mean (bar) and largest (diamond) regret of rules, on a scale that is linear below 1 % and then logarithmic.

    rows: `rule`, `judged_on`, `mean_regret`, `max_regret`, `accuracy` (shares), from top to bottom.
    """
    figure, panel = single_panel(10.5, 1.6 + 0.36 * len(rows))
    seen = list(dict.fromkeys(row["judged_on"] for row in rows))
    for place, row in enumerate(rows):
        colour = _SEEN_COLOURS[seen.index(row["judged_on"]) % len(_SEEN_COLOURS)]
        colour = _ANYWHERE_COLOUR if row["judged_on"] == "all contexts" else colour
        mean, most = 100 * row["mean_regret"], 100 * row["max_regret"]
        panel.barh(place, mean, 0.62, color=colour, alpha=0.85)
        panel.scatter(most, place, marker="D", s=26, color=colour, edgecolor="black", linewidths=0.6, zorder=3)
        label = f"{mean:.2f} % mean, {most:.3g} % most, right in {100 * row['accuracy']:.0f} %"
        panel.text(1.01, place, label, fontsize=8, va="center", transform=panel.get_yaxis_transform())
    names = [row["rule"] + f", {row['judged_on']}" * (row["judged_on"] != "all contexts") for row in rows]
    panel.set_yticks(range(len(rows)), names, fontsize=8)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_xscale("symlog", linthresh=1.0)
    panel.set_xlim(0, 130 * max(row["max_regret"] for row in rows) or 1)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.grid(axis="y", visible=False)
    panel.set_xlabel(
        "regret: objective of the pick over that of the best option, less one [%] (bar: mean, diamond: largest)"
    )
    panel.set_title(title, fontsize=10, loc="left")
    return figure


_SIDES = ("#0173b2", "#de8f05")
Curve = tuple[Any, Any]


def hypervolumes(curves: Mapping[str, tuple[Curve, Curve]], names: tuple[str, str], methods: Sequence[str]) -> Figure:
    """Plot the hypervolume of two runs, A and B: over evaluated points, and at the end for each scenario.

    curves: scenario -> of each run (points evaluated [steps], hypervolume [steps]), a share of the box in [0, 1]. The
    thick line is the mean over scenarios, and ends with the shortest of them.
    """
    import matplotlib.pyplot as plt

    set_theme()
    size = (11.5, max(3.8, 1.4 + 0.2 * len(curves)))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, width_ratios=(1.25, 1))
    for side, (name, method) in enumerate(zip(names, methods, strict=True)):
        run_curves = [both[side] for both in curves.values()]
        for steps, reached in run_curves:
            left.step(steps, reached, where="post", color=_SIDES[side], linewidth=0.7, alpha=0.3)
        steps = np.unique(np.concatenate([steps for steps, _ in run_curves]))
        steps = steps[steps <= min(steps_[-1] for steps_, _ in run_curves)]
        mean = np.mean([reached[np.searchsorted(at, steps, side="right") - 1] for at, reached in run_curves], axis=0)
        label = f"{'AB'[side]}: {name} ({method})"
        left.step(
            steps, mean, where="post", color=_SIDES[side], linewidth=2.2, linestyle=("-", "--")[side], label=label
        )
        ends = [reached[-1] for _, reached in run_curves]
        right.scatter(ends, range(len(ends)), color=_SIDES[side], marker="os"[side], s=(52, 22)[side], zorder=3 + side)
    ends = [[both[side][1][-1] for side in (0, 1)] for both in curves.values()]
    right.hlines(
        range(len(ends)), [min(pair) for pair in ends], [max(pair) for pair in ends], color="grey", linewidth=1
    )
    right.set_yticks(range(len(ends)), list(curves), fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("hypervolume at the end [share of the box]")
    left.set_xscale("log")
    left.set_xlabel("points evaluated, in the order of the table (thin: a scenario, thick: mean)")
    left.set_ylabel("hypervolume [share of the box]")
    figure.legend(loc="outside upper center", ncols=1, frameon=False, fontsize=9)
    return figure


def attainment(rectangles: Any, names: tuple[str, str], objectives: Sequence[str]) -> Figure:
    """Plot the difference of the empirical attainment functions of two runs, over two scaled objectives.

    rectangles [R, 5]: x and y from, x and y to, in scaled objectives (0: best, 1: worst of both fronts), and the share
    of scenarios in which only one run attains the rectangle, positive for A.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.patches import Rectangle

    figure, panel = single_panel(7.2, 5.4)
    colours = ScalarMappable(
        Normalize(-1, 1), LinearSegmentedColormap.from_list("sides", (_SIDES[0], "#f7f7f7", _SIDES[1]))
    )
    for x, y, right, top, share in rectangles:
        width, height = min(right, 1.1) - x, min(top, 1.1) - y
        panel.add_patch(Rectangle((x, y), width, height, color=colours.to_rgba(-share), linewidth=0))
    panel.set_xlim(-0.02, 1.1)
    panel.set_ylim(-0.02, 1.1)
    panel.set_xlabel(f"{objectives[0]} [scaled: 0 best, 1 worst of both fronts]")
    panel.set_ylabel(f"{objectives[1]} [scaled]")
    bar = figure.colorbar(colours, ax=panel, label="scenarios in which only one attains it [share]")
    bar.set_ticks([-1, -0.5, 0, 0.5, 1], labels=["A alone: 1", "0.5", "0", "0.5", "B alone: 1"])
    panel.set_title(f"A = {names[0]}\nB = {names[1]}", fontsize=9, loc="left")
    return figure


def robustness(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plot how often each scenario's winner stays best when constants vary (left) and the regret of keeping it (right).

    rows: `scenario`, `winner`, `winner_stays`, `option_stays`, `regret_mean`, `regret_p95`, `regret_worst`: shares.
    """
    import matplotlib.pyplot as plt

    set_theme()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 1.7 + 0.32 * len(rows)), sharey=True)
    places = np.arange(len(rows))
    layers = (
        ("option_stays", "#9fc6e0", "its option, other knobs tuned again"),
        ("winner_stays", "#0173b2", "the point"),
    )
    for (name, colour, label), height in zip(layers, (0.72, 0.36), strict=True):
        left.barh(places, [100 * row[name] for row in rows], height, color=colour, label=label)
    marks = (("regret_mean", "o", "mean"), ("regret_p95", "|", "95th percentile"), ("regret_worst", "D", "worst"))
    right.hlines(places, 0, [100 * row["regret_worst"] for row in rows], color="#c9c9c9", linewidth=1.2)
    for name, marker, label in marks:
        colour = "#d55e00" if marker == "D" else "#0173b2"
        values = [100 * row[name] for row in rows]
        right.scatter(values, places, marker=marker, s=60 if marker == "|" else 26, color=colour, label=label, zorder=3)
    left.set_yticks(places, [f"{row['scenario']}: {row['winner']}" for row in rows], fontsize=8)
    left.invert_yaxis()
    left.set_xlim(0, 100)
    left.set_xlabel("samples in which the nominal winner stays best [%]")
    most = max(100 * row["regret_worst"] for row in rows) or 1.0
    right.set_xlim(-0.03 * most, 1.05 * most)
    right.set_xlabel("regret of keeping the nominal winner [%]")
    for panel in (left, right):
        panel.grid(axis="y", visible=False)
        panel.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def break_even(rows: Sequence[Mapping[str, Any]], widths: Mapping[str, float], title: str) -> Figure:
    """Plot the winning option of each scenario over each constant: a panel per constant, a colour per option.

    rows: `constant`, `scenario`, `option`, `low`, `high`, `nominal`. widths: relative half-width by constant, shaded.
    """
    lengths: dict[str, float] = {}
    for row in rows:
        lengths[row["option"]] = lengths.get(row["option"], 0.0) + float(np.log(row["high"] / row["low"]))
    options = sorted(lengths, key=lambda option: -lengths[option])
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    colours = _hues(options)
    figure, panels = panels_of(len(widths), width=3.7, height=1.1 + 0.19 * len(scenarios))
    for index, (panel, (path, width)) in enumerate(zip(panels, widths.items(), strict=True)):
        for row in (row for row in rows if row["constant"] == path):
            low, high = row["low"] / row["nominal"], row["high"] / row["nominal"]
            panel.barh(scenarios.index(row["scenario"]), high - low, 0.8, left=low, color=colours[row["option"]])
        panel.axvspan(1 - width, 1 + width, color="black", alpha=0.18, linewidth=0)
        panel.axvline(1.0, color="black", linewidth=1.0)
        panel.set_xscale("log", base=2)
        panel.margins(x=0)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
        panel.set_yticks(range(len(scenarios)), scenarios if index % 4 == 0 else [""] * len(scenarios), fontsize=8)
        panel.set_ylim(len(scenarios) - 0.5, -0.5)
        panel.set_title(path.partition(".")[2], fontsize=8, fontweight="bold")
        panel.grid(visible=False)
    about = "over a constant as a multiple of the value that the run was made with (shaded: declared uncertainty)"
    figure.suptitle(f"{title}: which option wins\n{about}", fontsize=10)
    _options_legend(figure, colours)
    return figure


def _hues(names: Sequence[str]) -> dict[str, Any]:
    """Assign a colour to each name: ten hues, then the same hues less saturated."""
    import seaborn as sns

    set_theme()
    few = sns.color_palette("colorblind", 10)
    return {
        name: few[place] if place < 10 else sns.desaturate(few[place % 10], 0.35) for place, name in enumerate(names)
    }


def _options_legend(figure: Figure, colours: Mapping[str, Any]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    columns = max(1, min(4, len(handles), int(figure.get_figwidth() / 3)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
