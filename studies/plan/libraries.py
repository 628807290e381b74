"""Whether other software of collectives would make a planned step faster: copy engines, symmetric memory, multimem."""

from __future__ import annotations

from dse.results.words import cell
from dse.values.units import with_prefix
from simulators.costs.other_software import ratio_gpus
from simulators.steps.judge.other_libraries import Saving, savings
from studies.plan.step_plan import TIME, StepPlan

_FEW = 0.01  # share of a step below which nothing is said


def library_line(plan: StepPlan) -> str:
    """A line on the software that saves the most of a step in place of the library; nothing where it saves little."""
    design, seconds = plan.design(plan.best), float(plan.best[TIME])
    found = max(savings(design), key=lambda saving: saving.saved_s, default=None)
    if found is None or found.saved_s < _FEW * seconds:
        return ""
    saves = saves_text(found, seconds, str(design.system.gpu.name))
    return f"libraries: {_would(found)}, {saves}; others: python -m dse machine libraries"


def _would(saving: Saving) -> str:
    """What the software would do: `all_reduces of 67.1 MB over tp by multimem would take 253 us each, not 310 us`."""
    size = with_prefix(saving.payload_bytes, "byte")
    times = f"{cell(saving.software_s, 's')} each, not {cell(saving.library_s, 's')}"
    return f"{saving.pattern}s of {size} over {saving.over} by {saving.software} would take {times}"


def saves_text(saving: Saving, seconds: float, gpu: str) -> str:
    """What that saves of a step, with its interval, which is not that of GPUs without measured times."""
    least, most = (100 * share / seconds for share in saving.interval_s)
    sure = "surely" if least > 0 and gpu in ratio_gpus() else "perhaps"
    shorter = f"which makes a step {sure} {100 * saving.saved_s / seconds:.1f} % shorter"
    return f"{shorter} (90 %, by measured times on {' and '.join(ratio_gpus())}: {least:.1f} to {most:.1f})"
