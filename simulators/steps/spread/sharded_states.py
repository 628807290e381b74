"""Exchange of the states that the GPUs of dp split (`simulators.workloads.spreading.ShardedData`), in closed form.

With n equal layers, f and b the time of one of them in the forward and the backward pass of a micro-batch, g the time
to gather its weights, r to reduce its gradients, and one wire for both:

    zero   each micro-batch                                   after the last backward pass, or beside it
    0                                                         all-reduce of gradients
    1                                                         reduce-scatter, update, all-gather of weights
    2      backward: reduce-scatter of gradients              update, all-gather of weights
    3      forward: g each layer; backward: g and r each      update

    forward longer by    g + (n - 1) (B(f, g) - f)                  (prefetched; n g if not)
    backward longer by   g + (n - 1) (B(b, g + r) - b) + r,         without g where weights were not dropped

B(c, e): until compute that takes c alone and an exchange that takes e alone have both ended, which begin at once. While
both run, compute progresses at the share s of its rate, the exchange at q
(`simulators.steps.overlap.gradient_contention`):

    B = t + max(c - s t, 0) + max(e - q t, 0)    t = min(c / s, e / q)          so max(c, e) where nothing slows

The first layer's weights have nothing to be gathered beside, and the last gradients nothing to be reduced beside
(derived; FSDP, arXiv:2304.11277, section 3.3). In bytes ZeRO 3 moves 1.5 times what ZeRO 0 does (arXiv:1910.02054,
section 7): an all-gather or a reduce-scatter is half an all-reduce. A framework may copy weights and gradients out of
and into its buffers (`kernels.shard_copies`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.steps.operators.work import ModelBlock
from simulators.steps.overlap.gradient_contention import SideBySide
from simulators.workloads.spreading import ShardedData

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SplitLayers:
    """`count` equal layers: times [s] of one in each pass, to gather its weights, to reduce its gradients; arrays.

    gather_copy_s, reduce_copy_s: of copies out of the buffer of a gather and into that of a reduction, which compute
    waits for. forward, backward: what each pass and the exchanges beside it do to one another.
    """

    count: ArrayLike
    forward_s: ArrayLike
    backward_s: ArrayLike
    gather_s: ArrayLike
    reduce_s: ArrayLike
    gather_copy_s: ArrayLike = 0.0
    reduce_copy_s: ArrayLike = 0.0
    forward: SideBySide = field(default_factory=SideBySide)
    backward: SideBySide = field(default_factory=SideBySide)

    def gathers(self, knobs: ShardedData) -> int:
        """Number of times that weights are gathered in a micro-batch."""
        # gathered again in the backward pass, as the forward pass dropped them
        return 0 if knobs.zero < 3 else (2 if knobs.reshard else 1)

    def exchanged_s(self, knobs: ShardedData) -> Floats:
        """Time of all exchanges of one micro-batch, hidden or not."""
        exchange_s = self.gathers(knobs) * np.asarray(self.gather_s, float)
        exchange_s = exchange_s + (np.asarray(self.reduce_s, float) if knobs.zero > 1 else 0.0)
        return np.asarray(np.asarray(self.count, float) * exchange_s)

    def exposed_s(self, knobs: ShardedData) -> tuple[Floats, Floats]:
        """Time by which exchanges lengthen the forward and the backward pass of one micro-batch, slowdowns included."""
        if knobs.zero < 2:  # gradients are reduced once, after the last micro-batch
            return np.zeros(()), np.zeros(())
        gathers = self.gathers(knobs)
        # nothing is reduced in the forward pass
        forward = self._longer(knobs, self.forward, self.forward_s, self.gather_s if gathers else 0.0, 0.0)
        gathered = self.gather_s if gathers > 1 else 0.0
        return forward, self._longer(knobs, self.backward, self.backward_s, gathered, self.reduce_s)

    def copied_s(self, knobs: ShardedData) -> Floats:
        """Time that copies take in one micro-batch."""
        if knobs.zero < 2:
            return np.zeros(())
        copies = self.gathers(knobs) * np.asarray(self.gather_copy_s) + np.asarray(self.reduce_copy_s)
        return np.asarray(np.asarray(self.count) * copies)

    def _longer(self, knobs: ShardedData, beside: SideBySide, *seconds: Any) -> Floats:
        """Time by which a pass is longer. seconds: of one layer, to gather its weights, to reduce its gradients."""
        n, compute, gather, reduce = (np.asarray(value, float) for value in (self.count, *seconds))
        if not knobs.prefetch:  # each layer waits for its own weights
            left = np.maximum(reduce - gather, 0.0)
            longer = n * gather + (n - 1) * beside.longer_s(compute, left) + reduce
        else:
            longer = gather + (n - 1) * beside.longer_s(compute, gather + reduce) + reduce
        return np.asarray(np.where(n > 0, longer, 0.0), float)  # a stage without such layers


def state_splits(knobs: ShardedData, dp: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """GPUs over which each of weights, gradients and the optimizer's state is split."""
    size, whole = np.asarray(dp, float), np.ones(())
    return (
        size if knobs.zero > 2 else whole,
        size if knobs.zero > 1 else whole,
        size if knobs.zero > 0 else whole,
    )


def gathered_weights(knobs: ShardedData, blocks: Sequence[ModelBlock], counts: Mapping[str, Floats]) -> Any:
    """Weights that a GPU of ZeRO 3 holds whole at once: of the largest block and of the one that is gathered meanwhile,
    or of all where the forward pass leaves them.
    """
    if knobs.zero < 3:
        return np.zeros(())
    if not knobs.reshard:
        return sum((np.asarray(block.params, float) * counts[block.name] for block in blocks), np.zeros(()))
    return largest_block(blocks) * (2 if knobs.prefetch else 1)  # the layer that runs and the next


def largest_block(blocks: Sequence[ModelBlock]) -> Floats:
    """Weights of the block that has most."""
    return np.asarray(np.maximum.reduce(np.broadcast_arrays(*(np.asarray(block.params, float) for block in blocks))))
