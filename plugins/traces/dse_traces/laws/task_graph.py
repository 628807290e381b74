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
from numpy.typing import NDArray

from dse import plugins
from dse_traces.laws.contention import CASES, ON_SMS, Laws, SideBySide, collective_sms, kernel_keys, side_by_side
from dse_traces.laws.kernel_groups import KernelClass, collective_groups, contention_classes, median_sms
from dse_traces.profile.kernels import Profile
from dse_traces.profile.replay import EMPTY_S, ENGINE
from dse_traces.profile.waits import CAUSES, UNKNOWN, Waits, waits
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.timeline import Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
_LEAST_PAUSE_S = 20e-6  # that is no gap between kernels
_LEAST_SHARE = 1e-9  # of a kernel that others wait for
_LEAST_ALONE = 0.1  # of the recorded time
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
        # a wait for SMs ends while the other kernel still runs: `reached` is the share that it had run by then
        ran = delays.blocker_ran_s / np.maximum(profile.seconds[delays.blocker], EMPTY_S)
        shares = np.clip(ran, _LEAST_SHARE, 1.0)
        needs = {
            kernel: (Need(0.0, blocker, float(shares[kernel])),)
            for kernel, blocker in enumerate(delays.blocker.tolist())
            if blocker >= 0
        }
        return cls(tuple(delays.previous.tolist()), tuple(delays.launch_s.tolist()), needs)


@dataclass(frozen=True)
class Scenarios:
    """B scenarios on one structure. case [B]: of the laws. stretch, held_sms, relative_rate [B, G]: by group of
    collectives, the factor on its time, the SMs that it holds, and its rate over the recorded one. gpu [B]: row of
    paces. paces [R, N]: factors on the time of each kernel that computes, by GPU and case; the first are those of the
    one that was recorded.
    """

    case: Ints
    stretch: Floats
    held_sms: Floats
    relative_rate: Floats
    gpu: Ints
    paces: Floats

    def take(self, rows: Ints) -> Scenarios:
        """Some of the scenarios."""
        # paces are by GPU and not by scenario: `gpu` points into them
        by_scenario = {name: value[rows] for name, value in vars(self).items() if name != "paces"}
        return Scenarios(**by_scenario, paces=self.paces)


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
        # argsort puts NaN last, so the slice keeps launched kernels only
        kernels = np.argsort(launch, kind="stable")[: int(np.isfinite(launch).sum())]
        place = np.full(len(profile), -1)
        place[kernels] = np.arange(len(kernels))
        # roll() wraps around: the first launch has none before it, and is reset below
        before, waited = np.roll(kernels, 1), np.full(len(kernels), -1)
        # how long the host paused until the kernel ended, and how soon after that it launched again
        pause, since = end[before] - launch[before], launch[kernels] - end[before]
        stopped = (since > 0) & (pause > since) & (pause > _LEAST_PAUSE_S)
        stopped[:1] = False
        waited[stopped] = before[stopped]
        # the gap is part of every kernel's delay already, and must not count twice
        ready = np.maximum(launch[kernels] + delays.launch_delay_s - delays.gap_s, 0.0)
        return cls(kernels, ready, waited, place)


@dataclass(frozen=True)
class Ran:
    """Runs of B scenarios: tasks over time, and when each kernel begins and ends [B, N]."""

    timeline: Timeline
    start_s: Floats
    end_s: Floats


@dataclass(frozen=True)
class ContentionModel:
    """A profile, what its kernels wait for, and its laws.

    group [N]: of a collective, else -1; names: of the groups. sms [N]: that a collective holds. kernel_class [N]: place
    in `classes` of a kernel that computes, else -1. alone_s [3, N]: time of each kernel alone, in each of the cases of
    the laws. origin [N]: the recorded kernel that each is, or is a part of.
    """

    profile: Profile
    waits: Waits
    laws: Laws
    group: Ints
    names: tuple[str, ...]
    sms: Floats
    kernel_class: Ints
    classes: tuple[KernelClass, ...]
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
        return median_sms(self.group, self.sms, len(self.names))

    @cached_property
    def latency_s(self) -> Floats:
        """Latency of a collective of each group, of which each part has its own [G]: of the law, or of copy engines."""
        # each part of a cut collective pays the start of its mover again
        dma = self.laws.hardware.gpu.dma
        return np.where(self.group_sms > 0, self.laws.rate.latency_s, dma.setup_s if dma is not None else 0.0)

    @cached_property
    def collective_slowdown(self) -> Floats:
        """Factor [3, G] on the time of each group of collectives beside kernels of `ON_SMS`."""
        return _collective_slowdown(self.profile, self.laws, self.group, len(self.names))

    def kernel_slowdowns(self, held_sms: Floats, relative_rate: Floats) -> Floats:
        """Factor [3, C, G] on the time of each class beside each group, by the SMs that it holds and its rate [G]."""
        factors = [
            self.class_slowdown(place, held_sms=held_sms, relative_rate=relative_rate)
            for place in range(len(self.classes))
        ]
        return np.stack(factors, axis=1)

    def class_slowdown(
        self, place: int, *, held_sms: Floats, relative_rate: Floats, group: int | None = None
    ) -> Floats:
        """Factor [3, ...] on the time of one class beside one group, or all of them [G]."""
        recorded = self.group_sms if group is None else self.group_sms[group]
        of_class = self.classes[place]
        return _class_slowdown(self.laws, of_class, held_sms=held_sms, relative_rate=relative_rate, recorded=recorded)

    def as_recorded(self, count: int = 1) -> Scenarios:
        """Scenarios as recorded, by the laws as expected."""
        shape = count, len(self.names)
        return Scenarios(
            case=np.full(count, EXPECTED),
            stretch=np.ones(shape),
            held_sms=np.broadcast_to(self.group_sms, shape).copy(),
            relative_rate=np.ones(shape),
            gpu=np.zeros(count, np.intp),
            paces=np.ones((1, len(self.profile))),
        )

    def lower(self, structure: Structure, scenarios: Scenarios) -> tuple[TaskGraph, Ints, Ints]:
        """The task graph of scenarios, and the first and the last task of each kernel [N]."""
        return _Lowering(self, structure, scenarios).build()

    def run(self, structure: Structure, scenarios: Scenarios) -> Ran:
        """Run scenarios on the engine."""
        graph, first, last = self.lower(structure, scenarios)
        timeline: Timeline = plugins.load("engine", ENGINE).run(graph)
        begun = timeline.issued[:, first] + graph["delay"][:, first]
        return Ran(timeline, begun, timeline.finished[:, last])

    def makespans(self, structure: Structure, scenarios: Scenarios) -> Floats:
        """Time [B] from the first begin to the last end."""
        graph, _, _ = self.lower(structure, scenarios)
        return np.asarray(plugins.load("engine", ENGINE).totals(graph).makespan_s)


def contention_model(profile: Profile, laws: Laws) -> ContentionModel:
    """A profile with the laws of its contention."""
    group, names = collective_groups(profile)
    sms = collective_sms(profile, laws)
    class_of, classes = contention_classes(profile, laws)
    recorded, full_rate = median_sms(group, sms, len(names)), np.ones(len(names))
    pairs = side_by_side(profile)
    # as recorded: every collective at its recorded rate and on its recorded SMs
    by_class = [
        _class_slowdown(laws, of_class, held_sms=recorded, relative_rate=full_rate, recorded=recorded)
        for of_class in classes
    ]
    factors = np.array(by_class).reshape(len(classes), len(CASES), len(names))
    factors = factors[class_of[pairs.kernel], :, group[pairs.collective]]
    of_collectives = _collective_slowdown(profile, laws, group, len(names))[:, group[pairs.collective]]
    return ContentionModel(
        profile=profile,
        waits=waits(profile),
        laws=laws,
        group=group,
        names=names,
        sms=sms,
        kernel_class=class_of,
        classes=classes,
        alone_s=_alone(profile, pairs, factors.T, of_collectives),
        origin=np.arange(len(profile)),
    )


def _class_slowdown(
    laws: Laws, of_class: KernelClass, *, held_sms: Floats, relative_rate: Floats, recorded: Any
) -> Floats:
    """Factor [3, ...] on the time of a class beside collectives that hold some SMs at some rate.

    recorded: SMs that they held as recorded. A measured factor changes with both as the law does.
    """
    kind, ctas, measured = of_class
    by_law = laws.slowdown(kind, ctas, held_sms=held_sms, relative_rate=relative_rate)
    if measured is None:
        return by_law
    as_recorded = laws.slowdown(kind, ctas, held_sms=np.broadcast_to(recorded, np.shape(held_sms)))
    return np.asarray(np.maximum(measured * by_law / as_recorded, 1.0))


def _collective_slowdown(profile: Profile, laws: Laws, group: Ints, count: int) -> Floats:
    """Factor [3, G] on each group of collectives beside kernels of `ON_SMS`: as measured, else by the law of those that
    hold SMs.
    """
    measured = kernel_keys(profile).map(laws.measured).to_numpy(float)
    by_law = laws.collectives.cases()
    factors = list[Floats]()
    for place in range(count):
        of = measured[(group == place) & np.isfinite(measured)]
        # copy engines do not compete for SMs, so kernels there do not slow them
        unmeasured = np.ones(len(CASES)) if profile.is_peer_copy[group == place].all() else by_law
        factors.append(np.full(len(CASES), of.mean()) if of.size else unmeasured)
    return np.array(factors).reshape(count, len(CASES)).T


def at_once(profile: Profile) -> int:
    """Largest number of collectives that ran at once."""
    start, end = profile.start_s[profile.is_collective], profile.end_s[profile.is_collective]
    # begun so far less ended so far, at each begin
    running = np.searchsorted(np.sort(start), start, side="right") - np.searchsorted(np.sort(end), start, side="right")
    return max(1, int(running.max(initial=1)))


def _alone(profile: Profile, pairs: SideBySide, of_kernels: Floats, of_collectives: Floats) -> Floats:
    """Time [3, N] of each kernel alone. of_kernels, of_collectives: slow-downs [3, P] of both kernels of each pair."""
    seconds = profile.seconds
    # o (1 - 1 / f) of the module
    saved = pairs.seconds * (1 - 1 / of_kernels)
    heavy = np.isin(profile.kernels["kind"].to_numpy()[pairs.kernel], ON_SMS)
    lost = pairs.seconds * heavy * (1 - 1 / of_collectives)
    alone = [
        seconds - np.bincount(pairs.kernel, of, len(seconds)) - np.bincount(pairs.collective, also, len(seconds))
        for of, also in zip(saved, lost, strict=True)
    ]
    # laws that overshoot must not leave nothing: a kernel keeps a tenth of its recorded time
    return np.maximum(alone, _LEAST_ALONE * seconds)


@dataclass
class _Lowering:
    """The task graph of scenarios while it is built."""

    model: ContentionModel
    structure: Structure
    scenarios: Scenarios
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
            # collectives share as many slots as ran at once: more would contend for links in unknown ways
            pool = links if self.model.group[kernel] >= 0 else -1
            options = {"lane": f"stream {stream}", "cap": 1.0, "group": groups[kernel], "pool": pool}
            work = self._work(kernel)
            after, begun = self._before(kernel, last), 0.0
            for until in cuts[kernel]:
                needed = [self.ends[need.other, need.reached] for need in self._needs(kernel) if need.at == begun]
                amount = np.maximum((until - begun) * work, EMPTY_S)
                part: dict[str, Any] = {"work": amount, "delay": self._delay(kernel, begun), **options}
                after = [self.graph.task(name, kind, after=[*after, *needed], **part)]
                self.ends[kernel, until] = after[0]
                first[kernel] = first[kernel] if begun else after[0]
                begun = until
            last[kernel] = after[0]
        self._add_contention()
        return self.graph.build(), first, last

    def _needs(self, kernel: int) -> tuple[Need, ...]:
        return self.structure.needs.get(kernel, ())

    def _cuts(self) -> list[list[float]]:
        """Shares at which parts of each kernel end."""
        # a kernel is cut at every share at which another one may begin, or from which on it waits itself
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
        # launches are added in the order of the host, which need not be that of the kernels' begins
        while len(self.launches) <= place:
            self._launch(kernel, last)
        # a structure without this launch (NaN) has kernels that are launched ahead
        if place >= 0 and np.isfinite(self.structure.launch_s[kernel]) and self.launches[place] >= 0:
            after.append(self.launches[place])
        return after

    def _launch(self, kernel: int, last: Ints) -> None:
        """Add the next launch of the host, after the one before and what the host waited for."""
        host, place = self.model.host, len(self.launches)
        before, waited = (self.launches[-1] if place else -1), int(host.waited[place])
        since = float(host.ready_s[place - 1]) if place else 0.0
        after = [before] if before >= 0 else []
        # only kernels that are in the graph by now can be waited for
        if 0 <= waited < kernel:
            after.append(int(last[waited]))
            since = max(since, float(self.model.profile.end_s[waited]))
        # the host is busy for as long as it was recorded to be, from the last event that it waited for on
        delay = max(float(host.ready_s[place]) - since, 0.0)
        # a launch at the same time as the one before needs no task of its own
        new = delay > 0 or len(after) > 1 or 0 <= waited < kernel
        self.launches.append(
            self.graph.task("launch", "launch", after=after, delay=delay, cap=1.0, lane="host") if new else before
        )

    def _delay(self, kernel: int, begun: float) -> float:
        """Gap before a part: of the first one, and of those that are launched on their own."""
        if kernel in self.structure.fused:
            return 0.0
        parts, _ = self.structure.parts.get(kernel, (1, 1.0))
        # a part at a multiple of 1 / parts is launched; other cuts only mark where others may begin
        own = begun == 0.0 or (parts > 1 and abs(begun * parts - round(begun * parts)) < 1e-9)
        group = self.model.group[kernel]
        latency = float(self.model.latency_s[group]) if begun > 0 and group >= 0 else 0.0
        paused = self.structure.paused_s.get(kernel, self.model.unknown_s[kernel]) if begun == 0.0 else 0.0
        return float(self.model.waits.gap_s + latency + paused) if own else 0.0

    def _work(self, kernel: int) -> Any:
        """Time of a kernel alone: a number, or [B] where scenarios differ."""
        scenarios, group = self.scenarios, self.model.group[kernel]
        of_case = self.model.alone_s[:, kernel]
        # equal in all cases: a plain number saves memory of [B] for every task
        work = of_case[scenarios.case] if np.ptp(of_case) > 0 else of_case[EXPECTED]
        factor: Any = self.structure.parts.get(kernel, (1, 1.0))[1]
        if (fused := self.structure.fused.get(kernel)) is not None:
            factor = factor * np.array(fused)[scenarios.case]
        if group >= 0:
            return work * factor * scenarios.stretch[:, group]
        # equal on all GPUs: again a plain number
        if self.model.kernel_class[kernel] < 0 or (scenarios.paces[:, kernel] == 1).all():
            return work * factor
        return work * factor * scenarios.paces[scenarios.gpu, kernel]

    def _named_groups(self) -> list[str]:
        """Group of the contention laws of each kernel, or ""."""
        model = self.model
        return [
            f"collective {group}" if group >= 0 else f"class {of}" if of >= 0 else ""
            for group, of in zip(model.group.tolist(), model.kernel_class.tolist(), strict=True)
        ]

    def _add_contention(self) -> None:
        """Add the laws: classes beside groups, and groups by SMs beside classes of `ON_SMS`."""
        scenarios, model = self.scenarios, self.model
        rows = np.arange(len(scenarios.case))
        for place, of_class in enumerate(model.classes):
            for group in range(len(model.names)):
                sms, rate = scenarios.held_sms[:, group], scenarios.relative_rate[:, group]
                factors = model.class_slowdown(place, held_sms=sms, relative_rate=rate, group=group)
                self._add_law(f"class {place}", f"collective {group}", 1 / factors[scenarios.case, rows])
                # collectives slow down in turn, if they hold SMs
                if of_class.kind in ON_SMS:
                    rates = 1 / model.collective_slowdown[scenarios.case, group]
                    self._add_law(f"collective {group}", f"class {place}", np.where(sms > 0, rates, 1.0))

    def _add_law(self, group: str, active: str, factor: Floats) -> None:
        # a law without any effect would cost the engine time in every event
        if (factor < 1).any():
            self.graph.slows(group, while_active=active, factor=factor)
