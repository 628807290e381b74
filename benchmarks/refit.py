"""Calibrated numbers of `conf`, each fitted again to its target: `python -m benchmarks.refit [--data DIR]`.

Every number that is labelled `calibrated` names its target (a value, or a table of rows), its tolerance and the
function of `validation.refits` that recomputes it. They are recomputed in order of dependence and printed with what
stands in `conf`, what a fit gives, and how far apart both are; copies of another option's numbers are compared with
these. `calibrated_off` counts those beyond their tolerance. Tables that are not shipped are read below DIR; what is
fitted to an absent table is counted apart.

--check ends with 1 where a number is off. --write puts numbers that are off into the files of `conf`, before those that
depend on them are fitted, and copies after all. --only fits what some functions recompute.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from validation.calibrated_numbers import (
    Number,
    calibrated_numbers,
    copies,
    file_of,
    table_path,
    value_of,
    write_number,
)
from validation.refits import REFITTERS

_COPY = 1e-9  # of a copy, which is exact but for the last bit of a unit


@dataclass(frozen=True)
class Group:
    """Numbers that are fitted together: by one function, to one target."""

    by: str
    target: float | str
    numbers: tuple[Number, ...]

    @property
    def name(self) -> str:
        """Function and target."""
        return f"{self.by}, {self.target}"


@dataclass(frozen=True)
class Row:
    """A number with what a fit gives today. achieved: the target's quantity as it is; None where the target is rows."""

    constant: str
    old: float
    new: float
    target: float | str
    achieved: float | None
    tolerance: float

    @property
    def deviation(self) -> float:
        """How far the quantity is off the target, or the number off the fit to rows, as a share."""
        if self.achieved is not None:
            return abs(self.achieved / float(self.target) - 1)
        return abs(self.old / self.new - 1) if self.new else abs(self.old - self.new)

    @property
    def off(self) -> bool:
        """Whether it is beyond its tolerance."""
        return self.deviation > self.tolerance


@dataclass
class Report:
    """Rows of numbers that were recomputed, and names of groups whose table is absent."""

    rows: list[Row] = field(default_factory=list)
    absent: dict[str, int] = field(default_factory=dict)


def groups() -> list[Group]:
    """Numbers of `conf` that are fitted together, in order of dependence. Raises KeyError for an unknown function."""
    members: dict[tuple[str, float | str], list[Number]] = {}
    for number in calibrated_numbers():
        members.setdefault((number.calibration.recomputed_by, number.calibration.target), []).append(number)
    order = {name: place for place, name in enumerate(REFITTERS)}
    keys = sorted(members, key=lambda key: (order[key[0]], str(key[1])))
    return [Group(*key, tuple(members[key])) for key in keys]


def recompute(group: Group, data: Path | None) -> list[Row] | None:
    """Fit the numbers of a group again; None where the table of its rows is absent."""
    table = table_path(group.target, data) if isinstance(group.target, str) else None
    if isinstance(group.target, str) and table is None:
        return None
    refit = REFITTERS[group.by](group.numbers, table)
    return [
        Row(str(each), each.value, refit.values[each], group.target, refit.achieved, each.calibration.tolerance)
        for each in group.numbers
    ]


def compare_copies() -> Iterator[Row]:
    """Yield every copy of another option's number beside it; NaN where that has none."""
    for each in copies():
        original = value_of(each.other, each.original)
        yield Row(
            str(each),
            each.value,
            float("nan") if original is None else original,
            f"{each.other}: {each.original}",
            None,
            _COPY,
        )


def recompute_all(data: Path | None, *, only: Collection[str] = REFITTERS, write: bool = False) -> Report:
    """Fit all groups again, in order; write: numbers that are off are put into `conf` at once, copies after all."""
    report = Report()
    for place, name in ((group.by, group.name) for group in groups()):
        if place not in only:
            continue
        group = next(group for group in groups() if group.name == name)  # as written meanwhile
        rows = recompute(group, data)
        if rows is None:
            report.absent[name] = len(group.numbers)
            continue
        report.rows += rows
        for number, row in zip(group.numbers, rows, strict=True):
            if write and row.off:
                write_number(file_of(number.option), number.path, row.new)
    compared = list(compare_copies())
    for copy, row in zip(copies(), compared, strict=True):
        if write and row.off:
            write_number(file_of(copy.option), copy.path, row.new)
    report.rows += compared
    return report


def calibrated_off(data: Path | None) -> list[str]:
    """Calibrated numbers, and copies of them, that are beyond their tolerance, each with both values."""
    return [_line(row) for row in recompute_all(data).rows if row.off]


def _line(row: Row) -> str:
    achieved = "" if row.achieved is None else f", achieves {row.achieved:.5g}"
    place = f"target {row.target}{achieved}, {row.deviation:.3%} off, tolerance {row.tolerance:g}"
    return f"{row.constant}: {row.old:.5g}, by a fit today {row.new:.5g}; {place}"


def figures(report: Report) -> dict[str, Any]:
    """Counts, and all rows."""
    rows = [{**asdict(row), "deviation": row.deviation, "off": row.off} for row in report.rows]
    return {
        "calibrated_off": sum(row.off for row in report.rows),
        "calibrated_recomputed": len(report.rows),
        "calibrated_not_recomputed": sum(report.absent.values()),
        "absent": report.absent,
        "rows": rows,
    }


def _text(report: Report) -> Iterator[str]:
    yield from (f"{'off  ' if row.off else '     '}{_line(row)}" for row in report.rows)
    for name, count in report.absent.items():
        yield f"     not recomputed, as the table is absent (--data): {count} numbers of {name}"
    counts = figures(report)
    names = ("calibrated_recomputed", "calibrated_not_recomputed", "calibrated_off")
    yield ", ".join(f"{name} {counts[name]}" for name in names)


def main(words: Sequence[str] | None = None) -> int:
    """Recompute, print, and write where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refit", description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of measured tables")
    parser.add_argument("--only", nargs="+", choices=list(REFITTERS), default=list(REFITTERS), help="functions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="end with 1 where a number is off")
    parser.add_argument("--write", action="store_true", help="put numbers that are off into conf")
    asked = parser.parse_args(words)
    report = recompute_all(asked.data, only=asked.only, write=asked.write)
    print(json.dumps(figures(report), indent=2) if asked.json else "\n".join(_text(report)))
    return int(asked.check and any(row.off for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
