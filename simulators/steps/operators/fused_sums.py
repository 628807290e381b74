"""Partial sums of tensor parallelism and the norm that follows, in one kernel that adds in the switch (TokenWeave).

Each GPU computes the norm of its share of the tokens (arXiv:2505.11329). With c CTAs, the norm's time N(c) on so many
CUs, and B, r, w as of `simulators.costs.transfer.in_switch_seconds`:

    T = latency + max(w / B, w / (c r) + N(c))

CTAs add and norm in turn, and links carry what any of them orders (derived).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip
from simulators.costs.collective import Group
from simulators.costs.streaming import streaming_cost
from simulators.costs.transfer import in_switch_seconds
from simulators.hardware.parts import StreamingRates

Floats = NDArray[np.float64]
HALVES = ("A", "B")
"""Halves of the tokens of a prompt, of which each has sums of its own."""


def fused_sum_s(group: Group, payload: ArrayLike, *, normed_s: ArrayLike, ctas: int) -> Floats:
    """Time [s] of the kernel above for a tensor of `payload` bytes; normed_s: N(c).

    Raises ValueError for a group whose switch does not add.
    """
    rate = group.switched("all_reduce")
    if rate is None:
        raise ValueError("halves of tokens need a switch that adds: node.in_switch.collectives.all_reduce")
    wire = in_switch_seconds(rate, "all_reduce", group.num_gpus, payload) - rate.latency_s
    ordered = wire * rate.bytes_per_s / (ctas * rate.bytes_per_s_per_cta)  # by so many CTAs
    # links carry data while CTAs norm
    return np.asarray(rate.latency_s + np.maximum(wire, ordered + np.asarray(normed_s)))


def norm_s(chip: Chip, moved: ArrayLike, *, fitted: StreamingRates | None, ctas: int) -> Floats:
    """Time [s] of a norm that reads and writes `moved` bytes on so many CUs, within a kernel; fitted: its constants."""
    few = replace(chip, cus=np.minimum(ctas, np.asarray(chip.cus)))  # a norm on the CUs of its CTAs
    if fitted is None:
        return streaming_cost(few, moved, kernels=0).seconds
    return np.asarray(np.asarray(moved) / (fitted.hbm_share * few.drawable_bytes_per_s))
