"""The iteration that a run's configuration is about, and others like it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dse.errors import ConfigError
from dse.results.finished_run import Finished
from dse.values import put
from simulators.steps.backend import StepBackend
from simulators.steps.design import OF_LENGTHS, Design


def base(run: Finished, **sections: Any) -> Design | None:
    """The design of a run's configuration, of one length, some sections replaced; None where they make none."""
    tree = {**run.config, **sections}
    held = {name: tree[name] for name in Design.model_fields if name in tree and name not in OF_LENGTHS}
    try:
        return StepBackend().design(held)
    except ConfigError:
        return None


def at(design: Design, values: Mapping[str, Any]) -> Design:
    """A design with numbers, or arrays, put in by dotted path."""
    for path, value in values.items():
        design = put(design, path, value)
    return design
