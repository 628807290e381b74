"""Words of figures: what a table says, in a short sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dse.plots.palette import label
from dse.results.answer import geometric_mean as geometric_mean

if TYPE_CHECKING:
    import pandas as pd


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


def largest_row(rows: pd.DataFrame, column: str) -> pd.Series[Any]:
    """The first row with the largest value of a column."""
    row: pd.Series[Any] = rows.loc[[rows[column].idxmax()]].iloc[0]
    return row


def extremes(values: pd.Series[Any]) -> tuple[str, str]:
    """Names of the least and the largest of some values."""
    return str(values.idxmin()), str(values.idxmax())


def best_rows(rows: pd.DataFrame, by: list[str], value: str = "makespan_s") -> pd.DataFrame:
    """Row with the least value of each group."""
    least: pd.DataFrame = rows.loc[rows.groupby(by, sort=False, observed=True)[value].idxmin()]
    return least
