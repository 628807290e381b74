"""Iterations that a study's configuration describes, and variants of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dse.errors import ConfigError
from dse.results.run_folder import FinishedRun
from simulators.steps.backend import StepBackend
from simulators.steps.design import OF_LENGTHS, StepDesign


def step_tree(config: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Sections of a step at a single sequence length, as configured but for those that are given."""
    tree = {**config, **sections}
    # sections of an epoch, which a single step does not have
    return {name: tree[name] for name in StepDesign.model_fields if name in tree and name not in OF_LENGTHS}


def base(run: FinishedRun, **sections: Any) -> StepDesign | None:
    """Design of a run's configuration at a single sequence length, some sections replaced; None if it is invalid."""
    try:
        return StepBackend().design(step_tree(run.config, **sections))
    except ConfigError:
        return None
