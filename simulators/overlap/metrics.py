"""Metrics of a timeline."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dse.backend import Columns, Law, Metric
from dse.values import leaves
from simulators.hardware.machine import System
from simulators.taskgraph.graph import Ints, TaskGraph
from simulators.taskgraph.timeline import Timeline, Totals, losses

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
    "ideal_s": Metric(
        "s", "the larger of GEMM and collective, each undivided and alone (simulators/taskgraph/timeline.py)"
    ),
    "contention_s": Metric("s", "loss to operators that run at the same time", low=float("-inf")),
    "decomposition_s": Metric("s", "loss to the GEMM's division into chunks", low=float("-inf")),
    "starvation_s": Metric("s", "loss to links, engines or CUs that are left idle", low=float("-inf")),
    "launch_s": Metric("s", "loss to launches and set-ups", low=float("-inf")),
    "dependency_s": Metric("s", "loss to filling, draining and waiting", low=float("-inf")),
    "dil": Metric("x", "GEMM chunks alone / undivided GEMM (decomposition inefficiency)"),
    "cil": Metric("x", "GEMM chunks as they ran / alone (contention inefficiency)"),
    "comm_cil": Metric("x", "transfers as they ran / alone (contention inefficiency)"),
    "cost_proxy": Metric(
        "relative", "hardware cost relative to the reference system (derived; docs/explanation/costs.md)"
    ),
}

RELATIONS: Mapping[str, Metric] = {
    "speedup": Metric("x", "makespan of the baseline / makespan", goal="maximize"),
    "ideal_speedup": Metric(
        "x",
        "makespan of the baseline / the longer of GEMM and collective alone, moved as by this point",
        goal="maximize",
    ),
    "fraction_of_ideal": Metric(
        "fraction", "(speedup - 1) / (ideal speedup - 1)", goal="maximize", low=float("-inf"), high=1.0 + 1e-9
    ),
    "baseline_ideal_speedup": Metric(
        "x", "(T_gemm + T_comm) / max(T_gemm, T_comm), as the baseline runs them", goal="maximize"
    ),
    "share_of_baseline_ideal": Metric(
        "fraction",
        "(speedup - 1) / (baseline's ideal speedup - 1): above 1 where data moves faster than in the baseline",
        goal="maximize",
        low=float("-inf"),
    ),
}


BOUNDS: Mapping[str, Metric] = {
    "bound_s": Metric("s", "proven: no schedule is shorter, or no order of these tasks (docs/explanation/bounds.md)"),
    "gap": Metric("fraction", "makespan / bound, less 1: what any schedule may still gain"),
}

_LOSSES = ("contention_s", "decomposition_s", "starvation_s", "launch_s", "dependency_s")

LAWS: Sequence[Law] = (
    Law("gemm_s <= makespan_s", lambda c: c["gemm_s"], lambda c: c["makespan_s"]),
    Law("comm_s <= makespan_s", lambda c: c["comm_s"], lambda c: c["makespan_s"]),
    Law("exposed_comm_s <= makespan_s", lambda c: c["exposed_comm_s"], lambda c: c["makespan_s"]),
    Law(
        "makespan_s <= gemm_s + exposed_comm_s", lambda c: c["makespan_s"], lambda c: c["gemm_s"] + c["exposed_comm_s"]
    ),
    Law(
        "ideal_s and the losses add up to makespan_s",
        lambda c: np.asarray(c["ideal_s"] + sum(c[name] for name in _LOSSES)),
        lambda c: c["makespan_s"],
        equal=True,
    ),
)
"""Laws of the metrics of every overlapped design. `ideal_s` may exceed the makespan of concurrent GEMMs: it adds their
times."""


def measure(graph: TaskGraph, totals: Totals) -> dict[str, Floats]:
    """Compute the metrics of `METRICS` that depend on a run, as arrays [B]."""
    return _run_metrics(graph, totals) | losses(graph, graph.flat(totals.makespan_s))


def _run_metrics(graph: TaskGraph, totals: Totals) -> dict[str, Floats]:
    """Compute them over the axes of the grid that each depends on, then for every design."""
    moving = np.concatenate([graph.of_kind("transfer"), graph.of_kind("launch")])
    busy_s, spent_s = (
        {kind: graph.on_grid(column) for kind, column in by_kind.items()} for by_kind in (totals.busy_s, totals.spent_s)
    )
    none, makespan_s = np.zeros(()), graph.on_grid(totals.makespan_s)
    gemm_s = busy_s.get("gemm", none)
    moving_s = spent_s.get("transfer", none) + spent_s.get("launch", none)
    columns = {
        "makespan_s": makespan_s,
        "comm_cu_s": totals.cu_s,
        "peak_staging_bytes": totals.peak_staged_bytes,
        "exposed_comm_s": np.maximum(makespan_s - gemm_s, 0.0),  # rounding
        "gemm_s": gemm_s,
        "comm_s": busy_s.get("transfer", none),
        "setup_fraction": _ratio(graph.grid_total("delay", moving), moving_s, otherwise=0.0),
        "moved_bytes": graph.grid_total("moved_bytes"),
        "hbm_bytes": _traffic(graph, "hbm"),
        "flop": graph.grid_total("flop"),
        **_ratios(graph, spent_s),
    }
    return {name: graph.flat(column) for name, column in columns.items()}


def _ratios(graph: TaskGraph, spent_s: Mapping[str, Floats]) -> dict[str, Floats]:
    """DIL of the GEMM, CIL of GEMM and transfers, over the grid; 1 without such tasks."""
    spent, alone, places = {}, {}, {kind: graph.of_kind(kind) for kind in ("gemm", "transfer")}
    for kind, tasks in places.items():
        # a reduced task stands for its members
        alone[kind] = graph.grid_total("alone_s", np.repeat(tasks, graph.members[tasks]))
        spent[kind] = spent_s.get(kind, alone[kind]) - graph.grid_total("delay", tasks)  # set-ups are no contention
    return {
        "dil": _ratio(alone["gemm"], graph.grid_total("ideal_s", places["gemm"])),
        "cil": _ratio(spent["gemm"], alone["gemm"]),
        "comm_cil": _ratio(spent["transfer"], alone["transfer"]),
    }


def _ratio(top: Floats, low: Floats, otherwise: float = 1.0) -> Floats:
    """Quotient over the grid, and another number where the lower one is 0."""
    if np.all(low > 0):  # the usual case
        return np.asarray(top / low)
    quotient = np.full(np.broadcast_shapes(np.shape(top), np.shape(low)), otherwise)
    return np.asarray(np.divide(top, low, out=quotient, where=np.asarray(low > 0)))


def measure_worst(graph: TaskGraph, timeline: Timeline, colours: Ints) -> dict[str, Floats]:
    """Compute the metrics of several simulated GPUs: the largest value over all GPUs, as all metrics are costs.

    A GPU's makespan is its own last finish, so the largest is the node's. Losses are those of the whole node.
    colours [T]: tasks of one colour are alike in numbers and times, as `Quotient.of`; GPUs whose tasks have the same
    colours are measured once.
    """
    gpus = np.unique(graph.gpu).tolist()
    places = [np.flatnonzero(graph.gpu == gpu) for gpu in gpus]
    distinct = {colours[tasks].tobytes(): tasks for tasks in places}
    measured = [_measure_part(graph, timeline, tasks) for tasks in distinct.values()]
    columns = {name: [metrics[name] for metrics in measured] for name in measured[0]}
    # of every GPU: other GPUs read its memory, too
    columns["hbm_bytes"] = [graph.flat(_traffic(graph, f"hbm.{gpu}")) for gpu in gpus]
    worst = {name: functools.reduce(np.maximum, column) for name, column in columns.items()}
    return worst | losses(graph, timeline.makespan)


def _measure_part(graph: TaskGraph, timeline: Timeline, tasks: NDArray[np.intp]) -> dict[str, Floats]:
    """Metrics of some tasks, the traffic of shared memories not counted."""
    part = graph.part(tasks)
    totals = Timeline(part, timeline.issued[:, tasks], timeline.finished[:, tasks]).totals()
    return _run_metrics(part, totals)


def _traffic(graph: TaskGraph, resource: str) -> Floats:
    """Units of a resource that all tasks use, over the grid."""
    index = graph.resources.index(resource) if resource in graph.resources else -1  # no such resource: no task uses it
    uses = np.flatnonzero(graph.use_resource == index)
    products = Counter(  # tasks of equal columns are one product
        zip(graph.at["use"][uses].tolist(), graph.at["work"][graph.use_task[uses]].tolist(), strict=True)
    )
    values = graph.values
    return np.asarray(sum(count * values[use] * values[work] for (use, work), count in products.items()), float)


def relate(point: Columns, baseline: Columns) -> Columns:
    """Compute the metrics of `RELATIONS`: the speed-up over the baseline, and what of two ideals it reaches.

    S = T_baseline / T and S_ideal = T_baseline / T_ideal of the point itself: the longer of its GEMM and its collective
    alone, as it moves data. What papers publish is often a share of the baseline's ideal, (Tg + Tc) / max(Tg, Tc) with
    the baseline's times. Fractions are (S - 1) / (S_ideal - 1), S - 1 where nothing can be gained, and no number where
    nothing moves.
    """
    speedup, ideal = baseline["makespan_s"] / point["makespan_s"], baseline["makespan_s"] / _own_ideal_s(point)
    longer_s = np.maximum(baseline["gemm_s"], baseline["comm_s"])
    of_baseline = (baseline["gemm_s"] + baseline["comm_s"]) / longer_s
    moves = point["comm_s"] > 0
    return {
        "speedup": speedup,
        "ideal_speedup": np.where(moves, ideal, np.nan),
        "fraction_of_ideal": np.where(moves, _share(speedup, ideal), np.nan),
        "baseline_ideal_speedup": of_baseline,
        "share_of_baseline_ideal": np.where(moves, _share(speedup, of_baseline), np.nan),
    }


def _own_ideal_s(point: Columns) -> Floats:
    """The longer of GEMM and collective of each point alone [s]: never longer than it took beside the other.

    A cut GEMM may fill its last waves better than the undivided one, and more CUs may move than a library takes.
    """
    # never longer than it took while the other ran
    return np.asarray(np.minimum(point["ideal_s"], np.maximum(point["gemm_s"], point["comm_s"])))


def _share(speedup: Floats, ideal: Floats) -> Floats:
    """Share of an ideal speed-up that a speed-up is, both less 1."""
    return np.asarray((speedup - 1) / np.where(ideal > 1, ideal - 1, 1.0))  # nothing to gain: the speed-up itself


def cost_proxy(system: System) -> Floats:
    """Weighted mean of (quantity / its reference): 1 for the reference system. A proxy, not a price (derived)."""
    value = {path: number for path, number, _ in leaves(system)}
    weights = system.cost_weights
    parts = [weights[path] * np.asarray(value[path]) / system.cost_reference[path] for path in weights]
    return np.asarray(sum(parts) / sum(weights.values()))
