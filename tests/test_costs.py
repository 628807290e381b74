"""One machine, one physics: an operator costs the same by whatever backend it is asked, if the model is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.costs.gemm import Gemms, GemmShape, WaveGemms, gemm_cost, gemms_of
from simulators.costs.gemm.fitted import FittedGemms, products_of, quickest
from simulators.costs.gemm.tiles import TileShape, tile_seconds
from simulators.costs.transfer import TransferMode, alone, library_cus
from simulators.hardware import machine
from simulators.hardware.device import Device
from simulators.hardware.parts import Tile
from simulators.hardware.schedule_system import ScheduleSystem, links_of
from simulators.steps.operators.work import Exchange, Op, Platform, Product, collective, operator_costs
from simulators.steps.spread.groups import groups
from simulators.workloads.model import Parallel
from tests.support import backend, design, results, shipped

GEMMS = [
    (tokens, outputs, depth)
    for tokens in (8, 16, 64, 200, 512, 1024, 4096, 8192)
    for outputs, depth in ((1024, 8192), (4096, 4096), (8192, 3584), (28672, 8192), (10240, 1280))
]
MODELS = ("waves", "fitted")


def described(name: str, model: str) -> dict[str, Any]:
    """Tree of a shipped machine whose GEMMs are costed by a model."""
    return machine.merged(shipped("system")[name], {"costs": {"gemm": model}})


def by_schedules(tree: dict[str, Any], sizes: tuple[int, int, int]) -> float:
    """Time of a GEMM that runs alone in a serial schedule, with its launch."""
    changes = {f"system.{key}": value for key, value in tree.items() if key != "sources"}
    point = design("serial", {**changes, "workload.operators.gemm.shards": 1}, shape=sizes)
    (result,) = results(backend("analytic", "fluid"), [point])
    assert result.status == "ok", result.reason
    return float(result.metrics["gemm_s"])


def by_iterations(device: Device, sizes: list[tuple[int, int, int]]) -> list[float]:
    """Times of linear layers as operators of an iteration."""
    gemms = gemms_of(device, "bf16")
    ops = [Op("linear", "linear", "forward", Product(n, m, k, transposed=True)) for m, n, k in sizes]
    costs = operator_costs(ops, Platform(FittedGemms.of(device, "bf16"), gemms))
    return [float(cost.seconds) for cost in costs]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["h100_8", "a100_8"])
def test_every_backend_gives_the_same_gemm_the_same_time(name: str, model: str) -> None:
    tree = machine.merged(described(name, model), {"gpu": {"loaded": None}})  # at the clock of kernels alone
    device = Device.of(tree)
    iterations = by_iterations(device, GEMMS)
    schedules = [by_schedules(tree, sizes) for sizes in GEMMS]
    assert schedules == pytest.approx(iterations, rel=1e-12, abs=0)


SIZES = st.sampled_from([1, 16, 64, 4096]) | st.integers(1, 20000)
SHAPES = st.tuples(SIZES, SIZES, SIZES)


@st.composite
def gpus(draw: st.DrawFn) -> Gemms:
    """A shipped GPU as one of the models reads it."""
    name, precision = draw(st.sampled_from([("h100_8", "bf16"), ("mi355x_8", "bf16"), ("v100_8", "fp32")]))
    model = draw(st.sampled_from(MODELS))
    tree = described(name, model)
    return gemms_of(ScheduleSystem.of(tree), precision)


COLLECTIVES = [
    (pattern, gpus, mib)
    for pattern in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
    for gpus, mib in ((2, 1), (4, 8), (8, 0.5), (8, 64), (8, 512))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100_8", "mi300x_8"])
def test_every_backend_gives_the_same_collective_the_same_time(name: str) -> None:
    """By links: a collective alone in a serial schedule, and in an iteration."""
    tree = machine.merged(shipped("system")[name], {"costs": {"collective": "links"}})
    device = Device.of(tree)
    for pattern, gpus, mib in COLLECTIVES:
        payload = int(mib * 2**20)
        group = groups(device, Parallel(tp=gpus, pp=1, dp=1))["tp"]
        exchange = float(collective(Exchange(pattern, payload), group).seconds)  # type: ignore[arg-type]
        system = links_of(ScheduleSystem.of(tree), gpus)
        by = TransferMode("cu", library_cus(system, pattern), pattern)  # type: ignore[arg-type]
        assert exchange == pytest.approx(float(alone(system, payload, by=by)), rel=1e-12, abs=0)
        assert exchange == pytest.approx(collective_in_a_schedule(tree, pattern, (gpus, payload)), rel=1e-12, abs=0)


def collective_in_a_schedule(tree: dict[str, Any], pattern: str, size: tuple[int, int]) -> float:
    """Time of a collective of (GPUs, bytes) in a serial schedule, in which nothing else runs beside it."""
    gpus, payload = size
    changes = {f"system.{key}": value for key, value in tree.items() if key != "sources"}
    changes |= {"system.node": {**tree["node"], "num_gpus": gpus}, "workload.operators.gemm.shards": gpus}
    changes |= {"workload.operators.gather.rows": payload // 2048, "workload.operators.gather.cols": 1024}
    small = {"workload.operators.gemm.m": 64, "workload.operators.gemm.n": 64, "workload.operators.gemm.k": 64}
    if pattern == "all_reduce":  # has no GEMM that it belongs to in this schedule
        changes |= {f"workload.operators.{name}.after": [] for name in ("gather", "gemm")}
        changes["workload.operators.gemm.shards"] = 1
    changes |= {"schedule.comm_engine": "cu", "system.gpu.contention.late_start": 0.0}
    point = design("serial", {**changes, **small}, pattern=pattern)
    (result,) = results(backend("analytic", "fluid"), [point])
    assert result.status == "ok", result.reason
    return float(result.metrics["exposed_comm_s"])


@given(gpu=gpus(), shape=SHAPES, batch=st.integers(1, 64), transposed=st.booleans(), taken=st.integers(1, 40))
def test_a_gemm_costs_the_same_alone_and_in_a_batch_beside_which_others_hold_cus(
    gpu: Gemms, shape: tuple[int, int, int], batch: int, transposed: bool, taken: int
) -> None:
    kernel = GemmShape(*shape, batch=batch, transposed_a=transposed)
    alone, beside, both = (gemm_cost(gpu, kernel, taken=cus) for cus in (0, taken, np.array([0, taken])))
    # NumPy's powers and roots of one number and of many may differ in the last bit
    assert both.seconds == pytest.approx([float(alone.seconds), float(beside.seconds)], rel=1e-15)
    assert both.kernel.hbm_bytes == pytest.approx(
        [float(alone.kernel.hbm_bytes), float(beside.kernel.hbm_bytes)], rel=1e-15
    )
    assert 0 < alone.kernel.compute_s <= alone.seconds


@given(gpu=gpus(), shape=SHAPES, taken=st.integers(0, 40), more=st.integers(0, 39))
def test_a_gemm_is_never_faster_beside_more_cus_of_others_and_keeps_its_tile(
    gpu: Gemms, shape: tuple[int, int, int], taken: int, more: int
) -> None:
    few, beside_more = (gemm_cost(gpu, GemmShape(*shape), taken=cus) for cus in (taken, taken + more))
    assert beside_more.seconds >= few.seconds * (1 - 1e-12)
    few_tile, many_tile = few.kernel, beside_more.kernel
    assert (many_tile.rows, many_tile.cols, many_tile.workgroups) == (few_tile.rows, few_tile.cols, few_tile.workgroups)


@given(shapes=st.lists(SHAPES, min_size=1, max_size=20))
def test_the_compiled_search_finds_the_kernel_of_the_plain_equations(shapes: list[tuple[int, int, int]]) -> None:
    chip = FittedGemms.of(Device.of(shipped("system")["v100_8"]), "fp32")
    m, n, k = np.array(shapes, float).T
    products = products_of(chip, (m, n, k), transposed_a=True)
    times, kernel = quickest(products)
    assert tile_seconds(products, kernel).seconds == pytest.approx(times, rel=1e-12, abs=0)
    for rows, cols, splits in ((128, 128, 1), (64, 32, 2), (32, 128, 8)):
        other = tile_seconds(products, TileShape(np.asarray(rows), np.asarray(cols), np.asarray(splits))).seconds
        assert (other >= times * (1 - 1e-12))[~np.asarray(products.few)].all()


@given(shape=SHAPES, cus=st.integers(1, 304))
def test_stream_k_loses_no_wave_and_pays_with_partial_sums(shape: tuple[int, int, int], cus: int) -> None:
    gpu = replace(WaveGemms.of(ScheduleSystem.of(shipped("system")["mi300x_8"]).gpu, "bf16"), cus=cus)
    tiles = (Tile(rows=256, cols=256, efficiency=1.0),)
    dealt, streamed = (
        gemm_cost(
            replace(gpu, library=gpu.library.model_copy(update={"assignment": way, "tiles": tiles})), GemmShape(*shape)
        ).kernel
        for way in ("static", "stream_k")
    )
    assert streamed.compute_s <= dealt.compute_s * (1 + 1e-12)
    assert streamed.workgroups == min(cus, dealt.workgroups)
    sums = 8 * 256 * 256 * streamed.workgroups
    assert streamed.hbm_bytes == pytest.approx(dealt.hbm_bytes + sums, rel=1e-12, abs=0)


def test_a_format_without_a_peak_and_constants_that_are_missing_are_refused_by_path() -> None:
    fp8 = {"workload.operators.gemm.precision": "fp8", "workload.operators.gather.precision": "fp8"}
    for model, path in (("waves", "system.gpu.peak_flop_per_s.fp8"), ("fitted", "system.gpu.efficiency.fp8")):
        tree = described("a100_8", model)
        point = design("serial", {**{f"system.{key}": value for key, value in tree.items() if key != "sources"}, **fp8})
        texts = [str(problem) for problem in backend("analytic", "fluid").problems(point)]
        assert len(texts) == 1
        assert texts[0].startswith(f"{path}: is missing")
