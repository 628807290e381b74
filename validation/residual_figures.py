"""Figures of intervals in `docs/images`: how often those of each level hold, and how wide they are, by kind and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.recorded import ROOT
from dse import plots
from dse.plots import Axis, FigureSheet, Frame, tables

if TYPE_CHECKING:
    import pandas as pd

    from validation.residuals import JudgedRow

FOLDER = ROOT / "docs" / "images"
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def write_figures(judged: Sequence[JudgedRow]) -> None:
    """Draw reliability and sharpness of judged rows as PNG."""
    import pandas as pd

    figures = {
        "interval_reliability": reliability_figure(pd.DataFrame(reliability(judged))),
        "interval_sharpness": sharpness_figure(pd.DataFrame(sharpness(judged))),
    }
    for name, figure in figures.items():
        plots.save(lambda drawn=figure: drawn, FOLDER, name)  # type: ignore[misc]
        (FOLDER / f"{name}.svg").unlink(missing_ok=True)  # pages show the PNG


def reliability(judged: Sequence[JudgedRow]) -> list[dict[str, Any]]:
    """Share of the rows of each kind inside of intervals of each level."""
    rows = []
    for kind in dict.fromkeys(one.row.kind for one in judged):
        members = [one for one in judged if one.row.kind == kind]
        for level in LEVELS:
            z = np.array([-1.0, 1.0]) * NormalDist().inv_cdf((1 + level) / 2)
            ends = np.array([one.group.at(z) for one in members])
            off = np.array([one.row.residual for one in members])
            held = float(np.mean((ends[:, 0] <= off) & (off <= ends[:, 1])))
            rows.append({"kind": kind, "level": level, "held": held, "rows": len(members)})
    return rows


def sharpness(judged: Sequence[JudgedRow]) -> list[dict[str, Any]]:
    """Median half-width of the intervals of each kind and GPU, as a share of the predicted time."""
    from validation.residuals import coverage

    return [{"kind": one.kind, "gpu": one.gpu, "width": float(np.expm1(one.width))} for one in coverage(judged)]


def reliability_figure(rows: pd.DataFrame) -> FigureSheet:
    """Share inside less the level, over the level: above zero intervals hold more often than they promise."""
    few = rows[rows["rows"] >= 30]
    few = few.assign(off=few["held"] - few["level"])
    title = f"Intervals hold as often as they promise, within {100 * few['off'].abs().max():.0f} points at every level"
    level = Axis("level", "level of the interval", "fraction")
    off = Axis("off", "inside, less the level", "fraction", centre=0.0)
    return tables.curves(few, level, y=off, by="kind", frame=Frame(title))


def sharpness_figure(rows: pd.DataFrame) -> FigureSheet:
    """Half-width by kind and GPU."""
    title = f"Half of a 90 % interval is {100 * rows['width'].median():.0f} % of a prediction in the median"
    width = Axis("width", "median half-width of 90 % intervals", "fraction", centre=0.0)
    return tables.dots(rows, width, row="gpu", by="kind", frame=Frame(title))
