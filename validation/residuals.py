"""Intervals of predictions from measured tables, and how often they hold: `python -m validation.residuals DIR`.

Every row is judged by the intervals that the other four fifths of the rows gave, in the same way as those that are
shipped; which fifth a row is in, its shape decides (`dse_calibration.residual_groups`). A GPU that is left out
is judged by the intervals of all other GPUs. --write: groups of all rows to `conf/data/residuals/public.csv`.
--figures: reliability and sharpness to `docs/images`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dse.errors import ConfigError
from dse.files import atomic_replacement
from dse_calibration.residual_groups import FOLDS, ResidualRow, common_shares, fit_groups, unseen_groups
from simulators.hardware.residuals import COLUMNS, ResidualGroup, Residuals, residuals_folder
from validation.residual_rows import residual_rows

FEWEST_JUDGED = 30
"""Rows from which the coverage of a group is told."""
_HEAD = (
    "# Intervals of predictions: 5, 50 and 95 % of log(measured / predicted) of rows that nothing was fitted on.\n"
    "# Written by `python -m validation.residuals DIR --write`; provenance: derived from the tables named in `source`\n"
    "# (each of which states its licence). Groups and quantiles: dse_calibration/residual_groups.py.\n"
)


@dataclass(frozen=True)
class JudgedRow:
    """A row and the group whose interval it is judged by."""

    row: ResidualRow
    group: ResidualGroup

    @property
    def holds(self) -> bool:
        """Whether the measurement is inside of the interval."""
        return self.group.low <= self.row.residual <= self.group.high

    @property
    def half_width(self) -> float:
        """Half of the interval, of the logarithm."""
        return (self.group.high - self.group.low) / 2


def judged_in_turn(rows: Sequence[ResidualRow]) -> Iterator[JudgedRow]:
    """Yield every row with the group that rows of the other folds gave."""
    for fold in range(FOLDS):
        others = Residuals(tuple(groups_of(row for row in rows if row.fold != fold)))
        yield from (_judged(others, row) for row in rows if row.fold == fold)


def judged_left_out(rows: Sequence[ResidualRow]) -> Iterator[JudgedRow]:
    """Yield every row with the group that all other GPUs gave, of kinds that several GPUs have."""
    for kind, gpu in dict.fromkeys((row.kind, row.gpu) for row in rows):
        others = [row for row in rows if row.kind == kind and row.gpu != gpu]
        if others:
            known = Residuals(tuple(unseen_groups(others)))
            yield from (_judged(known, row) for row in rows if (row.kind, row.gpu) == (kind, gpu))


def groups_of(rows: Iterable[ResidualRow]) -> list[ResidualGroup]:
    """Groups of rows, with the shares that operators have in common."""
    own = list(rows)
    return fit_groups(own, common=common_shares(own))


def _judged(residuals: Residuals, row: ResidualRow) -> JudgedRow:
    return JudgedRow(row, residuals.of(row.kind, row.gpu, row.key, row.sizes))


@dataclass(frozen=True)
class Coverage:
    """How intervals did on the rows of a group. width, error: medians of half-width and of |residual|."""

    kind: str
    gpu: str
    rows: int
    share: float
    width: float
    error: float

    @property
    def ratio(self) -> float:
        """Median half-width over the median error; 2.44 for errors of a normal distribution."""
        return self.width / self.error


def coverage(judged: Iterable[JudgedRow]) -> list[Coverage]:
    """Coverage of each kind and GPU of at least 30 rows."""
    groups: dict[tuple[str, str], list[JudgedRow]] = {}
    for one in judged:
        groups.setdefault((one.row.kind, one.row.gpu), []).append(one)
    return [_coverage(*name, members) for name, members in sorted(groups.items()) if len(members) >= FEWEST_JUDGED]


def _coverage(kind: str, gpu: str, judged: Sequence[JudgedRow]) -> Coverage:
    share = float(np.mean([one.holds for one in judged]))
    width = float(np.median([one.half_width for one in judged]))
    return Coverage(kind, gpu, len(judged), share, width, float(np.median([abs(one.row.residual) for one in judged])))


def write_groups(groups: Iterable[ResidualGroup], file: Path) -> None:
    """Write a table of groups, with four digits."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replacement(file) as fresh, fresh.open("w", encoding="utf-8", newline="") as text:
        text.write(_HEAD)
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for group in groups:
            numbers = {name: f"{getattr(group, name):.4f}" for name in ("low", "median", "high", "common")}
            writer.writerow({**asdict(group), **numbers})


@dataclass(frozen=True)
class Decisions:
    """Choices "overlap or not" by the interval of a speed-up: it is decided where that does not hold 1."""

    count: int
    decided: int
    right: int

    @classmethod
    def of(cls, judged: Iterable[JudgedRow]) -> Decisions:
        """Of measured overlaps: `speedup` is predicted, `measured` a fact of the row."""
        rows = [one for one in judged if one.row.kind == "overlap" and "measured" in one.row.facts]
        spans = [(one.group.interval(one.row.sizes["speedup"]), one.row.facts["measured"]) for one in rows]
        decided = [(low > 1, measured) for (low, high), measured in spans if low > 1 or high < 1]
        return cls(len(rows), len(decided), sum(gains == (measured >= 1) for gains, measured in decided))


def main(words: Sequence[str] | None = None) -> int:
    """Print coverage and width of each kind and GPU."""
    parser = argparse.ArgumentParser(prog="python -m validation.residuals", description=str(__doc__).splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of measured tables")
    parser.add_argument("--write", action="store_true", help="write conf/data/residuals/public.csv")
    parser.add_argument("--figures", action="store_true", help="write figures to docs/images")
    asked = parser.parse_args(words)
    try:
        rows = residual_rows(asked.data)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.write:
        write_groups(groups_of(rows), residuals_folder() / "public.csv")
    judged = list(judged_in_turn(rows))
    left_out = {(one.kind, one.gpu): one.share for one in coverage(judged_left_out(rows))}
    print("kind         GPU       rows  held  left out  half-width  error  ratio")
    for one in coverage(judged):
        unseen = left_out.get((one.kind, one.gpu))
        apart = "       –" if unseen is None else f"{100 * unseen:6.1f} %"
        shares = f"{100 * one.share:5.1f} %  {apart}  {one.width:10.3f}  {one.error:5.3f}  {one.ratio:5.2f}"
        print(f"{one.kind:<13}{one.gpu:<9}{one.rows:>5}  {shares}")
    if asked.figures:
        from validation.residual_figures import write_figures

        write_figures(judged)
    return 0


if __name__ == "__main__":
    sys.exit(main())
