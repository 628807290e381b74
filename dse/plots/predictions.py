"""Figures of predictions against measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots.canvas import (
    FigureSheet,
    Frame,
    handles_of,
    mark_handle,
    name_rows,
    plain_ticks,
    row_inches,
    sheet,
    signed_decades,
)
from dse.plots.labels import INK, Axis, Scale, SeriesStyle, looks, scale

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_PERCENT = Scale(1.0, "%", "error")
_MANY = 100  # points of a figure from which on marks are smaller
_FAR = 1.5  # factor of the dotted lines beside the diagonal


def scatter(rows: pd.DataFrame, *, by: str, frame: Frame) -> FigureSheet:
    """Plot predicted against measured time, a panel for each `kind`, with the diagonal.

    rows: `kind`, `measured_s`, `predicted_s`, `fitted` (hollow marks: constants were fitted on the row) and the column
    `by` for colour. Errors in the titles are over rows that no constant was fitted on.
    """
    pairs = rows.assign(measured=rows["measured_s"], predicted=rows["predicted_s"], panel=rows["kind"])
    return _against(pairs, Axis("measured", "time", "s"), by=by, frame=frame)


def ratios(rows: pd.DataFrame, what: Axis, *, by: str, frame: Frame) -> FigureSheet:
    """Plot predicted against measured ratios, a panel for each `predictor`, with the diagonal and the lines at 1.

    rows: `predictor`, `measured`, `predicted`, `fitted` (hollow marks: constants were fitted on the row) and the column
    `by` for colour. Errors in the titles are over rows that no constant was fitted on.
    """
    return _against(rows.assign(panel=rows["predictor"]), what, by=by, frame=frame)


def _against(rows: pd.DataFrame, what: Axis, *, by: str, frame: Frame) -> FigureSheet:
    groups, note = Frame(frame.title, frame.note, "panel").panels(rows, "measured")
    chosen = looks(rows[by].unique())
    height = {1: 3.0, 2: 2.4, 3: 1.7}.get(len(groups), 1.3)
    columns = {1: 1, 2: 2, 3: 3}.get(len(groups), 4)
    drawn = sheet(len(groups), Frame(frame.title, note), height=height, columns=columns)
    unit = scale(what, rows[["measured", "predicted"]].to_numpy(), logarithmic=True)
    for place, (panel, (name, group)) in enumerate(zip(drawn.panels, groups.items(), strict=True)):
        for look, part, fitted in _parts(group, by, chosen):
            face: Any = "none" if fitted else [look.colour]
            marks: dict[str, Any] = {
                "marker": look.marker,
                "s": 9 if len(rows) > _MANY else 16,
                "lw": 0.6,
                "alpha": 1.0 if fitted else 0.6,
            }
            places = part["measured"] * unit.factor, part["predicted"] * unit.factor
            panel.scatter(*places, facecolors=face, edgecolors=[look.colour] if fitted else "none", **marks)
        _diagonal(panel, group[["measured", "predicted"]] * unit.factor, unit, centre=what.centre)
        drawn.name(place, f"{name}: {_error_text(group)}")
    drawn.xlabel, drawn.ylabel = (f"{way} {unit.title}" for way in ("measured", "predicted"))
    drawn.legend(handles_of(chosen))
    lines = f"dotted: {'1' if what.centre else f'a factor {_FAR:g}'}"
    hollow = [mark_handle("constants fitted on it", marker="o", fillstyle="none")] if rows["fitted"].any() else []
    drawn.legend([*hollow, mark_handle("predicted = measured", ls="-", lw=0.8), mark_handle(lines, ls=":", lw=0.8)])
    return drawn


def _parts(
    rows: pd.DataFrame, by: str, chosen: Mapping[str, SeriesStyle]
) -> Iterator[tuple[SeriesStyle, pd.DataFrame, bool]]:
    """Yield of each name its rows that constants were not fitted on, and those that they were."""
    for name, look in chosen.items():
        group = rows[rows[by].astype(str) == name]
        for fitted in (False, True):
            yield look, group[group["fitted"].astype(bool) == fitted], fitted


def _diagonal(panel: Axes, pairs: pd.DataFrame, unit: Scale, *, centre: float | None) -> None:
    ends = np.array([float(pairs.min().min()) * 0.8, float(pairs.max().max()) * 1.25])
    panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    panel.plot(ends, ends, color=INK, lw=0.8, zorder=0)
    if centre:
        panel.axhline(centre, color=INK, lw=0.7, ls=":", zorder=0)
        panel.axvline(centre, color=INK, lw=0.7, ls=":", zorder=0)
    else:
        for factor in (_FAR, 1 / _FAR):
            panel.plot(ends, ends * factor, color=INK, lw=0.7, ls=":", zorder=0)
    plain_ticks(panel.xaxis, unit)
    plain_ticks(panel.yaxis, unit)


def median_error(rows: pd.DataFrame) -> float | None:
    """Median absolute relative error of rows that no constant was fitted on; None without such rows.

    rows: `measured_s` and `predicted_s`, or `measured` and `predicted`; `fitted`.
    """
    unseen = rows[~rows["fitted"].astype(bool)]
    names = ("measured_s", "predicted_s") if "measured_s" in rows else ("measured", "predicted")
    return float((unseen[names[1]] / unseen[names[0]] - 1).abs().median()) if len(unseen) else None


def _error_text(rows: pd.DataFrame) -> str:
    error = median_error(rows[["measured", "predicted", "fitted"]])
    if error is None:
        return "all fitted on"
    return f"median error {100 * error:.1f} %, {int((~rows['fitted'].astype(bool)).sum())} rows"


def errors(rows: pd.DataFrame, models: Sequence[str], *, frame: Frame) -> FigureSheet:
    """Plot the median signed error of each model for each device as a dot from 0, with a bar to the 90th percentile.

    A panel per `kind`. rows: `kind`, `device`, `model`, `median`, `signed`, `p90` (shares).
    """
    groups, note = Frame(frame.title, frame.note, "kind").panels(rows, "median")
    devices = [str(name) for name in rows["device"].unique()]
    chosen = looks(models)
    drawn = sheet(len(groups), Frame(frame.title, note), height=row_inches(0.5 + 0.62 * len(models)) * len(devices))
    for place, ((first, _, panel), (name, group)) in enumerate(zip(drawn.rows(), groups.items(), strict=True)):
        for index, (model, look) in enumerate(chosen.items()):
            part = group[group["model"] == model].set_index("device").reindex(devices)
            heights = np.arange(len(devices)) + 0.66 * ((index + 0.5) / len(chosen) - 0.5)
            far = 100 * part["p90"] * np.sign(part["signed"].fillna(0.0)).replace(0.0, 1.0)
            panel.hlines(heights, 0, far, color=look.colour, lw=0.9, alpha=0.6)
            panel.plot(far, heights, ls="", marker="|", color=look.colour, ms=4)
            panel.plot(100 * part["signed"], heights, ls="", marker=look.marker, color=look.colour, ms=3.6, mew=0)
        panel.axvline(0.0, color=INK, lw=0.8)
        name_rows(panel, devices, labelled=first)
        signed_decades(panel, _PERCENT, linear=10.0)
        drawn.name(place, name)
    drawn.xlabel = "error on rows that nothing was fitted on [%]"
    ends = [mark_handle("median, with its sign", marker="o", color="#8c8c8c")]
    ends += [mark_handle("90th percentile of the size of errors", marker="|", color="#8c8c8c", ls="-", lw=0.9)]
    drawn.legend([*handles_of(chosen), *ends])
    return drawn


def bandwidths(rows: pd.DataFrame, *, frame: Frame) -> FigureSheet:
    """Plot the bus bandwidth of all-reduces over payload, measured (marks) and predicted (lines); a panel per `device`.

    rows: `device`, `gpus`, `payload_bytes`, `measured_bytes_per_s`, `predicted_bytes_per_s`, `fitted`.
    """
    groups, note = Frame(frame.title, frame.note, "device").panels(rows, "measured_bytes_per_s")
    chosen = looks(f"{number:.0f} GPUs" for number in sorted(rows["gpus"].unique()))
    drawn = sheet(len(groups), Frame(frame.title, note), height=1.6, columns=min(3, len(groups)))
    rates = rows[["measured_bytes_per_s", "predicted_bytes_per_s"]].to_numpy()
    units = (
        scale(Axis("payload_bytes", "payload", "B"), rows["payload_bytes"], logarithmic=True),
        scale(Axis("", "bus bandwidth", "B/s"), rates),
    )
    for place, (panel, (name, group)) in enumerate(zip(drawn.panels, groups.items(), strict=True)):
        for gpus, look in chosen.items():
            line = group[group["gpus"] == float(gpus.split()[0])].sort_values("payload_bytes")
            _bandwidth(panel, line, look, units)
        panel.set(xscale="log", ylim=(0, None))
        plain_ticks(panel.xaxis, units[0], values=group["payload_bytes"] * units[0].factor)
        plain_ticks(panel.yaxis, units[1])
        drawn.name(place, name)
    drawn.xlabel, drawn.ylabel = units[0].title, units[1].title
    marks = [mark_handle("measured", marker="o", color="#8c8c8c"), mark_handle("predicted", ls="-", color="#8c8c8c")]
    hollow = [mark_handle("fitted on", marker="o", fillstyle="none")] if rows["fitted"].any() else []
    drawn.legend([*handles_of(chosen), *marks, *hollow])
    return drawn


def _bandwidth(panel: Axes, line: pd.DataFrame, look: SeriesStyle, units: tuple[Scale, Scale]) -> None:
    marks: dict[str, Any] = {"color": look.colour, "marker": look.marker, "ls": "", "ms": 3.2, "mew": 0.6}
    for fitted, fill in ((False, "full"), (True, "none")):
        part = line[line["fitted"].astype(bool) == fitted]
        places = part["payload_bytes"] * units[0].factor, part["measured_bytes_per_s"] * units[1].factor
        panel.plot(*places, fillstyle=fill, **marks)
    rate = line["predicted_bytes_per_s"] * units[1].factor
    panel.plot(line["payload_bytes"] * units[0].factor, rate, color=look.colour, lw=1.1)
