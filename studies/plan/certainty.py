"""Certainty of a plan: the simplest setting that is as fast as the fastest within the noise, and how sure it is.

Times of the points of a plan are drawn with the same errors (`simulators.hardware.residuals`). A choice stays where
the 90 % interval of the time without it, over the time with it, is above 1, or touches 1 from above (`decide.loses`)
and gains at the median (`decide.gains`): it may gain nothing, but never costs. All others are left off, those that
gain least first, as nobody could tell the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.results.decisions import Decision, Drawing, gain_text, interval, most_helpful
from dse.results.words import cell
from dse.study.plan import Plan
from simulators.steps.overlap.sites import SERIAL
from simulators.steps.plan.drawn_errors import StepInterval
from studies.plan.step_plan import TIME, Choice, StepPlan

Floats = NDArray[np.float64]
_MOST_RIVALS = 3  # whose times are drawn: those that come next


@dataclass(frozen=True)
class DrawnPlan:
    """A plan of a study whose points have drawn times."""

    plan: StepPlan
    planned: Plan

    @cached_property
    def _times(self) -> dict[str, Floats]:
        return {}

    @cached_property
    def basis(self) -> dict[str, str]:
        """Kind of error -> what it rests on."""
        return {}

    def times(self, row: Any) -> Floats:
        """Times [samples] of a point, drawn once."""
        key = str(row["key"])
        if key not in self._times:
            (self._times[key],), basis = self._draw([self.plan.design(row)])
            self.basis.update(basis)
        return self._times[key]

    def _draw(self, designs: Sequence[Any], exact: Sequence[str] = ()) -> tuple[Floats, Mapping[str, str]]:
        backend, settings = self.planned.backend, self.planned.settings
        assert isinstance(backend, Drawing)
        return backend.draw(designs, samples=settings.decide.samples, seed=settings.seed, exact=exact)

    def gain(self, before: Any, after: Any) -> tuple[float, float]:
        """Ends of the 90 % interval of the time of one point over that of another."""
        return interval(self.times(before) / self.times(after), float(before[TIME] / after[TIME]))

    def never_slower(self, before: Any, after: Any) -> bool:
        """Tell whether a point is not slower than another one by more than rounding, and faster at the median."""
        median, bounds = float(np.median(self.times(before) / self.times(after))), self.planned.settings.decide
        return self.gain(before, after)[0] >= 1 - bounds.loses and median > 1 + bounds.gains

    def _stands_out(self, before: Any, after: Any) -> bool:
        return self.gain(before, after)[0] > 1 or self.never_slower(before, after)

    def simplest(self) -> tuple[StepPlan, dict[str, str]]:
        """The plan with what does not stand out left off, and what that gained, by choice, in words."""
        plan, left, choices = self.plan, dict[str, str](), list[tuple[Choice, str]]()
        # each is left off once: what decides of others may bring them back
        while candidates := [pair for pair in self._equal(plan) if pair[0].name not in left]:
            choice, row = min(candidates, key=lambda pair: float(pair[1][TIME]))
            gained = gain_text(float(row[TIME] / plan.best[TIME]), *self.gain(row, plan.best))
            left[choice.name] = f"{plan.text(choice)}: {gained}, {cell(plan.best[TIME], 's')} a step"
            choices.append((choice, plan.text(choice)))
            plan = replace(plan, preferred=str(row["key"]))
        back = {choice.name for choice, text in choices if plan.text(choice) == text}
        return plan, {name: text for name, text in left.items() if name not in back}

    def _equal(self, plan: StepPlan) -> Iterator[tuple[Choice, Any]]:
        """Yield choices of a plan that do not stand out, and the point without each.

        Together they must not stand out either; what sites need stays as long as one of them has a schedule.
        """
        scheduled = any(text != SERIAL for text in plan.sites.values())
        for choice in plan.choices:
            row = None if plan.is_off(choice) or (choice.decides and scheduled) else plan.without(choice)
            if row is None or row["key"] == plan.best["key"] or float(row[TIME]) > float(plan.before[TIME]):
                continue  # nobody gives up what the software does by itself for less
            if not (self._stands_out(row, plan.best) or self._stands_out(row, self.plan.best)):
                yield choice, row

    def decision(self, plan: StepPlan) -> dict[str, Any]:
        """Entries of `summary.json` on a plan."""
        rivals = self._rivals(plan)
        times = np.stack([self.times(plan.best), *(self.times(row) for _, row in rivals)])
        names = [f"{choice} {text}" for (choice, text), _ in rivals]
        before = self.times(plan.before)
        least = self.planned.settings.decide.least
        decision = Decision.of(times, before, least=least, rivals=names, basis=self.basis).holding(plan.gain)
        decision = replace(decision, never_slower=self.never_slower(plan.before, plan.best))
        if not decision.is_decided:  # between what it is not decided among
            rows = [plan.before] if decision.spans_one or not rivals else []
            rows += [row for _, row in rivals[:1]] if decision.fastest < least else []
            decision = replace(decision, measure=self._measure([plan.best, *rows]))
        alone = {}
        for choice in plan.choices:
            pair = None if plan.is_off(choice) else plan.alone_rows_of(choice)
            if pair is not None:
                alone[choice.name] = self.gain(*pair)
        gains = {"gain": plan.gain, "alone": alone, "over_serial": self.gain(plan.serial, plan.best)}
        taken = StepInterval.of(self.plan.design(plan.best), float(plan.best[TIME]), times[0])
        gains |= {"seconds": [taken.low, taken.high], "seconds_by": taken.basis}
        return {**decision.json(), "preferred": str(plan.best["key"]), **gains}

    def _measure(self, rows: Sequence[Any]) -> dict[str, Any]:
        """The measurement that helps most to choose among points."""
        designs, kinds = [self.plan.design(row) for row in rows], tuple(self.basis)
        alone = {kind: self._draw(designs, [other for other in kinds if other != kind])[0] for kind in kinds}
        return most_helpful(np.stack([self.times(row) for row in rows]), alone)

    def _rivals(self, plan: StepPlan) -> Sequence[tuple[tuple[str, str], Any]]:
        """Points that come next, each with another value of one choice; what is faster was left off as no different."""
        rivals = []
        for choice in plan.choices:
            row = plan.runner_up(choice)
            if row is not None and float(row[TIME]) >= float(plan.best[TIME]):
                rivals.append(((choice.name, plan.text(choice, row) or "nothing"), row))
        return sorted(rivals, key=lambda pair: float(pair[1][TIME]))[:_MOST_RIVALS]


def decide(plans: Sequence[StepPlan], planned: Plan) -> dict[str, Any]:
    """Decisions of `summary.json` by the key of the fastest point of each plan, on the simplest one that is as fast."""
    decisions = {}
    for plan in (plan for plan in plans if plan.fits):
        drawn = DrawnPlan(plan, planned)
        simpler, left = drawn.simplest()
        decisions[str(plan.best["key"])] = {**drawn.decision(simpler), "left_off": left}
    return decisions


def as_decided(plans: Sequence[StepPlan], decisions: Mapping[str, Any] | None) -> list[StepPlan]:
    """Plans with the points that decisions prefer, and what these say of them."""
    decided = []
    for plan in plans:
        entry = (decisions or {}).get(str(plan.best["key"]), {})
        decided.append(replace(plan, preferred=entry.get("preferred", ""), decision=entry))
    return decided
