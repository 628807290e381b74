"""What a planned step draws: watts, joules of a step and of a token, and the clock that the board's limit allows."""

from __future__ import annotations

import numpy as np

from dse.backend import Batch
from dse.results.words import cell
from dse.space import get_path
from simulators.costs.power import PowerInterval
from simulators.steps.powered import PoweredStepBackend
from studies.plan.step_plan import TIME, StepPlan

_FEW = 0.005  # share of a time by which two of them differ, and nothing is said of it


def power_line(plan: StepPlan) -> str:
    """A line on the power of the planned step; nothing where the GPU has no power model for it."""
    tree, backend = plan.point_tree(plan.best), PoweredStepBackend()
    if not get_path(tree, "system.gpu.power"):
        return ""
    design = backend.design(tree)
    if backend.problems(design):  # no energy of its operations is known
        return ""
    (results,) = backend.evaluate([Batch(design)])
    if not results.ok[0]:
        return ""
    names = ("mean_w", "held_clock", "energy_j", "tokens_per_j", TIME)
    watts, clock, joules, per_joule, seconds = (float(results.column(name)[0]) for name in names)
    power = design.system.gpu.power
    assert power is not None
    at_limit = watts > (1 - _FEW) * power.cap_w
    drawn = f"{watts:,.0f} W a GPU, {'its limit' if at_limit else f'of {power.cap_w:,.0f} W'}"
    interval = PowerInterval.of(design.system.gpu, watts, "kernels", cap_w=float(np.max(power.cap_w)))
    energy = interval.with_time(_times_over(plan))
    ends = " to ".join(cell(end / per_joule, "J") for end in energy)
    drawn += f" ({interval.low:,.0f} to {interval.high:,.0f} W)"
    joule = (
        f"{cell(joules, 'J')} a step and GPU, {cell(1 / per_joule, 'J')} a token ({ends}; 90 %, by {interval.basis})"
    )
    line = f"power: {drawn}, at {clock:.2f} of its clock; {joule}"
    if seconds > (1 + _FEW) * float(plan.best[TIME]):
        line += f"; the limit lets a step take {cell(seconds, 's')} (simulator=powered_step)"
    source = design.system.gpu.source(f"power.flop_j.{design.run.precision}")
    return line if source is None else f"{line} (energy of operations: {source.provenance})"


def _times_over(plan: StepPlan) -> tuple[float, float]:
    """Ends of the interval of the step's time over the time; 1 where no errors were drawn."""
    ends = plan.decision.get("seconds")
    return (1.0, 1.0) if ends is None else (ends[0] / float(plan.best[TIME]), ends[1] / float(plan.best[TIME]))
