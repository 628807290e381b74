"""How good and how fast lower bounds are: `python -m benchmarks.bounds --json`.

A group of figures is a function; `--only` names groups, such as `speed`.

    instances   gathers beside their GEMM, drawn by benchmarks/instances.py. drawn_instances, and proven_instances:
                CP-SAT alone, without our bounds, proves the optimum in the time limit. exact_instances: of these, ours
                equals it (the best of `bound`, `linear_bound` and `instance_bound`); exact_within_1pct: or nearly so;
                exact_worst_gap: optimum / bound - 1. closed_instances: of those not proven, CP-SAT's best schedule is
                as short as our bound, which proves it; open_worst_gap: schedule / bound - 1 of those that stay open.
                instance_violations: bounds above a schedule
    presets     FiCCO's GEMMs without contention: every design of the study's grid of at most 60 tasks. preset_designs;
                presets_proven: the optimum over all orders of their tasks is proven; presets_optimal: of these, the
                order of the design is optimal; preset_worst_gap: makespan / optimum - 1; search_worst_gap: of a
                scenario, the best design against the least optimum of all
    graphs      violations: bounds of random graphs that are above what the fluid engine reaches
    schedules   FiCCO's GEMMs on a mesh and at a switch (benchmarks/synthesis.py). ficco_within_5pct, ficco_worst_gap:
                the best schedule that is known against the bound. synthesised_better_share: cases in which the
                synthesised one is 3 % faster than the best preset; synthesised_worse: how many in which it is slower.
                confirmed_share: of the better ones, those that are 3 % faster with all GPUs simulated, too. search_s:
                wall time of the study for each search, with an empty cache
    collectives collective_gap_worst, small_slower: collectives alone (benchmarks/collective_schedules.py)
    speed       bounds_per_s: path and resource, 64 tasks. lp_per_s: linear programs, 512 tasks; seconds of CPU
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks import synthesis
from benchmarks.graphs import pipeline
from benchmarks.instances import MOST_JOBS, gather, random_graph
from benchmarks.timing import best
from dse import plugins
from dse.backend import Batch
from dse.study.plan_again import plan_words
from dse_optimal.instance import Instance
from dse_optimal.optimum import PROVEN, optimum
from dse_optimal.subset_bounds import instance_bound, least_graph, subset_bound
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.bounds import bound, linear_bound
from simulators.taskgraph.graph import TaskGraph

_ROUNDING, _OF_A_PROGRAM = 1e-9, 1e-6  # of a makespan, and of one by a linear program
_WITHIN = 0.01  # a gap
_DESIGNS = 1024  # of one batch, whose bounds are timed
_NO_CONTENTION = ("gemm_beside_cus=1", "late_start=0", "cu_copy_beside_gemm=1", "dma_beside_gemm=1")


@dataclass(frozen=True)
class Size:
    """How many instances and graphs are drawn, for how long an instance is solved [s], and on how many threads."""

    instances: int
    graphs: int
    limit_s: float
    workers: int


def instances(size: Size) -> dict[str, float]:
    """Optima that a solver proves, and how many of them the bounds equal."""
    solved = [(best_bound(drawn), _solve(drawn, size)) for drawn in map(gather, range(size.instances))]
    proven = [(least_s, seconds) for least_s, (seconds, is_proven) in solved if is_proven]
    gaps = [seconds / least_s - 1 for least_s, seconds in proven]
    open_gaps = [seconds / least_s - 1 for least_s, (seconds, is_proven) in solved if not is_proven]
    return {
        "drawn_instances": len(solved),
        "proven_instances": len(proven),
        "exact_instances": sum(gap <= PROVEN for gap in gaps),
        "exact_within_1pct": sum(gap <= _WITHIN for gap in gaps),
        "exact_worst_gap": max(gaps, default=0.0),
        "instance_violations": sum(gap < -_OF_A_PROGRAM for gap in (*gaps, *open_gaps)),
        "closed_instances": sum(gap <= PROVEN for gap in open_gaps),
        "open_worst_gap": max(open_gaps, default=0.0),
    }


def _solve(drawn: Instance, size: Size) -> tuple[float, bool]:
    """Makespan of the best schedule of an instance by CP-SAT alone [s], and whether that is proven."""
    result = optimum(drawn, limit_s=size.limit_s, workers=size.workers, bounded=False)
    return result.seconds, result.proven


def best_bound(drawn: Instance) -> float:
    """The largest bound of an instance [s]."""
    graph = least_graph(drawn)
    return max(float(bound(graph).seconds[0]), linear_bound(graph).seconds, instance_bound(drawn))


def presets(size: Size) -> dict[str, float]:
    """Orders of the shipped schedules against the optimal ones, where nothing contends."""
    engine = plugins.load("engine", "fluid")
    gaps, designs, searched = list[float](), 0, list[float]()
    for graphs_of_scenario in contention_free().values():
        pairs = []
        for graph in graphs_of_scenario:
            result, makespan = (
                optimum(graph, limit_s=size.limit_s, workers=size.workers),
                engine.totals(graph).makespan_s,
            )
            designs += 1
            if result.proven:
                pairs.append((float(makespan[0]), result.seconds))
        gaps += [makespan / least - 1 for makespan, least in pairs]
        if pairs:
            searched.append(min(makespan for makespan, _ in pairs) / min(least for _, least in pairs) - 1)
    return {
        "preset_designs": designs,
        "presets_proven": len(gaps),
        "presets_optimal": sum(gap <= PROVEN for gap in gaps),
        "preset_worst_gap": max(gaps),
        "search_worst_gap": max(searched),
    }


def contention_free() -> dict[str, list[TaskGraph]]:
    """Scenario -> graphs of the designs of FiCCO's grid that have few tasks, on a GPU without contention."""
    planned = plan_words(["study=ficco_sweep", *(f"system.gpu.contention.{law}" for law in _NO_CONTENTION)])
    graphs: dict[str, list[TaskGraph]] = defaultdict(list)
    for scenario, space in planned.spaces.items():
        seen = set[bytes]()
        for block in space.blocks(64):
            for design in () if block.design is None else Batch(block.design, block.axes).designs():
                assert isinstance(design, OverlapDesign)
                if planned.backend.problems(design):
                    continue
                graph = design.schedule.lower(design.system, design.workload)
                content = b"".join((graph["work"].tobytes(), graph["delay"].tobytes(), graph.pred.tobytes()))
                if graph.num_tasks <= MOST_JOBS and content not in seen:
                    seen.add(content)
                    graphs[scenario].append(graph)
    return graphs


def graphs(size: Size) -> dict[str, float]:
    """Bounds that a run is shorter than."""
    return {"violations": sum(_violations(random_graph(seed)) for seed in range(size.graphs))}


def _violations(graph: TaskGraph) -> int:
    makespan = float(plugins.load("engine", "fluid").totals(graph).makespan_s[0])
    plain = (float(bound(graph).seconds[0]), subset_bound(graph))
    linear = linear_bound(graph, intervals=4).seconds
    return sum(least > makespan * (1 + _ROUNDING) for least in plain) + (linear > makespan * (1 + _OF_A_PROGRAM))


def speed(size: Size) -> dict[str, float]:
    """Bounds per second of CPU."""
    many, large = pipeline(8, designs=_DESIGNS), pipeline(64)
    assert (many.num_tasks, large.num_tasks) == (64, 512)
    return {"bounds_per_s": _DESIGNS / best(lambda: bound(many)), "lp_per_s": 1 / best(lambda: linear_bound(large))}


def collectives() -> dict[str, float]:
    """Collectives alone, by the plug-in of these."""
    from benchmarks import collective_schedules

    return collective_schedules.measure()


GROUPS: dict[str, Callable[[Size], dict[str, float]]] = {
    "instances": instances,
    "presets": presets,
    "graphs": graphs,
    "schedules": lambda size: synthesis.figures(),
    "collectives": lambda size: collectives(),
    "speed": speed,
}


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How good and how fast lower bounds are.")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--only", nargs="+", choices=[*GROUPS], default=[*GROUPS], help="groups of figures")
    parser.add_argument("--instances", type=int, default=200, help="instances that are drawn")
    parser.add_argument("--graphs", type=int, default=10_000, help="random graphs that are drawn")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for the proof of an instance")
    parser.add_argument("--workers", type=int, default=8, help="threads of the solver")
    asked = parser.parse_args(words)
    size = Size(asked.instances, asked.graphs, asked.limit, asked.workers)
    figures = dict(itertools.chain.from_iterable(GROUPS[name](size).items() for name in asked.only))
    print(json.dumps(figures, indent=2) if asked.json else "\n".join(_lines(figures)))


def _lines(figures: dict[str, float]) -> Iterator[str]:
    for name, value in figures.items():
        yield f"{name:20} {value:,.6g}"


if __name__ == "__main__":
    main()
