"""SimGrid as a witness from outside: its flows mean what tasks mean that use one unit of each resource per work.

Tasks of other kinds are its parallel tasks, whose sharing is its own: they mean the same where nothing is contended.
Needs an interpreter with SimGrid's module (Debian: `python3-simgrid`); skipped where there is none.
"""

from __future__ import annotations

import numpy as np
import pytest

from dse_peers import simgrid
from simulators.hardware.schedule_system import WholeNode
from simulators.taskgraph.graph import GraphBuilder, TaskGraph
from tests.support import ENGINES, EXACT, design

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(simgrid.interpreter() is None, reason="no Python interpreter here can import simgrid"),
]


def flows(seed: int, parts: int = 40) -> TaskGraph:
    """Unconnected random graphs side by side, as a SimGrid process runs one simulation; works in whole billionths."""
    random, build = np.random.default_rng(seed), GraphBuilder()
    for part in range(parts):
        count = int(random.integers(1, 6))
        links = [build.resource(f"link {part}.{i}", float(random.choice([1.0, 2.0, 3.5]))) for i in range(count)]
        tasks: list[int] = []
        for number in range(int(random.integers(2, 25))):
            after = random.permutation(tasks)[: random.integers(0, 4)].tolist() if tasks else []
            used = random.permutation(links)[: random.integers(1, 4)].tolist()
            work = float(random.choice([1.0, 2.0, round(float(random.uniform(0.1, 5)), 9)]))
            name = f"{part}.{number}"
            tasks.append(build.task(name, "transfer", after=after, uses=dict.fromkeys(used, 1.0), work=work))
    return build.build()


@pytest.mark.one_in(5, 1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_simgrid_finishes_every_flow_when_the_engines_do(seed: int) -> None:
    graph = flows(seed)
    theirs = simgrid.ENGINE.run(graph).finished[0]
    timelines = [ENGINES[name].run(graph) for name in EXACT]
    exact = [timeline.finished[0] for timeline in timelines if not timeline.reason(0)]
    assert len(exact) >= 2
    for finished in exact:
        np.testing.assert_allclose(theirs, finished, rtol=1e-9)


def test_parallel_tasks_have_delays_slots_and_amounts_and_run_alone_as_everywhere() -> None:
    build = GraphBuilder()
    memory, slots = build.resource("hbm", 2.0), build.pool("kernels", 1)
    first = build.task("first", "gemm", uses={memory: 3.0}, work=2.0, delay=0.5, cap=10.0, pool=slots)
    second = build.task("second", "gemm", uses={memory: 0.1}, work=2.0, cap=0.25, pool=slots)
    build.task("third", "gemm", after=[first, second], uses={memory: 0.5}, work=np.array([4.0, 8.0]))
    graph = build.build()
    theirs, ours = simgrid.ENGINE.run(graph), ENGINES["fluid"].run(graph)
    np.testing.assert_allclose(theirs.issued, ours.issued, rtol=1e-9)
    np.testing.assert_allclose(theirs.finished, ours.finished, rtol=1e-9)
    assert ours.finished.tolist() == [[3.5, 11.5, 12.5], [3.5, 11.5, 13.5]]


def test_a_resource_that_is_short_is_shared_and_contention_laws_are_left_out() -> None:
    build = GraphBuilder()
    memory = build.resource("hbm", 1.0)
    for name in ("one", "two"):
        build.task(name, "gemm", uses={memory: 1.0}, work=1.0, cap=0.8, group=name)
    build.slows("one", while_active="two", factor=0.1)
    np.testing.assert_allclose(simgrid.ENGINE.run(build.build()).finished, [[2.0, 2.0]], rtol=1e-9)


@pytest.mark.parametrize("schedule", ["serial", "uniform_fused_1d", "conccl"])
def test_schedules_of_a_whole_node_take_as_long_as_without_contention(schedule: str) -> None:
    point = design(schedule)
    graph = point.schedule.lower(WholeNode.of(point.system, 0.0), point.workload)
    theirs = simgrid.ENGINE.run(graph).makespan
    np.testing.assert_allclose(theirs, ENGINES["uncontended"].run(graph).makespan, rtol=1e-9)


@pytest.mark.parametrize(
    ("kind", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2), ("all_to_all", 1)]
)
def test_messages_of_a_collective_are_those_of_its_steps(kind: str, passes: int) -> None:
    graph = simgrid.messages(kind, 8e6, 8, 1e9)
    assert graph.num_tasks == 8 * 7 * passes
    assert graph["work"].sum() == pytest.approx(8 * 7 * passes * 1e6)
    seconds = simgrid.ENGINE.collective_s(kind, np.array([8e6]), np.array([8.0]), 1e9)
    assert seconds == pytest.approx([7 * passes * 1e-3])


def test_what_simgrid_says_of_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    build = GraphBuilder()
    build.task("only", "gemm", uses={build.resource("hbm", 1.0): 1.0}, work=1.0)
    monkeypatch.setattr(simgrid, "interpreter", lambda: "false")
    with pytest.raises(RuntimeError, match="SimGrid failed"):
        simgrid.ENGINE.run(build.build())
    monkeypatch.setattr(simgrid, "interpreter", lambda: None)
    assert "install python3-simgrid" in simgrid.ENGINE.absence()
