"""Recurrent layers alone: LSTM, GRU and vanilla, forward and both backward passes, step after step.

A cell of g gates, hidden size h, batch n, t steps, without the product of its input (DeepBench's skip-input layers):

    O        = 12 us d g + 10 b (g + 1) h n / H               launches of a step, and its element-wise passes
    forward  = t (O + L),  g GEMMs (h, n, h) side by side, K = h
    data     = t (O + L),  one GEMM (h, n, g h), K = g h
    filter   = one GEMM (g h, h, n t) after the last step, + 100 us d: packing, and the biases' reductions
    L        = least over the GEMM's kernels of sqrt((J T)^2 + (y ceil(K/z))^2)        J = g forward, 1 backward
             = sqrt((FLOP / (e c p))^2 + (bytes / H)^2 + (y K)^2)                      for batches of 17 to 32

Where a library runs all steps of a pass in one kernel (GRU and vanilla, not LSTM, where `fused_setup_s` is known), no
step is launched, and the pass is set up once: forward, data = (g + 1) fused_setup_s + t L.

y (`latency_s`) is fitted for each device and precision: the latency of a chain of dependent loads, per element of K. At
17 to 32 columns libraries run one kernel that does not split K, so its chain is whole: on Pascal it takes two to four
times as long as a batch of 16 or 64. d = (y / 0.1 us)^(1/4): devices that wait longer for loads launch more slowly,
too; the exponent is empirical. The numbers are the same for all devices (`conf/data/operators.yaml`). Symbols as in
`simulators.costs.gemm.fitted`. FLOP of a step: 2 g h^2 n; bytes: b (g h^2 + (g + 1) h n).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.chip import Chip, Cost
from simulators.costs.gemm.fitted import products_of, quickest
from simulators.hardware.shared import shared_constants

Floats = NDArray[np.float64]

GATES: Mapping[str, int] = {"lstm": 4, "gru": 3, "vanilla": 1}
"""Matrices of a recurrent cell that are multiplied with its state in every step."""


def recurrent(chip: Chip, gates: ArrayLike, hidden: ArrayLike, batch: ArrayLike, steps: ArrayLike) -> Cost:
    """Costs [..., 3] of the forward, backward-data and backward-filter pass. gates: 4 LSTM, 3 GRU, 1 vanilla."""
    g, h, n, t = (np.asarray(value, float) for value in np.broadcast_arrays(gates, hidden, batch, steps))
    element = np.asarray(chip.element_bytes)
    shared = shared_constants().recurrent
    slowness = (np.asarray(chip.latency_s) / shared.usual_latency_s) ** shared.latency_power
    # without launches where one kernel runs all steps
    passes_s = shared.passes * element * (g + 1) * h * n / chip.bandwidth
    begin, overhead = _overheads(chip, shared.gate_s * slowness * g + passes_s, g)
    forward = begin + t * (overhead + _step(chip, (g, h, n), depth=h, repeats=g))  # a GEMM for each gate, side by side
    # the gates' gradients in one product
    data = begin + t * (overhead + _step(chip, (g, h, n), depth=g * h, repeats=np.ones_like(g)))
    # one product over all steps, after the last
    product_s = quickest(products_of(chip, (g * h, h, n * t)))[0]
    weights = product_s + np.asarray(chip.launch_s) + shared.filter_s * slowness
    flop, traffic = 2 * g * h * h * n * t, element * t * (g * h * h + (g + 1) * h * n)
    # states and gradients of all steps are read once, weights written once
    last = element * (g * h * n * t + h * n * t + g * h * h)
    return Cost.of(
        np.stack([flop] * 3, axis=-1),
        np.stack(np.broadcast_arrays(traffic, traffic, last), axis=-1),
        np.stack(np.broadcast_arrays(forward, data, weights), axis=-1),
    )


def _overheads(chip: Chip, launched: Floats, gates: Floats) -> tuple[Floats, Floats]:
    """Time [s] before the first step, and of each step beside its products, `launched` if kernels run step by step."""
    if chip.fused_setup_s is None:
        return np.zeros_like(launched), launched
    fused = gates != GATES["lstm"]  # libraries fuse GRU and vanilla, not LSTM
    begin = (gates + 1) * np.asarray(chip.fused_setup_s)
    return np.where(fused, begin, 0.0), np.where(fused, 0.0, launched)


def _step(chip: Chip, sizes: tuple[Floats, Floats, Floats], *, depth: Floats, repeats: Floats) -> Floats:
    """L: the products of one step with the state."""
    g, h, n = sizes
    chain = np.asarray(chip.latency_s)
    products = products_of(chip, (h, n, depth))
    split, _ = quickest(replace(products, repeats=repeats * np.asarray(products.repeats), chain_s=chain))
    traffic = np.asarray(chip.element_bytes) * (g * h * h + (g + 1) * h * n)
    parts = (2 * g * h * h * n / chip.reached_flop_per_s, traffic / chip.bandwidth, chain * depth)
    # a soft maximum: arithmetic, traffic and the chain of loads overlap in part
    unsplit = np.sqrt(sum(np.square(part) for part in parts))
    # between small and large batches, libraries run one kernel
    shared = shared_constants().recurrent
    return np.where((n > shared.unsplit_above) & (n <= shared.unsplit_up_to), unsplit, split)
