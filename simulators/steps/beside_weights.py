"""Sums of tp in the backward pass beside gradients of weights (`parallel.backward_sums`).

The sum of an input's gradients (all-reduce, or reduce-scatter of sequence parallelism) is launched before the gradient
of the same layer's weights, which does not need it. With c the sum's time, w the product's alone, and f the slowdown of
kernels while others move data (`gpu.contention.gemm_beside_cus`), both end after

    T = max(c, w + (f - 1) min(c, w))

of which w counts as the product's and the rest as the sum's (derived; Megatron-LM's asynchronous all-reduce,
`megatron/mpu/layers.py` of NVIDIA/Megatron-LM at 189e72a).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from simulators.steps.operators import Exchange, Op, OperatorCost


def beside_weights(ops: Sequence[Op], costs: Sequence[OperatorCost], interference: ArrayLike) -> list[OperatorCost]:
    """Costs of operators of which each backward sum runs beside the gradient of weights that follows it at once."""
    result = list(costs)
    for place, (op, following) in enumerate(itertools.pairwise(ops)):
        if isinstance(op.work, Exchange) and op.work.over == "tp" and op.phase == "backward" and following.weight:
            summed, product = costs[place].seconds, costs[place + 1].seconds
            slowed = product + (np.asarray(interference) - 1) * np.minimum(summed, product)
            result[place] = replace(costs[place], seconds=np.maximum(summed, slowed) - product)
    return result
