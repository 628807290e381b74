"""Steps of a run's configuration that break no rule."""

from __future__ import annotations

from typing import Any

from dse.results.run_folder import FinishedRun
from simulators.steps.backend import StepBackend
from simulators.steps.design import StepDesign
from studies.common.iterations import base


def legal_base(run: FinishedRun, **sections: Any) -> StepDesign | None:
    """Design of a run's configuration, some sections replaced; None if it is invalid or breaks a rule."""
    design = base(run, **sections)
    return None if design is None or StepBackend().problems(design) else design
