"""A part of a large table that stands for all of it: what is shown, drawn and tracked stays bounded.

For figures and summaries (`select`) the best row of every scenario comes first, then the rows of a front, then the best
of every combination of text knobs, then a seeded random sample of the rest. For MLflow and Optuna (`shown_rows`), a
`SelectionRule` says. A table that fits is taken whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dse.results.output_files import frame
from dse.results.pareto import first_best, minimized
from dse.results.run_folder import results

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 200_000
"""Rows of the longest table that report, claims and figures read whole; more take minutes to draw and show no more."""
SELECTED = 20_000
"""Rows that they read of a longer one."""

_ABOUT = ("key", "status", "reason", "engine", "baseline")  # texts that say something of a row, and are no knobs
_WINNER, _FRONT, _BEST, _REST = range(4)  # the smaller, the sooner


@dataclass(frozen=True)
class Selection:
    """Rows of a table of `num_rows`."""

    table: pd.DataFrame
    num_rows: int

    @property
    def complete(self) -> bool:
        """True if these are all rows there are."""
        return len(self.table) == self.num_rows

    def __str__(self) -> str:
        return (
            f"{len(self.table):,} of {self.num_rows:,} rows: the best and the fronts, and a random sample of the rest"
        )


def select(path: Path, goals: Mapping[str, str], most: int, *, selected: int | None = None) -> Selection:
    """A stored table of at most `most` rows, or of a longer one `selected` rows (or `most`), in its order.

    The same ones every time.
    """
    with results(path, goals) as file:
        total = file.num_rows
        if total <= most:
            return Selection(frame(path, file.whole()), total)
        best = _SelectedRows(selected or most)
        texts = [name for name, kind in file.kinds.items() if kind == "text" and name not in _ABOUT]
        for part in file.groups():
            best.add(part, _ranks(part, goals, texts))
        return Selection(frame(path, best.rows()), total)


class _SelectedRows:
    """The rows that matter most so far; what comes later may push others out."""

    def __init__(self, most: int) -> None:
        self._most, self._random = most, np.random.default_rng(0)  # the same sample of the same table
        self._rows: Any = None
        self._order: NDArray[np.float64] = np.empty(0)

    def add(self, rows: Any, ranks: NDArray[np.int64]) -> None:
        """Take in rows, the lower their rank the sooner; within a rank it is chance that decides."""
        import pyarrow as pa

        # ranks are whole numbers, so that chance decides within a rank only
        order = np.concatenate([self._order, ranks + self._random.random(len(ranks))])
        chosen = np.sort(np.argsort(order, kind="stable")[: self._most])  # in the order of the table
        num_before = len(self._order)
        fresh = rows.take(chosen[chosen >= num_before] - num_before)
        self._rows = (
            fresh if self._rows is None else pa.concat_tables([self._rows.take(chosen[chosen < num_before]), fresh])
        )
        self._order = order[chosen]

    def rows(self) -> Any:
        """The rows that are kept, in the order of the table."""
        return self._rows


def _ranks(part: Any, goals: Mapping[str, str], texts: list[str]) -> NDArray[np.int64]:
    """Ranks of the rows of a part of a table: the lower, the more a row matters."""
    rows = part.select(["status", "on_front", *texts, *goals]).to_pandas()
    ranks = np.full(len(rows), _REST)
    ok = np.flatnonzero(rows["status"] == "ok")
    values = minimized(rows.iloc[ok], goals)

    def mark(names: list[str], rank: int) -> None:
        for places in rows.iloc[ok].groupby(names, sort=False, dropna=False).indices.values():
            ranks[ok[places[first_best(values[places])]]] = rank

    mark(texts, _BEST)  # weakest first: later marks replace it
    ranks[rows["on_front"].to_numpy()] = _FRONT
    mark(["scenario"], _WINNER)
    return ranks


@dataclass(frozen=True)
class SelectionRule:
    """Selection of the points that are shown one by one.

    `auto`: all rows of a table of up to `whole_up_to`; of a larger one the fronts, promoted points, baselines and a
    sample of the points without a result, at most `whole_up_to` in all.
    """

    points: Literal["auto", "all", "none"] = "auto"
    whole_up_to: int = 10_000

    def amount(self, num_rows: int) -> Literal["all", "selected", "none"]:
        """The part of a table of so many rows that is shown."""
        if self.points == "auto":
            return "all" if num_rows <= self.whole_up_to else "selected"
        return self.points

    def bound(self, num_rows: int) -> int:
        """The most rows that are shown."""
        return {"all": num_rows, "selected": self.whole_up_to, "none": 0}[self.amount(num_rows)]


def shown_rows(path: Path, rule: SelectionRule) -> Iterator[Any]:
    """The rows of a stored table that a rule shows, as short pyarrow tables; what matters most comes first.

    The column `NUMBER` is added: which row of the table each is, from 0.
    """
    with results(path, ()) as file:
        amount = rule.amount(file.num_rows)
        if amount == "selected":
            yield from _pieces(_remarkable(file, rule.whole_up_to))
        elif amount == "all":
            for part in _groups_with_row_numbers(file):
                yield from _pieces(part.take(np.argsort(_remarks(part), kind="stable")))


NUMBER = "row number"
_ROWS = 2000  # of a table, held as Python objects at a time
_SAMPLE = 100  # rows of each status without result, where not all rows are shown
_ON_FRONT, _PROMOTED, _BASELINE, _WITHOUT_RESULT, _UNREMARKABLE = range(5)  # in order of importance


def _groups_with_row_numbers(file: Any) -> Iterator[Any]:
    """The row groups of a file, with the number of each row."""
    import pyarrow as pa

    first = 0
    for part in file.groups():
        yield part.append_column(NUMBER, pa.array(np.arange(first, first + len(part))))
        first += len(part)


def _pieces(table: Any) -> Iterator[Any]:
    for start in range(0, table.num_rows, _ROWS):
        yield table.slice(start, _ROWS)


def _remarks(table: Any) -> NDArray[np.int64]:
    """Why each row is shown."""
    column = {name: table.column(name).to_numpy() for name in ("status", "key", "baseline", "on_front")}
    promoted = table.column("promoted").to_numpy() if "promoted" in table.column_names else np.zeros(len(table), bool)
    marks = {
        _ON_FRONT: column["on_front"],
        _PROMOTED: promoted,
        _BASELINE: column["baseline"] == column["key"],
        _WITHOUT_RESULT: column["status"] != "ok",
    }
    # the first that holds
    return np.select([np.asarray(mark, bool) for mark in marks.values()], list(marks), _UNREMARKABLE)


def _remarkable(file: Any, most: int) -> Any:
    """The rows of a long table that are shown for a reason. A key is a hash, so the rows with the smallest keys are a
    random sample, and the same one every time."""
    import pyarrow as pa

    remarkable: Any = None
    for part in _groups_with_row_numbers(file):
        fresh = part.filter(pa.array(_remarks(part) < _UNREMARKABLE))
        # what was kept so far competes with the new part: memory stays bounded
        remarkable = fresh if remarkable is None else pa.concat_tables([remarkable, fresh])
        remarks, statuses = _remarks(remarkable), remarkable.column("status").to_numpy().astype(str)
        # last key first: by reason, then by key
        order = np.lexsort((remarkable.column("key").to_numpy().astype(str), remarks))
        failed = order[remarks[order] == _WITHOUT_RESULT]
        # each status has its own sample
        sample = [failed[statuses[failed] == status][:_SAMPLE] for status in np.unique(statuses[failed])]
        remarkable = remarkable.take(
            np.concatenate([order[remarks[order] < _WITHOUT_RESULT], *sample])[:most].astype(np.int64)
        )
    return remarkable
