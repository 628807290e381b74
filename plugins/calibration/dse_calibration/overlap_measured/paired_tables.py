"""Tables of a GEMM with its collective that have a row for each implementation: serial, and overlapped ones.

Rows of one source, GPU and shape are of one operation. The one that says serial is the baseline of the others, which
are then rows as `dse_calibration.overlap_measured.gemm_collective` predicts them; `paired_tables.yaml` has the names of
operations and software.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dse.config.options import load_yaml
from dse.files import cell_number, read_csv
from dse_calibration.overlap_measured.gemm_collective import MeasuredOverlap, UnpredictableError, predict_overlap

NEEDED = ("source", "gpu", "gpus", "operation", "m", "n", "k", "dtype", "implementation", "us")
_OF_ONE = tuple(name for name in NEEDED if name not in ("implementation", "us"))
_SERIAL = re.compile("serial.*", re.IGNORECASE)


@cache
def _names() -> Mapping[str, Any]:
    names: Mapping[str, Any] = load_yaml(Path(__file__).with_suffix(".yaml"))
    return names


def holds_pairs(columns: tuple[str, ...]) -> bool:
    """Return whether a table with these columns has operations by implementation."""
    return set(NEEDED) <= set(columns)


def predict_pairs(file: Path) -> tuple[list[MeasuredOverlap], dict[str, int]]:
    """Predict the overlapped rows of a table; the others are counted by the reason why not.

    Raises ConfigError for a bad table.
    """
    predicted, skipped = [], dict[str, int]()
    for cells in _pairs([cells for _, cells in read_csv(file, needed=NEEDED).rows], skipped):
        try:
            predicted.append(predict_overlap(cells))
        except UnpredictableError as error:
            skipped[str(error)] = skipped.get(str(error), 0) + 1
    return predicted, skipped


def _pairs(rows: list[Mapping[str, str]], skipped: dict[str, int]) -> Iterator[Mapping[str, str]]:
    """Overlapped rows with the time of the serial one; those without are counted in `skipped`."""
    serial = {_operation(row): row for row in rows if _SERIAL.fullmatch(row["implementation"])}
    for row in rows:
        if _SERIAL.fullmatch(row["implementation"]):
            continue
        if (before := serial.get(_operation(row))) is None:
            skipped["no serial time"] = skipped.get("no serial time", 0) + 1
            continue
        baseline_us, overlapped_us = cell_number(before, "us"), cell_number(row, "us")
        software = _names()["implementations"].get(row["implementation"])
        yield {
            **{name: row[name] for name in ("source", "gpu", "gpus", "m", "n", "k", "dtype")},
            **(software or {"method": row["implementation"], "schedule": ""}),
            "op": _names()["operations"].get(row["operation"], row["operation"]),
            "baseline_ms": f"{baseline_us / 1e3:.9g}",
            "overlapped_ms": f"{overlapped_us / 1e3:.9g}",
            "speedup": f"{baseline_us / overlapped_us:.9g}",
        }


def _operation(row: Mapping[str, str]) -> tuple[str, ...]:
    """What a row is of, whatever implements it."""
    return tuple(row[name] for name in _OF_ONE)
