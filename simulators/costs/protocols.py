"""Collectives inside a node by a library with three protocols, as NCCL and RCCL have them.

A collective of S bytes among n GPUs takes s dependent steps, in which a GPU sends w bytes:

    collective       S                               s         w
    all_reduce       the tensor every GPU holds      2(n-1)    2(n-1)/n S
    all_gather       the tensor every GPU ends with  n-1       (n-1)/n S
    reduce_scatter   the tensor every GPU begins with   as all_gather
    all_to_all       what a GPU sends to all, itself included   as all_gather
    send_recv        the message                     1         S

    B      = bytes_per_s scaling^log2(n / 2)
    LL     = launch + s ll_step    + w / (ll_share B)
    LL128  = launch + s ll128_step + w / (ll128_share B)
    Simple = launch + s step       + w / B + s fill min(1, w / fill_bytes)
    T      = min(LL, LL128, Simple)

LL sends a flag with every four bytes and needs no fence, LL128 one with every 120; Simple waits for fences and fills a
pipeline of chunks that grow with the message until the library's buffers are full (NCCL, `src/graph/tuning.cc`; the
form of the filling is derived). Ten constants for each collective, fitted on at most 24 rows (`dse calibrate`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.hardware.network import CollectiveKind, Protocols

Floats = NDArray[np.float64]


def protocol_seconds(constants: Protocols, kind: CollectiveKind, num_gpus: ArrayLike, payload: ArrayLike) -> Floats:
    """Time [s] of a collective of `payload` bytes among 2 or more GPUs; 0 for one GPU. Arrays broadcast."""
    n, size = np.asarray(num_gpus, float), np.asarray(payload, float)
    passes = 2.0 if kind == "all_reduce" else 1.0
    steps, wire = (1.0, size) if kind == "send_recv" else (passes * (n - 1), passes * (n - 1) / n * size)
    rate = constants.bytes_per_s * constants.scaling ** np.log2(np.maximum(n, 2) / 2)
    low_latency = steps * constants.ll_step_s + wire / (constants.ll_share * rate)
    flag_of_128 = steps * constants.ll128_step_s + wire / (constants.ll128_share * rate)
    filling = constants.fill_s * np.minimum(1.0, wire / constants.fill_bytes)
    simple = steps * (constants.step_s + filling) + wire / rate
    seconds = constants.launch_s + np.minimum(np.minimum(low_latency, flag_of_128), simple)
    return np.asarray(np.where(n > 1, seconds, 0.0), float)
