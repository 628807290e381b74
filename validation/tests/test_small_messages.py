"""Collectives of few bytes: by protocols that a library chooses by size, against rows that nothing was fitted on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.physics import Machine
from dse.config.options import list_options
from dse.values import put
from dse_calibration.collectives import cost_of_rows, read_collectives
from dse_calibration.fit import fit
from dse_calibration.overlap_measured.gemm_collective import predict_overlaps
from dse_serving.measured import Predictor, Row, read_rows
from simulators.costs.collective import collective_cost, machine_ring
from simulators.costs.transfer import HALVES, TransferMode, alone, library_s, protocol_seconds
from simulators.hardware.device import Device
from simulators.hardware.machine import System, merged, tree_of
from simulators.hardware.network import Protocols, SizeRange
from simulators.hardware.schedule_system import ScheduleSystem
from tests.support import backend, design, results, shipped
from validation import amd_tables

MESHES = ("mi300x_8", "mi325x_8", "mi355x_8")
MI300X = {
    f"system.{key}": value for key, value in shipped("system")["mi300x_8"].items() if key not in ("sources", "name")
}
RANGED = Protocols(
    launch_s=6e-6, ll_step_s=0.1e-6, ll_share=0.3, ll128_step_s=0.6e-6, ll128_share=0.7,
    step_s=1e-6, bytes_per_s=3e11, scaling=1.0, simple_s=4e-5, ll_sizes=SizeRange(from_bytes=1024, below_bytes=2**19),
)  # fmt: skip


def all_reduce_s(machine: System, size: float, gpus: int = 8) -> float:
    return float(collective_cost("all_reduce", "ring", size, machine_ring(machine, gpus)).seconds)


@given(st.integers(2, 8), st.floats(1.0, 1e8))
def test_sizes_that_a_library_gives_to_a_protocol_take_it_and_no_others(gpus: int, size: float) -> None:
    given_to_it = RANGED.ll_sizes is not None and RANGED.ll_sizes.from_bytes <= size < RANGED.ll_sizes.below_bytes
    fastest = RANGED.model_copy(update={"ll_sizes": None})
    alike = {"ll_step_s": RANGED.ll128_step_s, "ll_share": RANGED.ll128_share}
    slow = {"ll128_step_s": 1.0, "simple_s": 1.0}  # so that LL is the fastest
    only = fastest.model_copy(update=slow if given_to_it else alike)
    assert protocol_seconds(RANGED, "all_reduce", gpus, size) == protocol_seconds(only, "all_reduce", gpus, size)


@pytest.mark.parametrize("name", MESHES)
def test_a_short_message_takes_no_less_than_its_launch_and_the_same_in_schedules(name: str) -> None:
    machine, by = ScheduleSystem.of(tree_of(name)), TransferMode("cu", 56, "all_reduce")
    sizes = 2.0 ** np.arange(4, 31)
    moving = library_s(machine, 2 * sizes * 7 / 8, by=by)
    assert moving is not None
    assert np.all(moving > 0)
    ring = machine_ring(Device.of(tree_of(name)), 8)
    assert alone(machine, sizes, by=by) == pytest.approx(collective_cost("all_reduce", "ring", sizes, ring).seconds)


def test_short_all_reduces_of_rccl_are_within_15_percent(shared: Callable[[str], Path]) -> None:
    """Rows of a file that nothing was fitted on; vLLM's own all-reduce is another kernel and is not priced."""
    table, machine = shared("data/amd/collectives_small.csv"), Device.of(tree_of("mi300x_8"))
    rows = [row for row in amd_tables.rows_of(table) if row["library"].startswith("RCCL")]
    errors = [all_reduce_s(machine, float(row["bytes"])) / (float(row["time_us"]) * 1e-6) - 1 for row in rows]
    assert len(errors) == 14
    assert float(np.median(np.abs(errors))) < 0.08
    assert abs(float(np.median(errors))) < 0.02


def all_to_alls(file: Path, of: Protocols) -> tuple[np.ndarray, np.ndarray]:
    """Errors of an all-to-all's rows, and their numbers of GPUs."""
    (rows,) = (rows for rows in read_collectives(file) if rows.kind == "all_to_all")
    return cost_of_rows(of, rows).seconds[:, 0] / rows.seconds[:, 0] - 1, rows.shape["gpus"]


@pytest.mark.parametrize("gpus", [2, 4])
def test_all_to_alls_of_few_b200_are_within_10_percent(gpus: int, shared: Callable[[str], Path]) -> None:
    """Constants are of 8 GPUs, and the time of a peer of H100: no row of this file was fitted on."""
    constants = Device.of(tree_of("b200_8")).node.protocols()["all_to_all"]
    errors, counts = all_to_alls(shared("data_next/nccl_b200_all_to_all_2_4.csv"), constants)
    assert float(np.median(np.abs(errors[counts == gpus]))) < 0.07
    assert len(errors) == 44


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_rows_of_one_number_of_gpus_leave_the_time_of_a_peer_as_it_was(several: bool, tmp_path: Path) -> None:
    device = Device.of(tree_of("b200_8"))
    constants = device.node.protocols()["all_to_all"]
    true, table = constants.model_copy(update={"ll_step_s": 2e-6, "step_s": 2e-6}), tmp_path / "rows.csv"
    lines = ["device,op_name,nccl_dtype,num_gpus,message_size,latency"]
    for gpus in (2, 4, 8) if several else (8,):
        for size in 4 ** np.arange(5, 15):
            seconds = float(protocol_seconds(true, "all_to_all", gpus, size))
            lines.append(f"mine,alltoall,int8,{gpus},{size},{1e3 * seconds}")
    table.write_text("\n".join(lines) + "\n")
    fitted = fit(device, read_collectives(table)).collectives["all_to_all"]
    assert isinstance(fitted, Protocols)
    assert (fitted.ll_step_s == constants.ll_step_s) is not several
    assert fitted.ll_step_s == pytest.approx(2e-6 if several else constants.ll_step_s, rel=0.3)
    errors, _ = all_to_alls(table, fitted)
    assert float(np.median(np.abs(errors))) < 0.05


@functools.cache
def connected() -> list[tuple[str, System]]:
    """Shipped machines whose node has a library of collectives."""
    machines = {name: Machine.named(name).iterations for name in list_options("system")}
    several = {name: of for name, of in machines.items() if of is not None and of.node is not None}
    return [(name, of) for name, of in several.items() if of.node.library and of.node.num_gpus > 1]


@pytest.mark.slow
@given(st.integers(0, 99), st.sampled_from(HALVES), st.integers(1, 4), st.floats(1.0, 1e10))
def test_a_half_of_an_all_reduce_is_no_cheaper_than_half_where_it_was_not_measured(
    place: int, pattern: Literal["all_gather", "reduce_scatter"], doublings: int, size: float
) -> None:
    name, machine = connected()[place % len(connected())]
    library = machine.node.library
    assert library is not None
    gpus = min(2**doublings, machine.node.num_gpus * (1 if library.network_bytes_per_s is None else 2))
    measured = machine.node.protocols() if gpus <= machine.node.num_gpus else machine.node.network()
    if pattern in measured and machine.costs.collective == "library":
        return
    ring = machine_ring(machine, gpus)
    half, sum_s = (float(collective_cost(kind, "ring", size, ring).seconds) for kind in (pattern, "all_reduce"))
    assert half >= 0.5 * sum_s * (1 - 1e-9), (name, gpus)


def test_half_of_an_all_reduce_over_links_is_what_links_carry_where_they_bind() -> None:
    """Large all-gathers of MI300X take longer over links than half of RCCL's all-reduce; short ones do not."""
    machine = Device.of(tree_of("mi300x_8"))
    sizes, ring = np.array([2.0**20, 2.0**30]), machine_ring(machine, 8)
    links = replace(ring, network=None, links=put(machine, "costs.collective", "links"))
    ours, carried = (collective_cost("all_gather", "ring", sizes, group).seconds for group in (ring, links))
    assert ours[0] > 1.2 * carried[0]
    assert ours[1] == carried[1]


@pytest.mark.parametrize("rows", [64, 1024, 65536])
def test_a_schedule_pays_for_an_all_gather_what_it_takes_alone(rows: int) -> None:
    """Beside no GEMM, over links or as the library: both doors differ by the same time."""
    by, makespans, alone_s = TransferMode("cu", 56, "all_gather"), list[float](), list[float]()
    for model in ("library", "links"):
        costs = {"system.costs": {"gemm": "waves", "collective": model}}
        sizes = {"workload.operators.gather.rows": rows, "workload.operators.gather.cols": 8192}
        sizes |= {"workload.operators.gemm.m": rows}
        point = design("serial", {**MI300X, **costs, "schedule.comm_engine": "cu", **sizes}, pattern="all_gather")
        (result,) = results(backend("fluid"), [point])
        makespans.append(float(result.metrics["makespan_s"]))
        machine = ScheduleSystem.of(merged(tree_of("mi300x_8"), {"costs": costs["system.costs"]}))
        alone_s.append(float(alone(machine, 2 * rows * 8192, by=by)))
    assert makespans[0] - makespans[1] == pytest.approx(alone_s[0] - alone_s[1], rel=1e-6, abs=1e-12)
    assert (alone_s[0] > alone_s[1]) is (rows < 65536)


def test_fused_kernels_on_small_products_lose_as_measured(shared: Callable[[str], Path]) -> None:
    """Eleven rows of kraken and Helion that nothing was fitted on; those that their source calls erratic have none."""
    predicted, skipped = predict_overlaps(shared("data/fused_overlap/gemm_collective_small.csv"))
    rows = [row for row in predicted if not row.fitted and row.software == "triton_distributed"]
    assert len(rows) == 11
    assert skipped == {"method torch symm_mem fused: no implementation describes it": 9}
    assert float(np.median([abs(row.error) for row in rows])) < 0.2
    assert all(row.right_sign for row in rows)


@given(st.integers(2, 64), st.floats(1.0, 1e9))
def test_sums_across_nodes_take_a_tree_of_them_and_chains_inside(nodes: int, size: float) -> None:
    """What was not measured across nodes takes the launch and the steps of short messages that were."""
    machine = Device.of(tree_of("h100_8_ndr"))
    library, ring = machine.node.library, machine_ring(machine, 8 * nodes)
    sums = None if library is None else library.network_sums
    assert sums is not None
    seconds = float(collective_cost("all_reduce", "tree", size, ring).seconds)
    assert seconds >= sums.launch_s + 2 * (np.ceil(np.log2(nodes)) + 7) * sums.step_s * (1 - 1e-9)
    assert all_reduce_s(machine, size) < all_reduce_s(machine, size, 8 * nodes)


@pytest.mark.more
def test_tokens_of_tensor_parallelism_over_two_nodes_take_what_was_measured(shared: Callable[[str], Path]) -> None:
    """DeepSeek-R1 by SGLang on 2 x 8 H100, one request: no GPU reads sums of another node. Nothing was fitted on it."""
    data = shared("data")
    near = next(
        row
        for row in read_rows(data, "serving/silicon.csv")
        if (row.cells["backend"], row.cells["mode"], row.cells["model_path"].rpartition("/")[2])
        == ("sglang", "agg", "DeepSeek-R1")
    )
    of_engine = {"silicon_data_source": "", "system": "h100_sxm", "tp_size": "16", "moe_tp_size": "16"}
    predictor, errors = Predictor(), []
    for row in amd_tables.rows_of(data / "serving" / "deepseek_r1_two_nodes.csv"):
        requests, prompt, tokens = re.findall(r"\d+", row["op"])
        seconds = [float(number) * 1e-3 for number in re.findall(r"[\d.]+(?= ms)", row["note"])]
        cells = {"id": row["op"], "isl": prompt, "osl": tokens, "batch_size": requests}
        point = predictor.predict(Row({**near.cells, **of_engine, **cells}, *seconds))
        assert point is not None
        errors.append(point.tpot_error)
    assert len(errors) == 7
    assert float(np.median(np.abs(errors))) < 0.15
