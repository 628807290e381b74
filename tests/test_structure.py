"""What graphs say by themselves: symmetry, order, longest paths, equal columns; and laws of contention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.symmetry import patterns, reduce_graph
from tests.graphs import AMOUNTS, Plan, almost_equal_parts, assert_equal_totals, grids, plans
from tests.support import ENGINES, EXACT, SCHEDULES, backend, design, drawn, results

EVENT = ENGINES["event"]
every_engine = pytest.mark.parametrize("engine", ENGINES)


# Symmetry


def assert_same_run(graph: TaskGraph) -> TaskGraph:
    """The reduced graph, whose run is that of the whole one, task by task and in total."""
    quotient = reduce_graph(graph)
    full, small = EVENT.run(graph), EVENT.run(quotient.graph)
    np.testing.assert_allclose(small.finished[:, quotient.of], full.finished, rtol=1e-9)
    np.testing.assert_allclose(small.issued[:, quotient.of], full.issued, rtol=1e-9)
    assert_equal_totals(small.totals(), full.totals())
    for name in ("moved_bytes", "flop", "delay"):
        np.testing.assert_allclose(quotient.graph.total(name), graph.total(name), rtol=1e-9)
    return quotient.graph


@pytest.mark.slow
@drawn(400)
@given(plan=st.sampled_from([2, 3, 4]).flatmap(lambda parts: plans(parts=parts)))
def test_a_reduced_graph_runs_as_the_whole_one(plan: Plan) -> None:
    """And equal parts become one, except that tasks in pools keep to themselves."""
    small = assert_same_run(plan.build())
    if not any(task.pool >= 0 for task in plan.tasks):
        assert small.num_tasks <= len(plan.tasks)
        assert len(small.resources) <= len(plan.resources)


@pytest.mark.slow
@drawn(200)
@given(plan=almost_equal_parts())
def test_what_differs_in_one_task_only_is_not_taken_for_equal(plan: Plan) -> None:
    assert_same_run(plan.build())


@pytest.mark.parametrize("capacity", [1.0, 2.0])
def test_equal_tasks_on_resources_that_differ_are_not_taken_for_equal(capacity: float) -> None:
    """By their capacity, or by who else uses them."""
    build = GraphBuilder()
    wires = [build.resource("one", 1.0), build.resource("other", capacity)]
    for wire in wires:
        build.task("copy", "transfer", uses={wire: 1.0}, work=1.0)
    if capacity == 1.0:
        build.task("also", "gemm", uses={wires[0]: 1.0}, work=1.0)
    assert assert_same_run(build.build()).num_tasks == 2 + (capacity == 1.0)


# Equal columns


@pytest.mark.slow
@drawn(200)
@given(grid=grids())
def test_patterns_part_a_grid_so_that_equal_columns_are_one(grid: Plan) -> None:
    graph = grid.build()
    seen: list[int] = []
    for places, alike in patterns(graph):
        where = np.arange(graph.num_designs) if places is None else places
        seen += where.tolist()
        assert alike.num_designs == len(where)
        for name in graph.at:
            np.testing.assert_array_equal(alike[name], graph[name][where])
        for used in map(np.unique, alike.at.values()):  # columns of one role are compared
            for row in alike.table()[:, used]:
                assert len(set(row.tolist())) == len(used)
    assert sorted(seen) == list(range(graph.num_designs))


# Order


@st.composite
def posets(draw: st.DrawFn, most: int = 8) -> tuple[TaskGraph, list[int]]:
    """A few tasks, and a longest path's worth of durations each: which number each task takes."""
    build = GraphBuilder()
    count = draw(st.integers(1, most))
    for index in range(count):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        build.task(f"t{index}", "gemm", after=after, work=1.0, cap=1.0)
    return build.build(), draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))


DURATIONS = st.lists(st.just(0.0) | AMOUNTS | st.floats(0, 1e-3), min_size=4, max_size=4)


def walks(graph: TaskGraph, choice: Sequence[int]) -> NDArray[np.int64]:
    """Every path from a first to a last task, as how often it meets each duration."""
    walks_to_task: list[list[NDArray[np.int64]]] = []
    for task in range(graph.num_tasks):
        here = np.eye(4, dtype=np.int64)[choice[task]]
        before = [walk for other in graph.predecessors(task) for walk in walks_to_task[other]]
        walks_to_task.append([walk + here for walk in before] or [here])
    return np.array([walk for walks_to in walks_to_task for walk in walks_to])


@drawn(150)
@given(poset=posets(10), seconds=DURATIONS)
def test_a_closed_form_is_the_longest_of_all_paths(poset: tuple[TaskGraph, list[int]], seconds: list[float]) -> None:
    graph, choice = poset
    build = GraphBuilder()
    for task in range(graph.num_tasks):
        build.task(f"t{task}", "gemm", after=graph.predecessors(task).tolist(), delay=seconds[choice[task]])
    totals = ENGINES["analytic"].totals(build.build())
    assert not totals.refused
    assert totals.makespan_s[0] == pytest.approx((walks(graph, choice) @ np.array(seconds)).max(), rel=1e-12)


# What the closed form refuses

_HALF = {("a", "b"): 0.5}


@pytest.mark.slow
@drawn(50)
@given(plan=plans())
def test_the_closed_form_refuses_a_contention_law(plan: Plan) -> None:
    """Unless it refuses the graph for another reason, which is then the one that is told."""
    free, slowed = (Plan(plan.tasks, plan.resources, plan.pools, laws, plan.parts).build() for laws in ({}, _HALF))
    without, reason = (ENGINES["analytic"].run(graph).reason(0) for graph in (free, slowed))
    assert reason
    assert "contention law" in reason or without


@pytest.mark.parametrize(("slots", "ordered", "refused"), [(1, False, True), (2, False, False), (1, True, False)])
def test_the_closed_form_refuses_what_may_wait_for_a_slot(slots: int, ordered: bool, refused: bool) -> None:
    build = GraphBuilder()
    pool = build.pool("stream", slots)
    first = build.task("one", "gemm", pool=pool, delay=1.0)
    build.task("other", "gemm", pool=pool, delay=1.0, after=[first] if ordered else [])
    reason = ENGINES["analytic"].run(build.build()).reason(0)
    assert reason == ("tasks may wait for a slot of stream: the closed form is not exact" if refused else "")


@pytest.mark.parametrize(("capacity", "refused"), [(1.9, True), (2.0, False), (2.1, False)])
def test_the_closed_form_refuses_what_may_want_more_than_there_is(capacity: float, refused: bool) -> None:
    build = GraphBuilder()
    wire = build.resource("wire", capacity)
    for name in ("one", "other"):
        build.task(name, "gemm", uses={wire: 1.0}, work=1.0, cap=1.0)
    reason = ENGINES["analytic"].run(build.build()).reason(0)
    assert reason == ("wire may be over-subscribed: the closed form is not exact" if refused else "")


# Contention laws


def a_copy_beside_a_gemm(factor: float) -> TaskGraph:
    build = GraphBuilder()
    build.slows("copy", while_active="gemm", factor=factor)
    build.task("copy", "transfer", group="copy", work=1.0, cap=1.0)
    build.task("gemm", "gemm", group="gemm", work=1.0, cap=1.0)
    return build.build()


RUNS_LAWS = [name for name in EXACT if not ENGINES[name].run(a_copy_beside_a_gemm(0.5)).reason(0)]
every_law_engine = pytest.mark.parametrize("engine", RUNS_LAWS)


@every_law_engine
@drawn(100)
@given(work=AMOUNTS, start=st.just(0.0) | AMOUNTS, length=AMOUNTS, factor=st.floats(0.01, 1), beside=st.integers(1, 3))
def test_a_task_is_slowed_while_and_only_while_the_other_group_is_active(
    engine: str, work: float, start: float, length: float, factor: float, beside: int
) -> None:
    """Once, however many tasks of that group are active; a delay does not count."""
    build = GraphBuilder()
    build.slows("copy", while_active="gemm", factor=factor)
    copy = build.task("copy", "transfer", group="copy", work=work, cap=1.0)
    for index in range(beside):
        build.task(f"gemm {index}", "gemm", group="gemm", delay=start, work=length, cap=1.0)
    finished = ENGINES[engine].run(build.build()).finished[0]
    left = max(0.0, work - start)  # when the others begin
    expected = min(start + left / factor, work + length * (1 - factor)) if left else work
    assert finished[copy] == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(finished[1:], start + length, rtol=1e-12)


@every_law_engine
def test_factors_of_several_groups_multiply(engine: str) -> None:
    """4 s of work: 1 s at 1/2 (both groups: 1/2 of 1/4 until 1 s), 1 s at 1/4, then at full rate."""
    build = GraphBuilder()
    build.slows("copy", while_active="gemm", factor=0.5)
    build.slows("copy", while_active="norm", factor=0.25)
    build.slows("gemm", while_active="idle", factor=0.1)
    copy = build.task("copy", "transfer", group="copy", work=4.0, cap=1.0)
    build.task("gemm", "gemm", group="gemm", work=1.0, cap=1.0)
    build.task("norm", "gemm", group="norm", work=2.0, cap=1.0)
    build.task("idle", "gemm", group="idle", delay=3.0)
    finished = ENGINES[engine].run(build.build()).finished[0]
    assert finished.tolist() == pytest.approx([2 + 4 - 0.125 - 0.25, 1.0, 2.0, 3.0], rel=1e-12)
    assert finished[copy] == finished.max()


@every_law_engine
@pytest.mark.parametrize(("cap", "seconds"), [(math.inf, 1.0), (4.0, 1.0), (1.5, 4 / 3)])
def test_a_law_scales_the_cap_and_not_the_resource(engine: str, cap: float, seconds: float) -> None:
    """A task that its wire limits to 1/s is slowed only where half its cap is less than that."""
    build = GraphBuilder()
    wire = build.resource("wire", 1.0)
    build.slows("copy", while_active="gemm", factor=0.5)
    copy = build.task("copy", "transfer", group="copy", uses={wire: 1.0}, work=1.0, cap=cap)
    build.task("gemm", "gemm", group="gemm", work=9.0, cap=1.0)
    assert ENGINES[engine].run(build.build()).finished[0, copy] == pytest.approx(seconds, rel=1e-12)


# What a graph must not hold


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, np.array([1.0, math.nan, 2.0])], ids=str)
@pytest.mark.parametrize("name", ["work", "delay", "weight", "cus", "staged_bytes", "moved_bytes", "flop"])
def test_a_number_that_means_nothing_is_refused_by_task_and_name(name: str, wrong: Any) -> None:
    build = GraphBuilder()
    build.task("innocent", "gemm", work=1.0, cap=1.0, delay=np.ones(3))
    numbers: dict[str, Any] = {"work": 1.0, "cap": 1.0, name: wrong}
    build.task("guilty", "gemm", **numbers)
    with pytest.raises(ValueError, match=f"^guilty: {name} must be"):
        build.build()


@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.5, math.nan, math.inf, np.array([0.5, 0.0])], ids=str)
def test_a_factor_outside_0_to_1_is_refused_by_its_groups(wrong: Any) -> None:
    build = GraphBuilder()
    build.slows("copy", while_active="gemm", factor=wrong)
    build.task("one", "gemm", work=1.0, cap=1.0)
    with pytest.raises(ValueError, match=r"copy beside gemm: .* must be in \(0, 1\]"):
        build.build()


@pytest.mark.parametrize("after", [[1], [2], [-1], [0, 7]], ids=str)
def test_a_predecessor_that_is_not_there_yet_is_refused_by_task(after: list[int]) -> None:
    """So that no graph has a cycle."""
    build = GraphBuilder()
    build.task("first", "gemm")
    with pytest.raises(ValueError, match=r"'guilty'.*must be tasks added before it"):
        build.task("guilty", "gemm", after=after)


def test_a_task_that_nothing_limits_in_one_design_is_refused() -> None:
    build = GraphBuilder()
    wire = build.resource("wire", np.array([1.0, math.inf]))
    build.task("guilty", "gemm", uses={wire: 1.0}, work=1.0)
    with pytest.raises(ValueError, match="guilty: has work but neither a cap nor a finite resource"):
        build.build()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_engine_replays_what_it_measures(schedule: str) -> None:
    """Symmetry makes the closed form run more; what it measures it also shows."""
    point = design(schedule, {"system.gpu.hbm_bytes_per_s": "600 GB/s"})
    for engine in ENGINES:
        simulator = backend(engine)
        (result,) = results(simulator, [point])
        if result.status == "ok":
            assert max(interval.finish_s for interval in simulator.replay(point).intervals) == pytest.approx(
                result.metrics["makespan_s"], rel=1e-12
            )


# Staged bytes


@every_engine
@pytest.mark.parametrize("also_nothing", [False, True])
def test_bytes_freed_in_an_instant_make_room_for_those_staged_in_it(engine: str, also_nothing: bool) -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit and are one instant, beside a task that takes no time or not."""
    build = GraphBuilder()
    first = build.task("first", "gemm", delay=0.1, staged_bytes=1.0)
    build.frees(build.task("0.1 + 0.2", "gemm", after=[first], delay=0.2), [first])
    waits = build.task("0.3", "gemm", delay=0.3)
    build.task("second", "gemm", after=[waits], delay=1.0, staged_bytes=1.0)
    if also_nothing:
        build.task("nothing", "gemm", after=[waits])
    graph = build.build()
    assert not ENGINES[engine].run(graph).refused
    assert ENGINES[engine].totals(graph).peak_staged_bytes.tolist() == [1.0]
    assert ENGINES[engine].run(graph).totals().peak_staged_bytes.tolist() == [1.0]


@every_engine
def test_bytes_that_nobody_frees_stay(engine: str) -> None:
    build = GraphBuilder()
    first = build.task("one", "transfer", delay=1.0, staged_bytes=2.0)
    two = build.task("two", "transfer", after=[first], delay=1.0, staged_bytes=3.0)
    build.frees(build.task("three", "gemm", after=[two], delay=1.0), [two])
    four = build.task("four", "transfer", after=[two + 1], delay=1.0, staged_bytes=4.0)
    assert four == 3
    graph = build.build()
    assert ENGINES[engine].totals(graph).peak_staged_bytes.tolist() == [6.0]
    assert ENGINES[engine].run(graph).totals().peak_staged_bytes.tolist() == [6.0]


def test_a_task_cannot_free_what_it_does_not_wait_for() -> None:
    """Whether it ends before or after the bytes are there would be a matter of chance."""
    build = GraphBuilder()
    first = build.task("one", "transfer", staged_bytes=1.0)
    two = build.task("two", "transfer", staged_bytes=1.0, after=[first])
    beside = build.task("beside", "gemm")
    last = build.task("last", "gemm", after=[beside, two])
    for consumer, task in ((first, two), (beside, first), (first, first), (last, last)):
        with pytest.raises(ValueError, match="must wait for it"):
            build.frees(consumer, [task])
    build.frees(last, [first, two])
    assert build.build().consumer.tolist() == [last, last, -1, -1]
