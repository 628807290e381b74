"""Kernels whose names do not tell what they do: how much time they take, on which streams, and how to name them.

They are taken to compute. On a stream beside the one that computes most, they may as well communicate: a share of
hidden communication is then given for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dse.results.words import cell
from dse_traces.profile.kernel_classes import OPTION, Patterns, fits_pattern
from dse_traces.profile.kernel_names import reduce_name
from dse_traces.profile.kernels import Profile
from dse_traces.profile.overlap import Overlapped, overlapped

_LEAST = 0.005  # of the time of all kernels, that is told
_MOSTLY = 0.5  # of the time of a stream
_NAMED, _LETTERS = 3, 60
WAY_OUT = "name them in a file, kernels=kernels.yaml, with a line such as `collective: [{}]`"
"""The way to name kernels, with one of them."""


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

    @property
    def way_out(self) -> str:
        """The way to name them."""
        return WAY_OUT.format(next(iter(self.names), "my_dispatch").split("::")[-1])


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
    moves = profile.is_unknown & profile.kernels["stream"].isin(list(unknown.streams)).to_numpy(bool)
    computes, communicates = profile.is_compute & ~moves, profile.has_communication | moves
    return overlapped(profile.start_s, profile.end_s, computes=computes, communicates=communicates)


def unknown_lines(profile: Profile) -> Iterator[str]:
    """Yield what is to be told of the unknown kernels of a profile, if they take enough time."""
    unknown = unknown_kernels(profile)
    if not unknown.counts:
        return
    busy = f"; {unknown.busy}" if unknown.streams else ""
    yield (
        f"{100 * unknown.share:.1f} % of the time of kernels is of unknown kind, taken as computation{busy}: "
        f"{unknown.largest}"
    )
    if unknown.streams:
        done = if_they_communicate(profile, unknown)
        share = f"{100 * done.hidden:.1f} % of {cell(done.collective_s, 's')}"
        yield f"if kernels of stream {', '.join(unknown.streams)} communicate, {share} of communication is hidden"
    yield unknown.way_out


def unused_patterns(profiles: Iterable[Profile], patterns: Patterns) -> Iterator[str]:
    """Yield a line for each pattern of a user that no kernel of any of the profiles fits."""
    names = {str(name) for profile in profiles for name in profile.kernels["name"].unique()} if patterns else set()
    for kind, texts in patterns.items():
        for text in texts:
            if not any(fits_pattern(name, text) for name in names):
                yield f"{OPTION}.{kind}: no kernel fits the pattern {text}"


def nothing_to_move(rule: str, profile: Profile) -> tuple[str, str, str]:
    """Rule, value and way out of a profile without communication, as far as its kernels are known."""
    unknown = unknown_kernels(profile)
    if profile.is_fused.any():
        fused = "that can be separated from products: its kernels multiply and communicate in one, and hide it inside"
        return f"{rule} {fused}", profile.source, "record a run whose collectives are kernels of their own"
    if not unknown.counts:
        return rule, profile.source, "record a rank of a run on several GPUs"
    share = unknown.busy or f"{100 * unknown.share:.1f} % of the time of kernels"
    text = f"{rule}, as far as its kernels are known: {share} is of unknown kind ({unknown.largest})"
    return text, profile.source, unknown.way_out


def summary(profile: Profile) -> dict[str, Any]:
    """The part of `profile.yaml` on unknown kernels."""
    unknown = unknown_kernels(profile)
    return {"share": unknown.share, "kernels": dict(unknown.names), "streams": dict(unknown.streams)}
