"""Base class of studies: no published claims, and Pareto fronts as dse draws them; words and rows that all share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots.labels import label
from dse.results import claims
from dse.results.answer import geometric_mean as geometric_mean
from dse.results.claims import Claim, ClaimResult
from dse.results.run_folder import FinishedRun
from dse.results.words import cell
from dse.space import Case

if TYPE_CHECKING:
    import pandas as pd

    from dse.plots import Draw
    from dse.results.published import PublishedFigure


class Plain:
    """A study without claims or figures of its own: `study.module: plain`.

    allows: changes that leave its claims testable. columns: paths of a design that claims and figures read; they are
    recorded whether or not `study.recorded` lists them.
    """

    allows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def claims(self) -> list[Claim]:
        """Published claims: those of `claims.yaml` in the study's folder; none without one."""
        path = self._folder / "claims.yaml"
        return claims.read(path) if path.is_file() else []

    def published_values(self) -> list[PublishedFigure]:
        """Published values by figure: those of `published.yaml` in the study's folder; none without one."""
        path = self._folder / "published.yaml"
        if not path.is_file():
            return []
        from dse.results import published

        return published.read(path, self.claims())

    @property
    def _folder(self) -> Path:
        """Folder of the module of the study."""
        return Path(inspect.getfile(type(self))).parent

    def cases(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Case]]:
        """Designs that claims and figures need beside the space, by probe and name; none by default.

        config: the composed configuration. They are evaluated as all points are; `run.probe(<probe>)` has their rows,
        with the name of a case as its scenario.
        """
        return {}

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings by claim, from the table of results; none by default."""
        return {}

    def further(self, run: FinishedRun) -> Mapping[str, ClaimResult]:
        """Findings by claim that need more than the table: the run in its folder."""
        return {}

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Yield (name, content to write beside the table): a JSON value, a DataFrame or what draws a figure."""
        return iter(())

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Yield (name, what draws the figure when it is called); none by default. The first is the key figure."""
        return iter(())


STUDY = Plain()


def most_frequent(names: pd.Series[Any]) -> tuple[str, int]:
    """The most frequent of some names, in words, and how often it is there."""
    counts = names.astype(str).value_counts()
    return label(str(counts.index[0])), int(counts.iloc[0])


def capitalised(text: str) -> str:
    """A text with its first letter as at the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def reach(values: Any, unit: str = "", *, digits: int = 0) -> str:
    """The least and the largest of some values: `3 to 12 %`, or the only one."""
    numbers = np.asarray(values, float)
    numbers = numbers[np.isfinite(numbers)]
    low, high = (f"{number:.{digits}f}" for number in (numbers.min(), numbers.max()))
    return (low if low == high else f"{low} to {high}") + unit  # as they are shown, not as they are


def range_of(values: Any, unit: str) -> str:
    """The least and the largest of some values as the cells of a table show them: `0.13 % to 2 %`, or the only one."""
    return " to ".join(dict.fromkeys(cell(value, unit) for value in (min(values), max(values))))


def largest_row(rows: pd.DataFrame, column: str) -> pd.Series[Any]:
    """The first row with the largest value of a column."""
    row: pd.Series[Any] = rows.loc[[rows[column].idxmax()]].iloc[0]
    return row


def extremes(values: pd.Series[Any]) -> tuple[str, str]:
    """Names of the least and the largest of some values."""
    return str(values.idxmin()), str(values.idxmax())


def best_rows(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Row with the least makespan of each group."""
    least: pd.DataFrame = rows.loc[rows.groupby(by, sort=False, observed=True)["makespan_s"].idxmin()]
    return least


def speedups_of_winners(table: pd.DataFrame, what: str) -> str:
    """What winners gain, as the table of an answer shows it: `Fused kernels are 1.02x to 1.95x as fast as …`.

    "" where nothing has a result.
    """
    gains = winning_rows(table[table["status"] == "ok"])["speedup"].astype(float)
    if gains.empty:
        return ""
    mean = f" ({geometric_mean(gains):.2f}x in the geometric mean)" if len(gains) > 1 else ""
    return f"{what} {range_of(gains, 'x')} as fast as the baseline{mean}"


def winning_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that the table of the answer shows, in its order: what heads that table speaks of these.

    `attrs` of the table of results name them by scenario and key (`dse.results.report.study_figures`); of a table that
    names none, the best of each scenario.
    """
    import pandas as pd

    names = rows.attrs.get("winners")
    if not names:
        return best_rows(rows, ["scenario"])
    places = pd.Series(range(len(rows)), index=pd.MultiIndex.from_frame(rows[["scenario", "key"]].astype(str)))
    first = places[~places.index.duplicated()]
    return rows.iloc[first.reindex(pd.MultiIndex.from_tuples(names)).dropna().astype(int)]
