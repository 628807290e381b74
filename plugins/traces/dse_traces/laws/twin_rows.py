"""What profiles tell of the constants of a machine: times of GEMMs, collectives and streams, of the host, slowdowns.

A GEMM, and a kernel that streams, counts where its operator's shape is recorded and nothing communicates beside it; a
collective where its pattern and payload are recorded and nothing computes beside it. Kernels of one shape, or payload
and group, are one row, with the median of their times.

Of a collective that several ranks share the transfer counts (`dse_traces.profile.ranks`). Of one rank alone waiting for
late ranks is not recorded: a low quantile counts, and the interval goes from the shortest time to the median.

The host's time for a launch is the mean of the times from launch to launch while the GPU has nothing else to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse_traces.laws.contention import assumed_laws, kernel_keys, observed_slowdowns, side_by_side
from dse_traces.laws.machine import ProfiledMachine
from dse_traces.laws.own_residuals import gemm_times
from dse_traces.laws.twin_fit import TimedRows, twin_rules
from dse_traces.profile.kernels import GRAPH, Profile
from dse_traces.profile.payloads import pattern_of
from dse_traces.profile.ranks import TOGETHER, Ranks
from dse_traces.profile.shapes import parse_shape
from simulators.costs.algorithms import Pattern
from simulators.costs.gemm import GemmShape

Floats = NDArray[np.float64]
_STREAMS = "element-wise"  # class of kernels
_IN_SWITCH = r"(?i)multimem|nvls"  # in names of kernels whose sums a switch computes
_EXPLAINED = 1.05  # as in `dse_traces.laws.contention`: slowdowns below are not told from those of lost SMs


@dataclass(frozen=True)
class Messages:
    """Collectives of one pattern: payload [bytes, R], GPUs of the group [R], their times, and whether several ranks
    share them, so that these are transfers [R].
    """

    payload_bytes: Floats
    gpus: Floats
    rows: TimedRows
    shared: NDArray[np.bool_]

    def where(self, marks: NDArray[np.bool_]) -> Messages:
        """The rows that are marked."""
        return Messages(self.payload_bytes[marks], self.gpus[marks], self.rows.where(marks), self.shared[marks])


def gemms_of_profiles(profiles: Sequence[Profile]) -> Mapping[str, tuple[GemmShape, TimedRows]]:
    """GEMMs that ran alone, by precision."""
    by_precision = dict[str, tuple[GemmShape, TimedRows]]()
    for precision, by_size in sorted(gemm_times(profiles, twin_rules().most_beside).items()):
        m, n, k = np.array(list(by_size), float).T
        by_precision[precision] = GemmShape(m, n, k), _medians(by_size.values())
    return by_precision


def _medians(times: Iterable[Sequence[float]]) -> TimedRows:
    groups = [np.array(group, float) for group in times]
    seconds = np.array([np.median(group) for group in groups])
    return TimedRows.exact(seconds, np.array([len(group) for group in groups], np.int64))


def streams_of_profiles(profiles: Sequence[Profile]) -> Mapping[str, tuple[Floats, TimedRows]]:
    """Traffic [bytes, R] of element-wise kernels that ran alone and whose tensors no cache holds, and their times, by
    precision.
    """
    rules, times = twin_rules(), dict[str, dict[float, list[float]]]()
    for profile in profiles:
        for text, seconds in _alone(profile, (profile.kernels["kind"] == _STREAMS) & profile.kernels["shape"].notna()):
            shape = parse_shape(text)
            if shape is None or shape.operator not in rules.stream_operators:
                continue
            if (traffic := float(shape.traffic_bytes)) >= rules.least_stream_bytes:
                times.setdefault(shape.precision, {}).setdefault(traffic, []).append(seconds)
    return {name: (np.array(list(by), float), _medians(by.values())) for name, by in sorted(times.items())}


def _alone(profile: Profile, marks: pd.Series[bool]) -> Iterator[tuple[str, float]]:
    """Yield shape and time [s] of the marked kernels of a profile beside which nothing communicates."""
    both = side_by_side(profile)
    beside = np.bincount(both.kernel, both.seconds, len(profile))
    counts = marks.to_numpy(bool) & (beside < twin_rules().most_beside * profile.seconds)
    yield from zip(profile.kernels["shape"][counts], profile.seconds[counts].tolist(), strict=True)


def messages_of_ranks(profiles: Sequence[Profile], ranks: Ranks | None, node_gpus: int) -> Mapping[Pattern, Messages]:
    """Collectives that ran alone, by pattern. node_gpus: GPUs of a collective whose group is not recorded."""
    tables = [_collectives(place, profile) for place, profile in enumerate(profiles)]
    table = pd.concat(tables, ignore_index=True).dropna(subset=["pattern", "payload_bytes"])
    table = table[(table["payload_bytes"] > 0) & table["alone"]]
    if ranks is not None:
        table = _transfers(table, ranks)
    table["group_size"] = table["group_size"].fillna(node_gpus)
    by_pattern = dict[Pattern, Messages]()
    for pattern, of in table[table["group_size"] > 1].groupby("pattern"):
        groups = dict(iter(of.groupby(["payload_bytes", "group_size"])))
        payload, gpus = np.array(list(groups), float).T
        shared = np.array([bool(part["shared"].all()) for part in groups.values()])
        times = [part["seconds"].to_numpy(float) for part in groups.values()]
        rows = [_row(seconds, shared=transfer) for seconds, transfer in zip(times, shared.tolist(), strict=True)]
        seconds, low, high, counts = np.array(rows).T
        by_pattern[pattern] = Messages(payload, gpus, TimedRows(seconds, counts.astype(int), low, high), shared)  # type: ignore[index]
    return by_pattern


def _row(seconds: Floats, *, shared: bool) -> tuple[float, float, float, int]:
    """Time of a row, its ends [s], and how many it stands for."""
    middle = float(np.median(seconds))
    if shared:
        return middle, middle, middle, len(seconds)
    return float(np.quantile(seconds, twin_rules().quick_quantile)), float(seconds.min()), middle, len(seconds)


def _collectives(place: int, profile: Profile) -> pd.DataFrame:
    """A row for each collective of a profile: pattern, payload, group, seconds, and whether nothing computes beside."""
    both, kernels = side_by_side(profile), profile.kernels
    beside = np.bincount(both.collective, both.seconds, len(profile))
    # what is named after the switch is no collective by the library's rings
    switched = kernels["name"].str.contains(_IN_SWITCH, regex=True).fillna(value=False).to_numpy(bool)
    counts = profile.is_collective & ~profile.is_peer_copy & ~switched
    table = kernels.loc[counts, ["payload_bytes", "seconds"]].astype(float)
    names = zip(kernels["collective"][counts], kernels["name"][counts], strict=True)
    patterns = [pattern_of(None if pd.isna(collective) else collective, name) for collective, name in names]
    column = pd.Series(patterns, index=table.index, dtype=object)
    alone = beside[counts] < twin_rules().most_beside * profile.seconds[counts]
    sizes = kernels["group_size"][counts].astype("Float64").to_numpy(float, na_value=np.nan)
    return table.assign(
        pattern=column, group_size=sizes, alone=alone, shared=False, place=place, kernel=np.flatnonzero(counts)
    )


def _transfers(table: pd.DataFrame, ranks: Ranks) -> pd.DataFrame:
    """The table with the transfer of each collective that ranks share, once, in place of their times."""
    shared = ranks.shared[ranks.shared["part"] == TOGETHER]
    place = {rank: number for number, rank in enumerate(ranks.profiles)}
    transfers = shared.assign(place=shared["rank"].map(place))[["place", "kernel", "collective", "transfer_s"]]
    joined = table.merge(transfers, on=["place", "kernel"], how="left")
    matched = joined["collective"].notna()
    # nothing computed beside it on any rank that is here, else a late rank's transfer may have been slowed
    first = joined[matched].drop_duplicates("collective")
    return pd.concat([first.assign(seconds=first["transfer_s"], shared=True), joined[~matched]], ignore_index=True)


def launches_of(profile: Profile) -> TimedRows | None:
    """Mean times from launch to launch while the GPU waits for the host, a row for several; None without any."""
    rules, kernels = twin_rules(), profile.kernels
    recorded = kernels["launch_s"].notna().to_numpy(bool) & (kernels["kind"] != GRAPH).to_numpy(bool)
    launch = kernels["launch_s"].to_numpy(float)
    ended = np.concatenate([[-np.inf], np.maximum.accumulate(profile.end_s)[:-1]])
    waits = recorded & (ended <= launch)
    order = np.flatnonzero(recorded)[np.argsort(launch[recorded], kind="stable")]
    apart = np.diff(launch[order])
    apart = apart[waits[order][1:] & waits[order][:-1] & (apart > 0)]
    # a synchronisation is no launch
    apart = apart[apart < rules.longest_host * np.median(apart)] if len(apart) else apart
    if len(apart) < rules.fewest_launches:
        return None
    parts = np.array_split(apart, len(apart) // rules.launches_a_row)
    return TimedRows.exact(np.array([part.mean() for part in parts]), np.array([len(part) for part in parts]))


def slowdowns_of(profiles: Sequence[Profile], machine: ProfiledMachine) -> TimedRows:
    """Slowdowns of GEMMs beside collectives that the SMs which these hold do not explain, a row for each kernel."""
    laws = assumed_laws(machine)
    column, slowdowns = "slowdown" if laws.static else "penalty", dict[str, list[float]]()
    for profile in profiles:
        seen = observed_slowdowns(profile, laws)
        seen = seen[seen["kind"] == "GEMM"]
        tells = (seen["penalty"] > 1) | (seen["slowdown"] <= _EXPLAINED)
        # one kernel, by name and CTAs, is one row
        for key, rows in seen[tells].groupby(kernel_keys(profile).loc[seen.index[tells]]):
            slowdowns.setdefault(str(key), []).extend(rows[column].astype(float))
    return _medians(slowdowns.values())
