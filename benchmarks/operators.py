"""How fast operators are costed on one core: `python -m benchmarks.operators [--json]`, in evaluations a second.

Each evaluation has a shape of its own and hardware of its own (CUs and bandwidth differ from one to the next).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from simulators.costs.collective import Group, collective_cost
from simulators.costs.convolution import convolution
from simulators.costs.gemm import GemmShape, gemm_cost
from simulators.costs.gemm.fitted import FittedGemms
from simulators.costs.recurrent import recurrent
from simulators.costs.streaming import streaming_cost
from simulators.hardware.device import Device
from simulators.hardware.machine import tree_of

_COUNT = 200_000
_REPEATS = 5


def cases() -> Mapping[str, Callable[[], object]]:
    """Name -> a call that costs `_COUNT` operators."""
    random = np.random.default_rng(0)
    device = Device.of(tree_of("p100"))
    rates, cus = random.uniform(3e11, 1e12, _COUNT), random.integers(28, 57, _COUNT).astype(float)
    chip = replace(FittedGemms.of(device, "fp32", cus=cus), hbm_bytes_per_s=rates)
    m, n, k = np.floor(2 ** random.uniform(4, 13, (3, _COUNT)))
    transposed = random.random(_COUNT) < 0.5
    side, channels = np.floor(2 ** random.uniform(2, 8, (2, _COUNT)))
    images = {name: np.full(_COUNT, value) for name, value in (("r", 3.0), ("s", 3.0), ("pad_h", 1.0), ("pad_w", 1.0))}
    layer = {**images, "n": np.full(_COUNT, 16.0), "c": channels, "k": channels, "h": side, "w": side}
    layer |= {"stride_v": np.ones(_COUNT), "stride_h": np.ones(_COUNT)}
    group = Group(8.0, random.uniform(1e9, 4e11, _COUNT), 5e-6)
    return {
        "gemm": lambda: gemm_cost(chip, GemmShape(m, n, k, transposed_a=transposed)),
        "batched_gemm": lambda: gemm_cost(chip, GemmShape(m, n, k, batch=16)),
        "elementwise": lambda: streaming_cost(chip, 12 * m * n, flop=2 * m * n),
        "recurrent_3_passes": lambda: recurrent(chip, 4, m, n, 50),
        "convolution_3_passes_4_algorithms": lambda: convolution(chip, layer),
        "all_reduce": lambda: collective_cost("all_reduce", "ring", m * n, group),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    as_json = parser.parse_args().json
    found = {}
    for name, call in cases().items():
        call()
        best = min(_seconds(call) for _ in range(_REPEATS))
        found[f"{name}_evaluations_per_s"] = _COUNT / best
    rows = [f"| {name} | {value:,.0f} |" for name, value in found.items()]
    print(json.dumps(found, indent=2) if as_json else "\n".join(["| figure | value |", "|---|--:|", *rows]))
    return 0


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
