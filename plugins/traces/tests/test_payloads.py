"""Bytes of collectives as readers tell them, and what links of their group need for these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dse_chakra.files import ExecutionTrace, TraceNode, read_chakra, write_chakra
from dse_traces.change.settings import Effects, Terms
from dse_traces.laws.contention import assumed_laws
from dse_traces.laws.task_graph import contention_model
from dse_traces.profile.kernels import Profile, profile_of
from dse_traces.profile.replay import replay
from dse_traces.readers.chakra_graphs import trace_of_profile
from dse_traces.readers.formats import read
from simulators.costs.collective import collective_cost, machine_ring

US = 1e-6
SHARD, RANKS = 1 << 20, 8
KINDS = ("allreduce", "_allgather_base", "_reduce_scatter_base", "all_to_all", "broadcast")
ELEMENTS = ((SHARD, SHARD), (SHARD, RANKS * SHARD), (RANKS * SHARD, SHARD), (SHARD, SHARD), (SHARD, SHARD))
PAYLOADS = [2.0 * max(sizes) for sizes in ELEMENTS]
"""Of tensors in bf16: the largest that a GPU holds."""


def chrome(folder: Path, collectives: list[dict[str, Any]]) -> Path:
    """A Chrome trace of collectives that take 100 microseconds each."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_Generic", "pid": 0, "ts": 200 * place, "dur": 100}
        | {"args": {"device": 0, "stream": 20, "grid": [16, 1, 1], **more}}
        for place, more in enumerate(collectives)
    ]
    path = folder / "run.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def recorded(**more: Any) -> list[dict[str, Any]]:
    """What the profiler of PyTorch records of each of `KINDS`."""
    return [
        {"Collective name": kind, "In msg nelems": into, "Out msg nelems": out, "dtype": "BFloat16"} | more
        for kind, (into, out) in zip(KINDS, ELEMENTS, strict=True)
    ]


def payloads(profile: Profile) -> list[float]:
    return [float(size) for size in profile.kernels["payload_bytes"].tolist()]


def test_a_payload_is_the_largest_tensor_of_a_gpu(tmp_path: Path) -> None:
    assert payloads(read(chrome(tmp_path, recorded()))) == PAYLOADS


def test_a_table_tells_the_same_payloads(tmp_path: Path) -> None:
    rows = [
        f"{200 * place},100,20,ncclDevKernel_Generic,{kind},{into},{out},BFloat16"
        for place, (kind, (into, out)) in enumerate(zip(KINDS, ELEMENTS, strict=True))
    ]
    path = tmp_path / "run.csv"
    path.write_text("\n".join(["start_us,dur_us,stream,name,collective,in_elements,out_elements,dtype", *rows]))
    assert payloads(read(path)) == PAYLOADS


def test_a_shard_is_of_as_many_as_the_group_has_gpus_and_else_unknown(tmp_path: Path) -> None:
    gathered: dict[str, Any] = {"Collective name": "_allgather_base", "In msg nelems": SHARD, "dtype": "BFloat16"}
    sizes = payloads(read(chrome(tmp_path, [gathered | {"Group size": RANKS}, gathered])))
    assert sizes[0] == 2 * RANKS * SHARD
    assert sizes[1] != sizes[1]  # NaN: unknown


def test_execution_traces_hold_what_goes_into_an_all_gather(tmp_path: Path) -> None:
    nodes = [
        TraceNode(place, kind, "COMM_COLL_NODE", 100 * US, 200 * US * place, collective=kind, payload_bytes=SHARD)
        for place, kind in enumerate(("ALL_GATHER", "REDUCE_SCATTER"))
    ]
    profile = profile_of(
        [
            {"name": f"ncclDevKernel_{kind}", "stream": "20", "start_s": 200 * US * place, "seconds": 100 * US}
            | {"collective": kind, "payload_bytes": float(RANKS * SHARD), "group_size": RANKS}
            for place, kind in enumerate(("AllGather", "ReduceScatter"))
        ],
        "made",
    )
    write_chakra(tmp_path / "run.0.et", trace_of_profile(replay(profile)))
    written = [node.payload_bytes for node in read_chakra(tmp_path / "run.0.et").nodes if node.communicates]
    assert written == [SHARD, RANKS * SHARD]
    assert payloads(read(tmp_path / "run.0.et")) == [RANKS * SHARD, RANKS * SHARD]
    write_chakra(tmp_path / "sizeless.0.et", ExecutionTrace(tuple(nodes)))
    assert str(payloads(read(tmp_path / "sizeless.0.et"))) == f"[nan, {float(SHARD)}]"


@pytest.mark.parametrize("name", ["Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"])
def test_payloads_of_one_byte_an_element_are_known(name: str, tmp_path: Path) -> None:
    assert payloads(read(chrome(tmp_path, recorded(dtype=name)))) == [size / 2 for size in PAYLOADS]


def terms_of(folder: Path, **more: Any) -> Terms:
    """What is known of an all-reduce on an H100."""
    path = chrome(folder, [recorded(**more)[0]])
    return Effects(contention_model(read(path), assumed_laws("h100_8"))).terms[0]


@pytest.mark.parametrize(("recorded_gpus", "priced"), [(2, 2), (4, 4), (8, 8), (None, 8), (64, 8)])
def test_links_carry_a_collective_of_its_group(recorded_gpus: int | None, priced: int, tmp_path: Path) -> None:
    more = {} if recorded_gpus is None else {"Group size": recorded_gpus}
    ring = machine_ring(assumed_laws("h100_8").hardware, priced)
    expected = float(collective_cost("all_reduce", "ring", 2.0 * SHARD, ring).seconds)
    assert terms_of(tmp_path, **more).machine_s == pytest.approx(expected)


def test_a_group_of_one_gpu_moves_nothing_over_links(tmp_path: Path) -> None:
    terms = terms_of(tmp_path, **{"Group size": 1})
    assert (terms.machine_s, terms.engines, terms.switch) == (0.0, None, None)
