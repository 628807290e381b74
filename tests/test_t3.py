"""Tracking and triggering: exact traffic, the paper's recursion, bounds, policies, the cache before HBM, the study."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.backend import Batch
from dse.cli import main
from dse.space import set_path
from search_spaces.triggered import traffic
from simulators.costs.gemm.stages import StagedGemm, stage_gemm
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.design import OverlapDesign
from tests.support import backend, lower, merged, results, shipped
from tests.test_grids import evaluated

SEQUENTIAL, TRACKED = "t3_sequential", ("t3", "t3_fair", "t3_mca")
SCHEDULES = [name for name, tree in shipped("schedule").items() if tree["family"] == "triggered"]
TOPOLOGIES = ("ring", "mesh", "switch")


def point(
    schedule: str,
    gpus: int = 8,
    shape: tuple[int, int, int] = (8192, 4256, 17024),
    *,
    pattern: str = "all_reduce",
    **over: Any,
) -> OverlapDesign:
    """A GEMM of T3's simulated GPUs and its reduction; over: values by dotted path below `system` or `schedule`."""
    m, n, k = shape
    shape_tree = {"name": "x", "m": m, "n": n, "k": k, "shards": gpus}
    tree: dict[str, Any] = {"system": shipped("system")["t3_ring"], "schedule": shipped("schedule")[schedule]}
    tree["workload"] = {"name": "test", "pattern": pattern, "shapes": [shape_tree], "precision": "fp16"}
    tree = copy.deepcopy(dict(backend("event").scenarios(tree)["x"]))
    tree["system"]["cost_weights"] = {"gpu.num_cus": 1}  # names nothing that may be left out
    for path, value in over.items():
        set_path(tree, path.replace("__", "."), value)
    return backend("event").design(tree)


def makespan(point_design: OverlapDesign) -> float:
    """Of a design that breaks no rule."""
    (result,) = results(backend("fluid"), [point_design])
    assert result.status == "ok", result.reason
    return result.metrics["makespan_s"]


sizes = st.tuples(*[st.integers(64, 20000)] * 3)
degrees = st.integers(2, 32)

# Traffic


@pytest.mark.slow
@settings(max_examples=25)
@given(gpus=degrees, shape=sizes, stages=st.integers(1, 64))
def test_a_ring_reads_and_writes_what_the_accounting_of_chunks_says(
    gpus: int, shape: tuple[int, int, int], stages: int
) -> None:
    """In chunks: writes 2N and 2N - 2, reads of the reduce-scatter 2N - 1 and N - 2, the all-gather N - 1 each."""
    chunk = 2 * shape[0] * shape[1] / gpus
    parts = {
        name: traffic(lower(point(name, gpus, shape, schedule__num_chunks=stages))) for name in (SEQUENTIAL, *TRACKED)
    }
    for name, parts_of_gpu in parts.items():
        tracks = name != SEQUENTIAL
        writes = parts_of_gpu["GEMM writes"] + parts_of_gpu["RS writes"]
        assert writes / chunk == pytest.approx(2 * gpus - 2 * tracks, rel=1e-9)
        assert parts_of_gpu["RS reads"] / chunk == pytest.approx(
            gpus - 2 if tracks else 2 * gpus - 1, rel=1e-9, abs=1e-9
        )
        assert parts_of_gpu["AG reads"] / chunk == pytest.approx(gpus - 1, rel=1e-9)
        assert parts_of_gpu["AG writes"] / chunk == pytest.approx(gpus - 1, rel=1e-9)


@pytest.mark.parametrize("topology", ["mesh", "switch"])
@given(gpus=degrees)
@settings(max_examples=8)
def test_stores_to_their_owners_need_no_reads(topology: str, gpus: int) -> None:
    """Without a ring: sequentially as much as on one, tracked N chunks of updates in all."""
    ring, two = (
        traffic(lower(point(name, gpus, (4096, 4096, 4096), system__node__topology=topology)))
        for name in (SEQUENTIAL, "t3")
    )
    chunk = 2 * 4096 * 4096 / gpus
    assert (ring["GEMM writes"] + ring["RS writes"]) / chunk == pytest.approx(2 * gpus)
    assert ring["RS reads"] / chunk == pytest.approx(2 * gpus - 1)
    assert (two["GEMM writes"] + two["RS writes"]) / chunk == pytest.approx(gpus)
    assert two["RS reads"] == 0


# Time


@pytest.mark.nightly
@settings(max_examples=25)
@given(gpus=st.integers(3, 32), shape=st.tuples(*[st.integers(2048, 16384)] * 3), link=st.floats(2e10, 1e12))
def test_without_contention_chunks_follow_the_recursion_of_the_paper(
    gpus: int, shape: tuple[int, int, int], link: float
) -> None:
    """f_0 = max(g/N, c/L) + l, f_s = max((s + 1) g/N, f_{s-1}) + c/L + l, T = max(g, f_{N-2}).

    Derived in docs/explanation/schedules.md.
    """
    free: dict[str, Any] = {
        "system__gpu__hbm_bytes_per_s": 1e16,
        "system__gpu__pim__stacks": 64,
        "schedule__num_chunks": 1024,
    }
    free |= {"system__gpu__dma__bytes_per_s": 1e13}
    free |= {"system__gpu__pim__tccdl_s": 1e-12, "system__gpu__gemm__assignment": "dynamic"}
    design = point("t3_fair", gpus, shape, pattern="reduce_scatter", system__node__link_bytes_per_s=link, **free)
    latency, size = 0.5e-6, design.workload.overlap().gemm
    g = float(stage_gemm(design.system.gpu, (size.m, size.n, size.local_k), precision="fp16", bypass=True).compute_s)
    hop = 2 * shape[0] * shape[1] / gpus / link
    reached = max(g / gpus, hop) + latency
    for place in range(1, gpus - 1):
        reached = max((place + 1) * g / gpus, reached) + hop + latency
    expected = max(g, reached)
    finer = max(g, hop * gpus) / -(-1024 // gpus)  # of a chunk's pieces one is still on its way
    assert expected - 1e-9 <= makespan(design) * (1 + 1e-9) + finer
    assert makespan(design) <= expected * (1 + 1e-6) + finer


@pytest.mark.slow
@settings(max_examples=25)
@given(gpus=degrees, shape=sizes, schedule=st.sampled_from(TRACKED), topology=st.sampled_from(TOPOLOGIES))
def test_no_policy_beats_the_ideal(gpus: int, shape: tuple[int, int, int], schedule: str, topology: str) -> None:
    where: dict[str, Any] = {"system__node__topology": topology}
    tracked, bound = (makespan(point(name, gpus, shape, **where)) for name in (schedule, "t3_ideal_nmc"))
    assert tracked >= bound * (1 - 1e-9)


@pytest.mark.slow
@settings(max_examples=25)
@given(gpus=degrees, shape=st.tuples(*[st.integers(2048, 20000)] * 3), topology=st.sampled_from(TOPOLOGIES))
def test_arbitration_is_not_slower_than_one_queue(gpus: int, shape: tuple[int, int, int], topology: str) -> None:
    """Greedy sharing is not monotone to the bit: half a per cent is allowed."""
    where: dict[str, Any] = {"system__node__topology": topology, "schedule__occupancy_threshold": 10**6}
    one_queue = makespan(point("t3", gpus, shape, system__node__topology=topology))
    assert makespan(point("t3_mca", gpus, shape, **where)) <= one_queue * 1.005


def test_a_gemms_own_updates_are_served_last_under_arbitration() -> None:
    for name, last in (("t3", 0), ("t3_fair", 0), ("t3_ideal", 0), ("t3_ideal_nmc", 1), ("t3_mca", 1)):
        graph = lower(point(name))
        served = {
            kind: {int(graph.priority[task]) for task in range(graph.num_tasks) if graph.kinds[task] == kind}
            for kind in ("gemm", "transfer", "store")
        }
        assert served == {"gemm": {0}, "transfer": {0}, "store": {last}}


@settings(max_examples=15)
@given(
    schedule=st.sampled_from(TRACKED),
    units=st.lists(st.sampled_from([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]), min_size=2, max_size=2).map(sorted),
)
def test_more_units_at_the_banks_are_never_slower_by_more_than_an_order_of_events(
    schedule: str, units: list[float]
) -> None:
    """Greedy sharing is not monotone to the bit: a per cent is allowed."""
    few, more = (makespan(point(schedule, system__gpu__pim__units_per_bank=count)) for count in units)
    assert more <= few * 1.01


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=5)
@given(gpus=degrees, shape=sizes, topology=st.sampled_from(TOPOLOGIES))
def test_exact_engines_agree_and_losses_add_up(
    schedule: str, gpus: int, shape: tuple[int, int, int], topology: str
) -> None:
    design = point(schedule, gpus, shape, system__node__topology=topology)
    by_engine = [results(backend(engine), [design])[0].metrics for engine in ("event", "fluid")]
    assert by_engine[0] == pytest.approx(by_engine[1], rel=1e-9, abs=1e-15)
    lost = sum(
        by_engine[0][f"{name}_s"] for name in ("contention", "decomposition", "starvation", "launch", "dependency")
    )
    assert by_engine[0]["makespan_s"] - by_engine[0]["ideal_s"] == pytest.approx(lost, rel=1e-9, abs=1e-12)
    assert by_engine[0]["ideal_s"] <= by_engine[0]["makespan_s"] * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["t3", "t3_mca"])
def test_a_grid_of_hardware_is_its_designs_alone_to_the_bit(schedule: str) -> None:
    axes = {
        "system.gpu.llc.bytes": np.array([4e6, 16e6, 64e6]),
        "system.gpu.num_cus": np.array([60, 80, 200]),  # 200 x 2 workgroups are more than the tracker counts
        "workload.operators.gemm.k": np.array([4096, 17024]),
    }
    batch = Batch(Batch(point(schedule), axes).at(0), axes)
    together = evaluated(backend("fluid"), batch)
    assert {result.status for result in together} == {"ok", "infeasible"}
    assert together == [evaluated(backend("fluid"), Batch(design))[0] for design in batch.designs()]


@settings(max_examples=15)
@given(gpus=st.integers(4, 16), shape=st.tuples(*[st.integers(4096, 16384)] * 2, st.integers(8192, 32768)))
def test_one_queue_delays_a_gemm_by_the_bursts_that_its_stages_leave(gpus: int, shape: tuple[int, int, int]) -> None:
    """By twice the time that it takes to store them at most, as what comes from others shares the memory."""
    tiles: dict[str, Any] = {"pattern": "reduce_scatter", "system__node__link_bytes_per_s": 1e13}
    one_queue, fair = (results(backend("fluid"), [point(name, gpus, shape, **tiles)])[0] for name in ("t3", "t3_fair"))
    burst = 2 * shape[0] * shape[1] * (1 - 1 / gpus) * 2 / 0.9e12
    assert fair.metrics["makespan_s"] * (1 - 1e-9) <= one_queue.metrics["makespan_s"]
    assert one_queue.metrics["makespan_s"] <= fair.metrics["makespan_s"] + 2 * burst


def staged(shape: tuple[int, int, int], size: float = 16e6) -> StagedGemm:
    tree = merged(shipped("system")["t3_ring"], {"gpu": {"llc": {"bytes": size}}})
    return stage_gemm(ScheduleSystem.of(tree).gpu, shape, precision="fp16", bypass=True)


waits = st.floats(1e-7, 1e-3)


@settings(max_examples=40)
@given(shape=sizes, queue=waits, steps=st.integers(1, 400), factor=st.floats(1, 20))
def test_reads_wait_longer_behind_a_longer_queue_and_less_before_a_larger_cache(
    shape: tuple[int, int, int], queue: float, steps: int, factor: float
) -> None:
    short, long = (float(staged(shape).queue_share(length, steps)) * length for length in (queue, queue * factor))
    assert 0 <= short <= long + 1e-15
    assert long <= queue * factor
    larger = staged(shape, 16e6 * factor)
    assert 0 < float(larger.miss_share) <= 1
    assert float(larger.queue_share(queue, steps)) <= float(staged(shape).queue_share(queue, steps)) + 1e-9


@settings(max_examples=15)
@given(share=st.floats(0.02, 0.5), threshold=st.integers(1, 1000))
def test_communication_has_the_share_of_the_memory_that_it_is_guaranteed(share: float, threshold: int) -> None:
    """Beside reads that could fill it, by HBM time, one flow on a ring, and no more than the threshold leaves."""
    graph = lower(point("t3_mca", schedule__guaranteed_share=share, schedule__occupancy_threshold=threshold))
    busy = graph.resources.index("hbm time")
    uses = {int(task): place for place, task in enumerate(graph.use_task) if graph.use_resource[place] == busy}
    (reads,) = (task for task, name in enumerate(graph.tasks) if name == "gemm 9")
    (sends,) = (task for task, name in enumerate(graph.tasks) if name == "forward 3")
    weights = [graph["weight"][0, task] * graph["use"][0, uses[task]] for task in (reads, sends)]
    assert weights[1] / sum(weights) == pytest.approx(share)
    queue = graph["capacity"][0, graph.resources.index("hbm queue")]
    assert queue / graph["capacity"][0, busy] == pytest.approx(threshold / (1 + threshold))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("system__gpu__dma__bytes_per_s", 2e10),
        ("system__gpu__dma__setup_s", 1e-4),
        ("system__node__hop_latency_s", 1e-4),
    ],
)
def test_what_forwards_a_chunk_is_as_fast_as_its_hardware(path: str, value: float) -> None:
    shape = (8192, 4256, 4256)  # of a GEMM that ends before its reduction
    slower: dict[str, Any] = {path: value}
    assert makespan(point("t3_fair", shape=shape, **slower)) > makespan(point("t3_fair", shape=shape)) * 1.05


# Rules


@pytest.mark.parametrize(
    ("schedule", "over", "message"),
    [
        ("t3", {"system__gpu__tracker__num_entries": 64}, "has fewer entries than workgroups are in flight (160)"),
        ("t3", {"system__gpu__tracker": None}, "system.gpu.tracker"),
        ("t3", {"system__gpu__pim": None}, "system.gpu.pim"),
        ("t3", {"system__gpu__gemm__tile_depth": None}, "system.gpu.gemm.tile_depth"),
        (SEQUENTIAL, {"system__gpu__llc": None}, "system.gpu.llc"),
        (SEQUENTIAL, {"system__node__num_gpus": 4}, "system.node.num_gpus = 4"),
    ],
)
def test_what_a_design_lacks_is_told(schedule: str, over: dict[str, Any], message: str) -> None:
    (result,) = results(backend("fluid"), [point(schedule, **over)])
    assert result.status == "infeasible"
    assert message in result.reason


# The cache


@pytest.mark.slow
@settings(max_examples=40)
@given(shape=sizes, size=st.floats(1e5, 1e9), factor=st.floats(1, 10))
def test_reads_lie_between_once_and_every_pass_and_fall_with_cache_and_bypass(
    shape: tuple[int, int, int], size: float, factor: float
) -> None:
    def reads(amount: float, *, bypass: bool) -> float:
        tree = merged(shipped("system")["t3_ring"], {"gpu": {"llc": {"bytes": amount}}})
        return float(stage_gemm(ScheduleSystem.of(tree).gpu, shape, precision="fp16", bypass=bypass).read_bytes)

    m, n, k = shape
    once = 2 * k * (m + n)
    assert once * (1 - 1e-9) <= reads(size, bypass=True) <= reads(size, bypass=False) * (1 + 1e-9)
    assert reads(size * factor, bypass=False) <= reads(size, bypass=False) * (1 + 1e-9)
    assert reads(1e17, bypass=False) == pytest.approx(once)


# The study


def ran(study: str, *words: str) -> Path:
    assert main([f"study={study}", "tracking=none", "store=none", "timeline=false", *words]) == 0
    (folder,) = Path(f"outputs/{study}").glob("2*")
    return folder


@pytest.mark.nightly
def test_the_study_draws_and_projects_without_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = ran("t3")
    assert json.loads((folder / "claims.json").read_text("utf-8")) == []
    headline = json.loads((folder / "summary.json").read_text("utf-8"))["answer"]
    assert headline.startswith("T3-MCA makes sub-layers 1.34x as fast, ")
    assert headline.endswith(" of 16 cases of megagpt2 and tnlg")
    drawn = {path.stem for path in (folder / "figures").glob("*.png")}
    assert drawn == {"sublayers_75GBps", "sublayers_150GBps", "arbitration", "traffic", "projection"}
    projected = pd.read_parquet(folder / "projection.parquet")
    best = pd.read_parquet(folder / "results.parquet")["speedup"].max()
    assert 1 <= projected["model_speedup"].max() < best  # a model gains less than its sub-layers
