"""Profiles of several ranks of one run: which collectives are the same, and how long ranks waited for one another.

Collectives are matched within their group (where groups are not recorded, within streams that carry the same ones,
`dse_traces.profile.rank_streams`) by the number that the profiler tells (`Seq`), else by their order among those of
equal name: sizes may differ from rank to rank. Where ranks have different counts of them, those of equal payload are
matched by order. A send is matched with the receive of the same source, destination and order. A rank that comes early
waits inside the collective's kernel. The rank that comes last does not wait, so

    transfer = the shortest duration of a collective among its ranks        waiting = a rank's duration - transfer

A copy between GPUs waits for no rank: its duration is its transfer.

Clocks of ranks differ, and only what is matched tells by how much, from the first rank on. A collective ends at about
the same time everywhere: the clock of a rank is shifted by the median difference of the ends of the collectives that it
shares with ranks whose clocks are known. What is left of these differences says how well clocks agree. Ranks that share
none have the clock of their file, if it has one. Else messages tell: none is received before it was sent, so of those
that a rank receives the quickest bounds its clock from one side, and of those that it sends, from the other. A copy
between GPUs tells nothing: it is of one rank alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse_traces.profile.kernel_classes import PEER_COPY
from dse_traces.profile.kernels import Marks, Profile
from dse_traces.profile.rank_streams import MESSAGE_KERNEL, name_groups
from dse_traces.profile.replay import Replayed, run_kernels
from dse_traces.profile.waits import waits

_MOST_NAMED = 4  # files that are named
Floats = NDArray[np.float64]

# rows of different ranks with the same key are the same collective
_KEY = ["in_group", "operation", "by", "number"]
_UNEVEN = re.compile(r"v(?:_|$)|all_?to_?all|send|recv|^_?(?:gather|scatter)", re.IGNORECASE)
"""Names of collectives whose payloads may differ from rank to rank."""
_SENT, _MESSAGE_BEGIN = "send and receive", "message from "
TOGETHER, SENT, RECEIVED, MESSAGE, COPIED = "collective", "send", "receive", "message", "copy"
"""What a rank has a part in: a collective, which ends at about the same time everywhere; one end of a message, or of
messages whose direction is not recorded; a copy, which is its own."""
_MESSAGE = re.compile(r"i?(?:send|recv|receive)", re.IGNORECASE)


@dataclass(frozen=True)
class Ranks:
    """Profiles of ranks of one run, by rank, with `waited_for_ranks_s`, and the collectives that they share.

    shared: a row for each rank of each shared collective: rank, kernel (its row in the profile), collective (a number
    for each), name, label, part (such as `TOGETHER`), seconds, transfer_s, waited_s, end_s (on the clock of its rank).
    alone: how many collectives of a rank no other rank has. unread: files that could not be read, and why.
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
        offsets = {next(iter(self.profiles)): 0.0}
        # ends are the most exact, then a common clock, then messages; each round may open up further ranks
        while fresh := self._by_ends(offsets, TOGETHER) or self._by_file(offsets) or self._by_messages(offsets):
            offsets |= fresh
        return dict.fromkeys(self.profiles, float("nan")) | offsets

    def _by_ends(self, offsets: Mapping[int, float], part: str) -> dict[int, float]:
        """Offsets of further clocks, by the ends of what ranks of known offsets take part in."""
        table = self.shared[self.shared["part"] == part]
        aligned = table["end_s"] + table["rank"].map(offsets)
        known = aligned.groupby(table["collective"]).mean()
        ahead = table.assign(ahead=table["collective"].map(known) - table["end_s"])
        # the median: a single collective that was matched wrongly does not move a clock
        fresh = ahead[~ahead["rank"].isin(list(offsets))].groupby("rank")["ahead"].median().dropna()
        return dict(zip(fresh.index.tolist(), fresh.tolist(), strict=True))

    def _by_file(self, offsets: Mapping[int, float]) -> dict[int, float]:
        """Offsets of further clocks that files share with ranks of known offsets."""
        begins_s = dict[str, float]()
        for rank, offset in offsets.items():
            # zero of the file's clock on the clock of the first rank
            begins_s.setdefault(self.profiles[rank].clock, offset - self.profiles[rank].begin_s)
        further = {rank: profile for rank, profile in self.profiles.items() if rank not in offsets and profile.clock}
        return {
            rank: begins_s[profile.clock] + profile.begin_s
            for rank, profile in further.items()
            if profile.clock in begins_s
        }

    def _by_messages(self, offsets: Mapping[int, float]) -> dict[int, float]:
        """Offsets of further clocks, between the bounds of messages with ranks of known offsets."""
        sent, received = (
            self.shared[self.shared["part"] == part].set_index("collective")[["rank", "end_s"]]
            for part in (SENT, RECEIVED)
        )
        both = sent.add_suffix("_sent").join(received.add_suffix("_received"), how="inner")
        sent_s, received_s = (both[f"end_s_{end}"] + both[f"rank_{end}"].map(offsets) for end in ("sent", "received"))
        # a receive ends after its send: the receiver's clock is at least so far ahead
        later_s = (sent_s - both["end_s_received"]).groupby(both["rank_received"]).max()
        # a send ends no later than its receive: an upper bound for the sender's clock
        sooner_s = (received_s - both["end_s_sent"]).groupby(both["rank_sent"]).min()
        middle_s = pd.concat([later_s, sooner_s], axis=1).mean(axis=1).dropna()
        fresh = {int(str(rank)): float(shift) for rank, shift in middle_s.items() if rank not in offsets}
        # messages without a direction: their ends are taken as simultaneous
        return fresh or self._by_ends(offsets, MESSAGE)

    @cached_property
    def disagreement_s(self) -> tuple[float, float]:
        """Median and 95th percentile of how far the aligned ends of a collective are from their mean; NaN if none."""
        # messages end at different times by nature: they count only if nothing else is shared
        table = self.shared[self.shared["part"] == TOGETHER]
        table = self.shared[self.shared["part"] != COPIED] if table.empty else table
        ends = table["end_s"] + table["rank"].map(self.clocks_s)
        apart = (ends - ends.groupby(table["collective"]).transform("mean")).abs().dropna()
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
            # who comes last has the shortest kernel, as it waits for nobody
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
        """The rank that waited least of those that share collectives: the others waited for it."""
        by_rank = self.by_rank()
        # nobody waits for a rank that shares nothing; where none shares any, the first
        shares = by_rank[by_rank["count"] > 0] if len(self.shared) else by_rank
        return int(str(shares["waited_s"].astype(float).idxmin()))


def match(profiles: Sequence[Profile]) -> Ranks:
    """Match the collectives of profiles of several ranks.

    The rank of a profile is the one that it tells, or its place where one does not, or two tell the same; the profiles
    then say so (`assumed`).
    """
    recorded = [profile.rank for profile in profiles]
    # ranks that are not all recorded, or not all different, cannot be trusted at all
    numbers = recorded if None not in recorded and len(set(recorded)) == len(recorded) else range(len(profiles))
    assumed = _assumed(profiles) if numbers is not recorded else ""
    profiles = [replace(profile, assumed=assumed) for profile in profiles]
    # in the order of ranks: the first is the one on whose clock all others are put
    ordered = dict(sorted(zip([int(number or 0) for number in numbers], profiles, strict=True)))
    table = pd.concat([_collectives(rank, profile) for rank, profile in ordered.items()], ignore_index=True)
    table = _number_calls(_with_groups(table, ordered))
    ranks_of = table.groupby(_KEY, dropna=False)["rank"]
    # a key that one rank has several times, and no other one, is not shared
    sizes = ranks_of.transform("size").where(ranks_of.transform("nunique") > 1, 1)
    shared = table[sizes > 1].copy()
    shared["collective"] = shared.groupby(_KEY, dropna=False, sort=False).ngroup()
    shared["transfer_s"] = shared.groupby("collective")["seconds"].transform("min")
    shared["transfer_s"] = shared["transfer_s"].where(shared["part"] != COPIED, shared["seconds"])
    shared["waited_s"] = shared["seconds"] - shared["transfer_s"]
    waited = {rank: _with_waiting(ordered[rank], shared[shared["rank"] == rank]) for rank in ordered}
    columns = ["rank", "kernel", "collective", "name", "label", "part", "seconds", "transfer_s", "waited_s", "end_s"]
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
    # None in place of NA, as `_operation` compares with `is`
    ends = [
        kernels[name].astype(object).where(kernels[name].notna(), None) for name in ("source_rank", "destination_rank")
    ]
    operation = pd.Series(list(map(partial(_operation, rank), names, *ends)), index=kernels.index, dtype="string")
    label = kernels["collective"].fillna(kernels["name"].str.slice(0, 60))
    return kernels[["name", "payload_bytes", "seconds", "sequence", "stream"]].assign(
        rank=rank,
        kernel=kernels.index.to_numpy(),
        # messages of all pairs are one class in tables
        label=label.mask(operation.str.startswith(_MESSAGE_BEGIN), _SENT),
        operation=operation,
        part=_parts(kernels, ends[0].notna().to_numpy(bool), operation),
        in_group=kernels["group"],
        end_s=kernels["start_s"] + kernels["seconds"],
    )


def _operation(rank: int, name: str, source: int | None, destination: int | None) -> str:
    """The name of a collective; of a message its source and destination, of which a profile may tell the other one."""
    if not _MESSAGE.fullmatch(name) or source is destination is None:
        return name
    # the profile's own rank is the end that is not recorded
    return f"{_MESSAGE_BEGIN}{rank if source is None else source} to {rank if destination is None else destination}"


def _parts(kernels: pd.DataFrame, receives: Marks, operation: pd.Series[str]) -> NDArray[np.object_]:
    """What a rank has a part in by each kernel. receives: those whose source is recorded."""
    # np.select takes the first that holds, so the order of the cases counts
    messages = operation.str.startswith(_MESSAGE_BEGIN).to_numpy(bool)
    parts = {
        COPIED: (kernels["kind"] == PEER_COPY).to_numpy(bool),
        RECEIVED: messages & receives,
        SENT: messages,
        MESSAGE: kernels["collective"].isna().to_numpy(bool) & operation.str.contains(MESSAGE_KERNEL).to_numpy(bool),
    }
    return np.select(list(parts.values()), list(parts), TOGETHER).astype(object)


def _with_groups(table: pd.DataFrame, profiles: Mapping[int, Profile]) -> pd.DataFrame:
    """The table with groups in place of those that are not recorded."""
    silent = table["in_group"].isna().to_numpy(bool)
    if not silent.any():
        return table
    of_rank = {rank: (profile.begin_s, profile.clock) for rank, profile in profiles.items()}
    # times of a profile begin at its first kernel: its begin puts ranks of one file on one clock
    begin_s = table["rank"].map({rank: begin if clock else 0.0 for rank, (begin, clock) in of_rank.items()})
    end_s = table["end_s"] + begin_s
    clock = table["rank"].map({rank: clock for rank, (_, clock) in of_rank.items()})
    on_clocks = table.assign(start_s=end_s - table["seconds"], end_s=end_s, clock=clock)[silent]
    groups = table["in_group"].astype("string")
    groups[silent] = name_groups(on_clocks)
    return table.assign(in_group=groups)


def _number_calls(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the number of each collective among its like, and `by` what else its like have in common."""
    alike = table.groupby(["in_group", "operation"], dropna=False)
    counts = table.groupby(["in_group", "operation", "rank"], dropna=False)["kernel"].transform("size")
    table = table.assign(by="", count=counts)
    # numbers of the profiler count only if all ranks have them
    recorded = alike["sequence"].transform("count") == alike["kernel"].transform("size")
    messages = table["operation"].str.startswith(_MESSAGE_BEGIN)
    # numbers of messages count per process, and not per pair of ranks
    by_sequence = (recorded & ~messages).to_numpy(bool)
    uneven = table["operation"].str.contains(_UNEVEN).to_numpy(bool) | messages.to_numpy(bool)
    # ranks with different counts: payloads then separate what order alone would confuse
    counted = table.groupby(["in_group", "operation"], dropna=False)["count"].transform("nunique") > 1
    by_payload = ~by_sequence & counted.to_numpy(bool) & ~uneven
    by = np.where(by_payload, table["payload_bytes"].astype(str), "")
    table = table.assign(by=np.where(by_sequence, "number " + table["sequence"].astype("string").fillna(""), by))
    return table.assign(number=table.groupby(["rank", *_KEY[:-1]], dropna=False).cumcount())


def _with_waiting(profile: Profile, shared: pd.DataFrame) -> Profile:
    # NaN if a collective is not shared: its wait is not known, which is not 0
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
    # a kernel that got shorter cannot be waited for longer than it runs
    short_s = np.minimum(delays.blocker_ran_s, short.seconds[delays.blocker])
    ran_s = np.where(delays.blocker >= 0, short_s, delays.blocker_ran_s)
    return Replayed(profile, delays, *run_kernels(short, replace(delays, blocker_ran_s=ran_s)))
