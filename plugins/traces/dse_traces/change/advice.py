"""Advice on a profile: what each collective costs, the change that gains most, all changes together, and their bound.

A change of one group is worth while if it gains 0.1 % of the run. Of changes that gain nearly as much the simplest one
is advised. A gain is an interval: the run as recorded less the changed one, in the three cases of the laws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dse.config.options import conf_dir
from dse.errors import ConfigError
from dse_traces.change.bound import lower_bound
from dse_traces.change.dependencies import LATER, RECORDED, consumers, members
from dse_traces.change.settings import MANY, Setting
from dse_traces.change.software import SoftwareVerdict, count_runs, software_verdicts
from dse_traces.change.what_if import (
    WORTH,
    Plan,
    Tried,
    WhatIfs,
    best_together,
    host_seconds,
    sm_counts,
    try_all,
)
from dse_traces.laws.contention import Estimate, assumed_laws, learn_laws
from dse_traces.laws.task_graph import EXPECTED, Ran, contention_model
from dse_traces.profile.kernels import Profile
from dse_traces.profile.unnamed_kernels import nothing_to_move

Floats = NDArray[np.float64]
_NEARLY = 0.05  # of a gain, that a simpler change may lose
_FASTER_LINK = 2.0
_COUNTS = 8  # numbers of SMs that all collectives of two micro-batches are tried with
FUSED, HALVED = "kernels bound by memory fused with neighbours", "two micro-batches"
"""What-ifs of all kernels."""
_MOSTLY = 0.5  # share of the time of collectives that they wait, from which on waiting is the cause
_OFTEN = 0.5  # share of kernels that their launch held up, from which on the host is the cause


@dataclass(frozen=True)
class GroupAdvice:
    """Advice on one group of collectives: how often they run, how long they are exposed [s], the best change and its
    gain [s], the gain with a link twice as fast, that of waiting for them later, and why they are exposed.
    """

    name: str
    count: int
    seconds: float
    exposed_s: float
    change: Setting
    gain: Estimate
    faster_link: Estimate
    waited_later: Estimate
    cause: str


@dataclass(frozen=True)
class OfKernels:
    """A what-if of all kernels at once: its name, plan, the run with it in each case of the laws [3], and its gain."""

    name: str
    plan: Plan
    seconds: Floats
    gain: Estimate


@dataclass(frozen=True)
class Advice:
    """Advice on a profile. plan: the best changes in software together; together_s: the run with them; bound_s: below
    which none gets it. kernels: what-ifs of all kernels at once. host_s: the run if no kernel took any time. gpus:
    other GPUs and the run on each [s]. software: verdicts on other software of collectives. count: what-ifs that were
    run.
    """

    what_ifs: WhatIfs
    tried: Tried
    groups: tuple[GroupAdvice, ...]
    plan: Plan
    together_s: Estimate
    bound_s: float
    kernels: tuple[OfKernels, ...]
    host_s: float
    gpus: tuple[tuple[str, Estimate], ...]
    software: tuple[SoftwareVerdict, ...]
    count: int

    @property
    def recorded_s(self) -> float:
        """The run as recorded, replayed."""
        return float(self.what_ifs.recorded_s[EXPECTED])

    @cached_property
    def before(self) -> Ran:
        """The run as recorded."""
        return self.what_ifs.run(Plan())

    @cached_property
    def after(self) -> Ran:
        """The run with the plan."""
        return self.what_ifs.run(self.plan)

    def not_worth(self) -> Iterator[tuple[str, float]]:
        """Yield kinds of changes in software that gain less than 0.1 % for every group, and what they gain at most."""
        gains = self.what_ifs.recorded_s[EXPECTED] - self.tried.seconds[:, EXPECTED]
        most: dict[str, float] = {}
        for setting, gain in zip(self.tried.settings, gains.tolist(), strict=True):
            for kind in _kinds(setting):
                # a kind is worth while if it is so for any group
                most[kind] = max(most.get(kind, -np.inf), gain)
        yield from ((kind, gain) for kind, gain in most.items() if gain < WORTH * self.recorded_s)


def _kinds(setting: Setting) -> list[str]:
    """The one kind of change that a setting is, if it is one in software alone."""
    # settings of several changes at once show nothing of a single kind
    if not setting.in_software or setting.changes != 1:
        return []
    moved = "another number of SMs" if setting.sms is not None else f"by the {setting.mover}"
    return [moved if setting.order == RECORDED else setting.order]


def advise(profile: Profile, system: str) -> Advice:
    """Advice on a profile of a GPU of a machine, by name. Raises ConfigError for one without constants of contention,
    or for a profile without collectives.
    """
    if not profile.is_collective.any():
        problem = nothing_to_move("has no collective to advise on", profile)
        if profile.is_graph.any():
            problem = replace(
                problem, way_out="record the kernels of CUDA graphs: nsys profile --cuda-graph-trace=node"
            )
        raise ConfigError([problem])
    # what the profile tells of its own kernels counts before constants of the machine
    what_ifs = WhatIfs(contention_model(profile, learn_laws(profile, assumed_laws(system))))
    tried = try_all(what_ifs)
    plan, count = best_together(what_ifs, tried)
    others = _other_gpus(what_ifs, system)
    groups = tuple(_group_advice(what_ifs, tried, group) for group in range(len(what_ifs.model.names)))
    together = _sorted(what_ifs.seconds([plan])[0])
    kernels, software = _of_kernels(what_ifs), software_verdicts(what_ifs)
    total = len(tried.groups) + count + len(others) + len(kernels) + count_runs(software)
    bound_s, host_s = lower_bound(what_ifs, tried), host_seconds(what_ifs)
    return Advice(what_ifs, tried, groups, plan, together, bound_s, kernels, host_s, others, tuple(software), total)


def _group_advice(what_ifs: WhatIfs, tried: Tried, group: int) -> GroupAdvice:
    rows = [at for at, of in enumerate(tried.groups) if of == group]
    software = [at for at in rows if tried.settings[at].in_software]
    best = tried.settings[best_row(what_ifs, tried, software)]
    places = what_ifs.model.group == group
    faster, later = Setting(link=_FASTER_LINK), Setting(order=LATER)

    def gain(setting: Setting) -> Estimate:
        at = next((row for row in rows if tried.settings[row] == setting), None)
        # a setting that changes nothing for this group was not tried
        return Estimate(0.0, 0.0, 0.0) if at is None else _sorted(what_ifs.recorded_s - tried.seconds[at])

    exposed = float(what_ifs.exposed_s[places].sum())
    times = what_ifs.model.profile.seconds[places]
    return GroupAdvice(
        what_ifs.model.names[group],
        int(places.sum()),
        float(times.sum()),
        exposed,
        best,
        gain(best),
        gain(faster),
        gain(later),
        _cause(what_ifs, group, exposed),
    )


def best_row(what_ifs: WhatIfs, tried: Tried, rows: Sequence[int]) -> int:
    """The row with the simplest setting of those that gain nearly the most; the recorded one if none is worth while."""
    gains = {at: float(what_ifs.recorded_s[EXPECTED] - tried.seconds[at, EXPECTED]) for at in rows}
    most, least = max(gains.values()), WORTH * what_ifs.recorded_s[EXPECTED]
    recorded = next(at for at in rows if tried.settings[at] == Setting())
    if most < least:
        return recorded
    near = [at for at in rows if gains[at] >= (1 - _NEARLY) * most]
    # of equally simple changes, the one nearest to the recorded number of SMs
    sms = max(float(what_ifs.model.group_sms[tried.groups[recorded]]), 1.0)
    return min(near, key=lambda at: (tried.settings[at].changes, abs(np.log((tried.settings[at].sms or sms) / sms))))


def _of_kernels(what_ifs: WhatIfs) -> tuple[OfKernels, ...]:
    """Kernels fused with neighbours, and two micro-batches: with collectives as recorded, and on the best number of SMs
    for all of them.
    """
    plans = {FUSED: Plan(fused=True)}
    if what_ifs.halves.divided:
        plans[HALVED] = Plan(micro_batches=2)
        counts = sm_counts(what_ifs.model.laws.sms, _COUNTS)
        # halves need fewer SMs for collectives, as these have twice the time: one count for all of them is searched
        on_sms = [_on_sms(what_ifs, count) for count in counts]
        best = int(np.argmin(what_ifs.seconds(on_sms)[:, EXPECTED]))
        plans[f"{HALVED}, {counts[best]:g} SMs for each collective"] = on_sms[best]
        plans[f"{HALVED}, {FUSED}"] = Plan(fused=True, micro_batches=2)
    seconds = [what_ifs.seconds([plan])[0] for plan in plans.values()]
    return tuple(
        OfKernels(name, plan, times, _sorted(what_ifs.recorded_s - times))
        for (name, plan), times in zip(plans.items(), seconds, strict=True)
    )


def _on_sms(what_ifs: WhatIfs, count: float) -> Plan:
    """Two micro-batches with all collectives on a number of SMs."""
    plan = Plan(micro_batches=2)
    for group in range(len(what_ifs.model.names)):
        plan = plan.with_setting(group, Setting(sms=count))
    return plan


def _sorted(values: Floats) -> Estimate:
    """The least, the expected and the largest of the values in the cases of the laws [3]."""
    return Estimate(float(values.min()), float(values[EXPECTED]), float(values.max()))


def _cause(what_ifs: WhatIfs, group: int, exposed: float) -> str:
    """Why collectives of a group are exposed, as far as the profile tells."""
    model, terms = what_ifs.model, what_ifs.effects.terms[group]
    collectives = members(model, group)
    if exposed < WORTH * what_ifs.recorded_s[EXPECTED]:
        return "hidden, or short"
    total_s = terms.mean_s * len(collectives)
    if terms.waited_s is not None and terms.waited_s > _MOSTLY * total_s:
        return f"waits for late ranks for {100 * terms.waited_s / total_s:.0f} % of its time"
    # what is left when no rank is waited for
    moves_s = terms.mean_s - (terms.waited_s or 0.0) / len(collectives)
    if terms.machine_s and moves_s > MANY * terms.machine_s:
        times, late = moves_s / terms.machine_s, "late ranks, or " if terms.waited_s is None else ""
        return f"{times:,.0f} x as long as links of {model.laws.machine} need: {late}a slower link"
    launches = [member for member in collectives if np.isfinite(model.waits.launch_s[member])]
    # twice the usual delay: the launch itself, and what scatters
    ready = [model.waits.launch_s[member] + 2 * model.waits.launch_delay_s for member in launches]
    start = model.profile.start_s[launches]
    # most of them begin as soon as their launch allows, so the stream was idle by then
    if launches and float((start <= np.array(ready)).mean()) > _OFTEN:
        return "launched late: the host is behind"
    waited = sum(any(True for _ in consumers(model.structure, member)) for member in collectives)
    if waited > _OFTEN * len(collectives):
        return "what follows waits for them"
    return "little is computed meanwhile"


def _other_gpus(what_ifs: WhatIfs, system: str) -> tuple[tuple[str, Estimate], ...]:
    """Other shipped machines of eight GPUs and the run on them, collectives as recorded; the shortest runs first."""
    names = [path.stem for path in sorted((conf_dir() / "system").glob("*_8.yaml")) if path.stem != system]
    plans: list[Plan] = []
    for name in names:
        try:
            what_ifs.pace(name)
        # a machine without the constants that kernels need has no time
        except ConfigError:
            continue
        plans.append(Plan(gpu=name))
    runs = [Estimate(min(of), of[EXPECTED], max(of)) for of in what_ifs.seconds(plans).tolist()]
    return tuple(sorted(zip((plan.gpu for plan in plans), runs, strict=True), key=lambda pair: pair[1].value))
