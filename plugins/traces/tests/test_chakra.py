"""Execution traces of Chakra: what is written is read again and runs as long; damaged files are used in part."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dse
from dse import plugins
from dse.cli import main
from dse.errors import ConfigError
from dse_chakra.files import ExecutionTrace, TraceNode, read_chakra, write_chakra
from dse_chakra.messages import COLLECTIVES, NODE_TYPES, message
from dse_traces import DATA
from dse_traces.commands.export import traces_of_design
from dse_traces.profile.replay import replay
from dse_traces.readers.chakra_graphs import collective_of, profile_of_trace, task_graph_of, trace_of_run
from dse_traces.readers.formats import read
from simulators.taskgraph.graph import TaskGraph
from tests import graphs
from tests.support import damage, drawn

US = 1e-6


def finish(graph: TaskGraph) -> float:
    """The makespan of a graph [s]."""
    return float(plugins.load("engine", "fluid").run(graph).makespan[0])


def gemm(place: int, **options: Any) -> TraceNode:
    """A node that computes for ten microseconds."""
    return TraceNode(place, f"gemm {place}", "COMP_NODE", 10 * US, **options)


def write(folder: Path, *nodes: TraceNode) -> Path:
    """A file of some nodes."""
    write_chakra(folder / "run.0.et", ExecutionTrace(nodes))
    return folder / "run.0.et"


@pytest.mark.slow
@drawn(120)
@given(graph=graphs.graphs(), collective=st.sampled_from(["", *COLLECTIVES]))
def test_what_is_written_of_a_run_is_read_again_and_takes_as_long(
    tmp_path_factory: pytest.TempPathFactory, graph: TaskGraph, collective: str
) -> None:
    timeline = plugins.load("engine", "fluid").run(graph)
    path = tmp_path_factory.getbasetemp() / "random.0.et"
    trace = trace_of_run(timeline, collective=collective)
    write_chakra(path, trace)
    again = read_chakra(path)
    assert again.nodes == trace.nodes
    assert not again.dropped
    nodes = {node.id: node for node in again.nodes}
    for task in range(graph.num_tasks):
        assert set(graph.predecessors(task)) == set(nodes[task].data_deps) - set(nodes[task].ctrl_deps)
    back = task_graph_of(again)
    assert sorted(back.tasks) == sorted(graph.tasks)
    assert finish(back) == pytest.approx(float(timeline.makespan[0]), rel=1e-9, abs=1e-12)


@pytest.mark.more
@pytest.mark.slow
def test_a_profile_becomes_a_trace_that_takes_as_long_and_hides_as_much(tmp_path: Path) -> None:
    (path,) = (DATA / "profiles").glob("mi300x_resnet.csv.gz")
    assert main(["profile", "export", f"profile={path}", f"out={tmp_path}", "ranks=2"]) == 0
    files = sorted(tmp_path.glob("*.et"))
    assert [file.name for file in files] == ["mi300x_resnet.0.et", "mi300x_resnet.1.et"]
    done = replay(read(path))
    assert finish(task_graph_of(read_chakra(files[0]))) == pytest.approx(done.replayed.span_s, rel=1e-3)
    again = replay(read(files[0]))
    assert again.recorded.hidden == pytest.approx(done.replayed.hidden, abs=0.03)
    assert (again.profile.kernels["kind"] == "collective").sum() >= done.profile.is_collective.sum()


@pytest.mark.slow
def test_a_lowered_design_names_its_collective_and_its_payload(tmp_path: Path) -> None:
    from dse.study.plan_again import plan_words

    planned = plan_words(["study=ficco_sweep"])
    space = next(iter(planned.spaces.values()))
    design: Any = planned.backend.design(space.base)
    traces = traces_of_design(planned.backend, design, {})
    assert len(traces) == design.system.node.num_gpus
    nodes = [node for node in traces[0].nodes if node.communicates]
    assert {node.collective for node in nodes} == {"ALL_GATHER"}
    assert {node.group_size for node in nodes} == {len(traces)}
    graph = planned.backend.timeline(design).graph
    assert sum(node.payload_bytes for node in nodes) == pytest.approx(graph["moved_bytes"].sum())
    assert finish(task_graph_of(traces[0])) == pytest.approx(finish(graph), rel=1e-9)


def test_a_backend_without_task_graphs_is_refused() -> None:
    from dse.backend import Backend

    with pytest.raises(ConfigError, match="no task graph"):
        traces_of_design(Backend(), None, {})


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "ALL_GATHER"),
        ("ncclKernel_Reduce_RING_LL_Sum_float", "REDUCE"),
        ("reduce_scatter", "REDUCE_SCATTER"),
        ("layer 0: all-to-all dispatch", "ALL_TO_ALL"),
        ("reduce_kernel<512, 1>", ""),
    ],
)
def test_names_tell_of_collectives(name: str, collective: str) -> None:
    assert collective_of(name) == collective


def test_nodes_without_times_begin_when_those_that_they_wait_for_have_ended(tmp_path: Path) -> None:
    host = TraceNode(1, "launch", "COMP_NODE", 5 * US, on_host=True)
    chain = [gemm(2, data_deps=(1,)), gemm(3, data_deps=(1,)), gemm(4, lane="20", data_deps=(2,))]
    profile = read(write(tmp_path, host, *chain))
    np.testing.assert_allclose(profile.start_s, [0, 10 * US, 10 * US])
    assert profile.kernels["stream"].tolist() == ["computation", "computation", "20"]
    assert profile.kernels["launch_s"].iloc[0] == 0


@pytest.mark.more
def test_many_nodes_that_are_ready_at_once_are_put_in_order_in_good_time(tmp_path: Path) -> None:
    profile = profile_of_trace(ExecutionTrace(tuple(gemm(place) for place in range(20_000))))
    assert profile.span_s == pytest.approx(0.2)


def test_a_gzip_that_is_cut_off_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write(tmp_path, *(gemm(place) for place in range(3000)))
    packed = tmp_path / "run.et.gz"
    packed.write_bytes(gzip.compress(path.read_bytes())[:-2000])
    profile = read(packed)
    assert 0 < len(profile) < 3000
    assert any("gzip" in reason for reason in profile.dropped)


def test_what_nodes_wait_for_may_be_absent_or_a_circle(tmp_path: Path) -> None:
    path = write(tmp_path, gemm(0, data_deps=(7,)), gemm(1, data_deps=(2,)), gemm(2, data_deps=(1, 0, 2)))
    profile = read(path)
    assert len(profile) == 3
    assert dict(profile.dropped) == {
        "dependencies on nodes that are not there": 1,
        "dependencies that go round in a circle": 2,
    }


def test_a_collective_of_an_unknown_type_stays_a_collective(tmp_path: Path) -> None:
    path = write(tmp_path, gemm(0))
    node = message("Node")(id=9, name="new", type=NODE_TYPES.index("COMM_COLL_NODE"), duration_micros=7)
    node.attr.add(name="comm_type", int64_val=77)
    path.write_bytes(path.read_bytes() + bytes([node.ByteSize()]) + node.SerializeToString())
    profile = read(path)
    assert profile.kernels["kind"].tolist().count("collective") == 1
    assert profile.dropped["collectives of a type that is not known"] == 1


@pytest.mark.slow
@drawn(100)
@given(data=st.data())
def test_any_damage_is_read_in_part_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.0.et"
    nodes = [gemm(0), TraceNode(1, "sum", "COMM_COLL_NODE", 3 * US, data_deps=(0,), collective="ALL_REDUCE")]
    write_chakra(path, ExecutionTrace(tuple(nodes)))
    damage(path, data, most=9)
    try:
        assert np.isfinite(replay(read(path)).end_s).all()
    except ConfigError:
        return


@pytest.mark.parametrize("data", [b"", b"no trace at all", b"\x00" * 100])
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.et"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"no execution trace|no kernel|is empty"):
        read(path)


@pytest.mark.slow
def test_the_command_writes_a_stored_point_for_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fast = ["schedule=serial", "workload.only=[g4]", "tracking=none", "fidelity=none", "figures=none"]
    assert main(["study=ficco_sweep", *fast]) == 0
    row = dse.load("ficco_sweep", tmp_path / "outputs").iloc[-1]
    assert main(["profile", "export", "study=ficco_sweep", f"key={row['key'][:12]}", f"out={tmp_path / 'traces'}"]) == 0
    assert "ALL_GATHER" in capsys.readouterr().out
    files = sorted((tmp_path / "traces").glob("*.et"))
    assert len(files) == 8
    assert finish(task_graph_of(read_chakra(files[7]))) == pytest.approx(row["makespan_s"], rel=1e-9)
