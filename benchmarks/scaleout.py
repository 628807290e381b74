"""How long a DLRM iteration on many nodes takes to simulate: `python -m benchmarks.scaleout [--json] [--quick]`.

On one core, lowering and running included: 128 and 1,024 nodes by one that stands for all; 128 nodes one by one with
uneven loads, where symmetry is of no use; and how that grows with the number of flows, as the exponent of a power law
through 32 to 512 nodes (1: linear).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.timing import best
from dse.backend import Batch
from dse.space import set_path
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from simulators.workloads.model_zoo import option_tree

_NODES = (8, 16, 32, 64, 128, 256, 512)
_IMBALANCE = 0.3
_REPEATS = 3


def point(nodes: int, *, uneven: bool) -> OverlapDesign:
    """A fused DLRM iteration on the shipped torus of so many nodes."""
    groups = {"system": "dlrm_torus", "workload": "dlrm", "schedule": "fused_kernels"}
    tree: dict[str, Any] = {group: option_tree(group, name) for group, name in groups.items()}
    tree["workload"]["only"] = ["dlrm-t200"]
    changes: dict[str, Any] = {"num_nodes": nodes}
    changes |= {"simulated": "all", "imbalance": _IMBALANCE} if uneven else {}
    for path, value in changes.items():
        set_path(tree, f"system.fabric.{path}", value)
    backend = OverlapBackend("fluid")
    (found,) = backend.scenarios(tree).values()
    return backend.design(found)


def iteration(nodes: int, *, uneven: bool) -> Callable[[], object]:
    """A call that simulates one."""
    design, backend = point(nodes, uneven=uneven), OverlapBackend("fluid")

    def run() -> object:
        (results,) = backend.evaluate([Batch(design)])
        assert results.ok.all()
        return results

    return run


def figures(nodes: Sequence[int], repeats: int) -> dict[str, float]:
    """Seconds by name, and the exponent of growth."""
    found: dict[str, float] = {}
    for count in (128, 1024):
        found[f"symmetric_{count}_nodes_s"] = best(iteration(count, uneven=False), repeats)
    seconds = [best(iteration(count, uneven=True), repeats) for count in nodes]
    for count, taken in zip(nodes, seconds, strict=True):
        found[f"uneven_{count}_nodes_s"] = taken
    found["iteration_128_nodes_s"] = found["uneven_128_nodes_s"]
    larger = [place for place, count in enumerate(nodes) if count >= 32]  # where what is fixed no longer hides growth
    fit = np.polyfit(np.log([nodes[place] for place in larger]), np.log([seconds[place] for place in larger]), 1)
    found["growth_exponent"] = float(fit[0])
    for one, other in itertools.pairwise(nodes):
        ratio = found[f"uneven_{other}_nodes_s"] / found[f"uneven_{one}_nodes_s"]
        found[f"growth_{one}_to_{other}"] = ratio
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--quick", action="store_true", help="up to 128 nodes")
    asked = parser.parse_args(words)
    found = figures(_NODES[:5] if asked.quick else _NODES, _REPEATS)
    rows = [f"| {name} | {value:.4g} |" for name, value in found.items()]
    print(json.dumps(found, indent=2) if asked.json else "\n".join(["| figure | value |", "|---|--:|", *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
