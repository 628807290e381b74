"""Kernels of one GPU while others move data: how much longer each takes (`gpu.contention`), in every part of the model.

T is a kernel's time alone on the c CUs of the GPU, of which kernels that move data hold c_h; T_left its time on the CUs
that they leave; f the slowdown of a GEMM by moved data (shared caches and HBM, `contention.gemm_beside_cus`); u and u_m
the shares of the HBM's rate that the kernel and the movers draw alone:

    GEMM        max(T_left, f T)          workgroups in waves on fixed CUs: the waves that are added hide interference
                f T_left                  workgroups that are dealt out freely lose both
    attention   T c / (c - c_h)           one kernel on all CUs, which computes
    streams     T max(1, u + u_m)         bound by memory: no slower as long as the HBM serves both

GEMM: measured (docs/explanation/contention.md); attention and streams: derived. `Sharing` is the one place of these
laws: schedules (`search_spaces.chunk_costs`), steps (`simulators.steps.overlap`), recorded profiles
(`dse_traces.laws`) and serving (`dse_serving.step_times`) ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sharing:
    """Laws of a GPU. interference: f, 1 where nothing is known of it. static: whether workgroups have fixed CUs."""

    interference: ArrayLike = 1.0
    static: bool = True

    @classmethod
    def of(cls, gpu: Any) -> Sharing:
        """Laws of a GPU's constants (`gpu.contention` and `gpu.gemm`, either of which may be absent)."""
        interference = 1.0 if gpu.contention is None else gpu.contention.gemm_beside_cus
        return cls(interference, gpu.gemm is None or gpu.gemm.assignment == "static")

    def gemm(self, left_s: ArrayLike, full_s: ArrayLike) -> Floats:
        """Time [s] of GEMMs while kernels move data. left_s: alone on the CUs that these leave; full_s: on all CUs."""
        interference = np.asarray(self.interference, float)
        if not self.static:
            return np.asarray(interference * left_s)
        return np.asarray(np.maximum(left_s, interference * full_s))

    @staticmethod
    def attention(seconds: ArrayLike, cus: ArrayLike, held: ArrayLike) -> Floats:
        """Time [s] of attention in one kernel, while others hold `held` of `cus` CUs."""
        count = np.asarray(cus, float)
        return np.asarray(seconds * count / (count - np.asarray(held, float)))

    @staticmethod
    def stream(seconds: ArrayLike, drawn: ArrayLike, moved: ArrayLike) -> Floats:
        """Time [s] of kernels that memory bounds. drawn, moved: shares of the HBM's rate, u and u_m."""
        return np.asarray(seconds * np.maximum(1.0, np.asarray(drawn, float) + moved))
