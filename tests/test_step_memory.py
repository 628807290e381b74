"""Memory of training steps: what software keeps of activations, what waits at the host, and what ran elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dse.errors import ConfigError
from simulators.workloads.model_zoo import model_tree
from tests.iterations import BACKEND, metrics, step
from validation.published_tables import read_throughput

LLAMA = model_tree("llama3_8b")
NVIDIA = ("megatron_bridge", "nemo")


def of_llama(values: dict[str, object], kernels: str = "megatron_2026") -> dict[str, float]:
    run = {"run.precision": "bf16", "run.batch": 1, "run.sequence_length": 4096, **values}
    return metrics(run, system="b200_8", kernels=kernels, model=LLAMA)


@given(products=st.sampled_from(["fp8", "mxfp8", "nvfp4"]))
def test_software_that_casts_by_tiles_keeps_what_it_cast(products: str) -> None:
    wide, narrow = of_llama({}), of_llama({"run.products": products})
    assert narrow["activation_bytes"] < wide["activation_bytes"]
    as_typed = of_llama({"run.products": "fp8", "run.activations": "fp8"})
    assert of_llama({"run.products": "fp8"})["activation_bytes"] == as_typed["activation_bytes"]
    # PyTorch's float8 products keep inputs in 16 bits and cast them again
    torch = [of_llama({"run.products": name}, kernels="compiled")["activation_bytes"] for name in (None, "fp8")]
    assert torch[0] == torch[1]


@pytest.mark.slow
@given(layers=st.integers(1, 40), more=st.integers(1, 8))
def test_layers_at_the_host_take_less_memory_and_never_less_time(layers: int, more: int) -> None:
    none = of_llama({})
    fewer, more_layers = (of_llama({"run.offloaded_layers": count}) for count in (layers, layers + more))
    assert more_layers["activation_bytes"] <= fewer["activation_bytes"] < none["activation_bytes"]
    assert none["iteration_s"] <= fewer["iteration_s"] <= more_layers["iteration_s"]


@given(rate=st.floats(1e9, 1e12), times=st.floats(1, 10))
def test_a_faster_link_to_the_host_never_makes_a_step_slower(rate: float, times: float) -> None:
    slow, fast = (
        of_llama({"run.offloaded_layers": 32, "system.node.host_link_bytes_per_s": value})["iteration_s"]
        for value in (rate, rate * times)
    )
    assert fast <= slow


def test_layers_wait_only_at_a_host_that_is_described() -> None:
    values = {"run.offloaded_layers": 2, "run.precision": "bf16", "system.node.host_link_bytes_per_s": None}
    (problem,) = BACKEND.problems(step(values, system="h100_8", kernels="flash", model=LLAMA))
    assert "system.node.host_link_bytes_per_s" in str(ConfigError([problem]))


def test_layers_of_a_pipeline_do_not_wait_at_the_host() -> None:
    values = {"run.offloaded_layers": 2, "run.precision": "bf16", "parallel.pp": 2}
    (problem,) = BACKEND.problems(step(values, system="h100_8_ndr", kernels="flash", model=LLAMA))
    assert problem.path == "run.offloaded_layers"


@pytest.mark.more
def test_every_configuration_that_nvidia_published_fits(shared: Callable[[str], Path]) -> None:
    steps = [step for step in read_throughput(shared("data")).steps if step.table in NVIDIA]
    shares = {step.name: float(step.metrics()["memory_share"]) for step in steps}
    assert len(shares) > 60
    assert {name: share for name, share in shares.items() if share > 1} == {}
