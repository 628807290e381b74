"""Residuals of predicted operators and collectives: what `machine calibrate` and public tables have in common."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dse_calibration.collectives import COLLECTIVE_ROWS
from dse_calibration.measurements import STREAM_KINDS
from dse_calibration.predictions import PredictedRows
from dse_calibration.residual_groups import OPERATION, ResidualRow

_SIZES = ("m", "n", "k", "bytes", "gpus", "nodes")


def rows_of_predicted(predicted: PredictedRows, gpu: str, source: str) -> Iterator[ResidualRow]:
    """Yield the forward times of the rows that nothing was fitted on, of the kinds that intervals are of."""
    rows = predicted.rows
    kind, key = kind_and_key(rows.kind, rows.precision, rows.library)
    if not kind:
        return
    ratio = np.log(rows.seconds[:, 0] / predicted.seconds[:, 0])
    names = [name for name in _SIZES if name in rows.shape]
    for place in np.flatnonzero(~predicted.fitted & np.isfinite(ratio)):
        sizes = {name: float(rows.shape[name][place]) for name in names}
        sizes["seconds"] = float(predicted.seconds[place, 0])
        shape = f"{rows.kind} {rows.names[place]}"
        if kind == "gemm":  # of a layer, whatever its tokens: their errors are alike
            shape = f"gemm {sizes['m']:g} {sizes['k']:g}"
        traits = {"gpu": gpu}
        if "gpus" in sizes:
            traits |= {"gpus": f"{gpu} {sizes['gpus']:g}", "way": key, OPERATION: rows.kind}
        yield ResidualRow(kind, gpu, key, shape, float(ratio[place]), sizes, source, traits=traits)


def kind_and_key(row_kind: str, precision: str, library: str = "") -> tuple[str, str]:
    """Kind and key of rows; "" where intervals are of no such kind.

    >>> kind_and_key("gemm", "bf16"), kind_and_key("norm", "fp16"), kind_and_key("all_reduce", "any", "vidur")
    (('gemm', 'bf16'), ('elementwise', 'norm'), ('collective', 'inside vidur'))
    """
    if row_kind in COLLECTIVE_ROWS:
        way = COLLECTIVE_ROWS[row_kind][1].replace("_", " ")
        return "collective", " ".join(filter(None, (way, library)))
    if row_kind in STREAM_KINDS:
        return "elementwise", row_kind
    return ("gemm", precision) if row_kind == "gemm" else ("", "")
