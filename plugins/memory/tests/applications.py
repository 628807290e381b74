"""Designs of the memory backend: shipped options with values set by dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dse.backend import Batch
from dse.plugins import available
from dse.space import set_path
from dse_memory.backend import MemoryBackend
from dse_memory.design import MemoryDesign
from tests.support import shipped

BACKEND: MemoryBackend = available("backend")["memory"]()
RUN = {"requests": 200_000, "repeats": 3}


def tree(
    application: str | Mapping[str, Any],
    policy: str = "combined",
    overrides: Mapping[str, Any] | None = None,
    *,
    system: str = "gem5_gcn3",
) -> dict[str, Any]:
    """The tree of an application, by name or as written, with values set by dotted path."""
    program = shipped("application")[application] if isinstance(application, str) else dict(application)
    root = {"application": program, "policy": shipped("policy")[policy], "system": shipped("system")[system]}
    root["run"] = dict(RUN)
    for path, value in (overrides or {}).items():
        set_path(root, path, value)
    return root


def design(application: str | Mapping[str, Any], *arguments: Any, **options: Any) -> MemoryDesign:
    """A validated design; arguments as for `tree`."""
    return BACKEND.design(tree(application, *arguments, **options))


def metrics(application: str | Mapping[str, Any], *arguments: Any, **options: Any) -> dict[str, float]:
    """Metrics of a design that breaks no rule."""
    (results,) = BACKEND.evaluate([Batch(design(application, *arguments, **options))])
    assert results[0].reason == ""
    return dict(results[0].metrics)
