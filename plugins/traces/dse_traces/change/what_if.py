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
from dse_traces.change.dependencies import ORDERS, RECORDED
from dse_traces.change.fusion import fuse
from dse_traces.change.micro_batches import Halved, halved
from dse_traces.change.other_gpu import Pace, pace_of
from dse_traces.change.settings import LINKS, Effects, Mover, Setting
from dse_traces.laws.contention import CASES
from dse_traces.laws.task_graph import EXPECTED, ContentionModel, Ran, Scenarios, Structure

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

MOST_RUNS = 1.1e7
"""Kernels times what-ifs of the grid of one profile."""
WORTH = 1e-3
"""Share of the run that a change must gain."""
NO_TIME = 1e-9
"""Share of its time that a task takes instead of none: without work it has no rate."""
_COUNTS = (4, 48)  # numbers of SMs that are tried: fewer miss the optimum, more hardly differ (assumed)
_ROUNDS = 3  # of the search over groups: later ones change next to nothing, as groups interact little (assumed)
_MOST_TRIED = 24  # settings of a group that are tried with those of others: the best alone (assumed)
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
        # sorted and without recorded settings: plans that mean the same are equal and hash alike
        return replace(self, settings=tuple(sorted((at, of) for at, of in settings.items() if of != Setting())))

    @property
    def orders(self) -> tuple[tuple[int, str], ...]:
        """Orders of groups that are not as recorded."""
        return tuple((group, setting.order) for group, setting in self.settings if setting.order != RECORDED)

    @property
    def shape(self) -> Plan:
        """The plan with what decides of the structure of the task graph alone."""
        # SMs, movers and links are numbers on one structure, so they are left out
        orders = tuple((group, Setting(order)) for group, order in self.orders)
        return Plan(orders, fused=self.fused, micro_batches=self.micro_batches)


@dataclass(frozen=True)
class WhatIfs:
    """Runs of a profile that is changed."""

    model: ContentionModel
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
            # three scenarios for each plan, one by case
            most = max(1, _BATCH // len(model.profile) // len(CASES))
            for begin in range(0, len(places), most):
                part = places[begin : begin + most]
                scenarios = self.scenarios([plans[place] for place in part])
                seconds[part] = model.makespans(structure, scenarios).reshape(len(part), len(CASES))
                advance(len(part))
        return np.maximum(seconds, self._least_s(plans))

    def _least_s(self, plans: Sequence[Plan]) -> Floats:
        """Time that a run keeps by plan and case of the laws [P, 3], as its collectives wait for late ranks."""
        least = np.zeros((len(plans), len(CASES)))
        every = range(len(self.model.names))
        # infinite bounds: nothing is known of other ranks, and the floor is 0
        if not any(np.isfinite(terms.gainable_s).any() for terms in self.effects.terms):
            return least
        for place, plan in enumerate(plans):
            # two micro-batches change when every collective runs
            groups = every if plan.micro_batches > 1 else [group for group, _ in plan.settings]
            if groups:
                gainable_s = sum((self.effects.terms[group].gainable_s for group in groups), np.zeros(len(CASES)))
                # the floor moves with kernels: another GPU or fusion shortens the run without any collective
                kernels_alone = Plan(gpu=plan.gpu, fused=plan.fused)
                least[place] = self._base_s(kernels_alone) - gainable_s - self.contention_s
        return least

    @property
    def kept_s(self) -> float:
        """Time that no change of collectives gets the run below, where other ranks tell how long all of them wait."""
        if any(terms.waited_s is None for terms in self.effects.terms):
            return 0.0
        gainable_s = sum(float(terms.gainable_s[EXPECTED]) for terms in self.effects.terms)
        return float(self.recorded_s[EXPECTED] - self.contention_s[EXPECTED]) - gainable_s

    @cached_property
    def contention_s(self) -> Floats:
        """What the run loses as its kernels are slower beside collectives, in each case of the laws [3]."""
        recorded = self.scenarios([Plan()])
        # SMs and rates of 0: collectives run as long as recorded and slow nothing
        alone = replace(recorded, held_sms=recorded.held_sms * 0, relative_rate=recorded.relative_rate * 0)
        return np.asarray(np.maximum(self.recorded_s - self.model.makespans(self.model.structure, alone), 0.0))

    def _base_s(self, plan: Plan) -> Floats:
        """Time of the run with a change of its kernels alone, in each case of the laws [3]."""
        if plan not in self._bases_s:
            self._bases_s[plan] = np.asarray(self.seconds([plan])[0])
        return self._bases_s[plan]

    def run(self, plan: Plan) -> Ran:
        """The run by a plan, as expected."""
        return self.model_of(plan).run(self.structure(plan), self.expected_scenarios([plan]))

    @cached_property
    def halves(self) -> Halved:
        """The profile with its batch in two halves."""
        return halved(self.model)

    def model_of(self, plan: Plan) -> ContentionModel:
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
        # fused first: orders then move what is left of the launches
        structure = fuse(model, model.structure) if plan.fused else model.structure
        for group, order in plan.orders:
            structure = ORDERS[order](model, structure, group)
        return structure

    def scenarios(self, plans: Sequence[Plan]) -> Scenarios:
        """Plans of one structure, each in all cases of the laws: scenario 3 p + c."""
        model = self.model_of(plans[0])
        scenarios = model.as_recorded(len(CASES) * len(plans))
        # the recorded GPU first; others in the order in which plans name them
        gpus = {name: row for row, name in enumerate(dict.fromkeys(["", *(plan.gpu for plan in plans)]))}
        cases = np.arange(len(CASES))
        for place, plan in enumerate(plans):
            rows = slice(len(CASES) * place, len(CASES) * (place + 1))
            for group, setting in plan.settings:
                scenarios.stretch[rows, group], scenarios.held_sms[rows, group] = self.effects.of(group, setting)
            scenarios.gpu[rows] = len(CASES) * gpus[plan.gpu] + cases
        return replace(
            scenarios,
            case=np.tile(cases, len(plans)),
            # a collective that takes 1 / k of its time moves its bytes k times as fast
            relative_rate=1 / scenarios.stretch,
            paces=np.concatenate([self.pace(name).factors[:, model.origin] for name in gpus]),
        )

    def expected_scenarios(self, plans: Sequence[Plan]) -> Scenarios:
        """Scenarios of plans of one structure, as expected."""
        return self.scenarios(plans).take(len(CASES) * np.arange(len(plans)) + EXPECTED)

    def pace(self, gpu: str) -> Pace:
        """Factors on the times of kernels on the GPU of another machine; "": the recorded one. Raises ConfigError."""
        if gpu not in self._paces:
            self._paces[gpu] = pace_of(self.model, gpu)
        return self._paces[gpu]

    @cached_property
    def exposed_s(self) -> Floats:
        """Time of each collective in the run as recorded beside which nothing is computed [N]; 0 for other kernels."""
        ran, profile = self.run(Plan()), self.model.profile
        start, end, computes = ran.start_s[0], ran.end_s[0], profile.is_compute
        beside = computed_until(end, start[computes], end[computes])
        beside -= computed_until(start, start[computes], end[computes])
        return np.where(profile.is_collective, np.maximum(end - start - beside, 0.0), 0.0)


def computed_until(times: Floats, start: Floats, end: Floats) -> Floats:
    """How long at least one of some intervals had lasted until each time [T]. start, end: of the intervals [N]."""
    if not len(start):
        return np.zeros(len(times))
    order = np.argsort(start, kind="stable")
    start, covered = start[order], np.maximum.accumulate(end[order])
    # intervals without a hole between them are one: what runs at once counts once
    first = np.concatenate([[True], start[1:] > covered[:-1]])
    begins, ends = start[first], covered[np.concatenate([first[1:], [True]])]
    lasted = np.concatenate([[0.0], np.cumsum(ends - begins)])
    edges = np.stack([begins, ends], axis=1).ravel()
    return np.asarray(np.interp(times, edges, np.stack([lasted[:-1], lasted[1:]], axis=1).ravel()))


def sm_counts(sms: int, count: int) -> list[float]:
    """Up to `count` numbers of SMs for a collective, from 1 to half of a GPU's."""
    return [float(value) for value in np.unique(np.rint(np.geomspace(1, sms / 2, count)))]


def settings(what_ifs: WhatIfs, group: int, *, counts: Iterable[float]) -> list[Setting]:
    """Settings that are tried for a group: all orders, SMs and links, and what else can move its data."""
    movers = what_ifs.effects.movers(group)
    moved: list[tuple[float | None, Mover]] = [(None, mover) for mover in movers]
    sms = what_ifs.model.group_sms[group]
    # copies by engines have 0 SMs, so no count is tried; the recorded count is there already
    moved += [(count, "SMs") for count in counts if 0 < sms != count]
    orders = _orders(what_ifs, group)
    return [Setting(order, sms, mover, link) for order in orders for sms, mover in moved for link in LINKS]


def _orders(what_ifs: WhatIfs, group: int) -> list[str]:
    """Orders that change something for a group."""
    model = what_ifs.model
    return [
        order
        for order, change in ORDERS.items()
        # equal structures would run the same what-if twice
        if order == RECORDED or change(model, model.structure, group) != model.structure
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
    count = int(np.clip(MOST_RUNS / len(model.profile) / max(others, 1), *_COUNTS))
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
    for _ in range(_ROUNDS):
        improved = False
        for group, choices in options:
            plans = [plan.with_setting(group, choice) for choice in choices]
            # a change that gains next to nothing must not be advised, and two changes need twice the gain
            effort = [worth / 2 * choice.changes for choice in choices]
            seconds = what_ifs.seconds(plans)[:, EXPECTED]
            at, count = int(np.argmin(seconds + effort)), count + len(plans)
            if seconds[at] < best - worth:
                plan, best, improved = plans[at], float(seconds[at]), True
        if not improved:
            break
    return plan, count


def _promising(what_ifs: WhatIfs, tried: Tried) -> list[tuple[int, list[Setting]]]:
    """Groups by what they gain alone, and the settings in software with the shortest runs: of each order the best."""
    options: list[tuple[float, int, list[Setting]]] = []
    for group in sorted(set(tried.groups)):
        rows = [at for at, of in enumerate(tried.groups) if of == group and tried.settings[at].in_software]
        rows.sort(key=lambda at: tried.seconds[at, EXPECTED])
        # reversed, so that the fastest of each order is what remains in the dict
        by_order = {tried.settings[at].order: at for at in reversed(rows)}
        # the best of each order is kept even if it is slow alone: together with others it may gain
        chosen = dict.fromkeys([*by_order.values(), *rows[:_MOST_TRIED]])
        options.append(
            (float(tried.seconds[rows[0], EXPECTED]), group, [Setting(), *(tried.settings[at] for at in chosen)])
        )
    return [(group, choices) for _, group, choices in sorted(options, key=lambda option: option[0])]


def host_seconds(what_ifs: WhatIfs) -> float:
    """Time of the run with all that runs on the GPU taking no time [s]: what launches, gaps and waits leave."""
    model, recorded = what_ifs.model, what_ifs.model.as_recorded()
    no_sms, no_rate = recorded.held_sms * 0, recorded.relative_rate * 0
    free = replace(recorded, held_sms=no_sms, relative_rate=no_rate)
    # of the structure and not of paces, which leave copies, fills and whole graphs as recorded
    parts = dict.fromkeys(range(len(model.profile)), (1, NO_TIME))
    return float(model.makespans(replace(model.structure, parts=parts), free)[0])
