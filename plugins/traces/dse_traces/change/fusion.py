"""Kernels bound by memory that run as a part of the kernel before them on their stream.

The result of the first kernel then is neither written nor read again, and the gap between both is gone. Of two kernels
bound by memory, with times a and b, as much as

    s min(a, b),    s in [1, 2/3, 1/3]

vanishes (assumed): the second reads its other inputs and writes its result, each as large as the result of the first;
1: it reads nothing else; the shortest run is the mild case. After a GEMM, an attention or a convolution, s b: an
epilogue does it; after one of these a norm or a softmax needs sums over rows that several of its CTAs hold, so s in
[2/3, 1/3, 0].
"""

from __future__ import annotations

from dataclasses import replace

from dse_traces.laws.assumed_changes import assumed_changes
from dse_traces.laws.contention import ON_SMS
from dse_traces.laws.task_graph import EXPECTED, ContentionModel, Structure
from dse_traces.profile.kernel_classes import COMMUNICATES, MOVED
from dse_traces.profile.waits import CLOCKS_DIFFER_S

FOLLOWS = ("element-wise", "norm", "softmax")
"""Classes of kernels that can run as a part of the one before."""
_BY_ROWS = ("norm", "softmax")
_NEIGHBOURS_S = 10e-6  # by which a kernel that follows another one begins after it at most


def fuse(model: ContentionModel, structure: Structure) -> Structure:
    """A structure in which kernels of `FOLLOWS` are parts of the kernel before, where they wait for nothing else."""
    kinds, alone = model.profile.kernels["kind"].tolist(), model.alone_s[EXPECTED]
    launches, fused = list(structure.launch_s), dict[int, tuple[float, ...]]()
    assumed = assumed_changes()
    for kernel, before in enumerate(structure.previous):
        if before < 0 or not _may_fuse(model, structure, kernel, before):
            continue
        on_sms = kinds[before] in ON_SMS
        share = assumed.cases("vanishes_of_rows" if on_sms and kinds[kernel] in _BY_ROWS else "vanishes")
        # between kernels bound by memory the shorter one limits what need not be written and read again
        most = 1.0 if on_sms else min(1.0, float(alone[before] / max(alone[kernel], 1e-12)))
        fused[kernel] = tuple((1 - most * share).tolist())
        # a part of another kernel has no launch
        launches[kernel] = float("nan")
    return replace(structure, launch_s=tuple(launches), fused={**structure.fused, **fused})


def _may_fuse(model: ContentionModel, structure: Structure, kernel: int, before: int) -> bool:
    """Tell whether a kernel follows another one at once, that computes, and waits for nothing else."""
    kinds, profile = model.profile.kernels["kind"], model.profile
    gap = profile.start_s[kernel] - profile.end_s[before]
    return (
        kinds.iloc[kernel] in FOLLOWS
        and kinds.iloc[before] not in (*COMMUNICATES, *MOVED)
        and -CLOCKS_DIFFER_S <= gap <= _NEIGHBOURS_S
        # a kernel that needs another stream cannot run inside the one before it
        and not structure.needs.get(kernel)
        and model.unknown_s[kernel] == 0
    )
