"""Intervals of predictions against measured tables: `python -m benchmarks.intervals [--data DIR] [--json]`.

Without a folder nothing is judged, and the shipped table of residuals is counted. With one, rows that no constant was
fitted on are judged by 90 % intervals that other rows gave (`validation.residuals`).

    coverage_worst_group  share of rows inside, of the kind and GPU (30 rows or more) that is farthest from 0.9
    coverage_left_out     the least share of a kind by intervals of other GPUs, software, models, releases or numbers of
                          GPUs, each left out in turn
    coverage_by_left_out_group_worst  the least share of one that was left out, of 30 rows or more. Rows of one name
                          share an error, so that this falls as names are added, however right intervals are
    coverage_by_left_out_kind  by kind, share of the rows inside that were left out with their name, over all names
    names_held_by_left_out_kind  by kind, share of the names of which half of the rows or more were inside
    ratio_by_left_out_kind  by kind, median half-width over median error; the least that one width could have is
                          `least_ratio` of `left_out_kinds`: 2.44 for errors of a normal distribution
    width_over_error      median half-width of all intervals over the median size of all errors, both of logarithms;
                          2.44 for errors of a normal distribution
    decided_right         share of the choices "overlap or not" that were decided, and right
    decided_share         share of the choices that were decided
    overlap_coverage      share of measured speed-ups inside
    steps_coverage        share of measured training steps inside, of the table of 30 rows or more with the least
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import ConfigError
from dse_calibration.residual_groups import ResidualRow
from simulators.hardware.residuals import LEVEL, shipped_residuals
from validation.residual_rows import residual_rows
from validation.residuals import (
    FEWEST_JUDGED,
    Decisions,
    JudgedRow,
    coverage,
    coverage_by_kind,
    coverage_left_out,
    judged_in_turn,
    judged_left_out,
)


def figures(rows: Sequence[ResidualRow]) -> dict[str, Any]:
    """The figures of the module, and the share and the width of each kind and GPU. Those without rows are None."""
    judged = list(judged_in_turn(rows))
    without = list(judged_left_out(rows))
    groups, left_out, kinds = coverage(judged), coverage_left_out(without), coverage_by_kind(without)
    by_name, by_trait = ([one for one in left_out if bool(one.gpu) == named] for named in (True, False))
    decisions = Decisions.of(judged)
    overlaps = [one.holds for one in judged if one.row.kind == "overlap" and one.row.facts]
    worst = min(groups, key=lambda one: -abs(one.share - LEVEL), default=None)
    error = float(np.median([abs(one.row.residual) for one in judged])) if judged else None
    return {
        "coverage_worst_group": None if worst is None else worst.share,
        "coverage_left_out": min((one.share for one in by_trait), default=None),
        "coverage_by_left_out_group_worst": min((one.share for one in by_name), default=None),
        "coverage_by_left_out_kind": {one.kind: one.share for one in kinds},
        "names_held_by_left_out_kind": {one.kind: one.names_held for one in kinds},
        "ratio_by_left_out_kind": {one.kind: one.ratio for one in kinds},
        "width_over_error": None if not error else float(np.median([one.half_width for one in judged])) / error,
        "decided_right": decisions.right / decisions.decided if decisions.decided else None,
        "decided_share": decisions.decided / decisions.count if decisions.count else None,
        "overlap_coverage": float(np.mean(overlaps)) if overlaps else None,
        "steps_coverage": min(steps_by_table(judged).values(), default=None),
        "rows": len(rows),
        "groups": [
            {"kind": one.kind, "gpu": one.gpu, "rows": one.rows, "share": one.share, "ratio": one.ratio}
            for one in groups
        ],
        "left_out": [
            {"kind": one.kind, "trait": one.trait, "name": one.gpu, "rows": one.rows}
            | {"share": one.share, "half_width": one.width, "ratio": one.ratio}
            for one in left_out
        ],
        "left_out_kinds": [asdict(one) for one in kinds],
    }


def steps_by_table(judged: Sequence[JudgedRow]) -> dict[str, float]:
    """Share of measured training steps inside their intervals, of each table of 30 rows or more."""
    tables: dict[str, list[bool]] = {}
    for one in judged:
        if one.row.kind == "step" and one.row.key != "prefill":
            tables.setdefault(one.row.source, []).append(one.holds)
    return {name: float(np.mean(held)) for name, held in tables.items() if len(held) >= FEWEST_JUDGED}


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.intervals", description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of measured tables")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(words)
    if asked.data is None:
        groups = shipped_residuals().groups
        shipped: dict[str, Any] = {
            "shipped_groups": len(groups),
            "shipped_rows": sum(g.rows for g in groups if not g.key),
        }
        print(json.dumps(shipped, indent=2) if asked.json else f"{shipped}: name a folder of tables to judge them")
        return 0
    try:
        found = figures(residual_rows(asked.data))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps(found, indent=2))
        return 0
    for group in found.pop("groups"):
        share = f"{100 * group['share']:5.1f} %  {group['ratio']:5.2f}"
        print(f"{group['kind']:<13}{group['gpu']:<10}{group['rows']:>6} rows {share}")
    for group in found.pop("left_out"):
        name = f"without {group['trait']} {group['name'] or '(each in turn)'}"
        share = f"{100 * group['share']:5.1f} %  {group['ratio']:5.2f}"
        print(f"{group['kind']:<13}{name:<44}{group['rows']:>6} rows {share}")
    del found["left_out_kinds"]
    for name, value in found.items():
        print(f"{name:<33}{_text(value)}")
    return 0


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{kind} {share:.3g}" for kind, share in value.items()) or "no rows"
    return "no rows" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
