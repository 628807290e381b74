"""Surrogate model of outcomes: Gaussian processes over the genes of a few hundred points.

The kernel of each number is exp(-sum_j r_j d_j) over the knobs j, where d_j is the difference of places over their
range for ordered values, 1 for different unordered values and between an active and an inactive knob, and 0 for equal
ones: an Ornstein-Uhlenbeck process in every knob. The rates r_j say how much a knob matters; they maximize the
posterior, the marginal likelihood times a log-normal prior (Rasmussen and Williams 2006, ch. 2, 4 and 5).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController

from dse.search.genes import Genes, Rows

_Unlikely = Callable[[NDArray[np.float64]], tuple[float, NDArray[np.float64]]]

# also keeps the matrix well-conditioned where points are close
_NOISE = 1e-3  # variance of an outcome around the process, as a share of all variance
_PRIOR = np.log(0.5), 1.5  # of the logarithm of a rate: mean and standard deviation
# few: they go on from the rates of the time before
_STEPS = 12  # of the optimizer, each time it tunes the rates
_LARGEST = 7.0  # of the logarithm of a rate, either way


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def _on_one_core() -> AbstractContextManager[Any]:
    """Limit BLAS to one core: on small matrices more cores are slower, and round in another order."""
    limit: AbstractContextManager[Any] = _libraries().limit(limits=1, user_api="blas")
    return limit


class Surrogate:
    """A model of M numbers per point. Points are rows of genes."""

    def __init__(self, genes: Genes) -> None:
        self._ordered = genes.ordered
        # places of ordered values over their range; unordered ones and intervals are in 0...1 as they are
        self._range = np.where(genes.ordered & (genes.sizes > 1), genes.sizes - 1.0, 1.0)
        self._rates = np.empty((0, len(genes.knobs)))  # logarithms

    def fit(self, rows: Rows, values: NDArray[np.float64], *, tune: bool = True) -> None:
        """Fit to points [B, genes] and their values [B, M], all finite. tune: whether to optimize the rates again."""
        self._known = rows
        self._mean, spread = values.mean(axis=0), values.std(axis=0)
        self._spread = np.where(spread > 0, spread, 1.0)  # equal values stay 0
        scaled = (values - self._mean) / self._spread
        with _on_one_core():
            apart = self._apart(rows, rows)
            if tune or not len(self._rates):
                # the last rates are close to the next ones
                begin = self._rates if len(self._rates) else np.full((scaled.shape[1], rows.shape[1]), _PRIOR[0])
                columns = zip(begin, scaled.T, strict=True)
                self._rates = np.array([_tune_rates(rates, apart, column) for rates, column in columns])
            covariances = [_covariance(rates, apart)[1] for rates in self._rates]
            # factors serve all predictions until the next fit
            self._factors = [cho_factor(covariance, lower=True, check_finite=False) for covariance in covariances]
            solved = zip(self._factors, scaled.T, strict=True)
            self._weights = [cho_solve(factor, column, check_finite=False) for factor, column in solved]

    def predict(self, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Predict the expected values [B, M] of points [B, genes] and their standard deviations [B, M]."""
        expected, deviation = np.empty((2, len(rows), len(self._rates)))
        with _on_one_core():
            apart = self._apart(rows, self._known)
            for place, (rates, factor, weights) in enumerate(
                zip(self._rates, self._factors, self._weights, strict=True)
            ):
                kernel = np.exp(-np.tensordot(np.exp(rates), apart, axes=1))  # [B, known]
                half = solve_triangular(factor[0], kernel.T, lower=True, check_finite=False)
                expected[:, place] = kernel @ weights
                # rounding may make a variance negative
                deviation[:, place] = np.sqrt(np.maximum(0.0, 1.0 - np.einsum("ij,ij->j", half, half)))
        return expected * self._spread + self._mean, deviation * self._spread

    def _apart(self, first: Rows, second: Rows) -> NDArray[np.float64]:
        """Distances [genes, B, C] between points, by gene."""
        distances = np.empty((first.shape[1], len(first), len(second)))
        for gene, distance in enumerate(distances):
            a, b = first[:, gene, None], second[:, gene]  # [B, 1] and [C]
            if not self._ordered[gene]:
                np.not_equal(a, b, out=distance)
                continue
            np.abs(np.subtract(a, b, out=distance), out=distance)
            np.divide(distance, self._range[gene], out=distance)
            if (a < 0).any() or (b < 0).any():  # -1: the knob does not count in that point
                # only one of the two counts: as far apart as can be
                np.copyto(distance, a != b, where=(a < 0) != (b < 0))
        return distances


def _covariance(
    rates: NDArray[np.float64], apart: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the kernel [B, B], without and with the noise."""
    kernel = np.exp(-np.tensordot(np.exp(rates), apart, axes=1))
    return kernel, kernel + _NOISE * np.eye(len(kernel))


def unlikely(apart: NDArray[np.float64], values: NDArray[np.float64]) -> _Unlikely:
    """Negative log posterior, up to a constant, of values [B] of points at distances `apart` [genes, B, B].

    Returns a function of the logarithms of the rates [genes] that gives it and its gradient.
    """

    def negative_log_posterior(rates: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        kernel, covariance = _covariance(rates, apart)
        factor = cho_factor(covariance, lower=True, check_finite=False)
        weights = cho_solve(factor, values, check_finite=False)
        inverse = cho_solve(factor, np.eye(len(values)), check_finite=False)  # for the gradient: tr(inverse * dK)
        off = (rates - _PRIOR[0]) / _PRIOR[1]
        # the last term is the log-normal prior; sum(log diag) is half the log determinant
        lost = 0.5 * values @ weights + np.log(np.diag(factor[0])).sum() + 0.5 * off @ off
        # dK / d rate_j = -kernel * d_j, contracted with inverse - w w^T
        slope = np.tensordot(apart, (inverse - np.outer(weights, weights)) * kernel, axes=2)
        return float(lost), -0.5 * np.exp(rates) * slope + off / _PRIOR[1]  # by the chain rule: rates are logarithms

    return negative_log_posterior


def _tune_rates(
    begin: NDArray[np.float64], apart: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Maximize the posterior of values [B] over the logarithms of the rates [genes], from those in `begin`."""
    bounds, options = [(-_LARGEST, _LARGEST)] * len(begin), {"maxiter": _STEPS}
    optimum = minimize(unlikely(apart, values), begin, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return np.asarray(optimum.x)
