"""The kernel library of GEMMs that share a GPU: candidates, and which of them is best at a degree of concurrency.

A library's kernel is the tile that is fastest alone. Candidates of a globally optimised one (GOLDYLOC,
arXiv:2409.02227) are the tiles that are fastest alone on all, a half and a quarter of the GPU. For each degree as many
copies of a GEMM run at once in the slots of the CUs, by each candidate, and the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.values import Memo
from dse_workgroups.slots import Kernels, Rates, SlotState, advance
from simulators.costs.gemm.sharing import SHARES, Choice, SharedGemms, hbm_traffic, kernels
from simulators.costs.gemm.waves import WaveGemms
from simulators.hardware.machine import Gpu
from simulators.hardware.parts import ELEMENT_BYTES

Floats = NDArray[np.float64]
Shape = tuple[float, ...]
Columns = tuple[float, float, float, float, Floats]
"""Columns of `slots.Kernels`: of one kernel."""
DEGREES = (1, 2, 4, 8, 16)
"""Degrees of concurrency for which kernels are kept."""
_KNOWN = Memo[Columns](8192)


def kernel_of(gpu: Gpu, shape: Shape, precision: str, degree: int, choice: Choice) -> Columns:
    """The kernel of a GEMM of (m, n, k) as one of `degree`: isolated, shared (globally optimised), or best of all."""
    place = (shape, precision, degree, choice)
    return _KNOWN.get(lambda: _choose(gpu, shape, precision, degree, choice), gpu, key=place)


def rates_of(gpu: Gpu) -> Rates:
    """Rates that kernels share."""
    llc, half = gpu.llc, gpu.gemm.half_occupancy
    # rules of the backend require these
    assert llc is not None and llc.bytes_per_s is not None and half is not None
    return Rates(float(half), float(llc.bytes_per_s), float(gpu.hbm_bytes_per_s))


def together_s(gpu: Gpu, columns: Columns, copies: int) -> float:
    """Time [s] of copies of a kernel at once, without launch."""
    table, state = Kernels.of(copies, max(DEGREES)), SlotState.idle(copies, int(gpu.num_cus))
    for job in range(copies):
        for column, value in zip(table, columns, strict=True):
            column[job] = value
        state.launch(table, job, 0.0)
    while state.launched[0] > 0:
        advance(table, rates_of(gpu), state, np.inf)
    return float(state.done.max())


def _choose(gpu: Gpu, shape: Shape, precision: str, degree: int, choice: Choice) -> Columns:
    m, n, k = shape
    if choice == "best":
        # every tile: only to judge how much the few candidates lose
        places = list(range(len(gpu.gemm.tiles)))
    else:
        # a tile that is fastest on a part of the GPU suits kernels that share it
        shares = (1.0,) if choice == "isolated" else SHARES
        alone = [kernels(gpu, (m, n, k), precision=precision, share=share).seconds(gpu) for share in shares]
        # the same tile may win on several shares
        places = sorted({int(np.argmin(seconds)) for seconds in alone})
    every = kernels(gpu, (m, n, k), precision=precision)
    candidates = [_columns(gpu, shape, precision, every.at(np.array(place))) for place in places]
    return candidates[0] if len(candidates) == 1 else _fastest(gpu, candidates, degree)


def _fastest(gpu: Gpu, candidates: Sequence[Columns], degree: int) -> Columns:
    return min(candidates, key=lambda columns: together_s(gpu, columns, degree))


def _columns(gpu: Gpu, shape: Shape, precision: str, kernel: SharedGemms) -> Columns:
    m, n, k = shape
    count, tile = float(kernel.workgroups), (int(kernel.rows), int(kernel.cols))
    efficiency = next(entry.efficiency for entry in gpu.gemm.tiles if (entry.rows, entry.cols) == tile)
    rate = float(np.asarray(WaveGemms.of(gpu, precision).flop_per_s_per_cu, float)) * float(efficiency)
    # 2 m n k of a tile over a CU's rate: seconds that its workgroup needs of a CU alone
    work = 2 * float(kernel.rows) * float(kernel.cols) * k / rate
    hbm = _hbm_bytes(gpu, (m, n, k), precision, kernel) / count
    return count, work, 1 / float(kernel.occupancy), float(kernel.llc_bytes) / count, hbm


def _hbm_bytes(gpu: Gpu, shape: tuple[float, float, float], precision: str, kernel: SharedGemms) -> Floats:
    """HBM traffic [bytes] of a kernel by how many share the LLC (`simulators.costs.gemm.sharing`)."""
    m, n, k = shape
    # from 0 on, so that the number of kernels is the index; 0 counts as 1
    at_once: Any = np.arange(max(DEGREES) + 1).clip(1)
    operands = ELEMENT_BYTES[precision] * np.array([m * k, k * n, m * n])
    assert gpu.llc is not None
    waves = np.ceil(kernel.workgroups * at_once / (gpu.num_cus * kernel.occupancy))
    # kernels at once have equal parts of the cache
    return hbm_traffic(operands, float(gpu.llc.bytes) / at_once, waves)
