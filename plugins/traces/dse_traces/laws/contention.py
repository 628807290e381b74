"""Laws of contention: how much longer kernels take beside a collective, learnt from a profile or assumed of a machine.

A kernel of a class takes, beside a collective that holds s of the S SMs of a GPU, by the laws of
`simulators.costs.sharing`,

    GEMM, grouped GEMM, convolution     T max(w(s), f), or T f w(s) where workgroups are dealt out freely;
                                        w = ceil(c / (S - s)) / ceil(c / S)
    attention                           T max(S / (S - s), f)
    all others (bound by memory)        T (1 + (f - 1) q), of which each draws all of the HBM's rate alone

times as long: c: its CTAs (one an SM at a time); f: penalty of the class; q: rate of the collective over its rate when
the penalty was observed, as both draw from the HBM. f is learnt where kernels of a class occur alone and beside
collectives: a kernel is the same where its name, its CTAs and those of the two kernels before and after it on its
stream are. A class with fewer than `FEWEST` of these keeps the penalty that is assumed: constants of contention of a
machine (`gpu.contention`), and for kernels bound by memory the HBM traffic of a collective at full rate.

A recorded time counts before any law: a kernel, or a collective, that was recorded alone as well takes as much longer
beside others as it was recorded to (`recorded_alone`, `Laws.measured`), and the law says only how that changes with the
SMs that are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from dse_traces.laws.machine import ProfiledMachine, machine_named
from dse_traces.laws.rate_law import RateLaw
from dse_traces.profile.kernel_classes import CLASSES, COMMUNICATES, FUSED
from dse_traces.profile.kernels import Profile
from simulators.costs.gemm.waves import count_waves
from simulators.costs.sharing import Sharing

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

ON_SMS = ("GEMM", FUSED, "grouped GEMM", "attention", "convolution")
"""Classes of kernels whose time depends on the SMs that they get."""
FEWEST = 5
"""Kernels that a penalty is learnt from."""
CASES = ("mild", "expected", "severe")
"""Ends of the intervals of all penalties, and what is expected."""
_ALONE, _BESIDE = 0.1, 0.5  # shares of a kernel's time beside collectives: at most, at least
_SHORTEST_LEARNT_S = 5e-6  # kernels to learn from: profilers tell whole microseconds
_NEIGHBOURS = 2  # on each side of a kernel, that must be the same ones
_STEADY = 1.25  # longest over shortest time alone of a kernel whose time tells something
_EXPLAINED = 1.05  # of the time that lost SMs cost: what is below is within the noise of times
_OVERLAP_S = 1e-6  # by which kernels of one stream may overlap
_SPREAD = (0.1, 0.9)  # quantiles of what was observed
_BEND = 4.0  # how sharply a collective's rate over SMs bends at its links (assumed: within those fitted to tables)
_MOST_DRAWN = 3.0  # severe: times the HBM traffic of one that reads and writes once; reductions read more (assumed)


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that it may be in."""

    low: float
    value: float
    high: float

    def cases(self) -> Floats:
        """The low end, the value and the high end [3]."""
        return np.array([self.low, self.value, self.high])


@dataclass(frozen=True)
class Penalty:
    """Factor on the time of a class of kernels beside a collective. observed: kernels it is learnt from; 0: assumed."""

    factor: Estimate
    observed: int = 0


@dataclass(frozen=True)
class Laws:
    """Laws of a GPU with `sms` SMs. penalties: by class. collectives: factor on the time of a collective while a
    kernel of `ON_SMS` runs. engines: of such a kernel beside copy engines. rate: of a collective over SMs. hardware:
    the machine whose constants are assumed. measured: slow-down of kernels and collectives that were also recorded
    alone, by `kernel_keys`.
    """

    penalties: Mapping[str, Penalty]
    collectives: Estimate
    engines: Estimate
    rate: RateLaw
    sms: int
    hardware: ProfiledMachine
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """Name of the machine whose constants are assumed."""
        return self.hardware.name

    def slowdown(self, kind: str, ctas: float | None, *, held_sms: ArrayLike, relative_rate: ArrayLike = 1.0) -> Floats:
        """Factors [3, ...] on the time of a kernel in each of `CASES`. ctas: None if not known. held_sms: that the
        collective holds, 0: copy engines. relative_rate: q of the module. held_sms and relative_rate broadcast.
        """
        # shape of the scenarios; the axis of the three cases is put in front of it
        sms, rate = np.broadcast_arrays(np.asarray(held_sms, float), np.asarray(relative_rate, float))
        aligned = (len(CASES), *(1 for _ in sms.shape))
        penalty = self.penalties[kind].factor.cases().reshape(aligned)
        # kernels bound by memory: only the excess over 1 grows with the rate that collectives draw from the HBM
        if kind not in ON_SMS:
            return np.asarray(np.maximum(1 + (penalty - 1) * rate, 1.0))
        engines = self.engines.cases().reshape(aligned)
        # a kernel always keeps one SM: otherwise it would never end
        left_out = np.minimum(sms, self.sms - 1.0)
        slowed = Sharing(penalty, self.static).gemm(lost_share(kind, ctas, self.sms, left_out), 1.0)
        # copy engines hold no SM, but they share HBM and caches: a factor of their own
        return np.asarray(np.maximum(np.where(sms > 0, slowed, engines), 1.0))

    @property
    def static(self) -> bool:
        """Whether workgroups of the machine's GEMMs have fixed SMs."""
        return Sharing.of(self.hardware.gpu).static


def lost_share(kind: str, ctas: float | None, sms: int, held_sms: ArrayLike) -> Floats:
    """Time on the SMs that are left over that on all, of a kernel that SMs bound: by its waves of CTAs; of attention,
    and of CTAs that are not known (None, NaN), as of many.
    """
    # attention keeps every SM busy from begin to end, so it loses just the share of SMs
    if kind == "attention" or ctas is None or not ctas > 0:
        return Sharing.attention(1.0, sms, held_sms)
    return np.asarray(count_waves(ctas, sms, held_sms) / count_waves(ctas, sms, 0))


def assumed_laws(system: str | ProfiledMachine) -> Laws:
    """Laws by the constants of a machine, or of one by name. Raises ConfigError if it lacks a node or contention."""
    machine = machine_named(system) if isinstance(system, str) else system
    gpu, node = machine.gpu, machine.node
    if gpu.contention is None or gpu.cu_copy is None or node is None or not gpu.hbm_bytes_per_s:
        raise _without_contention(machine.name)
    copy, gemm = gpu.cu_copy, float(np.asarray(Sharing.of(gpu).interference))
    # one link to each peer where their number is not known
    peak = copy.link_efficiency * (gpu.num_links or node.num_gpus - 1) * (node.link_bytes_per_s or 0.0)
    # no start per SM and no crowding are known of a machine: two terms of the law are 0
    rate = RateLaw(copy.setup_s, 0.0, copy.bytes_per_s_per_cu, max(peak, copy.bytes_per_s_per_cu), 0.0, _BEND)
    drawn = 2 / rate.seconds_per_byte(copy.num_cus) / gpu.hbm_bytes_per_s  # read and written
    streams = Penalty(Estimate(1.0, 1 + float(drawn), 1 + _MOST_DRAWN * float(drawn)))
    # severe: twice the interference of the measured GEMM
    products = Penalty(Estimate(1.0, gemm, 1 + 2 * (gemm - 1)))
    attends = Penalty(Estimate(1.0, 1.0, 1 + 2 * (gemm - 1)))  # loses SMs, and nothing else
    # what communicates is slowed by a factor of its own, below
    kinds = [kind for kind in CLASSES if kind not in COMMUNICATES]
    penalties = {kind: products if kind in ON_SMS else streams for kind in kinds} | {"attention": attends}
    slowed, engines = gpu.contention.cu_copy_beside_gemm, gpu.contention.dma_beside_gemm
    intervals = (Estimate(1.0, slowed, 1 + 2 * (slowed - 1)), Estimate(1.0, engines, 1 + 2 * (engines - 1)))
    return Laws(penalties, *intervals, rate, gpu.num_cus, machine)


def learn_laws(profile: Profile, assumed: Laws, companions: Sequence[Profile] = ()) -> Laws:
    """Laws with the penalties that a profile tells of, and the others as they are assumed.

    companions: profiles that may tell how long its kernels take alone.
    """
    seen = observed_slowdowns(profile, assumed)
    learnt = {
        str(kind): Penalty(_interval(rows["penalty"], rows["seconds"]), len(rows))
        for kind, rows in seen.groupby("kind")
        if len(rows) >= FEWEST
    }
    measured = measured_slowdowns(profile, recorded_alone(profile, companions))
    return replace(assumed, penalties={**assumed.penalties, **learnt}, measured=measured)


def kernel_keys(profile: Profile) -> pd.Series[str]:
    """Name, CTAs and payload of each kernel [N]: those with the same key are the same kernel."""
    kernels = profile.kernels
    # the payload separates collectives that one kernel runs with many sizes
    parts = [kernels[name].astype("string").fillna("") for name in ("name", "ctas", "payload_bytes")]
    return (parts[0] + "|" + parts[1] + "|" + parts[2]).astype(object)


def recorded_alone(profile: Profile, companions: Sequence[Profile] = ()) -> Floats:
    """Time of each kernel alone as recorded [s, N]; NaN where it was never recorded alone, by any of the profiles.

    It is the recorded time, within the range of the times alone: of the kernel in the same place, else of the same
    kernel in any place, where these are alike. Profiles of other GPUs count for nothing. What a collective waited for
    other ranks is left in.
    """
    profiles = [profile, *(other for other in companions if other.device == profile.device)]
    table = pd.concat([_spans(part).assign(profile=place) for place, part in enumerate(profiles)], ignore_index=True)
    table["neighbourhood"] = neighbourhoods(*profiles)
    # alone: at most a tenth of its time next to collectives, which the noise of times hides
    mine, alone = table[table["profile"] == 0], table[table["counts"] & (table["beside"] <= _ALONE * table["seconds"])]
    low, high = np.full((2, len(mine)), np.nan)
    # the neighbourhood first: the same neighbours mean the same inputs, and caches in the same state
    for name in ("neighbourhood", "key"):
        ends = alone.groupby(name)["net"].agg(["min", "max"])
        ends = ends[ends["max"] <= _STEADY * ends["min"]]  # else the same kernel has several sizes of its inputs
        low = np.where(np.isnan(low), mine[name].map(ends["min"]).to_numpy(float), low)
        high = np.where(np.isnan(high), mine[name].map(ends["max"]).to_numpy(float), high)
    net = mine["net"].to_numpy(float)
    # waiting for late ranks is added again: clip() compares times without it
    return np.asarray(np.clip(net, low, high) + mine["seconds"].to_numpy(float) - net)


def measured_slowdowns(profile: Profile, alone_s: Floats) -> dict[str, float]:
    """Slow-down beside others of kernels that were recorded both alone and beside others, by their keys.

    alone_s [N]: of `recorded_alone`. It is the time beside others over what these parts take alone, of all together.
    """
    table = _spans(profile).assign(alone=alone_s)
    rows = table[table["counts"] & table["alone"].notna() & (table["seconds"] >= _SHORTEST_LEARNT_S)]
    rows = rows[rows["beside"] > _ALONE * rows["seconds"]]
    # time alone less the part that was not next to others; floored, as noise may make it negative
    work = (rows["alone"] - (rows["seconds"] - rows["beside"])).clip(lower=_SHORTEST_LEARNT_S / 10)
    sums = rows.assign(work=work).groupby("key")[["beside", "work"]].sum()
    # a kernel is never faster next to others: what is below 1 is noise
    return {str(key): max(1.0, float(row["beside"] / row["work"])) for key, row in sums.iterrows()}


def _spans(profile: Profile) -> pd.DataFrame:
    """A row for each kernel: key; seconds; net of what it waited for other ranks; beside: seconds beside collectives,
    or of a collective beside kernels of `ON_SMS`; counts: whether it tells of these alone.
    """
    both, seconds, collective = side_by_side(profile), profile.seconds, profile.is_collective
    heavy = np.isin(profile.kernels["kind"].to_numpy()[both.kernel], ON_SMS)
    # shared time counts for the kernel, and for the collective only if the kernel competes for SMs
    beside = np.bincount(both.kernel, both.seconds, len(profile))
    beside += np.bincount(both.collective[heavy], both.seconds[heavy], len(profile))
    waited = np.nan_to_num(profile.kernels["waited_for_ranks_s"].to_numpy(float))
    # several collectives at once may overlap a kernel for longer than it lasts
    columns = {"seconds": seconds, "net": np.maximum(seconds - waited, 0.0), "beside": np.minimum(beside, seconds)}
    return pd.DataFrame({"key": kernel_keys(profile), **columns, "counts": collective | _computes_alone(profile)})


def observed_slowdowns(profile: Profile, laws: Laws) -> pd.DataFrame:
    """A row for each kernel beside collectives that also ran alone: kind, seconds, slowdown and penalty (what the
    SMs that are left do not explain).
    """
    both = side_by_side(profile)
    # a kernel under two collectives at once is counted once
    beside = np.minimum(np.bincount(both.kernel, both.seconds, len(profile)), profile.seconds)
    sms = _held_sms(profile, both, collective_sms(profile, laws))
    table = profile.kernels.assign(beside=beside, held_sms=sms, neighbourhood=neighbourhoods(profile))
    table = table[_computes_alone(profile) & (table["seconds"] >= _SHORTEST_LEARNT_S)]
    share = table["beside"] / table["seconds"]
    times = table[share <= _ALONE].groupby("neighbourhood")["seconds"]
    alone = times.median()[times.max() <= _STEADY * times.min()]
    # mostly next to collectives: at smaller shares the quotient below is mostly noise
    rows = table[(share >= _BESIDE) & table["neighbourhood"].isin(alone.index)]
    work = rows["neighbourhood"].map(alone) - (rows["seconds"] - rows["beside"])  # of the part that ran beside
    rows = rows.assign(slowdown=rows["beside"] / work.clip(lower=_SHORTEST_LEARNT_S / 10))
    ctas, held_sms = (rows[name].to_numpy(float, na_value=np.nan) for name in ("ctas", "held_sms"))
    by_waves = [
        # the part of a slow-down that fewer SMs explain
        float(lost_share(kind, count, laws.sms, min(sms, laws.sms - 1.0))) if kind in ON_SMS else 1.0
        for kind, count, sms in zip(rows["kind"], ctas, held_sms, strict=True)
    ]
    slowdown = rows["slowdown"].clip(lower=1.0)
    # of lost SMs and interference the larger is seen: a slowdown that lost SMs explain tells of no other
    larger = slowdown.where(slowdown > _EXPLAINED * np.asarray(by_waves), 1.0)
    rows = rows.assign(penalty=larger if laws.static else slowdown / by_waves)
    return rows[["kind", "seconds", "slowdown", "penalty"]]


@dataclass(frozen=True)
class SideBySide:
    """Pairs of a kernel that computes and a collective that ran beside it: their places, and for how long [s]."""

    kernel: Ints
    collective: Ints
    seconds: Floats


def side_by_side(profile: Profile) -> SideBySide:
    """Kernels that compute and collectives that ran at the same time."""
    start, end, computes = profile.start_s, profile.end_s, profile.is_compute
    # ends are not in the order of begins: their running maximum can be searched
    ended, parts = np.maximum.accumulate(end), list[tuple[Ints, Ints, Floats]]()
    for place in np.flatnonzero(profile.is_collective):
        # only kernels that end after this collective begins and begin before it ends
        first, last = np.searchsorted(ended, start[place], side="right"), np.searchsorted(start, end[place])
        near = np.arange(first, last)[computes[first:last]]
        seconds = np.minimum(end[near], end[place]) - np.maximum(start[near], start[place])
        near, seconds = near[seconds > 0], seconds[seconds > 0]
        parts.append((near, np.full(len(near), place), seconds))
    if not parts:
        return SideBySide(np.zeros(0, int), np.zeros(0, int), np.zeros(0))
    return SideBySide(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def collective_sms(profile: Profile, laws: Laws) -> Floats:
    """SMs that each kernel holds if it communicates [N]: its CTAs; of one whose CTAs are not known, the median of the
    others, or the channels of the machine's library. A copy between GPUs by copy engines holds none.
    """
    ctas = profile.kernels["ctas"].to_numpy(float, na_value=np.nan)
    of_collectives = ctas[profile.is_collective]
    usual = np.nanmedian(of_collectives) if np.isfinite(of_collectives).any() else 0.0
    # an eighth of the SMs is assumed if no collective has recorded CTAs
    channels = np.minimum(np.where(np.isfinite(ctas), ctas, usual or laws.sms / 8), laws.sms - 1.0)
    return np.where(profile.is_peer_copy, 0.0, channels)


def neighbourhoods(*profiles: Profile) -> NDArray[np.int64]:
    """Number of the neighbourhood of each kernel of some profiles, one after the other [N]: kernels with the same
    neighbours on their stream have the same one.
    """
    kernels = pd.concat([profile.kernels[["name", "ctas"]] for profile in profiles], ignore_index=True)
    names = pd.factorize(kernels["name"] + "|" + kernels["ctas"].astype("string").fillna(""))[0]
    number = np.repeat(np.arange(len(profiles)), [len(profile) for profile in profiles])
    # streams are numbered for each profile, so both columns identify one
    streams = np.concatenate([profile.streams for profile in profiles])
    columns = pd.DataFrame({"profile": number, "stream": streams, 0: names})
    by_stream = columns.groupby(["profile", "stream"])[0]
    for step in range(1, _NEIGHBOURS + 1):
        columns[step], columns[-step] = by_stream.shift(step).fillna(-1), by_stream.shift(-step).fillna(-1)
    neighbours = columns.drop(columns=["profile", "stream"])
    return np.asarray(neighbours.groupby(list(neighbours.columns), sort=False).ngroup())


def _computes_alone(profile: Profile) -> NDArray[np.bool_]:
    """Kernels that compute while no other kernel does [N]."""
    alone = np.zeros(len(profile), bool)
    computes = np.flatnonzero(profile.is_compute)
    start, end = profile.start_s[computes], profile.end_s[computes]
    # of all kernels before it: the last end, not the end of the last
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    after = np.concatenate([start[1:], [np.inf]])
    # clocks of one stream may overlap by a rounding, which is no concurrency
    alone[computes] = (before <= start + _OVERLAP_S) & (after >= end - _OVERLAP_S)
    return alone


def _held_sms(profile: Profile, both: SideBySide, sms: Floats) -> Floats:
    """SMs that collectives held beside each kernel [N], in the mean of the time with any. sms: of each [N]."""
    # pairs are in the order of collectives: of each kernel, those that begin later count what earlier ones left
    start = np.maximum(profile.start_s[both.kernel], profile.start_s[both.collective])
    order = np.lexsort((start, both.kernel))
    kernel, start, end = both.kernel[order], start[order], (start + both.seconds)[order]
    ended = pd.Series(end).groupby(kernel).cummax().groupby(kernel).shift().fillna(-np.inf).to_numpy(float)
    spent = np.bincount(kernel, np.maximum(end - np.maximum(start, ended), 0.0), len(profile))
    # those at once hold SMs side by side: they add up
    sms_s = np.bincount(both.kernel, both.seconds * sms[both.collective], len(profile))
    return np.divide(sms_s, spent, out=np.zeros(len(profile)), where=spent > 0)


def _interval(values: pd.Series[float], weights: pd.Series[float]) -> Estimate:
    """Median and spread of observations, weighted; below 1 where waves of CTAs say more than was observed."""
    order = np.argsort(values.to_numpy(float))
    shares = np.cumsum(weights.to_numpy(float)[order])
    # weighted by time: long kernels decide how much a what-if gains
    at = np.searchsorted(shares / shares[-1], [_SPREAD[0], 0.5, _SPREAD[1]])
    low, value, high = values.to_numpy(float)[order][np.minimum(at, len(order) - 1)]
    return Estimate(float(low), float(value), float(high))


def _without_contention(system: str) -> Exception:
    from dse.errors import ConfigError, Problem

    way = "choose one with gpu.contention, gpu.cu_copy and a node, as h100_8 or mi300x_8"
    return ConfigError([Problem("system", "has no constants of contention", system, way)])
