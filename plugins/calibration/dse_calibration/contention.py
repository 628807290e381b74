"""Contention compared with measured overlaps: times of two operators that run at once, and the fit of the coefficients.

A GEMM (alone G seconds) and a collective (alone C) start together. The collective holds its CUs from the start and
moves data W seconds later, or when the GEMM ends. The GEMM has the share g of its rate alone as long as the collective
is there, and the collective the share c of its own as long as the GEMM is:

    w = min(W, G / g);   t = min((G - g w) / g, C / c);   the first ends at w + t, the other w + t + its time left alone

W, g and c are those of the schedules: `simulators.costs.transfer.late_start_s`,
`simulators.costs.sharing.Sharing` and `simulators.costs.transfer.slowed_beside_gemm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from simulators.costs.sharing import Sharing
from simulators.costs.transfer import TransferMode, channel_cus, late_start_s, routes, slowed_beside_gemm
from simulators.hardware.machine import System
from simulators.hardware.network import Pattern

Floats = NDArray[np.float64]
TIMES = ("gemm", "comm", "wall")
"""Times of an overlap: end of the GEMM, end of the collective, end of both."""
# below 1 would be a speed-up by contention
_BOUNDS = {"gemm_beside_cus": (1.0, 4.0), "late_start": (0.0, 2.0), "cu_copy_beside_gemm": (1.0, 8.0)}
_START = {"gemm_beside_cus": 1.1, "late_start": 0.3, "cu_copy_beside_gemm": 1.5}
TABLE = conf_dir() / "data" / "overlap" / "mi300x_gemm_allreduce.csv"
_TIMES_MS = ("gemm_alone_ms", "comm_alone_ms", "gemm_ms", "comm_ms", "wall_ms")
COLUMNS = ("size", "channels", "payload_mib", "assignment", "use", *_TIMES_MS)
_SWEPT = {"torch": "static", "ws": "dynamic"}
"""Prefix of the columns of a library in a sweep of ROCm/tritonBLAS -> assignment of its tiles."""


@dataclass(frozen=True)
class Overlaps:
    """N measured overlaps of a square GEMM with a collective that was launched first; times in s.

    size, channels, payload_bytes [N]; assignment [N]: static or dynamic; pattern [N]: of the collective; gemm_alone,
    comm_alone, gemm, comm, wall [N]; fitted [N]: True for rows that coefficients may be fitted to.
    """

    size: NDArray[np.int64]
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

        A sweep of ROCm/tritonBLAS has the times of both assignments in a row, and neither payload nor `use`: rows that
        the shipped table fits on are `fitted`. Rows without a time are left out. Raises ConfigError or ValueError for
        an invalid table.
        """
        table = read_csv(path, needed=("size", "channels"))
        if is_sweep(table.columns):
            rows = [row for _, cells in table.rows for row in _sweep_rows(cells)]
        else:
            rows = [cells for _, cells in read_csv(path, needed=COLUMNS).rows]
        rows = [row for row in rows if all(row[name] for name in _TIMES_MS)]
        times = {name.removesuffix("_ms"): np.array([float(row[name]) / 1e3 for row in rows]) for name in _TIMES_MS}
        patterns: list[Any] = [row.get("pattern", "all_reduce") for row in rows]
        return cls(
            size=np.array([int(row["size"]) for row in rows]),
            channels=np.array([int(row["channels"]) for row in rows]),
            payload_bytes=np.array([float(row["payload_mib"]) * 2**20 for row in rows]),
            assignment=tuple(row["assignment"] for row in rows),
            pattern=tuple(patterns),
            fitted=np.array([row["use"] == "fit" for row in rows]),
            **times,
        )

    def __len__(self) -> int:
        return len(self.assignment)

    def where(self, keep: NDArray[np.bool_]) -> Overlaps:
        """Select some of the rows."""
        places = np.flatnonzero(keep)
        arrays = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        assignment, pattern = (tuple(self.assignment[i] for i in places), tuple(self.pattern[i] for i in places))
        return Overlaps(assignment=assignment, pattern=pattern, **arrays)


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
    gemm_s: Floats, comm_s: Floats, gemm_share: Floats, comm_share: Floats, *, late_s: Floats
) -> tuple[Floats, Floats]:
    """End times [s] of a GEMM and a collective that start at once, at their shares of the rate until one ends.

    late_s: time from the start until the collective moves data, unless the GEMM ends before.
    """
    waited = np.minimum(late_s, gemm_s / gemm_share)  # the GEMM ends first: then data moves alone
    remaining = np.maximum(gemm_s - waited * gemm_share, 0.0)
    both = np.minimum(remaining / gemm_share, comm_s / comm_share)
    # what is left runs alone
    return waited + both + remaining - both * gemm_share, waited + both + comm_s - both * comm_share


def shares(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """Shares [N] of their rates alone that the GEMM and the collective have beside one another."""
    gemm, comm = np.empty(len(rows)), np.empty(len(rows))
    cases = zip(rows.size, rows.channels, rows.assignment, rows.pattern, strict=True)
    for row, (size, channels, assignment, pattern) in enumerate(cases):
        # rows were measured with one or the other
        gpu, cus = put(system, "gpu.gemm.assignment", assignment).gpu, channel_cus(system, channels, pattern)
        waves, shape = WaveGemms.of(gpu, "bf16"), GemmShape(size, size, size)
        # on the CUs that the channels leave
        full, granted = (gemm_cost(waves, shape, taken=taken).seconds for taken in (0, cus))
        gemm[row] = full / Sharing.of(gpu).gemm(granted, full)
        peers = routes(system.node, pattern)
        comm[row] = slowed_beside_gemm(system, peers, by=TransferMode("cu", cus, pattern))
    return gemm, comm


def predict_overlaps(system: System, rows: Overlaps) -> Mapping[str, Floats]:
    """Predict the times `TIMES` [s] of overlaps [N] from the times measured alone."""
    late_s = late_start_s(system.gpu, rows.gemm_alone, by="cu")
    gemm, comm = together(rows.gemm_alone, rows.comm_alone, *shares(system, rows), late_s=late_s)
    return {"gemm": gemm, "comm": comm, "wall": np.maximum(gemm, comm)}


def errors(system: System, rows: Overlaps) -> Mapping[str, Floats]:
    """Relative errors [N] of the times `TIMES`."""
    return {name: seconds / getattr(rows, name) - 1 for name, seconds in predict_overlaps(system, rows).items()}


def median_errors(system: System, rows: Overlaps) -> Mapping[str, float]:
    """Median of the absolute errors of the times `TIMES` over the rows that nothing is fitted to."""
    unseen = errors(system, rows.where(~rows.fitted))
    return {name: float(np.median(np.abs(error))) for name, error in unseen.items()}


def fit_contention(system: System, rows: Overlaps) -> dict[str, float]:
    """Fit the coefficients of contention by least squares of relative errors on the rows, rounded to three decimals.

    The loss of the GEMM is fitted to the GEMM times of dynamic assignment, as waves hide it where assignment is static;
    late start and loss of the collective to the times of the collective, with the former put in.
    """
    dynamic = rows.where(np.array(rows.assignment) == "dynamic")  # static waves would hide the loss
    coefficients = _least_squares(system, dynamic, ("gemm_beside_cus",), "gemm")
    system = put_all(system, coefficients)  # the second fit takes the first for granted
    return coefficients | _least_squares(system, rows, ("late_start", "cu_copy_beside_gemm"), "comm")


def _least_squares(system: System, rows: Overlaps, names: Sequence[str], which: str) -> dict[str, float]:
    from scipy.optimize import least_squares

    def residuals(values: Floats) -> Floats:
        return errors(put_all(system, dict(zip(names, values.tolist(), strict=True))), rows)[which]

    bounds = tuple(zip(*(_BOUNDS[name] for name in names), strict=True))
    fit = least_squares(residuals, [_START[name] for name in names], bounds=bounds, xtol=1e-9, diff_step=1e-4)
    return {name: round(float(value), 3) for name, value in zip(names, fit.x, strict=True)}


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
                "size": int(rows.size[row]),
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
