"""Measured prefills of whole models held against predicted iterations: tables in the layout of microsoft/tokenweave.

A row has `model, prompt_len, tp` and times of a prefill in ms: `baseline_multimem` (no overlap) and `no_ar`
(all-reduces left out). Nothing is fitted to them: GEMMs take the constants of the GPU, collectives, which are multimem,
those of the node's switch, attention and what memory bounds those of conf/kernels/flash.yaml.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dse.files import read_csv
from simulators.hardware.machine import tree_of
from simulators.steps.backend import StepBackend, metrics_of
from simulators.workloads.model_zoo import model_tree, option_tree, public

_TIMES = {"prefill": "baseline_multimem", "prefill without all-reduces": "no_ar"}
_NEEDED = ("model", "prompt_len", "tp", *_TIMES.values())
_SYSTEM = "h100_8"  # the tables are of it, and name none


def holds_prefills(columns: tuple[str, ...]) -> bool:
    """Return whether a table with these columns holds prefills."""
    return set(_NEEDED) <= set(columns)


def model_named(name: str) -> str | None:
    """The public model that a table calls `name`; None if its widths are not known.

    >>> model_named("Llama-3.3-70B-Instruct"), model_named("Qwen2.5-72B-Instruct"), model_named("nobody")
    ('llama3_70b', 'qwen2.5_72b', None)
    """
    plain = name.lower().removesuffix("-instruct").replace("-", "_")
    plain = re.sub(r"^llama_3(\.\d)?_", "llama3_", plain)
    return plain if plain in public() else None


def predict_prefill(model: str, prompt_len: int, tp: int) -> Mapping[str, float]:
    """Times [s] of a prefill of one prompt on `tp` GPUs of a node, without overlap, and without all-reduces."""
    sections = {"optimizer": "adam", "kernels": "flash"}
    design = StepBackend().design(
        {
            **{group: option_tree(group, option) for group, option in sections.items()},
            "system": tree_of(_SYSTEM),
            "model": model_tree(model),
            "run": {"mode": "prefill", "batch": 1, "sequence_length": prompt_len, "precision": "bf16"},
            "parallel": {"tp": tp, "pp": 1, "dp": 1, "collectives": "in_switch"},
        }
    )
    metrics = metrics_of(design)
    whole = float(metrics["iteration_s"])
    return dict(zip(_TIMES, (whole, whole * (1 - float(metrics["share_communication"]))), strict=True))


def judged_prefills(file: Path) -> Iterator[dict[str, Any]]:
    """Yield errors on the rows of a table whose models are known, as rows of `benchmarks.validity`."""
    errors = list(_errors(file))
    for kind in _TIMES if errors else ():
        of_kind = np.array([row[kind] for row in errors])
        yield {
            "device": _SYSTEM,
            "precision": "bf16",
            "kind": kind,
            "rows": len(of_kind),
            "median": float(np.median(np.abs(of_kind))),
            "p90": float(np.quantile(np.abs(of_kind), 0.9)),
            "signed_median": float(np.median(of_kind)),
            "large_median": None,
            "small_median": None,
        }


def _errors(file: Path) -> Iterator[dict[str, float]]:
    """Yield the errors of each row, by kind of time."""
    skipped = set()
    for _, cells in read_csv(file, needed=_NEEDED).rows:
        model = model_named(cells["model"])
        if model is None or not all(cells[column] for column in _TIMES.values()):
            skipped.add(cells["model"])
            continue
        ours = predict_prefill(model, int(cells["prompt_len"]), int(cells["tp"]))
        yield {kind: ours[kind] / (float(cells[column]) * 1e-3) - 1 for kind, column in _TIMES.items()}
    if skipped:
        print(f"{file.name}: rows of {', '.join(sorted(skipped))} are skipped", file=sys.stderr)
