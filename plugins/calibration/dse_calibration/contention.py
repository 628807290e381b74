"""Contention compared with measured overlaps: times of two operators that run at once, and the fit of the coefficients.

A collective (alone C seconds) starts F seconds after the streams part, and a GEMM (alone G) F seconds after it. The
collective holds its CUs from its start and moves data W seconds later, or when the GEMM ends; with F > 0 it is there
before the GEMM, and W is 0. It moves E seconds' worth before the GEMM starts. It has the share c of its rate alone as
long as the GEMM runs, which takes T(h) beside it for h seconds. From the start of the collective

    E = min(C, F),  H = W + E + (C - E) / c,  h = max(0, H - F);  the GEMM ends at g = F + T(h)
    the collective ends at H where g >= H, else at g + C - E - c max(0, g - max(min(W, g), F))

W, T and c are those of the schedules for a collective that was launched first:
`simulators.costs.transfer.late_start_s`, `simulators.costs.sharing.Sharing.gemm_until` and
`simulators.costs.transfer.slowed_beside_gemm`; F is `contention.fork_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.config.options import conf_dir
from dse.files import read_csv
from dse.values import put
from simulators.costs.gemm import GemmShape, WaveGemms, gemm_cost
from simulators.costs.sharing import HeldCus, Sharing
from simulators.costs.transfer import (
    TransferMode,
    channel_cus,
    fork_s,
    late_start_s,
    launched_first,
    routes,
    slowed_beside_gemm,
)
from simulators.hardware.machine import System
from simulators.hardware.network import Pattern

Floats = NDArray[np.float64]
_Beside = Callable[[Floats], Floats]
TIMES = ("gemm", "comm", "wall")
"""Times of an overlap: end of the GEMM, end of the collective, end of both."""
# below 1 would be a speed-up by contention
_BOUNDS = {
    "gemm_beside_cus": (1.0, 4.0),
    "late_start": (0.0, 2.0),
    "cu_copy_beside_gemm": (1.0, 8.0),
    "fork_s": (0.0, 1e-3),
}
_START = {"gemm_beside_cus": 1.1, "late_start": 0.3, "cu_copy_beside_gemm": 1.5, "fork_s": 5e-5}
TABLE = conf_dir() / "data" / "overlap" / "mi300x_gemm_allreduce.csv"
_ENDS_MS = ("gemm_ms", "comm_ms")  # of which a table may have the later one alone: the wall
WALLS = TABLE.with_name("a100_gemm_allreduce.csv")
_TIMES_MS = ("gemm_alone_ms", "comm_alone_ms", *_ENDS_MS, "wall_ms")
COLUMNS = ("size", "channels", "payload_mib", "assignment", "use", *_TIMES_MS)
_WALL_COLUMNS = ("m", "n", "k", *(name for name in COLUMNS if name not in ("size", *_ENDS_MS)))
_SWEPT = {"torch": "static", "ws": "dynamic"}
"""Prefix of the columns of a library in a sweep of ROCm/tritonBLAS -> assignment of its tiles."""


@dataclass(frozen=True)
class Overlaps:
    """N measured overlaps of a GEMM with a collective that was launched first; times in s.

    shape [N, 3]: m, n and k; channels, payload_bytes [N]; assignment [N]: static or dynamic; pattern [N]: of the
    collective; gemm_alone, comm_alone, gemm, comm, wall [N]: gemm and comm NaN where the wall alone was measured;
    fitted [N]: True for rows that coefficients may be fitted to.
    """

    shape: NDArray[np.int64]
    channels: NDArray[np.int64]
    payload_bytes: Floats
    assignment: tuple[str, ...]
    pattern: tuple[Pattern, ...]
    gemm_alone: Floats
    comm_alone: Floats
    gemm: Floats
    comm: Floats
    wall: Floats
    fitted: NDArray[np.bool_]

    @classmethod
    def read(cls, path: Path = TABLE) -> Overlaps:
        """Read a CSV; lines that begin with # are comments, and without a column `pattern` all are all-reduces.

        GEMMs are square (`size`), or have columns m, n and k and the wall alone.

        A sweep of ROCm/tritonBLAS has the times of both assignments in a row, and neither payload nor `use`: rows that
        the shipped table fits on are `fitted`. Rows without a time are left out. Raises ConfigError or ValueError for
        an invalid table.
        """
        table = read_csv(path, needed=("channels",))
        if is_sweep(table.columns):
            rows = [row for _, cells in table.rows for row in _sweep_rows(cells)]
        elif has_walls(table.columns):
            rows = [
                {**dict.fromkeys(_ENDS_MS, "nan"), **cells} for _, cells in read_csv(path, needed=_WALL_COLUMNS).rows
            ]
        else:
            rows = [cells for _, cells in read_csv(path, needed=COLUMNS).rows]
        rows = [row for row in rows if all(row[name] for name in _TIMES_MS)]
        times = {name.removesuffix("_ms"): np.array([float(row[name]) / 1e3 for row in rows]) for name in _TIMES_MS}
        names = ("m", "n", "k") if has_walls(table.columns) else ("size",) * 3
        sizes = [[int(row[name]) for name in names] for row in rows]
        patterns: list[Any] = [row.get("pattern", "all_reduce") for row in rows]
        return cls(
            shape=np.array(sizes, np.int64).reshape(-1, 3),
            channels=np.array([int(row["channels"]) for row in rows]),
            payload_bytes=np.array([float(row["payload_mib"]) * 2**20 for row in rows]),
            assignment=tuple(row["assignment"] for row in rows),
            pattern=tuple(patterns),
            fitted=np.array([row["use"] == "fit" for row in rows]),
            **times,
        )

    def __len__(self) -> int:
        return len(self.assignment)

    @property
    def size(self) -> NDArray[np.int64]:
        """Rows of each GEMM [N], and all its sizes where it is square."""
        return self.shape[:, 0]

    def where(self, keep: NDArray[np.bool_]) -> Overlaps:
        """Select some of the rows."""
        places = np.flatnonzero(keep)
        arrays = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        assignment, pattern = (tuple(self.assignment[i] for i in places), tuple(self.pattern[i] for i in places))
        return Overlaps(assignment=assignment, pattern=pattern, **arrays)


def has_walls(columns: Sequence[str]) -> bool:
    """Return whether a table with these columns holds walls of GEMMs of any shape beside a collective."""
    return set(_WALL_COLUMNS) <= set(columns)


def is_sweep(columns: Sequence[str]) -> bool:
    """Return whether a table with these columns is a sweep of channels in the layout of ROCm/tritonBLAS."""
    return {"size", "channels", "comm_alone_ms", *(f"{library}_wall_ms" for library in _SWEPT)} <= set(columns)


def _sweep_rows(cells: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the overlaps of a row of a sweep, a library each, in the columns of the shipped table."""
    for library, assignment in _SWEPT.items():
        times = {"gemm_alone_ms": "alone_ms", "gemm_ms": "gemm_overlap_ms", "comm_ms": "comm_overlap_ms"}
        row = {ours: cells[f"{library}_{theirs}"] for ours, theirs in {**times, "wall_ms": "wall_ms"}.items()}
        row |= {name: cells[name] for name in ("size", "channels", "comm_alone_ms")} | {"assignment": assignment}
        use = "fit" if _identity(row) in _fitted_on() else "held_out"
        yield {**row, "payload_mib": "nan", "use": use}  # a sweep does not state its payload


def _identity(row: Mapping[str, str]) -> tuple[Any, ...]:
    """Cells that tell a measurement from all others, its times included."""
    return (row["assignment"], *(row[name] and float(row[name]) for name in ("size", "channels", *_TIMES_MS)))


@cache
def _fitted_on() -> frozenset[tuple[Any, ...]]:
    """Identities of the shipped rows that coefficients are fitted on."""
    return frozenset(_identity(cells) for _, cells in read_csv(TABLE, needed=COLUMNS).rows if cells["use"] == "fit")


def together(
    alone: tuple[Floats, Floats], comm_share: Floats, *, late_s: Floats, parted_s: Any, gemm_beside: _Beside
) -> tuple[Floats, Floats]:
    """End times [s], from the start of the collective, of a GEMM and the collective beside it, which take `alone`.

    comm_share: of the rate alone, at which data moves while the GEMM runs. late_s: W. parted_s: F. gemm_beside: T(h),
    time of the GEMM beside kernels that are there for h.
    """
    gemm_s, comm_s = alone
    waits_s, early = np.where(parted_s > 0, 0.0, late_s), np.minimum(comm_s, parted_s)
    beside_s = waits_s + early + (comm_s - early) / comm_share  # as long as the GEMM runs
    gemm = parted_s + np.maximum(gemm_beside(np.maximum(beside_s - parted_s, 0.0)), gemm_s)
    # the GEMM ends first: what is left moves alone
    moved = early + comm_share * np.maximum(gemm - np.maximum(np.minimum(waits_s, gemm), parted_s), 0.0)
    return gemm, np.where(gemm < beside_s, gemm + comm_s - moved, beside_s)


def predict_overlaps(system: System, rows: Overlaps) -> Mapping[str, Floats]:
    """Predict the times `TIMES` [s] of overlaps [N] from the times measured alone."""
    late_s = late_start_s(launched_first(system).gpu, rows.gemm_alone, by="cu")
    parted_s, pairs = fork_s(system.gpu), _pairs(system, rows)
    gemm, comm = together(
        (rows.gemm_alone, rows.comm_alone),
        pairs.comm_share,
        late_s=late_s,
        parted_s=parted_s,
        gemm_beside=lambda held_s: pairs.gemm_s(rows.gemm_alone, held_s),
    )
    gemm, comm = gemm + parted_s, comm + parted_s
    return {"gemm": gemm, "comm": comm, "wall": np.maximum(gemm, comm)}


@dataclass(frozen=True)
class _Pairs:
    """N GEMMs and the collectives beside them: shares of the collectives' rates alone, and what `Sharing` asks.

    slower: time of the GEMM on the CUs that are left over that on all; workgroups; taken: CUs; laws: of each.
    """

    cus: float
    slower: Floats
    workgroups: Floats
    taken: Floats
    laws: tuple[Sharing, ...]
    comm_share: Floats

    def gemm_s(self, alone_s: Floats, beside_s: Floats) -> Floats:
        """Times [s] of the GEMMs beside collectives that are there for so long."""
        seconds = np.empty(len(alone_s))
        for row, law in enumerate(self.laws):
            beside = HeldCus(self.workgroups[row], self.cus, self.taken[row], beside_s[row])
            seconds[row] = law.gemm_until(self.slower[row] * alone_s[row], alone_s[row], beside)
        return seconds


def _pairs(system: System, rows: Overlaps) -> _Pairs:
    count, laws = len(rows), list[Sharing]()
    slower, workgroups, taken, comm = (np.empty(count) for _ in range(4))
    cases = zip(rows.shape.tolist(), rows.channels, rows.assignment, rows.pattern, strict=True)
    for row, (sizes, channels, assignment, pattern) in enumerate(cases):
        # rows were measured with one or the other
        gpu, cus = put(system, "gpu.gemm.assignment", assignment).gpu, channel_cus(system, channels, pattern)
        waves, shape = WaveGemms.of(gpu, "bf16"), GemmShape.row_major(*sizes)
        full, granted = (gemm_cost(waves, shape, taken=taken) for taken in (0, cus))  # on the CUs that are left
        slower[row], workgroups[row], taken[row] = granted.seconds / full.seconds, full.kernel.workgroups, cus
        laws.append(Sharing.of(gpu))
        peers = routes(system.node, pattern)
        comm[row] = slowed_beside_gemm(system, peers, by=TransferMode("cu", cus, pattern))
    return _Pairs(float(system.gpu.num_cus), slower, workgroups, taken, tuple(laws), comm)


def errors(system: System, rows: Overlaps) -> Mapping[str, Floats]:
    """Relative errors [N] of the times `TIMES`; of walls alone those of the wall."""
    found = {name: seconds / getattr(rows, name) - 1 for name, seconds in predict_overlaps(system, rows).items()}
    return {name: error for name, error in found.items() if not (error.size and np.isnan(error).all())}


def median_errors(system: System, rows: Overlaps) -> Mapping[str, float]:
    """Median of the absolute errors of the times `TIMES` over the rows that nothing is fitted to."""
    unseen = errors(system, rows.where(~rows.fitted))
    return {name: float(np.median(np.abs(error))) for name, error in unseen.items()}


def fit_contention(system: System, rows: Overlaps) -> dict[str, float]:
    """Fit the coefficients of contention by least squares of relative errors on the rows, rounded.

    The loss of the GEMM is fitted to the GEMM times of dynamic assignment, as waves hide it where assignment is static;
    late start and loss of the collective to the times of the collective, with the former put in. Of walls alone, which
    do not tell a share of the GEMM's time from a slower transfer, both losses and `fork_s` are fitted at once and the
    late start stays.
    """
    if np.isnan(rows.comm).all():
        return _least_squares(system, rows, ("gemm_beside_cus", "cu_copy_beside_gemm", "fork_s"), "wall")
    dynamic = rows.where(np.array(rows.assignment) == "dynamic")  # static waves would hide the loss
    coefficients = _least_squares(system, dynamic, ("gemm_beside_cus",), "gemm")
    system = put_all(system, coefficients)  # the second fit takes the first for granted
    return coefficients | _least_squares(system, rows, ("late_start", "cu_copy_beside_gemm"), "comm")


def _least_squares(system: System, rows: Overlaps, names: Sequence[str], which: str) -> dict[str, float]:
    from scipy.optimize import least_squares

    def residuals(values: Floats) -> Floats:
        return errors(put_all(system, dict(zip(names, values.tolist(), strict=True))), rows)[which]

    bounds = tuple(zip(*(_BOUNDS[name] for name in names), strict=True))
    fit = least_squares(
        residuals,
        [_START[name] for name in names],
        bounds=bounds,
        x_scale=[_START[name] for name in names],
        xtol=1e-9,
        diff_step=1e-4,
    )
    # shares to three decimals, seconds to ten nanoseconds
    return {
        name: round(float(value), 8 if name.endswith("_s") else 3) for name, value in zip(names, fit.x, strict=True)
    }


def without_one(system: System, rows: Overlaps) -> Mapping[str, Floats]:
    """Errors [N] of the times `TIMES`, with each channel count predicted by a fit to the others."""
    left_out = {name: np.empty(len(rows)) for name in TIMES}
    for channels in np.unique(rows.channels):  # a channel count at a time: its rows are alike
        out = rows.channels == channels
        refitted = put_all(system, fit_contention(system, rows.where(~out)))
        for name, error in errors(refitted, rows.where(out)).items():
            left_out[name][out] = error
    return left_out


def put_all(system: System, coefficients: Mapping[str, float]) -> System:
    """Copy of a system with other coefficients of contention."""
    for name, value in coefficients.items():
        system = put(system, f"gpu.contention.{name}", value)
    return system


def table(system: System, rows: Overlaps) -> Sequence[Mapping[str, Any]]:
    """Table of `study=overlap_measured`: a row for each measured overlap, with left-out errors of the fitted ones."""
    predicted, error = predict_overlaps(system, rows), errors(system, rows)
    fitted, left_out = np.flatnonzero(rows.fitted), without_one(system, rows.where(rows.fitted))
    lines: list[dict[str, Any]] = []
    for row in range(len(rows)):
        lines.append(
            {
                "size": int(rows.shape[row, 0]),
                "payload_mib": float(rows.payload_bytes[row] / 2**20),
                "channels": int(rows.channels[row]),
                "assignment": rows.assignment[row],
                "pattern": rows.pattern[row],
                "basis": "fitted" if rows.fitted[row] else "predicted",
            }
        )
        for name in TIMES:
            # place among the fitted rows
            left = left_out[name][np.searchsorted(fitted, row)] if rows.fitted[row] else None
            lines[-1] |= {f"{name}_measured_s": getattr(rows, name)[row], f"{name}_s": predicted[name][row]}
            lines[-1] |= {f"{name}_error": error[name][row], f"{name}_error_left_out": left}
    return lines
