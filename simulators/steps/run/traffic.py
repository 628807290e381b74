"""Bytes that one GPU sends over links in an iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.steps.run.iteration import TRAINED, Gradients, Iteration

Floats = NDArray[np.float64]


def wire_bytes(iteration: Iteration) -> Floats:
    """Bytes that a GPU sends in the collectives of all micro-batches, but for messages to other stages."""
    passes: Any = sum((part.times * part.spent.wire_bytes for part in iteration.passes.parts), np.zeros(()))
    return np.asarray(iteration.passes.micro_batches * passes + _of_gradients(iteration.gradients))


def _of_gradients(gradients: Gradients) -> Floats:
    """Bytes of all exchanges of gradients, and of split weights."""
    passes = gradients.passes
    if not passes.is_training:
        return np.zeros(())
    zero, times = passes.parallel.zero, passes.micro_batches
    params, of_experts = (passes.parallel.held_stages * passes.of_blocks(name) for name in TRAINED)
    reduced = gradients.reduction(params, of_experts).wire_bytes * (times if zero > 1 else 1)
    if not zero:
        return np.asarray(reduced)
    gathers: Any = 1  # after the update
    if zero > 2:  # all weights, before each pass of a micro-batch that has dropped them
        params, of_experts = (passes.of_blocks(name) for name in ("params", "expert_params"))
        gathers = times * (2 if passes.parallel.reshard else 1)
    gathered = gradients.split_exchange(passes.run.element_bytes, params, of_experts, "all_gather").wire_bytes
    return np.asarray(reduced + gathers * gathered)
