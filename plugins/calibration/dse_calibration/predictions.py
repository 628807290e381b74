"""Predictions of measured rows by operator costs and by simpler models, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse import plugins
from dse_calibration.collectives import COLLECTIVE_ROWS, fitted_names
from dse_calibration.measurements import STREAM_KINDS, MeasuredRows
from dse_calibration.rows import cost_of
from simulators.hardware.device import Device

Floats = NDArray[np.float64]

MODELS = ("fitted", "roofline", "nearest")
"""Models of times. fitted: the operator costs with the device's constants. roofline: peak rate and HBM bandwidth of its
data sheet. nearest: the measured row of the nearest shape, scaled by FLOP (by bytes where those bound it)."""
_FAR = 1.5  # a prediction is far off beyond this factor


def peers() -> tuple[str, ...]:
    """Engines of plug-ins that time collectives (`ForeignEngine`): models of those inside a node with a switch."""
    # by what they offer: no class of a plug-in is imported here
    return tuple(name for name, engine in plugins.available("engine").items() if hasattr(engine, "collective_s"))


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors |predicted / measured - 1| of N measured times, and correlations.

    median, p90: of the errors; signed: median of predicted / measured - 1. far: share of times off by more than
    a factor 1.5. log_correlation: Pearson's, of the logarithms; rank_correlation: Spearman's; both 0 if all times are
    equal.
    """

    count: int
    median: float
    p90: float
    far: float
    log_correlation: float
    rank_correlation: float
    signed: float

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> Errors | None:
        """Compute the errors of two arrays of one shape where both are finite; None if they are so nowhere."""
        both = np.isfinite(predicted) & np.isfinite(measured)  # passes that were not measured
        ours, theirs = predicted[both], measured[both]
        if not len(ours):
            return None
        error, log = np.abs(ours / theirs - 1), np.abs(np.log(ours / theirs))  # ratios: half and twice are as far off
        from scipy.stats import rankdata

        return cls(
            count=len(ours),
            median=float(np.median(error)),
            p90=float(np.quantile(error, 0.9)),
            far=float(np.mean(log > np.log(_FAR))),
            log_correlation=_correlation(np.log(ours), np.log(theirs)),
            rank_correlation=_correlation(rankdata(ours), rankdata(theirs)),
            signed=float(np.median(ours / theirs - 1)),
        )


def _correlation(first: Floats, second: Floats) -> float:
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:  # a constant has no correlation
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


@dataclass(frozen=True)
class PredictedRows:
    """Rows with their predicted work [FLOP], traffic [bytes] and times [R, passes].

    fitted [R]: True for rows that the device's constants were fitted on; all rows of one shape are alike in this.
    """

    rows: MeasuredRows
    flop: Floats
    bytes: Floats
    seconds: Floats
    fitted: NDArray[np.bool_]

    @property
    def num_fitted(self) -> int:
        """Number of shapes that were fitted on."""
        return len({name for name, fitted in zip(self.rows.names, self.fitted, strict=True) if fitted})

    @property
    def errors(self) -> Errors | None:
        """Errors on the rows that were not fitted on."""
        return self.errors_from(0.0)

    def errors_from(self, least_bytes: float) -> Errors | None:
        """The same, of collectives of at least so many bytes."""
        unseen = ~self.fitted
        if self.rows.kind in COLLECTIVE_ROWS:
            unseen &= self.rows.shape["bytes"] >= least_bytes
        return Errors.of(self.seconds[unseen], self.rows.seconds[unseen])


def predicted_by(
    model: str, device: Device, rows: MeasuredRows, port_bytes_per_s: float | None = None
) -> PredictedRows | None:
    """Predict rows by one of `MODELS` or `peers()`; None if the device has no constants for them.

    port_bytes_per_s: rate of a GPU at the switch of its node, each way, which simulators of others are set up by.
    Raises RuntimeError where a simulator of others fails; `refusal` says beforehand what it cannot predict.
    """
    cost = cost_of(device, rows)
    if cost is None:
        return None
    seconds = cost.seconds
    if model == "roofline":
        seconds = roofline(device, rows, cost.flop, traffic=cost.bytes)
    elif model == "nearest":
        # scaled by what bounds the kind
        seconds = nearest(rows, cost.bytes if rows.kind in (*STREAM_KINDS, *COLLECTIVE_ROWS) else cost.flop)
    elif model not in MODELS:
        assert port_bytes_per_s is not None
        # names of devices in other tools' tables
        shape, label = rows.shape, str(device.gpu.measured_as or "").lower().partition("_")[0]
        times = _peer(model).collective_s(rows.kind, shape["bytes"], shape["gpus"], port_bytes_per_s, label)
        seconds = times[:, None]
    names = frozenset(device.gpu.fitted_on.get(rows.precision, {}).get(rows.kind, ()))
    if rows.kind in COLLECTIVE_ROWS and device.node is not None:
        names = fitted_names(device.node, rows)
    return PredictedRows(rows, cost.flop, cost.bytes, seconds, np.array([name in names for name in rows.names]))


def refusal(model: str, rows: MeasuredRows, port_bytes_per_s: float | None) -> str:
    """Why a simulator of others does not predict rows; "" for other models, and where it does."""
    if model in MODELS:
        return ""
    if rows.kind not in COLLECTIVE_ROWS or COLLECTIVE_ROWS[rows.kind][1] != "inside":
        return f"{model} predicts collectives inside a node, and no {rows.kind}"
    if port_bytes_per_s is None:
        return f"{model} is set up for GPUs at a switch, with node.link_bytes_per_s"
    return str(_peer(model).absence())


def _peer(model: str) -> Any:
    return plugins.load("engine", model)


def roofline(device: Device, rows: MeasuredRows, flop: Floats, *, traffic: Floats) -> Floats:
    """Times [R, passes] at the peak rate or the bandwidth of the data sheet; of a collective at its node's rate."""
    if rows.kind == "allreduce" or rows.kind in COLLECTIVE_ROWS:
        assert device.node is not None and device.node.library is not None
        return np.asarray(traffic / device.node.library.bytes_per_s)
    if rows.kind in STREAM_KINDS:
        return np.asarray(traffic / device.gpu.peak_hbm_bytes_per_s)
    peak = device.gpu.peak(rows.precision)
    assert peak is not None
    return np.maximum(flop / peak, traffic / device.gpu.peak_hbm_bytes_per_s)


def nearest(rows: MeasuredRows, flop: Floats) -> Floats:
    """Times [R, passes] of the measured row of the nearest other shape, scaled by FLOP.

    Distances are of the logarithms of sizes; another layout of a matrix counts as a factor 16 in a size.
    """
    points = features(rows.shape)
    seconds = np.full(rows.seconds.shape, np.nan)
    for column in range(len(rows.passes)):
        measured = np.flatnonzero(np.isfinite(rows.seconds[:, column]))
        for row in measured:
            # another row of the same shape would be no test
            candidates = measured[[rows.names[other] != rows.names[row] for other in measured]]
            if len(candidates):
                near = candidates[np.argmin(((points[candidates] - points[row]) ** 2).sum(axis=1))]
                seconds[row, column] = rows.seconds[near, column] * flop[row, column] / flop[near, column]
    return seconds


_LAYOUT = 4.0  # distance of two layouts, in doublings of a size


def features(shape: Mapping[str, Floats]) -> Floats:
    """Shapes as points [R, columns]: logarithms to the base 2 of sizes, layouts as 0 or 4."""
    columns = [
        _LAYOUT * values if name in ("ta", "tb") else np.log2(values + (name.startswith("pad")))  # padding may be 0
        for name, values in shape.items()
    ]
    return np.column_stack(columns)
