"""Blocks of a model of any kind, and the weights that they have in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simulators.steps.operators.recurrent import speech_blocks, translation_blocks
from simulators.steps.operators.work import ModelBlock
from simulators.steps.run.transformer import transformer_blocks
from simulators.workloads.model import Kernels, Model, Parallel, Run, Speech, Translation


def model_blocks(model: Model, run: Run, parallel: Parallel, kernels: Kernels) -> tuple[ModelBlock, ...]:
    """Blocks of a model, in the order of the forward pass."""
    if isinstance(model, Speech):
        return speech_blocks(model, run)
    if isinstance(model, Translation):
        return translation_blocks(model, run)
    return transformer_blocks(model, run, parallel, kernels)


@dataclass(frozen=True)
class ModelWeights:
    """Weights of a whole model, and how many have a format of their own, by its name."""

    number: float
    formats: Mapping[str, float]


def model_weights(model: Model, run: Run, kernels: Kernels) -> ModelWeights:
    """Weights of a model, on all GPUs together."""
    blocks, formats = model_blocks(model, run, Parallel(), kernels), dict[str, float]()
    for block in blocks:
        for name, count in block.formats.items():
            formats[name] = formats.get(name, 0.0) + float(np.asarray(block.count) * np.asarray(count))
    return ModelWeights(sum(float(np.asarray(block.count) * np.asarray(block.params)) for block in blocks), formats)
