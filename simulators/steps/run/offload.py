"""Activations that wait in the host's memory for the backward pass (`run.offloaded_layers`).

Of o of the n layers of a stage, the activations K of a layer are copied to the host while the forward pass goes on, and
back before their backward pass (ZeRO-Offload's overlap, arXiv:2101.06840, section 4; Megatron-LM's --cpu-offloading). A
GPU keeps (n - o) K, and of o K / r, at the rate r of its link to the host, waits for what a pass does not hide:

    max(0, o K / r - F) + max(0, o K / r - B)

of a forward pass F and a backward pass B of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulators.steps.operators.sizes import Sizes
from simulators.steps.operators.work import ModelBlock
from simulators.steps.run.layer_passes import share_of_stage
from simulators.steps.run.passes import ENDS


def offloaded(blocks: Sequence[ModelBlock], sizes: Sizes) -> tuple[ModelBlock, ...]:
    """Blocks whose layers keep a share of their activations in the host's memory."""
    chosen = sizes.run.offloaded_layers
    if chosen is None:
        return tuple(blocks)
    share = share_of_stage(sizes, chosen)
    return tuple(block if block.name in ENDS else _offloaded_block(block, share) for block in blocks)


def _offloaded_block(block: ModelBlock, share: Any) -> ModelBlock:
    kept = np.asarray(block.kept, float)
    return replace(block, kept=(1 - share) * kept, offloaded=share * kept)


def waited_s(moved: Any, bytes_per_s: Any, forward_s: Any, backward_s: Any) -> Any:
    """Time of a micro-batch in which its GPU waits for copies to its host and back [s]. moved: bytes of one way."""
    copied = np.asarray(moved, float) / np.asarray(bytes_per_s, float)
    return np.maximum(copied - forward_s, 0.0) + np.maximum(copied - backward_s, 0.0)
