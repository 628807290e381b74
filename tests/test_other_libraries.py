"""What other software of collectives would save of a step: of which exchanges, by which software, how surely."""

from __future__ import annotations

import math
from typing import Any

import pytest

from simulators.costs.collective import collective_seconds
from simulators.costs.collective_software import Call, all_software
from simulators.costs.other_software import ratio_error, ratio_gpus
from simulators.hardware.machine import tree_of
from simulators.steps.backend import StepBackend, metrics_of
from simulators.steps.design import StepDesign
from simulators.steps.judge.other_libraries import Saving, savings
from simulators.workloads.model_zoo import model_tree, option_tree
from studies.plan.libraries import saves_text

BACKEND = StepBackend()


def decoding(system: str, tp: int = 8, **run: Any) -> StepDesign:
    """A step that generates a token of each of 64 sequences, by Llama 3 70B."""
    return BACKEND.design(
        {
            "system": tree_of(system),
            "model": model_tree("llama3_70b"),
            "run": {"mode": "decode", "batch": 64, "sequence_length": 2048, "precision": "bf16", **run},
            "parallel": {"tp": tp, "pp": 1, "dp": 1},
            "optimizer": option_tree("optimizer", "adam"),
            "kernels": option_tree("kernels", "flash"),
        }
    )


@pytest.mark.parametrize("system", ["h100_8", "mi300x_8", "b200_8"])
def test_small_sums_of_a_step_are_faster_by_software_of_short_latency(system: str) -> None:
    step = decoding(system)
    (saving,) = (saving for saving in savings(step) if saving.pattern == "all_reduce")
    seconds = float(collective_seconds(step.system, "all_reduce", saving.payload_bytes, 8, saving.software))
    assert saving.software_s == pytest.approx(seconds)
    assert saving.software_s < saving.library_s
    assert saving.payload_bytes == 64 * 8192 * 2
    assert saving.calls == 2 * 80 + 1  # after attention and the second product of a layer, and of the embedding
    assert saving.saved_s < float(metrics_of(step)["serialized_s"])
    least, most = saving.interval_s
    assert least < saving.saved_s < most


def test_software_that_sends_less_than_it_is_given_is_not_proposed() -> None:
    names = [name for software in all_software() for name in software.names]
    lossy, of_fp16 = ({name for name in names if Call(name).is_lossy_for(element)} for element in ("bf16", "fp16"))
    assert lossy == {"quick_reduce:fp16", "quick_reduce:int4", "quick_reduce:int6", "quick_reduce:fp8"}
    assert of_fp16 == lossy - {"quick_reduce:fp16"}
    assert not {saving.software for saving in savings(decoding("mi300x_8"))} & lossy


def test_a_step_of_one_gpu_a_layer_has_nothing_to_save() -> None:
    assert not list(savings(decoding("h100_8", tp=1)))


def test_an_interval_is_wider_for_what_is_called_more_often() -> None:
    (saving,) = (saving for saving in savings(decoding("h100_8")) if saving.pattern == "all_reduce")
    least, most = saving.interval_s
    assert most - least == pytest.approx(2 * saving.calls * saving.software_s * math.sinh(ratio_error()))


def test_only_gpus_with_measured_ratios_are_told_to_be_surely_faster() -> None:
    """The interval is of rows of other GPUs elsewhere, which do not say how far off it is."""
    saving = Saving("tp", "all_reduce", 1e6, 160, 50e-6, 10e-6, "nccl_symmetric")
    assert saving.interval_s[0] > 0
    assert {name: "surely" in saves_text(saving, 0.01, name) for name in (*ratio_gpus(), "mi300x", "my_gpu")} == {
        **dict.fromkeys(ratio_gpus(), True),
        "mi300x": False,
        "my_gpu": False,
    }
