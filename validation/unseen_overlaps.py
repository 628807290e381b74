"""Overlaps predicted without what was fitted on their GPU, or software: `python -m validation.unseen_overlaps DIR`.

In turn each GPU, and each software, counts as never seen: constants fitted on its rows of `gemm_collective` tables take
their ideal values, everywhere, and its rows are judged. Fitted constants of GEMMs and libraries are of other tables.
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
from studies.overlap_measured.gemm_collective import (
    NEEDED,
    MeasuredOverlap,
    UnpredictableError,
    fitted_rows,
    holds_overlaps,
    predict_overlap,
)
from validation.left_out import report_left_out

_STORES = {"gpu": {"cu_copy": {"store_bytes_per_s_per_cu": None}}}
_BY = {"GPU": "gpu", "software": "method"}


def left_out(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield share of right signs and median error of the rows of each GPU and software below a folder."""
    files = [file for file in sorted(folder.rglob("*.csv")) if holds_overlaps(csv_columns(file, "--data"))]
    rows = [cells for file in files for _, cells in read_csv(file, needed=NEEDED).rows]
    for kind, column in _BY.items():
        for name in sorted({cells[column] for cells in rows if cells[column]}):
            wired = {row["gpu"] for row in fitted_rows() if row[column] == name and "link_efficiency" in row["fits"]}
            seen = [cells for cells in rows if cells[column] == name and cells["gpu"] in wired]
            if seen:
                report_left_out(f"{kind} {name}", "its links were fitted, and have no ideal value", rows=len(seen))
            own = [cells for cells in rows if cells[column] == name and cells["gpu"] not in wired]
            judged = list(_predicted(own, column, name))
            if judged:
                sign = float(np.mean([row.right_sign for row in judged]))
                error = float(np.median([abs(row.error) for row in judged]))
                yield {"left out": kind, "name": name, "rows": len(judged), "sign": sign, "median": error}


def _predicted(rows: Sequence[Mapping[str, str]], column: str, name: str) -> Iterator[MeasuredOverlap]:
    """Yield the rows that can be predicted, by constants that were fitted on none of them."""
    fits = {word for row in fitted_rows() if str(row[column]) == name for word in str(row["fits"]).split(", ")}
    changes = _STORES if any(word.endswith("store_bytes_per_s_per_cu") for word in fits) else {}
    for cells in rows:
        try:
            yield predict_overlap(cells, changes=changes, knobs=dict.fromkeys(fits))
        except UnpredictableError:
            continue


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each GPU and software that is left out."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.unseen_overlaps", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("data", type=Path, help="folder with tables of measured overlaps")
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
