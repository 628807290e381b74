"""How many model and hardware scenarios a core evaluates in a second: `python -m benchmarks.steps [--json] [--quick]
[--data DIR]`, and with DIR how far predicted steps, collectives, latencies and exchanges are from published
ones, and how many questions of a sample of `validation.plan_matrix` have an answer.

A scenario is a width, sequence length, batch, TP and flop-versus-bandwidth, drawn from the space of study=comp_vs_comm.
Full: every operator of the iteration, all metrics, through the backend. Projected: from one profile, the share of
communication alone. One by one: full, a design a call. Ratios are of the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.expert_exchanges import across_many_nodes
from benchmarks.timing import best
from dse.backend import Batch
from dse.config import compose
from dse.errors import ConfigError
from dse.study.plan import plan
from dse.values import put
from simulators.steps.backend import StepBackend
from simulators.steps.design import StepDesign
from simulators.steps.judge.projection import Profile, Size, by_kind, project_layer, serialized_share
from simulators.steps.run.build import iteration
from validation.amd_tables import amd_figures
from validation.decode_tables import decode_figures
from validation.plan_matrix import matrix_figures
from validation.published_tables import read_throughput, throughput_figures

_BASE = {"model.hidden": 1024, "run.sequence_length": 512, "run.batch": 16, "parallel.tp": 4}
_CHOICES: Mapping[str, Sequence[float]] = {
    "model.hidden": [1024.0 * 2**power for power in range(7)],
    "run.sequence_length": [1024.0 * 2**power for power in range(4)],
    "run.batch": [1, 2, 4, 8],
    "parallel.tp": [4, 8, 16],
    "system.gpu.flop_vs_bw": [1, 1.5, 2, 3, 4],
}
_FINE = 64  # flop-versus-bandwidth ratios of the large grid
_PROJECTED = 1_000_000
_ONE_BY_ONE = 50
_FEW_CELLS, _CELLS = 6, 60  # of the matrix of plans


def base() -> StepDesign:
    """The design of study=comp_vs_comm."""
    planned = plan(compose.request(["study=comp_vs_comm", "store=none", "tracking=none"]))
    (space,) = planned.spaces.values()
    design = planned.backend.design(space.base)
    assert isinstance(design, StepDesign)
    return design


def grid(design: StepDesign, fine: int) -> Batch:
    """All scenarios, with so many ratios of flop to bandwidth."""
    axes: dict[str, NDArray[Any]] = {path: np.array(values) for path, values in _CHOICES.items()}
    axes["system.gpu.flop_vs_bw"] = np.linspace(1, 4, fine)
    return Batch(Batch(design, axes).at(0), axes)


def figures(*, quick: bool) -> dict[str, float]:
    """Scenarios a second of one core by name."""
    design, backend = base(), StepBackend()
    batch = grid(design, 4 if quick else _FINE)
    parts = list(batch.split(backend.batch))
    full = _rate(lambda: backend.evaluate(parts), batch.size)
    some = [Batch(batch.at(index)) for index in np.linspace(0, batch.size - 1, _ONE_BY_ONE).astype(int)]
    single = _rate(lambda: [backend.evaluate([one]) for one in some], len(some))
    for path, value in {**_BASE, "parallel.dp": 1}.items():
        design = put(design, path, value)
    size = Size(*_BASE.values())
    profile = Profile(size, by_kind(iteration(design)), int(_BASE["parallel.tp"]))
    count = _PROJECTED // (100 if quick else 1)
    random = np.random.default_rng(0)
    drawn = [random.choice(values, count) for values in _CHOICES.values()]

    def sweep() -> object:
        return serialized_share(project_layer(profile, Size(*drawn[:4]), drawn[4]))

    told = _rate(sweep, count)
    return {
        "full_scenarios_per_s": full,
        "one_by_one_scenarios_per_s": single,
        "projected_scenarios_per_s": told,
        "projected_over_full": told / full,
        "full_over_one_by_one": full / single,
        "scenarios_full": float(batch.size),
        "scenarios_projected": float(count),
    }


def _rate(call: Callable[[], object], count: int) -> float:
    """Scenarios for each second of CPU time."""
    return count / best(call)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--quick", action="store_true", help="fewer scenarios")
    parser.add_argument("--data", type=Path, help="folder of measured tables: errors of predicted steps as well")
    asked = parser.parse_args(words)
    found: dict[str, Any] = dict(figures(quick=asked.quick))
    if asked.data is not None:
        try:
            found |= throughput_figures(read_throughput(asked.data))
            found |= amd_figures(asked.data) | decode_figures(asked.data)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        found |= {"ep_4_8_median": across_many_nodes(asked.data / "ep_collectives")}
        found |= matrix_figures(_FEW_CELLS if asked.quick else _CELLS)
    rows = [f"| {name} | {value:,.4g} |" for name, value in found.items() if isinstance(value, float)]
    print(json.dumps(found, indent=2) if asked.json else "\n".join(["| figure | value |", "|---|--:|", *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
