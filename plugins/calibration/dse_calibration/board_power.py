"""Measured power of boards, and the fit of `gpu.power` to it: GEMMs, all-reduces, and both at once, at locked clocks.

What a board does each second is counted as schedules count it: operations of the GEMM, bytes that it reads and writes
at least, bytes that a GPU receives of the collective, and twice as many over the HBM. The equation is that of
`simulators.costs.power`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.config.options import conf_dir
from dse.files import read_csv
from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.costs.power import Activity, board_w, gemm_activity, seen_w, voltage
from simulators.hardware.machine import System
from simulators.hardware.parts import ELEMENT_BYTES, Power, Precision

Floats = NDArray[np.float64]
TABLE = conf_dir() / "data" / "power" / "a100_boards.csv"
COLUMNS = ("work", "clock_mhz", "m", "n", "k", "channels", "payload_mib", "gpus", "alone_ms", "ms", "w")
PRECISION = "bf16"
FITTED = ("idle_w", "tree_w", "flop_j", "link_j_per_byte", "knee", "voltage")
THROTTLE_TABLE = TABLE.with_name("a100_governor.csv")
THROTTLE_COLUMNS = (
    *("m", "n", "k", "ctas", "clock_asked_mhz", "times_at_mhz", "gemm_ms", "comm_ms", "both_ms"),
    *("clock_min_mhz", "throttled"),
)
LOWEST_MHZ, STEP_MHZ = 210, 15
"""Clocks that A100 can be locked to: the lowest one, and the distance of two."""
_ALL_REDUCE = np.array(64.0), np.array(4.0)
"""MiB and GPUs of the all-reduces of the tables of A100."""
_LARGE = 8192.0
"""Sides of a large GEMM."""
_WINDOWS_S, _TRIED = (1e-4, 1.0), 400
_STARTS = (60.0, 20.0, 0.8e-12, 2.0e-10, 0.72, 1.3)
_LEAST, _MOST = (1.0, 0.0, 1e-14, 0.0, 0.3, 1.0), (500.0, 500.0, 1e-11, 1e-8, 0.99, 2.0)


@dataclass(frozen=True)
class BoardPower:
    """N measured powers [W] of a board: clock [Hz], and what it does each second."""

    clock_hz: Floats
    activity: Activity
    watts: Floats

    def predicted(self, power: Power) -> Floats:
        """Power [W] of each row by the law."""
        return board_w(power, self.clock_hz / power.clock_hz, self.activity, PRECISION)


def read(path: Path = TABLE) -> BoardPower:
    """Rows of a table with `COLUMNS`. Raises ConfigError."""
    rows = [cells for _, cells in read_csv(path, needed=COLUMNS).rows]
    number = {name: np.array([float(row[name] or "nan") for row in rows]) for name in COLUMNS[1:]}
    shapes = {name: number[name] for name in "mnk"}
    # a channel moves data for as long as the collective takes alone, if a GEMM takes longer
    moving = np.where(np.isnan(number["alone_ms"]), 1.0, np.minimum(number["alone_ms"] / number["ms"], 1.0))
    received = payload_bytes(number["payload_mib"], number["gpus"])
    return BoardPower(
        1e6 * number["clock_mhz"],
        activity(shapes, received, number["channels"] * moving, 1e-3 * number["ms"]),
        number["w"],
    )


def payload_bytes(payload_mib: Floats, gpus: Floats) -> Floats:
    """Bytes that a GPU receives of an all-reduce by a ring, or of one that nobody shares."""
    return np.asarray(2 * (gpus - 1) / gpus * payload_mib * 2**20)


def activity(shapes: Mapping[str, Floats], received: Floats, channels: Floats, seconds: Floats) -> Activity:
    """What a board does each second that in `seconds` multiplies a shape and receives bytes on some channels."""
    shape = GemmShape(shapes["m"], shapes["n"], shapes["k"])
    hbm = shape.least_bytes(ELEMENT_BYTES[PRECISION]) + 2 * received
    return Activity(shape.flop / seconds, hbm / seconds, received / seconds, channels)


@dataclass(frozen=True)
class Loop:
    """A GEMM beside an all-reduce, over and over: times alone and together [s] at a clock; channels, bytes received."""

    shapes: Mapping[str, float]
    channels: float
    received: float
    clock_hz: float
    gemm_s: float
    comm_s: float
    both_s: float

    @classmethod
    def of(cls, row: Any, clock_hz: float, seconds: Sequence[float]) -> Loop:
        """From a row with m, n, k and ctas of the public table, and times of the GEMM, the all-reduce and both."""
        shapes, received = {side: float(getattr(row, side)) for side in "mnk"}, payload_bytes(*_ALL_REDUCE)
        return cls(shapes, float(row.ctas), float(received), clock_hz, *seconds)

    def seen_w(self, power: Power, clocks_hz: Floats) -> Floats:
        """Power [W] that the governor sees at clocks, as if nothing were bound by links."""
        slower = self.clock_hz / clocks_hz
        gemm_s, comm_s, both_s = (seconds * slower for seconds in (self.gemm_s, self.comm_s, self.both_s))
        shapes = {side: np.full(len(slower), size) for side, size in self.shapes.items()}
        nothing = {side: np.zeros(len(slower)) for side in shapes}
        received, moving = np.asarray(self.received), np.asarray(self.channels * min(self.comm_s / self.both_s, 1.0))
        relative = clocks_hz / power.clock_hz
        mean, rest = (
            board_w(power, relative, activity(sizes, received, channels, seconds), PRECISION)
            for sizes, channels, seconds in ((shapes, moving, both_s), (nothing, np.asarray(self.channels), comm_s))
        )
        # a GEMM that takes longer than the all-reduce is there all the time
        busy_s = gemm_s if self.comm_s > self.gemm_s else both_s
        return seen_w(power, mean, np.minimum(rest, mean), busy_s=busy_s, period_s=both_s)


def mean_mhz(asked_mhz: float, loop: Loop, power: Power) -> float:
    """Clock [MHz] that a loop holds on a board that is asked for one: below it where the limit binds."""
    clocks = np.arange(asked_mhz, LOWEST_MHZ, -STEP_MHZ, dtype=float)
    fits = clocks[loop.seen_w(power, 1e6 * clocks) <= power.board_w]
    return float(fits[0] if len(fits) else clocks[-1])


def lowest_mhz(asked_mhz: float, loop: Loop, power: Power) -> float:
    """Lowest clock [MHz] to which the governor swings."""
    mean = mean_mhz(asked_mhz, loop, power)
    return mean if mean == asked_mhz else mean * (1 - (power.dip or 0.0))


def read_throttle(path: Path = THROTTLE_TABLE) -> list[tuple[Loop, float, float, bool]]:
    """Rows (loop, clock asked for, lowest clock [MHz], whether the limit bound) of a table. Raises ConfigError."""
    rows = list[tuple[Loop, float, float, bool]]()
    for _, cells in read_csv(path, needed=THROTTLE_COLUMNS).rows:
        seconds = [1e-3 * float(cells[f"{work}_ms"]) for work in ("gemm", "comm", "both")]
        loop = Loop.of(SimpleNamespace(**cells), 1e6 * float(cells["times_at_mhz"]), seconds)
        asked, lowest = float(cells["clock_asked_mhz"]), float(cells["clock_min_mhz"])
        rows.append((loop, asked, lowest, cells["throttled"] == "1"))
    return rows


def fit_governor(power: Power, rows: Sequence[tuple[Loop, float, float, bool]]) -> dict[str, float]:
    """Constants of the governor: the window in the middle of those that tell which rows throttle, and the median swing
    of rows whose GEMM takes longer than the collective, as these do not depend on the window.

    Raises ValueError where no window, or no swing, follows from the rows.
    """
    right = list[float]()
    for window_s in np.geomspace(*_WINDOWS_S, _TRIED).tolist():
        tried = power.model_copy(update={"window_s": window_s})
        if all((mean_mhz(asked, loop, tried) < asked) == bound for loop, asked, _, bound in rows):
            right.append(window_s)
    swings = [
        1 - lowest / mean_mhz(asked, loop, power)
        for loop, asked, lowest, bound in rows
        if bound and loop.gemm_s > loop.comm_s
    ]
    if not right or not swings:
        raise ValueError("no window, or no swing, follows from these rows")
    return {"window_s": float(np.sqrt(right[0] * right[-1])), "dip": float(np.median(swings))}


def limit_flop_j(system: System, power: Power) -> float:
    """Energy [J] of an operation in bf16 at the lowest voltage, of which a large GEMM draws the board's limit.

    Of GPUs whose power nobody measured. power: of the board, which a system has where power is asked. The GEMM's rate
    is that of `gpu.loaded`, or of the measured rates of the GPU.
    """
    loaded = system.gpu.loaded
    shape = GemmShape(*(np.asarray(_LARGE),) * 3)
    seconds = gemm_cost(gemms_of(system, PRECISION), shape).seconds
    clock = 1.0 if loaded is None else loaded.gemm_clock
    rest = Activity(0.0, shape.least_bytes(ELEMENT_BYTES[PRECISION]) / seconds, 0.0, 0.0)
    left_w = power.board_w - board_w(power, clock, rest, PRECISION)
    return float(left_w * seconds / shape.flop / voltage(power, clock) ** 2)


def limit_clock(system: System, power: Power, precision: Precision) -> float:
    """Relative clock at which a large GEMM, as fast as it was measured, draws the board's limit; 1 below the limit.

    A rate that is sustained at the limit was measured at this clock (`efficiency.sustained_clock`).
    """
    from scipy.optimize import brentq

    shape = GemmShape(*(np.asarray(_LARGE),) * 3)
    done = gemm_activity(shape, gemm_cost(gemms_of(system, precision), shape), precision)

    def above(clock: float) -> float:
        return float(board_w(power, clock, done, precision)) - power.board_w

    return 1.0 if above(1.0) <= 0 else float(brentq(above, power.knee, 1.0))


def fit_power(power: Power, rows: BoardPower) -> dict[str, float]:
    """Constants `FITTED` by least squares of the logarithm; the others are as they stand."""
    from scipy.optimize import least_squares

    scale = np.array(_STARTS)
    watts = np.log(rows.watts)

    def off(shares: Floats) -> Floats:
        return np.asarray(np.log(rows.predicted(_with(power, shares * scale))) - watts)

    bounds = (np.array(_LEAST) / scale, np.array(_MOST) / scale)
    found = least_squares(off, np.ones(len(scale)), bounds=bounds, xtol=1e-14, ftol=1e-14).x * scale
    return dict(zip(FITTED, found.tolist(), strict=True))


def _with(power: Power, values: Sequence[float]) -> Power:
    named = dict(zip(FITTED, values, strict=True))
    return power.model_copy(update={**named, "flop_j": {PRECISION: named["flop_j"]}})
