"""Measured prefills of whole models held against iterations: tables in the layout of microsoft/tokenweave.

A row has `model, prompt_len, tp` and times of a prefill in ms: not overlapped, without all-reduces, and overlapped by
two halves of the tokens (`simulators.steps.overlap.token_splits`). `prefills.yaml` says of which designs these are, and
on which rows constants were fitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dse.config.options import load_yaml
from dse.files import read_csv
from simulators.hardware.machine import merged, tree_of
from simulators.steps.backend import StepBackend, metrics_of
from simulators.workloads.model_zoo import model_tree, option_tree
from simulators.workloads.public_models import public

_SIZES = ("model", "prompt_len", "tp")
BASELINE, NO_SUMS, OVERLAPPED = "prefill", "prefill without all-reduces", "prefill overlapped"


@dataclass(frozen=True)
class Prefill:
    """A measured prefill and its prediction: times [s] by kind. fitted: constants were fitted on this row."""

    model: str
    prompt_len: int
    tp: int
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    fitted: bool

    def gain(self, times: Mapping[str, float]) -> float | None:
        """Share of the time that overlap saves; None where a time is missing."""
        if BASELINE not in times or OVERLAPPED not in times:
            return None
        return 1 - times[OVERLAPPED] / times[BASELINE]

    @property
    def gain_error(self) -> float | None:
        """Predicted gain less the measured one."""
        ours, measured = self.gain(self.predicted), self.gain(self.measured)
        return None if ours is None or measured is None else ours - measured


@cache
def settings() -> Mapping[str, Any]:
    """Settings in `prefills.yaml`."""
    tree: Mapping[str, Any] = load_yaml(Path(__file__).with_suffix(".yaml"))
    return tree


def holds_prefills(columns: tuple[str, ...]) -> bool:
    """Return whether a table with these columns holds prefills."""
    times = [time["column"] for time in settings()["times"].values()]
    return set(_SIZES) <= set(columns) and times[0] in columns


def model_named(name: str) -> str | None:
    """The public model that a table calls `name`; None if its widths are not known.

    >>> model_named("Llama-3.3-70B-Instruct"), model_named("Qwen2.5-72B-Instruct"), model_named("nobody")
    ('llama3_70b', 'qwen2.5_72b', None)
    """
    # without the organisation, and as names are spelt here
    plain = name.rpartition("/")[2].lower().removesuffix("-instruct").replace("-", "_")
    plain = re.sub(r"^llama_3(\.\d)?_", "llama3_", plain)
    return plain if plain in public() else None


def predict_prefill(
    model: str, prompt_len: int, tp: int, *, changes: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Times [s] of a prefill of one prompt on `tp` GPUs of a node, by kind. changes: of the shipped design's tree."""
    plain = merged(_tree(model, prompt_len, tp), changes or {})
    times = {}
    for kind, changed in settings()["times"].items():
        tree = merged(plain, {name: value for name, value in changed.items() if name in plain})
        times[kind] = float(metrics_of(StepBackend().design(tree))["iteration_s"])
    return times


def _tree(model: str, prompt_len: int, tp: int) -> dict[str, Any]:
    chosen = settings()
    sections = {"optimizer": "adam", "kernels": chosen["kernels"]}
    run = {"mode": "prefill", "batch": 1, "sequence_length": prompt_len, "precision": chosen["precision"]}
    return {
        **{group: option_tree(group, option) for group, option in sections.items()},
        "system": tree_of(chosen["system"]),
        "model": model_tree(model),
        "run": run,
        "parallel": {**chosen["parallel"], "tp": tp},
    }


def read_prefills(file: Path) -> tuple[list[Prefill], list[str]]:
    """Read and predict the rows of a table whose models are known; names of the other models. Raises ConfigError."""
    rows, skipped = [], set()
    for _, cells in read_csv(file, needed=_SIZES).rows:
        model, measured = model_named(cells["model"]), _measured_seconds(cells)
        if model is None or not measured:
            skipped.add(cells["model"])
            continue
        prompt_len, tp = int(cells["prompt_len"]), int(cells["tp"])
        predicted = predict_prefill(model, prompt_len, tp)
        rows.append(Prefill(cells["model"], prompt_len, tp, measured, predicted, _is_fitted(cells)))
    return rows, sorted(skipped)


def calibration_rows(file: Path) -> list[tuple[tuple[str, int, int], float]]:
    """(model, prompt length, tp) of the rows that constants were fitted on, and their times without all-reduces [s]."""
    rows = list[tuple[tuple[str, int, int], float]]()
    for _, cells in read_csv(file, needed=_SIZES).rows:
        model, sizes = model_named(cells["model"]), (int(cells["prompt_len"]), int(cells["tp"]))
        if model is not None and _is_fitted(cells):
            rows.append(((model, *sizes), _measured_seconds(cells)[NO_SUMS]))
    return rows


def _is_fitted(cells: Mapping[str, str]) -> bool:
    """Tell whether constants were fitted on this row."""
    row = {"model": cells["model"], "prompt_len": int(cells["prompt_len"]), "tp": int(cells["tp"])}
    return row in settings()["calibrated_on"]


def _measured_seconds(cells: Mapping[str, str]) -> dict[str, float]:
    columns = {kind: time["column"] for kind, time in settings()["times"].items()}
    return {kind: float(cells[column]) * 1e-3 for kind, column in columns.items() if cells.get(column)}
