"""PTX executed by lanes of warps, held against a plain interpreter and PyTorch: `python -m benchmarks.ptx [--json]`.

kernels, kernels_equal   launches by the compiled interpreter and by a plain one of threads, and those whose memory is
                         equal to the bit: the package's kernels, those of Triton's tutorials, a program for each
                         form of instruction, `--programs` random ones
lenet_error              largest difference of logits from PyTorch's on a CPU, over four algorithms of convolution and
                         after a step of training
digits_equal             of 64 of scikit-learn's digits, those classified as by PyTorch, by every algorithm
digits_right             of them, those classified right
forward_s                processor time of the forward pass of 64 digits, of the slowest algorithm
functional_per_s         thread instructions a second of processor time on one core, in these passes
timing_per_s             warp instructions of a product that are timed a second of processor time
deepbench_median         median error of products and convolutions in fp32 (`--data DIR`: DeepBench's tables; of
                         `--every` N rows one), with the misses
deepbench_absent         GPUs whose SMs are described, and that no table has: V100 among them
hopper_kernels           kernels of wgmma, bulk copies, mbarriers and clusters whose results are those of NumPy
hopper_gemm_error        of their products, the largest error beyond rounding the result, in steps of fp16
hopper_gemm_timing_median  median error of products in bf16 on H100, of rows with m, n and k of 2048 at least
                         (`--data DIR`: h100_sxm_bf16.csv in it, in its folder gemm, or beside it), with the misses
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ptx_hopper import EVERY, hopper
from benchmarks.ptx_timing import absent, instructions_per_s, predictions, summary
from dse_ptx import digits
from dse_ptx.checking import comparison, random_programs
from dse_ptx.checking.cases import cases
from dse_ptx.lenet import ALGORITHMS, LeNet

_DIGITS, _STEP, _RATE = 64, 8, 0.1
PROGRAMS = 150
"""Random programs."""


def proof(options: argparse.Namespace) -> dict[str, float]:
    """Launches by both interpreters."""
    equal = [each.is_equal() for each in cases()]
    equal += [comparison.random_is_equal(i, [each] * 4, 0) for i, each in enumerate(random_programs.TEMPLATES)]
    equal += [comparison.random_is_equal(seed) for seed in range(options.programs)]
    return {"kernels": len(equal), "kernels_equal": sum(equal)}


def lenet(_: argparse.Namespace) -> dict[str, float]:
    """The network by PTX and by PyTorch, with weights that were trained on the other digits."""
    import torch

    images, labels = digits.digits()
    weights = digits.train_weights(images[_DIGITS:], labels[_DIGITS:])
    shown, answers = images[:_DIGITS], labels[:_DIGITS]
    expected = digits.logits(weights, torch.from_numpy(shown)).detach().numpy()
    classes, error, seconds, instructions = expected.argmax(1), 0.0, list[float](), 0
    alike = np.ones(_DIGITS, bool)
    for algorithm in ALGORITHMS:
        network = LeNet(digits.arrays(weights), algorithm)
        network.logits(shown[:1])  # compiles
        network.layers.runs.clear()
        start = time.process_time()
        found = network.logits(shown)
        seconds.append(time.process_time() - start)
        instructions += sum(run.thread_instructions for _, run in network.layers.runs)
        error = max(error, float(abs(found - expected).max()))
        alike &= found.argmax(1) == classes
    return {
        "lenet_error": max(error, trained_error(weights, shown[:_STEP], answers[:_STEP])),
        "digits_equal": int(alike.sum()),
        "digits_right": int((classes == answers).sum()),
        "forward_s": max(seconds),
        "functional_per_s": instructions / sum(seconds),
    }


def trained_error(weights: dict[str, object], images: np.ndarray, labels: np.ndarray) -> float:
    """Largest difference of logits after a step of training by PTX, from PyTorch's after its step."""
    import torch

    network = LeNet(digits.arrays(weights))
    network.train(images, labels, _RATE)
    digits.step(weights, torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), _RATE)
    after = digits.logits(weights, torch.from_numpy(images)).detach().numpy()
    return float(abs(network.logits(images) - after).max())


def timing(options: argparse.Namespace) -> dict[str, Any]:
    """Speed of the model of time, and its errors."""
    rows = predictions(options.data, options.every)
    return {"timing_per_s": instructions_per_s(), **summary(rows), "deepbench_absent": absent(options.data)}


def of_hopper(options: argparse.Namespace) -> dict[str, Any]:
    """Kernels of Hopper, and times of products."""
    return hopper(options.data, options.every_product)


PARTS: Sequence[Callable[[argparse.Namespace], dict[str, Any]]] = (proof, lenet, timing, of_hopper)
"""What is measured, given the options; their figures are printed together."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--programs", type=int, default=PROGRAMS, help="random programs")
    parser.add_argument("--data", type=Path, default=Path(), help="folder of DeepBench's tables")
    parser.add_argument("--every", type=int, default=8, help="of so many rows, one is predicted (8)")
    parser.add_argument("--every-product", type=int, default=EVERY, help=f"of so many of H100's, one is ({EVERY})")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for part in PARTS:
        figures |= part(options)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:16} {value}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
