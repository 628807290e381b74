"""Degree of concurrency of queued GEMMs: a logistic regression over features of the queue, and its regret.

For a queue with features x and a degree d it gives the probability that d is within `_NEAR` of the best degree's time;
the most probable degree is chosen. It is trained on queues of random shapes, and tested on others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.costs.gemm.sharing import chosen
from simulators.hardware.machine import Gpu
from simulators.hardware.parts import ELEMENT_BYTES

Floats = NDArray[np.float64]

_NEAR = 1.02  # ratio of times up to which a degree is as good as the best


@dataclass(frozen=True)
class GemmQueue:
    """GEMMs [G, 3] of (m, n, k) in a queue, and their precision."""

    shapes: Floats
    precision: str

    def features(self, gpu: Gpu) -> Floats:
        """Features known before anything runs: sizes, waves, occupancy, intensity, footprint; means of logarithms
        over the queue, and log2 of its length.
        """
        # work-groups over CUs and bytes over the last-level cache: how much room a GEMM leaves for others
        m, n, k = self.shapes.T
        kernel = chosen(gpu, (m, n, k), precision=self.precision)
        assert gpu.llc is not None
        operands = ELEMENT_BYTES[self.precision] * (m * k + k * n + m * n)
        columns = (
            *(m, n, k, kernel.workgroups / gpu.num_cus, kernel.occupancy, kernel.rows * kernel.cols),
            *(2 * m * n * k / kernel.hbm_bytes, operands / gpu.llc.bytes, kernel.seconds(gpu) / gpu.kernel_launch_s),
        )
        return np.append(np.log2(np.stack(columns)).mean(axis=1), np.log2(len(self.shapes)))  # sizes span decades


@dataclass(frozen=True)
class DegreePredictor:
    """Trained model, and the degrees [D] it chooses from."""

    model: Any
    degrees: Floats

    @classmethod
    def learn(cls, features: Floats, seconds: Floats, degrees: Sequence[float]) -> DegreePredictor:
        """Fit to features [Q, F] of queues and their times [Q, D] at each degree."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import PolynomialFeatures, StandardScaler

        degree = np.asarray(degrees, float)
        near = seconds <= _NEAR * seconds.min(axis=1, keepdims=True)
        # a weak penalty: a few hundred queues, and squares of a dozen features
        model = make_pipeline(StandardScaler(), PolynomialFeatures(2), LogisticRegression(C=10.0, max_iter=5000))
        model.fit(_pairs(features, degree), near.reshape(-1))
        return cls(model, degree)

    def choose(self, features: Floats) -> NDArray[np.intp]:
        """Return the index [Q] of the degree for queues of features [Q, F]."""
        near = self.model.predict_proba(_pairs(features, self.degrees))[:, 1]  # of the class `near`
        # argmax takes the first of equals, the lowest degree where degrees ascend
        return np.asarray(np.argmax(near.reshape(len(features), -1), axis=1))


def _pairs(features: Floats, degrees: Floats) -> Floats:
    """Features of each queue with each degree, [Q D, F + 1]."""
    queues = np.repeat(features, len(degrees), axis=0)
    # each queue with each degree, in the order of `seconds`
    return np.column_stack([queues, np.tile(np.log2(degrees), len(features))])


def score_choices(seconds: Floats, sequential: Floats, places: NDArray[np.intp]) -> Mapping[str, float]:
    """Scores of choices [Q]: shares within 5 % of the oracle and exact, mean and largest regret, worst ratio to
    sequential; seconds [Q, D], sequential [Q].
    """
    chosen_s, best_s = seconds[np.arange(len(places)), places], seconds.min(axis=1)
    regret = chosen_s / best_s - 1
    return {
        "within_5_percent": float((regret <= 0.05).mean()),
        "exact": float((regret <= 1e-12).mean()),
        "mean_regret": float(regret.mean()),
        "largest_regret": float(regret.max()),
        "worst_against_sequential": float((chosen_s / sequential).max()),
    }
