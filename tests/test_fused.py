"""Fused kernels: bounds without copies and launches, orders, the closed form, what is moved; the studies end to end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dse.cli import main
from dse.space import set_path
from simulators.costs.fabric import phases
from simulators.costs.memory_bound import PeerStores, kernel_cost
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.design import OverlapDesign
from simulators.taskgraph.timeline import LOSSES
from simulators.workloads.operators import Workload
from studies.fused_ops import STUDY
from tests.support import ENGINES, backend, drawn, results, shipped
from tests.test_conformance import magnitudes

FREE = {
    "system.gpu.kernel_launch_s": 0.0,
    "system.gpu.cu_copy.setup_s": 0.0,
    "system.gpu.cu_copy.bytes_per_s_per_cu": 1e15,  # a library's kernel fills its links as one of all CUs does
    "system.gpu.persistent.post_s": 0.0,
    "system.gpu.persistent.poll_s": 0.0,
    "schedule.copies": False,
    "schedule.zero_copy": False,  # which saves reading and writing what is sent
    "system.gpu.persistent.in_flight_bytes_per_cu": 1e9,  # and these reads and writes slow no kernel
    "schedule.occupancy_loss": 0.0,
}
"""Nothing but compute and bytes on wires."""
FREE_FABRIC = {
    f"system.fabric.{name}": 0.0 for name in ("nic.latency_s", "nic.hop_s", "nic.message_s", "network.hop_s")
}
SYSTEMS = {"mi210_4": {}, "mi210_2x1": FREE_FABRIC, "dlrm_torus": FREE_FABRIC, "mi210_16x4": FREE_FABRIC}
OPERATORS = ("embedding", "gemv", "gemm")

every_system = pytest.mark.parametrize("system", SYSTEMS)


@pytest.mark.parametrize(("kind", "models"), [("embedding", {"collective"}), ("gemm", {"gemm", "collective"})])
def test_a_design_names_a_model_of_gemms_where_it_has_one(kind: str, models: set[str]) -> None:
    tree = {
        "system": shipped("system")["mi210_4"],
        "workload": {"name": "mine", "operators": dag(kind, rows=64, width=64, depth=4)},
        "schedule": shipped("schedule")["fused_kernels"],
    }
    design = backend("fluid").design(tree)
    assert backend("fluid").models(design).keys() == models


def dag(kind: str, *, rows: int, width: int, depth: int) -> dict[str, Any]:
    """An operator and its collective, or a collective and the embedding that it updates."""
    all_to_all = {"kind": "collective", "pattern": "all_to_all", "rows": rows, "cols": width, "precision": "fp16"}
    embedding = {"kind": "embedding", "rows": rows, "dim": width, "pooling": depth}
    if kind == "update":
        return {"move": all_to_all, "op": {**embedding, "update": True, "after": ["move"]}}
    ops = {
        "embedding": embedding,
        "gemv": {"kind": "gemv", "n": rows, "k": 64 * depth, "m": width},
        "gemm": {"kind": "gemm", "m": rows, "n": width, "k": 64 * depth, "precision": "fp16"},
    }
    moved = {**all_to_all, "pattern": "all_reduce"} if kind == "gemv" else all_to_all
    return {"op": ops[kind], "move": {**moved, "after": ["op"]}}


def point(
    system: str, operators: dict[str, Any], changes: dict[str, Any] | None = None, *, schedule: str = "fused_kernels"
) -> OverlapDesign:
    """A design of a written-out workload."""
    tree: dict[str, Any] = {"system": shipped("system")[system], "schedule": shipped("schedule")[schedule]}
    tree["workload"] = {"name": "test", "workloads": [{"name": "x", "operators": operators}]}
    for path, value in (changes or {}).items():
        set_path(tree, path, value)
    return backend("fluid").design(backend("fluid").scenarios(tree)["x"])


def metrics(design: OverlapDesign, engine: str = "fluid") -> dict[str, float]:
    (result,) = results(backend(engine), [design])
    assert result.status == "ok", result.reason
    return dict(result.metrics)


def makespan(design: OverlapDesign) -> float:
    return metrics(design)["makespan_s"]


@st.composite
def shapes(draw: st.DrawFn, *kinds: str) -> dict[str, Any]:
    kind = draw(st.sampled_from(kinds or (*OPERATORS, "update")))
    sizes = {"rows": draw(st.integers(2048, 40000)), "width": draw(st.sampled_from([1, 92, 4096]))}
    return dag(kind, **sizes, depth=draw(st.integers(1, 100)))


@st.composite
def knobs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "schedule.num_chunks": draw(st.sampled_from([1, 2, 7, 32])),
        "schedule.issue_order": draw(st.sampled_from(["remote_first", "local_first"])),
        "schedule.zero_copy": draw(st.booleans()),
        "schedule.occupancy_loss": draw(st.sampled_from([0.0, 0.125, 0.5])),
        "schedule.collective": draw(st.sampled_from(["direct", "hierarchical"])),
        "schedule.copies": draw(st.booleans()),
    }


# Bounds


@pytest.mark.slow
@every_system
@drawn(25)
@given(operators=shapes(), slices=st.sampled_from([1, 8, 128]), wire=magnitudes(1 / 64, 64))
def test_overlap_alone_leaves_the_longest_of_compute_and_the_phases_of_communication(
    system: str, operators: dict[str, Any], slices: int, wire: float
) -> None:
    """No copies, no launches: what goes one after another unfused goes at once at best, so half stays of two."""
    rates = {"system.node.link_bytes_per_s": 80e9 * wire}
    rates |= {"system.fabric.nic.bytes_per_s": 20e9 * wire} if SYSTEMS[system] else {}
    changes = {**FREE, **SYSTEMS[system], **rates, "schedule.num_chunks": slices}
    fused, bulk = (point(system, operators, {**changes, "schedule.kernel": kernel}) for kernel in ("fused", "bulk"))
    assume(not backend("fluid").problems(fused))
    reduction = 1 - makespan(fused) / makespan(bulk)
    stages = 1 + len(phases(bulk.system, operators["move"]["pattern"], "hierarchical"))
    assert -1e-9 <= reduction <= 1 - 1 / stages + 1e-9


@pytest.mark.slow
@every_system
@drawn(30)
@pytest.mark.one_in(2)
@given(operators=shapes(), drawn=knobs())
def test_remote_first_is_never_slower_than_local_first(
    system: str, operators: dict[str, Any], drawn: dict[str, Any]
) -> None:
    first, last = (
        point(system, operators, {**drawn, "schedule.issue_order": order}) for order in ("remote_first", "local_first")
    )
    assume(not backend("fluid").problems(first))
    assert makespan(first) <= makespan(last) * (1 + 1e-9)


# The closed form


def recursion(
    compute_s: float, wire_s: float, remote: int, local: int, *, post_s: float, late_s: float, first: bool
) -> float:
    """Slices in order: t += T_c / n; if remote, wire = max(wire, t + o_post) + V / B; T = max(t, wire + alpha)."""
    slices = remote + local
    order = [True] * remote + [False] * local
    now = wire = 0.0
    for sent in order if first else order[::-1]:
        now += compute_s / slices
        wire = max(wire, now + post_s) + wire_s / remote if sent else wire
    return max(now, wire + late_s)


@pytest.mark.slow
@drawn(60)
@given(
    slices=st.sampled_from([2, 8, 32]),
    depth=st.integers(1, 100),
    post=st.sampled_from([0.0, 1e-6, 2e-5]),
    poll=st.sampled_from([0.0, 1e-6]),
    first=st.booleans(),
)
def test_a_fused_pair_takes_what_the_recursion_says(
    slices: int, depth: int, post: float, poll: float, first: bool
) -> None:
    """Two nodes of one GPU: half of the slices are remote. Memory is plenty, so nothing competes."""
    changes = {**FREE, **FREE_FABRIC, "system.fabric.network.hop_s": "2 us", "system.gpu.hbm_bytes_per_s": 1e14}
    changes |= {"system.gpu.persistent.in_flight_bytes_per_cu": 1e7, "schedule.num_chunks": slices}
    changes |= {"system.gpu.persistent.post_s": post, "system.gpu.persistent.poll_s": poll}
    changes |= {"schedule.issue_order": "remote_first" if first else "local_first"}
    changes |= {"system.gpu.persistent.gather_efficiency": 0.011}
    design = point("mi210_2x1", dag("embedding", rows=6400, width=92, depth=depth), changes)
    op: Any = design.workload.operators["op"]
    compute = float(kernel_cost(design.system, op).seconds)
    wire = 6400 * 92 * 2 / 2 / 20e9
    expected = recursion(compute, wire, slices // 2, slices - slices // 2, post_s=post, late_s=2e-6 + poll, first=first)
    assert makespan(design) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("slices", "low", "high"), [(8, 0.43, 0.45), (32, 0.48, 0.495), (128, 0.49, 0.5)])
def test_slices_at_equal_times_remove_what_the_minimal_model_says(slices: int, low: float, high: float) -> None:
    """Its sensitivities: 44, 49 and 50 % for 8, 32 and 128 slices at a communication share of one half."""
    gone = 1 - recursion(1.0, 1.0, slices // 2, slices - slices // 2, post_s=0.0, late_s=0.0, first=True) / 2
    assert low <= gone <= high
    changes = {**FREE, **FREE_FABRIC, "schedule.num_chunks": slices}
    operators = dag("embedding", rows=65536, width=92, depth=35)
    bulk = point("mi210_2x1", operators, {**changes, "schedule.kernel": "bulk"})
    parts = metrics(bulk)
    rate = 20e9 * parts["comm_s"] / parts["gemm_s"]
    even = {**changes, "system.fabric.nic.bytes_per_s": rate, "system.fabric.nic.pcie_bytes_per_s": 1e12}
    fused, bulk = (point("mi210_2x1", operators, {**even, "schedule.kernel": kernel}) for kernel in ("fused", "bulk"))
    assert low - 0.01 <= 1 - makespan(fused) / makespan(bulk) <= high + 0.005


@pytest.mark.parametrize(("depth", "share"), [(70, 0.28), (30, 0.47), (10, 0.72)])
def test_communication_shares_of_embeddings_are_those_of_the_minimal_model(depth: int, share: float) -> None:
    """Two nodes at 20 GB/s: f = 0.28, 0.47, 0.72 at pooling 70, 30 and 10."""
    bulk = metrics(
        point(
            "mi210_2x1",
            dag("embedding", rows=65536, width=92, depth=depth),
            {**FREE, **FREE_FABRIC},
            schedule="bulk_sync",
        )
    )
    assert bulk["comm_s"] / (bulk["comm_s"] + bulk["gemm_s"]) == pytest.approx(share, abs=0.015)


# Occupancy


@given(loss=st.floats(0, 0.9), stored=st.floats(0, 3e11), copied=st.booleans())
def test_communicating_slows_every_operator_and_none_beyond_its_share_of_requests(
    loss: float, stored: float, copied: bool
) -> None:
    system = ScheduleSystem.model_validate(shipped("system")["mi210_4"])
    gemm = {"kind": "gemm", "m": 8192, "n": 8192, "k": 8192, "precision": "fp16"}
    tree = {"op": gemm, **{"emb": {"kind": "embedding", "rows": 4096, "dim": 128, "pooling": 50}}}
    operators: Mapping[str, Any] = Workload.model_validate({"name": "x", "operators": tree}).operators
    for op in operators.values():
        alone, bare = (kernel_cost(system, op, occupancy_loss=part).seconds for part in (0.0, loss))
        slower = kernel_cost(system, op, occupancy_loss=loss, stores=PeerStores(stored, copied)).seconds
        assert alone * (1 - 1e-12) <= bare <= alone / (1 - loss) * 1.01
        assert bare <= slower * (1 + 1e-12)


# What is moved, and where the time goes


@pytest.mark.slow
@every_system
@pytest.mark.parametrize("schedule", ["bulk_sync", "fused_kernels"])
@drawn(25)
@given(operators=shapes(), drawn=knobs())
def test_losses_add_up_and_engines_agree(
    system: str, schedule: str, operators: dict[str, Any], drawn: dict[str, Any]
) -> None:
    design = point(system, operators, drawn, schedule=schedule)
    assume(not backend("fluid").problems(design))
    figures = metrics(design)
    assert figures["ideal_s"] <= figures["makespan_s"] * (1 + 1e-9)
    assert figures["ideal_s"] + sum(figures[name] for name in LOSSES) == pytest.approx(figures["makespan_s"], rel=1e-9)
    for name in ("contention_s", "decomposition_s", "launch_s"):
        assert figures[name] >= -1e-9 * figures["makespan_s"]
    graph = design.schedule.lower(design.system, design.workload)
    first, second = (ENGINES[name].run(graph) for name in ("event", "fluid"))
    np.testing.assert_allclose(first.finished, second.finished, rtol=1e-9)


@every_system
@drawn(25)
@pytest.mark.one_in(2)
@given(operators=shapes(), drawn=knobs())
def test_fused_or_not_the_same_is_moved_and_computed(
    system: str, operators: dict[str, Any], drawn: dict[str, Any]
) -> None:
    fused, bulk = (point(system, operators, drawn, schedule=name) for name in ("fused_kernels", "bulk_sync"))
    assume(not backend("fluid").problems(fused))
    fused_figures, other = metrics(fused), metrics(bulk)
    for name in ("moved_bytes", "flop"):
        assert fused_figures[name] == pytest.approx(other[name], rel=1e-9)
    move = operators["move"]
    rows, gpus = move["rows"], {"mi210_4": 4, "mi210_2x1": 2, "dlrm_torus": 128, "mi210_16x4": 64}[system]
    if drawn["schedule.collective"] == "direct":
        passes = 2 if move["pattern"] == "all_reduce" else 1
        assert fused_figures["moved_bytes"] == pytest.approx(2 * passes * (rows - -(-rows // gpus)) * move["cols"])


@st.composite
def dags(draw: st.DrawFn) -> dict[str, Any]:
    """Of up to eight operators, any of which may wait for any before it; collectives for one, and one for them."""
    operators: dict[str, Any] = {}
    free: list[str] = []  # collectives that nobody consumes yet
    for index in range(draw(st.integers(2, 8))):
        computes = [name for name, op in operators.items() if op["kind"] != "collective"]
        kind = draw(st.sampled_from(["collective", "embedding", "gemm", "gemv", "mlp"]))
        name, rows = f"{draw(st.sampled_from('abcxyz'))}{index}", draw(st.sampled_from([2048, 5000]))
        if kind == "collective":
            pattern = draw(st.sampled_from(["all_to_all", "all_reduce", "all_gather", "reduce_scatter"]))
            after = draw(st.lists(st.sampled_from(computes), max_size=1)) if computes else []
            operators[name] = {"kind": kind, "pattern": pattern, "rows": rows, "cols": 64, "after": after}
            free.append(name)
            continue
        waits = draw(st.lists(st.sampled_from(computes), max_size=2, unique=True)) if computes else []
        taken = [candidate for candidate in free if draw(st.booleans())]
        free = [candidate for candidate in free if candidate not in taken]
        sizes: dict[str, dict[str, Any]] = {
            "embedding": {"rows": rows, "dim": 64, "pooling": 20, "update": draw(st.booleans())},
            "gemm": {"m": rows, "n": 256, "k": 512, "precision": "fp16"},
            "gemv": {"n": rows, "k": 512},
            "mlp": {"rows": rows, "width": 256, "layers": 3},
        }
        operators[name] = {"kind": kind, **sizes[kind], "after": [*waits, *taken]}
    return operators


@pytest.mark.slow
@every_system
@drawn(40)
@given(operators=dags(), drawn=knobs(), pairs=st.sampled_from(["producer", "all"]))
def test_any_dag_can_be_lowered_and_moves_the_same_fused_or_not(
    system: str, operators: dict[str, Any], drawn: dict[str, Any], pairs: str
) -> None:
    """Whatever shares kernels with what; engines agree on it, and losses add up."""
    changes = {**drawn, "schedule.pairs": pairs}
    fused, bulk = (point(system, operators, changes, schedule=name) for name in ("fused_kernels", "bulk_sync"))
    assert not backend("fluid").problems(fused)
    fused_figures, other, exact = metrics(fused), metrics(bulk), metrics(fused, "event")
    for name in ("moved_bytes", "flop"):
        assert fused_figures[name] == pytest.approx(other[name], rel=1e-9, abs=1e-6)
    assert fused_figures["makespan_s"] == pytest.approx(exact["makespan_s"], rel=1e-9)
    assert fused_figures["ideal_s"] + sum(fused_figures[name] for name in LOSSES) == pytest.approx(
        fused_figures["makespan_s"], rel=1e-9
    )
    assert fused_figures["contention_s"] >= -1e-9 * fused_figures["makespan_s"]


@drawn(40)
@given(operators=shapes("embedding", "gemm", "gemv"), drawn=knobs())
def test_zero_copy_saves_the_store_and_the_read_of_every_byte_that_is_sent(
    operators: dict[str, Any], drawn: dict[str, Any]
) -> None:
    """Of an all-reduce's sums, the read alone: each GPU keeps them; its phases share wires: 1 % may be lost there.

    A GEMM that stores more may be cut into other tiles, which read other amounts of its factors.
    """
    operators["move"]["cols"] = operators["op"][{"gemv": "m", "gemm": "n"}.get(operators["op"]["kind"], "dim")]
    stored, copied = (point("mi210_4", operators, {**drawn, "schedule.zero_copy": zero}) for zero in (True, False))
    assume(not backend("fluid").problems(stored))
    direct, through = metrics(stored), metrics(copied)
    saved, most = (1.5, 1.01) if operators["move"]["pattern"] == "all_reduce" else (2.0, 1 + 1e-9)
    exact = 0.1 if operators["op"]["kind"] == "gemm" else 1e-6
    assert through["hbm_bytes"] - direct["hbm_bytes"] == pytest.approx(saved * direct["moved_bytes"], rel=exact)
    assert direct["makespan_s"] <= through["makespan_s"] * most


# Workloads


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": {"kind": "gemv", "n": 64, "k": 64, "after": ["none"]}},
        {
            "a": {"kind": "gemv", "n": 64, "k": 64, "after": ["b"]},
            "b": {"kind": "gemv", "n": 64, "k": 64, "after": ["a"]},
        },
        {
            **dag("embedding", rows=64, width=64, depth=1),
            "b": {"kind": "gemv", "n": 64, "k": 64, "after": ["move"]},
            "c": {"kind": "gemv", "n": 64, "k": 64, "after": ["move"]},
        },
    ],
    ids=["unknown", "circle", "two consumers"],
)
def test_a_dag_that_is_none_is_told(wrong: dict[str, Any]) -> None:
    (problem,) = backend("fluid").problems(point("mi210_4", wrong))
    assert (problem.path, bool(problem.way_out)) == ("workload.operators", True)


# The studies

FEW = ["tracking=none", "store=none", "timeline=false"]
NARROW = [
    "space.schedule.num_chunks=choice(8,32)",
    "space.schedule.occupancy_loss=0.125",
    "space.schedule.zero_copy=true",
]


def run_folder(folder: Path, study: str) -> Path:
    (folder_of_run,) = (folder / "outputs" / study).glob("2*")
    return folder_of_run


@pytest.mark.more
def test_the_study_of_fused_operators_judges_all_its_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a miss always says why; none of ours rests on a speed-up, as all are reductions in per cent."""
    monkeypatch.chdir(tmp_path)
    assert main(["study=fused_ops", *FEW, *NARROW]) == 0
    folder = run_folder(tmp_path, "fused_ops")
    rows = {row["id"]: row for row in json.loads((folder / "claims.json").read_text("utf-8"))}
    assert set(rows) == {claim.id for claim in STUDY.claims()}
    assert [name for name, row in rows.items() if row["within"] is None] == ["fused_ops.occupancy_cost"]
    assert [name for name, row in rows.items() if not row["reason"]] == []
    assert "an input of the model" in rows["fused_ops.occupancy_cost"]["reason"]
    assert rows["fused_ops.dlrm128_v1"]["ours"] < rows["fused_ops.dlrm128_v2"]["ours"]
    assert {path.stem for path in (folder / "figures").glob("*.png")} >= {
        "reduction",
        "reductions",
        "num_chunks",
        "link_demand",
    }


@pytest.mark.slow
def test_a_narrowed_study_says_what_it_cannot_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "space.schedule.pairs=all",
        "space.schedule.issue_order=remote_first",
        "workload.only=[emb-p30-b512,gemv-70b_out]",
    ]
    assert main(["study=fused_ops", "figures=none", *FEW, *NARROW, *words]) == 0
    rows = json.loads((run_folder(tmp_path, "fused_ops") / "claims.json").read_text("utf-8"))
    assert {row["within"] for row in rows} == {None}


@pytest.mark.more
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("study", "words", "figures"),
    [
        ("dlrm_scaleout", ["space.system.fabric.num_nodes=choice(1,8,128)"], {"iteration", "reduction"}),
        ("nic_placement", ["space.system.fabric.network.topology=rail"], {"placement", "cost"}),
    ],
)
def test_studies_of_many_nodes_run_from_end_to_end(
    study: str, words: list[str], figures: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([f"study={study}", *FEW, *words, "workload.only=[dlrm-t100]"]) == 0
    folder = run_folder(tmp_path, study)
    assert json.loads((folder / "claims.json").read_text("utf-8")) == []
    table = pd.read_parquet(folder / "results.parquet")
    refused = table[table["status"] != "ok"]
    assert set(refused["system.fabric.nic.placement"]) <= {"gpu"}  # NICs on the dies of some GPUs only
    assert len(refused) == 0 or study == "nic_placement"
    assert {path.stem for path in (folder / "figures").glob("*.png")} == figures
