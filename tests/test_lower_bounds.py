"""Bounds are never above what an engine reaches, and equal it where nothing is left to gain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from dse import plugins
from dse.backend import Batch
from dse.space import get_path
from simulators.taskgraph.bounds import bound, linear_bound
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from tests.graphs import graphs
from tests.support import backend, design, drawn, smooth_numbers

FLUID = plugins.load("engine", "fluid")


@pytest.mark.slow
@drawn(150)
@given(graph=graphs())
def test_no_run_of_a_random_graph_is_shorter_than_its_bounds(graph: TaskGraph) -> None:
    makespan = FLUID.totals(graph).makespan_s[0]
    plain, linear = bound(graph).seconds[0], linear_bound(graph, intervals=4).seconds
    assert plain <= makespan * (1 + 1e-9)
    assert linear <= makespan * (1 + 1e-6)  # the tolerance of the solver


def beside(factor: float, *, works: tuple[float, float] = (1.0, 1.0)) -> TaskGraph:
    """A GEMM and a transfer that start at once and slow one another."""
    build = GraphBuilder()
    build.slows("gemm", while_active="copy", factor=factor)
    build.slows("copy", while_active="gemm", factor=factor)
    build.task("gemm", "gemm", work=works[0], cap=1.0, group="gemm")
    build.task("copy", "transfer", work=works[1], cap=1.0, group="copy")
    return build.build()


def test_the_linear_program_knows_contention() -> None:
    graph = beside(0.8)
    assert FLUID.totals(graph).makespan_s[0] == pytest.approx(1.25)
    assert bound(graph).seconds[0] == 1.0
    optimum = linear_bound(graph)
    assert optimum.seconds == pytest.approx(1.25)
    assert optimum.binds["gemm beside copy"] == pytest.approx(0.25, rel=1e-6)  # of it is lost to contention


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("schedule", ["chunked", "uniform_fused_1d", "fused_kernels", "t3_mca"])
def test_the_bound_of_a_schedule_over_any_numbers_is_that_of_each_design(schedule: str) -> None:
    """Along the axis of each number of the machine, alone and beside that of the links."""
    point, simulator = design(schedule), backend("fluid")
    links = {"system.node.link_bytes_per_s": np.array([4e10, 5e10])}
    for path in smooth_numbers(point)[::4]:
        values = get_path(point, path) * np.array([0.95, 1.0, 1.05])
        for axes in ({path: values}, {path: values} | links, links | {path: values}):
            batch = Batch(Batch(point, axes).at(0), axes)
            (results,) = simulator.evaluate([batch])
            bounds = simulator.bound(batch, results.metrics)["bound_s"]
            for place, member in enumerate(batch.designs()):
                alone = simulator.bound(Batch(member), {"makespan_s": results.column("makespan_s")[place : place + 1]})
                assert bounds[place] == pytest.approx(alone["bound_s"][0], rel=1e-12)
