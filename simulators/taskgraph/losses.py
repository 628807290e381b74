"""Where the time goes that a schedule takes beyond the ideal: losses in seconds, by counterfactual replays.

    ideal           max(time of the undivided GEMM, time of the collective over all links), each with the GPU to itself
    contention      makespan - T1,  T1: as if every task had all CUs, links at its disposal and nobody beside it
    decomposition   T1 - T2,        T2: and the chunks of the GEMM took together what it takes undivided
    starvation      T2 - T3,        T3: and every step of the collective used all links, engines or CUs
    launch          T3 - T4,        T4: and no launch or set-up took time
    dependency      T4 - ideal:     filling and draining the pipeline, and waiting for one another

in this order, each replay with the wishes of those before it, so that the losses add up to makespan - ideal. A loss may
be negative (chunks that fill their last wave better); what is but a rounding error is 0. A replay is a longest path:
what is left shares nothing. Beside them the paper's ratios (FiCCO, arXiv:2512.10236): DIL = sum of the chunks' times
alone / time of the undivided GEMM; CIL = their times as they ran / alone.
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
    """`ideal_s`, and the losses [s] of `LOSSES`, each [B]; makespan [B] as it ran. They add up to makespan - ideal."""
    gemm = np.array([kind == "gemm" for kind in graph.kinds])
    at, none = graph.at, np.full(graph.num_tasks, -1, np.int32)
    undivided = np.where(gemm, at["wide_s"], at["alone_s"])
    replays = [
        longest(graph, at["delay"], at["alone_s"]),
        longest(graph, at["delay"], undivided),
        longest(graph, at["delay"], at["wide_s"]),
        longest(graph, none, at["wide_s"]),
    ]
    found = {"ideal_s": ideal(graph)}
    steps = [makespan, *replays, found["ideal_s"]]
    lost = {name: before - after for name, before, after in zip(LOSSES, steps[:-1], steps[1:], strict=True)}
    return found | {name: np.where(np.abs(one) > _ROUNDING * makespan, one, 0.0) for name, one in lost.items()}


def ideal(graph: TaskGraph) -> Floats:
    """The larger [B] of GEMM and collective [s], each undivided and with the GPU to itself; of the busiest GPU."""
    gemm, moved = graph.of_kind("gemm"), graph.of_kind("transfer")
    found = np.zeros(graph.num_designs)
    for gpu in np.unique(graph.gpu):
        for tasks in (gemm, moved):
            found = np.maximum(found, graph.total("ideal_s", tasks[graph.gpu[tasks] == gpu]))
    return found


def longest(graph: TaskGraph, delay: NDArray[np.int32], took: NDArray[np.int32]) -> Floats:
    """Length [B] of the longest path where task t takes the columns `delay[t]` (-1: nothing) and `took[t]` [s]."""
    pairs, of = np.unique(np.stack([delay, took], axis=1), axis=0, return_inverse=True)
    durations = np.empty((len(pairs), graph.num_designs))
    for row, (one, other) in zip(durations, pairs.tolist(), strict=True):
        row[:] = graph.flat(graph.values[other]) + (graph.flat(graph.values[one]) if one >= 0 else 0.0)
    found = np.zeros(graph.num_designs)
    _longest(
        graph.pred_ptr.astype(np.intp), graph.pred.astype(np.intp), of.reshape(-1).astype(np.intp), durations, found
    )
    return found


@compile_lazily
def _longest(pred_ptr: Indices, pred: Indices, took: Indices, durations: Floats, found: Floats) -> None:
    stride = 64  # designs side by side, in the lanes of the machine
    finished, start = np.empty((took.size, stride)), np.empty(stride)
    for begin in range(0, found.size, stride):
        many = min(stride, found.size - begin)
        for task in range(took.size):
            for i in range(many):
                start[i] = 0.0
            for j in range(pred_ptr[task], pred_ptr[task + 1]):
                before = pred[j]
                for i in range(many):
                    ended = finished[before, i]
                    start[i] = ended if ended > start[i] else start[i]
            kind = took[task]
            for i in range(many):
                ended = start[i] + durations[kind, begin + i]
                finished[task, i] = ended
                found[begin + i] = ended if ended > found[begin + i] else found[begin + i]
