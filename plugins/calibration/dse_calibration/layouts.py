"""Tables in the layouts of other projects, as rows of measured operators: GEMMs, and what memory bounds.

A layout is told by its columns. A linear layer of `tokens` rows, X[tokens, in] W[out, in]^T, is the column-major GEMM
m = out, n = tokens, k = in. Rows without a time, or of a precision that is unknown here, are skipped and counted.

- tuned kernels of ROCm/aiter: device, precision, tokens, out_features, in_features, us
- profiles of ai-dynamo/aiconfigurator: device, gemm_dtype, m (tokens), n (out), k (in), latency [ms]; of loops over six
  sets of weights and one of activations (its `collector/vllm/collect_gemm.py`); layers of 8 and 4 bits are timed with
  the cast of their inputs, which are of 16 bits
- profiles of microsoft/vidur, at fp16: device, op, tokens, out_features, in_features, median_ms; those of operations
  that are no GEMM (norms, activation, residual add, rotary) with the tensors of 16 bits that they move at least, from
  hidden, heads, kv_heads, ffn, gated and tp
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dse.errors import Problems
from dse.files import CsvTable
from dse_calibration.foreign import open_table, precision_of
from dse_calibration.measurements import MeasuredRows, tell_skipped
from simulators.hardware.parts import StreamKind


@dataclass(frozen=True)
class ColumnLayout:
    """Columns of a layout: of the sizes (m, n, k), of the time and its unit [s], of the precision or its name.

    weight_sets: that its benchmark takes in turn. casts: formats whose inputs its benchmark casts before each GEMM.
    """

    sizes: tuple[str, str, str]
    time: str
    unit_s: float
    precision: str
    marks: tuple[str, ...]
    weight_sets: float = math.inf
    casts: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns by which the layout is told."""
        return (*self.sizes, self.time, *self.marks)


_PRECISIONS = ("fp8", "fp8_block", "nvfp4", "bf16", "fp16")
_FEATURES = ("out_features", "tokens", "in_features")
_CAST = ("fp8", "fp8_block", "nvfp4")
LAYOUTS = (
    ColumnLayout(_FEATURES, "us", 1e-6, "precision", ("device", "precision")),
    ColumnLayout(("n", "m", "k"), "latency", 1e-3, "gemm_dtype", ("device", "gemm_dtype"), weight_sets=6, casts=_CAST),
    ColumnLayout(_FEATURES, "median_ms", 1e-3, "fp16", ("device", "op")),
)
_MOST_SIZE = 2**40


def layout_of(columns: tuple[str, ...]) -> ColumnLayout | None:
    """The layout of a table of GEMMs with these columns; None if it is none of those known here."""
    return next((layout for layout in LAYOUTS if set(layout.columns) <= set(columns)), None)


def read_gemms(path: Path) -> list[MeasuredRows]:
    """Rows of GEMMs of a table, by device and precision. Raises ConfigError for a table that is none of `LAYOUTS`."""
    table, check = open_table(path), Problems()
    layout = layout_of(table.columns)
    if layout is None:
        known = "; ".join(", ".join(each.columns) for each in LAYOUTS)
        check.add(path.name, "has no columns of a known layout", way_out=f"known are {known}")
        check.done()
    assert layout is not None
    groups = _groups(table, layout, check, path)
    check.done(path.name)
    if not groups:
        check.add(path.name, "holds no GEMMs")
        check.done()
    return [
        replace(_rows(device, precision, cells), weight_sets=layout.weight_sets, casts=precision in layout.casts)
        for (device, precision), cells in groups.items()
    ]


def read_streams(path: Path) -> list[MeasuredRows]:
    """Rows of the operators of a table that memory bounds, by device and kind; [] for a table without any.

    Raises ConfigError.
    """
    table, check = open_table(path), Problems()
    if not {"op", "hidden", "heads", "kv_heads", "ffn", "gated", "tp", "tokens", "median_ms"} <= set(table.columns):
        return []
    groups = defaultdict[tuple[str, str], list[tuple[int, str, float, float]]](list)
    for line, cells in table.rows:
        kind = _STREAMS.get(cells["op"])
        if kind is None or not cells["median_ms"]:
            continue
        sizes = {name: _number(cells[name]) for name in ("tokens", "hidden", "heads", "kv_heads", "ffn", "tp")}
        time = _number(cells["median_ms"])
        for name, value in {**sizes, "median_ms": time}.items():
            if not (math.isfinite(value) and value > 0):
                check.add(f"{path.name}, line {line}, {name}", "must be a positive number", value=cells[name])
        if all(math.isfinite(value) and value > 0 for value in sizes.values()):
            width = _stream_width(kind, sizes, gated=cells["gated"] == "True")
            name = f"{sizes['tokens']:.0f}x{width:.0f}"
            groups[cells["device"], kind].append((line, name, 2 * sizes["tokens"] * width, time * 1e-3))
    check.done(path.name)
    return [_stream_rows(*key, cells) for key, cells in groups.items()]


_STREAMS: Mapping[str, StreamKind] = {
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "mlp_act": "activation",
    "add": "add",
    "attn_rope": "rotary",
}


def _stream_width(kind: str, sizes: Mapping[str, float], *, gated: bool) -> float:
    """Elements that are read and written for a token."""
    if kind == "rotary":  # queries and keys
        return 2 * (sizes["heads"] + sizes["kv_heads"]) / sizes["tp"] * sizes["hidden"] / sizes["heads"]
    if kind == "activation":
        return (3 if gated else 2) * sizes["ffn"] / sizes["tp"]
    return (3 if kind == "add" else 2) * sizes["hidden"]


def _stream_rows(device: str, kind: str, cells: list[tuple[int, str, float, float]]) -> MeasuredRows:
    lines, names, moved, seconds = zip(*cells, strict=True)
    shape = {"bytes": np.array(moved, float)}
    return MeasuredRows(
        device, "fp16", kind, shape, np.array(seconds, float)[:, None], names, lines, ("",) * len(names)
    )


_Cell = tuple[int, float, float, float, float]
_Cells = list[_Cell]


def _groups(table: CsvTable, layout: ColumnLayout, check: Problems, path: Path) -> Mapping[tuple[str, str], _Cells]:
    """(device, precision) -> (line, m, n, k, seconds) of each row with a shape and a time."""
    groups, without_time, unknown = defaultdict[tuple[str, str], _Cells](list), 0, Counter[str]()
    for line, cells in table.rows:
        if not all(cells[size] for size in layout.sizes):
            continue  # no GEMM
        written = cells.get(layout.precision, layout.precision)
        precision = precision_of(written)
        if precision not in _PRECISIONS:
            unknown[written] += 1
        elif not cells[layout.time]:
            without_time += 1
        else:
            row = _row(line, cells, layout, check, path.name)
            groups[cells["device"], precision].append(row)
    if without_time:
        print(f"{path.name}: {without_time} rows without a time are skipped", file=sys.stderr)
    tell_skipped(path, unknown, known=_PRECISIONS)
    return groups


def _row(line: int, cells: Mapping[str, str], layout: ColumnLayout, check: Problems, name: str) -> _Cell:
    """(line, m, n, k, seconds) of a row; what is wrong with it is noted."""
    sizes = [_number(cells[size]) for size in layout.sizes]
    for size, value in zip(layout.sizes, sizes, strict=True):
        if not (value.is_integer() and 1 <= value <= _MOST_SIZE):
            check.add(f"{name}, line {line}, {size}", "must be a whole number from 1", value=cells[size])
    time = _number(cells[layout.time])
    if not (math.isfinite(time) and time > 0):
        check.add(f"{name}, line {line}, {layout.time}", "must be a positive time", value=cells[layout.time])
    m, n, k = sizes
    return line, m, n, k, time * layout.unit_s


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rows(device: str, precision: str, cells: _Cells) -> MeasuredRows:
    lines, m, n, k, seconds = np.array(cells, float).T
    shape = {"m": m, "n": n, "k": k, "ta": np.zeros(len(m)), "tb": np.zeros(len(m))}
    names = tuple(f"{row[1]:.0f}x{row[2]:.0f}x{row[3]:.0f}" for row in cells)
    places = tuple(lines.astype(int).tolist())
    return MeasuredRows(device, precision, "gemm", shape, seconds[:, None], names, places, ("",) * len(names))
