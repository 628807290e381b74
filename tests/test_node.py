"""The whole node: every GPU with its own HBM, links and shards, against the one GPU that stands for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dse.backend import Batch
from dse.errors import ConfigError
from search_spaces.serial import Serial
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import Contention
from simulators.hardware.schedule_system import WholeNode
from simulators.overlap.backend import OverlapBackend
from simulators.overlap.design import OverlapDesign
from simulators.overlap.node import least_shard, piece, shard
from tests.support import PATTERNS, SCHEDULES, design, design_tree, drawn, results, shipped

ONE = OverlapBackend("fluid")
EVEN = OverlapBackend("fluid", gpus="all")
TOPOLOGIES = ["mesh", "switch", "ring"]
every_topology = pytest.mark.parametrize("topology", TOPOLOGIES)


def uneven(imbalance: float) -> OverlapBackend:
    return OverlapBackend("fluid", gpus="all", imbalance=imbalance)


@st.composite
def designs(draw: st.DrawFn, schedule: str, topology: str, *, rows: Any = None, hbm: Any = None) -> OverlapDesign:
    """Of a schedule on a node; rows that GPUs and pieces divide, unless they are given."""
    gpus, knobs = draw(st.sampled_from([2, 3, 4, 8])), shipped("schedule")[schedule]
    drawn = {
        "comm_engine": draw(st.sampled_from(["dma", "cu"])),
        "priority": draw(st.sampled_from(["equal", "communication", "compute"])),
        "num_chunks": draw(st.sampled_from([1, 2, 3])),
    }
    overrides = {f"schedule.{name}": value for name, value in drawn.items() if name in knobs} | {
        "system.node.num_gpus": gpus,
        "system.node.topology": topology,
        "system.gpu.hbm_bytes_per_s": draw(st.sampled_from([3e11, 9e11, 4.3e12]) if hbm is None else hbm),
        "system.gpu.dma.num_engines": draw(st.sampled_from([2, 7, 14])),
        "system.node.link_bytes_per_s": draw(st.sampled_from([46.6e9, 4e11])),
    }
    m = draw(st.sampled_from([1, 4, 16]).map(lambda factor: factor * gpus * 6 * 64) if rows is None else rows)
    shape = (m, draw(st.sampled_from([2048, 16384])), draw(st.sampled_from([6 * 128, 6 * 1024])))
    return design(schedule, overrides, shape=shape, pattern=draw(st.sampled_from(PATTERNS)))


def measured(simulator: OverlapBackend, point: OverlapDesign) -> dict[str, float]:
    (result,) = results(simulator, [point])
    assert result.status == "ok", result.reason
    return dict(result.metrics)


# Rows


@pytest.mark.slow
@given(rows=st.integers(64, 10**6), gpus=st.integers(2, 16), imbalance=st.floats(0, 0.9))
def test_uneven_shards_are_whole_rows_that_add_up_and_rise_to_the_largest_share(
    rows: int, gpus: int, imbalance: float
) -> None:
    node = design("serial", {"system.node.num_gpus": gpus}).system
    system, even = WholeNode.of(node, imbalance), WholeNode.of(node, 0.0)
    shards = [int(shard(system, rows, gpu)) for gpu in range(gpus)]
    assert sum(shards) == rows
    assert least_shard(system, rows) == min(shards)
    assert max(shards) == pytest.approx(rows / gpus * (1 + imbalance), abs=2)
    assert min(shards) == pytest.approx(rows / gpus * (1 - imbalance), abs=2)
    assert (np.diff(shards) >= -2).all()
    assert [int(shard(even, rows, gpu)) for gpu in range(gpus)] == [piece(rows, gpus, gpu) for gpu in range(gpus)]


# Against the GPU that stands for all


@pytest.mark.slow
@every_topology
@drawn(30)
@given(schedule=st.sampled_from(SCHEDULES), data=st.data())
def test_an_even_node_is_the_gpu_that_stands_for_it(schedule: str, topology: str, data: st.DataObject) -> None:
    """Every metric, whether memory is scarce or not, wherever GPUs divide the rows."""
    point = data.draw(designs(schedule, topology))
    assert measured(EVEN, point) == pytest.approx(measured(ONE, point), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("imbalance", [0.0, 0.1])
@pytest.mark.parametrize("system", ["h100_8", "mi300x_8", "l40s_8"])
def test_a_node_whose_collectives_were_measured_is_simulated_gpu_by_gpu(system: str, imbalance: float) -> None:
    """A library's rate by size is that of each GPU's own bytes."""
    tree = {
        **design_tree("serial", {"schedule.comm_engine": "cu"}, shape=(32768, 8192, 8192)),
        "system": tree_of(system),
    }
    point = ONE.design(tree)
    node, single = measured(uneven(imbalance), point), measured(ONE, point)
    assert node["comm_s"] == pytest.approx(single["comm_s"], rel=1.01 * imbalance + 1e-9)  # whole rows
    assert ONE.idle([Batch(point)], "schedule.comm_cus", 8)[0].shape == (1,)
    assert uneven(imbalance).idle([Batch(point)], "schedule.comm_cus", 8)[0].shape == (1,)


@pytest.mark.slow
@drawn(60)
@given(schedule=st.sampled_from(SCHEDULES), data=st.data())
def test_rows_that_gpus_do_not_divide_change_a_node_by_little(schedule: str, data: st.DataObject) -> None:
    """The one GPU then is the first, which holds a row more than the last: an approximation.

    Tiles that wait for single shards (`signalled`) are late together where memory serves computing first: a GPU that is
    a row ahead holds up its peers' copies. Copies by DMA engines and the GEMM slow one another by more than a third, so
    that what ends a row earlier shifts what it slows.
    """
    topology = data.draw(st.sampled_from(TOPOLOGIES))
    point = data.draw(designs(schedule, topology, rows=st.integers(4000, 30000)))
    node, single = measured(EVEN, point), measured(ONE, point)
    ranked = schedule == "signalled" and point.schedule.priority == "compute"  # type: ignore[attr-defined]
    assert node["makespan_s"] == pytest.approx(single["makespan_s"], rel=0.2 if ranked else 0.03)
    assert single["moved_bytes"] <= node["moved_bytes"] <= single["moved_bytes"] * 1.001


@pytest.mark.slow
@drawn(60)
@given(schedule=st.sampled_from(SCHEDULES), data=st.data(), imbalance=st.floats(0.05, 0.6))
def test_uneven_shards_never_make_a_node_faster(schedule: str, data: st.DataObject, imbalance: float) -> None:
    """Where neither memory nor transfers slow a GEMM, and its time is its FLOP but for a wave in some hundreds; else
    tiles, queues and who meets whom have their say: with contention, shards that end apart can overlap less with what
    slows them.
    """
    topology = data.draw(st.sampled_from(TOPOLOGIES))
    point = data.draw(designs(schedule, topology, hbm=st.just(1e16)))
    gemm = point.system.gpu.gemm
    free = {"prologue_s": 0.0, "serial_fraction": 0.0, "tiles": (gemm.tiles[-1].model_copy(update={"rows": 8}),)}
    alone = Contention(**dict.fromkeys(Contention.model_fields, 1.0))
    changes = {"num_cus": 64, "gemm": gemm.model_copy(update=free), "contention": alone}
    gpu = point.system.gpu.model_copy(update=changes)
    point = point.model_copy(update={"system": point.system.model_copy(update={"gpu": gpu})})
    assume(not uneven(imbalance).problems(point) and not ONE.problems(point))
    node, single = measured(uneven(imbalance), point), measured(ONE, point)
    assert node["makespan_s"] >= single["makespan_s"] * (1 - 5e-3)
    assert node["moved_bytes"] > single["moved_bytes"]


# The backend


def test_a_schedule_of_one_gpu_only_is_unsupported_on_a_whole_node() -> None:
    class Own(Serial):
        """Lowers for the GPU that stands for all, whatever is asked."""

        def lower(self, system: Any, workload: Any) -> Any:
            return super().lower(ONE_SYSTEM, workload)

    point = design("serial")
    ONE_SYSTEM = point.system
    one_gpu_point = point.model_copy(update={"schedule": Own.model_construct(**dict(point.schedule))})  # type: ignore[call-overload]
    (result,) = results(EVEN, [one_gpu_point])
    assert (result.status, "one GPU only" in result.reason) == ("unsupported", True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "each"}, "simulator.gpus"),
        ({"gpus": "all", "imbalance": 1.0}, "simulator.imbalance"),
        ({"gpus": "all", "imbalance": "much"}, "simulator.imbalance"),
        ({"imbalance": 0.1}, "needs a whole node"),
    ],
    ids=str,
)
def test_a_node_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OverlapBackend("fluid", **options)


@pytest.mark.slow
@settings(max_examples=10)
@given(data=st.data())
def test_a_batch_of_nodes_equals_its_designs_alone(data: st.DataObject) -> None:
    point = data.draw(designs("hetero_fused_1d", "mesh"))
    variants = [
        point.model_copy(update={"system": point.system.model_copy(update={"gpu": gpu})})
        for gpu in (point.system.gpu.model_copy(update={"num_cus": cus}) for cus in (304, 200, 150))
    ]
    simulator = uneven(0.1)
    assert results(simulator, variants) == [results(simulator, [variant])[0] for variant in variants]
