"""What a plan is of, and the next best of a choice, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dse.results.words import cell
from dse.space import get_path
from simulators.steps.design import NONE
from simulators.steps.plan.drawn_errors import BY_PARTS
from studies.plan.step_plan import Choice, StepPlan, least, other_value


def next_best(plan: StepPlan, choice: Choice) -> Any:
    """The next best value of a choice, all others as planned; with the best of the others where rules need that."""
    second = other_value(plan, choice) if choice.decides else None
    return plan.runner_up(choice) if second is None else second


def runner_up_layout(plan: StepPlan) -> Any:
    """The best point in another layout; None without any."""
    return None if plan.rivals is None or plan.rivals.empty else least(plan.rivals)


def next_best_text(plan: StepPlan, choice: Choice, row: Any) -> str:
    """What a point has of a choice, and what else differs from the plan where the choice decides of others."""
    fixed = [other for other in plan.choices if other.name != choice.name and plan.chosen(other)]
    pairs = [(other.name, plan.text(other, row)) for other in fixed if plan.text(other, row) != plan.text(other)]
    text = plan.text(choice, row) or "nothing"
    if not pairs:
        return text
    return f"{text} with {' '.join(pairs[0]) if len(pairs) == 1 else 'the best of the others'}"


def seconds_text(decision: Mapping[str, Any]) -> str:
    """The interval of the time of a step, and what it rests on, as a clause; "" where no errors were drawn.

    Measured whole steps give one of 90 %. No share is promised of drawn errors of parts: whole steps are off by more.
    """
    ends = decision.get("seconds")
    if ends is None:
        return ""
    rests = decision.get("seconds_by", BY_PARTS)  # all that older runs have
    promised = "" if rests == BY_PARTS else "90 %, "
    return f"; {cell(ends[0], 's')} to {cell(ends[1], 's')} a step ({promised}by {rests})"


def work_text(plan: StepPlan) -> str:
    """Mode, sequences and precision of a step, as `prefill of 1 sequence of 4,096 tokens in bf16`."""
    tree = plan.point_tree(plan.best)
    run, lengths = tree["run"], get_path(tree, "lengths.name")
    count = run["batch"] * run["micro_batches"] * tree["parallel"]["dp"]
    sequences = f"{count:,} {'sequence' if count == 1 else 'sequences'}"
    drawn = f"of {run['sequence_length']:,} tokens" if lengths in (None, NONE) else f"of lengths {lengths}"
    products = f" with products in {run['products']}" if run.get("products") else ""
    of = "on" if run["mode"] == "training" else "of"
    return f"{run['mode']} {of} {sequences} {drawn} in {run['precision']}{products}"
