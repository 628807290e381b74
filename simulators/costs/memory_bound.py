"""Costs of the compute operators of a written-out workload on one GPU, and the effect of a loss of occupancy.

    GEMM        simulators/costs/gemm_cost.py                        MLP    its GEMMs, one after another, each a kernel
    embedding   T = bytes / (gather_efficiency B),   bytes = (P + 1) out, backward (2 P + 1) out
    GEMV        T = bytes / (stream_efficiency B)
    elementwise the same, every tensor read or written once

B is the HBM rate, or less if fewer requests are in flight than its latency needs (Little's law): at an occupancy loss
p, B = min(HBM rate, (1 - p) CUs in_flight_bytes_per_cu / memory_latency_s), and a CU has 1 - p of its matrix rate. So a
compute-bound kernel takes 1 / (1 - p) times as long, and a bandwidth-bound one hardly longer (derived).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.gemm_cost import GemmShape, gemm_cost, gemm_gpu
from simulators.hardware.system import ScheduleGpu, System
from simulators.workloads.operators import Compute, Elementwise, Embedding, Gemm, Gemv

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class KernelCost:
    """Isolated time [s] without launches, HBM traffic [bytes], FLOP; number of kernel launches."""

    seconds: Floats
    hbm_bytes: Floats
    flop: Floats
    num_kernels: float


def kernel_cost(system: System, op: Compute, *, occupancy_loss: ArrayLike = 0.0) -> KernelCost:
    """Cost of an operator on one GPU of a system with the section `persistent`. Numbers may be arrays."""
    gpu = _derate(system, occupancy_loss)
    if isinstance(op, (Embedding, Gemv, Elementwise)):
        assert system.gpu.persistent is not None
        gathers = isinstance(op, Embedding)
        share = system.gpu.persistent.gather_efficiency if gathers else system.gpu.persistent.stream_efficiency
        top = np.asarray(system.gpu.hbm_bytes_per_s) * share
        seconds = op.bytes / np.minimum(top, gpu.hbm_bytes_per_s)
        return KernelCost(np.asarray(seconds), np.asarray(op.bytes, float), np.asarray(op.flop, float), 1.0)
    count, shape = (
        (1.0, (op.m, op.local_n, op.local_k)) if isinstance(op, Gemm) else (op.num_gemms, (op.rows,) + 2 * (op.width,))
    )
    derated = gemm_gpu(system.model_copy(update={"gpu": gpu}), op.precision, model=system.costs.gemm)
    cost = gemm_cost(derated, GemmShape(*shape))
    return KernelCost(count * cost.seconds, count * cost.hbm_bytes, count * cost.flop, count)


def _derate(system: System, occupancy_loss: ArrayLike) -> ScheduleGpu:
    """Derate the GPU's rates of arithmetic and HBM for a loss of occupancy."""
    gpu, persistent = system.gpu, system.gpu.persistent
    assert persistent is not None
    left = 1 - np.asarray(occupancy_loss, float)
    fed = left * gpu.num_cus * persistent.in_flight_bytes_per_cu / persistent.memory_latency_s
    hbm = np.minimum(gpu.hbm_bytes_per_s, fed)
    changed: dict[str, Any] = {
        "matrix_flop_per_s_per_cu": left * gpu.matrix_flop_per_s_per_cu,
        "hbm_bytes_per_s": hbm,
    }
    if gpu.efficiency is not None and gpu.peak_flop_per_s is not None and gpu.peak_hbm_bytes_per_s is not None:
        changed["peak_flop_per_s"] = {name: left * rate for name, rate in gpu.peak_flop_per_s.items()}
        changed["peak_hbm_bytes_per_s"] = gpu.peak_hbm_bytes_per_s * hbm / gpu.hbm_bytes_per_s
    return gpu.model_copy(update=changed)
