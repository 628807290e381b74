"""Iteration that a run's configuration describes, and variants of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dse.errors import ConfigError
from dse.results.finished_run import Finished
from dse.values import put
from simulators.steps.backend import StepBackend
from simulators.steps.design import OF_LENGTHS, Design


def base(run: Finished, **sections: Any) -> Design | None:
    """Design of a run's configuration at a single sequence length, some sections replaced; None if it is invalid."""
    tree = {**run.config, **sections}
    fields = {name: tree[name] for name in Design.model_fields if name in tree and name not in OF_LENGTHS}
    try:
        return StepBackend().design(fields)
    except ConfigError:
        return None


def at(design: Design, values: Mapping[str, Any]) -> Design:
    """Return a design with numbers, or arrays, set by dotted path."""
    for path, value in values.items():
        design = put(design, path, value)
    return design
