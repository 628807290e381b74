"""Metrics, read off the timeline in one place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dse.backend import Columns, Metric
from dse.values import leaves
from simulators.system import System
from simulators.timeline import Timeline

Floats = NDArray[np.float64]

METRICS: Mapping[str, Metric] = {
    "makespan_s": Metric("s", "time from the start to the last finish", low=1e-12),
    "comm_cu_s": Metric("CU s", "CU-seconds taken by communication: CUs held times how long"),
    "peak_staging_bytes": Metric("byte", "largest amount of received data waiting to be computed on"),
    "exposed_comm_s": Metric("s", "time during which no GEMM runs"),
    "gemm_s": Metric("s", "time during which a GEMM runs"),
    "comm_s": Metric("s", "time during which data moves"),
    "setup_fraction": Metric("fraction", "share of the transfers' time that is their set-up", high=1.0),
    "moved_bytes": Metric("byte", "payload received by one GPU"),
    "hbm_bytes": Metric("byte", "HBM traffic of one GPU"),
    "flop": Metric("flop", "FLOP of one GPU"),
    "cost_proxy": Metric("relative", "hardware cost relative to the reference system (derived; see docs/models.md)"),
}

RELATIONS: Mapping[str, Metric] = {
    "speedup": Metric("x", "makespan of the baseline / makespan", goal="maximize"),
    "ideal_speedup": Metric("x", "(T_gemm + T_comm) / max(T_gemm, T_comm) of the baseline", goal="maximize"),
    "fraction_of_ideal": Metric("fraction", "(speedup - 1) / (ideal speedup - 1)", goal="maximize", low=float("-inf")),
    "decomposition": Metric("x", "GEMM time / GEMM time of the baseline (decomposition inefficiency, DIL)"),
}


def measure(timeline: Timeline, system: System) -> dict[str, Floats]:
    """Every metric of `METRICS` as an array [B], or [designs] where those share one graph."""
    graph = timeline.graph
    gemms, transfers = graph.of_kind("gemm"), graph.of_kind("transfer")
    moving = np.concatenate([transfers, graph.of_kind("launch")])
    spans = timeline.finished - timeline.issued
    gemm_s = busy(timeline.issued[:, gemms], timeline.finished[:, gemms])
    hbm = np.flatnonzero(graph.use_resource == graph.resources.index("hbm"))
    return {
        "makespan_s": timeline.makespan,
        "comm_cu_s": _sum(graph.cus[:, transfers] * spans[:, transfers]),
        "peak_staging_bytes": _peak_staging(timeline, transfers),
        "exposed_comm_s": np.maximum(timeline.makespan - gemm_s, 0.0),
        "gemm_s": gemm_s,
        "comm_s": busy(timeline.issued[:, transfers], timeline.finished[:, transfers]),
        "setup_fraction": _sum(graph.delay[:, moving]) / _sum(spans[:, moving]),
        "moved_bytes": _sum(graph.moved_bytes),
        "hbm_bytes": _sum(graph.use[:, hbm] * graph.work[:, graph.use_task[hbm]]),
        "flop": _sum(graph.flop),
        "cost_proxy": cost_proxy(system),
    }


def relate(point: Columns, baseline: Columns) -> Columns:
    """Metrics of `RELATIONS`: speed-up over the baseline, the ideal, the fraction of it, decomposition loss.

    S_ideal = (Tg + Tc) / max(Tg, Tc) with the baseline's GEMM and communication time; fraction = (S-1)/(S_ideal-1).
    """
    speedup = baseline["makespan_s"] / point["makespan_s"]
    ideal = (baseline["gemm_s"] + baseline["comm_s"]) / np.maximum(baseline["gemm_s"], baseline["comm_s"])
    return {
        "speedup": speedup,
        "ideal_speedup": ideal,
        "fraction_of_ideal": (speedup - 1) / (ideal - 1),
        "decomposition": point["gemm_s"] / baseline["gemm_s"],
    }


def _sum(table: Floats) -> Floats:
    """Row sums [B]; in one memory order, so that a batch adds up to the bit as its rows do alone."""
    return np.asarray(np.ascontiguousarray(table).sum(axis=1))


def busy(start: Floats, finish: Floats) -> Floats:
    """Length [B] of the union of intervals [B, N]."""
    if start.shape[1] == 0:
        return np.zeros(start.shape[0])
    order = np.argsort(start, axis=1, kind="stable")
    start, finish = np.take_along_axis(start, order, 1), np.take_along_axis(finish, order, 1)
    covered = np.maximum.accumulate(finish, axis=1)
    before = np.concatenate([np.full((len(start), 1), -np.inf), covered[:, :-1]], axis=1)
    return np.asarray(_sum(np.maximum(finish - np.maximum(start, before), 0.0)))


def _peak_staging(timeline: Timeline, transfers: NDArray[np.intp]) -> Floats:
    """Buffers fill when a transfer is issued and are free when its consumer has finished."""
    graph = timeline.graph
    consumer = graph.consumer[transfers]
    freed = np.where(consumer >= 0, timeline.finished[:, consumer], np.inf)
    size = graph.staged_bytes[:, transfers]
    times = np.concatenate([freed, timeline.issued[:, transfers]], axis=1)
    steps = np.concatenate([-size, size], axis=1)
    order = np.argsort(times, axis=1, kind="stable")
    return np.asarray(np.cumsum(np.take_along_axis(steps, order, axis=1), axis=1).max(axis=1))


def cost_proxy(system: System) -> Floats:
    """Weighted mean of (quantity / its reference): 1 for the reference system. A proxy, not a price (derived)."""
    value = {path: found for path, found, _ in leaves(system)}
    weights = system.cost_weights
    parts = [weights[path] * np.asarray(value[path]) / system.cost_reference[path] for path in weights]
    return np.asarray(sum(parts) / sum(weights.values()))
