"""Emitted schedules run by processes on the CPU, and held against serial execution and the task graph.

`python -m benchmarks.emit [--json] [--schedules N] [--orders N] [--fused N]` draws schedules and shapes
(uneven shards, shards of a row, slices of the depth), writes each as `dse emit` does, runs it by gloo with a process
for each rank, and prints

    schedules, schedules_equal   how many were run, and how many gave serial execution's result to the bit; operands are
                                 small whole numbers, so that sums are exact in any order
    bytes_equal                  how many sent the bytes that the task graph moves to a GPU
    deadlocks                    of drawn orders in which ranks go on: where all wait for one another
    loss_error                   largest relative difference of a transformer layer's loss from serial execution's, over
                                 20 steps of training on 8 ranks (the shape of Llama 3 8B's, 1/64 as wide, in fp64)
    fused, fused_equal           fused operators run by Triton's interpreter on 2, 4 and 8 ranks, and how many have the
                                 results and gradients of PyTorch: to 1e-5 in fp32, within rounding in bf16
    gpu_tables                   tables measured on GPUs, in conf/data/measured
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks import emitted_fused as fused
from benchmarks import emitted_layer as layer
from dse.space import set_path
from dse_emit.table import Table, table_of
from dse_emit.writing import Sizes, operator_file, package
from simulators.overlap.backend import OverlapBackend
from simulators.steps.overlap.sites import read_schedule
from simulators.workloads.model_zoo import option_tree

_MOST_RANKS = 8
GPU_TABLES = Path(__file__).parents[1] / "conf" / "data" / "measured"
_PATTERNS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Case:
    """A schedule and the sizes that it runs with. rows: of each rank's shard. after: of an all-to-all."""

    schedule: str
    pattern: str
    rows: tuple[int, ...]
    n: int
    k: int
    after: bool

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def table(self) -> Table:
        """Order of work of a rank."""
        return table_of(read_schedule(self.schedule), self.pattern, self.ranks, after=self.after)


def draw(count: int, seed: int) -> list[Case]:
    """Random cases, the same for the same seed; a third of them has shards that differ."""
    random_of = random.Random(seed)
    return [_drawn(random_of) for _ in range(count)]


def _drawn(of: random.Random) -> Case:
    ranks, pattern = of.randint(2, _MOST_RANKS), of.choice(_PATTERNS)
    total = of.choice([ranks, of.randint(ranks, 6 * ranks), of.randint(ranks, 60)])
    rows = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    if of.random() < 0.3:
        rows = [of.randint(1, 9) for _ in range(ranks)]
    engine = of.choice(["dma", "cu"])
    family = of.choice(["chunked", "chunked", "chunked", "shard_p2p", "serial", "synthesised"])
    if family == "synthesised":
        text = f"synthesised {_listed(of, gathers=pattern == 'all_gather')}"
        return Case(text, pattern, tuple(rows), of.randint(1, 12), of.randint(1, 12), pattern == "all_to_all")
    text = f"{family} comm_engine={engine}" if family != "serial" else "serial"
    if family == "chunked":
        text += f" num_chunks={of.randint(1, 6)} chunk_dim={of.choice('mk')} compute={of.choice(['fused', 'unfused'])}"
        text += f" local_shard_first={of.choice(['true', 'false'])}"
    return Case(text, pattern, tuple(rows), of.randint(1, 12), of.randint(1, 12), of.random() < 0.5)


def _listed(of: random.Random, *, gathers: bool) -> str:
    """Knobs of a schedule with steps of its own: moves and GEMMs of drawn spans, by engines and a kernel."""
    parts = of.randint(1, 6)
    cuts = [0, *sorted(of.sample(range(1, parts), of.randint(0, parts - 1))), parts]
    moves, computes = (_spans(of, len(cuts) - 1) for _ in range(2))
    moved = [{"move": span, **of.choice([{}, {"kernel": 0}])} for span in moves]
    computed: list[dict[str, Any]] = [{"compute": span} for span in computes]
    local = of.randrange(len(computed) + 1)
    steps = [*moved, *computed] if gathers else [*computed, *moved]
    steps.insert(local + (len(moved) if gathers else 0), {"local": [0, len(cuts) - 1]})
    knobs = {"cut_dim": of.choice("mk"), "parts": parts, "cuts": cuts, "kernels": [8], "steps": steps}
    return " ".join(f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in knobs.items())


def _spans(of: random.Random, count: int) -> list[list[int]]:
    """Spans that make up so many intervals, one after the other."""
    ends = [0, *sorted(of.sample(range(1, count), of.randint(0, count - 1))), count]
    return [list(pair) for pair in itertools.pairwise(ends)]


@dataclass(frozen=True)
class Outcome:
    """What one rank found: results equal to serial execution's, and the bytes that it sent."""

    equal: bool
    sent_bytes: int


def run(cases: Sequence[Case], seconds: float = 600.0) -> list[list[Outcome]]:
    """Outcomes of each case, by rank. Raises queue.Empty where they take longer, or a process ended early."""
    answers = on_ranks(_outcomes, list(cases), seconds, max(case.ranks for case in cases))
    return [[answers[rank][place] for rank in range(case.ranks)] for place, case in enumerate(cases)]


def on_ranks(
    work: Callable[[int, Mapping[int, Any], Any], Any], argument: Any, seconds: float, ranks: int
) -> dict[int, Any]:
    """Call a function in a process for each rank, with it, groups by their number of ranks, and an argument.

    Raises queue.Empty after so many seconds, and RuntimeError with what a rank raised.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        words = [(work, (rank, ranks), str(Path(folder) / "store"), argument, queue) for rank in range(ranks)]
        processes = [context.Process(target=_rank, args=each, daemon=True) for each in words]
        for process in processes:
            process.start()
        try:
            answers = {}
            for rank, answer in (queue.get(timeout=seconds) for _ in processes):
                if isinstance(answer, _Failure):
                    raise RuntimeError(f"rank {rank}: {answer}")
                answers[rank] = answer
            return answers
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _rank(work: Any, place: tuple[int, int], store: str, argument: Any, queue: Any) -> None:
    """Join the group as one rank, do the work, and put the result into a queue. place: the rank, of how many."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit, (rank, ranks) = timedelta(seconds=60), place
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    # every process makes every group, in the same order
    groups = {count: dist.new_group(list(range(count)), timeout=limit) for count in range(2, ranks + 1)}
    try:
        queue.put((rank, work(rank, groups, argument)))
    except Exception:  # whatever an operator raises is told by the process that waits
        queue.put((rank, _Failure(traceback.format_exc())))
    dist.barrier()


class _Failure(str):
    """Text of what a rank raised."""


def _outcomes(rank: int, groups: Mapping[int, Any], cases: Sequence[Case]) -> dict[int, Outcome]:
    """Outcomes by place of the cases that a rank takes part in."""
    return {
        place: _outcome(case, place, rank, groups[case.ranks]) for place, case in enumerate(cases) if rank < case.ranks
    }


def _outcome(case: Case, place: int, rank: int, group: Any) -> Outcome:
    import torch

    from dse_emit.package import transport

    gathers, total = case.table.gathers, sum(case.rows)
    heights = [
        total if not gathers else rows * (case.ranks if case.pattern == "all_to_all" else 1) for rows in case.rows
    ]
    generator = torch.Generator().manual_seed(place)
    xs = [torch.randint(-3, 4, (height, case.k), generator=generator).float() for height in heights]
    ws = [torch.randint(-3, 4, (case.k, case.n), generator=generator).float() for _ in heights]
    module, counted = _module(case), list[Any]()

    def counting(*words: Any) -> Any:
        made = transport.transports(*words)
        counted.extend(made.values())
        return made

    module["transports"] = counting
    operator = module["gather_gemm" if gathers else "gemm_reduce"]
    result = operator(xs[rank], ws[rank], case.rows, group)
    return Outcome(torch.equal(result, _expected(case, rank, xs, ws)), sum(each.sent_bytes for each in counted))


def _expected(case: Case, rank: int, xs: Sequence[Any], ws: Sequence[Any]) -> Any:
    """The result of serial execution, from the operands of all ranks."""
    import torch

    if case.pattern == "all_gather":
        return torch.cat(list(xs)) @ ws[rank]
    if case.pattern == "all_to_all" and case.table.gathers:
        blocks = [x[rank * rows : (rank + 1) * rows] for x, rows in zip(xs, case.rows, strict=True)]
        return torch.cat(blocks) @ ws[rank]
    products = [x @ w for x, w in zip(xs, ws, strict=True)]
    if case.pattern == "all_to_all":
        return torch.cat([product.split(list(case.rows))[rank] for product in products])
    product = sum(products)
    return product if case.pattern == "all_reduce" else product.split(list(case.rows))[rank]


def _module(case: Case) -> dict[str, Any]:
    """The names of the emitted operator, from its text."""
    name = operator_file(case.table)
    text = package(case.table, case.table, Sizes(), "a draw")[name]
    module = types.ModuleType(f"dse_emit.package.drawn_{name.removesuffix('.py')}")
    module.__package__ = "dse_emit.package"
    exec(compile(text, name, "exec"), module.__dict__)
    return module.__dict__


def graph_bytes(case: Case) -> float:
    """Bytes that the task graph of a case moves to a GPU, of fp32 and even shards.

    An all-reduce is a reduce-scatter by the schedule, and an all-gather of the library after it.
    """
    gathers = case.table.gathers
    pattern = case.pattern if gathers else "reduce_scatter"  # an all-to-all after a GEMM moves as much
    tree: dict[str, Any] = {"system": option_tree("system", "mi300x_8"), "schedule": option_tree("schedule", "serial")}
    set_path(tree, "system.node.num_gpus", case.ranks)
    # n of all GPUs: an all-gather's weights are split by columns
    shape = {"name": "x", "m": sum(case.rows), "n": case.n, "k": case.k}
    tree["workload"] = {"name": "drawn", "pattern": pattern, "shapes": [shape]}
    backend = OverlapBackend("fluid")
    design: Any = backend.design(backend.scenarios(tree)["x"])
    collective = design.workload.overlap().collective
    graph = read_schedule(case.schedule).lower(design.system, design.workload)
    moved = float(graph["moved_bytes"].sum()) / collective.element_bytes / float(collective.cols)
    return 4.0 * float(moved) * (case.k if gathers else case.n)


def bytes_are_equal(case: Case, outcomes: Sequence[Outcome]) -> bool:
    """True if every rank sent what its table says, and ranks with even shards what the task graph moves.

    Task graphs have no pieces without rows or columns.
    """
    cols, table = case.k if case.table.gathers else case.n, case.table
    alike = len(set(case.rows)) == 1 and table.cuts[-1] <= min(case.rows[0] if table.by_rows else cols, cols)
    by_table = [4 * case.table.sent(case.rows, cols, rank) for rank in range(case.ranks)]
    if [outcome.sent_bytes for outcome in outcomes] != by_table:
        return False
    return not alike or abs(by_table[0] - graph_bytes(case)) < 0.5


def deadlocks(tables: Sequence[Table], orders: int, seed: int) -> int:
    """Drawn orders of work in which ranks wait for one another for ever."""
    of = random.Random(seed)
    return sum(_hangs(of.choice(tables), of) for _ in range(orders))


def _hangs(table: Table, of: random.Random) -> bool:
    """Run all ranks in a drawn order; True if none can go on.

    A rank's GEMMs and sums run in order, and so do its sends, each of which waits for the GEMMs before it. A send ends
    once all its peers have begun the send that answers it (NCCL's rule, which is stricter than gloo's).
    """
    lanes = {(rank, lane): list(_lane(table, lane)) for rank in range(table.ranks) for lane in ("compute", "send")}
    ended = set[tuple[int, int]]()  # rank and step
    begun = set[tuple[int, int]]()
    while any(lanes.values()):
        ready = [lane for lane, steps in lanes.items() if steps and _can_end(table, lane[0], steps[0], ended, begun)]
        if not ready:
            return True
        rank, name = of.choice(ready)
        ended.add((rank, lanes[rank, name].pop(0)))
    return False


def _lane(table: Table, lane: str) -> Iterator[int]:
    return (place for place in range(len(table.steps)) if table.steps[place].moves == (lane == "send"))


def _can_end(table: Table, rank: int, place: int, ended: set[tuple[int, int]], begun: set[tuple[int, int]]) -> bool:
    """Return whether a step, the next of its lane, may end; a send that may begin is noted as begun."""
    step = table.steps[place]
    if not step.moves:
        needed = [] if step.what == "gemm" and not table.gathers else _sends_of(table, step)
        return all((rank, send) in ended for send in needed)
    gemms = [] if table.gathers else [at for at in range(place) if table.steps[at].what == "gemm"]
    if all((rank, gemm) in ended for gemm in gemms):
        begun.add((rank, place))
    distances = {distance for _, distance in step.cells}
    peers = {(rank + sign * distance) % table.ranks for distance in distances for sign in (1, -1)}
    return (rank, place) in begun and all((peer, place) in begun for peer in peers)


def _sends_of(table: Table, step: Any) -> list[int]:
    """Places of the sends that bring what a GEMM reads, or a sum adds."""
    return [place for place, other in enumerate(table.steps) if other.moves and other.cells & step.cells]


def loss_error(steps: int = 20) -> float:
    """Largest relative difference of the losses of a layer of emitted operators from serial execution's."""
    import numpy as np

    answers = on_ranks(layer.losses, steps, 300.0, 8)
    emitted, serial = (np.array([answers[rank][place] for rank in answers]) for place in range(2))
    difference: float = np.max(np.abs(emitted / serial - 1)).item()
    return difference


def fused_equal(cases: Sequence[fused.FusedCase]) -> int:
    """Fused operators whose results and gradients are right on every rank."""
    answers = on_ranks(fused.errors, list(cases), 60.0 + 5 * len(cases), max(case.ranks for case in cases))
    return sum(all(answers[rank][place] for rank in range(case.ranks)) for place, case in enumerate(cases))


def figures(schedules: int, orders: int, fused_operators: int) -> Mapping[str, float]:
    """All figures."""
    cases = draw(schedules, seed=1)
    print(f"{schedules:,} schedules, {orders:,} orders, {fused_operators:,} fused operators: minutes", file=sys.stderr)
    outcomes = run(cases, seconds=60 + schedules)
    return {
        "schedules": len(cases),
        "schedules_equal": sum(all(outcome.equal for outcome in ranks) for ranks in outcomes),
        "bytes_equal": sum(bytes_are_equal(case, ranks) for case, ranks in zip(cases, outcomes, strict=True)),
        "deadlocks": deadlocks([case.table for case in cases], orders, seed=2),
        "loss_error": loss_error(),
        "fused": fused_operators,
        "fused_equal": fused_equal(fused.draw(fused_operators, seed=3)),
        "gpu_tables": len(list(GPU_TABLES.rglob("*.csv"))),
    }


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emit", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--schedules", type=int, default=2000, help="schedules to run (2000)")
    parser.add_argument("--orders", type=int, default=10_000, help="orders to draw (10000)")
    parser.add_argument("--fused", type=int, default=300, help="fused operators to run (300)")
    words = parser.parse_args()
    values = figures(words.schedules, words.orders, words.fused)
    print(
        json.dumps(values) if words.json else "\n".join(f"{name:<20}{value:>12,.12g}" for name, value in values.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
