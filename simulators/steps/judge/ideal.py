"""The bound of the hardware alone: the least time of a step with ideal schedules at its sites.

Candidates are those of `candidates=ideal` (no barrier, no time of a host, kernels as fast as the library's), one of a
family: in four chunks, moved by copy engines. Sites are decided one after the other, with tokens split or not.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from dse.backend import Batch
from dse.errors import ConfigError
from dse.space import set_path
from simulators.steps.backend import StepBackend
from simulators.steps.overlap.sites import SERIAL, SITES
from simulators.workloads.model_zoo import option_tree

_TIME = "iteration_s"
_SPLIT = {"parallel.sequence_parallel": True, "parallel.split_ctas": 0}
"""Tokens split, with which sites before a GEMM exist."""


def ideal_seconds(tree: Mapping[str, Any]) -> float:
    """The least time of a step with ideal schedules [s]. tree: of its design."""
    backend = StepBackend()
    changes: Sequence[Mapping[str, Any]] = ({}, _SPLIT)
    return min(_least_seconds(backend, tree, changed) for changed in changes)


def _least_seconds(backend: StepBackend, tree: Mapping[str, Any], changes: Mapping[str, Any]) -> float:
    step: dict[str, Any] = {**tree, "parallel": dict(tree["parallel"]), "sites": dict.fromkeys(SITES, SERIAL)}
    for path, value in changes.items():
        set_path(step, path, value)
    least = _seconds(backend, step)
    for site, texts in ideal_candidates().items():
        for text in texts:
            seconds = _seconds(backend, {**step, "sites": {**step["sites"], site: text}})
            if seconds < least:
                least, step["sites"] = seconds, {**step["sites"], site: text}
    return least


def _seconds(backend: StepBackend, tree: Mapping[str, Any]) -> float:
    """Time of a step [s]; infinite where it breaks a rule."""
    try:
        (result,) = backend.evaluate([Batch(backend.design(tree))])
    except ConfigError:
        return float("inf")
    return float(result.metrics[_TIME][0]) if result.ok.all() else float("inf")


@cache
def ideal_candidates() -> Mapping[str, Sequence[str]]:
    """Ideal schedules of each site, one of a family."""
    tree = option_tree("candidates", "ideal")["sites"]
    return {site: [text for text in _texts(tree, site) if _is_typical(text)] for site in SITES}


def _is_typical(text: str) -> bool:
    """Tell whether a schedule stands for its family."""
    return text != SERIAL and "comm_engine=cu" not in text and ("num_chunks" not in text or "num_chunks=4" in text)


def _texts(tree: Mapping[str, Any], site: str) -> list[str]:
    """Values of a choice, which may be that of another site."""
    text = str(tree[site])
    if text.startswith("${"):
        return _texts(tree, text[2:-1].rpartition(".")[2])
    inner = text.removeprefix("choice(").removesuffix(")")
    return [value.strip() for value in next(csv.reader([inner], quotechar="'", skipinitialspace=True))]
