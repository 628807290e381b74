"""How fast the engines are: `python -m benchmarks.engine [--json]`.

SimPy, the compiled engine, the closed form, a loop written by hand and, where it is installed, SimGrid, on the same
graphs in one process; CPU time, best of several runs, so that ratios can be trusted and times nearly. Then whole
designs, from the knobs to a row of metrics. Without `--json`, `docs/project/benchmarks.md` is written.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import steps
from benchmarks.graphs import HBM_OF_COPY, HBM_OF_GEMM, LINKS, pipeline
from benchmarks.hand_loop import hand_loop
from dse.backend import Batch
from dse.evaluation.calls import BackendSpec, call
from dse.space import Knob, Space
from dse.space.blocks import grids
from simulators.engines.analytic import ENGINE as ANALYTIC
from simulators.engines.event import ENGINE as EVENT
from simulators.engines.fluid import ENGINE as FLUID
from simulators.engines.fluid import KernelGraph, few_classes, many_classes
from simulators.hardware.parts import Contention
from simulators.overlap.design import OverlapDesign
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import StepDesign
from simulators.taskgraph.graph import TaskGraph
from simulators.taskgraph.maxplus import Durations, closed_form, longest
from simulators.taskgraph.symmetry import patterns, reduce_graph
from simulators.workloads.model_zoo import option_tree

PAGE = Path(__file__).parents[1] / "docs" / "project" / "benchmarks.md"


def seconds(*runs: Callable[[], Any], repeats: int) -> list[float]:
    """CPU time of the fastest run of each [s]; they take turns, so that a busy moment hits all."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            began = time.process_time()
            run()
            best[index] = min(best[index], time.process_time() - began)
    return best


@dataclass(frozen=True)
class Case:
    """One graph on several engines: seconds per point, and whether all agree on every finish time to 1e-9."""

    name: str
    tasks: int
    points: dict[str, float]
    agree: bool

    @property
    def ratio(self) -> float:
        """SimPy's time over the compiled engine's."""
        return self.points["event"] / self.points["fluid"]


def compare(name: str, chunks: int, *, designs: int, repeats: int = 4, **shape: Any) -> Case:
    """Each engine on one design, or on a batch as in a sweep; symmetric graphs are reduced for all but SimPy."""
    one, many = pipeline(chunks, **shape), pipeline(chunks, designs=designs, **shape)
    quotient = reduce_graph(one)
    points = {"fluid": seconds(lambda: FLUID.totals(reduce_graph(many).graph), repeats=repeats)[0] / designs}
    (points["event"],) = seconds(lambda: EVENT.run(one), repeats=3)
    exact = FLUID.run(quotient.graph).finished[:, quotient.of]
    agree = np.allclose(EVENT.run(one).finished, exact, rtol=1e-9, atol=0)
    if ANALYTIC.totals(quotient.graph).refused is None:
        points["analytic"] = seconds(lambda: ANALYTIC.totals(reduce_graph(many).graph), repeats=repeats)[0] / designs
        agree = agree and np.allclose(ANALYTIC.run(one).finished, exact[:1], rtol=1e-9, atol=0)
    return Case(name, one.num_tasks, points, bool(agree))


def growth() -> dict[str, float]:
    """Seconds per task of the compiled engine on larger graphs over those on 512 tasks, structures prepared."""
    graphs = (pipeline(64, designs=300), pipeline(12_500, designs=3), pipeline(64, gpus=32, designs=10))
    prepared = [(KernelGraph.of(graph), graph.table()) for graph in graphs]
    taken = seconds(*(partial(one.totals, table) for one, table in prepared), repeats=25)
    base, tasks, gpus = (
        spent / graph.num_tasks / graph.num_designs for spent, graph in zip(taken, graphs, strict=True)
    )
    return {"growth_512_to_100k": tasks / base, "growth_1_to_32_gpus": gpus / base}


def against_hand_loop(designs: int = 400) -> float:
    """The compiled engine's time over that of the loop written for the one schedule, 512 tasks."""
    graph = pipeline(64, designs=designs)
    prepared, table = KernelGraph.of(graph), graph.table()
    work = graph["work"].reshape(designs, 64, LINKS + 1)
    copies, gemms = np.ascontiguousarray(work[:, :, :LINKS]), np.ascontiguousarray(work[:, :, LINKS])
    hbm = (HBM_OF_COPY, HBM_OF_GEMM)
    by_hand = hand_loop(copies, gemms, hbm)
    assert np.allclose(by_hand[:, 0], prepared.totals(table).makespan_s, rtol=1e-9)
    fluid, hand = seconds(lambda: prepared.totals(table), lambda: hand_loop(copies, gemms, hbm), repeats=60)
    return fluid / hand


def in_lockstep() -> dict[str, float]:
    """Sweeps of 64 steps: one design after the other over lockstep, and the share that lockstep leaves out.

    remembered_speedup: the kernel that solves what a change can reach, over the one that remembers rates.
    """
    ratios = {f"lockstep_speedup_{designs}": _lockstep(designs)[0] for designs in (256, 1296, 4096)}
    ratio, left_out = _lockstep(65536)
    graph = _sweep_graph("fluid", num_chunks=64, designs=4096)
    prepared, table, scratch = KernelGraph.of(graph), graph.table(), np.empty((2, 1, graph.num_tasks))
    rows = np.empty((3 + 2 * len(prepared.kinds), len(table)))
    few, many = seconds(
        lambda: prepared.run(table, scratch[0], scratch[1]),
        lambda: many_classes.run(*prepared.structure, table, scratch[0], scratch[1], rows),
        repeats=5,
    )
    return {"lockstep_speedup": ratio, **ratios, "lockstep_left_out": left_out, "remembered_speedup": many / few}


def _lockstep(designs: int) -> tuple[float, float]:
    graph = _sweep_graph("fluid", num_chunks=64, designs=designs)
    prepared, table, scratch = KernelGraph.of(graph), graph.table(), np.empty((2, 1, graph.num_tasks))
    _, left, _ = prepared.together(table)
    assert prepared.totals(table).makespan_s.tobytes() == prepared.run(table, scratch[0], scratch[1])[0].tobytes()
    alone, together = seconds(
        lambda: prepared.run(graph.table(), scratch[0], scratch[1]),
        lambda: prepared.totals(graph.columns().T),
        repeats=max(5, 30_000 // designs),
    )
    return alone / together, float(left.mean())


def along_an_axis() -> float:
    """Values of an axis of 240 numbers of CUs over the runs that they take: steps of groups, and designs alone."""
    base = space_of("fluid", num_chunks=64, designs=1, rows=16384)
    space = Space(base.base, (Knob("system.gpu.num_cus", tuple(range(64, 304))),), {}, base.backend)
    graph = _graph_of(space)
    prepared, table = KernelGraph.of(graph), graph.table()
    _, left, steps = prepared.together(table)
    _, _, steps_of_one = prepared.together(np.repeat(table[:1], few_classes.WIDTH, axis=0))
    scratch = np.empty((2, 1, graph.num_tasks))
    assert prepared.totals(table).makespan_s.tobytes() == prepared.run(table, scratch[0], scratch[1])[0].tobytes()
    return len(table) / (steps / steps_of_one + int(left.sum()))


def by_reuse() -> float:
    """A grid of models, layouts and networks: every cost for every design, over once for all that share it."""
    backend, design = StepBackend(), steps.base()
    axes = {
        "parallel.tp": np.array([4, 8, 16]),
        "run.batch": np.array([1, 2, 4, 8]),
        "system.node.library.network_bytes_per_s": np.linspace(1e10, 9e10, 16),
        "system.node.library.latency_s": np.linspace(1e-6, 1e-5, 16),
    }
    batch = Batch(Batch(design, axes).at(0), axes)
    arrays = batch.arrays
    assert isinstance(arrays, StepDesign)
    each, reused = seconds(lambda: metrics_of(arrays), lambda: backend.evaluate([batch]), repeats=4)
    return each / reused


def import_ms(repeats: int = 9) -> float:
    """Time of `import dse` beyond that of an interpreter that does nothing [ms of CPU]."""
    taken = dict.fromkeys(("pass", "import dse"), float("inf"))
    for _ in range(repeats):
        for what in taken:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", what], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            taken[what] = min(taken[what], spent)
    return 1e3 * (taken["import dse"] - taken["pass"])


@dataclass(frozen=True)
class Peer:
    """A simulator of others at some work: points a second of ours and of it."""

    name: str
    work: str
    ours: float
    theirs: float

    def row(self) -> str:
        """Row of the table of peers."""
        return f"| {self.name} | {self.work} | {self.ours:,.0f} | {self.theirs:,.3g} | {self.ours / self.theirs:,.0f} |"


def against_peers(cases: list[Case]) -> list[Peer]:
    """Every peer that runs here, at work that ours does in the same run; they need the plug-in of peers."""
    from benchmarks import peers
    from dse_peers import simgrid
    from validation import packet_level

    found = [
        Peer("SimPy", f"{case.name}, {case.tasks:,} tasks", 1 / case.points["fluid"], 1 / case.points["event"])
        for case in cases
        if case.name in ("64 steps", "64 steps, 8 GPUs, regular")
    ]
    if simgrid.interpreter() is not None:
        found.append(against_simgrid())
    if not packet_level.absence():
        found += list(against_htsim())
    rates, names = peers.rates(), {"astra_sim": "ASTRA-sim", "simgrid": "SimGrid"}
    work = "a collective among 8 x H100 (ours: closed form)"
    return found + [Peer(names[name], work, rates["ours"], rates[name]) for name in names if name in rates]


def against_simgrid() -> Peer:
    """The compiled engine and SimGrid on 512 flows."""
    from dse_peers import simgrid

    graph, many = pipeline(64, kind="flows"), pipeline(64, kind="flows", designs=2000)
    assert np.allclose(simgrid.ENGINE.run(graph).finished, FLUID.run(graph).finished, rtol=1e-8)  # works were rounded
    spent = min(simgrid.ENGINE.cpu_s(graph) for _ in range(3))
    return Peer("SimGrid", "512 flows", 2000 / seconds(lambda: FLUID.totals(many), repeats=3)[0], 1 / spent)


def against_htsim() -> Iterator[Peer]:
    """Our flows, from the description of the network on, and csg-htsim's packets, by each transport."""
    from validation import packet_level

    traffic, link = packet_level.Traffic("all_to_all", ports=32, size_bytes=1 << 20), packet_level.Link(50e9, 0.5e-6)
    (ours,) = seconds(lambda: packet_level.our_seconds(traffic, link), repeats=5)
    for transport in packet_level.TRANSPORTS.values():
        began = time.perf_counter()
        packet_level.simulated_seconds(transport, traffic, link)
        work = f"{len(traffic.pairs)} flows of 1 MiB among {traffic.ports} ports, packets by {transport.program}"
        yield Peer("csg-htsim", work, 1 / ours, 1 / (time.perf_counter() - began))


@dataclass(frozen=True)
class Sweep:
    """Whole designs: per second and core, and the share of the time that goes into lowering."""

    designs_per_s: float
    lowering: float


def sweep(engine: str, *, num_chunks: int, designs: int, rows: int = 16384) -> Sweep:
    """A grid of hardware knobs on the shipped 8 x MI300X node: from the search space to columns of metrics."""
    space = space_of(engine, num_chunks=num_chunks, designs=designs, rows=rows)
    spec = BackendSpec("overlap", (("engine", engine), ("fallback", None)))

    def evaluate() -> int:
        batches = [block.batch for block in space.blocks(spec.make().batch)]
        found = [call(spec, [batch]) for batch in batches if batch is not None]
        return sum(int(results.ok.sum()) for (results,) in found)

    count = evaluate()
    batch = next(iter(space.blocks(spec.make().batch))).batch
    assert batch is not None
    assert count == space.size()

    def lower() -> None:
        ((_, grid),) = grids([batch], OverlapDesign)
        for _, graph in patterns(grid.design.schedule.lower(grid.design.system, grid.design.workload)):
            reduce_graph(graph)

    whole, lowering = seconds(evaluate, lower, repeats=7)
    return Sweep(count / whole, lowering / batch.size / (whole / count))


def settled_per_s(designs: int = 16384) -> float:
    """Points per second at which a space of 64 steps is enumerated, priorities that change nothing left out."""
    space = space_of("fluid", num_chunks=64, designs=designs, rows=16384)
    ranked = replace(space, knobs=(*space.knobs, Knob("schedule.priority", ("equal", "communication"))))
    points = sum(block.size for block in ranked.blocks(16384))
    return points / seconds(lambda: list(ranked.blocks(16384)), repeats=3)[0]


def space_of(engine: str, *, num_chunks: int, designs: int, rows: int) -> Space:
    """Four hardware knobs around an all-gather and GEMM in `num_chunks` steps: 8 * num_chunks tasks."""
    tree = {
        group: option_tree(group, name) for group, name in (("system", "mi300x_8"), ("schedule", "uniform_fused_1d"))
    }
    tree["schedule"] |= {"num_chunks": num_chunks, "comm_engine": "dma"}
    if engine == "analytic":  # which has no closed form of contention laws
        tree["system"]["gpu"]["contention"] = {
            **dict.fromkeys(Contention.model_fields.keys() - {"fork_s", "wave_slack"}, 1),
            "late_start": 0,
            "late_start_first": None,
        }
    tree["workload"] = {
        "name": "gemm",
        "pattern": "all_gather",
        "shapes": [{"name": "gemm", "m": rows, "n": 8192, "k": 8192}],
    }
    backend = BackendSpec("overlap", (("engine", engine), ("fallback", None))).make()
    steps = round(designs**0.25)
    ranges = {
        "system.gpu.hbm_bytes_per_s": np.linspace(4e12, 6e12, steps),
        "system.node.link_bytes_per_s": np.linspace(3e10, 6e10, steps),
        "system.gpu.dma.setup_s": np.linspace(1e-6, 1e-5, steps),
    }
    knobs = [Knob("system.gpu.num_cus", tuple(range(200, 200 + steps)))]
    knobs += [Knob(path, tuple(values.tolist())) for path, values in ranges.items()]
    return Space(backend.scenarios(tree)["gemm"], tuple(knobs), {}, backend)


def closed_forms_per_s(designs: int = 65536) -> float:
    """Makespans per second of the closed form of a pipeline of 64 steps, from its durations."""
    random = np.random.default_rng(0)
    graph = _sweep_graph("analytic", num_chunks=64, designs=1)
    seconds_of = Durations.among(graph)
    form = closed_form(graph, seconds_of.of)
    durations = 1e-5 * (1 + random.random((len(seconds_of.columns), designs)))
    return designs / seconds(lambda: longest(form.makespan, durations), repeats=50)[0]


def _sweep_graph(engine: str, *, num_chunks: int, designs: int) -> TaskGraph:
    """The reduced graph of a sweep."""
    return _graph_of(space_of(engine, num_chunks=num_chunks, designs=designs, rows=16384))


def _graph_of(space: Space) -> TaskGraph:
    """The reduced graph of the grid that a space is."""
    block = next(iter(space.blocks(1 << 20)))
    assert block.batch is not None
    ((_, grid),) = grids([block.batch], OverlapDesign)
    return reduce_graph(grid.design.schedule.lower(grid.design.system, grid.design.workload)).graph


def figures() -> tuple[dict[str, float], list[Case]]:
    """The figures by name, and the cases behind them."""
    FLUID.totals(pipeline(1))  # compiled before anything is timed
    ANALYTIC.totals(pipeline(1))
    values_a_run = along_an_axis()
    cases = [
        compare("1 step", 1, designs=4096),
        compare("8 steps", 8, designs=4096),
        compare("64 steps", 64, designs=4096),
        compare("64 steps, copies issued at once", 64, designs=1024, kind="at once", repeats=3),
        compare("64 steps, regular", 64, designs=16384, kind="regular"),
        compare("64 steps, 8 GPUs, regular", 64, gpus=8, designs=16384, kind="regular"),
        compare("64 steps, 8 GPUs", 64, gpus=8, designs=512, repeats=2),
    ]
    small, large = sweep("fluid", num_chunks=8, designs=16384), sweep("fluid", num_chunks=64, designs=16384)
    found = {
        "fluid_vs_simpy_512": cases[2].ratio,
        "fluid_vs_simpy_4096": cases[5].ratio,
        "vs_hand_loop": against_hand_loop(),
        "designs_per_s_64": small.designs_per_s,
        "designs_per_s_512": large.designs_per_s,
        "lowering_fraction": max(small.lowering, large.lowering),
        "analytic_kernel_per_s": closed_forms_per_s(),
        "analytic_designs_per_s": sweep("analytic", num_chunks=8, designs=279841).designs_per_s,
        "settled_designs_per_s": settled_per_s(),
        **growth(),
        **in_lockstep(),
        "axis_runs_saved": values_a_run,
        "reuse_speedup": by_reuse(),
        "import_ms": import_ms(),
    }
    assert all(case.agree for case in cases)
    return found, cases


def main() -> None:
    """Print the figures and write its page, or with `--json` print one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    as_json = parser.parse_args().json
    found, cases = figures()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    text = report(found, cases, against_peers(cases))
    print(text)
    PAGE.write_text(text + "\n", encoding="utf-8")


def report(found: dict[str, float], cases: list[Case], others: list[Peer]) -> str:
    """Markdown: machine, date, command, peers, the cases and the figures."""
    lines = [
        "# Benchmarks of the engines",
        "",
        f"`python -m benchmarks.engine` on {_machine()}, {datetime.now(UTC):%Y-%m-%d}, one core. CPU time, best of",
        "several runs; ratios are of one run, and times of a shared machine vary by tens of percent. All engines agree",
        "on every finish time to 1e-9 in each case.",
        "",
        "| peer | work | ours, points/s | theirs, points/s | ours / theirs |",
        "|---|---|--:|--:|--:|",
        *(peer.row() for peer in others),
        "",
        "Peers that are not installed are left out. Our event engine drives SimPy, Python SimGrid's flows and steps;",
        "collectives and packets are timed by the clock on the wall (accuracy: `plugins/peers/README.md`).",
        "",
        "| graph | tasks | SimPy | closed form | compiled | compiled, points/s | events/s | SimPy / compiled |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *(_row(case) for case in cases),
        "",
        "All tasks of a graph differ in length, so that no two end together, except in regular ones, where all copies",
        "have one length and all GEMM chunks another. There links and GPUs that do the same are reduced to one before",
        "the compiled engine runs (SimPy runs them all). The closed form is left out where it is not small; it has no",
        "contention laws, so its designs are timed with `system.gpu.contention` at 1.",
        "",
        "| figure | value |",
        "|---|--:|",
        *(
            f"| {name} | {value:,.3g} |" if value < 1e3 else f"| {name} | {value:,.0f} |"
            for name, value in found.items()
        ),
    ]
    return "\n".join(lines)


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, Python {platform.python_version()}"


def _row(case: Case) -> str:
    times = [f"{case.points[name] * 1e6:,.1f} µs" if name in case.points else "–" for name in ("event", "analytic")]
    fluid = case.points["fluid"]
    cells = [case.name, f"{case.tasks:,}", *times, f"{fluid * 1e6:,.2f} µs", f"{1 / fluid:,.0f}"]
    return "| " + " | ".join([*cells, f"{case.tasks / fluid:,.0f}", f"{case.ratio:,.0f}"]) + " |"


if __name__ == "__main__":
    main()
