"""What outcomes are likely where nothing was evaluated: a Gaussian process over the genes of a few hundred points.

The kernel is that of a polynomial of third degree in the knobs: ((1 + sum_j k_j) / (1 + J))^3 over J knobs, where k_j
is 1 for equal values, exp(-2 |difference of places| / (values - 1)) for ordered ones, 0 for different unordered ones
and for one that counts against one that does not (Rasmussen and Williams 2006, ch. 2 and 4).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from threadpoolctl import ThreadpoolController

from dse.search.genes import Genes, Rows

_LEVELS = 16  # that an interval, or more ordered values, are taken as
_NOISE = 1e-3  # variance of an outcome around the polynomial, as a share of all variance
_DEGREE = 3


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def _on_one_core() -> AbstractContextManager[Any]:
    """Small matrices: more cores would slow it down, and round in another order."""
    held: AbstractContextManager[Any] = _libraries().limit(limits=1, user_api="blas")
    return held


class Surrogate:
    """A model of M numbers per point, of points as rows of genes."""

    def __init__(self, genes: Genes) -> None:
        self._genes = genes
        many = (genes.sizes == 0) | (genes.ordered & (genes.sizes > _LEVELS))
        self._levels = np.where(many, _LEVELS, genes.sizes)
        self._scale = np.where(genes.sizes == 0, _LEVELS - 1.0, (self._levels - 1) / np.maximum(1, genes.sizes - 1))
        self._scale = np.where(many, self._scale, 1.0)
        parts = [_features(int(n), bool(ordered)) for n, ordered in zip(self._levels, genes.ordered, strict=True)]
        self._first = np.cumsum([0, *(len(part) for part in parts[:-1])])
        width = sum(part.shape[1] for part in parts)
        self._features = np.zeros((sum(map(len, parts)), width))
        column = 0
        for first, part in zip(self._first, parts, strict=True):
            self._features[first : first + len(part), column : column + part.shape[1]] = part
            column += part.shape[1]

    def fit(self, rows: Rows, values: NDArray[np.float64]) -> None:
        """Learn the values [B, M] of some points [B, genes]."""
        self._mean, self._spread = values.mean(axis=0), np.maximum(values.std(axis=0), 1e-300)
        self._known = self._encoded(rows)
        with _on_one_core():
            kernel = self._kernel(self._known) + _NOISE * np.eye(len(rows))
            self._factor = cho_factor(kernel, lower=True, check_finite=False)
            self._weights = cho_solve(self._factor, (values - self._mean) / self._spread, check_finite=False)

    def predict(self, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Expected values [B, M] of points [B, genes], and their standard deviations [B, M]."""
        with _on_one_core():
            kernel = self._kernel(self._encoded(rows))
            half = solve_triangular(self._factor[0], kernel.T, lower=True, check_finite=False)
            expected = kernel @ self._weights
        deviation = np.sqrt(np.maximum(0.0, 1.0 - np.einsum("ij,ij->j", half, half)))
        return expected * self._spread + self._mean, deviation[:, None] * self._spread

    def _encoded(self, rows: Rows) -> NDArray[np.float64]:
        """Points whose inner products are the sums over k_j."""
        places = np.where(rows < 0, self._levels, np.rint(rows * self._scale)).astype(np.intp)
        return np.asarray(self._features[self._first + places].sum(axis=1))

    def _kernel(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = rows @ self._known.T
        return np.asarray(((1.0 + sums) / (1.0 + len(self._levels))) ** _DEGREE)


def _features(levels: int, ordered: bool) -> NDArray[np.float64]:
    """Features [levels + 1, levels + 1] of the values of a knob, whose inner products are k_j; the last is of none."""
    found = np.eye(levels + 1)
    if ordered and levels > 1:
        apart = np.abs(np.subtract.outer(np.arange(levels), np.arange(levels)))
        found[:levels, :levels] = np.linalg.cholesky(np.exp(-2.0 * apart / (levels - 1)))
    return found
