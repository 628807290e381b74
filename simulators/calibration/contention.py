"""Contention held against measured overlaps: what two operators that run at once take, and the fit of the coefficients.

A GEMM (alone G seconds) and a collective (alone C) that start together progress at the shares g and c of their rates
alone until one ends; the other goes on alone:

    t = min(G / g, C / c);   the first ends at t, the other at t + what it has left

g and c are those that schedules use: `simulators.costs.gemm_waves.beside_cu_copies` and
`simulators.costs.transfer.slowed_beside_gemm`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.config.compose import conf_dir
from dse.values import put
from simulators.costs.gemm_waves import beside_cu_copies, gemm_cost
from simulators.costs.transfer import Movement, routes, slowed_beside_gemm
from simulators.hardware.system import System

Floats = NDArray[np.float64]
COEFFICIENTS = {"static": "static_gemm_beside_cus", "dynamic": "dynamic_gemm_beside_cus"}
"""How a GEMM's tiles are assigned -> the coefficient that its rows decide."""
_COMM = "cu_copy_beside_gemm"
_TABLE = conf_dir() / "data" / "overlap" / "mi300x_gemm_allreduce.csv"


@dataclass(frozen=True)
class Overlaps:
    """N measured overlaps of a square GEMM with an all-reduce that was launched first; times in s.

    size, channels, payload_bytes [N]; assignment [N]: static or dynamic; gemm_alone, comm_alone, gemm, comm, wall [N];
    fitted [N]: whether coefficients may be fitted to it.
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
        """From a CSV; lines that begin with # are remarks. Raises KeyError or ValueError for a table that is none."""
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
        times = {
            name: np.array([float(row[f"{name}_ms"]) / 1e3 for row in rows])
            for name in ("gemm_alone", "comm_alone", "gemm", "comm", "wall")
        }
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
        """Only some of the rows."""
        places = np.flatnonzero(keep)
        columns = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return Overlaps(assignment=tuple(self.assignment[place] for place in places), **columns)


def together(gemm_s: Floats, comm_s: Floats, gemm_share: Floats, comm_share: Floats) -> tuple[Floats, Floats]:
    """When GEMM and collective end [s] that start at once: both at their shares of the rate until one of them ends."""
    first = np.minimum(gemm_s / gemm_share, comm_s / comm_share)
    return first + gemm_s - first * gemm_share, first + comm_s - first * comm_share


def shares(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """(of the GEMM, of the collective): which shares [N] of their rates alone they have beside one another."""
    gemm, comm = np.empty(len(rows)), np.empty(len(rows))
    peers = routes(system.node, "all_reduce")
    for row, (size, channels, assignment) in enumerate(zip(rows.size, rows.channels, rows.assignment, strict=True)):
        gpu = put(system, "gpu.gemm.assignment", assignment).gpu
        full, granted = (
            gemm_cost(gpu, (size, size, size), cus=cus, element_bytes=2).seconds
            for cus in (gpu.num_cus, gpu.num_cus - channels)
        )
        gemm[row] = full / beside_cu_copies(gpu, granted, full)
        comm[row] = slowed_beside_gemm(system, peers, by=Movement("cu", channels, "all_reduce"))
    return gemm, comm


def predict_overlaps(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """(GEMM, wall) [s] of overlaps [N], from what they measured alone."""
    gemm, comm = together(rows.gemm_alone, rows.comm_alone, *shares(system, rows))
    return gemm, np.maximum(gemm, comm)


def errors(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """Relative errors [N] of GEMM and wall time."""
    gemm, wall = predict_overlaps(system, rows)
    return gemm / rows.gemm - 1, wall / rows.wall - 1


def fit_contention(system: System, rows: Overlaps) -> dict[str, float]:
    """Coefficients of contention that make the largest error on the rows smallest, rounded to three decimals.

    Each GEMM coefficient by the GEMM times of its rows, that of the copies by the wall times of all.
    """
    from scipy.optimize import minimize_scalar

    def worst(name: str, own: Overlaps, which: int) -> float:
        def error(value: float) -> float:
            return float(np.abs(errors(put(system, f"gpu.contention.{name}", value), own)[which]).max())

        return round(float(minimize_scalar(error, bounds=(1.0, 8.0), method="bounded", options={"xatol": 1e-5}).x), 3)

    found: dict[str, float] = {}
    for assignment, name in COEFFICIENTS.items():
        found[name] = worst(name, rows.where(np.array(rows.assignment) == assignment), 0)
        system = put(system, f"gpu.contention.{name}", found[name])
    return found | {_COMM: worst(_COMM, rows, 1)}


def without_one(system: System, rows: Overlaps) -> tuple[Floats, Floats]:
    """Errors [N] of GEMM and wall time where each channel count is predicted by a fit to the others."""
    gemm, wall = np.empty(len(rows)), np.empty(len(rows))
    for channels in np.unique(rows.channels):
        out = rows.channels == channels
        own = put_all(system, fit_contention(system, rows.where(~out)))
        gemm[out], wall[out] = errors(own, rows.where(out))
    return gemm, wall


def put_all(system: System, coefficients: Mapping[str, float]) -> System:
    """The system with other coefficients of contention."""
    for name, value in coefficients.items():
        system = put(system, f"gpu.contention.{name}", value)
    return system


def table(system: System, rows: Overlaps) -> Sequence[Mapping[str, Any]]:
    """What `study=overlap_measured` writes: one row for each measured overlap, fitted ones with the error left out."""
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
