"""Dispatch and combine of expert parallelism against measurements: `python -m benchmarks.expert_exchanges --data DIR`.

DIR: tables as `validation.expert_rows` reads them, or a folder of measured tables with such below it.
It prints, for each table, device, number of nodes and direction, how far the times of rows that nothing was fitted on
are off, and the median over SMs; on stderr, the rows that are left out and why. --fit: constants fitted anew, as
`conf/node` has them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from validation.expert_rows import (
    NODES,
    KernelRow,
    constants_of,
    count_unread,
    error_of,
    fit_all,
    is_fitted,
    node_of,
    read_rows,
    table_of,
)
from validation.left_out import FITTED, given_folder, report_left_out

Judged = list[tuple[Path, KernelRow]]


def medians_of(judged: Judged) -> dict[str, dict[str, float]]:
    """Count, median, p90 and signed median of each table, device, number of nodes and direction."""
    errors = [(_group(path, row), _error(row)) for path, row in judged]
    return {name: _statistics(values) for name, values in _gathered(errors).items()}


def across_many_nodes(folder: Path) -> float | None:
    """Median size of the errors [%] of rows on more than two nodes that nothing was fitted on; None without any."""
    rows = [row for path in tables_below(folder) for row in read_rows(path) if np.max(row.routed.nodes) > 2]
    errors = [abs(_error(row)) for row in rows if row.table == "deepep" and not _reason_against(row)]
    return 100 * float(np.median(errors)) if errors else None


def errors_of_rows(judged: Judged) -> list[float]:
    """Errors of all measured rows, without published ones."""
    return [_error(row) for _, row in judged if row.table != "published"]


def over_sms(judged: Judged) -> dict[str, dict[str, float]]:
    """Median error by the number of SMs, of tables that vary it: `<table> <device> <direction>` -> SMs -> median."""
    errors = [(f"{_group(path, row)}|{row.num_sms:g}", _error(row)) for path, row in judged]
    table: dict[str, dict[str, float]] = {}
    for name, values in _gathered(errors).items():
        group, _, sms = name.partition("|")
        if group.startswith("deepep"):
            table.setdefault(group, {})[sms] = float(np.median(np.abs(values)))
    return table


def tables_below(folder: Path) -> list[Path]:
    """Tables of exchanges in a folder and below it."""
    return [path for path in sorted(folder.rglob("*.csv")) if table_of(path) is not None]


def judged_rows(folder: Path) -> Judged:
    """Rows that nothing was fitted on and that have constants; the others are counted on stderr.

    Raises FileNotFoundError where the folder has no tables.
    """
    paths = tables_below(folder)
    if not paths:
        raise FileNotFoundError(f"{folder} holds no tables of exchanges")
    return [row for path in paths for row in _judged_of(path)]


def _judged_of(path: Path) -> Judged:
    """The same of one table."""
    judged, reasons = Judged(), Counter({_UNREAD: count_unread(path)})
    for row in read_rows(path):
        if reason := _reason_against(row):
            reasons[reason] += 1
        else:
            judged.append((path, row))
    for reason, count in reasons.items():
        if count:
            report_left_out(path.name, reason, rows=count)
    return judged


def errors_of(path: Path) -> list[float]:
    """Errors of the rows of one table that nothing was fitted on and that have constants."""
    return [_error(row) for _, row in _judged_of(path)]


_UNREAD = "low-latency modes and kernels without a model, or repetitions of other rows"


def _reason_against(row: KernelRow) -> str:
    """Why a row is not judged; empty if it is."""
    if is_fitted(row):
        return FITTED
    if row.device not in NODES:
        return f"no machine of conf/node for {row.device}"
    return "" if constants_of(row, node_of(row.device)) else f"no constants for {row.group} on {row.device}"


def _group(path: Path, row: KernelRow) -> str:
    count: Any = row.routed.nodes
    nodes = "" if row.kind == "node" else f" {count} nodes" if row.table != "published" else " across nodes"
    return f"{path.stem} {row.device}{nodes} {row.direction}"


def _error(row: KernelRow) -> float:
    node = node_of(row.device)
    kernel = constants_of(row, node)
    assert kernel is not None
    return error_of(kernel, row, node)


def _gathered(errors: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for name, value in errors:
        groups.setdefault(name, []).append(value)
    return groups


def _statistics(values: list[float]) -> dict[str, float]:
    size = np.abs(values)
    return {
        "count": float(len(values)),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "signed_median": float(np.median(values)),
    }


def fitted_constants(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Device -> constants fitted to the rows for fitting, and their names, by kernel and direction."""
    rows = [row for path in tables_below(folder) for row in read_rows(path)]
    devices = dict.fromkeys(row.device for row in rows if row.table != "published" and row.device in NODES)
    return {device: fit_all([row for row in rows if row.device == device], node_of(device)) for device in devices}


def main(words: Sequence[str] | None = None) -> int:
    """Judge, or fit, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=given_folder, required=True, help="folder of the tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and print them")
    arguments = parser.parse_args(words)
    if not tables_below(arguments.data):
        print(f"{arguments.data} holds no tables of exchanges: see --help", file=sys.stderr)
        return 2
    if arguments.fit:
        print("\n".join(_fit_lines(arguments.data)))
        return 0
    judged = judged_rows(arguments.data)
    figures, trend = medians_of(judged), over_sms(judged)
    if arguments.json:
        print(json.dumps({"rows": figures, "median_over_sms": trend}, indent=2))
        return 0
    print("| rows not fitted on | count | median | p90 | signed median |\n|---|--:|--:|--:|--:|")
    for name, line in figures.items():
        cells = f"{line['count']:.0f} | {line['median']:.1%} | {line['p90']:.1%} | {line['signed_median']:+.1%}"
        print(f"| {name} | {cells} |")
    for name, medians in trend.items():
        print(f"{name}, median by SMs: " + ", ".join(f"{sms}: {value:.1%}" for sms, value in medians.items()))
    return 0


def _fit_lines(folder: Path) -> Iterable[str]:
    for device, fits in fitted_constants(folder).items():
        yield f"# {device}: {NODES[device]}"
        for group, (kernel, names) in fits.items():
            values = ", ".join(f"{name}: {value:.5g}" for name, value in kernel.model_dump().items())
            yield f"{group}: {{{values}}}"
            yield f"  fitted on: {json.dumps(list(names))}"


if __name__ == "__main__":
    sys.exit(main())
