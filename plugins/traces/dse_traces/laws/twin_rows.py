"""What profiles tell of the constants of a machine: times of GEMMs, collectives and streams, of the host, slowdowns.

A GEMM, and a kernel that streams, counts where its operator's shape is recorded and nothing communicates beside it; a
collective where its pattern and payload are recorded and nothing computes beside it. Kernels of one shape, or payload
and group, are one row, with the median of their times. Where hardly any collective of a pattern ran alone, all count,
less what `gpu.contention.cu_copy_beside_gemm` explains; the interval goes from none of that to twice as much.

Of a collective that several ranks share the transfer counts (`dse_traces.profile.ranks`). Where ranks of its group are
not here waiting for them is not recorded: a low quantile counts, and the interval goes from the shortest time to the
median.

The host's time for a launch is the mean of the times from launch to launch while the GPU has nothing else to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse_traces.laws.contention import ON_SMS, Estimate, Laws, kernel_keys, observed_slowdowns, side_by_side
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
    """Collectives of one pattern: payload [bytes, R], GPUs of the group [R], their times, and whether all ranks of a
    group are here, so that these are transfers [R]. slowed: whether they ran beside others, by which times are less.
    """

    payload_bytes: Floats
    gpus: Floats
    rows: TimedRows
    shared: NDArray[np.bool_]
    slowed: bool

    def where(self, marks: NDArray[np.bool_]) -> Messages:
        """The rows that are marked."""
        return Messages(
            self.payload_bytes[marks], self.gpus[marks], self.rows.where(marks), self.shared[marks], self.slowed
        )


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


def messages_of_ranks(
    profiles: Sequence[Profile], ranks: Ranks | None, node_gpus: int, laws: Laws | None
) -> Mapping[Pattern, Messages]:
    """Collectives by pattern: those that ran alone; where these are few and laws of contention known, all of them.

    node_gpus: GPUs of a collective whose group is not recorded.
    """
    rules = twin_rules()
    table = pd.concat([_collectives(place, profile) for place, profile in enumerate(profiles)], ignore_index=True)
    table = table if ranks is None else _transfers(table, ranks)
    table = table.dropna(subset=["pattern", "payload_bytes"])
    table = table.assign(group_size=table["group_size"].fillna(node_gpus))
    # ranks that are not here may be the late ones
    table["shared"] &= table["group_size"] <= len(profiles)
    by_pattern = dict[Pattern, Messages]()
    for pattern, of in table[(table["payload_bytes"] > 0) & (table["group_size"] > 1)].groupby("pattern"):
        alone = of["beside"] < rules.most_beside
        slowed = laws is not None and int(alone.sum()) < rules.fewest_kernels
        if slowed or alone.any():
            part = of if slowed else of[alone]
            by_pattern[pattern] = _messages(part, laws.collectives if slowed and laws else None)  # type: ignore[index]
    return by_pattern


def _messages(table: pd.DataFrame, slowdown: Estimate | None) -> Messages:
    """Collectives of one pattern. slowdown: of each while kernels that need SMs run, taken out of its time; None: they
    ran alone.
    """
    groups = dict(iter(table.groupby(["payload_bytes", "group_size"])))
    payload, gpus = np.array(list(groups), float).T
    shared = np.array([bool(part["shared"].all()) for part in groups.values()])
    seconds, low, high, counts = np.array([_row(part, slowdown) for part in groups.values()]).T
    return Messages(payload, gpus, TimedRows(seconds, counts.astype(int), low, high), shared, slowdown is not None)


def _row(table: pd.DataFrame, slowdown: Estimate | None) -> tuple[float, float, float, int]:
    """Time of a row, its ends [s], and how many it stands for."""
    seconds, heavy = (table[name].to_numpy(float) for name in ("seconds", "heavy"))
    cases = np.ones(3) if slowdown is None else slowdown.cases()
    # the case of the least slowdown leaves the longest time
    longest, expected, least = seconds * (1 - heavy * (1 - 1 / cases[:, None]))
    if table["shared"].all():
        return float(np.median(expected)), float(np.median(least)), float(np.median(longest)), len(seconds)
    quick = float(np.quantile(expected, twin_rules().quick_quantile))
    return quick, float(least.min()), float(np.median(longest)), len(seconds)


def _collectives(place: int, profile: Profile) -> pd.DataFrame:
    """A row for each collective of a profile: pattern, payload, group, seconds, and the shares of them beside kernels
    that compute, and beside those that need SMs (heavy).
    """
    both, kernels, count = side_by_side(profile), profile.kernels, len(profile)
    needs_sms = np.isin(kernels["kind"].to_numpy()[both.kernel], ON_SMS)
    beside = np.bincount(both.collective, both.seconds, count)
    heavy = np.bincount(both.collective[needs_sms], both.seconds[needs_sms], count)
    # what is named after the switch is no collective by the library's rings
    switched = kernels["name"].str.contains(_IN_SWITCH, regex=True).fillna(value=False).to_numpy(bool)
    marks = profile.is_collective & ~profile.is_peer_copy & ~switched & (profile.seconds > 0)
    table = kernels.loc[marks, ["payload_bytes", "seconds"]].astype(float)
    names = zip(kernels["collective"][marks], kernels["name"][marks], strict=True)
    patterns = [pattern_of(None if pd.isna(collective) else collective, name) for collective, name in names]
    return table.assign(
        pattern=pd.Series(patterns, index=table.index, dtype=object),
        group_size=kernels["group_size"][marks].astype("Float64").to_numpy(float, na_value=np.nan),
        beside=np.minimum(beside[marks] / profile.seconds[marks], 1.0),
        heavy=np.minimum(heavy[marks] / profile.seconds[marks], 1.0),
        shared=False,
        place=place,
        kernel=np.flatnonzero(marks),
    )


def _transfers(table: pd.DataFrame, ranks: Ranks) -> pd.DataFrame:
    """The table with the transfer of each collective that ranks share, once, in place of their times."""
    shared = ranks.shared[ranks.shared["part"] == TOGETHER]
    place = {rank: number for number, rank in enumerate(ranks.profiles)}
    transfers = shared.assign(place=shared["rank"].map(place))[["place", "kernel", "collective", "transfer_s"]]
    joined = table.merge(transfers, on=["place", "kernel"], how="left")
    matched = joined[joined["collective"].notna()]
    # the rank that came last has the transfer alone: what computed beside it there counts
    last = matched.sort_values("seconds", kind="stable").drop_duplicates("collective")
    return pd.concat([last.assign(seconds=last["transfer_s"], shared=True), joined[joined["collective"].isna()]])


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


def slowdowns_of(profiles: Sequence[Profile], laws: Laws) -> TimedRows:
    """Slowdowns of GEMMs beside collectives that the SMs which these hold do not explain, a row for each kernel."""
    column, slowdowns = "slowdown" if laws.static else "penalty", dict[str, list[float]]()
    for profile in profiles:
        seen = observed_slowdowns(profile, laws)
        seen = seen[seen["kind"] == "GEMM"]
        tells = (seen["penalty"] > 1) | (seen["slowdown"] <= _EXPLAINED)
        # one kernel, by name and CTAs, is one row
        for key, rows in seen[tells].groupby(kernel_keys(profile).loc[seen.index[tells]]):
            slowdowns.setdefault(str(key), []).extend(rows[column].astype(float))
    return _medians(slowdowns.values())
