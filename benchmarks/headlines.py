"""Headlines held against the tables that they head: every number of `in short: ...` must be in them.

A number of a headline is right where the table below it, or the table of results, gives it:

    a cell       as it is printed, or an end of the range of a printed column
    a count      `N of M`: M rows, scenarios or values of a column, N no more than M
    a summary    of the printed rows, or of the best row of each scenario and value of a column: the least, largest,
                 median, mean or geometric mean of a metric; as a share also of what is saved, or gained

It is counted as wrong otherwise. Names are not judged here, nor sums over several columns (`SUMS` lists these studies).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dse.results.answer import answer_tables
from dse.results.pareto import Contest
from dse.results.run_folder import Outputs
from dse.results.words import cell

if TYPE_CHECKING:
    import pandas as pd

_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?![\w]*_)")
_MOST_VALUES = 40  # of a column that tells rows apart


@dataclass(frozen=True)
class TableNumbers:
    """What the tables of a finished run hold: numbers, counts of rows, and names, whose digits are no quantities."""

    held: NDArray[np.float64]
    counts: frozenset[int]
    names: tuple[str, ...]

    @classmethod
    def of(cls, outputs: Outputs) -> TableNumbers:
        """Read the tables of a run."""
        record, table = outputs.read_json("summary"), outputs.read_table("results")
        printed = list(_cells(outputs, table))
        held = sorted({*_of_cells(printed), *_of_results(record, table)})
        return cls(np.array(held), frozenset(_counts(printed)), tuple(_names(table)))

    def missing(self, headline: str) -> list[str]:
        """Numbers of a headline that are not held."""
        for name in self.names:
            headline = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "", headline)
        wrong = []
        for part in re.split(r"(\d[\d,]* of \d[\d,]*)", headline):
            if re.fullmatch(r"\d[\d,]* of \d[\d,]*", part):
                some, every = (int(number.replace(",", "")) for number in part.split(" of "))
                wrong += [] if some <= every and every in self.counts else [part]
            else:
                wrong += [number for number in _NUMBER.findall(part) if not self._is_held(number)]
        return wrong

    def _is_held(self, number: str) -> bool:
        """Whether a number, with the digits that it is written with, is held."""
        plain = number.replace(",", "").lstrip("-")
        digits, value = len(plain.partition(".")[2]), float(plain)
        near = np.abs(np.abs(self.held) - value) <= 0.5 * 10.0**-digits * (1 + 1e-9)
        return bool(near.any()) or (not digits and int(value) in self.counts)


def numbers_without_origin(outputs: Outputs) -> list[str]:
    """Numbers of the headline of a finished run that its tables do not hold."""
    return TableNumbers.of(outputs).missing(str(outputs.read_json("summary").get("answer") or ""))


def _names(table: pd.DataFrame) -> list[str]:
    """Names with digits of scenarios and choices, as they are and as figures write them, the longest first."""
    texts = table.select_dtypes(exclude="number")
    names = {str(value) for column in texts.columns for value in texts[column].dropna().unique()[:_MOST_VALUES]}
    spelt = {variant for name in names for variant in (name, name.replace("_", " "))}
    return sorted((name for name in spelt if re.search(r"\d", name)), key=len, reverse=True)


def _cells(outputs: Outputs, table: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each printed column, and each printed sentence."""
    for part in answer_tables(outputs, table):
        if isinstance(part, str):
            yield (part,)
        else:
            yield from ((str(column.header), *map(str, column.cells)) for column in part.columns)
            yield (str(part.caption or ""),)


def _of_cells(columns: Iterable[Sequence[str]]) -> Iterator[float]:
    """Yield the numbers of printed cells."""
    for column in columns:
        for text in column:
            yield from (float(number.replace(",", "")) for number in _NUMBER.findall(text))


def _of_results(record: Mapping[str, Any], table: pd.DataFrame) -> Iterator[float]:
    """Yield summaries of the metrics of the rows that count, in the units in which they may be shown."""
    contest = Contest.of(record)
    ok = table[table["status"] == "ok"]
    objective = next(iter(record["goals"].items()))
    choices = [name for name in record["knobs"] if name in ok and ok[name].dtype.kind not in "fiu"]
    apart = ["scenario", *(path for path in contest.answer.by if path in ok)]
    groups = [contest.winners(table, record["goals"], apart=True), *_best_by_choice(ok, apart, choices, objective)]
    wanted = {*record["goals"], *record["shown"], *contest.answer.shows, record["gain"], *_SHARES}
    metrics = [name for name in record["units"] if name in wanted and name in ok and ok[name].dtype.kind in "fiu"]
    for rows, name in itertools.product(groups, metrics):
        values = rows[name].dropna().to_numpy(float)
        for value in _summaries(values[np.isfinite(values)]):
            yield from _shown(value, record["units"][name])
    for rows, names in itertools.product(groups, [SUMS[record["study"]]] if record["study"] in SUMS else ()):
        for value in _summaries(rows[list(names)].sum(axis=1).to_numpy(float)):
            yield from _shown(value, "fraction")


SUMS: Mapping[str, Sequence[str]] = {
    "bert": tuple(f"share_{kind}" for kind in ("linear", "fc", "attention")),
}
"""Study -> columns whose sum its headline quotes."""


_SHARES = ("fraction_of_ideal",)  # that headlines of overlap quote


def _best_by_choice(
    ok: pd.DataFrame, apart: Sequence[str], choices: Sequence[str], objective: tuple[str, str]
) -> Iterator[pd.DataFrame]:
    """Yield the best, and the worst, rows of the answers that are told apart for each value of each choice in words."""
    name, goal = objective
    order = ok.sort_values(name, ascending=goal == "minimize", kind="stable")
    for choice in choices:
        for keep in ("first", "last"):
            best = order.drop_duplicates(list(dict.fromkeys([*apart, choice])), keep=keep)
            yield from (rows for _, rows in best.groupby(choice, observed=True))


def _summaries(values: NDArray[np.float64]) -> Iterator[float]:
    if len(values):
        yield from (float(part) for part in (values.min(), values.max(), np.median(values), values.mean()))
        if (values > 0).all():
            yield float(np.exp(np.log(values).mean()))


def _shown(value: float, unit: str) -> Iterator[float]:
    """Yield what stands for a value: itself, with the prefix of its unit, as a percentage or as what it saves."""
    yield from _of_cells([[cell(value, unit)]])
    yield value
    if unit in ("fraction", "%"):
        share = value if unit == "fraction" else value / 100
        yield from (100 * share, 100 * (1 - share))
    elif unit == "x" and value:
        yield from (1 / value, 100 * (value - 1), 100 * (1 - 1 / value))


def _counts(printed: Iterable[Sequence[str]]) -> set[int]:
    """Numbers of rows, and of different values of a column, that something may be counted of."""
    columns = [column[1:] for column in printed]
    return {*map(len, columns), *(len(set(column)) for column in columns)}


def headlines_wrong(runs: Iterable[Path]) -> dict[str, list[str]]:
    """Folder of a run -> the numbers of its headline that its tables do not hold; those without any are left out."""
    wrong = {f"{run.parent.name}/{run.name}": numbers_without_origin(Outputs(run)) for run in runs}
    return {name: numbers for name, numbers in wrong.items() if numbers}
