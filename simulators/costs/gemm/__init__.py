"""GEMMs on one GPU, alone and beside other kernels: one cost, by the model that the machine names (`costs.gemm`).

    waves       the library's tiles at sustained rates; derived
    fitted      the library's tiles, constants fitted to measured GEMMs of the device:
                `library` where it is one of today, else `tiles`, of which convolutions and recurrent layers are made
    least       the least time of a GEMM in any pieces, by both models
    sharing     occupancy, and kernels that share a cache, after `waves`
    stages      waves of workgroups before a last-level cache, after `waves`

All count workgroups on the tile that the library picks for all CUs of the GPU, which other kernels beside it do not
change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from simulators.costs.gemm.cost import Floats, GemmCost, GemmShape
from simulators.costs.gemm.waves import WaveGemms
from simulators.hardware.machine import GemmModel, Gpu, System

if TYPE_CHECKING:
    from simulators.costs.gemm.fitted import FittedGemms

__all__ = ["GemmCost", "GemmShape", "Gemms", "WaveGemms", "beside_cu_copies", "gemm_cost", "gemms_of"]

Gemms: TypeAlias = "WaveGemms | FittedGemms"
"""A GPU as a model of GEMMs reads it."""


def gemms_of(machine: System, precision: str, *, model: GemmModel) -> Gemms:
    """The GPU of a machine as a model of GEMMs reads it. Raises ValueError where it lacks what the model needs."""
    if model == "waves":
        return WaveGemms.of(machine.gpu, precision)
    from simulators.costs.gemm.fitted import FittedGemms

    return FittedGemms.of(machine, precision)


def gemm_cost(gpu: Gemms, shape: GemmShape, *, taken: ArrayLike = 0) -> GemmCost:
    """Cost of GEMMs while other kernels hold `taken` of the CUs that the GPU grants."""
    return gpu.cost(shape, taken=taken)


def beside_cu_copies(gpu: Gpu, granted: Floats, full: Floats) -> Floats:
    """Time [s] of a GEMM while kernels move data.

    granted, full: its time alone on the CUs that these leave, and on all CUs [s], with the same tile. Static tiles: the
    waves that are added hide what is lost within them, so of lost CUs and interference the larger counts,
    max(T_granted, f T_full). Others lose both, f T_granted. How that was found: docs/explanation/contention.md.
    """
    interference = np.asarray(gpu.contention.gemm_beside_cus)  # shared caches and HBM
    if gpu.gemm.assignment != "static":  # workgroups that are dealt out freely lose CUs and interference
        return np.asarray(interference * granted)
    return np.asarray(np.maximum(granted, interference * full))
