"""What graphs say by themselves: symmetry, order, longest paths, equal columns; and laws of contention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulators.costs.gemm import GemmShape, WaveGemms, gemm_cost
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from simulators.taskgraph.maxplus import _prune_paths, longest
from simulators.taskgraph.order import TaskOrder
from simulators.taskgraph.symmetry import patterns, reduce_graph
from tests.graphs import AMOUNTS, Plan, almost_equal_parts, assert_equal_totals, graphs, grids, pipelines, plans
from tests.support import ENGINES, EXACT, SCHEDULES, backend, design, drawn, lower, results

Floats = NDArray[np.float64]
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


def test_equal_tasks_that_are_freed_by_different_ones_are_not_taken_for_equal() -> None:
    """Both GEMMs wait for both copies; each frees one, at different times."""
    build = GraphBuilder()
    copies = [build.task("copy", "transfer", delay=1.0, staged_bytes=1.0) for _ in range(2)]
    for delay in (1.0, 3.0):
        build.frees(build.task("gemm", "gemm", after=copies, delay=delay), copies[delay > 1.0 :][:1])
    build.task("late", "transfer", after=[2], delay=1.0, staged_bytes=2.0)
    small = assert_same_run(build.build())
    assert small.num_tasks == 5


@pytest.mark.slow
@drawn(100)
@given(graph=graphs() | pipelines())
def test_a_graph_without_planned_symmetry_is_reduced_rightly_too(graph: TaskGraph) -> None:
    assert_same_run(graph)


@pytest.mark.slow
@drawn(50)
@given(graph=graphs() | pipelines())
def test_what_is_reduced_cannot_be_reduced_again(graph: TaskGraph) -> None:
    once = reduce_graph(graph).graph
    assert reduce_graph(once).graph is once


def every_gpu(point: OverlapDesign) -> TaskGraph:
    """All GPUs of a mesh that gathers in equal pieces by DMA: each one's HBM, CUs, incoming links and streams.

    A transfer reads the source's HBM and writes the destination's.
    """
    node, gpu = point.system.node, point.system.gpu
    overlap = point.workload.overlap()
    collective, op = overlap.collective, overlap.gemm
    pieces, gpus = point.schedule.num_chunks, range(node.num_gpus)  # type: ignore[attr-defined]
    comm, compute = {"equal": (0, 0), "communication": (0, 1), "compute": (1, 0)}[point.schedule.priority]  # type: ignore[attr-defined]
    rows = collective.rows // (node.num_gpus * pieces)
    cost = gemm_cost(WaveGemms.of(gpu, op.precision), GemmShape(rows * node.num_gpus, op.local_n, op.k))
    build = GraphBuilder()
    hbm = [build.resource(f"hbm.{index}", gpu.hbm_bytes_per_s) for index in gpus]
    cus = [build.resource(f"cu.{index}", gpu.num_cus) for index in gpus]
    pairs = list(itertools.permutations(gpus, 2))
    link = {(to, source): build.resource(f"link.{to}.{source}", node.link_bytes_per_s) for to, source in pairs}
    last: dict[Any, list[int]] = {key: [] for key in (*pairs, *gpus)}
    for piece in range(pieces):
        for to, source in pairs:
            moved = float(op.element_bytes * rows * collective.cols)
            last[to, source] = [
                build.task(
                    f"piece {piece} to {to} from {source}",
                    "transfer",
                    after=last[to, source],
                    uses={link[to, source]: 1.0, hbm[to]: 1.0, hbm[source]: 1.0},
                    work=moved,
                    delay=gpu.dma.setup_s,
                    cap=min(node.link_bytes_per_s, gpu.dma.bytes_per_s),
                    weight=0.5,
                    priority=comm,
                    group=f"copies to {to}",
                    gpu=to,
                    staged_bytes=moved,
                    moved_bytes=moved,
                )
            ]
        for gpu_index in gpus:
            arrived = [last[gpu_index, source][0] for source in gpus if source != gpu_index]
            chunk = build.task(
                f"gemm {piece} on {gpu_index}",
                "gemm",
                after=[*arrived, *last[gpu_index]],
                uses={hbm[gpu_index]: cost.kernel.hbm_bytes, cus[gpu_index]: gpu.num_cus * cost.seconds},
                work=1.0,
                delay=gpu.kernel_launch_s,
                cap=1 / cost.seconds,
                weight=1 / cost.kernel.hbm_bytes,
                priority=compute,
                group=f"gemms of {gpu_index}" if piece < pieces - 1 else "",
                gpu=gpu_index,
                flop=cost.flop,
            )
            build.frees(chunk, arrived)
            last[gpu_index] = [chunk]
    for gpu_index in gpus:
        slow_one_another(build, (f"gemms of {gpu_index}", f"copies to {gpu_index}"), 1 / gpu.contention.dma_beside_gemm)
    return build.build()


def slow_one_another(build: GraphBuilder, groups: tuple[str, str], factor: float) -> None:
    """Each of two groups of tasks has this share of its rate while the other is active."""
    for group, other in (groups, groups[::-1]):
        build.slows(group, while_active=other, factor=factor)


@pytest.mark.parametrize("priority", ["equal", "communication", "compute"])
@pytest.mark.parametrize("hbm", ["4300 GB/s", "900 GB/s", "300 GB/s"])
def test_eight_gpus_behave_as_the_one_that_stands_for_them(priority: str, hbm: str) -> None:
    """Built link by link, eight GPUs reduce to the size of one, and run as the shipped schedule says that one runs."""
    knobs = {"comm_engine": "dma", "priority": priority, "num_chunks": 4}
    overrides = {f"schedule.{name}": value for name, value in knobs.items()} | {"system.gpu.hbm_bytes_per_s": hbm}
    overrides["system.gpu.dma.num_engines"] = 7
    point = design("uniform_fused_1d", overrides, shape=(16384, 16384, 4096))
    node, single = every_gpu(point), lower(point)
    assert node.num_tasks == 8 * single.num_tasks
    small = assert_same_run(node)
    assert (small.num_tasks, len(small.resources)) == (2 * 4, 3)
    assert reduce_graph(single).graph.num_tasks == small.num_tasks
    totals, expected = EVENT.run(node).totals(), EVENT.run(single).totals()
    assert totals.makespan_s == pytest.approx(expected.makespan_s, rel=1e-9)
    assert totals.peak_staged_bytes == pytest.approx(8 * expected.peak_staged_bytes, rel=1e-9)
    for kind in ("gemm", "transfer"):
        assert totals.busy_s[kind] == pytest.approx(expected.busy_s[kind], rel=1e-9)
        assert totals.spent_s[kind] == pytest.approx(8 * expected.spent_s[kind], rel=1e-9)
    for name in ("fluid", "analytic"):
        totals_small = ENGINES[name].totals(small)
        if not totals_small.refused:
            assert_equal_totals(totals_small, totals)
    assert not ENGINES["fluid"].totals(small).refused


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


def test_a_grid_whose_columns_meet_nowhere_stays_whole() -> None:
    build = GraphBuilder()
    build.task("one", "gemm", delay=np.array([3.0, 2.0]))
    build.task("other", "gemm", delay=np.array([2.0, 3.0]))
    (part,) = patterns(build.build())
    assert part[0] is None
    build.task("third", "gemm", delay=np.array([3.0, 4.0]))
    assert [places.tolist() for places, _ in patterns(build.build()) if places is not None] == [[1], [0]]


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


def descends(graph: TaskGraph, task: int) -> set[int]:
    """The tasks that are done before this one is issued, by walking back."""
    ancestors, left = set[int](), [task]
    while left:
        before = set(graph.predecessors(left.pop()).tolist()) - ancestors
        ancestors |= before
        left += before
    return ancestors


@pytest.mark.slow
@drawn(200)
@given(poset=posets(), data=st.data())
def test_crowds_bound_whatever_can_run_together(poset: tuple[TaskGraph, list[int]], data: st.DataObject) -> None:
    """Against every set of users no two of which are ordered; and a chain never has a crowd of two."""
    graph, demands = poset
    users = data.draw(st.sets(st.integers(0, graph.num_tasks - 1), min_size=1).map(sorted))
    amount = data.draw(st.lists(AMOUNTS, min_size=4, max_size=4))
    order, ahead = TaskOrder.of(graph), [descends(graph, task) for task in range(graph.num_tasks)]
    assert [set(np.flatnonzero(row).tolist()) for row in order.ahead] == ahead
    crowds = order.crowds(np.array(users), [demands[user] for user in users])
    bound = max(sum(max(amount[demand] for demand in task) for task in crowd) for crowd in crowds)
    largest, widest = 0.0, 0
    for size in range(1, len(users) + 1):
        for together in itertools.combinations(users, size):
            if not any(
                first in ahead[other] or other in ahead[first] for first, other in itertools.combinations(together, 2)
            ):
                largest, widest = max(largest, sum(amount[demands[user]] for user in together)), size
    assert largest <= bound * (1 + 1e-12)
    assert order.is_chain(np.array(users)) == (widest == 1)
    if widest == 1:
        assert bound == pytest.approx(largest)


DURATIONS = st.lists(st.just(0.0) | AMOUNTS | st.floats(0, 1e-3), min_size=4, max_size=4)


@pytest.mark.slow
@drawn(300)
@given(
    paths=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=14),
    durations=st.lists(DURATIONS, min_size=1, max_size=20),
)
def test_pruned_paths_keep_the_longest_whatever_the_durations(
    paths: list[list[int]], durations: list[list[float]]
) -> None:
    every, pruned = np.array(paths), _prune_paths(np.array(paths))
    assert pruned is not None
    assert {tuple(path) for path in pruned.tolist()} <= {tuple(path) for path in paths}
    taken = np.array(durations).T.astype(float)
    np.testing.assert_allclose(longest(pruned, taken), (every @ taken).max(axis=0), rtol=1e-12)


def test_a_path_between_two_others_is_pruned() -> None:
    pruned = _prune_paths(np.array([[4, 0], [2, 2], [0, 4], [1, 2], [3, 1]]))
    assert pruned is not None
    assert pruned.tolist() == [[0, 4], [4, 0]]


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


def test_the_reference_and_the_compiled_engine_run_contention_laws() -> None:
    assert {"event", "fluid"} <= set(RUNS_LAWS)


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


@every_law_engine
def test_laws_may_name_more_groups_than_there_are_tasks(engine: str) -> None:
    build = GraphBuilder()
    for index in range(50):
        build.slows(f"slowed {index}", while_active=f"active {index}", factor=np.array([0.5, 0.25]))
    build.task("copy", "transfer", group="slowed 49", work=1.0, cap=1.0)
    build.task("gemm", "gemm", group="active 49", work=8.0, cap=1.0)
    assert ENGINES[engine].run(build.build()).finished.tolist() == [[2.0, 8.0], [4.0, 8.0]]


@every_law_engine
def test_two_groups_may_slow_each_other(engine: str) -> None:
    build = GraphBuilder()
    build.slows("a", while_active="b", factor=0.5)
    build.slows("b", while_active="a", factor=0.25)
    build.task("a", "gemm", group="a", work=1.0, cap=1.0)
    build.task("b", "gemm", group="b", work=1.0, cap=1.0)
    assert ENGINES[engine].run(build.build()).finished[0].tolist() == pytest.approx([2.0, 2.5])


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


def test_a_group_cannot_slow_itself_nor_twice() -> None:
    build = GraphBuilder()
    build.slows("copy", while_active="gemm", factor=0.5)
    for group in ("copy", "gemm"):
        with pytest.raises(ValueError, match=group):
            build.slows(group, while_active="gemm", factor=0.5)


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
