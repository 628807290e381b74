"""Exact optima of small instances: proven, never below a bound, and run as they say by the fluid engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks import bounds as figures
from benchmarks.instances import gather, random_graph
from dse import plugins
from dse_optimal.instance import Instance, Job, JobSchedule, JobServer, Way, instance_of
from dse_optimal.optimum import optimum, replay_s
from dse_optimal.subset_bounds import instance_bound, least_graph, subset_bound
from simulators.taskgraph.bounds import bound, linear_bound
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from tests.support import design, lower

FLUID = plugins.load("engine", "fluid")
ALONE = {f"system.gpu.contention.{law}": 1.0 for law in ("gemm_beside_cus", "cu_copy_beside_gemm", "dma_beside_gemm")}
ALONE["system.gpu.contention.late_start"] = 0.0


@st.composite
def small(draw: st.DrawFn) -> Instance:
    """Up to five jobs of whole lengths with up to two ways, on servers of one or two units."""
    servers = [JobServer(f"s{i}", draw(st.integers(1, 2)), draw(st.booleans())) for i in range(2)]
    jobs = []
    for index in range(draw(st.integers(1, 5))):
        ways = []
        for _ in range(draw(st.integers(1, 2))):
            used = draw(st.sets(st.integers(0, 1)))
            takes = {server: draw(st.integers(1, servers[server].units)) for server in sorted(used)}
            ways.append(Way(float(draw(st.integers(0, 6))), takes, float(draw(st.integers(0, 2)))))
        after = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        jobs.append(Job(f"j{index}", "gemm", tuple(ways), tuple(sorted(after))))
    return Instance(tuple(jobs), tuple(servers))


def least_of_all_orders(instance: Instance) -> float:
    """The least makespan by trying every order of the jobs and every choice of ways: each starts when it can."""
    count, best = len(instance.jobs), float("inf")
    for ways in itertools.product(*(range(len(job.ways)) for job in instance.jobs)):
        for order in itertools.permutations(range(count)):
            place = {job: rank for rank, job in enumerate(order)}
            if all(place[before] < place[index] for index, job in enumerate(instance.jobs) for before in job.after):
                best = min(best, in_order(instance, ways, order))
    return best


def in_order(instance: Instance, ways: tuple[int, ...], order: tuple[int, ...]) -> float:
    """The makespan if jobs take what they need in an order, each as early as it can, step by step of a second."""
    length = int(sum(max(way.seconds for way in job.ways) for job in instance.jobs)) + 1
    left = [np.full(length, server.units) for server in instance.servers]
    ends: dict[int, int] = {}
    for index in order:
        job = instance.jobs[index]
        way = job.ways[ways[index]]
        ready = max((ends[before] for before in job.after), default=0)
        starts = ((issue, work) for issue in range(ready, length) for work in works(instance, way, issue, length))
        issue, work = next(times for times in starts if fits(instance, way, times, left))
        ends[index] = work + int(way.work_s)
        for server, units in way.takes.items():
            left[server][(issue if instance.servers[server].from_issue else work) : ends[index]] -= units
    return float(max(ends.values()))


def works(instance: Instance, way: Way, issue: int, length: int) -> range:
    """When the work of a job may start."""
    first = issue + int(way.delay_s)
    waits = way.delay_s > 0 and not instance.issue_only(way)
    return range(first, length) if waits else range(first, first + 1)


def fits(instance: Instance, way: Way, times: tuple[int, int], left: list[NDArray[np.int64]]) -> bool:
    end = times[1] + int(way.work_s)
    begins = {server: times[0 if instance.servers[server].from_issue else 1] for server in way.takes}
    return all((left[server][begins[server] : end] >= units).all() for server, units in way.takes.items())


@pytest.mark.usefixtures("ortools")
@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(instance=small())
def test_the_optimum_is_the_least_of_all_orders_and_ways(instance: Instance) -> None:
    result = optimum(instance, workers=1, bounded=False)
    assert result.proven
    assert result.seconds == result.bound_s == least_of_all_orders(instance)
    assert result.seconds == max((end for *_, end in result.schedule.rows()), default=0.0)
    assert instance_bound(instance) <= result.seconds * (1 + 1e-6)


@pytest.mark.usefixtures("ortools")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_no_bound_of_a_gather_is_above_its_optimum(seed: int) -> None:
    drawn = gather(seed)
    result, graph = optimum(drawn, limit_s=20, workers=4, bounded=False), least_graph(drawn)
    assert max(bound(graph).seconds[0], linear_bound(graph).seconds, instance_bound(drawn)) <= result.seconds * (
        1 + 1e-6
    )
    assert result.bound_s <= result.seconds == pytest.approx(replay_s(result.schedule))


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 40))
def test_subsets_only_make_the_bound_of_a_graph_tighter_and_no_run_is_shorter(seed: int) -> None:
    graph = random_graph(seed)
    seconds = subset_bound(graph)
    assert bound(graph).seconds[0] * (1 - 1e-9) <= seconds <= FLUID.totals(graph).makespan_s[0] * (1 + 1e-9)


def late_pair() -> TaskGraph:
    """Two long tasks that come late and end the run, and a short one that comes soon and has much after it."""
    build = GraphBuilder()
    link = build.resource("link", 1.0)
    late = build.task("launch", "launch", delay=10.0)
    for name in ("a", "b"):
        build.task(name, "transfer", after=[late], uses={link: 1.0}, work=5.0)
    soon = build.task("c", "transfer", uses={link: 1.0}, work=1.0)
    build.task("after c", "gemm", after=[soon], work=2.0, cap=1.0)
    return build.build()


def test_tasks_that_come_late_are_bounded_without_those_that_come_soon() -> None:
    graph = late_pair()
    assert bound(graph).seconds[0] == 15.0  # of the path; the link is in use for 11 s
    assert subset_bound(graph) == 20.0 == FLUID.totals(graph).makespan_s[0]


@pytest.mark.usefixtures("ortools")
@pytest.mark.parametrize(("schedule", "chunks"), [("uniform_fused_1d", 4), ("hetero_unfused_1d", 4)])
def test_presets_keep_an_optimal_order_where_nothing_contends(schedule: str, chunks: int) -> None:
    graph = lower(design(schedule, {**ALONE, "schedule.num_chunks": chunks}))
    result = optimum(graph, workers=1)
    assert result.proven
    assert result.seconds == pytest.approx(FLUID.totals(graph).makespan_s[0], rel=1e-6)


@pytest.mark.usefixtures("ortools")
def test_an_order_that_is_not_optimal_is_mended() -> None:
    """A stream computes what comes last first."""
    build = GraphBuilder()
    link, stream = build.resource("link", 1.0), build.resource("CUs", 1.0)
    soon = build.task("soon", "transfer", uses={link: 1.0}, work=1.0, lane="link")
    late = build.task("late", "transfer", after=[soon], uses={link: 1.0}, work=4.0, lane="link")
    first = build.task("gemm late", "gemm", after=[late], uses={stream: 1.0}, work=2.0, lane="stream")
    build.task("gemm soon", "gemm", after=[soon, first], uses={stream: 1.0}, work=2.0, lane="stream")
    graph = build.build()
    assert FLUID.totals(graph).makespan_s[0] == 9.0
    result = optimum(graph, workers=1)
    assert (result.seconds, result.proven) == (7.0, True)
    assert [name for name, *_ in result.schedule.rows() if "gemm" in name] == ["gemm soon", "gemm late"]


def test_a_schedule_that_takes_more_than_there_is_runs_longer_than_it_says() -> None:
    instance = Instance(tuple(Job(name, "gemm", (Way(2.0, {0: 1}),)) for name in "ab"), (JobServer("s"),))
    assert replay_s(JobSchedule(instance, (0, 0), ((0.0, 0.0, 2.0), (0.0, 0.0, 2.0)))) == 4.0


@pytest.mark.usefixtures("ortools")
def test_an_instance_that_is_too_large_says_what_was_proven_and_the_gap() -> None:
    servers = (JobServer("s", 3), JobServer("t"))
    ways = [(Way(float(7 + i % 5), {0: 1 + i % 2}), Way(float(9 + i % 3), {1: 1})) for i in range(80)]
    jobs = [Job(f"j{i}", "gemm", of_job, (i - 9,) if i > 8 else ()) for i, of_job in enumerate(ways)]
    result = optimum(Instance(tuple(jobs), servers), limit_s=0.02, workers=1)
    assert 0 < result.bound_s < result.seconds
    assert f"not proven: at least {result.bound_s:.6g} s are, a gap of {100 * result.gap:.1f} %" in str(result)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job("j", "gemm", ()), "has no way"),
        (Job("j", "gemm", (Way(1.0),), (0,)), "must be jobs before it"),
        (Job("j", "gemm", (Way(-1.0),)), "negative or no number"),
        (Job("j", "gemm", (Way(float("nan")),)), "negative or no number"),
        (Job("j", "gemm", (Way(1.0, {3: 1}),)), "server 3, which is not declared"),
        (Job("j", "gemm", (Way(1.0, {0: 2}),)), "takes 2 of the 1 units of s"),
    ],
)
def test_what_is_no_instance_is_refused(job: Job, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Instance((job,), (JobServer("s"),))


def test_a_graph_with_contention_laws_is_no_instance() -> None:
    build = GraphBuilder()
    build.slows("a", while_active="b", factor=0.5)
    build.task("t", "gemm", work=1.0, cap=1.0, group="a")
    with pytest.raises(ValueError, match="contention laws"):
        instance_of(build.build())


@pytest.mark.usefixtures("ortools")
@pytest.mark.nightly
def test_the_benchmark_counts_what_is_proven() -> None:
    size = figures.Size(instances=3, graphs=20, limit_s=2, workers=1)
    drawn = figures.instances(size)
    assert drawn["drawn_instances"] == 3
    assert drawn["exact_instances"] <= drawn["proven_instances"] <= 3
    assert drawn["instance_violations"] == figures.graphs(size)["violations"] == 0
