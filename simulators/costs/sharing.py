"""Kernels of one GPU while others move data: how much longer each takes (`gpu.contention`), in every part of the model.

T is a kernel's time alone on the c CUs of the GPU, of which kernels that move data hold c_h; T_left its time on the CUs
that they leave; f the slowdown of a GEMM by moved data (shared caches and HBM, `contention.gemm_beside_cus`); u and u_m
the shares of the HBM's rate that the kernel and the movers draw alone:

    GEMM        max(T_left, f T)          workgroups in waves on fixed CUs: the waves that are added hide interference
                f T_left                  workgroups that are dealt out freely lose both
    attention   T c / (c - c_h)           one kernel on all CUs, which computes
    streams     T max(1, u + u_m)         bound by memory: no slower as long as the HBM serves both
    engines     d T                       copy engines instead of kernels move data; what they move is slowed alike

Where the movers end before the GEMM, at h, its time is h and what is left of the work, at the rate alone. With W
workgroups on fixed CUs, each a time w, it is no less than that of whole waves, as a CU that is freed begins one anew:

    T = min { T : (c - c_h) floor(T / w) + c_h floor((T - h) / w) >= min((1 + e) W, c ceil(W / c)) }

e: work by which waves must be deeper than their workgroups, as these do not end at once (`contention.wave_slack`).

d: `contention.dma_beside_gemm`. GEMM and engines: measured (docs/explanation/contention.md); attention and streams:
derived. This module is the one place of these laws: schedules (`search_spaces.chunk_costs`), steps
(`simulators.steps.overlap`), recorded profiles (`dse_traces.laws`) and serving (`dse_serving.step_times`) ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class HeldCus:
    """CUs that movers hold beside a GEMM of so many workgroups: `taken` of `cus`, for `seconds` from its start."""

    workgroups: ArrayLike
    cus: ArrayLike
    taken: ArrayLike
    seconds: ArrayLike

    def waves(self, alone_s: ArrayLike, slack: ArrayLike) -> Floats:
        """Time [s] of the whole waves of a GEMM that takes `alone_s` alone. slack: e."""
        count, cus, taken = (np.asarray(number, float) for number in (self.workgroups, self.cus, self.taken))
        alone = np.maximum(np.ceil(count / cus), 1.0)
        wave_s = np.asarray(alone_s, float) / alone
        # alone, its waves are as deep as they were measured
        work = np.maximum(np.minimum(count * (1 + np.asarray(slack, float)), alone * cus), count)
        until = np.asarray(self.seconds, float) / wave_s
        last_wave, next_wave = np.floor(until), np.ceil(until)
        ends = (
            np.ceil(work / (cus - taken)),  # on the CUs that are left
            np.maximum(next_wave, np.ceil((work + taken * next_wave) / cus)),  # with a wave of the first CUs
            until + np.maximum(np.ceil((work - (cus - taken) * last_wave) / cus), 0.0),  # with one of the freed CUs
        )
        return np.asarray(wave_s * np.minimum.reduce(np.broadcast_arrays(*ends)))


@dataclass(frozen=True)
class Sharing:
    """Laws of a GPU. interference: f, 1 where nothing is known of it. static: whether workgroups have fixed CUs.

    slack: e of waves beside movers that end before the GEMM.
    """

    interference: ArrayLike = 1.0
    static: bool = True
    slack: ArrayLike = 0.0

    @classmethod
    def of(cls, gpu: Any) -> Sharing:
        """Laws of a GPU's constants (`gpu.contention` and `gpu.gemm`, either of which may be absent)."""
        static = gpu.gemm is None or gpu.gemm.assignment == "static"
        if gpu.contention is None:
            return cls(static=static)
        slack = gpu.contention.wave_slack
        return cls(gpu.contention.gemm_beside_cus, static, 0.0 if slack is None else slack)

    def gemm(self, left_s: ArrayLike, full_s: ArrayLike) -> Floats:
        """Time [s] of GEMMs while kernels move data. left_s: alone on the CUs that these leave; full_s: on all CUs."""
        interference = np.asarray(self.interference, float)
        if not self.static:
            return np.asarray(interference * left_s)
        return np.asarray(np.maximum(left_s, interference * full_s))

    def gemm_until(self, left_s: ArrayLike, full_s: ArrayLike, beside: HeldCus) -> Floats:
        """Time [s] of GEMMs beside movers that may end before them; `left_s` and `full_s` as of `gemm`."""
        slowed, full, until = self.gemm(left_s, full_s), np.asarray(full_s, float), np.asarray(beside.seconds, float)
        spread = np.where(until < slowed, until + full * (1 - until / slowed), slowed)
        return np.maximum(spread, beside.waves(full, self.slack)) if self.static else np.asarray(spread)

    @staticmethod
    def attention(seconds: ArrayLike, cus: ArrayLike, held: ArrayLike) -> Floats:
        """Time [s] of attention in one kernel, while others hold `held` of `cus` CUs."""
        count = np.asarray(cus, float)
        return np.asarray(seconds * count / (count - np.asarray(held, float)))

    @staticmethod
    def stream(seconds: ArrayLike, drawn: ArrayLike, moved: ArrayLike) -> Floats:
        """Time [s] of kernels that memory bounds. drawn, moved: shares of the HBM's rate, u and u_m."""
        return np.asarray(seconds * np.maximum(1.0, np.asarray(drawn, float) + moved))


def beside_engines(gpu: Any, *, withheld: ArrayLike) -> Floats:
    """Factor (0, 1] on the rates of a GEMM and of transfers by DMA engines beside one another, both alike.

    What `dma_beside_gemm` adds to 1 is of a GEMM on all CUs: requests in flight, and with them the queues at caches and
    HBM, are as many as the CUs that it runs on (assumed).
    """
    share = 1 - np.asarray(withheld, float) / gpu.num_cus
    return np.asarray(1 / (1 + (np.asarray(gpu.contention.dma_beside_gemm, float) - 1) * share))
