"""What answers a study's question: which rows of a table may win, by what they are told apart, what is shown.

A study declares it (`study.answer`), `summary.json` keeps it, and every table, sentence, page and view goes by it. A
bound is what nothing can be better than, and a baseline what others are compared with: neither ever wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.results.pareto import first_best, minimized
from dse.values import Frozen

if TYPE_CHECKING:
    import pandas as pd

Values = tuple[str | bool | int | float | None, ...]
_Shows = Annotated[tuple[str, ...], Field(max_length=16)]


class Answer(Frozen):
    """What answers a study's question, as the study declares it.

    scenario: what a scenario is, in a word or two (`GEMM`). runs_on: path of the name of what it runs on. shows:
    columns of the first table, that of the question's quantity first. by: paths; each combination of their values has
    a winner of its own. across: a path whose values are columns of the table, with the first quantity. over: paths
    over which a choice counts as at its worst. bounds, baselines: path -> values of rows that never win.
    baseline_may_win: whether the baseline itself is one of the answers.
    """

    scenario: str = "scenario"
    runs_on: str = ""
    shows: _Shows = ()
    by: tuple[str, ...] = ()
    across: str = ""
    over: tuple[str, ...] = ()
    bounds: Mapping[str, Values] = Field(default_factory=dict)
    baselines: Mapping[str, Values] = Field(default_factory=dict)
    baseline_may_win: bool = False


@dataclass(frozen=True)
class Contest:
    """Which rows of a table may win, by what its study declares. knobs: what was searched."""

    answer: Answer = field(default_factory=Answer)
    knobs: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Contest:
        """That of a finished run, by its `summary.json`; where an older one does not say it, every row may win."""
        return cls(Answer.model_validate(record.get("contest") or {"baseline_may_win": True}), tuple(record["knobs"]))

    def may_win(self, batch: Any) -> NDArray[np.bool_]:
        """Marks of the rows of a pyarrow table or batch that may win."""
        marks = ~self.is_bound(batch) & ~_have(batch, self.answer.baselines)
        if not self.answer.baseline_may_win:
            keys, baselines = (np.asarray(batch.column(name).to_pylist()) for name in ("key", "baseline"))
            marks &= keys != baselines
        return np.asarray(marks)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns by which it is decided which rows may win."""
        return tuple(dict.fromkeys([*self.answer.bounds, *self.answer.baselines, "key", "baseline"]))

    def is_bound(self, batch: Any) -> NDArray[np.bool_]:
        """Marks of the rows that nothing can be better than: they are on no front."""
        return _have(batch, self.answer.bounds)

    def contenders(self, table: pd.DataFrame) -> pd.DataFrame:
        """Rows with a result that may win; all that have one where none may."""
        import pyarrow as pa

        ok = table[table["status"] == "ok"]
        decisive = pa.Table.from_pandas(ok[[name for name in self.columns if name in ok]], preserve_index=False)
        marks = self.may_win(decisive)
        return ok[marks] if marks.any() else ok

    def winners(self, table: pd.DataFrame, goals: Mapping[str, str], *, apart: bool = False) -> pd.DataFrame:
        """The best row of each scenario by the first objective, ties by the next ones, then the first.

        apart: that of each scenario and combination of the values by which the study tells answers apart.
        """
        rows = self._at_their_worst(self.contenders(table), goals)
        groups = ["scenario", *(path for path in self._apart if apart and path in rows)]
        values, best = minimized(rows, goals), list[int]()
        for places in rows.groupby(groups, sort=False, dropna=False, observed=True).indices.values():
            best.append(int(places[first_best(values[places])]))
        won = rows.iloc[best].reset_index(drop=True)
        return _in_order(won, groups, list(dict.fromkeys(table["scenario"])))

    def leaders(self, part: pd.DataFrame, goals: Mapping[str, str]) -> pd.DataFrame:
        """Rows of a part of a table among which winners of the whole table may be."""
        return self.contenders(part) if self.answer.over else self.winners(part, goals)

    @property
    def _apart(self) -> tuple[str, ...]:
        return (*self.answer.by, *([self.answer.across] if self.answer.across else []))

    def _at_their_worst(self, rows: pd.DataFrame, goals: Mapping[str, str]) -> pd.DataFrame:
        """Of each choice the row at which the first objective is worst, over what the choice must hold for."""
        over = [path for path in self.answer.over if path in rows]
        if not over or rows.empty:
            return rows
        first = dict([next(iter(goals.items()))])
        groups = ["scenario", *(path for path in dict.fromkeys(self.knobs) if path in rows and path not in over)]
        worst = rows.assign(**{_WORST: minimized(rows, first)[:, 0]}).groupby(groups, sort=False, dropna=False)[_WORST]
        return rows.loc[np.sort(worst.idxmax().to_numpy())]


_WORST = "worst value of the first objective"


def _in_order(won: pd.DataFrame, groups: list[str], scenarios: list[Any]) -> pd.DataFrame:
    """Winners by scenario in the order of the table, then by the values that tell them apart."""
    place = {name: number for number, name in enumerate(scenarios)}
    order = won.assign(scenario=won["scenario"].map(place).astype(int))
    return won.loc[order.sort_values(groups, kind="stable").index].reset_index(drop=True) if len(won) else won


def _have(batch: Any, values: Mapping[str, Values]) -> NDArray[np.bool_]:
    """Marks of the rows that have one of some values at one of some paths."""
    marks = np.zeros(batch.num_rows, bool)
    for path in (path for path in values if path in batch.schema.names):
        marks |= _is_among(batch.column(path), tuple(map(str, values[path])))
    return marks


def _is_among(column: Any, texts: tuple[str, ...]) -> NDArray[np.bool_]:
    """Marks of the values of a pyarrow column whose text is one of some."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        known = np.array([str(value) in texts for value in column.dictionary.to_pylist()] or [False])
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return np.asarray(known[places] & column.is_valid().to_numpy(zero_copy_only=False))
    return np.array([str(value) in texts for value in column.to_pylist()], bool)
