"""Kernels that a host launches one by one, ahead of a GPU that runs them.

The host works through stretches of kernels with launches of h_1, h_2, ... s, the GPU runs them in g_1, g_2, ... s, no
kernel before its launch. From a point where the GPU has nothing left to run, all are done after

    T = max over k of (h_1 + ... + h_k + g_(k+1) + ... + g_n),      k = 0 ... n

(the completion of a queue whose stretches are fluid; derived). Megatron-LM waits for its GPU before and after the
forward pass of each micro-batch, and the backward pass, so that its timers are right (`torch.cuda.synchronize` in
`megatron/global_vars.py`, `forward_step` and `backward_step` of `megatron/schedules.py` of NVIDIA/Megatron-LM at
6985e58): each pass drains. A framework that routes tokens to experts without dropping any waits for their counts before
it launches the experts (`ExpertKernels.waits`): a layer drains from one dispatch to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Stretch = tuple[Any, Any]
"""Launches and run [s] of kernels in a row; arrays over designs."""


def drained_s(stretches: Sequence[Stretch]) -> Floats:
    """Time [s] from an idle GPU until it is idle again."""
    # k = 0: the GPU has all of it to run
    launched, left = np.zeros(()), sum((run for _, run in stretches), np.zeros(()))
    longest = left
    for launch, run in stretches:
        launched, left = launched + launch, left - run
        longest = np.maximum(longest, launched + left)
    return np.asarray(longest, float)
