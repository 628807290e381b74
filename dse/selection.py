"""A part of a large table that stands for all of it: what is shown, drawn and tracked stays bounded.

The best row of every scenario comes first, then the rows of a front, then the best of every combination of text knobs,
then a seeded random sample of the rest. A table that fits is taken whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.standings import first_best, signed

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 200_000
"""Rows of the longest table that report, claims and figures read whole; more take minutes to draw and show no more."""
SELECTED = 20_000
"""Rows that they read of a longer one."""

_ABOUT = ("key", "status", "reason", "engine", "baseline")
_WINNER, _FRONT, _BEST, _REST = range(4)


@dataclass(frozen=True)
class Selection:
    """Rows of a table of `num_rows`."""

    table: pd.DataFrame
    num_rows: int

    @property
    def complete(self) -> bool:
        """Whether these are all rows there are."""
        return len(self.table) == self.num_rows

    def __str__(self) -> str:
        return (
            f"{len(self.table):,} of {self.num_rows:,} rows: the best and the fronts, and a random sample of the rest"
        )


def select(path: Path, goals: Mapping[str, str], most: int, *, selected: int | None = None) -> Selection:
    """A stored table of at most `most` rows, or of a longer one `selected` rows (or `most`), in its order.

    The same ones every time.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        total = file.metadata.num_rows
        if total <= most:
            return Selection(file.read().to_pandas(), total)
        held = _Held(selected or most)
        texts = [field.name for field in file.schema_arrow if field.type == pa.string() and field.name not in _ABOUT]
        for group in range(file.num_row_groups):
            part = file.read_row_group(group)
            held.add(part, _ranks(part, goals, texts))
        return Selection(held.rows().to_pandas(), total)


class _Held:
    """The rows that matter most so far; what comes later may push others out."""

    def __init__(self, most: int) -> None:
        self._most, self._random = most, np.random.default_rng(0)
        self._rows: Any = None
        self._order: NDArray[np.float64] = np.empty(0)

    def add(self, rows: Any, ranks: NDArray[np.int64]) -> None:
        """Take in rows, the lower their rank the sooner; within a rank it is chance that decides."""
        import pyarrow as pa

        order = np.concatenate([self._order, ranks + self._random.random(len(ranks))])
        chosen = np.sort(np.argsort(order, kind="stable")[: self._most])
        known = len(self._order)
        fresh = rows.take(chosen[chosen >= known] - known)
        self._rows = fresh if self._rows is None else pa.concat_tables([self._rows.take(chosen[chosen < known]), fresh])
        self._order = order[chosen]

    def rows(self) -> Any:
        """What is held, in the order of the table."""
        return self._rows


def _ranks(part: Any, goals: Mapping[str, str], texts: list[str]) -> NDArray[np.int64]:
    """How much each row of a part of a table matters."""
    rows = part.select(["status", "on_front", *texts, *goals]).to_pandas()
    ranks = np.full(len(rows), _REST)
    ok = np.flatnonzero(rows["status"] == "ok")
    values = signed(rows.iloc[ok], goals)

    def mark(names: list[str], rank: int) -> None:
        for places in rows.iloc[ok].groupby(names, sort=False, dropna=False).indices.values():
            ranks[ok[places[first_best(values[places])]]] = rank

    mark(texts, _BEST)
    ranks[rows["on_front"].to_numpy()] = _FRONT
    mark(["scenario"], _WINNER)
    return ranks
