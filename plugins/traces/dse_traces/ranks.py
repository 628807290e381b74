"""Profiles of several ranks of one run: which collectives are the same, and how long ranks waited for one another.

Collectives are matched within their group (stream, where groups are not recorded) by the number that the profiler tells
(`Seq`), else by their order among those of equal name: sizes may differ from rank to rank. Where ranks have different
counts of them, those of equal payload are matched by order. A send is matched with the receive of the same source,
destination and order. A rank that comes early waits inside the collective's kernel. The rank that comes last does not
wait, so

    transfer = the shortest duration of a collective among its ranks        waiting = a rank's duration - transfer

A copy between GPUs waits for no rank: its duration is its transfer.

Clocks of ranks differ, and only what is matched tells by how much. A collective ends at about the same time everywhere:
the clock of each rank is shifted by the median difference of the ends of the collectives that it shares with ranks
whose clocks are known, from the first rank on. What is left of these differences says how well clocks agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse import plugins
from dse_traces.kernel_classes import PEER_COPY
from dse_traces.profile import Profile
from dse_traces.replay import ENGINE, Replayed, lower_kernels
from dse_traces.waits import waits

_MOST_NAMED = 4  # files that are named
Floats = NDArray[np.float64]

_KEY = ["in_group", "operation", "by", "number"]
_UNEVEN = re.compile(r"v(?:_|$)|all_?to_?all|send|recv|^_?(?:gather|scatter)", re.IGNORECASE)
"""Names of collectives whose payloads may differ from rank to rank."""
_SENT, _MESSAGE_BEGIN = "send and receive", "message from "
_MESSAGE = re.compile(r"i?(?:send|recv|receive)", re.IGNORECASE)


@dataclass(frozen=True)
class Ranks:
    """Profiles of ranks of one run, by rank, with `waited_for_ranks_s`, and the collectives that they share.

    shared: a row for each rank of each shared collective: rank, kernel (its row in the profile), collective (a number
    for each), name, label, seconds, transfer_s, waited_s, end_s (on the clock of its rank). alone: how many
    collectives of a rank no other rank has. unread: files that could not be read, and why.
    """

    profiles: Mapping[int, Profile]
    shared: pd.DataFrame
    alone: int
    unread: Sequence[str] = ()

    @property
    def assumed(self) -> str:
        """What the ranks of profiles are taken for where files do not tell, in words, or ""."""
        return next(iter(self.profiles.values())).assumed

    @cached_property
    def clocks_s(self) -> Mapping[int, float]:
        """What is added to the times of each rank to be on the clock of the first; NaN where nothing is shared."""
        offsets = dict.fromkeys(self.profiles, float("nan"))
        offsets[next(iter(offsets))] = 0.0
        messages = self.shared["label"] == _SENT
        for table in (self.shared[~messages], self.shared):  # a send may end before its receive
            offsets = self._align(offsets, table)
        return offsets

    @staticmethod
    def _align(offsets: dict[int, float], table: pd.DataFrame) -> dict[int, float]:
        """Offsets of clocks, with those that collectives of ranks of known offsets tell."""
        while True:
            aligned = table["end_s"] + table["rank"].map(offsets)
            known = aligned.groupby(table["collective"]).mean()
            ahead = table.assign(ahead=table["collective"].map(known) - table["end_s"])
            fresh = ahead[table["rank"].map(offsets).isna()].groupby("rank")["ahead"].median().dropna()
            if fresh.empty:
                return offsets
            offsets |= dict(zip(fresh.index.tolist(), fresh.tolist(), strict=True))

    @cached_property
    def disagreement_s(self) -> tuple[float, float]:
        """Median and 95th percentile of how far the aligned ends of a collective are from their mean; NaN if none."""
        ends = self.shared["end_s"] + self.shared["rank"].map(self.clocks_s)
        apart = (ends - ends.groupby(self.shared["collective"]).transform("mean")).abs().dropna()
        if apart.empty:
            return float("nan"), float("nan")
        return float(apart.median()), float(apart.quantile(0.95))

    def by_label(self) -> pd.DataFrame:
        """A row for each class of collectives, most time first.

        count, transfer_s (of all of them), waited_s (of them, of a rank in the mean), longest_s (of the rank that waits
        longest), last (the rank that most often came last), last_share (of them).
        """
        rows = {}
        for label, part in self.shared.groupby("label", sort=False):
            count, by_rank = part["collective"].nunique(), part.groupby("rank")["waited_s"].sum()
            came_last = part.loc[part.groupby("collective")["seconds"].idxmin(), "rank"].value_counts()
            rows[str(label)] = {
                "count": count,
                "transfer_s": part.groupby("collective")["transfer_s"].first().sum(),
                "waited_s": by_rank.mean(),
                "longest_s": by_rank.max(),
                "last": int(came_last.index[0]),
                "last_share": came_last.iloc[0] / count,
            }
        table = pd.DataFrame.from_dict(rows, orient="index")
        return table if table.empty else table.sort_values("transfer_s", ascending=False)

    def by_rank(self) -> pd.DataFrame:
        """A row for each rank: count of shared collectives, seconds, transfer_s, waited_s, and last (how often)."""
        sums = self.shared.groupby("rank")[["seconds", "transfer_s", "waited_s"]].sum()
        came_last = self.shared.loc[self.shared.groupby("collective")["seconds"].idxmin(), "rank"].value_counts()
        counted = sums.assign(count=self.shared["rank"].value_counts(), last=came_last)
        return counted.reindex(list(self.profiles)).fillna(0.0).astype({"count": int, "last": int})

    @property
    def slowest(self) -> int:
        """The rank that waited least: the others waited for it."""
        waited = self.by_rank()["waited_s"]
        return list(self.profiles)[int(np.argmin(waited.to_numpy(float)))]


def match(profiles: Sequence[Profile]) -> Ranks:
    """Match the collectives of profiles of several ranks.

    The rank of a profile is the one that it tells, or its place where one does not, or two tell the same; the profiles
    then say so (`assumed`).
    """
    recorded = [profile.rank for profile in profiles]
    numbers = recorded if None not in recorded and len(set(recorded)) == len(recorded) else range(len(profiles))
    assumed = _assumed(profiles) if numbers is not recorded else ""
    profiles = [replace(profile, assumed=assumed) for profile in profiles]
    ordered = dict(sorted(zip([int(number or 0) for number in numbers], profiles, strict=True)))
    table = pd.concat([_collectives(rank, profile) for rank, profile in ordered.items()], ignore_index=True)
    table = _number_calls(table)
    ranks_of = table.groupby(_KEY, dropna=False)["rank"]
    sizes = ranks_of.transform("size").where(ranks_of.transform("nunique") > 1, 1)
    shared = table[sizes > 1].copy()
    shared["collective"] = shared.groupby(_KEY, dropna=False, sort=False).ngroup()
    shared["transfer_s"] = shared.groupby("collective")["seconds"].transform("min")
    shared["transfer_s"] = shared["transfer_s"].where(shared["waits"], shared["seconds"])
    shared["waited_s"] = shared["seconds"] - shared["transfer_s"]
    waited = {rank: _with_waiting(ordered[rank], shared[shared["rank"] == rank]) for rank in ordered}
    columns = ["rank", "kernel", "collective", "name", "label", "seconds", "transfer_s", "waited_s", "end_s"]
    return Ranks(waited, shared[columns].reset_index(drop=True), int((sizes == 1).sum()))


def _assumed(profiles: Sequence[Profile]) -> str:
    """What the files say of their ranks, where these are not all told and different, and what is assumed instead."""
    sources: dict[int | None, list[str]] = {}
    for profile in profiles:
        sources.setdefault(profile.rank, []).append(profile.source)
    twice = [f"{_names(names)} name rank {rank}" for rank, names in sources.items() if rank is not None and names[1:]]
    silent = sources.pop(None, [])
    if not sources and len(set(silent)) == 1:
        return ""  # GPUs of one file
    untold = [f"{_names(silent)} {'say' if silent[1:] else 'says'} no rank"] if silent else []
    says = "; ".join([*twice[:_MOST_NAMED], *(["and others alike"] if twice[_MOST_NAMED:] else []), *untold])
    rule = f"{says}: taken as ranks 0 to {len(profiles) - 1} of one run, in the order of files"
    if not twice:
        return rule
    return f"{rule}; of two runs, or of one rank recorded twice, waiting means nothing: name one file for each rank"


def _names(sources: Sequence[str]) -> str:
    """Names of files, the first ones of many."""
    names = list(sources[:_MOST_NAMED]) + [f"{len(sources) - _MOST_NAMED} more"] * (len(sources) > _MOST_NAMED)
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _collectives(rank: int, profile: Profile) -> pd.DataFrame:
    """The collectives of a rank in order of their starts, with the operation that each is a part of."""
    kernels = profile.kernels[profile.is_collective]
    names = kernels["collective"].fillna(kernels["name"])
    ends = (
        kernels[name].astype(object).where(kernels[name].notna(), None) for name in ("source_rank", "destination_rank")
    )
    operation = pd.Series(list(map(partial(_operation, rank), names, *ends)), index=kernels.index, dtype="string")
    label = kernels["collective"].fillna(kernels["name"].str.slice(0, 60))
    return kernels[["name", "payload_bytes", "seconds", "sequence"]].assign(
        rank=rank,
        kernel=kernels.index.to_numpy(),
        label=label.mask(operation.str.startswith(_MESSAGE_BEGIN), _SENT),
        operation=operation,
        waits=(kernels["kind"] != PEER_COPY).to_numpy(bool),
        in_group=kernels["group"].fillna("stream " + kernels["stream"]),
        end_s=kernels["start_s"] + kernels["seconds"],
    )


def _operation(rank: int, name: str, source: int | None, destination: int | None) -> str:
    """The name of a collective; of a message its source and destination, of which a profile may tell the other one."""
    if not _MESSAGE.fullmatch(name) or source is destination is None:
        return name
    return f"{_MESSAGE_BEGIN}{rank if source is None else source} to {rank if destination is None else destination}"


def _number_calls(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the number of each collective among its like, and `by` what else its like have in common."""
    alike = table.groupby(["in_group", "operation"], dropna=False)
    counts = table.groupby(["in_group", "operation", "rank"], dropna=False)["kernel"].transform("size")
    table = table.assign(by="", count=counts)
    recorded = alike["sequence"].transform("count") == alike["kernel"].transform("size")
    messages = table["operation"].str.startswith(_MESSAGE_BEGIN)
    by_sequence = (recorded & ~messages).to_numpy(bool)
    uneven = table["operation"].str.contains(_UNEVEN).to_numpy(bool) | messages.to_numpy(bool)
    counted = table.groupby(["in_group", "operation"], dropna=False)["count"].transform("nunique") > 1
    by_payload = ~by_sequence & counted.to_numpy(bool) & ~uneven
    by = np.where(by_payload, table["payload_bytes"].astype(str), "")
    table = table.assign(by=np.where(by_sequence, "number " + table["sequence"].astype("string").fillna(""), by))
    return table.assign(number=table.groupby(["rank", *_KEY[:-1]], dropna=False).cumcount())


def _with_waiting(profile: Profile, shared: pd.DataFrame) -> Profile:
    waited = np.full(len(profile), np.nan)
    waited[shared["kernel"].to_numpy(int)] = shared["waited_s"]
    return replace(profile, kernels=profile.kernels.assign(waited_for_ranks_s=waited))


def replay_without_waiting(profile: Profile) -> Replayed:
    """Replay a rank as if none were late: shared collectives take their transfer only.

    What kernels wait for is inferred from the profile as it was recorded.
    """
    delays = waits(profile)
    waited = np.nan_to_num(profile.kernels["waited_for_ranks_s"].to_numpy(float))
    short = replace(profile, kernels=profile.kernels.assign(seconds=profile.seconds - waited))
    ran = np.where(delays.other >= 0, np.minimum(delays.ran_s, short.seconds[delays.other]), delays.ran_s)
    graph, first, last = lower_kernels(short, replace(delays, ran_s=ran))
    timeline = plugins.load("engine", ENGINE).run(graph)
    begun = timeline.issued[0, first] + graph["delay"][0, first]
    return Replayed(profile, delays, begun, timeline.finished[0, last])
