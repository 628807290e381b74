"""Designs in lockstep, and rates that are remembered: the numbers of the other kernels, to the bit or nearly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine import space_of
from dse.space import Knob, Space
from dse.space.blocks import grids
from simulators.engines import fluid
from simulators.engines.fluid import KernelGraph, few_classes, many_classes
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.graph import Floats, GraphBuilder, TaskGraph
from simulators.taskgraph.symmetry import patterns, reduce_graph
from tests.graphs import graphs, pipelines
from tests.support import drawn


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take few and short designs together too, whether or not the kernel is compiled."""
    monkeypatch.setattr(fluid, "_MANY", 2)
    monkeypatch.setattr(fluid, "_LONG", 1)
    monkeypatch.setattr(fluid, "_TASKS_OF_A_COMPILATION", 0)


def varied(graph: TaskGraph, seed: int, designs: int = 60) -> tuple[KernelGraph, Floats]:
    """A graph and a table of designs in which each number is drawn anew, or is one of a few, or stays."""
    random, first = np.random.default_rng(seed), graph.table()[0]
    drawn_ones = 1 + random.random((designs, first.size)) * random.choice([0.0, 1e-13, 0.3, 2.0], first.size)
    steps = random.choice([1.0, 1.5, 2.0], (designs, first.size))
    scale = np.where(random.random(first.size) < 0.5, drawn_ones, steps)
    scale[:, random.random(first.size) < 0.3] = 1.0
    factors = np.unique(graph.at["factor"])
    scale[:, factors] = np.minimum(scale[:, factors], 1.0)
    return KernelGraph.of(graph), first * scale


def one_by_one(prepared: KernelGraph, table: Floats) -> Floats:
    """Rows of totals without lockstep."""
    scratch = np.empty((2, 1, prepared.structure[2].size))
    return prepared.run(table, scratch[0], scratch[1])


def kernel_rows(prepared: KernelGraph, table: Floats, kernel: Any, *more: Any) -> Floats:
    """Rows of totals by one kernel."""
    scratch, rows = np.empty((2, 1, prepared.structure[2].size)), np.empty((3 + 2 * len(prepared.kinds), len(table)))
    assert kernel(*prepared.structure, table, scratch[0], scratch[1], rows, *more) == 0
    return rows


@pytest.mark.more
@drawn(150)
@given(graph=graphs() | pipelines(), seed=st.integers(0, 2**32))
def test_lockstep_gives_the_bits_of_one_design_after_the_other(graph: TaskGraph, seed: int) -> None:
    """Of random graphs, where in each design something else ends first; what is left out is marked."""
    prepared, table = varied(reduce_graph(graph).graph, seed)
    rows, left, _ = prepared.together(table)
    assert rows[:, ~left].tobytes() == one_by_one(prepared, table)[:, ~left].tobytes()


@pytest.mark.slow
@drawn(150)
@given(graph=graphs() | pipelines(), seed=st.integers(0, 2**32))
def test_remembered_rates_are_those_that_are_solved_anew(graph: TaskGraph, seed: int) -> None:
    """The kernel of few classes agrees with that of many on every total, to rounding."""
    prepared, table = varied(reduce_graph(graph).graph, seed, designs=5)
    if prepared.structure[10].size > few_classes.MOST_CLASSES:
        return
    crowded = np.zeros(len(table), np.bool_)
    few = kernel_rows(prepared, table, few_classes.run, crowded)
    rows = kernel_rows(prepared, table, many_classes.run)
    np.testing.assert_allclose(few[:, ~crowded], rows[:, ~crowded], rtol=1e-9, atol=1e-12)


def streams(seed: int, designs: int, tasks: int) -> TaskGraph:
    """Tasks of up to five classes one after the other in up to four streams, some of which wait for each other.

    They share resources, slow each other, start late, and stage bytes that later ones free; each number is drawn anew
    in each design, or is one of a few, or nearly the same in all.
    """
    random, build = np.random.default_rng(seed), GraphBuilder()
    spread = np.array([0.0, 1e-13, 0.1, 1.0])
    numbers = random.uniform(0.5, 1.5, 6)[:, None] * (1 + random.choice(spread, (6, 1)) * random.random((6, designs)))
    numbers[:2] = random.choice([1.0, 1.5, 2.0], (2, designs))
    resources = [build.resource(f"r{i}", random.uniform(1, 3) * numbers[i]) for i in range(3)]
    build.slows("a", while_active="b", factor=random.uniform(0.3, 1, designs))
    classes: list[dict[str, Any]] = [
        {
            "uses": {int(r): random.uniform(0.2, 2, designs) for r in random.choice(resources, 2, replace=False)},
            "weight": random.uniform(0.5, 2),
            "priority": int(random.integers(2)),
            "group": str(random.choice(["", "a", "b"])),
        }
        for _ in range(random.integers(1, 6))
    ]
    last, staged = dict[int, int](), list[int]()
    for index in range(tasks):
        stream = int(random.integers(4))
        freed = [other for other in staged if random.random() < 0.2]
        after = {
            *freed,
            *([last[stream]] if stream in last else []),
            *([index - 2] if index > 1 and random.random() < 0.3 else []),
        }
        what = random.choice(["work", "delay", "both"], p=[0.7, 0.15, 0.15])
        amounts = {name: numbers[random.integers(6)] for name in ("work", "delay") if what in (name, "both")}
        amounts |= {name: numbers[random.integers(6)] for name in ("cus", "staged_bytes") if random.random() < 0.4}
        kind = str(random.choice(["gemm", "transfer", "launch"]))
        task = build.task(f"t{index}", kind, after=sorted(after), **classes[random.integers(len(classes))], **amounts)
        if freed:
            build.frees(task, freed)
        staged = [other for other in staged if other not in freed] + [task] * ("staged_bytes" in amounts)
        last[stream] = task
    return build.build()


@pytest.mark.more
@pytest.mark.slow
@drawn(100)
@given(seed=st.integers(0, 2**32), tasks=st.integers(2, 90))
def test_streams_in_lockstep_have_the_bits_that_they_have_alone(seed: int, tasks: int) -> None:
    graph = streams(seed, 300, tasks)
    prepared, table = KernelGraph.of(graph), graph.table()
    rows, left, _ = prepared.together(table)
    assert rows[:, ~left].tobytes() == one_by_one(prepared, table)[:, ~left].tobytes()


@pytest.mark.more
def test_a_sweep_of_hardware_is_taken_together_but_for_a_few_designs() -> None:
    space = space_of("fluid", num_chunks=16, designs=2401, rows=16384)
    block = next(iter(space.blocks(4096)))
    assert block.batch is not None
    ((_, grid),) = grids([block.batch], OverlapDesign)
    for _, graph in patterns(grid.design.schedule.lower(grid.design.system, grid.design.workload)):
        small = reduce_graph(graph).graph
        prepared, table = KernelGraph.of(small), small.table()
        rows, left, _ = prepared.together(table)
        assert left.mean() < 0.05
        assert rows[:, ~left].tobytes() == one_by_one(prepared, table)[:, ~left].tobytes()


@pytest.mark.slow
def test_an_axis_whose_values_change_no_order_costs_a_handful_of_runs() -> None:
    """240 numbers of CUs, each with the bits that it has alone."""
    base = space_of("fluid", num_chunks=16, designs=1, rows=16384)
    space = Space(base.base, (Knob("system.gpu.num_cus", tuple(range(64, 304))),), {}, base.backend)
    block = next(iter(space.blocks(256)))
    assert block.batch is not None
    ((_, grid),) = grids([block.batch], OverlapDesign)
    graph = reduce_graph(grid.design.schedule.lower(grid.design.system, grid.design.workload)).graph
    prepared, table = KernelGraph.of(graph), graph.table()
    rows, left, steps = prepared.together(table)
    _, _, steps_of_one = prepared.together(np.repeat(table[:1], few_classes.WIDTH, axis=0))
    assert len(table) == 240
    assert steps / steps_of_one + left.sum() <= 24
    assert rows[:, ~left].tobytes() == one_by_one(prepared, table)[:, ~left].tobytes()
