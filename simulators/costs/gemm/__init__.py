"""GEMMs on one GPU, alone and beside other kernels: one cost for all backends, by the machine's model (`costs.gemm`).

    waves       the library's tiles at sustained rates; derived
    fitted      the library's tiles, constants fitted to measured GEMMs of the device:
                `library` where it is one of today, else `tiles`, of which convolutions and recurrent layers are made
    least       the least time of a GEMM in any pieces, by both models
    sharing     occupancy, and kernels that share a cache, after `waves`
    stages      waves of workgroups before a last-level cache, after `waves`

`gemms_of` is the way to all of them: it picks the model of a precision and the clock under load. Kernels that no
library has (fused ones) take the waves of `waves_as_fast`: as the model `waves` divides the work, in the time of the
machine's model.

All count workgroups on the tile that the library picks for all CUs of the GPU, which other kernels beside it do not
change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from simulators.costs.gemm.waves import GemmCost, GemmShape, WaveGemms
from simulators.hardware.machine import System

if TYPE_CHECKING:
    from simulators.costs.gemm.fitted import FittedGemms

__all__ = [
    "GemmCost",
    "GemmShape",
    "Gemms",
    "WaveGemms",
    "gemm_cost",
    "gemms_of",
    "waves_as_fast",
]

Gemms: TypeAlias = "WaveGemms | FittedGemms"
"""A GPU as a model of GEMMs reads it."""


def gemms_of(machine: System, precision: str, *, clock: ArrayLike | None = None, share: ArrayLike = 1.0) -> Gemms:
    """The GPU of a machine as its model of GEMMs reads it, at a clock over that of kernels measured one by one.

    clock: None for that of GEMMs under load. share: of the rate of these that a framework's products reach. Raises
    ValueError where the GPU lacks what the model needs.
    """
    if machine.gemm_model(precision) == "waves":  # whose rates are sustained
        return WaveGemms.of(machine.gpu, precision).slower(1 / np.asarray(share))
    from simulators.costs.gemm.fitted import FittedGemms

    loaded = machine.gpu.loaded
    if clock is None:  # models run for seconds
        clock = 1.0 if loaded is None else loaded.gemm_clock
    return FittedGemms.of(machine, precision).at_clock(np.asarray(clock) * share)


_MANY_WAVES = GemmShape(8192, 8192, 8192)
"""Of which the tiles fill all CUs many times, so that its time tells the rate of a tile."""


def waves_as_fast(machine: System, precision: str) -> WaveGemms:
    """The model `waves` of a GPU, whose tiles are as fast as those of the machine's model where waves are many.

    A kernel that no library has then keeps its own tiles, and what they leave idle of a last wave.
    """
    waves, model = WaveGemms.of(machine.gpu, precision), gemms_of(machine, precision)
    if isinstance(model, WaveGemms):
        return waves
    slower = model.cost(_MANY_WAVES).seconds / waves.cost(_MANY_WAVES).seconds
    return replace(waves.slower(slower), launch_s=model.launch_s)


def gemm_cost(gpu: Gemms, shape: GemmShape, *, taken: ArrayLike = 0) -> GemmCost:
    """Cost of GEMMs while other kernels hold `taken` of the CUs that the GPU grants."""
    return gpu.cost(shape, taken=taken)
