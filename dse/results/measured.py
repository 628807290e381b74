"""Values that a user measured, figures beside those of a study: `beside=<file>.csv` with scenario, series, value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import Problems, did_you_mean
from dse.files import read_csv, read_text
from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.plots.references import Reference, with_references

if TYPE_CHECKING:
    import pandas as pd

    from dse.results.run_folder import Outputs

NAME = "beside.csv"
_COLUMNS = ("scenario", "series", "value")
_WAY_OUT = "name a CSV with the columns scenario, series, value"


def read(path: Path, scenarios: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a table of measurements. Raises ConfigError with every fault of the file."""
    check, names, rows = Problems(), list(scenarios), dict[tuple[str, str], dict[str, Any]]()
    for line, cells in read_csv(path, "beside", needed=_COLUMNS, way_out=_WAY_OUT).rows:
        where = f"{path.name}, line {line}"
        scenario, series = cells["scenario"], cells["series"]
        if scenario not in names:
            check.add(where, "is no scenario of this study", value=scenario, way_out=did_you_mean(scenario, names))
        elif (scenario, series) in rows:
            check.add(where, "repeats a scenario and series", value=f"{scenario}, {series}", way_out="keep one of them")
        if not series:
            check.add(where, "names no series", way_out="write what was measured, such as A100 or my_kernel")
        value = _positive(cells["value"])
        if value is None:
            check.add(where, "is no positive number", value=cells["value"], way_out="write a number such as 1.42")
        rows[scenario, series] = {"scenario": scenario, "series": series, "value": value}
    if not rows:
        check.add(path.name, "holds no measurement", way_out=f"add rows, such as: {names[0]},my_kernel,1.42")
    check.done(path.name)
    return list(rows.values())


def copy(path: Path, outputs: Outputs) -> None:
    """Copy a table of measurements into the folder of a run."""
    outputs.write_text(NAME, read_text(path, "beside"))


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def add_figures(
    outputs: Outputs, table: pd.DataFrame, figures: Iterable[tuple[str, Draw]]
) -> Iterator[tuple[str, Draw]]:
    """Add measured values to the figures that show the same quantity by scenario, and a figure that compares them."""
    record = outputs.read_json("summary")
    rows = read(outputs.folder / NAME, map(str, table["scenario"].unique()))
    axis = Axis.of(*_quantity(record))
    references = list(_references(rows, axis.column))
    for name, make in figures:
        yield name, with_references(make, references)
    best = _best(table, axis.column, record["goals"].get(axis.column, "maximize"))
    yield "beside", with_references(partial(_comparison, best, rows, axis), references)


def _quantity(record: Mapping[str, Any]) -> tuple[str, str]:
    """The gain of a study, or its first objective, with its unit."""
    name = record["gain"] or next(iter(record["goals"]))
    return name, record["units"][name]


def _references(rows: Sequence[Mapping[str, Any]], column: str) -> Iterator[Reference]:
    """A mark where a scenario is a row, a line where it is a panel."""
    for row in rows:
        value, label = float(row["value"]), f"measured, {row['series']}"
        for place in ("row", "panel"):
            yield Reference(label, value, value, of=column, shown=False, **{place: row["scenario"]})


def _best(table: pd.DataFrame, column: str, goal: str) -> dict[str, float]:
    values = table[table["status"] == "ok"].groupby("scenario", sort=False)[column]
    return {str(name): float(value) for name, value in getattr(values, goal[:3])().items()}


def _comparison(best: Mapping[str, float], rows: Sequence[Mapping[str, Any]], axis: Axis) -> FigureSheet:
    """The best point of each measured scenario."""
    import pandas as pd

    ratios = pd.Series([best[row["scenario"]] / row["value"] for row in rows if row["scenario"] in best], dtype=float)
    title = f"The best points are {100 * (float(ratios.median()) - 1):+.0f} % off what was measured, in the median"
    note = "filled: the best point of each scenario"
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows if row["scenario"] in best))
    values = {"scenario": scenarios, axis.column: [best[name] for name in scenarios], "series": "best point"}
    return tables.dots(pd.DataFrame(values), axis, row="scenario", by="series", frame=Frame(title, note))
