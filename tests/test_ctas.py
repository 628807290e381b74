"""CTAs of a library's collectives over an axis of a step, and its clock: what they cost, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.values import put
from simulators.costs.collective import collective_cost, machine_ring
from simulators.costs.transfer import TransferMode, alone, library_fill
from simulators.hardware.machine import System, tree_of
from simulators.hardware.schedule_system import ScheduleSystem
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import StepDesign
from simulators.steps.spread.groups import groups
from simulators.workloads.model import Parallel
from simulators.workloads.model_zoo import model_tree, option_tree

BACKEND = StepBackend()
SYSTEMS = ("h100_8", "a100_8", "mi300x_8", "b200_8")


def training(**parallel: Any) -> StepDesign:
    """A step of Llama 3 8B on a node of A100, two GPUs a layer."""
    return BACKEND.design(
        {
            "system": tree_of("a100_8"),
            "model": model_tree("llama3_8b"),
            "run": {"mode": "training", "batch": 1, "sequence_length": 4096, "precision": "bf16"},
            "parallel": {"tp": 2, "pp": 1, "dp": 4, **parallel},
            "optimizer": option_tree("optimizer", "adam"),
            "kernels": option_tree("kernels", "flash"),
        }
    )


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_fewer_ctas_lengthen_collectives_of_their_axis_alone(axis: str) -> None:
    counts = (2, 4, 8, 16, 0)  # 0: as many as the library takes
    rows = [metrics_of(training(**{f"{axis}_ctas": ctas})) for ctas in counts]
    of_axis = {"tp": "serialized_s", "dp": "dp_s"}
    times = [float(row[of_axis[axis]]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[-1]
    (other,) = of_axis.keys() - {axis}
    assert len({float(row[of_axis[other]]) for row in rows}) == 1


def test_as_many_ctas_as_the_library_takes_change_nothing() -> None:
    system = tree_of("a100_8")
    most = int(system["gpu"]["cu_copy"]["num_cus"])
    assert metrics_of(training(tp_ctas=most, dp_ctas=most)) == metrics_of(training())


@pytest.mark.parametrize(("model", "collectives"), [("library", "in_switch"), ("links", "library")])
def test_fewer_ctas_are_slower_whatever_carries_the_bytes(model: str, collectives: Any) -> None:
    """Also where the switch adds, and where collectives are priced by links."""
    system = put(System.model_validate(tree_of("h100_8")), "costs.collective", model)
    group = groups(system, Parallel(tp=4, dp=2, collectives=collectives, tp_ctas=1))["tp"]
    usual = groups(system, Parallel(tp=4, dp=2, collectives=collectives))["tp"]
    algorithm = "in_switch" if collectives == "in_switch" else "ring"
    few, library = (float(collective_cost("all_reduce", algorithm, 64e6, of).seconds) for of in (group, usual))
    assert few > 1.5 * library


@pytest.mark.parametrize("clock", [None, 0.5])
def test_as_many_ctas_as_the_library_takes_are_as_fast_across_nodes(clock: float | None) -> None:
    system = System.model_validate(tree_of("mi300x_8_roce"))
    system = system if clock is None else put(system, "gpu.clock", clock)
    times = [
        float(collective_cost("all_reduce", "ring", 256e6, replace(machine_ring(system, 16), ctas=ctas)).seconds)
        for ctas in (None, system.gpu.cu_copy.num_cus)
    ]
    assert times[0] == times[1] > 0


def test_gradients_reduced_by_fewer_ctas_leave_more_to_the_backward_pass() -> None:
    """With little to reduce, all is hidden, and the CTAs that are left compute."""
    library, few = (metrics_of(training(tp=4, dp=2, dp_ctas=ctas)) for ctas in (0, 16))
    assert few["dp_s"] > library["dp_s"]
    assert few["iteration_s"] < library["iteration_s"]


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tp_ctas": 25}, "more than the library's kernels take"),
        ({"dp": 1, "dp_ctas": 8}, "which is of one GPU"),
        ({"tp": 1, "tp_ctas": 8}, "which is of one GPU"),
    ],
)
def test_ctas_that_mean_nothing_are_refused(parallel: dict[str, int], words: str) -> None:
    (problem,) = BACKEND.problems(training(**parallel))
    assert problem.path in ("parallel.tp_ctas", "parallel.dp_ctas")
    assert words in problem.rule


@pytest.mark.parametrize("name", SYSTEMS)
@given(st.floats(0.3, 1.0), st.floats(0.3, 1.0), st.floats(1e4, 1e9))
def test_a_lower_clock_lengthens_a_collective_by_as_much_in_schedules_and_steps(
    name: str, low: float, high: float, payload: float
) -> None:
    system = ScheduleSystem.of(tree_of(name))
    gpus = system.node.num_gpus
    by = TransferMode("cu", np.asarray(system.gpu.cu_copy.num_cus), "all_reduce")
    times = []
    for clock in sorted((low, high)):
        slow = put(system, "gpu.clock", clock)
        of_schedules = float(alone(slow, payload, by=by))
        of_steps = float(collective_cost("all_reduce", "ring", payload, machine_ring(slow, gpus)).seconds)
        assert of_steps == pytest.approx(of_schedules, rel=1e-9)
        times.append(of_schedules)
    assert times[0] >= times[1] * (1 - 1e-12)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_clock_of_the_data_sheet_is_that_at_which_libraries_were_measured(name: str) -> None:
    system = ScheduleSystem.of(tree_of(name))
    assert float(library_fill(put(system, "gpu.clock", 1.0), "all_reduce")) == 1.0
    assert float(library_fill(put(system, "gpu.clock", 0.5), "all_reduce")) < 1.0
