"""Contention compared with measured overlaps: times of two operators that run at once, and the fit of the coefficients.

A GEMM (alone G seconds) and a collective (alone C) that start together progress at the shares g and c of their rates
alone until one ends; the other then continues alone:

    t = min(G / g, C / c);   the first ends at t, the other at t + its remaining time alone

g and c are those of the schedules: `simulators.costs.gemm_waves.beside_cu_copies` and
`simulators.costs.transfer.slowed_beside_gemm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.config.options import conf_dir
from dse.files import read_csv
from dse.values import put
from simulators.costs.gemm_waves import beside_cu_copies, gemm_cost
from simulators.costs.transfer import TransferMode, routes, slowed_beside_gemm
from simulators.hardware.system import System

Floats = NDArray[np.float64]
COEFFICIENTS = {"static": "static_gemm_beside_cus", "dynamic": "dynamic_gemm_beside_cus"}
"""Assignment of a GEMM's tiles -> the coefficient that its rows determine."""
_COMM = "cu_copy_beside_gemm"
_TABLE = conf_dir() / "data" / "overlap" / "mi300x_gemm_allreduce.csv"


@dataclass(frozen=True)
class Overlaps:
    """N measured overlaps of a square GEMM with an all-reduce that was launched first; times in s.

    size, channels, payload_bytes [N]; assignment [N]: static or dynamic; gemm_alone, comm_alone, gemm, comm, wall [N];
    fitted [N]: True for rows that coefficients may be fitted to.
    """

    size: NDArray[np.int64]
    channels: NDArray[np.int64]
    payload_bytes: Floats
    assignment: tuple[str, ...]
    gemm_alone: Floats
    comm_alone: Floats
    gemm: Floats
    comm: Floats
    wall: Floats
    fitted: NDArray[np.bool_]

    @classmethod
    def read(cls, path: Path = _TABLE) -> Overlaps:
        """Read a CSV; lines that begin with # are comments. Raises ConfigError or ValueError for an invalid table."""
        times_ms = ("gemm_alone_ms", "comm_alone_ms", "gemm_ms", "comm_ms", "wall_ms")
        needed = ("size", "channels", "payload_mib", "assignment", "use", *times_ms)
        rows = [cells for _, cells in read_csv(path, needed=needed).rows]
        times = {name.removesuffix("_ms"): np.array([float(row[name]) / 1e3 for row in rows]) for name in times_ms}
        return cls(
            size=np.array([int(row["size"]) for row in rows]),
            channels=np.array([int(row["channels"]) for row in rows]),
            payload_bytes=np.array([float(row["payload_mib"]) * 2**20 for row in rows]),
            assignment=tuple(row["assignment"] for row in rows),
            fitted=np.array([row["use"] == "fit" for row in rows]),
            **times,
        )

    def __len__(self) -> int:
        return len(self.assignment)

    def where(self, keep: NDArray[np.bool_]) -> Overlaps:
        """Select some of the rows."""
        places = np.flatnonzero(keep)
        columns = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return Overlaps(assignment=tuple(self.assignment[place] for place in places), **columns)


def together(gemm_s: Floats, comm_s: Floats, gemm_share: Floats, comm_share: Floats) -> tuple[Floats, Floats]:
    """End times [s] of a GEMM and a collective that start at once, at their shares of the rate until one ends."""
    first = np.minimum(gemm_s / gemm_share, comm_s / comm_share)
    return first + gemm_s - first * gemm_share, first + comm_s - first * comm_share


def shares(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """Shares [N] of their rates alone that the GEMM and the collective have beside one another."""
    gemm, comm = np.empty(len(rows)), np.empty(len(rows))
    peers = routes(system.node, "all_reduce")
    for row, (size, channels, assignment) in enumerate(zip(rows.size, rows.channels, rows.assignment, strict=True)):
        gpu = put(system, "gpu.gemm.assignment", assignment).gpu
        full, granted = (
            gemm_cost(gpu, (size, size, size), cus=cus, element_bytes=2).seconds
            for cus in (gpu.num_cus, gpu.num_cus - channels)
        )
        gemm[row] = full / beside_cu_copies(gpu, granted, full)
        comm[row] = slowed_beside_gemm(system, peers, by=TransferMode("cu", channels, "all_reduce"))
    return gemm, comm


def predict_overlaps(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """Predict the GEMM and wall times [s] of overlaps [N] from the times measured alone."""
    gemm, comm = together(rows.gemm_alone, rows.comm_alone, *shares(system, rows))
    return gemm, np.maximum(gemm, comm)


def errors(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """Relative errors [N] of GEMM and wall time."""
    gemm, wall = predict_overlaps(system, rows)
    return gemm / rows.gemm - 1, wall / rows.wall - 1


def fit_contention(system: System, rows: Overlaps) -> dict[str, float]:
    """Fit the coefficients of contention by the smallest largest error on the rows, rounded to three decimals.

    Each GEMM coefficient is fitted to the GEMM times of its rows, that of the copies to the wall times of all rows.
    """
    from scipy.optimize import minimize_scalar

    def worst(name: str, selected: Overlaps, which: int) -> float:
        def error(value: float) -> float:
            return float(np.abs(errors(put(system, f"gpu.contention.{name}", value), selected)[which]).max())

        return round(float(minimize_scalar(error, bounds=(1.0, 8.0), method="bounded", options={"xatol": 1e-5}).x), 3)

    coefficients: dict[str, float] = {}
    for assignment, name in COEFFICIENTS.items():
        coefficients[name] = worst(name, rows.where(np.array(rows.assignment) == assignment), 0)
        system = put(system, f"gpu.contention.{name}", coefficients[name])
    return coefficients | {_COMM: worst(_COMM, rows, 1)}


def without_one(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """Errors [N] of GEMM and wall time, with each channel count predicted by a fit to the others."""
    gemm, wall = np.empty(len(rows)), np.empty(len(rows))
    for channels in np.unique(rows.channels):
        out = rows.channels == channels
        refitted = put_all(system, fit_contention(system, rows.where(~out)))
        gemm[out], wall[out] = errors(refitted, rows.where(out))
    return gemm, wall


def put_all(system: System, coefficients: Mapping[str, float]) -> System:
    """Copy of a system with other coefficients of contention."""
    for name, value in coefficients.items():
        system = put(system, f"gpu.contention.{name}", value)
    return system


def table(system: System, rows: Overlaps) -> Sequence[Mapping[str, Any]]:
    """Table of `study=overlap_measured`: a row for each measured overlap, with left-out errors of the fitted ones."""
    gemm, wall = predict_overlaps(system, rows)
    left_out = zip(*without_one(system, rows.where(rows.fitted)), strict=True)
    out = dict(zip(np.flatnonzero(rows.fitted), left_out, strict=True))
    return [
        {
            "size": int(rows.size[row]),
            "payload_mib": float(rows.payload_bytes[row] / 2**20),
            "channels": int(rows.channels[row]),
            "assignment": rows.assignment[row],
            "basis": "fitted" if rows.fitted[row] else "predicted",
            "gemm_measured_s": rows.gemm[row],
            "gemm_s": gemm[row],
            "gemm_error": gemm[row] / rows.gemm[row] - 1,
            "gemm_error_left_out": out[row][0] if row in out else None,
            "wall_measured_s": rows.wall[row],
            "wall_s": wall[row],
            "wall_error": wall[row] / rows.wall[row] - 1,
            "wall_error_left_out": out[row][1] if row in out else None,
        }
        for row in range(len(rows))
    ]
