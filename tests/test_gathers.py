"""Gathers of split weights beside compute (FSDP): what both lose to one another, by the CTAs that collectives hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sites import SiteStep, layers_graph, step_gain
from dse import plugins
from simulators.costs.gemm import GemmShape, gemm_cost
from simulators.costs.sharing import Sharing
from simulators.hardware.machine import System, tree_of
from simulators.steps.backend import metrics_of
from simulators.steps.operators.work import Product
from simulators.steps.overlap.gradient_contention import GradientReduction, SideBySide
from simulators.steps.run.build import iteration
from simulators.steps.spread.sharded_states import SplitLayers
from simulators.taskgraph.graph import GraphBuilder
from simulators.workloads.model import Parallel
from tests.support import drawn

SYSTEMS = ("a100_8_hdr", "h100_8_ndr", "mi300x_8_roce")
TIMES = st.floats(1e-3, 10.0)
SHARES = st.floats(0.3, 1.0)
CTAS = (2, 4, 8, 16)


def step(system: str = "h100_8_ndr", model: str = "llama3_8b", *, ctas: int = 0, batch: int = 1) -> Any:
    """A step of 32 GPUs that split its weights, with a number of CTAs over dp."""
    return iteration(SiteStep(system, model, 2, batch).design(0, ctas))


def repeated(of: Any) -> Any:
    """The block of a step that comes most often."""
    return max(of.gradients.sharded, key=lambda layers: float(layers.count))


def run(layers: Any, *, backward: bool) -> float:
    """Time by which a pass of layers is longer than alone, on an engine with laws of contention."""
    graph, computed = GraphBuilder(), list[int]()
    beside, compute_s = (layers.backward, layers.backward_s) if backward else (layers.forward, layers.forward_s)
    exchange_s = layers.gather_s + (layers.reduce_s if backward else 0.0)

    def task(name: str, group: str, work: Any, after: list[int]) -> list[int]:
        return [graph.task(name, "gemm", after=after, group=group, work=float(work), cap=1.0)]

    moved = task("first gather", "data", layers.gather_s, [])
    for index in range(int(layers.count)):
        begun = [*computed, *moved]  # a layer and what moves beside it begin at once
        computed = task(f"layer {index}", "layers", compute_s, begun)
        if index < int(layers.count) - 1:
            moved = task(f"beside {index}", "data", exchange_s, begun)
    ended = task("last reduction", "data", layers.reduce_s, computed) if backward else computed
    assert ended
    graph.slows("layers", while_active="data", factor=beside.compute)
    graph.slows("data", while_active="layers", factor=beside.exchange)
    makespan = float(plugins.load("engine", "fluid").totals(graph.build()).makespan_s[0])
    return makespan - float(layers.count) * float(compute_s)


@drawn(40)
@given(st.integers(1, 6), TIMES, TIMES, TIMES, TIMES, SHARES, SHARES)
def test_passes_are_as_long_as_on_an_engine_with_the_same_laws(
    count: int, forward: float, backward: float, gather: float, reduce: float, compute: float, exchange: float
) -> None:
    beside = SideBySide(compute, exchange)
    layers = SplitLayers(count, forward, backward, gather, reduce, forward=beside, backward=beside)
    longer = layers.exposed_s(Parallel(dp=8, zero=3))
    assert [float(seconds) for seconds in longer] == pytest.approx(
        [run(layers, backward=b) for b in (False, True)], rel=1e-6
    )


@drawn(40)
@given(TIMES, TIMES, SHARES, SHARES)
def test_what_slows_nothing_takes_as_long_as_the_longer_of_both(
    compute: float, exchange: float, slow: float, less: float
) -> None:
    first, second = np.asarray(compute), np.asarray(exchange)
    free = float(SideBySide().longer_s(first, second))
    assert free == pytest.approx(max(exchange - compute, 0.0), abs=1e-12)
    slowed = float(SideBySide(slow, less).longer_s(first, second))
    assert free - 1e-12 <= slowed <= float(SideBySide(slow, less / 2).longer_s(first, second)) + 1e-12


@pytest.mark.parametrize("system", SYSTEMS)
def test_compute_is_slower_beside_gathers_of_more_ctas(system: str) -> None:
    shares = [float(np.asarray(repeated(step(system, ctas=ctas)).forward.compute)) for ctas in (*CTAS, 0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0] < 1


@pytest.mark.parametrize("ctas", [4, 16])
def test_a_gemm_beside_a_gather_takes_what_the_one_law_of_sharing_says(ctas: int) -> None:
    of = step(ctas=ctas)
    contended, parts = of.gradients.contended, of.passes.parts
    part = next(part for part in parts if isinstance(part.op.work, Product) and part.forward)
    product, gpu = part.op.work, of.passes.platform.gemms
    (beside,) = contended.beside([part.op], [part.spent], GradientReduction(*np.ones((3,))))
    shape = GemmShape(product.m, product.n, product.k, product.batch, product.transposed)
    left, full = (gemm_cost(gpu, shape, taken=taken) for taken in (ctas, 0))
    law = Sharing.of(System.model_validate(tree_of("h100_8_ndr")).gpu)
    slowed = law.gemm(left.seconds + left.launch_s, full.seconds + full.launch_s)
    assert float(beside) == pytest.approx(float(slowed)) and float(beside) > float(part.spent.seconds)


def test_a_step_without_constants_of_contention_loses_nothing() -> None:
    of = step()
    without = replace(of.gradients, contended=None)
    assert all(layers.forward == layers.backward == SideBySide() for layers in without.sharded)
    assert float(without.split_s) < float(of.gradients.split_s)


def test_numbers_of_ctas_for_each_site_pay_where_a_network_bounds_gathers() -> None:
    """Few CTAs fill a port of the network; over tp all of them are needed."""

    def seconds(design: Any) -> float:
        return float(metrics_of(design)["iteration_s"])

    assert step_gain(SiteStep("a100_8_hdr", "llama3_8b", 2, 1), seconds) > 0.02
    assert step_gain(SiteStep("h100_8_ndr", "llama3_70b", 8, 1), seconds) == 0  # exposed: as many as there are


def test_an_engine_that_shares_sms_says_so_too() -> None:
    """By fair shares of SMs in place of our laws."""
    design = SiteStep("h100_8_ndr", "llama3_8b", 2, 1).design
    times = {
        ctas: float(plugins.load("engine", "fluid").totals(layers_graph(iteration(of), of)).makespan_s[0])
        for ctas, of in ((ctas, design(0, ctas)) for ctas in (2, 16, 0))
    }
    assert times[16] < times[0] < times[2]
