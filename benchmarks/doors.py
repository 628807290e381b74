"""One quantity, asked at every door: `python -m benchmarks.doors [--json] [--systems NAME ...]`.

Where several parts of the framework need the same quantity, each is asked for it on every machine that has what it
needs, and answers that differ are counted:

    GEMM beside moved data    schedules, reductions of gradients, exchanges of experts, halves of tokens, all products
                              of a step (of which serving makes its tables), and recorded profiles, whose kernels tell
                              their workgroups alone: of GEMMs of many waves
    waves                     the models of GEMMs, and recorded profiles
    rate of few CUs           copies by schedules, and persistent kernels by workgroup
    HBM traffic               of GEMMs that share a last-level cache: the closed form, and by workgroup
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.physics import Machine
from dse.config.options import list_options
from dse.errors import ConfigError
from dse_traces.laws.contention import assumed_laws, lost_share
from dse_workgroups import kernel_library, persistent
from search_spaces.chunk_costs import ChunkCosts
from simulators.costs.chip import Chip
from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.costs.gemm.sharing import chosen, kernels, lacks
from simulators.costs.gemm.waves import count_waves
from simulators.costs.sharing import Sharing
from simulators.costs.transfer import link_utilisation
from simulators.steps.operators.work import (
    ModelBlock,
    Op,
    OperatorCost,
    Platform,
    Product,
    StageOperator,
    beside_moved_data,
    operator_costs,
)
from simulators.steps.overlap.expert_exchanges import OverlappedExchanges
from simulators.steps.overlap.gradient_contention import ContendedPlatform, GradientReduction
from simulators.steps.overlap.token_splits import beside_sums
from simulators.steps.spread.groups import groups
from simulators.workloads.model import Parallel
from simulators.workloads.operators import Gemm

Floats = NDArray[np.float64]
Answers = Mapping[str, float]
"""Door -> its answer to one question."""
SIZES = ((4096, 4096, 4096), (8192, 8192, 8192), (2048, 8192, 8192), (16384, 16384, 8192))
HELD = (1, 8, 16, 32)
PRECISION = "bf16"
_NEAR = 0.02  # of times, of which some hold a launch
_NEAR_BY_WAVES = 0.1  # a profile tells waves, and not what of a kernel its memory bounds
_MANY_WAVES = 8


def beside_moved(machine: Machine, size: tuple[int, int, int], held: int) -> Iterator[tuple[str, float]]:
    """Yield (door, slowdown) of a GEMM while kernels that hold CUs move data."""
    m, n, k = size
    system, device = machine.schedules, machine.iterations
    if system is not None and system.gpu.contention is not None and _prices(system):
        op = Gemm(m=m, n=n, k=k, precision=PRECISION, shards=1, split="n")
        costs = ChunkCosts(system, op, "cu", None)
        chunk = costs.beside(size, np.asarray(held), masked=False, accumulate=False)
        yield "schedules", float(1 / np.asarray(chunk.law.factors[0]))
        gpu = replace(costs.gpu, engines=None) if hasattr(costs.gpu, "engines") else costs.gpu
        yield from _of_profile(machine.name, gpu, size, held)
    if device is None or device.gpu.contention is None or not _prices(device, chip=True):
        return
    at = groups(device, Parallel(ep=device.node.num_gpus)) if device.node is not None else {}
    if "ep" not in at:
        return
    chip, gemms = Chip.of(device, PRECISION), gemms_of(device, PRECISION)
    platform = Platform(chip, gemms, at, sharing=Sharing.of(device.gpu))
    ops = [Op("gemm", "linear", "forward", Product(n, m, k, transposed=True))]
    (alone,) = operator_costs(ops, platform)
    yield from _of_steps(platform, device, ops[0], alone, held)


def _prices(machine: Any, *, chip: bool = False) -> bool:
    """Tell whether a machine has all that a GEMM needs, and what operators of steps need if asked."""
    try:
        gemms_of(machine, PRECISION)
        if chip:
            Chip.of(machine, PRECISION)
    except (ValueError, KeyError):
        return False
    return True


def _of_steps(platform: Platform, device: Any, op: Op, alone: OperatorCost, held: int) -> Iterator[tuple[str, float]]:
    """Yield (door, slowdown) of a GEMM in steps."""
    copy = None if device.gpu.cu_copy is None else device.gpu.cu_copy.model_copy(update={"num_cus": held})
    if copy is not None:
        reduction = GradientReduction(*(np.asarray(value, float) for value in (1e9, 1e9, 1e-2)))
        contended = ContendedPlatform(platform, device.gpu.contention, copy)
        yield "gradients", _ratio(contended.beside([op], [alone], reduction)[0], alone)
    exchanges = OverlappedExchanges("shared_expert", platform, device.gpu.contention, held)
    yield "exchanges", float(1 / np.asarray(exchanges.rates_of([_placed(op, alone)])[0]))
    (left,) = operator_costs([op], platform.with_held(held))
    halves = beside_sums([alone.seconds], [left.seconds], [10 * alone.seconds], sharing=platform.sharing)
    yield "halves", _ratio(halves[0], alone)
    yield "products", _ratio(beside_moved_data([op], [alone], platform, held)[0], alone)


def _placed(op: Op, cost: OperatorCost) -> Any:
    """An operator as layers see it, of which exchanges read its work and its cost."""
    return StageOperator(op, ModelBlock("layer", (op,), count=1, params=0), cost, np.ones(()))


def _ratio(seconds: Any, alone: OperatorCost) -> float:
    return float(np.asarray(seconds) / np.asarray(alone.seconds))


def _of_profile(name: str, gpu: Any, size: tuple[int, int, int], held: int) -> Iterator[tuple[str, float]]:
    """Yield the slowdown that the laws of a recorded profile have for the same kernel, if it has many waves."""
    kernel = gemm_cost(gpu, GemmShape.row_major(*size)).kernel
    workgroups, cus = float(np.asarray(kernel.workgroups)), int(np.asarray(gpu.cus))
    try:
        laws = assumed_laws(name)
    except ConfigError:
        return
    if workgroups >= _MANY_WAVES * cus:
        yield "profiles", float(np.asarray(laws.slowdown("GEMM", workgroups, held_sms=held))[1])


def waves(machine: Machine, workgroups: int, held: int) -> Answers:
    """Waves on the CUs that are left over those on all of them."""
    cus = int(np.max(np.asarray((machine.schedules or machine.iterations).gpu.num_cus)))
    held = min(held, cus - 1)
    by_model = count_waves(workgroups, cus, held) / count_waves(workgroups, cus, 0)
    return {"GEMMs": float(by_model), "profiles": float(lost_share("GEMM", workgroups, cus, held))}


def rate_of_few(demand: float) -> Answers:
    """Share of a rate that CUs reach, for their demand over it."""
    return {"copies": float(link_utilisation(demand)), "persistent kernels": float(persistent._share(demand, 1.0))}


def hbm_traffic(machine: Machine, size: tuple[int, int, int], degree: int) -> Answers:
    """HBM traffic [bytes] of a GEMM that shares the last-level cache with others like it."""
    system = machine.schedules
    if system is None or lacks(system.gpu):
        return {}
    kernel = chosen(system.gpu, size, precision="fp16", degree=1)
    table = kernels(system.gpu, size, precision="fp16", degree=degree)
    same = (table.rows == kernel.rows) & (table.cols == kernel.cols)
    closed = float(np.asarray(table.hbm_bytes)[np.asarray(same)][0])
    return {
        "closed form": closed,
        "workgroups": float(kernel_library._hbm_bytes(system.gpu, size, "fp16", kernel)[degree]),
    }


def disagreements(names: Sequence[str]) -> dict[str, list[str]]:
    """Questions to which doors answer differently, by quantity."""
    apart: dict[str, list[str]] = {"GEMM beside moved data": [], "waves": [], "rate of few CUs": [], "HBM traffic": []}
    for machine in map(Machine.named, names):
        if machine.schedules is None and machine.iterations is None:
            continue
        for size in SIZES:
            for held in HELD:
                answers = dict(beside_moved(machine, size, held))
                by_waves = {"profiles": answers.pop("profiles")} if "profiles" in answers else {}
                question = f"{machine.name} {size} {held} CUs"
                apart["GEMM beside moved data"] += _differ(question, answers, _NEAR)
                first = dict(list(answers.items())[:1])
                apart["GEMM beside moved data"] += _differ(question, {**first, **by_waves}, _NEAR_BY_WAVES)
                apart["waves"] += _differ(question, waves(machine, 64 * held + size[0], held), 1e-9)
            for degree in (1, 2, 4):
                apart["HBM traffic"] += _differ(
                    f"{machine.name} {size} x{degree}", hbm_traffic(machine, size, degree), 1e-9
                )
    for demand in (0.1, 0.5, 1.0, 4.0):
        apart["rate of few CUs"] += _differ(f"demand {demand}", rate_of_few(demand), 1e-12)
    return apart


def _differ(question: str, answers: Answers, most: float) -> list[str]:
    """The question with its answers if these differ by more than a share."""
    if len(answers) < 2 or max(answers.values()) <= (1 + most) * min(answers.values()):
        return []
    return [f"{question}: {', '.join(f'{door} {value:.3f}' for door, value in answers.items())}"]


def main(words: Sequence[str] | None = None) -> int:
    """Print what differs; the exit code is 1 where something does."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doors", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--systems", nargs="+", default=list_options("system"), help="machines; all by default")
    asked = parser.parse_args(words)
    apart = disagreements(asked.systems)
    counts = {name: len(questions) for name, questions in apart.items()}
    if asked.json:
        print(json.dumps({"doors_disagree": sum(counts.values()), **counts}, indent=2))
    else:
        print(*(f"{name}: {question}" for name, of in apart.items() for question in of), sep="\n")
        print(*(f"{name:<32}{count:>6}" for name, count in counts.items()), sep="\n")
    return int(any(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
