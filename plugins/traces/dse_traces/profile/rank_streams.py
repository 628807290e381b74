"""Groups of ranks that files do not tell, as Nsight Systems and rocprof do not: by what their streams carry.

The number of a stream means nothing outside its process. A stream of one rank and a stream of another are of one group
if they carry the same collectives: by names, counts and payloads; else by names and counts; else by names. Of several
that do, those belong together whose collectives end at the same distances from one another, and, where these do not
tell either, the first ones of each rank, the second ones, and so on.

On one clock, collectives of one group overlap in time. Sends and receives of three ranks or more connect two each,
unless all ranks have equally many streams of them, as for an all-to-all.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MESSAGE_KERNEL = re.compile(r"send_?recv", re.IGNORECASE)
"""Names of kernels that send and receive, as a profiler records them that tells no more."""
_MOST_COMPARED = 64  # groups that the times of one stream are held against
_NEAR_S = 1e-6  # by which distances of ends may differ and tell nothing
_MOST_CUT = 1.5  # times as many messages as the other end of a connection has, by where recording began and ended
_PAIR = 2


@dataclass(frozen=True)
class _Stream:
    """A stream of a rank that communicates. counts: of each operation and payload. start_s, end_s: of what it ran, on
    the clock of its file, whose name `clock` is, or "" where the file holds no other rank.
    """

    rank: int
    name: str
    counts: Mapping[tuple[str, str], int]
    start_s: Floats
    end_s: Floats
    clock: str

    @cached_property
    def operations(self) -> Counter[str]:
        """How many it has of each operation."""
        counts = Counter[str]()
        for (operation, _), count in self.counts.items():
            counts[operation] += count
        return counts

    @property
    def is_of_messages(self) -> bool:
        """Tell whether it sends and receives, and no more."""
        return all(map(MESSAGE_KERNEL.search, self.operations))


@dataclass
class _Group:
    """Streams that carry the same collectives, of different ranks. most: ranks that it may have, or None."""

    most: int | None
    members: list[_Stream] = field(default_factory=list)

    def takes(self, stream: _Stream) -> bool:
        """Tell whether a further rank may join."""
        ranks = {member.rank for member in self.members}
        return stream.rank not in ranks and (self.most is None or len(ranks) < self.most)

    def meets(self, stream: _Stream) -> bool:
        """Tell whether a stream ran during what members ran, as far as they have one clock.

        A small message may be sent before its receiver is there.
        """
        # without a common clock times cannot contradict, so the stream may join
        same = [member for member in self.members if member.clock and member.clock == stream.clock]
        return self.most == _PAIR or all(_overlap(member, stream) for member in same)


_Alike = Callable[[_Stream, _Stream], bool]


def _have_counts_alike(first: _Stream, second: _Stream) -> bool:
    """Tell whether two streams have nearly as many kernels."""
    # recording begins and ends at other moments on each rank, so that counts differ somewhat
    few, many = sorted((len(first.end_s), len(second.end_s)))
    return many <= _MOST_CUT * few


def _have_equal_payloads(first: _Stream, second: _Stream) -> bool:
    return first.counts == second.counts


def _have_equal_counts(first: _Stream, second: _Stream) -> bool:
    return first.operations == second.operations


def _have_equal_names(first: _Stream, second: _Stream) -> bool:
    # sharing names alone is the weakest sign, so the sets must be equal here
    return first.operations.keys() == second.operations.keys() and _share_names(first, second)


def _share_names(first: _Stream, second: _Stream) -> bool:
    # pipelines and collectives never share a group
    if first.is_of_messages != second.is_of_messages or (
        first.is_of_messages and not _have_counts_alike(first, second)
    ):
        return False
    return bool(first.operations.keys() & second.operations.keys())


_ALIKE: Sequence[_Alike] = (_have_equal_payloads, _have_equal_counts, _have_equal_names, _share_names)
"""When streams of two ranks may be of one group, the surest first."""


def name_groups(table: pd.DataFrame) -> pd.Series[str]:
    """A name for the group of each collective, equal for those of ranks that belong together.

    table: rank, stream, operation, payload_bytes, start_s, end_s and clock of collectives without a recorded group.
    """
    streams = list(_streams(table))
    names = dict[tuple[int, str], str]()
    for number, group in enumerate(_groups(streams)):
        names |= {(member.rank, member.name): f"streams alike {number}" for member in group.members}
    keys = zip(table["rank"], table["stream"], strict=True)
    return pd.Series([names[key] for key in keys], index=table.index, dtype="string")


def _streams(table: pd.DataFrame) -> Iterator[_Stream]:
    """Yield the streams of each rank, those with small numbers first."""
    # text, as NaN (an unknown payload) is not equal to itself
    payloads = table["payload_bytes"].astype(str)
    parts = {
        (int(str(rank)), str(name)): part
        for (rank, name), part in table.assign(payload=payloads).groupby(["rank", "stream"], sort=False)
    }
    # in the order of numbers, as frameworks create streams in the same order on all ranks
    for rank, name in sorted(parts, key=_natural):
        part = parts[rank, name]
        counts = Counter(zip(part["operation"], part["payload"], strict=True))
        start_s, end_s = (part[column].to_numpy(float) for column in ("start_s", "end_s"))
        yield _Stream(rank, name, counts, start_s, end_s, str(part["clock"].iloc[0]))


def _natural(key: tuple[int, str]) -> tuple[int, list[tuple[int, str]]]:
    parts = re.split(r"(\d+)", key[1])
    # pairs of one type at each place, so that "stream 7" and "7" compare
    return key[0], [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]


def _groups(streams: Sequence[_Stream]) -> list[_Group]:
    """The groups of streams, rank by rank."""
    by_rank = defaultdict[int, list[_Stream]](list)
    for stream in streams:
        by_rank[stream.rank].append(stream)
    limits, groups = _limits(streams), list[_Group]()
    for of_rank in by_rank.values():
        left = of_rank
        for alike in _ALIKE:
            # the surest likeness first: what it leaves is tried with the next one
            left = [stream for stream in left if not _join(stream, groups, alike)]
        # streams of one rank are never of one group: they open groups for later ranks
        groups += [_Group(limits.get((stream.rank, stream.name)), [stream]) for stream in left]
    return groups


def _limits(streams: Sequence[_Stream]) -> dict[tuple[int, str], int | None]:
    """How many ranks a stream of sends and receives connects, where that is known to be few; None for no limit."""
    messages = sorted(filter(lambda stream: stream.is_of_messages, streams), key=lambda stream: len(stream.end_s))
    ranks, limits, like = {stream.rank for stream in messages}, dict[tuple[int, str], int | None](), list[_Stream]()
    # between two ranks all messages are of the same pair
    if len(ranks) <= _PAIR:
        return {}
    for place, stream in enumerate(messages, start=1):
        like.append(stream)
        # a jump in counts ends a class of streams
        if place == len(messages) or not _have_counts_alike(stream, messages[place]):
            limits |= dict.fromkeys([(each.rank, each.name) for each in like], _limit(like, ranks))
            like = []
    return limits


def _limit(like: Sequence[_Stream], ranks: Collection[int]) -> int | None:
    """How many ranks each of some streams with as many messages connects. ranks: those that have any messages.

    Of a pipeline whose ranks have one stream each, the inner ranks have twice as many messages as the outer ones: which
    of them is whose nobody knows.
    """
    counts = Counter(stream.rank for stream in like)
    if len(counts) < len(ranks):
        # some rank has none of this class: the ends cannot be assigned, so each stream stays alone
        return 1
    # equally many streams everywhere: an all-to-all, made of messages
    return None if len(set(counts.values())) == 1 else _PAIR


def _join(stream: _Stream, groups: Sequence[_Group], alike: _Alike) -> bool:
    """Add a stream to the group that it fits best, if there is one."""
    # the first member stands for the group: all others were alike to it
    fits = (group for group in groups if group.takes(stream) and alike(group.members[0], stream))
    # a file with thousands of streams must not take quadratic time
    candidates = list(islice(filter(lambda group: group.meets(stream), fits), _MOST_COMPARED))
    if not candidates:
        return False
    best, least_s = candidates[0], float("inf")
    if candidates[1:]:
        for group in candidates:
            apart_s = _apart_s(group.members[0], stream)
            # a tie stays with the first: streams that nothing tells apart are matched in order
            if apart_s < least_s - _NEAR_S:
                best, least_s = group, apart_s
    best.members.append(stream)
    return True


def _overlap(first: _Stream, second: _Stream) -> bool:
    """Tell whether most of what two streams ran overlaps, kernel by kernel; of different counts nobody knows."""
    if len(first.end_s) != len(second.end_s):
        return True
    both_s = np.minimum(first.end_s, second.end_s) - np.maximum(first.start_s, second.start_s)
    return bool(np.median(both_s) >= 0)


def _apart_s(first: _Stream, second: _Stream) -> float:
    """How far the ends on two streams are apart in the median, clocks aside; inf where counts differ."""
    if len(first.end_s) != len(second.end_s):
        return float("inf")
    apart_s = first.end_s - second.end_s
    if not first.clock or first.clock != second.clock:
        # clocks of two files differ by a constant
        apart_s = apart_s - np.median(apart_s)
    return float(np.median(np.abs(apart_s)))
