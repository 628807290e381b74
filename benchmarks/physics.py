"""Costs held against one another and against hardware: the same operator costs the same everywhere, more never hurts.

`python -m benchmarks.physics [--json] [--draws N] [--systems NAME ...]` prints for every machine

    unequal_costs     random operators (GEMMs of the library, streams, collectives) whose cost differs by over 1e-12
                      between two of the backends that price them
    monotone_breaks   draws in which 10 % more CUs, clock, HBM bandwidth or link rate make a GEMM, a collective or a
                      step of both slower by more than 2 %, or in which more GPUs speed an all-reduce

and for all of them together

    sibling_breaks    draws in which a machine is over 2 % slower than its sibling, though nothing of its data sheet is
                      worse: of GPUs of which one is written as a variant of the other (`variant_of`), and GEMMs of
                      formats whose rate of a CU is not worse either, as it bounds products of few tiles
    sharing_disagree  questions to which two doors of a quantity answer differently (`benchmarks.doors`), a GEMM beside
                      moved data among them
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from dse.config.options import list_options, load_yaml, option_file
from dse.config.variants import VARIANT_OF
from dse.errors import ConfigError
from dse.values import put
from search_spaces.chunk_costs import ChunkCosts
from simulators.costs.chip import Chip
from simulators.costs.gemm import GemmShape, gemm_cost, gemms_of
from simulators.costs.memory_bound import kernel_cost
from simulators.costs.streaming import streaming_cost
from simulators.costs.transfer import TransferMode, alone, library_cus
from simulators.hardware.device import Device
from simulators.hardware.machine import System, View, peak_format, tree_of
from simulators.hardware.network import Pattern
from simulators.hardware.parts import ELEMENT_BYTES, Precision
from simulators.hardware.schedule_system import ScheduleSystem, schedules_see
from simulators.steps.operators.work import Exchange, Op, Platform, Product, Stream, collective, operator_costs
from simulators.steps.spread.groups import groups
from simulators.workloads.model import Parallel
from simulators.workloads.operators import Elementwise, Gemm

Floats = NDArray[np.float64]
Prices = Mapping[str, Floats]
"""Backend -> times [s] of the same operators."""
_EQUAL, _SLOWER = 1e-12, 1.02
_MORE = {
    "CUs": ("gpu.num_cus", "gpu.active_cus"),
    "clock": ("gpu.clock",),
    "rate": ("gpu.matrix_flop_per_s_per_cu", "gpu.peak_flop_per_s"),
    "HBM": ("gpu.hbm_bytes_per_s",),
    "links": ("node.link_bytes_per_s",),
}
"""What grows -> numbers of a machine that grow with it."""


@dataclass(frozen=True)
class Draws:
    """Random sizes: of row-major GEMMs, and bytes of streams and of payloads."""

    m: Floats
    n: Floats
    k: Floats
    bytes: Floats

    @classmethod
    def of(cls, count: int, seed: int = 0) -> Draws:
        """Draw sizes in doublings: tokens of any number, other sizes as models have them."""
        random = np.random.default_rng(seed)
        tokens = np.rint(2 ** random.uniform(0, 15, count))
        outputs, depth = (64 * np.rint(2 ** random.uniform(0, 8.5, count)) for _ in range(2))
        return cls(tokens, outputs, depth, np.rint(2 ** random.uniform(10, 31, count)))


def _view(kind: type[View], tree: Mapping[str, Any]) -> Any:
    """A machine as a backend sees it; None where it lacks what that needs."""
    try:
        return kind.of(tree)
    except ConfigError:
        return None


@dataclass(frozen=True)
class Machine:
    """A machine as schedules and iterations see it; None for the one that it does not serve."""

    name: str
    schedules: Any
    iterations: Any

    @classmethod
    def named(cls, name: str) -> Machine:
        """A shipped machine."""
        tree = tree_of(name)
        return cls(name, _view(ScheduleSystem, tree), _view(Device, tree))

    def with_more(self, what: str, factor: float) -> Machine:
        """The machine with more of something, both views alike."""

        def grow(view: Any) -> Any:
            for path in _MORE[what]:
                part, _, name = path.partition(".")
                value = getattr(getattr(view, part, None), name, None) if view is not None else None
                if value is not None and not (what == "clock" and view.gpu.clock is None):
                    grown: Any = (
                        {key: factor * rate for key, rate in value.items()}
                        if isinstance(value, Mapping)
                        else factor * np.asarray(value, float)
                    )
                    view = put(view, path, np.ceil(grown) if what == "CUs" else grown)
            return view

        return Machine(self.name, grow(self.schedules), grow(self.iterations))

    def precisions(self) -> Iterator[Precision]:
        """Yield precisions at which some backend prices its GEMMs."""
        for precision in get_args(Precision):
            if gemm_prices(self, precision, Draws.of(1)):
                yield precision


def gemm_prices(machine: Machine, precision: Precision, draws: Draws) -> Prices:
    """Times of row-major GEMMs, without launches, by all backends that have the machine and the precision."""
    shape = GemmShape.row_major(draws.m, draws.n, draws.k)
    prices = dict[str, Floats]()
    system, device = machine.schedules, machine.iterations
    if system is not None and _has_gemms(system, precision):
        numbers: dict[str, Any] = {"m": draws.m, "n": draws.n, "k": draws.k, "precision": precision}
        op = Gemm.model_construct(**numbers, shards=1, split="n", after=())
        prices["schedules"] = ChunkCosts(system, op, "cu", None).whole.seconds
        if system.gpu.persistent is not None and precision in ELEMENT_BYTES:
            prices["fused operators"] = kernel_cost(system, op).seconds
    if device is not None and _has_chip(device, precision):
        loaded = device.gpu.loaded
        gemms = gemms_of(device, precision, clock=1.0 if loaded is None else loaded.gemm_clock)
        platform = Platform(Chip.of(device, precision), gemms)
        work = Product(draws.n, draws.m, draws.k, transposed=True)
        (cost,) = operator_costs([Op("gemm", "linear", "forward", work)], platform)
        prices["iterations"] = cost.seconds - np.asarray(gemms.launch_s)
        prices["profiles"] = gemm_cost(gemms_of(device, precision), shape).seconds
    return prices


def _has_gemms(system: System, precision: str) -> bool:
    try:
        gemms_of(system, precision)
    except (ValueError, KeyError):
        return False
    return True


def _has_chip(device: System, precision: str) -> bool:
    try:
        Chip.of(device, precision)
    except ValueError:
        return False
    return _has_gemms(device, precision)


def stream_prices(machine: Machine, precision: Precision, draws: Draws) -> Prices:
    """Times of passes over tensors, without launches."""
    prices, system, device = dict[str, Floats](), machine.schedules, machine.iterations
    if system is not None:
        prices["schedules"] = draws.bytes / (system.gpu.stream_share * np.asarray(system.gpu.hbm_bytes_per_s))
        if system.gpu.persistent is not None and precision in ELEMENT_BYTES:
            numbers: dict[str, Any] = {"rows": draws.bytes / 2 / ELEMENT_BYTES[precision], "precision": precision}
            op = Elementwise.model_construct(**numbers, cols=1, reads=1, writes=1)
            prices["fused operators"] = kernel_cost(system, op).seconds
    if device is not None and _has_chip(device, precision):
        chip = Chip.of(device, precision)
        prices["iterations"] = operator_costs(
            [Op("add", "activation", "forward", Stream(draws.bytes))], Platform(chip, gemms_of(device, precision))
        )[0].seconds - np.asarray(chip.launch_s)
        prices["profiles"] = streaming_cost(chip, draws.bytes).seconds - np.asarray(chip.launch_s)
    return prices


def collective_prices(machine: Machine, pattern: Pattern, gpus: int, draws: Draws) -> Prices:
    """Times of collectives of some GPUs of a node."""
    prices, system, device = dict[str, Floats](), machine.schedules, machine.iterations
    if system is not None:
        part = schedules_see(system, gpus, system.gpu.efficiency)
        prices["schedules"] = alone(part, draws.bytes, by=TransferMode("cu", library_cus(part, pattern), pattern))
    if device is not None and device.node is not None and device.node.library is not None:
        group = groups(device, Parallel(tp=gpus))["tp"]
        prices["iterations"] = collective(Exchange(pattern, draws.bytes), group).seconds
    return prices


def unequal(prices: Prices) -> int:
    """Number of operators whose cost is not the same for all backends."""
    if len(prices) < 2:
        return 0
    table = np.stack(np.broadcast_arrays(*prices.values()))
    # launches were taken off: a part of a microsecond has fewer digits
    return int((np.ptp(table, axis=0) > _EQUAL * np.maximum(table.max(axis=0), 1e-6)).sum())


def kinds(machine: Machine, draws: Draws) -> Iterator[tuple[str, Prices]]:
    """Yield the prices of a machine's operators by kind."""
    for precision in machine.precisions():
        yield f"GEMM {precision}", gemm_prices(machine, precision, draws)
        yield f"stream {precision}", stream_prices(machine, precision, draws)
    for pattern in get_args(Pattern):
        for gpus in _group_sizes(machine):
            yield f"{pattern} {gpus}", collective_prices(machine, pattern, gpus, draws)


def _group_sizes(machine: Machine) -> list[int]:
    node = (machine.schedules or machine.iterations or machine).__dict__.get("node")
    return [] if node is None else [size for size in (2, 4, 8) if size <= node.num_gpus]


def times(machine: Machine, draws: Draws) -> dict[str, Floats]:
    """Times of each kind by one backend, and of steps: a GEMM and its all-reduce one after the other."""
    found = {kind: next(iter(prices.values())) for kind, prices in kinds(machine, draws) if prices}
    gemms = [seconds for kind, seconds in found.items() if kind.startswith("GEMM")]
    moves = [seconds for kind, seconds in found.items() if kind.startswith("all_reduce")]
    if gemms and moves:
        found["step"] = gemms[-1] + moves[-1]
    return found


def breaks(machine: Machine, draws: Draws) -> Counter[str]:
    """Number of draws that are slower with more hardware, by what grows and kind."""
    before, counts = times(machine, draws), Counter[str]()
    for what in _MORE:
        for kind, seconds in times(machine.with_more(what, 1.1), draws).items():
            counts[f"{what}: {kind}"] = int((seconds > _SLOWER * before[kind]).sum())
    node = (machine.schedules or machine.iterations).node
    shared = node is not None and node.topology != "mesh"  # whose GPUs bring links of their own
    for fewer, more in ((2, 4), (4, 8)) if shared else ():
        fewer_s, more_s = (before.get(f"all_reduce {gpus}") for gpus in (fewer, more))
        if fewer_s is not None and more_s is not None:
            counts[f"{fewer} to {more} GPUs: all_reduce"] = int((more_s < (1 - _EQUAL) * fewer_s).sum())
    return Counter({name: count for name, count in counts.items() if count})


def _sheet(machine: Machine) -> dict[str, float] | None:
    """Numbers of the data sheet, of which more is better; None for a machine that is no node."""
    view = machine.iterations
    if view is None or view.node is None:
        return None
    gpu, node = view.gpu, view.node
    numbers = {f"peak {name}": float(rate) for name, rate in (gpu.peak_flop_per_s or {}).items()}
    return {**numbers, "HBM": float(gpu.peak_hbm_bytes_per_s), "links": float(node.link_bytes_per_s or 0)}


def siblings(names: Sequence[str]) -> Iterator[tuple[Machine, Machine]]:
    """Yield (better, other) of machines with equal nodes, GPUs of one family, and no number of a data sheet worse."""
    families = {name: _family(name) for name in names}
    machines = {name: Machine.named(name) for name in names}
    for better, other in itertools.permutations(names, 2):
        if families[better] != families[other]:
            continue
        here, there = (_sheet(machines[name]) for name in (better, other))
        if here is None or there is None or not _alike(machines[better], machines[other]):
            continue
        if here != there and all(here.get(name, 0.0) >= value for name, value in there.items()):
            yield machines[better], machines[other]


def _alike(machine: Machine, other: Machine) -> bool:
    """Tell whether nodes have as many GPUs in the same topology."""
    here, there = machine.iterations.node, other.iterations.node
    return bool(here.num_gpus == there.num_gpus and here.topology == there.topology)


def _family(name: str) -> str:
    """The GPU that a machine's GPU is a variant of, through all variants between."""
    gpu = str(tree_of(name)["gpu"]["name"])
    while (file := option_file("gpu", gpu)) is not None and VARIANT_OF in (tree := load_yaml(file)):
        gpu = str(tree[VARIANT_OF])
    return gpu


def _is_fitted(gpu: Any, precision: str) -> bool:
    """Tell whether constants of a precision were fitted to measurements of this very GPU."""
    source = gpu.source(f"efficiency.{precision}")
    return source is not None and source.provenance in ("calibrated", "measured")


def _slower_per_cu(better: Machine, other: Machine) -> set[str]:
    """GEMMs of the formats whose peak rate of a CU is lower on the better machine."""
    here, there = (machine.iterations.gpu for machine in (better, other))
    rates = [{name: rate / gpu.peak_cus for name, rate in gpu.peak_flop_per_s.items()} for gpu in (here, there)]
    lower = {name for name, rate in rates[1].items() if rates[0].get(name, 0.0) < rate}
    return {f"GEMM {precision}" for precision in get_args(Precision) if peak_format(precision) in lower}


def sibling_breaks(better: Machine, other: Machine, draws: Draws) -> Counter[str]:
    """Number of draws in which the better machine is slower, by kind; what was measured on either of them counts."""
    here, there = times(better, draws), times(other, draws)
    gpus = [machine.iterations.gpu for machine in (better, other)]
    measured = {f"GEMM {precision}" for gpu in gpus for precision in gpu.efficiency if _is_fitted(gpu, precision)}
    kinds_of_both = (here.keys() & there.keys()) - measured - _slower_per_cu(better, other)
    if any(machine.iterations.node.library.fitted_on for machine in (better, other)):
        kinds_of_both = {kind for kind in kinds_of_both if kind.startswith("GEMM")}
    counts = {kind: int((here[kind] > _SLOWER * there[kind]).sum()) for kind in kinds_of_both}
    return Counter({f"{better.name} over {other.name}: {kind}": count for kind, count in counts.items() if count})


def examine(names: Sequence[str], *, operators: int, draws: int) -> list[dict[str, Any]]:
    """Figures of machines: numbers of unequal costs and of breaks by kind, and the models of its GEMMs."""
    rows = []
    for machine in map(Machine.named, names):
        if machine.schedules is None and machine.iterations is None:
            continue
        prices = dict(kinds(machine, Draws.of(operators)))
        apart = Counter({kind: count for kind, of in prices.items() if (count := unequal(of))})
        broken = breaks(machine, Draws.of(draws, seed=1))
        view = machine.schedules or machine.iterations
        rows.append(
            {
                "system": machine.name,
                "models": {precision: view.gemm_model(precision) for precision in machine.precisions()},
                "compared": sum(operators for of in prices.values() if len(of) > 1),
                "unequal_costs": apart.total(),
                "monotone_breaks": broken.total(),
                "unequal": dict(apart),
                "breaks": dict(broken),
            }
        )
    return rows


def _text(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        told = f"{row['unequal_costs']:>7} of {row['compared']} unequal, {row['monotone_breaks']:>6} breaks"
        yield f"{row['system']:<16}{told}"
        yield from (f"    {kind:<40}{count:>7}" for part in ("unequal", "breaks") for kind, count in row[part].items())


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures of every machine and their sums."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.physics", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--operators", type=int, default=500, help="random operators of a kind that are compared")
    parser.add_argument("--draws", type=int, default=2000, help="draws of a kind with more hardware")
    parser.add_argument("--systems", nargs="+", default=list_options("system"), help="machines; all by default")
    asked = parser.parse_args(words)
    rows = examine(asked.systems, operators=asked.operators, draws=asked.draws)
    sums = {name: sum(row[name] for row in rows) for name in ("compared", "unequal_costs", "monotone_breaks")}
    from benchmarks.doors import disagreements  # which imports this module

    slower = sum(
        (sibling_breaks(*pair, Draws.of(asked.draws, seed=2)) for pair in siblings(asked.systems)), Counter[str]()
    )
    sums["sibling_breaks"] = slower.total()
    sums["sharing_disagree"] = sum(map(len, disagreements(asked.systems).values()))
    if asked.json:
        print(json.dumps({**sums, "systems": rows}, indent=2))
    else:
        print(*_text(rows), *(f"    {kind:<60}{count:>7}" for kind, count in sorted(slower.items())), sep="\n")
        print(*(f"{name} {value}" for name, value in sums.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
