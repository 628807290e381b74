"""What a run would take with its collectives changed: one by one, and together; and with its kernels changed.

A setting changes the collectives of one group, a plan several groups, and perhaps how all kernels run; both run on the
task graph of the profile with its laws (`dse_traces.laws.task_graph`), in the three cases of the laws, which give
the interval of a gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dse.errors.terminal import bar
from dse_traces.change import dependencies as changes
from dse_traces.change.fusion import fuse
from dse_traces.change.micro_batches import Halved, halved
from dse_traces.change.other_gpu import Pace, pace_of
from dse_traces.change.settings import FIRST, LATER, LINKS, ORDERS, RECORDED, Effects, Mover, Setting
from dse_traces.laws.contention import CASES, side_by_side
from dse_traces.laws.task_graph import EXPECTED, Contended, Numbers, Ran, Structure

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

MOST_RUNS = 1.1e7
"""Kernels times what-ifs of the grid of one profile."""
WORTH = 1e-3
"""Share of the run that a change must gain."""
_BATCH = 2_000_000  # scenarios times kernels that are lowered at once


@dataclass(frozen=True)
class Plan:
    """Settings of groups of collectives; those that are not named run as recorded. gpu: on which all kernels run.

    fused: kernels bound by memory run as parts of those before them. micro_batches: halves of the batch, or 1.
    """

    settings: tuple[tuple[int, Setting], ...] = ()
    gpu: str = ""
    fused: bool = False
    micro_batches: int = 1

    def with_setting(self, group: int, setting: Setting) -> Plan:
        """The plan with another setting of a group."""
        settings = {**dict(self.settings), group: setting}
        return replace(self, settings=tuple(sorted((at, of) for at, of in settings.items() if of != Setting())))

    @property
    def orders(self) -> tuple[tuple[int, str], ...]:
        """Orders of groups that are not as recorded."""
        return tuple((group, setting.order) for group, setting in self.settings if setting.order != RECORDED)

    @property
    def shape(self) -> Plan:
        """The plan with what decides of the structure of the task graph alone."""
        orders = tuple((group, Setting(order)) for group, order in self.orders)
        return Plan(orders, fused=self.fused, micro_batches=self.micro_batches)


@dataclass(frozen=True)
class WhatIfs:
    """Runs of a profile that is changed."""

    model: Contended
    _paces: dict[str, Pace] = field(default_factory=dict, compare=False, repr=False)
    _bases_s: dict[Plan, Floats] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def effects(self) -> Effects:
        """Effects of settings on the collectives of each group."""
        return Effects(self.model)

    @cached_property
    def recorded_s(self) -> Floats:
        """Time of the run as recorded, in each case of the laws [3]."""
        return np.asarray(self.seconds([Plan()])[0])

    def seconds(self, plans: Sequence[Plan], advance: Callable[[int], None] = lambda count: None) -> Floats:
        """Time of the run by plan and case of the laws [P, 3]. advance: is told how many plans have run.

        No plan gains more than what its collectives do not wait for late ranks, and what they cost others.
        """
        seconds = np.empty((len(plans), len(CASES)))
        for structure, places in self.by_structure(plans):
            model = self.model_of(plans[places[0]])
            most = max(1, _BATCH // len(model.profile) // len(CASES))
            for begin in range(0, len(places), most):
                part = places[begin : begin + most]
                numbers = self.numbers([plans[place] for place in part])
                seconds[part] = model.makespans(structure, numbers).reshape(len(part), len(CASES))
                advance(len(part))
        return np.maximum(seconds, self._least_s(plans))

    def _least_s(self, plans: Sequence[Plan]) -> Floats:
        """Time that a run keeps by plan and case of the laws [P, 3], as its collectives wait for late ranks."""
        least = np.zeros((len(plans), len(CASES)))
        every = range(len(self.model.names))
        if not any(np.isfinite(terms.most_s).any() for terms in self.effects.terms):
            return least
        for place, plan in enumerate(plans):
            groups = every if plan.micro_batches > 1 else [group for group, _ in plan.settings]
            if groups:
                most_s = sum((self.effects.terms[group].most_s for group in groups), np.zeros(len(CASES)))
                kernels_alone = Plan(gpu=plan.gpu, fused=plan.fused)
                least[place] = self._base_s(kernels_alone) - most_s - self.slowed_s
        return least

    @property
    def kept_s(self) -> float:
        """Time that no change of collectives gets the run below, where other ranks tell how long all of them wait."""
        if any(terms.waited_s is None for terms in self.effects.terms):
            return 0.0
        most_s = sum(float(terms.most_s[EXPECTED]) for terms in self.effects.terms)
        return float(self.recorded_s[EXPECTED] - self.slowed_s[EXPECTED]) - most_s

    @cached_property
    def slowed_s(self) -> Floats:
        """What the run loses as its kernels are slower beside collectives, in each case of the laws [3]."""
        recorded = self.numbers([Plan()])
        alone = replace(recorded, taken=recorded.taken * 0, pull=recorded.pull * 0)
        return np.asarray(np.maximum(self.recorded_s - self.model.makespans(self.model.structure, alone), 0.0))

    def _base_s(self, plan: Plan) -> Floats:
        """Time of the run with a change of its kernels alone, in each case of the laws [3]."""
        if plan not in self._bases_s:
            self._bases_s[plan] = np.asarray(self.seconds([plan])[0])
        return self._bases_s[plan]

    def run(self, plan: Plan) -> Ran:
        """The run by a plan, as expected."""
        return self.model_of(plan).run(self.structure(plan), self.expected_numbers([plan]))

    @cached_property
    def halves(self) -> Halved:
        """The profile with its batch in two halves."""
        return halved(self.model)

    def model_of(self, plan: Plan) -> Contended:
        """The profile as recorded, or with its batch in two halves."""
        return self.model if plan.micro_batches == 1 else self.halves

    def by_structure(self, plans: Sequence[Plan]) -> Iterator[tuple[Structure, list[int]]]:
        """Yield structures, and the places of the plans that have each."""
        places: dict[Plan, list[int]] = {}
        for place, plan in enumerate(plans):
            places.setdefault(plan.shape, []).append(place)
        for members in places.values():
            yield self.structure(plans[members[0]]), members

    def structure(self, plan: Plan) -> Structure:
        """Dependencies between kernels by a plan."""
        model = self.model_of(plan)
        structure = fuse(model, model.structure) if plan.fused else model.structure
        for group, order in plan.orders:
            structure = ordered(model, structure, group, order)
        return structure

    def numbers(self, plans: Sequence[Plan]) -> Numbers:
        """Numbers of plans of one structure in each case of the laws: scenario 3 p + c."""
        model = self.model_of(plans[0])
        recorded = model.numbers(len(CASES) * len(plans))
        case = np.tile(np.arange(len(CASES)), len(plans))
        gpus = {"": 0, **{name: row for row, name in enumerate({plan.gpu: 0 for plan in plans if plan.gpu}, 1)}}
        for place, plan in enumerate(plans):
            rows = slice(len(CASES) * place, len(CASES) * (place + 1))
            for group, setting in plan.settings:
                recorded.stretch[rows, group], recorded.taken[rows, group] = self.effects.of(group, setting)
            recorded.gpu[rows] = gpus[plan.gpu]
        paces = np.array([self.pace(name).factors[model.origin] for name in gpus])
        return replace(recorded, case=case, pull=1 / recorded.stretch, paces=paces)

    def expected_numbers(self, plans: Sequence[Plan]) -> Numbers:
        """Numbers of plans of one structure, as expected."""
        return self.numbers(plans).take(len(CASES) * np.arange(len(plans)) + EXPECTED)

    def pace(self, gpu: str) -> Pace:
        """Factors on the times of kernels on the GPU of another machine; "": the recorded one. Raises ConfigError."""
        if gpu not in self._paces:
            self._paces[gpu] = pace_of(self.model, gpu)
        return self._paces[gpu]

    @cached_property
    def exposed_s(self) -> Floats:
        """Time of each collective in the run as recorded beside which nothing is computed [N]; 0 for other kernels."""
        ran = self.run(Plan())
        times = {"start_s": ran.start_s[0], "seconds": ran.end_s[0] - ran.start_s[0]}
        kernels = self.model.profile.kernels.assign(**times)
        order = np.argsort(times["start_s"], kind="stable")
        both = side_by_side(replace(self.model.profile, kernels=kernels.iloc[order].reset_index(drop=True)))
        beside = np.bincount(order[both.collective], both.seconds, len(kernels))
        exposed = np.maximum(times["seconds"] - beside, 0.0)
        return np.where(self.model.profile.is_collective, exposed, 0.0)


def ordered(model: Contended, structure: Structure, group: int, order: str) -> Structure:
    """A structure with one of `ORDERS` for a group of collectives."""
    if order == "earlier":
        return changes.start_early(model, structure, group)
    if order == FIRST:
        return changes.prioritise(model, structure, group)
    if order == LATER:
        return changes.wait_later(model, structure, group)
    if order.endswith("parts"):
        return changes.cut(model, structure, group, parts=int(order.split()[1]))
    return changes.merge(model, structure, group, count=int(order.split()[0]))


def sm_counts(sms: int, count: int) -> list[float]:
    """Up to `count` numbers of SMs for a collective, from 1 to half of a GPU's."""
    return [float(value) for value in np.unique(np.rint(np.geomspace(1, sms / 2, count)))]


def settings(what_ifs: WhatIfs, group: int, *, counts: Iterable[float]) -> list[Setting]:
    """Settings that are tried for a group: all orders, SMs and links, and what else can move its data."""
    movers = what_ifs.effects.movers(group)
    taken: list[tuple[float | None, Mover]] = [(None, mover) for mover in movers]
    sms = what_ifs.model.group_sms[group]
    taken += [(count, "SMs") for count in counts if 0 < sms != count]
    orders = _orders(what_ifs, group)
    return [Setting(order, sms, mover, link) for order in orders for sms, mover in taken for link in LINKS]


def _orders(what_ifs: WhatIfs, group: int) -> list[str]:
    """Orders that change something for a group."""
    model = what_ifs.model
    return [
        order
        for order in ORDERS
        if order == RECORDED or ordered(model, model.structure, group, order) != model.structure
    ]


@dataclass(frozen=True)
class Tried:
    """What-ifs of one group each, and how long the run takes with each [W, 3]."""

    groups: tuple[int, ...]
    settings: tuple[Setting, ...]
    seconds: Floats


def try_all(what_ifs: WhatIfs) -> Tried:
    """Try all settings of each group with the other groups as recorded, as many as `MOST_RUNS` allows."""
    model = what_ifs.model
    groups = range(len(model.names))
    others = sum(len(_orders(what_ifs, group)) * len(LINKS) for group in groups)
    count = int(np.clip(MOST_RUNS / len(model.profile) / max(others, 1), 4, 48))
    pairs = [
        (group, setting)
        for group in groups
        for setting in settings(what_ifs, group, counts=sm_counts(model.laws.sms, count))
    ]
    with bar(f"advise on {model.profile.source}", len(pairs), "what-ifs") as advance:
        seconds = what_ifs.seconds([Plan().with_setting(*pair) for pair in pairs], advance)
    return Tried(tuple(group for group, _ in pairs), tuple(setting for _, setting in pairs), seconds)


def best_together(what_ifs: WhatIfs, tried: Tried) -> tuple[Plan, int]:
    """The best plan of changes in software that coordinate search finds, and how many plans it tried.

    The settings of one group after another are tried with those of the others, the group that gains most alone first,
    until no group gains more; a change must gain at least 0.1 % of the run, and half of that for each thing it changes.
    """
    plan, best, count = Plan(), what_ifs.recorded_s[EXPECTED], 0
    worth = WORTH * best
    options = _promising(what_ifs, tried)
    for _ in range(3):
        improved = False
        for group, choices in options:
            plans = [plan.with_setting(group, choice) for choice in choices]
            effort = [worth / 2 * choice.changes for choice in choices]
            seconds = what_ifs.seconds(plans)[:, EXPECTED]
            at, count = int(np.argmin(seconds + effort)), count + len(plans)
            if seconds[at] < best - worth:
                plan, best, improved = plans[at], float(seconds[at]), True
        if not improved:
            break
    return plan, count


def _promising(what_ifs: WhatIfs, tried: Tried, most: int = 24) -> list[tuple[int, list[Setting]]]:
    """Groups by what they gain alone, and the settings in software with the shortest runs: of each order the best."""
    options: list[tuple[float, int, list[Setting]]] = []
    for group in sorted(set(tried.groups)):
        rows = [at for at, of in enumerate(tried.groups) if of == group and tried.settings[at].in_software]
        rows.sort(key=lambda at: tried.seconds[at, EXPECTED])
        by_order = {tried.settings[at].order: at for at in reversed(rows)}
        chosen = dict.fromkeys([*by_order.values(), *rows[:most]])
        options.append(
            (float(tried.seconds[rows[0], EXPECTED]), group, [Setting(), *(tried.settings[at] for at in chosen)])
        )
    return [(group, choices) for _, group, choices in sorted(options, key=lambda option: option[0])]


def lower_bound(what_ifs: WhatIfs, tried: Tried) -> float:
    """Time [s] below which no change of collectives in software gets the run.

    The largest of three: all kernels, with collectives that begin early, take no time and slow nothing; the time that
    all collectives take on their links, each the shortest that was tried; and what is no transfer, where it is known.
    """
    model, recorded = what_ifs.model, what_ifs.model.numbers()
    nothing = replace(recorded, stretch=recorded.stretch * 1e-9, taken=recorded.taken * 0, pull=recorded.pull * 0)
    structure = model.structure
    for group in range(len(model.names)):
        structure = changes.start_early(model, structure, group)
    free = float(model.makespans(structure, nothing)[0])
    shortest = np.ones(len(model.names))
    for group, setting in zip(tried.groups, tried.settings, strict=True):
        if setting.in_software:
            shortest[group] = min(shortest[group], what_ifs.effects.of(group, setting)[0][EXPECTED])
    collectives = model.group >= 0
    times = model.alone_s[EXPECTED, collectives] * shortest[model.group[collectives]]
    return max(free, float(times.sum()) / model.at_once, what_ifs.kept_s)


def host_seconds(what_ifs: WhatIfs) -> float:
    """Time of the run with kernels and collectives that take no time [s]: what launches, gaps and waits leave."""
    model, recorded = what_ifs.model, what_ifs.model.numbers()
    nothing = {"stretch": 1e-9, "taken": 0.0, "pull": 0.0, "paces": 1e-9}
    free = replace(recorded, **{name: factor * getattr(recorded, name) for name, factor in nothing.items()})
    return float(model.makespans(model.structure, free)[0])
