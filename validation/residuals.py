"""Intervals of predictions from measured tables, and how often they hold: `python -m validation.residuals DIR`.

Every row is judged by the intervals that the other four fifths of the rows gave, in the same way as those that are
shipped; which fifth a row is in, its shape decides (`dse_calibration.residual_groups`). A GPU that is left out
is judged by the intervals of all other GPUs, and so is every name of a trait that has a component (a software, a model,
a release, a number of GPUs), all of its rows at once. --write: groups and components of all rows to
`conf/data/residuals`. --figures: reliability and sharpness to `docs/images`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from dse.errors import ConfigError
from dse.files import atomic_replacement
from dse_calibration.residual_between import SpreadPrior
from dse_calibration.residual_groups import (
    FOLDS,
    LEAST,
    POOLED,
    TRAITS,
    ResidualRow,
    common_shares,
    components,
    fit_groups,
    prior_of,
    unseen_groups,
)
from simulators.hardware.residuals import (
    BETWEEN_COLUMNS,
    BETWEEN_FILE,
    COLUMNS,
    LEVEL,
    Between,
    ResidualGroup,
    Residuals,
    residuals_folder,
)
from validation.residual_rows import residual_rows

FEWEST_JUDGED = 30
"""Rows from which the coverage of a group is told."""
_HEAD = (
    "# Intervals of predictions: 5, 50 and 95 % of log(measured / predicted) of rows that nothing was fitted on.\n"
    "# Written by `python -m validation.residuals DIR --write`; provenance: derived from the tables named in `source`\n"
    "# (each of which states its licence). Groups and quantiles: dse_calibration/residual_groups.py.\n"
)
_BETWEEN_HEAD = (
    "# Components of errors: how far rows of a name that no row has are from the centre of others, as logarithms.\n"
    "# Written by `python -m validation.residuals DIR --write`; provenance: derived from the tables named in `source`\n"
    "# (each of which states its licence). Names: those that rows have. Method: dse_calibration/residual_between.py.\n"
)


@dataclass(frozen=True)
class JudgedRow:
    """A row and the group whose interval it is judged by. trait: in which no row of that group is like it."""

    row: ResidualRow
    group: ResidualGroup
    trait: str = ""

    @property
    def name(self) -> str:
        """Its GPU, or its name of the trait."""
        return self.row.traits[self.trait] if self.trait else self.row.gpu

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
    own = [row for row in rows if not row.carried]
    for fold in range(FOLDS):
        others = Residuals(tuple(groups_of(row for row in own if row.fold != fold)))
        yield from (_judged(others, row) for row in own if row.fold == fold)


def judged_left_out(rows: Sequence[ResidualRow]) -> Iterator[JudgedRow]:
    """Yield rows with the groups that others gave without any row of the same name of a trait, each name in turn.

    Traits are the GPU, and those of `dse_calibration.residual_groups.TRAITS`. Where rows are predicted as those of a
    name without rows are, these are judged.
    """
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        prior = prior_of([row for row in rows if row.kind != kind])
        for trait in dict.fromkeys(("gpu", *(trait.name for trait in TRAITS.get(kind, ())))):
            yield from _left_out_in_turn(of_kind, trait, prior)


def _left_out_in_turn(rows: Sequence[ResidualRow], trait: str, prior: SpreadPrior) -> Iterator[JudgedRow]:
    traited = [row for row in rows if trait in row.traits]
    carried = any(row.carried == trait for row in traited)  # then those alone are predicted as a new name is
    for name in dict.fromkeys(row.traits[trait] for row in traited):
        left = [row for row in traited if row.traits[trait] == name and row.carried == (trait if carried else "")]
        others = [row for row in rows if name not in (row.traits.get(trait), row.giver)]
        if not left or not any(not row.carried for row in others):
            continue
        # of a GPU that is left out, no group but that of unmeasured ones can count
        unseen = trait == "gpu" and rows[0].kind not in POOLED
        groups = unseen_groups(others, prior=prior) if unseen else groups_of(others, prior)
        known = Residuals(tuple(groups), between=tuple(components(others, prior)))
        yield from (replace(_judged(known, row), trait=trait) for row in left)


def groups_of(rows: Iterable[ResidualRow], prior: SpreadPrior | None = None) -> list[ResidualGroup]:
    """Groups of rows, with the shares that operators have in common. prior: None: that of these rows."""
    every = list(rows)
    shares = common_shares([row for row in every if not row.carried])
    return fit_groups(every, common=shares, prior=prior_of(every) if prior is None else prior)


def _judged(residuals: Residuals, row: ResidualRow) -> JudgedRow:
    return JudgedRow(row, residuals.of(row.kind, row.gpu, row.key, row.sizes, row.traits))


@dataclass(frozen=True)
class Coverage:
    """How intervals did on the rows of a group. width, error: medians of half-width and of |residual|.

    gpu: the GPU, or the name that was left out of `trait`; "" for all names of it together.
    """

    kind: str
    gpu: str
    rows: int
    share: float
    width: float
    error: float
    trait: str = ""

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


def coverage_left_out(judged: Iterable[JudgedRow]) -> list[Coverage]:
    """Coverage of each kind and trait, then of each name that was left out of at least 30 rows.

    Of a trait, all names of at least `LEAST` rows count alike, of however many rows they are.
    """
    names: dict[tuple[str, str], dict[str, list[JudgedRow]]] = {}
    for one in judged:
        names.setdefault((one.row.kind, one.trait), {}).setdefault(one.name, []).append(one)
    found = list[Coverage]()
    for (kind, trait), by_name in sorted(names.items()):
        parts = [_coverage(kind, name, members) for name, members in by_name.items() if len(members) >= LEAST]
        if not parts:
            continue
        share = float(np.mean([part.share for part in parts]))
        width, error = (float(np.median([getattr(part, name) for part in parts])) for name in ("width", "error"))
        together = Coverage(kind, "", sum(part.rows for part in parts), share, width, error)
        large = sorted((part for part in parts if part.rows >= FEWEST_JUDGED), key=lambda part: part.gpu)
        found += [replace(part, trait=trait) for part in (together, *large)]
    return found


@dataclass(frozen=True)
class KindCoverage:
    """Coverage of the rows of a kind that were left out with their whole name, over all traits and names together.

    names: how many; names_held: the share of them of which half of the rows or more are inside. width, error: as of
    `Coverage`. least_ratio: of one half-width for all rows that would hold 90 % of them, as if errors were known.
    """

    kind: str
    rows: int
    share: float
    names: int
    names_held: float
    width: float
    error: float
    least_ratio: float

    @property
    def ratio(self) -> float:
        """Median half-width over the median error."""
        return self.width / self.error


def coverage_by_kind(judged: Iterable[JudgedRow]) -> list[KindCoverage]:
    """Coverage of each kind by rows that were left out; a row counts once for each of its traits.

    Rows of one name share an error, so that a name is held as a whole or missed as a whole, and the worst of many names
    falls as names are added, however right intervals are. All of a kind together hold 90 % if intervals do.
    """
    kinds: dict[str, dict[tuple[str, str], list[JudgedRow]]] = {}
    for one in judged:
        kinds.setdefault(one.row.kind, {}).setdefault((one.trait, one.name), []).append(one)
    coverages = list[KindCoverage]()
    for kind, by_name in kinds.items():
        rows = [one for members in by_name.values() for one in members]
        halves = [np.mean([one.holds for one in members]) >= 0.5 for members in by_name.values()]
        errors = np.array([abs(one.row.residual) for one in rows])
        width, error = float(np.median([one.half_width for one in rows])), float(np.median(errors))
        share, least = float(np.mean([one.holds for one in rows])), float(np.quantile(errors, LEVEL)) / error
        coverages.append(KindCoverage(kind, len(rows), share, len(halves), float(np.mean(halves)), width, error, least))
    return coverages


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


def write_components(parts: Iterable[Between], file: Path) -> None:
    """Write a table of components, with four digits."""
    with atomic_replacement(file) as fresh, fresh.open("w", encoding="utf-8", newline="") as text:
        text.write(_BETWEEN_HEAD)
        writer = csv.DictWriter(text, BETWEEN_COLUMNS, lineterminator="\n")
        writer.writeheader()
        for part in parts:
            ends = {name: f"{getattr(part, name):.4f}" for name in ("low", "high")}
            names = "; ".join(sorted(part.names))
            told = {"kind": part.kind, "key": part.key, "trait": part.trait, "names": names, "source": part.source}
            writer.writerow({**told, **ends})


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
        write_components(components(rows), residuals_folder() / BETWEEN_FILE)
    judged = list(judged_in_turn(rows))
    print("kind         GPU, or left out                    rows   held  half-width  error  ratio")
    left_out = list(judged_left_out(rows))
    for one in (*coverage(judged), *coverage_left_out(left_out)):
        name = f"{one.trait}: {one.gpu or 'each in turn'}" if one.trait else one.gpu
        shares = f"{100 * one.share:5.1f} %  {one.width:9.3f}  {one.error:5.3f}  {one.ratio:5.2f}"
        print(f"{one.kind:<13}{name:<34}{one.rows:>6}  {shares}")
    print("kind, names left out       names   held    rows   held  half-width  error  ratio  least")
    for kind in coverage_by_kind(left_out):
        names = f"{kind.kind:<27}{kind.names:>5} {100 * kind.names_held:5.1f} %"
        ratios = f"{kind.width:9.3f}  {kind.error:5.3f}  {kind.ratio:5.2f}  {kind.least_ratio:5.2f}"
        print(f"{names}{kind.rows:>7}  {100 * kind.share:5.1f} %  {ratios}")
    if asked.figures:
        from validation.residual_figures import write_figures

        write_figures(judged)
    return 0


if __name__ == "__main__":
    sys.exit(main())
