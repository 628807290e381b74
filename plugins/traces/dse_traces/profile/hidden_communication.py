"""Parts of the communication of a profile: what hides each, copies by engines, and kernels that wait for ranks."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from dse_traces.profile.kernel_names import reduce_name
from dse_traces.profile.kernels import Marks, Profile
from dse_traces.profile.overlap import Overlapped, overlapped

_NOTIFIES = re.compile(r"\b(notify|barrier|wait signal|sync)\b")


def overlap_of(profile: Profile, communicates: Marks) -> Overlapped:
    """Overlap of the profile with a part of the communication."""
    return overlapped(profile.start_s, profile.end_s, computes=profile.is_compute, communicates=communicates)


def notifying_kernels(profile: Profile) -> Marks:
    """Kernels that communicate and move next to nothing: they notify ranks, and wait for those that are late [N]."""
    names = {name for name in profile.kernels["name"].unique() if _NOTIFIES.search(reduce_name(str(name)).words)}
    return profile.is_collective & profile.kernels["name"].isin(names).to_numpy(bool)


def copy_runs(profile: Profile) -> int:
    """Number of runs of copies between GPUs: such as follow one another on a stream, sooner than they last."""
    kernels = profile.kernels.assign(copies=profile.is_peer_copy, end_s=profile.end_s)
    by_stream = kernels.groupby("stream", sort=False)
    before: pd.DataFrame = by_stream[["copies", "end_s", "seconds"]].shift(1)
    # NaN for the first one of a stream, which compares false: it follows nothing
    gap = kernels["start_s"].to_numpy(float) - before["end_s"].to_numpy(float)
    follows = before["copies"].eq(True).to_numpy(bool) & (gap <= before["seconds"].to_numpy(float))
    return int(np.sum(profile.is_peer_copy & ~follows))
