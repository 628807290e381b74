"""Costs of the compute operators of a written-out workload on one GPU, and what communicating costs them.

    GEMM        simulators/costs/gemm/                               MLP    its GEMMs, one after another, each a kernel
    embedding   T = bytes / min(gather_efficiency B, F_0),   bytes = (P + 1) out, backward (2 P + 1) out
    GEMV        T = bytes / min(stream_efficiency B, F_0)
    elementwise the same, every tensor read or written once

B is the HBM rate, F_0 that of all requests in flight (R at p = 0). A kernel that communicates has less of its time's
requests in flight, by Little's law: at an occupancy loss p, with s bytes/s that it stores into peers' memory, each t_s
longer in flight than a byte that it stores here, the CUs keep

    R  = (1 - p) CUs in_flight_bytes_per_cu / L,    F = R N / (N + s t_s / L)
    t_s = o_post, where a result is stored at the peer at once; 2 L + o_post, where it is stored here, read and stored

bytes/s of their own under way, where N is needed: of HBM what the operator reaches without them, of a GEMM what its
tiles take in. Its rate is u(F / N) / u(F_0 / N) of that without losses (F_0), with u(x) = x / sqrt(1 + x^2) as in
`simulators.costs.transfer`: little where requests abound, 1 - p where latency bounds (derived).

Of a GPU without the section `persistent` neither F_0 nor the rate of random rows is known: its kernels are bound by
stream_efficiency B, the most that they can reach, and none of them communicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.costs.transfer import link_utilisation
from simulators.hardware.machine import Gpu, System
from simulators.hardware.parts import ELEMENT_BYTES, Persistent
from simulators.workloads.operators import Compute, Elementwise, Embedding, Gemm, Gemv

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class KernelCost:
    """Isolated time [s] without launches, HBM traffic [bytes], FLOP; number of kernel launches."""

    seconds: Floats
    hbm_bytes: Floats
    flop: Floats
    num_kernels: float


@dataclass(frozen=True)
class PeerStores:
    """Stores of a kernel into peers' memory [bytes/s]. copied: of results that it has stored here and reads again."""

    bytes_per_s: ArrayLike = 0.0
    copied: bool = False


def kernel_cost(
    system: System, op: Compute, *, occupancy_loss: ArrayLike = 0.0, stores: PeerStores = PeerStores()
) -> KernelCost:
    """Cost of an operator on one GPU of a system. Numbers may be arrays.

    stores: into peers' memory, meanwhile; these, and a loss, need the section `persistent`.
    """
    losses = np.asarray(occupancy_loss, float), stores
    if isinstance(op, (Embedding, Gemv, Elementwise)):
        top = _top_rate(system.gpu, gathers=isinstance(op, Embedding))
        seconds = op.bytes / (top * rate_kept(system, top, *losses))
        return KernelCost(np.asarray(seconds), np.asarray(op.bytes, float), np.asarray(op.flop, float), 1.0)
    count, shape = (
        (1.0, (op.m, op.local_n, op.local_k)) if isinstance(op, Gemm) else (op.num_gemms, (op.rows,) + 2 * (op.width,))
    )
    cost = gemm_cost(gemms_of(system, op.precision), GemmShape(*shape))
    kernel = cost.kernel
    taken_in = cost.flop / kernel.compute_s * ELEMENT_BYTES[op.precision] * (1 / kernel.rows + 1 / kernel.cols) / 2
    slower = _derate(system.gpu, rate_kept(system, taken_in, *losses))
    slower_gpu = gemms_of(system.model_copy(update={"gpu": slower}), op.precision)
    cost = gemm_cost(slower_gpu, GemmShape(*shape))
    return KernelCost(count * cost.seconds, count * cost.kernel.hbm_bytes, count * cost.flop, count)


def _top_rate(gpu: Gpu, *, gathers: bool) -> Floats:
    """Rate [bytes/s] of an operator that the HBM bounds, alone and without losses. gathers: it reads random rows."""
    persistent, hbm = gpu.persistent, np.asarray(gpu.hbm_bytes_per_s, float)
    if persistent is None:
        return hbm * gpu.stream_share
    share = persistent.gather_efficiency if gathers else gpu.stream_share
    return np.minimum(hbm * share, _under_way(gpu, persistent))


def _derate(gpu: Gpu, kept: ArrayLike) -> Gpu:
    """The GPU with a share of its rates of arithmetic."""
    changed: dict[str, Any] = {"matrix_flop_per_s_per_cu": kept * np.asarray(gpu.matrix_flop_per_s_per_cu)}
    if gpu.peak_flop_per_s is not None:
        changed["peak_flop_per_s"] = {name: kept * np.asarray(rate) for name, rate in gpu.peak_flop_per_s.items()}
    return gpu.model_copy(update=changed)


def _under_way(gpu: Gpu, persistent: Persistent) -> Floats:
    """Rate [bytes/s] at which all requests of the CUs that are in flight are served, by Little's law."""
    return np.asarray(gpu.num_cus) * persistent.in_flight_bytes_per_cu / persistent.memory_latency_s


def rate_kept(system: System, needed: ArrayLike, occupancy_loss: ArrayLike, stores: PeerStores) -> Floats:
    """Share (0, 1] of its rate that an operator keeps which needs `needed` bytes/s under way, by Little's law."""
    persistent, need = system.gpu.persistent, np.asarray(needed, float)
    if persistent is None and not np.any(occupancy_loss) and not np.any(stores.bytes_per_s):
        return np.ones(need.shape)
    assert persistent is not None
    latency, full = persistent.memory_latency_s, _under_way(system.gpu, persistent)
    longer = (2 * latency if stores.copied else 0.0) + persistent.post_s
    left = (1 - np.asarray(occupancy_loss)) * full / (1 + np.asarray(stores.bytes_per_s) * longer / latency / need)
    return link_utilisation(left / need) / link_utilisation(full / need)
