"""Pareto fronts and winners of scenarios, of a whole table or while its rows are still coming.

A study declares what answers its question (`study.answer`), `summary.json` keeps it, and every table, sentence, page
and view goes by it. A bound is what nothing can be better than, and a baseline what others are compared with: neither
wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.backend import STATUSES
from dse.values import Frozen, Keys

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


def minimized(columns: Any, goals: Mapping[str, str]) -> Floats:
    """Objectives [B, objectives] of some columns by name, such that smaller is better (and no 0.0 is negative).

    Rounded to 40 binary digits: what differs by the last bits of a sum is a tie, and nobody leads by them.
    """
    signs = {name: 1.0 if goal == "minimize" else -1.0 for name, goal in goals.items()}
    return _round(np.stack([np.asarray(columns[name], float) * sign for name, sign in signs.items()], axis=-1))


def _round(values: Floats) -> Floats:
    mantissa, exponent = np.frexp(values)
    # of 53: errors of sums of some thousand terms are in the other 13
    # -0.0 and 0.0 are one outcome, and their bits differ
    return np.asarray(np.ldexp(np.rint(np.ldexp(mantissa, 40)), exponent - 40) + 0.0)


def outcome_keys(columns: Sequence[NDArray[Any]], scenarios: NDArray[np.integer[Any]]) -> Keys:
    """Hashes [B, 2] of outcomes: of all metrics [B] each, rounded as in `minimized`, and of their scenario [B]."""
    # equal metrics in different scenarios are different outcomes
    keys = np.stack([scenarios, scenarios], axis=-1).astype(np.uint64) ^ _SEEDS
    for column in columns:
        bits = _round(np.asarray(column, np.float64)).view(np.uint64)
        keys = _mix(keys ^ bits[:, None])
    return keys


# 2^64 over the golden ratio (that of SplitMix64), and over the root of x^4 = x + 1: both odd
_SEEDS = np.array([0x9E3779B97F4A7C15, 0xD1B54A32D192ED03], np.uint64)


def _mix(words: Keys) -> Keys:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), with a constant for each column of words."""
    words = words + _SEEDS
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)))


_LONGEST = 1 << 20  # hashes of a sorted array that is merged with another one


class Front:
    """The Pareto front of one scenario: the objectives that no row seen so far dominates, each once.

    Rows with equal objectives are on the front together, so it is enough to keep one of them; what is held is
    bounded by the front, not by the rows.
    """

    def __init__(self) -> None:
        self._values: Floats | None = None

    def add(self, values: Floats) -> None:
        """Take in rows [B, objectives], smaller being better."""
        if not len(values):
            return
        # the new ones among themselves first: most drop out
        candidates = values if self._values is None else np.concatenate([self._values, _best(values)])
        self._values = _best(candidates)

    def holds(self, values: Floats) -> NDArray[np.bool_]:
        """Marks [B] of the rows [B, objectives] that are on the front."""
        marked = np.zeros(len(values), bool)
        if self._values is not None:
            # cheap: only rows whose first objective is on the front may be on it
            near = np.flatnonzero(np.isin(values[:, 0], self._values[:, 0]))
            together = np.concatenate([self._values, values[near]])
            _, place = np.unique(together, axis=0, return_inverse=True)  # equal rows get equal numbers
            first = len(self._values)
            marked[near] = np.isin(place[first:], place[:first])
        return marked


_FEW = 32  # rows whose pairs take less than importing moocore does: a fifth of a second, with ssl and cffi


def _best(values: Floats) -> Floats:
    """The rows that no other dominates, one of each that are equal."""
    if len(values) <= _FEW:
        distinct = values[np.sort(np.unique(values, axis=0, return_index=True)[1])]
        no_worse = (distinct[:, None] <= distinct).all(axis=-1)  # of distinct rows, who is no worse is better somewhere
        return np.ascontiguousarray(distinct[no_worse.sum(axis=0) == 1])  # each row is no worse than itself
    import moocore

    return np.ascontiguousarray(values[moocore.is_nondominated(values, keep_weakly=False)])


def best_places(values: Floats, places: NDArray[np.intp]) -> NDArray[np.intp]:
    """The places of rows [B, objectives], among some, that are best by the first objective, ties by the next ones."""
    for column in values.T:
        places = places[column[places] == column[places].min()]  # exact, as values are rounded
    return places


def first_best(values: Floats) -> int:
    """The first of the rows [B, objectives] that are best by the first objective, ties by the next ones."""
    return int(best_places(values, np.arange(len(values)))[0])


Values = tuple[str | bool | int | float | None, ...]
_Shows = Annotated[tuple[str, ...], Field(max_length=16)]


class Answer(Frozen):
    """The answer to a study's question, as the study declares it.

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
    """Rule of which rows of a table may win, by what its study declares. knobs: what was searched.

    declared: value of each knob in the declared design, as text; of rows that are equally good, the one with most wins.
    """

    answer: Answer = field(default_factory=Answer)
    knobs: tuple[str, ...] = ()
    declared: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Contest:
        """That of a finished run, by its `summary.json`; where an older one does not say it, every row may win."""
        answer = Answer.model_validate(record.get("contest") or {"baseline_may_win": True})
        return cls(answer, tuple(record["knobs"]), record.get("declared") or {})

    def may_win(self, batch: Any) -> NDArray[np.bool_]:
        """Marks of the rows of a pyarrow table or batch that may win."""
        marks = ~self.is_bound(batch) & ~_have(batch, self.answer.baselines)
        if not self.answer.baseline_may_win:
            keys, baselines = (np.asarray(batch.column(name).to_pylist()) for name in ("key", "baseline"))
            marks &= keys != baselines  # a row that is its own baseline
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
        return ok[marks] if marks.any() else ok  # where only bounds have results, those are shown

    def winners(self, table: pd.DataFrame, goals: Mapping[str, str], *, apart: bool = False) -> pd.DataFrame:
        """The best row of each scenario by the first objective, ties by the next ones, then the nearest to the declared
        design, then the first.

        apart: that of each scenario and combination of the values by which the study tells answers apart.
        """
        rows = self._at_their_worst(self.contenders(table), goals)
        values = minimized(rows, goals)
        best = [self.nearest(rows, best_places(values, places))[0] for places in self._groups(rows, apart)]
        won = rows.iloc[best].reset_index(drop=True)
        return _in_order(won, self._group_names(rows, apart), list(dict.fromkeys(table["scenario"])))

    def ties(self, table: pd.DataFrame, goals: Mapping[str, str]) -> dict[str, int]:
        """Knob -> number of winners, all that the study tells apart, that are as good with another value of it."""
        rows = self._at_their_worst(self.contenders(table), goals)
        values, counts = minimized(rows, goals), dict.fromkeys((path for path in self.knobs if path in rows), 0)
        for places in self._groups(rows, True):
            equal = rows.iloc[best_places(values, places)]
            for path in counts:
                counts[path] += equal[path].nunique(dropna=False) > 1
        return {path: count for path, count in counts.items() if count}

    def nearest(self, rows: Any, places: NDArray[np.intp]) -> tuple[int, int]:
        """Of some places of a table or a pyarrow batch, that of the row nearest to the declared design, and how many
        knobs have another value there.
        """
        batch = None if hasattr(rows, "columns") and hasattr(rows, "iloc") else rows
        names = rows if batch is None else batch.schema.names
        counts = np.zeros(len(places), int)
        for path in (path for path in self.declared if path in names):
            column = rows[path].iloc[places] if batch is None else batch.column(path).take(places).to_pylist()
            counts += [str(value) != self.declared[path] for value in column]
        least = int(np.argmin(counts))
        return int(places[least]), int(counts[least])

    def _group_names(self, rows: pd.DataFrame, apart: bool) -> list[str]:
        return ["scenario", *(path for path in self._apart if apart and path in rows)]

    def _groups(self, rows: pd.DataFrame, apart: bool) -> list[NDArray[np.intp]]:
        """Places of the rows of each scenario, or of each answer that is told apart."""
        groups = rows.groupby(self._group_names(rows, apart), sort=False, dropna=False, observed=True)
        return [np.asarray(places) for places in groups.indices.values()]

    def leaders(self, part: pd.DataFrame, goals: Mapping[str, str]) -> pd.DataFrame:
        """Rows of a part of a table among which winners of the whole table may be."""
        # the worst of a choice may lie in another part
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
        return rows.loc[np.sort(worst.idxmax().to_numpy())]  # in the order of the table


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
        # an empty dictionary: all values are missing
        known = np.array([str(value) in texts for value in column.dictionary.to_pylist()] or [False])
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False)  # missing values are masked below
        return np.asarray(known[places] & column.is_valid().to_numpy(zero_copy_only=False))
    return np.array([str(value) in texts for value in column.to_pylist()], bool)


class Standings:
    """Front and best row of every scenario, by its place among them, while the rows of a table come by.

    metrics: all that a row is an outcome by. num_outcomes: how many distinct ones there are, in all scenarios together.
    rows: which of them count; all where it is None.
    """

    def __init__(
        self,
        goals: Mapping[str, str],
        num_scenarios: int,
        metrics: Sequence[str] = (),
        *,
        rows: Contest | None = None,
    ) -> None:
        self._goals, self._metrics, self._counting = goals, tuple(metrics) or tuple(goals), rows
        self._met, self._marked = SeenHashes(), SeenHashes()
        self.num_outcomes = 0
        self._fronts = [Front() for _ in range(num_scenarios)]
        self._best: list[tuple[bool, tuple[float, ...], int] | None] = [None] * num_scenarios

    def take(self, batch: Any) -> list[tuple[int, int]]:
        """Take in a batch of the table; (scenario, row) of every row that is better than all before it."""
        improved = []
        self.num_outcomes += int(self._met.add(self._outcomes(batch, self._with_result(batch))).sum())
        for scenario, _, values in self._rows_by_scenario(batch):
            self._fronts[scenario].add(values)
        may_win = np.ones(batch.num_rows, bool) if self._counting is None else self._counting.may_win(batch)
        for scenario, rows, values in self._rows_by_scenario(batch, bounds=True):
            # no row may win: the best of all is shown
            first = np.flatnonzero(may_win[rows]) if may_win[rows].any() else np.arange(len(rows))
            equal = best_places(values, first)
            row, departures = (self._counting or Contest()).nearest(batch, rows[equal])
            # rows that may win come before others, however good
            rank, best = (not bool(may_win[row]), tuple(values[equal[0]].tolist()), departures), self._best[scenario]
            if best is None or rank < best:
                self._best[scenario] = rank
                improved.append((scenario, row))
        return improved

    def marks(self, batch: Any) -> NDArray[np.bool_]:
        """Marks of the rows of a batch on the front of their scenario; of rows with one outcome only the first is."""
        marked = np.zeros(batch.num_rows, bool)
        for scenario, rows, values in self._rows_by_scenario(batch):
            marked[rows] = self._fronts[scenario].holds(values)
        marked[marked] = self._marked.add(self._outcomes(batch, np.flatnonzero(marked)))  # of equal outcomes the first
        return marked

    def _outcomes(self, batch: Any, rows: NDArray[np.intp]) -> Keys:
        columns = [batch.column(name).to_numpy(zero_copy_only=False)[rows] for name in self._metrics]
        return outcome_keys(columns, batch.column("scenario").indices.to_numpy()[rows])

    def _with_result(self, batch: Any) -> NDArray[np.intp]:
        return np.flatnonzero(batch.column("status").indices.to_numpy() == STATUSES.index("ok"))

    def _rows_by_scenario(self, batch: Any, *, bounds: bool = False) -> Iterator[tuple[int, NDArray[np.intp], Floats]]:
        """(scenario, its rows with a result, their objectives). bounds: with rows that are on no front."""
        scenarios = batch.column("scenario").indices.to_numpy()
        ok = batch.column("status").indices.to_numpy() == STATUSES.index("ok")
        ok = ok if bounds or self._counting is None else ok & ~self._counting.is_bound(batch)
        columns = {name: batch.column(name).to_numpy() for name in self._goals}
        for scenario in np.unique(scenarios[ok]).tolist():
            rows = np.flatnonzero(ok & (scenarios == scenario))
            yield scenario, rows, minimized({name: column[rows] for name, column in columns.items()}, self._goals)


class SeenHashes:
    """A set of content hashes, as sorted arrays: 16 bytes each, and adding many costs a fraction of a microsecond each.

    The arrays are merged when they are of like length, so there are few of them however many hashes come, but not
    beyond a length at which the copies that a merge makes would take more memory than the set. They are sorted by the
    first number of a hash: two that differ in the second alone (2^-64 for a pair) may be new twice.
    """

    def __init__(self) -> None:
        self._runs: list[Keys] = []

    def add(self, hashes: Keys) -> NDArray[np.bool_]:
        """Marks [B] of the hashes [B, 2] that are new, the first of equal ones only; they are known from now on."""
        order = np.argsort(hashes[:, 0], kind="stable")
        ordered = hashes[order]
        fresh = ~self.has(ordered)
        fresh[1:] &= (ordered[1:] != ordered[:-1]).any(axis=1)  # among equal new ones the first counts
        self._runs.append(ordered[fresh])
        # as in a merge sort: each hash is copied a logarithmic number of times
        while len(self._runs) > 1 and len(self._runs[-2]) <= min(_LONGEST, 2 * len(self._runs[-1])):
            both = np.concatenate([self._runs.pop(-2), self._runs.pop()])
            self._runs.append(both[np.argsort(both[:, 0], kind="stable")])
        marked = np.zeros(len(hashes), bool)
        marked[order[fresh]] = True
        return marked

    def has(self, hashes: Keys) -> NDArray[np.bool_]:
        """Marks [B] of the hashes [B, 2] that are known."""
        is_known = np.zeros(len(hashes), bool)
        for run in self._runs:
            if len(run):
                # beyond the end: the last one, which then differs
                place = np.minimum(np.searchsorted(run[:, 0], hashes[:, 0]), len(run) - 1)
                is_known |= (run[place] == hashes).all(axis=1)
        return is_known
