"""A profile as a task graph whose kernels slow each other down, so that it can be changed and run again.

Times alone are what was recorded, less what the laws (`dse_traces.laws.contention`) say of the time beside collectives:

    w = d - sum over collectives c of o_c (1 - 1 / f_c)

d: recorded; o_c: time beside c; f_c: slow-down beside c. On the fluid engine a kernel runs at 1 / f_c of its rate
while a collective of group c is active, so the graph with the recorded overlaps gives the recorded times again. Where a
kernel was recorded alone as well, f is what was measured, and the laws say only how it changes with the SMs held.
Collectives that are alike are a group; kernels with nearly the same slow-downs are a class. As many collectives run at
once as did in the profile. Launches follow one another as recorded, after the kernels that the host waited for; what
waited for an unknown reason waits as long as it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dse import plugins
from dse_traces.laws.contention import CASES, ON_SMS, Laws, SideBySide, collective_sms, kernel_keys, side_by_side
from dse_traces.profile.kernel_classes import PEER_COPY
from dse_traces.profile.kernel_names import reduce_name
from dse_traces.profile.kernels import Profile
from dse_traces.profile.waits import CAUSES, UNKNOWN, Waits, waits
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.timeline import Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
ENGINE = "fluid"
MOST_GROUPS = 20
"""Groups of collectives, the rest are one more."""
_MOST_CLASSES = 16
_FEW_WAVES = 4  # of CTAs, whose number counts
_SHORTEST_S = 1e-12  # of a part of a kernel
_LEAST_PAUSE_S = 20e-6  # that is no gap between kernels
_LEAST_SHARE = 1e-9  # of a kernel that others wait for
_LEAST_ALONE = 0.1  # of the recorded time
_STEP = 0.05  # to which measured slow-downs are rounded, so that kernels share classes
EXPECTED = CASES.index("expected")


@dataclass(frozen=True)
class Need:
    """A part of a kernel, from a share `at` of it on, waits until another kernel has run for a share `reached`."""

    at: float
    other: int
    reached: float


@dataclass(frozen=True)
class Structure:
    """What waits for what. previous [N]: kernel before on the stream, or -1. launch_s [N]: of the launch that it waits
    for, or NaN. needs: by kernel. parts: by kernel, the number that it is launched in, and the factor on its work.
    fused: kernels that run as a part of the one before, and the factor on their work in each case of the laws.
    paused_s: for how long kernels wait that waited for an unknown reason, where that is not as recorded.
    """

    previous: tuple[int, ...]
    launch_s: tuple[float, ...]
    needs: Mapping[int, tuple[Need, ...]]
    parts: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    fused: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    paused_s: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile, delays: Waits) -> Structure:
        """The structure that was recorded."""
        ran = delays.ran_s / np.maximum(profile.seconds[delays.other], _SHORTEST_S)
        shares = np.clip(ran, _LEAST_SHARE, 1.0)
        other = delays.other.tolist()
        needs = {kernel: (Need(0.0, place, float(shares[kernel])),) for kernel, place in enumerate(other) if place >= 0}
        return cls(tuple(delays.previous.tolist()), tuple(delays.launch_s.tolist()), needs)


@dataclass(frozen=True)
class Numbers:
    """B scenarios on one structure. case [B]: of the laws. stretch, taken, pull [B, G]: by group of collectives, the
    factor on its time, the SMs that it holds, and its rate over the recorded one. gpu [B]: row of paces. paces [R, N]:
    factors on the time of each kernel that computes, by GPU; the first is the one that was recorded.
    """

    case: Ints
    stretch: Floats
    taken: Floats
    pull: Floats
    gpu: Ints
    paces: Floats

    def take(self, rows: Ints) -> Numbers:
        """Some of the scenarios."""
        by_scenario = {name: value[rows] for name, value in vars(self).items() if name != "paces"}
        return Numbers(**by_scenario, paces=self.paces)


@dataclass(frozen=True)
class Host:
    """Launches in their order. kernels [L]: that are launched. ready_s [L]: when each can begin by its launch. waited
    [L]: the kernel that the host waited for before, or -1. place [N]: of the launch of each kernel, or -1.
    """

    kernels: Ints
    ready_s: Floats
    waited: Ints
    place: Ints

    @classmethod
    def of(cls, profile: Profile, delays: Waits) -> Host:
        """The host as recorded. It waited where it launched nothing until the kernel that it had launched last ended,
        and went on sooner after that than it had waited (inferred).
        """
        launch, end = delays.launch_s, profile.end_s
        kernels = np.argsort(launch, kind="stable")[: int(np.isfinite(launch).sum())]
        place = np.full(len(profile), -1)
        place[kernels] = np.arange(len(kernels))
        before, waited = np.roll(kernels, 1), np.full(len(kernels), -1)
        pause, since = end[before] - launch[before], launch[kernels] - end[before]
        stopped = (since > 0) & (pause > since) & (pause > _LEAST_PAUSE_S)
        stopped[:1] = False
        waited[stopped] = before[stopped]
        ready = np.maximum(launch[kernels] + delays.launch_delay_s - delays.gap_s, 0.0)
        return cls(kernels, ready, waited, place)


@dataclass(frozen=True)
class Ran:
    """Runs of B scenarios: tasks over time, and when each kernel begins and ends [B, N]."""

    timeline: Timeline
    start_s: Floats
    end_s: Floats


@dataclass(frozen=True)
class Contended:
    """A profile, what its kernels wait for, and its laws.

    group [N]: of a collective, else -1; names: of the groups. sms [N]: that a collective holds. kernel_class [N]: of a
    kernel that computes, else -1; classes: of each its kind, CTAs and measured slow-down (NaN: unknown).
    alone_s [3, N]: time of each kernel alone, in each of the cases of the laws. origin [N]: the recorded kernel that
    each is, or is a part of.
    """

    profile: Profile
    waits: Waits
    laws: Laws
    group: Ints
    names: tuple[str, ...]
    sms: Floats
    kernel_class: Ints
    classes: tuple[tuple[str, float, float], ...]
    alone_s: Floats
    origin: Ints

    @cached_property
    def at_once(self) -> int:
        """Largest number of collectives that ran at once."""
        return at_once(self.profile)

    @cached_property
    def structure(self) -> Structure:
        """Dependencies between kernels, as recorded."""
        return Structure.of(self.profile, self.waits)

    @cached_property
    def unknown_s(self) -> Floats:
        """How long each kernel waited for an unknown reason [N], as it does in every scenario; short waits are part of
        the gap between kernels.
        """
        unknown = (self.waits.cause == CAUSES.index(UNKNOWN)) & (self.waits.late_s > _LEAST_PAUSE_S)
        return np.where(unknown, self.waits.late_s, 0.0)

    @cached_property
    def host(self) -> Host:
        """Launches, and what the host waited for."""
        return Host.of(self.profile, self.waits)

    @cached_property
    def group_sms(self) -> Floats:
        """SMs that a collective of each group holds [G]."""
        return _group_sms(self.group, self.sms, len(self.names))

    @cached_property
    def latency_s(self) -> Floats:
        """Latency of a collective of each group, of which each part has its own [G]: of the law, or of copy engines."""
        dma = self.laws.hardware.gpu.dma
        return np.where(self.group_sms > 0, self.laws.rate.latency_s, dma.setup_s if dma is not None else 0.0)

    @cached_property
    def slowed(self) -> Floats:
        """Factor [3, G] on the time of each group of collectives beside kernels of `ON_SMS`."""
        return _slowed(self.profile, self.laws, self.group, len(self.names))

    def slowdowns(self, taken: Floats, pull: Floats) -> Floats:
        """Factor [3, C, G] on the time of each class beside each group, by the SMs that it holds and its rate [G]."""
        return np.stack([self.slowdown(place, taken=taken, pull=pull) for place in range(len(self.classes))], axis=1)

    def slowdown(self, place: int, *, taken: Floats, pull: Floats, group: int | None = None) -> Floats:
        """Factor [3, ...] on the time of one class beside one group, or all of them [G]."""
        recorded = self.group_sms if group is None else self.group_sms[group]
        return _slowdown(self.laws, self.classes[place], taken=taken, pull=pull, recorded=recorded)

    def numbers(self, count: int = 1) -> Numbers:
        """Scenarios as recorded, by the laws as expected."""
        case, shape = np.full(count, EXPECTED), (count, len(self.names))
        taken = np.broadcast_to(self.group_sms, shape).copy()
        recorded, paces = np.zeros(count, np.intp), np.ones((1, len(self.profile)))
        return Numbers(case, np.ones(shape), taken, np.ones(shape), recorded, paces)

    def lower(self, structure: Structure, numbers: Numbers) -> tuple[TaskGraph, Ints, Ints]:
        """The task graph of scenarios, and the first and the last task of each kernel [N]."""
        return _Lowering(self, structure, numbers).build()

    def run(self, structure: Structure, numbers: Numbers) -> Ran:
        """Run scenarios on the engine."""
        graph, first, last = self.lower(structure, numbers)
        timeline: Timeline = plugins.load("engine", ENGINE).run(graph)
        begun = timeline.issued[:, first] + graph["delay"][:, first]
        return Ran(timeline, begun, timeline.finished[:, last])

    def makespans(self, structure: Structure, numbers: Numbers) -> Floats:
        """Time [B] from the first begin to the last end."""
        graph, _, _ = self.lower(structure, numbers)
        return np.asarray(plugins.load("engine", ENGINE).totals(graph).makespan_s)


def contended(profile: Profile, laws: Laws) -> Contended:
    """A profile with the laws of its contention."""
    group, names = _groups(profile)
    sms = collective_sms(profile, laws)
    of, classes = _classes(profile, laws)
    taken = _group_sms(group, sms, len(names))
    pairs = side_by_side(profile)
    by_class = [_slowdown(laws, kind, taken=taken, pull=np.ones(len(names)), recorded=taken) for kind in classes]
    factors = np.array(by_class).reshape(len(classes), len(CASES), len(names))
    factors = factors[of[pairs.kernel], :, group[pairs.collective]]
    slowed = _slowed(profile, laws, group, len(names))[:, group[pairs.collective]]
    alone = _alone(profile, pairs, factors.T, slowed)
    return Contended(profile, waits(profile), laws, group, names, sms, of, classes, alone, np.arange(len(profile)))


def _group_sms(group: Ints, sms: Floats, count: int) -> Floats:
    return np.array([np.median(sms[group == place]) for place in range(count)])


def _slowdown(laws: Laws, of_class: tuple[str, float, float], *, taken: Floats, pull: Floats, recorded: Any) -> Floats:
    """Factor [3, ...] on the time of a class beside collectives that hold some SMs at some rate.

    recorded: SMs that they held as recorded. A measured factor changes with both as the law does.
    """
    kind, ctas, measured = of_class
    by_law = laws.slowdown(kind, ctas, taken=taken, pull=pull)
    if np.isnan(measured):
        return by_law
    as_recorded = laws.slowdown(kind, ctas, taken=np.broadcast_to(recorded, np.shape(taken)))
    return np.asarray(np.maximum(measured * by_law / as_recorded, 1.0))


def _slowed(profile: Profile, laws: Laws, group: Ints, count: int) -> Floats:
    """Factor [3, G] on each group of collectives beside kernels of `ON_SMS`: as measured, else by the law of those that
    hold SMs.
    """
    measured = kernel_keys(profile).map(laws.measured).to_numpy(float)
    by_law = laws.collectives.cases()
    factors = list[Floats]()
    for place in range(count):
        of = measured[(group == place) & np.isfinite(measured)]
        unmeasured = np.ones(len(CASES)) if profile.is_peer_copy[group == place].all() else by_law
        factors.append(np.full(len(CASES), of.mean()) if of.size else unmeasured)
    return np.array(factors).reshape(count, len(CASES)).T


def at_once(profile: Profile) -> int:
    """Largest number of collectives that ran at once."""
    start, end = profile.start_s[profile.is_collective], profile.end_s[profile.is_collective]
    running = np.searchsorted(np.sort(start), start, side="right") - np.searchsorted(np.sort(end), start, side="right")
    return max(1, int(running.max(initial=1)))


def _alone(profile: Profile, pairs: SideBySide, factors: Floats, slowed: Floats) -> Floats:
    """Time [3, N] of each kernel alone. factors, slowed: slow-downs [3, P] of the pairs' kernels and collectives."""
    seconds = profile.seconds
    saved = pairs.seconds * (1 - 1 / factors)
    heavy = np.isin(profile.kernels["kind"].to_numpy()[pairs.kernel], ON_SMS)
    lost = pairs.seconds * heavy * (1 - 1 / slowed)
    alone = [
        seconds - np.bincount(pairs.kernel, of, len(seconds)) - np.bincount(pairs.collective, also, len(seconds))
        for of, also in zip(saved, lost, strict=True)
    ]
    return np.maximum(alone, _LEAST_ALONE * seconds)


def _groups(profile: Profile) -> tuple[Ints, tuple[str, ...]]:
    """Group of each collective and its name: by name, payload and CTAs, those with the most time first."""
    kernels = profile.kernels[profile.is_collective]
    labels = {name: reduce_name(name).label() for name in kernels["name"].unique()}
    names = kernels["collective"].str.slice(0, 40).fillna(kernels["name"].map(labels))
    sizes = [f", {size / 1e6:.3g} MB" if size > 0 else "" for size in kernels["payload_bytes"]]
    counts = kernels["ctas"].astype("string").fillna("?").mask(kernels["kind"] == PEER_COPY, "")
    ctas = [f", {count} CTAs" if count else ", copy engines" for count in counts]
    keys = names.astype("string") + pd.Series(sizes, kernels.index, "string") + pd.Series(ctas, kernels.index, "string")
    ordered = kernels["seconds"].groupby(keys).sum().sort_values(ascending=False, kind="stable").index.tolist()
    places = {key: min(place, MOST_GROUPS) for place, key in enumerate(ordered)}
    group = np.full(len(profile), -1)
    group[kernels.index] = keys.map(places)
    rest = ["other collectives"] if len(ordered) > MOST_GROUPS else []
    return group, (*(str(name) for name in ordered[:MOST_GROUPS]), *rest)


def _classes(profile: Profile, laws: Laws) -> tuple[Ints, tuple[tuple[str, float, float], ...]]:
    """Class of each kernel that computes, and of each class its kind, CTAs and measured slow-down (NaN: not known).

    Kernels with a measured slow-down are of a class by that alone; CTAs of the others count where they are few.
    """
    kernels = profile.kernels[profile.is_compute]
    measured = kernel_keys(profile)[profile.is_compute].map(laws.measured).to_numpy(float)
    measured = np.where(measured < 1 + _STEP / 2, 1.0, np.round(measured / _STEP) * _STEP)
    ctas = kernels["ctas"].to_numpy(float, na_value=np.nan)
    counts = kernels["kind"].isin(ON_SMS).to_numpy(bool) & (ctas <= _FEW_WAVES * laws.sms) & np.isnan(measured)
    parts = kernels["kind"], np.where(counts, ctas, -1.0), np.nan_to_num(measured)
    keys = pd.Series(list(zip(*parts, strict=True)), kernels.index)
    spent = kernels["seconds"].groupby(keys).sum().sort_values(ascending=False, kind="stable")
    single = [key for key in spent.index if key[1] > 0][:_MOST_CLASSES]
    shown = [*single, *(key for key in spent.index if key[2] > 0), *((kind, -1.0, 0.0) for kind in parts[0].unique())]
    places = {key: place for place, key in enumerate(shown)}
    of = np.full(len(profile), -1)
    of[kernels.index] = [places.get(key, places[key[0], -1.0, 0.0]) for key in keys]
    nan = float("nan")
    return of, tuple((str(kind), count if count > 0 else nan, factor or nan) for kind, count, factor in shown)


@dataclass
class _Lowering:
    """The task graph of scenarios while it is built."""

    model: Contended
    structure: Structure
    numbers: Numbers
    graph: GraphBuilder = field(default_factory=GraphBuilder)
    ends: dict[tuple[int, float], int] = field(default_factory=dict)
    launches: list[int] = field(default_factory=list)

    def build(self) -> tuple[TaskGraph, Ints, Ints]:
        """The graph, and the first and the last task of each kernel."""
        profile = self.model.profile
        cuts, links = self._cuts(), self.graph.pool("links", self.model.at_once)
        first, last = np.zeros(len(profile), int), np.zeros(len(profile), int)
        columns = [profile.kernels[name].tolist() for name in ("name", "kind", "stream")]
        groups = self._named_groups()
        for kernel, (name, kind, stream) in enumerate(zip(*columns, strict=True)):
            pool = links if self.model.group[kernel] >= 0 else -1
            options = {"lane": f"stream {stream}", "cap": 1.0, "group": groups[kernel], "pool": pool}
            work = self._work(kernel)
            after, begun = self._before(kernel, last), 0.0
            for until in cuts[kernel]:
                needed = [self.ends[need.other, need.reached] for need in self._needs(kernel) if need.at == begun]
                amount = np.maximum((until - begun) * work, _SHORTEST_S)
                part: dict[str, Any] = {"work": amount, "delay": self._delay(kernel, begun), **options}
                after = [self.graph.task(name, kind, after=[*after, *needed], **part)]
                self.ends[kernel, until] = after[0]
                first[kernel] = first[kernel] if begun else after[0]
                begun = until
            last[kernel] = after[0]
        self._slow()
        return self.graph.build(), first, last

    def _needs(self, kernel: int) -> tuple[Need, ...]:
        return self.structure.needs.get(kernel, ())

    def _cuts(self) -> list[list[float]]:
        """Shares at which parts of each kernel end."""
        cuts: list[set[float]] = [{1.0} for _ in self.structure.previous]
        for kernel, needs in self.structure.needs.items():
            for need in needs:
                cuts[need.other].add(need.reached)
                cuts[kernel].add(need.at)
        return [sorted(shares - {0.0}) for shares in cuts]

    def _before(self, kernel: int, last: Ints) -> list[int]:
        """Tasks that the first part of a kernel waits for: of its stream, and its launch."""
        previous, place = self.structure.previous[kernel], int(self.model.host.place[kernel])
        after = [int(last[previous])] if previous >= 0 else []
        while len(self.launches) <= place:
            self._launch(kernel, last)
        if place >= 0 and np.isfinite(self.structure.launch_s[kernel]) and self.launches[place] >= 0:
            after.append(self.launches[place])
        return after

    def _launch(self, kernel: int, last: Ints) -> None:
        """Add the next launch of the host, after the one before and what the host waited for."""
        host, place = self.model.host, len(self.launches)
        before, waited = (self.launches[-1] if place else -1), int(host.waited[place])
        since = float(host.ready_s[place - 1]) if place else 0.0
        after = [before] if before >= 0 else []
        if 0 <= waited < kernel:
            after.append(int(last[waited]))
            since = max(since, float(self.model.profile.end_s[waited]))
        delay = max(float(host.ready_s[place]) - since, 0.0)
        new = delay > 0 or len(after) > 1 or 0 <= waited < kernel
        self.launches.append(
            self.graph.task("launch", "launch", after=after, delay=delay, cap=1.0, lane="host") if new else before
        )

    def _delay(self, kernel: int, begun: float) -> float:
        """Gap before a part: of the first one, and of those that are launched on their own."""
        if kernel in self.structure.fused:
            return 0.0
        parts, _ = self.structure.parts.get(kernel, (1, 1.0))
        own = begun == 0.0 or (parts > 1 and abs(begun * parts - round(begun * parts)) < 1e-9)
        group = self.model.group[kernel]
        latency = float(self.model.latency_s[group]) if begun > 0 and group >= 0 else 0.0
        paused = self.structure.paused_s.get(kernel, self.model.unknown_s[kernel]) if begun == 0.0 else 0.0
        return float(self.model.waits.gap_s + latency + paused) if own else 0.0

    def _work(self, kernel: int) -> Any:
        """Time of a kernel alone: a number, or [B] where scenarios differ."""
        numbers, group = self.numbers, self.model.group[kernel]
        of_case = self.model.alone_s[:, kernel]
        work = of_case[numbers.case] if np.ptp(of_case) > 0 else of_case[EXPECTED]
        factor: Any = self.structure.parts.get(kernel, (1, 1.0))[1]
        if (fused := self.structure.fused.get(kernel)) is not None:
            factor = factor * np.array(fused)[numbers.case]
        if group >= 0:
            return work * factor * numbers.stretch[:, group]
        if self.model.kernel_class[kernel] < 0 or (len(numbers.paces) == 1 and numbers.paces[0, kernel] == 1):
            return work * factor
        return work * factor * numbers.paces[numbers.gpu, kernel]

    def _named_groups(self) -> list[str]:
        """Group of the contention laws of each kernel, or ""."""
        model = self.model
        return [
            f"collective {group}" if group >= 0 else f"class {of}" if of >= 0 else ""
            for group, of in zip(model.group.tolist(), model.kernel_class.tolist(), strict=True)
        ]

    def _slow(self) -> None:
        """Add the laws: classes beside groups, and groups by SMs beside classes of `ON_SMS`."""
        numbers, model = self.numbers, self.model
        rows = np.arange(len(numbers.case))
        for of, (kind, _, _) in enumerate(model.classes):
            for group in range(len(model.names)):
                taken, pull = numbers.taken[:, group], numbers.pull[:, group]
                factors = model.slowdown(of, taken=taken, pull=pull, group=group)[numbers.case, rows]
                self._law(f"class {of}", f"collective {group}", 1 / factors)
                if kind in ON_SMS:
                    slowed = 1 / model.slowed[numbers.case, group]
                    self._law(f"collective {group}", f"class {of}", np.where(taken > 0, slowed, 1.0))

    def _law(self, group: str, active: str, factor: Floats) -> None:
        if (factor < 1).any():
            self.graph.slows(group, while_active=active, factor=factor)
