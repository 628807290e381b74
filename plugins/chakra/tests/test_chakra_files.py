"""Files of Chakra: any node is read as it was written, and what can be used of a damaged file is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse_chakra.files import ExecutionTrace, TraceNode, read_chakra, write_chakra
from dse_chakra.messages import NODE_TYPES, message
from tests.support import drawn

US = 1e-6


def gemm(place: int, **options: Any) -> TraceNode:
    """A node that computes for ten microseconds."""
    return TraceNode(place, f"gemm {place}", "COMP_NODE", 10 * US, **options)


def write(folder: Path, *nodes: TraceNode) -> Path:
    """A file of some nodes."""
    write_chakra(folder / "run.0.et", ExecutionTrace(nodes))
    return folder / "run.0.et"


def node_values() -> st.SearchStrategy[TraceNode]:
    """Nodes of all types, with any text and number that a field can have."""
    texts, sizes = st.text(max_size=9), st.integers(0, 2**62)
    times = st.floats(0, 1e6, allow_subnormal=False)
    return st.builds(
        TraceNode,
        id=st.integers(0, 2**64 - 1),
        name=texts,
        type=st.sampled_from(NODE_TYPES[:-1]),
        seconds=times,
        start_s=times,
        payload_bytes=sizes,
        group_size=st.integers(0, 2**40),
        flop=sizes,
        moved_bytes=sizes,
        lane=texts,
        kind=texts,
        on_host=st.booleans(),
    )


@drawn(120)
@given(nodes=st.lists(node_values(), min_size=1, max_size=5, unique_by=lambda node: node.id))
def test_any_node_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, nodes: list[TraceNode]) -> None:
    path = tmp_path_factory.getbasetemp() / "nodes.0.et"
    linked = [replace(node, data_deps=tuple(other.id for other in nodes[:place])) for place, node in enumerate(nodes)]
    write_chakra(path, ExecutionTrace(tuple(linked)))
    assert read_chakra(path).nodes == tuple(linked)


def test_microseconds_of_nodes_add_up_to_those_of_the_run(tmp_path: Path) -> None:
    nodes = [replace(gemm(place), seconds=0.4 * US, start_s=0.4 * place * US) for place in range(1000)]
    data = write(tmp_path, *nodes).read_bytes()
    total, place = 0, 0
    while place < len(data):
        length, place = data[place], place + 1
        encoded = message("Node" if place > 1 else "GlobalMetadata").FromString(data[place : place + length])
        total, place = total + getattr(encoded, "duration_micros", 0), place + length
    assert total == 400


def damaged(folder: Path, change: Any) -> Path:
    path = write(folder, *(gemm(place) for place in range(100)))
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "problem", "most"),
    [
        (lambda data: data[:-20], "ends within a node", 99),
        (lambda data: data[: data.index(b"gemm 50") + 1], "ends within a node", 50),
        (lambda data: data + b"\x80" * 8 + b"\x10" + b"x" * 50, "claims to be too long", 100),
        (lambda data: data + b"\xff" * 30, "claims to be too long", 100),
        (lambda data: data + b"\x80", "claims to be too long", 100),
        (lambda data: data + b"\x04\xff\xff\xff\xff", "cannot be read", 100),
        (lambda data: data + b"\x02\x18\x63", "cannot be read", 100),
        (lambda data: data + b"\x02\x08\x05", "met before", 100),
    ],
)
def test_what_can_be_used_of_a_damaged_trace_is_used(tmp_path: Path, change: Any, problem: str, most: int) -> None:
    trace = read_chakra(damaged(tmp_path, change))
    assert most - 1 <= len(trace.nodes) <= most
    assert any(problem in reason for reason in trace.dropped)
