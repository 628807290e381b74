"""GEMMs that share one GPU: kernels, occupancy, the cache, degrees of concurrency, and who picks them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.backend import Batch
from simulators.costs.gemm.sharing import SHARES, Choice, chosen, kernels
from simulators.hardware.machine import Gpu
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.overlap.backend import OverlapBackend
from tests.support import shipped

GPU: Gpu = ScheduleSystem.of(shipped("system")["mi100"]).gpu
BACKEND = OverlapBackend("fluid")
SIZES = st.integers(1, 64).map(lambda size: 64 * size)
DEGREES = st.integers(1, 16)


def makespan(shapes: list[tuple[int, int, int]], kernels_: Choice, degree: int, **knobs: Any) -> float:
    """Time of a queue."""
    gemms = [{"m": m, "n": n, "k": k} for m, n, k in shapes]
    tree = {
        "system": {**shipped("system")["mi100"], **knobs},
        "workload": {"name": "mine", "queues": [{"name": "mine", "gemms": gemms}]},
        "schedule": {**shipped("schedule")["go_kernels"], "kernels": kernels_, "num_streams": degree},
    }
    (result,) = BACKEND.evaluate([Batch(BACKEND.design(BACKEND.scenarios(tree)["mine"]))])
    assert result.ok.all()
    return float(result.column("makespan_s")[0])


@pytest.mark.slow
@given(SIZES, SIZES, SIZES)
def test_one_after_another_takes_the_sum_of_what_each_takes_alone(m: int, n: int, k: int) -> None:
    alone = float(chosen(GPU, (m, n, k), precision="fp16").seconds(GPU)) + GPU.kernel_launch_s
    assert makespan([(m, n, k)], "isolated", 1) == pytest.approx(alone, rel=1e-9)
    assert makespan([(m, n, k)] * 3, "isolated", 1) == pytest.approx(3 * alone, rel=1e-9)


@pytest.mark.slow
@given(SIZES, SIZES, SIZES, DEGREES, st.sampled_from(["isolated", "shared", "best"]))
def test_equal_gemms_at_once_take_what_the_closed_form_says(m: int, n: int, k: int, degree: int, how: Choice) -> None:
    kernel = chosen(GPU, (m, n, k), precision="fp16", degree=degree, choice=how)
    wanted = float(kernel.together(GPU, degree)) + GPU.kernel_launch_s
    assert makespan([(m, n, k)] * degree, how, degree) == pytest.approx(wanted, rel=1e-9)


@given(SIZES, SIZES, SIZES, DEGREES)
def test_globally_optimised_kernels_are_no_worse_than_the_librarys_and_no_better_than_the_best(
    m: int, n: int, k: int, degree: int
) -> None:
    times = [
        float(chosen(GPU, (m, n, k), precision="fp16", degree=degree, choice=how).together(GPU, degree))
        for how in ("best", "shared", "isolated")
    ]
    assert times == sorted(times)


@given(SIZES, SIZES, SIZES)
def test_fewer_cus_never_make_a_kernel_faster(m: int, n: int, k: int) -> None:
    times = [kernels(GPU, (m, n, k), precision="fp16", share=share).seconds(GPU) for share in SHARES]
    assert (times[0] <= times[1] * (1 + 1e-12)).all()
    assert (times[1] <= times[2] * (1 + 1e-12)).all()


def test_a_grid_of_hardware_and_shapes_is_as_its_designs_one_by_one() -> None:
    tree = {
        "system": shipped("system")["mi100"],
        "workload": {
            "name": "mine",
            "queues": [{"name": "mine", "gemms": [{"m": 256, "n": 512, "k": 512, "copies": 4}]}],
        },
        "schedule": {**shipped("schedule")["go_kernels"], "num_streams": 3},
    }
    design = BACKEND.design(BACKEND.scenarios(tree)["mine"])
    axes = {
        "system.gpu.num_cus": np.array([60, 120]),
        "system.gpu.llc.bytes": np.array([1e6, 8e6, 64e6]),
        "system.gpu.hbm_bytes_per_s": np.array([2e11, 1e12]),
        "workload.operators.g01.m": np.array([64, 2048]),
    }
    assert all(BACKEND.is_axis(path, design) for path in axes)
    batch = Batch(Batch(design, axes).at(0), axes)
    (grid,) = BACKEND.evaluate([batch])
    alone = [
        float(result.column("makespan_s")[0])
        for result in BACKEND.evaluate([Batch(point) for point in batch.designs()])
    ]
    assert grid.column("makespan_s") == pytest.approx(alone, rel=1e-12)
    assert len(set(alone)) > 4


def test_small_gemms_gain_from_company() -> None:
    small = [(128, 768, 768)] * 16
    assert makespan(small, "shared", 16) < 0.5 * makespan(small, "isolated", 1)
