"""The best plan of a step on each of many machines: a schedule for every site, and who adds up.

The time that a schedule at one site saves hardly depends on those at the others, so sites are decided one by one, for
all machines at once, by the time of their own operators. The plans that result are computed in full, and with the
second option at each site where it is close: of O options at each of S sites, S O sites and up to S + 2 steps stand for
O^S plans. `python -m benchmarks.codesign inner` holds them against all plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.values import Frozen
from simulators.hardware.device import ScheduledDevice
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import ScheduledDesign, product_format
from simulators.steps.judge.ideal import ideal_candidates
from simulators.steps.overlap.sites import SERIAL, SITES, SiteSchedules, TensorGroup, read_schedule
from simulators.steps.run.build import iteration
from simulators.steps.run.iteration import Iteration

Floats = NDArray[np.float64]
Systems = Callable[[NDArray[np.intp]], ScheduledDevice]
"""Machines at some places, as arrays; the same object for the same places."""
_NEAR = 0.005  # of the time of a step, by which one option at a site may be faster than another and yet not be best
METRICS = ("iteration_s", "tokens_per_s", "memory_bytes", "flop", "hbm_bytes")
"""Metrics of a step that are kept."""


class PlanOptions(Frozen):
    """Options of plans. sites: schedules by site, beside serial (`simulators.steps.overlap.sites`). collectives: who
    adds up inside a node: the library, or the switch where it does.
    """

    sites: Mapping[str, tuple[str, ...]] = {}
    collectives: tuple[str, ...] = ("library",)

    def options_of(self, design: ScheduledDesign) -> dict[str, tuple[str, ...]]:
        """Options of the sites that a step has, serial first."""
        split, training = design.parallel.sequence_parallel, design.run.mode == "training"
        # before a product inputs are split only with sequence parallelism; backward sites exist in training alone
        has = {
            name: (split or site.order == "after") and (training or not name.endswith("_backward"))
            for name, site in SITES.items()
        }
        return {name: (SERIAL, *options) for name, options in self.sites.items() if has[name]}

    def with_ideal(self) -> PlanOptions:
        """The same with ideal schedules beside those of software, as the hardware alone limits them."""
        ideal = ideal_candidates()
        sites = {name: tuple(dict.fromkeys((*texts, *ideal[name]))) for name, texts in self.sites.items()}
        return self.model_copy(update={"sites": sites})

    def num_plans(self, design: ScheduledDesign) -> int:
        """Number of plans of a step."""
        return len(self.collectives) * math.prod(map(len, self.options_of(design).values()))


@dataclass(frozen=True)
class Plans:
    """The best plan of a step on each of B machines.

    plans [B]: options by site; None where every plan breaks a rule. metrics: columns [B] of `METRICS`. computed: steps
    of a machine that were computed, of all machines together.
    """

    plans: Sequence[Mapping[str, str] | None]
    metrics: Mapping[str, Floats]
    computed: int


def best_plans(design: ScheduledDesign, options: PlanOptions, systems: Systems, has_switch: NDArray[np.bool_]) -> Plans:
    """Find the best plan of a step on each of B machines, by the time of a step.

    has_switch [B]: whether the switch of a machine adds up.
    """
    size = len(has_switch)
    planner = _Planner(design, options, systems, size)
    plans: list[Mapping[str, str] | None] = [None] * size
    # an infinite time is beaten by any plan that breaks no rule
    metrics = {name: np.full(size, np.inf if name == "iteration_s" else np.nan) for name in METRICS}
    for collectives in options.collectives:
        places = np.flatnonzero(has_switch) if collectives == "in_switch" else np.arange(size)
        if not len(places):
            continue
        for plan, chosen in planner.candidates(collectives, places):
            columns = planner.run(plan, chosen)
            # strictly: the first of equal plans stays
            better = columns["iteration_s"] < metrics["iteration_s"][chosen]
            for place in chosen[better].tolist():
                plans[place] = plan
            for name in METRICS:
                metrics[name][chosen[better]] = columns[name][better]
    return Plans(plans, metrics, planner.computed)


def enumerate_plans(design: ScheduledDesign, options: PlanOptions) -> Iterator[dict[str, str]]:
    """Yield every plan of a step."""
    sites = options.options_of(design)
    for collectives in options.collectives:
        for index in np.ndindex(*map(len, sites.values())):
            chosen = {name: values[place] for (name, values), place in zip(sites.items(), index, strict=True)}
            yield {"collectives": collectives, **chosen}


def planned_step(design: ScheduledDesign, plan: Mapping[str, str], system: ScheduledDevice) -> ScheduledDesign:
    """The step of a design under a plan on another machine."""
    schedules = {name: read_schedule(text, name) for name, text in plan.items() if name in SITES and text != SERIAL}
    parallel = design.parallel.model_copy(update={"collectives": plan["collectives"]})
    changes: dict[str, Any] = {"system": system, "parallel": parallel, "sites": schedules}
    return design.model_copy(update=changes)


def plan_seconds(design: ScheduledDesign, plan: Mapping[str, str], systems: Systems, size: int) -> Floats:
    """Time of a step under a plan on each machine [s]; infinite where the plan breaks a rule."""
    return _Planner(design, PlanOptions(), systems, size).seconds(plan, np.arange(size))


class _Planner:
    """Steps of one workload under plans. computed: how many so far."""

    def __init__(self, design: ScheduledDesign, options: PlanOptions, systems: Systems, size: int) -> None:
        self._design, self._systems, self._size = design, systems, size
        self._sites = options.options_of(design)
        self._legal = StepBackend().steps.legal
        self._whole = systems(np.arange(size))
        self.computed = 0

    def candidates(self, collectives: str, places: NDArray[np.intp]) -> list[tuple[dict[str, str], NDArray[np.intp]]]:
        """Plans with the best option at every site, and those with the second at one where it is close, each with the
        machines that it is for.
        """
        serial = {"collectives": collectives, **dict.fromkeys(self._sites, SERIAL)}
        with np.errstate(all="ignore"):  # of machines that break a rule
            serial_step = iteration(self._check(serial, places)[0])
            # a site's time is of one micro-batch, as `times` are
            near = _NEAR * serial_step.seconds / serial_step.passes.micro_batches
        if not self._sites:
            # nothing to decide
            return [(serial, places)]
        times = [self._option_seconds(serial, name, serial_step, places) for name in self._sites]
        # of equal times the first option, which is serial
        ranked = [np.argsort(seconds, axis=0, kind="stable") for seconds in times]
        # [sites, machines]: place of the option at each site
        best = np.stack([order[0] for order in ranked])
        chosen = [(best, places)]
        for site, (seconds, order) in enumerate(zip(times, ranked, strict=True)):
            ordered = np.take_along_axis(seconds, order[:2], axis=0)
            with np.errstate(invalid="ignore"):  # of machines on which every option breaks a rule
                close = ordered[-1] - ordered[0] < near
            # one variant a site: the second option there, the best ones elsewhere
            variant = best[:, close].copy()
            # a site with serial alone has no second
            variant[site] = order[:2][-1, close]
            chosen.append((variant, places[close]))
        return [part for columns, at in chosen if len(at) for part in self._plans(serial, columns, at)]

    def _plans(
        self, serial: Mapping[str, str], columns: NDArray[np.intp], places: NDArray[np.intp]
    ) -> Iterator[tuple[dict[str, str], NDArray[np.intp]]]:
        """Yield the plans of machines by the places of their options [sites, B], equal ones together."""
        # machines with the same plan are computed together
        different, which = np.unique(columns, axis=1, return_inverse=True)
        for index, column in enumerate(different.T.tolist()):
            options = {name: self._sites[name][at] for name, at in zip(self._sites, column, strict=True)}
            yield {**serial, **options}, places[which.reshape(-1) == index]

    def _option_seconds(
        self, serial: Mapping[str, str], name: str, serial_step: Iteration, places: NDArray[np.intp]
    ) -> Floats:
        """Time that the operators of a site take with each of its options [options, B]."""
        return np.stack(
            [self._site_seconds({**serial, name: option}, name, serial_step, places) for option in self._sites[name]]
        )

    def _site_seconds(
        self, plan: Mapping[str, str], name: str, serial_step: Iteration, places: NDArray[np.intp]
    ) -> Floats:
        """Time of one site on some machines [s]; infinite where its schedule breaks a rule there."""
        design, legal = self._check(plan, places)
        if not legal.any():
            return np.full(legal.shape, np.inf)
        scheduled = SiteSchedules(design.sites or {name: None}, self._group(design.system), design.run.mode)
        parts, seconds = serial_step.passes.parts, np.zeros(())
        ops, costs = [part.op for part in parts], [part.spent for part in parts]
        with np.errstate(all="ignore"):
            for at in (at for at in serial_step.passes.site_places() if at.name == name):
                once = scheduled.seconds(ops, costs, serial_step.passes.platform, at)
                seconds = seconds + parts[at.collective].times * once
        return np.where(legal, np.broadcast_to(seconds, legal.shape), np.inf)

    def seconds(self, plan: Mapping[str, str], places: NDArray[np.intp]) -> Floats:
        """Time of a step under a plan on some machines [s]; infinite where the plan breaks a rule there."""
        design, legal = self._check(plan, places)
        if not legal.any():
            return np.full(len(places), np.inf)
        with np.errstate(all="ignore"):  # of those that break a rule
            return np.where(legal, np.broadcast_to(iteration(design).seconds, legal.shape), np.inf)

    def run(self, plan: Mapping[str, str], places: NDArray[np.intp]) -> dict[str, Floats]:
        """Metrics of a step under a plan on some machines; infinitely long where the plan breaks a rule there."""
        design, legal = self._check(plan, places)
        columns = {name: np.full(legal.shape, np.inf if name == "iteration_s" else np.nan) for name in METRICS}
        if not legal.any():
            return columns
        with np.errstate(all="ignore"):
            metrics = metrics_of(design)
        return {name: np.where(legal, np.broadcast_to(metrics[name], legal.shape), columns[name]) for name in METRICS}

    def _check(self, plan: Mapping[str, str], places: NDArray[np.intp]) -> tuple[ScheduledDesign, NDArray[np.bool_]]:
        """The step of some machines under a plan, and on which of them it breaks no rule."""
        self.computed += len(places)
        design = planned_step(self._design, plan, self._system(places))
        legal, _ = self._legal(design, (len(places),))
        if plan["collectives"] != "in_switch" and any(each.family == "in_switch" for each in design.sites.values()):
            legal = np.zeros_like(legal)  # whose kernel orders the switch: where that adds up
        return design, legal

    def _system(self, places: NDArray[np.intp]) -> ScheduledDevice:
        """Machines at some places, with what is known of schedules on them."""
        # all machines: schedules that were found on them serve every part
        if len(places) == self._size:
            return self._whole
        system = self._systems(places)
        self._group(system).know(self._group(self._whole), places)
        return system

    def _group(self, system: ScheduledDevice) -> TensorGroup:
        return TensorGroup.of(system, tp=int(self._design.parallel.tp), precision=product_format(self._design))
