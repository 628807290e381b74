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
Indices = NDArray[np.uint32]


def losses(graph: TaskGraph, makespan: Floats) -> dict[str, Floats]:
    """Compute `ideal_s` and the losses [s] of `LOSSES`, each [B], which add up to makespan [B] - ideal."""
    gemm = np.array([kind == "gemm" for kind in graph.kinds])
    at, none = graph.at, np.full(graph.num_tasks, -1, np.int32)
    # T2: chunks of the GEMM take their shares of the undivided one
    undivided = np.where(gemm, at["wide_s"], at["alone_s"])
    # T1, T2, T3, T4: (delay, time) columns; -1: no delay
    taken = [(at["delay"], at["alone_s"]), (at["delay"], undivided), (at["delay"], at["wide_s"]), (none, at["wide_s"])]
    # replays share most durations
    pairs, of = np.unique(np.concatenate([np.stack(one, axis=1) for one in taken]), axis=0, return_inverse=True)
    durations = np.empty((len(pairs), *graph.shape))
    for row, (delay, seconds) in zip(durations, pairs.tolist(), strict=True):
        row[:] = graph.values[seconds] + (graph.values[delay] if delay >= 0 else 0.0)
    # equal replays are run once
    replays, replay_of = np.unique(of.reshape(len(taken), -1), axis=0, return_inverse=True)
    is_last = np.ones(graph.num_tasks, np.bool_)
    is_last[graph.pred] = False  # the makespan is at a task that nothing waits for
    structure = (part.astype(np.uint32) for part in (graph.pred_ptr, graph.pred, replays, replay_of.reshape(-1)))
    result, ideal_s = np.empty((len(LOSSES), graph.num_designs)), ideal(graph)
    ends = np.array(makespan), np.array(ideal_s)  # what cannot be written would be compiled for anew
    _replay(*structure, is_last, durations.reshape(-1), *ends, _ROUNDING, result.reshape(-1))
    return {"ideal_s": ideal_s, **dict(zip(LOSSES, result, strict=True))}


def ideal(graph: TaskGraph) -> Floats:
    """Time [B] of the slower of GEMM and collective [s] on the busiest GPU, each undivided and with the GPU alone."""
    gemm, transfers = graph.of_kind("gemm"), graph.of_kind("transfer")
    result: Floats = np.zeros(())  # none of either: 0
    for gpu in np.unique(graph.gpu):
        for tasks in (gemm, transfers):
            result = np.maximum(result, graph.grid_total("ideal_s", tasks[graph.gpu[tasks] == gpu]))
    return graph.flat(result)


@compile_lazily
def _replay(  # noqa: C901, PLR0912, PLR0913, PLR0917
    pred_ptr: Indices,
    pred: Indices,
    duration_of: Indices,
    replay_of: Indices,
    is_last: NDArray[np.bool_],
    durations: Floats,
    makespan: Floats,
    ideal_s: Floats,
    rounding: float,
    result: Floats,
) -> None:
    """Losses [L, B] between the makespan and the longest paths of R replays, and the ideal; duration_of: [R, T].

    Arrays are flat, and indices unsigned: so the inner loops run in vector lanes.
    """
    one, stride = np.uint64(1), np.uint64(256)  # designs side by side: their times stay in the nearest cache
    replays, tasks = np.uint64(duration_of.shape[0]), np.uint64(duration_of.shape[1])
    designs, begin = np.uint64(makespan.size), np.uint64(0)
    finished, start, longest = np.empty(tasks * stride), np.empty(stride), np.empty(replays * stride)
    before_s, after_s = np.empty(stride), np.empty(stride)
    while begin < designs:
        width = min(stride, designs - begin)
        for replay in range(replays):
            best = replay * stride
            for i in range(width):
                longest[best + i] = 0.0
            for task in range(tasks):
                first, last, ends = np.uint64(pred_ptr[task]), np.uint64(pred_ptr[task + one]), task * stride
                taken = np.uint64(duration_of[replay, task]) * designs + begin
                if first == last:  # no predecessor, one, or several: the first two are most, and need no maximum
                    for i in range(width):
                        finished[ends + i] = durations[taken + i]
                elif first + one == last:
                    before = np.uint64(pred[first]) * stride
                    for i in range(width):
                        finished[ends + i] = finished[before + i] + durations[taken + i]
                else:
                    before = np.uint64(pred[first]) * stride
                    for i in range(width):
                        start[i] = finished[before + i]
                    for j in range(first + one, last):
                        before = np.uint64(pred[j]) * stride
                        for i in range(width):
                            ended, latest = finished[before + i], start[i]
                            start[i] = ended if ended > latest else latest
                    for i in range(width):
                        finished[ends + i] = start[i] + durations[taken + i]
                if is_last[task]:  # else a later task ends later
                    for i in range(width):
                        ended, latest = finished[ends + i], longest[best + i]
                        longest[best + i] = ended if ended > latest else latest
        for i in range(width):
            before_s[i] = makespan[begin + i]
        for loss in range(np.uint64(result.size) // designs):
            lost = loss * designs + begin
            if loss < np.uint64(replay_of.size):  # the last loss is against the ideal, which is no replay
                best = np.uint64(replay_of[loss]) * stride
                for i in range(width):
                    after_s[i] = longest[best + i]
            else:
                for i in range(width):
                    after_s[i] = ideal_s[begin + i]
            for i in range(width):
                seconds = before_s[i] - after_s[i]
                # durations added in another order differ by rounding: no loss
                result[lost + i] = seconds if abs(seconds) > rounding * makespan[begin + i] else 0.0
                before_s[i] = after_s[i]  # each loss is against the replay before it
        begin += stride
