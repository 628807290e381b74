"""Measured overlaps of other projects and GPUs beside predictions: tables and figures of `study=overlap_measured`.

From a folder: tables in the layouts of the modules `gemm_collective` and `prefills` beside this one, and all-reduces in
the switch by CTAs. Other tables are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dse.files import csv_columns, read_csv
from dse.plots import Axis, FigureSheet, Frame, predictions, tables
from dse_calibration.overlap_measured.gemm_collective import MeasuredOverlap, holds_overlaps, predict_overlaps
from dse_calibration.overlap_measured.prefills import (
    BASELINE,
    NO_SUMS,
    OVERLAPPED,
    Prefill,
    holds_prefills,
    read_prefills,
    settings,
)
from simulators.costs.chip import Chip
from simulators.costs.collective import Group
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of
from simulators.steps.operators.fused_sums import fused_sum_s, norm_s

if TYPE_CHECKING:
    import pandas as pd

_CTAS = re.compile(r"(multimem_ar|fused_arln)_us_ctas_([0-9]+)")
_TOKENS = ("BL", "num_tokens")  # columns that tables have one of
_ELEMENT = 2  # bytes
_KERNELS = {"multimem_ar": "all-reduce in the switch", "fused_arln": "the same, and the norm after it"}
_KINDS = "overlapped", "without all-reduces"
_NAIVE = {"ours": "speedup", "ideal: the longer of both": "ideal", "one after the other": "serial"}


def overlap_extras(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield tables and figures of the measured overlaps below a folder. Raises ConfigError for a table that is bad."""
    rows_of: dict[str, list[Any]] = {"overlaps": [], "prefills": [], "sums": []}
    for file in sorted(folder.rglob("*.csv")):  # the same order on every disk
        columns = csv_columns(file, "study.data_dir")
        if holds_overlaps(columns):
            rows_of["overlaps"] += predict_overlaps(file)[0]
        elif holds_prefills(columns):
            rows_of["prefills"] += read_prefills(file)[0]
        elif any(_CTAS.fullmatch(name) for name in columns):
            rows_of["sums"] += _sums(file)
    draw: Mapping[str, Callable[[list[Any]], Iterator[tuple[str, Any]]]]
    draw = {"overlaps": _overlaps, "prefills": _prefills, "sums": _sums_by_ctas}
    for name, rows in rows_of.items():
        if rows:
            yield from draw[name](rows)


def _overlaps(rows: list[MeasuredOverlap]) -> Iterator[tuple[str, Any]]:
    import pandas as pd

    table = pd.DataFrame([_overlap(row) for row in rows])
    yield "gemm_collective", table
    yield "gemm_collective_speedups", partial(_speedups_figure, table)


def _speedups_figure(table: pd.DataFrame) -> FigureSheet:
    """Measured and predicted speed-ups, ours beside naive predictions."""
    import pandas as pd

    drawn = pd.concat([table.assign(predictor=name, predicted=table[column]) for name, column in _NAIVE.items()])
    unseen = table[~table["fitted"].astype(bool)]
    right = ((unseen["speedup"] >= 1) == (unseen["measured"] >= 1)).mean()
    title = f"Overlap gains or loses as predicted in {100 * right:.0f} % of {len(unseen)} rows of other projects; "
    title += f"median error {100 * unseen['error'].abs().median():.0f} %"
    gain = Axis("measured", "speed-up by overlap [x]", centre=1.0)
    return predictions.ratios(drawn, gain, by="method", frame=Frame(title))


def _overlap(row: MeasuredOverlap) -> dict[str, Any]:
    """A row of the table: what was measured, ours, and naive predictions from our times of GEMM and collective."""
    (baseline, overlapped, speedup), (gemm_s, comm_s) = row.measured, row.parts
    named = {name: row.row[name] for name in ("gpu", "op", "m", "n", "k", "dtype", "method")}
    return {
        **named,
        "measured_baseline_s": np.nan if baseline is None else baseline,
        "predicted_baseline_s": row.predicted[0],
        "measured_overlapped_s": np.nan if overlapped is None else overlapped,
        "predicted_overlapped_s": row.predicted[1],
        "measured": speedup,
        "speedup": row.speedup,
        "ideal": (gemm_s + comm_s) / max(gemm_s, comm_s),  # no overlap is better than the longer of the two
        "serial": 1.0,
        "error": row.error,
        "fitted": row.fitted,
    }


def _prefills(rows: list[Prefill]) -> Iterator[tuple[str, Any]]:
    import pandas as pd

    table = pd.DataFrame([_prefill(row, kind) for row in rows for kind in row.measured])
    yield "prefills", table
    gains = [
        {"prompt_len": row.prompt_len, "run": f"{row.model}, tp {row.tp}", **gain}
        for row in rows
        for gain in _gains(row)
    ]
    yield "prefill_gains", partial(_gains_figure, pd.DataFrame(gains))


def _gains_figure(gains: pd.DataFrame) -> FigureSheet:
    """Time of a prefill saved, over its tokens."""
    points = (100 * (gains["gain"] - gains["measured"])[gains["kind"] == _KINDS[0]]).abs().median()
    title = f"What overlap saves of a prefill is predicted to {points:.1f} points in the median"
    tokens, saved = Axis("prompt_len", "tokens of the prompt"), Axis("gain", "time saved", "%", centre=0.0)
    return tables.curves(gains, tokens, y=saved, by="kind", frame=Frame(title, panel="run"))


def _prefill(row: Prefill, kind: str) -> dict[str, Any]:
    named = {"model": row.model, "prompt_len": row.prompt_len, "tp": row.tp, "kind": kind}
    times = {"measured_s": row.measured[kind], "predicted_s": row.predicted[kind]}
    return {**named, **times, "error": times["predicted_s"] / times["measured_s"] - 1, "fitted": row.fitted}


def _gains(row: Prefill) -> Iterator[dict[str, Any]]:
    """Shares of time saved, predicted and measured: by overlap, and without all-reduces (a naive bound)."""
    for kind, label in zip((OVERLAPPED, NO_SUMS), _KINDS, strict=True):
        if {BASELINE, kind} <= set(row.measured):
            ours, theirs = (1 - times[kind] / times[BASELINE] for times in (row.predicted, row.measured))
            yield {"kind": label, "gain": ours, "measured": theirs}


def _sums(file: Path) -> list[dict[str, Any]]:
    """Measured and predicted times of all-reduces in the switch, by tokens and CTAs."""
    rows = []
    for _, cells in read_csv(file).rows:
        tokens = next(int(cells[name]) for name in _TOKENS if name in cells)
        for name, text in cells.items():
            match = _CTAS.fullmatch(name)
            if match and text:  # empty cells: not measured
                kernel, ctas = match.group(1), int(match.group(2))
                seconds = _sum_s(tokens * int(cells["hidden_size"]), ctas, fused=kernel == "fused_arln")
                size = {"tokens": tokens, "ctas": ctas, "kernel": _KERNELS[kernel]}
                rows.append({**size, "predicted_s": seconds, "measured": float(text) * 1e-6})
    return rows


def _sum_s(elements: int, ctas: int, *, fused: bool) -> float:
    """Time [s] of an all-reduce in the switch of the node that prefills are predicted on."""
    device = Device.of(tree_of(settings()["system"]))
    assert device.node is not None
    gpus, payload = device.node.num_gpus, float(_ELEMENT * elements)
    group = Group(gpus, 1.0, 0.0, in_switch=device.node.in_switch)
    precision = settings()["precision"]
    fitted = device.gpu.streaming(precision).get("norm")
    chip = Chip.of(device, precision)
    # each GPU norms its share of the tokens, read and written
    normed = norm_s(chip, 2 * payload / gpus, fitted=fitted, ctas=ctas) if fused else 0.0
    return float(fused_sum_s(group, payload, normed_s=normed, ctas=ctas))


def _sums_by_ctas(rows: list[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    import pandas as pd

    table = pd.DataFrame(rows)
    yield "sums_by_ctas", table
    yield "sums_in_the_switch", partial(_sums_figure, table)


def _sums_figure(table: pd.DataFrame) -> FigureSheet:
    """Time of all-reduces in the switch over CTAs, of every third number of tokens."""
    few = table[table["tokens"].isin(sorted(table["tokens"].unique())[::3])]  # more curves would hide one another
    few = few.assign(tokens=few["tokens"].map("{:.0f} tokens".format))
    error = (table["predicted_s"] / table["measured"] - 1).abs().median()
    title = f"All-reduces in the switch are predicted to {100 * error:.0f} % in the median of {len(table)} times"
    ctas, time = Axis("ctas", "CTAs"), Axis("predicted_s", "time", "s")
    return tables.curves(few, ctas, y=time, by="tokens", frame=Frame(title, panel="kernel"))
