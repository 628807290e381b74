"""The best plan of a step on each of many machines: a schedule for every site, and who adds up.

The time that a schedule at one site saves hardly depends on those at the others, so sites are decided one by one, for
all machines at once, and the plans that result are computed in full: of O options at each of S sites, S O + 1 steps and
one more stand for O^S plans. `python -m benchmarks.codesign inner` holds them against all plans.
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
from simulators.steps.backend import StepBackend, iteration, metrics_of
from simulators.steps.design import ScheduledDesign
from simulators.steps.sites import SERIAL, SITES, TensorGroup, read_schedule

Floats = NDArray[np.float64]
Systems = Callable[[NDArray[np.intp]], ScheduledDevice]
"""Machines at some places, as arrays; the same object for the same places."""
METRICS = ("iteration_s", "tokens_per_s", "memory_bytes", "flop", "hbm_bytes")
"""Metrics of a step that are kept."""


class PlanOptions(Frozen):
    """Options of plans. sites: schedules by site, beside serial (`simulators.steps.sites`). collectives: who adds
    up inside a node: the library, or the switch where it does.
    """

    sites: Mapping[str, tuple[str, ...]] = {}
    collectives: tuple[str, ...] = ("library",)

    def options_of(self, design: ScheduledDesign) -> dict[str, tuple[str, ...]]:
        """Options of the sites that a step has, serial first."""
        split, training = design.parallel.sequence_parallel, design.run.mode == "training"
        has = {
            name: (split or site.order == "after") and (training or not name.endswith("_backward"))
            for name, site in SITES.items()
        }
        return {name: (SERIAL, *options) for name, options in self.sites.items() if has[name]}

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
    metrics = {name: np.full(size, np.inf if name == "iteration_s" else np.nan) for name in METRICS}
    for collectives in options.collectives:
        places = np.flatnonzero(has_switch) if collectives == "in_switch" else np.arange(size)
        if not len(places):
            continue
        for plan, chosen in planner.candidates(collectives, places):
            columns = planner.run(plan, chosen)
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
        """Plans with the best option at every site, and the machines that each is for."""
        serial = {"collectives": collectives, **dict.fromkeys(self._sites, SERIAL)}
        base = self.seconds(serial, places)
        best = [self._best_option(serial, name, base, places) for name in self._sites]
        if not best:
            return [(serial, places)]
        chosen, which = np.unique(np.stack(best), axis=1, return_inverse=True)
        which = which.reshape(-1)
        return [
            (
                {
                    "collectives": collectives,
                    **{name: self._sites[name][at] for name, at in zip(self._sites, column, strict=True)},
                },
                places[which == index],
            )
            for index, column in enumerate(chosen.T.tolist())
        ]

    def _best_option(
        self, serial: Mapping[str, str], name: str, base: Floats, places: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        options: Sequence[str] = self._sites[name][1:]
        times = [self.seconds({**serial, name: option}, places) for option in options]
        return np.asarray(np.argmin(np.stack([base, *times]), axis=0))

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
        schedules = {name: read_schedule(text) for name, text in plan.items() if name in SITES and text != SERIAL}
        parallel = self._design.parallel.model_copy(update={"collectives": plan["collectives"]})
        changes: dict[str, Any] = {"system": self._system(places), "parallel": parallel, "sites": schedules}
        design = self._design.model_copy(update=changes)
        legal, _ = self._legal(design, (len(places),))
        return design, legal

    def _system(self, places: NDArray[np.intp]) -> ScheduledDevice:
        """Machines at some places, with what is known of schedules on them."""
        if len(places) == self._size:
            return self._whole
        system, run, tp = self._systems(places), self._design.run, int(self._design.parallel.tp)
        precision = run.products or run.precision
        group = TensorGroup.of(self._whole, tp=tp, precision=precision)
        TensorGroup.part(group, system, places, tp=tp, precision=precision)
        return system
