"""Communication of a profile: how much is hidden, and how much of it are copies or waiting."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd

from dse.results.words import cell
from dse_traces.profile.kernel_names import reduce_name
from dse_traces.profile.kernels import Marks, Profile
from dse_traces.profile.overlap import Overlapped, overlapped
from dse_traces.profile.unnamed_kernels import unknown_kernels

_NOTIFIES = re.compile(r"\b(notify|barrier|wait signal|sync)\b")
_WORTH = 0.001  # of the time of communication, that is told


def communication_lines(profile: Profile, recorded: Overlapped) -> Iterator[str]:
    """Yield how much of the communication of a profile is hidden, the most important first."""
    if not recorded.collective_s:
        yield _nothing_known(profile)
        return
    share = f"{100 * recorded.exposed_s / recorded.span_s:.1f} % of the run"
    yield (
        f"collectives take {cell(recorded.collective_s, 's')}, {100 * recorded.hidden:.1f} % of it beside "
        f"computation; {cell(recorded.exposed_s, 's')} are exposed, {share}"
    )
    if (copies := profile.is_peer_copy).any():
        runs = copy_runs(profile)
        text = f"{copies.sum():,} copies between GPUs by copy engines, in {runs:,} run{'s' if runs > 1 else ''}"
        yield f"  of it {text}: {cell(_of(profile, copies).collective_s, 's')}"
    yield from _fused(profile)
    notes = notifying_kernels(profile)
    moves = _of(profile, profile.has_communication & ~notes)
    if moves.collective_s and profile.seconds[notes].sum() > _WORTH * recorded.collective_s:
        waited = cell(float(profile.seconds[notes].sum()), "s")
        hidden = f"{100 * moves.hidden:.1f} % is hidden"
        yield f"  of it kernels that notify or wait for ranks: {waited}; without them {hidden}"


def _fused(profile: Profile) -> Iterator[str]:
    """Yield how long kernels run that multiply and communicate in one."""
    if not (fused := profile.is_fused).any():
        return
    others = _of(profile, profile.is_collective)
    rest = f"; without them {100 * others.hidden:.1f} % is hidden" if others.collective_s else ""
    takes = cell(_of(profile, fused).collective_s, "s")
    yield (
        f"  of it kernels that multiply and communicate in one ({fused.sum():,}): {takes}, taken as hidden inside (how "
        f"long they move data is not recorded){rest}"
    )


def _nothing_known(profile: Profile) -> str:
    """A line that nothing communicates, as far as that is known."""
    unknown = unknown_kernels(profile)
    if not unknown.counts:
        return "no kernel of it communicates"
    return "no kernel of known kind communicates" + (f", but {unknown.busy} is of unknown kind" if unknown.busy else "")


def _of(profile: Profile, communicates: Marks) -> Overlapped:
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
    gap = kernels["start_s"].to_numpy(float) - before["end_s"].to_numpy(float)
    follows = before["copies"].eq(True).to_numpy(bool) & (gap <= before["seconds"].to_numpy(float))
    return int(np.sum(profile.is_peer_copy & ~follows))
