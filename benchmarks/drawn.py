"""Figures held against their tables: `python -m benchmarks.drawn [--json] [<study> ...]` runs studies with few points.

    figures_wrong     drawn values that differ from their tables, over all figures of all studies
    headlines_wrong   numbers of headlines that are in no table below them

A drawn value is wrong where a chart draws what its rows do not hold under the names that stand beside it, where the
rows of a chart hold of points what the table of results does not, or where it changes with the order or the numbering
of the rows of that table: what is looked up by key depends on neither.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.headlines import numbers_without_origin
from dse.plots import FigureSheet
from dse.plots.labels import label
from dse.results import report
from dse.results.run_folder import Outputs
from tests.campaigns.answer_check import small_run, studies

if TYPE_CHECKING:
    import pandas as pd

_DIGITS = 9  # of a drawn value, by which two are compared
_NEAR = 1e-6  # relative: charts scale values
_HOLLOW = ("", "None", "none", None)


@dataclass(frozen=True)
class Mark:
    """A value that a figure shows. panel, series, row, column: names that stand beside it, "" without one; x, y: as the
    axes have them, y NaN in a row; of a cell, x is its shade.
    """

    panel: str
    series: str
    row: str
    column: str
    x: float
    y: float


def marks(sheet: FigureSheet) -> Iterator[Mark]:
    """Yield the marks, corners of bars and ends of lines of a figure."""
    series, rows = _series(sheet), list[str]()
    for place, panel in enumerate(sheet.panels):
        title = _line(sheet.names[place]) if place in sheet.names else ""
        own, columns = (_axis_names(axis) for axis in (panel.yaxis, panel.xaxis))
        rows = own if any(own) or not own else rows  # only the first panel of a line has them written
        for colour, points in _points(panel):
            for x, y in points:
                row = _at(rows, y) if own else ""
                yield Mark(title, series.get(colour, ""), row, "", float(x), float("nan") if own else float(y))
        for image in panel.images:
            for (down, right), shade in np.ndenumerate(np.asarray(image.get_array(), float).mean(axis=-1)):
                yield Mark(title, "", _at(rows, down) if own else "", _at(columns, right), float(shade), float("nan"))


def _axis_names(axis: Any) -> list[str]:
    return [_line(text) for text in axis.get_ticklabels()] if getattr(axis, "holds_names", False) else []


def _at(names: Sequence[str], place: float) -> str:
    index = round(float(place))
    return names[index] if 0 <= index < len(names) else ""


def _line(text: Any) -> str:
    return str(text.get_text()).replace("\n", " ")


def _series(sheet: FigureSheet) -> dict[str, str]:
    """Colour -> the name that the legend gives it."""
    from matplotlib.colors import to_hex

    handles = chain.from_iterable(sheet.legends)
    looks = [(handle, getattr(handle, "get_color", getattr(handle, "get_facecolor", None))) for handle in handles]
    return {to_hex(colour()): str(handle.get_label()) for handle, colour in looks if colour is not None}


def _points(panel: Any) -> Iterator[tuple[str, Any]]:
    """Yield of every line, cloud and bar its colour and its points [N, 2]."""
    from matplotlib.collections import PathCollection, PolyCollection
    from matplotlib.colors import to_hex

    for line in panel.lines:
        data = np.column_stack([np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)])
        is_rule = len(data) == 2 and line.get_transform() != panel.transData  # a line across the panel
        if not is_rule:
            yield to_hex(line.get_color()), data[np.isfinite(data).all(axis=1)]
    for cloud in panel.collections:
        colours = cloud.get_facecolor()
        colour = to_hex(colours[0]) if len(colours) else ""
        if isinstance(cloud, PathCollection):
            yield colour, np.ma.getdata(cloud.get_offsets())
        elif isinstance(cloud, PolyCollection):
            for path in cloud.get_paths():
                yield colour, np.asarray(path.vertices)[:2]


def not_in_rows(sheet: FigureSheet) -> list[Mark]:
    """Marks on an axis of values that no row of the figure holds under the names that stand beside them."""
    if sheet.table is None or not sheet.axes or next(iter(sheet.axes)) not in sheet.table:  # sums are in no row
        return []
    measure = next(iter(sheet.axes.values()))
    numbers = sheet.table.select_dtypes("number").to_numpy(float)
    names = [_names(row) for row in sheet.table.astype(object).to_numpy()]
    wrong = []
    for mark in marks(sheet):
        if mark.column:  # a shade
            continue
        value = (mark.x if measure.side == "x" else mark.y) / measure.scale.factor
        beside = {name for name in (mark.panel, mark.series, mark.row) if name}
        if mark.series and not any(mark.series in row for row in names):
            beside -= {mark.series}  # a limit, or a look of all
        held = np.array([beside <= row for row in names], bool)
        if not np.isclose(numbers[held], value, rtol=_NEAR, atol=1e-300).any():
            wrong.append(mark)
    return wrong


def _names(cells: Iterable[Any]) -> set[str]:
    texts = {str(cell) for cell in cells}
    return texts | {label(text) for text in texts} | {text.replace("\n", " ") for text in texts}


def not_in_table(sheet: FigureSheet, table: pd.DataFrame) -> int:
    """Count values of the rows of a figure that no points of the same names in the table of results have between them.

    A row may stand for several points (the best, a mean): its value is then between theirs.
    """
    rows = sheet.table
    if rows is None or "scenario" not in rows or "scenario" not in table:
        return 0
    ok = table[table["status"] == "ok"]
    shared = [name for name in rows.columns if name in ok.columns]
    texts = [name for name in shared if not _is_number(ok[name]) and set(rows[name].dropna()) <= set(ok[name].dropna())]
    metrics = [name for name in shared if _is_number(ok[name]) and _is_number(rows[name])]
    if "scenario" not in texts:
        return 0
    texts = ["scenario", "key"] if "key" in texts else texts  # a row that is a point
    keys, values = (_with_texts(part[[*texts, *metrics]], texts) for part in (rows, ok))
    ends = values.astype(dict.fromkeys(metrics, float)).groupby(texts)[metrics]
    low, high = (part.reindex(_index(keys, texts)).to_numpy() for part in (ends.min(), ends.max()))
    drawn = keys[metrics].astype(float).to_numpy()
    slack = _NEAR * np.maximum(np.abs(low), np.abs(high))
    unknown = ~_index(keys, texts).isin(_index(values, texts))
    return int(((drawn < low - slack) | (drawn > high + slack)).sum() + unknown.sum())


def _with_texts(rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Rows whose names are texts, "" where there is none, so that they can be compared."""
    texts = {name: rows[name].astype(object).where(rows[name].notna(), "").astype(str) for name in names}
    return rows.assign(**texts)


def _index(rows: pd.DataFrame, names: Sequence[str]) -> pd.Index[Any]:
    import pandas as pd

    return pd.MultiIndex.from_frame(rows[list(names)]) if len(names) > 1 else pd.Index(rows[names[0]])


def _is_number(column: Any) -> bool:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    return bool(is_numeric_dtype(column)) and not is_bool_dtype(column)


def counted(sheet: FigureSheet) -> Counter[Any]:
    """How often a figure shows each value, to nine digits, whatever the order of its panels, rows and series."""
    return Counter(
        (
            mark.panel,
            mark.series,
            mark.row,
            mark.column,
            *(float(f"{value:.{_DIGITS}g}") for value in (mark.x, mark.y) if value == value),
        )
        for mark in marks(sheet)
    )


def moved(outputs: Outputs, table: pd.DataFrame, *, reverse: bool) -> dict[str, int]:
    """Values of each figure that are others with the rows of the table numbered, or (reverse) ordered, otherwise."""
    module = outputs.read_config()["study"]["module"]
    other = table.iloc[::-1].reset_index(drop=True) if reverse else table.set_axis(table.index[::-1])
    first = {name: counted(make()) for name, make in report.study_figures(outputs, module, table)}
    second = {name: counted(make()) for name, make in report.study_figures(outputs, module, other)}
    return {name: (first[name] - second.get(name, Counter())).total() for name in first}


def wrong_values(outputs: Outputs) -> dict[str, int]:
    """Figure of a finished run -> how many of its values are wrong; those without any are left out."""
    module, table = outputs.read_config()["study"]["module"], report.load_selection(outputs).table
    faults = Counter[str]()
    for name, make in report.study_figures(outputs, module, table):
        sheet = make()
        faults[name] += len(not_in_rows(sheet)) + not_in_table(sheet, table)
    for name, make in report.extras(outputs, module):
        faults[name] += len(not_in_rows(make()))
    for reverse in (False, True):
        faults.update(moved(outputs, table, reverse=reverse))
    return dict(+faults)


def small_runs(folder: Path, names: Sequence[str] = ()) -> Iterator[Outputs]:
    """Run studies with few points, one after the other, and yield their folders; all that this machine can run."""
    for name in names or studies():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            outputs = small_run(name, folder)
        yield outputs


def counters(names: Sequence[str] = ()) -> dict[str, Any]:
    """`figures_wrong` and `headlines_wrong`, and where they are: study -> what is wrong."""
    figures, headlines = dict[str, Any](), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="dse-drawn-") as folder:
        for outputs in small_runs(Path(folder), names):
            study = outputs.folder.parent.name
            figures |= {study: wrong} if (wrong := wrong_values(outputs)) else {}
            headlines |= {study: missing} if (missing := numbers_without_origin(outputs)) else {}
    return {
        "figures_wrong": sum(sum(wrong.values()) for wrong in figures.values()),
        "headlines_wrong": sum(map(len, headlines.values())),
        "where": {"figures": figures, "headlines": headlines},
    }


def figures_wrong(names: Sequence[str] = ()) -> int:
    """Count drawn values that differ from their tables, over all figures of studies."""
    return int(counters(names)["figures_wrong"])


def headlines_wrong(names: Sequence[str] = ()) -> int:
    """Count numbers of headlines that their tables do not hold."""
    return int(counters(names)["headlines_wrong"])


def main(words: Sequence[str] | None = None) -> int:
    """Print both counters; 1 where one is not 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drawn", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("studies", nargs="*")
    asked = parser.parse_args(words)
    found = counters(asked.studies)
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"figures_wrong = {found['figures_wrong']}, headlines_wrong = {found['headlines_wrong']}")
        print(*(f"{study}: {wrong}" for kind in found["where"].values() for study, wrong in kind.items()), sep="\n")
    return int(bool(found["figures_wrong"] or found["headlines_wrong"]))


QUICK = (
    *("dlrm_scaleout", "conccl", "ficco", "ficco_sweep", "fused_ops", "goldyloc", "jitq", "nic_placement"),
    *("comp_vs_comm", "operators", "t3", "t3_hardware", "t3_mi300x", "whole_models"),
)
"""Studies that take seconds each: those of the core, and of papers, with the most kinds of figures."""

if __name__ == "__main__":
    sys.exit(main())
