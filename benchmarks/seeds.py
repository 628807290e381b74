"""The seeds of the framework by mechanism, in figures: `python -m benchmarks.seeds [--json]`.

t3_fluid_gap         largest difference between T3 by requests and the fluid model where the latter's assumptions hold
jitq_within          predicted claims of JIT-Q that are within
goldyloc_oracle_gap  median excess of GOLDYLOC's run-time logic over the oracle, with GEMMs that arrive
fused_within         claims of fused operators that are within, by their workgroups (and what else `seeds_goldyloc` has)

Some seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.claims import count, judged
from benchmarks.seeds_goldyloc import fused_claims_within, goldyloc_oracle_gap, goldyloc_within
from dse.config.compose import request
from dse_near_memory.agreement import LARGE, gaps


def t3_fluid_gap() -> float:
    """Largest gap, relative, of all schedules of T3 and large FC layers."""
    tree = request(["study=t3_requests"]).tree
    sections = {name: tree[name] for name in ("system", "workload", "schedule", "controller")}
    return max(abs(gap) for case in LARGE for gap in gaps(sections, case).values())


def within(study: str) -> int:
    """Predicted claims of a study that are within, judged anew."""
    return count(judged(study, flips=False))["within"]


FIGURES: Sequence[Callable[[], Mapping[str, Any]]] = (
    lambda: {"t3_fluid_gap": t3_fluid_gap()},
    lambda: {"jitq_within": within("jitq")},
    goldyloc_within,
    goldyloc_oracle_gap,
    fused_claims_within,
)
"""What measures figures by name."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = parser.parse_args()
    figures = {name: value for measure in FIGURES for name, value in measure().items()}
    print(
        json.dumps(figures, indent=2)
        if words.json
        else "\n".join(f"{name}: {value}" for name, value in figures.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
