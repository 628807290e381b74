"""Kernels whose names do not tell what they do: how much time they take, on which streams, and how to name them.

They are taken to compute. On a stream beside the one that computes most, they may as well communicate: a share of
hidden communication is then given for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dse.errors import Problem
from dse_traces.profile.kernel_classes import OPTION
from dse_traces.profile.kernel_names import reduce_name
from dse_traces.profile.kernels import Profile
from dse_traces.profile.overlap import Overlapped, overlapped

_LEAST = 0.005  # of the time of all kernels, that is told
_MOSTLY = 0.5  # of the time of a stream
_NAMED, _LETTERS = 3, 60


@dataclass(frozen=True)
class Unknown:
    """Unknown kernels of a profile, as shares of the time of kernels: of all; `names`: of each, largest first.

    streams: of streams beside the one that computes most, that mostly run unknown kernels, the share of their time.
    """

    share: float
    names: Mapping[str, float]
    streams: Mapping[str, float]

    @property
    def counts(self) -> bool:
        """True where they take enough time to be told."""
        return self.share >= _LEAST

    @property
    def largest(self) -> str:
        """The largest ones and their shares."""
        texts = [f"{name} {100 * share:.1f} %" for name, share in list(self.names.items())[:_NAMED]]
        left = len(self.names) - _NAMED
        return ", ".join(texts) + (f", and {left} more" if left > 0 else "")

    @property
    def busy(self) -> str:
        """The streams that they keep busy, or ""."""
        texts = [f"{100 * share:.1f} % of the time of stream {stream}" for stream, share in self.streams.items()]
        return ", ".join(texts)

    def way_out(self, option: str = OPTION) -> str:
        """The way to name them, in a file that an option names."""
        example = next(iter(self.names), "my_dispatch").split("::")[-1]
        return f"name them in a file, {option}=kernels.yaml, with a line such as `collective: [{example}]`"


def unknown_kernels(profile: Profile) -> Unknown:
    """The unknown kernels of a profile."""
    marks, seconds = profile.is_unknown, profile.seconds
    kernels = profile.kernels.assign(seconds=seconds, unknown=np.where(marks, seconds, 0.0))
    labels = {name: reduce_name(str(name)).label(_LETTERS) for name in kernels["name"][marks].unique()}
    total = max(float(seconds.sum()), 1e-15)
    by_name = kernels[marks].groupby(kernels["name"][marks].map(labels))["seconds"].sum() / total
    by_stream = kernels.groupby("stream")[["seconds", "unknown"]].sum()
    names = by_name.sort_values(ascending=False, kind="stable")
    return Unknown(float(seconds[marks].sum()) / total, _shares(names), _shares(_suspects(profile, by_stream)))


def _suspects(profile: Profile, by_stream: pd.DataFrame) -> pd.Series[float]:
    """Shares of the time of streams that mostly run unknown kernels, beside the one on which most is computed."""
    # known computation only: unknown kernels must not make their own stream the main one
    seconds = profile.seconds * (profile.is_compute & ~profile.is_unknown)
    computed = pd.Series(seconds).groupby(profile.kernels["stream"]).sum()
    shares = by_stream["unknown"] / by_stream["seconds"].clip(lower=1e-15)
    # the stream on which most is computed is no stream of communication
    beside = shares.index != (computed.idxmax() if computed.max() > 0 else by_stream["seconds"].idxmax())
    worth = by_stream["unknown"] >= _LEAST * by_stream["seconds"].sum()
    return shares[beside & (shares >= _MOSTLY) & worth].sort_values(ascending=False, kind="stable")


def _shares(column: pd.Series[float]) -> dict[str, float]:
    return {str(name): float(share) for name, share in column.items()}


def if_they_communicate(profile: Profile, unknown: Unknown) -> Overlapped:
    """Overlap of the profile if the unknown kernels of these streams communicated."""
    # kernels of these streams alone: unknown ones elsewhere still count as computation
    moves = profile.is_unknown & profile.kernels["stream"].isin(list(unknown.streams)).to_numpy(bool)
    computes, communicates = profile.is_compute & ~moves, profile.has_communication | moves
    return overlapped(profile.start_s, profile.end_s, computes=computes, communicates=communicates)


def nothing_to_move(
    rule: str, profile: Profile, *, path: str = "profile", value: str | None = None, option: str = OPTION
) -> Problem:
    """The problem of a profile without communication, as far as its kernels are known.

    rule: what it lacks. path, value: of the setting that names the profile; None: the profile's source. option: that
    names a file of names of kernels.
    """
    value, unknown = profile.source if value is None else value, unknown_kernels(profile)
    if profile.is_fused.any():
        fused = "that can be separated from products: its kernels multiply and communicate in one, and hide it inside"
        return Problem(path, f"{rule} {fused}", value, "record a run whose collectives are kernels of their own")
    if not unknown.counts:
        return Problem(path, rule, value, "record a rank of a run on several GPUs")
    share = unknown.busy or f"{100 * unknown.share:.1f} % of the time of kernels"
    text = f"{rule}, as far as its kernels are known: {share} is of unknown kind ({unknown.largest})"
    return Problem(path, text, value, unknown.way_out(option))


def unknown_summary(profile: Profile) -> dict[str, Any]:
    """The part of `profile.yaml` on unknown kernels."""
    unknown = unknown_kernels(profile)
    return {"share": unknown.share, "kernels": dict(unknown.names), "streams": dict(unknown.streams)}
