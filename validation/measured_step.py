"""A measured training step and its design, and errors of many (`validation.steps_measured`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dse.config.options import load_yaml
from simulators.steps.backend import StepBackend, metrics_of


@dataclass(frozen=True)
class Step:
    """A measured step and its design; seconds: measured. fitted: a constant was fitted on this row."""

    table: str
    name: str
    design: Mapping[str, Any]
    seconds: float
    facts: Mapping[str, Any]
    fitted: bool = False

    @property
    def predicted_s(self) -> float:
        """Time of the iteration that the step backend predicts [s]."""
        return float(self.metrics()["iteration_s"])

    @property
    def error(self) -> float:
        """Relative error of the prediction, with its sign."""
        return self.predicted_s / self.seconds - 1

    def metrics(self) -> Mapping[str, Any]:
        """Every metric of the iteration. Raises ValueError for a design that breaks a rule."""
        backend = StepBackend()
        design = backend.design(self.design)
        broken = [problem for problem in backend.problems(design) if problem.path != "run.batch"]
        if broken:
            raise ValueError(f"{self.name}: {broken[0].path} {broken[0].rule}")
        return metrics_of(design)


@cache
def settings() -> Mapping[str, Any]:
    """What `steps_measured.yaml` says."""
    tree: Mapping[str, Any] = load_yaml(Path(__file__).with_name("steps_measured.yaml"))
    return tree


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Count, median, 90th percentile and worst of the sizes of errors, and their median with its sign."""
    size = np.abs(errors)
    return {
        "count": len(errors),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "worst": float(np.max(size)),
        "signed_median": float(np.median(errors)),
    }
