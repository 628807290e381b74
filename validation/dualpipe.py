"""A forward and a backward chunk of DualPipe against measured kernels: `python -m validation.dualpipe --data DIR`.

DIR: holds `kernels_layers_0_1.csv`, two of the four layers with experts of a chunk of DeepSeek-V3 on H800, 64-way
expert parallelism on 8 nodes. Assumed, as its grids say: 4,096 tokens of 7168 a micro-batch, linear layers in fp8, 4
experts a GPU; and as the paper says, casts by tiles, gradients in fp32, and norms, up-projections and activations that
are computed again; and tokens spread evenly. Nothing is fitted to the table. Compared are

    pair        from the first kernel of two layers to the end of their last one
    hidden      share of the time of dispatch and combine in which something is computed, without kernels that notify,
                as they wait for ranks that are late
    slowdown    time of kernels that ran wholly beside an exchange in one layer over that of the same kernels in the
                other layer, where none ran. GEMMs keep to 112 of 132 SMs in both
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dse import plugins
from simulators.hardware.machine import tree_of
from simulators.steps.backend import StepBackend
from simulators.steps.operators.experts import TokenExchange
from simulators.steps.operators.work import ModelBlock, Product, StageOperator, Stream
from simulators.steps.overlap.two_streams import lower
from simulators.steps.run.build import iteration
from simulators.steps.run.iteration import Iteration
from simulators.workloads.model_zoo import model_tree, option_tree

TABLE = "kernels_layers_0_1.csv"
_LAYERS, _EXCHANGES = 2, "27"
_MOVES = ("dispatch", "dispatch_cached", "combine")
_ASSUMED = {"provenance": "assumed", "source": "a NIC of 400 Gbit/s for each GPU, of which 0.9 is reached"}
Span = tuple[float, float]


@dataclass(frozen=True)
class Kernel:
    """A measured kernel: times [us], and its key, which kernels of other layers share that are the same operation."""

    key: tuple[str, str, str, str]
    start: float
    lasts: float
    beside: float

    @property
    def moves(self) -> bool:
        """True for a kernel of the stream of exchanges."""
        return self.key[1] == _EXCHANGES

    @property
    def kind(self) -> str:
        """Kind by its name."""
        return self.key[2]

    @property
    def span(self) -> Span:
        """When it began and ended."""
        return self.start, self.start + self.lasts


def read_kernels(folder: Path) -> list[Kernel]:
    """Kernels of both layers. Raises FileNotFoundError where the folder has no table."""
    with (folder / TABLE).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [
        Kernel(
            (row["launched_in"], row["stream"], row["kind"], row["order"]),
            float(row["start_us"]),
            float(row["dur_us"]),
            float(row["beside_comm_us"] or 0),
        )
        for row in rows
    ]


def hidden_share(moved: Iterable[Span], computed: Iterable[Span]) -> float:
    """Share of the time of exchanges in which something is computed."""
    moves, runs = _union(moved), _union(computed)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in moves for b in runs)
    return both / sum(end - start for start, end in moves)


def _union(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def slowed_kernels(kernels: Sequence[Kernel]) -> list[tuple[Kernel, Kernel]]:
    """Pairs (beside an exchange, without one) of kernels of the same key, of 5 us or more."""
    computed = [kernel for kernel in kernels if not kernel.moves and kernel.lasts >= 5]
    wholly = {kernel.key: kernel for kernel in computed if kernel.beside >= 0.9 * kernel.lasts}
    free = {kernel.key: kernel for kernel in computed if kernel.beside <= 0.1 * kernel.lasts}
    return [(wholly[key], free[key]) for key in wholly if key in free]


def measured(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Pair [s], hidden share and slow-down of a table."""
    moved = [kernel.span for kernel in kernels if kernel.moves and kernel.kind in _MOVES]
    computed = [kernel.span for kernel in kernels if not kernel.moves]
    both = slowed_kernels(kernels)
    return {
        "pair": 1e-6 * (max(k.span[1] for k in kernels) - min(k.start for k in kernels)),
        "hidden": hidden_share(moved, computed),
        "slowdown": sum(beside.lasts for beside, _ in both) / sum(free.lasts for _, free in both),
    }


def with_network(name: str) -> dict[str, Any]:
    """The tree of a machine that has no network rate of its own, with one that is assumed."""
    system = tree_of(name)
    system["node"]["library"]["network_bytes_per_s"] = "45 GB/s"
    system["sources"] = {**system.get("sources", {}), "node.library.network_bytes_per_s": _ASSUMED}
    return system


def deepseek_step(**parallel: Any) -> Iteration:
    """An iteration of DeepSeek-V3 on 1,024 H800, as it was trained (arXiv:2412.19437, section 3.2)."""
    run = {"mode": "training", "batch": 1, "sequence_length": 4096, "micro_batches": 64}
    spread = {
        "tp": 1,
        "pp": 16,
        "dp": 64,
        "ep": 64,
        "zero": 1,
        "pipeline": "dualpipe",
        "exchanges": "two_micro_batches",
    }
    design = StepBackend().design(
        {
            "system": with_network("h800_8"),
            "model": model_tree("deepseek_v3"),
            "run": {**run, "precision": "bf16", "products": "fp8", "recompute": "up_projections"},
            "parallel": {**spread, **parallel},
            "optimizer": option_tree("optimizer", "adam"),
            "kernels": option_tree("kernels", "deepseek"),
        }
    )
    step = iteration(design)
    passes = replace(step.passes, blocks=tuple(map(_dispatched_in_fp8, step.passes.blocks)))
    return replace(step, gradients=replace(step.gradients, passes=passes))


def _dispatched_in_fp8(block: ModelBlock) -> ModelBlock:
    """A block whose tokens go to experts in fp8, as its linear layers multiply."""
    works = ((op, replace(op.work, fp8=True) if isinstance(op.work, TokenExchange) else op.work) for op in block.ops)
    return replace(block, ops=tuple(replace(op, work=work) for op, work in works))


def predicted(step: Iteration, kernels: Sequence[Kernel]) -> dict[str, float]:
    """The same of two layers of a step; the slow-down of GEMMs and of other kernels, weighed as those of the table."""
    (layers,) = step.passes.layers_beside
    (streams,) = layers.streams
    tasks = list(plugins.load("engine", "fluid").run(lower(streams, _LAYERS)).intervals(0))
    moved, computed = (
        [(task.start_s, task.finish_s) for task in tasks if task.kind == kind] for kind in ("transfer", "gemm")
    )
    return {
        "pair": float(streams.seconds(_LAYERS)),
        "hidden": hidden_share(moved, computed),
        "slowdown": _slowdown(step, kernels),
    }


def _slowdown(step: Iteration, kernels: Sequence[Kernel]) -> float:
    assert step.passes.beside is not None
    parts = [part for part in step.passes.parts if part.block.name == "layer"]
    rates = step.passes.beside.rates_of(parts)
    of_gemms = _mean_slowdown((part, rate) for part, rate in zip(parts, rates, strict=True) if _is(part, Product))
    of_streams = _mean_slowdown(
        (part, rate)
        for part, rate in zip(parts, rates, strict=True)
        if _is(part, Stream) and part.op.kind != "attention"
    )
    free = [kernel for _, kernel in slowed_kernels(kernels)]
    late = sum(kernel.lasts * (of_gemms if kernel.kind.startswith("gemm") else of_streams) for kernel in free)
    return late / sum(kernel.lasts for kernel in free)


def _is(part: StageOperator, work: type) -> bool:
    return isinstance(part.op.work, work)


def _mean_slowdown(parts: Iterable[tuple[StageOperator, Any]]) -> float:
    times = [(float(part.spent.seconds), float(rate)) for part, rate in parts]
    return sum(alone / rate for alone, rate in times) / sum(alone for alone, _ in times)


def figures(folder: Path) -> dict[str, float]:
    """Errors with sign: of the pair, of the hidden share in points, and of the slow-down; {} for part of a table."""
    kernels = read_kernels(folder)
    if not (slowed_kernels(kernels) and any(kernel.moves and kernel.kind in _MOVES for kernel in kernels)):
        return {}  # one layer alone, or no exchanges
    truth, model = measured(kernels), predicted(deepseek_step(), kernels)
    return {
        "dualpipe_pair": model["pair"] / truth["pair"] - 1,
        "dualpipe_hidden_points": 100 * (model["hidden"] - truth["hidden"]),
        "dualpipe_slowdown": model["slowdown"] / truth["slowdown"] - 1,
    }


def by_kind(folder: Path) -> list[tuple[str, float, float]]:
    """(what, predicted, measured) [us a layer]: exchanges, GEMMs by annotation, attention, and all else."""
    kernels, step = read_kernels(folder), deepseek_step()
    truth, model = dict[str, float](), dict[str, float]()
    for kernel in kernels:
        if not kernel.moves or kernel.kind in _MOVES:
            name = _measured_group(kernel)
            truth[name] = truth.get(name, 0.0) + kernel.lasts / _LAYERS
    for part in step.passes.parts:
        if part.block.name == "layer" and part.spent.seconds > 0:
            name = _predicted_group(part)
            model[name] = model.get(name, 0.0) + 1e6 * float(part.spent.seconds) * float(np.asarray(part.op.count))
    return [(name, model.get(name, 0.0), truth.get(name, 0.0)) for name in sorted({*truth, *model})]


def _measured_group(kernel: Kernel) -> str:
    if kernel.moves:
        return kernel.key[0]
    if kernel.kind.startswith("gemm"):
        return f"GEMMs, {kernel.key[0]}"
    return "attention" if kernel.kind.startswith("attn") else "other kernels"


_OPPOSITE: Mapping[str, str] = {
    "dispatch": "dispatch(F)",
    "combine": "combine(F)",
    "dispatch backward": "dispatch(B)",
    "combine backward": "combine(B)",
}


def _predicted_group(part: StageOperator) -> str:
    op = part.op
    if op.name in _OPPOSITE:
        return _OPPOSITE[op.name]
    if isinstance(op.work, Product):
        where = "mlp" if op.kind == "fc" else "attn"
        return f"GEMMs, {where}({'F' if part.forward else 'W' if op.weight else 'B'})"
    return "attention" if op.kind == "attention" else "other kernels"


def main() -> int:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the table")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if not (arguments.data / TABLE).is_file():
        print(f"{arguments.data} holds no {TABLE}: --data is its folder (see --help)", file=sys.stderr)
        return 2
    errors = figures(arguments.data)
    if arguments.json:
        print(json.dumps(errors, indent=2))
        return 0
    kernels = read_kernels(arguments.data)
    truth, model = measured(kernels), predicted(deepseek_step(), kernels)
    print("| two layers | predicted | measured |\n|---|--:|--:|")
    for name, value in truth.items():
        print(f"| {name} | {model[name]:.4g} | {value:.4g} |")
    print("\n| us a layer | predicted | measured |\n|---|--:|--:|")
    for name, of_model, of_table in by_kind(arguments.data):
        print(f"| {name} | {of_model:,.0f} | {of_table:,.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
