"""Grids of designs: each result is that of its design alone, and what breaks a rule says so as it would alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dse.backend import Batch, Result
from dse.space.blocks import Rule, grids, problems, reasons
from dse.testing import check_screening
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.graph import TaskGraph
from tests.support import ENGINES, EXACT, FREE, SCHEDULES, backend, design, drawn, lower
from tests.test_conformance import DISTINCT, magnitudes, points

SIMULATORS = [(name, None) for name in ENGINES] + list(itertools.permutations(EXACT, 2))

AXES: dict[str, st.SearchStrategy[Any]] = {
    "system.gpu.num_cus": st.integers(1, 400),
    "system.gpu.hbm_bytes_per_s": magnitudes(1e11, 2e13),
    "system.gpu.hbm_bytes": magnitudes(1e10, 1e12),
    "system.gpu.matrix_flop_per_s_per_cu": magnitudes(1e12, 1e13),
    "system.gpu.kernel_launch_s": st.just(0.0) | magnitudes(1e-7, 1e-5),
    "system.gpu.gemm.cache_miss": st.floats(0, 1),
    "system.gpu.gemm.prologue_s": st.just(0.0) | magnitudes(1e-7, 1e-5),
    "system.gpu.cu_copy.setup_s": st.just(0.0) | magnitudes(1e-7, 1e-4),
    "system.gpu.dma.bytes_per_s": magnitudes(1e10, 1e12),
    "system.gpu.dma.setup_s": st.just(0.0) | magnitudes(1e-7, 1e-4),
    "system.node.link_bytes_per_s": magnitudes(5e9, 5e11),
    **dict.fromkeys(FREE, st.floats(1, 4)),
    "schedule.comm_cus": st.integers(1, 56) | st.integers(1, 400),
    "schedule.withheld_cus": st.integers(0, 400),
    "workload.operators.gather.rows": st.integers(1, 40) | st.integers(256, 20000),
}


@st.composite
def batches(draw: st.DrawFn, /, schedule: str, most: int = 4, **fixed: Any) -> Batch:
    """A design and a grid of up to three of its numbers; some of the designs break rules."""
    point = design(schedule, **draw(points(schedule, **fixed)))
    legal = [path for path in AXES if path not in fixed and backend("event").is_axis(path, point)]
    chosen = draw(st.lists(st.sampled_from(legal), min_size=1, max_size=3, unique=True))
    axes = {path: np.array(draw(st.lists(AXES[path], min_size=2, max_size=most, unique=True))) for path in chosen}
    return Batch(Batch(point, axes).at(0), axes)


def evaluated(simulator: OverlapBackend, batch: Batch) -> list[Result]:
    (outcomes,) = simulator.evaluate([batch])
    return [outcomes[place] for place in range(batch.size)]


def test_the_axes_below_are_axes_of_some_schedule() -> None:
    movers = [design(name, {"schedule.comm_engine": mover}) for name in SCHEDULES for mover in ("cu", "dma")]
    legal = {path for mover in movers for path in AXES if backend("event").is_axis(path, mover)}
    assert legal == set(AXES)


@pytest.mark.one_in(5, 1)
@pytest.mark.parametrize("names", SIMULATORS, ids=lambda names: "-".join(filter(None, names)))
@pytest.mark.slow
@drawn(12)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_a_grid_equals_its_designs_alone_to_the_bit(
    names: tuple[str, str | None], schedule: str, data: st.DataObject
) -> None:
    """With infeasible designs in between, in any order, and beside another grid in the same call."""
    simulator = backend(*names)
    batch, other = data.draw(batches(schedule)), data.draw(batches(schedule, most=2))
    together = evaluated(simulator, batch)
    alone = [evaluated(simulator, Batch(point))[0] for point in batch.designs()]
    assert together == alone
    order = data.draw(st.permutations(range(batch.size)))
    singles = [Batch(batch.at(place)) for place in order]
    shuffled = simulator.evaluate([*singles, other, batch])
    assert [outcome[0] for outcome in shuffled[: batch.size]] == [alone[place] for place in order]
    assert [shuffled[-1][place] for place in range(batch.size)] == alone
    split = [result for part in batch.split(3) for result in evaluated(simulator, part)]
    assert split == alone


@pytest.mark.one_in(4, 1)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@drawn(24)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_what_is_known_before_a_run_is_what_the_run_says(engine: str, schedule: str, data: st.DataObject) -> None:
    """Of several grids in one call, some of one structure."""
    batch, other = data.draw(batches(schedule)), data.draw(batches(schedule, most=2))
    check_screening(backend(engine), [batch, other, Batch(batch.design), batch])


def test_the_grids_above_hold_designs_of_all_kinds() -> None:
    """Measured ones, infeasible ones and refused ones in one grid, or the property above would say little."""
    axes = {
        "schedule.comm_cus": np.array([8, 304, 48]),
        "system.gpu.hbm_bytes_per_s": np.array([4e12, 1e11]),
        "workload.operators.gather.rows": np.array([4096, 7]),
    }
    batch = Batch(design("uniform_fused_1d", {"schedule.comm_engine": "cu", **FREE}), axes)
    first = Batch(batch.at(0), axes)
    outcomes = evaluated(backend("analytic"), first)
    assert {result.status for result in outcomes} == {"ok", "infeasible", "unsupported"}
    assert outcomes == [evaluated(backend("analytic"), Batch(point))[0] for point in first.designs()]
    both = evaluated(backend("analytic", "fluid"), first)
    assert {result.engine for result in both} == {"", "analytic", "fluid"}


@pytest.mark.slow
@drawn(80)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_the_closed_form_is_exact_wherever_it_does_not_refuse(schedule: str, data: st.DataObject) -> None:
    batch = data.draw(batches(schedule, **FREE) | batches(schedule))
    closed, exact = (evaluated(backend(name), batch) for name in ("analytic", "fluid"))
    assert {result.status for result in exact} <= {"ok", "infeasible"}
    for closed_result, other in zip(closed, exact, strict=True):
        assert (closed_result.status == "infeasible") == (other.status == "infeasible")
        if closed_result.status == "ok":
            assert closed_result.metrics == pytest.approx(other.metrics, rel=1e-9, abs=1e-15)
        else:
            assert len(closed_result.reason.split()) > 2


def test_the_closed_form_runs_much_of_a_shipped_sweep() -> None:
    """So that the property above is about something; tiles that wait for one another's waves have no closed form."""
    axes = {"system.node.link_bytes_per_s": np.geomspace(1e10, 1e11, 7)}
    for schedule in set(SCHEDULES) - {"signalled"}:
        point = design(schedule, {"schedule.comm_engine": "dma", **FREE})
        outcomes = evaluated(backend("analytic"), Batch(Batch(point, axes).at(0), axes))
        assert sum(result.status == "ok" for result in outcomes) >= 3


# Rules


@pytest.mark.slow
@drawn(80)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_rules_over_a_grid_say_what_they_say_of_each_design(schedule: str, data: st.DataObject) -> None:
    """Text included, and several broken rules in one line."""
    batch = data.draw(batches(schedule))
    ((_, grid),) = grids([batch], OverlapDesign)
    code, texts = reasons(grid.design.schedule.rules(grid.design.system, grid.design.workload), grid.shape)
    texts_of_designs = [texts[index] for index in code.tolist()]
    assert texts_of_designs == ["; ".join(map(str, backend("event").problems(point))) for point in batch.designs()]
    assert texts[0] == ""
    assert len(set(texts)) == len(texts)


def test_a_design_that_breaks_two_rules_tells_both() -> None:
    axes: dict[str, NDArray[Any]] = {
        "workload.operators.gather.rows": np.array([4096, 5]),
        "schedule.comm_cus": np.array([8, 400]),
    }
    batch = Batch(design("uniform_fused_1d", {"schedule.comm_engine": "cu"}), axes)
    outcomes = evaluated(backend("fluid"), Batch(batch.at(0), axes))
    assert [result.status for result in outcomes] == ["ok", "infeasible", "infeasible", "infeasible"]
    assert "400 leaves no CU" in outcomes[1].reason.replace("= ", "").replace(":", "")
    assert "comm_cus" not in outcomes[2].reason
    assert {"5", "400"} <= set(outcomes[3].reason.replace(":", " ").replace(")", " ").split())


@given(
    first=st.lists(st.booleans(), min_size=6, max_size=6),
    second=st.lists(st.booleans(), min_size=3, max_size=3),
    numbers=st.lists(st.integers(0, 3) | st.floats(0, 3), min_size=2, max_size=2),
)
def test_reasons_of_any_rules_are_the_problems_of_each_design(
    first: list[bool], second: list[bool], numbers: list[float]
) -> None:
    """Rules that hold everywhere, along one axis or at single places; values and numbers that vary or do not."""
    rows, both = np.array(numbers)[:, None], np.array(first).reshape(2, 3)
    rules = [
        Rule("a", both, "is {0} of {1}", rows, (rows, 7), "try {1}"),
        Rule("b", np.array(second), "is {{wrong}}", "text"),
        Rule("c", False, "never"),
        Rule("d", True, "always", 1.5),
    ]
    code, texts = reasons(rules, (2, 3))
    for place, (row, column) in enumerate(np.ndindex(2, 3)):
        number = numbers[row]
        plain = int(number) if float(number).is_integer() else number
        single = [
            Rule("a", bool(both[row, column]), "is {0} of {1}", plain, (plain, 7), "try {1}"),
            Rule("b", second[column], "is {{wrong}}", "text"),
            Rule("d", True, "always", 1.5),
        ]
        assert texts[code[place]] == "; ".join(map(str, problems(single)))


# One graph for a grid


@pytest.mark.slow
@drawn(80)
@given(schedule=st.sampled_from(DISTINCT), data=st.data())
def test_the_graph_of_a_grid_holds_the_numbers_of_each_design(schedule: str, data: st.DataObject) -> None:
    """Contention laws may be of other groups, as designs whose factors differ have more; they say the same."""
    batch = data.draw(batches(schedule))
    ((_, grid),) = grids([batch], OverlapDesign)
    assume(not any(backend("event").problems(candidate) for candidate in batch.designs()))
    graph = lower(grid.design)
    places = np.broadcast_to(np.arange(graph.num_designs).reshape(graph.shape), grid.shape).reshape(-1)
    for place, grid_point in zip(places, batch.designs(), strict=True):
        alone = lower(grid_point)  # type: ignore[arg-type]
        assert alone.tasks == graph.tasks
        for name in graph.at.keys() - {"factor"}:
            assert graph[name][place].tobytes() == alone[name][0].tobytes()
        assert slowed(graph, int(place)).tobytes() == slowed(alone, 0).tobytes()


def slowed(graph: TaskGraph, design: int) -> NDArray[np.float64]:
    """[T, T]: the factor on each task's rate while another task is active."""
    factor = np.ones((len(graph.groups) + 1, len(graph.groups) + 1))  # the last one for tasks of no group
    factor[graph.slowed[:, 0], graph.slowed[:, 1]] = graph["factor"][design]
    return np.asarray(factor[np.ix_(graph.group, graph.group)])
