"""Figures of the commands that compare options: importance of knobs, regrets of rules, robustness of winners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots.canvas import (
    FigureSheet,
    Frame,
    handles_of,
    inches_of_text,
    mark_handle,
    name_rows,
    plain_ticks,
    row_inches,
    sheet,
)
from dse.plots.labels import COLOURS, INK, Axis, Scale, SeriesStyle, label, log_ticks, looks, scale, words

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_SEEN = "what it learned from"
_SURE = 0.95  # share of samples from which on a winner counts as certain
_PERCENT = Scale(1.0, "%", "")
_MAIN, _STRONG, _PALE = COLOURS["blue"], COLOURS["vermillion"], "#c9c9c9"


def importance(rows: pd.DataFrame, knobs: Sequence[str], *, note: str) -> FigureSheet:
    """Plot the importance of knobs: a panel for each objective, a bar for the mean over scenarios, a dot for each.

    rows: `objective`, `knob`, `scenario`, `share` in [0, 1], `mean`, `noise` (None: not known), `active` (share of the
    points that have the knob; its bar is hatched if some lack it). note: what a share is a share of.
    """
    objectives = list(rows["objective"].unique())
    firsts = [(name, rows[rows["objective"] == name].nlargest(1, "mean").iloc[0]) for name in objectives]
    texts = [f"{words(name)} {words(first['knob'])} ({100 * first['mean']:.0f} %)" for name, first in firsts]
    frame = Frame(f"What matters most: for {', for '.join(texts)}", note)
    active = rows.groupby("knob")["active"].first()
    names = [words(knob) + ("" if active[knob] == 1 else f" (in {100 * active[knob]:.0f} %)") for knob in knobs]
    columns = max(1, min(4, int((7.0 - inches_of_text(names)) / 1.4)))
    drawn = sheet(len(objectives), frame, height=row_inches(1.3) * len(knobs), columns=columns)
    for place, ((first, _, panel), objective) in enumerate(zip(drawn.rows(), objectives, strict=True)):
        of_objective = rows[rows["objective"] == objective]
        for row, knob in enumerate(knobs):
            _importance_bar(panel, of_objective[of_objective["knob"] == knob], row)
        name_rows(panel, names, labelled=first)
        panel.set_xlim(0, 103)
        plain_ticks(panel.xaxis, _PERCENT)
        drawn.name(place, words(objective))
    drawn.xlabel = "share [%]"
    drawn.legend(_importance_legend(rows))
    return drawn


def _importance_bar(panel: Axes, rows: pd.DataFrame, row: int) -> None:
    if rows.empty:
        panel.text(1, row, "not judged", fontsize="x-small", va="center", color="#666666")
        return
    hatch = "////" if rows["active"].iloc[0] < 1 else ""
    panel.barh(row, 100 * rows["mean"].iloc[0], 0.62, color=_MAIN, alpha=0.75, hatch=hatch, edgecolor="white")
    panel.plot(100 * rows["share"], np.full(len(rows), row), "o", ms=2.2, mew=0, color=INK, alpha=0.5, zorder=3)
    if rows["noise"].notna().all():
        noise = 100 * float(rows["noise"].iloc[0])
        panel.vlines(min(noise, 100), row - 0.36, row + 0.36, color=_STRONG, lw=1.4, zorder=4)


def _importance_legend(rows: pd.DataFrame) -> list[Any]:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=_MAIN, alpha=0.75, label="mean over scenarios")]
    if (rows["active"] < 1).any():
        handles.append(Patch(facecolor=_MAIN, alpha=0.75, hatch="////", edgecolor="white", label="some points lack it"))
    handles.append(mark_handle("a scenario", marker="o", ms=2.2, alpha=0.5))
    if rows["noise"].notna().any():
        handles.append(mark_handle("shuffled objective (noise)", color=_STRONG, marker="|", mew=1.4))
    return handles


def regrets(rows: Sequence[Mapping[str, Any]], question: str) -> FigureSheet:
    """Plot mean (dot) and largest (diamond) regret of rules, on a scale that is linear below 1 % and then logarithmic.

    rows: `rule`, `judged_on`, `mean_regret`, `max_regret`, `accuracy` (shares), from top to bottom. question: what the
    rules decide.
    """
    unseen = [row for row in rows if row["judged_on"] != _SEEN] or rows
    best = min(unseen, key=lambda row: row["mean_regret"])
    title = f"Judged on what it has not seen, the best rule ({_rule_words(best['rule'])}) is right in "
    title += f"{100 * best['accuracy']:.0f} %, with a mean regret of {100 * best['mean_regret']:.2g} %"
    chosen = looks(row["judged_on"] for row in rows)
    note = f"{question}; regret: objective of the pick over that of the best option, less one"
    drawn = sheet(1, Frame(title, note), height=row_inches(1.3) * len(rows))
    (panel,) = drawn.panels
    for place, row in enumerate(rows):
        colour, mean, most = chosen[row["judged_on"]].colour, 100 * row["mean_regret"], 100 * row["max_regret"]
        panel.hlines(place, mean, most, color=colour, lw=0.9, alpha=0.6)
        panel.plot(mean, place, "o", color=colour, ms=4.5, mew=0, zorder=3)
        panel.plot(most, place, "D", color="white", mec=colour, ms=4, mew=1.0, zorder=3)
    panel.set_xscale("symlog", linthresh=1.0)
    most = 130 * max(row["max_regret"] for row in rows) or 1.0
    panel.set_xlim(-0.03, most)
    names = [f"{_rule_words(row['rule'])} (right in {100 * row['accuracy']:.0f} %)" for row in rows]
    name_rows(panel, names, labelled=True)
    ticks = [0.0, *log_ticks(1.0, max(most, 2.0), binary=False)]
    panel.set_xticks([tick for tick in ticks if tick <= most])
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xticks([], minor=True)
    drawn.xlabel = "regret [%]"
    judged = handles_of({name: SeriesStyle(f"judged on {name}", look.colour, "s") for name, look in chosen.items()})
    drawn.legend([*judged, mark_handle("mean", marker="o"), mark_handle("largest", marker="D", fillstyle="none")])
    return drawn


def _rule_words(rule: str) -> str:
    """A rule with the option that it always picks in words."""
    head, always, option = rule.partition("always ")
    return head + always + ", ".join(label(part) for part in option.split(", ")) if always else rule


def robustness(rows: Sequence[Mapping[str, Any]]) -> FigureSheet:
    """Plot how often each scenario's winner stays best when constants vary (left) and the regret of keeping it (right).

    rows: `scenario`, `winner`, `winner_stays`, `option_stays`, `regret_mean`, `regret_p95`, `regret_worst`: shares.
    """
    num_sure = sum(row["winner_stays"] >= _SURE for row in rows)
    winners = [", ".join(label(part) for part in str(row["winner"]).split(", ")) for row in rows]
    title = f"{num_sure} of {len(rows)} winners stay best in {100 * _SURE:.0f} % of the samples of constants; "
    title += f"keeping a winner costs at most {100 * max(row['regret_worst'] for row in rows):.2g} %"
    note = "left: samples in which the winner stays best; right: regret of keeping it"
    drawn = sheet(2, Frame(title, note), height=row_inches(1.3) * len(rows), columns=2)
    left, right = drawn.panels
    places = range(len(rows))
    left.hlines(places, 0, [100 * row["option_stays"] for row in rows], color=_PALE, lw=0.8)
    for name, marker, colour in (("option_stays", "s", COLOURS["sky"]), ("winner_stays", "o", _MAIN)):
        left.plot([100 * row[name] for row in rows], places, marker=marker, color=colour, ls="", ms=4.5, mew=0)
    right.hlines(places, 0, [100 * row["regret_worst"] for row in rows], color=_PALE, lw=0.8)
    for name, marker, colour in (
        ("regret_mean", "o", _MAIN),
        ("regret_p95", "|", _MAIN),
        ("regret_worst", "D", _STRONG),
    ):
        right.plot([100 * row[name] for row in rows], places, marker=marker, color=colour, ls="", ms=4.5, mew=1)
    named = zip(rows, winners, strict=True)
    name_rows(left, [f"{row['scenario']}: {winner}" for row, winner in named], labelled=True)
    name_rows(right, [""] * len(rows), labelled=False)
    left.set_xlim(-3, 103)
    for panel, text in ((left, "samples [%]"), (right, "regret [%]")):
        plain_ticks(panel.xaxis, _PERCENT)
        panel.set_xlabel(text)
    handles = [
        mark_handle("the point stays", marker="o", color=_MAIN),
        mark_handle("its option stays, tuned again", marker="s", color=COLOURS["sky"]),
        mark_handle("95th percentile of regret", marker="|", color=_MAIN),
        mark_handle("worst regret", marker="D", color=_STRONG),
    ]
    drawn.legend(handles)
    return drawn


def break_even(rows: Sequence[Mapping[str, Any]], widths: Mapping[str, float]) -> FigureSheet:
    """Plot the winning option of each scenario over each constant: a panel per constant, a colour per option.

    rows: `constant`, `scenario`, `option`, `low`, `high`, `nominal`. widths: relative half-width by constant, shaded.
    """
    lengths: dict[str, float] = {}
    for row in rows:
        lengths[row["option"]] = lengths.get(row["option"], 0.0) + float(np.log(row["high"] / row["low"]))
    chosen = looks(sorted(lengths, key=lambda option: -lengths[option]))
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    flips = {
        (row["constant"], row["scenario"])
        for row in rows
        for end in (row["low"] / row["nominal"], row["high"] / row["nominal"])
        if abs(end - 1) < widths[row["constant"]]
    }
    title = f"Another option wins within the uncertainty of a constant in {len(flips)} of "
    title += f"{len(widths) * len(scenarios)} pairs of constant and scenario"
    note = "over a constant as a multiple of the value that the run was made with; shaded: its declared uncertainty"
    columns = max(1, min(4, int((7.0 - inches_of_text(scenarios)) / 1.3)))
    drawn = sheet(len(widths), Frame(title, note), height=row_inches(1.1) * len(scenarios), columns=columns)
    for place, ((first, _, panel), (path, width)) in enumerate(zip(drawn.rows(), widths.items(), strict=True)):
        for row in (row for row in rows if row["constant"] == path):
            low, high = row["low"] / row["nominal"], row["high"] / row["nominal"]
            panel.barh(scenarios.index(row["scenario"]), high - low, 0.8, left=low, color=chosen[row["option"]].colour)
        panel.axvspan(1 - width, 1 + width, color="black", alpha=0.18, lw=0)
        panel.axvline(1.0, color=INK, lw=0.8)
        panel.set_xscale("log")
        panel.margins(x=0)
        plain_ticks(panel.xaxis, Scale(1.0, "", ""), values=[0.25, 0.5, 1, 2, 4])
        panel.grid(visible=False)
        name_rows(panel, scenarios, labelled=first)
        text = words(path)
        drawn.name(place, text if " " in text else path.partition(".")[2].replace(".", " ").replace("_", " "))
    drawn.xlabel = "multiple of the constant"
    drawn.legend(handles_of(chosen, style="patch"))
    return drawn


def elasticities(rows: Sequence[Mapping[str, Any]]) -> FigureSheet:
    """Plot what 1 % of each number does to a metric of each scenario's winner: a dot, or both sides of a kink.

    rows: `metric`, `exact`, `number`, `scenario`, `below`, `above` (NaN in one of them: none on that side), `kink`.
    """
    metric, exact = words(rows[0]["metric"]), all(row["exact"] for row in rows)
    numbers = list(dict.fromkeys(row["number"] for row in rows))
    largest = max(rows, key=lambda row: np.nanmax([abs(row["below"]), abs(row["above"]), 0.0]))
    change = np.nanmean([largest["below"], largest["above"]])
    title = f"{numbers[0].partition('.')[2]} matters most: 1 % more changes the {metric} of "
    title += f"{label(str(largest['scenario']))} by {change:+.2f} %"
    how = "derivatives" if exact else "differences"
    note = f"elasticity of each scenario's winner: one-sided {how} by each number of the machine"
    drawn = sheet(1, Frame(title, note), height=row_inches(1.3) * max(len(numbers), 3))
    (panel,) = drawn.panels
    panel.axvline(0, color=INK, lw=0.6)
    for row in rows:
        place, sides = numbers.index(row["number"]), [row["below"], row["above"]]
        if row["kink"]:
            panel.plot(sides, [place, place], marker="|", color=_STRONG, lw=1.0, ms=6, zorder=3)
        else:
            panel.plot(np.nanmean(sides), place, marker="o", color=_MAIN, alpha=0.6, ms=4.5, mew=0, zorder=2)
    name_rows(panel, numbers, labelled=True)
    plain_ticks(panel.xaxis, Scale(1.0, "", ""))
    drawn.xlabel = f"change of the {metric} for 1 % more [%]"
    handles = [mark_handle("a scenario's winner", marker="o", color=_MAIN)]
    if any(row["kink"] for row in rows):
        handles.append(mark_handle("kink: below and above differ", marker="|", color=_STRONG))
    drawn.legend(handles)
    return drawn


def gains(rows: Sequence[Mapping[str, Any]], title: str, *, note: str) -> FigureSheet:
    """Plot what changes gain, a dot for the expected gain and a line for its interval, from top to bottom.

    rows: `name`, `low`, `gain` and `high` [s], `kind`: what sort of change it is.
    """
    drawn = sheet(1, Frame(title, note), height=row_inches(1.4) * max(len(rows), 3))
    (panel,) = drawn.panels
    chosen = looks(dict.fromkeys(row["kind"] for row in rows))
    unit = scale(Axis("gain", "gain", "s"), [row["high"] for row in rows])
    panel.axvline(0, color=INK, lw=0.6)
    for place, row in enumerate(rows):
        low, gain, high = (unit.factor * row[name] for name in ("low", "gain", "high"))
        look = chosen[row["kind"]]
        panel.hlines(place, low, high, color=look.colour, lw=1.2, alpha=0.6)
        panel.plot(gain, place, marker=look.marker, color=look.colour, ms=4.5, mew=0, zorder=3)
    name_rows(panel, [row["name"] for row in rows], labelled=True)
    plain_ticks(panel.xaxis, unit)
    drawn.xlabel = unit.title
    drawn.legend(handles_of(chosen, style="marker"))
    return drawn
