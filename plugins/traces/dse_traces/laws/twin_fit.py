"""Robust least squares of one constant of a machine, with the shipped value as its prior.

    min over x of  sum_i rho(log t_i - log T_i(x)) + rho(s_0 x / p),    rho(e) = 2 (sqrt(1 + (e / d)^2) - 1)

x: logarithm of the constant over its shipped value; t_i: measured time of row i (a shape, a payload); T_i: by the cost
model; d: `outlier`; p: `prior_spread`, without which there is no prior. With the slopes J_i = d log T_i / d x and
residuals r_i clipped at 2 d,

    s^2 = (sum_i r_i^2 + n_0 s_0^2) / (R - 1 + n_0),    1 / e^2 = sum_i J_i^2 / s^2 + 1 / p^2

e: standard error, and the interval is x -+ t e with the quantile t of Student's distribution of R - 1 + n_0 degrees of
freedom. s_0, n_0: `row_spread` and `row_spread_weight`, by which few rows are never more certain than the law is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.config.options import load_yaml
from dse.errors import validate_as
from dse.values.units import Bytes, Fraction, Integer, Number
from dse_traces import DATA
from simulators.hardware.parts import SourcedValue

Floats = NDArray[np.float64]
_STEP = 0.02  # of a logarithm, by which slopes are taken
_CLIPPED = 2.0  # residuals count by at most so many times `outlier`


class TwinRules(SourcedValue):
    """Rules of `conf/data/twin.yaml`, where each has its source.

    fewest_kernels, fewest_launches: that a constant is fitted on. launches_a_row: that are averaged to one row.
    least_sensitivity: slope of a row that counts. most_beside: share of a kernel's time beside others. quick_quantile:
    of the times of a collective where one rank is recorded; most_over_links: times as long as its links need, above
    which such a collective is taken to wait. longest_host: time between launches, over its
    median. coverage: of the intervals. The others: see the module.
    """

    name: str
    description: str
    fewest_kernels: Annotated[Integer, Field(ge=1)]
    fewest_launches: Annotated[Integer, Field(ge=1)]
    launches_a_row: Annotated[Integer, Field(ge=1)]
    least_sensitivity: Fraction
    most_beside: Fraction
    least_stream_bytes: Bytes
    longest_host: Annotated[Number, Field(gt=1)]
    quick_quantile: Fraction
    most_over_links: Annotated[Number, Field(gt=1)]
    prior_spread: Annotated[Number, Field(gt=0)]
    row_spread: Annotated[Number, Field(gt=0)]
    row_spread_weight: Annotated[Number, Field(gt=0)]
    outlier: Annotated[Number, Field(gt=0)]
    coverage: Fraction
    stream_operators: tuple[str, ...]


@cache
def twin_rules() -> TwinRules:
    """The rules of `conf/data/twin.yaml`. Raises ConfigError."""
    return validate_as(TwinRules, load_yaml(DATA / "twin.yaml"), path="twin")


@dataclass(frozen=True)
class TimedRows:
    """Measured rows: seconds [R], and the ends low_s and high_s [R] between which waiting leaves them; counts [R]: how
    many kernels each row stands for.
    """

    seconds: Floats
    counts: NDArray[np.int64]
    low_s: Floats
    high_s: Floats

    @classmethod
    def exact(cls, seconds: Floats, counts: NDArray[np.int64]) -> TimedRows:
        """Rows in which nothing waits."""
        return cls(seconds, counts, seconds, seconds)

    def where(self, marks: NDArray[np.bool_]) -> TimedRows:
        """The rows that are marked."""
        return TimedRows(self.seconds[marks], self.counts[marks], self.low_s[marks], self.high_s[marks])


@dataclass(frozen=True)
class LogFit:
    """A fitted logarithm with its standard error and its interval, and the number of kernels and of rows."""

    value: float
    error: float
    low: float
    high: float
    kernels: int
    rows: int


def slopes(predict: Callable[[float], Floats], at: float) -> Floats:
    """Slopes of the logarithms of predicted times [R] over the logarithm of a constant."""
    ends = [np.log(predict(at + sign * _STEP)) for sign in (1, -1)]
    return np.asarray((ends[0] - ends[1]) / (2 * _STEP))


def fit_logarithm(
    rows: TimedRows, predict: Callable[[float], Floats], bounds: tuple[float, float], prior_spread: float | None
) -> LogFit:
    """Fit the logarithm of a constant over its shipped value to measured rows.

    predict: times [s, R] at such a logarithm. bounds: of it. prior_spread: None where nothing is shipped.
    """
    from scipy.optimize import least_squares
    from scipy.stats import t as student

    rules, measured = twin_rules(), np.log(rows.seconds)
    pull = 0.0 if prior_spread is None else rules.row_spread / prior_spread

    def residuals(logs: Floats) -> Floats:
        return np.append(np.log(predict(float(logs[0]))) - measured, pull * logs[0])

    start = [float(np.clip(0.0, bounds[0] + _STEP, bounds[1] - _STEP))]
    fit = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=rules.outlier, diff_step=1e-4)
    value, slope = float(fit.x[0]), slopes(predict, float(fit.x[0]))
    errors = np.clip(residuals(fit.x)[:-1], -_CLIPPED * rules.outlier, _CLIPPED * rules.outlier)
    freedom = len(errors) - 1 + rules.row_spread_weight
    variance = (float(errors @ errors) + rules.row_spread_weight * rules.row_spread**2) / freedom
    information = float(slope @ slope) / variance + (0.0 if prior_spread is None else prior_spread**-2)
    error = information**-0.5
    half = error * float(student.ppf((1 + rules.coverage) / 2, freedom))
    # what waiting leaves open shifts the ends: a shorter transfer is a higher rate, or a shorter host time
    sign = np.sign(slope.mean())
    shifts = [float(np.mean((np.log(end) - measured) / slope)) for end in (rows.low_s, rows.high_s)]
    down, up = (shifts[0], shifts[1]) if sign > 0 else (shifts[1], shifts[0])
    low, high = max(value - half + min(down, 0.0), bounds[0]), min(value + half + max(up, 0.0), bounds[1])
    return LogFit(value, error, low, high, int(rows.counts.sum()), len(errors))
