"""How long it takes to tune GEMMs for every degree of concurrency: `python -m benchmarks.tuning [--json]`.

Every queue of workload=goldyloc, at degrees 1 to 16, each by all tiles alone, on halves and on quarters of the GPU, and
beside others (GOLDYLOC's globally optimised kernels), on one core; at once, and shape by shape, as a ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np
import yaml

from benchmarks.timing import best
from dse.config.options import conf_dir
from simulators.costs.gemm.sharing import chosen
from simulators.hardware.machine import tree_of
from simulators.hardware.schedule_system import ScheduleSystem

_DEGREES = np.arange(1, 17)


def figures() -> dict[str, float]:
    """Seconds by name."""
    folder = conf_dir()
    gpu = ScheduleSystem.of(tree_of("mi100")).gpu
    queues = yaml.safe_load((folder / "workload" / "goldyloc.yaml").read_text(encoding="utf-8"))["queues"]
    shapes = np.array(sorted({(one["m"], one["n"], one["k"]) for queue in queues for one in queue["gemms"]}), float)
    m, n, k = (column[:, None] for column in shapes.T)

    def together() -> object:
        return chosen(gpu, (m, n, k), precision="fp16", degree=_DEGREES[None], choice="shared")

    def apart() -> object:
        return [
            chosen(gpu, tuple(shape), precision="fp16", degree=int(degree), choice="shared")
            for shape in shapes.tolist()
            for degree in _DEGREES
        ]

    at_once, one_by_one = best(together), best(apart)
    found = {"tuning_s": at_once, "one_by_one_s": one_by_one, "ratio": one_by_one / at_once}
    return {**found, "shapes": float(len(shapes)), "degrees": float(len(_DEGREES)), "tiles": float(len(gpu.gemm.tiles))}


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    asked = parser.parse_args(words)
    found = figures()
    rows = [f"| {name} | {value:,.4g} |" for name, value in found.items()]
    print(json.dumps(found, indent=2) if asked.json else "\n".join(["| figure | value |", "|---|--:|", *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
