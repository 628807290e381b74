"""Power by activity: idle, CUs that are busy, bytes over HBM and links; and the clock that it allows for long.

    P = P_idle + c (P_board - P_idle - e_hbm B_hbm) / C + e_hbm b_hbm + e_link b_link

c of C CUs busy, b the bytes/s that go over HBM and links, B_hbm the rate of the HBM: with everything busy the board
draws P_board. A CU that moves data is assumed to draw as much as one that multiplies (an upper bound). The constants
(`gpu.power` of the system) are from memory, so the results are estimates.

Kernels are measured one by one or in short bursts, at clocks that the board's power does not allow for seconds. There
the mean power is at most the board's: with shares x and y of the time in which kernels compute and collectives run, i
of the power when idle and p while only collectives run, and power of computing as the third power of the clock c
(voltage follows the clock; derived),

    i + x (1 - i) (c / gemm_clock)^3 + y (p - i) = 1,        c <= 1

so the clock is `gemm_clock` where GEMMs alone run, higher where they pause for collectives, lower where these run
beside.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.transfer import TransferMode, rate, routes
from simulators.hardware.machine import System
from simulators.hardware.parts import LoadedClock


def collective_w(system: System, by: TransferMode) -> float:
    """Power [W] of a GPU while it moves a large payload and does nothing else.

    Raises ValueError for a system without `gpu.power`.
    """
    power, gpu = system.gpu.power, system.gpu
    if power is None:
        raise ValueError("the system has no gpu.power")
    peer_routes = routes(system.node, by.pattern)
    # on a ring, those of the neighbours; of all peers elsewhere
    active = [route for route in peer_routes if route.step == peer_routes[0].step]
    moved = sum(float(rate(system, route, active, by=by).bytes_per_s) for route in active)
    # what is left of the board's power with all busy, by CU
    of_a_cu = (power.board_w - power.idle_w - power.hbm_j_per_byte * gpu.hbm_bytes_per_s) / gpu.num_cus
    busy = float(np.asarray(by.cus)) if by.engine == "cu" else 0.0
    # read at one end, written at the other
    return power.idle_w + busy * of_a_cu + 2 * moved * power.hbm_j_per_byte + moved * power.link_j_per_byte


def sustained_clock(loaded: LoadedClock, computing: ArrayLike, exchanging: ArrayLike) -> NDArray[np.float64]:
    """Clock over that of kernels measured one by one.

    computing, exchanging: shares of the time in which kernels compute, and collectives run.
    """
    # hardly any computing: the clock is at its limit in any case
    idle, x = loaded.idle_share, np.maximum(np.asarray(computing, float), 1e-3)
    left = 1 - idle - np.asarray(exchanging, float) * (loaded.exchange_share - idle)
    # power goes with the third power of the clock
    return np.asarray(np.minimum(loaded.gemm_clock * np.cbrt(left / ((1 - idle) * x)), 1.0))
