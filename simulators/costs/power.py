"""Power of a board by what it does, and the clock that its limit allows.

At a clock c, relative to the one that the GPU's rates are of, with kernels for the share u of the time, F operations/s,
n CUs that move data, and b bytes/s over HBM and links, of which kernels stream b_s through the CUs:

    P = P_idle + v(c)^2 (P_leak + u P_tree c + e_flop F + e_s b_s + P_cu n c) + e_hbm b_hbm + e_link b_link
    v(c) = 1 + (V - 1) max(0, c - c_knee) / (1 - c_knee)

The energy of an operation goes with the square of the voltage v, which is flat up to a knee and rises with the clock
above it. Constants are those of `gpu.power` with their sources; of A100 they were fitted on a public table of four
boards (docs/explanation/power.md).

A governor sees power through a window, a first-order filter of time constant t (`gpu.power.window_s`). Of work that
repeats every T and computes for B of it in one go, at P_B, and draws P_0 in the rest, it sees at most

    P_0 + (P_B - P_0) (1 - exp(-B / t)) / (1 - exp(-T / t))

which is the mean where t is long. While it holds the limit its clock swings below the one that it holds on average, by
the share `gpu.power.dip` (measured).

Steps still take one clock for all of their kernels (`gpu.loaded`). Kernels are measured one by one or in short bursts,
at clocks that the board's power does not allow for seconds. There the mean power is at most the board's: with shares x
and y of the time in which kernels compute and collectives run, i of the power when idle and p while only collectives
run, and power of computing as the third power of the clock c (voltage follows the clock; derived),

    i + x (1 - i) (c / gemm_clock)^3 + y (p - i) = 1,        c <= 1

so the clock is `gemm_clock` where GEMMs alone run, higher where they pause for collectives, lower where these run
beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulators.costs.gemm import GemmCost, GemmShape
from simulators.costs.transfer import TransferMode, rate, routes
from simulators.hardware.machine import Gpu, System, peak_format
from simulators.hardware.parts import ELEMENT_BYTES, LoadedClock, Power
from simulators.hardware.residuals import ANY, name_in_tables, shipped_residuals, unmeasured_text

Floats = NDArray[np.float64]


def collective_w(system: System, by: TransferMode) -> float:
    """Power [W] of a GPU while it moves a large payload and does nothing else.

    Raises ValueError for a system without `gpu.power`.
    """
    power = system.gpu.power
    if power is None:
        raise ValueError("the system has no gpu.power")
    peer_routes = routes(system.node, by.pattern)
    # on a ring, those of the neighbours; of all peers elsewhere
    active = [route for route in peer_routes if route.step == peer_routes[0].step]
    moved = sum(float(rate(system, route, active, by=by).bytes_per_s) for route in active)
    busy = np.asarray(by.cus, float) if by.engine == "cu" else 0.0
    # read at one end, written at the other
    return float(board_w(power, 1.0, Activity(0.0, 2 * moved, moved, busy), "bf16"))


@dataclass(frozen=True)
class Activity:
    """What one GPU does each second, on average: FLOP/s, bytes/s over HBM and links, CUs that move data.

    stream_bytes_per_s: of the HBM's, what kernels stream through the CUs. busy: share of the time in which kernels run,
    or wait.
    """

    flop_per_s: ArrayLike
    hbm_bytes_per_s: ArrayLike
    link_bytes_per_s: ArrayLike
    copy_cus: ArrayLike
    stream_bytes_per_s: ArrayLike = 0.0
    busy: ArrayLike = 1.0


def board_w(power: Power, clock: ArrayLike, activity: Activity, precision: str) -> Floats:
    """Power [W] of a board at a clock relative to that of the GPU's rates. precision: of the operations.

    Raises ValueError for operations of a format of which `gpu.power.flop_j` has no energy.
    """
    return np.asarray(sum(board_parts(power, clock, activity, precision).values(), np.zeros(())))


def board_parts(power: Power, clock: ArrayLike, activity: Activity, precision: str) -> dict[str, Floats]:
    """The same by part: idle, leakage, tree, cus, operations, streams, hbm, links.

    Raises ValueError for operations of a format of which `gpu.power.flop_j` has no energy.
    """
    relative, flop = np.asarray(clock, float), np.asarray(activity.flop_per_s, float)
    energy = next((joules for name, joules in power.flop_j.items() if name == peak_format(precision)), None)
    if energy is None and flop.any():
        raise ValueError(f"gpu.power.flop_j has no energy of an operation at {precision}")
    at_low_voltage = {
        "leakage": 0.0 if power.leak_w is None else power.leak_w,
        "tree": relative * np.asarray(activity.busy, float) * power.tree_w,
        "cus": relative * power.cu_w * np.asarray(activity.copy_cus, float),
        "operations": (0.0 if energy is None else energy) * flop,
        "streams": power.stream_j_per_byte * np.asarray(activity.stream_bytes_per_s, float),
    }
    squared = voltage(power, relative) ** 2
    return {
        "idle": np.asarray(power.idle_w, float),
        **{name: np.asarray(squared * watts) for name, watts in at_low_voltage.items()},
        "hbm": np.asarray(power.hbm_j_per_byte * np.asarray(activity.hbm_bytes_per_s, float)),
        "links": np.asarray(power.link_j_per_byte * np.asarray(activity.link_bytes_per_s, float)),
    }


def gemm_activity(shape: GemmShape, cost: GemmCost, precision: str) -> Activity:
    """What a GPU does each second while it repeats a GEMM alone: whole tiles are multiplied, whatever is padded."""
    seconds, element_bytes = np.asarray(cost.seconds, float), ELEMENT_BYTES[precision]
    return Activity(cost.kernel.tile_flop(shape) / seconds, shape.least_bytes(element_bytes) / seconds, 0.0, 0.0)


def seen_w(power: Power, mean_w: ArrayLike, rest_w: ArrayLike, *, busy_s: ArrayLike, period_s: ArrayLike) -> Floats:
    """Highest power [W] that a governor sees of work that repeats, of whose period it computes for `busy_s` in one go.

    mean_w: over a period. rest_w: while nothing is computed.
    """
    mean, period = np.asarray(mean_w, float), np.asarray(period_s, float)
    if power.window_s is None:
        return mean
    window, busy = np.maximum(np.asarray(power.window_s, float), 1e-12), np.minimum(np.asarray(busy_s, float), period)
    computes = (busy > 0) & (busy < period)
    busy = np.where(computes, busy, period)
    above = (mean - np.asarray(rest_w, float)) * period / busy  # of the phase that computes, over the rest
    filtered = np.expm1(-busy / window) / np.expm1(-period / window)
    return np.where(computes, np.maximum(rest_w + above * filtered, mean), mean)


PowerKey = Literal["kernels", "served"]


@dataclass(frozen=True)
class PowerInterval:
    """Interval of 90 % of a power [W], and what it rests on; ratio: of its ends to the power, without the limit."""

    low: float
    high: float
    ratio: tuple[float, float]
    basis: str

    @classmethod
    def of(cls, gpu: Gpu, watts: float, key: PowerKey, *, cap_w: float) -> PowerInterval:
        """Of a predicted power of a GPU: of kernels at rates that are known, or of engines that serve.

        cap_w: the limit, above which a board does not draw.
        """
        tables, name = shipped_residuals(), name_in_tables(gpu)
        keys = {group.key for group in tables.groups if group.kind == "power" and name in group.gpu.split()} - {""}
        # watts of kernels say little of engines that serve on the same GPU
        apart = bool(keys) and key not in keys
        group = tables.of("power", ANY if apart else name, key, traits={"gpu": name})
        low, high = (float(end) for end in group.interval(watts))
        # few rows borrow the interval of all
        borrowed = " and those of other GPUs" if group.basis.startswith("borrows") else ""
        elsewhere = f" of {' and '.join(sorted(keys))} and other GPUs" if apart else " of other GPUs"
        others = elsewhere if group.gpu == ANY else borrowed
        basis = "a guess" if group.is_guess else f"{group.rows} rows{others}{unmeasured_text(group)}"
        return cls(min(low, cap_w), min(high, cap_w), (low / watts, high / watts), basis)

    def with_time(self, ratio: tuple[float, float]) -> tuple[float, float]:
        """Ends of the interval of an energy over its prediction, with a time that has one of its own (derived).

        ratio: of the ends of the time to its prediction. Logarithms of independent errors add in squares.
        """
        ends = zip(self.ratio, ratio, strict=True)
        below, above = (float(np.hypot(np.log(power), np.log(time))) for power, time in ends)
        return float(np.exp(-below)), float(np.exp(above))


def unlimited_clock(power: Power) -> float:
    """Relative clock of a board that no limit holds: its highest one."""
    return 1.0 if power.boost_hz is None else float(np.max(np.asarray(power.boost_hz) / np.asarray(power.clock_hz)))


def voltage(power: Power, clock: ArrayLike) -> Floats:
    """Voltage at a relative clock, over the lowest one."""
    knee = np.asarray(power.knee, float)
    above = np.maximum(np.asarray(clock, float) - knee, 0.0)
    return np.asarray(1.0 + (power.voltage - 1.0) * above / np.where(knee < 1, 1 - knee, 1.0))


def sustained_clock(loaded: LoadedClock, computing: ArrayLike, exchanging: ArrayLike) -> NDArray[np.float64]:
    """Clock over that of kernels measured one by one.

    computing, exchanging: shares of the time in which kernels compute, and collectives run.
    """
    # hardly any computing: the clock is at its limit in any case
    idle, x = loaded.idle_share, np.maximum(np.asarray(computing, float), 1e-3)
    left = 1 - idle - np.asarray(exchanging, float) * (loaded.exchange_share - idle)
    # power goes with the third power of the clock
    return np.asarray(np.minimum(loaded.gemm_clock * np.cbrt(left / ((1 - idle) * x)), 1.0))
