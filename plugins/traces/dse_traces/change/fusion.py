"""Kernels bound by memory that run as a part of the kernel before them on their stream.

The result of the first kernel then is neither written nor read again, and the gap between both is gone. Of two kernels
bound by memory, with times a and b, as much as

    s min(a, b),    s in [1/3, 2/3, 1]

vanishes (assumed): the second reads its other inputs and writes its result, each as large as the result of the first;
1: it reads nothing else. After a GEMM, an attention or a convolution, s b: an epilogue does it; after one of these a
norm or a softmax needs sums over rows that several of its CTAs hold, so s in [0, 1/3, 2/3].
"""

from __future__ import annotations

from dataclasses import replace

from dse_traces.laws.assumed_changes import assumed_changes
from dse_traces.laws.contention import ON_SMS
from dse_traces.laws.task_graph import EXPECTED, Contended, Structure
from dse_traces.profile.kernel_classes import COMMUNICATES, MOVED

FOLLOWS = ("element-wise", "norm", "softmax")
"""Classes of kernels that can run as a part of the one before."""
_BY_ROWS = ("norm", "softmax")
_NEIGHBOURS_S = 10e-6  # by which a kernel that follows another one begins after it at most
_SAME_S = 1.5e-6  # by which kernels of one stream may overlap


def fuse(model: Contended, structure: Structure) -> Structure:
    """A structure in which kernels of `FOLLOWS` are parts of the kernel before, where they wait for nothing else."""
    kinds, alone = model.profile.kernels["kind"].tolist(), model.alone_s[EXPECTED]
    launches, fused = list(structure.launch_s), dict[int, tuple[float, ...]]()
    assumed = assumed_changes()
    for kernel, before in enumerate(structure.previous):
        if before < 0 or not _may_fuse(model, structure, kernel, before):
            continue
        on_sms = kinds[before] in ON_SMS
        share = assumed.cases("vanishes_of_rows" if on_sms and kinds[kernel] in _BY_ROWS else "vanishes")
        most = 1.0 if on_sms else min(1.0, float(alone[before] / max(alone[kernel], 1e-12)))
        fused[kernel] = tuple((1 - most * share).tolist())
        launches[kernel] = float("nan")
    return replace(structure, launch_s=tuple(launches), fused={**structure.fused, **fused})


def _may_fuse(model: Contended, structure: Structure, kernel: int, before: int) -> bool:
    """Tell whether a kernel follows another one at once, that computes, and waits for nothing else."""
    kinds, profile = model.profile.kernels["kind"], model.profile
    gap = profile.start_s[kernel] - profile.end_s[before]
    return (
        kinds.iloc[kernel] in FOLLOWS
        and kinds.iloc[before] not in (*COMMUNICATES, *MOVED)
        and -_SAME_S <= gap <= _NEIGHBOURS_S
        and not structure.needs.get(kernel)
        and model.unknown_s[kernel] == 0
    )
