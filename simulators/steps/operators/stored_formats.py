"""Weights and caches in formats of their own: bytes that a GPU holds, and that products read.

A product of weights (m, k) reads bytes_of(format) m k in place of b m k. It is as if the HBM were faster by

    (m k + k n + m n) b / (bytes_of(format) m k + b (k n + m n))

for this product (`simulators.steps.operators.work`); its FLOP run as `run.precision` says, and what turns values into
operands is not counted. Formats are of inference: what is trained is as wide as `run.precision` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from simulators.steps.operators.work import ModelBlock, Op, Product
from simulators.workloads.model import Run, Transformer
from simulators.workloads.stored import Part, Stored, WeightFormat, bytes_of_part, stored_as, weight_format

_PARTS_OF: Mapping[str, Part] = {"router": "router", "fc1": "dense", "fc2": "dense", "logits": "output"}
_PREFIXES: Mapping[str, Part] = {"expert ": "experts", "shared ": "shared", "state ": "state"}
_OF_WEIGHTS = ("linear", "fc", "output")


def stored_formats(model: Transformer, run: Run) -> Stored | None:
    """Formats of weights by part: those of the run, else those of the model's file; None for none, and in training."""
    if run.mode == "training":  # weights that are trained keep the precision of the run
        return None
    return model.stored if run.weights is None else stored_as(run.weights)


def cache_format(model: Transformer, run: Run) -> WeightFormat | None:
    """The format of keys and values: that of the run, else that of the model's file; None for none."""
    if run.mode == "training":
        return None
    return model.kv_format if run.kv_cache is None else weight_format(run.kv_cache)


def in_formats(block: ModelBlock, weights: Mapping[Part, Any], model: Transformer, run: Run) -> ModelBlock:
    """The block with the bytes of its weights as they are stored, and products that read as many.

    weights: of one GPU by part, of those that may have a format.
    """
    stored = stored_formats(model, run)
    if stored is None:
        return block
    row, element = np.asarray(model.hidden), run.element_bytes
    # embedding and vectors, which no product reads
    beside: Mapping[Part, Any] = {"embedding": np.asarray(block.params, float) - sum(weights.values(), np.zeros(()))}
    every = {**weights, **beside}
    total: Any = sum((count * bytes_of_part(stored, part, element, row) for part, count in every.items()), np.zeros(()))
    ops = tuple(_with_format(op, stored, row, element) for op in block.ops)
    return replace(block, ops=ops, weight_bytes=total, formats=_by_format(stored, every))


def _by_format(stored: Stored, weights: Mapping[Part, Any]) -> dict[str, Any]:
    """Number of weights in each format."""
    numbers = dict[str, Any]()
    for part, count in weights.items():
        for entry in stored.get(part, ()):
            numbers[entry.format.name] = numbers.get(entry.format.name, 0.0) + count * np.asarray(entry.share)
    return numbers


def _with_format(op: Op, stored: Stored, row: Any, element: float) -> Op:
    """An operator that reads its weights in their format."""
    if not isinstance(op.work, Product) or op.kind not in _OF_WEIGHTS:  # attention multiplies no weights
        return op
    return replace(op, work=replace(op.work, weight_bytes=bytes_of_part(stored, _part_of(op.name), element, row)))


def _part_of(name: str) -> Part:
    """The part of the model whose weights an operator reads, by its name."""
    part = _PARTS_OF.get(name)
    below = next((part for prefix, part in _PREFIXES.items() if name.startswith(prefix)), None)
    return part or below or "attention"  # projections
