"""Contention of a GPU from its own tables of a GEMM beside other work, as `dse judge` writes them.

Four coefficients are read off, each the median of a ratio of two times over the rows that it is the law of:

    dma_beside_gemm       a GEMM beside copy engines, over the GEMM alone
    cu_copy_beside_gemm   a copy by 4 SMs or more beside a GEMM, over the copy alone; fewer fill no link
    late_start            how much later a copy ends that was launched after a GEMM, over the GEMM's time (`starts`)
    late_start_first      the same of a copy that was launched before the GEMM, less what cu_copy_beside_gemm explains

`gemm_beside_cus` stays: what a GEMM loses to SMs that are merely held exceeds what its waves explain by more than what
it loses to the data that moves (docs/how-to/gpu.md), so that these rows do not determine it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dse.errors import ConfigError, Problem, Problems
from dse.errors.parsing import whole_number
from dse.files import read_csv
from simulators.hardware.machine import merged

_BESIDE = ("other", "sms", "gemm_alone_s", "gemm_beside_s", "other_alone_s", "other_beside_s")
_STARTS = ("order", "gemm_alone_s", "other_alone_s", "other_end_s")
_LEAST_SMS = 4
_FEWEST = 10  # rows of a law
_Cells = Mapping[str, str]


def holds_slowdowns(columns: Sequence[str]) -> bool:
    """Return whether a table with these columns holds GEMMs beside other work."""
    return set(_BESIDE) <= set(columns)


def fit_slowdowns(file: Path) -> dict[str, float]:
    """Coefficients of `gpu.contention` by name, with four digits, from a table and `starts.csv` next to it.

    A law of which there are fewer than ten rows is left out. Raises ConfigError for a table that cannot be read.
    """
    rows = _read(file, _BESIDE)
    starts = file.with_name("starts.csv")
    late = _read(starts, _STARTS) if starts.is_file() else []
    copies = [_slowdown(cells, "other") for cells in rows if _copies(cells)]
    slower = max(1.0, float(np.median(copies))) if copies else 1.0
    ratios = {
        "late_start": [_late(cells) for cells in late if cells["order"] == "gemm first"],
        "late_start_first": [_late(cells, slower) for cells in late if cells["order"] == "copy first"],
        "cu_copy_beside_gemm": copies,
        "dma_beside_gemm": [_slowdown(cells, "gemm") for cells in rows if cells["other"].startswith("engine")],
    }
    least = {name: 0.0 if name.startswith("late") else 1.0 for name in ratios}  # below: a speed-up by contention
    return {
        name: float(f"{max(np.median(values), least[name]):.4g}")
        for name, values in ratios.items()
        if len(values) >= _FEWEST
    }


def with_contention(tree: Mapping[str, Any], file: Path, origin: Mapping[str, Any]) -> dict[str, Any]:
    """A machine's tree with the coefficients of a table, and their origin. Raises ConfigError."""
    fitted, gpu = fit_slowdowns(file), tree["gpu"]
    if not fitted:
        raise ConfigError([Problem(file.name, f"has fewer than {_FEWEST} rows of every law of contention")])
    if not gpu.get("contention"):
        way = "begin with the entry `contention` of another GPU of conf/gpu"
        raise ConfigError(
            [Problem("system.gpu.contention", "is missing, and the table gives only a part of it", way_out=way)]
        )
    sources = {f"contention.{name}": dict(origin) for name in fitted}
    return merged(tree, {"gpu": {"contention": fitted, "sources": sources}})


def _copies(cells: _Cells) -> bool:
    return cells["other"] == "copy_by_sms" and (whole_number(cells["sms"]) or 0) >= _LEAST_SMS


def _slowdown(cells: _Cells, of: str) -> float:
    return float(cells[f"{of}_beside_s"]) / float(cells[f"{of}_alone_s"])


def _late(cells: _Cells, slower: float = 1.0) -> float:
    return (float(cells["other_end_s"]) - slower * float(cells["other_alone_s"])) / float(cells["gemm_alone_s"])


def _read(file: Path, needed: tuple[str, ...]) -> list[_Cells]:
    """Rows of a table whose times are positive numbers. Raises ConfigError."""
    check, rows = Problems(), [(line, cells) for line, cells in read_csv(file, needed=needed).rows]
    for line, cells in rows:
        for name in needed:
            if name.endswith("_s") and not _is_positive(cells[name]):
                check.add(f"{file.name}, line {line}, {name}", "must be a positive number", value=cells[name])
    check.done(file.name)
    return [cells for _, cells in rows]


def _is_positive(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) > 0
    except ValueError:
        return False
