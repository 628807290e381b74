"""Fit of the constants of serving software and of its kernels to measured points (`benchmarks.serving --fit`).

Least squares of the logarithms of both times, of the first token with less weight (warm-up is in the measured means),
with a soft L1 loss, and a weak pull to where the search begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from dse.errors.terminal import bar
from dse_serving.design import KernelSet, ServingKernels, kernels
from dse_serving.measured import Predictor, Row, settings

Floats = NDArray[np.float64]
_SHARED = ("token_s", "reply_s")  # times of the front end that are one for all software
_FIRST, _PULL, _LOSS = 0.5, 0.05, 0.05  # weight of first tokens, of the start, and scale of errors


def start() -> dict[str, float]:
    """The constants that are fitted, by path, as the search begins."""
    begin: Mapping[str, Any] = settings()["fitted"]["start"]
    dense = {f"dense.{gpu}.{name}": sizes for gpu, formats in begin["dense"].items() for name, sizes in formats.items()}
    experts = {f"experts.{name}": constants for name, constants in begin["experts"].items()}
    speeds = {
        f"{path}.{size}": float(value) for path, sizes in (dense | experts).items() for size, value in sizes.items()
    }
    software = {
        f"{name}.{time}": float(value) for name in settings()["servers"].values() for time, value in begin[name].items()
    }
    return {
        **speeds,
        **{name: float(begin[name]) for name in ("sum_s", "peer_s", "acceptance", *_SHARED)},
        **software,
    }


def fit(rows: Sequence[Row], evaluations: int = 16) -> dict[str, float]:
    """Constants by path that fit rows best, after so many evaluations of the slopes, and the sum of the losses."""
    begin, fitter = start(), _Fit(rows)
    names = list(begin)

    # each evaluation has one more for each slope
    with bar("fit of serving", evaluations * (len(names) + 1), "evaluations") as advance:

        def residuals(factors: Floats) -> Floats:
            advance(1)
            # factors on the start, so that constants of all sizes have steps alike
            values = dict(zip(names, factors * np.array(list(begin.values())), strict=True))
            # the pull keeps constants at their start that rows do not determine
            return np.concatenate([fitter.residuals(values), _PULL * np.log(factors)])

        solution = least_squares(
            residuals,
            np.ones(len(names)),
            loss="soft_l1",
            f_scale=_LOSS,
            diff_step=0.05,
            max_nfev=evaluations,
            bounds=(0.05, 20),
        )
    values = zip(names, solution.x * np.array(list(begin.values())), strict=True)
    # as many digits as the table holds
    fitted = {name: float(f"{value:.4g}") for name, value in values}
    return {**fitted, "loss": float(solution.cost), "rows": float(len(rows))}


def fit_sets(rows: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, float]]:
    """Constants of each set of kernels that fit its rows best, all other constants as they are.

    rows: by the name of the set: software, architecture, attention and format.
    """
    return {name: _fit_set(name, of_set) for name, of_set in rows.items()}


def _fit_set(name: str, rows: Sequence[Row]) -> dict[str, float]:
    begin = {"dispatch_s": 2e-5, "weight_bound": 1.0, "flop_bound": 1.0}
    predictor, shipped = Predictor(), kernels()

    def residuals(factors: Floats) -> Floats:
        values = dict(zip(begin, factors * np.array(list(begin.values())), strict=True))
        tried = shipped.model_copy(update={"sets": {**shipped.sets, name: KernelSet(**values)}})
        points = [predictor.predict(row, None, tried) for row in rows]
        later = [np.log1p(point.tpot_error) for point in points if point is not None]
        first = [_FIRST * np.log1p(point.ttft_error) for point in points if point is not None]
        return np.array([*later, *first, *(_PULL * np.log(factors))])

    solution = least_squares(
        residuals, np.ones(len(begin)), loss="soft_l1", f_scale=_LOSS, diff_step=0.05, bounds=(0.02, 20)
    )
    fitted = dict(zip(begin, solution.x * np.array(list(begin.values())), strict=True))
    return {path: float(f"{value:.4g}") for path, value in fitted.items()}


class _Fit:
    """Errors of rows under constants."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows, self._predictor = rows, Predictor()

    def residuals(self, values: Mapping[str, float]) -> Floats:
        """Logarithms of predicted over measured times, those of first tokens with their weight."""
        software, later, first = _with_speeds(values), [], []
        for row in self._rows:
            server = settings()["servers"][row.cells["backend"]]
            software_times = {
                path.removeprefix(f"{server}."): value for path, value in values.items() if path.startswith(server)
            }
            changes = {"acceptance": values["acceptance"], **{name: values[name] for name in _SHARED}, **software_times}
            point = self._predictor.predict(row, changes, software)
            # a row that is refused counts as fitted, so that the number of residuals stays
            later.append(0.0 if point is None else np.log1p(point.tpot_error))
            first.append(0.0 if point is None else _FIRST * np.log1p(point.ttft_error))
        return np.array([*later, *first])


def _with_speeds(values: Mapping[str, float]) -> ServingKernels:
    tree: dict[str, Any] = kernels().model_dump()
    for path, value in values.items():
        part, *names = path.split(".")
        if part in ("dense", "experts"):
            reduce(getitem, names[:-1], tree[part])[names[-1]] = value
        elif part in tree:
            tree[part] = value
    return ServingKernels.model_validate(tree)
