"""Losses of a schedule against the ideal in seconds, by counterfactual replays.

    ideal           max(time of the undivided GEMM, time of the collective over all links), each with the GPU to itself
    contention      makespan - T1,  T1: every task has all CUs and links to itself
    decomposition   T1 - T2,        T2: and the chunks of the GEMM take as long together as the undivided GEMM
    starvation      T2 - T3,        T3: and every step of the collective uses all links, engines or CUs
    launch          T3 - T4,        T4: and no launch or set-up takes time
    dependency      T4 - ideal:     filling and draining the pipeline, and waiting for one another

in this order. Each replay keeps the assumptions of those before it, so that the losses add up to makespan - ideal. A
loss may be negative (chunks that fill their last wave better); one within the rounding error is 0. A replay is a
longest path, because its tasks share no resource. The paper's ratios (FiCCO, arXiv:2512.10236) are: DIL = sum of the
chunks' times alone / time of the undivided GEMM; CIL = sum of their times as run / sum of their times alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulators.compiled import compile_lazily
from simulators.taskgraph.graph import Floats, TaskGraph

LOSSES = ("contention_s", "decomposition_s", "starvation_s", "launch_s", "dependency_s")
_ROUNDING = 1e-12  # of the makespan: replays that are equal add the same durations in another order
Indices = NDArray[np.intp]


def losses(graph: TaskGraph, makespan: Floats) -> dict[str, Floats]:
    """Compute `ideal_s` and the losses [s] of `LOSSES`, each [B], which add up to makespan [B] - ideal."""
    gemm = np.array([kind == "gemm" for kind in graph.kinds])
    at, none = graph.at, np.full(graph.num_tasks, -1, np.int32)
    undivided = np.where(gemm, at["wide_s"], at["alone_s"])
    replays = [
        longest(graph, at["delay"], at["alone_s"]),
        longest(graph, at["delay"], undivided),
        longest(graph, at["delay"], at["wide_s"]),
        longest(graph, none, at["wide_s"]),
    ]
    result = {"ideal_s": ideal(graph)}
    steps = [makespan, *replays, result["ideal_s"]]
    differences = {name: before - after for name, before, after in zip(LOSSES, steps[:-1], steps[1:], strict=True)}
    return result | {
        name: np.where(np.abs(seconds) > _ROUNDING * makespan, seconds, 0.0) for name, seconds in differences.items()
    }


def ideal(graph: TaskGraph) -> Floats:
    """Time [B] of the slower of GEMM and collective [s] on the busiest GPU, each undivided and with the GPU alone."""
    gemm, transfers = graph.of_kind("gemm"), graph.of_kind("transfer")
    result = np.zeros(graph.num_designs)
    for gpu in np.unique(graph.gpu):
        for tasks in (gemm, transfers):
            result = np.maximum(result, graph.total("ideal_s", tasks[graph.gpu[tasks] == gpu]))
    return result


def longest(graph: TaskGraph, delay: NDArray[np.int32], seconds: NDArray[np.int32]) -> Floats:
    """Length [B] of the longest path where task t takes the columns `delay[t]` (-1: none) plus `seconds[t]` [s]."""
    pairs, duration_of = np.unique(np.stack([delay, seconds], axis=1), axis=0, return_inverse=True)
    durations = np.empty((len(pairs), graph.num_designs))
    for row, (wait, column) in zip(durations, pairs.tolist(), strict=True):
        row[:] = graph.flat(graph.values[column]) + (graph.flat(graph.values[wait]) if wait >= 0 else 0.0)
    result = np.zeros(graph.num_designs)
    _longest(
        graph.pred_ptr.astype(np.intp),
        graph.pred.astype(np.intp),
        duration_of.reshape(-1).astype(np.intp),
        durations,
        result,
    )
    return result


@compile_lazily
def _longest(pred_ptr: Indices, pred: Indices, duration_of: Indices, durations: Floats, result: Floats) -> None:
    stride = 64  # designs side by side, in the lanes of the machine
    finished, start = np.empty((duration_of.size, stride)), np.empty(stride)
    for begin in range(0, result.size, stride):
        width = min(stride, result.size - begin)
        for task in range(duration_of.size):
            for i in range(width):
                start[i] = 0.0
            for j in range(pred_ptr[task], pred_ptr[task + 1]):
                before = pred[j]
                for i in range(width):
                    ended = finished[before, i]
                    start[i] = ended if ended > start[i] else start[i]
            kind = duration_of[task]
            for i in range(width):
                ended = start[i] + durations[kind, begin + i]
                finished[task, i] = ended
                result[begin + i] = ended if ended > result[begin + i] else result[begin + i]
