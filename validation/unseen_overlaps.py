"""Overlaps predicted without what was fitted on their GPU, or software: `python -m validation.unseen_overlaps DIR`.

In turn each GPU, and each software, counts as never seen, and its rows are judged. Knobs of implementations that were
fitted on its rows are fitted again on those rows of others that the same knob was fitted on; where there are none, and
of constants of machines, `unseen` of the implementation, or of the study, counts, or ideal values. Fitted constants of
GEMMs and libraries are of other tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dse.files import csv_columns, read_csv
from dse_calibration.overlap_measured.gemm_collective import (
    NEEDED,
    MeasuredOverlap,
    UnpredictableError,
    fits_of,
    fitted_rows,
    holds_overlaps,
    predict_overlap,
    unseen_constants,
)
from validation.left_out import given_folder, report_left_out
from validation.refits import least, mean_errors

_START = {"collective_calls": 10.0, "lost_rows": 100.0, "overhead_s": 4e-5, "signal_s": 5e-6}
"""Where the search for a knob begins that several implementations have."""
_BY = {"GPU": "gpu", "software": "method"}


def left_out(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield share of right signs and median error of the rows of each GPU and software below a folder."""
    files = [file for file in sorted(folder.rglob("*.csv")) if holds_overlaps(csv_columns(file, "--data"))]
    rows = [cells for file in files for _, cells in read_csv(file, needed=NEEDED).rows]
    for kind, column in _BY.items():
        for name in sorted({cells[column] for cells in rows if cells[column]}):
            fits = [row for row in fitted_rows() if str(row[column]) == name]
            lost = frozenset(word for row in fits for word in str(row["fits"]).split(", "))
            wired = {row["gpu"] for row in fits if "link_efficiency" in row["fits"]}
            own = [cells for cells in rows if cells[column] == name]
            if seen := [cells for cells in own if cells["gpu"] in wired]:
                report_left_out(f"{kind} {name}", "its links were fitted, and have no ideal value", rows=len(seen))
            known = [cells for cells in rows if cells[column] != name]
            judged = list(_predicted([cells for cells in own if cells["gpu"] not in wired], known, lost))
            if judged:
                sign = float(np.mean([row.right_sign for row in judged]))
                error = float(np.median([abs(row.error) for row in judged]))
                yield {"left out": kind, "name": name, "rows": len(judged), "sign": sign, "median": error}


def _predicted(
    judged: Sequence[Mapping[str, str]], known: Sequence[Mapping[str, str]], lost: frozenset[str]
) -> Iterator[MeasuredOverlap]:
    """Yield rows that can be predicted, by constants that were fitted on none of them.

    known: rows that are not left out. lost: names of constants that were fitted on rows that are.
    """
    changes = unseen_constants() if any(word.endswith("store_bytes_per_s_per_cu") for word in lost) else {}
    knobs = {name: fitted_again(name, known) for name in sorted(lost) if not name.startswith("gpu/")}
    for cells in judged:
        try:
            yield predict_overlap(cells, changes=changes, knobs=knobs)
        except UnpredictableError:
            continue


def fitted_again(knob: str, known: Sequence[Mapping[str, str]]) -> float | None:
    """A knob by the rows that are left of those that it was fitted on; None where there are none."""
    rows = [(cells, frozenset({knob})) for cells in known if knob in fits_of(cells)]
    return least([_START[knob]], lambda values: mean_errors(rows, {knob: values[0]}))[0] if rows else None


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each GPU and software that is left out."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.unseen_overlaps", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("data", type=given_folder, help="folder with tables of measured overlaps")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    rows = list(left_out(options.data))
    if not rows:
        parser.error(f"{options.data} holds no overlaps that can be predicted")
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        named = f"{row['left out']:9} {row['name']:32.32} {row['rows']:3} rows"
        print(f"{named}  right signs {100 * row['sign']:3.0f} %  median error {100 * row['median']:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
